"""The forward of ragged layouts: packed queries of any length against packed documents of any length.

The tile is that of `forward`: BM // SLOT queries side by side, SLOT rows of each at a time, or one query for candidates
and pairs. Work stops at each length.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ...common.arguments import CodedCounts, Operands
from ...common.maxima import lane_maxima, merged_maxima, per_lane, per_token
from ...common.primitives import (
    NO_TOKEN,
    condition,
    group,
    nan_max,
    ordered_sum,
    query_keep,
    query_weight,
    row_pointers,
    wide,
)
from ...common.segments import document_segment, pair, query_segment
from ...common.similarities import add_product, no_similarities, query_tile
from ...formats.residual import coded_rows, in_words, load_words, lookup_tables, side_by_side, tokens_of
from .dense import any_row, inverse_norms, normalized, query_rows, row_maxima, score_rows
from .splits import section


@triton.jit
def carried(total, pending, sums, n, LEVELS: tl.constexpr):
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
            full = ((wide(n) >> level) & 1) == 1
            left = tl.sum(tl.where(here, pending, 0.0), axis=1)
            pending = tl.where(here & (moving & (full == 0)), carry[:, None], pending)
            carry = tl.where(moving & full, left + carry, carry)
            moving = moving & full
        total = tl.where(moving, total + carry, total)
    return total, pending


@triton.jit
def flushed(total, pending, blocks, LEVELS: tl.constexpr):
    """`total` with the tree that `blocks` blocks left unfinished, what is missing counted as zeros."""
    if LEVELS > 0:
        rest = tl.zeros_like(total)
        column = tl.arange(0, pending.shape[1])[None, :]
        for level in tl.static_range(LEVELS):
            waits = ((wide(blocks) >> level) & 1) == 1
            left = tl.sum(tl.where(column == level, pending, 0.0), axis=1)
            rest = tl.where(waits, left + rest, rest)
        total += rest
    return total


@triton.jit
def _place(segments, Nq, K, C: tl.constexpr):
    """Of this program: its first query, how many there are, its document and its number, whether they exist."""
    pid = tl.program_id(0).to(tl.int64)
    ok = condition(pid >= 0)
    if segments.pairs is not None:
        query, document, ok = pair(segments, pid, ok, Nq, K)
        queries = query + 1
        k = pid
    elif C.CANDIDATES:
        query = pid // K
        queries = query + 1
        document = pid
        k = pid % K
    else:
        row_tiles = tl.cdiv(Nq, C.BM // C.SLOT)
        query = (pid % row_tiles) * (C.BM // C.SLOT)
        queries = query * 0 + Nq
        document = pid // row_tiles
        k = document
    return query, queries, document, k, ok


@triton.jit
def _queries(segments, i, ok, Tq, most):
    """As `query_segment`; with pairs, queries of more than `most` tokens count as outside too."""
    begin, length, fits = query_segment(segments, i, ok, Tq)
    if segments.pairs is not None:
        fits = fits & (length <= most)
        length = tl.where(fits, length, 0)
    return begin, length, fits


@triton.jit
def document_at(D, segments, k, ok, Td, C: tl.constexpr):
    """A document, and whether it is inside D."""
    Document: tl.constexpr = group("Document")
    begin, length, valid = document_segment(segments, k, ok, Td)
    base = D.ptr + begin * D.stride_l
    mask = base
    if D.mask is not None:
        mask = D.mask + begin * D.mask_stride_l
    if C.STORED == "":  # a descriptor has no more rows than take 32 bits
        begin = begin.to(tl.int32)
    return Document(base, mask, begin, length), valid


@triton.jit
def _all_rows(x, begin, length, document, out, argmax_row, LEVELS: tl.constexpr, C: tl.constexpr):
    """Sums over all rows of queries, SLOT at a time; which queries keep a row, and whether the document keeps a token,
    if there is a row."""
    GROUPS: tl.constexpr = C.BM // C.SLOT
    total = tl.full((GROUPS,), 0, tl.float32)
    pending = tl.full((GROUPS, 4 if LEVELS <= 4 else 8), 0, tl.float32)
    keeps = tl.full((GROUPS,), 0, tl.int32)
    any_kept = tl.full((), 0, tl.int32)
    longest = tl.max(length, axis=0)
    for s0 in range(0, longest, C.SLOT):
        s = s0 + tl.arange(0, C.BM) % C.SLOT
        row = begin + s
        sums, keeps_more, any_kept = score_rows(x, row * 0, row, s < length, row, document, out.argmax, argmax_row, C)
        total, pending = carried(total, pending, sums, s0 // C.SLOT, LEVELS)
        keeps = keeps | keeps_more
    return flushed(total, pending, tl.cdiv(longest, C.SLOT), LEVELS), keeps, any_kept


@triton.jit
def _score(total, keeps, any_kept, fits):
    score = tl.where(any_kept > 0, total, tl.where(keeps > 0, float("-inf"), 0.0))
    return tl.where(fits, score, float("nan"))


@triton.jit
def _tile_after(n, t0, length, segments, sizes, step, C: tl.constexpr):
    """The document and first token of the tile after one, the first row and length of that document, whether it is
    inside D. Of what is empty or not there the first row is 0."""
    last = t0 + C.BN >= length
    n = tl.where(last, n + step, n)
    begin, length, inside = document_segment(segments, wide(n), n < sizes.K, sizes.Td)
    return n, tl.where(last, 0, t0 + C.BN), tl.where(length > 0, begin, 0), length, inside


@triton.jit
def _tokens(t0, length, C: tl.constexpr):
    return tl.minimum(t0 + tl.arange(0, C.BN), tl.maximum(length - 1, 0))


@triton.jit
def _walk_codes(x, q, rows, weight, keeps, first, fits, segments, out, sizes, step, C: tl.constexpr):
    """Rows q of some queries against every `step`-th document of residual codes in words.

    One loop over the tiles of all of them. What a tile is decoded from was asked for when the one before was decoded,
    its codes one tile earlier: they say where centroids are.
    """
    HALF: tl.constexpr = C.BD // 2
    GROUPS: tl.constexpr = C.BM // C.SLOT
    dtype: tl.constexpr = x.Q.ptr.dtype.element_ty
    D = x.D
    counts = x.counts
    tables = counts.weights
    n, t0, begin, length, inside = _tile_after(first - step, 0, 0, segments, sizes, step, C)
    t = _tokens(t0, length, C)
    code, scale = coded_rows(counts, begin, t)
    base = D.ptr + begin * D.stride_l
    words, some = load_words(base, t, code, 0, x.d, D, counts, HALF, C)
    more_words, more = load_words(base, t, code, HALF, x.d, D, counts, HALF, C)
    n1, t1, begin1, length1, inside1 = _tile_after(n, t0, length, segments, sizes, step, C)
    code1, scale1 = coded_rows(counts, begin1, _tokens(t1, length1, C))
    best = per_lane(float("-inf"), tl.float32, C)
    kept = tl.full((C.BN,), 0, tl.int32)
    while n < sizes.K:
        left = tokens_of(words, some, scale, 0, x.d, tables, dtype, C)
        tile = side_by_side(left, tokens_of(more_words, more, scale, HALF, x.d, tables, dtype, C))
        t = _tokens(t1, length1, C)
        base = D.ptr + begin1 * D.stride_l
        words, some = load_words(base, t, code1, 0, x.d, D, counts, HALF, C)
        more_words, more = load_words(base, t, code1, HALF, x.d, D, counts, HALF, C)
        scale = scale1
        n2, t2, begin2, length2, inside2 = _tile_after(n1, t1, length1, segments, sizes, step, C)
        code1, scale1 = coded_rows(counts, begin2, _tokens(t2, length2, C))
        S = add_product(no_similarities(C), q, tile, C)
        if D.mask is not None:
            at = D.mask + begin * D.mask_stride_l + _tokens(t0, length, C).to(tl.int64) * D.mask_stride_l
            keep = tl.load(at) != 0
            S = tl.where(per_token(keep, C), S, float("-inf"))
            kept = kept | keep.to(tl.int32)
        best = nan_max(best, lane_maxima(S, C))
        if t0 + C.BN >= length:
            any_kept = (length > 0).to(tl.int32)
            if D.mask is not None:
                any_kept = any_kept * tl.max(kept, axis=0)
            row_best = normalized(merged_maxima(best, C), x, rows, C)
            total = ordered_sum(tl.where(rows.ok, weight * row_best, 0.0), GROUPS, C.SLOT)
            _store(out.scores, total, keeps, any_kept, fits & inside, n, sizes, C)
            best = per_lane(float("-inf"), tl.float32, C)
            kept = tl.full((C.BN,), 0, tl.int32)
        n, t0, begin, length, inside = n1, t1, begin1, length1, inside1
        n1, t1, begin1, length1, inside1 = n2, t2, begin2, length2, inside2


@triton.jit
def _first_query(sizes, C: tl.constexpr):
    GROUPS: tl.constexpr = C.BM // C.SLOT
    return (tl.program_id(0).to(tl.int64) % tl.cdiv(sizes.Nq, GROUPS)) * GROUPS


@triton.jit
def _store(scores, total, keeps, any_kept, fits, n, sizes, C: tl.constexpr):
    """Scores of the queries of a walking program and document n."""
    i = _first_query(sizes, C) + tl.arange(0, C.BM // C.SLOT)
    tl.store(scores + i * sizes.K + n, _score(total, keeps, any_kept, fits), mask=i < sizes.Nq)


@triton.jit
def _walk(x, segments, out, sizes, LEVELS: tl.constexpr, C: tl.constexpr):
    """The queries of a tile against every `step`-th document, without winners. Rows are read once where one step of the
    slot holds all of each query."""
    GROUPS: tl.constexpr = C.BM // C.SLOT
    Rows: tl.constexpr = group("Rows")
    row_tiles = tl.cdiv(sizes.Nq, GROUPS)
    step = tl.num_programs(0) // row_tiles
    first = tl.program_id(0) // row_tiles
    i = _first_query(sizes, C) + tl.arange(0, C.BM) // C.SLOT
    begin, length, _valid = query_segment(segments, i, i < sizes.Nq, sizes.Tq)
    i = _first_query(sizes, C) + tl.arange(0, GROUPS)
    _start, _count, fits = query_segment(segments, i, i < sizes.Nq, sizes.Tq)
    if tl.max(length, axis=0) <= C.SLOT:
        s = tl.arange(0, C.BM) % C.SLOT
        row = begin + s
        keep = query_keep(x.Q, row * 0, row, s < length)
        weight = query_weight(x.Q, row * 0, row, keep)
        rows = Rows(row_pointers(x.Q, row * 0, row), row, keep, None, None, None)
        q = query_tile(x, rows, tl.arange(0, C.BD), C)
        _walk_codes(x, q, rows, weight, any_row(keep, C), first, fits, segments, out, sizes, step, C)
    else:
        for n in range(first, sizes.K, step):
            document, inside = document_at(x.D, segments, wide(n), wide(n) >= 0, sizes.Td, C)
            total, keeps, any_kept = _all_rows(x, begin, length, document, out, 0, LEVELS, C)
            _store(out.scores, total, keeps, any_kept, fits & inside, n, sizes, C)


@triton.jit
def _visit(x, segments, out, sizes, LEVELS: tl.constexpr, C: tl.constexpr):
    """One document and one query or BM // SLOT of them."""
    GROUPS: tl.constexpr = C.BM // C.SLOT
    first, queries, document, k, ok = _place(segments, sizes.Nq, sizes.K, C)
    lane = tl.arange(0, C.BM)
    i = first + lane // C.SLOT
    begin, length, fits = _queries(segments, i, ok & (i < queries), sizes.Tq, sizes.most)
    found, valid = document_at(x.D, segments, document, ok, sizes.Td, C)
    argmax_row = k * sizes.Tq
    if segments.pairs is not None:
        argmax_row = k * sizes.most - tl.max(begin, axis=0)

    if C.LONG:
        total, keeps, any_kept = _all_rows(x, begin, length, found, out, argmax_row, LEVELS, C)
    else:
        s = lane % C.SLOT
        row = begin + s
        total, keeps, any_kept = score_rows(x, row * 0, row, s < length, row, found, out.argmax, argmax_row, C)

    i = first + tl.arange(0, GROUPS)
    mine = i < queries
    _, _, fits = _queries(segments, i, ok & mine, sizes.Tq, sizes.most)
    score = _score(total, keeps, any_kept, fits & valid & ok)
    if segments.pairs is not None:
        tl.store(out.scores + k + 0 * i, score, mask=tl.arange(0, GROUPS) == 0)
    else:
        tl.store(out.scores + i * sizes.K + k, score, mask=mine)


