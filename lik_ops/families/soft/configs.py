"""Which tiles the kernels of soft MaxSim take: see `configs`.

A sum of probabilities has other bits in another tile, so tiles do not depend on how many queries or documents there
are, but for rows of sm_90 beside each other: none of its sums crosses them.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ...csrc_triton.backward.arguments import SoftSpecialization
from ...gpu import triton_versions
from ...gpu.tuning.architectures import INTERPRETER, Architecture, Kind, Launch, cdiv, next_power_of_2, precision
from ...gpu.tuning.forward_configs import config_of, forward_tiles

_MOST_ROWS = 128
_MOST_WASTE = 1.07  # what a backward with larger tiles may multiply beside what it does with smaller ones


@functools.lru_cache(maxsize=1024)
def forward(kind: Kind, Nq: int, Lq: int, *, tf32: bool) -> Launch:
    """The tile of a forward: one of those of `maxsim_forward` that leave registers for the norms of tokens."""
    arch, dtype, d, candidates, normalize, wide = kind
    # None that were measured: those are of another kernel.
    tiles = forward_tiles(replace(arch, measured=()), dtype, 1, d, True, wide)
    tiles = tuple(tile for tile in tiles if not tile.tokens_first and tile.rows <= _MOST_ROWS)
    most = tiles[-1]
    slot = min(next_power_of_2(max(Lq, 1)), most.rows)
    rows = slot if candidates else min(Nq * slot, most.rows)
    tile = next(t for t in tiles if t.rows >= rows) if arch.unit == "wgmma" else most
    config = config_of(kind, tile, slot, tf32=tf32)
    config = config._replace(LONG=Lq > slot or arch.unit == "mma", PACKED=True, SOFT=True)
    warps, stages = tile.warps, tile.stages
    if arch.unit == "wgmma" and kind.half and config.ONE_CHUNK and not normalize and kind.vectors:
        warps, stages = 8 if tile.rows == _MOST_ROWS else 4, 2
    return Launch(config, warps, stages, tile.registers or arch.registers)


# Of the Gluon kernels of a backward: others of a tile, stages, and whether registers keep what is owned.
SOFT_ROWS, SOFT_TOKENS = ((64, 4, True), (128, 3, True)), (64, 4, True)


def specialized_backward(arch: Architecture, dtype: torch.dtype, d: int, Ld: int | None) -> SoftSpecialization | None:
    """The choice of a Gluon kernel, or None where the plain one serves: of query rows that meet documents of `Ld`
    tokens, or, where that is None, of tokens that meet query rows."""
    if arch.name != "sm_90" or dtype != torch.bfloat16 or d > 128:
        return None
    BD = 64 if d <= 64 else 128
    if Ld is None:
        return SoftSpecialization(SOFT_TOKENS[0], BD, *SOFT_TOKENS[1:])
    small, large = SOFT_ROWS
    if triton_versions.release() >= (3, 9):  # spills beside rows in registers, 3.6 does not
        large = *large[:2], False
    wastes = cdiv(Ld, large[0]) * large[0] > cdiv(Ld, small[0]) * small[0] * _MOST_WASTE
    chosen = small if wastes else large
    return SoftSpecialization(chosen[0], BD, *chosen[1:])


@functools.lru_cache(maxsize=1024)
def backward(kind: Kind, *, tf32: bool, flat: bool) -> Launch:
    """The tile of both kernels of a backward: BM rows that a program owns, BN others a step."""
    wgmma = kind.arch.unit == "wgmma"
    BM, BN, features, warps, stages = 64, 64, 128, 8, 2
    if not kind.half:
        BN, features = 32, 64 if wgmma and not kind.normalize else 32
    elif wgmma and kind.d <= features and not kind.normalize:
        warps, stages = 4, 3
    if not kind.vectors:
        features, warps, stages = 32, 8, 1
    if kind.arch.name == "sm_120" and kind.half and kind.normalize and kind.d > features:
        stages = 1  # registers spill else
    if kind.arch == INTERPRETER:
        BM, BN = 32, 16
    BD = min(max(next_power_of_2(kind.d), 16), features)
    products = precision(kind.dtype, kind.arch, tf32)
    config = kind._replace(wide=max(kind.wide, 1)).config(BM, BN, BD, PRECISION=products, FLAT=flat)
    return Launch(config, num_warps=warps, num_stages=stages, max_registers=kind.arch.registers)
