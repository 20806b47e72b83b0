"""The portable forward by slices of the usual shapes, which `portable.blocks` describes.

Queries that share a slice, or a single query, are a *unit*. A unit has one or several *panels*, the query sides of its
slices. A *block* is multiplied with a panel by one bmm. It has whole documents, or one tile of each document.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..blocks import (
    MAX_DOCUMENT_BYTES,
    MAX_MAXIMA_BYTES,
    MAX_PANEL_BYTES,
    MAX_SIMILARITY_BYTES,
    MIN_ROWS,
    SliceShape,
    allocate_slices,
    ceil_div,
    choose_slice_shape,
    compute_row_norms,
    copy_grouped,
    is_product_ready,
    split_range,
)
from ..layout import PaddedRows
from ..pace import adjust_threads
from .scores import NEG_INF, PortableForward, reduce_maxima, update_maxima


class SliceTiling(NamedTuple):
    """The amounts of work that are done at a time."""

    block_batches: int  # batches in one bmm; above 1 only if a block holds all documents of its batches
    block_slices: int  # slices of each batch
    slab: tuple[int, int, int]  # batches, documents and units whose maxima are computed before their sums
    span: int  # panels of each unit in memory


@lru_cache(maxsize=1024)
def choose_tiling(
    shape: SliceShape, max_slices: int, B: int, X: int, Y: int, d: int, dtype: torch.dtype
) -> SliceTiling:
    """Choose the tiling of a call whose blocks have at most `max_slices` slices."""
    unit_width = shape.panels * shape.columns
    panel_bytes = shape.columns * d * dtype.itemsize
    entries = MAX_MAXIMA_BYTES // dtype.itemsize
    max_slices = min(max_slices, entries // (unit_width * shape.documents))
    per_batch, units = ceil_div(X, shape.documents), ceil_div(Y, shape.queries)
    # Several batches of few documents share a bmm, and then each slice has its own panels.
    batches = max(1, min(B, min(max_slices, MAX_PANEL_BYTES // panel_bytes) // per_batch)) if B > 1 else 1
    block_slices = per_batch if batches > 1 else max(1, min(max_slices, per_batch))
    block_documents = block_slices * shape.documents
    if batches > 1:
        panel_bytes *= batches * block_slices

    def steps(budget: int, total: int) -> int:
        return max(1, min(budget, total))

    span = steps(MAX_PANEL_BYTES // panel_bytes, shape.panels)
    block_width = unit_width * block_documents * batches
    max_units = min(entries // block_width, (1 << 14) // unit_width, MAX_PANEL_BYTES // (panel_bytes * shape.panels))
    slab_units = steps(max_units, units)
    blocks = steps(entries // (slab_units * block_width), ceil_div(X, block_documents))
    slab_batches = batches
    if batches > 1:
        slab_batches *= steps(entries // (slab_units * block_width), ceil_div(B, batches))
    return SliceTiling(batches, block_slices, (slab_batches, blocks * block_documents, slab_units), span)


class QueryPanel(NamedTuple):
    """The query side of one bmm."""

    unit: int
    tile: int  # index of the panel in its unit
    columns: Tensor  # [slices, d, columns]
    best: Tensor  # the panel's part of the slab, [batches * documents of the slab, columns]


class _BlockViews(NamedTuple):
    """The buffers as used by a block of some size."""

    used: int  # slices with documents
    documents: Tensor  # [slices, rows, d], on a CPU only as many slices as needed, but at least two
    similarities: Tensor  # [slices, rows, columns]
    target: Tensor  # destination of documents, [batches, slices of a batch, documents of a slice, tokens, d]
    masked: Tensor | None  # [used, rows]
    masked_target: Tensor | None  # like `target` with d = 1


class SliceForward(PortableForward):
    """The forward by slices: the loops over panels and blocks, and their buffers."""

    def _plan(self) -> None:
        dtype = self.dtype
        self.shape = shape = choose_slice_shape(self.Lq, self.Ld, self.d, dtype)
        self._plan_blocks()
        self.slab, self.queries = self.tiling.slab, shape.queries
        self.units, self.width = ceil_div(self.Y, shape.queries), shape.panels * shape.columns
        panel_slices = self.slices if self.tiling.block_batches > 1 else 1
        # Columns without a token must not hold NaN, because NaN among the maxima is slow, see `reduce_maxima`.
        is_full = shape.queries * self.Lq == self.width and self.Y % shape.queries == 0
        allocate = self.layout.pairs.new_empty if is_full else self.layout.pairs.new_zeros
        self.panels = allocate((panel_slices, self.slab[2], self.tiling.span * shape.columns, self.d), dtype=dtype)

    def _plan_blocks(self) -> None:
        """Set `tiling`, the maximum number of `slices` in one bmm, and the buffers of a block."""
        layout, shape, d, dtype = self.layout, self.shape, self.d, self.dtype
        self.tokens = self.Ld if len(shape.starts) == 1 else shape.rows  # tokens of one document in a slice
        documents, similarities = (shape.rows * n * dtype.itemsize for n in (d, shape.columns))
        # MKL uses another kernel for a single slice. Other libraries may choose by the number of slices.
        max_slices = max(2, min(MAX_DOCUMENT_BYTES // documents, MAX_SIMILARITY_BYTES // similarities))
        self.tiling = tiling = choose_tiling(shape, max_slices, self.B, self.X, self.Y, d, dtype)
        self.slices = max(2, tiling.block_batches * tiling.block_slices) if self.may_look else max_slices
        allocate = layout.pairs.new_empty
        self.documents = allocate_slices(layout.pairs, self.slices, shape.rows, d, dtype)
        self.similarities = allocate((self.slices, shape.rows, shape.columns), dtype=dtype)
        self.masked = None if layout.d_mask is None else allocate((self.slices, shape.rows), dtype=torch.bool).zero_()
        self.views: dict[tuple[int, int], _BlockViews] = {}
        is_single_document = shape.documents == 1 and self.tokens == shape.rows >= MIN_ROWS
        self.in_place = (
            is_single_document and self.may_look and not self.normalize and is_product_ready(layout.D, dtype)
        )
        if self.in_place and tiling.block_batches > 1:  # slices of one bmm are equally spaced
            self.in_place = layout.D.stride(0) == self.X * layout.D.stride(1)

    def _fill(self, b: slice, x: slice, u: slice) -> None:
        tiling = self.tiling
        for batches in split_range(b.start, b.stop, tiling.block_batches):
            best = self.best[batches.start - b.start : batches.stop - b.start].flatten(0, 1)
            for p in split_range(0, self.shape.panels, tiling.span):
                panels = list(self._panels(batches, u, p, best))
                for documents in self._steps(x.start, x.stop, tiling.block_slices * self.shape.documents):
                    self._compute(batches, documents, documents.start - x.start, panels)

    def _compute(self, b: slice, x: slice, first: int, panels: list[QueryPanel]) -> None:
        """Compute the maxima of a block, whose first document is document `first` of the slab."""
        views = self._views(b.stop - b.start, x.stop - x.start)
        for start in self.shape.starts:
            documents = self._load_documents(b, x, start, views)
            for panel in panels:
                adjust_threads()
                best = panel.best.narrow(0, first, views.used * self.shape.documents)
                self._score(b, x, start, documents, views, panel, best)

    def _panels(self, b: slice, u: slice, p: slice, best: Tensor) -> Iterator[QueryPanel]:
        """Load the panels `p` of some units for some batches."""
        width = self.shape.columns
        tokens = self._load_panels(b, u, p)
        for tile in range(p.start, p.stop):
            columns = self._columns(tokens[:, :, (tile - p.start) * width : (tile - p.start + 1) * width])
            parts = columns.unbind(1), best[:, : u.stop - u.start, tile * width : (tile + 1) * width].unbind(1)
            for unit, unit_columns, unit_best in zip(range(u.start, u.stop), *parts, strict=True):
                yield QueryPanel(unit, tile, unit_columns, unit_best)

    def _columns(self, loaded: Tensor) -> Tensor:
        """Transpose ``[slices | 1, units, columns, d]`` to ``[slices, units, d, columns]``."""
        return loaded.mT if loaded.shape[0] == self.slices else loaded.mT.expand(self.slices, -1, -1, -1)

    def _load_panels(self, b: slice, u: slice, p: slice) -> Tensor:
        """Load tokens of the queries of some units for some panels: ``[slices | 1, units, columns, d]``."""
        shape, batches = self.shape, b.stop - b.start
        y = slice(u.start * shape.queries, u.stop * shape.queries)
        queries = self.layout.Q[b, y, p.start * shape.columns : p.stop * shape.columns].unsqueeze(1)
        tokens = queries.shape[-2]
        panels = self.panels[:, : u.stop - u.start]
        n_slices = batches * (self.tiling.block_slices if self.tiling.block_batches > 1 else 1)
        target = panels[:n_slices].unflatten(0, (batches, -1))[..., : shape.queries * tokens, :]
        target = target.unflatten(-2, (shape.queries, tokens))
        copy_grouped(target, queries.expand(-1, target.shape[1], -1, -1, -1))
        if self.normalize:
            panels /= compute_row_norms(panels)
        return panels

    def _views(self, batches: int, count: int) -> _BlockViews:
        """Return the buffers for a block of `count` documents of each of `batches`."""
        if (batches, count) not in self.views:
            shape = self.shape
            n_slices = batches * ceil_div(count, shape.documents)
            n = max(n_slices, 2) if self.may_look else self.slices

            def target(buffer: Tensor) -> Tensor:
                rows = buffer[:n_slices, : shape.documents * self.tokens].unflatten(0, (batches, -1))
                return rows.unflatten(2, (shape.documents, self.tokens))

            is_masked = None if self.masked is None else self.masked[:n_slices]
            masked_target = None if self.masked is None else target(self.masked.unsqueeze(-1))
            documents, similarities = self.documents[:n], self.similarities[:n]
            views = _BlockViews(n_slices, documents, similarities, target(self.documents), is_masked, masked_target)
            self.views[batches, count] = views
        return self.views[batches, count]

    def _load_documents(self, b: slice, x: slice, start: int, views: _BlockViews) -> Tensor:
        """Load slices of the tokens from `start` of some documents, and record which of them are masked."""
        part = b, x, slice(start, start + self.tokens)
        documents = views.documents
        if self.in_place and views.used > 1:
            documents = self.layout.D[part].flatten(0, 1)
        else:
            if isinstance(self.layout.D, PaddedRows):
                self.layout.D.copy_into(views.target, part)
            else:
                copy_grouped(views.target, self.layout.D[part])
            if self.normalize:
                rows = documents[: views.used]
                rows /= compute_row_norms(rows)
        if self.layout.d_mask is not None:
            assert views.masked is not None and views.masked_target is not None
            copy_grouped(views.masked_target, ~self.layout.d_mask[part].unsqueeze(-1))
            is_masked = views.masked.unsqueeze(-1)
            # Indices of masked rows, possibly none, on a CPU. On other devices the mask itself, without a
            # synchronization.
            self.masked_rows = is_masked.view(-1).nonzero().squeeze(-1) if self.may_look else is_masked
        return documents

    def _score(
        self, b: slice, x: slice, start: int, documents: Tensor, views: _BlockViews, panel: QueryPanel, best: Tensor
    ) -> None:
        """Run one bmm, and update `best` ``[documents, columns]`` and the argmax."""
        S = self._products(documents, views, panel)
        if self.layout.argmax is not None:
            self._keep_argmax(b, x, start, panel, best, *reduce_maxima(S, self.tokens))
            return
        S, best = self._split_documents(S, best)
        if start == 0:
            torch.amax(S, -2, out=best)
        else:
            torch.maximum(best, S.amax(-2), out=best)

    def _split_documents(self, S: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
        """Return similarities ``[..., tokens, columns]`` and the view of `best` that receives their reduced tokens."""
        shape, tokens = self.shape, self.tokens
        if shape.documents * tokens < shape.rows:
            S = S[:, : shape.documents * tokens]
        if shape.documents > 1:
            S, best = S.unflatten(1, (-1, tokens)), best.unflatten(0, (-1, shape.documents))
        return S, best

    def _products(self, documents: Tensor, views: _BlockViews, panel: QueryPanel) -> Tensor:
        """Compute similarities ``[used, rows, columns]``, -inf for masked tokens."""
        S, n = views.similarities, views.similarities.shape[0]
        torch.bmm(documents, panel.columns if n == self.slices else panel.columns[:n], out=S)
        if n > views.used:
            S = S[: views.used]
        if self.layout.d_mask is not None:
            if not self.may_look:
                S.masked_fill_(self.masked_rows, NEG_INF)
            elif self.masked_rows.numel():
                S.view(-1, self.shape.columns).index_fill_(0, self.masked_rows, NEG_INF)
        return S

    def _mask_overlaps(self, start: int, documents: Tensor, views: _BlockViews, panel: QueryPanel) -> Tensor:
        """Compute `_products` with -inf where the last slice overlaps its predecessor.

        It is for reductions in which a repeated token changes the result.
        """
        S = self._products(documents, views, panel)
        overlap = self.shape.starts.index(start) * self.tokens - start
        if overlap > 0:
            S[:, :overlap] = NEG_INF
        return S

    def _keep_argmax(
        self, b: slice, x: slice, start: int, panel: QueryPanel, best: Tensor, value: Tensor, index: Tensor
    ) -> None:
        """Merge the maxima of a tile into `best` and its argmax into the output; an earlier tile wins a tie."""
        assert self.layout.argmax is not None
        q, target = self.shape.queries, self.layout.argmax[b, x]
        if q > 1:
            target = target[:, :, panel.unit * q : panel.unit * q + q]
        else:
            c0 = panel.tile * self.shape.columns
            target = target[:, :, panel.unit, c0 : c0 + self.shape.columns].unsqueeze(-2)
        batches, count, queries, tokens = target.shape

        def of_tokens(columns: Tensor) -> Tensor:
            """Reshape ``[batches * documents, columns]`` to ``[batches, documents, queries, tokens]``; drop padding."""
            batch_columns = columns.view(batches, -1, self.shape.columns)
            return batch_columns[:, :count, : queries * tokens].unflatten(-1, (queries, tokens))

        update_maxima(of_tokens(best), target, of_tokens(value), of_tokens(index), start)
