"""Document gradient of dense and candidate layouts: a program owns a tile of BN or TILE tokens of one document.

```text
maxsim_grad_documents, program = BN tokens:
    document k, t0 = tile of the program                # tokens t0 to t0 + BN - 1
    begin, end = list of the tile                       # from `buckets`, or all rows of the document without lists
    with pieces: keep only the entries of piece `program_id(1)`
    code = load_codes(begin)
    for e in range(begin, end, BM):
        ahead = load_codes(e + BM)                      # list entries, or the argmax of all rows
        r, token = decode(code)                         # token = argmax - t0, or -1 if it is outside the tile
        c = grad_scores[i(r), k] * q_weight[r] * inverse_norm(Q[r])
        G += onehot(token, c) @ Q[r]                    # `sum_rows`; only rows with a hit are loaded
        code = ahead
    grad_D[k, t0 : t0 + BN] = G through the Jacobian of the norm, or G is a partial sum
```

With few documents, lists are cut into pieces of `pieces.rows` entries, and a program sums one piece of a tile. A tile
that is complete in one piece is written directly. `maxsim_join_pieces` adds the partial sums of the other tiles.

If a document has many more tokens than query rows, most tokens are an argmax of no row. Then a program owns more tokens
and sums only the tokens that are an argmax, in groups of BN:

```text
maxsim_grad_long_documents, program = TILE tokens of document k from t0 on:
    counts[t] = rows with argmax t0 + t             # [TILE], histograms of COUNTED_ROWS rows
    hits = counts > 0
    slots = exclusive prefix sum of hits            # the n-th hit token has slot n
    grad_D[k, t0 : t0 + TILE] = 0
    barrier
    for u0 in range(0, number of hits, BN):
        t = tokens of slots u0 to u0 + BN - 1       # -1 after the last slot
        G = as above over all rows, token = slots[argmax - t0] - u0, or -1 outside [0, BN)
        grad_D[k, t0 + t] = G through the Jacobian of the norm
```

Invariants:

- One program writes each element of the gradient. Rows and pieces are added in ascending order, without atomics.
- Without lists, both kernels add the same products of a token in the same order. The sums have equal bits if all rows
  are finite. In fp16, coefficients of a group must also differ by a factor below 2^18, because a group has one scale.
- The zeros and the sums of a tile are written by one program, with a barrier between them.
- List entries and argmax values are loaded one step ahead. The loop pipeline then prefetches the query rows.
"""

import triton
import triton.language as tl

from ...common.primitives import (
    compute_inverse_norm,
    load_query_weight,
    locate_document,
    locate_rows,
    sum_row_squares,
    to_int64,
)
from ..arguments import GradientTarget, GradientTile, StepRows
from ..gather import find_owner, load_partial_rows, write_gradient
from ..pairs import fill_with_zeros
from .sums import find_slots, locate_slot_tokens, rank_hit_tokens, sum_rows

COUNTED_ROWS = tl.constexpr(256)  # rows of a step of `_count_hits`, which has no product


@triton.jit
def _load_codes(e, tile, up, C: tl.constexpr):
    """Load the code of row number `e` of a tile: a list entry, or the argmax of row `e`. -1 means no row."""
    if tile.entries is not None:
        code = tl.load(tile.entries + e, mask=e < tile.end, other=-1)
    else:
        if C.CANDIDATES:
            base = (tile.owner.to(tl.int64) * up.K + tile.k) * up.Lq
        else:
            base = tile.k.to(tl.int64) * up.Nq * up.Lq
        code = tl.load(up.argmax + base + e, mask=e < tile.end, other=-1).to(tl.int32)
    return code


@triton.jit
def _locate_in_tile(code, tile, TILE: tl.constexpr):
    """Return the token of a tile of TILE tokens that each argmax is, or -1 if the argmax is outside the tile."""
    place = code - tile.t0
    return tl.where((place >= 0) & (place < TILE), place, -1)


