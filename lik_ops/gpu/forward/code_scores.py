"""GPU version of `portable.code_scores`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...csrc_triton.common.arguments import SegmentArgs
from ...csrc_triton.formats.code_scores import maxsim_code_scores
from ..runtime import launcher
from ..runtime.arguments import check_grid, use_device
from ..tuning.architectures import next_power_of_2

_TILE_TOKENS = 32


def code_scores(
    table: Tensor, weight: Tensor, probed: Tensor | None, codes: Tensor, offsets: Tensor, lengths: Tensor
) -> Tensor:
    """Return the scores of `portable.code_scores`."""
    Nq, count, rows = table.shape
    room = next_power_of_2(max(rows, 1))
    table, weight = (pad(x, (0, room - rows)).contiguous() for x in (table, weight))
    scores = torch.empty((Nq, len(offsets)), dtype=torch.float32, device=table.device)
    if not scores.numel():
        return scores
    segments = SegmentArgs(None, offsets.contiguous(), lengths.contiguous(), None)
    flags = None if probed is None else probed.to(torch.int8).contiguous()
    sizes = Nq, len(offsets), len(codes), count, room
    args = table, weight, flags, codes.contiguous(), segments, scores, *sizes, _TILE_TOKENS
    with use_device(table.device):
        launcher.launch(maxsim_code_scores, check_grid(scores.numel()), args, {"num_warps": 4 if room > 16 else 1})
    return scores
