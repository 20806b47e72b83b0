"""The sums that gradients of documents are made of: a one-hot product over the query rows that each token won.

A layout says which rows these are: its `each_step` calls a visitor of this file for the `StepRows` of each step. For
half types the product runs on the matrix unit in their own type. Its coefficients are split in two, ``c = hi + lo`` (to
2^-17 for bf16, 2^-22 for fp16).
"""

import triton
import triton.language as tl

from ...common.primitives import load_rows
from ..arguments import TileSum

NON_FINITE_STEP_ROWS = tl.constexpr(16)  # of a step of the slow path


@triton.jit
def _make_power_of_two(biased_exponent):
    return (biased_exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def finite_abs(coefficient):
    size = tl.abs(coefficient)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def compute_scales(largest):
    """A power of two that brings the largest finite coefficient just below 2^15, and its inverse.

    For fp16 only, whose range the upstream gradients may leave at either end; bf16 has the range of fp32.
    """
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15)
    return _make_power_of_two(268 - exponent), _make_power_of_two(exponent - 14)


@triton.jit
def _add_one_hot_product(acc, x, rows, coefficient, C: tl.constexpr):
    """acc + one-hot product: [BN, BD] for fp32; for half types transposed, x being the left operand.

    With LANES the high and low parts of a token are columns of one product, [BD, 2 * BN]; else there are two products.
    """
    if x.dtype == tl.float32:
        match = rows.token[None, :] == tl.arange(0, C.BN)[:, None]
        acc = tl.dot(tl.where(match, coefficient[None, :], 0.0), x, acc, input_precision=C.PRECISION)
    else:
        high = coefficient.to(x.dtype)
        low = (coefficient - high.to(tl.float32)).to(x.dtype)
        zero = tl.full((1, 1), 0, x.dtype)
        if C.LANES > 1:
            m = tl.arange(0, 2 * C.BN)
            part = tl.where((m % 2 == 0)[:, None], high[None, :], low[None, :])
            one_hot = tl.where(rows.token[None, :] == (m // 2)[:, None], part, zero)
            acc = tl.dot(tl.trans(x), tl.trans(one_hot), acc)
        else:
            match = rows.token[None, :] == tl.arange(0, C.BN)[:, None]
            acc = tl.dot(tl.trans(x), tl.trans(tl.where(match, high[None, :], zero)), acc)
            acc = tl.dot(tl.trans(x), tl.trans(tl.where(match, low[None, :], zero)), acc)
    return acc


@triton.jit
def _is_finite(x, coefficient):
    finite = tl.min((tl.abs(x.to(tl.float32)) < float("inf")).to(tl.int32), axis=1) > 0
    return finite & (tl.abs(coefficient) < float("inf"))


@triton.jit
def _update_largest(largest, rows, s, C: tl.constexpr):
    """Visitor: the largest finite coefficient of each lane."""
    return tl.maximum(largest, finite_abs(rows.coefficient))


@triton.jit
def _add_product(G, rows, s, C: tl.constexpr):
    """Visitor: the product of all rows."""
    x = load_rows(rows.pointers, rows.hit, s.columns, s.d, s.Q.stride_d, C.WIDE_OFFSETS)
    return _add_one_hot_product(G, x, rows, rows.coefficient * s.scale, C)


@triton.jit
def _add_finite_product(G, rows, s, C: tl.constexpr):
    """Visitor: the product of the rows that hold neither NaN nor inf."""
    x = load_rows(rows.pointers, rows.hit, s.columns, s.d, s.Q.stride_d, C.WIDE_OFFSETS)
    finite = _is_finite(x, rows.coefficient)
    x = tl.where(finite[:, None], x, tl.full((1, 1), 0, x.dtype))
    return _add_one_hot_product(G, x, rows, tl.where(finite, rows.coefficient, 0.0) * s.scale, C)


@triton.jit
def _add_non_finite(G, rows, s, C: tl.constexpr):
    """Visitor: add the CAREFUL_ROWS rows that hold NaN or inf, one after the other.

    In a product they would spoil every token of the tile.
    """
    x = load_rows(rows.pointers, rows.hit, s.columns, s.d, s.Q.stride_d, C.WIDE_OFFSETS).to(tl.float32)
    chosen = rows.hit & (_is_finite(x, rows.coefficient) == 0)
    if tl.max(chosen.to(tl.int32), axis=0) > 0:
        for n in range(NON_FINITE_STEP_ROWS):
            this = (tl.arange(0, NON_FINITE_STEP_ROWS) == n) & chosen
            token = tl.max(tl.where(this, rows.token, -1), axis=0)
            row = tl.sum(tl.where(this[:, None], rows.coefficient[:, None] * x, 0.0), axis=0)
            G += tl.where((tl.arange(0, C.BN) == token)[:, None], row[None, :], 0.0)
    return G


@triton.jit
def _sum_products(each_step: tl.constexpr, product: tl.constexpr, s, STEP: tl.constexpr, C: tl.constexpr):
    """The sums [BN, BD] of a tile's rows times the scale, STEP rows at a time."""
    HALF: tl.constexpr = s.Q.ptr.dtype.element_ty != tl.float32
    PAIRS: tl.constexpr = HALF and C.LANES > 1
    M: tl.constexpr = C.BD if HALF else C.BN
    N: tl.constexpr = (2 * C.BN if PAIRS else C.BN) if HALF else C.BD
    G = each_step(product, tl.full((M, N), 0, tl.float32), s, STEP, True, None, C)
    if HALF:
        if PAIRS:
            G = tl.sum(tl.reshape(G, (C.BD, C.BN, 2)), axis=2)
        G = tl.trans(G)
    return G


@triton.jit
def sum_rows(each_step: tl.constexpr, tile, up, Q, columns, d, C: tl.constexpr):
    """``sum of coefficient * row`` of each token of a tile, some features of it.

    ``each_step(visit, total, s, STEP, AHEAD, STAGES, C)`` folds ``visit(total, rows, s, C)`` over the rows of the tile,
    STEP at a time; with AHEAD it reads what names the rows a step ahead.
    """
    scale = 1.0
    unscale = 1.0
    if Q.ptr.dtype.element_ty == tl.float16:
        s = TileSum(tile, up, Q, columns, 1.0, d)
        largest = each_step(_update_largest, tl.full((C.BM,), 0, tl.float32), s, C.BM, False, None, C)
        scale, unscale = compute_scales(tl.max(largest, axis=0))
    s = TileSum(tile, up, Q, columns, scale, d)
    G = _sum_products(each_step, _add_product, s, C.BM, C) * unscale
    # Zeros of the one-hot times NaN or inf are NaN: only then is it worth looking at every row.
    if tl.sum(G * 0.0) != 0.0:
        G = _sum_products(each_step, _add_finite_product, s, NON_FINITE_STEP_ROWS, C) * unscale
        G = each_step(_add_non_finite, G, s, NON_FINITE_STEP_ROWS, False, 1, C)
    return G
