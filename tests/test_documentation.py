"""What the documentation names exists: files, the tests of docs/pytorch.md, the checks of `lik_ops.opcheck`."""

import ast
import re
from pathlib import Path

import pytest

from lik_ops.opcheck import checks, graphs

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
NAMED = re.compile(r"`((?:tests|opcheck|examples|benchmarks|lik_ops|csrc_triton|docs)/[\w./-]+)(?:::(\w+))?`")
CHECKED = re.compile(r"check `(\w+)`")


def functions(path):
    """The functions of a file, those of its classes too."""
    return {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)}


def rows(page, heading):
    """The cells of the table below a heading, without its head."""
    section = (ROOT / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split(" | ")] for line in lines[2:]]


@pytest.mark.parametrize("page", PAGES)
def test_files_and_tests_that_are_named_exist(page):
    for path, name in NAMED.findall((ROOT / page).read_text()):
        assert (ROOT / path).exists(), f"{page}: {path}"
        assert not name or name in functions(path), f"{page}: {path} has no {name}"


@pytest.mark.parametrize("heading", ["What works", "What raises"])
def test_every_row_names_what_shows_it(heading):
    """A test by its name, or a check of `lik_ops.opcheck`."""
    found = rows("docs/pytorch.md", heading)
    assert len(found) > 10
    for cells in found:
        tests = [name for _, name in NAMED.findall(cells[-1]) if name.startswith("test_")]
        checked = CHECKED.findall(cells[-1])
        assert tests or checked, f"nothing shows: {cells[0]}"
        for name in checked:
            assert name in checks.CHECKS or name in graphs.SNAPSHOTS, f"{cells[0]}: no check {name}"
