"""For `forward_rows`: where documents lie among the rows of D, and which of them each program takes."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.segments import clamp_document_segment, load_document_bounds

SCHEDULE_BLOCK_DOCUMENTS = gl.constexpr(1024)
MAX_COSTED_TOKENS = gl.constexpr(2**24)  # that are counted of a document: what a block costs takes 32 bits


class DocumentSegments(NamedTuple):
    """Where documents lie among the rows of D: as `segments` say.

    `patches`, unless it is None, says what a mask leaves out of the `tiles` tiles of each document, which begins with
    the first token that counts.
    """

    segments: Any
    patches: Any
    tiles: Any


@gluon.jit
def compiler_barrier_value(x):
    """The number `x`, which the compiler can neither do without nor work out, or what hangs on it, before.

    Else Triton forgets a length that only bounds a loop: it takes that of the first document for all. And what hangs on
    how many tokens are left comes between the products asked for.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_segment_bounds(spans, k, K):
    """What is stored of where document k lies, for `locate_segment`: asked for a document ahead, as it comes from far
    away."""
    first, other = load_document_bounds(spans.segments, k.to(gl.int64), k < K)
    if spans.patches is not None:
        first = gl.load(spans.patches.sources + k, mask=k < K, other=0)
    return first, other


@gluon.jit
def locate_segment(spans, bounds, k, K, Td):
    """First row and length of document k: -1 of one that is not inside D, 0 of one that is not there."""
    if spans.patches is None:
        k = k.to(gl.int64)
        row, length, valid = clamp_document_segment(spans.segments, bounds, k, k < K, Td)
        row, length = row.to(gl.int32), gl.where(valid, length, -1)
    else:
        row, length = k * spans.segments.d_each + bounds[0], bounds[1]
    return row, length


@gluon.jit
def get_segment_length(spans, bounds, k, K, Td):
    _, length = locate_segment(spans, bounds, k, K, Td)
    return length


@gluon.jit
def list_block_documents(k0):
    """SPAN_BLOCK documents from k0 on."""
    return k0 + gl.arange(
        0, SCHEDULE_BLOCK_DOCUMENTS, layout=gl.BlockedLayout([SCHEDULE_BLOCK_DOCUMENTS // 128], [32], [4], [0])
    )


@gluon.jit
def estimate_costs(spans, bounds, k, K, C: gl.constexpr):
    """What these documents cost, in quarters of a tile: their tiles, and what was measured of each; in 32 bits. One
    that is not inside D costs as if it was."""
    length = k * 0 + spans.segments.d_each if spans.segments.offsets is None else bounds[1] - bounds[0]
    if spans.segments.lengths is not None:
        length = bounds[1]
    tiles = (gl.minimum(gl.maximum(length, 1), MAX_COSTED_TOKENS).to(gl.int32) + C.BN - 1) // C.BN
    return gl.where(k < K, 4 * tiles + 3, 0)


@gluon.jit
def estimate_block_costs(spans, k0, K, C: gl.constexpr):
    k = list_block_documents(k0)
    return estimate_costs(spans, load_segment_bounds(spans, k, K), k, K, C)


@gluon.jit
def _flag_before_share(starts, costs, share, total):
    """Of each of these documents, 1 if it lies before the `share` of the programs' total, as a fraction of it."""
    return ((starts * gl.num_programs(0) < share * total) & (costs > 0)).to(gl.int32)


@gluon.jit
def partition_pairs(spans, first, row_tiles, K, C: gl.constexpr):
    """The first (row tile, document) pair of this program and of the next: the programs' parts cost nearly the same.

    `first`: costs of the first block of documents.
    """
    programs = gl.num_programs(0)
    total = gl.sum(first, axis=0).to(gl.int64)
    for k0 in range(SCHEDULE_BLOCK_DOCUMENTS, K, SCHEDULE_BLOCK_DOCUMENTS):
        total += gl.sum(estimate_block_costs(spans, k0, K, C), axis=0)
    x = row_tiles * gl.program_id(0)
    y = x + row_tiles
    before = total * 0
    costs = first
    passed_x = 0
    passed_y = 0
    for k0 in range(0, K, SCHEDULE_BLOCK_DOCUMENTS):
        starts = before + (gl.associative_scan(costs, 0, _add) - costs)
        both = _flag_before_share(starts, costs, x % programs, total) + (
            _flag_before_share(starts, costs, y % programs, total) << 16
        )
        counts = gl.sum(both, axis=0)
        passed_x += counts & 0xFFFF
        passed_y += counts >> 16
        if k0 + SCHEDULE_BLOCK_DOCUMENTS < K:
            before += gl.sum(costs, axis=0)
            costs = estimate_block_costs(spans, k0 + SCHEDULE_BLOCK_DOCUMENTS, K, C)
    return x // programs * K + passed_x, y // programs * K + passed_y


@gluon.jit
def _add(a, b):
    return a + b
