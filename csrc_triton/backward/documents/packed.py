"""The destination-owned gradient of packed documents: a program owns BN rows of D, whatever documents they are of.

Documents may overlap and be met many times. Of the items sorted by their documents' first rows, those that may touch
the tile are neighbours. The program walks over them in order and over the winners of each, BM rows a step, or SLOT rows
of BM // SLOT items where queries are short. `backward_packed_lists` lists which rows won in the tile. Where no lists
are made, all winners are read; those elsewhere cost their part of the product, but their query rows are not read.
"""

import triton
import triton.language as tl

from ...common.primitives import query_weight, wide
from ..arguments import Items, StepRows, Target, Walk
from ..gather import slot_pointers, write_gradient
from ..pairs import BEGIN, FIRST, LENGTH, SCORE, STOP, WINNERS, item_field
from .packed_buckets import OFFSET_BITS, OFFSETS, listed_item
from .sums import sum_of_rows


@triton.jit
def step_items(walk, up, n0, STEP: tl.constexpr, SLOT: tl.constexpr, C: tl.constexpr):
    """Items of a step from item n0 on, SLOT lanes each; with no rows behind the last."""
    if walk.lists is not None:
        items = listed_item(walk, up, n0, C)
    else:
        n = n0 + tl.arange(0, STEP) // SLOT
        ok = n < walk.hi
        first = item_field(up, n, ok, FIRST) - walk.t0
        length = item_field(up, n, ok, LENGTH)
        begin = tl.maximum(item_field(up, n, ok, BEGIN), walk.r0).to(tl.int32)
        stop = tl.minimum(item_field(up, n, ok, STOP), walk.r1).to(tl.int32)
        winners = item_field(up, n, ok, WINNERS)
        score = item_field(up, n, ok, SCORE)
        items = Items(first, length, begin, stop, winners, score)
    return items


@triton.jit
def most_rows(walk, items):
    """The most rows, or entries, of any item of a step."""
    most = items.stop - items.begin
    if walk.lists is None:
        most = tl.max(most, axis=0)
    return most


@triton.jit
def step_winners(walk, items, s0, up, STEP: tl.constexpr, SLOT: tl.constexpr):
    """The winners, or entries, of the rows from number s0 of each item on, -1 where there is no row, and in the cross
    product their queries."""
    row = items.begin + s0 + tl.arange(0, STEP) % SLOT
    ok = row < items.stop
    if walk.lists is not None:
        token = tl.load(walk.lists.entries + row, mask=ok, other=-1)
        row = items.winners + (token >> OFFSET_BITS)
    else:
        token = tl.load(up.argmax + (items.winners + row), mask=ok, other=-1)
    query = row
    if up.query is not None:
        query = tl.load(up.query + row, mask=ok, other=-1)
    return token, query


@triton.jit
def _once(x):
    """`x`, computed once and not in every layout that it is used in: Triton repeats what it finds cheap, loads too.

    A reduction it does not repeat.
    """
    return tl.max(tl.broadcast_to(x[:, None], (x.shape[0], 2)), axis=1)


@triton.jit
def places(items, token, query, up, TILE: tl.constexpr):
    """The token of the tile that each lane's row won, -1: none."""
    token = token.to(tl.int64)
    local = token + items.first
    hit = (token >= 0) & (token < items.length) & (local >= 0) & (local < TILE)  # no forward writes another
    if up.query is not None:
        hit = hit & (query >= 0)
    return tl.where(hit, local, -1).to(tl.int32)


@triton.jit
def packed_row_pointers(Q, row, C: tl.constexpr):
    if C.FLAT:
        pointers = Q.ptr + row * Q.stride_l
    else:
        pointers = Q.ptr + row.to(tl.int64) * Q.stride_l
    return pointers


@triton.jit
def _rows(items, s0, token, query, s, STEP: tl.constexpr, SLOT: tl.constexpr, C: tl.constexpr):
    """The query rows from number s0 of each item on, given their winners and their queries."""
    walk = s.tile
    up = s.up
    Q = s.Q
    row = items.begin + s0 + tl.arange(0, STEP) % SLOT
    if walk.lists is not None:
        entry = _once(token)
        row = items.winners + (entry >> OFFSET_BITS)
        place = (entry & (OFFSETS - 1)) + items.first
        place = tl.where((entry >= 0) & (place >= 0) & (place < C.BN), place, -1)
    elif walk.slots is not None:
        place = places(items, token, query, up, walk.slots.shape[0])
        slot = tl.gather(walk.slots, tl.maximum(place, 0), axis=0) - walk.u0
        place = _once(tl.where((place >= 0) & (slot >= 0) & (slot < C.BN), slot, -1))
    else:
        place = _once(places(items, token, query, up, C.BN))
    hit = place >= 0
    score = items.score
    if up.query is not None:
        score += query.to(tl.int64) * up.stride_q
    coefficient = tl.load(up.grad_scores + score, mask=hit, other=0.0)
    if Q.weight is not None:
        coefficient *= query_weight(Q, row * 0, row, hit)
    if up.norms is not None:
        coefficient *= tl.load(up.norms + row, mask=hit, other=0.0)
    return StepRows(packed_row_pointers(Q, row, C), hit, place, coefficient)


