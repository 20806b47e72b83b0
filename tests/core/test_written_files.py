"""Test written files: never through a link, with the sign of every number, and with errors that name the path."""

import contextlib
import dataclasses
import errno
import os
import shutil
import sys

import numpy as np
import pytest
import torch

import lik_ops
from lik_ops import Corpus, Quantized
from lik_ops.core import disk

from ..retrieval.store.test_corpus import assert_holds, draw

pytest.importorskip("safetensors", reason="pip install '.[retrieval]'")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="makes links")


def make_index(tokens):
    """Return an `Index` of residual codes with one document."""
    codec = lik_ops.ResidualCodec.train(tokens, n_centroids=4)
    return lik_ops.Index(lik_ops.quantize(tokens, codec), torch.tensor([0, len(tokens)]))


# links


@pytest.fixture
def precious(tmp_path):
    """Yield a file outside the written directory, and check that its content is unchanged."""
    path = tmp_path / "precious"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"


def test_symlinked_lock_is_rejected(tmp_path, precious):
    corpus = Corpus.create(tmp_path / "corpus", 8, torch.float32)
    documents = draw((3, 4))
    corpus.append(documents)
    lock = tmp_path / "corpus" / "append.lock"
    lock.unlink()
    calls = (
        lambda: corpus.append(draw([1])),
        lambda: Corpus.open(tmp_path / "corpus").append(draw([1])),
        lambda: Corpus.open(tmp_path / "source").quantize(tmp_path / "corpus"),
    )
    Corpus.create(tmp_path / "source", 8, torch.float32).append([*documents, *draw([2])])
    shutil.rmtree(tmp_path / "corpus")
    Corpus.open(tmp_path / "source").quantize(tmp_path / "corpus", "int8")
    lock.unlink()
    Corpus.open(tmp_path / "source").append(draw([2]))
    for target in (precious, tmp_path / "nowhere"):
        lock.symlink_to(target)
        for call in calls:
            with pytest.raises(ValueError, match=r"append\.lock: expected a regular file, found a symbolic link"):
                call()
        lock.unlink()
    assert not (tmp_path / "nowhere").exists()
    assert len(Corpus.open(tmp_path / "corpus", verify=True)) == 3
    calls[2]()
    assert len(Corpus.open(tmp_path / "corpus")) == 4


def test_lock_hard_linked_to_a_user_file_is_rejected(tmp_path, precious):
    corpus = Corpus.create(tmp_path / "corpus", 8, torch.float32)
    corpus.append(draw([1]))
    lock = corpus.path / "append.lock"
    lock.unlink()
    os.link(precious, lock)
    with pytest.raises(ValueError, match=r"append\.lock: expected a file of lik_ops, found a hard link"):
        corpus.append(draw([1]))
    lock.unlink()
    corpus.append(draw([1]))
    os.link(lock, tmp_path / "copy")  # a backup may use hard links
    corpus.append(draw([1]))
    assert len(corpus) == 3


def test_lock_that_is_a_pipe_is_rejected(tmp_path):
    corpus = Corpus.create(tmp_path / "corpus", 8, torch.float32)
    (corpus.path / "append.lock").unlink()
    os.mkfifo(corpus.path / "append.lock")
    with pytest.raises(ValueError, match=r"append\.lock: expected a regular file"):
        corpus.append(draw([1]))


@pytest.mark.parametrize("dangling", [False, True])
def test_create_rejects_a_symlinked_lock(dangling, tmp_path, precious):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "append.lock").symlink_to(tmp_path / "nowhere" if dangling else precious)
    with pytest.raises(FileExistsError, match=r"append\.lock"):
        Corpus.create(tmp_path / "corpus", 8, torch.float32)
    assert not (tmp_path / "nowhere").exists()


