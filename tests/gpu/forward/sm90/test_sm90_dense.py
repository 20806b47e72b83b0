"""Test the Gluon kernels against the oracle, and bit for bit against the generic kernel `maxsim_forward`."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

import lik_ops

from ....support.common import INTERPRETING, Problem, assert_scores, assert_winners, build, run

if INTERPRETING:
    pytest.skip("the interpreter has no Gluon", allow_module_level=True)

from lik_ops.core.segments import PackedArgs
from lik_ops.gpu import choose, generic_choices
from lik_ops.gpu.forward import packed as packed_forward
from lik_ops.gpu.tuning import architectures, sm90_configs

SM_90 = dataclasses.replace(architectures.ARCHITECTURES["sm_90"], processors=132)
HALF = (torch.float16, torch.bfloat16)


def choice(dtype=torch.bfloat16, Nq=64, K=1000, Lq=32, Ld=180, d=128, arch=SM_90, argmax=False, normalize=False):
    Q, D = (torch.empty(n, length, d, dtype=dtype, device="meta") for n, length in ((Nq, Lq), (K, Ld)))
    found = choose.choose_sm90(choose.DenseChoiceArgs(Q, D, None, normalize, argmax, arch))
    return None if isinstance(found, str) else found


def few_split(Nq=1, K=1000, Lq=32, Ld=180, d=128):
    return choice(torch.float32, Nq, K, Lq, Ld, d)


def test_few_fp32_rows_with_normalize_or_argmax_use_generic_kernel(monkeypatch):
    Q, D = (torch.empty(*shape, 128, device="meta") for shape in ((1, 32), (1000, 180)))

    def kernel(Q=Q, D=D, normalize=False, argmax=None):
        return choose.choose_dense(Q, D, None, normalize, argmax, SM_90).kernel

    assert kernel() == "maxsim_forward_sm90"
    assert {kernel(normalize=True), kernel(argmax=torch.int16), kernel(Q=Q[:, :1])} == {"maxsim_forward"}
    assert choose.choose_dense(Q, D, None, False, None, SM_90).config.FP32_TERMS == 2
    monkeypatch.setattr(generic_choices, "is_tf32_allowed", lambda dtype: True)
    assert choose.choose_dense(Q, D, None, False, None, SM_90).config.FP32_TERMS == 1


def test_kernel_choice():
    assert choice() is not None
    many = choice(dtype=torch.float32).config
    assert many.FP32_TERMS == 2 and many.OPERAND_IN_REGISTERS and few_split().config.SMALL_M
    assert few_split(Nq=2) is None and few_split(Ld=63) is None and few_split(K=65) is None
    assert few_split(d=132) is None
    assert choice(arch=architectures.ARCHITECTURES["sm_80"]) is None
    assert choice(Ld=63) is None and choice(Lq=1) is None
    assert choice(Nq=1) is None and choice(Nq=1, Lq=300) is not None
    assert choice(Nq=8, K=8) is None
    assert choice(Nq=3, normalize=True, argmax=True) is not None and choice(Nq=3, argmax=True) is None
    assert choice(Nq=4) is None
    assert choice(d=72, normalize=True) is None
    assert choice(Nq=5, d=320, normalize=True).has_large_d and choice(d=320, normalize=True, argmax=True).config.ARGMAX
    assert choice(Nq=2**22, K=2, d=320) is not None and choice(Nq=2**22, K=2, d=320, normalize=True) is None


def test_few_rows_with_normalize_or_argmax_use_small_m():
    for Nq, Lq, rows in ((1, 2, 32), (1, 32, 32), (2, 32, 64), (3, 32, 128), (1, 128, 128)):
        found = choice(Nq=Nq, Lq=Lq, normalize=True)
        assert found.config.SMALL_M and (found.config.MMA_ROWS, found.parts, found.row_tiles) == (rows, 1, 1)
        for normalize in (False, True):
            with_winners = choice(Nq=Nq, Lq=Lq, normalize=normalize, argmax=True)
            assert (with_winners is not None and with_winners.config.SMALL_M) is (rows == 32)
    assert not choice(Nq=5, normalize=True).config.SMALL_M and not choice(Nq=1, Lq=129, normalize=True).config.SMALL_M
    assert not choice(Nq=4, normalize=True, argmax=True).config.SMALL_M and not choice(Nq=5).config.SMALL_M


def test_large_tile_choice():
    """Large tiles are used if the other work of a tile exceeds its products and the last tile wastes little."""

    def tokens(Ld, **options):
        found = choice(Ld=Ld, **options).config
        assert found.OPERAND_IN_REGISTERS is (found.BN == 64)
        return found.BN

    winners, norms = {"argmax": True}, {"normalize": True}
    assert [tokens(Ld) for Ld in (64, 1024)] == [64, 64]
    assert [tokens(Ld, **winners) for Ld in (64, 127, 128, 300, 340, 1024)] == [64, 64, 128, 64, 128, 128]
    assert [tokens(Ld, **norms) for Ld in (64, 127, 128, 900, 1024)] == [64, 64, 128, 64, 128]
    assert tokens(1024, **winners, **norms) == 128
    assert [tokens(1024, Nq=40, **options) for options in (norms, winners | norms)] == [64, 64]  # norms are precomputed


@pytest.mark.parametrize("step", [1, 2**24, 2**25, 2**40])
def test_large_feature_strides_use_generic_kernel(step, monkeypatch):
    """The features of these queries are columns, and Gluon kernels use 32-bit feature offsets."""
    Q = torch.empty_strided((64, 32, 128), (32, 1, step), dtype=torch.bfloat16, device="meta")
    D = torch.empty(1000, 180, 128, dtype=torch.bfloat16, device="meta")
    mask, scale = (torch.empty(1000, 180, dtype=x, device="meta") for x in (torch.bool, torch.float32))
    found = [choose.choose_dense(Q, D, m, False, None, SM_90).kernel for m in (None, mask)]
    data = torch.empty(D.shape, dtype=torch.int8, device="meta")
    served = not isinstance(choose.choose_int8(Q, data, scale, 2, SM_90), str)
    monkeypatch.setattr(packed_forward, "architecture", lambda device: SM_90)
    bounds = torch.empty(1001, dtype=torch.int64, device="meta")
    c = PackedArgs(Q, D.flatten(0, 1), None, bounds, *[None] * 6, 64, 1000, False, 64 * 32, 180_000, 32)
    by_rows = packed_forward.PackedPlan(c, False, None, "").by_rows
    near = step * 128 < 2**31
    assert (served, by_rows) == (near, near)
    assert found == (["maxsim_forward_sm90", "maxsim_row_maxima_sm90"] if near else ["maxsim_forward"] * 2)


def test_many_row_tiles_use_precomputed_norms():
    assert [choice(Nq=Nq, normalize=True).config.PRECOMPUTED_SCALES for Nq in (4, 16, 40, 41, 64)] == [False] * 3 + [
        True
    ] * 2
    assert not choice(Nq=64).config.PRECOMPUTED_SCALES


@pytest.fixture(params=[0, 2**31], ids=["norms given", "norms found"])
def norms(request, monkeypatch):
    """Select how the norms of document tokens are computed, for any number of row tiles."""
    from lik_ops.gpu import backend

    backend.forget()
    monkeypatch.setattr(sm90_configs, "_MIN_PRECOMPUTED_ROW_TILES", request.param)
    yield
    backend.forget()


@pytest.mark.parametrize("Lq", [2, 31, 32, 100, 128, 129, 1024])
@pytest.mark.parametrize("Nq", [1, 7, 64, 5000])
def test_row_tiles_hold_every_query_token(Nq, Lq):
    found = choice(Nq=Nq, Lq=Lq)
    if found is None:
        pytest.skip("the generic kernel scores this shape")
    assert found.parts * found.config.ROWS_PER_QUERY >= Lq
    assert found.row_tiles * sm90_configs.SM90_TILE_ROWS >= Nq * found.parts * found.config.ROWS_PER_QUERY
    assert 0.95 * min(132, found.row_tiles * 1000) <= found.programs <= 132


def test_large_d_tile_choice_by_document_length():
    assert [choice(d=768, Ld=Ld).config.BN for Ld in (64, 130, 180, 256, 300, 1024)] == [64, 64, 64, 256, 128, 256]
    shorter = [choice(d=768, Ld=Ld).config for Ld in (1, 20, 63, 100, 127)]
    assert [(C.BN, C.SHORT_DOCUMENTS) for C in shorter] == [(64, True)] * 3 + [(128, True)] * 2
    assert choice(d=768, Lq=300).parts == 5 and choice(d=768, Lq=300).config.ROWS_PER_QUERY == 64
    assert choice(d=768, argmax=True).config.BN <= 128 and choice(d=200) is None


def cases(normalize=False):
    """Yield tiles that end anywhere. Queries and features fill their padding or not, in one or several parts."""
    for n, (Nq, Nd, Lq, Ld, d) in enumerate(
        [
            (40, 70, 32, 180, 128),
            (9, 131, 31, 64, 96),
            (33, 67, 8, 65, 64),
            (70, 66, 3, 127, 8),
            (200, 70, 2, 128, 48),
            (3, 140, 100, 129, 128),
            (2, 150, 128, 300, 120),
            (1, 140, 129, 70, 128),
            (2, 70, 300, 200, 128),
            (1, 70, 1030, 96, 128),
        ]
    ):
        for values in ("integer", "negative", "normal"):
            q_mask, weight = ("none", "holes", "empty_some")[n % 3], n % 2 == 1
            strides = "sliced" if n % 4 == 3 else "transposed" if n % 4 == 2 else "contiguous"
            if normalize and (d % 16 or n % 4 == 2):  # rows loaded feature by feature use another kernel
                d, strides = architectures.cdiv(d, 16) * 16, "sliced"
            problem = Problem(
                Nq=Nq, Nd=Nd, Lq=Lq, Ld=Ld, d=d, dtype=HALF[n % 2], q_mask=q_mask, weight=weight, values=values, seed=n
            )
            yield problem, strides


def plain(x, argmax_dtype, normalize=False):
    """Return scores and argmax of `maxsim_forward`, which plans of few rows use."""
    from lik_ops.gpu.forward.generic import make_generic_plan

    plan = make_generic_plan(x.Q, x.D, normalize, argmax_dtype)
    argmax = None if argmax_dtype is None else plan.allocate_argmax()
    return plan.scores(plan.scores_shape, x.Q, x.D, x.q_mask, None, x.q_weight, argmax), argmax


def specialized(x, argmax_dtype, normalize=False):
    """Return scores and argmax of the specialized kernel, and fail if it is not selected."""
    from lik_ops.gpu.forward.dense import make_plan
    from lik_ops.gpu.forward.sm90_dense import Sm90Plan

    plan = make_plan(x.Q, x.D, None, normalize, argmax_dtype)
    assert isinstance(plan, Sm90Plan)
    argmax = None if argmax_dtype is None else plan.allocate_argmax()
    return plan.scores(plan.scores_shape, x.Q, x.D, x.q_mask, None, x.q_weight, argmax), argmax


@pytest.mark.gpu
@pytest.mark.parametrize(("Lq", "d", "options"), [(129, 16, {}), (65, 144, {}), (32, 16, {"normalize": True})])
@pytest.mark.parametrize("format", [None, "int8", "fp8_e4m3"])
def test_more_queries_than_a_grid_has_rows(Lq, d, options, format):
    """Sums have several parts, or cover some documents at a time."""
    Q, D = (torch.randn(n, L, d, dtype=torch.bfloat16, device="cuda") for n, L in ((2**16 + 5, Lq), (200, 64)))
    D = D if format is None else lik_ops.quantize(D, format)
    assert torch.equal(lik_ops.maxsim(Q, D, **options)[-70:], lik_ops.maxsim(Q[-70:], D, **options))


@pytest.mark.gpu
@pytest.mark.parametrize(("p", "strides"), list(cases()), ids=str)
def test_scores_match_oracle_and_generic_kernel_bits(p, strides):
    x = build(p, "cuda")
    x.Q = build(dataclasses.replace(p, strides=strides), "cuda").Q
    scores, argmax = specialized(x, torch.int16)
    expected, winners = plain(x, torch.int16)
    assert torch.equal(scores, expected) and torch.equal(argmax, winners)
    assert torch.equal(specialized(x, None)[0], scores)
    assert_scores(p, x, scores)
    assert_winners(p, x, argmax.transpose(0, 1).long())


@pytest.mark.gpu
@pytest.mark.parametrize(("p", "strides"), list(cases(normalize=True)), ids=str)
def test_normalized_scores_match_oracle_and_generic_kernel_bits(p, strides, norms):
    """Tokens have any norm, and some are zero."""
    x = build(p, "cuda")
    x.Q, x.D = x.Q * torch.rand_like(x.Q[..., :1]), x.D * 9 * torch.rand_like(x.D[..., :1])
    x.Q[0, 1], x.D[2, 5] = 0, 0
    if strides == "sliced":
        x.Q = torch.cat([x.Q, x.Q], dim=2)[:, :, : p.d]
    scores, argmax = specialized(x, torch.int16, normalize=True)
    expected, winners = plain(x, torch.int16, normalize=True)
    assert torch.equal(scores, expected) and torch.equal(argmax, winners)
    assert torch.equal(specialized(x, None, normalize=True)[0], scores)
    p = dataclasses.replace(p, normalize=True)
    assert_scores(p, x, scores)
    assert_winners(p, x, argmax.transpose(0, 1).long())


FEW = [(1, 501, 32, 300, 128), (2, 300, 9, 190, 128), (4, 131, 32, 64, 96), (2, 133, 20, 130, 64)]
FEW += [(1, 67, 100, 180, 128), (9, 300, 5, 65, 48)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("Nq", "Nd", "Lq", "Ld", "d"), FEW)
def test_few_rows_match_oracle_and_generic_kernel_bits(Nq, Nd, Lq, Ld, d, dtype):
    for n, (values, normalize) in enumerate(itertools.product(("integer", "negative", "normal"), (False, True))):
        q_mask = ("none", "holes", "empty_some")[n % 3]
        p = Problem(Nq=Nq, Nd=Nd, Lq=Lq, Ld=Ld, d=d, dtype=dtype, q_mask=q_mask, weight=n > 1, values=values, seed=n)
        p = dataclasses.replace(p, normalize=normalize)
        x = build(p, "cuda")
        if normalize:
            x.Q, x.D = x.Q * torch.rand_like(x.Q[..., :1]), x.D * 9 * torch.rand_like(x.D[..., :1])
            x.Q[0, 1], x.D[2, 5] = 0, 0
        expected, winners = plain(x, torch.int16, normalize)
        if normalize:
            scores, _ = specialized(x, None, normalize=True)
            assert torch.equal(scores, expected)
            assert torch.equal(lik_ops.maxsim(x.Q, x.D, x.q_mask, q_weight=x.q_weight, normalize=True), scores)
        if Nq * architectures.next_power_of_2(Lq) <= 32:
            scores, argmax = specialized(x, torch.int16, normalize)
            assert torch.equal(scores, expected) and torch.equal(argmax, winners)
            assert_winners(p, x, argmax.transpose(0, 1).long())
        assert_scores(p, x, expected)


def odd_fp32(x):
    """Return the inputs with some rows and tokens that two fp16 terms cannot represent, and some zeros."""
    Q, D = x.Q, x.D
    Q[0, 1], D[2, 5], D[3, :9] = 0, 0, 0
    D[5, 7, 2], D[6, -1, 1], D[7, 3, 0], D[8, 4] = 1e-12, 1e15, float("inf"), float("nan")
    D[9] = 1e-20
    Q[-1, 0, 1], Q[-1, 1], Q[0, -1, :2] = 2.0**-40, 1e20, torch.tensor([1e10, 1e-10])


@pytest.mark.gpu
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize(
    ("Nq", "Nd", "Lq", "Ld", "d"),
    [(1, 501, 32, 300, 128), (2, 300, 9, 190, 128), (3, 131, 6, 64, 96), (1, 133, 20, 130, 64), (1, 70, 2, 65, 48)],
)
def test_few_fp32_rows_match_oracle_and_generic_kernel_bits(Nq, Nd, Lq, Ld, d, odd):
    for n, values in enumerate(("integer", "normal", "normal")):
        q_mask = ("none", "holes", "empty_some")[n]
        p = Problem(Nq=Nq, Nd=Nd, Lq=Lq, Ld=Ld, d=d, q_mask=q_mask, weight=n > 0, values=values, seed=n)
        x = build(p, "cuda")
        if odd:
            odd_fp32(x)
        scores, _ = specialized(x, None)
        torch.testing.assert_close(scores, plain(x, None)[0], rtol=0, atol=0, equal_nan=True)
        found = lik_ops.maxsim(x.Q, x.D, x.q_mask, q_weight=x.q_weight)
        torch.testing.assert_close(found, scores, rtol=0, atol=0, equal_nan=True)
        if not odd:
            assert_scores(p, x, scores)


def wide_cases():
    """Yield feature steps and token tiles that end anywhere, with queries in one part or several."""
    for n, (Nq, Nd, Lq, Ld, d) in enumerate(
        [
            (40, 70, 32, 180, 144),
            (9, 131, 31, 64, 768),
            (33, 67, 8, 300, 208),
            (70, 66, 3, 127, 192),
            (200, 70, 2, 128, 256),
            (3, 140, 100, 260, 1024),
            (2, 150, 64, 512, 320),
            (1, 140, 129, 256, 768),
            (2, 70, 300, 200, 144),
            (40, 70, 32, 20, 144),
            (9, 131, 31, 1, 768),
            (3, 140, 100, 100, 256),
            (2, 150, 64, 63, 320),
        ]
    ):
        for values in ("integer", "negative", "normal"):
            q_mask, weight = ("none", "holes", "empty_some")[n % 3], n % 2 == 1
            yield Problem(
                Nq=Nq, Nd=Nd, Lq=Lq, Ld=Ld, d=d, dtype=HALF[n % 2], q_mask=q_mask, weight=weight, values=values, seed=n
            )


@pytest.mark.gpu
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("p", list(wide_cases()), ids=str)
def test_large_d_matches_oracle_and_generic_kernel_bits(p, normalize):
    from lik_ops.gpu.forward.dense import make_plan
    from lik_ops.gpu.forward.sm90_dense import Sm90LargeDPlan

    p = dataclasses.replace(p, normalize=normalize)
    x = build(p, "cuda")
    if normalize:
        x.D[2, -1] = 0
    plan = make_plan(x.Q, x.D, None, normalize, None)
    assert isinstance(plan, Sm90LargeDPlan)
    scores = plan.scores(plan.scores_shape, x.Q, x.D, x.q_mask, None, x.q_weight, None)
    assert torch.equal(scores, plain(x, None, normalize)[0])
    assert_scores(p, x, scores)
    # Query rows with gaps, and query rows that TMA cannot read.
    apart = torch.cat([x.Q, x.Q], dim=2)[:, :, : p.d]
    odd = torch.empty(x.Q.numel() + 1, dtype=p.dtype, device="cuda")[1:].view_as(x.Q).copy_(x.Q)
    for Q in (apart, odd):
        assert torch.equal(lik_ops.maxsim(Q, x.D, x.q_mask, q_weight=x.q_weight, normalize=normalize), scores)


@pytest.mark.gpu
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("Ld", [200, 100, 20])
def test_large_d_with_nan_and_infinities(normalize, Ld):
    """A document of 100 or 20 tokens is shorter than its tile, which then holds tokens of the next documents."""
    p = Problem(Nq=20, Nd=150, Lq=32, Ld=Ld, d=256, dtype=torch.bfloat16, values="normal")
    x = build(p, "cuda")
    x.D[3, -1] = float("nan")
    x.D[7, 5, 3] = float("inf")
    x.D[9, :, :] = float("-inf")
    x.Q[:, :, :] = x.Q.abs()
    x.Q[2, 4] = float("nan")
    scores = lik_ops.maxsim(x.Q, x.D, normalize=normalize)
    torch.testing.assert_close(scores, plain(x, None, normalize)[0], rtol=0, atol=0, equal_nan=True)
    rows = torch.arange(p.Nq, device="cuda") != 2
    ninth = scores[rows][:, 9]
    assert scores[:, 3].isnan().all() and scores[2].isnan().all()
    assert ninth.isnan().all() if normalize else (ninth == float("-inf")).all()


@pytest.mark.gpu
@pytest.mark.parametrize("Lq", [32, 300])
def test_nonfinite_norms(Lq, norms):
    """If a norm overflows, its inverse is 0, and infinite similarities become NaN."""
    p = Problem(Nq=20, Nd=150, Lq=Lq, Ld=200, d=64, dtype=torch.bfloat16, values="normal")
    x = build(p, "cuda")
    x.D[3, 150] = float("nan")
    x.D[3, 120:130] = float("inf")
    x.D[7, 5, 3], x.D[7, 190, 4] = float("inf"), 1e30
    x.D[9] = float("-inf")
    x.D[11] = 0
    x.D[13, 60:] = 1e30
    x.Q[:, :, :] = x.Q.abs()
    x.Q[2, 4], x.Q[5, 1], x.Q[6, 0] = float("nan"), 1e25, 0
    scores, argmax = specialized(x, torch.int16, normalize=True)
    expected, winners = plain(x, torch.int16, normalize=True)
    torch.testing.assert_close(scores, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(argmax, winners)
    for i in range(p.Nq):
        one, won = lik_ops.maxsim_with_argmax(x.Q[i : i + 1], x.D, normalize=True)
        torch.testing.assert_close(one, scores[i : i + 1], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(won[0].short(), argmax[:, i])
        one = lik_ops.maxsim(x.Q[i : i + 1], x.D, normalize=True)
        torch.testing.assert_close(one, scores[i : i + 1], rtol=0, atol=0, equal_nan=True)
    rows = torch.arange(p.Nq, device="cuda") != 2
    assert scores[2].isnan().all() and scores[:, [3, 7, 9]].isnan().all() and (scores[rows][:, 11] == 0).all()
    assert (argmax[3, rows] == 120).all() and (argmax[7, rows, 1:] == 5).all() and (argmax[9, rows] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("Lq", [32, 300])
def test_nan_and_infinities(Lq):
    """The argmax is the first NaN. If every similarity is -inf, it is the first token."""
    p = Problem(Nq=20, Nd=150, Lq=Lq, Ld=200, d=64, dtype=torch.bfloat16, values="normal")
    x = build(p, "cuda")
    x.D[3, 150] = float("nan")
    x.D[3, 170] = float("nan")
    x.D[7, 5, 3] = float("inf")
    x.D[9, :, :] = float("-inf")
    x.Q[:, :, :] = x.Q.abs()
    x.Q[2, 4] = float("nan")
    scores, argmax = specialized(x, torch.int16)
    expected, winners = plain(x, torch.int16)
    torch.testing.assert_close(scores, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(argmax, winners)
    assert scores[:, 3].isnan().all() and scores[2].isnan().all()
    rows = torch.arange(p.Nq, device="cuda") != 2
    assert (argmax[3, rows] == 150).all() and (argmax[9, rows] == 0).all() and (argmax[:, 2, 4] == 0).all()
    assert (scores[rows][:, 9] == float("-inf")).all()
    for i in range(p.Nq):
        one, won = lik_ops.maxsim_with_argmax(x.Q[i : i + 1], x.D)
        torch.testing.assert_close(one, scores[i : i + 1], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(won[0].short(), argmax[:, i])


@pytest.mark.gpu
@pytest.mark.parametrize("argmax_dtype", [None, torch.int16, torch.int32, torch.int64])
def test_every_argmax_dtype_of_the_operator(argmax_dtype):
    p = Problem(Nq=20, Nd=150, Lq=32, Ld=200, d=128, dtype=torch.float16)
    x = build(p, "cuda")
    scores, argmax = torch.ops.lik.maxsim_fwd(x.Q, x.D, None, None, None, False, argmax_dtype, "auto")
    expected, winners = plain(x, torch.int32)
    assert torch.equal(scores, expected)
    if argmax_dtype is not None:
        assert argmax.dtype == argmax_dtype and torch.equal(argmax.int(), winners)


@pytest.mark.gpu
@pytest.mark.parametrize("normalize", [False, True])
def test_bits_do_not_depend_on_the_batch(normalize):
    p = Problem(Nq=40, Nd=400, Lq=32, Ld=180, d=128, dtype=torch.bfloat16, values="normal", normalize=normalize)
    x = build(p, "cuda")
    scores, argmax = run(p, x)
    for first, queries, k in ((0, 1, 400), (3, 27, 200), (39, 1, 1), (5, 2, 400), (7, 3, 400), (8, 5, 20), (1, 1, 340)):
        q, k = slice(first, first + queries), slice(400 - k, 400)
        part, winners = lik_ops.maxsim_with_argmax(x.Q[q], x.D[k], normalize=normalize)
        assert torch.equal(part, scores[q, k]) and torch.equal(winners, argmax[q, k])
    odd = torch.empty(x.Q.numel() + 1, dtype=p.dtype, device="cuda")[1:].view_as(x.Q).copy_(x.Q)
    scores = lik_ops.maxsim(odd, x.D, normalize=normalize)
    assert torch.equal(lik_ops.maxsim(odd[3:4], x.D, normalize=normalize), scores[3:4])


@pytest.mark.parametrize("normalize", [False, True])
def test_unaligned_normalized_queries_are_unsupported(normalize, monkeypatch):
    from lik_ops.gpu.forward.sm90_dense import Sm90Plan
    from lik_ops.gpu.runtime import gluon

    monkeypatch.setattr(gluon, "require_kernels", lambda: SimpleNamespace(dense=SimpleNamespace(maxsim_forward_sm90=0)))
    monkeypatch.setattr(gluon, "make_descriptor_factory", lambda *_: None)
    Q, D = torch.zeros(8, 32, 128, dtype=torch.bfloat16), torch.zeros(100, 64, 128, dtype=torch.bfloat16)
    plan = Sm90Plan(choice(Nq=8, K=100, Ld=64, normalize=normalize), Q, D, None)
    odd = torch.zeros(Q.numel() + 1, dtype=Q.dtype)[1:].view_as(Q)
    assert plan._supports_tensors(Q, D) and plan._supports_tensors(odd, D) == (not normalize)


@pytest.mark.gpu
@pytest.mark.parametrize(("Lq", "normalize"), [(300, False), (300, True), (32, True)])
def test_chunks_of_documents(Lq, normalize, monkeypatch):
    from lik_ops.gpu import backend as cuda
    from lik_ops.gpu.forward import sm90_dense as cuda_specialized
    from lik_ops.gpu.forward.dense import make_plan

    p = Problem(Nq=9, Nd=200, Lq=Lq, Ld=150, d=128, dtype=torch.bfloat16, values="normal")
    x = build(p, "cuda")
    expected, winners = specialized(x, torch.int16, normalize)
    cuda.forget()
    monkeypatch.setattr(sm90_configs, "_MIN_PRECOMPUTED_ROW_TILES", 0)
    monkeypatch.setattr(
        cuda_specialized, "_MAX_WORKSPACE_BYTES", 4 * (9 * architectures.cdiv(Lq, 128) + (192 if normalize else 0)) * 90
    )
    assert make_plan(x.Q, x.D, None, normalize, None).chunk == 90
    scores, argmax = specialized(x, torch.int16, normalize)
    assert torch.equal(scores, expected) and torch.equal(argmax, winners)
    cuda.forget()


@pytest.mark.gpu
def test_documents_beyond_2_31_elements_and_off_alignment():
    D = torch.randn(95_000, 180, 128, device="cuda", dtype=torch.bfloat16)
    Q = torch.randn(9, 32, 128, device="cuda", dtype=torch.bfloat16)
    scores = lik_ops.maxsim(Q, D)
    for j in (0, 94_999):
        expected = lik_ops.reference.maxsim(Q.double(), D[j : j + 1].double())
        torch.testing.assert_close(scores[:, j : j + 1].double(), expected, rtol=1e-5, atol=1e-4)
    shifted = D.view(-1)[1 : 1 + 400 * 180 * 128].view(400, 180, 128)
    assert torch.equal(lik_ops.maxsim(Q, shifted), lik_ops.maxsim(Q, shifted.clone()))


@pytest.mark.parametrize(
    ("Nq", "Nd", "Lq", "Ld", "d", "kernel"),
    [
        (1, 4, 1024, 300, 128, "maxsim_forward_sm90"),  # the generic kernel would have 4 programs
        (1, 4, 1024, 300, 512, "maxsim_forward_sm90_large_d"),
        (32, 4, 32, 1024, 256, "maxsim_forward_sm90_large_d"),
        (32, 4, 32, 180, 256, "maxsim_forward"),
        (32, 16, 32, 180, 128, "maxsim_forward_sm90"),
        (32, 8, 32, 1024, 128, "maxsim_forward"),
        (1, 4, 32, 2048, 512, "maxsim_forward_packed"),
        (1, 64, 32, 2048, 128, "maxsim_forward"),
        (1, 64, 32, 4096, 128, "maxsim_forward_packed"),
        (4, 16, 32, 2048, 256, "maxsim_forward_packed"),
        (1, 4, 1024, 2048, 256, "maxsim_forward_sm90_large_d"),
        (1, 4, 1024, 8192, 256, "maxsim_forward_packed"),
    ],
)
def test_kernel_choice_for_few_programs(Nq, Nd, Lq, Ld, d, kernel):
    """See `benchmarks/results/sweep_pairs.json`."""
    Q, D = (torch.empty(*n, d, dtype=torch.bfloat16, device="meta") for n in ((Nq, Lq), (Nd, Ld)))
    assert choose.choose_dense(Q, D, None, False, None, SM_90).kernel == kernel
