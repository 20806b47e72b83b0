"""Test staged `lik_ops.retrieve` on residual codes against its formula, exhaustive search, and invalid input."""

import pytest
import torch
from torch.nn.functional import normalize

import lik_ops
from lik_ops import Quantized, quantize, reference
from lik_ops.portable.forward.code_scores import SKIPPED_CODE, code_scores

from ..support.common import CUDA, INTERPRETER, INTERPRETING
from ..support.residual import random_codec

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", GPU]
every_device = pytest.mark.parametrize("device", DEVICES)
kernel_places = pytest.mark.parametrize(
    "place", [INTERPRETER] if INTERPRETING else [pytest.param(CUDA, marks=pytest.mark.gpu)], ids=str
)
LENGTHS = (5, 0, 1, 40, 17, 2, 33, 8)


def clustered(count, d=64, clusters=300, length=24):
    """Return documents of few topics each, like tokens of trained encoders, and queries that are parts of some."""
    generator = torch.Generator().manual_seed(0)
    centers = normalize(torch.randn(clusters, d, generator=generator), dim=-1)
    topics = torch.randint(clusters, (count, 6), generator=generator)
    which = topics.gather(1, torch.randint(6, (count, length), generator=generator))
    D = centers[which] + 0.5 * torch.randn(count, length, d, generator=generator) / d**0.5
    Q = D[:20, :8]
    Q = Q + 0.7 * torch.randn(Q.shape, generator=generator) / d**0.5
    return normalize(Q, dim=-1), normalize(D, dim=-1)


@pytest.mark.parametrize("n_probe", [None, 1, 3])
@every_device
def test_staged_search_returns_documents_the_reference_reaches(device, n_probe):
    """If all candidates are kept, the result is every document that the reference reaches, with exact scores."""
    codec = random_codec(20, 2, n_centroids=9)
    D = normalize(torch.randn(sum(LENGTHS), 20), dim=-1)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    made, Q = quantize(D, codec, cu_seqlens_d=bounds), normalize(torch.randn(4, 6, 20), dim=-1)
    q_mask, q_weight = torch.rand(4, 6) > 0.3, torch.randn(4, 6)
    given = {"q_mask": q_mask.to(device), "q_weight": q_weight.to(device), "cu_seqlens_d": bounds.to(device)}
    scores, indices = lik_ops.retrieve(
        Q.to(device), made.to(device), 8, n_probe=n_probe or 100, n_candidates=8, **given
    )
    whole = lik_ops.retrieve(Q.to(device), made.to(device), 8, **given)
    codes = torch.nn.utils.rnn.pad_sequence(made.codes.split(LENGTHS), batch_first=True)
    d_mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    rough = reference.plaid_approx_score(Q, codes, codec.centroids, q_mask, d_mask, n_probe=n_probe)
    for i in range(4):
        documents = set((rough[i] > -torch.inf).nonzero().flatten().tolist())
        assert set(indices[i].tolist()) - {-1} == documents
        kept = [j in documents for j in whole[1][i].tolist()]
        assert torch.equal(scores[i, : len(documents)], whole[0][i][kept])
        assert torch.equal(indices[i, : len(documents)], whole[1][i][kept])
        assert (scores[i, len(documents) :] == -torch.inf).all()


@kernel_places
@pytest.mark.parametrize("rows", [1, 6, 32])
def test_kernel_scores_match_portable_scores(place, rows):
    from lik_ops.gpu import backend

    codes = torch.randint(7, (sum(LENGTHS) + 2,), dtype=torch.int32)
    codes[[3, 9]], codes[50], codes[60] = SKIPPED_CODE, 7, -1
    offsets = torch.tensor([0, *LENGTHS[:-1]]).cumsum(0) + 1
    offsets, lengths = torch.cat([offsets, torch.tensor([-1, 100])]), torch.tensor([*LENGTHS, 3, 30])
    table, weight = torch.randn(3, 7, rows), torch.randn(3, rows)
    for probed in (None, torch.rand(3, 7) > 0.6):
        expected = code_scores(table, weight, probed, codes, offsets, lengths)
        args = (x if x is None else x.to(place.device) for x in (table, weight, probed, codes, offsets, lengths))
        torch.testing.assert_close(backend.code_scores(*args).cpu(), expected, rtol=1e-5, atol=1e-5)
        assert expected[:, 8:].isinf().all() and (expected[:, 8:] > 0).all()


@kernel_places
@pytest.mark.parametrize("packed", [False, True])
def test_search_with_kernel_matches_portable_search(place, packed):
    Q, D = clustered(24, 16, 10, 5)
    Q, codec = Q[:3], random_codec(16, 2, n_centroids=12)
    made, options = quantize(D, codec), {}
    if packed:
        made, options = quantize(D.flatten(0, 1), codec), {"cu_seqlens_d": torch.arange(0, 121, 5)}
    for stages in ({"n_candidates": 6}, {"n_probe": 1, "n_candidates": 20}):
        expected = lik_ops.retrieve(Q, made, 4, **stages, **options)
        given = {name: x.to(place.device) for name, x in options.items()}
        with place.use():
            found = lik_ops.retrieve(Q.to(place.device), made.to(place.device), 4, **stages, **given)
        assert torch.equal(found[1].cpu(), expected[1])
        torch.testing.assert_close(found[0].cpu(), expected[0], rtol=1e-5, atol=1e-5)


