"""One round of Ward's method for a batch of documents: the nearest clusters, and distances after merges, in fp64.

G is the matrix of squared distances of the centroids of a document's clusters, and a is the number of tokens of A.

```text
half the cost of a merge:  G[A, B] / (1/a + 1/b)
after a merge of A and B:  G[C, K] = p G[A, K] + q G[B, K] - p q G[A, B],  p = a / (a + b), q = b / (a + b)

ward_nearest, program = (document, BM clusters):
    for each BN clusters of the document:
        cost = G[BM, BN] / (1/a + 1/b), infinite for a cluster and itself
        best, index = minimum of each lane and where it was found first
    store the minimum over lanes, and the lowest index that attains it
ward_merge, program = (document, BM rows and BN columns of the next matrix):
    row i is p_i G[one_i] + q_i G[two_i] - between_i, and columns are combined in the same way
    of i and j, combine the one that is first, and then the other one
```

Invariants:

- A kernel reads and writes only clusters of a document, and no padding or diagonal of a matrix matters.
- If the matrix is symmetric, so is the next one, bit by bit. Each multiply-add is an explicit fma, as in torch.addcmul.
"""

import triton
import triton.language as tl

_NO_CLUSTER = tl.constexpr(2**31 - 1)


@triton.jit
def _locate_tile(counts, m, tiles):
    """Return the document of a program, its number of clusters, and the tile of the program.

    The number of clusters is at most m.
    """
    batch = tl.program_id(0) // tiles
    return batch.to(tl.int64), tl.minimum(tl.load(counts + batch), m).to(tl.int32), tl.program_id(0) % tiles


@triton.jit(do_not_specialize=["m"])
def ward_nearest(squared, sizes, counts, costs, nearest, m, BM: tl.constexpr, BN: tl.constexpr):
    """Find the nearest cluster of each of BM clusters.

    Args:
        squared: Squared distances fp64 `[B, m, m]`.
        sizes: The number of tokens of each cluster, fp64 `[B, m]`.
        counts: The number of clusters of each document, int64 `[B]`.
        costs: Half of the least cost of a merge with another cluster, fp64 `[B, m]`. Infinite without another cluster.
        nearest: The cluster with this cost, int64 `[B, m]`; the lowest of equal ones, and the cluster itself if there
            is no other one.
        m: Clusters of a padded document. The grid is `B * cdiv(m, BM)`.
        BM: Clusters of a program.
        BN: Other clusters of a step.
    """
    batch, count, tile = _locate_tile(counts, m, tl.cdiv(m, BM))
    i = tile * BM + tl.arange(0, BM)
    rows = squared + batch * m * m + i.to(tl.int64) * m
    weights = 1.0 / tl.load(sizes + batch * m + i, mask=i < count, other=1.0)
    best = tl.full((BM, BN), float("inf"), tl.float64)
    index = tl.full((BM, BN), _NO_CLUSTER, tl.int32)
    end = tl.where(tile * BM < count, count, 0)
    for first in range(0, end, BN):
        j = first + tl.arange(0, BN)
        mask = (i < count)[:, None] & (j < count)[None, :] & (i[:, None] != j[None, :])
        distances = tl.load(rows[:, None] + j[None, :], mask=mask, other=float("inf"))
        other_weights = 1.0 / tl.load(sizes + batch * m + j, mask=j < count, other=1.0)
        cost = distances / (weights[:, None] + other_weights[None, :])
        index = tl.where(cost < best, j[None, :], index)
        best = tl.minimum(cost, best)
    minima = tl.min(best, axis=1)
    index = tl.min(tl.where(best == minima[:, None], index, _NO_CLUSTER), axis=1)
    index = tl.where(index == _NO_CLUSTER, i, index)
    tl.store(costs + batch * m + i, minima, mask=i < m)
    tl.store(nearest + batch * m + i, index.to(tl.int64), mask=i < m)


@triton.jit
def _load_terms(terms, at, ok):
    """Load the terms of clusters. `one` and `two` are int32, and p, q and between are fp64."""
    one = tl.load(terms.one + at, mask=ok, other=0).to(tl.int32)
    two = tl.load(terms.two + at, mask=ok, other=0).to(tl.int32)
    p, q = tl.load(terms.p + at, mask=ok, other=0.0), tl.load(terms.q + at, mask=ok, other=0.0)
    return one, two, p, q, tl.load(terms.between + at, mask=ok, other=0.0)


@triton.jit(do_not_specialize=["m", "left"])
def ward_merge(squared, terms, out, m, left, BM: tl.constexpr, BN: tl.constexpr):
    """Compute BM rows and BN columns of the squared distances of the next round.

    Args:
        squared: Squared distances of this round, fp64 `[B, m, m]`.
        terms: `WardMergeArgs` with the clusters of the next round.
        out: Squared distances of the next round, fp64 `[B, left, left]`.
        m: Clusters of a padded document in this round.
        left: Clusters of a padded document in the next round. The grid is `B * cdiv(left, BM) * cdiv(left, BN)`.
        BM: Rows of a tile.
        BN: Columns of a tile.
    """
    columns = tl.cdiv(left, BN)
    batch, count, tile = _locate_tile(terms.counts, left, tl.cdiv(left, BM) * columns)
    i = tile // columns * BM + tl.arange(0, BM)
    j = tile % columns * BN + tl.arange(0, BN)
    i_one, i_two, i_p, i_q, i_between = _load_terms(terms, batch * left + i, i < count)
    j_one, j_two, j_p, j_q, j_between = _load_terms(terms, batch * left + j, j < count)
    ok = (i < count)[:, None] & (j < count)[None, :]
    i_merged, j_merged = (i_one != i_two)[:, None], (j_one != j_two)[None, :]
    row_one = squared + batch * m * m + (i_one.to(tl.int64) * m)[:, None]
    row_two = squared + batch * m * m + (i_two.to(tl.int64) * m)[:, None]
    a = tl.load(row_one + j_one[None, :], mask=ok, other=0.0)
    b = tl.load(row_one + j_two[None, :], mask=ok & j_merged, other=0.0)
    c = tl.load(row_two + j_one[None, :], mask=ok & i_merged, other=0.0)
    d = tl.load(row_two + j_two[None, :], mask=ok & i_merged & j_merged, other=0.0)
    # The cluster that is first is combined first, so that the result is symmetric.
    upper = i[:, None] <= j[None, :]
    first_p, last_p = tl.where(upper, i_p[:, None], j_p[None, :]), tl.where(upper, j_p[None, :], i_p[:, None])
    first_q, last_q = tl.where(upper, i_q[:, None], j_q[None, :]), tl.where(upper, j_q[None, :], i_q[:, None])
    first = tl.where(upper, i_between[:, None], j_between[None, :])
    between = tl.where(upper, j_between[None, :], i_between[:, None])
    x = tl.fma(tl.where(upper, c, b), first_q, tl.fma(a, first_p, -first))
    y = tl.fma(d, first_q, tl.fma(tl.where(upper, b, c), first_p, -first))
    # If the last cluster is not merged, its q is 0.
    distances = tl.fma(y, last_q, tl.fma(x, last_p, -between))
    tl.store(out + batch * left * left + i.to(tl.int64)[:, None] * left + j[None, :], distances, mask=ok)
