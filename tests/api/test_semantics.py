"""Test the contract of scores and argmax on every backend against the fp64 reference."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lik_ops

from ..support.common import INTERPRETING, PLACES, Problem, assert_scores, assert_winners, build, oracle, run, score

MASKS = ("none", "holes", "prefix", "empty_some", "integer")
LAYOUTS = ("cross", "candidates", "pairs", "flat_q", "flat_d", "flat")
# The interpreter runs every program in numpy, so it gets few and small programs.
LENGTHS = (0, 1, 2, 3, 7, 16, 31, 33, 64, 65, 129) if not INTERPRETING else (0, 1, 3, 17, 33)
MOST = 5 if not INTERPRETING else 2
MANY = 700 if not INTERPRETING else 9  # documents
LONG = 70 if not INTERPRETING else 20  # longer than a tile of document tokens

problems = st.builds(
    Problem,
    layout=st.sampled_from(LAYOUTS),
    Nq=st.integers(0, MOST),
    Nd=st.integers(0, MOST),
    Lq=st.sampled_from(LENGTHS),
    Ld=st.sampled_from(LENGTHS),
    d=st.sampled_from((1, 2, 3, 8, 17, 48, 64, 130)),
    q_mask=st.sampled_from(MASKS),
    d_mask=st.sampled_from(MASKS),
    weight=st.booleans(),
    normalize=st.booleans(),
    values=st.sampled_from(("integer", "negative", "normal")),
    strides=st.sampled_from(("contiguous", "transposed", "sliced", "expanded")),
    seed=st.integers(0, 1000),
)


def _dtypes(place):
    return st.sampled_from(place.dtypes)


@pytest.mark.parametrize("place", PLACES, ids=str)
@given(problem=problems, data=st.data())
def test_scores_and_argmax_match_the_reference(place, problem, data):
    problem = Problem(**{**problem.__dict__, "dtype": data.draw(_dtypes(place))})
    x = build(problem, place.device)
    with place.use():
        scores, argmax = run(problem, x)
        alone = score(problem, x)
    assert_scores(problem, x, scores)
    assert_winners(problem, x, argmax)
    assert torch.equal(alone.nan_to_num(), scores.nan_to_num()), "scores differ when no winner is asked for"


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("layout", ["cross", "candidates"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("Lq", "d"), [(300, 24), (5, 300), (20, 1030)] if not INTERPRETING else [(70, 24), (3, 140)])
def test_long_queries_and_wide_features(place, layout, normalize, Lq, d):
    """Queries longer than a tile, and d beyond one step of the kernels."""
    for dtype in place.some_dtypes(normalize ^ (layout == "cross")):
        p = Problem(
            layout=layout, Nq=2, Nd=2, Lq=Lq, Ld=LONG, d=d, dtype=dtype, q_mask="holes", d_mask="holes", weight=True
        )
        p = Problem(**{**p.__dict__, "normalize": normalize, "values": "normal" if normalize else "integer"})
        x = build(p, place.device)
        with place.use():
            scores, argmax = run(p, x)
        assert_scores(p, x, scores)
        assert_winners(p, x, argmax)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("mask", ["none", "holes", "empty_some"])
@pytest.mark.parametrize("Ld", [64, 150] if not INTERPRETING else [16, 37])
def test_more_documents_than_programs_at_a_time(place, mask, Ld):
    for Lq, normalize in ((17, False), (9, True)):
        for dtype in place.some_dtypes((mask == "holes") ^ normalize ^ (Ld % 2)):
            p = Problem(Nq=3, Nd=MANY, Lq=Lq, Ld=Ld, d=24, dtype=dtype, q_mask=mask, d_mask=mask, weight=True)
            p = Problem(**{**p.__dict__, "normalize": normalize, "values": "normal" if normalize else "integer"})
            x = build(p, place.device)
            with place.use():
                assert_scores(p, x, score(p, x))


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_argmax_is_the_first_of_equal_tokens_across_tiles(place):
    token, worse = torch.ones(8), torch.zeros(8)
    D = torch.stack([worse] * 200)
    D[[70, 71, 130, 199]] = token
    with place.use():
        _, argmax = lik_ops.maxsim_with_argmax(torch.ones(1, 2, 8, device=place.device), D.to(place.device))
    assert argmax.tolist() == [[70, 70]]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("Ld", [1, 3, 64, 65, 100, 1500] if not INTERPRETING else [1, 3, 16, 17])
def test_padding_never_beats_negative_similarities(place, Ld):
    Q, D = torch.ones(2, 3, 4, device=place.device), torch.full((3, Ld, 4), -1.0, device=place.device)
    with place.use():
        assert torch.equal(lik_ops.maxsim(Q, D), torch.full((2, 3), -12.0, device=place.device))


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_fully_masked_documents_score_minus_inf_and_queries_zero(place):
    """A document without kept tokens scores -inf for any weights. A query without kept tokens always scores 0."""
    Q, D = torch.randn(2, 3, 4, device=place.device), torch.randn(2, 5, 4, device=place.device)
    q_mask = torch.tensor([[True, False, True], [False, False, False]], device=place.device)
    d_mask = torch.tensor([[True] * 5, [False] * 5], device=place.device)
    for weight in (None, -torch.ones(2, 3, device=place.device), torch.zeros(2, 3, device=place.device)):
        with place.use():
            scores, argmax = lik_ops.maxsim_with_argmax(Q, D, q_mask, d_mask, q_weight=weight)
        assert torch.isfinite(scores[0, 0]) and scores[0, 1] == -math.inf
        assert scores[1].tolist() == [0.0, 0.0]
        assert argmax[0, 0, 1] == -1 and (argmax[0, 1] == -1).all() and (argmax[1] == -1).all()
    with place.use():
        assert lik_ops.maxsim(Q, D[:, :0]).eq(-math.inf).all()
        assert lik_ops.maxsim(Q[:, :0], D[:, :0]).eq(0).all()


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_last_unmasked_token_may_be_anywhere_in_a_document(place):
    """With one query, kernels look for the last kept token before they read. Masked tokens are NaN."""
    Q, D = torch.randint(-3, 4, (1, 5, 16)).half(), torch.randint(-3, 4, (7, 1300, 16)).half()
    d_mask = torch.zeros(7, 1300, dtype=torch.bool)
    for document, kept in enumerate(([0], [1299], [511], [512], [3, 700], [*range(0, 1100, 7)])):
        d_mask[document, kept] = True
    D[~d_mask] = math.nan
    expected, winners = lik_ops.reference.maxsim_with_argmax(Q.double(), D.double(), None, d_mask)
    given = [x.to(place.device) for x in (Q, D, d_mask)]
    with place.use():
        scores, argmax = lik_ops.maxsim_with_argmax(given[0], given[1], None, given[2])
        assert torch.equal(lik_ops.maxsim(given[0], given[1], None, given[2]), scores)
    assert scores[0, 6] == -math.inf
    assert torch.equal(scores.cpu(), expected.float()) and torch.equal(argmax.cpu(), winners)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("with_argmax", [False, True])
def test_nan_affects_only_its_own_pairs(place, with_argmax):
    Q, D = torch.randn(3, 4, 8, device=place.device), torch.randn(4, 90, 8, device=place.device)
    D[1, 66, 3] = math.nan
    D[1, 70, 0] = math.nan
    Q[2, 1, 0] = math.nan
    with place.use():
        scores, argmax = lik_ops.maxsim_with_argmax(Q, D)
        scores = scores if with_argmax else lik_ops.maxsim(Q, D)
    expected = torch.zeros(3, 4, dtype=torch.bool)
    expected[2], expected[:, 1] = True, True
    assert torch.equal(scores.isnan().cpu(), expected)
    assert (argmax[:2, 1] == 66).all() and (argmax[2, :, 1] == 0).all()


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_infinities_follow_ieee_and_minus_inf_ties_pick_first_kept(place):
    Q = torch.tensor([[[1.0, 0.0]]], device=place.device)
    D = torch.full((1, 6, 2), 0.0, device=place.device)
    D[0, :, 0] = -math.inf
    mask = torch.tensor([[False, False, True, True, False, True]], device=place.device)
    D[0, :, 1] = 0.5
    with place.use():
        scores, argmax = lik_ops.maxsim_with_argmax(Q, D, None, mask)
        assert scores.item() == -math.inf and argmax.item() == 2
        D[0, 3, 0] = math.inf
        scores, argmax = lik_ops.maxsim_with_argmax(Q, D, None, mask)
        assert scores.item() == math.inf and argmax.item() == 3


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("magnitude", [1e-20, 1e-13, 1e-12, 1e-3, 1e8])
def test_normalize_matches_functional_normalize_at_every_magnitude(place, magnitude):
    p = Problem(Lq=3, Ld=6, d=8, values="normal", normalize=True)
    x = build(p, place.device)
    x.Q, x.D = x.Q * magnitude, x.D * magnitude
    with place.use():
        scores, _ = run(p, x)
    expected, _ = oracle(p, x)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-5, atol=1e-30)


@pytest.mark.skipif(INTERPRETING, reason="the interpreter's products have numpy's bits, not the kernels'")
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("Ld", [1, 3, 37, 64, 300])
@pytest.mark.parametrize("Lq", [1, 5, 32, 150])
def test_bits_do_not_depend_on_the_batch(place, Lq, Ld):
    """A score has the same bits alone, in a batch, in another order, and as a candidate or a pair."""
    for dtype in place.dtypes:
        p = Problem(Nq=5, Nd=9, Lq=Lq, Ld=Ld, d=40, dtype=dtype, values="normal", seed=Lq + Ld)
        x = build(p, place.device)
        order = torch.tensor([4, 0, 8, 2, 2, 7], device=place.device)
        with place.use():
            scores = lik_ops.maxsim(x.Q, x.D)
            assert torch.equal(lik_ops.maxsim(x.Q, x.D[order]), scores[:, order])
            assert torch.equal(lik_ops.maxsim(x.Q[2], x.D), scores[2])
            assert torch.equal(lik_ops.maxsim(x.Q[1:4], x.D[8]), scores[1:4, 8])
            assert torch.equal(lik_ops.maxsim(x.Q, x.D[None, order].expand(5, -1, -1, -1)), scores[:, order])
            assert torch.equal(lik_ops.maxsim_pairs(x.Q, x.D[:5]), scores.diagonal())


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_half_precision_inputs_score_in_fp32(place):
    """Scores are accumulated in fp32, so the error against fp64 on the same half-precision inputs is an fp32 error."""
    for dtype in set(place.dtypes) - {torch.float64}:
        p = Problem(Nq=4, Nd=3, Lq=32, Ld=LONG, d=128, dtype=dtype, values="normal")
        x = build(p, place.device)
        with place.use():
            scores, _ = run(p, x)
        expected, _ = oracle(p, x)
        assert float((scores.double() - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_last_document_of_a_tensor_beyond_2_31_elements(dtype):
    Nd, Ld, d = 95_000, 180, 128
    assert Nd * Ld * d > 2**31
    D = torch.randn(Nd, Ld, d, device="cuda", dtype=dtype)
    Q = torch.randn(1, 32, d, device="cuda", dtype=dtype)
    scores, argmax = lik_ops.maxsim_with_argmax(Q, D)
    for j in (0, Nd // 2, Nd - 2, Nd - 1):
        expected = lik_ops.reference.maxsim(Q.double(), D[j : j + 1].double())
        torch.testing.assert_close(scores[:, j : j + 1].double(), expected, rtol=1e-5, atol=1e-4)
        assert torch.equal(lik_ops.maxsim_with_argmax(Q, D[j : j + 1])[1], argmax[:, j : j + 1])


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_inputs_on_a_device_that_is_not_current():
    p = Problem(Lq=32, Ld=70, d=64, dtype=torch.float16, values="normal")
    x = build(p, "cuda:1")
    x.Q.requires_grad_()
    assert torch.cuda.current_device() == 0
    scores, argmax = run(p, x)
    assert_scores(p, x, scores.detach())
    assert_winners(p, x, argmax)
    scores.sum().backward()
    assert x.Q.grad.device == torch.device("cuda:1") and torch.isfinite(x.Q.grad).all()


@pytest.mark.gpu
def test_no_host_synchronization():
    p = Problem(Nq=4, Nd=6, Lq=32, Ld=70, d=64, dtype=torch.bfloat16, q_mask="holes", d_mask="holes", weight=True)
    x = build(p, "cuda")
    leaves = [t.requires_grad_() for t in (x.Q, x.D)]
    score(p, x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(score(p, x), leaves, torch.ones(4, 6, device="cuda"))
        score(p, x, backward="unified")
    finally:
        torch.cuda.set_sync_debug_mode("default")
