"""The portable forward of few query tokens: they are the rows of slices, whose columns are document tokens.

The columns of the other slices would be padding for the most part. Documents lie in slices as they follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import torch
from torch import Tensor

from .blocks import BEST_BYTES, SIMILARITY_BYTES, STEPS, Layout, ceil_div, may_look, round_up, slice_shape
from .few import PART_BYTES, Few, few_rows_for
from .slices import NEG_INF, Cut, Part

QUERY_TOKENS = 8
LEAST_TOKENS = 16  # of the documents that a query meets


class Turned(Few):
    """Forward of calls whose query tokens are few."""

    @staticmethod
    def takes(layout: Layout) -> bool:
        _, Y, Lq, d = layout.Q.shape
        X, Ld = layout.D.shape[1:3]
        if Y * Lq > QUERY_TOKENS or X * Ld < LEAST_TOKENS or not may_look(layout.pairs):
            return False
        columns, dtype = _columns(X * Ld, layout.pairs.dtype), layout.pairs.dtype
        fits = columns * d * dtype.itemsize <= PART_BYTES
        return fits and few_rows_for(Y * Lq, columns, d, dtype, turned=True) is not None

    def __init__(self, layout: Layout, normalize: bool) -> None:
        self.layout, self.normalize, self.dtype = layout, normalize, layout.pairs.dtype
        _, Y, self.Lq, d = layout.Q.shape
        X, self.Ld = layout.D.shape[1:3]
        self.tokens, size = Y * self.Lq, self.dtype.itemsize
        self.shape = slice_shape(self.Lq, self.Ld, d, self.dtype)._replace(queries=1)
        self.columns = _columns(X * self.Ld, self.dtype)
        rows = few_rows_for(self.tokens, self.columns, d, self.dtype, turned=True)
        assert rows is not None
        self.rows, similarities = rows, rows * self.columns
        slices = max(2, min(SIMILARITY_BYTES // (similarities * size), PART_BYTES // (self.columns * d * size)))
        self.similarities = layout.pairs.new_empty(slices * similarities)
        self.most = slices * self.columns  # document tokens of a part
        entries = max(1, BEST_BYTES // (self.tokens * size))
        self.cut = Cut(1, 1, max(1, entries // X), min(X, entries), Y, 1, 1)

    def _fill(self, slab: Part, u0: int, u1: int) -> None:
        layout, (batches, X) = self.layout, (slab.b1 - slab.b0, slab.x1 - slab.x0)
        self.best = layout.pairs.new_empty((batches, X, u1 - u0, self.Lq))
        for b, x, t in self._document_parts(slab):
            S = self._of_documents(b, x, t)
            best = self.best[b.start - slab.b0 : b.stop - slab.b0, x.start - slab.x0 : x.stop - slab.x0]
            if layout.argmax is not None:
                value, index = (self._ordered(found) for found in S.max(-1))
                self._keep(t.start, value, index, best, layout.argmax[b, x])
            elif t.start == 0:
                best.copy_(self._ordered(S.amax(-1)))
            else:
                torch.maximum(best, self._ordered(S.amax(-1)), out=best)

    def _document_parts(self, slab: Part) -> Iterator[tuple[slice, slice, slice]]:
        """Batches, documents and tokens that are multiplied together: several of what fits."""
        X, Ld = slab.x1 - slab.x0, self.Ld
        batches = max(1, self.most // round_up(X * Ld, self.columns))
        whole = self.columns // gcd(self.columns, Ld)
        documents = X if X * Ld <= self.most else max(1, self.most // Ld)
        if documents < X:
            documents = documents // whole * whole or documents
        for b0 in range(slab.b0, slab.b1, batches):
            for x0 in range(slab.x0, slab.x1, documents):
                for t0 in range(0, Ld, self.most):
                    b1, x1 = min(b0 + batches, slab.b1), min(x0 + documents, slab.x1)
                    yield slice(b0, b1), slice(x0, x1), slice(t0, min(t0 + self.most, Ld))

    def _of_documents(self, b: slice, x: slice, t: slice) -> Tensor:
        """``[batches, query tokens, documents, tokens]`` of a part, masked tokens ``-inf``."""
        layout, (batches, X, Ld) = self.layout, (s.stop - s.start for s in (b, x, t))
        panels = ceil_div(X * Ld, self.columns)
        D = self._slices(layout.D[b, x, t], X * Ld, panels * self.columns, 1 if panels > 1 else 2)
        D = D.unflatten(1, (panels, self.columns)).flatten(0, 1)
        whole = slice(0, layout.Q.shape[1]), slice(0, self.Lq)
        Q = self._slices(layout.Q[(b, *whole)], self.tokens, self.rows)
        n = D.shape[0]
        if batches == 1:
            Q = Q[:1].expand(n, -1, -1)
        elif panels > 1:
            Q = Q.repeat_interleave(panels, 0)
        S = self.similarities[: n * self.rows * self.columns].view(n, self.rows, self.columns)
        torch.bmm(Q, D.mT, out=S)
        S = S[: batches * panels, : self.tokens].unflatten(0, (batches, panels)).transpose(1, 2)
        S = S.reshape(batches, self.tokens, -1)[..., : X * Ld].unflatten(2, (X, Ld))
        return S if layout.d_mask is None else S.masked_fill(~layout.d_mask[b, x, t].unsqueeze(1), NEG_INF)

    def _ordered(self, values: Tensor) -> Tensor:
        """``[batches, query tokens, documents]`` as ``[batches, documents, queries, tokens]``."""
        return values.unflatten(1, (-1, self.Lq)).permute(0, 3, 1, 2)

    def _keep(self, start: int, value: Tensor, index: Tensor, best: Tensor, argmax: Tensor) -> None:
        """Maxima and winners of tokens from `start` on, where no earlier token has as much."""
        if start == 0:
            best.copy_(value)
            argmax.copy_(index)
            return
        better = (value > best) | (value.isnan() & ~best.isnan())
        best.copy_(torch.where(better, value, best))
        argmax.copy_(torch.where(better, (index + start).to(argmax.dtype), argmax))


def _columns(tokens: int, dtype: torch.dtype) -> int:
    """Columns of slices of so many document tokens: two slices where they fill them."""
    _, step, most = STEPS[dtype]
    return max(step, min(most, tokens // 2 // step * step))
