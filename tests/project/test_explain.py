"""``python -m lik_ops.info --explain`` names the kernels that a call launches, and the reasons of the other rules."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lik_ops import info

pytest.importorskip("triton", reason="explains the Triton backend")

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(
    r"(\w+) (soft step|\w+) (\d+) x (\d+), (\d+)/(\d+), d (\d+), torch.(\w+), (True|False), (True|False), (\w+)$"
)
# Runs in its own process, because the launches of CPU tensors are replaced for good.
COMPARE = """
from lik_ops import explain
from lik_ops.gpu.runtime import arguments, launcher
from tests.project.test_explain import describe
from tests.record_kernels import Launches, architectures, random_calls
architecture = arguments.architecture
choose = Launches().install()
arguments.architecture = architecture
names, bind = [], launcher.get_compiled_kernel
launcher.get_compiled_kernel = lambda kernel, *args: names.append(kernel.__name__) or bind(kernel, *args)
compared, kernels = 0, set()
for arch_name, arch in architectures():
    if arch_name in ("sm_80", "sm_90", "gfx942"):
        choose(arch)
        for name, call in random_calls(7, 150):
            names.clear()
            try:
                call()
            except (NotImplementedError, ValueError):
                continue
            launched = list(names)
            found = explain.explain_call(describe(name), arch)
            explained = [launch.name for launch in (*found.forward, *found.backward)]
            assert explained == launched, (arch_name, name, explained, launched)
            if found.rules:
                rule, choice = found.rules[-1]
                assert not isinstance(choice, str) and all(isinstance(x, str) for _, x in found.rules[:-1])
                assert any(kernel in rule for kernel in launched), (arch_name, name, rule, launched)
            compared += 1
            kernels.update(launched)
print(compared, len(kernels))
"""


def describe(name):
    """Return the description of a call of `tests.record_kernels.random_calls`."""
    from lik_ops.explain import CallDescription

    layout, what, *sizes, dtype, normalize, masked, backward = NAME.match(name).groups()
    masked = masked == "True" and layout in ("cross", "candidates")
    Nq, Nd, Lq, Ld, d = map(int, sizes)
    return CallDescription(
        layout,
        getattr(torch, dtype),
        Nq,
        Nd,
        Lq,
        Ld,
        d,
        q_mask=masked,
        d_mask=masked,
        normalize=normalize == "True",
        argmax=what == "argmax",
        backward=backward if "step" in what else "",
        quantized=what if what in ("int8", "fp8_e4m3", "binary") else "",
        soft="soft" in what,
        pairs=min(Nq * Nd, 512),
    )


def test_explanations_match_launched_kernels():
    environment = os.environ | {"LIK_OPS_NORM_WARNING": "0"}
    command = [sys.executable, "-c", COMPARE]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    compared, kernels = map(int, ran.stdout.split())
    assert compared > 400 and kernels > 15


def run_explain(capsys, *options):
    info.main(["--explain", *options])
    return capsys.readouterr().out


def test_a_report_needs_no_gpu_and_has_reasons_files_and_grids(capsys):
    text = run_explain(capsys, "--arch", "sm_90", "--gradients", "lowmem", "--nq", "64")
    assert "on splits of documents: no, documents have too few tokens on average" in text
    assert "forward: maxsim_forward_sm90 (csrc_triton/forward/sm90/dense.py), grid (" in text
    assert "Sm90Config(BN=" in text and "backward: maxsim_grad_query_parts" in text
    text = run_explain(capsys, "--arch", "sm_90", "--gradients", "lowmem", "--nq", "64", "--nd", "300")
    assert "backward: maxsim_grad_queries" in text
    text = run_explain(capsys, "--arch", "sm_90", "--nq", "1", "--lq", "8")
    assert "slower for at most 128 query rows" in text and "rule 4: maxsim_forward: yes, " in text
    text = run_explain(capsys, "--arch", "sm_80", "--quantized", "int8")
    assert "no, the architecture is sm_80, not sm_90" in text and "maxsim_forward_packed" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arch", "sm_1"], "--arch: expected one of sm_80, "),
        (["--arch", "sm_90", "--quantized", "int3"], "--quantized: expected one of int8, "),
        (["--arch", "sm_90", "--soft", "--layout", "packed"], "only --layout cross"),
    ],
)
def test_unsupported_options_are_rejected(options, message, capsys):
    with pytest.raises(SystemExit):
        run_explain(capsys, *options)
    assert message in capsys.readouterr().err


def test_an_unknown_forced_kernel_is_an_error_line():
    command = [sys.executable, "-m", "lik_ops.info", "--explain", "--arch", "sm_90"]
    environment = os.environ | {"LIK_OPS_KERNEL": "foo"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.stdout == "error: LIK_OPS_KERNEL: expected one of auto, generic, sm90, got 'foo'\n", ran.stderr


def test_info_prints_the_environment_switches(capsys):
    info.main([])
    printed = capsys.readouterr().out
    assert "kernel   auto (LIK_OPS_KERNEL)" in printed and "capture  True (LIK_OPS_CAPTURE)" in printed
    assert "rehearse True (LIK_OPS_REHEARSAL)" in printed
