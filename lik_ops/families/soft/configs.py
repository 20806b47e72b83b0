"""Tile configurations of the soft MaxSim kernels, based on `gpu.tuning.architectures`.

A sum of probabilities has other bits with another tile. Tiles therefore do not depend on the numbers of queries and
documents. An exception is the number of rows in an sm_90 tile, because no sum crosses rows.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ...csrc_triton.backward.arguments import Sm90SoftConfig
from ...gpu import triton_versions
from ...gpu.tuning.architectures import (
    INTERPRETER,
    Architecture,
    KernelKey,
    LaunchConfig,
    cdiv,
    choose_precision,
    next_power_of_2,
)
from ...gpu.tuning.forward_configs import make_forward_config, select_tiles

_MAX_TILE_ROWS = 128
# A backward with large tiles may multiply at most 7 % more than with small tiles.
_MAX_PADDING_RATIO = 1.07


@functools.lru_cache(maxsize=1024)
def configure_soft_forward(kind: KernelKey, Nq: int, Lq: int, *, tf32: bool) -> LaunchConfig:
    """Return the launch of a forward.

    The tile is one of the tiles of `maxsim_forward` that leave registers for the norms of tokens.
    """
    arch, dtype, d, candidates, normalize, wide = kind
    # Measured rules are for another kernel.
    tiles = select_tiles(replace(arch, measured=()), dtype, 1, d, True, wide)
    tiles = tuple(tile for tile in tiles if not tile.tokens_first and tile.rows <= _MAX_TILE_ROWS)
    most = tiles[-1]
    slot = min(next_power_of_2(max(Lq, 1)), most.rows)
    rows = slot if candidates else min(Nq * slot, most.rows)
    tile = next(t for t in tiles if t.rows >= rows) if arch.unit == "wgmma" else most
    config = make_forward_config(kind, tile, slot, tf32=tf32)
    config = config._replace(LONG_QUERIES=Lq > slot or arch.unit == "mma", SHORT_DOCUMENTS=True, SOFT=True)
    warps, stages = tile.warps, tile.stages
    if arch.unit == "wgmma" and kind.half and config.SINGLE_STEP and not normalize and kind.has_vector_loads:
        warps, stages = 8 if tile.rows == _MAX_TILE_ROWS else 4, 2
    return LaunchConfig(config, warps, stages, tile.registers or arch.registers)


# For the Gluon backward kernels: (rows of the other side in a tile, stages, whether registers hold the owned rows).
SOFT_ROW_TILES, SOFT_TOKEN_TILE = ((64, 4, True), (128, 3, True)), (64, 4, True)


def configure_soft_sm90_backward(
    arch: Architecture, dtype: torch.dtype, d: int, Ld: int | None
) -> Sm90SoftConfig | None:
    """Choose a Gluon kernel of the backward, or return None if the generic kernel has to serve.

    Args:
        arch: architecture that runs the kernel.
        dtype: dtype of the tokens.
        d: number of features.
        Ld: tokens of the documents that the kernel of query rows reads, or None for the kernel of document tokens.
    """
    if arch.name != "sm_90" or dtype != torch.bfloat16 or d > 128:
        return None
    BD = 64 if d <= 64 else 128
    if Ld is None:
        return Sm90SoftConfig(SOFT_TOKEN_TILE[0], BD, *SOFT_TOKEN_TILE[1:])
    small, large = SOFT_ROW_TILES
    if triton_versions.get_triton_release() >= (3, 9):  # spills with rows in registers, unlike 3.6
        large = *large[:2], False
    wastes = cdiv(Ld, large[0]) * large[0] > cdiv(Ld, small[0]) * small[0] * _MAX_PADDING_RATIO
    chosen = small if wastes else large
    return Sm90SoftConfig(chosen[0], BD, *chosen[1:])


@functools.lru_cache(maxsize=1024)
def configure_soft_backward(kind: KernelKey, *, tf32: bool, flat: bool) -> LaunchConfig:
    """Return the launch of both kernels of a backward.

    A program owns BM rows and reads BN rows of the other side in a step.
    """
    wgmma = kind.arch.unit == "wgmma"
    BM, BN, features, warps, stages = 64, 64, 128, 8, 2
    if not kind.half:
        BN, features = 32, 64 if wgmma and not kind.normalize else 32
    elif wgmma and kind.d <= features and not kind.normalize:
        warps, stages = 4, 3
    if not kind.has_vector_loads:
        features, warps, stages = 32, 8, 1
    if kind.arch.name == "sm_120" and kind.half and kind.normalize and kind.d > features:
        stages = 1  # with 2 stages ptxas spills
    if kind.arch == INTERPRETER:
        BM, BN = 32, 16
    BD = min(max(next_power_of_2(kind.d), 16), features)
    products = choose_precision(kind.dtype, kind.arch, tf32)
    config = kind._replace(wide=max(kind.wide, 1)).config(BM, BN, BD, PRECISION=products, EVEN_ROW_STRIDE=flat)
    return LaunchConfig(config, num_warps=warps, num_stages=stages, max_registers=kind.arch.registers)
