"""Query gradient: each element is summed by one program in a fixed order.

```text
acc[s] = sum_k grad_scores[i, k] * normalized(D[k, argmax[k, i, s]])
grad_q_weight[i, s] = <normalized(q), acc[s]>
grad_Q[i, s] = q_weight * acc[s], through the Jacobian of the norm

program = BM tokens s of query i
for c0 in range(0, d, BD):                          # only if NORMALIZE needs several feature steps
    acc = gather_gradients(features c0 to c0 + BD)
    dot += <q, acc>
for c0 in range(0, d, BD):
    acc = gather_gradients(features c0 to c0 + BD)  # [BM, BD], documents in ascending order
    dot += <q, acc>                                 # unless the first loop computed it
    grad_Q[i, s, c0 : c0 + BD] = q_weight * acc, through the Jacobian of the norm
grad_q_weight[i, s] = dot * inverse_norm(q)
```

If only the gradient of the weight is needed, the first loop runs alone. No atomics. A token without an argmax gets a
zero gradient and is not read.

Few query rows are few programs. Dense calls with many documents therefore run `maxsim_grad_query_parts`, with a program
for each part of the documents and each feature step, and then `maxsim_finish`, which adds the parts in ascending order.
With many query rows, a program adds all parts itself, in the same order.
"""

import triton
import triton.language as tl

from ..common.primitives import (
    compute_inverse_norm,
    load_query_mask,
    load_query_weight,
    load_rows,
    locate_program_rows,
    locate_rows,
    sum_row_squares,
)
from .gather import backprop_normalize, gather_gradients
from .pairs import count_max_pairs


@triton.jit
def _compute_row_gradient(up, i, s, ok, pointers, c0, Q, D, counts, d, C: tl.constexpr):
    """Compute the gathered gradient of one feature step, without weights.

    Also returns the query rows, which are zero without an argmax, which rows have one, and the features.
    """
    columns = c0 + tl.arange(0, C.BD)
    count = up.K
    if up.query is not None:
        count = count_max_pairs(up, s, ok, C)
    acc, live = gather_gradients(up, i, s, ok, 0, count, c0, columns, None, None, D, counts, d, C)
    q = load_rows(pointers, live, columns, d, Q.stride_d, C.WIDE_OFFSETS).to(tl.float32)
    return q, acc, live, columns


@triton.jit
def maxsim_grad_queries(Q, D, up, counts, grad_Q, grad_weight, d, C: tl.constexpr):
    """Compute the query gradient of BM tokens of a query for each program.

    Args:
        Q: `QueryArgs`.
        D: `DocumentArgs`.
        up: `UpstreamArgs`. Packed layouts are one query of Lq tokens.
        counts: `DequantArgs` or `CodecDequantArgs` of encoded, packed documents, or None.
        grad_Q: Output `[Nq, Lq, d]`, contiguous, or None.
        grad_weight: Output `[Nq, Lq]`, contiguous, or None.
        d: Number of features.
        C: Compile-time choices, a `KernelConfig`.
    """
    # The Jacobian of the norm needs <q, gathered> over all features before any of grad_Q can be written.
    TWICE: tl.constexpr = C.NORMALIZE and not C.SINGLE_STEP
    i, s, row_ok = locate_program_rows(up.Lq, C.BM)
    row = i.to(tl.int64) * up.Lq + s
    ok = load_query_mask(Q, i, s, row_ok)
    pointers = locate_rows(Q, i, s)
    squares = tl.full((C.BM,), 0, tl.float32)
    if C.NORMALIZE:
        squares = sum_row_squares(pointers, ok, d, Q.stride_d, C.BD, C.WIDE_OFFSETS)

    dot = tl.full((C.BM,), 0, tl.float32)
    alive = tl.full((C.BM,), 0, tl.int32)
    if TWICE or grad_Q is None:
        for c0 in range(0, d, C.BD):
            q, acc, live, columns = _compute_row_gradient(up, i, s, ok, pointers, c0, Q, D, counts, d, C)
            dot += tl.sum(q * acc, axis=1)
            alive = live.to(tl.int32)
    if grad_Q is not None:
        for c0 in range(0, d, C.BD):
            q, acc, live, columns = _compute_row_gradient(up, i, s, ok, pointers, c0, Q, D, counts, d, C)
            alive = live.to(tl.int32)
            if not TWICE:
                dot += tl.sum(q * acc, axis=1)
            w = load_query_weight(Q, i, s, ok)  # not before the gather, which needs all registers
            G = acc * w[:, None]
            if C.NORMALIZE:
                G = backprop_normalize(G, q, squares, dot * compute_inverse_norm(squares) * w)
            G = tl.where(live[:, None], G, 0.0)
            offsets = row[:, None] * d + columns[None, :]
            mask = row_ok[:, None] & (columns < d)[None, :]
            tl.store(grad_Q + offsets, G.to(grad_Q.dtype.element_ty), mask=mask)
    if grad_weight is not None:
        if C.NORMALIZE:
            dot = tl.where(alive > 0, dot * compute_inverse_norm(squares), 0.0)
        tl.store(grad_weight + row, dot, mask=row_ok)


@triton.jit(do_not_specialize=["share", "count", "first_query"])
def maxsim_grad_query_parts(Q, D, up, sums, share, count, first_query, d, C: tl.constexpr):
    """Store the gathered gradient of BM tokens of a query over `count` parts of the documents, BD features.

    Each part is summed on its own, and added to the sum of the parts before. The grid has a program for each row tile,
    for each `count` parts, and for each feature step. A token without an argmax has zeros.

    Args:
        Q: `QueryArgs`.
        D: `DocumentArgs`.
        up: `UpstreamArgs` of a dense layout.
        sums: Output fp32 `[parts / count, queries, Lq, d]`.
        share: Documents of a part. The last part may have fewer.
        count: Parts of a program, all or one.
        first_query: The query whose sums are the first.
        d: Number of features.
        C: Compile-time choices, a `KernelConfig`.
    """
    n, s, row_ok = locate_program_rows(up.Lq, C.BM)
    i = n + first_query
    ok = load_query_mask(Q, i, s, row_ok)
    slot = tl.program_id(1)
    c0 = tl.program_id(2) * C.BD
    columns = c0 + tl.arange(0, C.BD)
    total = tl.full((C.BM, C.BD), 0, tl.float32)
    for part in range(slot * count, slot * count + count):
        begin = part * share
        end = tl.minimum(begin + share, up.K)
        acc, live = gather_gradients(up, i, s, ok, begin, end, c0, columns, None, None, D, None, d, C)
        total += tl.where(live[:, None], acc, 0.0)
    queries = tl.num_programs(0) // tl.cdiv(up.Lq, C.BM)
    of_query = sums + (slot.to(tl.int64) * queries + n) * up.Lq * d
    tl.store(of_query + (s[:, None] * d + columns[None, :]), total, mask=row_ok[:, None] & (columns < d)[None, :])
