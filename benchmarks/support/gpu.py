"""Shared code of the GPU benchmarks: device times, machine ceilings, and limits for slow contenders."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    def looked_at(function: Callable[[], object], seconds: float = 2) -> tuple[int, float]:
        """Warm up with two calls and time a third.

        Returns:
            The number of calls that fit in `seconds`, and the host milliseconds of one call. The number is at least
            five, or three if one call takes longer than `seconds`.
        """
        function(), function()
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        queued = time.perf_counter() - start
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        return max(5 if elapsed < seconds else 3, int(seconds / elapsed)), queued * 1e3

    def compare(self, functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Return the median milliseconds of each function.

        Each round calls every function once, so that changes of the device clock affect all of them.
        """
        looks = {name: self.looked_at(function) for name, function in functions.items()}
        rounds = min([self.rounds, *(rounds for rounds, _ in looks.values())])
        slowest = max((host_ms for _, host_ms in looks.values()), default=0.0)
        times = self._timed(functions, {name: (rounds, slowest) for name in functions})
        return {name: statistics.median(each) for name, each in times.items()}

    def samples(
        self, functions: Mapping[str, Callable[[], object]], seconds: float, flush: bool = True
    ) -> dict[str, list[float]]:
        """Return the milliseconds of every timed call of each function.

        Unlike in `compare`, a slow function gets fewer calls than a fast one: as many as fit in `seconds`, up to
        `rounds`. Without `flush`, each call finds what the call before left in the L2 cache, which is a call of the
        same function.
        """
        looks = {name: self.looked_at(function, seconds) for name, function in functions.items()}
        plans = {name: (min(self.rounds, rounds), host_ms) for name, (rounds, host_ms) in looks.items()}
        if flush:
            return self._timed(functions, plans)
        return {name: self._timed({name: f}, plans, flush=False)[name] for name, f in functions.items()}

    def _timed(
        self, functions: Mapping[str, Callable[[], object]], plans: Mapping[str, tuple[int, float]], flush: bool = True
    ) -> dict[str, list[float]]:
        """Return the milliseconds of each call. `plans` has the rounds and the host milliseconds of each function."""
        least, most = AHEAD_MS
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in functions}
        for n in range(max((plans[name][0] for name in functions), default=0)):
            for name, function in functions.items():
                rounds, host_ms = plans[name]
                if n >= rounds:
                    continue
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(int(min(max(least, 3 * host_ms), most) * CYCLES_PER_MS))
                if flush:
                    self.read(self.buffer)
                start.record()
                function()
                end.record()
                events[name].append((start, end))
            torch.cuda.synchronize()  # else the host runs whole rounds ahead and queues their allocations
        return {name: [a.elapsed_time(b) for a, b in pairs] for name, pairs in events.items()}

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


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Return the median, both quartiles and the number of samples."""
    if len(samples) < 2:
        return {"median": samples[0], "q1": samples[0], "q3": samples[0], "n": 1}
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "n": len(samples)}


def reason(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
