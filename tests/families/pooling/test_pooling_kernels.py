"""Test the kernels of Ward's method against plain torch: nearest clusters, merged distances, and whole clusterings."""

import pytest
import torch

import lik_ops
from lik_ops.families.pooling import clusters
from lik_ops.families.pooling.clusters import ClusterBatch, MergeTerms, WardClustering

from ...support.common import INTERPRETING
from .test_pooling import draw

PLACES = ["cpu"] if INTERPRETING else [pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=PLACES)
def device(request):
    return request.param


def kernels(device):
    """Return a clustering that uses the kernels."""
    from lik_ops.families.pooling.gpu import KernelWardClustering

    return KernelWardClustering(torch.device(device))


def measure(lengths, n, seed=0):
    """Return squared distances ``[B, n, n]`` with NaN in padding and on diagonals."""
    g = torch.Generator().manual_seed(seed)
    points = torch.randn(len(lengths), n, 8, generator=g, dtype=torch.float64)
    squared = torch.cdist(points, points).square()
    squared = (squared + squared.mT) / 2
    is_token = torch.arange(n) < torch.tensor(lengths)[:, None]
    squared.masked_fill_(~(is_token[:, :, None] & is_token[:, None]), torch.nan)
    squared.diagonal(dim1=1, dim2=2).fill_(torch.nan)
    return squared


def load(ward, squared, lengths):
    """Copy distances to the workspace, with padding if plain torch reads them."""
    B, n, _ = squared.shape
    ward.reserve(B, n).copy_(squared)
    if ward.buffers == 3:
        ward._pad(ward._view(0, B, n, n), torch.tensor(lengths))
    return ward


def draw_clusters(lengths, n, device, seed=0):
    sizes = torch.randint(1, 9, (len(lengths), n), generator=torch.Generator().manual_seed(seed)).double()
    return ClusterBatch(
        *(x.to(device) for x in (torch.arange(n).repeat(len(lengths), 1), sizes, torch.tensor(lengths)))
    )


# One tile, several tiles of rows and steps of columns, and the smallest sizes.
LENGTHS = ([5, 0, 1, 2, 3], [1, 1], [2], [3, 2, 3], [140, 100, 3, 65], [33, 64])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_nearest_clusters_match_portable(device, lengths):
    n = max(lengths) + 1
    squared, ward, plain = measure(lengths, n), kernels(device), WardClustering(torch.device("cpu"))
    batch = draw_clusters(lengths, n, "cpu")
    load(plain, squared, lengths)._shape = (len(lengths), n + 1, n + 1)  # not the first round
    costs, nearest = plain._find_nearest(batch)
    found, index = load(ward, squared, lengths)._find_nearest(ClusterBatch(*(x.to(device) for x in batch)))
    has_other = (torch.arange(n) < torch.tensor(lengths)[:, None]) & (torch.tensor(lengths) > 1)[:, None]
    assert torch.equal(found.cpu()[has_other], costs[has_other])
    assert torch.equal(index.cpu()[has_other], nearest[has_other])
    assert (found.cpu()[~has_other] == torch.inf).all()
    assert torch.equal(index.cpu()[~has_other], torch.arange(n).repeat(len(lengths), 1)[~has_other])


