"""Main loop of the sm_90 kernels for many query rows: dense documents (`dense.py`) and all others (`packed.py`).

Dense documents without a mask are even, so all have sizes.Ld tokens. Other documents have a length each, and with a
mask they extend from the first to the last kept token. `DocumentSegments` has their location, and its `Td` is None for
even documents. Code for the other kind of documents is compiled out.

The kernels are persistent. At most one program (CTA) runs on each SM, and it owns a contiguous range of the (row tile,
document) pairs, ordered by row tile. A row tile has four accumulators of 64 rows, two for each consumer warp group.

The kernels are also warp-specialized. A producer warp copies document tiles with TMA (the tensor memory accelerator)
into a pipeline. A pipeline stage is room for one tile in shared memory, with two barriers. Two consumer warp groups
multiply each tile by their query rows on the tensor cores (WGMMA) and keep running maxima. The epilogue of a document
merges these maxima for each row. It then applies norms and weights and stores the sum of each query, or it stores the
row maxima.

Main loop, with `tile` for the document tile of a stage:

```text
producer warp:
    for each pair (row tile, k) of the program, for t0 in range(0, max(length[k], 1), BN):
        wait(empty[stage])
        t = row[k] + min(t0, max(length[k] - BN, 0))        # the last tile shifts back
        tile = TMA(D[t : t + BN])                           # arrives at full[stage]
norm, conversion, or mask warps, if there are any:
    for each tile: wait; compute its norms, convert it, or overwrite its masked tokens; arrive
consumer warp group g:
    for each row tile of the program:
        q0, q1 = query rows                                 # 2 x [64, BD], in registers or shared memory
        for each document k of the row tile:
            for t0 in range(0, max(length[k], 1), BN):
                wait(tile is complete); wait(turn[g])
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
producer loop, TMA               `produce`, `_copy_tile`
consumer loop                    `consume`
q0, q1                           `_load_queries`, which returns `q[0]` and `q[1]`
both waits, S0, S1, the arrive   `_issue_products`, whose products are `S_a` and `S_b`
lane_max, best0, best1           `_reduce_accumulators`; the maxima are `halves[0].best` and `halves[1].best`
epilogue                         `_store_document`, with `_finish_rows` for each accumulator
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
conversion warps  4      ENCODING (FP8, bits) or FP32_TERMS    FP8 to fp16, bits to int8, fp32 to terms, and scales
mask warps        1 + 1  with a mask                           overwrite masked tokens, 32 of each tile per warp
```

Barriers:

```text
barrier             count  arriving                              waiting
full[stage]         1      TMA, with the bytes of the copies     consumers, and norm or mask warps if there are any
empty[stage]        2      each consumer, after both products    producer (count 1 with C.SMALL_M)
turn[g]             1      consumer 1 - g, products issued       consumer g, before issuing products (C.PING_PONG)
norms.ready[stage]  1      norm warps                            consumers, before issuing products
ready[stage]        2      each mask warp                        consumers, instead of full[stage]
raw.full[stage]     1      TMA, FP8 and fp32 only                conversion warps
raw.empty[stage]    1      conversion warps, FP8 and fp32 only   producer
search[g]           1      TMA, if `has_argmax_search`           consumer g
search[2]           2      each consumer, after its last tile    both consumers, before the argmax search
```

No warp group hands the first turn to group 0. `consume` starts with `turn = 1 - g`, and a wait for phase 1 of a new
barrier returns at once. Group 0 therefore issues first, and group 1 waits until group 0 has issued. Without C.PING_PONG
both groups issue as soon as a tile is there, so that one may store a document while the other one multiplies.

With FP8 and fp32 the producer fills a second pipeline, `raw`, with the documents as they are. The conversion warps then
act as the producer of the fp16 pipeline. They wait at its `empty` barriers and arrive at its `full` barriers, without
TMA.

With two FP32_TERMS, S0 and S1 are sums of three products of fp16 terms, in the order of `multiply_split_rows`. The
small products of one accumulator run while the other one is scaled. A score of a document with fallback tokens, or of a
warp group with fallback rows (`common/fp32.py`), is stored as RESCORE_BITS. A second launch, `maxsim_rescore`, replaces
such scores.

Invariants:

- `d <= BD`, and even documents have `Ld >= BN`. The last tile shifts back to the end of the document. It repeats
  tokens, which changes no maximum and no argmax.
- Every document has at least one tile, even an empty or invalid one. All warps visit the same tiles in the same order.
  Their stages and phases advance alike.
- The tile of a document shorter than BN reads on into the rows that follow. These columns are set to -inf, or are
  overwritten if there is a mask.
- A length is -1 for a document that is not inside D. Its scores are NaN, and nothing outside D is read.
- A warp group has at most two products in flight. It reduces an accumulator before the next product overwrites it, so
  no accumulator is ever copied.
- Scores have the same bits as in `maxsim_forward`. Features are summed in ascending order in fp32, and the rows of a
  query in a fixed binary tree.

The kernels are written in Gluon, because Triton's own warp specialization is not available on Hopper.
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

from ...common.fp32 import FP16_LOW_SCALE, RESCORE_BITS, mark_fallback_scales, split_rows
from ...common.primitives import NO_TOKEN, UNRESOLVED, choose_empty_score, load_query_mask, load_query_weight, nan_max
from ...formats.bits import get_code_bits
from ...formats.encoded import is_fp8, needs_power_scaling
from .accumulators import (
    accumulate_tile,
    compiler_barrier_accumulator,
    compiler_barrier_pair,
    join_terms,
    load_accumulator_queries,
    locate_accumulator_rows,
    locate_first_group,
    reset_accumulator,
    reset_accumulators,
    select_argmax,
    sum_accumulators,
)
from .bits import WORD_BITS
from .convert import convert_queries
from .gluon_names import async_load
from .int8_terms import dequantize_row_maxima, has_fallback_rows, load_document_scale, store_query_terms
from .norms import (
    compute_row_inverse_norms,
    compute_tile_inverse_norms,
    load_inverse_norms,
    scale_similarities,
    wait_for_tile,
)
from .pipeline import (
    ACCUMULATOR_ROWS,
    advance_stage,
    copies_scales,
    has_argmax_search,
    make_accumulator_layout,
    negates_similarities,
    open_stage,
)
from .schedule import (
    choose_tile_start,
    compiler_barrier_value,
    find_kept_columns,
    load_segment_bounds,
    locate_segment,
)

ACCUMULATORS = gl.constexpr(4)  # of a program, two for each warp group
# Each warp of a warp group reads the scales of all tokens of a tile.
SCALE_LAYOUT = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))


class Position(NamedTuple):
    """Position of a consumer warp group: the stage and phase of its next tile, and the phase of its turn.

    `min_scale` is the smallest scale of a token since the document began with C.FP32_TERMS, else 0. A negative scale
    belongs to a fallback token. `max_scale` is the largest with C.MASK, else 0. The scale of a masked token is 0.
    """

    stage: Any
    phase: Any
    turn: Any
    min_scale: Any
    max_scale: Any


class QueryOperands(NamedTuple):
    """Query side of a program.

    `parts` is the number of groups of C.ROWS_PER_QUERY rows that each query is cut into. It is None if the rows of all
    queries follow each other without padding, and their maxima are stored. `numbers` is an `EncodedDocumentArgs`, or
    None unless the consumers dequantize.
    """

    Q: Any
    numbers: Any
    parts: Any
    d: Any


@gluon.jit
def _copy_tile(D, norms, ring, spans, k, K, row, length, t0, stage, phase, C: gl.constexpr):
    """Copy the tile of document k of K that begins with token t0, and the precomputed scales or norms of its tokens.

    The document begins at `row`. Inverse norms are stored tile by tile, so their position does not shift with the last
    tile. Scales of int8 tokens are stored token by token and shift with the tile. The terms lo of all documents follow
    the terms hi.
    """
    HAS_SCALES: gl.constexpr = C.PRECOMPUTED_SCALES and copies_scales(C)
    NBITS: gl.constexpr = get_code_bits(C.ENCODING)
    HAS_LOW_TERMS: gl.constexpr = C.PRECOMPUTED_TERMS and C.FP32_TERMS == 2
    TILES: gl.constexpr = 2 if HAS_LOW_TERMS else 1
    full = open_stage(ring, stage, phase, TILES * D.block_type.nbytes + (norms.block_type.nbytes if HAS_SCALES else 0))
    start = row + choose_tile_start(spans, t0, length, C)
    if HAS_SCALES:
        norm_offset = start if D.dtype == gl.int8 or C.ENCODING != "" else k * gl.cdiv(length, C.BN) * C.BN + t0
        async_load(norms, [norm_offset], full, ring.norms.inverse.index(stage))
    if NBITS > 0:
        async_load(D, [start * (C.BD * NBITS // WORD_BITS)], full, ring.tiles.index(stage))
    else:
        async_load(D, [start, 0], full, ring.tiles.index(stage))
    if HAS_LOW_TERMS:
        async_load(D, [K * length + start, 0], full, ring.tiles.index(stage + C.STAGES))


@gluon.jit
def produce(D, norms, ring, spans, begin, end, sizes, C: gl.constexpr):
    """Fill the pipeline with the tiles of all documents of the program, at least one each (producer warp).

    With C.SMALL_M, tiles alternate between two documents. The tiles of the second document use the second C.STAGES
    stages.
    """
    stage = 0
    phase = 1
    bounds = load_segment_bounds(spans, begin % sizes.K, sizes.K)
    for task in range(begin, end, 2 if C.SMALL_M else 1):
        k = task % sizes.K
        row, length = locate_segment(spans, bounds, k, sizes)
        stop = length
        if spans.Td is not None:
            bounds = load_segment_bounds(spans, (task + 1) % sizes.K, sizes.K)
            stop = gl.maximum(compiler_barrier_value(length), 1)
        for t0 in range(0, stop, C.BN):
            _copy_tile(D, norms, ring, spans, k, sizes.K, row, length, t0, stage, phase, C)
            if C.SMALL_M and task + 1 < end:
                k1 = (task + 1) % sizes.K
                stage1 = stage + C.STAGES
                _copy_tile(D, norms, ring, spans, k1, sizes.K, k1 * length, length, t0, stage1, phase, C)
            stage, phase = advance_stage(stage, phase, C)


@gluon.jit
def _multiply(q, ring, stage, half):
    """Issue the product of one accumulator's query rows with the tile of a stage, `[64, BN]`."""
    return warpgroup_mma(q, ring.tiles.index(stage).permute((1, 0)), half.S, use_acc=False, is_async=True)


