"""The gradient of packed documents of which few rows win: zeros, and the few that won over them.

Most documents of a large store share no row with another and are met by few query rows, if any. After zeros for all of
grad_D, `maxsim_grad_packed_documents_apart` sums these, and lists which tiles of rows of D others touch;
`maxsim_grad_few_packed_documents` takes those, all their documents together.
"""

import triton
import triton.language as tl

from .arguments import Walk
from .backward import more_norm_sums, no_norm_sums, through_tile_norm
from .backward_few import fill_with_zeros
from .backward_ragged import (
    most_rows,
    packed_row_pointers,
    places,
    step_items,
    step_winners,
    store_rows,
    sum_of_rows,
    tile_norms,
)
from .common import NO_TOKEN, load_rows, wide
from .ragged import BEGIN, FIRST, LENGTH, SCORE, STOP, WINNERS, item_field
from .ragged_items import find_starts

MOST_ITEMS = tl.constexpr(8)  # of a document that is summed apart from others
AROUND = tl.constexpr(16)  # items that a program looks at before and after its own: more than those
COMPARED = tl.constexpr(32)  # rows that are compared with those of a program's item at a time
AT_A_TIME = tl.constexpr(2)  # of those that won a token
TOGETHER = tl.constexpr(128)  # rows, of several items, among which those are looked for that won a token


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
    """Of the items around item n: the first of its document, and how many these are; whether they are all, at most
    MOST_ITEMS of at most BM rows each, while no other document shares a row of D with it; and, where not, whether it is
    item n that says so."""
    m = n - AROUND + tl.arange(0, 2 * AROUND)
    ok = (m >= 0) & (m < count)
    others = item_field(items, count, m, ok, FIRST)
    lengths = item_field(items, count, m, ok, LENGTH)
    rows = item_field(items, count, m, ok, STOP) - item_field(items, count, m, ok, BEGIN)
    behind = tl.load(reach + m, mask=ok, other=0)
    same = ok & (others == first)
    overlaps = ok & (((others < first) & (behind > first)) | ((others > first) & (others < first + length)))
    overlaps = overlaps | (same & ((lengths != length) | (rows > C.BM)))
    lo = tl.min(tl.where(same, m, count), axis=0)
    met = tl.sum(same.to(tl.int32), axis=0)
    apart = (met <= MOST_ITEMS) & (tl.max(overlaps.to(tl.int32), axis=0) == 0)
    tells = tl.max((same & (m == n - 1) & (lengths == length)).to(tl.int32), axis=0) == 0
    return lo, met, apart, tells


@triton.jit
def _tokens_of(walk, lo, hi, up, SLOTS: tl.constexpr, C: tl.constexpr):
    """Which tokens the rows of the items from lo to hi won, as far as they fit, BM lanes an item; -1 where there is
    none."""
    slot = tl.arange(0, SLOTS)
    m = lo + slot // C.BM
    ok = m < hi
    row = item_field(walk.items, walk.count, m, ok, BEGIN) + slot % C.BM
    stop = item_field(walk.items, walk.count, m, ok, STOP)
    winners = item_field(walk.items, walk.count, m, ok, WINNERS)
    return tl.load(up.argmax + (winners + row), mask=row < stop, other=-1).to(tl.int32)


@triton.jit
def _won_by_others(won, walk, n, up, C: tl.constexpr):
    """For each row of item n: how many items of its document before n won the same token, how many behind n, and how
    many rows of n itself."""
    before = tl.full((C.BM,), 0, tl.int32)
    behind = tl.full((C.BM,), 0, tl.int32)
    own = tl.full((C.BM,), 0, tl.int32)
    for m in tl.range(walk.lo, walk.hi, num_stages=1):
        begin = item_field(walk.items, walk.count, m, True, BEGIN)
        rows = (item_field(walk.items, walk.count, m, True, STOP) - begin).to(tl.int32)
        winners = up.argmax + (item_field(walk.items, walk.count, m, True, WINNERS) + begin)
        found = tl.full((C.BM,), 0, tl.int32)
        for r0 in tl.range(0, rows, COMPARED, num_stages=1):
            r = r0 + tl.arange(0, COMPARED)
            theirs = tl.load(winners + r, mask=r < rows, other=-1).to(tl.int32)
            found += tl.sum((theirs[:, None] == won[None, :]).to(tl.int32), axis=0)
        before += tl.where((m < n) & (found > 0), 1, 0)
        behind += tl.where((m > n) & (found > 0), 1, 0)
        own += tl.where(m == n, found, 0)
    return before, behind, own


