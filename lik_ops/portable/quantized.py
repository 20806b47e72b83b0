"""The portable forward of quantised documents: packed ones, which are decoded where they are read."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import score_dtype
from ..formats import encoded, extremes, scales_of
from ..segments import Ragged, Stored
from .blocks import MiB, pieces_of
from .packed import forward_ragged

_KEPT_BYTES = 4 * MiB  # of tokens in fp32 that are quantised at a time


def forward_quantized(
    r: Ragged, stored: Stored, normalize: bool, argmax_dtype: torch.dtype | None, max_seqlen_q: int
) -> tuple[Tensor, Tensor]:
    """Scores and winners as `Ragged` says, whose D says nothing but how many tokens there are."""
    r = r._replace(Q=r.Q.to(score_dtype(r.Q.dtype)))
    return forward_ragged(r, normalize, argmax_dtype, max_seqlen_q, stored)


def keep_int8(D: Tensor) -> tuple[Tensor, Tensor]:
    """Document tokens ``[Nd, Ld, d]`` or ``[Nq, K, Ld, d]`` as int8, and the scale of each."""
    *owner, K, Ld, d = D.shape
    tokens = D if owner else D.unsqueeze(0)
    data = torch.empty(tokens.shape, dtype=torch.int8, device=D.device)
    scale = torch.empty(tokens.shape[:-1], dtype=torch.float32, device=D.device)
    for piece in pieces_of((tokens.shape[0], K, Ld), max(1, _KEPT_BYTES // (4 * d))):
        part = tuple(piece)
        x = tokens[part].to(score_dtype(D.dtype)).flatten(0, -2)
        s = scales_of(*extremes(x, "int8"), "int8")
        data[part], scale[part] = (
            y.view(*data[part].shape[:3], *y.shape[1:]) for y in (encoded(x, s, None, "int8"), s)
        )
    return data.view(D.shape), scale.view(D.shape[:-1])
