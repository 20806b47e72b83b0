"""The base of all portable forwards: compute, weight and sum the maxima of query tokens, slab by slab."""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan

import torch
import torch.nn.functional as F
from torch import Tensor

from ..blocks import is_host_readable, split_range, sum_pairwise
from ..layout import BatchedArgs

NEG_INF = float("-inf")


class PortableForward:
    """One call: a subclass sets the size of slabs in `_plan` and computes the maxima of a slab in `_fill`.

    A *unit* is one query, or several queries that a subclass computes together. A *slab* is ``[batches, documents,
    units]``.
    """

    queries = 1  # queries of a unit
    min_documents = 1  # minimum documents of a slab or block, if the call has as many
    width: int  # elements of `best` for each unit, at least its number of query tokens
    slab: tuple[int, int, int]  # batches, documents and units that `best` has room for

    def __init__(self, layout: BatchedArgs, normalize: bool) -> None:
        self.layout, self.normalize, self.dtype = layout, normalize, layout.pairs.dtype
        self.may_look = is_host_readable(layout.pairs)
        (self.B, self.Y, self.Lq, self.d), (self.X, self.Ld) = layout.Q.shape, layout.D.shape[1:3]
        self.width, self.units = self.Lq, self.Y
        self._plan()
        self.best = layout.pairs.new_empty((*self.slab, self.width))

    def _plan(self) -> None:
        """Set `slab`, other state of `_fill`, and `queries`, `units` and `width` if they are not the defaults."""
        raise NotImplementedError

    def _fill(self, b: slice, x: slice, u: slice) -> None:
        """Write the maxima of a slab to the start of `best`, and the argmax to the output."""
        raise NotImplementedError

    def run(self) -> None:
        """Compute all slabs."""
        for b in split_range(0, self.B, self.slab[0]):
            for u in split_range(0, self.units, self.slab[2]):
                for x in self._steps(0, self.X, self.slab[1]):
                    self._fill(b, x, u)
                    self._finish(b, x, u)

    def _steps(self, first: int, last: int, step: int) -> Iterator[slice]:
        """Yield ``[first, last)`` in steps of `step` documents; the last step may overlap to have `min_documents`."""
        for x in split_range(first, last, step):
            yield slice(max(first, min(x.start, x.stop - self.min_documents)), x.stop)

    def _finish(self, b: slice, x: slice, u: slice) -> None:
        """Compute the scores of a slab from its maxima, and the argmax that depends on masks."""
        layout, q, units = self.layout, self.queries, u.stop - u.start
        y = slice(u.start * q, min(u.stop * q, self.Y))
        count = y.stop - y.start
        best = self.best[: b.stop - b.start, : x.stop - x.start, :units, : q * self.Lq].unflatten(-1, (q, self.Lq))
        q_mask = None if layout.q_mask is None else layout.q_mask[b, y]
        d_mask = None if layout.d_mask is None else layout.d_mask[b, x]
        if layout.argmax is not None:
            argmax = layout.argmax[b, x, y]
            if d_mask is not None:
                is_unmatched = (best == NEG_INF).flatten(2, 3)[:, :, :count]
                first = d_mask.view(torch.uint8).argmax(-1).to(argmax.dtype)[:, :, None, None]  # the first True
                argmax.copy_(torch.where(is_unmatched, first, argmax))
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
        """Reshape ``[batches, queries, Lq]`` to ``[batches, 1, units, queries of a unit, Lq]``, padded with zeros."""
        padding = units * self.queries - of_queries.shape[1]
        if padding:
            of_queries = F.pad(of_queries, (0, 0, 0, padding))
        return of_queries.unflatten(1, (units, self.queries)).unsqueeze(1)


def reduce_maxima(S: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Reduce groups of `tokens` rows of ``S [n, rows, columns]`` to maxima and the first indices; NaN is the maximum.

    Both are ``[n, rows // tokens, columns]``.
    """
    n, rows, columns = S.shape
    if is_host_readable(S):
        # torch.max finds indices one element at a time. Pooling over a channels-last image with `columns` channels
        # finds a vector of indices at a time. If there are several NaN, pooling returns the last one.
        image = S.unsqueeze(-2).permute(0, 3, 1, 2)
        results = F.max_pool2d(image, (tokens, 1), return_indices=True)
        value, index = (x.permute(0, 2, 3, 1).reshape(n, -1, columns) for x in results)
        if not isnan(value.sum()):
            if tokens < rows:
                index -= torch.arange(0, rows // tokens * tokens, tokens).unsqueeze(-1)
            return value, index
    return S[:, : rows // tokens * tokens].unflatten(1, (-1, tokens)).max(2)


def update_maxima(best: Tensor, argmax: Tensor, value: Tensor, index: Tensor, start: int) -> None:
    """Merge the maxima and argmax of the tokens from `start` on into `best` and `argmax`.

    An earlier token wins a tie. All tensors have one shape.
    """
    if start == 0:
        best.copy_(value)
        argmax.copy_(index)
        return
    is_better = (value > best) | (value.isnan() & ~best.isnan())
    best.copy_(torch.where(is_better, value, best))
    argmax.copy_(torch.where(is_better, (index + start).to(argmax.dtype), argmax))
