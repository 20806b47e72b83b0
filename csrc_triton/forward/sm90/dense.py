"""sm_90 forward kernel for dense documents without a mask (`d <= 128`): many query rows, or few with C.SMALL_M.

This file has the main loop for many query rows. With C.SMALL_M, `maxsim_forward_specialized` runs `consume_small_m` of
`small_m.py` instead of `_consume`, and `small_m.py` describes its loop, warp roles, and barriers.

Math, with an argmax over t if asked for:

```text
score[i, k] = sum_s weight[i, s] * inverse_norm(Q[i, s]) * max_t <Q[i, s], D[k, t]> * inverse_norm(D[k, t])
```

The inverse norms are 1 unless C.NORMALIZE. int8 and FP8 documents have dequantization scales instead (`int8_terms.py`,
`convert.py`). A query of more than C.ROWS_PER_QUERY tokens is cut into `parts`, whose sums a second launch adds.

The kernel is persistent. At most one program (CTA) runs on each SM, and it owns a contiguous range of the (row tile,
document) pairs, ordered by row tile. A row tile has four accumulators of 64 rows, two for each consumer warp group.

The kernel is also warp-specialized. A producer warp copies document tiles with TMA (the tensor memory accelerator) into
a pipeline. A pipeline stage is room for one tile in shared memory, with two barriers. Two consumer warp groups multiply
each tile by their query rows on the tensor cores (WGMMA) and keep running maxima. The epilogue of a document merges
these maxima for each row, applies norms and weights, and stores the sum of each query.

Main loop, with `tile` for the document tile of a stage:

```text
producer warp:
    for each pair (row tile, k) of the program, for t0 in range(0, Ld, BN):
        wait(empty[stage])
        t = min(t0, Ld - BN)                                # the last tile shifts back
        tile = TMA(D[k, t : t + BN])                        # arrives at full[stage]
consumer warp group g:
    for each row tile of the program:
        q0, q1 = query rows                                 # 2 x [64, BD], in registers or shared memory
        for each document k of the row tile:
            for t0 in range(0, Ld, BN):
                wait(full[stage]); wait(turn[g])
                S0 = wgmma(q0, tile.T)                      # [64, BN], asynchronous
                S1 = wgmma(q1, tile.T)                      # [64, BN], asynchronous
                arrive(turn[1 - g])
                if t0 == 0: epilogue of document k - 1 (if any), best0 = best1 = -inf
                wait(S0); best0 = max(best0, lane_max(S0))  # S1 is still running
                wait(S1); arrive(empty[stage])
                best1 = max(best1, lane_max(S1))
        epilogue of the last document
```

Names in the code:

```text
pseudo-code                      code
producer loop, TMA               `_produce`, `_copy_tile`
consumer loop                    `_consume`
q0, q1                           `_load_queries`, which returns `q[0]` and `q[1]`
both waits, S0, S1, the arrive   `issue_products`, whose products are `S_a` and `S_b`
lane_max, best0, best1           `_reduce_accumulators`; the maxima are `halves[0].best` and `halves[1].best`
epilogue                         `_store_scores`, with `_finish_rows` for each accumulator
```

`lane_max` reduces within a thread. A row is spread over 4 lanes, which exchange values in the epilogue only. With
C.ARGMAX the epilogue runs at the end of its own document. A row whose maximum is NaN or -inf then has no argmax yet,
and `_resolve_argmax` searches for it after the last pair.

Warp roles:

```text
role              warps  present                               work
consumers 0, 1    4 + 4  always                                products, maxima, epilogue
producer          1      always                                TMA copies
norm warps        4      NORMALIZE, not PRECOMPUTED_SCALES     inverse norms of the tokens of a stage
conversion warps  4      ENCODING (FP8)                        FP8 to fp16, and token scales
```

Barriers:

```text
barrier             count  arriving                              waiting
full[stage]         1      TMA, with the bytes of the copies     consumers, and norm warps if there are any
empty[stage]        2      each consumer, after both products    producer (count 1 with C.SMALL_M)
turn[g]             1      consumer 1 - g, products issued       consumer g, before issuing products (ping-pong)
norms.ready[stage]  1      norm warps                            consumers, before issuing products
raw.full[stage]     1      TMA, FP8 only                         conversion warps
raw.empty[stage]    1      conversion warps, FP8 only            producer
search[g]           1      TMA, argmax search only               consumer g
search[2]           2      each consumer, after its last tile    both consumers, before the argmax search
```

No warp group hands the first turn to group 0. `_consume` starts with `turn = 1 - g`, and a wait for phase 1 of a new
barrier returns at once. Group 0 therefore issues first, and group 1 waits until group 0 has issued.

With FP8 the producer fills a second pipeline, `raw`, with bytes. The conversion warps then act as the producer of the
fp16 pipeline. They wait at its `empty` barriers and arrive at its `full` barriers, without TMA.

Invariants:

- `Ld >= BN` and `d <= BD`. The last tile shifts back to the end of the document. It repeats tokens, which changes no
  maximum and no argmax.
- All warps visit the same tiles in the same order. Their stages and phases advance alike.
- A warp group has at most two products in flight. It reduces an accumulator before the next product overwrites it, so
  no accumulator is ever copied.
- Scores have the same bits as in `maxsim_forward`. Features are summed in ascending order in fp32, and the rows of a
  query in a fixed binary tree.

The kernel is written in Gluon, because Triton's own warp specialization is not available on Hopper.
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

ACCUMULATORS = gl.constexpr(4)  # of a program, two for each warp group
PRODUCER_REGISTERS = gl.constexpr(40)
CONSUMER_REGISTERS = gl.constexpr(232)


class QueryOperands(NamedTuple):
    """Query side of a program.

    `parts` is the number of groups of C.ROWS_PER_QUERY rows that each query is cut into. `numbers` is an
    `EncodedDocumentArgs`, or None unless the consumers dequantize.
    """

    Q: Any
    numbers: Any
    parts: Any
    d: Any


@gluon.jit
def _copy_tile(D, norms, ring, k, t0, stage, phase, Ld, C: gl.constexpr):
    """Copy the tile of document k that begins with token t0, and the precomputed scales or norms of its tokens.

    The last tile shifts back to the end of the document. Inverse norms are stored tile by tile, so their position does
    not shift. Scales of int8 tokens are stored token by token and shift with the tile.
    """
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
    """Fill the pipeline with the tiles of all documents of the program (producer warp).

    With C.SMALL_M, tiles alternate between two documents. The tiles of the second document use the second C.STAGES
    stages.
    """
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
    """Issue the product of one accumulator's query rows with the tile of a stage, `[64, BN]`."""
    return warpgroup_mma(q, ring.tiles.index(stage).permute((1, 0)), half.S, use_acc=False, is_async=True)


