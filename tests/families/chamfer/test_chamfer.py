"""Test Chamfer scores, argmax, and gradients against the formula, in every layout and for edge cases."""

import math

import pytest
import torch
from torch.autograd import forward_ad, gradcheck

import lik_ops
from lik_ops import reference

from ...support.common import INTERPRETING, PLACES, thin_out
from ...support.stack import (
    Compilations,
    assert_compiled_steps,
    assert_derives_no_further,
    assert_exported,
    assert_same,
    assert_vmap_is_a_loop,
    flops,
    losses,
    step,
)

metrics = pytest.mark.parametrize("metric", ["sqeuclidean", "l1"])
HALF = (torch.float16,) if INTERPRETING else (torch.float16, torch.bfloat16)  # the interpreter's bf16 product is wrong


@pytest.fixture(params=PLACES, ids=str)
def device(request):
    """Yield the device of a place and use its backend."""
    with request.param.use():
        yield request.param.device


def clouds(N, M, d, device, dtype=torch.float32, B=2):
    return torch.randn(B, N, d).to(device, dtype), torch.randn(B, M, d).to(device, dtype)


def nearest(P, R, metric="sqeuclidean", p_lengths=None, r_lengths=None):
    return torch.ops.lik.chamfer_fwd(P, R, p_lengths, r_lengths, metric)


def distances(P, R, metric):
    x = P.double()[:, :, None] - R.double()[:, None]
    return x.square().sum(-1) if metric == "sqeuclidean" else x.abs().sum(-1)


@metrics
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(
    ("N", "M", "d"), [(1, 1, 3), (70, 130, 3), (33, 20, 1), (5, 200, 2), (50, 40, 4), (40, 60, 16), (40, 60, 20)]
)
def test_distances_and_argmax_match_formula(device, metric, dtype, N, M, d):
    _check_nearest(device, metric, dtype, N, M, d)


@metrics
def test_fp64_distances_and_argmax_match_formula(metric):
    _check_nearest("cpu", metric, torch.float64, 70, 130, 20)


def _check_nearest(device, metric, dtype, N, M, d):
    P, R = clouds(N, M, d, device, dtype)
    expected = distances(P, R, metric)
    of_P, at_P, of_R, at_R = nearest(P, R, metric)
    for found, at, axis in ((of_P, at_P, 2), (of_R, at_R, 1)):
        least = expected.min(axis).values
        torch.testing.assert_close(found.double(), least, rtol=1e-6, atol=0)
        chosen = expected.gather(axis, at.long().unsqueeze(axis)).squeeze(axis)
        torch.testing.assert_close(chosen, least, rtol=1e-5, atol=1e-6)
        assert at.dtype == torch.int32


