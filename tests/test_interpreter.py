"""The behaviour tests again, on the Triton kernels, through Triton's interpreter on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_behaviour_through_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1", "LIK_OPS_HYPOTHESIS": "quick"}
    options = ["-q", "-x", "-m", "not gpu and not slow", "-p", "no:cacheprovider"]
    modules = ["tests/test_semantics.py", "tests/test_gradients.py", "tests/test_fp32.py", "tests/test_tune.py"]
    modules.append("tests/test_ragged_kernels.py")
    command = [sys.executable, "-m", "pytest", *options, *modules]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
