"""The forward kernel: packed query rows against one document at a time, the row maxima summed per query.

A tile of similarities is [BM query rows, BN tokens], or, for few rows, [BN, BM] (`Config.TOKENS_FIRST`): the matrix
unit takes no fewer than 64 of what comes first, and any number of the other. The bits are the same.
"""

import triton
import triton.language as tl

from .arguments import Sizes
from .common import (
    NO_TOKEN,
    document_base,
    inverse_norm,
    load_rows,
    load_tokens,
    nan_max,
    ordered_sum,
    query_keep,
    query_weight,
    row_pointers,
    rows_sum_of_squares,
)
from .fp32 import load_terms, nearest_tf32, odd_maxima, split, split_product
from .maxima import first_token, lane_maxima, lane_winners, merged, merged_maxima, per_lane, per_row, per_token


@triton.jit
def _document_tile(base, tiles, first_row, t, columns, c0, d, D, C: tl.constexpr):
    """Tokens `t`, which are row `first_row` and those after it where `tiles` is a descriptor of all tokens."""
    if tiles is not None:
        x = tiles.load([first_row, c0])
    else:
        x = load_tokens(base, t, t >= 0, columns, d, D, C.WIDE)
    return x


@triton.jit
def _add_product(S, q, x, C: tl.constexpr):
    if C.PRECISION == "tf32":
        q = nearest_tf32(q)
        x = nearest_tf32(x)
    if C.TOKENS_FIRST:
        S = tl.dot(x, tl.trans(q), S, input_precision=C.PRECISION)
    else:
        S = tl.dot(q, tl.trans(x), S, input_precision=C.PRECISION)
    return S


@triton.jit
def _similarities(q, pointers, row_ok, base, tiles, terms, first_row, t, Q, D, d, C: tl.constexpr):
    """``<q[s], D[t]>`` of a tile in fp32, over the norms of the document tokens if normalising.

    `q` holds the rows where one step covers d; else they are read again step by step. Last, which tokens have their
    similarities: all, or with C.SPLIT those that are plain, to the scale of the rows.
    """
    plain = t >= 0
    if C.TOKENS_FIRST:
        S = tl.full((C.BN, C.BM), 0, tl.float32)
    else:
        S = tl.full((C.BM, C.BN), 0, tl.float32)
    squares = tl.full((C.BN,), 0, tl.float32)
    if terms is not None:
        scale = tl.load(terms.document_scales + first_row + tl.arange(0, C.BN))
        plain = scale > 0
        S = split_product(q, (tiles.load([first_row, 0]), tiles.load([first_row + terms.document_room, 0])), C)
    elif C.SPLIT:
        x, scale, plain, _ = split(_document_tile(base, tiles, first_row, t, tl.arange(0, C.BD), 0, d, D, C))
        S = split_product(q, x, C)
    elif C.ONE_CHUNK:
        x = _document_tile(base, tiles, first_row, t, tl.arange(0, C.BD), 0, d, D, C)
        S = _add_product(S, q, x, C)
        if C.NORMALIZE:
            squares = tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
    else:
        for c0 in range(0, d, C.BD):
            columns = c0 + tl.arange(0, C.BD)
            y = load_rows(pointers, row_ok, columns, d, Q.stride_d, C.WIDE)
            x = _document_tile(base, tiles, first_row, t, columns, c0, d, D, C)
            S = _add_product(S, y, x, C)
            if C.NORMALIZE:
                squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
    if C.SPLIT:
        S = S * per_token(scale, C)
    if C.NORMALIZE:
        S = S * per_token(inverse_norm(squares), C)
    return S, plain


@triton.jit
def _tokens(tiles, t0, Ld, C: tl.constexpr):
    """The tile of tokens from t0 on: where it begins, and its tokens.

    The last tile is shifted back (descriptor, Ld >= BN) or repeats the last token (pointers). Either only reads tokens
    again: that changes no maximum, and a repeat loses every tie. With C.PACKED a descriptor, for which any Ld will do,
    reads on into what follows the document: `_kept` leaves it out.
    """
    if tiles is None:
        t = tl.minimum(t0 + tl.arange(0, C.BN), Ld - 1)
    else:
        if not C.PACKED:
            t0 = tl.minimum(t0, Ld - C.BN)
        t = t0 + tl.arange(0, C.BN)
    return t0, t


@triton.jit
def _kept(mask_base, tiles, t, D, Ld, C: tl.constexpr):
    """Which tokens t are there and not masked."""
    if C.PACKED and tiles is not None:
        keep = t < Ld
        if D.mask is not None:
            keep = keep & (tl.load(mask_base + t.to(tl.int64) * D.mask_stride_l, mask=keep, other=0) != 0)
    else:
        keep = t >= 0
        if D.mask is not None:
            keep = tl.load(mask_base + t.to(tl.int64) * D.mask_stride_l) != 0
    return keep


