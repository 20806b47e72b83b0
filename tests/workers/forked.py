"""Processes of `torch.distributed` on one machine, forked: to import torch takes longer than most of what they do."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import traceback
from collections.abc import Callable

import torch

import lik_ops  # noqa: F401


def import_now(*modules: str) -> None:
    """What first calls import, and `modules`, before there are processes that would each import them."""
    Q, D = torch.randn(2, 3, 8, requires_grad=True), torch.randn(3, 4, 8)
    torch.ops.lik.maxsim_fwd(Q, D, None, None, None, False, torch.int32, "auto")[0].sum().backward()
    for name in modules:
        importlib.import_module(name)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(call: Callable[[], None], **environment: object) -> int:
    """The id of a process that makes a call; its status is not 0 where that raises."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.environ.update({name: str(value) for name, value in environment.items()})
        status = 1
        try:
            call()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return pid


def run(processes: int, call: Callable[[], None]) -> None:
    """A call in each of several processes, which find in their environment what torchrun would have put there."""
    common = {"WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    pids = [start(call, RANK=rank, LOCAL_RANK=rank, **common) for rank in range(processes)]
    found = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert not any(found), f"the ranks ended with {found}"
