"""Test XTR scores and gradients against the formula and the hosts, in blocks of any size."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import lik_ops
from lik_ops.families.xtr import portable as xtr_portable

from ...support.stack import (
    DEVICES,
    assert_autocast,
    assert_compiled_steps,
    assert_derives_no_further,
    assert_exported,
    assert_vmap_is_a_loop,
    kept_for_backward,
    losses,
)


def draw_inputs(device="cpu", dtype=torch.float32, ties=False, options=True, shape=(3, 5, 4, 6, 8)):
    Nq, Nd, Lq, Ld, d = shape
    g = torch.Generator().manual_seed(0)

    def values(*size):
        found = torch.randint(-2, 3, size, generator=g).float() if ties else torch.randn(size, generator=g)
        return found.to(device, dtype).requires_grad_()

    Q, D = values(Nq, Lq, d), values(Nd, Ld, d)
    if not options:
        return Q, D, None, None, None
    q_mask, d_mask = (torch.rand(n, generator=g) < 0.7 for n in ((Nq, Lq), (Nd, Ld)))
    d_mask[1], q_mask[2] = False, False
    weight = torch.rand(Nq, Lq, generator=g).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return Q, D, q_mask.to(device), d_mask.to(device), weight.to(device).requires_grad_()


def compute_scores(function, x, top_k, normalizer):
    Q, D, q_mask, d_mask, weight = x
    return function(Q, D, top_k, q_mask, d_mask, q_weight=weight, normalizer=normalizer)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("normalizer", ["retrieved", "positive"])
@pytest.mark.parametrize("top_k", [1, 7, 1000])
@pytest.mark.parametrize(("ties", "options"), [(False, True), (True, True), (False, False)])
def test_scores_and_gradients_match_reference(device, normalizer, top_k, ties, options):
    x = draw_inputs(device, torch.float64, ties, options)
    expected = compute_scores(lik_ops.reference.maxsim_xtr, x, top_k, normalizer)
    actual = compute_scores(lik_ops.maxsim_xtr, x, top_k, normalizer)
    torch.testing.assert_close(actual, expected)
    if ties:
        return  # the formula shares a gradient among equal maxima
    upstream = torch.randn(expected.shape, dtype=expected.dtype).to(device)
    leaves = [t for t in (*x[:2], x[4]) if t is not None]
    pairs = zip(*(torch.autograd.grad(s, leaves, upstream) for s in (actual, expected)), strict=True)
    for found, right in pairs:
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("Lq", "Ld", "d"), [(1, 7, 64), (2, 30, 8), (4, 180, 128), (32, 20, 100)])
def test_scores_do_not_depend_on_other_queries(device, Lq, Ld, d):
    """Scores are equal bit for bit, although BLAS selects a kernel by the number of rows."""
    Q, D, *_ = draw_inputs(device, options=False, shape=(20, 9, Lq, Ld, d))
    for normalizer in ("retrieved", "positive"):
        scores = lik_ops.maxsim_xtr(Q, D, 4, normalizer=normalizer)
        for some in (slice(1), slice(2), slice(7), slice(1, 4), slice(3, 20)):
            assert torch.equal(lik_ops.maxsim_xtr(Q[some], D, 4, normalizer=normalizer), scores[some])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scores_match_fp64_reference_in_every_dtype(device, dtype):
    x = draw_inputs(device, dtype, options=True, shape=(4, 6, 8, 30, 64))
    exact = [None if t is None else t.double() if t.is_floating_point() else t for t in x]
    expected = compute_scores(lik_ops.reference.maxsim_xtr, exact, 20, "retrieved")
    actual = compute_scores(lik_ops.maxsim_xtr, x, 20, "retrieved")
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(actual.nan_to_num(neginf=0).sum(), x[:2])
    assert [g.dtype for g in grads] == [dtype, dtype]


@pytest.mark.parametrize("normalizer", ["retrieved", "positive"])
def test_block_size_does_not_change_scores(normalizer, monkeypatch):
    x = draw_inputs(dtype=torch.float64)
    whole = compute_scores(lik_ops.maxsim_xtr, x, 7, normalizer)
    for size in (1, 300, 2000):
        monkeypatch.setattr(xtr_portable, "_MAX_BLOCK_BYTES", size)
        torch.testing.assert_close(compute_scores(lik_ops.maxsim_xtr, x, 7, normalizer), whole)


def test_masked_token_values_are_ignored():
    x = draw_inputs()
    clean = compute_scores(lik_ops.maxsim_xtr, x, 7, "retrieved")
    Q, D, q_mask, d_mask, weight = [None if t is None else t.detach().clone() for t in x]
    Q[~q_mask], D[~d_mask], weight[~q_mask] = float("nan"), float("nan"), float("inf")
    leaves = [t.requires_grad_() for t in (Q, D, weight)]
    scores = compute_scores(lik_ops.maxsim_xtr, (Q, D, q_mask, d_mask, weight), 7, "retrieved")
    assert torch.equal(scores, clean)
    for g in torch.autograd.grad(scores[:2, [0, 2, 3, 4]].sum(), leaves):
        assert g.isfinite().all()


def test_nan_affects_only_its_document():
    Q, D, *_ = (t.detach() if t is not None else None for t in draw_inputs(options=False))
    d_mask = torch.ones(D.shape[:2], dtype=torch.bool)
    d_mask[2, 3] = False
    expected = lik_ops.maxsim_xtr(Q, D, 8, None, d_mask)
    D[2, 3] = float("nan")
    scores = lik_ops.maxsim_xtr(Q, D, 9)  # the NaN uses one of the top-k places
    assert scores[:, 2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(scores[:, others], expected[:, others])


@pytest.mark.parametrize("normalizer", ["retrieved", "positive"])
def test_nan_document_matches_reference(normalizer):
    Q, D = torch.randn(2, 3, 4), torch.randn(3, 5, 4)
    D[1, 2, 0] = torch.nan
    for top_k in (1, 6, 15):
        found = lik_ops.maxsim_xtr(Q, D, top_k, normalizer=normalizer)
        expected = lik_ops.reference.maxsim_xtr(Q, D, top_k, normalizer=normalizer)
        assert expected[:, 1].isnan().all()
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_nan_fills_top_1_and_other_documents_score_zero():
    D = torch.tensor([[[torch.nan]], [[torch.inf]], [[2.0]]])
    for function in (lik_ops.maxsim_xtr, lik_ops.reference.maxsim_xtr):
        found = function(torch.ones(1, 1, 1), D, 1)
        torch.testing.assert_close(found, torch.tensor([[torch.nan, 0, 0]]), equal_nan=True)


def test_large_top_k_equals_mean_maxsim():
    Q, D, *_ = draw_inputs(options=False)
    torch.testing.assert_close(lik_ops.maxsim_xtr(Q, D, 10**6), lik_ops.maxsim(Q, D) / Q.shape[1])
    assert lik_ops.maxsim_xtr(Q[0], D[0], 3).shape == ()
    assert lik_ops.maxsim_xtr(Q[0], D, 3).shape == (5,)
    assert lik_ops.maxsim_xtr(Q, D[0], 3).shape == (3,)


@pytest.mark.parametrize("sizes", list(itertools.product((0, 2), (0, 3), (0, 4))), ids=str)
def test_empty_sets(sizes):
    Nq, Nd, Ld = sizes
    Q, D = torch.randn(Nq, 2, 8, requires_grad=True), torch.randn(Nd, Ld, 8, requires_grad=True)
    scores = lik_ops.maxsim_xtr(Q, D, 3)
    assert scores.shape == (Nq, Nd)
    if Ld == 0:
        assert (scores == -torch.inf).all()
    for g, x in zip(torch.autograd.grad(scores.sum(), (Q, D)), (Q, D), strict=True):
        assert g.shape == x.shape and not g.isnan().any()


def test_step_saves_under_a_tenth_of_similarities():
    """In addition to gradients, a step keeps argmax values and blocks, here a tenth of the similarities."""
    Q, D = torch.randn(8, 64, 16, requires_grad=True), torch.randn(300, 100, 16, requires_grad=True)
    scores, kept = kept_for_backward(lik_ops.maxsim_xtr, Q, D, 256)
    assert sum(x.nbytes for x in kept) < 4 * 8 * 64 * 300 * 100 / 10
    F.cross_entropy(scores, torch.arange(8)).backward()
    assert Q.grad.isfinite().all() and D.grad.isfinite().all()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_steps_equal_eager(dynamic):
    calls = [draw_inputs(shape=shape) for shape in ((3, 5, 4, 6, 8), (4, 7, 5, 9, 8))]

    def function(*x):
        return compute_scores(lik_ops.maxsim_xtr, x, 7, "retrieved")

    assert_compiled_steps(function, *calls, dynamic=dynamic, backend="inductor")


def test_exports_as_one_operator():
    given, others = draw_inputs(options=False)[:2], (torch.randn(4, 9, 8), torch.randn(6, 11, 8))
    assert_exported(partial(lik_ops.maxsim_xtr, top_k=7), [t.detach() for t in given], others, "maxsim_xtr_fwd")


def test_autocast_casts_tokens_to_its_dtype():
    assert_autocast(partial(lik_ops.maxsim_xtr, top_k=7), *(t.detach() for t in draw_inputs(options=False)[:2]))


def test_training_losses_match_reference():
    torch.manual_seed(0)
    tokens, documents = torch.randn(6, 5, 16, dtype=torch.float64), torch.randn(6, 9, 16, dtype=torch.float64)

    def train(function):
        weight = torch.eye(16, dtype=torch.float64, requires_grad=True)

        def loss():
            scores = function(F.normalize(tokens @ weight, dim=-1), F.normalize(documents @ weight, dim=-1), 12)
            return F.cross_entropy(scores * 10, torch.arange(6))

        return losses(loss, [weight], lr=0.1, steps=60)

    found, expected = train(lik_ops.maxsim_xtr), train(lik_ops.reference.maxsim_xtr)
    assert found[-1] < found[0] / 2
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "top_k: expected 1 or more"),
        ({"top_k": 2.0}, TypeError, "top_k"),
        ({"normalizer": "all"}, ValueError, "normalizer"),
        ({"D": torch.randn(3, 2, 6, 8)}, ValueError, "D: expected"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    Q, D, *_ = draw_inputs(options=False)
    given = {"Q": Q, "D": D, "top_k": 3, **change}
    with pytest.raises(error, match=message):
        lik_ops.maxsim_xtr(**given)


def test_torch_func_raises_and_vmap_matches_a_loop():
    Q, D = (t.detach() for t in draw_inputs(options=False)[:2])
    function = partial(lik_ops.maxsim_xtr, top_k=3)
    assert_derives_no_further(lambda q: function(q, D), Q, "maxsim_xtr")
    assert_vmap_is_a_loop(function, (torch.stack([Q, Q + 1]), D), (0, None))


def test_queries_without_tokens_score_zero():
    Q, D = torch.randn(3, 0, 8), torch.randn(4, 5, 8)
    for normalizer in ("retrieved", "positive"):
        assert torch.equal(lik_ops.maxsim_xtr(Q, D, 2, normalizer=normalizer), torch.zeros(3, 4))
