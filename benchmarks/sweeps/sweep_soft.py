"""Find the fastest tiles of the soft MaxSim kernels on this GPU by timing alternatives to the built-in table.

    python -m benchmarks.sweeps.sweep_soft [--only pages] [--part queries] [--kind Tile] [--seconds 100] [--out FILE]

The parts are the forward, the gradient of queries and the gradient of documents. Gradients have a plain and a Gluon
kernel. Every alternative is checked against the table's result before timing. ``=`` marks equal bits. Parallel
processes compile all alternatives first.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from lik_ops.families.soft import configs as soft_configs
from lik_ops.ops.fast_path import eager

from ..operators.soft import (
    PAGES,
    SHORT,
    TAU,
)
from ..support import common
from ..support.common import (
    Case,
    Inputs,
)
from ..support.gpu import (
    Timer,
)

PARTS = ("forward", "queries", "documents")
CASES = (Case("256x256", 256, 256, **SHORT), Case("pages 32x32", 32, 32, **PAGES))
_FORWARD, _BACKWARD = soft_configs.configure_soft_forward, soft_configs.configure_soft_backward
_SPECIALIZED_BACKWARD = soft_configs.configure_soft_sm90_backward


class Tile(NamedTuple):
    """Configuration of a plain kernel."""

    BM: int
    BN: int
    warps: int
    stages: int
    registers: int | None = None


class Stream(NamedTuple):
    """Configuration of a Gluon kernel."""

    BN: int
    stages: int
    resident: bool


Choice = Tile | Stream | None
FORWARD = [
    *(Tile(64, 64, 4, stages, registers) for stages, registers in ((2, None), (2, 96), (3, 128))),
    *(Tile(128, 64, 4, stages, registers) for stages, registers in ((2, None), (2, 128), (3, None))),
    *(Tile(128, 64, 8, stages, registers) for stages, registers in ((2, None), (3, 80), (3, 128))),
]
QUERIES = [
    *(Stream(BN, n, resident) for (BN, n), resident in itertools.product(((64, 4), (64, 6), (128, 3)), (True, False))),
    Tile(64, 64, 4, 3),
    Tile(64, 64, 4, 2, 128),
    Tile(64, 128, 4, 2),
    Tile(128, 64, 8, 2),
    Tile(128, 64, 8, 3, 128),
    Tile(128, 64, 8, 2, 128),
    Tile(128, 128, 8, 2),
    Tile(128, 32, 8, 3, 128),
]
DOCUMENTS = [
    *(Stream(64, stages, resident) for stages, resident in itertools.product((3, 4, 6), (True, False))),
    Tile(64, 64, 4, 3),
    Tile(64, 64, 4, 2, 160),
    Tile(64, 128, 4, 2),
    Tile(128, 64, 8, 2),
    Tile(128, 64, 8, 3),
    Tile(128, 128, 8, 2),
]
CHOICES: dict[str, list] = {"forward": FORWARD, "queries": QUERIES, "documents": DOCUMENTS}


def _plain(launch: Any, tile: Tile, slot: bool) -> Any:
    config = launch.config._replace(BM=tile.BM, BN=tile.BN)
    if slot:  # a query longer than a tile is processed tile by tile
        config = config._replace(
            ROWS_PER_QUERY=min(config.ROWS_PER_QUERY, tile.BM),
            LONG_QUERIES=config.LONG_QUERIES or config.ROWS_PER_QUERY > tile.BM,
        )
    return replace(launch, config=config, num_warps=tile.warps, num_stages=tile.stages, max_registers=tile.registers)


@contextmanager
def forced(part: str, choice: Choice) -> Iterator[None]:
    """Run the kernel of a part as `choice` configures it, or as the table does if `choice` is None."""
    with ExitStack() as stack:

        def put(name: str, function: Any) -> None:
            stack.enter_context(mock.patch.object(soft_configs, name, function))

        if isinstance(choice, Tile):
            put("configure_soft_sm90_backward", lambda *_: None)
            put("configure_soft_forward", lambda *a, **k: _plain(_FORWARD(*a, **k), choice, True))
            put("configure_soft_backward", lambda *a, **k: _plain(_BACKWARD(*a, **k), choice, False))
        elif isinstance(choice, Stream):
            put("configure_soft_sm90_backward", lambda *a: _streamed(_SPECIALIZED_BACKWARD(*a), choice))
        eager.clear_call_caches()
        yield
    eager.clear_call_caches()


def _streamed(found: Any, choice: Stream) -> Any:
    return found._replace(BN=choice.BN, STAGES=choice.stages, OPERAND_IN_REGISTERS=choice.resident)


def called(part: str, x: Inputs) -> Any:
    """Return the part as a function. A backward receives freshly computed soft maxima."""
    if part == "forward":
        return lambda: torch.ops.lik.maxsim_soft_fwd(x.Q, x.D, None, None, None, None, TAU, False, False)[0]
    lse = torch.ops.lik.maxsim_soft_fwd(x.Q, x.D, None, None, None, None, TAU, False, True)[1]
    needs = [part == "queries", part == "documents", False, False]
    args = x.grad_scores, x.Q, x.D, lse, None, None, None, None, TAU, False, needs
    return lambda: torch.ops.lik.maxsim_soft_bwd(*args)[PARTS.index(part) - 1]


def compiled(job: tuple[Case, str, Choice]) -> str:
    """Run one alternative once to compile it.

    Returns:
        The error, or an empty string.
    """
    case, part, choice = job
    function = called(part, Inputs(case, "cuda"))
    try:
        with torch.no_grad(), forced(part, choice):
            function()
            torch.cuda.synchronize()
        return ""
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}".splitlines()[0][:120]


def measure(case: Case, part: str, choices: list[Choice], timer: Timer, until: float) -> dict:
    function = called(part, Inputs(case, "cuda"))
    with forced(part, None):
        expected = function()
        tried = [{"choice": "table", "ms": timer(function), "error": 0.0, "same_bits": True}]
    for choice in choices:
        if time.monotonic() > until:
            break
        named = {"choice": f"{type(choice).__name__}{tuple(choice)}"}
        try:
            with forced(part, choice):
                found = function()
                error = common.relative_error(found, expected)
                tried.append(
                    {**named, "ms": timer(function), "error": error, "same_bits": torch.equal(found, expected)}
                )
        except Exception as failure:
            tried.append({**named, "failed": f"{type(failure).__name__}"})
    return {"case": asdict(case), "part": part, "tried": tried}


def printed(record: dict) -> None:
    print(f"{record['case']['name']}, {record['part']}")
    for t in sorted(record["tried"], key=lambda t: t.get("ms", float("inf"))):
        if "ms" in t:
            print(f"  {t['ms']:.4f} {t['choice']} {'=' if t['same_bits'] else format(t['error'], '.0e')}")
        else:
            print(f"  failed {t['choice']} {t['failed']}", flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--part", default="", help="parts whose name contains this")
    parser.add_argument("--kind", default="", help="Tile: only plain kernels; Stream: only Gluon kernels")
    parser.add_argument("--rounds", type=int, default=7, help="timed calls per alternative (default 7)")
    parser.add_argument("--seconds", type=float, default=600, help="time no alternative after this time (default 600)")
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/sweep_soft.json)")
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    asked = [(case, part) for case in CASES for part in PARTS if args.only in case.name and args.part in part]
    chosen = {part: [c for c in CHOICES[part] if args.kind in type(c).__name__] for part in PARTS}
    jobs = [(case, part, choice) for case, part in asked for choice in chosen[part]]
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for (case, part, choice), failure in zip(jobs, pool.map(compiled, jobs), strict=True):
            if failure:
                print(f"{case.name}, {part}, {choice}: {failure}")
    print(f"compiled, {args.seconds - (until - time.monotonic()):.0f} s", flush=True)
    timer, records = Timer(args.rounds), []
    for case, part in asked:
        records.append(measure(case, part, chosen[part], timer, until))
        printed(records[-1])
    print("wrote", common.write("sweep_soft", records, path=args.out))


if __name__ == "__main__":
    main()
