"""Unified backward: one pass over the argmax adds to both gradients with fp32 atomics.

```text
maxsim_scatter, program = (BM tokens s of query i, K_per_program documents):
    for c0 in range(0, d, BD):
        rows = q_weight * normalized(Q[i, s])
        acc = 0
        for k in documents of the program, BN at a time:
            t, g = argmax[k, i, s], grad_scores[i, k]
            acc += g * normalized(D[k, t])
            atomic_add(sum_D[k, t], g * rows)
        atomic_add(sum_Q[i, s], acc)
maxsim_finish, program = BM rows x:
    G = sum of the parts of sums[x], in order
    grad_weight[x] = <normalized(x), G>
    grad[x] = q_weight * G, through the Jacobian of the norm
```

The order of atomic additions varies, so the result is not reproducible. The gradients of a row whose sums are zero are
zero, even if the row holds NaN. `maxsim_finish` also serves other backwards that leave fp32 sums.
"""

import triton
import triton.language as tl

from ..common.primitives import (
    compute_inverse_norm,
    load_query_mask,
    load_query_weight,
    load_rows,
    locate_document,
    locate_program_rows,
    locate_rows,
    sum_row_squares,
    to_int64,
)
from .gather import backprop_normalize, dequantize_rows, gather_gradients
from .pairs import count_max_pairs


@triton.jit(do_not_specialize=["K_per_program"])
def maxsim_scatter(Q, D, up, sum_Q, sum_D, d, K_per_program, C: tl.constexpr):
    """Add the contributions of BM tokens of a query and some documents to both sums.

    ``sum_Q[i, s] += g * D[argmax]`` excludes the weight, and ``sum_D[argmax] += g * q_weight * Q[i, s]``. Tokens are
    normalized with C.NORMALIZE. `maxsim_finish` turns the sums into gradients.

    Args:
        Q: `QueryArgs`.
        D: `DocumentArgs`.
        up: `UpstreamArgs`.
        sum_Q: fp32 sums `[Nq, Lq, d]`, filled with zeros, or None.
        sum_D: fp32 sums `[documents, Ld, d]`, filled with zeros, or None.
        d: Number of features.
        K_per_program: Documents of a program.
        C: Compile-time choices, a `KernelConfig`.
    """
    i, s, row_ok = locate_program_rows(up.Lq, C.BM)
    row = i.to(tl.int64) * up.Lq + s
    k_begin = tl.program_id(1) * K_per_program
    ok = load_query_mask(Q, i, s, row_ok)
    count = up.K
    if up.query is not None:
        count = count_max_pairs(up, s, ok, C)
    k_end = tl.minimum(k_begin + K_per_program, count)
    pointers = locate_rows(Q, i, s)
    scale = load_query_weight(Q, i, s, ok)
    if C.NORMALIZE:
        scale *= compute_inverse_norm(sum_row_squares(pointers, ok, d, Q.stride_d, C.BD, C.WIDE_OFFSETS))
    for c0 in range(0, d, C.BD):
        columns = c0 + tl.arange(0, C.BD)
        rows = load_rows(pointers, ok, columns, d, Q.stride_d, C.WIDE_OFFSETS).to(tl.float32) * scale[:, None]
        acc, live = gather_gradients(up, i, s, ok, k_begin, k_end, c0, columns, rows, sum_D, D, None, d, C)
        if sum_Q is not None:
            mask = live[:, None] & (columns < d)[None, :]
            tl.atomic_add(sum_Q + row[:, None] * d + columns[None, :], acc, mask=mask, sem="relaxed")


@triton.jit
def _load_sums(sums, row, ok, columns, d, C: tl.constexpr):
    """Load features `columns` of the sums of rows, adding their parts in order."""
    pointers = sums.ptr + row * d
    G = load_rows(pointers, ok, columns, d, 1, C.WIDE_OFFSETS)
    if sums.parts is not None:
        for p in tl.range(1, sums.parts, loop_unroll_factor=4):  # loads in flight at once
            G += load_rows(pointers + to_int64(p) * sums.step, ok, columns, d, 1, C.WIDE_OFFSETS)
    return G


@triton.jit
def maxsim_finish(X, Q, sums, grad, grad_weight, d, C: tl.constexpr):
    """Turn `sums` over the rows of X into their gradient, and compute the gradient of the weight.

    Args:
        X: `DocumentArgs` of rows `[N, K, Lq, d]`: document tokens, or query tokens with K = 1.
        Q: `QueryArgs` with the weights, or without weights for documents.
        sums: `RowSumArgs`.
        grad: Output in the shape of X, contiguous, or None.
        grad_weight: Output `[N, Lq]`, contiguous, or None. It requires K = 1.
        d: Number of features.
        C: Compile-time choices, a `KernelConfig`.
    """
    n, s, ok = locate_program_rows(sums.Lq, C.BM)
    row = n.to(tl.int64) * sums.Lq + s
    pointers = locate_document(X, n // sums.K, n % sums.K) + s.to(tl.int64) * X.stride_l
    w = load_query_weight(Q, n, s, ok)
    live = tl.full((C.BM,), 0, tl.int32)
    dot = tl.full((C.BM,), 0, tl.float32)
    squares = tl.full((C.BM,), 0, tl.float32)
    for c0 in range(0, d, C.BD):
        columns = c0 + tl.arange(0, C.BD)
        G = _load_sums(sums, row, ok, columns, d, C)
        x = dequantize_rows(load_rows(pointers, ok, columns, d, X.stride_d, C.WIDE_OFFSETS), sums.scale, row, ok)
        live = live | tl.max((G != 0.0).to(tl.int32), axis=1)
        dot += tl.sum(x * G, axis=1)
        squares += tl.sum(x * x, axis=1)
    if C.NORMALIZE:
        dot *= compute_inverse_norm(squares)
    dot = tl.where(live > 0, dot, 0.0)
    if grad is not None:
        for c0 in range(0, d, C.BD):
            columns = c0 + tl.arange(0, C.BD)
            G = _load_sums(sums, row, ok, columns, d, C) * w[:, None]
            if C.NORMALIZE:
                x = load_rows(pointers, live > 0, columns, d, X.stride_d, C.WIDE_OFFSETS)
                x = dequantize_rows(x, sums.scale, row, live > 0)
                G = backprop_normalize(G, x, squares, dot * w)
            G = tl.where((live > 0)[:, None], G, 0.0)
            mask = ok[:, None] & (columns < d)[None, :]
            tl.store(grad + row[:, None] * d + columns[None, :], G.to(grad.dtype.element_ty), mask=mask)
    if grad_weight is not None:
        tl.store(grad_weight + row, dot, mask=ok)
