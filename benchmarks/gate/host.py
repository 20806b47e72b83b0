"""Refuse slower host code: compare the instructions of host calls with the committed record.

    python -m benchmarks.gate.host [BASE] [--record] [--only TEXT] [--new FOLDER]

Valgrind counts the instructions of each row of ``benchmarks/calls/host.py --without-gpu``, in Python, PyTorch and C.
Launches do nothing. A count hardly depends on the load or the clock of the machine: counts of the same code differ by
less than 1 %. Time that executes no instructions is not seen, such as cache misses and waits for a lock.

Without BASE, rows are compared with ``benchmarks/results/host_counts.json``. If a row needs more than 3 % more
instructions, or if the record is of other versions of Python, PyTorch, Triton or Valgrind, the record is not enough.
Then its commit is counted in this environment, this checkout is counted again, and these counts decide. BASE is a
commit or a folder that is counted instead.

``--record`` writes the record, after an intended change. Commit the record together with the change.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from . import checkouts, count, verdicts

RECORD = checkouts.ROOT / "benchmarks" / "results" / "host_counts.json"
SECONDS = 900
# Hashes decide the order of sets. The compiler and PyTorch must not use AVX-512, which Valgrind does not run.
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "LIK_OPS_NORM_WARNING": "0",
    "ATEN_CPU_CAPABILITY": "default",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
if platform.machine() == "x86_64":
    ENVIRONMENT["TORCHINDUCTOR_CPP_MARCH"] = "x86-64-v3"
Counts = dict[str, float]


def valgrind_version() -> str:
    """Return the version of Valgrind, or end the program if there is none."""
    if not shutil.which("valgrind"):
        raise SystemExit("the host gate counts instructions with Valgrind: install the package valgrind (Linux)")
    return subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def instructions(folder: Path, only: str = "") -> Counts:
    """Return the instructions of a call of each row of a checkout, the smallest of the blocks."""
    valgrind_version()
    with tempfile.TemporaryDirectory() as out:
        callgrind = ["--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"]
        command = ["valgrind", "--quiet", *callgrind, f"--callgrind-out-file={out}/dump"]
        command += [sys.executable, str(Path(count.__file__).resolve()), str(folder.resolve()), only]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ENVIRONMENT
        done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, timeout=SECONDS)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not rows:
            raise SystemExit(f"counting {folder} failed:\n{done.stderr[-4000:]}")
        return read_dumps(Path(out), rows)


def read_dumps(out: Path, rows: list[dict]) -> Counts:
    """Return the smallest count per call of each row, from the numbered dumps of its blocks."""
    found = {}
    for n, row in enumerate(rows):
        dumps = [out / f"dump.{n * count.BLOCKS + block + 1}" for block in range(count.BLOCKS)]
        totals = [int(re.findall(r"^totals: (\d+)$", path.read_text(), re.M)[0]) for path in dumps]
        found[f"{row['kind']}, {row['name']}"] = min(totals) / row["calls"]
    if not all(found.values()):
        raise SystemExit("Valgrind counted no instructions: PyTorch was built without its client requests")
    return found


def versions() -> dict[str, str | None]:
    from ..support import common

    found = common.environment()
    python = found["python"].rpartition(".")[0]
    names = "torch", "triton"
    return {"python": python, "valgrind": valgrind_version()} | {name: found["versions"][name] for name in names}


def write_record(counts: Counts) -> None:
    from ..support import common

    records = [{"name": name, "instructions": round(n)} for name, n in counts.items()]
    print("wrote", common.write("host_counts", records, path=RECORD, counted_with=versions()))


def read_record() -> tuple[Counts, dict]:
    record = json.loads(RECORD.read_text())
    return {row["name"]: row["instructions"] for row in record["records"]}, record["settings"]["counted_with"]


def compare_with_record(new: Path, only: str) -> list[verdicts.Comparison]:
    """Compare with the record, and with the commit of the record if that says no or has other versions."""
    old, recorded_with = read_record()
    old = {name: n for name, n in old.items() if re.search(only, name)}
    found = instructions(new, only)
    rows = verdicts.compare(old, found)
    here = versions()
    different = [f"{x} {recorded_with.get(x)} -> {here[x]}" for x in here if recorded_with.get(x) != here[x]]
    if not different and not verdicts.refused(rows):
        return rows
    print("the record is of other versions:" if different else "slower than the record:", end=" ")
    print("; ".join(different or verdicts.refused(rows)))
    return compare_with_base(checkouts.last_commit_of(RECORD), new, only, found)


def compare_with_base(base: str, new: Path, only: str, found: Counts | None = None) -> list[verdicts.Comparison]:
    """Compare with a commit or folder, counted in this environment. Rows that seem slower are counted again."""
    with checkouts.checked_out(base) as folder:
        print(f"counting {base}", flush=True)
        old = instructions(folder, only)
        found = found or instructions(new, only)
        if verdicts.refused(verdicts.compare(old, found)):
            print("counting again", flush=True)
            found = {name: min(n, found[name]) for name, n in instructions(new, only).items()}
    return verdicts.compare(old, found)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", default="", help="commit or folder (default: the committed record)")
    parser.add_argument("--record", action="store_true", help="write the record")
    parser.add_argument("--only", default="", help='regular expression for "kind, name" of the rows')
    parser.add_argument("--new", type=Path, default=checkouts.ROOT, help="folder to judge (default: this checkout)")
    args = parser.parse_args(arguments)
    if args.record:
        write_record(instructions(args.new))
        return 0
    rows = compare_with_base(args.base, args.new, args.only) if args.base else compare_with_record(args.new, args.only)
    print(verdicts.format_table(rows, "instructions", 0))
    if slower := verdicts.refused(rows):
        print(f"REFUSED: {len(slower)} of {len(rows)} rows: {'; '.join(slower)}")
        print("If the change is intended: make host-record, and commit the record with the change.")
        return 1
    if any(row.verdict in ("faster", "added") for row in rows):
        print("Some rows are faster or new. Keep the gain: make host-record")
    print(f"accepted: {len(rows)} rows, none more than {verdicts.LIMIT - 1:.0%} slower")
    return 0


if __name__ == "__main__":
    sys.exit(main())
