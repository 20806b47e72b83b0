"""Where the queries and documents of ragged arguments lie, checked: what both halves of the portable backend read.

An *item* is a document as a query meets it: a document of the cross product, a candidate of a query, one of a pair
list. A *cell* is a query and an item, and has one score.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..segments import Ragged
from .blocks import may_look


class Items:
    """First rows, lengths and validity of every query and item; what is not valid has length 0 and begins at row 0.

    Attributes:
        query: the query of each item, int64; None in the cross product, where every item meets every query.
    """

    def __init__(self, r: Ragged, max_seqlen_q: int) -> None:
        self.ragged, self.may_look = r, may_look(r.Q)
        self.Nq = r.cu_seqlens_q.shape[0] - 1
        cu = r.cu_seqlens_q.long()
        self.q_start, self.q_length, self.q_valid = _checked(cu[:-1], cu[1:] - cu[:-1], r.Q.shape[0])
        start, length, valid = _checked(r.d_offsets.long().reshape(-1), r.d_lengths.long().reshape(-1), r.D.shape[0])
        self.query: Tensor | None = None
        if r.pairs is not None:
            self.q_valid = self.q_valid & (self.q_length <= max_seqlen_q)
            query, exists = _index(r.pairs[:, 0], self.Nq)
            document, document_exists = _index(r.pairs[:, 1], start.shape[0])
            exists = exists & document_exists
            if start.shape[0] and self.Nq:
                start, length, valid = (x[document] for x in (start, length, valid))
                valid = valid & exists & self.q_valid[query]
            else:
                start, length, valid = document, document, torch.zeros_like(exists)
            self.query = query
        elif r.d_offsets.dim() == 2:
            self.query = torch.arange(self.Nq, device=r.Q.device).repeat_interleave(r.d_offsets.shape[1])
            valid = valid & self.q_valid[self.query]
        self.q_length = torch.where(self.q_valid, self.q_length, 0)
        self.start, self.length, self.valid = torch.where(valid, start, 0), torch.where(valid, length, 0), valid

    def keeps(self) -> Tensor:
        """Which queries keep a token."""
        mask = self.ragged.q_mask
        if mask is None:
            return self.q_length > 0
        before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
        return before[self.q_start + self.q_length] > before[self.q_start]

    def score_shape(self) -> tuple[int, ...]:
        if self.query is None:
            return (self.Nq, self.start.shape[0])
        return tuple(self.ragged.d_offsets.shape) if self.ragged.pairs is None else (self.start.shape[0],)

    def cell(self, query: Tensor, item: Tensor) -> Tensor:
        """Index of a cell's score among all scores."""
        return item if self.query is not None else query * self.start.shape[0] + item

    def winners_row(self, item: Tensor) -> Tensor:
        """The row of the winners that an item's are in."""
        candidates = self.query is not None and self.ragged.pairs is None
        return item % self.ragged.d_offsets.shape[1] if candidates else item

    def winners_column(self, query: Tensor) -> Tensor:
        """The column of the winners that a query's begin at."""
        return self.q_start[query] if self.ragged.pairs is None else torch.zeros_like(query)


def _checked(start: Tensor, length: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Starts and lengths, 0 where they do not fit into `total` rows; and where they do."""
    # Not start + length, which may be beyond the largest integer.
    valid = (start >= 0) & (start <= total) & (length >= 0) & (length <= total - start)
    return torch.where(valid, start, 0), torch.where(valid, length, 0), valid


def _index(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Indices as int64, 0 where there is nothing at them; and where there is."""
    index = index.long()
    exists = (index >= 0) & (index < size)
    return torch.where(exists, index, 0), exists
