"""sm_90 forward kernel for packed query rows, documents of any length, and document masks (`d <= 128`, half dtypes).

Math, with an argmax over t if asked for, for every query row r and document k:

```text
maxima[k, r] = max over the kept tokens t of document k of <Q[r], D[k, t]>
```

A second kernel, `maxsim_row_sums`, sums the weighted maxima of each query. With C.SUM_ROWS this kernel does so itself
and stores scores. That needs dense queries, whose rows are then arranged as in `dense.py`.

Like `dense.py`, the kernel is persistent and warp-specialized. A producer warp fills a pipeline of shared-memory stages
with TMA, and two consumer warp groups use the tensor cores in ping-pong. Three things differ. A document ends at its
own length. With a mask it extends from the first to the last kept token. Programs own ranges of (row tile, document)
pairs of nearly equal cost (`schedule.py`). The epilogue of a document stores row maxima instead of sums.

Main loop, with `tile` for the document tile of a pipeline stage:

```text
producer warp:
    for each pair (row tile, k) of the program, for t0 in range(0, max(length[k], 1), BN):
        wait(empty[stage])
        t = row[k] + min(t0, max(length[k] - BN, 0))        # the last tile shifts back
        tile = TMA(D[t : t + BN])                           # arrives at full[stage]
mask warps, with a mask:
    for each tile: wait(full[stage]); overwrite masked tokens of the tile; arrive(ready[stage])
consumer warp group g:
    for each row tile of the program:
        q0, q1 = query rows                                 # 2 x [64, BD], in registers
        for each document k of the row tile:
            for t0 in range(0, max(length[k], 1), BN):
                wait(full[stage] or ready[stage]); wait(turn[g])
                S0 = wgmma(q0, tile.T); S1 = wgmma(q1, tile.T)    # 2 x [64, BN], asynchronous
                arrive(turn[1 - g])
                if t0 == 0: epilogue of document k - 1 (if any), best0 = best1 = -inf
                wait(S0); best0 = max(best0, lane_max(S0))  # S1 is still running
                wait(S1); arrive(empty[stage])
                best1 = max(best1, lane_max(S1))
        epilogue of the last document
```

With C.ARGMAX the epilogue runs at the end of its own document. Afterwards `_resolve_argmax` searches for the argmax of
rows whose maximum is NaN or -inf.

Warp roles:

```text
role            warps  present        work
consumers 0, 1  4 + 4  always         products, maxima, epilogue
producer        1      always         TMA copies
mask warps      1 + 1  with a mask    overwrite masked tokens, 32 of each tile per warp
```

Barriers:

```text
barrier       count  arriving                              waiting
full[stage]   1      TMA, with the bytes of the copy       consumers, or the mask warps if there are any
ready[stage]  2      each mask warp                        consumers
empty[stage]  2      each consumer, after both products    producer
turn[g]       1      consumer 1 - g, products issued       consumer g, before issuing products
search[g]     1      TMA, argmax search only               consumer g
search[2]     2      each consumer, after its last tile    both consumers, before the argmax search
```

Invariants:

- Every document has at least one tile, even an empty or invalid one. All roles therefore visit the same tiles.
- The tile of a document shorter than BN reads on into the rows that follow. These columns are set to -inf, or are
  overwritten if there is a mask.
- The maxima of a document without a kept token are arbitrary. `maxsim_row_sums` does not use them.
- A length is -1 for a document that is not inside D. Its scores are NaN, and nothing outside D is read.
- Accumulators and bits are as in `dense.py`.
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
    """Return the first token of the tile that covers the tokens from t0 on.

    The last tile shifts back to the end of the document. It repeats tokens, so that all of its columns are valid.
    """
    return gl.minimum(t0, gl.maximum(length - C.BN, 0))


@gluon.jit
def _produce(D, ring, spans, begin, end, K, Td, C: gl.constexpr):
    """Fill the pipeline with the tiles of all documents of the program, at least one tile per document (producer warp).

    The tile of a document shorter than BN reads on into the rows that follow.
    """
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
    """Return the accumulator after a tile, of which the first `rest` tokens belong to the document.

    With mask patches all columns are valid, because the mask warps overwrote the other tokens.
    """
    if spans.patches is not None or rest >= C.BN:
        best, where = reduce_tile(S, half.best, half.where, t0, C)
    else:
        counts = gl.arange(0, C.BN, layout=gl.SliceLayout(0, S.type.layout)) < compiler_barrier_value(rest)
        best, where = reduce_tile(gl.where(counts[None, :], S, float("-inf")), half.best, half.where, t0, C)
    return Accumulator(S, best, where)


@gluon.jit
def _reduce_accumulators(S_a, S_b, ring, halves, t0, origin, length, stage, phase, turn, spans, C: gl.constexpr):
    """Reduce the two products in flight, whose tile begins at token t0, and release the stage.

    The first accumulator is reduced while the second product still runs. Argmax values are relative to the dense
    document, whose token `origin` is the first token of the segment.
    """
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
    """Return the first row of warp group G in a row tile, or its first query with C.SUM_ROWS."""
    return (row_tile * 2 + G) * (2 * ACCUMULATOR_ROWS // C.ROWS_PER_QUERY if C.SUM_ROWS else 2 * ACCUMULATOR_ROWS)


@gluon.jit
def _locate_rows(first, H: gl.constexpr, sizes, layout: gl.constexpr, C: gl.constexpr):
    """Return the query, the token, the row number and the validity of accumulator H's 64 rows."""
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
    """Load the query rows of warp group G as register operands, zeros for masked and absent rows."""
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
    """Return row maxima times query weights, 0 for rows that are masked or absent."""
    keep = load_query_mask(Q, i, s, ok)
    return gl.where(keep, load_query_weight(Q, i, s, keep) * best, 0.0)