@gluon.jit
def issue_products(q, ring, halves, stage, phase, turn, G: gl.constexpr, C: gl.constexpr):
    """Issue the products of both accumulators with the tile of a stage, and return them with the tile's scales.

    The scales or inverse norms are loaded before the other warp group gets its turn. The load then overlaps the
    products.
    """
    wait_for_tile(ring, stage, phase, C)
    mbarrier.wait(ring.turn.index(G), turn)
    S_a = _multiply(q[0], ring, stage, halves[0])
    S_b = _multiply(q[1], ring, stage, halves[1])
    inverse = load_inverse_norms(ring, stage, phase, join_terms(halves[0].S, C), C)
    mbarrier.arrive(ring.turn.index(1 - G), count=1)
    return S_a, S_b, inverse


@gluon.jit
def _compiler_barrier_pair(S_b, a, C: gl.constexpr):
    """Wait for the second product and return it with the first accumulator `a`.

    The compiler sees the wait rewrite `a.best`. It must therefore reduce `a` ahead of the wait.
    """
    if C.ARGMAX:
        S_b, best, where = warpgroup_mma_wait(0, [S_b, a.best, a.where])
    else:
        S_b, best = warpgroup_mma_wait(0, [S_b, a.best])
        where = a.where
    return S_b, Accumulator(a.S, best, where)


