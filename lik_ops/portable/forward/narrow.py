"""The portable forward for calls in which one side has few tokens.

The few tokens are the rows of slices whose columns the other side fills. Slices of the usual shapes would mostly be
padding. Here the tokens of either side follow each other in the slices, without padding between queries or documents.
Products have fewer rows than `MIN_ROWS` if this machine gives such products the bits of the usual ones.
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

MAX_SHARED_TOKENS = 512  # document tokens of a cross product, for `FewDocumentsForward`
MAX_QUERY_TOKENS = 8  # query tokens of a batch, for `FewQueriesForward`
MIN_DOCUMENT_TOKENS = 16  # document tokens of a batch, for `FewQueriesForward`
MAX_SIDE_BYTES = 3 * MiB  # either side of one product
FEW_COLUMNS_BY_DTYPE = {torch.float32: 16, torch.float64: 12}  # columns, if a machine allows so few


@lru_cache(maxsize=4096)
def has_slice_bits(rows: int, columns: int, d: int, dtype: torch.dtype, turned: bool = False) -> bool:
    """Return whether products of this shape have the bits of the slices of `choose_slice_shape` on this machine.

    Kernels that add in another order round most similarities of random tokens differently. If `turned`, rows are query
    tokens, not document tokens.
    """
    step = STEPS[dtype][1]
    if rows >= MIN_ROWS and columns % step == 0 and not turned:
        return True
    random = torch.Generator().manual_seed(0)
    size = round_up(max(rows, columns, MIN_ROWS), step)
    D, Q = (torch.rand((2, size, d), generator=random, dtype=dtype, device="cpu").sub_(0.5) for _ in range(2))
    expected, operands = multiply_matrices(D, Q.mT), (Q, D) if turned else (D, Q)
    actual = multiply_matrices(operands[0][:, :rows].contiguous(), operands[1][:, :columns].contiguous().mT)
    return torch.equal(actual, (expected.mT if turned else expected)[:, :rows, :columns])


@lru_cache(maxsize=1024)
def choose_few_rows(tokens: int, columns: int, d: int, dtype: torch.dtype, turned: bool = False) -> int | None:
    """Return rows below `MIN_ROWS` for `tokens` tokens, or None if this machine allows none."""
    candidates = range(round_up(tokens, 4), MIN_ROWS, 4)
    return next((rows for rows in candidates if has_slice_bits(rows, columns, d, dtype, turned)), None)


def choose_rows(tokens: int, columns: int, d: int, dtype: torch.dtype) -> int:
    """Return the rows of a slice that holds `tokens` document tokens."""
    rows = choose_few_rows(tokens, columns, d, dtype)
    return rows or max(round_up(tokens, STEPS[dtype][0]), MIN_ROWS)


def choose_columns(tokens: int, dtype: torch.dtype) -> int:
    """Return the columns of slices that `tokens` tokens of the other side fill, two slices if possible."""
    _, step, column_limit = STEPS[dtype]
    return max(step, min(column_limit, tokens // 2 // step * step))


@lru_cache(maxsize=1024)
def choose_sharing(tokens: int, Lq: int, d: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return how many queries of `Lq` tokens, each with `tokens` of its own, share a slice, and its columns."""
    _, step, column_limit = STEPS[dtype]
    for columns in (FEW_COLUMNS_BY_DTYPE[dtype], step):
        group = min(columns // Lq, max(columns, MIN_ROWS) // tokens)
        if group > 1 and has_slice_bits(choose_rows(group * tokens, columns, d, dtype), columns, d, dtype):
            return group, columns
    return 1, min(column_limit, round_up(Lq, step))


class _NarrowForward(PortableForward):
    """Products of the few `tokens` of one side of a batch with pieces of the other side."""

    group = 1  # batches that share a slice
    tokens: int  # tokens of a batch on the narrow side

    def _plan_products(self, columns: int, rows: int, widest: int) -> None:
        """Set the shape of slices, the number of slices multiplied at a time, and their buffer."""
        self.columns, self.rows = columns, rows
        size = self.dtype.itemsize
        limits = MAX_SIMILARITY_BYTES // (rows * columns * size), MAX_SIDE_BYTES // (widest * self.d * size)
        self.slices = max(2, min(limits))
        self.similarities = self.layout.pairs.new_empty(self.slices * rows * columns)
        self.buffers: dict[bool, Tensor] = {}  # the last slices of each side
        self.loaded: Tensor | None = None  # slices of the narrow side

    def _narrow_side(self, b: slice) -> Tensor:
        """Return the few tokens of some batches."""
        raise NotImplementedError

    def _products(self, b: slice, other: Tensor, tokens_per_slice: int) -> Tensor:
        """Compute slices ``[n, rows, columns]`` for some batches, each with `tokens_per_slice` tokens of `other`.

        n is at least 2. A `group` of batches shares a slice, and then has `tokens_per_slice` tokens together. Only the
        blocks on its diagonal are used.
        """
        panels = ceil_div(tokens_per_slice, self.columns)
        other_slices = self._slices(
            other, tokens_per_slice, panels * self.columns, 1 if panels > 1 else 2, narrow=False
        )
        other_slices = other_slices.reshape(-1, self.columns, self.d)
        n = other_slices.shape[0]
        is_single = b.stop - b.start == 1  # one slice is multiplied with all panels, and may be read in place
        if self.loaded is None or self.B > 1:  # a single batch is multiplied with all pieces
            min_slices = 1 if is_single else 2
            self.loaded = self._slices(
                self._narrow_side(b), self.group * self.tokens, self.rows, min_slices, narrow=True
            )
        narrow_slices = self.loaded
        if is_single:
            narrow_slices = narrow_slices.expand(n, -1, -1)
        elif panels > 1:
            narrow_slices = narrow_slices[: n // panels].repeat_interleave(panels, 0)
        S = self.similarities[: n * self.rows * self.columns].view(n, self.rows, self.columns)
        return torch.bmm(narrow_slices, other_slices.mT, out=S)

    def _join_panels(self, panels: Tensor, batches: int, count: int) -> Tensor:
        """Reshape ``[slices, n, columns]`` to ``[batches, n, count]`` by joining the panels of each batch."""
        n_panels = ceil_div(count, self.columns)
        batch_panels = panels[: batches * n_panels].view(batches, n_panels, *panels.shape[1:])
        return batch_panels.transpose(1, 2).reshape(batches, panels.shape[1], -1)[..., :count]

    def _slices(self, source: Tensor, tokens_per_slice: int, size: int, min_slices: int, narrow: bool) -> Tensor:
        """Copy `tokens_per_slice` tokens of ``source [..., d]`` into each slice of ``[n, size, d]``, followed by zeros.

        There are at least `min_slices` slices. Aligned tokens that fill the slices are not copied.
        """
        rows = source.reshape(-1, self.d)
        count, d = rows.shape
        n = max(min_slices, ceil_div(count, tokens_per_slice))
        is_ready = rows.is_contiguous() and rows.dtype == self.dtype and not self.normalize
        itemsize = self.dtype.itemsize
        if (
            is_ready
            and count == n * size
            and not (rows.data_ptr() % ALIGNMENT_BYTES or size * d * itemsize % ALIGNMENT_BYTES)
        ):
            return rows.view(n, size, d)
        slices = self.buffers.pop(narrow, None)
        if slices is None or slices.shape[:2] != (n, size):
            slices = allocate_slices(rows, n, size, d, self.dtype)
        self.buffers[narrow] = slices
        full_slices, remainder = divmod(count, tokens_per_slice)
        slices[:full_slices, :tokens_per_slice] = rows[: full_slices * tokens_per_slice].unflatten(
            0, (full_slices, tokens_per_slice)
        )
        if tokens_per_slice < size:
            slices[:full_slices, tokens_per_slice:] = 0
        if full_slices < n:
            slices[full_slices:] = 0
            slices[full_slices, :remainder] = rows[full_slices * tokens_per_slice :]
        if self.normalize:
            slices /= compute_row_norms(slices)
        return slices


class FewDocumentsForward(_NarrowForward):
    """The forward for calls in which the documents of a query fit one slice.

    All queries of a cross product (`crossed`) are scored against the same documents, and their tokens follow each other
    in the columns. A query with its own candidates has its own slices, and a `group` of short ones shares a slice.
    """

    @staticmethod
    def supports(layout: BatchedArgs) -> bool:
        """Return whether the documents of a query fit one slice."""
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
        # Pieces of the queries begin at whole slices if possible.
        self.item_multiple = columns // gcd(columns, self.Lq) if self.crossed else self.group * ALIGNMENT_BYTES
        items = max(1, MAX_MAXIMA_BYTES // (self.X * self.Lq * self.dtype.itemsize))
        items = min(items // self.item_multiple * self.item_multiple or items, max(self.B, self.Y))
        self.slab = (1, self.X, items) if self.crossed else (items, self.X, 1)
        self.limit = self.slices * columns  # query tokens of a piece
        panels = ceil_div(self.Lq, columns)
        if not self.crossed and panels <= self.slices:
            self.limit = self.slices // panels * self.group * self.Lq

    def _fill(self, b: slice, x: slice, u: slice) -> None:
        layout, span = self.layout, u if self.crossed else b
        for _, i, s in cut_pieces((1, span.stop - span.start, self.Lq), self.limit, item_multiple=self.item_multiple):
            chunk = slice(span.start + i.start, span.start + i.stop)
            part = (b, chunk, s) if self.crossed else (chunk, u, s)
            best = self.best[:, :, i, s] if self.crossed else self.best[i, :, :, s]
            S = self._similarities(*part)
            if layout.argmax is None:
                full_documents = S[:, : S.shape[1] // self.Ld * self.Ld]
                self._write(full_documents.unflatten(1, (-1, self.Ld)).amax(2), best)
                continue
            value, index = reduce_maxima(S, self.Ld)
            self._write(value, best)
            self._write(index, layout.argmax[part[0], :, part[1], s])

    def _narrow_side(self, b: slice) -> Tensor:
        return self.layout.D[b, : self.X, : self.Ld]

    def _similarities(self, b: slice, y: slice, s: slice) -> Tensor:
        """Return ``[slices, rows, columns]`` of a piece, with ``-inf`` for masked tokens.

        Groups give only the blocks on the diagonal, ``[queries, tokens, query tokens]``.
        """
        layout, count = self.layout, s.stop - s.start
        tokens_each = count * (y.stop - y.start) if self.crossed else count * self.group
        S = self._products(b, layout.Q[b, y, s], tokens_each)
        if self.group > 1:
            S = S[:, : self.group * self.tokens, : self.group * count]
            S = S.unflatten(2, (self.group, count)).unflatten(1, (self.group, self.tokens))
            S = S.diagonal(dim1=1, dim2=3).movedim(-1, 1).flatten(0, 1)
        if layout.d_mask is not None:
            is_masked, target = ~layout.d_mask[b].reshape(-1, self.tokens, 1), S
            if not self.crossed:
                is_masked = is_masked.repeat_interleave(ceil_div(tokens_each, self.columns), 0)
                target = S[: len(is_masked)]
            target[:, : self.tokens].masked_fill_(is_masked, NEG_INF)
        return S

    def _write(self, values: Tensor, target: Tensor) -> None:
        """Write ``[slices, documents, columns]`` into ``[batches, documents, queries, tokens]``."""
        batches, X, queries, count = target.shape
        values = values[:batches] if self.group > 1 else self._join_panels(values[:, :X], batches, queries * count)
        target.copy_(values.unflatten(-1, (queries, count)))


class FewQueriesForward(_NarrowForward):
    """The forward for calls with few query tokens."""

    @staticmethod
    def supports(layout: BatchedArgs) -> bool:
        """Return whether there are few query tokens and this machine allows such products."""
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
        item_multiple = self.columns // gcd(self.columns, self.Ld)
        for piece in cut_pieces(sizes, self.slices * self.columns, item_multiple=item_multiple, pad=self.columns):
            part = piece.shift(b, x)
            S, best, start = self._similarities(*part), self.best[piece.batches, piece.items], piece.tokens.start
            if argmax is not None:
                value, index = (self._reorder_axes(reduced_tensor) for reduced_tensor in S.max(-1))
                update_maxima(best, argmax[part.batches, part.items], value, index, start)
            elif start == 0:
                best.copy_(self._reorder_axes(S.amax(-1)))
            else:
                torch.maximum(best, self._reorder_axes(S.amax(-1)), out=best)

    def _narrow_side(self, b: slice) -> Tensor:
        return self.layout.Q[b, : self.Y, : self.Lq]

    def _similarities(self, b: slice, x: slice, t: slice) -> Tensor:
        """Return ``[batches, query tokens, documents, tokens]`` of a piece, with ``-inf`` for masked tokens."""
        layout, (batches, X, Ld) = self.layout, (s.stop - s.start for s in (b, x, t))
        S = self._products(b, layout.D[b, x, t], X * Ld)
        S = self._join_panels(S[:, : self.tokens], batches, X * Ld).unflatten(2, (X, Ld))
        return S if layout.d_mask is None else S.masked_fill(~layout.d_mask[b, x, t].unsqueeze(1), NEG_INF)

    def _reorder_axes(self, values: Tensor) -> Tensor:
        """Reorder ``[batches, query tokens, documents]`` to ``[batches, documents, queries, tokens]``."""
        return values.unflatten(1, (-1, self.Lq)).permute(0, 3, 1, 2)
