"""Query rows as int8 terms for int8 documents in the sm_90 kernels, and the fp32 fallback of other rows.

Tensor cores multiply int8 by int8 with exact int32 sums. A query row becomes one term, or two terms hi and lo
(`formats/encoded.py`). With two terms, shared memory alternates 8 rows of hi and 8 rows of lo. A thread of a WGMMA
accumulator holds rows r and r + 8, so it has both products of a query row. Maxima are kept as integers if a document
has one scale, and in fp32 if each token has its own.

Rows that terms cannot represent are fallback rows. fp32 instructions multiply these rows feature by feature, and also
the fallback rows and tokens of split fp32 (`fp32.py`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.fp32 import find_exact_rows
from ...common.primitives import load_query_mask, locate_rows, nan_max
from ...formats.bits import get_code_bits
from ...formats.encoded import scale_single_term, split_int8_terms
from .accumulators import locate_accumulator_rows, map_rows
from .bits import WORD_BITS, load_number, order_features
from .pipeline import make_row_layout


@gluon.jit
def _map_term_to_row(m, C: gl.constexpr):
    """Return the query row of term m."""
    if C.INT8_TERMS == 2:
        m = m // 16 * 8 + m % 8
    return m


@gluon.jit
def store_query_terms(Q, smem, first, H: gl.constexpr, parts, sizes, d, layout: gl.constexpr, C: gl.constexpr):
    """Store the int8 terms of accumulator H's query rows to shared memory, and return the scales of these rows.

    Args:
        Q: `QueryArgs`.
        smem: Shared memory for the terms.
        first: First group of the warp group, see `map_rows`.
        H: Accumulator, 0 or 1.
        parts: Groups of each query.
        sizes: `SizeArgs`.
        d: Number of features.
        layout: Layout of the returned scales.
        C: `Sm90Config`.

    Returns:
        fp32 scales `[MMA_ROWS]`, negative for fallback rows.
    """
    TERMS: gl.constexpr = C.MMA_ROWS * C.INT8_TERMS
    LAYOUT: gl.constexpr = make_row_layout(C.BD)
    columns = gl.arange(0, C.BD, layout=gl.SliceLayout(0, LAYOUT))
    m = gl.arange(0, TERMS, layout=gl.SliceLayout(1, LAYOUT))
    i, s = map_rows(_map_term_to_row(m, C), first, H, parts, C)
    ok = load_query_mask(Q, i, s, (i < sizes.Nq) & (s < sizes.Lq))
    pointers = locate_rows(Q, i, s)[:, None] + (columns * Q.stride_d)[None, :]
    q = gl.load(pointers, mask=ok[:, None] & (columns < d)[None, :], other=0.0).to(gl.float32)
    hi, lo, scale = split_int8_terms(q, C)
    if get_code_bits(C.ENCODING) > 0:
        hi = order_features(hi, C.SMALL_M, C)
        lo = order_features(lo, C.SMALL_M, C)
    if C.INT8_TERMS == 2:
        is_hi = gl.convert_layout(m % 16 < 8, gl.SliceLayout(1, hi.type.layout))
        smem.store(gl.where(is_hi[:, None], hi, lo).to(gl.int8))
        scale = gl.reshape(gl.max(gl.reshape(scale, (C.MMA_ROWS // 8, 2, 8)), axis=1), (C.MMA_ROWS,))
    else:
        smem.store(hi.to(gl.int8))
        scale = scale_single_term(scale)
    return gl.convert_layout(scale, layout)


@gluon.jit
def has_fallback_rows(scale):
    """Return 1 if any row is a fallback row, else 0."""
    return gl.max((scale < 0).to(gl.int32), axis=0)


@gluon.jit
def load_document_scale(numbers, k, C: gl.constexpr):
    """Load the scale of document k, or return 0 if each token has its own scale."""
    if C.PRECOMPUTED_SCALES:
        scale = 0.0
    else:
        scale = gl.load(numbers.scale + k.to(gl.int64) * numbers.stride_doc).to(gl.float32)
    return scale


@gluon.jit
def dequantize_row_maxima(
    best, scale, document_scale, has_fallback, Q, numbers, first, H: gl.constexpr, parts, k, sizes, d, C: gl.constexpr
):
    """Return the row maxima of an accumulator in document k, dequantized.

    `scale` holds the scales of the query rows. `has_fallback` says whether any row is a fallback row. Maxima of
    fallback rows come from `compute_fallback_maxima`.
    """
    if not C.PRECOMPUTED_SCALES:
        best = best.to(gl.float32) * document_scale
        # A negative document scale turns the minimum into the maximum, so every row falls back.
        scale = gl.where(document_scale < 0, -1.0, scale)
        has_fallback = gl.maximum(has_fallback, (document_scale < 0).to(gl.int32))
    best = best * scale
    if has_fallback > 0:
        best = gl.where(scale < 0, compute_fallback_maxima(Q, numbers, first, H, parts, k, sizes, d, scale, C), best)
    return best


@gluon.jit
def find_fallback_tokens(D, row, d, layout: gl.constexpr, C: gl.constexpr):
    """Return which of the fp32 tokens at `row` fp16 terms cannot represent, in `layout`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    columns = gl.arange(0, C.BD, layout=gl.SliceLayout(0, LAYOUT))
    tokens = D + gl.convert_layout(row, gl.SliceLayout(1, LAYOUT)) * d
    x = gl.load(tokens[:, None] + columns[None, :], mask=(columns < d)[None, :], other=0.0)
    return gl.convert_layout(find_exact_rows(x, C.FP32_TERMS).to(gl.int32), layout) == 0


