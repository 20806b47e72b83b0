"""Test gradients against fp64 formulas at the operator's own argmax, and with gradcheck in fp64."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lik_ops

from ..api.test_semantics import LAYOUTS, LONG, problems
from ..support.common import (
    INTERPRETING,
    PLACES,
    Inputs,
    Problem,
    assert_gradients,
    assert_winners,
    build,
    expected_gradients,
    run,
    score,
)

BACKWARDS = ("lowmem", "unified", "auto") if not INTERPRETING else ("lowmem", "unified")


def _gradients(p, x, upstream, **options):
    leaves = [t.requires_grad_() for t in x.leaves()]
    scores = score(p, x, **options)
    return scores, torch.autograd.grad(scores, leaves, upstream)


@pytest.mark.parametrize("place", PLACES, ids=str)
@given(problem=problems, data=st.data())
def test_gradients_match_the_formulas_at_the_argmax(place, problem, data):
    dtype = data.draw(st.sampled_from(place.dtypes))
    backward = data.draw(st.sampled_from(BACKWARDS))
    recompute = data.draw(st.booleans())
    p = Problem(**{**problem.__dict__, "dtype": dtype})
    x = build(p, place.device)
    with place.use():
        scores, argmax = run(p, x)
        upstream = torch.randn_like(scores)
        upstream = torch.where(scores == -math.inf, math.nan, upstream)  # no gradient flows from an empty document
        _, actual = _gradients(p, x, upstream, backward=backward, recompute=recompute)
    expected = expected_gradients(p, x, argmax, torch.where(upstream.isnan(), 0, upstream))
    assert_gradients(p, x, list(actual), expected)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize(("Lq", "d"), [(150, 24), (5, 300)] if not INTERPRETING else [(40, 24), (3, 140)])
def test_long_queries_and_wide_features(place, backward, Lq, d):
    for n, layout in enumerate(("cross", "candidates")):
        for dtype in place.some_dtypes(n ^ (backward == "lowmem")):
            p = Problem(layout, 2, 3, Lq, LONG, d, dtype, "holes", "holes", True, True, "normal")
            x = build(p, place.device)
            with place.use():
                scores, argmax = run(p, x)
                upstream = torch.randn_like(scores)
                _, actual = _gradients(p, x, upstream, backward=backward)
            assert_gradients(p, x, list(actual), expected_gradients(p, x, argmax, upstream))


SCALES = (1e-9, 1e-4, 1.0, 1e5) if not INTERPRETING else (1e-9, 1e5)
OPTIONS = {
    "plain": {},
    "weight": {"weight": True},
    "masks": {"q_mask": "holes", "d_mask": "holes"},
    "normalize": {"normalize": True},
    "everything": {"q_mask": "holes", "d_mask": "prefix", "weight": True, "normalize": True},
}


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("backward", ["lowmem", "unified"])
@pytest.mark.parametrize("layout", LAYOUTS if not INTERPRETING else ("cross", "candidates"))
@pytest.mark.parametrize("options", OPTIONS if not INTERPRETING else ("everything",))
def test_gradients_are_accurate_at_every_scale(place, backward, layout, options):
    """Compare with fp64 formulas at the operator's argmax, which is correct up to rounding."""
    for dtype in place.dtypes:
        sizes = (4, 3, 17, LONG, 32) if not INTERPRETING else (2, 2, 5, 18, 16)
        p = Problem(layout, *sizes, dtype, values="normal", **OPTIONS[options])
        x = build(p, place.device)
        if x.d_mask is not None:
            x.d_mask[..., 0] = True  # no gradient flows from an empty document
            x.D = torch.where((x.d_mask != 0)[..., None] & ~torch.isfinite(x.D), 1, x.D)
        with place.use():
            scores, argmax = run(p, x)
        assert_winners(p, x, argmax)
        direction = torch.randn_like(scores)
        for scale, recompute in [(scale, False) for scale in SCALES] + [(1.0, True)]:
            if dtype == torch.float16 and scale != 1.0:
                continue  # the range of its gradients is too small
            upstream = direction * scale
            with place.use():
                _, actual = _gradients(p, x, upstream, backward=backward, recompute=recompute)
            for leaf, a, e in zip(x.leaves(), actual, expected_gradients(p, x, argmax, upstream), strict=True):
                error, rounded = (float((g.double() - e.value).norm() / e.value.norm()) for g in (a, e.value.to(a)))
                # Compared with fp32 sums, half precision only adds one rounding to the dtype, 1.7e-3 for bf16.
                bound = (
                    1e-14 if leaf.dtype == torch.float64 else 1e-6 if leaf.dtype == torch.float32 else rounded + 1e-5
                )
                assert error < bound, f"{p}, recompute {recompute}, at {scale}: {error}, rounded {rounded}"


