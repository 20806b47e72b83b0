"""Configuration of the generic forward kernels: a tile of `FORWARD_RULES`, and overrides.

`FORWARD_RULES` lists the tiles of `maxsim_forward` for each tensor core type. The choice depends on Lq, d, dtype, and
architecture. A score therefore has the same bits in every batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...csrc_triton.common.arguments import KernelConfig
from ...csrc_triton.formats.bits import get_code_bits, has_bit_words
from ...csrc_triton.formats.encoded import has_fp8_queries, is_fp8
from ...csrc_triton.formats.residual import get_bucket_bits, has_words
from ...formats.table import INT8_QUERIES
from .. import triton_versions
from .architectures import (
    MEASURED_SMS,
    Architecture,
    KernelKey,
    LaunchConfig,
    cdiv,
    choose_precision,
    next_power_of_2,
)
from .tables import (
    FP32_DTYPES,
    HALF_DTYPES,
    UNLIMITED,
    Override,
    TableRow,
    apply_overrides,
    at_most,
    select_for,
)

_MAX_FEW_DOCUMENTS = 3_000  # with more documents of one query, an H100 is busy for a long time
# Maximum number of packed documents that all run at a time. The longest one determines the time, so pipelines are deep.
MAX_RESIDENT_DOCUMENTS = 8 * MEASURED_SMS
_SUBSET_PROGRAMS_PER_SM = 32  # of documents that may be empty
MIN_ROWS_PER_QUERY = 16  # for packed queries, whose lengths vary
_MAX_PACKED_TILE_ROWS = 128  # query rows of a tile for packed layouts
_TF32_TILE = 128  # query rows and document tokens of a tile for many fp32 features with TF32
_MAX_CODE_TILE_ROWS = 512  # query rows of a tile for residual codes
_INT8_MMA_FEATURES = 32  # features of one tensor core instruction
# int8 terms of a query row, by `KernelConfig.ENCODING`.
INT8_TERMS_BY_ENCODING = {"int8": 2, INT8_QUERIES: 1} | {
    f"{read}{code}": terms
    for read in ("bits", "bitwords")
    for code, terms in (
        *(("1_half", 2), ("1_int8", 1), ("1_binary", 1)),
        *((f"{nbits}_rotated", 2) for nbits in (1, 2, 4)),
    )
}
MAX_INT8_FEATURES = 256  # sums of products of int8 terms fit 32 bits
SHORT_DOCUMENT_TILES = (16, 32, 64)  # tokens of a tile for short encoded documents
# With so many documents, most SMs of an H200 have two programs or fewer.
_FEW_DOCUMENTS = 5 * MEASURED_SMS // 2


class TileConfig(NamedTuple):
    """Query rows, document tokens, and features of a step of `maxsim_forward`, with its launch parameters."""

    rows: int
    tokens: int
    features: int
    warps: int
    stages: int
    registers: int | None = None
    tokens_first: bool = False
    documents: int = UNLIMITED  # maximum number of documents that the tile serves
    walkers: int = 0  # persistent programs, see `LaunchConfig`


TileRule = TableRow[tuple[TileConfig, ...]]
# The value of a rule lists tiles in ascending order of rows and documents. All tiles of a rule give the same bits. The
# first tile that holds all rows and documents is selected, or else the last tile. The rows of the last tile are the
# maximum that a query is summed over at once. The rule depends on neither Nq nor Nd. Reasons for the tiles:
# - The first operand of wgmma has at least 64 rows. Up to 32 query rows are therefore the second operand.
# - Few programs need deep pipelines to keep the memory busy. With many programs, eight programs with one stage each
#   share an SM.
# - With many query rows, a persistent program reads them once, not once for each document. There are as many persistent
#   programs as an H200 runs at a time.
# - Two programs with 256 rows and 128 registers share an SM. A query longer than a tile needs more registers.
# - Beyond 128 features the query rows are read again for every token tile, so the tiles are larger.
# - With mma the accumulators leave fewer registers. A kernel that needs many registers has smaller steps.
# - Splitting fp32 rows costs registers too. ptxas spills with 256 rows, or with 32 rows as the second operand.
# - Rules for wide = 2 serve all rows that are loaded feature by feature. Their differences avoid spills.
# - The last tile of half-precision dtypes without `normalize` has 256 rows, because the sm_90 kernel also cuts its sums
#   by 256 rows.
# fmt: off
_SHORT_QUERY_TILES = (
    TileConfig(rows=32, tokens=64, features=128, warps=4, stages=4, tokens_first=True, documents=_FEW_DOCUMENTS),
    TileConfig(rows=32, tokens=64, features=128, warps=4, stages=1, tokens_first=True),
    TileConfig(rows=64, tokens=64, features=128, warps=4, stages=4, documents=_FEW_DOCUMENTS),
    TileConfig(rows=64, tokens=64, features=128, warps=4, stages=2, walkers=4 * MEASURED_SMS),
    TileConfig(rows=128, tokens=64, features=128, warps=4, stages=4, walkers=2 * MEASURED_SMS),
)
FORWARD_RULES: tuple[TileRule, ...] = (
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, d=128, Lq=256, normalize=False, wide=1, value=(
        *_SHORT_QUERY_TILES,
        TileConfig(rows=256, tokens=64, features=128, warps=8, stages=3, registers=128, walkers=2 * MEASURED_SMS),
    )),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, d=128, Lq=128, normalize=False, value=(
        *_SHORT_QUERY_TILES,
        TileConfig(rows=256, tokens=64, features=128, warps=8, stages=2, registers=255, walkers=MEASURED_SMS),
    )),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, d=128, normalize=False, wide=1, value=(
        TileConfig(rows=256, tokens=64, features=128, warps=8, stages=3),
    )),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, d=128, normalize=False, value=(
        TileConfig(rows=256, tokens=64, features=32, warps=8, stages=2, registers=255),
    )),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, d=128, Lq=256, wide=1, value=(
        TileConfig(rows=32, tokens=64, features=128, warps=4, stages=3, tokens_first=True, documents=_FEW_DOCUMENTS),
        TileConfig(rows=32, tokens=64, features=128, warps=4, stages=2, tokens_first=True),
        TileConfig(rows=64, tokens=64, features=128, warps=4, stages=3),
        TileConfig(rows=128, tokens=64, features=128, warps=8, stages=3, walkers=2 * MEASURED_SMS),
        TileConfig(rows=256, tokens=64, features=128, warps=8, stages=3),
    )),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, d=128, wide=1, value=(
        TileConfig(rows=256, tokens=64, features=128, warps=8, stages=3),
    )),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, normalize=False, wide=1, value=(
        TileConfig(rows=32, tokens=64, features=128, warps=4, stages=4, tokens_first=True),
        TileConfig(rows=64, tokens=64, features=128, warps=4, stages=4, documents=_FEW_DOCUMENTS),
        TileConfig(rows=64, tokens=128, features=128, warps=4, stages=2),
        TileConfig(rows=128, tokens=128, features=128, warps=8, stages=3),
    )),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, wide=1, value=(
        TileConfig(rows=32, tokens=64, features=128, warps=4, stages=3, tokens_first=True),
        TileConfig(rows=64, tokens=64, features=128, warps=4, stages=2),
        TileConfig(rows=128, tokens=64, features=128, warps=8, stages=2),
    )),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, value=(
        TileConfig(rows=64, tokens=64, features=64, warps=8, stages=1),
    )),
    TableRow(units=("wgmma",), dtypes=FP32_DTYPES, d=128, normalize=False, wide=1, value=(
        TileConfig(rows=64, tokens=64, features=128, warps=4, stages=1),
        TileConfig(rows=128, tokens=64, features=128, warps=8, stages=2),
    )),
    TableRow(units=("wgmma",), dtypes=FP32_DTYPES, wide=1, value=(
        TileConfig(rows=64, tokens=64, features=32, warps=4, stages=3),
    )),
    TableRow(units=("wgmma",), dtypes=FP32_DTYPES, value=(
        TileConfig(rows=64, tokens=64, features=16, warps=4, stages=2),
    )),
    TableRow(units=("mma",), dtypes=HALF_DTYPES, d=128, normalize=False, wide=0, value=(
        TileConfig(rows=64, tokens=64, features=128, warps=4, stages=3),
        TileConfig(rows=128, tokens=64, features=128, warps=8, stages=3),
    )),
    TableRow(units=("mma",), dtypes=HALF_DTYPES, wide=1, value=(
        TileConfig(rows=64, tokens=64, features=64, warps=8, stages=2),
        TileConfig(rows=128, tokens=64, features=64, warps=8, stages=2),
    )),
    TableRow(units=("mma",), dtypes=HALF_DTYPES, value=(
        TileConfig(rows=64, tokens=64, features=32, warps=8, stages=2),
    )),
    TableRow(units=("mma",), dtypes=FP32_DTYPES, wide=0, value=(
        TileConfig(rows=64, tokens=32, features=32, warps=4, stages=2),
    )),
    TableRow(units=("mma",), dtypes=FP32_DTYPES, value=(
        TileConfig(rows=64, tokens=32, features=16, warps=4, stages=2),
    )),
    TableRow(units=("mfma",), dtypes=HALF_DTYPES, wide=1, value=(
        TileConfig(rows=64, tokens=64, features=128, warps=4, stages=1),
    )),
    TableRow(units=("mfma",), dtypes=HALF_DTYPES, value=(
        TileConfig(rows=64, tokens=64, features=64, warps=4, stages=1),
    )),
    TableRow(units=("mfma",), dtypes=FP32_DTYPES, value=(
        TileConfig(rows=64, tokens=64, features=32, warps=4, stages=1),
    )),
    TableRow(units=("interpreter",), dtypes=HALF_DTYPES, value=(
        TileConfig(rows=16, tokens=16, features=128, warps=4, stages=1, tokens_first=True),
        TileConfig(rows=32, tokens=16, features=128, warps=4, stages=1, walkers=1),
    )),
    TableRow(units=("interpreter",), dtypes=FP32_DTYPES, d=128, normalize=False, value=(
        TileConfig(rows=16, tokens=16, features=128, warps=4, stages=1, tokens_first=True),
        TileConfig(rows=32, tokens=16, features=128, warps=4, stages=1),
    )),
    TableRow(units=("interpreter",), dtypes=FP32_DTYPES, value=(
        TileConfig(rows=16, tokens=16, features=32, warps=4, stages=1, tokens_first=True),
        TileConfig(rows=32, tokens=16, features=32, warps=4, stages=1, walkers=1),
    )),
)
# fmt: on


def select_tiles(kind: KernelKey, Lq: int) -> tuple[TileConfig, ...]:
    """Return the tiles of the rule that covers a call."""
    return select_for(FORWARD_RULES, kind, Lq)


def select_tile(
    tiles: tuple[TileConfig, ...], Nq: int, Lq: int, candidates: bool, documents: int
) -> tuple[TileConfig, int]:
    """Return the tile of a call among the tiles of its rule, and the rows per query in the tile."""
    max_rows = tiles[-1].rows
    slot = min(next_power_of_2(max(Lq, 1)), max_rows)
    rows = slot if candidates else min(Nq * slot, max_rows)
    fitting_tiles = [tile for tile in tiles if tile.rows >= slot and tile.documents >= documents]
    tile = next(tile for tile in fitting_tiles if tile.rows >= rows)
    if not candidates and cdiv(Nq * slot, tile.rows) * documents < MEASURED_SMS:
        tile = fitting_tiles[0]  # otherwise most SMs would idle
    return tile, slot


def make_forward_config(kind: KernelKey, tile: TileConfig, slot: int, *, tf32: bool) -> KernelConfig:
    """Return the forward configuration of a tile with `slot` rows per query."""
    BD = min(max(next_power_of_2(kind.d), 16), tile.features)
    products = choose_precision(kind.dtype, kind.arch, tf32)
    return kind.config(tile.rows, tile.tokens, BD, ROWS_PER_QUERY=slot, LANES=kind.arch.lanes, PRECISION=products)


_ARGMAX_OVERRIDES = (
    Override(when=lambda arch, x: True, change={"BN": at_most("BN", 64)}, reason="argmax costs registers"),
    Override(
        when=lambda arch, x: arch.name == "sm_100", change={"BN": at_most("BN", 32)}, reason="argmax costs registers"
    ),
    Override(when=lambda arch, x: x.config.FP32_TERMS > 0, change={"num_stages": 1}, reason="argmax costs registers"),
)


_SPILLS = "ptxas spills"
_NORM_OVERRIDES = (
    Override(
        when=lambda arch, x: x.config.FP32_TERMS > 0 and x.config.LONG_QUERIES and x.config.BM > 64,
        change={"BN": at_most("BN", 32)},
        reason=_SPILLS,
        measured_on="ptxas of Triton 3.6: d = 128",
    ),
)


def _choose_tile_key(kind: KernelKey, stored: Any) -> KernelKey:
    """Return the properties of a call that select its tiles.

    Split fp32 rows have the same tiles with and without `normalize`. The scales of encoded documents include their
    norms, and fp32 queries have the tiles of `normalize` next to them, because they are not split.
    """
    if stored:
        return kind._replace(normalize=not kind.half)
    return kind._replace(normalize=kind.normalize and (kind.half or not kind.arch.has_sm90_path))


def configure_forward(
    kind: KernelKey,
    Nq: int,
    Lq: int,
    *,
    tf32: bool,
    documents: int = UNLIMITED,
    argmax: bool = False,
    stored: Any = "",
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
        stored: `KernelConfig.ENCODING`.
    """
    arch, tiles = kind.arch, select_tiles(_choose_tile_key(kind, stored), Lq)
    tile, slot = select_tile(tiles, Nq, Lq, kind.candidates, documents)
    config = make_forward_config(kind, tile, slot, tf32=tf32)
    # fp32 rows are split into fp16 terms.
    splits = arch.has_sm90_path and not (kind.half or stored) and config.SINGLE_STEP
    config = config._replace(
        TOKENS_FIRST=tile.tokens_first,
        PERSISTENT=tile.walkers > 0 and not splits and config.SINGLE_STEP and Lq <= slot and not kind.candidates,
        # On mma and for split rows the loop is compiled even if it is not needed, because ptxas spills without it.
        LONG_QUERIES=Lq > slot or (slot == tiles[-1].rows and (arch.unit == "mma" or splits)),
        FP32_TERMS=(1 if tf32 else 2) if splits else 0,
    )
    launch = LaunchConfig(
        config,
        num_warps=tile.warps,
        num_stages=tile.stages,
        max_registers=tile.registers or arch.registers,
        walkers=tile.walkers,
    )
    overrides = (*(_ARGMAX_OVERRIDES if argmax else ()), *(_NORM_OVERRIDES if kind.normalize else ()))
    return apply_overrides(overrides, arch, launch)


