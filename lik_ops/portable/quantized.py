"""The portable forward of quantised documents: packed ones, which are decoded where they are read."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import score_dtype
from ..segments import Ragged, Stored
from .packed import forward_ragged


def forward_quantized(
    r: Ragged, stored: Stored, normalize: bool, argmax_dtype: torch.dtype | None, max_seqlen_q: int
) -> tuple[Tensor, Tensor]:
    """Scores and winners as `Ragged` says, whose D says nothing but how many tokens there are."""
    r = r._replace(Q=r.Q.to(score_dtype(r.Q.dtype)))
    return forward_ragged(r, normalize, argmax_dtype, max_seqlen_q, stored)
