"""Compile kernels before the first request: ``python -m lik_ops.warmup --device cuda --Lq 32``.

Triton stores compiled kernels on disk, where a server that starts later finds them. The program prints each call and
its time.
"""

from __future__ import annotations

import argparse
import sys

import torch

from . import backends
from .api.warmup import warmup
from .core.arguments import as_device

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SIZES = {  # default, help
    "--Lq": ([32], "tokens of a query (default 32)"),
    "--Nq": ([1], "numbers of queries (default 1)"),
    "--Ld": ([32, 300, 1024], "tokens of a document (default 32 300 1024)"),
    "--Nd": ([2, 200], "numbers of documents (default 2 200)"),
    "--top-k": ([], "also the kernels of retrieve for this many documents (default none)"),
}
_FLAGS = {
    "--candidates": "each query has its own documents, D [Nq, Nd, Ld, d]",
    "--q-mask": "calls pass q_mask",
    "--d-mask": "calls pass d_mask",
    "--q-weight": "calls pass q_weight",
    "--normalize": "calls pass normalize=True",
    "--argmax": "also maxsim_with_argmax",
    "--training": "also the forward that saves the argmax, and the backward",
    "--ragged": "also the functions of packed and padded tokens",
}


def main(argv: list[str] | None = None) -> None:
    """Run the calls that the options describe. The options have the names of the arguments of `lik_ops.warmup`."""
    parser = argparse.ArgumentParser(prog="python -m lik_ops.warmup", description=__doc__)
    parser.add_argument("--device", default="cuda", help="where the calls will be (default cuda)")
    parser.add_argument("--dtype", default="bfloat16", choices=_DTYPES, help="of Q and D (default bfloat16)")
    parser.add_argument("--d", type=int, default=128, help="features of a token (default 128)", metavar="N")
    for option, (default, text) in _SIZES.items():
        parser.add_argument(option, type=int, nargs="+", default=default, metavar="N", help=text)
    for option, text in _FLAGS.items():
        parser.add_argument(option, action="store_true", help=text)
    options = vars(parser.parse_args(argv))
    device, dtype, lengths = options.pop("device"), _DTYPES[options.pop("dtype")], options.pop("Lq")
    _check_backend(parser, device, dtype)
    total = 0.0
    for Lq in lengths:
        try:
            calls = warmup(device, dtype, Lq=Lq, **options)
        except (TypeError, ValueError) as error:
            parser.error(_explain(error, device))
        for label, seconds in calls:
            total += seconds
            print(f"{seconds:8.2f} s  {label}")
    print(f"{total:8.2f} s  in all")


def _explain(error: Exception, device: str) -> str:
    """Return the message of the error, with a hint if the default device is missing."""
    message = str(error).removeprefix("warmup: ")
    missing = device == "cuda" and not torch.cuda.is_available() and message.startswith("device: ")
    return f"{message} (--device cpu warms up the CPU)" if missing else message


def _check_backend(parser: argparse.ArgumentParser, device: str, dtype: torch.dtype) -> None:
    """Exit unless the backend that ``LIK_OPS_BACKEND`` names can compute on the device."""
    try:
        backends.select_backend(as_device("warmup", device), dtype)
    except (RuntimeError, ValueError) as error:
        parser.error(str(error).removeprefix("warmup: ").removeprefix("lik_ops: "))


if __name__ == "__main__":
    main()
else:
    sys.modules[__name__] = warmup  # type: ignore[assignment]  # `lik_ops.warmup` is the function, however it comes
