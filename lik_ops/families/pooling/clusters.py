"""Clusters of the tokens of documents, for token pooling. Plain torch, so it runs on every device.

All functions accept a batch of documents that are padded at the end, and return the cluster of each token. The clusters
of a document are numbered by their first token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

KMEANS_ROUNDS = 10
_FAR = 1e200  # the squared distance of padding, and of a cluster to itself; finite, so that it can be multiplied by 0


def find_sequential_clusters(lengths: Tensor, counts: Tensor, n: int) -> Tensor:
    """Split each document into runs of consecutive tokens, whose lengths differ by at most one.

    Args:
        lengths: the number of tokens of each document, int64 ``[B]``.
        counts: the number of clusters of each document, int64 ``[B]``.
        n: the number of tokens of a padded document.

    Returns:
        The cluster of each token, int64 ``[B, n]``. Padding has arbitrary values.
    """
    return torch.arange(n, device=lengths.device) * counts[:, None] // lengths.clamp(min=1)[:, None]


def find_kmeans_clusters(tokens: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
    """Assign tokens to the nearest of `counts` centroids, after `KMEANS_ROUNDS` rounds of Lloyd's algorithm.

    The first centroids are tokens at equal distances, so the result is deterministic. A centroid without tokens is
    dropped at the end.

    Args:
        tokens: ``[B, n, d]``, fp64.
        lengths: the number of tokens of each document, int64 ``[B]``.
        counts: the number of clusters of each document, int64 ``[B]``.

    Returns:
        The cluster of each token, int64 ``[B, n]``. Padding has arbitrary values.

    Source: Lloyd, "Least squares quantization in PCM", 1982.
    """
    B, n, d = tokens.shape
    k = int(counts.max()) if B else 0
    each = torch.arange(k, device=tokens.device)
    is_centroid = each < counts[:, None]
    starts = ((2 * each + 1) * lengths[:, None] // (2 * counts.clamp(min=1)[:, None])).clamp(max=max(n - 1, 0))
    is_token = torch.arange(n, device=tokens.device) < lengths[:, None]
    centroids = tokens.gather(1, starts[..., None].expand(B, k, d))
    nearest = lengths.new_zeros(B, n)
    for _ in range(KMEANS_ROUNDS):
        distances = centroids.square().sum(-1)[:, None] - 2 * tokens @ centroids.mT
        nearest = distances.masked_fill(~is_centroid[:, None], math.inf).argmin(-1)
        members = (nearest[..., None] == each).masked_fill(~is_token[..., None], False).to(tokens.dtype)
        sizes = members.sum(1)[..., None]
        centroids = torch.where(sizes > 0, members.mT @ tokens / sizes, centroids)
    return _number_by_first_token(nearest, is_token, k)


def _number_by_first_token(labels: Tensor, is_token: Tensor, k: int) -> Tensor:
    """Return labels from 0 in the order of their first tokens. Labels without tokens are dropped."""
    B, n = labels.shape
    positions = torch.arange(n, device=labels.device).expand(B, n)
    first = labels.new_full((B, k), n).scatter_reduce(1, labels, positions.masked_fill(~is_token, n), "amin")
    rank = first.argsort(dim=1, stable=True).argsort(dim=1)
    return rank.gather(1, labels)


def measure_cosine(tokens: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the squared cosine distances ``(1 - <a, b>)^2`` of all pairs of tokens of norm 1, ``[B, n, n]``."""
    return torch.bmm(tokens, tokens.mT, out=out).neg_().add_(1).square_()


