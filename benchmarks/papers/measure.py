"""The measurement of one spec: check each contender, then its memory and its times."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import torch

from ..retrieval import retrieve
from ..support import contenders, gpu
from . import dense, estimate, others, plan, stored
from .problem import PaperContender, Problem

KINDS: dict[str, type[Problem]] = {
    "dense": dense.Dense,
    "quantized": stored.QuantizedDocuments,
    "residual": stored.ResidualDocuments,
    "ragged": stored.RaggedDocuments,
    "head": others.Heads,
    "chamfer": others.PointClouds,
    "streamed": others.HostCorpus,
    "correctness": others.Correctness,
    "parity": others.LossParity,
    "analytic": others.Formulas,
}
FIRST_CALL_SECONDS, LONG_CALL_SECONDS, COMPILE_SECONDS = 40, 200, 60
BUDGET_SECONDS = 0.3  # of timed calls of one contender
OUT_OF_MEMORY = "out of memory"


PEER_PARTS = (
    *(f"late_interaction_kernels.{part}" for part in ("forward", "fp8", "fused_head", "plaid", "varlen")),
    *(f"flash_maxsim.flash_{part}" for part in ("chamfer", "chamfer_invgrid", "maxsim", "maxsim_batched_train")),
    *(f"flash_maxsim.flash_maxsim_{part}" for part in ("exp", "quant", "splitd", "varlen")),
)


def import_peers() -> None:
    """Import all modules with kernels of the peers, so that their tuning can be forgotten before each row."""
    for part in PEER_PARTS:
        with suppress(ImportError):
            importlib.import_module(part)


class BrokenDeviceError(RuntimeError):
    """Raised if the device does not work after a contender, so that this process cannot go on."""


def is_broken() -> bool:
    """Return whether an earlier error left the CUDA context unusable."""
    try:
        gpu.synchronize()
    except RuntimeError:
        return True
    return False


@contextmanager
def memory_limit(limit_bytes: int, device: str) -> Iterator[None]:
    """Let this process allocate no more device memory than `limit_bytes`, if it is not 0."""
    if not limit_bytes or device != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    held = gpu.FLUSH_BYTES  # of the timer
    torch.cuda.set_per_process_memory_fraction(min(1.0, (limit_bytes + held) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def limit_of(spec: plan.Spec, name: str) -> float:
    """Return the seconds that the first call of a contender may take."""
    if name.startswith("compiled"):
        return COMPILE_SECONDS
    long = spec.kind in ("residual", "parity", "streamed") or (
        name.startswith(plan.FLASH) and estimate.has_long_argmax(spec)
    )
    return LONG_CALL_SECONDS if long else FIRST_CALL_SECONDS


def failure_of(failure: BaseException) -> dict[str, Any]:
    if isinstance(failure, torch.OutOfMemoryError):
        return {"failed": OUT_OF_MEMORY}
    return {"failed": gpu.reason(failure)}


def prepare(problem: Problem, name: str, warm: bool = False) -> tuple[PaperContender | None, dict[str, Any]]:
    """Compile a contender, check it and measure its memory.

    Returns:
        The contender, or None if it cannot be timed, and its record.
    """
    try:
        start = time.perf_counter()
        with gpu.time_limit(limit_of(problem.spec, name)):
            made = problem.contender(name)
            if isinstance(made, str):
                return None, {"skipped": made}
            for make in made.parts.values():
                make()()
            gpu.synchronize()
        entry: dict[str, Any] = {"first_s": time.perf_counter() - start, "values": dict(made.values)}
        if warm:
            return made, entry
        errors = made.check()
        worst = max((e for key, e in errors.items() if key.startswith("error")), default=0.0)
        if not worst < made.tolerance and not math.isinf(made.tolerance):
            return None, {"failed": f"wrong: relative error {worst:.1e}", "errors": errors}
        entry["errors"] = {key: e for key, e in errors.items() if key.startswith("error")}
        entry["values"] |= {key: e for key, e in errors.items() if not key.startswith("error")}
        entry["held_mb"] = made.held_bytes / 2**20
        for part, make in made.parts.items():
            entry["values"][f"{part} peak"] = gpu.peak_bytes(make()) / 2**20
        return made, entry
    except (Exception, gpu.TooSlowError) as failure:
        found = failure_of(failure)
    if torch.cuda.is_available() and not is_broken():
        torch.cuda.empty_cache()
    return None, found


Samples = Callable[[Mapping[str, Callable[[], object]], str], dict[str, list[float]]]


def sampler(timer: gpu.Timer | None, rounds: int) -> Samples:
    """Return the function that times calls by a clock. Without a timer, all clocks are the wall clock."""

    def sample(calls: Mapping[str, Callable[[], object]], clock: str) -> dict[str, list[float]]:
        if timer is None or clock == "wall":
            for call in calls.values():
                call()
            return retrieve.compare(calls, rounds, BUDGET_SECONDS * len(calls))
        return timer.samples(calls, BUDGET_SECONDS, flush=clock == "cold")

    return sample


def time_part(
    ready: Mapping[str, PaperContender], part: str, clock: str, sample: Samples, entries: dict[str, dict]
) -> None:
    """Add the times of a part to the records of its contenders. If memory is short, they are timed one at a time."""
    names = [name for name, made in ready.items() if part in made.parts]
    groups = [names, *([name] for name in names)]
    for group in groups:
        missing = [name for name in group if f"{part} {clock}" not in entries[name]["values"]]
        if not missing:
            continue
        try:
            calls = {name: ready[name].parts[part]() for name in missing}
            for name, ms in sample(calls, clock).items():
                entries[name]["values"][f"{part} {clock}"] = gpu.spread(ms)
        except (Exception, gpu.TooSlowError) as failure:
            if len(group) == 1 or len(names) == 1:
                entries[group[0]] |= failure_of(failure)
        calls = {}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure(
    spec: plan.Spec, names: tuple[str, ...], timer: gpu.Timer | None, rounds: int, device: str, warm: bool = False
) -> dict[str, Any]:
    """Return the record of a spec for the contenders in `names`.

    Raises:
        BrokenDeviceError: a contender left the device unusable. The record so far is the second argument.
    """
    start = time.monotonic()
    record: dict[str, Any] = {"case": asdict(spec.case), "kind": spec.kind, "contenders": {}}
    entries = record["contenders"]
    if device == "cuda":
        import_peers()
        contenders.forget_tuning()
    with memory_limit(spec.limit_bytes, device):
        try:
            problem = KINDS[spec.kind](spec, device)
        except Exception as failure:
            return {**record, **failure_of(failure), "seconds": time.monotonic() - start}
        ready = {}
        for name in names:
            made, entries[name] = prepare(problem, name, warm)
            if "failed" in entries[name] and is_broken():
                raise BrokenDeviceError(name, record)
            if made is not None:
                ready[name] = made
        sample = sampler(timer, rounds)
        for part in () if warm else spec.parts:
            for clock in spec.clocks:
                time_part(ready, part, clock, sample, entries)
        if is_broken():
            raise BrokenDeviceError("", record)
    return {**record, "seconds": time.monotonic() - start}
