"""Measure tiles of the forward kernel on a GPU: the work behind `lik_ops.tune`.

For each dtype, number of features and query length, `Tuner` times tiles with few and many query rows and documents, on
an L2 cache flushed by reading. A tile is accepted only if its scores match the reference and equal the bits of the
built-in tile, with and without masks, weights and argmax. Nothing is measured inside a call of lik_ops.
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
from .gpu.tuning import architectures, forward_configs, forward_table, measured_tables
from .gpu.tuning.architectures import Architecture
from .gpu.tuning.forward_table import TileConfig, TileRule

Timer = Callable[[Callable[[], object]], float]  # milliseconds of a call
_QUERY_ROWS = (32, 64, 128, 256)
_MIN_TIME_RATIO = 0.98  # of the time of a tile that serves anyway: what a tile of its own must save
_FLUSH_BYTES = 512 * 2**20
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}


class DeviceTimer:
    """Median milliseconds of single calls on the device, each on an L2 cache flushed by reading.

    The flush takes longer than the host to queue the call, so launches are not part of its time.
    """

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.rounds = rounds
        self.buffer = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def __call__(self, function: Callable[[], object]) -> float:
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
    """Sizes of the calls that a rule is measured on."""

    dtype: torch.dtype
    d: int
    Lq: int
    Ld: int
    few: int  # documents that leave most of the device idle
    many: int
    rows: int  # query rows that are many

    def queries(self, rows: int) -> int:
        return max(1, rows // architectures.next_power_of_2(self.Lq))


def make_inputs(
    regime: TuningRegime, Nq: int, Nd: int, device: torch.device, candidates: bool = False, masked: bool = False
) -> DenseArgs:
    """Tokens of unit norm, drawn from a fixed seed."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(*shape, regime.d, generator=generator)
        return (x / x.norm(dim=-1, keepdim=True)).to(regime.dtype).to(device)

    documents = (Nq, Nd) if candidates else (Nd,)
    Q, block = draw(Nq, regime.Lq), draw(min(Nd, 64), regime.Ld)
    D = block[torch.arange(Nd, device=device) % block.shape[0]]  # drawing all would take longer than measuring
    if candidates:
        D = D.expand(*documents, regime.Ld, regime.d).contiguous()
    if not masked:
        return DenseArgs(Q, D, None, None, None)
    q_mask, d_mask = (torch.rand(x.shape[:-1], generator=generator).to(device) > 0.2 for x in (Q, D))
    return DenseArgs(Q, D, q_mask, d_mask, torch.rand(Q.shape[:-1], generator=generator).to(device))


def make_rule(regime: TuningRegime, arch: Architecture, tiles: Iterable[TileConfig]) -> TileRule:
    """The rule that serves with `tiles` what `regime` stands for: lengths in slots of the same size, as wide rows."""
    d, Lq = regime.d, regime.Lq
    above_d = architectures.next_power_of_2(d) // 2 if d <= 128 else 128
    most = find_built_in_tiles(arch, regime)[-1].rows
    above_Lq = most if Lq > most else architectures.next_power_of_2(Lq) // 2
    return TileRule(arch.unit, (regime.dtype,), d, Lq, False, 0, tuple(tiles), above_d, above_Lq)


def find_built_in_tiles(arch: Architecture, regime: TuningRegime) -> tuple[TileConfig, ...]:
    """The tiles that serve `regime` without a table."""
    return forward_configs.select_tiles(replace(arch, measured=()), regime.dtype, regime.Lq, regime.d, False, 0)


def list_candidate_tiles(
    arch: Architecture, regime: TuningRegime, rows: int, processors: int, quick: bool = False
) -> list[TileConfig]:
    """Tiles of `rows` query rows that a matrix unit takes: 16 or 32 rows of the first operand for each warp."""
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
    return list(dict.fromkeys(tile._replace(documents=forward_table.UNLIMITED) for tile in found))


def make_plan(arch: Architecture, x: DenseArgs, argmax: bool = False) -> GenericPlan:
    return make_generic_plan(x.Q, x.D, False, choose_argmax_dtype(x.D.shape[-2]) if argmax else None, arch)


def run_plan(plan: GenericPlan, x: DenseArgs) -> tuple[Tensor, Tensor]:
    """Scores and winners, the latter of size [0] where the plan is for none."""
    return plan.forward(plan.scores_shape, x, returned=True)[0]


