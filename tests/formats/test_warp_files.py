"""Test `lik_ops.read_index` of WARP files, valid ones from a numpy encoder and corrupt ones.

The layout is defined by ``warp/engine/utils/index_converter.py`` in github.com/jlscheerer/xtr-warp.
"""

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

import lik_ops

from ..support.residual import decoded, encoded, packed, random_codec

D, LENGTHS = 16, (3, 0, 5, 4, 2, 1)


def write_index_files(root, nbits, lengths=LENGTHS, beside=None):
    """Write an index of random tokens. With `beside`, keep files of the converted index in two chunks.

    Returns:
        The directory, the dequantized tokens by document and then by centroid, and the codes.
    """
    root.mkdir()
    codec = random_codec(D, nbits, normalize=False)
    x = normalize(torch.randn(sum(lengths), D, dtype=torch.float64), dim=-1).numpy()
    codes, buckets = encoded(x, codec)
    documents = np.repeat(np.arange(len(lengths)), lengths)
    for name in ("centroids", "cutoffs", "weights"):
        np.save(root / f"{'' if name == 'centroids' else 'bucket_'}{name}.npy", getattr(codec, name).numpy())
    order = np.argsort(codes, kind="stable")
    residuals = {"residuals": packed(buckets, nbits), "residuals.repacked": packed(buckets, nbits, "big")}
    arrays = {name: rows[order] for name, rows in residuals.items()}
    arrays["sizes"] = np.bincount(codes, minlength=len(codec.centroids))
    arrays["codes"] = documents[order].astype(np.int32)
    for name, array in arrays.items():
        torch.save(torch.from_numpy(array), root / f"{name}.compacted.pt")
    if beside is not None:
        chunks = list(lengths[:beside]), list(lengths[beside:])
        for n, chunk in enumerate(chunks):
            (root / f"doclens.{n}.json").write_text(json.dumps(chunk))
        about = {"config": {"nbits": nbits, "dim": D}, "num_chunks": 2, "num_embeddings": sum(lengths)}
        (root / "metadata.json").write_text(json.dumps(about))
        torch.save(codec.centroids.half(), root / "centroids.pt")
    order = np.lexsort((codes, documents))
    return root, torch.from_numpy(decoded(codes, buckets, codec)[order]), codes[order]


@pytest.mark.parametrize("beside", [None, 2])
@pytest.mark.parametrize("nbits", [2, 4])
def test_warp_index_matches_tokens_and_scores(tmp_path, nbits, beside):
    root, tokens, codes = write_index_files(tmp_path / "index", nbits, beside=beside)
    index = lik_ops.read_index(root)
    assert index.cu_seqlens.diff().tolist() == list(LENGTHS)
    assert index.documents.codes.tolist() == codes.tolist() and index.documents.codes.dtype == torch.int32
    found, bounds = index.decode(torch.float32)
    assert torch.equal(bounds, index.cu_seqlens)
    torch.testing.assert_close(found.double(), tokens, rtol=0, atol=1e-6)
    Q = torch.randn(3, 4, D, dtype=torch.float64)
    each = [lik_ops.reference.maxsim(Q, x[None]) for x in tokens.split(list(LENGTHS))]
    scores = lik_ops.maxsim(Q.float(), index)
    torch.testing.assert_close(scores.double(), torch.cat(each, 1), rtol=1e-5, atol=1e-5)
    best, indices = lik_ops.retrieve(Q.float(), index, 3)
    assert torch.equal(best, scores.topk(3).values) and torch.equal(best, scores.gather(1, indices))
    staged = lik_ops.retrieve(Q.float(), index, 3, n_candidates=len(LENGTHS))
    assert torch.equal(staged[0], best) and torch.equal(staged[1], indices)


def test_wrong_bit_order_decodes_wrong_tokens(tmp_path):
    root, tokens, _ = write_index_files(tmp_path / "index", 2)
    (root / "residuals.compacted.pt").rename(root / "residuals.repacked.compacted.pt")
    assert (lik_ops.read_index(root).decode(torch.float32)[0].double() - tokens).abs().max() > 0.01


def test_documents_without_tokens(tmp_path):
    """Trailing documents without tokens are only known from the converted index."""
    lengths = (2, 0, 3, 0)
    alone = lik_ops.read_index(write_index_files(tmp_path / "a", 4, lengths)[0])
    beside = lik_ops.read_index(write_index_files(tmp_path / "b", 4, lengths, beside=1)[0])
    assert len(alone) == 3 and len(beside) == 4
    Q = torch.randn(2, 3, D)
    assert torch.equal(lik_ops.maxsim(Q, beside) == -torch.inf, torch.tensor([[False, True, False, True]] * 2))
    none = lik_ops.read_index(write_index_files(tmp_path / "c", 4, ())[0])
    assert len(none) == 0 and lik_ops.maxsim(Q, none).shape == (2, 0)


