"""Prove that the gates refuse what they must: run them on copies of this checkout that are slower on purpose.

    python -m benchmarks.gate.proof host    # Linux with Valgrind, about 7 minutes
    python -m benchmarks.gate.proof device  # sm_90 GPU, about 5 minutes

``host`` adds a Python loop of 3 us to `lik_ops.maxsim`. ``device`` starts 100 programs of the persistent sm_90 kernels
for every 105, so a kernel that keeps all SMs busy needs 5 % more time. A GPU at its power limit may raise the clock of
fewer SMs: then ``--percent`` adds more. An unchanged copy must be accepted.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from . import checkouts, device, host

FOLDERS = ("lik_ops", "csrc_triton", "opcheck", "benchmarks")
ADDED_US = 3.0
PYTHON = Path("lik_ops/api/score.py"), "    compiling = _is_compiling()\n    if not compiling:\n"
PROGRAMS = Path("lik_ops/gpu/tuning/sm90_configs.py"), "row_tiles, min(programs, row_tiles * K), tree)"
# Rows that keep all SMs busy, with the kernels that the slower copy changes.
DEVICE_ROWS = "forward, (serve 16x1k|serve 64x10k|in-batch 256|pages 64x64)$"
HOST_ROWS = "no grad, lik_ops.maxsim$"


def loop_microseconds(iterations: int) -> float:
    """Return the smallest time of an empty Python loop, of 50."""
    best = float("inf")
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(iterations):
            pass
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def copy_checkout(to: Path) -> Path:
    for folder in FOLDERS:
        shutil.copytree(checkouts.ROOT / folder, to / folder, symlinks=True, ignore=shutil.ignore_patterns("*.pyc"))
    return to


def replace_once(folder: Path, place: tuple[Path, str], new: str) -> None:
    path, old = folder / place[0], place[1]
    text = path.read_text()
    if text.count(old) != 1:
        raise SystemExit(f"{place[0]} has {text.count(old)} places like {old!r}: adapt {Path(__file__).name}")
    path.write_text(text.replace(old, new))


def slow_python(folder: Path, microseconds: float = ADDED_US) -> int:
    """Add an empty loop of so many microseconds to `lik_ops.maxsim`, and return its iterations."""
    iterations = max(1, round(1000 * microseconds / loop_microseconds(1000)))
    replace_once(folder, PYTHON, f"{PYTHON[1]}        for _ in range({iterations}):\n            pass\n")
    return iterations


def slow_kernel(folder: Path, percent: int) -> None:
    """Start fewer programs of the persistent kernels of sm_90, each with so many percent more work."""
    fewer = f"max(1, programs * 100 // {100 + percent}),"
    replace_once(folder, PROGRAMS, PROGRAMS[1].replace("programs,", fewer))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gate", choices=("host", "device"))
    parser.add_argument("--percent", type=int, default=5, help="slowdown of the kernels (default 5)")
    args = parser.parse_args()
    gate, only = (host.main, HOST_ROWS) if args.gate == "host" else (device.main, DEVICE_ROWS)
    with tempfile.TemporaryDirectory() as made:
        same, slower = (copy_checkout(Path(made) / name) for name in ("same", "slower"))
        if args.gate == "host":
            print(f"slower by a loop of {slow_python(slower)} iterations, {ADDED_US} us")
        else:
            slow_kernel(slower, args.percent)
        base = str(checkouts.ROOT)
        accepted = gate([base, "--only", only, "--new", str(same)]) == 0
        refused = gate([base, "--only", only, "--new", str(slower)]) == 1
    print(f"unchanged copy accepted: {accepted}; slower copy refused: {refused}")
    return 0 if accepted and refused else 1


if __name__ == "__main__":
    sys.exit(main())
