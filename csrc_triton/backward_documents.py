"""The destination-owned gradient of the documents: a one-hot product over the query rows that each token won.

A program owns a tile of BN tokens of one document. Its rows come from the lists of `backward_lists`, or, where a
document meets few rows, straight from the winners (rows that win elsewhere are not read). For half types the product
runs on the matrix unit in their own type: coefficients are split in two, ``c = hi + lo`` (2^-17 for bf16, 2^-22 for
fp16), which take BN rows each of one left operand.
"""

import triton
import triton.language as tl

from .arguments import Sizes
from .backward import through_normalize, winners
from .common import (
    document_base,
    inverse_norm,
    load_rows,
    load_tokens,
    query_weight,
    row_pointers,
    rows_sum_of_squares,
    wide,
)

CAREFUL_ROWS = tl.constexpr(16)  # of a step of the slow path


@triton.jit
def _rows(e, end, tile, lists, up, Q, sizes, d, C: tl.constexpr):
    """Rows number e of a tile: the query row (i, s), whether and which token of the tile it won, its coefficient."""
    owner, k, t0 = tile
    if lists is not None:
        entries, coefficients = lists
        hit = e < end
        entry = tl.load(entries + e, mask=hit, other=0).to(tl.uint32)
        coefficient = tl.load(coefficients + e, mask=hit, other=0.0)
        local = tl.where(hit, (entry % C.BN).to(tl.int32), -1)
        row = (entry // C.BN).to(tl.int32)
        i = row // C.SLOT
        s = row % C.SLOT
    else:
        s = (e % sizes.Lq).to(tl.int32)
        i = (e // sizes.Lq).to(tl.int32) + owner
        token, won, g = winners(up, owner, k, i, s, e < end, sizes, C)
        local = token - t0
        hit = won & (local >= 0) & (local < C.BN)
        local = tl.where(hit, local, -1)
        coefficient = tl.where(hit, g * query_weight(Q, i, s, hit), 0.0)
        if C.NORMALIZE:
            pointers = row_pointers(Q, i, s)
            coefficient *= inverse_norm(rows_sum_of_squares(pointers, hit, d, Q.stride_d, C.BD, C.WIDE))
    return i, s, hit, local, coefficient


@triton.jit
def _power_of_two(biased_exponent):
    return (biased_exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scale_of(begin, end, tile, lists, up, Q, sizes, d, C: tl.constexpr):
    """A power of two that brings the largest finite coefficient of a tile just below 2^15, and its inverse.

    For fp16 only, whose range the upstream gradients may leave at either end; bf16 has the range of fp32.
    """
    largest = tl.full((C.BM,), 0, tl.float32)
    for e0 in range(begin, end, C.BM):
        _, _, _, _, c = _rows(e0 + tl.arange(0, C.BM), end, tile, lists, up, Q, sizes, d, C)
        largest = tl.maximum(largest, tl.where(tl.abs(c) < float("inf"), tl.abs(c), 0.0))
    exponent = tl.max(largest, axis=0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.maximum(exponent, 15)
    return _power_of_two(268 - exponent), _power_of_two(exponent - 14)


@triton.jit
def _product(acc, x, local, coefficient, C: tl.constexpr):
    """acc + one-hot product. For half types acc has two rows for each token: of the high and of the low parts."""
    if x.dtype == tl.float32:
        match = local[None, :] == tl.arange(0, C.BN)[:, None]
        acc = tl.dot(tl.where(match, coefficient[None, :], 0.0), x, acc, input_precision=C.PRECISION)
    else:
        high = coefficient.to(x.dtype)
        low = (coefficient - high.to(tl.float32)).to(x.dtype)
        m = tl.arange(0, 2 * C.BN)
        part = tl.where((m % 2 == 0)[:, None], high[None, :], low[None, :])
        zero = tl.full((1, 1), 0, x.dtype)
        acc = tl.dot(tl.where(local[None, :] == (m // 2)[:, None], part, zero), x, acc)
    return acc


@triton.jit
def _finite_rows(x, coefficient):
    finite = tl.min((tl.abs(x.to(tl.float32)) < float("inf")).to(tl.int32), axis=1) > 0
    return finite & (tl.abs(coefficient) < float("inf"))


@triton.jit
def _add_non_finite(G, begin, end, tile, lists, up, Q, sizes, columns, d, C: tl.constexpr):
    """Add the rows that hold NaN or inf one at a time: in a product they would spoil every token of the tile."""
    rows = tl.arange(0, CAREFUL_ROWS)
    for e0 in tl.range(begin, end, CAREFUL_ROWS, num_stages=1):
        i, s, hit, local, c = _rows(e0 + rows, end, tile, lists, up, Q, sizes, d, C)
        x = load_rows(row_pointers(Q, i, s), hit, columns, d, Q.stride_d, C.WIDE).to(tl.float32)
        bad = hit & (_finite_rows(x, c) == 0)
        if tl.max(bad.to(tl.int32), axis=0) > 0:
            for n in range(CAREFUL_ROWS):
                this = (rows == n) & bad
                token = tl.max(tl.where(this, local, -1), axis=0)
                row = tl.sum(tl.where(this[:, None], c[:, None] * x, 0.0), axis=0)
                G += tl.where((tl.arange(0, C.BN) == token)[:, None], row[None, :], 0.0)
    return G


@triton.jit
def _finite_sum(begin, end, tile, lists, scale, up, Q, sizes, columns, d, CHECK: tl.constexpr, C: tl.constexpr):
    """The sums [BN, BD] of a tile's rows times `scale`; CHECK: without those that hold NaN or inf."""
    HALF: tl.constexpr = Q.ptr.dtype.element_ty != tl.float32
    STEP: tl.constexpr = CAREFUL_ROWS if CHECK else C.BM
    M: tl.constexpr = 2 * C.BN if HALF else C.BN
    G = tl.full((M, C.BD), 0, tl.float32)
    for e0 in range(begin, end, STEP):
        i, s, hit, local, c = _rows(e0 + tl.arange(0, STEP), end, tile, lists, up, Q, sizes, d, C)
        x = load_rows(row_pointers(Q, i, s), hit, columns, d, Q.stride_d, C.WIDE)
        if CHECK:
            finite = _finite_rows(x, c)
            x = tl.where(finite[:, None], x, tl.full((1, 1), 0, x.dtype))
            c = tl.where(finite, c, 0.0)
        G = _product(G, x, local, c * scale, C)
    if HALF:
        G = tl.sum(tl.reshape(G, (C.BN, 2, C.BD)), axis=1)
    return G


@triton.jit
def _sum_of_rows(begin, end, tile, lists, up, Q, sizes, c0, d, C: tl.constexpr):
    """``sum of coefficient * row`` of each token of a tile, BD features from c0 on, and these features."""
    columns = c0 + tl.arange(0, C.BD)
    scale = 1.0
    unscale = 1.0
    if Q.ptr.dtype.element_ty == tl.float16:
        scale, unscale = _scale_of(begin, end, tile, lists, up, Q, sizes, d, C)
    G = _finite_sum(begin, end, tile, lists, scale, up, Q, sizes, columns, d, False, C) * unscale
    # Zeros of the one-hot times NaN or inf are NaN: only then is it worth looking at every row.
    if tl.sum(tl.sum(G * 0.0, axis=1), axis=0) != 0.0:
        G = _finite_sum(begin, end, tile, lists, scale, up, Q, sizes, columns, d, True, C) * unscale
        G = _add_non_finite(G, begin, end, tile, lists, up, Q, sizes, columns, d, C)
    return G, columns


@triton.jit
def _norm_sums(G, base, t, t_ok, columns, D, d, C: tl.constexpr):
    """The tokens x of this step, ``<x, G>``, ``<x, x>``, and which tokens have a gradient here."""
    x = load_tokens(base, t, t_ok, columns, d, D, C.WIDE).to(tl.float32)
    live = tl.max((G != 0.0).to(tl.int32), axis=1)
    return x, tl.sum(x * G, axis=1), tl.sum(x * x, axis=1), live


@triton.jit
def _tile_of(first, lists, rows, blocks, tiles, sizes, C: tl.constexpr):
    """This program's document and tile, and where its rows begin and end."""
    pid = tl.program_id(0)
    document = pid // tiles
    b = pid % tiles
    begin = rows * 0
    end = rows
    if lists is not None:
        starts, entries, coefficients = lists
        starts += wide(document) * (tiles * blocks + 1) + b * blocks
        begin = tl.load(starts)
        end = tl.load(starts + blocks)
        lists = (entries + wide(document) * rows, coefficients + wide(document) * rows)
    document += first
    owner = document * 0
    k = document
    if C.CANDIDATES:
        owner = document // sizes.K
        k = document % sizes.K
    return document, (owner, k, b * C.BN), begin, end, lists


@triton.jit(do_not_specialize=["first", "rows", "blocks", "tiles", "Nq", "K", "Lq", "Ld"])
def maxsim_grad_documents(Q, D, up, lists, grad_D, first, rows, blocks, tiles, Nq, K, Lq, Ld, d, C: tl.constexpr):
    """grad_D of BN tokens of one document a program, documents from `first` on: the sum over the rows that they won.

    `lists` is (starts, entries, coefficients) of these documents, or None to look through the `rows` that each meets.
    """
    sizes = Sizes(Nq, K, Lq, Ld)
    TWICE: tl.constexpr = C.NORMALIZE and not C.ONE_CHUNK
    document, tile, begin, end, lists = _tile_of(first, lists, rows, blocks, tiles, sizes, C)
    owner, k, t0 = tile
    t = t0 + tl.arange(0, C.BN)
    t_ok = t < sizes.Ld
    base = document_base(D, owner, k)

    dot = tl.full((C.BN,), 0, tl.float32)
    squares = tl.full((C.BN,), 0, tl.float32)
    live = tl.full((C.BN,), 0, tl.int32)
    if TWICE:
        for c0 in range(0, d, C.BD):
            G, columns = _sum_of_rows(begin, end, tile, lists, up, Q, sizes, c0, d, C)
            x, more_dot, more_squares, more_live = _norm_sums(G, base, t, t_ok, columns, D, d, C)
            dot += more_dot
            squares += more_squares
            live = live | more_live
    for c0 in range(0, d, C.BD):
        G, columns = _sum_of_rows(begin, end, tile, lists, up, Q, sizes, c0, d, C)
        if C.NORMALIZE:
            x, more_dot, more_squares, more_live = _norm_sums(G, base, t, t_ok, columns, D, d, C)
            if not TWICE:
                dot = more_dot
                squares = more_squares
                live = more_live
            # Tokens that receive nothing may hold NaN.
            G = tl.where((live > 0)[:, None], through_normalize(G, x, squares, dot * inverse_norm(squares)), 0.0)
        offsets = (document.to(tl.int64) * sizes.Ld + t)[:, None] * d + columns[None, :]
        mask = t_ok[:, None] & (columns < d)[None, :]
        tl.store(grad_D + offsets, G.to(grad_D.dtype.element_ty), mask=mask)
