"""Code blocks of Markdown pages, for tests and for the check of a release."""

import re
from pathlib import Path
from typing import NamedTuple


class Block(NamedTuple):
    mark: str
    language: str
    line: int
    source: str


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, with the mark of ``<!-- test: mark -->`` above a block."""
    text = page.read_text()
    found = re.finditer(r"^(?:<!-- test: (\w+) -->\n)?```(\w*)\n(.*?)^```$", text, re.M | re.S)
    return [Block(m[1] or "", m[2], text.count("\n", 0, m.start(3)), m[3]) for m in found]
