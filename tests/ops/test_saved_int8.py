"""Test training with `save="int8"`: exact scores, gradients close to the unquantized ones, and fewer bytes."""

import itertools
import weakref

import pytest
import torch
from torch.nn.functional import normalize

import lik_ops
from lik_ops import quantize
from lik_ops._ops import ops as lik
from lik_ops.core.arguments import score_dtype

from ..support.common import INTERPRETING, PLACES, PORTABLE
from ..support.stack import kept_for_backward

at_places = pytest.mark.parametrize("place", PLACES, ids=str)
layouts = pytest.mark.parametrize("candidates", [False, True], ids=["cross", "candidates"])
SIZES = (3, 5, 6, 19) if INTERPRETING else (6, 9, 7, 40)


def inputs(place, candidates, dtype=torch.float32, d=96, options=False, sizes=SIZES):
    """Return Q, D, q_mask, d_mask, q_weight of unit tokens. Masked tokens hold NaN."""
    Nq, Nd, Lq, Ld = sizes
    Q = normalize(torch.randn(Nq, Lq, d), dim=-1)
    D = normalize(torch.randn(*((Nq, Nd) if candidates else (Nd,)), Ld, d), dim=-1)
    masks = weight = None
    if options:
        Q, D = 3 * torch.rand(Nq, Lq, 1) * Q, 3 * torch.rand(*D.shape[:-1], 1) * D
        masks = [torch.rand(x.shape[:-1]) > 0.3 for x in (Q, D)]
        masks[1].view(-1, Ld)[0] = False  # a document without tokens
        Q[~masks[0]], D[~masks[1]] = torch.nan, torch.nan
        weight = torch.rand(Nq, Lq, device=place.device, dtype=score_dtype(dtype))
    Q, D = (x.to(place.device, dtype) for x in (Q, D))
    q_mask, d_mask = (None, None) if masks is None else (m.to(place.device) for m in masks)
    return Q, D, q_mask, d_mask, weight


def step(Q, D, q_mask, d_mask, weight, upstream, **options):
    """Return the scores, and the gradients of Q, D, and the weights."""
    leaves = [t.detach().requires_grad_() for t in (Q, D, weight) if t is not None]
    scores = lik_ops.maxsim(*leaves[:2], q_mask, d_mask, q_weight=None if weight is None else leaves[2], **options)
    return scores.detach(), torch.autograd.grad(torch.where(scores.isfinite(), scores, 0), leaves, upstream)


