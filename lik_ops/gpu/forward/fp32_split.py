"""Launch that splits fp32 tokens into fp16 terms, for kernels that read the terms of documents."""

from __future__ import annotations

from torch import Tensor

from ...csrc_triton.common import fp32 as fp32_kernels
from ...csrc_triton.common.arguments import KernelConfig
from ..runtime import launcher
from ..runtime.arguments import make_document_args
from ..tuning import architectures

_SPLIT_BLOCK_ROWS = 32  # rows of a program of `split_tokens`


def split_tokens(
    X: Tensor, mask: Tensor | None, terms: Tensor, scales: Tensor, d: int, C: KernelConfig, tile: int
) -> None:
    """Launch the split of fp32 documents `[K, L, d]` into C.FP32_TERMS terms, rows of as many features as `terms` has.

    The scales are stored tile by tile.
    """
    rows, L = X.shape[0] * X.shape[1], X.shape[1]
    config = C._replace(BM=_SPLIT_BLOCK_ROWS, BD=terms.shape[1])
    args = (make_document_args(X, mask), terms, scales, rows, L, len(terms) // C.FP32_TERMS, d, tile, config)
    grid = (architectures.cdiv(rows, _SPLIT_BLOCK_ROWS),)
    launcher.launch(fp32_kernels.split_tokens, grid, args, {"num_warps": 4})
