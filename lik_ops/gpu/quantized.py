"""Quantised documents on a GPU: decoded to fp32, then scored by the kernels of packed tokens."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ..portable.quantized import scored_decoded
from ..segments import Ragged, Stored
from .ragged_forward import forward_ragged

_log = logging.getLogger("lik_ops")


def forward_quantized(
    r: Ragged, stored: Stored, normalize: bool, argmax_dtype: torch.dtype | None, max_seqlen_q: int
) -> tuple[Tensor, Tensor]:
    """Scores and winners as `Ragged` says, whose D says nothing but how many tokens there are."""
    _log.debug("no kernel reads %s yet: %d tokens are decoded to fp32 first", stored.format, len(stored.data))
    return scored_decoded(forward_ragged, r, stored, normalize, argmax_dtype, max_seqlen_q)
