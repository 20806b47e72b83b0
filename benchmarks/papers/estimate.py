"""Estimates of the memory and the time of a measurement on an H100 or H200, for planning only."""

from __future__ import annotations

from . import others, plan
from .problem import is_peer

OPERATIONS_PER_SECOND = {"ours": 5e14, "peer": 3.5e14, "eager": 1.2e14, "TF32": 9e13, "fp32": 2.5e13}
BYTES_PER_SECOND = 2.5e12
DRAW_BYTES_PER_SECOND = 4e10
HOST_BYTES_PER_SECOND = 8e9
UNIT_SECONDS, CONTENDER_SECONDS, TUNING_SECONDS = 0.5, 0.15, 0.8
COMPILE_SECONDS = {plan.COMPILED_MAX: 9.0, plan.COMPILED_NO_GRAPHS: 9.0}
OTHER_COMPILE_SECONDS = 5.0
DEVICE_BYTES = 79e9
BLOCK_BYTES = 6 * 10**9
STREAMED_CALLS = 4
CALL_OVERHEAD_SECONDS = 0.8e-3  # the device idles, and the cache is flushed
FIRST_CALLS = 7  # the first call, the check, the peak, and the warm-up
FIXED_SECONDS = {"residual": 25.0, "parity": 225.0, "correctness": 0.5}
SCALE = {"step": 3.5, "backward": 2.5, "training forward": 1.2}
MATERIALIZED = (plan.EAGER, "compiled", plan.DEQUANTIZED, plan.PADDED_FP32)


def input_bytes(spec: plan.Spec) -> int:
    case = spec.case
    if spec.kind == "head":
        return 2 * spec.number("width") * case.Nd * case.Ld
    if spec.kind == "analytic":
        return 0  # by formula
    return case.itemsize * case.d * (case.Nq * case.Lq + case.documents * case.Ld)


def peak_bytes(spec: plan.Spec, name: str) -> int:
    """Return the bytes of a contender beyond the inputs."""
    case = spec.case
    trains = "step" in spec.parts or "backward" in spec.parts
    if not name.startswith(MATERIALIZED):
        return (3 if trains else 0) * input_bytes(spec) if spec.kind != "analytic" else 0
    is_fp32 = "fp32" in name or "TF32" in name or name == plan.DEQUANTIZED
    one = case.operations // (2 * case.d) * (4 if is_fp32 else case.itemsize)
    if spec.kind == "chamfer":
        one = 4 * case.Ld**2
    if name == plan.CHUNKED:
        one = one * 1024 // max(1024, case.Nd)
    if name in (plan.CHECKPOINTED, plan.MINI_BATCHES, plan.COMPILED_MINI):
        one = one * 32 // max(32, case.Nq)
    return one * (3 if trains else 1) + (2 * input_bytes(spec) if is_fp32 else 0)


def memory_bytes(spec: plan.Spec, names: tuple[str, ...] | None = None) -> int:
    """Return the device bytes of the measurement: inputs and the largest contender."""
    names = spec.contenders if names is None else names
    if spec.kind == "streamed":
        return BLOCK_BYTES
    return input_bytes(spec) + max((peak_bytes(spec, name) for name in names), default=0)


def call_seconds(spec: plan.Spec, name: str, part: str) -> float:
    """Return the seconds of one call."""
    case = spec.case
    kinds = {plan.OURS: "ours", "TF32": "TF32", "fp32": "fp32"}
    kind = "peer" if is_peer(name) else next((kind for text, kind in kinds.items() if text in name), "eager")
    operations = case.operations
    if spec.kind == "chamfer":
        operations = 40 * case.Ld**2 * max(case.d // 8, 4)
    work = operations / OPERATIONS_PER_SECOND[kind]
    moved = (input_bytes(spec) + 2 * peak_bytes(spec, name)) / BYTES_PER_SECOND
    return SCALE.get(part, 1.0) * max(work, moved) + 2e-5


def fits(spec: plan.Spec, name: str) -> bool:
    """Return whether a contender fits into the device, and into the memory that the row allows."""
    return input_bytes(spec) + peak_bytes(spec, name) < (spec.limit_bytes or DEVICE_BYTES)


def seconds(spec: plan.Spec, names: tuple[str, ...], rounds: int = 50, budget: float = 0.3) -> float:
    """Return the seconds of the measurement, with kernels of the peers that are compiled already."""
    if spec.kind == "analytic":
        return 0.0
    if spec.kind == "streamed":
        copies = 1 + STREAMED_CALLS * len(names)
        is_run = others.HOST_MARGIN * input_bytes(spec) < others.host_bytes()
        return copies * input_bytes(spec) / HOST_BYTES_PER_SECOND if is_run else 1
    total = FIXED_SECONDS.get(spec.kind, UNIT_SECONDS) + input_bytes(spec) / DRAW_BYTES_PER_SECOND
    for name in (name for name in names if fits(spec, name)):
        total += CONTENDER_SECONDS + (TUNING_SECONDS if is_peer(name) else 0)
        if name.startswith("compiled"):
            total += COMPILE_SECONDS.get(name, OTHER_COMPILE_SECONDS)
        for part in spec.parts if spec.kind not in FIXED_SECONDS else ():
            once = call_seconds(spec, name, part)
            calls = min(rounds, max(3, budget / once))
            total += FIRST_CALLS * once + len(spec.clocks) * calls * (once + CALL_OVERHEAD_SECONDS)
    return total


COLD_SECONDS = 4.0  # the kernels of one peer for one tuning key
COLD_LONG_SECONDS = 100.0  # flash-maxsim unrolls long queries when it saves the argmax


def tuning_key(spec: plan.Spec) -> tuple:
    """Return what the peers compile and tune for. Equal keys share compiled kernels."""
    case = spec.case
    trains = not {"step", "backward", "training forward"}.isdisjoint(spec.parts) or spec.kind == "parity"
    length = case.Lq if trains or case.Lq <= 128 else 128
    # Triton compiles separately for arguments of 1 and for multiples of 16.
    sizes = tuple("one" if n == 1 else n % 16 == 0 for n in (case.Nq, case.Nd, case.Ld))
    return spec.kind, trains, length, case.d, case.dtype, case.normalize, case.candidates, sizes


def has_long_argmax(spec: plan.Spec) -> bool:
    """Return whether flash-maxsim compiles for minutes."""
    is_dense = spec.kind in ("dense", "parity")
    return (
        is_dense
        and tuning_key(spec)[1]
        and spec.case.Lq > 512
        and any(name.startswith(plan.FLASH) for name in spec.contenders)
    )
