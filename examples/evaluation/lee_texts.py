"""Read the news texts of Lee, Pincombe and Welsh (2005), whose similarity was judged by people.

The files ship with gensim. They are read without importing gensim.

Source: Lee, Pincombe and Welsh, "An Empirical Evaluation of Models of Text Document Similarity", CogSci 2005.
"""

from __future__ import annotations

import re
from importlib.metadata import files
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

DISTRIBUTION = "gensim"
MIN_BODY_WORDS = 20
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


class LeeTexts(NamedTuple):
    """The texts and the judgments.

    Attributes:
        judged: 50 short news texts.
        similarity: fp64 ``[50, 50]``, the mean judgment of two texts, from 0.2 for unrelated texts to 1. Only the part
            above the diagonal was judged.
        background: 300 news texts of the same source without judgments.
    """

    judged: list[str]
    similarity: Tensor
    background: list[str]

    def known_items(self) -> tuple[list[str], list[str]]:
        """Return the first sentences of all texts as queries, and the rest of each text as its document.

        Texts that repeat the first sentence or the rest of another text are left out.
        """
        parts = [SENTENCE_END.split(text, maxsplit=1) for text in self.judged + self.background]
        kept = [part for part in parts if len(part) == 2 and len(part[1].split()) >= MIN_BODY_WORDS]
        by_rest = {rest: first for first, rest in kept}
        items = {first: rest for rest, first in by_rest.items()}
        return list(items), list(items.values())


def find_file(distribution: str, name: str) -> Path:
    """Return the path of a file that an installed distribution has, without importing the distribution.

    Raises:
        FileNotFoundError: The distribution has no such file.
        PackageNotFoundError: The distribution is not installed.
    """
    for path in files(distribution) or ():
        if path.name == name:
            return Path(str(path.locate()))
    raise FileNotFoundError(f"expected a file {name!r} in {distribution}, found none")


def load_lee_texts() -> LeeTexts:
    """Return the texts and judgments that ship with gensim."""

    def lines(name: str) -> list[str]:
        return find_file(DISTRIBUTION, name).read_text(encoding="latin1").splitlines()

    rows = [[float(x) for x in line.split()] for line in lines("similarities0-1.txt")]
    return LeeTexts(lines("lee.cor"), torch.tensor(rows, dtype=torch.float64), lines("lee_background.cor"))
