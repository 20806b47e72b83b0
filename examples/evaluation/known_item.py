"""Measure how often the first paragraph of a docstring finds the rest of it, with MaxSim and with BM25."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import bm25s
import torch
from docstring_corpus import Docstring
from hashed_encoder import DOCUMENT_TOKENS, QUERY_TOKENS, split_words
from token_batch import TokenBatch, TokenEncoder
from torch import Tensor
from tqdm import tqdm

import lik_ops

BATCH_SIZE = 100
CUTOFF = 10
EVALUATION_POOL = 1000  # documents; the first few hundred also supply the queries


@dataclass(frozen=True)
class Evaluation:
    """Ranking quality of one method, and its time to index and score."""

    method: str
    mrr: float
    hit: float
    seconds: float


def score_documents(
    encoder: TokenEncoder, queries: TokenBatch, documents: Sequence[str], *, progress: bool = False
) -> Tensor:
    """Return MaxSim of every query and document, ``[Nq, Nd]``, in batches of documents of similar length."""
    by_length = sorted(range(len(documents)), key=lambda i: len(documents[i]))
    scores = queries.embeddings.new_empty(len(queries.tokens), len(documents))
    starts = range(0, len(documents), BATCH_SIZE)
    for start in tqdm(starts, desc="indexing and scoring", unit="batch", leave=False, disable=not progress):
        chosen = by_length[start : start + BATCH_SIZE]
        batch = encoder.encode_documents([documents[i] for i in chosen])
        scores[:, chosen] = lik_ops.maxsim(
            queries.embeddings, batch.embeddings, queries.mask, batch.mask, q_weight=queries.weight
        )
    return scores


def maxsim_scores(
    encoder: TokenEncoder, queries: Sequence[str], documents: Sequence[str], *, progress: bool = False
) -> Tensor:
    """Return the scores ``[Nq, Nd]`` of an encoder that is fitted to these documents."""
    encoder.fit(list(documents))
    return score_documents(encoder, encoder.encode_queries(list(queries)), documents, progress=progress)


def bm25_scores(queries: Sequence[str], documents: Sequence[str]) -> Tensor:
    """Return BM25 scores ``[Nq, Nd]`` of the same words that the hashed encoder sees."""
    index = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    index.index([split_words(text)[:DOCUMENT_TOKENS] for text in documents], show_progress=False)
    rows = [index.get_scores(split_words(text)[:QUERY_TOKENS]) for text in queries]
    return torch.stack([torch.from_numpy(row) for row in rows])


def known_item_ranks(scores: Tensor) -> Tensor:
    """Return the rank of document i for query i, which is 1 + the number of others that score as much or more.

    Args:
        scores: ``[Nq, Nd]`` with Nq <= Nd.

    Raises:
        ValueError: A score is not finite, so ranks would be meaningless.
    """
    if not scores.isfinite().all():
        raise ValueError("scores: expected finite numbers, found NaN or infinities")
    target = scores.diagonal().unsqueeze(1)
    return (scores >= target).sum(dim=1)


def evaluate(method: str, score: Callable[[], Tensor]) -> Evaluation:
    """Return MRR@10 and hit@10 of the scores that `score` computes, and its time."""
    start = time.perf_counter()
    scores = score()
    seconds = time.perf_counter() - start
    ranks = known_item_ranks(scores)
    found = ranks <= CUTOFF
    return Evaluation(
        method=method,
        mrr=torch.where(found, 1.0 / ranks, 0.0).mean().item(),
        hit=found.float().mean().item(),
        seconds=seconds,
    )


def evaluate_known_items(
    encoder: TokenEncoder,
    pool: Sequence[Docstring],
    num_queries: int,
    method: str = "MaxSim",
    *,
    progress: bool = False,
) -> list[Evaluation]:
    """Search the bodies of `pool` with the summaries of its first `num_queries` docstrings.

    Args:
        encoder: Encodes the tokens that MaxSim scores.
        pool: The docstrings to search.
        num_queries: The number of docstrings whose summaries are queries.
        method: The name of MaxSim with this encoder.
        progress: Show a progress bar.

    Returns:
        The evaluations of MaxSim and of BM25.
    """
    queries = [docstring.summary for docstring in pool[:num_queries]]
    documents = [docstring.body for docstring in pool]
    return [
        evaluate(method, lambda: maxsim_scores(encoder, queries, documents, progress=progress).cpu()),
        evaluate("BM25", lambda: bm25_scores(queries, documents)),
    ]
