"""Test `read_index` and `write_index` on indexes of fast-plaid, ColBERT, and lik_ops, and on corrupt files."""

import json
import os
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import lik_ops
from lik_ops import Index, Quantized, ResidualCodec
from lik_ops.retrieval.index import write as index_write

from ..support.residual import GOLDEN, NBITS, golden, random_codec, unpacked

MERGED, CHUNKED, COLBERT = "merged", "chunked", "colbert"
LENGTHS = ((3, 0, 5), (4,), (2, 1))  # of documents, by chunk


def tokens(*shape):
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def written(root, kind, codec, codes, residuals, chunks):
    """Write the files of an index in the layout of a library."""
    root.mkdir()
    total, ends = sum(map(sum, chunks)), np.cumsum([0, *map(sum, chunks)])
    about = {"num_chunks": len(chunks), "num_embeddings": total}
    if kind == COLBERT:
        about["config"] = {"nbits": codec.nbits, "dim": codec.d}
        torch.save(codec.centroids.half(), root / "centroids.pt")
        torch.save((codec.cutoffs, codec.weights), root / "buckets.pt")
    else:
        about |= {"nbits": codec.nbits, "num_documents": sum(map(len, chunks))}
        np.save(root / "centroids.npy", codec.centroids.half().numpy())
        np.save(root / "bucket_cutoffs.npy", codec.cutoffs.numpy())
        np.save(root / "bucket_weights.npy", codec.weights.numpy())
    for n, chunk in enumerate(chunks):
        (root / f"doclens.{n}.json").write_text(json.dumps(chunk))
        part = slice(ends[n], ends[n + 1])
        if kind == COLBERT:
            torch.save(codes[part].int().clone(), root / f"{n}.codes.pt")
            torch.save(residuals[part].clone(), root / f"{n}.residuals.pt")
        if kind == CHUNKED:
            np.save(root / f"{n}.codes.npy", codes[part].long().numpy())
            np.save(root / f"{n}.residuals.npy", residuals[part].numpy())
    if kind == MERGED:
        lengths = [n for chunk in chunks for n in chunk]
        padding = max(lengths) - lengths[-1]
        np.save(root / "merged_codes.npy", np.pad(codes.long().numpy(), (0, padding)))
        np.save(root / "merged_residuals.npy", np.pad(residuals.numpy(), ((0, padding), (0, 0))))
    (root / "metadata.json").write_text(json.dumps(about))
    return root


def example(root, kind, nbits=2, d=16):
    codec = random_codec(d, nbits)
    codec = ResidualCodec(codec.centroids.half(), codec.weights, codec.cutoffs)
    x = tokens(sum(map(sum, LENGTHS)), d)
    codes, residuals = codec.encode(x)
    return written(root, kind, codec, codes, residuals, LENGTHS), codec, codes, residuals


@pytest.mark.parametrize("kind", [MERGED, CHUNKED, COLBERT])
def test_read_index_matches_fast_plaid_tokens_and_scores(tmp_path, kind):
    found, codec = golden()
    lengths = found["doclens"].tolist()
    root = written(tmp_path / "index", kind, codec, found["codes"], found["residuals"], (lengths[:4], lengths[4:]))
    index = lik_ops.read_index(root)
    assert len(index) == len(lengths) and index.cu_seqlens.diff().tolist() == lengths
    assert index.documents.format == "residual4" and index.documents.codes.dtype == torch.int32
    decoded, bounds = index.decode(torch.float32)
    torch.testing.assert_close(decoded, found["decoded"], rtol=0, atol=1e-3)
    assert torch.equal(bounds, index.cu_seqlens)
    scores = lik_ops.maxsim(found["queries"], index)
    torch.testing.assert_close(scores, found["scores"], rtol=0, atol=1e-3)
    best, indices = lik_ops.retrieve(found["queries"], index, 3)
    assert torch.equal(best, scores.gather(1, indices)) and torch.equal(best, scores.topk(3).values)


