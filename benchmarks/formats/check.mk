# Twelve data formats, with cseq and with torch's DataLoader: FORMATS (all), ROUNDS. The tests of the formats and
# of docs/how-to/data run first. See README.md.
.PHONY: check-formats .formats
ENVIRONMENTS += .formats-venv
check-formats:
	$(call in,.formats-venv,.formats)

.formats: build $(VENV)/.libraries
	$(PY) -m pytest tests/nightly/test_benchmarks.py tests/project/test_examples.py \
		-k "every_format or formats or how-to/data" $(ARGS)
	$(PY) benchmarks/formats/run.py --rounds $(ROUNDS) $(FORMATS)

$(VENV)/.libraries: benchmarks/formats/requirements.txt | $(VENV)/.test
	$(PIP) install --requirement $<
	$(PY) benchmarks/formats/torchvision_cpu.py
	touch $@
