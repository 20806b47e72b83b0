"""Small-M variant of `dense.py`, for few query rows, which all fit one tensor core product (at most 128 columns).

Math, with an argmax over t if asked for, as in `dense.py`:

```text
score[i, k] = sum_s weight[i, s] * row_scale[i, s] * max_t <Q[i, s], D[k, t]> * token_scale[k, t]
```

The scales are inverse norms, dequantization scales, or 1. The operands of the product are swapped. Document tokens are
on the 64-row side of WGMMA, and all query rows are columns. A few query rows therefore do not leave that side empty.

The kernel is persistent and warp-specialized. One producer warp copies tiles with TMA into a pipeline of shared-memory
stages. One product serves all query rows, so the two consumer warp groups do not share tiles. Each group scores every
second document of the program and has C.STAGES pipeline stages of its own.

Main loop, with `tile` for the document tile of `slot`, and `slot = stage + g * STAGES`:

```text
producer warp:
    for documents k, k + 1 of the program, two at a time, for t0 in range(0, Ld, BN):
        for g in (0, 1), if document k + g belongs to the program:
            wait(empty[slot])
            t = min(t0, Ld - BN)                            # the last tile shifts back
            tile = TMA(D[k + g, t : t + BN])                # arrives at full[slot]
consumer warp group g:
    q = all query rows                                      # [rows, BD], in shared memory
    for every second document k of the program:
        best = -inf                                         # [BN, rows]
        for t0 in range(0, Ld, BN):
            wait(full[slot])
            S = wgmma(tile, q.T)                            # [BN, rows], asynchronous
            token_scale = inverse norms of the tile         # while the product runs, [BN]
            wait(S); arrive(empty[slot])
            best = max(best, S * token_scale[:, None])      # elementwise, no exchange between threads
        row_max = max(best, axis=0)                         # epilogue: once per document
        store the sum over each query of weight * row_scale * row_max
```

FP8, code and fp32 tokens are loaded into registers and converted, decoded or split there. WGMMA then reads its left
operand from registers, and `empty` is released before the product.

Warp roles:

```text
role            warps  work
consumers 0, 1  4 + 4  conversion, products, token norms, maxima, epilogue
producer        1      TMA copies
```

Barriers, for 2 * STAGES slots:

```text
barrier      count  arriving                                    waiting
full[slot]   1      TMA, with the bytes of the copies           consumer slot // STAGES
empty[slot]  1      consumer, after its last read of the tile   producer
```

Invariants:

- There is one row tile, so the n-th pair of a program is a document. Queries have no `parts`.
- `Ld >= BN` and `d <= BD`. The last tile shifts back and repeats tokens.
- Both consumers are independent. There is no ping-pong barrier.
- The argmax treats NaN as larger than all numbers, and the first token wins a tie. No second pass is needed.
- Scores have the same bits as in the other kernels. Swapping the operands does not change the order of a sum.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common.fp32 import FP16_LOW_SCALE, mark_fallback_scales, split_rows
from ...common.primitives import load_query_mask, load_query_weight, nan_max, sum_in_order
from ...formats.bits import get_code_bits, is_rotated
from ...formats.encoded import is_fp8, needs_power_scaling
from .accumulators import join_terms, load_accumulator_queries, locate_accumulator_rows
from .bits import load_numbers
from .convert import convert_queries, fp8_to_fp16, load_tile_scales
from .int8_terms import (
    compute_fallback_maxima,
    dequantize_row_maxima,
    has_fallback_rows,
    load_document_scale,
    store_query_terms,
)
from .norms import compute_row_inverse_norms, compute_tile_inverse_norms, scale_similarities
from .pipeline import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    PipelineNorms,
    TilePipeline,
    advance_stage,
    copies_scales,
    get_converted_dtype,
    get_tile_block,
    make_accumulator_layout,
    make_tile_pipeline,
    negates_similarities,
)


@triton.constexpr_function
def _count_columns(C):
    """Return the columns of a product: one per query row, or one per int8 term of a query row."""
    return C.MMA_ROWS * max(C.INT8_TERMS, 1)


@triton.constexpr_function
def converts_tokens(C):
    """Return whether registers hold tokens that are converted to fp16: FP8 next to other queries, and fp32."""
    return C.FP32_TERMS > 0 or (is_fp8(C.ENCODING) and C.ENCODING != "fp8_fp8")


@triton.constexpr_function
def _loads_scales(C):
    """Return whether consumers load the scales of tokens from global memory."""
    if is_rotated(C.ENCODING):
        return C.PRECOMPUTED_SCALES
    return is_fp8(C.ENCODING) and C.ENCODING != "fp8_fp8"


@triton.constexpr_function
def get_small_m_registers(C):
    """Return the registers per thread of the second consumer and of the producer.

    The first consumer gets the rest, as many as the second.
    """
    return [104, 24] if C.PROGRAMS_PER_SM == 2 else [CONSUMER_REGISTERS, PRODUCER_REGISTERS]


@gluon.jit
def make_small_m_pipeline(D, norms, C: gl.constexpr):
    """Allocate and initialize a pipeline of C.STAGES stages for each warp group, and allocate room for the query rows.

    Returns:
        The `TilePipeline`, with token scales if they are precomputed, and the shared memory of the query rows. Each
        warp group has its own copy of the query rows.
    """
    CONVERTED: gl.constexpr = converts_tokens(C) or get_code_bits(C.ENCODING) > 0
    DTYPE: gl.constexpr = get_converted_dtype(C) if CONVERTED else D.dtype
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, 2) if CONVERTED else D.layout
    TILE: gl.constexpr = D.layout
    ring = make_tile_pipeline(D.dtype, TILE, 2 * C.STAGES, 1, get_tile_block(C))
    if C.PRECOMPUTED_SCALES and copies_scales(C):
        scales = gl.allocate_shared_memory(gl.float32, [2 * C.STAGES, C.BN], norms.layout)
        ring = TilePipeline(ring.tiles, ring.full, ring.empty, 0, 0, PipelineNorms(scales, 0))
    return ring, gl.allocate_shared_memory(DTYPE, [4 if C.FP32_TERMS == 2 else 2, _count_columns(C), C.BD], OPERAND)


@gluon.jit
def _load_queries(x, q_smem, sizes, layout: gl.constexpr, G: gl.constexpr, C: gl.constexpr):
    """Load all query rows as operands of the products, and the factors of their maxima in `layout`.

    Returns:
        The operands hi and lo, and the factors. lo differs from hi with two FP32_TERMS only. The factor is negative
        for rows that int8 or fp16 terms cannot represent.
    """
    smem = q_smem.index(G)
    low = q_smem.index(G + 2 if C.FP32_TERMS == 2 else G)
    factor = 0
    if C.INT8_TERMS > 0:
        factor = store_query_terms(x.Q, smem, 0, 0, 1, sizes, x.d, layout, C)
    else:
        rows = load_accumulator_queries(x.Q, 0, 0, 1, sizes, x.d, C)
        if C.FP32_TERMS > 0:
            terms, scale, is_exact, is_zero = split_rows(rows, C.FP32_TERMS)
            rows, lo = terms
            if C.FP32_TERMS == 2:
                low.store(lo)
            factor = gl.convert_layout(mark_fallback_scales(scale, is_exact, is_zero), layout)
        elif is_fp8(C.ENCODING):
            rows, factor = convert_queries(rows, layout, C)
        elif C.NORMALIZE:
            factor = gl.convert_layout(compute_row_inverse_norms(rows), layout)
        smem.store(rows)
    fence_async_shared()
    return (smem.permute((1, 0)), low.permute((1, 0))), factor


@gluon.jit
def _advance_tile(k, t0, Ld, C: gl.constexpr):
    """Return the document and the first token of the warp group's next tile."""
    is_last = t0 + C.BN >= Ld
    return gl.where(is_last, k + 2, k), gl.where(is_last, 0, t0 + C.BN)


