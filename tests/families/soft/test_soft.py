"""Test soft MaxSim against the fp64 formula: scores, gradients, masks, empty, huge, and tiny inputs, equal bits."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

import lik_ops
from lik_ops import reference
from lik_ops.core.arguments import score_dtype

from ...support.common import INTERPRETING, PLACES, TOLERANCE, Problem, assert_near, build, thin_out

at_places = pytest.mark.parametrize("place", PLACES, ids=str)
SMALL = Problem(values="normal", Nq=3, Nd=3, Lq=5, Ld=9)
EVERYTHING = {"q_mask": "holes", "d_mask": "empty_some", "weight": True}
PROBLEMS = [
    SMALL,
    replace(SMALL, layout="candidates", normalize=True, **EVERYTHING),
    replace(SMALL, Nq=2, Nd=2, Lq=40, Ld=50, d=20, **EVERYTHING),
    replace(SMALL, layout="candidates", Nq=2, Ld=33, d=130, q_mask="empty_some", d_mask="integer"),
    replace(SMALL, Nq=7, Nd=2, d=130, normalize=True, strides="sliced", weight=True),
    replace(SMALL, Ld=16, strides="transposed", d_mask="prefix"),
    replace(SMALL, layout="flat", normalize=True, weight=True),
    replace(SMALL, layout="flat_q", d_mask="holes", strides="expanded"),
    replace(SMALL, layout="flat_d", q_mask="holes", d=1, Ld=1),
]


def score(function, x, temperature, normalize):
    return function(x.Q, x.D, temperature, x.q_mask, x.d_mask, q_weight=x.q_weight, normalize=normalize)


def step(function, x, temperature, normalize, upstream):
    """Return the scores, and the gradients of all leaves and the temperature."""
    leaves = [t.detach().requires_grad_() for t in x.leaves()]
    y = replace(x, Q=leaves[0], D=leaves[1], q_weight=leaves[2] if len(leaves) > 2 else None)
    scores = score(function, y, temperature, normalize)
    kept = torch.where(scores.isfinite(), scores, 0)  # scores of -inf have no gradient
    wanted = [*leaves, temperature] if isinstance(temperature, torch.Tensor) else leaves
    return scores.detach(), torch.autograd.grad(kept, wanted, upstream.to(scores))


@at_places
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_scores_and_gradients_match_reference(place, number):
    for dtype in place.some_dtypes(number):
        p = replace(PROBLEMS[number], dtype=dtype)
        x = build(p, place.device)
        tau = torch.tensor(0.7, dtype=score_dtype(dtype), device=place.device, requires_grad=True)
        tau64 = tau.detach().double().requires_grad_()
        upstream = torch.randn(score(reference.maxsim_soft, x.to64(), 0.7, p.normalize).shape, device=place.device)
        with place.use():
            scores, grads = step(lik_ops.maxsim_soft, x, tau, p.normalize, upstream)
            same = score(lik_ops.maxsim_soft, x, 0.7, p.normalize)
        expected, expected_grads = step(reference.maxsim_soft, x.to64(), tau64, p.normalize, upstream)
        assert scores.dtype == score_dtype(dtype)
        assert_near(scores, expected, score_dtype(dtype))
        assert_near(same, expected, score_dtype(dtype))
        # The error of an entropy is the rounding error of the similarities divided by the temperature.
        terms = float((expected[expected.isfinite()] / 0.7).abs().sum())
        for leaf, g, e in zip([*x.leaves(), tau], grads, expected_grads, strict=True):
            assert g.dtype == leaf.dtype
            of_tau = (score_dtype(dtype), terms) if leaf is tau else (dtype, 1.0)
            assert_near(g, e, *of_tau)


@at_places
@pytest.mark.parametrize("options", [{}, {"q_mask": "holes"}, {"d_mask": "holes"}, {"d": 144}])
def test_temperature_gradient_of_peaks_matches_reference(place, options):
    """Probabilities rounded to half precision would hide entropies that are small compared with soft maxima."""
    upstream = torch.ones(2, 3, device=place.device)
    for dtype in place.dtypes:
        p = replace(SMALL, **{"Nq": 2, "Nd": 3, "Lq": 17, "Ld": 40, "d": 64, "dtype": dtype, **options})
        x = build(p, place.device)
        tau = torch.tensor(0.5, dtype=score_dtype(dtype), device=place.device, requires_grad=True)
        tau64 = tau.detach().double().requires_grad_()
        expected = step(reference.maxsim_soft, x.to64(), tau64, False, upstream)[1][-1]
        with place.use():
            found = step(lik_ops.maxsim_soft, x, tau, False, upstream)[1][-1]
        assert abs(float(found / expected) - 1) < 1e-3, (dtype, found, expected)


@at_places
@pytest.mark.parametrize(
    ("scale", "temperature", "options"),
    thin_out(
        (
            (*values, options)
            for values in (("normal", 0.02), ("unit", 1e-4), ("unit", 1e-3), ("large", 0.02))
            for options in ({}, {"q_mask": "holes", "weight": True}, {"d_mask": "holes"}, {"d": 144})
        ),
        4,
    ),
)
def test_low_temperature_gradient_matches_reference(place, scale, temperature, options):
    """The entropies are far below the rounding error of a soft maximum divided by the temperature."""
    upstream = torch.ones(4, 4, device=place.device)
    for dtype in place.dtypes:
        p = replace(SMALL, **{"Nq": 4, "Nd": 4, "Lq": 17, "Ld": 40, "d": 64, "dtype": dtype, **options})
        x = build(p, place.device)
        x.Q = x.Q * 5 if scale == "large" else x.Q
        tau = torch.tensor(temperature, dtype=score_dtype(dtype), device=place.device, requires_grad=True)
        tau64 = tau.detach().double().requires_grad_()
        expected = step(reference.maxsim_soft, x.to64(), tau64, scale == "unit", upstream)[1][-1]
        with place.use():
            found = step(lik_ops.maxsim_soft, x, tau, scale == "unit", upstream)[1][-1]
        # The error of a probability is the rounding error of the similarities divided by the temperature.
        largest = 1 if scale == "unit" else 40 if scale == "normal" else 200
        error = 16 * torch.finfo(score_dtype(dtype)).eps * largest / temperature
        assert abs(float(found / expected) - 1) < error + 1e-4, (dtype, found, expected)


@at_places
def test_temperature_gradient_of_ties_is_their_entropy(place):
    """Two, three, and four equal tokens share a probability, as do equal tokens in two blocks of a document."""
    Q = torch.full((1, 1, 16), 2.0, device=place.device)
    for Ld in (16, 300):
        D = torch.zeros(5, Ld, 16, device=place.device)
        for n in range(1, 5):
            D[n, [0, Ld // 2, Ld - 1, 3][:n]] = 1
        tau = torch.tensor(0.01, device=place.device, requires_grad=True)
        for n, entropy in enumerate(math.log(n) for n in (Ld, 1, 2, 3, 4)):
            with place.use():
                scores = lik_ops.maxsim_soft(Q, D[n : n + 1], tau)
                found = torch.autograd.grad(scores.sum(), tau)[0]
            assert abs(float(found) - entropy) < 1e-3, (Ld, n)


@at_places
def test_temperature_gradient_of_a_peak_is_its_entropy(place):
    """The second token has a probability below the rounding error of the soft maximum divided by the temperature."""
    steps = torch.arange(1, 15, device=place.device)
    Q = torch.zeros(1, 1, 16, device=place.device)
    D = torch.zeros(14, 2, 16, device=place.device)
    Q[..., 0], D[:, 0, 0], D[:, 1, 0] = 1, 0.75, 0.75 - steps * 2**-13
    tau = torch.tensor(1e-4, device=place.device, requires_grad=True)
    S = D[..., 0].double() / 1e-4
    expected = -(S.softmax(1) * S.log_softmax(1)).sum(1)
    for n in range(14):
        with place.use():
            found = torch.autograd.grad(lik_ops.maxsim_soft(Q, D[n : n + 1], tau).sum(), tau)[0]
        assert abs(float(found / expected[n]) - 1) < 2e-3, (n, float(found), float(expected[n]))


def test_reference_matches_logsumexp():
    Q, D = torch.randn(2, 3, 4).double(), torch.randn(5, 6, 4).double()
    expected = 0.1 * torch.logsumexp(torch.einsum("isd,jtd->ijst", Q, D) / 0.1, -1)
    torch.testing.assert_close(reference.maxsim_soft(Q, D, 0.1), expected.sum(-1))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("layout", ["cross", "candidates"])
def test_gradcheck(layout, normalize):
    p = replace(
        SMALL, layout=layout, dtype=torch.float64, d=4, poison=False, q_mask="holes", d_mask="holes", weight=True
    )
    x = build(p, "cpu")
    x.d_mask[..., 0] = True

    def function(Q, D, w, tau):
        return lik_ops.maxsim_soft(Q, D, tau, x.q_mask, x.d_mask, q_weight=w, normalize=normalize)

    tau = torch.tensor(0.4, dtype=torch.float64)
    assert torch.autograd.gradcheck(function, [t.detach().requires_grad_() for t in (*x.leaves(), tau)])


@at_places
def test_low_temperature_approaches_maxsim(place):
    for dtype in place.some_dtypes(0):
        p = replace(SMALL, dtype=dtype, d=24, Ld=20)
        x = build(p, place.device)
        first, second = reference.similarities(x.to64().Q, x.to64().D).topk(2).values.unbind(-1)
        small = float((first - second).min()) / 30  # only the best token has a probability
        upstream = torch.randn(3, 3, device=place.device)
        leaves = [t.detach().requires_grad_() for t in x.leaves()]
        with place.use():
            hard = lik_ops.maxsim(*leaves)
            expected = torch.autograd.grad(hard, leaves, upstream.to(hard))
            for tau in (small, 1e-30, 1e-300):
                found, grads = step(lik_ops.maxsim_soft, x, tau, False, upstream)
                assert_near(found, hard.detach(), score_dtype(dtype))
                # The error of a probability is the rounding error of the similarities divided by the temperature.
                error = TOLERANCE[dtype] + torch.finfo(score_dtype(dtype)).eps * float(first.abs().max()) / tau
                for g, e in zip(grads, expected, strict=True):
                    assert bool(g.isfinite().all())
                    assert float((g - e).abs().max()) <= error * float(e.abs().max()), tau
            warm = lik_ops.maxsim_soft(*x.leaves(), 0.5)
        assert bool((warm >= hard).all()) and bool((warm <= hard + p.Lq * 0.5 * math.log(p.Ld) + 1e-4).all())


@at_places
@pytest.mark.parametrize("size", [1e-18, 1e18])
def test_huge_and_tiny_similarities_match_reference(place, size):
    x = build(replace(SMALL, Ld=20), place.device)
    x.D = x.D * size
    upstream = torch.ones(3, 3, device=place.device)
    for tau in (1e-3, 1.0, 1e3):
        with place.use():
            found, grads = step(lik_ops.maxsim_soft, x, tau, False, upstream)
        expected, expected_grads = step(reference.maxsim_soft, x.to64(), tau, False, upstream)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
        for g, e in zip(grads, expected_grads, strict=True):
            assert bool(g.isfinite().all())
            assert float((g.double() - e).abs().max()) <= 1e-4 * float(e.abs().max())


@at_places
@pytest.mark.parametrize("tau", [3e38, 1e39, 1e300])
def test_huge_temperature_of_one_token_scores_like_maxsim(place, tau):
    """The soft maximum of one token is its similarity, also for a temperature beyond the fp32 maximum."""
    x = build(replace(SMALL, Ld=1), place.device)
    with place.use():
        found, grads = step(lik_ops.maxsim_soft, x, tau, False, torch.ones(3, 3, device=place.device))
        torch.testing.assert_close(found, lik_ops.maxsim(*x.leaves()).detach())
    assert all(bool(g.isfinite().all()) for g in grads)


@at_places
def test_infinities_and_nan(place):
    Q = torch.ones(1, 2, 16, device=place.device)
    D = torch.zeros(5, 20, 16, device=place.device)
    D[0, 17, 0] = torch.inf
    D[1, 3, 0] = -torch.inf
    D[2, :, 0] = -torch.inf
    D[3, 11, 0] = torch.nan
    with place.use():
        scores = lik_ops.maxsim_soft(Q, D, 0.5)[0].cpu()
        hard = lik_ops.maxsim(Q, D)[0].cpu()
    expected = torch.tensor([torch.inf, math.log(19), -torch.inf, torch.nan, math.log(20)])
    torch.testing.assert_close(scores, expected, equal_nan=True)
    assert torch.equal(scores.isnan(), hard.isnan()) and torch.equal(scores.isinf(), hard.isinf())


@at_places
@pytest.mark.parametrize("layout", ["cross", "candidates"])
def test_empty_inputs_score_like_maxsim(place, layout):
    """Like `maxsim`: documents without tokens, queries without tokens, no documents, and no queries."""
    for sizes in ((2, 3, 4, 0), (2, 3, 0, 5), (2, 0, 4, 5), (0, 3, 4, 5)):
        Nq, K, Lq, Ld = sizes
        Q = torch.randn(Nq, Lq, 8, device=place.device)
        D = torch.randn(*((K,) if layout == "cross" else (Nq, K)), Ld, 8, device=place.device)
        with place.use():
            leaves = [t.requires_grad_() for t in (Q, D)]
            scores = lik_ops.maxsim_soft(*leaves, 0.5)
            assert torch.equal(scores, lik_ops.maxsim(*leaves)), sizes
            grads = torch.autograd.grad(scores, leaves, torch.ones_like(scores))
        assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, leaves, strict=True))


@at_places
def test_fully_masked_inputs_have_zero_gradients(place):
    """A query without kept tokens scores 0, an empty document -inf, and neither has a gradient."""
    Q, D = torch.randn(3, 4, 16, device=place.device), torch.randn(4, 18, 16, device=place.device)
    q_mask = torch.ones(3, 4, dtype=torch.bool, device=place.device)
    d_mask = torch.ones(4, 18, dtype=torch.bool, device=place.device)
    q_mask[1], d_mask[2] = False, False
    Q[1], D[2] = torch.nan, torch.nan
    weight = torch.ones(3, 4, device=place.device)
    weight[1] = torch.nan
    leaves = [t.requires_grad_() for t in (Q, D, weight)]
    with place.use():
        scores = lik_ops.maxsim_soft(Q, D, 0.5, q_mask, d_mask, q_weight=weight)
        upstream = torch.ones_like(scores)
        upstream[:, 2] = torch.nan
        grads = torch.autograd.grad(scores, leaves, upstream)
    assert torch.equal(scores[1], torch.zeros(4, device=place.device))
    assert bool((scores[[0, 2], 2] == -torch.inf).all())
    assert all(bool(g.isfinite().all()) for g in grads)
    assert not grads[0][1].any() and not grads[1][2].any() and not grads[2][1].any()
    assert bool(grads[0][0].any()) and bool(grads[1][0].any())


def score_pair(p, x, i, j, temperature):
    """Return the score of query i and its document j, in a call of their own."""
    document = (slice(i, i + 1), slice(j, j + 1)) if p.layout == "candidates" else slice(j, j + 1)
    q_mask, q_weight = (None if t is None else t[i : i + 1] for t in (x.q_mask, x.q_weight))
    d_mask = None if x.d_mask is None else x.d_mask[document]
    one = replace(x, Q=x.Q[i : i + 1], D=x.D[document], q_mask=q_mask, d_mask=d_mask, q_weight=q_weight)
    return score(lik_ops.maxsim_soft, one, temperature, p.normalize)[0, 0]


@at_places
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_a_score_does_not_depend_on_its_batch(place, number):
    for dtype in place.some_dtypes(number):
        p = replace(PROBLEMS[number], dtype=dtype)
        if p.layout.startswith("flat"):
            continue
        x = build(p, place.device)
        with place.use():
            whole = score(lik_ops.maxsim_soft, x, 0.3, p.normalize)
            for i in range(p.Nq):
                for j in range(p.Nd):
                    assert torch.equal(score_pair(p, x, i, j, 0.3), whole[i, j]), (p, i, j)


@at_places
def test_gradients_do_not_depend_on_run_or_batch(place):
    """The gradient of a query sums over all documents and does not depend on the other queries."""
    for dtype in place.some_dtypes(1):
        x = build(replace(SMALL, Nq=5, Nd=4, Ld=20, dtype=dtype), place.device)
        upstream = torch.randn(5, 4)
        with place.use():
            _, (of_Q, of_D) = step(lik_ops.maxsim_soft, x, 0.3, False, upstream)
            _, again = step(lik_ops.maxsim_soft, x, 0.3, False, upstream)
            assert torch.equal(again[0], of_Q) and torch.equal(again[1], of_D)
            for i in range(5) if place.backend != "portable" else ():
                _, (own, _) = step(lik_ops.maxsim_soft, replace(x, Q=x.Q[i : i + 1]), 0.3, False, upstream[i : i + 1])
                assert torch.equal(own[0], of_Q[i])


@at_places
def test_single_gradients_equal_joint_gradients(place):
    x = build(replace(SMALL, weight=True, normalize=True), place.device)
    tau = torch.tensor(0.3, device=place.device)
    with place.use():
        scores, lse = torch.ops.lik.maxsim_soft_fwd(*x.leaves()[:2], None, None, x.q_weight, tau, 1.0, True, True)
        args = torch.ones_like(scores), *x.leaves()[:2], lse, None, None, x.q_weight, tau, 1.0, True
        everything = torch.ops.lik.maxsim_soft_bwd(*args, [True] * 4)
        for n, e in enumerate(everything):
            needs = [m == n for m in range(4)]
            found = torch.ops.lik.maxsim_soft_bwd(*args, needs)
            assert torch.equal(found[n], e)
            assert all(g.shape == (0,) for m, g in enumerate(found) if m != n)


def _scale_scores(size, Q, D, temperature, *_, **options):
    return lik_ops.maxsim_soft(Q, D, temperature) * size


@at_places
def test_small_gradients_of_fp16_are_not_lost(place):
    """Products run in fp16, so the other operand, often far below 1, is scaled first."""
    x = build(replace(SMALL, dtype=torch.float16, Ld=20, d=32), place.device)
    upstream = torch.randn(3, 3)
    for size in (1e-6, 1e6):
        with place.use():
            scores, lse = torch.ops.lik.maxsim_soft_fwd(x.Q, x.D, None, None, None, None, 2.0, False, True)
            args = x.Q, x.D, lse, None, None, None, None, 2.0, False, [False, False, True, False]
            w = torch.ones(3, 5, device=place.device)
            of_w = torch.ops.lik.maxsim_soft_bwd(upstream.to(scores) * size, *args[:5], w, *args[6:])[2]
            _, (of_Q, of_D) = step(partial(_scale_scores, size), x, 2.0, False, upstream)
        _, (expected_Q, expected_D) = step(reference.maxsim_soft, x.to64(), 2.0, False, upstream)
        assert bool(of_w.isfinite().all())
        for g, e in ((of_Q, expected_Q), (of_D, expected_D)):
            if size < 1:
                assert float((g.double() / size - e).abs().max()) <= 0.06 * float(e.abs().max())  # fp16 below 2^-14
            else:  # fp16 ends at 65504
                inside = (e * size).abs() < 6e4
                torch.testing.assert_close(
                    g.double()[inside] / size, e[inside], rtol=0.02, atol=0.02 * float(e.abs().max())
                )
                assert bool(g[(e * size).abs() > 7e4].isinf().all())


@at_places
@pytest.mark.parametrize("layout", ["cross", "candidates"])
@pytest.mark.parametrize(("frozen", "d"), [(False, 16), (True, 16), (False, 130)])
def test_gradients_match_with_a_tiny_workspace(place, layout, frozen, d, monkeypatch):
    """The sums use separate memory, or the memory of a gradient that is written later."""
    if place.backend == "portable":
        pytest.skip("the portable backend sums in blocks whatever the workspace")
    from lik_ops.families.soft import gpu as soft

    options = {"weight": True, "q_mask": "holes", "d_mask": "holes"}
    p = replace(SMALL, layout=layout, Nq=4, Nd=4, d=d, normalize=True, **options)
    x = build(p, place.device)
    tau = torch.tensor(0.5, device=place.device, requires_grad=True)
    upstream = torch.randn(4, 4)

    def gradients():
        if not frozen:
            return step(lik_ops.maxsim_soft, x, tau, True, upstream)[1]
        Q, w = (t.detach().requires_grad_() for t in (x.Q, x.q_weight))
        scores = lik_ops.maxsim_soft(Q, x.D, tau, x.q_mask, x.d_mask, q_weight=w, normalize=True)
        return torch.autograd.grad(torch.where(scores.isfinite(), scores, 0), (Q, w, tau), upstream.to(scores))

    with place.use():
        expected = gradients()
        monkeypatch.setattr(soft, "_MIN_SUM_BYTES", 1)
        monkeypatch.setattr(soft, "_MAX_SUM_BYTES", 1)
        monkeypatch.setattr(soft, "_MIN_PART_TOKENS", 9)
        found = gradients()
    for g, e in zip(found, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-5, atol=1e-6)


MiB = 2**20
# Numbers of queries and documents, of their tokens, and of features, and the layout of bf16 steps.
STEPS = [
    (256, 256, 32, 300, 128, False),
    (32, 32, 1024, 1024, 128, False),
    (256, 16, 32, 1024, 128, True),
    (1024, 1024, 32, 180, 128, False),
    (512, 512, 32, 300, 256, False),
]


def _count_step_bytes(Nq, K, Lq, Ld, d, candidates):
    """Return the bytes of both bf16 gradients, of the gradient of D alone, and of the soft maxima."""
    of_D = 2 * (Nq if candidates else 1) * K * Ld * d
    return 2 * Nq * Lq * d + of_D, of_D, 4 * Nq * K * Lq


@pytest.mark.parametrize("sizes", STEPS, ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_sum_workspace_is_bounded_or_reuses_a_gradient(sizes, frozen):
    """Frozen D needs a twentieth or 8 MiB. Otherwise the gradient of D has room for the sums of Q."""
    soft = pytest.importorskip("lik_ops.families.soft.gpu", reason="needs Triton")
    Nq, K, Lq, Ld, d, _ = sizes
    of_both, of_D, lse = _count_step_bytes(*sizes)
    own = of_both - frozen * of_D + lse
    unwritten = None if frozen else torch.empty(of_D // 2, dtype=torch.bfloat16, device="meta")
    room = soft.allocate_sum_workspace(Nq, 4 * Lq * d * soft._count_parts(K, Ld), own, unwritten)
    assert frozen == (room.taken is None)
    assert room.taken is not None or room.size <= max(own / 20, 8 * MiB)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", STEPS, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
def test_step_peak_memory_is_near_gradients_and_lse(sizes, normalize):
    Nq, K, Lq, Ld, d, candidates = sizes
    documents = (Nq, K) if candidates else (K,)
    Q, D = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for shape in ((Nq, Lq, d), (*documents, Ld, d))
    )
    upstream = torch.randn(Nq, K, device="cuda")

    def gradients():
        return torch.autograd.grad(lik_ops.maxsim_soft(Q, D, 0.1, normalize=normalize), (Q, D), upstream)

    gradients()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = gradients()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    of_both, _, lse = _count_step_bytes(*sizes)
    assert sum(g.nbytes for g in grads) == of_both
    sums = 8 * MiB if normalize and d > 128 else 0  # for documents whose tokens are spread over programs
    assert peak <= 1.05 * (of_both + lse) + sums + 4 * Nq * K, f"{peak / MiB:.1f} of {(of_both + lse) / MiB:.1f} MiB"


@pytest.mark.skipif(INTERPRETING, reason="of the portable backend")
def test_portable_memory_is_below_a_quarter_of_similarities():
    """On a CPU, a step needs memory for saved tensors, gradients, and blocks of a few MiB."""
    import resource

    Q = torch.randn(64, 64, 16, requires_grad=True)
    D = torch.randn(64, 256, 16, requires_grad=True)
    lik_ops.maxsim_soft(Q[:2], D[:2], 0.1).sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lik_ops.maxsim_soft(Q, D, 0.1).sum().backward()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 64 * 64 * 64 * 256 * 4 / 4  # a quarter of the similarities in fp32


@pytest.mark.skipif(not INTERPRETING, reason="of the kernels")
def test_interpreter_selects_the_triton_backend():
    """The interpreter runs the kernels, not the portable backend."""
    from lik_ops import backends

    with lik_ops.use_backend("triton"):
        assert backends.select_backend(torch.device("cpu"), torch.float32).__name__ == "lik_ops.gpu.backend"


WRONG = [
    ({"temperature": 0.0}, ValueError, "temperature: expected a finite number above 0"),
    ({"temperature": float("nan")}, ValueError, "temperature"),
    ({"temperature": float("inf")}, ValueError, "temperature"),
    ({"temperature": True}, TypeError, "temperature: expected a float or a 0-dim Tensor, got bool"),
    ({"temperature": "0.1"}, TypeError, "temperature"),
    ({"temperature": torch.ones(1)}, ValueError, "temperature: expected a float or a 0-dim Tensor, got \\[1\\]"),
    ({"temperature": torch.tensor(1.0).double()}, TypeError, "temperature: expected torch.float32"),
    ({"temperature": torch.tensor(1.0, device="meta")}, ValueError, "temperature: expected the device of Q"),
    ({"D": torch.randn(5, 3, 9)}, ValueError, "maxsim_soft: "),
    ({"q_mask": torch.ones(2, 4)}, TypeError, "q_mask"),
    ({"normalize": 1}, TypeError, "normalize"),
    ({"q_weight": torch.ones(2, 4).half()}, TypeError, "q_weight"),
]


@pytest.mark.parametrize(("given", "error", "message"), WRONG)
def test_errors_name_the_argument(given, error, message):
    arguments = {"Q": torch.randn(2, 4, 8), "D": torch.randn(5, 3, 8), "temperature": 0.1} | given
    with pytest.raises(error, match=message):
        lik_ops.maxsim_soft(**arguments)


@at_places
def test_invalid_temperature_tensor_gives_nan(place):
    x = build(SMALL, place.device)
    with place.use():
        for wrong in (0.0, -1.0, torch.nan):
            scores = lik_ops.maxsim_soft(x.Q, x.D, torch.tensor(wrong, device=place.device))
            assert bool(scores.isnan().all()), wrong


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_31_elements():
    """Test the last document beyond 2^31 elements, and its gradient."""
    Nd, Ld, d = 2**18 + 3, 64, 128
    D = torch.zeros(Nd, Ld, d, dtype=torch.bfloat16, device="cuda")
    D[-1] = torch.randn(Ld, d)
    Q = torch.randn(1, 8, d, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    last = D[-1:].clone().requires_grad_()
    D.requires_grad_()
    scores = lik_ops.maxsim_soft(Q, D, 0.5)
    alone = lik_ops.maxsim_soft(Q, last, 0.5)
    assert torch.equal(scores[:, -1:], alone)
    upstream = torch.zeros_like(scores)
    upstream[:, -1] = 1
    (of_D,) = torch.autograd.grad(scores, D, upstream)
    (of_last,) = torch.autograd.grad(alone, last, upstream[:, -1:])
    assert torch.equal(of_D[-1:], of_last)
