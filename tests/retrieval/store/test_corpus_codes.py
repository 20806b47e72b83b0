"""Test a `lik_ops.Corpus` of residual codes: its contents, the file of its codec, and the bits of its scores."""

import itertools
import os
import pickle
import subprocess
import sys

import pytest
import torch

import lik_ops
from lik_ops import Corpus, Quantized, quantize
from lik_ops.retrieval import sources
from lik_ops.retrieval.store import files

from ...support.residual import NBITS, random_codec
from ..test_retrieve import assert_same
from .test_corpus import DEVICES, ROOT, draw
from .test_corpus_manifest import edited
from .test_corpus_quantized import LENGTHS, SHARDS, assert_same_documents, bounds

pytest.importorskip("safetensors.torch", reason="pip install '.[retrieval]'")
every_nbits = pytest.mark.parametrize("nbits", NBITS)


def create_corpus(path, nbits=2, dtype=torch.float32, ids=None, **options):
    codec, documents = random_codec(20, nbits, **options), draw(LENGTHS, 20, dtype)
    corpus, rest = Corpus.create(path, 20, dtype, codec), iter(range(len(documents)))
    for count in SHARDS:
        chosen = list(itertools.islice(rest, count))
        corpus.append([documents[i] for i in chosen], ids=None if ids is None else [ids[i] for i in chosen])
    return Corpus.open(path, verify=True), documents, codec


def in_memory(documents, codec):
    cu_seqlens = bounds([len(x) for x in documents])
    return quantize(torch.cat(documents), codec, cu_seqlens_d=cu_seqlens), cu_seqlens


def assert_same_codes(found, expected):
    assert_same_documents(found, expected)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.codec.centroids, expected.codec.centroids.cpu())
    assert torch.equal(found.codec.table, expected.codec.table.cpu())


@every_nbits
@pytest.mark.parametrize("order", ["plaid", "big", "little"])
def test_appended_documents_are_encoded_as_in_memory(nbits, order, tmp_path):
    ids = [f"document {i}" for i in range(10)]
    corpus, documents, codec = create_corpus(tmp_path, nbits, torch.float16, ids, bit_order=order)
    assert (corpus.format, corpus.scale, corpus.d, corpus.dtype) == (f"residual{nbits}", "token", 20, torch.float16)
    assert corpus.ids == ids and f"residual{nbits} of 7 centroids" in repr(corpus)
    for begin, end in ((0, 10), (0, 3), (1, 7), (4, 4), (9, 10)):
        found, cu_seqlens = corpus.documents(begin, end)
        assert isinstance(found, Quantized) and cu_seqlens.tolist() == bounds(LENGTHS[begin:end]).tolist()
        expected, _ = in_memory([torch.empty(0, 20).half(), *documents[begin:end]], codec)
        expected = Quantized(**{**vars(expected), "error": expected.error[1:], "norm": expected.norm[1:]})
        assert_same_codes(found, expected)
    made, cu_seqlens = in_memory(documents, codec)
    assert torch.equal(torch.cat(list(corpus)), made.dequantize()) and torch.equal(corpus[2], corpus[[2]][0])
    codec = corpus.codec
    assert (codec.bit_order, codec.normalize) == (order, True) and torch.equal(codec.cutoffs, made.codec.cutoffs)


def test_append_stores_valid_codes_and_rejects_other_codecs(tmp_path):
    codec, documents = random_codec(20, 4), draw(LENGTHS, 20)
    made, cu_seqlens = in_memory(documents, codec)
    corpus = Corpus.create(tmp_path, 20, torch.float32, codec)
    corpus.append(made, lengths=LENGTHS)
    codes = made.codes.long()
    codes[1], codes[4] = 7, 2**33
    odd = Quantized(**{**vars(made), "codes": codes})
    corpus.append(odd, lengths=LENGTHS)
    found, _ = Corpus.open(tmp_path, verify=True).documents()
    assert torch.equal(found.codes, torch.cat([made.codes, torch.where(codes < 7, codes, -1).int()]))
    with pytest.raises(
        ValueError, match="documents: expected codes of the codec of the corpus, got codes of another codec"
    ):
        corpus.append(in_memory(documents, random_codec(20, 4, n_centroids=6))[0], lengths=LENGTHS)
    with pytest.raises(TypeError, match=r"documents: expected residual4 of torch.float32, as in the corpus, got int8"):
        corpus.append(quantize(torch.cat(documents), "int8", cu_seqlens_d=cu_seqlens), lengths=LENGTHS)


