"""Find the fastest backward configurations on this GPU by timing each kernel against the table's choice.

    python -m benchmarks.sweeps.sweep_backward [--only pages] [--out FILE]

Winners are drawn in three ways: uniform (random embeddings), Zipf (a few tokens of a document win most query tokens,
as in text), and one token that wins everything. Every alternative is checked before timing. Its gradients are compared
with fp64 formulas for the last query and document.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from lik_ops.gpu.backward import dense as cuda_backward
from lik_ops.gpu.backward import documents as backward_documents
from lik_ops.gpu.backward.call import GradientCall
from lik_ops.gpu.tuning import backward_configs

from ..support import common
from ..support.gpu import (
    Timer,
)


@dataclass(frozen=True)
class Case:
    name: str
    Nq: int
    Nd: int
    Lq: int
    Ld: int
    d: int = 128
    candidates: bool = False
    dtype: str = "bfloat16"


CASES = (
    Case("in-batch 256", 256, 256, 32, 300),
    Case("in-batch long", 128, 128, 32, 1024),
    Case("pages", 128, 128, 1024, 1024),
    Case("candidates", 256, 16, 32, 1024, candidates=True),
    Case("small", 32, 32, 32, 300),
    Case("small fp32", 64, 64, 32, 180, dtype="float32"),
)
# BM, BN, warps, registers
GATHERS = ((8, 16, 4, 128), (8, 16, 4, 112), (8, 4, 4, 64), (16, 8, 4, 128), (4, 16, 2, 128))
# BM, BN, warps, stages, registers
PRODUCTS = ((64, 16, 4, 3, 168), (64, 16, 4, 3, 128), (64, 16, 4, 4, 168), (64, 32, 4, 3, 168), (128, 16, 4, 3, 168))
PRODUCTS_FP32 = ((32, 16, 4, 1, 255), (32, 16, 4, 2, 255), (32, 16, 4, 3, 255), (32, 32, 8, 2, 255))
# BM, warps
LISTS = ((1024, 4), (512, 2))
# BN, tokens per program, warps
FEW = ((32, 1024, 4), (16, 1024, 4), (32, 512, 4), (32, 256, 4), (32, 1024, 8), (32, 1024, 2))


def winners(case: Case, kind: str, generator: torch.Generator) -> Tensor:
    shape = (case.Nq, case.Nd, case.Lq) if case.candidates else (case.Nd, case.Nq, case.Lq)
    uniform = torch.rand(shape, generator=generator, device="cuda")
    if kind == "one":
        index = torch.full(shape, case.Ld // 3, device="cuda")
    elif kind == "zipf":  # the n-th most frequent token, chosen at random, wins a share of about 1 / n
        order = torch.randperm(case.Ld, generator=generator, device="cuda")
        index = order[(uniform.mul_(torch.tensor(case.Ld + 1.0).log()).exp_() - 1).long().clamp_(0, case.Ld - 1)]
    else:
        index = (uniform * case.Ld).long().clamp_(max=case.Ld - 1)
    return index.to(torch.int16)


@dataclass
class Inputs:
    Q: Tensor
    D: Tensor
    up: Tensor
    argmax: Tensor

    def call(self, needs: list[bool]) -> tuple[GradientCall, Sequence[Tensor]]:
        arguments = cuda_backward.BackwardArgs(self.up, self.Q, self.D, self.argmax, None, None, None, False, needs)
        outputs = arguments.allocate_outputs()
        for out in outputs:
            out.fill_(float("nan"))
        return cuda_backward._make_call(arguments), outputs

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return the fp64 gradients of the last query and of the last document."""
        Q, D, up = self.Q.double(), self.D, self.up.double()
        if D.dim() == 4:
            index = self.argmax[-1].long()  # [K, Lq]
            documents = D[-1].double()
            grad_D = torch.zeros_like(documents[-1])
            grad_D.index_add_(0, index[-1], up[-1, -1] * Q[-1])
        else:
            index = self.argmax[:, -1].long()
            documents = D.double()
            grad_D = torch.zeros_like(documents[-1])
            rows = (up[:, -1, None, None] * Q).flatten(0, 1)
            grad_D.index_add_(0, self.argmax[-1].long().flatten(), rows)
        won = torch.gather(documents, 1, index[..., None].expand(-1, -1, documents.shape[-1]))
        return (up[-1, :, None, None] * won).sum(0), grad_D


