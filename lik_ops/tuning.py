"""Measurement of forward tiles on a GPU for `lik_ops.tune`.

`Tuner` times tiles for each dtype, number of features and query length. It uses few and many query rows and documents,
and flushes the L2 cache by reading. A tile is accepted only if its scores match the reference and equal the bits of the
built-in tile. This holds with and without masks, weights and argmax. Nothing is measured inside a call of lik_ops.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import __version__, reference
from .core.arguments import choose_argmax_dtype
from .core.segments import DenseArgs
from .gpu import backend as cuda
from .gpu.forward.generic import GenericPlan, make_generic_plan
from .gpu.tuning import architectures, forward_configs, measured_tables
from .gpu.tuning.architectures import Architecture
from .gpu.tuning.forward_table import TileConfig, TileRule
from .gpu.tuning.tables import UNLIMITED

Timer = Callable[[Callable[[], object]], float]  # milliseconds of a call
_QUERY_ROWS = (32, 64, 128, 256)
_MIN_TIME_RATIO = 0.98  # a tile is added to a rule only if it is faster than this ratio of the tile used otherwise
_FLUSH_BYTES = 512 * 2**20
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}


class DeviceTimer:
    """Median milliseconds of single calls on the device, each on an L2 cache flushed by reading.

    The flush runs longer on the device than the host needs to queue the call, so launches are not part of its time.
    """

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.rounds = rounds
        self.buffer = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def __call__(self, function: Callable[[], object]) -> float:
        """Return the median milliseconds of a call of `function`."""
        function(), function()
        times = []
        for _ in range(self.rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.buffer.amax()
            start.record()
            function()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)


@dataclass(frozen=True)
class TuningRegime:
    """Sizes of the calls that measure a rule."""

    dtype: torch.dtype
    d: int
    Lq: int
    Ld: int
    few: int  # documents that leave most of the device idle
    many: int
    rows: int  # query rows of a large call

    def queries(self, rows: int) -> int:
        """Return the number of queries that fill `rows` query rows."""
        return max(1, rows // architectures.next_power_of_2(self.Lq))


def make_inputs(
    regime: TuningRegime, Nq: int, Nd: int, device: torch.device, candidates: bool = False, masked: bool = False
) -> DenseArgs:
    """Return tokens of unit norm, drawn from a fixed seed."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(*shape, regime.d, generator=generator)
        return (x / x.norm(dim=-1, keepdim=True)).to(regime.dtype).to(device)

    documents = (Nq, Nd) if candidates else (Nd,)
    Q, block = draw(Nq, regime.Lq), draw(min(Nd, 64), regime.Ld)
    D = block[torch.arange(Nd, device=device) % block.shape[0]]  # drawing all would cost more time than measuring
    if candidates:
        D = D.expand(*documents, regime.Ld, regime.d).contiguous()
    if not masked:
        return DenseArgs(Q, D, None, None, None)
    q_mask, d_mask = (torch.rand(x.shape[:-1], generator=generator).to(device) > 0.2 for x in (Q, D))
    return DenseArgs(Q, D, q_mask, d_mask, torch.rand(Q.shape[:-1], generator=generator).to(device))


def make_rule(regime: TuningRegime, arch: Architecture, tiles: Iterable[TileConfig]) -> TileRule:
    """Return the rule that uses `tiles` for all calls that `regime` represents.

    These calls have the same number of rows per query as `regime`, and a number of features in the same range.
    """
    d, Lq = regime.d, regime.Lq
    above_d = architectures.next_power_of_2(d) // 2 if d <= 128 else 128
    most = find_built_in_tiles(arch, regime)[-1].rows
    above_Lq = most if Lq > most else architectures.next_power_of_2(Lq) // 2
    limits: dict[str, Any] = {"d": d, "Lq": Lq, "above_d": above_d, "above_Lq": above_Lq, "normalize": False, "wide": 0}
    return TileRule(units=(arch.unit,), dtypes=(regime.dtype,), value=tuple(tiles), **limits)


def find_built_in_tiles(arch: Architecture, regime: TuningRegime) -> tuple[TileConfig, ...]:
    """Return the tiles that `regime` uses without a table."""
    return forward_configs.select_tiles(replace(arch, measured=()), regime.dtype, regime.Lq, regime.d, False, 0)


def list_candidate_tiles(
    arch: Architecture, regime: TuningRegime, rows: int, processors: int, quick: bool = False
) -> list[TileConfig]:
    """Return the tiles of `rows` query rows that tensor cores support: 16 or 32 left-operand rows for each warp."""
    usual = find_built_in_tiles(arch, regime)[-1]
    tokens, stages = ((usual.tokens,), (2, 3)) if quick else ((32, 64, 128), (1, 2, 3, 4))
    features = (usual.features,) if regime.d <= usual.features or quick else (32, 64, 128)
    walks = arch.has_descriptors and regime.d <= usual.features and regime.Lq <= rows
    walkers = (0, 2 * processors, 4 * processors) if walks and not quick else (0,)
    found = [tile for tile in find_built_in_tiles(arch, regime) if tile.rows == rows]
    for first, BN, BD, stage, walk in itertools.product((False, True), tokens, features, stages, walkers):
        for warps in (4, 8):
            if 16 <= (BN if first else rows) // warps <= 32 and not (first and (rows > 64 or walk)):
                found.append(TileConfig(rows, BN, BD, warps, stage, arch.registers, first, walkers=walk))
    return list(dict.fromkeys(tile._replace(documents=UNLIMITED) for tile in found))


