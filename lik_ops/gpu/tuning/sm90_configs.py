"""Which calls the Gluon kernels serve, and how: `maxsim_row_maxima`, `maxsim_forward_specialized` and `_wide`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...csrc_triton.common.arguments import Specialization, WideSpecialization
from . import forward_configs
from .architectures import Architecture, cdiv, loads_vectors, next_power_of_2
from .forward_table import HALF

_PRODUCTS = 4  # of 64 rows, of a program of `maxsim_forward_specialized` unless rows are few
SPECIALIZED_ROWS, WIDE_ROWS = 64 * _PRODUCTS, 128  # of a program of `maxsim_forward_specialized`, `maxsim_forward_wide`
_MOST_ROWS = 6 * 2**20  # whose maxima in one document fill the workspace of `maxsim_row_maxima`
_MOST_SLOT = 128  # rows of a query that it sums itself
_LEAST_GIVEN = 6  # row tiles that pay for a launch that finds the norms of document tokens
_SMALL, _LARGE = 64, 128  # tokens of a tile of `maxsim_forward_specialized`
_MOST_WASTE = 1.07  # what larger tiles may multiply beside what smaller ones do, where winners are found
MOST_QUERY_NORMS = 2**21  # in a workspace, for wide features
# (row tile, document) pairs per SM from which these kernels beat `maxsim_forward`. One pair is enough for queries of
# more than `MOST_WHOLE` tokens, which `maxsim_forward` scores one part after the other, and for wide features and
# documents of `_LONG_WIDE` tokens. Measured on H100 and H200, 2026-11-26: `benchmarks/results/sweep_pairs.json`.
_LEAST_PAIRS, MOST_WHOLE, _LONG_WIDE = 0.48, 128, 512
_LEAST_FILLED = 0.9  # of the slots of queries that it sums itself: else packed rows and sums after it are quicker

# Tokens of a tile and stages, and whether registers keep the query rows: of int8 documents, of FP8.
_INT8, _INT8_LARGE, _FP8 = (64, 8, True), (128, 6, False), (64, 6, True)
_LEAST_FEW, _MOST_FEW = 32, 128  # query rows, or terms of them, whose products with a tile are one
# For few query rows: tokens and stages, and what a token costs beside the smaller tile.
_FEW, _INT8_FEW, _FP8_FEW = ((64, 3, 1.0),), ((64, 6, 1.0),), ((64, 2, 1.0), (128, 2, 0.85))
_SPLIT_FEW = ((64, 1, 1.0),)


class RowMaxima(NamedTuple):
    """How `maxsim_row_maxima` runs, and the sums after it: rows of a query, queries and documents at a time, levels."""

    config: Specialization
    programs: int
    sums: tuple[int, int, int, int]

    @property
    def kernel(self) -> str:
        return "maxsim_row_maxima"

    def tile(self) -> str:
        return _streamed(SPECIALIZED_ROWS, self)


def row_maxima(
    arch: Architecture, dtype: torch.dtype, rows: int, K: int, Lq: int, d: int, *, argmax: bool, dense: bool = False
) -> RowMaxima | None:
    """The choice for `rows` query rows, of `Lq` in the mean, against K documents; None where another kernel serves.

    Rows and K may decide, as all give the same bits. `dense`: each query has Lq rows, so that the kernel may sum them
    itself, if these fill its slots.
    """
    sums = dense and 2 <= next_power_of_2(Lq) <= _MOST_SLOT and Lq >= _LEAST_FILLED * next_power_of_2(Lq)
    row_tiles = cdiv(rows // Lq * next_power_of_2(Lq) if sums else rows, SPECIALIZED_ROWS)
    half = arch.name == "sm_90" and dtype in HALF and d <= 128
    worth = rows > SPECIALIZED_ROWS // 2 and (Lq > MOST_WHOLE or row_tiles * K >= arch.processors // 2)
    if not (half and worth and row_tiles * K < 2**31 and rows <= _MOST_ROWS):
        return None
    slot, levels = forward_configs.row_sums(arch, dtype, Lq, d, False, 0)
    lanes = max(slot, 128)
    config = Specialization(
        BN=64,
        BD=64 if d <= 64 else 128,
        SLOT=next_power_of_2(Lq) if sums else slot,
        STAGES=6,
        RESIDENT=True,
        ARGMAX=argmax,
        SUMS=sums,
    )
    return RowMaxima(config, min(arch.processors, row_tiles * K), (slot, lanes // slot, 1024 // lanes, levels))


class Specialized(NamedTuple):
    """How a specialised kernel runs: its configuration, and the parts of SLOT tokens that a query takes."""

    config: Specialization | WideSpecialization
    parts: int
    row_tiles: int
    programs: int
    tree: int = 2  # parts whose sums are added as a tree

    @property
    def is_wide(self) -> bool:
        return isinstance(self.config, WideSpecialization)

    @property
    def reads_norms(self) -> bool:
        """Whether inverse norms of document tokens, and of query tokens of wide features, are found before it."""
        given = isinstance(self.config, WideSpecialization) or self.config.GIVEN
        return self.config.NORMALIZE and given

    @property
    def kernel(self) -> str:
        return "maxsim_forward_wide" if self.is_wide else "maxsim_forward_specialized"

    def tile(self) -> str:
        if isinstance(self.config, WideSpecialization):
            return _streamed(WIDE_ROWS, self)
        return _streamed(self.config.ROWS * (1 if self.config.FEW else _PRODUCTS), self)


def _streamed(rows: int, choice: Specialized | RowMaxima) -> str:
    """`tile` of a kernel through whose shared memory documents stream."""
    return f"{rows} rows x {choice.config.BN} tokens, {choice.config.STAGES} stages, {choice.programs} programs"


_MOST_PACKED = 128  # tokens of a tile that is longer than a document: masking 256 would spill registers
# Of `maxsim_forward_wide`: tokens of a tile, stages of its ring, and what a token costs beside one of the largest tile.
_WIDE = ((256, 4, 1.0), (128, 6, 1.05), (64, 8, 1.3))


def _least_waste(tiles: tuple[tuple[int, int, float], ...], Ld: int, most_packed: int = 0) -> tuple[int, int]:
    """Tokens and stages of the tile that wastes least on the last tile of a document.

    A tile of more than `most_packed` tokens may not be longer than a document.
    """
    fitting = [tile for tile in tiles if tile[0] <= max(Ld, most_packed)] or [min(tiles)]
    return min(fitting, key=lambda tile: cdiv(Ld, tile[0]) * tile[0] * tile[2])[:2]


def _wide(Lq: int, Ld: int) -> WideSpecialization:
    tokens, stages = _least_waste(_WIDE, Ld, _MOST_PACKED)
    slot = min(next_power_of_2(Lq), WIDE_ROWS // 2)
    return WideSpecialization(BN=tokens, SLOT=slot, STAGES=stages, PACKED=tokens > Ld)


def _tile(Ld: int, argmax: bool, normalize: bool, given: bool) -> tuple[int, int, bool]:
    """Tokens and stages of `maxsim_forward_specialized`, and whether registers keep the query rows.

    With winners, or norms that are read, a group's way round a tile is longer than the products of 64 tokens. Those of
    128 hide it, but leave the query rows no registers, nor what finds norms; and may waste more of a last tile.
    """
    waste = cdiv(Ld, _LARGE) * _LARGE / (cdiv(Ld, _SMALL) * _SMALL)
    if (given or (argmax and not normalize)) and Ld >= _LARGE and waste <= (_MOST_WASTE if argmax else 1):
        return _LARGE, 4 if given else 5, False
    return _SMALL, 6, True


def specialized(
    arch: Architecture, dtype: torch.dtype, Nq: int, K: int, Lq: int, Ld: int, d: int, *, normalize: bool, argmax: bool
) -> Specialized | None:
    """The choice for documents without mask, or None where `maxsim_forward` serves better or alone.

    Nq and K may decide, as all give the same bits.
    """
    config: Specialization | WideSpecialization
    few = 0
    if (normalize or d > 128) and not loads_vectors(d, 0):  # `maxsim_forward` adds up in another order there
        return None
    if d <= 128:
        slot, rows = min(next_power_of_2(Lq), 128), SPECIALIZED_ROWS
        few = _few_rows(Nq, Lq, _LEAST_FEW if argmax else _MOST_FEW) if normalize or argmax else 0
        given = normalize and not few and cdiv(Nq * cdiv(Lq, slot) * slot, rows) >= _LEAST_GIVEN
        tile = (*_least_waste(_FEW, Ld), False) if few else _tile(Ld, argmax, normalize, given)
        config = _specialization(tile, slot, d, few, ARGMAX=argmax, NORMALIZE=normalize, GIVEN=given)
    elif argmax or (normalize and Nq * Lq > MOST_QUERY_NORMS):
        return None  # with winners `maxsim_forward` sums the parts of a query in another order
    else:
        config, rows = _wide(Lq, Ld)._replace(NORMALIZE=normalize), WIDE_ROWS
    parts = cdiv(Lq, config.SLOT)
    row_tiles = cdiv(Nq * parts * config.SLOT, rows)
    pairs = row_tiles * K
    fits = Lq >= 2 and Ld >= (1 if d > 128 else config.BN) and pairs < 2**31 and Nq * parts * config.SLOT < 2**31
    # The plain kernel finds norms between its products, this one beside them.
    least = 0 if few else rows // 4 if normalize and d <= 128 else rows // 2
    one_is_enough = Lq > MOST_WHOLE or (d > 128 and Ld >= _LONG_WIDE)
    enough = one_is_enough or pairs >= int(arch.processors * _LEAST_PAIRS)
    worth = Nq * parts * config.SLOT > least and enough
    if arch.name != "sm_90" or dtype not in (torch.float16, torch.bfloat16) or not (fits and worth):
        return None
    return Specialized(config, parts, row_tiles, _programs(arch.processors, row_tiles, pairs))


def few_split(arch: Architecture, Nq: int, K: int, Lq: int, Ld: int, d: int) -> Specialized | None:
    """The choice for few fp32 query rows, which `maxsim_forward` would split, and documents without mask.

    None where that serves.
    """
    tile, few = (*_least_waste(_SPLIT_FEW, Ld), False), _few_rows(Nq, Lq, _LEAST_FEW)
    config = _specialization(tile, next_power_of_2(Lq), d, few, ARGMAX=False, SPLIT=True)
    fits = few and Lq >= 2 and Ld >= config.BN and d <= 128 and K * Ld < 2**31
    if arch.name != "sm_90" or not fits or arch.processors // 2 > K:
        return None
    return Specialized(config, 1, 1, min(arch.processors, K))


def _programs(processors: int, row_tiles: int, pairs: int) -> int:
    """A program per multiprocessor. Where that many are nearly a multiple of the row tiles, exactly a multiple: then
    all of a document's programs read it at the same time."""
    aligned = processors // row_tiles * row_tiles
    return min(aligned if aligned >= 0.95 * processors else processors, pairs)


