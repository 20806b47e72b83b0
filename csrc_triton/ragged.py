"""Where the queries and documents of ragged layouts lie, and whether they lie inside their tensors; their winners."""

import triton
import triton.language as tl


@triton.jit
def query_segment(segments, i, ok, Tq):
    """First row and length of query i, and whether it is inside Q; 0 and 0 rows where it is not, or not `ok`."""
    if segments.cu_seqlens_q is None:
        begin = i.to(tl.int64) * segments.q_each
        length = begin * 0 + segments.q_each
        if segments.q_lengths is not None:
            length = tl.load(segments.q_lengths + i, mask=ok, other=0).to(tl.int64)
        valid = (length >= 0) & (length <= segments.q_each)
    else:
        begin = tl.load(segments.cu_seqlens_q + i, mask=ok, other=0).to(tl.int64)
        end = tl.load(segments.cu_seqlens_q + i + 1, mask=ok, other=0).to(tl.int64)
        length = end - begin
        valid = (begin >= 0) & (length >= 0) & (end <= Tq)
    ok = ok & valid
    # Q has fewer than 2^31 rows, and one number takes one register.
    return tl.where(ok, begin, 0).to(tl.int32), tl.where(ok, length, 0).to(tl.int32), valid


@triton.jit
def document_segment(segments, document, ok, Td):
    """First row and length of a document, numbered as in `Segments.offsets`; 0 rows where it is not inside D."""
    if segments.offsets is None:
        begin = tl.where(ok, document, 0).to(tl.int64) * segments.d_each
        length = begin * 0 + segments.d_each
    else:
        begin = tl.load(segments.offsets + document, mask=ok, other=0).to(tl.int64)
    if segments.lengths is not None:
        length = tl.load(segments.lengths + document, mask=ok, other=0).to(tl.int64)
    elif segments.offsets is not None:
        length = tl.load(segments.offsets + document + 1, mask=ok, other=0).to(tl.int64) - begin
    valid = (begin >= 0) & (length >= 0) & (begin <= Td - length)
    if segments.offsets is None:
        valid = valid & (length <= segments.d_each)
    return begin, tl.where(ok & valid, length, 0).to(tl.int32), valid


@triton.jit
def pair(segments, p, ok, Nq, Nd):
    """Query and document of pair p, and whether there are such."""
    i = tl.load(segments.pairs + 2 * p, mask=ok, other=-1).to(tl.int64)
    k = tl.load(segments.pairs + 2 * p + 1, mask=ok, other=-1).to(tl.int64)
    return i, k, (i >= 0) & (i < Nq) & (k >= 0) & (k < Nd)


@triton.jit
def packed_winners(up, i, row, n, ok, sizes, C: tl.constexpr):
    """Of packed query rows in the n-th document that their query i (-1: none) meets: the row of D that won, whether one
    did, and the score's gradient."""
    n = n.to(tl.int64)
    i = i.to(tl.int64)
    ok = ok & (i >= 0)
    if up.pairs is not None:
        column = row - tl.load(up.cu_seqlens_q + i, mask=ok, other=0)
        ok = ok & (column >= 0) & (column < up.most)
        n += tl.load(up.starts + i, mask=ok, other=0)
        ok = ok & (n < tl.load(up.starts + i + 1, mask=ok, other=0))
        p = tl.load(up.order + n, mask=ok, other=0).to(tl.int64)
        won_at = p * up.most + column
        pair_at = p * up.stride_q
        document = tl.load(up.pairs + 2 * p + 1, mask=ok, other=0).to(tl.int64)
    else:
        ok = ok & (n < sizes.K)
        won_at = n * sizes.Lq + row
        pair_at = i * up.stride_q + n * up.stride_k
        document = n
        if C.CANDIDATES:
            document += i * sizes.K
    token = tl.load(up.argmax + won_at, mask=ok, other=-1).to(tl.int64)
    won = ok & (token >= 0)
    won = won & (token < tl.load(up.lengths + document, mask=won, other=0))  # no forward writes another
    token += tl.load(up.offsets + document, mask=won, other=0).to(tl.int64)
    won = won & (token >= 0) & (token < sizes.Ld)
    return token, won, tl.load(up.grad_scores + pair_at, mask=won, other=0.0)


@triton.jit
def most_met(up, i, ok, sizes):
    """The most documents that any of the queries i meets."""
    if up.pairs is not None:
        i = i.to(tl.int64)
        ok = ok & (i >= 0)
        count = tl.load(up.starts + i + 1, mask=ok, other=0) - tl.load(up.starts + i, mask=ok, other=0)
        met = tl.max(count, axis=0).to(tl.int32)
    else:
        met = sizes.K
    return met


@triton.jit
def packed_entry(up, e, ok, sizes):
    """Of winner number e: the packed query row that it is of, and where the score's gradient lies."""
    e = e.to(tl.int64)
    if up.pairs is not None:
        p = e // up.most
        i = tl.load(up.pairs + 2 * p, mask=ok, other=0).to(tl.int64)
        row = tl.load(up.cu_seqlens_q + i, mask=ok, other=0).to(tl.int64) + e % up.most
        pair_at = p * up.stride_q
    else:
        row = e % sizes.Lq
        pair_at = tl.load(up.query + row, mask=ok, other=0).to(tl.int64) * up.stride_q + e // sizes.Lq * up.stride_k
    return row, pair_at
