"""Tile configurations of the backward kernels, based on `architectures`."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ...csrc_triton.backward.documents.packed_buckets import MAX_BLOCK_ROWS
from ...csrc_triton.common.arguments import KernelConfig
from .architectures import INTERPRETER, Architecture, KernelKey, LaunchConfig, cdiv, next_power_of_2

# A training step asks for the same few configurations each time, and each costs microseconds.
_cached = functools.lru_cache(maxsize=1024)


@_cached
def configure_gather(kind: KernelKey, *, ragged: bool = False, scaled: bool = False) -> LaunchConfig:
    """Return the launch of kernels that read whole rows.

    A step has BM tokens of a query and the argmax tokens of BN documents.

    Args:
        kind: properties of the call.
        ragged: whether tokens are packed.
        scaled: whether rows are int8 with a scale, which costs registers.
    """
    d, half, normalize = kind.d, kind.half, kind.normalize
    BD = max(next_power_of_2(d), 16) if d <= 256 else 128
    # Each thread holds its share of the rows of a step. Filling the registers with rows keeps many loads in flight.
    rows = 128 if half else 32 if normalize else 64
    if not kind.has_vector_loads:
        rows = 8 if normalize else 32
    short = kind.has_vector_loads and d <= 128
    if ragged and not (short and half and not normalize):
        rows //= 2  # the addresses of the argmax tokens cost registers too
    config = kind.config(8, max(rows * min(128, BD) // BD // 8, 1), BD, PRECISION="ieee")
    spills = not short or (ragged and kind.candidates and not half) or (scaled and normalize)
    return LaunchConfig(config, num_warps=4, num_stages=2, max_registers=255 if spills else 128)


@_cached
def configure_scatter(kind: KernelKey, *, ragged: bool = False) -> LaunchConfig:
    """Return the launch of `maxsim_scatter`.

    Its products are as large as the rows of a step, so a step has fewer documents.
    """
    launch = configure_gather(kind, ragged=ragged)
    config = launch.config
    launch = replace(launch, config=config._replace(BN=max(config.BN // 4, 1)))
    return replace(launch, max_registers=255) if ragged or kind.arch.name.startswith("sm_8") else launch


# Registers of a thread with which three CTAs of four warps share an SM.
THREE_CTA_REGISTERS = 168
# Query rows of a document whose argmax values are listed. Fewer rows are quick to scan, and more need too much memory.
MIN_BUCKETED_ROWS, MAX_BUCKETED_ROWS = 1024, 2**20
# For longer documents, lists of many small tiles are slower than the sums.
MIN_LONG_DOCUMENT_TOKENS = 4096


@_cached
def configure_documents(kind: KernelKey, *, flat: bool, pieces: bool, long: bool = False) -> LaunchConfig:
    """Return the launch of the one-hot product of BN document tokens and BM query rows a step.

    Args:
        kind: properties of the call.
        flat: whether all query rows are evenly spaced and 32 bits address each element.
        pieces: whether the list of rows is split over several programs.
        long: whether documents have at least `MIN_LONG_DOCUMENT_TOKENS` tokens. fp32 then uses the largest tiles that
            fit registers.
    """
    arch, d, half, vectors = kind.arch, kind.d, kind.half, kind.has_vector_loads
    BD = min(max(next_power_of_2(d), 16), 128)
    wgmma = arch.name in ("sm_90", INTERPRETER.name)
    wide_unit = wgmma or arch.name == "sm_100"  # needs at least 64 features of half-precision dtypes
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
    """Return the launch of the kernels that find and sort pairs, which have no configuration."""
    config = configure_documents(KernelKey(arch, torch.float32, 128, False, False, 0), flat=True, pieces=True).config
    return LaunchConfig(config, num_warps=4, num_stages=1, max_registers=arch.registers)


def choose_shared_tile_rows(arch: Architecture) -> int:
    """Return the rows of D that a program of `maxsim_grad_shared_tiles` owns."""
    return 32 if arch == INTERPRETER else 256


@_cached
def configure_packed_documents(
    kind: KernelKey, *, flat: bool, rows: int | None, shared: bool, listed: bool = False
) -> LaunchConfig:
    """Return the launch of the one-hot product of BN rows of D and BM query rows a step.

    Args:
        kind: properties of the call.
        flat: whether all query rows are evenly spaced and 32 bits address each element.
        rows: mean number of rows of a query if each pair has one query. Such pairs are short, and several share a step.
            None for the cross product: a document is scored against all rows, and a program prefetches argmax values.
        shared: whether the BN rows are the argmax tokens of a larger tile.
        listed: whether the rows of a tile are read from bucketed lists.
    """
    launch, arch = configure_documents(kind, flat=flat, pieces=not listed), kind.arch
    config, single = launch.config, rows is not None
    if listed:
        # Three CTAs per SM hide latency, so long steps with fewer barriers for each row are faster than stages.
        three = launch.max_registers == THREE_CTA_REGISTERS
        BM, stages = (128, 2) if three else (config.BM, launch.num_stages)
        return replace(launch, config=config._replace(BM=BM, ROWS_PER_QUERY=BM), num_stages=stages)
    if kind.half and kind.has_vector_loads and arch != INTERPRETER:
        # If a step has as many rows as threads, each thread computes one address. Otherwise threads repeat addresses.
        BM = 128 if arch.name == "sm_90" and config.SINGLE_STEP and not single else config.BM
        plain = kind.dtype == torch.bfloat16 and not kind.normalize  # otherwise ptxas spills
        config = config._replace(BM=BM, BN=16 if shared and not plain else 32)
        # With two stages ptxas spills on sm_120.
        launch = replace(launch, num_stages=1 if single or arch.is_amd or arch.name == "sm_120" else 2)
    else:
        if shared and arch.name.startswith("sm_8"):  # otherwise ptxas spills
            config = config._replace(BN=min(config.BN, 32))
        launch = replace(launch, num_stages=1)
    ROWS_PER_QUERY = config.BM if rows is None else min(max(next_power_of_2(rows), 16), config.BM)
    return replace(launch, config=config._replace(ROWS_PER_QUERY=ROWS_PER_QUERY))


MAX_SPARSE_ROWS = 128  # maximum query rows of a document that one program holds


def get_max_sparse_rows(kind: KernelKey) -> int:
    """Return the maximum number of query rows of a document that one program holds without spills."""
    return MAX_SPARSE_ROWS if kind.half and kind.d <= 128 and kind.has_vector_loads else MAX_SPARSE_ROWS // 2


@_cached
def configure_sparse_documents(kind: KernelKey, rows: int) -> LaunchConfig:
    """Return the launch that sums the few query rows of a document.

    A step has BN of the tokens that are an argmax.
    """
    BM, d, half = max(next_power_of_2(rows), 16), kind.d, kind.half
    holds_features = BM <= 32 or (half and not kind.arch.is_amd)
    BD = max(next_power_of_2(d), 16) if d <= (128 if holds_features else 64) else 32
    config = kind.config(BM, min(BM, 32 if half and BM <= 64 else 16), BD)
    # Without a limit ptxas uses 128 registers and spills.
    return LaunchConfig(config, num_warps=4 if rows <= 32 and half else 8, num_stages=1, max_registers=255)


MAX_DISJOINT_ROWS = 128  # maximum rows of a pair that one warp sums


@_cached
def configure_disjoint_documents(kind: KernelKey, rows: int, *, flat: bool) -> LaunchConfig:
    """Return the launch that sums the few query rows of a packed document, row by row in one warp.

    A query has at most BM rows.
    """
    BM = min(max(next_power_of_2(rows), 16 if kind.arch == INTERPRETER else 32), MAX_DISJOINT_ROWS)
    BD = min(max(next_power_of_2(kind.d), 16), 256)
    config = kind.config(BM, 4, BD, EVEN_ROW_STRIDE=flat)
    # The programs mostly wait for memory. 32 programs, the maximum, share an SM unless ptxas spills then.
    small = BM <= 32 and BD <= 128 and kind.has_vector_loads
    return LaunchConfig(config, num_warps=1, num_stages=1, max_registers=64 if small else 128)


def configure_buckets(arch: Architecture, documents: LaunchConfig, rows: int) -> LaunchConfig:
    """Return the launch that lists the argmax values for `documents`, in blocks of BM query rows."""
    return LaunchConfig(_make_bucket_config(arch, documents, rows, 1024), num_warps=4, num_stages=1)


def _make_bucket_config(arch: Architecture, documents: LaunchConfig, rows: int, most: int) -> KernelConfig:
    """Return the configuration of a list kernel with at most `most` rows in a block."""
    BM = min(max(next_power_of_2(rows), 16), 64 if arch == INTERPRETER else most)
    return documents.config._replace(BM=BM, ROWS_PER_QUERY=min(BM, 16 if arch == INTERPRETER else 128))


def configure_packed_buckets(arch: Architecture, documents: LaunchConfig, rows: int) -> tuple[LaunchConfig, int]:
    """Return the launch that lists the argmax values of packed documents, and the query rows of a block.

    One program lists one block, so one launch lists all blocks. Blocks are large, because a tile starts a new loop for
    each block.
    """
    # ptxas spills with 16 rows for each thread, and on sm_120 with 8 rows in 128 registers.
    most = MAX_BLOCK_ROWS.value // 2 if arch.name == "sm_120" else MAX_BLOCK_ROWS.value
    most = _make_bucket_config(arch, documents, rows, most).BM
    each = cdiv(rows, cdiv(rows, most))
    config = _make_bucket_config(arch, documents, each, most)
    warps = max(4, config.BM // 256)
    return LaunchConfig(config, num_warps=warps, num_stages=1, max_registers=128 if warps == 16 else 255), each
