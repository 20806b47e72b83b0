"""Document gradient of packed documents: a program owns a tile of BN rows of D, of any number of documents.

Documents may overlap, and several queries may be scored against the same document. Pairs (`items` in the code) are
sorted by the first row of their document, so the pairs that may touch a tile are consecutive.

```text
t0 = first row of D of the tile
lo, hi = range of pairs that may touch the tile     # from `maxsim_find_starts`
for n0 in range(lo, hi, pairs of a step):
    pairs = document and query rows of pairs n0, ...      # loaded two steps ahead
    for s0 in range(0, largest number of rows of a pair, ROWS_PER_QUERY):
        token = argmax[pair, row]                   # or a list entry; loaded one step ahead
        tile_row = first row of the document + token - t0    # -1 outside the tile
        c = grad_scores[pair] * q_weight[row] * inverse_norm(Q[row])
        G += onehot(tile_row, c) @ Q[row]           # `sum_rows`; only rows with a hit are loaded
grad_D[t0 : t0 + BN] = G through the Jacobian of the norm, or G is a partial sum
```

A step has BM rows of one pair, or ROWS_PER_QUERY rows of each of `BM // ROWS_PER_QUERY` pairs for short queries. With
lists, a step reads BM entries of one block of a pair. Without lists the program reads every argmax of the pairs. A row
outside the tile still occupies the product, but its query row is not loaded.

The lists are bucketed. A document is cut into at most MAX_BUCKETS buckets. A bucket has `BN * 2^shift` rows of D and
begins at a multiple of that width. `shift` is large enough for MAX_BUCKETS buckets to cover the document. A tile of BN
rows of D is therefore in one bucket of every document that it touches.

```text
list launch, program = (pair, block of at most BM query rows):
    token = argmax + position of the document in its first bucket
    bucket = token // BN >> shift                   # -1 without an argmax
    rank = number of earlier rows of the block with the same bucket
    starts[pair, block, :] = exclusive prefix sum of the bucket sizes
    entries[pair, block, starts[bucket] + rank] = row << OFFSET_BITS | token - first token of the bucket
```

Invariants:

- One program writes each element of the gradient. Pairs, rows, and pieces are added in ascending order.
- With pieces, program (.., n) sums part n of the rows or pairs of a tile, and `maxsim_join_packed_pieces` adds them.
- A block of a list is sorted stably and separately, so one launch suffices. No atomics.
- An entry has 12 bits for the row within its block, and OFFSET_BITS for the token within its bucket.
"""

import triton
import triton.language as tl

from ...common.primitives import load_query_weight, to_int64
from ..arguments import GradientTarget, PairRange, StepPairs, StepRows
from ..gather import load_partial_rows, write_gradient
from ..pairs import FIELD_ARGMAX, FIELD_BEGIN, FIELD_FIRST, FIELD_LENGTH, FIELD_SCORE, FIELD_STOP, load_pair_field
from .buckets import rank_rows
from .sums import find_slots, materialize_once, sum_rows

MAX_BUCKETS = tl.constexpr(64)
OFFSET_BITS = tl.constexpr(18)
BUCKET_ROW_LIMIT = tl.constexpr(2**18)  # a bucket has fewer rows of D
MAX_BLOCK_ROWS = tl.constexpr(2**12)  # query rows of a block; 2**13 would still fit an entry in 31 bits


