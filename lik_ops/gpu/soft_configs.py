"""Which tiles the kernels of soft MaxSim take: see `configs`.

A sum of probabilities has other bits in another tile, so tiles do not depend on how many queries or documents there
are, but for rows of sm_90 beside each other: none of its sums crosses them.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from .backward_configs import Kind
from .configs import INTERPRETER, Architecture, Launch, loads_vectors, next_power_of_2, precision
from .forward_configs import config_of, forward_tiles

_MOST_ROWS = 128


@functools.lru_cache(maxsize=1024)
def forward(
    arch: Architecture,
    dtype: torch.dtype,
    Nq: int,
    Lq: int,
    d: int,
    *,
    candidates: bool,
    normalize: bool,
    wide: int,
    tf32: bool,
) -> Launch:
    """The tile of a forward: one of those of `maxsim_forward` that leave registers for the norms of tokens."""
    # None that were measured: those are of another kernel.
    tiles = forward_tiles(replace(arch, measured=()), dtype, 1, d, True, wide)
    tiles = tuple(tile for tile in tiles if not tile.tokens_first and tile.rows <= _MOST_ROWS)
    most = tiles[-1]
    slot = min(next_power_of_2(max(Lq, 1)), most.rows)
    rows = slot if candidates else min(Nq * slot, most.rows)
    tile = next(t for t in tiles if t.rows >= rows) if arch.unit == "wgmma" else most
    config = config_of(
        arch, dtype, tile, slot, d, candidates=candidates, normalize=normalize, wide=wide, tf32=tf32
    )._replace(LONG=Lq > slot or arch.unit == "mma", PACKED=True, SOFT=True)
    warps, stages, half = tile.warps, tile.stages, dtype != torch.float32
    if arch.unit == "wgmma" and half and config.ONE_CHUNK and not normalize and loads_vectors(d, wide):
        warps, stages = 4, 2
    return Launch(config, warps, stages, tile.registers or arch.registers)


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
    if kind.arch == INTERPRETER:
        BM, BN = 32, 16
    BD = min(max(next_power_of_2(kind.d), 16), features)
    products = precision(kind.dtype, kind.arch, tf32)
    config = kind._replace(wide=max(kind.wide, 1)).config(BM, BN, BD, PRECISION=products, FLAT=flat)
    return Launch(config, num_warps=warps, num_stages=stages, max_registers=kind.arch.registers)