@triton.jit
def _each_step(
    visit: tl.constexpr, total, s, STEP: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr
):
    """See `sum_of_rows`. Items are read two steps ahead and their winners one, so that nothing waits for what names
    it."""
    SLOT: tl.constexpr = min(C.SLOT, STEP)
    walk = s.tile
    up = s.up
    items = step_items(walk, up, walk.lo, STEP, SLOT, C)
    items_ahead = step_items(walk, up, walk.lo + STEP // SLOT, STEP, SLOT, C)
    token, query = step_winners(walk, items, 0, up, STEP, SLOT)
    for n0 in range(walk.lo, walk.hi, STEP // SLOT):
        if AHEAD:
            first_token, first_query = step_winners(walk, items_ahead, 0, up, STEP, SLOT)
            items_after = step_items(walk, up, n0 + 2 * (STEP // SLOT), STEP, SLOT, C)
            for s0 in tl.range(0, most_rows(walk, items), SLOT, num_stages=STAGES):
                token_ahead, query_ahead = step_winners(walk, items, s0 + SLOT, up, STEP, SLOT)
                total = visit(total, _rows(items, s0, token, query, s, STEP, SLOT, C), s, C)
                token = token_ahead
                query = query_ahead
            items = items_ahead
            items_ahead = items_after
            token = first_token
            query = first_query
        else:
            now = step_items(walk, up, n0, STEP, SLOT, C)
            for s0 in tl.range(0, most_rows(walk, now), SLOT, num_stages=STAGES):
                won, of = step_winners(walk, now, s0, up, STEP, SLOT)
                total = visit(total, _rows(now, s0, won, of, s, STEP, SLOT, C), s, C)
    return total


@triton.jit
def sum_of_walk(of, columns, d, C: tl.constexpr):
    return sum_of_rows(_each_step, of[0], of[1], of[2], columns, d, C)


@triton.jit
def _bounds_of(starts, up, C: tl.constexpr):
    """The items and the rows that piece ``program_id(1)`` of the tile ``program_id(0)`` is summed over: in the cross
    product all items that may touch it, and a part of the rows; else a part of the items.

    No `Walk`: Triton 3.6 returns no groups that hold None.
    """
    tile = tl.program_id(0)
    piece = tl.program_id(1)
    pieces = tl.num_programs(1)
    lo = tl.load(starts + tl.num_programs(0) + 1 + tile)
    hi = tl.load(starts + tile + 1)
    r0 = piece * 0
    r1 = r0 + up.Lq
    if up.query is not None:
        part = tl.cdiv(tl.cdiv(up.Lq, C.BM), pieces) * C.BM
        r0 = tl.minimum(piece * part, up.Lq)
        r1 = r0 + tl.minimum(part, up.Lq - r0)
    else:
        part = tl.cdiv(tl.maximum(hi - lo, 0), pieces)
        lo = tl.minimum(lo + piece * part, hi)
        hi = tl.minimum(lo + part, hi)
    return lo, hi, r0, r1


@triton.jit
def _slots(tile, piece, pieces, C: tl.constexpr):
    """Which rows of the partial sums a piece of a tile has."""
    return (wide(tile) * pieces + piece) * C.BN + tl.arange(0, C.BN)


@triton.jit
def maxsim_grad_packed_documents(Q, D, up, bounds, lists, partial, grad_D, d, C: tl.constexpr):
    """grad_D [Td, d] of BN rows of D a program: the sum over the query rows that they won.

    The items of `up` are sorted by their first rows, from the first that `lists` has on. Unless `partial` is None,
    program (.., n) sums the n-th piece of a tile, and `maxsim_join_packed_pieces` adds them. `up.query` is None but in
    the cross product; there `lists` may be None.
    """
    lo, hi, r0, r1 = _bounds_of(bounds.starts, up, C)
    features = d
    if bounds.own is not None:
        first = tl.minimum(lo, up.count - 1) // bounds.own * bounds.own
        served = hi <= first + bounds.room
        if lists is not None:
            served = served & (first == bounds.first)
            lo -= bounds.first
            hi -= bounds.first
        else:
            served = served == 0
        features = tl.where(served, d, 0)
    if lists is not None:
        lo *= lists.blocks
        hi *= lists.blocks
    walk = Walk(lo, hi, wide(tl.program_id(0)) * C.BN, r0, r1, None, None, lists)
    tokens = tl.arange(0, C.BN)
    t = walk.t0 + tokens
    base = D.ptr + walk.t0 * D.stride_l
    if partial is None:
        to = Target(base, tokens, t < up.Ld, grad_D, t)
    else:
        slots = _slots(tl.program_id(0), tl.program_id(1), tl.num_programs(1), C)
        to = Target(base, tokens, t < up.Ld, None, t, None, partial, slots, tl.full((C.BN,), 1, tl.int1))
    write_gradient(sum_of_walk, (walk, up, Q), to, features, D, d, C)


@triton.jit
def _sum_of_pieces(of, columns, d, C: tl.constexpr):
    """The sum of a tile's pieces in ascending order."""
    partial, pieces = of
    G = tl.full((C.BN, C.BD), 0, tl.float32)
    for piece in range(0, pieces):
        slots = slot_pointers(partial, _slots(tl.program_id(0), piece, pieces, C), columns, d)
        G += tl.load(slots, mask=tl.broadcast_to((columns < d)[None, :], (C.BN, C.BD)), other=0.0)
    return G


@triton.jit(do_not_specialize=["pieces", "Td"])
def maxsim_join_packed_pieces(D, partial, grad_D, pieces, Td, d, C: tl.constexpr):
    """grad_D of the tiles whose sums `maxsim_grad_packed_documents` took in several pieces."""
    t0 = wide(tl.program_id(0)) * C.BN
    tokens = tl.arange(0, C.BN)
    t = t0 + tokens
    to = Target(D.ptr + t0 * D.stride_l, tokens, t < Td, grad_D, t)
    write_gradient(_sum_of_pieces, (partial, pieces), to, d, D, d, C)
