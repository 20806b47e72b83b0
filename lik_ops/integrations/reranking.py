"""Reranking of first-stage results: hits of a vector database, and pairs of a server such as vLLM."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import maxsim, maxsim_candidates_varlen
from ..api.packing import copy_from_host
from ..core.arguments import check_count, format_shape
from . import _scoring

__all__ = ["Hits", "compute_maxsim_score_batched", "rerank_hits"]

Id = TypeVar("Id", bound=Hashable)


class Hits(NamedTuple):
    """Hits from the best to the worst."""

    ids: list[Any]
    scores: list[float]


@torch.no_grad()
def rerank_hits(
    query: Any,
    ids: Sequence[Id],
    multi_vectors: Sequence[Any],
    top_k: int | None = None,
    *,
    normalize: bool = False,
    device: str | torch.device | None = None,
) -> Hits:
    """Rerank the hits of a search by MaxSim of their stored multi-vectors.

    Args:
        query: the multi-vector of the query ``[Lq, d]``: a tensor, an array or lists of floats, as databases return
            them.
        ids: the ids of the hits, of any type.
        multi_vectors: the multi-vector of each hit ``[L_i, d]``, in the same forms. Lengths may differ and are not
            padded.
        top_k: the number of hits to return. None returns all.
        normalize: L2-normalize every vector first, so that similarities are cosines.
        device: the device to score on. None is the device of the query.

    Returns:
        ``(ids, scores)``, lists on the host, from the highest score to the lowest. Hits with equal scores stay in their
        input order. Hits without vectors come last, with score -inf.

    Raises:
        ValueError: the numbers of `ids` and `multi_vectors` differ, a shape is wrong, or `top_k` is negative. Errors
            about a multi-vector name its hit.
        TypeError: a dtype or type is wrong.

    Example:
        >>> from lik_ops.integrations import reranking
        >>> reranking.rerank_hits([[1.0, 0.0]], ["a", "b"], [[[0.0, 1.0]], [[0.5, 0.5], [0.9, 0.1]]]).ids
        ['b', 'a']
    """
    if len(ids) != len(multi_vectors):
        raise ValueError(f"rerank_hits: multi_vectors: expected {len(ids)}, one for each id, got {len(multi_vectors)}")
    if top_k is not None:
        check_count("rerank_hits", "top_k", top_k)
    Q = _scoring.as_vectors("rerank_hits: query", query, rows="Lq")
    Q = Q if device is None else Q.to(device)
    if not len(ids):
        return Hits([], [])
    D = [
        _scoring.as_vectors(f"rerank_hits: multi_vectors[{i}], of hit {ids[i]!r}", x, Q.shape[1]).to(Q.device, Q.dtype)
        for i, x in enumerate(multi_vectors)
    ]
    scores, order = maxsim(Q, D, normalize=normalize).sort(descending=True, stable=True)
    best = order[:top_k].tolist()
    return Hits([ids[i] for i in best], scores[:top_k].tolist())


@torch.no_grad()
def compute_maxsim_score_batched(
    q_embs: Sequence[Tensor],
    d_embs: Sequence[Tensor],
    max_batch_size: int = 64,
    max_score_matrix_elements: int = 64_000_000,
) -> list[Tensor]:
    """Return the scores of query i and document i, like vLLM's function of this name, without padding or syncs.

    If several queries are the same tensor object, as from the cache of a server, it is packed once. If documents are
    slices of one tensor, as from a model batch, they are read in place.

    Args:
        q_embs: the query of each pair, ``[Lq_i, d]``.
        d_embs: the document of each pair, ``[Ld_i, d]``.
        max_batch_size: accepted for vLLM's signature. There is no padded batch.
        max_score_matrix_elements: accepted for vLLM's signature.

    Returns:
        The score of each pair, a scalar (0-d) tensor on the device of the documents, in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: the numbers of queries and documents differ, or a shape or device is wrong.
        TypeError: a dtype is wrong.

    Example:
        >>> from lik_ops.integrations import reranking
        >>> query, batch = torch.eye(32, 128), torch.eye(90, 128)
        >>> scores = reranking.compute_maxsim_score_batched([query] * 3, batch.split([40, 20, 30]))
        >>> len(scores), scores[0].shape
        (3, torch.Size([]))
    """
    if len(q_embs) != len(d_embs):
        raise ValueError(
            f"compute_maxsim_score_batched: d_embs: expected {len(q_embs)}, as many as q_embs, got {len(d_embs)}"
        )
    if not q_embs:
        return []
    _check_pairs(q_embs, d_embs)
    pairs_by_query: dict[int, list[int]] = {}  # by object identity
    for i, q in enumerate(q_embs):
        pairs_by_query.setdefault(id(q), []).append(i)
    queries = [q_embs[pairs[0]] for pairs in pairs_by_query.values()]
    D, begins = _pack_documents(d_embs)
    K = max(map(len, pairs_by_query.values()))
    offsets, lengths, cells = [0] * (len(queries) * K), [0] * (len(queries) * K), [0] * len(d_embs)
    for row, pairs in enumerate(pairs_by_query.values()):
        for cell, i in enumerate(pairs, row * K):
            offsets[cell], lengths[cell], cells[i] = begins[i], d_embs[i].shape[0], cell
    table = copy_from_host([offsets, lengths], D.device).view(2, len(queries), K)
    scores = maxsim_candidates_varlen(queries, D, table[0], table[1]).flatten()
    return list((scores if cells == list(range(len(scores))) else scores[copy_from_host(cells, D.device)]).unbind())


def _check_pairs(q_embs: Sequence[Tensor], d_embs: Sequence[Tensor]) -> None:
    """Raise an error that names the first query or document that does not fit the first query."""
    op, first = "compute_maxsim_score_batched", q_embs[0]
    for name, tensors in (("q_embs", q_embs), ("d_embs", d_embs)):
        for i, t in enumerate(tensors):
            if not isinstance(t, Tensor) or not t.is_floating_point():
                actual = str(t.dtype) if isinstance(t, Tensor) else type(t).__name__
                raise TypeError(f"{op}: {name}[{i}]: expected a floating-point Tensor, got {actual}")
            if t.dim() != 2 or t.shape[1] != first.shape[1]:
                d = first.shape[1] if first.dim() == 2 else "d"
                raise ValueError(f"{op}: {name}[{i}]: expected [L, {d}], got {format_shape(t)}")
            if t.device != first.device:
                raise ValueError(f"{op}: {name}[{i}]: expected device {first.device}, as q_embs[0], got {t.device}")
            if t.dtype != first.dtype and not torch.is_autocast_enabled(t.device.type):
                raise TypeError(f"{op}: {name}[{i}]: expected {first.dtype}, as q_embs[0], got {t.dtype}")
    if first.shape[1] < 1:
        raise ValueError(f"{op}: q_embs[0]: expected d >= 1, got {format_shape(first)}")


def _pack_documents(d_embs: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Return the documents in one tensor of rows, and the first row of each. Slices of one tensor are not copied."""
    first = d_embs[0]
    d, memory = first.shape[-1], first.untyped_storage().data_ptr()
    start = min(t.storage_offset() for t in d_embs)
    end = max(t.storage_offset() + t.numel() for t in d_embs)
    offsets = [t.storage_offset() - start for t in d_embs]
    if all(
        t.untyped_storage().data_ptr() == memory
        and t.dtype == first.dtype
        and t.is_contiguous()
        and not t.is_neg()
        and t.shape[1:] == (d,)
        for t in d_embs
    ) and not any(n % d for n in (end - start, *offsets)):
        rows = first.as_strided(((end - start) // d, d), (d, 1), start)
        return rows, [int(n // d) for n in offsets]
    begins = accumulate((t.shape[0] for t in d_embs[:-1]), initial=0)
    return torch.cat(list(d_embs)), list(begins)
