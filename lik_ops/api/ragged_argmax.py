"""Variants of the ragged functions that also return the argmax: the document token that each query token matched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from torch import Tensor

from ..core.arguments import Backward
from . import inputs
from .inputs import ArgmaxOutput, Tokens, prepare_args
from .ragged import CANDIDATES, PAIR_LIST, VARLEN, score_padded

__all__ = [
    "maxsim_candidates_varlen_with_argmax",
    "maxsim_padded_with_argmax",
    "maxsim_pair_list_with_argmax",
    "maxsim_varlen_with_argmax",
]


@overload
def maxsim_varlen_with_argmax(
    Q: Tensor,
    D: Tokens,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    *,
    q_weight: Tokens | None = None,
    normalize: bool = False,
    backward: Backward = "auto",
) -> tuple[Tensor, Tensor]: ...


@overload
def maxsim_varlen_with_argmax(
    Q: Sequence[Tensor],
    D: Tokens,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    *,
    q_weight: Tokens | None = None,
    normalize: bool = False,
    backward: Backward = "auto",
) -> tuple[Tensor, list[Tensor]]: ...


def maxsim_varlen_with_argmax(
    Q: Tokens,
    D: Tokens,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    *,
    q_weight: Tokens | None = None,
    normalize: bool = False,
    backward: Backward = "auto",
) -> tuple[Tensor, ArgmaxOutput]:
    """Compute the scores of `maxsim_varlen` and the best document token of each query token.

    Args:
        Q: query tokens, as in `maxsim_varlen`.
        D: document tokens, as in `maxsim_varlen`.
        cu_seqlens_q: ``[Nq + 1]``: the bounds of packed queries.
        cu_seqlens_d: ``[Nd + 1]``: the bounds of packed documents.
        q_weight: the weight of each query token, as in `maxsim_varlen`.
        normalize: L2-normalize every token first.
        backward: ``"lowmem"``, ``"unified"`` or ``"auto"``, as in `maxsim`.

    Returns:
        ``(scores, argmax)``. The scores are the differentiable scores of `maxsim_varlen`. The argmax is int64 and
        relative to the document. For packed queries its shape is ``[Tq, Nd]``, one row for each row of Q, so `unpack`
        splits both in the same way. For dense queries its shape is ``[Nq, Nd, Lq]``. For a list it is a list of
        ``[Nd, L_i]``. For a jagged tensor it is a jagged ``[Nq, Nd, L]``. Ties go to the lowest index. The index is -1
        for an empty document, for rows outside every query, and for a score that is NaN because a segment reaches
        outside its tensor.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.

    Example:
        >>> Q, cu_seqlens_q = lik_ops.pack([torch.randn(5, 128), torch.randn(32, 128)])
        >>> D, cu_seqlens_d = lik_ops.pack([torch.randn(n, 128) for n in (300, 12, 80)])
        >>> # Score two queries of 5 and 32 tokens with three documents.
        >>> offsets = cu_seqlens_q, cu_seqlens_d
        >>> scores, argmax = lik_ops.maxsim_varlen_with_argmax(Q, D, *offsets, normalize=True)
        >>> scores.shape, argmax.shape
        (torch.Size([2, 3]), torch.Size([37, 3]))
        >>> # The argmax has a row for each query token, and `unpack` divides it like the queries.
        >>> [x.shape for x in lik_ops.unpack(argmax, cu_seqlens_q)]
        [torch.Size([5, 3]), torch.Size([32, 3])]
    """
    options: dict[str, Any] = {"q_weight": q_weight, "normalize": normalize, "backward": backward, "with_argmax": True}
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_d": cu_seqlens_d, **VARLEN}
    return inputs.score_varlen(prepare_args("maxsim_varlen_with_argmax", Q, D, **options))


@overload
def maxsim_candidates_varlen_with_argmax(
    Q: Tensor,
    D: Tensor,
    doc_offsets: Tensor,
    doc_lengths: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    q_weight: Tokens | None = None,
    normalize: bool = False,
    backward: Backward = "auto",
) -> tuple[Tensor, Tensor]: ...


@overload
def maxsim_candidates_varlen_with_argmax(
    Q: Sequence[Tensor],
    D: Tensor,
    doc_offsets: Tensor,
    doc_lengths: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    q_weight: Tokens | None = None,
    normalize: bool = False,
    backward: Backward = "auto",
) -> tuple[Tensor, list[Tensor]]: ...


def maxsim_candidates_varlen_with_argmax(
    Q: Tokens,
    D: Tensor,
    doc_offsets: Tensor,
    doc_lengths: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    q_weight: Tokens | None = None,
    normalize: bool = False,
    backward: Backward = "auto",
) -> tuple[Tensor, ArgmaxOutput]:
    """Compute the scores of `maxsim_candidates_varlen` and the best candidate token of each query token.

    Args:
        Q: query tokens, as in `maxsim_candidates_varlen`.
        D: the store, packed document tokens ``[Td, d]``.
        doc_offsets: ``[Nq, K]``, or ``[K]`` for one query: the first row in D of each candidate.
        doc_lengths: the number of rows of each candidate, with the shape of `doc_offsets`.
        cu_seqlens_q: ``[Nq + 1]``: the bounds of packed queries.
        q_weight: the weight of each query token, as in `maxsim_varlen`.
        normalize: L2-normalize every token first.
        backward: ``"lowmem"``, ``"unified"`` or ``"auto"``, as in `maxsim`.

    Returns:
        ``(scores, argmax)``. The scores are the differentiable scores of `maxsim_candidates_varlen`. The argmax is
        int64 and relative to the candidate. Its shape is ``[Tq, K]`` for packed queries and ``[Nq, K, Lq]`` for dense
        queries. For a list it is a list of ``[K, L_i]``. For a jagged tensor it is a jagged ``[Nq, K, L]``. The index
        is -1 in the same cases as in `maxsim_varlen_with_argmax`.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.

    Example:
        >>> store, cu_seqlens = lik_ops.pack([torch.randn(n, 128) for n in (300, 12, 80)])
        >>> # Query 0 is scored with documents 2 and 0, and query 1 twice with document 1.
        >>> chosen = torch.tensor([[2, 0], [1, 1]])
        >>> offsets, lengths = cu_seqlens[:-1][chosen], cu_seqlens.diff()[chosen]
        >>> Q = torch.randn(2, 32, 128)
        >>> where = offsets, lengths
        >>> lik_ops.maxsim_candidates_varlen_with_argmax(Q, store, *where, normalize=True)[1].shape
        torch.Size([2, 2, 32])
    """
    options: dict[str, Any] = {"q_weight": q_weight, "normalize": normalize, "backward": backward, "with_argmax": True}
    options |= {"cu_seqlens_q": cu_seqlens_q, **CANDIDATES}
    g = prepare_args("maxsim_candidates_varlen_with_argmax", Q, D, **options)
    return inputs.score_candidates(g, doc_offsets, doc_lengths)


def maxsim_pair_list_with_argmax(
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
) -> tuple[Tensor, Tensor]:
    """Compute the scores of `maxsim_pair_list` and the best document token of each query token of a pair.

    Args:
        Q: query tokens, as in `maxsim_pair_list`.
        D: document tokens, as in `maxsim_pair_list`.
        pairs: ``[P, 2]``: the index of a query and the index of a document.
        q_mask: query tokens to keep. Not for lists and nested tensors.
        d_mask: document tokens to keep. Not for lists and nested tensors.
        cu_seqlens_q: ``[Nq + 1]``: the bounds of packed queries.
        cu_seqlens_d: ``[Nd + 1]``: the bounds of packed documents.
        q_weight: the weight of each query token, as in `maxsim_varlen`.
        normalize: L2-normalize every token first.
        max_seqlen_q: an upper bound on the number of tokens of a packed query, and the size of the last axis of the
            argmax. It is required on a GPU and in compiled code for packed queries and jagged tensors.
        backward: ``"lowmem"``, ``"unified"`` or ``"auto"``, as in `maxsim`.

    Returns:
        ``(scores, argmax)``. The scores are the differentiable scores of `maxsim_pair_list`. The argmax is int64 and
        relative to the document. Its shape is ``[P, Lq]``, or ``[P, max_seqlen_q]`` for packed queries. The index is -1
        past the end of a query, for masked query tokens, for a document without kept tokens, and for an invalid pair or
        segment.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong, or `max_seqlen_q` is required.

    Example:
        >>> Q, D = torch.randn(4, 32, 128), torch.randn(100, 300, 128)
        >>> pairs = torch.tensor([[0, 17], [0, 3], [2, 99]])
        >>> lik_ops.maxsim_pair_list_with_argmax(Q, D, pairs, normalize=True)[1].shape
        torch.Size([3, 32])
    """
    options: dict[str, Any] = {"q_weight": q_weight, "normalize": normalize, "backward": backward, "with_argmax": True}
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_d": cu_seqlens_d, "q_mask": q_mask, "d_mask": d_mask}
    g = prepare_args("maxsim_pair_list_with_argmax", Q, D, **options, **PAIR_LIST)
    scores, argmax = inputs.score_pair_list(g, pairs, max_seqlen_q)
    return scores, argmax.long()


def maxsim_padded_with_argmax(
    Q: Tensor,
    D: Tensor,
    query_lengths: Tensor,
    doc_lengths: Tensor,
    *,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    backward: Backward = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute the scores of `maxsim_padded` and the best candidate token of each query token.

    Args:
        Q: query tokens ``[B, Lq, d]``.
        D: candidates ``[B, C, Ld, d]``.
        query_lengths: ``[B]``: the number of tokens of each query.
        doc_lengths: ``[B, C]``: the number of tokens of each candidate.
        q_weight: the weight of each query token ``[B, Lq]``.
        normalize: L2-normalize every token first.
        backward: ``"lowmem"``, ``"unified"`` or ``"auto"``, as in `maxsim`.

    Returns:
        ``(scores, argmax)``. The scores are the differentiable scores of `maxsim_padded`. The argmax is int64
        ``[B, C, Lq]``. The index is -1 for padding, for empty candidates and for a length out of range.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.

    Example:
        >>> Q, D = torch.randn(2, 32, 128), torch.randn(2, 10, 300, 128)
        >>> query_lengths, doc_lengths = torch.tensor([5, 32]), torch.randint(1, 300, (2, 10))
        >>> lik_ops.maxsim_padded_with_argmax(Q, D, query_lengths, doc_lengths, normalize=True)[1].shape
        torch.Size([2, 10, 32])
    """
    options: dict[str, Any] = {"q_weight": q_weight, "normalize": normalize, "backward": backward, "with_argmax": True}
    return score_padded("maxsim_padded_with_argmax", Q, D, query_lengths, doc_lengths, **options)