@gluon.jit
def _multiply_small_terms(q, ring, stage, half, C: gl.constexpr):
    """Issue the two small products of one accumulator's split fp32 rows with the tile of a stage, `[64, BN]`."""
    hi, lo = q
    S = warpgroup_mma(hi, ring.tiles.index(stage + C.STAGES).permute((1, 0)), half.S, use_acc=False, is_async=True)
    return warpgroup_mma(lo, ring.tiles.index(stage).permute((1, 0)), S, is_async=True)


@gluon.jit
def _multiply_split_rows(q, ring, stage, halves, C: gl.constexpr):
    """Issue the products of both accumulators of split fp32 rows, in the order of `multiply_split_rows`.

    The last products are in flight. Each accumulator is scaled while a product of the other one runs.
    """
    tile = ring.tiles.index(stage).permute((1, 0))
    S_a = _multiply_small_terms(q[0], ring, stage, halves[0], C)
    S_b = _multiply_small_terms(q[1], ring, stage, halves[1], C)
    S_a = warpgroup_mma_wait(2, [S_a])
    S_a = warpgroup_mma(q[0][0], tile, S_a * (1.0 / FP16_LOW_SCALE), is_async=True)
    S_b = warpgroup_mma_wait(1, [S_b])
    S_b = warpgroup_mma(q[1][0], tile, S_b * (1.0 / FP16_LOW_SCALE), is_async=True)
    return S_a, S_b


