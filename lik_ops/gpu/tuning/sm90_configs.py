"""Configuration of the Gluon kernels of sm_90.

The kernels are `maxsim_row_maxima_sm90`, `maxsim_forward_sm90`, and `maxsim_forward_sm90_large_d`. A function returns
the configuration for any sizes of 1 or more. `lik_ops.gpu.supports` says whether the kernel then serves the call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...csrc_triton.common.arguments import SizeArgs, Sm90Config, Sm90LargeDConfig
from ...csrc_triton.formats.bits import get_code_bits
from . import forward_configs
from .architectures import Architecture, KernelKey, cdiv, next_power_of_2

# Accumulators of 64 rows in a program of `maxsim_forward_sm90`, except in the small-M kernel.
_ACCUMULATORS = 4
# Query rows of a program of `maxsim_forward_sm90` and `maxsim_forward_sm90_large_d`.
SM90_TILE_ROWS, LARGE_D_TILE_ROWS = 64 * _ACCUMULATORS, 128
# With so many rows, the maxima of one document fill the workspace of `maxsim_row_maxima_sm90`.
MAX_WORKSPACE_ROWS = 6 * 2**20
# Maximum rows per query that `maxsim_row_maxima_sm90` sums itself.
_MAX_ROWS_PER_QUERY = 128
# Minimum row tiles for which a separate launch that computes the norms of document tokens pays off.
_MIN_PRECOMPUTED_ROW_TILES = 6
# With argmax, large tiles may multiply at most 7 % more than small tiles.
_MAX_PADDING_RATIO = 1.07
MAX_QUERY_NORMS = 2**21  # in a workspace of the large-d kernel
# (row tile, document) pairs per SM from which these kernels are faster than `maxsim_forward`. One pair is enough for
# queries of more than `MAX_WHOLE_QUERY_TOKENS` tokens, which `maxsim_forward` scores one part after the other. One pair
# is also enough for the large-d kernel and documents of `MIN_LARGE_D_TOKENS` tokens.
# Measured on H100 and H200, 2026-11-26: `benchmarks/results/sweep_pairs.json`.
MIN_PAIRS_PER_SM, MAX_WHOLE_QUERY_TOKENS, MIN_LARGE_D_TOKENS = 0.48, 128, 512
# `maxsim_row_maxima_sm90` sums rows itself if queries fill this share of ROWS_PER_QUERY. Otherwise packed rows and a
# second launch for the sums are faster.
_MIN_FILL_RATIO = 0.9
_MIN_SMALL_M_ROWS, _MAX_SMALL_M_ROWS = 32, 128  # query rows, or their terms, in the single product of a tile


class Sm90Tile(NamedTuple):
    """Document tokens of a tile, pipeline stages, whether registers hold the query rows, and the cost of a token."""

    tokens: int
    stages: int
    in_registers: bool = False
    cost: float = 1.0  # relative to the other tiles of a tuple


# Tiles of `maxsim_forward_sm90` for many query rows. With argmax or precomputed norms, a warp group needs more
# time for a tile than the products of 64 tokens. Products of 128 tokens hide this time. They leave no registers for the
# query rows or for the computation of norms, and may waste more of the last tile of a document.
_TILE = Sm90Tile(tokens=64, stages=6, in_registers=True)
_ARGMAX_TILE, _NORMS_TILE = Sm90Tile(tokens=128, stages=5), Sm90Tile(tokens=128, stages=4)
_INT8_TILE, _INT8_LARGE_TILE = Sm90Tile(tokens=64, stages=8, in_registers=True), Sm90Tile(tokens=128, stages=6)
# By fp16 terms of a token: as many stages of fp32 tiles and of their terms as fit. The terms `hi` of the query rows are
# in registers.
_SPLIT_TILES = {n: Sm90Tile(tokens=64, stages=4 - n, in_registers=True) for n in (1, 2)}
_PRECOMPUTED_SPLIT_STAGES = 4
# Row tiles from which a launch that splits the documents first costs less than splitting them for each row tile.
_MIN_SPLIT_ROW_TILES = 6
# For few query rows, which wait for documents: the tile that wastes least on the last tile of a document.
SMALL_M_TILES = {
    "": (Sm90Tile(tokens=64, stages=3),),
    "int8": (Sm90Tile(tokens=64, stages=6),),
    "fp8": (Sm90Tile(tokens=64, stages=2), Sm90Tile(tokens=128, stages=2, cost=0.85)),
    "fp32": (Sm90Tile(tokens=64, stages=1),),
    "bits": (Sm90Tile(tokens=64, stages=8),),  # more stages are not faster: `benchmarks/results/sweep_encoded.json`
    "bits4": (Sm90Tile(tokens=64, stages=6),),
}
# Registers per thread at the start of a small-M program, whose 12 warps are half of the threads of two programs.
_TWO_PROGRAMS_REGISTERS = 80
# For `maxsim_forward_sm90_large_d`.
_LARGE_D_TILES = (
    Sm90Tile(tokens=256, stages=4),
    Sm90Tile(tokens=128, stages=6, cost=1.05),
    Sm90Tile(tokens=64, stages=8, cost=1.3),
)
# Maximum tokens of a tile that is longer than a document. Masking 256 tokens would spill registers.
_MAX_SHORT_DOCUMENT_TILE_TOKENS = 128


class RowMaximaChoice(NamedTuple):
    """The configuration of `maxsim_row_maxima_sm90` and of the sums after it.

    `sums` has the rows per query, the queries and documents of a program, and the tree levels.
    """

    config: Sm90Config
    programs: int
    sums: tuple[int, int, int, int]
    pairs: int  # (row tile, document) pairs

    @property
    def kernel(self) -> str:
        """Return the name of the kernel."""
        return "maxsim_row_maxima_sm90"

    def tile(self) -> str:
        """Describe the tile of a program as text."""
        return _format_tile(SM90_TILE_ROWS, self)


def configure_row_maxima(
    arch: Architecture, dtype: torch.dtype, rows: int, K: int, Lq: int, d: int, *, argmax: bool, dense: bool = False
) -> RowMaximaChoice:
    """Return the configuration of the row maxima kernel.

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
    slot, levels = forward_configs.configure_row_sums(KernelKey(arch, dtype, d, False, False, 0), Lq)
    lanes = max(slot, 128)
    config = _make_config(_TILE, next_power_of_2(Lq) if sums else slot, d, 0, ARGMAX=argmax, SUM_ROWS=sums)
    sizes, pairs = (slot, lanes // slot, 1024 // lanes, levels), row_tiles * K
    return RowMaximaChoice(config, min(arch.processors, pairs), sizes, pairs)


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
    def is_small_m(self) -> bool:
        """Return whether this is the small-M kernel, whose query rows are one tile."""
        return self.config.SMALL_M

    @property
    def reads_norms(self) -> bool:
        """Return whether an earlier launch computes inverse norms.

        They are norms of document tokens, and for the large-d kernel also norms of query tokens. Norms of masked tokens
        are negative.
        """
        if isinstance(self.config, Sm90LargeDConfig):
            return self.config.NORMALIZE or self.config.MASK
        return self.config.NORMALIZE and self.config.PRECOMPUTED_SCALES and not self.config.FP32_TERMS

    @property
    def launch_options(self) -> dict[str, int]:
        """Return the launch options of the kernel."""
        has_two_programs = isinstance(self.config, Sm90Config) and self.config.PROGRAMS_PER_SM == 2
        return {"num_warps": 4} | ({"maxnreg": _TWO_PROGRAMS_REGISTERS} if has_two_programs else {})

    @property
    def kernel(self) -> str:
        """Return the name of the kernel."""
        return "maxsim_forward_sm90_large_d" if self.has_large_d else "maxsim_forward_sm90"

    def tile(self) -> str:
        """Describe the tile of a program as text."""
        text = _format_tile(_count_tile_rows(self.config) // (_ACCUMULATORS if self.is_small_m else 1), self)
        first = isinstance(self.config, Sm90Config) and self.config.PRECOMPUTED_TERMS
        return text + (", documents split first" if first else "")


def _format_tile(rows: int, choice: Sm90Choice | RowMaximaChoice) -> str:
    """Describe the tile of a kernel that streams documents through shared memory."""
    return f"{rows} rows x {choice.config.BN} tokens, {choice.config.STAGES} stages, {choice.programs} programs"


def _count_tile_rows(config: Sm90Config | Sm90LargeDConfig) -> int:
    """Return the query rows of a program, or more than all rows of the small-M kernel."""
    return LARGE_D_TILE_ROWS if isinstance(config, Sm90LargeDConfig) else _ACCUMULATORS * config.MMA_ROWS


def _make_choice(
    arch: Architecture, config: Sm90Config | Sm90LargeDConfig, Nq: int, K: int, Lq: int, tree: int = 2
) -> Sm90Choice:
    """Return the choice of a configuration.

    There is one program per SM, or slightly fewer to get a multiple of the row tiles. With a multiple, all programs of
    a document read it at the same time.
    """
    parts = cdiv(Lq, config.ROWS_PER_QUERY)
    row_tiles = cdiv(Nq * parts * config.ROWS_PER_QUERY, _count_tile_rows(config))
    max_programs = arch.processors * (config.PROGRAMS_PER_SM if isinstance(config, Sm90Config) else 1)
    aligned_programs = max_programs // row_tiles * row_tiles
    programs = aligned_programs if aligned_programs >= 0.95 * max_programs else max_programs
    return Sm90Choice(config, parts, row_tiles, min(programs, row_tiles * K), tree)


def _select_least_waste(tiles: tuple[Sm90Tile, ...], Ld: int, most_packed: int = 0) -> Sm90Tile:
    """Return the tile that wastes least on the last tile of a document.

    A tile with more than `most_packed` tokens may not be longer than a document.
    """
    fitting_tiles = [tile for tile in tiles if tile.tokens <= max(Ld, most_packed)] or [min(tiles)]
    return min(fitting_tiles, key=lambda tile: cdiv(Ld, tile.tokens) * tile.tokens * tile.cost)


def _choose_tile(Ld: int, argmax: bool, normalize: bool, has_norms: bool) -> Sm90Tile:
    """Return the tile of `maxsim_forward_sm90` for many query rows."""
    large_tile = _NORMS_TILE if has_norms else _ARGMAX_TILE
    waste = cdiv(Ld, large_tile.tokens) * large_tile.tokens / (cdiv(Ld, _TILE.tokens) * _TILE.tokens)
    is_worthwhile = (has_norms or (argmax and not normalize)) and waste <= (_MAX_PADDING_RATIO if argmax else 1)
    return large_tile if is_worthwhile and Ld >= large_tile.tokens else _TILE


def configure_sm90(
    arch: Architecture, sizes: SizeArgs, d: int, *, normalize: bool, argmax: bool, masked: bool = False
) -> Sm90Choice:
    """Return the configuration of an sm_90 kernel for half-precision documents, without a mask up to 128 features."""
    Nq, K, Lq, Ld = sizes
    if d > 128:
        return _make_choice(arch, _make_large_d_config(Lq, Ld, normalize, argmax, masked), Nq, K, Lq)
    small_m_limit = _MIN_SMALL_M_ROWS if argmax else _MAX_SMALL_M_ROWS if normalize else 0
    small_m_rows, slot = _count_small_m_rows(Nq, Lq, small_m_limit), min(next_power_of_2(Lq), 128)
    row_tiles = cdiv(Nq * cdiv(Lq, slot) * slot, SM90_TILE_ROWS)
    has_norms = normalize and not small_m_rows and row_tiles >= _MIN_PRECOMPUTED_ROW_TILES
    tile = (
        _select_least_waste(SMALL_M_TILES[""], Ld) if small_m_rows else _choose_tile(Ld, argmax, normalize, has_norms)
    )
    options = {"ARGMAX": argmax, "NORMALIZE": normalize, "PRECOMPUTED_SCALES": has_norms}
    return _make_choice(arch, _make_config(tile, slot, d, small_m_rows, **options), Nq, K, Lq)


def _make_large_d_config(Lq: int, Ld: int, normalize: bool, argmax: bool, masked: bool) -> Sm90LargeDConfig:
    """Return the configuration of `maxsim_forward_sm90_large_d`."""
    # An argmax of 256 tokens would spill registers.
    tile = _select_least_waste(_LARGE_D_TILES[argmax:], Ld, _MAX_SHORT_DOCUMENT_TILE_TOKENS)
    return Sm90LargeDConfig(
        BN=tile.tokens,
        ROWS_PER_QUERY=min(next_power_of_2(Lq), LARGE_D_TILE_ROWS // 2),
        STAGES=tile.stages,
        NORMALIZE=normalize,
        ARGMAX=argmax,
        MASK=masked,
        SHORT_DOCUMENTS=tile.tokens > Ld,
    )


def configure_fp32_split(
    arch: Architecture,
    sizes: SizeArgs,
    d: int,
    *,
    terms: int,
    normalize: bool = False,
    argmax: bool = False,
    masked: bool = False,
    first: bool = False,
) -> Sm90Choice:
    """Return the configuration for fp32 tokens that are split into fp16 terms: one if TF32 is allowed, else two.

    A launch splits the documents first if there are many query rows, or if `first` requires it. It also computes norms.
    """
    Nq, K, Lq, Ld = sizes
    tree = forward_configs.get_packed_tree_rows(KernelKey(arch, torch.float32, d, False, False, 0), Lq)
    small_m_rows = _count_small_m_rows(Nq, Lq, _MIN_SMALL_M_ROWS)
    tile = _select_least_waste(SMALL_M_TILES["fp32"], Ld) if small_m_rows else _SPLIT_TILES[terms]
    slot = next_power_of_2(Lq) if small_m_rows else min(next_power_of_2(Lq), 128, tree)
    options = {"NORMALIZE": normalize, "ARGMAX": argmax, "FP32_TERMS": terms, "PRECOMPUTED_SCALES": not small_m_rows}
    config = _make_config(tile, slot, d, small_m_rows, **options)
    choice = _make_choice(arch, config, Nq, K, Lq, tree // slot)
    if small_m_rows or not (first or choice.row_tiles >= _MIN_SPLIT_ROW_TILES):
        return choice
    config = config._replace(PRECOMPUTED_TERMS=True, MASK=masked, STAGES=_PRECOMPUTED_SPLIT_STAGES)
    return choice._replace(config=config)


def _count_small_m_rows(Nq: int, Lq: int, limit: int = _MAX_SMALL_M_ROWS) -> int:
    """Return the query rows of the single product of a tile, or 0 if there are more than `limit`."""
    rows = max(_MIN_SMALL_M_ROWS, Nq * next_power_of_2(Lq))
    return next_power_of_2(rows) if rows <= limit else 0


def _make_config(tile: Sm90Tile, slot: int, d: int, small_m_rows: int, **options: Any) -> Sm90Config:
    """Return the configuration of a tile.

    `small_m_rows` is the number of rows of the small-M kernel, or 0.
    """
    if small_m_rows:
        options |= {"MMA_ROWS": small_m_rows, "SMALL_M": True}
    config = Sm90Config(
        BN=tile.tokens,
        BD=64 if d <= 64 else 128,
        ROWS_PER_QUERY=slot,
        STAGES=tile.stages,
        OPERAND_IN_REGISTERS=tile.in_registers,
        **options,
    )
    return config._replace(PING_PONG=bool(small_m_rows) or _profits_from_turns(config))


def _profits_from_turns(config: Sm90Config) -> bool:
    """Return whether consumer warp groups should issue their products in turns.

    They should not if the products of a tile take less time than its maxima, as in 8 bits, or if a warp group waits for
    its own products before it issues others, as with two fp16 terms.
    Measured on an H200, 2026-11-29: `benchmarks/results/sweep_turns.json`.
    """
    return not (config.INT8_TERMS or config.ENCODING == "fp8_fp8" or config.FP32_TERMS == 2)


def configure_int8(
    arch: Architecture,
    dtype: torch.dtype,
    sizes: SizeArgs,
    d: int,
    *,
    each_token: bool,
    terms: int,
    encoding: str = "",
) -> Sm90Choice:
    """Return the configuration of an sm_90 kernel for dense int8 or code documents without a mask.

    Each query row of `dtype` has so many int8 `terms`. `each_token` says whether each token has its own scale.
    `encoding` is the encoding of codes, else "".
    """
    Nq, K, Lq, Ld = sizes
    rows = 64 // terms
    tree = forward_configs.get_packed_tree_rows(KernelKey(arch, dtype, d, False, False, 0), Lq, "int8")
    small_m_rows = _count_small_m_rows(Nq, Lq, _MAX_SMALL_M_ROWS // terms) if next_power_of_2(Lq) <= tree else 0
    slot = next_power_of_2(Lq) if small_m_rows else min(next_power_of_2(Lq), 2 * rows, tree)
    # With two terms, a warp group needs more time for a tile than its products. Then larger tiles are used if the last
    # tile of a document wastes nothing, and if token scales do not need the registers.
    size = _INT8_LARGE_TILE.tokens
    is_large = terms == 2 and not each_token and Ld >= size and -Ld % size < _INT8_TILE.tokens
    options: dict[str, Any] = {"ARGMAX": False, "PRECOMPUTED_SCALES": each_token}
    options |= {"MMA_ROWS": rows, "INT8_TERMS": terms}
    if encoding:
        tile = SMALL_M_TILES["bits" if get_code_bits(encoding) < 4 else "bits4"][0] if small_m_rows else _INT8_TILE
        options |= {"ENCODING": encoding, "PROGRAMS_PER_SM": 2 if small_m_rows == _MIN_SMALL_M_ROWS else 1}
    elif small_m_rows:
        tile = _select_least_waste(SMALL_M_TILES["int8"], Ld)
    else:
        tile = _INT8_LARGE_TILE if is_large else _INT8_TILE
    return _make_choice(arch, _make_config(tile, slot, d, small_m_rows, **options), Nq, K, Lq, tree // slot)


def configure_fp8(arch: Architecture, sizes: SizeArgs, d: int, *, encoding: str, each_token: bool = True) -> Sm90Choice:
    """Return the configuration of an sm_90 kernel for dense FP8 documents of `encoding` without a mask.

    With "fp8_fp8", query rows are FP8, too. `each_token` says whether each token has its own scale. Only FP8 queries
    make use of a scale that tokens share.
    """
    Nq, K, Lq, Ld = sizes
    small_m_rows, tiles = _count_small_m_rows(Nq, Lq), SMALL_M_TILES["fp8"]
    if encoding == "fp8_fp8":
        tile = SMALL_M_TILES["int8"][0] if small_m_rows else _INT8_TILE
    elif small_m_rows:
        tile = _select_least_waste(tiles if small_m_rows == _MIN_SMALL_M_ROWS else tiles[:1], Ld)
    else:
        tile = _TILE
    options = {"ARGMAX": False, "PRECOMPUTED_SCALES": each_token or encoding != "fp8_fp8", "ENCODING": encoding}
    return _make_choice(arch, _make_config(tile, min(next_power_of_2(Lq), 128), d, small_m_rows, **options), Nq, K, Lq)
