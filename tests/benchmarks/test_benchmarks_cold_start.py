"""Test the calls of the cold start, and on a simulated sm_90 which kernels they need and `lik_ops.warmup` covers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="the GPU benchmarks import triton")
ROOT = Path(__file__).resolve().parents[2]

from benchmarks.calls import cold_start  # noqa: E402
from benchmarks.support import common  # noqa: E402


def list_kernels(path: Path, *options: str) -> dict[str, list]:
    """Return the kernels that each call adds on a simulated sm_90."""
    command = [sys.executable, "-m", "benchmarks.calls.cold_start", "--without-gpu", "--out", str(path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {record["case"]["name"]: record["kernels"] for record in json.loads(path.read_text())["records"]}


def test_there_are_36_different_calls():
    assert [len(x) for x in (cold_start.RERANKINGS, cold_start.STEPS, cold_start.PAGES)] == [14, 14, 8]
    assert len({case.name for case in cold_start.CASES}) == 36
    assert all(case.what == "step" for case in cold_start.STEPS)


def test_sizes_compile_few_kernels(tmp_path):
    kernels = list_kernels(tmp_path / "kernels.json")
    assert set(kernels) == {case.name for case in cold_start.CASES}
    names = [name for added in kernels.values() for name, *_ in added]
    assert {"maxsim_forward", "maxsim_forward_sm90", "maxsim_row_maxima_sm90", "maxsim_grad_queries"} <= set(names)
    assert len(names) <= 33
    reranked = [name for case in cold_start.RERANKINGS for name, *_ in kernels[case.name]]
    assert set(reranked) == {"maxsim_forward"} and len(reranked) == 3  # pipeline stages for few, more, and many


def test_nothing_is_compiled_after_warmup(tmp_path):
    assert not any(list_kernels(tmp_path / "kernels.json", "--warmed").values())


def test_a_run_times_each_call_in_each_pass(monkeypatch):
    cases = (
        common.Case("scores", 2, 3, 4, 5, d=8),
        common.Case("step", 2, 3, 4, 5, d=8, what="step", mask="prefix", normalize=True),
    )
    monkeypatch.setattr(cold_start, "CASES", cases)
    monkeypatch.setattr(cold_start, "WARMUPS", ({"Lq": 4, "Nd": 3, "Ld": 5},))
    monkeypatch.setattr(cold_start.triton.knobs.compilation, "listener", None)
    found = cold_start.measure("lik_ops", "cpu", 2, warmed=True)
    assert found["missing"] == {} and found["warmup_seconds"] > 0 and len(found["passes"]) == 2
    for once in found["passes"]:
        assert once["seconds"].keys() == {"scores", "step"} and once["kernels"] == []


def test_compiled_kernels_are_recorded_and_cached_are_not(monkeypatch):
    found = []
    monkeypatch.setattr(cold_start.triton.knobs.compilation, "listener", None)
    cold_start.record_compilations(found)
    source = SimpleNamespace(
        fn=SimpleNamespace(__name__="kernel", arg_names=["x", "C"]),
        constants={(1,): 8, (0, 2): 1},
        attrs={(0, 0): [["tt.divisibility", 16]]},
        signature={"x": ("*bf16", "i32", "constexpr"), "C": "constexpr"},
    )
    known = {"src": source, "metadata": {"num_warps": 4}, "metadata_group": {}}
    times = SimpleNamespace(total=1_500_000)
    for cache_hit in (False, True):
        cold_start.triton.knobs.compilation.listener(**known, times=times, cache_hit=cache_hit)
    (kernel,) = json.loads(json.dumps(found))
    assert kernel["kernel"] == "kernel" and kernel["seconds"] == 1.5 and kernel["constants"] == {"C": "8"}
    assert set(kernel["parts"]) == {"(0, 2)", "(0, 0)"}
