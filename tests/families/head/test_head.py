"""Test MaxSim of hidden states against the fp64 formula: scores, gradients, masks, empty and strided inputs, bits."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import lik_ops
from lik_ops import reference
from lik_ops.core.arguments import score_dtype

from ...support.common import INTERPRETING, PLACES, Inputs, Problem, build, override_setting

at_places = pytest.mark.parametrize("place", PLACES, ids=str)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-5, torch.float64: 1e-12}
EVERYTHING = {"q_mask": "holes", "d_mask": "empty_some", "weight": True}


@dataclass(frozen=True)
class Hidden(Problem):
    """`Problem` whose documents are hidden states of `width` features, for a head of d."""

    values: str = "normal"
    Nq: int = 2
    Nd: int = 5
    width: int = 40
    bias: bool = True
    normalize: bool = True


PROBLEMS = [
    Hidden(),
    Hidden(bias=False, normalize=False, **EVERYTHING),
    Hidden(Ld=21, Lq=7, d=24, width=100, **EVERYTHING),
    Hidden(Nq=1, Nd=7, Ld=33, d=20, width=17, d_mask="holes", strides="sliced"),
    Hidden(Nq=9, Lq=20, Nd=3, d=130, width=64, q_mask="empty_some", normalize=False),
    Hidden(Nq=3, d_mask="prefix", strides="transposed", weight=True, bias=False),
    Hidden(layout="flat", d_mask="holes"),
    Hidden(layout="flat_q", q_mask="integer", d_mask="integer"),
    Hidden(layout="flat_d", d=1, Ld=1, width=1),
    # Few query rows and long documents: on a GPU the tokens are scored from registers.
    Hidden(Ld=70, width=48, d_mask="holes", weight=True),
    Hidden(Nq=9, Lq=7, Nd=4, Ld=90, d=32, q_mask="holes", d_mask="empty_some"),
    Hidden(Nq=1, Lq=20, Nd=3, Ld=100, d=20, width=50, bias=False, normalize=False, strides="transposed"),
    # Few query rows: the backward copies the tokens that are an argmax.
    Hidden(Nq=1, Lq=5, Nd=4, Ld=60, **EVERYTHING),
    Hidden(Nq=2, Lq=3, Nd=3, Ld=96, d=24, width=300, normalize=False, d_mask="empty_some", strides="sliced"),
    Hidden(Nq=2, Lq=3, Nd=3, Ld=50, values="integer", d_mask="holes", strides="transposed"),
    Hidden(Nq=3, Lq=9, Nd=2, Ld=240, d=20, width=24, bias=False, q_mask="empty_some", weight=True),
    # More features than a program holds.
    Hidden(Nq=1, Nd=3, Lq=3, Ld=11, d=300, width=20, d_mask="empty_some", weight=True),
    Hidden(Nq=1, Nd=2, Lq=2, Ld=9, d=513, width=24, normalize=False, strides="sliced"),
]


def draw(p: Hidden, device: str) -> tuple[Inputs, Tensor, Tensor | None]:
    """Return Q and H with their masks and weights, then W and b."""
    x = build(replace(p, d=p.width, seed=1), device)
    x.Q = build(p, device).Q
    generator = torch.Generator().manual_seed(2)
    W = (torch.randn(p.d, p.width, generator=generator) / p.width**0.5).to(device, p.dtype)
    b = torch.randn(p.d, generator=generator).to(device, p.dtype) / 2 if p.bias else None
    if x.q_mask is not None:
        x.Q = torch.where((x.q_mask != 0)[..., None], build(replace(p, q_mask="none"), device).Q, torch.nan)
    return x, W, b


def score(function, x, W, b, normalize):
    return function(x.Q, x.D, W, b, x.q_mask, x.d_mask, q_weight=x.q_weight, normalize=normalize)


def step(function, x, W, b, normalize, upstream):
    """Return the scores and the gradients of Q, H, W, and of b and the weights if present."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in (x.Q, x.D, W, b, x.q_weight)]
    Q, H, W, b, w = leaves
    scores = score(function, replace(x, Q=Q, D=H, q_weight=w), W, b, normalize)
    kept = torch.where(scores.isfinite(), scores, 0)  # scores of -inf have no gradient
    return scores.detach(), torch.autograd.grad(kept, [t for t in leaves if t is not None], upstream.to(scores))


