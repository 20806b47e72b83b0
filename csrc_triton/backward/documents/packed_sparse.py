"""Document gradient of packed documents with few argmax values: write zeros, then sum the tokens that are an argmax.

Most documents of a large store share no row of D with another document, and few query rows are scored against them.
Such documents are disjoint. Two launches follow after the pairs are sorted and grad_D is filled with zeros.

```text
maxsim_grad_disjoint_documents, program = pair, one warp:
    find the pairs of the same document and whether the document is disjoint
    if it is disjoint:
        for tokens that are the argmax of one row only, BN at a time: grad_D[t] = c * Q[row]
        for tokens of several rows that this pair owns: grad_D[t] = sum of c * Q[row], rows ascending
    elif this pair is the first of its document: add the document's tiles of TILE rows to shared.marks
maxsim_grad_shared_tiles, persistent:
    for tile in shared.marks, every n-th:
        lo, hi = range of pairs that may touch the tile
        slots = rank of each token of the tile that is an argmax
        grad_D[tile] = 0
        for u0 in range(0, number of slots, BN):
            grad_D[tokens of slots u0, ...] = one-hot product over pairs lo to hi    # as in `packed`
```

Each gradient passes through the Jacobian of the norm.

Invariants:

- A disjoint document has at most MAX_PAIRS_PER_DOCUMENT pairs with at most BM rows each. It overlaps no other document.
- A token shared by n pairs of a document is owned by the pair with index `token % n` among them.
- Sums run in ascending order. Atomics only append tiles to a list, whose order does not change any sum.
"""

import triton
import triton.language as tl

from ...common.primitives import NO_TOKEN, load_rows, to_int64
from ..arguments import GradientTarget, PairRange
from ..gather import write_gradient
from ..pairs import (
    FIELD_ARGMAX,
    FIELD_BEGIN,
    FIELD_FIRST,
    FIELD_LENGTH,
    FIELD_SCORE,
    FIELD_STOP,
    fill_with_zeros,
    find_starts,
    load_pair_field,
)
from .packed import (
    count_max_rows,
    load_step_argmax,
    load_step_pairs,
    locate_hit_tokens,
    locate_packed_rows,
    sum_packed_tile,
)
from .sums import locate_slot_tokens, rank_hit_tokens

MAX_PAIRS_PER_DOCUMENT = tl.constexpr(8)  # pairs of a disjoint document
NEIGHBOR_PAIRS = tl.constexpr(16)  # pairs that a program inspects before and after its own, more than the above
COMPARE_BLOCK_ROWS = tl.constexpr(32)  # rows of another pair in a step of `_count_shared_hits`
ADD_BLOCK_ROWS = tl.constexpr(2)  # rows of a step of `_add_rows`
SEARCH_BLOCK_ROWS = tl.constexpr(128)  # minimum number of lanes in which `_write_shared` searches for a token


