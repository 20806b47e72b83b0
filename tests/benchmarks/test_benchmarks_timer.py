"""Test how the GPU timer distributes its calls, with a device that counts them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the GPU benchmarks import triton")

from benchmarks.support import gpu


class FakeEvent:
    """An event of a device whose clock is the number of calls."""

    def __init__(self, **options):
        self.at = 0

    def record(self):
        self.at = len(FakeEvent.calls)

    def elapsed_time(self, other):
        return other.at - self.at


def test_a_slow_function_gets_fewer_timed_calls_than_a_fast_one(monkeypatch):
    FakeEvent.calls = []
    slept = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timer = gpu.Timer.__new__(gpu.Timer)
    timer.rounds, timer.buffer = 50, None
    flushes = []
    monkeypatch.setattr(gpu.Timer, "read", lambda self, x: flushes.append(x))
    looks = {"fast": (900, 0.01), "slow": (3, 20.0)}
    monkeypatch.setattr(gpu.Timer, "looked_at", staticmethod(lambda function, seconds: looks[function()]))
    functions = {name: lambda name=name: (FakeEvent.calls.append(name), name)[1] for name in looks}
    samples = timer.samples(functions, 0.3)
    assert {name: len(ms) for name, ms in samples.items()} == {"fast": 50, "slow": 3}
    assert len(flushes) == 53 and set(samples["fast"]) == {1}
    assert FakeEvent.calls[2:8] == ["fast", "slow"] * 3  # after both were looked at
    assert sorted({*slept}) == [gpu.AHEAD_MS[0] * gpu.CYCLES_PER_MS, gpu.AHEAD_MS[1] * gpu.CYCLES_PER_MS]
    assert len(timer.samples(functions, 0.3, flush=False)["fast"]) == 50 and len(flushes) == 53
    assert FakeEvent.calls[-3:] == ["slow"] * 3  # warm calls follow calls of the same function


def test_spreads_are_medians_with_quartiles():
    assert gpu.spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "n": 5}
    assert gpu.spread([7.0]) == {"median": 7.0, "q1": 7.0, "q3": 7.0, "n": 1}
