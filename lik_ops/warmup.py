"""Compile before the first request, from the command line: ``python -m lik_ops.warmup --device cuda --Lq 32``.

Triton keeps what it compiles on disk, so that a server that starts afterwards finds it. Prints what was called and how
long it took.
"""

from __future__ import annotations

import argparse
import sys

import torch

from .api.warmup import warmup

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SIZES = {"--Lq": [32], "--Nq": [1], "--Ld": [32, 300, 1024], "--Nd": [2, 200], "--top-k": []}
_FLAGS = ("--candidates", "--q-mask", "--d-mask", "--q-weight", "--normalize", "--argmax", "--training", "--ragged")


def main(argv: list[str] | None = None) -> None:
    """Make the calls that the options describe; they are named as the arguments of `lik_ops.warmup`."""
    parser = argparse.ArgumentParser(prog="python -m lik_ops.warmup", description=__doc__)
    parser.add_argument("--device", default="cuda", help="where the calls will be (default cuda)")
    parser.add_argument("--dtype", default="bfloat16", choices=_DTYPES, help="of Q and D (default bfloat16)")
    parser.add_argument("--d", type=int, default=128, help="features of a token (default 128)")
    for option, default in _SIZES.items():
        parser.add_argument(option, type=int, nargs="+", default=default, metavar="N", help=f"(default {default})")
    for option in _FLAGS:
        parser.add_argument(option, action="store_true")
    given = vars(parser.parse_args(argv))
    device, dtype, lengths = given.pop("device"), _DTYPES[given.pop("dtype")], given.pop("Lq")
    total = 0.0
    for Lq in lengths:
        for said, seconds in warmup(device, dtype, Lq=Lq, **given):
            total += seconds
            print(f"{seconds:8.2f} s  {said}")
    print(f"{total:8.2f} s")


if __name__ == "__main__":
    main()
else:
    sys.modules[__name__] = warmup  # type: ignore[assignment]  # `lik_ops.warmup` is the function, however it comes
