"""Pairs of a query and a document in packed layouts, and the lookup tables of the packed backward.

A pair (`items` in the code) is a document of the cross product, a candidate of a query, or an entry of a pair list.
`maxsim_ragged_items` writes the pairs and the query of each packed row. `maxsim_sort_items` sorts the pairs by a field,
and `maxsim_find_starts` locates the pairs of each tile or query.

```text
maxsim_sort_items, program = RANKED_PAIRS pairs n:
    rank[n], end[n] = 0
    for m0 in range(0, count, COMPARED_PAIRS):
        for pairs m of the block with (key[m], m) < (key[n], n):
            rank[n] += 1
            end[n] = max(end[n], row of D after the document of m)
    out[rank[n]] = pair n
    reach[rank[n]] = max(end[n], row of D after the document of n)
    # every second program writes zeros instead, see `ZeroFillArgs`
maxsim_find_starts, program = PAIRS_PER_PROGRAM tiles t, binary search:
    starts[0, t] = number of pairs whose key is below min(t * step, limit)
    starts[1, t] = number of pairs whose reach is at most t * step
```

The pairs that may touch tile t of rows of D are then ``starts[1, t]`` to ``starts[0, t + 1]``.

Invariants:

- The sort is stable. Its result does not depend on the order of the programs.
"""

import triton
import triton.language as tl

from ..common.primitives import to_int64
from ..common.segments import load_pair, locate_document_segment, locate_query_segment

# Fields of a pair, int64. FIRST and LENGTH: first row of D and number of tokens of its document. FIRST is Td if the
# pair has no document token or no query row. BEGIN to STOP: rows of its query. ARGMAX: offset that is added to a row
# number to locate its argmax. SCORE: offset of the gradient of its score, of query 0 in the cross product. QUERY: its
# query, or Nq if there is none.
FIELD_FIRST, FIELD_LENGTH, FIELD_BEGIN, FIELD_STOP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FIELD_ARGMAX, FIELD_SCORE, FIELD_QUERY = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
FIELD_COUNT = tl.constexpr(7)
PAIRS_PER_PROGRAM = tl.constexpr(128)  # pairs, or starts, of a program
QUERIES_PER_PROGRAM = tl.constexpr(16)  # queries of a program that writes the query of each row
# Pairs that a program ranks, and pairs of a comparison step.
RANKED_PAIRS, COMPARED_PAIRS = tl.constexpr(4), tl.constexpr(512)
FILL_ELEMENTS = tl.constexpr(8192)  # elements set to zero at a time


@triton.jit
def load_pair_field(up, n, ok, FIELD: tl.constexpr):
    """Load a field of pairs `n`, or 0 where not `ok`."""
    return tl.load(up.items + FIELD * to_int64(up.count) + n, mask=ok, other=0)


@triton.jit
def find_query_pairs(up, row, ok, C: tl.constexpr):
    """Return the query of packed query rows (0: none), the first pair of that query, and its number of pairs."""
    i = tl.load(up.query + row, mask=ok, other=-1).to(tl.int64)
    ok = ok & (i >= 0)
    i = tl.where(ok, i, 0)
    first = i * 0
    if up.starts is not None:
        first = tl.load(up.starts + i, mask=ok, other=0).to(tl.int64)
        pair_count = tl.load(up.starts + i + 1, mask=ok, other=0).to(tl.int64) - first
    else:
        if C.CANDIDATES:
            first = i * up.K
        pair_count = tl.where(ok, first * 0 + up.K, 0)
    return i, first, pair_count


@triton.jit
def count_max_pairs(up, row, ok, C: tl.constexpr):
    """Return the largest number of pairs of any query of these rows."""
    _, _, pair_count = find_query_pairs(up, row, ok, C)
    return tl.max(pair_count, axis=0).to(tl.int32)


