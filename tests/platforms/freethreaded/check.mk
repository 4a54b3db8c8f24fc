# The tests with a CPython without a GIL, built from source, then cseq measured beside the same CPython with one.
# PYTHON_VERSION, FREE_TESTS="free gil" tests both, FREE_TORCH, CASES; README.md.
.PHONY: check-freethreaded check-freethreaded-tsan
ENVIRONMENTS += .freethreaded-env
PYTHON_VERSION ?= 3.13
FREE_TESTS ?= free
FREE_TORCH ?= $(if $(filter 3.13,$(PYTHON_VERSION)),torch==2.12.0)
FREE_TOOLS := tests/platforms/freethreaded

# The same source: without a GIL, and with one to compare with; for ThreadSanitizer.
FREE_OPTIONS_free := --disable-gil
FREE_OPTIONS_tsan := --disable-gil --with-thread-sanitizer --with-ensurepip=no
# By its whole path: CPython 3.14 warns of an environment that is named with "..".
FREE := $(abspath .freethreaded-env)/$(PYTHON_VERSION)
$(FREE)/%/.python: $(FREE_TOOLS)/setup.sh
	$(FREE_TOOLS)/setup.sh $(PYTHON) $(PYTHON_VERSION) $(@D)/python $(FREE_OPTIONS_$*)
	touch $@

# The packages of the extra `test` but obstore, which has no wheels for a CPython without a GIL.
FREE_PACKAGES = $(shell $(FREE)/free/python/bin/python3 -c "import tomllib; \
	extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
	print(*(repr(each) for each in extras['test'] if 'obstore' not in each))")

# Each is made once, even if make reaches it only by a pattern.
.PRECIOUS: $(FREE)/%/.python $(FREE)/%/.test

# torch: the last release that has wheels for a CPython 3.13 without a GIL, without CUDA; FREE_TORCH=
# leaves it out. With a GIL it is only measured, with the same numpy.
FREE_NUMPY_gil = numpy==$(shell $(FREE)/free/venv/bin/python -c "import numpy; print(numpy.__version__)")
$(FREE)/gil/.test: | $(FREE)/free/.test
$(FREE)/%/.test: pyproject.toml | $(FREE)/%/.python
	$(call copy,$(@D)/checkout)
	$(@D)/python/bin/python3 -m venv $(@D)/venv
	$(@D)/venv/bin/pip --quiet install --prefer-binary $(BUILD_REQUIRES) $(FREE_NUMPY_$*)
	$(if $(FREE_TORCH),$(PYTHON) $(FREE_TOOLS)/install_torch.py $(@D)/venv/bin/python $(FREE_TORCH))
	cd $(@D)/checkout && ../venv/bin/python setup.py --quiet build_ext --inplace
	CSEQ_PREBUILT=1 $(@D)/venv/bin/pip --quiet install --prefer-binary --no-build-isolation \
		--editable '$(@D)/checkout' $(FREE_PACKAGES)
	touch $@

check-freethreaded: CASES := $(or $(CASES),interpreted small_threads small_processes \
	threads_tokens threads_dicts threads_small threads_python)
check-freethreaded: $(FREE)/free/.test $(FREE)/gil/.test
	$(call copy,$(FREE)/free/checkout)
	$(call copy,$(FREE)/gil/checkout)
	for folder in $(FREE)/free $(FREE)/gil; do \
		(cd $$folder/checkout && $$folder/venv/bin/python setup.py --quiet build_ext --inplace) || exit 1; \
	done
	for folder in $(addprefix $(FREE)/,$(FREE_TESTS)); do \
		(cd $$folder/checkout && env -u PYTHON_GIL $$folder/venv/bin/python -m pytest -n $(JOBS) $(ARGS)) || exit 1; \
	done
	cd $(FREE)/free/checkout && env -u PYTHON_GIL ../venv/bin/python benchmarks/run.py \
		--python $(FREE)/gil/venv/bin/python --rounds $(ROUNDS) --output build/benchmarks $(CASES)

# Threads under ThreadSanitizer, with a CPython without a GIL built for it.
check-freethreaded-tsan: $(FREE)/tsan/.python $(FREE)/free/.test
	$(call copy,$(FREE)/tsan/checkout)
	$(FREE_TOOLS)/tsan.sh $(FREE) $(ARGS)
