"""Test dense documents of codes on sm_90 against the packed kernel, and the order of the features that it decodes."""

import numpy as np
import pytest
import torch

import lik_ops

from ....support import ptx
from ....support.common import INTERPRETING

if INTERPRETING:
    pytest.skip("the interpreter has no Gluon", allow_module_level=True)

from lik_ops.csrc_triton.formats.bits import get_code_factor
from lik_ops.csrc_triton.forward.sm90 import bits
from lik_ops.formats.table import FORMATS
from lik_ops.gpu import choose
from lik_ops.gpu.tuning import architectures

from . import test_sm90_int8 as dense
from .test_sm90_int8 import SCALES, SM_90, fast, packed

QUERIES = ("half", "int8", "binary")


def choice(
    Nq=1, K=1000, Lq=32, Ld=180, d=128, dtype=torch.bfloat16, each_token=False, terms=1, arch=SM_90, kept="bits1_int8"
):
    Q = torch.empty(Nq, Lq, d, dtype=dtype, device="meta")
    data = torch.empty(K, Ld, d // 32, dtype=torch.int32, device="meta")
    return choose.choose_int8(Q, data, torch.empty(K, Ld if each_token else 1, device="meta"), terms, arch, kept)


def test_kernel_choice():
    assert choice().programs == 264 and choice().config.SMALL_M and choice(Nq=3, terms=2).programs == 132
    assert choice(Nq=16).config.ENCODING == "bits1_int8" and not choice(Nq=16).config.SMALL_M
    assert choice(Nq=2).config.PROGRAMS_PER_SM == 1 and choice(terms=2).config.PROGRAMS_PER_SM == 2
    for other in ({"d": 64}, {"d": 96}, {"Ld": 63}, {"Lq": 1}, {"K": 2**23, "Ld": 64}, {"Ld": 181, "each_token": True}):
        assert isinstance(choice(**other), str), other
    assert not isinstance(choice(Nq=16, Ld=181, each_token=True), str)
    assert isinstance(choice(arch=architectures.ARCHITECTURES["sm_80"]), str)
    assert choice(K=65) == "slower for fewer than 66 (row tile, document) pairs"


def test_codes_of_more_bits_are_more_words():
    rq4 = choice(Nq=16, terms=2, kept="bits4_rotated").config
    assert rq4.ENCODING == "bits4_rotated" and not rq4.SMALL_M
    assert choice(terms=2, kept="bits4_rotated").programs == 264
    reason = "2^31 or more words of codes"
    assert choice(K=2**21, Ld=64, terms=2, kept="bits4_rotated") == reason
    assert not isinstance(choice(K=2**21, Ld=64, terms=2, kept="bits2_rotated"), str)


@pytest.mark.parametrize(("format", "nbits"), [("binary", 1), ("rq1", 1), ("rq2", 2), ("rq4", 4)])
@pytest.mark.parametrize("operand", [False, True])
def test_decoded_features_match_query_feature_order(operand, format, nbits):
    """The steps of `load_numbers` and `order_features`, with the PTX executed here, as there is no GPU."""
    torch.manual_seed(0)
    D = lik_ops.quantize(torch.randn(64, 128), format)
    registers = {f"${8 // nbits}": D.data.flatten().numpy().view(np.uint32)}
    ptx.run(bits._make_decode_ptx(nbits), registers)
    decoded = np.stack([registers[f"${n}"] for n in range(8 // nbits)], 1)
    x = torch.from_numpy(decoded.view(np.int8)).view(64, 4, 8, 4)  # bytes of the registers of a thread
    x = x.permute(0, 2, 1, 3) if operand else x
    q = torch.arange(128).view(1, 4, nbits, 4, 8 // nbits)
    order = q.permute((0, 2, 4, 1, 3) if operand else (0, 1, 2, 4, 3)).flatten()
    expected = D.to_flat_encoded().decode(slice(None), 128) / D.scale.float()[:, None]
    assert torch.equal(
        x.reshape(64, 128).double(), (expected[:, order].round() * get_code_factor(f"bits{nbits}")).double()
    )


@pytest.mark.parametrize("nbits", [1, 2, 4])
@pytest.mark.parametrize(("tokens", "operand"), [(64, True), (32, False), (128, False)])
def test_layouts_of_words_cover_each_code_once(tokens, operand, nbits):
    words, codes = 4 * nbits * tokens, (32 // nbits).bit_length() - 1
    layout = bits.make_word_layout(words, nbits, operand)
    bases = [*layout.reg_bases, *layout.lane_bases, *layout.warp_bases]
    expected = [(0, 1 << n) for n in range(codes)] + [(1 << n, 0) for n in range(words.bit_length() - 1)]
    assert sorted(map(tuple, bases)) == sorted(expected)
    # Inline assembly packs consecutive registers, which have to be the codes of one word.
    assert layout.reg_bases[:codes] == [[0, 1 << n] for n in range(codes)]
    if operand:  # WGMMA: a quad has a row, a warp has 16 rows, and a thread has rows 8 apart
        token = 4 * nbits
        assert layout.lane_bases[:2] == [[nbits, 0], [2 * nbits, 0]] and layout.reg_bases[-1] == [token * 8, 0]
        assert layout.warp_bases == [[token * 16, 0], [token * 32, 0]]


def documents(Nd, Ld, scale, seed=0, query="int8", d=128):
    torch.manual_seed(seed)
    D = torch.randn(Nd, Ld, d) * (0.2 + torch.rand(Nd, Ld, 1))
    return lik_ops.quantize(D, "binary", scale, query=query).to("cuda")


def bound(Q, D, *rest):
    """Return fp64 scores of dequantized tokens, and the error bound for kernels."""
    return dense.bound(D.to_flat_encoded().transform_queries(Q), D, *rest)


CASES = [
    (1, 700, 32, 180),
    (1, 140, 20, 64),
    (2, 133, 16, 300),
    (5, 131, 5, 68),
    (3, 140, 32, 256),
    (9, 131, 31, 64),
    (70, 66, 3, 128),
    (7, 150, 24, 300),
    (3, 140, 100, 132),
    (2, 150, 64, 300),
    (1, 140, 130, 72),
    (2, 70, 300, 200),
    (1, 70, 1030, 96),
]


@pytest.mark.gpu
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("Nq", "Nd", "Lq", "Ld"), CASES)
def test_scores_match_packed_kernel_bit_for_bit(Nq, Nd, Lq, Ld, scale, query):
    D = documents(Nd, Ld, scale, Lq, query)
    for n, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32)):
        Q = torch.randn(Nq, Lq, 128).to("cuda", dtype)
        q_mask = torch.rand(Nq, Lq, device="cuda") > 0.3 if (n + Lq) % 3 else None
        weight = torch.randn(Nq, Lq, device="cuda") if (n + Nd) % 2 else None
        if q_mask is not None:
            Q[~q_mask] = float("nan")
        Q[0, 1] = 0
        if n == 1:
            Q = Q.transpose(1, 2).contiguous().transpose(1, 2)
        if n == 2:
            Q = torch.stack([Q, -Q], 2)[:, :, 0]  # strides that signs do not keep
        scores = fast(Q, D, q_mask, weight)
        assert torch.equal(scores, packed(Q, D, q_mask, weight))
        exact, off = bound(Q, D, q_mask, weight)
        assert ((scores.double() - exact).abs() <= off).all()
        if query == "binary" and scale == "tensor" and weight is None:  # integers, times one scale
            integers = lik_ops.Quantized(D.data, torch.ones_like(D.scale), "binary", 128, D.dtype, query=query)
            assert torch.equal(fast(Q, integers, q_mask).double(), bound(Q, integers, q_mask, None)[0])
        for _ in range(3):  # the third call is replayed
            assert torch.equal(lik_ops.maxsim(Q, D, q_mask, q_weight=weight), scores)
        assert torch.equal(fast(Q, D, q_mask, weight), scores)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["rq1", "rq2", "rq4"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("Nq", "Nd", "Lq", "Ld"), CASES)
def test_rotated_scores_match_packed_kernel_bit_for_bit(Nq, Nd, Lq, Ld, scale, format):
    """Their scales are bf16, and queries are rotated first. Equal int8 documents give the same bits."""
    torch.manual_seed(Lq)
    tokens = torch.randn(Nd, Ld, 128) * (0.2 + torch.rand(Nd, Ld, 1))
    D = lik_ops.quantize(tokens, format, scale).to("cuda")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        Q = torch.randn(Nq, 128, Lq).to("cuda", dtype).transpose(1, 2)
        Q[0, 1] = 0
        scores = fast(Q, D)
        assert torch.equal(scores, packed(Q, D))
        rotated = D.to_flat_encoded().transform_queries(Q)
        numbers = FORMATS[format].decode(D.data, 128)[0]
        same = lik_ops.Quantized(numbers, D.scale.float(), "int8", 128, D.dtype)
        assert torch.equal(scores, packed(rotated, same))
        exact, off = dense.bound(rotated, same, None, None)
        assert ((scores.double() - exact).abs() <= off).all()
        for _ in range(3):  # the third call is replayed
            assert torch.equal(lik_ops.maxsim(Q, D), scores)


@pytest.mark.gpu
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("scale", SCALES[:2])
def test_bits_do_not_depend_on_batch(scale, query):
    D = documents(400, 132, scale, query=query)
    Q = torch.randn(20, 32, 128, device="cuda", dtype=torch.bfloat16)
    whole = fast(Q, D)
    for part in (slice(3, 4), slice(0, 2), slice(7, 20)):
        assert torch.equal(fast(Q[part], D), whole[part])
        assert torch.equal(fast(Q[part], D[100:300]), whole[part, 100:300])


@pytest.mark.gpu
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("scale", SCALES[:2])
@pytest.mark.parametrize("Lq", [11, 32, 100])
def test_negative_and_equal_similarities(Lq, scale, query):
    """Maxima are negative, so tokens beyond a document or row would win. The sums are the largest possible."""
    for byte in (0, 255):
        dense.check_equal_tokens(documents(140, 68, scale, query=query), byte, Lq, byte == 0, fast, bound)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("Nq", [1, 9])
def test_rows_that_int8_terms_cannot_represent(Nq, scale, query):
    """Such rows are multiplied in fp32 and do not change the bits of other queries."""
    for _ in dense.score_odd_rows(documents(80, 132, scale, query=query), Nq, dense.ODD, fast):
        pass  # the scores are compared with the packed kernel


@pytest.mark.gpu
@pytest.mark.parametrize("Nq", [1, 9])
def test_zero_nan_and_negative_scales(Nq):
    """Scales are NaN, zero or negative. With a negative scale the smallest product is the maximum."""
    for scale in SCALES[:2]:
        D = documents(140, 132, scale)
        D.scale[3], D.scale[7, -1], D.scale[9] = 0, float("nan"), float("nan")
        D.scale[::10] *= -1
        Q = torch.randn(Nq, 32, 128, device="cuda", dtype=torch.float16)
        scores, (exact, off) = fast(Q, D), bound(Q, D, None, None)
        # For a negative scale of a document, the kernel multiplies whole rows in fp32, not their int8 terms.
        positive = (D.scale >= 0).all(1)
        assert torch.equal(scores[:, positive], packed(Q, D)[:, positive])
        assert ((scores.double() - exact).abs() <= off)[:, ::10].all()
        assert scores[:, [7, 9]].isnan().all() and (scores[:, 3] == 0).all()


@pytest.mark.gpu
def test_unsupported_calls_score_the_same():
    """Unaligned data, document masks, other features and argmax use the packed kernel and score the same."""
    Q = torch.randn(3, 32, 128, device="cuda", dtype=torch.bfloat16)
    for scale in SCALES:
        D = documents(140, 132, scale)
        expected = lik_ops.maxsim(Q, D)
        assert torch.equal(expected, fast(Q, D))
        assert torch.equal(lik_ops.maxsim_with_argmax(Q, D)[0], expected)
        everything = torch.ones(140, 132, dtype=torch.bool, device="cuda")
        assert torch.equal(lik_ops.maxsim(Q, D, d_mask=everything), expected)
        for first in (1, 4):
            memory = torch.empty(D.data.numel() + first, dtype=torch.uint8, device="cuda")[first:]
            moved = memory.view(D.data.shape).copy_(D.data)
            other = lik_ops.Quantized(moved, D.scale, "binary", 128, torch.float16, query=D.query)
            assert torch.equal(lik_ops.maxsim(Q, other), expected)


@pytest.mark.gpu
def test_documents_beyond_int32_bytes():
    Ld, few = 64, documents(70, 64, "document")
    count = (2**31 // 16 + 2**20) // Ld
    data, scale = torch.zeros(count, Ld, 16, dtype=torch.uint8, device="cuda"), torch.ones(count, 1, device="cuda")
    data[-70:], scale[-70:] = few.data, few.scale
    D = lik_ops.Quantized(data, scale, "binary", 128, torch.float16, query="int8")
    for Nq in (1, 9):
        Q = torch.randn(Nq, 32, 128, dtype=torch.float16, device="cuda")
        assert torch.equal(fast(Q, D)[:, -70:], fast(Q, few))
