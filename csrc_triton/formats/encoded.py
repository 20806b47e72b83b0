"""Features of quantised documents: the numbers that a product takes, and what they count as.

`Config.STORED` says how a feature is kept: "int8"; "fp8", or "e4m3" and "e5m2" as bytes, for units that know no FP8;
"number", of another type that Triton converts; "bits", eight to a byte, 1 where set and -1 else. Every number is exact
in fp16 and bf16. Of residual codes, which `residual` decodes, numbers are the tokens as they count. Formats of others
bring a function in place of a name, which loads a tile of numbers as `load_bits` does.

Converting takes longer than multiplying. So where documents are int8, query rows become sums of int8 terms, hi and lo:

    q = scale (254 hi + lo),    hi = round(127 q / max |q|),    scale = max |q| / (127 * 254)

to ``scale / 2``, a 64,000th of the largest feature. Integers are summed exactly, in 32 bits for d <= 256. One term, hi
times ``254 scale``, keeps q to ``127 scale``, a 254th. What is so held is "plain": zeros, and rows whose largest
feature is between 1e-30 and 1e30; other rows, those with NaN or an infinity included, are multiplied feature by
feature, as in `fp32`.

FP8 is multiplied in fp16, to which one instruction converts two numbers; to bf16 it takes five. A bf16 row is then held
over a power of two that brings its largest feature to the upper end of fp16: features of at least 2^-32 of it are held
exactly, others to 2^-40 of it. Rows with an infinity take the largest power, so that nothing else becomes infinite.
"""

import triton
import triton.language as tl

from ..common.maxima import expand_rows, expand_tokens
from ..common.primitives import (
    compute_inverse_norm,
    load_rows,
    load_tokens,
    locate_rows,
    nan_max,
    sum_in_order_across_warps,
)
from .residual import get_bucket_bits, load_decoded_tokens

INT8_LOW_SCALE = tl.constexpr(254)
_EXPONENT_MASK = tl.constexpr(0x7F800000)
_MIN_EXPONENT_BITS, _MAX_EXPONENT_BITS = (
    tl.constexpr(16 << 23),
    tl.constexpr(254 << 23),
)  # exponents: below, an inverse is no normal number
_TARGET_EXPONENT_BITS = tl.constexpr(15 << 23)  # fp16 ends below 2^16
_INVERSE_EXPONENT_BITS = tl.constexpr(254 << 23)  # less the bits of a power of two: those of its inverse


@triton.jit
def load_bits(ptr, t, c0, d, D, C: tl.constexpr):
    """Features from c0 on of tokens `t`, kept as bits."""
    columns = c0 // 8 + tl.arange(0, C.BD // 8)
    x = load_tokens(ptr, t, t >= 0, columns, tl.cdiv(d, 8), D, C.WIDE_OFFSETS)
    x = (x[:, :, None] >> tl.arange(0, 8)[None, None, :].to(tl.uint8)) & 1
    return tl.reshape(x, (C.BN, C.BD)).to(tl.int8) * 2 - 1


