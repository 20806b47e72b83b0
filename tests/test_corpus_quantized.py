"""`lik_ops.Corpus` of quantised documents: what it holds, in how many bytes, and the bits of its scores."""

import contextlib
import hashlib
import itertools
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lik_ops
from lik_ops import Corpus, Quantized, quantize
from lik_ops.formats import FORMATS
from lik_ops.ops import eager
from lik_ops.retrieval import copying, sources, storage
from lik_ops.retrieval.layout import Layout
from lik_ops.retrieval.manifest import Manifest, Shard

from .test_corpus import DEVICES, DTYPES, ROOT, draw
from .test_corpus_manifest import edited
from .test_retrieve import assert_same

safetensors = pytest.importorskip("safetensors.torch", reason="pip install '.[retrieval]'")
LENGTHS = (3, 0, 7, 1, 0, 5, 2, 4, 6, 0)
SHARDS = (3, 1, 4, 2)
SCALES = ("token", "document")
BYTES = {"int8": 20 + 4, "uint8": 20 + 8, "fp8_e4m3": 20 + 4, "fp8_e5m2": 20 + 4, "binary": 3 + 4}  # of 20 features
every_format = pytest.mark.parametrize("format", FORMATS)
every_scale = pytest.mark.parametrize("scale", SCALES)


def bounds(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)])


def in_memory(documents, format, scale="token"):
    packed, cu_seqlens = torch.cat(documents), bounds([len(x) for x in documents])
    return quantize(packed, format, scale, cu_seqlens_d=cu_seqlens), cu_seqlens


def written(path, format, scale="token", dtype=torch.float32, d=20, lengths=LENGTHS, shards=SHARDS, ids=None):
    documents = draw(lengths, d, dtype)
    corpus, rest = Corpus.create(path, d, dtype, format, scale), iter(range(len(documents)))
    for count in shards:
        chosen = list(itertools.islice(rest, count))
        corpus.append([documents[i] for i in chosen], ids=None if ids is None else [ids[i] for i in chosen])
    return Corpus.open(path, verify=True), documents


def assert_same_documents(found, expected):
    """The same tensors, but for the form that scales have."""
    assert (found.format, found.d, found.dtype) == (expected.format, expected.d, expected.dtype)
    pairs = [(found.data.view(torch.uint8), expected.data.view(torch.uint8))]
    pairs += zip(found.per_token(), expected.per_token(), strict=True)
    pairs += [(found.error, expected.error), (found.norm, expected.norm)]
    for x, y in pairs:
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x.expand(y.shape), y)


# what it holds


@every_format
@every_scale
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_appended_is_quantised(format, scale, dtype, tmp_path):
    ids = [f"document {i}" for i in range(10)]
    corpus, documents = written(tmp_path, format, scale, dtype, ids=ids)
    assert (corpus.format, corpus.scale, corpus.d, corpus.dtype) == (format, scale, 20, dtype)
    assert corpus.ids == ids and corpus.lengths.tolist() == list(LENGTHS) and len(corpus) == 10
    assert format in repr(corpus)
    for begin, end in itertools.combinations_with_replacement(range(11), 2):
        found, cu_seqlens = corpus.documents(begin, end)
        assert isinstance(found, Quantized) and cu_seqlens.tolist() == bounds(LENGTHS[begin:end]).tolist()
        none = torch.empty(0, 20, dtype=dtype)
        expected, _ = in_memory([none, *documents[begin:end]], format, scale)
        expected = Quantized(**{**vars(expected), "error": expected.error[1:], "norm": expected.norm[1:]})
        assert_same_documents(found, expected)
    made, cu_seqlens = in_memory(documents, format, scale)
    tokens = made.dequantize()
    for i, document in enumerate(corpus):
        expected = tokens[cu_seqlens[i] : cu_seqlens[i + 1]]
        assert document.dtype == dtype
        assert torch.equal(document, expected) and torch.equal(corpus[i], expected)
    assert torch.equal(torch.cat(corpus[[9, 2, -1]]), corpus[2])


