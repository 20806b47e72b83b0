"""The forward of soft MaxSim on sm_90 for many query rows, as `forward_specialized`: two warp groups, two halves each.

Exponentials of a tile take the special function unit as long as its products take the matrix unit. A group hands the
turn to multiply on once its products are done: handed on when they are issued, both groups' products share the matrix
unit and end together, and then both wait for exponentials. Scores have the bits of `maxsim_forward_soft`.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import nan_max, ordered_sum, query_keep, query_weight
from .gluon_names import async_load
from .halves import Half, lanes
from .ring import HALF_ROWS, advance, products, shared_ring
from .slots import half_queries, slot_rows, sums_of
from .soft import checked_temperature, rate_of, reference_of, rescaled, soft_lanes, soft_maximum

PRODUCER_REGISTERS = gl.constexpr(40)
CONSUMER_REGISTERS = gl.constexpr(232)


class Softly(NamedTuple):
    """Queries, each in so many `parts`; the temperature, and what differences of similarities are multiplied by."""

    Q: Any
    parts: Any
    d: Any
    tau: Any
    rate: Any


@gluon.jit
def _produce(D, ring, begin, end, K, Ld, C: gl.constexpr):
    """Copy the tiles of every document into the ring: a last one reads on, as each token counts once."""
    stage = 0
    phase = 1
    for task in range(begin, end):
        for t0 in range(0, Ld, C.BN):
            mbarrier.wait(ring.empty.index(stage), phase)
            mbarrier.expect(ring.full.index(stage), D.block_type.nbytes)
            async_load(D, [task % K * Ld + t0, 0], ring.full.index(stage), ring.tiles.index(stage))
            stage, phase = advance(stage, phase, C)


@gluon.jit
def _rates(rate, half):
    """`rate` beside the rows of a half."""
    layout: gl.constexpr = gl.SliceLayout(1, half.best.type.layout)
    return gl.full([half.best.shape[0]], 0.0, gl.float32, layout) + rate


@gluon.jit
def _taken(S, half, left, rate, LAST: gl.constexpr, C: gl.constexpr):
    """A half after a tile whose first `left` tokens are the document's: all of them unless it is the LAST one."""
    kept = S
    if LAST:
        column = gl.arange(0, C.BN, layout=gl.SliceLayout(0, S.type.layout))
        kept = gl.where((column < left)[None, :], S, float("-inf"))
    x = lanes(kept)
    m = gl.reduce(gl.reduce(x, 3, nan_max), 1, nan_max)
    best, total = soft_lanes(half.best, half.where, m, x, _rates(rate, half)[:, None])
    return Half(S, best, total)


@gluon.jit
def _settled(S, half):
    """Products that were asked for before, once done, and a half that is to be known by then."""
    S, best, total = warpgroup_mma_wait(0, [S, half.best, half.where])
    return S, Half(half.S, best, total)


@gluon.jit
def _fresh(S):
    """A half that has seen no tile; `S` only lends its registers."""
    best = gl.reduce(gl.reduce(lanes(gl.full_like(S, float("-inf"))), 3, nan_max), 1, nan_max)
    return Half(S, best, gl.full_like(best, 0))


@gluon.jit
def _tile(q, ring, halves, left, place, rate, G: gl.constexpr, LAST: gl.constexpr, C: gl.constexpr):
    """The halves after a tile, and the `place` after it: stage, phase and turn. One half is reduced while the other's
    product runs, the other one under products of the other group."""
    stage, phase, turn = place
    tile = ring.tiles.index(stage).permute((1, 0))
    mbarrier.wait(ring.full.index(stage), phase)
    mbarrier.wait(ring.turn.index(G), turn)
    S_a = warpgroup_mma(q[0], tile, halves[0].S, use_acc=False, is_async=True)
    S_b = warpgroup_mma(q[1], tile, halves[1].S, use_acc=False, is_async=True)
    S = warpgroup_mma_wait(1, [S_a])
    a = _taken(S, halves[0], left, rate, LAST, C)
    # A wait that has long been over ends a block of instructions: else ptxas waits for both products, then reduces.
    mbarrier.wait(ring.full.index(stage), phase)
    S, a = _settled(S_b, a)
    mbarrier.arrive(ring.empty.index(stage), count=1)
    mbarrier.arrive(ring.turn.index(1 - G), count=1)
    b = _taken(S, halves[1], left, rate, LAST, C)
    # As `halves.settle`: the next products may overwrite the registers of S once the halves are known.
    S_a, a = _settled(a.S, a)
    S_b, b = _settled(b.S, b)
    stage, phase = advance(stage, phase, C)
    return (Half(S_a, a.best, a.where), Half(S_b, b.best, b.where)), stage, phase, turn ^ 1


