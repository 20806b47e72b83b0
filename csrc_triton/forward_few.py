"""Few query rows, for `forward_specialized`: one product of a tile serves all of them.

So each warp group has documents of its own, every second one, and tiles of its own in the ring. Tokens are the rows of
its products, but for int8 documents: a maximum over tokens then takes no more than one over tiles, a tile of FP8 is
converted in registers, where a product's first operand may lie, and what normalises a token is found by its warp.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import nan_max, ordered_sum, query_keep, query_weight
from .converted import held, in_fp16, scales_of
from .halves import fresh, joined, taken
from .norms import inverse_norms, inverse_of_tile, row_norms
from .ring import HALF_ROWS, advance, plain_ring, products
from .slots import half_queries, slot_rows
from .stored import is_over
from .terms import any_odd, counted, document_scale, half_terms


@gluon.jit
def _store(best, Q, k, scores, sizes, C: gl.constexpr):
    """Store the sums of the maxima of each query's rows, [Nq, K]."""
    GROUPS: gl.constexpr = C.ROWS // C.SLOT
    LAYOUT: gl.constexpr = best.type.layout
    i, s = slot_rows(0, 0, 1, LAYOUT, C)
    keep = query_keep(Q, i, s, (i < sizes.Nq) & (s < sizes.Lq))
    total = ordered_sum(gl.where(keep, query_weight(Q, i, s, keep) * best, 0.0), GROUPS, C.SLOT)
    i = gl.arange(0, GROUPS, layout=total.type.layout)
    gl.store(scores + i.to(gl.int64) * sizes.K + k, total, mask=i < sizes.Nq)


@gluon.jit
def consume_few_int8(Q, D, numbers, ring, q_smem, scores, begin, end, sizes, d, G: gl.constexpr, C: gl.constexpr):
    """Warp group G: all query rows against every second of int8 documents."""
    ACC: gl.constexpr = products(C.BN, D.dtype)
    stage = 0
    phase = 0
    S = gl.full([HALF_ROWS, C.BN], 0, gl.int32, ACC)
    half = fresh(S, C)
    layout: gl.constexpr = gl.SliceLayout(1, half.best.type.layout)
    scale = half_terms(Q, q_smem.index(G), 0, 0, 1, sizes, d, layout, C)
    odd = any_odd(scale)
    q = q_smem.index(G).load(gl.DotOperandLayout(0, ACC, 4))
    for k in range(begin + G, end, 2):
        each = document_scale(numbers, k, C)
        for t0 in range(0, sizes.Ld, C.BN):
            slot = stage + G * C.STAGES
            mbarrier.wait(ring.full.index(slot), phase)
            tile = ring.tiles.index(slot).permute((1, 0))
            S = warpgroup_mma(q, tile, half.S, use_acc=False, is_async=True)
            scales = inverse_of_tile(ring, slot, phase, joined(half.S, C), C)
            S = warpgroup_mma_wait(0, [S])
            mbarrier.arrive(ring.empty.index(slot), count=1)
            half = taken(S, scales, half, t0, C)
            stage, phase = advance(stage, phase, C)
        best = gl.reduce(half.best, 1, nan_max)
        best = counted(best, scale, each, odd, Q, numbers, 0, 0, 1, k, sizes, d, C)
        _store(best, Q, k, scores, sizes, C)
        half = fresh(half.S, C)


@gluon.jit
def few_ring(D, C: gl.constexpr):
    """The ring of documents that are no int8, and room for each warp group's query rows."""
    TILE: gl.constexpr = D.layout
    DTYPE: gl.constexpr = gl.float16 if C.STORED != "" else D.dtype
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ring = plain_ring(D, TILE, 2 * C.STAGES, 1, C)
    return ring, gl.allocate_shared_memory(DTYPE, [2, C.ROWS, C.BD], ROWS)


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
def _tokens_first(ring, q, S, scale, slot, phase, layout: gl.constexpr, C: gl.constexpr):
    """Products of a tile's tokens, which are rows of them, and the query's; over the tokens' norms or times their
    scales."""
    mbarrier.wait(ring.full.index(slot), phase)
    tile = ring.tiles.index(slot)
    if C.STORED != "":
        x = tile.load(gl.DotOperandLayout(0, S.type.layout, 2))
        mbarrier.arrive(ring.empty.index(slot), count=1)
        S = warpgroup_mma(in_fp16(x, C), q, S, use_acc=False, is_async=True)
        S = warpgroup_mma_wait(0, [S])
    else:
        S = warpgroup_mma(tile, q, S, use_acc=False, is_async=True)
        scale = gl.convert_layout(inverse_norms(tile, 4, C), layout)
        S = warpgroup_mma_wait(0, [S])
        mbarrier.arrive(ring.empty.index(slot), count=1)
    return S, S * scale[:, None]


@gluon.jit
def consume_few(Q, numbers, ring, q_smem, scores, begin, end, sizes, d, G: gl.constexpr, C: gl.constexpr):
    """Likewise of FP8 documents, or of others if normalising. Scales are asked for two tiles before: they are not in
    the ring."""
    ACC: gl.constexpr = products(C.ROWS, q_smem.dtype)
    TOKEN: gl.constexpr = gl.SliceLayout(1, ACC)
    ROW: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0]))
    stage = 0
    phase = 0
    S = gl.full([C.BN, C.ROWS], 0.0, gl.float32, ACC)
    none = gl.full([C.BN, C.ROWS], float("-inf"), gl.float32, ACC)
    rows = half_queries(Q, 0, 0, 1, sizes, d, C)
    if C.STORED != "":
        rows, factor = held(rows, ROW, C)
    else:
        factor = gl.convert_layout(row_norms(rows), ROW)
    q_smem.index(G).store(rows)
    fence_async_shared()
    q = q_smem.index(G).permute((1, 0))
    scale, k_ahead, t_ahead = _scales_after(numbers, begin + G - 2, sizes.Ld, sizes, TOKEN, C)
    ahead, k_ahead, t_ahead = _scales_after(numbers, k_ahead, t_ahead, sizes, TOKEN, C)
    for k in range(begin + G, end, 2):
        best = none
        for _ in range(0, sizes.Ld, C.BN):
            last, k_ahead, t_ahead = _scales_after(numbers, k_ahead, t_ahead, sizes, TOKEN, C)
            S, x = _tokens_first(ring, q, S, scale, stage + G * C.STAGES, phase, TOKEN, C)
            best = nan_max(best, x)
            scale, ahead = ahead, last
            stage, phase = advance(stage, phase, C)
        best = gl.convert_layout(gl.reduce(best, 0, nan_max), ROW)
        if C.NORMALIZE or is_over(Q.ptr.dtype.element_ty, C.STORED):
            best = best * factor
        _store(best, Q, k, scores, sizes, C)