@triton.jit
def _weighted(row, ok, g, norms, Q, columns, d, C: tl.constexpr):
    """Rows of Q ``[.., BD]`` times what they count for, zeros where not `ok`."""
    coefficient = tl.where(ok, g, 0.0)
    if Q.weight is not None:
        coefficient *= tl.load(Q.weight + row.to(tl.int64) * Q.weight_stride_l, mask=ok, other=0.0)
    if norms is not None:
        coefficient *= tl.load(norms + row, mask=ok, other=0.0)
    x = load_rows(packed_row_pointers(Q, row, C), ok, columns, d, Q.stride_d, C.WIDE)
    return coefficient[:, None] * x.to(tl.float32)


@triton.jit
def _add_rows(G, tokens, t, m0, walk, norms, up, Q, columns, d, C: tl.constexpr):
    """G ``[1, BD]`` and the rows that won token t, in their order, times what they count for; `tokens` are those that
    the items from m0 on won."""
    SLOTS: tl.constexpr = tokens.shape[0]
    i = tl.arange(0, AT_A_TIME)
    places = tl.where(tokens == t, tl.arange(0, SLOTS), SLOTS)
    place = tl.min(places, axis=0)
    while place < SLOTS:
        at = tl.full((AT_A_TIME,), SLOTS, tl.int32)
        for k in tl.static_range(AT_A_TIME):
            at = tl.where(i == k, place, at)
            place = tl.min(tl.where(places > place, places, SLOTS), axis=0)
        ok = at < SLOTS
        m = m0 + at // C.BM
        row = item_field(walk.items, walk.count, m, ok, BEGIN).to(tl.int32) + at % C.BM
        g = tl.load(up.grad_scores + item_field(walk.items, walk.count, m, ok, SCORE), mask=ok, other=0.0)
        G += tl.sum(_weighted(row, ok, g, norms, Q, columns, d, C), axis=0)[None, :]
    return G