@gluon.jit
def _reduce_accumulators(products, ring, halves, t0, stage, phase, turn, Ld, C: gl.constexpr):
    """Reduce the two products in flight, whose tile begins at token t0, and release the stage.

    The first accumulator is reduced while the second product still runs.
    """
    start = gl.minimum(t0, Ld - C.BN)
    S_a, S_b, inverse = products
    S = warpgroup_mma_wait(1, [S_a])
    a = accumulate_tile(S, inverse, halves[0], start, C)
    if C.NORMALIZE or C.ARGMAX or C.PRECOMPUTED_SCALES or ring.tiles.dtype == gl.int8:
        # This barrier completed long ago, but the wait ends a basic block. Without the wait, ptxas waits for both
        # products and then reduces.
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
    """Load the query rows of warp group G as operands of its two accumulators, zeros for masked and absent rows.

    Returns:
        The two operands, the factors of their row maxima in `layout`, and whether int8 terms leave out any row. The
        factors are inverse norms, scales of int8 terms or powers of two, or 0 if there are none.
    """
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
    """Return the weighted maxima of an accumulator's rows, and store their argmax.

    The argmax is UNRESOLVED for a maximum that is NaN or -inf. `each` holds the scale of an int8 document and whether
    int8 terms leave out any row.
    """
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
    """Store the scores `[groups, K]` of document k and the argmax of its rows (epilogue)."""
    GROUPS: gl.constexpr = 2 * C.MMA_ROWS // C.ROWS_PER_QUERY
    a, unresolved = _finish_rows(halves[0], inverse[0], x, 0, first, k, each, out.argmax, unresolved, sizes, C)
    b, unresolved = _finish_rows(halves[1], inverse[1], x, 1, first, k, each, out.argmax, unresolved, sizes, C)
    total = sum_accumulators(a, b, C)
    group = first + gl.arange(0, GROUPS, layout=total.type.layout)
    gl.store(out.scores + group.to(gl.int64) * sizes.K + k, total, mask=group < sizes.Nq * x.parts)
    return unresolved


@gluon.jit
def _consume(x, D, norms, ring, q_smem, out, begin, end, sizes, G: gl.constexpr, C: gl.constexpr):
    """Score the rows of warp group G in each row tile against all documents of the tile (consumer)."""
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
    """Return, for each of 64 query rows, the first token of document k whose similarity is NaN, else NO_TOKEN."""
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
    """Replace each UNRESOLVED argmax by the first NaN, or by token 0 if the maximum is -inf."""
    ROW: gl.constexpr = gl.SliceLayout(1, make_accumulator_layout(C.BN, D.dtype))
    phase = 0
    mbarrier.wait(ring.search.index(2), 0)  # both warp groups have read their last tile, all stages are free
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
    """Store the scores `[groups, K]` of all groups of query rows and documents, and the argmax if asked for.

    A group is a query of at most C.ROWS_PER_QUERY tokens, or one of the `parts` of a longer query.

    Args:
        Q: `QueryArgs` of the query tokens `[Nq, Lq, d]`.
        D: Tensor descriptor of all document tokens `[K * Ld, d]`, in blocks `[BN, BD]`.
        norms: With C.PRECOMPUTED_SCALES, tensor descriptor of the inverse norms that `maxsim_tile_norms` stores, or of
            the scales of int8 tokens. FP8 scales come with `numbers`.
        numbers: `EncodedDocumentArgs` of int8, FP8 or fp32 documents, else None.
        out: `OutputArgs`, the scores in fp32 and the argmax `[K, Nq, Lq]`.
        sizes: `SizeArgs`.
        d: Number of features.
        parts: Groups of each query.
        C: `Sm90Config`.
    """
    gl.static_assert(C.SMALL_M or C.MMA_ROWS * (2 if C.INT8_TERMS == 2 else 1) == 64)
    gl.static_assert(not (C.SMALL_M and C.OPERAND_IN_REGISTERS))
    gl.static_assert(not C.SPLIT_FP32 or (C.SMALL_M and not C.NORMALIZE and not C.ARGMAX))
    row_tiles = gl.cdiv(sizes.Nq * parts * C.ROWS_PER_QUERY, ACCUMULATORS * C.MMA_ROWS)
    pairs = row_tiles.to(gl.int64) * sizes.K  # split evenly over the programs, ordered by row tile
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
        raw = make_tile_pipeline(D.dtype, RAW, C.STAGES, 1, C.BN, C.BD)  # raw bytes, read by the conversion warps only
        x = QueryOperands(Q, None, parts, d)  # the conversion warps read the scales
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
