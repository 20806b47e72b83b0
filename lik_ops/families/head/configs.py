"""Tile configurations of the head kernels, based on `gpu.tuning.architectures`.

The tiles of both kernels depend on d, so that tokens have the same bits in both.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...csrc_triton.common.arguments import HeadConfig
from ...gpu.tuning.architectures import (
    Architecture,
    LaunchConfig,
    cdiv,
    next_power_of_2,
    supports_vector_loads,
)
from ...gpu.tuning.tables import HALF_DTYPES, TableRow, select_row

# Features of a program, which holds their sums in fp32. fp32 has two sums for each feature, and half the features.
MAX_FEATURES = 256
SPLIT_BLOCK = 1024  # weights of a program of `maxsim_split_weights`
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
ARGMAX_TOKENS_BLOCK = 16, 128  # rows of a program that copies hidden states, and features of a step


@dataclass(frozen=True)
class HeadLaunchConfig(LaunchConfig):
    """A head configuration with its number of warps and pipeline stages."""

    config: HeadConfig  # type: ignore[assignment]

    def tile(self) -> str:
        """Describe the tile of a program as text."""
        c = self.config
        return f"{c.BN} tokens x {c.BD} features, {c.BK} of a step, {self.num_warps} warps, {self.num_stages} stages"


class HeadStep(NamedTuple):
    """BN document tokens and BK features of hidden states of a step, with the launch of the kernel."""

    BN: int
    BK: int
    warps: int
    stages: int


# Each tile reads all weights from the L2 cache. Tiles are therefore as large as registers allow, and have as many
# stages as fit shared memory. Hidden states with wide = 2 are loaded feature by feature. Their wgmma tiles have one
# warp group for 64 rows, or two if sums need the registers.
_TOKENS_TABLE = (
    TableRow(units=("interpreter",), value=HeadStep(BN=32, BK=32, warps=8, stages=3)),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, d=64, wide=1, value=HeadStep(BN=256, BK=64, warps=8, stages=5)),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, d=128, wide=1, value=HeadStep(BN=256, BK=64, warps=8, stages=4)),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, wide=1, value=HeadStep(BN=128, BK=64, warps=8, stages=4)),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, d=128, value=HeadStep(BN=64, BK=32, warps=4, stages=2)),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, value=HeadStep(BN=128, BK=16, warps=8, stages=2)),
    TableRow(units=("wgmma",), wide=1, value=HeadStep(BN=64, BK=32, warps=4, stages=3)),
    TableRow(units=("mfma",), dtypes=HALF_DTYPES, wide=1, value=HeadStep(BN=64, BK=32, warps=8, stages=1)),
    TableRow(dtypes=HALF_DTYPES, d=128, wide=1, value=HeadStep(BN=128, BK=32, warps=8, stages=3)),
    TableRow(dtypes=HALF_DTYPES, wide=1, value=HeadStep(BN=64, BK=32, warps=8, stages=3)),
    TableRow(dtypes=HALF_DTYPES, d=128, value=HeadStep(BN=64, BK=32, warps=8, stages=2)),
    TableRow(value=HeadStep(BN=64, BK=16, warps=8, stages=2)),
)


def _count_terms(dtype: torch.dtype, arch: Architecture, tf32: bool) -> int:
    """Return `HeadConfig.TF32_TERMS`."""
    return 0 if dtype != torch.float32 or arch.is_amd else 1 if tf32 else 2


@functools.lru_cache(maxsize=1024)
def configure_tokens(
    arch: Architecture, dtype: torch.dtype, d: int, width: int, normalize: bool, wide: int, tf32: bool
) -> HeadLaunchConfig:
    """Return the launch of the token kernel for `d` features, of which a program computes at most BD."""
    half = MAX_FEATURES // 2
    has_odd_halves = d > MAX_FEATURES and cdiv(d, half) % 2 == 1  # else a half of the last part would not exist
    BD = min(max(next_power_of_2(d), 16), half if dtype == torch.float32 or has_odd_halves else MAX_FEATURES)
    loads = 1 if supports_vector_loads(width, wide) else 2
    step = select_row(_TOKENS_TABLE, arch, dtype, 1, BD, normalize, loads)
    config = HeadConfig(
        BN=step.BN,
        BD=BD,
        BK=step.BK,
        BM=16,
        ROW_TILES=1,
        ROWS_PER_QUERY=1,
        NORMALIZE=normalize,
        WIDE_OFFSETS=wide,
        TF32_TERMS=_count_terms(dtype, arch, tf32),
        FUSED_LOOP=arch.has_sm90_path,
        D_DIVISOR=math.gcd(d, BD),
        WAIT_EACH_STEP=arch.unit == "wgmma",
    )
    return HeadLaunchConfig(config, num_warps=step.warps, num_stages=step.stages, max_registers=arch.registers)


def adjust_for_few_tokens(launch: HeadLaunchConfig, arch: Architecture, rows: int, d: int) -> HeadLaunchConfig:
    """Return the launch of the token kernel with smaller tiles if large ones would leave SMs idle.

    Each thread has the same features of a token with four warps for 64 rows, so the norms have the same bits. ptxas
    spills with 256 features.
    """
    C, rows_of_warp = launch.config, 16
    has_idle_sms = cdiv(rows, C.BN) * cdiv(d, C.BD) < arch.processors
    if arch.unit == "wgmma" and launch.num_warps * rows_of_warp <= C.BN and C.BD <= 128 and has_idle_sms:
        return launch.change(BN=4 * rows_of_warp, num_warps=4)
    return launch


@functools.lru_cache(maxsize=1024)
def configure_scores(
    arch: Architecture, dtype: torch.dtype, Nq: int, Lq: int, d: int, width: int, normalize: bool, wide: int
) -> HeadLaunchConfig:
    """Return the launch that scores few query rows: the tile of tokens with space for the rows."""
    launch = configure_tokens(arch, dtype, d, width, normalize, wide, False)
    slot = next_power_of_2(max(Lq, 1))
    rows = max(next_power_of_2(Nq * slot), 16)
    BM = min(rows, _ROW_TILE_ROWS)
    return launch.change(BM=BM, ROW_TILES=rows // BM, ROWS_PER_QUERY=slot, walkers=count_programs(arch))


def configure_slopes(arch: Architecture, d: int, rows: int) -> tuple[int, int, int, dict[str, int]]:
    """Return the rows and features of a tile, the number of programs, and Triton's launch options."""
    BD = max(next_power_of_2(d), 16)
    BN = max(_SLOPE_TILE_ELEMENTS // BD, 1)
    options = {"num_warps": 4} | ({"maxnreg": arch.registers} if arch.registers else {})
    return BN, BD, min(cdiv(rows, BN), 8 * arch.processors), options


def configure_scaling(d: int) -> tuple[int, int, dict[str, int]]:
    """Return the tokens of a program of `maxsim_scale_tokens`, the features of a step, and Triton's launch options."""
    BD = min(next_power_of_2(d), MAX_FEATURES)
    return max(_SLOPE_TILE_ELEMENTS // BD, 1), BD, {"num_warps": 4}


def count_programs(arch: Architecture) -> int:
    """Return the number of programs that a device runs at a time, which share the documents."""
    return arch.processors * (1 if arch.has_sm90_path else 2)


def is_fused(arch: Architecture, dtype: torch.dtype, Nq: int, Nd: int, Lq: int, Ld: int, d: int) -> bool:
    """Return whether the head kernel scores tokens without storing them.

    This needs half-precision tokens and a tile for all query rows. The scores have the same bits as in separate
    launches, so the choice may depend on the sizes of a batch.
    """
    slot = next_power_of_2(max(Lq, 1))
    has_few_rows = slot <= _ROW_TILE_ROWS and Nq * slot <= MAX_QUERY_ROWS and d <= MAX_FEATURES
    has_many_documents = Nd >= _MIN_DOCUMENTS_PER_PROGRAM * count_programs(arch)
    rows_fit = 0 < Nd * Ld < 2**31 - 2 * MAX_FEATURES
    return (
        arch.name in _FUSED_ARCHITECTURES
        and dtype != torch.float32
        and has_few_rows
        and has_many_documents
        and rows_fit
        and Ld >= MIN_DOCUMENT_TOKENS
    )
