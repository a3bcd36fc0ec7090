# Every target does its own set-up: a machine with Python 3.11+, git and make is enough.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test demo check soak bench bench-quick clean

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

test: check
	$(BIN)/pytest -n 4

demo: $(READY)
	$(BIN)/leasetask demo

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

soak: $(READY)
	LEASETASK_SOAK=1 $(BIN)/pytest -n 2

bench: $(READY)
	$(BIN)/python -m bench full

bench-quick: $(READY)
	$(BIN)/python -m bench quick

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
