# make test     build into .venv and run every test, in JOBS (3) processes
# make quick    the quick ones of them: all but those in tests/slow.txt
# make demo     train a small network on handwritten digits (examples/digits.py)
# make conformance  RETURNN's and torchdata's own tests, TIMES (1) in a row, with cseq's classes in place
# make conformance-torch  torch's and torchdata's loader tests, with cseq's DataLoader in place
#                (ARGS="--class module:Class --tags must,own -k ..."); tests/conformance/README.md
# make bench    cseq and its peers, measured: CASES (all), ROUNDS (5) of each, into files called NAME;
#                BESIDE=PATH measures another built checkout of cseq in the same rounds; benchmarks/README.md
# make docs     the site, into build/docs: Sphinx's warnings are errors; without torch and network
# make formats  twelve data formats, with cseq and with torch's DataLoader: FORMATS (all), ROUNDS (5);
#                first the tests of these and of docs/how-to/data; benchmarks/formats/README.md
# make gpu      on a machine with a GPU: tests/gpu, then cseq on the device, measured, into one results
#                file; TORCH is the build of torch for it; DEVICE=cpu has the CPU stand in for a GPU
# make frameworks  the recipes of docs/how-to/frameworks.md and docs/how-to/from-dataloader.md, trained with Lightning,
#                Keras and nine more
# make check-torch-versions  the tests of cseq.DataLoader with each of TORCH_VERSIONS, without CUDA, in
#                environments of their own; ARGS for pytest
# make stress   workers killed at random for SECONDS (60), from SEED (a new one)
# make interrupts  signal handlers that raise at random, TIMES (10000) in each kind of loop: KINDS (all)
# make coverage  which lines of cseq, its core included, the tests run; ARGS (all tests) for pytest
# make wine     the tests with a Windows CPython and torch, under Wine; ARGS for pytest; tests/wine/README.md
# make darwin   the tests on a Linux made to look like macOS, with the core's parts for that; ARGS for pytest;
#                tests/darwin/sitecustomize.py
# make freethreaded  the tests with a CPython without a GIL, built from source, then measured beside the
#                same CPython with one; PYTHON_VERSION (3.13), FREE_TESTS="free gil" tests both, ARGS for
#                pytest, CASES; tests/freethreaded/README.md
# make freethreaded-tsan  threads under ThreadSanitizer, with a CPython without a GIL built for it; ARGS
# make sanitize the ring's headers under ThreadSanitizer and AddressSanitizer, and its model
# make build    compile the core; `make debug` with bounds and invariants checked
# make lint     ruff, mypy, the stubs, the workflows, which wheels are built, and the C headers for other systems
# make wheels   the sdist, and wheels of it for all of PYTHONS (those of pyenv and of make freethreaded):
#                built twice, the same bytes each time; tested without torch; ARGS for pytest
# make clean    remove what was built; `make distclean` the environment too
#
# The Python that .venv is made with:  make test PYTHON=python3.13
# Arguments for pytest:                make test ARGS="-k ring -x"

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ARGS ?=
JOBS ?= 3
SECONDS ?= 60
SEED ?=
TIMES ?= 1
BENCH_VENV ?= .bench-venv
DOCS_VENV ?= .docs-venv
FORMATS_VENV ?= .formats-venv
FORMATS ?=
FRAMEWORKS_VENV ?= .frameworks-venv
COVERAGE_VENV ?= .coverage-venv
WINE_ENV ?= .wine-env
FREE_ENV ?= .freethreaded-env
PYTHON_VERSION ?= 3.13
FREE_TESTS ?= free
FREE_TORCH ?= $(if $(filter 3.13,$(PYTHON_VERSION)),torch==2.12.0)
TORCH_ENV ?= .torch-env
TORCH_VERSIONS ?= 2.4.1 2.9.1 2.13.0 2.15.0
GPU_VENV ?= .gpu-venv
DEVICE ?= cuda
COMMIT ?=
KINDS ?=
PYTHONS ?= $(or $(wildcard $(HOME)/.pyenv/versions/3.1?.*/bin/python3.1? \
	$(FREE_ENV)/*/gil/python/bin/python3.1? $(FREE_ENV)/*/free/python/bin/python3.1?t),$(PYTHON))
CASES ?=
NAME ?=
ROUNDS ?= 5
BESIDE ?=

BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
BUILD_REQUIRES := $(shell sed -n 's/^requires = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d ,)

.DELETE_ON_ERROR:
.PHONY: check-torch-versions build debug test quick conformance conformance-torch docs site bench measure formats measure-formats gpu measure-gpu frameworks recipes stress interrupts coverage measure-coverage wine darwin freethreaded freethreaded-tsan sanitize lint cross demo wheels clean distclean

# -- the environment: one stamp for each set of packages, so that a second run installs nothing

# torch first and pinned: later installs then find their torch already there.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	touch $@

# Not isolated: the compiler's tools stay in .venv, where the next build finds them at once.
$(VENV)/.test: pyproject.toml | $(VENV)/.torch
	$(PIP) install $(BUILD_REQUIRES)
	$(PIP) install --no-build-isolation --editable '.[test,returnn,torchdata]'
	touch $@

$(VENV)/.bench: benchmarks/requirements.txt | $(VENV)/.test
	$(PIP) install --requirement $<
	touch $@

$(VENV)/.formats: benchmarks/formats/requirements.txt | $(VENV)/.test
	$(PIP) install --requirement $<
	$(PY) benchmarks/formats/torchvision_cpu.py
	touch $@

# fastai and Composer ask for a torchvision that fits the torch here, or for an older torch. Neither is
# needed by the recipes, so these two come without what they ask for; requirements.txt has the rest.
$(VENV)/.frameworks: tests/frameworks/requirements.txt tests/frameworks/alone.txt | $(VENV)/.test
	$(PIP) install --requirement tests/frameworks/requirements.txt
	$(PIP) install --no-deps --requirement tests/frameworks/alone.txt
	touch $@

# cseq is there already; what its extra names is added.
$(VENV)/.%: pyproject.toml | $(VENV)/.test
	$(PIP) install 'cseq-loader[$*]'
	touch $@

# -- the verbs

# Always asked, hardly ever with anything to do: setuptools compares the times of the inputs.
build: $(VENV)/.test
	$(PY) setup.py --quiet build_ext --inplace

debug: export CSEQ_DEBUG = 1
debug: build

test: build
	$(PY) -m pytest -n $(JOBS) $(ARGS)

quick: build
	$(PY) -m pytest -n $(JOBS) -m "not slow" $(ARGS)

conformance: build $(VENV)/.conformance
	$(PY) tests/conformance/run_returnn.py $(TIMES)
	$(PY) tests/conformance/run_torchdata.py $(TIMES)

conformance-torch: build $(VENV)/.conformance
	$(PY) tests/conformance/run_torch.py $(ARGS) $(TIMES)
	$(PY) tests/conformance/run_torch.py --stateful $(ARGS) $(TIMES)

# In an environment of its own, without torch.
docs:
	$(MAKE) VENV=$(DOCS_VENV) site

$(VENV)/.docs: docs/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(BUILD_REQUIRES) 'cloudpickle>=3.0' --requirement $<
	touch $@

site: $(VENV)/.docs
	$(PY) setup.py --quiet build_ext --inplace
	$(PY) -m sphinx --fail-on-warning --nitpicky --quiet --jobs auto docs build/docs

# In an environment of its own, with the peers at the versions of benchmarks/requirements.txt.
bench:
	$(MAKE) VENV=$(BENCH_VENV) measure

measure: build $(VENV)/.bench
	$(PY) benchmarks/run.py --rounds $(ROUNDS) $(if $(NAME),--name $(NAME)) \
		$(if $(BESIDE),--beside $(BESIDE)) $(CASES)

# In an environment of its own too, with the libraries of the formats.
formats:
	$(MAKE) VENV=$(FORMATS_VENV) measure-formats

measure-formats: build $(VENV)/.formats
	$(PY) -m pytest tests/test_formats.py tests/test_examples.py -k "formats or how-to/data" $(ARGS)
	$(PY) benchmarks/formats/run.py --rounds $(ROUNDS) $(FORMATS)

# In an environment of its own, since torch is another build there than in .venv.
gpu:
	$(MAKE) VENV=$(GPU_VENV) measure-gpu

measure-gpu: build
	$(PY) benchmarks/gpu/run.py --device $(DEVICE) --rounds $(ROUNDS) $(if $(COMMIT),--commit $(COMMIT)) $(CASES)

# In an environment of its own, too: the frameworks at the versions of tests/frameworks.
frameworks:
	$(MAKE) VENV=$(FRAMEWORKS_VENV) recipes

recipes: build $(VENV)/.frameworks
	$(PY) -m pytest tests/frameworks $(ARGS)

# The Python of $(VENV), so that what is built here serves them all. Before torch 2.6, a loader has no
# `in_order`: tests that give it, for themselves or with others, are left out.
$(TORCH_ENV)/%/.made: tests/freethreaded/install_torch.py pyproject.toml | $(VENV)/.test
	$(PY) -m venv $(@D)
	$(PY) $< $(@D)/bin/python torch==$*
	$(@D)/bin/pip --disable-pip-version-check --quiet install 'numpy>=1.25' 'cloudpickle>=3.0' 'pytest>=9.0' \
		'pytest-xdist>=3.6' 'hypothesis>=6.100'
	touch $@

.PRECIOUS: $(TORCH_ENV)/%/.made

NO_IN_ORDER := -k "not order and not unsent and not pickled and not truth and not left_out"
check-torch-versions: build $(TORCH_VERSIONS:%=$(TORCH_ENV)/%/.made)
	for version in $(TORCH_VERSIONS); do \
		case $$version in 2.4.*|2.5.*) chosen='$(NO_IN_ORDER)';; *) chosen=;; esac; \
		eval PYTHONPATH=. $(TORCH_ENV)/$$version/bin/python -m pytest -n $(JOBS) $$chosen \
			tests/adapters/test_torch_*.py $(ARGS) || exit 1; \
	done