@triton.jit
def _sum_of_token(t, tokens, walk, norms, up, Q, columns, d, C: tl.constexpr):
    """What all rows of items add to token t ``[1, BD]``; `tokens` is what the first of them won."""
    SLOTS: tl.constexpr = tokens.shape[0]
    G = _add_rows(tl.full((1, C.BD), 0, tl.float32), tokens, t, walk.lo, walk, norms, up, Q, columns, d, C)
    for m0 in tl.range(walk.lo + SLOTS // C.BM, walk.hi, SLOTS // C.BM, num_stages=1):
        more = _tokens_of(walk, m0, walk.hi, up, SLOTS, C)
        G = _add_rows(G, more, t, m0, walk, norms, up, Q, columns, d, C)
    return G


@triton.jit
def _store(G, columns, sums, t, ok, base, gradient, D, d, C: tl.constexpr):
    """Write G, of some columns, to tokens t of a document."""
    if C.NORMALIZE:
        G = through_tile_norm(G, columns, sums, base, t, ok, D, d, C)
    row = t if C.WIDE == 0 else t.to(tl.int64)
    offsets = (row * d)[:, None] + columns[None, :]
    tl.store(gradient + offsets, G.to(gradient.dtype.element_ty), mask=ok[:, None] & (columns < d)[None, :])


@triton.jit
def _store_rows_alone(won, begin, g, rows, base, gradient, norms, Q, D, d, C: tl.constexpr):
    """Write what rows of an item add to the tokens `won` (-1: none) that no other row won, BN rows at a time."""
    for r0 in tl.range(0, rows, C.BN, num_stages=1):
        r = r0 + tl.arange(0, C.BN)
        t = tl.gather(won, r, axis=0)
        ok = t >= 0
        sums = no_norm_sums(C.BN)
        if C.NORMALIZE and not C.ONE_CHUNK:
            for c0 in range(0, d, C.BD):
                columns = c0 + tl.arange(0, C.BD)
                G = _weighted(begin + r, ok, g, norms, Q, columns, d, C)
                sums = more_norm_sums(sums, G, base, t, ok, columns, D, d, C)
        for c0 in range(0, C.BD if C.ONE_CHUNK else d, C.BD):
            columns = c0 + tl.arange(0, C.BD)
            G = _weighted(begin + r, ok, g, norms, Q, columns, d, C)
            _store(G, columns, sums, t, ok, base, gradient, D, d, C)


@triton.jit
def _store_tokens_shared(won, walk, base, gradient, norms, up, Q, D, d, C: tl.constexpr):
    """Write the sums of the tokens `won` (NO_TOKEN: none) that several rows won."""
    SLOTS: tl.constexpr = C.BM if C.BM > TOGETHER else TOGETHER
    one = tl.full((1,), 1, tl.int32)
    t = tl.min(won, axis=0)
    if t < NO_TOKEN:
        tokens = _tokens_of(walk, walk.lo, walk.hi, up, SLOTS, C)
        while t < NO_TOKEN:
            sums = no_norm_sums(1)
            if C.NORMALIZE and not C.ONE_CHUNK:
                for c0 in range(0, d, C.BD):
                    columns = c0 + tl.arange(0, C.BD)
                    G = _sum_of_token(t, tokens, walk, norms, up, Q, columns, d, C)
                    sums = more_norm_sums(sums, G, base, t * one, one > 0, columns, D, d, C)
            for c0 in range(0, C.BD if C.ONE_CHUNK else d, C.BD):
                columns = c0 + tl.arange(0, C.BD)
                G = _sum_of_token(t, tokens, walk, norms, up, Q, columns, d, C)
                _store(G, columns, sums, t * one, one > 0, base, gradient, D, d, C)
            t = tl.min(tl.where(won > t, won, NO_TOKEN), axis=0)


@triton.jit
def _sum_apart(walk, n, apart, length, norms, up, grad_D, Q, D, d, C: tl.constexpr):
    """grad_D of the tokens that rows of item n won; those that other items won too are shared out among them."""
    begin = item_field(walk.items, walk.count, n, True, BEGIN).to(tl.int32)
    g = tl.load(up.grad_scores + item_field(walk.items, walk.count, n, True, SCORE))
    won = _tokens_of(walk, n, n + 1, up, C.BM, C)
    mine = (won >= 0) & (won < length) & apart  # no forward writes another
    won = tl.where(mine, won, NO_TOKEN)
    before, behind, own = _won_by_others(won, walk, n, up, C)
    base = D.ptr + walk.t0 * D.stride_l
    gradient = grad_D + walk.t0 * d
    alone = mine & (before + behind == 0) & (own == 1)
    rows = tl.max(tl.where(alone, tl.arange(0, C.BM) + 1, 0), axis=0)
    _store_rows_alone(tl.where(alone, won, -1), begin, g, rows, base, gradient, norms, Q, D, d, C)
    mine = mine & (alone == 0) & (won % (before + behind + 1) == before)
    _store_tokens_shared(tl.where(mine, won, NO_TOKEN), walk, base, gradient, norms, up, Q, D, d, C)


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


@triton.jit(do_not_specialize=["Td", "rounds"])
def maxsim_grad_packed_documents_apart(
    Q, D, up, items, reach, starts, marks, norms, grad_D, Td, d, rounds, TILE: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """grad_D of the documents that few queries meet and that share no row with another, over zeros: a program, of one
    warp, for the tokens that the rows of an item won.

    The tiles of TILE rows of D that other documents touch are listed in `marks`: how many they are, for each tile
    whether it is listed, and the list. The last programs do what `maxsim_find_starts` does, for
    `maxsim_grad_few_packed_documents`.
    """
    n = tl.program_id(0)
    tiles = tl.cdiv(Td, TILE)
    if n < up.count:
        first = item_field(items, up.count, n, True, FIRST)
        length = item_field(items, up.count, n, True, LENGTH)
        lo, met, apart, tells = _neighbours(items, reach, n, first, length, up.count, C)
        # Without a branch around it: the compiler would put off to behind it what is read first.
        walk = Walk(items, up.count, lo, lo + tl.where(apart, met, 0), first, None, None)
        _sum_apart(walk, n, apart, length.to(tl.int32), norms, up, grad_D, Q, D, d, C)
        if (apart == 0) & tells & (length > 0):
            _mark(marks, first, length, tiles, TILE)
    else:
        find_starts(items, reach, starts, up.count, tiles + 1, TILE, Td, rounds, n - up.count)


@triton.jit(do_not_specialize=["Tq", "Td"])
def maxsim_grad_few_packed_documents(
    Q, D, up, items, starts, marks, norms, grad_D, Tq, Td, d, TILE: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """grad_D [Td, d] of the tiles of TILE rows of D that `marks` lists: zeros, and the sums of the rows that win over
    them.

    BN of them are summed at a time. The rest is as in `maxsim_grad_packed_documents`.
    """
    TWICE: tl.constexpr = C.NORMALIZE and not C.ONE_CHUNK
    tiles = tl.cdiv(Td, TILE)
    for n in tl.range(tl.program_id(0), tl.load(marks), tl.num_programs(0), num_stages=1):
        tile = tl.load(marks + 1 + tiles + n)
        lo = tl.load(starts + tiles + 1 + tile)
        hi = tl.load(starts + tile + 1)
        walk = Walk(items, up.count, lo, hi, wide(tile) * TILE, 0, Tq, None, None, None)
        won, count, slots = _slots(walk, up, TILE, C)
        rows = tl.minimum(Td - walk.t0, TILE).to(tl.int32)
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
                store_rows(G, grad_D, tl.where(t >= 0, walk.t0 + t, Td), Td, columns, d)
