# The sdist, and its wheels for all of PYTHONS (from pyenv and check-freethreaded): built twice with the same
# bytes, and tested without torch.
.PHONY: check-wheels
PYTHONS ?= $(or $(wildcard $(HOME)/.pyenv/versions/3.1?.*/bin/python3.1? \
	.freethreaded-env/*/gil/python/bin/python3.1? .freethreaded-env/*/free/python/bin/python3.1?t),$(PYTHON))

# All files in there have the commit's time.
check-wheels: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)

# pip unpacks the sdist into an empty folder for each wheel.
check-wheels: $(VENV)/.dev
	rm -rf dist wheelhouse
	$(PY) -m build --sdist --outdir dist .
	$(PY) -m twine check --strict dist/*
	PATH="$(abspath $(BIN)):$$PATH" $(PY) tests/platforms/wheels/wheels.py dist/*.tar.gz wheelhouse $(PYTHONS) -- $(ARGS)
