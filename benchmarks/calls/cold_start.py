"""Measure a cold start: 36 different calls of a fresh process whose compile cache is empty.

    python -m benchmarks.calls.cold_start [--out FILE] [--without-gpu]

The calls are 14 rerankings of one query, 14 training steps, and 8 scorings of pages, in bf16 with d 128. Each
implementation makes them twice in a process with an empty ``TRITON_CACHE_DIR``. Another process finds the compiled
kernels on disk. A third process of lik_ops calls `lik_ops.warmup` first. Times are seconds per call including
synchronization. Tensors exist before.

Each record has the kernels that were compiled: name, seconds, constants, and the specialization of the arguments. The
seconds of peers also contain their tuning. The file is rewritten after each implementation.

``--without-gpu`` runs the host code of sm_90 on CPU tensors, with launches that do nothing, and lists the kernels that
lik_ops would compile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

import lik_ops
from lik_ops.gpu.tuning.architectures import ARCHITECTURES

from ..support import common, contenders
from ..support.common import Case
from . import without_gpu


def _rerank(Nd: int, Ld: int, **options: Any) -> Case:
    return Case(f"rerank 1 x {Nd}, Ld {Ld}", 1, Nd, 32, Ld, **options)


def _step(Nq: int, Nd: int, Lq: int, Ld: int, **options: Any) -> Case:
    return Case(f"step {Nq} x {Nd}, Lq {Lq}, Ld {Ld}", Nq, Nd, Lq, Ld, what="step", **options)


def _pages(Nq: int, Nd: int, Lq: int, Ld: int, **options: Any) -> Case:
    return Case(f"pages {Nq} x {Nd}, Lq {Lq}, Ld {Ld}", Nq, Nd, Lq, Ld, **options)


RERANKINGS = (
    *(_rerank(Nd, 180) for Nd in (1, 4, 10, 20, 50, 100, 200, 1000)),
    *(_rerank(Nd, Ld) for Nd, Ld in ((100, 77), (100, 300), (200, 512), (1000, 300), (1000, 96), (4000, 128))),
)
STEPS = (
    *(_step(n, n, 32, 180) for n in (8, 16, 32, 64, 128)),
    _step(32, 64, 32, 256),
    _step(16, 128, 32, 300),
    _step(64, 64, 24, 220),
    _step(24, 24, 48, 180),
    _step(32, 32, 32, 177, mask="prefix"),
    _step(64, 64, 32, 300, mask="prefix"),
    _step(16, 16, 32, 200, mask="prefix", normalize=True),
    _step(32, 32, 32, 128, normalize=True),
    _step(64, 64, 32, 240, normalize=True),
)
PAGES = (
    _pages(1, 16, 1024, 1024),
    _pages(1, 200, 1024, 1024),
    _pages(4, 64, 1024, 1024),
    _pages(16, 32, 1030, 1030),
    _pages(1, 100, 780, 1030, mask="prefix"),
    _pages(8, 32, 1024, 1024, mask="prefix"),
    _pages(1, 100, 1024, 1024, normalize=True),
    _pages(8, 32, 1024, 1031, normalize=True),
)
CASES = (*RERANKINGS, *STEPS, *PAGES)


# Arguments of `lik_ops.warmup` that cover `CASES`. Small and large numbers may use different kernels.
WARMUPS: tuple[dict[str, Any], ...] = (
    {"Lq": 32, "Nd": (1, 1000, 4000), "Ld": 180},
    {"Lq": 32, "Nq": (8, 32, 64), "Nd": (8, 32, 64), "Ld": (180, 256), "training": True},
    {"Lq": 48, "Nq": 24, "Nd": 24, "Ld": 180, "training": True},
    {"Lq": 32, "Nq": (32, 64), "Nd": 32, "Ld": 180, "d_mask": True, "training": True},
    {"Lq": 32, "Nq": 16, "Nd": 16, "Ld": 200, "d_mask": True, "normalize": True, "training": True},
    {"Lq": 32, "Nq": (32, 64), "Nd": (32, 64), "Ld": (128, 240), "normalize": True, "training": True},
    {"Lq": 1024, "Nq": (1, 16), "Nd": 32, "Ld": 1024},
    {"Lq": 1024, "Nq": (1, 8), "Nd": 32, "Ld": 1024, "d_mask": True},
    {"Lq": 1024, "Nq": (1, 8), "Nd": 32, "Ld": (1024, 1031), "normalize": True},
)


def warm_up(device: str) -> None:
    """Compile the kernels of `CASES` with `lik_ops.warmup`."""
    for sizes in WARMUPS:
        lik_ops.warmup(device, torch.bfloat16, d=128, **sizes)


def make_calls(name: str, device: str) -> Iterator[tuple[Case, Callable[[], object] | str]]:
    """Yield the call of each case, or why an implementation has none."""
    for case in CASES:
        x = common.Inputs(case, device)
        scorer = contenders.get_scorer(name, case, x)
        yield case, scorer if isinstance(scorer, str) else _bind(scorer, case, x)


def _bind(scorer: contenders.Scorer, case: Case, x: common.Inputs) -> Callable[[], object]:
    if case.what != "step":
        return torch.no_grad()(lambda: scorer(x.Q, x.D))
    tokens = x.Q.requires_grad_(), x.D.requires_grad_()
    return lambda: torch.autograd.grad(scorer(*tokens), tokens, x.grad_scores)


def record_compilations(found: list[dict]) -> None:
    """Add each kernel that Triton compiles to `found`. Kernels that are read from disk are left out."""

    def listen(*, src: Any, metadata: dict, times: Any, cache_hit: bool, **others: Any) -> None:
        if not cache_hit:
            named = {src.fn.arg_names[path[0]]: str(value) for path, value in src.constants.items() if len(path) == 1}
            parts = {str(path): str(value) for path, value in {**src.constants, **src.attrs}.items() if len(path) > 1}
            found.append(
                {
                    "kernel": src.fn.__name__,
                    "seconds": round(times.total / 1e6, 3),
                    "warps": metadata["num_warps"],
                    "stages": metadata.get("num_stages"),
                    "constants": named,
                    "parts": parts,
                    "signature": {key: str(value) for key, value in src.signature.items()},
                }
            )

    triton.knobs.compilation.listener = listen


def measure(name: str, device: str, passes: int, warmed: bool) -> dict:
    """Return the seconds of each call in each pass, and the kernels that each pass compiled."""
    compiled: list[dict] = []
    record_compilations(compiled)
    calls = list(make_calls(name, device))
    record: dict[str, Any] = {"missing": {case.name: call for case, call in calls if isinstance(call, str)}}
    if warmed:
        start = time.perf_counter()
        warm_up(device)
        record["warmup_seconds"], record["warmup_kernels"] = round(time.perf_counter() - start, 3), list(compiled)
    record["passes"] = []
    for _ in range(passes):
        first, seconds = len(compiled), {}
        for case, call in calls:
            if not isinstance(call, str):
                _wait()
                start = time.perf_counter()
                call()
                _wait()
                seconds[case.name] = round(time.perf_counter() - start, 4)
        total = round(sum(seconds.values()), 3)
        record["passes"].append({"total": total, "seconds": seconds, "kernels": compiled[first:]})
    return record


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _run_process(name: str, cache: str, passes: int, *more: str) -> dict:
    """Return the record of a fresh process that uses a compile cache."""
    command = [sys.executable, "-m", "benchmarks.calls.cold_start", "--run", name, "--passes", str(passes), *more]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_CACHE_DIR": cache})
    if done.returncode:
        return {"failed": done.stderr[-500:]}
    return json.loads(done.stdout.splitlines()[-1])


def list_kernels(warmed: bool) -> list[dict]:
    """Return the kernels that each call of lik_ops adds, without a GPU."""
    h100 = dataclasses.replace(ARCHITECTURES["sm_90"], gpu="NVIDIA H100")
    without_gpu.install(lambda device: h100)
    records: list[dict] = []
    if warmed:
        warm_up("cpu")
        print(len(without_gpu.get_specializations()), "kernels of warmup")
    for case, call in make_calls("lik_ops", "cpu"):
        assert not isinstance(call, str)
        before = set(without_gpu.get_specializations())
        for _ in range(3):  # runs, captures, and replays
            call()
        added = [x for x in without_gpu.get_specializations() if x not in before]
        records.append({"case": {"name": case.name}, "kernels": [(name, *map(repr, x)) for name, *x in added]})
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/cold_start.json)")
    parser.add_argument("--without-gpu", action="store_true", help="list the kernels of lik_ops, on a CPU")
    parser.add_argument("--only", choices=("lik_ops", *contenders.PEERS), help="one implementation (default all)")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # one implementation in this process
    parser.add_argument("--passes", type=int, default=2, help="passes over the calls (default 2)")
    parser.add_argument("--warmed", action="store_true", help="without a GPU: list what is compiled after warmup")
    args = parser.parse_args()
    if args.run:
        print(json.dumps(measure(args.run, "cuda", args.passes, args.warmed)))
        return
    records: list[dict] = []
    write = partial(common.write, "cold_start", records, *contenders.PEERS, path=args.out, passes=args.passes)
    if args.without_gpu:
        for record in list_kernels(args.warmed):
            records.append(record)
            print(f"{record['case']['name']:32} {', '.join(name for name, *_ in record['kernels'])}")
        print(sum(len(record["kernels"]) for record in records), "kernels")
        if args.out:
            print("wrote", write())
    else:
        for name in (args.only,) if args.only else ("lik_ops", *contenders.PEERS):
            with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as other:
                runs = {"empty cache": _run_process(name, cache, args.passes)}
                runs["filled cache"] = _run_process(name, cache, args.passes)
                if name == "lik_ops":
                    runs["after warmup"] = _run_process(name, other, args.passes, "--warmed")
            for run, record in runs.items():
                records.append({"case": {"name": f"{name}, {run}"}, **record})
                totals = [(x["total"], len(x["kernels"])) for x in record.get("passes", ())]
                print(f"{name}, {run}:", record.get("failed", totals), record.get("warmup_seconds", ""), flush=True)
            path = write()
        print("wrote", path)


if __name__ == "__main__":
    main()
