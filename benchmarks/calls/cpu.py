"""Measure MaxSim on this CPU, compared with maxsim-cpu, eager einsum and the machine's matrix product.

    python -m benchmarks.calls.cpu [--rounds 7] [--only rerank] [--threads 2]

Every shape is checked against the fp64 reference on some pairs before timing. Contenders with different results are
named and left out. Rates use ``2 * Nq * Nd * Lq * Ld * d`` operations, even if a mask saves work or a backward adds
work.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import lik_ops

from ..support import common
from ..support.common import (
    Inputs,
    eager,
    relative_error,
)

try:
    import maxsim_cpu
except ImportError:
    maxsim_cpu = None

INT8 = "lik_ops int8"  # the same documents in a quarter of the bytes
EAGER_LIMIT = 2**31  # bytes of similarities that eager einsum may hold
SGEMM = 2048
MAXSIM_CPU_LQ = 32  # above, maxsim-cpu 0.1.0 returns garbage (seen at 64) or crashes (at 1024)


@dataclass(frozen=True)
class Case(common.Case):
    dtype: str = "float32"


CASES = (
    Case("rerank", 1, 1000, 32, 300),
    Case("rerank, Ld 180", 1, 2000, 32, 180),
    Case("rerank, Ld 1024", 1, 300, 32, 1024),
    Case("rerank, winners", 1, 1000, 32, 300, what="winners"),
    Case("rerank, bf16", 1, 1000, 32, 300, dtype="bfloat16"),
    Case("rerank, masked", 1, 1000, 32, 300, mask="prefix"),
    Case("rerank, normalised", 1, 1000, 32, 300, normalize=True),
    Case("rerank, Lq 128", 1, 200, 128, 1024),
    Case("pages", 1, 64, 1024, 1024),
    Case("fat", 1, 100, 128, 1024, d=768),
    Case("serve", 16, 250, 32, 300),
    Case("pairs", 500, 1, 32, 300, candidates=True),
    Case("candidates", 32, 16, 32, 300, candidates=True),
    Case("tiny", 8, 8, 32, 64),
    Case("training step", 64, 64, 32, 300, what="step"),
    Case("training step, bf16", 64, 64, 32, 300, what="step", dtype="bfloat16"),
)


def step(score: Callable[..., Tensor], x: Inputs) -> tuple[Tensor, ...]:
    """Return the gradients of both inputs."""
    Q, D = x.Q.detach().requires_grad_(), x.D.detach().requires_grad_()
    return torch.autograd.grad(score(Q, D), (Q, D), x.grad_scores)


def functions(case: Case, x: Inputs) -> dict[str, Callable[[], object]]:
    """Return lik_ops and all contenders that support the case."""
    found: dict[str, Callable[[], object]] = {}
    if case.what == "step":
        found["lik_ops"] = lambda: step(lambda Q, D: lik_ops.maxsim(Q, D, **x.options), x)
    elif case.what == "winners":
        found["lik_ops"] = lambda: lik_ops.maxsim_with_argmax(x.Q, x.D, **x.options)
    else:
        found["lik_ops"] = lambda: lik_ops.maxsim(x.Q, x.D, **x.options)
    if case.what == "step" and 3 * case.similarities < EAGER_LIMIT:
        found["eager"] = lambda: step(lambda Q, D: eager(Q, D, **x.options, winners=True)[0], x)
    elif case.what == "scores" and case.similarities < EAGER_LIMIT:
        found["eager"] = lambda: eager(x.Q, x.D, **x.options)
    plain = case.Nq == 1 and case.dtype == "float32" and case.what == "scores" and not (case.mask or case.normalize)
    if plain and case.Lq <= MAXSIM_CPU_LQ and maxsim_cpu is not None:
        query, documents = x.Q[0].numpy(), x.D.numpy()
        found["maxsim-cpu"] = lambda: maxsim_cpu.maxsim_scores(query, documents)
    if case.what == "scores" and case.dtype == "float32" and not case.candidates:
        made = lik_ops.quantize(x.D, "int8")
        found[INT8] = lambda: lik_ops.maxsim(x.Q, made, **x.options)
    return found


def check(case: Case, x: Inputs, found: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return relative errors: ours against the fp64 reference on some pairs, and peers against ours.

    Raises if ours are wrong, and removes wrong contenders from `found`.
    """
    scores = lik_ops.maxsim(x.Q, x.D, **x.options)
    errors = {"lik_ops": common.error_of(x, scores)}
    if not errors["lik_ops"] < 1e-5:
        raise AssertionError(f"{case.name}: relative error {errors['lik_ops']:.1e}")
    tolerance = 1e-4 if case.dtype == "float32" else 2e-2
    for name in [name for name in found if name != "lik_ops"]:
        if case.what == "step":
            # Rounding may move a winner, so single rows may differ. Compare the sum over all of D.
            ours, theirs = (found[who]()[1].float().sum((0, 1)) for who in ("lik_ops", name))
            errors[name] = relative_error(theirs, ours)
        else:
            errors[name] = relative_error(torch.as_tensor(found[name]()).view(scores.shape), scores)
        allowed = 2e-2 if name == INT8 else tolerance * (10 if case.what == "step" else 1)
        if not errors[name] < allowed:
            print(f"{case.name}: {name} is wrong by {errors[name]:.1e} and is not timed")
            del found[name]
    return errors


def measure(case: Case, rounds: int) -> dict:
    x = Inputs(case)
    found = functions(case, x)
    errors = check(case, x, found)
    A, B, C = (torch.randn(SGEMM, SGEMM) for _ in range(3))
    times = common.interleaved({"sgemm": lambda: torch.mm(A, B, out=C), **found}, rounds)
    sgemm = times.pop("sgemm")
    record = {"case": asdict(case), "relative_errors": errors, "sgemm": {}, "contenders": {}}
    for kind, ms in sgemm.items():
        record["sgemm"][kind] = {"ms": ms, "gflops": 2 * SGEMM**3 / ms / 1e6}
    for name, by_kind in times.items():
        record["contenders"][name] = {
            kind: {
                "ms": ms,
                "gflops": case.operations / ms / 1e6,
                "of_sgemm": case.operations / ms / 1e6 / record["sgemm"][kind]["gflops"],
            }
            for kind, ms in by_kind.items()
        }
    return record


def report(record: dict) -> None:
    case = record["case"]
    shape = f"{case['Nq']} x {case['Nd']}, Lq {case['Lq']}, Ld {case['Ld']}, d {case['d']}"
    print(f"{case['name']} ({shape}): sgemm {record['sgemm']['best']['gflops']:.0f} GFLOP/s")
    ours = record["contenders"]["lik_ops"]
    for name, kinds in record["contenders"].items():
        best, median = kinds["best"], kinds["median"]
        line = f"  {name:12} best {best['ms']:9.3f} ms {best['gflops']:6.1f} GFLOP/s, {best['of_sgemm']:.2f} of sgemm"
        line += f"; median {median['ms']:9.3f} ms"
        if name != "lik_ops":
            line += (
                f"; lik_ops {best['ms'] / ours['best']['ms']:.2f}x (medians {median['ms'] / ours['median']['ms']:.2f}x)"
            )
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="timed calls per contender (default 7)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--threads", type=int, help="number of torch threads (default: unchanged)")
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/cpu.json)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    records = []
    for case in CASES:
        if args.only in case.name:
            records.append(measure(case, args.rounds))
            report(records[-1])
    if not args.only or args.out:
        print("wrote", common.write("cpu", records, "maxsim-cpu", "numpy", path=args.out, rounds=args.rounds))


if __name__ == "__main__":
    main()
