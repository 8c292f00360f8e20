PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What running needs, and what developing needs beside it.
RUNS := $(VENV)/.runs
STAMP := $(VENV)/.installed
# Bytecode is made at the first import: for everything in torch it would take as long as to install it.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Has wheels for Linux on x86-64 alone; elsewhere the tests of kernels for devices are skipped, and say so.
TRITON := $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),triton)
# Ranks as processes mostly wait for each other: files of them fit side by side, but not beside the rest.
RANKS := tests/faults tests/process tests/soak
CORES := -n auto --maxprocesses 4 --dist loadfile
BESIDE := $(CORES) tests/device tests/golden tests/house tests/laws tests/papers tests/unit
# Their tables are tried in a few rows, unless GRADWIRE_LAWS asks for more.
TABLES := tests/device tests/laws tests/process/test_placement.py tests/unit/exchange

# Dozens of processes import the same modules, which would each compile them anew.
unexport PYTHONDONTWRITEBYTECODE

# Frameworks are large, and pin versions of their own. They have an environment of their own, and torchft is in it.
FRAMEWORKS := .venv-integrations
# What checks packages has no place among what they need.
TOOLS := .venv-release
# Versions of torch that are tried, in .venv-versions: one environment each, 5 GB with what torch brings for CUDA.
VERSIONS ?= 2.11.0 2.13.0 2.14.1 2.15.0

.PHONY: install demo test test-all test-rest test-full test-integrations test-versions gpu fuzz papers soak teeth lint format docs dist clean

$(RUNS): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(PIP) "torch==2.13.0" -e ".[lab]"
	touch $@

$(STAMP): $(RUNS)
	$(PIP) pytest pytest-timeout pytest-xdist hypothesis ruff mypy import-linter zstandard pymoo hatchling obstore $(TRITON)
	touch $@

install: $(STAMP)

demo: $(RUNS)
	$(BIN)/gradwire demo $(ARGS)

# Minutes: of each capability a test that fails when it breaks.
test: $(STAMP)
	$(BIN)/python -m pytest -m "not rest" $(BESIDE) $(ARGS)
	$(BIN)/python -m pytest -m "not rest" $(CORES) $(RANKS) $(ARGS)

# All tests but those of `make test-full` and of `make test-integrations`. `make test-rest` runs those that it adds:
# those that carry `pytest.mark.rest`, and tables in more rows.
test-all: test test-rest

test-rest: $(STAMP)
	GRADWIRE_LAWS=sample $(BIN)/python -m pytest -m "not rest" $(CORES) $(TABLES) $(ARGS)
	GRADWIRE_LAWS=sample $(BIN)/python -m pytest -m rest $(BESIDE) $(ARGS)
	$(BIN)/python -m pytest -m rest $(RANKS) $(ARGS)

# All rows of all tables, and tests that carry `pytest.mark.full`, beside those of `make test-all`.
test-full: $(STAMP)
	GRADWIRE_LAWS=full $(BIN)/python -m pytest $(BESIDE) $(ARGS)
	GRADWIRE_LAWS=full $(BIN)/python -m pytest $(RANKS) $(ARGS)

$(FRAMEWORKS)/.installed: pyproject.toml constraints.txt tests/integrations/constraints.txt
	test -d $(FRAMEWORKS) || $(PYTHON) -m venv $(FRAMEWORKS)
	$(subst $(BIN),$(FRAMEWORKS)/bin,$(PIP)) -c tests/integrations/constraints.txt "torch==2.13.0" \
		-e ".[elastic,store]" pytest pytest-timeout hypothesis accelerate transformers lightning "ray[train]" expecttest "moto[server]"
	touch $@

test-integrations: $(FRAMEWORKS)/.installed
	$(FRAMEWORKS)/bin/python -m pytest tests/integrations $(ARGS)

.venv-versions/%/.installed: pyproject.toml constraints.txt
	test -d $(@D) || $(PYTHON) -m venv $(@D)
	grep -v -e '^torch==' -e '^triton==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-compile -c $(@D)/constraints.txt \
		"torch==$*" -e ".[store]" pytest pytest-timeout hypothesis
	touch $@

