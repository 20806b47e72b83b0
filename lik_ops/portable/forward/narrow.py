"""The portable forward where one side has few tokens: they are the rows of slices whose columns the other side fills.

Slices of the usual shapes would be padding for the most part. Here the tokens of either side follow one another in the
slices, without padding between queries or documents, and products have fewer rows than `MIN_ROWS` where this machine
gives such products the bits of the usual ones.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from ..blocks import (
    ALIGNMENT_BYTES,
    MAX_MAXIMA_BYTES,
    MAX_SIMILARITY_BYTES,
    MIN_ROWS,
    SHARED_ROWS,
    STEPS,
    MiB,
    allocate_slices,
    ceil_div,
    compute_row_norms,
    cut_pieces,
    is_host_readable,
    multiply_matrices,
    round_up,
)
from ..layout import BatchedArgs
from .scores import NEG_INF, PortableForward, reduce_maxima, update_maxima

MAX_SHARED_TOKENS = 512  # of the documents of a cross product, at most
MAX_QUERY_TOKENS = 8  # of all queries that a document meets, at most
MIN_DOCUMENT_TOKENS = 16  # of the documents that these queries meet
MAX_SIDE_BYTES = 3 * MiB  # of either side, in one product
FEW_COLUMNS_BY_DTYPE = {torch.float32: 16, torch.float64: 12}  # columns, where a machine allows so few


@lru_cache(maxsize=4096)
def has_slice_bits(rows: int, columns: int, d: int, dtype: torch.dtype, turned: bool = False) -> bool:
    """Whether products of this shape have the bits of the slices that `choose_slice_shape` makes, on this machine.

    Rows are document tokens, `turned` query tokens. Kernels that add in another order round most similarities of random
    tokens otherwise.
    """
    step = STEPS[dtype][1]
    if rows >= MIN_ROWS and columns % step == 0 and not turned:
        return True
    random = torch.Generator().manual_seed(0)
    size = round_up(max(rows, columns, MIN_ROWS), step)
    D, Q = (torch.rand((2, size, d), generator=random, dtype=dtype, device="cpu").sub_(0.5) for _ in range(2))
    expected, across = multiply_matrices(D, Q.mT), (Q, D) if turned else (D, Q)
    actual = multiply_matrices(across[0][:, :rows].contiguous(), across[1][:, :columns].contiguous().mT)
    return torch.equal(actual, (expected.mT if turned else expected)[:, :rows, :columns])


@lru_cache(maxsize=1024)
def choose_few_rows(tokens: int, columns: int, d: int, dtype: torch.dtype, turned: bool = False) -> int | None:
    """Rows below `MIN_ROWS` for so many tokens, None where this machine allows none."""
    possible = range(round_up(tokens, 4), MIN_ROWS, 4)
    return next((rows for rows in possible if has_slice_bits(rows, columns, d, dtype, turned)), None)


def choose_rows(tokens: int, columns: int, d: int, dtype: torch.dtype) -> int:
    """Rows of a slice that holds so many document tokens."""
    few = choose_few_rows(tokens, columns, d, dtype)
    return few or max(round_up(tokens, STEPS[dtype][0]), MIN_ROWS)


def choose_columns(tokens: int, dtype: torch.dtype) -> int:
    """Columns of slices that so many tokens of the other side fill: two slices where they can."""
    _, step, most = STEPS[dtype]
    return max(step, min(most, tokens // 2 // step * step))


@lru_cache(maxsize=1024)
def choose_sharing(tokens: int, Lq: int, d: int, dtype: torch.dtype) -> tuple[int, int]:
    """How many queries of `Lq` tokens, each with `tokens` of its own, share a slice; and its columns."""
    _, step, most = STEPS[dtype]
    for columns in (FEW_COLUMNS_BY_DTYPE[dtype], step):
        group = min(columns // Lq, max(columns, MIN_ROWS) // tokens)
        if group > 1 and has_slice_bits(choose_rows(group * tokens, columns, d, dtype), columns, d, dtype):
            return group, columns
    return 1, min(most, round_up(Lq, step))


class _NarrowForward(PortableForward):
    """Products of one side's `tokens` of a batch with pieces of the other side."""

    group = 1  # batches that share a slice
    tokens: int  # of a batch on the narrow side

    def _plan_products(self, columns: int, rows: int, widest: int) -> None:
        """Sets the shape of slices, how many are multiplied at a time, and their buffer."""
        self.columns, self.rows = columns, rows
        size = self.dtype.itemsize
        fit = MAX_SIMILARITY_BYTES // (rows * columns * size), MAX_SIDE_BYTES // (widest * self.d * size)
        self.slices = max(2, min(fit))
        self.similarities = self.layout.pairs.new_empty(self.slices * rows * columns)
        self.buffers: dict[bool, Tensor] = {}  # of the slices of each side, the last ones
        self.loaded: Tensor | None = None  # slices of the narrow side

    def _narrow_side(self, b: slice) -> Tensor:
        """The few tokens of some batches."""
        raise NotImplementedError

    def _products(self, b: slice, other: Tensor, each: int) -> Tensor:
        """Slices ``[n, rows, columns]`` for some batches, each with so many tokens of `other`; n is at least 2.

        A `group` of batches, which has so many together, shares a slice. Of its blocks those on the diagonal count.
        """
        panels = ceil_div(each, self.columns)
        filled = self._slices(other, each, panels * self.columns, 1 if panels > 1 else 2, narrow=False)
        filled = filled.reshape(-1, self.columns, self.d)
        n = filled.shape[0]
        single = b.stop - b.start == 1  # one slice meets all panels, and may be read where it lies
        if self.loaded is None or self.B > 1:  # a single batch meets all pieces
            least = 1 if single else 2
            self.loaded = self._slices(self._narrow_side(b), self.group * self.tokens, self.rows, least, narrow=True)
        few = self.loaded
        if single:
            few = few.expand(n, -1, -1)
        elif panels > 1:
            few = few[: n // panels].repeat_interleave(panels, 0)
        S = self.similarities[: n * self.rows * self.columns].view(n, self.rows, self.columns)
        return torch.bmm(few, filled.mT, out=S)

    def _joined(self, panels: Tensor, batches: int, count: int) -> Tensor:
        """``[slices, n, columns]`` as ``[batches, n, count]``: the panels of a batch follow one another."""
        each = ceil_div(count, self.columns)
        of_batches = panels[: batches * each].view(batches, each, *panels.shape[1:])
        return of_batches.transpose(1, 2).reshape(batches, panels.shape[1], -1)[..., :count]

    def _slices(self, source: Tensor, each: int, size: int, least: int, narrow: bool) -> Tensor:
        """Tokens of ``source [..., d]``, so many in each of `least` slices or more ``[n, size, d]``, then zeros."""
        rows = source.reshape(-1, self.d)
        count, d = rows.shape
        n = max(least, ceil_div(count, each))
        ready = rows.is_contiguous() and rows.dtype == self.dtype and not self.normalize
        itemsize = self.dtype.itemsize
        if (
            ready
            and count == n * size
            and not (rows.data_ptr() % ALIGNMENT_BYTES or size * d * itemsize % ALIGNMENT_BYTES)
        ):
            return rows.view(n, size, d)
        slices = self.buffers.pop(narrow, None)
        if slices is None or slices.shape[:2] != (n, size):
            slices = allocate_slices(rows, n, size, d, self.dtype)
        self.buffers[narrow] = slices
        full, rest = divmod(count, each)
        slices[:full, :each] = rows[: full * each].unflatten(0, (full, each))
        if each < size:
            slices[:full, each:] = 0
        if full < n:
            slices[full:] = 0
            slices[full, :rest] = rows[full * each :]
        if self.normalize:
            slices /= compute_row_norms(slices)
        return slices


class FewDocumentsForward(_NarrowForward):
    """Forward of calls where the documents that a query meets fit one slice.

    Queries of a cross product (`crossed`) meet the same documents: their tokens follow one another in the columns.
    Queries with candidates of their own have slices of their own; a `group` of short ones shares a slice.
    """

    @staticmethod
    def takes(layout: BatchedArgs) -> bool:
        B, X, Ld, d = layout.D.shape
        tokens = X * Ld
        fits = max(tokens, STEPS[layout.pairs.dtype][2]) * d * layout.pairs.dtype.itemsize <= MAX_SIDE_BYTES
        return fits and tokens <= (MAX_SHARED_TOKENS if B == 1 else SHARED_ROWS) and is_host_readable(layout.pairs)

    def _plan(self) -> None:
        self.tokens, self.crossed = self.X * self.Ld, self.B == 1
        if self.crossed:
            columns = choose_columns(self.Y * self.Lq, self.dtype)
        else:
            self.group, columns = choose_sharing(self.tokens, self.Lq, self.d, self.dtype)
        rows = choose_rows(self.group * self.tokens, columns, self.d, self.dtype)
        self._plan_products(columns, rows, columns if self.crossed else max(columns, rows))
        # Pieces of the queries begin, where they can, at whole slices.
        self.whole = columns // gcd(columns, self.Lq) if self.crossed else self.group * ALIGNMENT_BYTES
        items = max(1, MAX_MAXIMA_BYTES // (self.X * self.Lq * self.dtype.itemsize))
        items = min(items // self.whole * self.whole or items, max(self.B, self.Y))
        self.slab = (1, self.X, items) if self.crossed else (items, self.X, 1)
        self.limit = self.slices * columns  # query tokens of a piece
        panels = ceil_div(self.Lq, columns)
        if not self.crossed and panels <= self.slices:
            self.limit = self.slices // panels * self.group * self.Lq

    def _fill(self, b: slice, x: slice, u: slice) -> None:
        layout, of = self.layout, u if self.crossed else b
        for _, i, s in cut_pieces((1, of.stop - of.start, self.Lq), self.limit, whole=self.whole):
            some = slice(of.start + i.start, of.start + i.stop)
            part = (b, some, s) if self.crossed else (some, u, s)
            best = self.best[:, :, i, s] if self.crossed else self.best[i, :, :, s]
            S = self._similarities(*part)
            if layout.argmax is None:
                whole = S[:, : S.shape[1] // self.Ld * self.Ld]
                self._place(whole.unflatten(1, (-1, self.Ld)).amax(2), best)
                continue
            value, index = reduce_maxima(S, self.Ld)
            self._place(value, best)
            self._place(index, layout.argmax[part[0], :, part[1], s])

    def _narrow_side(self, b: slice) -> Tensor:
        return self.layout.D[b, : self.X, : self.Ld]

    def _similarities(self, b: slice, y: slice, s: slice) -> Tensor:
        """``[slices, rows, columns]`` of a piece, masked tokens ``-inf``.

        Of groups only what lies on the diagonal, ``[queries, tokens, query tokens]``.
        """
        layout, count = self.layout, s.stop - s.start
        each = count * (y.stop - y.start) if self.crossed else count * self.group
        S = self._products(b, layout.Q[b, y, s], each)
        if self.group > 1:
            S = S[:, : self.group * self.tokens, : self.group * count]
            S = S.unflatten(2, (self.group, count)).unflatten(1, (self.group, self.tokens))
            S = S.diagonal(dim1=1, dim2=3).movedim(-1, 1).flatten(0, 1)
        if layout.d_mask is not None:
            masked, used = ~layout.d_mask[b].reshape(-1, self.tokens, 1), S
            if not self.crossed:
                masked = masked.repeat_interleave(ceil_div(each, self.columns), 0)
                used = S[: len(masked)]
            used[:, : self.tokens].masked_fill_(masked, NEG_INF)
        return S

    def _place(self, values: Tensor, target: Tensor) -> None:
        """Put ``[slices, documents, columns]`` into ``[batches, documents, queries, tokens]``."""
        batches, X, queries, count = target.shape
        values = values[:batches] if self.group > 1 else self._joined(values[:, :X], batches, queries * count)
        target.copy_(values.unflatten(-1, (queries, count)))


class FewQueriesForward(_NarrowForward):
    """Forward of calls whose query tokens are few."""

    @staticmethod
    def takes(layout: BatchedArgs) -> bool:
        _, Y, Lq, d = layout.Q.shape
        X, Ld = layout.D.shape[1:3]
        if Y * Lq > MAX_QUERY_TOKENS or X * Ld < MIN_DOCUMENT_TOKENS or not is_host_readable(layout.pairs):
            return False
        dtype = layout.pairs.dtype
        columns = choose_columns(X * Ld, dtype)
        fits = columns * d * dtype.itemsize <= MAX_SIDE_BYTES
        return fits and choose_few_rows(Y * Lq, columns, d, dtype, turned=True) is not None

    def _plan(self) -> None:
        self.tokens = self.Y * self.Lq
        columns = choose_columns(self.X * self.Ld, self.dtype)
        rows = choose_few_rows(self.tokens, columns, self.d, self.dtype, turned=True)
        assert rows is not None
        self._plan_products(columns, rows, columns)
        entries = max(1, MAX_MAXIMA_BYTES // (self.tokens * self.dtype.itemsize))
        self.slab = min(self.B, max(1, entries // self.X)), min(self.X, entries), self.Y

    def _fill(self, b: slice, x: slice, u: slice) -> None:
        argmax, sizes = self.layout.argmax, (b.stop - b.start, x.stop - x.start, self.Ld)
        whole = self.columns // gcd(self.columns, self.Ld)
        for piece in cut_pieces(sizes, self.slices * self.columns, whole=whole, pad=self.columns):
            part = piece.within(b, x)
            S, best, start = self._similarities(*part), self.best[piece.batches, piece.items], piece.tokens.start
            if argmax is not None:
                value, index = (self._reorder_axes(found) for found in S.max(-1))
                update_maxima(best, argmax[part.batches, part.items], value, index, start)
            elif start == 0:
                best.copy_(self._reorder_axes(S.amax(-1)))
            else:
                torch.maximum(best, self._reorder_axes(S.amax(-1)), out=best)

    def _narrow_side(self, b: slice) -> Tensor:
        return self.layout.Q[b, : self.Y, : self.Lq]

    def _similarities(self, b: slice, x: slice, t: slice) -> Tensor:
        """``[batches, query tokens, documents, tokens]`` of a piece, masked tokens ``-inf``."""
        layout, (batches, X, Ld) = self.layout, (s.stop - s.start for s in (b, x, t))
        S = self._products(b, layout.D[b, x, t], X * Ld)
        S = self._joined(S[:, : self.tokens], batches, X * Ld).unflatten(2, (X, Ld))
        return S if layout.d_mask is None else S.masked_fill(~layout.d_mask[b, x, t].unsqueeze(1), NEG_INF)

    def _reorder_axes(self, values: Tensor) -> Tensor:
        """``[batches, query tokens, documents]`` as ``[batches, documents, queries, tokens]``."""
        return values.unflatten(1, (-1, self.Lq)).permute(0, 3, 1, 2)