@pytest.mark.parametrize("nbits", NBITS)
@pytest.mark.parametrize("kind", [MERGED, CHUNKED, COLBERT])
def test_index_scores_match_packed_tokens_for_every_layout(tmp_path, kind, nbits):
    root, codec, codes, residuals = example(tmp_path / "index", kind, nbits)
    index = lik_ops.read_index(root)
    expected = Quantized.of_codes(codes, residuals, codec)
    assert torch.equal(index.decode()[0], expected.dequantize())
    assert index.cu_seqlens.diff().tolist() == [n for chunk in LENGTHS for n in chunk]
    Q = tokens(2, 3, 16)
    packed = lik_ops.maxsim_varlen(Q, expected, None, index.cu_seqlens)
    mask = torch.rand(len(codes)) > 0.3
    for call in (lik_ops.maxsim, lik_ops.maxsim_varlen, lambda Q, D: lik_ops.maxsim_with_argmax(Q, D)[0]):
        assert torch.equal(call(Q, index), packed)
    assert torch.equal(lik_ops.maxsim(Q[0], index), packed[0])
    kept = [x[m] for x, m in zip(_split_documents(index), mask.split(index.cu_seqlens.diff().tolist()), strict=True)]
    torch.testing.assert_close(lik_ops.maxsim(Q, index, d_mask=mask), lik_ops.maxsim(Q, kept), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="cu_seqlens_d: expected None with an Index"):
        lik_ops.retrieve(Q, index, 2, cu_seqlens_d=index.cu_seqlens)


def _split_documents(index):
    x, bounds = index.decode(torch.float32)
    return x.split(bounds.diff().tolist())


@pytest.mark.parametrize("order", ["plaid", "big", "little"])
@pytest.mark.parametrize("nbits", NBITS)
def test_write_and_read_round_trip(tmp_path, order, nbits):
    codec = random_codec(16, nbits, bit_order=order)
    codec = ResidualCodec(codec.centroids.half(), codec.weights, codec.cutoffs, order)
    cu = torch.tensor([0, 3, 3, 12, 14])
    index = Index(lik_ops.quantize(tokens(14, 16), codec), cu)
    lik_ops.write_index(tmp_path / "index", index)
    again = lik_ops.read_index(tmp_path / "index")
    assert torch.equal(again.cu_seqlens, cu) and torch.equal(again.documents.codes, index.documents.codes)
    assert torch.equal(again.decode(torch.float32)[0], index.decode(torch.float32)[0])
    # The bytes equal fast-plaid's. The padding is the longest document length minus the last one.
    rows = np.load(tmp_path / "index/merged_residuals.npy")
    assert len(rows) == 14 + 7 and not rows[14:].any()
    kept = index.documents.data.numpy()  # "little" is stored like "plaid"
    buckets = unpacked(kept, nbits, 16, "big" if order == "big" else "plaid")
    assert np.array_equal(unpacked(rows[:14], nbits, 16), buckets)
    ivf, lengths = (np.load(tmp_path / f"index/{name}.npy") for name in ("ivf", "ivf_lengths"))
    owner = np.repeat(np.arange(4), cu.diff().numpy())
    expected = [sorted(set(owner[index.documents.codes.numpy() == c])) for c in range(7)]
    assert lengths.tolist() == [len(x) for x in expected] and ivf.tolist() == [n for x in expected for n in x]
    with pytest.raises(ValueError, match="path: expected an empty directory"):
        lik_ops.write_index(tmp_path / "index", index)


