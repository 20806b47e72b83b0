"""Write the dashboard: one HTML file with a line per measured figure over the commits of `benchmarks/results`.

    python -m benchmarks.report.dashboard [FILE]

The page needs no network and no other file. A version of a file is a commit that changed the file. Without git, or in
a source distribution, the only version is the file on disk. `docs/building.py` adds the page to the site.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("benchmarks/results")
TEMPLATE = Path(__file__).with_name("dashboard.html")
PAGE = ROOT / "build" / "dashboard.html"
LINK = ' <a href="performance.html">Performance</a> explains the benchmarks.'

# Keys of a record that describe its input or its goal and not a measurement.
GIVEN = {"case", "row", "goal", "goals", "goal_ms", "operations", "turns", "rounds", "gpus", "dense_mean", "imported"}
GIVEN |= {"Nq", "Nd", "Lq", "Ld", "d", "nbits", "documents"}
# Keys that group other keys and say nothing else.
GROUPS = {"contenders", "results", "tried", "searches", "formats", "quality", "parts"}
# Unit and direction of a figure by the last key that matches. -1: less is better; 1: more is better.
UNITS = (
    (r"ms\d*|.*_ms", "ms", -1),
    (r"us|.*_us", "us", -1),
    (r"seconds|.*_seconds|.*_s", "s", -1),
    (r"mb|.*_mb", "MB", -1),
    (r"bytes|.*_bytes", "bytes", -1),
    (r"instructions", "instructions", -1),
    (r"gbs|.*_gbs|gigabytes", "GB/s", 1),
    (r"tflops", "TFLOP/s", 1),
    (r"gflops", "GFLOP/s", 1),
    (r"recall.*|spearman|mrr|.*efficiency", "", 1),
    (r"errors?|error_.*|relative_errors|loss|mean|most|difference", "relative error", -1),
    (r".*ratio.*|cost|of_.*|share", "ratio", 0),
)


def git(*arguments: str) -> str:
    try:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def versions(path: Path) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield the contents of a results file with hash, date and subject of their commits, the oldest first."""
    last = None
    for line in reversed(git("log", "--format=%H%x09%cs%x09%s", "--", path.as_posix()).splitlines()):
        commit, date, subject = line.split("\t", 2)
        try:
            document = json.loads(git("show", f"{commit}:{path.as_posix()}"))
        except json.JSONDecodeError:
            continue  # the commit removed the file
        last = document
        yield document, [commit[:10], date, subject]
    now = json.loads((ROOT / path).read_text(encoding="utf-8"))
    if now != last:
        yield now, ["", now.get("environment", {}).get("time", "")[:10], "not committed"]


def device_of(document: dict[str, Any]) -> str:
    """Return the name of the GPUs, or of the processor if there were none."""
    environment = document.get("environment", {})
    gpus = environment.get("gpus") or []
    name = gpus[0] if gpus else environment.get("cpu", "unknown")
    return f"{len(gpus)} x {name}" if len(gpus) > 1 else name


def inputs_of(record: dict[str, Any]) -> dict[str, Any]:
    return record.get("case") or record.get("row") or {}


def name_record(record: dict[str, Any]) -> str:
    inputs = inputs_of(record)
    sizes = [f"{key} {record[key]}" for key in ("Nq", "documents", "d") if key in record and not inputs]
    return ", ".join(map(str, filter(None, (record.get("kind"), inputs.get("name"), record.get("name"), *sizes))))


def name_in_full(record: dict[str, Any]) -> str:
    """Return the name and the other texts of a record and its case."""
    fields = [*inputs_of(record).items(), *record.items()]
    texts = [x for key, x in fields if isinstance(x, str) and key not in ("kind", "name")]
    return ", ".join(dict.fromkeys(filter(None, (name_record(record), *texts))))


def labels(records: list[dict[str, Any]]) -> list[str]:
    """Return a distinct label for each record: its name, and if names repeat its other texts, and then a number."""
    short = Counter(map(name_record, records))
    named = [name_record(r) if name_record(r) and short[name_record(r)] == 1 else name_in_full(r) for r in records]
    total, used = Counter(named), Counter[str]()
    numbered = []
    for label in named:
        used[label] += 1
        numbered.append(f"{label} #{used[label]}" if total[label] > 1 else label)
    return numbered


def figures(x: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the path and the value of every measured number of a record. Lists of numbers give their median."""
    if isinstance(x, list) and x and all(isinstance(v, (int, float)) for v in x):
        x = statistics.median(x)
    if isinstance(x, dict):
        for key, value in x.items():
            if key not in GIVEN:
                yield from figures(value, (*path, key))
    elif isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x):
        yield path, x


def unit_of(path: tuple[str, ...]) -> tuple[str, int]:
    for key in reversed(path):
        for pattern, unit, direction in UNITS:
            if re.fullmatch(pattern, key):
                return unit, direction
    return "", 0


def series_of(documents: list[dict[str, Any]]) -> list[list[Any]]:
    """Return label, figure, unit, direction and points ``[version, value]`` of each line of a file."""
    found: dict[tuple[str, tuple[str, ...]], list[list[float]]] = {}
    for version, document in enumerate(documents):
        records = [record for record in document.get("records", []) if isinstance(record, dict)]
        for label, record in zip(labels(records), records, strict=True):
            for path, value in figures(record):
                found.setdefault((label, path), []).append([version, float(f"{value:.5g}")])
    named = []
    for (label, path), points in found.items():
        named.append([label, ", ".join(key for key in path if key not in GROUPS), *unit_of(path), points])
    return named


def collect() -> list[dict[str, Any]]:
    """Return the versions and lines of every results file."""
    files = []
    for path in sorted((ROOT / RESULTS).glob("*.json")):
        found = list(versions(path.relative_to(ROOT)))
        documents = [document for document, _ in found]
        about = [
            [*commit, device_of(document), (document.get("environment", {}).get("commit") or "")[:10]]
            for document, commit in found
        ]
        files.append({"name": path.stem, "versions": about, "series": series_of(documents)})
    return files


def render(files: list[dict[str, Any]], in_site: bool = False) -> str:
    """Return the page, in the site with a link to another page. No text of the data can end its script element."""
    data = json.dumps(files, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    template = TEMPLATE.read_text(encoding="utf-8")
    head, tail = template.replace("<!--LINK-->", LINK if in_site else "").split("/*DATA*/null")
    return f"{head}{data}{tail}"


def main() -> None:
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(collect()), encoding="utf-8")
    print("wrote", page)


if __name__ == "__main__":
    main()
