"""The forward kernel: packed query rows against one document at a time, the row maxima summed per query.

A tile of similarities is [BM query rows, BN tokens], or, for few rows, [BN, BM] (`Config.TOKENS_FIRST`): the matrix
unit takes no fewer than 64 of what comes first, and any number of the other. The bits are the same.
"""

import triton
import triton.language as tl

from ...common.arguments import Document, Operands, Rows
from ...common.fp32 import load_terms, odd_maxima, split
from ...common.maxima import (
    first_token,
    lane_maxima,
    lane_winners,
    merged,
    merged_maxima,
    nothing_found,
    per_lane,
    per_row,
    per_token,
)
from ...common.primitives import (
    NO_TOKEN,
    document_base,
    group,
    inverse_norm,
    nan_max,
    ordered_squares,
    ordered_sum,
    query_keep,
    query_weight,
    row_pointers,
)
from ...common.similarities import (
    add_product,
    document_tile,
    is_kept,
    mask_ahead,
    mask_from,
    no_similarities,
    query_tile,
    sum_of_squares,
    tile_from,
    tokens_from,
)
from ...formats.encoded import counted, is_over, of_one_term, row_powers, row_sums
from ...soft.maximum import rate_of, row_scales, soft_merged, soft_taken

_MASK_STEP = tl.constexpr(512)  # tokens whose mask is read at once


@triton.jit
def _search(best, where, q, x, rows, document, C: tl.constexpr):
    """Winners of the rows that have none yet though a token is kept: those whose maximum is NaN or -inf."""
    # Few get here: what is hoisted out of the loop saves nothing, and fills registers that are spilled.
    for t0 in tl.range(0, document.length, C.BN, num_stages=1, disable_licm=C.ONE_CHUNK):
        S, t, keep, _, _ = tile_from(q, x, rows, document, t0, mask_ahead(x, document, t0, C), C)
        hit = (S == per_row(best, C)) | (S != S)
        first = first_token(hit & per_token(keep, C), per_token(t, C), C)
        where = tl.where(where == NO_TOKEN, first, where)
    return where


@triton.jit
def query_rows(x, rows, C: tl.constexpr):
    """Query rows as the products take them; with C.SPLIT or C.TERMS also their scales, which are plain, and which are
    unscaled."""
    plain = rows.ok
    unscaled = rows.ok
    scale = tl.full((C.BM,), 1, tl.float32)
    if x.terms is not None:
        q, scale = load_terms(x.terms, rows.number, rows.ok, C.BD)
        if C.TERMS == 1:
            scale = of_one_term(scale)
        plain = scale > 0
        unscaled = scale <= 0
    else:
        q = query_tile(x, rows, tl.arange(0, C.BD), C)
        if C.SPLIT:
            q, scale, plain, unscaled = split(q)
    return q, scale, plain, unscaled


@triton.jit
def _taken(best, where, S, t, keep, t0, rows, ARGMAX: tl.constexpr, C: tl.constexpr):
    """The lanes' maxima, and their tokens or sums, after a tile that begins at t0."""
    if C.SOFT:
        best, where = soft_taken(best, where, S, rows.rate, C)
    elif ARGMAX:
        m, tokens = lane_winners(S, t, keep, t0, C)
        where = tl.where(m > best, tokens, where)
        best = nan_max(best, m)
    else:
        best = nan_max(best, lane_maxima(S, C))
    return best, where


