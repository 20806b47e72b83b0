"""The forward kernel of sm_90 for many query rows: one warp moves documents, eight multiply and reduce.

Query rows (256 of them) stay resident while documents stream through a ring of shared-memory tiles. Each of two warp
groups owns 128 rows as two halves of 64. While the matrix unit works on one half, the group reduces the other; what a
half computes is waited for and reduced before the next product overwrites it, so no accumulator is ever copied.

To normalise, similarities are multiplied by the inverse norms of their document tokens as they are reduced. These come
with the tile, or four more warps find them in it.

Written in Gluon: Triton's own warp specialisation is not available on Hopper. Scores have the bits of `maxsim_forward`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import NO_TOKEN, nan_max, ordered_sum, query_keep, query_weight, row_pointers
from .gluon_names import async_load
from .halves import UNRESOLVED, Half, fresh, fresh_halves, reduced, settle, winners_of
from .norms import (
    NORM_CONSUMER_REGISTERS,
    NORM_PRODUCER_REGISTERS,
    NORM_REGISTERS,
    NORM_WARPS,
    inverse_norms,
    inverse_of_tile,
    measure,
    row_norms,
    scaled,
    wait_for_tile,
)
from .ring import HALF_ROWS, advance, shared_ring

ROWS = gl.constexpr(256)  # query rows of a program: 2 warp groups x 2 halves x 64
PRODUCER_REGISTERS = gl.constexpr(40)
CONSUMER_REGISTERS = gl.constexpr(232)


@gluon.jit
def _produce(D, norms, ring, begin, end, K, Ld, C: gl.constexpr):
    """Copy the tiles of every document into the ring; the last of a document is shifted back to end where it ends."""
    tiles = gl.cdiv(Ld, C.BN)
    stage = 0
    phase = 1
    for task in range(begin, end):
        row = (task % K) * Ld
        for t0 in range(0, Ld, C.BN):
            full = ring.full.index(stage)
            mbarrier.wait(ring.empty.index(stage), phase)
            if C.GIVEN:
                mbarrier.expect(full, D.block_type.nbytes + norms.block_type.nbytes)
                async_load(norms, [(task % K * tiles) * C.BN + t0], full, ring.norms.inverse.index(stage))
            else:
                mbarrier.expect(full, D.block_type.nbytes)
            async_load(D, [row + gl.minimum(t0, Ld - C.BN), 0], full, ring.tiles.index(stage))
            stage, phase = advance(stage, phase, C)


@gluon.jit
def _multiply(q, ring, stage, half):
    return warpgroup_mma(q, ring.tiles.index(stage).permute((1, 0)), half.S, use_acc=False, is_async=True)


@gluon.jit
def issued(q, ring, halves, stage, phase, turn, G: gl.constexpr, C: gl.constexpr):
    """Both halves' products with the tile at `stage`, in flight; and the inverse norms of its tokens, asked for before
    the other group is told, so that they arrive meanwhile."""
    wait_for_tile(ring, stage, phase, C)
    mbarrier.wait(ring.turn.index(G), turn)
    S_a = _multiply(q[0], ring, stage, halves[0])
    S_b = _multiply(q[1], ring, stage, halves[1])
    inverse = inverse_of_tile(ring, stage, phase, halves[0].S, C)
    mbarrier.arrive(ring.turn.index(1 - G), count=1)
    return S_a, S_b, inverse


@gluon.jit
def _taken(S, inverse, half, start, C: gl.constexpr):
    """A half after a tile that begins with token `start`."""
    best, where = reduced(scaled(S, inverse, C), half.best, half.where, start, C)
    return Half(S, best, where)


@gluon.jit
def _settled_before(S_b, a, C: gl.constexpr):
    """The other half's product once it is done, and half `a`, which is to be reduced before that is waited for."""
    if C.ARGMAX:
        S_b, best, where = warpgroup_mma_wait(0, [S_b, a.best, a.where])
    else:
        S_b, best = warpgroup_mma_wait(0, [S_b, a.best])
        where = a.where
    return S_b, Half(a.S, best, where)


