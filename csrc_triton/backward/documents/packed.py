"""The destination-owned gradient of packed documents: a program owns BN rows of D, whatever documents they are of.

Documents may overlap and be met many times. Of the items sorted by their documents' first rows, those that may touch
the tile are neighbours. The program walks over them in order and over the winners of each, BM rows a step, or
ROWS_PER_QUERY rows of BM // ROWS_PER_QUERY items where queries are short. `backward_packed_lists` lists which rows won
in the tile. Where no lists are made, all winners are read; those elsewhere cost their part of the product, but their
query rows are not read.
"""

import triton
import triton.language as tl

from ...common.primitives import load_query_weight, to_int64
from ..arguments import GradientTarget, PairRange, StepPairs, StepRows
from ..gather import locate_partial_rows, write_gradient
from ..pairs import FIELD_ARGMAX, FIELD_BEGIN, FIELD_FIRST, FIELD_LENGTH, FIELD_SCORE, FIELD_STOP, load_pair_field
from .packed_buckets import BUCKET_ROW_LIMIT, OFFSET_BITS, load_bucket_pair
from .sums import sum_rows


@triton.jit
def load_step_pairs(walk, up, n0, STEP: tl.constexpr, ROWS_PER_QUERY: tl.constexpr, C: tl.constexpr):
    """Items of a step from item n0 on, ROWS_PER_QUERY lanes each; with no rows behind the last."""
    if walk.lists is not None:
        items = load_bucket_pair(walk, up, n0, C)
    else:
        n = n0 + tl.arange(0, STEP) // ROWS_PER_QUERY
        ok = n < walk.hi
        first = load_pair_field(up, n, ok, FIELD_FIRST) - walk.t0
        length = load_pair_field(up, n, ok, FIELD_LENGTH)
        begin = tl.maximum(load_pair_field(up, n, ok, FIELD_BEGIN), walk.r0).to(tl.int32)
        stop = tl.minimum(load_pair_field(up, n, ok, FIELD_STOP), walk.r1).to(tl.int32)
        argmax = load_pair_field(up, n, ok, FIELD_ARGMAX)
        score = load_pair_field(up, n, ok, FIELD_SCORE)
        items = StepPairs(first, length, begin, stop, argmax, score)
    return items


@triton.jit
def count_max_rows(walk, items):
    """The most rows, or entries, of any item of a step."""
    most = items.stop - items.begin
    if walk.lists is None:
        most = tl.max(most, axis=0)
    return most


@triton.jit
def load_step_argmax(walk, items, s0, up, STEP: tl.constexpr, ROWS_PER_QUERY: tl.constexpr):
    """The winners, or entries, of the rows from number s0 of each item on, -1 where there is no row, and in the cross
    product their queries."""
    row = items.begin + s0 + tl.arange(0, STEP) % ROWS_PER_QUERY
    ok = row < items.stop
    if walk.lists is not None:
        token = tl.load(walk.lists.entries + row, mask=ok, other=-1)
        row = items.argmax + (token >> OFFSET_BITS)
    else:
        token = tl.load(up.argmax + (items.argmax + row), mask=ok, other=-1)
    query = row
    if up.query is not None:
        query = tl.load(up.query + row, mask=ok, other=-1)
    return token, query


@triton.jit
def _materialize_once(x):
    """`x`, computed once and not in every layout that it is used in: Triton repeats what it finds cheap, loads too.

    A reduction it does not repeat.
    """
    return tl.max(tl.broadcast_to(x[:, None], (x.shape[0], 2)), axis=1)


@triton.jit
def locate_hit_tokens(items, token, query, up, TILE: tl.constexpr):
    """The token of the tile that each lane's row won, -1: none."""
    token = token.to(tl.int64)
    local = token + items.first
    hit = (token >= 0) & (token < items.length) & (local >= 0) & (local < TILE)  # no forward writes another
    if up.query is not None:
        hit = hit & (query >= 0)
    return tl.where(hit, local, -1).to(tl.int32)


@triton.jit
def locate_packed_rows(Q, row, C: tl.constexpr):
    if C.EVEN_ROW_STRIDE:
        pointers = Q.ptr + row * Q.stride_l
    else:
        pointers = Q.ptr + row.to(tl.int64) * Q.stride_l
    return pointers


@triton.jit
def _locate_step_rows(items, s0, token, query, s, STEP: tl.constexpr, ROWS_PER_QUERY: tl.constexpr, C: tl.constexpr):
    """The query rows from number s0 of each item on, given their winners and their queries."""
    walk = s.tile
    up = s.up
    Q = s.Q
    row = items.begin + s0 + tl.arange(0, STEP) % ROWS_PER_QUERY
    if walk.lists is not None:
        entry = _materialize_once(token)
        row = items.argmax + (entry >> OFFSET_BITS)
        place = (entry & (BUCKET_ROW_LIMIT - 1)) + items.first
        place = tl.where((entry >= 0) & (place >= 0) & (place < C.BN), place, -1)
    elif walk.slots is not None:
        place = locate_hit_tokens(items, token, query, up, walk.slots.shape[0])
        slot = tl.gather(walk.slots, tl.maximum(place, 0), axis=0) - walk.u0
        place = _materialize_once(tl.where((place >= 0) & (slot >= 0) & (slot < C.BN), slot, -1))
    else:
        place = _materialize_once(locate_hit_tokens(items, token, query, up, C.BN))
    hit = place >= 0
    score = items.score
    if up.query is not None:
        score += query.to(tl.int64) * up.stride_q
    coefficient = tl.load(up.grad_scores + score, mask=hit, other=0.0)
    if Q.weight is not None:
        coefficient *= load_query_weight(Q, row * 0, row, hit)
    if up.norms is not None:
        coefficient *= tl.load(up.norms + row, mask=hit, other=0.0)
    return StepRows(locate_packed_rows(Q, row, C), hit, place, coefficient)


