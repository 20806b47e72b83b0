"""sm_90 forward kernel for packed query rows, documents of any length, and document masks (`d <= 128`, half dtypes).

Math, with an argmax over t if asked for, for every query row r and document k:

```text
maxima[k, r] = max over the kept tokens t of document k of <Q[r], D[k, t]>
```

A second kernel, `maxsim_row_sums`, sums the weighted maxima of each query. With C.SUM_ROWS this kernel does so itself
and stores scores. That needs dense queries, whose rows are then arranged as in `dense.py`.

`main_loop.py` describes the loop, the warp roles, the barriers, and the invariants. Programs own ranges of (row tile,
document) pairs of nearly equal cost (`schedule.py`). With a mask, two mask warps (`masks.py`) overwrite masked tokens
before the consumers read a tile. The maxima of a document without a kept token are arbitrary, and `maxsim_row_sums`
does not use them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...common.arguments import SizeArgs
from .main_loop import ACCUMULATORS, QueryOperands, consume, produce
from .masks import overwrite_masked_tokens
from .pipeline import CONSUMER_REGISTERS, PRODUCER_REGISTERS, TilePipeline, make_pipeline
from .schedule import DocumentSegments, estimate_costs, list_block_documents, load_segment_bounds, partition_pairs


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
    sizes = SizeArgs(Nq, K, Lq, None)
    spans = DocumentSegments(segments, patches, tiles, Td)
    x = QueryOperands(Q, None, 1 if C.SUM_ROWS else None, d)
    row_tiles = gl.cdiv(Nq * (C.ROWS_PER_QUERY if C.SUM_ROWS else Lq), ACCUMULATORS * C.MMA_ROWS)
    k = list_block_documents(0)
    bounds = load_segment_bounds(spans, k, K)
    ring, q_smem = make_pipeline(D, C)  # overlaps the load of the bounds
    begin, end = partition_pairs(spans, estimate_costs(spans, bounds, k, K, C), row_tiles, K, C)
    if patches is None:
        gl.warp_specialize(
            [
                (consume, (x, D, None, ring, q_smem, spans, found, begin, end, sizes, 0, C)),
                (consume, (x, D, None, ring, q_smem, spans, found, begin, end, sizes, 1, C)),
                (produce, (D, None, ring, spans, begin, end, sizes, C)),
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
                (consume, (x, D, None, patched, q_smem, spans, found, begin, end, sizes, 0, C)),
                (consume, (x, D, None, patched, q_smem, spans, found, begin, end, sizes, 1, C)),
                (produce, (D, None, ring, spans, begin, end, sizes, C)),
                (overwrite_masked_tokens, (spans, ring, ready, begin, end, K, d, 0, C)),
                (overwrite_masked_tokens, (spans, ring, ready, begin, end, K, d, 1, C)),
            ],
            [4, 1, 1, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