@gluon.jit
def _absorbed(products, ring, halves, t0, stage, phase, turn, Ld, G: gl.constexpr, C: gl.constexpr):
    """The halves after the tile in flight, that of token t0: one is reduced while the other's product still runs."""
    start = gl.minimum(t0, Ld - C.BN)
    S_a, S_b, inverse = products
    S = warpgroup_mma_wait(1, [S_a])
    a = _taken(S, inverse, halves[0], start, C)
    if C.NORMALIZE or C.ARGMAX:
        # A wait that has long been over ends a block of instructions: else ptxas waits for both products, then reduces.
        mbarrier.wait(ring.full.index(stage), phase)
        S, a = _settled_before(S_b, a, C)
    else:
        S = warpgroup_mma_wait(0, [S_b])
    mbarrier.arrive(ring.empty.index(stage), count=1)
    b = _taken(S, inverse, halves[1], start, C)
    stage, phase = advance(stage, phase, C)
    return (settle(a, C), settle(b, C)), stage, phase, turn ^ 1


@gluon.jit
def slot_rows(first, H: gl.constexpr, parts, layout: gl.constexpr, C: gl.constexpr):
    """Query and token of the 64 rows of half H: each query's tokens are split between the halves, first half first.

    A warp then holds whole queries of up to 32 tokens. `first` is the first group of the warp group; a query longer
    than a warp group's 128 rows takes several groups, its `parts`.
    """
    HALF_SLOT: gl.constexpr = C.SLOT // 2
    r = gl.arange(0, HALF_ROWS, layout=layout)
    group = first + r // HALF_SLOT
    return group // parts, (group % parts) * C.SLOT + H * HALF_SLOT + r % HALF_SLOT