def _few_rows(Nq: int, Lq: int, most: int = _MOST_FEW) -> int:
    """Query rows of the one product of a tile, `most` at most; 0 where there are more."""
    rows = max(_LEAST_FEW, Nq * next_power_of_2(Lq))
    return next_power_of_2(rows) if rows <= most else 0


def _specialization(tile: tuple[int, int, bool], slot: int, d: int, few: int, **options: Any) -> Specialization:
    tokens, stages, resident = tile
    rows = {"ROWS": few, "FEW": True} if few else {}
    return Specialization(
        BN=tokens, BD=64 if d <= 64 else 128, SLOT=slot, STAGES=stages, RESIDENT=resident, **{**options, **rows}
    )


def _int8_tile(Ld: int, few: int, each_token: bool, terms: int) -> tuple[int, int, bool]:
    """Tokens and stages, and whether registers keep the query rows. Few rows wait for documents: there the tile whose
    last one of a document wastes least.

    With two terms a group's way round a tile is longer than its products: larger tiles, where scales of tokens do not
    take the registers that they need and the last tile of a document wastes nothing.
    """
    if few:
        return *_least_waste(_INT8_FEW, Ld), False
    large = terms == 2 and not each_token and Ld >= _LARGE and -Ld % _LARGE < _SMALL
    return _INT8_LARGE if large else _INT8


