"""The forward of sm_90 for packed query rows and documents of any length: the maximum of every row in each document.

As `forward_specialized`, but a document ends where its length or its mask says, and the rows of all queries follow each
other with nothing between them: what is stored are their maxima, which `row_sums` adds up. With C.SUM_ROWS, for dense
queries that fill their slots, rows lie as they do there, and the scores themselves are stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common.arguments import SizeArgs
from ...common.primitives import NO_TOKEN, load_query_mask, load_query_weight, locate_rows, nan_max
from .accumulators import (
    UNRESOLVED,
    Accumulator,
    compiler_barrier_accumulator,
    reduce_tile,
    reset_accumulator,
    reset_accumulators,
    select_argmax,
)
from .dense import ACCUMULATORS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, issue_products
from .gluon_names import async_load
from .masks import find_kept_columns, overwrite_masked_tokens
from .pipeline import ACCUMULATOR_ROWS, TilePipeline, advance_stage, make_pipeline
from .query_rows import map_accumulator_rows, sum_accumulators
from .schedule import (
    DocumentSegments,
    compiler_barrier_value,
    estimate_costs,
    get_segment_length,
    list_block_documents,
    load_segment_bounds,
    locate_segment,
    partition_pairs,
)


@gluon.jit
def _choose_tile_start(t0, length, C: gl.constexpr):
    """The first token of the tile for those from t0 on: the last tile is shifted back to end where the document ends,
    which repeats tokens, so that all of it counts."""
    return gl.minimum(t0, gl.maximum(length - C.BN, 0))


@gluon.jit
def _produce(D, ring, spans, begin, end, K, Td, C: gl.constexpr):
    """Copy the tiles of every document into the ring, one at least; that of a short one reads on into what follows."""
    stage = 0
    phase = 1
    bounds = load_segment_bounds(spans, begin % K, K)
    for task in range(begin, end):
        k = task % K
        row, length = locate_segment(spans, bounds, k, K, Td)
        bounds = load_segment_bounds(spans, (task + 1) % K, K)
        for t0 in range(0, gl.maximum(compiler_barrier_value(length), 1), C.BN):
            full = ring.full.index(stage)
            mbarrier.wait(ring.empty.index(stage), phase)
            mbarrier.expect(full, D.block_type.nbytes)
            async_load(D, [row + _choose_tile_start(t0, length, C), 0], full, ring.tiles.index(stage))
            stage, phase = advance_stage(stage, phase, C)


@gluon.jit
def _reduce_masked_tile(S, half, t0, rest, spans, C: gl.constexpr):
    """`half` after a tile, of which the first `rest` tokens count, or all, as where it is patched: its best, and
    where."""
    if spans.patches is not None or rest >= C.BN:
        best, where = reduce_tile(S, half.best, half.where, t0, C)
    else:
        counts = gl.arange(0, C.BN, layout=gl.SliceLayout(0, S.type.layout)) < compiler_barrier_value(rest)
        best, where = reduce_tile(gl.where(counts[None, :], S, float("-inf")), half.best, half.where, t0, C)
    return Accumulator(S, best, where)


@gluon.jit
def _reduce_accumulators(S_a, S_b, ring, halves, t0, origin, length, stage, phase, turn, spans, C: gl.constexpr):
    """The halves after the tile in flight, that of token t0 behind `origin`: one is reduced while the other's product
    still runs."""
    t0 = _choose_tile_start(t0, length, C)
    rest = length - t0
    t0 += origin
    a = _reduce_masked_tile(warpgroup_mma_wait(1, [S_a]), halves[0], t0, rest, spans, C)
    S = warpgroup_mma_wait(0, [S_b])
    mbarrier.arrive(ring.empty.index(stage), count=1)
    b = _reduce_masked_tile(S, halves[1], t0, rest, spans, C)
    stage, phase = advance_stage(stage, phase, C)
    return (compiler_barrier_accumulator(a, C), compiler_barrier_accumulator(b, C)), stage, phase, turn ^ 1


@gluon.jit
def _locate_first_row(row_tile, G: gl.constexpr, C: gl.constexpr):
    """The first row of warp group G in a row tile, or its first query with C.SUM_ROWS."""
    return (row_tile * 2 + G) * (2 * ACCUMULATOR_ROWS // C.ROWS_PER_QUERY if C.SUM_ROWS else 2 * ACCUMULATOR_ROWS)


@gluon.jit
def _locate_rows(first, H: gl.constexpr, sizes, layout: gl.constexpr, C: gl.constexpr):
    """Query and token of the 64 rows of half H, their number, and whether there are such."""
    if C.SUM_ROWS:
        i, s = map_accumulator_rows(first, H, 1, layout, C)
        row = i * sizes.Lq + s
        ok = (i < sizes.Nq) & (s < sizes.Lq)
    else:
        row = first + H * ACCUMULATOR_ROWS + gl.arange(0, ACCUMULATOR_ROWS, layout=layout)
        i = row // sizes.Lq
        s = row % sizes.Lq
        ok = row < sizes.Nq * sizes.Lq
    return i, s, row, ok


@gluon.jit
def _load_rows(Q, q_smem, first, sizes, d, G: gl.constexpr, C: gl.constexpr):
    """The two halves of a warp group's query rows, zeros where masked or absent, as operands of the product."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    columns = gl.arange(0, C.BD, layout=gl.SliceLayout(0, LAYOUT))
    for H in gl.static_range(2):
        i, s, _, ok = _locate_rows(first, H, sizes, gl.SliceLayout(1, LAYOUT), C)
        ok = load_query_mask(Q, i, s, ok)
        pointers = locate_rows(Q, i, s)[:, None] + (columns * Q.stride_d)[None, :]
        q_smem.index(2 * G + H).store(gl.load(pointers, mask=ok[:, None] & (columns < d)[None, :], other=0.0))
    fence_async_shared()
    return (
        q_smem.index(2 * G).load(gl.DotOperandLayout(0, ACC, 2)),
        q_smem.index(2 * G + 1).load(gl.DotOperandLayout(0, ACC, 2)),
    )


