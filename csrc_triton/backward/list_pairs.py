"""What the backward of packed layouts looks up is written here: the query of each packed row, and the `items`, sorted.

Zeros of a gradient are written beside.
"""

import triton
import triton.language as tl

from ..common.primitives import wide
from ..common.segments import document_segment, pair, query_segment
from .pairs import BEGIN, FIELDS, FIRST, LENGTH, QUERY, SCORE, STOP, WINNERS

BLOCK = tl.constexpr(128)  # items, or bounds, of a program
QUERIES = tl.constexpr(16)  # of a program that writes which rows they have
RANKED, OTHERS = tl.constexpr(4), tl.constexpr(512)  # items that a program ranks, and those they are compared with
FILL = tl.constexpr(8192)  # elements set to zero at a time


@triton.jit
def _item(segments, n, ok, Nq, K, Tq, most, stride_q, stride_k, CANDIDATES: tl.constexpr):
    """Query (-1: none), document and query rows of items n, and what finds their winners and score's gradients."""
    if segments.pairs is not None:
        i, document, exists = pair(segments, n, ok, Nq, K)
        i = tl.where(exists, i, -1)
        begin, rows, _ = query_segment(segments, i, ok & exists, Tq)
        rows = tl.minimum(rows, most)
        winners = n * most - begin
        score = n * stride_q
    else:
        document = n
        i = n * 0
        begin = i.to(tl.int32)
        rows = begin + Tq
        winners = n * Tq
        score = n * stride_k
        if CANDIDATES:
            i = n // K
            begin, rows, _ = query_segment(segments, i, ok, Tq)
            winners = n % K * Tq
            score = i * stride_q + n % K * stride_k
    return i, document, begin, rows, winners, score


@triton.jit
def _write_items(segments, items, block, Nq, K, Tq, Td, count, most, stride_q, stride_k, CANDIDATES: tl.constexpr):
    n = wide(block) * BLOCK + tl.arange(0, BLOCK)
    ok = n < count
    i, document, begin, rows, winners, score = _item(segments, n, ok, Nq, K, Tq, most, stride_q, stride_k, CANDIDATES)
    first, length, _ = document_segment(segments, document, ok & (i >= 0), Td)
    some = (length > 0) & (rows > 0)
    tl.store(items + FIRST * wide(count) + n, tl.where(some, first, Td), mask=ok)
    tl.store(items + LENGTH * wide(count) + n, tl.where(some, length, 0), mask=ok)
    tl.store(items + BEGIN * wide(count) + n, begin, mask=ok)
    tl.store(items + STOP * wide(count) + n, begin + tl.where(some, rows, 0), mask=ok)
    tl.store(items + WINNERS * wide(count) + n, winners, mask=ok)
    tl.store(items + SCORE * wide(count) + n, score, mask=ok)
    tl.store(items + QUERY * wide(count) + n, tl.where(i >= 0, i, Nq), mask=ok)


@triton.jit
def _write_queries(segments, query, block, Nq, Tq):
    i = block * QUERIES + tl.arange(0, QUERIES)
    begin, rows, _ = query_segment(segments, i.to(tl.int64), i < Nq, Tq)
    s = tl.arange(0, BLOCK)
    for s0 in range(0, tl.max(rows, axis=0), BLOCK):
        of = tl.broadcast_to(i[:, None], (QUERIES, BLOCK))
        tl.store(query + (begin[:, None] + s0 + s[None, :]), of, mask=s0 + s[None, :] < rows[:, None])


@triton.jit(do_not_specialize=["Nq", "K", "Tq", "Td", "count", "most", "stride_q", "stride_k"])
def maxsim_ragged_items(
    segments, items, query, Nq, K, Tq, Td, count, most, stride_q, stride_k, CANDIDATES: tl.constexpr
):  # fmt: skip
    """Write `items` [FIELDS, count] and the query of each row into `query` [Tq], which is filled with -1.

    Bounds of queries may leave gaps and come in any order. K documents are there, or candidates of each query; `most`
    columns of winners with pairs.
    """
    blocks = tl.cdiv(count, BLOCK)
    block = tl.program_id(0)
    if block < blocks:
        _write_items(segments, items, block, Nq, K, Tq, Td, count, most, stride_q, stride_k, CANDIDATES)
    else:
        _write_queries(segments, query, block - blocks, Nq, Tq)