@metrics
@pytest.mark.parametrize("d", [3, 6, 24])
def test_distance_and_gradients_match_reference(device, metric, d):
    P, R = clouds(60, 45, d, device)
    w, v = torch.rand(2, 60, device=device), torch.rand(2, 45, device=device)
    n, m = torch.tensor([60, 17], device=device), torch.tensor([20, 45], device=device, dtype=torch.int32)
    grads = []
    for function, dtype in ((lik_ops.chamfer_distance, torch.float32), (reference.chamfer_distance, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (P, R, w, v)]
        p, r, a, b = leaves
        found = function(p, r, metric=metric, p_lengths=n, r_lengths=m, p_weight=a, r_weight=b)
        (found * torch.tensor([1.0, -2.0], device=device)).sum().backward()
        grads.append([found, *(x.grad for x in leaves)])
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert grads[0][1][1, 17:].count_nonzero() == 0


@metrics
def test_gradcheck(metric):
    P, R = (x.requires_grad_() for x in clouds(6, 5, 3, "cpu", torch.float64))
    w = torch.rand(2, 6, dtype=torch.float64, requires_grad=True)
    n = torch.tensor([6, 4])
    assert gradcheck(lambda P, R, w: lik_ops.chamfer_distance(P, R, metric=metric, p_lengths=n, p_weight=w), (P, R, w))


@pytest.mark.parametrize("d", [3, 20])
def test_duplicate_points_select_the_lowest_index(device, d):
    P, R = clouds(40, 50, d, device, B=1)
    R = torch.cat([R, R, R], 1)
    P = torch.cat([P, P], 1)
    _, at_P, _, at_R = nearest(P, R)
    assert at_P.max() < 50
    assert at_R.max() < 40
    assert torch.equal(at_P[:, :40], at_P[:, 40:])


@metrics
@pytest.mark.parametrize("d", [1, 3, 16])
def test_ties_of_integer_points_select_the_lowest_index(device, metric, d):
    """Voxels have such ties, both between neighbors and between points far apart in the order of their cloud."""
    P, R = (torch.randint(0, 3, (1, n, d)).float() for n in (150, 170))
    P, R = torch.cat([P, P[:, ::3]], 1).to(device), torch.cat([R, R[:, ::2]], 1).to(device)
    c = distances(P, R, metric)
    for found, axis in zip(nearest(P, R, metric)[1::2], (2, 1), strict=True):
        first = (c == c.min(axis, keepdim=True).values).int().argmax(axis)
        assert torch.equal(found.long(), first)


@pytest.mark.parametrize("far", [math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("d", [3, 16, 20])
def test_infinite_or_huge_coordinate_has_infinite_distance(device, d, far):
    P, R = clouds(40, 130, d, device)
    P[0, :, 2] = 0
    R[0, 77, 1:3] = far
    for of_P, of_R in (nearest(P, R)[::2], nearest(R, P)[2::-2]):
        assert of_P.isfinite().all()
        assert of_R.isinf().nonzero().tolist() == [[0, 77]]


@pytest.mark.parametrize("d", [15, 16, 40])
def test_distances_survive_overflow_of_squared_coordinates(device, d):
    """Squared coordinates overflow. Twice the products also overflow, and then select the wrong point."""
    P = torch.full((1, 2, d), 3e19, device=device)
    expected = 2 * distances(P, P + 1e18, "sqeuclidean").float().amin((1, 2))
    torch.testing.assert_close(lik_ops.chamfer_distance(P, P + 1e18), expected)
    P = torch.full((1, 1, d), math.sqrt(3e38 / d), device=device)
    of_P, at_P, _, _ = nearest(P, torch.cat([P * 0.8, P], 1))
    assert of_P.tolist() == [[0]]
    assert at_P.tolist() == [[1]]


@pytest.mark.parametrize("d", thin_out((20, 40), 2))
def test_terms_in_chunks_have_the_same_bits(device, d, monkeypatch):
    if device == "cpu" and not INTERPRETING:
        pytest.skip("the portable backend has no terms")
    launches = pytest.importorskip("lik_ops.families.chamfer.gpu")
    P, R = clouds(300, 530, d, device, B=3)
    n = torch.tensor([300, 7, 260], device=device)
    expected = nearest(P, R, p_lengths=n)
    for rows in (256, 768, 1024):  # a cloud in parts; one cloud at a time; the small cloud of several
        monkeypatch.setattr(launches, "_MAX_TERM_BYTES", rows * 4 * 64)
        assert all(torch.equal(a, b) for a, b in zip(nearest(P, R, p_lengths=n), expected, strict=True))


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_points_of_mixed_magnitude_match_formula(device, scale):
    """Points of one cloud differ in size, because each row is split with its own scale."""
    P, R = clouds(60, 70, 20, device, B=1)
    P[:, ::2] *= scale
    R[:, ::2] *= scale
    expected = distances(P, R, "sqeuclidean")
    for found, axis in zip(nearest(P, R)[::2], (2, 1), strict=True):
        torch.testing.assert_close(found.double(), expected.min(axis).values, rtol=1e-5, atol=0)


@pytest.mark.parametrize("d", [3, 20])
def test_padding_values_affect_no_distance_or_gradient(device, d):
    P, R = clouds(64, 90, d, device, B=3)
    n, m = torch.tensor([64, 10, 0], device=device), torch.tensor([33, 90, 5], device=device)
    expected = nearest(P, R, "sqeuclidean", n, m)
    for b in range(3):
        P[b, n[b] :], R[b, m[b] :] = math.nan, math.inf
    P.requires_grad_()
    w = torch.rand(3, 64, device=device)
    for b in range(3):
        w[b, n[b] :] = math.nan
    for a, b in zip(nearest(P.detach(), R, "sqeuclidean", n, m), expected, strict=True):
        assert torch.equal(a, b)
    lik_ops.chamfer_distance(P, R, p_lengths=n, r_lengths=m, p_weight=w)[:2].sum().backward()
    assert P.grad.isfinite().all()
    assert P.grad[1, 10:].count_nonzero() == 0


@metrics
def test_distance_to_an_empty_cloud_is_infinite(device, metric):
    P, R = clouds(4, 5, 3, device)
    none = torch.zeros(2, 0, 3, device=device)
    assert lik_ops.chamfer_distance(P, none, metric=metric).tolist() == [math.inf] * 2
    assert lik_ops.chamfer_distance(none, R, metric=metric).tolist() == [math.inf] * 2
    assert lik_ops.chamfer_distance(none, none, metric=metric).tolist() == [0.0] * 2
    assert lik_ops.chamfer_distance(P[:0], R[:0], metric=metric).shape == (0,)
    lengths = torch.tensor([0, 3], device=device)
    found = lik_ops.chamfer_distance(P.requires_grad_(), R, metric=metric, p_lengths=lengths)
    assert found.isinf().tolist() == [True, False]
    found[1].backward()
    assert P.grad[0].count_nonzero() == 0
    weights = torch.zeros(2, 4, device=device)
    assert lik_ops.chamfer_distance(P, none, metric=metric, p_weight=weights).tolist() == [math.inf] * 2


@pytest.mark.parametrize("wrong", [-1, 6, 2**31])
def test_out_of_range_length_gives_nan(device, wrong):
    P, R = clouds(4, 5, 3, device)
    m = torch.tensor([wrong, 5], device=device)
    of_P, at_P, of_R, at_R = nearest(P, R, "l1", None, m)
    assert of_P[0].isnan().all()
    assert of_R[0].isnan().all()
    assert (at_P[0] == -1).all()
    assert (at_R[0] == -1).all()
    assert of_P[1].isfinite().all()
    assert lik_ops.chamfer_distance(P, R, r_lengths=m).isnan().tolist() == [True, False]


@metrics
@pytest.mark.parametrize("d", [3, 20])
def test_first_nan_point_is_nearest(device, metric, d):
    P, R = clouds(40, 130, d, device)
    R[0, 77, 1] = R[0, 101, 0] = math.nan
    of_P, at_P, of_R, at_R = nearest(P, R, metric)
    assert of_P[0].isnan().all()
    assert (at_P[0] == 77).all()
    assert of_R[0].isnan().nonzero().flatten().tolist() == [77, 101]
    assert at_R[0, 77] == 0
    assert of_P[1].isfinite().all()


@pytest.mark.parametrize("d", [3, 20])
def test_near_points_far_from_origin_match_formula(device, d):
    """The rounding error of squared coordinates alone would exceed the distances."""
    base = torch.randn(1, 1, d) * 100
    P, R = (base + torch.randn(1, n, d) for n in (50, 60))
    expected = distances(P, R, "sqeuclidean").min(2).values
    found = nearest(P.to(device), R.to(device))[0].cpu()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5 if d < 16 else 1e-2, atol=0)


@metrics
@pytest.mark.parametrize("d", [3, 24])
def test_bits_do_not_depend_on_the_batch(device, metric, d):
    P, R = clouds(60, 70, d, device, B=5)
    whole = nearest(P, R, metric)
    for b in range(5):
        for a, x in zip(nearest(P[b : b + 1], R[b : b + 1], metric), whole, strict=True):
            assert torch.equal(a, x[b : b + 1])
    back = nearest(R, P, metric)
    assert torch.equal(back[0], whole[2])


def test_strided_and_expanded_points_have_equal_bits(device):
    P, R = clouds(30, 40, 3, device)
    expected = nearest(P, R)
    strided = P.transpose(1, 2).contiguous().transpose(1, 2), torch.cat([R, R], 2)[..., :3]
    assert all(torch.equal(a, b) for a, b in zip(nearest(*strided), expected, strict=True))
    shared = R[:1].expand(2, -1, -1)
    assert torch.equal(nearest(P, shared)[0][1:], nearest(P[1:], R[:1])[0])


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_are_rounded_once(device, dtype):
    P, R = clouds(60, 45, 3, device, dtype)
    found, expected = [], []
    for grads, cast in ((found, lambda x: x), (expected, torch.Tensor.float)):
        p, r = P.detach().requires_grad_(), R.detach().requires_grad_()
        lik_ops.chamfer_distance(cast(p), cast(r)).sum().backward()
        grads += [p.grad, r.grad]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert found[0].dtype == dtype


def test_unbatched_clouds_match_a_batch_of_one(device):
    P, R = clouds(30, 40, 3, device, B=1)
    n = torch.tensor(20, device=device)
    found = lik_ops.chamfer_distance(P[0], R[0], p_lengths=n)
    assert found.shape == ()
    assert torch.equal(found, lik_ops.chamfer_distance(P, R, p_lengths=n[None])[0])


def test_gradients_exist_only_where_required(device):
    P, R = clouds(30, 40, 3, device)
    (expected,) = torch.autograd.grad(lik_ops.chamfer_distance(P.requires_grad_(), R).sum(), P)
    (found,) = torch.autograd.grad(lik_ops.chamfer_distance(P, R.requires_grad_()).sum(), P)
    assert torch.equal(found, expected)
    assert not lik_ops.chamfer_distance(P.detach(), R.detach()).requires_grad


@metrics
def test_fitting_losses_match_reference(device, metric):
    def fit(distance):
        torch.manual_seed(0)
        P = torch.randn(1, 40, 3, device=device, requires_grad=True)
        R = torch.randn(1, 50, 3, device=device)
        steps = 10 if INTERPRETING else 100
        return losses(lambda: distance(P, R, metric=metric).sum(), [P], lr=0.5, steps=steps)

    found, expected = fit(lik_ops.chamfer_distance), fit(reference.chamfer_distance)
    assert found[-1] < found[0] * (1 if INTERPRETING else 0.8)
    assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, expected, strict=True))


