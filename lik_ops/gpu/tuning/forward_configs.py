"""Which tile a forward takes of `forward_table`, or of a table that was measured.

The choice depends on Lq, d, dtype and architecture, so a score has the same bits whatever batch it is computed in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...csrc_triton.common.arguments import Config
from ...csrc_triton.formats.encoded import is_fp8
from ...csrc_triton.formats.residual import bucket_bits, in_words
from ...formats.table import INT8_QUERIES
from .. import triton_versions
from .architectures import Architecture, Kind, Launch, cdiv, loads_vectors, next_power_of_2, precision
from .forward_table import ANY, FORWARD, Tile

SPLITTING = ("wgmma", "interpreter")  # units that multiply fp32 as sums of fp16 terms
_PROCESSORS = 132  # of an H100 or H200
_SOME = 3_000  # documents of one query, beyond which an H100 is busy for long
# Ragged documents that are all at work at a time: the longest decides, so pipelines are deep.
RESIDENT = 8 * _PROCESSORS
LEAST_SLOT = 16  # rows of a query of ragged layouts
_RAGGED_ROWS = 128  # query rows of a tile of ragged layouts, at most
_MOST_CODED = 512  # that decoded codes meet
_INT8_STEP = 32  # features of one instruction of the matrix unit
TERMS = {"int8": 2, INT8_QUERIES: 1}  # of a query row, by `Config.STORED`
_FP8_REGISTERS = 96
_MOST_INT8 = 256  # features whose products of int8 terms are sums of 32 bits


def forward_tiles(
    arch: Architecture, dtype: torch.dtype, Lq: int, d: int, normalize: bool, wide: int
) -> tuple[Tile, ...]:
    """The tiles of the rule that covers a call. Rows that are loaded feature by feature take those of wide offsets."""
    if not loads_vectors(d, wide):
        wide = 2
    for rule in (*arch.measured, *FORWARD):
        if rule.unit == arch.unit and rule.covers(dtype, max(Lq, 1), d, normalize, wide):
            return rule.tiles
    raise AssertionError(f"lik_ops: no tile for {arch.unit}, {dtype}")


def forward_tile(tiles: tuple[Tile, ...], Nq: int, Lq: int, candidates: bool, documents: int) -> tuple[Tile, int]:
    """The tile of a call among those of its rule, and the rows that each query has in it."""
    most = tiles[-1].rows
    slot = min(next_power_of_2(max(Lq, 1)), most)
    rows = slot if candidates else min(Nq * slot, most)
    serving = [tile for tile in tiles if tile.rows >= slot and tile.documents >= documents]
    tile = next(tile for tile in serving if tile.rows >= rows)
    if not candidates and cdiv(Nq * slot, tile.rows) * documents < _PROCESSORS:
        tile = serving[0]  # else most multiprocessors would idle
    return tile, slot


def config_of(kind: Kind, tile: Tile, slot: int, *, tf32: bool) -> Config:
    """What a tile, and the rows that a query has in it, say of a forward."""
    BD = min(max(next_power_of_2(kind.d), 16), tile.features)
    lanes = 4 if kind.arch.unit in ("wgmma", "interpreter") else 1
    products = precision(kind.dtype, kind.arch, tf32)
    return kind.config(tile.rows, tile.tokens, BD, SLOT=slot, LANES=lanes, PRECISION=products)


def forward(kind: Kind, Nq: int, Lq: int, *, tf32: bool, documents: int = ANY, argmax: bool = False) -> Launch:
    """The tile of a forward: it holds whole queries, each in a slot of the next power of two, or a part of one.

    `documents` are all that are scored: Nd, or Nq * K candidates.
    """
    arch, dtype, d, candidates, normalize, wide = kind
    tiles = forward_tiles(arch, dtype, Lq, d, normalize, wide)
    tile, slot = forward_tile(tiles, Nq, Lq, candidates, documents)
    config = config_of(kind, tile, slot, tf32=tf32)
    splits = dtype == torch.float32 and arch.unit in SPLITTING and not (tf32 or normalize) and config.ONE_CHUNK
    config = config._replace(
        BN=min(tile.tokens, 32 if arch.name == "sm_100" else 64) if argmax else tile.tokens,  # winners take registers
        TOKENS_FIRST=tile.tokens_first,
        WALK=tile.walkers > 0 and not splits and config.ONE_CHUNK and Lq <= slot and not candidates,
        # Where it changes nothing it is set on mma and to split rows, for which ptxas spills without the loop.
        LONG=Lq > slot or (slot == tiles[-1].rows and (arch.unit == "mma" or splits)),
        SPLIT=splits,
    )
    stages = 1 if splits and argmax else tile.stages  # winners take registers
    return Launch(config, tile.warps, stages, tile.registers or arch.registers, tile.walkers)


def paced(launch: Launch, arch: Architecture, documents: int) -> Launch:
    """The forward of scores alone. An H100 is faster with fewer programs that each ask further ahead: its memory is
    slower than that of the H200, which the table was measured on."""
    few = launch.config.TOKENS_FIRST and launch.num_stages == 1 and not arch.measured
    return replace(launch, num_stages=2 if documents <= _SOME else 3) if few and "H100" in arch.gpu else launch


def with_winners(launch: Launch, reads_tiles: bool) -> Launch:
    """The forward where winners are wanted: a program for each document. Beside one tile of one query, as many programs
    share a multiprocessor as without them."""
    few = reads_tiles and launch.config.TOKENS_FIRST and launch.num_stages == 1 and launch.config.BD <= 128
    return replace(launch.visiting(), max_registers=64) if few else launch.visiting()


def forward_split(launch: Launch, Lq: int) -> Launch:
    """The forward on rows that are split already: its registers serve deeper pipelines and more rows."""
    config = launch.config
    if Lq > config.SLOT:
        return replace(launch, num_stages=2)
    return replace(launch, config=config._replace(BM=2 * config.BM, LONG=False), num_stages=3)


def _by_terms(launch: Launch, arch: Architecture, d: int, terms: int) -> Launch:
    """The forward of int8 documents, by int8 terms of each query row: two take registers as for twice the rows."""
    BD = max(launch.config.BD, next_power_of_2(d), _INT8_STEP)
    config = launch.config._replace(BD=BD, ONE_CHUNK=True, TERMS=terms)
    if arch.unit == "wgmma" and config.BM > 32:
        config = config._replace(BM=64, BN=128, SLOT=min(config.SLOT, 64), TOKENS_FIRST=False)
        return replace(launch, config=config, num_warps=4, num_stages=3, max_registers=None)
    return replace(launch, config=config)


class _Ragged(NamedTuple):
    """What registers of the ragged kernel hang on, beside the dense tile that it begins with."""

    unit: str
    argmax: bool
    sums_squares: bool
    few: bool
    bare: bool  # nothing is asked for that takes registers
    converts: bool  # numbers of documents to fp32
    codes: bool  # decodes residual codes
    crowded: bool  # the same beside winners or offsets of 64 bits

    def rows(self, launch: Launch, arch: Architecture) -> Launch:
        """Bounds that are read take registers: fewer rows than elsewhere."""
        if launch.config.BM <= _RAGGED_ROWS:
            return launch
        config = launch.config._replace(BM=_RAGGED_ROWS, SLOT=min(launch.config.SLOT, _RAGGED_ROWS))
        warps, stages = 8 if self.sums_squares else 4, min(launch.num_stages, 3)
        return replace(launch, config=config, num_warps=warps, num_stages=stages, max_registers=arch.registers)

    def spills(self, config: Config) -> bool:
        """Whether ptxas spills with as many tokens in a step as elsewhere, whatever documents are kept as."""
        split = config.SPLIT and config.BM < _RAGGED_ROWS
        winners = self.argmax and (self.unit == "mma" or (self.crowded and not config.TOKENS_FIRST))
        return split or winners

    def tokens(self, config: Config) -> int:
        """Of a step."""
        if self.unit == "mma" and (self.converts or self.crowded):
            return 16
        most = 64 if self.codes and not config.ONE_CHUNK else config.BN
        return min(config.BN, 32 if self.converts or self.spills(config) else most)

    def warps(self, launch: Launch, stored: Any) -> Launch:
        """With as many as ptxas does not spill in."""
        wgmma = self.unit == "wgmma"
        if self.crowded or (self.codes and wgmma):
            many = launch.config.BM == _RAGGED_ROWS or (wgmma and not launch.config.ONE_CHUNK)
            warps = 8 if many else launch.num_warps
            return replace(launch, num_warps=warps, max_registers=255)
        return replace(launch, num_warps=8) if self.converts and stored == "bits" and wgmma else launch

    def registers(self, launch: Launch, stored: Any) -> Launch:
        """FP8 beside few rows: five programs share a multiprocessor, not four, where ptxas does not spill, as that of
        Triton 3.9 does."""
        few_rows = launch.config.TOKENS_FIRST and launch.config.ONE_CHUNK and self.unit == "wgmma"
        shares = is_fp8(stored) and few_rows and self.bare and not self.converts and triton_versions.release() < (3, 7)
        return replace(launch, max_registers=_FP8_REGISTERS) if shares else launch

    def stages(self, launch: Launch) -> Launch:
        config = launch.config
        if config.TOKENS_FIRST and self.unit == "wgmma" and self.few and not self.codes:
            return replace(launch, num_stages=4)
        if self.codes and not config.ONE_CHUNK:
            return replace(launch, num_stages=1)  # each further stage would hold centroids' rows, of fp32 too
        if config.SPLIT and self.argmax and self.spills(config) and triton_versions.release() >= (3, 9):
            return replace(launch, num_stages=2)  # one stage spills there, two before
        return launch


def _walking(launch: Launch, arch: Architecture, Nq: int, normalize: bool) -> Launch:
    """The forward of residual codes in words, without winners: what is decoded meets as many rows as fit."""
    config = launch.config
    if arch.unit != "wgmma":
        walkers = 1 if arch.unit == "interpreter" else 8 * _PROCESSORS
        config = config._replace(WALK=True, BN=min(config.BN, 32) if arch.name == "sm_100" else config.BN)
        return replace(launch, config=config, walkers=walkers, max_registers=255)
    rows = max(config.BM, min(next_power_of_2(Nq * config.SLOT), _MOST_CODED))
    warps, each = (8, 1) if rows > 64 else (4, 2 if normalize else 3)
    launch = replace(launch, config=config._replace(BM=rows, WALK=True), num_warps=warps, num_stages=1)
    return replace(launch, max_registers=168 if each == 3 else 255, walkers=each * _PROCESSORS)


def _sums_squares(dtype: torch.dtype, normalize: bool, stored: Any) -> bool:
    """Whether ragged layouts take the tiles of `normalize`, as fp32 queries beside what is stored do."""
    return (normalize and not stored) or (bool(stored) and dtype == torch.float32)


def ragged_tree(
    arch: Architecture, dtype: torch.dtype, Lq: int, d: int, *, stored: Any, normalize: bool = False, wide: int = 0
) -> int:
    """The rows of a query whose maxima ragged layouts add up as one tree."""
    return forward_tiles(arch, dtype, Lq, d, _sums_squares(dtype, normalize, stored), wide)[-1].rows


def forward_ragged(
    kind: Kind,
    Nq: int,
    Lq: int,
    *,
    tf32: bool,
    argmax: bool,
    longest: int | None = None,
    few: bool = False,
    bare: bool = False,
    stored: Any = "",
) -> tuple[Launch, int]:
    """The tile of ragged layouts whose queries have `Lq` tokens in the mean, and the levels of the trees of their sums.

    No query has more tokens than `longest`, if it is known. One takes as many steps of the slot as it needs. Bounds
    that are read take registers: fewer rows than elsewhere. `few`: at most `RESIDENT` documents are scored.
    `bare`: there is no mask, no weight and no length of a query. `stored`: `Config.STORED`. The norms of such documents
    are in what their numbers count as.
    """
    arch, dtype, d, candidates, normalize, wide = kind
    sums_squares = _sums_squares(dtype, normalize, stored)
    launch = forward(kind._replace(normalize=sums_squares), Nq, Lq, tf32=tf32, argmax=argmax).visiting()
    launch = replace(launch, config=launch.config._replace(NORMALIZE=normalize, STORED=stored))
    if stored in TERMS and d <= _MOST_INT8:
        launch = _by_terms(launch, arch, d, TERMS[stored])
    codes = bucket_bits(stored) > 0
    converts = bool(stored) and dtype == torch.float32 and not launch.config.TERMS
    bare = bare and not (argmax or normalize) and loads_vectors(d, wide)
    choice = _Ragged(arch.unit, argmax, sums_squares, few, bare, converts, codes, codes and (argmax or wide > 0))
    launch = choice.stages(choice.registers(choice.warps(choice.rows(launch, arch), stored), stored))
    words = in_words(stored)
    if words and launch.config.ONE_CHUNK and not (argmax or candidates):
        launch = _walking(launch, arch, Nq, normalize)
    config = launch.config
    # Where it changes nothing it is set as in `forward`.
    long = longest is None or longest > config.SLOT or arch.unit == "mma" or config.SPLIT
    config = config._replace(BN=choice.tokens(config), PACKED=True, LONG=long, WHOLE=words and d % config.BD == 0)
    most = ragged_tree(arch, dtype, Lq, d, normalize=normalize, wide=wide, stored=stored)
    return replace(launch, config=config), (most // config.SLOT).bit_length() - 1


def row_sums(arch: Architecture, dtype: torch.dtype, Lq: int, d: int, normalize: bool, wide: int) -> tuple[int, int]:
    """Rows of a query that `maxsim_row_sums` adds at a time, and the levels of its trees, for the bits of `forward`."""
    most = forward_tiles(arch, dtype, Lq, d, normalize, wide)[-1].rows
    slot = min(max(next_power_of_2(Lq), LEAST_SLOT), most)
    return slot, (most // slot).bit_length() - 1
