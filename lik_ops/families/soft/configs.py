"""Tile configurations of the soft MaxSim kernels, based on `gpu.tuning.architectures`.

A sum of probabilities has other bits with another tile. Tiles therefore do not depend on the numbers of queries and
documents. An exception is the number of rows in an sm_90 tile, because no sum crosses rows.
"""

from __future__ import annotations

import functools

from ...csrc_triton.backward.arguments import Sm90SoftConfig
from ...gpu import triton_versions
from ...gpu.tuning.architectures import (
    INTERPRETER,
    KernelKey,
    LaunchConfig,
    cdiv,
    choose_precision,
    next_power_of_2,
)
from ...gpu.tuning.forward_configs import make_forward_config, select_tiles
from ...gpu.tuning.sm90_configs import Sm90Tile
from ...gpu.tuning.tables import HALF_DTYPES, Override, StepConfig, TableRow, apply_overrides, select_for

_MAX_TILE_ROWS = 128
# Documents of at least this many tokens are scored in splits of `_SPLIT_TOKENS`. A document of half the length would
# have two splits, whose second launch costs more than they save. Predicted, not measured on a GPU.
_MIN_SPLIT_DOCUMENT_TOKENS = 4096
_SPLIT_TOKENS = 1024  # a multiple of every tile
_MERGED_ELEMENTS = 1024  # soft maxima of a step of the merge
_MAX_MERGED_ROWS = 128
# A backward with large tiles may multiply at most 7 % more than with small tiles.
_MAX_PADDING_RATIO = 1.07


_FORWARD_OVERRIDES = (
    Override(
        when=lambda kind, x: (
            kind.arch.unit == "wgmma"
            and kind.half
            and kind.has_vector_loads
            and x.config.SINGLE_STEP
            and not kind.normalize
        ),
        change={"num_stages": 2},
    ),
)


def choose_split_tokens(Ld: int) -> int | None:
    """Return the number of tokens of a split, or None for documents that are scored whole.

    The order of a sum of exponentials depends on the splits, and a score must not depend on its batch. The choice
    therefore depends only on Ld.
    """
    return _SPLIT_TOKENS if Ld >= _MIN_SPLIT_DOCUMENT_TOKENS else None


def configure_soft_merge(Lq: int) -> tuple[int, int]:
    """Return the rows and the splits that `maxsim_soft_splits` merges at a time."""
    rows = min(next_power_of_2(max(Lq, 16)), _MAX_MERGED_ROWS)
    return rows, _MERGED_ELEMENTS // rows


@functools.lru_cache(maxsize=1024)
def configure_soft_forward(kind: KernelKey, Nq: int, Lq: int, *, tf32: bool) -> LaunchConfig:
    """Return the launch of a forward.

    The tile is one of the tiles of `maxsim_forward` that leave registers for the norms of tokens.
    """
    arch, tiles = kind.arch, select_tiles(kind._replace(normalize=True), 1)
    tiles = tuple(tile for tile in tiles if not tile.tokens_first and tile.rows <= _MAX_TILE_ROWS)
    largest_tile = tiles[-1]
    slot = min(next_power_of_2(max(Lq, 1)), largest_tile.rows)
    rows = slot if kind.candidates else min(Nq * slot, largest_tile.rows)
    tile = next(t for t in tiles if t.rows >= rows) if arch.unit == "wgmma" else largest_tile
    config = make_forward_config(kind, tile, slot, tf32=tf32)
    config = config._replace(LONG_QUERIES=Lq > slot or arch.unit == "mma", SHORT_DOCUMENTS=True, SOFT=True)
    registers = tile.registers or arch.registers
    launch = LaunchConfig(config, num_warps=tile.warps, num_stages=tile.stages, max_registers=registers)
    return apply_overrides(_FORWARD_OVERRIDES, kind, launch)


# Tiles of the sm_90 backward kernels, for the rows of the other side.
_SMALL_ROW_TILE = _TOKEN_TILE = Sm90Tile(tokens=64, stages=4, in_registers=True)
_LARGE_ROW_TILE = Sm90Tile(tokens=128, stages=3, in_registers=True)


def configure_soft_sm90_backward(d: int, Ld: int | None) -> Sm90SoftConfig:
    """Return the configuration of a Gluon kernel of the backward, which `lik_ops.gpu.supports` allows.

    Args:
        d: number of features.
        Ld: tokens of the documents that the kernel of query rows reads, or None for the kernel of document tokens.
    """
    tile, in_registers = _TOKEN_TILE, True
    if Ld is not None:
        small_tokens, large_tokens = (cdiv(Ld, t.tokens) * t.tokens for t in (_SMALL_ROW_TILE, _LARGE_ROW_TILE))
        tile = _SMALL_ROW_TILE if large_tokens > small_tokens * _MAX_PADDING_RATIO else _LARGE_ROW_TILE
        # With rows in registers ptxas spills, unlike the ptxas of Triton 3.6.
        in_registers = tile is _SMALL_ROW_TILE or triton_versions.get_triton_release() < (3, 9)
    return Sm90SoftConfig(
        BN=tile.tokens, BD=64 if d <= 64 else 128, STAGES=tile.stages, OPERAND_IN_REGISTERS=in_registers
    )


_BACKWARD_TABLE = (
    TableRow(
        units=("wgmma",),
        dtypes=HALF_DTYPES,
        d=128,
        normalize=False,
        wide=1,
        value=StepConfig(BM=64, BN=64, BD=128, warps=4, stages=3),
    ),
    TableRow(dtypes=HALF_DTYPES, wide=1, value=StepConfig(BM=64, BN=64, BD=128, warps=8, stages=2)),
    TableRow(dtypes=HALF_DTYPES, value=StepConfig(BM=64, BN=64, BD=32, warps=8, stages=1)),
    TableRow(units=("wgmma",), normalize=False, wide=1, value=StepConfig(BM=64, BN=32, BD=64, warps=8, stages=2)),
    TableRow(wide=1, value=StepConfig(BM=64, BN=32, BD=32, warps=8, stages=2)),
    TableRow(value=StepConfig(BM=64, BN=32, BD=32, warps=8, stages=1)),
)
_BACKWARD_OVERRIDES = (
    Override(
        when=lambda kind, x: kind.arch.name == "sm_120" and kind.half and kind.normalize and kind.d > 128,
        change={"num_stages": 1},
        reason="with 2 stages ptxas spills",
    ),
    Override(
        when=lambda kind, x: kind.arch == INTERPRETER,
        change={"BM": 32, "BN": 16},
        reason="the interpreter is fastest with small tiles",
    ),
)


@functools.lru_cache(maxsize=1024)
def configure_soft_backward(kind: KernelKey, *, tf32: bool, flat: bool) -> LaunchConfig:
    """Return the launch of both kernels of a backward.

    A program owns BM rows and reads BN rows of the other side in a step.
    """
    step, products = select_for(_BACKWARD_TABLE, kind), choose_precision(kind.dtype, kind.arch, tf32)
    launch_kind = kind._replace(wide=max(kind.wide, 1))
    launch = step.launch(launch_kind, kind.arch.registers, PRECISION=products, EVEN_ROW_STRIDE=flat)
    return apply_overrides(_BACKWARD_OVERRIDES, kind, launch)