@every_device
def test_recall_against_exhaustive_search(device):
    Q, D = clustered(1200)
    made = quantize(D, lik_ops.ResidualCodec.train(D, 2, 256, iterations=4)).to(device)
    Q = Q.to(device)
    _, exact = lik_ops.retrieve(Q, made, 10)
    recalls = {}
    for n_probe, n_candidates in ((1, 40), (2, 100), (4, 200), (None, 200)):
        options = {"n_probe": n_probe, "n_candidates": n_candidates}
        scores, found = lik_ops.retrieve(Q, made, 10, **options)
        recalls[n_probe, n_candidates] = (found[:, :, None] == exact[:, None]).any(2).float().mean().item()
        for i in range(0, 20, 7):
            one = lik_ops.retrieve(Q[i], made, 10, **options)
            assert torch.equal(one[0], scores[i]) and torch.equal(one[1], found[i])
    print(recalls)
    assert recalls[1, 40] > 0.8 and recalls[4, 200] > 0.97 and recalls[None, 200] > 0.97
    assert recalls[1, 40] <= recalls[4, 200]


@every_device
def test_all_documents_as_candidates_match_exhaustive_search(device):
    Q, D = clustered(60, 16, 10, 5)
    d_mask = torch.rand(60, 5) > 0.4
    codec = random_codec(16, 4, n_centroids=12)
    made = quantize(D, codec, d_mask=d_mask).to(device)
    for options in ({}, {"d_mask": d_mask.to(device)}, {"normalize": True}):
        expected = lik_ops.retrieve(Q.to(device), made, 50, **options)
        found = lik_ops.retrieve(Q.to(device), made, 50, n_candidates=60, **options)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    packed = Quantized(
        made.data.flatten(0, 1), made.scale.flatten(), made.format, 16, made.dtype, codes=made.codes.flatten(),
        codec=made.codec,
    )  # fmt: skip
    index = lik_ops.Index(packed, torch.arange(0, 301, 5, device=device))
    found, expected = lik_ops.retrieve(Q.to(device), index, 7, n_candidates=60), lik_ops.retrieve(Q.to(device), made, 7)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("code", [99, -1])
def test_out_of_range_code_scores_nan(code):
    Q, D = clustered(40, 16, 10, 5)
    made = quantize(D, random_codec(16, 2))
    codes = made.codes.clone()
    codes[7, 2] = code
    odd = Quantized(made.data, made.scale, made.format, 16, made.dtype, codes=codes, codec=made.codec)
    scores, indices = lik_ops.retrieve(Q, odd, 3, n_probe=1, n_candidates=5)
    assert scores[:, 0].isnan().all() and (indices[:, 0] == 7).all() and not scores[:, 1:].isnan().any()


def test_sizes_of_zero():
    codec = random_codec(16, 2)
    Q, D = clustered(5, 16, 10, 5)
    made = quantize(D, codec)
    assert [x.shape for x in lik_ops.retrieve(Q, made[:0], 3, n_candidates=2)] == [(5, 0)] * 2
    assert [x.shape for x in lik_ops.retrieve(Q[:0], made, 3, n_candidates=2)] == [(0, 3)] * 2
    none = lik_ops.ResidualCodec(codec.centroids[:0], codec.weights)
    empty = Quantized(made.data, made.scale, made.format, 16, made.dtype, codes=made.codes, codec=none)
    assert lik_ops.retrieve(Q, empty, 3, n_probe=2)[0].isnan().all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n_probe": 0}, ValueError, "n_probe: expected 1 or more, got 0"),
        ({"n_probe": "4"}, TypeError, "n_probe: expected an int, got str"),
        ({"n_candidates": -1}, ValueError, "n_candidates: expected 1 or more, got -1"),
        ({"n_candidates": 5, "chunk": 2}, ValueError, "chunk: expected None with n_probe and n_candidates, got 2"),
    ],
)
def test_wrong_stage_options_raise(options, error, message):
    Q, D = clustered(20, 16, 10, 5)
    with pytest.raises(error, match=f"retrieve: {message}"):
        lik_ops.retrieve(Q, quantize(D, random_codec(16, 2)), 3, **options)


def test_stages_need_codes():
    Q, D = clustered(20, 16, 10, 5)
    with pytest.raises(ValueError, match="D: expected residual codes with n_probe and n_candidates, got int8"):
        lik_ops.retrieve(Q, quantize(D), 3, n_probe=2)
    for name in ("n_probe", "n_candidates"):
        with pytest.raises(ValueError, match=f"{name}: expected None unless coarse is given or D is res.*, got 4"):
            lik_ops.retrieve(Q, D, 3, **{name: 4})
    with pytest.raises(ValueError, match="n_probe: expected None with coarse, got 4"):
        lik_ops.retrieve(Q, D, 3, coarse=quantize(D), n_probe=4)
