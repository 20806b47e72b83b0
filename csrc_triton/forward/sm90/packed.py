"""sm_90 forward kernel for packed query rows, documents of any length, and document masks (`d <= 128`, half dtypes).

Math, with an argmax over t if asked for, for every query row r and document k:

```text
maxima[k, r] = max over the kept tokens t of document k of <Q[r], D[k, t]>
```

A second kernel, `maxsim_row_sums`, sums the weighted maxima of each query. With C.SUM_ROWS this kernel does so itself
and stores scores. That needs dense queries, whose rows are then arranged as in `dense.py`.

`main_loop.py` describes the loop, the warp roles, the barriers, and the invariants. Programs own ranges of (row tile,
document) pairs of nearly equal cost (`schedule.py`).

With a mask, two mask warps run between the producer and the consumers. After TMA has copied a tile, they overwrite each
masked token of the tile with the first kept token of the same document. Only then may the consumers read the pipeline
stage. A repeated token changes no maximum, NaN included. The consumers therefore multiply and reduce tiles as if there
were no mask. `maxsim_patches` computes in an earlier launch which tokens to overwrite (`MaskPatchArgs`). A mask warp
handles 32 tokens of every tile, so BN is 64. The maxima of a document without a kept token are arbitrary, and
`maxsim_row_sums` does not use them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...common.arguments import SizeArgs
from .gluon_names import reinterpret
from .main_loop import ACCUMULATORS, QueryOperands, consume, produce
from .pipeline import CONSUMER_REGISTERS, PRODUCER_REGISTERS, TilePipeline, advance_stage, make_pipeline
from .schedule import (
    DocumentSegments,
    compiler_barrier_value,
    estimate_costs,
    find_end,
    list_block_documents,
    load_segment_bounds,
    partition_pairs,
    store_empty_scores,
)

WARP_LANES = gl.constexpr(32)


@gluon.jit(do_not_specialize=["Nq", "K", "Lq", "Td", "tiles"])
def maxsim_row_maxima_sm90(Q, D, segments, patches, tiles, out, Nq, K, Lq, Td, d, C: gl.constexpr):
    """Store the maxima `[K, Nq * Lq]` of query rows over the kept tokens of documents, or scores with C.SUM_ROWS.

    A maximum is arbitrary if the document keeps no token. The argmax is -1 for such documents and for masked rows.

    Args:
        Q: `QueryArgs` of the query rows, Nq times Lq.
        D: Tensor descriptor of all document tokens `[Td, d]`, in blocks `[BN, BD]`.
        segments: `SegmentArgs` of the documents.
        patches: `MaskPatchArgs`, or None without a document mask.
        tiles: Tiles per document in `patches`, else None.
        out: `RowMaximaOutputArgs`.
        Nq: Number of queries.
        K: Number of documents.
        Lq: Rows of each query.
        Td: Total number of document tokens.
        d: Number of features.
        C: `Sm90Config`.
    """
    spans = DocumentSegments(segments, patches, tiles, Td)
    HAS_ENDS: gl.constexpr = (
        C.SUM_ROWS and not C.ARGMAX and segments.offsets is not None and segments.lengths is not None
    )
    if HAS_ENDS:
        end = find_end(segments, K)
        store_empty_scores(Q, spans, out, end, K, SizeArgs(Nq, K, Lq, None), C)
        K = end
    sizes = SizeArgs(Nq, K, Lq, None)
    x = QueryOperands(Q, None, 1 if C.SUM_ROWS else None, d)
    row_tiles = gl.cdiv(Nq * (C.ROWS_PER_QUERY if C.SUM_ROWS else Lq), ACCUMULATORS * C.MMA_ROWS)
    k = list_block_documents(0)
    bounds = load_segment_bounds(spans, k, K)
    ring, q_smem = make_pipeline(D, C)  # overlaps the load of the bounds
    begin, end = partition_pairs(spans, estimate_costs(spans, bounds, k, K, C), row_tiles, K, C)
    if patches is None:
        gl.warp_specialize(
            [
                (consume, (x, D, None, ring, q_smem, spans, out, begin, end, sizes, 0, C)),
                (consume, (x, D, None, ring, q_smem, spans, out, begin, end, sizes, 1, C)),
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
        patched_ring = TilePipeline(ring.tiles, ready, ring.empty, ring.turn, ring.search, ring.norms)
        gl.warp_specialize(
            [
                (consume, (x, D, None, patched_ring, q_smem, spans, out, begin, end, sizes, 0, C)),
                (consume, (x, D, None, patched_ring, q_smem, spans, out, begin, end, sizes, 1, C)),
                (produce, (D, None, ring, spans, begin, end, sizes, C)),
                (_overwrite_masked_tokens, (spans, ring, ready, begin, end, K, d, 0, C)),
                (_overwrite_masked_tokens, (spans, ring, ready, begin, end, K, d, 1, C)),
            ],
            [4, 1, 1, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )


@gluon.jit
def _overwrite_masked_tokens(spans, ring, ready, begin, end, K, d, W: gl.constexpr, C: gl.constexpr):
    """Overwrite the masked tokens among tokens 32 W to 32 W + 31 of every tile (mask warp W).

    Both mask warps arrive at `ready[stage]` when they are done with a tile.
    """
    gl.static_assert(C.BN == 2 * WARP_LANES)
    stage = 0
    phase = 0
    lane = gl.arange(0, WARP_LANES, layout=gl.BlockedLayout([1], [WARP_LANES], [1], [0]))
    k = begin % K
    length = _load_kept_length(spans, k)
    masked_bits = _load_masked_bits(spans, k, 0, lane, W)
    words = _load_token_words(spans, k, _load_source_token(spans, k), lane, d, C)
    source = _load_source_token(spans, (begin + 1) % K)
    for task in range(begin, end):
        k = task % K
        next_document = (task + 1) % K
        document_length = gl.maximum(compiler_barrier_value(length), 1)
        # Load one document ahead, to hide the latency of global memory.
        length = _load_kept_length(spans, next_document)
        next_patch = (
            _load_token_words(spans, next_document, source, lane, d, C),
            _load_masked_bits(spans, next_document, 0, lane, W),
        )
        source = _load_source_token(spans, (task + 2) % K)
        for t0 in range(0, document_length, C.BN):
            tile = t0 // C.BN
            if (tile > 0) & (tile % WARP_LANES == 0):
                masked_bits = _load_masked_bits(spans, k, tile, lane, W)
            bits = gl.sum(gl.where(lane == tile % WARP_LANES, masked_bits, 0), axis=0)
            mbarrier.wait(ring.full.index(stage), phase)
            if bits != 0:
                _overwrite(ring, stage * (C.BN * C.BD // 64) + WARP_LANES * W, bits, words, lane, C)
                fence_async_shared()
            mbarrier.arrive(ready.index(stage), count=1)
            stage, phase = advance_stage(stage, phase, C)
        words, masked_bits = next_patch


@gluon.jit
def _load_kept_length(spans, k):
    """Load the number of tokens from the first to the last kept token of document k."""
    return gl.load(spans.segments.lengths + k)


@gluon.jit
def _load_masked_bits(spans, k, tile, lane, W: gl.constexpr):
    """Load the mask bits of part W of up to 32 tiles from `tile` on, one tile per lane. A set bit is masked."""
    n = tile + lane
    return gl.load(spans.patches.bits + (k.to(gl.int64) * 2 + W) * spans.tiles + n, mask=n < spans.tiles, other=0)


@gluon.jit
def _load_source_token(spans, k):
    """Load the index of the first kept token of document k, which overwrites masked tokens."""
    return gl.load(spans.patches.sources + k)


@gluon.jit
def _load_token_words(spans, k, source, lane, d, C: gl.constexpr):
    """Load token `source` of document k, 4 bytes of every 128 bytes in each lane."""
    tokens = spans.patches.tokens.to(gl.pointer_type(gl.int32))
    row = tokens + (k.to(gl.int64) * spans.segments.d_each + source) * (d // 2) + lane
    a = gl.load(row, mask=lane < d // 2, other=0)
    b = a
    if C.BD == 128:
        b = gl.load(row + WARP_LANES, mask=WARP_LANES + lane < d // 2, other=0)
    return a, b


@gluon.jit
def _overwrite(ring, first, bits, words, lane, C: gl.constexpr):
    """Overwrite the tokens that are set in `bits`, out of 32 tokens, with `words`.

    A tile is stored in panels of lines, and a line has 128 bytes of one token. `first` is the line of the first token.
    The eight swizzled versions of a line are built four at a time, because registers do not suffice for all eight.
    """
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lines = reinterpret(ring.tiles, gl.int32, [C.STAGES * C.BN * C.BD // 64, WARP_LANES], PLAIN)
    for half in gl.static_range(2):
        a = _make_four_lines(words[0], lane, 4 * half)
        b = _make_four_lines(words[1], lane, 4 * half)
        for group in gl.static_range(WARP_LANES // 8):
            for n in gl.static_range(4):
                _overwrite_one(lines, first, 8 * group + 4 * half + n, bits, a[n], b[n], C)


@gluon.jit
def _overwrite_one(lines, first, n: gl.constexpr, bits, a, b, C: gl.constexpr):
    """Overwrite token n with the swizzled line `a`, and `b` in the second panel, if its bit is set."""
    if (bits >> n) & 1 != 0:
        lines.index(first + n).store(a)
        if C.BD == 128:
            lines.index(first + C.BN + n).store(b)


@gluon.jit
def _make_four_lines(words, lane, n: gl.constexpr):
    """Return the swizzled lines of a token for tokens n to n + 3 of each 8."""
    return (
        _make_line(words, lane, n),
        _make_line(words, lane, n + 1),
        _make_line(words, lane, n + 2),
        _make_line(words, lane, n + 3),
    )


@gluon.jit
def _make_line(words, lane, n: gl.constexpr):
    """Return the words of a line in the 128-byte swizzle of line n, where n is the token index modulo 8.

    The swizzle stores the m-th 16 bytes of the line at position m ^ n.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
        "=r,r,r",
        [words, lane ^ (n << 2)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
