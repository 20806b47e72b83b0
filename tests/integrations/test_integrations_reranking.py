"""Test reranking of hits and of a server's pairs, and the components for both."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lik_ops.integrations import reranking

ROOT = Path(__file__).parents[2]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
close = torch.testing.assert_close


def by_hand(q: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    return (q @ d.T).amax(-1).sum()


@pytest.mark.parametrize("device", DEVICES)
def test_hits_are_sorted_by_their_scores(device):
    query, stored = torch.randn(4, 8), [torch.randn(n, 8) for n in (3, 1, 7, 2)]
    expected = sorted(((float(by_hand(query, d)), name) for d, name in zip(stored, "abcd", strict=True)), reverse=True)
    as_lists = query.tolist(), "abcd", [d.tolist() for d in stored]
    for given in (as_lists, (query, list("abcd"), stored)):
        hits = reranking.rerank_hits(*given, device=device)
        assert hits.ids == [name for _, name in expected]
        close(hits.scores, [score for score, _ in expected], rtol=1e-5, atol=1e-5)
        assert reranking.rerank_hits(*given, 2, device=device).ids == hits.ids[:2]


def test_hits_without_vectors_are_last_and_ties_keep_order():
    query, one = torch.randn(2, 4), torch.randn(3, 4)
    hits = reranking.rerank_hits(query, ["none", 1, 2], [[], one, one.clone()])
    assert hits.ids == [1, 2, "none"] and hits.scores[2] == -torch.inf
    assert reranking.rerank_hits(query, [], []) == ([], [])
    scaled = reranking.rerank_hits(query, [0, 1], [one, 100 * one[:1]], normalize=True)
    assert scaled.ids[0] == 0 or by_hand(query, one[:1]) == by_hand(query, one)
    with pytest.raises(ValueError, match="expected 2, one for each id, got 1"):
        reranking.rerank_hits(query, [0, 1], [one])
    with pytest.raises(ValueError, match=r"rerank_hits: query: expected \[Lq, d\], got \[1, 2, 4\]"):
        reranking.rerank_hits(query[None], [0, 1], [one, one])
    for ids, stored in (([0, 1], [one, one]), ([], [])):
        with pytest.raises(ValueError, match="rerank_hits: top_k: expected 0 or more, got -1"):
            reranking.rerank_hits(query, ids, stored, -1)
    assert reranking.rerank_hits(query, [0, 1], [one, one], 0) == ([], [])


WRONG_VECTORS = {
    "none": (None, TypeError, "{} numbers, got NoneType"),
    "ragged": ([[1.0, 2.0], [1.0]], ValueError, "{}, got rows of 1 to 2 numbers"),
    "another d": ([[1.0, 2.0, 3.0]], ValueError, "{}, got [1, 3]"),
    "one vector": ([1.0, 2.0], ValueError, "{}, got [2]"),
    "words": (["a"], TypeError, "{} numbers, got list"),
    "a hole": ([[1.0, None]], TypeError, "{} numbers, got list"),
    "complex": (torch.ones(1, 2, dtype=torch.complex64), TypeError, "{} real numbers, got torch.complex64"),
}


@pytest.mark.parametrize("name", WRONG_VECTORS)
def test_errors_about_vectors_name_the_hit(name):
    wrong, error, message = WRONG_VECTORS[name]
    right = [[1.0, 0.0]]
    expected = "rerank_hits: multi_vectors[1], of hit 'b': expected " + message.format("[L, 2]")
    with pytest.raises(error, match=re.escape(expected)):
        reranking.rerank_hits(right, ["a", "b"], [right, wrong])
    if name != "another d":
        expected = "rerank_hits: query: expected " + message.format("[Lq, d]")
        with pytest.raises(error, match=re.escape(expected)):
            reranking.rerank_hits(wrong, ["a"], [right])


def wrong_pairs():
    q, d = torch.randn(3, 8), torch.randn(4, 8)
    yield [q, q], [d.half(), d.half()], TypeError, "d_embs[0]: expected torch.float32, as q_embs[0], got torch.float16"
    yield [q, q], [d, d.half()], TypeError, "d_embs[1]: expected torch.float32, as q_embs[0], got torch.float16"
    yield [q, q.half()], [d, d], TypeError, "q_embs[1]: expected torch.float32, as q_embs[0], got torch.float16"
    yield [q, q], [d, d[:, :4]], ValueError, "d_embs[1]: expected [L, 8], got [4, 4]"
    yield [q, q], [d, d[None]], ValueError, "d_embs[1]: expected [L, 8], got [1, 4, 8]"
    yield [q[0], q], [d, d], ValueError, "q_embs[0]: expected [L, d], got [8]"
    yield [q[:, :0]], [d[:, :0]], ValueError, "q_embs[0]: expected d >= 1, got [3, 0]"
    yield [q, q], [d, None], TypeError, "d_embs[1]: expected a floating-point Tensor, got NoneType"
    yield [q, q], [d, d.int()], TypeError, "d_embs[1]: expected a floating-point Tensor, got torch.int32"
    yield [q, q], [d, d.to("meta")], ValueError, "d_embs[1]: expected device cpu, as q_embs[0], got meta"


@pytest.mark.parametrize(("queries", "documents", "error", "message"), list(wrong_pairs()))
def test_errors_about_pairs_name_the_pair(queries, documents, error, message):
    with pytest.raises(error, match=re.escape(f"compute_maxsim_score_batched: {message}")):
        reranking.compute_maxsim_score_batched(queries, documents)


def test_autocast_scores_pairs_of_several_dtypes():
    q, d = torch.randn(3, 8), torch.randn(4, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = reranking.compute_maxsim_score_batched([q], [d])
    close(found, by_hand(q.bfloat16().float(), d.float()))


@pytest.mark.parametrize("device", DEVICES)
def test_server_pairs_match_single_pairs(device):
    """Cached queries repeat. Documents are slices of a batch or separate tensors, and some are empty."""
    batch = torch.randn(40, 8, device=device)
    slices = [*batch.split([5, 0, 7, 20, 8])]
    a, b = torch.randn(3, 8, device=device), torch.randn(6, 8, device=device)
    for documents in (
        slices,
        slices[::-1],
        [d.clone() for d in slices],
        [*slices[:3], *(d.clone() for d in slices[3:])],
    ):
        for queries in (
            [a] * 5,
            [a, b, a, b, b],
            [a, a, a, b, b],
            [torch.randn(n, 8, device=device) for n in (1, 2, 3, 4, 5)],
        ):
            scores = reranking.compute_maxsim_score_batched(queries, documents)
            assert len(scores) == 5 and all(s.shape == () and s.dtype == torch.float32 for s in scores)
            expected = [
                by_hand(q, d) if len(d) else q.new_tensor(-torch.inf) for q, d in zip(queries, documents, strict=True)
            ]
            close(torch.stack(scores), torch.stack(expected), rtol=1e-5, atol=1e-5)
    assert reranking.compute_maxsim_score_batched([], []) == []
    with pytest.raises(ValueError, match="d_embs: expected 1"):
        reranking.compute_maxsim_score_batched([a], slices)


def test_adjacent_slices_are_packed_without_a_copy():
    batch = torch.randn(40, 8)
    rows, begins = reranking._pack_documents(batch[4:].split([6, 10, 20]))
    assert rows.data_ptr() == batch[4:].data_ptr() and rows.shape == (36, 8) and begins == [0, 6, 16]
    rows, begins = reranking._pack_documents([batch[:4, :4], batch[4:6, :4]])
    assert rows.shape == (6, 4) and begins == [0, 4]
    close(rows, batch[:6, :4])


def test_slices_with_negative_bit_match_single_pairs():
    query, batch = torch.randn(3, 8), torch.randn(9, 8)
    first, negated = batch[:4], torch._neg_view(batch)[4:]
    for documents in ([first, negated], [negated, first], [negated]):
        found = reranking.compute_maxsim_score_batched([query] * len(documents), documents)
        close(torch.stack(found), torch.stack([by_hand(query, d) for d in documents]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_vllm_runner_pairs_match_its_own_scores(device, dtype, monkeypatch):
    """Run two steps of the worker: it caches queries, then documents of both arrive as views of one token buffer."""
    late = pytest.importorskip("vllm.v1.pool.late_interaction", reason="vLLM is not installed")
    of_runner = pytest.importorskip("vllm.v1.pool.late_interaction_runner", reason="vLLM is not installed")
    queries, documents = (torch.randn(n, 16, device=device).to(dtype) for n in (9, 40))
    calls = []

    def scored(q_embs, d_embs):
        calls.append(len(d_embs))
        return reranking.compute_maxsim_score_batched(q_embs, d_embs)

    def answers():
        runner = of_runner.LateInteractionRunner(enable_flash=False)  # its kernel supports single queries only

        def step(outputs, asked, finished):
            params = [SimpleNamespace(late_interaction_params=of_request) for of_request in asked]
            names = [f"request {i}" for i in range(len(asked))]
            return runner.postprocess_pooler_output(list(outputs), params, names, finished)

        cached = [late.build_late_interaction_query_params(key, 3) for key in "ab"]
        step(queries.split([3, 6]), cached, [True, True])
        a, b = (late.build_late_interaction_doc_params(key) for key in "ab")
        sizes, finished = [5, 1, 7, 20, 4, 3], [True, True, True, False, True, True]
        return step(documents.split(sizes), [a, b, a, a, None, b], finished)

    expected = answers()
    monkeypatch.setattr(of_runner, "compute_maxsim_score_batched", scored)
    found = answers()
    assert calls == [4] and [x.shape for x in found] == [x.shape for x in expected]
    close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_server_pairs_do_not_synchronize():
    batch, query = torch.randn(40, 8, device="cuda"), torch.randn(3, 8, device="cuda")
    other = query.clone()
    queries, documents = [query, other, query], batch.split([20, 12, 8])
    reranking.compute_maxsim_score_batched(queries, documents)
    torch.cuda.set_sync_debug_mode("error")
    try:
        reranking.compute_maxsim_score_batched(queries, documents)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_haystack_component(monkeypatch):
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    pytest.importorskip("haystack", reason="haystack-ai is not installed")
    from haystack import Document, Pipeline

    from lik_ops.integrations.haystack import MaxSimRanker

    vectors = [[[0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.5]]]
    documents = [Document(content=str(i), meta={"multivector_embedding": v}) for i, v in enumerate(vectors)]
    pipeline = Pipeline()
    pipeline.add_component("ranker", MaxSimRanker(top_k=2))
    asked = {"query_multivector_embedding": [[1.0, 0.0], [0.0, 1.0]], "documents": documents}
    found = pipeline.run({"ranker": asked})["ranker"]["documents"]
    assert [(d.content, d.score) for d in found] == [("1", 2.0), ("0", 1.0)]
    assert documents[0].score is None, "the caller's stay as they are"
    with pytest.raises(ValueError, match="expected each with a multivector_embedding"):
        MaxSimRanker().run([Document(content="bare")], [[1.0, 0.0]])
    ragged = Document(id="x", content="ragged", meta={"multivector_embedding": [[1.0, 2.0], [1.0]]})
    with pytest.raises(ValueError, match=r"multivector_embedding of x: expected \[L, 2\], got rows of 1 to 2"):
        MaxSimRanker().run([*documents, ragged], [[1.0, 0.0]])
    with pytest.raises(ValueError, match=r"query_multivector_embedding: expected \[Lq, d\], got \[2\]"):
        MaxSimRanker().run(documents, [1.0, 0.0])


def test_haystack_loads_a_saved_pipeline_that_trusts_the_module(monkeypatch):
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    pytest.importorskip("haystack", reason="haystack-ai is not installed")
    from haystack import Pipeline

    from lik_ops.integrations.haystack import MaxSimRanker

    pipeline = Pipeline()
    pipeline.add_component("ranker", MaxSimRanker(top_k=2, normalize=True))
    loaded = Pipeline.from_dict(pipeline.to_dict(), allowed_modules=["lik_ops.integrations.haystack"])
    ranker = loaded.get_component("ranker")
    assert isinstance(ranker, MaxSimRanker) and (ranker.top_k, ranker.normalize, ranker.device) == (2, True, None)


def test_qdrant_example():
    pytest.importorskip("qdrant_client", reason="qdrant-client is not installed")
    command = [sys.executable, str(ROOT / "examples" / "rerank_qdrant.py")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr[-2000:]
    assert said.stdout.startswith("document   7")