@pytest.mark.parametrize("how", ["default", "block"])
@pytest.mark.parametrize("order", ["plaid", "big"])
def test_default_device_does_not_change_results(tmp_path, order, how):
    x, lengths = tokens(40, 16), (3, 0, 30, 7)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    codec = ResidualCodec.train(x, 2, 8)
    index = Index(lik_ops.quantize(x, ResidualCodec(codec.centroids, codec.weights, codec.cutoffs, order)), bounds)
    lik_ops.write_index(tmp_path / "expected", index)
    empty = Index(lik_ops.quantize(x[:0], codec), torch.zeros(1).long())
    roots = [written(tmp_path / kind, kind, codec, *codec.encode(x), (lengths,)) for kind in (MERGED, CHUNKED, COLBERT)]
    if how == "default":
        torch.set_default_device("meta")
    try:
        with torch.device("meta") if how == "block" else nullcontext():
            trained = ResidualCodec.train(x, 2, 8)
            lik_ops.write_index(tmp_path / "found", index)
            lik_ops.write_index(tmp_path / "empty", empty)
            again = [lik_ops.read_index(root) for root in (tmp_path / "found", *roots)]
            none = lik_ops.read_index(tmp_path / "empty")
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(a, trained.tensors()[name]) for name, a in codec.tensors().items())
    for file in (tmp_path / "expected").iterdir():
        assert (tmp_path / "found" / file.name).read_bytes() == file.read_bytes(), file.name
    assert len(none) == 0 and none.device.type == "cpu"
    expected = index.decode(torch.float32)[0]
    for found in again:
        assert torch.equal(found.cu_seqlens, bounds) and torch.equal(found.decode(torch.float32)[0], expected)


def test_written_files_match_fast_plaid(tmp_path):
    """Names, dtypes, and headers equal those in the directory that `GOLDEN` was read from."""
    found, codec = golden()
    D = Quantized.of_codes(found["codes"], found["residuals"], codec)
    lik_ops.write_index(tmp_path / "index", Index(D, torch.tensor([0, *found["doclens"]]).cumsum(0)))
    names = "0.metadata.json avg_residual.npy bucket_cutoffs.npy bucket_weights.npy centroids.npy cluster_threshold.npy"
    names += " doclens.0.json ivf.npy ivf_lengths.npy merged_codes.manifest.json merged_codes.npy"
    names += " merged_residuals.manifest.json merged_residuals.npy metadata.json plan.json"
    assert sorted(x.name for x in (tmp_path / "index").iterdir()) == names.split()
    arrays = {
        name: np.load(tmp_path / f"index/{name}.npy") for name in ("merged_codes", "merged_residuals", "centroids")
    }
    for name, of in (("merged_codes", "codes"), ("merged_residuals", "residuals"), ("centroids", "centroids")):
        assert arrays[name].dtype == np.load(GOLDEN)[of].dtype
        assert np.array_equal(arrays[name][: len(found[of])], found[of].numpy())
    for name in ("merged_codes", "merged_residuals"):
        assert (tmp_path / f"index/{name}.npy").stat().st_size == 192 + arrays[name].nbytes
    kinds = {
        name: np.load(tmp_path / f"index/{name}.npy")
        for name in ("ivf", "ivf_lengths", "avg_residual", "cluster_threshold")
    }
    assert [str(x.dtype) for x in kinds.values()] == ["int64", "int32", "float32", "float32"]
    assert kinds["avg_residual"].shape == (128,) and kinds["cluster_threshold"].shape == (1,)


def test_interrupted_write_leaves_no_readable_index(tmp_path, monkeypatch):
    written = []

    def full(file, content):
        if len(written) == 5:
            raise OSError("No space left on device")
        written.append(file.write_text(json.dumps(content)))

    monkeypatch.setattr(index_write, "_write", full)
    index = Index(lik_ops.quantize(tokens(14, 16), random_codec(16, 2)), torch.tensor([0, 3, 14]))
    with pytest.raises(OSError, match="No space left"):
        lik_ops.write_index(tmp_path / "index", index)
    assert len(list((tmp_path / "index").iterdir())) == 14  # all but the metadata
    with pytest.raises(FileNotFoundError, match=r"metadata\.json: no such file"):
        lik_ops.read_index(tmp_path / "index")


