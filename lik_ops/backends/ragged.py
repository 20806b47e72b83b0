"""How ragged arguments reach a backend."""

from __future__ import annotations

from typing import NamedTuple

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
