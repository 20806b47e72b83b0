"""Results that sm_90 kernels leave to a second launch, because they are rare and their code costs registers.

`maxsim_forward_sm90` stores RESCORE_BITS in place of a score with fp32 rows or tokens that fp16 terms cannot
represent. `maxsim_forward_sm90_large_d` stores UNRESOLVED in place of the argmax of a maximum that is NaN or -inf. The
second launch follows on the same stream. It reads all results and usually finds none to replace.

```text
for each block of scores:
    for each n with scores[n] == RESCORE_BITS:
        group, k = n // K, n % K
        scores[n] = sum_s weight[s] * row_max[s, k]         # over the rows of the group, by `score_rows`
for each block of the argmax:
    for each n with argmax[n] == UNRESOLVED:
        k, i, s = n // (Nq * Lq), n // Lq % Nq, n % Lq
        argmax of the rows around s of query i              # by `score_rows`
```

Invariants:

- `score_rows` multiplies the same rows in the same order, so results have the bits of `maxsim_forward`.
- A group is C.ROWS_PER_QUERY rows of one query, as in `maxsim_forward_sm90`.
"""

import triton
import triton.language as tl

from ...common.arguments import Operands, OutputArgs
from ...common.fp32 import RESCORE_BITS
from ...common.primitives import UNRESOLVED
from .kernel import choose_score, locate_dense_document, score_rows


@triton.jit
def _score_block(x, i, s0, k, out, sizes, C: tl.constexpr):
    """Score C.ROWS_PER_QUERY rows of query i from token s0 on against document k.

    Store their argmax if out.argmax is not None, and return the sums of the groups of the tile. Only the first group
    exists.
    """
    lane = tl.arange(0, C.BM)
    rows = (i + lane * 0, 0, sizes.Lq, lane < C.ROWS_PER_QUERY)
    argmax_offset = (k.to(tl.int64) * sizes.Nq + i) * sizes.Lq
    document = locate_dense_document(x.D, 0 * k, k, sizes)
    sums, has_rows, any_kept = score_rows(x, rows, s0, document, argmax_offset, out, sizes, False, C)
    return choose_score(sums, has_rows, any_kept)


@triton.jit(do_not_specialize=["parts"])
def maxsim_rescore(Q, D, scores, argmax, sizes, d, parts, BLOCK: tl.constexpr, C: tl.constexpr):
    """Replace the scores `[Nq * parts, K]` that are RESCORE_BITS, and the argmax of these pairs if asked for.

    Args:
        Q: `QueryArgs`.
        D: `DocumentArgs`.
        scores: fp32 scores of all groups, contiguous.
        argmax: Argmax `[K, Nq, Lq]`, or None.
        sizes: `SizeArgs`.
        d: Number of features.
        parts: Groups of each query.
        BLOCK: Scores of a program.
        C: `KernelConfig` with FP32_TERMS. Of the groups in a tile, only the first exists.
    """
    tl.static_assert(C.FP32_TERMS > 0 and not C.LONG_QUERIES)
    GROUPS: tl.constexpr = C.BM // C.ROWS_PER_QUERY
    x = Operands(Q, D, None, None, None, d, None)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = sizes.Nq.to(tl.int64) * parts * sizes.K
    bits = tl.load(scores + offsets, mask=offsets < total, other=0.0).to(tl.int32, bitcast=True)
    lanes = tl.where(bits == RESCORE_BITS, tl.arange(0, BLOCK), BLOCK)
    n = tl.min(lanes, axis=0)
    while n < BLOCK:
        position = tl.program_id(0).to(tl.int64) * BLOCK + n
        group = (position // sizes.K).to(tl.int32)
        k = (position % sizes.K).to(tl.int32)
        s0 = group % parts * C.ROWS_PER_QUERY
        sums = _score_block(x, group // parts, s0, k, OutputArgs(scores, argmax), sizes, C)
        lane = tl.arange(0, GROUPS)
        tl.store(scores + position + lane, sums, mask=lane == 0)
        lanes = tl.where(lanes == n, BLOCK, lanes)
        n = tl.min(lanes, axis=0)


@triton.jit
def _number_block(at, Lq, C: tl.constexpr):
    """Return the number of the block of query rows that has position `at` of an argmax `[K, Nq, Lq]`."""
    return at // Lq * tl.cdiv(Lq, C.ROWS_PER_QUERY) + at % Lq // C.ROWS_PER_QUERY


@triton.jit
def maxsim_resolve_argmax(Q, D, argmax, sizes, d, BLOCK: tl.constexpr, C: tl.constexpr):
    """Replace each argmax `[K, Nq, Lq]` that is UNRESOLVED.

    Args:
        Q: `QueryArgs`.
        D: `DocumentArgs`.
        argmax: Contiguous integers.
        sizes: `SizeArgs`.
        d: Number of features.
        BLOCK: Integers of a program.
        C: `KernelConfig`. Of the groups in a tile, only the first exists.
    """
    tl.static_assert(not C.LONG_QUERIES)
    x = Operands(Q, D, None, None, None, d, None)
    rows = sizes.Nq.to(tl.int64) * sizes.Lq
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tokens = tl.load(argmax + offsets, mask=offsets < rows * sizes.K, other=0)
    lanes = tl.where(tokens == UNRESOLVED, tl.arange(0, BLOCK), BLOCK)
    n = tl.min(lanes, axis=0)
    while n < BLOCK:
        position = tl.program_id(0).to(tl.int64) * BLOCK + n
        row = position % rows
        s0 = (row % sizes.Lq // C.ROWS_PER_QUERY * C.ROWS_PER_QUERY).to(tl.int32)
        k = (position // rows).to(tl.int32)
        _score_block(x, (row // sizes.Lq).to(tl.int32), s0, k, OutputArgs(argmax, argmax), sizes, C)
        lanes = tl.where(_number_block(offsets, sizes.Lq, C) == _number_block(position, sizes.Lq, C), BLOCK, lanes)
        n = tl.min(lanes, axis=0)
