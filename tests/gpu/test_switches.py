"""LIK_OPS_CAPTURE and LIK_OPS_KERNEL: accepted values, what they change, and that bits stay equal."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lik_ops
from lik_ops.core import settings
from lik_ops.ops.fast_path import eager

from ..record_bits import alike
from ..support.common import INTERPRETING

pytest.importorskip("triton", reason="the switches select kernels of the Triton backend")

ROOT = Path(__file__).parents[2]
SWITCHES = (("LIK_OPS_CAPTURE", "0"), ("LIK_OPS_KERNEL", "generic"), ("LIK_OPS_KERNEL", "sm90"))
on_the_host = pytest.mark.skipif(INTERPRETING, reason="host code with launches that do nothing")


@pytest.fixture
def switch(monkeypatch):
    """Set a variable, and read it again. The variables are read once."""

    def reread():
        settings.is_capturing.cache_clear()
        settings.get_forced_kernel.cache_clear()
        eager.clear_call_caches()

    def set_variable(name, value):
        monkeypatch.setenv(name, value)
        reread()

    yield set_variable
    monkeypatch.undo()
    reread()


def run(code, *arguments, **variables):
    """Return the output of Python code in a new process."""
    environment = os.environ | variables
    command = [sys.executable, "-c", code, *arguments]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    return found.stdout


def test_invalid_values_raise(switch):
    switch("LIK_OPS_KERNEL", "fast")
    with pytest.raises(ValueError, match="LIK_OPS_KERNEL: expected one of auto, generic, sm90, got 'fast'"):
        settings.get_forced_kernel()
    switch("LIK_OPS_CAPTURE", "no")
    with pytest.raises(ValueError, match="LIK_OPS_CAPTURE: expected 0 or 1, got 'no'"):
        settings.is_capturing()
    for value, expected in (("", True), ("1", True), ("0", False)):
        switch("LIK_OPS_CAPTURE", value)
        assert settings.is_capturing() == expected
    switch("LIK_OPS_KERNEL", "")
    assert settings.get_forced_kernel() == "auto"
    switch("LIK_OPS_REHEARSAL", "2")
    with pytest.raises(ValueError, match="LIK_OPS_REHEARSAL: expected 0 or 1, got '2'"):
        settings.is_rehearsing()


COUNT = """
import os, torch, lik_ops
from benchmarks.calls import without_gpu
from lik_ops.core import settings
from lik_ops.gpu.runtime import capture
from lik_ops.ops.fast_path import eager
from lik_ops.gpu.forward.generic import GenericPlan
without_gpu.install()
ran = []
score = GenericPlan._score
GenericPlan._score = lambda self, *args: ran.append(1) or score(self, *args)
Q, D = torch.zeros(2, 8, 16), torch.zeros(3, 20, 16)
leaves = Q.clone().requires_grad_(), D.clone().requires_grad_()
cu = torch.tensor([0, 20, 40, 60])
for value in ("1", "0"):
    os.environ["LIK_OPS_CAPTURE"] = value
    settings.is_capturing.cache_clear()
    eager.clear_call_caches()
    ran.clear()
    for _ in range(5):
        lik_ops.maxsim(Q, D)
        lik_ops.maxsim(Q, D[None].expand(2, 3, 20, 16))
        lik_ops.maxsim_varlen(Q, D.flatten(0, 1), None, cu)
        lik_ops.maxsim(Q, lik_ops.Quantized(D.to(torch.int8), torch.ones(3, 20), "int8", 16, torch.float32))
        lik_ops.maxsim(*leaves).sum().backward()
        lik_ops.maxsim_soft(*leaves, 0.5).sum().backward()
    captured = [found for calls in capture.Calls.every for found in calls._found.values() if callable(found)]
    print(len(captured), len(ran))
