"""Test the files of a corpus: removal, damage, full disks, forks, and threads."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lik_ops
from lik_ops import Corpus
from lik_ops.retrieval.store import append, files, reading

from .test_corpus import ROOT, assert_holds, draw

pytest.importorskip("safetensors", reason="pip install '.[retrieval]'")


def run(code, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


# files of the user stay


def create_foreign_files(path):
    """Create files, directories, and links with names that resemble a writer's."""
    (path / "shard-000007.safetensors").write_bytes(b"mine")
    (path / "shard-000001-0123456789abcdef.safetensors").write_bytes(b"mine")
    (path / "writing-plans").mkdir()
    (path / "writing-plans" / "chapter.txt").write_text("mine")
    (path / "writing-0123456789abcdef").mkdir()
    (path / "writing-notes.txt").write_text("mine")
    (path / "writing-link").symlink_to(path / "writing-plans")
    (path / "writing-nowhere").symlink_to(path / "nowhere")
    return {x for x in path.rglob("*") if x.name != "manifest.json" and x.name != "append.lock"}


def test_append_keeps_foreign_files(tmp_path):
    corpus = Corpus.create(tmp_path, 8, torch.float32)
    corpus.append(draw([1]))
    theirs = create_foreign_files(tmp_path)
    corpus.append(draw([2]))
    Corpus.open(tmp_path).append(draw([3]))
    assert theirs <= set(tmp_path.rglob("*"))
    assert (tmp_path / "shard-000007.safetensors").read_bytes() == b"mine"
    assert Corpus.open(tmp_path).lengths.tolist() == [1, 2, 3]


def test_create_rejects_a_nonempty_directory(tmp_path):
    theirs = create_foreign_files(tmp_path)
    with pytest.raises(
        FileExistsError, match=r"Corpus.create: path: expected an empty directory, found .*shard-000001"
    ):
        Corpus.create(tmp_path, 8, torch.float32)
    assert set(tmp_path.rglob("*")) == theirs, "nothing removed, nothing made"


def test_create_rejects_a_foreign_lock_file(tmp_path):
    (tmp_path / "append.lock").write_text("mine")
    with pytest.raises(FileExistsError, match=r"append.lock"):
        Corpus.create(tmp_path, 8, torch.float32)
    assert (tmp_path / "append.lock").read_text() == "mine"


def test_lost_manifest_raises_and_keeps_the_shard(tmp_path):
    corpus = Corpus.create(tmp_path, 8, torch.float32)
    corpus.append(draw([1]))
    (shard,) = tmp_path.glob("shard-*")
    # A writer killed between the manifest and the end of its append leaves this state.
    (tmp_path / "append.lock").write_text(f"{shard.name}\n")
    (tmp_path / "manifest.json").unlink()
    content = shard.read_bytes()
    for call in (lambda: Corpus.create(tmp_path, 8, torch.float32), lambda: corpus.append(draw([1]))):
        with pytest.raises((FileExistsError, FileNotFoundError)):
            call()
        assert shard.read_bytes() == content


def test_append_removes_leftovers_named_in_the_lock_file_only(tmp_path):
    corpus = Corpus.create(tmp_path, 8, torch.float32)
    corpus.append(draw([1]))
    (committed,) = tmp_path.glob("shard-*")
    left = tmp_path / "shard-000001-00112233445566ff.safetensors"
    directory = tmp_path / "writing-00112233445566ff"
    for entry, removed in ((left.name, True), (committed.name, False), (f"../{left.name}", False), ("\0" * 9, False)):
        left.write_bytes(b"half of it")
        directory.mkdir(exist_ok=True)
        (directory / "manifest.json").write_text("{")
        (tmp_path / "append.lock").write_text(entry + "\n")
        corpus.append(draw([1]))
        assert left.exists() == directory.exists() == (not removed)
        assert (tmp_path / "append.lock").read_bytes() == b"" and committed.exists()
    assert len(Corpus.open(tmp_path, verify=True)) == 5


def test_create_succeeds_after_a_killed_create(tmp_path):
    directory = tmp_path / "writing-00112233445566ff"
    directory.mkdir()
    (directory / "manifest.json").write_text("{")
    (tmp_path / "append.lock").write_text("shard-000000-00112233445566ff.safetensors\n")
    corpus = Corpus.create(tmp_path, 8, torch.float32)
    assert {x.name for x in tmp_path.iterdir()} == {"manifest.json", "append.lock"} and len(corpus) == 0


# disks


