"""Test gradients of fp32 tokens if PyTorch allows TF32: rows are rounded to fp16, with a scale for each row."""

import pytest
import torch
from torch import Tensor

from ...support.common import CUDA, INTERPRETER, INTERPRETING, override_setting

pytest.importorskip("triton", reason="these are kernels in Triton")
from lik_ops.gpu.backward import call as gradient_call
from lik_ops.gpu.backward.dense import backward_lowmem

PLACES = [INTERPRETER] if INTERPRETING else [pytest.param(CUDA, marks=pytest.mark.gpu)]
on_places = pytest.mark.parametrize("place", PLACES, ids=str)
ROUNDING = 2.0**-11  # of a feature of 11 bits
NARROW = 2.0**-25  # of the largest feature of a row, for features that fp16 holds with fewer bits
SHARED = 2.0**-38  # of the largest coefficient of a tile, whose coefficients share one power of two


def draw(place, Nq, K, Lq, Ld, d, candidates=False, spread=0):
    """Return upstream gradients, Q, D, an argmax with holes, and weights. Rows differ by up to 2^spread in size."""
    g = torch.Generator().manual_seed(Nq + d)

    def tokens(*shape):
        powers = torch.randint(-spread, spread + 1, (*shape[:-1], 1), generator=g)
        return torch.randn(*shape, generator=g) * 2.0**powers

    Q, D = tokens(Nq, Lq, d), tokens(*((Nq,) if candidates else ()), K, Ld, d)
    argmax = torch.randint(-1, Ld, (Nq, K, Lq) if candidates else (K, Nq, Lq), generator=g).to(torch.int16)
    found = torch.randn(Nq, K, generator=g), Q, D, argmax, torch.rand(Nq, Lq, generator=g)
    return [x.to(place.device) for x in found]


def gradients(place, given, value, normalize=False):
    grad_scores, Q, D, argmax, weight = given
    with override_setting(torch.backends.cuda.matmul, "fp32_precision", value), place.use():
        return backward_lowmem(grad_scores, Q, D, argmax, None, None, weight, normalize, [True, True, True])


def sum_gradients(given) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the gradients of Q and D in fp64, and bounds of their errors."""
    grad_scores, Q, D, argmax, weight = (x.double().cpu() for x in given)
    tokens = argmax.long().movedim(1, 0)  # [Nq, K, Lq]
    hit = (tokens >= 0)[..., None]
    K, d = D.shape[0], D.shape[-1]
    documents = torch.arange(K)[None, :, None].expand_as(tokens)
    factor = grad_scores[:, :, None, None] * hit

    def both(Q, D, factor, weight):
        of_query = weight[..., None] * (factor * D[documents, tokens.clamp(min=0)]).sum(1)
        rows = (factor * weight[:, None, :, None] * Q[:, None]).reshape(-1, d)
        of_document = torch.zeros_like(D).index_put_(
            (documents.reshape(-1), tokens.clamp(min=0).reshape(-1)), rows, True
        )
        return of_query, of_document

    def size(x):
        return ROUNDING * x.abs() + NARROW * x.abs().amax(-1, keepdim=True)

    return both(Q, D, factor, weight), both(size(Q), size(D), factor.abs(), weight.abs())


@on_places
@pytest.mark.parametrize("spread", [0, 40, 100])  # exact sums lose terms of coefficients below 2^-104
@pytest.mark.parametrize("d", [16, 40, 300])
def test_error_is_the_rounding_of_rows(place, d, spread):
    """Other products, as in the exact sums, have far smaller errors."""
    given = draw(place, 40, 3, 32, 20, d, spread=spread)
    given[0] *= 2.0**-spread
    expected, bounds = sum_gradients(given)
    exact, rounded = gradients(place, given, "ieee"), gradients(place, given, "tf32")
    for n, bound in enumerate(bounds):
        error = (rounded[n].double().cpu() - expected[n]).abs()
        assert bool((error <= 1.01 * bound + SHARED * expected[n].abs().max() + 2.0**-126).all())
        assert float(error.norm() / expected[n].norm()) > 1e-5  # they are rounded
        assert float((exact[n].double().cpu() - expected[n]).norm() / expected[n].norm()) < 1e-6


@on_places
@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_are_near_the_exact_ones(place, candidates, normalize):
    sizes = (2, 2, 1030, 40) if candidates else (40, 3, 32, 20)
    given = draw(place, *sizes, 24, candidates)
    exact, rounded = gradients(place, given, "ieee", normalize), gradients(place, given, "tf32", normalize)
    for a, b in zip(exact, rounded, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2 * ROUNDING * float(a.abs().max()))
    assert not torch.equal(exact[1], rounded[1])


@on_places
def test_nan_and_infinity_reach_the_same_gradients(place):
    given = draw(place, 40, 3, 32, 20, 24)
    _, Q, D, *_ = given
    Q[3, 5, 2], Q[7, 1, 0], D[0, 4, 1], D[1, 2, 3] = float("nan"), float("inf"), float("nan"), -float("inf")
    Q[3, 5, 3] = 2.0**17  # beyond the range of fp16, in the row with NaN
    exact, rounded = gradients(place, given, "ieee"), gradients(place, given, "tf32")
    for a, b in zip(exact, rounded, strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a == float("inf"), b == float("inf"))
        assert bool(a.isnan().any())
        finite = a.isfinite()
        usual = float(a[a.abs() < 100].abs().max())
        atol = 2 * (ROUNDING * usual + NARROW * 2.0**17)
        torch.testing.assert_close(a[finite], b[finite], rtol=2 * ROUNDING, atol=atol)


@on_places
def test_few_reads_and_large_documents_are_not_rounded(place, monkeypatch):
    """Rounding documents would take longer than it saves, or too much memory."""
    given = draw(place, 40, 3, 32, 20, 24)
    exact, rounded = (gradients(place, given, value)[0] for value in ("ieee", "tf32"))
    assert not torch.equal(exact, rounded)
    for name, value in (("_MIN_READS_PER_TOKEN", 10**6), ("_MAX_ROUNDED_BYTES", 1)):
        monkeypatch.setattr(gradient_call, name, value)
        from lik_ops.gpu import backend

        backend.forget()
        assert torch.equal(gradients(place, given, "tf32")[0], exact)
        monkeypatch.undo()
