"""The destination-owned gradient of packed documents: a one-hot product over the query rows that each token won.

A program owns BN rows of D, whatever documents they are of: documents may overlap and be met many times. Of the items
sorted by their documents' first rows, those that may touch the tile are neighbours. The program walks over them in
order and over the winners of each, BM rows a step, or SLOT rows of BM // SLOT items where queries are short: those that
`backward_ragged_lists` lists for the tile, or, where none are made, all. Then winners elsewhere cost their part of the
product, though their query rows are not read. Coefficients are those of `backward_documents`.
"""

import triton
import triton.language as tl

from .arguments import Items, Sizes, Walk
from .backward import more_norm_sums, no_norm_sums, norm_sums, through_norm, through_tile_norm
from .backward_documents import CAREFUL_ROWS, add_one_by_one, finite_rows, one_hot_product, scales
from .backward_ragged_lists import OFFSET_BITS, OFFSETS, listed_item
from .common import load_rows, query_weight, wide
from .ragged import BEGIN, FIRST, LENGTH, SCORE, STOP, WINNERS, item_field


@triton.jit
def step_items(walk, n0, STEP: tl.constexpr, SLOT: tl.constexpr, C: tl.constexpr):
    """Items of a step from item n0 on, SLOT lanes each; with no rows behind the last."""
    if walk.lists is not None:
        items = listed_item(walk, n0, C)
    else:
        n = n0 + tl.arange(0, STEP) // SLOT
        ok = n < walk.hi
        first = item_field(walk.items, walk.count, n, ok, FIRST) - walk.t0
        length = item_field(walk.items, walk.count, n, ok, LENGTH)
        begin = tl.maximum(item_field(walk.items, walk.count, n, ok, BEGIN), walk.r0).to(tl.int32)
        stop = tl.minimum(item_field(walk.items, walk.count, n, ok, STOP), walk.r1).to(tl.int32)
        winners = item_field(walk.items, walk.count, n, ok, WINNERS)
        score = item_field(walk.items, walk.count, n, ok, SCORE)
        items = Items(first, length, begin, stop, winners, score)
    return items


@triton.jit
def most_rows(walk, items):
    """The most rows, or entries, that an item of a step has."""
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
def _rows(walk, items, s0, token, query, norms, up, Q, STEP: tl.constexpr, SLOT: tl.constexpr, C: tl.constexpr):
    """Of the lanes of a step: query rows, at which of BN places the token is that each won (-1: none), and
    ``g * w / ||q||``."""
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
    if norms is not None:
        coefficient *= tl.load(norms + row, mask=hit, other=0.0)
    return row, place, coefficient


@triton.jit
def packed_row_pointers(Q, row, C: tl.constexpr):
    if C.FLAT:
        pointers = Q.ptr + row * Q.stride_l
    else:
        pointers = Q.ptr + row.to(tl.int64) * Q.stride_l
    return pointers


