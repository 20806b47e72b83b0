"""How ragged arguments reach a backend."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Ragged(NamedTuple):
    """Packed query and document tokens, how they are cut, and which queries meet which documents.

    A segment, offset, length or index that is negative or reaches outside its tensor makes its scores NaN. Documents
    may overlap and repeat; queries may not: where bounds descend so that they do, winners and gradients are undefined.

    Scores are ``[Nq, Nd]``; ``[Nq, K]`` for candidates, whose offsets have two axes; ``[P]`` for pairs. Winners,
    relative to their document, are ``[Nd, Tq]``, ``[K, Tq]`` or ``[P, max_seqlen_q]``.
    """

    Q: Tensor  # [Tq, d]
    D: Tensor  # [Td, d]
    cu_seqlens_q: Tensor  # [Nq + 1], int32 or int64
    d_offsets: Tensor  # [Nd] (cross product, pair list) or [Nq, K] (candidates): the first row of a document
    d_lengths: Tensor  # the same shape
    pairs: Tensor | None  # [P, 2] (query, document) indices, int32 or int64; None: cross product or candidates
    q_mask: Tensor | None  # [Tq] bool
    d_mask: Tensor | None  # [Td] bool
    q_weight: Tensor | None  # [Tq] fp32 (fp64 for fp64)

    @property
    def queries(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def columns(self) -> int:
        """Documents, or candidates of each query."""
        return self.d_offsets.shape[-1]

    @property
    def candidates(self) -> bool:
        return self.d_offsets.dim() == 2

    def scores_shape(self) -> tuple[int, ...]:
        return (self.queries, self.columns) if self.pairs is None else (self.pairs.shape[0],)

    def argmax_shape(self, max_seqlen_q: int) -> tuple[int, int]:
        return (self.columns, self.Q.shape[0]) if self.pairs is None else (self.pairs.shape[0], max_seqlen_q)


class Cut(NamedTuple):
    """What a forward is given: `Ragged`, or what it follows from, as callers have it and without an operation on it.

    Where `lengths` is None, `offsets` is the ``[Nd + 1]`` that documents begin and end at. Without `cu_seqlens_q` Q is
    dense, ``[Nq, Lq, d]``, of each query of which the first `q_lengths` count; without `offsets` D is, ``[Nd, Ld, d]``
    or ``[Nq, K, Ld, d]``, of which the first `lengths` do; all where there are none. A dense tensor lies so that its
    rows are evenly spaced, its masks and weights too.
    """

    Q: Tensor
    D: Tensor
    cu_seqlens_q: Tensor | None
    offsets: Tensor | None
    lengths: Tensor | None
    pairs: Tensor | None
    q_lengths: Tensor | None
    q_mask: Tensor | None
    d_mask: Tensor | None
    q_weight: Tensor | None
    queries: int
    columns: int  # documents, or candidates of each query
    candidates: bool
    Tq: int
    Td: int
    max_seqlen_q: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:10]

    @property
    def indices(self) -> tuple[Tensor | None, ...]:
        """Tensors of integers."""
        return self[2:7]

    @property
    def per_token(self) -> tuple[Tensor | None, ...]:
        """Masks and weights."""
        return self[7:10]

    @property
    def sizes(self) -> tuple:
        return self[10:]

    @property
    def covered(self) -> bool:
        """Whether every row of Q is known to be a query's; bounds may leave gaps."""
        return self.cu_seqlens_q is None and self.q_lengths is None

    @property
    def q_each(self) -> int | None:
        """Rows that each query has room for, where Q is dense."""
        return self.Q.shape[1] if self.cu_seqlens_q is None else None

    @property
    def d_each(self) -> int | None:
        return self.D.shape[-2] if self.offsets is None else None

    @property
    def items(self) -> int:
        """Documents, candidates of all queries, or pairs."""
        if self.pairs is not None:
            return self.pairs.shape[0]
        return self.queries * self.columns if self.candidates else self.columns

    @classmethod
    def of(cls, r: Ragged, max_seqlen_q: int) -> Cut:
        """`Ragged` for kernels, which read indices as contiguous ones."""
        cuts = r.cu_seqlens_q.contiguous(), r.d_offsets.contiguous(), r.d_lengths.contiguous()
        pairs = None if r.pairs is None else r.pairs.contiguous()
        counts, rows = (r.queries, r.columns), (r.Q.shape[0], r.D.shape[0])
        per_token = r.q_mask, r.d_mask, r.q_weight
        return cls(r.Q, r.D, *cuts, pairs, None, *per_token, *counts, r.candidates, *rows, max_seqlen_q)

    def ragged(self) -> Ragged:
        """The same spelled out; not of what counts only in part."""
        Q, D, cu_seqlens_q, offsets, lengths, *_ = self
        if cu_seqlens_q is None:
            cu_seqlens_q, Q = starts(self.queries, Q.shape[1], Q.device), Q.flatten(0, 1)
        if offsets is None:
            offsets, D = starts(self.columns, D.shape[1], D.device), D.flatten(0, 1)
        if lengths is None:
            offsets, lengths = offsets[:-1], offsets[1:] - offsets[:-1]
        per_token = (None if x is None else x.flatten() for x in (self.q_mask, self.d_mask, self.q_weight))
        return Ragged(Q, D, cu_seqlens_q, offsets, lengths, self.pairs, *per_token)

    def scores_shape(self) -> tuple[int, ...]:
        return (self.queries, self.columns) if self.pairs is None else (self.pairs.shape[0],)

    def argmax_shape(self) -> tuple[int, int]:
        return (self.columns, self.Tq) if self.pairs is None else (self.pairs.shape[0], self.max_seqlen_q)


def starts(count, length, device: torch.device) -> Tensor:
    """Where dense sequences begin once they are packed, and where the last ends: ``[count + 1]``."""
    if isinstance(count, int) and isinstance(length, int) and length > 0:
        return torch.arange(0, count * length + 1, length, device=device)
    return torch.arange(count + 1, device=device) * length
