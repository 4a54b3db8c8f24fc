# What `make test` leaves out: each benchmark once, on hardly any data; sanitizers of the headers; and what is marked:
# each way to start workers, each place where Ctrl-C may come, cases that go the way of others.
.PHONY: check-nightly
check-nightly: build $(VENV)/.test
	$(PY) -m pytest -n $(JOBS) tests/nightly $(ARGS)
	$(PY) -m pytest -n $(JOBS) -m nightly $(ARGS)