def test_ties_select_the_lowest_cluster(device):
    n = 150
    squared = torch.ones(2, n, n, dtype=torch.float64)
    squared[1, :, 70] = squared[1, :, 140] = 0.5
    _, index = load(kernels(device), squared, [n, n])._find_nearest(
        ClusterBatch(
            torch.zeros(2, n).long().to(device), torch.ones(2, n).double().to(device), torch.tensor([n, n]).to(device)
        )
    )
    expected = torch.zeros(2, n, dtype=torch.int64)
    expected[0, 0], expected[1] = 1, 70
    expected[1, 70] = 140
    assert torch.equal(index.cpu(), expected)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_merged_distances_match_portable(device, lengths):
    """The matrix stays symmetric. Plain torch combines all rows first, which differs by rounding below the diagonal."""
    n = max(lengths) + 1
    squared, ward, plain = measure(lengths, n), kernels(device), WardClustering(torch.device("cpu"))
    batch = draw_clusters(lengths, n, "cpu")
    # Each third cluster is merged with the next one, and each seventh is dropped.
    places, counts = torch.arange(n), torch.tensor(lengths)[:, None]
    merges = (places % 3 == 1) & (places + 1 < counts)
    stays = (places < counts) & ~merges.roll(1, 1) & (places % 7 != 6)
    left = stays.sum(1)
    load(plain, squared, lengths)._view(0, len(lengths), n, n).diagonal(dim1=1, dim2=2).fill_(clusters._FAR)
    nearest = (places + 1).clamp(max=n - 1).repeat(len(lengths), 1)
    after, terms = plain._plan_merges(batch, nearest, merges, stays, left, max(int(left.max()), 1))
    width = terms.one.shape[1]
    plain._combine(terms, n)
    load(ward, squared, lengths)._combine(MergeTerms(*(x.to(device) for x in terms)), n)
    expected, found = (x._view(0, len(lengths), width, width).cpu() for x in (plain, ward))
    for document, count in enumerate(left.tolist()):
        own = found[document, :count, :count].fill_diagonal_(0)
        above = expected[document, :count, :count].triu(1)
        assert torch.equal(own, own.mT)
        torch.testing.assert_close(own.triu(1), above, rtol=1e-12, atol=0)
    assert torch.equal(after.counts, left)


@pytest.mark.parametrize(("metric", "factor"), [("cosine", 2), ("cosine", 8), ("rows", 3.5)])
def test_clusters_of_both_backends_are_equal(device, metric, factor):
    documents = draw(0, 1, 2, 3, 5, 40, 64, 70, 31, 90)
    with lik_ops.use_backend("portable"):
        expected = lik_ops.pool_tokens(documents, factor, metric=metric, num_protected=0)
    with lik_ops.use_backend("triton"):
        found = lik_ops.pool_tokens([x.to(device) for x in documents], factor, metric=metric, num_protected=0)
    assert torch.equal(found[1].cpu(), expected[1])
    torch.testing.assert_close(found[0].cpu(), expected[0], rtol=1e-12, atol=1e-12)


def test_equal_tokens_are_one_cluster(device):
    a, b = torch.eye(2, 8)
    document = torch.stack([a, b, a, b, a, a]).to(device)
    with lik_ops.use_backend("triton"):
        tokens, _ = lik_ops.pool_tokens([document], 2, num_protected=0)
    assert torch.equal(tokens.cpu(), torch.stack([a, b]))


def test_triton_backend_launches_the_ward_kernels(device, monkeypatch):
    from lik_ops.gpu.runtime import launcher

    names, launch = [], launcher.launch
    monkeypatch.setattr(
        launcher, "launch", lambda kernel, *args: names.append(kernel.__name__) or launch(kernel, *args)
    )
    documents = draw(20, device=device)
    with lik_ops.use_backend("portable"):
        lik_ops.pool_tokens(documents, 2)
    assert not names
    with lik_ops.use_backend("triton"):
        lik_ops.pool_tokens(documents, 2)
    assert set(names) == {"ward_nearest", "ward_merge"}


@pytest.mark.gpu
def test_offsets_exceed_32_bits():
    """The last document starts after 2^31 distances. It has few clusters, so the matrix ends after a few rows."""
    n, count = 46400, 4
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("needs 24 GB of GPU memory")
    options = {"dtype": torch.float64, "device": "cuda"}
    ward = kernels("cuda")
    ward._buffers = [torch.empty(n * n + count * n, **options), torch.empty(8, **options)]
    last = ward._buffers[0][n * n :].view(count, n).fill_(1)
    last[3, 1] = last[1, 3] = 0.25
    counts = torch.tensor([0, count], device="cuda")
    batch = ClusterBatch(torch.arange(n, device="cuda").repeat(2, 1), torch.ones(2, n, **options), counts)
    costs, nearest = ward._find_nearest(batch)
    assert nearest[1, :count].tolist() == [1, 3, 0, 1]
    assert costs[1, :count].tolist() == [0.5, 0.125, 0.5, 0.125]
    one = torch.tensor([[0, 0], [1, 3]], device="cuda")
    weight, nothing = torch.ones(2, 2, **options), torch.zeros(2, 2, **options)
    ward._combine(MergeTerms(one, one, weight, nothing, nothing, torch.tensor([0, 2], device="cuda")), n)
    assert ward._buffers[0].view(2, 2, 2)[1, 0, 1].item() == 0.25