@gluon.jit
def _rows(half, x, H: gl.constexpr, first, k, lse, sizes, C: gl.constexpr):
    """The weighted soft maxima of a half's rows, added up as `soft_merged` does; stores them where `lse` is given."""
    ROWS: gl.constexpr = half.best.shape[0]
    top = reference_of(gl.reduce(half.best, 1, nan_max))
    each = _rates(x.rate, half)
    total = rescaled(half.where, half.best, top[:, None], each[:, None], 0.0)
    total = ordered_sum(gl.reshape(total, (ROWS * 4,)), ROWS, 4)
    best = soft_maximum(top, gl.convert_layout(total, top.type.layout), x.tau, each, 1.0)
    i, s = slot_rows(first, H, x.parts, gl.SliceLayout(1, half.best.type.layout), C)
    ok = (i < sizes.Nq) & (s < sizes.Lq)
    keep = query_keep(x.Q, i, s, ok)
    if lse is not None:
        at = (k.to(gl.int64) * sizes.Nq + i) * sizes.Lq + s
        gl.store(lse + at, gl.where(keep, best, float("-inf")), mask=ok)
    return gl.where(keep, query_weight(x.Q, i, s, keep) * best, 0.0)


@gluon.jit
def _score(halves, x, first, k, out, sizes, C: gl.constexpr):
    """Store the sums of a document's soft maxima, [groups, K], and these where they are kept."""
    GROUPS: gl.constexpr = 2 * C.ROWS // C.SLOT
    a = _rows(halves[0], x, 0, first, k, out.argmax, sizes, C)
    b = _rows(halves[1], x, 1, first, k, out.argmax, sizes, C)
    total = sums_of(a, b, C)
    group = first + gl.arange(0, GROUPS, layout=total.type.layout)
    gl.store(out.scores + group.to(gl.int64) * sizes.K + k, total, mask=group < sizes.Nq * x.parts)


@gluon.jit
def _consume(x, ring, q_smem, out, begin, end, sizes, G: gl.constexpr, C: gl.constexpr):
    """Warp group G: its 128 rows of each row tile against the tile's documents."""
    ACC: gl.constexpr = products(C.BN, q_smem.dtype)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    stage = 0
    phase = 0
    turn = 1 - G
    S = gl.full([HALF_ROWS, C.BN], 0.0, gl.float32, ACC)
    halves = (_fresh(S), _fresh(S))
    whole = sizes.Ld // C.BN * C.BN
    task = begin
    while task < end:
        row_tile = task // sizes.K
        last = gl.minimum((row_tile + 1) * sizes.K, end)
        first = (row_tile * 2 + G) * (2 * C.ROWS // C.SLOT)
        q_smem.index(2 * G).store(half_queries(x.Q, first, 0, x.parts, sizes, x.d, C))
        q_smem.index(2 * G + 1).store(half_queries(x.Q, first, 1, x.parts, sizes, x.d, C))
        fence_async_shared()
        q = (q_smem.index(2 * G).load(OPERAND), q_smem.index(2 * G + 1).load(OPERAND))
        begin_k = task % sizes.K
        for k in range(begin_k, begin_k + last - task):
            for _ in range(0, whole, C.BN):
                place = stage, phase, turn
                halves, stage, phase, turn = _tile(q, ring, halves, 0, place, x.rate, G, False, C)
            for t0 in range(whole, sizes.Ld, C.BN):
                place = stage, phase, turn
                halves, stage, phase, turn = _tile(q, ring, halves, sizes.Ld - t0, place, x.rate, G, True, C)
            _score(halves, x, first, k, out, sizes, C)
            halves = (_fresh(halves[0].S), _fresh(halves[1].S))
        task = last


@gluon.jit(do_not_specialize=["parts"])
def maxsim_forward_soft_specialized(Q, D, out, tau, sizes, d, parts, C: gl.constexpr):
    """As `maxsim_forward_specialized` of documents without mask, for any Ld; `tau` is a number or where one lies.

    `out`, an `Output`, has the rows' soft maxima in the place of winners.
    """
    if tau.dtype.is_ptr():
        tau = gl.load(tau)
    tau = checked_temperature(tau)
    row_tiles = gl.cdiv(sizes.Nq * parts * C.SLOT, 4 * C.ROWS)
    pairs = row_tiles.to(gl.int64) * sizes.K  # shared evenly by the programs, row tiles first
    begin = (pairs * gl.program_id(0) // gl.num_programs(0)).to(gl.int32)
    end = (pairs * (gl.program_id(0) + 1) // gl.num_programs(0)).to(gl.int32)
    ring, q_smem = shared_ring(D, C)
    x = Softly(Q, parts, d, tau, rate_of(tau, 1.0))
    gl.warp_specialize(
        [
            (_consume, (x, ring, q_smem, out, begin, end, sizes, 0, C)),
            (_consume, (x, ring, q_smem, out, begin, end, sizes, 1, C)),
            (_produce, (D, ring, begin, end, sizes.K, sizes.Ld, C)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
