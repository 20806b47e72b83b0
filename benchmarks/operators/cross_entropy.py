"""Measure time and memory of a step of the contrastive loss on this GPU.

    python -m benchmarks.operators.cross_entropy [--only 256] [--rounds 30] [--out FILE]

A step is forward and backward with both gradients. Document i belongs to query i, and the temperature is 1. The fused
loss of flash-maxsim supports only this case. It is not an autograd operator and adds to ``.grad``.

- ``scores``: `F.cross_entropy` of `lik_ops.maxsim`
- ``recomputed``: the same without saved winners
- ``flash-maxsim, scores``: `F.cross_entropy` of flash-maxsim's scores

Gradients are checked against the gradients of the same tokens in fp32. ``ms`` are median device times, each call on a
flushed L2 cache with the host ahead. ``host_us`` is the host time of a step. ``own_mb`` is the memory of the
gradients, which every implementation needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch import Tensor

import lik_ops

from ..support import common, contenders, gpu
from ..support.common import (
    Case,
    Inputs,
)
from ..support.runs import (
    Run,
)

TOLERANCE = 2e-2
COMPILE_SECONDS = 60
CASES = (
    Case("loss 64x64", 64, 64, 32, 180, what="step", goal_ms=0.35),
    Case("loss 256x256", 256, 256, 32, 300, what="step", goal_ms=0.75),
    Case("loss 4096x4096", 4096, 4096, 32, 180, what="step"),
)
Step = Callable[[], tuple[Tensor, ...]]
FUSED = "lik_ops"


def step(loss: Callable[[Tensor, Tensor], Tensor], x: Inputs) -> tuple[Tensor, ...]:
    Q, D = x.Q.detach().requires_grad_(), x.D.detach().requires_grad_()
    return torch.autograd.grad(loss(Q, D), (Q, D))


def of_scores(score: Callable[..., Tensor], labels: Tensor, **options) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda Q, D: F.cross_entropy(score(Q, D, **options), labels)


def flash_fused(x: Inputs) -> Step | str:
    try:
        from flash_maxsim.flash_maxsim_contrastive import colbert_contrastive_step
    except ImportError:
        return contenders.NOT_INSTALLED

    def run() -> tuple[Tensor, ...]:
        Q, D = x.Q.detach(), x.D.detach()
        colbert_contrastive_step(Q, D)
        assert Q.grad is not None and D.grad is not None
        return Q.grad, D.grad

    return run


def steps(case: Case, x: Inputs) -> dict[str, Step | str]:
    labels = torch.arange(case.Nq, device=x.Q.device)
    losses = {
        FUSED: lambda Q, D: lik_ops.maxsim_cross_entropy(Q, D, labels),
        "recomputed": of_scores(lik_ops.maxsim, labels, recompute=True),
        "scores": of_scores(lik_ops.maxsim, labels),
    }
    found: dict[str, Step | str] = {name: lambda loss=loss: step(loss, x) for name, loss in losses.items()}
    score = contenders.training(case, x)["flash-maxsim"]
    found["flash-maxsim, scores"] = score if isinstance(score, str) else lambda: step(of_scores(score, labels), x)
    found["flash-maxsim"] = flash_fused(x)
    return found


def errors_of(case: Case, x: Inputs, found: tuple[Tensor, ...]) -> list[float]:
    """Return relative errors of both gradients against the same tokens in fp32.

    Other benchmarks check fp32 steps.
    """
    Q, D = (t.detach().float().requires_grad_() for t in (x.Q, x.D))
    scores = lik_ops.maxsim(Q, D, recompute=True)
    loss = F.cross_entropy(scores, torch.arange(case.Nq, device=Q.device))
    return [common.relative_error(a, e) for a, e in zip(found, torch.autograd.grad(loss, (Q, D)), strict=True)]


def measure(case: Case, timer: Callable[[dict], dict[str, float]], device: str = "cuda") -> dict:
    x = Inputs(case, device)
    functions: dict[str, Step] = {}
    results: dict[str, dict] = {}
    for name, run in steps(case, x).items():
        if isinstance(run, str):
            results[name] = {"skipped": run}
            continue
        try:
            gpu.first_call(run, COMPILE_SECONDS)
            errors = errors_of(case, x, run())
            if name == FUSED and not max(errors) < TOLERANCE:
                raise AssertionError(f"{case.name}: relative errors {errors}")
            functions[name] = run
            host = gpu.host_microseconds(run, 20)
            results[name] = {"errors": errors, "peak_mb": gpu.peak_bytes(run) / 2**20, "host_us": host}
        except (gpu.TooSlowError, torch.cuda.OutOfMemoryError) as failure:
            results[name] = {"failed": gpu.reason(failure)}
    for name, ms in timer(functions).items():
        results[name]["ms"] = ms
    own = (x.Q.numel() + x.D.numel()) * case.itemsize
    return {"case": asdict(case), "goal_ms": case.goal_ms, "own_mb": own / 2**20, "results": results}


def report(record: dict) -> None:
    print(f"{record['case']['name']}: gradients {record['own_mb']:.0f} MiB, goal {record['goal_ms']} ms")
    for name, r in record["results"].items():
        if "ms" not in r:
            print(f"  {name:22} {'; '.join(f'{k}: {v}' for k, v in r.items())}")
            continue
        errors = " ".join(f"{e:.0e}" for e in r["errors"])
        print(f"  {name:22} {r['ms']:9.4f} ms  {r['peak_mb']:8.1f} MiB  host {r['host_us']:.0f} us  errors {errors}")


def main() -> None:
    run = Run("cross_entropy", __doc__, *contenders.PEERS)
    args = run.parser.parse_args()
    timer = gpu.Timer(args.rounds)
    ceiling = gpu.ceilings(timer)
    for case in run.asked(((case.name, case) for case in CASES), args):
        report(run.keep(measure(case, timer.compare), args, ceilings=ceiling))


if __name__ == "__main__":
    main()