stress: build
	$(PY) tests/stress/stress.py $(SECONDS) $(SEED)

interrupts: TIMES := 10000
interrupts: build
	$(PY) tests/stress/interrupts.py $(TIMES) $(or $(SEED),random) $(KINDS)

# In an environment and a copy of the tree of their own: the core is built to report its lines, and
# interpreters of that environment measure themselves. Tests of time or of tracing fail there.
coverage:
	$(MAKE) VENV=$(COVERAGE_VENV) measure-coverage

measure-coverage: $(VENV)/.test $(VENV)/.coverage
	rm -rf build/coverage && mkdir -p build/coverage
	git ls-files -z | tar --null --files-from=- -cf - | tar -xf - -C build/coverage
	cd build/coverage && CSEQ_TRACE=1 $(abspath $(PY)) setup.py --quiet build_ext --inplace
	-cd build/coverage && $(abspath $(PY)) -m coverage run -m pytest -n $(JOBS) $(ARGS)
	cd build/coverage && $(abspath $(PY)) tests/covered.py

# Made anew when its recipe changes; build.py compiles what has changed, and copies the checkout.
$(WINE_ENV)/.made: $(addprefix tests/wine/,setup.sh requirements.txt complex.py complex.c) | $(VENV)/.wine
	tests/wine/setup.sh $(WINE_ENV) $(PY)
	touch $@

wine: $(WINE_ENV)/.made
	$(PY) tests/wine/build.py $(WINE_ENV)
	tests/wine/run.sh $(WINE_ENV) python -m pytest -n $(JOBS) $(ARGS)

# What is in the checkout now, without what was built there; what was built in the copy stays.
define copy
	mkdir -p $1
	find $1 -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
	git ls-files -z --cached --others --exclude-standard | \
		tar --null --files-from=- -cf - | tar -xf - -C $1
endef

# Without the tests of types: mypy's own code is compiled for one system.
darwin: DARWIN := $(CURDIR)/build/darwin/tests
darwin: $(VENV)/.test
	$(call copy,build/darwin)
	cd build/darwin && CFLAGS="-w -U__linux__ -D__APPLE__ -include $(DARWIN)/c/darwin.h" \
		$(abspath $(PY)) setup.py --quiet build_ext --inplace
	cd build/darwin && PYTHONPATH=$(DARWIN)/darwin $(abspath $(PY)) -m pytest -n $(JOBS) \
		--ignore tests/test_typing.py $(ARGS)

# The same source: without a GIL, and with one to compare with; for ThreadSanitizer.
FREE_OPTIONS_free := --disable-gil
FREE_OPTIONS_tsan := --disable-gil --with-thread-sanitizer --with-ensurepip=no
# By its whole path: CPython 3.14 warns of an environment that is named with "..".
FREE := $(abspath $(FREE_ENV))/$(PYTHON_VERSION)
$(FREE)/%/.python: tests/freethreaded/setup.sh
	tests/freethreaded/setup.sh $(PYTHON) $(PYTHON_VERSION) $(@D)/python $(FREE_OPTIONS_$*)
	touch $@

# Each made once, also where make got there by way of a pattern only.
.PRECIOUS: $(FREE)/%/.python $(FREE)/%/.test

# torch where it is tested: the last release that has wheels for a CPython 3.13 without a GIL, without
# CUDA; FREE_TORCH= leaves it out. With a GIL it is only measured, with the same numpy.
FREE_NUMPY_gil = numpy==$(shell $(FREE)/free/venv/bin/python -c "import numpy; print(numpy.__version__)")
$(FREE)/gil/.test: | $(FREE)/free/.test
$(FREE)/%/.test: pyproject.toml | $(FREE)/%/.python
	$(call copy,$(@D)/checkout)
	$(@D)/python/bin/python3 -m venv $(@D)/venv
	$(@D)/venv/bin/pip --quiet install --prefer-binary $(BUILD_REQUIRES) $(FREE_NUMPY_$*)
	$(if $(filter free,$*),$(if $(FREE_TORCH),\
		$(PYTHON) tests/freethreaded/install_torch.py $(@D)/venv/bin/python $(FREE_TORCH)))
	$(@D)/venv/bin/pip --quiet install --prefer-binary --no-build-isolation \
		--editable '$(@D)/checkout[test]'
	touch $@

