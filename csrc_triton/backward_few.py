"""The gradient of documents that meet few query rows: zeros, and the few tokens that won over them."""

import triton
import triton.language as tl

from .arguments import Sizes
from .backward import norm_sums, through_norm, winners
from .backward_documents import finite_rows, power_of_two
from .common import apart, document_base, inverse_norm, load_rows, query_weight, row_pointers, rows_sum_of_squares

FILL = tl.constexpr(8192)  # elements set to zero at a time


@triton.jit
def _won(up, owner, k, e, rows, t_begin, t_end, sizes, C: tl.constexpr):
    """The token from t_begin to t_end that each row e of a document won (-1: none), and the score's gradient there."""
    token, won, g = winners(up, owner, k, owner + e // sizes.Lq, e % sizes.Lq, e < rows, sizes, C)
    return apart(tl.where(won & (token >= t_begin) & (token < t_end), token, -1)), apart(g)


@triton.jit
def _few_rows(token, coefficient, owner, Q, sizes, d, C: tl.constexpr):
    """Where the rows of a document begin, and what each counts for."""
    e = tl.arange(0, C.BM)
    i = owner + e // sizes.Lq
    s = e % sizes.Lq
    won = token >= 0
    pointers = row_pointers(Q, i, s)
    if Q.weight is not None:
        coefficient *= query_weight(Q, i, s, won)
    if C.NORMALIZE:
        coefficient *= inverse_norm(rows_sum_of_squares(pointers, won, d, Q.stride_d, C.BD, C.WIDE))
    return pointers, tl.where(won, coefficient, 0.0)


@triton.jit
def _first_rows(token, up, owner, k, rows, t_begin, t_end, sizes, C: tl.constexpr):
    """Of each row, the first one with the same winner; -1 where it has none."""
    first = tl.full((C.BM,), C.BM, tl.int32)
    for r0 in tl.range(0, C.BM, C.BN, num_stages=1):
        r = r0 + tl.arange(0, C.BN)
        other, _ = _won(up, owner, k, r, rows, t_begin, t_end, sizes, C)
        first = tl.minimum(first, tl.min(tl.where(other[:, None] == token[None, :], r[:, None], C.BM), axis=0))
    return tl.where(token >= 0, first, -1)


@triton.jit
def _one_hot_product(match, x, coefficient, C: tl.constexpr):
    """``[BN, BD]``: the sums of the rows x that match, times their coefficients.

    For half types the coefficients are taken in a high and a low part.
    """
    G = tl.full((C.BN, C.BD), 0, tl.float32)
    if x.dtype == tl.float32:
        G = tl.dot(tl.where(match, coefficient[None, :], 0.0), x, G, input_precision=C.PRECISION)
    else:
        high = coefficient.to(x.dtype)
        low = (coefficient - high.to(tl.float32)).to(x.dtype)
        zero = tl.full((1, 1), 0, x.dtype)
        G = tl.dot(tl.where(match, high[None, :], zero), x, G)
        G = tl.dot(tl.where(match, low[None, :], zero), x, G)
    return G


@triton.jit
def _sums(match, coefficient, x, C: tl.constexpr):
    """The sums of the rows x, of which these are BD features, that match each of BN rows."""
    scale = 1.0
    unscale = 1.0
    if x.dtype == tl.float16:  # its range may not hold the coefficients: bring the largest just below 2^15
        size = tl.where(tl.abs(coefficient) < float("inf"), tl.abs(coefficient), 0.0)
        exponent = tl.maximum(tl.max(size, axis=0).to(tl.int32, bitcast=True) >> 23, 15)
        scale = power_of_two(268 - exponent)
        unscale = power_of_two(exponent - 14)
    finite = finite_rows(x, coefficient)
    zero = tl.full((1, 1), 0, x.dtype)
    clean = tl.where(finite[:, None], x, zero)
    G = _one_hot_product(match, clean, tl.where(finite, coefficient, 0.0) * scale, C) * unscale
    # Rows that hold NaN or inf, one at a time: in a product they would spoil every token.
    bad = (finite == 0) & (tl.max(match.to(tl.int32), axis=0) > 0)
    if tl.max(bad.to(tl.int32), axis=0) > 0:
        for n in range(C.BM):
            this = (tl.arange(0, C.BM) == n) & bad
            if tl.max(this.to(tl.int32), axis=0) > 0:
                row = tl.sum(tl.where(this[:, None], coefficient[:, None] * x.to(tl.float32), 0.0), axis=0)
                at = tl.max((match & this[None, :]).to(tl.int32), axis=1) > 0
                G += tl.where(at[:, None], row[None, :], 0.0)
    return G


@triton.jit
def fill_with_zeros(begin, elements):
    for first in tl.range(0, elements, FILL, num_stages=1):
        offsets = first + tl.arange(0, FILL)
        tl.store(begin + offsets, tl.zeros((FILL,), begin.dtype.element_ty), mask=offsets < elements)


@triton.jit(do_not_specialize=["rows", "tokens", "Nq", "K", "Lq", "Ld"])
def maxsim_grad_documents_few(Q, D, up, grad_D, rows, tokens, Nq, K, Lq, Ld, d, C: tl.constexpr):
    """grad_D of `tokens` tokens of one document a program; the document meets `rows` <= BM query rows.

    Zeros first, then the tokens that won: of the rows with the same winner, the first one writes the sum of all. BN
    rows are summed at a time.
    """
    sizes = Sizes(Nq, K, Lq, Ld)
    parts = tl.cdiv(Ld, tokens)
    document = tl.program_id(0) // parts
    t_begin = (tl.program_id(0) % parts) * tokens
    t_end = tl.minimum(t_begin + tokens, Ld)
    owner = document * 0
    k = document
    if C.CANDIDATES:
        owner = document // K
        k = document % K
    base = document_base(D, owner, k)
    gradient = grad_D + document.to(tl.int64) * Ld * d
    token, g = _won(up, owner, k, tl.arange(0, C.BM), rows, t_begin, t_end, sizes, C)
    pointers, coefficient = _few_rows(token, g, owner, Q, sizes, d, C)
    target = _first_rows(token, up, owner, k, rows, t_begin, t_end, sizes, C)
    fill_with_zeros(gradient + t_begin.to(tl.int64) * d, (t_end - t_begin) * d)
    tl.debug_barrier()  # the zeros are written by other threads than the sums

    x = load_rows(pointers, token >= 0, tl.arange(0, C.BD), d, Q.stride_d, C.WIDE)
    for r0 in tl.range(0, tl.minimum(rows, C.BM), C.BN, num_stages=1):
        match = target[None, :] == (r0 + tl.arange(0, C.BN))[:, None]
        t = tl.max(tl.where(match, token[None, :], -1), axis=1)
        dot = tl.full((C.BN,), 0, tl.float32)
        squares = tl.full((C.BN,), 0, tl.float32)
        live = tl.full((C.BN,), 0, tl.int32)
        if C.NORMALIZE and not C.ONE_CHUNK:
            for c0 in range(0, d, C.BD):
                columns = c0 + tl.arange(0, C.BD)
                x = load_rows(pointers, token >= 0, columns, d, Q.stride_d, C.WIDE)
                G = _sums(match, coefficient, x, C)
                _, more_dot, more_squares, more_live = norm_sums(G, base, t, t >= 0, columns, D, d, C)
                dot += more_dot
                squares += more_squares
                live = live | more_live
        for c0 in range(0, d, C.BD):
            columns = c0 + tl.arange(0, C.BD)
            if not C.ONE_CHUNK:
                x = load_rows(pointers, token >= 0, columns, d, Q.stride_d, C.WIDE)
            G = _sums(match, coefficient, x, C)
            if C.NORMALIZE:
                y, more_dot, more_squares, more_live = norm_sums(G, base, t, t >= 0, columns, D, d, C)
                if C.ONE_CHUNK:
                    dot = more_dot
                    squares = more_squares
                    live = more_live
                G = through_norm(G, y, live, squares, dot)
            offsets = (t.to(tl.int64) * d)[:, None] + columns[None, :]
            mask = (t >= 0)[:, None] & (columns < d)[None, :]
            tl.store(gradient + offsets, G.to(grad_D.dtype.element_ty), mask=mask)
