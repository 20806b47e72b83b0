"""Tile configurations of the head kernels, based on `gpu.tuning.architectures`.

The tiles of both kernels depend on d, so that tokens have the same bits in both.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from ...csrc_triton.common.arguments import HeadConfig
from ...gpu.tuning.architectures import (
    Architecture,
    LaunchConfig,
    cdiv,
    choose_precision,
    next_power_of_2,
    supports_vector_loads,
)

MAX_FEATURES = 256  # a program holds all features of a token in fp32
# Query rows that a tile of tokens is scored against, part by part. With 128 rows, storing the tokens first is faster.
MAX_QUERY_ROWS = 96
# Query rows of a part. More rows would leave no registers for the similarities.
_ROW_TILE_ROWS = 32
# With fewer documents for each program, most programs would wait for the programs with one document more.
_MIN_DOCUMENTS_PER_PROGRAM = 2
# Triton 3.9 cannot allocate the accumulators of sm_100. Other versions were not tried.
_FUSED_ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "interpreter")
# Elements of a tile of gradients, 16 for each thread. With 32, loads that are not vectorized spill.
_SLOPE_TILE_ELEMENTS = 2048
MAX_TILE_ROWS = 256  # maximum of all tiles
MIN_DOCUMENT_TOKENS = 64  # each document of a tile costs a separate reduction


@dataclass(frozen=True)
class HeadLaunchConfig(LaunchConfig):
    """A head configuration with its number of warps and pipeline stages."""

    config: HeadConfig  # type: ignore[assignment]

    def tile(self) -> str:
        """Describe the tile of a program as text."""
        c = self.config
        return f"{c.BN} tokens x {c.BD} features, {c.BK} of a step, {self.num_warps} warps, {self.num_stages} stages"


@functools.lru_cache(maxsize=1024)
def configure_tokens(
    arch: Architecture, dtype: torch.dtype, d: int, width: int, normalize: bool, wide: int, tf32: bool
):
    """Return the launch of the token kernel.

    Each tile reads all weights from the L2 cache. Tiles are therefore as large as registers allow.
    """
    half, vectors = dtype != torch.float32, supports_vector_loads(width, wide)
    BD = max(next_power_of_2(d), 16)
    BN, BK, warps, stages = 128, 64, 8, 3
    if arch.unit == "interpreter":
        BN, BK = 32, 32
    elif not half:
        BN, BK, stages = 64, 32, 2
        if BD > 128:
            BK = 16
    elif arch.unit == "wgmma":
        BN, stages = (256 if BD <= 128 else 128), (5 if BD <= 64 else 4)  # stages that fit shared memory
    elif arch.unit == "mfma":
        BN, BK, stages = 64, 32, 1
    else:
        BN, BK = (128 if BD <= 128 else 64), 32
    if not vectors and arch.unit != "interpreter":
        BN, BK, stages = 64, 32 if half and BD <= 128 else 16, 2
        if half and arch.unit == "wgmma":  # one warp group for 64 rows, or two if sums need the registers
            BN, warps = (64, 4) if BD <= 128 else (128, 8)
    products = choose_precision(dtype, arch, tf32)
    config = HeadConfig(
        BN,
        BD,
        BK,
        16,
        1,
        1,
        normalize,
        wide,
        products,
        FUSED_LOOP=arch.unit in ("wgmma", "interpreter"),
        EVEN_D=d == BD,
        WAIT_EACH_STEP=arch.unit == "wgmma",
    )
    return HeadLaunchConfig(config, warps, stages, arch.registers)


@functools.lru_cache(maxsize=1024)
def configure_scores(
    arch: Architecture, dtype: torch.dtype, Nq: int, Lq: int, d: int, width: int, normalize: bool, wide: int
) -> HeadLaunchConfig:
    """Return the launch that scores few query rows: the tile of tokens with space for the rows."""
    found = configure_tokens(arch, dtype, d, width, normalize, wide, False)
    slot = next_power_of_2(max(Lq, 1))
    rows = max(next_power_of_2(Nq * slot), 16)
    BM = min(rows, _ROW_TILE_ROWS)
    config = found.config._replace(BM=BM, ROW_TILES=rows // BM, ROWS_PER_QUERY=slot)
    return replace(found, config=config, walkers=count_programs(arch))


def configure_slopes(arch: Architecture, d: int, rows: int) -> tuple[int, int, int, dict[str, int]]:
    """Return the rows and features of a tile, the number of programs, and Triton's launch options."""
    BD = max(next_power_of_2(d), 16)
    BN = max(_SLOPE_TILE_ELEMENTS // BD, 1)
    options = {"num_warps": 4} | ({"maxnreg": arch.registers} if arch.registers else {})
    return BN, BD, min(cdiv(rows, BN), 8 * arch.processors), options


def count_programs(arch: Architecture) -> int:
    """Return the number of programs that a device runs at a time, which share the documents."""
    return arch.processors * (1 if arch.unit in ("wgmma", "interpreter") else 2)


def is_fused(arch: Architecture, dtype: torch.dtype, Nq: int, Nd: int, Lq: int, Ld: int, d: int) -> bool:
    """Return whether the head kernel scores tokens without storing them.

    This needs half-precision tokens and a tile for all query rows. The scores have the same bits as in separate
    launches, so the choice may depend on the sizes of a batch.
    """
    slot = next_power_of_2(max(Lq, 1))
    few = slot <= _ROW_TILE_ROWS and Nq * slot <= MAX_QUERY_ROWS and d <= MAX_FEATURES
    many = Nd >= _MIN_DOCUMENTS_PER_PROGRAM * count_programs(arch)
    rows_fit = 0 < Nd * Ld < 2**31 - 2 * MAX_FEATURES
    return (
        arch.name in _FUSED_ARCHITECTURES
        and dtype != torch.float32
        and few
        and many
        and rows_fit
        and Ld >= MIN_DOCUMENT_TOKENS
    )