@pytest.mark.skipif(INTERPRETING, reason="what is compiled is not the kernels")
def test_compiled_steps_equal_eager(device):
    given = *clouds(30, 40, 3, device), torch.tensor([40, 11], device=device)
    assert_compiled_steps(lambda P, R, lengths: lik_ops.chamfer_distance(P, R, r_lengths=lengths), given)


def test_dynamic_compile_equals_eager_for_all_sizes():
    torch.compiler.reset()
    compilations = Compilations()
    compiled = torch.compile(lik_ops.chamfer_distance, fullgraph=True, dynamic=True, backend=compilations)
    for B, N, M in ((2, 5, 4), (3, 4, 7), (6, 9, 2)):  # torch guards on sizes that are equal in the first call
        P, R = clouds(N, M, 3, "cpu", B=B)
        assert torch.equal(compiled(P, R), lik_ops.chamfer_distance(P, R))
        lengths = {"p_lengths": torch.arange(B) % N, "r_lengths": torch.arange(B) % M}
        assert torch.equal(compiled(P, R, **lengths), lik_ops.chamfer_distance(P, R, **lengths))
    assert compilations.count == 2  # without and with lengths
    with pytest.raises((ValueError, torch._dynamo.exc.TorchDynamoException), match="R: expected B and d of P"):
        compiled(torch.randn(2, 3, 3), torch.randn(2, 3, 4))


