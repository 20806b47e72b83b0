"""Test `lik_ops.plaid_approx_score` against the reference, in each layout, and next to the search that uses it."""

import pytest
import torch
from torch.nn.functional import normalize

import lik_ops
from lik_ops import quantize, reference

from ..support.common import PLACE_IDS, PLACES
from ..support.residual import random_codec

of_place = pytest.mark.parametrize("place", PLACES, ids=PLACE_IDS)


def problem(place, lengths=(5, 0, 9, 3)):
    """Return queries with masks and weights, padded codes with their mask, and the same codes packed."""
    codec = random_codec(20, 2, n_centroids=9)
    D = normalize(torch.randn(len(lengths), 9, 20), dim=-1)
    d_mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    made, Q = quantize(D, codec), normalize(torch.randn(3, 6, 20), dim=-1)
    q_mask, q_weight = torch.rand(3, 6) > 0.3, torch.randn(3, 6)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    tensors = [x.to(place.device) for x in (Q, q_mask, q_weight, d_mask, bounds, made, made[d_mask])]
    return *tensors, codec.to(place.device)


@of_place
@pytest.mark.parametrize("n_probe", [None, 1, 2, 100])
@pytest.mark.parametrize("unit", [False, True])
def test_scores_match_the_reference_in_each_layout(place, unit, n_probe):
    Q, q_mask, q_weight, d_mask, bounds, made, packed, codec = problem(place)
    Q = (Q * 3 if unit else Q).masked_fill(~q_mask[..., None], torch.nan)
    given = {"q_mask": q_mask, "q_weight": q_weight, "normalize": unit, "n_probe": n_probe}
    wide = {**given, "q_weight": q_weight.double()}
    expected = reference.plaid_approx_score(Q.double(), made.codes, codec.centroids.double(), d_mask=d_mask, **wide)
    with place.use():
        scores = lik_ops.plaid_approx_score(Q, made, d_mask=d_mask, **given)
        again = lik_ops.plaid_approx_score(Q, packed, cu_seqlens_d=bounds, **given)
        index = lik_ops.plaid_approx_score(Q, lik_ops.Index(packed, bounds), **given)
        of_one = {**given, "q_mask": q_mask[1], "q_weight": q_weight[1]}
        alone = lik_ops.plaid_approx_score(Q[1], made, d_mask=d_mask, **of_one)
        best = lik_ops.retrieve(Q, made, 2, d_mask=d_mask, **{**given, "n_candidates": 2})
    assert scores.dtype == torch.float32 and scores.shape == (3, 4) and not scores.requires_grad
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(again, scores) and torch.equal(index, scores) and torch.equal(alone, scores[1])
    for row, kept in zip(scores, best[1], strict=True):  # the first stage of a search has these scores
        first = row.topk(2)
        assert set(kept.tolist()) - {-1} == set(first.indices[first.values > -torch.inf].tolist())


def test_invalid_codes_and_nan_queries_score_nan():
    codec = random_codec(8, 2)
    codes, residuals = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 4, 2, dtype=torch.uint8)
    codes[1, 2], codes[2, 0] = 7, -1
    made = lik_ops.Quantized.of_codes(codes, residuals, codec)
    Q = torch.randn(2, 3, 8)
    for n_probe in (None, 1):
        scores = lik_ops.plaid_approx_score(Q, made, n_probe=n_probe)
        expected = reference.plaid_approx_score(Q, codes, codec.centroids, n_probe=n_probe)
        assert scores.isnan().tolist() == [[False, True, True]] * 2
        d_mask = torch.tensor([[True, True, False, True], [False, True, True, True]])
        assert not lik_ops.plaid_approx_score(Q, made[1:], None, d_mask, n_probe=n_probe).isnan().any()
        torch.testing.assert_close(scores, expected, equal_nan=True)
    Q[0, 0, 0] = torch.nan
    assert lik_ops.plaid_approx_score(Q, made).isnan().tolist() == [[True] * 3, [False, True, True]]
    assert lik_ops.plaid_approx_score(Q, made[:0]).shape == (2, 0)
    assert lik_ops.plaid_approx_score(Q[:0], made).shape == (0, 3)


def test_documents_without_codes_are_rejected():
    Q, D = torch.randn(2, 3, 8), torch.randn(4, 5, 8)
    for given, got in ((D, "a tensor"), (quantize(D), "int8"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"plaid_approx_score: D: expected a Quantized of residual codes .*{got}"):
            lik_ops.plaid_approx_score(Q, given)
    made = quantize(D, random_codec(8, 2))
    with pytest.raises(ValueError, match="plaid_approx_score: D: expected d = 6"):
        lik_ops.plaid_approx_score(Q[..., :6], made)
    with pytest.raises(ValueError, match="plaid_approx_score: n_probe: expected"):
        lik_ops.plaid_approx_score(Q, made, n_probe=0)


def test_compiled_scores_match_eager():
    made, Q = quantize(torch.randn(4, 5, 8), random_codec(8, 2)), torch.randn(2, 3, 8)

    def score(Q):
        return lik_ops.plaid_approx_score(Q, made, normalize=True)

    torch.compiler.reset()
    assert torch.equal(torch.compile(score, fullgraph=True, backend="aot_eager")(Q), score(Q))
