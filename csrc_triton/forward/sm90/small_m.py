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

from ...common.fp32 import LOW_PART, split
from ...common.primitives import nan_max, ordered_sum, query_keep, query_weight
from ...formats.encoded import is_over
from .accumulators import joined
from .convert import held, in_fp16, scales_of
from .int8_terms import any_odd, counted, document_scale, half_terms, odd_maxima
from .norms import inverse_norms, row_norms
from .pipeline import Norms, Ring, advance, plain_ring, products
from .query_rows import half_queries, slot_rows


@triton.constexpr_function
def _columns(C):
    """Of a product: a query row has one, or one for each int8 term."""
    return C.ROWS * max(C.TERMS, 1)


@gluon.jit
def few_ring(D, norms, C: gl.constexpr):
    """A ring of C.STAGES tiles for each warp group, with what is read beside them, and room for its query rows."""
    TILE: gl.constexpr = D.layout
    CONVERTED: gl.constexpr = C.STORED != "" or C.SPLIT
    DTYPE: gl.constexpr = gl.float16 if CONVERTED else D.dtype
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2) if CONVERTED else D.layout
    ring = plain_ring(D, TILE, 2 * C.STAGES, 1, C)
    if C.GIVEN and C.STORED == "":
        scales = gl.allocate_shared_memory(gl.float32, [2 * C.STAGES, C.BN], norms.layout)
        ring = Ring(ring.tiles, ring.full, ring.empty, 0, 0, Norms(scales, 0))
    return ring, gl.allocate_shared_memory(DTYPE, [4 if C.SPLIT else 2, _columns(C), C.BD], OPERAND)


@gluon.jit
def _queries(x, q_smem, sizes, layout: gl.constexpr, G: gl.constexpr, C: gl.constexpr):
    """The query rows as operands of products; and what their maxima are multiplied by, in a layout, negative of rows
    that terms cannot hold."""
    place = q_smem.index(G)
    low = q_smem.index(G + 2 if C.SPLIT else G)
    factor = 0
    if C.TERMS > 0:
        factor = half_terms(x.Q, place, 0, 0, 1, sizes, x.d, layout, C)
    else:
        rows = half_queries(x.Q, 0, 0, 1, sizes, x.d, C)
        if C.SPLIT:
            terms, scale, plain, zero = split(rows)
            rows, lo = terms
            low.store(lo)
            factor = gl.convert_layout(gl.where(zero, 1.0, gl.where(plain, scale, -1.0)), layout)
        elif C.STORED != "":
            rows, factor = held(rows, layout, C)
        elif C.NORMALIZE:
            factor = gl.convert_layout(row_norms(rows), layout)
        place.store(rows)
    fence_async_shared()
    return (place.permute((1, 0)), low.permute((1, 0))), factor


@gluon.jit
def _tile_after(k, t0, Ld, C: gl.constexpr):
    """The document and the first token of a warp group's next tile."""
    last = t0 + C.BN >= Ld
    return gl.where(last, k + 2, k), gl.where(last, 0, t0 + C.BN)


@gluon.jit
def _scales_after(numbers, k, t0, sizes, layout: gl.constexpr, C: gl.constexpr):
    """The scales of the tokens of FP8 documents' tile after that of `t0`, and which tile that is; 0 for others."""
    scale = 0
    if C.STORED != "":
        k, t0 = _tile_after(k, t0, sizes.Ld, C)
        scale = scales_of(numbers, gl.minimum(k, sizes.K - 1), t0, sizes.Ld, layout, C)
    return scale, k, t0


@gluon.jit
def _split_similarities(x, q, S, layout: gl.constexpr):
    """`_similarities` of fp32 tokens: -inf of those that terms cannot hold, which come last."""
    terms, scale, plain, _ = split(x)
    hi, lo = terms
    S = warpgroup_mma(lo, q[0], S, use_acc=False, is_async=True)
    S = warpgroup_mma(hi, q[1], S, is_async=True)
    scale = gl.convert_layout(scale, layout)
    plain = gl.convert_layout(plain.to(gl.int32), layout)
    S = warpgroup_mma_wait(0, [S])
    S = warpgroup_mma(hi, q[0], S * (1.0 / LOW_PART), is_async=True)
    S = warpgroup_mma_wait(0, [S])
    return S, gl.where((plain > 0)[:, None], S * scale[:, None], float("-inf")), 1 - plain


@gluon.jit
def _similarities(ring, q, S, scale, slot, phase, layout: gl.constexpr, C: gl.constexpr):
    """Of a tile's tokens to the query rows, over the tokens' norms or times their scales; with the products, whose
    registers the next ones take. Last, with C.SPLIT, which tokens have none."""
    mbarrier.wait(ring.full.index(slot), phase)
    tile = ring.tiles.index(slot)
    odd = 0
    if C.STORED != "" or C.SPLIT:
        a = tile.load(gl.DotOperandLayout(0, S.type.layout, 2))
        mbarrier.arrive(ring.empty.index(slot), count=1)
        if C.SPLIT:
            S, x, odd = _split_similarities(a, q, S, layout)
        else:
            S = warpgroup_mma(in_fp16(a, C), q[0], S, use_acc=False, is_async=True)
            S = warpgroup_mma_wait(0, [S])
            x = S * scale[:, None]
    else:
        S = warpgroup_mma(tile, q[0], S, use_acc=False, is_async=True)
        if C.NORMALIZE:
            scale = gl.convert_layout(inverse_norms(tile, 4, C), layout)
        elif C.GIVEN:
            scale = ring.norms.inverse.index(slot).load(layout)
        S = warpgroup_mma_wait(0, [S])
        mbarrier.arrive(ring.empty.index(slot), count=1)
        x = joined(S, C)
        if C.NORMALIZE or C.GIVEN:
            x = x.to(gl.float32) * scale[:, None]
    return S, x, odd