def cosine(a, b):
    return float(torch.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


@at_places
@layouts
@pytest.mark.parametrize("backward", ["lowmem", "unified"])
@pytest.mark.parametrize(("options", "normalized"), [(False, False), (True, False), (True, True), (False, True)])
def test_scores_are_equal_and_gradients_close(place, candidates, backward, options, normalized):
    torch.use_deterministic_algorithms(False)
    for n, (dtype, d) in enumerate(zip(place.some_dtypes(int(options)), (96, 128, 20, 300), strict=False)):
        x = inputs(place, candidates, dtype, d, options)
        upstream = torch.randn(x[0].shape[0], SIZES[1], device=place.device, dtype=score_dtype(dtype))
        given = {"normalize": normalized, "backward": backward}
        with place.use():
            scores, found = step(*x, upstream, **given, save="int8")
            expected_scores, expected = step(*x, upstream, **given)
        assert torch.equal(scores, expected_scores), n
        for which, a, e, t in zip("QDw", found, expected, (x[0], x[1], x[4]), strict=False):
            assert a.dtype == t.dtype and a.shape == t.shape
            assert cosine(a, e) >= 0.9999, (which, dtype)
        if not normalized and backward == "lowmem":
            assert torch.equal(found[1], expected[1])  # computed from Q and the argmax alone


@at_places
@layouts
@pytest.mark.parametrize("normalized", [False, True])
def test_query_gradient_uses_the_int8_argmax_tokens(place, candidates, normalized):
    Q, D, *_ = inputs(place, candidates, torch.float32, 128)
    upstream = torch.randn(Q.shape[0], SIZES[1], device=place.device)
    with place.use():
        _, (found, _) = step(Q, D, None, None, None, upstream, normalize=normalized, save="int8")
        _, argmax = lik_ops.maxsim_with_argmax(Q, D, normalize=normalized)
    made = quantize(D, "int8")
    kept = made.data.double() * made.scale.double().unsqueeze(-1)
    q = Q.double().requires_grad_()
    rows, tokens = (normalize(t, dim=-1) if normalized else t for t in (q, kept))
    tokens = tokens.expand(Q.shape[0], *tokens.shape[-3:])
    won = tokens.gather(2, argmax.unsqueeze(-1).expand(*argmax.shape, Q.shape[-1]))
    (expected,) = torch.autograd.grad((rows.unsqueeze(1) * won).sum((-1, -2)), q, upstream.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@at_places
def test_saved_codes_and_scales_match_quantize(place):
    strange = torch.tensor([torch.nan, torch.inf, 1e-40, 3e38, 0.0, 1e-37, 0.5], device=place.device)
    for dtype, d, candidates in ((torch.float32, 96, False), (torch.float16, 20, True), (torch.float32, 300, True)):
        _, D, *_ = inputs(place, candidates, dtype, d)
        D = D.transpose(-2, -3).contiguous().transpose(-2, -3)
        D[..., :7, 3] = strange.to(dtype)
        D[..., 7, :] = 0
        if dtype == torch.float32:
            D[..., 8, :] = 1e-42
        with place.use():
            Q = torch.randn(D.shape[0], 4, d, device=place.device).to(dtype)
            _, _, data, scale = lik.maxsim_fwd_int8(Q, D, None, None, None, False, torch.int16, "auto")
        made = quantize(D, "int8")
        assert torch.equal(data, made.data)
        torch.testing.assert_close(scale, made.scale, rtol=0, atol=0, equal_nan=True)


@at_places
def test_nan_tokens_give_nan_gradients(place):
    Q, D, *_ = inputs(place, False)
    D[2, 5, 7] = torch.nan
    upstream = torch.ones(Q.shape[0], SIZES[1], device=place.device)
    for normalized in (False, True):
        with place.use():
            _, (_, of_D) = step(Q, D, None, None, None, upstream, normalize=normalized, save="int8")
            _, (_, expected) = step(Q, D, None, None, None, upstream, normalize=normalized)
        assert torch.equal(of_D.isnan(), expected.isnan())
        leaf = Q.detach().requires_grad_()
        with place.use():
            lik_ops.maxsim(leaf, D, normalize=normalized, save="int8")[:, 2].sum().backward()
        assert leaf.grad.isnan().any(-1).all()


@at_places
def test_a_gradient_does_not_depend_on_other_queries(place):
    Q, D, *_ = inputs(place, False)
    upstream = torch.randn(Q.shape[0], SIZES[1], device=place.device)
    with place.use():
        _, (whole, _) = step(Q, D, None, None, None, upstream, save="int8")
        for i in range(Q.shape[0]):
            _, (own, _) = step(Q[i : i + 1], D, None, None, None, upstream[i : i + 1], save="int8")
            assert torch.equal(own, whole[i : i + 1])


def kept_bytes(call):
    """Return the bytes that autograd keeps for a call, each storage once, and the result."""
    result, kept = kept_for_backward(call)
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    return sum(found.values()), result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_documents_are_freed(dtype, normalized, compiled):
    """Autograd keeps one byte per feature and one scale per token, and releases otherwise unreferenced documents."""
    Nd, Ld, d = 16, 100, 128
    Q, weights = torch.randn(2, 8, d, dtype=dtype), torch.randn(Nd, Ld, d, dtype=dtype, requires_grad=True)

    def score(save):
        D = weights * 2  # keeps nothing
        gone = weakref.ref(D)
        return lik_ops.maxsim(Q, D, normalize=normalized, save=save), gone

    if compiled:
        torch.compiler.reset()

        @torch.compile(fullgraph=True, backend="aot_eager")
        def scores(save):
            return lik_ops.maxsim(Q, weights * 2, normalize=normalized, save=save)

        def score(save):
            return scores(save), lambda: None

    plain, _ = kept_bytes(lambda: score(None))
    small, (result, gone) = kept_bytes(lambda: score("int8"))
    tokens = Nd * Ld * d
    assert plain - small >= tokens * (dtype.itemsize - 1) - 4 * Nd * Ld
    assert gone() is None
    result.sum().backward()
    assert weights.grad.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("backward", ["lowmem"])
def test_training_step_uses_less_memory(normalized, backward):
    """Documents are intermediate results, as in an encoder. Measure the peak of several calls before one backward."""
    Q = torch.randn(32, 32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.randn(4, 256, 300, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    peaks = {}
    for save in (None, "int8", None, "int8"):
        weight.grad = Q.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        scores = [lik_ops.maxsim(Q, x * weight, normalize=normalized, save=save, backward=backward) for x in hidden]
        kept = torch.cuda.memory_allocated() - before
        torch.cat(scores, 1).sum().backward()
        peaks[save] = torch.cuda.max_memory_allocated() - before, kept
        del scores
    tokens = hidden.numel()
    assert peaks["int8"][1] <= peaks[None][1] - 0.9 * tokens
    assert peaks["int8"][0] <= peaks[None][0] - 0.7 * tokens


@at_places
def test_pairs_and_module_match_calls_without_save(place):
    Q, D, _, _, weight = inputs(place, False, options=True, sizes=(5, 5, 6, 19))
    Q, D = Q.nan_to_num(0.1).requires_grad_(), D.nan_to_num(0.2).requires_grad_()
    with place.use():
        calls = {
            "pairs": lambda **o: lik_ops.maxsim_pairs(Q, D, q_weight=weight, **o),
            "module": lambda **o: lik_ops.MaxSimScorer(normalize=True, **o)(Q, D),
            "one document": lambda **o: lik_ops.maxsim(Q, D[0], **o),
            "one of each": lambda **o: lik_ops.maxsim(Q[0], D[0], d_mask=torch.ones_like(D[0, :, 0]).int(), **o),
        }
        for name, call in calls.items():
            found, expected = call(save="int8"), call()
            assert torch.equal(found, expected), name
            for a, e in zip(*(torch.autograd.grad(s.sum(), (Q, D)) for s in (found, expected)), strict=True):
                assert cosine(a, e) >= 0.9999, name
        with torch.no_grad():
            assert torch.equal(lik_ops.maxsim(Q, D, save="int8"), lik_ops.maxsim(Q, D))
        assert "save='int8'" in repr(lik_ops.MaxSimScorer(save="int8"))


@layouts
def test_compiled_steps_match_eager_bitwise(candidates):
    Q, D, q_mask, d_mask, weight = inputs(PORTABLE, candidates, options=True)
    Q, D = Q.nan_to_num(0.1), D.nan_to_num(0.2)
    upstream = torch.randn(Q.shape[0], SIZES[1])
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=False, backend="aot_eager", dynamic=True)
    eager = step(Q, D, q_mask, d_mask, weight, upstream, save="int8")
    scores, grads = compiled(Q, D, q_mask, d_mask, weight, upstream, save="int8")
    assert torch.equal(scores, eager[0])
    assert all(torch.equal(a, e) for a, e in zip(grads, eager[1], strict=True))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def whole(Q, D):
        return lik_ops.maxsim(Q, D, save="int8").sum()

    leaves = Q.detach().requires_grad_(), D.detach().requires_grad_()
    found = torch.autograd.grad(whole(*leaves), leaves)
    expected = torch.autograd.grad(lik_ops.maxsim(*leaves, save="int8").sum(), leaves)
    assert all(torch.equal(a, e) for a, e in zip(found, expected, strict=True))


def test_autocast_and_one_sided_gradients():
    Q, D, *_ = inputs(PORTABLE, False)
    for needs in itertools.product((False, True), repeat=2):
        q, x = Q.clone().requires_grad_(needs[0]), D.clone().requires_grad_(needs[1])
        with torch.autocast("cpu", torch.bfloat16):
            scores = lik_ops.maxsim(q, x, save="int8")
            assert torch.equal(scores, lik_ops.maxsim(q, x))
        leaves = [t for t in (q, x) if t.requires_grad]
        if leaves:
            assert all(g.dtype == torch.float32 for g in torch.autograd.grad(scores.sum(), leaves))


def test_vmap_works_and_func_grad_and_double_backward_raise():
    Q, D, *_ = inputs(PORTABLE, False)
    batch = torch.stack([Q, 2 * Q])
    q = batch.clone().requires_grad_()
    scores = torch.vmap(lambda q: lik_ops.maxsim(q, D, save="int8"))(q)
    assert torch.equal(scores, torch.stack([lik_ops.maxsim(x, D) for x in batch]))
    with pytest.raises(NotImplementedError, match=r"torch\.func cannot differentiate MaxSim with save='int8'"):
        torch.func.grad(lambda q: lik_ops.maxsim(q, D, save="int8").sum())(Q)
    q = Q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(lik_ops.maxsim(q, D, save="int8").sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="maxsim_fwd_int8 has no double backward"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda Q, D: lik_ops.maxsim(Q, D, save="int4"), ValueError, "maxsim: save: expected one of int8, got 'int4'"),
        (lambda Q, D: lik_ops.maxsim(Q, D, save=True), TypeError, "maxsim: save: expected one of int8, got bool"),
        (
            lambda Q, D: lik_ops.maxsim(Q, D, save="int8", recompute=True),
            ValueError,
            "maxsim: recompute: expected False",
        ),
        (lambda Q, D: lik_ops.maxsim(Q, list(D), save="int8"), TypeError, "maxsim: D: expected a dense Tensor with"),
        (lambda Q, D: lik_ops.maxsim(Q, quantize(D), save="int8"), TypeError, "D: expected a dense Tensor .*Quantized"),
        (lambda Q, D: lik_ops.maxsim_pairs(list(Q), D, save="int8"), TypeError, "maxsim_pairs: Q: expected a dense"),
        (lambda Q, D: lik_ops.maxsim(Q, D[..., :7], save="int8"), ValueError, "maxsim: D: expected d = 96 as in Q"),
        (lambda Q, D: lik_ops.maxsim(Q, None, save="int8"), TypeError, "maxsim: D: expected a Tensor, got NoneType"),
        (
            lambda Q, D: lik_ops.MaxSimScorer(save="int8", recompute=True),
            ValueError,
            "MaxSimScorer: recompute: expected",
        ),
    ],
)
def test_error_names_the_invalid_argument(call, error, message):
    Q, D, *_ = inputs(PORTABLE, False)
    with pytest.raises(error, match=message):
        call(Q, D)


def _run_backward(**changed):
    Q, D, *_ = inputs(PORTABLE, False)
    scores, argmax, data, scale = lik.maxsim_fwd_int8(Q, D, None, None, None, False, torch.int16, "auto")
    given = {"grad_scores": scores, "Q": Q, "data": data, "scale": scale, "argmax": argmax} | changed
    return lik.maxsim_bwd_int8(*given.values(), None, None, False, False, [True, True, False])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"data": torch.zeros(9, 40, 96)}, TypeError, "maxsim_bwd_int8: data: expected torch.int8, got torch.float32"),
        ({"scale": torch.zeros(9, 40).double()}, TypeError, "scale: expected torch.float32, got torch.float64"),
        ({"scale": torch.zeros(9, 41)}, ValueError, r"scale: expected \[9, 40\], got \[9, 41\]"),
        ({"argmax": torch.zeros(9, 5, 7).short()}, ValueError, r"argmax: expected \[9, 6, 7\], got \[9, 5, 7\]"),
    ],
)
@pytest.mark.skipif(INTERPRETING, reason="checks of the operator, which no kernel has to run for")
def test_raw_backward_validates_its_arguments(changed, error, message):
    with pytest.raises(error, match=message):
        _run_backward(**changed)


@pytest.mark.gpu
def test_documents_beyond_int32():
    """With more than 2^31 elements, the codes and the gradient of the last document are correct."""
    Nd, Ld, d = 4_200_000, 4, 128
    D = torch.zeros(Nd, Ld, d, dtype=torch.float16, device="cuda")
    D[-3:] = torch.randn(3, Ld, d, device="cuda")
    Q = torch.randn(1, 2, d, device="cuda").half().requires_grad_()
    upstream = torch.zeros(1, Nd, device="cuda")
    upstream[:, -3:] = 1
    found = torch.autograd.grad(lik_ops.maxsim(Q, D, save="int8"), Q, upstream)
    expected = torch.autograd.grad(lik_ops.maxsim(Q, D[-3:].clone(), save="int8").sum(), Q)
    torch.testing.assert_close(found, expected)
