"""Run the rows of the published tables on this GPU, next to the baselines of the papers and the peers.

    python -m benchmarks.papers --list
    python -m benchmarks.papers --seconds 540 --out FILE [--first 100] [--gpus 4] [--only "S1/0,Tab8" [--again]]
    python -m benchmarks.report.papers [--check]    # docs/papers.md

`rows.json` has the published figures, and `plan.py` says what is measured for each row. The program writes FILE after
each row and continues where FILE ended, so that short calls measure all rows. Rows of the peers' own speed tables come
first. Compiled PyTorch comes last. ``--first`` compiles the kernels of the peers in parallel before the first row.

Times are medians with quartiles, of as many calls as fit in 0.3 s, up to ``--rounds``. A cold call has a flushed L2
cache. Each contender is checked against fp64 before it is timed. A contender that fails, or a row whose tensors do not
fit, is recorded with the reason. If an error leaves the device unusable, the program starts itself again and measures
the other contenders of the row. ``--device cpu`` shrinks all rows and only checks that the program works.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..support import common, gpu
from ..support.contenders import PEERS
from ..support.runs import compile_first
from . import estimate, plan, rows
from .measure import BrokenDeviceError, measure

ATTEMPTS = 3
COMPILED_AT_ONCE = 40
COMPILED_BYTES = 1.5e9  # most device memory of a row that is compiled next to others
NO_PEER_KERNELS = ("analytic", "correctness", "parity", "streamed")
PACKAGES = (*PEERS, plan.FAST_PLAID)


@dataclass(frozen=True)
class Unit:
    """One measurement of the run, and the rows that it stands for."""

    name: str
    spec: plan.Spec
    names: tuple[str, ...]
    rows: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return estimate.seconds(self.spec, self.names)


def units() -> list[Unit]:
    """Return all measurements in the order of the run."""
    tables = {table.id: table for table in rows.load()}
    found: dict[plan.Spec, tuple[plan.Spec, list[str]]] = {}
    for table in plan.TABLES:
        for index in range(len(tables[table].rows)):
            row = rows.PaperRow(tables[table], index)
            spec = plan.spec_of(row)
            if not isinstance(spec, str):
                found.setdefault(plan.measured_with(spec), (spec, []))[1].append(row.name)
    main, compiled = [], []
    for spec, names in found.values():
        main.append(Unit(names[0], spec, spec.contenders, tuple(names)))
        if spec.compiled:
            compiled.append(Unit(f"{names[0]} compiled", spec, spec.compiled, tuple(names)))
    return main + compiled


def shrink(spec: plan.Spec) -> plan.Spec:
    """Return the spec in the size of a test on the CPU."""
    case, options = spec.case, dict(spec.options)
    small = {"Nq": min(case.Nq, 5), "Nd": min(case.Nd, 9), "Lq": min(case.Lq, 6), "Ld": min(case.Ld, 24), "d": 16}
    if spec.kind == "chamfer":
        small |= {"Ld": 40, "Lq": 40, "d": min(case.d, 16)}
    if spec.kind == "residual":
        small |= {"Nd": 24, "Ld": 16}
    sizes = {"width": 24, "kept": 12, "steps": 3}
    options |= {name: value for name, value in sizes.items() if name in options}
    return replace(spec, case=replace(case, **small), options=tuple(options.items()))


class Results:
    """The records of a run. They are written after each row."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self.path = path or common.RESULTS / "papers.json"
        self.settings, self.records = settings, dict[str, dict]()
        if self.path.exists():
            stored = json.loads(self.path.read_text())
            self.records = {record["case"]["name"]: record for record in stored["records"]}
            self.settings["seconds"] = stored["settings"].get("seconds", 0.0)

    def write(self, name: str, record: dict) -> None:
        self.records[name] = record
        self.save()

    def part(self, n: int) -> Path:
        """Return the file of the process that measures on GPU `n`."""
        return self.path.with_suffix(f".gpu{n}.json")

    def merge_parts(self, count: int) -> None:
        """Add the records of `count` processes, and remove their files. A process that was killed leaves its file."""
        for path in filter(Path.exists, map(self.part, range(count))):
            found = json.loads(path.read_text())
            self.records |= {record["case"]["name"]: record for record in found["records"]}
            self.settings |= {"gpus": count, "ceilings": found["settings"].get("ceilings")}
            self.save()
            path.unlink()

    def save(self) -> None:
        common.write("papers", list(self.records.values()), *PACKAGES, path=self.path, **self.settings)

    def is_done(self, name: str) -> bool:
        """Return whether a row has its result, or failed too often."""
        record = self.records.get(name, {})
        return bool(record) and ("started" not in record or record["started"] >= ATTEMPTS)

    def start(self, unit: Unit) -> dict[str, dict]:
        """Record that a row starts, and return the contenders that made the device unusable before."""
        before = self.records.get(unit.name, {})
        before = before if "started" in before else {}  # a finished record is measured again in full
        broken = before.get("contenders", {})
        entry = {"case": {"name": unit.name}, "started": before.get("started", 0) + 1, "contenders": broken}
        self.write(unit.name, {**entry, "failed": "the program ended during this row"})
        return broken


