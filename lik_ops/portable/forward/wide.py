"""The portable forward of tokens so wide that not four of them fill a slice: a similarity at a time.

Features are cut into chunks whose products are added in one order. Products of vectors have other bits at other
addresses, so every chunk starts at a multiple of 64 bytes: rows that do not are copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import ALIGNMENT, BEST_BYTES, NORM_EPS, MiB, ceil_div, fold_sum, may_look, pieces_of, slices_of
from ..layout import Layout, Padded
from .scores import NEG_INF, Forward, winners

WIDE_BYTES = MiB  # of a token, above which it is wide
CHUNK = 8192  # features
QUERY_TOKENS, DOCUMENT_TOKENS = 32, 64  # multiplied with each other at most
READ_BYTES = 12 * MiB  # of their features at a time
PRODUCT_BYTES = 2 * MiB  # of their chunks, and of the similarities of documents


class Wide(Forward):
    """Forward of wide tokens."""

    @staticmethod
    def takes(layout: Layout) -> bool:
        return layout.Q.shape[3] * layout.pairs.dtype.itemsize > WIDE_BYTES and may_look(layout.pairs)

    def _plan(self) -> None:
        size = self.dtype.itemsize
        self.slab = 1, self.X, min(self.Y, max(1, BEST_BYTES // (self.X * self.Lq * size)))
        self.chunks = ceil_div(self.d, CHUNK)
        self.query_tokens = max(1, min(QUERY_TOKENS, self.Y * self.Lq, PRODUCT_BYTES // (self.Ld * size)))
        most = PRODUCT_BYTES // (self.chunks * self.query_tokens * size)
        self.document_tokens = max(1, min(DOCUMENT_TOKENS, most))

    def _fill(self, b: slice, x: slice, u: slice) -> None:
        argmax, sizes = self.layout.argmax, (1, u.stop - u.start, self.Lq)
        for query in pieces_of(sizes, self.query_tokens):
            _, y, s = query.within(b, u)
            for some in slices_of(x.start, x.stop, max(1, self.document_tokens // self.Ld)):
                S = self._similarities(b, some, y, s)
                best = self.best[0, some.start - x.start : some.stop - x.start, query.items, s]
                if argmax is None:
                    best.copy_(S.amax(1).view(best.shape))
                    continue
                value, index = (found.view(best.shape) for found in winners(S, self.Ld))
                best.copy_(value)
                argmax[b, some, y, s] = index.unsqueeze(0).to(argmax.dtype)

    def _similarities(self, b: slice, x: slice, y: slice, s: slice) -> Tensor:
        """``[documents, tokens, query tokens]``, masked tokens ``-inf``."""
        layout, queries = self.layout, _rows(self.layout.Q, b, y, s)
        S = layout.pairs.new_empty((x.stop - x.start, self.Ld, len(queries)))
        for t in slices_of(0, self.Ld, self.document_tokens):
            S[:, t] = self._products(_rows(layout.D, b, x, t), queries).view(S[:, t].shape)
        if layout.d_mask is not None:
            S.masked_fill_(~layout.d_mask[b, x].view(*S.shape[:2], 1), NEG_INF)
        return S

    def _products(self, documents: list[Tensor], queries: list[Tensor]) -> Tensor:
        """``[documents, queries]`` of rows."""
        products = documents[0].new_empty((len(documents), len(queries), self.chunks), dtype=self.dtype)
        norms = [[self._norm(row) for row in rows] if self.normalize else None for rows in (documents, queries)]
        step = max(2, READ_BYTES // ((len(documents) + len(queries)) * CHUNK * self.dtype.itemsize))
        whole = self.d // CHUNK
        # Never one chunk alone, as never one slice.
        blocks = [(min(c, whole - 2), min(c + step, whole)) for c in range(0, whole, step)]
        if whole < self.chunks:
            blocks.append((whole - 1, self.chunks))
        for first, last in blocks:
            D, Q = (self._read(rows, n, first, last) for rows, n in zip((documents, queries), norms, strict=True))
            for i, row in enumerate(D):
                for j, column in enumerate(Q):
                    torch.bmm(row, column.mT, out=products[i, j, first:last].view(-1, 1, 1))
        return fold_sum(products)

    def _read(self, rows: list[Tensor], norms: list[Tensor] | None, first: int, last: int) -> list[Tensor]:
        """Chunks ``[first, last)`` of each row as ``[chunks, 1, CHUNK]``, zeros behind its end."""
        begin, end = first * CHUNK, min(last * CHUNK, self.d)
        found = []
        for i, row in enumerate(rows):
            part = row[begin:end]
            ready = norms is None and part.dtype == self.dtype and part.stride(0) == 1
            if not ready or part.data_ptr() % ALIGNMENT or part.shape[0] < (last - first) * CHUNK:
                copied = row.new_zeros((last - first) * CHUNK, dtype=self.dtype)
                copied[: end - begin] = part
                part = copied if norms is None else copied.div_(norms[i])
            found.append(part.view(-1, 1, CHUNK))
        return found

    def _norm(self, row: Tensor) -> Tensor:
        parts = [torch.linalg.vector_norm(part.to(self.dtype)) for part in row.split(CHUNK)]
        return torch.linalg.vector_norm(torch.stack(parts)).clamp_min_(NORM_EPS)


def _rows(x: Tensor, *part: slice) -> list[Tensor]:
    """Tokens of ``x [batches, items, tokens, d]`` as they lie."""
    if isinstance(x, Padded):
        return x.each((part[0], part[1], part[2]))
    return [row for item in x[part].unbind() for tokens in item.unbind() for row in tokens.unbind()]
