# On a machine with a GPU: run tests/gpu, then measure cseq on the device, into one results file. TORCH is the
# build of torch to install. With DEVICE=cpu, the CPU stands in for a GPU. See ../README.md.
.PHONY: check-gpu .gpu
ENVIRONMENTS += .gpu-venv
DEVICE ?= cuda
check-gpu:
	$(call in,.gpu-venv,.gpu)

.gpu: build $(VENV)/.test
	$(PY) benchmarks/gpu/run.py --device $(DEVICE) --rounds $(ROUNDS) $(if $(COMMIT),--commit $(COMMIT)) $(CASES)