@triton.jit
def _fold_steps(
    visit: tl.constexpr, total, s, STEP: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr
):
    """See `sum_rows`. Items are read two steps ahead and their winners one, so that nothing waits for what names
    it."""
    ROWS_PER_QUERY: tl.constexpr = min(C.ROWS_PER_QUERY, STEP)
    walk = s.tile
    up = s.up
    items = load_step_pairs(walk, up, walk.lo, STEP, ROWS_PER_QUERY, C)
    items_ahead = load_step_pairs(walk, up, walk.lo + STEP // ROWS_PER_QUERY, STEP, ROWS_PER_QUERY, C)
    token, query = load_step_argmax(walk, items, 0, up, STEP, ROWS_PER_QUERY)
    for n0 in range(walk.lo, walk.hi, STEP // ROWS_PER_QUERY):
        if AHEAD:
            first_token, first_query = load_step_argmax(walk, items_ahead, 0, up, STEP, ROWS_PER_QUERY)
            items_after = load_step_pairs(walk, up, n0 + 2 * (STEP // ROWS_PER_QUERY), STEP, ROWS_PER_QUERY, C)
            for s0 in tl.range(0, count_max_rows(walk, items), ROWS_PER_QUERY, num_stages=STAGES):
                token_ahead, query_ahead = load_step_argmax(walk, items, s0 + ROWS_PER_QUERY, up, STEP, ROWS_PER_QUERY)
                total = visit(total, _locate_step_rows(items, s0, token, query, s, STEP, ROWS_PER_QUERY, C), s, C)
                token = token_ahead
                query = query_ahead
            items = items_ahead
            items_ahead = items_after
            token = first_token
            query = first_query
        else:
            now = load_step_pairs(walk, up, n0, STEP, ROWS_PER_QUERY, C)
            for s0 in tl.range(0, count_max_rows(walk, now), ROWS_PER_QUERY, num_stages=STAGES):
                won, of = load_step_argmax(walk, now, s0, up, STEP, ROWS_PER_QUERY)
                total = visit(total, _locate_step_rows(now, s0, won, of, s, STEP, ROWS_PER_QUERY, C), s, C)
    return total


@triton.jit
def sum_packed_tile(of, columns, d, C: tl.constexpr):
    return sum_rows(_fold_steps, of[0], of[1], of[2], columns, d, C)


@triton.jit
def _locate_pairs(starts, up, C: tl.constexpr):
    """The items and the rows that piece ``program_id(1)`` of the tile ``program_id(0)`` is summed over: in the cross
    product all items that may touch it, and a part of the rows; else a part of the items.

    No `PairRange`: Triton 3.6 returns no groups that hold None.
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
def _index_partial_rows(tile, piece, pieces, C: tl.constexpr):
    """Which rows of the partial sums a piece of a tile has."""
    return (to_int64(tile) * pieces + piece) * C.BN + tl.arange(0, C.BN)


@triton.jit
def maxsim_grad_packed_documents(Q, D, up, bounds, lists, partial, grad_D, d, C: tl.constexpr):
    """grad_D [Td, d] of BN rows of D a program: the sum over the query rows that they won.

    The items of `up` are sorted by their first rows, from the first that `lists` has on. Unless `partial` is None,
    program (.., n) sums the n-th piece of a tile, and `maxsim_join_packed_pieces` adds them. `up.query` is None but in
    the cross product; there `lists` may be None.
    """
    lo, hi, r0, r1 = _locate_pairs(bounds.starts, up, C)
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
    walk = PairRange(lo, hi, to_int64(tl.program_id(0)) * C.BN, r0, r1, None, None, lists)
    tokens = tl.arange(0, C.BN)
    t = walk.t0 + tokens
    base = D.ptr + walk.t0 * D.stride_l
    if partial is None:
        to = GradientTarget(base, tokens, t < up.Ld, grad_D, t)
    else:
        slots = _index_partial_rows(tl.program_id(0), tl.program_id(1), tl.num_programs(1), C)
        to = GradientTarget(base, tokens, t < up.Ld, None, t, None, partial, slots, tl.full((C.BN,), 1, tl.int1))
    write_gradient(sum_packed_tile, (walk, up, Q), to, features, D, d, C)


@triton.jit
def _sum_partials(of, columns, d, C: tl.constexpr):
    """The sum of a tile's pieces in ascending order."""
    partial, pieces = of
    G = tl.full((C.BN, C.BD), 0, tl.float32)
    for piece in range(0, pieces):
        slots = locate_partial_rows(partial, _index_partial_rows(tl.program_id(0), piece, pieces, C), columns, d)
        G += tl.load(slots, mask=tl.broadcast_to((columns < d)[None, :], (C.BN, C.BD)), other=0.0)
    return G


@triton.jit(do_not_specialize=["pieces", "Td"])
def maxsim_join_packed_pieces(D, partial, grad_D, pieces, Td, d, C: tl.constexpr):
    """grad_D of the tiles whose sums `maxsim_grad_packed_documents` took in several pieces."""
    t0 = to_int64(tl.program_id(0)) * C.BN
    tokens = tl.arange(0, C.BN)
    t = t0 + tokens
    to = GradientTarget(D.ptr + t0 * D.stride_l, tokens, t < Td, grad_D, t)
    write_gradient(_sum_partials, (partial, pieces), to, d, D, d, C)
