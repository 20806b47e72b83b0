"""Find cliffs: time random calls of all scoring functions, relative to the least time that a call needs.

    python -m benchmarks.calls.cliffs [--calls 2000] [--kinds 60] [--seconds 400] [--first 200] [--out FILE]
    python -m benchmarks.calls.cliffs --rehearse --out FILE    # a few small calls on the CPU, to check this script

The floor of a call is the longest of three times: its bytes at the measured read rate, its products at the measured
rate of their dtype, and an empty kernel. Products without a rate of their own have the rate of their terms
(`random_calls.PRODUCTS`). The floor of a training step ignores the products of the backward.

A call is also timed next to compositions of other functions with the same scores. If a call needs over 1.05 times as
long as a composition, both are measured again in more rounds. If the figure stays, the script lists the call and
exits with status 1.

Times are median device times, each call on a flushed L2 cache. Kernels are compiled first, for at most `--first`
seconds, in `--processes` and then in threads, and only calls with compiled kernels are timed. No measurement starts
after `--seconds`. The next run with the same output file, GPU, commit and draws continues with the calls that are
missing. `make figures` draws ``docs/images/cliffs.svg``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lik_ops
from lik_ops import backends
from lik_ops.ops.fast_path.eager import clear_call_caches

from ..support import common, gpu, runs
from .random_calls import CPU_SIZES, DTYPES, GPU_SIZES, NOT_DEMANDED, OPTIONS, Call, Prepared, draw_calls, prepare

LIMIT = 1.05
RESOLUTION_MS = 0.001  # CUDA events resolve .0005 ms, and a difference has two of them
KERNELS_AT_ONCE = 64  # kernels that are compiled before the clock is read again
CALLS_BETWEEN_WRITES = 50
# Relative to the norm of the scores. Compositions differ from calls by the rounding of tokens or of queries to int8.
TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-2, "tf32": 2e-2, "float32": 1e-5}
Functions = Mapping[str, Callable[[], Tensor]]


class HostTimer:
    """Times calls on the CPU like `gpu.Timer`, for a rehearsal."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def compare(self, functions: Functions) -> dict[str, float]:
        """Return the median milliseconds of each function."""
        return {name: found["median"] for name, found in common.interleaved(functions, self.rounds).items()}


Timer = gpu.Timer | HostTimer


def measure_rates(timer: Timer, device: str) -> dict[str, float]:
    """Return GB/s of a read, milliseconds of an empty kernel, and TFLOP/s of products of each dtype."""
    n = 8192 if device == "cuda" else 256
    a, b = (torch.randint(-8, 8, (n, n), device=device, dtype=torch.int8) for _ in range(2))
    products: dict[str, Callable[[], Tensor]] = {"int8": lambda: torch._int_mm(a, b.t())}
    for name in ("bfloat16", "float16"):
        x, y = (torch.randn(n, n, device=device).to(getattr(torch, name)) for _ in range(2))
        products[name] = lambda x=x, y=y: x @ y
    ms = timer.compare(products)
    rates = {name: 2 * n**3 / ms[name] / 1e9 for name in products}
    if isinstance(timer, gpu.Timer):
        return {**gpu.ceilings(timer), **rates}
    big = torch.ones(2**22)
    found = timer.compare({"read": big.sum, "empty": lambda: big[:0]})
    return {"gbs": big.numel() * 4 / found["read"] / 1e6, "empty_ms": found["empty"], **rates}


def use_precision(call: Call) -> None:
    """Allow TF32 for the calls that ask for it only."""
    torch.backends.cuda.matmul.fp32_precision = "tf32" if call.dtype == "tf32" else "ieee"


def _find_kernels(call: Call, device: str, backend: Any) -> dict[tuple, tuple]:
    """Return the kernels of a call and its compositions that are not compiled yet."""
    use_precision(call)
    made = prepare(call, device)
    # A backward in another thread would launch kernels.
    with backend.collect_launches() as launches, torch.autograd.set_multithreading_enabled(False):
        for function in (made.function, *made.compositions.values()):
            function()
    return backend.find_missing_kernels(launches)


def compile_in_processes(count: int, seconds: float) -> None:
    """Compile all kernels in `count` processes for at most `seconds`, so that Triton finds them in its cache."""
    options = ["--processes", "0", "--seconds", "0", "--first", str(seconds), "--part"]
    runs.run_silently(([*options, str(n), str(count)] for n in range(count)), seconds)


