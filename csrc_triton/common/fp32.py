"""fp32 products on half-precision tensor cores, and an fp32 fallback for rows that fp16 terms cannot represent.

A row x is represented as ``2^e (hi + lo / 2^11)``. hi and lo are fp16. e is chosen for each row, such that its largest
feature uses the upper end of the range of fp16. hi keeps 11 bits of a feature, and lo keeps 12 more (11 bits of fp16
and its sign). Then

```text
q . x = 2^(e_q + e_x) (hi hi' + (hi lo' + lo hi') / 2^11)
```

The error is at most 2^-21 of ``sum |q_k x_k|``, apart from the rounding of the sums. That is the accuracy of three TF32
products, at twice their rate. The sum of the small products is scaled between the tensor core instructions, which gives
lo the same range as hi.

This holds for exact rows. Their largest feature is within 2^40 of 1, and with two terms the other features are zero or
within 2^28 of it. A single term, for TF32, may lose the digits of features that are smaller still. Other rows,
including rows with NaN or inf, are fallback rows and are multiplied feature by feature. Whether a row is exact depends
on that row alone, so no score depends on its batch.
"""

import triton
import triton.language as tl

from ..formats.bits import get_code_bits, load_code
from ..formats.encoded import load_token_scales
from .primitives import (
    NO_TOKEN,
    compute_inverse_norm,
    load_rows,
    load_tokens,
    locate_numbered_tokens,
    nan_max,
    sum_chunk_squares,
    to_int64,
)

_MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
_EXPONENT_MASK = tl.constexpr(0x7F800000)
_MIN_EXACT_EXPONENT_BITS = tl.constexpr((127 - 40) << 23)
_MAX_EXACT_EXPONENT_BITS = tl.constexpr((127 + 40) << 23)
_NARROW_RANGE_BITS = tl.constexpr(2 * (28 << 23))
# Minus the bits of an exponent, these are the bits of the factor that scales it to 2^14. fp16 ends below 2^16.
_SCALE_UP_BITS = tl.constexpr(((254 + 14) << 23) - 2**32)
_SCALE_EXPONENT_BITS = tl.constexpr(14 << 23)
FP16_LOW_SCALE = tl.constexpr(2048.0)
# Marks a score with fallback rows or tokens until `maxsim_rescore` replaces it. No instruction produces this NaN.
RESCORE_BITS = tl.constexpr(0x7FC0F32F)
_TF32_ROUND_BIT, _TF32_MASK = tl.constexpr(1 << 12), tl.constexpr(-(1 << 13))
# Tokens of a step of the fallback. Fallback rows are rare, so few registers matter more than speed.
_FALLBACK_STEP_TOKENS = tl.constexpr(16)


@triton.jit
def _classify_rows(x, TERMS: tl.constexpr):
    """Return which rows are exact, which rows are zero, and the exponent of the largest feature as the bits of a float.

    Magnitudes order like their bits. Few instructions per row matter as much as few instructions per feature. A row
    with NaN is not exact.
    """
    largest = tl.reduce(tl.abs(x), 1, nan_max)
    exponent = largest.to(tl.int32, bitcast=True) & _EXPONENT_MASK
    is_exact = (exponent >= _MIN_EXACT_EXPONENT_BITS) & (exponent <= _MAX_EXACT_EXPONENT_BITS)
    if TERMS != 1:
        # 2^32 minus twice the bits of the smallest nonzero magnitude
        complement = tl.max((x.to(tl.int32, bitcast=True) * -2).to(tl.uint32, bitcast=True), axis=1)
        # no tl.full, because in Gluon it needs a layout
        is_exact = is_exact & (complement <= (exponent * -2 + _NARROW_RANGE_BITS).to(tl.uint32, bitcast=True))
    return is_exact | (largest == 0), largest == 0, exponent


@triton.jit
def round_to_tf32(x):
    """Round `x` to the 10 mantissa bits of TF32, halves away from zero, because tensor cores would truncate.

    NaN stays NaN for every bit pattern, and inf stays inf.
    """
    bits = (x.to(tl.int32, bitcast=True) + _TF32_ROUND_BIT) & _TF32_MASK
    return tl.where(tl.abs(x) < float("inf"), bits.to(tl.float32, bitcast=True), x + x)


@triton.jit
def split_to_tf32(x):
    """Return TF32 values hi and lo with ``x = hi + lo``, up to 2^-22 of x.

    hi is infinite from 3.402e38 on, and lo is 0 for a hi that is infinite or NaN.
    """
    hi = round_to_tf32(x)
    return hi, tl.where(tl.abs(hi) < float("inf"), round_to_tf32(x - hi), 0.0)


