"""Generic forward kernel for every layout, shape, dtype, mask, and GPU.

```text
score[i, k] = sum_s q_weight[i, s] * max_t <Q[i, s], D[k, t]>
```

A row tile has `BM` rows and packs `BM // ROWS_PER_QUERY` queries, or one query for candidates, pairs, and queries of
several blocks. The loop over the tokens of a document is `compute_row_maxima` of `row_maxima`.

```text
program = (document k, row tile), row tile fastest    # _locate_program: neighboring programs share a document
queries, document = the row tile and its document     # _locate_queries, _locate_document
for s0 in range(0, longest query of the tile, ROWS_PER_QUERY):    # _sum_blocks, one step without LONG_QUERIES
    row_max = compute_row_maxima(rows s0 to s0 + ROWS_PER_QUERY - 1, document)    # score_rows
    store the argmax, or with SPLIT_DOCUMENTS the row maxima
    carry = tree_sum(q_weight * row_max)              # [queries of the tile]
    n = s0 // ROWS_PER_QUERY                          # leaf n of trees with 2^LEVELS leaves: carry_block_sums
    for level in range(LEVELS):                       # binary counter
        if bit `level` of n is 0:
            pending[level] = carry
            break
        carry = pending[level] + carry
    else:
        total += carry                                # a complete tree
total += unfinished tree, padded with zeros           # flush_block_sums
score = total                                         # store_scores
if the document keeps no token: score = -inf, or 0 if the query keeps no token either
if a segment is outside its tensor: score = NaN
```

These constexprs select a variant. Code of other variants is not compiled.

- PACKED, a parameter of functions: the device reads segment arrays (`SegmentArgs`) of packed rows, and work ends at the
  length of each document and query. Otherwise `segments` is None, and strides locate dense tensors and candidates.
- SPLIT_DOCUMENTS: the program scores one split of a document and stores row maxima. `maxsim_row_sums` merges the splits
  and sums the rows. Splits of soft maxima are dense, and `maxsim_soft_splits` merges them.
- ENCODING: the format of encoded documents, which only `compute_tile` reads.
- PERSISTENT: a program scores its row tile against every `step`-th document. One loop covers the tiles of all these
  documents if tokens are dense and have a tensor descriptor (`_score_tiles_persistent`), or if they are residual codes
  in words (`_score_codes_persistent`, which loads codes two tiles ahead) and the queries fit. Otherwise the program
  scores one packed document after the other, and passes over empty ones, 32 at a time (`_score_documents_persistent`).

```text
tile = query rows and their weights                   # _score_row_tile, once
best = -inf
for each tile of each document of the program:
    best = nan_max(best, lane_max(similarities of the tile))
    if this is the last tile of document k:           # _finish_document
        score[k] = tree_sum(weight * merge_lanes(best) * inverse_norm(q))
        best = -inf
```

Invariants, in addition to the invariants of `row_maxima`:

- The sum over rows is a fixed binary tree. A score has the same bits in every tile and layout.
- Nothing outside Q or D is read. A packed query or document outside its tensor has length 0, and its scores are NaN.

There are two entry points because a dense call has three arguments less, which saves host time, and because profiles
and `lik_ops.info` then name the layout.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ...common.arguments import CodecDequantArgs, Operands
from ...common.maxima import expand_tokens, fill_lanes, merge_lane_maxima, reduce_lane_maxima
from ...common.primitives import (
    NO_TOKEN,
    choose_empty_score,
    import_args_class,
    load_query_mask,
    load_query_weight,
    locate_document,
    locate_rows,
    nan_max,
    sum_in_order,
    to_int64,
)
from ...common.segments import load_pair, locate_document_segment, locate_query_segment, make_packed_document
from ...common.similarities import add_product, compute_tile, init_similarities, load_query_tile, prefetch_tile_mask
from ...formats.encoded import compute_row_powers, needs_power_scaling, sum_query_rows
from ...formats.residual import decode_tokens, has_words, join_columns, load_codes, load_lookup_tables, load_words
from ...soft.maximum import compute_rate, compute_row_scales
from .row_maxima import (
    compute_query_inverse_norms,
    compute_row_maxima,
    has_kept_token,
    load_query_rows,
    normalize_maxima,
)
from .splits import locate_split

EMPTY_DOCUMENTS = tl.constexpr(32)  # documents of a persistent program whose lengths are loaded at once


@triton.jit
def carry_block_sums(total, pending, sums, n, LEVELS: tl.constexpr):
    """Add the sums of block `n` as the next leaf of binary trees with 2^LEVELS leaves.

    `total` accumulates complete trees in order. `pending` `[groups, LEVELS or more]` holds the sums of the levels that
    wait for their right half. A query of several blocks is then summed in the order of the dense kernel, which sums
    2^LEVELS blocks at once.
    """
    if LEVELS == 0:
        total += sums
    else:
        carry = sums
        is_carrying = tl.full((), 1, tl.int1)
        column = tl.arange(0, pending.shape[1])[None, :]
        for level in tl.static_range(LEVELS):
            is_level = column == level
            is_full = ((to_int64(n) >> level) & 1) == 1
            left = tl.sum(tl.where(is_level, pending, 0.0), axis=1)
            pending = tl.where(is_level & (is_carrying & (is_full == 0)), carry[:, None], pending)
            carry = tl.where(is_carrying & is_full, left + carry, carry)
            is_carrying = is_carrying & is_full
        total = tl.where(is_carrying, total + carry, total)
    return total, pending


@triton.jit
def flush_block_sums(total, pending, blocks, LEVELS: tl.constexpr):
    """Return `total` plus the tree that `blocks` blocks left unfinished. Missing leaves are zeros."""
    if LEVELS > 0:
        partial_sum = tl.zeros_like(total)
        column = tl.arange(0, pending.shape[1])[None, :]
        for level in tl.static_range(LEVELS):
            is_waiting = ((to_int64(blocks) >> level) & 1) == 1
            left = tl.sum(tl.where(column == level, pending, 0.0), axis=1)
            partial_sum = tl.where(is_waiting, left + partial_sum, partial_sum)
        total += partial_sum
    return total


@triton.jit
def _locate_program(pid, segments, sizes, PACKED: tl.constexpr, C: tl.constexpr):
    """Locate the work of this program.

    Returns its first query, the end of its queries, its document (or its split, with C.SPLIT_DOCUMENTS), the document's
    column in the output, and whether they exist. With pairs the column is the number of the pair.
    """
    GROUPS: tl.constexpr = C.BM // C.ROWS_PER_QUERY
    if PACKED and not C.SPLIT_DOCUMENTS:
        pid = pid.to(tl.int64)  # so that offsets into packed rows and scores are 64-bit
    ok = tl.full((), 1, tl.int1)
    if PACKED and segments.pairs is not None:
        query, document, ok = load_pair(segments, pid, ok, sizes.Nq, sizes.K)
        queries = query + 1
        k = pid
    elif C.CANDIDATES:
        query = pid // sizes.K
        queries = query + 1
        document = pid
        k = pid % sizes.K
    else:
        row_tiles = tl.cdiv(sizes.Nq, GROUPS)
        query = (pid % row_tiles) * GROUPS
        queries = query * 0 + sizes.Nq
        document = pid // row_tiles
        k = document
    return query, queries, document, k, ok


@triton.jit
def _locate_queries(segments, i, ok, sizes, PACKED: tl.constexpr):
    """Return first row, length, and validity of queries, as `locate_query_segment` does.

    With pairs, a query of more than `sizes.max_seqlen_q` tokens is also invalid. A dense query begins at its own row 0.
    """
    if PACKED:
        begin, length, fits = locate_query_segment(segments, i, ok, sizes.Tq)
        if segments.pairs is not None:
            fits = fits & (length <= sizes.max_seqlen_q)
            length = tl.where(fits, length, 0)
    else:
        begin = 0
        length = sizes.Lq
        fits = ok
    return begin, length, fits


@triton.jit
def locate_dense_document(D, owner, k, sizes):
    """Return document k of an owner as a `Document`."""
    Document: tl.constexpr = import_args_class("Document")
    base = locate_document(D, owner, k)
    mask = base
    if D.mask is not None:
        mask = D.mask + owner.to(tl.int64) * D.mask_stride_owner + k.to(tl.int64) * D.mask_stride_doc
    return Document(base, mask, (owner * sizes.K + k) * sizes.Ld, sizes.Ld)


@triton.jit
def _locate_dense_split(D, owner, n, sizes, cut):
    """Return split `n` of the documents of an owner as a `Document`. `sizes` counts splits as documents."""
    Document: tl.constexpr = import_args_class("Document")
    Sizes: tl.constexpr = import_args_class("SizeArgs")
    document_sizes = Sizes(sizes.Nq, sizes.K // cut.count, sizes.Lq, sizes.Ld)
    document = locate_dense_document(D, owner, n // cut.count, document_sizes)
    t0 = n % cut.count * cut.split_tokens
    base = document.ptr + t0.to(tl.int64) * D.stride_l
    mask = base
    if D.mask is not None:
        mask = document.mask + t0.to(tl.int64) * D.mask_stride_l
    return Document(base, mask, document.row + t0, tl.minimum(document.length - t0, cut.split_tokens))


@triton.jit
def _locate_packed_document(D, segments, k, ok, sizes, C: tl.constexpr):
    """Return a packed document as a `Document`, and whether it is inside D."""
    begin, length, valid = locate_document_segment(segments, k, ok, sizes.Td)
    return make_packed_document(D, begin, length, C), valid


@triton.jit
def _locate_block(queries, s0, sizes, PACKED: tl.constexpr, C: tl.constexpr):
    """Locate the rows of `queries` from token `s0` on.

    Returns the index of each row along the first two axes of Q, whether it exists, and its number among all rows.
    """
    i, begin, length, fits = queries
    s = s0 + tl.arange(0, C.BM) % C.ROWS_PER_QUERY
    ok = s < length
    if PACKED:
        number = begin + s
        i = number * 0
        s = number
    else:
        ok = fits & ok
        number = i * sizes.Lq + s
    return i, s, ok, number


@triton.jit
def has_kept_row(keep, C: tl.constexpr):
    """Return whether each query of the tile keeps a token."""
    GROUPS: tl.constexpr = C.BM // C.ROWS_PER_QUERY
    return tl.max(tl.reshape(keep.to(tl.int32), (GROUPS, C.ROWS_PER_QUERY)), axis=1)


@triton.jit
def _sum_rows(best, weight, keep, C: tl.constexpr):
    """Return the weighted sum of the maxima of each query of the tile."""
    return sum_in_order(tl.where(keep, weight * best, 0.0), C.BM // C.ROWS_PER_QUERY, C.ROWS_PER_QUERY)


@triton.jit
def choose_score(sums, keeps, any_kept):
    """Return `sums`, or the score of an empty document if a document keeps no token."""
    return tl.where(any_kept > 0, sums, choose_empty_score(keeps))


@triton.jit
def store_scores(scores, sums, keeps, any_kept, query, queries, K, k, fits=None):
    """Store sums as scores. The score is NaN if `fits` is false."""
    ok = query < queries
    pointers = scores + query.to(tl.int64) * K + k
    score = choose_score(sums, keeps, any_kept)
    if fits is not None:
        score = tl.where(fits, score, float("nan"))
    tl.store(pointers, score, mask=ok)


@triton.jit
def _store_maxima(best, where, any_kept, x, rows, ok, split, out, sizes, C: tl.constexpr):
    """Store the maxima of rows over a split. `split` holds its number and its first token."""
    n, t0 = split
    offsets = n.to(tl.int64) * sizes.Tq + rows.number
    tl.store(out.maxima + offsets, best, mask=ok)
    if out.split_argmax is not None:
        tl.store(out.split_argmax + offsets, tl.where(where == NO_TOKEN, NO_TOKEN, where + t0), mask=ok)
    if out.kept_flags is not None:
        tl.store(out.kept_flags + n, any_kept)
    if C.NORMALIZE:
        first = n == 0
        if first:
            tl.store(out.norms + rows.number, compute_query_inverse_norms(x, rows, C), mask=ok)


@triton.jit
def _store_argmax(best, where, s, keep, ok, argmax_offset, argmax, C: tl.constexpr):
    """Store the argmax of rows, or their soft maxima with C.SOFT. `argmax_offset` locates token 0 of each query."""
    if C.SOFT:
        values = tl.where(keep, best, float("-inf"))
    else:
        values = tl.where(keep & (where != NO_TOKEN), where, -1)
    tl.store(argmax + argmax_offset + s, values.to(argmax.dtype.element_ty), mask=ok)


@triton.jit
def score_rows(x, queries, s0, document, destination, out, sizes, PACKED: tl.constexpr, C: tl.constexpr):
    """Score one block of query rows against a document and store the argmax or soft maxima.

    Args:
        x: `Operands` of the kernel.
        queries: For each row its query, and the first row and the length of that query.
        s0: First token of the block within each query.
        document: The `Document` to score.
        destination: Offset of token 0 of each row's query in the argmax. With C.SPLIT_DOCUMENTS the split and its first
            token.
        out: `OutputArgs`. With C.SPLIT_DOCUMENTS `SplitArgs`, or `SoftSplitArgs` with C.SOFT.
        sizes: `SizeArgs` or `PackedSizeArgs`.
        PACKED: Whether rows are packed.
        C: Compile-time choices, a `KernelConfig`.

    Returns:
        For each query of the tile, the weighted sum of its row maxima (0 with C.SPLIT_DOCUMENTS) and whether it keeps a
        token. Then whether the document keeps a token.
    """
    Rows: tl.constexpr = import_args_class("QueryRows")
    i, s, ok, number = _locate_block(queries, s0, sizes, PACKED, C)
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
    argmax = out.split_argmax if C.SPLIT_DOCUMENTS and not C.SOFT else out.argmax
    best, where, any_kept = compute_row_maxima(load_query_rows(x, rows, C), x, rows, document, argmax is not None, C)
    if C.SPLIT_DOCUMENTS and not C.SOFT:
        _store_maxima(best, where, any_kept, x, rows, ok, destination, out, sizes, C)
        sums = tl.full((C.BM // C.ROWS_PER_QUERY,), 0, tl.float32)
    else:
        best = normalize_maxima(best, x, rows, C)
        if argmax is not None:
            _store_argmax(best, where, s, keep, ok, destination, argmax, C)
        sums = _sum_rows(best, load_query_weight(x.Q, i, s, keep), keep, C)
    return sums, has_kept_row(keep, C), any_kept


@triton.jit
def _sum_blocks(
    x, queries, document, destination, out, sizes, LEVELS: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr
):
    """Score all rows of the queries, ROWS_PER_QUERY rows at a time, and return what `score_rows` returns.

    Whether the document keeps a token is valid only if a query has a row.
    """
    GROUPS: tl.constexpr = C.BM // C.ROWS_PER_QUERY
    total = tl.full((GROUPS,), 0, tl.float32)
    pending = tl.full((GROUPS, 4 if LEVELS <= 4 else 8), 0, tl.float32)
    has_rows = tl.full((GROUPS,), 0, tl.int32)
    any_kept = tl.full((), 0, tl.int32)
    if PACKED:
        longest = tl.max(queries[2], axis=0)
    else:
        longest = sizes.Lq
    for s0 in range(0, longest, C.ROWS_PER_QUERY):
        sums, has_block_rows, any_kept = score_rows(x, queries, s0, document, destination, out, sizes, PACKED, C)
        if PACKED:
            total, pending = carry_block_sums(total, pending, sums, s0 // C.ROWS_PER_QUERY, LEVELS)
        else:
            total = tl.where(s0 == 0, sums, total + sums)  # a sum may be -0.0
        has_rows = has_rows | has_block_rows
    return flush_block_sums(total, pending, tl.cdiv(longest, C.ROWS_PER_QUERY), LEVELS), has_rows, any_kept


@triton.jit
def _locate_document(
    x, segments, first, lane, begin, document, k, ok, out, sizes, PACKED: tl.constexpr, C: tl.constexpr
):
    """Return the `Document` of a program, whether it is inside D, and its `destination` as `score_rows` needs it."""
    is_inside = ok
    if not PACKED:
        n = document.to(tl.int64)
        destination = (n if C.CANDIDATES else n * sizes.Nq + first) * sizes.Lq
        destination += (lane // C.ROWS_PER_QUERY).to(tl.int64) * sizes.Lq
        owner = first if C.CANDIDATES else first * 0
        if C.SPLIT_DOCUMENTS:
            scored_document = _locate_dense_split(x.D, owner, k, sizes, out)
        else:
            scored_document = locate_dense_document(x.D, owner, k, sizes)
    elif C.SPLIT_DOCUMENTS:
        scored_document, t0 = locate_split(x.D, segments, document, sizes, out, C)
        destination = (document, t0)
    else:
        scored_document, is_inside = _locate_packed_document(x.D, segments, document, ok, sizes, C)
        destination = k * sizes.Tq
        if segments.pairs is not None:
            destination = k * sizes.max_seqlen_q - tl.max(begin, axis=0)
    return scored_document, is_inside, destination


@triton.jit
def score_document(x, segments, out, sizes, LEVELS: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr):
    """Score one document, or one split of it, against one query or `BM // ROWS_PER_QUERY` queries.

    Neighboring programs share a document, so it is read from memory once.
    """
    if C.PDL:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    lane = tl.arange(0, C.BM)
    first, queries, document, k, ok = _locate_program(pid, segments, sizes, PACKED, C)
    i = first + lane // C.ROWS_PER_QUERY
    begin, length, fits = _locate_queries(segments, i, ok & (i < queries), sizes, PACKED)
    scored_document, is_inside, destination = _locate_document(
        x, segments, first, lane, begin, document, k, ok, out, sizes, PACKED, C
    )
    rows = (i, begin, length, fits)
    if C.LONG_QUERIES:
        sums, has_rows, any_kept = _sum_blocks(x, rows, scored_document, destination, out, sizes, LEVELS, PACKED, C)
    else:
        sums, has_rows, any_kept = score_rows(x, rows, 0, scored_document, destination, out, sizes, PACKED, C)
    if not C.SPLIT_DOCUMENTS:
        lane = tl.arange(0, C.BM // C.ROWS_PER_QUERY)
        i = first + lane
        stride = sizes.K
        fits = None
        if PACKED:
            _, _, fits = _locate_queries(segments, i, ok & (i < queries), sizes, PACKED)
            fits = fits & is_inside & ok
            if segments.pairs is not None:  # a single score
                i = lane
                queries = 1
                stride = 0
        store_scores(out.scores, sums, has_rows, any_kept, i, queries, stride, k, fits)
    elif C.SOFT and out.kept_flags is not None:
        tl.store(out.kept_flags + document, any_kept)


@triton.jit
def _locate_first_query(sizes, C: tl.constexpr):
    """Return the first query of the row tile of a persistent program."""
    GROUPS: tl.constexpr = C.BM // C.ROWS_PER_QUERY
    return (tl.program_id(0) % tl.cdiv(sizes.Nq, GROUPS)) * GROUPS


@triton.jit
def _store_persistent(sums, keeps, any_kept, fits, k, out, sizes, C: tl.constexpr):
    """Store the scores of the queries of a persistent program for document k."""
    i = _locate_first_query(sizes, C) + tl.arange(0, C.BM // C.ROWS_PER_QUERY)
    store_scores(out.scores, sums, keeps, any_kept, i, sizes.Nq, sizes.K, k, fits)


@triton.jit
def _finish_document(best, any_kept, x, tile, fits, k, out, sizes, C: tl.constexpr):
    """Store the scores of the row tile for document k, given the lane maxima after its last tile."""
    rows, _, weight, has_rows = tile
    sums = _sum_rows(normalize_maxima(merge_lane_maxima(best, C), x, rows, C), weight, rows.ok, C)
    _store_persistent(sums, has_rows, any_kept, fits, k, out, sizes, C)


@triton.jit
def _score_tiles_persistent(x, tile, k0, step, out, sizes, C: tl.constexpr):
    """Score a row tile against every `step`-th dense document.

    The load of the next document overlaps the last tiles of the current document.
    """
    rows, q, _weight, _has_rows = tile
    best = fill_lanes(float("-inf"), tl.float32, C)
    kept_tokens = tl.full((C.BN,), 0, tl.int32)
    tiles_per_document = tl.cdiv(sizes.Ld, C.BN)
    count = tl.cdiv(sizes.K - k0, step) * tiles_per_document
    mask = prefetch_tile_mask(x, locate_dense_document(x.D, 0 * k0, k0, sizes), 0, C)
    for n in range(0, count):
        k = k0 + n // tiles_per_document * step
        t0 = n % tiles_per_document * C.BN
        document = locate_dense_document(x.D, 0 * k, k, sizes)
        n_ahead = tl.minimum(n + 1, count - 1)
        k_ahead = k0 + n_ahead // tiles_per_document * step
        next_document = locate_dense_document(x.D, 0 * k_ahead, k_ahead, sizes)
        next_mask = prefetch_tile_mask(x, next_document, n_ahead % tiles_per_document * C.BN, C)
        S, _, tokens, _, _ = compute_tile(q, x, rows, document, t0, mask, C)
        mask = next_mask
        if x.D.mask is not None:
            kept_tokens = kept_tokens | tokens.to(tl.int32)
        best = nan_max(best, reduce_lane_maxima(S, C))
        if t0 + C.BN >= sizes.Ld:
            _finish_document(best, has_kept_token(x, document, kept_tokens), x, tile, None, k, out, sizes, C)
            best = fill_lanes(float("-inf"), tl.float32, C)
            kept_tokens = tl.full((C.BN,), 0, tl.int32)


@triton.jit
def _advance_tile(n, t0, length, segments, sizes, step, C: tl.constexpr):
    """Return the tile after tile `t0` of document `n`.

    Returns the document, the tile's first token, the document's first row and length, and whether it is inside D. The
    first row is 0 if the document is empty or missing.
    """
    is_last = t0 + C.BN >= length
    n = tl.where(is_last, n + step, n)
    begin, length, is_inside = locate_document_segment(segments, to_int64(n), n < sizes.K, sizes.Td)
    return n, tl.where(is_last, 0, t0 + C.BN), tl.where(length > 0, begin, 0), length, is_inside


@triton.jit
def _list_tile_tokens(t0, length, C: tl.constexpr):
    """Return the tokens of the tile from `t0` on. Tokens after the end repeat the last token."""
    return tl.minimum(t0 + tl.arange(0, C.BN), tl.maximum(length - 1, 0))


@triton.jit
def _score_codes_persistent(x, tile, first, step, fits, segments, out, sizes, C: tl.constexpr):
    """Score a row tile against every `step`-th document of residual codes stored as words.

    A single loop covers the tiles of all these documents, with a software pipeline over three tiles. While tile n is
    decoded and multiplied, words and centroids of tile n + 1 and codes of tile n + 2 are being loaded. The codes are
    needed first, because they locate the centroids.
    """
    HALF: tl.constexpr = C.BD // 2
    dtype: tl.constexpr = x.Q.ptr.dtype.element_ty
    D = x.D
    counts = x.counts
    tables = counts.weights
    n, t0, begin, length, is_inside = _advance_tile(first - step, 0, 0, segments, sizes, step, C)
    t = _list_tile_tokens(t0, length, C)
    code, scale = load_codes(counts, begin, t)
    base = D.ptr + begin * D.stride_l
    words, centroids = load_words(base, t, code, 0, x.d, D, counts, HALF, C)
    more_words, more_centroids = load_words(base, t, code, HALF, x.d, D, counts, HALF, C)
    n1, t1, begin1, length1, is_inside1 = _advance_tile(n, t0, length, segments, sizes, step, C)
    code1, scale1 = load_codes(counts, begin1, _list_tile_tokens(t1, length1, C))
    best = fill_lanes(float("-inf"), tl.float32, C)
    kept_tokens = tl.full((C.BN,), 0, tl.int32)
    while n < sizes.K:
        first_half = decode_tokens(words, centroids, scale, 0, x.d, tables, dtype, C)
        tokens = join_columns(first_half, decode_tokens(more_words, more_centroids, scale, HALF, x.d, tables, dtype, C))
        t = _list_tile_tokens(t1, length1, C)
        base = D.ptr + begin1 * D.stride_l
        words, centroids = load_words(base, t, code1, 0, x.d, D, counts, HALF, C)
        more_words, more_centroids = load_words(base, t, code1, HALF, x.d, D, counts, HALF, C)
        scale = scale1
        n2, t2, begin2, length2, is_inside2 = _advance_tile(n1, t1, length1, segments, sizes, step, C)
        code1, scale1 = load_codes(counts, begin2, _list_tile_tokens(t2, length2, C))
        S = add_product(init_similarities(C), tile[1], tokens, C)
        if D.mask is not None:
            mask_pointers = (
                D.mask + begin * D.mask_stride_l + _list_tile_tokens(t0, length, C).to(tl.int64) * D.mask_stride_l
            )
            keep = tl.load(mask_pointers) != 0
            S = tl.where(expand_tokens(keep, C), S, float("-inf"))
            kept_tokens = kept_tokens | keep.to(tl.int32)
        best = nan_max(best, reduce_lane_maxima(S, C))
        if t0 + C.BN >= length:
            any_kept = (length > 0).to(tl.int32)
            if D.mask is not None:
                any_kept = any_kept * tl.max(kept_tokens, axis=0)
            _finish_document(best, any_kept, x, tile, fits & is_inside, n, out, sizes, C)
            best = fill_lanes(float("-inf"), tl.float32, C)
            kept_tokens = tl.full((C.BN,), 0, tl.int32)
        n, t0, begin, length, is_inside = n1, t1, begin1, length1, is_inside1
        n1, t1, begin1, length1, is_inside1 = n2, t2, begin2, length2, is_inside2


@triton.jit
def _score_row_tile(x, segments, queries, fits, first, step, out, sizes, PACKED: tl.constexpr, C: tl.constexpr):
    """Load query rows of at most one block, and score them against every `step`-th document."""
    Rows: tl.constexpr = import_args_class("QueryRows")
    i, s, ok, number = _locate_block(queries, 0, sizes, PACKED, C)
    keep = load_query_mask(x.Q, i, s, ok)
    has_rows = has_kept_row(keep, C)
    weight = load_query_weight(x.Q, i, s, keep)
    rows = Rows(locate_rows(x.Q, i, s), number, keep, None, None, None)
    # Triton 3.6 passes a tuple that holds None to a function, but does not return one.
    tile = (rows, load_query_tile(x, rows, tl.arange(0, C.BD), C), weight, has_rows)
    if PACKED:
        _score_codes_persistent(x, tile, first, step, fits, segments, out, sizes, C)
    else:
        _score_tiles_persistent(x, tile, first, step, out, sizes, C)


@triton.jit
def _store_empty_scores(x, queries, fits, k, is_inside, out, sizes, C: tl.constexpr):
    """Store the scores of the queries of a persistent program for empty documents k."""
    has_rows = fits.to(tl.int32) * 0
    for s0 in range(0, tl.max(queries[2], axis=0), C.ROWS_PER_QUERY):
        i, s, ok, _ = _locate_block(queries, s0, sizes, True, C)
        has_rows = has_rows | has_kept_row(load_query_mask(x.Q, i, s, ok), C)
    i = _locate_first_query(sizes, C) + tl.arange(0, C.BM // C.ROWS_PER_QUERY)
    score = tl.where(fits[:, None] & is_inside[None, :], choose_empty_score(has_rows)[:, None], float("nan"))
    offsets = i.to(tl.int64)[:, None] * sizes.K + k[None, :]
    tl.store(out.scores + offsets, score, mask=(i < sizes.Nq)[:, None] & (k < sizes.K)[None, :])


@triton.jit
def _score_documents_persistent(
    x, queries, fits, first, step, segments, out, sizes, LEVELS: tl.constexpr, C: tl.constexpr
):
    """Score the queries of a row tile against every `step`-th packed document.

    The lengths of several documents are loaded at once, so that empty documents cost little.
    """
    count = tl.cdiv(sizes.K - first, step)
    for n0 in range(0, count, EMPTY_DOCUMENTS):
        block = first + (n0 + tl.arange(0, EMPTY_DOCUMENTS)).to(tl.int64) * step
        _, length, are_inside = locate_document_segment(segments, block, block < sizes.K, sizes.Td)
        if tl.max(length, axis=0) > 0:
            for n in range(n0, tl.minimum(n0 + EMPTY_DOCUMENTS, count)):
                k = first + to_int64(n) * step
                document, is_inside = _locate_packed_document(x.D, segments, k, k >= 0, sizes, C)
                if C.LONG_QUERIES:
                    sums, has_rows, any_kept = _sum_blocks(x, queries, document, 0, out, sizes, LEVELS, True, C)
                else:
                    sums, has_rows, any_kept = score_rows(x, queries, 0, document, 0, out, sizes, True, C)
                _store_persistent(sums, has_rows, any_kept, fits & is_inside, k, out, sizes, C)
        else:
            _store_empty_scores(x, queries, fits, block, are_inside, out, sizes, C)


@triton.jit
def _score_persistent(x, segments, out, sizes, LEVELS: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr):
    """Score the queries of a row tile against every `step`-th document, without argmax.

    Query rows are loaded once if every query of the tile has at most ROWS_PER_QUERY rows.
    """
    row_tiles = tl.cdiv(sizes.Nq, C.BM // C.ROWS_PER_QUERY)
    first_query = _locate_first_query(sizes, C)
    first = tl.program_id(0) // row_tiles
    step = tl.num_programs(0) // row_tiles
    i = first_query + tl.arange(0, C.BM) // C.ROWS_PER_QUERY
    begin, length, fits = _locate_queries(segments, i, i < sizes.Nq, sizes, PACKED)
    queries = (i, begin, length, fits)
    if PACKED:
        i = first_query + tl.arange(0, C.BM // C.ROWS_PER_QUERY)
        _, _, fits = _locate_queries(segments, i, i < sizes.Nq, sizes, PACKED)
        if has_words(C.ENCODING) and tl.max(length, axis=0) <= C.ROWS_PER_QUERY:
            _score_row_tile(x, segments, queries, fits, first, step, out, sizes, PACKED, C)
        else:
            _score_documents_persistent(x, queries, fits, first, step, segments, out, sizes, LEVELS, C)
    else:
        _score_row_tile(x, segments, queries, None, first, step, out, sizes, PACKED, C)


@triton.jit
def maxsim_forward(Q, D, tiles, out, sizes, d, C: tl.constexpr):
    """Compute scores and argmax of dense or candidate documents.

    Args:
        Q: `QueryArgs`.
        D: `DocumentArgs`.
        tiles: Tensor descriptor of all document tokens as rows, in blocks `[BN, BD]`. It requires Ld >= BN or
            C.SHORT_DOCUMENTS. None: tokens are read through pointers.
        out: `OutputArgs` with scores `[Nq, K]`.
        sizes: `SizeArgs`.
        d: Number of features.
        C: Compile-time choices, a `KernelConfig`. A tile holds `BM // ROWS_PER_QUERY` queries of at most
            `ROWS_PER_QUERY` tokens, or with LONG_QUERIES one longer query.
    """
    tl.static_assert(C.FP32_TERMS == 0 or (C.SINGLE_STEP and not C.PERSISTENT))
    tl.static_assert(not C.PERSISTENT or (C.SINGLE_STEP and not C.LONG_QUERIES and tiles is not None))
    tl.static_assert(not C.PERSISTENT or out.argmax is None)
    tl.static_assert(not C.LONG_QUERIES or C.BM == C.ROWS_PER_QUERY)
    tl.static_assert(not C.SOFT or not (C.TOKENS_FIRST or C.FP32_TERMS > 0 or C.PERSISTENT))
    x = Operands(Q, D, tiles, None, None, d, None)
    if C.PERSISTENT:
        _score_persistent(x, None, out, sizes, 0, False, C)
    else:
        score_document(x, None, out, sizes, 0, False, C)


@triton.jit
def maxsim_forward_packed(Q, D, tiles, terms, counts, segments, out, sizes, d, LEVELS: tl.constexpr, C: tl.constexpr):
    """Compute scores and argmax of packed queries and documents.

    Args:
        Q: `QueryArgs` of packed rows, with stride 0 between queries.
        D: `DocumentArgs` of packed rows, with stride 0 between documents.
        tiles: See `maxsim_forward`.
        terms: `TermArgs` of query rows, or None.
        counts: `DequantArgs` of quantized tokens, `CodecDequantArgs` of residual codes, or None.
        segments: `SegmentArgs`.
        out: `OutputArgs`, or `SplitArgs` with C.SPLIT_DOCUMENTS. Scores are `[Nq, K]`, or `[P]` with pairs. The argmax
            is `[K, Tq]`, `[P, max_seqlen_q]` with pairs, or None. The caller fills it with -1 where no query has a row.
        sizes: `PackedSizeArgs`. K counts documents, or candidates of each query.
        d: Number of features.
        LEVELS: With C.LONG_QUERIES, rows are summed as trees of `ROWS_PER_QUERY * 2^LEVELS` rows.
        C: Compile-time choices, a `KernelConfig`.
    """
    if has_words(C.ENCODING):
        c = counts
        tables = load_lookup_tables(c, C)
        counts = CodecDequantArgs(
            c.scale, c.scale_stride, c.minimum, c.minimum_stride, c.codes, c.centroids, c.centroids_count, tables
        )
    x = Operands(Q, D, tiles, terms, counts, d, None)
    if C.PERSISTENT:
        _score_persistent(x, segments, out, sizes, LEVELS, True, C)
    else:
        score_document(x, segments, out, sizes, LEVELS, True, C)
