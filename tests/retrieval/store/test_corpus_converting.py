"""Test the conversion of a `lik_ops.Corpus` to another format: its result, and interrupted conversions."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch

from lik_ops import Corpus, pool_tokens, quantize
from lik_ops.retrieval.store import files

from .test_corpus import ROOT, draw
from .test_corpus_quantized import SHARDS, assert_same_documents, every_format, every_scale, in_memory, written

pytest.importorskip("safetensors.torch", reason="pip install '.[retrieval]'")


def plain(path, dtype=torch.float32, ids=None):
    return written(path, None, dtype=dtype, ids=ids)


@every_format
@every_scale
@pytest.mark.parametrize("ids", [None, list(range(10)), ["\u00e9\ud800"] * 10])
def test_converted_corpus_matches_quantized_documents(format, scale, ids, tmp_path):
    corpus, documents = plain(tmp_path / "corpus", torch.float16, ids)
    before = {path: path.read_bytes() for path in corpus.path.iterdir()}
    small = corpus.quantize(tmp_path / "small", format, scale)
    for found in (small, Corpus.open(tmp_path / "small", verify=True)):
        assert (found.format, found.scale, found.dtype) == (format, scale, torch.float16)
        assert_same_documents(found.documents()[0], in_memory(documents, format, scale)[0])
        assert found.ids == ids and torch.equal(found.lengths, corpus.lengths)
    assert {path: path.read_bytes() for path in corpus.path.iterdir()} == before
    assert [x.documents for x in small._snapshot.manifest.shards] == list(SHARDS)


def test_repeated_conversion_opens_or_continues_the_result(tmp_path):
    corpus, documents = plain(tmp_path / "corpus")
    small = corpus.quantize(tmp_path / "small", "int8")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in small.path.iterdir()}
    with files.lock_corpus(small.path):  # opening a corpus needs no lock
        assert len(corpus.quantize(tmp_path / "small", "int8")) == 10
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in small.path.iterdir()} == before
    more = draw([2, 3], 20)
    corpus.append(more)
    assert_same_documents(corpus.quantize(small.path).documents()[0], in_memory([*documents, *more], "int8")[0])
    empty = Corpus.create(tmp_path / "nothing", 20, torch.float32).quantize(tmp_path / "empty")
    assert len(empty) == 0 and empty.format == "int8"


def test_concurrent_conversion_is_rejected(tmp_path):
    corpus, _ = plain(tmp_path / "corpus")
    target = Corpus.create(tmp_path / "small", 20, torch.float32, "int8")
    with files.lock_corpus(target.path), pytest.raises(RuntimeError, match="another writer is appending"):
        corpus.quantize(target.path)
    assert len(Corpus.open(target.path)) == 0


@pytest.mark.parametrize("committed", range(5))
def test_failed_conversion_resumes_after_committed_shards(committed, tmp_path, monkeypatch):
    """The failure may be within a shard, and another process may have appended the first documents."""
    corpus, documents = plain(tmp_path / "corpus", ids=list(range(10)))
    expected = in_memory(documents, "uint8", "document")[0]
    written, inner = [], files.write_shard

    def failing(*args):
        if len(written) == committed:
            raise OSError("no space left on device")
        written.append(args[1])
        return inner(*args)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_shard", failing)
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
    monkeypatch.setattr(files, "write_shard", lambda *args: written.append(args[1]) or inner(*args))
    whole = corpus.quantize(tmp_path / "small", "uint8", "document")
    assert_same_documents(whole.documents()[0], expected)
    assert whole.ids == list(range(10)) and len(Corpus.open(tmp_path / "small", verify=True)) == 10
    assert [x.file for x in whole._snapshot.manifest.shards] == [
        *written[:committed],
        *(x.file for x in whole._snapshot.manifest.shards[committed:]),
    ], "what was committed is not written again"


def test_conversion_after_a_concurrent_one_adds_no_duplicates(tmp_path, monkeypatch):
    corpus, documents = plain(tmp_path / "corpus")
    inner, waiting = files.lock_corpus, []

    @contextlib.contextmanager
    def late(path):
        """Let another conversion take the lock first and finish."""
        if (path / "manifest.json").exists() and not waiting:
            waiting.append(path)
            corpus.quantize(path)
        with inner(path) as writer:
            yield writer

    monkeypatch.setattr(files, "lock_corpus", late)
    small = corpus.quantize(tmp_path / "small")
    assert waiting == [small.path]
    assert_same_documents(small.documents()[0], in_memory(documents, "int8")[0])


def test_conversion_quantizes_one_shard_at_a_time(tmp_path, monkeypatch):
    corpus, _ = plain(tmp_path / "corpus")
    seen = []
    monkeypatch.setattr(
        "lik_ops.retrieval.store.layout.quantize",
        lambda D, *args, **kwargs: seen.append(len(D)) or quantize(D, *args, **kwargs),
    )
    corpus.quantize(tmp_path / "small")
    assert seen == [x.tokens for x in corpus._snapshot.manifest.shards]


def others(path, change):
    """Return a corpus that differs from `plain`, and the other corpus."""
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
def test_quantize_rejects_the_result_of_another_corpus(case, tmp_path):
    change, message = OTHERS[case]
    corpus, other = others(tmp_path, change)
    small = other.quantize(tmp_path / "small")
    before = {path: path.read_bytes() for path in small.path.iterdir()}
    with pytest.raises(ValueError, match=f"Corpus.quantize: path: {message}"):
        corpus.quantize(tmp_path / "small")
    assert {path: path.read_bytes() for path in small.path.iterdir()} == before


@every_format
@every_scale
def test_quantize_rejects_the_result_of_a_corpus_of_another_scale(format, scale, tmp_path):
    """Codes do not depend on the scale of a token."""
    corpus, other = others(tmp_path, lambda x: ([y / 2 for y in x], range(10)))
    other.quantize(tmp_path / "small", format, scale)
    with pytest.raises(
        ValueError, match=r"Corpus.quantize: path: expected the first documents of .*corpus, got others"
    ):
        corpus.quantize(tmp_path / "small", format, scale)


def test_quantize_rejects_unsuitable_targets_and_sources(tmp_path):
    corpus, _ = plain(tmp_path / "corpus")
    small = corpus.quantize(tmp_path / "small")
    for path, options in ((small.path, {"format": "uint8"}), (small.path, {"scale": "document"}), (corpus.path, {})):
        with pytest.raises(ValueError, match=r"Corpus.quantize: path: expected a corpus of d=20, .*, got one of d=20"):
            corpus.quantize(path, **options)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="expected an empty directory"):
        corpus.quantize(tmp_path / "full")
    with pytest.raises(ValueError, match=r"Corpus.quantize: expected a corpus of unquantized tokens, got one in int8"):
        small.quantize(tmp_path / "smaller", "binary")


def unit(documents):
    return [torch.nn.functional.normalize(x, dim=-1) for x in documents]


def assert_pooled(corpus, documents, *options, **named):
    tokens, bounds = pool_tokens(documents, *options, **named)
    assert torch.equal(corpus.lengths, bounds.diff())
    assert torch.equal(torch.cat([corpus[i] for i in range(len(corpus))]), tokens)


@pytest.mark.parametrize(
    "options",
    [{}, {"method": "sequential", "num_protected": 0, "normalize": True}, {"method": "kmeans"}, {"metric": "rows"}],
)
def test_a_pooled_corpus_has_the_pooled_documents(options, tmp_path):
    documents = unit(draw([9, 0, 1, 14, 30], 20))
    corpus = Corpus.create(tmp_path / "corpus", 20, torch.float32)
    corpus.append(documents[:2], ids=["a", "b"])
    corpus.append(documents[2:], ids=["c", "d", "e"])
    before = {path: path.read_bytes() for path in corpus.path.iterdir()}
    small = corpus.pool(tmp_path / "small", 2.5, **options)
    for found in (small, Corpus.open(tmp_path / "small", verify=True)):
        assert found.ids == corpus.ids and found.format is None and found.dtype == torch.float32
        assert_pooled(found, documents, 2.5, **options)
    assert {path: path.read_bytes() for path in corpus.path.iterdir()} == before
    corpus.delete(["a"])
    more = unit(draw([6], 20))
    corpus.append(more, ids=["f"])
    with pytest.raises(ValueError, match=r"Corpus.pool: path: expected the first documents of .*corpus, got others in"):
        corpus.pool(small.path, 2.5, **options)
    assert_pooled(corpus.pool(tmp_path / "again", 2.5, **options), [*documents[1:], *more], 2.5, **options)
    assert corpus.pool(tmp_path / "again", 2.5, **options).quantize(tmp_path / "codes", "rq2").format == "rq2"


@pytest.mark.parametrize("committed", range(4))
def test_failed_pooling_resumes_after_committed_shards(committed, tmp_path, monkeypatch):
    documents = unit(draw([7, 8, 9], 20))
    corpus = Corpus.create(tmp_path / "corpus", 20, torch.float32)
    for x in documents:
        corpus.append([x])
    written, inner = [], files.write_shard

    def failing(*args):
        if len(written) == committed:
            raise OSError("no space left on device")
        written.append(args[1])
        return inner(*args)

    with monkeypatch.context() as patch, contextlib.suppress(OSError):
        patch.setattr(files, "write_shard", failing)
        corpus.pool(tmp_path / "small", 2)
    assert len(Corpus.open(tmp_path / "small", verify=True)) == committed
    monkeypatch.setattr(files, "write_shard", lambda *args: written.append(args[1]) or inner(*args))
    assert_pooled(corpus.pool(tmp_path / "small", 2), documents, 2)
    assert len(written) == 3, "what was committed is not written again"


def test_pool_rejects_wrong_options_and_unsuitable_targets(tmp_path):
    corpus, _ = plain(tmp_path / "corpus")
    for options, message in (
        ({"factor": 0.5}, "factor: expected a finite number of at least 1"),
        ({"factor": 2, "method": "mean"}, "method: expected one of"),
        ({"factor": 2, "num_protected": -1}, "num_protected: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            corpus.pool(tmp_path / "small", **options)
    assert not (tmp_path / "small").exists()
    with torch.device("meta"):
        assert len(corpus.pool(tmp_path / "other device", 2)) == len(corpus)
    with pytest.raises(ValueError, match=r"Corpus.pool: expected a corpus of unquantized tokens, got one in int8"):
        corpus.quantize(tmp_path / "int8").pool(tmp_path / "small", 2)
    with pytest.raises(ValueError, match=r"Corpus.pool: path: expected a corpus of d=20, .*, got one of d=20, .* int8"):
        corpus.pool(tmp_path / "int8", 2)
    small = corpus.pool(tmp_path / "small", 4)
    before = {path: path.read_bytes() for path in small.path.iterdir()}
    with pytest.raises(ValueError, match=r"Corpus.pool: path: expected the first documents of"):
        corpus.pool(tmp_path / "small", 2)
    assert {path: path.read_bytes() for path in small.path.iterdir()} == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_killed_conversions_keep_committed_documents(tmp_path):
    command = [sys.executable, "-m", "tests.workers.corpus_writers", str(tmp_path), "20", "0", "convert"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith("20 killed"), run.stdout
    print(run.stdout)