@gluon.jit
def _issue_products(q, ring, halves, at, document_scale, G: gl.constexpr, C: gl.constexpr):
    """Issue the products of both accumulators with the tile at a position, and return them with the tile's scales.

    The scales or inverse norms are loaded before the other warp group gets its turn. The load then overlaps the
    products. `document_scale` is returned if `negates_similarities`.
    """
    wait_for_tile(ring, at.stage, at.phase, C)
    if C.PING_PONG:
        mbarrier.wait(ring.turn.index(G), at.turn)
    if C.FP32_TERMS == 2:
        S_a, S_b = _multiply_split_rows(q, ring, at.stage, halves, C)
    else:
        S_a = _multiply(q[0], ring, at.stage, halves[0])
        S_b = _multiply(q[1], ring, at.stage, halves[1])
    inverse = load_inverse_norms(ring, at.stage, at.phase, join_terms(halves[0].S, C), C)
    if negates_similarities(C):
        inverse = document_scale
    if C.PING_PONG:
        mbarrier.arrive(ring.turn.index(1 - G), count=1)
    return S_a, S_b, inverse


@gluon.jit
def _reduce_accumulators(products, ring, halves, at, t0, origin, length, spans, C: gl.constexpr):
    """Reduce the two products in flight, whose tile begins at token t0, and release the stage.

    The first accumulator is reduced while the second product still runs.
    """
    start = choose_tile_start(spans, t0, length, C)
    tokens_left = length - start
    S_a, S_b, inverse = products
    a = accumulate_tile(warpgroup_mma_wait(1, [S_a]), inverse, halves[0], start, tokens_left, origin, spans, C)
    if spans.Td is None and (
        C.NORMALIZE or C.ARGMAX or C.PRECOMPUTED_SCALES or C.ENCODING != "" or ring.tiles.dtype == gl.int8
    ):
        # This barrier completed long ago, but the wait ends a basic block. Without the wait, ptxas waits for both
        # products and then reduces.
        mbarrier.wait(ring.full.index(at.stage), at.phase)
        S, a = compiler_barrier_pair(S_b, a, C)
    else:
        S = warpgroup_mma_wait(0, [S_b])
    min_scale, max_scale = _find_scale_range(ring, at, C)
    mbarrier.arrive(ring.empty.index(at.stage), count=1)
    b = accumulate_tile(S, inverse, halves[1], start, tokens_left, origin, spans, C)
    stage, phase = advance_stage(at.stage, at.phase, C)
    halves = compiler_barrier_accumulator(a, C), compiler_barrier_accumulator(b, C)
    return halves, Position(stage, phase, at.turn ^ 1, min_scale, max_scale)


