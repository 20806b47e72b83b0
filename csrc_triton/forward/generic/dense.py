"""Generic forward kernel for dense layouts, for every shape, dtype, mask, and GPU.

```text
score[i, k] = sum_s q_weight[i, s] * max_t <Q[i, s], D[k, t]>
```

A row tile has `BM` rows and packs `BM // ROWS_PER_QUERY` queries. A program of `maxsim_forward` scores one row tile
against one document. With `KernelConfig.PERSISTENT` it scores the row tile against every n-th document.

Without PERSISTENT (`score_tile_pair`, `score_rows`, and `compute_row_maxima` for the loop over tiles):

```text
program = (document k, row tile), row tile fastest    # neighboring programs share a document
q = load_query_rows()                                 # [BM, BD]
best, where = -inf, NO_TOKEN                          # one value for each lane: [BM, LANES] or [BN, BM]
mask = prefetch_tile_mask(0)
for t0 in range(0, length, BN):
    ahead = prefetch_tile_mask(t0 + BN)
    S = dot(q, D[k, t0 : t0 + BN].T)                  # compute_tile: [BM, BN], or [BN, BM] with TOKENS_FIRST
    S = S * inverse_norm(document tokens)             # compute_tile, NORMALIZE
    S = where(mask, S, -inf)                          # compute_tile
    m, tokens = lane_max(S)                           # _update_maxima, this line and the next two
    where = tokens where m > best                     # with argmax
    best = nan_max(best, m)
    mask = ahead
row_best, row_where = merge_lanes(best, where)        # with 4 lanes, the only exchange between threads
row_where = second pass for NaN or -inf maxima        # _search_argmax
row_best = row_best * inverse_norm(q)                 # normalize_maxima, NORMALIZE
score = tree_sum(q_weight * row_best)                 # sum_in_order, for each query of the tile
if the document keeps no token:                       # store_scores
    score = -inf, or 0 if the query keeps no token either
```

With PERSISTENT and without an argmax (`_score_persistent`), one loop covers the tiles of all documents of the program:

```text
program = (first document k0, row tile)
q, weight = query rows and their weights              # loaded once
best = -inf
for n in range(documents of the program * tiles of a document):
    k, t0 = k0 + n // tiles * step, n % tiles * BN
    S = similarities of the tile of document k        # compute_tile
    best = nan_max(best, lane_max(S))                 # reduce_lane_maxima
    if this is the last tile of document k:
        row_best = merge_lanes(best) * inverse_norm(q)    # merge_lane_maxima, normalize_maxima
        score[k] = tree_sum(weight * row_best)        # sum_in_order, store_scores
        best = -inf
```

With LONG_QUERIES a tile has rows of one query. The program repeats this for each block of `ROWS_PER_QUERY` tokens and
adds the sums in order.

Invariants:

- Features are added in ascending order, maxima are exact, and the sum over rows is a fixed binary tree. A score has
  the same bits for every `BM`, `BN`, lane layout, and TOKENS_FIRST.
- A masked similarity is replaced by -inf with a select. A masked token may hold NaN.
- The argmax is the lowest token that attains the maximum, or the first NaN.

With TOKENS_FIRST the document tokens are the left operand. A WGMMA tile has at least 64 rows on the left side and any
number on the right side, so this order suits few query rows.
"""

import triton
import triton.language as tl

from ...common.arguments import Document, Operands, QueryRows
from ...common.fp32 import add_fallback_maxima, load_terms, split_rows
from ...common.maxima import (
    expand_rows,
    expand_tokens,
    fill_lanes,
    find_first_token,
    init_lane_state,
    merge_lane_maxima,
    merge_lanes,
    reduce_lane_argmax,
    reduce_lane_maxima,
)
from ...common.primitives import (
    NO_TOKEN,
    compute_inverse_norm,
    import_args_class,
    load_query_mask,
    load_query_weight,
    locate_document,
    locate_rows,
    nan_max,
    sum_in_order,
    sum_row_squares_in_order,
)
from ...common.similarities import (
    add_product,
    compute_tile,
    init_similarities,
    is_kept,
    load_document_tile,
    load_query_tile,
    load_tile_mask,
    locate_tile_tokens,
    prefetch_tile_mask,
    sum_tile_squares,
)
from ...formats.encoded import (
    compute_row_powers,
    dequantize_similarities,
    needs_power_scaling,
    scale_single_term,
    sum_query_rows,
)
from ...soft.maximum import compute_rate, compute_row_scales, merge_soft_maxima, update_soft_maxima

