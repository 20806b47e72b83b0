"""The forward of ragged layouts: packed queries of any length against packed documents of any length.

The tile is that of `forward`: BM // ROWS_PER_QUERY queries side by side, ROWS_PER_QUERY rows of each at a time, or one
query for candidates and pairs. Work stops at each length.
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
    """Add block n's sums as the next leaf of binary trees of 2^LEVELS blocks; `total` takes whole trees in order.

    The order of a sum over a query that fills several slots is then that of a query summed 2^LEVELS slots at once, as
    in the dense layouts. `pending` [groups, LEVELS or more] are the sums of the levels that wait for their right half.
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
    """`total` with the tree that `blocks` blocks left unfinished, what is missing counted as zeros."""
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
    """Of this program: its first query, how many there are, its document and its number, whether they exist."""
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
    """As `locate_query_segment`; with pairs, queries of more than `most` tokens count as outside too."""
    begin, length, fits = locate_query_segment(segments, i, ok, Tq)
    if segments.pairs is not None:
        fits = fits & (length <= most)
        length = tl.where(fits, length, 0)
    return begin, length, fits


@triton.jit
def locate_packed_document(D, segments, k, ok, Td, C: tl.constexpr):
    """A document, and whether it is inside D."""
    Document: tl.constexpr = import_args_class("Document")
    begin, length, valid = locate_document_segment(segments, k, ok, Td)
    base = D.ptr + begin * D.stride_l
    mask = base
    if D.mask is not None:
        mask = D.mask + begin * D.mask_stride_l
    if C.ENCODING == "":  # a descriptor has no more rows than take 32 bits
        begin = begin.to(tl.int32)
    return Document(base, mask, begin, length), valid


@triton.jit
def _sum_all_rows(x, begin, length, document, out, argmax_row, LEVELS: tl.constexpr, C: tl.constexpr):
    """Sums over all rows of queries, ROWS_PER_QUERY at a time; which queries keep a row, and whether the document
    keeps a token, if there is a row."""
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
    score = tl.where(any_kept > 0, total, tl.where(keeps > 0, float("-inf"), 0.0))
    return tl.where(fits, score, float("nan"))


@triton.jit
def _advance_tile(n, t0, length, segments, sizes, step, C: tl.constexpr):
    """The document and first token of the tile after one, the first row and length of that document, whether it is
    inside D. Of what is empty or not there the first row is 0."""
    last = t0 + C.BN >= length
    n = tl.where(last, n + step, n)
    begin, length, inside = locate_document_segment(segments, to_int64(n), n < sizes.K, sizes.Td)
    return n, tl.where(last, 0, t0 + C.BN), tl.where(length > 0, begin, 0), length, inside


@triton.jit
def _list_tile_tokens(t0, length, C: tl.constexpr):
    return tl.minimum(t0 + tl.arange(0, C.BN), tl.maximum(length - 1, 0))


@triton.jit
def _score_codes_persistent(x, q, rows, weight, keeps, first, fits, segments, out, sizes, step, C: tl.constexpr):
    """Rows q of some queries against every `step`-th document of residual codes in words.

    One loop over the tiles of all of them. What a tile is decoded from was asked for when the one before was decoded,
    its codes one tile earlier: they say where centroids are.
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
    GROUPS: tl.constexpr = C.BM // C.ROWS_PER_QUERY
    return (tl.program_id(0).to(tl.int64) % tl.cdiv(sizes.Nq, GROUPS)) * GROUPS


@triton.jit
def _store_scores(scores, total, keeps, any_kept, fits, n, sizes, C: tl.constexpr):
    """Scores of the queries of a walking program and document n."""
    i = _locate_first_query(sizes, C) + tl.arange(0, C.BM // C.ROWS_PER_QUERY)
    tl.store(scores + i * sizes.K + n, _select_score(total, keeps, any_kept, fits), mask=i < sizes.Nq)


@triton.jit
def _score_persistent(x, segments, out, sizes, LEVELS: tl.constexpr, C: tl.constexpr):
    """The queries of a tile against every `step`-th document, without winners. Rows are read once where one step of the
    slot holds all of each query."""
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
    """One document and one query or BM // ROWS_PER_QUERY of them."""
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
    """What rows s of queries leave of section n, which is `found` and begins with token t0 of its document."""
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
    """The rows of BM // ROWS_PER_QUERY queries against a section, for `row_sums` to put together. Neighbours share a
    section."""
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
    """Scores [Nq, K] or, with pairs, [P]; a program takes a document, or many (WALK), and one query or BM //
    ROWS_PER_QUERY.

    Q and D are the packed rows, with strides of 0 between queries and documents; `tiles` is a descriptor of the rows of
    D in blocks [BN, BD], `terms` those of query rows, `counts` the `DequantArgs` of quantised tokens, or None. Winners
    are [K, Tq], or [P, most] with pairs, or None; -1 already where no query has a row. K documents are there, or
    candidates of each query. A query's rows are summed as trees of ``ROWS_PER_QUERY * 2^LEVELS`` rows, where LONG says
    that it may have more than ROWS_PER_QUERY.

    With C.SPLIT_DOCUMENTS `out` are the `Sections` of documents, a program takes one of them, and `row_sums` makes the
    scores.
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
