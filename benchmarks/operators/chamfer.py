"""Measure the Chamfer distance on this GPU, compared with flash-maxsim and plain PyTorch.

    python -m benchmarks.operators.chamfer [--only step] [--rounds 20] [--out FILE]

Times are median device times, each call on a flushed L2 cache. All contenders compute both directions of the distance.
``eager`` stores all distances with `torch.cdist`. The largest relative error of the distances to nearest points is
measured against fp64 for some points. ``peak_mb`` is the memory of a call beyond its inputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

import lik_ops

from ..support import gpu
from ..support.runs import (
    Run,
)

TOLERANCE = 1e-4
SOME = 64  # points to check
SECONDS = 60


@dataclass(frozen=True)
class Clouds:
    """A case: point counts, coordinates, and whether gradients are computed too."""

    name: str
    N: int
    d: int
    metric: str = "sqeuclidean"
    step: bool = False
    goal_ms: float | None = None


CASES = (
    Clouds("65536 d 3", 65536, 3, goal_ms=2.2),
    Clouds("65536 d 3 l1", 65536, 3, "l1"),
    Clouds("16384 d 128", 16384, 128, goal_ms=0.6),
    Clouds("65536 d 3 step", 65536, 3, step=True, goal_ms=3.0),
    Clouds("16384 d 128 step", 16384, 128, step=True, goal_ms=0.9),
)
Distance = Callable[[Tensor, Tensor], Tensor]


def eager(metric: str) -> Distance:
    def distance(P: Tensor, R: Tensor) -> Tensor:
        c = torch.cdist(P, R, 1.0) if metric == "l1" else torch.cdist(P, R).square()
        return c.amin(1).mean() + c.amin(0).mean()

    return distance


def distances(case: Clouds) -> dict[str, Distance]:
    found: dict[str, Distance] = {"lik_ops": lambda P, R: lik_ops.chamfer_distance(P, R, metric=case.metric)}
    if case.metric == "sqeuclidean":
        try:
            flash = importlib.import_module("flash_maxsim")
            train, plain = flash.flash_chamfer_invgrid_train, flash.flash_chamfer
            found["flash-maxsim"] = train if case.step else lambda P, R: plain(P, R, metric="l2_sq")
        except (ImportError, AttributeError) as missing:
            print(f"flash-maxsim is left out: {missing}")
    return found | {"eager": eager(case.metric)}


def error_of(case: Clouds, P: Tensor, R: Tensor) -> float:
    """Return the largest relative error of our nearest-point distances, for the last points in both directions."""
    of_P, _, of_R, _ = torch.ops.lik.chamfer_fwd(P[None], R[None], None, None, case.metric)
    errors = []
    for found, X, Y in ((of_P, P, R), (of_R, R, P)):
        x = X[-SOME:].double()[:, None] - Y.double()
        c = x.abs().sum(-1) if case.metric == "l1" else x.square().sum(-1)
        expected = c.amin(1)
        errors.append(((found[0, -SOME:].double() - expected).abs() / expected).max())
    return max(map(float, errors))


def called(case: Clouds, distance: Distance, P: Tensor, R: Tensor) -> Callable[[], object]:
    if not case.step:
        return lambda: distance(P, R)
    p, r = (x.detach().requires_grad_() for x in (P, R))
    return lambda: torch.autograd.grad(distance(p, r), (p, r))


def measure(case: Clouds, timer: gpu.Timer) -> dict:
    torch.manual_seed(0)
    P, R = (torch.rand(case.N, case.d, device="cuda") for _ in range(2))
    functions, results = {}, {}
    for name, distance in distances(case).items():
        call = called(case, distance, P, R)
        try:
            with torch.set_grad_enabled(case.step):
                gpu.first_call(call, SECONDS)
                results[name] = {"peak_mb": gpu.peak_bytes(call) / 2**20}
            functions[name] = call
        except (gpu.TooSlowError, RuntimeError, TypeError) as failure:
            results[name] = {"failed": gpu.reason(failure)}
    results["lik_ops"]["error"] = error = error_of(case, P, R)
    if not error < TOLERANCE:
        raise AssertionError(f"{case.name}: relative error {error}")
    with torch.set_grad_enabled(case.step):
        for name, ms in timer.compare(functions).items():
            results[name]["ms"] = ms
    return {"case": asdict(case), "goal_ms": case.goal_ms, "results": results}


def main() -> None:
    run = Run("chamfer", __doc__, "flash-maxsim", rounds=20)
    args = run.parser.parse_args()
    timer = gpu.Timer(args.rounds)
    for case in run.asked(((case.name, case) for case in CASES), args):
        r = run.keep(measure(case, timer), args)["results"]
        times = ", ".join(f"{name} {found.get('ms', float('nan')):.4f}" for name, found in r.items())
        print(f"{case.name:18} {times} ms, goal {case.goal_ms}; error {r['lik_ops']['error']:.1e}", flush=True)


if __name__ == "__main__":
    main()
