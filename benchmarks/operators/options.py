"""Measure the cost of each option on this GPU, compared with the plain call and with the same result by hand.

    python -m benchmarks.operators.options [--only normalize] [--rounds 30] [--out FILE]

Times are median device times, each call on a flushed L2 cache. ``by hand`` avoids the option: PyTorch normalizes the
tokens for a plain call. Each result is checked against fp64 first. The script fails if an option is slower than doing
the same by hand, by more than `NOISE`. ``goal`` is the largest allowed cost relative to the plain call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

import lik_ops
from lik_ops.gpu import choose

from ..support import common, gpu
from ..support.common import (
    Case,
    Inputs,
)
from ..support.runs import (
    Run,
)
from . import training

NOISE = 1.03
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Row:
    """A case with an option, and the largest allowed time as a multiple of the case without it."""

    case: Case
    goal: float


PAGES = {"Lq": 1024, "Ld": 1024}
SHORT = {"Lq": 32, "Ld": 300}
ROWS = (
    Row(Case("normalize 1x1k", 1, 1000, **SHORT, normalize=True), 1.10),
    Row(Case("normalize 4x1k", 4, 1000, **SHORT, normalize=True), 1.15),
    Row(Case("normalize 16x1k", 16, 1000, **SHORT, normalize=True), 1.15),
    Row(Case("normalize 16x1k winners", 16, 1000, **SHORT, normalize=True, what="winners"), 1.35),
    Row(Case("normalize pages 64x64", 64, 64, **PAGES, normalize=True), 1.10),
    Row(Case("normalize pages 32x32", 32, 32, **PAGES, normalize=True), 1.10),
    Row(Case("normalize 16x1k d 64", 16, 1000, **SHORT, d=64, normalize=True), 1.2),
    Row(Case("normalize 16x1k d 320", 16, 1000, **SHORT, d=320, normalize=True), 1.2),
    Row(Case("normalize step 256x256", 256, 256, **SHORT, normalize=True, what="step"), 1.15),
    Row(Case("normalize step pages 32x32", 32, 32, **PAGES, normalize=True, what="step"), 1.15),
    Row(Case("winners 1x1k", 1, 1000, **SHORT, what="winners"), 1.10),
    Row(Case("winners 16x1k", 16, 1000, **SHORT, what="winners"), 1.20),
    Row(Case("winners pages 64x64", 64, 64, **PAGES, what="winners"), 1.15),
    Row(Case("holes 4x1k", 4, 1000, **SHORT, mask="holes"), 1.15),
    Row(Case("holes 16x1k", 16, 1000, **SHORT, mask="holes"), 1.15),
    Row(Case("holes 16x2k Lq 20 d 96", 16, 2000, 20, 77, d=96, mask="holes"), 1.15),
    Row(Case("holes step pages 32x32", 32, 32, **PAGES, mask="holes", what="step"), 1.15),
    Row(Case("weights 16x1k", 16, 1000, **SHORT, weighted=True), 1.05),
)


def plain(case: Case) -> Case:
    """Return the case without its option and without winners. A row has only one option."""
    what = case.what if case.normalize or case.what == "step" else "scores"
    return replace(case, normalize=False, mask="", weighted=False, what=what)


def called(case: Case, x: Inputs, by_hand: bool = False) -> Callable[[], object]:
    """Return the call of a case. With `by_hand`, PyTorch normalizes the tokens."""

    def score(Q: Tensor, D: Tensor, options: dict) -> Tensor:
        if by_hand:
            Q, D, options = normalize(Q, dim=-1), normalize(D, dim=-1), {**options, "normalize": False}
        if case.what == "winners":
            masks = options["q_mask"], options["d_mask"], options["q_weight"], options["normalize"]
            return torch.ops.lik.maxsim_fwd(Q, D, *masks, torch.int16, "auto")[0]
        return lik_ops.maxsim(Q, D, **options)

    if case.what == "step":
        return lambda: training.step(lambda Q, D: score(Q, D, x.options), x, x.grad_scores)
    return lambda: score(x.Q, x.D, x.options)


def check(row: Row, x: Inputs, call: Callable[[], object]) -> float:
    """Return the relative error of the scores, or the larger one of both gradients, against fp64."""
    if row.case.what == "step":
        error = max(training.errors_of(x, lambda Q, D: lik_ops.maxsim(Q, D, **x.options)).values())
    else:
        scores = call()
        assert isinstance(scores, Tensor)
        error = common.error_of(x, scores)
    if not error < TOLERANCE:
        raise AssertionError(f"{row.case.name}: relative error {error:.1e}")
    return error


def measure(row: Row, timer: gpu.Timer) -> dict:
    x, without = Inputs(row.case, "cuda"), plain(row.case)
    functions = {"option": called(row.case, x), "plain": called(without, Inputs(without, "cuda"))}
    if row.case.normalize:
        functions["by hand"] = called(row.case, x, by_hand=True)
    with torch.set_grad_enabled(row.case.what == "step"):
        error = check(row, x, functions["option"])
        ms = timer.compare(functions)
    cost = ms["option"] / ms["plain"]
    found = {"case": asdict(row.case), "goal": row.goal, "ms": ms, "cost": cost, "error": error}
    argmax = None if row.case.what == "scores" else torch.int16
    return found | {"kernel": choose.choose_dense(x.Q, x.D, x.d_mask, x.normalize, argmax).kernel}


def main() -> None:
    run = Run("options", __doc__)
    args = run.parser.parse_args()
    timer = gpu.Timer(args.rounds)
    ceiling = gpu.ceilings(timer)
    for row in run.asked(((row.case.name, row) for row in ROWS), args):
        r = run.keep(measure(row, timer), args, ceilings=ceiling)
        times = ", ".join(f"{name} {ms:.4f}" for name, ms in r["ms"].items())
        print(f"{row.case.name:28} {times} ms: {r['cost']:.2f}, goal {row.goal:.2f}; {r['kernel']}", flush=True)
    found = [(r["case"]["name"], r["ms"]) for r in run.records]
    slower = [name for name, ms in found if ms["option"] > NOISE * ms.get("by hand", float("inf"))]
    if slower:
        sys.exit(f"slower than by hand: {', '.join(slower)}")


if __name__ == "__main__":
    main()