@triton.jit
def _field(items, count, n, ok, FIELD: tl.constexpr):
    return tl.load(items + FIELD * wide(count) + n, mask=ok, other=0)


@triton.jit
def _sort_items(items, out, reach, count, block, KEY: tl.constexpr):
    n = wide(block) * RANKED + tl.arange(0, RANKED)
    ok = n < count
    key = _field(items, count, n, ok, KEY)
    counts = tl.zeros((RANKED, OTHERS), tl.int32)
    ends = tl.zeros((RANKED, OTHERS), tl.int64)
    for m0 in range(0, count, OTHERS):
        m = wide(m0) + tl.arange(0, OTHERS)
        other = _field(items, count, m, m < count, KEY)
        before = (other[None, :] < key[:, None] + (m[None, :] < n[:, None]).to(tl.int64)) & (m < count)[None, :]
        counts += before.to(tl.int32)
        if reach is not None:
            end = other + _field(items, count, m, m < count, LENGTH)
            ends = tl.maximum(ends, tl.where(before, end[None, :], 0))
    rank = tl.sum(counts, axis=1).to(tl.int64)
    for field in tl.static_range(FIELDS):
        tl.store(out + field * wide(count) + rank, _field(items, count, n, ok, field), mask=ok)
    if reach is not None:
        behind = tl.maximum(tl.max(ends, axis=1), key + _field(items, count, n, ok, LENGTH))
        tl.store(reach + rank, behind, mask=ok)


@triton.jit
def fill_with_zeros(begin, elements, CACHE: tl.constexpr):
    zeros = tl.zeros((FILL,), begin.dtype.element_ty)
    for first in tl.range(0, elements, FILL, num_stages=1):
        offsets = first + tl.arange(0, FILL)
        tl.store(begin + offsets, zeros, mask=offsets < elements, cache_modifier=CACHE)


@triton.jit
def _share_of_zeros(ptr, elements, n, programs, CACHE: tl.constexpr):
    """The n-th of `programs` parts of as many zeros; stores of whole vectors, but for the last few elements."""
    elements = wide(elements)
    part = tl.cdiv(tl.cdiv(elements, FILL), programs) * FILL
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
    programs = tl.cdiv(count, RANKED)  # that sort
    if zeros is None:
        _sort_items(items, out, reach, count, tl.program_id(0), KEY)
    else:
        block = tl.program_id(0) // 2
        if (tl.program_id(0) % 2 == 0) & (block < programs):
            _sort_items(items, out, reach, count, block, KEY)
        else:
            n = tl.program_id(0) - tl.minimum((tl.program_id(0) + 1) // 2, programs)
            fillers = tl.num_programs(0) - programs
            _share_of_zeros(zeros.marks, zeros.places, n, fillers, "")
            _share_of_zeros(zeros.ptr, zeros.elements, n, fillers, ".cs")


@triton.jit
def _smaller(keys, x, count, rounds):
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
    t = block * BLOCK + tl.arange(0, BLOCK)
    bound = t.to(tl.int64) * step
    tl.store(starts + t, _smaller(keys, tl.minimum(bound, most), count, rounds), mask=t < places)
    if reach is not None:
        tl.store(starts + places + t, _smaller(reach, bound + 1, count, rounds), mask=t < places)


@triton.jit(do_not_specialize=["count", "places", "step", "most", "rounds"])
def maxsim_find_starts(keys, reach, starts, count, places, step, most, rounds):
    """``starts[t]``: how many keys are smaller than ``min(t * step, most)``, of `places` of t; and behind them, unless
    `reach` is None, how many of `reach` are no larger than ``t * step``."""
    find_starts(keys, reach, starts, count, places, step, most, rounds, tl.program_id(0))