def _reads_numbers(config: Specialization, Lq: int, Ld: int, d: int, counts: tuple[int, ...]) -> bool:
    """Whether a kernel serves dense documents of numbers of 8 bits; `counts`: of what 32 bits have to number.

    The memory access unit begins at multiples of 16 bytes.
    """
    return Lq >= 2 and Ld >= config.BN and d <= 128 and d % 16 == 0 and max(counts) < 2**31


def int8(
    arch: Architecture, dtype: torch.dtype, Nq: int, K: int, Lq: int, Ld: int, d: int, *, each_token: bool, terms: int
) -> Specialized | None:
    """The choice for dense int8 documents without mask, beside query rows of so many int8 terms; None where the kernel
    of packed documents serves.

    Nq and K may decide, as all give the same bits. `each_token`: tokens have scales of their own.
    """
    if arch.name != "sm_90":
        return None
    rows, tree = 64 // terms, forward_configs.ragged_tree(arch, dtype, Lq, d, stored="int8")
    few = _few_rows(Nq, Lq, _MOST_FEW // terms) if next_power_of_2(Lq) <= tree else 0
    slot = next_power_of_2(Lq) if few else min(next_power_of_2(Lq), 2 * rows, tree)
    parts = cdiv(Lq, slot)
    row_tiles = cdiv(Nq * parts * slot, _PRODUCTS * rows)
    tile = _int8_tile(Ld, few, each_token, terms)
    config = _specialization(tile, slot, d, few, ARGMAX=False, GIVEN=each_token, ROWS=rows, TERMS=terms)
    pairs = row_tiles * K
    fits = _reads_numbers(config, Lq, Ld, d, (pairs, Nq * parts * slot, K * Ld)) and not (each_token and Ld % 4)
    if not fits or pairs < arch.processors // 2:
        return None
    return Specialized(config, parts, row_tiles, _programs(arch.processors, row_tiles, pairs), tree // slot)


def fp8(
    arch: Architecture, dtype: torch.dtype, Nq: int, K: int, Lq: int, Ld: int, d: int, *, kept: str
) -> Specialized | None:
    """The choice for dense FP8 documents without mask, kept as `kept`, likewise."""
    if arch.name != "sm_90" or dtype not in HALF:
        return None
    slot, few = min(next_power_of_2(Lq), 128), _few_rows(Nq, Lq)
    parts = cdiv(Lq, slot)
    rows = Nq * parts * slot
    row_tiles = cdiv(rows, SPECIALIZED_ROWS)
    tile = (*_least_waste(_FP8_FEW if few == _LEAST_FEW else _FP8_FEW[:1], Ld), False) if few else _FP8
    config = _specialization(tile, slot, d, few, ARGMAX=False, GIVEN=True, STORED=kept)
    pairs = row_tiles * K
    if not _reads_numbers(config, Lq, Ld, d, (pairs, rows, K * Ld)) or pairs < arch.processors // 2:
        return None
    return Specialized(config, parts, row_tiles, _programs(arch.processors, row_tiles, pairs))
