# make build    compile the core into cseq/; CSEQ_DEBUG=1 checks bounds and invariants
# make test     build into .venv and run the tests, in JOBS (3) processes; `make check-nightly` has the rest
# make quick    run the quick tests: all except the ones in tests/slow.txt
# make lint     ruff, mypy, the stubs, the workflows, the layout, the packages, and the C headers for other systems
# make bench    measure cseq and its peers: CASES (all), ROUNDS (5) of each, into files called NAME;
#               BESIDE=PATH measures another built checkout of cseq in the same rounds; benchmarks/README.md
# make demo     train a small network on handwritten digits (examples/digits.py)
# make golden   add missing results to the records in tests/golden, and change no others (CONTRIBUTING.md)
# make docs     build the site into build/docs, without torch or network; Sphinx's warnings are errors
# make clean    remove what was built; with ALL=1, remove the environments as well
#
# make check-NAME  one of the long checks, each in the check.mk of its folder:
#   conformance        tests/conformance
#   conformance-torch  tests/conformance
#   coverage           tests/coverage
#   darwin             tests/platforms/darwin
#   formats            benchmarks/formats
#   frameworks         tests/frameworks
#   freethreaded       tests/platforms/freethreaded
#   freethreaded-tsan  tests/platforms/freethreaded
#   gpu                benchmarks/gpu
#   headers            tests/c
#   interrupts         tests/stress
#   nightly            tests/nightly
#   perfetto           tests/perfetto
#   ray                tests/ray
#   report             tests/perfetto
#   sanitizers         tests/c
#   stress             tests/stress
#   torch-versions     tests/contract/adapters
#   torchtitan         tests/frameworks
#   wheels             tests/platforms/wheels
#   wine               tests/platforms/wine
#
# The Python that .venv is made with:  make test PYTHON=python3.13
# Arguments for pytest:                make test ARGS="-k ring -x"
# Another torch, from another index:   make test TORCH=torch==2.14.1 TORCH_INDEX=https://host/simple

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# On Linux, PyPI's torch includes gigabytes of CUDA, so torch comes from PyTorch's index of CPU builds. If pip
# is configured to use another index, it uses that one.
TORCH_INDEX ?= $(if $(filter Linux,$(shell uname)),$(shell \
	case "$$($(PYTHON) -m pip config list)" in \
	(*index-url*|*find-links*|*no-index*) ;; \
	(*) echo https://download.pytorch.org/whl/cpu ;; esac))
ARGS ?=
JOBS ?= 3
CASES ?=
NAME ?=
ROUNDS ?= 5
BESIDE ?=

BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
COMPILE := $(PY) setup.py --quiet build_ext --inplace
BUILD_REQUIRES := $(shell sed -n 's/^requires = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d ,)
STUBS = $(subst /,.,$(basename $(wildcard cseq/*.pyi cseq/*/*.pyi)))
ENVIRONMENTS := $(VENV) .docs-venv .bench-venv

VERBS := build test quick lint bench demo golden docs clean
.DELETE_ON_ERROR:
.DEFAULT_GOAL := build
.PHONY: $(VERBS)
.NOTPARALLEL: # never two pips in one environment

# -- environments: a stamp for each set of packages, so that a second run installs nothing. A check whose
# packages would conflict with others has its own environment: `$(call in,.NAME-venv,TARGET)`.

in = $(MAKE) VENV=$1 $2

# The build requirements stay in the environment, so that the next build finds them at once.
$(VENV)/.build: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(BUILD_REQUIRES)
	touch $@

# torch is pinned, and installed before packages that would accept any version. It downloads while the core compiles.
$(VENV)/.torch: | $(VENV)/.build
	$(COMPILE) & compiler=$$!; \
		$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH); torch=$$?; \
		wait $$compiler && exit $$torch
	touch $@

# Without isolation and without a second compilation.
$(VENV)/.core: $(VENV)/.build | $(VENV)/.torch
	CSEQ_PREBUILT=1 $(PIP) install --no-build-isolation --editable .
	touch $@

# cseq is already installed; this adds the packages of its extra.
$(VENV)/.%: pyproject.toml | $(VENV)/.core
	$(PIP) install 'cseq-loader[$*]'
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.core
	$(PIP) install 'cseq-loader[test,returnn,torchdata]'
	touch $@

# Copy the current checkout without its build outputs. Build outputs in the copy stay.
define copy
	mkdir -p $1
	find $1 -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
	git ls-files -z --cached --others --exclude-standard | \
		tar --null --files-from=- -cf - | tar -xf - -C $1
endef

# -- the verbs

# This always runs but rarely does anything, because it compares the times of the files.
build: $(VENV)/.core
	$(COMPILE)

test: build $(VENV)/.test
	$(PY) -m pytest -n $(JOBS) -m "not nightly" $(ARGS)

quick: build $(VENV)/.test
	$(PY) -m pytest -n $(JOBS) -m "not slow and not nightly" $(ARGS)

lint: build check-headers $(VENV)/.test $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/zizmor --offline --no-progress .github
	$(PY) -m pytest -n $(JOBS) tests/lint
	$(PY) -m mypy.stubtest --mypy-config-file pyproject.toml --ignore-missing-stub --ignore-disjoint-bases $(STUBS)

demo: build $(VENV)/.demo
	$(PY) examples/digits.py

golden: build
	PYTHONPATH=. $(PY) tests/helpers/golden.py

# With the peers at the versions of benchmarks/requirements.txt.
bench:
	$(call in,.bench-venv,.bench)

.PHONY: .bench
.bench: build $(VENV)/.peers
	$(PY) benchmarks/run.py --rounds $(ROUNDS) $(if $(NAME),--name $(NAME)) \
		$(if $(BESIDE),--beside $(BESIDE)) $(CASES)

$(VENV)/.peers: benchmarks/requirements.txt | $(VENV)/.test
	$(PIP) install --requirement $<
	touch $@

docs:
	$(call in,.docs-venv,.docs)

# Write all pages. Otherwise, the search index would contain only the pages that changed.
.PHONY: .docs
.docs: $(VENV)/.sphinx
	$(COMPILE)
	rm -rf docs/reference/api # otherwise, a removed name would stay
	$(PY) -m sphinx --fail-on-warning --nitpicky --quiet --jobs auto --write-all docs build/docs

$(VENV)/.sphinx: docs/requirements.txt | $(VENV)/.build
	$(PIP) install 'cloudpickle>=3.0' --requirement $<
	touch $@

# -- the checks

include $(wildcard tests/*/check.mk tests/*/*/check.mk benchmarks/*/check.mk)

clean:
	rm -rf build dist wheelhouse docs/reference/api *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find cseq -name '*.so' -o -name '*.pyd' -o -name '*.c' -o -name '*.html' | xargs rm -f
	find cseq tests examples -name __pycache__ -prune -exec rm -rf {} +
	$(if $(ALL),rm -rf $(ENVIRONMENTS))
