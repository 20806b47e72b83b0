"""Test that names in the documentation exist, and that its code runs as written.

Python blocks of a page run in order, in one initially empty namespace. A comment above a block selects another run:

- ``<!-- test: slow -->`` runs the block in a slow test (shell blocks too).
- ``<!-- test: torchrun -->`` runs the block in the script that the first such block of the page names.
- ``<!-- test: sentence_transformers -->``, or another host of `lik_ops.integrations`, runs the block and the unmarked
  blocks in a slow test if the host is installed.

Docstring examples have the names `torch` and `lik_ops`.
"""

import ast
import doctest
import importlib
import os
import re
import shlex
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import torch

import lik_ops
from lik_ops.opcheck import checks, graphs
from lik_ops.ops.checks import hints
from lik_ops.ops.fast_path import eager

from ..export.test_export import why_not_cpp
from ..integrations.test_integrations_hosts import ADAPTERS, host
from ..release.pages import read_blocks

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
NAMED = re.compile(r"`((?:tests|opcheck|examples|benchmarks|lik_ops|csrc_triton|docs)/[\w./-]+)(?:::(\w+))?`")
CHECKED = re.compile(r"check `(\w+)`")


def functions(path):
    """Return the names of the functions and methods of a file."""
    return {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)}


def rows(page, heading):
    """Return the cells of the table below a heading, without its header."""
    section = (ROOT / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split(" | ")] for line in lines[2:]]


@pytest.mark.parametrize("page", PAGES)
def test_files_and_tests_named_in_pages_exist(page):
    for path, name in NAMED.findall((ROOT / page).read_text()):
        assert (ROOT / path).exists(), f"{page}: {path}"
        assert not name or name in functions(path), f"{page}: {path} has no {name}"


@pytest.mark.parametrize("heading", ["Supported features", "Unsupported calls"])
def test_every_row_names_a_test_or_check(heading):
    """Each row names a test, or a check of `lik_ops.opcheck`."""
    found = rows("docs/pytorch.md", heading)
    assert len(found) > 10
    for cells in found:
        tests = [name for _, name in NAMED.findall(cells[-1]) if name.startswith("test_")]
        checked = CHECKED.findall(cells[-1])
        assert tests or checked, f"nothing shows: {cells[0]}"
        for name in checked:
            assert name in checks.CHECKS or name in graphs.SNAPSHOTS, f"{cells[0]}: no check {name}"


def blocks(page):
    return read_blocks(ROOT / page)


def pages(mark):
    return [page for page in PAGES if any((b.mark, b.language) == (mark, "python") for b in blocks(page))]


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Yield the working directory of blocks and examples. One thread avoids slow runs next to other processes."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.fixture
def newcomer(monkeypatch):
    """Reset warnings to a new process, in which unnormalized tokens would cause a warning."""
    monkeypatch.delenv("LIK_OPS_NORM_WARNING", raising=False)
    monkeypatch.setattr(hints, "_issued_warnings", set())
    monkeypatch.setattr(hints, "_inspected_calls", {})
    eager.clear_call_caches()


def run(command, directory, **environment):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": path, **environment}
    found = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-6000:]
    return found.stdout


def run_python(page, block, names):
    exec(compile("\n" * block.line + block.source, str(ROOT / page), "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_has_a_known_mark_and_language(page):
    for block in blocks(page):
        known = [("", "python"), ("", "sh"), ("", "text"), ("slow", "python"), ("slow", "sh"), ("torchrun", "python")]
        known += [(name, "python") for name in ADAPTERS]
        assert (block.mark, block.language) in known, f"{page}:{block.line}"


def extras_of(text):
    """Return the packages of the extras that a page says to install."""
    table = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n\n")[0]
    packages = {
        name: re.findall(r'"([\w-]+)', x) for name, x in re.findall(r"^([\w-]+) = \[(.*?)\]", table, re.M | re.S)
    }
    named = re.findall(r"pip install ['\"]?\.\[([\w,-]+)\]", text)
    return {package for names in named for name in names.split(",") for package in packages[name]}


DOCS = [*PAGES[2:], *(f"docs/api/{path.name}" for path in sorted((ROOT / "docs" / "api").glob("*.md")))]


@pytest.mark.parametrize("page", ["README.md", *DOCS])
def test_every_page_has_an_install_command(page):
    text = (ROOT / page).read_text()
    assert "pip install " in text
    first = re.search(r"^```python$", text, re.M)
    assert first is None or "pip install " in text[: first.start()] or page == "README.md"


@pytest.mark.filterwarnings("error:.*expected tokens of norm 1:UserWarning")
@pytest.mark.parametrize("page", pages(""))
@pytest.mark.usefixtures("directory", "newcomer")
def test_python_blocks_run(page, monkeypatch):
    """Optional packages that the page does not name are hidden."""
    for package in {"numpy", "onnxscript", "safetensors", "tqdm"} - extras_of((ROOT / page).read_text()):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"{package}.torch", raising=False)
    names = {}
    for block in blocks(page):
        if (block.mark, block.language) == ("", "python"):
            if "Corpus" in block.source:
                pytest.importorskip("safetensors")
            run_python(page, block, names)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages("slow"))
def test_slow_blocks_run(page, directory):
    """Blocks run next to `examples`, with the Python of this process first in the path."""
    Path("examples").symlink_to(ROOT / "examples")
    names, skipped = {}, ""
    for block in blocks(page):
        if block.mark == "slow" and block.language == "python":
            run_python(page, block, names)
        elif block.mark == "slow":
            skipped = why_not_cpp() if "cmake" in block.source else ""
            _ = skipped or run(["sh", "-ec", block.source], directory)
    if skipped:
        pytest.skip(skipped)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "page"), [(name, page) for name in ADAPTERS for page in pages(name)])
