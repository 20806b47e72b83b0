"""Which tile a forward takes of `forward_table`, or of a table that was measured.

The choice depends on Lq, d, dtype and architecture, so a score has the same bits whatever batch it is computed in.
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

FP32_SPLIT_UNITS = ("wgmma", "interpreter")  # units that multiply fp32 as sums of fp16 terms
_MEASURED_SMS = 132  # of an H100 or H200
_MAX_FEW_DOCUMENTS = 3_000  # documents of one query, beyond which an H100 is busy for long
# Ragged documents that are all at work at a time: the longest decides, so pipelines are deep.
MAX_RESIDENT_DOCUMENTS = 8 * _MEASURED_SMS
MIN_ROWS_PER_QUERY = 16  # rows of a query of ragged layouts
_MAX_PACKED_TILE_ROWS = 128  # query rows of a tile of ragged layouts, at most
_MAX_CODE_TILE_ROWS = 512  # that decoded codes meet
_INT8_MMA_FEATURES = 32  # features of one instruction of the matrix unit
INT8_TERMS_BY_ENCODING = {"int8": 2, INT8_QUERIES: 1}  # of a query row, by `Config.STORED`
_FP8_REGISTERS = 96
_MAX_INT8_FEATURES = 256  # features whose products of int8 terms are sums of 32 bits


def select_tiles(
    arch: Architecture, dtype: torch.dtype, Lq: int, d: int, normalize: bool, wide: int
) -> tuple[TileConfig, ...]:
    """The tiles of the rule that covers a call. Rows that are loaded feature by feature take those of wide offsets."""
    if not supports_vector_loads(d, wide):
        wide = 2
    for rule in (*arch.measured, *FORWARD_RULES):
        if rule.unit == arch.unit and rule.covers(dtype, max(Lq, 1), d, normalize, wide):
            return rule.tiles
    raise AssertionError(f"lik_ops: no tile for {arch.unit}, {dtype}")


def select_tile(
    tiles: tuple[TileConfig, ...], Nq: int, Lq: int, candidates: bool, documents: int
) -> tuple[TileConfig, int]:
    """The tile of a call among those of its rule, and the rows that each query has in it."""
    most = tiles[-1].rows
    slot = min(next_power_of_2(max(Lq, 1)), most)
    rows = slot if candidates else min(Nq * slot, most)
    serving = [tile for tile in tiles if tile.rows >= slot and tile.documents >= documents]
    tile = next(tile for tile in serving if tile.rows >= rows)
    if not candidates and cdiv(Nq * slot, tile.rows) * documents < _MEASURED_SMS:
        tile = serving[0]  # else most multiprocessors would idle
    return tile, slot


def make_forward_config(kind: KernelKey, tile: TileConfig, slot: int, *, tf32: bool) -> KernelConfig:
    """What a tile, and the rows that a query has in it, say of a forward."""
    BD = min(max(next_power_of_2(kind.d), 16), tile.features)
    lanes = 4 if kind.arch.unit in ("wgmma", "interpreter") else 1
    products = choose_precision(kind.dtype, kind.arch, tf32)
    return kind.config(tile.rows, tile.tokens, BD, ROWS_PER_QUERY=slot, LANES=lanes, PRECISION=products)


def configure_forward(
    kind: KernelKey, Nq: int, Lq: int, *, tf32: bool, documents: int = UNLIMITED, argmax: bool = False
) -> LaunchConfig:
    """The tile of a forward: it holds whole queries, each in a slot of the next power of two, or a part of one.

    `documents` are all that are scored: Nd, or Nq * K candidates.
    """
    arch, dtype, d, candidates, normalize, wide = kind
    tiles = select_tiles(arch, dtype, Lq, d, normalize, wide)
    tile, slot = select_tile(tiles, Nq, Lq, candidates, documents)
    config = make_forward_config(kind, tile, slot, tf32=tf32)
    splits = dtype == torch.float32 and arch.unit in FP32_SPLIT_UNITS and not (tf32 or normalize) and config.SINGLE_STEP
    config = config._replace(
        BN=min(tile.tokens, 32 if arch.name == "sm_100" else 64) if argmax else tile.tokens,  # winners take registers
        TOKENS_FIRST=tile.tokens_first,
        PERSISTENT=tile.walkers > 0 and not splits and config.SINGLE_STEP and Lq <= slot and not candidates,
        # Where it changes nothing it is set on mma and to split rows, for which ptxas spills without the loop.
        LONG_QUERIES=Lq > slot or (slot == tiles[-1].rows and (arch.unit == "mma" or splits)),
        SPLIT_FP32=splits,
    )
    stages = 1 if splits and argmax else tile.stages  # winners take registers
    return LaunchConfig(config, tile.warps, stages, tile.registers or arch.registers, tile.walkers)


def adjust_for_h100(launch: LaunchConfig, arch: Architecture, documents: int) -> LaunchConfig:
    """The forward of scores alone. An H100 is faster with fewer programs that each ask further ahead: its memory is
    slower than that of the H200, which the table was measured on."""
    few = launch.config.TOKENS_FIRST and launch.num_stages == 1 and not arch.measured
    return (
        replace(launch, num_stages=2 if documents <= _MAX_FEW_DOCUMENTS else 3)
        if few and "H100" in arch.gpu
        else launch
    )


def adjust_for_argmax(launch: LaunchConfig, reads_tiles: bool) -> LaunchConfig:
    """The forward where winners are wanted: a program for each document. Beside one tile of one query, as many programs
    share a multiprocessor as without them."""
    few = reads_tiles and launch.config.TOKENS_FIRST and launch.num_stages == 1 and launch.config.BD <= 128
    return replace(launch.make_non_persistent(), max_registers=64) if few else launch.make_non_persistent()


def adjust_for_fp32_split(launch: LaunchConfig, Lq: int) -> LaunchConfig:
    """The forward on rows that are split already: its registers serve deeper pipelines and more rows."""
    config = launch.config
    if Lq > config.ROWS_PER_QUERY:
        return replace(launch, num_stages=2)
    return replace(launch, config=config._replace(BM=2 * config.BM, LONG_QUERIES=False), num_stages=3)


def _adjust_for_terms(launch: LaunchConfig, arch: Architecture, d: int, terms: int) -> LaunchConfig:
    """The forward of int8 documents, by int8 terms of each query row: two take registers as for twice the rows."""
    BD = max(launch.config.BD, next_power_of_2(d), _INT8_MMA_FEATURES)
    config = launch.config._replace(BD=BD, SINGLE_STEP=True, INT8_TERMS=terms)
    if arch.unit == "wgmma" and config.BM > 32:
        config = config._replace(BM=64, BN=128, ROWS_PER_QUERY=min(config.ROWS_PER_QUERY, 64), TOKENS_FIRST=False)
        return replace(launch, config=config, num_warps=4, num_stages=3, max_registers=None)
    return replace(launch, config=config)


class _PackedTileRules(NamedTuple):
    """What registers of the ragged kernel hang on, beside the dense tile that it begins with."""

    unit: str
    argmax: bool
    sums_squares: bool
    few: bool
    bare: bool  # nothing is asked for that takes registers
    converts: bool  # numbers of documents to fp32
    codes: bool  # decodes residual codes
    crowded: bool  # the same beside winners or offsets of 64 bits

    def rows(self, launch: LaunchConfig, arch: Architecture) -> LaunchConfig:
        """Bounds that are read take registers: fewer rows than elsewhere."""
        if launch.config.BM <= _MAX_PACKED_TILE_ROWS:
            return launch
        config = launch.config._replace(
            BM=_MAX_PACKED_TILE_ROWS, ROWS_PER_QUERY=min(launch.config.ROWS_PER_QUERY, _MAX_PACKED_TILE_ROWS)
        )
        warps, stages = 8 if self.sums_squares else 4, min(launch.num_stages, 3)
        return replace(launch, config=config, num_warps=warps, num_stages=stages, max_registers=arch.registers)

    def spills(self, config: KernelConfig) -> bool:
        """Whether ptxas spills with as many tokens in a step as elsewhere, whatever documents are kept as."""
        split = config.SPLIT_FP32 and config.BM < _MAX_PACKED_TILE_ROWS
        argmax = self.argmax and (self.unit == "mma" or (self.crowded and not config.TOKENS_FIRST))
        return split or argmax

    def tokens(self, config: KernelConfig) -> int:
        """Of a step."""
        if self.unit == "mma" and (self.converts or self.crowded):
            return 16
        most = 64 if self.codes and not config.SINGLE_STEP else config.BN
        return min(config.BN, 32 if self.converts or self.spills(config) else most)

    def warps(self, launch: LaunchConfig, stored: Any) -> LaunchConfig:
        """With as many as ptxas does not spill in."""
        wgmma = self.unit == "wgmma"
        if self.crowded or (self.codes and wgmma):
            many = launch.config.BM == _MAX_PACKED_TILE_ROWS or (wgmma and not launch.config.SINGLE_STEP)
            warps = 8 if many else launch.num_warps
            return replace(launch, num_warps=warps, max_registers=255)
        return replace(launch, num_warps=8) if self.converts and stored == "bits" and wgmma else launch

    def registers(self, launch: LaunchConfig, stored: Any) -> LaunchConfig:
        """FP8 beside few rows: five programs share a multiprocessor, not four, where ptxas does not spill, as that of
        Triton 3.9 does."""
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
        config = launch.config
        if config.TOKENS_FIRST and self.unit == "wgmma" and self.few and not self.codes:
            return replace(launch, num_stages=4)
        if self.codes and not config.SINGLE_STEP:
            return replace(launch, num_stages=1)  # each further stage would hold centroids' rows, of fp32 too
        if config.SPLIT_FP32 and self.argmax and self.spills(config) and triton_versions.get_triton_release() >= (3, 9):
            return replace(launch, num_stages=2)  # one stage spills there, two before
        return launch


def _adjust_for_codes(launch: LaunchConfig, arch: Architecture, Nq: int, normalize: bool) -> LaunchConfig:
    """The forward of residual codes in words, without winners: what is decoded meets as many rows as fit."""
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
    """Whether ragged layouts take the tiles of `normalize`, as fp32 queries beside what is stored do."""
    return (normalize and not stored) or (bool(stored) and dtype == torch.float32)


def get_packed_tree_rows(
    arch: Architecture, dtype: torch.dtype, Lq: int, d: int, *, stored: Any, normalize: bool = False, wide: int = 0
) -> int:
    """The rows of a query whose maxima ragged layouts add up as one tree."""
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
    """The tile of ragged layouts whose queries have `Lq` tokens in the mean, and the levels of the trees of their sums.

    No query has more tokens than `longest`, if it is known. One takes as many steps of the slot as it needs. Bounds
    that are read take registers: fewer rows than elsewhere. `few`: at most `OPERAND_IN_REGISTERS` documents are scored.
    `bare`: there is no mask, no weight and no length of a query. `stored`: `Config.STORED`. The norms of such documents
    are in what their numbers count as.
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
    # Where it changes nothing it is set as in `configure_forward`.
    long = longest is None or longest > config.ROWS_PER_QUERY or arch.unit == "mma" or config.SPLIT_FP32
    config = config._replace(
        BN=choice.tokens(config), SHORT_DOCUMENTS=True, LONG_QUERIES=long, EVEN_D=words and d % config.BD == 0
    )
    most = get_packed_tree_rows(arch, dtype, Lq, d, normalize=normalize, wide=wide, stored=stored)
    return replace(launch, config=config), (most // config.ROWS_PER_QUERY).bit_length() - 1


def configure_row_sums(
    arch: Architecture, dtype: torch.dtype, Lq: int, d: int, normalize: bool, wide: int
) -> tuple[int, int]:
    """Rows of a query that `maxsim_row_sums` adds at a time, and the levels of its trees, for the bits of
    `configure_forward`."""
    most = select_tiles(arch, dtype, Lq, d, normalize, wide)[-1].rows
    slot = min(max(next_power_of_2(Lq), MIN_ROWS_PER_QUERY), most)
    return slot, (most // slot).bit_length() - 1