def _has_one_stage(launch: LaunchConfig) -> bool:
    """Return whether a launch has one stage, for few query rows and many documents."""
    return launch.config.TOKENS_FIRST and launch.num_stages == 1


_H100_OVERRIDES = (
    Override(
        when=lambda documents, x: _has_one_stage(x),
        change={"num_stages": lambda documents, x: 2 if documents <= _MAX_FEW_DOCUMENTS else 3},
        reason="its memory is slower than the H200's, so fewer programs that each prefetch more are faster",
        measured_on="H100",
    ),
)
_STAGE_OVERRIDES = (
    Override(
        when=lambda documents, x: _has_one_stage(x) and x.config.BD <= 64,
        change={"num_stages": 2},
        reason="tiles of few features are small, and one stage does not keep the memory busy: sweep_narrow.json",
        measured_on="H200",
    ),
)


def adjust_stages(launch: LaunchConfig, arch: Architecture, documents: int) -> LaunchConfig:
    """Return the launch of a forward without argmax, with the stages for this GPU and for few features.

    `FORWARD_RULES` was measured on an H200 with 128 features.
    """
    overrides = (*_H100_OVERRIDES, *_STAGE_OVERRIDES) if "H100" in arch.gpu else _STAGE_OVERRIDES
    return apply_overrides(overrides, documents, launch)


