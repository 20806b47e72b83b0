"""The gradient of packed documents of which few rows win: zeros, and the few that won over them.

Most documents of a large store share no row with another and are met by few query rows, if any. After zeros for all of
grad_D, `maxsim_grad_packed_documents_apart` sums these, and lists which tiles of rows of D others touch;
`maxsim_grad_few_packed_documents` takes those, all their documents together.
"""

import triton
import triton.language as tl

from .arguments import Sizes, Walk
from .backward import more_norm_sums, through_tile_norm
from .backward_few import add_one_by_one, add_product, fill_with_zeros, largest_of, scale_of
from .backward_ragged import (
    most_rows,
    places,
    step_items,
    step_winners,
    store_rows,
    sum_of_rows,
    tile_norms,
)
from .common import load_rows, query_weight, wide
from .ragged import BEGIN, FIRST, LENGTH, SCORE, STOP, WINNERS, item_field
from .ragged_items import find_starts

MOST_STEPS = tl.constexpr(8)  # of BM rows each, of all items of a document that is summed apart from others
AROUND = tl.constexpr(16)  # items that a program looks at before and after its own: more than there are steps


@triton.jit
def _slots(walk, up, TILE: tl.constexpr, C: tl.constexpr):
    """Which tokens of a tile win anything, how many of them there are, and how many before each."""
    won = tl.zeros((TILE,), tl.int32)
    for n0 in range(walk.lo, walk.hi, C.BM // C.SLOT):
        items = step_items(walk, n0, C.BM, C.SLOT, C)
        for s0 in tl.range(0, most_rows(walk, items), C.SLOT, num_stages=1):
            token, query = step_winners(walk, items, s0, up, C.BM, C.SLOT)
            place = places(items, token, query, up, TILE)
            won += tl.histogram(tl.maximum(place, 0), TILE, mask=place >= 0)
    won = (won > 0).to(tl.int32)
    return won, tl.sum(won, axis=0), tl.cumsum(won, axis=0) - won


@triton.jit
def _neighbours(items, reach, n, first, length, count, C: tl.constexpr):
    """Of the items around item n: from which one on and up to which they are of its document; whether these are all,
    of at most MOST_STEPS steps of rows, while no other document shares a row of D with it; and, where not, whether it
    is item n that says so."""
    m = n - AROUND + tl.arange(0, 2 * AROUND)
    ok = (m >= 0) & (m < count)
    others = item_field(items, count, m, ok, FIRST)
    lengths = item_field(items, count, m, ok, LENGTH)
    rows = (item_field(items, count, m, ok, STOP) - item_field(items, count, m, ok, BEGIN)).to(tl.int32)
    behind = tl.load(reach + m, mask=ok, other=0)
    same = ok & (others == first)
    overlaps = ok & (((others < first) & (behind > first)) | ((others > first) & (others < first + length)))
    overlaps = overlaps | (same & (lengths != length))
    lo = tl.min(tl.where(same, m, count), axis=0)
    hi = tl.max(tl.where(same, m, -1), axis=0) + 1
    # Each item has a step or more: of items that are not all around, these are too many.
    steps = tl.sum(tl.where(same, tl.minimum(tl.cdiv(rows, C.BM), MOST_STEPS + 1), 0), axis=0)
    apart = (steps <= MOST_STEPS) & (tl.max(overlaps.to(tl.int32), axis=0) == 0)
    tells = tl.max((same & (m == n - 1) & (lengths == length)).to(tl.int32), axis=0) == 0
    return lo, hi, apart, tells


@triton.jit
def _rows_of(walk, n, up):
    """Of item n: its first row and how many there are, where their winners begin, and its score's gradient."""
    begin = item_field(walk.items, walk.count, n, True, BEGIN)
    rows = (item_field(walk.items, walk.count, n, True, STOP) - begin).to(tl.int32)
    winners = up.argmax + (item_field(walk.items, walk.count, n, True, WINNERS) + begin)
    g = tl.load(up.grad_scores + item_field(walk.items, walk.count, n, True, SCORE))
    return begin, rows, winners, g


@triton.jit
def _tokens_of(rows, winners, s0, COUNT: tl.constexpr):
    """Which tokens COUNT rows of an item won, from number s0 on; -1 where there is none."""
    s = tl.arange(0, COUNT)
    return tl.load(winners + s0 + s, mask=s < rows - s0, other=-1).to(tl.int32)


@triton.jit
def _coefficients(begin, rows, g, s0, norms, Q, C: tl.constexpr):
    """What BM rows of an item from number s0 on count for."""
    ok = tl.arange(0, C.BM) < rows - s0
    row = (begin + s0).to(tl.int32) + tl.arange(0, C.BM)
    coefficient = g * tl.full((C.BM,), 1, tl.float32)
    if Q.weight is not None:
        coefficient *= query_weight(Q, row * 0, row, ok)
    if norms is not None:
        coefficient *= tl.load(norms + row, mask=ok, other=0.0)
    return coefficient


@triton.jit
def _sums_of_winners(t, walk, norms, up, Q, columns, d, C: tl.constexpr):
    """The sums, of BD features, of the rows that won the tokens t of a document."""
    scale = 1.0
    unscale = 1.0
    if Q.ptr.dtype.element_ty == tl.float16:
        largest = 0.0
        for n in tl.range(walk.lo, walk.hi, num_stages=1):
            begin, rows, _, g = _rows_of(walk, n, up)
            for s0 in tl.range(0, rows, C.BM, num_stages=1):
                largest = largest_of(largest, _coefficients(begin, rows, g, s0, norms, Q, C))
        scale, unscale = scale_of(largest)
    G = tl.full((C.BN, C.BD), 0, tl.float32)
    e = tl.arange(0, C.BM)
    for n in tl.range(walk.lo, walk.hi, num_stages=1):
        begin, rows, winners, g = _rows_of(walk, n, up)
        for s0 in tl.range(0, rows, C.BM, num_stages=1):
            # Rows are read whatever they won: to know that would be to wait.
            pointers = Q.ptr + (begin + s0) * Q.stride_l + e.to(tl.int64) * Q.stride_l
            x = load_rows(pointers, e < rows - s0, columns, d, Q.stride_d, C.WIDE)
            match = (t[:, None] == _tokens_of(rows, winners, s0, C.BM)[None, :]) & (t >= 0)[:, None]
            G = add_product(G, match, x, _coefficients(begin, rows, g, s0, norms, Q, C) * scale, C)
    G *= unscale
    # As in `maxsim_grad_documents_few`.
    if tl.sum(G * 0.0) != 0.0:
        G = tl.full((C.BN, C.BD), 0, tl.float32)
        for n in tl.range(walk.lo, walk.hi, num_stages=1):
            begin, rows, winners, g = _rows_of(walk, n, up)
            for s0 in tl.range(0, rows, C.BM, num_stages=1):
                match = (t[:, None] == _tokens_of(rows, winners, s0, C.BM)[None, :]) & (t >= 0)[:, None]
                coefficient = _coefficients(begin, rows, g, s0, norms, Q, C)
                G = add_one_by_one(G, match, coefficient, (begin + s0 + e) * Q.stride_l, columns, Q, d, C)
    return G


@triton.jit
def _sum_apart(walk, own, length, norms, up, grad_D, Q, D, d, C: tl.constexpr):
    """grad_D of the tokens that the rows of item `own` won; other items of the document write the same bits where they
    won the same tokens."""
    base = D.ptr + walk.t0 * D.stride_l
    gradient = grad_D + walk.t0 * d
    _begin, rows, winners, _g = _rows_of(walk, own, up)
    for s0 in tl.range(0, rows, C.BN, num_stages=1):
        t = _tokens_of(rows, winners, s0, C.BN)
        t = tl.where(t < length, t, -1)  # no forward writes another
        dot = tl.full((C.BN,), 0, tl.float32)
        squares = tl.full((C.BN,), 0, tl.float32)
        live = tl.full((C.BN,), 0, tl.int32)
        if C.NORMALIZE and not C.ONE_CHUNK:
            for c0 in range(0, d, C.BD):
                columns = c0 + tl.arange(0, C.BD)
                G = _sums_of_winners(t, walk, norms, up, Q, columns, d, C)
                dot, squares, live = more_norm_sums((dot, squares, live), G, base, t, t >= 0, columns, D, d, C)
        for c0 in range(0, d, C.BD):
            columns = c0 + tl.arange(0, C.BD)
            G = _sums_of_winners(t, walk, norms, up, Q, columns, d, C)
            if C.NORMALIZE:
                G = through_tile_norm(G, columns, (dot, squares, live), base, t, t >= 0, D, d, C)
            token = t if C.WIDE == 0 else t.to(tl.int64)
            mask = (t >= 0)[:, None] & (columns < d)[None, :]
            tl.store(gradient + ((token * d)[:, None] + columns[None, :]), G.to(grad_D.dtype.element_ty), mask=mask)


@triton.jit
def _mark(marks, first, length, tiles, TILE: tl.constexpr):
    """List the tiles that a document touches, each once: the order decides which program takes it, nothing else."""
    begin = (first // TILE).to(tl.int32)
    for t0 in tl.range(begin, ((first + length - 1) // TILE).to(tl.int32) + 1, AROUND, num_stages=1):
        t = t0 + tl.arange(0, AROUND)
        ok = t * wide(TILE) < first + length
        new = (tl.atomic_xchg(marks + 1 + t, 1, mask=ok, sem="relaxed") == 0) & ok
        at = tl.atomic_add(marks, tl.sum(new.to(tl.int32), axis=0), sem="relaxed")
        place = at + tl.cumsum(new.to(tl.int32), axis=0) - 1
        tl.store(marks + 1 + tiles + place, t, mask=new)


@triton.jit(do_not_specialize=["Tq", "Td", "rounds"])
def maxsim_grad_packed_documents_apart(
    Q, D, up, items, reach, starts, marks, norms, grad_D, Tq, Td, d, rounds, TILE: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """grad_D of the documents that few query rows meet and that share no row with another, over zeros: a program for
    the tokens that the rows of an item won.

    The tiles of TILE rows of D that other documents touch are listed in `marks`: how many they are, for each tile
    whether it is listed, and the list. The last programs do what `maxsim_find_starts` does, for
    `maxsim_grad_few_packed_documents`.
    """
    n = tl.program_id(0)
    tiles = tl.cdiv(Td, TILE)
    if n < up.count:
        first = item_field(items, up.count, n, True, FIRST)
        length = item_field(items, up.count, n, True, LENGTH)
        lo, hi, apart, tells = _neighbours(items, reach, n, first, length, up.count, C)
        if apart:
            walk = Walk(items, up.count, lo, hi, first, 0, Tq, None, None, None)
            _sum_apart(walk, n, length.to(tl.int32), norms, up, grad_D, Q, D, d, C)
        elif tells & (length > 0):
            _mark(marks, first, length, tiles, TILE)
    else:
        find_starts(items, reach, starts, up.count, tiles + 1, TILE, Td, rounds, n - up.count)


@triton.jit(do_not_specialize=["Nq", "K", "Tq", "Td"])
def maxsim_grad_few_packed_documents(
    Q, D, up, items, starts, marks, norms, grad_D, Nq, K, Tq, Td, d, TILE: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """grad_D [Td, d] of the tiles of TILE rows of D that `marks` lists: zeros, and the sums of the rows that win over
    them.

    BN of them are summed at a time. The rest is as in `maxsim_grad_packed_documents`.
    """
    sizes = Sizes(Nq, K, Tq, Td)
    TWICE: tl.constexpr = C.NORMALIZE and not C.ONE_CHUNK
    tiles = tl.cdiv(Td, TILE)
    for n in tl.range(tl.program_id(0), tl.load(marks), tl.num_programs(0), num_stages=1):
        tile = tl.load(marks + 1 + tiles + n)
        lo = tl.load(starts + tiles + 1 + tile)
        hi = tl.load(starts + tile + 1)
        walk = Walk(items, up.count, lo, hi, wide(tile) * TILE, 0, Tq, None, None, None)
        won, count, slots = _slots(walk, up, TILE, C)
        rows = tl.minimum(sizes.Ld - walk.t0, TILE).to(tl.int32)
        fill_with_zeros(grad_D + walk.t0 * d, rows * d, "")
        tl.debug_barrier()  # the zeros are written by other threads than the sums
        base = D.ptr + walk.t0 * D.stride_l
        for u0 in tl.range(0, count, C.BN, num_stages=1):
            part = Walk(walk.items, walk.count, walk.lo, walk.hi, walk.t0, walk.r0, walk.r1, slots, u0, None)
            here = (slots[None, :] == (u0 + tl.arange(0, C.BN))[:, None]) & (won > 0)[None, :]
            t = tl.max(tl.where(here, tl.arange(0, TILE)[None, :], -1), axis=1)
            sums = tile_norms(part, norms, up, Q, base, t, t >= 0, d, D, d, TWICE, C)
            for c0 in range(0, d, C.BD):
                G, columns = sum_of_rows(part, norms, up, Q, c0, d, C)
                if C.NORMALIZE:
                    G = through_tile_norm(G, columns, sums, base, t, t >= 0, D, d, C)
                store_rows(G, grad_D, tl.where(t >= 0, walk.t0 + t, sizes.Ld), sizes.Ld, columns, d)