@gluon.jit
def _prefetch_scales(numbers, k, t0, sizes, layout: gl.constexpr, C: gl.constexpr):
    """Load the token scales of the tile after the one at token t0 of document k.

    Returns:
        The scales, or 0 unless `_loads_scales`, then the document and the first token of that tile.
    """
    scale = 0
    if _loads_scales(C):
        k, t0 = _advance_tile(k, t0, sizes.Ld, C)
        scale = load_tile_scales(numbers, gl.minimum(k, sizes.K - 1), t0, sizes.Ld, layout, C)
    return scale, k, t0


@gluon.jit
def _compute_split_similarities(x, q, S, layout: gl.constexpr, C: gl.constexpr):
    """Compute the similarities of fp32 tokens by one or three fp16 products, see `_compute_similarities`.

    The similarities of fallback tokens, which fp16 terms cannot represent, are -inf. Their flags are returned last.
    """
    terms, scale, is_exact, _ = split_rows(x, C.FP32_TERMS)
    hi, lo = terms
    if C.FP32_TERMS == 2:
        S = warpgroup_mma(lo, q[0], S, use_acc=False, is_async=True)
        S = warpgroup_mma(hi, q[1], S, is_async=True)
    else:
        S = warpgroup_mma(hi, q[0], S, use_acc=False, is_async=True)
    scale = gl.convert_layout(scale, layout)
    is_exact = gl.convert_layout(is_exact.to(gl.int32), layout)
    S = warpgroup_mma_wait(0, [S])
    if C.FP32_TERMS == 2:
        S = warpgroup_mma(hi, q[0], S * (1.0 / FP16_LOW_SCALE), is_async=True)
        S = warpgroup_mma_wait(0, [S])
    return S, gl.where((is_exact > 0)[:, None], S * scale[:, None], float("-inf")), 1 - is_exact


