"""The ragged functions with their winners: which document token each query token matched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, overload

from torch import Tensor

from ..core.arguments import Backward
from . import inputs
from .inputs import ArgmaxOutput, Tokens, prepare_args
from .ragged import score_padded

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
    """The scores of `maxsim_varlen` and, for each query token, the document token that won.

    Args:
        Q, D, cu_seqlens_q, cu_seqlens_d, q_weight, normalize, backward: as in `maxsim_varlen`.

    Returns:
        ``(scores, argmax)``: the scores of `maxsim_varlen`, differentiable, and int64 winners, relative to their
        document: ``[Tq, Nd]`` for packed queries, a row for each row of Q, which `unpack` cuts as it cuts Q;
        ``[Nq, Nd, Lq]`` for dense ones; a list of ``[Nd, L_i]`` for a list, a jagged ``[Nq, Nd, L]`` for a jagged
        tensor. Ties go to the lowest index; -1 for an empty document, for rows that no query holds and where the score
        is NaN because a segment reaches outside.

    Raises:
        TypeError, ValueError: as `maxsim_varlen`.

    Example:
        >>> Q, cu_seqlens_q = lik_ops.pack([torch.randn(5, 128), torch.randn(32, 128)])
        >>> D, cu_seqlens_d = lik_ops.pack([torch.randn(n, 128) for n in (300, 12, 80)])
        >>> offsets = cu_seqlens_q, cu_seqlens_d
        >>> scores, argmax = lik_ops.maxsim_varlen_with_argmax(Q, D, *offsets, normalize=True)
        >>> scores.shape, argmax.shape
        (torch.Size([2, 3]), torch.Size([37, 3]))
        >>> [x.shape for x in lik_ops.unpack(argmax, cu_seqlens_q)]
        [torch.Size([5, 3]), torch.Size([32, 3])]
    """
    options: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_d": cu_seqlens_d, "q_weight": q_weight}
    options |= {"packs": "QD", "normalize": normalize, "backward": backward, "with_argmax": True}
    return cast(
        tuple[Tensor, ArgmaxOutput],
        inputs.score_varlen(prepare_args("maxsim_varlen_with_argmax", Q, D, **options, lifts="Q")),
    )


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
    """The scores of `maxsim_candidates_varlen` and, for each query token, the token of the candidate that won.

    Args:
        Q, D, doc_offsets, doc_lengths, cu_seqlens_q, q_weight, normalize, backward: as in `maxsim_candidates_varlen`.

    Returns:
        ``(scores, argmax)``: the scores of `maxsim_candidates_varlen`, differentiable, and int64 winners, relative to
        their candidate: ``[Tq, K]`` for packed queries, ``[Nq, K, Lq]`` for dense ones, a list of ``[K, L_i]`` for a
        list, a jagged ``[Nq, K, L]`` for a jagged tensor; -1 as in `maxsim_varlen_with_argmax`.

    Raises:
        TypeError, ValueError: as `maxsim_candidates_varlen`.

    Example:
        >>> store, cu_seqlens = lik_ops.pack([torch.randn(n, 128) for n in (300, 12, 80)])
        >>> chosen = torch.tensor([[2, 0], [1, 1]])
        >>> offsets, lengths = cu_seqlens[:-1][chosen], cu_seqlens.diff()[chosen]
        >>> Q = torch.randn(2, 32, 128)
        >>> where = offsets, lengths
        >>> lik_ops.maxsim_candidates_varlen_with_argmax(Q, store, *where, normalize=True)[1].shape
        torch.Size([2, 2, 32])
    """
    options: dict[str, Any] = {"q_weight": q_weight, "normalize": normalize, "backward": backward, "with_argmax": True}
    options |= {"cu_seqlens_q": cu_seqlens_q, "d_shape": "[Td, d]", "lifts": "Q", "packs": "Q"}
    g = prepare_args("maxsim_candidates_varlen_with_argmax", Q, D, **options)
    return cast(tuple[Tensor, ArgmaxOutput], inputs.score_candidates(g, doc_offsets, doc_lengths))


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
    """The scores of `maxsim_pair_list` and, for each token of a pair's query, the token of its document that won.

    Args:
        Q, D, pairs, q_mask, d_mask, cu_seqlens_q, cu_seqlens_d, q_weight, normalize, backward: as in
            `maxsim_pair_list`.
        max_seqlen_q: as in `maxsim_pair_list`; here it is also the last axis of the winners, however long queries are,
            and needed on a GPU and in compiled code for packed queries and jagged tensors.

    Returns:
        ``(scores, argmax)``: the scores of `maxsim_pair_list`, differentiable, and int64 ``[P, Lq]``, for packed
        queries ``[P, max_seqlen_q]``: winners relative to their document, -1 beyond the tokens of a query, for masked
        ones, for a document that keeps no token, and where nothing is at an index or segment.

    Raises:
        TypeError, ValueError: as `maxsim_pair_list`.

    Example:
        >>> Q, D = torch.randn(4, 32, 128), torch.randn(100, 300, 128)
        >>> pairs = torch.tensor([[0, 17], [0, 3], [2, 99]])
        >>> lik_ops.maxsim_pair_list_with_argmax(Q, D, pairs, normalize=True)[1].shape
        torch.Size([3, 32])
    """
    options: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_d": cu_seqlens_d, "q_weight": q_weight}
    options |= {"q_mask": q_mask, "d_mask": d_mask, "normalize": normalize, "backward": backward, "with_argmax": True}
    options |= {"packs": "QD"}
    scores, argmax = inputs.score_pair_list(
        prepare_args("maxsim_pair_list_with_argmax", Q, D, **options), pairs, max_seqlen_q
    )
    return scores, cast(Tensor, argmax).long()


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
    """The scores of `maxsim_padded` and, for each query token, the token of the candidate that won.

    Args:
        Q, D, query_lengths, doc_lengths, q_weight, normalize, backward: as in `maxsim_padded`.

    Returns:
        ``(scores, argmax)``: the scores of `maxsim_padded`, differentiable, and int64 ``[B, C, Lq]``: winners, -1 for
        padding, for empty candidates and where a length is out of range.

    Raises:
        TypeError, ValueError: as `maxsim_padded`.

    Example:
        >>> Q, D = torch.randn(2, 32, 128), torch.randn(2, 10, 300, 128)
        >>> query_lengths, doc_lengths = torch.tensor([5, 32]), torch.randint(1, 300, (2, 10))
        >>> lik_ops.maxsim_padded_with_argmax(Q, D, query_lengths, doc_lengths, normalize=True)[1].shape
        torch.Size([2, 10, 32])
    """
    options: dict[str, Any] = {"q_weight": q_weight, "normalize": normalize, "backward": backward}
    scores, argmax = score_padded("maxsim_padded_with_argmax", Q, D, query_lengths, doc_lengths, True, **options)
    return scores, cast(Tensor, argmax)
