"""Encoded document tokens: loading, conversion for the tensor cores, and dequantization of similarities.

`KernelConfig.ENCODING` names the encoding of a feature:

- "int8".
- "fp8", or "e4m3" and "e5m2" as bytes, for GPUs without FP8 conversion. Next to FP8 queries, "fp8_fp8" or "e4m3_fp8".
- "number": another type that Triton converts.
- "bits1" to "bits4", and "bitwords1" to "bitwords4": codes of odd numbers, see `bits`. With int8 terms "bits1_half",
  "bits1_int8", "bits1_binary", "bits1_rotated" to "bits4_rotated", and the same with "bitwords".
- "codes1" to "codes8" and "words1" to "words4": residual codes, see `residual`. Their tiles are already dequantized.
- A function ``load(ptr, t, c0, d, D, C)`` of a format outside this package. It loads a tile as `load_bits` does.

Every encoded value is exact in fp16 and bf16. Similarities are dequantized after the product:

```text
S[s, t] = <q[s], x[t]> * scale[t] + minimum[t] * sum(q[s])
```

**int8 terms.** A conversion costs more than a product. For int8 documents and codes such as "bits1_half" and
"bits4_rotated", query rows are split into int8 terms instead:

```text
q = scale * (254 hi + lo),    hi = round(127 q / max |q|),    scale = max |q| / (127 * 254)
S = (254 * dot_int32(hi, x) + dot_int32(lo, x)) * scale[t] * scale[s]
```

The error is at most ``scale / 2``, a 64,000th of the largest feature. Integer sums are exact, in 32 bits for d <= 256.
With one term, q is ``254 scale * hi``, accurate to ``127 scale``, a 254th of the largest feature. Rows are exact
(representable) if they are zero or their largest feature is between 1e-30 and 1e30. Other rows, including rows with NaN
or infinity, are multiplied feature by feature, as in `common.fp32`.

**FP8.** FP8 is multiplied in fp16, because one instruction converts two values to fp16, and bf16 needs five. A bf16
query row is divided by a power of two that brings its largest feature to the upper end of fp16. Features of at least
2^-32 of the largest are exact, and others are accurate to 2^-40 of it. Rows with an infinity use the largest power, so
that no other feature becomes infinite.

**FP8 queries.** A row is divided by a power of two that brings its largest feature below 2^8, and rounded to e4m3. The
error of a feature is at most a 16th of it, or 2^-17 of the largest. FP8 tensor cores multiply both operands in one step
that covers all features. Infinite features become NaN.
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
from .bits import get_code_bits, get_code_factor, has_sign_queries, load_bits
from .residual import get_bucket_bits, load_decoded_tokens

INT8_LOW_SCALE = tl.constexpr(254)
_EXPONENT_MASK = tl.constexpr(0x7F800000)
# Exponent limits of a row's largest feature. Below the minimum, the power of two is not a normal number.
_MIN_EXPONENT_BITS, _MAX_EXPONENT_BITS = tl.constexpr(16 << 23), tl.constexpr(254 << 23)
_TARGET_EXPONENT_BITS = tl.constexpr(15 << 23)  # fp16 ends below 2^16
_FP8_TARGET_EXPONENT_BITS = tl.constexpr(7 << 23)  # e4m3 ends at 448
_E4M3_SMALL = tl.constexpr(1.5 * 2**14)  # the last place of an fp32 number of this size is 2^-9
_INVERSE_EXPONENT_BITS = tl.constexpr(254 << 23)  # minus the bits of a power of two: the bits of its inverse


@triton.jit
def convert_encoded(tile, dtype: tl.constexpr, C: tl.constexpr):
    """Convert encoded features to `dtype`."""
    if C.ENCODING == "e4m3" or C.ENCODING == "e4m3_fp8":
        magnitude = tile & 0x7F
        bits = (magnitude.to(tl.uint16) << 7) | ((tile & 0x80).to(tl.uint16) << 8)
        x = bits.to(tl.float16, bitcast=True) * 256.0  # the exponent of fp16 is biased by 8 more
        tile = tl.where(magnitude == 0x7F, float("nan"), x)
    elif C.ENCODING == "e5m2":
        tile = (tile.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    return tile.to(dtype)


@triton.constexpr_function
def is_fp8(stored):
    """Return whether an encoding is FP8."""
    return stored in ("fp8", "e4m3", "e5m2", "fp8_fp8", "e4m3_fp8")


@triton.constexpr_function
def has_fp8_queries(stored):
    """Return whether query rows are rounded to FP8, and multiplied as FP8 or with "e4m3_fp8" as fp16."""
    return stored in ("fp8_fp8", "e4m3_fp8")


@triton.constexpr_function
def needs_power_scaling(query, stored):
    """Return whether query rows of a dtype are converted to fp16 or FP8 and divided by powers of two."""
    return has_fp8_queries(stored) or (is_fp8(stored) and query == tl.bfloat16)


@triton.constexpr_function
def choose_factor_dtype(query, stored):
    """Return the dtype in which encoded features are multiplied with query rows of a dtype."""
    if stored == "fp8_fp8":
        return tl.float8e4nv
    return tl.float16 if needs_power_scaling(query, stored) else query


@triton.jit
def compute_row_powers(x, pointers, ok, C: tl.constexpr):
    """Return the powers of two by which query rows are divided."""
    largest = tl.zeros(ok.shape, tl.float32)
    if C.SINGLE_STEP:
        largest = find_largest(load_rows(pointers, ok, tl.arange(0, C.BD), x.d, x.Q.stride_d, C.WIDE_OFFSETS))
    else:
        for c0 in range(0, x.d, C.BD):
            q = load_rows(pointers, ok, c0 + tl.arange(0, C.BD), x.d, x.Q.stride_d, C.WIDE_OFFSETS)
            largest = tl.maximum(largest, find_largest(q))
    return choose_powers(largest, C)


@triton.jit
def find_largest(q):
    """Return the largest magnitude of each row, ignoring NaN."""
    return tl.max(tl.abs(q.to(tl.float32)), axis=1)


@triton.jit
def choose_powers(largest, C: tl.constexpr):
    """Return the powers of two for rows with these largest magnitudes."""
    exponent = largest.to(tl.int32, bitcast=True) & _EXPONENT_MASK
    exponent = tl.where(
        exponent > _MAX_EXPONENT_BITS,
        _MAX_EXPONENT_BITS,
        tl.where(exponent < _MIN_EXPONENT_BITS, _MIN_EXPONENT_BITS, exponent),
    )
    if has_fp8_queries(C.ENCODING):
        exponent -= _FP8_TARGET_EXPONENT_BITS
    else:
        exponent -= _TARGET_EXPONENT_BITS
    return exponent.to(tl.float32, bitcast=True)


@triton.jit
def _round_to_e4m3(x):
    """Round fp32 numbers below 2^8 to the nearest number of e4m3, ties to even. Infinities become NaN."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + (0x7FFFF + ((bits >> 20) & 1))) & -0x100000).to(tl.float32, bitcast=True)
    small = (x + _E4M3_SMALL) - _E4M3_SMALL  # multiples of 2^-9
    nearest = tl.where(tl.abs(x) < 0.015625, small, normal)
    return tl.where(tl.abs(x) < float("inf"), nearest, float("nan"))