# The tests that tests/versions.txt names, on each of VERSIONS: `make test-versions VERSIONS=2.15.0` for one.
test-versions: $(VERSIONS:%=.venv-versions/%/.installed)
	for each in $(VERSIONS); do \
		.venv-versions/$$each/bin/python -m pytest -p no:cacheprovider @tests/versions.txt $(ARGS) || exit 1; \
	done

# On a machine with a GPU, by an interpreter that has torch, Triton, numba and pytest: installs nothing. Takes
# `--out FILE` and `--only PART,...` in ARGS. Without a GPU it lists what it would run.
gpu:
	PYTHONPATH=src $(PYTHON) -m tests.gpu.run $(ARGS)

# Damage to all that is decoded: first as fast as in use, then with bounds checked, for which there are other
# kernels. The limits of time and memory are those of frames.
UNLIMITED := --within-s 1e9 --most-mib 1000
fuzz: $(STAMP)
	$(BIN)/python -m tests.golden.fuzz $(ARGS)
	NUMBA_BOUNDSCHECK=1 $(BIN)/python -m tests.golden.fuzz --count 100000
	for what in payloads exchanges rings states files texts; do \
		$(BIN)/python -m tests.golden.fuzz --what $$what $(UNLIMITED) $(ARGS) || exit 1; \
	done
	NUMBA_BOUNDSCHECK=1 $(BIN)/python -m tests.golden.fuzz --what payloads --count 100000 $(UNLIMITED)
	NUMBA_BOUNDSCHECK=1 $(BIN)/python -m tests.golden.fuzz --what exchanges --count 100000 $(UNLIMITED)
	NUMBA_BOUNDSCHECK=1 $(BIN)/python -m tests.golden.fuzz --what rings --count 100000 $(UNLIMITED)

# Kills, pauses, exceptions and NaN from seed to seed, then many steps of one run. Writes a dated report to
# benchmarks/results. SECONDS of chaos; in ARGS `--endurance STEPS` and others.
SECONDS ?= 600
soak: $(STAMP)
	$(BIN)/python -m tests.soak --seconds $(SECONDS) $(ARGS)

# What two cores can show of a paper, within 15 minutes, the paper's numbers beside: out/papers/PAPER.md. PAPER=covap,
# scalecom, mergecomp, gcomp or ar_topk, and all without it. What has run is kept; ARGS="--again" starts anew, and
# ARGS="--brief" shows by a few steps of each that all parts run.
papers: $(STAMP)
	$(BIN)/python -m benchmarks.papers $(PAPER) $(ARGS)

# 250 faults planted in copies of the tree, one at a time: which tests notice? Ten hours; goes on where it was broken
# off. Writes a dated report to benchmarks/results. In ARGS `--seed COMMIT`, `--shard 1/4`, `--since COMMIT` and others.
teeth: $(STAMP)
	$(BIN)/python -m tests.teeth $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site, into out/docs: one page for each .md in docs and each report, and a reference of docstrings. Opens
# without a network.
docs: $(RUNS)
	$(PIP) -e ".[docs]"
	rm -rf out/site && mkdir -p out/site
	cp -rp docs benchmarks examples src tests out/site
	cp -rp benchmarks/results out/site/docs
	$(BIN)/python -m sphinx -W --keep-going -q -c docs -b html out/site/docs out/docs

# What is published. The bill of materials lists what .venv holds: make it where only `make demo` has run, as in CI.
dist: $(RUNS)
	$(PIP) hatchling
	$(BIN)/python -m hatchling build -d dist
	test -d $(TOOLS) || $(PYTHON) -m venv $(TOOLS)
	$(subst $(BIN),$(TOOLS)/bin,$(PIP)) twine cyclonedx-bom
	$(TOOLS)/bin/twine check --strict dist/*.whl dist/*.tar.gz
	$(TOOLS)/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible \
		--output-file dist/gradwire.cdx.json

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(TOOLS) .venv-versions .pytest_cache .mypy_cache .ruff_cache dist
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
