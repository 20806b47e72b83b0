"""Measure ragged calls on this GPU, compared with dense tensors of as many tokens, padding and peers.

    python -m benchmarks.operators.ragged [--only rerank] [--rounds 30] [--seconds 150] [--out FILE]

Document lengths follow HotpotQA: a clipped gamma distribution of shape 4 with a mean of 0.3 of the maximum. Ragged
queries have a mean of 0.6 of the maximum (pages: 0.3). Other queries have full length. Lengths are seeded on the host,
so they are the same on every machine. Padded contenders pad to the longest sequence of the batch.

``ratio_to_dense`` is the time of the packed call over the time of the dense kernel (``dense_mean``), each per
operation that it needs. The dense kernel computes as many scores of queries and documents that all have the mean
length. The goal is 1.15. A step, forward with winners and backward, is compared with a dense step. The last part puts
masks on dense calls and compares them with no mask. They mask random tokens, a tenth of all (``holes``), or all tokens
after a length (``prefix``).

Times are median device times, each call on a flushed L2 cache. Every contender is checked against fp64 before
timing. The file is rewritten after each case.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

import lik_ops

from ..support import common, gpu, ragged_cases
from ..support import contenders as dense_contenders
from ..support.ragged_cases import (
    Case,
    Inputs,
)
from ..support.ragged_contenders import (
    DENSE,
    PACKED,
    Contender,
    Entry,
    contenders,
    dense_mean,
)
from . import training

FIRST_CALL_SECONDS = 30  # limit for compiling and tuning one contender on one case
WRONG, WRONG_GRADIENT = 1e-2, 0.5
EXACT = 1e-2  # exceeds the error of bf16 similarities but not of moved winners, as in forward.py and training.py
GOAL = 1.15

CASES = (
    Case("rerank 1k", 1, 1000, 32, 300, retune=True),
    Case("in-batch 256", 256, 256, 32, 300, mean_q=0.6, retune=True),
    Case("in-batch 256 step", 256, 256, 32, 300, mean_q=0.6, what="step"),
    Case("serve 16x1k", 16, 1000, 32, 300),
    Case("rerank 1k long", 1, 1000, 32, 1024),
    Case("candidates 256x16", 256, 4096, 32, 1024, K=16, retune=True),
    Case("candidates 256x16 step", 256, 4096, 32, 1024, K=16, what="step"),
    Case("pairs 4096", 256, 1024, 32, 300, P=4096, mean_q=0.6, retune=True),
    Case("pairs 4096 step", 256, 1024, 32, 300, P=4096, mean_q=0.6, what="step"),
    Case("pages 64x64", 64, 64, 1024, 1024, mean_q=0.3),
)
MASKED = (
    common.Case("masked rerank 1k", 1, 1000, 32, 300),
    common.Case("masked serve 16x1k", 16, 1000, 32, 300),
    common.Case("masked serve 32x1k", 32, 1000, 32, 300),
    common.Case("masked in-batch 256", 256, 256, 32, 300),
    common.Case("masked in-batch 256 step", 256, 256, 32, 300, what="step"),
)
HOLES = 0.1


def call_of(x: Inputs, entry: Entry) -> Callable[[], object]:
    if x.case.what == "step":
        return lambda: ragged_cases.step(entry.score, entry.tokens, x.grad_scores)
    return lambda: entry.score(*entry.tokens)


def checked(what: str, errors: dict[str, float]) -> dict:
    """Return the errors and whether they match the input precision, or the failure if the result is wrong."""
    worst = max(errors.values())
    if not worst < (WRONG_GRADIENT if what == "step" else WRONG):
        return {"failed": "wrong: " + ", ".join(f"{k} {v:.1e}" for k, v in errors.items())}
    return {**errors, "exact": worst < EXACT}


def prepare(x: Inputs, contender: Contender, seconds: float) -> dict:
    """Compile a contender, check it and measure its memory, or return the reason for not timing it."""
    if isinstance(contender, str):
        return {"skipped": contender}
    if seconds <= 0:
        return {"skipped": "no time left"}
    try:
        call = call_of(x, contender)
        with torch.set_grad_enabled(x.case.what == "step"):
            out, first = gpu.first_call(call, min(seconds, FIRST_CALL_SECONDS))
            if isinstance(out, torch.Tensor):
                errors = {"error": ragged_cases.error_of(x, out)}
            else:
                errors = ragged_cases.errors_of(x, contender.score, contender.tokens)
            del out
            found = checked(x.case.what, errors)
            return found if "failed" in found else {**found, "first_s": first, "peak_mb": gpu.peak_bytes(call) / 2**20}
    except (Exception, gpu.TooSlowError) as failure:
        return {"failed": gpu.reason(failure)}


def timed(timer: gpu.Timer, calls: Mapping[str, Callable[[], object]]) -> dict[str, dict]:
    """Time all calls together, or one at a time if a call fails."""
    try:
        return {name: {"ms": ms} for name, ms in timer.compare(calls).items()}
    except Exception:
        torch.cuda.empty_cache()
    found: dict[str, dict] = {}
    for name, call in calls.items():
        try:
            found[name] = {"ms": timer(call)}
        except Exception as failure:
            found[name] = {"failed": gpu.reason(failure)}
    return found


def ratios(record: dict) -> dict:
    """Return the time ratios of a record: ours to the dense kernel, and peers to ours."""
    times = {n: r["ms"] for n, r in record["contenders"].items() if "ms" in r}
    if PACKED not in times:
        return {}
    ours = times.pop(PACKED)
    found: dict = {"of_floor": record["floor_ms"] / ours, "ratio_to_ours": {n: ms / ours for n, ms in times.items()}}
    if "ms" in record["dense_mean"]:
        kept = record["operations"] / record["dense_mean"]["operations"]
        found["ratio_to_dense"] = ours / (record["dense_mean"]["ms"] * kept)
    return found


def measure(case: Case, timer: gpu.Timer, ceiling: dict[str, float], end: float, device: str = "cuda") -> dict:
    x = Inputs(case, device)
    found = contenders(x)
    if case.retune:
        dense_contenders.forget_tuning()
    record: dict = {"case": asdict(case), "operations": x.operations, "bytes": x.bytes, "goal": GOAL}
    record["longest"], record["tokens"] = (x.Lq, x.Ld), (x.Q.shape[0], x.D.shape[0])
    record["floor_ms"] = max(x.operations / ceiling["tflops"] / 1e9, x.bytes / ceiling["gbs"] / 1e6)
    dense = dense_mean(x)
    record["dense_mean"] = {"Lq": x.mean_Lq, "Ld": x.mean_Ld, "operations": x.dense_operations}
    entries = {name: prepare(x, contender, end - time.monotonic()) for name, contender in found.items()}
    record["contenders"] = entries
    calls = {n: call_of(x, c) for n, c in found.items() if isinstance(c, Entry) and "peak_mb" in entries[n]}
    with torch.set_grad_enabled(case.what == "step"):
        for name, r in timed(timer, {**calls, DENSE: call_of(x, dense)}).items():
            (record["dense_mean"] if name == DENSE else entries[name]).update(r)
        for name, call in calls.items():
            if "ms" in entries[name]:
                entries[name]["host_us"] = gpu.host_microseconds(call, 20)
    return record | ratios(record)


def measure_masked(case: common.Case, timer: gpu.Timer, device: str = "cuda") -> dict:
    """Measure a dense call without a mask, with holes, and with lengths, as contenders of one record."""
    x = common.Inputs(case, device)
    generator = torch.Generator(device).manual_seed(1)
    kept = torch.rand(x.D.shape[:-1], generator=generator, device=device)
    lengths = (kept[..., 0] * (case.Ld // 2)).long() + case.Ld // 2
    masks = {"no mask": None, "holes": kept > HOLES, "prefix": lik_ops.lengths_to_mask(lengths, case.Ld)}
    calls: dict[str, Callable[[], object]] = {}
    entries: dict[str, dict] = {}
    with torch.set_grad_enabled(case.what == "step"):
        for name, mask in masks.items():
            x.d_mask = mask
            score = partial(lik_ops.maxsim, d_mask=mask)
            try:
                if case.what == "step":
                    errors = training.errors_of(x, score)
                    calls[name] = partial(training.step, score, x, x.grad_scores)
                else:
                    errors = {"error": common.error_of(x, score(x.Q, x.D))}
                    calls[name] = partial(score, x.Q, x.D)
                entries[name] = checked(case.what, errors)
            except Exception as failure:
                entries[name] = {"failed": gpu.reason(failure)}
        calls = {name: call for name, call in calls.items() if "exact" in entries[name]}
        for name, found in timed(timer, calls).items():
            entries[name].update(found)
    record = {"case": asdict(case), "contenders": entries, "goal": GOAL}
    return record | masked_ratios(record)


def masked_ratios(record: dict) -> dict:
    """Return the cost of each mask as a multiple of the call without a mask."""
    times = {n: r["ms"] for n, r in record["contenders"].items() if "ms" in r}
    plain = times.pop("no mask", None)
    return {"ratio_to_unmasked": {n: ms / plain for n, ms in times.items()}} if plain else {}


def report(record: dict) -> None:
    case = record["case"]
    print(f"{case['name']} ({case['Nq']} x {case['Nd']}, Lq {case['Lq']}, Ld {case['Ld']}, d {case['d']}):", end=" ")
    if "dense_mean" in record:
        dense = record["dense_mean"]
        print(f"floor {record['floor_ms']:.4f} ms, dense {dense['Lq']} x {dense['Ld']}", end=" ")
        print(f"{dense['ms']:.4f} ms," if "ms" in dense else dense.get("failed", ""), end=" ")
        print(f"ratio {record.get('ratio_to_dense', float('nan')):.3f}")
    else:
        print({name: f"{ratio:.3f}" for name, ratio in record.get("ratio_to_unmasked", {}).items()})
    for name, r in record["contenders"].items():
        if "ms" in r:
            more = ", ".join(f"{k} {v:.3g}" for k, v in r.items() if k not in ("ms", "exact"))
            print(f"  {name:32} {r['ms']:8.4f} ms  {more}", flush=True)
        else:
            print(f"  {name:32} {'; '.join(f'{k}: {v}' for k, v in r.items())}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="timed calls per contender (default 30)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=150, help="start no row after this time (default 150)")
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/ragged.json)")
    args = parser.parse_args()
    start = time.monotonic()
    timer = gpu.Timer(args.rounds)
    settings: dict = {"rounds": args.rounds, "ceilings": gpu.ceilings(timer)}
    print(", ".join(f"{name} {value:.4g}" for name, value in settings["ceilings"].items()), flush=True)
    records: list[dict] = []
    path = args.out
    # Masks run first because they need little time and no peer.
    for case in (*MASKED, *CASES):
        if args.only not in case.name:
            continue
        torch.cuda.empty_cache()
        try:
            if time.monotonic() - start > args.seconds:
                raise TimeoutError("no time left")
            if isinstance(case, Case):
                records.append(measure(case, timer, settings["ceilings"], start + args.seconds))
            else:
                records.append(measure_masked(case, timer))
            report(records[-1])
        except Exception as failure:
            records.append({"case": asdict(case), "contenders": {}, "failed": gpu.reason(failure)})
            print(f"{case.name}: {gpu.reason(failure)}", flush=True)
        settings["seconds"] = time.monotonic() - start
        path = common.write("ragged", records, *dense_contenders.PEERS, path=args.out, **settings)
    print(f"{time.monotonic() - start:.0f} s; wrote {path}")


if __name__ == "__main__":
    main()
