"""Test `lik_ops.ResidualCodec` and residual codes against a numpy encoder and an index of fast-plaid."""

import copy

import numpy as np
import pytest
import torch

import lik_ops
from lik_ops import Quantized, ResidualCodec, reference

from ..support import residual
from ..support.residual import NBITS, golden, random_codec

ORDERS = ("plaid", "big", "little")
every_nbits = pytest.mark.parametrize("nbits", NBITS)
every_order = pytest.mark.parametrize("order", ORDERS)


def tokens(*shape, dtype=torch.float32):
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1).to(dtype)


@pytest.mark.parametrize(
    ("nbits", "buckets", "byte"),
    [
        (1, [1, 0, 0, 0, 0, 0, 0, 0], 0x80),
        (2, [0, 1, 2, 3], 0x27),
        (2, [3, 0, 0, 1], 0xC2),
        (4, [2, 13], 0x4B),
        (8, [6], 0x60),
    ],
)
def test_bytes_match_fast_plaid(nbits, buckets, byte):
    """The bytes were read from its files. For whole files see `residual.GOLDEN`."""
    d = len(buckets)
    weights = torch.arange(2.0**nbits)
    codec = ResidualCodec(torch.zeros(1, d), weights, weights[1:] - 0.5, normalize=False)
    codes, residuals = codec.encode(torch.tensor([buckets], dtype=torch.float32))
    assert codes.tolist() == [0] and residuals.tolist() == [[byte]]
    assert codec.decode(codes, residuals).tolist() == [buckets]


def test_tokens_and_scores_match_fast_plaid():
    found, codec = golden()
    assert codec.nbits == 4 and codec.d == 128
    decoded = codec.decode(found["codes"], found["residuals"], torch.float32)
    torch.testing.assert_close(decoded, found["decoded"], rtol=0, atol=1e-3)
    D = Quantized.of_codes(found["codes"], found["residuals"], codec)
    scores = lik_ops.maxsim_varlen(found["queries"], D, None, torch.tensor([0, *found["doclens"]]).cumsum(0))
    torch.testing.assert_close(scores, found["scores"], rtol=0, atol=1e-3)
    codes, residuals = codec.encode(found["tokens"])
    assert torch.equal(codes.long(), found["codes"])
    assert (residuals != found["residuals"]).float().mean() < 2e-3  # fast-plaid subtracts in half precision


@pytest.mark.parametrize("order", ["big", "little"])
def test_wrong_bit_order_decodes_wrong_tokens(order):
    found, codec = golden()
    other = ResidualCodec(codec.centroids, codec.weights, codec.cutoffs, order)
    decoded = other.decode(found["codes"], found["residuals"], torch.float32)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(decoded, found["decoded"], rtol=0, atol=1e-3)
    assert (decoded * found["decoded"]).sum(-1).mean() < 0.9