@triton.jit
def load_packed_argmax(up, query_pairs, row, n, ok):
    """Return the argmax of packed query rows in the n-th pair of their query, as rows of D.

    Also returns whether there is an argmax, and the gradient of the score. `query_pairs` is the result of
    `find_query_pairs`. No loaded value decides whether another value is loaded, so the loads are in flight together.
    """
    i, first, pair_count = query_pairs
    n = n.to(tl.int64)
    ok = ok & (n < pair_count)
    m = first + n
    if up.starts is not None:
        ok = ok & (row < load_pair_field(up, m, ok, FIELD_STOP))
        argmax_offset = load_pair_field(up, m, ok, FIELD_ARGMAX) + row
        score_offset = load_pair_field(up, m, ok, FIELD_SCORE)
    else:
        argmax_offset = n * up.Lq + row
        score_offset = i * up.stride_q + n * up.stride_k
    token = tl.load(up.argmax + argmax_offset, mask=ok, other=-1).to(tl.int64)
    length = load_pair_field(up, m, ok, FIELD_LENGTH)
    begin = load_pair_field(up, m, ok, FIELD_FIRST)
    g = tl.load(up.grad_scores + score_offset, mask=ok, other=0.0)
    # The comparison with the length is a safeguard: no forward writes an argmax outside its document.
    has_argmax = ok & (token >= 0) & (token < length)
    # Row 0 is not read. Without this select Triton 3.6 does not compile the select of the gradient.
    return tl.where(has_argmax, begin + token, 0), has_argmax, tl.where(has_argmax, g, 0.0)


@triton.jit
def _describe_pair(segments, n, ok, Nq, K, Tq, max_seqlen_q, stride_q, stride_k, CANDIDATES: tl.constexpr):
    """Return query (-1: none), document, first query row, and number of query rows of pairs `n`.

    Also returns the offsets of their argmax and of the gradient of their score.
    """
    if segments.pairs is not None:
        i, document, exists = load_pair(segments, n, ok, Nq, K)
        i = tl.where(exists, i, -1)
        begin, rows, _ = locate_query_segment(segments, i, ok & exists, Tq)
        rows = tl.minimum(rows, max_seqlen_q)
        argmax = n * max_seqlen_q - begin
        score = n * stride_q
    else:
        document = n
        i = n * 0
        begin = i.to(tl.int32)
        rows = begin + Tq
        argmax = n * Tq
        score = n * stride_k
        if CANDIDATES:
            i = n // K
            begin, rows, _ = locate_query_segment(segments, i, ok, Tq)
            argmax = n % K * Tq
            score = i * stride_q + n % K * stride_k
    return i, document, begin, rows, argmax, score


@triton.jit
def _write_pairs(
    segments, items, block, Nq, K, Tq, Td, count, max_seqlen_q, stride_q, stride_k, CANDIDATES: tl.constexpr
):
    """Write the fields of a block of pairs."""
    n = to_int64(block) * PAIRS_PER_PROGRAM + tl.arange(0, PAIRS_PER_PROGRAM)
    ok = n < count
    i, document, begin, rows, argmax, score = _describe_pair(
        segments, n, ok, Nq, K, Tq, max_seqlen_q, stride_q, stride_k, CANDIDATES
    )
    first, length, _ = locate_document_segment(segments, document, ok & (i >= 0), Td)
    is_nonempty = (length > 0) & (rows > 0)
    tl.store(items + FIELD_FIRST * to_int64(count) + n, tl.where(is_nonempty, first, Td), mask=ok)
    tl.store(items + FIELD_LENGTH * to_int64(count) + n, tl.where(is_nonempty, length, 0), mask=ok)
    tl.store(items + FIELD_BEGIN * to_int64(count) + n, begin, mask=ok)
    tl.store(items + FIELD_STOP * to_int64(count) + n, begin + tl.where(is_nonempty, rows, 0), mask=ok)
    tl.store(items + FIELD_ARGMAX * to_int64(count) + n, argmax, mask=ok)
    tl.store(items + FIELD_SCORE * to_int64(count) + n, score, mask=ok)
    tl.store(items + FIELD_QUERY * to_int64(count) + n, tl.where(i >= 0, i, Nq), mask=ok)


