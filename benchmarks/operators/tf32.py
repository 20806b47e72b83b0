"""Measure error and time of fp32 scores with TF32 allowed, compared with einsum in PyTorch.

    python -m benchmarks.operators.tf32 [--rounds 50] [--out FILE]

``mean`` and ``most`` are the signed mean and the largest relative error of a score against fp64. Tokens have unit
norm, for 16 queries x 1000 documents (32 and 300 tokens). The mean shows whether values are truncated instead of
rounded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

import lik_ops

from ..support import common
from ..support.gpu import (
    Timer,
)

NQ, ND, LQ, LD = 16, 1000, 32, 300


def einsum(Q: Tensor, D: Tensor) -> Tensor:
    return torch.cat([torch.einsum("qsd,ktd->qkst", Q, part).amax(-1).sum(-1) for part in D.split(100)], dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    timer, records = Timer(args.rounds), []
    for d in (64, 128, 320):
        tokens = (torch.randn(n, length, d, device="cuda") for n, length in ((NQ, LQ), (ND, LD)))
        Q, D = (torch.nn.functional.normalize(x, dim=-1) for x in tokens)
        expected = einsum(Q.double(), D.double())
        for precision in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            calls = {"lik_ops": lambda Q=Q, D=D: lik_ops.maxsim(Q, D), "einsum": lambda Q=Q, D=D: einsum(Q, D)}
            times = timer.compare(calls)
            for name, call in calls.items():
                error = (call().double() - expected) / expected
                found = {"mean": float(error.mean()), "most": float(error.abs().max()), "ms": times[name]}
                records.append({"contender": name, "d": d, "precision": precision, **found})
                print(records[-1])
    print(common.write("tf32", records, path=args.out, sizes=[NQ, ND, LQ, LD]))


if __name__ == "__main__":
    main()