@triton.jit
def find_exact_rows(x, TERMS: tl.constexpr):
    """Return which rows `split_rows` can represent."""
    is_exact, _, _ = _classify_rows(x, TERMS)
    return is_exact


@triton.jit
def split_to_fp16(y):
    """Return fp16 values hi and lo with ``y = hi + lo / FP16_LOW_SCALE``, for `y` within the range of fp16."""
    hi = y.to(tl.float16)
    return hi, ((y - hi.to(tl.float32)) * FP16_LOW_SCALE).to(tl.float16)


@triton.jit
def split_rows(x, TERMS: tl.constexpr):
    """Split rows into fp16 terms.

    Returns:
        The terms (hi, lo), or hi twice if TERMS is 1, the scale ``2^e`` of each row, which rows are exact, and which
        rows are zero. The terms of fallback rows are meaningless, and the scale of a zero row is any finite value.
    """
    is_exact, is_zero, exponent = _classify_rows(x, TERMS)
    y = x * (exponent * -1 + _SCALE_UP_BITS).to(tl.float32, bitcast=True)[:, None]
    hi, lo = split_to_fp16(y)
    if TERMS == 1:
        lo = hi
    return (
        (hi, lo),
        ((exponent - _SCALE_EXPONENT_BITS) & _MAGNITUDE_MASK).to(tl.float32, bitcast=True),
        is_exact,
        is_zero,
    )


@triton.jit
def mark_fallback_scales(scale, is_exact, is_zero):
    """Return the scales of `split_rows`, negative for fallback rows and 1 for zero rows."""
    return tl.where(is_zero, 1.0, tl.where(is_exact, scale, -1.0))


@triton.jit
def multiply_split_rows(q, x, C: tl.constexpr):
    """Return the unscaled ``q . x^T`` of split rows, or its transpose with C.TOKENS_FIRST."""
    q_hi, q_lo = q
    x_hi, x_lo = x
    if C.FP32_TERMS == 1 and C.TOKENS_FIRST:
        S = tl.dot(x_hi, tl.trans(q_hi))
    elif C.FP32_TERMS == 1:
        S = tl.dot(q_hi, tl.trans(x_hi))
    elif C.TOKENS_FIRST:
        S = tl.dot(x_lo, tl.trans(q_hi))
        S = tl.dot(x_hi, tl.trans(q_lo), S)
        S = tl.dot(x_hi, tl.trans(q_hi), S * (1.0 / FP16_LOW_SCALE))
    else:
        S = tl.dot(q_hi, tl.trans(x_lo))
        S = tl.dot(q_lo, tl.trans(x_hi), S)
        S = tl.dot(q_hi, tl.trans(x_hi), S * (1.0 / FP16_LOW_SCALE))
    return S


@triton.jit
def _compute_fp32_similarities(x, rows, document, t, C: tl.constexpr):
    """Compute similarities of a tile with fp32 instructions, feature by feature, times inverse norms if needed."""
    HAS_NORMS: tl.constexpr = C.NORMALIZE and C.INT8_TERMS == 0  # the scales of encoded tokens include their norms
    S = tl.full((C.BM, _FALLBACK_STEP_TOKENS), 0, tl.float32)
    squares = tl.full((_FALLBACK_STEP_TOKENS,), 0, tl.float32)
    tokens = document.ptr + t.to(tl.int64) * x.D.stride_l
    if C.INT8_TERMS > 0:
        scale = load_token_scales(x.counts, document.row + t)
    for k in tl.range(0, x.d, num_stages=1):
        q = tl.load(rows.ptr + to_int64(k) * x.Q.stride_d, mask=rows.ok, other=0.0)
        if get_code_bits(C.ENCODING) > 0:
            y = load_code(tokens, k, C)
        else:
            y = tl.load(tokens + to_int64(k) * x.D.stride_d)
        if C.INT8_TERMS > 0:
            # Scale first. Unscaled codes times queries near the largest fp32 number would be infinite.
            q = q.to(tl.float32)
            y = y.to(tl.float32) * scale
        S += q[:, None] * y[None, :]
        if HAS_NORMS:
            squares = tl.fma(y, y, squares)
    if HAS_NORMS:
        S = S * compute_inverse_norm(squares)[None, :]
    return S


