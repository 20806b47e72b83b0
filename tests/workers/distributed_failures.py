"""Run process groups that lose one process, and print one line for each kind of loss.

Run ``python -m tests.workers.distributed_failures``.

Processes are forked, because importing torch would cost more than the failures. The lost process ends or sleeps where
it would search or send. The others must raise soon after its end, or after the group's timeout.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lik_ops import distributed
from lik_ops.distributed import ring as _ring
from lik_ops.retrieval import _retrieve

from . import forked

WORLD, LOST = 3, 1
TIMEOUT = 2.0  # seconds, of the group
MOST = 10.0


def end() -> None:
    """End the process without cleanup."""
    os._exit(7)


def sleep() -> None:
    """Sleep longer than the timeout."""
    time.sleep(60)


def lose_at(module: object, name: str, lose: Callable[[], None], calls: int = 0) -> None:
    """Replace a function of this process by one that calls `lose` in its call number `calls`."""
    function, seen = getattr(module, name), [0]

    def lost(*args, **kwargs):
        if seen[0] == calls:
            lose()
        seen[0] += 1
        return function(*args, **kwargs)

    setattr(module, name, lost)


def retrieve() -> None:
    """Search random documents on all ranks."""
    distributed.retrieve(torch.randn(2, 3, 8), torch.randn(30, 4, 8), 5)


def inbatch() -> None:
    """Run a forward and backward of in-batch scores on all ranks."""
    Q, D = torch.randn(2, 3, 8, requires_grad=True), torch.randn(3, 4, 8, requires_grad=True)
    distributed.maxsim_inbatch(Q, D).sum().backward()


CASES: dict[str, tuple[Callable[[], None], object, str, int]] = {
    "retrieve": (retrieve, _retrieve, "of_source", 0),
    "forward": (inbatch, _ring.ProcessRing, "shift", 1),
    "backward": (inbatch, _ring.ProcessRing, "shift", WORLD),
}


def run(rank: int, store: str, case: str, lose: Callable[[], None]) -> None:
    """Run one process, which must raise in time."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=TIMEOUT)
    )
    call, module, name, calls = CASES[case]
    if rank == LOST:
        lose_at(module, name, lose, calls)
    start = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        seconds = time.monotonic() - start
        print(f"  rank {rank} after {seconds:.1f} s: {str(error).splitlines()[0][:120]}", flush=True)
        assert seconds < MOST
    else:
        raise AssertionError(f"rank {rank}: expected an error")


def main() -> None:
    torch.set_num_threads(1)
    forked.import_now()
    with tempfile.TemporaryDirectory() as directory:
        started = {}
        for lose in (end, sleep):
            for case in CASES:
                store = f"{directory}/{case}-{lose.__name__}"
                started[case, lose.__name__] = [
                    forked.start(partial(run, rank, store, case, lose)) for rank in range(WORLD)
                ]
        for (case, how), pids in started.items():
            found = {rank: os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1]) for rank in (0, 2)}
            os.kill(pids[LOST], signal.SIGKILL)
            os.waitpid(pids[LOST], 0)
            assert found == {0: 0, 2: 0}, (case, how, found)
            print(f"{case} {how} ended", flush=True)


if __name__ == "__main__":
    main()
