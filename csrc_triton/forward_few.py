"""Few query rows beside int8 or FP8 documents, for `forward_specialized`: the rows of one product serve all of them.

So each warp group has documents of its own, every second one, and tiles of its own in the ring. Of FP8 it converts a
tile in registers, where only the first operand of a product may lie: there tokens are the rows.
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
from .norms import inverse_of_tile
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
def consume_few(Q, D, numbers, ring, q_smem, scores, begin, end, sizes, d, G: gl.constexpr, C: gl.constexpr):
    """Warp group G: all query rows against every second document."""
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
    """The ring of bytes of FP8, and room for each warp group's query rows."""
    RAW: gl.constexpr = D.layout
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    raw = plain_ring(D, RAW, 2 * C.STAGES, 1, C)
    return raw, gl.allocate_shared_memory(gl.float16, [2, C.ROWS, C.BD], HALVES)


@gluon.jit
def _tile_after(k, t0, Ld, C: gl.constexpr):
    """The document and the first token of a warp group's next tile."""
    last = t0 + C.BN >= Ld
    return gl.where(last, k + 2, k), gl.where(last, 0, t0 + C.BN)


@gluon.jit
def consume_few_fp8(Q, numbers, raw, q_smem, scores, begin, end, sizes, d, G: gl.constexpr, C: gl.constexpr):
    """Likewise of FP8 documents. Scales are asked for two tiles before: they are not in the ring."""
    ACC: gl.constexpr = products(C.ROWS, gl.float16)
    ROW: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0]))
    stage = 0
    phase = 0
    S = gl.full([C.BN, C.ROWS], 0.0, gl.float32, ACC)
    none = gl.full([C.BN, C.ROWS], float("-inf"), gl.float32, ACC)
    q, powers = held(half_queries(Q, 0, 0, 1, sizes, d, C), ROW, C)
    q_smem.index(G).store(q)
    fence_async_shared()
    k_ahead = begin + G
    t_ahead = 0
    scale = scales_of(numbers, gl.minimum(k_ahead, sizes.K - 1), t_ahead, sizes.Ld, gl.SliceLayout(1, ACC), C)
    k_ahead, t_ahead = _tile_after(k_ahead, t_ahead, sizes.Ld, C)
    ahead = scales_of(numbers, gl.minimum(k_ahead, sizes.K - 1), t_ahead, sizes.Ld, gl.SliceLayout(1, ACC), C)
    for k in range(begin + G, end, 2):
        best = none
        for _ in range(0, sizes.Ld, C.BN):
            k_ahead, t_ahead = _tile_after(k_ahead, t_ahead, sizes.Ld, C)
            last = scales_of(numbers, gl.minimum(k_ahead, sizes.K - 1), t_ahead, sizes.Ld, gl.SliceLayout(1, ACC), C)
            slot = stage + G * C.STAGES
            mbarrier.wait(raw.full.index(slot), phase)
            x = raw.tiles.index(slot).load(gl.DotOperandLayout(0, ACC, 2))
            mbarrier.arrive(raw.empty.index(slot), count=1)
            S = warpgroup_mma(in_fp16(x, C), q_smem.index(G).permute((1, 0)), S, use_acc=False, is_async=True)
            S = warpgroup_mma_wait(0, [S])
            best = nan_max(best, S * scale[:, None])
            scale, ahead = ahead, last
            stage, phase = advance(stage, phase, C)
        best = gl.convert_layout(gl.reduce(best, 0, nan_max), ROW)
        if is_over(Q.ptr.dtype.element_ty, C.STORED):
            best = best * powers
        _store(best, Q, k, scores, sizes, C)