def is_close_to_reference(scores: Tensor, x: DenseArgs) -> bool:
    """Whether scores of the first documents are those of the fp64 reference."""
    part = x._replace(D=x.D[:4], d_mask=None if x.d_mask is None else x.d_mask[:4])
    Q, D, *masks, weight = part
    weight = None if weight is None else weight.double()
    expected = reference.maxsim(Q.double(), D.double(), *masks, q_weight=weight)
    return torch.allclose(scores[:, :4].double(), expected, rtol=1e-5, atol=1e-5)


class Tuner:
    """Tries tiles on one device; `timer` says how long a call takes, `say` is told what was found."""

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
        return replace(self.arch, measured=(make_rule(regime, self.arch, tiles),))

    def problem(self, regime: TuningRegime, tile: TileConfig, x: DenseArgs) -> str | None:
        """What is wrong with the scores of `tile`, None if nothing is."""
        expected = run_plan(make_plan(self.arch, x), x)[0]
        try:
            scores = run_plan(make_plan(self.with_tiles(regime, [tile]), x), x)[0]
        except Exception as failure:  # the compiler's and the driver's are of many kinds
            return f"{type(failure).__name__}: {failure}".splitlines()[0][:120]
        if not is_close_to_reference(scores, x):
            return "other scores than the reference"
        return None if torch.equal(scores, expected) else "other bits than the built-in tile"

    def accepts(self, regime: TuningRegime, tile: TileConfig) -> bool:
        """Whether `tile` also serves calls with masks, weights, winners and candidates, with the same bits."""
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
                self.say(f"    not {tile}: other bits with masks or winners")
                return False
        return True

    def times(self, regime: TuningRegime, tiles: Sequence[TileConfig], Nq: int, Nd: int) -> dict[TileConfig, float]:
        """Milliseconds of the tiles that give the right scores; all are recorded."""
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
        """The fastest tile that serves every kind of call."""
        for tile in sorted(times, key=times.__getitem__):
            if self.accepts(regime, tile):
                return tile
        return None

    def rule(self, regime: TuningRegime) -> TileRule | None:
        """A tile for many rows, and smaller ones where they are faster; None if none is right."""
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
        if chosen and chosen[-1].rows == last.rows:  # measured with as many rows as a tile holds: many count more
            chosen = [tile for tile in chosen if tile.rows < last.rows or tile.documents < forward_table.UNLIMITED]
        self.say(f"{say}: {[*chosen, last]}")
        return make_rule(regime, self.arch, [*chosen, last])

    def _find_smaller_tiles(self, regime: TuningRegime, tiles: list[TileConfig], last: TileConfig) -> list[TileConfig]:
        """Tiles for the rows that one of `tiles` holds, for few documents and for many, that beat `last` there."""
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
    """What is measured: as many documents as a batch of a reranker has, and as few as leave the device idle."""
    grid = itertools.product(dtypes, sorted(set(features)), sorted(set(lengths)))
    return [TuningRegime(dtype, d, Lq, 300, few, 1000, max(1024, 2 * Lq)) for dtype, d, Lq in grid]


def local_architecture() -> Architecture:
    """Return the entry of the current GPU, without measured rules.

    Raises:
        ValueError: the file that ``LIK_OPS_TABLE`` names is damaged.
    """
    return replace(cuda.architecture(torch.device("cuda", torch.cuda.current_device())), measured=())


def check_options(args: argparse.Namespace, arch: Architecture) -> None:
    """Raise ValueError, naming the option, unless `tune` can measure these on `arch`."""
    for name in ("d", "lq"):
        if min(getattr(args, name)) < 1:
            raise ValueError(f"--{name}: expected positive numbers, got {getattr(args, name)}")
    odd = [d for d in args.d if not architectures.supports_vector_loads(d, 0)]
    if odd:
        raise ValueError(f"--d: expected multiples of 16, got {odd}: others take the built-in tiles")
    if "float32" in args.dtype and arch.unit in forward_configs.FP32_SPLIT_UNITS:
        raise ValueError(f"--dtype: float32 is not tuned on {arch.name}: its tiles also serve rows split before")


def tune(args: argparse.Namespace, arch: Architecture) -> measured_tables.TileTable:
    """Measure what the checked options ask for on the current GPU, which is an `arch`."""
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
