"""The behaviour tests again, on the Triton kernels, through Triton's interpreter on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


# From the slowest to the fastest. A process imports torch and collects tests for ten seconds: few take many modules.
MODULES = [
    "test_quantized_kernels",
    "test_ragged_kernels",
    "test_code_kernels",
    "test_cross_entropy",
    "test_gradients",
    "test_replay",
    "test_chamfer",
    "test_ragged_lists",
    "test_soft",
    "test_head",
    "test_fp8_kernels",
    "test_ragged_few",
    "test_fp32",
    "test_semantics",
    "test_eager_ragged",
    "test_staged",
    "test_tune",
    "test_topk",
    "test_fallback",
    "test_toy_format",
    "test_eager_keys",
    "test_masked_kernels",
    "test_tile_norms",
    "test_sum_parts",
    "test_sections",
]
PROCESSES = 4


@pytest.mark.parametrize("first", range(PROCESSES))
def test_behaviour_through_the_interpreter(first):
    environment = os.environ | {"TRITON_INTERPRET": "1", "LIK_OPS_HYPOTHESIS": "quick"}
    files = [f"tests/{module}.py" for module in MODULES[first::PROCESSES]]
    options = ["-q", "-x", "-m", "not gpu and not slow", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