@triton.jit
def _stepwise_maxima(best, where, kept, x, rows, document, ARGMAX: tl.constexpr, C: tl.constexpr):
    """The lanes' maxima over a document whose features take several steps, and which tokens are kept.

    One loop over the steps of all tiles, so that the next tile is asked for while the last steps of one are multiplied.
    For wgmma, which it serves: Triton 3.7 cannot place the accumulators of sm_100 in it.
    """
    steps = tl.cdiv(x.d, C.BD)
    S = no_similarities(C)
    squares = tl.full((C.BN,), 0, tl.float32)
    for n in range(0, tl.cdiv(document.length, C.BN) * steps):
        c0 = n % steps * C.BD
        t0 = n // steps * C.BN
        columns = c0 + tl.arange(0, C.BD)
        t0, t = tokens_from(x, document, t0, C)
        q = query_tile(x, rows, columns, C)
        tile = document_tile(x, document, document.row + t0, t, c0, C)
        S = add_product(tl.where(c0 == 0, 0.0, S), q, tile, C)
        if C.NORMALIZE and C.STORED == "":
            squares = tl.where(c0 == 0, 0.0, squares) + sum_of_squares(x, document, tile, t, c0, C)
        if c0 + C.BD >= x.d:
            similarity = S
            if C.STORED != "":
                similarity = counted(similarity, rows, x.counts, document, t, C)
            elif C.NORMALIZE:
                similarity = similarity * per_token(inverse_norm(squares), C)
            keep = is_kept(x, document, t0, t, mask_from(x, document, n // steps * C.BN, C), C)
            if x.D.mask is not None or C.SOFT or (C.PACKED and x.tiles is not None):
                similarity = tl.where(per_token(keep, C), similarity, float("-inf"))
            if x.D.mask is not None:
                kept = kept | keep.to(tl.int32)
            best, where = _taken(best, where, similarity, t, keep, t0, rows, ARGMAX, C)
    return best, where, kept


@triton.jit
def _any_kept(x, document, kept):
    """Whether a document keeps a token, of which `kept` are those of a mask."""
    if x.D.mask is not None:
        found = tl.max(kept, axis=0)
    else:
        found = (document.length > 0).to(tl.int32)
    return found


@triton.jit
def inverse_norms(x, rows, C: tl.constexpr):
    """Of query rows."""
    return inverse_norm(ordered_squares(rows.ptr, rows.ok, x.d, x.Q.stride_d, C.BD, C.WIDE))


@triton.jit
def normalized(best, x, rows, C: tl.constexpr):
    """Maxima over the norms of their rows if normalising."""
    if C.NORMALIZE and not C.SOFT:
        best = best * inverse_norms(x, rows, C)
    return best


@triton.jit
def _without_padding(x, document, C: tl.constexpr):
    """The document up to the tile of the last token that its mask keeps: behind it nothing is read or multiplied."""
    Document: tl.constexpr = group("Document")
    length = document.length
    if x.D.mask is not None and C.TOKENS_FIRST and not C.SECTIONS:  # elsewhere registers spill
        end = length * 0
        t0 = (tl.cdiv(length, _MASK_STEP) - 1) * _MASK_STEP
        while (t0 >= 0) & (end == 0):  # from behind: mostly one step
            t = t0 + tl.arange(0, _MASK_STEP)
            pointers = (document.mask + t.to(tl.int64) * x.D.mask_stride_l).to(tl.pointer_type(tl.int8), bitcast=True)
            keep = tl.load(pointers, mask=t < length, other=0) != 0
            end = tl.max(tl.where(keep, t + 1, 0), axis=0).to(end.dtype)
            t0 -= _MASK_STEP
        # No less than a tile, which a descriptor that shifts the last one back asks for.
        length = tl.minimum(length, tl.cdiv(tl.maximum(end, 1), C.BN) * C.BN)
    return Document(document.ptr, document.mask, document.row, length)


@triton.jit
def row_maxima(query, x, rows, document, ARGMAX: tl.constexpr, C: tl.constexpr):
    """Each row's maximum over a document's kept tokens, not `normalized`, the first token that attains it, and whether
    any is kept; of rows that are `query_rows`."""
    q, scale, plain, unscaled = query
    document = _without_padding(x, document, C)
    best = per_lane(float("-inf"), tl.float32, C)
    where = nothing_found(C)
    kept = tl.full((C.BN,), 0, tl.int32)
    odds = tl.full((C.BN,), 0, tl.int32)
    if C.ONE_CHUNK or C.LANES == 1:
        mask = mask_ahead(x, document, 0, C)
        for t0 in range(0, document.length, C.BN):
            ahead = mask_ahead(x, document, t0 + C.BN, C)
            S, t, keep, first, odd = tile_from(q, x, rows, document, t0, mask, C)
            mask = ahead
            if x.D.mask is not None:
                kept = kept | keep.to(tl.int32)
            if C.SPLIT:
                odds = odds | odd.to(tl.int32)
            best, where = _taken(best, where, S, t, keep, first, rows, ARGMAX, C)
    else:
        best, where, kept = _stepwise_maxima(best, where, kept, x, rows, document, ARGMAX, C)
    any_kept = _any_kept(x, document, kept)
    row_where = tl.full((C.BM,), NO_TOKEN, tl.int32)
    if C.SOFT:
        row_best = soft_merged(best, where, x, rows, C)
    elif ARGMAX:
        row_best, row_where = merged(best, where, document.length, C)
    else:
        row_best = merged_maxima(best, C)
    if C.SPLIT:
        row_best = tl.where(unscaled, row_best, row_best * scale)
        if (tl.max(odds, axis=0) > 0) | (tl.max((rows.ok & (plain == 0)).to(tl.int32), axis=0) > 0):
            row_best, row_where = odd_maxima(row_best, row_where, plain, x, rows, document, C)
    elif ARGMAX and not C.SOFT:
        lost = rows.ok & (row_where == NO_TOKEN)
        if (tl.max(lost.to(tl.int32), axis=0) > 0) & (any_kept > 0):
            row_where = _search(row_best, row_where, q, x, rows, document, C)
    if is_over(x.Q.ptr.dtype.element_ty, C.STORED):
        row_best = row_best * rows.scale
    if C.TERMS > 0:
        row_best = row_best * scale
        if tl.max((rows.ok & (plain == 0)).to(tl.int32), axis=0) > 0:
            row_best, row_where = odd_maxima(row_best, row_where, plain, x, rows, document, C)
    return row_best, row_where, any_kept


@triton.jit
def any_row(keep, C: tl.constexpr):
    """Per query of the tile: whether it keeps a token."""
    GROUPS: tl.constexpr = C.BM // C.SLOT
    return tl.max(tl.reshape(keep.to(tl.int32), (GROUPS, C.SLOT)), axis=1)


@triton.jit
def store_scores(scores, sums, keeps, any_kept, query, queries, K, k):
    """The sums as scores, or those of a document that keeps no token: -inf, 0 for queries that keep none either."""
    empty = tl.where(keeps > 0, float("-inf"), 0.0)
    tl.store(scores + query.to(tl.int64) * K + k, tl.where(any_kept > 0, sums, empty), mask=query < queries)


@triton.jit
def _document_mask(D, base, owner, k):
    """Where the mask of document k begins, `base` without one."""
    mask = base
    if D.mask is not None:
        mask = D.mask + owner.to(tl.int64) * D.mask_stride_owner + k.to(tl.int64) * D.mask_stride_doc
    return mask


@triton.jit
def score_rows(x, i, s, ok, number, document, argmax, argmax_row, C: tl.constexpr):
    """Per query of the tile: the weighted sum of its rows' maxima, whether it keeps a token; and the document's."""
    GROUPS: tl.constexpr = C.BM // C.SLOT
    Rows: tl.constexpr = group("Rows")
    keep = query_keep(x.Q, i, s, ok)
    pointers = row_pointers(x.Q, i, s)
    row_sum = None
    if C.STORED != "":
        row_sum = row_sums(pointers, keep, x, C)
    scale = None
    rate = None
    if C.SOFT:
        scale = row_scales(x, pointers, keep, C)
        rate = rate_of(x.tau, scale)
    elif is_over(x.Q.ptr.dtype.element_ty, C.STORED):
        scale = row_powers(x, pointers, keep, C)
    rows = Rows(pointers, number, keep, row_sum, scale, rate)
    best, where, any_kept = row_maxima(query_rows(x, rows, C), x, rows, document, argmax is not None, C)
    best = normalized(best, x, rows, C)
    if argmax is not None:
        where = tl.where(keep & (where != NO_TOKEN), where, -1)
        if C.SOFT:
            where = tl.where(keep, best, float("-inf"))
        tl.store(argmax + argmax_row + s, where.to(argmax.dtype.element_ty), mask=ok)
    sums = ordered_sum(tl.where(keep, query_weight(x.Q, i, s, keep) * best, 0.0), GROUPS, C.SLOT)
    return sums, any_row(keep, C), any_kept


@triton.jit
def visit(x, out, sizes, C: tl.constexpr):
    """One row tile against one document. Neighbouring programs share a document, which is read from memory once."""
    GROUPS: tl.constexpr = C.BM // C.SLOT
    pid = tl.program_id(0)
    lane = tl.arange(0, C.BM)
    if C.CANDIDATES:
        owner = pid // sizes.K
        k = pid % sizes.K
        first_query = owner
        queries = owner + 1
        argmax_base = pid.to(tl.int64) * sizes.Lq
    else:
        row_tiles = tl.cdiv(sizes.Nq, GROUPS)
        owner = pid * 0
        k = pid // row_tiles
        first_query = (pid % row_tiles) * GROUPS
        queries = sizes.Nq
        argmax_base = (k.to(tl.int64) * sizes.Nq + first_query) * sizes.Lq
    i = first_query + lane // C.SLOT
    i_ok = i < queries
    argmax_row = argmax_base + (lane // C.SLOT).to(tl.int64) * sizes.Lq
    Document: tl.constexpr = group("Document")
    base = document_base(x.D, owner, k)
    row = (owner * sizes.K + k) * sizes.Ld
    document = Document(base, _document_mask(x.D, base, owner, k), row, sizes.Ld)

    s = lane % C.SLOT
    ok = i_ok & (s < sizes.Lq)
    total, keeps, any_kept = score_rows(x, i, s, ok, i * sizes.Lq + s, document, out.argmax, argmax_row, C)
    if C.LONG:
        for s0 in range(C.SLOT, sizes.Lq, C.SLOT):
            s = s0 + lane
            ok = i_ok & (s < sizes.Lq)
            more, keeps_more, any_kept = score_rows(x, i, s, ok, i * sizes.Lq + s, document, out.argmax, argmax_row, C)
            total += more
            keeps = keeps | keeps_more
    store_scores(out.scores, total, keeps, any_kept, first_query + tl.arange(0, GROUPS), queries, sizes.K, k)


@triton.jit
def _walked(x, n, k0, step, tiles_each, sizes):
    """The document of the n-th tile of a walk."""
    k = k0 + n // tiles_each * step
    base = document_base(x.D, 0 * k, k)
    return Document(base, _document_mask(x.D, base, 0 * k, k), k * sizes.Ld, sizes.Ld)


@triton.jit
def _walk(x, scores, sizes, C: tl.constexpr):
    """One row tile against every `step`-th document, without winners.

    One loop over the tokens of all of them: the rows are read once, and the pipeline asks for the next document while
    the last tiles of one are multiplied.
    """
    GROUPS: tl.constexpr = C.BM // C.SLOT
    row_tiles = tl.cdiv(sizes.Nq, GROUPS)
    first_query = (tl.program_id(0) % row_tiles) * GROUPS
    k0 = tl.program_id(0) // row_tiles
    step = tl.num_programs(0) // row_tiles
    lane = tl.arange(0, C.BM)
    i = first_query + lane // C.SLOT
    s = lane % C.SLOT
    keep = query_keep(x.Q, i, s, (i < sizes.Nq) & (s < sizes.Lq))
    keeps = any_row(keep, C)
    weight = query_weight(x.Q, i, s, keep)
    rows = Rows(row_pointers(x.Q, i, s), i, keep, None, None, None)
    q = query_tile(x, rows, tl.arange(0, C.BD), C)
    best = per_lane(float("-inf"), tl.float32, C)
    kept = tl.full((C.BN,), 0, tl.int32)
    tiles_each = tl.cdiv(sizes.Ld, C.BN)
    count = tl.cdiv(sizes.K - k0, step) * tiles_each
    mask = mask_ahead(x, _walked(x, 0, k0, step, tiles_each, sizes), 0, C)
    for n in range(0, count):
        k = k0 + n // tiles_each * step
        t0 = n % tiles_each * C.BN
        document = _walked(x, n, k0, step, tiles_each, sizes)
        last = tl.minimum(n + 1, count - 1)
        ahead = mask_ahead(x, _walked(x, last, k0, step, tiles_each, sizes), last % tiles_each * C.BN, C)
        S, _, tokens, _, _ = tile_from(q, x, rows, document, t0, mask, C)
        mask = ahead
        if x.D.mask is not None:
            kept = kept | tokens.to(tl.int32)
        best = nan_max(best, lane_maxima(S, C))
        if t0 + C.BN >= sizes.Ld:
            any_kept = _any_kept(x, document, kept)
            row_best = normalized(merged_maxima(best, C), x, rows, C)
            sums = ordered_sum(tl.where(keep, weight * row_best, 0.0), GROUPS, C.SLOT)
            store_scores(scores, sums, keeps, any_kept, first_query + tl.arange(0, GROUPS), sizes.Nq, sizes.K, k)
            best = per_lane(float("-inf"), tl.float32, C)
            kept = tl.full((C.BN,), 0, tl.int32)


@triton.jit
def maxsim_forward(Q, D, tiles, out, terms, sizes, d, C: tl.constexpr):
    """Scores [Nq, K] of (row tile, document) pairs, one or many (WALK) a program, and winners: `out`, an `Output`.

    A tile holds BM // SLOT queries of at most SLOT tokens each, or one query of more (LONG), SLOT tokens at a time.
    `tiles` is a tensor descriptor of all document tokens as rows, in blocks [BN, BD], for Ld >= BN or with PACKED; or
    None: then they are read through pointers. `terms` are the `Terms` of rows that are split already, else None.
    """
    tl.static_assert(not (C.SPLIT and (C.WALK or C.NORMALIZE)))
    x = Operands(Q, D, tiles, terms, None, d, None)
    if C.WALK:
        _walk(x, out.scores, sizes, C)
    else:
        visit(x, out, sizes, C)
