"""The source-owned backward: one pass over the winners adds to both gradients with fp32 atomics."""

import triton
import triton.language as tl

from ..common.primitives import (
    compute_inverse_norm,
    load_query_mask,
    load_query_weight,
    load_rows,
    locate_document,
    locate_rows,
    sum_row_squares,
    to_int64,
)
from .gather import backprop_normalize, dequantize_rows, gather_gradients, locate_query_tile
from .pairs import count_max_pairs


@triton.jit(do_not_specialize=["K_per_program"])
def maxsim_scatter(Q, D, up, sum_Q, sum_D, d, K_per_program, C: tl.constexpr):
    """Add into zeroed fp32 sums (None: not wanted) what BM tokens of a query get from and give to some documents.

    ``sum_Q[i, s] += g * D[winner]`` (before the weight) and ``sum_D[winner] += g * w * Q[i, s]``, normalised tokens
    if asked; `maxsim_finish` turns the sums into gradients.
    """
    i, s, row_ok = locate_query_tile(up, C)
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
        acc, live = gather_gradients(up, i, s, ok, k_begin, k_end, columns, rows, sum_D, D, d, C)
        if sum_Q is not None:
            mask = live[:, None] & (columns < d)[None, :]
            tl.atomic_add(sum_Q + row[:, None] * d + columns[None, :], acc, mask=mask, sem="relaxed")


@triton.jit
def _load_sums(sums, row, ok, columns, d, C: tl.constexpr):
    """Features `columns` of the sums of rows, of their parts in order."""
    pointers = sums.ptr + row * d
    G = load_rows(pointers, ok, columns, d, 1, C.WIDE_OFFSETS)
    if sums.parts is not None:
        for p in range(1, sums.parts):
            G += load_rows(pointers + to_int64(p) * sums.step, ok, columns, d, 1, C.WIDE_OFFSETS)
    return G


@triton.jit
def maxsim_finish(X, Q, sums, grad, grad_weight, d, C: tl.constexpr):
    """Turn `sums` over the rows of X into their gradient, through the norm and times the weight; and the weight's own.

    X is ``[N, K, Lq, d]``, passed as Documents: the document tokens, or the query tokens with K = 1,
    whose weights come from Q (documents pass it with none). `grad` or `grad_weight` is None where not wanted.
    """
    n, s, ok = locate_query_tile(sums, C)
    row = n.to(tl.int64) * sums.Lq + s
    pointers = locate_document(X, n // sums.K, n % sums.K) + s.to(tl.int64) * X.stride_l
    w = load_query_weight(Q, n, s, ok)
    live = tl.full((C.BM,), 0, tl.int32)
    for c0 in range(0, d, C.BD):
        G = _load_sums(sums, row, ok, c0 + tl.arange(0, C.BD), d, C)
        live = live | tl.max((G != 0.0).to(tl.int32), axis=1)
    dot = tl.full((C.BM,), 0, tl.float32)
    squares = tl.full((C.BM,), 0, tl.float32)
    for c0 in range(0, d, C.BD):
        columns = c0 + tl.arange(0, C.BD)
        G = _load_sums(sums, row, ok, columns, d, C)
        x = dequantize_rows(
            load_rows(pointers, live > 0, columns, d, X.stride_d, C.WIDE_OFFSETS), sums.scale, row, live > 0
        )
        dot += tl.sum(x * G, axis=1)
        squares += tl.sum(x * x, axis=1)
    if C.NORMALIZE:
        dot *= compute_inverse_norm(squares)
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