@gluon.jit
def _weight_maxima(best, Q, i, s, ok):
    """What maxima of rows add to the scores of their queries."""
    keep = load_query_mask(Q, i, s, ok)
    return gl.where(keep, load_query_weight(Q, i, s, keep) * best, 0.0)


@gluon.jit
def _store_accumulator(half, Q, first, H: gl.constexpr, k, length, found, unresolved, sizes, C: gl.constexpr):
    """A half's winners in document k, [K, rows], UNRESOLVED where one is NaN or -inf; and its maxima, but with
    C.SUM_ROWS, where what they add to the scores is returned."""
    i, s, row, ok = _locate_rows(first, H, sizes, gl.SliceLayout(1, half.best.type.layout), C)
    at = k.to(gl.int64) * (sizes.Nq * sizes.Lq) + row
    best = gl.reduce(half.best, 1, nan_max)
    terms = best
    if C.SUM_ROWS:
        terms = _weight_maxima(best, Q, i, s, ok)
    else:
        gl.store(found.maxima + at, best, mask=ok)
    if C.ARGMAX:
        keep = load_query_mask(Q, i, s, ok) & (length > 0)
        where, unresolved = select_argmax(half, best, keep, unresolved)
        gl.store(found.argmax + at, where.to(found.argmax.dtype.element_ty), mask=ok)
    return terms, unresolved


@gluon.jit
def _load_row_mask(Q, first, H: gl.constexpr, sizes, layout: gl.constexpr, C: gl.constexpr):
    i, s, _, ok = _locate_rows(first, H, sizes, layout, C)
    return load_query_mask(Q, i, s, ok).to(gl.float32)


