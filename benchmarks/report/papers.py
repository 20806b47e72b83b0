"""Write `docs/papers.md` from the results of `python -m benchmarks.papers`.

    python -m benchmarks.report.papers [--check] [--results FILE]

Each table of `benchmarks/papers/rows.json` is shown with the published figures next to the measured ones. A row in
which a peer is better than lik_ops needs a sentence in `benchmarks/papers/remarks.json`. The key of a sentence is a
row ("S1/0"), a row and a quantity ("S1/0: forward, cold L2"), a table and a quantity, or a table. ``--check`` writes
nothing and fails if the page is stale.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..papers import plan, rows
from ..papers.plan import OURS, Quantity, TablePlan
from ..papers.rows import PaperRow, PaperTable
from ..support import common
from . import tables

PAGE = tables.ROOT / "docs" / "papers.md"
REMARKS = tables.ROOT / "benchmarks" / "papers" / "remarks.json"
UNEXPLAINED = "not ahead, not explained yet"
NOT_RUN = "not run"
GOAL = 0.95  # of the speed rows ahead of every peer
EQUAL = 0.995  # a ratio to a peer that counts as equal
FASTER = (1, 2, 3)
PER_MIB = {"GB": 2**20 / 1e9, "MB": 2**20 / 1e6, "MiB": 1.0, "KiB": 1024.0}
BASELINES = (plan.EAGER, "compiled", "padded", "dequantize")
HEAD = """# The papers' tables

Install: `pip install ".[bench]"` in a checkout of lik_ops, and the peers, to run the benchmark.

This page shows the tables that late-interaction-kernels and flash-maxsim publish, row by row, next to measurements of
lik_ops, of the peers and of the papers' own baselines in one run. `benchmarks/papers/rows.json` has the published
figures with their sources, and `python -m benchmarks.papers` measures them. `python -m benchmarks.report.papers` writes
this page.

- **Cells** are `published / measured`. A measured time is a median, with its quartiles in brackets. The published
  figures are from the GPU that the caption names, so only figures measured in one run are comparable.
- **Ratios** are the best peer, or the best other baseline, divided by lik_ops. More than 1 means that lik_ops is ahead.
  For shares and correlations, the ratio is lik_ops divided by the other. Figures within 0.5 % count as equal.
