"""How fast are scores of quantised documents on this GPU, and how far off: formats, full precision and peers.

    python benchmarks/quantized.py [--only pages] [--rounds 30] [--out FILE]

Median device times of calls that find the L2 cache flushed. ``goal_ms`` are of ``int8``, ``int8 document`` and
``fp8_e4m3``, where a row has them. `error` is the largest difference from fp64 scores of full precision, beside the
largest score; `spearman` the rank correlation with them, both of one query's documents, at most `LOOKED_AT`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import common
import contenders
import gpu
import torch
from common import Case, Inputs
from torch import Tensor

import lik_ops

LOOKED_AT = 4096
PAGES = {"Lq": 1024, "Ld": 1024}
FORMATS = {
    "int8": ("int8", "token"),
    "int8 document": ("int8", "document"),
    "uint8": ("uint8", "token"),
    "fp8_e4m3": ("fp8_e4m3", "token"),
    "binary": ("binary", "token"),
}


@dataclass(frozen=True)
class Row:
    """A case, and what its formats may take."""

    case: Case
    goals: dict[str, float] = field(default_factory=dict)


def _goals(document: float, token: float) -> dict[str, float]:
    return {"int8 document": document, "int8": token, "fp8_e4m3": token}


ROWS = (
    Row(Case("quantized 1x1k", 1, 1000, 32, 300), _goals(0.017, 0.018)),
    Row(Case("quantized 1x100k", 1, 100_000, 32, 180), _goals(0.56, 0.58)),
    Row(Case("quantized 1x1k Ld 1024", 1, 1000, 32, 1024), _goals(0.038, 0.040)),
    Row(Case("quantized pages 1x1k", 1, 1000, **PAGES), _goals(0.21, 0.24)),
    Row(Case("quantized 4x1k", 4, 1000, 32, 300)),
    Row(Case("quantized 16x1k", 16, 1000, 32, 300), _goals(0.042, 0.047)),
    Row(Case("quantized pages 64x64", 64, 64, **PAGES), _goals(0.82, 0.95)),
)


def _peers(x: Inputs) -> dict[str, Callable[[], object]]:
    """Documents quantised by each peer's own function; queries too, where its kernel takes them so."""
    found: dict[str, Callable[[], object]] = {}
    try:
        from flash_maxsim import flash_maxsim_quant as flash

        if len(x.Q) == 1:
            data, scales = flash.quantize_int8_symmetric(x.D.half())
            Q, q_data = x.Q[0].half(), flash.quantize_query_int8(x.Q[0])
            found["flash-maxsim int8 x half"] = lambda: flash.flash_maxsim_int8_symmetric(Q, data, scales)
            found["flash-maxsim int8 x int8"] = lambda: flash.flash_maxsim_int8x8(Q, data, scales, *q_data)
    except ImportError:
        pass
    try:
        from late_interaction_kernels import fp8

        for name in ("tensor", "token"):
            quantize = getattr(fp8, f"quantize_fp8_per_{name}")
            (Q8, scale_Q), (D8, scale_D) = quantize(x.Q), quantize(x.D)
            found[f"late-interaction-kernels fp8 {name}"] = partial(
                fp8.maxsim_inference_fp8, Q8, D8, scale_Q=scale_Q, scale_D=scale_D
            )
    except ImportError:
        pass
    return found


def _ranks(x: Tensor) -> Tensor:
    return x.argsort().argsort().double()


def fidelity(x: Inputs, scores: object) -> dict[str, float]:
    """Of the first query's first documents: how far scores are off, and how well they rank."""
    assert isinstance(scores, Tensor)
    found = scores.reshape(-1)[:LOOKED_AT].double() if len(x.Q) == 1 else scores[0, :LOOKED_AT].double()
    parts = [lik_ops.reference.maxsim(x.Q[:1].double(), part.double())[0] for part in x.D[:LOOKED_AT].split(64)]
    exact = torch.cat(parts)
    ranks = torch.corrcoef(torch.stack([_ranks(found), _ranks(exact)]))[0, 1]
    return {"error": float((found - exact).abs().max() / exact.abs().max()), "spearman": float(ranks)}


def measure(row: Row, timer: gpu.Timer) -> dict:
    x = Inputs(row.case, "cuda")
    made = {name: lik_ops.quantize(x.D, *how) for name, how in FORMATS.items()}
    functions: dict[str, Callable[[], object]] = {"full": lambda: lik_ops.maxsim(x.Q, x.D)}
    functions |= {name: (lambda D=D: lik_ops.maxsim(x.Q, D)) for name, D in made.items()}
    functions |= _peers(x)
    contenders.forget_tuning()  # that of another shape
    failed: dict[str, str] = {}
    for name, function in list(functions.items()):
        try:
            gpu.first_call(function, 60)
        except (Exception, gpu.TooSlowError) as failure:
            if name in FORMATS or name == "full":
                raise
            failed[name] = gpu.reason(failure)
            del functions[name]
    ms = timer.compare(functions)
    quality = {name: fidelity(x, function()) for name, function in functions.items()}
    bytes_each = {name: D.nbytes for name, D in made.items()} | {"full": x.D.numel() * x.D.element_size()}
    record = {"case": asdict(row.case), "goals": row.goals, "ms": ms, "quality": quality, "bytes": bytes_each}
    return record | {"failed": failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="timed calls of each (default 30)")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--out", type=Path, help="where to write (default benchmarks/results/quantized.json)")
    args = parser.parse_args()
    timer, records = gpu.Timer(args.rounds), []
    ceiling = gpu.ceilings(timer)
    for row in ROWS:
        if args.only not in row.case.name:
            continue
        r = measure(row, timer)
        records.append(r)
        print(row.case.name)
        for name, ms in r["ms"].items():
            goal = f", goal {row.goals[name]:.3f}" if name in row.goals else ""
            quality = r["quality"][name]
            print(f"  {name:36} {ms:.4f} ms{goal}; {quality['error']:.1e}, {quality['spearman']:.4f}", flush=True)
        torch.cuda.empty_cache()
    settings = {"rounds": args.rounds, "ceilings": ceiling}
    print("wrote", common.write("quantized", records, *contenders.PEERS, path=args.out, **settings))


if __name__ == "__main__":
    main()
