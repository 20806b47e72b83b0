"""The portable forward of tokens so wide that fewer than four of them fill a slice: one similarity at a time.

Features are cut into chunks whose products are added in one order. Products of vectors have different bits at different
addresses, so every chunk starts at a multiple of 64 bytes. Rows that are not aligned are copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import (
    ALIGNMENT_BYTES,
    MAX_MAXIMA_BYTES,
    NORM_EPS,
    MiB,
    ceil_div,
    cut_pieces,
    is_host_readable,
    split_range,
    sum_pairwise,
)
from ..layout import BatchedArgs, PaddedRows
from .scores import NEG_INF, PortableForward, reduce_maxima

MIN_WIDE_BYTES = MiB  # a larger token is wide
CHUNK_FEATURES = 8192
MAX_QUERY_TOKENS, MAX_DOCUMENT_TOKENS = 32, 64  # multiplied with each other at a time
MAX_READ_BYTES = 12 * MiB  # features of these tokens that are read at a time
MAX_PRODUCT_BYTES = 2 * MiB  # products of chunks, and similarities of documents


class WideForward(PortableForward):
    """The forward of wide tokens."""

    @staticmethod
    def supports(layout: BatchedArgs) -> bool:
        """Return whether tokens are wide."""
        return layout.Q.shape[3] * layout.pairs.dtype.itemsize > MIN_WIDE_BYTES and is_host_readable(layout.pairs)

    def _plan(self) -> None:
        size = self.dtype.itemsize
        self.slab = 1, self.X, min(self.Y, max(1, MAX_MAXIMA_BYTES // (self.X * self.Lq * size)))
        self.chunks = ceil_div(self.d, CHUNK_FEATURES)
        self.query_tokens = max(1, min(MAX_QUERY_TOKENS, self.Y * self.Lq, MAX_PRODUCT_BYTES // (self.Ld * size)))
        max_tokens = MAX_PRODUCT_BYTES // (self.chunks * self.query_tokens * size)
        self.document_tokens = max(1, min(MAX_DOCUMENT_TOKENS, max_tokens))

    def _fill(self, b: slice, x: slice, u: slice) -> None:
        argmax, sizes = self.layout.argmax, (1, u.stop - u.start, self.Lq)
        for query in cut_pieces(sizes, self.query_tokens):
            _, y, s = query.shift(b, u)
            for documents in split_range(x.start, x.stop, max(1, self.document_tokens // self.Ld)):
                S = self._similarities(b, documents, y, s)
                best = self.best[0, documents.start - x.start : documents.stop - x.start, query.items, s]
                if argmax is None:
                    best.copy_(S.amax(1).view(best.shape))
                    continue
                value, index = (reduced_tensor.view(best.shape) for reduced_tensor in reduce_maxima(S, self.Ld))
                best.copy_(value)
                argmax[b, documents, y, s] = index.unsqueeze(0).to(argmax.dtype)

    def _similarities(self, b: slice, x: slice, y: slice, s: slice) -> Tensor:
        """Compute ``[documents, tokens, query tokens]``, with ``-inf`` for masked tokens."""
        layout, queries = self.layout, _flatten_rows(self.layout.Q, b, y, s)
        S = layout.pairs.new_empty((x.stop - x.start, self.Ld, len(queries)))
        for t in split_range(0, self.Ld, self.document_tokens):
            S[:, t] = self._products(_flatten_rows(layout.D, b, x, t), queries).view(S[:, t].shape)
        if layout.d_mask is not None:
            S.masked_fill_(~layout.d_mask[b, x].view(*S.shape[:2], 1), NEG_INF)
        return S

    def _products(self, documents: list[Tensor], queries: list[Tensor]) -> Tensor:
        """Compute dot products ``[documents, queries]`` of rows."""
        products = documents[0].new_empty((len(documents), len(queries), self.chunks), dtype=self.dtype)
        norms = [[self._norm(row) for row in rows] if self.normalize else None for rows in (documents, queries)]
        step = max(2, MAX_READ_BYTES // ((len(documents) + len(queries)) * CHUNK_FEATURES * self.dtype.itemsize))
        full_chunks = self.d // CHUNK_FEATURES
        # Never a single chunk, for the same reason as never a single slice.
        blocks = [(min(c, full_chunks - 2), min(c + step, full_chunks)) for c in range(0, full_chunks, step)]
        if full_chunks < self.chunks:
            blocks.append((full_chunks - 1, self.chunks))
        for first, last in blocks:
            D, Q = (self._read(rows, n, first, last) for rows, n in zip((documents, queries), norms, strict=True))
            for i, row in enumerate(D):
                for j, column in enumerate(Q):
                    torch.bmm(row, column.mT, out=products[i, j, first:last].view(-1, 1, 1))
        return sum_pairwise(products)

    def _read(self, rows: list[Tensor], norms: list[Tensor] | None, first: int, last: int) -> list[Tensor]:
        """Return chunks ``[first, last)`` of each row as ``[chunks, 1, CHUNK_FEATURES]``, padded with zeros."""
        begin, end = first * CHUNK_FEATURES, min(last * CHUNK_FEATURES, self.d)
        chunks = []
        for i, row in enumerate(rows):
            part = row[begin:end]
            is_ready = norms is None and part.dtype == self.dtype and part.stride(0) == 1
            if not is_ready or part.data_ptr() % ALIGNMENT_BYTES or part.shape[0] < (last - first) * CHUNK_FEATURES:
                buffer = row.new_zeros((last - first) * CHUNK_FEATURES, dtype=self.dtype)
                buffer[: end - begin] = part
                part = buffer if norms is None else buffer.div_(norms[i])
            chunks.append(part.view(-1, 1, CHUNK_FEATURES))
        return chunks

    def _norm(self, row: Tensor) -> Tensor:
        """Compute the norm of a row in a fixed order of chunks."""
        parts = [torch.linalg.vector_norm(part.to(self.dtype)) for part in row.split(CHUNK_FEATURES)]
        return torch.linalg.vector_norm(torch.stack(parts)).clamp_min_(NORM_EPS)


def _flatten_rows(x: Tensor, *part: slice) -> list[Tensor]:
    """Return the tokens of ``x [batches, items, tokens, d]`` one by one, as views."""
    if isinstance(x, PaddedRows):
        return x.each((part[0], part[1], part[2]))
    return [row for item in x[part].unbind() for tokens in item.unbind() for row in tokens.unbind()]