def test_blocks_for_an_installed_host_run(name, page, directory, monkeypatch):
    """A model named in a block is a tiny model with random weights, in a folder of that name."""
    host(f"{name}.loss" if name == "colpali_engine" else name)
    found = [b for b in blocks(page) if b.language == "python" and b.mark in ("", name)]
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for model in re.findall(r'= (?:models\.)?\w+\("(\w+/[\w-]+)"\)', "".join(b.source for b in found)):
        importlib.import_module("train_common").base_model([b.source for b in found], directory / model)
    names = {}
    for block in found:
        run_python(page, block, names)
    assert names["routing"].calls


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.parametrize("page", pages("torchrun"))
def test_torchrun_blocks_run(page, tmp_path):
    found = [block.source for block in blocks(page) if block.mark == "torchrun"]
    launcher, *options, script = shlex.split(found[0].splitlines()[0].removeprefix("#"))
    assert launcher == "torchrun"
    (tmp_path / script).write_text("".join(found) + "print(f'done {rank}')\n")
    out = run([sys.executable, "-m", "torch.distributed.run", *options, script], tmp_path)
    assert "done 0" in out and "done 1" in out


def docstrings():
    """Return the docstring examples of the library by the name of their object."""
    found = {}
    for path in sorted((ROOT / "lik_ops").rglob("*.py")):
        if "    >>> " in path.read_text():
            module = importlib.import_module(
                ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            )
            tests = doctest.DocTestFinder(exclude_empty=True).find(module, globs={})
            found.update({test.name: test for test in tests if test.examples})
    return found


EXAMPLES = docstrings()
DISTRIBUTED = "lik_ops.distributed."
SLOW_EXAMPLES = {"lik_ops.export.package"}
NEEDED = {"lik_ops.export.onnx": "onnxscript", "lik_ops.retrieval.store.corpus": "safetensors"}


@pytest.mark.filterwarnings("default", "error:.*expected tokens of norm 1:UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW_EXAMPLES else ())
        for name in EXAMPLES
        if not name.startswith(DISTRIBUTED)
    ],
)
@pytest.mark.usefixtures("directory", "newcomer")
def test_docstring_examples_run_with_the_shown_output(name):
    for module, package in NEEDED.items():
        if name.startswith(module):
            pytest.importorskip(package)
    told = []
    EXAMPLES[name].globs = {"torch": torch, "lik_ops": lik_ops}
    found = doctest.DocTestRunner().run(EXAMPLES[name], out=told.append)
    assert not found.failed, "".join(told)


RANKS = """
import doctest, sys, torch, lik_ops.distributed
from tests.workers import forked

def example():
    function = getattr(lik_ops.distributed, name)
    (test,) = doctest.DocTestFinder().find(function, globs={"torch": torch, "lik_ops": lik_ops})
    assert not doctest.DocTestRunner().run(test).failed

torch.set_num_threads(1)
forked.import_now()
for name in sys.argv[1:]:
    forked.run(2, example)
    print("done", name)
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_examples_of_distributed_functions_run_on_two_processes(tmp_path):
    names = [name.rpartition(".")[2] for name in EXAMPLES if name.startswith(DISTRIBUTED)]
    assert sorted(names) == sorted(lik_ops.distributed.__all__)
    out = run([sys.executable, "-c", RANKS, *names], tmp_path)
    assert all(f"done {name}" in out for name in names)


def test_every_public_function_has_an_example():
    modules = lik_ops, lik_ops.export, lik_ops.distributed
    public = [x for m in modules for name in m.__all__ if callable(x := getattr(m, name))]
    assert not [x for x in public if f"{x.__module__}.{x.__qualname__}" not in EXAMPLES]


def test_commands_name_existing_targets_options_and_extras():
    """Check make targets, modules and scripts with their options, and extras of pip."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    optional = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n\n")[0]
    extras = set(re.findall(r"^([\w-]+) = \[", optional, re.M))
    sources = [*ROOT.glob("lik_ops/**/*.py"), *ROOT.glob("examples/*.py")]
    texts = {page: (ROOT / page).read_text() for page in PAGES}
    for page, text in texts.items():
        for line in re.findall(r"(?:`|^)make ([^`#\n]+)", text, re.M):
            named = takewhile(lambda word: "=" not in word, line.split())
            assert targets.issuperset(named), f"{page}: make {line}"
        for module, script, options in re.findall(r"python (?:-m (lik_ops[\w.]+)|(\w+/\w+\.py))([^`#\n]*)", text):
            path = ROOT / (script or module.replace(".", "/") + ".py")
            path = path if path.exists() else path.with_suffix("") / "__main__.py"
            known = path.read_text()
            assert all(option in known for option in re.findall(r"--[\w-]+", options)), f"{page}: {path} {options}"
    texts |= {str(path.relative_to(ROOT)): path.read_text() for path in sources}
    # No package index is known to have the package. Hints name other packages, or an extra of the checkout.
    assert not [path for path, text in texts.items() if re.search(r"pip install ['\"]?lik-ops", text)]
    for path, text in texts.items():
        for named in re.findall(r"pip install ['\"]\.\[([\w,-]+)\]", text):
            assert extras.issuperset(named.split(",")), path
