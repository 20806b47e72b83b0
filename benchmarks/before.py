"""What did changes do to speed and bits: this checkout beside an older one, on one GPU?

    git worktree add /tmp/old COMMIT
    python benchmarks/before.py /tmp/old [--only pages] [--rounds 20] [--turns 3] [--out FILE]

Every row of forward.py, training.py and ragged.py that has only lik_ops in it, and searches. Each checkout runs in a
process of its own, and they take turns at each row, so that the device's clock meets them alike. Median device times of
calls that find the L2 cache flushed; `host_us` is what the host takes for a call of a small row. `same` says whether
scores, winners and gradients have the same bits. The script fails where a row is slower, beyond `NOISE`, or differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import common
import contenders
import forward
import gpu
import ragged
import ragged_cases
import ragged_contenders
import torch
import training
from torch import Tensor

import lik_ops

NOISE = 1.02
SMALL = 10**9  # operations of a call whose host time counts
BEST = 100  # documents of a search
SEARCHES = tuple(
    common.Case(f"retrieve {Nq}x{Nd // 1000}k", Nq, Nd, 32, 180)
    for Nq, Nd in ((1, 20_000), (16, 20_000), (64, 100_000))
)
ROWS: tuple[tuple[str, Any], ...] = (
    *(("forward", case) for case in forward.CASES),
    *(("training", case) for case in training.CASES),
    *(("ragged", case) for case in ragged.CASES),
    *(("retrieve", case) for case in SEARCHES),
)


def call_of(kind: str, case: Any, device: str = "cuda") -> Callable[[], object]:
    """What a row times, as lik_ops' users call it."""
    if kind == "ragged":
        packed = ragged_cases.Inputs(case, device)
        return ragged.call_of(packed, ragged_contenders.contenders(packed)[ragged_contenders.PACKED])
    x = common.Inputs(case, device)
    if kind == "training":
        score = contenders.training(case, x)["lik_ops lowmem"]
        return lambda: training.step(score, x, x.grad_scores)  # type: ignore[arg-type]
    if kind == "retrieve":
        return lambda: lik_ops.retrieve(x.Q, x.D, BEST)
    return contenders.forward(case, x)["lik_ops"]  # type: ignore[return-value]


def digest(found: object) -> str:
    """Of the bits of tensors."""
    tensors = [found] if isinstance(found, Tensor) else [t for t in found if isinstance(t, Tensor)]  # type: ignore
    total = hashlib.sha256()
    for x in tensors:
        total.update(x.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return total.hexdigest()


def serve(rounds: int) -> None:
    """Of the rows that the standard input names, one after the other, what this process finds."""
    timer = gpu.Timer(rounds)
    ready: tuple[int, Callable[[], object]] = -1, dict
    for line in sys.stdin:
        n = int(line)
        kind, case = ROWS[n]
        with torch.set_grad_enabled(kind == "training" or case.what == "step"):
            try:
                if ready[0] != n:
                    ready = n, call_of(kind, case)
                found: dict[str, object] = {"bits": digest(ready[1]()), "ms": timer(ready[1])}
                if case.operations < SMALL:
                    found["host_us"] = gpu.host_microseconds(ready[1], 300)
            except Exception as failure:
                found = {"failed": gpu.reason(failure)}
        print(json.dumps(found), flush=True)


class Checkout:
    """A process that scores with the lik_ops of a folder."""

    def __init__(self, folder: Path, rounds: int) -> None:
        command = [sys.executable, __file__, str(folder), "--serve", "--rounds", str(rounds)]
        environment = {**os.environ, "PYTHONPATH": str(folder.resolve())}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def row(self, n: int) -> dict:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(n, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


def joined(kind: str, case: Any, old: list[dict], new: list[dict]) -> dict:
    """A record of a row from what both checkouts found in their turns."""
    record: dict[str, Any] = {"kind": kind, "case": asdict(case)}
    failed = [found["failed"] for found in (*old, *new) if "failed" in found]
    if failed:
        return record | {"failed": failed[0]}
    for what in ("ms", "host_us"):
        if what in new[0]:
            times = {name: statistics.median(x[what] for x in turns) for name, turns in (("old", old), ("new", new))}
            record[what] = times | {"ratio": times["new"] / times["old"]}
    return record | {"same": len({found["bits"] for found in (*old, *new)}) == 1}


def verdict(records: list[dict]) -> list[str]:
    """The rows that are slower than before, that differ, or that failed."""
    found = []
    for r in records:
        slower = any(r[what]["ratio"] > NOISE for what in ("ms", "host_us") if what in r)
        if "failed" in r or slower or not r["same"]:
            found.append(f"{r['kind']}, {r['case']['name']}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the older checkout")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of each turn (default 20)")
    parser.add_argument("--turns", type=int, default=3, help="turns of each checkout (default 3)")
    parser.add_argument("--out", type=Path, help="where to write (default benchmarks/results/before.json)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.rounds)
    old, new = (Checkout(folder, args.rounds) for folder in (args.old, Path(__file__).resolve().parents[1]))
    git = ["git", "-C", str(args.old), "rev-parse", "HEAD"]
    before = subprocess.run(git, capture_output=True, text=True).stdout.strip() or str(args.old)
    records: list[dict] = []
    for n, (kind, case) in enumerate(ROWS):
        if args.only not in case.name:
            continue
        turns = [(old.row(n), new.row(n)) for _ in range(args.turns)]
        records.append(joined(kind, case, *map(list, zip(*turns, strict=True))))
        r = records[-1]
        times = {
            what: "{old:.4f} -> {new:.4f} ({ratio:.3f})".format(**r[what]) for what in ("ms", "host_us") if what in r
        }
        print(f"{kind:9} {case.name:26}", r.get("failed") or times, "" if r.get("same") else "BITS DIFFER", flush=True)
        common.write("before", records, path=args.out, old=before, rounds=args.rounds, turns=args.turns)
    if wrong := verdict(records):
        sys.exit(f"slower than before, or different: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
