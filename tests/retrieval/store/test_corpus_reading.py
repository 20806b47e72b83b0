"""Test how a corpus is read: shards open on the first read, few are mapped, and damage raises an error."""

import gc
import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lik_ops
from lik_ops import Corpus, Quantized
from lik_ops.retrieval.store import reading, snapshot

from .test_corpus import ROOT, assert_holds, draw
from .test_corpus_access import same
from .test_corpus_manifest import edited as edited_manifest
from .test_corpus_manifest import shard_field

pytest.importorskip("safetensors", reason="pip install '.[retrieval]'")
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel what is mapped")
FORMATS = [None, ("uint8", "document"), "codec"]


def create_corpus(path, format, d=8):
    if format == "codec":
        codec = lik_ops.ResidualCodec.train(torch.nn.functional.normalize(torch.randn(40, d), dim=-1), n_centroids=4)
        return Corpus.create(path, d, torch.float32, codec)
    return Corpus.create(path, d, torch.float32, *(format or ()))


def mapped_shards(path):
    """Return the mapped shards below a directory. Other tests of the process may have left theirs."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if f"{path}/" in line and "/shard-" in line}


# shards that open when they are read


@linux
def test_opening_a_corpus_opens_no_shard(tmp_path, monkeypatch):
    corpus = Corpus.create(tmp_path, 8, torch.float32)
    documents = draw((3, 0, 4))
    for document in documents:
        corpus.append([document])
    monkeypatch.setattr(reading.ShardFile, "_open_checked", lambda self: pytest.fail("opened"))
    found = Corpus.open(tmp_path)
    pickle.loads(pickle.dumps(found))
    assert len(found) == 3 and "7 tokens" in repr(found) and not mapped_shards(tmp_path)
    monkeypatch.undo()
    assert torch.equal(found[2], documents[2])
    assert len(mapped_shards(tmp_path)) == 1


def count_opening(path, count):
    """Open a corpus of copies of a shard, and return the calls of Python code and of the operating system."""
    manifest = Corpus.open(path)._snapshot.manifest
    (shard,) = manifest.shards
    path = path.parent / f"copies {count}"
    path.mkdir()
    copies = [f"shard-{i:06d}-0123456789abcdef.safetensors" for i in range(count)]
    for name in copies:
        os.link(path.parent / "corpus" / shard.file, path / name)
    entries = tuple(shard._replace(file=name) for name in copies)
    (path / "manifest.json").write_bytes(replace(manifest, shards=entries).text)
    made, found = [], Counter()

    def record(frame, event, argument):
        if event == "call":
            found["Python"] += 1
        elif event == "c_call" and argument.__name__ in ("open", "stat", "listdir"):
            found[argument.__name__] += 1

    gc.collect()
    gc.disable()  # it would call finalizers of other tests
    sys.setprofile(record)
    try:
        made.append(Corpus.open(path))
    finally:
        sys.setprofile(None)
        gc.enable()
    assert len(made[0]) == 2 * count and len(made[0].lengths) == 2 * count
    return found


def test_open_call_count_does_not_depend_on_shard_count(tmp_path):
    """Opening 300 shards costs the calls of opening 3: the manifest is read, and the directory is listed once."""
    Corpus.create(tmp_path / "corpus", 8, torch.float32).append(draw((3, 4)))
    few, many = (count_opening(tmp_path / "corpus", count) for count in (3, 300))
    assert few == many and (many["open"], many["listdir"], many["stat"]) == (1, 1, 0), (few, many)


@linux
@pytest.mark.parametrize("format", FORMATS)
def test_number_of_mapped_shards_stays_bounded(format, tmp_path, monkeypatch):
    """Results have the bits of a corpus without a limit on mapped shards."""
    corpus = create_corpus(tmp_path / "corpus", format)
    documents = draw([i % 5 for i in range(40)])
    for document in documents:
        corpus.append([document])
    Q, chosen = torch.randn(2, 3, 8), [[39, 0, 7, 20], [8, 8, 3, 1]]

    def read(corpus):
        packed = corpus.documents(2, 38)[0]
        packed = packed if format is None else packed.dequantize()
        found = [*corpus, *corpus[[5, 30, 5]], packed, corpus.score(Q, chosen), *corpus.rerank(Q, chosen)]
        for chunk in (None, 1, 7):
            found += lik_ops.retrieve(Q, corpus, 10, chunk=chunk)
        return [*found, lik_ops.maxsim_streamed(Q, corpus)]

    expected = read(Corpus.open(tmp_path / "corpus"))
    monkeypatch.setattr(reading, "MAX_MAPPED_SHARDS", 3)
    monkeypatch.setattr(snapshot, "_MAX_PIECES", 2)
    most, inner = [0], reading.ShardFile.map

    def counted(self):
        found = inner(self)
        most.append(len(mapped_shards(tmp_path)))
        return found

    monkeypatch.setattr(reading.ShardFile, "map", counted)
    few = Corpus.open(tmp_path / "corpus")
    assert same(read(few), expected)
    few.append(documents[:3])
    assert torch.equal(few[40], corpus[0]) and len(few.cu_seqlens) == 44
    if format is None:
        made = few.quantize(tmp_path / "made")
        assert torch.equal(made.lengths, few.lengths)
    assert 3 <= max(most) <= 8, most  # three, and the shards of a part of a search


@linux
def test_shards_are_unmapped_when_the_corpus_is_freed(tmp_path):
    corpus = Corpus.create(tmp_path, 8, torch.float32)
    corpus.append(draw((3, 4)))
    kept = Corpus.open(tmp_path).documents(0, 1)[0]
    _ = corpus[0]
    assert len(mapped_shards(tmp_path)) == 1
    del corpus, kept
    assert not mapped_shards(tmp_path)


def test_reads_under_inference_mode_do_not_prevent_gradients(tmp_path):
    Corpus.create(tmp_path, 8, torch.float32).append(draw((3, 4)))
    corpus = Corpus.open(tmp_path)
    Q = torch.randn(2, 3, 8)
    with torch.inference_mode():
        expected = corpus.score(Q, [1, 0])
        lik_ops.retrieve(Q, corpus, 2)
        _ = corpus[0]
    Q.requires_grad_()
    found = corpus.score(Q, [1, 0])
    found.sum().backward()
    assert torch.equal(found, expected) and not corpus[0].is_inference() and not corpus.lengths.is_inference()
    packed = corpus.documents(0, 1)[0]
    assert not packed.is_inference()


def test_document_scales_own_their_storage_and_can_be_saved(tmp_path):
    corpus = create_corpus(tmp_path / "corpus", ("uint8", "document"))
    corpus.append(draw([1000, 2]))
    packed = corpus.documents(1, 2)[0]
    assert packed.scale.untyped_storage().nbytes() <= packed.scale.nbytes
    packed.save(tmp_path / "saved")  # safetensors refuses tensors that share memory
    assert torch.equal(Quantized.load(tmp_path / "saved").dequantize(), packed.dequantize())


# paths


@pytest.mark.skipif(sys.platform != "linux", reason="file names that are not UTF-8")
@pytest.mark.parametrize("format", FORMATS)
def test_corpus_supports_non_utf8_paths(format, tmp_path):
    path = os.path.join(tmp_path, os.fsdecode(b"caf\xe9"))
    corpus, documents = create_corpus(path, format), draw((3, 0, 4))
    corpus.append(documents[:2], ids=["a", "b"])
    corpus.append(documents[2:], ids=["c"])
    found = Corpus.open(path, verify=True)
    assert found.lengths.tolist() == [3, 0, 4] and found.ids == ["a", "b", "c"] and len(found[2]) == 4
    assert len(lik_ops.retrieve(torch.randn(2, 8), found, 2)[1]) == 2 and len(found.documents()[0]) == 7
    with pytest.raises(FileExistsError):
        Corpus.create(path, 8, torch.float32)
    if format is None:
        assert_holds(found, documents, ["a", "b", "c"])
        assert len(found.quantize(f"{path}-quantized")) == 3
    made = lik_ops.quantize(torch.randn(2, 3, 8))
    made.save(f"{path}-saved")
    assert torch.equal(Quantized.load(f"{path}-saved").data, made.data)


# files that change while a corpus is open


TRUNCATED = """
import os, sys, torch, lik_ops
from pathlib import Path
path, size, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
Q = torch.randn(2, 3, 64)
corpus = lik_ops.Corpus.open(path)
calls = {
    "index": lambda: corpus[7],
    "list": lambda: corpus[[7, 6]],
    "iteration": lambda: list(corpus),
    "documents": lambda: corpus.documents(5, 8),
    "all documents": lambda: corpus.documents(),
    "retrieve": lambda: lik_ops.retrieve(Q, corpus, 3),
    "lowest": lambda: lik_ops.retrieve(Q, corpus, 3, largest=False),
    "coarse": lambda: lik_ops.retrieve(Q, corpus, 3, coarse=coarse),
    "streamed": lambda: lik_ops.maxsim_streamed(Q, corpus),
    "score": lambda: corpus.score(Q, [1, 7]),
    "rerank": lambda: corpus.rerank(Q, [1, 7]),
    "quantize": lambda: corpus.quantize(f"{path}-quantized"),
    "ids": lambda: lik_ops.Corpus.open(path).ids,
}
packed, cu_seqlens = corpus.documents()
coarse = lik_ops.quantize(packed, cu_seqlens_d=cu_seqlens)
for before in ("mapped", "not mapped"):
    if before == "mapped":
        list(corpus)
    else:
        whole = at.read_bytes()
        os.unlink(at)
        at.write_bytes(kept)
        corpus = lik_ops.Corpus.open(path)
        corpus.lengths
    at = sorted(path.glob("shard-*"))[-1]
    kept = at.read_bytes()
    os.truncate(at, size)
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            assert str(error).startswith(f"{at}: the shard is truncated or corrupt: expected "), (name, error)
            assert str(error).endswith(f" bytes, got {size}"), (name, error)
        else:
            print(name, "raised nothing")
