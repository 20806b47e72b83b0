"""How fast is MaxSim on this machine's CPU, beside maxsim-cpu, eager einsum and the machine's own matrix product?

    python benchmarks/cpu.py [--rounds 7] [--only rerank] [--threads 2]

Before it is timed, every shape is checked against the fp64 reference on some pairs; contenders whose results differ
from ours are named and left out.
Rates count ``2 * Nq * Nd * Lq * Ld * d`` operations, also where masked tokens or a backward pass add or save work.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import common
import torch
from torch import Tensor

import lik_ops
from lik_ops import reference

try:
    import maxsim_cpu
except ImportError:
    maxsim_cpu = None

EAGER_LIMIT = 2**31  # bytes of similarities that eager einsum may hold
SGEMM = 2048
MAXSIM_CPU_LQ = 32  # above, maxsim-cpu 0.1.0 returns garbage (seen at 64) or crashes (at 1024)


@dataclass(frozen=True)
class Case:
    name: str
    Nq: int
    Nd: int
    Lq: int
    Ld: int
    d: int = 128
    dtype: str = "float32"
    what: str = "scores"  # "scores", "winners" (with argmax) or "step" (forward and backward)
    masked: bool = False  # documents of Ld / 2 to Ld tokens, padded
    normalize: bool = False
    candidates: bool = False  # Nd documents of each query's own

    @property
    def operations(self) -> int:
        return 2 * self.Nq * self.Nd * self.Lq * self.Ld * self.d


CASES = (
    Case("rerank", 1, 1000, 32, 300),
    Case("rerank, Ld 180", 1, 2000, 32, 180),
    Case("rerank, Ld 1024", 1, 300, 32, 1024),
    Case("rerank, winners", 1, 1000, 32, 300, what="winners"),
    Case("rerank, bf16", 1, 1000, 32, 300, dtype="bfloat16"),
    Case("rerank, masked", 1, 1000, 32, 300, masked=True),
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


class Inputs:
    """Random unit-norm tokens for a case."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(0)
        documents = (case.Nq, case.Nd) if case.candidates else (case.Nd,)
        draw = lambda *shape: torch.nn.functional.normalize(torch.randn(*shape, generator=generator), dim=-1)  # noqa: E731
        dtype = getattr(torch, case.dtype)
        self.Q = draw(case.Nq, case.Lq, case.d).to(dtype)
        self.D = draw(*documents, case.Ld, case.d).to(dtype)
        self.d_mask = None
        if case.masked:
            lengths = torch.randint(case.Ld // 2, case.Ld + 1, documents, generator=generator)
            self.d_mask = torch.arange(case.Ld) < lengths[..., None]
        self.grad_scores = torch.randn(case.Nq, case.Nd, generator=generator)


def eager(Q: Tensor, D: Tensor, d_mask: Tensor | None, normalize: bool) -> Tensor:
    """What one writes without a library: every similarity in memory, in the inputs' dtype."""
    if normalize:
        Q, D = (torch.nn.functional.normalize(x, dim=-1) for x in (Q, D))
    if D.dim() == 4:
        S = torch.einsum("isd,ijtd->ijst", Q, D)
        S = S if d_mask is None else S.masked_fill(~d_mask[:, :, None], float("-inf"))
    else:
        S = torch.einsum("isd,jtd->ijst", Q, D)
        S = S if d_mask is None else S.masked_fill(~d_mask[None, :, None], float("-inf"))
    return S.amax(-1).float().sum(-1)


def step(score: Callable[..., Tensor], x: Inputs) -> tuple[Tensor, ...]:
    """Gradients of both inputs."""
    Q, D = x.Q.detach().requires_grad_(), x.D.detach().requires_grad_()
    return torch.autograd.grad(score(Q, D), (Q, D), x.grad_scores)


def functions(case: Case, x: Inputs) -> dict[str, Callable[[], object]]:
    """Ours and whoever else can do the case."""
    options = {"d_mask": x.d_mask, "normalize": case.normalize}
    found: dict[str, Callable[[], object]] = {}
    if case.what == "step":
        found["lik_ops"] = lambda: step(lambda Q, D: lik_ops.maxsim(Q, D, **options), x)
    elif case.what == "winners":
        found["lik_ops"] = lambda: lik_ops.maxsim_with_argmax(x.Q, x.D, **options)
    else:
        found["lik_ops"] = lambda: lik_ops.maxsim(x.Q, x.D, **options)
    size = case.operations // (2 * case.d) * x.Q.element_size() * (3 if case.what == "step" else 1)
    if size < EAGER_LIMIT and case.what == "step":
        found["eager"] = lambda: step(lambda Q, D: eager(Q, D, x.d_mask, case.normalize), x)
    elif size < EAGER_LIMIT and case.what == "scores":
        found["eager"] = lambda: eager(x.Q, x.D, x.d_mask, case.normalize)
    plain = case.Nq == 1 and case.dtype == "float32" and case.what == "scores" and not (case.masked or case.normalize)
    if plain and case.Lq <= MAXSIM_CPU_LQ and maxsim_cpu is not None:
        query, documents = x.Q[0].numpy(), x.D.numpy()
        found["maxsim-cpu"] = lambda: maxsim_cpu.maxsim_scores(query, documents)
    return found


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).abs().max() / expected.abs().max()).item()


def check(case: Case, x: Inputs, found: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Errors relative to the largest value: ours against the fp64 reference on some pairs, others against ours.

    Raises where ours are wrong, and takes others who are out of `found`.
    """
    scores = lik_ops.maxsim(x.Q, x.D, d_mask=x.d_mask, normalize=case.normalize)
    some = slice(0, 8)
    documents = (some, some) if case.candidates else (some,)
    mask = None if x.d_mask is None else x.d_mask[documents]
    expected = reference.maxsim(x.Q[some].double(), x.D[documents].double(), d_mask=mask, normalize=case.normalize)
    errors = {"lik_ops": relative_error(scores[some, some], expected)}
    if errors["lik_ops"] > 1e-5:
        raise AssertionError(f"{case.name}: relative error {errors['lik_ops']:.1e}")
    tolerance = 1e-4 if case.dtype == "float32" else 2e-2
    for name in [name for name in found if name != "lik_ops"]:
        if case.what == "step":
            # Rounding may move a winner, so single rows may differ: compare what all of D receives.
            ours, theirs = (found[who]()[1].float().sum((0, 1)) for who in ("lik_ops", name))
            errors[name] = relative_error(theirs, ours)
        else:
            errors[name] = relative_error(torch.as_tensor(found[name]()).view(scores.shape), scores)
        if not errors[name] < tolerance * (10 if case.what == "step" else 1):
            print(f"{case.name}: {name} is wrong by {errors[name]:.1e} of the largest value and is not timed")
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
        line = f"  {name:11} best {best['ms']:9.3f} ms {best['gflops']:6.1f} GFLOP/s, {best['of_sgemm']:.2f} of sgemm"
        line += f"; median {median['ms']:9.3f} ms"
        if name != "lik_ops":
            line += (
                f"; lik_ops {best['ms'] / ours['best']['ms']:.2f}x (medians {median['ms'] / ours['median']['ms']:.2f}x)"
            )
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="timed calls of each contender (default 7)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--threads", type=int, help="torch's threads (default: as torch chose)")
    parser.add_argument("--out", type=Path, help="where to write (default benchmarks/results/cpu.json)")
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
