"""MaxSim of queries and documents of different lengths: packed, in lists, as lists of pairs, or padded with lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.arguments import (
    Backward,
    check_floats,
    check_indices,
    check_options,
    check_same_size,
    check_tokens,
    check_weight,
    format_shape,
)
from ..core.segments import PackedArgs, make_dense_offsets
from ..formats.quantized import Quantized
from ..ops.checks import values
from ..ops.fast_path import eager
from ..ops.fast_path.watchers import is_ordinary_tensor
from ..ops.quantized import make_tokens_like
from ..ops.stack import autocast, functional
from . import inputs
from .inputs import Tokens, prepare_args
from .packing import lengths_to_mask
from .score import maxsim, maxsim_with_argmax

__all__ = ["maxsim_candidates_varlen", "maxsim_padded", "maxsim_pair_list", "maxsim_varlen"]

# The shapes that a layout accepts, as options of `prepare_args`.
VARLEN: dict[str, Any] = {"lifts": "Q", "packs": "QD"}
CANDIDATES: dict[str, Any] = {"lifts": "Q", "packs": "Q", "d_shape": "[Td, d]"}
PAIR_LIST: dict[str, Any] = {"packs": "QD"}


def maxsim_varlen(
    Q: Tokens,
    D: Tokens,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    *,
    q_weight: Tokens | None = None,
    normalize: bool = False,
    backward: Backward = "auto",
) -> Tensor:
    """Compute the MaxSim score of every packed query and every packed document, without padding.

    Query i is rows ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]`` of Q. On a CPU, a score has the same bits as the
    score of `maxsim` for the same tokens.

    Args:
        Q: packed query tokens ``[Tq, d]``. If `cu_seqlens_q` is None: ``[Nq, Lq, d]``, ``[Lq, d]`` for one query, a
            list of ``[L_i, d]`` or a jagged nested tensor. The values of a jagged tensor are used without a copy.
        D: packed document tokens ``[Td, d]`` of the dtype and device of Q. If `cu_seqlens_d` is None: ``[Nd, Ld, d]``,
            a list of ``[L_i, d]`` or a nested tensor.
        cu_seqlens_q: ``[Nq + 1]``, int32 or int64: the first row of each query, and the end of the last query.
        cu_seqlens_d: ``[Nd + 1]``, int32 or int64: the first row of each document, and the end of the last document.
        q_weight: the weight of each query token, with the shape of Q without d; fp32 (fp64 for fp64 inputs). For a list
            of queries, pass a list of ``[L_i]`` or packed weights ``[Tq]``. Differentiable.
        normalize: L2-normalize every token first.
        backward: ``"lowmem"``, ``"unified"`` or ``"auto"``, as in `maxsim`.

    Returns:
        Scores ``[Nq, Nd]`` in fp32 (fp64 for fp64 inputs), or ``[Nd]`` for one query ``[Lq, d]``. An empty document
        scores ``-inf``. An empty query scores 0. A segment that is negative or reaches outside its tensor scores NaN
        and has no gradient.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.

    Example:
        >>> Q, cu_seqlens_q = lik_ops.pack([torch.randn(5, 128), torch.randn(32, 128)])
        >>> D, cu_seqlens_d = lik_ops.pack([torch.randn(n, 128) for n in (300, 12, 80)])
        >>> lik_ops.maxsim_varlen(Q, D, cu_seqlens_q, cu_seqlens_d, normalize=True).shape
        torch.Size([2, 3])
    """
    options: dict[str, Any] = {"q_weight": q_weight, "normalize": normalize, "backward": backward}
    # The checks below cost far more time than a kernel.
    if isinstance(D, Quantized):
        per_token, settings = (None, None, q_weight), (normalize, backward, False)
        scores = eager.repeat_maxsim_quantized(Q, D, cu_seqlens_q, cu_seqlens_d, per_token, settings)
        if scores is not None:
            return scores
    elif results := eager.try_maxsim_ragged(Q, D, cu_seqlens_q, cu_seqlens_d, **options):
        return results[0]
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_d": cu_seqlens_d, "refused": True, **VARLEN}
    return inputs.score_varlen(prepare_args("maxsim_varlen", Q, D, **options))[0]


def maxsim_candidates_varlen(
    Q: Tokens,
    D: Tensor,
    doc_offsets: Tensor,
    doc_lengths: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    q_weight: Tokens | None = None,
    normalize: bool = False,
    backward: Backward = "auto",
) -> Tensor:
    """Compute the MaxSim score of each query and its own candidates, which are read in place from a packed store.

    Args:
        Q: query tokens ``[Nq, Lq, d]``, ``[Lq, d]`` for one query, packed ``[Tq, d]`` with `cu_seqlens_q`, a list of
            ``[L_i, d]`` or a nested tensor.
        D: the store, packed document tokens ``[Td, d]`` of the dtype and device of Q.
        doc_offsets: ``[Nq, K]``, or ``[K]`` for one query; int32 or int64. The first row in D of each candidate.
            Candidates may repeat and overlap. Their gradients add up.
        doc_lengths: the number of rows of each candidate, with the shape of `doc_offsets`; int32 or int64.
        cu_seqlens_q: ``[Nq + 1]``: the bounds of packed queries, as in `maxsim_varlen`.
        q_weight: the weight of each query token, as in `maxsim_varlen`.
        normalize: L2-normalize every token first.
        backward: ``"lowmem"``, ``"unified"`` or ``"auto"``, as in `maxsim`.

    Returns:
        Scores ``[Nq, K]`` in fp32 (fp64 for fp64 inputs), or ``[K]`` for one query. A candidate of length 0 scores
        ``-inf``. An empty query scores 0. An offset, length or segment that is negative or reaches outside its tensor
        gives NaN and no gradient.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.

    Example:
        >>> store, cu_seqlens = lik_ops.pack([torch.randn(n, 128) for n in (300, 12, 80)])
        >>> # Query 0 is scored with documents 2 and 0, and query 1 twice with document 1.
        >>> chosen = torch.tensor([[2, 0], [1, 1]])
        >>> offsets, lengths = cu_seqlens[:-1][chosen], cu_seqlens.diff()[chosen]
        >>> Q = torch.randn(2, 32, 128)
        >>> lik_ops.maxsim_candidates_varlen(Q, store, offsets, lengths, normalize=True).shape
        torch.Size([2, 2])
    """
    options: dict[str, Any] = {"q_weight": q_weight, "normalize": normalize, "backward": backward}
    if doc_lengths is not None and (
        results := eager.try_maxsim_ragged(Q, D, cu_seqlens_q, doc_offsets, doc_lengths, **options)
    ):
        return results[0]
    options |= {"cu_seqlens_q": cu_seqlens_q, "refused": True, **CANDIDATES}
    g = prepare_args("maxsim_candidates_varlen", Q, D, **options)
    return inputs.score_candidates(g, doc_offsets, doc_lengths)[0]


def maxsim_pair_list(
    Q: Tokens,
    D: Tokens,
    pairs: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    q_weight: Tokens | None = None,
    normalize: bool = False,
    max_seqlen_q: int | None = None,
    backward: Backward = "auto",
) -> Tensor:
    """Compute the MaxSim scores of a list of (query, document) pairs.

    Mining, distillation and sparse batches need only such a list, not all pairs.

    Args:
        Q: query tokens ``[Nq, Lq, d]``, packed ``[Tq, d]`` with `cu_seqlens_q`, a list of ``[L_i, d]`` or a nested
            tensor.
        D: document tokens of the dtype and device of Q: ``[Nd, Ld, d]``, packed ``[Td, d]`` with `cu_seqlens_d`, a list
            of ``[L_i, d]`` or a nested tensor.
        pairs: ``[P, 2]``, int32 or int64: the index of a query and the index of a document. Both may repeat. Gradients
            add up.
        q_mask: query tokens to keep, as in `maxsim`. Not for lists and nested tensors.
        d_mask: document tokens to keep, as in `maxsim`. Not for lists and nested tensors.
        cu_seqlens_q: ``[Nq + 1]``: the bounds of packed queries, as in `maxsim_varlen`.
        cu_seqlens_d: ``[Nd + 1]``: the bounds of packed documents, as in `maxsim_varlen`.
        q_weight: the weight of each query token, as in `maxsim_varlen`.
        normalize: L2-normalize every token first.
        max_seqlen_q: an upper bound on the number of tokens of a packed query. It is required for gradients on a GPU
            and in compiled code, because the offsets of packed queries and nested tensors cannot be read there without
            a sync. Otherwise it is computed. A bound above the total number of query tokens costs nothing.
        backward: ``"lowmem"``, ``"unified"`` or ``"auto"``, as in `maxsim`.

    Returns:
        Scores ``[P]`` in fp32 (fp64 for fp64 inputs). An index out of range, or a segment that is negative or reaches
        outside its tensor, scores NaN and has no gradient. So does a query that is longer than `max_seqlen_q`.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong, or `max_seqlen_q` is required.

    Example:
        >>> Q, D = torch.randn(4, 32, 128), torch.randn(100, 300, 128)
        >>> lik_ops.maxsim_pair_list(Q, D, torch.tensor([[0, 17], [0, 3], [2, 99]]), normalize=True).shape
        torch.Size([3])
    """
    options: dict[str, Any] = {"q_mask": q_mask, "d_mask": d_mask, "q_weight": q_weight}
    options |= {"normalize": normalize, "backward": backward}
    if pairs is not None:
        tensors = Q, D, cu_seqlens_q, cu_seqlens_d, None, pairs
        if results := eager.try_maxsim_ragged(*tensors, **options, max_seqlen_q=max_seqlen_q):
            return results[0]
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_d": cu_seqlens_d, "refused": True, **PAIR_LIST}
    return inputs.score_pair_list(prepare_args("maxsim_pair_list", Q, D, **options), pairs, max_seqlen_q)[0]


def maxsim_padded(
    Q: Tensor,
    D: Tensor,
    query_lengths: Tensor,
    doc_lengths: Tensor,
    *,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    backward: Backward = "auto",
) -> Tensor:
    """Compute the MaxSim score of each query and its own padded candidates, given the lengths of both.

    A reranker can use this function if its encoder returns padded batches and lengths. Nothing is copied. The values of
    the padding never matter, even NaN.

    Args:
        Q: query tokens ``[B, Lq, d]``.
        D: candidates ``[B, C, Ld, d]`` of the dtype and device of Q.
        query_lengths: ``[B]``, int32 or int64: the number of tokens of each query.
        doc_lengths: ``[B, C]``, int32 or int64: the number of tokens of each candidate.
        q_weight: the weight of each query token ``[B, Lq]``; fp32 (fp64 for fp64 inputs). Differentiable.
        normalize: L2-normalize every token first.
        backward: ``"lowmem"``, ``"unified"`` or ``"auto"``, as in `maxsim`.

    Returns:
        Scores ``[B, C]`` in fp32 (fp64 for fp64 inputs). A candidate of length 0 scores ``-inf``. A query of length 0
        scores 0. A length that is negative or larger than the padded length gives NaN and no gradient.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.

    Example:
        >>> Q, D = torch.randn(2, 32, 128), torch.randn(2, 10, 300, 128)
        >>> query_lengths, doc_lengths = torch.tensor([5, 32]), torch.randint(1, 300, (2, 10))
        >>> lik_ops.maxsim_padded(Q, D, query_lengths, doc_lengths, normalize=True).shape
        torch.Size([2, 10])
    """
    options: dict[str, Any] = {"q_weight": q_weight, "normalize": normalize, "backward": backward}
    if results := eager.try_maxsim_ragged(Q, D, lengths=doc_lengths, q_lengths=query_lengths, **options):
        return results[0]
    return score_padded("maxsim_padded", Q, D, query_lengths, doc_lengths, **options)[0]


def score_padded(
    op: str,
    Q: Tensor,
    D: Tensor,
    query_lengths: Tensor,
    doc_lengths: Tensor,
    *,
    q_weight: Tensor | None,
    normalize: bool,
    backward: Backward,
    with_argmax: bool = False,
) -> tuple[Tensor, Any]:
    """Return the scores of `maxsim_padded` and, if `with_argmax`, the argmax ``[B, C, Lq]``, else None."""
    quantized = D if isinstance(D, Quantized) else None
    if quantized is not None:
        check_floats(op, "Q", Q)
        Q, _, q_weight = autocast.cast_to_autocast(Q, Q, q_weight)
        D = make_tokens_like(Q, quantized.shape)
    else:
        Q, D, q_weight = autocast.cast_to_autocast(Q, D, q_weight)
    check_tokens(op, Q, D, ("[B, Lq, d]",), ("[B, C, Ld, d]",))
    check_same_size(D.shape[0], Q.shape[0], lambda: f"{op}: D: expected B = {Q.shape[0]} lists, got {format_shape(D)}")
    check_weight(op, q_weight, Q)
    check_options(op, normalize, backward)
    check_indices(op, "query_lengths", query_lengths, Q.shape[:1], "[B]", Q.device)
    check_indices(op, "doc_lengths", doc_lengths, (Q.shape[0], D.shape[1]), "[B, C]", Q.device)
    if values.needs_value_checks(query_lengths, doc_lengths):
        values.check_lengths(op, "query_lengths", query_lengths, Q.shape[1])
        values.check_lengths(op, "doc_lengths", doc_lengths, D.shape[2])
    valid = _mask_valid_lengths(query_lengths, Q.shape[1])[:, None] & _mask_valid_lengths(doc_lengths, D.shape[2])
    if quantized is None and not with_argmax and _supports_lengths(Q, D, q_weight):
        scores = _score_padded_views(Q, D, query_lengths, torch.where(valid, doc_lengths, -1), q_weight, normalize)
        return scores.masked_fill_(~valid, float("nan")), None
    # A pair with an invalid length keeps no document token, so it has no gradient and no argmax.
    masks = lengths_to_mask(query_lengths, Q.shape[1]), lengths_to_mask(torch.where(valid, doc_lengths, 0), D.shape[2])
    options: dict[str, Any] = {"q_weight": q_weight, "normalize": normalize, "backward": backward}
    documents: Any = D if quantized is None else quantized
    results = (maxsim_with_argmax if with_argmax else maxsim)(Q, documents, *masks, **options)
    scores, argmax = results if isinstance(results, tuple) else (results, None)
    return torch.where(valid, scores, float("nan")), argmax


def _supports_lengths(Q: Tensor, D: Tensor, q_weight: Tensor | None) -> bool:
    """Return whether padded tokens are best scored as ragged views with lengths.

    This holds on a CPU, where the ragged path skips the padding. The bits are the same as with masks. If gradients are
    needed, masks are as fast and their argmax is smaller. Triton kernels read the lengths themselves, through the fast
    path of eager calls.
    """
    if torch.compiler.is_compiling() or Q.device.type != "cpu" or inputs.needs_gradients(Q, D, q_weight):
        return False
    tensors = [Q, D] if q_weight is None else [Q, D, q_weight]
    return all(is_ordinary_tensor(t) and t.is_contiguous() for t in tensors) and not functional.is_transforming()


def _score_padded_views(
    Q: Tensor, D: Tensor, query_lengths: Tensor, doc_lengths: Tensor, q_weight: Tensor | None, normalize: bool
) -> Tensor:
    """Return the scores of `maxsim_padded` from ragged views of contiguous tokens."""
    B, C, Ld, _ = D.shape
    offsets = make_dense_offsets(B * C, Ld, D.device)[:-1].view(B, C)
    q_mask = lengths_to_mask(query_lengths, Q.shape[1])
    tensors = Q, D.flatten(0, 2), None, offsets, doc_lengths, None, q_mask, None, q_weight
    return inputs.call_ragged_operator(PackedArgs.from_tensors(tensors, Q.shape[1]), normalize, "auto")[0]


def _mask_valid_lengths(lengths: Tensor, max_length) -> Tensor:
    """Return which lengths are in the range from 0 to `max_length`."""
    return (lengths >= 0) & (lengths <= max_length)