def test_an_index_without_documents(tmp_path):
    codec = random_codec(16, 2)
    lik_ops.write_index(tmp_path / "a", Index(lik_ops.quantize(torch.empty(0, 16), codec), torch.zeros(1).long()))
    index = lik_ops.read_index(tmp_path / "a")
    assert len(index) == 0 and lik_ops.maxsim(tokens(2, 3, 16), index).shape == (2, 0)
    lik_ops.write_index(tmp_path / "b", Index(lik_ops.quantize(torch.empty(0, 16), codec), torch.zeros(3).long()))
    assert lik_ops.maxsim(tokens(2, 3, 16), lik_ops.read_index(tmp_path / "b")).tolist() == [[-torch.inf] * 2] * 2


def _json(root, name, change):
    content = json.loads((root / name).read_text())
    (root / name).write_text(json.dumps(change(content)))


def _array(root, name, change):
    if (root / f"{name}.npy").exists():
        np.save(root / f"{name}.npy", change(np.load(root / f"{name}.npy")))
    else:
        torch.save(torch.from_numpy(change(torch.load(root / f"{name}.pt").numpy())), root / f"{name}.pt")


def _cut(root, name, size=-5):
    (root / name).write_bytes((root / name).read_bytes()[:size])


def _huge_header(root, name):
    data = (root / name).read_bytes()
    size = str(np.load(root / name).shape[0]).encode()
    at = data.index(b"'shape': (") + 10
    (root / name).write_bytes(data[:at] + b"9" * 12 + data[at + len(size) :])


def _write_bytes(root, name, text):
    (root / name).write_bytes(text)


