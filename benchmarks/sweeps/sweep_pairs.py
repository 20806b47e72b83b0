"""Find the pair count from which a Gluon kernel is faster, and the documents that are worth splitting.

    python -m benchmarks.sweeps.sweep_pairs [--only "d 256"] [--rounds 15] [--out FILE]

The calls have fewer (row tile, document) pairs than SMs. ``generic`` and ``gluon`` force one side of the threshold,
``split`` lets long documents be split at 2,048 tokens, and ``table`` uses the built-in thresholds. Times are median
device times, each call on a flushed L2 cache. Each call must give the bits of the table's choice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

import lik_ops
from lik_ops.ops.fast_path import eager

from ..support import gpu
from ..support.common import (
    Case,
    Inputs,
)
from ..support.runs import (
    Run,
)

NEVER = 10**9
GLUON = {"gluon_configs._LEAST_PAIRS": 0, "choose._MOST_GLUON": 0}
GENERIC = {"gluon_configs._LEAST_PAIRS": NEVER, "gluon_configs.MOST_WHOLE": NEVER, "gluon_configs._LONG_WIDE": NEVER}
SIDES = {"table": {}, "generic": GENERIC | {"choose._LONG": NEVER}, "gluon": GLUON, "split": GENERIC}
ROWS = (
    *(
        Case(f"{Nq} x {Nd}, {Lq}/{Ld}, d {d}", Nq, Nd, Lq, Ld, d=d)
        for d in (128, 256, 768)
        for Nq, Lq in ((4, 32), (8, 32), (32, 32), (2, 128), (1, 300), (1, 1024))
        for Nd in (4, 8, 16, 32)
        for Ld in (180, 1024)
    ),
    *(
        Case(f"{what}: {Nq} x {Nd}, {Lq}/{Ld}, d 128", Nq, Nd, Lq, Ld, **options)
        for what, options in (
            ("mask", {"mask": "prefix"}),
            ("normalize", {"normalize": True}),
        )
        for Nq, Lq in ((32, 32), (1, 300), (1, 1024))
        for Nd in (4, 16, 32)
        for Ld in (180, 1024)
    ),
    *(
        Case(f"long: {Nq} x {Nd}, {Lq}/{Ld}, d {d}", Nq, Nd, Lq, Ld, d=d)
        for d in (64, 128, 256, 768)
        for Nq, Lq in ((1, 32), (4, 32), (1, 1024))
        for Nd in (4, 16, 48)
        for Ld in (2048, 3000, 8192)
    ),
)


@contextmanager
def forced(side: str) -> Iterator[None]:
    eager.clear_call_caches()
    with contextlib.ExitStack() as stack:
        for name, value in SIDES[side].items():
            stack.enter_context(mock.patch(f"lik_ops.gpu.{name}", value))
        yield
    eager.clear_call_caches()


def measure(case: Case, timer: gpu.Timer) -> dict:
    x = Inputs(case, "cuda")

    def call() -> torch.Tensor:
        return lik_ops.maxsim(x.Q, x.D, **x.options)

    expected = call()
    tried: dict[str, dict] = {}
    for side in SIDES:
        with forced(side):
            same = torch.equal(call(), expected)
            tried[side] = {"same_bits": same, "ms": timer(call)}
    return {"case": {"name": case.name}, "tried": tried}


@torch.no_grad()
def main() -> None:
    run = Run("sweep_pairs", __doc__, rounds=15)
    args = run.parser.parse_args()
    timer = gpu.Timer(args.rounds)
    for case in run.asked(((case.name, case) for case in ROWS), args):
        tried = run.keep(measure(case, timer), args)["tried"]
        cells = (f"{side} {found['ms']:.4f}" for side, found in tried.items())
        print(f"{case.name:32} {', '.join(cells)}", flush=True)
        if other := [side for side, found in tried.items() if not found["same_bits"]]:
            raise AssertionError(f"{case.name}: other bits with {', '.join(other)}")


if __name__ == "__main__":
    main()
