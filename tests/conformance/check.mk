# RETURNN's and torchdata's own tests with cseq's classes in their place, TIMES in a row.
.PHONY: check-conformance check-conformance-torch
check-conformance check-conformance-torch: TIMES ?= 1
check-conformance: build $(VENV)/.test $(VENV)/.conformance
	$(PY) tests/conformance/run_others.py $(TIMES)

# torch's and torchdata's tests of their loaders, with cseq.DataLoader in their place.
# ARGS: "--class module:Class --tags must,own -k ...", see README.md.
check-conformance-torch: build $(VENV)/.test $(VENV)/.conformance
	$(PY) tests/conformance/run_torch.py $(ARGS) $(TIMES)
	$(PY) tests/conformance/run_torch.py --stateful $(ARGS) $(TIMES)
