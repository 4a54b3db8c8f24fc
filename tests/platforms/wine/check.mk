# The tests with a Windows CPython and torch, under Wine; README.md.
.PHONY: check-wine
ENVIRONMENTS += .wine-env
WINE := tests/platforms/wine

# It is made again when its recipe changes; build.py compiles what has changed, and copies the checkout.
.wine-env/.made: $(addprefix $(WINE)/,setup.sh requirements.txt complex.py complex.c) | $(VENV)/.wine
	$(WINE)/setup.sh .wine-env $(PY)
	touch $@

check-wine: .wine-env/.made
	$(PY) $(WINE)/build.py .wine-env
	$(WINE)/run.sh .wine-env python -m pytest -n $(JOBS) $(ARGS)