- **Cold** calls have a flushed L2 cache. **Warm** calls follow a call with the same tensors. Both are device times.
- **Peaks** are from `torch.cuda.max_memory_allocated`.
- **Checks.** Each result is compared with fp64 first, and a wrong result is not timed.
"""
Value = dict | float


@dataclass(frozen=True)
class Line:
    """The measured figures of one row and one quantity."""

    row: PaperRow
    quantity: Quantity
    found: dict[str, Value]  # contender: figure
    reasons: dict[str, str]  # contender: why there is no figure

    def figure(self, name: str) -> float | None:
        value = self.found.get(name)
        return value["median"] if isinstance(value, dict) else value

    def best(self, names: list[str]) -> float | None:
        figures = [x for name in names if (x := self.figure(name)) is not None]
        pick = max if self.quantity.is_higher_better else min
        return pick(figures) if figures else None

    @property
    def peers(self) -> list[str]:
        return [name for name in self.found if name.startswith(plan.PEERS)]

    @property
    def others(self) -> list[str]:
        return [name for name in self.found if name.startswith(BASELINES)]

    def ratio(self, names: list[str]) -> float | None:
        """Return the best of `names` relative to lik_ops. More than 1 is better for lik_ops."""
        ours, other = self.figure(self.quantity.ours), self.best(names)
        if other is None or ours is None:
            return None
        over, under = (ours, other) if self.quantity.is_higher_better else (other, ours)
        return over / under if under else (1.0 if over == under else math.inf)

    @property
    def is_behind(self) -> bool:
        """Return whether a peer has a figure that is better by more than 0.5 %, or the only one."""
        if not self.peers:
            return False
        ratio = self.ratio(self.peers)
        return ratio is None or ratio < EQUAL


def scaled(value: Value, quantity: Quantity, entry: dict) -> Value:
    """Return a stored figure in the unit of the quantity. Peaks are stored in MiB."""
    is_peak = quantity.measure.endswith(" peak")
    if isinstance(value, dict) or not is_peak:
        return value
    held = entry.get("held_mb", 0.0) if quantity.with_inputs else 0.0
    return (value + held) * PER_MIB[quantity.unit]


def names_of(quantity: Quantity, spec: plan.Spec) -> tuple[str, ...]:
    return quantity.only or (*spec.contenders, *spec.compiled)


def line_of(row: PaperRow, quantity: Quantity, spec: plan.Spec, records: dict[str, dict]) -> Line:
    """Collect the figures of a quantity from the records of a row."""
    found, reasons = dict[str, Value](), dict[str, str]()
    mine = [records[key] for key in (row.name, f"{row.name} compiled") if key in records]
    gpus = [record.get("gpu") for record in mine]
    for name in names_of(quantity, spec):
        with_name = [record for record in mine if name in record["contenders"]]
        if any(record.get("gpu") != gpus[0] for record in with_name):
            reasons[name] = f"measured on {gpus[-1]} only, the other contenders on {gpus[0]}"
            continue
        entries = [record["contenders"][name] for record in with_name]
        values = [entry["values"] for entry in entries if quantity.measure in entry.get("values", {})]
        if values:
            found[name] = scaled(values[0][quantity.measure], quantity, entries[0])
            continue
        whole = [record["failed"] for record in mine if isinstance(record.get("failed"), str)]
        why = [entry[key] for entry in entries for key in ("failed", "skipped") if key in entry]
        if why or whole or not mine:
            reasons[name] = (why or whole or [NOT_RUN])[0]
    return Line(row, quantity, found, reasons)


def lines_of(table: PaperTable, of: TablePlan, quantity: Quantity, records: dict[str, dict]) -> Iterator[Line]:
    for index in quantity.rows or range(len(table.rows)):
        row = PaperRow(table, index)
        spec = of.build(row)
        if not isinstance(spec, str):
            yield line_of(row, quantity, spec, records)


def by_row(document: dict | None) -> dict[str, dict]:
    """Return the records by the name of each row that they stand for."""
    records: dict[str, dict] = {}
    for record in (document or {}).get("records", ()):
        name = record["case"]["name"]
        suffix = " compiled" if name.endswith(" compiled") else ""
        for row in record.get("rows", [name.removesuffix(" compiled")]):
            records[row + suffix] = record
    return records


# Text


def written(value: float | None) -> str:
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def measured_cell(line: Line, name: str) -> str:
    value = line.found.get(name)
    if value is None:
        reason = line.reasons.get(name, "-")
        return reason if reason in ("out of memory", NOT_RUN) else "-"
    if not isinstance(value, dict):
        return written(value)
    return f"{written(value['median'])} ({written(value['q1'])}-{written(value['q3'])})"


def cell(line: Line, name: str) -> str:
    measured = measured_cell(line, name)
    column = line.quantity.columns.get(name)
    if column is None:
        return measured
    published = line.row[column]
    return f"{'-' if published is None else published} / {measured}"


def ratio_cell(ratio: float | None) -> str:
    return "-" if ratio is None else "all" if ratio == math.inf else f"{ratio:.2f}x"


def columns_of(lines: list[Line]) -> list[str]:
    """Return the contenders of a table in order: lik_ops, peers, baselines."""
    names: dict[str, None] = {}
    for line in lines:
        spec = plan.spec_of(line.row)
        assert isinstance(spec, plan.Spec)
        names |= dict.fromkeys(names_of(line.quantity, spec))
    return sorted(names, key=lambda name: (not name.startswith(OURS), not name.startswith(plan.PEERS)))


def quantity_table(of: TablePlan, lines: list[Line]) -> str:
    names = columns_of(lines)
    header = ["row", *of.shape, *names, "peer / lik_ops", "baseline / lik_ops"]
    body = []
    for line in lines:
        shape = [str(line.row[column]) for column in of.shape]
        ratios = [ratio_cell(line.ratio(which)) for which in (line.peers, line.others)]
        body.append([str(line.row.index), *shape, *(cell(line, name) for name in names), *ratios])
    return tables.table(header, body)


def remark(line: Line, remarks: dict[str, str]) -> str:
    table, title = line.row.table.id, line.quantity.title
    keys = (f"{line.row.name}: {title}", line.row.name, f"{table}: {title}", table)
    return next((remarks[key] for key in keys if key in remarks), UNEXPLAINED)


def behind_text(lines: list[Line], remarks: dict[str, str]) -> list[str]:
    """Return a list item for each row in which a peer is better."""
    items: dict[str, list[str]] = {}
    for line in lines:
        if line.is_behind:
            ratio = ratio_cell(line.ratio(line.peers))
            items.setdefault(remark(line, remarks), []).append(f"row {line.row.index} ({ratio})")
    return [f"- Not ahead, {', '.join(which)}: {text}" for text, which in items.items()]


def missing_text(lines: list[Line]) -> list[str]:
    """Return a list item for each reason that a contender has no figure."""
    items: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        for name, reason in line.reasons.items():
            if reason != NOT_RUN:
                items.setdefault((name, reason), []).append(str(line.row.index))
    return [f"- No figure of {name}, row {', '.join(which)}: {reason}." for (name, reason), which in items.items()]


def table_text(table: PaperTable, records: dict[str, dict], remarks: dict[str, str]) -> str:
    parts = [f"## {table.id}: {table.title}"]
    where = f"Published in {table.source}, on {table.reported_on}, {table.dtype}: {table.metric}."
    of = plan.plan_of(table.id)
    if isinstance(of, str):
        published = tables.table(list(table.columns), [["-" if x is None else str(x) for x in r] for r in table.rows])
        return "\n\n".join([*parts, f"{where} Not run. {of}", published])
    parts.append(" ".join(text for text in (where, f"Baselines: {table.baselines}.", of.note) if text))
    for quantity in of.quantities:
        lines = list(lines_of(table, of, quantity, records))
        unit = f", {quantity.unit}" if quantity.unit else ""
        notes = [*behind_text(lines, remarks), *missing_text(lines)]
        parts += [f"**{quantity.title}{unit}**", quantity_table(of, lines), *(["\n".join(notes)] if notes else [])]
    reasons: dict[str, list[str]] = {}
    for column, reason in of.not_measured.items():
        reasons.setdefault(reason, []).append(f"`{column}`")
    parts += [f"Not measured: {', '.join(columns)}. {reason}" for reason, columns in reasons.items()]
    return "\n\n".join(parts)


def all_lines(records: dict[str, dict]) -> list[Line]:
    """Return the lines of every table that is run. Tables that share their measurements are counted once."""
    found, seen = [], set()
    for table in rows.load():
        of = plan.plan_of(table.id)
        if isinstance(of, str):
            continue
        for quantity in of.quantities:
            for line in lines_of(table, of, quantity, records):
                spec = plan.spec_of(line.row)
                assert isinstance(spec, plan.Spec)
                key = plan.measured_with(spec), quantity.measure, quantity.ours
                if key not in seen:
                    seen.add(key)
                    found.append(line)
    return found


def summary(document: dict | None, records: dict[str, dict], remarks: dict[str, str]) -> str:
    """Return where the run was made, and how many rows are ahead of the peers and of the baselines."""
    every = list(rows.every_row())
    without = [row for row in every if isinstance(plan.spec_of(row), str)]
    counted = f"{len(every)} rows of {len(rows.load())} tables; {len(without)} rows cannot be run and say why."
    if document is None:
        return f"{counted} {NOT_RUN.capitalize()} on a GPU yet: every measured cell says so."
    lines = all_lines(records)
    speed = [line for line in lines if line.quantity.is_speed and line.peers]
    ahead = [line for line in speed if not line.is_behind]
    behind = [line for line in lines if line.is_behind]
    unexplained = [line for line in behind if remark(line, remarks) == UNEXPLAINED]
    ratios = [r for line in lines if line.quantity.is_speed and (r := line.ratio(line.others)) is not None]
    places = [(r["gpu"], r.get("commit")) for r in document["records"] if r.get("gpu")]
    where = Counter(f"{name} at commit {commit[:7]}" if commit else name for name, commit in places)
    machines = ", ".join(f"{count} on {name}" for name, count in sorted(where.items()))
    texts = [f"{sum(r > n for r in ratios)} are more than {n}x" for n in FASTER]
    share = f"{len(ahead) / len(speed):.1%}" if speed else "-"
    return (
        f"{tables.machine(document, 'torch', 'triton', *plan.PEERS, cases=())}."
        f"{f' Measurements: {machines}.' if len(where) > 1 else ''} {counted} In {len(ahead)} of"
        f" {len(speed)} timed figures with a peer, lik_ops is at least as fast as every peer ({share}, goal"
        f" {GOAL:.0%}). {len(behind)} figures, memory and errors included, are behind a peer, {len(unexplained)} of"
        f" them without an explanation. Of {len(ratios)} timed figures with a baseline of plain PyTorch,"
        f" {', '.join(texts)} as fast."
    )


def unknown_remarks(remarks: dict[str, str]) -> list[str]:
    """Return the keys of remarks that no row and no quantity has."""
    known = set()
    for table in rows.load():
        of = plan.plan_of(table.id)
        titles = [] if isinstance(of, str) else [quantity.title for quantity in of.quantities]
        for place in (table.id, *(f"{table.id}/{n}" for n in range(len(table.rows)))):
            known |= {place, *(f"{place}: {title}" for title in titles)}
    return sorted(set(remarks) - known)


def page(document: dict | None, remarks: dict[str, str]) -> str:
    """Return the whole page.

    Raises:
        ValueError: a remark belongs to no row.
    """
    if unknown := unknown_remarks(remarks):
        raise ValueError(f"remarks: {', '.join(unknown)} are no rows")
    records = by_row(document)
    texts = [table_text(table, records, remarks) for table in rows.load()]
    marked = ["<!-- tables: generated by benchmarks/report/papers.py -->", *texts, "<!-- /tables -->"]
    return "\n\n".join([HEAD.rstrip(), summary(document, records, remarks), *marked]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is stale")
    parser.add_argument("--results", type=Path, default=common.RESULTS / "papers.json", help="the results to show")
    args = parser.parse_args()
    document = json.loads(args.results.read_text()) if args.results.exists() else None
    text = page(document, json.loads(REMARKS.read_text()))
    is_stale = not PAGE.exists() or PAGE.read_text() != text
    if is_stale and not args.check:
        PAGE.write_text(text)
    print(f"{'stale' if args.check else 'rewritten'}: {PAGE.name if is_stale else 'nothing'}")
    sys.exit(1 if args.check and is_stale else 0)


if __name__ == "__main__":
    main()
