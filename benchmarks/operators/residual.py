"""Measure the scoring of residual codes on this GPU, compared with scans of decoded tokens and peers.

    python -m benchmarks.operators.residual [--only "1x10k"] [--rounds 30] [--out FILE]

Times are median device times, each call on a flushed L2 cache. Documents have 180 tokens of d 128. Codes are drawn at
random from 16,384 centroids, so hardly any two tokens of a tile share one. "decoded" scans bf16 tokens that were
decoded before. "decode + ours" decodes them to memory in each call. `gigabytes` is the rate of codes, scales and
residuals in GB/s.

late-interaction-kernels reads bits in another order than these libraries write. Its times are valid, but its scores
are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

import lik_ops

from ..support import contenders, gpu
from ..support.runs import (
    Run,
)

CENTROIDS, LENGTH, D = 16_384, 180, 128


@dataclass(frozen=True)
class Row:
    """A case and its time goal."""

    name: str
    Nq: int
    Nd: int
    nbits: int
    goal: float | None = None


ROWS = (
    Row("1x1k", 1, 1_000, 2, 0.022),
    Row("1x10k", 1, 10_000, 2, 0.13),
    Row("1x10k", 1, 10_000, 4, 0.13),
    Row("16x1k", 16, 1_000, 4, 0.06),
    Row("64x10k", 64, 10_000, 2, 1.6),
    *(Row("1x10k", 1, 10_000, nbits) for nbits in (1, 8)),
    Row("1x100k", 1, 100_000, 2),
    Row("16x100k", 16, 100_000, 2),
)


def documents(row: Row) -> lik_ops.Quantized:
    generator = torch.Generator("cuda").manual_seed(0)
    centroids = normalize(torch.randn(CENTROIDS, D, generator=generator, device="cuda"), dim=-1).half()
    weights = torch.linspace(-0.08, 0.08, 2**row.nbits, device="cuda")
    codec = lik_ops.ResidualCodec(centroids, weights)
    shape = row.Nd, LENGTH
    codes = torch.randint(CENTROIDS, shape, generator=generator, device="cuda", dtype=torch.int32)
    residuals = torch.randint(256, (*shape, codec.width), generator=generator, device="cuda", dtype=torch.uint8)
    return lik_ops.Quantized.of_codes(codes, residuals, codec, torch.bfloat16)


def _peers(Q: Tensor, made: lik_ops.Quantized) -> dict[str, Callable[[], object]]:
    codec, codes = made.codec, made.codes
    assert codec is not None and codes is not None
    try:
        from late_interaction_kernels import plaid
    except ImportError:
        return {}
    lengths = torch.full((len(codes),), LENGTH, dtype=torch.int32, device=Q.device)
    centroids, weights = codec.centroids.to(Q.dtype), codec.weights.to(Q.dtype)
    args = Q, codes, made.data, lengths, centroids, weights, codec.nbits
    return {"late-interaction-kernels": lambda: plaid.maxsim_residual(*args)}


def measure(row: Row, timer: gpu.Timer) -> dict:
    made = documents(row)
    Q = normalize(torch.randn(row.Nq, 32, D, device="cuda"), dim=-1).bfloat16()
    decoded = made.dequantize()
    functions: dict[str, Callable[[], object]] = {
        "codes": lambda: lik_ops.maxsim(Q, made),
        "codes, search": lambda: lik_ops.retrieve(Q, made, 10),
        "decoded": lambda: lik_ops.maxsim(Q, decoded),
        "decode + ours": lambda: lik_ops.maxsim(Q, made.dequantize()),
    }
    functions |= _peers(Q, made)
    failed: dict[str, str] = {}
    for name, function in list(functions.items()):
        try:
            gpu.first_call(function, 60)
        except (Exception, gpu.TooSlowError) as failure:
            if name.startswith(("codes", "decoded")):
                raise
            failed[name] = gpu.reason(failure)
            del functions[name]
    error = float((lik_ops.maxsim(Q, made) - lik_ops.maxsim(Q.float(), made.dequantize(torch.float32))).abs().max())
    ms = timer.compare(functions)
    read = made.nbytes - sum(x.nbytes for x in made.codec.tensors().values()) if made.codec else 0
    record = {"row": vars(row), "ms": ms, "bytes": read, "gigabytes": read / ms["codes"] / 1e6, "error": error}
    return record | {"failed": failed}


def main() -> None:
    run = Run("residual", __doc__, *contenders.PEERS)
    args = run.parser.parse_args()
    timer = gpu.Timer(args.rounds)
    ceiling = gpu.ceilings(timer)
    for row in run.asked(((f"{row.name}, {row.nbits} bits", row) for row in ROWS), args):
        r = run.keep(measure(row, timer), args, ceilings=ceiling)
        goal = "" if row.goal is None else f", goal {row.goal:.3f}"
        print(f"{row.name}, {row.nbits} bits{goal}; {r['gigabytes']:.0f} GB/s, scores off by {r['error']:.1e}")
        for name, ms in r["ms"].items():
            print(f"  {name:36} {ms:.4f} ms", flush=True)
        for name, why in r["failed"].items():
            print(f"  {name:36} {why}", flush=True)


if __name__ == "__main__":
    main()