@triton.jit
def add_fallback_maxima(best, where, is_exact, x, rows, document, C: tl.constexpr):
    """Return maxima and argmax extended by the products that split terms leave out.

    With split fp32 these are the products of fallback rows and of fallback tokens. With int8 terms they are the
    products of fallback rows only. `is_exact` is 0 for fallback rows.
    """
    fallback_rows = rows.ok & (is_exact == 0)
    best = tl.where(fallback_rows, float("-inf"), best)
    where = tl.where(fallback_rows, NO_TOKEN, where)
    any_fallback_row = tl.max(fallback_rows.to(tl.int32), axis=0)
    for t0 in tl.range(0, document.length, _FALLBACK_STEP_TOKENS, num_stages=1):
        t = tl.minimum(t0 + tl.arange(0, _FALLBACK_STEP_TOKENS), document.length - 1)
        keep = t >= 0
        if x.D.mask is not None:
            keep = tl.load(document.mask + t.to(tl.int64) * x.D.mask_stride_l) != 0
        is_fallback = keep & (t < 0)
        if C.INT8_TERMS == 0:
            tile = load_tokens(document.ptr, t, keep, tl.arange(0, C.BD), x.d, x.D, C.WIDE_OFFSETS)
            is_fallback = keep & (find_exact_rows(tile, C.FP32_TERMS) == 0)
        if (any_fallback_row > 0) | (tl.max(is_fallback.to(tl.int32), axis=0) > 0):
            S = _compute_fp32_similarities(x, rows, document, t, C)
            needs_fp32 = (fallback_rows[:, None] & keep[None, :]) | is_fallback[None, :]
            S = tl.where(needs_fp32, S, float("-inf"))
            m = tl.reduce(S, 1, nan_max)
            hit = needs_fp32 & ((S == m[:, None]) | (S != S))
            first = tl.min(tl.where(hit, t[None, :], NO_TOKEN), axis=1)
            is_better = (m > best) | ((m != m) & (best == best))
            where = tl.where(is_better, first, tl.where(m == best, tl.minimum(where, first), where))
            best = nan_max(best, m)
    return best, where


@triton.jit
def load_terms(terms, row, ok, BD: tl.constexpr):
    """Load the terms hi and lo of query rows and their scales, which are negative for fallback rows."""
    pointers = terms.queries + row.to(tl.int64)[:, None] * BD + tl.arange(0, BD)[None, :]
    hi = tl.load(pointers, mask=ok[:, None], other=0.0)
    lo = tl.load(pointers + to_int64(terms.query_capacity_rows) * BD, mask=ok[:, None], other=0.0)
    return (hi, lo), tl.load(terms.query_scales + row, mask=ok, other=1.0)


@triton.jit(do_not_specialize=["rows", "L", "room"])
def split_tokens(X, out, scales, rows, L, room, d, SCALE_TILE: tl.constexpr, C: tl.constexpr):
    """Split the tokens of X into fp16 terms with rows of BD features.

    Args:
        X: `DocumentArgs` of documents `[K, L, d]`, whose tokens are numbered consecutively. The scale of a
            masked token is 0.
        out: fp16 terms `[C.FP32_TERMS, room, BD]`, hi first.
        scales: fp32 scales `[documents, tiles, SCALE_TILE]`, with C.NORMALIZE times the inverse norms, negative for
            fallback rows and 1 for zero rows. The last tile of a document shifts back to its end.
        rows: Number of tokens.
        L: Tokens of each document.
        room: Rows that `out` has for each term.
        d: Number of features.
        SCALE_TILE: Tokens of a tile of scales, at most L.
        C: `KernelConfig`.
    """
    row = tl.program_id(0) * C.BM + tl.arange(0, C.BM)
    ok = row < rows
    columns = tl.arange(0, C.BD)
    pointers = locate_numbered_tokens(X, row, L)
    x, scale, is_exact, is_zero = split_rows(
        load_rows(pointers, ok, columns, d, X.stride_d, C.WIDE_OFFSETS), C.FP32_TERMS
    )
    if C.NORMALIZE:
        squares = sum_chunk_squares(pointers, ok, 0, d, X.stride_d, C.BD, C.WIDE_OFFSETS)
        scale = scale * compute_inverse_norm(squares)  # exact, because the scale is a power of two
    hi, lo = x
    term_pointers = out + row.to(tl.int64)[:, None] * C.BD + columns[None, :]
    tl.store(term_pointers, hi, mask=ok[:, None])
    if C.FP32_TERMS == 2:
        tl.store(term_pointers + to_int64(room) * C.BD, lo, mask=ok[:, None])
    scale = mark_fallback_scales(scale, is_exact, is_zero)
    if X.mask is not None:
        mask_offsets = (row // L).to(tl.int64) * X.mask_stride_doc + (row % L).to(tl.int64) * X.mask_stride_l
        scale = tl.where(tl.load(X.mask + mask_offsets, mask=ok, other=0) != 0, scale, 0.0)
    t = row % L
    end = tl.cdiv(L, SCALE_TILE) * SCALE_TILE
    scale_pointers = scales + (row // L).to(tl.int64) * end + t
    tl.store(scale_pointers, scale, mask=ok & (t < end - SCALE_TILE))
    tl.store(scale_pointers + (end - L), scale, mask=ok & (t >= L - SCALE_TILE))