@triton.jit
def _tile(q, pointers, row_ok, base, mask_base, tiles, terms, document_row, t0, Q, D, Ld, d, C: tl.constexpr):
    """Similarities of a tile of tokens from t0 on, ``-inf`` where masked; the tokens, and which of them are kept.

    With C.SPLIT also ``-inf`` of tokens that are kept but not plain; last, which those are.
    """
    t0, t = _tokens(tiles, t0, Ld, C)
    S, plain = _similarities(q, pointers, row_ok, base, tiles, terms, document_row + t0, t, Q, D, d, C)
    keep = _kept(mask_base, tiles, t, D, Ld, C)
    taken = keep
    if C.SPLIT:
        taken = keep & plain
    if D.mask is not None or C.SPLIT or (C.PACKED and tiles is not None):
        # Selected, not biased: a masked token may hold NaN or inf, which no added bias removes.
        S = tl.where(per_token(taken, C), S, float("-inf"))
    return S, t, keep, t0, keep & (plain == 0)


@triton.jit
def _search(
    best, where, q, pointers, row_ok, base, mask_base, tiles, terms, document_row, Q, D, Ld, d, C: tl.constexpr
):
    """Winners of the rows that have none yet though a token is kept: those whose maximum is NaN or -inf."""
    # Few get here: what is hoisted out of the loop saves nothing, and fills registers that are spilled.
    for t0 in tl.range(0, Ld, C.BN, num_stages=1, disable_licm=C.ONE_CHUNK):
        S, t, keep, _, _ = _tile(q, pointers, row_ok, base, mask_base, tiles, terms, document_row, t0, Q, D, Ld, d, C)
        hit = (S == per_row(best, C)) | (S != S)
        first = first_token(hit & per_token(keep, C), per_token(t, C), C)
        where = tl.where(where == NO_TOKEN, first, where)
    return where


@triton.jit
def _query_rows(pointers, row, row_ok, terms, Q, d, C: tl.constexpr):
    """Query rows as the products take them; with C.SPLIT also their scales, which are plain, and which are unscaled."""
    plain = row_ok
    unscaled = row_ok
    scale = tl.full((C.BM,), 1, tl.float32)
    if terms is not None:
        q, scale = load_terms(terms, row, row_ok, C.BD)
        plain = scale > 0
        unscaled = scale <= 0
    else:
        q = load_rows(pointers, row_ok, tl.arange(0, C.BD), d, Q.stride_d, C.WIDE)
        if C.SPLIT:
            q, scale, plain, unscaled = split(q)
    return q, scale, plain, unscaled


@triton.jit
def _taken(best, where, S, t, keep, t0, ARGMAX: tl.constexpr, C: tl.constexpr):
    """The lanes' maxima and their tokens after a tile that begins at t0."""
    if ARGMAX:
        m, tokens = lane_winners(S, t, keep, t0, C)
        where = tl.where(m > best, tokens, where)
    else:
        m = lane_maxima(S, C)
    return nan_max(best, m), where


@triton.jit
def _stepwise_maxima(
    best, where, kept, pointers, row_ok, base, mask_base, tiles, document_row, Q, D, Ld, d, ARGMAX: tl.constexpr,
    C: tl.constexpr
):  # fmt: skip
    """The lanes' maxima over a document whose features take several steps, and which tokens are kept.

    One loop over the steps of all tiles, so that the next tile is asked for while the last steps of one are multiplied.
    For wgmma, which it serves: Triton 3.7 cannot place the accumulators of sm_100 in it.
    """
    steps = tl.cdiv(d, C.BD)
    S = tl.full((C.BN, C.BM) if C.TOKENS_FIRST else (C.BM, C.BN), 0, tl.float32)
    squares = tl.full((C.BN,), 0, tl.float32)
    for n in range(0, tl.cdiv(Ld, C.BN) * steps):
        c0 = n % steps * C.BD
        t0 = n // steps * C.BN
        columns = c0 + tl.arange(0, C.BD)
        t0, t = _tokens(tiles, t0, Ld, C)
        q = load_rows(pointers, row_ok, columns, d, Q.stride_d, C.WIDE)
        x = _document_tile(base, tiles, document_row + t0, t, columns, c0, d, D, C)
        S = _add_product(tl.where(c0 == 0, 0.0, S), q, x, C)
        if C.NORMALIZE:
            squares = tl.where(c0 == 0, 0.0, squares) + tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
        if c0 + C.BD >= d:
            similarity = S
            if C.NORMALIZE:
                similarity = similarity * per_token(inverse_norm(squares), C)
            keep = _kept(mask_base, tiles, t, D, Ld, C)
            if D.mask is not None or (C.PACKED and tiles is not None):
                similarity = tl.where(per_token(keep, C), similarity, float("-inf"))
            if D.mask is not None:
                kept = kept | keep.to(tl.int32)
            best, where = _taken(best, where, similarity, t, keep, t0, ARGMAX, C)
    return best, where, kept


