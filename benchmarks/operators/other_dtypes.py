"""Measure fp32, binary, FP8, and many features against bf16, compositions of lik_ops functions, and peers.

    python -m benchmarks.operators.other_dtypes [--only TEXT] [--rounds 30] [--first 100] [--out FILE]

``ratio`` is the time over the time of the bf16 call without options of the same sizes, in the same run. A composition
computes the same scores with functions of lik_ops on converted tokens: one fp16 term for TF32, three products as one
call of `3 d` features for fp32, and plain scores of masked tokens that are replaced for masks. A call that is more than
5 % slower than its composition is a defect, and the program then fails. ``error`` and ``mean_error`` are differences
from fp64 scores of some pairs, over the largest score. "einsum" is the same formula of torch. ``goal`` is the largest
wanted ratio (`GOALS`). Peers compute fp32 in half precision. The file is rewritten after each row.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import lik_ops

from ..support import common, contenders
from ..support.gpu import Timer
from ..support.runs import Run

SIZES = {  # Nq, Nd, Lq, Ld
    "1 x 1000": (1, 1000, 32, 300),
    "16 x 1000": (16, 1000, 32, 300),
    "pages 1 x 1000": (1, 1000, 1024, 1024),
    "pages 64 x 64": (64, 64, 1024, 1024),
    "in-batch 256": (256, 256, 32, 300),
    "1 x 100k": (1, 100_000, 32, 180),
}
WIDE = (256, 320, 512, 1024, 2560, 4096)
WIDE_SIZES = {"32 x 200": (32, 200, 32, 1024), "1 x 200": (1, 200, 32, 1024)}
SLOWER = 1.05
# Wanted times in ms, by the time of bf16 on the same GPU when the goals were set (one H100). Ratios hold on other GPUs.
GOALS = {
    "fp32, 1 x 1000": (0.030, {"tf32": 0.056, "fp32": 0.056}),
    "fp32, 16 x 1000": (0.059, {"tf32": 0.085, "fp32": 0.19}),
    "fp32, pages 1 x 1000": (0.340, {"tf32": 0.45, "fp32": 1.15}),
    "fp32, pages 64 x 64": (1.27, {"tf32": 1.40, "fp32": 4.4}),
    "fp32, in-batch 256": (0.205, {"tf32": 0.25, "fp32": 0.70}),
    "fp32 step, in-batch 256": (1, {"tf32": 1.3, "fp32": 2.5}),
    "quantized, 1 x 100k": (1.48, {"binary": 0.25, "binary x int8": 0.25}),
    "quantized, 16 x 1000": (0.059, {"binary": 0.050, "binary x int8": 0.050, "fp8_e4m3 x fp8": 0.045}),
    "quantized, pages 1 x 1000": (0.329, {"binary": 0.22, "binary x int8": 0.22, "fp8_e4m3 x fp8": 0.22}),
} | {f"d {d}, {sizes}": (1, {"mask": 1.25, "argmax": 1.25, "normalize": 1.15}) for d in WIDE for sizes in WIDE_SIZES}
Calls = dict[str, Callable[[], object]]


def draw(Nq: int, Nd: int, Lq: int, Ld: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return tokens of unit norm."""
    g = torch.Generator("cuda").manual_seed(d)
    tokens = (torch.randn(n, L, d, generator=g, device="cuda") for n, L in ((Nq, Lq), (Nd, Ld)))
    Q, D = (torch.nn.functional.normalize(x, dim=-1).to(dtype) for x in tokens)
    return Q, D


