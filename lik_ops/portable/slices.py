"""The portable forward by slices: their similarities, the maximum of each query token, the sums of these.

`blocks` says what a slice is. Queries that share a slice, or a single query, are a *unit*; a unit has one or
several panels, the query sides of its slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import isnan
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import (
    BEST_BYTES,
    DOCUMENT_BYTES,
    MIN_ROWS,
    PANEL_BYTES,
    SIMILARITY_BYTES,
    Layout,
    SliceShape,
    ceil_div,
    copy_grouped,
    first_true,
    fold_sum,
    lies_ready,
    may_look,
    row_norms,
    slice_shape,
    slices_buffer,
)

NEG_INF = float("-inf")


class Cut(NamedTuple):
    """How much is done at a time: a slab holds the maxima of ``[batches, documents, units]``, blocks fill it."""

    block_batches: int  # batches in one bmm; above 1 only where a block holds all documents of its batches
    block_slices: int  # slices of each of them
    slab_batches: int
    slab_documents: int
    slab_units: int
    span_units: int  # units whose panels are kept
    span_panels: int  # and how many panels of each


def most_slices(shape: SliceShape, d: int, dtype: torch.dtype) -> int:
    """Slices that the budgets of a block allow."""
    documents, similarities = (shape.rows * n * dtype.itemsize for n in (d, shape.columns))
    return max(2, min(DOCUMENT_BYTES // documents, SIMILARITY_BYTES // similarities))


@lru_cache(maxsize=1024)
def cut_of(shape: SliceShape, most: int, B: int, X: int, Y: int, d: int, dtype: torch.dtype) -> Cut:
    """How a call is cut whose blocks have at most `most` slices."""
    size = dtype.itemsize
    unit_width = shape.panels * shape.columns
    panel_bytes = shape.columns * d * size
    entries = BEST_BYTES // size
    most = min(most, entries // (unit_width * shape.documents))
    per_batch, units = ceil_div(X, shape.documents), ceil_div(Y, shape.queries)
    # Batches of few documents go several at a time, and then each slice has panels of its own.
    batches = max(1, min(B, min(most, PANEL_BYTES // panel_bytes) // per_batch)) if B > 1 else 1
    block_slices = per_batch if batches > 1 else max(1, min(most, per_batch))
    block_documents = block_slices * shape.documents

    def steps(budget: int, total: int) -> int:
        return max(1, min(budget, total))

    slab_units = steps(min(entries // (unit_width * block_documents * batches), (1 << 14) // unit_width), units)
    blocks = steps(entries // (unit_width * slab_units * block_documents * batches), ceil_div(X, block_documents))
    slab_batches = 1
    if batches > 1:
        per_slab = entries // (unit_width * slab_units * block_documents * batches)
        slab_batches = batches * steps(per_slab, ceil_div(B, batches))
        panel_bytes *= batches * block_slices
    span_panels = steps(PANEL_BYTES // panel_bytes, shape.panels)
    span_units = steps(PANEL_BYTES // (panel_bytes * shape.panels), slab_units) if span_panels == shape.panels else 1
    return Cut(batches, block_slices, slab_batches, blocks * block_documents, slab_units, span_units, span_panels)


class Part(NamedTuple):
    """The documents of a slab, or of one bmm: ``[x0, x1)`` of the batches ``[b0, b1)``."""

    b0: int
    b1: int
    x0: int
    x1: int


class Panel(NamedTuple):
    """The query side of one bmm."""

    unit: int
    tile: int  # of the unit's panels
    columns: Tensor  # [slices, d, columns]
    best: Tensor  # its part of the slab, [batches * documents of the slab, columns]


class _Views(NamedTuple):
    """The buffers as a block of some size uses them."""

    used: int  # slices that hold something
    documents: Tensor  # [slices, rows, d], of which on CPU no more than needed, but two
    similarities: Tensor  # [slices, rows, columns]
    target: Tensor  # where documents go, [batches, slices of a batch, documents of a slice, tokens, d]
    masked: Tensor | None  # [used, rows]
    masked_target: Tensor | None  # as `target` with d = 1


class Forward:
    """One call: its cut, its buffers and the loops over slabs, panels and blocks."""

    least = 1  # documents of a block, where there are as many

    def __init__(self, layout: Layout, normalize: bool) -> None:
        self.layout, self.normalize = layout, normalize
        Y, Lq, d = layout.Q.shape[1:]
        dtype = layout.pairs.dtype
        self.may_look = may_look(layout.pairs)
        self.shape = shape = slice_shape(Lq, layout.D.shape[2], d, dtype)
        self._plan()
        cut, new = self.cut, layout.pairs.new_empty
        each = self.slices if cut.block_batches > 1 else 1
        # Columns that no token fills have to be numbers: NaN among the maxima is costly, see `winners`.
        full = shape.queries * Lq == shape.panels * shape.columns and Y % shape.queries == 0
        size = (each, cut.span_units, cut.span_panels * shape.columns, d)
        self.panels = new(size, dtype=dtype) if full else layout.pairs.new_zeros(size, dtype=dtype)
        self.best = new(
            (cut.slab_batches, cut.slab_documents, cut.slab_units, shape.panels * shape.columns), dtype=dtype
        )

    def _plan(self) -> None:
        """Sets `cut`, `slices`, which is how many are in one bmm at most, and the buffers of a block."""
        layout, shape, dtype = self.layout, self.shape, self.layout.pairs.dtype
        B, Y, _, d = layout.Q.shape
        X, Ld = layout.D.shape[1:3]
        self.tokens = Ld if len(shape.starts) == 1 else shape.rows  # of one document in a slice
        # One slice alone would go to another kernel of MKL than several. Other libraries may choose by their number.
        most = most_slices(shape, d, dtype)
        self.cut = cut = cut_of(shape, most, B, X, Y, d, dtype)
        self.slices = max(2, cut.block_batches * cut.block_slices) if self.may_look else most
        new = layout.pairs.new_empty
        self.documents = slices_buffer(layout.pairs, self.slices, shape.rows, d, dtype)
        self.similarities = new((self.slices, shape.rows, shape.columns), dtype=dtype)
        self.masked = None if layout.d_mask is None else new((self.slices, shape.rows), dtype=torch.bool).zero_()
        self.views: dict[tuple[int, int], _Views] = {}
        whole = shape.documents == 1 and self.tokens == shape.rows >= MIN_ROWS
        self.in_place = whole and self.may_look and not self.normalize and lies_ready(layout.D, dtype)
        if self.in_place and cut.block_batches > 1:  # slices of one bmm have one distance
            self.in_place = layout.D.stride(0) == X * layout.D.stride(1)

    def run(self) -> None:
        B, Y = self.layout.Q.shape[:2]
        X, cut = self.layout.D.shape[1], self.cut
        units = ceil_div(Y, self.shape.queries)
        for b0 in range(0, B, cut.slab_batches):
            for u0 in range(0, units, cut.slab_units):
                for x0, x1 in self._steps(0, X, cut.slab_documents):
                    slab = Part(b0, min(b0 + cut.slab_batches, B), x0, x1)
                    u1 = min(u0 + cut.slab_units, units)
                    self._fill(slab, u0, u1)
                    self._finish(slab, u0, u1)

    def _steps(self, first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
        """``[first, last)`` by `step` documents; the last step takes documents once more to have `least`."""
        for x0 in range(first, last, step):
            x1 = min(x0 + step, last)
            yield max(first, min(x0, x1 - self.least)), x1

    def _fill(self, slab: Part, u0: int, u1: int) -> None:
        """The maxima of a slab, block by block; winners go straight to the output."""
        cut = self.cut
        for b0 in range(slab.b0, slab.b1, cut.block_batches):
            b1 = min(b0 + cut.block_batches, slab.b1)
            for panels in self._spans(slab, b0, b1, u0, u1):
                for x0, x1 in self._steps(slab.x0, slab.x1, cut.block_slices * self.shape.documents):
                    self._compute(Part(b0, b1, x0, x1), x0 - slab.x0, panels)

    def _compute(self, block: Part, place: int, panels: list[Panel]) -> None:
        """The maxima of a block, whose documents begin at `place` of the slab."""
        views = self._views(block.b1 - block.b0, block.x1 - block.x0)
        for start in self.shape.starts:
            documents = self._load_documents(block, start, views)
            for panel in panels:
                best = panel.best.narrow(0, place, views.used * self.shape.documents)
                self._score(block, start, documents, views, panel, best)

    def _spans(self, slab: Part, b0: int, b1: int, u0: int, u1: int) -> Iterator[list[Panel]]:
        """Load the panels of units ``[u0, u1)`` for batches ``[b0, b1)``, as many at a time as there is room for."""
        cut, width = self.cut, self.shape.columns
        best = self.best[b0 - slab.b0 : b1 - slab.b0].flatten(0, 1)
        for v0 in range(u0, u1, cut.span_units):
            v1 = min(v0 + cut.span_units, u1)
            for p0 in range(0, self.shape.panels, cut.span_panels):
                p1 = min(p0 + cut.span_panels, self.shape.panels)
                loaded = self._load_panels(b0, b1, v0, v1, p0, p1)
                yield [
                    Panel(unit, p, columns, unit_best)
                    for p in range(p0, p1)
                    for unit, columns, unit_best in zip(
                        range(v0, v1),
                        self._columns(loaded[:, :, (p - p0) * width : (p - p0 + 1) * width]).unbind(1),
                        best[:, v0 - u0 : v1 - u0, p * width : (p + 1) * width].unbind(1),
                        strict=True,
                    )
                ]

    def _columns(self, loaded: Tensor) -> Tensor:
        """``[slices | 1, units, columns, d]`` as ``[slices, units, d, columns]``."""
        return loaded.mT if loaded.shape[0] == self.slices else loaded.mT.expand(self.slices, -1, -1, -1)

    def _load_panels(self, b0: int, b1: int, u0: int, u1: int, p0: int, p1: int) -> Tensor:
        """Tokens of the queries of units ``[u0, u1)`` in panels ``[p0, p1)``: ``[slices | 1, units, columns, d]``."""
        shape, Q = self.shape, self.layout.Q
        rows = slice(u0 * shape.queries, u1 * shape.queries), slice(p0 * shape.columns, p1 * shape.columns)
        queries = Q[(slice(b0, b1), *rows)].unsqueeze(1)
        tokens = queries.shape[-2]
        loaded = self.panels[:, : u1 - u0]
        used = (b1 - b0) * (self.cut.block_slices if self.cut.block_batches > 1 else 1)
        target = loaded[:used].unflatten(0, (b1 - b0, -1))[..., : shape.queries * tokens, :]
        target = target.unflatten(-2, (shape.queries, tokens))
        copy_grouped(target, queries.expand(-1, target.shape[1], -1, -1, -1))
        if self.normalize:
            loaded /= row_norms(loaded)
        return loaded

    def _views(self, batches: int, count: int) -> _Views:
        """The buffers for a block of `count` documents of each of `batches`."""
        if (batches, count) not in self.views:
            shape = self.shape
            used = batches * ceil_div(count, shape.documents)
            n = max(used, 2) if self.may_look else self.slices

            def target(buffer: Tensor) -> Tensor:
                rows = buffer[:used, : shape.documents * self.tokens].unflatten(0, (batches, -1))
                return rows.unflatten(2, (shape.documents, self.tokens))

            masked = None if self.masked is None else self.masked[:used]
            masked_target = None if self.masked is None else target(self.masked.unsqueeze(-1))
            documents, similarities = self.documents[:n], self.similarities[:n]
            views = _Views(used, documents, similarities, target(self.documents), masked, masked_target)
            self.views[batches, count] = views
        return self.views[batches, count]

    def _copy_documents(self, target: Tensor, part: tuple[slice, slice, slice]) -> None:
        copy_grouped(target, self.layout.D[part])

    def _load_documents(self, block: Part, start: int, views: _Views) -> Tensor:
        """Slices of the tokens from `start` of the documents of `block`; notes which of them are masked."""
        part = slice(block.b0, block.b1), slice(block.x0, block.x1), slice(start, start + self.tokens)
        documents = views.documents
        if self.in_place and views.used > 1:
            documents = self.layout.D[part].flatten(0, 1)
        else:
            self._copy_documents(views.target, part)
            if self.normalize:
                used = documents[: views.used]
                used /= row_norms(used)
        if self.layout.d_mask is not None:
            assert views.masked is not None and views.masked_target is not None
            copy_grouped(views.masked_target, ~self.layout.d_mask[part].unsqueeze(-1))
            masked = views.masked.unsqueeze(-1)
            # On CPU the indices of masked rows, of which there may be none; elsewhere nobody may look.
            self.masked_rows = masked.view(-1).nonzero().squeeze(-1) if self.may_look else masked
        return documents

    def _score(self, block: Part, start: int, documents: Tensor, views: _Views, panel: Panel, best: Tensor) -> None:
        """One bmm: update `best`, ``[documents, columns]``, and the winners."""
        shape = self.shape
        S, n = views.similarities, views.similarities.shape[0]
        torch.bmm(documents, panel.columns if n == self.slices else panel.columns[:n], out=S)
        if n > views.used:
            S = S[: views.used]
        if self.layout.d_mask is not None:
            if not self.may_look:
                S.masked_fill_(self.masked_rows, NEG_INF)
            elif self.masked_rows.numel():
                S.view(-1, shape.columns).index_fill_(0, self.masked_rows, NEG_INF)
        if self.layout.argmax is not None:
            self._keep_winners(block, start, panel, best, *winners(S, self.tokens))
            return
        if shape.documents * self.tokens < shape.rows:
            S = S[:, : shape.documents * self.tokens]
        if shape.documents > 1:
            S, best = S.unflatten(1, (-1, self.tokens)), best.unflatten(0, (-1, shape.documents))
        if start == 0:
            torch.amax(S, -2, out=best)
        else:
            torch.maximum(best, S.amax(-2), out=best)

    def _keep_winners(self, block: Part, start: int, panel: Panel, best: Tensor, value: Tensor, index: Tensor) -> None:
        """Put the maxima of a tile into `best` and its winners into the output where no earlier tile has as much."""
        value, index = value.view(best.shape), index.view(best.shape)
        assert self.layout.argmax is not None
        q, count = self.shape.queries, block.x1 - block.x0
        target = self.layout.argmax[block.b0 : block.b1, block.x0 : block.x1]
        if q > 1:
            target = target[:, :, panel.unit * q : panel.unit * q + q]
        else:
            c0 = panel.tile * self.shape.columns
            target = target[:, :, panel.unit, c0 : c0 + self.shape.columns].unsqueeze(-2)

        def of_tokens(x: Tensor) -> Tensor:
            """``[batches * documents, columns]`` as ``[batches, documents, queries, tokens]``, padding cut off."""
            queries, tokens = target.shape[2:]
            x = x.unflatten(0, (block.b1 - block.b0, -1))
            return x[:, :count, : queries * tokens].unflatten(-1, (queries, tokens))

        if start == 0:
            best.copy_(value)
            target.copy_(of_tokens(index))
            return
        better = (value > best) | (value.isnan() & ~best.isnan())
        best.copy_(torch.where(better, value, best))
        target.copy_(torch.where(of_tokens(better), of_tokens(index + start).to(target.dtype), target))

    def _finish(self, slab: Part, u0: int, u1: int) -> None:
        """The scores of a slab, and its winners where a mask decides."""
        layout, q, Lq = self.layout, self.shape.queries, self.layout.Q.shape[2]
        y0, y1 = u0 * q, min(u1 * q, layout.Q.shape[1])
        batches, documents = slice(slab.b0, slab.b1), slice(slab.x0, slab.x1)
        best = self.best[: slab.b1 - slab.b0, : slab.x1 - slab.x0, : u1 - u0, : q * Lq].unflatten(-1, (q, Lq))
        q_mask = None if layout.q_mask is None else layout.q_mask[batches, y0:y1]
        d_mask = None if layout.d_mask is None else layout.d_mask[batches, documents]
        if layout.argmax is not None:
            argmax = layout.argmax[batches, documents, y0:y1]
            if d_mask is not None:
                lost = (best == NEG_INF).flatten(2, 3)[:, :, : y1 - y0]
                first = first_true(d_mask).to(argmax.dtype)[:, :, None, None]
                argmax.copy_(torch.where(lost, first, argmax))
                argmax.masked_fill_(~d_mask.any(-1)[:, :, None, None], -1)
            if q_mask is not None:
                argmax.masked_fill_(~q_mask[:, None], -1)
        if layout.q_weight is not None:
            best *= self._by_unit(layout.q_weight[batches, y0:y1], u1 - u0)
        if q_mask is not None:
            best.masked_fill_(self._by_unit(~q_mask, u1 - u0), 0)
        scores = layout.pairs[batches, documents, y0:y1]
        scores.copy_(fold_sum(best).flatten(2)[:, :, : y1 - y0])
        if d_mask is not None:
            empty = ~d_mask.any(-1)[:, :, None]
            scores.masked_fill_(empty if q_mask is None else empty & q_mask.any(-1)[:, None], NEG_INF)

    def _by_unit(self, x: Tensor, units: int) -> Tensor:
        """``[batches, queries, Lq]`` as ``[batches, 1, units, queries of a unit, Lq]``."""
        q, (batches, queries, Lq) = self.shape.queries, x.shape
        if queries < units * q:
            x = torch.cat([x, x.new_zeros((batches, units * q - queries, Lq))], 1)
        return x.unflatten(1, (units, q)).unsqueeze(1)


def winners(S: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Maxima of each `tokens` rows of ``S [n, rows, columns]`` and their first indices; NaN counts as the maximum.

    Both are ``[n, rows // tokens, columns]``.
    """
    n, rows, columns = S.shape
    if may_look(S):
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