_MASK_STEP_TOKENS = tl.constexpr(512)  # mask bytes of a load in `_trim_padding`


@triton.jit
def _search_argmax(best, where, q, x, rows, document, C: tl.constexpr):
    """Find the argmax of rows that have none although a token is kept: their maximum is NaN or -inf."""
    # Few rows need this pass. Values hoisted out of the loop would save little time and spill registers.
    for t0 in tl.range(0, document.length, C.BN, num_stages=1, disable_licm=C.SINGLE_STEP):
        S, t, keep, _, _ = compute_tile(q, x, rows, document, t0, prefetch_tile_mask(x, document, t0, C), C)
        hit = (S == expand_rows(best, C)) | (S != S)
        first = find_first_token(hit & expand_tokens(keep, C), expand_tokens(t, C), C)
        where = tl.where(where == NO_TOKEN, first, where)
    return where


@triton.jit
def load_query_rows(x, rows, C: tl.constexpr):
    """Load query rows as operands of the product, with scales and flags.

    Returns:
        The rows, their scales, whether each row is exact, and whether its maximum is used without the scale. The last
        three matter only with C.SPLIT_FP32 or C.INT8_TERMS.
    """
    plain = rows.ok
    unscaled = rows.ok
    scale = tl.full((C.BM,), 1, tl.float32)
    if x.terms is not None:
        q, scale = load_terms(x.terms, rows.number, rows.ok, C.BD)
        if C.INT8_TERMS == 1:
            scale = scale_single_term(scale)
        plain = scale > 0
        unscaled = scale <= 0
    else:
        q = load_query_tile(x, rows, tl.arange(0, C.BD), C)
        if C.SPLIT_FP32:
            q, scale, plain, unscaled = split_rows(q)
    return q, scale, plain, unscaled


@triton.jit
def _update_maxima(best, where, S, t, keep, t0, rows, ARGMAX: tl.constexpr, C: tl.constexpr):
    """Update the lane maxima, and their tokens or exponential sums, with a tile that begins at token `t0`."""
    if C.SOFT:
        best, where = update_soft_maxima(best, where, S, rows.rate, C)
    elif ARGMAX:
        m, tokens = reduce_lane_argmax(S, t, keep, t0, C)
        where = tl.where(m > best, tokens, where)
        best = nan_max(best, m)
    else:
        best = nan_max(best, reduce_lane_maxima(S, C))
    return best, where


