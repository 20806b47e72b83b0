"""What the GPU benchmarks share: times on the device, ceilings of the machine, limits on what a contender may take."""

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
AHEAD_MS = 0.5, 30.0  # at least, at most
CYCLES_PER_MS = 2_000_000


@triton.jit
def _read(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x + offsets, mask=offsets < n, other=0))
    if total == 123456789:  # keeps the loads; hardly ever true
        tl.store(out, total)


@triton.jit
def _empty(out):
    pass


class Timer:
    """Times of single calls on the device, each on an L2 cache flushed by reading.

    A flush that writes leaves dirty lines, whose write-back the next call pays. Before the flush the device idles for
    thrice as long as the host takes for the slowest of the calls, within `AHEAD_MS`: the host has queued the whole call
    when it begins, and launches are not part of its time.
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
        """After two calls to warm up: how many fit in two seconds, at least five; the host's milliseconds of one."""
        function(), function()
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        queued = time.perf_counter() - start
        torch.cuda.synchronize()
        return max(5, int(2 / (time.perf_counter() - start))), queued * 1e3

    def compare(self, functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Median milliseconds of each function, in rounds that call each of them once: what the clock of the device
        does meets them alike."""
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
            torch.cuda.synchronize()  # else the host, ahead by whole rounds, queues allocations of all of them
        return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}

    def __call__(self, function: Callable[[], object]) -> float:
        """Median milliseconds."""
        return self.compare({"": function})[""]


def ceilings(timer: Timer) -> dict[str, float]:
    """What this machine does at best, a bf16 matrix product and a read of 4 GiB; and the time of an empty kernel."""
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
    """Out of the reach of `except Exception`, with which compilers catch what one of their choices does."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TooSlowError` in the main thread once `seconds` have passed, at the next step of Python code."""

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
    """Wait for the GPU; where there is none, scripts that only see that they work have nothing to wait for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def first_call(function: Callable[[], object], seconds: float) -> tuple[object, float]:
    """The result of a call that may compile and tune, and the seconds that it took."""
    start = time.perf_counter()
    with time_limit(seconds):
        result = function()
        synchronize()
    return result, time.perf_counter() - start


def peak_bytes(function: Callable[[], object]) -> int:
    """Device memory that a call takes beyond what is there, its results included."""
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
    """Time of a call on the host, which does not wait for the device."""
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
