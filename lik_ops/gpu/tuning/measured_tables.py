"""JSON tables of tiles that `lik_ops.tune` measured on one GPU, and the table that ``LIK_OPS_TABLE`` names.

The rules of a table precede `forward_table.FORWARD_RULES`. The table is read once in a process, when the first kernel
is chosen. A table for another architecture is ignored with one warning, because a process may use several kinds of GPU.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from . import architectures, forward_configs
from .architectures import Architecture
from .forward_table import TileConfig, TileRule
from .tables import UNLIMITED

ENVIRONMENT_VARIABLE = "LIK_OPS_TABLE"
FORMAT_VERSION = 1
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_TILE_MINIMA = {"rows": 16, "tokens": 16, "features": 16, "warps": 1, "stages": 1}  # of a tile
_log = logging.getLogger("lik_ops")


@dataclass(frozen=True)
class TileTable:
    """The contents of a table file: rules for one architecture, and the environment of the measurement."""

    gpu: str
    architecture: str
    versions: Mapping[str, str]
    rules: tuple[TileRule, ...]
    measured: list[dict[str, Any]] = field(default_factory=list, compare=False)  # times, for information

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{len(self.rules)} rules for {self.architecture} measured on {self.gpu} ({versions})"


def to_json(table: TileTable) -> str:
    """Return `table` as the text of a file that `parse_table` reads."""
    record = {
        "format": FORMAT_VERSION,
        "gpu": table.gpu,
        "architecture": table.architecture,
        "versions": dict(table.versions),
        "forward": [_make_rule_record(rule) for rule in table.rules],
        "measured": table.measured,
    }
    return json.dumps(record, indent=1) + "\n"


def _make_rule_record(rule: TileRule) -> dict[str, Any]:
    """Return the JSON object of a rule."""
    return {
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in rule.dtypes],
        "d": [rule.above_d + 1, rule.d],
        "Lq": [rule.above_Lq + 1, rule.Lq],
        "tiles": [{**tile._asdict(), "documents": _encode_limit(tile.documents)} for tile in rule.value],
    }


def _encode_limit(n: int) -> int | None:
    """Return the JSON value of a limit: null if unlimited."""
    return None if n >= UNLIMITED else n


def _expect(condition: bool, where: str, expected: str, found: object) -> None:
    """Raise ValueError unless `condition` holds."""
    if not condition:
        raise ValueError(f"{where}: expected {expected}, got {found!r}")


def _check_members(record: object, names: set[str], where: str) -> dict[str, Any]:
    """Return a JSON object after checking that its members have exactly these names."""
    _expect(isinstance(record, dict), where, "an object", record)
    assert isinstance(record, dict)
    _expect(set(record) == names, where, f"the members {sorted(names)}", sorted(record))
    return record


def _is_count(x: object, least: int = 1) -> bool:
    """Return whether `x` is an integer of at least `least`."""
    return isinstance(x, int) and not isinstance(x, bool) and x >= least


def _is_range(x: object) -> bool:
    """Return whether `x` is an ascending pair of counts."""
    return isinstance(x, list) and len(x) == 2 and all(map(_is_count, x)) and x[0] <= x[1]


def _parse_tile(record: object, where: str) -> TileConfig:
    """Return the tile of a JSON object."""
    values = _check_members(record, set(TileConfig._fields), where)
    for name, least in _TILE_MINIMA.items():
        value = values[name]
        whole = _is_count(value, least) and (name == "stages" or value & (value - 1) == 0)
        kind = "a number" if name == "stages" else "a power of two"
        _expect(whole, f"{where}: {name}", f"{kind} of at least {least}", value)
    for name in ("registers", "documents"):
        _expect(values[name] is None or _is_count(values[name]), f"{where}: {name}", "null or a number", values[name])
    _expect(isinstance(values["tokens_first"], bool), f"{where}: tokens_first", "true or false", values["tokens_first"])
    _expect(_is_count(values["walkers"], 0), f"{where}: walkers", "0 or a number", values["walkers"])
    return TileConfig(**{**values, "documents": UNLIMITED if values["documents"] is None else values["documents"]})


def _parse_rule(record: object, arch: Architecture, where: str) -> TileRule:
    """Return the rule of a JSON object."""
    values = _check_members(record, {"dtypes", "d", "Lq", "tiles"}, where)
    names = values["dtypes"]
    known = isinstance(names, list) and len(names) > 0 and all(name in _DTYPES for name in names)
    _expect(known, f"{where}: dtypes", f"some of {sorted(_DTYPES)}", names)
    for name in ("d", "Lq"):
        _expect(_is_range(values[name]), f"{where}: {name}", "[least, most]", values[name])
    _expect(isinstance(values["tiles"], list) and values["tiles"] != [], f"{where}: tiles", "a list of tiles", values)
    tiles = tuple(_parse_tile(tile, f"{where}: tile {n}") for n, tile in enumerate(values["tiles"]))
    sizes = [(tile.rows, tile.documents) for tile in tiles]
    _expect(sizes == sorted(set(sizes)), f"{where}: tiles", "ascending rows and documents", sizes)
    _expect(tiles[-1].documents == UNLIMITED, f"{where}: documents of the last tile", "null", tiles[-1].documents)
    (d0, d1), (Lq0, Lq1) = values["d"], values["Lq"]
    limits: dict[str, Any] = {"d": d1, "Lq": Lq1, "above_d": d0 - 1, "above_Lq": Lq0 - 1, "normalize": False, "wide": 0}
    rule = TileRule(units=(arch.unit,), dtypes=tuple(_DTYPES[n] for n in names), value=tiles, **limits)
    _check_sums(rule, arch, where)
    return rule


def _check_sums(rule: TileRule, arch: Architecture, where: str) -> None:
    """Raise ValueError unless a rule sums a query in the same parts as the built-in tiles.

    Other parts would change the bits of the scores.
    """
    served = range(
        architectures.cdiv(rule.above_d + 1, 16) * 16, rule.d + 1, 16
    )  # other d use the tiles of wide offsets
    _expect(len(served) > 0, f"{where}: d", "a range that holds a multiple of 16", [rule.above_d + 1, rule.d])
    for dtype in rule.dtypes:
        splits = dtype == torch.float32 and arch.unit in forward_configs.FP32_SPLIT_UNITS and arch.unit != "interpreter"
        _expect(not splits, f"{where}: dtypes", f"half types on {arch.name}, whose fp32 is not tuned", str(dtype))
        for Lq in (rule.above_Lq + 1, rule.Lq):
            for d in (served[0], served[-1]):
                usual = forward_configs.select_tiles(replace(arch, measured=()), dtype, Lq, d, False, 0)[-1].rows
                slot = architectures.next_power_of_2(Lq)
                same = min(slot, usual) == min(slot, rule.value[-1].rows)
                _expect(same, f"{where}: rows of the last tile for Lq {Lq}", f"{usual}", rule.value[-1].rows)


def parse_table(text: str, source: str) -> TileTable:
    """Return the table in `text`.

    Args:
        text: the contents of a table file.
        source: name of the file in messages.

    Raises:
        ValueError: `text` is not a table. The message names the member, the expected value, and the value found.
    """
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: expected JSON as lik_ops.tune writes it, got {error}") from None
    names = {"format", "gpu", "architecture", "versions", "forward", "measured"}
    known = isinstance(record, dict) and record.get("format") == FORMAT_VERSION
    _expect(known, source, f"a table of format {FORMAT_VERSION}", text[:60])
    values = _check_members(record, names, source)
    for name in ("gpu", "architecture"):
        _expect(isinstance(values[name], str), f"{source}: {name}", "a name", values[name])
    for name, kind in (("versions", dict), ("forward", list), ("measured", list)):
        _expect(isinstance(values[name], kind), f"{source}: {name}", f"a {kind.__name__}", values[name])
    arch = _find_architecture(values["architecture"])
    rules = tuple(_parse_rule(rule, arch, f"{source}: rule {n}") for n, rule in enumerate(values["forward"]))
    return TileTable(values["gpu"], arch.name, values["versions"], rules, values["measured"])


def _find_architecture(name: str) -> Architecture:
    """Return the architecture of a name, with no shared memory if it is unknown."""
    if name == architectures.INTERPRETER.name:
        return architectures.INTERPRETER
    return architectures.ARCHITECTURES.get(name, Architecture(name, 0))


@functools.cache
def load_table() -> TileTable | None:
    """Return the table that ``LIK_OPS_TABLE`` names, read once in a process, or None if the variable is unset.

    Raises:
        ValueError: the file cannot be read or is not a table.
    """
    path = os.environ.get(ENVIRONMENT_VARIABLE)
    if not path:
        return None
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{ENVIRONMENT_VARIABLE}: expected a file that can be read, got {error}") from None
    table = parse_table(text, f"{ENVIRONMENT_VARIABLE}={path}")
    _log.debug("%s=%s: %s", ENVIRONMENT_VARIABLE, path, table)
    return table


def add_measured_rules(arch: Architecture) -> Architecture:
    """Return `arch` with the rules of the loaded table if the table is for `arch`."""
    table = load_table()
    if table is None:
        return arch
    if table.architecture != arch.name:
        _warn_mismatch(table.architecture, arch.name)
        return arch
    return replace(arch, measured=table.rules)


@functools.cache
def _warn_mismatch(expected: str, found: str) -> None:
    """Log once that the table is for another architecture."""
    _log.warning("%s is for %s: not used on %s", ENVIRONMENT_VARIABLE, expected, found)
