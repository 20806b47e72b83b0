"""sm_90 forward kernel for many features (`d > 128`), dense documents.

Math, with an argmax over t if asked for:

```text
score[i, k] = sum_s weight[i, s] * inverse_norm(Q[i, s]) * max_t <Q[i, s], D[k, t]> * inverse_norm(D[k, t])
```

The inverse norms are 1 unless C.NORMALIZE. A separate launch computes them (`maxsim_tile_norms`). With C.MASK it stores
-1 for masked tokens, whose similarities are then set to -inf. A query of more than C.ROWS_PER_QUERY tokens is cut into
`parts`, whose sums a second launch adds.

The kernel is persistent and warp-specialized. A row tile has 128 query rows, 64 for each of two consumer warp groups.
Rows of this length do not fit in registers, so both operands stream through the pipeline. A pipeline stage is one step
of 64 features (128 bytes, the widest swizzle), with 128 query rows and BN document tokens. A producer warp fills the
stages with TMA. The consumers multiply them on the tensor cores and keep running maxima. The epilogue of a document
multiplies row maxima by norms and weights, and stores the sum of each query.

Main loop:

```text
producer warp:
    for each pair (row tile, k) of the program, for t0 in range(0, Ld, BN), for c0 in range(0, d, 64):
        wait(empty[stage])
        t = min(t0, Ld - BN), or 0 with SHORT_DOCUMENTS     # the last tile shifts back
        documents[stage] = TMA(D[k, t : t + BN, c0 : c0 + 64])
        queries[stage] = TMA(128 query rows, c0 : c0 + 64)
        if this is the last step: norms[stage] = TMA(inverse norms of the tile)
                                                            # all copies arrive at full[stage]
consumer warp group g:
    for each pair (row tile, k) of the program:
        best = -inf                                         # [64, 4], 4 lanes of each row
        for t0 in range(0, Ld, BN):
            for c0 in range(0, d, 64):
                wait(full[stage])
                S += wgmma(queries[stage][g], documents[stage].T)    # [64, BN], asynchronous
                wait(all products but the last one)
                if c0 > 0: arrive(empty[previous stage])
            wait(S); S = where(norms[stage] < 0, -inf, S * norms[stage])
            arrive(empty[stage])
            best = max(best, lane_max(S))
        epilogue of document k
```

Warp roles:

```text
role            warps  work
consumers 0, 1  4 + 4  products, maxima, epilogue
producer        1      TMA copies
```

Barriers:

```text
barrier       count  arriving                                       waiting
full[stage]   1      TMA, with the bytes of all copies of a step    consumers
empty[stage]  2      each consumer, after its product               producer
```

Invariants:

- `Ld >= BN` unless C.SHORT_DOCUMENTS. With it a document has one tile, which reads on into the documents that follow,
  and columns from Ld on are set to -inf.
- TMA fills features from d on and absent query rows with zeros.
- A stage is released only after its product has completed. At most one product is in flight while a consumer waits for
  the next stage.
- The pipeline continues from tile to tile and from document to document without draining the copies.
- Scores have the same bits as in `maxsim_forward`. Features are summed in ascending order in fp32.
- An argmax is UNRESOLVED if the maximum is NaN or -inf. A second launch, `maxsim_resolve_argmax`, replaces it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ...common.primitives import choose_empty_score, load_query_mask, load_query_weight, nan_max, sum_in_order
from .accumulators import Accumulator, reduce_tile, reset_accumulator, select_argmax
from .gluon_names import async_load, reinterpret
from .pipeline import (
    ACCUMULATOR_ROWS,
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    TilePipeline,
    advance_stage,
    make_accumulator_layout,
    make_block,
    make_tile_pipeline,
    open_stage,
)
from .schedule import partition_evenly

STEP_FEATURES = gl.constexpr(64)  # features of a step: 128 bytes, the widest swizzle


@gluon.jit
def _retreat_stage(stage, C: gl.constexpr):
    """Return the stage before `stage`."""
    # Not kept in a variable, because a variable that begins as a copy of another is not carried through the loop.
    return gl.where(stage == 0, C.STAGES, stage) - 1


@gluon.jit
def _produce(Q, D, norms, ring, q_smem, begin, end, parts, K, Ld, d, C: gl.constexpr):
    """Fill the pipeline with all steps of all tiles of the program (producer warp).

    Elements outside a tensor are zeros. The last tile of a document shifts back unless C.SHORT_DOCUMENTS.
    """
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
                if (C.NORMALIZE or C.MASK) and c0 + STEP_FEATURES >= d:
                    full = open_stage(ring, stage, phase, STEP + norms.block_type.nbytes)
                    async_load(norms, [task % K * tiles * C.BN + t0], full, ring.norms.index(stage))
                else:
                    full = open_stage(ring, stage, phase, STEP)
                async_load(D, [token, c0], full, ring.tiles.index(stage))
                for G in gl.static_range(2):
                    first = group + G * GROUPS
                    rows = reinterpret(q_smem.index(2 * stage + G), Q.dtype, BLOCK, LAYOUT)
                    async_load(Q, [first // parts, first % parts * C.ROWS_PER_QUERY, c0], full, rows)
                stage, phase = advance_stage(stage, phase, C)


@gluon.jit
def _scale_similarities(S, inverse, C: gl.constexpr):
    """Return similarities times the inverse norms of their tokens, and -inf for masked tokens."""
    inverse = inverse.load(gl.SliceLayout(0, S.type.layout))
    if C.NORMALIZE:
        S = S * inverse[None, :]
    if C.MASK:
        S = gl.where((inverse < 0)[None, :], float("-inf"), S)  # the norm of a NaN token may be NaN
    return S


@gluon.jit
def _has_kept_token(max_norms, C: gl.constexpr):
    """Return whether a document keeps a token. `max_norms` holds maxima of the norms of its tokens."""
    if C.MASK:
        has_token = gl.reduce(max_norms, 0, nan_max)
        has_token = (has_token >= 0) | (has_token != has_token)
    else:
        has_token = True
    return has_token


@gluon.jit
def _store_argmax(half, best, keep, k, row, ok, argmax, sizes):
    """Store the argmax of rows, -1 for rows that are not kept."""
    where, _ = select_argmax(half, best, keep, gl.full_like(best, 0).to(gl.int32))
    pointers = argmax + k.to(gl.int64) * (sizes.Nq * sizes.Lq) + row
    gl.store(pointers, where.to(argmax.dtype.element_ty), mask=ok)


@gluon.jit
def _store_document(half, max_norms, Q, norms, first, parts, k, out, sizes, C: gl.constexpr):
    """Store the scores of document k, `[groups, K]`, and the argmax if asked for (epilogue).

    `norms` holds the inverse norms of query tokens.
    """
    GROUPS: gl.constexpr = ACCUMULATOR_ROWS // C.ROWS_PER_QUERY
    best = gl.reduce(half.best, 1, nan_max)
    r = gl.arange(0, ACCUMULATOR_ROWS, layout=best.type.layout)
    group = first + r // C.ROWS_PER_QUERY
    i = group // parts
    s = group % parts * C.ROWS_PER_QUERY + r % C.ROWS_PER_QUERY
    ok = (i < sizes.Nq) & (s < sizes.Lq)
    keep = load_query_mask(Q, i, s, ok)
    any_kept = _has_kept_token(max_norms, C)
    if C.ARGMAX:
        _store_argmax(half, best, keep & any_kept, k, i * sizes.Lq + s, ok, out.argmax, sizes)
    if C.NORMALIZE:
        best *= gl.load(norms + i.to(gl.int64) * sizes.Lq + s, mask=keep, other=0.0)
    total = sum_in_order(gl.where(keep, load_query_weight(Q, i, s, keep) * best, 0.0), GROUPS, C.ROWS_PER_QUERY)
    if C.MASK:  # a document without a kept token scores -inf, or 0 for a query without one
        rows = sum_in_order(keep.to(gl.float32), GROUPS, C.ROWS_PER_QUERY)
        total = gl.where(any_kept, total, choose_empty_score(rows))
    group = first + gl.arange(0, GROUPS, layout=total.type.layout)
    gl.store(out.scores + group.to(gl.int64) * sizes.K + k, total, mask=group < sizes.Nq * parts)


@gluon.jit
def _reduce_product(S, half, max_norms, inverse, start, Ld, C: gl.constexpr):
    """Return the accumulator and `max_norms` after the product S with a tile that begins with token `start`."""
    if C.NORMALIZE or C.MASK:
        S = _scale_similarities(S, inverse, C)
    if C.MASK:
        max_norms = nan_max(max_norms, inverse.load(max_norms.type.layout))
    if C.SHORT_DOCUMENTS:
        t = gl.arange(0, C.BN, layout=gl.SliceLayout(0, S.type.layout))
        S = gl.where((t < Ld)[None, :], S, float("-inf"))
    best, where = reduce_tile(S, half.best, half.where, start, C)
    return Accumulator(S, best, where), max_norms


@gluon.jit
def _consume(Q, norms, ring, q_smem, out, begin, end, parts, sizes, d, G: gl.constexpr, C: gl.constexpr):
    """Score warp group G's 64 rows of each row tile against the documents of the tile (consumer)."""
    ACC: gl.constexpr = make_accumulator_layout(C.BN, q_smem.dtype)
    TOKENS: gl.constexpr = gl.BlockedLayout([C.BN // 32], [32], [4], [0])  # each warp reads all tokens
    stage = 0
    phase = 0
    half = reset_accumulator(gl.full([ACCUMULATOR_ROWS, C.BN], 0.0, gl.float32, ACC), C)
    for task in range(begin, end):
        half = reset_accumulator(half.S, C)
        max_norms = gl.full([C.BN], -1.0, gl.float32, TOKENS) if C.MASK else 0
        for t0 in range(0, sizes.Ld, C.BN):
            S = half.S
            for c0 in range(0, d, STEP_FEATURES):
                mbarrier.wait(ring.full.index(stage), phase)
                rows = q_smem.index(2 * stage + G)
                S = warpgroup_mma(rows, ring.tiles.index(stage).permute((1, 0)), S, use_acc=c0 > 0, is_async=True)
                S = warpgroup_mma_wait(1, [S])
                mbarrier.arrive(ring.empty.index(_retreat_stage(stage, C)), count=1, pred=c0 > 0)
                stage, phase = advance_stage(stage, phase, C)
            S = warpgroup_mma_wait(0, [S])
            last_stage = _retreat_stage(stage, C)
            inverse = ring.norms.index(last_stage) if C.NORMALIZE or C.MASK else 0
            start = t0 if C.SHORT_DOCUMENTS else gl.minimum(t0, sizes.Ld - C.BN)
            half, max_norms = _reduce_product(S, half, max_norms, inverse, start, sizes.Ld, C)
            mbarrier.arrive(ring.empty.index(last_stage), count=1)
        first = (task // sizes.K * 2 + G) * (ACCUMULATOR_ROWS // C.ROWS_PER_QUERY)
        _store_document(half, max_norms, Q, norms, first, parts, task % sizes.K, out, sizes, C)


@gluon.jit(do_not_specialize=["parts"])
def maxsim_forward_sm90_large_d(Q, rows, D, norms, query_norms, out, sizes, d, parts, C: gl.constexpr):
    """Store the scores `[groups, K]` of all groups of query rows and documents, and the argmax if asked for.

    A group is a query of at most C.ROWS_PER_QUERY tokens, or one of the `parts` of a longer query. Each program gets an
    equal share of the (row tile, document) pairs, ordered by row tile.

    Args:
        Q: `QueryArgs` of the query tokens `[Nq, Lq, d]`.
        rows: Tensor descriptor of Q, in blocks `[queries, tokens, STEP_FEATURES]` of 64 rows.
        D: Tensor descriptor of all document tokens `[K * Ld, d]`, in blocks `[BN, STEP_FEATURES]`.
        norms: With C.NORMALIZE or C.MASK, tensor descriptor of the document norms that `maxsim_tile_norms` stores.
        query_norms: With C.NORMALIZE, the query norms `[Nq, Lq]` that `maxsim_tile_norms` stores.
        out: `OutputArgs`, the scores in fp32 and the argmax `[K, Nq, Lq]`.
        sizes: `SizeArgs`.
        d: Number of features.
        parts: Groups of each query.
        C: `Sm90LargeDConfig`.
    """
    row_tiles = gl.cdiv(sizes.Nq * parts * C.ROWS_PER_QUERY, 2 * ACCUMULATOR_ROWS)
    begin, end = partition_evenly(row_tiles, sizes.K)
    inverse = 0
    if C.NORMALIZE or C.MASK:
        inverse = gl.allocate_shared_memory(gl.float32, [C.STAGES, C.BN], norms.layout)
    LAYOUT: gl.constexpr = D.layout
    q_smem = gl.allocate_shared_memory(D.dtype, [2 * C.STAGES, ACCUMULATOR_ROWS, STEP_FEATURES], LAYOUT)
    ring = make_tile_pipeline(D.dtype, LAYOUT, C.STAGES, 2, make_block(C.BN, STEP_FEATURES))
    ring = TilePipeline(ring.tiles, ring.full, ring.empty, 0, 0, inverse)
    gl.warp_specialize(
        [
            (_consume, (Q, query_norms, ring, q_smem, out, begin, end, parts, sizes, d, 0, C)),
            (_consume, (Q, query_norms, ring, q_smem, out, begin, end, parts, sizes, d, 1, C)),
            (_produce, (rows, D, norms, ring, q_smem, begin, end, parts, sizes.K, sizes.Ld, d, C)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