@gluon.jit
def _find_scale_range(ring, at, C: gl.constexpr):
    """Return `at.min_scale` and `at.max_scale` after the tile of a position. Every warp finds the same values."""
    min_scale = at.min_scale
    max_scale = at.max_scale
    if C.FP32_TERMS > 0:
        scale = ring.norms.inverse.index(at.stage).load(SCALE_LAYOUT)
        min_scale = gl.minimum(min_scale, scale)
        if C.MASK:
            max_scale = gl.maximum(max_scale, scale)
    return min_scale, max_scale


@gluon.jit
def _reset_scale_range(at, C: gl.constexpr):
    """Return the position at the beginning of a document."""
    if C.FP32_TERMS > 0:
        zero = gl.full([C.BN], 0.0, gl.float32, SCALE_LAYOUT)
        return Position(at.stage, at.phase, at.turn, zero, zero if C.MASK else 0)
    else:
        return at


@gluon.jit
def _store_split_queries(rows, smem, layout: gl.constexpr, OPERAND: gl.constexpr, C: gl.constexpr):
    """Return the operands of fp32 rows, and the scales of the rows, which are negative for fallback rows.

    The operand is the terms hi in registers. With two terms the terms lo follow, in shared memory. With C.NORMALIZE the
    scales include the inverse norms.
    """
    terms, scale, is_exact, is_zero = split_rows(rows, C.FP32_TERMS)
    if C.NORMALIZE:
        scale = scale * gl.convert_layout(compute_row_inverse_norms(rows), scale.type.layout)
    hi, lo = terms
    smem.store(hi)
    q = smem.load(OPERAND)
    if C.FP32_TERMS == 2:
        smem.store(lo)
        q = (q, smem)
    return q, gl.convert_layout(mark_fallback_scales(scale, is_exact, is_zero), layout)