@gluon.jit
def _compute_similarities(ring, q, S, scale, slot, phase, layout: gl.constexpr, C: gl.constexpr):
    """Compute the similarities of a tile's tokens to all query rows, times the token scales or inverse token norms.

    If `negates_similarities`, `scale` is the scale of the document.

    Returns:
        The product, whose registers the next product reuses, the similarities `[BN, rows]`, and with C.FP32_TERMS
        the flags of fallback tokens.
    """
    BITS: gl.constexpr = get_code_bits(C.ENCODING) > 0
    mbarrier.wait(ring.full.index(slot), phase)
    tile = ring.tiles.index(slot)
    is_fallback = 0
    if converts_tokens(C):
        a = tile.load(gl.DotOperandLayout(0, S.type.layout, 2))
        mbarrier.arrive(ring.empty.index(slot), count=1)
        if C.FP32_TERMS > 0:
            S, x, is_fallback = _compute_split_similarities(a, q, S, layout, C)
        else:
            S = warpgroup_mma(fp8_to_fp16(a, C), q[0], S, use_acc=False, is_async=True)
            S = warpgroup_mma_wait(0, [S])
            x = S * scale[:, None]
    else:
        if BITS:
            # The token is the left operand in registers, and the stage is free before the product.
            a = gl.convert_layout(load_numbers(tile, True, C), gl.DotOperandLayout(0, S.type.layout, 4))
            if C.PRECOMPUTED_SCALES and copies_scales(C):
                scale = ring.norms.inverse.index(slot).load(layout)
            mbarrier.arrive(ring.empty.index(slot), count=1)
            S = warpgroup_mma(a, q[0], S, use_acc=False, is_async=True)
        else:
            S = warpgroup_mma(tile, q[0], S, use_acc=False, is_async=True)
        if C.NORMALIZE:
            scale = gl.convert_layout(compute_tile_inverse_norms(tile, 4, C), layout)
        elif C.PRECOMPUTED_SCALES and not BITS:
            scale = ring.norms.inverse.index(slot).load(layout)
        S = warpgroup_mma_wait(0, [S])
        if not BITS:
            mbarrier.arrive(ring.empty.index(slot), count=1)
        x = join_terms(S, C)
        if C.NORMALIZE or C.PRECOMPUTED_SCALES:
            x = x.to(gl.float32) * scale[:, None]
        elif negates_similarities(C):
            x = scale_similarities(x, scale, C)
    return S, x, is_fallback