"""


@on_the_host
def test_without_capture_every_call_runs_the_host_code():
    captured, ran, *without = map(int, run(COUNT).split())
    assert captured > 0 and ran == 3 * 2  # dense, candidates, and the step: the first two calls of each
    assert without == [0, 3 * 5]


FORCED = """
import json, os, sys, torch, lik_ops
from tests.record_kernels import Launches, architectures
from lik_ops.core import settings
from lik_ops.gpu.runtime import launcher
from lik_ops.ops.fast_path import eager
launches = Launches()
choose = launches.install()
names, bind = [], launcher.get_compiled_kernel
launcher.get_compiled_kernel = lambda kernel, *args: names.append(kernel.__name__) or bind(kernel, *args)
def half(*shape): return torch.empty(shape, dtype=torch.bfloat16)
Q, D, d_mask = half(64, 32, 128), half(100, 300, 128), torch.ones(100, 300, dtype=torch.bool)
cu = torch.arange(101) * 300
stored = lik_ops.Quantized(torch.empty(100, 300, 128, dtype=torch.int8), torch.ones(100, 300), "int8", 128, Q.dtype)
soft = half(4, 32, 128).requires_grad_(), half(9, 300, 128).requires_grad_()
calls = {
    "dense": lambda: lik_ops.maxsim(Q, D),
    "long": lambda: lik_ops.maxsim(Q[:1], half(2, 5000, 128)),
    "few": lambda: lik_ops.maxsim(Q[:1, :8], D[:2]),
    "large d": lambda: lik_ops.maxsim(half(1, 32, 256), half(2, 300, 256)),
    "mask": lambda: lik_ops.maxsim(Q, D, d_mask=d_mask),
    "candidates": lambda: lik_ops.maxsim(Q[:2], D[None].expand(2, 100, 300, 128)),
    "short": lambda: lik_ops.maxsim(Q, D[:, :20].contiguous()),
    "fp32": lambda: lik_ops.maxsim(Q.float(), D.float()),
    "fp32 few mask": lambda: lik_ops.maxsim(Q[:1].float(), D.float(), d_mask=d_mask),
    "packed": lambda: lik_ops.maxsim_varlen(Q, D.flatten(0, 1), None, cu),
    "packed normalize": lambda: lik_ops.maxsim_varlen(Q, D.flatten(0, 1), None, cu, normalize=True),
    "int8": lambda: lik_ops.maxsim(Q, stored),
    "int8 argmax": lambda: lik_ops.maxsim_with_argmax(Q, stored),
    "soft": lambda: lik_ops.maxsim_soft(*soft, 0.5).sum().backward(),
    "soft normalize": lambda: lik_ops.maxsim_soft(*soft, 0.5, normalize=True).sum().backward(),
}
for arch, kernel in json.loads(sys.argv[1]):
    os.environ["LIK_OPS_KERNEL"] = kernel
    settings.get_forced_kernel.cache_clear()
    eager.clear_call_caches()
    choose(dict(architectures())[arch])
    found = {}
    for name, call in calls.items():
        names.clear()
        try:
            call()
            kinds = "maxsim_forward", "maxsim_row_maxima_sm90", "maxsim_soft"
            found[name] = " ".join(sorted({x for x in names if x.startswith(kinds)}))
        except ValueError as error:
            found[name] = f"ValueError: {error}"
    print(json.dumps(found))
