"""sm_90 forward kernel for dense documents without a mask (`d <= 128`): many query rows, or few with C.SMALL_M.

Math, with an argmax over t if asked for:

```text
score[i, k] = sum_s weight[i, s] * inverse_norm(Q[i, s]) * max_t <Q[i, s], D[k, t]> * inverse_norm(D[k, t])
```

The inverse norms are 1 unless C.NORMALIZE. int8 and FP8 documents have dequantization scales instead (`int8_terms.py`,
`convert.py`). fp32 tokens are split into fp16 terms (`convert.py`). A query of more than C.ROWS_PER_QUERY tokens is cut
into `parts`, whose sums a second launch adds.

`main_loop.py` describes the loop, the warp roles, the barriers, and the invariants. With C.SMALL_M, `consume_small_m`
of `small_m.py` runs instead of `consume`, and `small_m.py` describes its loop, warp roles, and barriers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.arguments import RowMaximaOutputArgs
from ...formats.encoded import is_fp8
from .convert import convert_documents, count_conversion_warps, get_conversion_registers
from .main_loop import ACCUMULATORS, QueryOperands, consume, produce
from .norms import NORM_CONSUMER_REGISTERS, NORM_PRODUCER_REGISTERS, NORM_REGISTERS, NORM_WARPS, produce_norms
from .pipeline import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    get_tile_block,
    has_conversion_warps,
    make_pipeline,
    make_tile_pipeline,
)
from .schedule import DocumentSegments, partition_evenly
from .small_m import consume_small_m, get_small_m_registers, make_small_m_pipeline


@gluon.jit(do_not_specialize=["parts"])
def maxsim_forward_sm90(Q, D, norms, numbers, out, sizes, d, parts, C: gl.constexpr):
    """Store the scores `[groups, K]` of all groups of query rows and documents, and the argmax if asked for.

    A group is a query of at most C.ROWS_PER_QUERY tokens, or one of the `parts` of a longer query.

    Args:
        Q: `QueryArgs` of the query tokens `[Nq, Lq, d]`.
        D: Tensor descriptor of all document tokens `[K * Ld, d]`, in blocks `[BN, BD]`. With C.PRECOMPUTED_TERMS, of
            the terms that `split_tokens` stores.
        norms: With C.PRECOMPUTED_SCALES, tensor descriptor of the inverse norms that `maxsim_tile_norms` stores, or of
            the scales of int8 tokens or of C.PRECOMPUTED_TERMS. FP8 scales come with `numbers`.
        numbers: `EncodedDocumentArgs` of int8, FP8 or fp32 documents, else None.
        out: `OutputArgs`, the scores in fp32 and the argmax `[K, Nq, Lq]`.
        sizes: `SizeArgs`.
        d: Number of features.
        parts: Groups of each query.
        C: `Sm90Config`.
    """
    gl.static_assert(C.SMALL_M or C.MMA_ROWS * (2 if C.INT8_TERMS == 2 else 1) == 64)
    gl.static_assert(not (C.SMALL_M and C.OPERAND_IN_REGISTERS))
    gl.static_assert(C.FP32_TERMS == 0 or C.SMALL_M != C.OPERAND_IN_REGISTERS)
    gl.static_assert(C.PRECOMPUTED_TERMS or not (C.MASK or ((C.ARGMAX or C.NORMALIZE) and C.FP32_TERMS > 0)))
    row_tiles = gl.cdiv(sizes.Nq * parts * C.ROWS_PER_QUERY, ACCUMULATORS * C.MMA_ROWS)
    begin, end = partition_evenly(row_tiles, sizes.K)
    spans = DocumentSegments(None, None, None, None)
    out = RowMaximaOutputArgs(None, out.scores, sizes.K, out.argmax)
    if C.SMALL_M:
        ring, q_smem = make_small_m_pipeline(D, norms, C)
    else:
        ring, q_smem = make_pipeline(D, C, norms)
    x = QueryOperands(Q, None if is_fp8(C.ENCODING) and C.PRECOMPUTED_SCALES and not C.SMALL_M else numbers, parts, d)
    if C.SMALL_M:
        gl.warp_specialize(
            [
                (consume_small_m, (x, ring, q_smem, out, begin, end, sizes, 0, C)),
                (consume_small_m, (x, ring, q_smem, out, begin, end, sizes, 1, C)),
                (produce, (D, norms, ring, spans, begin, end, sizes, C)),
            ],
            [4, 1],
            get_small_m_registers(C),
        )
    elif has_conversion_warps(C):
        RAW: gl.constexpr = D.layout
        raw = make_tile_pipeline(D.dtype, RAW, C.STAGES, 1, get_tile_block(C))
        gl.warp_specialize(
            [
                (consume, (x, D, norms, ring, q_smem, spans, out, begin, end, sizes, 0, C)),
                (consume, (x, D, norms, ring, q_smem, spans, out, begin, end, sizes, 1, C)),
                (produce, (D, norms, raw, spans, begin, end, sizes, C)),
                (convert_documents, (raw, ring, numbers, begin, end, sizes, C)),
            ],
            [4, 1, count_conversion_warps(C)],
            get_conversion_registers(C),
        )
    elif C.NORMALIZE and not C.PRECOMPUTED_SCALES:
        gl.warp_specialize(
            [
                (consume, (x, D, norms, ring, q_smem, spans, out, begin, end, sizes, 0, C)),
                (consume, (x, D, norms, ring, q_smem, spans, out, begin, end, sizes, 1, C)),
                (produce, (D, norms, ring, spans, begin, end, sizes, C)),
                (produce_norms, (ring, begin, end, sizes.Ld, C)),
            ],
            [4, 1, NORM_WARPS],
            [NORM_CONSUMER_REGISTERS, NORM_PRODUCER_REGISTERS, NORM_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (x, D, norms, ring, q_smem, spans, out, begin, end, sizes, 0, C)),
                (consume, (x, D, norms, ring, q_smem, spans, out, begin, end, sizes, 1, C)),
                (produce, (D, norms, ring, spans, begin, end, sizes, C)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
