"""`lik_ops.distributed`: several processes find and learn what one would; and what they do when one of them is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors", reason="pip install lik-ops[retrieval]")
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
ROOT = Path(__file__).resolve().parents[1]


def run(command, devices):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if not devices:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", *command]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-6000:]
    return found.stdout


def check(backend, processes, path):
    names = ["retrieve", "sharded", "messages", "inbatch", "errors", "launched"]
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    out = run([*launch, "-m", "tests.distributed_retrieve", backend, str(path), *names], backend == "nccl")
    for name in names:
        for rank in range(processes):
            assert f"{name} {rank} agrees" in out


@pytest.mark.parametrize("processes", [2, 4])
def test_gloo(processes, tmp_path):
    check("gloo", processes, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl(tmp_path):
    check("nccl", 2, tmp_path)


def test_a_process_that_is_lost_ends_the_others_in_time():
    """Where it would search, in the forward and in the backward, it ends, or sleeps longer than the timeout."""
    out = run(["tests.distributed_failures"], devices=False)
    for case in ("retrieve", "forward", "backward"):
        for how in ("end", "sleep"):
            assert f"{case} {how} ended" in out
