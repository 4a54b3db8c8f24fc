# The tests of cseq.DataLoader with each of TORCH_VERSIONS, without CUDA, in environments of their own.
.PHONY: check-torch-versions
ENVIRONMENTS += .torch-env
TORCH_VERSIONS ?= 2.4.1 2.9.1 2.13.0 2.15.0

# The Python of $(VENV), so that what is built here serves them all.
.torch-env/%/.made: tests/platforms/freethreaded/install_torch.py pyproject.toml | $(VENV)/.test
	$(PY) -m venv $(@D)
	$(PY) $< $(@D)/bin/python torch==$*
	$(@D)/bin/pip --disable-pip-version-check --quiet install 'numpy>=1.25' 'cloudpickle>=3.0' 'pytest>=9.0' \
		'pytest-xdist>=3.6' 'hypothesis>=6.100'
	touch $@

.PRECIOUS: .torch-env/%/.made

# Before torch 2.6, a loader has no `in_order`: tests that give it, for themselves or with others, are left out.
NO_IN_ORDER := -k "not order and not unsent and not pickled and not truth and not left_out"
check-torch-versions: build $(TORCH_VERSIONS:%=.torch-env/%/.made)
	for version in $(TORCH_VERSIONS); do \
		case $$version in 2.4.*|2.5.*) chosen='$(NO_IN_ORDER)';; *) chosen=;; esac; \
		eval PYTHONPATH=. .torch-env/$$version/bin/python -m pytest -n $(JOBS) $$chosen \
			tests/*/adapters/test_torch_*.py $(ARGS) || exit 1; \
	done
