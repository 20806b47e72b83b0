"""docs/architecture.md shows the ways that calls take."""

import ast
import sys
from pathlib import Path

import pytest

from .. import paths


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not name the class of a function that runs")
def test_the_page_shows_what_calls_run():
    """After a change that is meant: ``python -m tests.paths``."""
    assert paths.page() == paths.PAGE.read_text()


MOST_LINES, MOST_OF_FUNCTION = 400, 60
FOLDERS = [Path(__file__).parents[2] / name for name in ("lik_ops", "csrc_triton")]
FILES = {path.resolve() for folder in FOLDERS for path in folder.rglob("*.py")}


@pytest.mark.parametrize("path", sorted(FILES), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_and_functions_are_short(path):
    """What is longer is split by meaning; docstrings of functions do not count."""
    source = path.read_text()
    assert len(source.splitlines()) <= MOST_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            docstring = node.body[0] if ast.get_docstring(node) is not None else None
            said = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
            assert node.end_lineno - node.lineno + 1 - said <= MOST_OF_FUNCTION, node.name
