"""The portable backward of ragged arguments: each row of a gradient sums what its winners send, in a fixed order.

Gradients are made a window of rows at a time. The cells that can send something into it are taken in order, a bounded
number of winners at once, and their products are summed by destination. The flag `unified` changes nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..segments import Ragged
from .backward import ENTRIES, Backward, bags
from .blocks import MiB, Piece, row_norms, slices_of
from .items import Items

TABLE_BYTES = 6 * MiB  # of the other side's tokens, converted or normalised once


def backward_ragged(
    grad_scores: Tensor,
    r: Ragged,
    argmax: Tensor,
    normalize: bool,
    needs: list[bool],
    unified: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `Q`, `D` and `q_weight`, each ``[0]`` where `needs` says no. Bitwise reproducible."""
    job = _RaggedBackward(grad_scores, r, argmax, normalize, needs)
    if job.anything:
        if needs[0] or needs[2]:
            job.into_queries()
        if needs[1]:
            job.into_documents()
    grads = job.grad_Q, job.grad_D, job.grad_q_weight
    if not job.anything:
        for grad in grads:
            grad.zero_()
    grad_Q, grad_D, grad_q_weight = (g.squeeze(0) if need else g for g, need in zip(grads, needs, strict=True))
    return grad_Q, grad_D, grad_q_weight


class _Cells(NamedTuple):
    """Some cells, each a query and an item it meets."""

    query: Tensor
    item: Tensor


class _Sent(NamedTuple):
    """What winners send: from which row of one side into which row of the other, times what."""

    source: Tensor
    destination: Tensor
    weight: Tensor
    exists: Tensor


