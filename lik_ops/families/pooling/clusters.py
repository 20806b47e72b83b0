"""Clusters of the tokens of documents, for token pooling. Plain torch, so it runs on every device.

All functions accept a batch of documents that are padded at the end, and return the cluster of each token, int64
``[B, n]``. The clusters of a document are numbered by their first token. Padding has arbitrary values. `lengths` and
`counts` are the numbers of tokens and of clusters of each document, int64 ``[B]``. Tokens are fp64 ``[B, n, d]``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...portable.pace import adjust_threads

KMEANS_ROUNDS = 10
_FAR = 1e200  # the squared distance of padding, and of a cluster to itself; finite, so that it can be multiplied by 0
# Relative. Merges of nearly the same cost as the last merge of the cut are made, because costs have rounding errors.
_COST_MARGIN = 1e-9


def find_sequential_clusters(tokens: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
    """Split each document into runs of consecutive tokens, whose lengths differ by at most one."""
    return torch.arange(tokens.shape[1], device=lengths.device) * counts[:, None] // lengths.clamp(min=1)[:, None]


def find_kmeans_clusters(tokens: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
    """Assign tokens to the nearest of `counts` centroids, after `KMEANS_ROUNDS` rounds of Lloyd's algorithm.

    The first centroids are tokens at equal distances, so the result is deterministic. A centroid without tokens is
    dropped at the end.

    Source: Lloyd, "Least squares quantization in PCM", 1982.
    """
    B, n, d = tokens.shape
    k = int(counts.max()) if B else 0
    cluster_ids = torch.arange(k, device=tokens.device)
    is_centroid = cluster_ids < counts[:, None]
    starts = ((2 * cluster_ids + 1) * lengths[:, None] // (2 * counts.clamp(min=1)[:, None])).clamp(max=max(n - 1, 0))
    is_token = torch.arange(n, device=tokens.device) < lengths[:, None]
    centroids = tokens.gather(1, starts[..., None].expand(B, k, d))
    nearest = lengths.new_zeros(B, n)
    for _ in range(KMEANS_ROUNDS):
        distances = centroids.square().sum(-1)[:, None] - 2 * tokens @ centroids.mT
        nearest = distances.masked_fill(~is_centroid[:, None], math.inf).argmin(-1)
        members = (nearest[..., None] == cluster_ids).masked_fill(~is_token[..., None], False).to(tokens.dtype)
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
    return _subtract_from_one(torch.bmm(tokens, tokens.mT, out=out)).square_()


def _subtract_from_one(x: Tensor) -> Tensor:
    """Replace `x` by ``1 - x`` in one pass."""
    return torch.add(x.new_ones(()), x, alpha=-1, out=x)


def measure_rows(tokens: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the squared Euclidean distances between the rows of each document's matrix of cosine distances.

    Padding must be zero. It is at distance 1 from each token, so it does not contribute to differences of rows.
    """
    distances = _subtract_from_one(torch.bmm(tokens, tokens.mT))
    squares = distances.square().sum(-1)
    products = torch.bmm(distances, distances.mT, out=out)
    return products.mul_(-2).add_(squares[:, :, None]).add_(squares[:, None]).clamp_(min=0)


class ClusterBatch(NamedTuple):
    """The clusters of each document, in any order, with padding after the last one."""

    first: Tensor  # the first token, int64 [B, m]
    sizes: Tensor  # the number of tokens, fp64 [B, m]
    counts: Tensor  # the number of clusters of each document, int64 [B]


class MergeTerms(NamedTuple):
    """The clusters of the next round: ``p row(one) + q row(two) - between``. All ``[B, left]``.

    Merged clusters come first. A cluster that is not merged has p = 1, q = 0, and between = 0.
    """

    one: Tensor  # the position of the cluster in this round, int64
    two: Tensor  # the position of the cluster that is merged with it, int64; `one` without a merge
    p: Tensor  # fp64
    q: Tensor  # fp64
    between: Tensor  # fp64
    counts: Tensor  # the number of clusters of each document, int64 [B]