freethreaded: CASES := $(or $(CASES),interpreted small_threads small_processes)
freethreaded: $(FREE)/free/.test $(FREE)/gil/.test
	$(call copy,$(FREE)/free/checkout)
	$(call copy,$(FREE)/gil/checkout)
	for folder in $(FREE)/free $(FREE)/gil; do \
		(cd $$folder/checkout && $$folder/venv/bin/python setup.py --quiet build_ext --inplace) || exit 1; \
	done
	for folder in $(addprefix $(FREE)/,$(FREE_TESTS)); do \
		(cd $$folder/checkout && env -u PYTHON_GIL $$folder/venv/bin/python -m pytest -n $(JOBS) $(ARGS)) || exit 1; \
	done
	for folder in $(FREE)/free $(FREE)/gil; do \
		(cd $$folder/checkout && env -u PYTHON_GIL $$folder/venv/bin/python benchmarks/run.py --no-peers \
			--rounds $(ROUNDS) --output build/benchmarks $(CASES)) || exit 1; \
	done

freethreaded-tsan: $(FREE)/tsan/.python $(FREE)/free/.test
	$(call copy,$(FREE)/tsan/checkout)
	tests/freethreaded/tsan.sh $(FREE) $(ARGS)

# The model needs spin; without it that part is left out, and says so.
sanitize:
	tests/c/run.sh $(SECONDS)
	if command -v spin; then tests/model/run.sh normal; else echo "no spin: the model is left out"; fi

demo: build $(VENV)/.demo
	$(PY) examples/digits.py

CORE := $(patsubst cseq/%.pyx,cseq.%,$(wildcard cseq/_*.pyx))

lint: build cross $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy cseq
	$(BIN)/zizmor --offline --no-progress .github
	$(PY) -m pytest tests/test_typing.py tests/test_packaging.py
	$(PY) -m mypy.stubtest --mypy-config-file pyproject.toml \
		--allowlist tests/stubtest.txt --ignore-unused-allowlist $(CORE)

# -- the C headers, as the compilers of other systems see them

C_FLAGS := -std=c11 -O2 -Wall -Wextra -Werror -Icseq/include
AS_MSVC := -fms-extensions -Wno-builtin-macro-redefined -Wno-unused-function -Wgnu -Wvla \
	-Itests/c/msvc -include as_msvc.h
ZIG_CC = $(PY) -m ziglang cc $(C_FLAGS)
TARGETS := x86_64-windows-gnu aarch64-windows-gnu x86_64-macos aarch64-macos \
	x86_64-linux-gnu aarch64-linux-gnu x86_64-linux-musl aarch64-linux-musl

cross: $(VENV)/.dev
	mkdir -p build/cross
	for target in $(TARGETS); do \
		for mode in -UCSEQ_DEBUG -DCSEQ_DEBUG; do \
			$(ZIG_CC) -target $$target $$mode -c tests/c/headers.c -o build/cross/$$target.o || exit 1; \
		done; \
	done
	for machine in x86_64,_M_X64 aarch64,_M_ARM64; do \
		$(ZIG_CC) -target $${machine%,*}-windows-gnu $(AS_MSVC) -D$${machine#*,} \
			-c tests/c/headers.c -o build/cross/$${machine#*,}.o || exit 1; \
	done

# -- what is published

# The time of all files in there: that of the commit.
wheels: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)

# pip unpacks the sdist into an empty folder for each wheel.
wheels: $(VENV)/.dev
	rm -rf dist wheelhouse
	$(PY) -m build --sdist --outdir dist .
	$(PY) -m twine check --strict dist/*
	PATH="$(abspath $(BIN)):$$PATH" $(PY) tests/wheels.py dist/*.tar.gz wheelhouse $(PYTHONS) -- $(ARGS)

clean:
	rm -rf build dist wheelhouse docs/reference/api *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f cseq/*.so cseq/*.pyd cseq/*.c cseq/*.html
	find cseq tests examples -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(DOCS_VENV) $(BENCH_VENV) $(FORMATS_VENV) $(GPU_VENV) $(FRAMEWORKS_VENV) $(COVERAGE_VENV) $(WINE_ENV) $(FREE_ENV) $(TORCH_ENV)