@every_nbits
@every_order
@pytest.mark.parametrize("d", [8, 20, 128])
def test_codes_and_tokens_match_formulas(nbits, order, d):
    codec, x = random_codec(d, nbits, bit_order=order), tokens(3, 7, d)
    codes, residuals = codec.encode(x)
    expected, buckets = residual.encoded(x.flatten(0, 1).double().numpy(), codec)
    assert codes.dtype == torch.int32 and codes.shape == (3, 7) and residuals.shape == (3, 7, -(-d * nbits // 8))
    assert np.array_equal(codes.flatten().numpy(), expected)
    flat = residuals.flatten(0, 1).numpy()
    found = residual.unpacked(flat, nbits, d, order)
    assert (np.abs(found - buckets) <= 1).all() and (found != buckets).mean() < 1e-2  # at the edge of two buckets
    assert np.array_equal(residual.packed(found, nbits, order), flat)
    decoded = torch.from_numpy(residual.decoded(expected, found, codec)).view(3, 7, d)
    torch.testing.assert_close(codec.decode(codes, residuals).double(), decoded, rtol=0, atol=1e-6)
    made = Quantized.of_codes(codes, residuals, codec)
    torch.testing.assert_close(made.dequantize(torch.float64), decoded, rtol=0, atol=1e-6)
    torch.testing.assert_close(made.dequantize(), lik_ops.quantize(x, codec).dequantize(), rtol=0, atol=0)
    if 1 < nbits < 8:  # each order gives other bytes
        others = [residual.packed(buckets, nbits, other) for other in ORDERS]
        assert not any(np.array_equal(a, b) for a, b in ((others[0], others[1]), (others[0], others[2])))


def test_a_residual_that_equals_a_cutoff_is_below_it():
    codec = ResidualCodec(torch.zeros(1, 4), torch.arange(4.0), torch.tensor([-1.0, 0, 1]), normalize=False)
    codes, residuals = codec.encode(torch.tensor([[-1.0, 0, 1, 1.5]]))
    assert codec.decode(codes, residuals).tolist() == [[0, 1, 2, 3]]


@every_nbits
def test_codec_training(nbits):
    centers = tokens(16, 32)
    x = torch.nn.functional.normalize(centers.repeat(200, 1) + 0.05 * torch.randn(3200, 32), dim=-1)
    codec = ResidualCodec.train(x, nbits, 64)
    assert codec.nbits == nbits and codec.centroids.shape == (64, 32) and codec.centroids.dtype == torch.float16
    torch.testing.assert_close(codec.centroids.float().norm(dim=1), torch.ones(64), rtol=0, atol=1e-3)
    codes, residuals = codec.encode(x)
    cosines = (codec.decode(codes, residuals, torch.float32) * x).sum(-1)
    assert cosines.mean() > {1: 0.9, 2: 0.98, 4: 0.999, 8: 0.9999}[nbits]
    counts = np.bincount(residual.unpacked(residuals.numpy(), nbits, 32).ravel(), minlength=2**nbits)
    assert counts.min() > 0.3 * counts.mean() and counts.max() < 3 * counts.mean()  # quantiles of held-out residuals
    again = ResidualCodec.train(x, nbits, 64)
    assert all(torch.equal(a, again.tensors()[name]) for name, a in codec.tensors().items())
    assert (codec.cutoffs.diff() >= 0).all() and len(codec.weights) == 2**nbits
    inside = codec.weights[:-1] <= codec.cutoffs, codec.cutoffs <= codec.weights[1:]
    assert all(x.all() for x in inside)


def test_training_ignores_nonfinite_tokens():
    x = tokens(100, 8)
    poisoned = torch.cat([x, torch.full((3, 8), torch.nan), torch.full((2, 8), torch.inf)])
    codec = ResidualCodec.train(poisoned, 2)
    assert all(t.isfinite().all() for t in codec.tensors().values())
    assert len(codec.centroids) <= 100
    assert ResidualCodec.train(x[:1], 1).centroids.shape == (1, 8)


@every_nbits
def test_out_of_range_codes_score_nan_for_their_document(nbits):
    codec = random_codec(20, nbits)
    D, Q = lik_ops.quantize(tokens(6, 5, 20), codec), tokens(2, 3, 20)
    whole, winners = lik_ops.maxsim_with_argmax(Q, D)
    for dtype in (torch.int32, torch.int64):
        codes = D.codes.to(dtype).clone()
        codes[1, 2], codes[2, 0], codes[4, 4] = -1, len(codec.centroids), torch.iinfo(dtype).max
        bad = Quantized(D.data, D.scale, D.format, 20, D.dtype, codes=codes, codec=codec)
        scores, found = lik_ops.maxsim_with_argmax(Q, bad)
        assert scores[:, [1, 2, 4]].isnan().all() and torch.equal(scores[:, [0, 3, 5]], whole[:, [0, 3, 5]])
        assert torch.equal(found[:, [0, 3, 5]], winners[:, [0, 3, 5]])
        assert torch.equal(bad.dequantize().isnan().all(-1), (codes < 0) | (codes >= 7))
        kept = (codes >= 0) & (codes < 7)  # masked codes never matter
        torch.testing.assert_close(
            lik_ops.maxsim(Q, bad, d_mask=kept), reference.maxsim(Q, D.dequantize(), d_mask=kept), rtol=0, atol=1e-5
        )
    none = ResidualCodec(codec.centroids[:0], codec.weights, codec.cutoffs)
    assert lik_ops.maxsim(Q, Quantized.of_codes(D.codes, codec.to_table_bit_order(D.data), none)).isnan().all()


def test_zero_tokens_stay_zero_and_nonfinite_tokens_become_nan():
    D = tokens(4, 3, 16)
    D[1], D[2, 0, 3], D[3, 1, 2] = 0, torch.nan, torch.inf
    x = lik_ops.quantize(D, random_codec(16, 2)).dequantize()
    assert not x[1].any() and x[0].isfinite().all()
    expected = torch.zeros(4, 3, dtype=torch.bool)
    expected[2, 0] = expected[3, 1] = True
    assert torch.equal(x.isnan().all(-1), expected) and torch.equal(x.isnan().any(-1), expected)


def test_two_stage_search_is_exact():
    Q, D = tokens(3, 4, 32), tokens(300, 6, 32)
    coarse = lik_ops.quantize(D, ResidualCodec.train(D, 8, 64))
    best, exact = lik_ops.retrieve(Q, D, 5, coarse=coarse), lik_ops.retrieve(Q, D, 5)
    assert torch.equal(best.scores, exact[0]) and torch.equal(best.indices, exact[1])
    assert (best.rescored < 300).any()
    scores, indices = lik_ops.retrieve(Q, coarse, 5)
    whole = lik_ops.maxsim(Q, coarse).topk(5)
    assert torch.equal(scores, whole.values) and torch.equal(indices, whole.indices)


def _operator(Q, D, **other):
    stored = D.to_flat_encoded()._replace(**other)
    bounds = torch.arange(0, 7, 3), torch.arange(0, 20, 5), torch.full((4,), 5)
    return torch.ops.lik.maxsim_quantized_fwd(Q, *stored, *bounds, *[None] * 4, False, torch.int32, 3)


def test_vmap_over_queries_and_codes_matches_loop():
    Q, D = tokens(2, 6, 8), lik_ops.quantize(tokens(20, 8), random_codec(8, 2))
    found, other_codes = torch.vmap(lambda q: _operator(q, D))(Q), D.codes.flip(0)
    several = torch.stack([D.codes, other_codes])
    of_codes = torch.vmap(lambda q, codes: _operator(q, D, codes=codes))(Q, several)
    for n in range(2):
        for a, b in zip(found, _operator(Q[n], D), strict=True):
            assert torch.equal(a[n], b)
        for a, b in zip(of_codes, _operator(Q[n], D, codes=several[n]), strict=True):
            assert torch.equal(a[n], b)


def test_flop_counter_counts_products():
    from torch.utils.flop_counter import FlopCounterMode

    D = lik_ops.quantize(tokens(20, 8), random_codec(8, 4))
    with FlopCounterMode(display=False) as counter:
        _operator(tokens(6, 8), D)
    assert counter.get_total_flops() == 2 * 6 * 20 * 8


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        ({"codes": None}, TypeError, "codes: expected a Tensor, got NoneType"),
        ({"codes": torch.zeros(20)}, TypeError, "codes: expected torch.int32 or torch.int64, got torch.float32"),
        ({"codes": torch.zeros(19).int()}, ValueError, r"codes: expected \[20\], got \[19\]"),
        ({"centroids": torch.zeros(7, 9)}, ValueError, r"centroids: expected \[None, 8\], got \[7, 9\]"),
        ({"centroids": torch.zeros(7, 8).double()}, TypeError, "centroids: expected torch.float16 or"),
        ({"weights": torch.zeros(8)}, ValueError, r"weights: expected \[4\], got \[8\]"),
        ({"weights": torch.zeros(4).half()}, TypeError, "weights: expected torch.float32, got torch.float16"),
        ({"codes": torch.zeros(20, device="meta").int()}, ValueError, "codes: expected the device of Q, cpu, got meta"),
        (
            {"format": "uint8", "data": torch.zeros(20, 8).byte(), "minimum": torch.zeros(20)},
            TypeError,
            "codes: expected None",
        ),
        ({"data": torch.zeros(20, 3).byte()}, ValueError, r"data: expected \[Td, 2\] for d = 8, got \[20, 3\]"),
    ],
)
def test_operator_error_names_the_argument(other, error, message):
    D = lik_ops.quantize(tokens(20, 8), random_codec(8, 2))
    with pytest.raises(error, match=f"lik::maxsim_quantized_fwd: {message}"):
        _operator(tokens(6, 8), D, **other)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c, D: ResidualCodec(None, c.weights), TypeError, "centroids: expected a Tensor, got NoneType"),
        (lambda c, D: ResidualCodec(c.centroids.int(), c.weights), TypeError, "centroids: expected torch.float16 or"),
        (lambda c, D: ResidualCodec(c.centroids[0], c.weights), ValueError, r"centroids: expected \[C, d\], got \[8\]"),
        (
            lambda c, D: ResidualCodec(c.centroids, c.weights[:3]),
            ValueError,
            r"weights: expected \[2\], \[4\], .*got \[3\]",
        ),
        (
            lambda c, D: ResidualCodec(c.centroids, c.weights, c.weights),
            ValueError,
            r"cutoffs: expected \[3\], got \[4\]",
        ),
        (
            lambda c, D: ResidualCodec(c.centroids, c.weights, None, "bits"),
            ValueError,
            "bit_order: expected one of plaid",
        ),
        (lambda c, D: ResidualCodec(c.centroids, c.weights).encode(D), ValueError, "expected a codec with cutoffs"),
        (lambda c, D: c.encode(D[..., :7]), ValueError, r"tokens: expected \[..., 8\], got \[4, 5, 7\]"),
        (lambda c, D: c.encode(D.int()), TypeError, "tokens: expected float16, .*, got torch.int32"),
        (lambda c, D: c.decode(D, D.byte()), TypeError, "codes: expected int32 or int64, got torch.float32"),
        (
            lambda c, D: c.decode(D[..., 0].int(), D.byte()),
            ValueError,
            r"residuals: expected \[4, 5, 2\], got \[4, 5, 8\]",
        ),
        (lambda c, D: ResidualCodec.train(D, 3), ValueError, "nbits: expected 1, 2, 4 or 8, got 3"),
        (lambda c, D: ResidualCodec.train(D, 1.5), TypeError, "nbits: expected an int, got float"),
        (lambda c, D: ResidualCodec.train(D, iterations=None), TypeError, "iterations: expected an int, got NoneType"),
        (lambda c, D: ResidualCodec.train(D, seed="x"), TypeError, "seed: expected an int, got str"),
        (lambda c, D: ResidualCodec.train(D, seed=2**70), ValueError, "seed: expected at most"),
        (lambda c, D: ResidualCodec.train(D.int()), TypeError, "tokens: expected float16, .*, got torch.int32"),
        (
            lambda c, D: ResidualCodec.train(D[:0]),
            ValueError,
            r"tokens: expected at least one finite token, got none in \[0, 5, 8\]",
        ),
        (
            lambda c, D: lik_ops.quantize(D[..., :7], c),
            ValueError,
            r"D: expected \[..., 8\] on cpu like the codec, got",
        ),
        (lambda c, D: lik_ops.quantize(D, c, "document"), ValueError, "scale: expected one of token, got 'document'"),
        (
            lambda c, D: lik_ops.quantize(D, "residual2"),
            ValueError,
            "format: expected one of int8, .*, got 'residual2'",
        ),
        (
            lambda c, D: c.decode(D[..., 0].int(), D[..., :2].byte(), torch.int8),
            TypeError,
            "ResidualCodec.decode: dtype: expected float16, .*, got torch.int8",
        ),
        (
            lambda c, D: c.decode(D[0, 0, 0].int(), D[0, 0, :2].byte()),
            ValueError,
            r"ResidualCodec.decode: codes: expected \[..., L\], got \[\]",
        ),
        (
            lambda c, D: Quantized.of_codes(D[0, 0, 0].int(), D[0, 0, :2].byte(), c),
            ValueError,
            r"Quantized.of_codes: codes: expected \[..., L\], got \[\]",
        ),
        (lambda c, D: Quantized.of_codes(D[0], D[0], None), TypeError, "codec: expected a ResidualCodec, got NoneType"),
        (
            lambda c, D: Quantized(D[..., :2].byte(), D[..., 0], "residual2", 8, D.dtype),
            TypeError,
            "codes: expected Tensor for residual2, got NoneType",
        ),
        (
            lambda c, D: Quantized(D.char(), D[..., 0], "int8", 8, D.dtype, codec=c),
            TypeError,
            "codec: expected None for int8, got ResidualCodec",
        ),
        (
            lambda c, D: Quantized(
                D[..., :1].byte(), D[..., 0], "residual1", 8, D.dtype, codes=D[..., 0].int(), codec=c
            ),
            ValueError,
            "codec: expected nbits=1, d=8 on cpu, got ResidualCodec",
        ),
        (
            lambda c, D: Quantized(D[..., :2].byte(), D[..., 0], "residual2", 8, D.dtype, codes=D[0].int(), codec=c),
            ValueError,
            r"codes: expected \[4, 5\] on cpu, got \[5, 8\] on cpu",
        ),
    ],
)
def test_bad_input_names_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call(random_codec(8, 2), tokens(4, 5, 8))


