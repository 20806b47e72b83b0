"""Test the random calls, their verdicts and their picture. A rehearsal runs the script on the CPU."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

pytest.importorskip("triton", reason="the GPU benchmarks import triton")

from benchmarks.calls import cliffs, random_calls
from benchmarks.calls.random_calls import CPU_SIZES, DTYPES, GPU_SIZES, OPTIONS, draw_calls

REHEARSE = ["--rehearse", "--rounds", "1", "--kinds", str(len(OPTIONS))]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """Return the file of a rehearsal that ended early, then went on."""
    path = tmp_path_factory.mktemp("results") / "cliffs.json"
    assert cliffs.main([*REHEARSE, "--calls", "4", "--out", str(path)]) == 0
    first = json.loads(path.read_text())["calls"]
    assert cliffs.main([*REHEARSE, "--calls", str(len(OPTIONS)), "--out", str(path)]) == 0
    assert json.loads(path.read_text())["calls"][:4] == first
    return path


def test_a_rehearsal_measures_every_option(rehearsed):
    document = json.loads(rehearsed.read_text())
    assert {call["option"] for call in document["calls"]} == set(OPTIONS)
    assert sum(record["case"]["count"] for record in document["records"]) == len(document["calls"]) == len(OPTIONS)
    for call in document["calls"]:
        assert call["ratio"] == pytest.approx(call["ms"]["call"] / call["floor_ms"])
        assert call["floor_ms"] >= document["settings"]["rates"]["empty_ms"]


def test_new_seed_restarts_the_measurement(rehearsed, tmp_path):
    path = tmp_path / "cliffs.json"
    path.write_text(rehearsed.read_text())
    assert cliffs.main([*REHEARSE, "--calls", "2", "--seed", "1", "--out", str(path)]) == 0
    assert len(json.loads(path.read_text())["calls"]) == 2


def test_the_picture_has_a_dot_for_each_call(rehearsed, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason='pictures: pip install ".[docs]"')
    from benchmarks.report import plot

    calls = json.loads(rehearsed.read_text())["calls"]
    text = plot.cliffs(rehearsed.parent, tmp_path).read_text()
    assert f"{len(calls)} random calls" in text and plot.digest(rehearsed.parent, "cliffs.json") in text
    figures = []
    monkeypatch.setattr(plot, "save", lambda figure, *rest: figures.append(figure))
    plot.cliffs(rehearsed.parent, tmp_path)
    (axes,) = figures[0].axes
    dots = {(round(x, 9), round(y, 6)) for c in axes.collections for x, y in c.get_offsets().tolist()}
    assert dots == {(round(call["floor_ms"], 9), round(call["ratio"], 6)) for call in calls}
    plot.plt.close(figures[0])


def test_draws_depend_on_the_seed_and_stay_within_limits():
    calls = list(draw_calls(0, 500, 60, GPU_SIZES))
    assert calls == list(draw_calls(0, 500, 60, GPU_SIZES)) != list(draw_calls(1, 500, 60, GPU_SIZES))
    assert calls[:300] == list(draw_calls(0, 300, 60, GPU_SIZES))  # a longer run has the calls of a shorter one
    assert {call.option for call in calls} == set(OPTIONS) and {call.dtype for call in calls} == set(DTYPES)
    assert len({(c.option, c.dtype, c.d, c.width) for c in calls}) <= 60
    assert max(call.case().operations for call in calls) <= random_calls.MOST_OPERATIONS


@pytest.mark.parametrize("option", OPTIONS)
def test_compositions_give_the_scores_of_the_call(option):
    """A wrong call is noticed: its compositions have other scores."""
    for call in draw_calls(0, len(OPTIONS), len(OPTIONS), CPU_SIZES):
        if call.option == option:
            with torch.no_grad(), cliffs.lik_ops.norm_warning(False):
                made = random_calls.prepare(call, "cpu")
                cliffs.check_scores(call, made)
                if made.compositions:
                    wrong = made._replace(function=lambda right=made.function, n=call.Lq: right() + 0.1 * n)
                    with pytest.raises(AssertionError, match="other scores"):
                        cliffs.check_scores(call, wrong)


def test_the_floor_is_the_longest_of_its_parts():
    made = random_calls.Prepared(torch.empty, {}, 2_000_000, 10**9, "float16", 3)
    rates = {"gbs": 1000.0, "float16": 1.0, "empty_ms": 0.003}
    assert made.floor_ms(rates) == pytest.approx(3.0)  # 3e9 operations at 1 TFLOP/s
    assert made._replace(operations=0).floor_ms(rates) == pytest.approx(0.002 + 0.001)
    assert made._replace(operations=0, bytes=9_000_000).floor_ms(rates) == pytest.approx(0.009)


def test_slower_calls_fail_the_report(capsys):
    (call,) = draw_calls(0, 1, 1, CPU_SIZES)
    record = {**asdict(call), "floor_ms": 1.0, "ratio": 1.2, "ms": {"call": 1.2, "by hand": 1.0, "slow": 1.19}}
    record["slower"] = cliffs.find_slower(record["ms"])
    assert record["slower"] == {"by hand": pytest.approx(1.2)}
    assert cliffs.report([record]) == 1
    assert f"SLOWER THAN ITS COMPOSITION  1.2000 ms  {call}: 1.20 x by hand" in capsys.readouterr().out
    record["slower"] = {"projected queries": 1.2}
    assert cliffs.report([record]) == 0
    assert cliffs.report([{**asdict(call), "failed": "RuntimeError: out of memory"}]) == 1
    assert not cliffs.find_slower({"call": 0.0110, "by hand": 0.0102})  # below the resolution of the clock