@triton.jit
def divide_by_powers(q, powers, C: tl.constexpr):
    """Divide rows by powers of two, and convert bf16 rows to fp16, or all rows to FP8 for FP8 queries."""
    bits = powers.to(tl.int32, bitcast=True)
    inverse = (bits * -1 + _INVERSE_EXPONENT_BITS).to(tl.float32, bitcast=True)
    x = q.to(tl.float32) * inverse[:, None]
    if has_fp8_queries(C.ENCODING):
        x = _round_to_e4m3(x)
    return x.to(tl.float8e4nv if C.ENCODING == "fp8_fp8" else tl.float16)


@triton.constexpr_function
def is_loader(stored):
    """Return whether `KernelConfig.ENCODING` is a loader function of a format outside this package."""
    return not isinstance(stored, str)


@triton.jit
def load_encoded_tile(ptr, t, row, c0, d, D, counts, dtype: tl.constexpr, C: tl.constexpr):
    """Load features from `c0` on of tokens `t` from `ptr` on, in their encoding.

    Token 0 from `ptr` on is row `row` of all tokens. Residual codes are returned dequantized, for queries of `dtype`.
    """
    if get_code_bits(C.ENCODING) > 0:
        tile = load_bits(ptr, t, c0, d, D, dtype, C)
    elif get_bucket_bits(C.ENCODING) > 0:
        tile = load_decoded_tokens(ptr, t, row, c0, d, D, counts, dtype, C)
    elif is_loader(C.ENCODING):
        tile = C.ENCODING(ptr, t, c0, d, D, C)
    else:
        tile = load_tokens(ptr, t, t >= 0, c0 + tl.arange(0, C.BD), d, D, C.WIDE_OFFSETS)
    return tile


