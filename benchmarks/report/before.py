"""Compare the speed and the bits of this checkout with an older one, on one GPU.

    git worktree add /tmp/old COMMIT
    python -m benchmarks.report.before /tmp/old [--only pages] [--rounds 20] [--turns 3] [--seconds 300] [--out FILE]

The rows are all lik_ops rows of forward.py, training.py, ragged.py and options.py, documents of three formats of
quantized.py, some searches, and tiny calls. Several processes compile first. Then each checkout runs in a separate
process. The two processes alternate on each row, so that changes of the device clock affect both.

Times are median device times, each call on a flushed L2 cache. `host_us` is the smallest host time of a call of a
small row. `same` says whether scores, winners and gradients have the same bits. Rows that seem slower are measured
again while time remains, and all turns are used. The script fails if a row differs or is slower by more than `NOISE`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lik_ops

from ..operators import forward, options, quantized, ragged, training
from ..support import common, contenders, gpu, ragged_cases, ragged_contenders, runs

# The process measures the lik_ops of the checkout that it names, by the benchmarks of this one.
_OF_CHECKOUT = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
import lik_ops
sys.path[0] = ""
runpy.run_module("benchmarks.report.before", run_name="__main__", alter_sys=True)
"""
NOISE = 1.02
SMALL = 10**9  # most operations of a call whose host time is compared
BEST = 100  # documents of a search
ROW_SECONDS = 20
COMPILERS = max(1, (os.cpu_count() or 2) // 2)  # processes per checkout
AGAIN = 4  # most repeated measurements of a row
SEARCHES = (
    *(
        common.Case(f"retrieve {Nq}x{Nd // 1000}k", Nq, Nd, 32, 180)
        for Nq, Nd in ((1, 20_000), (16, 20_000), (64, 100_000))
    ),
    common.Case("tiny 8x100", 8, 100, 32, 64),
)
TINY = (
    ("forward", common.Case("tiny 8x8 winners", 8, 8, 32, 64, what="winners")),
    ("forward", common.Case("tiny 8x8 holes", 8, 8, 32, 64, mask="holes")),
    ("forward", common.Case("tiny 8x8 normalize", 8, 8, 32, 64, normalize=True)),
    ("training", training.Case("tiny 8x8", 8, 8, 32, 64)),
    ("ragged", ragged.Case("tiny 8x8", 8, 8, 32, 64, mean_q=0.6)),
    ("ragged", ragged.Case("tiny 8x8 candidates", 8, 8, 32, 64, K=8)),
    ("ragged", ragged.Case("tiny 8x8 step", 8, 8, 32, 64, mean_q=0.6, what="step")),
)
# Formats of quantized.py: one with its own kernel for each kind of query, and one that is decoded to half precision.
QUANTIZED = ("int8", "int8 x int8", "fp8_e4m3")
ROWS: tuple[tuple[str, Any], ...] = (
    *TINY,
    *(("forward", case) for case in forward.CASES),
    *(("training", case) for case in training.CASES),
    *(("ragged", case) for case in ragged.CASES),
    *(("options", row.case) for row in options.ROWS),
    *((f"quantized {name}", row.case) for row in quantized.ROWS for name in QUANTIZED),
    *(("retrieve", case) for case in SEARCHES),
)


def is_small(case: Any) -> bool:
    pairs = case.Nq * case.Nd
    if isinstance(case, ragged.Case):
        pairs = case.P or case.Nq * (case.K or case.Nd)
    return 2 * pairs * case.Lq * case.Ld * case.d < SMALL


def call_of(kind: str, case: Any, device: str = "cuda") -> Callable[[], object]:
    """Return the call that a row times, written as a user of lik_ops would write it."""
    if kind == "ragged":
        packed = ragged_cases.Inputs(case, device)
        return ragged.call_of(packed, ragged_contenders.contenders(packed)[ragged_contenders.PACKED])
    x = common.Inputs(case, device)
    if kind == "training":
        score = contenders.training(case, x)["lik_ops lowmem"]
        return lambda: training.step(score, x, x.grad_scores)  # type: ignore[arg-type]
    if kind == "options":
        return options.called(case, x)
    if kind.startswith("quantized "):
        *how, query = quantized.FORMATS[kind.removeprefix("quantized ")]
        D = lik_ops.quantize(x.D, *how, query=query)
        return lambda: lik_ops.maxsim(x.Q, D)
    if kind == "retrieve":
        return lambda: lik_ops.retrieve(x.Q, x.D, BEST)
    return contenders.forward(case, x)["lik_ops"]  # type: ignore[return-value]


def digest(found: object) -> str:
    """Return a hash of the bits of tensors.

    The device computes a sum of all words of a tensor, each multiplied by a different odd number.
    """
    tensors = [found] if isinstance(found, Tensor) else [t for t in found if isinstance(t, Tensor)]  # type: ignore
    total = hashlib.sha256()
    for x in tensors:
        data = x.detach().contiguous().flatten().view(torch.uint8)
        words = F.pad(data, (0, -len(data) % 8)).view(torch.int64)
        total.update(f"{tuple(x.shape)} {x.dtype}".encode())
        for part in words.split(2**24):
            n = torch.arange(len(part), device=x.device)
            factors = (n ^ (n << 13)).mul_(-7046029254386353131).bitwise_or_(1)
            total.update(str(int((part * factors).sum())).encode())
    return total.hexdigest()


def made(n: int) -> Callable[[], object]:
    torch.cuda.empty_cache()
    return call_of(*ROWS[n])


def with_gradients(n: int) -> torch.set_grad_enabled:
    kind, case = ROWS[n]
    return torch.set_grad_enabled(kind == "training" or case.what == "step")


def compile_all(rows: list[int]) -> None:
    for n in rows:
        try:
            with with_gradients(n), gpu.time_limit(ROW_SECONDS):
                made(n)()
        except (Exception, gpu.TooSlowError):
            continue  # the measurement reports the reason


def serve(rounds: int) -> None:
    """Measure the rows that standard input names, one after the other, and print each result."""
    timer = gpu.Timer(rounds)
    ready: tuple[int, Callable[[], object]] = -1, dict
    for line in sys.stdin:
        n = int(line)
        try:
            with with_gradients(n), gpu.time_limit(ROW_SECONDS):
                if ready[0] != n:
                    ready = -1, dict  # free the memory of the previous row first
                    ready = n, made(n)
                found: dict[str, object] = {"bits": digest(ready[1]()), "ms": timer(ready[1])}
                if is_small(ROWS[n][1]):
                    found["host_us"] = min(gpu.host_microseconds(ready[1], 50) for _ in range(8))
        except (Exception, gpu.TooSlowError) as failure:
            found = {"failed": gpu.reason(failure)}
        print(json.dumps(found), flush=True)


class Checkout:
    """Processes that score with the lik_ops of one folder."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder = folder.resolve()
        self.process = self._started("--serve", "--rounds", str(rounds))

    def _started(self, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-c", _OF_CHECKOUT, str(self.folder), *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(command, text=True, cwd=Path(__file__).parents[2], **pipes)

    def compilers(self, rows: list[int]) -> list[subprocess.Popen]:
        parts = [rows[first::COMPILERS] for first in range(COMPILERS)]
        return [self._started("--compile", ",".join(map(str, part))) for part in parts if part]

    def row(self, n: int) -> dict:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            print(n, file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else {"failed": "its process ended"}

    def commit(self) -> str:
        """Return the commit of the folder, or the folder's name if git does not know it."""
        git = ["git", "-C", str(self.folder), "rev-parse", "HEAD"]
        known = (self.folder / ".git").exists()
        return (subprocess.run(git, capture_output=True, text=True).stdout.strip() if known else "") or self.folder.name


def compile_first(checkouts: tuple[Checkout, Checkout], rows: list[int], seconds: float) -> None:
    """Compile for `seconds`. Rows that are not ready by then compile when they are measured."""
    end = time.monotonic() + seconds
    runs.wait([process for checkout in checkouts for process in checkout.compilers(rows)], end)


Turns = tuple[list[dict], list[dict]]  # older checkout, this checkout


def measure(checkouts: tuple[Checkout, Checkout], n: int, turns: int, found: Turns) -> dict:
    """Run `turns` more turns of a row, alternating which checkout starts, and return its record."""
    for turn in range(turns):
        for at in ((0, 1), (1, 0))[turn % 2]:
            found[at].append(checkouts[at].row(n))
    return joined(*ROWS[n], *found)


def joined(kind: str, case: Any, old: list[dict], new: list[dict]) -> dict:
    """Return the record of a row from the results of both checkouts."""
    record: dict[str, Any] = {"kind": kind, "case": asdict(case), "turns": len(new)}
    failed = [found["failed"] for found in (*old, *new) if "failed" in found]
    if failed:
        return record | {"failed": failed[0]}
    for what, typical in (("ms", statistics.median), ("host_us", min)):
        if what in new[0]:
            times = {name: typical([x[what] for x in turns]) for name, turns in (("old", old), ("new", new))}
            record[what] = times | {"ratio": times["new"] / times["old"]}
    return record | {"same": len({found["bits"] for found in (*old, *new)}) == 1}


def is_slower(record: dict) -> bool:
    return any(record[what]["ratio"] > NOISE for what in ("ms", "host_us") if what in record)


def verdict(records: list[dict]) -> list[str]:
    """Return the rows that are slower than before, differ, or failed."""
    wrong = [r for r in records if "failed" in r or is_slower(r) or not r["same"]]
    return [f"{r['kind']}, {r['case']['name']}" for r in wrong]


def report(r: dict) -> None:
    times = [
        f"{what} {r[what]['old']:9.4f} -> {r[what]['new']:9.4f} ({r[what]['ratio']:.3f})"
        for what in ("ms", "host_us")
        if what in r
    ]
    differ = "" if r.get("same", True) else "BITS DIFFER"
    print(f"{r['kind']:21} {r['case']['name']:26}", r.get("failed") or "  ".join(times), differ, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the older checkout")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--rounds", type=int, default=20, help="timed calls per turn (default 20)")
    parser.add_argument("--turns", type=int, default=3, help="turns per checkout (default 3)")
    parser.add_argument("--seconds", type=float, default=300, help="start no row after this time (default 300)")
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/before.json)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        return compile_all([int(n) for n in args.compile.split(",")])
    if args.serve:
        return serve(args.rounds)
    start = time.monotonic()
    end = start + args.seconds
    rows = [n for n, (_, case) in enumerate(ROWS) if args.only in case.name]
    checkouts = Checkout(args.old, args.rounds), Checkout(Path(__file__).parents[2], args.rounds)
    compile_first(checkouts, rows, args.seconds / 2)
    print(f"compiled after {time.monotonic() - start:.0f} s")
    found: dict[int, Turns] = {}
    records: dict[int, dict] = {}
    settings = {"old": checkouts[0].commit(), "rounds": args.rounds}
    for again in range(1 + AGAIN):
        for n in rows:
            if time.monotonic() > end or (again and (n not in records or not is_slower(records[n]))):
                continue
            records[n] = measure(checkouts, n, args.turns, found.setdefault(n, ([], [])))
            report(records[n])
            common.write("before", list(records.values()), path=args.out, **settings)
    if left := [ROWS[n][1].name for n in rows if n not in records]:
        print("no time left for", ", ".join(left))
    if wrong := verdict(list(records.values())):
        sys.exit(f"{time.monotonic() - start:.0f} s; slower than before, or different: {'; '.join(wrong)}")
    print(f"{time.monotonic() - start:.0f} s; nothing is slower than before, or different")


if __name__ == "__main__":
    main()
