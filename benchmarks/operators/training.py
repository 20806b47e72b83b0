"""Measure time and memory of a training step on this GPU: forward with winners, then backward.

    python -m benchmarks.operators.training [--only pages] [--rounds 20] [--seconds 180] [--out FILE]

Times are median device times with the host ahead, so launches are not included (``host_us`` has them). Gradients are
checked against fp64 first, at the full shape. Only the scores of the last queries and documents get an upstream
gradient. The reference then needs only these, and everything else must be zero.

Winners move if similarities are rounded to the input dtype, or fp32 inputs to half precision. The error of such
gradients exceeds rounding, and they are not ``exact``. ``own_mb`` is the memory that every implementation needs:
gradients, winners and scores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lik_ops import reference

from ..support import common, contenders, gpu
from ..support.common import (
    Inputs,
)
from ..support.contenders import (
    Scorer,
)
from ..support.runs import (
    Run,
)

FIRST_CALL_SECONDS = 100
SLICE_Q, SLICE_D = 4, 16
WRONG = 0.5
EXACT = {"bfloat16": 1e-2, "float16": 1e-2, "float32": 1e-4}


@dataclass(frozen=True)
class Case(common.Case):
    what: str = "step"

    @property
    def own_bytes(self) -> int:
        """Bytes of gradients, winners and scores."""
        tokens = self.Nq * self.Lq + self.documents * self.Ld
        return tokens * self.d * self.itemsize + self.winners + 4 * self.Nq * self.Nd


CASES = (
    Case("in-batch 256", 256, 256, 32, 300, goal_ms=0.50),
    Case("in-batch 128 long", 128, 128, 32, 1024, goal_ms=0.40),
    Case("candidates 256x16", 256, 16, 32, 1024, candidates=True, goal_ms=0.60),
    Case("in-batch 64", 64, 64, 32, 180),
    Case("in-batch 256 prefix masks", 256, 256, 32, 300, mask="prefix"),
    Case("in-batch 64 fp32", 64, 64, 32, 180, dtype="float32"),
    Case("pages 128", 128, 128, 1024, 1024, goal_ms=9.0),  # last, because a peer compiles for minutes
)


def step(score: Scorer, x: Inputs, grad_scores: Tensor, needs: str = "QD") -> tuple[Tensor, ...]:
    """Return the gradients of the inputs named in `needs`. The others are frozen."""
    Q, D = x.Q.detach().requires_grad_("Q" in needs), x.D.detach().requires_grad_("D" in needs)
    return torch.autograd.grad(score(Q, D), [t for t, name in ((Q, "Q"), (D, "D")) if name in needs], grad_scores)


def backward(score: Scorer, x: Inputs, needs: str) -> Callable[[], object]:
    """Return a function that runs the backward alone, of a forward that ran once."""
    Q, D = x.Q.detach().requires_grad_("Q" in needs), x.D.detach().requires_grad_("D" in needs)
    scores = score(Q, D)
    leaves = [t for t, name in ((Q, "Q"), (D, "D")) if name in needs]
    return lambda: torch.autograd.grad(scores, leaves, x.grad_scores, retain_graph=True)


def errors_of(x: Inputs, score: Scorer) -> dict[str, float]:
    """Return relative errors of both gradients against fp64. A nonzero that must be zero gives infinity."""
    return errors_of_step(x, lambda upstream: step(score, x, upstream))


def errors_of_step(x: Inputs, run_step: Callable[[Tensor], tuple[Tensor, ...]]) -> dict[str, float]:
    """Return relative errors of both gradients that `run_step` returns for an upstream gradient of the scores."""
    upstream = torch.zeros_like(x.grad_scores)
    upstream[-SLICE_Q:, -SLICE_D:] = x.grad_scores[-SLICE_Q:, -SLICE_D:]
    grads = run_step(upstream)
    *tokens, options = x.last(SLICE_Q, SLICE_D)
    Q, D = (t.double().requires_grad_() for t in tokens)
    scores = reference.maxsim(Q, D, **options)
    expected = torch.autograd.grad(scores, (Q, D), upstream[-SLICE_Q:, -SLICE_D:].double())
    of_documents = (slice(-SLICE_Q, None), slice(-SLICE_D, None))[-(x.D.dim() - 2) :]
    errors = {}
    for name, grad, part, want in zip("QD", grads, (slice(-SLICE_Q, None), of_documents), expected, strict=True):
        errors[f"error_{name}"] = common.relative_error(grad[part], want)
        grad[part] = 0
        if grad.count_nonzero():
            errors[f"error_{name}"] = float("inf")
    return errors


def prepare(x: Inputs, score: Scorer | str, seconds: float) -> dict:
    """Compile a contender, check it and measure its memory, or return the reason for not timing it."""
    if isinstance(score, str):
        return {"skipped": score}
    if seconds <= 0:
        return {"skipped": "no time left"}
    try:
        _, first = gpu.first_call(lambda: step(score, x, x.grad_scores), min(seconds, FIRST_CALL_SECONDS))
        errors = errors_of(x, score)
        worst = max(errors.values())
        if not worst < WRONG:
            return {"failed": "wrong: " + ", ".join(f"{k} {v:.1e}" for k, v in errors.items())}
        exact = worst < EXACT[str(x.Q.dtype).removeprefix("torch.")]
        peak = gpu.peak_bytes(lambda: step(score, x, x.grad_scores)) / 2**20
        return {**errors, "exact": exact, "first_s": first, "peak_mb": peak}
    except (Exception, gpu.TooSlowError) as failure:
        return {"failed": gpu.reason(failure)}


def forward(score: Scorer, x: Inputs) -> Tensor:
    return score(x.Q.detach().requires_grad_(), x.D.detach().requires_grad_())


# Each is created right before timing, because a backward holds the tensors that its forward saved.
PARTS: dict[str, Callable[[Scorer, Inputs], Callable[[], object]]] = {
    "ms": lambda score, x: lambda: step(score, x, x.grad_scores),
    "forward_ms": lambda score, x: lambda: forward(score, x),
    "backward_ms": lambda score, x: backward(score, x, "QD"),
    "grad_Q_ms": lambda score, x: backward(score, x, "Q"),
    "grad_D_ms": lambda score, x: backward(score, x, "D"),
    "step_Q_ms": lambda score, x: lambda: step(score, x, x.grad_scores, "Q"),
    "step_D_ms": lambda score, x: lambda: step(score, x, x.grad_scores, "D"),
}


def measure(case: Case, timer: gpu.Timer, end: float) -> dict:
    x = Inputs(case, "cuda")
    found = contenders.training(case, x)
    entries = {name: prepare(x, score, end - time.monotonic()) for name, score in found.items()}
    ready = {n: f for n, f in found.items() if not isinstance(f, str) and "peak_mb" in entries[n]}
    for part, make in PARTS.items():
        made = {}
        try:
            made = {name: make(score, x) for name, score in ready.items()}
            for name, ms in timer.compare(made).items():
                entries[name][part] = ms
        except torch.cuda.OutOfMemoryError as failure:
            print(f"{case.name}, {part}: {gpu.reason(failure)}")
        del made
        torch.cuda.empty_cache()
    for name, score in ready.items():
        entries[name]["host_us"] = gpu.host_microseconds(lambda score=score: step(score, x, x.grad_scores), 20)
    work = {"operations": case.operations, "bytes": case.bytes, "own_mb": case.own_bytes / 2**20}
    return {"case": asdict(case), **work, "contenders": entries}


def report(record: dict) -> None:
    case = record["case"]
    goal = f", goal {case['goal_ms']}" if case["goal_ms"] else ""
    print(f"{case['name']} ({common.shape_of(case)}): {record['own_mb']:.1f} MB of gradients and winners{goal}")
    for name, r in record["contenders"].items():
        if "ms" not in r:
            print(f"  {name:26} {'; '.join(f'{k}: {v}' for k, v in r.items())}")
            continue
        times = ", ".join(f"{k.removesuffix('_ms')} {v:.3f}" for k, v in r.items() if k.endswith("_ms"))
        print(
            f"  {name:26} {r['ms']:8.4f} ms ({times})  {r['peak_mb']:8.1f} MB  host {r['host_us']:.0f} us  "
            f"errors {r['error_Q']:.0e} {r['error_D']:.0e}  first {r['first_s']:.1f} s",
            flush=True,
        )


def main() -> None:
    run = Run("training", __doc__, *contenders.PEERS, rounds=20)
    run.parser.add_argument("--seconds", type=float, default=180, help="start no row after this time (default 180)")
    args = run.parser.parse_args()
    start = time.monotonic() + args.first
    timer = gpu.Timer(args.rounds)
    ceiling = gpu.ceilings(timer)
    print(", ".join(f"{name} {value:.4g}" for name, value in ceiling.items()))
    for case in run.asked(((case.name, case) for case in CASES), args):
        report(run.keep(measure(case, timer, start + args.seconds), args, ceilings=ceiling))


if __name__ == "__main__":
    main()
