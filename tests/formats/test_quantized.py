"""Test `lik_ops.quantize` and scores of its results: formulas, layouts, error bounds, and invalid input."""

import dataclasses
import itertools
import pickle
from types import SimpleNamespace

import pytest
import torch

import lik_ops
from lik_ops import Quantized, backends, reference
from lik_ops.core.arguments import score_dtype
from lik_ops.formats.table import ALL_FORMATS, FORMATS, RESIDUAL_FORMATS, convert_fp8, list_queries
from lik_ops.portable.forward import quantized as portable

from ..support.common import INTERPRETING
from ..support.residual import quantize

SCALES = ("token", "document", "tensor")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_format = pytest.mark.parametrize("format", FORMATS)
every_format_and_codes = pytest.mark.parametrize("format", ALL_FORMATS)
unrotated_format = pytest.mark.parametrize("format", [f for f in FORMATS if not FORMATS[f].rotated])
rounded_queries = [(f, query) for f in ALL_FORMATS for query in list_queries(f)[1:]]
every_scale = pytest.mark.parametrize("scale", SCALES)


def tokens(*shape, dtype=torch.float32):
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1).to(dtype)


def dequantize_by_formula(D, format, scale):
    """Return the dequantized tokens by the documented formulas."""
    axes = {"token": (-1,), "document": (-2, -1), "tensor": tuple(range(D.dim()))}[scale]
    x = D.double()
    if format == "binary":
        s = x.abs().mean(-1, keepdim=True)
        s = s if scale == "token" else s.amax(axes[:-1], keepdim=True)
        return torch.where(x > 0, s, -s)
    if format == "uint8":
        low, high = x.amin(axes, keepdim=True), x.amax(axes, keepdim=True)
        s = (high - low) / 255
        return ((x - low) / s).round().clamp(0, 255) * s + low
    s = x.abs().amax(axes, keepdim=True) / FORMATS[format].largest
    if format == "int8":
        return (x / s).round().clamp(-127, 127) * s
    return (x / s).float().to(FORMATS[format].dtype).double() * s


@unrotated_format
@every_scale
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_dequantized_tokens_match_formulas(format, scale, dtype):
    D = tokens(7, 9, 20, dtype=dtype)
    found = quantize(D, format, scale)
    assert found.shape == D.shape and found.dtype == dtype and found.data.dtype == FORMATS[format].dtype
    # A quotient near a rounding boundary may round differently in fp32, by one step.
    step = found.scale.double().unsqueeze(-1) * (32 if format.startswith("fp8") else 1.001)
    off = (found.dequantize(torch.float64) - dequantize_by_formula(D, format, scale)).abs()
    assert (off <= step).all() and (off > 1e-6).float().mean() < 0.01


@every_format
@every_scale
def test_error_and_norm_are_maxima_over_document_tokens(format, scale):
    D = tokens(7, 9, 20) * torch.rand(7, 9, 1)
    found = quantize(D, format, scale)
    off = (found.dequantize(torch.float64) - D.double()).norm(dim=-1).amax(-1)
    for bound, exact in ((found.error, off), (found.norm, D.double().norm(dim=-1).amax(-1))):
        assert (bound.double() >= exact).all()
        torch.testing.assert_close(bound.double(), exact, rtol=1e-6, atol=0)


@every_format
@every_scale
def test_quantize_zero_tiny_and_nonfinite_tokens(format, scale):
    D = tokens(6, 3, 16)
    D[1] = 0
    D[2, 0] = 0.25
    D[3] *= 1e-41  # these have no fp32 scale with an inverse
    D[4, 1, 2], D[5, 2, 7] = torch.nan, torch.inf
    found = quantize(D, format, scale)
    x = found.dequantize()
    spread = {"token": [(4, 1), (5, 2)], "document": [(4,), (5,)], "tensor": [...]}[scale]
    expected = torch.zeros(6, 3, dtype=torch.bool)
    for at in spread:
        expected[at] = True
    assert torch.equal(x.isnan().all(-1), expected) and torch.equal(x.isnan().any(-1), expected)
    if scale != "tensor":
        assert not x[1].any() and not x[3].abs().max() > 1e-40
        if FORMATS[format].rotated:
            assert (x[2] - D[2]).norm(dim=-1).max() <= found.error[2]
        else:
            torch.testing.assert_close(x[2, 0], D[2, 0], rtol=0.2 if scale == "document" else 1e-2, atol=0.1)
        scores = lik_ops.maxsim(tokens(2, 4, 16), found)
        assert scores[:, 4:].isnan().all() and scores[:, :4].isfinite().all()


