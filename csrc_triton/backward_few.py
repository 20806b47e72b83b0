"""The gradient of documents that meet few query rows: a program keeps the rows and walks over tiles of tokens."""

import triton
import triton.language as tl

from .arguments import Sizes
from .backward import norm_sums, through_norm, winners
from .backward_documents import finite_rows, power_of_two, store_gradient
from .common import document_base, inverse_norm, load_rows, query_weight, row_pointers, rows_sum_of_squares


@triton.jit
def _few_rows(up, owner, k, rows, Q, sizes, d, C: tl.constexpr):
    """All rows of a document: where they begin, the token each won (-1: none) and its coefficient."""
    e = tl.arange(0, C.BM)
    i = owner + e // sizes.Lq
    s = e % sizes.Lq
    token, won, coefficient = winners(up, owner, k, i, s, e < rows, sizes, C)
    pointers = row_pointers(Q, i, s)
    if Q.weight is not None:
        coefficient *= query_weight(Q, i, s, won)
    if C.NORMALIZE:
        coefficient *= inverse_norm(rows_sum_of_squares(pointers, won, d, Q.stride_d, C.BD, C.WIDE))
    return pointers, tl.where(won, token, -1), tl.where(won, coefficient, 0.0)


@triton.jit
def _one_hot_product(x, local, coefficient, C: tl.constexpr):
    """``[BN, BD]``: the rows x of each token, times their coefficients; for half types in a high and a low part."""
    G = tl.full((C.BN, C.BD), 0, tl.float32)
    match = local[None, :] == tl.arange(0, C.BN)[:, None]
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
def _tile_gradient(token, coefficient, x, t0, C: tl.constexpr):
    """The sums of a tile's rows, of which x are BD features."""
    local = tl.where((token >= t0) & (token < t0 + C.BN), token - t0, -1)
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
    G = _one_hot_product(clean, local, tl.where(finite, coefficient, 0.0) * scale, C) * unscale
    # Rows that hold NaN or inf, one at a time: in a product they would spoil every token of the tile.
    bad = (finite == 0) & (local >= 0)
    if tl.max(bad.to(tl.int32), axis=0) > 0:
        for n in range(C.BM):
            this = (tl.arange(0, C.BM) == n) & bad
            if tl.max(this.to(tl.int32), axis=0) > 0:
                row = tl.sum(tl.where(this[:, None], coefficient[:, None] * x.to(tl.float32), 0.0), axis=0)
                at = tl.max(tl.where(this, local, -1), axis=0)
                G += tl.where((tl.arange(0, C.BN) == at)[:, None], row[None, :], 0.0)
    return G


@triton.jit(do_not_specialize=["rows", "tiles", "Nq", "K", "Lq", "Ld"])
def maxsim_grad_documents_few(Q, D, up, grad_D, rows, tiles, Nq, K, Lq, Ld, d, C: tl.constexpr):
    """grad_D of `tiles` tiles of BN tokens of one document a program; the document meets `rows` <= BM query rows."""
    sizes = Sizes(Nq, K, Lq, Ld)
    parts = tl.cdiv(tl.cdiv(Ld, C.BN), tiles)
    document = tl.program_id(0) // parts
    t_begin = (tl.program_id(0) % parts) * tiles * C.BN
    owner = document * 0
    k = document
    if C.CANDIDATES:
        owner = document // K
        k = document % K
    base = document_base(D, owner, k)
    pointers, token, coefficient = _few_rows(up, owner, k, rows, Q, sizes, d, C)
    x = load_rows(pointers, token >= 0, tl.arange(0, C.BD), d, Q.stride_d, C.WIDE)
    for t0 in tl.range(t_begin, tl.minimum(t_begin + tiles * C.BN, Ld), C.BN, num_stages=1):
        t = t0 + tl.arange(0, C.BN)
        dot = tl.full((C.BN,), 0, tl.float32)
        squares = tl.full((C.BN,), 0, tl.float32)
        live = tl.full((C.BN,), 0, tl.int32)
        if C.NORMALIZE and not C.ONE_CHUNK:
            for c0 in range(0, d, C.BD):
                columns = c0 + tl.arange(0, C.BD)
                x = load_rows(pointers, token >= 0, columns, d, Q.stride_d, C.WIDE)
                G = _tile_gradient(token, coefficient, x, t0, C)
                _, more_dot, more_squares, more_live = norm_sums(G, base, t, t < Ld, columns, D, d, C)
                dot += more_dot
                squares += more_squares
                live = live | more_live
        for c0 in range(0, d, C.BD):
            columns = c0 + tl.arange(0, C.BD)
            if not C.ONE_CHUNK:
                x = load_rows(pointers, token >= 0, columns, d, Q.stride_d, C.WIDE)
            G = _tile_gradient(token, coefficient, x, t0, C)
            if C.NORMALIZE:
                y, more_dot, more_squares, more_live = norm_sums(G, base, t, t < Ld, columns, D, d, C)
                if C.ONE_CHUNK:
                    dot = more_dot
                    squares = more_squares
                    live = more_live
                G = through_norm(G, y, live, squares, dot)
            store_gradient(G, grad_D, document, t0, t >= 0, columns, Ld, d, C)
