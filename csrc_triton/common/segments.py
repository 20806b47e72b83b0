"""Where the queries and documents of ragged layouts lie, and whether they lie inside their tensors."""

import triton
import triton.language as tl

from .primitives import to_mask


@triton.jit
def locate_query_segment(segments, i, ok, Tq):
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
def load_document_bounds(segments, document, ok):
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
def clamp_document_segment(segments, bounds, document, ok, Td):
    """`locate_document_segment` of a document whose `load_document_bounds` are known."""
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
def locate_document_segment(segments, document, ok, Td):
    """First row and length of a document, numbered as in `Segments.offsets`; 0 rows where it is not inside D."""
    return clamp_document_segment(segments, load_document_bounds(segments, document, ok), document, ok, Td)


@triton.jit
def load_pair(segments, p, ok, Nq, Nd):
    """Query and document of pair p, and whether there are such."""
    i = tl.load(segments.pairs + 2 * p, mask=ok, other=-1).to(tl.int64)
    k = tl.load(segments.pairs + 2 * p + 1, mask=ok, other=-1).to(tl.int64)
    return i, k, to_mask((i >= 0) & (i < Nq) & (k >= 0) & (k < Nd))
