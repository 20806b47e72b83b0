"""Forward calls of few long documents: programs share a document, a second launch puts together what they found.

Documents are cut evenly into as many sections as keep all multiprocessors reading, by lengths that the device alone
may know. Bits are those of calls that do not cut.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ...core.segments import Cut, Dense
from ...csrc_triton.common.arguments import PackedSizes, Queries, Sections
from ...csrc_triton.forward.generic import row_sums
from ...csrc_triton.forward.generic.packed import maxsim_forward_ragged
from .. import choose
from ..runtime import launcher
from ..runtime.arguments import (
    checked_grid,
    descriptor,
    is_even,
    on_device,
    packed_documents,
    packed_queries,
    queries_of,
    segments_of,
)
from ..tuning import architectures
from .plans import DensePlan

_log = logging.getLogger("lik_ops")


def score_sections(
    choice: choose.Sectioned, c: Cut, queries: Queries, rows: tuple[int, int], scores: Tensor, argmax: Tensor | None
) -> None:
    """Fill scores ``[Nq, Nd]`` and, unless it is None, winners ``[Nd, Tq]``.

    Args:
        queries: the ``(n, L)`` rows of Q in n groups, for their sums.
        rows: n and L.
    """
    config, most = choice.launch.config, choice.most
    maxima = torch.empty((most, c.Tq), dtype=torch.float32, device=c.Q.device)
    winners = None if argmax is None else torch.empty((most, c.Tq), dtype=torch.int32, device=c.Q.device)
    kept = None if c.d_mask is None else torch.empty(most, dtype=torch.int32, device=c.Q.device)
    norms = torch.empty(c.Tq, dtype=torch.float32, device=c.Q.device) if config.NORMALIZE else None
    cut = Sections(maxima, winners, kept, norms, argmax, most, choice.each)
    segments, documents = segments_of(c), packed_documents(c, masked=True)
    packed = packed_queries(c._replace(q_weight=None))  # which the sums have
    sizes, d = PackedSizes(c.queries, c.columns, c.Tq, c.Td, c.max_seqlen_q), c.Q.shape[-1]
    tiles = descriptor(c.D, config) if choice.reads_tiles else None
    args = (packed, documents, tiles, None, None, segments, cut, sizes, d, choice.levels, config)
    launcher.launch(maxsim_forward_ragged, checked_grid(choice.programs), args, choice.launch.options(choice.arch))
    _, side, *_ = choice.sums
    found = (None, cut, scores, queries, segments, c.queries, scores.stride(0), rows[0], c.columns, rows[1], c.Td)
    grid = (architectures.cdiv(c.queries, side) * c.columns,)
    launcher.launch(row_sums.maxsim_row_sums, grid, (*found, *choice.sums, config), choice.sums_options)
    _log.debug("sections of %s documents, %s tokens: %s", c.columns, c.Td, choice)


def forward_packed(choice: choose.Sectioned, c: Cut, queries: Queries, argmax: Tensor | None) -> tuple[Tensor, ...]:
    """Scores ``[Nq, Nd]`` of packed tokens; and, unless it is None, `argmax`, filled with the winners ``[Nd, Tq]``."""
    scores = torch.empty(c.scores_shape(), dtype=torch.float32, device=c.Q.device)
    with on_device(c.Q.device):
        score_sections(choice, c, queries, (1, c.Tq), scores, argmax)
    return (scores,) if argmax is None else (scores, argmax)


class SectionsPlan(DensePlan):
    """Dense documents."""

    def __init__(self, choice: choose.Sectioned, Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None) -> None:
        super().__init__(Q, D, argmax_dtype)
        self.choice = choice

    def _score(self, x: Dense, scores: Tensor, argmax: Tensor | None) -> None:
        q_mask = x.q_mask if x.q_mask is None or is_even(x.q_mask) else None  # a mask only spares work there
        c = choose.cut_of(x.Q, x.D, q_mask, x.d_mask)
        queries = queries_of(x.Q, x.q_mask, x.q_weight)
        score_sections(self.choice, c, queries, (self.sizes.Nq, self.sizes.Lq), scores, argmax)