@every_format
@every_scale
def test_tokens_of_zeros_stay_zeros_unless_their_format_has_no_zero(format, scale):
    D, mask = tokens(2, 4, 16), torch.ones(2, 4, dtype=torch.bool)
    D[:, 1], mask[:, 2] = 0, False
    found = quantize(D, format, scale, d_mask=mask).dequantize()[:, 1:3]
    has_zero = scale == "token" or format in ("int8", "fp8_e4m3", "fp8_e5m2")
    assert torch.equal(found.any(-1), torch.full((2, 2), not has_zero))


@pytest.mark.parametrize(
    ("format", "scale"), [*itertools.product(FORMATS, SCALES), *((format, "token") for format in RESIDUAL_FORMATS)]
)
def test_masked_tokens_have_no_effect(format, scale):
    D, mask = tokens(5, 8, 12), torch.rand(5, 8) > 0.4
    poisoned = torch.where(mask[..., None], D, torch.nan)
    a = quantize(poisoned, format, scale, d_mask=mask)
    b = quantize(D * mask[..., None], format, scale, d_mask=mask.int())
    assert all(torch.equal(x.view(torch.uint8), b.tensors()[name].view(torch.uint8)) for name, x in a.tensors().items())
    Q = tokens(2, 3, 12)
    torch.testing.assert_close(
        lik_ops.maxsim(Q, a, d_mask=mask), reference.maxsim(Q, a.dequantize(), d_mask=mask), rtol=0, atol=1e-5
    )


def test_candidate_calls_apply_autocast_and_reject_bad_arguments():
    Q, small = torch.randn(2, 3, 8), lik_ops.quantize(torch.randn(2, 4, 5, 8))
    lengths = torch.tensor([3, 2]), torch.tensor([[5, 4, 0, 1]] * 2)
    expected = lik_ops.maxsim_padded(Q.bfloat16(), small, *lengths)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(lik_ops.maxsim_padded(Q, small, *lengths), expected)
    with pytest.raises(TypeError, match="Q: expected"):
        lik_ops.maxsim_padded(Q.to_sparse(), small, *lengths)
    with pytest.raises(TypeError, match="d_mask: expected a Tensor"):
        lik_ops.maxsim(Q, small, None, [True])


@every_format
def test_packed_documents_quantize_like_dense_documents(format):
    D = tokens(4, 6, 20)
    cu_seqlens = torch.tensor([0, 6, 12, 12, 18, 24], dtype=torch.int32)
    for scale in SCALES:
        packed, dense = quantize(D.flatten(0, 1), format, scale, cu_seqlens_d=cu_seqlens), quantize(D, format, scale)
        assert torch.equal(packed.data.view(torch.uint8), dense.data.flatten(0, 1).view(torch.uint8))
        some = [0, 1, 3, 4]
        assert torch.equal(packed.error[some], dense.error) and torch.equal(packed.norm[some], dense.norm)
        assert packed.error[2] == packed.norm[2] == 0


