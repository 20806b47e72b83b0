"""Collect text to search without a download: the docstrings of the installed Python packages.

Every docstring is a known-item retrieval task. Its first paragraph is the query, and the rest is the document to find.
Sources are parsed, and nothing is imported.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

PACKAGES = ("numpy", "scipy", "sklearn", "torch", "networkx", "sympy", "matplotlib", "pandas")
SUMMARY_WORDS = range(5, 31)
MIN_BODY_WORDS = 30
MAX_BODY_WORDS = 180
DUPLICATE_PREFIX = 300

SUMMARY_MARKUP = str.maketrans("`*:", "   ")
BODY_MARKUP = str.maketrans("`*>", "   ")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


@dataclass(frozen=True)
class Docstring:
    """A docstring split in two: ``summary`` is the known-item query, ``body`` the document that answers it."""

    name: str
    summary: str
    body: str

    @property
    def text(self) -> str:
        """Return the whole text of the docstring."""
        return f"{self.summary} {self.body}"


def installed(packages: Iterable[str] = PACKAGES) -> list[str]:
    """Return the installed packages among `packages`, without importing them."""
    return [package for package in packages if importlib.util.find_spec(package) is not None]


def collect_docstrings(packages: Iterable[str] = (), *, progress: bool = False) -> list[Docstring]:
    """Return the docstrings of the standard library and of `packages`, in a fixed order and without duplicates.

    Args:
        packages: Names of installed packages. See `installed`.
        progress: Show a progress bar.

    Raises:
        ValueError: One of `packages` is not installed.
    """
    sources = [source for root, prefix in _roots(packages) for source in _source_files(root, prefix)]
    found: list[Docstring] = []
    summaries: set[str] = set()
    bodies: set[str] = set()
    bar = tqdm(sources, desc="reading sources", unit="file", leave=False, disable=not progress)
    with _garbage_collector_paused():
        for docstring in (docstring for path, module in bar for docstring in _docstrings(path, module)):
            body_start = docstring.body[:DUPLICATE_PREFIX]
            if docstring.summary not in summaries and body_start not in bodies:
                summaries.add(docstring.summary)
                bodies.add(body_start)
                found.append(docstring)
    return found


def shuffled(docstrings: Sequence[Docstring], seed: int) -> list[Docstring]:
    """Return the docstrings in a random order that depends only on the seed."""
    return [docstrings[i] for i in np.random.default_rng(seed).permutation(len(docstrings))]


@contextmanager
def _garbage_collector_paused() -> Iterator[None]:
    """Pause the garbage collector, because scanning millions of objects without cycles doubles the parse time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _roots(packages: Iterable[str]) -> list[tuple[Path, str]]:
    """Return the folder and import name of the standard library (whose name is empty) and of each package."""
    roots = [(Path(sysconfig.get_paths()["stdlib"]), "")]
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"packages: expected the names of installed packages, found {package!r}")
        roots.append((Path(spec.submodule_search_locations[0]), package))
    return roots


def _source_files(root: Path, prefix: str) -> Iterator[tuple[Path, str]]:
    """Yield every source file under `root` with its module name, without tests and third-party folders."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if any(part.startswith("test") or part in ("site-packages", "dist-packages") for part in parts):
            continue
        if parts[-1] == "__init__":
            parts = parts[:-1]
        yield path, ".".join((prefix, *parts) if prefix else parts)


def _docstrings(path: Path, module: str) -> Iterator[Docstring]:
    """Yield the usable docstrings of one file, or none if Python cannot parse it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    for name, node in _definitions(tree, module):
        docstring = _split_docstring(name, ast.get_docstring(node) or "")
        if docstring is not None:
            yield docstring


def _definitions(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.AsyncFunctionDef | ast.FunctionDef | ast.ClassDef]]:
    """Yield functions and classes at any depth with their qualified names. Only statements can hold one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DEFINITIONS):
            name = f"{prefix}.{child.name}"
            yield name, child
            yield from _definitions(child, name)
        elif isinstance(child, STATEMENTS):
            yield from _definitions(child, prefix)


def _split_docstring(name: str, text: str) -> Docstring | None:
    """Split at the first blank line. Return None if either part is too short or the summary too long."""
    summary, _, body = text.partition("\n\n")
    summary_words = summary.translate(SUMMARY_MARKUP).split()
    body_words = body.translate(BODY_MARKUP).split()
    if len(summary_words) not in SUMMARY_WORDS or len(body_words) < MIN_BODY_WORDS:
        return None
    return Docstring(name, " ".join(summary_words), " ".join(body_words[:MAX_BODY_WORDS]))