@triton.jit
def _store_maxima(x, s, begin, length, found, t0, n, out, rows, C: tl.constexpr):
    """What rows s of queries leave of section n, which is `found` and begins with token t0 of its document."""
    Rows: tl.constexpr = group("Rows")
    row = begin + s
    ok = s < length
    keep = query_keep(x.Q, row * 0, row, ok)
    tile = Rows(row_pointers(x.Q, row * 0, row), row, keep, None, None, None)
    ARGMAX: tl.constexpr = out.winners is not None
    best, where, any_kept = row_maxima(query_rows(x, tile, C), x, tile, found, ARGMAX, C)
    at = n.to(tl.int64) * rows + row
    tl.store(out.maxima + at, best, mask=ok)
    if out.winners is not None:
        tl.store(out.winners + at, tl.where(where == NO_TOKEN, NO_TOKEN, where + t0), mask=ok)
    if out.kept is not None:
        tl.store(out.kept + n, any_kept)
    if C.NORMALIZE:
        first = n == 0
        if first:
            tl.store(out.norms + row, inverse_norms(x, tile, C), mask=ok)


@triton.jit
def _score_section(x, segments, out, sizes, C: tl.constexpr):
    """The rows of BM // SLOT queries against a section, for `row_sums` to put together. Neighbours share a section."""
    if C.EARLY:
        gdc_launch_dependents()
    row_tiles = tl.cdiv(sizes.Nq, C.BM // C.SLOT)
    n = tl.program_id(0) // row_tiles
    lane = tl.arange(0, C.BM)
    i = (tl.program_id(0) % row_tiles) * (C.BM // C.SLOT) + lane // C.SLOT
    begin, length, _ = query_segment(segments, i, i < sizes.Nq, sizes.Tq)
    found, t0 = section(x.D, segments, n, sizes, out, C)
    if C.LONG:
        for s0 in range(0, tl.max(length, axis=0), C.SLOT):
            _store_maxima(x, s0 + lane % C.SLOT, begin, length, found, t0, n, out, sizes.Tq, C)
    else:
        _store_maxima(x, lane % C.SLOT, begin, length, found, t0, n, out, sizes.Tq, C)


@triton.jit
def maxsim_forward_ragged(Q, D, tiles, terms, counts, segments, out, sizes, d, LEVELS: tl.constexpr, C: tl.constexpr):
    """Scores [Nq, K] or, with pairs, [P]; a program takes a document, or many (WALK), and one query or BM // SLOT.

    Q and D are the packed rows, with strides of 0 between queries and documents; `tiles` is a descriptor of the rows of
    D in blocks [BN, BD], `terms` those of query rows, `counts` the `Counts` of quantised tokens, or None. Winners are
    [K, Tq], or [P, most] with pairs, or None; -1 already where no query has a row. K documents are there, or candidates
    of each query. A query's rows are summed as trees of ``SLOT * 2^LEVELS`` rows, where LONG says that it may have more
    than SLOT.

    With C.SECTIONS `out` are the `Sections` of documents, a program takes one of them, and `row_sums` makes the scores.
    """
    if in_words(C.STORED):
        c = counts
        tables = lookup_tables(c, C)
        counts = CodedCounts(
            c.scale, c.scale_each, c.minimum, c.minimum_each, c.codes, c.centroids, c.centroids_count, tables
        )
    x = Operands(Q, D, tiles, terms, counts, d, None)
    if C.SECTIONS:
        _score_section(x, segments, out, sizes, C)
    elif C.WALK:
        _walk(x, segments, out, sizes, LEVELS, C)
    else:
        _visit(x, segments, out, sizes, LEVELS, C)
