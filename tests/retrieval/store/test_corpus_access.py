"""Test documents of a corpus by index: selection, iteration, scores, and reranking."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lik_ops
from lik_ops import Corpus, reference
from lik_ops.retrieval import sources

from ..test_retrieve import assert_same, ranked
from .test_corpus import DEVICES, DTYPES, draw

pytest.importorskip("safetensors", reason="pip install '.[retrieval]'")
LENGTHS = (3, 0, 7, 1, 5, 2, 4, 6)


def create_corpus(path, dtype=torch.float32, d=8, lengths=LENGTHS, shards=(3, 1, 4)):
    documents = draw(lengths, d, dtype)
    corpus, rest = Corpus.create(path, d, dtype), iter(documents)
    for count in shards:
        corpus.append(list(itertools.islice(rest, count)))
    return Corpus.open(path), documents


def same(found, expected):
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# selecting documents


@pytest.mark.parametrize("dtype", DTYPES)
def test_indexing_returns_documents(dtype, tmp_path):
    corpus, documents = create_corpus(tmp_path, dtype)
    assert len(corpus) == len(documents)
    for i in range(-8, 8):
        assert corpus[i].dtype == dtype and torch.equal(corpus[i], documents[i])
    assert torch.equal(corpus[np.int64(2)], documents[2]) and torch.equal(corpus[torch.tensor(-1)], documents[-1])
    for part in (slice(None), slice(2, 5), slice(-3, None), slice(6, 1, -2), slice(3, 3), slice(5, 99)):
        assert same(corpus[part], documents[part])
    for chosen in ([4, 0, 4, -1], (2,), [], range(3), np.array([7, 1]), torch.tensor([1, 2], dtype=torch.int32)):
        assert same(corpus[chosen], [documents[int(i)] for i in chosen])


@pytest.mark.filterwarnings("error")
def test_integer_arrays_of_any_layout_select_documents(tmp_path):
    corpus, documents = create_corpus(tmp_path)
    chosen = np.array([7, 1, 3])
    fixed = chosen.copy()
    fixed.flags.writeable = False
    swapped = chosen.astype(chosen.dtype.newbyteorder("S"))
    unsigned = [chosen.astype(f"u{n}") for n in (1, 2, 4, 8)]
    for x in (chosen[::-1], fixed, swapped, np.broadcast_to(chosen[:1], 3), *unsigned, torch.from_numpy(unsigned[3])):
        assert same(corpus[x], [documents[int(i)] for i in x])
        indices = corpus.rerank(torch.randn(2, 3, 8), x)[1]
        assert set(indices.flatten().tolist()) == {int(i) for i in x}
    with pytest.raises(TypeError, match=f"Corpus: index: expected integers of int64, got {2**64 - 1}"):
        corpus[np.array([3, 2**64 - 1], dtype=np.uint64)]


@pytest.mark.parametrize("index", [8, -9, [0, 8], np.array([-9])])
def test_out_of_range_index_raises_index_error(index, tmp_path):
    corpus, _ = create_corpus(tmp_path)
    with pytest.raises(IndexError, match=r"Corpus: index: expected an index of 8 documents, got (8|-9)"):
        corpus[index]


@pytest.mark.parametrize("index", [1.0, "1", None, True, [1.5], ["a"], [[1], [2]], [True], torch.zeros(2), (1, None)])
def test_unsupported_index_raises_type_error(index, tmp_path):
    corpus, _ = create_corpus(tmp_path)
    with pytest.raises(TypeError, match="Corpus: index: expected"):
        corpus[index]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_empty_selections_ignore_the_default_dtype(kind, tmp_path):
    corpus, _ = create_corpus(tmp_path)
    Q, before = torch.randn(2, 3, 8), torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        for none in ([], (), np.array([], dtype=np.float32), torch.empty(0, dtype=torch.float32)):
            assert corpus[none] == [] and corpus.score(Q, none).shape == corpus.rerank(Q, none)[0].shape == (2, 0)
        assert corpus.score(Q, [[], []]).shape == (2, 0)
        corpus.append(torch.empty(0, 8, dtype=torch.float32), lengths=[])
    finally:
        torch.set_default_dtype(before)
    assert len(corpus) == 8


def test_iteration_covers_documents_present_at_its_start(tmp_path):
    corpus, documents = create_corpus(tmp_path)
    assert same(list(corpus), documents) and same(list(reversed(corpus)), documents[::-1])
    walk = iter(corpus)
    first = next(walk)
    corpus.append(draw([1]))
    assert 1 + sum(1 for _ in walk) == 8, "those that there were when it began"
    assert torch.equal(first, documents[0]) and sum(1 for _ in corpus) == 9
    assert list(Corpus.create(tmp_path / "empty", 8, torch.float32)) == []


def test_iterated_document_storage_holds_one_document(tmp_path):
    corpus, _ = create_corpus(tmp_path, lengths=[1000] * 8, d=64)
    for document in corpus:
        assert document.untyped_storage().nbytes() == document.nbytes


# scores


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("budget", [1, 300, 1 << 20])
def test_score_matches_reference_and_retrieve(device, dtype, budget, tmp_path, monkeypatch):
    """Scores equal the reference, and have the bits of `retrieve`, for any part sizes."""
    monkeypatch.setattr(sources, "choose_part_bytes", lambda device: budget)
    corpus, documents = create_corpus(tmp_path, dtype, 16)
    Q = torch.randn(3, 5, 16).to(device, dtype)
    q_mask = torch.tensor([[1, 0, 1, 1, 0], [1] * 5, [0] * 5], dtype=torch.bool, device=device)
    q_weight = torch.rand(3, 5, dtype=torch.float64).to(device, torch.promote_types(dtype, torch.float32))
    indices = torch.tensor([[0, 7, -1, 2, 2], [1, 1, 6, 5, 4], [3, 1, -1, 0, 7]])
    for options in ({}, {"q_mask": q_mask, "q_weight": q_weight, "normalize": True}):
        found = corpus.score(Q, indices, **options)
        assert found.shape == (3, 5) and found.device.type == device
        assert found.dtype == torch.promote_types(dtype, torch.float32)
        of_all = torch.stack(
            [
                reference.maxsim(Q.double(), x.double().to(device)[None], **{**options, **_wide(options)})[:, 0]
                for x in documents
            ],
            1,
        )
        expected = of_all.gather(1, indices.clamp(min=0).to(device))
        expected = expected.masked_fill(indices.to(device) < 0, -torch.inf)
        torch.testing.assert_close(found.double(), expected, rtol=1e-3 if dtype.itemsize == 2 else 1e-5, atol=1e-3)
        best, where = lik_ops.retrieve(Q, corpus, 8, **options)
        column = {(i, j): best[i, k] for i, row in enumerate(where.tolist()) for k, j in enumerate(row)}
        for i, row in enumerate(indices.tolist()):
            for k, j in enumerate(row):
                assert j < 0 or torch.equal(found[i, k], column[i, j])
        one = {name: x[1] if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        assert torch.equal(corpus.score(Q[1], indices[1], **one), found[1])


def _wide(options):
    return {"q_weight": options["q_weight"].double()} if options else {}


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    Nq=st.integers(0, 3),
    K=st.integers(0, 6),
    shared=st.booleans(),
    budget=st.integers(1, 400),
    data=st.data(),
)
def test_score_and_rerank_match_maxsim_for_any_indices(tmp_path_factory, lengths, Nq, K, shared, budget, data):
    corpus, documents = create_corpus(tmp_path_factory.mktemp("corpus"), lengths=lengths, shards=(5, 4, 3))
    each = st.lists(st.integers(-1, len(lengths) - 1), min_size=K, max_size=K)
    chosen = data.draw(each if shared else st.lists(each, min_size=Nq, max_size=Nq))
    indices = torch.tensor(chosen, dtype=torch.int64).reshape((K,) if shared else (Nq, K))
    Q = torch.randint(-2, 3, (Nq, 4, 8)).float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "choose_part_bytes", lambda device: budget)
        found, (scores, where) = corpus.score(Q, indices), corpus.rerank(Q, indices)
    of_all = lik_ops.maxsim(Q, documents)
    rows = indices.expand(Nq, K)
    expected = of_all.gather(1, rows.clamp(min=0)).masked_fill(rows < 0, -torch.inf)
    assert torch.equal(found, expected)
    for i in range(Nq):
        order = sorted(range(K), key=lambda k: (-expected[i, k].item(), rows[i, k] < 0, rows[i, k].item()))
        assert where[i].tolist() == rows[i, order].tolist() and torch.equal(scores[i], expected[i, order])


def test_rerank_of_all_documents_matches_retrieve(tmp_path):
    corpus, _ = create_corpus(tmp_path)
    Q = torch.randint(-1, 2, (3, 4, 8)).float()
    backwards = list(range(7, -1, -1))
    for k in (0, 3, 8, 50):
        assert_same(corpus.rerank(Q, backwards, k), lik_ops.retrieve(Q, corpus, k))
    assert_same(corpus.rerank(Q, backwards), lik_ops.retrieve(Q, corpus, 8))
    flat = corpus.rerank(Q[0], backwards, 3)
    assert flat[0].shape == (3,)
    assert_same(flat, lik_ops.retrieve(Q[0], corpus, 3))


def test_rerank_of_retrieved_candidates_matches_maxsim(tmp_path):
    """Candidates come from a coarser search, as in the documentation."""
    corpus, documents = create_corpus(tmp_path)
    Q = torch.randn(2, 4, 8)
    _, candidates = lik_ops.retrieve(Q[:, :1], corpus, 5)
    found = corpus.rerank(Q, candidates, top_k=2)
    scores = lik_ops.maxsim(Q, documents).gather(1, candidates)
    expected = ranked(scores, 2)
    assert_same(found, (expected[0], candidates.gather(1, expected[1])))


def test_rerank_orders_nan_first_and_index_minus_one_last(tmp_path):
    corpus = Corpus.create(tmp_path, 8, torch.float32)
    corpus.append([torch.ones(1, 8), torch.empty(0, 8), torch.full((1, 8), torch.nan)])
    scores, indices = corpus.rerank(torch.ones(2, 8), [-1, 1, 0, 2])
    assert indices.tolist() == [2, 0, 1, -1]
    assert scores[0].isnan() and scores[1:].tolist() == [16.0, -torch.inf, -torch.inf]


@pytest.mark.parametrize("budget", [1, 1 << 20])
def test_gradients_of_queries_and_weights(budget, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "choose_part_bytes", lambda device: budget)
    corpus, documents = create_corpus(tmp_path, torch.float64)
    indices = torch.tensor([[0, 7, -1, 2], [1, 6, 6, 4]])
    Q, weight, upstream = torch.randn(2, 3, 8).double(), torch.rand(2, 3).double(), torch.randn(2, 4).double()
    of, expected = [(Q.clone().requires_grad_(), weight.clone().requires_grad_()) for _ in range(2)]
    kept = torch.isfinite(scores := corpus.score(of[0], indices, q_weight=of[1], normalize=True))
    (scores * upstream)[kept].sum().backward()
    for i, j in kept.nonzero().tolist():
        one = reference.maxsim(expected[0][i], documents[indices[i, j]], q_weight=expected[1][i], normalize=True)
        (one * upstream[i, j]).sum().backward()
    for x, y in zip(of, expected, strict=True):
        torch.testing.assert_close(x.grad, y.grad)
    assert not corpus.rerank(of[0], indices)[0].requires_grad
    for nothing in (torch.full((2, 3), -1), torch.zeros(2, 0, dtype=torch.int64)):
        scores = corpus.score(of[0], nothing, q_weight=of[1])
        assert torch.equal(scores, torch.full(nothing.shape, -torch.inf).double())
        for gradient in torch.autograd.grad(scores.exp().sum(), of):
            assert not gradient.any()


def test_score_reads_each_chosen_document_once(tmp_path, monkeypatch):
    corpus, _ = create_corpus(tmp_path)
    read, inner = [], type(corpus._snapshot).gather_documents
    monkeypatch.setattr(
        type(corpus._snapshot),
        "gather_documents",
        lambda self, x, pinned: read.extend(x.tolist()) or inner(self, x, pinned),
    )
    for budget in (1, 100, 1 << 20):
        monkeypatch.setattr(sources, "choose_part_bytes", lambda device, budget=budget: budget)
        corpus.score(torch.randn(2, 3, 8), [[7, 2, 2], [0, -1, 7]])
        assert read == [0, 2, 7]
        read.clear()


def test_score_under_autocast_matches_cast_inputs(tmp_path):
    corpus, documents = create_corpus(tmp_path, torch.float16)
    Q = torch.randn(2, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = corpus.score(Q, range(8))
    assert torch.equal(found, lik_ops.maxsim(Q.bfloat16(), [x.bfloat16() for x in documents]))


BAD = {
    "Q": (dict(Q=[1]), TypeError, r"Q\[0\]: expected a Tensor, got int"),
    "Q rank": (dict(Q=torch.zeros(8)), ValueError, r"Q: expected \[Lq, d\] or \[Nq, Lq, d\], got \[8\]"),
    "Q dtype": (
        dict(Q=torch.zeros(2, 3, 8).half()),
        TypeError,
        r"D: expected the dtype of Q, torch.float16, got torch.float32: convert the queries, Q.to\(torch.float32\)",
    ),
    "Q integers": (dict(Q=torch.zeros(2, 3, 8).int()), TypeError, "Q: expected float16"),
    "d": (dict(Q=torch.zeros(2, 3, 7)), ValueError, r"D: expected d = 7 as in Q \[2, 3, 7\], got \[28, 8\]"),
    "indices": (dict(indices=[[0, 8], [1, 1]]), ValueError, r"indices: .* 8 documents, or -1, got 8 at \[0, 1\]"),
    "below": (dict(indices=[0, -2]), ValueError, r"indices: expected indices of 8 documents, or -1, got -2 at \[1\]"),
    "rows": (dict(indices=[[0]]), ValueError, r"indices: expected \[2, K\] or \[K\], got \[1, 1\]"),
    "flat": (dict(Q=torch.zeros(3, 8), indices=[[0], [1]]), ValueError, r"indices: expected \[K\], got \[2, 1\]"),
    "fractions": (dict(indices=torch.zeros(2, 2)), TypeError, "indices: expected integers, got torch.float32"),
    "bools": (dict(indices=[True, False]), TypeError, "indices: expected integers, got torch.bool"),
    "words": (dict(indices="abc"), TypeError, "indices: expected integers, got 'abc'"),
    "none": (dict(indices=None), TypeError, "indices: expected integers, got None"),
    "one": (dict(indices=3), ValueError, r"indices: expected \[2, K\] or \[K\], got \[\]"),
    "ragged": (dict(indices=[[1], [1, 2]]), TypeError, "indices: expected integers"),
    "generator": (dict(indices=(i for i in (1, 2))), TypeError, "indices: expected integers, got <generator"),
    "beyond": (dict(indices=[1 << 70]), TypeError, "indices: expected integers"),
    "many": (dict(indices=["x"] * 9999), TypeError, "indices: expected integers, got .{,99}$"),
    "q_mask": (dict(q_mask=np.ones((2, 4), bool)), ValueError, r"q_mask: expected shape \[2, 3\]"),
    "q_weight": (dict(q_weight=torch.ones(2, 4)), ValueError, "q_weight: expected shape"),
    "normalize": (dict(normalize="no"), TypeError, "normalize: expected a bool, got str"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_wrong_argument(case, tmp_path):
    arguments, error, message = BAD[case]
    corpus, _ = create_corpus(tmp_path)
    for name in ("score", "rerank"):
        with pytest.raises(error, match=f"Corpus.{name}: {message}"):
            getattr(corpus, name)(**{"Q": torch.zeros(2, 3, 8), "indices": [0, 1], **arguments})
    for top_k, raised in ((2.5, TypeError), (-1, ValueError), (True, TypeError)):
        with pytest.raises(raised, match=r"Corpus.rerank: top_k: expected"):
            corpus.rerank(torch.zeros(2, 3, 8), [0, 1], top_k)
