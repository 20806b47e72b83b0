"""Test pooled tokens against the reference and scipy's clusters, gradients of means, layouts, and errors."""

import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck
from torch.nn.functional import normalize

import lik_ops
from lik_ops import reference
from lik_ops.families.pooling import api, clusters
from lik_ops.families.pooling.clusters import WardClustering

from ...portable.test_portable import peak_bytes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
METHODS = ("hierarchical", "kmeans", "sequential")
devices = pytest.mark.parametrize("device", DEVICES)
methods = pytest.mark.parametrize("method", METHODS)


def draw(*lengths, d=16, dtype=torch.float64, device="cpu", seed=0):
    """Return documents whose tokens lean to common directions, as the tokens of a text do."""
    g = torch.Generator().manual_seed(seed)
    topics = torch.randn(8, d, generator=g)
    found = []
    for n in lengths:
        leaning = topics[torch.randint(0, 8, (n,), generator=g)] + torch.randn(n, d, generator=g)
        found.append(normalize(leaning.double(), dim=-1).to(device, dtype))
    return found


@devices
@pytest.mark.parametrize(
    ("metric", "factor", "num_protected"), [("cosine", 2, 1), ("cosine", 3.5, 0), ("cosine", 8, 3), ("rows", 3, 0)]
)
def test_hierarchical_pooling_matches_reference(device, metric, factor, num_protected):
    lengths = torch.randint(0, 90, (250,), generator=torch.Generator().manual_seed(1)).tolist()
    documents, options = draw(*lengths, device=device), {"metric": metric, "num_protected": num_protected}
    tokens, cu_seqlens = lik_ops.pool_tokens(documents, factor, **options)
    for found, document in zip(lik_ops.unpack(tokens, cu_seqlens), documents, strict=True):
        expected = reference.pool_tokens(document.cpu(), factor, **options).to(device)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*uncondensed distance matrix")