FULL = """
import errno, os, resource, sys, torch, lik_ops
path, what = sys.argv[1:]
corpus = lik_ops.Corpus.open(path)
before = sorted(os.listdir(path))
limit = {"shard": 20_000, "manifest": len(open(path + "/manifest.json").read()) + 20}[what]
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    corpus.append([torch.zeros(10_000 if what == "shard" else 1, 8)])
except OSError as error:
    assert error.errno == errno.EFBIG and path in str(error), error
    assert what in os.path.basename(error.filename), error
    assert sorted(os.listdir(path)) == before, os.listdir(path)
    print("refused")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
@pytest.mark.parametrize("what", ["shard", "manifest"])
def test_full_disk_raises_os_error_and_changes_nothing(what, tmp_path):
    documents = draw([3] * 6)
    corpus = Corpus.create(tmp_path, 8, torch.float32)
    for document in documents:
        corpus.append([document])
    found = run(FULL, tmp_path, what)
    assert found.stdout == "refused\n", found.stderr
    assert_holds(Corpus.open(tmp_path, verify=True), documents)


def test_os_errors_without_a_path_name_the_shard(tmp_path, monkeypatch):
    corpus = Corpus.create(tmp_path, 8, torch.float32)

    def fsync(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=r"shard-000000.*safetensors") as raised:
        corpus.append(draw([1]))
    assert raised.value.errno == errno.ENOSPC


# forks


FORKED = """
import os, sys, time, torch, lik_ops
from pathlib import Path
from lik_ops.retrieval.store import files
path, how = Path(sys.argv[1]), sys.argv[2]
with files.lock_corpus(path):
    child = os.fork()
    if child == 0:
        time.sleep(100)
        os._exit(0)
    print(child, flush=True)
    if how == "dies":
        os._exit(0)
    try:
        lik_ops.Corpus.open(path).append([torch.zeros(1, 8)])
    except RuntimeError:
        print("locked", flush=True)  # the child closes what it inherited, which does not unlock it
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("how", ["lives", "dies"])
def test_a_forked_child_does_not_keep_the_lock(how, tmp_path):
    """A process forks during an append, and its child survives. The process may be killed."""
    Corpus.create(tmp_path / "corpus", 8, torch.float32)
    log, errors = tmp_path / "log", tmp_path / "errors"  # not pipes, which the child would keep open
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("w") as file, errors.open("w") as warnings:
        command = [sys.executable, "-c", FORKED, str(tmp_path / "corpus"), how]
        done = subprocess.run(command, env=environment, stdout=file, stderr=warnings, timeout=120)
    assert done.returncode == 0, errors.read_text()
    child, *rest = log.read_text().split()
    try:
        assert rest == (["locked"] if how == "lives" else [])
        Corpus.open(tmp_path / "corpus").append(draw([1]))
        os.kill(int(child), 0)  # it still exists
    finally:
        os.kill(int(child), signal.SIGKILL)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_exit_of_forked_child_keeps_files_of_its_parent(tmp_path):
    Corpus.create(tmp_path, 8, torch.float32)
    parent = os.getpid()
    try:
        with files.lock_corpus(tmp_path) as writer, writer.reserve_file(0) as (directory, name):
            if (child := os.fork()) == 0:
                raise SystemExit
            os.waitpid(child, 0)
            assert directory.is_dir() and (tmp_path / "append.lock").read_text().strip() == name
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert not directory.exists()


