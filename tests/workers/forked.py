"""Forked processes of `torch.distributed` on one machine, because importing torch costs more than their work."""

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
    """Import modules of first calls, and `modules`, once before the fork instead of once per process."""
    Q, D = torch.randn(2, 3, 8, requires_grad=True), torch.randn(3, 4, 8)
    torch.ops.lik.maxsim_fwd(Q, D, None, None, None, False, torch.int32, "auto")[0].sum().backward()
    for name in modules:
        importlib.import_module(name)


def free_port() -> int:
    """Return a free TCP port of this machine."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(call: Callable[[], None], **environment: object) -> int:
    """Start a process that runs a call, and return its id. The exit status is nonzero if the call raises."""
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
    """Run a call in several processes with the environment variables of torchrun."""
    common = {"WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    pids = [start(call, RANK=rank, LOCAL_RANK=rank, **common) for rank in range(processes)]
    found = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert not any(found), f"the ranks ended with {found}"
