"""Test the gradients of queries and weights next to quantized documents, in every format and layout."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lik_ops
from lik_ops.formats.rotation import make_rotation
from lik_ops.formats.table import ALL_FORMATS, FP8_QUERIES, INT8_QUERIES
from lik_ops.portable import backend as portable

from ..support.common import INTERPRETING, PLACE_IDS, PLACES, thin_out
from ..support.quantized import dtypes, problem
from ..support.residual import quantize

lik = torch.ops.lik
of_place = pytest.mark.parametrize("place", PLACES, ids=PLACE_IDS)
MODES = ("cross", "candidates", "pairs")
FEATURES = (20, 96, 300) if INTERPRETING else (20, 128, 300)
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
CASES = [
    (format, mode, FEATURES[n % 3], n % 2 == 0, n % 4 > 1)
    for n, (format, mode) in enumerate(itertools.product((*ALL_FORMATS, INT8_QUERIES, FP8_QUERIES), MODES))
]


def expected_gradients(p, argmax, upstream, normalize):
    """Return the gradients of the formula in fp64, at a given argmax."""
    r, tokens, total = p.r, p.tokens(), 0
    leaves = [x.double().requires_grad_() for x in (r.Q, r.q_weight) if x is not None]
    for i, j, at in p.meetings:
        rows, part = p.part(i, j)
        won = p.winners(argmax, i, at).long()
        q, x = leaves[0][rows][won >= 0], tokens[part][won[won >= 0]]
        if normalize:
            q, x = (torch.nn.functional.normalize(y, dim=-1) for y in (q, x))
        w = leaves[1][rows][won >= 0] if len(leaves) > 1 else 1
        total = total + upstream[at].double() * (w * (q * x).sum(-1)).sum()
    return torch.autograd.grad(total, leaves)


@of_place
@pytest.mark.parametrize(("format", "mode", "d", "options", "normalize"), thin_out(CASES, 4))
def test_gradients_match_the_formula(place, format, mode, d, options, normalize):
    for dtype in dtypes(place) if place.device == "cuda" else [dtypes(place)[len(format) % 2]]:
        scale = ("token", "document", "tensor")[len(mode) % 3]
        kept = {INT8_QUERIES: "int8", FP8_QUERIES: "fp8_e4m3"}.get(format, format)
        p = problem(mode, dtype, d, kept, scale, options).to(place.device)
        stored, longest = p.stored._replace(format=format), int(p.r.cu_seqlens_q.diff().max())
        Q, rest = p.r.Q.clone().requires_grad_(), p.r[2:8]
        weight = p.r.q_weight if p.r.q_weight is None else p.r.q_weight.clone().requires_grad_()
        leaves = [x for x in (Q, weight) if x is not None]
        with place.use():
            arguments = Q, *stored, *rest, weight, normalize
            scores, argmax = lik.maxsim_quantized_fwd(*arguments, torch.int32, longest)
            recomputed, none = lik.maxsim_quantized_fwd(*arguments, None, longest)
            upstream = torch.randn(scores.shape).to(scores)
            found = torch.autograd.grad(scores, leaves, upstream)
            again = torch.autograd.grad(recomputed, leaves, upstream)
        assert none.numel() == 0 and all(map(torch.equal, found, again))
        for x, expected, leaf in zip(found, expected_gradients(p, argmax, upstream, normalize), leaves, strict=True):
            assert x.dtype == leaf.dtype and x.shape == leaf.shape
            within = TOLERANCES[dtype]
            torch.testing.assert_close(x.double(), expected, rtol=within, atol=within * float(expected.abs().max()))


@pytest.mark.parametrize("format", ["int8", "rq4", "rq2", "rq1"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cpu_gradients_are_rounded_once(dtype, format):
    p = problem("cross", dtype, 128, format, "token", options=True)
    Q, weight = p.r.Q.clone().requires_grad_(), p.r.q_weight.clone().requires_grad_()
    arguments = Q, *p.stored, *p.r[2:8], weight, True
    scores, argmax = lik.maxsim_quantized_fwd(*arguments, torch.int32, int(p.r.cu_seqlens_q.diff().max()))
    upstream = torch.randn_like(scores)
    found = torch.autograd.grad(scores, (Q, weight), upstream)
    expected = expected_gradients(p, argmax, upstream, normalize=True)
    assert (found[0] != expected[0].to(dtype)).double().mean() < 0.01
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-5, atol=1e-5 * float(expected[1].abs().max()))


def test_gradients_are_finite_where_rotated_queries_exceed_fp16():
    rotation, made = make_rotation(16, torch.device("cpu")), lik_ops.quantize(torch.randn(1, 3, 16).half(), "rq4")
    Q = (rotation[:, 0] * 80_000).half()[None, None].requires_grad_()
    weight = torch.ones(1, 1, requires_grad=True)
    scores = lik_ops.maxsim(Q, made, q_weight=weight)
    torch.testing.assert_close(torch.autograd.grad(scores.sum(), weight)[0], scores.detach())
    normalized = lik_ops.maxsim(Q, made, normalize=True)
    assert torch.autograd.grad(normalized.sum(), Q)[0].isfinite().all()


def draw(place, *sizes):
    return torch.randn(sizes, device=place.device)


def gradients(scores, leaves):
    return torch.autograd.grad(scores, leaves, torch.linspace(-1, 1, scores.numel()).to(scores).view_as(scores))


@of_place
@pytest.mark.parametrize("format", ["int8", "residual2"])
def test_public_function_gradients_match_dequantized_documents(place, format):
    """Each layout has the gradients of the dequantized documents."""
    D = draw(place, 4, 9, 24)
    made = quantize(D, format)
    plain, lengths = made.dequantize(), torch.tensor([9, 3, 1, 9], device=place.device)
    Q, weight = draw(place, 3, 5, 24).requires_grad_(), draw(place, 3, 5).requires_grad_()
    q_mask = torch.rand(3, 5, device=place.device) < 0.7
    d_mask = torch.arange(9, device=place.device) < lengths[:, None]
    ends, bounds = torch.arange(0, 16, 5, device=place.device), torch.arange(0, 37, 9, device=place.device)
    pairs = torch.tensor([[0, 3], [2, 1], [0, 0]], device=place.device)
    masks = {"q_mask": q_mask, "d_mask": d_mask, "q_weight": weight, "normalize": True}
    own = torch.tensor([[0, 1], [3, 2], [1, 1]], device=place.device)
    queries = [Q[0], Q[1, :2], Q[2, :0]]
    packed = made[d_mask.new_ones(4, 9)]
    calls = [
        lambda x, y: lik_ops.maxsim(Q, x, **masks),
        lambda x, y: lik_ops.maxsim(Q, x[own], normalize=True),
        lambda x, y: lik_ops.maxsim(queries, x),
        lambda x, y: lik_ops.maxsim_varlen(Q.flatten(0, 1), y, ends, bounds, q_weight=weight.flatten()),
        lambda x, y: lik_ops.maxsim_pair_list(Q, x, pairs, q_weight=weight),
        lambda x, y: lik_ops.maxsim_pairs(Q, x[slice(0, 3)], q_weight=weight),
        lambda x, y: lik_ops.maxsim_with_argmax(Q, x, q_weight=weight)[0],
        lambda x, y: lik_ops.maxsim(Q[0], x, q_weight=weight[0], recompute=True),
    ]
    with place.use():
        for n, call in enumerate(calls):
            found, expected = call(made, packed), call(plain, plain.flatten(0, 1))
            assert found.requires_grad, n
            leaves = [Q] if n in (1, 2) else [Q, weight]
            for a, b in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda text, n=n: f"call {n}: {text}")


@of_place
def test_a_gradient_has_the_same_bits_alone_and_in_a_batch(place):
    made, Q = quantize(draw(place, 40, 9, 32), "residual4"), draw(place, 6, 5, 32)

    def gradient(part):
        q = Q[part].clone().requires_grad_()
        with place.use():
            return torch.autograd.grad(lik_ops.maxsim(q, made).sum(), q)[0]

    whole = gradient(slice(None))
    assert torch.equal(whole, gradient(slice(None))) and torch.equal(whole[2:3], gradient(slice(2, 3)))


def test_gradients_of_quantized_documents_raise():
    Q, made = torch.randn(2, 3, 8).requires_grad_(), lik_ops.quantize(torch.randn(4, 5, 8))
    scale = made.scale.clone().requires_grad_()
    asked = lik_ops.Quantized(made.data, scale, "int8", 8, torch.float32)
    for given in (Q, Q.detach()):
        with pytest.raises(NotImplementedError, match=r"maxsim: D: quantized documents have no gradient, but a tensor"):
            lik_ops.maxsim(given, asked)
        with torch.no_grad():
            assert torch.equal(lik_ops.maxsim(given, asked), lik_ops.maxsim(given, made))
    stored, bounds = asked.to_flat_encoded(), (None, torch.arange(0, 21, 5))
    scores, _ = lik.maxsim_quantized_fwd(Q, *stored, *bounds, *[None] * 5, False, None, 3)
    with pytest.raises(NotImplementedError, match="lik::maxsim_quantized_fwd has no gradient of scale"):
        scores.sum().backward()
    with pytest.raises(NotImplementedError, match="lik::maxsim_quantized_fwd has no double backward"):
        (first,) = torch.autograd.grad(lik_ops.maxsim(Q, made).sum(), Q, create_graph=True)
        first.sum().backward()
    with pytest.raises(NotImplementedError, match=r"torch\.func cannot differentiate"):
        torch.func.grad(lambda q: lik_ops.maxsim(q, made).sum())(Q.detach())


def test_compiled_and_vmapped_gradients_match_eager():
    Q, made = torch.randn(2, 3, 8).requires_grad_(), lik_ops.quantize(torch.randn(4, 5, 8))

    def loss(q):
        return lik_ops.maxsim(q, made, normalize=True).logsumexp(1).sum()

    (expected,) = torch.autograd.grad(loss(Q), Q)
    torch.compiler.reset()
    (found,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(Q), Q)
    assert torch.equal(found, expected)
    stacked = torch.stack([Q.detach(), -Q.detach()]).requires_grad_()
    scores = torch.vmap(lambda q: lik_ops.maxsim(q, made))(stacked)
    (batched,) = torch.autograd.grad(scores.sum(), stacked)
    (alone,) = torch.autograd.grad(lik_ops.maxsim(-Q, made).sum(), Q)
    assert torch.equal(batched[1], -alone)


class LargestTensor(TorchDispatchMode):
    """Records the largest memory that an operation allocates."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.nbytes = max(self.nbytes, found.untyped_storage().nbytes())
        return found


def test_backward_does_not_decode_all_documents():
    """The decoded corpus would have 51 MB."""
    Q, made = torch.randn(1, 4, 128), lik_ops.quantize(torch.randn(200, 500, 128))
    stored, rest = made.to_flat_encoded(), (None, torch.arange(0, 100_001, 500), *[None] * 5)
    scores, argmax = lik.maxsim_quantized_fwd(Q, *stored, *rest, False, torch.int32, 4)
    tensors = Q, Q.new_empty(()).expand(100_000, 128), *rest
    with LargestTensor() as largest:
        grad, _ = portable.backward_quantized(torch.ones_like(scores), tensors, stored, argmax, False, [True, False])
    assert 0 < largest.nbytes <= 2 * 2**20
    tokens = made.dequantize()[torch.arange(200)[:, None], argmax.long()]
    torch.testing.assert_close(grad[0], tokens.sum(0), rtol=1e-4, atol=1e-4)