@gluon.jit
def _taken(best, where, found, start, C: gl.constexpr):
    """`best` and the tiles that it is of, after one that begins with token `start`. The first NaN wins for good."""
    if C.ARGMAX:
        where = gl.where(((found > best) | (found != found)) & (best == best), start, where)
    return nan_max(best, found), where


@gluon.jit
def _first_largest(v0, t0, v1, t1):
    """The larger value with its token, the lower token where they are alike. NaN is larger than any number."""
    larger = (v1 > v0) | ((v1 != v1) & (v0 == v0))
    alike = (v1 == v0) | ((v1 != v1) & (v0 != v0))
    return nan_max(v0, v1), gl.where(larger | (alike & (t1 < t0)), t1, t0)


@gluon.jit
def _over_tokens(best, where, layout: gl.constexpr, C: gl.constexpr):
    """Each row's maximum, and its winner, in a layout."""
    if C.ARGMAX:
        t = gl.arange(0, C.BN, layout=gl.SliceLayout(1, best.type.layout))
        best, where = gl.reduce((best, where + t[:, None]), 0, _first_largest)
        where = gl.convert_layout(where, layout)
    else:
        best = gl.reduce(best, 0, nan_max)
    return gl.convert_layout(best, layout), where


@gluon.jit
def _store(best, where, Q, k, out, sizes, C: gl.constexpr):
    """Store the sums of the maxima of each query's rows, [Nq, K], and winners, -1 of rows that do not count."""
    GROUPS: gl.constexpr = C.ROWS // C.SLOT
    LAYOUT: gl.constexpr = best.type.layout
    i, s = slot_rows(0, 0, 1, LAYOUT, C)
    ok = (i < sizes.Nq) & (s < sizes.Lq)
    keep = query_keep(Q, i, s, ok)
    if C.ARGMAX:
        places = out.argmax + (k.to(gl.int64) * sizes.Nq + i) * sizes.Lq + s
        gl.store(places, gl.where(keep, where, -1).to(out.argmax.dtype.element_ty), mask=ok)
    total = ordered_sum(gl.where(keep, query_weight(Q, i, s, keep) * best, 0.0), GROUPS, C.SLOT)
    i = gl.arange(0, GROUPS, layout=total.type.layout)
    gl.store(out.scores + i.to(gl.int64) * sizes.K + k, total, mask=i < sizes.Nq)


@gluon.jit
def _counted(best, factor, each, odd_rows, odd_tokens, x, k, sizes, C: gl.constexpr):
    """Rows' maxima as those of what rows and tokens count as."""
    if C.TERMS > 0:
        best = counted(best, factor, each, odd_rows, x.Q, x.numbers, 0, 0, 1, k, sizes, x.d, C)
    elif C.SPLIT:
        best = gl.where(factor < 0, float("-inf"), best * factor)
        if odd_rows + gl.max(odd_tokens, axis=0) > 0:
            best = nan_max(best, odd_maxima(x.Q, x.numbers, 0, 0, 1, k, sizes, x.d, factor, C))
    elif C.NORMALIZE or is_over(x.Q.ptr.dtype.element_ty, C.STORED):
        best = best * factor
    return best


@gluon.jit
def consume_few(x, ring, q_smem, out, begin, end, sizes, G: gl.constexpr, C: gl.constexpr):
    """Warp group G: all query rows against every second document. Scales of FP8 tokens are asked for two tiles before:
    they are not in the ring."""
    ACC: gl.constexpr = products(_columns(C), q_smem.dtype)
    ROW: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0]))
    stage = 0
    phase = 0
    S = gl.full([C.BN, _columns(C)], 0, gl.int32 if C.TERMS > 0 else gl.float32, ACC)
    if C.TERMS > 0 and not C.GIVEN:
        none = gl.full_like(joined(S, C), -(2**31))
    else:
        none = gl.full_like(joined(S, C).to(gl.float32), float("-inf"))
    TOKEN: gl.constexpr = gl.SliceLayout(1, none.type.layout)
    q, factor = _queries(x, q_smem, sizes, ROW, G, C)
    odd_rows = any_odd(factor) if C.TERMS > 0 or C.SPLIT else 0
    scale, k_ahead, t_ahead = _scales_after(x.numbers, begin + G - 2, sizes.Ld, sizes, TOKEN, C)
    ahead, k_ahead, t_ahead = _scales_after(x.numbers, k_ahead, t_ahead, sizes, TOKEN, C)
    each = 0.0
    for k in range(begin + G, end, 2):
        best = none
        where = gl.full_like(none, 0).to(gl.int32) if C.ARGMAX else 0
        odd_tokens = gl.full([C.BN], 0, gl.int32, TOKEN) if C.SPLIT else 0
        if C.TERMS > 0:
            each = document_scale(x.numbers, k, C)
        for t0 in range(0, sizes.Ld, C.BN):
            last, k_ahead, t_ahead = _scales_after(x.numbers, k_ahead, t_ahead, sizes, TOKEN, C)
            S, found, odd = _similarities(ring, q, S, scale, stage + G * C.STAGES, phase, TOKEN, C)
            best, where = _taken(best, where, found, gl.minimum(t0, sizes.Ld - C.BN), C)
            odd_tokens = odd_tokens | odd
            scale, ahead = ahead, last
            stage, phase = advance(stage, phase, C)
        best, where = _over_tokens(best, where, ROW, C)
        best = _counted(best, factor, each, odd_rows, odd_tokens, x, k, sizes, C)
        _store(best, where, x.Q, k, out, sizes, C)
