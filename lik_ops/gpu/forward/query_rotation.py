"""Query rows as documents of a format are multiplied by them: rotated for a rotated format, by one launch if few."""

from __future__ import annotations

import torch
from torch import Tensor

from ...csrc_triton.formats.rotation import maxsim_rotate_queries
from ...formats.rotation import make_rotation
from ...formats.table import OPERAND_FORMATS, EncodedTokens
from ..runtime import launcher
from ..runtime.arguments import make_query_args, use_device
from ..runtime.capture import Calls
from ..tuning.architectures import cdiv

# Beyond these sizes a product on fp64 tensor cores, and its two conversions, take less time. Measured on an H200,
# 2026-11-29, with programs of 4 rows: 8 us less for 128 rows, 5 us more for 512 rows.
_MAX_ROWS, _MAX_FEATURES = 256, 512
# Rows and output features of a program of one warp, and input features of a step. Many small programs, each with one
# step, take 5.7 us for 32 rows and 11.1 for 256. Four warps with steps of 32 features take 9.2 and 13.8.
_ROWS, _COLUMNS, _STEP = 1, 8, 128
_captured_calls = Calls()


def transform_queries(stored: EncodedTokens, Q: Tensor) -> Tensor:
    """Return the result of `EncodedTokens.transform_queries`.

    Args:
        stored: encoded documents.
        Q: query tokens ``[..., Lq, d]`` with at most one axis before the tokens.
    """
    d, rows = Q.shape[-1], Q.shape[:-1].numel()
    if not OPERAND_FORMATS[stored.format].rotated or not 0 < rows <= _MAX_ROWS or d > _MAX_FEATURES:
        return stored.transform_queries(Q)
    tensors = Q, make_rotation(d, Q.device)
    key = Q.shape, Q.stride(), Q.dtype, Q.get_device()
    return _captured_calls.run(key, tensors, Q.device, _launch_rotation, *tensors)[0]


def _launch_rotation(Q: Tensor, matrix: Tensor) -> tuple[Tensor]:
    """Return the rotated rows."""
    out, d, rows = torch.empty(Q.shape, dtype=Q.dtype, device=Q.device), Q.shape[-1], Q.shape[:-1].numel()
    queries = make_query_args(Q if Q.dim() == 3 else Q.unsqueeze(0), None, None)
    with use_device(Q.device):
        args = queries, matrix, out, rows, Q.shape[-2], d, _ROWS, _COLUMNS, _STEP
        launcher.launch(maxsim_rotate_queries, (cdiv(rows, _ROWS), cdiv(d, _COLUMNS)), args, {"num_warps": 1})
    return (out,)
