"""Nearest points by Triton kernels: distances once, for both clouds; then each point's part again."""

from __future__ import annotations

import torch
from torch import Tensor

from ..csrc_triton.arguments import Distances, Points
from ..csrc_triton.chamfer import chamfer_nearest, chamfer_winners
from ..portable.chamfer import LEAST_PRODUCTS, Nearest
from . import launcher
from .arguments import architecture, checked_grid, features_span, on_device, wide_rows
from .configs import INTERPRETER, Architecture, Launch, cdiv, next_power_of_2, precision

_NOBODY = (0x7F800000 << 32) | 0xFFFFFFFF  # above every key: an infinite distance, to point -1
_INT32_MAX = 2**31 - 1
_FEW = 4  # coordinates that are held in registers


def nearest_launch(arch: Architecture, dtype: torch.dtype, d: int, metric: str, wide: int) -> tuple[Launch, int]:
    """The tile of `chamfer_nearest`, and how many points of R a part has."""
    products = metric == "sqeuclidean" and d >= LEAST_PRODUCTS
    BM, BN, BD, part, warps, stages = 32, 128, d if d <= _FEW else 8, 1024, 4, 1
    if products:
        BM, BN, BD, part, warps, stages = 64, 128, min(next_power_of_2(d), 32), 256, 8, 2
    if arch == INTERPRETER:
        BM, BN, part = 16, 16, 48
    config = Distances(BM, BN, BD, metric, products, precision(dtype, arch, False), wide)
    return Launch(config, warps, stages, arch.registers), part  # type: ignore[arg-type]


def winners_launch(arch: Architecture, d: int, metric: str, wide: int) -> Launch:
    """The tile of `chamfer_winners`."""
    BM, BN, BD = (1, 256, d) if d <= _FEW else (1, 16, min(next_power_of_2(d), 128))
    if arch == INTERPRETER:
        BM, BN = 64, 16
    return Launch(Distances(BM, BN, BD, metric, WIDE=wide), 1, 1, arch.registers)  # type: ignore[arg-type]


def _points(X: Tensor, lengths: Tensor | None) -> Points:
    return Points._make((X, *X.stride(), X.shape[1], lengths))


def forward_chamfer(P: Tensor, R: Tensor, p_lengths: Tensor | None, r_lengths: Tensor | None, metric: str) -> Nearest:
    """As `lik::chamfer_fwd` has them."""
    for name, X in (("P", P), ("R", R)):
        if X.shape[1] > _INT32_MAX - 1024:
            raise ValueError(f"chamfer_fwd: {name}: expected at most {_INT32_MAX - 1024} points, got {X.shape[1]}")
    (B, N, d), M = P.shape, R.shape[1]
    arch = architecture(P.device)
    wide = wide_rows(features_span(P, R))
    launch, part = nearest_launch(arch, P.dtype, d, metric, wide)
    lengths = [None if x is None else x.contiguous() for x in (p_lengths, r_lengths)]
    p, r = _points(P, lengths[0]), _points(R, lengths[1])
    keys = [torch.full((B, n), _NOBODY, dtype=torch.int64, device=P.device) for n in (N, M)]
    tiles, parts = cdiv(N, launch.config.BM), cdiv(M, part)
    found = []
    with on_device(P.device):
        if B * N * M:
            args = p, r, *keys, part, d, launch.config
            launcher.launch(chamfer_nearest, checked_grid(B * tiles * parts), args, launch.options(arch))
        again = winners_launch(arch, d, metric, wide)
        for x, y, key, size in ((p, r, keys[0], part), (r, p, keys[1], launch.config.BM)):
            distances = torch.empty(key.shape, dtype=torch.float32, device=P.device)
            nearest = torch.empty(key.shape, dtype=torch.int32, device=P.device)
            if key.numel():
                args = x, y, key, distances, nearest, key.numel(), size, d, again.config
                grid = checked_grid(cdiv(key.numel(), again.config.BM))
                launcher.launch(chamfer_winners, grid, args, again.options(arch))
            found += [distances, nearest]
    return tuple(found)  # type: ignore[return-value]
