"""Forward calls of few long documents, which are cut into splits.

Several programs share a document, and a second launch merges their results. Documents are cut evenly into as many
splits as keep all SMs busy. Their lengths may be known only on the device. The results have the same bits as results
without splits.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ...core.segments import DenseArgs, PackedArgs
from ...csrc_triton.common.arguments import (
    CodecDequantArgs,
    DequantArgs,
    PackedSizeArgs,
    QueryArgs,
    SplitArgs,
    TermArgs,
)
from ...csrc_triton.forward.generic import row_sums
from ...csrc_triton.forward.generic.kernel import maxsim_forward_packed
from .. import generic_choices
from ..generic_choices import SplitChoice
from ..runtime import launcher
from ..runtime.arguments import (
    check_grid,
    has_even_stride,
    make_descriptor,
    make_packed_document_args,
    make_packed_query_args,
    make_query_args,
    make_segment_args,
    use_device,
)
from ..tuning import architectures
from .plans import DensePlan

_log = logging.getLogger("lik_ops")


def score_splits(
    choice: SplitChoice,
    c: PackedArgs,
    queries: QueryArgs,
    rows: tuple[int, int],
    scores: Tensor,
    argmax: Tensor | None,
    terms: TermArgs | None = None,
    counts: DequantArgs | CodecDequantArgs | None = None,
) -> None:
    """Fill the scores and, unless it is None, the argmax.

    Args:
        choice: the choice of splits.
        c: the packed call.
        queries: the ``(n, L)`` rows of Q in n groups, for their sums.
        rows: n and L.
        scores: output ``[Nq, Nd]``.
        argmax: output ``[Nd, Tq]``, or None.
        terms: the query rows as int8 terms, or None.
        counts: dequantization arguments of encoded documents, or None.
    """
    config, max_splits = choice.launch.config, choice.max_splits
    maxima = torch.empty((max_splits, c.Tq), dtype=torch.float32, device=c.Q.device)
    split_argmax = None if argmax is None else torch.empty((max_splits, c.Tq), dtype=torch.int32, device=c.Q.device)
    kept_flags = None if c.d_mask is None else torch.empty(max_splits, dtype=torch.int32, device=c.Q.device)
    norms = torch.empty(c.Tq, dtype=torch.float32, device=c.Q.device) if config.NORMALIZE else None
    cut = SplitArgs(maxima, split_argmax, kept_flags, norms, argmax, max_splits, choice.split_tokens)
    segments, documents = make_segment_args(c), make_packed_document_args(c, masked=True)
    packed = make_packed_query_args(c._replace(q_weight=None))  # the sums apply the weights
    sizes, d = PackedSizeArgs(c.queries, c.columns, c.Tq, c.Td, c.max_seqlen_q), c.Q.shape[-1]
    tiles = make_descriptor(c.D, config) if choice.uses_descriptor else None
    args = (packed, documents, tiles, terms, counts, segments, cut, sizes, d, choice.levels, config)
    launcher.launch(maxsim_forward_packed, check_grid(choice.programs), args, choice.launch.options(choice.arch))
    _, side, *_ = choice.sums
    sum_args = (None, cut, scores, queries, segments, c.queries, scores.stride(0), rows[0], c.columns, rows[1], c.Td)
    grid = (architectures.cdiv(c.queries, side) * c.columns,)
    launcher.launch(row_sums.maxsim_row_sums, grid, (*sum_args, *choice.sums, config), choice.make_sum_options)
    _log.debug("splits of %s documents, %s tokens: %s", c.columns, c.Td, choice)


def forward_splits(
    choice: SplitChoice,
    c: PackedArgs,
    queries: QueryArgs,
    argmax: Tensor | None,
    terms: TermArgs | None,
    counts: DequantArgs | CodecDequantArgs | None,
) -> tuple[Tensor, ...]:
    """Return scores ``[Nq, Nd]`` of packed tokens and, unless it is None, `argmax` after filling it ``[Nd, Tq]``.

    See `score_splits` for `terms` and `counts`.
    """
    scores = torch.empty(c.scores_shape(), dtype=torch.float32, device=c.Q.device)
    with use_device(c.Q.device):
        score_splits(choice, c, queries, (1, c.Tq), scores, argmax, terms, counts)
    return (scores,) if argmax is None else (scores, argmax)


class DocumentSplitPlan(DensePlan):
    """A call of dense documents that are cut into splits."""

    def __init__(self, choice: SplitChoice, Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None) -> None:
        super().__init__(Q, D, argmax_dtype)
        self.choice = choice

    def _score(self, x: DenseArgs, scores: Tensor, argmax: Tensor | None) -> None:
        # A query mask only saves work in this kernel.
        q_mask = x.q_mask if x.q_mask is not None and has_even_stride(x.q_mask) else None
        c = generic_choices.make_cut(x.Q, x.D, q_mask, x.d_mask)
        queries = make_query_args(x.Q, x.q_mask, x.q_weight)
        score_splits(self.choice, c, queries, (self.sizes.Nq, self.sizes.Lq), scores, argmax)
