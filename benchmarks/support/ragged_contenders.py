"""The contenders on ragged cases and how to call each one.

A string instead of a function gives the reason for a missing contender.

Every contender is a function of its query and document tokens, packed or padded. Tensors that a caller would keep are
created once and not timed. Work that each call needs is timed. The packed functions of flash-maxsim compute in fp16
and copy other dtypes at every call, so they receive fp16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import lik_ops

from .common import (
    eager,
)
from .contenders import (
    EAGER_LIMIT,
    NOT_INSTALLED,
)
from .ragged_cases import (
    Inputs,
    Leaves,
    Scorer,
)


class Entry(NamedTuple):
    """A scoring function and its tokens."""

    score: Scorer
    tokens: Leaves


Contender = Entry | str
PACKED, PADDED, EAGER, DENSE = "lik_ops", "lik_ops padded", "padded eager", "dense mean"
LATE, FLASH, FLASH_PADDED = "late-interaction-kernels packed", "flash-maxsim packed", "flash-maxsim padded"


def _packed(x: Inputs) -> Scorer:
    layout, dense = x.case.layout, x.case.mean_q == 1
    cu_q = None if dense else x.cu_q
    if layout == "cross":
        return lambda Q, D: lik_ops.maxsim_varlen(Q, D, cu_q, x.cu_d)
    if layout == "candidates":
        offsets, lengths = x.chosen(x.cu_d[:-1]), x.chosen(x.d_lengths)
        return lambda Q, D: lik_ops.maxsim_candidates_varlen(Q, D, offsets, lengths, cu_seqlens_q=cu_q)
    longest = None if dense else x.Lq
    return lambda Q, D: lik_ops.maxsim_pair_list(
        Q, D, x.met, cu_seqlens_q=cu_q, cu_seqlens_d=x.cu_d, max_seqlen_q=longest
    )


def _padded(x: Inputs) -> Scorer:
    q_mask = None if x.case.mean_q == 1 else x.q_mask
    if x.case.layout == "cross":
        return lambda Q, D: lik_ops.maxsim(Q, D, q_mask, x.d_mask)
    if x.case.layout == "candidates":
        lengths = x.chosen(x.d_lengths)
        return lambda Q, D: lik_ops.maxsim_padded(Q, D, x.q_lengths, lengths)
    return lambda Q, D: lik_ops.maxsim_pair_list(Q, D, x.met, q_mask, x.d_mask)


def _eager(x: Inputs) -> Scorer | str:
    layout, training = x.case.layout, x.case.what == "step"
    similarities = x.met.shape[0] * x.Lq * x.Ld * x.dtype.itemsize
    if similarities * (2 if training else 1) >= EAGER_LIMIT:
        return "too many similarities"
    q_mask = None if x.case.mean_q == 1 else x.q_mask
    i, j = x.met.unbind(1)
    if layout == "pairs":
        q_mask, d_mask = x.q_mask[i], x.d_mask[j][:, None]
    else:
        d_mask = x.d_mask if layout == "cross" else x.chosen(x.d_mask)

    def score(Q: Tensor, D: Tensor) -> Tensor:
        if layout == "pairs":
            Q, D = Q[i], D[j][:, None]
        found = eager(Q, D, q_mask, d_mask, winners=training)  # amax would split gradients between ties
        scores = found[0] if isinstance(found, tuple) else found
        return scores[:, 0] if layout == "pairs" else scores

    return score


def _late(x: Inputs) -> Scorer | str:
    try:
        from late_interaction_kernels import maxsim_varlen
        from late_interaction_kernels.score_pairs import score_pairs_packed
    except ImportError:
        return NOT_INSTALLED
    most = {"max_seqlen_q": x.Lq, "max_seqlen_d": x.Ld}
    if x.case.layout == "cross":
        return lambda Q, D: maxsim_varlen(Q, D, x.cu_q, x.cu_d, **most)
    i, j = (side.int().contiguous() for side in x.met.unbind(1))
    return lambda Q, D: score_pairs_packed(Q, D, x.cu_q, x.cu_d, i, j, **most).view(x.shape)


def _flash(x: Inputs) -> Contender:
    """Return the packed call: one query, or a list of pairs packed one at a time. It has no gradients."""
    try:
        import flash_maxsim
    except ImportError:
        return NOT_INSTALLED
    if x.case.what == "step":
        return "no gradients of packed tokens"
    halves = x.Q.half(), x.D.half()
    if x.case.layout == "cross" and x.case.Nq == 1:
        return Entry(lambda Q, D: flash_maxsim.flash_maxsim_packed(Q, D, x.cu_d, x.Ld)[None], halves)
    if x.case.layout != "pairs":
        return "one query at a time, or aligned pairs"
    i, j = x.met.unbind(1)
    starts, rows = [], []
    for packed, cu, which in ((halves[0], x.cu_q, i), (halves[1], x.cu_d, j)):
        lengths = cu.diff()[which]
        starts.append(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int())
        first = (cu[:-1][which] - starts[-1][:-1]).repeat_interleave(lengths)
        rows.append(packed[first + torch.arange(len(first), device=first.device)])
    return Entry(lambda Q, D: flash_maxsim.flash_maxsim_varlen(Q, D, *starts, x.Lq, x.Ld), (rows[0], rows[1]))


def _flash_padded(x: Inputs) -> Scorer | str:
    try:
        import flash_maxsim
    except ImportError:
        return NOT_INSTALLED
    if x.case.layout == "pairs":
        return "no lists of pairs that share padded tokens"
    shared = x.case.layout == "cross"
    lengths = x.d_lengths.int() if shared else x.chosen(x.d_lengths).flatten().int()
    options = {"doc_lengths": lengths, "query_lengths": None if x.case.mean_q == 1 else x.q_lengths.int()}
    if x.case.what == "step":
        return lambda Q, D: flash_maxsim.flash_maxsim_batched_train(Q, D, shared, **options)
    if x.case.Nq == 1 and shared:
        return lambda Q, D: flash_maxsim.flash_maxsim(Q[0], D, doc_lengths=lengths)[None]
    return lambda Q, D: flash_maxsim.flash_maxsim_batched(Q, D, shared_docs=shared, **options)


def _of(score: Scorer | str, tokens: Leaves) -> Contender:
    return score if isinstance(score, str) else Entry(score, tokens)


def contenders(x: Inputs) -> dict[str, Contender]:
    """Return all contenders of a case, ours first."""
    packed = x.Q, x.D
    dense_queries = x.Q.view(x.case.Nq, x.Lq, x.case.d) if x.case.mean_q == 1 else x.Q
    Q, D = x.padded()
    padded = Q, x.chosen(D) if x.case.layout == "candidates" else D
    return {
        PACKED: Entry(_packed(x), (dense_queries, x.D)),
        PADDED: _of(_padded(x), padded),
        LATE: _of(_late(x), packed),
        FLASH: _flash(x),
        FLASH_PADDED: _of(_flash_padded(x), padded),
        EAGER: _of(_eager(x), padded),
    }


def dense_mean(x: Inputs) -> Entry:
    """Return the dense kernel on sequences that all have the mean length. It scores different tokens."""
    return Entry(lik_ops.maxsim_pairs if x.case.layout == "pairs" else lik_ops.maxsim, x.dense_tokens())
