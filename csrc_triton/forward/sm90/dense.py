"""The forward kernel of sm_90 for many query rows: one warp moves documents, eight multiply and reduce.

Query rows (256 of them) stay resident while documents stream through a ring of shared-memory tiles. Each of two warp
groups owns 128 rows as two halves of 64. While the matrix unit works on one half, the group reduces the other; what a
half computes is waited for and reduced before the next product overwrites it, so no accumulator is ever copied.

To normalise, similarities are multiplied by the inverse norms of their document tokens as they are reduced. These come
with the tile, or four more warps find them in it.

Written in Gluon: Triton's own warp specialisation is not available on Hopper. Scores have the bits of `maxsim_forward`.
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

from ...common.primitives import NO_TOKEN, load_query_mask, load_query_weight, nan_max
from ...formats.encoded import needs_power_scaling
from .accumulators import (
    UNRESOLVED,
    Accumulator,
    accumulate_tile,
    compiler_barrier_accumulator,
    join_terms,
    reset_accumulator,
    reset_accumulators,
    select_argmax,
)
from .convert import CONVERTER_WARPS, convert_queries, convert_tiles
from .gluon_names import async_load
from .int8_terms import dequantize_row_maxima, has_fallback_rows, load_document_scale, store_query_terms
from .norms import (
    NORM_CONSUMER_REGISTERS,
    NORM_PRODUCER_REGISTERS,
    NORM_REGISTERS,
    NORM_WARPS,
    compute_row_inverse_norms,
    compute_tile_inverse_norms,
    load_inverse_norms,
    produce_norms,
    scale_similarities,
    wait_for_tile,
)
from .pipeline import ACCUMULATOR_ROWS, advance_stage, make_accumulator_layout, make_pipeline, make_tile_pipeline
from .query_rows import load_accumulator_queries, map_accumulator_rows, sum_accumulators
from .small_m import consume_small_m, make_small_m_pipeline

ACCUMULATORS = gl.constexpr(4)  # of a program: two of each warp group
PRODUCER_REGISTERS = gl.constexpr(40)
CONSUMER_REGISTERS = gl.constexpr(232)


class QueryOperands(NamedTuple):
    """What documents meet: queries, each in so many `parts`, and what int8 numbers are scaled by."""

    Q: Any
    numbers: Any
    parts: Any
    d: Any


@gluon.jit
def _copy_tile(D, norms, ring, k, t0, stage, phase, Ld, C: gl.constexpr):
    """Copy the tile of document k that begins with token t0, the last shifted back to end where the document ends; and
    what its tokens are scaled by. Inverse norms lie tile by tile, scales of int8 tokens as these do."""
    full = ring.full.index(stage)
    mbarrier.wait(ring.empty.index(stage), phase)
    row = k * Ld + gl.minimum(t0, Ld - C.BN)
    if C.PRECOMPUTED_SCALES and C.ENCODING == "":
        mbarrier.expect(full, D.block_type.nbytes + norms.block_type.nbytes)
        at = row if D.dtype == gl.int8 else k * gl.cdiv(Ld, C.BN) * C.BN + t0
        async_load(norms, [at], full, ring.norms.inverse.index(stage))
    else:
        mbarrier.expect(full, D.block_type.nbytes)
    async_load(D, [row, 0], full, ring.tiles.index(stage))


@gluon.jit
def _produce(D, norms, ring, begin, end, K, Ld, C: gl.constexpr):
    """Copy the tiles of every document into the ring. With C.SMALL_M those of two by turns: the second one's lie
    behind."""
    stage = 0
    phase = 1
    for task in range(begin, end, 2 if C.SMALL_M else 1):
        for t0 in range(0, Ld, C.BN):
            _copy_tile(D, norms, ring, task % K, t0, stage, phase, Ld, C)
            if C.SMALL_M and task + 1 < end:
                _copy_tile(D, norms, ring, (task + 1) % K, t0, stage + C.STAGES, phase, Ld, C)
            stage, phase = advance_stage(stage, phase, C)


@gluon.jit
def _multiply(q, ring, stage, half):
    return warpgroup_mma(q, ring.tiles.index(stage).permute((1, 0)), half.S, use_acc=False, is_async=True)


@gluon.jit
def issue_products(q, ring, halves, stage, phase, turn, G: gl.constexpr, C: gl.constexpr):
    """Both halves' products with the tile at `stage`, in flight; and the inverse norms of its tokens, asked for before
    the other group is told, so that they arrive meanwhile."""
    wait_for_tile(ring, stage, phase, C)
    mbarrier.wait(ring.turn.index(G), turn)
    S_a = _multiply(q[0], ring, stage, halves[0])
    S_b = _multiply(q[1], ring, stage, halves[1])
    inverse = load_inverse_norms(ring, stage, phase, join_terms(halves[0].S, C), C)
    mbarrier.arrive(ring.turn.index(1 - G), count=1)
    return S_a, S_b, inverse


@gluon.jit
def _compiler_barrier_pair(S_b, a, C: gl.constexpr):
    """The other half's product once it is done, and half `a`, which is to be reduced before that is waited for."""
    if C.ARGMAX:
        S_b, best, where = warpgroup_mma_wait(0, [S_b, a.best, a.where])
    else:
        S_b, best = warpgroup_mma_wait(0, [S_b, a.best])
        where = a.where
    return S_b, Accumulator(a.S, best, where)


