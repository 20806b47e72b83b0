"""Test document gradients of exact fp32 rows, which are summed as two fp16 terms with a scale for each row."""

import pytest
import torch
from torch import Tensor

from ...support.common import CUDA, INTERPRETER, INTERPRETING

pytest.importorskip("triton", reason="these are kernels in Triton")
from lik_ops.gpu.backward import documents
from lik_ops.gpu.backward.dense import backward_lowmem

PLACES = [INTERPRETER] if INTERPRETING else [pytest.param(CUDA, marks=pytest.mark.gpu)]
on_places = pytest.mark.parametrize("place", PLACES, ids=str)
ERROR = 2.0**-20  # of the sum of magnitudes, for products to 2^-21 and the roundings of the sum


def draw(Nq, K, Lq, Ld, d, candidates=False):
    """Return upstream gradients, Q, D, an argmax with holes, and weights."""
    g = torch.Generator().manual_seed(Nq + d)
    Q, D = (torch.randn(*n, d, generator=g) for n in ((Nq, Lq), (*((Nq,) if candidates else ()), K, Ld)))
    argmax = torch.randint(-1, Ld, (Nq, K, Lq) if candidates else (K, Nq, Lq), generator=g).to(torch.int16)
    return [torch.randn(Nq, K, generator=g), Q, D, argmax, torch.rand(Nq, Lq, generator=g)]


def gradient(place, given, normalize=False) -> Tensor:
    """Return the gradient of the documents."""
    grad_scores, Q, D, argmax, weight = (x.to(place.device) for x in given)
    with place.use():
        arguments = grad_scores, Q, D, argmax, None, None, weight, normalize
        return backward_lowmem(*arguments, [False, True, False])[1].double().cpu()


def sum_rows(given) -> tuple[Tensor, Tensor]:
    """Return the gradient of the documents in fp64, and the sums of the magnitudes of its terms."""
    grad_scores, Q, D, argmax, weight = (x.double() for x in given)
    K, d = D.shape[-3], D.shape[-1]
    tokens = (argmax if D.dim() == 4 else argmax.movedim(1, 0)).long()  # [Nq, K, Lq]
    rows = grad_scores[:, :, None, None] * weight[:, None, :, None] * Q[:, None]
    rows = torch.where((tokens >= 0)[..., None], rows, 0.0).reshape(-1, d)
    document = torch.arange(K)[None, :, None].expand_as(tokens)
    owner = torch.arange(len(Q))[:, None, None].expand_as(tokens)
    at = (owner, document, tokens.clamp(min=0)) if D.dim() == 4 else (document, tokens.clamp(min=0))
    at = tuple(x.reshape(-1) for x in at)
    return torch.zeros_like(D).index_put_(at, rows, True), torch.zeros_like(D).index_put_(at, rows.abs(), True)


def check(place, given, monkeypatch):
    """Assert that each element is as accurate as an fp32 sum, and that rows were split."""
    expected, magnitude = sum_rows(given)
    found = gradient(place, given)
    assert bool(((found - expected).abs() <= ERROR * magnitude + 2.0**-126).all())
    monkeypatch.setattr(documents, "_MIN_SPLIT_ROWS_PER_TOKEN", 2**30)
    from lik_ops.gpu import backend

    backend.forget()
    assert not torch.equal(gradient(place, given), found)


@on_places
@pytest.mark.parametrize("d", [16, 48, 272])
@pytest.mark.parametrize("candidates", [False, True])
def test_each_element_is_as_accurate_as_an_fp32_sum(place, d, candidates, monkeypatch):
    sizes = (2, 4, 1030, 40) if candidates else (40, 5, 32, 50)
    check(place, draw(*sizes, d, candidates), monkeypatch)


@on_places
@pytest.mark.parametrize("powers", [20, 45])
def test_rows_and_coefficients_of_any_size(place, powers, monkeypatch):
    """Rows, features of a row within 2^27, and coefficients of the tokens of a tile differ in size."""
    given = draw(40, 5, 32, 50, 48)
    g = torch.Generator().manual_seed(powers)

    def spread(*shape, most=powers):
        return 2.0 ** torch.randint(-most, most + 1, shape, generator=g)

    given[0] = given[0] * spread(40, 5)
    given[1] = given[1].sign() * (1 + torch.rand(40, 32, 48, generator=g)) * spread(40, 32, 1) * spread(48, most=13)
    check(place, given, monkeypatch)


@on_places
def test_tokens_of_one_row_each(place, monkeypatch):
    """Small features and coefficients keep their accuracy next to large ones. Some rows are beyond two terms."""
    given = draw(40, 5, 32, 50, 48)
    grad_scores, Q, _, argmax, _ = given
    argmax.clamp_(max=43)
    for n in range(6):
        argmax[:, 9, n] = 44 + n
    grad_scores[9] *= 2.0**-60
    Q[9, 1, 7] = 2.0**-27 * Q[9, 1].abs().max()  # two terms hold the row
    Q[9, 2, 7] = 2.0**-60
    Q[9, 3, 1:] *= 2.0**-40
    Q[9, 4] *= 2.0**-100
    Q[9, 5] *= 2.0**100
    check(place, given, monkeypatch)


@on_places
def test_nan_and_infinity_reach_only_their_elements(place):
    given = draw(40, 5, 32, 50, 48)
    clean, _ = sum_rows(given)
    given[1][3, 5, 2], given[1][7, 1, 0] = float("nan"), float("inf")
    given[0][11, 2] = float("inf")
    expected, _ = sum_rows(given)
    found = gradient(place, given)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(0).isinf(), expected.nan_to_num(0).isinf())
    finite = expected.isfinite()
    assert bool((~finite).any()) and float(clean.abs().max()) < 1e3
    torch.testing.assert_close(found[finite], expected[finite], rtol=1e-5, atol=1e-5)


@on_places
def test_normalized_rows_and_pieces(place):
    """Few documents with many rows are summed in pieces."""
    given = draw(160, 4, 32, 50, 48)
    grad_scores, Q, D, argmax, weight = given
    unit_Q, x = torch.nn.functional.normalize(Q.double(), dim=-1), D.double().requires_grad_()
    upstream, _ = sum_rows([grad_scores, unit_Q, D, argmax, weight])
    (expected,) = torch.autograd.grad(torch.nn.functional.normalize(x, dim=-1), x, upstream)
    torch.testing.assert_close(gradient(place, given, normalize=True), expected, rtol=2e-5, atol=2e-5)
