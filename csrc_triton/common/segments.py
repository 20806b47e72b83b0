"""Location of the queries and documents of packed layouts, with checks that they are inside their tensors."""

import triton
import triton.language as tl

from .primitives import import_args_class, to_mask


@triton.jit
def locate_query_segment(segments, i, ok, Tq):
    """Return the first row and the length of query i, and whether it is inside Q.

    Both are 0 if the query is not inside Q or not `ok`.
    """
    if segments.cu_seqlens_q is None:
        begin = i.to(tl.int64) * segments.q_each
        length = begin * 0 + segments.q_each
        if segments.q_lengths is not None:
            length = tl.load(segments.q_lengths + i, mask=ok, other=0).to(tl.int64)
        valid = (length >= 0) & (length <= segments.q_each)
    else:
        begin = tl.load(segments.cu_seqlens_q + i, mask=ok, other=0).to(tl.int64)
        end = tl.load(segments.cu_seqlens_q + i + 1, mask=ok, other=0).to(tl.int64)
        length = end - begin  # may overflow, so its sign does not say which is first
        valid = (begin >= 0) & (begin <= end) & (end <= Tq)
    ok = ok & valid
    # Q has fewer than 2^31 rows, and an int32 needs a single register.
    return tl.where(ok, begin, 0).to(tl.int32), tl.where(ok, length, 0).to(tl.int32), valid


@triton.jit
def load_document_bounds(segments, document, ok):
    """Load a document's stored bounds, the first row and either the length or the first row of the next document.

    A bound that is not stored is 0. No arithmetic follows here, so a caller that loads early does not wait for the
    load.
    """
    first = 0
    length_or_end = 0
    if segments.offsets is not None:
        first = tl.load(segments.offsets + document, mask=ok, other=0)
    if segments.lengths is not None:
        length_or_end = tl.load(segments.lengths + document, mask=ok, other=0)
    elif segments.offsets is not None:
        length_or_end = tl.load(segments.offsets + document + 1, mask=ok, other=0)
    return first, length_or_end


@triton.jit
def clamp_document_segment(segments, bounds, document, ok, Td):
    """Return `locate_document_segment` of a document whose bounds are already loaded."""
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
    """Return the first row and the length of a document, and whether it is inside D.

    Documents are numbered as in `SegmentArgs.offsets`. The length is 0 if the document is not inside D or not `ok`.
    """
    return clamp_document_segment(segments, load_document_bounds(segments, document, ok), document, ok, Td)


@triton.jit
def load_pair(segments, p, ok, Nq, Nd):
    """Return the query and the document of pair p, and whether both exist."""
    i = tl.load(segments.pairs + 2 * p, mask=ok, other=-1).to(tl.int64)
    k = tl.load(segments.pairs + 2 * p + 1, mask=ok, other=-1).to(tl.int64)
    return i, k, to_mask((i >= 0) & (i < Nq) & (k >= 0) & (k < Nd))


@triton.jit
def make_packed_document(D, begin, length, C: tl.constexpr):
    """Return the packed tokens from row `begin` on as a `Document`."""
    Document: tl.constexpr = import_args_class("Document")
    base = D.ptr + begin * D.stride_l
    mask = base
    if D.mask is not None:
        mask = D.mask + begin * D.mask_stride_l
    # A descriptor has fewer than 2^31 rows.
    if C.ENCODING == "":
        begin = begin.to(tl.int32)
    return Document(base, mask, begin, length)
