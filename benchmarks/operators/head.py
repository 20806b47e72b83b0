"""Measure the scoring of documents from hidden states on this GPU.

    python -m benchmarks.operators.head [--only "1 x 1000"] [--rounds 30] [--out FILE]

Times are median device times, each call on a flushed L2 cache. Each contender is checked against fp64 first.

- ``by hand``: a linear layer, `normalize` and `lik_ops.maxsim`
- ``linear``: the layer alone
- ``read``: a kernel that only reads the hidden states, a lower bound
- ``unfused``: lik_ops with tokens computed first, as for many queries; it must have the bits of the fused call
- ``projected queries``: without normalization, ``maxsim(Q W, H)`` plus the scores of the bias, which has other bits

``peak_mb`` is the memory of a call beyond its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import lik_ops
from lik_ops import reference

from ..support import common, gpu
from ..support.common import (
    Case,
)
from ..support.runs import (
    Run,
)

TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5}
PEER_SECONDS = 60
SHAPE = {"Lq": 32, "Ld": 300}


@dataclass(frozen=True)
class Head(Case):
    """A case with hidden states of `width` features, whose tokens are normalized unless `unit` is False.

    With `tf32`, PyTorch allows TF32 in products of fp32.
    """

    width: int = 768
    unit: bool = True
    tf32: bool = False


CASES = (
    Head("1 x 1000", 1, 1000, **SHAPE, goal_ms=0.125),
    Head("4 x 1000", 4, 1000, **SHAPE),
    Head("16 x 1000", 16, 1000, **SHAPE),
    Head("holes 1 x 1000", 1, 1000, **SHAPE, mask="holes"),
    Head("1 x 100", 1, 100, **SHAPE),
    Head("384 to 128, 1 x 1000", 1, 1000, **SHAPE, width=384),
    Head("768 to 64, 1 x 1000", 1, 1000, **SHAPE, d=64),
    Head("1024 to 128, 1 x 1000, Ld 180", 1, 1000, 32, 180, width=1024),
    Head("2560 to 320, 1 x 100, Ld 1024", 1, 100, 32, 1024, d=320, width=2560),
    *(Head(f"not normalized, {n} x 1000", n, 1000, **SHAPE, unit=False) for n in (1, 4, 16)),
    Head("fp32, 1 x 1000", 1, 1000, **SHAPE, dtype="float32"),
    Head("fp32, 384 to 1024, 1 x 256", 1, 256, **SHAPE, dtype="float32", d=1024, width=384, unit=False),
    Head("fp32, 2560 to 320, 1 x 100, Ld 1024", 1, 100, 32, 1024, dtype="float32", d=320, width=2560),
    Head("fp32, 1 x 4", 1, 4, **SHAPE, dtype="float32"),
    Head("TF32, 1 x 1000", 1, 1000, **SHAPE, dtype="float32", tf32=True),
    Head("TF32, 384 to 1024, 1 x 256", 1, 256, **SHAPE, dtype="float32", d=1024, width=384, unit=False, tf32=True),
    Head("step 32 x 32", 32, 32, **SHAPE, what="step"),
    Head("step 128 x 128", 128, 128, **SHAPE, what="step"),
)
Scorer = Callable[..., Tensor]  # f(Q, H, W, b)


class Inputs:
    """Query tokens of unit norm, hidden states, a head, and a document mask or None."""

    def __init__(self, case: Head, device: str = "cuda") -> None:
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, case.dtype))

        self.Q = F.normalize(draw(case.Nq, case.Lq, case.d), dim=-1)
        self.H = draw(case.Nd, case.Ld, case.width)
        self.W, self.b = draw(case.d, case.width) / case.width**0.5, draw(case.d) / 4
        self.upstream = torch.rand((case.Nq, case.Nd), generator=generator, device=device) - 0.5
        self.d_mask, self.unit = None, case.unit
        if case.mask:
            self.d_mask = torch.rand((case.Nd, case.Ld), generator=generator, device=device) > 0.25

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.Q, self.H, self.W, self.b


def by_hand(Q: Tensor, H: Tensor, W: Tensor, b: Tensor, d_mask: Tensor | None = None, unit: bool = True) -> Tensor:
    tokens = F.linear(H, W, b)
    return lik_ops.maxsim(Q, F.normalize(tokens, dim=-1) if unit else tokens, None, d_mask)


def projected_queries(Q: Tensor, H: Tensor, W: Tensor, b: Tensor, d_mask: Tensor | None = None) -> Tensor:
    """Return the scores of tokens that are not normalized, from projected queries and the bias as a document."""
    return lik_ops.maxsim(Q @ W, H, None, d_mask) + lik_ops.maxsim(Q, b[None, None])


def _peer(x: Inputs) -> Scorer | str:
    try:
        from late_interaction_kernels.fused_head import maxsim_from_hidden
    except ImportError:
        return "not installed"
    return lambda *given: maxsim_from_hidden(*given, d_mask=x.d_mask, normalize=x.unit)


def scorers(x: Inputs) -> dict[str, Scorer | str]:
    found: dict[str, Scorer | str] = {
        "lik_ops": lambda *given: lik_ops.maxsim_from_hidden(*given, d_mask=x.d_mask, normalize=x.unit),
        "by hand": lambda *given: by_hand(*given, x.d_mask, x.unit),
        "late-interaction-kernels": _peer(x),
    }
    if not x.unit:
        found["projected queries"] = lambda *given: projected_queries(*given, x.d_mask)
    return found


def unfused(x: Inputs) -> Tensor:
    """Return scores of the unfused path, which computes tokens first, without its winners."""
    from lik_ops.families.head import gpu as head_gpu
    from lik_ops.families.head.portable import HiddenArgs, join_slices, score_slices

    args = HiddenArgs(*x.tensors, None, x.d_mask, None)
    return join_slices(*score_slices(head_gpu._HEAD_PARTS, args, x.unit, None))[0]


def step(score: Scorer, x: Inputs) -> tuple[Tensor, ...]:
    """Return scores and the gradients of all four inputs."""
    leaves = [t.detach().requires_grad_() for t in x.tensors]
    scores = score(*leaves)
    return scores.detach(), *torch.autograd.grad(scores, leaves, x.upstream.to(scores.dtype))


def errors_of(case: Head, x: Inputs, score: Scorer) -> list[float]:
    """Return relative errors against fp64: scores of the last documents, or all results of a step."""
    if case.what == "scores":
        last, mask = x.H[-64:], None if x.d_mask is None else x.d_mask[-64:]
        given = [t.double() for t in (x.Q, last, x.W, x.b)]
        expected = reference.maxsim_from_hidden(*given, None, mask, normalize=x.unit)
        return [common.relative_error(score(*x.tensors)[:, -64:], expected)]
    found = step(score, x)
    leaves = [t.detach().double().requires_grad_() for t in x.tensors]
    grads, scores = [torch.zeros_like(t) for t in leaves], []
    for part in torch.arange(case.Nd).split(8):  # keep all similarities of one part in memory
        n = slice(int(part[0]), int(part[-1]) + 1)
        of_part = reference.maxsim_from_hidden(leaves[0], leaves[1][n], *leaves[2:])
        for total, g in zip(grads, torch.autograd.grad(of_part, leaves, x.upstream[:, n].double()), strict=True):
            total += g
        scores.append(of_part.detach())
    wanted = torch.cat(scores, 1), *grads
    return [common.relative_error(a, e) for a, e in zip(found, wanted, strict=True)]


def measure(case: Head, timer: gpu.Timer) -> dict:
    torch.backends.cuda.matmul.allow_tf32 = case.tf32
    x, functions, results = Inputs(case), {}, {}
    trains = case.what == "step"
    with torch.set_grad_enabled(trains):
        for name, score in scorers(x).items():
            if isinstance(score, str):
                results[name] = {"skipped": score}
                continue
            call = (lambda score=score: step(score, x)) if trains else (lambda score=score: score(*x.tensors))
            try:
                gpu.first_call(call, PEER_SECONDS)
                results[name] = {"errors": errors_of(case, x, score), "peak_mb": gpu.peak_bytes(call) / 2**20}
                functions[name] = call
            except Exception as failure:
                results[name] = {"failed": gpu.reason(failure)}
        # Rounding may move winners and change gradients. The error of `by hand` shows by how much.
        allowed = max(TOLERANCE[case.dtype], *(2 * e for e in results["by hand"].get("errors", [0.0])))
        if "failed" in results["lik_ops"] or not max(results["lik_ops"]["errors"]) < allowed:
            raise AssertionError(f"{case.name}: {results['lik_ops']}, allowed {allowed}")
        if not trains:
            if not torch.equal(unfused(x), functions["lik_ops"]()):
                raise AssertionError(f"{case.name}: tokens made first have other scores")
            functions["unfused"] = lambda: unfused(x)
        functions["linear"] = lambda: F.linear(x.H, x.W, x.b)
        bits = x.H.view(torch.int32)
        functions["read"] = lambda: timer.read(bits)
        for name, ms in timer.compare(functions).items():
            results.setdefault(name, {})["ms"] = ms
    return {"case": asdict(case), "goal_ms": case.goal_ms, "results": results}


def main() -> None:
    run = Run("head", __doc__, "late-interaction-kernels")
    args = run.parser.parse_args()
    timer = gpu.Timer(args.rounds)
    ceilings = gpu.ceilings(timer)
    for case in run.asked(((case.name, case) for case in CASES), args):
        found = run.keep(measure(case, timer), args, ceilings=ceilings)["results"]
        times = ", ".join(f"{name} {r['ms']:.4f}" for name, r in found.items() if "ms" in r)
        goal = "" if case.goal_ms is None else f", goal {case.goal_ms}"
        print(f"{case.name:30} {times} ms{goal}; {found['lik_ops']['peak_mb']:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
