"""Few query rows, for `forward_specialized`: one product of a tile serves all of them.

So each warp group has documents of its own, every second one, and tiles of its own in the ring. Tokens are the rows of
its products: a maximum over tokens is one over tiles until the document ends, registers of a warp may hold the tokens
that it converts, and what normalises a token is found by the warp that has its products.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common.fp32 import FP16_LOW_SCALE, split_rows
from ...common.primitives import load_query_mask, load_query_weight, nan_max, sum_in_order
from ...formats.encoded import needs_power_scaling
from .accumulators import join_terms
from .convert import convert_queries, fp8_to_fp16, load_tile_scales
from .int8_terms import (
    compute_fallback_maxima,
    dequantize_row_maxima,
    has_fallback_rows,
    load_document_scale,
    store_query_terms,
)
from .norms import compute_row_inverse_norms, compute_tile_inverse_norms
from .pipeline import PipelineNorms, TilePipeline, advance_stage, make_accumulator_layout, make_tile_pipeline
from .query_rows import load_accumulator_queries, map_accumulator_rows


@triton.constexpr_function
def _count_columns(C):
    """Of a product: a query row has one, or one for each int8 term."""
    return C.MMA_ROWS * max(C.INT8_TERMS, 1)


@gluon.jit
def make_small_m_pipeline(D, norms, C: gl.constexpr):
    """A ring of C.STAGES tiles for each warp group, with what is read beside them, and room for its query rows."""
    TILE: gl.constexpr = D.layout
    CONVERTED: gl.constexpr = C.ENCODING != "" or C.SPLIT_FP32
    DTYPE: gl.constexpr = gl.float16 if CONVERTED else D.dtype
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2) if CONVERTED else D.layout
    ring = make_tile_pipeline(D, TILE, 2 * C.STAGES, 1, C)
    if C.PRECOMPUTED_SCALES and C.ENCODING == "":
        scales = gl.allocate_shared_memory(gl.float32, [2 * C.STAGES, C.BN], norms.layout)
        ring = TilePipeline(ring.tiles, ring.full, ring.empty, 0, 0, PipelineNorms(scales, 0))
    return ring, gl.allocate_shared_memory(DTYPE, [4 if C.SPLIT_FP32 else 2, _count_columns(C), C.BD], OPERAND)


@gluon.jit
def _load_queries(x, q_smem, sizes, layout: gl.constexpr, G: gl.constexpr, C: gl.constexpr):
    """The query rows as operands of products; and what their maxima are multiplied by, in a layout, negative of rows
    that terms cannot hold."""
    place = q_smem.index(G)
    low = q_smem.index(G + 2 if C.SPLIT_FP32 else G)
    factor = 0
    if C.INT8_TERMS > 0:
        factor = store_query_terms(x.Q, place, 0, 0, 1, sizes, x.d, layout, C)
    else:
        rows = load_accumulator_queries(x.Q, 0, 0, 1, sizes, x.d, C)
        if C.SPLIT_FP32:
            terms, scale, plain, zero = split_rows(rows)
            rows, lo = terms
            low.store(lo)
            factor = gl.convert_layout(gl.where(zero, 1.0, gl.where(plain, scale, -1.0)), layout)
        elif C.ENCODING != "":
            rows, factor = convert_queries(rows, layout, C)
        elif C.NORMALIZE:
            factor = gl.convert_layout(compute_row_inverse_norms(rows), layout)
        place.store(rows)
    fence_async_shared()
    return (place.permute((1, 0)), low.permute((1, 0))), factor


@gluon.jit
def _advance_tile(k, t0, Ld, C: gl.constexpr):
    """The document and the first token of a warp group's next tile."""
    last = t0 + C.BN >= Ld
    return gl.where(last, k + 2, k), gl.where(last, 0, t0 + C.BN)


@gluon.jit
def _prefetch_scales(numbers, k, t0, sizes, layout: gl.constexpr, C: gl.constexpr):
    """The scales of the tokens of FP8 documents' tile after that of `t0`, and which tile that is; 0 for others."""
    scale = 0
    if C.ENCODING != "":
        k, t0 = _advance_tile(k, t0, sizes.Ld, C)
        scale = load_tile_scales(numbers, gl.minimum(k, sizes.K - 1), t0, sizes.Ld, layout, C)
    return scale, k, t0


