"""Test soft MaxSim of long documents, which the kernels score in splits: formula, bits, masks, infinities."""

import math
from dataclasses import replace

import pytest
import torch

import lik_ops
from lik_ops import reference
from lik_ops.core.arguments import score_dtype
from lik_ops.ops.fast_path import eager

from ...support.common import CUDA, INTERPRETER, INTERPRETING, Problem, assert_near, build, thin_out
from .test_soft import EVERYTHING, score, score_pair, step

pytest.importorskip("triton", reason="splits are made by Triton kernels")
# The portable backend scores fp64, without splits.
KERNELS = replace(CUDA, dtypes=(torch.bfloat16, torch.float16, torch.float32))
PLACES = [INTERPRETER] if INTERPRETING else [pytest.param(KERNELS, marks=pytest.mark.gpu)]
at_places = pytest.mark.parametrize("place", PLACES, ids=str)
LONG = Problem(values="normal", Nq=3, Nd=3, Lq=5, Ld=75)
PROBLEMS = [
    LONG,
    replace(LONG, layout="candidates", normalize=True, **EVERYTHING),
    replace(LONG, Nq=2, Nd=2, Lq=40, Ld=64, d=20, **EVERYTHING),
    replace(LONG, layout="candidates", Nq=2, Ld=81, d=130, q_mask="empty_some", d_mask="integer"),
    replace(LONG, Nq=2, Nd=2, Lq=150, d=130, normalize=True, strides="sliced", weight=True),
    replace(LONG, strides="transposed", d_mask="prefix"),
    replace(LONG, layout="flat_q", d_mask="holes", strides="expanded"),
]


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    """Split documents of 40 tokens or more. No split has as many tokens as a tile of a GPU."""
    from lik_ops.families.soft import configs

    monkeypatch.setattr(configs, "_MIN_SPLIT_DOCUMENT_TOKENS", 40)
    monkeypatch.setattr(configs, "_SPLIT_TOKENS", 32)
    eager.clear_call_caches()
    yield
    eager.clear_call_caches()


@at_places
@pytest.mark.parametrize("number", thin_out(range(len(PROBLEMS)), 2))
def test_scores_and_gradients_match_reference(place, number):
    for dtype in place.some_dtypes(number):
        p = replace(PROBLEMS[number], dtype=dtype)
        x = build(p, place.device)
        upstream = torch.randn(score(reference.maxsim_soft, x.to64(), 0.7, p.normalize).shape, device=place.device)
        with place.use():
            scores, grads = step(lik_ops.maxsim_soft, x, 0.7, p.normalize, upstream)
            assert torch.equal(score(lik_ops.maxsim_soft, x, 0.7, p.normalize), scores)
        expected, expected_grads = step(reference.maxsim_soft, x.to64(), 0.7, p.normalize, upstream)
        assert_near(scores, expected, score_dtype(dtype))
        for g, e in zip(grads, expected_grads, strict=True):
            assert_near(g, e, dtype if g.dtype == dtype else score_dtype(dtype))


@at_places
@pytest.mark.parametrize("number", thin_out(range(len(PROBLEMS)), 3))
def test_a_score_does_not_depend_on_its_batch_or_on_the_workspace(place, number, monkeypatch):
    from lik_ops.families.soft import gpu

    for dtype in place.some_dtypes(number):
        p = replace(PROBLEMS[number], dtype=dtype)
        if p.layout.startswith("flat"):
            continue
        x = build(p, place.device)
        with place.use():
            whole = score(lik_ops.maxsim_soft, x, 0.3, p.normalize)
            with monkeypatch.context() as patch:
                patch.setattr(gpu, "_MAX_SPLIT_BYTES", 1)
                eager.clear_call_caches()
                assert torch.equal(score(lik_ops.maxsim_soft, x, 0.3, p.normalize), whole)
            for i, j in ((0, 0), (p.Nq - 1, p.Nd - 1)):
                assert torch.equal(score_pair(p, x, i, j, 0.3), whole[i, j]), (p, i, j)


@at_places
def test_candidate_scores_equal_cross_product_scores(place):
    for dtype in place.some_dtypes(0):
        x = build(replace(LONG, dtype=dtype), place.device)
        with place.use():
            cross = lik_ops.maxsim_soft(x.Q, x.D, 0.3)
            assert torch.equal(lik_ops.maxsim_soft(x.Q, x.D.expand(3, *x.D.shape), 0.3), cross)


