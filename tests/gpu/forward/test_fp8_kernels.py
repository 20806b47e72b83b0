"""Test the accuracy and bits of FP8 documents with bf16 queries, whose rows are fp16 over powers of two."""

import dataclasses

import pytest
import torch

from lik_ops import Quantized, maxsim, maxsim_with_argmax
from lik_ops.formats.table import FORMATS

from ...support.common import CUDA, INTERPRETER, INTERPRETING
from .test_quantized_kernels import assert_right

pytest.importorskip("triton", reason="these are kernels in Triton")
from ...support.quantized import problem

PLACES = [INTERPRETER] if INTERPRETING else [pytest.param(CUDA, marks=pytest.mark.gpu)]
pytestmark = [
    pytest.mark.parametrize("place", PLACES, ids=str),
    pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"]),
]
BF16 = torch.bfloat16
MOST = torch.finfo(BF16).max
LEAST = -94 if INTERPRETING else -126  # the interpreter reads bf16 below 2^-126 wrongly


EACH = 24 if INTERPRETING else 1  # check one of this many features


def features(format, d, place):
    """Return one document of one token for each feature, so that a score is the feature itself."""
    data = torch.eye(d)[::EACH].to(FORMATS[format].dtype)[:, None]
    return Quantized(data, torch.ones(1, 1), format, d, BF16).to(place.device)


def score_rows(rows, documents, place):
    """Return the scores of each row as a separate query."""
    with place.use():
        return maxsim(rows[:, None].to(place.device), documents).cpu()


def make_wide_row(d, far):
    """Return a row whose features are up to 2^far below its largest."""
    powers = 2.0 ** -(torch.arange(d) * 7 % (far + 1)).float()
    return ((1 + torch.rand(d) * 0.99) * torch.randn(d).sign() * powers).to(BF16)


@pytest.mark.parametrize("d", [96, 160])
def test_features_within_32_powers_of_two_of_the_largest_are_kept(place, format, d):
    rows = torch.stack([make_wide_row(d, 31) * 2.0**e for e in (LEAST, -80, -20, 0, 15, 100, 126)])
    same = [torch.full((1, d), value) for value in (MOST, 2.0 ** (LEAST - 7 * (not INTERPRETING)), 0.0)]
    rows = torch.cat([rows, *same]).to(BF16)
    assert torch.equal(score_rows(rows, features(format, d, place), place), rows.float()[:, ::EACH])


def test_smaller_features_have_a_bounded_error(place, format):
    rows = torch.stack([make_wide_row(96, 60) * 2.0**e for e in (-40, 0, 90)])
    off = (score_rows(rows, features(format, 96, place), place) - rows.float()[:, ::EACH]).abs()
    largest = rows.float().abs().amax(1, keepdim=True)
    assert (off <= 2.0**-40 * largest).all() and off.any()


def test_nan_and_inf_affect_only_their_row(place, format):
    """An infinity times zeros is NaN, and no other element of the row becomes NaN."""
    rows = torch.full((4, 96), MOST, dtype=BF16)
    rows[0, 24], rows[1, 24], rows[2, 24] = float("nan"), float("inf"), -float("inf")
    rows[3, 24], rows[3, 25] = float("inf"), -float("inf")
    documents = features(format, 96, place)
    found = score_rows(rows, documents, place)
    expected = torch.full((4, 96), float("nan"))
    expected[1, 24], expected[2, 24] = float("inf"), -float("inf")
    torch.testing.assert_close(found, expected[:, ::EACH], rtol=0, atol=0, equal_nan=True)
    full = dataclasses.replace(documents, data=torch.ones(1, 3, 96).to(documents.data))
    found = score_rows(rows, full, place)
    assert found[0].isnan() and found[1] == torch.inf and found[2] == -torch.inf and found[3].isnan()
    plain = torch.randn(2, 96).to(BF16)
    beside = score_rows(torch.cat([rows, plain]), full, place)[4:]
    assert torch.equal(beside, score_rows(plain, full, place))


def test_masked_rows_and_tokens_do_not_change_results(place, format):
    Q, D = torch.randn(3, 5, 48).to(BF16), torch.randn(4, 8, 48).to(FORMATS[format].dtype)
    D = Quantized(D, torch.ones(4, 8), format, 48, BF16).to(place.device)
    q_mask, d_mask = torch.rand(3, 5) > 0.3, torch.rand(4, 8) > 0.3
    poisoned, scale = Q.clone(), D.scale.clone()
    poisoned[~q_mask], scale[~d_mask] = float("nan"), float("inf")
    masks = q_mask.to(place.device), d_mask.to(place.device)
    with place.use():
        clean = maxsim_with_argmax(Q.to(place.device), D, *masks)
        found = maxsim_with_argmax(poisoned.to(place.device), dataclasses.replace(D, scale=scale), *masks)
    assert all(torch.equal(a, b) for a, b in zip(clean, found, strict=True))


@pytest.mark.parametrize(
    ("mode", "d", "normalize"),
    [("cross", 96, False), ("cross", 300, True), ("candidates", 96, True), ("pairs", 160, False)],
)
def test_scores_and_argmax_match_formula(place, format, mode, d, normalize):
    p = problem(mode, BF16, d, format, options=True).to(place.device)
    p.r.Q.mul_(2.0 ** torch.randint(-60, 60, (len(p.r.Q), 1), device=place.device))
    p.r.q_weight.mul_(p.r.Q.float().abs().amax(1).reciprocal().nan_to_num(0, 0, 0))
    scores, argmax = p.forward(normalize=normalize)
    # The portable path is no reference here: sums over such rows cancel, and both results have large errors.
    assert_right(p, scores, argmax, normalize)


@pytest.mark.parametrize("d", [96, 160])
def test_bits_do_not_depend_on_batch(place, format, d):
    p = problem("cross", BF16, d, format).to(place.device)
    whole, argmax = p.forward()
    cu = p.r.cu_seqlens_q
    for i in range(len(cu) - 1):
        one = p.r._replace(cu_seqlens_q=cu[i : i + 2])
        found, winners = dataclasses.replace(p, r=one).forward()
        assert torch.equal(found[0], whole[i])
        assert torch.equal(winners[:, cu[i] : cu[i + 1]], argmax[:, cu[i] : cu[i + 1]])
