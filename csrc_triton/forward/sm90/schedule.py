"""Work partition of the sm_90 kernels: location of each document in D, and the pairs of each program.

The kernels are persistent. Each program scores a contiguous range of the (row tile, document) pairs, ordered by row
tile. Even documents, which all have sizes.Ld tokens, are split into ranges of equal size. Other documents have
different lengths, so programs get ranges of nearly equal cost. The cost of a document is its number of tiles plus a
measured constant. Every program computes its own range from the lengths, because the host does not know them.

The search of a subset on a GPU pads the list of documents with many empty ones, because the host does not know how many
documents the subset has. `find_end` and `store_empty_scores` take them out of the ranges.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.primitives import choose_empty_score, load_query_mask
from ...common.segments import clamp_document_segment, load_document_bounds

SCHEDULE_BLOCK_DOCUMENTS = gl.constexpr(1024)
END_BLOCK_DOCUMENTS = gl.constexpr(8192)  # lengths that are loaded at once to find empty documents at the end
# A longer document costs the same as one of this length, so that the cost of a block fits 32 bits.
MAX_COSTED_TOKENS = gl.constexpr(2**24)
MASK_WORD_TOKENS = gl.constexpr(32)  # bits of a mask word of `MaskPatchArgs`


class DocumentSegments(NamedTuple):
    """Location of the documents among the rows of D.

    `Td` is the number of rows of D, or None for even documents, which all have sizes.Ld tokens. The other fields are
    then None, too. Kernels compare `Td` with None and not `segments`, because Triton 3.6 cannot compare a tuple that
    contains None.

    `segments` is a `SegmentArgs`. `patches` is a `MaskPatchArgs` for documents with a mask, else None. A masked
    document begins with its first kept token and has at most `tiles` tiles.
    """

    segments: Any
    patches: Any
    tiles: Any
    Td: Any


@gluon.jit
def compiler_barrier_value(x):
    """Return `x` opaquely, so that the compiler neither removes it nor computes anything derived from it earlier.

    Without this, Triton loses a length that only bounds a loop and uses the length of the first document for all. In
    addition, work that depends on the number of remaining tokens is moved between the issued products.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_segment_bounds(spans, k, K):
    """Load the stored bounds of document k for `locate_segment`. Even documents have none.

    Callers load them one document ahead, to hide the latency of global memory.
    """
    first, length_or_end = 0, 0
    if spans.Td is not None:
        first, length_or_end = load_document_bounds(spans.segments, k.to(gl.int64), k < K)
    if spans.patches is not None:
        first = gl.load(spans.patches.sources + k, mask=k < K, other=0)
    return first, length_or_end


@gluon.jit
def locate_segment(spans, bounds, k, sizes):
    """Return the first row and the length of document k.

    The length is -1 if the document is not inside D, and 0 if there is no document k.
    """
    if spans.Td is None:
        row, length = k * sizes.Ld, sizes.Ld
    elif spans.patches is None:
        k = k.to(gl.int64)
        row, length, valid = clamp_document_segment(spans.segments, bounds, k, k < sizes.K, spans.Td)
        row, length = row.to(gl.int32), gl.where(valid, length, -1)
    else:
        row, length = k * spans.segments.d_each + bounds[0], bounds[1]
    return row, length


@gluon.jit
def find_kept_columns(spans, k, tile, column):
    """Return whether each token of a tile is kept, by its column in the tile."""
    bits = spans.patches.bits + k.to(gl.int64) * 2 * spans.tiles + tile
    word = gl.where(column < MASK_WORD_TOKENS, gl.load(bits), gl.load(bits + spans.tiles))
    return (word >> (column % MASK_WORD_TOKENS)) & 1 == 0


@gluon.jit
def choose_tile_start(spans, t0, length, C: gl.constexpr):
    """Return the first token of the tile that covers the tokens from t0 on.

    The last tile shifts back to the end of the document. It repeats tokens, so that all of its columns are valid. Even
    documents have at least BN tokens.
    """
    last_start = length - C.BN
    if spans.Td is not None:
        last_start = gl.maximum(last_start, 0)
    return gl.minimum(t0, last_start)


