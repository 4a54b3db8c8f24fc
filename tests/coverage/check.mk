# Which lines of cseq, its core included, the tests run.
.PHONY: check-coverage .coverage
ENVIRONMENTS += .coverage-venv
check-coverage:
	$(call in,.coverage-venv,.coverage)

# In a copy of the tree: the core is built to report its lines, and interpreters of that environment
# measure themselves. Tests of time or of tracing fail there.
.coverage: $(VENV)/.test $(VENV)/.coverage
	rm -rf build/coverage && mkdir -p build/coverage
	git ls-files -z | tar --null --files-from=- -cf - | tar -xf - -C build/coverage
	cd build/coverage && CSEQ_LINETRACE=1 $(abspath $(PY)) setup.py --quiet build_ext --inplace
	-cd build/coverage && $(abspath $(PY)) -m coverage run -m pytest -n $(JOBS) $(ARGS)
	cd build/coverage && $(abspath $(PY)) tests/coverage/covered.py
