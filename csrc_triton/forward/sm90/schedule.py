"""For `forward_rows`: where documents lie among the rows of D, and which of them each program takes."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.segments import bounded_segment, document_bounds

SPAN_BLOCK = gl.constexpr(1024)
MOST_TOKENS = gl.constexpr(2**24)  # that are counted of a document: what a block costs takes 32 bits


class Spans(NamedTuple):
    """Where documents lie among the rows of D: as `segments` say.

    `patches`, unless it is None, says what a mask leaves out of the `tiles` tiles of each document, which begins with
    the first token that counts.
    """

    segments: Any
    patches: Any
    tiles: Any


@gluon.jit
def here(x):
    """The number `x`, which the compiler can neither do without nor work out, or what hangs on it, before.

    Else Triton forgets a length that only bounds a loop: it takes that of the first document for all. And what hangs on
    how many tokens are left comes between the products asked for.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def bounds_of(spans, k, K):
    """What is stored of where document k lies, for `span_of`: asked for a document ahead, as it comes from far away."""
    first, other = document_bounds(spans.segments, k.to(gl.int64), k < K)
    if spans.patches is not None:
        first = gl.load(spans.patches.sources + k, mask=k < K, other=0)
    return first, other


@gluon.jit
def span_of(spans, bounds, k, K, Td):
    """First row and length of document k: -1 of one that is not inside D, 0 of one that is not there."""
    if spans.patches is None:
        k = k.to(gl.int64)
        row, length, valid = bounded_segment(spans.segments, bounds, k, k < K, Td)
        row, length = row.to(gl.int32), gl.where(valid, length, -1)
    else:
        row, length = k * spans.segments.d_each + bounds[0], bounds[1]
    return row, length


@gluon.jit
def length_of(spans, bounds, k, K, Td):
    _, length = span_of(spans, bounds, k, K, Td)
    return length


@gluon.jit
def block(k0):
    """SPAN_BLOCK documents from k0 on."""
    return k0 + gl.arange(0, SPAN_BLOCK, layout=gl.BlockedLayout([SPAN_BLOCK // 128], [32], [4], [0]))


@gluon.jit
def costs_of(spans, bounds, k, K, C: gl.constexpr):
    """What these documents cost, in quarters of a tile: their tiles, and what was measured of each; in 32 bits. One
    that is not inside D costs as if it was."""
    length = k * 0 + spans.segments.d_each if spans.segments.offsets is None else bounds[1] - bounds[0]
    if spans.segments.lengths is not None:
        length = bounds[1]
    tiles = (gl.minimum(gl.maximum(length, 1), MOST_TOKENS).to(gl.int32) + C.BN - 1) // C.BN
    return gl.where(k < K, 4 * tiles + 3, 0)


@gluon.jit
def block_costs(spans, k0, K, C: gl.constexpr):
    k = block(k0)
    return costs_of(spans, bounds_of(spans, k, K), k, K, C)


@gluon.jit
def _before(starts, costs, share, total):
    """Of each of these documents, 1 if it lies before the `share` of the programs' total, as a fraction of it."""
    return ((starts * gl.num_programs(0) < share * total) & (costs > 0)).to(gl.int32)


@gluon.jit
def shares(spans, first, row_tiles, K, C: gl.constexpr):
    """The first (row tile, document) pair of this program and of the next: the programs' parts cost nearly the same.

    `first`: costs of the first block of documents.
    """
    programs = gl.num_programs(0)
    total = gl.sum(first, axis=0).to(gl.int64)
    for k0 in range(SPAN_BLOCK, K, SPAN_BLOCK):
        total += gl.sum(block_costs(spans, k0, K, C), axis=0)
    x = row_tiles * gl.program_id(0)
    y = x + row_tiles
    before = total * 0
    costs = first
    passed_x = 0
    passed_y = 0
    for k0 in range(0, K, SPAN_BLOCK):
        starts = before + (gl.associative_scan(costs, 0, _plus) - costs)
        both = _before(starts, costs, x % programs, total) + (_before(starts, costs, y % programs, total) << 16)
        counts = gl.sum(both, axis=0)
        passed_x += counts & 0xFFFF
        passed_y += counts >> 16
        if k0 + SPAN_BLOCK < K:
            before += gl.sum(costs, axis=0)
            costs = block_costs(spans, k0 + SPAN_BLOCK, K, C)
    return x // programs * K + passed_x, y // programs * K + passed_y


@gluon.jit
def _plus(a, b):
    return a + b
