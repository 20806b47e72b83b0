"""Test dense FP8 documents on sm_90, whose pipeline converts tiles, bit for bit against the packed kernel."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import lik_ops
from lik_ops import reference
from lik_ops.formats.table import FORMATS

from ....support.common import INTERPRETING
from .test_sm90_int8 import CASES, fast, packed

if INTERPRETING:
    pytest.skip("the interpreter has no Gluon", allow_module_level=True)

from lik_ops.gpu import backend, choose
from lik_ops.gpu.tuning import architectures, forward_configs, sm90_configs

SM_90 = replace(architectures.ARCHITECTURES["sm_90"], processors=132)
SCALES = ("token", "document", "tensor")
FP8 = ("fp8_e4m3", "fp8_e5m2")
HALF = (torch.float16, torch.bfloat16)


def choice(dtype=torch.bfloat16, Nq=16, K=1000, Lq=32, Ld=180, d=128, arch=SM_90):
    Q, data = torch.empty(Nq, Lq, d, dtype=dtype, device="meta"), torch.empty(K, Ld, d, dtype=torch.int8, device="meta")
    found = choose.choose_fp8(Q, data, torch.empty(K, Ld, device="meta"), "e4m3", arch)
    return None if isinstance(found, str) else found


def test_kernel_choice():
    assert choice() is not None and choice(Ld=181) is not None and choice(Nq=3) is not None
    assert choice(dtype=torch.float32) is None and choice(arch=architectures.ARCHITECTURES["sm_80"]) is None
    assert choice(d=136) is None and choice(d=120) is None and choice(Ld=63) is None
    assert choice(Nq=300, Lq=1) is None
    assert choice(K=2**24, Ld=128) is None and choice(K=10) is None


def test_few_rows_use_small_m():
    for Nq, Lq, rows in ((1, 2, 32), (1, 32, 32), (3, 9, 64), (1, 33, 64), (2, 32, 64), (1, 64, 64)):
        found = choice(Nq=Nq, Lq=Lq)
        assert found.config.SMALL_M and (found.config.MMA_ROWS, found.parts, found.row_tiles) == (rows, 1, 1)
        assert str(rows) in found.tile()
    assert choice(Nq=4).config.SMALL_M and not choice(Nq=5).config.SMALL_M and not choice(Nq=1, Lq=129).config.SMALL_M


@pytest.mark.parametrize("Lq", [2, 31, 33, 64, 65, 129, 1024])
@pytest.mark.parametrize("Nq", [1, 64])
@pytest.mark.parametrize("dtype", HALF)
def test_sum_trees_match_packed_kernel(Nq, Lq, dtype):
    found = choice(Nq=Nq, Lq=Lq, dtype=dtype)
    kind, options = (
        architectures.KernelKey(SM_90, dtype, 128, False, False, 0),
        {"tf32": False, "argmax": False, "stored": "fp8"},
    )
    for few in (False, True):
        launch, levels = forward_configs.configure_packed_forward(kind, Nq, Lq, has_few_documents=few, **options)
        assert found.parts == 1 or found.config.ROWS_PER_QUERY * found.tree == launch.config.ROWS_PER_QUERY << levels
    rows = found.config.MMA_ROWS if found.config.SMALL_M else sm90_configs.SM90_TILE_ROWS
    assert found.row_tiles * rows >= Nq * found.parts * found.config.ROWS_PER_QUERY


def test_strided_scales_are_supported():
    Q, data = torch.empty(9, 32, 128, device="meta"), torch.empty(140, 132, 128, dtype=torch.int8, device="meta")
    scale = torch.empty(140, 132, device="meta").t().contiguous().t()
    found = choose.choose_fp8(Q.half(), data, scale, "e5m2", SM_90)
    assert found.config.PRECOMPUTED_SCALES and found.config.ENCODING == "e5m2" and not found.reads_norms
    assert choose.choose_fp8(Q, data, scale, "e5m2", SM_90) == "FP8 documents with torch.float32 queries"
    assert choose.choose_fp8(Q.half()[:, :, :40], data[:, :, :40], scale, "e5m2", SM_90) == "d is no multiple of 16"


def documents(Nd, Ld, d, format, scale, seed=0):
    torch.manual_seed(seed)
    D = torch.randn(Nd, Ld, d) * (0.2 + torch.rand(Nd, Ld, 1))
    return lik_ops.quantize(D, format, scale).to("cuda")


MANY = [case for case in CASES if choice(Nq=case[0], K=case[1], Lq=case[2], Ld=case[3], d=case[4]) is not None]
MANY += [(9, 150, 31, 65, 96), (16, 140, 32, 301, 128), (3, 70, 1024, 128, 64)]
MANY += [(1, 141, 32, 301, 128), (2, 300, 30, 64, 96), (1, 67, 64, 193, 48), (7, 133, 5, 130, 128), (1, 900, 2, 77, 80)]


@pytest.mark.gpu
@pytest.mark.parametrize("format", FP8)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("Nq", "Nd", "Lq", "Ld", "d"), MANY)
def test_scores_match_packed_kernel_bit_for_bit(Nq, Nd, Lq, Ld, d, scale, format):
    D = documents(Nd, Ld, d, format, scale, Lq)
    for n, dtype in enumerate(HALF):
        Q = torch.randn(Nq, Lq, d).to("cuda", dtype)
        q_mask = torch.rand(Nq, Lq, device="cuda") > 0.3 if (n + Lq) % 3 else None
        weight = torch.randn(Nq, Lq, device="cuda") if (n + Nd) % 2 else None
        if dtype == torch.bfloat16:
            Q *= 2.0 ** torch.randint(-60, 60, (Nq, Lq, 1), device="cuda")
            Q[0, 1] *= 2.0 ** -torch.arange(d, device="cuda").float()
        if q_mask is not None:
            Q[~q_mask] = float("nan")
        scores = fast(Q, D, q_mask, weight)
        assert torch.equal(scores, packed(Q, D, q_mask, weight))
        assert torch.equal(lik_ops.maxsim(Q, D, q_mask, q_weight=weight), scores)
        assert torch.equal(fast(Q, D, q_mask, weight), scores)  # a replayed call


def test_kernel_choice_for_fp8_queries():
    Q = torch.empty(9, 32, 128, device="meta", dtype=torch.float16)
    data, scale = torch.empty(140, 132, 128, dtype=torch.int8, device="meta"), torch.empty(140, 132, device="meta")
    chosen = partial(choose.choose_fp8, Q, data, encoding="fp8_fp8", arch=SM_90)
    for scales, each_token in ((scale, True), (scale[:, :1], False), (scale[:1, :1], False)):
        found = chosen(scales).config
        assert found.ENCODING == "fp8_fp8" and found.PRECOMPUTED_SCALES is each_token and not found.SMALL_M
    assert chosen(scale[:1]) == "scales of tokens that are not contiguous, or that documents share"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("Nq", "Nd", "Lq", "Ld", "d", "scale"),
    [(*case, scale) for case in MANY for scale in SCALES if case[3] % 4 == 0 or scale != "token"],
)
def test_fp8_queries(Nq, Nd, Lq, Ld, d, scale):
    """Bit for bit like the kernel of packed documents, and within the rounding of queries and sums."""
    D = replace(documents(Nd, Ld, d, "fp8_e4m3", scale, Lq), query="fp8")
    if scale == "document":
        D.scale[::3] *= -1  # the largest similarity is then the one of the smallest product
    tokens = D.dequantize(torch.float32).double()
    for dtype in HALF:
        Q = torch.randn(Nq, Lq, d).to("cuda", dtype)
        Q[0, 1] *= 2.0 ** -(torch.arange(d, device="cuda") % 12).float()
        scores = fast(Q, D)
        assert torch.equal(scores, packed(Q, D)) and torch.equal(fast(Q, D), scores)
        rows, exact = Q.double().abs(), reference.maxsim(Q.double(), tokens)
        products = torch.stack([(rows @ x.abs().T).amax(-1).sum(-1) for x in tokens], 1)
        small = rows.amax(-1).sum(-1)[:, None] * tokens.abs().sum(-1).amax(-1)[None]
        assert ((scores.double() - exact).abs() <= products * (1 / 16 + 1 / 64) + small * 2.0**-17).all()
        Q[0, 0, 3] = float("inf")
        assert fast(Q, D)[0].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("format", FP8)
def test_bits_do_not_depend_on_batch_argmax_or_mask(format):
    D, Q = documents(400, 132, 128, format, "token"), torch.randn(20, 32, 128, device="cuda", dtype=torch.bfloat16)
    whole = fast(Q, D)
    for part in (slice(3, 4), slice(0, 2), slice(5, 8), slice(7, 20)):
        assert torch.equal(lik_ops.maxsim(Q[part], D), whole[part])
        assert torch.equal(lik_ops.maxsim(Q[part], D[100:300]), whole[part, 100:300])
    assert torch.equal(lik_ops.maxsim_with_argmax(Q, D)[0], whole)
    everything = torch.ones(400, 132, dtype=torch.bool, device="cuda")
    assert torch.equal(lik_ops.maxsim(Q, D, d_mask=everything), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("Nq", [1, 9])
def test_nan_and_zeros_with_fp8_queries_and_a_scale_per_document(Nq, dtype):
    D = replace(documents(140, 132, 128, "fp8_e4m3", "document"), query="fp8")
    D.scale[3], D.scale[9], D.scale[11:20] = 0, float("nan"), -D.scale[11:20]
    D.data.view(torch.uint8)[20, 5, 6] = 0x7F  # NaN
    D.data.view(torch.uint8)[21] = 0
    Q = torch.randn(Nq, 32, 128, device="cuda", dtype=dtype)
    Q[0, 7] = 0
    scores = fast(Q, D)
    torch.testing.assert_close(scores, packed(Q, D), rtol=0, atol=0, equal_nan=True)
    assert scores[:, [9, 20]].isnan().all() and (scores[:, [3, 21]] == 0).all()
    assert not scores[:, 22:].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("format", FP8)
@pytest.mark.parametrize("dtype", HALF)
def test_nan_infinities_and_scales_below_zero(format, dtype):
    D = documents(140, 132, 128, format, "token")
    D.scale[3], D.scale[7, -1], D.scale[9], D.scale[11:20] = 0, float("nan"), float("nan"), -D.scale[11:20]
    D.data.view(torch.uint8)[20, 5, 6] = 0x7F  # NaN in either format
    Q = torch.randn(9, 32, 128, device="cuda", dtype=dtype)
    Q[2, 3, 4], Q[3, 3, 4], Q[4, 3] = float("nan"), float("inf"), 0
    scores = fast(Q, D)
    torch.testing.assert_close(scores, packed(Q, D), rtol=0, atol=0, equal_nan=True)
    for i in range(9):
        torch.testing.assert_close(fast(Q[i : i + 1], D), scores[i : i + 1], rtol=0, atol=0, equal_nan=True)
    assert scores[:, [7, 9, 20]].isnan().all() and (scores[0, 3] == 0) and scores[2].isnan().all()
    assert not scores[[0, 1, 4, 5]][:, 30:].isnan().any()


@pytest.mark.gpu
def test_documents_in_chunks(monkeypatch):
    """A workspace holds the partial sums of a query."""
    from lik_ops.gpu.forward import sm90_dense

    Q = torch.randn(2, 300, 64, device="cuda", dtype=torch.bfloat16)
    for scale in SCALES:
        D = documents(400, 68, 64, "fp8_e4m3", scale)
        expected = fast(Q, D)
        backend.forget()
        with monkeypatch.context() as patch:
            patch.setattr(sm90_dense, "_MAX_WORKSPACE_BYTES", 4 * 10 * 100)
            assert all(torch.equal(fast(Q, D), expected) for _ in range(3))
        backend.forget()


@pytest.mark.gpu
def test_documents_beyond_int32_elements():
    Ld, d = 64, 128
    count = (2**31 // d + 2**20) // Ld
    few = documents(70, Ld, d, "fp8_e4m3", "document")
    data = torch.zeros(count, Ld, d, dtype=torch.uint8, device="cuda")
    data[-70:] = few.data.view(torch.uint8)
    scale = torch.ones(count, 1, device="cuda")
    scale[-70:] = few.scale
    D = lik_ops.Quantized(data.view(FORMATS["fp8_e4m3"].dtype), scale, "fp8_e4m3", d, torch.float16)
    for Nq in (1, 9):
        Q = torch.randn(Nq, 32, d, dtype=torch.float16, device="cuda")
        assert torch.equal(fast(Q, D)[:, -70:], fast(Q, few))
