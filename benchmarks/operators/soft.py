"""Measure soft MaxSim on this GPU, compared with the hard maximum and plain PyTorch.

    python -m benchmarks.operators.soft [--only step] [--rounds 30] [--no-compile] [--out FILE]

Times are median device times, each call on a flushed L2 cache. Each contender is checked against fp64 first.

- ``hard``: `lik_ops.maxsim`
- ``eager``: `logsumexp` over all similarities in memory
- ``compiled``: the same under `torch.compile`
- ``learned``: lik_ops with a gradient of the temperature too, for steps

``peak_mb`` is the memory of a call beyond its inputs. ``own_mb`` is the memory that every step needs: gradients,
scores, and one number per query token and document.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor

import lik_ops
from lik_ops import reference

from ..support import common, gpu
from ..support.common import (
    Case,
    Inputs,
)
from ..support.contenders import (
    EAGER_LIMIT,
)
from ..support.runs import (
    Run,
)
from . import training

TAU = 0.1  # the default of colpali-engine
TOLERANCE = 2e-2
COMPILE_SECONDS = 60
SHORT, PAGES = {"Lq": 32, "Ld": 300}, {"Lq": 1024, "Ld": 1024}
CASES = (
    Case("soft 64x64", 64, 64, 32, 180, goal_ms=0.06),
    Case("soft 256x256", 256, 256, **SHORT, goal_ms=0.36),
    Case("soft pages 32x32", 32, 32, **PAGES, goal_ms=0.50),
    Case("soft long 1x1", 1, 1, 32, 65536),
    Case("soft long 1x16", 1, 16, 32, 8192),
    Case("soft long 64x64", 64, 64, 32, 4096),
    Case("soft step 256x256", 256, 256, **SHORT, what="step", goal_ms=1.3),
    Case("soft step pages 32x32", 32, 32, **PAGES, what="step"),
)
Scorer = Callable[[Tensor, Tensor], Tensor]


def eager(Q: Tensor, D: Tensor) -> Tensor:
    """Compute soft MaxSim with all similarities in the input dtype and exponential sums in fp32."""
    S = torch.einsum("isd,jtd->ijst", Q, D)
    return (torch.logsumexp(S.float() / TAU, -1) * TAU).sum(-1)


def scorers(case: Case, compiles: bool) -> dict[str, Scorer | Learned]:
    found: dict[str, Scorer | Learned] = {
        "lik_ops": lambda Q, D: lik_ops.maxsim_soft(Q, D, TAU),
        "hard": lik_ops.maxsim,
    }
    if case.what == "step":
        found["learned"] = Learned()
    if 4 * case.similarities < EAGER_LIMIT:
        found["eager"] = eager
        if compiles:
            torch._dynamo.reset()
            found["compiled"] = torch.compile(eager, fullgraph=True, dynamic=False)
    return found


def errors_of(x: Inputs, score: Scorer | Learned) -> list[float]:
    """Return relative errors of scores and both gradients against fp64, for the last queries and documents."""
    if isinstance(score, Learned):
        return score.errors(x)
    n = training.SLICE_Q
    upstream = torch.zeros_like(x.grad_scores)
    upstream[-n:, -n:] = x.grad_scores[-n:, -n:]
    Q, D = (t.detach().requires_grad_() for t in (x.Q, x.D))
    scores = score(Q, D)
    found = scores.detach()[-n:, -n:], *(g[-n:] for g in torch.autograd.grad(scores, (Q, D), upstream))
    q, k = (t[-n:].detach().double().requires_grad_() for t in (x.Q, x.D))
    expected = reference.maxsim_soft(q, k, TAU)
    grads = torch.autograd.grad(expected, (q, k), upstream[-n:, -n:].double())
    return [common.relative_error(a, e) for a, e in zip(found, (expected.detach(), *grads), strict=True)]


class Learned:
    """lik_ops with a temperature that requires a gradient."""

    def __init__(self) -> None:
        self.tau = torch.tensor(TAU, device="cuda", requires_grad=True)

    def step(self, x: Inputs) -> tuple[Tensor, ...]:
        Q, D = x.Q.detach().requires_grad_(), x.D.detach().requires_grad_()
        return torch.autograd.grad(lik_ops.maxsim_soft(Q, D, self.tau), (Q, D, self.tau), x.grad_scores)

    def errors(self, x: Inputs) -> list[float]:
        """Return the relative error of the temperature's gradient against fp64.

        The upstream gradient is ones, for the last queries and documents.
        """
        q, k = (t[-training.SLICE_Q :] for t in (x.Q, x.D))
        (found,) = torch.autograd.grad(lik_ops.maxsim_soft(q, k, self.tau).sum(), self.tau)
        tau = self.tau.detach().double().requires_grad_()
        (expected,) = torch.autograd.grad(reference.maxsim_soft(q.double(), k.double(), tau).sum(), tau)
        return [common.relative_error(found, expected)]


def called(case: Case, x: Inputs, score: Scorer | Learned) -> Callable[[], object]:
    if isinstance(score, Learned):
        return lambda: score.step(x)
    if case.what == "step":
        return lambda: training.step(score, x, x.grad_scores)
    return lambda: score(x.Q, x.D)


def measure(case: Case, timer: gpu.Timer, compiles: bool) -> dict:
    x, functions, results = Inputs(case, "cuda"), {}, {}
    own = (x.Q.numel() + x.D.numel()) * case.itemsize + 4 * case.Nq * case.Nd * (case.Lq + 1)
    for name, score in scorers(case, compiles).items():
        try:
            call = called(case, x, score)
            with torch.set_grad_enabled(case.what == "step"):
                gpu.first_call(call, COMPILE_SECONDS)
            errors = [0.0] if name == "hard" else errors_of(x, score)
            if name in ("lik_ops", "learned") and not max(errors) < TOLERANCE:
                raise AssertionError(f"{case.name}: relative errors {errors}")
            with torch.set_grad_enabled(case.what == "step"):
                peak = gpu.peak_bytes(call) / 2**20
            functions[name], results[name] = call, {"errors": errors, "peak_mb": peak}
        except (gpu.TooSlowError, torch.cuda.OutOfMemoryError) as failure:
            results[name] = {"failed": gpu.reason(failure)}
    with torch.set_grad_enabled(case.what == "step"):
        for name, ms in timer.compare(functions).items():
            results[name]["ms"] = ms
    return {"case": asdict(case), "goal_ms": case.goal_ms, "own_mb": own / 2**20, "results": results}


def main() -> None:
    run = Run("soft", __doc__)
    run.parser.add_argument("--no-compile", action="store_true", help="skip torch.compile")
    args = run.parser.parse_args()
    timer = gpu.Timer(args.rounds)
    ceiling = gpu.ceilings(timer)
    for case in run.asked(((case.name, case) for case in CASES), args):
        record = run.keep(measure(case, timer, not args.no_compile), args, ceilings=ceiling)
        r = record["results"]
        times = ", ".join(f"{name} {found.get('ms', float('nan')):.4f}" for name, found in r.items())
        goal = "" if case.goal_ms is None else f", goal {case.goal_ms}"
        memory = f"{r['lik_ops']['peak_mb']:.0f} MiB of {record['own_mb']:.0f}"
        print(f"{case.name:22} {times} ms{goal}; {memory}", flush=True)


if __name__ == "__main__":
    main()