print("done")
"""


@pytest.mark.parametrize("size", [0, 5000])
def test_reads_of_a_truncated_shard_raise(size, tmp_path):
    """Every call raises. A read of a missing page ends the process, so another process reads."""
    corpus = Corpus.create(tmp_path / "corpus", 64, torch.float32)
    documents = draw([200] * 8, 64)
    corpus.append(documents[:4], ids=list("abcd"))
    corpus.append(documents[4:], ids=list("efgh"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRUNCATED, str(tmp_path / "corpus"), str(size)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_removed_shard_is_readable_only_if_mapped(tmp_path):
    corpus = Corpus.create(tmp_path, 8, torch.float32)
    documents = draw((3, 4))
    for document in documents:
        corpus.append([document])
    corpus = Corpus.open(tmp_path)
    assert torch.equal(corpus[0], documents[0])
    for at in tmp_path.glob("shard-*"):
        at.unlink()
    assert torch.equal(corpus[0], documents[0])
    with pytest.raises(ValueError, match=r"shard-000001-\w+\.safetensors: the shard is missing"):
        _ = corpus[1]


def test_replaced_shard_is_mapped_again(tmp_path):
    """A restore tool replaces a file by a rename."""
    corpus = Corpus.create(tmp_path / "corpus", 8, torch.float32)
    documents = draw((3, 4))
    corpus.append(documents)
    assert torch.equal(corpus[1], documents[1])
    (at,) = corpus.path.glob("shard-*")
    (tmp_path / "copy").write_bytes(at.read_bytes())
    os.truncate(at, 0)
    os.replace(tmp_path / "copy", at)
    assert torch.equal(corpus[1], documents[1])
    (tmp_path / "copy").write_bytes(b"something else")
    os.replace(tmp_path / "copy", at)
    with pytest.raises(ValueError, match=r"the shard is truncated or corrupt: expected \d+ bytes, got 14"):
        _ = corpus[1]


# headers


def edited(at, edit):
    """Change the header of a shard, and its size in the manifest."""
    content = at.read_bytes()
    size = int.from_bytes(content[:8], "little")
    text = json.dumps(edit(json.loads(content[8 : 8 + size]))).encode()
    at.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    edited_manifest(at.parent, shard_field("bytes", at.stat().st_size))


def change_header_entry(name, field, value):
    return lambda header: {**header, name: {**header[name], field: value}}


WRONG = {
    "no object": lambda header: [],
    "number": lambda header: 3,
    "absent": lambda header: {name: x for name, x in header.items() if name != "tokens"},
    "no lengths": lambda header: {name: x for name, x in header.items() if name != "lengths"},
    "no ids": lambda header: {name: x for name, x in header.items() if name != "ids"},
    "list": lambda header: {**header, "tokens": []},
    "list of ids": lambda header: {**header, "ids": 3},
    "dtype": change_header_entry("tokens", "dtype", "F16"),
    "other dtype": change_header_entry("tokens", "dtype", 3),
    "dtype of lengths": change_header_entry("lengths", "dtype", "I32"),
    "shape": change_header_entry("tokens", "shape", [8, 7]),
    "flat": change_header_entry("tokens", "shape", [56]),
    "no shape": change_header_entry("tokens", "shape", None),
    "shape of ids": change_header_entry("ids", "shape", ["a"]),
    "size of ids": change_header_entry("ids", "shape", [-1]),
    "negative": change_header_entry("tokens", "data_offsets", [-4, 220]),
    "short": change_header_entry("tokens", "data_offsets", [0, 4]),
    "long": change_header_entry("tokens", "data_offsets", [9999, 10223]),
    "huge": change_header_entry("tokens", "data_offsets", [2**70, 2**70]),
    "one offset": change_header_entry("tokens", "data_offsets", [0]),
    "fractions": change_header_entry("tokens", "data_offsets", [0.0, 224.0]),
    "no offsets": change_header_entry("tokens", "data_offsets", "ab"),
    "backwards": change_header_entry("lengths", "data_offsets", [16, 0]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_header_error_names_the_shard(case, tmp_path):
    Corpus.create(tmp_path, 8, torch.float32).append(draw((3, 4)), ids=["a", "b"])
    (at,) = tmp_path.glob("shard-*")
    edited(at, WRONG[case])
    for call in (lambda x: x.lengths, lambda x: x.ids, lambda x: x[0], lambda x: x.documents()):
        with pytest.raises(ValueError, match=r"shard-000000-\w+\.safetensors: the shard is truncated or corrupt: "):
            call(Corpus.open(tmp_path))


@pytest.mark.parametrize("size", [0, 7, 2**40, 2**64 - 1])
def test_wrong_header_size_error_names_the_shard(size, tmp_path):
    Corpus.create(tmp_path, 8, torch.float32).append(draw((3, 4)))
    (at,) = tmp_path.glob("shard-*")
    at.write_bytes(size.to_bytes(8, "little") + at.read_bytes()[8:])
    with pytest.raises(ValueError, match=r"shard-000000-\w+\.safetensors: the shard is truncated or corrupt: "):
        _ = Corpus.open(tmp_path)[0]


def test_lengths_with_wrong_sum_raise(tmp_path):
    Corpus.create(tmp_path, 8, torch.float32).append(draw((3, 4)))
    (at,) = tmp_path.glob("shard-*")
    content = at.read_bytes()
    lengths = torch.tensor([3, 4]).numpy().tobytes()
    assert content.count(lengths) == 1
    for wrong in ([3, 5], [8, -1], [2**62, 2**62]):
        at.write_bytes(content.replace(lengths, torch.tensor(wrong).numpy().tobytes()))
        with pytest.raises(ValueError, match=r"corrupt: expected lengths that add up to 7 tokens"):
            _ = Corpus.open(tmp_path).lengths