def winners(x, W, b, normalize):
    """Return the argmax of the operator, because rounding may select another token than the formula."""
    Q, q_mask, w = (t if t is None or x.Q.dim() == 3 else t[None] for t in (x.Q, x.q_mask, x.q_weight))
    H, d_mask = (t if t is None or x.D.dim() == 3 else t[None] for t in (x.D, x.d_mask))
    masks = (None if t is None else t != 0 for t in (q_mask, d_mask))
    return torch.ops.lik.maxsim_from_hidden_fwd(Q, H, W, b, *masks, w, normalize, torch.int32)[1].transpose(0, 1)


def gradients_at(argmax, x, W, b, normalize, upstream):
    """Return the gradients of the formula for a given argmax."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in (x.Q, x.D, W, b, x.q_weight)]
    Q, H, W, b, w = leaves
    D = torch.nn.functional.linear(H, W, b)
    D = torch.nn.functional.normalize(D, dim=-1) if normalize else D
    Q, w = (t if t is None or x.Q.dim() == 3 else t[None] for t in (Q, w))
    scores = reference.maxsim_at(Q, D if x.D.dim() == 3 else D[None], argmax, q_weight=w)
    given = [t for t in leaves if t is not None]
    return torch.autograd.grad(scores, given, upstream.to(scores).view(scores.shape), materialize_grads=True)


def in_fp64(x, W, b):
    return x.to64(), W.double(), None if b is None else b.double()


def check(p, found, expected):
    found, expected = found.double(), expected.double()
    assert found.shape == expected.shape
    finite = expected.isfinite()
    assert torch.equal(found[~finite], expected[~finite]), p
    error = (found - expected)[finite].abs()
    largest = max(1.0, float(expected[finite].abs().max())) if error.numel() else 1.0
    assert not error.numel() or float(error.max()) <= TOLERANCE[p.dtype] * largest, (p, float(error.max()), largest)


@at_places
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_scores_and_gradients_match_reference(place, number):
    for dtype in place.some_dtypes(number):
        p = replace(PROBLEMS[number], dtype=dtype)
        x, W, b = draw(p, place.device)
        upstream = torch.randn(score(reference.maxsim_from_hidden, *in_fp64(x, W, b), p.normalize).shape)
        upstream = upstream.to(place.device)
        with place.use():
            alone = score(lik_ops.maxsim_from_hidden, x, W, b, p.normalize)
            scores, grads = step(lik_ops.maxsim_from_hidden, x, W, b, p.normalize, upstream)
            argmax = winners(x, W, b, p.normalize)
        expected = score(reference.maxsim_from_hidden, *in_fp64(x, W, b), p.normalize)
        expected_grads = gradients_at(argmax, *in_fp64(x, W, b), p.normalize, upstream)
        assert scores.dtype == alone.dtype == score_dtype(dtype)
        check(p, scores, expected)
        check(p, alone, expected)
        leaves = [t for t in (x.Q, x.D, W, b, x.q_weight) if t is not None]
        for leaf, g, e in zip(leaves, grads, expected_grads, strict=True):
            assert g.dtype == leaf.dtype
            check(p, g, e)


def draw_repeated_argmax(Nd, Nq, Lq, Ld):
    """Draw an argmax with repeated tokens and with -1, of few tokens and of all."""
    generator = torch.Generator().manual_seed(0)
    few = torch.randint(-1, 4, (Nd, Nq, Lq), generator=generator)
    return torch.where(torch.rand(Nd, 1, 1, generator=generator) < 0.5, few, Ld - 1 - few.abs()).int()


@at_places
def test_argmax_tokens_are_copied_once_and_written_back(place):
    from lik_ops.families.head import portable

    functions = portable.PORTABLE_FUNCTIONS
    if place.backend == "triton":
        from lik_ops.families.head import gpu

        functions = gpu._HEAD_PARTS
    for Nd, Nq, Lq, Ld, width in ((3, 1, 5, 40, 7), (2, 3, 11, 300, 270), (4, 1, 1, 8, 3)):
        argmax = draw_repeated_argmax(Nd, Nq, Lq, Ld).to(place.device)
        H = torch.randn(Nd, Ld + 1, 2 * width, device=place.device)[:, 1:, ::2]
        copies, slots = functions.gather(H, argmax)
        tokens, own = argmax.flatten(1).tolist(), slots.flatten(1).tolist()
        expected_H = torch.zeros(Nd, Ld, width, device=place.device)
        gradient = torch.randn(Nd, Nq * Lq, width, device=place.device)
        for j in range(Nd):
            assert own[j] == [tokens[j].index(t) if t >= 0 else -1 for t in tokens[j]]
            for r, t in enumerate(tokens[j]):
                is_slot = t >= 0 and own[j][r] == r
                assert torch.equal(copies[j, r], H[j, t] if is_slot else torch.zeros_like(H[j, 0]))
                if is_slot:
                    expected_H[j, t] = gradient[j, r]
        found = torch.zeros(Nd, Ld, width, device=place.device)
        functions.scatter(gradient, argmax, slots, found)
        assert torch.equal(found, expected_H)


@at_places
@pytest.mark.parametrize("normalize", [False, True])
def test_copying_argmax_tokens_keeps_the_gradients(place, normalize, monkeypatch):
    from lik_ops.families.head import portable

    p = Hidden(Nq=2, Lq=4, Nd=5, Ld=80, width=48, d=20, normalize=normalize, **EVERYTHING)
    x, W, b = draw(p, place.device)
    upstream = torch.randn(p.Nq, p.Nd, device=place.device)
    with place.use():
        found = step(lik_ops.maxsim_from_hidden, x, W, b, normalize, upstream)[1]
        monkeypatch.setattr(portable, "MIN_TOKENS_PER_ROW", 10**6)
        expected = step(lik_ops.maxsim_from_hidden, x, W, b, normalize, upstream)[1]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE[p.dtype], atol=TOLERANCE[p.dtype])


def test_reference_is_maxsim_of_a_normalized_linear_layer():
    Q, H = torch.randn(2, 3, 4).double(), torch.randn(5, 6, 7).double()
    layer = torch.nn.Linear(7, 4).double()
    D = torch.nn.functional.normalize(layer(H), dim=-1)
    found = reference.maxsim_from_hidden(Q, H, layer.weight, layer.bias)
    torch.testing.assert_close(found, reference.maxsim(Q, D))


@pytest.mark.skipif(INTERPRETING, reason="the kernels have no fp64")
@pytest.mark.parametrize("normalize", [False, True])
def test_gradcheck(normalize):
    p = Hidden(dtype=torch.float64, d=3, width=4, Nd=2, Lq=3, Ld=4, poison=False, normalize=normalize, **EVERYTHING)
    x, W, b = draw(replace(p, d_mask="holes"), "cpu")
    x.Q, x.d_mask[..., 0] = x.Q.nan_to_num(), True

    def function(Q, H, W, b, w):
        return lik_ops.maxsim_from_hidden(Q, H, W, b, x.q_mask, x.d_mask, q_weight=w, normalize=normalize)

    leaves = [t.detach().requires_grad_() for t in (x.Q, x.D, W, b, x.q_weight)]
    assert torch.autograd.gradcheck(function, leaves)


@at_places
@pytest.mark.parametrize("normalize", [False, True])
def test_single_gradients_equal_joint_gradients(place, normalize):
    for dtype in place.some_dtypes(1):
        p = Hidden(dtype=dtype, **EVERYTHING)
        x, W, b = draw(p, place.device)
        given = x.Q, x.D, W, b, x.q_mask, x.d_mask, x.q_weight
        with place.use():
            scores, argmax = torch.ops.lik.maxsim_from_hidden_fwd(*given, normalize, torch.int32)
            upstream = torch.randn(scores.shape, device=place.device)
            args = upstream.to(scores), *given[:4], argmax, *given[4:], normalize
            everything = torch.ops.lik.maxsim_from_hidden_bwd(*args, [True] * 5)
            again = torch.ops.lik.maxsim_from_hidden_bwd(*args[:5], argmax.flatten()[:0], *args[6:], [True] * 5)
            for n, e in enumerate(everything):
                found = torch.ops.lik.maxsim_from_hidden_bwd(*args, [m == n for m in range(5)])
                assert torch.equal(found[n], e) and torch.equal(again[n], e), n
                assert all(g.shape == (0,) for m, g in enumerate(found) if m != n)


@at_places
def test_a_bias_gradient_is_rounded_once(place):
    """Without `normalize`, winners do not decide this gradient. The terms cancel, and rounded terms would not."""
    generator = torch.Generator().manual_seed(3)
    for dtype in (torch.float16, torch.float32) if INTERPRETING else (torch.float16, torch.bfloat16, torch.float32):
        p = Hidden(Nq=3, Nd=6, Lq=8, normalize=False, dtype=dtype, **EVERYTHING)
        x, W, b = draw(p, place.device)
        upstream = torch.randn(3, 3, generator=generator)
        upstream = torch.cat([upstream, 0.01 - upstream], 1).to(place.device)
        with place.use():
            given = x.Q, x.D, W, b, x.q_mask, x.d_mask, x.q_weight, False
            argmax = torch.ops.lik.maxsim_from_hidden_fwd(*given, torch.int32)[1]
            args = upstream, *given[:4], argmax, *given[4:]
            found = torch.ops.lik.maxsim_from_hidden_bwd(*args, [True] * 5)[3]
            alone = torch.ops.lik.maxsim_from_hidden_bwd(*args, [n == 3 for n in range(5)])[3]
        assert torch.equal(found, alone)
        exact, *head = in_fp64(x, W, b)
        winners, sizes = argmax.transpose(0, 1), replace(exact, Q=exact.Q.abs(), q_weight=exact.q_weight.abs())
        expected = gradients_at(winners, exact, *head, False, upstream)[3]
        terms = gradients_at(winners, sizes, *head, False, upstream.abs())[3]
        allowed = torch.finfo(dtype).eps / 2 * expected.abs() + 64 * torch.finfo(torch.float32).eps * terms
        assert bool(((found.double() - expected).abs() <= allowed).all()), dtype


@at_places
@pytest.mark.parametrize("normalize", [False, True])
def test_masked_tokens_reach_no_gradient(place, normalize):
    """Masked tokens may hold any value. A query without kept tokens scores 0, and an empty document -inf."""
    Q, H = torch.randn(3, 4, 16, device=place.device), torch.randn(4, 18, 24, device=place.device)
    W, b = torch.randn(16, 24, device=place.device), torch.randn(16, device=place.device)
    q_mask = torch.ones(3, 4, dtype=torch.bool, device=place.device)
    d_mask = torch.ones(4, 18, dtype=torch.bool, device=place.device)
    q_mask[1], d_mask[2], d_mask[0, 5:9] = False, False, False
    Q[1], H[2], H[0, 5:7], H[0, 7:9] = torch.nan, torch.nan, torch.inf, torch.nan
    leaves = [t.requires_grad_() for t in (Q, H, W, b)]
    with place.use():
        scores = lik_ops.maxsim_from_hidden(*leaves, q_mask, d_mask, normalize=normalize)
        upstream = torch.ones_like(scores)
        upstream[:, 2] = torch.nan
        grads = torch.autograd.grad(scores, leaves, upstream)
    assert torch.equal(scores[1], torch.zeros_like(scores[1]))
    assert bool((scores[[0, 2], 2] == -torch.inf).all())
    assert all(bool(g.isfinite().all()) for g in grads)
    assert not grads[0][1].any() and not grads[1][2].any() and not grads[1][0, 5:9].any()
    assert all(bool(g.any()) for g in grads)


@at_places
def test_nan_token_affects_only_its_document(place):
    Q, H = torch.randn(2, 3, 16, device=place.device), torch.randn(4, 9, 24, device=place.device)
    H[1, 4, 3] = torch.nan
    with place.use():
        scores = lik_ops.maxsim_from_hidden(Q, H, torch.ones(16, 24, device=place.device))
    assert scores.isnan().any(0).tolist() == [False, True, False, False]


@at_places
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize(("width", "d"), [(40, 24), (100, 300), (17, 130)])
def test_fp32_tokens_have_the_error_of_their_terms(place, width, d, tf32):
    """The score of a one-hot query token is a feature of the token."""
    H, W, b = (torch.randn(shape, device=place.device) for shape in ((3, 1, width), (d, width), (d,)))
    Q = torch.eye(d, device=place.device)[:, None]
    with place.use(), override_setting(torch.backends.cuda.matmul, "fp32_precision", "tf32" if tf32 else "ieee"):
        found = lik_ops.maxsim_from_hidden(Q, H, W, b, normalize=False).T
    expected = torch.nn.functional.linear(H[:, 0].double(), W.double(), b.double())
    bound = torch.nn.functional.linear(H[:, 0].abs(), W.abs(), b.abs()).double() * 2 ** (-10 if tf32 else -19)
    assert ((found - expected).abs() <= bound).all()


@at_places
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_infinite_hidden_features_give_infinite_scores(place, dtype):
    """No product of infinity with a term that is zero reaches the sums."""
    H, Q = torch.randn(2, 3, 24).to(place.device, dtype), torch.ones(1, 2, 1, device=place.device, dtype=dtype)
    H[0, 1, 5] = torch.inf
    W = torch.ones(1, 24, device=place.device, dtype=dtype)
    for sign in (1, -1):
        H[1, :, 7] = -sign * torch.inf
        with place.use():
            scores = lik_ops.maxsim_from_hidden(Q * sign, H, W, normalize=False)
        expected = reference.maxsim_from_hidden((Q * sign).double(), H.double(), W.double(), normalize=False)
        assert (scores.isinf() == expected.isinf()).all() and not scores.isnan().any()
        assert torch.equal(scores.isposinf(), expected.isposinf())


@at_places
def test_empty_inputs_score_like_maxsim(place):
    for Nq, Nd, Lq, Ld in ((2, 3, 4, 0), (2, 3, 0, 5), (2, 0, 4, 5), (0, 3, 4, 5)):
        Q, H = torch.randn(Nq, Lq, 8, device=place.device), torch.randn(Nd, Ld, 6, device=place.device)
        W, b = torch.randn(8, 6, device=place.device), torch.randn(8, device=place.device)
        with place.use():
            leaves = [t.requires_grad_() for t in (Q, H, W, b)]
            scores = lik_ops.maxsim_from_hidden(*leaves)
            assert torch.equal(scores, lik_ops.maxsim(Q, H.new_zeros(Nd, Ld, 8)))
            grads = torch.autograd.grad(scores, leaves, torch.ones_like(scores))
        assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, leaves, strict=True))


@at_places
def test_tokens_of_zero_norm_match_reference(place):
    """Tokens that the head maps to zero stay zero, and their gradient is divided by the minimum norm."""
    Q, H = torch.ones(1, 2, 16, device=place.device), torch.zeros(2, 3, 24, device=place.device)
    H[1] = 1
    leaves = [t.requires_grad_() for t in (Q, H, torch.ones(16, 24, device=place.device))]
    with place.use():
        scores = lik_ops.maxsim_from_hidden(*leaves)
        grads = torch.autograd.grad(scores.sum(), leaves)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    expected = reference.maxsim_from_hidden(*doubles)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=0)
    assert scores[0, 0] == 0
    for g, e in zip(grads, torch.autograd.grad(expected.sum(), doubles), strict=True):
        torch.testing.assert_close(g.double(), e, rtol=1e-4, atol=1e-4 * float(e.abs().max()))


@at_places
@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 16, 17])
def test_a_score_does_not_depend_on_its_batch(place, number):
    for dtype in place.some_dtypes(number):
        p = replace(PROBLEMS[number], dtype=dtype)
        x, W, b = draw(p, place.device)
        with place.use():
            whole = score(lik_ops.maxsim_from_hidden, x, W, b, p.normalize)
            for i in range(p.Nq):
                for j in range(p.Nd):
                    q_mask, w = (None if t is None else t[i : i + 1] for t in (x.q_mask, x.q_weight))
                    d_mask = None if x.d_mask is None else x.d_mask[j : j + 1]
                    one = Inputs(x.Q[i : i + 1], x.D[j : j + 1], q_mask, d_mask, w)
                    assert torch.equal(score(lik_ops.maxsim_from_hidden, one, W, b, p.normalize)[0, 0], whole[i, j])


@at_places
def test_requesting_argmax_keeps_score_bits(place):
    for dtype in place.some_dtypes(1):
        x, W, b = draw(Hidden(Ld=80, d=32, dtype=dtype), place.device)
        given = x.Q, x.D, W, b, None, None, None, True
        with place.use():
            alone, nothing = torch.ops.lik.maxsim_from_hidden_fwd(*given, None)
            scores, argmax = torch.ops.lik.maxsim_from_hidden_fwd(*given, torch.int16)
        assert nothing.shape == (0,) and argmax.shape == (5, 2, 5)
        assert torch.equal(scores, alone)


@pytest.mark.skipif(not INTERPRETING, reason="of the kernels")
def test_unfused_loop_equals_fused_loop(monkeypatch):
    """Tensor cores without wgmma run this loop."""
    from lik_ops.families.head import configs as head_configs

    def apart(*args):
        found = made(*args)
        return replace(found, config=found.config._replace(FUSED_LOOP=False))

    made, (place,) = head_configs.configure_scores, PLACES
    x, W, b = draw(Hidden(Nq=3, Ld=75, d=20, dtype=torch.float16, **EVERYTHING), place.device)
    with place.use():
        expected = score(lik_ops.maxsim_from_hidden, x, W, b, True)
        monkeypatch.setattr(head_configs, "configure_scores", apart)
        assert torch.equal(score(lik_ops.maxsim_from_hidden, x, W, b, True), expected)


@pytest.mark.skipif(not INTERPRETING, reason="of the kernels")
@pytest.mark.parametrize("programs", [2, 3])
def test_scores_do_not_depend_on_the_program_count(monkeypatch, programs):
    """Shares of the programs differ by one document and are cut within a tile."""
    from lik_ops.families.head import configs as head_configs

    made, (place,) = head_configs.configure_scores, PLACES
    x, W, b = draw(Hidden(Nq=1, Nd=7, Ld=70, d=16, width=48, dtype=torch.float16, d_mask="holes"), place.device)
    with place.use():
        expected = score(lik_ops.maxsim_from_hidden, x, W, b, True)
        monkeypatch.setattr(head_configs, "configure_scores", lambda *args: replace(made(*args), walkers=programs))
        assert torch.equal(score(lik_ops.maxsim_from_hidden, x, W, b, True), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("Nq", "Lq", "Ld", "width", "d"),
    [(1, 32, 300, 768, 128), (3, 32, 300, 768, 128), (3, 20, 64, 384, 96), (1, 32, 1000, 100, 256), (2, 1, 77, 64, 8)],
)
def test_scores_from_registers_equal_scores_from_memory(dtype, Nq, Lq, Ld, width, d):
    """Tokens scored from registers give the same bits as tokens stored in memory."""
    from lik_ops.families.head import configs as head_configs
    from lik_ops.gpu.runtime.arguments import architecture

    arch = architecture(torch.device("cuda"))
    Nd = 2 * head_configs.count_programs(arch) + 3
    assert head_configs.is_fused(arch, dtype, Nq, Nd, Lq, Ld, d) or arch.name not in head_configs._FUSED_ARCHITECTURES
    Q = torch.nn.functional.normalize(torch.randn(Nq, Lq, d, device="cuda"), dim=-1).to(dtype)
    H = torch.randn(Nd, Ld, width, device="cuda", dtype=dtype)
    W, b = torch.randn(d, width, device="cuda", dtype=dtype) / width**0.5, torch.randn(d, device="cuda", dtype=dtype)
    mask = torch.rand(Nd, Ld, device="cuda") > 0.2
    for bias, d_mask, normalize in ((b, None, True), (None, mask, True), (b, mask, False)):
        given = Q, H, W, bias, None, d_mask, None, normalize
        few, _ = torch.ops.lik.maxsim_from_hidden_fwd(*given, None)
        many, _ = torch.ops.lik.maxsim_from_hidden_fwd(*given, torch.int32)
        assert torch.equal(few, many)
        part = None if d_mask is None else d_mask[5:9]
        assert torch.equal(few[:, 5:9], lik_ops.maxsim_from_hidden(Q, H[5:9], W, bias, None, part, normalize=normalize))
        n = 8
        last = None if d_mask is None else d_mask[-n:]
        doubles = [None if t is None else t.double() for t in (Q, H[-n:], W, bias)]
        expected = reference.maxsim_from_hidden(*doubles, None, last, normalize=normalize)
        assert float((few[:, -n:] - expected).abs().max()) <= TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))


@at_places
def test_scoring_in_document_slices_matches_one_pass(place, monkeypatch):
    from lik_ops.families.head import portable as head_portable

    for dtype in place.some_dtypes(0):
        p = Hidden(dtype=dtype, Nd=7, **EVERYTHING)
        x, W, b = draw(p, place.device)
        upstream = torch.randn(p.Nq, p.Nd, device=place.device)
        with place.use():
            expected = step(lik_ops.maxsim_from_hidden, x, W, b, True, upstream)
            monkeypatch.setattr(head_portable, "MAX_GRADIENT_BYTES", 1)
            shrink_slices(monkeypatch)
            found = step(lik_ops.maxsim_from_hidden, x, W, b, True, upstream)
            monkeypatch.undo()
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@at_places
def test_sums_of_some_documents_at_a_time_give_the_same_bits(place, monkeypatch):
    """More features than a program holds are stored in fp32, and then divided by their norms."""
    if place.device == "cpu" and not INTERPRETING:
        pytest.skip("of the kernels")
    from lik_ops.families.head import gpu as head_gpu
    from lik_ops.gpu import backend

    x, W, b = draw(Hidden(Nq=1, Nd=5, Lq=3, Ld=7, d=300, width=20, dtype=torch.float16, d_mask="holes"), place.device)
    upstream, found = torch.randn(1, 5, device=place.device), []
    for documents in (5, 2, 1):
        monkeypatch.setattr(head_gpu, "_SUM_BYTES", documents * 7 * 300 * 4)
        with place.use():
            backend.forget()
            for _ in range(3):  # the last one is replayed
                scores, gradients = step(lik_ops.maxsim_from_hidden, x, W, b, True, upstream)
                found.append((scores, *gradients))
    backend.forget()
    assert all(torch.equal(a, e) for result in found for a, e in zip(result, found[0], strict=True))


def shrink_slices(monkeypatch):
    """Reduce the slices of both backends to one document."""
    from lik_ops.families.head import portable as head_portable

    monkeypatch.setattr(head_portable, "PORTABLE_FUNCTIONS", head_portable.PORTABLE_FUNCTIONS._replace(token_bytes=1))
    if INTERPRETING or torch.cuda.is_available():
        from lik_ops.families.head import gpu as gpu_head

        monkeypatch.setattr(gpu_head, "_HEAD_PARTS", gpu_head._HEAD_PARTS._replace(token_bytes=1))


@pytest.mark.skipif(INTERPRETING, reason="of the portable backend")
def test_portable_memory_is_below_a_third_of_the_tokens():
    """On a CPU, scoring needs memory for a slice of tokens only."""
    import resource

    Q, W = torch.randn(1, 8, 128), torch.randn(128, 32)
    H = torch.randn(1200, 300, 32)
    lik_ops.maxsim_from_hidden(Q, H[:2], W)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lik_ops.maxsim_from_hidden(Q, H, W)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 1200 * 300 * 128 * 4 / 3  # size of the tokens in fp32


WRONG = [
    ({"H": torch.randn(3, 5, 7)}, ValueError, "W: expected \\[8, 7\\], d_model as in H, got \\[8, 6\\]"),
    ({"W": torch.randn(9, 6)}, ValueError, "W: expected \\[8, 6\\], d as in Q, got \\[9, 6\\]"),
    ({"W": torch.randn(8, 6).half()}, TypeError, "W: expected the dtype of Q, torch.float32, got torch.float16"),
    ({"b": torch.randn(7)}, ValueError, "b: expected \\[8\\], d as in Q, got \\[7\\]"),
    ({"b": 1.0}, TypeError, "b: expected a Tensor or None, got float"),
    ({"H": torch.randn(2, 3, 5, 6)}, ValueError, "H: expected \\[Ld, d_model\\] or \\[Nd, Ld, d_model\\]"),
    ({"H": torch.randn(3, 5, 0)}, ValueError, "H: expected d_model >= 1"),
    ({"d_mask": torch.ones(3, 4)}, ValueError, "d_mask: expected shape \\[3, 5\\] to match H"),
    ({"d_mask": torch.ones(3, 5)}, TypeError, "d_mask: expected bool"),
    ({"normalize": 1}, TypeError, "normalize"),
    ({"q_weight": torch.ones(2, 4).half()}, TypeError, "q_weight"),
]


@pytest.mark.parametrize(("given", "error", "message"), WRONG)
def test_errors_name_the_argument(given, error, message):
    arguments = {"Q": torch.randn(2, 4, 8), "H": torch.randn(3, 5, 6), "W": torch.randn(8, 6)} | given
    with pytest.raises(error, match="^maxsim_from_hidden: " + message):
        lik_ops.maxsim_from_hidden(**arguments)


@pytest.mark.parametrize("name", ["b", "q_weight"])
def test_non_tensor_error_names_the_argument_in_autocast(name):
    given = {"Q": torch.randn(2, 4, 8), "H": torch.randn(3, 5, 6), "W": torch.randn(8, 6), name: [1.0]}
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=f"{name}: expected a Tensor or None"):
        lik_ops.maxsim_from_hidden(**given)
