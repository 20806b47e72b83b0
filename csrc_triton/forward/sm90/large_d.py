"""The forward kernel of sm_90 for wide features: query rows and documents both stream through shared memory.

A tile is 128 query rows by BN document tokens, 64 features a step. One warp copies the steps of every tile, of both
operands, into a ring; each of two warp groups multiplies 64 rows, with one product in flight while it waits for the
next step. The ring runs on from tile to tile and document to document. Scores have the bits of `maxsim_forward`.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ...common.primitives import load_query_mask, load_query_weight, nan_max, sum_in_order
from .accumulators import split_lanes
from .dense import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from .gluon_names import async_load, reinterpret
from .pipeline import ACCUMULATOR_ROWS, advance_stage

STEP_FEATURES = gl.constexpr(64)  # of a step: 128 bytes, the widest swizzle


class StepPipeline(NamedTuple):
    """Steps of both operands in shared memory, and the barriers that say which are full or may be filled again.

    `norms`: room for the inverse norms of a tile's tokens, which arrive with its last step; 0 unless normalising.
    """

    queries: Any
    documents: Any
    full: Any
    empty: Any
    norms: Any


@gluon.jit
def _retreat_stage(stage, C: gl.constexpr):
    # Not kept in a variable: one that begins as a copy of another is not carried through the loop.
    return gl.where(stage == 0, C.STAGES, stage) - 1


@gluon.jit
def _produce(Q, D, norms, ring, begin, end, parts, K, Ld, d, C: gl.constexpr):
    """Copy every step. Out-of-range elements are zeros. The last tile of a document is shifted back unless
    SHORT_DOCUMENTS."""
    GROUPS: gl.constexpr = ACCUMULATOR_ROWS // C.ROWS_PER_QUERY
    BLOCK: gl.constexpr = Q.block_type.shape
    LAYOUT: gl.constexpr = Q.layout
    STEP: gl.constexpr = D.block_type.nbytes + 2 * Q.block_type.nbytes
    tiles = gl.cdiv(Ld, C.BN)
    stage = 0
    phase = 1
    for task in range(begin, end):
        row = (task % K) * Ld
        group = task // K * (2 * GROUPS)
        for t0 in range(0, Ld, C.BN):
            token = row if C.SHORT_DOCUMENTS else row + gl.minimum(t0, Ld - C.BN)
            for c0 in range(0, d, STEP_FEATURES):
                full = ring.full.index(stage)
                mbarrier.wait(ring.empty.index(stage), phase)
                if C.NORMALIZE and c0 + STEP_FEATURES >= d:
                    mbarrier.expect(full, STEP + norms.block_type.nbytes)
                    async_load(norms, [task % K * tiles * C.BN + t0], full, ring.norms.index(stage))
                else:
                    mbarrier.expect(full, STEP)
                async_load(D, [token, c0], full, ring.documents.index(stage))
                for G in gl.static_range(2):
                    first = group + G * GROUPS
                    rows = reinterpret(ring.queries.index(2 * stage + G), Q.dtype, BLOCK, LAYOUT)
                    async_load(Q, [first // parts, first % parts * C.ROWS_PER_QUERY, c0], full, rows)
                stage, phase = advance_stage(stage, phase, C)


@gluon.jit
def _reduce_lane_maxima(S):
    """A row's maxima for each of the 4 lanes of the quad that holds it, with no exchange between threads."""
    return gl.reduce(gl.reduce(split_lanes(S), 3, nan_max), 1, nan_max)


@gluon.jit
def _store_scores(best, Q, norms, first, parts, k, scores, sizes, C: gl.constexpr):
    """Store the sums of a document's row maxima, [groups, K]; `norms`: those of query tokens."""
    GROUPS: gl.constexpr = ACCUMULATOR_ROWS // C.ROWS_PER_QUERY
    row_best = gl.reduce(best, 1, nan_max)
    r = gl.arange(0, ACCUMULATOR_ROWS, layout=row_best.type.layout)
    group = first + r // C.ROWS_PER_QUERY
    i = group // parts
    s = group % parts * C.ROWS_PER_QUERY + r % C.ROWS_PER_QUERY
    keep = load_query_mask(Q, i, s, (i < sizes.Nq) & (s < sizes.Lq))
    if C.NORMALIZE:
        row_best *= gl.load(norms + i.to(gl.int64) * sizes.Lq + s, mask=keep, other=0.0)
    total = sum_in_order(gl.where(keep, load_query_weight(Q, i, s, keep) * row_best, 0.0), GROUPS, C.ROWS_PER_QUERY)
    group = first + gl.arange(0, GROUPS, layout=total.type.layout)
    gl.store(scores + group.to(gl.int64) * sizes.K + k, total, mask=group < sizes.Nq * parts)


