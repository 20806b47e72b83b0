"""Test token top-k sums against the formula: scores, gradients, and the PyTorch stack."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import lik_ops
from lik_ops import reference
from lik_ops.families.token_topk import portable as token_topk_portable

from ...support.common import Problem, build
from ...support.stack import (
    assert_autocast,
    assert_compiled_steps,
    assert_derives_no_further,
    assert_exported,
    assert_vmap_is_a_loop,
    at_devices,
    flops,
    kept_for_backward,
    losses,
)

SMALL = Problem(values="normal", Nq=3, Nd=3, Lq=5, Ld=9)
EVERYTHING = {"q_mask": "holes", "d_mask": "empty_some", "weight": True}
PROBLEMS = [
    SMALL,
    replace(SMALL, values="integer", **EVERYTHING),
    replace(SMALL, layout="candidates", normalize=True, **EVERYTHING),
    replace(SMALL, Nq=2, Nd=2, Lq=40, Ld=50, d=20, **EVERYTHING),
    replace(SMALL, Nq=2, Nd=3, Lq=3, Ld=2500, d=4, d_mask="prefix"),  # documents of several tiles
    replace(SMALL, Nq=2, Nd=2, Lq=3, Ld=1300, d=4, values="integer"),
    replace(SMALL, layout="candidates", Nq=2, Ld=33, d=130, q_mask="empty_some", d_mask="integer"),
    replace(SMALL, Nq=70, Nd=70, Lq=2, Ld=3, d=4),
    replace(SMALL, Ld=16, strides="transposed", d_mask="prefix"),
    replace(SMALL, layout="flat", normalize=True, weight=True),
    replace(SMALL, layout="flat_q", d_mask="holes", strides="expanded"),
    replace(SMALL, layout="flat_d", q_mask="holes", d=1, Ld=1),
]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 2e-5, torch.float64: 1e-12}


def score(function, x, top_k, **options):
    return function(x.Q, x.D, top_k, x.q_mask, x.d_mask, q_weight=x.q_weight, **options)


def step(function, x, top_k, upstream, **options):
    leaves = [t.detach().requires_grad_() for t in x.leaves()]
    y = replace(x, Q=leaves[0], D=leaves[1], q_weight=leaves[2] if len(leaves) > 2 else None)
    scores = score(function, y, top_k, **options)
    kept = torch.where(scores.isfinite(), scores, 0)
    return scores.detach(), torch.autograd.grad(kept, leaves, upstream.to(scores))


def close(found, expected, tolerance):
    found, expected = found.double(), expected.double()
    finite = expected.isfinite()
    assert torch.equal(found[~finite], expected[~finite])
    largest = max(1.0, float(expected[finite].abs().max())) if finite.any() else 1.0
    torch.testing.assert_close(found[finite], expected[finite], rtol=0, atol=tolerance * largest)


@at_devices
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
@pytest.mark.parametrize("top_k", [1, 3, 40])
def test_scores_and_gradients_match_reference(device, number, top_k):
    for dtype in TOLERANCE if number < 4 else (torch.float32, torch.float64):
        p = replace(PROBLEMS[number], dtype=dtype)
        x = build(p, device)
        options = {"normalize": p.normalize, "reduction": ("sum", "mean")[number % 2]}
        expected = score(reference.maxsim_token_topk, x.to64(), top_k, **options)
        upstream = torch.randn(expected.shape, device=device)
        found, grads = step(lik_ops.maxsim_token_topk, x, top_k, upstream, **options)
        close(found, expected, TOLERANCE[dtype])
        _, expected_grads = step(reference.maxsim_token_topk, x.to64(), top_k, upstream, **options)
        for g, e, leaf in zip(grads, expected_grads, x.leaves(), strict=True):
            assert g.dtype == leaf.dtype
            close(g, e, 4 * TOLERANCE[dtype])


@at_devices
def test_top_1_equals_maxsim(device):
    x = build(replace(SMALL, layout="candidates", values="integer", **EVERYTHING), device)
    upstream = torch.randn(3, 3)
    one, grads = step(lik_ops.maxsim_token_topk, x, 1, upstream)
    leaves = [t.detach().requires_grad_() for t in x.leaves()]
    scores = lik_ops.maxsim(*leaves[:2], x.q_mask, x.d_mask, q_weight=leaves[2])
    assert torch.equal(one, scores)
    kept = torch.where(scores.isfinite(), scores, 0)
    for g, e in zip(grads, torch.autograd.grad(kept, leaves, upstream.to(scores)), strict=True):
        assert torch.equal(g, e)


def test_top_k_beyond_token_count_sums_all_tokens():
    Q, D = torch.randn(3, 4, 8), torch.randn(5, 6, 8)
    found = lik_ops.maxsim_token_topk(Q, D, 1000)
    torch.testing.assert_close(found, torch.einsum("isd,jtd->ij", Q, D))
    mean = lik_ops.maxsim_token_topk(Q, D, 1000, reduction="mean")
    torch.testing.assert_close(mean, found / 6)


@pytest.mark.parametrize("count", [3, 40])
def test_extract_best_matches_stable_sort(count):
    S = torch.randint(0, 3, (4, 20, 5)).float()
    S[2, 7] = torch.nan
    expected = S.sort(dim=-2, descending=True, stable=True)
    values, indices = token_topk_portable.extract_best(S.clone(), count)
    torch.testing.assert_close(values, expected.values[:, :count], equal_nan=True, rtol=0, atol=0)
    assert torch.equal(indices, expected.indices[:, :count])


@pytest.mark.parametrize("number", [n for n, p in enumerate(PROBLEMS) if p.layout == "cross"])
def test_a_score_does_not_depend_on_its_batch(number):
    p = PROBLEMS[number]
    x = build(p, "cpu")
    whole = score(lik_ops.maxsim_token_topk, x, 3)
    i, j = p.Nq - 1, p.Nd - 1

    def one(t, at):
        return None if t is None else t[at : at + 1]

    alone = replace(x, Q=one(x.Q, i), D=one(x.D, j), q_mask=one(x.q_mask, i), d_mask=one(x.d_mask, j))
    alone.q_weight = one(x.q_weight, i)
    assert torch.equal(score(lik_ops.maxsim_token_topk, alone, 3), whole[i:, j:])


def test_infinities_and_nan():
    Q, D = torch.ones(1, 2, 4), torch.zeros(4, 6, 4)
    D[0, 3, 0], D[1, :, 0], D[2, 1, 0] = torch.inf, -torch.inf, torch.nan
    D[3, :, 0] = torch.arange(6.0)
    found = lik_ops.maxsim_token_topk(Q, D, 2)[0]
    torch.testing.assert_close(found, torch.tensor([torch.inf, -torch.inf, torch.nan, 18.0]), equal_nan=True)


@pytest.mark.parametrize("sizes", list(itertools.product((0, 2), (0, 3), (0, 4), (0, 2))), ids=str)
def test_empty_sets(sizes):
    Nq, Nd, Ld, Lq = sizes
    Q, D = torch.randn(Nq, Lq, 8, requires_grad=True), torch.randn(Nd, Ld, 8, requires_grad=True)
    scores = lik_ops.maxsim_token_topk(Q, D, 3, reduction="mean")
    torch.testing.assert_close(
        scores.double(), reference.maxsim_token_topk(Q.double(), D.double(), 3, reduction="mean")
    )
    for g, x in zip(torch.autograd.grad(scores.sum(), (Q, D)), (Q, D), strict=True):
        assert g.shape == x.shape and not g.isnan().any()


def test_single_gradients_equal_joint_gradients():
    x = build(replace(SMALL, normalize=True, **EVERYTHING), "cpu")
    upstream = torch.randn(3, 3)
    _, expected = step(lik_ops.maxsim_token_topk, x, 3, upstream, normalize=True)
    for n, e in enumerate(expected):
        leaves = [t.detach().requires_grad_(m == n) for m, t in enumerate(x.leaves())]
        y = replace(x, Q=leaves[0], D=leaves[1], q_weight=leaves[2])
        scores = score(lik_ops.maxsim_token_topk, y, 3, normalize=True)
        scores = torch.where(scores.isfinite(), scores, 0)
        assert torch.equal(torch.autograd.grad(scores, leaves[n], upstream)[0], e)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_are_rounded_once(dtype):
    """Terms of many ranks cancel, or each exceeds the range of the dtype."""
    Q = torch.randn(2, 3, 8).to(dtype).requires_grad_()
    D = torch.randn(2, 64, 8).to(dtype)
    (found,) = torch.autograd.grad(lik_ops.maxsim_token_topk(Q, D, 64).sum(), Q)
    expected = D.double().sum((0, 1)).expand(Q.shape)
    assert ((found.double() - expected).abs() <= 0.51 * torch.finfo(dtype).eps * expected.abs() + 1e-5).all()
    far = torch.tensor([[[3e4], [-3e4]]]).to(dtype)
    (found,) = torch.autograd.grad(lik_ops.maxsim_token_topk(Q[:1, :1, :1], far, 2), Q, torch.full((1, 1), 4.0))
    assert not found.any()


def test_argmax_is_saved_only_for_backward():
    Q, D = torch.randn(8, 16, 16, requires_grad=True), torch.randn(30, 100, 16, requires_grad=True)
    _, kept = kept_for_backward(lik_ops.maxsim_token_topk, Q, D, 4)
    others = [t for t in kept if not any(t.data_ptr() == x.data_ptr() for x in (Q, D))]
    assert sum(t.nbytes for t in others) == 4 * 4 * 8 * 16 * 30
    assert torch.ops.lik.maxsim_token_topk_fwd(Q, D, None, None, None, 4, False, False)[1].shape == (0,)
    with pytest.raises(ValueError, match="keep: expected True"):
        torch.ops.lik.maxsim_token_topk_fwd(Q, D, None, None, None, 4, False, False)[0].sum().backward()


def test_workspace_is_at_most_6_mib():
    """Lists for many queries and documents need no more memory than maxima."""
    for top_k, shape in ((3, (200, 32, 100, 20)), (12, (1, 32, 5000, 3)), (40, (300, 3, 300, 7))):
        Nq, Lq, Nd, Ld = shape
        Q, D = torch.randn(Nq, Lq, 4), torch.randn(Nd, Ld, 4)
        layout = token_topk_portable.make_batched_args(Q, D, None, None, None, torch.empty(Nq, Nd), None)
        sums = token_topk_portable.TokenTopkForward(layout, False, min(top_k, Ld), [])
        assert sums.values.nbytes + sums.indices.nbytes <= 6 * 2**20, (shape, sums.slab)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_steps_equal_eager(dynamic):
    def function(Q, D, d_mask):
        return lik_ops.maxsim_token_topk(Q, D, 3, None, d_mask, normalize=True, reduction="mean")

    calls = []
    for Nq, Nd, Lq, Ld in ((3, 5, 4, 6), (4, 7, 5, 9)):
        d_mask = torch.rand(Nd, Ld) < 0.7
        d_mask[:, 0] = True
        calls.append((torch.randn(Nq, Lq, 8), torch.randn(Nd, Ld, 8), d_mask))
    assert_compiled_steps(function, *calls, dynamic=dynamic)


def test_exports_as_one_operator():
    given, others = ((torch.randn(a, b, 8), torch.randn(c, e, 8)) for a, b, c, e in ((3, 4, 5, 6), (4, 9, 6, 11)))
    function = partial(lik_ops.maxsim_token_topk, top_k=3, reduction="mean")
    assert_exported(function, given, others, "maxsim_token_topk_fwd")


def test_autocast_casts_tokens_to_its_dtype():
    assert_autocast(partial(lik_ops.maxsim_token_topk, top_k=2), torch.randn(2, 3, 8), torch.randn(4, 5, 8))


def test_flops_count_the_matrix_products():
    found = flops(partial(lik_ops.maxsim_token_topk, top_k=2), torch.randn(2, 3, 8), torch.randn(4, 5, 8))
    assert found == (2 * 2 * 3 * 4 * 5 * 8, 2 * 2 * (2 * 2 * 3 * 4 * 8))


def test_torch_func_raises_and_vmap_matches_a_loop():
    Q, D = torch.randn(3, 4, 8), torch.randn(5, 6, 8)
    function = partial(lik_ops.maxsim_token_topk, top_k=3)
    assert_derives_no_further(lambda q: function(q, D), Q, "maxsim_token_topk")
    assert_vmap_is_a_loop(function, (torch.stack([Q, Q + 1]), D), (0, None))


def test_huge_top_k_equals_the_token_count():
    Q, D = torch.randn(3, 4, 8, requires_grad=True), torch.randn(5, 6, 8)
    for reduction in ("sum", "mean"):
        found, expected = (lik_ops.maxsim_token_topk(Q, D, k, reduction=reduction) for k in (2**40, 6))
        assert torch.equal(found, expected)
        assert torch.equal(*(torch.autograd.grad(x.sum(), Q)[0] for x in (found, expected)))
    assert not lik_ops.maxsim_token_topk(Q, D[:, :0], 2**40).isnan().any()


def test_training_losses_match_reference():
    torch.manual_seed(0)
    tokens, documents = torch.randn(6, 5, 16, dtype=torch.float64), torch.randn(6, 9, 16, dtype=torch.float64)

    def train(function):
        weight = torch.eye(16, dtype=torch.float64, requires_grad=True)

        def loss():
            return F.cross_entropy(function(tokens @ weight, documents @ weight, 3, normalize=True), torch.arange(6))

        return losses(loss, [weight], lr=0.1, steps=60)

    found, expected = train(lik_ops.maxsim_token_topk), train(reference.maxsim_token_topk)
    assert found[-1] < found[0] / 2
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "top_k: expected 1 or more"),
        ({"top_k": 2.0}, TypeError, "top_k"),
        ({"reduction": "max"}, ValueError, "reduction: expected one of sum, mean"),
        ({"normalize": 1}, TypeError, "normalize"),
        ({"D": torch.randn(3, 6, 9)}, ValueError, "D: expected"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        lik_ops.maxsim_token_topk(**{"Q": torch.randn(2, 4, 8), "D": torch.randn(3, 6, 8), "top_k": 3} | change)