@triton.jit
def _locate_step_rows(code, e, s, C: tl.constexpr):
    """Return the `StepRows` of codes, which are numbers `e` of their tile."""
    tile = s.tile
    up = s.up
    Q = s.Q
    if tile.entries is not None:
        # i * Lq + s, among the rows that the document is scored against
        r = (code.to(tl.uint32) // C.BN).to(tl.int32)
        hit = code >= 0
    elif tile.slots is not None:
        r = e
        slot = find_slots(tile.slots, tile.u0, _locate_in_tile(code, tile, tile.slots.shape[0]), C)
        hit = slot >= 0
    else:
        r = e
        hit = (code >= tile.t0) & (code < tile.t0 + C.BN)
    token = (r % up.Lq).to(tl.int32)
    i = (r // up.Lq).to(tl.int32) + tile.owner
    if C.EVEN_ROW_STRIDE:
        pointers = Q.ptr + tile.owner.to(tl.int64) * Q.stride_n + r * Q.stride_l
    else:
        pointers = locate_rows(Q, i, token)
    if tile.entries is not None:
        local = tl.where(hit, (code.to(tl.uint32) % C.BN).to(tl.int32), -1)
    elif tile.slots is not None:
        local = slot
    else:
        local = tl.where(hit, code - tile.t0, -1)
    pair = i.to(tl.int64) * up.stride_q + tile.k.to(tl.int64) * up.stride_k
    coefficient = tl.load(up.grad_scores + pair, mask=hit, other=0.0)
    if Q.weight is not None:
        coefficient *= load_query_weight(Q, i, token, hit)
    if up.norms is not None:
        coefficient *= tl.load(up.norms + tile.owner.to(tl.int64) * up.Lq + r, mask=hit, other=0.0)
    elif C.NORMALIZE:
        coefficient *= compute_inverse_norm(sum_row_squares(pointers, hit, s.d, Q.stride_d, C.BD, C.WIDE_OFFSETS))
    terms = pointers
    if up.terms is not None:
        terms = up.terms + (tile.owner.to(tl.int64) * up.Lq + r) * (2 * s.d)
    return StepRows(pointers, hit, local, coefficient, terms)


@triton.jit
def _fold_steps(
    visit: tl.constexpr, total, s, STEP: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr
):
    """Fold a visitor over the rows of a tile. See `sum_rows`.

    With AHEAD, codes are loaded one step ahead, so the loads of the rows that they name can span several steps.
    """
    code = _load_codes(s.tile.begin + tl.arange(0, STEP), s.tile, s.up, C)
    for e0 in tl.range(s.tile.begin, s.tile.end, STEP, num_stages=STAGES):
        e = e0 + tl.arange(0, STEP)
        if AHEAD:
            next_code = _load_codes(e + STEP, s.tile, s.up, C)
            total = visit(total, _locate_step_rows(code, e, s, C), s, C)
            code = next_code
        else:
            total = visit(total, _locate_step_rows(_load_codes(e, s.tile, s.up, C), e, s, C), s, C)
    return total


@triton.jit
def _sum_tile(args, columns, d, C: tl.constexpr):
    """Adapter of `sum_rows` for `write_gradient`."""
    return sum_rows(_fold_steps, args[0], args[1], args[2], columns, d, C)


@triton.jit
def _locate_tile(pid, lists, rows, up, C: tl.constexpr):
    """Return the document of tile `pid`, its owner, its number there, the tile's first token, and its list range.

    These values are not a `GradientTile`, because Triton 3.6 cannot return a tuple that holds None.
    """
    document = pid // lists.tiles
    b = pid % lists.tiles
    begin = rows * 0
    end = rows
    if lists.starts is not None:
        starts = lists.starts + (to_int64(document) * (lists.tiles * lists.blocks + 1) + b * lists.blocks)
        begin = tl.load(starts)
        end = tl.load(starts + lists.blocks)
    document += lists.first
    owner, k = find_owner(document, up.K, C)
    return document, owner, k, b * C.BN, begin, end


@triton.jit
def _index_partial_rows(pieces, rows, document, begin, p, C: tl.constexpr):
    """Return the rows of the partial sums that belong to piece `p` of a tile whose list begins at `begin`.

    A piece has room for two tiles: one that begins in an earlier piece, and one that continues in the next. Tiles that
    are complete in one piece need no room.
    """
    slot = to_int64(document) * (2 * tl.cdiv(rows, pieces.rows)) + 2 * p + (p == begin // pieces.rows).to(tl.int32)
    return slot * C.BN + tl.arange(0, C.BN)


@triton.jit(do_not_specialize=["rows"])
def maxsim_grad_documents(Q, D, up, lists, rows, pieces, grad_D, d, C: tl.constexpr):
    """Compute the gradient of BN tokens of one document for each program.

    Args:
        Q: `QueryArgs`.
        D: `DocumentArgs`.
        up: `UpstreamArgs`.
        lists: `TileBucketArgs`. The launch covers documents from `lists.first` on.
        rows: Query rows that a document is scored against.
        pieces: `PartialSumArgs`. With partial sums, program (.., n) sums the n-th piece of a tile's list.
        grad_D: Output `[documents, Ld, d]`, contiguous.
        d: Number of features.
        C: Compile-time choices, a `KernelConfig`.
    """
    document, owner, k, t0, begin, end = _locate_tile(tl.program_id(0), lists, rows, up, C)
    entries = lists.entries
    if entries is not None:
        entries += to_int64(document - lists.first) * rows
    t = t0 + tl.arange(0, C.BN)
    base = locate_document(D, owner, k)
    grad_row = document.to(tl.int64) * up.Ld + t
    features = d
    if pieces.partial is None:
        target = GradientTarget(base, t, t < up.Ld, grad_D, grad_row, up.scale)
    else:
        first = begin // pieces.rows
        p = first + tl.program_id(1)
        is_unsplit = tl.full((C.BN,), 1, tl.int1) & (end <= (first + 1) * pieces.rows)
        slots = _index_partial_rows(pieces, rows, document - lists.first, begin, p, C)
        target = GradientTarget(
            base, t, is_unsplit & (t < up.Ld), grad_D, grad_row, up.scale, pieces.partial, slots, is_unsplit == 0
        )
        begin = tl.maximum(begin, p * pieces.rows)
        end = tl.minimum(end, (p + 1) * pieces.rows)
        features = tl.where((begin < end) | (tl.program_id(1) == 0), d, 0)
    tile = GradientTile(owner, k, t0, begin, end, entries)
    write_gradient(_sum_tile, (tile, up, Q), target, features, D, d, C)


@triton.jit
def _sum_partials(args, columns, d, C: tl.constexpr):
    """Sum the pieces of a tile in ascending order."""
    pieces, rows, document, begin, end = args
    G = tl.full((C.BN, C.BD), 0, tl.float32)
    for p in range(begin // pieces.rows, tl.cdiv(end, pieces.rows)):
        slots = _index_partial_rows(pieces, rows, document, begin, p, C)
        G += load_partial_rows(pieces.partial, slots, columns, d, C)
    return G


@triton.jit(do_not_specialize=["rows"])
def maxsim_join_pieces(D, up, lists, rows, pieces, grad_D, d, C: tl.constexpr):
    """Compute the gradient of the tiles whose lists `maxsim_grad_documents` summed in several pieces."""
    document, owner, k, t0, begin, end = _locate_tile(tl.program_id(0), lists, rows, up, C)
    t = t0 + tl.arange(0, C.BN)
    grad_row = document.to(tl.int64) * up.Ld + t
    target = GradientTarget(locate_document(D, owner, k), t, t < up.Ld, grad_D, grad_row, up.scale)
    features = tl.where(end > (begin // pieces.rows + 1) * pieces.rows, d, 0)
    partial_args = (pieces, rows, document - lists.first, begin, end)
    write_gradient(_sum_partials, partial_args, target, features, D, d, C)


@triton.jit
def _count_hits(tile, up, TILE: tl.constexpr, C: tl.constexpr):
    """Return for each token of a tile the number of rows whose argmax it is."""
    counts = tl.zeros((TILE,), tl.int32)
    for e0 in tl.range(tile.begin, tile.end, COUNTED_ROWS, num_stages=1):
        code = _load_codes(e0 + tl.arange(0, COUNTED_ROWS), tile, up, C)
        place = _locate_in_tile(code, tile, TILE)
        counts += tl.histogram(tl.maximum(place, 0), TILE, mask=place >= 0)
    return counts


@triton.jit(do_not_specialize=["rows"])
def maxsim_grad_long_documents(Q, D, up, grad_D, rows, d, TILE: tl.constexpr, C: tl.constexpr):
    """Compute the gradient of TILE tokens of one document for each program.

    Args:
        Q: `QueryArgs`.
        D: `DocumentArgs`.
        up: `UpstreamArgs`.
        grad_D: Output `[documents, Ld, d]`, contiguous.
        rows: Query rows that a document is scored against.
        d: Number of features.
        TILE: Tokens of a program, a power of two of at least BN.
        C: Compile-time choices, a `KernelConfig`.
    """
    tl.static_assert(TILE >= C.BN)
    tiles = tl.cdiv(up.Ld, TILE)
    document = tl.program_id(0) // tiles
    t0 = (tl.program_id(0) % tiles) * TILE
    owner, k = find_owner(document, up.K, C)
    base = locate_document(D, owner, k)
    first_row = document.to(tl.int64) * up.Ld
    tile = GradientTile(owner, k, t0, rows * 0, rows, None)
    hits, count, slots = rank_hit_tokens(_count_hits(tile, up, TILE, C))
    fill_with_zeros(grad_D + (first_row + t0) * d, tl.minimum(up.Ld - t0, TILE) * d, "")
    # Other threads write the sums.
    tl.debug_barrier()
    for u0 in tl.range(0, count, C.BN, num_stages=1):
        part = GradientTile(owner, k, t0, tile.begin, tile.end, None, slots, u0)
        place = locate_slot_tokens(hits, slots, u0, C)
        t = t0 + place
        target = GradientTarget(base, t, place >= 0, grad_D, first_row + t, up.scale)
        write_gradient(_sum_tile, (part, up, Q), target, d, D, d, C)