def test_shard_size_is_bounded_by_its_codes(tmp_path):
    corpus = Corpus.create(tmp_path, 20, torch.float32, random_codec(20, 2))
    corpus.append(draw([100] * 50, 20))
    (shard,) = tmp_path.glob("shard-*")
    assert shard.stat().st_size <= 5000 * (5 + 4 + 4) + 50 * 16 + 1000


@pytest.mark.parametrize("device", DEVICES)
@every_nbits
def test_results_are_bitwise_equal_to_in_memory_documents(device, nbits, tmp_path, monkeypatch):
    corpus, documents, codec = create_corpus(tmp_path, nbits)
    made, cu_seqlens = (x.to(device) for x in in_memory(documents, codec))
    Q = torch.randn(3, 5, 20, device=device)
    options = {"q_mask": torch.rand(3, 5, device=device) > 0.3, "q_weight": torch.rand(3, 5, device=device)}
    for each in ({}, {**options, "normalize": True}):
        expected = lik_ops.retrieve(Q, made, 12, cu_seqlens_d=cu_seqlens, **each)
        for budget, chunk in ((1, None), (300, None), (1 << 20, None), (1, 13)):
            monkeypatch.setattr(sources, "choose_part_bytes", lambda device, budget=budget: budget)
            assert_same(lik_ops.retrieve(Q, corpus, 12, chunk=chunk, **each), expected)
    best, where = lik_ops.retrieve(Q, made, 10, cu_seqlens_d=cu_seqlens)
    of_all = torch.empty_like(best).scatter_(1, where, best)
    indices = torch.tensor([[0, 7, 2, 2], [1, 6, 5, 4], [3, 9, 0, 8]])
    assert torch.equal(corpus.score(Q, indices), of_all.gather(1, indices.to(device)))


def test_quantize_to_codes_continues_and_serves_coarse_search(tmp_path):
    """An exact search reads few tokens in full, and a conversion continues as the corpus grows."""
    documents = draw([7] * 60, 20)
    corpus = Corpus.create(tmp_path / "corpus", 20, torch.float32)
    corpus.append(documents[:40])
    codec = lik_ops.ResidualCodec.train(torch.cat(documents), 8, 40)
    small = corpus.quantize(tmp_path / "small", codec)
    corpus.append(documents[40:])
    assert len(small) == 40
    small = corpus.quantize(tmp_path / "small", codec)
    assert_same_codes(small.documents()[0], in_memory(documents, codec)[0])
    Q = torch.randn(3, 5, 20)
    best = lik_ops.retrieve(Q, corpus, 4, coarse=small.documents()[0])
    exact = lik_ops.retrieve(Q, corpus, 4)
    assert torch.equal(best.scores, exact[0]) and torch.equal(best.indices, exact[1])
    other = lik_ops.ResidualCodec.train(torch.cat(documents), 8, 41)
    for format in (other, "int8"):
        with pytest.raises(ValueError, match=r"Corpus.quantize: path: expected a corpus of d=20, .*, got one of d=20"):
            corpus.quantize(tmp_path / "small", format)


def test_corpus_that_was_opened_in_inference_mode_has_gradients(tmp_path):
    path = create_corpus(tmp_path, 2)[0].path
    with torch.inference_mode():
        corpus = Corpus.open(path)
        lik_ops.retrieve(torch.randn(2, 3, 20), corpus, 2)
    Q = torch.randn(2, 3, 20, requires_grad=True)
    corpus.score(Q, [0, 1, 7]).sum().backward()
    assert Q.grad is not None and Q.grad.isfinite().all()


# the files


