"""Use one thread instead of several while other processes need the processors.

An OpenMP thread that waits for the other threads of its team spins for milliseconds. If another process has the
processor of one of them, the whole team spins until that thread runs again. The scheduler charges the team for the time
that it spun. Work in steps of a millisecond, as in this backend, was then 5 to 12 times slower with two threads than
with one. The variable that forbids spinning (OMP_WAIT_POLICY=passive) is read when torch is imported, which is too
early.

A machine is busy if the calling thread runs for much less than the time that passes, and often loses its processor. The
kernel counts both. A thread that waits for a disk runs little, but it gives its processor away itself. The call then
continues with one thread for a while and tries several threads again later. Other threads of the process keep their
number of threads, because both settings belong to the calling thread. Scores have the same bits with any number of
threads.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from functools import lru_cache, wraps
from pathlib import Path
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

import torch

if sys.platform == "linux":
    from resource import RUSAGE_THREAD, getrusage

_P = ParamSpec("_P")
_R = TypeVar("_R")

SAMPLE_SECONDS = 0.002  # between two readings of the counters, which cost 4 us each
WINDOW_SECONDS = 0.1  # over which the counters are compared
STALE_SECONDS = 0.1  # a call so long after the last reading begins a new window
# Measured on 2 cores: a search with two threads ran for .99 of the time on an idle machine and lost its processor 3
# times per second. Next to two busy processes it ran for .49 of the time and lost its processor 250 times per second
# of processor time, after each time slice of 3 to 4 ms.
MAX_RUNNING_SHARE = 0.85  # share of the time for which a thread runs on a busy machine
MAX_SWITCHES_PER_SECOND = 100  # per second of processor time
MIN_SWITCHES = 5  # in a window
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 8.0  # with one thread; doubled each time the machine is still busy


@lru_cache(maxsize=1)
def _find_setters() -> list[Callable[[int], Any]] | None:
    """Return functions that set the threads of the calling thread alone, in OpenMP and MKL; None if there are none."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        setters: list[Callable[[int], Any]] = [library.omp_set_num_threads]
    except (OSError, AttributeError):
        return None
    try:
        setters.append(library.MKL_Set_Num_Threads_Local)
    except AttributeError:
        if torch.backends.mkl.is_available():
            return None
    return setters


def _read_counters() -> tuple[float, int]:
    """Return the processor time of this thread in seconds, and how often it lost its processor."""
    usage = getrusage(RUSAGE_THREAD)
    return usage.ru_utime + usage.ru_stime, usage.ru_nivcsw


class _Pace(threading.local):
    """The number of threads that the calls of one thread use."""

    def __init__(self) -> None:
        self.depth = 0  # nesting of calls
        self.threads = 1  # number of threads outside of calls
        self.is_single = False
        self.next_look = self.last_look = self.until = 0.0
        self.pause = FIRST_PAUSE_SECONDS
        self.window = 0.0  # when the window began
        self.before: tuple[float, int] | None = None  # the counters at that time

    def enter(self) -> None:
        """Begin a call, with one thread if the machine was busy."""
        self.depth += 1
        if self.depth == 1:
            self.threads, now = torch.get_num_threads(), perf_counter()
            if now - self.last_look > STALE_SECONDS:
                self.before = None
            if self.threads > 1 and now < self.until:
                self._use_one()

    def leave(self) -> None:
        """End a call and restore the number of threads."""
        self.depth -= 1
        if self.depth == 0 and self.is_single:
            self._use_all()

    def look(self) -> None:
        """Change the number of threads if a sample is due and the machine became busy or calm."""
        if self.depth == 0 or self.threads < 2:
            return
        now = perf_counter()
        if now < self.next_look:
            return
        self.next_look = now + SAMPLE_SECONDS
        if self.is_single:
            if now >= self.until:
                self._use_all()
            return
        counters, self.last_look = _read_counters(), now
        passed = now - self.window
        if self.before is not None and passed < WINDOW_SECONDS:
            return
        before, self.before, self.window = self.before, counters, now
        if before is None:
            return
        seconds, switches = (x - y for x, y in zip(counters, before, strict=True))
        if seconds > MAX_RUNNING_SHARE * passed or switches < max(MIN_SWITCHES, MAX_SWITCHES_PER_SECOND * seconds):
            self.pause = FIRST_PAUSE_SECONDS
            return
        self.until = now + self.pause
        self.pause = min(2 * self.pause, MAX_PAUSE_SECONDS)
        self._use_one()

    def _use_one(self) -> None:
        """Switch to one thread."""
        if (setters := _find_setters()) is None:
            return
        for setter in setters:
            setter(1)
        self.is_single = True

    def _use_all(self) -> None:
        """Restore the number of threads from before the call."""
        setters = _find_setters()
        assert setters is not None
        setters[0](self.threads)
        for setter in setters[1:]:
            setter(0)  # MKL: the number of the process
        self.is_single, self.before = False, None


_pace = _Pace()


def adjust_threads() -> None:
    """Switch the current call to one thread, or back to several, if the machine became busy or calm; cheap to call."""
    _pace.look()


def limit_threads(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a function such that it uses one thread while the machine is busy; Linux only."""
    if sys.platform != "linux":
        return function

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        _pace.enter()
        try:
            return function(*args, **kwargs)
        finally:
            _pace.leave()

    return call