@gluon.jit
def _load_queries(x, q_smem, first, sizes, layout: gl.constexpr, G: gl.constexpr, C: gl.constexpr):
    """Load the query rows of warp group G as operands of its two accumulators, zeros for masked and absent rows.

    Returns:
        The two operands, and the factors of their row maxima in `layout`, followed by whether int8 terms leave out any
        row. The factors are inverse norms, scales of int8 terms or powers of two, or 0 if there are none.
    """
    ACC: gl.constexpr = make_accumulator_layout(C.BN, q_smem.dtype)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 32 // q_smem.dtype.primitive_bitwidth)
    q = q_smem.index(2 * G), q_smem.index(2 * G + 1)
    inverse = 0, 0
    has_fallback = 0
    if C.FP32_TERMS > 0:
        a, factors_a = _store_split_queries(
            load_accumulator_queries(x.Q, first, 0, x.parts, sizes, x.d, C), q[0], layout, OPERAND, C
        )
        b, factors_b = _store_split_queries(
            load_accumulator_queries(x.Q, first, 1, x.parts, sizes, x.d, C), q[1], layout, OPERAND, C
        )
        q = a, b
        inverse = factors_a, factors_b
        has_fallback = gl.maximum(has_fallback_rows(factors_a), has_fallback_rows(factors_b))
    elif q_smem.dtype == gl.int8:
        inverse = (
            store_query_terms(x.Q, q[0], first, 0, x.parts, sizes, x.d, layout, C),
            store_query_terms(x.Q, q[1], first, 1, x.parts, sizes, x.d, layout, C),
        )
        has_fallback = gl.maximum(has_fallback_rows(inverse[0]), has_fallback_rows(inverse[1]))
    else:
        a = load_accumulator_queries(x.Q, first, 0, x.parts, sizes, x.d, C)
        b = load_accumulator_queries(x.Q, first, 1, x.parts, sizes, x.d, C)
        if is_fp8(C.ENCODING):
            a, factors_a = convert_queries(a, layout, C)
            b, factors_b = convert_queries(b, layout, C)
            inverse = factors_a, factors_b
        q[0].store(a)
        q[1].store(b)
        if C.NORMALIZE:
            inverse = (
                gl.convert_layout(compute_row_inverse_norms(a), layout),
                gl.convert_layout(compute_row_inverse_norms(b), layout),
            )
    fence_async_shared()
    if C.OPERAND_IN_REGISTERS and C.FP32_TERMS == 0:
        q = q[0].load(OPERAND), q[1].load(OPERAND)
    return q, (inverse[0], inverse[1], has_fallback)


@gluon.jit
def _finish_rows(
    half, x, first, factors, H: gl.constexpr, k, length, document_scale, out, unresolved, sizes, C: gl.constexpr
):
    """Store the argmax of an accumulator's rows in document k, and their maxima if out.maxima is not None.

    The argmax is UNRESOLVED for a maximum that is NaN or -inf. `document_scale` is the scale of an int8 or FP8
    document. `length` is None for even documents.

    Returns:
        The row maxima, weighted if they are summed, and the updated flags of unresolved rows.
    """
    Q = x.Q
    i, s, row, ok = locate_accumulator_rows(first, H, x.parts, sizes, gl.SliceLayout(1, half.best.type.layout), C)
    offsets = k.to(gl.int64) * (sizes.Nq * sizes.Lq) + row
    keep = load_query_mask(Q, i, s, ok)
    best = gl.reduce(half.best, 1, nan_max)
    if C.ARGMAX:
        winners = keep if length is None else keep & (length > 0)
        where, unresolved = select_argmax(half, best, winners, unresolved)
        gl.store(out.argmax + offsets, where.to(out.argmax.dtype.element_ty), mask=ok)
    if C.FP32_TERMS > 0:
        best = best * factors[H]
    elif C.INT8_TERMS > 0:
        inverse, has_fallback = factors[H], factors[2]
        best = dequantize_row_maxima(
            best, inverse, document_scale, has_fallback, Q, x.numbers, first, H, x.parts, k, sizes, x.d, C
        )
    elif C.NORMALIZE or needs_power_scaling(Q.ptr.dtype.element_ty, C.ENCODING):
        if negates_similarities(C):
            best = best * gl.abs(document_scale)
        best = best * factors[H]
    if out.maxima is None:
        best = gl.where(keep, load_query_weight(Q, i, s, keep) * best, 0.0)
    else:
        gl.store(out.maxima + offsets, best, mask=ok)
    return best, unresolved


@gluon.jit
def _load_row_mask(x, first, H: gl.constexpr, sizes, layout: gl.constexpr, C: gl.constexpr):
    """Return 1.0 for the rows of accumulator H that exist and are not masked, else 0.0."""
    i, s, _, ok = locate_accumulator_rows(first, H, x.parts, sizes, layout, C)
    return load_query_mask(x.Q, i, s, ok).to(gl.float32)


@gluon.jit
def _replace_empty_scores(total, x, first, length, sizes, layout: gl.constexpr, C: gl.constexpr):
    """Return the scores `total` of a document, replaced if it has no tokens.

    A document that is not inside D scores NaN.
    """
    if length <= 0:
        rows = sum_accumulators(
            _load_row_mask(x, first, 0, sizes, layout, C), _load_row_mask(x, first, 1, sizes, layout, C), C
        )
        total = gl.where(length < 0, float("nan"), choose_empty_score(rows))
    return total


