"""What every portable forward does: slab by slab, the maxima of query tokens are found, weighted and summed."""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan

import torch
import torch.nn.functional as F
from torch import Tensor

from ..blocks import find_first_true, is_host_readable, split_range, sum_pairwise
from ..layout import BatchedArgs

NEG_INF = float("-inf")


class PortableForward:
    """One call. A subclass plans in `_plan` how large slabs are and finds the maxima of each in `_fill`.

    A *unit* is one query, or several that a subclass computes together. A *slab* is ``[batches, documents, units]``.
    """

    queries = 1  # of a unit
    least = 1  # documents of a slab or block, where there are as many
    width: int  # elements of `best` for each unit, at least its query tokens
    slab: tuple[int, int, int]  # batches, documents and units that `best` has room for

    def __init__(self, layout: BatchedArgs, normalize: bool) -> None:
        self.layout, self.normalize, self.dtype = layout, normalize, layout.pairs.dtype
        self.may_look = is_host_readable(layout.pairs)
        (self.B, self.Y, self.Lq, self.d), (self.X, self.Ld) = layout.Q.shape, layout.D.shape[1:3]
        self.width, self.units = self.Lq, self.Y
        self._plan()
        self.best = layout.pairs.new_empty((*self.slab, self.width))

    def _plan(self) -> None:
        """Sets `slab`; `queries`, `units` and `width` where they are others; and what `_fill` needs."""
        raise NotImplementedError

    def _fill(self, b: slice, x: slice, u: slice) -> None:
        """Put the maxima of a slab into `best`, from its start on, and the winners into the output."""
        raise NotImplementedError

    def run(self) -> None:
        for b in split_range(0, self.B, self.slab[0]):
            for u in split_range(0, self.units, self.slab[2]):
                for x in self._steps(0, self.X, self.slab[1]):
                    self._fill(b, x, u)
                    self._finish(b, x, u)

    def _steps(self, first: int, last: int, step: int) -> Iterator[slice]:
        """``[first, last)`` by `step` documents; the last step takes documents once more to have `least`."""
        for x in split_range(first, last, step):
            yield slice(max(first, min(x.start, x.stop - self.least)), x.stop)

    def _finish(self, b: slice, x: slice, u: slice) -> None:
        """The scores of a slab, and its winners where a mask decides."""
        layout, q, units = self.layout, self.queries, u.stop - u.start
        y = slice(u.start * q, min(u.stop * q, self.Y))
        count = y.stop - y.start
        best = self.best[: b.stop - b.start, : x.stop - x.start, :units, : q * self.Lq].unflatten(-1, (q, self.Lq))
        q_mask = None if layout.q_mask is None else layout.q_mask[b, y]
        d_mask = None if layout.d_mask is None else layout.d_mask[b, x]
        if layout.argmax is not None:
            argmax = layout.argmax[b, x, y]
            if d_mask is not None:
                lost = (best == NEG_INF).flatten(2, 3)[:, :, :count]
                first = find_first_true(d_mask).to(argmax.dtype)[:, :, None, None]
                argmax.copy_(torch.where(lost, first, argmax))
                argmax.masked_fill_(~d_mask.any(-1)[:, :, None, None], -1)
            if q_mask is not None:
                argmax.masked_fill_(~q_mask[:, None], -1)
        if layout.q_weight is not None:
            best *= self._group_by_unit(layout.q_weight[b, y], units)
        if q_mask is not None:
            best.masked_fill_(self._group_by_unit(~q_mask, units), 0)
        scores = layout.pairs[b, x, y]
        scores.copy_(sum_pairwise(best).flatten(2)[:, :, :count])
        if d_mask is not None:
            empty = ~d_mask.any(-1)[:, :, None]
            scores.masked_fill_(empty if q_mask is None else empty & q_mask.any(-1)[:, None], NEG_INF)

    def _group_by_unit(self, of_queries: Tensor, units: int) -> Tensor:
        """``[batches, queries, Lq]`` as ``[batches, 1, units, queries of a unit, Lq]``, zeros where there is none."""
        missing = units * self.queries - of_queries.shape[1]
        if missing:
            of_queries = F.pad(of_queries, (0, 0, 0, missing))
        return of_queries.unflatten(1, (units, self.queries)).unsqueeze(1)


def reduce_maxima(S: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Maxima of each `tokens` rows of ``S [n, rows, columns]`` and their first indices; NaN counts as the maximum.

    Both are ``[n, rows // tokens, columns]``.
    """
    n, rows, columns = S.shape
    if is_host_readable(S):
        # torch.max finds indices one element at a time; pooling over an image of `columns` channels, channels last,
        # a vector at a time. Of several NaN it takes the last.
        image = S.unsqueeze(-2).permute(0, 3, 1, 2)
        pooled = F.max_pool2d(image, (tokens, 1), return_indices=True)
        value, index = (x.permute(0, 2, 3, 1).reshape(n, -1, columns) for x in pooled)
        if not isnan(value.sum()):
            if tokens < rows:
                index -= torch.arange(0, rows // tokens * tokens, tokens).unsqueeze(-1)
            return value, index
    return S[:, : rows // tokens * tokens].unflatten(1, (-1, tokens)).max(2)


def update_maxima(best: Tensor, argmax: Tensor, value: Tensor, index: Tensor, start: int) -> None:
    """Keep maxima and winners of the tokens from `start` on, where no earlier token has as much; all have one shape."""
    if start == 0:
        best.copy_(value)
        argmax.copy_(index)
        return
    better = (value > best) | (value.isnan() & ~best.isnan())
    best.copy_(torch.where(better, value, best))
    argmax.copy_(torch.where(better, (index + start).to(argmax.dtype), argmax))