def test_out_of_range_length_raises_under_checks():
    P, R = clouds(3, 4, 2, "cpu", B=1)
    with lik_ops.checks(), pytest.raises(ValueError, match=r"p_lengths: expected 0 to 3 tokens, got 9 at \[0\]"):
        lik_ops.chamfer_distance(P, R, p_lengths=torch.tensor([9]))


def test_exports_with_dynamic_sizes():
    def function(P, R, lengths):
        return lik_ops.chamfer_distance(P, R, metric="l1", r_lengths=lengths)

    given = *clouds(30, 40, 5, "cpu"), torch.tensor([40, 11])
    others = *clouds(7, 9, 3, "cpu", B=4), torch.tensor([9, 0, 3, 4])
    assert_exported(function, given, others, "chamfer_fwd")


def test_vmap_matches_a_loop(device):
    P, R = torch.randn(3, 2, 20, 3, device=device), torch.randn(2, 25, 3, device=device)
    assert_vmap_is_a_loop(lik_ops.chamfer_distance, (P, R), (0, None))


def test_unsupported_differentiation_raises(device):
    P, R = clouds(6, 5, 3, device)
    assert_derives_no_further(lambda P: lik_ops.chamfer_distance(P, R), P, "chamfer_distance")
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        lik_ops.chamfer_distance(forward_ad.make_dual(P, P), R)


@pytest.mark.parametrize("d", [3, 20])
def test_autocast_does_not_change_results(device, d):
    given = clouds(30, 40, d, device)
    expected = step(lik_ops.chamfer_distance, given)
    with torch.autocast(device, torch.bfloat16):
        assert_same(step(lik_ops.chamfer_distance, given), expected)


def test_forward_flops_count_every_distance(device):
    forward, _ = flops(lik_ops.chamfer_distance, *clouds(30, 40, 3, device))
    assert forward == 3 * 2 * 30 * 40 * 3
