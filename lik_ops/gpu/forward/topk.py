"""Top-k selection by the Triton backend.

Each pass keeps the best scores of each block, until a single block is left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...csrc_triton.common.arguments import TopKInputArgs, TopKOutputArgs
from ...csrc_triton.search import topk as topk_kernels
from ...portable.forward import topk as portable_topk
from ..runtime import launcher
from ..runtime.arguments import use_device
from ..tuning.architectures import cdiv

BLOCK_SCORES, SMALL_BLOCK_SCORES = 8192, 1024
_WARPS = {BLOCK_SCORES: 16, SMALL_BLOCK_SCORES: 4}
_MAX_TOP_K = 256  # scores kept for each row
_MAX_COLUMNS = 2**30  # the kernel counts columns in 32 bits


def _supports_kernel(rows: int, n: int, k: int) -> bool:
    """Return whether the kernel supports a selection.

    The barriers of AMD GPUs do not guarantee that other threads see stored values.
    """
    return torch.version.hip is None and rows > 0 and n <= _MAX_COLUMNS and 0 < k <= _MAX_TOP_K


def best(scores: Tensor, top_k: int, indices: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the same bits as `portable_topk.best`, with additional memory of a few percent of the scores.

    Args:
        scores: scores `[rows, n]`.
        top_k: number of scores to keep for each row.
        indices: int64 indices `[rows, n]`, or None for the column numbers.
    """
    rows, n = scores.shape
    k = min(top_k, n)
    if scores.dtype != torch.float32 or not _supports_kernel(rows, n, k):
        return portable_topk.best(scores, top_k, indices)
    if scores.stride(1) != 1 or (indices is not None and indices.stride() != scores.stride()):
        scores, indices = scores.contiguous(), None if indices is None else indices.contiguous()
    with use_device(scores.device):
        while n > BLOCK_SCORES:
            blocks = cdiv(n, BLOCK_SCORES)
            kept_columns = (blocks - 1) * k + min(k, n - (blocks - 1) * BLOCK_SCORES)
            scores, indices = _launch(
                TopKInputArgs(scores, indices, scores.stride(0)), (rows, n, k), blocks, kept_columns
            )
            n = kept_columns
        return _launch(TopKInputArgs(scores, indices, scores.stride(0)), (rows, n, k), 1, k)


def best_of_parts(received: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the result of `portable_topk.best_of_parts` in one launch, which reads the message without a copy."""
    parts, _, rows, width = received.shape
    n = parts * width
    k = min(top_k, n)
    if n > BLOCK_SCORES or not _supports_kernel(rows, n, k):
        return portable_topk.best_of_parts(received, top_k)
    received = received.contiguous()
    X = TopKInputArgs(received[:, 0], received[:, 1], width, received.stride(0), width)
    with use_device(received.device):
        return _launch(X, (rows, n, k), 1, k)


def _launch(X: TopKInputArgs, sizes: tuple[int, int, int], blocks: int, kept_columns: int) -> tuple[Tensor, Tensor]:
    """Return the `kept_columns` scores of each row that are among the k best of one of `blocks` blocks.

    The result is in order if there is one block. `sizes` has rows, n, and k.
    """
    rows, n, k = sizes
    device = X.scores.device
    scores = torch.empty((rows, kept_columns), dtype=torch.float32, device=device)
    out = TopKOutputArgs(scores, torch.empty((rows, kept_columns), dtype=torch.int64, device=device), kept_columns)
    block = BLOCK_SCORES if n > SMALL_BLOCK_SCORES else SMALL_BLOCK_SCORES
    args = (X, out, n, k, X.width is not None, blocks == 1, block, 128 if k <= 128 else _MAX_TOP_K)
    launcher.launch(topk_kernels.maxsim_best, (rows * blocks,), args, {"num_warps": _WARPS[block]})
    return out.scores, out.indices
