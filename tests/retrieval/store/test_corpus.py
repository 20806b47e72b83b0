"""Test that documents appended to a `lik_ops.Corpus` can be read, even if a writer fails."""

import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lik_ops
from lik_ops import Corpus
from lik_ops.retrieval import copying, sources
from lik_ops.retrieval.store import files

pytest.importorskip("safetensors", reason="pip install lik-ops[retrieval]")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ROOT = Path(__file__).resolve().parents[3]


def draw(lengths, d=8, dtype=torch.float32):
    return [torch.randn(n, d).to(dtype) for n in lengths]


def assert_holds(corpus, documents, ids=None):
    packed, cu_seqlens = corpus.documents(0, len(documents))
    lengths = [len(x) for x in documents]
    assert len(corpus) == len(documents) and corpus.ids == ids
    assert corpus.lengths.tolist() == lengths and corpus.lengths.dtype == torch.int64
    assert cu_seqlens.tolist() == corpus.cu_seqlens.tolist() == [0, *itertools.accumulate(lengths)]
    expected = torch.cat([torch.empty(0, corpus.d, dtype=corpus.dtype), *documents])
    assert packed.dtype == corpus.dtype and torch.equal(packed, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_appended_documents_can_be_read(dtype, tmp_path):
    corpus = Corpus.create(tmp_path / "new" / "corpus", d=8, dtype=dtype)
    assert_holds(corpus, [])
    documents = draw((3, 0, 7, 1), dtype=dtype)
    corpus.append(documents[:3])
    corpus.append([])
    corpus.append(torch.cat(documents[2:]), lengths=[7, 1])
    assert len({path.stat().st_mode for path in corpus.path.iterdir() if path.suffix != ".lock"}) == 1
    for found in (corpus, Corpus.open(tmp_path / "new" / "corpus", verify=True)):
        assert (found.d, found.dtype) == (8, dtype)
        assert_holds(found, [*documents[:3], *documents[2:]])
    assert "5 documents, 18 tokens" in repr(corpus)


@given(
    shards=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), max_size=4),
    begin=st.integers(0, 24),
    count=st.integers(0, 24),
)
def test_documents_returns_any_range(tmp_path_factory, shards, begin, count):
    corpus = Corpus.create(tmp_path_factory.mktemp("corpus"), d=3, dtype=torch.float32)
    documents = []
    for lengths in shards:
        documents += draw(lengths, 3)
        corpus.append(documents[-len(lengths) :])
    begin = min(begin, len(documents))
    end = min(begin + count, len(documents))
    packed, cu_seqlens = Corpus.open(corpus.path).documents(begin, end)
    expected = documents[begin:end]
    assert torch.equal(packed, torch.cat([torch.empty(0, 3), *expected]))
    assert cu_seqlens.tolist() == [0, *itertools.accumulate(len(x) for x in expected)]


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel what is mapped")
def test_a_range_of_one_shard_is_mapped_not_copied(tmp_path):
    corpus = Corpus.create(tmp_path, d=64, dtype=torch.float16)
    corpus.append(draw([100] * 20, 64, torch.float16))
    (shard,) = tmp_path.glob("shard-*")
    packed, _ = corpus.documents(5, 7)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(shard) in line]
    ranges = [[int(x, 16) for x in line[0].split("-")] for line in maps]
    assert any(a <= packed.data_ptr() < b for a, b in ranges)


def test_writes_to_returned_tensors_do_not_change_the_corpus(tmp_path):
    """Writes of a caller change neither the files nor later results of the same handle, with one shard or several."""
    corpus = Corpus.create(tmp_path, d=8, dtype=torch.float32)
    documents = draw((3, 5, 0, 4))
    corpus.append(documents[:3])
    corpus.append(documents[3:])
    content = {path: path.read_bytes() for path in tmp_path.iterdir()}
    Q = torch.randn(2, 3, 8)
    expected = lik_ops.retrieve(Q, corpus, 4)
    for written in (
        *corpus.documents(0, 2),
        *corpus.documents(),
        corpus.documents(1, 2)[0],
        corpus[1],
        corpus[-1],
        *corpus[1:],
        *corpus[[0, 3]],
        *corpus,
        corpus.lengths,
        corpus.cu_seqlens,
    ):
        written.fill_(7)
        assert_same_search(lik_ops.retrieve(Q, corpus, 4), expected)
        assert torch.equal(corpus.documents()[0], torch.cat(documents))
    assert corpus.lengths.tolist() == [3, 5, 0, 4] and corpus.cu_seqlens.tolist() == [0, 3, 8, 8, 12]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == content
    assert_holds(Corpus.open(tmp_path, verify=True), documents)