def with_precision(precision: str, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        torch.backends.cuda.matmul.fp32_precision = precision
        return call()

    return run


def split(x: Tensor, order: str) -> Tensor:
    """Return fp16 terms of tokens as features, in the order of the letters h (hi) and l (lo)."""
    hi = x.half()
    terms = {"h": hi, "l": (x - hi.float()).half()}
    return torch.cat([terms[letter] for letter in order], -1)


def einsum(Q: Tensor, D: Tensor) -> Tensor:
    return torch.einsum("qsd,ktd->qkst", Q, D).amax(-1).sum(-1)


def measure_errors(sizes: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Return the largest and the mean error of fp32 calls, for some pairs of a call of this size."""
    Q, D = draw(*sizes, 128, torch.float32)
    some = slice(0, 4), slice(0, 32)
    exact = einsum(Q[some[0]].double(), D[some[1]].double())
    records = {}
    for precision, name in (("tf32", "tf32"), ("ieee", "fp32")):
        for call, score in ((name, lik_ops.maxsim), (f"{name}, einsum", einsum)):
            documents = D if call == name else D[some[1]]
            queries = Q if call == name else Q[some[0]]
            found = with_precision(precision, lambda s=score, q=queries, d=documents: s(q, d)[some])()
            off = (found.double() - exact).abs() / exact.abs().max()
            records[call] = {"error": off.max().item(), "mean_error": off.mean().item()}
    return records


def step(Q: Tensor, D: Tensor) -> Callable[[], object]:
    Q, D = Q.requires_grad_(), D.requires_grad_()
    return lambda: torch.autograd.grad(lik_ops.maxsim(Q, D).diagonal().sum(), (Q, D))


def fp32_calls(sizes: tuple[int, ...], training: bool) -> Calls:
    half, (Q, D) = draw(*sizes, 128, torch.bfloat16), draw(*sizes, 128, torch.float32)
    if training:
        return {
            "bf16": step(*half),
            "fp16": step(*(x.to(torch.float16) for x in half)),
            "tf32": with_precision("tf32", step(Q, D)),
            "fp32": with_precision("ieee", step(Q, D)),
        }
    return {
        "bf16": lambda: lik_ops.maxsim(*half),
        "tf32": with_precision("tf32", lambda: lik_ops.maxsim(Q, D)),
        "tf32, composed": lambda: lik_ops.maxsim(Q.half(), D.half()),
        "fp32": with_precision("ieee", lambda: lik_ops.maxsim(Q, D)),
        "fp32, composed": lambda: lik_ops.maxsim(split(Q, "hhl"), split(D, "hlh")),
        "tf32, einsum": with_precision("tf32", lambda: einsum(Q, D)),
        "fp32, einsum": with_precision("ieee", lambda: einsum(Q, D)),
        **peer_calls(sizes, 128, "float32"),
    }


def quantized_calls(sizes: tuple[int, ...]) -> Calls:
    Q, D = draw(*sizes, 128, torch.bfloat16)
    stored = {name: lik_ops.quantize(D, name) for name in ("int8", "binary", "fp8_e4m3")}
    for name, query in (("binary", "int8"), ("binary", "binary"), ("fp8_e4m3", "fp8")):
        stored[f"{name} x {query}"] = dataclasses.replace(stored[name], query=query)
    stored["fp8_e4m3 x fp8, scale per document"] = lik_ops.quantize(D, "fp8_e4m3", "document", query="fp8")
    stored["binary, scale per document"] = lik_ops.quantize(D, "binary", "document")
    stored["binary x int8, scale per document"] = lik_ops.quantize(D, "binary", "document", query="int8")
    return {"bf16": lambda: lik_ops.maxsim(Q, D)} | {
        name: lambda x=x: lik_ops.maxsim(Q, x) for name, x in stored.items()
    }


def peer_calls(sizes: tuple[int, ...], d: int, dtype: str) -> Calls:
    """Return the calls of the peers that serve the case. Some of their kernels need too much shared memory."""
    case = common.Case("", *sizes, d=d, dtype=dtype)
    x, found = common.Inputs(case, "cuda"), {}
    for name in contenders.PEERS:
        scorer = contenders.get_scorer(name, case, x)
        if isinstance(scorer, str):
            continue
        try:
            scorer(x.Q, x.D)
        except Exception as error:  # of another library
            print(f"{name}, d {d}: {type(error).__name__}: {error}")
            continue
        found[name] = lambda f=scorer: f(x.Q, x.D)
    return found


def wide_calls(sizes: tuple[int, ...], d: int) -> Calls:
    Q, D = draw(*sizes, d, torch.bfloat16)
    mask = torch.rand(D.shape[:2], generator=torch.Generator().manual_seed(0)).cuda() < 0.8
    source = mask.int().argmax(1)  # the first kept token replaces the masked ones

    def composed() -> object:
        first = D.gather(1, source[:, None, None].expand(-1, 1, d))
        return lik_ops.maxsim(Q, torch.where(mask[..., None], D, first))

    return {
        "bf16": lambda: lik_ops.maxsim(Q, D),
        "mask": lambda: lik_ops.maxsim(Q, D, d_mask=mask),
        "mask, composed": composed,
        "argmax": lambda: lik_ops.maxsim_with_argmax(Q, D),
        "normalize": lambda: lik_ops.maxsim(Q, D, normalize=True),
        "einsum": lambda: einsum(Q, D),
        **peer_calls(sizes, d, "bfloat16"),
    }


def list_cases() -> dict[str, Callable[[], Calls]]:
    """Return the calls of each case by name."""
    cases: dict[str, Callable[[], Calls]] = {}
    for name, sizes in SIZES.items():
        if name != "1 x 100k":
            cases[f"fp32, {name}"] = lambda s=sizes: fp32_calls(s, False)
        cases[f"quantized, {name}"] = lambda s=sizes: quantized_calls(s)
    cases["fp32 step, in-batch 256"] = lambda: fp32_calls(SIZES["in-batch 256"], True)
    for name, sizes in WIDE_SIZES.items():
        cases |= {f"d {d}, {name}": lambda s=sizes, d=d: wide_calls(s, d) for d in WIDE}
    return cases


def _record_times(name: str, times: dict[str, float]) -> Iterator[tuple[dict, str | None]]:
    """Yield the record of each call of a case, and a line if the call is slower than its composition."""
    bf16, goals = GOALS.get(name, (1, {}))
    for call, ms in times.items():
        record: dict[str, Any] = {"case": {"name": f"{name}, {call}"}, "ms": ms, "ratio": ms / times["bf16"]}
        if call in goals:
            record["goal"] = goals[call] / bf16
        composed = times.get(f"{call}, composed")
        is_slower = composed is not None and ms > SLOWER * composed
        yield record, f"{name}, {call}: {ms:.4f} ms, composed {composed:.4f}" if is_slower else None
        goal = f", goal {record['goal']:.2f}" if "goal" in record else ""
        print(f"{name + ', ' + call:55} {ms:9.4f} ms  {record['ratio']:6.2f} of bf16{goal}", flush=True)


def main() -> int:
    run = Run("other_dtypes", __doc__, *contenders.PEERS)
    args = run.parser.parse_args()
    precision = torch.backends.cuda.matmul.fp32_precision
    timer, slower = Timer(args.rounds), []
    for name, make in run.asked(((name, (name, make)) for name, make in list_cases().items()), args):
        with torch.set_grad_enabled("step" in name):
            times = timer.compare(make())
        for record, line in _record_times(name, times):
            run.keep(record, args)
            slower += [line] if line else []
        if name.startswith("fp32, "):
            with torch.no_grad():
                for call, errors in measure_errors(SIZES[name.removeprefix("fp32, ")]).items():
                    run.keep({"case": {"name": f"{name}, {call}, accuracy"}} | errors, args)
                    print(f"{name + ', ' + call:45} error {errors['error']:.2e}, mean {errors['mean_error']:.2e}")
        torch.backends.cuda.matmul.fp32_precision = precision
    print(
        "\n".join(["slower than their composition:", *slower] if slower else ["no call is slower than its composition"])
    )
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
