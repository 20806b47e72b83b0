"""Merge the rows of a partial run into a stored result.

    python -m benchmarks.report.add NEW.json [--to benchmarks/results/NAME.json]

A row of the run replaces the row of the same name. Other rows stay and keep the commit they were measured at. They
also keep their GPUs if these differ. If the run did not measure the peers of a row, their figures stay, and
``peers_commit`` names the commit they were measured at.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..support import common
from ..support.contenders import PEERS


def _is_measured(record: dict) -> bool:
    return not isinstance(record.get("failed"), str)


def _kept(record: dict, old: dict, new: dict) -> dict:
    """Return a record of `old` in a form that is valid under the environment of `new`."""
    env = old["environment"]
    gpus = record.get("gpus", env["gpus"])
    others = {} if gpus == new["environment"]["gpus"] else {"gpus": gpus}
    commit = record.get("commit", env["commit"])
    of = {} if commit == new["environment"]["commit"] else {"commit": commit}
    rest = {key: value for key, value in record.items() if key not in ("commit", "gpus")}
    return {**of, **others, **rest}


def _with_peers(record: dict, old: dict) -> dict:
    """Return a record of a run with the figures of peers that only an old record of the same name has."""
    kept = {
        field: {name: x for name, x in old[field].items() if name.startswith(PEERS)}
        for field in ("ms", "quality")
        if isinstance(old.get(field), dict)
    }
    if not kept.get("ms") or any(name.startswith(PEERS) for name in record.get("ms", {})):
        return record
    fields = {field: record.get(field, {}) | x for field, x in kept.items()}
    return {**record, **fields, "peers_commit": old.get("peers_commit", old["commit"])}


def joined(old: dict, new: dict) -> dict:
    """Return `new` plus the records of `old` that it has not measured, in the order of `old`."""
    if old["benchmark"] != new["benchmark"]:
        raise ValueError(f"benchmark: the result is of {old['benchmark']}, the run of {new['benchmark']}")
    records = {r["case"]["name"]: _kept(r, old, new) for r in old["records"]}
    for record in filter(_is_measured, new["records"]):
        name = record["case"]["name"]
        commit = old["environment"]["commit"]
        records[name] = _with_peers(record, {"commit": commit, **records[name]}) if name in records else record
    return {**new, "records": list(records.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the file that a benchmark wrote with --out")
    parser.add_argument("--to", type=Path, help="the result (default benchmarks/results, by the name of the benchmark)")
    args = parser.parse_args()
    new = json.loads(args.run.read_text())
    path = args.to or common.RESULTS / f"{new['benchmark']}.json"
    path.write_text(json.dumps(joined(json.loads(path.read_text()), new), indent=1) + "\n")
    print("wrote", path)


if __name__ == "__main__":
    main()
