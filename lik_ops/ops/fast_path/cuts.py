"""Sizes of a `PackedArgs` from the caller's tensors, and requirements on their strides."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def infer_sizes(Q: Tensor, D: Tensor, indices: tuple, per_token: tuple, max_seqlen_q: Any) -> tuple | None:
    """Return the sizes of a `PackedArgs`, or None if the shapes do not fit together.

    A dispatch key leaves out leading sizes and `max_seqlen_q`, so every call checks them here.
    """
    if Q is None or D is None:
        return None
    cu_seqlens_q, offsets, lengths, _, q_lengths = indices
    q_shape, d_shape = Q.shape, D.shape
    if cu_seqlens_q is None:
        if len(q_shape) != 3:
            return None
        queries, max_tokens, _ = q_shape
        Tq = queries * max_tokens
    else:
        bounds = cu_seqlens_q.shape
        if len(q_shape) != 2 or len(bounds) != 1 or bounds[0] < 1:
            return None
        queries, Tq = bounds[0] - 1, q_shape[0]
        max_tokens = Tq
    if max_seqlen_q is not None:
        if type(max_seqlen_q) is not int or max_seqlen_q < 0:
            return None
        max_tokens = min(max_tokens, max_seqlen_q)  # no query has more tokens
    q_mask, d_mask, q_weight = per_token
    if (
        (q_mask is not None and q_mask.shape != q_shape[:-1])
        or (d_mask is not None and d_mask.shape != d_shape[:-1])
        or (q_weight is not None and q_weight.shape != q_shape[:-1])
    ):
        return None
    if lengths is not None:
        columns, Td = _infer_candidate_sizes(queries, q_shape, d_shape, offsets, lengths.shape, q_lengths)
        return None if columns is None else (queries, columns, True, Tq, Td, max_tokens)
    if q_lengths is not None:
        return None
    if offsets is None:
        return (queries, d_shape[0], False, Tq, d_shape[0] * d_shape[1], max_tokens) if len(d_shape) == 3 else None
    bounds = offsets.shape
    if len(d_shape) != 2 or len(bounds) != 1 or bounds[0] < 1:
        return None
    return queries, bounds[0] - 1, False, Tq, d_shape[0], max_tokens


def _infer_candidate_sizes(
    queries: int, q_shape: tuple, d_shape: tuple, offsets: Any, listed: tuple, q_lengths: Any
) -> tuple:
    """Return the number of candidates of each query and the rows of D, or None for both if the shapes do not fit."""
    if len(listed) != 2 or listed[0] != queries:
        return None, None
    if offsets is not None:
        fits = len(d_shape) == 2 and offsets.shape == listed
        return (listed[1], d_shape[0]) if fits else (None, None)
    # Padded queries and documents have no offsets.
    fits = len(d_shape) == 4 and d_shape[:2] == listed and q_lengths is not None and q_lengths.shape == q_shape[:1]
    return (listed[1], listed[0] * listed[1] * d_shape[2]) if fits else (None, None)


def is_contiguous_index(x: Tensor | None) -> bool:
    """Return whether an index tensor with these strides is contiguous for any number of rows."""
    return x is None or x.stride() == (1,) or (x.dim() == 2 and x.stride() == (x.shape[1], 1))