@pytest.mark.parametrize("metric", ["cosine", "rows"])
@pytest.mark.parametrize("factor", [2, 3.5, 8])
def test_reference_matches_scipy_ward_clusters(metric, factor):
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy", reason="Ward's method of the hosts")
    for tokens in draw(*range(2, 90, 4)):
        distances = (1 - tokens @ tokens.T).numpy()
        given = distances if metric == "rows" else distances[np.triu_indices(len(distances), 1)]
        count = max(int(len(tokens) // factor), 1)
        labels = torch.from_numpy(hierarchy.fcluster(hierarchy.linkage(given, "ward"), count, "maxclust"))
        found = reference.pool_tokens(tokens, factor, metric=metric, num_protected=0)
        means = [tokens[labels == i].mean(0) for i in dict.fromkeys(labels.tolist())]
        torch.testing.assert_close(found, torch.stack(means), rtol=1e-12, atol=1e-12)


def test_equal_tokens_are_one_cluster():
    """All pairs of equal cost are merged, so there are fewer clusters than asked for."""
    a, b = torch.eye(2, 8)
    document = torch.stack([a, b, a, b, a, a])
    tokens, cu_seqlens = lik_ops.pool_tokens([document], 2, num_protected=0)
    assert cu_seqlens.tolist() == [0, 2]
    assert torch.equal(tokens, torch.stack([a, b]))
    assert torch.equal(tokens, reference.pool_tokens(document, 2, num_protected=0))


def test_chain_of_merges_matches_reference():
    """The angles double, so that each round finds one pair of mutual nearest neighbors."""
    angles = 2.0 ** torch.arange(-20, 0)
    chain = torch.stack([angles.double().cos(), angles.double().sin()], 1)
    for count in (1, 5, 19):
        tokens, _ = lik_ops.pool_tokens([chain], 20 / count, num_protected=0)
        expected = reference.pool_tokens(chain, 20 / count, num_protected=0)
        torch.testing.assert_close(tokens, expected, rtol=1e-12, atol=1e-12)


def test_clusters_without_mutual_nearest_pair_are_merged():
    """Here 0 is nearest to 2, 2 to 1, and 1 to 0, so no pair is mutual. Rounding leads to such distances."""
    ward = WardClustering(torch.device("cpu"))
    ward.reserve(2, 3).copy_(torch.tensor([[9, 2, 1], [1, 9, 2], [2, 1, 9]]))
    labels = ward.find_clusters(torch.tensor([3, 3]), torch.tensor([2, 1]))
    assert labels.tolist() == [[0, 1, 0], [0, 0, 0]]


@devices
@pytest.mark.parametrize("n", [15, 31, 45, 58])
def test_nearly_equal_distances_do_not_exceed_cluster_count(device, n):
    """Costs differ by rounding errors only. Costs that are exactly equal lead to fewer clusters."""
    directions = torch.randn(8, n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    tokens = torch.linalg.qr(directions).Q.to(device)
    for count in (1, 2, n // 2):
        _, cu_seqlens = lik_ops.pool_tokens(tokens, n / count, num_protected=0)
        assert int(cu_seqlens.diff().max()) <= count


def test_tokens_at_infinite_distance_are_not_merged():
    tokens = torch.full((3, 4), 1e200, dtype=torch.float64)
    _, cu_seqlens = lik_ops.pool_tokens([tokens, tokens[:2]], 3, num_protected=0)
    assert cu_seqlens.tolist() == [0, 3, 5]


@pytest.mark.parametrize("metric", ["cosine", "rows"])
def test_stopping_early_does_not_change_clusters(monkeypatch, metric):
    """Without a limit, all merges of the tree are made."""
    documents = draw(*range(1, 120, 2))
    found = [lik_ops.pool_tokens(documents, factor, metric=metric) for factor in (1.2, 2, 9)]
    rounds, combine = [], WardClustering._combine
    monkeypatch.setattr(WardClustering, "_combine", lambda *args: rounds.append(1) or combine(*args))
    lik_ops.pool_tokens(documents, 2, metric=metric)
    few = len(rounds)
    monkeypatch.setattr(clusters, "_COST_MARGIN", math.inf)
    for n, factor in enumerate((1.2, 2, 9)):
        whole = lik_ops.pool_tokens(documents, factor, metric=metric)
        assert all(torch.equal(a, b) for a, b in zip(found[n], whole, strict=True))
    assert few < (len(rounds) - few) / 3


@devices
@methods
def test_counts_and_protected_tokens(device, method):
    documents = draw(0, 1, 2, 3, 30, 31, dtype=torch.float32, device=device)
    tokens, cu_seqlens = lik_ops.pool_tokens(documents, 3, method=method, num_protected=2)
    sizes = cu_seqlens.diff().tolist()
    assert sizes[:4] == [0, 1, 2, 3]
    assert all(3 <= size <= 11 if method == "kmeans" else size == 11 for size in sizes[4:])
    for found, document in zip(lik_ops.unpack(tokens, cu_seqlens), documents, strict=True):
        assert torch.equal(found[:2], document[:2])
    same = lik_ops.unpack(*lik_ops.pool_tokens(documents, 1, method=method))
    assert all(torch.equal(a, b) for a, b in zip(documents, same, strict=True))


def test_sequential_run_lengths_differ_by_at_most_one():
    documents = [torch.eye(11)]
    tokens, _ = lik_ops.pool_tokens(documents, 3, method="sequential", num_protected=1)
    runs = (tokens != 0).sum(1).tolist()
    assert runs == [1, 4, 3, 3]
    assert torch.equal((tokens != 0).sum(0), torch.ones(11, dtype=torch.int64))


def test_kmeans_finds_separate_groups():
    centers = torch.eye(4, 16)
    order = torch.arange(40) % 4
    noise = 1e-3 * torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    tokens, _ = lik_ops.pool_tokens([normalize(centers[order] + noise, dim=-1)], 10, method="kmeans", num_protected=0)
    assert tokens.shape == (4, 16)
    torch.testing.assert_close(tokens, centers, rtol=0, atol=5e-3)


@devices
@methods
def test_pooling_does_not_depend_on_batch_or_layout(device, method):
    """Distances are fp64, so the padding of a batch cannot change a cluster. Means have the same bits."""
    documents = draw(40, 7, 64, 33, 64, dtype=torch.float32, device=device)
    tokens, cu_seqlens = lik_ops.pool_tokens(documents, 2, method=method)
    alone = [lik_ops.pool_tokens([x], 2, method=method)[0] for x in documents]
    assert torch.equal(tokens, torch.cat(alone))
    packed, bounds = lik_ops.pack(documents)
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=3.0)
    lengths = bounds.diff()
    mask = lik_ops.lengths_to_mask(lengths, padded.shape[1])
    nested = torch.nested.nested_tensor(documents, layout=torch.jagged)
    calls = (
        (packed, {"cu_seqlens_d": bounds}),
        (padded, {"doc_lengths": lengths}),
        (padded, {"d_mask": mask}),
        (padded, {"d_mask": mask.int()}),
        (nested, {}),
    )
    for D, options in calls:
        found = lik_ops.pool_tokens(D, 2, method=method, **options)
        assert torch.equal(found[0], tokens) and torch.equal(found[1], cu_seqlens)


@devices
@methods
@pytest.mark.parametrize("normalized", [False, True])
def test_gradcheck(device, method, normalized):
    """A small change of a token does not change the clusters, so the function is linear there."""
    (document,) = draw(10, d=3, device=device)
    document.requires_grad_()
    assert gradcheck(lambda x: lik_ops.pool_tokens([x], 3, method=method, normalize=normalized)[0], document)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_tokens_are_averaged_in_fp32(dtype):
    (document,) = draw(60, dtype=dtype)
    tokens, _ = lik_ops.pool_tokens([document], 4, normalize=True)
    wide, _ = lik_ops.pool_tokens([document.float()], 4, normalize=True)
    assert tokens.dtype == dtype and torch.equal(tokens, wide.to(dtype))


def test_empty_inputs_pool_to_no_tokens():
    for D in (torch.empty(0, 5, 8), torch.empty(3, 0, 8)):
        tokens, cu_seqlens = lik_ops.pool_tokens(D, 2)
        assert tokens.shape == (0, 8) and cu_seqlens.tolist() == [0] * (len(D) + 1)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"factor": 0.5}, ValueError, "factor: expected a finite number of at least 1, got 0.5"),
        ({"factor": float("nan")}, ValueError, "factor: expected a finite number"),
        ({"factor": "2"}, TypeError, "factor: expected a number, got str"),
        ({"method": "ward"}, ValueError, "method: expected one of hierarchical, kmeans, sequential, got 'ward'"),
        ({"metric": "l2"}, ValueError, "metric: expected one of cosine, rows, got 'l2'"),
        ({"num_protected": -1}, ValueError, "num_protected: expected 0 or more, got -1"),
        ({"normalize": 1}, TypeError, "normalize: expected a bool"),
        ({"D": torch.ones(4, 8)}, ValueError, "D: expected [Nd, Ld, d], or [Td, d] with cu_seqlens_d, got [4, 8]"),
        ({"D": torch.ones(2, 3, 0)}, ValueError, "D: expected d >= 1, got [2, 3, 0]"),
        ({"D": torch.ones(2, 3, 4).long()}, TypeError, "D: expected"),
        ({"D": torch.full((1, 2, 3), float("nan"))}, ValueError, "D: expected finite tokens, got NaN or infinity"),
        ({"doc_lengths": torch.tensor([9, 1])}, ValueError, "doc_lengths: "),
        ({"doc_lengths": torch.tensor([1.0, 1.0])}, TypeError, "doc_lengths: expected int32 or int64"),
        ({"d_mask": torch.ones(2, 2)}, ValueError, "d_mask: expected shape [2, 3]"),
        ({"d_mask": torch.ones(2, 3) > 0, "doc_lengths": torch.tensor([1, 1])}, ValueError, "d_mask: expected None"),
        ({"D": torch.ones(5, 8), "cu_seqlens_d": torch.tensor([0, 9])}, ValueError, "cu_seqlens_d: "),
        ({"D": [torch.ones(5, 8)], "cu_seqlens_d": torch.tensor([0, 5])}, ValueError, "cu_seqlens_d: expected None"),
    ],
    ids=str,
)
def test_errors_name_the_argument(options, error, text):
    arguments = {"D": torch.ones(2, 3, 4), "factor": 2, **options}
    with pytest.raises(error) as raised:
        lik_ops.pool_tokens(arguments.pop("D"), arguments.pop("factor"), **arguments)
    assert str(raised.value).startswith("pool_tokens: ") and text in str(raised.value)


def test_memory_of_a_batch_of_short_documents_is_bounded(monkeypatch):
    documents = torch.randn(12_000, 8, 128).half()
    peak = peak_bytes(lambda: lik_ops.pool_tokens(documents, 2))
    monkeypatch.setattr(api, "MAX_DISTANCES_BYTES", {"cpu": 1 << 20})
    assert peak - peak_bytes(lambda: lik_ops.pool_tokens(documents, 2)) <= 24 << 20


@pytest.mark.parametrize("max_bytes", [1, 8 * 40 * 40 * 2])
def test_small_workspaces_have_the_same_result(monkeypatch, max_bytes):
    documents = draw(40, 38, 36, 12, 40)
    expected = lik_ops.pool_tokens(documents, 2)
    monkeypatch.setattr(api, "MAX_DISTANCES_BYTES", {"cpu": max_bytes})
    assert all(torch.equal(a, b) for a, b in zip(expected, lik_ops.pool_tokens(documents, 2), strict=True))