@gluon.jit
def _store_document(halves, x, first, factors, k, length, scale_or_fallback, out, unresolved, sizes, C: gl.constexpr):
    """Store the results of document k after its last tile (epilogue): scores `[groups, K]` or maxima, and argmax.

    `scale_or_fallback` is the document scale. With C.FP32_TERMS, it is positive if any row or token is a fallback.
    """
    GROUPS: gl.constexpr = 2 * C.MMA_ROWS // C.ROWS_PER_QUERY
    a, unresolved = _finish_rows(
        halves[0], x, first, factors, 0, k, length, scale_or_fallback, out, unresolved, sizes, C
    )
    b, unresolved = _finish_rows(
        halves[1], x, first, factors, 1, k, length, scale_or_fallback, out, unresolved, sizes, C
    )
    if out.maxima is None:
        LAYOUT: gl.constexpr = a.type.layout
        total = sum_accumulators(a, b, C)
        if length is not None:
            total = _replace_empty_scores(total, x, first, length, sizes, LAYOUT, C)
        if C.FP32_TERMS > 0:  # `maxsim_rescore` replaces these scores
            total = gl.where(
                scale_or_fallback > 0,
                (gl.full_like(total, 0).to(gl.int32) + RESCORE_BITS).to(gl.float32, bitcast=True),
                total,
            )
        group = first + gl.arange(0, GROUPS, layout=total.type.layout)
        gl.store(out.scores + group.to(gl.int64) * out.stride + k, total, mask=group < sizes.Nq * x.parts)
    return unresolved


@gluon.jit
def _locate_first_document(spans, k, sizes, C: gl.constexpr):
    """Return the length of document k, the origin of its argmax values, and the bounds of the next document."""
    bounds = load_segment_bounds(spans, k, sizes.K)
    _, length = locate_segment(spans, bounds, k, sizes)
    origin = _choose_origin(spans, bounds, C)
    return length, origin, load_segment_bounds(spans, k + 1, sizes.K)


@gluon.jit
def _choose_origin(spans, bounds, C: gl.constexpr):
    """Return the token of the dense document that argmax values are relative to: its first kept token with a mask."""
    return bounds[0] if C.ARGMAX and spans.patches is not None else 0


@gluon.jit
def _flag_fallbacks(at, factors, document_scale, C: gl.constexpr):
    """Return 1.0 if a row or a token of the document so far is a fallback with C.FP32_TERMS, else `document_scale`."""
    if C.FP32_TERMS > 0:
        has_fallback = gl.maximum(factors[2], (gl.min(at.min_scale, axis=0) < 0).to(gl.int32))
        return has_fallback.to(gl.float32)
    else:
        return document_scale


@gluon.jit
def _find_kept_length(at):
    """Return 0 for a document whose tokens are all masked, else 1 (C.MASK)."""
    return (gl.max(gl.maximum(at.max_scale, -at.min_scale), axis=0) > 0).to(gl.int32)


@gluon.jit
def _score_tiles(
    q, ring, halves, at, begin, end, origin, length, document_scale, spans, G: gl.constexpr, C: gl.constexpr
):
    """Multiply and reduce the tiles of a document that begin with tokens from `begin` to `end` - 1."""
    for t0 in range(begin, end, C.BN):
        products = _issue_products(q, ring, halves, at, document_scale, G, C)
        halves, at = _reduce_accumulators(products, ring, halves, at, t0, origin, length, spans, C)
    return halves, at


@gluon.jit
def _advance_scale(numbers, k, scale, next_scale, sizes, C: gl.constexpr):
    """Return the scale of document k, if it has one, and of the next document if `negates_similarities`.

    The first tile needs the sign of the scale then, so the scale is loaded one document ahead.
    """
    if C.INT8_TERMS > 0:
        scale = load_document_scale(numbers, k, C)
    if negates_similarities(C):
        scale = next_scale
        next_scale = load_document_scale(numbers, gl.minimum(k + 1, sizes.K - 1), C)
    return scale, next_scale