def make_plan(arch: Architecture, x: DenseArgs, argmax: bool = False) -> GenericPlan:
    """Return the plan of the generic kernel for a call."""
    return make_generic_plan(x.Q, x.D, False, choose_argmax_dtype(x.D.shape[-2]) if argmax else None, arch)


def run_plan(plan: GenericPlan, x: DenseArgs) -> tuple[Tensor, Tensor]:
    """Return scores and argmax. The argmax has size [0] if the plan does not compute it."""
    return plan.forward(plan.scores_shape, x, returned=True)[0]


def is_close_to_reference(scores: Tensor, x: DenseArgs) -> bool:
    """Return whether the scores of the first four documents match the fp64 reference."""
    part = x._replace(D=x.D[:4], d_mask=None if x.d_mask is None else x.d_mask[:4])
    Q, D, *masks, weight = part
    weight = None if weight is None else weight.double()
    expected = reference.maxsim(Q.double(), D.double(), *masks, q_weight=weight)
    return torch.allclose(scores[:, :4].double(), expected, rtol=1e-5, atol=1e-5)


class Tuner:
    """Measures tiles on one device. `timer` returns the time of a call, and `say` receives progress messages."""

    def __init__(
        self,
        arch: Architecture,
        device: torch.device,
        processors: int,
        timer: Timer,
        say: Callable[[str], None] = print,
        quick: bool = False,
    ) -> None:
        self.arch, self.device, self.processors = replace(arch, measured=()), device, processors
        self.timer, self.say, self.quick = timer, say, quick
        self.measured: list[dict[str, Any]] = []

    def with_tiles(self, regime: TuningRegime, tiles: Iterable[TileConfig]) -> Architecture:
        """Return the architecture with a rule that uses `tiles` for `regime`."""
        return replace(self.arch, measured=(make_rule(regime, self.arch, tiles),))

    def problem(self, regime: TuningRegime, tile: TileConfig, x: DenseArgs) -> str | None:
        """Return why the scores of `tile` are wrong, or None if they are right."""
        expected = run_plan(make_plan(self.arch, x), x)[0]
        try:
            scores = run_plan(make_plan(self.with_tiles(regime, [tile]), x), x)[0]
        except Exception as failure:  # compilers and drivers raise many types
            return f"{type(failure).__name__}: {failure}".splitlines()[0][:120]
        if not is_close_to_reference(scores, x):
            return "other scores than the reference"
        return None if torch.equal(scores, expected) else "other bits than the built-in tile"

    def accepts(self, regime: TuningRegime, tile: TileConfig) -> bool:
        """Return whether `tile` gives the same bits with masks, weights, argmax and candidates."""
        arch = self.with_tiles(regime, [tile])
        for masked, own in itertools.product((False, True), (False, True)):
            x = make_inputs(regime, 2, 3, self.device, own, masked)
            try:
                found = run_plan(make_plan(arch, x, argmax=True), x)
                plain = run_plan(make_plan(arch, x), x)[0]
            except Exception as failure:
                self.say(f"    not {tile}: {type(failure).__name__}")
                return False
            expected = run_plan(make_plan(self.arch, x, argmax=True), x)
            if not all(map(torch.equal, (*found, plain), (*expected, expected[0]))):
                self.say(f"    not {tile}: other bits with masks or argmax")
                return False
        return True

    def times(self, regime: TuningRegime, tiles: Sequence[TileConfig], Nq: int, Nd: int) -> dict[TileConfig, float]:
        """Return the milliseconds of each tile that gives the right scores, and record all tiles."""
        x, found = make_inputs(regime, Nq, Nd, self.device), {}
        for tile in tiles:
            reason = self.problem(regime, tile, x)
            shape = {"Nq": Nq, "Nd": Nd, "Lq": regime.Lq, "Ld": regime.Ld, "d": regime.d, "dtype": str(regime.dtype)}
            record = {**shape, "tile": {**tile._asdict(), "documents": None}}
            if reason is None:
                plan = make_plan(self.with_tiles(regime, [tile]), x)
                found[tile] = record["ms"] = self.timer(functools.partial(run_plan, plan, x))
            else:
                record["refused"] = reason
            self.measured.append(record)
        refused = len(tiles) - len(found)
        self.say(f"  {Nq} x {Nd}: {len(found)} tiles timed, {refused} refused")
        return found

    def best(self, regime: TuningRegime, times: dict[TileConfig, float]) -> TileConfig | None:
        """Return the fastest tile that `accepts` every kind of call, or None."""
        for tile in sorted(times, key=times.__getitem__):
            if self.accepts(regime, tile):
                return tile
        return None

    def rule(self, regime: TuningRegime) -> TileRule | None:
        """Return a rule with a tile for many rows and smaller tiles if they are faster, or None if no tile is right."""
        usual = find_built_in_tiles(self.arch, regime)
        slot = min(architectures.next_power_of_2(regime.Lq), usual[-1].rows)
        sizes = [usual[-1].rows] if regime.Lq > usual[-1].rows else [rows for rows in _QUERY_ROWS if rows >= slot]
        if self.quick:
            sizes = sizes[:1]
        say = f"{regime.dtype}, d {regime.d}, Lq {regime.Lq}"
        self.say(say)
        tiles = {rows: list_candidate_tiles(self.arch, regime, rows, self.processors, self.quick) for rows in sizes}
        sizes = [rows for rows in sizes if tiles[rows]]
        everything = [tile for several in tiles.values() for tile in several]
        last = self.best(regime, self.times(regime, everything, regime.queries(regime.rows), regime.many))
        if last is None:
            self.say(f"{say}: no tile is right, the built-in ones stay")
            return None
        chosen = []
        for rows in (rows for rows in sizes if rows <= last.rows and regime.Lq <= usual[-1].rows):
            chosen += self._find_smaller_tiles(regime, tiles[rows], last)
        # A tile as large as `last` was measured with the rows of only one tile. The measurement with many rows decides.
        if chosen and chosen[-1].rows == last.rows:
            chosen = [tile for tile in chosen if tile.rows < last.rows or tile.documents < UNLIMITED]
        self.say(f"{say}: {[*chosen, last]}")
        return make_rule(regime, self.arch, [*chosen, last])

    def _find_smaller_tiles(self, regime: TuningRegime, tiles: list[TileConfig], last: TileConfig) -> list[TileConfig]:
        """Return the tiles that beat `last` on the rows of one of `tiles`, for few documents and for many."""
        found, Nq = [], regime.queries(tiles[0].rows)
        serving = last
        for Nd in (regime.many, regime.few):
            times = self.times(regime, list(dict.fromkeys([*tiles, last])), Nq, Nd)
            best = self.best(regime, {tile: ms for tile, ms in times.items() if tile in tiles})
            if best is None or serving not in times or times[best] > _MIN_TIME_RATIO * times[serving]:
                continue
            found.append(best if Nd == regime.many else best._replace(documents=5 * self.processors // 2))
            serving = best
        return found[::-1]


def list_regimes(
    dtypes: Sequence[torch.dtype], features: Sequence[int], lengths: Sequence[int], few: int
) -> list[TuningRegime]:
    """Return the regimes to measure, with the documents of a reranking batch and with few documents."""
    grid = itertools.product(dtypes, sorted(set(features)), sorted(set(lengths)))
    return [TuningRegime(dtype, d, Lq, 300, few, 1000, max(1024, 2 * Lq)) for dtype, d, Lq in grid]


def local_architecture() -> Architecture:
    """Return the entry of the current GPU, without measured rules.

    Raises:
        ValueError: the file that ``LIK_OPS_TABLE`` names is damaged.
    """
    return replace(cuda.architecture(torch.device("cuda", torch.cuda.current_device())), measured=())


def check_options(args: argparse.Namespace, arch: Architecture) -> None:
    """Raise ValueError, naming the option, unless `tune` can measure these options on `arch`."""
    for name in ("d", "lq"):
        if min(getattr(args, name)) < 1:
            raise ValueError(f"--{name}: expected positive numbers, got {getattr(args, name)}")
    odd = [d for d in args.d if not architectures.supports_vector_loads(d, 0)]
    if odd:
        raise ValueError(f"--d: expected multiples of 16, got {odd}: others use the built-in tiles")
    if "float32" in args.dtype and arch.unit in forward_configs.FP32_SPLIT_UNITS:
        raise ValueError(f"--dtype: float32 is not tuned on {arch.name}: its tiles also serve rows split before")


def tune(args: argparse.Namespace, arch: Architecture) -> measured_tables.TileTable:
    """Measure the regimes of the validated options on the current GPU, whose entry is `arch`."""
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    processors = properties.multi_processor_count
    timer = DeviceTimer(device, 5 if args.quick else 15)
    tuner = Tuner(arch, device, processors, timer, quick=args.quick)
    few = max(1, 3 * processors // 4)
    wanted = list_regimes([_DTYPES[name] for name in args.dtype], args.d, args.lq, few)
    with torch.no_grad():
        found = [tuner.rule(regime) for regime in wanted]
    import triton

    versions = {"lik_ops": __version__, "torch": torch.__version__, "triton": triton.__version__}
    rules = tuple(rule for rule in found if rule is not None)
    return measured_tables.TileTable(properties.name, arch.name, versions, rules, tuner.measured)
