"""Test a `lik_ops.Corpus` of quantized documents: its contents, its size, and the bits of its scores."""

import hashlib
import itertools
import json
import pickle

import pytest
import torch

import lik_ops
from lik_ops import Corpus, Quantized, quantize
from lik_ops.formats.table import FORMATS
from lik_ops.retrieval.store.layout import StorageLayout
from lik_ops.retrieval.store.manifest import Manifest, ShardEntry

from ..test_retrieve import assert_same
from .test_corpus import DTYPES, draw
from .test_corpus_manifest import edited

safetensors = pytest.importorskip("safetensors.torch", reason="pip install '.[retrieval]'")
LENGTHS = (3, 0, 7, 1, 0, 5, 2, 4, 6, 0)
SHARDS = (3, 1, 4, 2)
SCALES = ("token", "document")
# Bytes of the numbers, and of the scale and minimum, of a token of 20 features.
BYTES = {"int8": (20, 4), "uint8": (20, 8), "fp8_e4m3": (20, 4), "fp8_e5m2": (20, 4), "binary": (3, 4)}
BYTES |= {"rq4": (10, 2), "rq2": (5, 2), "rq1": (3, 2)}
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
    """Assert equal tensors, up to the shape of the scales."""
    assert (found.format, found.d, found.dtype) == (expected.format, expected.d, expected.dtype)
    pairs = [(found.data.view(torch.uint8), expected.data.view(torch.uint8))]
    pairs += zip(found.per_token(), expected.per_token(), strict=True)
    pairs += [(found.error, expected.error), (found.norm, expected.norm)]
    for x, y in pairs:
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x.expand(y.shape), y)


# contents


@every_format
@every_scale
@pytest.mark.parametrize("dtype", DTYPES)
def test_appended_documents_are_quantized_as_in_memory(format, scale, dtype, tmp_path):
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
def test_appended_quantized_documents_are_stored_unchanged(format, scale, tmp_path):
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


def test_tensor_scale_is_expanded_to_tokens_or_documents(tmp_path):
    D = torch.randn(9, 20)
    made = quantize(D, "uint8", "tensor", cu_seqlens_d=bounds([4, 0, 5]))
    for scale in SCALES:
        corpus = Corpus.create(tmp_path / scale, 20, torch.float32, "uint8", scale)
        corpus.append(made, lengths=[4, 0, 5])
        assert_same_documents(corpus.documents()[0], Quantized(**{**vars(made), **per_token(made, 9)}))


