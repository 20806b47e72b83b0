"""Which tile sizes the kernels of the backward take: see `configs`."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ...csrc_triton.backward.documents.packed_buckets import MAX_BLOCK_ROWS
from ...csrc_triton.common.arguments import KernelConfig
from .architectures import INTERPRETER, Architecture, KernelKey, LaunchConfig, cdiv, next_power_of_2

_cached = functools.lru_cache(maxsize=1024)  # the same few are asked for at every step, for microseconds each


@_cached
def configure_gather(kind: KernelKey, *, ragged: bool = False, scaled: bool = False) -> LaunchConfig:
    """Kernels that read whole rows: BM tokens of a query, and the winners of BN documents at a time.

    `scale_similarities`: rows are int8 with a scale, which takes registers.
    """
    d, half, normalize = kind.d, kind.half, kind.normalize
    BD = max(next_power_of_2(d), 16) if d <= 256 else 128
    # Every thread holds its share of the rows of a step: as many as registers allow, for the loads in flight.
    rows = 128 if half else 32 if normalize else 64
    if not kind.has_vector_loads:
        rows = 8 if normalize else 32
    short = kind.has_vector_loads and d <= 128
    if ragged and not (short and half and not normalize):
        rows //= 2  # where their winners lie takes registers too
    config = kind.config(8, max(rows * min(128, BD) // BD // 8, 1), BD, PRECISION="ieee")
    spills = not short or (ragged and kind.candidates and not half) or (scaled and normalize)
    return LaunchConfig(config, num_warps=4, num_stages=2, max_registers=255 if spills else 128)


@_cached
def configure_scatter(kind: KernelKey, *, ragged: bool = False) -> LaunchConfig:
    """`maxsim_scatter`, whose products are as large as a step's rows: fewer documents at a time."""
    launch = configure_gather(kind, ragged=ragged)
    config = launch.config
    launch = replace(launch, config=config._replace(BN=max(config.BN // 4, 1)))
    return replace(launch, max_registers=255) if ragged or kind.arch.name.startswith("sm_8") else launch


THREE_CTA_REGISTERS = 168  # registers of a thread with which so many of four warps share a multiprocessor
# Query rows of a document whose winners are listed: fewer are soon looked through, more take too much memory.
MIN_BUCKETED_ROWS, MAX_BUCKETED_ROWS = 1024, 2**20
MIN_LONG_DOCUMENT_TOKENS = (
    4096  # tokens of a document, from which on lists of many small tiles take longer than their sums
)


@_cached
def configure_documents(kind: KernelKey, *, flat: bool, pieces: bool, long: bool = False) -> LaunchConfig:
    """The one-hot product of BN tokens and the rows they won, BM rows a step; `pieces`: of a list that is cut.

    `long`: documents have LEAST_LONG tokens or more. fp32 then takes as large tiles as registers hold.
    """
    arch, d, half, vectors = kind.arch, kind.d, kind.half, kind.has_vector_loads
    BD = min(max(next_power_of_2(d), 16), 128)
    wgmma = arch.name in ("sm_90", INTERPRETER.name)
    wide_unit = wgmma or arch.name == "sm_100"  # takes 64 features of half types or more
    if not vectors:
        BD = min(BD, 64 if half and wide_unit else 32)
    BM, BN = (64 if wgmma else 32, 16) if half else (32, 16) if wgmma else (16, 64)
    if arch == INTERPRETER:
        BM, BN = 16, 16
    many = long and wgmma and not (half or kind.candidates or kind.normalize)
    if many:
        BM, BN = (16, 32) if arch == INTERPRETER else (32, 128) if BD == 16 else (16, 64)
    config = kind.config(BM, BN, BD, LANES=4 if wgmma else 1, EVEN_ROW_STRIDE=flat)
    if half:
        plain = wgmma and kind.dtype == torch.bfloat16 and flat and d <= BD and not (kind.normalize or pieces)
        stages = 1 if arch.is_amd or not vectors else 3
        warps = 8 if wide_unit and not vectors else 4
        return LaunchConfig(
            config, num_warps=warps, num_stages=stages, max_registers=THREE_CTA_REGISTERS if plain else 255
        )
    if wgmma:
        return LaunchConfig(config, num_warps=8 if many else 4, num_stages=2 if vectors else 1, max_registers=255)
    return LaunchConfig(config, num_warps=8, num_stages=1, max_registers=255)


def configure_pair_sort(arch: Architecture) -> LaunchConfig:
    """How the kernels run that find and sort items, which take no configuration."""
    config = configure_documents(KernelKey(arch, torch.float32, 128, False, False, 0), flat=True, pieces=True).config
    return LaunchConfig(config, num_warps=4, num_stages=1, max_registers=arch.registers)


def choose_shared_tile_rows(arch: Architecture) -> int:
    """Rows of D that a program of `maxsim_grad_shared_tiles` takes."""
    return 32 if arch == INTERPRETER else 256


@_cached
def configure_packed_documents(
    kind: KernelKey, *, flat: bool, rows: int | None, shared: bool, listed: bool = False
) -> LaunchConfig:
    """The one-hot product of BN rows of D and BM query rows a step.

    `shared`: of those BN of a larger tile that win. `listed`: rows that won in the tile are read from lists.

    `rows` are those of the mean query where an item has one query. Such items are short, and several share a step. It
    is None in the cross product, where a document meets all rows: a program reads many winners, some steps ahead.
    """
    launch, arch = configure_documents(kind, flat=flat, pieces=not listed), kind.arch
    config, single = launch.config, rows is not None
    if listed:
        # Three programs hide what one waits for: long steps, with fewer barriers for each row, beat stages.
        three = launch.max_registers == THREE_CTA_REGISTERS
        BM, stages = (128, 2) if three else (config.BM, launch.num_stages)
        return replace(launch, config=config._replace(BM=BM, ROWS_PER_QUERY=BM), num_stages=stages)
    if kind.half and kind.has_vector_loads and arch != INTERPRETER:
        # With as many rows in a step as there are threads, each thread computes one place; else they repeat them.
        BM = 128 if arch.name == "sm_90" and config.SINGLE_STEP and not single else config.BM
        plain = kind.dtype == torch.bfloat16 and not kind.normalize  # else ptxas spills
        config = config._replace(BM=BM, BN=16 if shared and not plain else 32)
        # On sm_120 ptxas spills two stages.
        launch = replace(launch, num_stages=1 if single or arch.is_amd or arch.name == "sm_120" else 2)
    else:
        if shared and arch.name.startswith("sm_8"):  # else ptxas spills
            config = config._replace(BN=min(config.BN, 32))
        launch = replace(launch, num_stages=1)
    ROWS_PER_QUERY = config.BM if rows is None else min(max(next_power_of_2(rows), 16), config.BM)
    return replace(launch, config=config._replace(ROWS_PER_QUERY=ROWS_PER_QUERY))


MAX_SPARSE_ROWS = 128  # query rows of a document that one program holds, at most


def get_max_sparse_rows(kind: KernelKey) -> int:
    """Query rows of a document that one program holds; of more, ptxas spills."""
    return MAX_SPARSE_ROWS if kind.half and kind.d <= 128 and kind.has_vector_loads else MAX_SPARSE_ROWS // 2


@_cached
def configure_sparse_documents(kind: KernelKey, rows: int) -> LaunchConfig:
    """The sums of the few rows that a document meets, at BN of the tokens that they won at a time."""
    BM, d, half = max(next_power_of_2(rows), 16), kind.d, kind.half
    holds_features = BM <= 32 or (half and not kind.arch.is_amd)
    BD = max(next_power_of_2(d), 16) if d <= (128 if holds_features else 64) else 32
    config = kind.config(BM, min(BM, 32 if half and BM <= 64 else 16), BD)
    # Without a limit ptxas takes 128 and spills.
    return LaunchConfig(config, num_warps=4 if rows <= 32 and half else 8, num_stages=1, max_registers=255)


MAX_DISJOINT_ROWS = 128  # of an item that one warp sums


@_cached
def configure_disjoint_documents(kind: KernelKey, rows: int, *, flat: bool) -> LaunchConfig:
    """The sums of the few rows, at most BM of each query, that a packed document meets: one warp, row by row."""
    BM = min(max(next_power_of_2(rows), 16 if kind.arch == INTERPRETER else 32), MAX_DISJOINT_ROWS)
    BD = min(max(next_power_of_2(kind.d), 16), 256)
    config = kind.config(BM, 4, BD, EVEN_ROW_STRIDE=flat)
    # They wait most of the time: as many programs as a multiprocessor takes, 32, unless ptxas spills then.
    small = BM <= 32 and BD <= 128 and kind.has_vector_loads
    return LaunchConfig(config, num_warps=1, num_stages=1, max_registers=64 if small else 128)


def configure_buckets(arch: Architecture, documents: LaunchConfig, rows: int) -> LaunchConfig:
    """The lists of winners that feed `documents`, in blocks of BM query rows."""
    return LaunchConfig(_make_bucket_config(arch, documents, rows, 1024), num_warps=4, num_stages=1)


def _make_bucket_config(arch: Architecture, documents: LaunchConfig, rows: int, most: int) -> KernelConfig:
    BM = min(max(next_power_of_2(rows), 16), 64 if arch == INTERPRETER else most)
    return documents.config._replace(BM=BM, ROWS_PER_QUERY=min(BM, 16 if arch == INTERPRETER else 128))


def configure_packed_buckets(arch: Architecture, documents: LaunchConfig, rows: int) -> tuple[LaunchConfig, int]:
    """The lists of winners that feed `documents` of packed layouts, and of how many query rows a block is.

    A block is one program's, so that one launch lists all; it is large, because a tile's walk begins anew with each.
    """
    # Of 16 rows a thread ptxas spills, on sm_120 of 8 in 128 registers.
    most = MAX_BLOCK_ROWS.value // 2 if arch.name == "sm_120" else MAX_BLOCK_ROWS.value
    most = _make_bucket_config(arch, documents, rows, most).BM
    each = cdiv(rows, cdiv(rows, most))
    config = _make_bucket_config(arch, documents, each, most)
    warps = max(4, config.BM // 256)
    return LaunchConfig(config, num_warps=warps, num_stages=1, max_registers=128 if warps == 16 else 255), each