def test_append_replaces_a_symlinked_manifest(tmp_path):
    """A download cache may store files as links to shared files."""
    documents = draw((3, 4))
    Corpus.create(tmp_path / "corpus", 8, torch.float32).append(documents[:1])
    stored = tmp_path / "stored"
    stored.mkdir()
    for file in list((tmp_path / "corpus").iterdir()):
        if file.name != "append.lock":
            file.rename(stored / file.name)
            file.symlink_to(stored / file.name)
    before = {file.name: file.read_bytes() for file in stored.iterdir()}
    corpus = Corpus.open(tmp_path / "corpus", verify=True)
    corpus.append(documents[1:])
    assert_holds(Corpus.open(tmp_path / "corpus"), documents)
    assert not (tmp_path / "corpus" / "manifest.json").is_symlink()
    assert {file.name: file.read_bytes() for file in stored.iterdir()} == before


def test_symlinked_leftovers_are_not_followed(tmp_path, precious):
    corpus = Corpus.create(tmp_path / "corpus", 8, torch.float32)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").write_text("theirs")
    name = "shard-000000-00112233445566ff.safetensors"
    (corpus.path / name).symlink_to(precious)
    (corpus.path / "writing-00112233445566ff").symlink_to(theirs)
    (corpus.path / "append.lock").write_text(f"{name}\n")
    corpus.append(draw([1]))
    assert (theirs / "file").read_text() == "theirs" and not (corpus.path / name).is_symlink()


@pytest.mark.parametrize("dangling", [False, True])
def test_save_replaces_a_symlinked_output(dangling, tmp_path, precious):
    target = tmp_path / "nowhere" if dangling else precious
    out = tmp_path / "out"

    out.symlink_to(target)
    lik_ops.quantize(torch.randn(3, 4, 8)).save(out)
    assert not out.is_symlink() and out.stat().st_size > 0 and not (tmp_path / "nowhere").exists()


def test_output_path_must_be_a_regular_file(tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link, tmp_path):
        with pytest.raises(FileExistsError, match=f"{path}: expected a regular file"):
            lik_ops.quantize(torch.randn(3, 4, 8)).save(path)
    assert {x.name for x in tmp_path.iterdir()} == {"pipe", "link"}


def test_index_files_are_not_written_through_symlinks(tmp_path, precious, monkeypatch):
    """The link may even appear after the directory was found to be empty."""
    path = tmp_path / "index"
    index = make_index(torch.nn.functional.normalize(torch.randn(40, 8), dim=-1))
    lik_ops.write_index(tmp_path / "expected", index)
    for file in (tmp_path / "expected").iterdir():
        path.mkdir()
        (path / file.name).symlink_to(precious)
        monkeypatch.setattr(type(path), "iterdir", lambda self: iter(()))
        with pytest.raises(FileExistsError, match=file.name):
            lik_ops.write_index(path, index)
        monkeypatch.undo()
        shutil.rmtree(path)


# negative bits


def make_neg_view(x):
    """Return a view of equal values with the negative bit set."""
    found = torch._neg_view(-x)
    assert found.is_neg() and torch.equal(found, x)
    return found


def test_append_keeps_the_sign_of_neg_views(tmp_path):
    documents = [*draw((3, 4, 1)), torch.randn(2, 1, dtype=torch.complex64).expand(2, 8).contiguous().conj().imag]
    corpus = Corpus.create(tmp_path, 8, torch.float32)
    corpus.append([make_neg_view(documents[0])])
    corpus.append(make_neg_view(documents[1]), lengths=make_neg_view(torch.tensor([4])))
    corpus.append(make_neg_view(documents[2]), lengths=[1])
    corpus.append(documents[3:])
    assert_holds(corpus, documents)
    assert_holds(Corpus.open(tmp_path, verify=True), documents)


