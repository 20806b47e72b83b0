"""Scores of documents from the centroids of their tokens alone: the first stage of a search of residual codes.

```text
score[i, k] = sum_s weight[i, s] * max_t table[i, code[k, t], s]

program = (query i, document k)
for t0 in range(0, length[k], BN):
    code = codes[document k, t0 : t0 + BN]          # [BN]
    x = table[i, code]                              # [BN, ROWS], -inf for codes that are no centroid
    best = max(best, x)
    hits |= probed[i, code]                         # without `probed`: any centroid
score = tree_sum(weight[i] * max over BN of best)
if nothing was hit: score = -inf
if a code other than SKIPPED_CODE is no centroid, or the document is outside `codes`: score = inf
```

The score +inf keeps a malformed document among the candidates. A later stage that reads the tokens decides its score.
"""

import triton
import triton.language as tl

from ..common.primitives import sum_in_order
from ..common.segments import locate_document_segment

SKIPPED_CODE = tl.constexpr(-(2**31))  # of masked tokens, as in `portable/forward/code_scores.py`


@triton.jit(do_not_specialize=["Nq", "K", "Td", "count"])
def maxsim_code_scores(
    table, weight, probed, codes, segments, scores, Nq, K, Td, count, ROWS: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Compute the score of one query and one document for each program.

    Args:
        table: Similarities of centroids and query tokens, fp32 `[Nq, count, ROWS]`.
        weight: Query weights, fp32 `[Nq, ROWS]`.
        probed: Which centroids a query probes, `[Nq, count]`, or None. A document without a probed code scores -inf.
        codes: Codes of all tokens.
        segments: `SegmentArgs` of the documents.
        scores: Output fp32 `[Nq, K]`.
        Nq: Number of queries.
        K: Number of documents.
        Td: Number of packed document tokens.
        count: Number of centroids.
        ROWS: Query tokens, padded to a power of two.
        BN: Document tokens of a step.
    """
    pid = tl.program_id(0).to(tl.int64)
    query, k = pid % Nq, pid // Nq
    begin, length, valid = locate_document_segment(segments, k, k >= 0, Td)
    best = tl.full((BN, ROWS), float("-inf"), tl.float32)
    hits = tl.full((BN,), 0, tl.int32)
    has_invalid_code = tl.full((BN,), 0, tl.int32)
    for t0 in range(0, length, BN):
        t = t0 + tl.arange(0, BN)
        code = tl.load(codes + begin + t, mask=t < length, other=SKIPPED_CODE)
        ok = (code >= 0) & (code < count)
        has_invalid_code = has_invalid_code | ((code != SKIPPED_CODE) & (ok == 0)).to(tl.int32)
        row = query * count + tl.where(ok, code, 0).to(tl.int64)
        x = tl.load(table + row[:, None] * ROWS + tl.arange(0, ROWS)[None, :], mask=ok[:, None], other=float("-inf"))
        best = tl.maximum(best, x)
        if probed is not None:
            hits = hits | tl.load(probed + row, mask=ok, other=0).to(tl.int32)
        else:
            hits = hits | ok.to(tl.int32)
    terms = tl.load(weight + query * ROWS + tl.arange(0, ROWS)) * tl.max(best, axis=0)
    score = tl.sum(sum_in_order(terms, 1, ROWS), axis=0)
    score = tl.where(tl.max(hits, axis=0) > 0, score, float("-inf"))
    is_invalid = (valid == 0) | (tl.max(has_invalid_code, axis=0) > 0)
    tl.store(scores + query * K + k, tl.where(is_invalid, float("inf"), score))
