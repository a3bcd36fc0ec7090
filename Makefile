# Every target does its own set-up: a machine with Python 3.11+, git and make is enough.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test demo check soak long fuzz versions bench bench-quick clean

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

# Random faults under load, MINUTES=60 for longer, SEED=7 for a failing seed once more.
soak: $(READY)
	PYTHONPATH=tests:tests/faults $(BIN)/python tests/faults/soak.py --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED)) --out tests/faults/results

# Random input of every kind, by seed.
fuzz: $(READY)
	PYTHONPATH=tests:tests/fuzz $(BIN)/python tests/fuzz/fuzz.py --inputs $(or $(INPUTS),1000000) $(if $(SEED),--seed $(SEED))

# Every test with its full numbers: hours.
long: $(READY)
	LEASETASK_SOAK=1 $(BIN)/pytest -n 2

# The tests on other versions of PostgreSQL, whose binaries npm has. The counts need a quiet server.
versions: $(READY)
	for version in $(or $(VERSIONS),14 16 17); do .ci/on-postgres $$version sh -c \
	  "$(BIN)/pytest -n 4 --ignore tests/test_counts.py && $(BIN)/pytest tests/test_counts.py" || exit 1; done

bench: $(READY)
	$(BIN)/python -m bench full

bench-quick: $(READY)
	$(BIN)/python -m bench quick

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
