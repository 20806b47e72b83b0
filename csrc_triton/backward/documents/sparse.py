"""The gradient of documents that meet few query rows: zeros, and over them the sums of the few tokens that won."""

import triton
import triton.language as tl

from ...common.primitives import (
    compiler_barrier_dtype,
    compute_inverse_norm,
    load_query_weight,
    load_rows,
    locate_document,
    sum_row_squares,
)
from ..arguments import GradientTarget
from ..gather import load_argmax, write_gradient
from ..list_pairs import fill_with_zeros
from .sums import compute_scales, finite_abs


@triton.jit
def _load_hit_tokens(up, owner, k, e, rows, t_begin, t_end, C: tl.constexpr):
    """The token from t_begin to t_end that each row e of a document won (-1: none), and the score's gradient there."""
    token, won, g = load_argmax(up, owner, k, owner + e // up.Lq, e % up.Lq, e < rows, C)
    return compiler_barrier_dtype(
        tl.where(won & (token >= t_begin) & (token < t_end), token, -1)
    ), compiler_barrier_dtype(g)


@triton.jit
def _locate_document_rows(token, coefficient, owner, up, Q, d, C: tl.constexpr):
    """Where the rows of a document begin in Q, and what each counts for."""
    e = tl.arange(0, C.BM)
    i = owner + e // up.Lq
    s = e % up.Lq
    won = token >= 0
    rows = i.to(tl.int64) * Q.stride_n + s.to(tl.int64) * Q.stride_l
    if Q.weight is not None:
        coefficient *= load_query_weight(Q, i, s, won)
    if C.NORMALIZE:
        coefficient *= compute_inverse_norm(sum_row_squares(Q.ptr + rows, won, d, Q.stride_d, C.BD, C.WIDE_OFFSETS))
    return rows, tl.where(won, coefficient, 0.0)


@triton.jit
def _multiply_matches(match, x, coefficient, C: tl.constexpr):
    """``[BN, BD]``: the sums of the rows x that match, times their coefficients.

    For half types the coefficients are split in a high and a low part. Where a coefficient or an x is not finite, all
    of G becomes NaN, which `_sum_match_rows` looks for.
    """
    G = tl.full((C.BN, C.BD), 0, tl.float32)
    if x.dtype == tl.float32:
        none = coefficient * 0.0
        G = tl.dot(tl.where(match, coefficient[None, :], none[None, :]), x, G, input_precision=C.PRECISION)
    else:
        high = coefficient.to(x.dtype)
        low = (coefficient - high.to(tl.float32)).to(x.dtype)
        none = (high.to(tl.float32) * 0.0).to(x.dtype)
        G = tl.dot(tl.where(match, high[None, :], none[None, :]), x, G)
        G = tl.dot(tl.where(match, low[None, :], tl.full((1, 1), 0, x.dtype)), x, G)
    return G


@triton.jit
def _add_matches_in_order(match, coefficient, rows, columns, Q, d, C: tl.constexpr):
    """`_multiply_matches` of rows that may hold NaN or inf: in a product they would spoil every token."""
    G = tl.full((C.BN, C.BD), 0, tl.float32)
    for n in range(C.BM):
        this = tl.arange(0, C.BM) == n
        at = tl.max((match & this[None, :]).to(tl.int32), axis=1) > 0
        if tl.max(at.to(tl.int32), axis=0) > 0:
            row = Q.ptr + tl.sum(tl.where(this, rows, 0), axis=0)
            x = tl.load(row + columns.to(tl.int64) * Q.stride_d, mask=columns < d, other=0.0).to(tl.float32)
            G += tl.where(at[:, None], (tl.sum(tl.where(this, coefficient, 0.0), axis=0) * x)[None, :], 0.0)
    return G


@triton.jit
def _sum_match_rows(match, coefficient, x, rows, columns, Q, d, C: tl.constexpr):
    """The sums of the rows x of Q, of which these are BD features, that match each of BN rows."""
    scale = 1.0
    unscale = 1.0
    if x.dtype == tl.float16:  # its range may not hold the coefficients
        scale, unscale = compute_scales(tl.max(finite_abs(coefficient), axis=0))
    G = _multiply_matches(match, x, coefficient * scale, C) * unscale
    # Zeros of the one-hot times NaN or inf are NaN: only then is it worth looking at every row.
    if tl.sum(G * 0.0) != 0.0:
        G = _add_matches_in_order(match, coefficient, rows, columns, Q, d, C)
    return G


@triton.jit
def _sum_matches(of, columns, d, C: tl.constexpr):
    x, match, coefficient, rows, ok, Q = of
    if not C.SINGLE_STEP:
        x = load_rows(Q.ptr + rows, ok, columns, d, Q.stride_d, C.WIDE_OFFSETS)
    return _sum_match_rows(match, coefficient, x, rows, columns, Q, d, C)


@triton.jit
def maxsim_grad_sparse_documents(Q, D, up, grad_D, rows, tokens, d, C: tl.constexpr):
    """grad_D of `tokens` tokens of one document a program; the document meets `rows` <= BM query rows.

    Zeros first, then the tokens that won, BN at a time; rows of the same token write the same bits.
    """
    parts = tl.cdiv(up.Ld, tokens)
    document = tl.program_id(0) // parts
    t_begin = (tl.program_id(0) % parts) * tokens
    t_end = tl.minimum(t_begin + tokens, up.Ld)
    owner = document * 0
    k = document
    if C.CANDIDATES:
        owner = document // up.K
        k = document % up.K
    base = locate_document(D, owner, k)
    gradient = grad_D + document.to(tl.int64) * up.Ld * d
    scale = up.scale
    if scale is not None:
        scale += document.to(tl.int64) * up.Ld
    token, g = _load_hit_tokens(up, owner, k, tl.arange(0, C.BM), rows, t_begin, t_end, C)
    begins, coefficient = _locate_document_rows(token, g, owner, up, Q, d, C)
    fill_with_zeros(gradient + t_begin.to(tl.int64) * d, (t_end - t_begin) * d, "")
    tl.debug_barrier()  # the zeros are written by other threads than the sums
    x = load_rows(Q.ptr + begins, token >= 0, tl.arange(0, C.BD), d, Q.stride_d, C.WIDE_OFFSETS)
    for r0 in tl.range(0, tl.minimum(rows, C.BM), C.BN, num_stages=1):
        this = tl.arange(0, C.BM)[None, :] == (r0 + tl.arange(0, C.BN))[:, None]
        t = tl.max(tl.where(this, token[None, :], -1), axis=1)
        match = (token[None, :] == t[:, None]) & (t >= 0)[:, None]
        of = (x, match, coefficient, begins, token >= 0, Q)
        to = GradientTarget(base, t, t >= 0, gradient, t.to(tl.int64), scale)
        write_gradient(_sum_matches, of, to, d, D, d, C)
