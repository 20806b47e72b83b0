"""Shared code of the GPU benchmarks: device times, machine ceilings, and limits for slow contenders."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

FLUSH_BYTES = 512 * 2**20
AHEAD_MS = 0.5, 30.0  # minimum, maximum
CYCLES_PER_MS = 2_000_000


@triton.jit
def _read(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x + offsets, mask=offsets < n, other=0))
    if total == 123456789:  # keeps the loads, and is hardly ever true
        tl.store(out, total)


@triton.jit
def _empty(out):
    pass


class Timer:
    """Measures single calls on the device, each on an L2 cache flushed by reading.

    A flush that writes would leave dirty lines, and the next call would pay for their write-back. Before the flush,
    the device idles for three times the host time of the slowest call, within `AHEAD_MS`. The host has then queued the
    whole call when it starts, so launches are not part of its time.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.buffer = torch.randint(0, 7, (FLUSH_BYTES // 4,), dtype=torch.int32, device="cuda")
        self.out = torch.zeros(1, dtype=torch.int32, device="cuda")

    def read(self, x: Tensor) -> None:
        _read[(triton.cdiv(x.numel(), 8192),)](x, self.out, x.numel(), BLOCK=8192, num_warps=8)

    def empty(self) -> None:
        _empty[(1,)](self.out)

    @staticmethod
    def looked_at(function: Callable[[], object]) -> tuple[int, float]:
        """Warm up with two calls and time a third.

        Returns:
            The number of calls that fit in two seconds, at least five, and the host milliseconds of one call.
        """
        function(), function()
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        queued = time.perf_counter() - start
        torch.cuda.synchronize()
        return max(5, int(2 / (time.perf_counter() - start))), queued * 1e3

    def compare(self, functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Return the median milliseconds of each function.

        Each round calls every function once, so that changes of the device clock affect all of them.
        """
        looks = [self.looked_at(function) for function in functions.values()]
        rounds = min([self.rounds, *(rounds for rounds, _ in looks)])
        least, most = AHEAD_MS
        ahead = min(max([least, *(3 * host_ms for _, host_ms in looks)]), most)
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in functions}
        for _ in range(rounds):
            for name, function in functions.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(int(ahead * CYCLES_PER_MS))
                self.read(self.buffer)
                start.record()
                function()
                end.record()
                events[name].append((start, end))
            torch.cuda.synchronize()  # else the host runs whole rounds ahead and queues their allocations
        return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}

    def __call__(self, function: Callable[[], object]) -> float:
        """Return the median milliseconds of one function."""
        return self.compare({"": function})[""]


def ceilings(timer: Timer) -> dict[str, float]:
    """Measure this machine's limits: a bf16 matrix product, a read of 4 GiB and an empty kernel."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = timer(lambda: a @ b)
    big = torch.randint(0, 7, (2**30,), dtype=torch.int32, device="cuda")
    read = timer(lambda: timer.read(big))
    return {
        "tflops": 2 * 8192**3 / matmul / 1e9,
        "gbs": big.numel() * 4 / read / 1e6,
        "empty_ms": timer(timer.empty),
    }


class TooSlowError(BaseException):
    """Raised if a contender exceeds its time limit.

    It does not derive from `Exception`, because compilers catch `Exception` while they try choices.
    """


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TooSlowError` in the main thread after `seconds`, at the next step of Python code."""

    def stop(signum: int, frame: object) -> None:
        raise TooSlowError(f"not ready within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def synchronize() -> None:
    """Wait for the GPU, or return at once without one, for runs that only check a script."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def first_call(function: Callable[[], object], seconds: float) -> tuple[object, float]:
    """Return the result and the seconds of a call that may compile and tune."""
    start = time.perf_counter()
    with time_limit(seconds):
        result = function()
        synchronize()
    return result, time.perf_counter() - start


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the peak device memory of a call beyond existing memory, including its results."""
    if not torch.cuda.is_available():
        return 0
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def host_microseconds(function: Callable[[], object], rounds: int) -> float:
    """Return the host time of a call, without waiting for the device."""
    for _ in range(5):
        function()
    synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        function()
    elapsed = time.perf_counter() - start
    synchronize()
    return elapsed / rounds * 1e6


def reason(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