def test_damaged_or_missing_codec_file_raises(tmp_path):
    corpus, *_ = create_corpus(tmp_path / "corpus")
    (at,) = corpus.path.glob("codec-*")
    assert_same_codes(pickle.loads(pickle.dumps(corpus)).documents()[0], corpus.documents()[0])
    content = at.read_bytes()
    at.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=rf"{at}: the codec is truncated or corrupt"):
        Corpus.open(corpus.path)
    at.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=rf"{at}: the codec is truncated or corrupt: expected \d+ bytes, got"):
        Corpus.open(corpus.path)
    at.unlink()
    with pytest.raises(ValueError, match=rf"{at}: the codec is missing"):
        Corpus.open(corpus.path)
    at.write_bytes(content)
    edited(corpus.path, lambda c: c["quantized"].update(format="residual4"))
    with pytest.raises(ValueError, match=rf"{at}: expected a codec for residual4 of d=20, got residual2 of d=20"):
        Corpus.open(corpus.path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c["quantized"].pop("codec"), "quantized.codec: expected dict, got nothing"),
        (lambda c: c["quantized"]["codec"].update(file="../x"), "quantized.codec.file: expected a .safetensors file"),
        (lambda c: c["quantized"]["codec"].update(bytes="1"), "quantized.codec.bytes: expected int, got str"),
        (lambda c: c["quantized"]["codec"].pop("sha256"), "quantized.codec.sha256: expected str, got nothing"),
        (lambda c: c["quantized"].update(format="int8"), "quantized.format: expected one of residual1, .*, got 'int8'"),
        (lambda c: c["quantized"].update(scale="document"), "quantized.scale: expected one of token, got 'document'"),
        (lambda c: c.update(version=2), "quantized.format: expected one of int8, .*, got 'residual2'"),
    ],
)
def test_wrong_manifest_error_names_the_field(edit, message, tmp_path):
    create_corpus(tmp_path)
    edited(tmp_path, edit)
    with pytest.raises(ValueError, match=rf"{tmp_path}/manifest.json: the manifest is truncated or corrupt: {message}"):
        Corpus.open(tmp_path)


def test_failed_create_removes_codec_and_killed_one_can_be_repeated(tmp_path, monkeypatch):
    codec = random_codec(20, 2)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_manifest", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            Corpus.create(tmp_path / "failed", 20, torch.float32, codec)
    assert not list((tmp_path / "failed").glob("codec-*"))
    killed = tmp_path / "killed"
    if hasattr(os, "fork") and not (pid := os.fork()):
        files.write_manifest = lambda *_: os._exit(0)
        Corpus.create(killed, 20, torch.float32, codec)
        os._exit(1)
    if hasattr(os, "fork"):
        assert os.waitpid(pid, 0)[1] == 0 and list(killed.glob("codec-*"))
    corpus = Corpus.create(killed, 20, torch.float32, codec)
    assert [x.name for x in killed.glob("codec-*")] == [corpus._snapshot.manifest.codec.file]
    corpus.append(draw([3, 4], 20))
    assert len(Corpus.open(killed, verify=True)) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_killed_conversions_to_codes_keep_committed_documents(tmp_path):
    command = [sys.executable, "-m", "tests.workers.corpus_writers", str(tmp_path), "12", "0", "convert", "codes"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith("12 killed"), run.stdout


def test_writes_to_a_codec_do_not_change_the_corpus(tmp_path):
    corpus, documents, codec = create_corpus(tmp_path)
    Q = torch.randn(2, 3, 20)
    expected = lik_ops.retrieve(Q, corpus, 4)
    for mine in (corpus.codec, corpus.documents(0, 2)[0].codec, corpus.documents()[0].codec):
        for x in (mine.table, *mine.tensors().values()):
            x.fill_(7)
        assert_same(lik_ops.retrieve(Q, corpus, 4), expected)
    corpus.append(documents[:1])
    assert torch.equal(corpus[-1], corpus[0])
    given = lik_ops.ResidualCodec(*(x.clone() for x in codec.tensors().values()))
    made = Corpus.create(tmp_path / "made", 20, torch.float32, given)
    given.centroids.fill_(7)
    made.append(documents[:1])
    assert torch.equal(made[0], corpus[0])


# errors


def test_wrong_codec_raises(tmp_path):
    codec = random_codec(20, 2)
    with pytest.raises(ValueError, match=r"Corpus.create: format: expected a codec of d=8, got ResidualCodec"):
        Corpus.create(tmp_path / "new", 8, torch.float32, codec)
    with pytest.raises(ValueError, match=r"Corpus.create: scale: expected one of token, got 'document'"):
        Corpus.create(tmp_path / "new", 20, torch.float32, codec, "document")
    assert not (tmp_path / "new").exists()
    decoder = lik_ops.ResidualCodec(codec.centroids, codec.weights)
    with pytest.raises(ValueError, match="expected a codec with cutoffs"):
        Corpus.create(tmp_path / "new", 20, torch.float32, decoder).append(draw([3], 20))
