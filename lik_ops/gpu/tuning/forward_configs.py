"""Selection of the forward tile from `forward_table` or from a measured table.

The choice depends on Lq, d, dtype, and architecture. A score therefore has the same bits in every batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...csrc_triton.common.arguments import KernelConfig
from ...csrc_triton.formats.encoded import is_fp8
from ...csrc_triton.formats.residual import get_bucket_bits, has_words
from ...formats.table import INT8_QUERIES
from .. import triton_versions
from .architectures import (
    Architecture,
    KernelKey,
    LaunchConfig,
    cdiv,
    choose_precision,
    next_power_of_2,
    supports_vector_loads,
)
from .forward_table import FORWARD_RULES, UNLIMITED, TileConfig

# Tensor core types for which fp32 rows are split into fp16 terms.
FP32_SPLIT_UNITS = ("wgmma", "interpreter")
_MEASURED_SMS = 132  # SMs of an H100 or H200
_MAX_FEW_DOCUMENTS = 3_000  # with more documents of one query, an H100 is busy for a long time
# Maximum number of packed documents that all run at a time. The longest one determines the time, so pipelines are deep.
MAX_RESIDENT_DOCUMENTS = 8 * _MEASURED_SMS
MIN_ROWS_PER_QUERY = 16  # for packed layouts
_MAX_PACKED_TILE_ROWS = 128  # query rows of a tile for packed layouts
_MAX_CODE_TILE_ROWS = 512  # query rows of a tile for residual codes
_INT8_MMA_FEATURES = 32  # features of one tensor core instruction
INT8_TERMS_BY_ENCODING = {"int8": 2, INT8_QUERIES: 1}  # terms of a query row, by `KernelConfig.ENCODING`
_FP8_REGISTERS = 96
_MAX_INT8_FEATURES = 256  # sums of products of int8 terms fit 32 bits


def select_tiles(
    arch: Architecture, dtype: torch.dtype, Lq: int, d: int, normalize: bool, wide: int
) -> tuple[TileConfig, ...]:
    """Return the tiles of the rule that covers a call.

    Rows that are loaded feature by feature use the tiles of wide offsets.
    """
    if not supports_vector_loads(d, wide):
        wide = 2
    for rule in (*arch.measured, *FORWARD_RULES):
        if rule.unit == arch.unit and rule.covers(dtype, max(Lq, 1), d, normalize, wide):
            return rule.tiles
    raise AssertionError(f"lik_ops: no tile for {arch.unit}, {dtype}")


def select_tile(
    tiles: tuple[TileConfig, ...], Nq: int, Lq: int, candidates: bool, documents: int
) -> tuple[TileConfig, int]:
    """Return the tile of a call among the tiles of its rule, and the rows per query in the tile."""
    most = tiles[-1].rows
    slot = min(next_power_of_2(max(Lq, 1)), most)
    rows = slot if candidates else min(Nq * slot, most)
    serving = [tile for tile in tiles if tile.rows >= slot and tile.documents >= documents]
    tile = next(tile for tile in serving if tile.rows >= rows)
    if not candidates and cdiv(Nq * slot, tile.rows) * documents < _MEASURED_SMS:
        tile = serving[0]  # otherwise most SMs would idle
    return tile, slot


def make_forward_config(kind: KernelKey, tile: TileConfig, slot: int, *, tf32: bool) -> KernelConfig:
    """Return the forward configuration of a tile with `slot` rows per query."""
    BD = min(max(next_power_of_2(kind.d), 16), tile.features)
    lanes = 4 if kind.arch.unit in ("wgmma", "interpreter") else 1
    products = choose_precision(kind.dtype, kind.arch, tf32)
    return kind.config(tile.rows, tile.tokens, BD, ROWS_PER_QUERY=slot, LANES=lanes, PRECISION=products)


def configure_forward(
    kind: KernelKey, Nq: int, Lq: int, *, tf32: bool, documents: int = UNLIMITED, argmax: bool = False
) -> LaunchConfig:
    """Return the launch of a forward, whose tile holds whole queries or a part of one query.

    Each query has a power of two of rows in the tile.

    Args:
        kind: properties of the call.
        Nq: number of queries.
        Lq: number of tokens of a query.
        tf32: whether TF32 is allowed.
        documents: number of all scored documents: Nd, or Nq * K candidates.
        argmax: whether the call returns an argmax.
    """
    arch, dtype, d, candidates, normalize, wide = kind
    tiles = select_tiles(arch, dtype, Lq, d, normalize, wide)
    tile, slot = select_tile(tiles, Nq, Lq, candidates, documents)
    config = make_forward_config(kind, tile, slot, tf32=tf32)
    splits = dtype == torch.float32 and arch.unit in FP32_SPLIT_UNITS and not (tf32 or normalize) and config.SINGLE_STEP
    config = config._replace(
        BN=min(tile.tokens, 32 if arch.name == "sm_100" else 64) if argmax else tile.tokens,  # argmax costs registers
        TOKENS_FIRST=tile.tokens_first,
        PERSISTENT=tile.walkers > 0 and not splits and config.SINGLE_STEP and Lq <= slot and not candidates,
        # On mma and for split rows the loop is compiled even if it is not needed, because ptxas spills without it.
        LONG_QUERIES=Lq > slot or (slot == tiles[-1].rows and (arch.unit == "mma" or splits)),
        SPLIT_FP32=splits,
    )
    stages = 1 if splits and argmax else tile.stages  # argmax costs registers
    return LaunchConfig(config, tile.warps, stages, tile.registers or arch.registers, tile.walkers)


def adjust_for_h100(launch: LaunchConfig, arch: Architecture, documents: int) -> LaunchConfig:
    """Return the launch of a forward without argmax, adjusted for an H100.

    Its memory is slower than the memory of the H200 on which the table was measured. An H100 is faster with fewer
    programs that each prefetch more.
    """
    few = launch.config.TOKENS_FIRST and launch.num_stages == 1 and not arch.measured
    return (
        replace(launch, num_stages=2 if documents <= _MAX_FEW_DOCUMENTS else 3)
        if few and "H100" in arch.gpu
        else launch
    )


def adjust_for_argmax(launch: LaunchConfig, reads_tiles: bool) -> LaunchConfig:
    """Return the launch of a forward with argmax, which has one program for each document.

    With one tile of few query rows, as many programs share an SM as without argmax.
    """
    few = reads_tiles and launch.config.TOKENS_FIRST and launch.num_stages == 1 and launch.config.BD <= 128
    return replace(launch.make_non_persistent(), max_registers=64) if few else launch.make_non_persistent()


def adjust_for_fp32_split(launch: LaunchConfig, Lq: int) -> LaunchConfig:
    """Return the launch of a forward on rows that are already split.

    Its free registers allow deeper pipelines and more rows.
    """
    config = launch.config
    if Lq > config.ROWS_PER_QUERY:
        return replace(launch, num_stages=2)
    return replace(launch, config=config._replace(BM=2 * config.BM, LONG_QUERIES=False), num_stages=3)


def _adjust_for_terms(launch: LaunchConfig, arch: Architecture, d: int, terms: int) -> LaunchConfig:
    """Return the launch of a forward of int8 documents with `terms` int8 terms of each query row.

    Two terms cost as many registers as twice the rows.
    """
    BD = max(launch.config.BD, next_power_of_2(d), _INT8_MMA_FEATURES)
    config = launch.config._replace(BD=BD, SINGLE_STEP=True, INT8_TERMS=terms)
    if arch.unit == "wgmma" and config.BM > 32:
        config = config._replace(BM=64, BN=128, ROWS_PER_QUERY=min(config.ROWS_PER_QUERY, 64), TOKENS_FIRST=False)
        return replace(launch, config=config, num_warps=4, num_stages=3, max_registers=None)
    return replace(launch, config=config)


class _PackedTileRules(NamedTuple):
    """The properties that determine the registers of the packed kernel, besides the dense tile that it starts with."""

    unit: str
    argmax: bool
    sums_squares: bool
    few: bool
    bare: bool  # no option that costs registers
    converts: bool  # converts encoded documents to fp32
    codes: bool  # decodes residual codes
    crowded: bool  # decodes residual codes with argmax or 64-bit offsets

    def rows(self, launch: LaunchConfig, arch: Architecture) -> LaunchConfig:
        """Limit the rows of a tile, because the segment bounds that a program reads cost registers."""
        if launch.config.BM <= _MAX_PACKED_TILE_ROWS:
            return launch
        config = launch.config._replace(
            BM=_MAX_PACKED_TILE_ROWS, ROWS_PER_QUERY=min(launch.config.ROWS_PER_QUERY, _MAX_PACKED_TILE_ROWS)
        )
        warps, stages = 8 if self.sums_squares else 4, min(launch.num_stages, 3)
        return replace(launch, config=config, num_warps=warps, num_stages=stages, max_registers=arch.registers)

    def spills(self, config: KernelConfig) -> bool:
        """Return whether ptxas spills with the usual number of tokens in a step, for every document encoding."""
        split = config.SPLIT_FP32 and config.BM < _MAX_PACKED_TILE_ROWS
        argmax = self.argmax and (self.unit == "mma" or (self.crowded and not config.TOKENS_FIRST))
        return split or argmax

    def tokens(self, config: KernelConfig) -> int:
        """Return the document tokens of a step."""
        if self.unit == "mma" and (self.converts or self.crowded):
            return 16
        most = 64 if self.codes and not config.SINGLE_STEP else config.BN
        return min(config.BN, 32 if self.converts or self.spills(config) else most)

    def warps(self, launch: LaunchConfig, stored: Any) -> LaunchConfig:
        """Set the number of warps with which ptxas does not spill."""
        wgmma = self.unit == "wgmma"
        if self.crowded or (self.codes and wgmma):
            many = launch.config.BM == _MAX_PACKED_TILE_ROWS or (wgmma and not launch.config.SINGLE_STEP)
            warps = 8 if many else launch.num_warps
            return replace(launch, num_warps=warps, max_registers=255)
        return replace(launch, num_warps=8) if self.converts and stored == "bits" and wgmma else launch

    def registers(self, launch: LaunchConfig, stored: Any) -> LaunchConfig:
        """Limit the registers for FP8 documents and few query rows, so that five programs share an SM, not four.

        The limit is set only for versions of ptxas that do not spill then. The ptxas of Triton 3.9 spills.
        """
        few_rows = launch.config.TOKENS_FIRST and launch.config.SINGLE_STEP and self.unit == "wgmma"
        shares = (
            is_fp8(stored)
            and few_rows
            and self.bare
            and not self.converts
            and triton_versions.get_triton_release() < (3, 7)
        )
        return replace(launch, max_registers=_FP8_REGISTERS) if shares else launch

    def stages(self, launch: LaunchConfig) -> LaunchConfig:
        """Set the number of pipeline stages."""
        config = launch.config
        if config.TOKENS_FIRST and self.unit == "wgmma" and self.few and not self.codes:
            return replace(launch, num_stages=4)
        if self.codes and not config.SINGLE_STEP:
            return replace(launch, num_stages=1)  # each further stage would hold rows of centroids, perhaps in fp32
        if config.SPLIT_FP32 and self.argmax and self.spills(config) and triton_versions.get_triton_release() >= (3, 9):
            return replace(launch, num_stages=2)  # ptxas spills with one stage here, and with two before 3.9
        return launch


def _adjust_for_codes(launch: LaunchConfig, arch: Architecture, Nq: int, normalize: bool) -> LaunchConfig:
    """Return the launch of a forward of residual codes in words, without argmax.

    Decoded tokens are scored against as many query rows as fit.
    """
    config = launch.config
    if arch.unit != "wgmma":
        walkers = 1 if arch.unit == "interpreter" else 8 * _MEASURED_SMS
        config = config._replace(PERSISTENT=True, BN=min(config.BN, 32) if arch.name == "sm_100" else config.BN)
        return replace(launch, config=config, walkers=walkers, max_registers=255)
    rows = max(config.BM, min(next_power_of_2(Nq * config.ROWS_PER_QUERY), _MAX_CODE_TILE_ROWS))
    warps, each = (8, 1) if rows > 64 else (4, 2 if normalize else 3)
    launch = replace(launch, config=config._replace(BM=rows, PERSISTENT=True), num_warps=warps, num_stages=1)
    return replace(launch, max_registers=168 if each == 3 else 255, walkers=each * _MEASURED_SMS)


def _needs_squares(dtype: torch.dtype, normalize: bool, stored: Any) -> bool:
    """Return whether packed layouts use the tiles of `normalize`.

    They do for `normalize` without encoded documents, and for fp32 queries with encoded documents.
    """
    return (normalize and not stored) or (bool(stored) and dtype == torch.float32)


def get_packed_tree_rows(
    arch: Architecture, dtype: torch.dtype, Lq: int, d: int, *, stored: Any, normalize: bool = False, wide: int = 0
) -> int:
    """Return the rows of a query whose maxima packed layouts add as one tree."""
    return select_tiles(arch, dtype, Lq, d, _needs_squares(dtype, normalize, stored), wide)[-1].rows


def configure_packed_forward(
    kind: KernelKey,
    Nq: int,
    Lq: int,
    *,
    tf32: bool,
    argmax: bool,
    longest: int | None = None,
    few: bool = False,
    bare: bool = False,
    stored: Any = "",
) -> tuple[LaunchConfig, int]:
    """Return the launch for packed layouts, and the levels of the trees of its sums.

    A query uses as many steps of ROWS_PER_QUERY rows as it needs. The segment bounds that a program reads cost
    registers, so tiles have fewer rows than in dense layouts. For encoded documents the dequantization scales already
    include the norms.

    Args:
        kind: properties of the call.
        Nq: number of queries.
        Lq: mean number of tokens of a query.
        tf32: whether TF32 is allowed.
        argmax: whether the call returns an argmax.
        longest: maximum number of tokens of a query, or None if unknown.
        few: whether at most `MAX_RESIDENT_DOCUMENTS` documents are scored.
        bare: whether the call has no mask, no weight, and no query lengths.
        stored: `KernelConfig.ENCODING`.
    """
    arch, dtype, d, candidates, normalize, wide = kind
    sums_squares = _needs_squares(dtype, normalize, stored)
    launch = configure_forward(
        kind._replace(normalize=sums_squares), Nq, Lq, tf32=tf32, argmax=argmax
    ).make_non_persistent()
    launch = replace(launch, config=launch.config._replace(NORMALIZE=normalize, ENCODING=stored))
    if stored in INT8_TERMS_BY_ENCODING and d <= _MAX_INT8_FEATURES:
        launch = _adjust_for_terms(launch, arch, d, INT8_TERMS_BY_ENCODING[stored])
    codes = get_bucket_bits(stored) > 0
    converts = bool(stored) and dtype == torch.float32 and not launch.config.INT8_TERMS
    bare = bare and not (argmax or normalize) and supports_vector_loads(d, wide)
    choice = _PackedTileRules(
        arch.unit, argmax, sums_squares, few, bare, converts, codes, codes and (argmax or wide > 0)
    )
    launch = choice.stages(choice.registers(choice.warps(choice.rows(launch, arch), stored), stored))
    words = has_words(stored)
    if words and launch.config.SINGLE_STEP and not (argmax or candidates):
        launch = _adjust_for_codes(launch, arch, Nq, normalize)
    config = launch.config
    # Set for the same reason as in `configure_forward` even if it is not needed.
    long = longest is None or longest > config.ROWS_PER_QUERY or arch.unit == "mma" or config.SPLIT_FP32
    config = config._replace(
        BN=choice.tokens(config), SHORT_DOCUMENTS=True, LONG_QUERIES=long, EVEN_D=words and d % config.BD == 0
    )
    most = get_packed_tree_rows(arch, dtype, Lq, d, normalize=normalize, wide=wide, stored=stored)
    return replace(launch, config=config), (most // config.ROWS_PER_QUERY).bit_length() - 1


def configure_row_sums(
    arch: Architecture, dtype: torch.dtype, Lq: int, d: int, normalize: bool, wide: int
) -> tuple[int, int]:
    """Return the rows of a query that `maxsim_row_sums` adds at a time, and the levels of its trees.

    The sums have the bits of `configure_forward`.
    """
    most = select_tiles(arch, dtype, Lq, d, normalize, wide)[-1].rows
    slot = min(max(next_power_of_2(Lq), MIN_ROWS_PER_QUERY), most)
    return slot, (most // slot).bit_length() - 1
