"""Test that docs/architecture.md shows the actual function calls."""

import ast
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from .. import paths


def test_architecture_page_matches_recorded_calls():
    """After an intended change, run ``python -m tests.paths``."""
    pytest.importorskip("triton", reason="the page shows launches of Triton kernels")
    assert paths.page() == paths.PAGE.read_text()


MAX_FUNCTION_LINES, MAX_FILES = 60, 16
ROOT = Path(__file__).parents[2]
PRODUCT = ("lik_ops", "csrc_triton")
SOURCES = sorted({path.resolve() for name in PRODUCT for path in (ROOT / name).rglob("*.py")})


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_functions_are_short(path):
    """A longer function is split by meaning. Docstrings do not count."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            docstring = node.body[0] if ast.get_docstring(node) is not None else None
            lines = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
            assert node.end_lineno - node.lineno + 1 - lines <= MAX_FUNCTION_LINES, node.name


def test_folders_are_small():
    """A folder with more files than a reader can survey is divided. `__init__.py` does not count."""
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [Path(line) for line in tracked.stdout.splitlines()]
    files = Counter(path.parent.as_posix() for path in paths if path.name != "__init__.py")
    assert {folder: n for folder, n in files.items() if n > MAX_FILES} == {}


# The score callables of two hosts have the names that both hosts use in their documentation.
HOST_NAMES = {"XTRScores", "XTRKDScores"}


def test_every_class_has_its_own_name():
    names = Counter(
        node.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, n in names.items() if n > 1} == HOST_NAMES
