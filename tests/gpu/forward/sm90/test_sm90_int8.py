"""Test dense int8 documents on sm_90 against the packed kernel and the error bound of the terms."""

import itertools
from dataclasses import replace

import pytest
import torch

import lik_ops
from lik_ops import reference
from lik_ops.core.plan_cache import PlanCache
from lik_ops.core.segments import PackedArgs, RaggedArgs

from ....support.common import INTERPRETING
from ....support.quantized import ONE_TERM, ROUNDING, TERMS

if INTERPRETING:
    pytest.skip("the interpreter has no Gluon", allow_module_level=True)

from lik_ops.gpu import choose
from lik_ops.gpu.tuning import architectures, forward_configs
from lik_ops.gpu.tuning.forward_configs import INT8_TERMS_BY_ENCODING as TERMS_OF

SM_90 = replace(architectures.ARCHITECTURES["sm_90"], processors=132)
SCALES = ("token", "document", "tensor")
QUERIES = ("half", "int8")


def choice(dtype=torch.bfloat16, Nq=16, K=1000, Lq=32, Ld=180, d=128, arch=SM_90, each_token=False, terms=2):
    Q, data = torch.empty(Nq, Lq, d, dtype=dtype, device="meta"), torch.empty(K, Ld, d, dtype=torch.int8, device="meta")
    found = choose.choose_int8(Q, data, torch.empty(K, Ld if each_token else 1, device="meta"), terms, arch)
    return None if isinstance(found, str) else found


def test_kernel_choice():
    assert choice() is not None and choice(dtype=torch.float32) is not None
    assert choice(arch=architectures.ARCHITECTURES["sm_80"]) is None
    assert choice(d=136) is None and choice(d=120) is None and choice(d=256) is None
    assert choice(Ld=63) is None and choice(Lq=1) is None and choice(K=10, Nq=1) is None
    assert choice(Ld=181) is not None and choice(Ld=181, each_token=True) is None
    assert choice(K=2**24, Ld=128) is None
    assert choice(Nq=1).config.SMALL_M and choice(Nq=2).config.SMALL_M and not choice(Nq=3).config.SMALL_M
    assert choice(Nq=4).row_tiles == 1 and choice(Nq=8).row_tiles == 2 and choice(Nq=1, Lq=33).row_tiles == 1
    assert choice(Nq=4, terms=1).config.SMALL_M and choice(Nq=8, terms=1).row_tiles == 1
    assert (
        choice(Nq=1, Lq=65, terms=1).config.SMALL_M
        and not choice(Nq=1, Lq=65, terms=1, dtype=torch.float32).config.SMALL_M
    )


def test_tile_choice_by_document_length():
    assert [choice(Ld=Ld).config.BN for Ld in (127, 128, 180, 192, 193, 300, 1024)] == [64, 128, 64, 64, 128, 64, 128]
    assert not choice(Ld=1024).config.OPERAND_IN_REGISTERS and choice(Ld=180).config.OPERAND_IN_REGISTERS
    assert choice(Ld=1024, each_token=True).config.BN == 64 and choice(Ld=1024, terms=1).config.BN == 64
    assert [choice(Nq=1, Ld=Ld).config.BN for Ld in (127, 128, 180, 300)] == [64] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("Lq", [2, 5, 31, 32, 33, 64, 65, 129, 1024])
@pytest.mark.parametrize("Nq", [1, 7, 64])
@pytest.mark.parametrize("terms", [1, 2])
def test_row_tiles_hold_every_query_token(Nq, Lq, dtype, terms):
    found = choice(Nq=Nq, Lq=Lq, dtype=dtype, terms=terms)
    C = found.config
    longest = 64 if dtype == torch.float32 else 128 // terms
    assert (
        found.parts * C.ROWS_PER_QUERY >= Lq
        and (found.parts == 1 or longest == C.ROWS_PER_QUERY)
        and not (C.SMALL_M and found.parts > 1)
    )
    assert found.row_tiles * C.MMA_ROWS * (1 if C.SMALL_M else 4) >= Nq * found.parts * C.ROWS_PER_QUERY
    assert str(C.MMA_ROWS * (1 if C.SMALL_M else 4)) in found.tile()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("d", [16, 64, 128])
