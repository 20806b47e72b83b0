"""Scores of corpus documents that are given by their index, and the best of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import inputs
from ..core.arguments import add_batch_axis, as_bool, check_dense, check_flag, check_tensor, score_dtype
from ..core.segments import compute_offsets
from ..ops import topk
from . import arguments, sources
from .store.layout import as_scorable, join_pieces
from .store.snapshot import Snapshot
from .subset import filter_candidates


def score_indices(
    op: str, snapshot: Snapshot, Q: Any, indices: Any, q_mask: Any, q_weight: Any, normalize: Any
) -> Tensor:
    """Implement `Corpus.score` on a snapshot."""
    Q, _, q_mask, _, _, q_weight = arguments.convert_search(op, Q, None, q_mask, None, None, q_weight)
    check_flag(op, "normalize", normalize)
    manifest, tokens = snapshot.manifest, int(snapshot.cu_seqlens[-1])
    Q, placeholder, q_weight = sources.prepare_queries(op, Q, (tokens, manifest.d), manifest.dtype, q_weight)
    check_dense(op, Q, placeholder, q_mask, None, q_weight)
    is_single = Q.dim() == 2
    candidates = _check_indices(op, indices, Q, len(snapshot))
    Q3, q_mask, q_weight = (add_batch_axis(x, is_single) for x in (Q, as_bool(q_mask), q_weight))
    assert Q3 is not None
    g = inputs.ScoringArgs(op, Q3, placeholder, q_mask=q_mask, q_weight=q_weight, normalize=normalize)
    scores = score_stored(g, snapshot, candidates.expand(len(Q3), -1))
    return scores.squeeze(0) if is_single else scores


def _check_indices(op: str, indices: Any, Q: Tensor, documents: int) -> Tensor:
    """Return the document indices ``[Nq, K]`` or ``[K]`` as int64 on the CPU."""
    candidates = arguments.as_integers(op, "indices", indices)
    shapes = [f"[{len(Q)}, K]", "[K]"] if Q.dim() == 3 else ["[K]"]
    if candidates.dim() != 1 and not (candidates.dim() == 2 and Q.dim() == 3 and len(candidates) == len(Q)):
        raise ValueError(f"{op}: indices: expected {' or '.join(shapes)}, got {list(candidates.shape)}")
    arguments.check_document_indices(op, "indices", candidates, documents)
    return candidates


def score_stored(g: inputs.ScoringArgs, snapshot: Snapshot, chosen: Tensor) -> Tensor:
    """Return the scores ``[Nq, K]`` of documents on the device of Q, and ``-inf`` for index -1.

    The indices ``chosen [Nq, K]`` are on the CPU. Each document is read once, in parts that fit the device.
    """
    device = g.Q.device
    scores = g.Q.new_full(chosen.shape, -torch.inf, dtype=score_dtype(g.Q.dtype))
    documents, inverse = chosen.unique(return_inverse=True)  # ascending
    n_missing = int((documents < 0).sum())
    documents, inverse = documents[n_missing:], (inverse - n_missing).to(device)
    cu_seqlens = compute_offsets(snapshot.lengths[documents])
    source = sources.PackedSource(cu_seqlens, int(cu_seqlens[-1]), snapshot.manifest.layout)
    # Without documents there is one empty part, so that the scores require gradients nevertheless.
    for begin, end in source.ranges(0, len(documents), None, sources.choose_part_bytes(device)) or [(0, 0)]:
        packed, cu_seqlens = snapshot.gather_documents(documents[begin:end], pinned=device.type == "cuda")
        packed = join_pieces([packed], lambda pieces: pieces[0].to(device, non_blocking=True))
        cu_seqlens = cu_seqlens.to(device, non_blocking=True)
        is_in_part = (inverse >= begin) & (inverse < end)
        at = (inverse - begin).clamp(0, max(end - begin - 1, 0))
        lengths = torch.nn.functional.pad(cu_seqlens.diff(), (0, 1))[at].where(is_in_part, 0)
        args = inputs.replace_documents(g, as_scorable(packed, g.D.dtype, cu_seqlens))
        part_scores = inputs.score_candidates(args, cu_seqlens[at], lengths)[0]
        scores = torch.where(is_in_part, part_scores, scores)
    return scores


@torch.no_grad()
def rerank_indices(
    op: str,
    snapshot: Snapshot,
    Q: Any,
    indices: Any,
    top_k: Any,
    q_mask: Any,
    q_weight: Any,
    normalize: Any,
    subset: Any,
) -> topk.ScoresAndIndices:
    """Implement `Corpus.rerank` on a snapshot."""
    if top_k is not None:
        topk.check_counts(op, top_k, None)
    if subset is not None:
        check_tensor(op, "Q", Q)
        indices = filter_candidates(op, subset, Q, len(snapshot), _check_indices(op, indices, Q, len(snapshot)))
    scores = score_indices(op, snapshot, Q, indices, q_mask, q_weight, normalize)
    candidates = arguments.as_integers(op, "indices", indices).to(scores.device).expand(scores.shape)
    scores, candidates = (x if Q.dim() == 3 else x.unsqueeze(0) for x in (scores, candidates))
    # Equal scores are ordered by document index, and missing documents come last.
    order = candidates.where(candidates >= 0, len(snapshot)).argsort(dim=1, stable=True)
    results = topk.select_candidates(
        scores.gather(1, order), candidates.gather(1, order), order.shape[1] if top_k is None else top_k
    )
    return arguments.drop_query_axis(Q, results)
