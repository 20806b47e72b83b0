"""Test that deleted and updated documents never appear again in any format, and that compaction keeps results."""

import os
import pickle
import random
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lik_ops
from lik_ops import Corpus
from lik_ops.retrieval.store import append, change, snapshot
from lik_ops.retrieval.store.manifest import Manifest, Tombstones

from ...support.residual import random_codec
from .test_corpus import ROOT, draw
from .test_corpus_manifest import edited

pytest.importorskip("safetensors", reason="pip install '.[retrieval]'")
FORMATS = [
    (None, "token"),
    ("int8", "document"),
    ("uint8", "token"),
    ("fp8_e4m3", "token"),
    ("binary", "token"),
    ("rq4", "document"),
    "codes",
    *(pytest.param((name, "token"), marks=pytest.mark.slow) for name in ("fp8_e5m2", "rq2", "rq1")),
]


def create(path, d=8, format=(None, "token")):
    return Corpus.create(path, d, torch.float32, *((random_codec(d, 2), "token") if format == "codes" else format))


def fill(corpus, shards, prefix="x"):
    """Append shards of documents with these lengths, and return the documents by id."""
    found = {}
    for lengths in shards:
        names = [f"{prefix}{len(found) + i}" for i in range(len(lengths))]
        made = draw(lengths, corpus.d)
        corpus.append(made, ids=names)
        found.update(zip(names, made, strict=True))
    return found


def create_fresh_corpus(path, corpus, documents):
    """Return a corpus of the same format that never held any other documents."""
    manifest = corpus._snapshot.manifest
    format = corpus.codec if manifest.codec is not None else manifest.format
    made = Corpus.create(path, corpus.d, corpus.dtype, format, manifest.scale or "token")
    if documents:
        made.append(list(documents.values()), ids=list(documents))
    return made