@triton.jit
def _count_hits(pair_range, up, TILE: tl.constexpr, C: tl.constexpr):
    """Return for each token of a tile the number of rows whose argmax it is."""
    counts = tl.zeros((TILE,), tl.int32)
    for n0 in range(pair_range.lo, pair_range.hi, C.BM // C.ROWS_PER_QUERY):
        items = load_step_pairs(pair_range, up, n0, C.BM, C.ROWS_PER_QUERY, C)
        for s0 in tl.range(0, count_max_rows(pair_range, items), C.ROWS_PER_QUERY, num_stages=1):
            token, query = load_step_argmax(pair_range, items, s0, up, C.BM, C.ROWS_PER_QUERY)
            tile_row = locate_hit_tokens(items, token, query, up, TILE)
            counts += tl.histogram(tl.maximum(tile_row, 0), TILE, mask=tile_row >= 0)
    return counts


@triton.jit
def _find_neighbor_pairs(up, reach, n, first, length, C: tl.constexpr):
    """Inspect the pairs around pair `n`.

    A disjoint document has at most MAX_PAIRS_PER_DOCUMENT pairs of at most BM rows each. No other document shares a row
    of D with it.

    Returns:
        The first pair of the document, the number of its pairs, and whether the document is disjoint. Then whether pair
        `n` lists the tiles of a document that is not disjoint.
    """
    m = n - NEIGHBOR_PAIRS + tl.arange(0, 2 * NEIGHBOR_PAIRS)
    ok = (m >= 0) & (m < up.count)
    neighbor_first = load_pair_field(up, m, ok, FIELD_FIRST)
    lengths = load_pair_field(up, m, ok, FIELD_LENGTH)
    rows = load_pair_field(up, m, ok, FIELD_STOP) - load_pair_field(up, m, ok, FIELD_BEGIN)
    ends = tl.load(reach + m, mask=ok, other=0)
    is_same = ok & (neighbor_first == first)
    overlaps = ok & (
        ((neighbor_first < first) & (ends > first)) | ((neighbor_first > first) & (neighbor_first < first + length))
    )
    overlaps = overlaps | (is_same & ((lengths != length) | (rows > C.BM)))
    lo = tl.min(tl.where(is_same, m, up.count), axis=0)
    pair_count = tl.sum(is_same.to(tl.int32), axis=0)
    is_disjoint = (pair_count <= MAX_PAIRS_PER_DOCUMENT) & (tl.max(overlaps.to(tl.int32), axis=0) == 0)
    is_first_pair = tl.max((is_same & (m == n - 1) & (lengths == length)).to(tl.int32), axis=0) == 0
    return lo, pair_count, is_disjoint, is_first_pair


@triton.jit
def _load_hit_tokens(lo, hi, up, SLOTS: tl.constexpr, C: tl.constexpr):
    """Load the argmax of the rows of pairs `lo` to `hi`, BM lanes for each pair, as far as they fit in SLOTS lanes.

    -1 means no row.
    """
    lane = tl.arange(0, SLOTS)
    m = lo + lane // C.BM
    ok = m < hi
    row = load_pair_field(up, m, ok, FIELD_BEGIN) + lane % C.BM
    stop = load_pair_field(up, m, ok, FIELD_STOP)
    argmax = load_pair_field(up, m, ok, FIELD_ARGMAX)
    return tl.load(up.argmax + (argmax + row), mask=row < stop, other=-1).to(tl.int32)


@triton.jit
def _count_shared_hits(hit_tokens, pair_range, n, up, C: tl.constexpr):
    """Count for each row of pair `n` where else its argmax token is hit.

    Returns the number of pairs of the document before `n` that hit it, the number after `n`, and the number of rows of
    `n`.
    """
    earlier_pairs = tl.full((C.BM,), 0, tl.int32)
    later_pairs = tl.full((C.BM,), 0, tl.int32)
    own_rows = tl.full((C.BM,), 0, tl.int32)
    for m in tl.range(pair_range.lo, pair_range.hi, num_stages=1):
        begin = load_pair_field(up, m, True, FIELD_BEGIN)
        rows = (load_pair_field(up, m, True, FIELD_STOP) - begin).to(tl.int32)
        argmax = up.argmax + (load_pair_field(up, m, True, FIELD_ARGMAX) + begin)
        hits = tl.full((C.BM,), 0, tl.int32)
        for r0 in tl.range(0, rows, COMPARE_BLOCK_ROWS, num_stages=1):
            r = r0 + tl.arange(0, COMPARE_BLOCK_ROWS)
            tokens = tl.load(argmax + r, mask=r < rows, other=-1).to(tl.int32)
            hits += tl.sum((tokens[:, None] == hit_tokens[None, :]).to(tl.int32), axis=0)
        earlier_pairs += tl.where((m < n) & (hits > 0), 1, 0)
        later_pairs += tl.where((m > n) & (hits > 0), 1, 0)
        own_rows += tl.where(m == n, hits, 0)
    return earlier_pairs, later_pairs, own_rows


@triton.jit
def _load_weighted_rows(row, ok, g, up, Q, columns, d, C: tl.constexpr):
    """Load rows of Q `[.., BD]` times their coefficients. Rows that are not `ok` are zeros."""
    coefficient = tl.where(ok, g, 0.0)
    if Q.weight is not None:
        coefficient *= tl.load(Q.weight + row.to(tl.int64) * Q.weight_stride_l, mask=ok, other=0.0)
    if up.norms is not None:
        coefficient *= tl.load(up.norms + row, mask=ok, other=0.0)
    x = load_rows(locate_packed_rows(Q, row, C), ok, columns, d, Q.stride_d, C.WIDE_OFFSETS)
    return coefficient[:, None] * x.to(tl.float32)


@triton.jit
def _add_rows(G, tokens, t, m0, up, Q, columns, d, C: tl.constexpr):
    """Add the rows whose argmax is token `t` to G `[1, BD]`, in order and times their coefficients.

    `tokens` holds the argmax values of the pairs from `m0` on.
    """
    SLOTS: tl.constexpr = tokens.shape[0]
    i = tl.arange(0, ADD_BLOCK_ROWS)
    lanes = tl.where(tokens == t, tl.arange(0, SLOTS), SLOTS)
    lane = tl.min(lanes, axis=0)
    while lane < SLOTS:
        hit_lanes = tl.full((ADD_BLOCK_ROWS,), SLOTS, tl.int32)
        for k in tl.static_range(ADD_BLOCK_ROWS):
            hit_lanes = tl.where(i == k, lane, hit_lanes)
            lane = tl.min(tl.where(lanes > lane, lanes, SLOTS), axis=0)
        ok = hit_lanes < SLOTS
        m = m0 + hit_lanes // C.BM
        row = load_pair_field(up, m, ok, FIELD_BEGIN).to(tl.int32) + hit_lanes % C.BM
        g = tl.load(up.grad_scores + load_pair_field(up, m, ok, FIELD_SCORE), mask=ok, other=0.0)
        G += tl.sum(_load_weighted_rows(row, ok, g, up, Q, columns, d, C), axis=0)[None, :]
    return G


@triton.jit
def _sum_token(args, columns, d, C: tl.constexpr):
    """Sum all rows of the pairs whose argmax is token t `[1, BD]`. `tokens` holds the first argmax values."""
    t, tokens, pair_range, up, Q = args
    SLOTS: tl.constexpr = tokens.shape[0]
    G = _add_rows(tl.full((1, C.BD), 0, tl.float32), tokens, t, pair_range.lo, up, Q, columns, d, C)
    for m0 in tl.range(pair_range.lo + SLOTS // C.BM, pair_range.hi, SLOTS // C.BM, num_stages=1):
        more_tokens = _load_hit_tokens(m0, pair_range.hi, up, SLOTS, C)
        G = _add_rows(G, more_tokens, t, m0, up, Q, columns, d, C)
    return G


@triton.jit
def _load_single_rows(args, columns, d, C: tl.constexpr):
    """Adapter of `_load_weighted_rows` for `write_gradient`."""
    row, ok, g, up, Q = args
    return _load_weighted_rows(row, ok, g, up, Q, columns, d, C)


@triton.jit
def _write_unshared(single_tokens, begin, g, rows, base, gradient, up, Q, D, d, C: tl.constexpr):
    """Write the gradients of tokens that are the argmax of one row only (-1: none), BN rows at a time."""
    for r0 in tl.range(0, rows, C.BN, num_stages=1):
        r = r0 + tl.arange(0, C.BN)
        t = tl.gather(single_tokens, r, axis=0)
        ok = t >= 0
        target = GradientTarget(base, t, ok, gradient, t if C.WIDE_OFFSETS == 0 else t.to(tl.int64))
        write_gradient(_load_single_rows, (begin + r, ok, g, up, Q), target, C.BD if C.SINGLE_STEP else d, D, d, C)


@triton.jit
def _write_shared(shared_tokens, pair_range, base, gradient, up, Q, D, d, C: tl.constexpr):
    """Write the gradients of tokens that are the argmax of several rows (NO_TOKEN: none)."""
    SLOTS: tl.constexpr = C.BM if C.BM > SEARCH_BLOCK_ROWS else SEARCH_BLOCK_ROWS
    one = tl.full((1,), 1, tl.int32)
    t = tl.min(shared_tokens, axis=0)
    if t < NO_TOKEN:
        tokens = _load_hit_tokens(pair_range.lo, pair_range.hi, up, SLOTS, C)
        while t < NO_TOKEN:
            token = t * one
            target = GradientTarget(
                base, token, one > 0, gradient, token if C.WIDE_OFFSETS == 0 else token.to(tl.int64)
            )
            write_gradient(_sum_token, (t, tokens, pair_range, up, Q), target, C.BD if C.SINGLE_STEP else d, D, d, C)
            t = tl.min(tl.where(shared_tokens > t, shared_tokens, NO_TOKEN), axis=0)


@triton.jit
def _sum_pair(pair_range, n, disjoint, length, up, grad_D, Q, D, d, C: tl.constexpr):
    """Write the gradients of the tokens that rows of pair `n` have as their argmax.

    A token that several pairs share is owned by one of them.
    """
    begin = load_pair_field(up, n, True, FIELD_BEGIN).to(tl.int32)
    g = tl.load(up.grad_scores + load_pair_field(up, n, True, FIELD_SCORE))
    hit_tokens = _load_hit_tokens(n, n + 1, up, C.BM, C)
    # The comparison with the length is a safeguard: no forward writes an argmax outside its document.
    is_owned = (hit_tokens >= 0) & (hit_tokens < length) & disjoint
    hit_tokens = tl.where(is_owned, hit_tokens, NO_TOKEN)
    earlier_pairs, later_pairs, own_rows = _count_shared_hits(hit_tokens, pair_range, n, up, C)
    base = D.ptr + pair_range.t0 * D.stride_l
    gradient = grad_D + pair_range.t0 * d
    is_single = is_owned & (earlier_pairs + later_pairs == 0) & (own_rows == 1)
    rows = tl.max(tl.where(is_single, tl.arange(0, C.BM) + 1, 0), axis=0)
    _write_unshared(tl.where(is_single, hit_tokens, -1), begin, g, rows, base, gradient, up, Q, D, d, C)
    is_owned = is_owned & (is_single == 0) & (hit_tokens % (earlier_pairs + later_pairs + 1) == earlier_pairs)
    _write_shared(tl.where(is_owned, hit_tokens, NO_TOKEN), pair_range, base, gradient, up, Q, D, d, C)


@triton.jit
def _mark_tiles(marks, first, length, tiles, TILE: tl.constexpr):
    """Append the tiles that a document touches to the list, each tile once.

    The order of the list only decides which program sums a tile.
    """
    begin = (first // TILE).to(tl.int32)
    for t0 in tl.range(begin, ((first + length - 1) // TILE).to(tl.int32) + 1, NEIGHBOR_PAIRS, num_stages=1):
        t = t0 + tl.arange(0, NEIGHBOR_PAIRS)
        ok = t * to_int64(TILE) < first + length
        is_new = (tl.atomic_xchg(marks + 1 + t, 1, mask=ok, sem="relaxed") == 0) & ok
        offset = tl.atomic_add(marks, tl.sum(is_new.to(tl.int32), axis=0), sem="relaxed")
        position = offset + tl.cumsum(is_new.to(tl.int32), axis=0) - 1
        tl.store(marks + 1 + tiles + position, t, mask=is_new)


@triton.jit(do_not_specialize=["rounds"])
def maxsim_grad_disjoint_documents(Q, D, up, shared, grad_D, d, rounds, TILE: tl.constexpr, C: tl.constexpr):
    """Compute the gradient of disjoint documents, over zeros, one pair and one warp for each program.

    Args:
        Q: `QueryArgs` of packed rows.
        D: `DocumentArgs` of packed rows.
        up: `UpstreamArgs` with pairs sorted by the first row of their document.
        shared: `SharedTileArgs`. Tiles of other documents are appended to `shared.marks`.
        grad_D: Gradient `[Td, d]`, filled with zeros.
        d: Number of features.
        rounds: Rounds of the binary searches of `find_starts`, which the last programs run for
            `maxsim_grad_shared_tiles`.
        TILE: Rows of D of a tile.
        C: Compile-time choices, a `KernelConfig`.
    """
    n = tl.program_id(0)
    tiles = tl.cdiv(up.Ld, TILE)
    if n < up.count:
        first = load_pair_field(up, n, True, FIELD_FIRST)
        length = load_pair_field(up, n, True, FIELD_LENGTH)
        lo, pair_count, is_disjoint, is_first_pair = _find_neighbor_pairs(up, shared.reach, n, first, length, C)
        # Not in a branch, because the compiler would move the first loads into the branch.
        pair_range = PairRange(lo, lo + tl.where(is_disjoint, pair_count, 0), first, None, None)
        _sum_pair(pair_range, n, is_disjoint, length.to(tl.int32), up, grad_D, Q, D, d, C)
        if (is_disjoint == 0) & is_first_pair & (length > 0):
            _mark_tiles(shared.marks, first, length, tiles, TILE)
    else:
        block = n - up.count
        find_starts(up.items, shared.reach, shared.starts, up.count, tiles + 1, TILE, up.Ld, rounds, block)


@triton.jit
def maxsim_grad_shared_tiles(Q, D, up, shared, grad_D, d, TILE: tl.constexpr, C: tl.constexpr):
    """Compute the gradient of the tiles of TILE rows of D that ``shared.marks`` lists.

    A program writes zeros to a tile and overwrites the tokens that are an argmax, BN at a time. The arguments are
    described in `maxsim_grad_disjoint_documents`.
    """
    tiles = tl.cdiv(up.Ld, TILE)
    for n in tl.range(tl.program_id(0), tl.load(shared.marks), tl.num_programs(0), num_stages=1):
        tile = tl.load(shared.marks + 1 + tiles + n)
        lo = tl.load(shared.starts + tiles + 1 + tile)
        hi = tl.load(shared.starts + tile + 1)
        pair_range = PairRange(lo, hi, to_int64(tile) * TILE, 0, up.Lq)
        hits, count, slots = rank_hit_tokens(_count_hits(pair_range, up, TILE, C))
        rows = tl.minimum(up.Ld - pair_range.t0, TILE).to(tl.int32)
        fill_with_zeros(grad_D + pair_range.t0 * d, rows * d, "")
        # Other threads write the sums.
        tl.debug_barrier()
        base = D.ptr + pair_range.t0 * D.stride_l
        for u0 in tl.range(0, count, C.BN, num_stages=1):
            part = PairRange(pair_range.lo, pair_range.hi, pair_range.t0, pair_range.r0, pair_range.r1, slots, u0)
            t = locate_slot_tokens(hits, slots, u0, C)
            target = GradientTarget(base, t, t >= 0, grad_D, pair_range.t0 + t)
            write_gradient(sum_packed_tile, (part, up, Q), target, d, D, d, C)
