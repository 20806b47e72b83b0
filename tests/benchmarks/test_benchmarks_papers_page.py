"""Test the page of the published tables with synthetic results."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton", reason="the GPU benchmarks import triton")

from benchmarks.papers import measure, plan
from benchmarks.report import papers as report
from benchmarks.report import tables
from benchmarks.support import common


def spread(ms):
    return {"median": ms, "q1": ms * 0.9, "q3": ms * 1.1, "n": 30}


def synthetic(records):
    environment = {"gpus": ["NVIDIA H100"], "commit": "abcdef0" * 5, "versions": {"torch": "2.11"}, "threads": 1}
    return {"benchmark": "papers", "environment": environment, "settings": {}, "records": records}


def record_of(name, contenders, **more):
    return {"case": {"name": name}, "contenders": contenders, "rows": [name.removesuffix(" compiled")], **more}


def test_the_page_shows_published_and_measured_figures_and_ratios():
    forward = {
        plan.OURS: {"values": {"forward warm": spread(0.02), "forward cold": spread(0.03)}},
        plan.LATE: {"values": {"forward warm": spread(0.05), "forward cold": spread(0.024)}},
        plan.FLASH: {"skipped": "not installed"},
        plan.EAGER_FP32: {"failed": measure.OUT_OF_MEMORY},
    }
    compiled = {plan.COMPILED_REDUCE: {"values": {"forward warm": spread(0.1)}}}
    document = synthetic([record_of("S1/0", forward), record_of("S1/0 compiled", compiled)])
    text = report.page(document, {})
    row = "| 0 | 1 | 1000 | 32 | 300 | 128 | 0.02 (0.018-0.022) | 0.094 / 0.05 (0.045-0.055) | - |"
    assert f"{row} 0.263 / out of memory | 0.273 / 0.1 (0.09-0.11) | 2.50x | 5.00x |" in text
    assert "- Not ahead, row 0 (0.80x): not ahead, not explained yet" in text
    assert "No figure of flash-maxsim, row 0: not installed." in text
    assert "In 1 of 2 timed figures with a peer, lik_ops is at least as fast as every peer (50.0%, goal 95%)" in text
    assert "1 figures, memory and errors included, are behind a peer, 1 of them without an explanation" in text
    assert "1 are more than 3x" in text


@pytest.mark.parametrize("key", ["S1/0: forward, cold L2", "S1/0", "S1: forward, cold L2", "S1"])
def test_a_remark_replaces_the_missing_explanation(key):
    values = {
        plan.OURS: {"values": {"forward cold": spread(2.0)}},
        plan.LATE: {"values": {"forward cold": spread(1.0)}},
    }
    document = synthetic([record_of("S1/0", values)])
    text = report.page(document, {key: "The launch limits this call."})
    assert "- Not ahead, row 0 (0.50x): The launch limits this call." in text and report.UNEXPLAINED not in text


def test_a_row_without_our_figure_is_not_ahead():
    values = {plan.OURS: {"failed": "RuntimeError"}, plan.LATE: {"values": {"forward cold": spread(1.0)}}}
    text = report.page(synthetic([record_of("S1/0", values)]), {})
    assert "- Not ahead, row 0 (-): not ahead, not explained yet" in text
    assert "In 0 of 1 timed figures" in text


def test_peaks_use_the_units_and_inputs_of_the_paper():
    entry = {"values": {"forward peak": 1000.0}, "held_mb": 500.0}
    text = report.page(synthetic([record_of("Tab21 peaks/0", {plan.FLASH: entry, plan.OURS: entry})]), {})
    assert "0.93 / 1.57" in text  # 1500 MiB in GB
    text = report.page(synthetic([record_of("S7/0", {plan.LATE: entry, plan.OURS: entry})]), {})
    assert "4 KB / 1,024,000" in text  # without inputs


def test_shares_are_better_if_they_are_higher():
    values = {
        plan.OURS_INT8: {"values": {"top20": 0.9, "spearman": 0.999}},
        plan.FLASH_INT8: {"values": {"top20": 1.0, "spearman": 0.99}},
    }
    text = report.page(synthetic([record_of("Tab13/0", values)]), {})
    assert "0.99969 / 0.99 | 1.01x" in text and "- Not ahead, row 0 (0.90x)" in text


def test_failed_row_shows_the_reason():
    record = record_of("Tab9/3", {}, failed="MemoryError: needs 197 GB of host memory, the machine has 128 GB")
    text = report.page(synthetic([record]), {})
    assert "No figure of lik_ops, row 3: MemoryError: needs 197 GB of host memory" in text
    assert f"Not run. {plan.NOT_RUN['S6a']}" in text


def test_rows_that_share_a_measurement_show_it_and_count_once():
    entry = {"values": {"forward cold": spread(1.0)}}
    record = record_of("Tab1+4+21 H100/0", {plan.OURS: entry, plan.FLASH: entry})
    record["rows"] = ["Tab1+4+21 H100/0", "Tab1+4+21 A100/0"]
    text = report.page(synthetic([record]), {})
    assert "0.136 / 1 (0.9-1.1)" in text and "0.2 / 1 (0.9-1.1)" in text
    assert "In 1 of 1 timed figures" in text


def test_figures_of_two_gpus_are_not_compared():
    entry = {"values": {"forward warm": spread(1.0)}}
    main = record_of("S1/0", {plan.OURS: entry}, gpu="NVIDIA H100")
    compiled = record_of("S1/0 compiled", {plan.COMPILED_REDUCE: entry}, gpu="NVIDIA H200")
    text = report.page(synthetic([main, compiled]), {})
    assert "row 0: measured on NVIDIA H200 only, the other contenders on NVIDIA H100." in text
    assert "Measurements: 1 on NVIDIA H100, 1 on NVIDIA H200." in text and "Of 0 timed figures" in text
    text = report.page(synthetic([{**main, "commit": "0123456789"}, compiled]), {})
    assert "Measurements: 1 on NVIDIA H100 at commit 0123456, 1 on NVIDIA H200." in text


def test_remark_of_an_unknown_row_raises():
    with pytest.raises(ValueError, match="S1/99"):
        report.page(None, {"S1/99": "x"})


def test_page_matches_the_committed_results():
    path = common.RESULTS / "papers.json"
    document = json.loads(path.read_text()) if path.exists() else None
    expected = report.page(document, json.loads(report.REMARKS.read_text()))
    assert (tables.ROOT / "docs" / "papers.md").read_text() == expected, "run python -m benchmarks.report.papers"