@gluon.jit
def _half_queries(Q, first, H: gl.constexpr, parts, sizes, d, C: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C.BD, C.BD // 8], [4, 1], [1, 0])
    columns = gl.arange(0, C.BD, layout=gl.SliceLayout(0, LAYOUT))
    i, s = slot_rows(first, H, parts, gl.SliceLayout(1, LAYOUT), C)
    ok = query_keep(Q, i, s, (i < sizes.Nq) & (s < sizes.Lq))
    pointers = row_pointers(Q, i, s)[:, None] + (columns * Q.stride_d)[None, :]
    return gl.load(pointers, mask=ok[:, None] & (columns < d)[None, :], other=0.0)


@gluon.jit
def _load_queries(Q, q_smem, first, parts, sizes, d, layout: gl.constexpr, G: gl.constexpr, C: gl.constexpr):
    """The two halves of a warp group's query rows, zeros where masked or absent, as operands of the product; and their
    inverse norms in a layout, 0 unless normalising."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    inverse = 0, 0
    a = _half_queries(Q, first, 0, parts, sizes, d, C)
    b = _half_queries(Q, first, 1, parts, sizes, d, C)
    q_smem.index(2 * G).store(a)
    q_smem.index(2 * G + 1).store(b)
    if C.NORMALIZE:
        inverse = gl.convert_layout(row_norms(a), layout), gl.convert_layout(row_norms(b), layout)
    fence_async_shared()
    if C.RESIDENT:
        q = (
            q_smem.index(2 * G).load(gl.DotOperandLayout(0, ACC, 2)),
            q_smem.index(2 * G + 1).load(gl.DotOperandLayout(0, ACC, 2)),
        )
    else:
        q = (q_smem.index(2 * G), q_smem.index(2 * G + 1))
    return q, inverse


@gluon.jit
def sums_of(a, b, C: gl.constexpr):
    """Of the halves' rows, the sum of each query."""
    GROUPS: gl.constexpr = 2 * HALF_ROWS // C.SLOT
    return ordered_sum(a, GROUPS, C.SLOT // 2) + ordered_sum(b, GROUPS, C.SLOT // 2)


@gluon.jit
def _finished(half, inverse, Q, i, s, k, argmax, unresolved, sizes, C: gl.constexpr):
    """The weighted maxima of a half's rows; stores their winners, UNRESOLVED for a maximum that is NaN or -inf."""
    ok = (i < sizes.Nq) & (s < sizes.Lq)
    keep = query_keep(Q, i, s, ok)
    best = gl.reduce(half.best, 1, nan_max)
    if C.ARGMAX:
        where, unresolved = winners_of(half, best, keep, unresolved)
        out = argmax + (k.to(gl.int64) * sizes.Nq + i) * sizes.Lq + s
        gl.store(out, where.to(argmax.dtype.element_ty), mask=ok)
    if C.NORMALIZE:
        best = best * inverse
    return gl.where(keep, query_weight(Q, i, s, keep) * best, 0.0), unresolved


@gluon.jit
def _score(halves, inverse, Q, first, parts, k, scores, argmax, unresolved, sizes, C: gl.constexpr):
    """Store the sums of a document's row maxima, [groups, K], and its winners."""
    GROUPS: gl.constexpr = 2 * HALF_ROWS // C.SLOT
    ROW: gl.constexpr = gl.SliceLayout(1, halves[0].best.type.layout)
    i, s = slot_rows(first, 0, parts, ROW, C)
    a, unresolved = _finished(halves[0], inverse[0], Q, i, s, k, argmax, unresolved, sizes, C)
    i, s = slot_rows(first, 1, parts, ROW, C)
    b, unresolved = _finished(halves[1], inverse[1], Q, i, s, k, argmax, unresolved, sizes, C)
    total = sums_of(a, b, C)
    group = first + gl.arange(0, GROUPS, layout=total.type.layout)
    gl.store(scores + group.to(gl.int64) * sizes.K + k, total, mask=group < sizes.Nq * parts)
    return unresolved


@gluon.jit
def _consume(Q, D, norms, ring, q_smem, scores, argmax, begin, end, parts, sizes, d, G: gl.constexpr, C: gl.constexpr):
    """Warp group G: its 128 rows of each row tile against the tile's documents."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    stage = 0
    phase = 0
    turn = 1 - G
    S = gl.full([HALF_ROWS, C.BN], 0.0, gl.float32, ACC)
    halves = (fresh(S, C), fresh(S, C))
    unresolved = gl.full([HALF_ROWS], 0, gl.int32, gl.SliceLayout(1, halves[0].best.type.layout))
    task = begin
    while task < end:
        row_tile = task // sizes.K
        last = gl.minimum((row_tile + 1) * sizes.K, end)
        first = (row_tile * 2 + G) * (2 * HALF_ROWS // C.SLOT)
        layout: gl.constexpr = gl.SliceLayout(1, halves[0].best.type.layout)
        q, inverse = _load_queries(Q, q_smem, first, parts, sizes, d, layout, G, C)
        begin_k = task % sizes.K
        end_k = begin_k + last - task
        for k in range(begin_k, end_k):
            if C.ARGMAX:
                for t0 in range(0, sizes.Ld, C.BN):
                    products = issued(q, ring, halves, stage, phase, turn, G, C)
                    halves, stage, phase, turn = _absorbed(
                        products, ring, halves, t0, stage, phase, turn, sizes.Ld, G, C
                    )
                unresolved = _score(halves, inverse, Q, first, parts, k, scores, argmax, unresolved, sizes, C)
                halves = fresh_halves(halves, C)
            else:
                products = issued(q, ring, halves, stage, phase, turn, G, C)
                if k > begin_k:
                    _score(halves, inverse, Q, first, parts, k - 1, scores, argmax, unresolved, sizes, C)
                halves = fresh_halves(halves, C)
                halves, stage, phase, turn = _absorbed(products, ring, halves, 0, stage, phase, turn, sizes.Ld, G, C)
                for t0 in range(C.BN, sizes.Ld, C.BN):
                    products = issued(q, ring, halves, stage, phase, turn, G, C)
                    halves, stage, phase, turn = _absorbed(
                        products, ring, halves, t0, stage, phase, turn, sizes.Ld, G, C
                    )
        if not C.ARGMAX:
            _score(halves, inverse, Q, first, parts, end_k - 1, scores, argmax, unresolved, sizes, C)
        task = last
    if C.ARGMAX:
        mbarrier.arrive(ring.search.index(2), count=1)
        if gl.max(unresolved, axis=0) > 0:
            _resolve(Q, D, norms, ring, q_smem, argmax, begin, end, parts, sizes, d, G, C)


@gluon.jit
def _first_nan(q, D, norms, ring, k, phase, Ld, G: gl.constexpr, C: gl.constexpr):
    """The first document token whose similarity to each of 64 query rows is NaN, else NO_TOKEN."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    tile = ring.tiles.index(G)
    column = gl.arange(0, C.BN, layout=gl.SliceLayout(0, ACC))
    found = gl.full([HALF_ROWS], 0, gl.int32, gl.SliceLayout(1, ACC)) + NO_TOKEN
    row = k * Ld
    first = k * gl.cdiv(Ld, C.BN) * C.BN
    for t0 in range(0, Ld, C.BN):
        start = gl.minimum(t0, Ld - C.BN)
        mbarrier.expect(ring.search.index(G), D.block_type.nbytes)
        async_load(D, [row + start, 0], ring.search.index(G), tile)
        mbarrier.wait(ring.search.index(G), phase)
        phase ^= 1
        S = gl.full([HALF_ROWS, C.BN], 0.0, gl.float32, ACC)
        S = warpgroup_mma(q, tile.permute((1, 0)), S)
        if C.NORMALIZE:
            if C.GIVEN:
                mbarrier.expect(ring.search.index(G), norms.block_type.nbytes)
                async_load(norms, [first + t0], ring.search.index(G), ring.norms.inverse.index(G))
                mbarrier.wait(ring.search.index(G), phase)
                phase ^= 1
            else:
                ring.norms.inverse.index(G).store(inverse_norms(tile, 4, C))
            S = scaled(S, ring.norms.inverse.index(G).load(gl.SliceLayout(0, ACC)), C)
        token = gl.where(S != S, start + column[None, :], NO_TOKEN)
        found = gl.minimum(found, gl.min(token, axis=1))
    return found, phase


@gluon.jit
def _resolve(Q, D, norms, ring, q_smem, argmax, begin, end, parts, sizes, d, G: gl.constexpr, C: gl.constexpr):
    """Replace UNRESOLVED winners: the first NaN if the maximum is NaN, else (it is -inf) the first token."""
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16]))
    phase = 0
    mbarrier.wait(ring.search.index(2), 0)  # both warp groups have read their last tile: the ring is free
    for task in range(begin, end):
        k = task % sizes.K
        first = (task // sizes.K * 2 + G) * (2 * HALF_ROWS // C.SLOT)
        q, _ = _load_queries(Q, q_smem, first, parts, sizes, d, ROW, G, C)
        for H in gl.static_range(2):
            found, phase = _first_nan(q[H], D, norms, ring, k, phase, sizes.Ld, G, C)
            i, s = slot_rows(first, H, parts, ROW, C)
            out = argmax + (k.to(gl.int64) * sizes.Nq + i) * sizes.Lq + s
            ok = (i < sizes.Nq) & (s < sizes.Lq)
            ok = ok & (gl.load(out, mask=ok, other=0) == UNRESOLVED)
            found = gl.where(found == NO_TOKEN, 0, found)
            gl.store(out, found.to(argmax.dtype.element_ty), mask=ok)


@gluon.jit(do_not_specialize=["parts"])
def maxsim_forward_specialized(Q, D, norms, out, sizes, d, parts, C: gl.constexpr):
    """Sums ``[groups, K]`` of each group of query rows over documents without mask, and winners: `out`, an `Output`.

    A group is a query, or the next 128 tokens of one that is longer (its `parts`). D is a tensor descriptor of all
    document tokens as rows, in blocks [BN, BD]; with C.GIVEN, `norms` is one of what `maxsim_tile_norms` leaves.
    Programs share the (row tile, document) pairs evenly, row tiles first.
    """
    row_tiles = gl.cdiv(sizes.Nq * parts * C.SLOT, ROWS)
    pairs = row_tiles.to(gl.int64) * sizes.K
    begin = (pairs * gl.program_id(0) // gl.num_programs(0)).to(gl.int32)
    end = (pairs * (gl.program_id(0) + 1) // gl.num_programs(0)).to(gl.int32)
    ring, q_smem = shared_ring(D, C, norms)
    if C.NORMALIZE and not C.GIVEN:
        gl.warp_specialize(
            [
                (_consume, (Q, D, norms, ring, q_smem, out.scores, out.argmax, begin, end, parts, sizes, d, 0, C)),
                (_consume, (Q, D, norms, ring, q_smem, out.scores, out.argmax, begin, end, parts, sizes, d, 1, C)),
                (_produce, (D, norms, ring, begin, end, sizes.K, sizes.Ld, C)),
                (measure, (ring, begin, end, sizes.Ld, C)),
            ],
            [4, 1, NORM_WARPS],
            [NORM_CONSUMER_REGISTERS, NORM_PRODUCER_REGISTERS, NORM_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (Q, D, norms, ring, q_smem, out.scores, out.argmax, begin, end, parts, sizes, d, 0, C)),
                (_consume, (Q, D, norms, ring, q_smem, out.scores, out.argmax, begin, end, parts, sizes, d, 1, C)),
                (_produce, (D, norms, ring, begin, end, sizes.K, sizes.Ld, C)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
