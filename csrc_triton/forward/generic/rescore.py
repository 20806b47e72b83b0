"""Scores that `maxsim_forward_specialized` leaves out: those with fp32 rows or tokens that fp16 terms cannot represent.

The kernel for split fp32 stores RESCORE_BITS in place of such a score. This launch follows it on the same stream. It
reads all scores, usually finds none to replace, and takes about as long as an empty launch.

```text
for each block of scores:
    for each n with scores[n] == RESCORE_BITS:
        group, k = n // K, n % K
        scores[n] = sum_s weight[s] * row_max[s, k]         # over the rows of the group, by `score_rows`
```

Invariants:

- `score_rows` splits the same rows in the same order, so scores have the bits of `maxsim_forward`.
- A group is C.ROWS_PER_QUERY rows of one query, as in `maxsim_forward_specialized`.
"""

import triton
import triton.language as tl

from ...common.arguments import Operands, OutputArgs
from ...common.fp32 import RESCORE_BITS
from ...common.primitives import import_args_class, locate_document
from .kernel import score_rows


@triton.jit(do_not_specialize=["parts"])
def maxsim_rescore(Q, D, scores, sizes, d, parts, BLOCK: tl.constexpr, C: tl.constexpr):
    """Replace the scores `[Nq * parts, K]` that are RESCORE_BITS.

    Args:
        Q: `QueryArgs`.
        D: `DocumentArgs` of documents without a mask.
        scores: fp32 scores of all groups, contiguous.
        sizes: `SizeArgs`.
        d: Number of features.
        parts: Groups of each query.
        BLOCK: Scores of a program.
        C: `KernelConfig` with FP32_TERMS. Of the groups in a tile, only the first exists.
    """
    tl.static_assert(C.FP32_TERMS > 0 and not C.LONG_QUERIES)
    GROUPS: tl.constexpr = C.BM // C.ROWS_PER_QUERY
    Document: tl.constexpr = import_args_class("Document")
    x = Operands(Q, D, None, None, None, d, None)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = sizes.Nq.to(tl.int64) * parts * sizes.K
    bits = tl.load(scores + at, mask=at < total, other=0.0).to(tl.int32, bitcast=True)
    left = tl.where(bits == RESCORE_BITS, tl.arange(0, BLOCK), BLOCK)
    n = tl.min(left, axis=0)
    while n < BLOCK:
        place = tl.program_id(0).to(tl.int64) * BLOCK + n
        group = (place // sizes.K).to(tl.int32)
        k = (place % sizes.K).to(tl.int32)
        lane = tl.arange(0, C.BM)
        rows = (group // parts + lane * 0, 0, sizes.Lq, lane < C.ROWS_PER_QUERY)
        s0 = group % parts * C.ROWS_PER_QUERY
        base = locate_document(D, 0 * k, k)
        document = Document(base, base, k * sizes.Ld, sizes.Ld)
        sums, _, _ = score_rows(x, rows, s0, document, 0, OutputArgs(scores, None), sizes, False, C)
        lane = tl.arange(0, GROUPS)
        tl.store(scores + place + lane, sums, mask=lane == 0)
        left = tl.where(left == n, BLOCK, left)
        n = tl.min(left, axis=0)
