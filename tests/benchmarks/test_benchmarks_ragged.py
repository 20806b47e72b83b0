"""Test the cases of the ragged length benchmark, and that it detects a wrong result."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the GPU benchmarks import triton")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

from benchmarks.operators import ragged  # noqa: E402
from benchmarks.retrieval import retrieve  # noqa: E402
from benchmarks.support import (  # noqa: E402
    ragged_cases,
    ragged_contenders,
)

from .test_benchmarks import Clock, small  # noqa: E402


def ragged_case(layout: str, mean_q: float = 1.0, what: str = "scores", dtype: str = "float32") -> ragged_cases.Case:
    more = {"candidates": {"K": 5}, "pairs": {"P": 90}}.get(layout, {})
    return ragged_cases.Case("small", 6, 40, 9, 24, d=16, dtype=dtype, mean_q=mean_q, what=what, **more)


RAGGED = list(itertools.product(("cross", "candidates", "pairs"), (1.0, 0.6)))


@pytest.mark.parametrize("most", [32, 300, 1024])
def test_lengths_have_the_requested_mean(most):
    lengths = ragged_cases.draw_lengths(50_000, most, 0.3, torch.Generator().manual_seed(0))
    assert lengths.min() >= 1
    assert lengths.max() == most
    assert lengths.double().mean() / most == pytest.approx(0.3, abs=0.005)
    again = ragged_cases.draw_lengths(50_000, most, 0.3, torch.Generator().manual_seed(0))
    assert torch.equal(lengths, again)


def test_names_of_ragged_cases_and_of_searches_are_unique():
    names = [case.name for case in (*ragged.CASES, *ragged.MASKED)]
    assert len(set(names)) == len(names)
    assert len(set(retrieve.PLAN)) == len(retrieve.PLAN)


@pytest.mark.parametrize(("layout", "mean_q"), RAGGED)
def test_operations_and_bytes_count_kept_tokens(layout, mean_q):
    x = ragged_cases.Inputs(ragged_case(layout, mean_q))
    each = [int(x.q_lengths[i] * x.d_lengths[j]) for i, j in x.met.tolist()]
    assert x.operations == 2 * 16 * sum(each)
    met = [set(side.tolist()) for side in x.met.unbind(1)]
    tokens = sum(int(x.q_lengths[i]) for i in met[0]) + sum(int(x.d_lengths[j]) for j in met[1])
    assert x.bytes == 4 * (16 * tokens + len(each))
    dense = ragged_contenders.dense_mean(x)
    assert dense.score(*dense.tokens).shape == x.shape
    assert x.dense_operations == 2 * 16 * len(each) * dense.tokens[0].shape[-2] * dense.tokens[1].shape[-2]
    assert x.operations / x.dense_operations == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize(("layout", "mean_q"), RAGGED)
def test_ragged_contenders_agree_with_the_reference(layout, mean_q):
    for what in ("scores", "step"):
        x = ragged_cases.Inputs(ragged_case(layout, mean_q, what))
        found = {n: c for n, c in ragged_contenders.contenders(x).items() if not isinstance(c, str)}
        for name in (ragged_contenders.PACKED, ragged_contenders.PADDED, ragged_contenders.EAGER):
            score, tokens = found[name]
            assert ragged_cases.error_of(x, score(*tokens)) < 1e-6
            assert max(ragged_cases.errors_of(x, score, tokens).values()) < 1e-5


@pytest.mark.parametrize(("layout", "mean_q"), RAGGED)
def test_wrong_ragged_results_are_detected(layout, mean_q):
    x = ragged_cases.Inputs(ragged_case(layout, mean_q, "step"))
    score, tokens = ragged_contenders.contenders(x)[ragged_contenders.PACKED]
    scores = score(*tokens)
    scores.view(-1)[-1] *= 1.1
    assert ragged_cases.error_of(x, scores) > 1e-4
    assert ragged_cases.errors_of(x, lambda Q, D: score(Q, 1.1 * D), tokens)["error_D"] > 0.05
    leaking = ragged_cases.errors_of(x, lambda Q, D: score(Q, D) + 0.1 * D.sum(), tokens)
    assert leaking["error_D"] > 0.05


CEILING = {"tflops": 1e-3, "gbs": 1.0}


def test_a_ragged_record(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("broken\nin two lines")

    monkeypatch.setattr(ragged_contenders, "_late", lambda x: broken)
    monkeypatch.setattr(ragged_contenders, "_flash", lambda x: "why not")
    monkeypatch.setattr(ragged_contenders, "_flash_padded", lambda x: lambda Q, D: Q.new_zeros(x.shape))
    record = ragged.measure(ragged_case("cross", 0.6), Clock(), CEILING, time.monotonic() + 60, "cpu")
    entries = record["contenders"]
    assert entries["late-interaction-kernels packed"] == {"failed": "RuntimeError: broken"}
    assert entries["flash-maxsim packed"] == {"skipped": "why not"}
    assert entries["flash-maxsim padded"]["failed"].startswith("wrong")
    assert [entries[n]["ms"] for n in ("lik_ops", "lik_ops padded", "padded eager")] == [1, 2, 3]
    assert record["ratio_to_ours"] == {"lik_ops padded": 2, "padded eager": 3}
    dense = record["dense_mean"]
    assert record["ratio_to_dense"] == pytest.approx(dense["operations"] / (4 * record["operations"]))
    assert record["floor_ms"] == max(record["operations"] / 1e6, record["bytes"] / 1e6)
    late = ragged.measure(ragged_case("pairs"), Clock(), CEILING, time.monotonic() - 1, "cpu")
    assert late["contenders"]["lik_ops"] == {"skipped": "no time left"}
    assert "ratio_to_dense" not in late


@pytest.mark.parametrize("what", ["scores", "step"])
def test_a_record_of_masks(what):
    record = ragged.measure_masked(small(what=what), Clock(), "cpu")
    assert record["ratio_to_unmasked"] == {"holes": 2, "prefix": 3}
    assert all(r["exact"] for r in record["contenders"].values())