@at_places
def test_infinities_and_nan(place):
    """Special values in one split, also in every split, give the scores of a whole document."""
    Q, D = torch.ones(1, 2, 16, device=place.device), torch.zeros(6, 100, 16, device=place.device)
    D[0, 97, 0] = torch.inf
    D[1, 3, 0] = -torch.inf
    D[2, :, 0] = -torch.inf
    D[3, 40, 0] = torch.nan
    D[5, 32:64, 0] = -torch.inf
    with place.use():
        scores = lik_ops.maxsim_soft(Q, D, 0.5)[0].cpu()
    finite = (math.log(n) for n in (99, 100, 68))
    expected = torch.tensor([torch.inf, next(finite), -torch.inf, torch.nan, next(finite), next(finite)])
    torch.testing.assert_close(scores, expected, equal_nan=True)


@at_places
def test_empty_documents_score_minus_inf_with_any_weight(place):
    """A weight of 0 or below 0 must not turn the -inf of an empty document into NaN or inf."""
    Q, D = torch.randn(3, 4, 16, device=place.device), torch.randn(3, 90, 16, device=place.device)
    q_mask, d_mask = torch.ones(3, 4).bool().to(place.device), torch.ones(3, 90).bool().to(place.device)
    q_mask[1], d_mask[1], d_mask[2, :64] = False, False, False
    Q[1], D[1], D[2, :64] = torch.nan, torch.nan, torch.nan
    weight = torch.tensor([0.0, -1.0, 1.0, 2.0], device=place.device).expand(3, 4)
    with place.use():
        scores = lik_ops.maxsim_soft(Q, D, 0.5, q_mask, d_mask, q_weight=weight)
        last = lik_ops.maxsim_soft(Q, D[2:, 64:], 0.5, q_mask, q_weight=weight)
    assert torch.equal(scores[1], torch.zeros(3, device=place.device))
    assert bool((scores[[0, 2], 1] == -torch.inf).all())
    torch.testing.assert_close(scores[:, 2:], last)


@at_places
@pytest.mark.parametrize("size", [1e-18, 1e18])
def test_huge_and_tiny_similarities_match_reference(place, size):
    x = build(LONG, place.device)
    x.D = x.D * size
    for tau in (1e-3, 1.0, 1e3):
        with place.use():
            found = lik_ops.maxsim_soft(x.Q, x.D, tau)
        expected = reference.maxsim_soft(x.Q.double(), x.D.double(), tau)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def test_documents_of_4096_tokens_or_more_are_split(monkeypatch):
    monkeypatch.undo()
    from lik_ops.families.soft import configs

    assert [configs.choose_split_tokens(n) for n in (0, 1024, 4095, 4096, 10**6)] == [None, None, None, 1024, 1024]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(1, 1, 32, 65537), (3, 5, 20, 4096), (2, 2, 300, 9001)], ids=str)
def test_long_documents_match_reference(monkeypatch, sizes, dtype):
    """Splits of the length that users get: scores and gradients of the formula, and the bits of single documents."""
    monkeypatch.undo()
    Nq, Nd, Lq, Ld = sizes
    p = replace(LONG, Nq=Nq, Nd=Nd, Lq=Lq, Ld=Ld, d=128, dtype=dtype, d_mask="holes", weight=True)
    x = build(p, "cuda")
    x.Q, x.D = (torch.nn.functional.normalize(t.float(), dim=-1).to(dtype) for t in (x.Q, x.D))
    upstream = torch.randn(Nq, Nd, device="cuda")
    scores, grads = step(lik_ops.maxsim_soft, x, 0.1, False, upstream)
    expected, expected_grads = step(reference.maxsim_soft, x.to64(), 0.1, False, upstream)
    assert_near(scores, expected, torch.float32)
    for g, e in zip(grads, expected_grads, strict=True):
        assert_near(g, e, dtype if g.dtype == dtype else torch.float32)
    one = replace(x, Q=x.Q[-1:], D=x.D[-1:], d_mask=x.d_mask[-1:], q_weight=x.q_weight[-1:])
    assert torch.equal(score(lik_ops.maxsim_soft, one, 0.1, False)[0, 0], scores[-1, -1])


@at_places
def test_long_document_launches_a_program_per_split(place):
    """The launches of a long document: its splits, then their merge."""
    from lik_ops.core.segments import DenseArgs
    from lik_ops.families.soft.gpu import _run_forward
    from lik_ops.gpu.runtime.launcher import collect_launches

    x = build(replace(LONG, Nq=1, Nd=1), place.device)
    with collect_launches() as whole:
        _run_forward(DenseArgs(x.Q, x.D[:, :39], None, None, None), 0.5, False, True)
    with collect_launches() as launches:
        _run_forward(DenseArgs(x.Q, x.D, None, None, None), 0.5, False, True)
    (one,), (splits, merge) = whole, launches
    assert one[1] == (1,) and splits[1] == (3,) and merge[1] == (1,)
