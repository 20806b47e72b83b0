"""Which tiles the kernels of soft MaxSim take: see `configs`.

A sum of probabilities has other bits in another tile, so tiles do not depend on how many queries or documents there
are, but for rows of sm_90 beside each other: none of its sums crosses them.
"""

from __future__ import annotations

import functools

import torch

from ..csrc_triton.arguments import Config
from .backward_configs import Kind
from .configs import INTERPRETER, Architecture, Launch, loads_vectors, next_power_of_2, precision
from .forward_table import FORWARD

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
    reads = wide if loads_vectors(d, wide) else 2
    rule = next(r for r in FORWARD if r.unit == arch.unit and r.normalize and r.covers(dtype, 1, d, True, reads))
    tiles = [tile for tile in rule.tiles if not tile.tokens_first and tile.rows <= _MOST_ROWS]
    most = tiles[-1]
    slot = min(next_power_of_2(max(Lq, 1)), most.rows)
    rows = slot if candidates else min(Nq * slot, most.rows)
    tile = next(t for t in tiles if t.rows >= rows) if arch.unit == "wgmma" else most
    BD = min(max(next_power_of_2(d), 16), tile.features)
    warps, stages = tile.warps, tile.stages
    if arch.unit == "wgmma" and dtype != torch.float32 and d <= BD and not normalize and reads < 2:
        warps, stages = 4, 2
    config = Config(
        BM=tile.rows,
        BN=tile.tokens,
        BD=BD,
        SLOT=slot,
        LANES=4 if arch.unit in ("wgmma", "interpreter") else 1,
        CANDIDATES=candidates,
        ONE_CHUNK=d <= BD,
        NORMALIZE=normalize,
        WIDE=wide,
        PRECISION=precision(dtype, arch, tf32),
        LONG=Lq > slot or arch.unit == "mma",
        PACKED=True,
        SOFT=True,
    )
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
