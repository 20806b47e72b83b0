"""The plan of a forward call in fp32 that splits tokens once, into a workspace, not in each program that meets them.

The workspace, of constant size, stays in the L2 cache: documents take it in chunks. Bits are those of `ForwardPlan`.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..arguments import lifted
from ..csrc_triton import forward as forward_kernels
from ..csrc_triton import fp32 as fp32_kernels
from ..csrc_triton.arguments import Config, Terms
from . import configs, launcher
from .arguments import allow_tf32, architecture, checked_grid, documents_of, on_device, queries_of, sizes, wide_of
from .configs import Launch
from .forward import Plan

_log = logging.getLogger("lik_ops")
_LEAST = 1024  # query rows and document tokens; with 512 rows, splitting first takes longer
_BYTES = 15 * 2**20  # of terms, of queries and of documents; with their scales below 32 MiB
_ROWS = 32  # of a program of `split_tokens`


def _room(config: Config) -> int:
    """Rows of which a workspace holds both terms, at most."""
    return _BYTES // (4 * config.BD) // 16 * 16


class SplitPlan(Plan):
    """Queries are split, then as many documents at a time as the workspace holds, and scored."""

    def __init__(
        self, launch: Launch, Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None, arch: configs.Architecture
    ) -> None:
        super().__init__(Q, D, argmax_dtype)
        self.launch, self.config = launch, launch.config
        self.options = launch.options(arch)
        Nq, K, _, Ld = self.sizes
        chunk = _room(self.config) // Ld
        self.chunk = chunk if chunk < 16 else chunk // 16 * 16  # then every chunk of scores, winners, mask is aligned
        checked_grid(launch.programs(Nq, min(self.chunk, K)))
        _log.debug("maxsim_forward on split tokens for %s: %s", self.sizes, launch)

    def scores(
        self,
        shape: tuple[int, ...],
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        d_mask: Tensor | None,
        q_weight: Tensor | None,
        argmax: Tensor | None,
    ) -> Tensor:
        """The scores as `shape`, which differs from [Nq, K] in axes of size 1 only; winners go to `argmax`."""
        Q, D, q_mask, d_mask, q_weight = lifted(Q, D, q_mask, d_mask, q_weight)
        scores, found = self.new_scores(shape)
        Nq, K, Lq, Ld = self.sizes
        queries, query_scales = self._workspace(Nq * Lq)
        documents, document_scales = self._workspace(min(self.chunk, K) * Ld)
        C = self.config
        tiles = TensorDescriptor(documents, list(documents.shape), [C.BD, 1], [C.BN, C.BD])
        terms = Terms(queries, query_scales, document_scales, *(len(t) for t in (query_scales, document_scales)))
        with on_device(self.device):
            self._split(Q, queries, query_scales)
            for k in range(0, self.sizes.K, self.chunk):
                part = slice(k, k + self.chunk)
                chunk, kept = D[part], None if d_mask is None else d_mask[part]
                self._split(chunk, documents, document_scales)
                groups = queries_of(Q, q_mask, q_weight), documents_of(chunk, kept)
                winners = None if argmax is None else argmax[part]
                args = (*groups, tiles, found[0, k:], winners, terms, *self.sizes, self.d, C)
                grid = (self.launch.programs(self.sizes.Nq, chunk.shape[0]),)
                launcher.launch(forward_kernels.maxsim_forward, grid, args, self.options)
        return scores

    def tile(self) -> str:
        return f"{super().tile()}, tokens split first"

    def _workspace(self, rows: int) -> tuple[Tensor, Tensor]:
        """Rows hi above rows lo, and scales."""
        return (
            torch.empty((2 * rows, self.config.BD), dtype=torch.float16, device=self.device),
            torch.empty(rows, dtype=torch.float32, device=self.device),
        )

    def _split(self, X: Tensor, terms: Tensor, scales: Tensor) -> None:
        rows, L = X.shape[0] * X.shape[1], X.shape[1]
        args = (documents_of(X, None), terms, scales, rows, L, len(scales), self.d, self.config._replace(BM=_ROWS))
        launcher.launch(fp32_kernels.split_tokens, (configs.cdiv(rows, _ROWS),), args, {"num_warps": 4})


def split_plan(
    Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None, arch: configs.Architecture | None = None
) -> SplitPlan | None:
    """The plan of a call without `normalize` whose tokens are better split first, None of another.

    Where documents meet few queries, reading them is what takes time.
    """
    arch = arch or architecture(Q.device)
    if D.dim() != 3 or arch.unit not in configs.SPLITTING or Q.dtype != torch.float32 or wide_of(Q, D):
        return None
    Nq, K, Lq, Ld = sizes(Q, D)
    d, tf32 = Q.shape[-1], allow_tf32()
    launch = configs.forward(arch, Q.dtype, Nq, Lq, d, candidates=False, normalize=False, wide=0, tf32=tf32)
    launch = configs.forward_split(launch, Lq)
    room = _room(launch.config)
    fits = Nq * Lq <= room and launch.config.BN <= Ld <= room
    if not (launch.config.SPLIT and fits and min(Nq * Lq, K * Ld) >= _LEAST):
        return None
    return SplitPlan(launch, Q, D, argmax_dtype, arch)
