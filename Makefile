# `make demo` and `make test` do all the set-up on a bare machine with Python 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FLOWER := $(VENV)/flower/.ready
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: demo test check format lint types fast bench memory docs results sound clean

demo: $(READY)
	$(BIN)/fedskew run --seed 1

test: $(READY) $(FLOWER)
	$(PYTEST)

check: format lint types fast

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

fast: $(READY)
	$(PYTEST) -m "not slow"

bench: $(READY)
	$(BIN)/python benchmarks/speed.py

# the pages of the methods and the pictures of the splits, then the site: docs/_build/index.html
docs: $(READY)
	$(BIN)/python -m fedskew.report.method_pages
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs docs/_build

results: $(READY)
	$(BIN)/fedskew table docs
	$(BIN)/fedskew board page
	$(BIN)/python scripts/board_picture.py
	$(BIN)/python scripts/front_picture.py
	$(BIN)/python -m fedskew.report.papers

# half an hour or more on two idle cores; again to resume; ends with an error if a method's default is not sound
sound: $(READY)
	$(BIN)/python -m fedskew.report.soundness

memory: $(READY)
	$(BIN)/python benchmarks/memory.py

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps byzfl  # needs torchvision, our tests do not
	touch $@

# Flower wants older versions of packages we use: it gets an environment of its own, where fedskew finds it
$(FLOWER): $(READY) constraints-flower.txt
	test -x $(VENV)/flower/bin/python || $(PYTHON) -m venv $(VENV)/flower
	$(VENV)/flower/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-flower.txt flwr
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
