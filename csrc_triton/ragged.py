"""Where the queries and documents of ragged layouts lie, and whether they lie inside their tensors; their winners."""

import triton
import triton.language as tl

from .common import condition, wide


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
        length = end - begin  # wraps where they are far apart: it does not tell which is first
        valid = (begin >= 0) & (begin <= end) & (end <= Tq)
    ok = ok & valid
    # Q has fewer than 2^31 rows, and one number takes one register.
    return tl.where(ok, begin, 0).to(tl.int32), tl.where(ok, length, 0).to(tl.int32), valid


@triton.jit
def document_bounds(segments, document, ok):
    """What is stored of where a document lies: its first row, then its length or else the first row of the next; 0 of
    what is not stored.

    Nothing is made of it yet: who asks long before needing it does not wait for it.
    """
    first = 0
    other = 0
    if segments.offsets is not None:
        first = tl.load(segments.offsets + document, mask=ok, other=0)
    if segments.lengths is not None:
        other = tl.load(segments.lengths + document, mask=ok, other=0)
    elif segments.offsets is not None:
        other = tl.load(segments.offsets + document + 1, mask=ok, other=0)
    return first, other


@triton.jit
def bounded_segment(segments, bounds, document, ok, Td):
    """`document_segment` of a document whose `document_bounds` are known."""
    if segments.offsets is None:
        begin = tl.where(ok, document, 0).to(tl.int64) * segments.d_each
        length = begin * 0 + segments.d_each
    else:
        begin = bounds[0].to(tl.int64)
    if segments.lengths is not None:
        length = bounds[1].to(tl.int64)
    elif segments.offsets is not None:
        length = bounds[1].to(tl.int64) - begin
    valid = (begin >= 0) & (length >= 0) & (begin <= Td - length)
    if segments.offsets is None:
        valid = valid & (length <= segments.d_each)
    return begin, tl.where(ok & valid, length, 0).to(tl.int32), valid


@triton.jit
def document_segment(segments, document, ok, Td):
    """First row and length of a document, numbered as in `Segments.offsets`; 0 rows where it is not inside D."""
    return bounded_segment(segments, document_bounds(segments, document, ok), document, ok, Td)


@triton.jit
def pair(segments, p, ok, Nq, Nd):
    """Query and document of pair p, and whether there are such."""
    i = tl.load(segments.pairs + 2 * p, mask=ok, other=-1).to(tl.int64)
    k = tl.load(segments.pairs + 2 * p + 1, mask=ok, other=-1).to(tl.int64)
    return i, k, condition((i >= 0) & (i < Nq) & (k >= 0) & (k < Nd))


# What `maxsim_ragged_items` writes of each item, int64: the first row of its document (behind all rows where nothing
# can win) and its length, its query's rows from BEGIN to STOP, what a row's number is added to for its winner, where
# the score's gradient lies (in the cross product that of query 0), and its query (behind all where there is none).
FIRST, LENGTH, BEGIN, STOP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
WINNERS, SCORE, QUERY = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
FIELDS = tl.constexpr(7)


@triton.jit
def item_field(items, count, n, ok, FIELD: tl.constexpr):
    """A field of items n, 0 where not `ok`."""
    return tl.load(items + FIELD * wide(count) + n, mask=ok, other=0)


@triton.jit
def met_items(up, row, ok, sizes, C: tl.constexpr):
    """Of packed query rows: their query (0 where none), and the first and the number of the items that it meets."""
    i = tl.load(up.query + row, mask=ok, other=-1).to(tl.int64)
    ok = ok & (i >= 0)
    i = tl.where(ok, i, 0)
    first = i * 0
    if up.starts is not None:
        first = tl.load(up.starts + i, mask=ok, other=0).to(tl.int64)
        met = tl.load(up.starts + i + 1, mask=ok, other=0).to(tl.int64) - first
    else:
        if C.CANDIDATES:
            first = i * sizes.K
        met = tl.where(ok, first * 0 + sizes.K, 0)
    return i, first, met


@triton.jit
def most_met(up, row, ok, sizes, C: tl.constexpr):
    """The most items that any of the rows' queries meets."""
    _, _, met = met_items(up, row, ok, sizes, C)
    return tl.max(met, axis=0).to(tl.int32)


@triton.jit
def packed_winners(up, of, row, n, ok, sizes, C: tl.constexpr):
    """Of packed query rows in the n-th item that their query meets, `of` being their `met_items`: the row of D that
    won, whether one did, and the score's gradient.

    Nothing that is read decides whether something else is: the loads are on their way together.
    """
    i, first, met = of
    n = n.to(tl.int64)
    ok = ok & (n < met)
    m = first + n
    if up.starts is not None:
        ok = ok & (row < item_field(up.items, up.count, m, ok, STOP))
        won_at = item_field(up.items, up.count, m, ok, WINNERS) + row
        score_at = item_field(up.items, up.count, m, ok, SCORE)
    else:
        won_at = n * sizes.Lq + row
        score_at = i * up.stride_q + n * up.stride_k
    token = tl.load(up.argmax + won_at, mask=ok, other=-1).to(tl.int64)
    length = item_field(up.items, up.count, m, ok, LENGTH)
    begin = item_field(up.items, up.count, m, ok, FIRST)
    g = tl.load(up.grad_scores + score_at, mask=ok, other=0.0)
    won = ok & (token >= 0) & (token < length)  # no forward writes another
    # Row 0 where none won, though it is not read: without that selection Triton 3.6 does not compile the other.
    return tl.where(won, begin + token, 0), won, tl.where(won, g, 0.0)
