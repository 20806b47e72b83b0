"""How ragged arguments reach a backend."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Ragged(NamedTuple):
    """Packed query and document tokens, how they are cut, and which queries meet which documents.

    A segment, offset, length or index that is negative or reaches outside its tensor makes its scores NaN. Documents
    may overlap and repeat.
    """

    Q: Tensor  # [Tq, d]
    D: Tensor  # [Td, d]
    cu_seqlens_q: Tensor  # [Nq + 1], int32 or int64
    d_offsets: Tensor  # [Nd] (cross product, pair list) or [Nq, K] (candidates): first row of a document in D
    d_lengths: Tensor  # same shape
    pairs: Tensor | None  # [P, 2] (query, document) indices, int32 or int64; None: cross product or candidates
    q_mask: Tensor | None  # [Tq] bool
    d_mask: Tensor | None  # [Td] bool
    q_weight: Tensor | None  # [Tq] fp32 (fp64 for fp64)
