"""Measure the forward on this GPU, compared with eager and compiled PyTorch and two peer libraries.

    python -m benchmarks.operators.forward [--only rerank] [--rounds 30] [--seconds 180] [--out FILE]

The peers are late-interaction-kernels and flash-maxsim. Times are median device times, each call on a flushed L2
cache. The ceilings are a bf16 matrix product and a plain read, measured in the same run. ``floor`` is the larger time
of the operations and of the bytes at these rates. ``read`` is the time of a kernel that only reads the bytes of the
case, a lower bound for calls of few microseconds. Every contender is checked against fp64 before timing. Compiled
PyTorch runs last, until the time is up, because it compiles for every shape.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

import lik_ops

from ..support import common, contenders, gpu
from ..support.common import (
    Case,
    Inputs,
)
from ..support.contenders import (
    Contender,
)
from ..support.runs import (
    compile_first,
)

FIRST_CALL_SECONDS = 25  # limit for compiling and tuning one contender on one case
TOLERANCE = 1e-2
EXACT = {"bfloat16": 1e-2, "float16": 1e-2, "float32": 1e-5}  # a larger fp32 error means a lower precision
COMPILED_FIRST = ("fat d 768", "rerank 1k", "pages 64x64", "in-batch 256", "serve 16x1k", "rerank 100")

# A variant follows the shape that it varies. The peers reuse their tuning for that shape.
CASES = (
    Case("rerank 1k", 1, 1000, 32, 300, goal_ms=0.021),
    Case("rerank 100", 1, 100, 32, 300),
    Case("rerank 1k Lq 20", 1, 1000, 20, 300),
    Case("rerank 1k d 96", 1, 1000, 32, 300, d=96),
    Case("rerank 1k fp16", 1, 1000, 32, 300, dtype="float16"),
    Case("rerank 1k winners", 1, 1000, 32, 300, what="winners"),
    Case("rerank 1k prefix masks", 1, 1000, 32, 300, mask="prefix"),
    Case("rerank 1k holes", 1, 1000, 32, 300, mask="holes"),
    Case("rerank 1k normalize", 1, 1000, 32, 300, normalize=True),
    Case("rerank 1k q_weight", 1, 1000, 32, 300, weighted=True),
    Case("rerank 1k long", 1, 1000, 32, 1024, goal_ms=0.062),
    Case("rerank 100k", 1, 100_000, 32, 180, goal_ms=1.03),
    Case("serve 16x1k", 16, 1000, 32, 300, goal_ms=0.062),
    Case("serve 16x1k Lq 20", 16, 1000, 20, 300),
    Case("serve 16x1k d 96", 16, 1000, 32, 300, d=96),
    Case("serve 16x1k fp16", 16, 1000, 32, 300, dtype="float16"),
    Case("serve 16x1k prefix masks", 16, 1000, 32, 300, mask="prefix"),
    Case("serve 16x1k holes", 16, 1000, 32, 300, mask="holes"),
    Case("serve 16x1k normalize", 16, 1000, 32, 300, normalize=True),
    Case("serve 64x10k", 64, 10_000, 32, 180, goal_ms=1.25),
    Case("in-batch 256", 256, 256, 32, 300, what="winners", goal_ms=0.25),
    Case("candidates 256x16", 256, 16, 32, 1024, candidates=True),
    Case("fat d 768", 1, 1000, 128, 1024, d=768, goal_ms=0.41),
    Case("fat d 768, 16x200", 16, 200, 128, 1024, d=768),
    Case("rerank 1k d 768", 1, 1000, 32, 300, d=768),
    Case("rerank Lq 128", 1, 1000, 128, 1024, goal_ms=0.066),
    Case("pages 1x1k", 1, 1000, 1024, 1024, goal_ms=0.32),
    Case("pages 64x64", 64, 64, 1024, 1024, goal_ms=1.28),
    Case("pages 64x64 winners", 64, 64, 1024, 1024, what="winners"),
    Case("pages 32x32 Lq 1030", 32, 32, 1030, 1030),
    Case("tiny 8x8", 8, 8, 32, 64),
    Case("fp32 64x64", 64, 64, 32, 300, dtype="float32"),
    Case("fp32 rerank 1k", 1, 1000, 32, 300, dtype="float32"),
    Case("fp32 pages 16x16", 16, 16, 1024, 1024, dtype="float32"),
)


def prepare(x: Inputs, contender: Contender, seconds: float) -> dict:
    """Compile a contender, check it and measure its memory, or return the reason for not timing it."""
    if isinstance(contender, str):
        return {"skipped": contender}
    if seconds <= 0:
        return {"skipped": "no time left"}
    try:
        out, first = gpu.first_call(contender, min(seconds, FIRST_CALL_SECONDS))
        scores = out[0] if isinstance(out, tuple) else out
        assert isinstance(scores, Tensor)
        error = common.error_of(x, scores.detach())
        del out, scores
        if not error < TOLERANCE:
            return {"failed": f"wrong: relative error {error:.1e}"}
        exact = error < EXACT[str(x.Q.dtype).removeprefix("torch.")]
        found = {"error": error, "exact": exact, "first_s": first}
        return {**found, "peak_mb": gpu.peak_bytes(contender) / 2**20}
    except (Exception, gpu.TooSlowError) as failure:
        return {"failed": gpu.reason(failure)}


def measure(case: Case, x: Inputs, found: Mapping[str, Contender], timer: gpu.Timer, record: dict, end: float) -> None:
    """Add each contender of `found` to the record of its case."""
    entries = {name: prepare(x, contender, end - time.monotonic()) for name, contender in found.items()}
    ready = {n: f for n, f in found.items() if not isinstance(f, str) and "error" in entries[n]}
    try:
        times = timer.compare(ready)
    except Exception as failure:
        times = {}
        entries |= {name: {"failed": gpu.reason(failure)} for name in ready}
    for name, ms in times.items():
        entries[name] |= {
            "ms": ms,
            "tflops": case.operations / ms / 1e9,
            "gbs": case.bytes / ms / 1e6,
            "of_floor": record["floor_ms"] / ms,
        }
    record["contenders"] |= entries


def new_record(case: Case, timer: gpu.Timer, ceiling: dict[str, float], traffic: Tensor) -> dict:
    floor = max(case.operations / ceiling["tflops"] / 1e9, case.bytes / ceiling["gbs"] / 1e6)
    read = timer(lambda: timer.read(traffic[: -(-case.bytes // 4)]))
    work = {"operations": case.operations, "bytes": case.bytes}
    return {"case": asdict(case), **work, "floor_ms": floor, "read_ms": read, "contenders": {}}


def host_microseconds(rounds: int = 500) -> dict[str, float]:
    """Return the host time of a tiny call without gradients, with kernels running behind the host."""
    case = Case("host", 8, 8, 32, 64, d=64)
    x = Inputs(case, "cuda")
    found = contenders.forward(case, x)
    found["torch.ops.lik.maxsim"] = lambda: torch.ops.lik.maxsim(x.Q, x.D)
    found["lik_ops.maxsim_with_argmax"] = lambda: lik_ops.maxsim_with_argmax(x.Q, x.D)
    return {n: gpu.host_microseconds(f, rounds) for n, f in found.items() if not isinstance(f, str)}


def report(record: dict, names: Mapping[str, object]) -> None:
    case = record["case"]
    goal = f", goal {case['goal_ms']}" if case["goal_ms"] else ""
    least = f"floor {record['floor_ms']:.4f} ms, read {record['read_ms']:.4f} ms"
    print(f"{case['name']} ({common.shape_of(case)}): {least}{goal}")
    for name in names:
        r = record["contenders"][name]
        if "ms" not in r:
            print(f"  {name:26} {'; '.join(f'{k}: {v}' for k, v in r.items())}")
            continue
        print(
            f"  {name:26} {r['ms']:8.4f} ms  {r['tflops']:6.0f} TFLOP/s  {r['gbs']:5.0f} GB/s  "
            f"{r['of_floor']:.2f} of floor  {r['peak_mb']:8.1f} MB  error {r['error']:.0e}  first {r['first_s']:.1f} s",
            flush=True,
        )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="timed calls per contender (default 30)")
    parser.add_argument("--only", default="", help="cases whose name contains one of these comma-separated texts")
    parser.add_argument("--seconds", type=float, default=180, help="start no row after this time (default 180)")
    parser.add_argument("--first", type=float, default=0, help="seconds to compile all rows in parallel (default 0)")
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/forward.json)")
    args = parser.parse_args()
    cases = [case for case in CASES if any(part in case.name for part in args.only.split(","))]
    compile_first((case.name for case in cases), args.first)
    start = time.monotonic()
    end = start + args.seconds
    timer = gpu.Timer(args.rounds)
    ceiling = gpu.ceilings(timer)
    print(", ".join(f"{name} {value:.4g}" for name, value in ceiling.items()))
    traffic = torch.randint(0, 7, (max(case.bytes for case in cases) // 4 + 1,), dtype=torch.int32, device="cuda")
    records = {case.name: new_record(case, timer, ceiling, traffic) for case in cases}
    del traffic
    host = host_microseconds()
    print("host us:", ", ".join(f"{name} {us:.1f}" for name, us in host.items()))
    for compiled in (False, True):
        for case in sorted(cases, key=lambda case: case.name not in COMPILED_FIRST) if compiled else cases:
            if compiled and time.monotonic() > end:
                records[case.name]["contenders"]["compiled eager"] = {"skipped": "no time left"}
                continue
            torch.cuda.empty_cache()
            x = Inputs(case, "cuda")
            found = {"compiled eager": contenders.compiled_eager(case, x)} if compiled else contenders.forward(case, x)
            measure(case, x, found, timer, records[case.name], end)
            report(records[case.name], found)
            del x, found
    seconds = time.monotonic() - start
    settings = {"rounds": args.rounds, "seconds": seconds, "ceilings": ceiling, "host_us": host}
    print(f"{seconds:.0f} s; wrote", end=" ")
    print(common.write("forward", list(records.values()), *contenders.PEERS, path=args.out, **settings))


if __name__ == "__main__":
    main()
