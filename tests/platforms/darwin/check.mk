# The tests on a Linux made to look like macOS, with the core's parts for that; sitecustomize.py.
.PHONY: check-darwin
check-darwin: $(VENV)/.test
	$(call copy,build/darwin)
	cd build/darwin && CFLAGS="-w -U__linux__ -D__APPLE__ -include $(CURDIR)/build/darwin/tests/c/darwin.h" \
		$(abspath $(PY)) setup.py --quiet build_ext --inplace
	cd build/darwin && PYTHONPATH=$(CURDIR)/build/darwin/tests/platforms/darwin $(abspath $(PY)) -m pytest -n $(JOBS) $(ARGS)