# damage


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_shard_with_flipped_bit_opens_or_raises_value_error(tmp_path_factory, where, bit):
    """Checksums are not compared here, so damage must be found in the contents."""
    path = tmp_path_factory.mktemp("corpus")
    Corpus.create(path, 4, torch.float32).append(draw([2] * 3, 4), ids=["1", "2", "3"])
    (at,) = path.glob("shard-*")
    content = bytearray(at.read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    at.write_bytes(content)
    try:
        corpus = Corpus.open(path)
        assert len(corpus.ids) == len(corpus) == 3 and corpus.documents()[0].shape == (6, 4)
    except ValueError as error:
        assert at.name in str(error)


@pytest.mark.parametrize("ids", ["[1, 2", '["a"]', '["a", 1]', '{"a": 1}', "[[1], [2]]", "[" * 100_000])
def test_corrupt_ids_error_names_the_shard(ids, tmp_path, monkeypatch):
    monkeypatch.setattr(append, "encode_ids", lambda *_: ids.encode())
    Corpus.create(tmp_path, 8, torch.float32).append(draw([3, 4]))
    with pytest.raises(ValueError, match=r"shard-000000-\w+.safetensors: the shard is corrupt: ids: "):
        _ = Corpus.open(tmp_path).ids


def test_reading_a_removed_shard_raises(tmp_path):
    corpus = Corpus.create(tmp_path, 8, torch.float32)
    corpus.append(draw([3, 4]))
    (at,) = tmp_path.glob("shard-*")
    at.unlink()
    with pytest.raises(ValueError, match=rf"{at.name}: the shard is missing"):
        corpus.documents()


def test_reading_an_emptied_shard_raises(tmp_path):
    corpus = Corpus.create(tmp_path, 8, torch.float32)
    corpus.append(draw([3, 4]))
    (at,) = tmp_path.glob("shard-*")
    del corpus
    corpus = Corpus.open(tmp_path)
    at.write_bytes(b"")
    with pytest.raises(ValueError, match=rf"{at.name}: the shard is truncated or corrupt"):
        corpus.documents()


# cost of an append


def test_append_checks_only_its_own_shard(tmp_path, monkeypatch):
    """The 400th append costs as much as the 10th, except for a manifest of 400 lines."""
    corpus = Corpus.create(tmp_path, 8, torch.float32)
    other = Corpus.open(tmp_path)
    opened, inner = [], reading.ShardFile.check_exists
    monkeypatch.setattr(reading.ShardFile, "check_exists", lambda self: opened.append(self.shard) or inner(self))
    listed, listdir = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or listdir(path))
    monkeypatch.setattr(reading.ShardFile, "_open_checked", lambda self: pytest.fail("an append opens no shard"))
    parsed, read = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or read(text))
    documents = draw([1, 2, 3, 4])
    for document in documents[:3]:
        corpus.append([document])
    assert len(opened) == len({shard.file for shard in opened}) == 3 and not parsed and not listed
    other.append(documents[3:])
    assert len(opened) == 3 and len(parsed) == len(listed) == 1, "what others appended is read once"
    other.append([])
    assert len(opened) == 3 and len(parsed) == len(listed) == 1
    monkeypatch.undo()
    assert_holds(other, documents)


# threads


def test_search_during_appends_sees_one_snapshot(tmp_path):
    """Each search returns the result of one existing corpus: all of its documents and none of the next."""
    corpus = Corpus.create(tmp_path, 4, torch.float32)
    corpus.append(draw([1] * 5, 4))
    stop, errors, seen = threading.Event(), [], set()

    def search():
        Q = torch.ones(1, 2, 4)
        try:
            while not stop.is_set():
                n = len(corpus)
                scores, indices = lik_ops.retrieve(Q, corpus, 1 << 20, chunk=7)
                assert scores.shape[1] >= n and sorted(indices[0].tolist()) == list(range(scores.shape[1]))
                assert scores.shape[1] % 5 == 0 and sum(1 for _ in corpus) % 5 == 0
                packed, cu_seqlens = corpus.documents()
                assert len(packed) == len(cu_seqlens) - 1
                seen.add(scores.shape[1])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=search) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        corpus.append(draw([1] * 5, 4))
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert len(seen) > 1


# a default device


@pytest.mark.parametrize("how", ["default", "block"])
def test_a_default_device_changes_nothing(how, tmp_path):
    documents = draw((3, 0, 7, 1))
    Q = torch.randn(2, 3, 8)
    if how == "default":
        torch.set_default_device("meta")
    block = torch.device("meta" if how == "block" else "cpu")
    try:
        if how == "block":
            block.__enter__()
        corpus = Corpus.create(tmp_path, 8, torch.float32)
        corpus.append(documents[:2], ids=["a", "b"])
        corpus.append(torch.cat(documents[2:]), ids=["c", "d"], lengths=[7, 1])
        found = [corpus.documents()[0], corpus.documents(2, 3)[0], corpus[2], *corpus[[0, -1]]]
        best = (
            lik_ops.retrieve(Q, corpus, 4),
            lik_ops.retrieve(Q, torch.cat(documents).numpy(), 4, cu_seqlens_d=corpus.cu_seqlens),
        )
        scores, reranked = corpus.score(Q, [[0, 1], [2, -1]]), corpus.rerank(Q, [3, 1, 2])
    finally:
        torch.set_default_device(None)
        if how == "block":
            block.__exit__(None, None, None)
    expected = [torch.cat(documents), documents[2], documents[2], documents[0], documents[3]]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert_holds(Corpus.open(tmp_path, verify=True), documents, ["a", "b", "c", "d"])
    assert torch.equal(best[0][0], best[1][0]) and best[0][0].shape == (2, 4)
    assert torch.equal(scores, corpus.score(Q, [[0, 1], [2, -1]]))
    assert torch.equal(reranked[0], corpus.rerank(Q, [3, 1, 2])[0])