@gluon.jit
def _reduce_accumulators(products, ring, halves, t0, stage, phase, turn, Ld, C: gl.constexpr):
    """The halves after the tile in flight, that of token t0: one is reduced while the other's product still runs."""
    start = gl.minimum(t0, Ld - C.BN)
    S_a, S_b, inverse = products
    S = warpgroup_mma_wait(1, [S_a])
    a = accumulate_tile(S, inverse, halves[0], start, C)
    if C.NORMALIZE or C.ARGMAX or C.PRECOMPUTED_SCALES or ring.tiles.dtype == gl.int8:
        # A wait that has long been over ends a block of instructions: else ptxas waits for both products, then reduces.
        mbarrier.wait(ring.full.index(stage), phase)
        S, a = _compiler_barrier_pair(S_b, a, C)
    else:
        S = warpgroup_mma_wait(0, [S_b])
    mbarrier.arrive(ring.empty.index(stage), count=1)
    b = accumulate_tile(S, inverse, halves[1], start, C)
    stage, phase = advance_stage(stage, phase, C)
    return (compiler_barrier_accumulator(a, C), compiler_barrier_accumulator(b, C)), stage, phase, turn ^ 1


@gluon.jit
def _load_queries(Q, q_smem, first, parts, sizes, d, layout: gl.constexpr, G: gl.constexpr, C: gl.constexpr):
    """The two halves of a warp group's query rows, zeros where masked or absent, as operands of the product; and what
    their maxima are multiplied by, in a layout: inverse norms if normalising, scales of int8 terms, else 0. Last,
    whether such terms leave rows out."""
    ACC: gl.constexpr = make_accumulator_layout(C.BN, q_smem.dtype)
    inverse = 0, 0
    odd = 0
    if q_smem.dtype == gl.int8:
        inverse = (
            store_query_terms(Q, q_smem.index(2 * G), first, 0, parts, sizes, d, layout, C),
            store_query_terms(Q, q_smem.index(2 * G + 1), first, 1, parts, sizes, d, layout, C),
        )
        odd = gl.maximum(has_fallback_rows(inverse[0]), has_fallback_rows(inverse[1]))
    else:
        a = load_accumulator_queries(Q, first, 0, parts, sizes, d, C)
        b = load_accumulator_queries(Q, first, 1, parts, sizes, d, C)
        if C.ENCODING != "":
            a, over_a = convert_queries(a, layout, C)
            b, over_b = convert_queries(b, layout, C)
            inverse = over_a, over_b
        q_smem.index(2 * G).store(a)
        q_smem.index(2 * G + 1).store(b)
        if C.NORMALIZE:
            inverse = (
                gl.convert_layout(compute_row_inverse_norms(a), layout),
                gl.convert_layout(compute_row_inverse_norms(b), layout),
            )
    fence_async_shared()
    if C.OPERAND_IN_REGISTERS:
        q = (
            q_smem.index(2 * G).load(gl.DotOperandLayout(0, ACC, 32 // q_smem.dtype.primitive_bitwidth)),
            q_smem.index(2 * G + 1).load(gl.DotOperandLayout(0, ACC, 32 // q_smem.dtype.primitive_bitwidth)),
        )
    else:
        q = (q_smem.index(2 * G), q_smem.index(2 * G + 1))
    return q, inverse, odd


@gluon.jit
def _finish_rows(half, inverse, x, H: gl.constexpr, first, k, each, argmax, unresolved, sizes, C: gl.constexpr):
    """The weighted maxima of a half's rows; stores their winners, UNRESOLVED for a maximum that is NaN or -inf."""
    Q = x.Q
    i, s = map_accumulator_rows(first, H, x.parts, gl.SliceLayout(1, half.best.type.layout), C)
    ok = (i < sizes.Nq) & (s < sizes.Lq)
    keep = load_query_mask(Q, i, s, ok)
    best = gl.reduce(half.best, 1, nan_max)
    if C.ARGMAX:
        where, unresolved = select_argmax(half, best, keep, unresolved)
        out = argmax + (k.to(gl.int64) * sizes.Nq + i) * sizes.Lq + s
        gl.store(out, where.to(argmax.dtype.element_ty), mask=ok)
    if x.numbers is not None:
        best = dequantize_row_maxima(best, inverse, each[0], each[1], Q, x.numbers, first, H, x.parts, k, sizes, x.d, C)
    elif C.NORMALIZE or needs_power_scaling(Q.ptr.dtype.element_ty, C.ENCODING):
        best = best * inverse
    return gl.where(keep, load_query_weight(Q, i, s, keep) * best, 0.0), unresolved


@gluon.jit
def _store_scores(halves, inverse, x, first, k, each, out, unresolved, sizes, C: gl.constexpr):
    """Store the sums of a document's row maxima, [groups, K], and its winners."""
    GROUPS: gl.constexpr = 2 * C.MMA_ROWS // C.ROWS_PER_QUERY
    a, unresolved = _finish_rows(halves[0], inverse[0], x, 0, first, k, each, out.argmax, unresolved, sizes, C)
    b, unresolved = _finish_rows(halves[1], inverse[1], x, 1, first, k, each, out.argmax, unresolved, sizes, C)
    total = sum_accumulators(a, b, C)
    group = first + gl.arange(0, GROUPS, layout=total.type.layout)
    gl.store(out.scores + group.to(gl.int64) * sizes.K + k, total, mask=group < sizes.Nq * x.parts)
    return unresolved


@gluon.jit
def _consume(x, D, norms, ring, q_smem, out, begin, end, sizes, G: gl.constexpr, C: gl.constexpr):
    """Warp group G: its 128 rows of products of each row tile against the tile's documents."""
    ACC: gl.constexpr = make_accumulator_layout(C.BN, q_smem.dtype)
    stage = 0
    phase = 0
    turn = 1 - G
    S = gl.full([ACCUMULATOR_ROWS, C.BN], 0, gl.int32 if q_smem.dtype == gl.int8 else gl.float32, ACC)
    halves = (reset_accumulator(S, C), reset_accumulator(S, C))
    layout: gl.constexpr = gl.SliceLayout(1, halves[0].best.type.layout)
    unresolved = gl.full([C.MMA_ROWS], 0, gl.int32, layout)
    each = 0.0
    task = begin
    while task < end:
        row_tile = task // sizes.K
        last = gl.minimum((row_tile + 1) * sizes.K, end)
        first = (row_tile * 2 + G) * (2 * C.MMA_ROWS // C.ROWS_PER_QUERY)
        q, inverse, odd = _load_queries(x.Q, q_smem, first, x.parts, sizes, x.d, layout, G, C)
        begin_k = task % sizes.K
        end_k = begin_k + last - task
        for k in range(begin_k, end_k):
            if C.ARGMAX:
                for t0 in range(0, sizes.Ld, C.BN):
                    found = issue_products(q, ring, halves, stage, phase, turn, G, C)
                    halves, stage, phase, turn = _reduce_accumulators(
                        found, ring, halves, t0, stage, phase, turn, sizes.Ld, C
                    )
                unresolved = _store_scores(halves, inverse, x, first, k, (each, odd), out, unresolved, sizes, C)
                halves = reset_accumulators(halves, C)
            else:
                found = issue_products(q, ring, halves, stage, phase, turn, G, C)
                if k > begin_k:
                    _store_scores(halves, inverse, x, first, k - 1, (each, odd), out, unresolved, sizes, C)
                if x.numbers is not None:
                    each = load_document_scale(x.numbers, k, C)
                halves = reset_accumulators(halves, C)
                halves, stage, phase, turn = _reduce_accumulators(
                    found, ring, halves, 0, stage, phase, turn, sizes.Ld, C
                )
                for t0 in range(C.BN, sizes.Ld, C.BN):
                    found = issue_products(q, ring, halves, stage, phase, turn, G, C)
                    halves, stage, phase, turn = _reduce_accumulators(
                        found, ring, halves, t0, stage, phase, turn, sizes.Ld, C
                    )
        if not C.ARGMAX:
            _store_scores(halves, inverse, x, first, end_k - 1, (each, odd), out, unresolved, sizes, C)
        task = last
    if C.ARGMAX:
        mbarrier.arrive(ring.search.index(2), count=1)
        if gl.max(unresolved, axis=0) > 0:
            _resolve_argmax(x.Q, D, norms, ring, q_smem, out.argmax, begin, end, x.parts, sizes, x.d, G, C)


@gluon.jit
def _search_nan(q, D, norms, ring, k, phase, Ld, G: gl.constexpr, C: gl.constexpr):
    """The first document token whose similarity to each of 64 query rows is NaN, else NO_TOKEN."""
    ACC: gl.constexpr = make_accumulator_layout(C.BN, D.dtype)
    tile = ring.tiles.index(G)
    column = gl.arange(0, C.BN, layout=gl.SliceLayout(0, ACC))
    found = gl.full([ACCUMULATOR_ROWS], 0, gl.int32, gl.SliceLayout(1, ACC)) + NO_TOKEN
    row = k * Ld
    first = k * gl.cdiv(Ld, C.BN) * C.BN
    for t0 in range(0, Ld, C.BN):
        start = gl.minimum(t0, Ld - C.BN)
        mbarrier.expect(ring.search.index(G), D.block_type.nbytes)
        async_load(D, [row + start, 0], ring.search.index(G), tile)
        mbarrier.wait(ring.search.index(G), phase)
        phase ^= 1
        S = gl.full([ACCUMULATOR_ROWS, C.BN], 0.0, gl.float32, ACC)
        S = warpgroup_mma(q, tile.permute((1, 0)), S)
        if C.NORMALIZE:
            if C.PRECOMPUTED_SCALES:
                mbarrier.expect(ring.search.index(G), norms.block_type.nbytes)
                async_load(norms, [first + t0], ring.search.index(G), ring.norms.inverse.index(G))
                mbarrier.wait(ring.search.index(G), phase)
                phase ^= 1
            else:
                ring.norms.inverse.index(G).store(compute_tile_inverse_norms(tile, 4, C))
            S = scale_similarities(S, ring.norms.inverse.index(G).load(gl.SliceLayout(0, ACC)), C)
        token = gl.where(S != S, start + column[None, :], NO_TOKEN)
        found = gl.minimum(found, gl.min(token, axis=1))
    return found, phase


@gluon.jit
def _resolve_argmax(Q, D, norms, ring, q_smem, argmax, begin, end, parts, sizes, d, G: gl.constexpr, C: gl.constexpr):
    """Replace UNRESOLVED winners: the first NaN if the maximum is NaN, else (it is -inf) the first token."""
    ROW: gl.constexpr = gl.SliceLayout(1, make_accumulator_layout(C.BN, D.dtype))
    phase = 0
    mbarrier.wait(ring.search.index(2), 0)  # both warp groups have read their last tile: the ring is free
    for task in range(begin, end):
        k = task % sizes.K
        first = (task // sizes.K * 2 + G) * (2 * ACCUMULATOR_ROWS // C.ROWS_PER_QUERY)
        q, _, _ = _load_queries(Q, q_smem, first, parts, sizes, d, ROW, G, C)
        for H in gl.static_range(2):
            found, phase = _search_nan(q[H], D, norms, ring, k, phase, sizes.Ld, G, C)
            i, s = map_accumulator_rows(first, H, parts, ROW, C)
            out = argmax + (k.to(gl.int64) * sizes.Nq + i) * sizes.Lq + s
            ok = (i < sizes.Nq) & (s < sizes.Lq)
            ok = ok & (gl.load(out, mask=ok, other=0) == UNRESOLVED)
            found = gl.where(found == NO_TOKEN, 0, found)
            gl.store(out, found.to(argmax.dtype.element_ty), mask=ok)


@gluon.jit(do_not_specialize=["parts"])
def maxsim_forward_specialized(Q, D, norms, numbers, out, sizes, d, parts, C: gl.constexpr):
    """Sums ``[groups, K]`` of each group of query rows over documents without mask, and winners: `out`, an
    `OutputArgs`.

    A group is a query, or the next tokens of one that is longer (its `parts`), C.ROWS_PER_QUERY of them. D is a tensor
    descriptor of all document tokens as rows, in blocks [BN, BD]; with C.PRECOMPUTED_SCALES, `norms` is one of what
    `maxsim_tile_norms` leaves, or of the scales of int8 tokens. `numbers`: the `Numbers` of int8, FP8 or split fp32
    documents, or None.
    """
    row_tiles = gl.cdiv(sizes.Nq * parts * C.ROWS_PER_QUERY, ACCUMULATORS * C.MMA_ROWS)
    pairs = row_tiles.to(gl.int64) * sizes.K  # shared evenly by the programs, row tiles first
    begin = (pairs * gl.program_id(0) // gl.num_programs(0)).to(gl.int32)
    end = (pairs * (gl.program_id(0) + 1) // gl.num_programs(0)).to(gl.int32)
    x = QueryOperands(Q, numbers, parts, d)
    if C.SMALL_M:
        ring, q_smem = make_small_m_pipeline(D, norms, C)
    else:
        ring, q_smem = make_pipeline(D, C, norms)
    if C.SMALL_M:
        gl.warp_specialize(
            [
                (consume_small_m, (x, ring, q_smem, out, begin, end, sizes, 0, C)),
                (consume_small_m, (x, ring, q_smem, out, begin, end, sizes, 1, C)),
                (_produce, (D, norms, ring, begin, end, sizes.K, sizes.Ld, C)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    elif C.ENCODING != "":
        RAW: gl.constexpr = D.layout
        raw = make_tile_pipeline(D, RAW, C.STAGES, 1, C)  # of bytes, which one partition reads
        x = QueryOperands(Q, None, parts, d)  # warps that convert read the scales
        gl.warp_specialize(
            [
                (_consume, (x, D, norms, ring, q_smem, out, begin, end, sizes, 0, C)),
                (_consume, (x, D, norms, ring, q_smem, out, begin, end, sizes, 1, C)),
                (_produce, (D, norms, raw, begin, end, sizes.K, sizes.Ld, C)),
                (convert_tiles, (raw, ring, numbers, begin, end, sizes.K, sizes.Ld, C)),
            ],
            [4, 1, CONVERTER_WARPS],
            [NORM_CONSUMER_REGISTERS, NORM_PRODUCER_REGISTERS, NORM_REGISTERS],
        )
    elif C.NORMALIZE and not C.PRECOMPUTED_SCALES:
        gl.warp_specialize(
            [
                (_consume, (x, D, norms, ring, q_smem, out, begin, end, sizes, 0, C)),
                (_consume, (x, D, norms, ring, q_smem, out, begin, end, sizes, 1, C)),
                (_produce, (D, norms, ring, begin, end, sizes.K, sizes.Ld, C)),
                (produce_norms, (ring, begin, end, sizes.Ld, C)),
            ],
            [4, 1, NORM_WARPS],
            [NORM_CONSUMER_REGISTERS, NORM_PRODUCER_REGISTERS, NORM_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (x, D, norms, ring, q_smem, out, begin, end, sizes, 0, C)),
                (_consume, (x, D, norms, ring, q_smem, out, begin, end, sizes, 1, C)),
                (_produce, (D, norms, ring, begin, end, sizes.K, sizes.Ld, C)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