class _RaggedBackward(Backward):
    """The gradients as of one long query and one long document, which is how packed tokens lie."""

    def __init__(self, grad_scores: Tensor, r: Ragged, argmax: Tensor, normalize: bool, needs: list[bool]) -> None:
        weight = None if r.q_weight is None else r.q_weight[None]
        Q, D = r.Q[None], r.D[None]
        super().__init__(grad_scores.new_empty((1, 1)), Q, D, argmax, None, None, weight, normalize, needs)
        self.ragged, self.winners, self.grad_scores = r, argmax, grad_scores.reshape(-1)
        self.items = Items(r, argmax.shape[1] if r.pairs is not None and argmax.dim() == 2 else r.Q.shape[0])
        self.anything = self.anything and self.items.Nq > 0 and r.Q.shape[0] > 0
        self._table_of: Tensor | None = None

    def into_queries(self) -> None:
        items = self.items
        for window in self._windows(self.Lq):
            chosen = self._meeting(items.q_start, items.q_length, window)
            total = self._total(window, self._cells(chosen, None), into_queries=True)
            self._finish_queries(Piece(slice(0, 1), slice(0, 1), window), total)

    def into_documents(self) -> None:
        items = self.items
        for window in self._windows(self.Ld):
            chosen = self._meeting(items.start, items.length, window)
            total = self._total(window, self._cells(None, chosen), into_queries=False)
            self._finish_documents(Piece(slice(0, 1), slice(0, 1), window), total)

    def _windows(self, rows: int) -> Iterator[slice]:
        """Rows whose gradients are summed together: all of them where nobody can say which cells meet a part."""
        yield from slices_of(0, rows, self.piece_tokens if self.may_look else rows)

    def _meeting(self, start: Tensor, length: Tensor, window: slice) -> Tensor:
        """Indices of the segments that have rows in `window`."""
        if not self.may_look:
            return torch.arange(start.shape[0], device=start.device)
        return ((start < window.stop) & (start + length > window.start) & (length > 0)).nonzero().squeeze(-1)

    def _cells(self, queries: Tensor | None, chosen: Tensor | None) -> Iterator[_Cells]:
        """The cells of some queries or items, in an order that depends on nothing else, a bounded number at a time."""
        items = self.items
        width = 1 if self.may_look else self._width()
        most = max(1, ENTRIES // width)
        if items.query is not None:
            if chosen is None:
                chosen = torch.arange(items.start.shape[0], device=items.start.device)
                if self.may_look and queries is not None:
                    alive = torch.zeros(items.Nq, dtype=torch.bool)
                    alive[queries] = True
                    chosen = chosen[alive[items.query] & (items.length > 0)]
            for part in chosen.split(most):
                yield _Cells(items.query[part], part)
            return
        device = items.start.device
        if queries is None:
            queries = torch.arange(items.Nq, device=device)
        if chosen is None:
            chosen = torch.arange(items.start.shape[0], device=device)
        if not queries.numel():
            return
        for some in queries.split(most):
            for part in chosen.split(max(1, most // some.numel())):
                yield _Cells(some.repeat_interleave(part.numel()), part.repeat(some.numel()))

    def _width(self) -> int:
        """The most tokens that a query can have."""
        return self.winners.shape[1]

    def _entries(self, cells: _Cells) -> Iterator[tuple[_Cells, Tensor, Tensor]]:
        """Cells repeated for each of their query tokens, these tokens, and which of them there are."""
        items = self.items
        lengths = items.q_length[cells.query]
        most = ENTRIES if self._table_of is not None else self.piece_tokens
        if not self.may_look:
            for part in slices_of(0, lengths.numel(), max(1, most // self._width())):
                s = torch.arange(self._width(), device=lengths.device).repeat(part.stop - part.start)
                query, item, length = (
                    x[part].repeat_interleave(self._width()) for x in (cells.query, cells.item, lengths)
                )
                yield _Cells(query, item), s, s < length
            return
        ends = lengths.cumsum(0)
        first = 0
        while first < lengths.numel():
            before = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(torch.searchsorted(ends, before + most, right=True)))
            part = slice(first, last)
            total = int(ends[last - 1]) - before
            s = torch.arange(before, before + total) - (ends[part] - lengths[part]).repeat_interleave(lengths[part])
            query, item = (x[part].repeat_interleave(lengths[part], output_size=total) for x in cells)
            yield _Cells(query, item), s, torch.ones_like(s, dtype=torch.bool)
            first = last

    def _total(self, window: slice, chunks: Iterator[_Cells], into_queries: bool) -> Tensor:
        """The gradients that the rows of `window` receive, before their own weights and norms."""
        total = self.grad_scores.new_zeros((window.stop - window.start, self.d), dtype=self.dtype)
        source = self.ragged.D if into_queries else self.ragged.Q
        self._table_of = self._table(source)
        for cells in chunks:
            for entries, s, exists in self._entries(cells):
                sent = self._sent(entries, s, exists, window, into_queries)
                self._add(total, source, sent)
        return total

    def _sent(self, cells: _Cells, s: Tensor, exists: Tensor, window: slice, into_queries: bool) -> _Sent:
        items, width = self.items, self.winners.shape[1]
        row, column = items.winners_row(cells.item), items.winners_column(cells.query) + s
        winner = self.winners[row, column.clamp_max_(width - 1)].long()
        # Winners beyond their document are of no forward of these arguments; they must not be read.
        exists = exists & (winner >= 0) & (winner < items.length[cells.item])
        q_row, d_row = items.q_start[cells.query] + s, items.start[cells.item] + winner
        g = self.grad_scores[items.cell(cells.query, cells.item)]
        if into_queries:
            source, destination = d_row, q_row
        else:
            source, destination = q_row, d_row
            if self.ragged.q_weight is not None:
                g = g * self.ragged.q_weight[q_row.clamp_max(self.Lq - 1)]
        destination = destination - window.start
        exists &= (destination >= 0) & (destination < window.stop - window.start)
        return _Sent(source, destination, g, exists)

    def _table(self, source: Tensor) -> Tensor | None:
        """The source's rows in the computing dtype, normalised if asked; None if they take too much memory."""
        if source.dtype == self.dtype and not self.normalize and source.is_contiguous():
            return source
        if source.numel() * self.dtype.itemsize > TABLE_BYTES:
            return None
        rows = source.to(self.dtype).contiguous()
        return rows / row_norms(rows) if self.normalize else rows

    def _add(self, total: Tensor, source: Tensor, sent: _Sent) -> None:
        if not self.may_look:
            index = torch.where(sent.exists, sent.source, 0)
            rows = self._rows(source[index], sent.exists).mul_(torch.where(sent.exists, sent.weight, 0).unsqueeze(-1))
            total.index_put_((torch.where(sent.exists, sent.destination, 0),), rows, accumulate=True)
            return
        origin, destination, weight = sent.source, sent.destination, sent.weight
        if not bool(sent.exists.all()):
            origin, destination, weight = (x[sent.exists] for x in (origin, destination, weight))
        if not origin.numel():
            return
        # A stable sort fixes the order of addition; bags are only made of the rows that receive something.
        destination, order = torch.sort(destination.int(), stable=True)
        origin, weight = origin[order], weight[order]
        found, counts = torch.unique_consecutive(destination, return_counts=True)
        table = self._table_of
        if table is None:
            table = self._rows(source[origin], torch.ones_like(origin, dtype=torch.bool))
            origin = torch.arange(origin.numel())
        total[found.long()] += bags(table, origin, weight, counts.cumsum(0) - counts)
