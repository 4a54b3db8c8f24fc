# On a machine with a GPU: tests/gpu, then cseq on the device, measured, into one results file; TORCH is the build
# of torch for it; DEVICE=cpu has the CPU stand in for a GPU; ../README.md.
.PHONY: check-gpu .gpu
ENVIRONMENTS += .gpu-venv
DEVICE ?= cuda
check-gpu:
	$(call in,.gpu-venv,.gpu)

.gpu: build $(VENV)/.test
	$(PY) benchmarks/gpu/run.py --device $(DEVICE) --rounds $(ROUNDS) $(if $(COMMIT),--commit $(COMMIT)) $(CASES)