def _layouts(Q, D, format):
    """Return calls with quantized documents, and the same calls with dequantized tokens."""
    made = quantize(D, format)
    x, flat = made.dequantize(Q.dtype), quantize(D.flatten(0, 1), format)
    rows, cu = flat.dequantize(Q.dtype), torch.arange(0, D.shape[0] * D.shape[1] + 1, D.shape[1])
    q_mask, d_mask = torch.rand(Q.shape[:2]) > 0.3, torch.rand(D.shape[:2]) > 0.3
    q_mask[0] = d_mask[1] = False
    kept = {
        "q_mask": q_mask,
        "d_mask": d_mask,
        "q_weight": torch.randn(Q.shape[:2], dtype=torch.promote_types(Q.dtype, torch.float32)),
    }
    own = quantize(D.expand(len(Q), *D.shape), format)
    lengths, listed = torch.tensor([3, 0, 1]), torch.randint(0, len(D), (len(Q), 4))
    pairs = torch.tensor([[0, 1], [2, 4], [1, 0]])
    for f in (lik_ops.maxsim, lik_ops.maxsim_with_argmax):
        yield (lambda D, f=f: f(Q, D)), made, x
        yield (lambda D, f=f: f(Q, D, **kept)), made, x
        yield (lambda D, f=f: f(Q, D, normalize=True)), made, x
        yield (lambda D, f=f: f(Q[0], D)), made, x
        yield (lambda D, f=f: f(Q, D)), quantize(D[0], format), quantize(D[0], format).dequantize(Q.dtype)
        yield (lambda D, f=f: f(list(Q), D)), made, x
        yield (lambda D, f=f: f(Q, D, d_mask=d_mask.expand(len(Q), *d_mask.shape))), own, own.dequantize(Q.dtype)
    yield (lambda D: lik_ops.maxsim_pairs(Q, D)), made[: len(Q)], x[: len(Q)]
    for f in (lik_ops.maxsim_varlen, lik_ops.maxsim_varlen_with_argmax):
        yield (lambda D, f=f: f(Q, D, None, cu)), flat, rows
        yield (lambda D, f=f: f(Q, D, q_weight=kept["q_weight"])), made, x
    for f in (lik_ops.maxsim_candidates_varlen, lik_ops.maxsim_candidates_varlen_with_argmax):
        yield (lambda D, f=f: f(Q, D, cu[:-1][listed], cu.diff()[listed])), flat, rows
    for f in (lik_ops.maxsim_pair_list, lik_ops.maxsim_pair_list_with_argmax):
        yield (lambda D, f=f: f(Q, D, pairs)), made, x
        yield (lambda D, f=f: f(Q, D, pairs, cu_seqlens_d=cu)), flat, rows
    for f in (lik_ops.maxsim_padded, lik_ops.maxsim_padded_with_argmax):
        doc_lengths = torch.randint(0, D.shape[1] + 1, (len(Q), len(D)))
        yield (lambda D, f=f, n=doc_lengths: f(Q, D, lengths, n)), own, own.dequantize(Q.dtype)


@every_format_and_codes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_scores_match_dequantized_documents(format, dtype):
    Q, D = tokens(3, 4, 20).to(dtype), tokens(5, 6, 20)
    for n, (call, made, x) in enumerate(_layouts(Q, D, format)):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        found, expected = call(made), call(x)
        if not isinstance(found, tuple):
            found, expected = (found,), (expected,)
        assert found[0].dtype == wide, n
        # A bf16 D rounds the tokens, and dequantized tokens are not rounded.
        tolerance = 1e-5 if dtype != torch.bfloat16 else 0.1
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=tolerance, msg=lambda m, n=n: f"{n}: {m}")
        if len(found) > 1 and dtype != torch.bfloat16:
            for a, b in zip(found[1], expected[1], strict=True):
                assert a.dtype == torch.int64 and torch.equal(a, b), n


