"""The forward of ragged layouts: packed queries of any length against packed documents of any length.

The tile is that of `forward`: BM // SLOT queries side by side, SLOT rows of each at a time, or one query for candidates
and pairs. Work stops at each length.
"""

import triton
import triton.language as tl

from .arguments import Document, Operands
from .common import condition, wide
from .forward import _score_rows
from .ragged import document_segment, pair, query_segment


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
def maxsim_forward_ragged(Q, D, tiles, terms, counts, segments, out, sizes, d, LEVELS: tl.constexpr, C: tl.constexpr):
    """Scores [Nq, K] or, with pairs, [P]; a program takes one document and one query or BM // SLOT of them.

    Q and D are the packed rows, with strides of 0 between queries and documents; `tiles` is a descriptor of the rows of
    D in blocks [BN, BD], `terms` those of query rows, `counts` the `Counts` of quantised tokens, or None. Winners are
    [K, Tq], or [P, most] with pairs, or None; -1 already where no query has a row. K documents are there, or candidates
    of each query. A query's rows are summed as trees of ``SLOT * 2^LEVELS`` rows, where LONG says that it may have more
    than SLOT.
    """
    GROUPS: tl.constexpr = C.BM // C.SLOT
    first, queries, document, k, ok = _place(segments, sizes.Nq, sizes.K, C)
    lane = tl.arange(0, C.BM)
    i = first + lane // C.SLOT
    begin, length, fits = _queries(segments, i, ok & (i < queries), sizes.Tq, sizes.most)
    d_begin, Ld, d_valid = document_segment(segments, document, ok, sizes.Td)
    base = D.ptr + d_begin * D.stride_l
    mask = base
    if D.mask is not None:
        mask = D.mask + d_begin * D.mask_stride_l
    if C.STORED == "":  # a descriptor has no more rows than take 32 bits
        d_begin = d_begin.to(tl.int32)
    found = Document(base, mask, d_begin, Ld)
    x = Operands(Q, D, tiles, terms, counts, d, None)
    argmax_row = k * sizes.Tq
    if segments.pairs is not None:
        argmax_row = k * sizes.most - tl.max(begin, axis=0)

    if C.LONG:
        total = tl.full((GROUPS,), 0, tl.float32)
        pending = tl.full((GROUPS, 4 if LEVELS <= 4 else 8), 0, tl.float32)
        keeps = tl.full((GROUPS,), 0, tl.int32)
        any_kept = tl.full((), 0, tl.int32)
        longest = tl.max(length, axis=0)
        for s0 in range(0, longest, C.SLOT):
            s = s0 + lane % C.SLOT
            row = begin + s
            sums, keeps_more, any_kept = _score_rows(x, row * 0, row, s < length, row, found, out.argmax, argmax_row, C)
            total, pending = carried(total, pending, sums, s0 // C.SLOT, LEVELS)
            keeps = keeps | keeps_more
        total = flushed(total, pending, tl.cdiv(longest, C.SLOT), LEVELS)
    else:
        s = lane % C.SLOT
        row = begin + s
        total, keeps, any_kept = _score_rows(x, row * 0, row, s < length, row, found, out.argmax, argmax_row, C)

    i = first + tl.arange(0, GROUPS)
    mine = i < queries
    _, _, fits = _queries(segments, i, ok & mine, sizes.Tq, sizes.most)
    score = tl.where(any_kept > 0, total, tl.where(keeps > 0, float("-inf"), 0.0))
    score = tl.where(fits & d_valid & ok, score, float("nan"))
    if segments.pairs is not None:
        tl.store(out.scores + k + 0 * i, score, mask=tl.arange(0, GROUPS) == 0)
    else:
        tl.store(out.scores + i * sizes.K + k, score, mask=mine)