@pytest.mark.parametrize("Lq", [20, 33, 64, 129, 1024])
@pytest.mark.parametrize("Nq", [1, 7])
@pytest.mark.parametrize("stored", TERMS_OF)
def test_sum_trees_match_packed_kernel(stored, Nq, Lq, d, dtype):
    found = choice(Nq=Nq, Lq=Lq, d=d, dtype=dtype, terms=TERMS_OF[stored])
    options = {"tf32": False, "argmax": False, "stored": stored}
    for wide, few in itertools.product(range(3), (False, True)):
        kind = architectures.KernelKey(SM_90, dtype, d, False, False, wide)
        packed, levels = forward_configs.configure_packed_forward(kind, Nq, Lq, has_few_documents=few, **options)
        assert found.config.ROWS_PER_QUERY * found.tree == packed.config.ROWS_PER_QUERY << levels
        assert TERMS_OF[stored] == packed.config.INT8_TERMS


def test_token_scales_shared_by_documents_are_unsupported():
    """A descriptor reads one scale for each token of each document, so with ``[1, Ld]`` it would read past the end."""
    Q, data = torch.empty(3, 32, 128, device="meta"), torch.empty(140, 132, 128, dtype=torch.int8, device="meta")

    def chosen(*shape):
        return choose.choose_int8(Q, data, torch.empty(shape, device="meta"), 2, SM_90)

    assert chosen(140, 132).config.PRECOMPUTED_SCALES
    assert not chosen(140, 1).config.PRECOMPUTED_SCALES and not chosen(1, 1).config.PRECOMPUTED_SCALES
    assert chosen(1, 132) == "scales of tokens that are not contiguous, or that documents share"


def test_find_plan_returns_false_on_cpu_if_cache_drops_it(monkeypatch):
    from lik_ops.gpu.forward import sm90_quantized

    class Dropping(PlanCache):
        def store(self, key, entry):
            return entry

    monkeypatch.setattr(sm90_quantized, "plans", Dropping(8))
    D = lik_ops.quantize(torch.randn(3, 70, 32), "int8")
    c = PackedArgs(torch.randn(2, 4, 32), D.data, *[None] * 8, 2, 3, False, 8, 210, 4)
    assert sm90_quantized.find_plan(c, D.to_encoded()) is False  # a CPU has no plan


def documents(Nd, Ld, d, scale, seed=0, query="half"):
    torch.manual_seed(seed)
    D = torch.randn(Nd, Ld, d) * (0.2 + torch.rand(Nd, Ld, 1))
    return lik_ops.quantize(D, "int8", scale, query=query).to("cuda")


def fast(Q, D, q_mask=None, q_weight=None):
    """Return the scores of the tested kernel, and fail if it is not selected."""
    from lik_ops.gpu.forward import sm90_quantized

    (Nq, Lq, _), (Nd, Ld, _) = Q.shape, D.shape
    c = PackedArgs(Q, D.data, *[None] * 5, q_mask, None, q_weight, Nq, Nd, False, Nq * Lq, Nd * Ld, Lq)
    plan = sm90_quantized.find_plan(c, D.to_encoded())
    found = plan.forward(Q, D.to_encoded(), q_mask, q_weight) if plan else None
    assert found is not None
    return found


def packed(Q, D, q_mask=None, q_weight=None):
    """Return the scores of the packed kernel."""
    from lik_ops.gpu.forward import quantized

    stand_in = torch.empty((), dtype=Q.dtype, device=Q.device).expand(D.shape)
    r = RaggedArgs.from_tensors((Q, stand_in, None, None, None, None, q_mask, None, q_weight))
    return quantized.forward_quantized(r, D.to_flat_encoded(), False, None, 0)[0]


def bound(Q, D, q_mask, q_weight):
    """Return fp64 scores of dequantized tokens, and the error bound for kernels."""
    tokens, Q = D.dequantize(torch.float32).double(), Q.double()
    sizes, rows = tokens.abs(), Q.abs()
    if q_mask is not None:
        Q, rows = (torch.where(q_mask[..., None], x, 0) for x in (Q, rows))
    weight = torch.ones_like(Q[..., 0]) if q_weight is None else q_weight.double()
    exact = torch.stack([reference.maxsim(Q, x[None], q_mask, q_weight=weight)[:, 0] for x in tokens], 1)
    most, total = rows.amax(-1), sizes.sum(-1).amax(-1)
    off = torch.einsum("is,j->ij", weight.abs() * most, total) * (ONE_TERM if D.query == "int8" else TERMS)
    products = torch.stack([(rows @ x.T).amax(-1) for x in sizes], 1)  # [Nq, Nd, Lq]
    return exact, off + ROUNDING * torch.einsum("is,ijs->ij", weight.abs(), products)