@pytest.mark.parametrize("normalize", [True, False])
def test_documents_of_trainable_codec_do_not_require_grad(normalize, tmp_path):
    plain = random_codec(16, 2, normalize=normalize)
    trained = ResidualCodec(*(x.clone().requires_grad_() for x in plain.tensors().values()), normalize=normalize)
    D, Q = tokens(5, 4, 16), tokens(2, 3, 16)
    expected, made = (lik_ops.quantize(D, codec) for codec in (plain, trained))
    again = Quantized.of_codes(made.codes, trained.encode(D)[1], trained, D.dtype)
    for found in (made, copy.deepcopy(made), again, made.to("cpu"), made[1:]):
        assert not any(x.requires_grad for x in (*found.tensors().values(), found.dequantize()))
    scores = lik_ops.maxsim(Q, made)
    assert scores.grad_fn is None and torch.equal(scores, lik_ops.maxsim(Q, expected))
    for options in ({}, {"n_probe": 2}, {"n_candidates": 3}):
        found = lik_ops.retrieve(Q, made, 2, **options)
        assert all(map(torch.equal, found, lik_ops.retrieve(Q, expected, 2, **options)))
    decoded = trained.decode(made.codes, trained.encode(D)[1])
    decoded.sum().backward()
    assert trained.centroids.grad.any()
    pytest.importorskip("safetensors", reason="pip install '.[retrieval]'")
    made.save(tmp_path / "documents")
    assert torch.equal(Quantized.load(tmp_path / "documents").dequantize(), expected.dequantize())
    corpus = lik_ops.Corpus.create(tmp_path / "corpus", 16, D.dtype, trained)
    corpus.append(list(D))
    assert torch.equal(corpus[0], expected[:1].dequantize()[0])
    index = lik_ops.Index(lik_ops.quantize(D[0], trained), torch.tensor([0, 1, 4]))
    if normalize:
        lik_ops.write_index(tmp_path / "index", index)
        assert len(lik_ops.read_index(tmp_path / "index")) == 2


