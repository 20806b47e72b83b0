"""Which tile sizes each kernel takes: a static table, so that no call ever benchmarks anything.

Every configuration is correct for every shape; the table chooses one that is fast and fits the device. The choice
depends on Lq, d, dtype and architecture, so a score has the same bits whatever batch it is computed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ..csrc_triton.arguments import Config, Specialization, WideSpecialization
from . import triton_versions

SPECIALIZED_ROWS, WIDE_ROWS = 256, 128  # of a program of `maxsim_forward_specialized`, `maxsim_forward_wide`
_MOST_ROWS = 6 * 2**20  # whose maxima in one document fill the workspace of `maxsim_row_maxima`
_MOST_SLOT = 128  # rows of a query that it sums itself
_LEAST_FILLED = 0.9  # of the slots of queries that it sums itself: else packed rows and sums after it are quicker


@dataclass(frozen=True)
class Architecture:
    """What the choice depends on: the shared memory that one program may take, and the kind of matrix unit."""

    name: str  # "sm_90", "gfx942"
    shared_memory: int  # bytes
    wavefront: int = 32
    registers: int | None = None  # of a thread, where ptxas must be told its limit or spills to run more warps
    measured: tuple[Rule, ...] = field(default=(), compare=False)  # of a table made by `lik_ops.tune`: they come first
    processors: int = field(default=1, compare=False)  # multiprocessors of a device

    @property
    def unit(self) -> str:
        """The matrix unit, by which tiles are chosen."""
        if self.is_amd:
            return "mfma"
        return {"sm_90": "wgmma", "interpreter": "interpreter"}.get(self.name, "mma")

    @property
    def has_descriptors(self) -> bool:
        """Whether documents are read by Hopper's tensor memory access unit. Later ones have it too: not measured."""
        return self.name in ("sm_90", "interpreter")

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("gfx")


ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("sm_80", 163 * 1024, registers=255),
        Architecture("sm_86", 99 * 1024, registers=255),
        Architecture("sm_89", 99 * 1024, registers=255),
        Architecture("sm_90", 227 * 1024),
        Architecture("sm_100", 227 * 1024, registers=255),
        Architecture("sm_120", 99 * 1024, registers=255),
        Architecture("gfx942", 64 * 1024, wavefront=64),
    )
}

# Runs every program in numpy, custom reductions element by element: small tiles, on the code path of sm_90.
INTERPRETER = Architecture("interpreter", 2**31)


