"""Generic forward kernel for packed layouts: queries and documents of any length.

The device reads segment arrays (`SegmentArgs`) to locate queries and documents. A row tile packs `BM // ROWS_PER_QUERY`
queries, or one query for candidates and pairs. The loop over tokens is `compute_row_maxima` of `dense`. Work ends at
the length of each document and of the longest query of the tile.

```text
query rows, document = segments of the program
for s0 in range(0, longest query of the tile, ROWS_PER_QUERY):    # one step without LONG_QUERIES
    row_max = compute_row_maxima(rows s0 to s0 + ROWS_PER_QUERY - 1, document)
    carry = tree_sum(q_weight * row_max)            # [queries of the tile]
    n = s0 // ROWS_PER_QUERY                        # leaf n of trees with 2^LEVELS leaves
    for level in range(LEVELS):                     # binary counter
        if bit `level` of n is 0:
            pending[level] = carry
            break
        carry = pending[level] + carry
    else:
        total += carry                              # a complete tree
total += unfinished tree, padded with zeros
score = total, -inf, or 0 as in `dense`, or NaN if a segment is outside its tensor
```

Three modes of `maxsim_forward_ragged`:

- default: a program scores one document and one row tile.
- PERSISTENT: a program scores every n-th document, for residual codes in words. If all queries of the tile fit in
  `ROWS_PER_QUERY` rows, one loop covers the tiles of all these documents.
- SPLIT_DOCUMENTS: a program stores row maxima of one split of a document. `maxsim_row_sums` computes the scores.

Invariants:

- The sum over a query has the bits of the dense kernel, because the binary counter builds the same tree.
- Nothing outside Q or D is read. A query or document outside its tensor has length 0, and its scores are NaN.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ...common.arguments import CodecDequantArgs, Operands
from ...common.maxima import expand_tokens, fill_lanes, merge_lane_maxima, reduce_lane_maxima
from ...common.primitives import (
    NO_TOKEN,
    import_args_class,
    load_query_mask,
    load_query_weight,
    locate_rows,
    nan_max,
    sum_in_order,
    to_int64,
    to_mask,
)
from ...common.segments import load_pair, locate_document_segment, locate_query_segment
from ...common.similarities import add_product, init_similarities, load_query_tile
from ...formats.residual import decode_tokens, has_words, join_columns, load_codes, load_lookup_tables, load_words
from .dense import (
    compute_query_inverse_norms,
    compute_row_maxima,
    has_kept_row,
    load_query_rows,
    normalize_maxima,
    score_rows,
)
from .splits import locate_split


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
        moving = tl.full((), 1, tl.int1)
        column = tl.arange(0, pending.shape[1])[None, :]
        for level in tl.static_range(LEVELS):
            here = column == level
            full = ((to_int64(n) >> level) & 1) == 1
            left = tl.sum(tl.where(here, pending, 0.0), axis=1)
            pending = tl.where(here & (moving & (full == 0)), carry[:, None], pending)
            carry = tl.where(moving & full, left + carry, carry)
            moving = moving & full
        total = tl.where(moving, total + carry, total)
    return total, pending


@triton.jit
def flush_block_sums(total, pending, blocks, LEVELS: tl.constexpr):
    """Return `total` plus the tree that `blocks` blocks left unfinished. Missing leaves are zeros."""
    if LEVELS > 0:
        rest = tl.zeros_like(total)
        column = tl.arange(0, pending.shape[1])[None, :]
        for level in tl.static_range(LEVELS):
            waits = ((to_int64(blocks) >> level) & 1) == 1
            left = tl.sum(tl.where(column == level, pending, 0.0), axis=1)
            rest = tl.where(waits, left + rest, rest)
        total += rest
    return total


@triton.jit
def _locate_program(segments, Nq, K, C: tl.constexpr):
    """Locate the work of this program.

    Returns its first query, the end of its queries, its document, the document's column in the output, and whether they
    exist. With pairs the column is the number of the pair.
    """
    pid = tl.program_id(0).to(tl.int64)
    ok = to_mask(pid >= 0)
    if segments.pairs is not None:
        query, document, ok = load_pair(segments, pid, ok, Nq, K)
        queries = query + 1
        k = pid
    elif C.CANDIDATES:
        query = pid // K
        queries = query + 1
        document = pid
        k = pid % K
    else:
        row_tiles = tl.cdiv(Nq, C.BM // C.ROWS_PER_QUERY)
        query = (pid % row_tiles) * (C.BM // C.ROWS_PER_QUERY)
        queries = query * 0 + Nq
        document = pid // row_tiles
        k = document
    return query, queries, document, k, ok


@triton.jit
def _locate_queries(segments, i, ok, Tq, most):
    """Return first row, length, and validity of queries, as `locate_query_segment` does.

    With pairs, a query of more than `most` tokens is also invalid.
    """
    begin, length, fits = locate_query_segment(segments, i, ok, Tq)
    if segments.pairs is not None:
        fits = fits & (length <= most)
        length = tl.where(fits, length, 0)
    return begin, length, fits


@triton.jit
def locate_packed_document(D, segments, k, ok, Td, C: tl.constexpr):
    """Return a packed document as a `Document`, and whether it is inside D."""
    Document: tl.constexpr = import_args_class("Document")
    begin, length, valid = locate_document_segment(segments, k, ok, Td)
    base = D.ptr + begin * D.stride_l
    mask = base
    if D.mask is not None:
        mask = D.mask + begin * D.mask_stride_l
    # A descriptor has fewer than 2^31 rows.
    if C.ENCODING == "":
        begin = begin.to(tl.int32)
    return Document(base, mask, begin, length), valid


@triton.jit
def _sum_all_rows(x, begin, length, document, out, argmax_row, LEVELS: tl.constexpr, C: tl.constexpr):
    """Sum over all rows of the queries, ROWS_PER_QUERY rows at a time.

    Returns the sums, whether each query keeps a row, and whether the document keeps a token. The last value is valid
    only if a query has a row.
    """
    GROUPS: tl.constexpr = C.BM // C.ROWS_PER_QUERY
    total = tl.full((GROUPS,), 0, tl.float32)
    pending = tl.full((GROUPS, 4 if LEVELS <= 4 else 8), 0, tl.float32)
    keeps = tl.full((GROUPS,), 0, tl.int32)
    any_kept = tl.full((), 0, tl.int32)
    longest = tl.max(length, axis=0)
    for s0 in range(0, longest, C.ROWS_PER_QUERY):
        s = s0 + tl.arange(0, C.BM) % C.ROWS_PER_QUERY
        row = begin + s
        sums, keeps_more, any_kept = score_rows(x, row * 0, row, s < length, row, document, out.argmax, argmax_row, C)
        total, pending = carry_block_sums(total, pending, sums, s0 // C.ROWS_PER_QUERY, LEVELS)
        keeps = keeps | keeps_more
    return flush_block_sums(total, pending, tl.cdiv(longest, C.ROWS_PER_QUERY), LEVELS), keeps, any_kept


@triton.jit
def _select_score(total, keeps, any_kept, fits):
    """Select the sum, -inf, 0, or NaN as the score."""
    score = tl.where(any_kept > 0, total, tl.where(keeps > 0, float("-inf"), 0.0))
    return tl.where(fits, score, float("nan"))


@triton.jit
def _advance_tile(n, t0, length, segments, sizes, step, C: tl.constexpr):
    """Return the tile after tile `t0` of document `n`.

    Returns the document, the tile's first token, the document's first row and length, and whether it is inside D. The
    first row is 0 if the document is empty or missing.
    """
    last = t0 + C.BN >= length
    n = tl.where(last, n + step, n)
    begin, length, inside = locate_document_segment(segments, to_int64(n), n < sizes.K, sizes.Td)
    return n, tl.where(last, 0, t0 + C.BN), tl.where(length > 0, begin, 0), length, inside


@triton.jit
def _list_tile_tokens(t0, length, C: tl.constexpr):
    """Return the tokens of the tile from `t0` on. Tokens after the end repeat the last token."""
    return tl.minimum(t0 + tl.arange(0, C.BN), tl.maximum(length - 1, 0))


@triton.jit
def _score_codes_persistent(x, q, rows, weight, keeps, first, fits, segments, out, sizes, step, C: tl.constexpr):
    """Score query rows `q` against every `step`-th document of residual codes stored as words.

    A single loop covers the tiles of all these documents, with a software pipeline over three tiles. While tile n is
    decoded and multiplied, words and centroids of tile n + 1 and codes of tile n + 2 are being loaded. The codes are
    needed first, because they locate the centroids.
    """
    HALF: tl.constexpr = C.BD // 2
    GROUPS: tl.constexpr = C.BM // C.ROWS_PER_QUERY
    dtype: tl.constexpr = x.Q.ptr.dtype.element_ty
    D = x.D
    counts = x.counts
    tables = counts.weights
    n, t0, begin, length, inside = _advance_tile(first - step, 0, 0, segments, sizes, step, C)
    t = _list_tile_tokens(t0, length, C)
    code, scale = load_codes(counts, begin, t)
    base = D.ptr + begin * D.stride_l
    words, some = load_words(base, t, code, 0, x.d, D, counts, HALF, C)
    more_words, more = load_words(base, t, code, HALF, x.d, D, counts, HALF, C)
    n1, t1, begin1, length1, inside1 = _advance_tile(n, t0, length, segments, sizes, step, C)
    code1, scale1 = load_codes(counts, begin1, _list_tile_tokens(t1, length1, C))
    best = fill_lanes(float("-inf"), tl.float32, C)
    kept = tl.full((C.BN,), 0, tl.int32)
    while n < sizes.K:
        left = decode_tokens(words, some, scale, 0, x.d, tables, dtype, C)
        tile = join_columns(left, decode_tokens(more_words, more, scale, HALF, x.d, tables, dtype, C))
        t = _list_tile_tokens(t1, length1, C)
        base = D.ptr + begin1 * D.stride_l
        words, some = load_words(base, t, code1, 0, x.d, D, counts, HALF, C)
        more_words, more = load_words(base, t, code1, HALF, x.d, D, counts, HALF, C)
        scale = scale1
        n2, t2, begin2, length2, inside2 = _advance_tile(n1, t1, length1, segments, sizes, step, C)
        code1, scale1 = load_codes(counts, begin2, _list_tile_tokens(t2, length2, C))
        S = add_product(init_similarities(C), q, tile, C)
        if D.mask is not None:
            at = D.mask + begin * D.mask_stride_l + _list_tile_tokens(t0, length, C).to(tl.int64) * D.mask_stride_l
            keep = tl.load(at) != 0
            S = tl.where(expand_tokens(keep, C), S, float("-inf"))
            kept = kept | keep.to(tl.int32)
        best = nan_max(best, reduce_lane_maxima(S, C))
        if t0 + C.BN >= length:
            any_kept = (length > 0).to(tl.int32)
            if D.mask is not None:
                any_kept = any_kept * tl.max(kept, axis=0)
            row_best = normalize_maxima(merge_lane_maxima(best, C), x, rows, C)
            total = sum_in_order(tl.where(rows.ok, weight * row_best, 0.0), GROUPS, C.ROWS_PER_QUERY)
            _store_scores(out.scores, total, keeps, any_kept, fits & inside, n, sizes, C)
            best = fill_lanes(float("-inf"), tl.float32, C)
            kept = tl.full((C.BN,), 0, tl.int32)
        n, t0, begin, length, inside = n1, t1, begin1, length1, inside1
        n1, t1, begin1, length1, inside1 = n2, t2, begin2, length2, inside2


@triton.jit
def _locate_first_query(sizes, C: tl.constexpr):
    """Return the first query of the row tile of this program."""
    GROUPS: tl.constexpr = C.BM // C.ROWS_PER_QUERY
    return (tl.program_id(0).to(tl.int64) % tl.cdiv(sizes.Nq, GROUPS)) * GROUPS


@triton.jit
def _store_scores(scores, total, keeps, any_kept, fits, n, sizes, C: tl.constexpr):
    """Store the scores of the queries of a persistent program for document `n`."""
    i = _locate_first_query(sizes, C) + tl.arange(0, C.BM // C.ROWS_PER_QUERY)
    tl.store(scores + i * sizes.K + n, _select_score(total, keeps, any_kept, fits), mask=i < sizes.Nq)


@triton.jit
def _score_persistent(x, segments, out, sizes, LEVELS: tl.constexpr, C: tl.constexpr):
    """Score the queries of a row tile against every `step`-th document, without argmax.

    Query rows are loaded once if every query of the tile has at most ROWS_PER_QUERY rows.
    """
    GROUPS: tl.constexpr = C.BM // C.ROWS_PER_QUERY
    Rows: tl.constexpr = import_args_class("QueryRows")
    row_tiles = tl.cdiv(sizes.Nq, GROUPS)
    step = tl.num_programs(0) // row_tiles
    first = tl.program_id(0) // row_tiles
    i = _locate_first_query(sizes, C) + tl.arange(0, C.BM) // C.ROWS_PER_QUERY
    begin, length, _valid = locate_query_segment(segments, i, i < sizes.Nq, sizes.Tq)
    i = _locate_first_query(sizes, C) + tl.arange(0, GROUPS)
    _start, _count, fits = locate_query_segment(segments, i, i < sizes.Nq, sizes.Tq)
    if tl.max(length, axis=0) <= C.ROWS_PER_QUERY:
        s = tl.arange(0, C.BM) % C.ROWS_PER_QUERY
        row = begin + s
        keep = load_query_mask(x.Q, row * 0, row, s < length)
        weight = load_query_weight(x.Q, row * 0, row, keep)
        rows = Rows(locate_rows(x.Q, row * 0, row), row, keep, None, None, None)
        q = load_query_tile(x, rows, tl.arange(0, C.BD), C)
        _score_codes_persistent(x, q, rows, weight, has_kept_row(keep, C), first, fits, segments, out, sizes, step, C)
    else:
        for n in range(first, sizes.K, step):
            document, inside = locate_packed_document(x.D, segments, to_int64(n), to_int64(n) >= 0, sizes.Td, C)
            total, keeps, any_kept = _sum_all_rows(x, begin, length, document, out, 0, LEVELS, C)
            _store_scores(out.scores, total, keeps, any_kept, fits & inside, n, sizes, C)


@triton.jit
def _score_document(x, segments, out, sizes, LEVELS: tl.constexpr, C: tl.constexpr):
    """Score one document against one query or `BM // ROWS_PER_QUERY` queries."""
    GROUPS: tl.constexpr = C.BM // C.ROWS_PER_QUERY
    first, queries, document, k, ok = _locate_program(segments, sizes.Nq, sizes.K, C)
    lane = tl.arange(0, C.BM)
    i = first + lane // C.ROWS_PER_QUERY
    begin, length, fits = _locate_queries(segments, i, ok & (i < queries), sizes.Tq, sizes.most)
    found, valid = locate_packed_document(x.D, segments, document, ok, sizes.Td, C)
    argmax_row = k * sizes.Tq
    if segments.pairs is not None:
        argmax_row = k * sizes.most - tl.max(begin, axis=0)

    if C.LONG_QUERIES:
        total, keeps, any_kept = _sum_all_rows(x, begin, length, found, out, argmax_row, LEVELS, C)
    else:
        s = lane % C.ROWS_PER_QUERY
        row = begin + s
        total, keeps, any_kept = score_rows(x, row * 0, row, s < length, row, found, out.argmax, argmax_row, C)

    i = first + tl.arange(0, GROUPS)
    mine = i < queries
    _, _, fits = _locate_queries(segments, i, ok & mine, sizes.Tq, sizes.most)
    score = _select_score(total, keeps, any_kept, fits & valid & ok)
    if segments.pairs is not None:
        tl.store(out.scores + k + 0 * i, score, mask=tl.arange(0, GROUPS) == 0)
    else:
        tl.store(out.scores + i * sizes.K + k, score, mask=mine)


@triton.jit
def _store_maxima(x, s, begin, length, found, t0, n, out, rows, C: tl.constexpr):
    """Store the maxima of rows `s` over split `n`, which is `found` and begins at token `t0` of its document."""
    Rows: tl.constexpr = import_args_class("QueryRows")
    row = begin + s
    ok = s < length
    keep = load_query_mask(x.Q, row * 0, row, ok)
    tile = Rows(locate_rows(x.Q, row * 0, row), row, keep, None, None, None)
    ARGMAX: tl.constexpr = out.split_argmax is not None
    best, where, any_kept = compute_row_maxima(load_query_rows(x, tile, C), x, tile, found, ARGMAX, C)
    at = n.to(tl.int64) * rows + row
    tl.store(out.maxima + at, best, mask=ok)
    if out.split_argmax is not None:
        tl.store(out.split_argmax + at, tl.where(where == NO_TOKEN, NO_TOKEN, where + t0), mask=ok)
    if out.kept is not None:
        tl.store(out.kept + n, any_kept)
    if C.NORMALIZE:
        first = n == 0
        if first:
            tl.store(out.norms + row, compute_query_inverse_norms(x, tile, C), mask=ok)


@triton.jit
def _score_document_split(x, segments, out, sizes, C: tl.constexpr):
    """Score the rows of `BM // ROWS_PER_QUERY` queries against one split of a document.

    Neighboring programs share a split. `maxsim_row_sums` merges the splits.
    """
    if C.PDL:
        gdc_launch_dependents()
    row_tiles = tl.cdiv(sizes.Nq, C.BM // C.ROWS_PER_QUERY)
    n = tl.program_id(0) // row_tiles
    lane = tl.arange(0, C.BM)
    i = (tl.program_id(0) % row_tiles) * (C.BM // C.ROWS_PER_QUERY) + lane // C.ROWS_PER_QUERY
    begin, length, _ = locate_query_segment(segments, i, i < sizes.Nq, sizes.Tq)
    found, t0 = locate_split(x.D, segments, n, sizes, out, C)
    if C.LONG_QUERIES:
        for s0 in range(0, tl.max(length, axis=0), C.ROWS_PER_QUERY):
            _store_maxima(x, s0 + lane % C.ROWS_PER_QUERY, begin, length, found, t0, n, out, sizes.Tq, C)
    else:
        _store_maxima(x, lane % C.ROWS_PER_QUERY, begin, length, found, t0, n, out, sizes.Tq, C)


@triton.jit
def maxsim_forward_ragged(Q, D, tiles, terms, counts, segments, out, sizes, d, LEVELS: tl.constexpr, C: tl.constexpr):
    """Compute scores and argmax of packed queries and documents.

    Args:
        Q: `QueryArgs` of packed rows, with stride 0 between queries.
        D: `DocumentArgs` of packed rows, with stride 0 between documents.
        tiles: Tensor descriptor of the rows of D in blocks `[BN, BD]`, or None.
        terms: `TermArgs` of query rows, or None.
        counts: `DequantArgs` of quantized tokens, `CodecDequantArgs` of residual codes, or None.
        segments: `SegmentArgs`.
        out: `OutputArgs`, or `SplitArgs` with C.SPLIT_DOCUMENTS. Scores are `[Nq, K]`, or `[P]` with pairs. The argmax
            is `[K, Tq]`, `[P, most]` with pairs, or None. The caller fills it with -1 where no query has a row.
        sizes: `PackedSizeArgs`. K counts documents, or candidates of each query.
        d: Number of features.
        LEVELS: With C.LONG_QUERIES, rows are summed as trees of `ROWS_PER_QUERY * 2^LEVELS` rows.
        C: Compile-time choices, a `KernelConfig`.
    """
    if has_words(C.ENCODING):
        c = counts
        tables = load_lookup_tables(c, C)
        counts = CodecDequantArgs(
            c.scale, c.scale_each, c.minimum, c.minimum_each, c.codes, c.centroids, c.centroids_count, tables
        )
    x = Operands(Q, D, tiles, terms, counts, d, None)
    if C.SPLIT_DOCUMENTS:
        _score_document_split(x, segments, out, sizes, C)
    elif C.PERSISTENT:
        _score_persistent(x, segments, out, sizes, LEVELS, C)
    else:
        _score_document(x, segments, out, sizes, LEVELS, C)