@gluon.jit
def _consume(Q, norms, ring, scores, begin, end, parts, sizes, d, G: gl.constexpr, C: gl.constexpr):
    """Warp group G: its 64 rows of each row tile against the tile's documents."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    stage = 0
    phase = 0
    S = gl.full([ACCUMULATOR_ROWS, C.BN], 0.0, gl.float32, ACC)
    for task in range(begin, end):
        best = _reduce_lane_maxima(gl.full_like(S, float("-inf")))
        for _ in range(0, sizes.Ld, C.BN):
            for c0 in range(0, d, STEP_FEATURES):
                mbarrier.wait(ring.full.index(stage), phase)
                rows = ring.queries.index(2 * stage + G)
                S = warpgroup_mma(rows, ring.documents.index(stage).permute((1, 0)), S, use_acc=c0 > 0, is_async=True)
                S = warpgroup_mma_wait(1, [S])
                mbarrier.arrive(ring.empty.index(_retreat_stage(stage, C)), count=1, pred=c0 > 0)
                stage, phase = advance_stage(stage, phase, C)
            S = warpgroup_mma_wait(0, [S])
            if C.NORMALIZE:
                S = S * ring.norms.index(_retreat_stage(stage, C)).load(gl.SliceLayout(0, ACC))[None, :]
            if C.SHORT_DOCUMENTS:
                t = gl.arange(0, C.BN, layout=gl.SliceLayout(0, ACC))
                S = gl.where((t < sizes.Ld)[None, :], S, float("-inf"))
            mbarrier.arrive(ring.empty.index(_retreat_stage(stage, C)), count=1)
            best = nan_max(best, _reduce_lane_maxima(S))
        first = (task // sizes.K * 2 + G) * (ACCUMULATOR_ROWS // C.ROWS_PER_QUERY)
        _store_scores(best, Q, norms, first, parts, task % sizes.K, scores, sizes, C)


@gluon.jit(do_not_specialize=["parts"])
def maxsim_forward_wide(Q, rows, D, norms, query_norms, scores, sizes, d, parts, C: gl.constexpr):
    """Sums ``scores [groups, K]`` of each group of query rows over documents without mask.

    A group is a query, or the next 64 tokens of one that is longer (its `parts`). `rows` describes Q in blocks
    [queries, tokens, FEATURES] of 64 rows, D all document tokens as rows in blocks [BN, FEATURES]. With C.NORMALIZE
    `norms` describes what `maxsim_tile_norms` leaves of documents, and `query_norms` is what it leaves of queries.
    Programs share the (row tile, document) pairs evenly, row tiles first.
    """
    row_tiles = gl.cdiv(sizes.Nq * parts * C.ROWS_PER_QUERY, 2 * ACCUMULATOR_ROWS)
    pairs = row_tiles.to(gl.int64) * sizes.K
    begin = (pairs * gl.program_id(0) // gl.num_programs(0)).to(gl.int32)
    end = (pairs * (gl.program_id(0) + 1) // gl.num_programs(0)).to(gl.int32)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    STAGES: gl.constexpr = C.STAGES
    room = 0
    if C.NORMALIZE:
        room = gl.allocate_shared_memory(gl.float32, [C.STAGES, C.BN], norms.layout)
    ring = StepPipeline(
        gl.allocate_shared_memory(D.dtype, [2 * C.STAGES, ACCUMULATOR_ROWS, STEP_FEATURES], D.layout),
        gl.allocate_shared_memory(D.dtype, [C.STAGES, C.BN, STEP_FEATURES], D.layout),
        gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], BARRIER),
        room,
    )
    for n in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(n), count=1)
        mbarrier.init(ring.empty.index(n), count=2)
    gl.warp_specialize(
        [
            (_consume, (Q, query_norms, ring, scores, begin, end, parts, sizes, d, 0, C)),
            (_consume, (Q, query_norms, ring, scores, begin, end, parts, sizes, d, 1, C)),
            (_produce, (rows, D, norms, ring, begin, end, parts, sizes.K, sizes.Ld, d, C)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
