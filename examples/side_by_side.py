"""Run two trainings and compare the losses of their steps, their time and their memory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """Losses of every step, seconds of a step, and bytes at the peak of a GPU, 0 without one."""

    losses: list[float]
    seconds: float
    peak: int


def chosen(description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a training on docstrings."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--cached", action="store_true", help="the loss that caches gradients")
    return parser.parse_args(arguments)


def report(theirs: Run, ours: Run) -> int:
    """Print both; 1 if their losses differ by more than a thousandth of themselves."""
    for step in range(0, len(ours.losses), max(len(ours.losses) // 10, 1)):
        print(f"step {step + 1:4}   its own {theirs.losses[step]:.5f}   lik_ops {ours.losses[step]:.5f}")
    for name, run in (("its own", theirs), ("lik_ops", ours)):
        memory = f", {run.peak / 2**20:.0f} MiB at the peak" if run.peak else ""
        print(f"{name:8} {1000 * run.seconds:8.1f} ms a step{memory}")
    worst = max(abs(a - b) / abs(a) for a, b in zip(theirs.losses, ours.losses, strict=True))
    print(f"losses differ by {worst:.1e} of themselves at most")
    return int(worst > 1e-3)
