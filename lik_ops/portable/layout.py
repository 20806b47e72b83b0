"""Where tokens lie: dense arguments and packed ones, as the forwards and gradients of this backend read them."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.segments import RaggedArgs
from ..formats.table import EncodedTokens
from .blocks import copy_grouped, is_host_readable


class BatchedArgs(NamedTuple):
    """B batches of X documents against Y queries. Views, nothing copied.

    The cross product is one batch with ``Y = Nq``; candidates are ``B = Nq`` batches with ``Y = 1``. `Q` and `D` may be
    `PaddedRows`: forwards ask for their shape and, by three slices, for batches, items and tokens of them.
    """

    Q: Tensor  # [B, Y, Lq, d]
    D: Tensor  # [B, X, Ld, d]
    q_mask: Tensor | None  # [B, Y, Lq]
    d_mask: Tensor | None  # [B, X, Ld]
    q_weight: Tensor | None  # [B, Y, Lq]
    pairs: Tensor  # [B, X, Y], scores or their gradients
    argmax: Tensor | None  # [B, X, Y, Lq]


def make_batched_args(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    pairs: Tensor,
    argmax: Tensor | None,
) -> BatchedArgs:
    """`BatchedArgs` of arguments in either layout; `argmax` of no elements is none."""
    cross = D.dim() == 3

    def lifted(x: Tensor | None, axis: int) -> Tensor | None:
        return None if x is None else x.unsqueeze(axis)

    return BatchedArgs(
        Q=Q.unsqueeze(0 if cross else 1),
        D=D.unsqueeze(0) if cross else D,
        q_mask=lifted(q_mask, 0 if cross else 1),
        d_mask=lifted(d_mask, 0) if cross else d_mask,
        q_weight=lifted(q_weight, 0 if cross else 1),
        pairs=pairs.t().unsqueeze(0) if cross else pairs.unsqueeze(2),
        argmax=None if argmax is None or argmax.dim() != 3 else argmax.unsqueeze(0 if cross else 2),
    )


class PaddedRows:
    """Packed rows, read as if they lay in ``[B, X, L, d]``; shorter items repeat their last row.

    A row that is repeated changes no maximum and wins nothing.
    """

    def __init__(self, source: Tensor, start: Tensor, length: Tensor, L: int) -> None:
        self.source, self.start, self.length = source, start, length
        self.last = (length - 1).clamp_min(0).unsqueeze(-1)
        self.shape = torch.Size((*start.shape, L, source.shape[-1]))

    def rows(self, batches: slice, items: slice, tokens: slice) -> Tensor:
        """Indices into the packed rows, ``[batches, items, tokens]``."""
        place = torch.arange(*tokens.indices(self.shape[2]), device=self.source.device)
        index = self.start[batches, items].unsqueeze(-1) + torch.minimum(place, self.last[batches, items])
        return index.clamp_max_(self.source.shape[0] - 1)

    def __getitem__(self, part: tuple[slice, slice, slice]) -> Tensor:
        index = self.rows(*part)
        return self.source.index_select(0, index.reshape(-1)).view(*index.shape, -1)

    def copy_into(self, target: Tensor, part: tuple[slice, slice, slice]) -> None:
        """Gather into ``[batches, slices, documents of a slice, tokens, d]``, straight where documents fill slices."""
        if target.shape[2] == 1 and target.is_contiguous() and target.dtype == self.source.dtype:
            index = self.rows(*part).reshape(-1)
            torch.index_select(self.source, 0, index, out=target.view(-1, target.shape[-1]))
        else:
            copy_grouped(target, self[part])

    def each(self, part: tuple[slice, slice, slice]) -> list[Tensor]:
        """The rows one by one, where they lie."""
        return [self.source[i] for i in self.rows(*part).flatten().tolist()]

    def simplify(self) -> Tensor:
        """A view where items are all of one length and follow one another at one distance, else this itself."""
        steps = self._steps()
        if steps is None:
            return cast(Tensor, self)
        first, rows = steps
        row, column = self.source.stride()
        strides = rows * row, rows * row, row, column
        return self.source.as_strided(self.shape, strides, self.source.storage_offset() + first * row)

    def _steps(self) -> tuple[int, int] | None:
        """The first row of the first item, and how many are between two, where items are all of one length and follow
        one another at one distance."""
        if (
            not is_host_readable(self.source)
            or 1 not in self.start.shape
            or not bool((self.length == self.shape[2]).all())
        ):
            return None
        steps = self.start.reshape(-1).diff()
        if not bool((steps == steps[:1]).all() & (steps >= 0).all()):
            return None
        first = self.start.reshape(-1)[:2].tolist()
        return first[0], first[-1] - first[0]


class DecodedRows(PaddedRows):
    """The same of rows that are quantised, and are decoded where they are read: ``[B, X, L, d]`` of a dtype."""

    def __init__(
        self, stored: EncodedTokens, dtype: torch.dtype, start: Tensor, length: Tensor, L: int, d: int
    ) -> None:
        super().__init__(stored.data, start, length, L)
        self.stored, self.dtype, self.d = stored, dtype, d
        self.shape = torch.Size((*start.shape, L, d))
        self.first = self._first()

    def _first(self) -> int | None:
        """The row where the items begin, if they are of one length and follow one another."""
        steps = self._steps()
        return steps[0] if steps is not None and steps[1] == self.shape[2] else None

    def _index(self, part: tuple[slice, slice, slice]) -> tuple[Tensor | slice, tuple[int, ...]]:
        """Which rows those of a part are, and its shape."""
        sizes = [range(n)[some] for n, some in zip(self.shape[:3], part, strict=True)]
        whole = len(sizes[2]) == self.shape[2] or len(sizes[0]) * len(sizes[1]) == 1
        if self.first is None or not whole or not all(sizes):
            index = self.rows(*part)
            return index.reshape(-1), tuple(index.shape)
        shape = tuple(map(len, sizes))
        item = sizes[0].start + sizes[1].start  # there is one batch, or one item in each
        first = self.first + item * self.shape[2] + sizes[2].start
        return slice(first, first + shape[0] * shape[1] * shape[2]), shape

    def __getitem__(self, part: tuple[slice, slice, slice]) -> Tensor:
        rows, shape = self._index(part)
        return self._decode(rows).to(self.dtype).view(*shape, -1)

    def _decode(self, rows: Tensor | slice, out: Tensor | None = None) -> Tensor:
        return self.stored.decoded(rows, self.d, out)

    def copy_into(self, target: Tensor, part: tuple[slice, slice, slice]) -> None:
        if target.shape[2] == 1 and target.is_contiguous() and target.dtype == torch.float32:
            self._decode(self._index(part)[0], target.view(-1, self.d))
        else:
            copy_grouped(target, self[part])

    def each(self, part: tuple[slice, slice, slice]) -> list[Tensor]:
        return list(self[part].flatten(0, -2).unbind())

    def simplest(self) -> Tensor:
        return cast(Tensor, self)


class PairSegments:
    """Which packed queries meet which documents, and where both lie; what is not valid has length 0, from row 0.

    An *item* is a document as a query meets it: a document of the cross product, a candidate of a query, one of a pair
    list. A *cell* is a query and an item, and has one score.

    Attributes:
        query: the query of each item, int64; None in the cross product, where every item meets every query.
    """

    def __init__(self, r: RaggedArgs, max_seqlen_q: int) -> None:
        self.ragged, self.may_look = r, is_host_readable(r.Q)
        cu = r.cu_seqlens_q.long()
        self.q_start, self.q_length, self.q_valid = _check_segments(cu[:-1], cu.diff(), r.Q.shape[0])
        start, length, valid = _check_segments(
            r.d_offsets.long().reshape(-1), r.d_lengths.long().reshape(-1), r.D.shape[0]
        )
        self.query: Tensor | None = None
        if r.pairs is not None:
            self.q_valid = self.q_valid & (self.q_length <= max_seqlen_q)
            query, exists = _check_indices(r.pairs[:, 0], r.queries)
            document, document_exists = _check_indices(r.pairs[:, 1], start.shape[0])
            exists = exists & document_exists
            if start.shape[0] and r.queries:
                start, length, valid = (x[document] for x in (start, length, valid))
                valid = valid & exists & self.q_valid[query]
            else:
                start, length, valid = document, document, torch.zeros_like(exists)
            self.query = query
        elif r.candidates:
            self.query = torch.arange(r.queries, device=r.Q.device).repeat_interleave(r.columns)
            valid = valid & self.q_valid[self.query]
        self.q_length = torch.where(self.q_valid, self.q_length, 0)
        self.start, self.length, self.valid = torch.where(valid, start, 0), torch.where(valid, length, 0), valid

    def keeps(self) -> Tensor:
        """Which queries keep a token."""
        mask = self.ragged.q_mask
        if mask is None:
            return self.q_length > 0
        before = F.pad(mask.cumsum(0), (1, 0))
        return before[self.q_start + self.q_length] > before[self.q_start]

    def locate_scores(self, query: Tensor, item: Tensor) -> Tensor:
        """Where the scores of cells are among all."""
        return item if self.query is not None else query * self.start.shape[0] + item

    def locate_argmax(self, query: Tensor, item: Tensor, token: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Rows and columns of the winners of query tokens; a row has `width`."""
        row = item % self.ragged.columns if self.ragged.candidates and self.ragged.pairs is None else item
        column = self.q_start[query] + token if self.ragged.pairs is None else token
        return row, column.clamp_max(width - 1)


def _check_segments(start: Tensor, length: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Starts and lengths, 0 where they do not fit into `total` rows; and where they do."""
    # Not start + length, which may be beyond the largest integer.
    valid = (start >= 0) & (start <= total) & (length >= 0) & (length <= total - start)
    return torch.where(valid, start, 0), torch.where(valid, length, 0), valid


def _check_indices(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Indices as int64, 0 where there is nothing at them; and where there is."""
    index = index.long()
    exists = (index >= 0) & (index < size)
    return torch.where(exists, index, 0), exists
