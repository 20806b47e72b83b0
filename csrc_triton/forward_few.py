"""Few query rows beside int8 documents, for `forward_specialized`: the rows of one product serve all of them.

So each warp group has documents of its own, every second one, and tiles of its own in the ring.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .common import nan_max, ordered_sum, query_keep, query_weight
from .halves import fresh, joined, taken
from .norms import inverse_of_tile
from .ring import HALF_ROWS, advance, products
from .slots import slot_rows
from .terms import any_odd, counted, document_scale, half_terms


@gluon.jit
def _store(half, scale, each, odd, Q, numbers, k, scores, sizes, d, C: gl.constexpr):
    """Store the sums of the rows of each query, [Nq, K]."""
    GROUPS: gl.constexpr = C.ROWS // C.SLOT
    best = counted(gl.reduce(half.best, 1, nan_max), scale, each, odd, Q, numbers, 0, 0, 1, k, sizes, d, C)
    i, s = slot_rows(0, 0, 1, gl.SliceLayout(1, half.best.type.layout), C)
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
        _store(half, scale, each, odd, Q, numbers, k, scores, sizes, d, C)
        half = fresh(half.S, C)