@gluon.jit
def _store_scores(a, b, Q, first, k, length, found, sizes, C: gl.constexpr):
    """Store the scores of document k: the sums of what the halves' rows add; of no tokens -inf, or 0 of queries that
    have none; NaN of no document."""
    total = sum_accumulators(a, b, C)
    if length <= 0:
        LAYOUT: gl.constexpr = a.type.layout
        rows = sum_accumulators(
            _load_row_mask(Q, first, 0, sizes, LAYOUT, C), _load_row_mask(Q, first, 1, sizes, LAYOUT, C), C
        )
        total = gl.where(rows > 0, float("-inf"), 0.0)
        total = gl.where(length < 0, float("nan"), total)
    i = first + gl.arange(0, 2 * ACCUMULATOR_ROWS // C.ROWS_PER_QUERY, layout=total.type.layout)
    gl.store(found.scores + i.to(gl.int64) * found.stride + k, total, mask=i < sizes.Nq)


@gluon.jit
def _store_document(halves, Q, first, k, length, found, unresolved, sizes, C: gl.constexpr):
    """Store what is known once document k has ended."""
    a, unresolved = _store_accumulator(halves[0], Q, first, 0, k, length, found, unresolved, sizes, C)
    b, unresolved = _store_accumulator(halves[1], Q, first, 1, k, length, found, unresolved, sizes, C)
    if C.SUM_ROWS:
        _store_scores(a, b, Q, first, k, length, found, sizes, C)
    return unresolved


@gluon.jit
def _consume(Q, D, ring, q_smem, spans, found, begin, end, sizes, Td, d, G: gl.constexpr, C: gl.constexpr):
    """Warp group G: its 128 rows of each row tile against the tile's documents."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    ARGMAX_BEHIND: gl.constexpr = C.ARGMAX and spans.patches is not None  # documents begin later than tokens count
    stage = 0
    phase = 0
    turn = 1 - G
    S = gl.full([ACCUMULATOR_ROWS, C.BN], 0.0, gl.float32, ACC)
    halves = (reset_accumulator(S, C), reset_accumulator(S, C))
    unresolved = gl.full([ACCUMULATOR_ROWS], 0, gl.int32, gl.SliceLayout(1, halves[0].best.type.layout))
    task = begin
    while task < end:
        row_tile = task // sizes.K
        last = gl.minimum((row_tile + 1) * sizes.K, end)
        first = _locate_first_row(row_tile, G, C)
        q = _load_rows(Q, q_smem, first, sizes, d, G, C)
        begin_k = task % sizes.K
        end_k = begin_k + last - task
        bounds = load_segment_bounds(spans, begin_k, sizes.K)
        length = get_segment_length(spans, bounds, begin_k, sizes.K, Td)
        origin = 0
        if ARGMAX_BEHIND:
            origin = bounds[0]
        bounds = load_segment_bounds(spans, begin_k + 1, sizes.K)
        before = begin_k  # of no document yet; not `length`, or Triton takes it for what never changes
        for k in range(begin_k, end_k):
            S_a, S_b, _ = issue_products(q, ring, halves, stage, phase, turn, G, C)
            if not C.ARGMAX:
                if k > begin_k:
                    unresolved = _store_document(halves, Q, first, k - 1, before, found, unresolved, sizes, C)
                halves = reset_accumulators(halves, C)
            # Where the next document lies was asked for a document before, and is worked out under products.
            after = get_segment_length(spans, bounds, k + 1, sizes.K, Td)
            source = bounds[0]
            bounds = load_segment_bounds(spans, k + 2, sizes.K)
            halves, stage, phase, turn = _reduce_accumulators(
                S_a, S_b, ring, halves, 0, origin, length, stage, phase, turn, spans, C
            )
            for t0 in range(C.BN, compiler_barrier_value(length), C.BN):
                S_a, S_b, _ = issue_products(q, ring, halves, stage, phase, turn, G, C)
                halves, stage, phase, turn = _reduce_accumulators(
                    S_a, S_b, ring, halves, t0, origin, length, stage, phase, turn, spans, C
                )
            if C.ARGMAX:
                unresolved = _store_document(halves, Q, first, k, length, found, unresolved, sizes, C)
                halves = reset_accumulators(halves, C)
            before = length
            length = after
            if ARGMAX_BEHIND:
                origin = source
        if not C.ARGMAX:
            unresolved = _store_document(halves, Q, first, end_k - 1, before, found, unresolved, sizes, C)
            halves = reset_accumulators(halves, C)
        task = last
    if C.ARGMAX:
        mbarrier.arrive(ring.search.index(2), count=1)
        # In a layout that each warp reduces alone: between warps a register is read that is not always set, so that it
        # is kept through all loops.
        unresolved = gl.convert_layout(unresolved, gl.BlockedLayout([2], [32], [4], [0]))
        if gl.max(unresolved, axis=0) > 0:
            _resolve_argmax(Q, D, ring, q_smem, spans, found, begin, end, sizes, Td, d, G, C)


@gluon.jit
def _search_argmax(q, D, ring, spans, k, row, length, phase, G: gl.constexpr, C: gl.constexpr):
    """The first tokens that count and attain the maxima of 64 query rows in a document; NaN is the largest."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    tile = ring.tiles.index(G)
    barrier = ring.search.index(G)
    column = gl.arange(0, C.BN, layout=gl.SliceLayout(0, ACC))
    best = gl.full([ACCUMULATOR_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, ACC))
    where = gl.full([ACCUMULATOR_ROWS], 0, gl.int32, gl.SliceLayout(1, ACC)) + NO_TOKEN
    for t0 in range(0, length, C.BN):
        start = _choose_tile_start(t0, length, C)
        mbarrier.expect(barrier, D.block_type.nbytes)
        async_load(D, [row + start, 0], barrier, tile)
        mbarrier.wait(barrier, phase)
        phase ^= 1
        S = warpgroup_mma(q, tile.permute((1, 0)), gl.full([ACCUMULATOR_ROWS, C.BN], 0.0, gl.float32, ACC))
        if spans.patches is not None:
            counts = find_kept_columns(spans, k, t0 // C.BN, column)[None, :]
        else:
            counts = (column < length - start)[None, :]
        S = gl.where(counts, S, float("-inf"))
        m = gl.reduce(S, 1, nan_max)
        hit = counts & ((S == m[:, None]) | (S != S))
        first = gl.min(gl.where(hit, start + column[None, :], NO_TOKEN), axis=1)
        # A tile of which no token counts has no first; what is only -inf still has one.
        better = (m > best) | ((m != m) & (best == best)) | (where == NO_TOKEN)
        where = gl.where(better, first, where)
        best = nan_max(best, m)
    return where, phase


@gluon.jit
def _find_unresolved(first, H: gl.constexpr, k, found, sizes, layout: gl.constexpr, C: gl.constexpr):
    """Where winners of a half's rows are, and which of them are UNRESOLVED."""
    _, _, row, ok = _locate_rows(first, H, sizes, layout, C)
    at = found.argmax + k.to(gl.int64) * (sizes.Nq * sizes.Lq) + row
    return at, ok & (gl.load(at, mask=ok, other=0) == UNRESOLVED)


@gluon.jit
def _resolve_argmax(Q, D, ring, q_smem, spans, found, begin, end, sizes, Td, d, G: gl.constexpr, C: gl.constexpr):
    """Replace winners that are UNRESOLVED."""
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16]))
    phase = 0
    mbarrier.wait(ring.search.index(2), 0)  # both warp groups have read their last tile: the ring is free
    for task in range(begin, end):
        k = task % sizes.K
        first = _locate_first_row(task // sizes.K, G, C)
        bounds = load_segment_bounds(spans, k, sizes.K)
        row, length = locate_segment(spans, bounds, k, sizes.K, Td)
        origin = 0 if spans.patches is None else bounds[0]
        _, in_a = _find_unresolved(first, 0, k, found, sizes, ROW, C)
        _, in_b = _find_unresolved(first, 1, k, found, sizes, ROW, C)
        if gl.max((in_a | in_b).to(gl.int32), axis=0) > 0:
            q = _load_rows(Q, q_smem, first, sizes, d, G, C)
            for H in gl.static_range(2):
                where, phase = _search_argmax(q[H], D, ring, spans, k, row, length, phase, G, C)
                at, unresolved = _find_unresolved(first, H, k, found, sizes, ROW, C)
                gl.store(at, (where + origin).to(found.argmax.dtype.element_ty), mask=unresolved)


@gluon.jit(do_not_specialize=["Nq", "K", "Lq", "Td", "tiles"])
def maxsim_row_maxima(Q, D, segments, patches, tiles, found, Nq, K, Lq, Td, d, C: gl.constexpr):
    """Maxima ``[K, Nq * Lq]`` of the query rows over the tokens of each document that count, anything where none does;
    or with C.SUM_ROWS scores ``[Nq, stride]``.

    `found`: the `Found`; winners are -1 where no token counts and of masked rows. D is a tensor descriptor of all Td
    document tokens as rows, in blocks [BN, BD]; `patches`, of `tiles` tiles, are None without a mask of them. Programs
    share the (row tile, document) pairs, row tiles first.
    """
    sizes = SizeArgs(Nq, K, Lq, 0)
    spans = DocumentSegments(segments, patches, tiles)
    row_tiles = gl.cdiv(Nq * (C.ROWS_PER_QUERY if C.SUM_ROWS else Lq), ACCUMULATORS * C.MMA_ROWS)
    k = list_block_documents(0)
    bounds = load_segment_bounds(spans, k, K)
    ring, q_smem = make_pipeline(D, C)  # while these are on their way
    begin, end = partition_pairs(spans, estimate_costs(spans, bounds, k, K, C), row_tiles, K, C)
    if patches is None:
        gl.warp_specialize(
            [
                (_consume, (Q, D, ring, q_smem, spans, found, begin, end, sizes, Td, d, 0, C)),
                (_consume, (Q, D, ring, q_smem, spans, found, begin, end, sizes, Td, d, 1, C)),
                (_produce, (D, ring, spans, begin, end, K, Td, C)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        ready = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
        STAGES: gl.constexpr = C.STAGES
        for n in gl.static_range(STAGES):
            mbarrier.init(ready.index(n), count=2)
        patched = TilePipeline(ring.tiles, ready, ring.empty, ring.turn, ring.search, ring.norms)
        gl.warp_specialize(
            [
                (_consume, (Q, D, patched, q_smem, spans, found, begin, end, sizes, Td, d, 0, C)),
                (_consume, (Q, D, patched, q_smem, spans, found, begin, end, sizes, Td, d, 1, C)),
                (_produce, (D, ring, spans, begin, end, K, Td, C)),
                (overwrite_masked_tokens, (spans, ring, ready, begin, end, K, d, 0, C)),
                (overwrite_masked_tokens, (spans, ring, ready, begin, end, K, d, 1, C)),
            ],
            [4, 1, 1, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
