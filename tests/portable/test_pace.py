"""Test the switch to one thread while other processes need the processors."""

import itertools
import sys
import threading

import pytest
import torch

import lik_ops
from lik_ops.portable import backend, blocks, pace

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts switches of Linux")
SEVERAL = 2


class Machine:
    """Simulated clock and thread counters that advance between two samples."""

    def __init__(self):
        self.now, self.seconds, self.switches = 1000.0, 0.0, 0
        self.each = 0.051, 0.05, 0  # increments of wall time, processor time, and context switches
        self.threads = []  # at each sample

    def is_busy(self, busy):
        self.each = (0.051, 0.025, 8) if busy else (0.051, 0.05, 0)

    def clock(self):
        return self.now

    def counters(self):
        return self.seconds, int(self.switches)

    def look(self, inner):
        wall, seconds, switches = self.each
        self.now, self.seconds, self.switches = self.now + wall, self.seconds + seconds, self.switches + switches
        inner()
        self.threads.append(torch.get_num_threads())


@pytest.fixture
def machine(monkeypatch):
    if pace._find_setters() is None:
        pytest.skip("threads cannot be set")
    found, inner, before = Machine(), pace.adjust_threads, torch.get_num_threads()
    torch.set_num_threads(SEVERAL)
    monkeypatch.setattr(pace, "_pace", pace._Pace())
    monkeypatch.setattr(pace, "perf_counter", found.clock)
    monkeypatch.setattr(pace, "_read_counters", found.counters)
    monkeypatch.setattr(blocks, "adjust_threads", lambda: found.look(inner))
    yield found
    assert torch.get_num_threads() == SEVERAL, "a call leaves the number of threads as it was"
    torch.set_num_threads(before)


@pace.limit_threads
def work(looks):
    for _ in blocks.split_range(0, looks, 1):
        pass


def test_busy_machine_switches_to_one_thread_and_back(machine):
    machine.is_busy(True)
    work(10)
    assert machine.threads == [SEVERAL] * 2 + [1] * 8
    assert torch.get_num_threads() == SEVERAL
    machine.threads.clear()
    machine.is_busy(False)
    work(30)
    assert machine.threads[:2] == [1] * 2 and machine.threads[-10:] == [SEVERAL] * 10


def test_pauses_become_longer_while_the_machine_is_busy(machine):
    machine.is_busy(True)
    work(4000)
    tries = [i for i in range(1, 4000) if machine.threads[i] != 1 and machine.threads[i - 1] == 1]
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps[:4] == sorted(gaps[:4]) and gaps[0] > 18 and max(gaps) < 165
    assert machine.threads.count(1) > 3900
    machine.is_busy(False)
    work(2000)
    assert pace._pace.pause == pace.FIRST_PAUSE_SECONDS


def test_a_calm_machine_keeps_all_threads(machine):
    work(500)
    for each in (
        (0.051, 0.05, 0.2),  # some switches, as on an idle machine
        (0.051, 0.05, 20),  # many switches, but the thread runs nearly all the time
        (0.051, 0.01, 0),  # the thread waits for a disk
    ):
        machine.each = each
        machine.now += 100  # a new window
        work(500)
    assert set(machine.threads) == {SEVERAL}


def test_long_waits_for_a_processor_switch_to_one_thread(machine):
    machine.each = 0.3, 0.03, 9  # one sample for each .3 s of wall time, in which the process ran .03 s
    work(3)
    assert machine.threads[-1] == 1


def test_short_calls_are_counted_together(machine):
    machine.is_busy(True)
    for _ in range(5):
        work(1)
    assert machine.threads[-1] == 1
    machine.now += 100
    machine.threads.clear()
    work(2)
    assert machine.threads == [SEVERAL] * 2, "what was counted long ago says nothing"


def test_one_thread_stays_one(machine):
    machine.is_busy(True)
    torch.set_num_threads(1)
    work(10)
    assert set(machine.threads) == {1} and torch.get_num_threads() == 1
    torch.set_num_threads(SEVERAL)


def test_error_in_a_call_restores_all_threads(machine):
    @pace.limit_threads
    def fails():
        work(10)
        assert torch.get_num_threads() == 1, "the outer call goes on with one"
        raise RuntimeError("stop")

    machine.is_busy(True)
    with pytest.raises(RuntimeError, match="stop"):
        fails()
    assert torch.get_num_threads() == SEVERAL


def test_other_threads_keep_their_thread_count(machine):
    """Test threads that already exist, and threads that start while a call uses one thread."""
    seen, go, done = [], threading.Event(), threading.Event()

    def count():
        seen.append(torch.get_num_threads())
        go.wait(30)
        seen.append(torch.get_num_threads())
        done.set()

    thread = threading.Thread(target=count)
    thread.start()

    @pace.limit_threads
    def call():
        work(10)
        assert torch.get_num_threads() == 1
        go.set()
        done.wait(30)
        new = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        new.start()
        new.join()

    machine.is_busy(True)
    call()
    thread.join()
    assert seen == [SEVERAL] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bits_do_not_change_with_the_number_of_threads(dtype, machine):
    Q, D = torch.randn(9, 32, 128).to(dtype), torch.randn(200, 90, 128).to(dtype)
    cu_seqlens = torch.arange(0, 18_001, 90)
    calls = {
        "dense": lambda: lik_ops.maxsim(Q, D),
        "argmax": lambda: lik_ops.maxsim_with_argmax(Q, D)[0],
        "packed": lambda: lik_ops.retrieve(Q, D.flatten(0, 1), 20, cu_seqlens_d=cu_seqlens)[0],
        "soft": lambda: lik_ops.maxsim_soft(Q, D[:40], 0.1),
    }
    for name, call in calls.items():
        machine.is_busy(False)
        machine.now += 1000
        machine.threads.clear()
        expected = call()
        assert set(machine.threads) == {SEVERAL}, name
        machine.each = 0.2, 0.1, 30  # busy, and judged at the second sample
        found = call()
        assert torch.equal(found, expected), name
        assert 1 in machine.threads, name


def test_backend_functions_are_wrapped_to_limit_threads():
    for name in ("forward", "forward_ragged", "forward_quantized", "forward_soft", "backward_unified", "code_scores"):
        assert hasattr(getattr(backend, name), "__wrapped__"), name