@gluon.jit
def compute_fallback_maxima(Q, numbers, first, H: gl.constexpr, parts, k, sizes, d, scale, C: gl.constexpr):
    """Return the maxima of the fallback rows of accumulator H over document k, in fp32 and feature by feature.

    The order of operations is the one of `fp32._compute_fp32_similarities`. With C.FP32_TERMS the maxima of all rows
    also cover the fallback tokens. A row without any such product has -inf.
    """
    STEP: gl.constexpr = 1024 // C.MMA_ROWS  # tokens at a time: more need registers that products in flight occupy
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // STEP, STEP], [4, 1], [1, 0])
    i, s, _, ok = locate_accumulator_rows(first, H, parts, sizes, gl.SliceLayout(1, LAYOUT), C)
    is_fallback = (gl.convert_layout(scale, gl.SliceLayout(1, LAYOUT)) < 0) & ok
    load_mask = load_query_mask(Q, i, s, ok) if C.FP32_TERMS > 0 else is_fallback
    first_feature = locate_rows(Q, i, s)
    best = gl.full([C.MMA_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    NBITS: gl.constexpr = get_code_bits(C.ENCODING)
    for t0 in range(0, sizes.Ld, STEP):
        t = gl.minimum(t0 + gl.arange(0, STEP, layout=gl.SliceLayout(0, LAYOUT)), sizes.Ld - 1).to(gl.int64)
        token_scale = 1.0
        if C.FP32_TERMS == 0:
            token_scale = gl.load(numbers.scale + k.to(gl.int64) * numbers.stride_doc + t * numbers.stride_l)
            token_scale = token_scale.to(gl.float32)
        row = k.to(gl.int64) * sizes.Ld + t
        tokens = numbers.ptr + row * (C.BD * NBITS // WORD_BITS if NBITS > 0 else d)
        S = gl.full([C.MMA_ROWS, STEP], 0.0, gl.float32, LAYOUT)
        rows = first_feature
        for n in range(0, d):
            q = gl.load(rows, mask=load_mask, other=0.0).to(gl.float32)
            rows += Q.stride_d
            if NBITS > 0:
                y = load_number(tokens, n, C).to(gl.float32) * token_scale
            else:
                y = gl.load(tokens + n).to(gl.float32) * token_scale
            S += q[:, None] * y[None, :]
        if C.FP32_TERMS > 0:
            needs_fp32 = (
                is_fallback[:, None] | find_fallback_tokens(numbers.ptr, row, d, gl.SliceLayout(0, LAYOUT), C)[None, :]
            )
            S = gl.where(needs_fp32, S, float("-inf"))
        best = nan_max(best, gl.reduce(S, 1, nan_max))
    return gl.convert_layout(best, scale.type.layout)