@gluon.jit
def consume(x, D, norms, ring, q_smem, spans, out, begin, end, sizes, G: gl.constexpr, C: gl.constexpr):
    """Compute the results of warp group G's rows in each row tile for all documents of the tile (consumer)."""
    EVEN: gl.constexpr = spans.Td is None
    ACC: gl.constexpr = make_accumulator_layout(C.BN, q_smem.dtype)
    at = _reset_scale_range(Position(0, 0, 1 - G, 0, 0), C)
    S = gl.full([ACCUMULATOR_ROWS, C.BN], 0, gl.int32 if q_smem.dtype == gl.int8 else gl.float32, ACC)
    halves = (reset_accumulator(S, C), reset_accumulator(S, C))
    layout: gl.constexpr = gl.SliceLayout(1, halves[0].best.type.layout)
    unresolved = gl.full([C.MMA_ROWS], 0, gl.int32, layout)
    scale = 0.0
    task = begin
    while task < end:
        row_tile = task // sizes.K
        tile_end = gl.minimum((row_tile + 1) * sizes.K, end)
        first = locate_first_group(row_tile, G, x.parts, C)
        q, factors = _load_queries(x, q_smem, first, sizes, layout, G, C)
        begin_k = task % sizes.K
        end_k = begin_k + tile_end - task
        length, origin, bounds = _locate_first_document(spans, begin_k, sizes, C)
        next_scale = load_document_scale(x.numbers, begin_k, C) if negates_similarities(C) else 0.0
        # The length of the previous document, unused at first. Triton would treat `length` as a loop invariant.
        previous_length = None if EVEN else begin_k
        for k in range(begin_k, end_k):
            if EVEN and C.ARGMAX:
                halves, at = _score_tiles(q, ring, halves, at, 0, length, origin, length, scale, spans, G, C)
            else:
                products = _issue_products(q, ring, halves, at, next_scale, G, C)
                if not C.ARGMAX:
                    if k > begin_k:
                        scale = _flag_fallbacks(at, factors, scale, C)
                        kept_length = _find_kept_length(at) if C.MASK else previous_length
                        _store_document(halves, x, first, factors, k - 1, kept_length, scale, out, unresolved, sizes, C)
                    scale, next_scale = _advance_scale(x.numbers, k, scale, next_scale, sizes, C)
                    at = _reset_scale_range(at, C)
                    halves = reset_accumulators(halves, C)
                if not EVEN:
                    # Bounds of the next document were loaded one document ahead. This arithmetic overlaps the products.
                    _, next_length = locate_segment(spans, bounds, k + 1, sizes)
                    source = _choose_origin(spans, bounds, C)
                    bounds = load_segment_bounds(spans, k + 2, sizes.K)
                halves, at = _reduce_accumulators(products, ring, halves, at, 0, origin, length, spans, C)
                stop = length if EVEN else compiler_barrier_value(length)
                halves, at = _score_tiles(q, ring, halves, at, C.BN, stop, origin, length, scale, spans, G, C)
            if C.ARGMAX:
                own_length = _find_kept_length(at) if C.MASK else (None if EVEN else length)
                scale = _flag_fallbacks(at, factors, scale, C)
                unresolved = _store_document(halves, x, first, factors, k, own_length, scale, out, unresolved, sizes, C)
                at = _reset_scale_range(at, C)
                halves = reset_accumulators(halves, C)
            if not EVEN:
                previous_length, length, origin = length, next_length, source
        if not C.ARGMAX:
            scale = _flag_fallbacks(at, factors, scale, C)
            kept_length = _find_kept_length(at) if C.MASK else previous_length
            _store_document(halves, x, first, factors, end_k - 1, kept_length, scale, out, unresolved, sizes, C)
            at = _reset_scale_range(at, C)
            if not EVEN:
                halves = reset_accumulators(halves, C)  # else all loops carry `where`, although it is always 0
        task = tile_end
    if has_argmax_search(C):
        _resolve_argmax(x, D, norms, ring, q_smem, spans, out.argmax, unresolved, begin, end, sizes, G, C)


