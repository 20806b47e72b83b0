"""A run of a GPU benchmark: which rows are asked for, what compiles before any is timed, where the records go."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from . import common

T = TypeVar("T")


def wait(processes: Iterable[subprocess.Popen], end: float) -> None:
    """Until they have ended, or it is `end` by the monotonic clock: what runs then is killed."""
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_silently(variants: Iterable[Iterable[str]], seconds: float) -> None:
    """Run this script once for each list of further arguments, in parallel processes that end after `seconds`.

    Triton then finds the compiled kernels in its cache. Results go to temporary files.
    """
    end = time.monotonic() + seconds
    command, silent = [sys.executable, *sys.orig_argv[1:]], subprocess.DEVNULL
    with tempfile.TemporaryDirectory() as path:
        running = [
            subprocess.Popen([*command, *more, "--out", f"{path}/{n}"], stdout=silent, stderr=silent)
            for n, more in enumerate(variants)
        ]
        wait(running, end)


def compile_first(names: Iterable[str], seconds: float, *options: str) -> None:
    """Run this script once per row in parallel processes that end after `seconds`. They also get `options`.

    Compiling one row at a time is ten times slower.
    """
    if seconds:
        run_silently((["--first", "0", "--rounds", "1", *options, "--only", name] for name in names), seconds)


class Run:
    """The arguments of a benchmark and its records. Records are written after each row, so an early end loses none."""

    def __init__(self, name: str, doc: str | None, *packages: str, rounds: int = 30) -> None:
        self.name, self.packages, self.records = name, packages, list[dict]()
        self.parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        add = self.parser.add_argument
        add("--rounds", type=int, default=rounds, help=f"timed calls per row (default {rounds})")
        add("--only", default="", help="rows whose name contains this")
        add("--first", type=float, default=0, metavar="SECONDS", help="compile rows in parallel first, for this time")
        add("--out", type=Path, help=f"output file (default benchmarks/results/{name}.json)")

    def asked(self, rows: Iterable[tuple[str, T]], args: argparse.Namespace) -> Iterator[T]:
        """Yield the rows that `args` select, after their kernels are compiled."""
        chosen = {name: row for name, row in rows if args.only in name}
        compile_first(chosen, args.first)
        for row in chosen.values():
            yield row
            torch.cuda.empty_cache()

    def keep(self, record: dict, args: argparse.Namespace, **settings: object) -> dict:
        """Write `record` to the file and return it."""
        self.records.append(record)
        settings = {"rounds": args.rounds, **settings}
        common.write(self.name, self.records, *self.packages, path=args.out, **settings)
        return record
