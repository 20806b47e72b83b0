"""Refuse slower kernels: compare the device times of this checkout with an older one, in one run on one GPU.

    python -m benchmarks.gate.device BASE [--only TEXT] [--seconds 540] [--out FILE] [--new FOLDER]

BASE is a commit or a folder. ``benchmarks/report/before.py`` measures: old and new alternate on each row, three turns
each, and a time is the median over turns of medians over 20 calls on a flushed L2 cache. Nearly equal kernels differed
by up to 2 % after three turns. A row more than `SUSPICION` slower is therefore measured again up to four times, and
all its turns decide. The gate refuses if such a row is more than 3 % slower, if a row fails that BASE can run, or if
no time was left for a row.

The table also says which rows have other bits. Host times are not judged here: ``benchmarks/gate/host.py`` does.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import checkouts, verdicts

if TYPE_CHECKING:
    from ..report.before import Turns

SUSPICION = 1.015
AGAIN = 4  # most repeated measurements of a row


def comparison_of(name: str, turns: Turns) -> verdicts.Comparison:
    """Return old and new device times of a row, the medians of its turns. A failure leaves no time."""
    old, new = ([] if any("failed" in x for x in side) else [x["ms"] for x in side] for side in turns)
    notes = [x["failed"] for side in turns for x in side if "failed" in x][:1]
    if old and new and len({x["bits"] for side in turns for x in side}) > 1:
        notes.append("other bits")
    medians = (statistics.median(side) if side else None for side in (old, new))
    return verdicts.Comparison(name, *medians, note="; ".join(notes))


def is_suspicious(row: verdicts.Comparison) -> bool:
    return row.verdict == "removed" or (row.ratio is not None and row.ratio > SUSPICION)


def measure_rows(pair: Any, rows: list[int], turns: int, end: float) -> tuple[dict[int, Turns], list[str]]:
    """Measure all rows, and suspicious rows again until `end`.

    Args:
        pair: older and newer `Checkout` of ``before.py``.
        rows: positions in ``before.ROWS``.
        turns: turns of one measurement.
        end: value of `time.monotonic` after which no measurement starts.

    Returns:
        The turns of each measured row, and the names of rows that were not measured.
    """
    from ..report import before

    found: dict[int, Turns] = {}
    for again in range(1 + AGAIN):
        for n in rows:
            if again and not (n in found and is_suspicious(comparison_of("", found[n]))):
                continue
            if time.monotonic() > end:
                break
            before.measure(pair, n, turns, found.setdefault(n, ([], [])))
            print(".", end="", flush=True)
    print()
    return found, [name_of(n) for n in rows if n not in found]


def name_of(n: int) -> str:
    from ..report import before

    kind, case = before.ROWS[n]
    return f"{kind}, {case.name}"


def write_out(path: Path, found: dict[int, Turns], **settings: object) -> None:
    """Write every turn, so that the noise of the machine can be read from the file."""
    from ..support import common

    records = [{"name": name_of(n), "old": old, "new": new} for n, (old, new) in found.items()]
    common.write("gate", records, path=path, limit=verdicts.LIMIT, suspicion=SUSPICION, **settings)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="commit or folder to compare with")
    parser.add_argument("--only", default="", help='regular expression for "kind, name" of the rows')
    parser.add_argument("--rounds", type=int, default=20, help="timed calls per turn (default 20)")
    parser.add_argument("--turns", type=int, default=3, help="turns of a measurement (default 3)")
    parser.add_argument("--seconds", type=float, default=540, help="start no measurement after this time (default 540)")
    parser.add_argument("--out", type=Path, default=checkouts.ROOT / "build" / "gate.json", help="output file")
    parser.add_argument("--new", type=Path, default=checkouts.ROOT, help="folder to judge (default: this checkout)")
    args = parser.parse_args(arguments)
    from ..report import before

    end = time.monotonic() + args.seconds
    rows = [n for n in range(len(before.ROWS)) if re.search(args.only, name_of(n))]
    with checkouts.checked_out(args.base) as folder:
        pair = before.Checkout(folder, args.rounds), before.Checkout(args.new, args.rounds)
        try:
            before.compile_first(pair, rows, args.seconds / 2)
            found, left = measure_rows(pair, rows, args.turns, end)
        finally:
            for checkout in pair:
                checkout.process.kill()
                checkout.process.wait()
    write_out(args.out, found, old=args.base, rounds=args.rounds)
    return conclude([comparison_of(name_of(n), turns) for n, turns in found.items()], left)


def conclude(rows: list[verdicts.Comparison], left: list[str]) -> int:
    """Print the table and the decision, and return the exit status."""
    print(verdicts.format_table(rows, "ms", 4))
    slower = verdicts.refused(rows)
    if slower:
        print(f"REFUSED: {len(slower)} of {len(rows)} rows: {'; '.join(slower)}")
    if left:
        print(f"REFUSED: no time was left for {len(left)} rows, give more --seconds: {'; '.join(left)}")
    if not rows:
        print("REFUSED: no row was measured")
    if slower or left or not rows:
        return 1
    print(f"accepted: {len(rows)} rows, none more than {verdicts.LIMIT - 1:.0%} slower")
    return 0


if __name__ == "__main__":
    sys.exit(main())
