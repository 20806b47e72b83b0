"""Compare the rows of two checkouts: which rows are slower by more than a limit, and the table of all rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

LIMIT = 1.03


class Comparison(NamedTuple):
    """Costs of one row, None in the checkout that does not have the row."""

    name: str
    old: float | None
    new: float | None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.old is None or self.new is None else self.new / self.old

    @property
    def verdict(self) -> str:
        """Return "slower" or "removed", which a gate refuses, "faster", "added", or nothing."""
        if self.ratio is None:
            return "added" if self.old is None else "removed"
        return "slower" if self.ratio > LIMIT else "faster" if self.ratio < 1 / LIMIT else ""

    @property
    def is_refused(self) -> bool:
        return self.verdict in ("slower", "removed")


def compare(old: Mapping[str, float], new: Mapping[str, float]) -> list[Comparison]:
    names = [*new, *(name for name in old if name not in new)]
    return [Comparison(name, old.get(name), new.get(name)) for name in names]


def refused(rows: Iterable[Comparison]) -> list[str]:
    return [row.name for row in rows if row.is_refused]


def format_table(rows: Iterable[Comparison], unit: str, digits: int) -> str:
    """Return a table of all rows, the slowest ratio last, because a terminal shows the end."""
    rows = sorted(rows, key=lambda row: (row.is_refused, row.ratio or 0))
    width = max((len(row.name) for row in rows), default=3)

    def cell(x: float | None) -> str:
        return f"{'-' if x is None else f'{x:,.{digits}f}':>14}"

    lines = [f"{'row':{width}} {'old, ' + unit:>14} {'new, ' + unit:>14} {'ratio':>7}"]
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.4f}"
        note = ", ".join(filter(None, (row.verdict, row.note)))
        lines.append(f"{row.name:{width}} {cell(row.old)} {cell(row.new)} {ratio:>7} {note}".rstrip())
    return "\n".join(lines)
