"""Which tile sizes the kernels of the backward take: see `configs`."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ...csrc_triton.backward.documents.packed_buckets import BLOCK_ROWS
from ...csrc_triton.common.arguments import Config
from .architectures import INTERPRETER, Architecture, Kind, Launch, cdiv, next_power_of_2

_remembered = functools.lru_cache(maxsize=1024)  # the same few are asked for at every step, for microseconds each


@_remembered
def gather(kind: Kind, *, ragged: bool = False, scaled: bool = False) -> Launch:
    """Kernels that read whole rows: BM tokens of a query, and the winners of BN documents at a time.

    `scaled`: rows are int8 with a scale, which takes registers.
    """
    d, half, normalize = kind.d, kind.half, kind.normalize
    BD = max(next_power_of_2(d), 16) if d <= 256 else 128
    # Every thread holds its share of the rows of a step: as many as registers allow, for the loads in flight.
    rows = 128 if half else 32 if normalize else 64
    if not kind.vectors:
        rows = 8 if normalize else 32
    short = kind.vectors and d <= 128
    if ragged and not (short and half and not normalize):
        rows //= 2  # where their winners lie takes registers too
    config = kind.config(8, max(rows * min(128, BD) // BD // 8, 1), BD, PRECISION="ieee")
    spills = not short or (ragged and kind.candidates and not half) or (scaled and normalize)
    return Launch(config, num_warps=4, num_stages=2, max_registers=255 if spills else 128)


@_remembered
def scatter(kind: Kind, *, ragged: bool = False) -> Launch:
    """`maxsim_scatter`, whose products are as large as a step's rows: fewer documents at a time."""
    launch = gather(kind, ragged=ragged)
    config = launch.config
    launch = replace(launch, config=config._replace(BN=max(config.BN // 4, 1)))
    return replace(launch, max_registers=255) if ragged or kind.arch.name.startswith("sm_8") else launch


THREE_PROGRAMS = 168  # registers of a thread with which so many of four warps share a multiprocessor
# Query rows of a document whose winners are listed: fewer are soon looked through, more take too much memory.
LEAST_LISTED, MOST_LISTED = 1024, 2**20
LEAST_LONG = 4096  # tokens of a document, from which on lists of many small tiles take longer than their sums


@_remembered
def grad_documents(kind: Kind, *, flat: bool, pieces: bool, long: bool = False) -> Launch:
    """The one-hot product of BN tokens and the rows they won, BM rows a step; `pieces`: of a list that is cut.

    `long`: documents have LEAST_LONG tokens or more. fp32 then takes as large tiles as registers hold.
    """
    arch, d, half, vectors = kind.arch, kind.d, kind.half, kind.vectors
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
    config = kind.config(BM, BN, BD, LANES=4 if wgmma else 1, FLAT=flat)
    if half:
        plain = wgmma and kind.dtype == torch.bfloat16 and flat and d <= BD and not (kind.normalize or pieces)
        stages = 1 if arch.is_amd or not vectors else 3
        warps = 8 if wide_unit and not vectors else 4
        return Launch(config, num_warps=warps, num_stages=stages, max_registers=THREE_PROGRAMS if plain else 255)
    if wgmma:
        return Launch(config, num_warps=8 if many else 4, num_stages=2 if vectors else 1, max_registers=255)
    return Launch(config, num_warps=8, num_stages=1, max_registers=255)


def lookup(arch: Architecture) -> Launch:
    """How the kernels run that find and sort items, which take no configuration."""
    config = grad_documents(Kind(arch, torch.float32, 128, False, False, 0), flat=True, pieces=True).config
    return Launch(config, num_warps=4, num_stages=1, max_registers=arch.registers)


def shared_tile(arch: Architecture) -> int:
    """Rows of D that a program of `maxsim_grad_shared_tiles` takes."""
    return 32 if arch == INTERPRETER else 256


@_remembered
def grad_packed_documents(kind: Kind, *, flat: bool, rows: int | None, shared: bool, listed: bool = False) -> Launch:
    """The one-hot product of BN rows of D and BM query rows a step.

    `shared`: of those BN of a larger tile that win. `listed`: rows that won in the tile are read from lists.

    `rows` are those of the mean query where an item has one query. Such items are short, and several share a step. It
    is None in the cross product, where a document meets all rows: a program reads many winners, some steps ahead.
    """
    launch, arch = grad_documents(kind, flat=flat, pieces=not listed), kind.arch
    config, single = launch.config, rows is not None
    if listed:
        # Three programs hide what one waits for: long steps, with fewer barriers for each row, beat stages.
        three = launch.max_registers == THREE_PROGRAMS
        BM, stages = (128, 2) if three else (config.BM, launch.num_stages)
        return replace(launch, config=config._replace(BM=BM, SLOT=BM), num_stages=stages)
    if kind.half and kind.vectors and arch != INTERPRETER:
        # With as many rows in a step as there are threads, each thread computes one place; else they repeat them.
        BM = 128 if arch.name == "sm_90" and config.ONE_CHUNK and not single else config.BM
        plain = kind.dtype == torch.bfloat16 and not kind.normalize  # else ptxas spills
        config = config._replace(BM=BM, BN=16 if shared and not plain else 32)
        # On sm_120 ptxas spills two stages.
        launch = replace(launch, num_stages=1 if single or arch.is_amd or arch.name == "sm_120" else 2)
    else:
        if shared and arch.name.startswith("sm_8"):  # else ptxas spills
            config = config._replace(BN=min(config.BN, 32))
        launch = replace(launch, num_stages=1)
    SLOT = config.BM if rows is None else min(max(next_power_of_2(rows), 16), config.BM)
    return replace(launch, config=config._replace(SLOT=SLOT))


SPARSE_ROWS = 128  # query rows of a document that one program holds, at most


def most_sparse_rows(kind: Kind) -> int:
    """Query rows of a document that one program holds; of more, ptxas spills."""
    return SPARSE_ROWS if kind.half and kind.d <= 128 and kind.vectors else SPARSE_ROWS // 2


@_remembered
def sparse_documents(kind: Kind, rows: int) -> Launch:
    """The sums of the few rows that a document meets, at BN of the tokens that they won at a time."""
    BM, d, half = max(next_power_of_2(rows), 16), kind.d, kind.half
    holds_features = BM <= 32 or (half and not kind.arch.is_amd)
    BD = max(next_power_of_2(d), 16) if d <= (128 if holds_features else 64) else 32
    config = kind.config(BM, min(BM, 32 if half and BM <= 64 else 16), BD)
    # Without a limit ptxas takes 128 and spills.
    return Launch(config, num_warps=4 if rows <= 32 and half else 8, num_stages=1, max_registers=255)


MOST_DISJOINT_ROWS = 128  # of an item that one warp sums


@_remembered
def disjoint_documents(kind: Kind, rows: int, *, flat: bool) -> Launch:
    """The sums of the few rows, at most BM of each query, that a packed document meets: one warp, row by row."""
    BM = min(max(next_power_of_2(rows), 16 if kind.arch == INTERPRETER else 32), MOST_DISJOINT_ROWS)
    BD = min(max(next_power_of_2(kind.d), 16), 256)
    config = kind.config(BM, 4, BD, FLAT=flat)
    # They wait most of the time: as many programs as a multiprocessor takes, 32, unless ptxas spills then.
    small = BM <= 32 and BD <= 128 and kind.vectors
    return Launch(config, num_warps=1, num_stages=1, max_registers=64 if small else 128)


def lists(arch: Architecture, documents: Launch, rows: int) -> Launch:
    """The lists of winners that feed `documents`, in blocks of BM query rows."""
    return Launch(_list_config(arch, documents, rows, 1024), num_warps=4, num_stages=1)


def _list_config(arch: Architecture, documents: Launch, rows: int, most: int) -> Config:
    BM = min(max(next_power_of_2(rows), 16), 64 if arch == INTERPRETER else most)
    return documents.config._replace(BM=BM, SLOT=min(BM, 16 if arch == INTERPRETER else 128))


def packed_lists(arch: Architecture, documents: Launch, rows: int) -> tuple[Launch, int]:
    """The lists of winners that feed `documents` of packed layouts, and of how many query rows a block is.

    A block is one program's, so that one launch lists all; it is large, because a tile's walk begins anew with each.
    """
    # Of 16 rows a thread ptxas spills, on sm_120 of 8 in 128 registers.
    most = BLOCK_ROWS.value // 2 if arch.name == "sm_120" else BLOCK_ROWS.value
    most = _list_config(arch, documents, rows, most).BM
    each = cdiv(rows, cdiv(rows, most))
    config = _list_config(arch, documents, each, most)
    warps = max(4, config.BM // 256)
    return Launch(config, num_warps=warps, num_stages=1, max_registers=128 if warps == 16 else 255), each
