"""Test `torch.vmap`, `torch.func`, and autocast of the functions and operators, and what they refuse."""

import inspect
import itertools
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import lik_ops
from lik_ops import reference
from lik_ops.ops.stack import batching

from ...support.common import Calls

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
B, Nq, K, Lq, Ld, d = 3, 2, 4, 5, 6, 8


@pytest.fixture(autouse=True)
def _no_loop_fallback():
    """torch warns once per process if it loops over an operator without a batching rule."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*batching rule.*")
        yield


def documents_shape(layout):
    return {
        "cross": (K, Ld, d),
        "one_query": (K, Ld, d),
        "candidates": (Nq, K, Ld, d),
        "flat_q": (K, Ld, d),
        "flat_d": (Ld, d),
        "flat": (Ld, d),
    }[layout]


def arguments(layout, batched, dims=(0, 0, 0, 0, 0), device="cpu", dtype=torch.float32, seed=0):
    """Return Q, D, q_mask, d_mask, q_weight, with a batch axis at `dims` for the `batched` ones, and the in_dims."""
    generator = torch.Generator().manual_seed(seed)
    queries = {"flat_q": (), "flat": (), "one_query": (1,)}.get(layout, (Nq,))
    q_shape, d_shape = (*queries, Lq, d), documents_shape(layout)
    shapes = (q_shape, d_shape, q_shape[:-1], d_shape[:-1], q_shape[:-1])
    args = []
    for i, shape in enumerate(shapes):
        x = torch.randn((B, *shape) if i in batched else shape, generator=generator)
        x = x > -0.7 if i in (2, 3) else x.to(torch.float32 if i == 4 else dtype)
        args.append(x.movedim(0, dims[i]).to(device) if i in batched else x.to(device))
    return args, tuple(dims[i] if i in batched else None for i in range(5))


def scores(Q, D, q_mask, d_mask, q_weight):
    return lik_ops.maxsim(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=True)


def composite(Q, D, q_mask, d_mask, q_weight):
    return torch.ops.lik.maxsim(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=True)


def one_by_one(function, args, in_dims):
    outputs = [
        function(*(a if dim is None else a.select(dim, b) for a, dim in zip(args, in_dims, strict=True)))
        for b in range(B)
    ]
    if isinstance(outputs[0], torch.Tensor):
        return torch.stack(outputs)
    return tuple(torch.stack(each) for each in zip(*outputs, strict=True))


SUBSETS = [c for n in range(1, 6) for c in itertools.combinations(range(5), n)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["cross", "candidates", "flat_q", "flat_d", "flat"])
@pytest.mark.parametrize("function", [scores, composite])
def test_vmap_over_any_tensors_is_one_call_with_the_same_bits(layout, function, device):
    for batched in SUBSETS:
        args, in_dims = arguments(layout, batched, device=device)
        with Calls() as calls:
            actual = vmap(function, in_dims)(*args)
        assert calls.names == ["maxsim_fwd"]
        assert torch.equal(actual, one_by_one(function, args, in_dims)), batched


@pytest.mark.parametrize("layout", ["cross", "candidates"])
def test_vmap_over_other_axes_and_with_argmax(layout):
    for dims in ((1, 2, 1, 0, 1), (-1, -1, -1, -1, -1), (2, 0, 0, 1, 1)):
        args, in_dims = arguments(layout, (0, 1, 2, 3, 4), dims)
        call = lambda Q, D, qm, dm, w: lik_ops.maxsim_with_argmax(Q, D, qm, dm, q_weight=w)  # noqa: E731
        actual, expected = vmap(call, in_dims)(*args), one_by_one(call, args, in_dims)
        for a, e in zip(actual, expected, strict=True):
            assert torch.equal(a, e)
    for batched in SUBSETS:
        args, in_dims = arguments(layout, batched)
        actual, expected = vmap(call, in_dims)(*args), one_by_one(call, args, in_dims)
        assert torch.equal(actual[1], expected[1]) and torch.equal(actual[0], expected[0])


@pytest.mark.parametrize("layout", ["cross", "candidates", "flat"])
@pytest.mark.parametrize("recompute", [False, True])
def test_vmapped_gradients(layout, recompute):
    def step(Q, D, q_mask, d_mask, w):
        each = lik_ops.maxsim(Q, D, q_mask, d_mask, q_weight=w, normalize=True, recompute=recompute)
        return (each * torch.linspace(1, 2, each.numel()).view(each.shape)).sum()

    for n, batched in enumerate(SUBSETS):
        args, in_dims = arguments(layout, batched)
        for argnums in ((0, 1, 4), ((0, 1, 4)[n % 3],)):  # one alternating argument: no other gradient is computed
            actual = vmap(grad(step, argnums), in_dims)(*args)
            expected = one_by_one(grad(step, argnums), args, in_dims)
            for a, e in zip(actual, expected, strict=True):
                torch.testing.assert_close(a, e)


@pytest.mark.parametrize("layout", ["cross", "one_query", "candidates", "flat_q", "flat"])
@pytest.mark.parametrize("argnum", [0, 1, 4])
def test_vmapped_jacobians(layout, argnum):
    for batched in SUBSETS:
        args, in_dims = arguments(layout, batched)
        actual = vmap(jacrev(scores, argnum), in_dims)(*args)
        torch.testing.assert_close(actual, one_by_one(jacrev(scores, argnum), args, in_dims))


@pytest.mark.parametrize("layout", ["cross", "one_query", "candidates"])
@pytest.mark.parametrize("op", [torch.ops.lik.maxsim_bwd_lowmem, torch.ops.lik.maxsim_bwd_unified])
def test_vmapped_raw_backwards(layout, op):
    for n, batched in enumerate(SUBSETS):
        args, in_dims = arguments(layout, batched)
        for needs in ([True, True, True], [n % 3 == i for i in range(3)]):

            def backward(Q, D, q_mask, d_mask, w, needs=needs):
                upstream, argmax = torch.ops.lik.maxsim_fwd(Q, D, q_mask, d_mask, w, True, torch.int32, "auto")
                return op(upstream, Q, D, argmax, q_mask, d_mask, w, True, needs)

            actual, expected = vmap(backward, in_dims)(*args), one_by_one(backward, args, in_dims)
            for a, e in zip(actual, expected, strict=True):
                torch.testing.assert_close(a, e)


def test_a_batch_that_copies_too_much_is_computed_one_by_one(monkeypatch):
    """The bits are equal, and the tensors are not copied."""
    calls = []
    real = batching._VmapBatch.run_samples
    monkeypatch.setattr(batching._VmapBatch, "run_samples", lambda *a: calls.append(1) or real(*a))
    monkeypatch.setattr(batching, "MAX_COPIED_BYTES", 100)
    for layout, batched in (("cross", (0, 1)), ("cross", (3,)), ("candidates", (0,))):
        args, in_dims = arguments(layout, batched)
        assert torch.equal(vmap(scores, in_dims)(*args), one_by_one(scores, args, in_dims))
        assert calls
        calls.clear()
    for layout, batched in (("cross", (0,)), ("cross", (1, 3)), ("candidates", (0, 1))):  # nothing to copy
        args, in_dims = arguments(layout, batched)
        vmap(scores, in_dims)(*args)
        assert not calls


def test_empty_batches_and_samples():
    D = torch.randn(K, Ld, d)
    assert vmap(lik_ops.maxsim, (0, None))(torch.randn(B, 0, Lq, d), D).shape == (B, 0, K)
    assert vmap(lik_ops.maxsim)(torch.randn(B, Nq, Lq, d), D.new_empty(B, 0, Ld, d)).shape == (B, Nq, 0)
    Q = torch.randn(B, Nq, Lq, d)
    for in_dims in ((0, None), (0, 0)):  # no samples at all
        args = Q[:0], D if in_dims[1] is None else D.new_empty(0, *D.shape)
        assert vmap(lik_ops.maxsim, in_dims)(*args).shape == (0, Nq, K)
        grads = vmap(grad(lambda q, x: lik_ops.maxsim(q, x).sum(), (0, 1)), in_dims)(*args)
        assert [g.shape for g in grads] == [(0, Nq, Lq, d), (0, *D.shape)]
    for shape in ((B, Nq, 0, d), (B, 0, Lq, d)):
        grads = vmap(grad(lambda q, x: lik_ops.maxsim(q, x).sum(), (0, 1)), (0, None))(torch.randn(shape), D)
        assert [g.shape for g in grads] == [shape, (B, *D.shape)]
    grads = vmap(grad(lambda q, x: lik_ops.maxsim(q, x).sum(), (0, 1)))(Q, D.new_empty(B, 0, Ld, d))
    assert grads[1].shape == (B, 0, Ld, d) and not grads[0].any()


ONE_BY_ONE = {
    "maxsim_soft": lambda Q, D: lik_ops.maxsim_soft(Q, D, 0.3),
    "maxsim_token_topk": lambda Q, D: lik_ops.maxsim_token_topk(Q, D, top_k=2),
    "maxsim_xtr": lambda Q, D: lik_ops.maxsim_xtr(Q, D, top_k=3),
    "chamfer_distance": lambda Q, D: lik_ops.chamfer_distance(Q, D[:Nq]),
    "maxsim_from_hidden": lambda Q, D: lik_ops.maxsim_from_hidden(Q, D, torch.eye(d)),
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_empty_vmap_of_functions_computed_one_by_one(name):
    Q, D, call = torch.randn(B, Nq, Lq, d), torch.randn(K, Ld, d), ONE_BY_ONE[name]
    for in_dims in ((0, None), (0, 0)):
        args = Q, D if in_dims[1] is None else D.expand(B, -1, -1, -1)
        some = vmap(call, in_dims)(*args)
        none = vmap(call, in_dims)(*(x if axis is None else x[:0] for x, axis in zip(args, in_dims, strict=True)))
        assert none.shape == (0, *some.shape[1:]) and none.dtype == some.dtype


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backward", ["lowmem", "unified"])
def test_func_derivatives_match_autograd_and_reference(backward, device):
    (Q, D, q_mask, d_mask, w), _ = arguments("cross", (), device=device)

    def f(q, x, v):
        return lik_ops.maxsim(q, x, q_mask, d_mask, q_weight=v, backward=backward)

    def r(q, x, v):
        return reference.maxsim(q, x, q_mask, d_mask, q_weight=v)

    leaves = [t.clone().requires_grad_() for t in (Q, D, w)]
    expected = torch.autograd.grad(f(*leaves).sum(), leaves)
    for a, e in zip(grad(lambda *x: f(*x).sum(), (0, 1, 2))(Q, D, w), expected, strict=True):
        torch.testing.assert_close(a, e)
    out, pull = vjp(f, Q, D, w)
    assert torch.equal(out, f(Q, D, w))
    for a, e in zip(pull(torch.ones_like(out)), expected, strict=True):
        torch.testing.assert_close(a, e)
    for a, e in zip(jacrev(f, (0, 1, 2))(Q, D, w), jacrev(r, (0, 1, 2))(Q, D, w), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)
    both = grad(lambda q: vmap(lik_ops.maxsim, (0, None))(q, D).sum())(Q)
    torch.testing.assert_close(both, grad(lambda q: lik_ops.maxsim(q, D).sum())(Q))


def test_func_through_the_raw_operators():
    Q, D = torch.randn(Nq, Lq, d), torch.randn(K, Ld, d)
    leaf = Q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(lik_ops.maxsim(leaf, D).sum(), leaf)
    for total in (
        lambda q: torch.ops.lik.maxsim(q, D).sum(),
        lambda q: OPAQUE["maxsim_fwd"](q, D)[0].sum(),
        lambda q: vmap(lambda x: torch.ops.lik.maxsim(x, D), chunk_size=1)(q).sum(),
    ):
        torch.testing.assert_close(grad(total)(Q), expected)
        with pytest.raises(NotImplementedError, match="no double backward"):
            grad(lambda q, f=total: grad(f)(q).sum())(Q)


def test_func_through_pairs_argmax_and_modules():
    Q, D = torch.randn(3, Lq, d), torch.randn(3, Ld, d)
    pairs = jacrev(lik_ops.maxsim_pairs)(Q, D)
    torch.testing.assert_close(pairs, jacrev(reference.maxsim_pairs)(Q, D))
    by_winners, argmax = grad(lambda q: (lambda s, a: (s.sum(), a))(*lik_ops.maxsim_with_argmax(q, D)), has_aux=True)(Q)
    torch.testing.assert_close(by_winners, grad(lambda q: lik_ops.MaxSimScorer()(q, D).sum())(Q))
    assert torch.equal(argmax, lik_ops.maxsim_with_argmax(Q, D)[1])


def test_batched_upstream_gradients():
    Q, D = torch.randn(Nq, Lq, d, requires_grad=True), torch.randn(K, Ld, d, requires_grad=True)
    out, upstream = lik_ops.maxsim(Q, D), torch.randn(B, Nq, K)
    batched = torch.autograd.grad(out, (Q, D), upstream, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, (Q, D), u, retain_graph=True) for u in upstream]
    for a, e in zip(batched, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(e))


REFUSED = {
    "jvp": (lambda Q, D: jvp(lambda q: lik_ops.maxsim(q, D), (Q,), (Q,)), "no forward-mode AD"),
    "jvp of the raw operator": (
        lambda Q, D: jvp(lambda q: torch.ops.lik.maxsim(q, D), (Q,), (Q,)),
        "no forward-mode AD",
    ),
    "jvp with winners": (
        lambda Q, D: jvp(lambda q: lik_ops.maxsim_with_argmax(q, D)[0], (Q,), (Q,)),
        "forward-mode AD",
    ),
    "jvp of pairs": (lambda Q, D: jvp(lambda q: lik_ops.maxsim_pairs(q, D[:2]), (Q,), (Q,)), "no forward-mode AD"),
    "jvp of vmap": (
        lambda Q, D: jvp(vmap(lambda q: lik_ops.maxsim(q, D)), (Q,), (Q,)),
        "no forward-mode AD",
    ),
    "jvp of quantized documents": (
        lambda Q, D: jvp(lambda q: lik_ops.maxsim(q, lik_ops.quantize(D)), (Q,), (Q,)),
        "no forward-mode AD",
    ),
    "jvp of weights beside quantized documents": (
        lambda Q, D: jvp(lambda w: lik_ops.maxsim(Q, lik_ops.quantize(D), q_weight=w), (Q[..., 0],), (Q[..., 0],)),
        "no forward-mode AD",
    ),
    "jacfwd of quantized pairs": (
        lambda Q, D: jacfwd(lambda q: lik_ops.maxsim_pairs(q, lik_ops.quantize(D[:2])))(Q),
        "no forward-mode AD",
    ),
    "jacfwd": (lambda Q, D: jacfwd(lambda q: lik_ops.maxsim(q, D))(Q), "no forward-mode AD"),
    "hessian": (lambda Q, D: hessian(lambda q: lik_ops.maxsim(q, D).sum())(Q), "no double backward|forward-mode AD"),
    "grad of grad": (
        lambda Q, D: grad(lambda p: grad(lambda q: lik_ops.maxsim(q, D).sum())(p).sum())(Q),
        "no double backward",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_derivatives_raise(what):
    call, message = REFUSED[what]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*jit.*")
        with pytest.raises(NotImplementedError, match=message):
            call(torch.randn(Nq, Lq, d), torch.randn(K, Ld, d))


AUTOGRAD_ALONE = ("maxsim_soft", "maxsim_token_topk", "maxsim_xtr", "maxsim_cross_entropy", "maxsim_from_hidden")
BOUNDS, TAU, HEAD = torch.arange(K + 1) * Ld, torch.tensor(0.5), torch.randn(d, 6)
STORED = lik_ops.quantize(torch.randn(K * Ld, d))
DIFFERENTIABLE = {
    "maxsim": lambda Q, D, w: lik_ops.maxsim(Q, D, q_weight=w),
    "maxsim_with_argmax": lambda Q, D, w: lik_ops.maxsim_with_argmax(Q, D, q_weight=w)[0],
    "maxsim_pairs": lambda Q, D, w: lik_ops.maxsim_pairs(Q, D[:Nq], q_weight=w),
    "maxsim_varlen": lambda Q, T, w: lik_ops.maxsim_varlen(Q, T, cu_seqlens_d=BOUNDS, q_weight=w),
    "quantized": lambda Q, w: lik_ops.maxsim_varlen(Q, STORED, cu_seqlens_d=BOUNDS, q_weight=w),
    "maxsim_soft": lambda Q, D, w, tau=TAU: lik_ops.maxsim_soft(Q, D, tau, q_weight=w),
    "maxsim_token_topk": lambda Q, D, w: lik_ops.maxsim_token_topk(Q, D, 2, q_weight=w),
    "maxsim_xtr": lambda Q, D, w: lik_ops.maxsim_xtr(Q, D, 3, q_weight=w),
    "maxsim_cross_entropy": lambda Q, D, w, tau=TAU: lik_ops.maxsim_cross_entropy(Q, D, q_weight=w, temperature=tau),
    "maxsim_from_hidden": lambda Q, H, w, W, b: lik_ops.maxsim_from_hidden(Q, H, W, b, q_weight=w),
    "chamfer_distance": lambda P, R: lik_ops.chamfer_distance(P, R),
}


@pytest.mark.parametrize("name", [*AUTOGRAD_ALONE, "chamfer_distance"])
def test_func_grad_of_autograd_only_functions_raises(name):
    function, Q, D, w = DIFFERENTIABLE[name], torch.randn(Nq, Lq, d), torch.randn(K, Ld, d), torch.rand(Nq, Lq)
    others = {"chamfer_distance": (D[:Nq],), "maxsim_from_hidden": (D[..., :6], w, HEAD, D[0, 0])}.get(name, (D, w))
    with pytest.raises(NotImplementedError, match=rf"torch\.func cannot differentiate {name}"):
        grad(lambda q: function(q, *others).sum())(Q)


@pytest.mark.parametrize(
    ("compiled", "wanted"),
    [(False, slice(None)), (True, slice(1)), pytest.param(True, slice(1, None), marks=pytest.mark.slow)],
    ids=["eager", "compiled, first argument", "compiled, other arguments"],
)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_jvp_raises_for_every_differentiable_argument(name, compiled, wanted):
    """Test any argument that has a gradient. In compiled code, arguments after the first are a slow case."""
    function, Q, D = DIFFERENTIABLE[name], torch.randn(Nq, Lq, d), torch.randn(K, Ld, d)
    given = {"Q": Q, "D": D, "T": D.flatten(0, 1), "H": D[..., :6], "P": Q, "R": D[:Nq]}
    given |= {"w": torch.rand(Nq, Lq), "tau": TAU, "W": HEAD, "b": D[0, 0]}
    given = {argument: given[argument] for argument in inspect.signature(function).parameters}
    for argument, x in [*given.items()][wanted]:

        def tangents(x, argument=argument):
            return jvp(lambda x: function(**{**given, argument: x}), (x,), (torch.ones_like(x),))[1]

        torch.compiler.reset()
        with pytest.raises(NotImplementedError, match=r"forward-mode AD|torch\.func cannot differentiate"):
            (torch.compile(tangents, backend="eager") if compiled else tangents)(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("region", [torch.bfloat16, torch.float16])
def test_autocast_casts_inputs_to_its_dtype(region, device):
    (Q, D, q_mask, d_mask, w), _ = arguments("cross", (), device=device)
    expected = lik_ops.maxsim(Q.to(region), D.to(region), q_mask, d_mask, q_weight=w)
    assert not torch.equal(expected, lik_ops.maxsim(Q, D, q_mask, d_mask, q_weight=w))
    with torch.autocast(device, region):
        for q, x in ((Q, D), (Q, D.to(region)), (Q.to(region), D), (Q.to(region), D.to(region))):
            for call in (lik_ops.maxsim, torch.ops.lik.maxsim):
                assert torch.equal(call(q, x, q_mask, d_mask, q_weight=w), expected)
            assert torch.equal(lik_ops.maxsim_with_argmax(q, x, q_mask, d_mask, q_weight=w)[0], expected)
            pairs = lik_ops.maxsim_pairs(q, x[:Nq], q_mask, d_mask[:Nq], q_weight=w.to(region))
            assert pairs.dtype == torch.float32
        with torch.autocast(device, enabled=False):
            assert torch.equal(lik_ops.maxsim(Q, D), lik_ops.maxsim(Q.clone(), D))
        assert lik_ops.maxsim(Q.double(), D.double()).dtype == torch.float64
        compiled = torch.compile(lik_ops.maxsim, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(Q, D.to(region), q_mask, d_mask, q_weight=w), expected)
    with pytest.raises(TypeError, match="expected the dtype of Q"):
        lik_ops.maxsim(Q, D.to(region))


def test_autocast_gradients_are_in_the_dtype_of_the_parameters():
    Q, D = torch.randn(Nq, Lq, d, requires_grad=True), torch.randn(K, Ld, d).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = lik_ops.maxsim(Q, D)
    for t, g in zip((Q, D), torch.autograd.grad(out.sum(), (Q, D)), strict=True):
        assert g.dtype == t.dtype and bool(g.any())


def test_autocast_of_another_device_changes_nothing():
    Q, D = torch.randn(Nq, Lq, d), torch.randn(K, Ld, d)
    expected = lik_ops.maxsim(Q, D)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no GPU here
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.equal(lik_ops.maxsim(Q, D), expected)


def test_compiled_func_transforms():
    Q, D = torch.randn(Nq, Lq, d), torch.randn(K, Ld, d)

    def derive(q):
        return grad(lambda x: lik_ops.maxsim(x, D).square().sum())(q)

    compiled = torch.compile(derive, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(Q), derive(Q))
    torch.compiler.reset()


def test_raw_operator_rejects_mixed_dtypes():
    Q, D = torch.randn(Nq, Lq, d), torch.randn(K, Ld, d).bfloat16()
    for enabled in (False, True):
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=enabled),
            pytest.raises(TypeError, match="D: expected the dtype"),
        ):
            torch.ops.lik.maxsim_fwd(Q, D, None, None, None, False, None, "auto")


HOST = np.random.default_rng(0).standard_normal((K, Ld, d), dtype=np.float32)
SEARCHED = {
    "retrieve": lambda Q, D, w: lik_ops.retrieve(Q, D, 2, q_weight=w)[0],
    "retrieve from the host": lambda Q, D, w: lik_ops.retrieve(Q, HOST, 2, q_weight=w)[0],
    "retrieve packed": lambda Q, D, w: lik_ops.retrieve(
        Q, D.flatten(0, 1), 2, cu_seqlens_d=torch.arange(K + 1) * Ld, q_weight=w
    )[0],
}
DERIVED = {
    "grad": lambda f, x: grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: vjp(f, x),
    "jvp": lambda f, x: jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(lambda x: f(x).sum())(x),
    "linearize": lambda f, x: linearize(f, x),
    "grad of vmap": lambda f, x: grad(lambda x: vmap(f)(x).sum())(x[None]),
    "vmap of grad": lambda f, x: vmap(grad(lambda x: f(x).sum()))(x[None]),
    "compiled grad": lambda f, x: torch.compile(lambda x: grad(lambda x: f(x).sum())(x), backend="eager")(x),
    "compiled jvp": lambda f, x: torch.compile(lambda x: jvp(f, (x,), (x,)), backend="eager")(x),
    "dual": lambda f, x: f(forward_ad.make_dual(x, torch.ones_like(x))),
}


@pytest.mark.parametrize("of", ["Q", "D", "q_weight"])
@pytest.mark.parametrize("what", DERIVED)
@pytest.mark.parametrize("search", SEARCHED)
def test_derivatives_of_a_search_raise(search, what, of):
    given = {"Q": torch.randn(Nq, Lq, d), "D": torch.randn(K, Ld, d), "q_weight": torch.rand(Nq, Lq)}
    if search == "retrieve from the host" and (of == "D" or "compiled" in what):
        pytest.skip("documents in host memory have no gradients, and their searches do not compile")
    names = list(given)

    def scores(x):
        return SEARCHED[search](*(x if name == of else given[name] for name in names))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(jit|get_attr).*")
        level = forward_ad.dual_level() if what == "dual" else nullcontext()
        with level, pytest.raises(NotImplementedError, match=r"^retrieve has no derivatives"):
            DERIVED[what](scores, given[of])
    torch.compiler.reset()


@pytest.mark.parametrize("search", SEARCHED)
def test_search_inside_a_derivative_accepts_detached_inputs(search):
    """Hard negatives are retrieved and then scored."""
    Q, D, w = torch.randn(Nq, Lq, d), torch.randn(K, Ld, d), torch.rand(Nq, Lq)
    search = SEARCHED[search]

    def loss(q, detach=True):
        found = search(q.detach() if detach else q, D, w)
        return (lik_ops.maxsim(q, D) * found.sum()).sum()

    def untracked(q):
        with torch.no_grad():
            found = search(q, D, w)
        return (lik_ops.maxsim(q, D) * found.sum()).sum()

    expected = torch.autograd.grad(loss(leaf := Q.clone().requires_grad_()), leaf)[0]
    torch.testing.assert_close(grad(loss)(Q), expected)
    torch.testing.assert_close(grad(untracked)(Q), expected)
    torch.testing.assert_close(grad(lambda q: grad(lambda p: search(Q, D, w).sum() * p.sum())(q).sum())(Q), 0 * Q)
    with pytest.raises(NotImplementedError, match="retrieve has no derivatives"):
        grad(lambda q: grad(lambda p: search(q * p.detach(), D, w).sum() * p.sum())(q).sum())(Q)


OPAQUE = {
    "maxsim_fwd": lambda Q, D: torch.ops.lik.maxsim_fwd(Q, D, None, None, None, False, None, "auto"),
    "maxsim_topk": lambda Q, D: torch.ops.lik.maxsim_topk(Q, D, None, None, None, None, False, 2, None),
    "maxsim_ragged_fwd": lambda Q, D: torch.ops.lik.maxsim_ragged_fwd(
        Q[0], D[0], *(torch.tensor(x) for x in ([0, 2], [0], [2])), None, None, None, None, False, None, 2, "auto"
    ),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_raw_operators_reject_dual_tensors(name):
    Q, D = torch.randn(Nq, Lq, d), torch.randn(K, Ld, d)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, torch.ones_like(x)) for x in (Q, D)]
        for args in ((duals[0], D), (Q, duals[1])):
            with pytest.raises(NotImplementedError, match="forward-mode AD"):
                OPAQUE[name](*args)
        assert OPAQUE[name](Q, D)[0].isfinite().all()


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("backward", ["lowmem", "unified"])
def test_backward_rejects_dual_gradients(backward, ragged):
    Q, D = torch.randn(Nq, Lq, d, requires_grad=True), torch.randn(K, Ld, d)
    scores = (lik_ops.maxsim_varlen if ragged else lik_ops.maxsim)(Q, D, backward=backward)
    with forward_ad.dual_level():
        upstream = forward_ad.make_dual(torch.ones_like(scores), torch.ones_like(scores))
        with pytest.raises(NotImplementedError, match="forward-mode AD"):
            torch.autograd.grad(scores, Q, upstream)


@pytest.mark.parametrize("name", OPAQUE)
def test_jvp_of_a_raw_operator_raises(name):
    Q, D = torch.randn(Nq, Lq, d), torch.randn(K, Ld, d)
    with pytest.raises(NotImplementedError, match="forward-mode AD"):
        jvp(lambda q: OPAQUE[name](q, D)[0], (Q,), (Q,))