def test_append_accepts_noncontiguous_and_shared_tensors(tmp_path):
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
def test_shard_size_is_bounded_by_the_format(format, scale, tmp_path):
    documents = draw([100] * 50, 20)
    Corpus.create(tmp_path, 20, torch.float16, format, scale).append([x.half() for x in documents])
    (shard,) = tmp_path.glob("shard-*")
    numbers, scales = BYTES[format]
    tokens = numbers + (scales if scale == "token" else 0)
    # Lengths, errors, and norms of the documents, and the names of the tensors.
    assert shard.stat().st_size <= 5000 * tokens + 50 * (16 + (scales if scale == "document" else 0)) + 1000
    with safetensors.safe_open(shard, framework="pt") as file:
        kept = {name: list(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
    each = [5000] if scale == "token" else [50]
    expected = {"data": [5000, numbers], "scale": each, "error": [50], "norm": [50]}
    assert kept == {**expected, "lengths": [50], **({"minimum": each} if format == "uint8" else {})}


def test_nan_affects_only_its_token_or_document(tmp_path):
    documents = draw([2, 3, 1], 8)
    documents[1][2, 5] = torch.nan
    for scale, lost in (("token", [2]), ("document", [0, 1, 2])):
        corpus = Corpus.create(tmp_path / scale, 8, torch.float32, "int8", scale)
        corpus.append(documents)
        assert corpus[1].isnan().all(1).nonzero().flatten().tolist() == lost
        assert not corpus[0].isnan().any() and not corpus[2].isnan().any()
        scores, indices = lik_ops.retrieve(torch.randn(3, 8), corpus, 3)
        assert indices[0] == 1 and scores.isnan().tolist() == [True, False, False]


def test_writes_to_returned_tensors_do_not_change_the_corpus(tmp_path):
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


def test_handles_unpickle_also_without_format_and_scale(tmp_path):
    corpus, _ = written(tmp_path / "small", "fp8_e4m3")
    assert_same_documents(pickle.loads(pickle.dumps(corpus)).documents()[0], corpus.documents()[0])
    plain = Corpus.create(tmp_path / "plain", 8, torch.float32)
    plain.append(draw([3]))
    manifest = plain.__getstate__()["manifest"]
    for name in ("format", "scale"):
        del manifest.__dict__[name]  # like a pickle from before these existed
    found = pickle.loads(pickle.dumps(plain))
    assert found.format is None and torch.equal(found[0], plain[0])


# the files


def test_plain_corpus_writes_version_1_files(tmp_path):
    shard = ShardEntry("shard-000000-0123456789abcdef.safetensors", 464, "ab", 2, 7)
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
    assert found == Manifest(8, torch.float32, True, (shard,)) and found.layout == StorageLayout(8, torch.float32)
    corpus = Corpus.create(tmp_path / "corpus", 8, torch.float32)
    corpus.append(draw([3, 4]), ids=["a", "b"])
    (at,) = corpus.path.glob("shard-*")
    with safetensors.safe_open(at, framework="pt") as file:
        assert set(file.keys()) == {"tokens", "lengths", "ids"}
    assert corpus.format is None and corpus.scale is None


def test_the_manifest_names_the_format(tmp_path):
    """The version makes a lik_ops without formats refuse the file."""
    corpus, _ = written(tmp_path, "fp8_e5m2", "document")
    content = json.loads((corpus.path / "manifest.json").read_text())
    assert content["version"] == 2 and content["quantized"] == {"format": "fp8_e5m2", "scale": "document"}


WRONG = {
    "none": (lambda c: c.pop("quantized"), "quantized: expected dict, got nothing"),
    "type": (lambda c: c.update(quantized="int8"), "quantized: expected dict, got str"),
    "format": (
        lambda c: c["quantized"].update(format="int4"),
        "quantized.format: expected one of int8, uint8, fp8_e4m3, fp8_e5m2, binary, rq4, rq2, rq1, got 'int4'",
    ),
    "format type": (lambda c: c["quantized"].update(format=8), "quantized.format: expected str, got int"),
    "scale": (
        lambda c: c["quantized"].update(scale="tensor"),
        "quantized.scale: expected one of token, document, got 'tensor'",
    ),
    "no scale": (lambda c: c["quantized"].pop("scale"), "quantized.scale: expected str, got nothing"),
    "version": (lambda c: c.update(version=9), "version: expected 1, 2, 3 or 4, got 9: a newer lik_ops wrote it"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_manifest_error_names_path_and_field(case, tmp_path):
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
def test_shards_of_another_format_raise(field, value, message, tmp_path):
    written(tmp_path, "int8")
    edited(tmp_path, lambda content: content["quantized"].__setitem__(field, value))
    with pytest.raises(ValueError, match=rf"shard-000000-\w+.safetensors: the shard is .*: {message}"):
        _ = Corpus.open(tmp_path)[0]
    with pytest.raises(ValueError, match=message):
        Corpus.open(tmp_path, verify=True)


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
def test_corrupt_shard_error_names_the_shard(case, tmp_path):
    damage, message = DAMAGE[case]
    written(tmp_path, "uint8")
    at = sorted(tmp_path.glob("shard-*"))[0]
    tensors = safetensors.load_file(at)
    damage(tensors)
    safetensors.save_file(tensors, at)
    edited(tmp_path, lambda content: content["shards"][0].update(bytes=at.stat().st_size))
    with pytest.raises(ValueError, match=rf"{at.name}: the shard is truncated or corrupt: {message}"):
        _ = Corpus.open(tmp_path)[0]


# errors


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
    "scales": (bad(scale="document"), ValueError, "documents: expected one scale for each document, got several"),
    "meta": (bad(quantize(torch.empty(5, 8, device="meta"))), ValueError, "documents: expected embeddings, got meta"),
    "tokens": (bad(torch.randn(5, 8).half()), TypeError, r"documents: expected torch.float32, got torch.float16: conv"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_append_raises_and_commits_nothing(case, tmp_path):
    (format, scale, arguments), error, message = BAD[case]
    corpus = Corpus.create(tmp_path, 8, torch.float32, format, scale)
    with pytest.raises(error, match=f"Corpus.append: {message}"):
        corpus.append(**arguments)
    assert len(Corpus.open(tmp_path)) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "int4"}, f"format: expected one of {', '.join(FORMATS)}, got 'int4'"),
        ({"format": "int8", "scale": "row"}, "scale: expected one of token, document, got 'row'"),
        ({"format": "int8", "scale": "tensor"}, "scale: expected 'token' or 'document', got 'tensor': shards have no"),
    ],
)
def test_unsupported_formats_and_scales_raise(options, message, tmp_path):
    corpus = Corpus.create(tmp_path / "corpus", 8, torch.float32)
    with pytest.raises(ValueError, match=f"Corpus.create: {message}"):
        Corpus.create(tmp_path / "new", 8, torch.float32, **options)
    with pytest.raises(ValueError, match=f"Corpus.quantize: {message}"):
        corpus.quantize(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_a_scale_needs_a_format(tmp_path):
    with pytest.raises(ValueError, match=r"Corpus.create: scale: expected 'token' without a format, got 'document'"):
        Corpus.create(tmp_path / "new", 8, torch.float32, scale="document")


def test_append_rejects_a_corpus_recreated_in_another_format(tmp_path):
    corpus = Corpus.create(tmp_path, 8, torch.float32, "int8")
    (tmp_path / "manifest.json").unlink()
    Corpus.create(tmp_path, 8, torch.float32, "int8", "document")
    with pytest.raises(
        ValueError, match=r"expected a corpus of d=8, torch.float32, int8 with a scale .* created again"
    ):
        corpus.append(draw([1]))
