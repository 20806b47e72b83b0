"""The forward of sm_90 for packed query rows and documents of any length: the maximum of every row in each document.

As `forward_specialized`, but the rows of all queries follow each other with nothing between them, a document ends where
its length or its mask says, and what is stored are the rows' maxima, which `row_sums` adds up.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .arguments import Sizes
from .common import NO_TOKEN, nan_max, query_keep, row_pointers
from .forward_specialized import (
    CONSUMER_REGISTERS,
    HALF_ROWS,
    PRODUCER_REGISTERS,
    ROWS,
    UNRESOLVED,
    Half,
    advance,
    fresh,
    issued,
    reduced,
    settle,
    shared_ring,
)
from .ragged import document_segment

SPAN_BLOCK = gl.constexpr(1024)


class Spans(NamedTuple):
    """Where documents lie among the rows of D: as `segments` say.

    `words` [K, stride] are None or say which tokens count, 64 in each, a bit for each; none of them beyond the length.
    """

    segments: Any
    words: Any
    stride: Any


class Kept(NamedTuple):
    """Which of a tile's tokens count: the first `rest`, or those of `word`."""

    rest: Any
    word: Any


@gluon.jit
def _span(spans, k, K, Td):
    """First row and length of document k; 0 rows of one that is not inside D, or not there."""
    k = k.to(gl.int64)
    row, length, _ = document_segment(spans.segments, k, k < K, Td)
    return row.to(gl.int32), length


@gluon.jit
def _kept(spans, k, K, t0, length):
    """What counts of the tile from token t0 on."""
    word = 0
    if spans.words is not None:
        word = gl.load(spans.words + k.to(gl.int64) * spans.stride + t0 // 64, mask=(k < K) & (t0 < length), other=0)
    return Kept(length - t0, word)


@gluon.jit
def _counts(kept, layout: gl.constexpr, spans, C: gl.constexpr):
    """Of each column of a tile, whether its token counts."""
    column = gl.arange(0, C.BN, layout=layout)
    if spans.words is None:
        counts = column < kept.rest
    else:
        # A thread has columns 2 lane + {0, 1} of every 8: shifted by those once, it asks for constant bits.
        lane = column & 6
        low = kept.word.to(gl.int32) >> lane
        high = (kept.word >> 32).to(gl.int32) >> lane
        counts = (gl.where(column < 32, low, high) >> (column & 25)) & 1 != 0
    return counts


@gluon.jit
def _produce(D, ring, spans, begin, end, K, Td, C: gl.constexpr):
    """Copy the tiles of every document into the ring, one at least; the last reads on into what follows."""
    stage = 0
    phase = 1
    for task in range(begin, end):
        row, length = _span(spans, task % K, K, Td)
        for t0 in range(0, gl.maximum(length, 1), C.BN):
            full = ring.full.index(stage)
            mbarrier.wait(ring.empty.index(stage), phase)
            mbarrier.expect(full, D.block_type.nbytes)
            tma.async_copy_global_to_shared(D, [row + t0, 0], full, ring.tiles.index(stage))
            stage, phase = advance(stage, phase, C)


@gluon.jit
def _all_count(kept, spans, C: gl.constexpr):
    if spans.words is None:
        full = kept.rest >= C.BN
    else:
        full = kept.word == -1
    return full


@gluon.jit
def _taken(S, half, kept, bias, t0, spans, C: gl.constexpr):
    """`half` after a tile: its best so far, and where."""
    if bias is not None:
        best, where = reduced(S + bias[None, :], half.best, half.where, t0, C)
    elif _all_count(kept, spans, C):
        best, where = reduced(S, half.best, half.where, t0, C)
    else:
        counts = _counts(kept, gl.SliceLayout(0, S.type.layout), spans, C)
        best, where = reduced(gl.where(counts[None, :], S, float("-inf")), half.best, half.where, t0, C)
    return Half(S, best, where)


@gluon.jit
def _absorbed(S_a, S_b, ring, halves, t0, kept, stage, phase, turn, spans, C: gl.constexpr):
    """The halves after the tile in flight, that of token t0: one is reduced while the other's product still runs.

    Where no winners are asked for, words of a mask become a bias: half the instructions of a selection, and on another
    pipe than the maxima. What it leaves of tokens that do not count but are NaN or inf is NaN, which `_resolve` mends.
    """
    bias = None
    if spans.words is not None and not C.ARGMAX:
        LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16]))
        bias = gl.where(_counts(kept, LAYOUT, spans, C), -0.0, float("-inf"))
    a = _taken(warpgroup_mma_wait(1, [S_a]), halves[0], kept, bias, t0, spans, C)
    S = warpgroup_mma_wait(0, [S_b])
    mbarrier.arrive(ring.empty.index(stage), count=1)
    b = _taken(S, halves[1], kept, bias, t0, spans, C)
    stage, phase = advance(stage, phase, C)
    return (settle(a, C), settle(b, C)), stage, phase, turn ^ 1