@gluon.jit
def partition_evenly(row_tiles, K):
    """Return the first (row tile, document) pair of this program and of the next program, in ranges of equal size."""
    pairs = row_tiles.to(gl.int64) * K
    begin = (pairs * gl.program_id(0) // gl.num_programs(0)).to(gl.int32)
    end = (pairs * (gl.program_id(0) + 1) // gl.num_programs(0)).to(gl.int32)
    return begin, end


@gluon.jit
def list_block_documents(k0):
    """Return the SCHEDULE_BLOCK_DOCUMENTS document indices from k0 on."""
    return k0 + gl.arange(
        0, SCHEDULE_BLOCK_DOCUMENTS, layout=gl.BlockedLayout([SCHEDULE_BLOCK_DOCUMENTS // 128], [32], [4], [0])
    )


@gluon.jit
def estimate_costs(spans, bounds, k, K, C: gl.constexpr):
    """Return the int32 cost of each document in quarters of a tile, 4 per tile and a measured constant of 3.

    A document that is not inside D costs as if it were inside.
    """
    length = k * 0 + spans.segments.d_each if spans.segments.offsets is None else bounds[1] - bounds[0]
    if spans.segments.lengths is not None:
        length = bounds[1]
    tiles = (gl.minimum(gl.maximum(length, 1), MAX_COSTED_TOKENS).to(gl.int32) + C.BN - 1) // C.BN
    return gl.where(k < K, 4 * tiles + 3, 0)


@gluon.jit
def estimate_block_costs(spans, k0, K, C: gl.constexpr):
    """Load the bounds of the block of documents from k0 on and return its costs."""
    k = list_block_documents(k0)
    return estimate_costs(spans, load_segment_bounds(spans, k, K), k, K, C)


@gluon.jit
def _flag_before_share(starts, costs, share, total):
    """Return 1 for each document that begins below `share` programs' part of the total cost, else 0.

    Args:
        starts: Summed cost of all documents ahead of each document.
        costs: Cost of each document, 0 for an absent document.
        share: Number of programs' parts, less than the number of programs.
        total: Cost of all documents.
    """
    return ((starts * gl.num_programs(0) < share * total) & (costs > 0)).to(gl.int32)


@gluon.jit
def partition_pairs(spans, first, row_tiles, K, C: gl.constexpr):
    """Return the first (row tile, document) pair of this program and of the next program.

    All programs get ranges of nearly the same cost. `first` holds the costs of the first block of documents.
    """
    programs = gl.num_programs(0)
    total = gl.sum(first, axis=0).to(gl.int64)
    for k0 in range(SCHEDULE_BLOCK_DOCUMENTS, K, SCHEDULE_BLOCK_DOCUMENTS):
        total += gl.sum(estimate_block_costs(spans, k0, K, C), axis=0)
    x = row_tiles * gl.program_id(0)
    y = x + row_tiles
    earlier_cost = total * 0
    costs = first
    documents_x = 0
    documents_y = 0
    for k0 in range(0, K, SCHEDULE_BLOCK_DOCUMENTS):
        starts = earlier_cost + (gl.associative_scan(costs, 0, _add) - costs)
        flags = _flag_before_share(starts, costs, x % programs, total) + (
            _flag_before_share(starts, costs, y % programs, total) << 16
        )
        counts = gl.sum(flags, axis=0)
        documents_x += counts & 0xFFFF
        documents_y += counts >> 16
        if k0 + SCHEDULE_BLOCK_DOCUMENTS < K:
            earlier_cost += gl.sum(costs, axis=0)
            costs = estimate_block_costs(spans, k0 + SCHEDULE_BLOCK_DOCUMENTS, K, C)
    return x // programs * K + documents_x, y // programs * K + documents_y


@gluon.jit
def find_end(segments, K):
    """Return the number of documents without blocks of END_BLOCK_DOCUMENTS empty documents at the end, at least 1."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    end = K
    is_empty = K > END_BLOCK_DOCUMENTS
    while is_empty:
        k = end - END_BLOCK_DOCUMENTS + gl.arange(0, END_BLOCK_DOCUMENTS, layout=LAYOUT)
        is_empty = gl.max((gl.load(segments.lengths + k) != 0).to(gl.int32), axis=0) == 0
        end = gl.where(is_empty, end - END_BLOCK_DOCUMENTS, end)
        is_empty = is_empty & (end > END_BLOCK_DOCUMENTS)
    return end


@gluon.jit
def store_empty_scores(Q, spans, out, k0, K, sizes, C: gl.constexpr):
    """Store the scores of empty documents `k0` to `K` - 1, a share of them in each program.

    A document that is not inside D scores NaN.
    """
    BLOCK: gl.constexpr = SCHEDULE_BLOCK_DOCUMENTS
    share = gl.cdiv(K - k0, gl.num_programs(0))
    begin = k0 + share * gl.program_id(0)
    end = gl.minimum(begin + share, K)
    # `load_query_mask` expands the rows, which Triton 3.6 allows for slice layouts only.
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0]))
    tokens = gl.arange(0, C.ROWS_PER_QUERY, layout=LAYOUT)
    for block in range(begin, end, BLOCK):
        k = list_block_documents(block)
        ok = k < end
        _, _, is_inside = clamp_document_segment(spans.segments, load_segment_bounds(spans, k, end), k, ok, spans.Td)
        for i in range(0, sizes.Nq):
            is_kept = load_query_mask(Q, i + 0 * tokens, tokens, tokens < sizes.Lq)
            score = choose_empty_score(gl.max(is_kept.to(gl.int32), axis=0))
            scores = out.scores + (k * 0 + i).to(gl.int64) * out.stride + k
            gl.store(scores, gl.where(is_inside, score, float("nan")), mask=ok)


@gluon.jit
def _add(a, b):
    """Return a + b."""
    return a + b