@gluon.jit
def _store_accumulator(half, Q, first, H: gl.constexpr, k, length, found, unresolved, sizes, C: gl.constexpr):
    """Store an accumulator's argmax in document k, `[K, rows]`, and its row maxima unless C.SUM_ROWS.

    The argmax is UNRESOLVED if the maximum is NaN or -inf.

    Returns:
        The row maxima, weighted with C.SUM_ROWS, and the updated flags of unresolved rows.
    """
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
    """Return 1.0 for the rows of accumulator H that exist and are not masked, else 0.0."""
    i, s, _, ok = _locate_rows(first, H, sizes, layout, C)
    return load_query_mask(Q, i, s, ok).to(gl.float32)


@gluon.jit
def _store_scores(a, b, Q, first, k, length, found, sizes, C: gl.constexpr):
    """Store the scores of document k from the weighted row maxima of both accumulators.

    A document without tokens scores -inf, or 0 for a query without tokens. A document that is not inside D scores NaN.
    """
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
    """Store the results of document k after its last tile (epilogue)."""
    a, unresolved = _store_accumulator(halves[0], Q, first, 0, k, length, found, unresolved, sizes, C)
    b, unresolved = _store_accumulator(halves[1], Q, first, 1, k, length, found, unresolved, sizes, C)
    if C.SUM_ROWS:
        _store_scores(a, b, Q, first, k, length, found, sizes, C)
    return unresolved


@gluon.jit
def _consume(Q, D, ring, q_smem, spans, found, begin, end, sizes, Td, d, G: gl.constexpr, C: gl.constexpr):
    """Compute the maxima of warp group G's 128 rows in each row tile over the documents of the tile (consumer)."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    ARGMAX_BEHIND: gl.constexpr = C.ARGMAX and spans.patches is not None  # it begins at its first kept token
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
        # The length of the previous document, unused at first. Triton would treat `length` as a loop invariant.
        before = begin_k
        for k in range(begin_k, end_k):
            S_a, S_b, _ = issue_products(q, ring, halves, stage, phase, turn, G, C)
            if not C.ARGMAX:
                if k > begin_k:
                    unresolved = _store_document(halves, Q, first, k - 1, before, found, unresolved, sizes, C)
                halves = reset_accumulators(halves, C)
            # Bounds of the next document were loaded one document ahead. This arithmetic overlaps the products.
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
        # Each warp reduces alone. A reduction across warps would keep a register allocated through all loops.
        unresolved = gl.convert_layout(unresolved, gl.BlockedLayout([2], [32], [4], [0]))
        if gl.max(unresolved, axis=0) > 0:
            _resolve_argmax(Q, D, ring, q_smem, spans, found, begin, end, sizes, Td, d, G, C)


@gluon.jit
def _search_argmax(q, D, ring, spans, k, row, length, phase, G: gl.constexpr, C: gl.constexpr):
    """Return, for each of 64 query rows, the first kept token that attains the maximum over document k.

    NaN is larger than all numbers.
    """
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
        # A tile without a kept token has no first token. A row of -inf still has one.
        better = (m > best) | ((m != m) & (best == best)) | (where == NO_TOKEN)
        where = gl.where(better, first, where)
        best = nan_max(best, m)
    return where, phase


@gluon.jit
def _find_unresolved(first, H: gl.constexpr, k, found, sizes, layout: gl.constexpr, C: gl.constexpr):
    """Return the argmax pointers of accumulator H's rows, and which of these rows are UNRESOLVED."""
    _, _, row, ok = _locate_rows(first, H, sizes, layout, C)
    at = found.argmax + k.to(gl.int64) * (sizes.Nq * sizes.Lq) + row
    return at, ok & (gl.load(at, mask=ok, other=0) == UNRESOLVED)


@gluon.jit
def _resolve_argmax(Q, D, ring, q_smem, spans, found, begin, end, sizes, Td, d, G: gl.constexpr, C: gl.constexpr):
    """Replace each UNRESOLVED argmax of warp group G's rows."""
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16]))
    phase = 0
    mbarrier.wait(ring.search.index(2), 0)  # both warp groups have read their last tile, all stages are free
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
    """Store the maxima `[K, Nq * Lq]` of query rows over the kept tokens of documents, or scores with C.SUM_ROWS.

    A maximum is arbitrary if the document keeps no token. The argmax is -1 for such documents and for masked rows.

    Args:
        Q: `QueryArgs` of the query rows, Nq times Lq.
        D: Tensor descriptor of all document tokens `[Td, d]`, in blocks `[BN, BD]`.
        segments: `SegmentArgs` of the documents.
        patches: `MaskPatchArgs`, or None without a document mask.
        tiles: Tiles per document in `patches`, else None.
        found: `RowMaximaOutputArgs`.
        Nq: Number of queries.
        K: Number of documents.
        Lq: Rows of each query.
        Td: Total number of document tokens.
        d: Number of features.
        C: `Sm90Config`.
    """
    sizes = SizeArgs(Nq, K, Lq, 0)
    spans = DocumentSegments(segments, patches, tiles)
    row_tiles = gl.cdiv(Nq * (C.ROWS_PER_QUERY if C.SUM_ROWS else Lq), ACCUMULATORS * C.MMA_ROWS)
    k = list_block_documents(0)
    bounds = load_segment_bounds(spans, k, K)
    ring, q_smem = make_pipeline(D, C)  # overlaps the load of the bounds
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