def compile_first(calls: list[Call], device: str, end: float) -> list[Call]:
    """Compile in threads until `end`, and return the calls for which all kernels are compiled, also of compositions.

    `end` is a time of the monotonic clock.
    """
    missing: dict[tuple, tuple] = {}
    ready = 0
    for n, call in enumerate(calls):
        backend = backends.select_backend(torch.device(device), getattr(torch, DTYPES[call.dtype]))
        if not hasattr(backend, "collect_launches"):
            return calls
        if time.monotonic() > end:
            return calls[:ready]
        with contextlib.suppress(Exception):  # the call fails again when it is timed
            missing |= _find_kernels(call, device, backend)
        if len(missing) >= KERNELS_AT_ONCE or call is calls[-1]:
            backend.compile_in_parallel(missing)
            missing.clear()
        ready = ready if missing else n + 1
    return calls


def check_scores(call: Call, made: Prepared) -> None:
    """Raise AssertionError unless the compositions of a call give its scores."""
    scores = made.function().double()
    # A sum of similarities of few tokens may be near 0. Unrelated tokens of norm 1 have similarities of 1 / sqrt(d).
    norm = max(float(scores.norm()), scores.numel() ** 0.5 * call.Lq / call.d**0.5)
    for name, function in made.compositions.items():
        error = float((function().double() - scores).norm()) / norm
        if not error <= TOLERANCE[call.dtype]:
            raise AssertionError(f"{call}: {name} has other scores, error {error:.1e}")


def find_slower(ms: Mapping[str, float]) -> dict[str, float]:
    """Return how many times slower the call is than each composition that is faster by more than `LIMIT`."""
    own = ms["call"]
    return {name: own / other for name, other in ms.items() if own > max(LIMIT * other, other + RESOLUTION_MS)}


def measure(call: Call, device: str, timer: Timer, longer: Timer, rates: Mapping[str, float]) -> dict[str, Any]:
    """Return the record of a call."""
    use_precision(call)
    made = prepare(call, device)
    check_scores(call, made)
    functions: Functions = {"call": made.function, **made.compositions}
    ms = timer.compare(functions)
    if find_slower(ms):
        ms = longer.compare(functions)
    floor = made.floor_ms(rates)
    return {**asdict(call), "floor_ms": floor, "ratio": ms["call"] / floor, "ms": ms, "slower": find_slower(ms)}


def demanded(record: dict[str, Any]) -> dict[str, float]:
    """Return the compositions that a call has to match and does not."""
    return {name: ratio for name, ratio in record.get("slower", {}).items() if name not in NOT_DEMANDED}