@triton.jit
def _write_queries(segments, query, block, Nq, Tq):
    """Write the query of each row of a block of queries."""
    i = block * QUERIES_PER_PROGRAM + tl.arange(0, QUERIES_PER_PROGRAM)
    begin, rows, _ = locate_query_segment(segments, i.to(tl.int64), i < Nq, Tq)
    s = tl.arange(0, PAIRS_PER_PROGRAM)
    for s0 in range(0, tl.max(rows, axis=0), PAIRS_PER_PROGRAM):
        queries = tl.broadcast_to(i[:, None], (QUERIES_PER_PROGRAM, PAIRS_PER_PROGRAM))
        tl.store(query + (begin[:, None] + s0 + s[None, :]), queries, mask=s0 + s[None, :] < rows[:, None])


@triton.jit(do_not_specialize=["Nq", "K", "Tq", "Td", "count", "max_seqlen_q", "stride_q", "stride_k"])
def maxsim_ragged_items(
    segments, items, query, Nq, K, Tq, Td, count, max_seqlen_q, stride_q, stride_k, CANDIDATES: tl.constexpr
):  # fmt: skip
    """Write the pairs of a packed call and the query of each packed row.

    Bounds of queries may leave gaps and come in any order.

    Args:
        segments: `SegmentArgs`.
        items: Output int64 `[FIELD_COUNT, count]`.
        query: Output `[Tq]`, filled with -1 by the caller.
        Nq: Number of queries.
        K: Number of documents, or of candidates of each query.
        Tq: Packed query rows.
        Td: Packed document rows.
        count: Number of pairs.
        max_seqlen_q: Columns of the argmax of a pair list.
        stride_q: Stride of the score gradients between queries, or between pairs of a pair list.
        stride_k: Stride of the score gradients between documents.
        CANDIDATES: Whether each query has its own documents.
    """
    blocks = tl.cdiv(count, PAIRS_PER_PROGRAM)
    block = tl.program_id(0)
    if block < blocks:
        _write_pairs(segments, items, block, Nq, K, Tq, Td, count, max_seqlen_q, stride_q, stride_k, CANDIDATES)
    else:
        _write_queries(segments, query, block - blocks, Nq, Tq)


@triton.jit
def _load_field(items, count, n, ok, FIELD: tl.constexpr):
    """Load a field of pairs `n`."""
    return tl.load(items + FIELD * to_int64(count) + n, mask=ok, other=0)


@triton.jit
def _sort_pairs(items, out, reach, count, block, KEY: tl.constexpr):
    """Rank RANKED_PAIRS pairs and write them, and their reach, in sorted order."""
    n = to_int64(block) * RANKED_PAIRS + tl.arange(0, RANKED_PAIRS)
    ok = n < count
    key = _load_field(items, count, n, ok, KEY)
    counts = tl.zeros((RANKED_PAIRS, COMPARED_PAIRS), tl.int32)
    ends = tl.zeros((RANKED_PAIRS, COMPARED_PAIRS), tl.int64)
    for m0 in range(0, count, COMPARED_PAIRS):
        m = to_int64(m0) + tl.arange(0, COMPARED_PAIRS)
        other_key = _load_field(items, count, m, m < count, KEY)
        is_before = (other_key[None, :] < key[:, None] + (m[None, :] < n[:, None]).to(tl.int64)) & (m < count)[None, :]
        counts += is_before.to(tl.int32)
        if reach is not None:
            end = other_key + _load_field(items, count, m, m < count, FIELD_LENGTH)
            ends = tl.maximum(ends, tl.where(is_before, end[None, :], 0))
    rank = tl.sum(counts, axis=1).to(tl.int64)
    for field in tl.static_range(FIELD_COUNT):
        tl.store(out + field * to_int64(count) + rank, _load_field(items, count, n, ok, field), mask=ok)
    if reach is not None:
        end_rows = tl.maximum(tl.max(ends, axis=1), key + _load_field(items, count, n, ok, FIELD_LENGTH))
        tl.store(reach + rank, end_rows, mask=ok)


@triton.jit
def fill_with_zeros(begin, elements, CACHE: tl.constexpr):
    """Fill `elements` elements from `begin` on with zeros."""
    zeros = tl.zeros((FILL_ELEMENTS,), begin.dtype.element_ty)
    for first in tl.range(0, elements, FILL_ELEMENTS, num_stages=1):
        offsets = first + tl.arange(0, FILL_ELEMENTS)
        tl.store(begin + offsets, zeros, mask=offsets < elements, cache_modifier=CACHE)