@pytest.mark.parametrize("scale", ["token", "document"])
def test_append_keeps_the_sign_of_quantized_neg_views(scale, tmp_path):
    tokens, lengths = torch.randn(7, 8), [3, 4]
    plain = lik_ops.quantize(tokens, "uint8", scale, cu_seqlens_d=torch.tensor([0, 3, 7]))
    of = {name: make_neg_view(getattr(plain, name)) for name in ("scale", "minimum", "error", "norm")}
    corpus = Corpus.create(tmp_path, 8, torch.float32, "uint8", scale)
    corpus.append(dataclasses.replace(plain, data=make_neg_view(plain.data), **of), lengths=lengths)
    corpus.append(make_neg_view(tokens), lengths=lengths)
    packed = corpus.documents()[0]
    assert torch.equal(packed.dequantize(), torch.cat([plain.dequantize()] * 2))
    assert torch.equal(packed.error, torch.cat([plain.error] * 2))


@pytest.mark.parametrize("format", ["int8", "uint8", "codec"])
def test_save_keeps_the_sign_of_quantized_neg_views(format, tmp_path):
    tokens = torch.nn.functional.normalize(torch.randn(40, 8), dim=-1)
    codec = lik_ops.ResidualCodec.train(tokens, n_centroids=4)
    plain = lik_ops.quantize(tokens[None], codec if format == "codec" else format)
    of = {name: make_neg_view(x) for name, x in plain.tensors().items()}
    if format == "codec":
        of["codec"] = dataclasses.replace(codec, **{name: make_neg_view(x) for name, x in codec.tensors().items()})
    dataclasses.replace(plain, **of).save(tmp_path / "saved")
    found = Quantized.load(tmp_path / "saved")
    assert torch.equal(found.dequantize(), plain.dequantize())
    for name, x in plain.tensors().items():
        assert torch.equal(getattr(found, name), x), name


def test_written_codec_keeps_the_sign_of_neg_views(tmp_path):
    tokens = torch.nn.functional.normalize(torch.randn(40, 8), dim=-1)
    index = make_index(tokens)
    plain = index.documents.codec
    codec = dataclasses.replace(plain, **{name: make_neg_view(x) for name, x in plain.tensors().items()})
    Corpus.create(tmp_path / "corpus", 8, torch.float32, codec)
    found = Corpus.open(tmp_path / "corpus").codec
    assert torch.equal(found.centroids, plain.centroids) and torch.equal(found.weights, plain.weights)
    documents = dataclasses.replace(index.documents, codec=codec)
    lik_ops.write_index(tmp_path / "index", lik_ops.Index(documents, index.cu_seqlens))
    assert np.array_equal(np.load(tmp_path / "index" / "centroids.npy"), plain.centroids.half().numpy())
    assert np.array_equal(np.load(tmp_path / "index" / "bucket_weights.npy"), plain.weights.numpy())


# full disks


@contextlib.contextmanager
def limit_file_size(size):
    """Limit file sizes of this process to `size` bytes, to simulate a full disk."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_in_save_names_the_path_and_leaves_nothing(tmp_path):
    path, made = tmp_path / "saved", lik_ops.quantize(torch.randn(2000, 1, 16))
    path.write_text("before")
    with pytest.raises(OSError, match=f"{path}") as raised, limit_file_size(4000):
        made.save(path)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))
    assert [x.name for x in tmp_path.iterdir()] == ["saved"] and path.read_text() == "before"


@pytest.mark.parametrize(
    ("limit", "name"), [(100, "centroids.npy"), (3000, "merged_codes.npy"), (16_200, "merged_residuals.npy")]
)
def test_a_full_disk_in_write_index_names_the_file(limit, name, tmp_path):
    path, index = tmp_path / "index", make_index(torch.nn.functional.normalize(torch.randn(2000, 64), dim=-1))
    with pytest.raises(OSError, match=name) as raised, limit_file_size(limit):
        lik_ops.write_index(path, index)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path / name))
    assert not (path / "metadata.json").exists()


def test_fsync_error_names_the_replaced_file(tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="table") as raised:
        disk.replace_file(tmp_path / "table", lambda at: at.write_text("{}"))
    assert raised.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())