@every_format_and_codes
def test_scores_and_argmax_match_reference(format):
    Q, D = tokens(3, 4, 20), tokens(50, 6, 20)
    made = quantize(D, format)
    scores, winners = lik_ops.maxsim_with_argmax(Q, made)
    expected, won = reference.maxsim_with_argmax(Q.double(), made.dequantize(torch.float64))
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=1e-5)
    at = reference.maxsim_at(Q.double(), made.dequantize(torch.float64), winners)
    torch.testing.assert_close(at, expected, rtol=0, atol=1e-6)  # of equal similarities, the first in fp32
    assert (winners == won).float().mean() > 0.9


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_every_fp8_code_converts_like_torch(format):
    data = torch.arange(256).to(torch.uint8).view(FORMATS[format].dtype)
    numbers, times = convert_fp8(data, format)
    torch.testing.assert_close(numbers.float() * times, data.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.skipif(INTERPRETING, reason="of the portable backend")
def test_dense_decoding_does_not_change_bits(format, dtype, monkeypatch):
    """Small calls are decoded at once if documents have one length and fill their tensor."""
    Q, D = tokens(3, 5, 40, dtype=dtype), tokens(6, 7, 40, dtype=dtype)
    q_mask, d_mask, weight = torch.rand(3, 5) > 0.3, torch.rand(6, 7) > 0.3, torch.rand(3, 5).to(score_dtype(dtype))
    d_mask[2] = False
    Q[~q_mask] = torch.nan
    made, given = quantize(D, format), {"q_mask": q_mask, "d_mask": d_mask, "q_weight": weight}
    decode, found = portable._try_dense, []

    def noted(r, stored):
        found.append(decode(r, stored))
        return found[-1]

    monkeypatch.setattr(portable, "_try_dense", noted)
    for options in ({}, given, {**given, "normalize": True}):
        results = []
        for most in (4 << 20, 0):
            found.clear()
            monkeypatch.setattr(portable, "_MAX_DECODED_BYTES", most)
            results.append((lik_ops.maxsim(Q, made, **options), *lik_ops.maxsim_with_argmax(Q, made, **options)))
            assert [x is not None for x in found] == [most > 0] * 2
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    monkeypatch.setattr(portable, "_MAX_DECODED_BYTES", 4 << 20)
    flat = quantize(D.flatten(0, 1), format)
    for cu, short in (([0, 21, 42], True), ([0, 7, 21], False), ([0, 20, 42], False), ([0, 21, 43], False)):
        found.clear()
        lik_ops.maxsim_varlen(Q, flat, None, torch.tensor(cu))
        assert [x is not None for x in found] == [short], cu


@pytest.mark.parametrize("format", ["int8", "residual4"])
def test_bits_do_not_depend_on_batch(format):
    Q, D = tokens(4, 5, 20), tokens(60, 7, 20)
    made = quantize(D, format)
    whole, winners = lik_ops.maxsim_with_argmax(Q, made)
    chosen = [3, 59, 0, 17]
    assert torch.equal(lik_ops.maxsim(Q, made[chosen]), whole[:, chosen])
    assert torch.equal(lik_ops.maxsim(Q[1:2], made[10:20]), whole[1:2, 10:20])
    listed = torch.tensor([chosen] * 4)
    offsets, lengths = listed * 7, torch.full_like(listed, 7)
    flat = quantize(D.flatten(0, 1), format)
    assert torch.equal(lik_ops.maxsim_candidates_varlen(Q, flat, offsets, lengths), whole[:, chosen])
    # Consecutive documents are decoded from a view, and other documents from gathered rows.
    apart, bounds = torch.arange(60).flip(0), torch.arange(61) * 7
    found = lik_ops.maxsim_with_argmax(Q, made[apart])
    for a, b in zip(found, (whole[:, apart], winners[:, apart]), strict=True):
        assert torch.equal(a, b)
    listed = torch.stack([torch.arange(4).repeat_interleave(60), apart.repeat(4)], 1)
    pairs = lik_ops.maxsim_pair_list(Q, flat, listed, cu_seqlens_d=bounds)
    assert torch.equal(pairs, whole[listed[:, 0], listed[:, 1]])


def test_out_of_range_bounds_score_nan():
    Q, flat = tokens(2, 3, 8), quantize(tokens(10, 8))
    offsets, lengths = torch.tensor([[0, -1, 8], [10, 3, 2]]), torch.tensor([[3, 2, 5], [0, -1, 8]])
    x = flat.dequantize()
    assert torch.equal(
        lik_ops.maxsim_candidates_varlen(Q, flat, offsets, lengths).isnan(),
        torch.tensor([[False, True, True], [False, True, False]]),
    )
    torch.testing.assert_close(
        lik_ops.maxsim_candidates_varlen(Q, flat, offsets, lengths),
        lik_ops.maxsim_candidates_varlen(Q, x, offsets, lengths),
        equal_nan=True,
    )


@pytest.mark.gpu
@every_format_and_codes
def test_gpu_scores_match_cpu(format):
    Q, D = tokens(3, 32, 128), tokens(40, 30, 128)
    made = quantize(D, format)
    there = quantize(D.cuda(), format)
    off = there.data.cpu().view(torch.uint8).ne(made.data.view(torch.uint8))
    if ALL_FORMATS[format].rotated:  # rotated tokens are sums, whose order may choose another scale for a token
        assert off.flatten(0, 1).any(1).float().mean() < 0.01
        assert (there.dequantize().cpu() - made.dequantize()).norm() < 0.01 * made.dequantize().norm()
    else:
        assert off.sum() == 0  # a short failure message
    found = lik_ops.maxsim(Q.cuda(), made.to("cuda"))
    torch.testing.assert_close(found.cpu(), lik_ops.maxsim(Q, made), rtol=0, atol=1e-4)


@every_format_and_codes
def test_save_load_and_pickle_round_trip(format, tmp_path):
    pytest.importorskip("safetensors", reason="pip install '.[retrieval]'")
    made = quantize(tokens(5, 6, 20, dtype=torch.float16), format)
    made.save(tmp_path / "documents.safetensors")
    for found in (Quantized.load(tmp_path / "documents.safetensors"), pickle.loads(pickle.dumps(made)), made.to("cpu")):
        assert (found.format, found.d, found.dtype, found.shape) == (format, 20, torch.float16, made.shape)
        assert found.tensors().keys() == made.tensors().keys()
        assert torch.equal(found.dequantize(), made.dequantize()) and torch.equal(found.error, made.error)
    assert repr(made) == f"Quantized([5, 6, 20], format='{format}', device='cpu')" and len(made) == 5
    kept = ALL_FORMATS[format]
    bytes_each = -(-20 // kept.features_per_element) + kept.scale.itemsize + 4 * (format == "uint8" or kept.nbits > 0)
    of_codec = 4 * (7 * 20 + 2 * 2**kept.nbits - 1) if kept.nbits else 0
    assert made.nbytes == 30 * bytes_each + 5 * 8 + of_codec


def test_query_precision_survives_copies_and_files(tmp_path):
    pytest.importorskip("safetensors", reason="pip install '.[retrieval]'")
    D = tokens(5, 6, 20)
    made, plain = (lik_ops.quantize(D, query=query) for query in ("int8", "half"))
    made.save(tmp_path / "documents.safetensors")
    read = Quantized.load(tmp_path / "documents.safetensors")
    again = dataclasses.replace(plain, query="int8")
    for found in (made, made[1:3], made[[4]], made.to("cpu"), read, pickle.loads(pickle.dumps(made)), again):
        assert found.query == "int8" and found.to_flat_encoded().format == "int8_int8" and "query='int8'" in repr(found)
    assert plain.query == "half" and plain.to_flat_encoded().format == "int8" and "query" not in repr(plain)
    Q = tokens(2, 3, 20)
    assert torch.equal(lik_ops.maxsim(Q, made), lik_ops.maxsim(Q, plain))  # a CPU does not round queries
    assert torch.equal(made.dequantize(), plain.dequantize())


def test_binary_scores_match_hamming_distances():
    """With a scale of 1, a similarity is d - 2 h for the Hamming distance h, and scores are exact integers."""
    Q, D = tokens(3, 4, 130), tokens(5, 6, 130)
    Q[0, 0, :5], D[1, 2, :7] = 0, 0  # a feature of 0 has a bit of 0, as -1 has
    data = lik_ops.quantize(D, "binary").data
    made = Quantized(data, torch.ones(1, 1), "binary", 130, D.dtype, query="binary")
    distances = ((Q > 0)[:, None, :, None] != (D > 0)[None, :, None]).sum(-1)
    expected = (130 - 2 * distances.amin(-1)).sum(-1).float()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert torch.equal(lik_ops.maxsim(Q.to(dtype), made), expected)
    assert made.to_flat_encoded().format == "binary_binary" and "query='binary'" in repr(made)


def test_save_replaces_file_and_keeps_it_on_failure(tmp_path, monkeypatch):
    safetensors = pytest.importorskip("safetensors.torch", reason="pip install '.[retrieval]'")
    path, link = tmp_path / "documents.safetensors", tmp_path / "link"
    made, other = quantize(tokens(2000, 6, 20)), quantize(tokens(500, 6, 20))
    made.save(path)
    link.symlink_to(path)
    read = Quantized.load(path)
    dataclasses.replace(read, query="int8").save(link)
    assert not link.is_symlink() and Quantized.load(link).query == "int8"
    assert Quantized.load(path).query == "half", "nothing is written through a link"
    other.save(str(path))
    assert torch.equal(read.data, made.data) and torch.equal(Quantized.load(path).data, other.data)
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode

    def broken(tensors, at, metadata):
        at.write_bytes(b"half of it")
        raise OSError("the disk is full")

    monkeypatch.setattr(safetensors, "save_file", broken)
    with pytest.raises(OSError, match=r"documents\.safetensors: the disk is full"):
        made.save(path)
    assert torch.equal(Quantized.load(path).data, other.data)
    assert {x.name for x in tmp_path.iterdir()} == {path.name, "link", "plain"}


def test_old_pickle_without_query_loads_as_half():
    state = lik_ops.quantize(tokens(5, 6, 20)).__getstate__()
    del state["query"]
    old = Quantized.__new__(Quantized)
    old.__setstate__(state)
    assert old.query == "half" and old.to("cpu").query == "half"


def test_load_rejects_foreign_and_missing_files(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="pip install '.[retrieval]'")
    safetensors.save_file({"data": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"path: expected a file that Quantized\.save wrote, got .*x\.safetensors"):
        Quantized.load(tmp_path / "x.safetensors")
    with pytest.raises(FileNotFoundError):
        Quantized.load(tmp_path / "none")
    with pytest.raises(TypeError, match="int"):
        Quantized.load(3)


@every_format_and_codes
def test_error_names_the_damaged_file(format, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="pip install '.[retrieval]'")
    from safetensors import safe_open

    made, at = quantize(tokens(3, 4, 20), format), tmp_path / "x.safetensors"
    made.save(at)
    whole = at.read_bytes()
    wrong = [whole[:n] for n in (0, 4, 8, 50, len(whole) - 3)]
    with safe_open(at, framework="pt") as file:
        about = file.metadata()
    found = safetensors.load(whole)
    for name in ("data", "scale", *(("codec.weights", "codes") if made.codec is not None else ())):
        wrong.append(safetensors.save({key: x for key, x in found.items() if key != name}, about))
        wrong.append(safetensors.save({**found, name: torch.zeros(3)}, about))
    wrong.append(safetensors.save({**found, "other": torch.zeros(3)}, about))
    for name in ("d", *(("bit_order",) if made.codec is not None else ())):
        wrong.append(safetensors.save(found, {key: x for key, x in about.items() if key != name}))
        wrong.append(safetensors.save(found, {**about, name: "x"}))
    for text in wrong:
        at.write_bytes(text)
        with pytest.raises(ValueError, match=r"path: expected a file that Quantized\.save wrote, got .*x\.safetensors"):
            Quantized.load(at)


@pytest.mark.parametrize(("format", "scale"), [("uint8", "document"), ("uint8", "tensor"), ("residual2", "token")])
def test_indexing_selects_documents(format, scale):
    made = quantize(tokens(5, 6, 20), format, scale)
    for index in (slice(1, 4), [4, 0], torch.tensor([2]), torch.tensor([True, False, True, False, False])):
        part = made[index]
        assert torch.equal(part.dequantize(), made.dequantize()[index])
        assert torch.equal(part.error, made.error[index]) and torch.equal(part.norm, made.norm[index])
    for index in (torch.tensor([[0, 1], [2, 3]]), torch.tensor([[4]]), torch.tensor(3), torch.zeros(0, 2).long()):
        part, expected = made[index], made.dequantize()[index]
        assert part.shape == expected.shape and torch.equal(part.dequantize(), expected)
        assert torch.equal(part.error, made.error[index])
    assert quantize(tokens(5, 20))[1:3].error is None
    for index in (1, (0, 1), None, ...):
        with pytest.raises(TypeError, match="Quantized: index: expected a slice, a list or a tensor"):
            made[index]


@pytest.mark.parametrize("shape", [(5, 6, 20), (2, 3, 6, 20)])
@pytest.mark.parametrize(("format", "scale"), [("int8", "token"), ("uint8", "document"), ("fp8_e4m3", "tensor")])
def test_indexing_by_a_mask(format, scale, shape):
    """The mask selects tokens, which returns packed documents, or candidates of a query."""
    made = quantize(tokens(*shape), format, scale)
    for axes in range(2, len(shape)):
        keep = torch.rand(shape[:axes]) < 0.6
        part, of_tokens = made[keep], axes == len(shape) - 1
        assert torch.equal(part.dequantize(), made.dequantize()[keep])
        assert part.error is None if of_tokens else torch.equal(part.error, made.error[keep])


def test_affine_codes_of_another_library_score_like_reference():
    """The other library uses affine codes with a scale and a minimum for each token."""
    D = tokens(3, 4, 8)
    low, high = D.amin(-1), D.amax(-1)
    scale = (high - low) / 255
    data = ((D - low[..., None]) / scale[..., None]).round().to(torch.uint8)
    made = Quantized(data, scale, "uint8", 8, torch.float32, minimum=low)
    Q = tokens(2, 5, 8)
    torch.testing.assert_close(lik_ops.maxsim(Q, made), reference.maxsim(Q, D), rtol=0, atol=0.05)
    assert made.error is None


@pytest.mark.parametrize(("format", "query"), [("int8", "half"), *rounded_queries])
def test_compiled_scores_and_gradients_match_eager(format, query):
    Q, made = tokens(2, 3, 8).requires_grad_(), quantize(tokens(4, 5, 8), format, query=query)

    def score(Q, data, scale):
        return lik_ops.maxsim(Q, Quantized(data, scale, format, 8, torch.float32, query=query))

    torch.compiler.reset()
    found = torch.compile(score, fullgraph=True, backend="aot_eager")(Q, made.data, made.scale)
    expected = lik_ops.maxsim(Q, made)
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(x.square().sum(), Q)[0] for x in (found, expected)))


def test_compiled_residual_codes_match_eager():
    Q, made = tokens(2, 3, 8), quantize(tokens(4, 5, 8), "residual2")
    codec = made.codec

    @torch.compile(fullgraph=True, backend="aot_eager")
    def score(Q, codes, residuals, centroids):
        same = lik_ops.ResidualCodec(centroids, codec.weights)
        return lik_ops.maxsim(Q, Quantized.of_codes(codes, residuals, same))

    torch.testing.assert_close(score(Q, made.codes, made.data, codec.centroids), lik_ops.maxsim(Q, made))


class _Index(torch.nn.Module):
    def __init__(self, D):
        super().__init__()
        self.D = D

    def forward(self, Q):
        return lik_ops.maxsim(Q, self.D)


@pytest.mark.parametrize(("format", "query"), [*((f, "half") for f in ALL_FORMATS), *rounded_queries])
def test_exported_module_scores_like_eager(format, query, tmp_path):
    """Documents stored in a module become constants of the graph, however they are stored."""
    index, Q = _Index(quantize(tokens(5, 9, 16), format, query=query)), tokens(2, 4, 16)
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(index, (Q,), dynamic_shapes={"Q": {0: batch}})
    (node,) = (n for n in program.graph.nodes if "lik" in str(n.target))
    assert node.target == torch.ops.lik.maxsim_quantized_fwd.default and index.D.to_flat_encoded().format in node.args
    torch.export.save(program, tmp_path / "index.pt2")
    loaded = torch.export.load(tmp_path / "index.pt2").module()
    for x in (Q, tokens(7, 4, 16)):
        assert torch.equal(loaded(x), index(x))


def test_exported_with_documents_as_arguments():
    class Scores(torch.nn.Module):
        def forward(self, Q, data, scale):
            return lik_ops.maxsim(Q, Quantized(data, scale, "int8", 16, torch.float32))

    D, Q = quantize(tokens(5, 9, 16)), tokens(2, 4, 16)
    program = torch.export.export(Scores(), (Q, D.data, D.scale))
    assert torch.equal(program.module()(Q, D.data, D.scale), lik_ops.maxsim(Q, D))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda D: quantize(None), TypeError, "quantize: D: expected a Tensor, got NoneType"),
        (lambda D: quantize(D.int()), TypeError, "quantize: D: expected float16, .*, got torch.int32"),
        (lambda D: quantize(D, "int4"), ValueError, "quantize: format: expected one of int8, uint8, .*, got 'int4'"),
        (lambda D: quantize(D, scale="row"), ValueError, "quantize: scale: expected one of token, .*, got 'row'"),
        (lambda D: lik_ops.quantize(D, query="int4"), ValueError, "query: expected one of half, int8, got 'int4'"),
        (lambda D: lik_ops.quantize(D, "uint8", query="int8"), ValueError, "query: expected one of half, got 'int8'"),
        (lambda D: lik_ops.quantize(D, query="binary"), ValueError, "query: expected one of half, int8, got 'binary'"),
        (
            lambda D: Quantized(D.char(), D[..., 0], "int8", 8, D.dtype, query="fp8"),
            ValueError,
            "Quantized: query: expected one of half, int8, got 'fp8'",
        ),
        (lambda D: quantize(D[0, 0]), ValueError, r"quantize: D: expected \[Ld, d\], .*, got \[8\]"),
        (lambda D: quantize(D, cu_seqlens_d=torch.tensor([0, 4])), ValueError, r"quantize: D: expected \[Td, d\], got"),
        (lambda D: quantize(D[0], cu_seqlens_d=torch.tensor([0, 9])), ValueError, "ascending bounds from 0 to 5"),
        (lambda D: quantize(D, d_mask=torch.ones(4)), ValueError, r"quantize: d_mask: expected shape \[4, 5\]"),
        (lambda D: Quantized(D, D[..., 0], "int8", 8, D.dtype), TypeError, "data: expected torch.int8 for int8, got"),
        (lambda D: Quantized(D.char(), D, "int8", 8, D.dtype), ValueError, r"scale: expected \[4, 5\], or 1 for any"),
        (lambda D: Quantized(D.byte(), D[..., 0], "uint8", 8, D.dtype), TypeError, "minimum: expected a Tensor, got"),
        (
            lambda D: Quantized(D.char(), D[..., 0], "int8", 8, D.dtype, D[..., 0]),
            TypeError,
            "minimum: expected None for",
        ),
        (lambda D: Quantized(D.byte(), D[..., 0], "binary", 8, D.dtype), ValueError, r"data: expected \[..., L, 1\]"),
        (lambda D: lik_ops.maxsim(D[0, :, :7], quantize(D)), ValueError, r"maxsim: D: expected d = 7 as in Q"),
        (lambda D: lik_ops.maxsim(None, quantize(D)), TypeError, "maxsim: Q: expected a Tensor or a list of tensors"),
        (lambda D: lik_ops.maxsim([None], quantize(D)), TypeError, r"maxsim: Q\[0\]: expected a Tensor, got NoneType"),
        (lambda D: lik_ops.maxsim(D.to_sparse(), quantize(D)), TypeError, "maxsim: Q: expected a dense"),
        (lambda D: lik_ops.maxsim([], quantize(D[None])), ValueError, "maxsim: D: expected Nq = 0 candidate lists"),
        (lambda D: lik_ops.maxsim(D, quantize(D[None])), ValueError, "maxsim: D: expected Nq = 4 candidate lists"),
        (lambda D: lik_ops.maxsim(D, quantize(D), d_mask=torch.ones(2)), ValueError, "maxsim: d_mask: expected shape"),
        (lambda D: lik_ops.similarity_map(D[0], quantize(D[0])), TypeError, "D: expected a Tensor"),
    ],
)
def test_bad_input_names_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call(tokens(4, 5, 8))