class WardClustering:
    """Ward's method for batches of documents, with a workspace that is reused.

    The result equals ``scipy.cluster.hierarchy.linkage(distances, "ward")``, cut by ``fcluster(..., counts,
    "maxclust")``. Merges of equal cost may differ.

    The cost of merging clusters A and B with a and b members is ``2 G[A, B] / (1/a + 1/b)``, where G is the squared
    distance of their centroids. C is the union of A and B, and K is any other cluster. With ``p = a / (a + b)`` and
    ``q = b / (a + b)``, the Lance-Williams formula gives ``G[C, K] = p G[A, K] + q G[B, K] - p q G[A, B]``.

    Each round merges all pairs of clusters that are each other's nearest cluster, and the cheapest pair in any case.
    Ward's costs are reducible: C is no nearer to K than A or B was. So the tree is the same as with one merge at a
    time, and no later merge with a cluster costs less than the merge with its present nearest cluster.

    The cut makes the cheapest k merges of the tree. The k-th cheapest merge so far is an upper limit of their costs. A
    cluster whose nearest cluster costs more than the limit is dropped, because no merge that includes it is in the
    cut. A document is finished if all its clusters are dropped.

    The caller fills the result of `reserve` with the squared distances of all pairs of tokens, fp64 ``[B, n, n]``.

    Source: Ward, "Hierarchical grouping to optimize an objective function", 1963; Murtagh, "A survey of recent advances
    in hierarchical clustering algorithms", 1983 (reciprocal nearest neighbors).
    """

    buffers = 3  # matrices of the workspace

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []
        self._shape = 0, 0, 0

    def reserve(self, B: int, n: int) -> Tensor:
        """Return the workspace for the squared distances of a batch ``[B, n, n]``, which `find_clusters` overwrites."""
        self._shape = B, n, n
        if not self._buffers or B * n * n > len(self._buffers[0]):
            self._buffers.clear()  # free the old workspace first
            for _ in range(self.buffers):
                self._buffers.append(torch.empty(B * n * n, dtype=torch.float64, device=self._device))
        return self._view(0, *self._shape)

    def _view(self, buffer: int, *shape: int) -> Tensor:
        return self._buffers[buffer][: math.prod(shape)].view(shape)

    def find_clusters(self, lengths: Tensor, counts: Tensor) -> Tensor:
        """Return the cluster of each token. Equal costs can lead to fewer clusters than `counts`."""
        B, n, _ = self._shape
        positions = torch.arange(n, device=lengths.device)
        # Column n receives the writes of clusters that are not merged.
        parents, costs = positions.new_zeros(B, n + 1), self._buffers[0].new_full((B, n + 1), math.inf)
        parents[:, :n] = positions
        merges = (lengths - counts).clamp(min=0)
        self._pad(self._view(0, *self._shape), lengths)
        clusters = ClusterBatch(positions.repeat(B, 1), self._buffers[0].new_ones(B, n), lengths)
        while (m := clusters.first.shape[1]) > 1:
            adjust_threads()
            cost, nearest = self._find_nearest(clusters)
            is_mutual = _find_mutual(cost, nearest)
            has_other = cost < _FAR / n  # False for NaN and infinity, so that every round drops or merges a cluster
            is_mutual &= has_other
            parent = clusters.first.gather(1, nearest)
            is_absorbed = is_mutual & (parent < clusters.first)
            child = torch.where(is_absorbed, clusters.first, n)
            parents.scatter_(1, child, parent)
            costs.scatter_(1, child, cost)
            costs[:, n] = math.inf
            limits = _find_limits(costs, merges)
            # A limit of -inf becomes NaN, and no cluster stays.
            stays = (cost <= limits + _COST_MARGIN * limits.abs()) & has_other & ~is_absorbed
            stays &= positions[:m] < clusters.counts[:, None]
            left = stays.sum(1)
            width = int(left.max())
            if width < 2:
                break
            clusters, terms = self._plan_merges(clusters, nearest, is_mutual & ~is_absorbed, stays, left, width)
            self._combine(terms, m)
        return _cut(parents[:, :n], costs[:, :n], merges)

    def _pad(self, squared: Tensor, counts: Tensor) -> None:
        """Set the squared distances of padding."""
        min_count, m = int(counts.min()), squared.shape[1]
        if min_count < m:
            is_padding = torch.arange(min_count, m, device=counts.device) >= counts[:, None]
            squared[:, min_count:].masked_fill_(is_padding[:, :, None], _FAR)
            squared[:, :, min_count:].masked_fill_(is_padding[:, None], _FAR)

    def _find_nearest(self, clusters: ClusterBatch) -> tuple[Tensor, Tensor]:
        """Return half of the lowest cost of merging each cluster with another one, and which. Both are ``[B, m]``.

        The cost of a cluster without another one is at least `_FAR` / n.
        """
        B, m = clusters.first.shape
        squared, cost = self._view(0, B, m, m), self._view(1, B, m, m)
        squared.diagonal(dim1=1, dim2=2).fill_(_FAR)
        if m == self._shape[1]:  # each cluster is one token, because each round merges some clusters
            min_cost, nearest = squared.min(-1)
            return min_cost.div_(2), nearest
        weights = 1 / clusters.sizes
        torch.div(squared, torch.add(weights[:, :, None], weights[:, None], out=cost), out=cost)
        min_cost, nearest = cost.min(-1)
        return min_cost, nearest

    def _plan_merges(
        self, old: ClusterBatch, nearest: Tensor, merges: Tensor, stays: Tensor, left: Tensor, width: int
    ) -> tuple[ClusterBatch, MergeTerms]:
        """Return the clusters of the next round, and how their distances are computed.

        Args:
            old: the clusters of this round.
            nearest: the nearest cluster of each cluster, int64 ``[B, m]``.
            merges: the clusters that are merged with their nearest one, bool ``[B, m]``.
            stays: the clusters that are left in the next round, bool ``[B, m]``.
            left: the number of these clusters of each document, int64 ``[B]``.
            width: the maximum of `left`.
        """
        B, m = stays.shape
        positions = torch.arange(m, device=left.device)
        merges = merges & stays
        after = (stays & ~merges).cumsum(1) + merges.sum(1, keepdim=True)
        order = torch.where(merges, merges.cumsum(1), after) - 1
        order.masked_fill_(~stays, width)  # column `width` receives all other clusters
        one = nearest.new_zeros(B, width + 1).scatter_(1, order, positions.expand(B, m))[:, :width]
        merged = merges.gather(1, one) & (positions[:width] < left[:, None])
        two = torch.where(merged, nearest.gather(1, one), one)
        a, b = old.sizes.gather(1, one), old.sizes.gather(1, two).masked_fill_(~merged, 0)
        total = a + b
        p, q = a / total, b / total
        squared = self._view(0, B, m * m).gather(1, one * m + two)
        between = torch.where(merged, p * q * squared, 0)  # the diagonal may have any value
        return ClusterBatch(old.first.gather(1, one), total, left), MergeTerms(one, two, p, q, between, left)

    def _combine(self, terms: MergeTerms, m: int) -> None:
        """Replace the squared distances ``[B, m, m]`` by the distances between the clusters of the next round."""
        one, two, p, q, between, counts = terms
        B, width = one.shape
        merged = int((one != two).sum(1).max())
        p, q, two, shift = (x[:, :merged] for x in (p, q, two, -between))
        x, rows, others = self._view(0, B * m, m), self._view(1, B, width, m), self._view(2, B, merged, m)
        starts = torch.arange(B, device=one.device)[:, None] * m
        torch.index_select(x, 0, (starts + one).flatten(), out=rows.view(-1, m))
        torch.index_select(x, 0, (starts + two).flatten(), out=others.view(-1, m))
        mean = rows[:, :merged]
        torch.addcmul(shift[..., None], mean, p[..., None], out=mean).addcmul_(others, q[..., None])
        out, others = self._view(0, B, width, width), self._view(2, B, width, merged)
        torch.gather(rows, 2, one[:, None].expand(B, width, width), out=out)
        torch.gather(rows, 2, two[:, None].expand(B, width, merged), out=others)
        mean = out[..., :merged]
        torch.addcmul(shift[:, None], mean, p[:, None], out=mean).addcmul_(others, q[:, None])
        self._pad(out, counts)