CASES = [
    (1, 700, 32, 180, 128),
    (1, 140, 20, 64, 96),
    (2, 133, 16, 300, 128),
    (5, 131, 5, 68, 16),
    (3, 140, 32, 256, 128),
    (9, 131, 31, 64, 64),
    (70, 66, 3, 128, 48),
    (7, 150, 24, 300, 112),
    (3, 140, 100, 132, 128),
    (2, 150, 64, 300, 112),
    (1, 140, 130, 72, 128),
    (2, 70, 300, 200, 128),
    (1, 70, 1030, 96, 128),
]


@pytest.mark.gpu
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("Nq", "Nd", "Lq", "Ld", "d"), CASES)
def test_scores_match_packed_kernel_bit_for_bit(Nq, Nd, Lq, Ld, d, scale, query):
    D = documents(Nd, Ld, d, scale, Lq, query)
    for n, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32)):
        Q = torch.randn(Nq, Lq, d).to("cuda", dtype)
        q_mask = torch.rand(Nq, Lq, device="cuda") > 0.3 if (n + Lq) % 3 else None
        weight = torch.randn(Nq, Lq, device="cuda") if (n + Nd) % 2 else None
        if q_mask is not None:
            Q[~q_mask] = float("nan")
        Q[0, 1] = 0
        if n == 1:
            Q = Q.transpose(1, 2).contiguous().transpose(1, 2)
        scores = fast(Q, D, q_mask, weight)
        assert torch.equal(scores, packed(Q, D, q_mask, weight))
        exact, off = bound(Q, D, q_mask, weight)
        assert ((scores.double() - exact).abs() <= off).all()
        assert torch.equal(lik_ops.maxsim(Q, D, q_mask, q_weight=weight), scores)
        assert torch.equal(fast(Q, D, q_mask, weight), scores)  # a replayed call


@pytest.mark.gpu
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("scale", SCALES[:2])
def test_bits_do_not_depend_on_batch(scale, query):
    D = documents(400, 132, 128, scale, query=query)
    Q = torch.randn(20, 32, 128, device="cuda", dtype=torch.bfloat16)
    whole = fast(Q, D)
    for part in (slice(3, 4), slice(0, 2), slice(7, 20)):
        assert torch.equal(fast(Q[part], D), whole[part])
        assert torch.equal(fast(Q[part], D[100:300]), whole[part, 100:300])
    for column in (0, 399):
        few = D[torch.tensor([column] * 70)]
        assert torch.equal(fast(Q, few), whole[:, column : column + 1].expand(-1, 70))


ODD = (float("nan"), float("inf"), -float("inf"), 1e35, 1e-35, -3e30)


def check_equal_tokens(D, stored, Lq, negative, fast, bound):
    """Compare scores of documents whose bytes are all `stored`, which makes their features `negative` or positive."""
    D.data.fill_(stored)
    D.scale.fill_(0.5)
    Q = torch.full((3, Lq, D.d), 0.3, device="cuda", dtype=torch.float16)
    Q[1] *= -1
    scores = fast(Q, D)
    assert torch.equal(scores, packed(Q, D))
    exact, off = bound(Q, D, None, None)
    assert ((scores.double() - exact).abs() <= off).all()
    assert (scores[1] > 0).all() == negative


def score_odd_rows(D, Nq, values, fast):
    """Yield each value and the scores of queries with a row that it makes odd, which other queries must not notice."""
    plain = torch.randn(Nq, 20, D.d, device="cuda")
    before = fast(plain, D)
    for n, value in enumerate(values):
        Q = plain.clone()
        if 0 < abs(value) < 1e-20:
            Q[0, n] *= value
        else:
            Q[0, n, 5 + n] = value
        scores, expected = fast(Q, D), packed(Q, D)
        assert torch.equal(scores[1:], before[1:])
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        yield value, scores


@pytest.mark.gpu
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("scale", SCALES[:2])
@pytest.mark.parametrize("Lq", [11, 32, 100])
def test_negative_and_equal_similarities(Lq, scale, query):
    """Maxima are negative, so tokens beyond a document or row would win. The sums are the largest possible."""
    for number in (-128, 127):
        check_equal_tokens(documents(140, 68, 128, scale, query=query), number, Lq, number < 0, fast, bound)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("Nq", [1, 9])
def test_rows_that_int8_terms_cannot_represent(Nq, scale, query):
    """Such rows are multiplied in fp32 and do not change the bits of other queries."""
    for value, scores in score_odd_rows(documents(80, 132, 96, scale, query=query), Nq, (*ODD, 9e-31), fast):
        assert scores[0].isnan().all() if value != value else True