@pytest.mark.parametrize("wrong", [lambda t: t.tolist(), lambda t: t.float(), lambda t: t.to("meta"), lambda t: t[:1]])
@pytest.mark.parametrize("name", ["doc_offsets", "doc_lengths"])
def test_candidates_are_validated_before_the_fast_path(name, wrong, monkeypatch):
    """The fast path of a GPU does not check: it would read floats as integers, and CPU pointers."""

    def launched(*args):
        raise AssertionError("launched")

    monkeypatch.setattr(backends, "select_backend", lambda *args: SimpleNamespace(forward_quantized_cut=launched))
    given = {"doc_offsets": torch.tensor([[0, 5], [3, 9]]), "doc_lengths": torch.tensor([[2, 3], [4, 1]])}
    documents = quantize(tokens(20, 8))
    with pytest.raises(AssertionError, match="launched"):
        lik_ops.maxsim_candidates_varlen(tokens(2, 3, 8), documents, **given)
    given[name] = wrong(given[name])
    with pytest.raises((TypeError, ValueError), match=f"maxsim_candidates_varlen: {name}: expected"):
        lik_ops.maxsim_candidates_varlen(tokens(2, 3, 8), documents, **given)


def test_no_documents_and_no_tokens():
    Q = tokens(2, 3, 8)
    for format in FORMATS:
        for scale in SCALES:
            assert lik_ops.maxsim(Q, quantize(torch.empty(0, 5, 8), format, scale)).shape == (2, 0)
            assert (lik_ops.maxsim(Q, quantize(torch.empty(3, 0, 8), format, scale)) == -torch.inf).all()
    assert lik_ops.maxsim(Q[:0], quantize(torch.empty(0, 2, 4, 8))).shape == (0, 2)
    assert lik_ops.maxsim([], quantize(torch.empty(0, 2, 4, 8))).shape == (0, 2)
    none = torch.empty(2, 0, dtype=torch.long)
    assert lik_ops.maxsim_candidates_varlen(Q, quantize(tokens(5, 8)), none, none).shape == (2, 0)


