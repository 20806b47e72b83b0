"""The gradient of packed documents of which few rows win: zeros, and over them the sums of the few tokens that won.

Most documents of a large store share no row with another and are met by few query rows, if any. After zeros for all of
grad_D, `maxsim_grad_disjoint_documents` sums these, and lists the tiles of rows of D that others touch.
`maxsim_grad_shared_tiles` sums those, all documents of a tile together.
"""

import triton
import triton.language as tl

from ...common.primitives import NO_TOKEN, load_rows, to_int64
from ..arguments import GradientTarget, PairRange
from ..gather import write_gradient
from ..list_pairs import fill_with_zeros, find_starts
from ..pairs import FIELD_ARGMAX, FIELD_BEGIN, FIELD_FIRST, FIELD_LENGTH, FIELD_SCORE, FIELD_STOP, load_pair_field
from .packed import (
    count_max_rows,
    load_step_argmax,
    load_step_pairs,
    locate_hit_tokens,
    locate_packed_rows,
    sum_packed_tile,
)

MAX_PAIRS_PER_DOCUMENT = tl.constexpr(8)  # of a document that is summed on its own
NEIGHBOR_PAIRS = tl.constexpr(16)  # items that a program looks at before and after its own: more than those
COMPARE_BLOCK_ROWS = tl.constexpr(32)  # rows that are compared with those of a program's item at a time
ADD_BLOCK_ROWS = tl.constexpr(2)  # of those that won a token
SEARCH_BLOCK_ROWS = tl.constexpr(128)  # rows of several items, at least, that are searched for a token at a time