@gluon.jit
def _merge_neighbors(similarities, C: gl.constexpr):
    """Return the maxima of pairs of tokens of code documents that a thread has, `[BN / 2, rows]`, or `similarities`.

    The maximum of both and the running maximum is one instruction for integers.
    """
    if get_code_bits(C.ENCODING) > 0:
        x = gl.reshape(similarities, (C.BN // 16, 2, 8, similarities.shape[1]))
        similarities = gl.reshape(gl.reduce(x, 1, nan_max), (C.BN // 2, similarities.shape[1]))
    return similarities


@gluon.jit
def _update_maxima(best, where, similarities, start, C: gl.constexpr):
    """Return the running maxima, and the first tokens of their tiles, after a tile that begins with token `start`.

    The first NaN wins permanently.
    """
    if C.ARGMAX:
        where = gl.where(((similarities > best) | (similarities != similarities)) & (best == best), start, where)
    return nan_max(best, similarities), where


@gluon.jit
def _select_first_largest(v0, t0, v1, t1):
    """Return the larger of two values with its token, or the lower token if they are equal.

    NaN is larger than all numbers.
    """
    is_larger = (v1 > v0) | ((v1 != v1) & (v0 == v0))
    is_equal = (v1 == v0) | ((v1 != v1) & (v0 != v0))
    return nan_max(v0, v1), gl.where(is_larger | (is_equal & (t1 < t0)), t1, t0)


@triton.constexpr_function
def _make_column_layout(tokens, rows):
    """Return a layout of maxima `[tokens, rows]` in which 4 lanes of a warp have all tokens of a row."""
    lanes, warps = [[tokens // 4, 0], [tokens // 2, 0], [0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16]]
    registers = [[1 << n, 0] for n in range(tokens.bit_length() - 3)]
    registers += [[0, 1 << n] for n in range(5, rows.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [tokens, rows])


@gluon.jit
def _reduce_tokens(best, where, layout: gl.constexpr, C: gl.constexpr):
    """Return the maximum of each query row and its argmax, in `layout`."""
    if C.ARGMAX:
        t = gl.arange(0, C.BN, layout=gl.SliceLayout(1, best.type.layout))
        best, where = gl.reduce((best, where + t[:, None]), 0, _select_first_largest)
        where = gl.convert_layout(where, layout)
    else:
        if get_code_bits(C.ENCODING) > 0:
            best = gl.convert_layout(best, _make_column_layout(best.shape[0], best.shape[1]))
        best = gl.reduce(best, 0, nan_max)
    return gl.convert_layout(best, layout), where


@gluon.jit
def _store_scores(best, where, Q, k, out, sizes, C: gl.constexpr):
    """Store the scores of document k, `[Nq, K]`, and the argmax, which is -1 for masked rows (epilogue)."""
    GROUPS: gl.constexpr = C.MMA_ROWS // C.ROWS_PER_QUERY
    LAYOUT: gl.constexpr = best.type.layout
    i, s, row, ok = locate_accumulator_rows(0, 0, 1, sizes, LAYOUT, C)
    keep = load_query_mask(Q, i, s, ok)
    if C.ARGMAX:
        pointers = out.argmax + k.to(gl.int64) * (sizes.Nq * sizes.Lq) + row
        gl.store(pointers, gl.where(keep, where, -1).to(out.argmax.dtype.element_ty), mask=ok)
    total = sum_in_order(gl.where(keep, load_query_weight(Q, i, s, keep) * best, 0.0), GROUPS, C.ROWS_PER_QUERY)
    i = gl.arange(0, GROUPS, layout=total.type.layout)
    gl.store(out.scores + i.to(gl.int64) * sizes.K + k, total, mask=i < sizes.Nq)


@gluon.jit
def _dequantize_maxima(best, factor, document_scale, has_fallback, fallback_tokens, x, k, sizes, C: gl.constexpr):
    """Return the row maxima times their factors, with the maxima of fallback rows and tokens added."""
    if C.INT8_TERMS > 0:
        best = dequantize_row_maxima(
            best, factor, document_scale, has_fallback, x.Q, x.numbers, 0, 0, 1, k, sizes, x.d, C
        )
    elif C.FP32_TERMS > 0:
        best = gl.where(factor < 0, float("-inf"), best * factor)
        if has_fallback + gl.max(fallback_tokens, axis=0) > 0:
            best = nan_max(best, compute_fallback_maxima(x.Q, x.numbers, 0, 0, 1, k, sizes, x.d, factor, C))
    elif C.NORMALIZE or needs_power_scaling(x.Q.ptr.dtype.element_ty, C.ENCODING):
        if negates_similarities(C):
            best = best * gl.abs(document_scale)
        best = best * factor
    return best


@gluon.jit
def consume_small_m(x, ring, q_smem, out, begin, end, sizes, G: gl.constexpr, C: gl.constexpr):
    """Score all query rows against every second document of the program (consumer warp group G).

    With `_loads_scales`, token scales are not in the pipeline. They are loaded from global memory two tiles ahead.
    """
    ACC: gl.constexpr = make_accumulator_layout(_count_columns(C), q_smem.dtype)
    ROW: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0]))
    stage = 0
    phase = 0
    S = gl.full([C.BN, _count_columns(C)], 0, gl.int32 if C.INT8_TERMS > 0 else gl.float32, ACC)
    if C.INT8_TERMS > 0 and not C.PRECOMPUTED_SCALES:
        lowest = gl.full_like(join_terms(S, C), -(2**31))
    else:
        lowest = gl.full_like(join_terms(S, C).to(gl.float32), float("-inf"))
    TOKEN: gl.constexpr = gl.SliceLayout(1, lowest.type.layout)
    lowest = _merge_neighbors(lowest, C)
    q, factor = _load_queries(x, q_smem, sizes, ROW, G, C)
    has_fallback = has_fallback_rows(factor) if C.INT8_TERMS > 0 or C.FP32_TERMS > 0 else 0
    scale, k_ahead, t_ahead = _prefetch_scales(x.numbers, begin + G - 2, sizes.Ld, sizes, TOKEN, C)
    next_scale, k_ahead, t_ahead = _prefetch_scales(x.numbers, k_ahead, t_ahead, sizes, TOKEN, C)
    HAS_NEXT: gl.constexpr = negates_similarities(C)
    document_scale = 0.0
    next_document_scale = load_document_scale(x.numbers, gl.minimum(begin + G, sizes.K - 1), C) if HAS_NEXT else 0.0
    for k in range(begin + G, end, 2):
        best = lowest
        where = gl.full_like(lowest, 0).to(gl.int32) if C.ARGMAX else 0
        fallback_tokens = gl.full([C.BN], 0, gl.int32, TOKEN) if C.FP32_TERMS > 0 else 0
        if C.INT8_TERMS > 0:
            document_scale = load_document_scale(x.numbers, k, C)
        if HAS_NEXT:  # loaded one document ahead, because the first tile needs it
            document_scale = next_document_scale
            next_document_scale = load_document_scale(x.numbers, gl.minimum(k + 2, sizes.K - 1), C)
        for t0 in range(0, sizes.Ld, C.BN):
            later_scale, k_ahead, t_ahead = _prefetch_scales(x.numbers, k_ahead, t_ahead, sizes, TOKEN, C)
            S, similarities, is_fallback = _compute_similarities(
                ring, q, S, document_scale if HAS_NEXT else scale, stage + G * C.STAGES, phase, TOKEN, C
            )
            similarities = _merge_neighbors(similarities, C)
            best, where = _update_maxima(best, where, similarities, gl.minimum(t0, sizes.Ld - C.BN), C)
            fallback_tokens = fallback_tokens | is_fallback
            scale, next_scale = next_scale, later_scale
            stage, phase = advance_stage(stage, phase, C)
        best, where = _reduce_tokens(best, where, ROW, C)
        best = _dequantize_maxima(best, factor, document_scale, has_fallback, fallback_tokens, x, k, sizes, C)
        _store_scores(best, where, x.Q, k, out, sizes, C)