@pytest.mark.gpu
@pytest.mark.parametrize("Nq", [1, 9])
def test_nan_and_zero_scales(Nq):
    """One scale is NaN, and another is 0."""
    for scale in SCALES[:2]:
        D = documents(140, 132, 128, scale)
        D.scale[3], D.scale[7, -1], D.scale[9] = 0, float("nan"), float("nan")
        Q = torch.randn(Nq, 32, 128, device="cuda", dtype=torch.float16)
        scores = fast(Q, D)
        torch.testing.assert_close(scores, packed(Q, D), rtol=0, atol=0, equal_nan=True)
        assert scores[:, [7, 9]].isnan().all() and (scores[:, 3] == 0).all()
        assert scores.isnan().sum() == 2 * Nq


@pytest.mark.gpu
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("Nq", [1, 9])
def test_negative_scales(Nq, scale, query):
    """With a negative scale the smallest product is the maximum. Masked rows hold NaN, and some rows are padding."""
    D = documents(140, 132, 96, scale, query=query)
    D.scale[::3] *= -1
    Q = torch.randn(Nq, 20, 96, device="cuda", dtype=torch.bfloat16)
    q_mask = torch.rand(Nq, 20, device="cuda") > 0.3
    Q[~q_mask] = float("nan")
    exact, off = bound(Q, D, q_mask, None)
    assert ((fast(Q, D, q_mask).double() - exact).abs() <= off).all()


@pytest.mark.gpu
def test_unsupported_calls_score_the_same():
    """Unaligned scales or codes, document masks, and argmax use the packed kernel and score the same."""
    Q = torch.randn(3, 32, 128, device="cuda", dtype=torch.bfloat16)
    for scale in SCALES:
        D = documents(140, 132, 128, scale)
        expected = lik_ops.maxsim(Q, D)
        assert torch.equal(expected, fast(Q, D))
        assert torch.equal(lik_ops.maxsim_with_argmax(Q, D)[0], expected)
        everything = torch.ones(140, 132, dtype=torch.bool, device="cuda")
        assert torch.equal(lik_ops.maxsim(Q, D, d_mask=everything), expected)
        for name in ("data", "scale"):
            x = getattr(D, name)
            memory = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
            fields = {"data": D.data, "scale": D.scale, name: memory}
            moved = lik_ops.Quantized(fields["data"], fields["scale"], "int8", 128, torch.float16)
            assert torch.equal(lik_ops.maxsim(Q, moved), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("scale", SCALES)
def test_documents_in_chunks(scale, query, monkeypatch):
    """A workspace holds the partial sums of a query."""
    from lik_ops.gpu import backend
    from lik_ops.gpu.forward import sm90_dense

    D, Q = documents(400, 68, 64, scale, query=query), torch.randn(2, 300, 64, device="cuda", dtype=torch.bfloat16)
    D.scale[::7] *= -1
    expected = fast(Q, D)
    backend.forget()
    monkeypatch.setattr(sm90_dense, "_MAX_WORKSPACE_BYTES", 4 * 10 * 100)
    assert all(torch.equal(fast(Q, D), expected) for _ in range(3))
    backend.forget()


@pytest.mark.gpu
def test_documents_beyond_int32_elements():
    Ld, d = 64, 128
    count = (2**31 // d + 2**20) // Ld
    few = documents(70, Ld, d, "document")
    data = torch.zeros(count, Ld, d, dtype=torch.int8, device="cuda")
    data[-70:] = few.data
    scale = torch.ones(count, 1, device="cuda")
    scale[-70:] = few.scale
    D = lik_ops.Quantized(data, scale, "int8", d, torch.float16)
    for Nq in (1, 9):
        Q = torch.randn(Nq, 32, d, dtype=torch.float16, device="cuda")
        assert torch.equal(fast(Q, D)[:, -70:], fast(Q, few))


@pytest.mark.gpu
def test_shared_token_scales_match_expanded_scales():
    D = documents(140, 132, 128, "token")
    shared = lik_ops.Quantized(D.data, D.scale[:1], "int8", 128, torch.float16)
    whole = lik_ops.Quantized(D.data, D.scale[:1].expand(140, -1).contiguous(), "int8", 128, torch.float16)
    Q = torch.randn(3, 32, 128, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(lik_ops.maxsim(Q, shared), lik_ops.maxsim(Q, whole))
