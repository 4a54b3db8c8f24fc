# Workers killed at random for SECONDS, from SEED (a new one).
.PHONY: check-stress check-interrupts
check-stress: SECONDS ?= 60
check-stress: build $(VENV)/.test
	$(PY) tests/stress/stress.py $(SECONDS) $(SEED)

# Signal handlers that raise at random, TIMES in each kind of loop: KINDS (all).
check-interrupts: TIMES ?= 10000
check-interrupts: build $(VENV)/.test
	$(PY) tests/stress/interrupts.py $(TIMES) $(or $(SEED),random) $(KINDS)
