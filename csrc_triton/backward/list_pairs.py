"""What the backward of packed layouts looks up is written here: the query of each packed row, and the `items`, sorted.

Zeros of a gradient are written beside.
"""

import triton
import triton.language as tl

from ..common.primitives import to_int64
from ..common.segments import load_pair, locate_document_segment, locate_query_segment
from .pairs import (
    FIELD_ARGMAX,
    FIELD_BEGIN,
    FIELD_COUNT,
    FIELD_FIRST,
    FIELD_LENGTH,
    FIELD_QUERY,
    FIELD_SCORE,
    FIELD_STOP,
)

PAIRS_PER_PROGRAM = tl.constexpr(128)  # items, or bounds, of a program
QUERIES_PER_PROGRAM = tl.constexpr(16)  # of a program that writes which rows they have
RANKED_PAIRS, COMPARED_PAIRS = (
    tl.constexpr(4),
    tl.constexpr(512),
)  # items that a program ranks, and those they are compared with
FILL_ELEMENTS = tl.constexpr(8192)  # elements set to zero at a time


@triton.jit
def _describe_pair(segments, n, ok, Nq, K, Tq, most, stride_q, stride_k, CANDIDATES: tl.constexpr):
    """Query (-1: none), document and query rows of items n, and what finds their winners and score's gradients."""
    if segments.pairs is not None:
        i, document, exists = load_pair(segments, n, ok, Nq, K)
        i = tl.where(exists, i, -1)
        begin, rows, _ = locate_query_segment(segments, i, ok & exists, Tq)
        rows = tl.minimum(rows, most)
        argmax = n * most - begin
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
def _write_pairs(segments, items, block, Nq, K, Tq, Td, count, most, stride_q, stride_k, CANDIDATES: tl.constexpr):
    n = to_int64(block) * PAIRS_PER_PROGRAM + tl.arange(0, PAIRS_PER_PROGRAM)
    ok = n < count
    i, document, begin, rows, argmax, score = _describe_pair(
        segments, n, ok, Nq, K, Tq, most, stride_q, stride_k, CANDIDATES
    )
    first, length, _ = locate_document_segment(segments, document, ok & (i >= 0), Td)
    some = (length > 0) & (rows > 0)
    tl.store(items + FIELD_FIRST * to_int64(count) + n, tl.where(some, first, Td), mask=ok)
    tl.store(items + FIELD_LENGTH * to_int64(count) + n, tl.where(some, length, 0), mask=ok)
    tl.store(items + FIELD_BEGIN * to_int64(count) + n, begin, mask=ok)
    tl.store(items + FIELD_STOP * to_int64(count) + n, begin + tl.where(some, rows, 0), mask=ok)
    tl.store(items + FIELD_ARGMAX * to_int64(count) + n, argmax, mask=ok)
    tl.store(items + FIELD_SCORE * to_int64(count) + n, score, mask=ok)
    tl.store(items + FIELD_QUERY * to_int64(count) + n, tl.where(i >= 0, i, Nq), mask=ok)


@triton.jit
def _write_queries(segments, query, block, Nq, Tq):
    i = block * QUERIES_PER_PROGRAM + tl.arange(0, QUERIES_PER_PROGRAM)
    begin, rows, _ = locate_query_segment(segments, i.to(tl.int64), i < Nq, Tq)
    s = tl.arange(0, PAIRS_PER_PROGRAM)
    for s0 in range(0, tl.max(rows, axis=0), PAIRS_PER_PROGRAM):
        of = tl.broadcast_to(i[:, None], (QUERIES_PER_PROGRAM, PAIRS_PER_PROGRAM))
        tl.store(query + (begin[:, None] + s0 + s[None, :]), of, mask=s0 + s[None, :] < rows[:, None])


@triton.jit(do_not_specialize=["Nq", "K", "Tq", "Td", "count", "most", "stride_q", "stride_k"])
def maxsim_ragged_items(
    segments, items, query, Nq, K, Tq, Td, count, most, stride_q, stride_k, CANDIDATES: tl.constexpr
):  # fmt: skip
    """Write `items` [FIELDS, count] and the query of each row into `query` [Tq], which is filled with -1.

    Bounds of queries may leave gaps and come in any order. K documents are there, or candidates of each query; `most`
    columns of winners with pairs.
    """
    blocks = tl.cdiv(count, PAIRS_PER_PROGRAM)
    block = tl.program_id(0)
    if block < blocks:
        _write_pairs(segments, items, block, Nq, K, Tq, Td, count, most, stride_q, stride_k, CANDIDATES)
    else:
        _write_queries(segments, query, block - blocks, Nq, Tq)


@triton.jit
def _load_field(items, count, n, ok, FIELD: tl.constexpr):
    return tl.load(items + FIELD * to_int64(count) + n, mask=ok, other=0)


