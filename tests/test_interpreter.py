"""The behaviour tests again, on the Triton kernels, through Triton's interpreter on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


MODULES = [
    "test_semantics",
    "test_soft",
    "test_chamfer",
    "test_cross_entropy",
    "test_ragged_kernels",
    "test_ragged_lists",
    "test_ragged_few",
    "test_quantized_kernels",
    "test_masked_kernels",
    "test_eager_ragged",
    "test_eager_keys",
    "test_gradients",
    "test_replay",
    "test_staged",
    "test_fallback",
    "test_fp32",
    "test_tune",
    "test_topk",
    "test_tile_norms",
    "test_toy_format",
]


@pytest.mark.parametrize("module", MODULES)
def test_behaviour_through_the_interpreter(module):
    environment = os.environ | {"TRITON_INTERPRET": "1", "LIK_OPS_HYPOTHESIS": "quick"}
    options = ["-q", "-x", "-m", "not gpu and not slow", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, f"tests/{module}.py"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