@every_format
@every_scale
def test_quantised_documents_are_taken_as_they_are(format, scale, tmp_path):
    documents = draw(LENGTHS, 20)
    made, cu_seqlens = in_memory(documents, format, scale)
    corpus = Corpus.create(tmp_path, 20, torch.float32, format, scale)
    corpus.append(made, lengths=LENGTHS)
    assert_same_documents(corpus.documents()[0], made)
    again, _ = Corpus.open(tmp_path).documents(2, 6)
    corpus.append(again, lengths=cu_seqlens.diff()[2:6])
    corpus.append(documents[:2])
    found, _ = Corpus.open(tmp_path, verify=True).documents(10, 16)
    assert_same_documents(found, in_memory([*documents[2:6], *documents[:2]], format, scale)[0])


def test_one_scale_for_all_is_one_for_each(tmp_path):
    D = torch.randn(9, 20)
    made = quantize(D, "uint8", "tensor", cu_seqlens_d=bounds([4, 0, 5]))
    for scale in SCALES:
        corpus = Corpus.create(tmp_path / scale, 20, torch.float32, "uint8", scale)
        corpus.append(made, lengths=[4, 0, 5])
        assert_same_documents(corpus.documents()[0], Quantized(**{**vars(made), **per_token(made, 9)}))


def test_tensors_that_are_not_contiguous_or_share_memory(tmp_path):
    rows = torch.randint(0, 256, (5, 24), dtype=torch.uint8)
    x, each = torch.rand(5), torch.rand(2)
    made = Quantized(rows[:, :20], x, "uint8", 20, torch.float32, minimum=x, error=each, norm=each)
    corpus = Corpus.create(tmp_path, 20, torch.float32, "uint8")
    corpus.append(made, lengths=[2, 3])
    assert_same_documents(Corpus.open(tmp_path, verify=True).documents()[0], made)


def per_token(made, tokens):
    return {name: x.expand(tokens) for name, x in zip(("scale", "minimum"), made.per_token(), strict=True)}


