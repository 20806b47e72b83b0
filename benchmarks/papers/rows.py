"""The rows of the published tables, from `rows.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).with_name("rows.json")
Cell = int | float | str | None


@dataclass(frozen=True)
class PaperTable:
    """A published table: where it was measured and what its columns mean."""

    id: str
    source: str
    title: str
    reported_on: str
    dtype: str
    metric: str
    baselines: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class PaperRow:
    """One row of a table."""

    table: PaperTable
    index: int

    @property
    def name(self) -> str:
        """The key of the row in results and remarks."""
        return f"{self.table.id}/{self.index}"

    def __getitem__(self, column: str) -> Cell:
        return self.table.rows[self.index][self.table.columns.index(column)]

    def number(self, column: str, default: int = 0) -> int:
        """Return an integer column, or `default` if the table does not have it."""
        value = self[column] if column in self.table.columns else default
        assert isinstance(value, int)
        return value


def load() -> tuple[PaperTable, ...]:
    """Return all tables in the order of the file."""
    document = json.loads(PATH.read_text())
    sources = document["sources"]
    tables = []
    for fields in document["tables"]:
        lists = {"columns": tuple(fields["columns"]), "rows": tuple(map(tuple, fields["rows"]))}
        tables.append(PaperTable(**{**fields, **lists, "source": sources[fields["source"]]}))
    return tuple(tables)


def every_row() -> Iterator[PaperRow]:
    for table in load():
        yield from (PaperRow(table, n) for n in range(len(table.rows)))
