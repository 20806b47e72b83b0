"""Test DTensor with sharded queries, sharded documents, both, and neither, on two processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run(launcher: tuple[str, ...], backend: str, device: str) -> None:
    result = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.workers.dtensor_worker", backend, device],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    assert result.stdout.count("all equal") == 2


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_gloo():
    run((), "gloo", "cpu")


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_nccl():
    run(("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"), "nccl", "cuda")