@triton.jit
def convert_encoded(tile, dtype: tl.constexpr, C: tl.constexpr):
    """What features are kept as, in a dtype."""
    if C.ENCODING == "e4m3":
        magnitude = tile & 0x7F
        bits = (magnitude.to(tl.uint16) << 7) | ((tile & 0x80).to(tl.uint16) << 8)
        x = bits.to(tl.float16, bitcast=True) * 256.0  # the exponent of fp16 is biased by 8 more
        tile = tl.where(magnitude == 0x7F, float("nan"), x)
    elif C.ENCODING == "e5m2":
        tile = (tile.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    return tile.to(dtype)


@triton.constexpr_function
def is_fp8(stored):
    return stored in ("fp8", "e4m3", "e5m2")


@triton.constexpr_function
def needs_power_scaling(query, stored):
    """Whether query rows of a dtype are held in fp16, over powers of two."""
    return is_fp8(stored) and query == tl.bfloat16


@triton.constexpr_function
def choose_factor_dtype(query, stored):
    """What numbers are multiplied in beside query rows of a dtype."""
    return tl.float16 if needs_power_scaling(query, stored) else query


@triton.jit
def compute_row_powers(x, pointers, ok, C: tl.constexpr):
    """What rows that are held in fp16 are over."""
    most = tl.zeros(ok.shape, tl.float32)
    if C.SINGLE_STEP:
        most = find_largest(load_rows(pointers, ok, tl.arange(0, C.BD), x.d, x.Q.stride_d, C.WIDE_OFFSETS))
    else:
        for c0 in range(0, x.d, C.BD):
            q = load_rows(pointers, ok, c0 + tl.arange(0, C.BD), x.d, x.Q.stride_d, C.WIDE_OFFSETS)
            most = tl.maximum(most, find_largest(q))
    return choose_powers(most)


@triton.jit
def find_largest(q):
    """The largest magnitude of each row, but for NaN."""
    return tl.max(tl.abs(q.to(tl.float32)), axis=1)


@triton.jit
def choose_powers(most):
    """What rows with these largest features are over."""
    exponent = most.to(tl.int32, bitcast=True) & _EXPONENT_MASK
    exponent = tl.where(
        exponent > _MAX_EXPONENT_BITS,
        _MAX_EXPONENT_BITS,
        tl.where(exponent < _MIN_EXPONENT_BITS, _MIN_EXPONENT_BITS, exponent),
    )
    return (exponent - _TARGET_EXPONENT_BITS).to(tl.float32, bitcast=True)


@triton.jit
def divide_by_powers(q, powers):
    """Rows of bf16 in fp16."""
    bits = powers.to(tl.int32, bitcast=True)
    inverse = (bits * -1 + _INVERSE_EXPONENT_BITS).to(tl.float32, bitcast=True)
    return (q.to(tl.float32) * inverse[:, None]).to(tl.float16)


@triton.constexpr_function
def is_loader(stored):
    """Whether `Config.STORED` is a function, ``load(ptr, t, c0, d, D, C)``, of a format that this package has not."""
    return not isinstance(stored, str)


@triton.jit
def load_encoded_tile(ptr, t, row, c0, d, D, counts, dtype: tl.constexpr, C: tl.constexpr):
    """Features from c0 on of tokens `t` from `ptr` on, the first of which is `row` among all, as they are kept; of
    residual codes tokens as they count, beside queries of `dtype`."""
    if C.ENCODING == "bits":
        tile = load_bits(ptr, t, c0, d, D, C)
    elif get_bucket_bits(C.ENCODING) > 0:
        tile = load_decoded_tokens(ptr, t, row, c0, d, D, counts, dtype, C)
    elif is_loader(C.ENCODING):
        tile = C.ENCODING(ptr, t, c0, d, D, C)
    else:
        tile = load_tokens(ptr, t, t >= 0, c0 + tl.arange(0, C.BD), d, D, C.WIDE_OFFSETS)
    return tile


@triton.jit
def _round_to_integer(x):
    """`x` rounded to an integer, halves to even, where it is below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def split_int8_terms(q):
    """The terms hi and lo of fp32 rows, and their scales, negative if not plain.

    Products are rounded before anything is added to them: fused, terms would hang on the kernel that makes them.
    """
    most = tl.max(tl.abs(q), axis=1)
    finite = tl.min((tl.abs(q) < 1e30).to(tl.int32), axis=1) > 0
    plain = finite & ((most > 1e-30) | (most == 0))
    inverse = (127.0 / tl.where(plain & (most > 0), most, 1.0))[:, None]
    x = tl.where(plain[:, None], q, 0.0)
    zero = tl.where(x == x, 0.0, 0.0)  # in the layout of x, which Gluon's functions would ask for
    x = tl.fma(x, zero + inverse, zero)
    hi = _round_to_integer(x)
    lo = _round_to_integer(tl.fma(x - hi, zero + INT8_LOW_SCALE, zero))
    scale = tl.where(most == 0, 1.0, most * (1.0 / (127 * INT8_LOW_SCALE)))
    return hi, lo, tl.where(plain, scale, -1.0)


@triton.jit
def scale_single_term(scale):
    """The scales of rows of which hi alone is kept."""
    return tl.where(scale > 0, scale * INT8_LOW_SCALE, scale)


@triton.jit(do_not_specialize=["rows"])
def maxsim_query_terms(Q, out, scales, rows, d, C: tl.constexpr):
    """Query rows as int8, hi ``[rows, BD]`` with lo below it; and their scales, negative if not plain."""
    row = tl.program_id(0) * C.BM + tl.arange(0, C.BM)
    ok = row < rows
    columns = tl.arange(0, C.BD)
    q = load_rows(locate_rows(Q, 0 * row, row), ok, columns, d, Q.stride_d, C.WIDE_OFFSETS).to(tl.float32)
    hi, lo, scale = split_int8_terms(q)
    places = out + row.to(tl.int64)[:, None] * C.BD + columns[None, :]
    tl.store(places, hi.to(tl.int8), mask=ok[:, None])
    tl.store(places + rows.to(tl.int64) * C.BD, lo.to(tl.int8), mask=ok[:, None])
    tl.store(scales + row, scale, mask=ok)


@triton.jit
def multiply_terms(q, x, C: tl.constexpr):
    """``q . x^T`` of terms but for their scales; as `Config.TOKENS_FIRST` says, its transpose."""
    hi, lo = q
    if C.TOKENS_FIRST:
        S = tl.dot(x, tl.trans(hi), out_dtype=tl.int32)
        if C.INT8_TERMS == 2:
            S = S * INT8_LOW_SCALE + tl.dot(x, tl.trans(lo), out_dtype=tl.int32)
    else:
        S = tl.dot(hi, tl.trans(x), out_dtype=tl.int32)
        if C.INT8_TERMS == 2:
            S = S * INT8_LOW_SCALE + tl.dot(lo, tl.trans(x), out_dtype=tl.int32)
    return S.to(tl.float32)


@triton.jit
def sum_query_rows(pointers, ok, x, C: tl.constexpr):
    """Sums of query rows, in one order whatever the tile, which the minimum of a token is multiplied by; or None."""
    if x.counts.minimum is not None:
        total = tl.zeros(ok.shape, tl.float32)
        for c0 in range(0, x.d, 16):
            q = load_rows(pointers, ok, c0 + tl.arange(0, 16), x.d, x.Q.stride_d, C.WIDE_OFFSETS)
            total += sum_in_order_across_warps(q.to(tl.float32), C.BM, 16)
    else:
        total = None
    return total


@triton.jit
def _load_values(ptr, each, t):
    return tl.load(ptr + t.to(tl.int64) * each)


@triton.jit
def load_token_scales(counts, t):
    """Of tokens t of all documents."""
    return _load_values(counts.scale, counts.scale_each, t)


@triton.jit
def dequantize_similarities(S, rows, counts, document, t, C: tl.constexpr):
    """Similarities to the numbers of tokens t, as those to what they count as; those of residual codes do already."""
    if get_bucket_bits(C.ENCODING) == 0:
        t = document.row + tl.minimum(t, document.length - 1)
        S = S * expand_tokens(load_token_scales(counts, t), C)
        if counts.minimum is not None:
            # Which of two products is fused with a sum is not left to the compiler: it would hang on the tile.
            sums = tl.broadcast_to(expand_rows(rows.sums, C), S.shape)
            minimum = expand_tokens(_load_values(counts.minimum, counts.minimum_each, t), C)
            S = tl.fma(sums, tl.broadcast_to(minimum, S.shape), S)
    return S


@triton.jit(do_not_specialize=["Td"])
def maxsim_unit_counts(D, counts, scale, minimum, Td, d, C: tl.constexpr):
    """Over the norms of what tokens count as: `scale` and, where there is one, `minimum`, fp32 ``[Td]``."""
    t = tl.program_id(0).to(tl.int64) * C.BN + tl.arange(0, C.BN)
    ok = t < Td
    t = tl.minimum(t, Td - 1)
    s = load_token_scales(counts, t)
    m = tl.zeros_like(s)
    if counts.minimum is not None:
        m = _load_values(counts.minimum, counts.minimum_each, t)
    squares = tl.full((C.BN,), 0, tl.float32)
    for c0 in range(0, d, C.BD):
        x = load_encoded_tile(D.ptr, t, 0, c0, d, D, counts, tl.float32, C)
        if get_bucket_bits(C.ENCODING) == 0:
            x = convert_encoded(x, tl.float32, C) * s[:, None] + m[:, None]
        x = tl.where((c0 + tl.arange(0, C.BD) < d)[None, :], x, 0.0)
        squares += tl.sum(x * x, axis=1)
    inverse = compute_inverse_norm(squares)
    tl.store(scale + t, s * inverse, mask=ok)
    if counts.minimum is not None:
        tl.store(minimum + t, m * inverse, mask=ok)


@triton.jit(do_not_specialize=["documents", "K", "Ld"])
def maxsim_keep_int8(D, data, scale, documents, K, Ld, d, C: tl.constexpr):
    """Document tokens as int8 `data` and their `scale`, contiguous, as `lik_ops.quantize` has them: BN a program."""
    row = tl.program_id(0).to(tl.int64) * C.BN + tl.arange(0, C.BN)
    document = row // Ld
    ok = document < documents
    owner = document // K
    places = D.ptr + owner * D.stride_owner + (document - owner * K) * D.stride_doc
    pointers = places + (row - document * Ld) * D.stride_l
    most = tl.full((C.BN,), 0, tl.float32)
    for c0 in range(0, d, C.BD):
        x = load_rows(pointers, ok, c0 + tl.arange(0, C.BD), d, D.stride_d, C.WIDE_OFFSETS).to(tl.float32)
        most = nan_max(most, tl.reduce(tl.abs(x), 1, nan_max))
    finite = most < float("inf")
    s = tl.div_rn(tl.where(finite, most, 0.0), 127.0)
    s = tl.where(s < 1.1754943508222875e-38, 0.0, s)  # too small for its inverse to be a number
    inverse = tl.where(s > 0, tl.div_rn(1.0, tl.where(s > 0, s, 1.0)), 0.0)
    for c0 in range(0, d, C.BD):
        columns = c0 + tl.arange(0, C.BD)
        x = load_rows(pointers, ok & finite, columns, d, D.stride_d, C.WIDE_OFFSETS).to(tl.float32)
        # Rounded before `_round_to_integer` adds to it: fused with that sum it would be rounded once, and halves
        # otherwise.
        x = tl.fma(x, tl.broadcast_to(inverse[:, None], x.shape), tl.zeros_like(x))
        q = tl.minimum(tl.maximum(_round_to_integer(x), -127.0), 127.0)
        mask = ok[:, None] & (columns < d)[None, :]
        tl.store(data + row[:, None] * d + columns[None, :], q.to(tl.int8), mask=mask)
    tl.store(scale + row, tl.where(finite, s, float("nan")), mask=ok)
