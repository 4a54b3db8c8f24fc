# What `make test` leaves out: each benchmark once, on hardly any data; sanitizers of the headers; and each way to
# start workers, wherever there are some.
.PHONY: check-nightly
check-nightly: build $(VENV)/.test
	$(PY) -m pytest -n $(JOBS) tests/nightly $(ARGS)
	$(PY) -m pytest -n $(JOBS) -m nightly $(ARGS)
