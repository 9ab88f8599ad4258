# `make demo` and `make test` do all the set-up on a bare machine with Python 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check format lint types fast bench memory clean

demo: $(READY)
	$(BIN)/fedskew run --seed 1

test: $(READY)
	$(BIN)/python -m pytest

check: format lint types fast

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

fast: $(READY)
	$(BIN)/python -m pytest -m "not slow"

bench: $(READY)
	$(BIN)/python benchmarks/speed.py

memory: $(READY)
	$(BIN)/python benchmarks/memory.py

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
