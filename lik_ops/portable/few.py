"""The portable forward where a query meets few document tokens, which lie in one slice.

Queries of a cross product meet the same documents: their tokens follow one another in the columns of slices, without
padding between them. Queries with candidates of their own have slices of their own; short ones share a slice, of which
the blocks on the diagonal count. Either way one product serves many queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from .blocks import (
    ALIGNMENT,
    BEST_BYTES,
    MIN_ROWS,
    SHARED_ROWS,
    SIMILARITY_BYTES,
    STEPS,
    Layout,
    MiB,
    ceil_div,
    may_look,
    round_up,
    row_norms,
    slice_shape,
    slices_buffer,
)
from .slices import NEG_INF, Cut, Forward, Part, winners

SHARED_TOKENS = 512  # of the documents of a cross product
PART_BYTES = 3 * MiB  # of query tokens, and of documents, in one product
SMALL = {torch.float32: 16, torch.float64: 12}  # columns, where a machine allows so few


@lru_cache(maxsize=4096)
def has_bits_of_slices(rows: int, columns: int, d: int, dtype: torch.dtype, turned: bool = False) -> bool:
    """Whether products of this shape have the bits of the slices that `slice_shape` makes, on this machine.

    Rows are document tokens, `turned` query tokens. Kernels that add in another order round most similarities of random
    tokens otherwise.
    """
    step = STEPS[dtype][1]
    if rows >= MIN_ROWS and columns % step == 0 and not turned:
        return True
    random = torch.Generator().manual_seed(0)
    size = round_up(max(rows, columns, MIN_ROWS), step)
    D, Q = (torch.rand((2, size, d), generator=random, dtype=dtype, device="cpu").sub_(0.5) for _ in range(2))
    expected, across = torch.bmm(D, Q.mT), (Q, D) if turned else (D, Q)
    actual = torch.bmm(across[0][:, :rows].contiguous(), across[1][:, :columns].contiguous().mT)
    return torch.equal(actual, (expected.mT if turned else expected)[:, :rows, :columns])


@lru_cache(maxsize=1024)
def rows_for(tokens: int, columns: int, d: int, dtype: torch.dtype) -> int:
    """Rows of a slice that holds so many document tokens."""
    few = few_rows_for(tokens, columns, d, dtype)
    return few or max(round_up(tokens, STEPS[dtype][0]), MIN_ROWS)


@lru_cache(maxsize=1024)
def few_rows_for(tokens: int, columns: int, d: int, dtype: torch.dtype, turned: bool = False) -> int | None:
    """Rows below `MIN_ROWS` for so many tokens, None where this machine allows none."""
    possible = range(round_up(tokens, 4), MIN_ROWS, 4)
    return next((rows for rows in possible if has_bits_of_slices(rows, columns, d, dtype, turned)), None)


@lru_cache(maxsize=1024)
def shared_by(tokens: int, Lq: int, d: int, dtype: torch.dtype) -> tuple[int, int]:
    """How many queries of `Lq` tokens, each with `tokens` of its own, share a slice; and its columns."""
    _, step, most = STEPS[dtype]
    for columns in (SMALL[dtype], step):
        group = min(columns // Lq, max(columns, MIN_ROWS) // tokens)
        if group > 1 and has_bits_of_slices(rows_for(group * tokens, columns, d, dtype), columns, d, dtype):
            return group, columns
    return 1, min(most, round_up(Lq, step))


class Few(Forward):
    """Forward of calls where the documents that a query meets are one slice."""

    @staticmethod
    def takes(layout: Layout) -> bool:
        B, X, Ld, d = layout.D.shape
        tokens = X * Ld
        fits = max(tokens, STEPS[layout.pairs.dtype][2]) * d * layout.pairs.dtype.itemsize <= PART_BYTES
        return fits and tokens <= (SHARED_TOKENS if B == 1 else SHARED_ROWS) and may_look(layout.pairs)

    def __init__(self, layout: Layout, normalize: bool) -> None:
        self.layout, self.normalize, self.dtype = layout, normalize, layout.pairs.dtype
        B, Y, self.Lq, d = layout.Q.shape
        X, self.Ld = layout.D.shape[1:3]
        self.tokens, self.shared = X * self.Ld, B == 1
        self.shape = slice_shape(self.Lq, self.Ld, d, self.dtype)._replace(queries=1)
        _, step, most = STEPS[self.dtype]
        if self.shared:
            self.group, self.columns = 1, max(step, min(most, Y * self.Lq // 2 // step * step))
        else:
            self.group, self.columns = shared_by(self.tokens, self.Lq, d, self.dtype)
        self.rows = rows_for(self.group * self.tokens, self.columns, d, self.dtype)
        similarities, tokens = self.rows * self.columns, max(self.columns, 0 if self.shared else self.rows) * d
        size = self.dtype.itemsize
        self.slices = max(2, min(SIMILARITY_BYTES // (similarities * size), PART_BYTES // (tokens * size)))
        self.similarities = layout.pairs.new_empty(self.slices * similarities)
        # Parts of the queries begin, where they can, at whole slices.
        self.step = self.columns // gcd(self.columns, self.Lq) if self.shared else self.group * ALIGNMENT
        items = max(1, BEST_BYTES // (X * self.Lq * size))
        items = items // self.step * self.step or items
        self.cut = Cut(1, 1, 1 if self.shared else items, X, items if self.shared else 1, 1, 1)
        self.shared_documents: tuple[Tensor, Tensor | None] | None = None

    def _fill(self, slab: Part, u0: int, u1: int) -> None:
        layout, X = self.layout, self.layout.D.shape[1]
        self.best = layout.pairs.new_empty((slab.b1 - slab.b0, X, u1 - u0, self.Lq))
        for b, y, s in self._parts(slab, u0, u1):
            S = self._similarities(b, y, s)
            best = self.best[b.start - slab.b0 : b.stop - slab.b0, :, y.start - u0 : y.stop - u0, s]
            if layout.argmax is None:
                self._place(S[:, : self._kept(S)].unflatten(1, (-1, self.Ld)).amax(2), best)
                continue
            value, index = winners(S, self.Ld)
            self._place(value, best)
            self._place(index, layout.argmax[b, :, y, s])

    def _parts(self, slab: Part, u0: int, u1: int) -> Iterator[tuple[slice, slice, slice]]:
        """Batches, queries and tokens that are multiplied together."""
        tokens = self.slices * self.columns
        if self.group > 1:
            items = self.slices * self.group
        else:
            items = max(1, tokens // self.Lq if self.shared else self.slices // ceil_div(self.Lq, self.columns))
        items = items // self.step * self.step or items
        first, last = (u0, u1) if self.shared else (slab.b0, slab.b1)
        for i in range(first, last, items):
            some = slice(i, min(i + items, last))
            for s0 in range(0, self.Lq, tokens):
                s = slice(s0, min(s0 + tokens, self.Lq))
                yield (slice(0, 1), some, s) if self.shared else (some, slice(0, 1), s)

    def _similarities(self, b: slice, y: slice, s: slice) -> Tensor:
        """``[slices, rows, columns]`` of a part, masked tokens ``-inf``; of groups what each query's own are."""
        queries, count = self.layout.Q[b, y, s], s.stop - s.start
        panels = 1
        if self.group == 1 and not self.shared:
            panels = ceil_div(count, self.columns)
            Q = self._slices(queries, count, panels * self.columns, least=1 if panels > 1 else 2)
            Q = Q.unflatten(1, (panels, self.columns)).flatten(0, 1)
        else:
            Q = self._slices(queries, self.columns if self.shared else self.group * count, self.columns)
        documents, masked = self._documents(b, Q.shape[0], panels)
        n = Q.shape[0]
        S = self.similarities[: n * self.rows * self.columns].view(n, self.rows, self.columns)
        torch.bmm(documents, Q.mT, out=S)
        if self.group > 1:
            S = S[:, : self.group * self.tokens, : self.group * count]
            S = S.unflatten(2, (self.group, count)).unflatten(1, (self.group, self.tokens))
            # As [queries, tokens, query tokens].
            S = S.diagonal(dim1=1, dim2=3).movedim(-1, 1).flatten(0, 1)
        if masked is not None:
            S[:, : self.tokens].masked_fill_(masked, NEG_INF)
        return S

    def _documents(self, b: slice, n: int, panels: int) -> tuple[Tensor, Tensor | None]:
        """Document tokens ``[n, rows, d]``, and which of each query's are masked."""
        if self.shared_documents is not None:
            documents, masked = self.shared_documents
            return documents.expand(n, -1, -1), masked
        D, d_mask = self.layout.D, self.layout.d_mask
        part = b, slice(0, D.shape[1]), slice(0, self.Ld)
        documents = self._slices(D[part], self.group * self.tokens, self.rows)
        masked = None if d_mask is None else ~d_mask[part].reshape(-1, self.tokens, 1)
        if self.shared:
            self.shared_documents = documents[:1], masked
            return self._documents(b, n, panels)
        documents = documents[: n // panels].repeat_interleave(panels, 0) if panels > 1 else documents
        if masked is not None:
            masked = masked.repeat_interleave(panels, 0)
            masked = torch.cat([masked, masked.new_zeros((n * self.group - masked.shape[0], self.tokens, 1))])
        return documents, masked

    def _slices(self, source: Tensor, each: int, size: int, least: int = 2) -> Tensor:
        """Tokens of ``source [..., d]``, so many in each of `least` slices or more ``[n, size, d]``, then zeros."""
        rows = source.reshape(-1, source.shape[-1])
        count, d = rows.shape
        n = max(least, ceil_div(count, each))
        ready = rows.is_contiguous() and rows.dtype == self.dtype and not self.normalize
        itemsize = self.dtype.itemsize
        if ready and count == n * size and not (rows.data_ptr() % ALIGNMENT or size * d * itemsize % ALIGNMENT):
            return rows.view(n, size, d)
        slices = slices_buffer(rows, n, size, d, self.dtype)
        full, rest = divmod(count, each)
        slices[:full, :each] = rows[: full * each].unflatten(0, (full, each))
        if each < size:
            slices[:full, each:] = 0
        if full < n:
            slices[full:] = 0
            slices[full, :rest] = rows[full * each :]
        if self.normalize:
            slices /= row_norms(slices)
        return slices

    def _kept(self, S: Tensor) -> int:
        return S.shape[1] // self.Ld * self.Ld

    def _place(self, values: Tensor, target: Tensor) -> None:
        """Put ``[slices, documents, columns]`` into ``[batches, documents, queries, tokens]``."""
        batches, X, queries, count = target.shape
        if self.shared:
            values = values[:, :X].transpose(0, 1).reshape(1, X, -1)[..., : queries * count]
        elif self.group == 1:
            panels = ceil_div(count, self.columns)
            values = values[: batches * panels, :X].unflatten(0, (batches, panels)).transpose(1, 2)
            values = values.reshape(batches, X, -1)[..., :count]
        else:
            values = values[:batches]
        target.copy_(values.unflatten(-1, (queries, count)))
