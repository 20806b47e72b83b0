"""Merge of the splits of long documents for soft MaxSim.

A few long documents leave most SMs idle. `maxsim_forward_soft` then computes the soft maxima of splits of
`split_tokens` tokens in programs of their own, and `maxsim_soft_splits` merges them:

```text
program = (document k, query i)
for s0 in range(0, Lq, ROWS):
    high = max(maxima[split, i, rows] for split in splits of k)    # online, AT_ONCE splits at a time
    lse = high + tau * log(sum(exp((maxima[split, i, rows] - high) / tau) for split in splits of k))
    score += tree_sum(where(q_mask, q_weight * lse, 0))
if document k keeps no token: score = -inf, or 0 if the query keeps no token either
```

Invariants:

- A log-sum-exp depends on the order of its sums. Lengths of splits, and whether a document is split, therefore depend
  only on Ld. A score has the same bits in every batch.
- A soft maximum of a split has the rounding error of a similarity, as the soft maximum of a document.
"""

import triton
import triton.language as tl

from ..common.primitives import load_query_mask, load_query_weight, sum_in_order_across_warps
from ..forward.generic.kernel import choose_score
from .maximum import load_temperature, merge_split_maxima

_FLAGS_PER_STEP = tl.constexpr(128)


@triton.jit
def _has_kept_split(cut, first):
    """Return whether one of the splits from `first` on keeps a token."""
    has_token = tl.full((), 1, tl.int32)
    if cut.kept_flags is not None:
        has_token = tl.full((), 0, tl.int32)
        for n0 in range(0, cut.count, _FLAGS_PER_STEP):
            n = n0 + tl.arange(0, _FLAGS_PER_STEP)
            has_token = tl.maximum(
                has_token, tl.max(tl.load(cut.kept_flags + first + n, mask=n < cut.count, other=0), axis=0)
            )
    return has_token


@triton.jit(do_not_specialize=["stride_q"])
def maxsim_soft_splits(
    Q, cut, scores, lse, tau, sizes, stride_q, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, CANDIDATES: tl.constexpr
):
    """Compute scores and soft maxima of documents from the soft maxima of their splits.

    Args:
        Q: `QueryArgs` for masks and weights.
        cut: `SoftSplitArgs` that `maxsim_forward_soft` filled.
        scores: Output `[Nq, K]` with stride 1 between documents.
        lse: Output `[K, Nq, Lq]`, or `[Nq, K, Lq]` for candidates, or None.
        tau: Temperature, a number or a pointer to one.
        sizes: `SizeArgs`.
        stride_q: Stride of `scores` between queries.
        ROWS: Rows of a query that are merged at a time, a power of two.
        AT_ONCE: Splits that are merged at a time.
        CANDIDATES: Whether each query has its own documents.
    """
    tau = load_temperature(tau)
    i = (tl.program_id(0) % sizes.Nq).to(tl.int64)
    k = (tl.program_id(0) // sizes.Nq).to(tl.int64)
    if CANDIDATES:
        document = i * sizes.K + k
        first = document * cut.count * sizes.Lq
        step = sizes.Lq
        lse_offset = document * sizes.Lq
    else:
        document = k
        first = (document * cut.count * sizes.Nq + i) * sizes.Lq
        step = sizes.Nq * sizes.Lq
        lse_offset = (document * sizes.Nq + i) * sizes.Lq
    total = tl.full((), 0, tl.float32)
    has_rows = tl.full((), 0, tl.int32)
    for s0 in range(0, sizes.Lq, ROWS):
        s = s0 + tl.arange(0, ROWS)
        keep = load_query_mask(Q, i, s, s < sizes.Lq)
        best = merge_split_maxima(cut.argmax, first + s, step, cut.count, keep, tau, AT_ONCE)
        if lse is not None:
            tl.store(lse + lse_offset + s, tl.where(keep, best, float("-inf")), mask=s < sizes.Lq)
        terms = tl.where(keep, load_query_weight(Q, i, s, keep) * best, 0.0)
        sums = tl.sum(sum_in_order_across_warps(terms, 1, ROWS), axis=0)
        total = tl.where(s0 == 0, sums, total + sums)  # a sum may be -0.0
        has_rows = tl.maximum(has_rows, tl.max(keep.to(tl.int32), axis=0))
    score = choose_score(total, has_rows, _has_kept_split(cut, document * cut.count))
    tl.store(scores + i * stride_q + k, score)