def run_unit(unit: Unit, results: Results, timer: gpu.Timer | None, args: argparse.Namespace) -> None:
    """Measure one row and write its record.

    Raises:
        BrokenDeviceError: the program must start again.
    """
    broken = results.start(unit)
    spec = shrink(unit.spec) if args.device == "cpu" else unit.spec
    names = tuple(name for name in unit.names if name not in broken)
    try:
        record = measure(spec, names, timer, args.rounds, args.device)
    except BrokenDeviceError as failure:
        name, partial = failure.args
        entry = partial["contenders"].get(name, {"failed": "the device became unusable"})
        left = {**results.records[unit.name]}
        left["contenders"] = {**broken, name or "timing": {**entry, "broke_device": True}}
        results.write(unit.name, left)
        raise
    except Exception as failure:
        record = {"case": {}, "contenders": {}, "failed": gpu.reason(failure)}
    record["contenders"] |= broken
    record["case"] = {**record["case"], "name": unit.name}
    gpu_name = torch.cuda.get_device_name() if args.device == "cuda" else "none"
    where = {"gpu": gpu_name, "commit": common.read_commit()}  # a later call may continue on another commit
    results.write(unit.name, {**record, "rows": list(unit.rows), **where})
    report(record)


def report(record: dict) -> None:
    print(f"{record['case']['name']}  {record.get('failed', '')}  {record.get('seconds', 0.0):.1f} s")
    for name, entry in record["contenders"].items():
        if "values" not in entry or "failed" in entry:
            print(f"  {name:40} {entry.get('failed') or entry.get('skipped')}", flush=True)
            continue
        texts = (
            f"{k} {v['median']:.4g}" if isinstance(v, dict) else f"{k} {v:.4g}" for k, v in entry["values"].items()
        )
        print(f"  {name:40} {', '.join(texts)}", flush=True)


def start_again(seconds: float) -> None:
    """Replace this process with a new one that has `seconds` left."""
    arguments = [*sys.orig_argv[1:], "--seconds", str(max(0.0, seconds)), "--first", "0"]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *arguments])


def divide(pending: list[Unit], count: int) -> list[list[Unit]]:
    """Return `count` lists of units that take about as long as each other, each in the order of the run."""
    parts: list[list[Unit]] = [[] for _ in range(count)]
    for unit in sorted(pending, key=lambda unit: -unit.seconds):
        min(parts, key=lambda part: sum(other.seconds for other in part)).append(unit)
    return [sorted(part, key=pending.index) for part in parts]


def run_on_gpus(pending: list[Unit], results: Results, args: argparse.Namespace, end: float) -> None:
    """Measure pending rows in `args.gpus` processes, and add their records to `results`."""
    running = []
    for n, part in enumerate(part for part in divide(pending, args.gpus) if part):
        options = ["--seconds", str(end - time.monotonic()), "--gpus", "1", "--first", "0"]
        options += ["--only", ",".join(unit.name for unit in part), "--out", str(results.part(n))]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(n)}
        running.append(subprocess.Popen([sys.executable, *sys.orig_argv[1:], *options], env=environment))
    for process in running:
        process.wait()
    results.merge_parts(args.gpus)
    print("wrote", results.path)


def selected(only: str) -> Iterator[Unit]:
    """Yield the units that `only` names: comma-separated rows or tables, all if it is empty."""
    wanted = {text.strip() for text in only.split(",") if text.strip()}
    for unit in units():
        tables = {name.rpartition("/")[0] for name in unit.rows}
        if not wanted or unit.name in wanted or not tables.isdisjoint(wanted):
            yield unit


