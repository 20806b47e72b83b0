"""The portable backward of packed tokens: each row of a gradient sums its contributions in a fixed order.

Gradients are computed for a window of rows at a time. The cells that contribute to the window are processed in order, a
bounded number of argmax elements at once. Their products are summed by destination.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...core.arguments import score_dtype
from ...core.segments import RaggedArgs
from ...formats.table import OPERAND_FORMATS, EncodedTokens
from ..blocks import MiB, Piece, compute_row_norms, split_range
from ..layout import BatchedArgs, PairSegments
from .dense import MAX_ENTRIES, DenseBackward, sum_bags

MAX_TABLE_BYTES = 6 * MiB  # tokens of the other side, converted or normalized once


def backward_ragged(
    grad_scores: Tensor, tensors: Sequence, argmax: Tensor, normalize: bool, needs: list[bool], unified: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of Q, D and q_weight of a ragged operator, each empty if not needed.

    They are bitwise reproducible. `unified` has no effect.
    """
    return _PackedBackward(grad_scores, tensors, argmax, normalize, needs, None).gradients()


def backward_quantized(
    grad_scores: Tensor, tensors: Sequence, stored: EncodedTokens, argmax: Tensor, normalize: bool, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of Q and q_weight for quantized documents, each empty if not needed.

    As in the forward, queries are rotated in fp32 (fp64). Their gradients rotate back before they are rounded.
    """
    Q, all_needs = tensors[0], [needs[0], False, needs[1]]
    is_rotated = OPERAND_FORMATS[stored.format].rotated
    transformed = stored.transform_queries(Q.to(score_dtype(Q.dtype)) if is_rotated else Q)
    backward = _PackedBackward(grad_scores, (transformed, *tensors[1:]), argmax, normalize, all_needs, stored)
    grad_Q, _, grad_weight = backward.gradients()
    if needs[0] and is_rotated:
        grad_Q = stored.transform_queries(grad_Q, inverse=True)
    return grad_Q.to(Q.dtype), grad_weight


class _PackedBackward(DenseBackward):
    """The gradients of packed tokens, stored like one long query and one long document."""

    def __init__(
        self,
        grad_scores: Tensor,
        tensors: Sequence,
        argmax: Tensor,
        normalize: bool,
        needs: list[bool],
        stored: EncodedTokens | None,  # with it, the documents of `tensors` are a placeholder
    ) -> None:
        r = RaggedArgs.from_tensors(tensors)
        weight = None if r.q_weight is None else r.q_weight[None, None]
        layout = BatchedArgs(r.Q[None, None], r.D[None, None], None, None, weight, grad_scores, argmax)
        super().__init__(layout, tensors[0].shape, tensors[1].shape, normalize, needs)
        self.ragged, self.argmax, self.grad_scores, self.stored = r, argmax, grad_scores.reshape(-1), stored
        self.cells = PairSegments(r, argmax.shape[1] if r.pairs is not None and argmax.dim() == 2 else r.Q.shape[0])

    def has_upstream(self) -> bool:
        """Return whether any gradient can be nonzero."""
        return super().has_upstream() and self.ragged.queries > 0 and self.Lq > 0

    def gather_into_queries(self) -> None:
        """Compute grad_Q and grad_q_weight, a window of rows at a time."""
        for window, queries in self._windows(self.cells.q_start, self.cells.q_length, self.Lq):
            self._gather(window, self._list_pairs(queries, None), into_queries=True)

    def gather_into_documents(self) -> None:
        """Compute grad_D, a window of rows at a time."""
        for window, items in self._windows(self.cells.start, self.cells.length, self.Ld):
            self._gather(window, self._list_pairs(None, items), into_queries=False)

    def _windows(self, start: Tensor, length: Tensor, rows: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield windows of rows whose gradients are summed together, and the segments that overlap each window.

        If the host may not read values, there is one window with all rows and all segments.
        """
        if not self.may_look:
            yield slice(0, rows), torch.arange(start.shape[0], device=start.device)
            return
        for window in split_range(0, rows, self.piece_tokens):
            is_overlapping = (start < window.stop) & (start + length > window.start) & (length > 0)
            yield window, is_overlapping.nonzero().squeeze(-1)

    def _list_pairs(self, queries: Tensor | None, items: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the queries and items of the cells of some queries or of some items, a bounded number at a time.

        Their order depends on nothing else.
        """
        cells, device = self.cells, self.grad_scores.device
        max_entries = MAX_ENTRIES if self.may_look else max(1, MAX_ENTRIES // self.argmax.shape[1])
        if items is None:
            items = torch.arange(cells.start.shape[0], device=device)
            if cells.query is not None and self.may_look and queries is not None:
                is_selected = torch.zeros(self.ragged.queries, dtype=torch.bool)
                is_selected[queries] = True
                items = items[is_selected[cells.query] & (cells.length > 0)]
        if cells.query is not None:
            for part in items.split(max_entries):
                yield cells.query[part], part
            return
        if queries is None:
            queries = torch.arange(self.ragged.queries, device=device)
        if queries.numel():
            for chunk in queries.split(max_entries):
                for part in items.split(max(1, max_entries // chunk.numel())):
                    yield chunk.repeat_interleave(part.numel()), part.repeat(chunk.numel())

    def _entries(self, query: Tensor, item: Tensor, max_tokens: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield cells repeated for each token of their query, and at most `max_tokens` tokens, or one cell.

        If the host may not read values, every query has the maximum number of tokens.
        """
        width = self.argmax.shape[1]
        if not self.may_look:
            for part in split_range(0, query.numel(), max(1, max_tokens // width)):
                s = torch.arange(width, device=query.device).repeat(part.stop - part.start)
                yield query[part].repeat_interleave(width), item[part].repeat_interleave(width), s
            return
        lengths = self.cells.q_length[query]
        ends = lengths.cumsum(0)
        first = 0
        while first < lengths.numel():
            offset = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(torch.searchsorted(ends, offset + max_tokens, right=True)))
            counts, total = lengths[first:last], int(ends[last - 1]) - offset
            s = torch.arange(offset, offset + total) - (ends[first:last] - counts).repeat_interleave(counts)
            queries, items = (x[first:last].repeat_interleave(counts, output_size=total) for x in (query, item))
            yield queries, items, s
            first = last

    def _gather(self, window: slice, chunks: Iterator[tuple[Tensor, Tensor]], into_queries: bool) -> None:
        """Compute the gradients of the rows of `window` from the cells in `chunks`."""
        total = self.grad_scores.new_zeros((window.stop - window.start, self.d), dtype=self.dtype)
        source = self.ragged.D if into_queries else self.ragged.Q
        table = self._table(source)
        for chunk in chunks:
            for entries in self._entries(*chunk, MAX_ENTRIES if table is not None else self.piece_tokens):
                self._add(total, source, table, *self._select_contributions(*entries, window, into_queries))
        self._finish(Piece(slice(0, 1), slice(0, 1), window), total, into_queries)

    def _select_contributions(
        self, query: Tensor, item: Tensor, s: Tensor, window: slice, into_queries: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return source rows, destination rows in `window`, weights, and a mask of the contributions that exist."""
        cells = self.cells
        argmax = self.argmax[cells.locate_argmax(query, item, s, self.argmax.shape[1])].long()
        # No forward of these arguments returns an argmax outside the document, and such rows must not be read.
        exists = (argmax >= 0) & (argmax < cells.length[item])
        if not self.may_look:
            exists &= s < cells.q_length[query]
        q_row, d_row = cells.q_start[query] + s, cells.start[item] + argmax
        g = self.grad_scores[cells.locate_scores(query, item)]
        if not into_queries and self.ragged.q_weight is not None:
            g = g * self.ragged.q_weight[q_row.clamp_max(self.Lq - 1)]
        source, destination = (d_row, q_row) if into_queries else (q_row, d_row)
        destination = destination - window.start
        exists &= (destination >= 0) & (destination < window.stop - window.start)
        return source, destination, g, exists

    def _table(self, source: Tensor) -> Tensor | None:
        """Return the source's rows in the computing dtype, normalized on request, or None if they exceed the budget."""
        if self.stored is None and source.dtype == self.dtype and not self.normalize and source.is_contiguous():
            return source
        if source.numel() * self.dtype.itemsize > MAX_TABLE_BYTES:
            return None
        rows = self._read(source, slice(None)).to(self.dtype).contiguous()
        return rows / compute_row_norms(rows) if self.normalize else rows

    def _read(self, source: Tensor, rows: Tensor | slice) -> Tensor:
        """Return rows of `source`, decoded if they are encoded."""
        return source[rows] if self.stored is None else self.stored.decode(rows, self.d)

    def _add(
        self,
        total: Tensor,
        source: Tensor,
        table: Tensor | None,
        origin: Tensor,
        destination: Tensor,
        weight: Tensor,
        exists: Tensor,
    ) -> None:
        """Add weighted rows of `source`, or of `table` if it is given, to rows of `total`."""
        if not self.may_look:
            origin, destination, weight = (torch.where(exists, x, 0) for x in (origin, destination, weight))
            rows = self._rows(self._read(source, origin), exists).mul_(weight.unsqueeze(-1))
            total.index_put_((destination,), rows, accumulate=True)
            return
        if not bool(exists.all()):
            origin, destination, weight = (x[exists] for x in (origin, destination, weight))
        if not origin.numel():
            return
        # A stable sort fixes the order of addition. Only rows with contributions get a bag.
        destination, order = torch.sort(destination.int(), stable=True)
        origin, weight = origin[order], weight[order]
        unique_rows, counts = torch.unique_consecutive(destination, return_counts=True)
        if table is None:
            table = self._rows(self._read(source, origin), torch.ones_like(origin, dtype=torch.bool))
            origin = torch.arange(origin.numel())
        total[unique_rows.long()] += sum_bags(table, origin, weight, counts.cumsum(0) - counts)
