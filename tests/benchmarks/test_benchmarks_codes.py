"""Test on a CPU that the residual code benchmarks run."""

import argparse
import json
import sys

import pytest
import torch

import lik_ops

pytest.importorskip("triton", reason="the GPU benchmarks import triton")
pytest.importorskip("safetensors", reason='pip install ".[retrieval]"')

from benchmarks.retrieval import billion, staged
from benchmarks.support import common, gpu


@pytest.fixture
def small(monkeypatch):
    """Shrink the benchmark to few topics of short documents."""
    for name, value in {"LENGTH": 12, "D": 16, "LQ": 4, "TOPICS": 60, "TOPICS_EACH": 3, "PART": 90}.items():
        monkeypatch.setattr(staged, name, value)
    monkeypatch.setattr(staged, "STAGES", ((1, 20), (4, 4096), (None, 300)))


def test_recall_is_the_share_of_expected_documents():
    found, expected = torch.tensor([[1, 2, -1], [7, 8, 9]]), torch.tensor([[2, 1], [5, 9]])
    assert staged.recall(found, expected) == 0.75
    assert staged.recall(found[:, :1], expected[:, :1]) == 0.0


def test_stored_documents_match_the_drawn_tokens(small):
    """Codes of all parts and the best documents in full precision match."""
    row = staged.Row(200, 8)
    Q = staged._queries(3, row.documents, "cpu")
    documents, truth = staged.made(row, 60, Q, "cpu")
    tokens = torch.cat(list(staged._drawn(row.documents, "cpu")))
    assert tokens.shape == documents.shape == (200, 12, 16) and documents.dtype == torch.bfloat16
    assert torch.equal(truth, lik_ops.retrieve(Q, tokens, 10)[1])
    alike = torch.nn.functional.cosine_similarity(documents.dequantize().float(), tokens.float(), dim=-1)
    assert alike.mean() > 0.99 and alike.min() > 0.9


def arguments(out, **others):
    given = {"seconds": 60, "rounds": 1, "queries": 3, "centroids": 20, "device": "cpu", "out": out}
    return argparse.Namespace(**given | others)


def test_a_record_of_searches_by_stages(small, monkeypatch, tmp_path):
    monkeypatch.setattr(common, "_version", lambda name: None)
    path = staged.run(arguments(tmp_path / "found.json"), [staged.Row(200, 2)])
    (record,) = json.loads(path.read_text())["records"]
    assert "failed" not in record and record["peer_failed"] == "not installed"
    assert record["case"] == {"documents": 200, "nbits": 2, "name": "200 documents, 2 bits"}
    names = ["exhaustive", "1 probes, 20 kept", "4 probes, 4096 kept", "all probes, 300 kept"]
    assert list(record["searches"]) == names
    for of in record["searches"].values():
        assert sorted(of) == ["ms1", "ms3", "peak_bytes", "recall", "recall_codes"] and of["ms1"] > 0
    assert record["searches"]["exhaustive"]["recall_codes"] == 1
    assert record["searches"]["all probes, 300 kept"]["recall_codes"] == 1
    assert 0 < record["searches"]["1 probes, 20 kept"]["recall"] <= 1


def test_failing_peer_keeps_other_results(small, monkeypatch, tmp_path):
    monkeypatch.setattr(common, "_version", lambda name: "1.7.0")
    monkeypatch.setattr(staged, "PEER_MODULE", "benchmarks.missing")
    path = staged.run(arguments(tmp_path / "found.json"), [staged.Row(50, 2)])
    (record,) = json.loads(path.read_text())["records"]
    assert record["peer_failed"].startswith("RuntimeError: status 1") and len(record["searches"]) == 4


def test_rows_without_time_record_a_timeout(tmp_path):
    path = staged.run(arguments(tmp_path / "found.json", seconds=-1), list(staged.ROWS))
    records = json.loads(path.read_text())["records"]
    assert [r["case"]["name"] for r in records] == [row.name for row in staged.ROWS]
    assert all(r["failed"] == "TimeoutError: no time left" for r in records)


def test_scaled_down_billion_run_records_every_case(monkeypatch, tmp_path):
    monkeypatch.setattr(billion, "LENGTH", 5)
    monkeypatch.setattr(billion, "CENTROIDS", 30)
    command = ["billion.py", "--device", "cpu", "--documents", "200", "--host", "120", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path / "found.json")])
    billion.main()
    records = json.loads((tmp_path / "found.json").read_text())["records"]
    assert [(r["where"], r["Nq"], r["documents"]) for r in records] == [
        ("device", 1, 200),
        ("device", 16, 200),
        ("host", 1, 120),
        ("host", 16, 120),
    ]
    assert all(r["ms"] > 0 for r in records) and all(r["error"] < 1e-4 for r in records[:2])


def test_floor_counts_bytes_products_and_centroids():
    ceilings = {"gbs": 4000.0, "tflops": 800.0}
    parts = billion.floor(1_024_000_000, 16, 41_000_000_000, ceilings)
    assert parts["bytes"] == pytest.approx(10.25)
    assert parts["products"] == pytest.approx(2 * 1.024e9 * 128 * 16 * 32 / 800e9)
    assert parts["centroids"] == pytest.approx(1.024e9 * 256 / 5.5e12 * 1e3)
    assert gpu.reason(TimeoutError("no time left")) == "TimeoutError: no time left"