@gluon.jit
def _compute_split_similarities(x, q, S, layout: gl.constexpr):
    """`_compute_similarities` of fp32 tokens: -inf of those that terms cannot hold, which come last."""
    terms, scale, plain, _ = split_rows(x)
    hi, lo = terms
    S = warpgroup_mma(lo, q[0], S, use_acc=False, is_async=True)
    S = warpgroup_mma(hi, q[1], S, is_async=True)
    scale = gl.convert_layout(scale, layout)
    plain = gl.convert_layout(plain.to(gl.int32), layout)
    S = warpgroup_mma_wait(0, [S])
    S = warpgroup_mma(hi, q[0], S * (1.0 / FP16_LOW_SCALE), is_async=True)
    S = warpgroup_mma_wait(0, [S])
    return S, gl.where((plain > 0)[:, None], S * scale[:, None], float("-inf")), 1 - plain


@gluon.jit
def _compute_similarities(ring, q, S, scale, slot, phase, layout: gl.constexpr, C: gl.constexpr):
    """Of a tile's tokens to the query rows, over the tokens' norms or times their scales; with the products, whose
    registers the next ones take. Last, with C.SPLIT_FP32, which tokens have none."""
    mbarrier.wait(ring.full.index(slot), phase)
    tile = ring.tiles.index(slot)
    odd = 0
    if C.ENCODING != "" or C.SPLIT_FP32:
        a = tile.load(gl.DotOperandLayout(0, S.type.layout, 2))
        mbarrier.arrive(ring.empty.index(slot), count=1)
        if C.SPLIT_FP32:
            S, x, odd = _compute_split_similarities(a, q, S, layout)
        else:
            S = warpgroup_mma(fp8_to_fp16(a, C), q[0], S, use_acc=False, is_async=True)
            S = warpgroup_mma_wait(0, [S])
            x = S * scale[:, None]
    else:
        S = warpgroup_mma(tile, q[0], S, use_acc=False, is_async=True)
        if C.NORMALIZE:
            scale = gl.convert_layout(compute_tile_inverse_norms(tile, 4, C), layout)
        elif C.PRECOMPUTED_SCALES:
            scale = ring.norms.inverse.index(slot).load(layout)
        S = warpgroup_mma_wait(0, [S])
        mbarrier.arrive(ring.empty.index(slot), count=1)
        x = join_terms(S, C)
        if C.NORMALIZE or C.PRECOMPUTED_SCALES:
            x = x.to(gl.float32) * scale[:, None]
    return S, x, odd


@gluon.jit
def _update_maxima(best, where, found, start, C: gl.constexpr):
    """`best` and the tiles that it is of, after one that begins with token `start`. The first NaN wins for good."""
    if C.ARGMAX:
        where = gl.where(((found > best) | (found != found)) & (best == best), start, where)
    return nan_max(best, found), where


@gluon.jit
def _select_first_largest(v0, t0, v1, t1):
    """The larger value with its token, the lower token where they are alike. NaN is larger than any number."""
    larger = (v1 > v0) | ((v1 != v1) & (v0 == v0))
    alike = (v1 == v0) | ((v1 != v1) & (v0 != v0))
    return nan_max(v0, v1), gl.where(larger | (alike & (t1 < t0)), t1, t0)


@gluon.jit
def _reduce_tokens(best, where, layout: gl.constexpr, C: gl.constexpr):
    """Each row's maximum, and its winner, in a layout."""
    if C.ARGMAX:
        t = gl.arange(0, C.BN, layout=gl.SliceLayout(1, best.type.layout))
        best, where = gl.reduce((best, where + t[:, None]), 0, _select_first_largest)
        where = gl.convert_layout(where, layout)
    else:
        best = gl.reduce(best, 0, nan_max)
    return gl.convert_layout(best, layout), where


