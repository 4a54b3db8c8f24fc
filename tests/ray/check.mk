# cseq with Ray: a cluster of several nodes on this machine. RAY: another version, as the oldest that is
# supported (RAY=ray==2.45.0).
.PHONY: check-ray
ENVIRONMENTS += .ray-env
RAY ?= ray==2.60.0
RAY_ENV = .ray-env/$(subst ==,-,$(RAY))

# The Python of $(VENV), so that what is built here serves them all.
.ray-env/%/.made: pyproject.toml | $(VENV)/.test
	$(PY) -m venv $(@D)
	$(@D)/bin/pip --disable-pip-version-check --quiet install $(TORCH)
	$(@D)/bin/pip --disable-pip-version-check --quiet install '$(subst ray-,ray[train]==,$*)' 'ray[data]' 'numpy>=1.25' \
		'cloudpickle>=3.0' 'pytest>=9.0'
	touch $@

.PRECIOUS: .ray-env/%/.made

check-ray: build $(RAY_ENV)/.made
	PYTHONPATH=$(CURDIR) $(RAY_ENV)/bin/python -m pytest tests/ray $(ARGS)