@triton.jit
def _fill_share(ptr, elements, n, programs, CACHE: tl.constexpr):
    """Fill the n-th of `programs` parts of an array with zeros.

    All stores write whole vectors, except for the last few elements.
    """
    elements = to_int64(elements)
    part = tl.cdiv(tl.cdiv(elements, FILL_ELEMENTS), programs) * FILL_ELEMENTS
    begin = n * part
    fill_with_zeros(ptr + begin, tl.minimum(part, elements // 16 * 16 - begin), CACHE)
    if n == 0:
        tail = elements // 16 * 16 + tl.arange(0, 16)
        tl.store(ptr + tail, tl.zeros((16,), ptr.dtype.element_ty), mask=tail < elements)


@triton.jit(do_not_specialize=["count"])
def maxsim_sort_items(items, out, reach, zeros, count, KEY: tl.constexpr):
    """Write the pairs sorted by field KEY. The sort is stable.

    Every pair is compared with every other pair. For the few thousand pairs of a batch this is faster than a sort. The
    comparisons leave the memory idle, so every second program fills a part of `zeros` if `zeros` is not None. The zeros
    of the gradient are stored with the streaming hint ``.cs``, because other data needs the L2 cache more.

    Args:
        items: Pairs `[FIELD_COUNT, count]`.
        out: Output of the same shape.
        reach: Output `[count]`, for each sorted pair the row of D after its document and all earlier documents, or
            None.
        zeros: `ZeroFillArgs` or None. With it there are at least as many additional programs.
        count: Number of pairs.
        KEY: Field to sort by.
    """
    programs = tl.cdiv(count, RANKED_PAIRS)  # sorting programs
    if zeros is None:
        _sort_pairs(items, out, reach, count, tl.program_id(0), KEY)
    else:
        block = tl.program_id(0) // 2
        if (tl.program_id(0) % 2 == 0) & (block < programs):
            _sort_pairs(items, out, reach, count, block, KEY)
        else:
            n = tl.program_id(0) - tl.minimum((tl.program_id(0) + 1) // 2, programs)
            fillers = tl.num_programs(0) - programs
            _fill_share(zeros.marks, zeros.marks_count, n, fillers, "")
            _fill_share(zeros.ptr, zeros.elements, n, fillers, ".cs")


@triton.jit
def _count_smaller(keys, x, count, rounds):
    """Return how many of `count` ascending keys are smaller than x, by a binary search of `rounds` rounds."""
    begin = tl.zeros(x.shape, tl.int32)
    end = begin + count
    for _ in range(rounds):
        middle = begin + (end - begin) // 2
        is_smaller = tl.load(keys + middle, mask=middle < end, other=0) < x
        begin = tl.where((middle < end) & is_smaller, middle + 1, begin)
        end = tl.where((middle < end) & (is_smaller == 0), middle, end)
    return begin


@triton.jit
def find_starts(keys, reach, starts, count, start_count, step, limit, rounds, block):
    """Run block number `block` of `maxsim_find_starts`."""
    t = block * PAIRS_PER_PROGRAM + tl.arange(0, PAIRS_PER_PROGRAM)
    bound = t.to(tl.int64) * step
    tl.store(starts + t, _count_smaller(keys, tl.minimum(bound, limit), count, rounds), mask=t < start_count)
    if reach is not None:
        tl.store(starts + start_count + t, _count_smaller(reach, bound + 1, count, rounds), mask=t < start_count)


@triton.jit(do_not_specialize=["count", "start_count", "step", "limit", "rounds"])
def maxsim_find_starts(keys, reach, starts, count, start_count, step, limit, rounds):
    """Find the range of sorted pairs of each tile or query.

    ``starts[t]``, for t < `start_count`, is the number of keys smaller than ``min(t * step, limit)``. If `reach` is not
    None, ``starts[start_count + t]`` is the number of elements of `reach` that are at most ``t * step``.
    """
    find_starts(keys, reach, starts, count, start_count, step, limit, rounds, tl.program_id(0))