def draw(case: Case, kind: str) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, dtype: str = case.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=getattr(torch, dtype))

    Q = normal(case.Nq, case.Lq, case.d)
    D = normal(*((case.Nq, case.Nd) if case.candidates else (case.Nd,)), case.Ld, case.d)
    up = normal(case.Nq, case.Nd, dtype="float32") * 1e-6
    return Inputs(Q, D, up, winners(case, kind, generator))


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@contextmanager
def forced(function: str, warps: int, stages: int | None, registers: int | None, **config: int) -> Iterator[None]:
    table = getattr(backward_configs, function)

    def choose(*args, **kwargs):
        launch = table(*args, **kwargs)
        stages_ = launch.num_stages if stages is None else stages
        changed = launch.config._replace(**config)
        return replace(launch, config=changed, num_warps=warps, num_stages=stages_, max_registers=registers)

    with mock.patch.object(backward_configs, function, choose):
        yield


def timed(timer: Timer, inputs: Inputs, run, needs: list[bool], expected: Tensor) -> dict:
    call, outputs = inputs.call(needs)
    run(call, outputs)
    out = outputs[0] if needs[0] else outputs[1]
    wrong = error(out[-1, -1] if needs[1] and out.dim() == 4 else out[-1], expected)
    complete = bool(torch.isfinite(out).all())
    return {"ms": timer(lambda: run(call, outputs)), "error": wrong, "complete": complete}


def into_queries(call: GradientCall, outputs: Sequence[Tensor]) -> None:
    call.write_query_gradients(outputs[0], None)


def into_documents(call: GradientCall, outputs: Sequence[Tensor]) -> None:
    backward_documents.write_document_gradients(call, outputs[1])


def lists_only(call: GradientCall, outputs: Sequence[Tensor]) -> None:
    with mock.patch.object(backward_documents, "_sum_tiles", lambda *a: None):
        into_documents(call, outputs)


def measure(case: Case, kind: str, timer: Timer) -> list[dict]:
    inputs = draw(case, kind)
    grad_Q, grad_D = inputs.expected()
    tried: list[dict] = []

    def attempt(kernel: str, choice, run, needs, expected) -> None:
        try:
            result = timed(timer, inputs, run, needs, expected)
        except Exception as failure:
            result = {"failed": f"{type(failure).__name__}: {failure}"[:200]}
        tried.append({"case": asdict(case), "winners": kind, "kernel": kernel, "choice": choice, **result})
        report(tried[-1])

    only_Q, only_D = [True, False, False], [False, True, False]
    attempt("grad_Q", "table", into_queries, only_Q, grad_Q)
    attempt("grad_D", "table", into_documents, only_D, grad_D)
    for name in ("lowmem", "unified"):
        call = getattr(cuda_backward, f"backward_{name}")
        a = (inputs.up, inputs.Q, inputs.D, inputs.argmax, None, None, None, False, [True, True, False])
        tried.append({"case": asdict(case), "winners": kind, "kernel": name, "choice": "table"})
        tried[-1] |= {"ms": timer(lambda call=call, a=a: call(*a)), "error": error(call(*a)[0][-1], grad_Q)}
        report(tried[-1] | {"complete": True})
    if case.candidates:
        for BN, tokens, warps in FEW if kind == "uniform" else ():
            cut = mock.patch.object(backward_documents, "_MAX_PROGRAM_TOKENS", tokens)
            with forced("sparse_documents", warps, 1, 255, BN=BN), cut:
                attempt("grad_D", (BN, tokens, warps), into_documents, only_D, grad_D)
        return tried
    for BM, BN, warps, registers in GATHERS if kind == "uniform" else ():
        with forced("gather", warps, None, registers, BM=BM, BN=BN):
            attempt("grad_Q", (BM, BN, warps, registers), into_queries, only_Q, grad_Q)
    products = PRODUCTS if case.dtype == "bfloat16" else PRODUCTS_FP32
    for BM, BN, warps, stages, registers in products if kind == "uniform" else ():
        with forced("grad_documents", warps, stages, registers, BM=BM, BN=BN):
            attempt("grad_D", (BM, BN, warps, stages, registers), into_documents, only_D, grad_D)
    for BM, warps in LISTS if kind == "uniform" else ():
        with forced("lists", warps, 1, None, BM=BM):
            attempt("lists", (BM, warps), lists_only, only_D, grad_D)
    return tried


def report(r: dict) -> None:
    result = r.get("failed") or f"{r['ms']:.4f} ms, error {r['error']:.0e}{'' if r['complete'] else ' INCOMPLETE'}"
    print(f"{r['case']['name']:14} {r['winners']:8} {r['kernel']:7} {r['choice']!s:28} {result}", flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--winners", default="uniform,zipf,one", help="comma-separated draws of winners")
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/sweep_backward.json)")
    args = parser.parse_args()
    timer, records = Timer(9), []
    for case in CASES:
        if args.only in case.name:
            for kind in args.winners.split(","):
                records += measure(case, kind, timer)
                torch.cuda.empty_cache()
    print("wrote", common.write("sweep_backward", records, path=args.out))


if __name__ == "__main__":
    main()
