"""What the benchmark scripts share: interleaved timing, and JSON records of where and with what they were made."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def _cpu_name() -> str:
    """The processor's model, and its family numbers where the name says little, as in virtual machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name", platform.machine())
    return f"{name} (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else name


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checked-out commit, with "+" if tracked or new files differ from it; LIK_OPS_COMMIT where git cannot tell."""
    if named := os.environ.get("LIK_OPS_COMMIT"):
        return named

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def environment(*packages: str) -> dict:
    """Machine, versions and commit; `packages` are further distributions whose versions matter."""
    names = ("lik-ops", "torch", "triton", *packages)
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in names},
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }


def write(name: str, records: list[dict], *packages: str, path: Path | None = None, **settings: object) -> Path:
    """Write ``results/<name>.json`` (or `path`): environment, settings, records. Returns the path."""
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"benchmark": name, "environment": environment(*packages), "settings": settings, "records": records}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def interleaved(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each function, ``best`` and ``median`` of `rounds` rounds that call each of them once.

    Functions of one comparison share rounds, so that what else the machine does meets them alike. For host code and
    CPU kernels: nothing is synchronised.
    """
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: {"best": min(t), "median": statistics.median(t)} for name, t in times.items()}
