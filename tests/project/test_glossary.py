"""docs/glossary.md has few entries, and the code uses each of its terms."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "glossary.md"
MAX_ENTRIES = 40
ROWS = [re.split(r" *\| *", line.strip("| ")) for line in PAGE.read_text().splitlines() if line.startswith("|")][2:]


def normalize_words(text):
    """Return text in lower case with single spaces for underscores, hyphens and white space."""
    return re.sub(r"[\s_-]+", " ", text).lower()


SOURCES = normalize_words(
    "\n".join(path.read_text() for name in ("lik_ops", "csrc_triton") for path in sorted((ROOT / name).rglob("*.py")))
)


def test_there_are_few_entries_in_order():
    terms = [row[0] for row in ROWS]
    assert all(len(row) == 3 and all(row) for row in ROWS)
    assert 0 < len(terms) < MAX_ENTRIES
    assert len({normalize_words(term) for term in terms}) == len(terms)
    assert terms == sorted(terms, key=normalize_words)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_term_occurs_and_each_place_exists(row):
    term, _, where = row
    for words in term.split(" / "):
        assert normalize_words(words) in SOURCES, words
    places = re.findall(r"`([^`]+)`", where)
    assert places and all((ROOT / place).exists() for place in places), where
