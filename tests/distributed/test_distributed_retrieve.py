"""Test that several processes retrieve and train like one process, and how they handle the loss of a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lik_ops
from lik_ops.distributed import agreement as _agreement

from ..workers.distributed_retrieve import CHECKS

pytest.importorskip("safetensors", reason='pip install ".[retrieval]"')
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
ROOT = Path(__file__).resolve().parents[2]


def run(command, devices):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if not devices:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", *command]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-6000:]
    return found.stdout


def check(command, backend, path, *groups):
    out = run(
        [*command, "tests.workers.distributed_retrieve", backend, str(path), *map(str, groups)], "nccl" in backend
    )
    for processes in groups or (2,):
        for name in CHECKS:
            for rank in range(processes):
                assert f"{name} {rank} of {processes} agrees" in out


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gloo(processes, tmp_path):
    check((), "gloo", tmp_path, processes)


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl(backend, tmp_path):
    check(("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"), backend, tmp_path)


def calls(group):
    """Yield a call of every function of `lik_ops.distributed` from one process."""
    Q, D = torch.randn(2, 3, 8), torch.randn(4, 5, 8)
    yield "retrieve", lambda: lik_ops.distributed.retrieve(Q, D, 2, group)
    yield "maxsim_inbatch", lambda: lik_ops.distributed.maxsim_inbatch(Q, D, group=group)
    yield "maxsim_cross_entropy", lambda: lik_ops.distributed.maxsim_cross_entropy(Q, D, group=group)


def test_invalid_process_group_raises():
    outside = torch.distributed.GroupMember.NON_GROUP_MEMBER
    for group, error, message in (
        (None, RuntimeError, r"call torch\.distributed\.init_process_group\(\) first"),
        (outside, ValueError, "group: expected a group that this process belongs to"),
        ("gloo", TypeError, "group: expected a ProcessGroup or None, got str"),
    ):
        for name, call in calls(group):
            with pytest.raises(error, match=rf"^distributed\.{name}: {message}"):
                call()


class Group:
    """Placeholder for a process group."""


@pytest.mark.parametrize(
    ("config", "first", "alike", "mixed"),
    [
        ("cpu:gloo,cuda:gloo", "cpu", ("cpu", "cpu"), ("cpu", "cpu")),
        ("cpu:gloo", "cpu", ("cpu", "cpu"), ("cpu", "cpu")),
        ("cuda:nccl", "cuda:1", ("cuda:1", "cuda:0"), ("cuda:1", "cuda:0")),
        ("cpu:gloo,cuda:nccl", "cpu", ("cpu", "cuda:0"), ("cpu", "cpu")),
    ],
)
def test_choose_wire_device_for_each_backend(config, first, alike, mixed, monkeypatch):
    """Tensors are on the CPU and on a GPU, on all ranks or not. The current GPU is the second one."""
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    devices, group = (torch.device("cpu"), torch.device("cuda", 0)), Group()
    assert str(_agreement._choose_first_wire(group, ())) == first
    for everywhere, expected in ((True, alike), (False, mixed)):
        assert tuple(str(_agreement.choose_wire_device(group, device, everywhere)) for device in devices) == expected


def test_lost_process_ends_the_other_processes():
    """The lost process ends or sleeps past the timeout: before its search, in the forward, and in the backward."""
    out = run(["tests.workers.distributed_failures"], devices=False)
    for case in ("retrieve", "forward", "backward"):
        for how in ("end", "sleep"):
            assert f"{case} {how} ended" in out
