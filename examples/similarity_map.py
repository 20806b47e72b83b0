"""Draw which words of a question match which words of a docstring.

    python examples/similarity_map.py
    python examples/similarity_map.py read a file line by line --out map.png
    python examples/similarity_map.py --name textwrap.shorten cut a text and put dots behind it

Selects the docstring of the standard library that answers the question best, or the docstring given by name. Draws the
similarity of every word of the question to every word of the docstring. A dot marks the word that wins each maximum,
and the score is the sum of the maxima. Needs ``pip install ".[demo]"`` and downloads nothing.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from missing_packages import explain_missing
from torch import Tensor

import lik_ops

with explain_missing('".[demo]"'):
    from docstring_corpus import Docstring, collect_docstrings
    from hashed_encoder import HashedEncoder
    from matplotlib.figure import Figure

DEFAULT_QUESTION = "find close matches to a misspelled word in a list"
COLUMNS = 45  # words of the document per panel
INCHES_PER_WORD = 0.26


def best_docstring(question: Tensor, weight: Tensor, documents: Sequence[Tensor]) -> tuple[int, float]:
    """Return the document with the highest score, and that score, for ``[Lq, d]`` and a list of ``[L_i, d]``."""
    score, index = lik_ops.maxsim(question, documents, q_weight=weight).max(0)
    return int(index), float(score)


def draw(similarities: Tensor, winners: Tensor, question: Sequence[str], document: Sequence[str], title: str) -> Figure:
    """Draw a map ``[Lq, Ld]`` in panels below one another. `winners` ``[Lq]`` index its columns."""
    Ld = len(document)
    panels = math.ceil(Ld / COLUMNS)
    columns = math.ceil(Ld / panels)
    size = 2 + INCHES_PER_WORD * columns, panels * (1.2 + INCHES_PER_WORD * len(question)) + 0.5
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    for panel, axes in enumerate(figure.subplots(panels, 1, squeeze=False)[:, 0]):
        first = panel * columns
        part = similarities[:, first : first + columns]
        image = axes.imshow(part.numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_xlim(-0.5, columns - 0.5)  # keeps the scale in a shorter last panel
        axes.set_yticks(range(len(question)), question)
        axes.set_xticks(range(part.shape[1]), document[first : first + columns], rotation=90)
        rows = ((winners >= first) & (winners < first + columns)).nonzero().squeeze(1)
        axes.scatter(winners[rows] - first, rows, s=18, color="white", edgecolors="black", linewidths=0.6)
    figure.colorbar(image, ax=figure.axes, label="similarity", shrink=0.8)
    return figure


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line options."""
    parser = argparse.ArgumentParser(description="Draw which words of a question match which words of a docstring.")
    parser.add_argument("question", nargs="*", default=DEFAULT_QUESTION.split(), help="words to look for")
    parser.add_argument("--name", help="the docstring to draw (default: the best one)")
    parser.add_argument("--out", type=Path, default=Path("similarity_map.png"), help="default: %(default)s")
    return parser.parse_args(arguments)


def chosen(docstrings: Sequence[Docstring], name: str | None) -> list[Docstring]:
    """Return all docstrings, or the one called `name`.

    Raises:
        ValueError: No docstring has this name.
    """
    found = [docstring for docstring in docstrings if name in (None, docstring.name)]
    if not found:
        raise ValueError(f"--name: expected a docstring of the standard library, found {name!r}")
    return found


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the similarity map and save it."""
    options = parse_arguments(arguments)
    docstrings = collect_docstrings()
    encoder = HashedEncoder()
    encoder.fit([docstring.text for docstring in docstrings])
    query = encoder.encode_queries([" ".join(options.question)])
    if not query.mask.any() or query.weight is None:
        sys.exit(f"question: expected at least one word, found {' '.join(options.question)!r}")
    try:
        pool = chosen(docstrings, options.name)
    except ValueError as error:
        sys.exit(str(error))
    question, weight = query.embeddings[0], query.weight[0]
    batch = encoder.encode_documents([docstring.text for docstring in pool])
    documents = [tokens[mask] for tokens, mask in zip(batch.embeddings, batch.mask, strict=True)]
    best, score = best_docstring(question, weight, documents)

    similarities = lik_ops.similarity_map(question, documents[best])
    _, winners = lik_ops.maxsim_with_argmax(question, documents[best])
    title = f"{pool[best].name}: {score:.1f}"
    draw(similarities, winners, query.tokens[0], batch.tokens[best], title).savefig(options.out, dpi=120)
    print(f"{title}, drawn in {options.out}")
    for word, row, column in zip(query.tokens[0], similarities, winners.tolist(), strict=True):
        print(f"  {word:>12} -> {batch.tokens[best][column]} ({float(row[column]):.2f})")


if __name__ == "__main__":
    main()
