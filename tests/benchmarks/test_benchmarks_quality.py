"""Test the figures of benchmarks/retrieval/quality.py and their tables."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.report import tables
from benchmarks.retrieval import quality


def test_overlap_counts_documents_of_full_precision():
    expected = torch.tensor([[0, 1, 2], [3, 4, -1]])
    assert quality.overlap(expected, expected) == 1
    assert quality.overlap(torch.tensor([[2, 9, 0], [-1, -1, -1]]), expected) == pytest.approx(2 / 5)


def test_reciprocal_rank_of_known_items():
    found = torch.tensor([[0, 5], [5, 1], [0, 1], [-1, -1]])
    assert quality.reciprocal_rank(found) == pytest.approx((1 + 1 / 2) / 4)


def test_tables_of_quality(tmp_path):
    environment = {"gpus": [], "cpu": "CPU", "threads": 2, "commit": "0123456789", "versions": {"torch": "2.15.0"}}
    row = {"recall10": 0.9979, "mrr": 0.7296, "kib": 62.68}
    records = [
        {
            "case": {"name": "human judgments", "texts": 50},
            "correlations": {"MaxSim": {"pearson": 0.7081, "spearman": 0.559}},
        },
        {
            "case": {"name": "known items", "queries": 300, "documents": 300, "tokens": 45_000, "d": 384},
            "methods": {"MaxSim": {"mrr": 0.731, "hit": 0.957}, "BM25": {"mrr": 0.666, "hit": 0.914}},
        },
        {"case": {"name": "formats"}, "searches": {"int8": row}},
    ]
    (tmp_path / "quality.json").write_text(json.dumps({"environment": environment, "records": records}))
    text = tables.judgments(tmp_path)
    assert (
        "CPU, 2 threads, torch 2.15.0, commit 0123456. 50 judged texts; 300 known items in 300 documents of 150" in text
    )
    assert text.splitlines()[-2:] == [
        "| MaxSim | 0.708 | 0.559 | 0.731 | 0.957 |",
        "| BM25 | - | - | 0.666 | 0.914 |",
    ]
    assert tables.searches(tmp_path).splitlines()[-1] == "| formats | int8 | 62.7 | 0.998 | 0.730 |"