@gluon.jit
def _rows(first, H: gl.constexpr, layout: gl.constexpr):
    return first + H * HALF_ROWS + gl.arange(0, HALF_ROWS, layout=layout)


@gluon.jit
def _load_rows(Q, q_smem, first, sizes, d, G: gl.constexpr, C: gl.constexpr):
    """The two halves of a warp group's query rows, zeros where masked or absent, as operands of the product."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    columns = gl.arange(0, C.BD, layout=gl.SliceLayout(0, LAYOUT))
    for H in gl.static_range(2):
        row = _rows(first, H, gl.SliceLayout(1, LAYOUT))
        i = row // sizes.Lq
        s = row % sizes.Lq
        ok = query_keep(Q, i, s, i < sizes.Nq)
        pointers = row_pointers(Q, i, s)[:, None] + (columns * Q.stride_d)[None, :]
        q_smem.index(2 * G + H).store(gl.load(pointers, mask=ok[:, None] & (columns < d)[None, :], other=0.0))
    fence_async_shared()
    return (
        q_smem.index(2 * G).load(gl.DotOperandLayout(0, ACC, 2)),
        q_smem.index(2 * G + 1).load(gl.DotOperandLayout(0, ACC, 2)),
    )


@gluon.jit
def _store(half, Q, row, k, exists, length, spans, maxima, argmax, unresolved, sizes, C: gl.constexpr):
    """A half's maxima in document k, [K, rows]; and their winners, UNRESOLVED where one is NaN or -inf."""
    rows = sizes.Nq * sizes.Lq
    ok = (row < rows) & exists
    at = k.to(gl.int64) * rows + row
    best = gl.reduce(half.best, 1, nan_max)
    gl.store(maxima + at, best, mask=ok)
    if spans.words is not None:
        unresolved = unresolved | (ok & (best != best)).to(gl.int32)
    if C.ARGMAX:
        keep = query_keep(Q, row // sizes.Lq, row % sizes.Lq, ok) & (length > 0)
        lane = gl.arange(0, 4, layout=gl.SliceLayout(0, half.best.type.layout))
        where = gl.where(half.where == NO_TOKEN, NO_TOKEN, half.where + 2 * lane[None, :])
        where = gl.min(gl.where(half.best == best[:, None], where, NO_TOKEN), axis=1)
        unresolved = unresolved | (keep & (where == NO_TOKEN)).to(gl.int32)
        where = gl.where(keep, gl.where(where == NO_TOKEN, UNRESOLVED, where), -1)
        gl.store(argmax + at, where.to(argmax.dtype.element_ty), mask=ok)
    return unresolved


@gluon.jit
def _stored(halves, Q, first, k, exists, length, spans, maxima, argmax, unresolved, sizes, C: gl.constexpr):
    """Both halves stored, and fresh ones."""
    ROW: gl.constexpr = gl.SliceLayout(1, halves[0].best.type.layout)
    row = _rows(first, 0, ROW)
    unresolved = _store(halves[0], Q, row, k, exists, length, spans, maxima, argmax, unresolved, sizes, C)
    row = _rows(first, 1, ROW)
    unresolved = _store(halves[1], Q, row, k, exists, length, spans, maxima, argmax, unresolved, sizes, C)
    return (fresh(halves[0].S, C), fresh(halves[1].S, C)), unresolved


@gluon.jit
def _consume(Q, D, ring, q_smem, spans, maxima, argmax, begin, end, sizes, Td, d, G: gl.constexpr, C: gl.constexpr):
    """Warp group G: its 128 rows of each row tile against the tile's documents."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    stage = 0
    phase = 0
    turn = 1 - G
    S = gl.full([HALF_ROWS, C.BN], 0.0, gl.float32, ACC)
    halves = (fresh(S, C), fresh(S, C))
    unresolved = gl.full([HALF_ROWS], 0, gl.int32, gl.SliceLayout(1, halves[0].best.type.layout))
    task = begin
    while task < end:
        row_tile = task // sizes.K
        last = gl.minimum((row_tile + 1) * sizes.K, end)
        first = (row_tile * 2 + G) * (2 * HALF_ROWS)
        q = _load_rows(Q, q_smem, first, sizes, d, G, C)
        begin_k = task % sizes.K
        end_k = begin_k + last - task
        _, length = _span(spans, begin_k, sizes.K, Td)
        kept = _kept(spans, begin_k, sizes.K, 0, length)
        for k in range(begin_k, end_k):
            # Of the next document and tile, as loads take longer than a tile.
            _, length_after = _span(spans, k + 1, sizes.K, Td)
            S_a, S_b = issued(q, ring, halves, stage, phase, turn, G, C)
            if not C.ARGMAX:
                halves, unresolved = _stored(
                    halves, Q, first, k - 1, k > begin_k, 1, spans, maxima, argmax, unresolved, sizes, C
                )
            kept_after = _kept(spans, k, sizes.K, C.BN, length)
            halves, stage, phase, turn = _absorbed(S_a, S_b, ring, halves, 0, kept, stage, phase, turn, spans, C)
            for t0 in range(C.BN, length, C.BN):
                kept = kept_after
                S_a, S_b = issued(q, ring, halves, stage, phase, turn, G, C)
                kept_after = _kept(spans, k, sizes.K, t0 + C.BN, length)
                halves, stage, phase, turn = _absorbed(S_a, S_b, ring, halves, t0, kept, stage, phase, turn, spans, C)
            if C.ARGMAX:
                halves, unresolved = _stored(
                    halves, Q, first, k, True, length, spans, maxima, argmax, unresolved, sizes, C
                )
            length = length_after
            kept = _kept(spans, k + 1, sizes.K, 0, length)
        if not C.ARGMAX:
            halves, unresolved = _stored(
                halves, Q, first, end_k - 1, True, 1, spans, maxima, argmax, unresolved, sizes, C
            )
        task = last
    if C.ARGMAX or spans.words is not None:
        mbarrier.arrive(ring.search.index(2), count=1)
        if gl.max(unresolved, axis=0) > 0:
            _resolve(Q, D, ring, q_smem, spans, maxima, argmax, begin, end, sizes, Td, d, G, C)


@gluon.jit
def _exact(q, D, ring, spans, k, row, length, phase, sizes, G: gl.constexpr, C: gl.constexpr):
    """Of 64 query rows in a document, with selections: the maxima, NaN the largest, and the first tokens that attain
    them, which count."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    tile = ring.tiles.index(G)
    column = gl.arange(0, C.BN, layout=gl.SliceLayout(0, ACC))
    best = gl.full([HALF_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, ACC))
    where = gl.full([HALF_ROWS], 0, gl.int32, gl.SliceLayout(1, ACC)) + NO_TOKEN
    for t0 in range(0, length, C.BN):
        mbarrier.expect(ring.search.index(G), D.block_type.nbytes)
        tma.async_copy_global_to_shared(D, [row + t0, 0], ring.search.index(G), tile)
        mbarrier.wait(ring.search.index(G), phase)
        phase ^= 1
        S = warpgroup_mma(q, tile.permute((1, 0)), gl.full([HALF_ROWS, C.BN], 0.0, gl.float32, ACC))
        counts = _counts(_kept(spans, k, sizes.K, t0, length), gl.SliceLayout(0, ACC), spans, C)[None, :]
        S = gl.where(counts, S, float("-inf"))
        m = gl.reduce(S, 1, nan_max)
        hit = counts & ((S == m[:, None]) | (S != S))
        first = gl.min(gl.where(hit, t0 + column[None, :], NO_TOKEN), axis=1)
        # A tile of which no token counts has no first; what is only -inf still has one.
        better = (m > best) | ((m != m) & (best == best)) | (where == NO_TOKEN)
        where = gl.where(better, first, where)
        best = nan_max(best, m)
    return best, where, phase


@gluon.jit
def _resolve(Q, D, ring, q_smem, spans, maxima, argmax, begin, end, sizes, Td, d, G: gl.constexpr, C: gl.constexpr):
    """Replace maxima that are NaN, perhaps by what does not count, and winners that are UNRESOLVED."""
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16]))
    phase = 0
    mbarrier.wait(ring.search.index(2), 0)  # both warp groups have read their last tile: the ring is free
    rows = sizes.Nq * sizes.Lq
    for task in range(begin, end):
        k = task % sizes.K
        first = (task // sizes.K * 2 + G) * (2 * HALF_ROWS)
        row, length = _span(spans, k, sizes.K, Td)
        q = _load_rows(Q, q_smem, first, sizes, d, G, C)
        for H in gl.static_range(2):
            query_row = _rows(first, H, ROW)
            at = k.to(gl.int64) * rows + query_row
            ok = query_row < rows
            stored = gl.load(maxima + at, mask=ok, other=0.0)
            wrong = ok & (stored != stored)
            if C.ARGMAX:
                wrong = wrong | (ok & (gl.load(argmax + at, mask=ok, other=0) == UNRESOLVED))
            if gl.max(wrong.to(gl.int32), axis=0) > 0:
                best, where, phase = _exact(q[H], D, ring, spans, k, row, length, phase, sizes, G, C)
                gl.store(maxima + at, best, mask=wrong)
                if C.ARGMAX:
                    unresolved = wrong & (gl.load(argmax + at, mask=wrong, other=0) == UNRESOLVED)
                    gl.store(argmax + at, where.to(argmax.dtype.element_ty), mask=unresolved)


@gluon.jit
def _costs(spans, k0, K, Td, C: gl.constexpr):
    """What SPAN_BLOCK documents from k0 on cost: their tiles, and something for each."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([SPAN_BLOCK // 128], [32], [4], [0])
    k = k0 + gl.arange(0, SPAN_BLOCK, layout=LAYOUT)
    _, length = _span(spans, k, K, Td)
    # 64 bits: documents may overlap, so there may be more of their tokens than rows of D.
    return gl.where(k < K, 4 * gl.maximum(gl.cdiv(length, C.BN), 1) + 1, 0).to(gl.int64)


@gluon.jit
def _share(pid, total, row_tiles):
    """Where the part of program `pid` begins: a row tile, and what the documents before cost."""
    programs = gl.num_programs(0)
    position = row_tiles.to(gl.int64) * pid
    whole = (position // programs).to(gl.int32)
    rest = position % programs
    return whole, total // programs * rest + total % programs * rest // programs


@gluon.jit
def _shares(spans, row_tiles, K, Td, C: gl.constexpr):
    """The first (row tile, document) pair of this program and of the next: the programs' parts cost nearly the same."""
    first = _costs(spans, 0, K, Td, C)
    total = gl.sum(first, axis=0)
    for k0 in range(SPAN_BLOCK, K, SPAN_BLOCK):
        total += gl.sum(_costs(spans, k0, K, Td, C), axis=0)
    x, x_rest = _share(gl.program_id(0), total, row_tiles)
    y, y_rest = _share(gl.program_id(0) + 1, total, row_tiles)
    x = x * K
    y = y * K
    before = total * 0
    costs = first
    for k0 in range(0, K, SPAN_BLOCK):
        starts = before + gl.associative_scan(costs, 0, _plus) - costs
        x += gl.sum(((starts < x_rest) & (costs > 0)).to(gl.int32), axis=0)
        y += gl.sum(((starts < y_rest) & (costs > 0)).to(gl.int32), axis=0)
        before += gl.sum(costs, axis=0)
        if k0 + SPAN_BLOCK < K:
            costs = _costs(spans, k0 + SPAN_BLOCK, K, Td, C)
    return x, y


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit(do_not_specialize=["Nq", "K", "Lq", "Td", "stride"])
def maxsim_row_maxima(Q, D, segments, words, stride, maxima, argmax, Nq, K, Lq, Td, d, C: gl.constexpr):
    """Maxima ``[K, Nq * Lq]`` of the query rows over the tokens of each document that count, -inf where none does.

    Winners of the same shape unless None: -1 where none counts and of masked rows. D is a tensor descriptor of all Td
    document tokens as rows, in blocks [BN, BD]. Programs share the (row tile, document) pairs, row tiles first.
    """
    sizes = Sizes(Nq, K, Lq, 0)
    spans = Spans(segments, words, stride)
    row_tiles = gl.cdiv(Nq * Lq, ROWS)
    begin, end = _shares(spans, row_tiles, K, Td, C)
    ring, q_smem = shared_ring(D, C)
    gl.warp_specialize(
        [
            (_consume, (Q, D, ring, q_smem, spans, maxima, argmax, begin, end, sizes, Td, d, 0, C)),
            (_consume, (Q, D, ring, q_smem, spans, maxima, argmax, begin, end, sizes, Td, d, 1, C)),
            (_produce, (D, ring, spans, begin, end, K, Td, C)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
