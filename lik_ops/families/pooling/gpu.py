"""Ward's method with Triton kernels for the two passes of each round over the matrices of distances."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...csrc_triton.common.arguments import WardMergeArgs
from ...csrc_triton.pooling.ward import ward_merge, ward_nearest
from ...gpu.runtime import launcher
from ...gpu.runtime.arguments import architecture, check_grid, use_device
from ...gpu.tuning.architectures import INTERPRETER, Architecture, cdiv
from .clusters import ClusterBatch, MergeTerms, WardClustering


class WardTile(NamedTuple):
    """Rows and columns of a tile, and launch options."""

    BM: int
    BN: int
    options: dict[str, int]


def configure_ward(arch: Architecture) -> WardTile:
    """Return the tile of both kernels. Not tuned on a GPU."""
    options = {"num_warps": 4, "num_stages": 1}
    return WardTile(32, 64, options) if arch == INTERPRETER else WardTile(4, 128, options)


class KernelWardClustering(WardClustering):
    """Ward's method with kernels that read the matrix of distances once for each of their passes.

    Padding is not read, so it needs no values.
    """

    buffers = 2

    def find_clusters(self, lengths: Tensor, counts: Tensor) -> Tensor:
        """Return the result of `WardClustering.find_clusters`, with the tensors' device as the current device."""
        with use_device(lengths.device):
            return super().find_clusters(lengths, counts)

    def _pad(self, squared: Tensor, counts: Tensor) -> None:
        pass

    def _find_nearest(self, clusters: ClusterBatch) -> tuple[Tensor, Tensor]:
        B, m = clusters.first.shape
        tile = configure_ward(architecture(clusters.first.device))
        costs, nearest = torch.empty_like(clusters.sizes), torch.empty_like(clusters.first)
        args = self._buffers[0], clusters.sizes, clusters.counts, costs, nearest, m, tile.BM, tile.BN
        launcher.launch(ward_nearest, check_grid(B * cdiv(m, tile.BM)), args, tile.options)
        return costs, nearest

    def _combine(self, terms: MergeTerms, m: int) -> None:
        B, left = terms.one.shape
        tile = configure_ward(architecture(terms.one.device))
        merge = WardMergeArgs._make(x.contiguous() for x in terms)
        args = self._buffers[0], merge, self._buffers[1], m, left, tile.BM, tile.BN
        launcher.launch(ward_merge, check_grid(B * cdiv(left, tile.BM) * cdiv(left, tile.BN)), args, tile.options)
        self._buffers.reverse()