@dataclass(frozen=True)
class Launch:
    """A kernel's compile-time configuration with its warps and pipeline stages."""

    config: Config
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # None: ptxas decides, which on some targets spills a few to run more warps
    walkers: int = 0  # programs that the device runs at a time, where each walks from document to document

    def options(self, arch: Architecture) -> dict[str, int]:
        """Triton's launch options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers and not arch.is_amd:
            options["maxnreg"] = self.max_registers
        return options

    def tile(self) -> str:
        """What a program scores at a time, for people."""
        c = self.config
        return f"{c.BM} rows x {c.BN} tokens x {c.BD} features, {self.num_warps} warps, {self.num_stages} stages"

    def visiting(self) -> Launch:
        """The same with a program for each document: for what a walk cannot do."""
        return replace(self, config=self.config._replace(WALK=False), walkers=0)

    def programs(self, Nq: int, K: int) -> int:
        """How many programs score K documents, of each query for candidates."""
        row_tiles = Nq if self.config.CANDIDATES else cdiv(Nq * self.config.SLOT, self.config.BM)
        if not self.config.WALK:
            return row_tiles * K
        # As many as run at a time; if many row tiles would not share those evenly, several times as many.
        waves = 1 if 16 * row_tiles <= self.walkers else 4
        return row_tiles * min(K, max(1, waves * self.walkers // row_tiles))


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def precision(dtype: torch.dtype, arch: Architecture, allow_tf32: bool) -> str:
    """How tl.dot multiplies fp32 operands: as fp32 unless the user allowed TF32 in torch; half types ignore it."""
    if arch.is_amd:
        return "ieee"
    return "tf32" if allow_tf32 and dtype == torch.float32 else "tf32x3"


def loads_vectors(d: int, wide: int) -> bool:
    """Whether a kernel knows that rows begin at multiples of 16 features: it loads several of them at a time.

    Else each feature takes an address of its own, in registers: steps must be smaller.
    """
    return d % 16 == 0 and wide < 2


_ANY = 2**62


class Tile(NamedTuple):
    """Query rows, document tokens and features of a step of `maxsim_forward`, with how it is run."""

    rows: int
    tokens: int
    features: int
    warps: int
    stages: int
    registers: int | None = None
    tokens_first: bool = False
    documents: int = _ANY  # serves at most so many
    walkers: int = 0  # see Launch


class Rule(NamedTuple):
    """What a kernel is asked for at most, and its tiles by ascending rows and documents.

    Of the tiles, which give the same bits, the first that holds all rows and documents is taken, or the last. The last
    one's rows are the most that a query is summed over at once. The rule depends on neither Nq nor Nd.
    """

    unit: str
    dtypes: tuple[torch.dtype, ...]
    d: int
    Lq: int
    normalize: bool
    wide: int
    tiles: tuple[Tile, ...]
    above_d: int = 0  # what a rule is asked for at least, exclusive
    above_Lq: int = 0

    def covers(self, dtype: torch.dtype, Lq: int, d: int, normalize: bool, wide: int) -> bool:
        fits = self.above_d < d <= self.d and self.above_Lq < Lq <= self.Lq
        return fits and dtype in self.dtypes and normalize <= self.normalize and wide <= self.wide


SPLITTING = ("wgmma", "interpreter")  # units that multiply fp32 as sums of fp16 terms
_HALF, _FP32 = (torch.float16, torch.bfloat16), (torch.float32,)
_PROCESSORS = 132  # of an H100 or H200
RESIDENT = (
    8 * _PROCESSORS
)  # ragged documents that are all at work at a time: the longest decides, so pipelines are deep
_FEW = 330  # documents that leave most of the 132 multiprocessors of an H200 with two programs or less

# The first rule that covers a call holds.
# wgmma takes 64 or more of what stands first: up to 32 rows stand second. Few programs need deep pipelines to keep the
# memory busy; of many, eight with one stage each share a multiprocessor. Where rows are many, a program that walks
# reads them once, not once for each document; as many walk as an H200 runs at a time. 256 rows with 128 registers share
# a multiprocessor by two; a query longer than a tile needs more. Beyond 128 features the rows are read again for every
# tile of tokens: larger ones. On mma the accumulators leave fewer registers: smaller steps where a kernel needs many.
# Splitting fp32 rows takes registers too: with 256 rows, or with 32 as second, ptxas spills.
# Rules for wide = 2 serve all rows that are loaded feature by feature: what they change cures spills. The last tile of
# half types without `normalize` keeps its 256 rows, by which the specialised kernel cuts its sums too.
# fmt: off
FORWARD = (
    #    unit   dtypes d     Lq    normalize wide    rows tokens features warps stages registers
    Rule("wgmma", _HALF, 128, 256, False, 1, (
        Tile(32, 64, 128, 4, 4, tokens_first=True, documents=_FEW),
        Tile(32, 64, 128, 4, 1, tokens_first=True),
        Tile(64, 64, 128, 4, 4, documents=_FEW),
        Tile(64, 64, 128, 4, 2, walkers=528),
        Tile(128, 64, 128, 4, 4, walkers=264),
        Tile(256, 64, 128, 8, 3, 128, walkers=264),
    )),
    Rule("wgmma", _HALF, 128, 128, False, 2, (
        Tile(32, 64, 128, 4, 4, tokens_first=True, documents=_FEW),
        Tile(32, 64, 128, 4, 1, tokens_first=True),
        Tile(64, 64, 128, 4, 4, documents=_FEW),
        Tile(64, 64, 128, 4, 2, walkers=528),
        Tile(128, 64, 128, 4, 4, walkers=264),
        Tile(256, 64, 128, 8, 2, 255, walkers=132),
    )),
    Rule("wgmma", _HALF, 128, _ANY, False, 1, (Tile(256, 64, 128, 8, 3),)),
    Rule("wgmma", _HALF, 128, _ANY, False, 2, (Tile(256, 64, 32, 8, 2, 255),)),
    Rule("wgmma", _HALF, 128, 256, True, 1, (
        Tile(32, 64, 128, 4, 3, tokens_first=True, documents=_FEW),
        Tile(32, 64, 128, 4, 2, tokens_first=True),
        Tile(64, 64, 128, 4, 3),
        Tile(128, 64, 128, 8, 3, walkers=264),
        Tile(256, 64, 128, 8, 3),
    )),
    Rule("wgmma", _HALF, 128, _ANY, True, 1, (Tile(256, 64, 128, 8, 3),)),
    Rule("wgmma", _HALF, _ANY, _ANY, False, 1, (
        Tile(32, 64, 128, 4, 4, tokens_first=True),
        Tile(64, 64, 128, 4, 4, documents=_FEW),
        Tile(64, 128, 128, 4, 2),
        Tile(128, 128, 128, 8, 3),
    )),
    Rule("wgmma", _HALF, _ANY, _ANY, True, 1, (Tile(64, 64, 128, 4, 2),)),
    Rule("wgmma", _HALF, _ANY, _ANY, True, 2, (Tile(64, 64, 64, 8, 1),)),
    Rule("wgmma", _FP32, 128, _ANY, False, 1, (Tile(64, 64, 128, 4, 1), Tile(128, 64, 128, 8, 1))),
    Rule("wgmma", _FP32, _ANY, _ANY, True, 1, (Tile(64, 64, 32, 4, 2),)),
    Rule("wgmma", _FP32, _ANY, _ANY, True, 2, (Tile(64, 64, 16, 4, 2),)),
    Rule("mma", _HALF, 128, _ANY, False, 0, (Tile(64, 64, 128, 4, 3), Tile(128, 64, 128, 8, 3))),
    Rule("mma", _HALF, _ANY, _ANY, True, 1, (Tile(64, 64, 64, 8, 2), Tile(128, 64, 64, 8, 2))),
    Rule("mma", _HALF, _ANY, _ANY, True, 2, (Tile(64, 64, 32, 8, 2),)),
    Rule("mma", _FP32, _ANY, _ANY, True, 0, (Tile(64, 32, 32, 4, 2),)),
    Rule("mma", _FP32, _ANY, _ANY, True, 2, (Tile(64, 32, 16, 4, 2),)),
    Rule("mfma", _HALF, _ANY, _ANY, True, 1, (Tile(64, 64, 128, 4, 1),)),
    Rule("mfma", _HALF, _ANY, _ANY, True, 2, (Tile(64, 64, 64, 4, 1),)),
    Rule("mfma", _FP32, _ANY, _ANY, True, 2, (Tile(64, 64, 32, 4, 1),)),
    Rule("interpreter", _HALF, _ANY, _ANY, True, 2, (
        Tile(16, 16, 128, 4, 1, tokens_first=True),
        Tile(32, 16, 128, 4, 1, walkers=1),
    )),
    Rule("interpreter", _FP32, 128, _ANY, False, 2, (
        Tile(16, 16, 128, 4, 1, tokens_first=True),
        Tile(32, 16, 128, 4, 1),
    )),
    Rule("interpreter", _FP32, _ANY, _ANY, True, 2, (
        Tile(16, 16, 32, 4, 1, tokens_first=True),
        Tile(32, 16, 32, 4, 1, walkers=1),
    )),
)
# fmt: on


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


def forward(
    arch: Architecture,
    dtype: torch.dtype,
    Nq: int,
    Lq: int,
    d: int,
    *,
    candidates: bool,
    normalize: bool,
    wide: int,
    tf32: bool,
    documents: int = _ANY,
    argmax: bool = False,
) -> Launch:
    """The tile of a forward: it holds whole queries, each in a slot of the next power of two, or a part of one.

    `documents` are all that are scored: Nd, or Nq * K candidates.
    """
    tiles = forward_tiles(arch, dtype, Lq, d, normalize, wide)
    tile, slot = forward_tile(tiles, Nq, Lq, candidates, documents)
    BD = min(max(next_power_of_2(d), 16), tile.features)
    splits = dtype == torch.float32 and arch.unit in SPLITTING and not (tf32 or normalize) and d <= BD
    config = Config(
        BM=tile.rows,
        BN=min(tile.tokens, 32 if arch.name == "sm_100" else 64) if argmax else tile.tokens,  # winners take registers
        BD=BD,
        SLOT=slot,
        LANES=4 if arch.unit in ("wgmma", "interpreter") else 1,
        CANDIDATES=candidates,
        ONE_CHUNK=d <= BD,
        NORMALIZE=normalize,
        WIDE=wide,
        PRECISION=precision(dtype, arch, tf32),
        TOKENS_FIRST=tile.tokens_first,
        WALK=tile.walkers > 0 and not splits and d <= BD and Lq <= slot and not candidates,
        # Where it changes nothing it is set on mma and to split rows, for which ptxas spills without the loop.
        LONG=Lq > slot or (slot == tiles[-1].rows and (arch.unit == "mma" or splits)),
        SPLIT=splits,
    )
    return Launch(config, tile.warps, tile.stages, tile.registers or arch.registers, tile.walkers)


def forward_split(launch: Launch, Lq: int) -> Launch:
    """The forward on rows that are split already: its registers serve deeper pipelines and more rows."""
    config = launch.config
    if Lq > config.SLOT:
        return replace(launch, num_stages=2)
    return replace(launch, config=config._replace(BM=2 * config.BM, LONG=False), num_stages=3)


def forward_ragged(
    arch: Architecture,
    dtype: torch.dtype,
    Nq: int,
    Lq: int,
    d: int,
    *,
    candidates: bool,
    normalize: bool,
    wide: int,
    tf32: bool,
    argmax: bool,
    longest: int | None = None,
    few: bool = False,
) -> tuple[Launch, int]:
    """The tile of ragged layouts whose queries have `Lq` tokens in the mean, and the levels of the trees of their sums.

    No query has more tokens than `longest`, if it is known. One takes as many steps of the slot as it needs. Bounds
    that are read take registers: fewer rows than elsewhere. `few`: at most `RESIDENT` documents are scored.
    """
    launch = forward(
        arch, dtype, Nq, Lq, d, candidates=candidates, normalize=normalize, wide=wide, tf32=tf32, argmax=argmax
    ).visiting()
    config = launch.config
    rows = min(config.BM, 128)
    if rows < config.BM:
        stages = min(launch.num_stages, 3)
        launch = replace(launch, num_warps=8 if normalize else 4, num_stages=stages, max_registers=arch.registers)
    narrow = (config.SPLIT and rows < 128) or (arch.unit == "mma" and argmax)  # ptxas spills else
    tokens = min(config.BN, 32) if narrow else config.BN
    if narrow and config.SPLIT and argmax and triton_versions.release() >= (3, 9):  # one stage spills there, two before
        launch = replace(launch, num_stages=2)
    if config.TOKENS_FIRST and arch.unit == "wgmma" and few:
        launch = replace(launch, num_stages=4)
    slot = min(config.SLOT, rows)
    # Where it changes nothing it is set as in `forward`.
    long = longest is None or longest > slot or arch.unit == "mma" or config.SPLIT
    config = config._replace(BM=rows, BN=tokens, SLOT=slot, PACKED=True, LONG=long)
    most = forward_tiles(arch, dtype, Lq, d, normalize, wide)[-1].rows
    return replace(launch, config=config), (most // config.SLOT).bit_length() - 1


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
    arch: Architecture,
    dtype: torch.dtype,
    rows: int,
    K: int,
    Lq: int,
    d: int,
    *,
    argmax: bool,
    processors: int,
    dense: bool = False,
) -> RowMaxima | None:
    """The choice for `rows` query rows, of `Lq` in the mean, against K documents; None where another kernel serves.

    Rows and K may decide, as all give the same bits. `dense`: each query has Lq rows, so that the kernel may sum them
    itself, if these fill its slots.
    """
    sums = dense and 2 <= next_power_of_2(Lq) <= _MOST_SLOT and Lq >= _LEAST_FILLED * next_power_of_2(Lq)
    row_tiles = cdiv(rows // Lq * next_power_of_2(Lq) if sums else rows, SPECIALIZED_ROWS)
    half = arch.name == "sm_90" and dtype in _HALF and d <= 128
    worth = rows > SPECIALIZED_ROWS // 2 and row_tiles * K >= processors // 2
    if not (half and worth and row_tiles * K < 2**31 and rows <= _MOST_ROWS):
        return None
    most = forward_tiles(arch, dtype, Lq, d, False, 0)[-1].rows
    slot = min(max(next_power_of_2(Lq), 16), most)
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
    levels = (most // slot).bit_length() - 1
    return RowMaxima(config, min(processors, row_tiles * K), (slot, lanes // slot, 1024 // lanes, levels))


class Specialized(NamedTuple):
    """How a specialised kernel runs: its configuration, and the parts of SLOT tokens that a query takes."""

    config: Specialization | WideSpecialization
    parts: int
    row_tiles: int
    programs: int

    @property
    def is_wide(self) -> bool:
        return isinstance(self.config, WideSpecialization)

    @property
    def kernel(self) -> str:
        return "maxsim_forward_wide" if self.is_wide else "maxsim_forward_specialized"

    def tile(self) -> str:
        return _streamed(WIDE_ROWS if self.is_wide else SPECIALIZED_ROWS, self)


def _streamed(rows: int, choice: Specialized | RowMaxima) -> str:
    """`tile` of a kernel through whose shared memory documents stream."""
    return f"{rows} rows x {choice.config.BN} tokens, {choice.config.STAGES} stages, {choice.programs} programs"


# Of `maxsim_forward_wide`: tokens of a tile, stages of its ring, and what a token costs beside one of the largest tile.
_WIDE = ((256, 4, 1.0), (128, 6, 1.05), (64, 8, 1.3))


def _wide(Lq: int, Ld: int) -> WideSpecialization:
    """The tile whose last one of a document wastes least."""
    fitting = [tile for tile in _WIDE if tile[0] <= Ld] or [_WIDE[-1]]
    tokens, stages, _ = min(fitting, key=lambda tile: cdiv(Ld, tile[0]) * tile[0] * tile[2])
    return WideSpecialization(BN=tokens, SLOT=min(next_power_of_2(Lq), WIDE_ROWS // 2), STAGES=stages)


def specialized(
    arch: Architecture,
    dtype: torch.dtype,
    Nq: int,
    K: int,
    Lq: int,
    Ld: int,
    d: int,
    *,
    normalize: bool,
    argmax: bool,
    processors: int,
) -> Specialized | None:
    """The choice for documents without mask, or None where `maxsim_forward` serves better or alone.

    Nq and K may decide, as all give the same bits. `processors` are the device's multiprocessors.
    """
    config: Specialization | WideSpecialization
    if d <= 128:
        slot, rows = min(next_power_of_2(Lq), 128), SPECIALIZED_ROWS
        config = Specialization(64, 64 if d <= 64 else 128, slot, 6, True, argmax, NORMALIZE=normalize)
        if normalize and not loads_vectors(d, 0):  # rows are added up in another order there
            return None
    elif (
        argmax or normalize or not loads_vectors(d, 0)
    ):  # `maxsim_forward` sums the parts of a query in another order there
        return None
    else:
        config, rows = _wide(Lq, Ld), WIDE_ROWS
    parts = cdiv(Lq, config.SLOT)
    row_tiles = cdiv(Nq * parts * config.SLOT, rows)
    pairs = row_tiles * K
    fits = Lq >= 2 and Ld >= config.BN and pairs < 2**31 and Nq * parts * config.SLOT < 2**31
    worth = Nq * parts * config.SLOT > rows // 2 and pairs >= processors // 2
    if arch.name != "sm_90" or dtype not in (torch.float16, torch.bfloat16) or not (fits and worth):
        return None
    # A program per multiprocessor. Where that many are nearly a multiple of the row tiles, exactly a multiple: then all
    # of a document's programs read it at the same time.
    aligned = processors // row_tiles * row_tiles
    programs = aligned if aligned >= 0.95 * processors else processors
    return Specialized(config, parts, row_tiles, min(programs, pairs))