def test_codec_without_normalization():
    codec = random_codec(16, 4, normalize=False)
    D, Q = 3 * tokens(5, 4, 16), tokens(2, 3, 16)
    made = lik_ops.quantize(D, codec)
    codes, residuals = codec.encode(D)
    buckets = residual.unpacked(residuals.flatten(0, 1).numpy(), 4, 16)
    x = torch.from_numpy(residual.decoded(codes.flatten().numpy(), buckets, codec)).view(D.shape)
    torch.testing.assert_close(made.dequantize(torch.float64), x, rtol=0, atol=1e-6)
    same = Quantized.of_codes(codes, residuals, codec)
    assert same.scale.numel() == 1
    for other in (made, same):
        torch.testing.assert_close(
            lik_ops.maxsim(Q.double(), other), reference.maxsim(Q.double(), x), rtol=0, atol=1e-5
        )
    normalized = lik_ops.maxsim(Q, same, normalize=True)
    torch.testing.assert_close(normalized.double(), reference.maxsim(Q.double(), x, normalize=True), rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_tokens_and_scores_match_fast_plaid_on_gpu():
    found, codec = golden()
    D = Quantized.of_codes(found["codes"].cuda(), found["residuals"].cuda(), codec.to("cuda"))
    torch.testing.assert_close(D.dequantize(torch.float32).cpu(), found["decoded"], rtol=0, atol=1e-3)
    bounds = torch.tensor([0, *found["doclens"]]).cumsum(0).cuda()
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
        scores = lik_ops.maxsim_varlen(found["queries"].cuda().to(dtype), D, None, bounds)
        torch.testing.assert_close(scores.cpu(), found["scores"], rtol=0, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.slow
def test_documents_beyond_2_31_bytes_of_residuals():
    codec = random_codec(128, 8).to("cuda")
    total = 2**31 // 128 + 5000
    codes = torch.randint(7, (total,), dtype=torch.int32, device="cuda")
    residuals = torch.randint(256, (total, 128), dtype=torch.uint8, device="cuda")
    D, Q = Quantized.of_codes(codes, residuals, codec), tokens(3, 32, 128).cuda().half()
    offsets = torch.tensor([[0, 2**24 - 90, total - 180]] * 3, device="cuda")
    scores = lik_ops.maxsim_candidates_varlen(Q, D, offsets, torch.full_like(offsets, 180))
    for n, begin in enumerate(offsets[0].tolist()):
        assert torch.equal(lik_ops.maxsim(Q, D[begin : begin + 180]), scores[:, n])