@triton.jit
def _count_bits(x):
    """Return the number of bits of a nonnegative number, or one more."""
    return tl.maximum((x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def _partition_document(first, length, C: tl.constexpr):
    """Partition a document into buckets.

    Returns log2 of the tiles of a bucket, the position of the document in its first bucket, and the number of buckets.
    """
    shift = _count_bits((tl.maximum(length, 1) - 1) // ((MAX_BUCKETS - 1) * C.BN))
    begin = (first - ((first // C.BN) >> shift << shift) * C.BN).to(tl.int32)
    count = tl.where(length > 0, ((begin + length - 1) // C.BN >> shift) + 1, 0)
    return shift, begin, count


@triton.jit
def _load_vectorized(pointer, n, C: tl.constexpr):
    """Load the first n of BM elements, -1 after them, with four neighbors in each thread.

    Returns `[BM // ROWS_PER_QUERY, ROWS_PER_QUERY]`. The alignment is unknown, so a plain load would give a thread one
    element. Scans along the elements would then need four times as many exchanges.
    """
    first = tl.arange(0, C.BM // 4) * 4
    a = tl.load(pointer + first, mask=first < n, other=-1).to(tl.int32)
    b = tl.load(pointer + first + 1, mask=first + 1 < n, other=-1).to(tl.int32)
    c = tl.load(pointer + first + 2, mask=first + 2 < n, other=-1).to(tl.int32)
    e = tl.load(pointer + first + 3, mask=first + 3 < n, other=-1).to(tl.int32)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, e)), (C.BM // C.ROWS_PER_QUERY, C.ROWS_PER_QUERY))


@triton.jit
def maxsim_list_packed_argmax(up, lists, C: tl.constexpr):
    """Write the lists of cross-product pairs, a block of at most BM query rows for each program."""
    n = tl.program_id(0) // lists.blocks
    block = tl.program_id(0) % lists.blocks
    first = load_pair_field(up, n, True, FIELD_FIRST)
    length = load_pair_field(up, n, True, FIELD_LENGTH).to(tl.int32)
    stop = load_pair_field(up, n, True, FIELD_STOP)
    argmax = load_pair_field(up, n, True, FIELD_ARGMAX)
    shift, begin, count = _partition_document(first, length, C)
    row = block * lists.rows
    row_count = tl.minimum(stop - row, lists.rows)
    token = _load_vectorized(up.argmax + (argmax + row), row_count, C)
    query = _load_vectorized(up.query + row, row_count, C)
    # The comparison with the length is a safeguard: no forward writes an argmax outside its document.
    has_argmax = (token >= 0) & (token < length) & (query >= 0)
    token += begin
    bucket = tl.where(has_argmax, token // C.BN >> shift, -1)
    starts = lists.starts + to_int64(tl.program_id(0)) * (MAX_BUCKETS + 1)
    rank = tl.reshape(rank_rows(bucket, starts, count, True), (C.BM,))
    # Neighboring entries are in neighboring threads, so that their stores coalesce.
    bucket = tl.reshape(bucket, (C.BM,))
    entry = tl.arange(0, C.BM) * BUCKET_ROW_LIMIT + tl.reshape(token, (C.BM,)) - (bucket << shift) * C.BN
    has_argmax = bucket >= 0
    position = rank + tl.load(starts + bucket, mask=has_argmax, other=0)
    tl.store(lists.entries + to_int64(tl.program_id(0)) * lists.rows + position, entry, mask=has_argmax)


@triton.jit
def load_bucket_pair(pair_range, up, m, C: tl.constexpr):
    """Return the bucket of block `m` that holds the tile, with the entries of this piece, as `StepPairs`."""
    lists = pair_range.lists
    m = to_int64(m).to(tl.int32)
    n = m // lists.blocks
    ok = m < pair_range.hi
    first = load_pair_field(up, n, ok, FIELD_FIRST)
    length = load_pair_field(up, n, ok, FIELD_LENGTH).to(tl.int32)
    score = load_pair_field(up, n, ok, FIELD_SCORE)
    shift, begin, count = _partition_document(first, length, C)
    tile = (pair_range.t0 - first + begin) // C.BN
    bucket = tile >> shift
    starts = lists.starts + to_int64(m) * (MAX_BUCKETS + 1) + bucket
    ok = ok & (bucket >= 0) & (bucket < count)
    lo = tl.load(starts, mask=ok, other=0)
    hi = tl.load(starts + 1, mask=ok, other=0)
    part = tl.cdiv(tl.cdiv(hi - lo, C.BM), tl.num_programs(1)) * C.BM
    lo = tl.minimum(lo + tl.program_id(1) * part, hi)
    hi = tl.minimum(lo + part, hi)
    bucket_begin = (((bucket << shift) - tile) * C.BN).to(tl.int32)
    entries = m * lists.rows
    return StepPairs(bucket_begin, C.BN << shift, entries + lo, entries + hi, m % lists.blocks * lists.rows, score)


@triton.jit
def load_step_pairs(pair_range, up, n0, STEP: tl.constexpr, ROWS_PER_QUERY: tl.constexpr, C: tl.constexpr):
    """Load the pairs of a step from pair `n0` on, ROWS_PER_QUERY lanes each.

    Pairs after the last have no rows.
    """
    if pair_range.lists is not None:
        items = load_bucket_pair(pair_range, up, n0, C)
    else:
        n = n0 + tl.arange(0, STEP) // ROWS_PER_QUERY
        ok = n < pair_range.hi
        first = load_pair_field(up, n, ok, FIELD_FIRST) - pair_range.t0
        length = load_pair_field(up, n, ok, FIELD_LENGTH)
        begin = tl.maximum(load_pair_field(up, n, ok, FIELD_BEGIN), pair_range.r0).to(tl.int32)
        stop = tl.minimum(load_pair_field(up, n, ok, FIELD_STOP), pair_range.r1).to(tl.int32)
        argmax = load_pair_field(up, n, ok, FIELD_ARGMAX)
        score = load_pair_field(up, n, ok, FIELD_SCORE)
        items = StepPairs(first, length, begin, stop, argmax, score)
    return items


@triton.jit
def count_max_rows(pair_range, items):
    """Return the largest number of rows, or entries, of any pair of a step."""
    rows = items.stop - items.begin
    if pair_range.lists is None:
        rows = tl.max(rows, axis=0)
    return rows


@triton.jit
def load_step_argmax(pair_range, items, s0, up, STEP: tl.constexpr, ROWS_PER_QUERY: tl.constexpr):
    """Load the argmax, or list entry, of row `s0` and the following rows of each pair. -1 means no row.

    Also returns the queries of the rows in the cross product.
    """
    row = items.begin + s0 + tl.arange(0, STEP) % ROWS_PER_QUERY
    ok = row < items.stop
    if pair_range.lists is not None:
        token = tl.load(pair_range.lists.entries + row, mask=ok, other=-1)
        row = items.argmax + (token >> OFFSET_BITS)
    else:
        token = tl.load(up.argmax + (items.argmax + row), mask=ok, other=-1)
    query = row
    if up.query is not None:
        query = tl.load(up.query + row, mask=ok, other=-1)
    return token, query


@triton.jit
def locate_hit_tokens(items, token, query, up, TILE: tl.constexpr):
    """Return the token of the tile that is the argmax of each lane's row, or -1."""
    token = token.to(tl.int64)
    local = token + items.first
    # The comparison with the length is a safeguard: no forward writes an argmax outside its document.
    hit = (token >= 0) & (token < items.length) & (local >= 0) & (local < TILE)
    if up.query is not None:
        hit = hit & (query >= 0)
    return tl.where(hit, local, -1).to(tl.int32)


@triton.jit
def locate_packed_rows(Q, row, C: tl.constexpr):
    """Return pointers to packed query rows."""
    if C.EVEN_ROW_STRIDE:
        pointers = Q.ptr + row * Q.stride_l
    else:
        pointers = Q.ptr + row.to(tl.int64) * Q.stride_l
    return pointers


@triton.jit
def _locate_step_rows(items, s0, token, query, s, STEP: tl.constexpr, ROWS_PER_QUERY: tl.constexpr, C: tl.constexpr):
    """Return the `StepRows` of row `s0` and the following rows of each pair, given argmax and queries."""
    pair_range = s.tile
    up = s.up
    Q = s.Q
    row = items.begin + s0 + tl.arange(0, STEP) % ROWS_PER_QUERY
    if pair_range.lists is not None:
        entry = materialize_once(token)
        row = items.argmax + (entry >> OFFSET_BITS)
        tile_row = (entry & (BUCKET_ROW_LIMIT - 1)) + items.first
        tile_row = tl.where((entry >= 0) & (tile_row >= 0) & (tile_row < C.BN), tile_row, -1)
    elif pair_range.slots is not None:
        tile_row = locate_hit_tokens(items, token, query, up, pair_range.slots.shape[0])
        tile_row = find_slots(pair_range.slots, pair_range.u0, tile_row, C)
    else:
        tile_row = materialize_once(locate_hit_tokens(items, token, query, up, C.BN))
    hit = tile_row >= 0
    score = items.score
    if up.query is not None:
        score += query.to(tl.int64) * up.stride_q
    coefficient = tl.load(up.grad_scores + score, mask=hit, other=0.0)
    if Q.weight is not None:
        coefficient *= load_query_weight(Q, row * 0, row, hit)
    if up.norms is not None:
        coefficient *= tl.load(up.norms + row, mask=hit, other=0.0)
    pointers = locate_packed_rows(Q, row, C)
    return StepRows(pointers, hit, tile_row, coefficient, pointers)


@triton.jit
def _fold_steps(
    visit: tl.constexpr, total, s, STEP: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr
):
    """Fold a visitor over the rows of a tile. See `sum_rows`.

    With AHEAD, pairs are loaded two steps ahead and their argmax one step ahead. No load then waits for its own
    address.
    """
    pair_range = s.tile
    ROWS_PER_QUERY: tl.constexpr = min(C.ROWS_PER_QUERY, STEP) if pair_range.lists is None else STEP
    up = s.up
    items = load_step_pairs(pair_range, up, pair_range.lo, STEP, ROWS_PER_QUERY, C)
    items_ahead = load_step_pairs(pair_range, up, pair_range.lo + STEP // ROWS_PER_QUERY, STEP, ROWS_PER_QUERY, C)
    token, query = load_step_argmax(pair_range, items, 0, up, STEP, ROWS_PER_QUERY)
    for n0 in range(pair_range.lo, pair_range.hi, STEP // ROWS_PER_QUERY):
        if AHEAD:
            first_token, first_query = load_step_argmax(pair_range, items_ahead, 0, up, STEP, ROWS_PER_QUERY)
            items_after = load_step_pairs(pair_range, up, n0 + 2 * (STEP // ROWS_PER_QUERY), STEP, ROWS_PER_QUERY, C)
            for s0 in tl.range(0, count_max_rows(pair_range, items), ROWS_PER_QUERY, num_stages=STAGES):
                token_ahead, query_ahead = load_step_argmax(
                    pair_range, items, s0 + ROWS_PER_QUERY, up, STEP, ROWS_PER_QUERY
                )
                total = visit(total, _locate_step_rows(items, s0, token, query, s, STEP, ROWS_PER_QUERY, C), s, C)
                token = token_ahead
                query = query_ahead
            items = items_ahead
            items_ahead = items_after
            token = first_token
            query = first_query
        else:
            current_items = load_step_pairs(pair_range, up, n0, STEP, ROWS_PER_QUERY, C)
            for s0 in tl.range(0, count_max_rows(pair_range, current_items), ROWS_PER_QUERY, num_stages=STAGES):
                current_token, current_query = load_step_argmax(pair_range, current_items, s0, up, STEP, ROWS_PER_QUERY)
                total = visit(
                    total,
                    _locate_step_rows(current_items, s0, current_token, current_query, s, STEP, ROWS_PER_QUERY, C),
                    s,
                    C,
                )
    return total


@triton.jit
def sum_packed_tile(args, columns, d, C: tl.constexpr):
    """Adapter of `sum_rows` for `write_gradient`."""
    return sum_rows(_fold_steps, args[0], args[1], args[2], columns, d, C)


@triton.jit
def _locate_pairs(starts, up, C: tl.constexpr):
    """Return the pairs and the rows that piece ``program_id(1)`` of tile ``program_id(0)`` is summed over.

    In the cross product a piece has all pairs that may touch the tile, and a part of the rows. Otherwise it has a part
    of the pairs. The values are not a `PairRange`, because Triton 3.6 cannot return a tuple that holds None.
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
    """Return the rows of the partial sums of a piece of a tile."""
    return (to_int64(tile) * pieces + piece) * C.BN + tl.arange(0, C.BN)


@triton.jit
def maxsim_grad_packed_documents(Q, D, up, bounds, lists, partial, grad_D, d, C: tl.constexpr):
    """Compute the gradient of BN rows of D for each program.

    Args:
        Q: `QueryArgs` of packed rows.
        D: `DocumentArgs` of packed rows.
        up: `UpstreamArgs`. Its pairs are sorted by the first row of their document, from the first pair of `lists` on.
            `up.query` is None except in the cross product.
        bounds: `TilePairArgs`.
        lists: `PackedBucketArgs`, or None. Only the cross product has lists.
        partial: Output for fp32 partial sums, or None. With it, program (.., n) sums the n-th piece of a tile.
        grad_D: Output `[Td, d]`, contiguous.
        d: Number of features.
        C: Compile-time choices, a `KernelConfig`.
    """
    lo, hi, r0, r1 = _locate_pairs(bounds.starts, up, C)
    features = d
    if bounds.chunk_pairs is not None:
        first = tl.minimum(lo, up.count - 1) // bounds.chunk_pairs * bounds.chunk_pairs
        is_summed_here = hi <= first + bounds.room
        if lists is not None:
            is_summed_here = is_summed_here & (first == bounds.first)
            lo -= bounds.first
            hi -= bounds.first
        else:
            is_summed_here = is_summed_here == 0
        features = tl.where(is_summed_here, d, 0)
    if lists is not None:
        lo *= lists.blocks
        hi *= lists.blocks
    pair_range = PairRange(lo, hi, to_int64(tl.program_id(0)) * C.BN, r0, r1, None, None, lists)
    tokens = tl.arange(0, C.BN)
    t = pair_range.t0 + tokens
    base = D.ptr + pair_range.t0 * D.stride_l
    if partial is None:
        target = GradientTarget(base, tokens, t < up.Ld, grad_D, t)
    else:
        slots = _index_partial_rows(tl.program_id(0), tl.program_id(1), tl.num_programs(1), C)
        target = GradientTarget(base, tokens, t < up.Ld, None, t, None, partial, slots, tl.full((C.BN,), 1, tl.int1))
    write_gradient(sum_packed_tile, (pair_range, up, Q), target, features, D, d, C)


@triton.jit
def _sum_partials(args, columns, d, C: tl.constexpr):
    """Sum the pieces of a tile in ascending order."""
    partial, pieces = args
    G = tl.full((C.BN, C.BD), 0, tl.float32)
    for piece in range(0, pieces):
        slots = _index_partial_rows(tl.program_id(0), piece, pieces, C)
        G += load_partial_rows(partial, slots, columns, d, C)
    return G


@triton.jit(do_not_specialize=["pieces", "Td"])
def maxsim_join_packed_pieces(D, partial, grad_D, pieces, Td, d, C: tl.constexpr):
    """Compute the gradient of tiles that `maxsim_grad_packed_documents` summed in several pieces."""
    t0 = to_int64(tl.program_id(0)) * C.BN
    tokens = tl.arange(0, C.BN)
    t = t0 + tokens
    target = GradientTarget(D.ptr + t0 * D.stride_l, tokens, t < Td, grad_D, t)
    write_gradient(_sum_partials, (partial, pieces), target, d, D, d, C)