def test_write_index_rejects_codec_without_normalization(tmp_path):
    index = lik_ops.read_index(write_index_files(tmp_path / "index", 4)[0])
    with pytest.raises(ValueError, match="index: expected a codec with cutoffs that normalizes"):
        lik_ops.write_index(tmp_path / "other", index)


def _tensor(root, name, change):
    torch.save(change(torch.load(root / name)), root / name)


def _cut(root, name):
    (root / name).write_bytes((root / name).read_bytes()[:-5])


SIZES, CODES, REPACKED = "sizes.compacted.pt", "codes.compacted.pt", "residuals.repacked.compacted.pt"
LIES = [
    (SIZES, lambda x: x[:-1], r"expected \[7\], as centroids say, got \[6\]"),
    (SIZES, lambda x: x.float(), "expected torch.int32 or torch.int64"),
    (SIZES, lambda x: x.flip(0) - 1, "expected sizes from 0 on"),
    (SIZES, lambda x: x + 2**40, "expected sizes from 0 on"),
    (CODES, lambda x: x[:-1], r"expected \[15\], as the other files say, got \[14\]"),
    (CODES, lambda x: x.view(-1, 1), r"expected \[15\]"),
    (CODES, lambda x: x - 1, "expected codes of 15 documents"),
    (CODES, lambda x: x + 2**30, "expected codes of 15 documents"),
    (CODES, lambda x: x.double(), "expected torch.int32 or torch.int64"),
    (REPACKED, lambda x: x[1:], r"expected \[15, 4\], as the other files say, got \[14, 4\]"),
    (REPACKED, lambda x: x[:, :3], r"expected \[15, 4\]"),
    (REPACKED, lambda x: x.int(), "expected torch.uint8"),
    (REPACKED, lambda x: {"a": x}, "expected torch.uint8, got dict"),
]


@pytest.mark.parametrize(("name", "lie", "message"), LIES)
def test_error_names_the_corrupt_file(tmp_path, name, lie, message):
    root = write_index_files(tmp_path / "index", 2)[0]
    _tensor(root, name, lie)
    with pytest.raises(ValueError, match=f"read_index: .*{name}: {message}"):
        lik_ops.read_index(root)


@pytest.mark.parametrize("name", [SIZES, CODES, REPACKED])
def test_error_names_the_truncated_file(tmp_path, name):
    root = write_index_files(tmp_path / "index", 2)[0]
    _cut(root, name)
    with pytest.raises(ValueError, match=f"read_index: .*{name}: not a whole file of tensors"):
        lik_ops.read_index(root)


@pytest.mark.parametrize("name", [SIZES, CODES, "bucket_cutoffs.npy", "bucket_weights.npy"])
def test_error_names_the_missing_file(tmp_path, name):
    root = write_index_files(tmp_path / "index", 2)[0]
    (root / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"read_index: .*{name}: no such file"):
        lik_ops.read_index(root)


def test_error_names_inconsistent_files(tmp_path):
    root = write_index_files(tmp_path / "a", 2)[0]
    weights = np.load(root / "bucket_weights.npy")
    for wrong, message in (
        (weights[:3], r"bucket_weights.npy: expected 2, 4, 16 or 256 weights, got \[3\]"),
        (weights.reshape(2, 2), r"bucket_weights.npy: expected 2, 4, 16 or 256 weights, got \[2, 2\]"),
        (np.tile(weights, 4), "bucket_weights.npy: expected 15 cutoffs and 16 weights for 4 bits"),
    ):
        np.save(root / "bucket_weights.npy", wrong)
        with pytest.raises(ValueError, match=message):
            lik_ops.read_index(root)
    root = write_index_files(tmp_path / "b", 2, beside=3)[0]
    for name, wrong, message in (
        ("doclens.0.json", [3, 1, 4], "codes.compacted.pt: expected tokens of each document as doclens say"),
        ("doclens.0.json", [3, 0], "metadata.json: expected num_embeddings 10, as doclens say, got 15"),
        ("doclens.0.json", [8], "codes.compacted.pt: expected codes of 4 documents"),
    ):
        (root / name).write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=message):
            lik_ops.read_index(root)
    about = json.loads((root / "metadata.json").read_text())
    (root / "metadata.json").write_text(json.dumps(about | {"config": {"nbits": 4}}))
    (root / "doclens.0.json").write_text("[3, 0, 5]")
    with pytest.raises(ValueError, match=r"bucket_weights\.npy: expected 15 cutoffs and 16 weights for 4 bits"):
        lik_ops.read_index(root)