def assert_same_search(found, expected):
    assert torch.equal(found[1], expected[1]) and torch.equal(found[0], expected[0])


@pytest.mark.parametrize("ids", [["a", "b", "\u00e9\ud800", ""], [3, 1, -2, 2**70]])
def test_ids(ids, tmp_path):
    corpus = Corpus.create(tmp_path, d=8, dtype=torch.float32)
    documents = draw((1, 2, 3, 4))
    corpus.append(documents[:1], ids[:1])
    corpus.append(documents[1:], ids=ids[1:])
    assert_holds(Corpus.open(tmp_path), documents, ids)
    with pytest.raises(ValueError, match="ids: expected 1 of them, as before, got None"):
        corpus.append(documents[:1])
    assert_holds(Corpus.open(tmp_path), documents, ids)
    corpus.ids.reverse()
    assert corpus.ids == ids, "what a caller wrote to is its own"
    assert corpus.quantize(tmp_path / "small").ids == ids


def test_relative_path_is_resolved_when_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    documents = draw((1, 2, 3))
    made, opened = Corpus.create("corpus", 8, torch.float32), Corpus.open(Path("corpus"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    made.append(documents[:2])
    opened.append(documents[2:])
    assert opened.path == tmp_path / "corpus" and repr(str(opened.path)) in repr(opened)
    assert_holds(opened, documents)


def test_ids_are_rejected_by_a_corpus_without_ids(tmp_path):
    corpus = Corpus.create(tmp_path, d=8, dtype=torch.float32)
    corpus.append(draw([1]))
    with pytest.raises(ValueError, match="ids: expected None, as before"):
        corpus.append(draw([1]), ids=["a"])


def test_open_handles_keep_their_snapshot_until_they_append(tmp_path):
    one = Corpus.create(tmp_path, d=8, dtype=torch.float32)
    two = Corpus.open(tmp_path)
    documents = draw((2, 3))
    one.append(documents[:1])
    assert len(two) == 0
    two.append(documents[1:])
    assert len(one) == 1 and torch.equal(one.documents()[0], documents[0])
    for found in (two, Corpus.open(tmp_path), pickle.loads(pickle.dumps(two))):
        assert_holds(found, documents)


def test_second_writer_is_rejected(tmp_path):
    corpus = Corpus.create(tmp_path, d=8, dtype=torch.float32)
    corpus.append(draw([1]))
    held, release = threading.Event(), threading.Event()

    def hold():
        with files.lock_corpus(tmp_path):
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    try:
        with pytest.raises(RuntimeError, match="another writer is appending"):
            corpus.append(draw([1]))
        code = "import sys, torch, lik_ops; lik_ops.Corpus.open(sys.argv[1]).append([torch.zeros(1, 8)])"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code, str(tmp_path)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert run.returncode == 1 and "another writer is appending" in run.stderr
        assert len(Corpus.open(tmp_path)) == 1, "reading needs no lock"
    finally:
        release.set()
        thread.join()
    corpus.append(draw([1]))
    assert len(Corpus.open(tmp_path)) == 2


# errors


BAD = {
    "d": (lambda p: Corpus.create(p / "n", 0, torch.float32), ValueError, "d: expected 1 or more, below 2.31, got 0"),
    "d type": (lambda p: Corpus.create(p / "n", 8.0, torch.float32), TypeError, "d: expected an int"),
    "dtype": (lambda p: Corpus.create(p / "n", 8, torch.int8), TypeError, "dtype: expected float16"),
    "exists": (lambda p: Corpus.create(p, 8, torch.float32), FileExistsError, "path: expected no corpus"),
    "absent": (lambda p: Corpus.open(p / "n"), FileNotFoundError, "n: expected a corpus"),
    "features": (lambda p: Corpus.open(p).append(draw([1], 9)), ValueError, r"documents\[0\]: expected \[L, 8\]"),
    "other dtype": (
        lambda p: Corpus.open(p).append(draw([1, 2], dtype=torch.half)[1:]),
        TypeError,
        r"documents\[0\]: expected torch.float32, got torch.float16",
    ),
    "no tensor": (lambda p: Corpus.open(p).append([[1.0]]), TypeError, r"documents\[0\]: expected a Tensor"),
    "lengths": (lambda p: Corpus.open(p).append(torch.zeros(3, 8)), ValueError, "lengths: expected the length"),
    "sum": (
        lambda p: Corpus.open(p).append(torch.zeros(3, 8), lengths=[1, 1]),
        ValueError,
        r"lengths: expected \[n\], not negative, that add up to 3",
    ),
    "negative": (lambda p: Corpus.open(p).append(torch.zeros(3, 8), lengths=[4, -1]), ValueError, "not negative"),
    "fractions": (
        lambda p: Corpus.open(p).append(torch.zeros(3, 8), lengths=[1.5, 1.5]),
        TypeError,
        "lengths: expected integers",
    ),
    "list lengths": (lambda p: Corpus.open(p).append(draw([1]), lengths=[1]), ValueError, "lengths: expected None"),
    "ids": (lambda p: Corpus.open(p).append(draw([1]), ids=["a", "b"]), ValueError, "ids: expected 1"),
    "ids type": (lambda p: Corpus.open(p).append(draw([1]), ids=[1.5]), TypeError, "ids: expected str or int"),
    "range": (lambda p: Corpus.open(p).documents(1, 3), ValueError, "begin, end: expected 0 <= begin <= end <= 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_calls_raise_and_change_nothing(case, tmp_path):
    call, error, message = BAD[case]
    documents = draw((2, 3))
    Corpus.create(tmp_path, 8, torch.float32).append(documents, ids=["a", "b"])
    with pytest.raises(error, match=message):
        call(tmp_path)
    assert_holds(Corpus.open(tmp_path, verify=True), documents, ["a", "b"])


def test_append_rejects_a_recreated_corpus(tmp_path):
    corpus = Corpus.create(tmp_path, 8, torch.float32)
    (tmp_path / "manifest.json").unlink()
    Corpus.create(tmp_path, 8, torch.float16)
    with pytest.raises(ValueError, match="created again"):
        corpus.append(draw([1]))


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.99])
@pytest.mark.parametrize("what", ["manifest", "shard"])
def test_truncated_file_error_names_the_file(part, what, tmp_path):
    Corpus.create(tmp_path, 8, torch.float32).append(draw([20] * 5))
    (at,) = tmp_path.glob("manifest.json" if what == "manifest" else "shard-*")
    content = at.read_bytes()
    at.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(ValueError, match=rf"{at.name}.*truncated or corrupt"):
        _ = Corpus.open(tmp_path).lengths
    with pytest.raises(ValueError, match=rf"{at.name}.*truncated or corrupt"):
        Corpus.open(tmp_path, verify=True)


def test_missing_shard_error_names_the_shard(tmp_path):
    Corpus.create(tmp_path, 8, torch.float32).append(draw([20] * 5))
    (at,) = tmp_path.glob("shard-*")
    at.unlink()
    with pytest.raises(ValueError, match=rf"{at.name}.*missing"):
        Corpus.open(tmp_path)


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), what=st.sampled_from(["manifest", "shard"]))
def test_verify_detects_a_flipped_bit(tmp_path_factory, where, bit, what):
    path = tmp_path_factory.mktemp("corpus")
    Corpus.create(path, 4, torch.float32).append(draw([2] * 3, 4), ids=[1, 2, 3])
    (at,) = path.glob("manifest.json" if what == "manifest" else "shard-*")
    content = bytearray(at.read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    if what == "manifest" and _same_json(content, at.read_bytes()):
        return
    at.write_bytes(content)
    with pytest.raises(ValueError, match=at.name):
        Corpus.open(path, verify=True)


def _same_json(a, b):
    """Return whether JSON texts are equal. White space may change, because nothing is lost with it."""
    try:
        return json.loads(bytes(a)) == json.loads(b)
    except ValueError:
        return False


def test_newer_manifest_version_raises(tmp_path):
    Corpus.create(tmp_path, 8, torch.float32)
    at = tmp_path / "manifest.json"
    at.write_text(at.read_text().replace('"version": 1', '"version": 9'))
    with pytest.raises(ValueError, match=r"manifest.json.*a newer lik_ops wrote it"):
        Corpus.open(tmp_path)


# interrupted writers


def test_append_that_fails_before_its_commit_changes_nothing(tmp_path, monkeypatch):
    """Each call that reaches the disk fails once. Previous documents remain, and the next append succeeds."""
    corpus = Corpus.create(tmp_path, 8, torch.float32)
    documents = draw((2, 3))
    corpus.append(documents[:1])
    calls, fails = [], []

    def failing(function):
        def call(*args, **kwargs):
            calls.append(function.__name__)
            if len(calls) in fails:
                raise OSError("no space left on device")
            return function(*args, **kwargs)

        return call

    import safetensors.torch

    monkeypatch.setattr(os, "replace", failing(os.replace))
    monkeypatch.setattr(os, "fsync", failing(os.fsync))
    monkeypatch.setattr(safetensors.torch, "save_file", failing(safetensors.torch.save_file))
    monkeypatch.setattr(Path, "write_bytes", failing(Path.write_bytes))
    for step in range(1, 8):  # all calls before the commit
        calls.clear()
        fails[:] = [step]
        with pytest.raises(OSError, match="no space"):
            corpus.append(documents[1:])
        assert_holds(Corpus.open(tmp_path, verify=True), documents[:1])
        assert len(list(tmp_path.iterdir())) == 3, "one shard, the manifest and the lock"
    calls.clear()
    fails.clear()
    corpus.append(documents[1:])
    assert calls == ["save_file", "fsync", "replace", "fsync", "write_bytes", "fsync", "replace", "fsync"]
    assert_holds(Corpus.open(tmp_path, verify=True), documents)
    assert len(list(tmp_path.iterdir())) == 4, "two shards, the manifest and the lock"


def test_killed_appends_lose_no_committed_documents(tmp_path):
    command = [sys.executable, "-m", "tests.workers.corpus_writers", str(tmp_path / "corpus"), "20", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith("20 killed"), run.stdout
    print(run.stdout)


# retrieval


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [None, 1, 13])
@pytest.mark.parametrize("dtype", DTYPES)
def test_retrieve_from_corpus_matches_packed_documents(device, chunk, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "choose_part_bytes", lambda device: 3000)
    documents = draw([i % 9 for i in range(60)], 16, dtype)
    corpus = Corpus.create(tmp_path, 16, dtype)
    for first in (0, 7, 40):
        corpus.append(documents[first : {0: 7, 7: 40, 40: 60}[first]])
    Q = torch.randn(3, 5, 16).to(device, dtype)
    q_mask = (torch.rand(3, 5) > 0.3).to(device)
    expected = lik_ops.retrieve(
        Q, torch.cat(documents).to(device), 12, q_mask=q_mask, cu_seqlens_d=corpus.cu_seqlens.to(device), normalize=True
    )
    found = lik_ops.retrieve(Q, corpus, 12, chunk=chunk, q_mask=q_mask, normalize=True)
    assert torch.equal(found[1], expected[1]) and torch.equal(found[0], expected[0])
    flat = lik_ops.retrieve(Q[0], corpus, 12, chunk=chunk, q_mask=q_mask[0], normalize=True)
    assert torch.equal(flat[1], expected[1][0])


def test_parts_of_several_shards_are_copied_once(tmp_path, monkeypatch):
    """Copies to a device, simulated by a CPU, go from the mapped files to the staging buffer and are never joined."""

    def on_device(parts, device, nbytes):
        return copying.DoubleBuffer(device, nbytes, copying.CopyLanes()).copy(parts)

    def joined(part):
        raise AssertionError("joined in memory")

    monkeypatch.setattr("lik_ops.retrieval._streamed.iterate_on_device", on_device)
    monkeypatch.setattr(sources.DocumentPart, "join_pieces", joined)
    documents = draw([i % 9 for i in range(60)], 16)
    corpus = Corpus.create(tmp_path, 16, torch.float32)
    for first in range(0, 60, 7):
        corpus.append(documents[first : first + 7])
    Q = torch.randn(3, 5, 16)
    expected = lik_ops.retrieve(Q, torch.cat(documents), 12, cu_seqlens_d=corpus.cu_seqlens)
    for chunk in (None, 1, 13, 60):
        found = lik_ops.retrieve(Q, corpus, 12, chunk=chunk)
        assert torch.equal(found[1], expected[1]) and torch.equal(found[0], expected[0])


def test_retrieve_arguments_that_conflict_with_a_corpus_raise(tmp_path):
    corpus = Corpus.create(tmp_path, 8, torch.float32)
    Q = torch.randn(2, 3, 8)
    assert lik_ops.retrieve(Q, corpus, 5)[0].shape == (2, 0)
    corpus.append(draw([3, 4]))
    for name, value in (("d_mask", torch.ones(7)), ("cu_seqlens_d", corpus.cu_seqlens)):
        with pytest.raises(ValueError, match=f"retrieve: {name}: expected None with a Corpus"):
            lik_ops.retrieve(Q, corpus, 5, **{name: value})
    with pytest.raises(TypeError, match="D: expected the dtype of Q"):
        lik_ops.retrieve(Q.half(), corpus, 5)
    with pytest.raises(ValueError, match="D: expected d = 9"):
        lik_ops.retrieve(torch.randn(2, 3, 9), corpus, 5)