@every_format
@every_scale
def test_no_more_bytes_than_the_format_needs(format, scale, tmp_path):
    documents = draw([100] * 50, 20)
    Corpus.create(tmp_path, 20, torch.float16, format, scale).append([x.half() for x in documents])
    (shard,) = tmp_path.glob("shard-*")
    scales = 4 * (2 if format == "uint8" else 1)
    tokens = BYTES[format] - (0 if scale == "token" else scales)
    # The documents' lengths, errors and norms, and the names of the tensors.
    assert shard.stat().st_size <= 5000 * tokens + 50 * (16 + (scales if scale == "document" else 0)) + 1000
    with safetensors.safe_open(shard, framework="pt") as file:
        kept = {name: list(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
    each = [5000] if scale == "token" else [50]
    expected = {"data": [5000, 3 if format == "binary" else 20], "scale": each, "error": [50], "norm": [50]}
    assert kept == {**expected, "lengths": [50], **({"minimum": each} if format == "uint8" else {})}


def test_nan_stays_where_it_is(tmp_path):
    documents = draw([2, 3, 1], 8)
    documents[1][2, 5] = torch.nan
    for scale, lost in (("token", [2]), ("document", [0, 1, 2])):
        corpus = Corpus.create(tmp_path / scale, 8, torch.float32, "int8", scale)
        corpus.append(documents)
        assert corpus[1].isnan().all(1).nonzero().flatten().tolist() == lost
        assert not corpus[0].isnan().any() and not corpus[2].isnan().any()
        scores, indices = lik_ops.retrieve(torch.randn(3, 8), corpus, 3)
        assert indices[0] == 1 and scores.isnan().tolist() == [True, False, False]


def test_what_callers_write_to_is_their_own(tmp_path):
    for scale in SCALES:
        corpus, _ = written(tmp_path / scale, "uint8", scale)
        content = {path: path.read_bytes() for path in corpus.path.iterdir()}
        Q = torch.randn(2, 3, 20)
        expected = lik_ops.retrieve(Q, corpus, 4)
        for mine in (corpus.documents(0, 2)[0], corpus.documents()[0]):
            for x in mine.tensors().values():
                x.fill_(7)
        corpus[0].fill_(7)
        assert_same(lik_ops.retrieve(Q, corpus, 4), expected)
        assert {path: path.read_bytes() for path in corpus.path.iterdir()} == content


def test_a_pickled_handle_and_one_of_a_plain_corpus_of_before(tmp_path):
    corpus, _ = written(tmp_path / "small", "fp8_e4m3")
    assert_same_documents(pickle.loads(pickle.dumps(corpus)).documents()[0], corpus.documents()[0])
    plain = Corpus.create(tmp_path / "plain", 8, torch.float32)
    plain.append(draw([3]))
    manifest = plain.__getstate__()["manifest"]
    for name in ("format", "scale"):
        del manifest.__dict__[name]  # as it was pickled before it had these
    found = pickle.loads(pickle.dumps(plain))
    assert found.format is None and torch.equal(found[0], plain[0])


# the files


def test_a_corpus_without_a_format_has_the_files_that_it_had(tmp_path):
    shard = Shard("shard-000000-0123456789abcdef.safetensors", 464, "ab", 2, 7)
    body = (
        '{"d": 8, "documents": 2, "dtype": "float32", "format": "lik_ops.corpus", "has_ids": true, "shards": [{"bytes":'
        ' 464, "documents": 2, "file": "shard-000000-0123456789abcdef.safetensors", "sha256": "ab", "tokens": 7}],'
        ' "version": 1'
    )
    digest = hashlib.sha256(f"{body}}}".encode()).hexdigest()
    text = f'{body}, "sha256": "{digest}"}}\n'
    assert Manifest(8, torch.float32, True, (shard,)).text == text.encode()
    (tmp_path / "manifest.json").write_text(text)
    found = Manifest.read(tmp_path)
    assert found == Manifest(8, torch.float32, True, (shard,)) and found.layout == Layout(8, torch.float32)
    corpus = Corpus.create(tmp_path / "corpus", 8, torch.float32)
    corpus.append(draw([3, 4]), ids=["a", "b"])
    (at,) = corpus.path.glob("shard-*")
    with safetensors.safe_open(at, framework="pt") as file:
        assert set(file.keys()) == {"tokens", "lengths", "ids"}
    assert corpus.format is None and corpus.scale is None


def test_the_manifest_names_the_format(tmp_path):
    """With a version that a lik_ops without formats refuses."""
    corpus, _ = written(tmp_path, "fp8_e5m2", "document")
    content = json.loads((corpus.path / "manifest.json").read_text())
    assert content["version"] == 2 and content["quantized"] == {"format": "fp8_e5m2", "scale": "document"}


WRONG = {
    "none": (lambda c: c.pop("quantized"), "quantized: expected dict, got nothing"),
    "type": (lambda c: c.update(quantized="int8"), "quantized: expected dict, got str"),
    "format": (
        lambda c: c["quantized"].update(format="int4"),
        "quantized.format: expected one of int8, uint8, fp8_e4m3, fp8_e5m2, binary, got 'int4'",
    ),
    "format type": (lambda c: c["quantized"].update(format=8), "quantized.format: expected str, got int"),
    "scale": (
        lambda c: c["quantized"].update(scale="tensor"),
        "quantized.scale: expected one of token, document, got 'tensor'",
    ),
    "no scale": (lambda c: c["quantized"].pop("scale"), "quantized.scale: expected str, got nothing"),
    "version": (lambda c: c.update(version=4), "version: expected 1, 2 or 3, got 4: a newer lik_ops wrote it"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_manifest_that_is_wrong_names_its_path_and_field(case, tmp_path):
    edit, message = WRONG[case]
    written(tmp_path, "int8")
    edited(tmp_path, edit)
    with pytest.raises(ValueError, match=rf"{tmp_path}/manifest.json: the manifest is truncated or corrupt: {message}"):
        Corpus.open(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", "uint8", r"expected data \[10, 20\] of torch.uint8"),
        ("format", "binary", r"expected data \[10, 3\] of torch.uint8"),
        ("scale", "document", r"expected scale \[3\] of torch.float32"),
    ],
)
def test_shards_of_another_format_are_named(field, value, message, tmp_path):
    written(tmp_path, "int8")
    edited(tmp_path, lambda content: content["quantized"].__setitem__(field, value))
    with pytest.raises(ValueError, match=rf"shard-000000-\w+.safetensors: the shard is .*: {message}"):
        Corpus.open(tmp_path)


DAMAGE = {
    "missing": (lambda x: x.pop("scale"), r"expected scale \[10\] of torch.float32"),
    "minimum": (lambda x: x.pop("minimum"), r"expected minimum \[10\] of torch.float32"),
    "error": (lambda x: x.update(error=x["error"][:2]), r"expected error \[3\] of torch.float32"),
    "norm": (lambda x: x.update(norm=x["norm"].double()), r"expected norm \[3\] of torch.float32"),
    "data": (lambda x: x.update(data=x["data"][:, :9].contiguous()), r"expected data \[10, 20\] of torch.uint8"),
    "dtype": (lambda x: x.update(data=x["data"].view(torch.int8)), r"expected data \[10, 20\] of torch.uint8"),
    "tokens": (lambda x: (x.clear(), x.update(tokens=torch.zeros(10, 20))), r"expected data \[10, 20\]"),
    "lengths": (lambda x: x.update(lengths=x["lengths"] + 1), "expected lengths that add up to 10 tokens"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_shard_that_is_corrupt_is_named(case, tmp_path):
    damage, message = DAMAGE[case]
    written(tmp_path, "uint8")
    at = sorted(tmp_path.glob("shard-*"))[0]
    tensors = safetensors.load_file(at)
    damage(tensors)
    safetensors.save_file(tensors, at)
    edited(tmp_path, lambda content: content["shards"][0].update(bytes=at.stat().st_size))
    with pytest.raises(ValueError, match=rf"{at.name}: the shard is truncated or corrupt: {message}"):
        Corpus.open(tmp_path)


# scores


def joined(part):
    raise AssertionError("joined in memory")


@pytest.mark.parametrize("device", DEVICES)
@every_format
@every_scale
def test_searches_have_the_bits_of_documents_in_memory(device, format, scale, tmp_path, monkeypatch):
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
            monkeypatch.setattr(sources, "part_bytes", lambda device, budget=budget: budget)
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
def test_documents_by_their_index_have_the_bits_of_searches(device, format, scale, tmp_path, monkeypatch):
    corpus, documents = written(tmp_path, format, scale)
    made, cu_seqlens = in_memory(documents, format, scale)
    Q, w = torch.randn(3, 5, 20).to(device), torch.rand(3, 5).to(device)
    best, where = lik_ops.retrieve(Q, made.to(device), 10, cu_seqlens_d=cu_seqlens.to(device), q_weight=w)
    of_all = torch.empty_like(best).scatter_(1, where, best)
    indices = torch.tensor([[0, 7, -1, 2, 2], [1, 1, 6, 5, 4], [3, 9, -1, 0, 8]])
    expected = of_all.gather(1, indices.clamp(min=0).to(device)).masked_fill(indices.to(device) < 0, -torch.inf)
    for budget in (1, 60, 1 << 20):
        monkeypatch.setattr(sources, "part_bytes", lambda device, budget=budget: budget)
        assert torch.equal(corpus.score(Q, indices, q_weight=w), expected)
        assert_same(corpus.rerank(Q, list(range(9, -1, -1)), 4, q_weight=w), (best[:, :4], where[:, :4]))
        assert torch.equal(corpus.score(Q[1], indices[1], q_weight=w[1]), expected[1])


def test_the_short_way_of_full_documents_is_not_taken(tmp_path, monkeypatch):
    """It would read the stand-in for their tokens."""
    corpus, _ = written(tmp_path, "int8")
    taken = []
    monkeypatch.setattr(eager, "maxsim_ragged", lambda *args, **kwargs: taken.append(args))
    Q = torch.randn(2, 3, 20)
    for call in (lambda: lik_ops.retrieve(Q, corpus, 3), lambda: corpus.score(Q, [1]), lambda: corpus.rerank(Q, [1])):
        call()
    assert not taken


def test_parts_of_several_shards_are_copied_once(tmp_path, monkeypatch):
    """To a device, with a CPU in its place: never joined before, and scales of documents as they are kept."""
    copied = []

    class Counting(copying.InOrder):
        def copy(self, slot, pairs):
            copied.append(sum(x.nbytes for x, _ in pairs))
            super().copy(slot, pairs)

    def on_device(parts, device, nbytes):
        return copying.DoubleBuffer(device, nbytes, Counting()).copied(parts)

    monkeypatch.setattr("lik_ops.retrieval._streamed.on_device", on_device)
    monkeypatch.setattr(sources.Part, "whole", joined)
    lengths = [i % 9 for i in range(60)]
    Q = torch.randn(3, 5, 20)
    for format, scale in itertools.product(FORMATS, SCALES):
        path = tmp_path / format / scale
        corpus, documents = written(path, format, scale, torch.float16, lengths=lengths, shards=(7,) * 9)
        made, cu_seqlens = in_memory(documents, format, scale)
        expected = lik_ops.retrieve(Q.half(), made, 12, cu_seqlens_d=cu_seqlens)
        scales = 8 if format == "uint8" else 4
        rows = sum(lengths) if scale == "token" else len(lengths)
        for chunk in (None, 1, 13, 60):
            copied.clear()
            assert_same(lik_ops.retrieve(Q.half(), corpus, 12, chunk=chunk), expected)
            assert sum(copied) == sum(lengths) * (3 if format == "binary" else 20) + rows * scales


@given(
    lengths=st.lists(st.integers(0, 9), max_size=30),
    budget=st.integers(1, 400),
    format=st.sampled_from(list(FORMATS)),
    scale=st.sampled_from(SCALES),
)
def test_ranges_cover_every_document_once_and_keep_to_the_budget(lengths, budget, format, scale):
    source = sources.Ragged(bounds(lengths), sum(lengths), Layout(20, torch.float16, format, scale))
    ranges = source.ranges(0, len(lengths), None, budget)
    assert [i for a, b in ranges for i in range(a, b)] == list(range(len(lengths)))
    assert all(source.nbytes(a, b) <= budget or b - a == 1 for a, b in ranges)
    bits = [(source.nbytes(a, b) + source.nbytes(b, c)) > budget for (a, b), (_, c) in itertools.pairwise(ranges)]
    assert all(bits), "no more ranges than it takes"


def test_nothing_to_search(tmp_path):
    corpus = Corpus.create(tmp_path, 8, torch.float32, "int8", "document")
    Q = torch.randn(2, 3, 8)
    assert lik_ops.retrieve(Q, corpus, 5)[0].shape == (2, 0) and lik_ops.maxsim_streamed(Q, corpus).shape == (2, 0)
    assert corpus.score(Q, [-1]).tolist() == [[-torch.inf]] * 2 and corpus.documents()[0].shape == (0, 8)
    corpus.append(draw([0, 0]))
    corpus.append(torch.empty(0, 8), lengths=[0])
    assert (lik_ops.retrieve(Q, corpus, 5)[0] == -torch.inf).all() and len(Corpus.open(tmp_path)) == 3
    assert [x.shape for x in corpus] == [(0, 8)] * 3


def test_queries_are_of_the_dtype_of_the_tokens_or_in_a_region(tmp_path):
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


def test_scores_have_no_gradient(tmp_path):
    corpus, _ = written(tmp_path, "int8")
    Q = torch.randn(2, 3, 20, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"Corpus.score: scores of quantised documents have no gradient"):
        corpus.score(Q, [1, 2])
    with torch.no_grad():
        assert torch.equal(corpus.score(Q, [1, 2]), corpus.score(Q.detach(), [1, 2]))
    assert not corpus.rerank(Q, [1, 2])[0].requires_grad and not lik_ops.retrieve(Q, corpus, 2)[0].requires_grad


def test_two_stages(tmp_path):
    """A corpus on disk, of which small documents in memory say what to read: those that its conversion holds."""
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
    with pytest.raises(TypeError, match="D: expected tokens as they were beside coarse, got a Corpus in binary"):
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
    block = torch.device("meta" if how == "block" else "cpu")
    try:
        with block:
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


# converting


def plain(path, dtype=torch.float32, ids=None):
    return written(path, None, dtype=dtype, ids=ids)


@every_format
@every_scale
@pytest.mark.parametrize("ids", [None, list(range(10)), ["\u00e9\ud800"] * 10])
def test_a_converted_corpus_is_what_its_documents_are_quantised_to(format, scale, ids, tmp_path):
    corpus, documents = plain(tmp_path / "corpus", torch.float16, ids)
    before = {path: path.read_bytes() for path in corpus.path.iterdir()}
    small = corpus.quantize(tmp_path / "small", format, scale)
    for found in (small, Corpus.open(tmp_path / "small", verify=True)):
        assert (found.format, found.scale, found.dtype) == (format, scale, torch.float16)
        assert_same_documents(found.documents()[0], in_memory(documents, format, scale)[0])
        assert found.ids == ids and torch.equal(found.lengths, corpus.lengths)
    assert {path: path.read_bytes() for path in corpus.path.iterdir()} == before
    assert [x.documents for x in small._snapshot.manifest.shards] == list(SHARDS)


def test_what_is_complete_is_opened_and_what_is_new_is_added(tmp_path):
    corpus, documents = plain(tmp_path / "corpus")
    small = corpus.quantize(tmp_path / "small", "int8")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in small.path.iterdir()}
    with storage.locked(small.path):  # whoever only opens it needs no lock
        assert len(corpus.quantize(tmp_path / "small", "int8")) == 10
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in small.path.iterdir()} == before
    more = draw([2, 3], 20)
    corpus.append(more)
    assert_same_documents(corpus.quantize(small.path).documents()[0], in_memory([*documents, *more], "int8")[0])
    empty = Corpus.create(tmp_path / "nothing", 20, torch.float32).quantize(tmp_path / "empty")
    assert len(empty) == 0 and empty.format == "int8"


def test_a_second_conversion_at_a_time_is_refused(tmp_path):
    corpus, _ = plain(tmp_path / "corpus")
    target = Corpus.create(tmp_path / "small", 20, torch.float32, "int8")
    with storage.locked(target.path), pytest.raises(RuntimeError, match="another writer is appending"):
        corpus.quantize(target.path)
    assert len(Corpus.open(target.path)) == 0


@pytest.mark.parametrize("committed", range(5))
def test_a_conversion_that_fails_goes_on_where_it_ended(committed, tmp_path, monkeypatch):
    """Also in the middle of a shard, where somebody else appended the first documents."""
    corpus, documents = plain(tmp_path / "corpus", ids=list(range(10)))
    expected = in_memory(documents, "uint8", "document")[0]
    written, inner = [], storage.write_shard

    def failing(*args):
        if len(written) == committed:
            raise OSError("no space left on device")
        written.append(args[1])
        return inner(*args)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_shard", failing)
        if committed < len(SHARDS):
            with pytest.raises(OSError, match="no space"):
                corpus.quantize(tmp_path / "small", "uint8", "document")
        else:
            corpus.quantize(tmp_path / "small", "uint8", "document")
    part = Corpus.open(tmp_path / "small", verify=True)
    assert len(part) == sum(SHARDS[:committed]) and part.ids == (list(range(len(part))) if committed else None)
    if 0 < len(part) < 9:
        one = slice(len(part), len(part) + 1)
        part.append(documents[one], ids=list(range(10))[one])
    monkeypatch.setattr(storage, "write_shard", lambda *args: written.append(args[1]) or inner(*args))
    whole = corpus.quantize(tmp_path / "small", "uint8", "document")
    assert_same_documents(whole.documents()[0], expected)
    assert whole.ids == list(range(10)) and len(Corpus.open(tmp_path / "small", verify=True)) == 10
    assert [x.file for x in whole._snapshot.manifest.shards] == [
        *written[:committed],
        *(x.file for x in whole._snapshot.manifest.shards[committed:]),
    ], "what was committed is not written again"


def test_what_another_process_wrote_meanwhile_is_not_written_again(tmp_path, monkeypatch):
    corpus, documents = plain(tmp_path / "corpus")
    inner, waiting = storage.locked, []

    @contextlib.contextmanager
    def late(path):
        """Another conversion takes the lock first, and comes to the end."""
        if (path / "manifest.json").exists() and not waiting:
            waiting.append(path)
            corpus.quantize(path)
        with inner(path) as writer:
            yield writer

    monkeypatch.setattr(storage, "locked", late)
    small = corpus.quantize(tmp_path / "small")
    assert waiting == [small.path]
    assert_same_documents(small.documents()[0], in_memory(documents, "int8")[0])


def test_only_a_shard_is_in_memory(tmp_path, monkeypatch):
    corpus, _ = plain(tmp_path / "corpus")
    seen = []
    monkeypatch.setattr(
        "lik_ops.retrieval.layout.quantize",
        lambda D, *args, **kwargs: seen.append(len(D)) or quantize(D, *args, **kwargs),
    )
    corpus.quantize(tmp_path / "small")
    assert seen == [x.tokens for x in corpus._snapshot.manifest.shards]


def others(path, change):
    """A corpus that differs from `plain`."""
    torch.manual_seed(0)
    corpus, documents = plain(path / "corpus", ids=list(range(10)))
    kept, ids = change(documents)
    other = Corpus.create(path / "other", kept[0].shape[1], kept[0].dtype)
    other.append(kept, ids=ids)
    return corpus, other


OTHERS = {
    "tokens": (lambda x: ([x[0] * -1, *x[1:]], range(10)), "expected the first documents of .*corpus, got others in"),
    "the last": (lambda x: ([*x[:8], x[8] * -1, x[9]], range(10)), "expected the first documents of"),
    "ids": (lambda x: (x, range(1, 11)), "expected the first documents of"),
    "no ids": (lambda x: (x, None), "expected the first documents of"),
    "lengths": (lambda x: ([*x[:5], x[6], x[5], *x[7:]], range(10)), "expected the first documents of"),
    "more": (lambda x: ([*x, x[0]], range(11)), "expected 10 documents or fewer, got 11 in"),
    "d": (lambda x: ([y[:, :9] for y in x], range(10)), "expected a corpus of d=20, .*, got one of d=9, .*"),
    "dtype": (lambda x: ([y.half() for y in x], range(10)), "expected a corpus of .*float32.*, got one of .*float16"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_was_made_of_another_corpus_is_refused(case, tmp_path):
    change, message = OTHERS[case]
    corpus, other = others(tmp_path, change)
    small = other.quantize(tmp_path / "small")
    before = {path: path.read_bytes() for path in small.path.iterdir()}
    with pytest.raises(ValueError, match=f"Corpus.quantize: path: {message}"):
        corpus.quantize(tmp_path / "small")
    assert {path: path.read_bytes() for path in small.path.iterdir()} == before


def test_where_a_conversion_cannot_go(tmp_path):
    corpus, _ = plain(tmp_path / "corpus")
    small = corpus.quantize(tmp_path / "small")
    for path, options in ((small.path, {"format": "uint8"}), (small.path, {"scale": "document"}), (corpus.path, {})):
        with pytest.raises(ValueError, match=r"Corpus.quantize: path: expected a corpus of d=20, .*, got one of d=20"):
            corpus.quantize(path, **options)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="expected an empty directory"):
        corpus.quantize(tmp_path / "full")
    with pytest.raises(ValueError, match=r"Corpus.quantize: expected a corpus of tokens as they were, got one in int8"):
        small.quantize(tmp_path / "smaller", "binary")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_conversion_killed_at_any_moment_loses_nothing(tmp_path):
    command = [sys.executable, "-m", "tests.corpus_writers", str(tmp_path), "20", "0", "convert"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith("20 killed"), run.stdout
    print(run.stdout)


# what is wrong


def bad(documents=None, lengths=(2, 3), scale="token", format="int8", **changes):
    made = quantize(torch.randn(5, 8), "int8", cu_seqlens_d=bounds((2, 3))) if documents is None else documents
    made = Quantized(**{**vars(made), **changes}) if changes else made
    return format, scale, {"documents": made, "lengths": lengths}


BAD = {
    "format": (
        bad(format="uint8"),
        TypeError,
        "documents: expected uint8 of torch.float32, as in the corpus, got int8",
    ),
    "dtype": (bad(dtype=torch.float16), TypeError, "documents: expected int8 of torch.float32, .* of torch.float16"),
    "plain": (
        bad(format=None),
        TypeError,
        "documents: expected tensors of torch.float32, as in the corpus, got a Quan",
    ),
    "dense": (bad(quantize(torch.randn(2, 3, 8))), ValueError, r"documents: expected packed ones \[T, 8\], got \[2, 3"),
    "d": (bad(quantize(torch.randn(5, 9))), ValueError, r"documents: expected packed ones \[T, 8\], got \[5, 9\]"),
    "lengths": (bad(lengths=None), ValueError, "lengths: expected the length of each document"),
    "sum": (bad(lengths=[2, 2]), ValueError, r"lengths: expected \[n\], not negative, that add up to 5 tokens"),
    "error": (bad(error=None), ValueError, "documents: expected the error of 2 documents, as `quantize` finds .* None"),
    "norm": (bad(norm=torch.zeros(3)), ValueError, r"documents: expected the norm of 2 documents, .* got \[3\]"),
    "scales": (bad(scale="document"), ValueError, "documents: expected one scale for each document, got others"),
    "meta": (bad(quantize(torch.empty(5, 8, device="meta"))), ValueError, "documents: expected embeddings, got meta"),
    "tokens": (bad(torch.randn(5, 8).half()), TypeError, r"documents: expected torch.float32, got torch.float16: conv"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_an_append_is_named(case, tmp_path):
    (format, scale, arguments), error, message = BAD[case]
    corpus = Corpus.create(tmp_path, 8, torch.float32, format, scale)
    with pytest.raises(error, match=f"Corpus.append: {message}"):
        corpus.append(**arguments)
    assert len(Corpus.open(tmp_path)) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "int4"}, "format: expected one of int8, uint8, fp8_e4m3, fp8_e5m2, binary, got 'int4'"),
        ({"format": "int8", "scale": "row"}, "scale: expected one of token, document, got 'row'"),
        ({"format": "int8", "scale": "tensor"}, "scale: expected 'token' or 'document', got 'tensor': shards have no"),
    ],
)
def test_formats_and_scales_that_there_are_not(options, message, tmp_path):
    corpus = Corpus.create(tmp_path / "corpus", 8, torch.float32)
    with pytest.raises(ValueError, match=f"Corpus.create: {message}"):
        Corpus.create(tmp_path / "new", 8, torch.float32, **options)
    with pytest.raises(ValueError, match=f"Corpus.quantize: {message}"):
        corpus.quantize(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_a_scale_needs_a_format(tmp_path):
    with pytest.raises(ValueError, match=r"Corpus.create: scale: expected 'token' without a format, got 'document'"):
        Corpus.create(tmp_path / "new", 8, torch.float32, scale="document")


def test_a_corpus_made_anew_in_another_format_is_not_appended_to(tmp_path):
    corpus = Corpus.create(tmp_path, 8, torch.float32, "int8")
    (tmp_path / "manifest.json").unlink()
    Corpus.create(tmp_path, 8, torch.float32, "int8", "document")
    with pytest.raises(ValueError, match=r"expected a corpus of d=8, torch.float32, int8 with a scale .* made anew"):
        corpus.append(draw([1]))
