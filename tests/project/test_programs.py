"""Test the programs ``python -m lik_ops.*``: their help, and their output without a GPU or Triton."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lik_ops
from lik_ops import backends, info
from lik_ops.__main__ import PROGRAMS

ROOT = Path(__file__).parents[2]
CASES: dict[str, tuple[list[str], dict[str, str]]] = {  # arguments, environment
    "list": (["lik_ops"], {}),
    "unknown": (["lik_ops", "info"], {}),
    **{f"{program} --help": ([f"lik_ops.{program}", "--help"], {}) for program in PROGRAMS},
    "info": (["lik_ops.info"], {}),
    "info, portable": (["lik_ops.info"], {"LIK_OPS_BACKEND": "portable"}),
    "info, wrong backend": (["lik_ops.info"], {"LIK_OPS_BACKEND": "fast"}),
    "info, no kernels": (
        ["lik_ops.info", "--compile", "--nq", "1", "--nd", "2", "--ld", "5", "--d", "16"],
        {"LIK_OPS_BACKEND": "triton"},
    ),
    "warmup": (["lik_ops.warmup"], {}),
    "warmup, no device": (["lik_ops.warmup", "--device", "none"], {}),
    "warmup, wrong size": (["lik_ops.warmup", "--device", "cpu", "--d", "0"], {}),
    "warmup, wrong backend": (["lik_ops.warmup", "--device", "cpu"], {"LIK_OPS_BACKEND": "triton"}),
    "warmup, cpu": (["lik_ops.warmup", "--device", "cpu", "--d", "8", "--Lq", "2", "--Nd", "2", "--Ld", "5"], {}),
    "opcheck, no device": (["lik_ops.opcheck", "--device", "none"], {}),
    "opcheck, no gpu": (["lik_ops.opcheck", "--device", "cuda"], {}),
}
SCRIPT = """
import contextlib, io, json, os, runpy, sys, traceback
cases, missing = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(missing))
found = {}
for name, (arguments, environment) in cases.items():
    out, err, sys.argv, code = io.StringIO(), io.StringIO(), arguments, 0
    os.environ.update(environment)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code or 0
        except Exception:
            code = traceback.format_exc()
    for variable in environment:
        del os.environ[variable]
    found[name] = code, out.getvalue(), err.getvalue()
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=([], ["triton"]), ids=("", "without Triton"))
def said(request):
    """Return the exit code, output, and errors of each case on a machine without a GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    for variable in ("LIK_OPS_BACKEND", "TRITON_INTERPRET"):
        environment.pop(variable, None)
    command = [sys.executable, "-c", SCRIPT, json.dumps((CASES, request.param))]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    return {name: tuple(x) for name, x in json.loads(run.stdout.splitlines()[-1]).items()}


def test_no_program_ends_in_a_traceback(said):
    wrong = {"unknown"} | {name for name in CASES if name.startswith(("warmup,", "opcheck,"))} - {"warmup, cpu"}
    for name, (code, _, errors) in said.items():
        assert code == (2 if name in wrong | {"warmup"} else 0), (name, code, errors)


def test_the_list_has_every_program(said):
    found = set()
    for package in ("lik_ops", "opcheck"):
        for path in (ROOT / package).glob("**/*.py"):
            if 'if __name__ == "__main__"' in path.read_text():
                found.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found.remove("lik_ops.__main__")
    assert {name.removesuffix(".__main__").removeprefix("lik_ops.") for name in found} == set(PROGRAMS)
    assert lik_ops.__version__ in said["list"][1]
    for program in PROGRAMS:
        assert f"python -m lik_ops.{program} " in said["list"][1]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_option_has_help(program, monkeypatch):
    parsers = []
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self, args: parsers.append(self) or sys.exit())
    name = f"lik_ops.{program}"
    if program == "warmup":  # the import returns the function
        source = (ROOT / "lik_ops" / "warmup.py").read_text().split("\nelse:")[0]
        scope = {"__name__": "program", "__package__": "lik_ops", "__doc__": ""}
        exec(compile(source.replace('__name__ == "__main__"', "False"), "warmup.py", "exec"), scope)
        main = scope["main"]
    else:
        main = importlib.import_module(f"{name}.__main__" if program == "opcheck" else name).main
    with pytest.raises(SystemExit):
        main([])
    (parser,) = parsers
    assert parser.prog == f"python -m {name}" and parser.description
    assert not [action.option_strings for action in parser._actions if not action.help]


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_needs_neither_triton_nor_a_gpu(said, program):
    assert said[f"{program} --help"][1].startswith(f"usage: python -m lik_ops.{program}")


def test_info_prints_versions_devices_and_the_choice(said):
    for expected in ("lik_ops", lik_ops.__version__, "torch", torch.__version__, "triton", "cpu", "portable"):
        assert expected in said["info"][1]


def test_info_compile_reports_an_unusable_backend(said):
    assert "error: lik_ops: backend 'triton' cannot compute torch.float32 on cpu" in said["info, no kernels"][1]


def test_info_prints_the_reason_for_portable(said):
    assert said["info"][1].count("portable: Triton kernels need a GPU") == 5
    assert "gpus     none: " in said["info"][1] and "CUDA_VISIBLE_DEVICES=" in said["info"][1]
    assert said["info, portable"][1].count("portable: LIK_OPS_BACKEND or lik_ops.use_backend says so") == 5
    expected = "error: LIK_OPS_BACKEND: expected one of auto, triton, portable, got 'fast'"
    assert said["info, wrong backend"][1].count(expected) == 6


def test_describe_choice_gives_the_reason_on_a_gpu(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(backends, "_has_triton", False)
    assert info.describe_choice(device, torch.float16, 1, 32, 128) == "portable: triton is not installed"
    monkeypatch.undo()
    if backends._has_triton:
        assert info.describe_choice(device, torch.float64, 1, 32, 128) == "portable: the Triton kernels have no fp64"


def test_warmup_prints_calls_and_argument_errors(said):
    assert "error: device: expected a device of this machine, got cuda: " in said["warmup"][2]
    assert said["warmup"][2].endswith(" (--device cpu warms up the CPU)\n")
    assert "--device cpu" not in said["warmup, no device"][2]
    assert "error: device: expected a device of this torch, got 'none'" in said["warmup, no device"][2]
    assert "error: d: expected 1 or more, got 0" in said["warmup, wrong size"][2]
    assert "error: backend 'triton' cannot compute torch.bfloat16 on cpu" in said["warmup, wrong backend"][2]
    assert "maxsim, Q [1, 2, 8], D [2, 5, 8]" in said["warmup, cpu"][1]
    assert said["warmup, cpu"][1].endswith(" s  in all\n")


def test_opcheck_error_names_the_missing_device(said):
    for name, device in (("opcheck, no device", "none"), ("opcheck, no gpu", "cuda")):
        assert f"error: --device: {device}: " in said[name][2]
