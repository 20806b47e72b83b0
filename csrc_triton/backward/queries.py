"""The destination-owned gradient of the queries: each element is summed by one program in a fixed order."""

import triton
import triton.language as tl

from ..common.primitives import (
    compute_inverse_norm,
    load_query_mask,
    load_query_weight,
    load_rows,
    locate_rows,
    sum_row_squares,
)
from .gather import backprop_normalize, gather_gradients, locate_query_tile
from .pairs import count_max_pairs


@triton.jit
def _compute_row_gradient(up, i, s, ok, pointers, c0, Q, D, d, C: tl.constexpr):
    """For one feature step: the query rows (zero where they win nothing) and their gathered gradient before weights."""
    columns = c0 + tl.arange(0, C.BD)
    count = up.K
    if up.query is not None:
        count = count_max_pairs(up, s, ok, C)
    acc, live = gather_gradients(up, i, s, ok, 0, count, columns, None, None, D, d, C)
    q = load_rows(pointers, live, columns, d, Q.stride_d, C.WIDE_OFFSETS).to(tl.float32)
    return q, acc, live, columns


@triton.jit
def maxsim_grad_queries(Q, D, up, grad_Q, grad_weight, d, C: tl.constexpr):
    """grad_Q [Nq, Lq, d] and grad_weight [Nq, Lq] (None: not wanted), BM tokens of a query a program.

    Packed layouts are one query of Lq tokens.
    """
    # The Jacobian of the norm needs <q, gathered> over all features before any of grad_Q can be written.
    TWICE: tl.constexpr = C.NORMALIZE and not C.SINGLE_STEP
    i, s, row_ok = locate_query_tile(up, C)
    row = i.to(tl.int64) * up.Lq + s
    ok = load_query_mask(Q, i, s, row_ok)
    w = load_query_weight(Q, i, s, ok)
    pointers = locate_rows(Q, i, s)
    squares = tl.full((C.BM,), 0, tl.float32)
    if C.NORMALIZE:
        squares = sum_row_squares(pointers, ok, d, Q.stride_d, C.BD, C.WIDE_OFFSETS)

    dot = tl.full((C.BM,), 0, tl.float32)
    alive = tl.full((C.BM,), 0, tl.int32)
    if TWICE or grad_Q is None:
        for c0 in range(0, d, C.BD):
            q, acc, live, columns = _compute_row_gradient(up, i, s, ok, pointers, c0, Q, D, d, C)
            dot += tl.sum(q * acc, axis=1)
            alive = live.to(tl.int32)
    if grad_Q is not None:
        for c0 in range(0, d, C.BD):
            q, acc, live, columns = _compute_row_gradient(up, i, s, ok, pointers, c0, Q, D, d, C)
            alive = live.to(tl.int32)
            if not TWICE:
                dot += tl.sum(q * acc, axis=1)
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