@triton.jit
def _sort_pairs(items, out, reach, count, block, KEY: tl.constexpr):
    n = to_int64(block) * RANKED_PAIRS + tl.arange(0, RANKED_PAIRS)
    ok = n < count
    key = _load_field(items, count, n, ok, KEY)
    counts = tl.zeros((RANKED_PAIRS, COMPARED_PAIRS), tl.int32)
    ends = tl.zeros((RANKED_PAIRS, COMPARED_PAIRS), tl.int64)
    for m0 in range(0, count, COMPARED_PAIRS):
        m = to_int64(m0) + tl.arange(0, COMPARED_PAIRS)
        other = _load_field(items, count, m, m < count, KEY)
        before = (other[None, :] < key[:, None] + (m[None, :] < n[:, None]).to(tl.int64)) & (m < count)[None, :]
        counts += before.to(tl.int32)
        if reach is not None:
            end = other + _load_field(items, count, m, m < count, FIELD_LENGTH)
            ends = tl.maximum(ends, tl.where(before, end[None, :], 0))
    rank = tl.sum(counts, axis=1).to(tl.int64)
    for field in tl.static_range(FIELD_COUNT):
        tl.store(out + field * to_int64(count) + rank, _load_field(items, count, n, ok, field), mask=ok)
    if reach is not None:
        behind = tl.maximum(tl.max(ends, axis=1), key + _load_field(items, count, n, ok, FIELD_LENGTH))
        tl.store(reach + rank, behind, mask=ok)


@triton.jit
def fill_with_zeros(begin, elements, CACHE: tl.constexpr):
    zeros = tl.zeros((FILL_ELEMENTS,), begin.dtype.element_ty)
    for first in tl.range(0, elements, FILL_ELEMENTS, num_stages=1):
        offsets = first + tl.arange(0, FILL_ELEMENTS)
        tl.store(begin + offsets, zeros, mask=offsets < elements, cache_modifier=CACHE)


@triton.jit
def _fill_share(ptr, elements, n, programs, CACHE: tl.constexpr):
    """The n-th of `programs` parts of as many zeros; stores of whole vectors, but for the last few elements."""
    elements = to_int64(elements)
    part = tl.cdiv(tl.cdiv(elements, FILL_ELEMENTS), programs) * FILL_ELEMENTS
    begin = n * part
    fill_with_zeros(ptr + begin, tl.minimum(part, elements // 16 * 16 - begin), CACHE)
    if n == 0:
        last = elements // 16 * 16 + tl.arange(0, 16)
        tl.store(ptr + last, tl.zeros((16,), ptr.dtype.element_ty), mask=last < elements)


@triton.jit(do_not_specialize=["count"])
def maxsim_sort_items(items, out, reach, zeros, count, KEY: tl.constexpr):
    """Write the items sorted by field KEY, equal ones in their order; and unless `reach` is None, for each of them the
    row of D behind its document and all documents before.

    Every item is compared with every other: for the few thousand items of a batch, that is quicker than to sort. Which
    leaves the memory idle: unless `zeros` is None, every second program, of at least as many, writes a part of
    them; not to stay in the L2 cache, which others need more.
    """
    programs = tl.cdiv(count, RANKED_PAIRS)  # that sort
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
    """How many of `count` ascending keys are smaller than x: a binary search of `rounds` rounds."""
    begin = tl.zeros(x.shape, tl.int32)
    end = begin + count
    for _ in range(rounds):
        middle = begin + (end - begin) // 2
        smaller = tl.load(keys + middle, mask=middle < end, other=0) < x
        begin = tl.where((middle < end) & smaller, middle + 1, begin)
        end = tl.where((middle < end) & (smaller == 0), middle, end)
    return begin


@triton.jit
def find_starts(keys, reach, starts, count, places, step, most, rounds, block):
    """What block number `block` of `maxsim_find_starts` does."""
    t = block * PAIRS_PER_PROGRAM + tl.arange(0, PAIRS_PER_PROGRAM)
    bound = t.to(tl.int64) * step
    tl.store(starts + t, _count_smaller(keys, tl.minimum(bound, most), count, rounds), mask=t < places)
    if reach is not None:
        tl.store(starts + places + t, _count_smaller(reach, bound + 1, count, rounds), mask=t < places)


@triton.jit(do_not_specialize=["count", "places", "step", "most", "rounds"])
def maxsim_find_starts(keys, reach, starts, count, places, step, most, rounds):
    """``starts[t]``: how many keys are smaller than ``min(t * step, most)``, of `locate_hit_tokens` of t; and behind
    them, unless `reach` is None, how many of `reach` are no larger than ``t * step``."""
    find_starts(keys, reach, starts, count, places, step, most, rounds, tl.program_id(0))
