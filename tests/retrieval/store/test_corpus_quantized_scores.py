"""Test that scores of a `lik_ops.Corpus` of quantized documents have the bits of documents in memory."""

import contextlib
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lik_ops
from lik_ops import Corpus
from lik_ops.formats.table import FORMATS
from lik_ops.ops.fast_path import eager
from lik_ops.retrieval import copying, sources
from lik_ops.retrieval.store.layout import StorageLayout

from ..test_retrieve import assert_same
from .test_corpus import DEVICES, DTYPES, draw
from .test_corpus_quantized import BYTES, SCALES, bounds, every_format, every_scale, in_memory, written

pytest.importorskip("safetensors.torch", reason="pip install '.[retrieval]'")


def joined(part):
    raise AssertionError("joined in memory")


@pytest.mark.parametrize("device", DEVICES)
@every_format
@every_scale
def test_results_are_bitwise_equal_to_in_memory_documents(device, format, scale, tmp_path, monkeypatch):
    dtype = DTYPES[(list(FORMATS).index(format) + SCALES.index(scale)) % 4]
    lengths = [i % 9 for i in range(30)]
    corpus, documents = written(tmp_path, format, scale, dtype, 16, lengths, (7, 13, 10))
    made, cu_seqlens = in_memory(documents, format, scale)
    Q = torch.randn(3, 5, 16).to(device, dtype)
    q_mask = torch.rand(3, 5, device=device) > 0.3
    q_weight = torch.rand(3, 5, device=device, dtype=torch.promote_types(dtype, torch.float32))
    resident, on_device = {"cu_seqlens_d": cu_seqlens.to(device)}, made.to(device)
    for options in ({}, {"q_mask": q_mask, "q_weight": q_weight, "normalize": True}):
        expected = lik_ops.retrieve(Q, on_device, 12, **resident, **options)
        scores = lik_ops.maxsim_varlen(Q.flatten(0, 1), on_device, torch.arange(4, device=device) * 5, **resident)
        for budget, chunk in ((1, None), (300, None), (1 << 20, None), (1, 13)):
            monkeypatch.setattr(sources, "choose_part_bytes", lambda device, budget=budget: budget)
            assert_same(lik_ops.retrieve(Q, corpus, 12, chunk=chunk, **options), expected)
            if not options:
                assert torch.equal(lik_ops.maxsim_streamed(Q, corpus, chunk=chunk), scores)
        one = {name: x[1] if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        assert_same(lik_ops.retrieve(Q[1], corpus, 12, **one), (expected[0][1], expected[1][1]))
    low = lik_ops.retrieve(Q, corpus, 30, largest=False)
    assert torch.equal(low[0], scores.gather(1, low[1])) and torch.equal(low[0], scores.sort(dim=1).values)


@pytest.mark.parametrize("device", DEVICES)
@every_format
@every_scale
def test_score_and_rerank_are_bitwise_equal_to_retrieve(device, format, scale, tmp_path, monkeypatch):
    corpus, documents = written(tmp_path, format, scale)
    made, cu_seqlens = in_memory(documents, format, scale)
    Q, w = torch.randn(3, 5, 20).to(device), torch.rand(3, 5).to(device)
    best, where = lik_ops.retrieve(Q, made.to(device), 10, cu_seqlens_d=cu_seqlens.to(device), q_weight=w)
    of_all = torch.empty_like(best).scatter_(1, where, best)
    indices = torch.tensor([[0, 7, -1, 2, 2], [1, 1, 6, 5, 4], [3, 9, -1, 0, 8]])
    expected = of_all.gather(1, indices.clamp(min=0).to(device)).masked_fill(indices.to(device) < 0, -torch.inf)
    for budget in (1, 60, 1 << 20):
        monkeypatch.setattr(sources, "choose_part_bytes", lambda device, budget=budget: budget)
        assert torch.equal(corpus.score(Q, indices, q_weight=w), expected)
        assert_same(corpus.rerank(Q, list(range(9, -1, -1)), 4, q_weight=w), (best[:, :4], where[:, :4]))
        assert torch.equal(corpus.score(Q[1], indices[1], q_weight=w[1]), expected[1])


def test_quantized_corpus_does_not_use_the_fast_path(tmp_path, monkeypatch):
    """The fast path would read the placeholder for their tokens."""
    corpus, _ = written(tmp_path, "int8")
    taken = []
    monkeypatch.setattr(eager, "try_maxsim_ragged", lambda *args, **kwargs: taken.append(args))
    Q = torch.randn(2, 3, 20)
    for call in (lambda: lik_ops.retrieve(Q, corpus, 3), lambda: corpus.score(Q, [1]), lambda: corpus.rerank(Q, [1])):
        call()
    assert not taken


def test_parts_of_several_shards_are_copied_once(tmp_path, monkeypatch):
    """Copies to a device, simulated by a CPU, are never joined, and document scales are copied as stored."""
    copied = []

    class Counting(copying.CopyLanes):
        def copy(self, slot, pairs):
            copied.append(sum(x.nbytes for x, _ in pairs))
            super().copy(slot, pairs)

    def on_device(parts, device, nbytes):
        return copying.DoubleBuffer(device, nbytes, Counting()).copy(parts)

    monkeypatch.setattr("lik_ops.retrieval._streamed.iterate_on_device", on_device)
    monkeypatch.setattr(sources.DocumentPart, "join_pieces", joined)
    lengths = [i % 9 for i in range(60)]
    Q = torch.randn(3, 5, 20)
    for format, scale in itertools.product(FORMATS, SCALES):
        path = tmp_path / format / scale
        corpus, documents = written(path, format, scale, torch.float16, lengths=lengths, shards=(7,) * 9)
        made, cu_seqlens = in_memory(documents, format, scale)
        expected = lik_ops.retrieve(Q.half(), made, 12, cu_seqlens_d=cu_seqlens)
        numbers, scales = BYTES[format]
        rows = sum(lengths) if scale == "token" else len(lengths)
        for chunk in (None, 1, 13, 60):
            copied.clear()
            assert_same(lik_ops.retrieve(Q.half(), corpus, 12, chunk=chunk), expected)
            assert sum(copied) == sum(lengths) * numbers + rows * scales


@given(
    lengths=st.lists(st.integers(0, 9), max_size=30),
    budget=st.integers(1, 400),
    format=st.sampled_from(list(FORMATS)),
    scale=st.sampled_from(SCALES),
)
def test_ranges_cover_every_document_once_and_keep_to_the_budget(lengths, budget, format, scale):
    source = sources.PackedSource(bounds(lengths), sum(lengths), StorageLayout(20, torch.float16, format, scale))
    ranges = source.ranges(0, len(lengths), None, budget)
    assert [i for a, b in ranges for i in range(a, b)] == list(range(len(lengths)))
    assert all(source.nbytes(a, b) <= budget or b - a == 1 for a, b in ranges)
    bits = [(source.nbytes(a, b) + source.nbytes(b, c)) > budget for (a, b), (_, c) in itertools.pairwise(ranges)]
    assert all(bits), "no more ranges than it takes"


def test_empty_corpus_and_empty_documents_can_be_searched(tmp_path):
    corpus = Corpus.create(tmp_path, 8, torch.float32, "int8", "document")
    Q = torch.randn(2, 3, 8)
    assert lik_ops.retrieve(Q, corpus, 5)[0].shape == (2, 0) and lik_ops.maxsim_streamed(Q, corpus).shape == (2, 0)
    assert corpus.score(Q, [-1]).tolist() == [[-torch.inf]] * 2 and corpus.documents()[0].shape == (0, 8)
    corpus.append(draw([0, 0]))
    corpus.append(torch.empty(0, 8), lengths=[0])
    assert (lik_ops.retrieve(Q, corpus, 5)[0] == -torch.inf).all() and len(Corpus.open(tmp_path)) == 3
    assert [x.shape for x in corpus] == [(0, 8)] * 3


def test_queries_need_the_corpus_dtype_or_autocast(tmp_path):
    corpus, documents = written(tmp_path, "int8", dtype=torch.float16)
    Q = torch.randn(2, 3, 20)
    for call in (lambda: lik_ops.retrieve(Q, corpus, 3), lambda: corpus.score(Q, [1, 2])):
        with pytest.raises(TypeError, match=r"D: expected the dtype of Q, torch.float32, got torch.float16: convert"):
            call()
    made, cu_seqlens = in_memory(documents, "int8")
    with torch.autocast("cpu", torch.bfloat16):
        found = lik_ops.retrieve(Q, corpus, 10), corpus.rerank(Q, range(10))
        expected = lik_ops.retrieve(Q.bfloat16(), made, 10, cu_seqlens_d=cu_seqlens)
    assert_same(found[0], expected)
    assert_same(found[1], expected)


def test_query_gradients_match_dequantized_documents(tmp_path):
    corpus, _ = written(tmp_path, "int8")
    Q = torch.randn(2, 3, 20, requires_grad=True)
    scores = corpus.score(Q, [1, 2])
    assert torch.equal(scores, corpus.score(Q.detach(), [1, 2]))
    (grad,) = torch.autograd.grad(scores.sum(), Q)
    (expected,) = torch.autograd.grad(lik_ops.maxsim(Q, [corpus[1], corpus[2]]).sum(), Q)
    torch.testing.assert_close(grad, expected)
    assert not corpus.rerank(Q, [1, 2])[0].requires_grad and not lik_ops.retrieve(Q, corpus, 2)[0].requires_grad


def test_converted_corpus_as_coarse_gives_exact_search(tmp_path):
    """The converted documents in memory, which are small, select what to read from a corpus on disk."""
    documents = [torch.nn.functional.normalize(x, dim=-1) for x in draw([3, 0, 7, 1, 5] * 8, 16)]
    corpus = Corpus.create(tmp_path / "corpus", 16, torch.float32)
    for first in range(0, 40, 15):
        corpus.append(documents[first : first + 15])
    Q = torch.randn(3, 5, 16)
    expected = lik_ops.retrieve(Q, corpus, 6)
    for format, scale in itertools.product(FORMATS, SCALES):
        small = corpus.quantize(tmp_path / f"{format}-{scale}", format, scale)
        found = lik_ops.retrieve(Q, corpus, 6, coarse=small.documents()[0])
        assert_same(found[:2], expected)
        assert (found.proven == 6).all()
    message = "coarse: expected a Quantized, as `documents` of a Corpus with a format, got a Corpus"
    with pytest.raises(TypeError, match=message):
        lik_ops.retrieve(Q, corpus, 6, coarse=small)
    with pytest.raises(TypeError, match=f"D: expected unquantized tokens with coarse, got a Corpus in {small.format}"):
        lik_ops.retrieve(Q, small, 6, coarse=small.documents()[0])


@pytest.mark.parametrize("how", ["default", "block"])
def test_a_default_device_changes_nothing(how, tmp_path):
    documents, Q = draw((3, 0, 7, 1), 20), torch.randn(2, 3, 20)
    made, cu_seqlens = in_memory(documents, "uint8", "document")
    expected = lik_ops.retrieve(Q, made, 4, cu_seqlens_d=cu_seqlens)
    plain = Corpus.create(tmp_path / "plain", 20, torch.float32)
    plain.append(documents)
    if how == "default":
        torch.set_default_device("meta")
    try:
        with torch.device("meta") if how == "block" else contextlib.nullcontext():
            small = plain.quantize(tmp_path / "small", "uint8", "document")
            corpus = Corpus.create(tmp_path / "corpus", 20, torch.float32, "uint8", "document")
            corpus.append(documents[:2])
            corpus.append(small.documents(2, 4)[0], lengths=[7, 1])
            found = [lik_ops.retrieve(Q, x, 4) for x in (small, corpus)] + [corpus.rerank(Q, range(4))]
            tokens = corpus[2]
    finally:
        torch.set_default_device(None)
    for each in found:
        assert_same(each, expected)
    assert torch.equal(tokens, made.dequantize()[3:10])