"""


def launches(*choices):
    """Return the launches of each call, for each (architecture, forced kernel)."""
    lines = run(FORCED, json.dumps(choices), LIK_OPS_NORM_WARNING="0").splitlines()
    return [json.loads(line) for line in lines]


@on_the_host
def test_forced_kernel_serves_the_call_or_raises_with_reason():
    generic, found, elsewhere = launches(("sm_90", "generic"), ("sm_90", "sm90"), ("sm_80", "sm90"))
    assert {name for name in generic.values() if "soft" not in name} == {
        "maxsim_forward",
        "maxsim_forward_packed",
    }
    assert {
        name: found.pop(name) for name in ("dense", "long", "few", "fp32", "large d", "mask", "packed", "int8", "soft")
    } == {
        **dict.fromkeys(("dense", "long", "few", "fp32", "int8"), "maxsim_forward_sm90"),
        "large d": "maxsim_forward_sm90_large_d",
        **dict.fromkeys(("mask", "packed"), "maxsim_row_maxima_sm90"),
        "soft": "maxsim_forward_soft maxsim_soft_rows maxsim_soft_tokens",
    }
    reasons = {
        "candidates": "each query has its own candidates",
        "short": "documents have fewer than 64 tokens",
        "fp32 few mask": "few query rows of fp32 with a document mask, an argmax, or `normalize`",
        "packed normalize": "`normalize`",
        "int8 argmax": "argmax",
        "soft normalize": "`normalize`",
    }
    assert found.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert found[name].startswith("ValueError: lik_ops: LIK_OPS_KERNEL=sm90 cannot serve this call: ")
        assert reason in found[name], found[name]
    assert all(text.startswith("ValueError: lik_ops: LIK_OPS_KERNEL=sm90 cannot") for text in elsewhere.values())
    assert "the architecture is sm_80, not sm_90" in elsewhere["dense"]


def check_switches(tmp_path, switches, parts, *options, **variables):
    """Compare the bits under each switch with the bits without, for all calls that the switch can serve.

    Each part of a recording is a process of its own, and all run at the same time.
    """
    settings = {"default": {}, **{f"{name} {value}": {name: value} for name, value in switches}}
    ran, found = {}, {name: {} for name in settings}
    for (name, changed), part in itertools.product(settings.items(), range(parts)):
        skipping = ["--skip-unserved"] if "sm90" in changed.values() else []
        file = tmp_path / f"{name} {part}.json"
        command = [sys.executable, "-m", "tests.record_bits", *options, *skipping, "--part", str(part), str(parts)]
        environment = os.environ | {"LIK_OPS_NORM_WARNING": "0"} | variables | changed
        with file.with_suffix(".log").open("w") as log:
            ran[name, file] = subprocess.Popen([*command, str(file)], cwd=ROOT, env=environment, stdout=log, stderr=log)
    for (name, file), process in ran.items():
        assert process.wait() == 0, (name, file.with_suffix(".log").read_text()[-4000:])
        found[name] |= json.loads(file.read_text())
    expected = found.pop("default")
    for name, bits in found.items():
        assert bits and (name.endswith("sm90") or bits.keys() == expected.keys()), name
        assert [key for key in bits if not alike(expected[key], bits[key])] == [], name
    return found


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETING, reason="starts the interpreter itself")
def test_the_switches_keep_the_bits_in_the_interpreter(tmp_path):
    variables = {"TRITON_INTERPRET": "1", "LIK_OPS_BACKEND": "triton"}
    check_switches(tmp_path, SWITCHES[:2], 1, "--grid=small", **variables)


@pytest.mark.gpu
def test_the_switches_keep_the_bits_on_a_gpu(tmp_path):
    """The last switch serves some calls on sm_90, and none elsewhere."""
    is_sm90 = torch.cuda.get_device_capability() == (9, 0)
    found = check_switches(tmp_path, SWITCHES if is_sm90 else SWITCHES[:2], 4, "--grid=medium", "--device=cuda")
    assert not is_sm90 or len(found["LIK_OPS_KERNEL sm90"]) > 50


@pytest.mark.gpu
def test_forcing_sm90_kernels_raises_on_other_gpus(switch):
    if torch.cuda.get_device_capability() == (9, 0):
        pytest.skip("of a GPU that is not sm_90")
    switch("LIK_OPS_KERNEL", "sm90")
    Q, D = (torch.randn(n, 64, 64, device="cuda").half() for n in (2, 3))
    with pytest.raises(ValueError, match="the architecture is sm_"):
        lik_ops.maxsim(Q, D)