def assert_same_corpus(corpus, expected):
    """Every way to read, search and convert has the bits of the expected corpus."""
    assert len(corpus) == len(expected) and (corpus.ids or []) == (expected.ids or [])
    assert torch.equal(corpus.lengths, expected.lengths) and torch.equal(corpus.cu_seqlens, expected.cu_seqlens)
    Q, n = torch.randn(3, 4, corpus.d), len(expected)
    for begin, end in ((0, n), (n // 3, n - n // 4)):
        (a, bounds), (b, known) = corpus.documents(begin, end), expected.documents(begin, end)
        assert torch.equal(bounds, known)
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b)
        else:
            assert all(torch.equal(x, y) for x, y in zip(a.tensors().values(), b.tensors().values(), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(corpus, expected, strict=True))
    for k in (1, n, n + 3):
        for chunk in (None, 2):
            pairs = zip(lik_ops.retrieve(Q, corpus, k, chunk=chunk), lik_ops.retrieve(Q, expected, k), strict=True)
            assert all(torch.equal(x, y) for x, y in pairs)
    assert torch.equal(lik_ops.maxsim_streamed(Q, corpus), lik_ops.maxsim_streamed(Q, expected))
    if n:
        wanted = torch.randint(-1, n, (3, 7))
        assert torch.equal(corpus.score(Q, wanted), expected.score(Q, wanted))
        pairs = zip(corpus.rerank(Q, wanted, 5), expected.rerank(Q, wanted, 5), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("pieces", [1024, 1])
def test_deleted_documents_appear_nowhere(format, pieces, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "_MAX_PIECES", pieces)
    corpus = create(tmp_path / "corpus", format=format)
    documents = fill(corpus, [(3, 0, 7, 2), (1,), (4, 4, 0, 6, 2, 5)])
    for step, gone in enumerate((["x2"], ["x0", "x4", "x7"], ["x9", "x10"])):
        corpus.delete(gone)
        for name in gone:
            del documents[name]
        expected = create_fresh_corpus(tmp_path / f"alone {step}", corpus, documents)
        assert_same_corpus(corpus, expected)
        assert_same_corpus(Corpus.open(corpus.path, verify=True), expected)
        assert_same_corpus(pickle.loads(pickle.dumps(corpus)), expected)
        assert f"{len(documents)} documents, {sum(map(len, documents.values()))} tokens" in repr(corpus)
    corpus.append(draw([2, 3]), ids=["y", "z"])
    assert corpus.ids == [*documents, "y", "z"]
    corpus.compact()
    corpus.delete(["y", "z"])
    assert_same_corpus(corpus, expected)
    corpus.compact()
    assert len(list(corpus.path.glob("shard-*"))) == 1
    assert_same_corpus(corpus, expected)
    assert_same_corpus(Corpus.open(corpus.path, verify=True), expected)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_updated_documents_are_replaced_in_one_commit(format, tmp_path):
    corpus = create(tmp_path / "corpus", format=format)
    documents = fill(corpus, [(3, 0, 7), (2, 5)])
    new = draw((1, 4, 0))
    before = Manifest.read(corpus.path)
    corpus.update(["x3", "x0", "x4"], torch.cat(new), lengths=[1, 4, 0])
    assert len(Manifest.read(corpus.path).shards) == len(before.shards) + 1
    for name, x in zip(("x3", "x0", "x4"), new, strict=True):
        del documents[name]
        documents[name] = x
    assert_same_corpus(corpus, create_fresh_corpus(tmp_path / "alone", corpus, documents))


def test_all_documents_may_be_deleted(tmp_path):
    corpus = create(tmp_path / "corpus")
    documents = fill(corpus, [(3, 0), (7,)])
    corpus.delete(list(documents))
    for found in (corpus, Corpus.open(corpus.path, verify=True)):
        assert len(found) == 0 and list(found) == [] and found.ids == []
        assert lik_ops.retrieve(torch.randn(2, 3, 8), found, 5)[0].shape == (2, 0)
    corpus.compact()
    assert not list(corpus.path.glob("shard-*")) and len(Corpus.open(corpus.path)) == 0
    fill(corpus, [(2,)])
    assert len(Corpus.open(corpus.path)) == 1


def test_documents_that_share_an_id_are_deleted_together(tmp_path):
    corpus = create(tmp_path / "corpus")
    corpus.append(draw([1, 2]), ids=[5, 5])
    corpus.append(draw([3, 4]), ids=[7, 5])
    corpus.update([5], draw([9]))
    assert corpus.ids == [7, 5] and corpus.lengths.tolist() == [3, 9]
    corpus.delete([5, 5])
    assert corpus.ids == [7]


@given(
    shards=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), max_size=5),
    seed=st.integers(0, 99),
    share=st.sampled_from((0.0, 0.2, 0.5, 0.9)),
    limit=st.sampled_from((1, 300, 1 << 20)),
)
def test_deletion_and_compaction_match_a_fresh_corpus(tmp_path_factory, shards, seed, share, limit):
    path, choose = tmp_path_factory.mktemp("corpus"), random.Random(seed)
    corpus = create(path / "corpus", 3)
    documents = fill(corpus, shards)
    gone = [name for name in documents if choose.random() < share]
    choose.shuffle(gone)
    corpus.delete(gone[:3])
    corpus.delete(gone[3:])
    for name in gone:
        del documents[name]
    expected = create_fresh_corpus(path / "alone", corpus, documents)
    assert_same_corpus(corpus, expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(change, "MERGED_BYTES", limit)
        corpus.compact()
        files = sorted(corpus.path.glob("shard-*"))
        assert len(files) == len(corpus._snapshot.manifest.shards), "nothing is left over"
        assert all(shard.deleted is None for shard in corpus._snapshot.manifest.shards)
        assert_same_corpus(Corpus.open(corpus.path, verify=True), expected)
        corpus.compact()
        assert sorted(corpus.path.glob("shard-*")) == files, "a compact corpus is not written again"


def test_changes_of_other_handles_are_kept(tmp_path):
    corpus = create(tmp_path / "corpus")
    fill(corpus, [(1, 2, 3, 4)])
    other = Corpus.open(corpus.path)
    other.delete(["x1"])
    other.append(draw([5]), ids=["y"])
    corpus.delete(["x0", "y"])
    assert corpus.ids == ["x2", "x3"] and other.ids == ["x0", "x2", "x3", "y"]
    other.compact()
    corpus.append(draw([6]), ids=["z"])
    assert corpus.ids == ["x2", "x3", "z"] == Corpus.open(corpus.path).ids


def test_compaction_keeps_mapped_readers_and_fails_unmapped_ones(tmp_path):
    corpus = create(tmp_path / "corpus")
    documents = fill(corpus, [(3, 2), (4, 1)])
    mapped, fresh = Corpus.open(corpus.path), Corpus.open(corpus.path)
    Q = torch.randn(2, 3, 8)
    expected = lik_ops.retrieve(Q, mapped, 4)
    corpus.delete(["x0"])
    assert all(torch.equal(a, b) for a, b in zip(lik_ops.retrieve(Q, fresh, 4), expected, strict=True))
    fresh = Corpus.open(corpus.path)
    corpus.compact()
    assert all(torch.equal(a, b) for a, b in zip(lik_ops.retrieve(Q, mapped, 4), expected, strict=True))
    assert torch.equal(mapped[0], documents["x0"])
    with pytest.raises(ValueError, match=r"shard-\S+: the shard is missing: the corpus was compacted .* open it again"):
        lik_ops.retrieve(Q, fresh, 4)
    next(corpus.path.glob("shard-*")).unlink()
    with pytest.raises(ValueError, match=r"the shard is missing$"):
        Corpus.open(corpus.path)


def test_open_succeeds_during_compaction(tmp_path, monkeypatch):
    corpus = create(tmp_path / "corpus")
    fill(corpus, [(3, 2), (4, 1)])
    corpus.delete(["x0"])
    read = Manifest.read

    def slow(path, known=None):
        found = read(path, known)
        monkeypatch.setattr(Manifest, "read", read)
        corpus.compact()
        return found

    monkeypatch.setattr(Manifest, "read", slow)
    assert Corpus.open(corpus.path, verify=True).ids == ["x1", "x2", "x3"]


def test_a_damaged_shard_is_not_compacted(tmp_path):
    corpus = create(tmp_path / "corpus")
    fill(corpus, [(3, 2), (4, 1)])
    corpus.delete(["x0"])
    shard = max(corpus.path.glob("shard-*"))
    content = bytearray(shard.read_bytes())
    content[-20] ^= 1
    shard.write_bytes(content)
    before = {x: x.read_bytes() for x in corpus.path.iterdir() if x.name != "append.lock"}
    with pytest.raises(ValueError, match=rf"{shard.name}.*checksum"):
        corpus.compact()
    assert {x: x.read_bytes() for x in corpus.path.iterdir() if x.name != "append.lock"} == before
    assert corpus.ids == ["x1", "x2", "x3"]


def test_ids_of_two_types_are_rejected_and_compacted_if_they_exist(tmp_path, monkeypatch):
    corpus = create(tmp_path / "corpus")
    fill(corpus, [(3, 2)])
    with pytest.raises(TypeError, match=r"^Corpus.append: ids: expected str, as before, got int$"):
        corpus.append(draw([2]), ids=[7])
    monkeypatch.setattr(append, "check_id_type", lambda *_: None)  # as earlier releases
    corpus.append(draw([4]), ids=[7])
    corpus.delete(["x0"])
    expected = corpus[1]
    corpus.compact()
    assert corpus.ids == Corpus.open(corpus.path, verify=True).ids == ["x1", 7] and torch.equal(corpus[1], expected)
    assert corpus.quantize(tmp_path / "small").ids == ["x1", 7]
    corpus.delete([7])
    assert corpus.ids == ["x1"]


def test_quantize_rejects_a_copy_after_further_deletions(tmp_path):
    corpus = create(tmp_path / "corpus")
    fill(corpus, [(3, 2, 4), (4, 1)])
    corpus.delete(["x1"])
    small = corpus.quantize(tmp_path / "small")
    assert small.ids == corpus.ids and torch.equal(small.lengths, corpus.lengths)
    corpus.compact()
    assert len(corpus.quantize(tmp_path / "small")) == 4, "the same documents"
    corpus.delete(["x2"])
    with pytest.raises(ValueError, match="path: expected 3 documents or fewer, got 4"):
        corpus.quantize(tmp_path / "small")


WRONG = {
    "unknown": (["x0", "a"], ValueError, "ids: expected ids of documents in the corpus, got 'a'$"),
    "several": (["a", "x0", "b"], ValueError, ".* got 'a' and 1 more$"),
    "another type": ([0], ValueError, ".* got 0$"),
    "a string": ("x0", TypeError, "ids: expected a list of str or int, got str"),
    "mixed": (["x0", 1], TypeError, "ids: expected str or int, all alike, got int, str"),
    "none": (None, TypeError, "ids: expected a list of str or int, got NoneType"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("how", ["delete", "update"])
def test_wrong_ids_raise_and_change_nothing(case, how, tmp_path):
    ids, error, message = WRONG[case]
    corpus = create(tmp_path / "corpus")
    fill(corpus, [(1, 2)])
    before = {x: x.read_bytes() for x in corpus.path.iterdir()}
    with pytest.raises(error, match=rf"^Corpus.{how}: {message}"):
        corpus.delete(ids) if how == "delete" else corpus.update(ids, draw([2] * len(ids or [])))
    assert {x: x.read_bytes() for x in corpus.path.iterdir()} == before and corpus.ids == ["x0", "x1"]


def test_wrong_updates(tmp_path):
    corpus = create(tmp_path / "corpus")
    fill(corpus, [(1, 2)])
    with pytest.raises(ValueError, match=r"Corpus.update: ids: expected each id once, got 'x0' several times"):
        corpus.update(["x0", "x1", "x0"], draw([1, 1, 1]))
    with pytest.raises(ValueError, match=r"Corpus.update: ids: expected 2, one for each document, got 1"):
        corpus.update(["x0"], draw([1, 1]))
    with pytest.raises(TypeError, match=r"Corpus.update: documents\[0\]: expected torch.float32"):
        corpus.update(["x0"], draw([1], dtype=torch.float16))
    nothing = create(tmp_path / "nothing")
    nothing.delete([])
    nothing.update([], [])
    nothing.compact()
    assert len(nothing) == 0 and not list(nothing.path.glob("shard-*"))
    at = create(tmp_path / "without ids")
    at.append(draw([1]))
    with pytest.raises(
        ValueError, match=r"Corpus.delete: ids: expected a corpus whose documents have ids, got one wit"
    ):
        at.delete([0])


def test_a_change_needs_the_lock(tmp_path):
    corpus = create(tmp_path / "corpus")
    fill(corpus, [(1, 2)])
    with change.files.lock_corpus(corpus.path):
        for call in (lambda: corpus.delete(["x0"]), lambda: corpus.update(["x0"], draw([1])), corpus.compact):
            with pytest.raises(RuntimeError, match="another writer"):
                call()
    assert Corpus.open(corpus.path).ids == ["x0", "x1"]


@given(deleted=st.lists(st.booleans(), min_size=1, max_size=70), more=st.integers(1, 9))
def test_tombstones_round_trip_any_mask(deleted, more):
    mask, lengths = torch.tensor(deleted), torch.arange(len(deleted))
    found = Tombstones.from_mask(mask, lengths)
    assert torch.equal(found.mask(len(deleted)), mask)
    assert (found.documents, found.tokens) == (sum(deleted), int(lengths[mask].sum()))
    if -(-len(deleted) // 8) != -(-(len(deleted) + more) // 8):
        with pytest.raises(ValueError, match="expected a compressed mask of"):
            found.mask(len(deleted) + more)


def tombstones(**values):
    return lambda content: content["shards"][0]["deleted"].update(values)


DAMAGED = {
    "no object": (
        lambda c: c["shards"][0].update(deleted=3),
        r"deleted: expected an object of documents, tokens, rows",
    ),
    "more": (tombstones(more=1), r"deleted: expected an object of"),
    "documents": (tombstones(documents=2), r"deleted.rows: expected a mask of 2 deleted documents"),
    "too many": (tombstones(documents=4), r"deleted.documents: expected 3 or less, as in the shard, got 4"),
    "tokens": (tombstones(tokens=7), r"deleted.tokens: expected 6 or less, as in the shard, got 7"),
    "type": (tombstones(rows=3), r"deleted.rows: expected str, got int"),
    "no base64": (tombstones(rows="?"), r"deleted.rows: expected a compressed mask: "),
    "not compressed": (tombstones(rows="AAAA"), r"deleted.rows: expected a compressed mask: "),
    "truncated": (
        lambda c: c["shards"][0]["deleted"].update(rows=c["shards"][0]["deleted"]["rows"][:8]),
        r"deleted.rows: expected a compressed mask",
    ),
    "version": (lambda c: c.update(version=1), r"shards\[0\]: expected an object of file, bytes, sha256, documents, "),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_wrong_tombstones_error_names_the_field(case, tmp_path):
    edit, message = DAMAGED[case]
    corpus = create(tmp_path)
    fill(corpus, [(1, 2, 3)])
    corpus.delete(["x1"])
    edited(tmp_path, edit)
    with pytest.raises(ValueError, match=rf"manifest is truncated or corrupt: (shards\[0\].)?{message}"):
        Corpus.open(tmp_path)


def test_deleted_tokens_must_match_the_shard(tmp_path):
    corpus = create(tmp_path)
    fill(corpus, [(1, 2, 3)])
    corpus.delete(["x1"])
    edited(tmp_path, tombstones(tokens=1))
    with pytest.raises(ValueError, match="the shard is corrupt: expected 1 deleted tokens"):
        Corpus.open(tmp_path, verify=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("steps", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_killed_changes_and_concurrent_readers_agree_with_a_dictionary(steps, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.workers.corpus_changes", str(tmp_path), str(steps), "7"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300 + steps)
    assert run.returncode == 0, run.stdout + run.stderr
    counts = {name: int(count) for count, name in (x.split() for x in run.stdout.split(", "))}
    assert counts["steps"] >= steps and counts["reads"] > steps / 10
    assert min(counts["before"], counts["after"], counts["unfinished_pools"]) > 2, counts