@triton.jit
def _row_maxima(
    pointers, row, row_ok, base, mask_base, tiles, terms, document_row, Q, D, Ld, d, ARGMAX: tl.constexpr,
    C: tl.constexpr
):  # fmt: skip
    """Each row's maximum over a document's kept tokens, the first token that attains it, and whether any is kept."""
    best = per_lane(float("-inf"), tl.float32, C)
    where = per_lane(NO_TOKEN, tl.int32, C)
    kept = tl.full((C.BN,), 0, tl.int32)
    odds = tl.full((C.BN,), 0, tl.int32)
    q, scale, plain, unscaled = _query_rows(pointers, row, row_ok, terms, Q, d, C)
    if C.ONE_CHUNK or C.LANES == 1:
        for t0 in range(0, Ld, C.BN):
            S, t, keep, first, odd = _tile(
                q, pointers, row_ok, base, mask_base, tiles, terms, document_row, t0, Q, D, Ld, d, C
            )
            if D.mask is not None:
                kept = kept | keep.to(tl.int32)
            if C.SPLIT:
                odds = odds | odd.to(tl.int32)
            best, where = _taken(best, where, S, t, keep, first, ARGMAX, C)
    else:
        best, where, kept = _stepwise_maxima(
            best, where, kept, pointers, row_ok, base, mask_base, tiles, document_row, Q, D, Ld, d, ARGMAX, C
        )
    any_kept = tl.max(kept, axis=0) if D.mask is not None else (Ld > 0).to(tl.int32)
    if ARGMAX:
        row_best, row_where = merged(best, where, Ld, C)
    else:
        row_best = merged_maxima(best, C)
        row_where = tl.full((C.BM,), NO_TOKEN, tl.int32)
    if C.SPLIT:
        row_best = tl.where(unscaled, row_best, row_best * scale)
        if (tl.max(odds, axis=0) > 0) | (tl.max((row_ok & (plain == 0)).to(tl.int32), axis=0) > 0):
            row_best, row_where = odd_maxima(
                row_best, row_where, plain, pointers, row_ok, base, mask_base, Q, D, Ld, d, C
            )
    elif ARGMAX:
        lost = row_ok & (row_where == NO_TOKEN)
        if (tl.max(lost.to(tl.int32), axis=0) > 0) & (any_kept > 0):
            row_where = _search(
                row_best, row_where, q, pointers, row_ok, base, mask_base, tiles, terms, document_row, Q, D, Ld, d, C
            )
    if C.NORMALIZE:
        row_best = row_best * inverse_norm(rows_sum_of_squares(pointers, row_ok, d, Q.stride_d, C.BD, C.WIDE))
    return row_best, row_where, any_kept


@triton.jit
def _any_row(keep, C: tl.constexpr):
    """Per query of the tile: whether it keeps a token."""
    GROUPS: tl.constexpr = C.BM // C.SLOT
    return tl.max(tl.reshape(keep.to(tl.int32), (GROUPS, C.SLOT)), axis=1)


@triton.jit
def _store_scores(scores, sums, keeps, any_kept, query, queries, K, k):
    """The sums as scores, or those of a document that keeps no token: -inf, 0 for queries that keep none either."""
    empty = tl.where(keeps > 0, float("-inf"), 0.0)
    tl.store(scores + query.to(tl.int64) * K + k, tl.where(any_kept > 0, sums, empty), mask=query < queries)


@triton.jit
def _document_mask(D, owner, k):
    mask_base = D.mask
    if D.mask is not None:
        mask_base = D.mask + owner.to(tl.int64) * D.mask_stride_owner + k.to(tl.int64) * D.mask_stride_doc
    return mask_base


@triton.jit
def _score_rows(
    i, s, row_ok, row, base, mask_base, tiles, terms, document_row, argmax, argmax_row, Q, D, Ld, d, C: tl.constexpr
):
    """Per query of the tile: the weighted sum of its rows' maxima, whether it keeps a token; and the document's."""
    GROUPS: tl.constexpr = C.BM // C.SLOT
    keep = query_keep(Q, i, s, row_ok)
    pointers = row_pointers(Q, i, s)
    best, where, any_kept = _row_maxima(
        pointers, row, keep, base, mask_base, tiles, terms, document_row, Q, D, Ld, d, argmax is not None, C
    )
    if argmax is not None:
        where = tl.where(keep & (where != NO_TOKEN), where, -1)
        tl.store(argmax + argmax_row + s, where.to(argmax.dtype.element_ty), mask=row_ok)
    sums = ordered_sum(tl.where(keep, query_weight(Q, i, s, keep) * best, 0.0), GROUPS, C.SLOT)
    return sums, _any_row(keep, C), any_kept


