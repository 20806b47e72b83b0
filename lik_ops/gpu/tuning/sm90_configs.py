"""Choice and configuration of the Gluon kernels.

The kernels are `maxsim_row_maxima`, `maxsim_forward_specialized`, and `maxsim_forward_wide`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...csrc_triton.common.arguments import Sm90Config, Sm90LargeDConfig
from . import forward_configs
from .architectures import Architecture, cdiv, next_power_of_2, supports_vector_loads
from .forward_table import HALF_DTYPES

# Accumulators of 64 rows in a program of `maxsim_forward_specialized`, except in the small-M kernel.
_ACCUMULATORS = 4
# Query rows of a program of `maxsim_forward_specialized` and `maxsim_forward_wide`.
SM90_TILE_ROWS, LARGE_D_TILE_ROWS = 64 * _ACCUMULATORS, 128
# With so many rows, the maxima of one document fill the workspace of `maxsim_row_maxima`.
_MAX_WORKSPACE_ROWS = 6 * 2**20
# Maximum rows per query that `maxsim_row_maxima` sums itself.
_MAX_ROWS_PER_QUERY = 128
# Minimum row tiles for which a separate launch that computes the norms of document tokens pays off.
_MIN_PRECOMPUTED_ROW_TILES = 6
_SMALL_TILE_TOKENS, _LARGE_TILE_TOKENS = 64, 128  # tokens of a tile of `maxsim_forward_specialized`
# With argmax, large tiles may multiply at most 7 % more than small tiles.
_MAX_PADDING_RATIO = 1.07
MAX_QUERY_NORMS = 2**21  # in a workspace of the large-d kernel
# (row tile, document) pairs per SM from which these kernels are faster than `maxsim_forward`. One pair is enough for
# queries of more than `MAX_WHOLE_QUERY_TOKENS` tokens, which `maxsim_forward` scores one part after the other. One pair
# is also enough for the large-d kernel and documents of `_MIN_LARGE_D_TOKENS` tokens.
# Measured on H100 and H200, 2026-11-26: `benchmarks/results/sweep_pairs.json`.
_MIN_PAIRS_PER_SM, MAX_WHOLE_QUERY_TOKENS, _MIN_LARGE_D_TOKENS = 0.48, 128, 512
# `maxsim_row_maxima` sums rows itself if queries fill this share of ROWS_PER_QUERY. Otherwise packed rows and a second
# launch for the sums are faster.
_MIN_FILL_RATIO = 0.9

# (tokens of a tile, stages, whether registers hold the query rows).
_INT8_TILE, _INT8_LARGE_TILE, _FP8_TILE = (64, 8, True), (128, 6, False), (64, 6, True)
_MIN_SMALL_M_ROWS, _MAX_SMALL_M_ROWS = 32, 128  # query rows, or their terms, in the single product of a tile
# For few query rows: (tokens of a tile, stages, cost of a token relative to the smaller tile).
_SMALL_M_TILES, _INT8_SMALL_M_TILES, _FP8_SMALL_M_TILES = (
    ((64, 3, 1.0),),
    ((64, 6, 1.0),),
    ((64, 2, 1.0), (128, 2, 0.85)),
)
_FP32_SMALL_M_TILES = ((64, 1, 1.0),)


class RowMaximaChoice(NamedTuple):
    """The configuration of `maxsim_row_maxima` and of the sums after it.

    `sums` has the rows per query, the queries and documents of a program, and the tree levels.
    """

    config: Sm90Config
    programs: int
    sums: tuple[int, int, int, int]

    @property
    def kernel(self) -> str:
        """Return the name of the kernel."""
        return "maxsim_row_maxima"

    def tile(self) -> str:
        """Describe the tile of a program as text."""
        return _format_tile(SM90_TILE_ROWS, self)


def configure_row_maxima(
    arch: Architecture, dtype: torch.dtype, rows: int, K: int, Lq: int, d: int, *, argmax: bool, dense: bool = False
) -> RowMaximaChoice | None:
    """Choose the row maxima kernel, or return None if another kernel has to serve.

    All kernels give the same bits, so the choice may depend on `rows` and K.

    Args:
        arch: architecture that runs the kernel.
        dtype: dtype of the tokens.
        rows: number of query rows of all queries.
        K: number of documents.
        Lq: mean number of rows of a query.
        d: number of features.
        argmax: whether the call returns an argmax.
        dense: whether each query has exactly Lq rows. The kernel may then sum the rows itself, if they fill most of
            ROWS_PER_QUERY.
    """
    sums = dense and 2 <= next_power_of_2(Lq) <= _MAX_ROWS_PER_QUERY and Lq >= _MIN_FILL_RATIO * next_power_of_2(Lq)
    row_tiles = cdiv(rows // Lq * next_power_of_2(Lq) if sums else rows, SM90_TILE_ROWS)
    half = arch.name == "sm_90" and dtype in HALF_DTYPES and d <= 128
    worth = rows > SM90_TILE_ROWS // 2 and (Lq > MAX_WHOLE_QUERY_TOKENS or row_tiles * K >= arch.processors // 2)
    if not (half and worth and row_tiles * K < 2**31 and rows <= _MAX_WORKSPACE_ROWS):
        return None
    slot, levels = forward_configs.configure_row_sums(arch, dtype, Lq, d, False, 0)
    lanes = max(slot, 128)
    config = Sm90Config(
        BN=64,
        BD=64 if d <= 64 else 128,
        ROWS_PER_QUERY=next_power_of_2(Lq) if sums else slot,
        STAGES=6,
        OPERAND_IN_REGISTERS=True,
        ARGMAX=argmax,
        SUM_ROWS=sums,
    )
    return RowMaximaChoice(config, min(arch.processors, row_tiles * K), (slot, lanes // slot, 1024 // lanes, levels))


class Sm90Choice(NamedTuple):
    """The configuration of an sm_90 kernel, and the number of parts of ROWS_PER_QUERY tokens of a query."""

    config: Sm90Config | Sm90LargeDConfig
    parts: int
    row_tiles: int
    programs: int
    tree: int = 2  # number of parts whose sums are added as a tree

    @property
    def has_large_d(self) -> bool:
        """Return whether this is the large-d kernel."""
        return isinstance(self.config, Sm90LargeDConfig)

    @property
    def reads_norms(self) -> bool:
        """Return whether an earlier launch computes inverse norms.

        They are norms of document tokens, and for the large-d kernel also norms of query tokens.
        """
        given = isinstance(self.config, Sm90LargeDConfig) or self.config.PRECOMPUTED_SCALES
        return self.config.NORMALIZE and given

    @property
    def kernel(self) -> str:
        """Return the name of the kernel."""
        return "maxsim_forward_wide" if self.has_large_d else "maxsim_forward_specialized"

    def tile(self) -> str:
        """Describe the tile of a program as text."""
        if isinstance(self.config, Sm90LargeDConfig):
            return _format_tile(LARGE_D_TILE_ROWS, self)
        return _format_tile(self.config.MMA_ROWS * (1 if self.config.SMALL_M else _ACCUMULATORS), self)


def _format_tile(rows: int, choice: Sm90Choice | RowMaximaChoice) -> str:
    """Describe the tile of a kernel that streams documents through shared memory."""
    return f"{rows} rows x {choice.config.BN} tokens, {choice.config.STAGES} stages, {choice.programs} programs"


# Maximum tokens of a tile that is longer than a document. Masking 256 tokens would spill registers.
_MAX_SHORT_DOCUMENT_TILE_TOKENS = 128
# For `maxsim_forward_wide`: (tokens of a tile, pipeline stages, cost of a token relative to the largest tile).
_LARGE_D_TILES = ((256, 4, 1.0), (128, 6, 1.05), (64, 8, 1.3))


def _select_least_waste(tiles: tuple[tuple[int, int, float], ...], Ld: int, most_packed: int = 0) -> tuple[int, int]:
    """Return the tokens and stages of the tile that wastes least on the last tile of a document.

    A tile with more than `most_packed` tokens may not be longer than a document.
    """
    fitting = [tile for tile in tiles if tile[0] <= max(Ld, most_packed)] or [min(tiles)]
    return min(fitting, key=lambda tile: cdiv(Ld, tile[0]) * tile[0] * tile[2])[:2]


def _make_large_d_config(Lq: int, Ld: int) -> Sm90LargeDConfig:
    """Return the configuration of the large-d kernel."""
    tokens, stages = _select_least_waste(_LARGE_D_TILES, Ld, _MAX_SHORT_DOCUMENT_TILE_TOKENS)
    slot = min(next_power_of_2(Lq), LARGE_D_TILE_ROWS // 2)
    return Sm90LargeDConfig(BN=tokens, ROWS_PER_QUERY=slot, STAGES=stages, SHORT_DOCUMENTS=tokens > Ld)


def _choose_tile(Ld: int, argmax: bool, normalize: bool, given: bool) -> tuple[int, int, bool]:
    """Return the tokens and stages of `maxsim_forward_specialized`, and whether registers hold the query rows.

    With argmax or precomputed norms, a warp group needs more time for a tile than the products of 64 tokens. Products
    of 128 tokens hide this time. They leave no registers for the query rows or for the computation of norms, and may
    waste more of the last tile.
    """
    waste = cdiv(Ld, _LARGE_TILE_TOKENS) * _LARGE_TILE_TOKENS / (cdiv(Ld, _SMALL_TILE_TOKENS) * _SMALL_TILE_TOKENS)
    if (
        (given or (argmax and not normalize))
        and Ld >= _LARGE_TILE_TOKENS
        and waste <= (_MAX_PADDING_RATIO if argmax else 1)
    ):
        return _LARGE_TILE_TOKENS, 4 if given else 5, False
    return _SMALL_TILE_TOKENS, 6, True


def configure_sm90(
    arch: Architecture, dtype: torch.dtype, Nq: int, K: int, Lq: int, Ld: int, d: int, *, normalize: bool, argmax: bool
) -> Sm90Choice | None:
    """Choose an sm_90 kernel for documents without a mask, or return None if `maxsim_forward` has to serve.

    All kernels give the same bits, so the choice may depend on Nq and K.
    """
    config: Sm90Config | Sm90LargeDConfig
    few = 0
    if (normalize or d > 128) and not supports_vector_loads(d, 0):  # `maxsim_forward` adds in another order
        return None
    if d <= 128:
        slot, rows = min(next_power_of_2(Lq), 128), SM90_TILE_ROWS
        few = (
            _count_small_m_rows(Nq, Lq, _MIN_SMALL_M_ROWS if argmax else _MAX_SMALL_M_ROWS)
            if normalize or argmax
            else 0
        )
        given = normalize and not few and cdiv(Nq * cdiv(Lq, slot) * slot, rows) >= _MIN_PRECOMPUTED_ROW_TILES
        tile = (*_select_least_waste(_SMALL_M_TILES, Ld), False) if few else _choose_tile(Ld, argmax, normalize, given)
        config = _make_config(tile, slot, d, few, ARGMAX=argmax, NORMALIZE=normalize, PRECOMPUTED_SCALES=given)
    elif argmax or (normalize and Nq * Lq > MAX_QUERY_NORMS):
        return None  # with argmax `maxsim_forward` sums the parts of a query in another order
    else:
        config, rows = _make_large_d_config(Lq, Ld)._replace(NORMALIZE=normalize), LARGE_D_TILE_ROWS
    parts = cdiv(Lq, config.ROWS_PER_QUERY)
    row_tiles = cdiv(Nq * parts * config.ROWS_PER_QUERY, rows)
    pairs = row_tiles * K
    fits = (
        Lq >= 2 and Ld >= (1 if d > 128 else config.BN) and pairs < 2**31 and Nq * parts * config.ROWS_PER_QUERY < 2**31
    )
    # The generic kernel computes norms between its products. This kernel computes norms during its products.
    least = 0 if few else rows // 4 if normalize and d <= 128 else rows // 2
    one_is_enough = Lq > MAX_WHOLE_QUERY_TOKENS or (d > 128 and Ld >= _MIN_LARGE_D_TOKENS)
    enough = one_is_enough or pairs >= int(arch.processors * _MIN_PAIRS_PER_SM)
    worth = Nq * parts * config.ROWS_PER_QUERY > least and enough
    if arch.name != "sm_90" or dtype not in (torch.float16, torch.bfloat16) or not (fits and worth):
        return None
    return Sm90Choice(config, parts, row_tiles, _count_programs(arch.processors, row_tiles, pairs))


def configure_small_m_split(arch: Architecture, Nq: int, K: int, Lq: int, Ld: int, d: int) -> Sm90Choice | None:
    """Choose the small-M kernel for few fp32 query rows that `maxsim_forward` would split.

    Documents have no mask. Return None if `maxsim_forward` has to serve.
    """
    tile, few = (*_select_least_waste(_FP32_SMALL_M_TILES, Ld), False), _count_small_m_rows(Nq, Lq, _MIN_SMALL_M_ROWS)
    config = _make_config(tile, next_power_of_2(Lq), d, few, ARGMAX=False, SPLIT_FP32=True)
    fits = few and Lq >= 2 and Ld >= config.BN and d <= 128 and K * Ld < 2**31
    if arch.name != "sm_90" or not fits or arch.processors // 2 > K:
        return None
    return Sm90Choice(config, 1, 1, min(arch.processors, K))


def _count_programs(processors: int, row_tiles: int, pairs: int) -> int:
    """Return one program per SM, or slightly fewer to get a multiple of the row tiles.

    With a multiple, all programs of a document read it at the same time.
    """
    aligned = processors // row_tiles * row_tiles
    return min(aligned if aligned >= 0.95 * processors else processors, pairs)


def _count_small_m_rows(Nq: int, Lq: int, most: int = _MAX_SMALL_M_ROWS) -> int:
    """Return the query rows of the single product of a tile, or 0 if there are more than `most`."""
    rows = max(_MIN_SMALL_M_ROWS, Nq * next_power_of_2(Lq))
    return next_power_of_2(rows) if rows <= most else 0


def _make_config(tile: tuple[int, int, bool], slot: int, d: int, few: int, **options: Any) -> Sm90Config:
    """Return the configuration of a tile.

    `few` is the number of rows of the small-M kernel, or 0.
    """
    tokens, stages, resident = tile
    rows = {"MMA_ROWS": few, "SMALL_M": True} if few else {}
    return Sm90Config(
        BN=tokens,
        BD=64 if d <= 64 else 128,
        ROWS_PER_QUERY=slot,
        STAGES=stages,
        OPERAND_IN_REGISTERS=resident,
        **{**options, **rows},
    )


def _choose_int8_tile(Ld: int, few: int, each_token: bool, terms: int) -> tuple[int, int, bool]:
    """Return the tokens and stages of a tile, and whether registers hold the query rows.

    Few query rows wait for documents, so the tile with the least waste is best. With two terms, a warp group needs more
    time for a tile than its products. Then larger tiles are used if the last tile of a document wastes nothing, and if
    token scales do not need the registers.
    """
    if few:
        return *_select_least_waste(_INT8_SMALL_M_TILES, Ld), False
    large = terms == 2 and not each_token and Ld >= _LARGE_TILE_TOKENS and -Ld % _LARGE_TILE_TOKENS < _SMALL_TILE_TOKENS
    return _INT8_LARGE_TILE if large else _INT8_TILE


def _supports_encoded(config: Sm90Config, Lq: int, Ld: int, d: int, counts: tuple[int, ...]) -> bool:
    """Return whether a kernel serves dense documents with 8-bit encodings.

    TMA needs rows that start at multiples of 16 bytes.

    Args:
        config: configuration of the kernel.
        Lq: number of tokens of a query.
        Ld: number of tokens of a document.
        d: number of features.
        counts: numbers of elements that must fit 32 bits.
    """
    return Lq >= 2 and Ld >= config.BN and d <= 128 and d % 16 == 0 and max(counts) < 2**31


def configure_int8(
    arch: Architecture, dtype: torch.dtype, Nq: int, K: int, Lq: int, Ld: int, d: int, *, each_token: bool, terms: int
) -> Sm90Choice | None:
    """Choose an sm_90 kernel for dense int8 documents without a mask.

    Return None if the kernel of packed documents has to serve. All kernels give the same bits, so the choice may depend
    on Nq and K.

    Args:
        arch: architecture that runs the kernel.
        dtype: dtype of the queries.
        Nq: number of queries.
        K: number of documents.
        Lq: number of tokens of a query.
        Ld: number of tokens of a document.
        d: number of features.
        each_token: whether each token has its own scale.
        terms: number of int8 terms of a query row.
    """
    if arch.name != "sm_90":
        return None
    rows, tree = 64 // terms, forward_configs.get_packed_tree_rows(arch, dtype, Lq, d, stored="int8")
    few = _count_small_m_rows(Nq, Lq, _MAX_SMALL_M_ROWS // terms) if next_power_of_2(Lq) <= tree else 0
    slot = next_power_of_2(Lq) if few else min(next_power_of_2(Lq), 2 * rows, tree)
    parts = cdiv(Lq, slot)
    row_tiles = cdiv(Nq * parts * slot, _ACCUMULATORS * rows)
    tile = _choose_int8_tile(Ld, few, each_token, terms)
    config = _make_config(
        tile, slot, d, few, ARGMAX=False, PRECOMPUTED_SCALES=each_token, MMA_ROWS=rows, INT8_TERMS=terms
    )
    pairs = row_tiles * K
    fits = _supports_encoded(config, Lq, Ld, d, (pairs, Nq * parts * slot, K * Ld)) and not (each_token and Ld % 4)
    if not fits or pairs < arch.processors // 2:
        return None
    return Sm90Choice(config, parts, row_tiles, _count_programs(arch.processors, row_tiles, pairs), tree // slot)


def configure_fp8(
    arch: Architecture, dtype: torch.dtype, Nq: int, K: int, Lq: int, Ld: int, d: int, *, kept: str
) -> Sm90Choice | None:
    """Choose an sm_90 kernel for dense FP8 documents without a mask, encoded as `kept`.

    Return None if the kernel of packed documents has to serve.
    """
    if arch.name != "sm_90" or dtype not in HALF_DTYPES:
        return None
    slot, few = min(next_power_of_2(Lq), 128), _count_small_m_rows(Nq, Lq)
    parts = cdiv(Lq, slot)
    rows = Nq * parts * slot
    row_tiles = cdiv(rows, SM90_TILE_ROWS)
    tile = (
        (*_select_least_waste(_FP8_SMALL_M_TILES if few == _MIN_SMALL_M_ROWS else _FP8_SMALL_M_TILES[:1], Ld), False)
        if few
        else _FP8_TILE
    )
    config = _make_config(tile, slot, d, few, ARGMAX=False, PRECOMPUTED_SCALES=True, ENCODING=kept)
    pairs = row_tiles * K
    if not _supports_encoded(config, Lq, Ld, d, (pairs, rows, K * Ld)) or pairs < arch.processors // 2:
        return None
    return Sm90Choice(config, parts, row_tiles, _count_programs(arch.processors, row_tiles, pairs))