def to_compile(pending: list[Unit]) -> list[str]:
    """Return rows that together need all kernels of the pending rows. Slow compilations are first."""
    chosen: dict[tuple, Unit] = {}
    for unit in sorted(pending, key=lambda unit: estimate.memory_bytes(unit.spec, (plan.OURS,))):
        small = estimate.memory_bytes(unit.spec, (plan.OURS,)) < COMPILED_BYTES
        if not unit.name.endswith("compiled") and small and unit.spec.kind not in NO_PEER_KERNELS:
            chosen.setdefault(estimate.tuning_key(unit.spec), unit)
    ordered = sorted(chosen.values(), key=lambda unit: (not estimate.has_long_argmax(unit.spec), pending.index(unit)))
    return [unit.name for unit in ordered[:COMPILED_AT_ONCE]]


def print_plan(chosen: list[Unit]) -> None:
    """Print each row with its kind, memory and seconds, the rows that are not run, and the totals."""
    total = compiled = 0.0
    keys = set()
    for unit in chosen:
        gigabytes = estimate.memory_bytes(unit.spec, unit.names) / 1e9
        print(f"{unit.name:28} {unit.spec.kind:12} {gigabytes:7.2f} GB {unit.seconds:7.1f} s  {', '.join(unit.names)}")
        if unit.name.endswith("compiled"):
            compiled += unit.seconds
        else:
            total += unit.seconds
            keys.add((estimate.tuning_key(unit.spec), estimate.has_long_argmax(unit.spec)))
    for row in rows.every_row():
        if isinstance(why := plan.spec_of(row), str):
            print(f"{row.name:28} not run: {why}")
    cold = sum(estimate.COLD_LONG_SECONDS if long else 2 * estimate.COLD_SECONDS for _, long in keys)
    standing = sum(len(unit.rows) for unit in chosen if not unit.name.endswith("compiled"))
    print(f"{len(chosen)} measurements of {standing} rows: {total:.0f} s, and {compiled:.0f} s for compiled PyTorch.")
    print(f"Compiling the peers' kernels takes about {cold:.0f} s one at a time, or 110 s with --first 110.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the rows, their memory and their time, and stop")
    parser.add_argument("--seconds", type=float, default=540, help="start no row that would end later (default 540)")
    parser.add_argument("--first", type=float, default=0, metavar="SECONDS", help="compile in parallel for this time")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of this host that measure rows (default 1)")
    parser.add_argument("--only", default="", help="comma-separated rows or tables, such as S1/0,Tab8")
    parser.add_argument("--again", action="store_true", help="also measure rows that have a result")
    parser.add_argument("--rounds", type=int, default=50, help="most timed calls per contender (default 50)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)  # compiles one row for --first
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/papers.json)")
    args = parser.parse_args()
    end, chosen = time.monotonic() + args.seconds, list(selected(args.only))
    if args.list:
        return print_plan(chosen)
    if args.warm:
        for unit in chosen:
            names = tuple(name for name in unit.names if name.startswith((plan.OURS, *PEERS)))
            measure(unit.spec, names, None, 1, args.device, warm=True)
        return None
    results = Results(args.out, {"rounds": args.rounds})
    results.merge_parts(args.gpus if args.gpus > 1 else 0)
    pending = [unit for unit in chosen if args.again or not results.is_done(unit.name)]
    if args.device == "cuda":
        compile_first(to_compile(pending), args.first, "--warm")
    (run if args.gpus == 1 else run_on_gpus)(pending, results, args, end)
    return None


def run(pending: list[Unit], results: Results, args: argparse.Namespace, end: float) -> None:
    """Measure pending rows until the time is up."""
    timer = gpu.Timer(args.rounds) if args.device == "cuda" else None
    if timer is not None:
        results.settings["ceilings"] = gpu.ceilings(timer)
        torch.cuda.empty_cache()
    spent, begin = results.settings.get("seconds", 0.0), time.monotonic()
    for n, unit in enumerate(pending):
        if n and time.monotonic() + unit.seconds > end:
            print(f"{len(pending) - n} measurements are left. Run the same command again.")
            break
        results.settings["seconds"] = spent + time.monotonic() - begin
        try:
            run_unit(unit, results, timer, args)
        except BrokenDeviceError as failure:
            print(f"{unit.name}: {failure.args[0] or 'timing'} left the device unusable. Starting again.")
            start_again(end - time.monotonic())
        if args.device == "cuda":
            torch.cuda.empty_cache()
    else:
        print("All measurements have a result.")
    print("wrote", results.path)


if __name__ == "__main__":
    main()