@triton.jit
def _compute_maxima_in_steps(best, where, kept, x, rows, document, ARGMAX: tl.constexpr, C: tl.constexpr):
    """Compute the lane maxima over a document whose features need several steps, and which tokens are kept.

    A single loop covers the steps of all tiles, so the load of the next tile overlaps the last steps of the current
    tile. This loop is for WGMMA. Triton 3.7 cannot place the accumulators of sm_100 in such a loop.
    """
    steps = tl.cdiv(x.d, C.BD)
    S = init_similarities(C)
    squares = tl.full((C.BN,), 0, tl.float32)
    for n in range(0, tl.cdiv(document.length, C.BN) * steps):
        c0 = n % steps * C.BD
        t0 = n // steps * C.BN
        columns = c0 + tl.arange(0, C.BD)
        t0, t = locate_tile_tokens(x, document, t0, C)
        q = load_query_tile(x, rows, columns, C)
        tile = load_document_tile(x, document, document.row + t0, t, c0, C)
        S = add_product(tl.where(c0 == 0, 0.0, S), q, tile, C)
        if C.NORMALIZE and C.ENCODING == "":
            squares = tl.where(c0 == 0, 0.0, squares) + sum_tile_squares(x, document, tile, t, c0, C)
        if c0 + C.BD >= x.d:
            similarity = S
            if C.ENCODING != "":
                similarity = dequantize_similarities(similarity, rows, x.counts, document, t, C)
            elif C.NORMALIZE:
                similarity = similarity * expand_tokens(compute_inverse_norm(squares), C)
            keep = is_kept(x, document, t0, t, load_tile_mask(x, document, n // steps * C.BN, C), C)
            if x.D.mask is not None or C.SOFT or (C.SHORT_DOCUMENTS and x.tiles is not None):
                similarity = tl.where(expand_tokens(keep, C), similarity, float("-inf"))
            if x.D.mask is not None:
                kept = kept | keep.to(tl.int32)
            best, where = _update_maxima(best, where, similarity, t, keep, t0, rows, ARGMAX, C)
    return best, where, kept


@triton.jit
def _has_kept_token(x, document, kept):
    """Return whether a document keeps a token. `kept` flags the tokens that its mask keeps."""
    if x.D.mask is not None:
        found = tl.max(kept, axis=0)
    else:
        found = (document.length > 0).to(tl.int32)
    return found


@triton.jit
def compute_query_inverse_norms(x, rows, C: tl.constexpr):
    """Compute the inverse norms of query rows."""
    return compute_inverse_norm(sum_row_squares_in_order(rows.ptr, rows.ok, x.d, x.Q.stride_d, C.BD, C.WIDE_OFFSETS))


@triton.jit
def normalize_maxima(best, x, rows, C: tl.constexpr):
    """Multiply maxima by the inverse norms of their query rows, if C.NORMALIZE and not C.SOFT."""
    if C.NORMALIZE and not C.SOFT:
        best = best * compute_query_inverse_norms(x, rows, C)
    return best


@triton.jit
def _trim_padding(x, document, C: tl.constexpr):
    """Shorten a document to the end of the tile that holds its last kept token.

    The tokens after that tile are neither read nor multiplied.
    """
    Document: tl.constexpr = import_args_class("Document")
    length = document.length
    # Other configurations would spill registers.
    if x.D.mask is not None and C.TOKENS_FIRST and not C.SPLIT_DOCUMENTS:
        end = length * 0
        t0 = (tl.cdiv(length, _MASK_STEP_TOKENS) - 1) * _MASK_STEP_TOKENS
        # Search backward from the end, which usually needs one step.
        while (t0 >= 0) & (end == 0):
            t = t0 + tl.arange(0, _MASK_STEP_TOKENS)
            pointers = (document.mask + t.to(tl.int64) * x.D.mask_stride_l).to(tl.pointer_type(tl.int8), bitcast=True)
            keep = tl.load(pointers, mask=t < length, other=0) != 0
            end = tl.max(tl.where(keep, t + 1, 0), axis=0).to(end.dtype)
            t0 -= _MASK_STEP_TOKENS
        # Keep at least one tile, because a descriptor shifts the last tile back to start at `length - BN`.
        length = tl.minimum(length, tl.cdiv(tl.maximum(end, 1), C.BN) * C.BN)
    return Document(document.ptr, document.mask, document.row, length)


@triton.jit
def compute_row_maxima(query, x, rows, document, ARGMAX: tl.constexpr, C: tl.constexpr):
    """Compute the maximum of each row over the kept tokens of a document.

    Args:
        query: The result of `load_query_rows`.
        x: `Operands` of the kernel.
        rows: `QueryRows` of the tile.
        document: The `Document` to score.
        ARGMAX: Whether to find the argmax.
        C: Compile-time choices, a `KernelConfig`.

    Returns:
        The maxima, before `normalize_maxima`. The first token that attains each maximum, or NO_TOKEN. Whether any token
        is kept. With C.SOFT, soft maxima and NO_TOKEN.
    """
    q, scale, plain, unscaled = query
    document = _trim_padding(x, document, C)
    best = fill_lanes(float("-inf"), tl.float32, C)
    where = init_lane_state(C)
    kept = tl.full((C.BN,), 0, tl.int32)
    odds = tl.full((C.BN,), 0, tl.int32)
    if C.SINGLE_STEP or C.LANES == 1:
        mask = prefetch_tile_mask(x, document, 0, C)
        for t0 in range(0, document.length, C.BN):
            ahead = prefetch_tile_mask(x, document, t0 + C.BN, C)
            S, t, keep, first, odd = compute_tile(q, x, rows, document, t0, mask, C)
            mask = ahead
            if x.D.mask is not None:
                kept = kept | keep.to(tl.int32)
            if C.SPLIT_FP32:
                odds = odds | odd.to(tl.int32)
            best, where = _update_maxima(best, where, S, t, keep, first, rows, ARGMAX, C)
    else:
        best, where, kept = _compute_maxima_in_steps(best, where, kept, x, rows, document, ARGMAX, C)
    any_kept = _has_kept_token(x, document, kept)
    row_where = tl.full((C.BM,), NO_TOKEN, tl.int32)
    if C.SOFT:
        row_best = merge_soft_maxima(best, where, x, rows, C)
    elif ARGMAX:
        row_best, row_where = merge_lanes(best, where, document.length, C)
    else:
        row_best = merge_lane_maxima(best, C)
    if C.SPLIT_FP32:
        row_best = tl.where(unscaled, row_best, row_best * scale)
        if (tl.max(odds, axis=0) > 0) | (tl.max((rows.ok & (plain == 0)).to(tl.int32), axis=0) > 0):
            row_best, row_where = add_fallback_maxima(row_best, row_where, plain, x, rows, document, C)
    elif ARGMAX and not C.SOFT:
        lost = rows.ok & (row_where == NO_TOKEN)
        if (tl.max(lost.to(tl.int32), axis=0) > 0) & (any_kept > 0):
            row_where = _search_argmax(row_best, row_where, q, x, rows, document, C)
    if needs_power_scaling(x.Q.ptr.dtype.element_ty, C.ENCODING):
        row_best = row_best * rows.scale
    if C.INT8_TERMS > 0:
        row_best = row_best * scale
        if tl.max((rows.ok & (plain == 0)).to(tl.int32), axis=0) > 0:
            row_best, row_where = add_fallback_maxima(row_best, row_where, plain, x, rows, document, C)
    return row_best, row_where, any_kept


@triton.jit
def has_kept_row(keep, C: tl.constexpr):
    """Return whether each query of the tile keeps a token."""
    GROUPS: tl.constexpr = C.BM // C.ROWS_PER_QUERY
    return tl.max(tl.reshape(keep.to(tl.int32), (GROUPS, C.ROWS_PER_QUERY)), axis=1)


@triton.jit
def store_scores(scores, sums, keeps, any_kept, query, queries, K, k):
    """Store sums as scores, or the score of a document that keeps no token.

    That score is -inf, or 0 for a query that keeps no token either.
    """
    empty = tl.where(keeps > 0, float("-inf"), 0.0)
    tl.store(scores + query.to(tl.int64) * K + k, tl.where(any_kept > 0, sums, empty), mask=query < queries)


@triton.jit
def _locate_document_mask(D, base, owner, k):
    """Return the start of the mask of document k, or `base` without a mask."""
    mask = base
    if D.mask is not None:
        mask = D.mask + owner.to(tl.int64) * D.mask_stride_owner + k.to(tl.int64) * D.mask_stride_doc
    return mask


@triton.jit
def score_rows(x, i, s, ok, number, document, argmax, argmax_row, C: tl.constexpr):
    """Score one block of query rows against a document and store the argmax or soft maxima.

    Args:
        x: `Operands` of the kernel.
        i: Query of each row.
        s: Token of each row within its query.
        ok: Whether each row exists.
        number: Number of each row in the split terms of Q.
        document: The `Document` to score.
        argmax: Output for argmax values, or for soft maxima with C.SOFT, or None.
        argmax_row: Offset of token 0 of each row's query in `argmax`.
        C: Compile-time choices, a `KernelConfig`.

    Returns:
        For each query of the tile, the weighted sum of its row maxima and whether it keeps a token. Then whether the
        document keeps a token.
    """
    GROUPS: tl.constexpr = C.BM // C.ROWS_PER_QUERY
    Rows: tl.constexpr = import_args_class("QueryRows")
    keep = load_query_mask(x.Q, i, s, ok)
    pointers = locate_rows(x.Q, i, s)
    row_sum = None
    if C.ENCODING != "":
        row_sum = sum_query_rows(pointers, keep, x, C)
    scale = None
    rate = None
    if C.SOFT:
        scale = compute_row_scales(x, pointers, keep, C)
        rate = compute_rate(x.tau, scale)
    elif needs_power_scaling(x.Q.ptr.dtype.element_ty, C.ENCODING):
        scale = compute_row_powers(x, pointers, keep, C)
    rows = Rows(pointers, number, keep, row_sum, scale, rate)
    best, where, any_kept = compute_row_maxima(load_query_rows(x, rows, C), x, rows, document, argmax is not None, C)
    best = normalize_maxima(best, x, rows, C)
    if argmax is not None:
        where = tl.where(keep & (where != NO_TOKEN), where, -1)
        if C.SOFT:
            where = tl.where(keep, best, float("-inf"))
        tl.store(argmax + argmax_row + s, where.to(argmax.dtype.element_ty), mask=ok)
    sums = sum_in_order(tl.where(keep, load_query_weight(x.Q, i, s, keep) * best, 0.0), GROUPS, C.ROWS_PER_QUERY)
    return sums, has_kept_row(keep, C), any_kept


@triton.jit
def score_tile_pair(x, out, sizes, C: tl.constexpr):
    """Score one row tile against one document.

    Neighboring programs share a document, so it is read from memory once.
    """
    GROUPS: tl.constexpr = C.BM // C.ROWS_PER_QUERY
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
    i = first_query + lane // C.ROWS_PER_QUERY
    i_ok = i < queries
    argmax_row = argmax_base + (lane // C.ROWS_PER_QUERY).to(tl.int64) * sizes.Lq
    Document: tl.constexpr = import_args_class("Document")
    base = locate_document(x.D, owner, k)
    row = (owner * sizes.K + k) * sizes.Ld
    document = Document(base, _locate_document_mask(x.D, base, owner, k), row, sizes.Ld)

    s = lane % C.ROWS_PER_QUERY
    ok = i_ok & (s < sizes.Lq)
    total, keeps, any_kept = score_rows(x, i, s, ok, i * sizes.Lq + s, document, out.argmax, argmax_row, C)
    if C.LONG_QUERIES:
        for s0 in range(C.ROWS_PER_QUERY, sizes.Lq, C.ROWS_PER_QUERY):
            s = s0 + lane
            ok = i_ok & (s < sizes.Lq)
            more, keeps_more, any_kept = score_rows(x, i, s, ok, i * sizes.Lq + s, document, out.argmax, argmax_row, C)
            total += more
            keeps = keeps | keeps_more
    store_scores(out.scores, total, keeps, any_kept, first_query + tl.arange(0, GROUPS), queries, sizes.K, k)


@triton.jit
def _locate_walk_document(x, n, k0, step, tiles_each, sizes):
    """Return the document of tile `n` of a persistent program."""
    k = k0 + n // tiles_each * step
    base = locate_document(x.D, 0 * k, k)
    return Document(base, _locate_document_mask(x.D, base, 0 * k, k), k * sizes.Ld, sizes.Ld)


@triton.jit
def _score_persistent(x, scores, sizes, C: tl.constexpr):
    """Score one row tile against every `step`-th document, without argmax.

    A single loop covers the tiles of all these documents. The query rows are loaded once, and the load of the next
    document overlaps the last tiles of the current document.
    """
    GROUPS: tl.constexpr = C.BM // C.ROWS_PER_QUERY
    row_tiles = tl.cdiv(sizes.Nq, GROUPS)
    first_query = (tl.program_id(0) % row_tiles) * GROUPS
    k0 = tl.program_id(0) // row_tiles
    step = tl.num_programs(0) // row_tiles
    lane = tl.arange(0, C.BM)
    i = first_query + lane // C.ROWS_PER_QUERY
    s = lane % C.ROWS_PER_QUERY
    keep = load_query_mask(x.Q, i, s, (i < sizes.Nq) & (s < sizes.Lq))
    keeps = has_kept_row(keep, C)
    weight = load_query_weight(x.Q, i, s, keep)
    rows = QueryRows(locate_rows(x.Q, i, s), i, keep, None, None, None)
    q = load_query_tile(x, rows, tl.arange(0, C.BD), C)
    best = fill_lanes(float("-inf"), tl.float32, C)
    kept = tl.full((C.BN,), 0, tl.int32)
    tiles_each = tl.cdiv(sizes.Ld, C.BN)
    count = tl.cdiv(sizes.K - k0, step) * tiles_each
    mask = prefetch_tile_mask(x, _locate_walk_document(x, 0, k0, step, tiles_each, sizes), 0, C)
    for n in range(0, count):
        k = k0 + n // tiles_each * step
        t0 = n % tiles_each * C.BN
        document = _locate_walk_document(x, n, k0, step, tiles_each, sizes)
        last = tl.minimum(n + 1, count - 1)
        ahead = prefetch_tile_mask(
            x, _locate_walk_document(x, last, k0, step, tiles_each, sizes), last % tiles_each * C.BN, C
        )
        S, _, tokens, _, _ = compute_tile(q, x, rows, document, t0, mask, C)
        mask = ahead
        if x.D.mask is not None:
            kept = kept | tokens.to(tl.int32)
        best = nan_max(best, reduce_lane_maxima(S, C))
        if t0 + C.BN >= sizes.Ld:
            any_kept = _has_kept_token(x, document, kept)
            row_best = normalize_maxima(merge_lane_maxima(best, C), x, rows, C)
            sums = sum_in_order(tl.where(keep, weight * row_best, 0.0), GROUPS, C.ROWS_PER_QUERY)
            store_scores(scores, sums, keeps, any_kept, first_query + tl.arange(0, GROUPS), sizes.Nq, sizes.K, k)
            best = fill_lanes(float("-inf"), tl.float32, C)
            kept = tl.full((C.BN,), 0, tl.int32)


@triton.jit
def maxsim_forward(Q, D, tiles, out, terms, sizes, d, C: tl.constexpr):
    """Compute scores and argmax of dense or candidate documents.

    Args:
        Q: `QueryArgs`.
        D: `DocumentArgs`.
        tiles: Tensor descriptor of all document tokens as rows, in blocks `[BN, BD]`. It requires Ld >= BN or
            C.SHORT_DOCUMENTS. None: tokens are read through pointers.
        out: `OutputArgs` with scores `[Nq, K]`.
        terms: `TermArgs` of fp32 rows that are already split, or None.
        sizes: `SizeArgs`.
        d: Number of features.
        C: Compile-time choices, a `KernelConfig`. A tile holds `BM // ROWS_PER_QUERY` queries of at most
            `ROWS_PER_QUERY` tokens, or with LONG_QUERIES one longer query.
    """
    tl.static_assert(not C.SPLIT_FP32 or (C.SINGLE_STEP and not (C.PERSISTENT or C.NORMALIZE)))
    tl.static_assert(not C.PERSISTENT or (C.SINGLE_STEP and not C.LONG_QUERIES and tiles is not None))
    tl.static_assert(not C.PERSISTENT or out.argmax is None)
    tl.static_assert(not C.LONG_QUERIES or C.BM == C.ROWS_PER_QUERY)
    tl.static_assert(not C.SOFT or not (C.TOKENS_FIRST or C.SPLIT_FP32 or C.PERSISTENT))
    x = Operands(Q, D, tiles, terms, None, d, None)
    if C.PERSISTENT:
        _score_persistent(x, out.scores, sizes, C)
    else:
        score_tile_pair(x, out, sizes, C)