def test_queries_as_sequences():
    """Test every kind of sequences that is unpacked, and an empty list, with documents and with an index."""
    queries, cu_seqlens = [tokens(3, 8), tokens(1, 8)], torch.tensor([0, 4, 6])
    packed = quantize(tokens(6, 8))
    nested = torch.nested.nested_tensor(queries)
    for own in (False, True):
        D = quantize(tokens(2, 3, 4, 8) if own else tokens(5, 4, 8))
        assert torch.equal(lik_ops.maxsim(nested, D), lik_ops.maxsim(queries, D))
    scores, winners = lik_ops.maxsim_with_argmax(nested, D)
    assert torch.equal(scores, lik_ops.maxsim(queries, D)) and [len(x) for x in winners] == [3, 3]
    for D in (quantize(tokens(5, 4, 8)), quantize(tokens(5, 4, 8, dtype=torch.float64))):
        found = lik_ops.maxsim([], D)
        assert found.shape == (0, 5) and found.dtype == score_dtype(D.dtype)
        assert lik_ops.maxsim_with_argmax((), D)[1] == []
    index = lik_ops.Index(packed, cu_seqlens)
    assert torch.equal(lik_ops.maxsim(nested, index), lik_ops.maxsim(queries, index))
    assert lik_ops.maxsim([], index).shape == (0, 2)