def _find_mutual(cost: Tensor, nearest: Tensor) -> Tensor:
    """Return whether each cluster and its nearest one are each other's nearest cluster, bool ``[B, m]``.

    The cheapest cluster of each document and its nearest one are made each other's nearest, in place. Rounding can lead
    to a cycle of nearest clusters, in which no pair is mutual.
    """
    cheapest = cost.argmin(1, keepdim=True)
    other = nearest.gather(1, cheapest)
    nearest.scatter_(1, other, cheapest)
    cost.scatter_(1, other, cost.gather(1, cheapest))
    return nearest.gather(1, nearest) == torch.arange(nearest.shape[1], device=nearest.device)


def _find_limits(costs: Tensor, merges: Tensor) -> Tensor:
    """Return the cost of the last of the cheapest merges of each document ``[B, 1]``, or infinity if there are fewer.

    Costs ``[B, n]`` are infinite for tokens that are not merged. The cut makes `merges` ``[B]`` merges.
    """
    limits = costs.sort(1).values.gather(1, (merges - 1).clamp(min=0)[:, None])
    return limits.masked_fill(merges[:, None] == 0, -math.inf)


def _cut(parents: Tensor, costs: Tensor, merges: Tensor) -> Tensor:
    """Return the cluster of each token after the cheapest merges. A parent is before its children."""
    n = parents.shape[1]
    positions = torch.arange(n, device=parents.device)
    roots = torch.where((costs <= _find_limits(costs, merges)) & costs.isfinite(), parents, positions)
    for _ in range(max(1, n - 1).bit_length()):
        roots = roots.gather(1, roots)
    return ((roots == positions).cumsum(1) - 1).gather(1, roots)