@triton.jit
def _visit(Q, D, tiles, scores, argmax, terms, sizes, d, C: tl.constexpr):
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
    base = document_base(D, owner, k)
    document_row = (owner * sizes.K + k) * sizes.Ld
    mask_base = _document_mask(D, owner, k)

    s = lane % C.SLOT
    total, keeps, any_kept = _score_rows(
        i, s, i_ok & (s < sizes.Lq), i * sizes.Lq + s, base, mask_base, tiles, terms, document_row, argmax, argmax_row,
        Q, D, sizes.Ld, d, C
    )  # fmt: skip
    if C.LONG:
        for s0 in range(C.SLOT, sizes.Lq, C.SLOT):
            s = s0 + lane
            more, keeps_more, any_kept = _score_rows(
                i, s, i_ok & (s < sizes.Lq), i * sizes.Lq + s, base, mask_base, tiles, terms, document_row, argmax,
                argmax_row, Q, D, sizes.Ld, d, C
            )  # fmt: skip
            total += more
            keeps = keeps | keeps_more
    _store_scores(scores, total, keeps, any_kept, first_query + tl.arange(0, GROUPS), queries, sizes.K, k)


@triton.jit
def _walk(Q, D, tiles, scores, sizes, d, C: tl.constexpr):
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
    keep = query_keep(Q, i, s, (i < sizes.Nq) & (s < sizes.Lq))
    keeps = _any_row(keep, C)
    weight = query_weight(Q, i, s, keep)
    pointers = row_pointers(Q, i, s)
    q = load_rows(pointers, keep, tl.arange(0, C.BD), d, Q.stride_d, C.WIDE)
    best = per_lane(float("-inf"), tl.float32, C)
    kept = tl.full((C.BN,), 0, tl.int32)
    tiles_each = tl.cdiv(sizes.Ld, C.BN)
    for n in range(0, tl.cdiv(sizes.K - k0, step) * tiles_each):
        k = k0 + n // tiles_each * step
        t0 = n % tiles_each * C.BN
        base = document_base(D, 0 * k, k)
        mask_base = _document_mask(D, 0 * k, k)
        S, _, tokens, _, _ = _tile(
            q, pointers, keep, base, mask_base, tiles, None, k * sizes.Ld, t0, Q, D, sizes.Ld, d, C
        )
        if D.mask is not None:
            kept = kept | tokens.to(tl.int32)
        best = nan_max(best, lane_maxima(S, C))
        if t0 + C.BN >= sizes.Ld:
            any_kept = tl.max(kept, axis=0) if D.mask is not None else (sizes.Ld > 0).to(tl.int32)
            row_best = merged_maxima(best, C)
            if C.NORMALIZE:
                row_best = row_best * inverse_norm(rows_sum_of_squares(pointers, keep, d, Q.stride_d, C.BD, C.WIDE))
            sums = ordered_sum(tl.where(keep, weight * row_best, 0.0), GROUPS, C.SLOT)
            _store_scores(scores, sums, keeps, any_kept, first_query + tl.arange(0, GROUPS), sizes.Nq, sizes.K, k)
            best = per_lane(float("-inf"), tl.float32, C)
            kept = tl.full((C.BN,), 0, tl.int32)


@triton.jit(do_not_specialize=["Nq", "K", "Lq", "Ld"])
def maxsim_forward(Q, D, tiles, scores, argmax, terms, Nq, K, Lq, Ld, d, C: tl.constexpr):
    """Scores [Nq, K] of (row tile, document) pairs, one or many (WALK) a program; winners unless `argmax` is None.

    A tile holds BM // SLOT queries of at most SLOT tokens each, or one query of more (LONG), SLOT tokens at a time.
    `tiles` is a tensor descriptor of all document tokens as rows, in blocks [BN, BD], for Ld >= BN; or None: then they
    are read through pointers. `terms` are the `Terms` of rows that are split already, else None.
    """
    tl.static_assert(not (C.SPLIT and (C.WALK or C.NORMALIZE)))
    if C.WALK:
        _walk(Q, D, tiles, scores, Sizes(Nq, K, Lq, Ld), d, C)
    else:
        _visit(Q, D, tiles, scores, argmax, terms, Sizes(Nq, K, Lq, Ld), d, C)
