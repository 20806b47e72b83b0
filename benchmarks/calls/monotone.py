"""Find calls that are slower than a call that asks for more, for random shapes.

    python -m benchmarks.calls.monotone [--only NAME] [--rounds 15] [--cases 120] [--part 1/8] [--out FILE]

A stronger call computes everything that the plain call computes, and more. It adds `normalize`, argmax, a document
mask, 5 % more documents, longer documents or wider features. A plain call that needs over 1.05 times as long as a
stronger one has the wrong kernel or configuration.

Times are median device times, each call on a flushed L2 cache, in rounds over all calls of a shape. ``floor_ms`` is
the time of the product or of reading the tokens, by the ceilings of the same run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import torch

import lik_ops

from ..support import gpu
from ..support.common import (
    Case,
    Inputs,
)
from ..support.runs import (
    Run,
)

LIMIT = 1.05
# A reported problem: 32 x 200 documents of 1,024 tokens at d 256 cost 0.343 ms, but 0.205 ms with `normalize`.
KNOWN = (
    Case("reported", 32, 200, 32, 1024, d=256),
    Case("reported, d 192", 32, 200, 32, 1024, d=192),
    Case("reported, d 320", 32, 200, 32, 1024, d=320),
    Case("reported, d 512", 32, 200, 32, 1024, d=512),
    Case("reported, 300 tokens", 32, 600, 32, 300, d=256),
)
MOST_OPERATIONS, MOST_BYTES = 4e11, 2e9


def drawn(seed: int) -> Iterator[Case]:
    """Yield random cases of moderate cost without end."""
    draw = random.Random(seed)
    while True:
        case = Case(
            "",
            Nq=draw.choice((1, 2, 4, 8, 16, 32, 64, 256)),
            Nd=draw.choice((8, 64, 100, 200, 256, 1000, 2000, 10_000)),
            Lq=draw.choice((8, 16, 20, 32, 48, 64, 128, 256, 1024)),
            Ld=draw.choice((20, 64, 100, 128, 180, 256, 300, 512, 1024, 2048)),
            d=draw.choice((64, 96, 128, 128, 160, 192, 256, 256, 320, 512, 768)),
            dtype=draw.choice(("bfloat16", "bfloat16", "bfloat16", "float16", "float32")),
        )
        if case.operations <= MOST_OPERATIONS and case.bytes <= MOST_BYTES and case.operations > 1e8:
            yield Case(f"{case.Nq} x {case.Nd}, {case.Lq}/{case.Ld}, d {case.d}, {case.dtype}", **fields(case))


def fields(case: Case) -> dict:
    return {name: getattr(case, name) for name in ("Nq", "Nd", "Lq", "Ld", "d", "dtype")}


def calls(case: Case) -> dict[str, Callable[[], object]]:
    """Return the plain call and the stronger calls, named by what they add."""
    x = Inputs(case, "cuda")
    everything = torch.ones(x.D.shape[:2], dtype=torch.bool, device="cuda")

    def larger(**sizes: int) -> Callable[[], object]:
        y = Inputs(Case("", **{**fields(case), **sizes}), "cuda")
        return lambda: lik_ops.maxsim(y.Q, y.D)

    return {
        "plain": lambda: lik_ops.maxsim(x.Q, x.D),
        "normalize": lambda: lik_ops.maxsim(x.Q, x.D, normalize=True),
        "argmax": lambda: lik_ops.maxsim_with_argmax(x.Q, x.D),
        "mask": lambda: lik_ops.maxsim(x.Q, x.D, None, everything),
        "more documents": larger(Nd=case.Nd + max(case.Nd // 20, 1)),
        "longer documents": larger(Ld=-(-(case.Ld + 1) // 64) * 64),
        "longer queries": larger(Lq=case.Lq + max(case.Lq // 16, 1)),
        "wider features": larger(d=-(-(case.d + 1) // 64) * 64),
    }


def measure(case: Case, timer: gpu.Timer, ceilings: dict[str, float]) -> dict:
    times = timer.compare(calls(case))
    plain = times["plain"]
    floor = max(case.operations / ceilings["tflops"] / 1e9, case.bytes / ceilings["gbs"] / 1e6)
    slower = {name: plain / ms for name, ms in times.items() if plain > LIMIT * ms}
    return {"case": {"name": case.name, **fields(case)}, "ms": times, "floor_ms": floor, "slower_than": slower}


@torch.no_grad()
def main() -> None:
    run = Run("monotone", __doc__, rounds=15)
    run.parser.add_argument("--cases", type=int, default=120, help="random shapes (default 120)")
    run.parser.add_argument("--seed", type=int, default=0)
    run.parser.add_argument("--part", default="1/1", help="2/8: every eighth shape, starting at the second")
    args = run.parser.parse_args()
    timer = gpu.Timer(args.rounds)
    ceilings = gpu.ceilings(timer)
    part, parts = map(int, args.part.split("/"))
    cases = [*KNOWN, *itertools.islice(drawn(args.seed), args.cases)][part - 1 :: parts]
    for case in run.asked(((case.name, case) for case in cases), args):
        record = run.keep(measure(case, timer, ceilings), args)
        cells = ", ".join(f"{name} {ms:.4f}" for name, ms in record["ms"].items())
        print(f"{case.name:40} floor {record['floor_ms']:.4f}, {cells}  {record['slower_than'] or ''}", flush=True)


if __name__ == "__main__":
    main()