@gluon.jit
def _search_argmax(q, D, norms, ring, spans, k, row, length, phase, G: gl.constexpr, C: gl.constexpr):
    """Return, for each of 64 query rows, the first kept token that attains the maximum over document k.

    NaN is larger than all numbers.
    """
    ACC: gl.constexpr = make_accumulator_layout(C.BN, D.dtype)
    tile = ring.tiles.index(G)
    barrier = ring.search.index(G)
    column = gl.arange(0, C.BN, layout=gl.SliceLayout(0, ACC))
    best = gl.full([ACCUMULATOR_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, ACC))
    where = gl.full([ACCUMULATOR_ROWS], 0, gl.int32, gl.SliceLayout(1, ACC)) + NO_TOKEN
    for t0 in range(0, length, C.BN):
        start = choose_tile_start(spans, t0, length, C)
        mbarrier.expect(barrier, D.block_type.nbytes)
        async_load(D, [row + start, 0], barrier, tile)
        mbarrier.wait(barrier, phase)
        phase ^= 1
        S = warpgroup_mma(q, tile.permute((1, 0)), gl.full([ACCUMULATOR_ROWS, C.BN], 0.0, gl.float32, ACC))
        if C.NORMALIZE:
            if C.PRECOMPUTED_SCALES:
                mbarrier.expect(barrier, norms.block_type.nbytes)
                norm_offset = k * gl.cdiv(length, C.BN) * C.BN + t0
                async_load(norms, [norm_offset], barrier, ring.norms.inverse.index(G))
                mbarrier.wait(barrier, phase)
                phase ^= 1
            else:
                ring.norms.inverse.index(G).store(compute_tile_inverse_norms(tile, 4, C))
            S = scale_similarities(S, ring.norms.inverse.index(G).load(gl.SliceLayout(0, ACC)), C)
        if spans.Td is None:
            # No token is masked, so only NaN needs a search. A row of -inf has token 0.
            where = gl.minimum(where, gl.min(gl.where(S != S, start + column[None, :], NO_TOKEN), axis=1))
        else:
            if spans.patches is not None:
                counts = find_kept_columns(spans, k, t0 // C.BN, column)[None, :]
            else:
                counts = (column < length - start)[None, :]
            S = gl.where(counts, S, float("-inf"))
            m = gl.reduce(S, 1, nan_max)
            hit = counts & ((S == m[:, None]) | (S != S))
            first = gl.min(gl.where(hit, start + column[None, :], NO_TOKEN), axis=1)
            # A tile without a kept token has no first token. A row of -inf still has one.
            is_better = (m > best) | ((m != m) & (best == best)) | (where == NO_TOKEN)
            where = gl.where(is_better, first, where)
            best = nan_max(best, m)
    if spans.Td is None:
        where = gl.where(where == NO_TOKEN, 0, where)
    return where, phase


@gluon.jit
def _find_unresolved(first, H: gl.constexpr, k, x, argmax, sizes, layout: gl.constexpr, C: gl.constexpr):
    """Return the argmax pointers of accumulator H's rows, and which of these rows are UNRESOLVED."""
    _, _, row, ok = locate_accumulator_rows(first, H, x.parts, sizes, layout, C)
    pointers = argmax + k.to(gl.int64) * (sizes.Nq * sizes.Lq) + row
    return pointers, ok & (gl.load(pointers, mask=ok, other=0) == UNRESOLVED)


@gluon.jit
def _resolve_argmax(
    x, D, norms, ring, q_smem, spans, argmax, unresolved, begin, end, sizes, G: gl.constexpr, C: gl.constexpr
):
    """Replace each UNRESOLVED argmax of warp group G's rows, if `unresolved` flags any."""
    ROW: gl.constexpr = gl.SliceLayout(1, make_accumulator_layout(C.BN, D.dtype))
    mbarrier.arrive(ring.search.index(2), count=1)
    # Each warp reduces alone. A reduction across warps would keep a register allocated through all loops.
    unresolved = gl.convert_layout(unresolved, gl.BlockedLayout([2], [32], [4], [0]))
    if gl.max(unresolved, axis=0) > 0:
        phase = 0
        mbarrier.wait(ring.search.index(2), 0)  # both warp groups have read their last tile, all stages are free
        for task in range(begin, end):
            k = task % sizes.K
            first = locate_first_group(task // sizes.K, G, x.parts, C)
            bounds = load_segment_bounds(spans, k, sizes.K)
            row, length = locate_segment(spans, bounds, k, sizes)
            _, in_a = _find_unresolved(first, 0, k, x, argmax, sizes, ROW, C)
            _, in_b = _find_unresolved(first, 1, k, x, argmax, sizes, ROW, C)
            if spans.Td is None or gl.max((in_a | in_b).to(gl.int32), axis=0) > 0:
                q = _load_queries(x, q_smem, first, sizes, ROW, G, C)[0]
                for H in gl.static_range(2):
                    where, phase = _search_argmax(q[H], D, norms, ring, spans, k, row, length, phase, G, C)
                    pointers, is_unresolved = _find_unresolved(first, H, k, x, argmax, sizes, ROW, C)
                    where += _choose_origin(spans, bounds, C)
                    gl.store(pointers, where.to(argmax.dtype.element_ty), mask=is_unresolved)
