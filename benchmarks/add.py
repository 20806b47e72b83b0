"""Put the rows of a run that was asked for some, or had no time for all, beside the rest of a result.

    python benchmarks/add.py NEW.json [--to benchmarks/results/NAME.json]

Rows that the run has take the place of those of the same name. Others stay, each with its commit, and
its GPUs where these are others.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import common


def _is_measured(record: dict) -> bool:
    return not isinstance(record.get("failed"), str)


def _kept(record: dict, old: dict, new: dict) -> dict:
    """A record of `old`, as a result with the environment of `new` has it."""
    env = old["environment"]
    gpus = record.get("gpus", env["gpus"])
    others = {} if gpus == new["environment"]["gpus"] else {"gpus": gpus}
    commit = record.get("commit", env["commit"])
    of = {} if commit == new["environment"]["commit"] else {"commit": commit}
    rest = {key: value for key, value in record.items() if key not in ("commit", "gpus")}
    return {**of, **others, **rest}


def joined(old: dict, new: dict) -> dict:
    """`new`, a result, with the records of `old` that it has not measured; in the order of `old`."""
    if old["benchmark"] != new["benchmark"]:
        raise ValueError(f"benchmark: the result is of {old['benchmark']}, the run of {new['benchmark']}")
    records = {r["case"]["name"]: _kept(r, old, new) for r in old["records"]}
    records |= {r["case"]["name"]: r for r in new["records"] if _is_measured(r)}
    return {**new, "records": list(records.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="what a benchmark wrote with --out")
    parser.add_argument("--to", type=Path, help="the result (default benchmarks/results, by the name of the benchmark)")
    args = parser.parse_args()
    new = json.loads(args.run.read_text())
    path = args.to or common.RESULTS / f"{new['benchmark']}.json"
    path.write_text(json.dumps(joined(json.loads(path.read_text()), new), indent=1) + "\n")
    print("wrote", path)


if __name__ == "__main__":
    main()
