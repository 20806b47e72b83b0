"""``python -m lik_ops.tune``: measure tiles of the forward kernel on this GPU and write them as a table.

    python -m lik_ops.tune --out table.json
    LIK_OPS_TABLE=table.json python serve.py

The program times tiles for each dtype, number of features and query length, with few and many query rows and
documents. Every tile in the table computes the same bits as the built-in tiles, so a table changes the speed of scores
and nothing else. Needs a CUDA or ROCm GPU and Triton.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch

from .core import disk


def main(argv: list[str] | None = None) -> None:
    """Measure tiles and write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m lik_ops.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument(
        "--d", type=int, nargs="+", default=[128], metavar="N", help="features of a token (default 128)"
    )
    parser.add_argument("--lq", type=int, nargs="+", metavar="N", help="tokens of a query (default 32 128 1024)")
    parser.add_argument("--dtype", nargs="+", choices=dtypes, help="dtypes of tokens (default bfloat16 float16)")
    parser.add_argument(
        "--quick", action="store_true", help="measure a few tiles of bfloat16 queries of 32 tokens, as a trial"
    )
    args = parser.parse_args(argv)
    args.lq = args.lq or ([32] if args.quick else [32, 128, 1024])
    args.dtype = args.dtype or (["bfloat16"] if args.quick else ["bfloat16", "float16"])
    if find_spec("triton") is None:
        parser.error("Triton is not installed: there is no kernel to measure")
    if not torch.cuda.is_available():
        parser.error("no CUDA or ROCm GPU here: there is nothing to measure")
    if not args.out.parent.is_dir():
        parser.error(f"argument --out: no directory {args.out.parent}")
    if args.out.exists() and not args.out.is_file():
        parser.error(f"argument --out: expected a regular file, found something else at {args.out}")
    from . import tuning
    from .gpu.tuning import measured_tables

    try:
        arch = tuning.local_architecture()
        tuning.check_options(args, arch)
    except ValueError as error:
        parser.error(str(error))
    table = tuning.tune(args, arch)
    disk.replace_file(args.out, lambda at: at.write_text(measured_tables.to_json(table)))
    measured_tables.parse_table(args.out.read_text(), str(args.out))
    print(f"wrote {args.out}: {table}")
    print(f"{measured_tables.ENVIRONMENT_VARIABLE}={args.out} makes lik_ops use it")


if __name__ == "__main__":
    main()
