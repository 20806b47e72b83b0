"""Tables of tiles that `lik_ops.tune` measured on one GPU: their JSON, and the one that ``LIK_OPS_TABLE`` names.

A table adds rules in front of those in `forward_table.FORWARD`. It is read once in a process, when the first kernel is
chosen. A table for another architecture is not used: a warning says so once, as processes may see several kinds of GPU.
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

from . import architectures, forward_configs, forward_table
from .architectures import Architecture
from .forward_table import TileConfig, TileRule

ENVIRONMENT_VARIABLE = "LIK_OPS_TABLE"
FORMAT_VERSION = 1
_UNLIMITED = forward_table.UNLIMITED
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_TILE_MINIMA = {"rows": 16, "tokens": 16, "features": 16, "warps": 1, "stages": 1}  # of a tile, with the least of each
_log = logging.getLogger("lik_ops")


@dataclass(frozen=True)
class TileTable:
    """What a file says: rules for one architecture, where and with what they were measured."""

    gpu: str
    architecture: str
    versions: Mapping[str, str]
    rules: tuple[TileRule, ...]
    measured: list[dict[str, Any]] = field(default_factory=list, compare=False)  # times, for people

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{len(self.rules)} rules for {self.architecture} measured on {self.gpu} ({versions})"


def to_json(table: TileTable) -> str:
    """`table` as the text of a file that `parse_table` reads."""
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
    return {
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in rule.dtypes],
        "d": [rule.above_d + 1, rule.d],
        "Lq": [rule.above_Lq + 1, rule.Lq],
        "tiles": [{**tile._asdict(), "documents": _encode_limit(tile.documents)} for tile in rule.tiles],
    }


def _encode_limit(n: int) -> int | None:
    return None if n >= _UNLIMITED else n


def _expect(condition: bool, where: str, expected: str, found: object) -> None:
    if not condition:
        raise ValueError(f"{where}: expected {expected}, got {found!r}")


def _check_members(record: object, names: set[str], where: str) -> dict[str, Any]:
    _expect(isinstance(record, dict), where, "an object", record)
    assert isinstance(record, dict)
    _expect(set(record) == names, where, f"the members {sorted(names)}", sorted(record))
    return record


def _is_count(x: object, least: int = 1) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= least


def _is_range(x: object) -> bool:
    return isinstance(x, list) and len(x) == 2 and all(map(_is_count, x)) and x[0] <= x[1]


def _parse_tile(record: object, where: str) -> TileConfig:
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
    return TileConfig(**{**values, "documents": _UNLIMITED if values["documents"] is None else values["documents"]})


def _parse_rule(record: object, arch: Architecture, where: str) -> TileRule:
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
    _expect(tiles[-1].documents == _UNLIMITED, f"{where}: documents of the last tile", "null", tiles[-1].documents)
    (d0, d1), (Lq0, Lq1) = values["d"], values["Lq"]
    rule = TileRule(arch.unit, tuple(_DTYPES[n] for n in names), d1, Lq1, False, 0, tiles, d0 - 1, Lq0 - 1)
    _check_sums(rule, arch, where)
    return rule


def _check_sums(rule: TileRule, arch: Architecture, where: str) -> None:
    """A rule must sum a query in the same parts as the built-in tiles, or its scores would have other bits."""
    served = range(architectures.cdiv(rule.above_d + 1, 16) * 16, rule.d + 1, 16)  # others take tiles of wide offsets
    _expect(len(served) > 0, f"{where}: d", "a range that holds a multiple of 16", [rule.above_d + 1, rule.d])
    for dtype in rule.dtypes:
        splits = dtype == torch.float32 and arch.unit in forward_configs.FP32_SPLIT_UNITS and arch.unit != "interpreter"
        _expect(not splits, f"{where}: dtypes", f"half types on {arch.name}, whose fp32 is not tuned", str(dtype))
        for Lq in (rule.above_Lq + 1, rule.Lq):
            for d in (served[0], served[-1]):
                usual = forward_configs.select_tiles(replace(arch, measured=()), dtype, Lq, d, False, 0)[-1].rows
                slot = architectures.next_power_of_2(Lq)
                same = min(slot, usual) == min(slot, rule.tiles[-1].rows)
                _expect(same, f"{where}: rows of the last tile for Lq {Lq}", f"{usual}", rule.tiles[-1].rows)


def parse_table(text: str, source: str) -> TileTable:
    """The table that `text` holds.

    Raises:
        ValueError: it holds none; names the member, what was expected and what was found.
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
    if name == architectures.INTERPRETER.name:
        return architectures.INTERPRETER
    return architectures.ARCHITECTURES.get(name, Architecture(name, 0))


@functools.cache
def load_table() -> TileTable | None:
    """The table that ``LIK_OPS_TABLE`` names, read once in a process; None where it names none.

    Raises:
        ValueError: the file cannot be read, or holds no table.
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
    """`arch` with the rules of the loaded table, if it is for `arch`."""
    table = load_table()
    if table is None:
        return arch
    if table.architecture != arch.name:
        _warn_mismatch(table.architecture, arch.name)
        return arch
    return replace(arch, measured=table.rules)


@functools.cache
def _warn_mismatch(expected: str, found: str) -> None:
    _log.warning("%s is for %s: not used on %s", ENVIRONMENT_VARIABLE, expected, found)
