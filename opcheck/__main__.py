"""``python -m lik_ops.opcheck``: check every operator against this torch build, with exit code 1 if a check fails."""

from __future__ import annotations

import argparse
import os
import sys

import torch

from lik_ops.opcheck import report
from lik_ops.opcheck.samples.table import OPERATORS

_MAX_JOBS = 16


def _make_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = argparse.ArgumentParser(prog="python -m lik_ops.opcheck", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    parser.add_argument("--op", action="append", choices=sorted(OPERATORS), help="check only this one (repeatable)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="check only every N-th sample")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="number of processes (default: 1 on a CPU, more on a GPU)"
    )
    return parser


def _choose_default_jobs(device: str) -> int:
    """Return 1 on a CPU, else one job for each core, because compiling hundreds of kernels dominates on a GPU."""
    return 1 if torch.device(device).type == "cpu" else min(_MAX_JOBS, os.cpu_count() or 1)


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and print a table; return the exit code."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    for name in ("every", "jobs"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name}: expected a positive number, got {getattr(options, name)}")
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device: {options.device}: {str(error).splitlines()[0]}")
    print(report.format_title(options.device))
    print(report.format_line(*report.HEADER))
    failed = []
    jobs = options.jobs or _choose_default_jobs(options.device)
    for result in report.run_checks(options.device, options.op, options.every, jobs):
        cells = (result.operator, result.check, result.cases, result.seconds, result.outcome)
        print(report.format_line(*cells), flush=True)
        if result.error is not None:
            failed.append(result)
    for result in failed:
        print(f"\n{result.operator}, {result.check}:\n{result.error}")
    print(f"\n{len(failed)} failed" if failed else "\nall passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
