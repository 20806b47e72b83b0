"""Dense, packed and quantized tokens in the layout that the forwards and backwards of this backend read."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.segments import RaggedArgs
from ..formats.table import EncodedTokens
from .blocks import copy_grouped, is_host_readable


class BatchedArgs(NamedTuple):
    """B batches of X documents against Y queries. The tensors are views, and nothing is copied.

    The cross product is one batch with ``Y = Nq``. Candidates are ``B = Nq`` batches with ``Y = 1``. `Q` and `D` may be
    `PaddedRows`. Forwards use their shape and index them with three slices, for batches, items and tokens.
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
    """Build `BatchedArgs` from dense arguments in either layout; an empty `argmax` becomes None."""
    cross = D.dim() == 3
    axis = 0 if cross else 1
    q_mask, q_weight = (None if x is None else x.unsqueeze(axis) for x in (q_mask, q_weight))
    if cross:
        D, d_mask = D.unsqueeze(0), None if d_mask is None else d_mask.unsqueeze(0)
    pairs = pairs.t().unsqueeze(0) if cross else pairs.unsqueeze(2)
    argmax = None if argmax is None or argmax.dim() != 3 else argmax.unsqueeze(0 if cross else 2)
    return BatchedArgs(Q.unsqueeze(axis), D, q_mask, d_mask, q_weight, pairs, argmax)


class PaddedRows:
    """Packed rows that are read as ``[B, X, L, d]``; shorter items repeat their last row.

    A repeated row changes neither the maximum nor the argmax.
    """

    def __init__(self, source: Tensor, start: Tensor, length: Tensor, L: int) -> None:
        self.source, self.start, self.length = source, start, length
        self.last = (length - 1).clamp_min(0).unsqueeze(-1)
        self.shape = torch.Size((*start.shape, L, source.shape[-1]))

    def rows(self, batches: slice, items: slice, tokens: slice) -> Tensor:
        """Return indices into the packed rows, ``[batches, items, tokens]``."""
        position = torch.arange(*tokens.indices(self.shape[2]), device=self.source.device)
        index = self.start[batches, items].unsqueeze(-1) + torch.minimum(position, self.last[batches, items])
        return index.clamp_max_(self.source.shape[0] - 1)

    def __getitem__(self, part: tuple[slice, slice, slice]) -> Tensor:
        index = self.rows(*part)
        return self.source.index_select(0, index.reshape(-1)).view(*index.shape, -1)

    def copy_into(self, target: Tensor, part: tuple[slice, slice, slice]) -> None:
        """Gather rows into ``[batches, slices, documents of a slice, tokens, d]``.

        If each document fills a slice, the rows are gathered without an intermediate copy.
        """
        if target.shape[2] == 1 and target.is_contiguous() and target.dtype == self.source.dtype:
            index = self.rows(*part).reshape(-1)
            torch.index_select(self.source, 0, index, out=target.view(-1, target.shape[-1]))
        else:
            copy_grouped(target, self[part])

    def each(self, part: tuple[slice, slice, slice]) -> list[Tensor]:
        """Return the rows of a part one by one, as views."""
        return [self.source[i] for i in self.rows(*part).flatten().tolist()]

    def simplify(self) -> Tensor:
        """Return a strided view if all items have length L and start at equal distances, else this object."""
        steps = self._steps()
        if steps is None:
            return cast(Tensor, self)
        first, rows = steps
        row, column = self.source.stride()
        strides = rows * row, rows * row, row, column
        return self.source.as_strided(self.shape, strides, self.source.storage_offset() + first * row)

    def _steps(self) -> tuple[int, int] | None:
        """Return the first row and the distance of the items, or None unless lengths are L and distances are equal."""
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
    """Packed quantized rows that are read as ``[B, X, L, d]`` and decoded to a dtype when they are read."""

    def __init__(
        self, stored: EncodedTokens, dtype: torch.dtype, start: Tensor, length: Tensor, L: int, d: int
    ) -> None:
        super().__init__(stored.data, start, length, L)
        self.stored, self.dtype, self.d = stored, dtype, d
        self.shape = torch.Size((*start.shape, L, d))
        steps = self._steps()
        # The first row of the items if they have one length and follow each other without gaps, else None.
        self.first = steps[0] if steps is not None and steps[1] == L else None

    def _index(self, part: tuple[slice, slice, slice]) -> tuple[Tensor | slice, tuple[int, ...]]:
        """Return the rows of a part, as indices or a slice, and the shape of the part."""
        sizes = [range(n)[axis_slice] for n, axis_slice in zip(self.shape[:3], part, strict=True)]
        is_contiguous = len(sizes[2]) == self.shape[2] or len(sizes[0]) * len(sizes[1]) == 1
        if self.first is None or not is_contiguous or not all(sizes):
            index = self.rows(*part)
            return index.reshape(-1), tuple(index.shape)
        shape = tuple(map(len, sizes))
        item = sizes[0].start + sizes[1].start  # there is one batch, or one item in each
        first = self.first + item * self.shape[2] + sizes[2].start
        return slice(first, first + shape[0] * shape[1] * shape[2]), shape

    def __getitem__(self, part: tuple[slice, slice, slice]) -> Tensor:
        rows, shape = self._index(part)
        return self.stored.decode(rows, self.d).to(self.dtype).view(*shape, -1)

    def copy_into(self, target: Tensor, part: tuple[slice, slice, slice]) -> None:
        """Decode rows into ``[batches, slices, documents of a slice, tokens, d]``.

        If each document fills an fp32 slice, the rows are decoded without an intermediate copy.
        """
        if target.shape[2] == 1 and target.is_contiguous() and target.dtype == torch.float32:
            self.stored.decode(self._index(part)[0], self.d, target.view(-1, self.d))
        else:
            copy_grouped(target, self[part])

    def each(self, part: tuple[slice, slice, slice]) -> list[Tensor]:
        """Return the rows of a part one by one, decoded."""
        return list(self[part].flatten(0, -2).unbind())

    def simplify(self) -> Tensor:
        """Return all rows decoded."""
        return cast(Tensor, self)