def measure_rows(tokens: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the squared Euclidean distances between the rows of each document's matrix of cosine distances.

    Padding must be zero. It is at distance 1 from each token, so it does not contribute to differences of rows.
    """
    distances = torch.bmm(tokens, tokens.mT).neg_().add_(1)
    squares = distances.square().sum(-1)
    products = torch.bmm(distances, distances.mT, out=out)
    return products.mul_(-2).add_(squares[:, :, None]).add_(squares[:, None]).clamp_(min=0)


class _Clusters(NamedTuple):
    """The clusters of each document, all ``[B, m]``, in the order of their first tokens."""

    first: Tensor  # the first token
    sizes: Tensor  # the number of tokens, fp64
    is_filled: Tensor  # False for the padding of documents that have fewer clusters


class WardClustering:
    """Ward's method for a batch of documents, with a workspace that is reused.

    The result equals ``scipy.cluster.hierarchy.linkage(distances, "ward")``, cut by ``fcluster(..., counts,
    "maxclust")``. Merges of equal cost may differ.

    The cost of merging clusters A and B with a and b members is ``2 G[A, B] / (1/a + 1/b)``, where G is the squared
    distance of their centroids. C is the union of A and B, and K is any other cluster. With ``p = a / (a + b)`` and
    ``q = b / (a + b)``, the Lance-Williams formula gives ``G[C, K] = p G[A, K] + q G[B, K] - p q G[A, B]``.

    Each round merges all pairs of clusters that are each other's nearest cluster. Ward's costs are reducible, so this
    gives the same tree as merging one pair at a time. Each round keeps about two thirds of the clusters, so most of
    the time is spent in the first rounds.

    The caller fills `squared` with the squared distances of all pairs of tokens, fp64 ``[B, n, n]``.

    Source: Ward, "Hierarchical grouping to optimize an objective function", 1963; Murtagh, "A survey of recent advances
    in hierarchical clustering algorithms", 1983 (reciprocal nearest neighbors).
    """

    def __init__(self, B: int, n: int, device: torch.device) -> None:
        self._buffers = [torch.empty(B * n * n, dtype=torch.float64, device=device) for _ in range(3)]
        self._shape = B, n, n

    @property
    def squared(self) -> Tensor:
        """The workspace for squared distances, which `find_clusters` overwrites."""
        return self._view(0, *self._shape)

    def _view(self, buffer: int, *shape: int) -> Tensor:
        return self._buffers[buffer][: math.prod(shape)].view(shape)

    def find_clusters(self, lengths: Tensor, counts: Tensor) -> Tensor:
        """Return the cluster of each token, int64 ``[B, n]``. Padding has arbitrary values.

        Args:
            lengths: the number of tokens of each document, int64 ``[B]``.
            counts: the number of clusters of each document, int64 ``[B]``. Equal costs can lead to fewer clusters.
        """
        B, n, _ = self.squared.shape
        places = torch.arange(n, device=lengths.device)
        parents, costs = places.repeat(B, 1), self.squared.new_full((B, n), math.inf)
        is_token = places < lengths[:, None]
        if not is_token.all():
            self.squared.masked_fill_(~(is_token[:, :, None] & is_token[:, None]), _FAR)
        clusters = _Clusters(places.repeat(B, 1), self.squared.new_ones(B, n), is_token)
        while (m := clusters.first.shape[1]) > 1:
            cost, nearest = self._find_nearest(clusters.sizes)
            mutual = (nearest.gather(1, nearest) == places[:m]) & (cost < _FAR / n)
            merges = mutual & (places[:m] < nearest)
            document, row = merges.nonzero(as_tuple=True)
            if len(row) == 0:
                break
            child = clusters.first[document, nearest[document, row]]
            parents[document, child] = clusters.first[document, row]
            costs[document, child] = cost[document, row]
            stays = clusters.is_filled & ~(mutual & ~merges)
            clusters = self._merge(clusters, nearest, merges, stays)
        return _cut(parents, costs, lengths, counts)

    def _find_nearest(self, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return half of the least cost of merging each cluster with another one, and which. Both are ``[B, m]``."""
        B, m = sizes.shape
        squared, cost = self._view(0, B, m, m), self._view(1, B, m, m)
        squared.diagonal(dim1=1, dim2=2).fill_(_FAR)
        weights = 1 / sizes
        torch.div(squared, torch.add(weights[:, :, None], weights[:, None], out=cost), out=cost)
        nearest = cost.argmin(-1)
        return cost.gather(2, nearest[..., None]).squeeze(2), nearest

    def _merge(self, old: _Clusters, nearest: Tensor, merges: Tensor, stays: Tensor) -> _Clusters:
        """Merge clusters with their nearest one, and drop the clusters that do not stay."""
        B, m = stays.shape
        left = int(stays.sum(1).max())
        one = stays.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :left]
        is_filled, merges = stays.gather(1, one), merges.gather(1, one)
        two = torch.where(merges, nearest.gather(1, one), one)
        a, b = old.sizes.gather(1, one), old.sizes.gather(1, two).masked_fill(~merges, 0)
        row, other = ((torch.arange(B, device=one.device)[:, None] * m + x).flatten() for x in (one, two))
        pairs = merges.flatten().nonzero().squeeze(1)
        p, q = ((x / (a + b)).flatten()[pairs] for x in (a, b))
        between = p * q * self._buffers[0][(row * m)[pairs] + two.flatten()[pairs]]
        terms = [x[:, None] for x in (p, q, between)]
        padding = None if is_filled.all() else (~is_filled).flatten().nonzero().squeeze(1)
        rows = self._combine_rows(row, other[pairs], pairs, terms, padding, m)
        self._view(0, B, m, left).copy_(rows.view(B, left, m).mT)
        self._combine_rows(row, other[pairs], pairs, terms, padding, left)
        self._buffers[:2] = self._buffers[1::-1]
        return _Clusters(old.first.gather(1, one), a + b, is_filled)

    def _combine_rows(
        self, row: Tensor, other: Tensor, pairs: Tensor, terms: list[Tensor], padding: Tensor | None, width: int
    ) -> Tensor:
        """Select rows of the first buffer, and merge some with other rows. The result is in the second buffer."""
        p, q, between = terms
        x = self._buffers[0][: len(self._buffers[0]) // width * width].view(-1, width)
        found = torch.index_select(x, 0, row, out=self._view(1, len(row), width))
        ones, others = self._view(2, 2, len(pairs), width)
        torch.index_select(found, 0, pairs, out=ones)
        torch.index_select(x, 0, other, out=others)
        found.index_copy_(0, pairs, ones.mul_(p).addcmul_(others, q).sub_(between))
        return found if padding is None else found.index_fill_(0, padding, _FAR)


def _cut(parents: Tensor, costs: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
    """Return the cluster of each token after the cheapest merges. A parent is before its children."""
    n = parents.shape[1]
    merges = (lengths - counts).clamp(min=0)
    limits = costs.sort(1).values.gather(1, (merges - 1).clamp(min=0)[:, None])
    limits = limits.masked_fill(merges[:, None] == 0, -math.inf)
    roots = torch.where((costs <= limits) & costs.isfinite(), parents, torch.arange(n, device=parents.device))
    for _ in range(max(1, n - 1).bit_length()):
        roots = roots.gather(1, roots)
    is_root = roots == torch.arange(n, device=parents.device)
    return (is_root.cumsum(1) - 1).gather(1, roots)