def _header(text):
    """Return a .npy header with `text` in place of the dtype and shape."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def _buckets(root, change):
    torch.save([change(x) for x in torch.load(root / "buckets.pt")], root / "buckets.pt")


LIES = [
    (
        MERGED,
        lambda r: _write_bytes(r, "centroids.npy", _header(b"{'descr': (")),
        "centroids.npy: not a whole .npy file",
    ),
    (MERGED, lambda r: _write_bytes(r, "merged_codes.npy", b"PK\x03\x04"), "merged_codes.npy: not a whole .npy file"),
    (COLBERT, lambda r: _write_bytes(r, "0.codes.pt", b"\x80\x02t."), "0.codes.pt: not a whole file of tensors"),
    (COLBERT, lambda r: _write_bytes(r, "buckets.pt", b"\x80\x02."), "buckets.pt: not a whole file of tensors"),
    (COLBERT, lambda r: torch.save(torch.ones(8).int().to_sparse(), r / "0.codes.pt"), "0.codes.pt: expected torch.i"),
    (COLBERT, lambda r: torch.save(torch.ones(8, device="meta"), r / "0.codes.pt"), "0.codes.pt: expected torch.i"),
    (COLBERT, lambda r: torch.save(torch.ones(7, 16, device="meta"), r / "centroids.pt"), "centroids.pt: expected"),
    (COLBERT, lambda r: torch.save(torch.nested.nested_tensor([torch.ones(2)]), r / "centroids.pt"), "centroids.pt: "),
    (COLBERT, lambda r: _buckets(r, torch.Tensor.to_sparse), "buckets.pt: expected 3 cutoffs and 4 weights"),
    (COLBERT, lambda r: _buckets(r, lambda x: x.to("meta")), "buckets.pt: expected 3 cutoffs and 4 weights"),
    (COLBERT, lambda r: _buckets(r, torch.Tensor.cfloat), "buckets.pt: expected 3 cutoffs and 4 weights"),
    (
        MERGED,
        lambda r: _json(r, "metadata.json", lambda x: x | {"nbits": 4}),
        "bucket_weights.npy: expected 15 cutoffs",
    ),
    (
        MERGED,
        lambda r: _json(r, "metadata.json", lambda x: x | {"nbits": 3}),
        "metadata.json: expected nbits of 1, 2, 4",
    ),
    (MERGED, lambda r: _json(r, "metadata.json", lambda x: [x]), "metadata.json: expected an object, got list"),
    (MERGED, lambda r: _json(r, "metadata.json", lambda x: x | {"num_chunks": -1}), "expected num_chunks, a count"),
    (MERGED, lambda r: _json(r, "metadata.json", lambda x: x | {"num_embeddings": 7}), "expected num_embeddings 15"),
    (MERGED, lambda r: _json(r, "metadata.json", lambda x: x | {"num_documents": 9}), "expected num_documents 6"),
    (MERGED, lambda r: _json(r, "doclens.1.json", lambda x: [-4]), "doclens.1.json: expected a list of lengths"),
    (CHUNKED, lambda r: _json(r, "doclens.1.json", lambda x: {"a": 1}), "doclens.1.json: expected a list of lengths"),
    (MERGED, lambda r: _cut(r, "doclens.0.json", -1), "doclens.0.json: not JSON"),
    (MERGED, lambda r: _cut(r, "metadata.json", 9), "metadata.json: not JSON"),
    (MERGED, lambda r: _array(r, "merged_codes", lambda x: x[:14]), r"merged_codes.npy: expected \[15 to 20\]"),
    (
        MERGED,
        lambda r: _array(r, "merged_codes", lambda x: np.pad(x, (0, 9))),
        r"merged_codes.npy: expected \[15 to 20\]",
    ),
    (MERGED, lambda r: _array(r, "merged_residuals", lambda x: x[:-1]), "merged_residuals.npy: expected 19 rows as"),
    (MERGED, lambda r: _array(r, "merged_residuals", lambda x: x[:, :3]), r"merged_residuals.npy: expected .*, 4\]"),
    (
        MERGED,
        lambda r: _array(r, "merged_residuals", lambda x: x.astype("i8")),
        "merged_residuals.npy: expected torch.ui",
    ),
    (MERGED, lambda r: _array(r, "merged_codes", lambda x: x + 7), "merged_codes.npy: expected codes of 7 centroids"),
    (MERGED, lambda r: _array(r, "merged_codes", lambda x: x - 7), "merged_codes.npy: expected codes of 7 centroids"),
    (MERGED, lambda r: _array(r, "centroids", lambda x: x[0]), r"centroids.npy: expected \[C, d\], got \[16\]"),
    (MERGED, lambda r: _array(r, "centroids", lambda x: x[:, :11]), "merged_residuals.npy: expected .*, 3\\]"),
    (MERGED, lambda r: _array(r, "bucket_cutoffs", lambda x: x[:2]), "expected 3 cutoffs and 4 weights for 2 bits"),
    (MERGED, lambda r: _huge_header(r, "merged_codes.npy"), "merged_codes.npy: not a whole .npy file"),
    (MERGED, lambda r: _cut(r, "merged_residuals.npy"), "merged_residuals.npy: not a whole .npy file"),
    (MERGED, lambda r: _cut(r, "centroids.npy", 20), "centroids.npy: not a whole .npy file"),
    (MERGED, lambda r: _cut(r, "merged_codes.npy", 0), "merged_codes.npy: not a whole .npy file"),
    (CHUNKED, lambda r: _array(r, "1.codes", lambda x: np.pad(x, (0, 1))), r"1.codes.npy: expected \[4\]"),
    (CHUNKED, lambda r: _array(r, "2.residuals", lambda x: x[1:]), r"2.residuals.npy: expected \[3, 4\]"),
    (COLBERT, lambda r: _array(r, "0.codes", lambda x: x[:2]), r"0.codes.pt: expected \[8\]"),
    (COLBERT, lambda r: _array(r, "0.codes", lambda x: x.astype("f4")), "0.codes.pt: expected torch.int32 or"),
    (COLBERT, lambda r: _cut(r, "1.residuals.pt"), "1.residuals.pt: not a whole file of tensors"),
    (COLBERT, lambda r: torch.save({"a": 1}, r / "buckets.pt"), "buckets.pt: expected 3 cutoffs and 4 weights"),
    (COLBERT, lambda r: torch.save([1, 2], r / "centroids.pt"), "centroids.pt: expected torch.float16 or"),
    (COLBERT, lambda r: torch.save(ResidualCodec, r / "0.codes.pt"), "0.codes.pt: not a whole file of tensors"),
    (COLBERT, lambda r: _json(r, "metadata.json", lambda x: x | {"config": 3}), "metadata.json: expected nbits"),
]


@pytest.mark.parametrize(("kind", "lie", "message"), LIES)
def test_error_names_the_corrupt_file(tmp_path, kind, lie, message):
    root = example(tmp_path / "index", kind)[0]
    lie(root)
    with pytest.raises(ValueError, match=f"read_index: .*{message}"):
        lik_ops.read_index(root)


@pytest.mark.parametrize("name", ["metadata.json", "doclens.1.json", "merged_residuals.npy", "bucket_weights.npy"])
def test_error_names_the_missing_file(tmp_path, name):
    root = example(tmp_path / "index", MERGED)[0]
    (root / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        lik_ops.read_index(root)


class _Code:
    """Object whose pickle creates a directory when it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(("kind", "name"), [(MERGED, "centroids.npy"), (COLBERT, "centroids.pt")])