@triton.jit
def _rank_hit_tokens(walk, up, TILE: tl.constexpr, C: tl.constexpr):
    """Which tokens of a tile win anything, how many of them there are, and how many before each."""
    won = tl.zeros((TILE,), tl.int32)
    for n0 in range(walk.lo, walk.hi, C.BM // C.ROWS_PER_QUERY):
        items = load_step_pairs(walk, up, n0, C.BM, C.ROWS_PER_QUERY, C)
        for s0 in tl.range(0, count_max_rows(walk, items), C.ROWS_PER_QUERY, num_stages=1):
            token, query = load_step_argmax(walk, items, s0, up, C.BM, C.ROWS_PER_QUERY)
            place = locate_hit_tokens(items, token, query, up, TILE)
            won += tl.histogram(tl.maximum(place, 0), TILE, mask=place >= 0)
    won = (won > 0).to(tl.int32)
    return won, tl.sum(won, axis=0), tl.cumsum(won, axis=0) - won


@triton.jit
def _find_neighbor_pairs(up, reach, n, first, length, C: tl.constexpr):
    """Of the items around item n: the first that is of its document, how many are, whether the document is disjoint,
    and, where it is not, whether item n is the one that lists its tiles.

    Disjoint: it has at most MOST_ITEMS items, of at most BM rows each, and no other document shares a row of D with it.
    """
    m = n - NEIGHBOR_PAIRS + tl.arange(0, 2 * NEIGHBOR_PAIRS)
    ok = (m >= 0) & (m < up.count)
    others = load_pair_field(up, m, ok, FIELD_FIRST)
    lengths = load_pair_field(up, m, ok, FIELD_LENGTH)
    rows = load_pair_field(up, m, ok, FIELD_STOP) - load_pair_field(up, m, ok, FIELD_BEGIN)
    behind = tl.load(reach + m, mask=ok, other=0)
    same = ok & (others == first)
    overlaps = ok & (((others < first) & (behind > first)) | ((others > first) & (others < first + length)))
    overlaps = overlaps | (same & ((lengths != length) | (rows > C.BM)))
    lo = tl.min(tl.where(same, m, up.count), axis=0)
    met = tl.sum(same.to(tl.int32), axis=0)
    disjoint = (met <= MAX_PAIRS_PER_DOCUMENT) & (tl.max(overlaps.to(tl.int32), axis=0) == 0)
    lists = tl.max((same & (m == n - 1) & (lengths == length)).to(tl.int32), axis=0) == 0
    return lo, met, disjoint, lists


@triton.jit
def _load_hit_tokens(lo, hi, up, SLOTS: tl.constexpr, C: tl.constexpr):
    """Which tokens the rows of the items from lo to hi won, as far as they fit, BM lanes an item; -1 where there is
    none."""
    slot = tl.arange(0, SLOTS)
    m = lo + slot // C.BM
    ok = m < hi
    row = load_pair_field(up, m, ok, FIELD_BEGIN) + slot % C.BM
    stop = load_pair_field(up, m, ok, FIELD_STOP)
    argmax = load_pair_field(up, m, ok, FIELD_ARGMAX)
    return tl.load(up.argmax + (argmax + row), mask=row < stop, other=-1).to(tl.int32)


@triton.jit
def _count_shared_hits(won, walk, n, up, C: tl.constexpr):
    """For each row of item n: how many items of its document before n won the same token, how many behind n, and how
    many rows of n itself."""
    before = tl.full((C.BM,), 0, tl.int32)
    behind = tl.full((C.BM,), 0, tl.int32)
    own = tl.full((C.BM,), 0, tl.int32)
    for m in tl.range(walk.lo, walk.hi, num_stages=1):
        begin = load_pair_field(up, m, True, FIELD_BEGIN)
        rows = (load_pair_field(up, m, True, FIELD_STOP) - begin).to(tl.int32)
        argmax = up.argmax + (load_pair_field(up, m, True, FIELD_ARGMAX) + begin)
        found = tl.full((C.BM,), 0, tl.int32)
        for r0 in tl.range(0, rows, COMPARE_BLOCK_ROWS, num_stages=1):
            r = r0 + tl.arange(0, COMPARE_BLOCK_ROWS)
            theirs = tl.load(argmax + r, mask=r < rows, other=-1).to(tl.int32)
            found += tl.sum((theirs[:, None] == won[None, :]).to(tl.int32), axis=0)
        before += tl.where((m < n) & (found > 0), 1, 0)
        behind += tl.where((m > n) & (found > 0), 1, 0)
        own += tl.where(m == n, found, 0)
    return before, behind, own


@triton.jit
def _load_weighted_rows(row, ok, g, up, Q, columns, d, C: tl.constexpr):
    """Rows of Q ``[.., BD]`` times what they count for, zeros where not `ok`."""
    coefficient = tl.where(ok, g, 0.0)
    if Q.weight is not None:
        coefficient *= tl.load(Q.weight + row.to(tl.int64) * Q.weight_stride_l, mask=ok, other=0.0)
    if up.norms is not None:
        coefficient *= tl.load(up.norms + row, mask=ok, other=0.0)
    x = load_rows(locate_packed_rows(Q, row, C), ok, columns, d, Q.stride_d, C.WIDE_OFFSETS)
    return coefficient[:, None] * x.to(tl.float32)


@triton.jit
def _add_rows(G, tokens, t, m0, up, Q, columns, d, C: tl.constexpr):
    """G ``[1, BD]`` and the rows that won token t, in their order, times what they count for; `tokens` are those that
    the items from m0 on won."""
    SLOTS: tl.constexpr = tokens.shape[0]
    i = tl.arange(0, ADD_BLOCK_ROWS)
    places = tl.where(tokens == t, tl.arange(0, SLOTS), SLOTS)
    place = tl.min(places, axis=0)
    while place < SLOTS:
        at = tl.full((ADD_BLOCK_ROWS,), SLOTS, tl.int32)
        for k in tl.static_range(ADD_BLOCK_ROWS):
            at = tl.where(i == k, place, at)
            place = tl.min(tl.where(places > place, places, SLOTS), axis=0)
        ok = at < SLOTS
        m = m0 + at // C.BM
        row = load_pair_field(up, m, ok, FIELD_BEGIN).to(tl.int32) + at % C.BM
        g = tl.load(up.grad_scores + load_pair_field(up, m, ok, FIELD_SCORE), mask=ok, other=0.0)
        G += tl.sum(_load_weighted_rows(row, ok, g, up, Q, columns, d, C), axis=0)[None, :]
    return G


@triton.jit
def _sum_token(of, columns, d, C: tl.constexpr):
    """What all rows of items add to token t ``[1, BD]``; `tokens` is what the first of them won."""
    t, tokens, walk, up, Q = of
    SLOTS: tl.constexpr = tokens.shape[0]
    G = _add_rows(tl.full((1, C.BD), 0, tl.float32), tokens, t, walk.lo, up, Q, columns, d, C)
    for m0 in tl.range(walk.lo + SLOTS // C.BM, walk.hi, SLOTS // C.BM, num_stages=1):
        more = _load_hit_tokens(m0, walk.hi, up, SLOTS, C)
        G = _add_rows(G, more, t, m0, up, Q, columns, d, C)
    return G


@triton.jit
def _load_single_rows(of, columns, d, C: tl.constexpr):
    row, ok, g, up, Q = of
    return _load_weighted_rows(row, ok, g, up, Q, columns, d, C)


@triton.jit
def _write_unshared(won, begin, g, rows, base, gradient, up, Q, D, d, C: tl.constexpr):
    """Write what rows of an item add to the tokens `won` (-1: none) that no other row won, BN rows at a time."""
    for r0 in tl.range(0, rows, C.BN, num_stages=1):
        r = r0 + tl.arange(0, C.BN)
        t = tl.gather(won, r, axis=0)
        ok = t >= 0
        to = GradientTarget(base, t, ok, gradient, t if C.WIDE_OFFSETS == 0 else t.to(tl.int64))
        write_gradient(_load_single_rows, (begin + r, ok, g, up, Q), to, C.BD if C.SINGLE_STEP else d, D, d, C)


@triton.jit
def _write_shared(won, walk, base, gradient, up, Q, D, d, C: tl.constexpr):
    """Write the sums of the tokens `won` (NO_TOKEN: none) that several rows won."""
    SLOTS: tl.constexpr = C.BM if C.BM > SEARCH_BLOCK_ROWS else SEARCH_BLOCK_ROWS
    one = tl.full((1,), 1, tl.int32)
    t = tl.min(won, axis=0)
    if t < NO_TOKEN:
        tokens = _load_hit_tokens(walk.lo, walk.hi, up, SLOTS, C)
        while t < NO_TOKEN:
            token = t * one
            to = GradientTarget(base, token, one > 0, gradient, token if C.WIDE_OFFSETS == 0 else token.to(tl.int64))
            write_gradient(_sum_token, (t, tokens, walk, up, Q), to, C.BD if C.SINGLE_STEP else d, D, d, C)
            t = tl.min(tl.where(won > t, won, NO_TOKEN), axis=0)


@triton.jit
def _sum_pair(walk, n, disjoint, length, up, grad_D, Q, D, d, C: tl.constexpr):
    """grad_D of the tokens that rows of item n won; those that other items won too are shared out among them."""
    begin = load_pair_field(up, n, True, FIELD_BEGIN).to(tl.int32)
    g = tl.load(up.grad_scores + load_pair_field(up, n, True, FIELD_SCORE))
    won = _load_hit_tokens(n, n + 1, up, C.BM, C)
    mine = (won >= 0) & (won < length) & disjoint  # no forward writes another
    won = tl.where(mine, won, NO_TOKEN)
    before, behind, own = _count_shared_hits(won, walk, n, up, C)
    base = D.ptr + walk.t0 * D.stride_l
    gradient = grad_D + walk.t0 * d
    single = mine & (before + behind == 0) & (own == 1)
    rows = tl.max(tl.where(single, tl.arange(0, C.BM) + 1, 0), axis=0)
    _write_unshared(tl.where(single, won, -1), begin, g, rows, base, gradient, up, Q, D, d, C)
    mine = mine & (single == 0) & (won % (before + behind + 1) == before)
    _write_shared(tl.where(mine, won, NO_TOKEN), walk, base, gradient, up, Q, D, d, C)


@triton.jit
def _mark_tiles(marks, first, length, tiles, TILE: tl.constexpr):
    """List the tiles that a document touches, each once: the order decides which program takes it, nothing else."""
    begin = (first // TILE).to(tl.int32)
    for t0 in tl.range(begin, ((first + length - 1) // TILE).to(tl.int32) + 1, NEIGHBOR_PAIRS, num_stages=1):
        t = t0 + tl.arange(0, NEIGHBOR_PAIRS)
        ok = t * to_int64(TILE) < first + length
        new = (tl.atomic_xchg(marks + 1 + t, 1, mask=ok, sem="relaxed") == 0) & ok
        at = tl.atomic_add(marks, tl.sum(new.to(tl.int32), axis=0), sem="relaxed")
        place = at + tl.cumsum(new.to(tl.int32), axis=0) - 1
        tl.store(marks + 1 + tiles + place, t, mask=new)


@triton.jit(do_not_specialize=["rounds"])
def maxsim_grad_disjoint_documents(Q, D, up, shared, grad_D, d, rounds, TILE: tl.constexpr, C: tl.constexpr):
    """grad_D of disjoint documents, over zeros: a program, of one warp, for the tokens that the rows of an item won.

    Tiles of TILE rows of D that other documents touch are listed in ``shared.marks``. The last programs do what
    `maxsim_find_starts` does, for `maxsim_grad_shared_tiles`.
    """
    n = tl.program_id(0)
    tiles = tl.cdiv(up.Ld, TILE)
    if n < up.count:
        first = load_pair_field(up, n, True, FIELD_FIRST)
        length = load_pair_field(up, n, True, FIELD_LENGTH)
        lo, met, disjoint, lists = _find_neighbor_pairs(up, shared.reach, n, first, length, C)
        # No branch around it: the compiler would move what is read first into the branch.
        walk = PairRange(lo, lo + tl.where(disjoint, met, 0), first, None, None)
        _sum_pair(walk, n, disjoint, length.to(tl.int32), up, grad_D, Q, D, d, C)
        if (disjoint == 0) & lists & (length > 0):
            _mark_tiles(shared.marks, first, length, tiles, TILE)
    else:
        block = n - up.count
        find_starts(up.items, shared.reach, shared.starts, up.count, tiles + 1, TILE, up.Ld, rounds, block)


@triton.jit
def maxsim_grad_shared_tiles(Q, D, up, shared, grad_D, d, TILE: tl.constexpr, C: tl.constexpr):
    """grad_D [Td, d] of the tiles of TILE rows of D that ``shared.marks`` lists: zeros, and over them the sums of the
    rows that win, BN at a time.

    The rest is as in `maxsim_grad_packed_documents`.
    """
    tiles = tl.cdiv(up.Ld, TILE)
    for n in tl.range(tl.program_id(0), tl.load(shared.marks), tl.num_programs(0), num_stages=1):
        tile = tl.load(shared.marks + 1 + tiles + n)
        lo = tl.load(shared.starts + tiles + 1 + tile)
        hi = tl.load(shared.starts + tile + 1)
        walk = PairRange(lo, hi, to_int64(tile) * TILE, 0, up.Lq, None, None, None)
        won, count, slots = _rank_hit_tokens(walk, up, TILE, C)
        rows = tl.minimum(up.Ld - walk.t0, TILE).to(tl.int32)
        fill_with_zeros(grad_D + walk.t0 * d, rows * d, "")
        tl.debug_barrier()  # the zeros are written by other threads than the sums
        base = D.ptr + walk.t0 * D.stride_l
        for u0 in tl.range(0, count, C.BN, num_stages=1):
            part = PairRange(walk.lo, walk.hi, walk.t0, walk.r0, walk.r1, slots, u0, None)
            here = (slots[None, :] == (u0 + tl.arange(0, C.BN))[:, None]) & (won > 0)[None, :]
            t = tl.max(tl.where(here, tl.arange(0, TILE)[None, :], -1), axis=1)
            to = GradientTarget(base, t, t >= 0, grad_D, walk.t0 + t)
            write_gradient(sum_packed_tile, (part, up, Q), to, d, D, d, C)
