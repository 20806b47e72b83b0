# Every target sets up .venv by itself. PYTHON is the interpreter it is made from.
PYTHON ?= python3
# Two processes: a third of the time is one test, the kernels in Triton's interpreter.
PYTEST_ARGS ?= -n 2 --dist worksteal
BENCH ?= benchmarks/cpu.py

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest -q --durations=10

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format bench figures clean

help:
	@echo "make demo      search the docstrings of the installed Python packages"
	@echo "make test      tests and operator checks that need no GPU (PYTEST_ARGS=... in place of -n 2 --dist worksteal)"
	@echo "make test-all  make test with the slow ones"
	@echo "make lint      ruff, mypy, import-linter"
	@echo "make format    let ruff rewrite the sources"
	@echo "make bench     the CPU benchmark (BENCH=benchmarks/... picks another)"
	@echo "make figures   the tables and pictures of the documentation, from benchmarks/results"
	@echo "make clean     remove .venv, caches and build outputs"

# torch goes first and alone with numpy: everything after it finds the pinned build in place.
$(VENV)/.stamp: pyproject.toml constraints.txt
	@echo "setting up $(VENV): torch takes a few minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@$(PIP_INSTALL) torch numpy setuptools
	@$(PIP_INSTALL) --no-build-isolation --editable '.[test,lint,demo,onnx,retrieval]'
	@touch $@

# Apart, because one of the peers has wheels for fewer platforms than the rest.
$(VENV)/.stamp-bench: $(VENV)/.stamp
	@$(PIP_INSTALL) --no-build-isolation --editable '.[bench]'
	@touch $@

demo: $(VENV)/.stamp
	@$(BIN)/python examples/search_docstrings.py

test: $(VENV)/.stamp
	@$(PYTEST) -m "not gpu and not slow" tests opcheck $(PYTEST_ARGS)

test-all: $(VENV)/.stamp
	@$(PYTEST) -m "not gpu" tests opcheck $(PYTEST_ARGS)

lint: $(VENV)/.stamp
	@$(BIN)/python -m ruff check
	@$(BIN)/python -m ruff format --check
	@$(BIN)/python -m mypy
	@$(BIN)/lint-imports --no-logo

format: $(VENV)/.stamp
	@$(BIN)/python -m ruff check --fix
	@$(BIN)/python -m ruff format

bench: $(VENV)/.stamp-bench
	@test -n "$(BENCH)" || { echo "no benchmark found: BENCH is empty" >&2; exit 1; }
	@for script in $(BENCH); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

figures: $(VENV)/.stamp
	@$(BIN)/python benchmarks/tables.py
	@$(BIN)/python benchmarks/plot.py

clean:
	@rm -rf $(VENV) build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