def summarize(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the median and the largest time over floor of each option and dtype."""
    for option in OPTIONS:
        for dtype in DTYPES:
            own = [r for r in found if (r["option"], r["dtype"]) == (option, dtype) and "ratio" in r]
            if own:
                ratios = {"median_ratio": statistics.median(r["ratio"] for r in own)}
                ratios["worst_ratio"] = max(r["ratio"] for r in own)
                yield {"case": {"name": f"{option}, {dtype}", "count": len(own)}, **ratios}


class Results:
    """The output file: a summary as records, and one line for each call."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings, self.found = path, settings, list[dict[str, Any]]()
        self.environment = common.environment()
        if path.exists():
            before = json.loads(path.read_text())
            if self._source(before) == self._source({"environment": self.environment, "settings": settings}):
                self.found, self.settings = before["calls"], before["settings"] | settings

    @staticmethod
    def _source(document: dict[str, Any]) -> tuple:
        """Return what two runs must share if their calls belong together."""
        environment, settings = document["environment"], document["settings"]
        return (*(environment[x] for x in ("commit", "gpus", "versions")), settings.get("seed"), settings.get("kinds"))

    def write(self) -> None:
        """Write the file, with one line for each call."""
        records = list(summarize(self.found))
        head = {"benchmark": "cliffs", "environment": self.environment, "settings": self.settings, "records": records}
        lines = ",\n".join(f"  {json.dumps(r)}" for r in sorted(self.found, key=lambda r: r["number"]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(head, indent=1).removesuffix("\n}") + f',\n "calls": [\n{lines}\n ]\n}}\n')


def report(found: list[dict[str, Any]]) -> int:
    """Print the worst calls and all that a composition beats, and return the number of the latter and of failures."""
    timed = [r for r in found if "ratio" in r]
    worst = sorted(timed, key=lambda r: -r["ratio"])
    if timed:
        print(f"{len(timed)} calls, time over floor: median {statistics.median(r['ratio'] for r in timed):.2f}")
    for record in worst[:20]:
        print(f"  {record['ratio']:7.2f}  {record['ms']['call']:.4f} ms  {name_of(record)}")
    slower, failed = [r for r in found if demanded(r)], [r for r in found if "failed" in r]
    for record in sorted(slower, key=lambda r: -max(demanded(r).values())):
        cells = ", ".join(f"{ratio:.2f} x {name}" for name, ratio in demanded(record).items())
        print(f"SLOWER THAN ITS COMPOSITION  {record['ms']['call']:.4f} ms  {name_of(record)}: {cells}")
    for record in failed:
        print(f"FAILED  {name_of(record)}: {record['failed']}")
    return len(slower) + len(failed)


def name_of(record: dict[str, Any]) -> str:
    """Return the description of the call of a record."""
    return str(Call(**{name: record[name] for name in Call.__dataclass_fields__}))


def measure_all(calls: list[Call], device: str, timers: tuple[Timer, Timer], results: Results, end: float) -> None:
    """Measure the calls until the monotonic clock says `end`."""
    for n, call in enumerate(calls):
        if time.monotonic() > end:
            break
        if "rates" not in results.settings:
            results.settings["rates"] = measure_rates(timers[0], device)
        try:
            record = measure(call, device, *timers, results.settings["rates"])
        except Exception as failure:  # the other calls are measured nevertheless
            record = {**asdict(call), "failed": gpu.reason(failure)}
        results.found.append(record)
        if n % CALLS_BETWEEN_WRITES == CALLS_BETWEEN_WRITES - 1:
            results.write()
            clear_call_caches()  # captured calls keep memory
            if device == "cuda":
                torch.cuda.empty_cache()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--calls", type=int, default=2000, help="random calls (default 2000)")
    add("--kinds", type=int, default=60, help="combinations of option, dtype and d (default 60)")
    add("--seed", type=int, default=0)
    add("--rounds", type=int, default=7, help="timed calls (default 7), and three times as many for a second look")
    add("--seconds", type=float, default=400, help="no measurement starts later (default 400)")
    add("--first", type=float, default=200, metavar="SECONDS", help="time for compiling (default 200)")
    add("--processes", type=int, default=os.cpu_count(), help="that compile, for half of this time (default: cores)")
    add("--part", type=int, nargs=2, default=(0, 1), metavar=("N", "COUNT"), help="only every COUNT-th call, from N on")
    add("--out", type=Path, default=common.RESULTS / "cliffs.json", help="default benchmarks/results/cliffs.json")
    add("--rehearse", action="store_true", help="small calls on the CPU, whose times are not judged")
    return parser.parse_args(argv)


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    """Measure what is missing in the output file, and return the exit status."""
    args, begin = parse(argv), time.monotonic()
    device, sizes = ("cpu", CPU_SIZES) if args.rehearse else ("cuda", GPU_SIZES)
    make_timer = HostTimer if args.rehearse else gpu.Timer
    drawn = list(draw_calls(args.seed, args.calls, args.kinds, sizes))[args.part[0] :: args.part[1]]
    results = Results(args.out, {name: getattr(args, name) for name in ("seed", "kinds", "rounds")})
    known = {record["number"] for record in results.found}
    missing = [call for call in drawn if call.number not in known]
    print(f"{len(missing)} of {len(drawn)} calls are not measured yet", flush=True)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        if device == "cuda" and missing and args.processes:
            compile_in_processes(args.processes, args.first / 2)
            print(f"compiled in processes in {time.monotonic() - begin:.0f} s", flush=True)
        with lik_ops.norm_warning(False):
            ready = compile_first(missing, device, begin + args.first)
            print(f"kernels of {len(ready)} calls compiled in {time.monotonic() - begin:.0f} s", flush=True)
            timers = make_timer(args.rounds), make_timer(3 * args.rounds)
            measure_all(ready, device, timers, results, begin + args.seconds)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
        results.write()
    count = report(results.found)
    if args.rehearse:
        return int(any("failed" in record for record in results.found))
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