def adjust_for_tf32(launch: LaunchConfig, kind: KernelKey, Nq: int, Ld: int, documents: int) -> LaunchConfig:
    """Return the launch of a forward with TF32 and without argmax, with larger tiles if features take several steps.

    Rounding both operands to TF32 takes most instructions, and large tiles round each value less often. Tiles of 128
    tokens may be longer than a document, but not twice as long. Measured on an H200: `sweep_wide_fp32.json`.
    """
    C = launch.config
    rows = Nq * C.ROWS_PER_QUERY
    fills_sms = not kind.candidates and rows // _TF32_TILE * documents >= MEASURED_SMS
    is_plain = not (kind.normalize or C.SINGLE_STEP or C.LONG_QUERIES) and kind.has_vector_loads
    if not (kind.arch.unit == "wgmma" and is_plain and fills_sms and 2 * Ld > _TF32_TILE):
        return launch
    return launch.change(BM=_TF32_TILE, BN=_TF32_TILE, num_warps=8)


def adjust_split_for_tf32(launch: LaunchConfig, kind: KernelKey, Nq: int, Td: int, tiles: int) -> LaunchConfig:
    """Return the launch of `adjust_for_tf32` for Td tokens of documents. A split has at least so many `tiles`."""
    return adjust_for_tf32(launch, kind, Nq, _TF32_TILE, Td // (tiles * _TF32_TILE))


def adjust_for_argmax(launch: LaunchConfig, reads_tiles: bool) -> LaunchConfig:
    """Return the launch of a forward with argmax, which has one program for each document.

    With one tile of few query rows, as many programs share an SM as without argmax.
    """
    has_few_rows = reads_tiles and _has_one_stage(launch) and launch.config.BD <= 128
    return launch.change(PERSISTENT=False, walkers=0, max_registers=64 if has_few_rows else launch.max_registers)


class _PackedCall(NamedTuple):
    """The properties of a packed call that its overrides read."""

    kind: KernelKey
    Nq: int
    argmax: bool
    has_few_documents: bool
    has_no_options: bool  # no option that costs registers
    encoding: Any
    may_be_empty: bool  # most of many documents
    tile_tokens: int  # one of `SHORT_DOCUMENT_TILES`, or UNLIMITED

    @property
    def unit(self) -> str:
        """Return the tensor core type."""
        return self.kind.arch.unit

    @property
    def terms(self) -> int:
        """Return the int8 terms of a query row, or 0 if rows stay whole."""
        return INT8_TERMS_BY_ENCODING.get(self.encoding, 0) if self.kind.d <= MAX_INT8_FEATURES else 0

    @property
    def converts_to_fp32(self) -> bool:
        """Return whether encoded documents are converted to fp32."""
        return bool(self.encoding) and not self.kind.half and not self.terms

    @property
    def has_codes(self) -> bool:
        """Return whether documents are residual codes."""
        return get_bucket_bits(self.encoding) > 0

    @property
    def shares_registers(self) -> bool:
        """Return whether decoding shares the registers with an argmax or 64-bit offsets."""
        return self.has_codes and (self.argmax or self.kind.wide > 0)

    def decodes_words(self, launch: LaunchConfig) -> bool:
        """Return whether tokens of residual words are decoded once for as many query rows as fit."""
        return has_words(self.encoding) and launch.config.SINGLE_STEP and not (self.argmax or self.kind.candidates)

    def converts_wide_features(self, launch: LaunchConfig) -> bool:
        """Return whether encoded documents are converted to half precision in several steps of features."""
        is_converted = bool(self.encoding) and self.kind.half and not (self.terms or self.has_codes)
        has_short_codes = get_code_bits(self.encoding) <= 1
        return is_converted and has_short_codes and not launch.config.SINGLE_STEP and self.unit == "wgmma"

    def fills_large_tiles(self, launch: LaunchConfig) -> bool:
        """Return whether the registers of two programs on an SM can hold 128 query rows of converted documents."""
        has_registers = self.has_no_options and self.encoding != "number"
        is_large = launch.config.BM == _MAX_PACKED_TILE_ROWS
        return has_registers and is_large and self.converts_wide_features(launch)

    def fills_short_tile(self, launch: LaunchConfig) -> bool:
        """Return whether a tile of `tile_tokens` is faster for many query rows and short encoded documents."""
        limit = 16 if get_code_bits(self.encoding) == 4 else 64 if self.terms else 32
        is_multiplied = bool(self.encoding) and (self.terms > 0 or self.kind.half) and not self.has_codes
        return is_multiplied and self.unit == "wgmma" and launch.config.BM > 32 and self.tile_tokens <= limit

    def spills(self, launch: LaunchConfig) -> bool:
        """Return whether ptxas spills with the usual number of tokens in a step, for every document encoding."""
        split = launch.config.FP32_TERMS > 0 and launch.config.BM < _MAX_PACKED_TILE_ROWS
        is_crowded = self.unit == "mma" or (self.shares_registers and not launch.config.TOKENS_FIRST)
        has_old_ptxas = triton_versions.get_triton_release() < (3, 9)
        has_norms = launch.config.FP32_TERMS > 0 and self.kind.normalize and has_old_ptxas
        return split or (self.argmax and (is_crowded or has_norms))


_SEGMENTS = "the segment bounds that a program reads cost registers"
_CONVERSION = "several programs share an SM, and some convert tokens while others multiply"
_CODES = "a decoded token is scored against as many query rows as registers hold"
_PACKED_OVERRIDES = (
    # int8 terms and FP8 queries.
    Override(
        when=lambda call, x: call.terms or has_fp8_queries(call.encoding),
        change={
            "BD": lambda call, x: max(x.config.BD, next_power_of_2(call.kind.d), _INT8_MMA_FEATURES),
            "SINGLE_STEP": True,
            "INT8_TERMS": lambda call, x: call.terms,
        },
        reason="one step multiplies all features of int8 terms and of FP8",
    ),
    Override(
        when=lambda call, x: call.terms and call.unit == "wgmma" and x.config.BM > 32,
        change={"BM": 64, "BN": 128, "ROWS_PER_QUERY": at_most("ROWS_PER_QUERY", 64), "TOKENS_FIRST": False}
        | {"num_warps": 4, "num_stages": 3, "max_registers": None},
        reason="two terms cost as many registers as twice the rows",
    ),
    Override(
        when=lambda call, x: (
            call.encoding == "int8" and call.terms and call.unit == "wgmma" and x.config.BM > 32 and x.config.BD > 128
        ),
        change={"BN": 64, "num_stages": 2, "max_registers": 255},
        reason="two programs share an SM. Larger tiles take 128 KiB of shared memory",
        measured_on="H200: sweep_wide_encoded.json",
    ),
    # Query rows and warps.
    Override(
        when=lambda call, x: x.config.BM > _MAX_PACKED_TILE_ROWS,
        change={
            "BM": _MAX_PACKED_TILE_ROWS,
            "ROWS_PER_QUERY": at_most("ROWS_PER_QUERY", _MAX_PACKED_TILE_ROWS),
            "num_warps": lambda call, x: 8 if _choose_tile_key(call.kind, call.encoding).normalize else 4,
            "num_stages": lambda call, x: min(x.num_stages, 3),
            "max_registers": lambda call, x: call.kind.arch.registers,
        },
        reason=_SEGMENTS,
    ),
    Override(
        when=lambda call, x: call.shares_registers or (call.has_codes and call.unit == "wgmma"),
        change={"max_registers": 255},
        reason=_SPILLS,
    ),
    Override(
        when=lambda call, x: (
            (call.shares_registers and x.config.BM == _MAX_PACKED_TILE_ROWS)
            or (
                call.has_codes
                and call.unit == "wgmma"
                and (x.config.BM == _MAX_PACKED_TILE_ROWS or not x.config.SINGLE_STEP)
            )
        ),
        change={"num_warps": 8},
        reason=_SPILLS,
    ),
    Override(
        when=lambda call, x: call.converts_to_fp32 and get_code_bits(call.encoding) and call.unit == "wgmma",
        change={"num_warps": 8},
        reason=_SPILLS,
    ),
    Override(
        when=lambda call, x: (
            has_fp8_queries(call.encoding)
            and call.unit == "wgmma"
            and not (x.config.TOKENS_FIRST and call.has_no_options)
        ),
        change={"num_warps": 8},
        reason="rounding query rows to FP8 costs registers",
    ),
    Override(
        when=lambda call, x: (
            is_fp8(call.encoding)
            and call.has_no_options
            and call.kind.half
            and x.config.TOKENS_FIRST
            and x.config.SINGLE_STEP
            and call.unit == "wgmma"
            and triton_versions.get_triton_release() < (3, 7)
        ),
        change={"max_registers": 96},
        reason="five programs share an SM, not four. The ptxas of Triton 3.9 spills then",
        measured_on="ptxas of Triton 3.6 and 3.9",
    ),
    # Stages.
    Override(
        when=lambda call, x: (
            call.has_few_documents and not call.has_codes and x.config.TOKENS_FIRST and call.unit == "wgmma"
        ),
        change={"num_stages": 4},
        reason="the longest of few documents determines the time, so its pipeline is deep",
    ),
    Override(
        when=lambda call, x: (
            has_bit_words(call.encoding) and get_code_bits(call.encoding) == 4 and call.unit in ("wgmma", "mma")
        ),
        change={"num_stages": 1},
        reason="asynchronous copies of single words cost up to 107 registers, and thus programs of an SM",
        measured_on="H200: words of rq2, which are too small for such copies",
    ),
    Override(
        when=lambda call, x: has_bit_words(call.encoding) and get_code_bits(call.encoding) == 4 and call.unit == "mma",
        change={"BN": at_most("BN", 32)},
        reason=_SPILLS,
        measured_on="ptxas of Triton 3.6",
    ),
    Override(
        when=lambda call, x: call.has_codes and not x.config.SINGLE_STEP,
        change={"num_stages": 1, "BN": at_most("BN", 64)},
        reason="each further stage would hold rows of centroids, perhaps in fp32",
    ),
    Override(
        when=lambda call, x: (
            call.has_codes
            and not (has_words(call.encoding) or call.shares_registers)  # whose tiles are smaller
            and call.unit == "mma"
            and x.config.BM == _MAX_PACKED_TILE_ROWS
            and x.num_stages > 2
        ),
        change={"num_stages": 2},
        reason="three stages of 8-bit codes need 105 KiB, and an sm_89 program has 99. With 4 bits, ptxas 3.6 spills",
    ),
    Override(
        when=lambda call, x: (
            x.config.FP32_TERMS > 0
            and (call.argmax or call.kind.normalize)
            and call.spills(x)
            and triton_versions.get_triton_release() >= (3, 9)
        ),
        change={"num_stages": 2},
        reason="ptxas spills with one stage here, and with two before 3.9",
        measured_on="ptxas of Triton 3.9",
    ),
    Override(
        when=lambda call, x: call.converts_to_fp32,
        change={"num_stages": lambda call, x: min(x.num_stages, 2)},
        reason=_SPILLS,
        measured_on="ptxas of Triton 3.9: decoded bits with an argmax",
    ),
    # Residual words.
    Override(
        when=lambda call, x: call.decodes_words(x) and call.unit != "wgmma",
        change={"PERSISTENT": True, "max_registers": 255}
        | {"walkers": lambda call, x: 1 if call.unit == "interpreter" else 8 * MEASURED_SMS},
        reason=_CODES,
    ),
    Override(
        when=lambda call, x: call.decodes_words(x) and call.kind.arch.name == "sm_100", change={"BN": at_most("BN", 32)}
    ),
    Override(
        when=lambda call, x: call.decodes_words(x) and call.unit == "wgmma",
        change={"PERSISTENT": True, "num_warps": 4, "num_stages": 1, "max_registers": 168, "walkers": 3 * MEASURED_SMS}
        | {"BM": lambda call, x: max(x.config.BM, min(_count_rows(call.Nq, x), _MAX_CODE_TILE_ROWS))},
        reason=_CODES,
    ),
    Override(
        when=lambda call, x: call.decodes_words(x) and call.unit == "wgmma" and call.kind.normalize,
        change={"max_registers": 255, "walkers": 2 * MEASURED_SMS},
    ),
    Override(
        when=lambda call, x: call.decodes_words(x) and call.unit == "wgmma" and x.config.BM > 64,
        change={"num_warps": 8, "max_registers": 255, "walkers": MEASURED_SMS},
    ),
    # Document tokens.
    Override(
        when=lambda call, x: call.converts_to_fp32 or call.spills(x), change={"BN": at_most("BN", 32)}, reason=_SPILLS
    ),
    Override(
        when=lambda call, x: call.unit == "mma" and (call.converts_to_fp32 or call.shares_registers), change={"BN": 16}
    ),
    Override(
        when=lambda call, x: call.kind.arch.name == "sm_100" and not (call.has_no_options or call.encoding),
        change={"BN": at_most("BN", 32)},
        reason=_SPILLS,
        measured_on="ptxas of Triton 3.9",
    ),
    Override(
        when=lambda call, x: call.converts_wide_features(x) and x.config.BM > 32 and not call.fills_large_tiles(x),
        change={"BM": 64, "BN": 64, "BD": at_most("BD", 64), "ROWS_PER_QUERY": at_most("ROWS_PER_QUERY", 64)}
        | {"num_warps": 4, "num_stages": 3, "max_registers": lambda call, x: 168 if call.has_no_options else 255},
        reason=_CONVERSION,
        measured_on="H200: sweep_wide_encoded.json",
    ),
    Override(
        when=lambda call, x: call.fills_large_tiles(x),
        change={"BN": 64, "BD": at_most("BD", 64), "num_warps": 8, "num_stages": 3, "max_registers": 128},
        reason=_CONVERSION,
        measured_on="H200: sweep_wide_encoded.json",
    ),
    Override(
        when=lambda call, x: call.fills_short_tile(x),
        change={"BM": 64, "BN": lambda call, x: call.tile_tokens, "ROWS_PER_QUERY": at_most("ROWS_PER_QUERY", 64)}
        | {"num_warps": 4, "num_stages": lambda call, x: 3 if call.tile_tokens == 16 else 2}
        | {"max_registers": lambda call, x: 168 if call.has_no_options else 255},
        reason="short documents fill small tiles, and more programs share an SM",
        measured_on="H200: sweep_short_encoded.json",
    ),
    Override(
        when=lambda call, x: (
            call.fills_short_tile(x)
            and call.has_no_options
            and call.tile_tokens < 64
            and call.encoding in ("int8", INT8_QUERIES, "number")
        ),
        change={"max_registers": 128},
        reason="four programs share an SM. ptxas spills with other encodings",
    ),
    # Empty documents.
    Override(
        when=lambda call, x: (
            call.may_be_empty and call.kind.arch.has_sm90_path and not (x.config.PERSISTENT or x.config.FP32_TERMS)
        ),
        change={"PERSISTENT": True, "walkers": lambda call, x: _SUBSET_PROGRAMS_PER_SM * call.kind.arch.processors},
        reason="persistent programs pass over empty documents. With more than run at a time, the last do not run alone",
        measured_on="H200. Elsewhere they were not measured, and Triton 3.9 leaves out their products on gfx942",
    ),
)


def _count_rows(Nq: int, launch: LaunchConfig) -> int:
    """Return the tile rows that hold all queries."""
    return next_power_of_2(Nq * launch.config.ROWS_PER_QUERY)


def get_packed_tree_rows(kind: KernelKey, Lq: int, stored: Any = "") -> int:
    """Return the rows of a query whose maxima packed layouts add as one tree."""
    return select_tiles(_choose_tile_key(kind, stored), Lq)[-1].rows


def configure_packed_forward(
    kind: KernelKey,
    Nq: int,
    Lq: int,
    *,
    tf32: bool,
    argmax: bool,
    longest: int | None = None,
    has_few_documents: bool = False,
    has_no_options: bool = False,
    stored: Any = "",
    may_be_empty: bool = False,
    tile_tokens: int = UNLIMITED,
) -> tuple[LaunchConfig, int]:
    """Return the launch for packed layouts, and the levels of the trees of its sums.

    A query uses as many steps of ROWS_PER_QUERY rows as it needs. For encoded documents the dequantization scales
    already include the norms.

    Args:
        kind: properties of the call.
        Nq: number of queries.
        Lq: mean number of tokens of a query.
        tf32: whether TF32 is allowed.
        argmax: whether the call returns an argmax.
        longest: maximum number of tokens of a query, or None if unknown.
        has_few_documents: whether at most `MAX_RESIDENT_DOCUMENTS` documents are scored.
        has_no_options: whether the call has no mask, no weight, and no query lengths.
        stored: `KernelConfig.ENCODING`.
        may_be_empty: whether most of many documents may be empty. Persistent programs pass over these.
        tile_tokens: one of `SHORT_DOCUMENT_TILES` that holds the mean document, or `UNLIMITED`.
    """
    launch = configure_forward(kind, Nq, Lq, tf32=tf32, argmax=argmax, stored=stored).make_non_persistent()
    has_no_options = has_no_options and not (argmax or kind.normalize) and kind.has_vector_loads
    call = _PackedCall(kind, Nq, argmax, has_few_documents, has_no_options, stored, may_be_empty, tile_tokens)
    launch = apply_overrides(_PACKED_OVERRIDES, call, launch)
    config = launch.config
    # Set for the same reason as in `configure_forward` even if it is not needed.
    is_long = longest is None or longest > config.ROWS_PER_QUERY or kind.arch.unit == "mma" or config.FP32_TERMS > 0
    is_even = has_words(stored) and kind.d % config.BD == 0
    options = {"NORMALIZE": kind.normalize, "ENCODING": stored, "LONG_QUERIES": is_long, "EVEN_D": is_even}
    levels = (get_packed_tree_rows(kind, Lq, stored) // config.ROWS_PER_QUERY).bit_length() - 1
    return launch.change(SHORT_DOCUMENTS=True, **options), levels


def get_min_rows_per_query(arch: Architecture, dtype: torch.dtype, *, is_dense: bool, argmax: bool) -> int:
    """Return the minimum rows of a query in a tile of packed layouts.

    Packed queries have few variants of the kernel, because their lengths vary. With many short queries in a tile, ptxas
    spills on mma and with an argmax, and cannot compile split fp32 at all.

    Args:
        arch: architecture that runs the kernel.
        dtype: dtype of the queries.
        is_dense: whether Q is dense.
        argmax: whether the call returns an argmax.
    """
    has_registers = arch.unit != "mma" and dtype in HALF_DTYPES and not argmax
    return 1 if is_dense and has_registers else MIN_ROWS_PER_QUERY


def configure_row_sums(kind: KernelKey, Lq: int, stored: Any = "") -> tuple[int, int]:
    """Return the rows of a query that `maxsim_row_sums` adds at a time, and the levels of its trees.

    The sums have the bits of `configure_packed_forward`.
    """
    max_rows = get_packed_tree_rows(kind, Lq, stored)
    slot = min(max(next_power_of_2(Lq), MIN_ROWS_PER_QUERY), max_rows)
    return slot, (max_rows // slot).bit_length() - 1