def _mark_argmax(argmax, Ld):
    """Return which tokens of two documents are the argmax of token 2 of query 1."""
    found = torch.zeros(2, Ld, dtype=torch.bool)
    for j in range(2):
        found[j, argmax[1, j, 2]] = True
    return found


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("backward", ["lowmem", "unified"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_tokens_affect_only_their_argmax_gradients(place, backward, value):
    """A NaN or inf in a kept query token reaches only the gradients of its argmax tokens."""
    Q, D = torch.randn(2, 3, 8, device=place.device), torch.randn(2, 6, 8, device=place.device)
    Q[1, 2, 4] = value
    D.requires_grad_()
    with place.use():
        _, argmax = lik_ops.maxsim_with_argmax(Q, D)
        (grad,) = torch.autograd.grad(lik_ops.maxsim(Q, D, backward=backward).sum(), D)
    assert torch.equal((~torch.isfinite(grad)).any(-1).cpu(), _mark_argmax(argmax, 6))


def _patch_constants(monkeypatch, **constants):
    """Set module constants so that small problems use the code paths of large ones."""
    pytest.importorskip("triton", reason="the constants belong to Triton launches")
    from lik_ops.gpu.backward import dense, documents
    from lik_ops.gpu.tuning import backward_configs

    modules = dense, documents, backward_configs
    for name, value in constants.items():
        (module,) = (module for module in modules if hasattr(module, name))
        monkeypatch.setattr(module, name, value)


# How argmax values reach the document gradient: kept by one program, read by tiles, read by large tiles that sum only
# tokens with an argmax, listed, listed in parts and summed in pieces, listed by larger tiles, or listed by a sort.
WAYS = {
    "few": {},
    "unlisted": {"MAX_SPARSE_ROWS": 0, "_MIN_TOKENS_PER_ROW": 10**9, "MIN_LISTED_BYTES": 10**18},
    "hit tokens": {"MAX_SPARSE_ROWS": 0, "_MIN_TOKENS_PER_ROW": 0},
    "lists": {"MAX_SPARSE_ROWS": 0, "MIN_BUCKETED_ROWS": 0},
    "pieces": {"MAX_SPARSE_ROWS": 0, "MIN_BUCKETED_ROWS": 0, "_MAX_BUCKET_BYTES": 200, "_MIN_SPLIT_ROWS": 8},
    "long": {"MAX_SPARSE_ROWS": 0, "MIN_BUCKETED_ROWS": 0, "MIN_LONG_DOCUMENT_TOKENS": 0, "_MIN_SPLIT_ROWS": 8},
    "sorted": {
        "MAX_SPARSE_ROWS": 0,
        "MIN_BUCKETED_ROWS": 0,
        "_MIN_SORTED_TILES": 0,
        "_MIN_SORTED_ROWS": 0,
        "_SORT_BYTES_PER_ROW": 0,
    },
}


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["cross", "candidates"])
@pytest.mark.parametrize("skew", ["ties", "one"])
def test_document_gradients_match_formulas_on_every_path(place, way, layout, skew, monkeypatch):
    """Few tokens, or a single token, are the argmax of all rows, with masks, weights, and norms."""
    _patch_constants(monkeypatch, **WAYS[way])
    for dtype in place.some_dtypes((skew == "one") ^ (layout == "cross")):
        for normalize in (False, True) if not INTERPRETING else (dtype == torch.float16,):
            p = Problem(layout, 2, 2, 18, 20, 17, dtype, "holes", "holes", True, normalize)
            p = Problem(**{**p.__dict__, "values": "normal" if skew == "one" or normalize else "integer"})
            x = build(p, place.device)
            if skew == "one":
                x.d_mask[...] = False
                x.d_mask[..., 17] = True
                x.D = torch.where(x.d_mask[..., None], torch.ones_like(x.D), x.D)
            with place.use():
                scores, argmax = run(p, x)
                upstream = torch.randn_like(scores)
                _, actual = _gradients(p, x, upstream, backward="lowmem")
            assert_gradients(p, x, list(actual), expected_gradients(p, x, argmax, upstream))


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("layout", ["cross", "candidates"])
def test_sorted_and_counted_lists_give_the_same_bits(place, layout, monkeypatch):
    """Some tokens are the argmax of no row or of all rows, some rows have none, and tiles and blocks are several."""
    _patch_constants(monkeypatch, MAX_SPARSE_ROWS=0, MIN_BUCKETED_ROWS=0, _SORT_BYTES_PER_ROW=0, _MAX_BUCKET_BYTES=200)
    p = Problem(layout, 3, 2, 70, 150, 17, torch.float32, "holes", "holes", True, False)
    x = build(p, place.device)
    with place.use():
        scores, _ = run(p, x)
        upstream = torch.randn_like(scores)
        found = []
        for least in (0, 10**9):
            _patch_constants(monkeypatch, _MIN_SORTED_TILES=least, _MIN_SORTED_ROWS=0)
            found.append(_gradients(p, x, upstream, backward="lowmem")[1])
    for ours, counted in zip(*found, strict=True):
        assert torch.equal(ours, counted)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_rows_on_every_gradient_path(place, way, value, monkeypatch):
    _patch_constants(monkeypatch, **WAYS[way])
    for dtype in place.dtypes:
        Q, D = (torch.randn(n, L, 8, device=place.device).to(dtype) for n, L in ((4, 10), (2, 20)))
        Q[1, 2, 4] = value
        D.requires_grad_()
        with place.use():
            _, argmax = lik_ops.maxsim_with_argmax(Q, D)
            (grad,) = torch.autograd.grad(lik_ops.maxsim(Q, D, backward="lowmem").sum(), D)
        spoilt = _mark_argmax(argmax, 20)
        assert torch.equal((~torch.isfinite(grad)).any(-1).cpu(), spoilt)
        others = Q.detach().clone()
        others[1, 2] = 0
        expected = torch.zeros(2, 20, 8, dtype=torch.float64)
        for j in range(2):
            expected[j].index_add_(0, argmax[:, j].flatten().cpu(), others.flatten(0, 1).double().cpu())
        error = (grad.double().cpu() - expected)[~spoilt].abs().max()
        assert float(error) <= {torch.float16: 2e-2, torch.bfloat16: 1e-1}.get(dtype, 1e-5)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_overflow_reaches_only_its_argmax_on_every_gradient_path(place, way, monkeypatch):
    """A finite token times a finite upstream gradient may leave the range of fp32. Other tokens keep their sums."""
    _patch_constants(monkeypatch, **WAYS[way])
    for dtype in set(place.dtypes) - {torch.float16}:
        Q, D = (torch.randn(n, L, 8, device=place.device).to(dtype) for n, L in ((4, 10), (2, 20)))
        Q[1, 2, 4] = large = 2.0**640 if dtype == torch.float64 else 2.0**100
        D.requires_grad_()
        with place.use():
            _, argmax = lik_ops.maxsim_with_argmax(Q, D)
            scores = lik_ops.maxsim(Q, D, backward="lowmem")
            upstream = torch.ones_like(scores)
            upstream[1] = large
            (grad,) = torch.autograd.grad(scores, D, upstream)
        assert torch.equal((~torch.isfinite(grad)).any(-1).cpu(), _mark_argmax(argmax, 20)), dtype


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize(
    ("way", "scale"),
    [*itertools.product(WAYS, (1e-6, 65536.0))] if not INTERPRETING else [("few", 65536.0), ("lists", 1e-6)],
)
def test_half_gradients_are_the_fp32_sums_rounded_once(place, way, scale, monkeypatch):
    """Upstream gradients are as small as in a mean over a large batch, and as large as with GradScaler."""
    _patch_constants(monkeypatch, **WAYS[way])
    for dtype in set(place.dtypes) & {torch.float16, torch.bfloat16}:
        p = Problem(Nq=4, Nd=3, Lq=17, Ld=LONG, d=32, dtype=dtype, values="normal")
        x = build(p, place.device)
        shrink = 2.0**-12 if scale > 1 and dtype == torch.float16 else 2.0**12  # keeps the result in fp16's range
        x.Q = x.Q * shrink
        with place.use():
            scores, argmax = run(p, x)
            upstream = torch.randn_like(scores) * scale
            _, actual = _gradients(p, x, upstream, backward="lowmem")
        e = expected_gradients(p, x, argmax, upstream)[1].value
        error = float((actual[1].double() - e).norm() / e.norm())
        assert error < {torch.float16: 3e-4, torch.bfloat16: 2e-3}[dtype], f"{dtype} at {scale}: {error}"


def _keep_and_recompute(p, x, upstream, backward="lowmem"):
    """Return the gradients with a kept argmax and with one that is computed again."""
    return [_gradients(p, x, upstream, backward=backward, recompute=r)[1] for r in (False, True)]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("layout", ["cross", "candidates"])
def test_recompute_in_parts_gives_the_same_bits(place, layout, monkeypatch):
    _patch_constants(monkeypatch, _MAX_ARGMAX_BYTES=60)
    p = Problem(layout, 3, 3, 9, 17, 16, torch.float32, "holes", "holes", True, True, "normal")
    x = build(p, place.device)
    with place.use():
        upstream = torch.randn_like(score(p, x))
        kept, again = _keep_and_recompute(p, x, upstream)
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
        kept, again = _keep_and_recompute(p, x, upstream, "unified")
        for a, b in zip(kept, again, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("sizes", [("cross", 8, 6, 16), ("candidates", 6, 2, 128)], ids=lambda sizes: sizes[0])
@pytest.mark.parametrize("splits", [False, True])
def test_recompute_in_parts_sums_the_same_pieces(place, sizes, splits, monkeypatch):
    """The lists of many documents are not cut into pieces, and fp32 rows of many bytes are not split.

    A part of a call has fewer documents, and maybe fewer query rows.
    """
    layout, Nq, K, Lq = sizes
    p = Problem(layout, Nq, K, Lq, 20, 16, torch.float32, None, None, True, False, "normal")
    lists = {"MIN_BUCKETED_ROWS": 64, "_MIN_UNSPLIT_DOCUMENTS": 5, "_MIN_SPLIT_ROWS": 32}
    _patch_constants(monkeypatch, **lists, _MAX_ARGMAX_BYTES=3 * 128 * 2, _MAX_TERM_BYTES=4 * Nq * Lq * 16 - 1 + splits)
    x = build(p, place.device)
    with place.use():
        upstream = torch.randn_like(score(p, x))
        kept, again = _keep_and_recompute(p, x, upstream)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS if not INTERPRETING else ("cross",))
def test_lowmem_is_bitwise_reproducible(place, layout):
    for dtype in place.dtypes if not INTERPRETING else place.dtypes[:1]:
        p = Problem(layout, 4, 3, 20, LONG, 64, dtype, values="normal", weight=True, normalize=True)
        x = build(p, place.device)
        with place.use():
            upstream = torch.randn_like(score(p, x))
            first = _gradients(p, x, upstream, backward="lowmem")[1]
            for _ in range(1 if INTERPRETING else 19):
                again = _gradients(p, x, upstream, backward="lowmem")[1]
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.skipif(INTERPRETING, reason="the interpreter's products have numpy's bits, not the kernels'")
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("layout", ["cross", "candidates"])
@pytest.mark.parametrize("sizes", [(7, 5, 20, LONG), (70, 40, 64, 9), (5, 40, 900, 7)], ids=str)
def test_query_chunks_give_the_same_gradient_bits(place, layout, sizes):
    """Gradients of queries and of their own candidates are equal for any chunks of queries."""
    for dtype, options in itertools.product(place.dtypes, ("plain", "everything")):
        p = Problem(layout, *sizes, 64, dtype, values="normal", **OPTIONS[options])
        x = build(p, place.device)
        leaves = [t.requires_grad_() for t in x.leaves()]
        with place.use():
            upstream = torch.randn_like(score(p, x))
            _, whole = _gradients(p, x, upstream, backward="lowmem")
            for rows in (slice(0, 1), slice(1, 3), slice(3, None)):
                own = rows if layout == "candidates" else slice(None)
                cut = ((x.Q, rows), (x.D, own), (x.q_mask, rows), (x.d_mask, own), (x.q_weight, rows))
                part = Inputs(*(None if t is None else t[kept] for t, kept in cut))
                grads = torch.autograd.grad(score(p, part, backward="lowmem"), leaves, upstream[rows])
                for name, a, b in zip(("Q", "D", "q_weight"), whole, grads, strict=False):
                    if name != "D" or layout == "candidates":
                        assert torch.equal(a[rows], b[rows]), f"{p}, queries {rows}: {name}"


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_requested_gradients_are_computed(place, backward, wanted):
    p = Problem(Lq=8, Ld=12, weight=True, q_mask="holes", values="normal")
    x = build(p, place.device)
    every = [t.detach().clone().requires_grad_() for t in x.leaves()]
    some = [t.detach().clone().requires_grad_(n in wanted) for n, t in enumerate(x.leaves())]
    with place.use():
        lik_ops.maxsim(*every[:2], x.q_mask, q_weight=every[2], backward=backward).sum().backward()
        lik_ops.maxsim(*some[:2], x.q_mask, q_weight=some[2], backward=backward).sum().backward()
    for n, (a, b) in enumerate(zip(every, some, strict=True)):
        if n in wanted:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-6)
        else:
            assert b.grad is None


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_chamfer_weights_with_an_empty_cloud_have_zero_gradient(place):
    P, R = torch.randn(2, 4, 3, device=place.device), torch.randn(2, 5, 3, device=place.device)
    of_P, of_R = (torch.rand(X.shape[:2], device=place.device, requires_grad=True) for X in (P, R))
    lengths = torch.tensor([0, 3], device=place.device)
    with place.use():
        for given in ({"p_lengths": lengths}, {"r_lengths": lengths}):
            found = lik_ops.chamfer_distance(P, R, p_weight=of_P, r_weight=of_R, **given)
            assert found.isinf().tolist() == [True, False]
            grads = torch.autograd.grad(found.sum(), (of_P, of_R))
            assert all((grad[0] == 0).all() and grad[1].isfinite().all() and grad[1].any() for grad in grads)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_expanded_and_transposed_upstream_gradients(place):
    p = Problem(Nq=4, Nd=3, values="normal")
    x = build(p, place.device)
    with place.use():
        for upstream in (torch.ones(1, 1).expand(4, 3), torch.randn(3, 4).t(), torch.randn(4, 6)[:, ::2]):
            upstream = upstream.to(place.device)
            for backward in BACKWARDS:
                dense = _gradients(p, x, upstream.contiguous(), backward=backward)[1]
                strided = _gradients(p, x, upstream, backward=backward)[1]
                for a, b in zip(dense, strided, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_argmax_has_no_gradient_and_its_scores_do(place):
    p = Problem(values="normal")
    x = build(p, place.device)
    x.Q.requires_grad_()
    with place.use():
        scores, argmax = run(p, x)
        assert not argmax.requires_grad
        (with_winners,) = torch.autograd.grad(scores.sum(), x.Q)
        (alone,) = torch.autograd.grad(score(p, x).sum(), x.Q)
    assert torch.equal(with_winners, alone)


@pytest.mark.skipif(INTERPRETING, reason="the kernels have no fp64")
@pytest.mark.parametrize("layout", ["cross", "candidates", "pairs", "flat_q", "flat_d", "flat"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("backward", ["lowmem", "unified"])
def test_gradcheck(layout, normalize, backward):
    p = Problem(layout, 3, 4, 5, 7, 6, torch.float64, "holes", "holes", True, normalize, "normal", poison=False)
    x = build(p, "cpu")
    if p.layout != "cross":
        x.d_mask = None  # a document may keep no token, and -inf has no finite difference
    else:
        x.d_mask[:, 0] = True
    leaves = [t.requires_grad_() for t in x.leaves()]

    def function(Q, D, weight):
        call = lik_ops.maxsim_pairs if layout == "pairs" else lik_ops.maxsim
        return call(Q, D, x.q_mask, x.d_mask, q_weight=weight, normalize=normalize, backward=backward)

    assert torch.autograd.gradcheck(function, leaves)


def test_double_backward_and_forward_mode_raise():
    Q, D = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 5, 4)
    (grad,) = torch.autograd.grad(lik_ops.maxsim(Q, D).sum(), Q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward"):
        grad.sum().backward()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(Q.detach(), torch.ones_like(Q))
        with pytest.raises(NotImplementedError, match="no forward-mode AD"):
            lik_ops.maxsim(dual, D)


@pytest.mark.gpu
@pytest.mark.parametrize("warn_only", [False, True])
def test_unified_under_deterministic_algorithms(warn_only):
    Q, D = torch.randn(2, 3, 8, device="cuda", requires_grad=True), torch.randn(2, 5, 8, device="cuda")
    scores = lik_ops.maxsim(Q, D, backward="unified")
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    if warn_only:
        with pytest.warns(UserWarning, match="adds atomically"):
            scores.sum().backward()
    else:
        with pytest.raises(RuntimeError, match="adds atomically"):
            scores.sum().backward()