def test_code_in_a_pickle_does_not_run(tmp_path, kind, name):
    """SECURITY.md names this test."""
    root, effect = example(tmp_path / "index", kind)[0], tmp_path / "effect"
    if kind == MERGED:
        np.save(root / name, np.array([_Code(effect)], dtype=object), allow_pickle=True)
        np.load(root / name, allow_pickle=True)
    else:
        torch.save(_Code(effect), root / name)
        torch.load(root / name, weights_only=False)
    effect.rmdir()  # raises if the file above has no effect when it is trusted
    with pytest.raises(ValueError, match=f"{name}: not a whole"):
        lik_ops.read_index(root)
    (tmp_path / "pickle.safetensors").write_bytes((root / name).read_bytes())
    with pytest.raises(ValueError):
        lik_ops.Quantized.load(tmp_path / "pickle.safetensors")
    assert not effect.exists()


def test_bad_input_names_the_argument(tmp_path):
    codec, D = random_codec(16, 2), lik_ops.quantize(tokens(9, 16))
    coded = lik_ops.quantize(tokens(9, 16), codec)
    bounds = torch.tensor([0, 4, 9])
    with pytest.raises(FileNotFoundError, match="path: expected a directory with centroids"):
        lik_ops.read_index(tmp_path)
    for call, error, message in (
        (lambda: Index(tokens(9, 16), bounds), TypeError, "documents: expected a Quantized, got a tensor"),
        (
            lambda: Index(lik_ops.quantize(tokens(3, 3, 16)), bounds),
            ValueError,
            r"documents: expected packed \[Td, d\]",
        ),
        (lambda: Index(D, bounds.float()), TypeError, "cu_seqlens"),
        (
            lambda: Index(D, bounds.to("meta")),
            ValueError,
            "Index: cu_seqlens: expected the device of documents, cpu, got meta",
        ),
        (lambda: lik_ops.write_index(tmp_path, D), TypeError, "index: expected an Index, got Quantized"),
        (lambda: lik_ops.write_index(tmp_path, Index(D, bounds)), TypeError, "index: expected documents of residual"),
        (lambda: lik_ops.write_index(tmp_path, Index(coded, bounds - 1)), ValueError, "expected ascending cu_seqlens"),
        (lambda: lik_ops.write_index(tmp_path, Index(coded, bounds[:2])), ValueError, "expected ascending cu_seqlens"),
    ):
        with pytest.raises(error, match=message):
            call()