@triton.jit
def _round_to_integer(x):
    """Round `x` to the nearest integer, ties to even, for magnitudes below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def split_int8_terms(q, C: tl.constexpr):
    """Return the terms hi and lo of fp32 rows, and their scales, which are negative for rows that are not exact.

    The scales are divided by the power of two that the numbers of documents are multiplied by.
    Signs are their own terms hi, so that their products are exact, and the scale of hi is 1.
    Products are rounded separately from additions. Fused operations would make the terms depend on the compiled kernel.
    """
    largest = tl.max(tl.abs(q), axis=1)
    finite = tl.min((tl.abs(q) < 1e30).to(tl.int32), axis=1) > 0
    is_exact = finite & ((largest > 1e-30) | (largest == 0))
    inverse = (127.0 / tl.where(is_exact & (largest > 0), largest, 1.0))[:, None]
    x = tl.where(is_exact[:, None], q, 0.0)
    # Zeros in the layout of x. Gluon's functions would need that layout as an argument.
    zero = tl.where(x == x, 0.0, 0.0)
    x = tl.fma(x, zero + inverse, zero)
    hi = _round_to_integer(x)
    lo = _round_to_integer(tl.fma(x - hi, zero + INT8_LOW_SCALE, zero))
    scale = tl.where(largest == 0, 1.0, largest * (1.0 / (127 * INT8_LOW_SCALE)))
    if has_sign_queries(C.ENCODING):
        hi = tl.where(is_exact[:, None], q, 0.0)
        scale = tl.where(is_exact, 1.0 / INT8_LOW_SCALE, scale)
    INVERSE_FACTOR: tl.constexpr = 1.0 / get_code_factor(C.ENCODING)
    return hi, lo, tl.where(is_exact, scale * INVERSE_FACTOR, -1.0)


@triton.jit
def scale_single_term(scale):
    """Return the scales of rows of which only hi is used."""
    return tl.where(scale > 0, scale * INT8_LOW_SCALE, scale)


@triton.jit(do_not_specialize=["rows"])
def maxsim_query_terms(Q, out, scales, rows, d, C: tl.constexpr):
    """Write query rows as int8 terms.

    Args:
        Q: `QueryArgs` of rows.
        out: Output int8 `[2 * rows, BD]`, hi in the first half and lo in the second half.
        scales: Output fp32 `[rows]`, negative for rows that are not exact.
        rows: Number of query rows.
        d: Number of features.
        C: Compile-time choices, a `KernelConfig`. A program handles `BM` rows.
    """
    row = tl.program_id(0) * C.BM + tl.arange(0, C.BM)
    ok = row < rows
    columns = tl.arange(0, C.BD)
    q = load_rows(locate_rows(Q, 0 * row, row), ok, columns, d, Q.stride_d, C.WIDE_OFFSETS).to(tl.float32)
    hi, lo, scale = split_int8_terms(q, C)
    term_pointers = out + row.to(tl.int64)[:, None] * C.BD + columns[None, :]
    tl.store(term_pointers, hi.to(tl.int8), mask=ok[:, None])
    tl.store(term_pointers + rows.to(tl.int64) * C.BD, lo.to(tl.int8), mask=ok[:, None])
    tl.store(scales + row, scale, mask=ok)


@triton.jit
def multiply_terms(q, x, C: tl.constexpr):
    """Return ``q . x^T`` of int8 terms without their scales, transposed with C.TOKENS_FIRST."""
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
    """Return the sums of query rows, which the minimum of a token is multiplied by, or None without a minimum.

    The order of the sum does not depend on the tile.
    """
    if x.counts.minimum is not None:
        total = tl.zeros(ok.shape, tl.float32)
        for c0 in range(0, x.d, 16):
            q = load_rows(pointers, ok, c0 + tl.arange(0, 16), x.d, x.Q.stride_d, C.WIDE_OFFSETS)
            total += sum_in_order_across_warps(q.to(tl.float32), C.BM, 16)
    else:
        total = None
    return total


@triton.jit
def _load_values(ptr, stride, t):
    """Load the values of tokens `t`, or one value for all tokens if `stride` is 0."""
    return tl.load(ptr + t.to(tl.int64) * stride).to(tl.float32)


@triton.jit
def load_token_scales(counts, t):
    """Load the scales of tokens `t` of all documents."""
    return _load_values(counts.scale, counts.scale_stride, t)


@triton.jit
def dequantize_similarities(S, rows, counts, document, t, C: tl.constexpr):
    """Convert similarities to encoded values into similarities to dequantized tokens.

    Residual codes need no conversion.
    """
    if get_bucket_bits(C.ENCODING) == 0:
        t = document.row + tl.minimum(t, document.length - 1)
        S = S * expand_tokens(load_token_scales(counts, t), C)
        if counts.minimum is not None:
            # An explicit fma: a fusion that the compiler chooses would depend on the tile.
            sums = tl.broadcast_to(expand_rows(rows.sums, C), S.shape)
            minimum = expand_tokens(_load_values(counts.minimum, counts.minimum_stride, t), C)
            S = tl.fma(sums, tl.broadcast_to(minimum, S.shape), S)
    return S


@triton.jit
def load_dequantized_tokens(t, c0, d, D, counts, C: tl.constexpr):
    """Load features from `c0` on of packed tokens `t`, dequantized to fp32, with zeros beyond d."""
    x = load_encoded_tile(D.ptr, t, 0, c0, d, D, counts, tl.float32, C)
    if get_bucket_bits(C.ENCODING) == 0:
        x = convert_encoded(x, tl.float32, C) * load_token_scales(counts, t)[:, None]
        if counts.minimum is not None:
            x += _load_values(counts.minimum, counts.minimum_stride, t)[:, None]
    return tl.where((c0 + tl.arange(0, C.BD) < d)[None, :], x, 0.0)


@triton.jit
def sum_dequantized_squares(t, d, D, counts, C: tl.constexpr):
    """Return the sums of squares of dequantized packed tokens `t`."""
    squares = tl.full(t.shape, 0, tl.float32)
    for c0 in range(0, d, C.BD):
        x = load_dequantized_tokens(t, c0, d, D, counts, C)
        squares += tl.sum(x * x, axis=1)
    return squares


@triton.jit(do_not_specialize=["Td"])
def maxsim_unit_counts(D, counts, scale, minimum, Td, d, C: tl.constexpr):
    """Divide the scales and minimums of tokens by the norms of the dequantized tokens.

    Args:
        D: `DocumentArgs` of packed encoded tokens.
        counts: `DequantArgs` of these tokens.
        scale: Output fp32 `[Td]`.
        minimum: Output fp32 `[Td]`, used if `counts` has a minimum.
        Td: Number of tokens.
        d: Number of features.
        C: Compile-time choices, a `KernelConfig`. A program handles `BN` tokens.
    """
    t = tl.program_id(0).to(tl.int64) * C.BN + tl.arange(0, C.BN)
    ok = t < Td
    t = tl.minimum(t, Td - 1)
    inverse = compute_inverse_norm(sum_dequantized_squares(t, d, D, counts, C))
    tl.store(scale + t, load_token_scales(counts, t) * inverse, mask=ok)
    if counts.minimum is not None:
        tl.store(minimum + t, _load_values(counts.minimum, counts.minimum_stride, t) * inverse, mask=ok)


@triton.jit(do_not_specialize=["documents", "K", "Ld"])
def maxsim_keep_int8(D, data, scale, documents, K, Ld, d, C: tl.constexpr):
    """Quantize document tokens to int8, with the result of `lik_ops.quantize`, BN tokens for each program.

        scale[t] = max |x[t]| / 127,    data[t] = clamp(round(x[t] / scale[t]), -127, 127)

    A token with NaN or infinity has the scale NaN.

    Args:
        D: `DocumentArgs`.
        data: Output int8 `[documents, Ld, d]`, contiguous.
        scale: Output fp32 `[documents, Ld]`, contiguous.
        documents: Number of documents.
        K: Documents of each owner in D.
        Ld: Tokens of a document.
        d: Number of features.
        C: Compile-time choices, a `KernelConfig`.
    """
    row = tl.program_id(0).to(tl.int64) * C.BN + tl.arange(0, C.BN)
    document = row // Ld
    ok = document < documents
    owner = document // K
    document_pointers = D.ptr + owner * D.stride_owner + (document - owner * K) * D.stride_doc
    pointers = document_pointers + (row - document * Ld) * D.stride_l
    largest = tl.full((C.BN,), 0, tl.float32)
    for c0 in range(0, d, C.BD):
        x = load_rows(pointers, ok, c0 + tl.arange(0, C.BD), d, D.stride_d, C.WIDE_OFFSETS).to(tl.float32)
        largest = nan_max(largest, tl.reduce(tl.abs(x), 1, nan_max))
    finite = largest < float("inf")
    s = tl.div_rn(tl.where(finite, largest, 0.0), 127.0)
    s = tl.where(s < 1.1754943508222875e-38, 0.0, s)  # subnormal scales, whose inverse may overflow
    inverse = tl.where(s > 0, tl.div_rn(1.0, tl.where(s > 0, s, 1.0)), 0.0)
    for c0 in range(0, d, C.BD):
        columns = c0 + tl.arange(0, C.BD)
        x = load_rows(pointers, ok & finite, columns, d, D.stride_d, C.WIDE_OFFSETS).to(tl.float32)
        # Round the product separately. Fused with the addition of `_round_to_integer`, it would be rounded once, and
        # ties would round differently.
        x = tl.fma(x, tl.broadcast_to(inverse[:, None], x.shape), tl.zeros_like(x))
        q = tl.minimum(tl.maximum(_round_to_integer(x), -127.0), 127.0)
        mask = ok[:, None] & (columns < d)[None, :]
        tl.store(data + row[:, None] * d + columns[None, :], q.to(tl.int8), mask=mask)
    tl.store(scale + row, tl.where(finite, s, float("nan")), mask=ok)
