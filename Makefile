PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests that start processes of their own take turns on one worker (tests/conftest.py); they come first.
PARALLEL := -n auto --maxprocesses 4 --dist loadgroup --no-loadscope-reorder

.PHONY: install demo test test-full lint format bench clean

$(STAMP): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt \
		pytest pytest-timeout pytest-xdist hypothesis ruff mypy
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/gradwire demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-full: $(STAMP)
	GRADWIRE_LAWS=full $(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache dist