@gluon.jit
def _store_scores(best, where, Q, k, out, sizes, C: gl.constexpr):
    """Store the sums of the maxima of each query's rows, [Nq, K], and winners, -1 of rows that do not count."""
    GROUPS: gl.constexpr = C.MMA_ROWS // C.ROWS_PER_QUERY
    LAYOUT: gl.constexpr = best.type.layout
    i, s = map_accumulator_rows(0, 0, 1, LAYOUT, C)
    ok = (i < sizes.Nq) & (s < sizes.Lq)
    keep = load_query_mask(Q, i, s, ok)
    if C.ARGMAX:
        places = out.argmax + (k.to(gl.int64) * sizes.Nq + i) * sizes.Lq + s
        gl.store(places, gl.where(keep, where, -1).to(out.argmax.dtype.element_ty), mask=ok)
    total = sum_in_order(gl.where(keep, load_query_weight(Q, i, s, keep) * best, 0.0), GROUPS, C.ROWS_PER_QUERY)
    i = gl.arange(0, GROUPS, layout=total.type.layout)
    gl.store(out.scores + i.to(gl.int64) * sizes.K + k, total, mask=i < sizes.Nq)


@gluon.jit
def _dequantize_maxima(best, factor, each, odd_rows, odd_tokens, x, k, sizes, C: gl.constexpr):
    """Rows' maxima as those of what rows and tokens count as."""
    if C.INT8_TERMS > 0:
        best = dequantize_row_maxima(best, factor, each, odd_rows, x.Q, x.numbers, 0, 0, 1, k, sizes, x.d, C)
    elif C.SPLIT_FP32:
        best = gl.where(factor < 0, float("-inf"), best * factor)
        if odd_rows + gl.max(odd_tokens, axis=0) > 0:
            best = nan_max(best, compute_fallback_maxima(x.Q, x.numbers, 0, 0, 1, k, sizes, x.d, factor, C))
    elif C.NORMALIZE or needs_power_scaling(x.Q.ptr.dtype.element_ty, C.ENCODING):
        best = best * factor
    return best


@gluon.jit
def consume_small_m(x, ring, q_smem, out, begin, end, sizes, G: gl.constexpr, C: gl.constexpr):
    """Warp group G: all query rows against every second document. Scales of FP8 tokens are asked for two tiles before:
    they are not in the ring."""
    ACC: gl.constexpr = make_accumulator_layout(_count_columns(C), q_smem.dtype)
    ROW: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0]))
    stage = 0
    phase = 0
    S = gl.full([C.BN, _count_columns(C)], 0, gl.int32 if C.INT8_TERMS > 0 else gl.float32, ACC)
    if C.INT8_TERMS > 0 and not C.PRECOMPUTED_SCALES:
        none = gl.full_like(join_terms(S, C), -(2**31))
    else:
        none = gl.full_like(join_terms(S, C).to(gl.float32), float("-inf"))
    TOKEN: gl.constexpr = gl.SliceLayout(1, none.type.layout)
    q, factor = _load_queries(x, q_smem, sizes, ROW, G, C)
    odd_rows = has_fallback_rows(factor) if C.INT8_TERMS > 0 or C.SPLIT_FP32 else 0
    scale, k_ahead, t_ahead = _prefetch_scales(x.numbers, begin + G - 2, sizes.Ld, sizes, TOKEN, C)
    ahead, k_ahead, t_ahead = _prefetch_scales(x.numbers, k_ahead, t_ahead, sizes, TOKEN, C)
    each = 0.0
    for k in range(begin + G, end, 2):
        best = none
        where = gl.full_like(none, 0).to(gl.int32) if C.ARGMAX else 0
        odd_tokens = gl.full([C.BN], 0, gl.int32, TOKEN) if C.SPLIT_FP32 else 0
        if C.INT8_TERMS > 0:
            each = load_document_scale(x.numbers, k, C)
        for t0 in range(0, sizes.Ld, C.BN):
            last, k_ahead, t_ahead = _prefetch_scales(x.numbers, k_ahead, t_ahead, sizes, TOKEN, C)
            S, found, odd = _compute_similarities(ring, q, S, scale, stage + G * C.STAGES, phase, TOKEN, C)
            best, where = _update_maxima(best, where, found, gl.minimum(t0, sizes.Ld - C.BN), C)
            odd_tokens = odd_tokens | odd
            scale, ahead = ahead, last
            stage, phase = advance_stage(stage, phase, C)
        best, where = _reduce_tokens(best, where, ROW, C)
        best = _dequantize_maxima(best, factor, each, odd_rows, odd_tokens, x, k, sizes, C)
        _store_scores(best, where, x.Q, k, out, sizes, C)