class PairSegments:
    """The queries and documents of a packed call that are scored against each other, and their segments.

    An *item* is a document as seen by a query: a document of the cross product, a candidate of a query, or a document
    of a pair list. A *cell* is a query and an item, and has one score. An invalid segment has start 0 and length 0.

    Attributes:
        query: the query of each item, int64. None in the cross product, in which every item is scored against every
            query.
    """

    def __init__(self, r: RaggedArgs, max_seqlen_q: int) -> None:
        self.ragged, self.may_look = r, is_host_readable(r.Q)
        cu = r.cu_seqlens_q.long()
        self.q_start, self.q_length, self.q_valid = _check_segments(cu[:-1], cu.diff(), r.Q.shape[0])
        start, length, is_valid = _check_segments(
            r.d_offsets.long().reshape(-1), r.d_lengths.long().reshape(-1), r.D.shape[0]
        )
        self.query: Tensor | None = None
        if r.pairs is not None:
            self.q_valid = self.q_valid & (self.q_length <= max_seqlen_q)
            query, exists = _check_indices(r.pairs[:, 0], r.queries)
            document, document_exists = _check_indices(r.pairs[:, 1], start.shape[0])
            exists = exists & document_exists
            if start.shape[0] and r.queries:
                start, length, is_valid = (x[document] for x in (start, length, is_valid))
                is_valid = is_valid & exists & self.q_valid[query]
            else:
                start, length, is_valid = document, document, torch.zeros_like(exists)
            self.query = query
        elif r.candidates:
            self.query = torch.arange(r.queries, device=r.Q.device).repeat_interleave(r.columns)
            is_valid = is_valid & self.q_valid[self.query]
        self.q_length = torch.where(self.q_valid, self.q_length, 0)
        self.start, self.length = torch.where(is_valid, start, 0), torch.where(is_valid, length, 0)
        self.valid = is_valid

    def has_kept_tokens(self) -> Tensor:
        """Return whether each query keeps a token, bool ``[Nq]``."""
        mask = self.ragged.q_mask
        if mask is None:
            return self.q_length > 0
        counts = F.pad(mask.cumsum(0), (1, 0))
        return counts[self.q_start + self.q_length] > counts[self.q_start]

    def locate_scores(self, query: Tensor, item: Tensor) -> Tensor:
        """Return the flat indices of the scores of cells."""
        return item if self.query is not None else query * self.start.shape[0] + item

    def locate_argmax(self, query: Tensor, item: Tensor, token: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return the rows and columns of the argmax of query tokens, for rows of `width` elements."""
        row = item % self.ragged.columns if self.ragged.candidates and self.ragged.pairs is None else item
        column = self.q_start[query] + token if self.ragged.pairs is None else token
        return row, column.clamp_max(width - 1)


def _check_segments(start: Tensor, length: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return starts and lengths, 0 for segments that do not fit into `total` rows, and a mask of those that fit."""
    # start + length may overflow.
    is_valid = (start >= 0) & (start <= total) & (length >= 0) & (length <= total - start)
    return torch.where(is_valid, start, 0), torch.where(is_valid, length, 0), is_valid


def _check_indices(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return indices as int64, 0 for indices out of range, and a mask of indices in range."""
    index = index.long()
    exists = (index >= 0) & (index < size)
    return torch.where(exists, index, 0), exists