@triton.jit
def _scale_of(walk, norms, up, Q, C: tl.constexpr):
    """As that of `backward_documents`: for fp16, whose range may not hold the coefficients."""
    largest = tl.full((C.BM,), 0, tl.float32)
    for n0 in range(walk.lo, walk.hi, C.BM // C.SLOT):
        items = step_items(walk, n0, C.BM, C.SLOT, C)
        for s0 in range(0, most_rows(walk, items), C.SLOT):
            token, query = step_winners(walk, items, s0, up, C.BM, C.SLOT)
            _, _, c = _rows(walk, items, s0, token, query, norms, up, Q, C.BM, C.SLOT, C)
            largest = tl.maximum(largest, tl.where(tl.abs(c) < float("inf"), tl.abs(c), 0.0))
    return scales(tl.max(largest, axis=0))


@triton.jit
def _finite_sum(walk, norms, scale, up, Q, columns, d, CHECK: tl.constexpr, C: tl.constexpr):
    """The sums [BN, BD] of a tile's rows times `scale`; CHECK: without those that hold NaN or inf."""
    HALF: tl.constexpr = Q.ptr.dtype.element_ty != tl.float32
    STEP: tl.constexpr = CAREFUL_ROWS if CHECK else C.BM
    SLOT: tl.constexpr = min(C.SLOT, STEP)
    PAIRS: tl.constexpr = HALF and C.LANES > 1
    M: tl.constexpr = C.BD if HALF else C.BN
    N: tl.constexpr = (2 * C.BN if PAIRS else C.BN) if HALF else C.BD
    G = tl.full((M, N), 0, tl.float32)
    # Items are read two steps ahead, their winners one, so that nothing waits for what names it.
    items = step_items(walk, walk.lo, STEP, SLOT, C)
    items_ahead = step_items(walk, walk.lo + STEP // SLOT, STEP, SLOT, C)
    token, query = step_winners(walk, items, 0, up, STEP, SLOT)
    for n0 in range(walk.lo, walk.hi, STEP // SLOT):
        first_token, first_query = step_winners(walk, items_ahead, 0, up, STEP, SLOT)
        items_after = step_items(walk, n0 + 2 * (STEP // SLOT), STEP, SLOT, C)
        for s0 in range(0, most_rows(walk, items), SLOT):
            # Winners are read a step ahead, so that the rows that they name can be on their way for several steps.
            token_ahead, query_ahead = step_winners(walk, items, s0 + SLOT, up, STEP, SLOT)
            row, place, c = _rows(walk, items, s0, token, query, norms, up, Q, STEP, SLOT, C)
            x = load_rows(packed_row_pointers(Q, row, C), place >= 0, columns, d, Q.stride_d, C.WIDE)
            if CHECK:
                finite = finite_rows(x, c)
                x = tl.where(finite[:, None], x, tl.full((1, 1), 0, x.dtype))
                c = tl.where(finite, c, 0.0)
            G = one_hot_product(G, x, place, c * scale, C)
            token = token_ahead
            query = query_ahead
        items = items_ahead
        items_ahead = items_after
        token = first_token
        query = first_query
    if HALF:
        if PAIRS:
            G = tl.sum(tl.reshape(G, (C.BD, C.BN, 2)), axis=2)
        G = tl.trans(G)
    return G


@triton.jit
def _add_non_finite(G, walk, norms, up, Q, columns, d, C: tl.constexpr):
    """Add the rows that hold NaN or inf one at a time: in a product they would spoil every token of the tile."""
    SLOT: tl.constexpr = min(C.SLOT, CAREFUL_ROWS)
    for n0 in range(walk.lo, walk.hi, CAREFUL_ROWS // SLOT):
        items = step_items(walk, n0, CAREFUL_ROWS, SLOT, C)
        for s0 in tl.range(0, most_rows(walk, items), SLOT, num_stages=1):
            token, query = step_winners(walk, items, s0, up, CAREFUL_ROWS, SLOT)
            row, place, c = _rows(walk, items, s0, token, query, norms, up, Q, CAREFUL_ROWS, SLOT, C)
            x = load_rows(packed_row_pointers(Q, row, C), place >= 0, columns, d, Q.stride_d, C.WIDE).to(tl.float32)
            bad = (place >= 0) & (finite_rows(x, c) == 0)
            G = add_one_by_one(G, x, place, c, bad, C)
    return G


@triton.jit
def sum_of_rows(walk, norms, up, Q, c0, d, C: tl.constexpr):
    """``sum of coefficient * row`` of each token of a tile, BD features from c0 on, and these features."""
    columns = c0 + tl.arange(0, C.BD)
    scale = 1.0
    unscale = 1.0
    if Q.ptr.dtype.element_ty == tl.float16:
        scale, unscale = _scale_of(walk, norms, up, Q, C)
    G = _finite_sum(walk, norms, scale, up, Q, columns, d, False, C) * unscale
    # Zeros of the one-hot times NaN or inf are NaN: only then is it worth looking at every row.
    if tl.sum(G * 0.0) != 0.0:
        G = _finite_sum(walk, norms, scale, up, Q, columns, d, True, C) * unscale
        G = _add_non_finite(G, walk, norms, up, Q, columns, d, C)
    return G, columns


@triton.jit
def tile_norms(walk, norms, up, Q, base, tokens, ok, features, D, d, TWICE: tl.constexpr, C: tl.constexpr):
    """Of a tile's tokens the sums of `norm_sums` over all features, for `through_tile_norm`; zeros unless TWICE."""
    sums = no_norm_sums(C.BN)
    if TWICE:
        for c0 in range(0, features, C.BD):
            G, columns = sum_of_rows(walk, norms, up, Q, c0, d, C)
            sums = more_norm_sums(sums, G, base, tokens, ok, columns, D, d, C)
    return sums


@triton.jit
def bounds_of(starts, up, sizes, C: tl.constexpr):
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
    r1 = r0 + sizes.Lq
    if up.query is not None:
        part = tl.cdiv(tl.cdiv(sizes.Lq, C.BM), pieces) * C.BM
        r0 = tl.minimum(piece * part, sizes.Lq)
        r1 = r0 + tl.minimum(part, sizes.Lq - r0)
    else:
        part = tl.cdiv(tl.maximum(hi - lo, 0), pieces)
        lo = tl.minimum(lo + piece * part, hi)
        hi = tl.minimum(lo + part, hi)
    return lo, hi, r0, r1


@triton.jit
def store_rows(G, grad_D, t, Td, columns, d):
    mask = (t < Td)[:, None] & (columns < d)[None, :]
    tl.store(grad_D + (t * d)[:, None] + columns[None, :], G.to(grad_D.dtype.element_ty), mask=mask)


@triton.jit
def _partial_sums(partial, tile, piece, pieces, columns, d, C: tl.constexpr):
    """Where the sums of a piece of a tile are kept."""
    token = (wide(tile) * pieces + piece) * C.BN + tl.arange(0, C.BN)
    return partial + (token * d)[:, None] + columns[None, :]


@triton.jit(do_not_specialize=["Nq", "K", "Tq", "Td"])
def maxsim_grad_packed_documents(
    Q, D, up, items, bounds, lists, norms, partial, grad_D, Nq, K, Tq, Td, d, C: tl.constexpr
):  # fmt: skip
    """grad_D [Td, d] of BN rows of D a program: the sum over the query rows that they won.

    `items` are those of `up`, sorted by their first rows, from the first that `lists` has. Unless `partial` is None,
    program (.., n) takes the n-th piece of a tile's sum, and `maxsim_join_packed_pieces` adds them. `up.query` is None
    but in the cross product; there `lists` may be None.
    """
    sizes = Sizes(Nq, K, Tq, Td)
    TWICE: tl.constexpr = C.NORMALIZE and not C.ONE_CHUNK and partial is None
    lo, hi, r0, r1 = bounds_of(bounds.starts, up, sizes, C)
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
    walk = Walk(items, up.count, lo, hi, wide(tl.program_id(0)) * C.BN, r0, r1, None, None, lists)
    tokens = tl.arange(0, C.BN)
    t = walk.t0 + tokens
    base = D.ptr + walk.t0 * D.stride_l
    sums = tile_norms(walk, norms, up, Q, base, tokens, t < sizes.Ld, features, D, d, TWICE, C)
    for c0 in range(0, features, C.BD):
        G, columns = sum_of_rows(walk, norms, up, Q, c0, d, C)
        if partial is not None:
            slots = _partial_sums(partial, tl.program_id(0), tl.program_id(1), tl.num_programs(1), columns, d, C)
            tl.store(slots, G, mask=tl.broadcast_to((columns < d)[None, :], (C.BN, C.BD)))
        else:
            if C.NORMALIZE:
                G = through_tile_norm(G, columns, sums, base, tokens, t < sizes.Ld, D, d, C)
            store_rows(G, grad_D, t, sizes.Ld, columns, d)


@triton.jit
def _joined(partial, pieces, columns, d, C: tl.constexpr):
    """The sum of a tile's pieces in ascending order."""
    G = tl.full((C.BN, C.BD), 0, tl.float32)
    for piece in range(0, pieces):
        slots = _partial_sums(partial, tl.program_id(0), piece, pieces, columns, d, C)
        G += tl.load(slots, mask=tl.broadcast_to((columns < d)[None, :], (C.BN, C.BD)), other=0.0)
    return G


@triton.jit(do_not_specialize=["pieces", "Td"])
def maxsim_join_packed_pieces(D, partial, grad_D, pieces, Td, d, C: tl.constexpr):
    """grad_D of the tiles whose sums `maxsim_grad_packed_documents` took in several pieces."""
    t0 = wide(tl.program_id(0)) * C.BN
    tokens = tl.arange(0, C.BN)
    t = t0 + tokens
    base = D.ptr + t0 * D.stride_l
    sums = no_norm_sums(C.BN)
    if C.NORMALIZE:
        for c0 in range(0, d, C.BD):
            columns = c0 + tl.arange(0, C.BD)
            G = _joined(partial, pieces, columns, d, C)
            sums = more_norm_sums(sums, G, base, tokens, t < Td, columns, D, d, C)
    for c0 in range(0, d, C.BD):
        columns = c0 + tl.arange(0, C.BD)
        G = _joined(partial, pieces, columns, d, C)
        if C.NORMALIZE:
            x, _, _, _ = norm_sums(G, base, tokens, t < Td, columns, D, d, C)
            dot, squares, live = sums
            G = through_norm(G, x, live, squares, dot)
        store_rows(G, grad_D, t, Td, columns, d)
