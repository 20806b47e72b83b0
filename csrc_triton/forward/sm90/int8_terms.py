"""Queries beside int8 documents in the kernels of sm_90: as int8 terms, see `stored`; and what terms cannot hold, those
of fp32 included.

Rows of two terms lie 8 rows of hi and 8 of lo by turns, so that a thread has both products of a query row. Maxima are
of integers where a document has one scale, else of fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.fp32 import plain_rows
from ...common.primitives import nan_max, query_keep, row_pointers
from ...formats.encoded import of_one_term, term_values
from .query_rows import slot_rows, slots_of


@gluon.jit
def _row_of(m, C: gl.constexpr):
    """The query row of term m."""
    if C.TERMS == 2:
        m = m // 16 * 8 + m % 8
    return m


@gluon.jit
def half_terms(Q, place, first, H: gl.constexpr, parts, sizes, d, layout: gl.constexpr, C: gl.constexpr):
    """The terms of half H go to shared memory; the scales of its rows in a layout, negative where terms cannot hold
    them."""
    TERMS: gl.constexpr = C.ROWS * C.TERMS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C.BD, C.BD // 8], [4, 1], [1, 0])
    columns = gl.arange(0, C.BD, layout=gl.SliceLayout(0, LAYOUT))
    m = gl.arange(0, TERMS, layout=gl.SliceLayout(1, LAYOUT))
    i, s = slots_of(_row_of(m, C), first, H, parts, C)
    ok = query_keep(Q, i, s, (i < sizes.Nq) & (s < sizes.Lq))
    pointers = row_pointers(Q, i, s)[:, None] + (columns * Q.stride_d)[None, :]
    q = gl.load(pointers, mask=ok[:, None] & (columns < d)[None, :], other=0.0).to(gl.float32)
    hi, lo, scale = term_values(q)
    if C.TERMS == 2:
        place.store(gl.where((m % 16 < 8)[:, None], hi, lo).to(gl.int8))
        scale = gl.reshape(gl.max(gl.reshape(scale, (C.ROWS // 8, 2, 8)), axis=1), (C.ROWS,))
    else:
        place.store(hi.to(gl.int8))
        scale = of_one_term(scale)
    return gl.convert_layout(scale, layout)


@gluon.jit
def any_odd(scale):
    """Whether some rows are not in their terms."""
    return gl.max((scale < 0).to(gl.int32), axis=0)


@gluon.jit
def document_scale(numbers, k, C: gl.constexpr):
    """The scale of document k; 0 where tokens have theirs."""
    if C.GIVEN:
        scale = 0.0
    else:
        scale = gl.load(numbers.scale + k.to(gl.int64) * numbers.stride_doc)
    return scale


@gluon.jit
def counted(best, scale, each, odd, Q, numbers, first, H: gl.constexpr, parts, k, sizes, d, C: gl.constexpr):
    """A half's maxima in document k, whose scale is `each`, as those of what rows and tokens count as."""
    if not C.GIVEN:
        best = best.to(gl.float32) * each
        # Times a negative scale it is the least that counts: no row's maximum is of use.
        scale = gl.where(each < 0, -1.0, scale)
        odd = gl.maximum(odd, (each < 0).to(gl.int32))
    best = best * scale
    if odd > 0:
        best = gl.where(scale < 0, odd_maxima(Q, numbers, first, H, parts, k, sizes, d, scale, C), best)
    return best


@gluon.jit
def odd_tokens(D, row, d, layout: gl.constexpr, C: gl.constexpr):
    """Which of these rows of fp32 tokens two fp16 terms cannot hold, in a layout."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    columns = gl.arange(0, C.BD, layout=gl.SliceLayout(0, LAYOUT))
    tokens = D + gl.convert_layout(row, gl.SliceLayout(1, LAYOUT)) * d
    x = gl.load(tokens[:, None] + columns[None, :], mask=(columns < d)[None, :], other=0.0)
    return gl.convert_layout(plain_rows(x).to(gl.int32), layout) == 0


@gluon.jit
def odd_maxima(Q, numbers, first, H: gl.constexpr, parts, k, sizes, d, scale, C: gl.constexpr):
    """Maxima of a half's rows that are not in their terms, in fp32, feature after feature as `fp32.odd_maxima`; with
    C.SPLIT also of tokens that are not in theirs."""
    STEP: gl.constexpr = 1024 // C.ROWS  # tokens at a time: more would take registers from what is in flight
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // STEP, STEP], [4, 1], [1, 0])
    i, s = slot_rows(first, H, parts, gl.SliceLayout(1, LAYOUT), C)
    ok = (i < sizes.Nq) & (s < sizes.Lq)
    odd = (gl.convert_layout(scale, gl.SliceLayout(1, LAYOUT)) < 0) & ok
    read = query_keep(Q, i, s, ok) if C.SPLIT else odd
    first_feature = row_pointers(Q, i, s)
    best = gl.full([C.ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    for t0 in range(0, sizes.Ld, STEP):
        t = gl.minimum(t0 + gl.arange(0, STEP, layout=gl.SliceLayout(0, LAYOUT)), sizes.Ld - 1).to(gl.int64)
        each = 1.0
        if not C.SPLIT:
            each = gl.load(numbers.scale + k.to(gl.int64) * numbers.stride_doc + t * numbers.stride_l)
        row = k.to(gl.int64) * sizes.Ld + t
        tokens = numbers.ptr + row * d
        S = gl.full([C.ROWS, STEP], 0.0, gl.float32, LAYOUT)
        rows = first_feature
        for n in range(0, d):
            q = gl.load(rows, mask=read, other=0.0).to(gl.float32)
            rows += Q.stride_d
            y = gl.load(tokens + n).to(gl.float32) * each
            S += q[:, None] * y[None, :]
        if C.SPLIT:
            use = odd[:, None] | odd_tokens(numbers.ptr, row, d, gl.SliceLayout(0, LAYOUT), C)[None, :]
            S = gl.where(use, S, float("-inf"))
        best = nan_max(best, gl.reduce(S, 1, nan_max))
    return gl.convert_layout(best, scale.type.layout)
