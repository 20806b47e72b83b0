"""Run the behavior tests again with Triton's interpreter on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# From slowest to fastest. A process needs ten seconds to import torch and collect tests, so few processes run many
# modules.
MODULES = [
    "gpu/forward/test_quantized_kernels",
    "gpu/forward/test_packed_kernels",
    "gpu/forward/test_code_kernels",
    "families/loss/test_cross_entropy",
    "ops/test_gradients",
    "ops/test_quantized_gradients",
    "gpu/test_capture",
    "families/chamfer/test_chamfer",
    "gpu/backward/test_packed_buckets",
    "gpu/backward/test_split_rows",
    "gpu/backward/test_tf32",
    "gpu/backward/test_long_documents",
    "families/soft/test_soft",
    "families/head/test_head",
    "gpu/forward/test_fp8_kernels",
    "gpu/backward/test_packed_sparse",
    "gpu/test_fp32",
    "api/test_semantics",
    "ops/fast_path/test_eager_ragged",
    "retrieval/test_staged",
    "gpu/forward/test_topk",
    "gpu/test_fallback",
    "formats/test_toy_format",
    "ops/fast_path/test_eager_keys",
    "gpu/forward/test_masked_kernels",
    "gpu/forward/test_token_norms",
    "gpu/forward/test_sum_parts",
    "gpu/forward/test_splits",
    "gpu/forward/test_query_rotation",
    "families/soft/test_soft_splits",
    "families/pooling/test_pooling_kernels",
    "gpu/backward/test_query_parts",
    "gpu/forward/sm90/test_sm90_fp32",
]
PROCESSES = 4


@pytest.mark.parametrize("first", range(PROCESSES))
def test_behavior_through_the_interpreter(first):
    environment = os.environ | {"TRITON_INTERPRET": "1", "LIK_OPS_HYPOTHESIS": "quick"}
    files = [f"tests/{module}.py" for module in MODULES[first::PROCESSES]]
    options = ["-q", "-x", "-m", "not gpu and not slow", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
