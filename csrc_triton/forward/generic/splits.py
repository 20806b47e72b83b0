"""Long documents in sections, each scored by a program of its own: where they lie, and what they leave together.

Documents are cut so that there are at most as many sections as the workspace holds, by lengths that the device alone
knows. A maximum over sections is that over the document, whatever they are: the bits are the same.
"""

import triton
import triton.language as tl

from ...common.primitives import NO_TOKEN, import_args_class, nan_max, to_int64, to_mask
from ...common.segments import locate_document_segment

_SCAN_BLOCK = tl.constexpr(128)  # documents or sections at a time, where all are looked at
MIN_SPLIT_TILES = 2  # tiles of a section, unless the document has fewer tokens
_MIN_SPLIT_TILES = tl.constexpr(MIN_SPLIT_TILES)
_MAX_SPLIT_TOKENS = tl.constexpr(2**31 - 256)


@triton.jit
def _count_splits(length, each):
    """Sections of a document."""
    return tl.where(length > 0, (length - 1) // each + 1, 0)


@triton.jit
def compute_split_length(segments, K, Td, cut, STEP: tl.constexpr):
    """Tokens of a section, a multiple of STEP: enough that K documents, fewer than `cut.most`, have no more sections.

    Where each document has `Segments.d_each` tokens the host knows it.
    """
    if cut.each is not None:
        each = cut.each
    else:
        total = to_int64(K) * 0
        for k0 in range(0, K, _SCAN_BLOCK):
            k = k0 + tl.arange(0, _SCAN_BLOCK)
            _, length, _ = locate_document_segment(segments, k, k < K, Td)
            total += tl.sum(length.to(tl.int64), axis=0)
        tiles = tl.maximum(tl.cdiv(tl.cdiv(total, cut.most - K), STEP), _MIN_SPLIT_TILES)
        each = tl.minimum(tiles * STEP, _MAX_SPLIT_TOKENS).to(tl.int32)
    return each


@triton.jit
def _count_block_splits(segments, k0, K, Td, each):
    """Some documents from k0 on, and their sections."""
    k = k0 + tl.arange(0, _SCAN_BLOCK)
    _, length, _ = locate_document_segment(segments, k, k < K, Td)
    return k, _count_splits(length, each)


@triton.jit
def _locate_split_document(segments, n, K, Td, cut, each):
    """The document of section n, and the first section of it; K where there is no such section."""
    if cut.each is not None:
        count = _count_splits(segments.d_each, each)
        document = tl.minimum(n // count, K)
        first = document * count
    else:
        before = tl.full((), 0, tl.int32)
        document = tl.full((), 0, tl.int32)
        first = tl.full((), 0, tl.int32)
        for k0 in range(0, K, _SCAN_BLOCK):
            k, count = _count_block_splits(segments, k0, K, Td, each)
            end = before + tl.cumsum(count, axis=0)
            passed = (end <= n) & (k < K)
            document += tl.sum(passed.to(tl.int32), axis=0)
            first = tl.maximum(first, tl.max(tl.where(passed, end, 0), axis=0))
            before += tl.sum(count, axis=0)
    return document, first


@triton.jit
def locate_split(D, segments, n, sizes, cut, C: tl.constexpr):
    """Section n as a `Document`, of no tokens where there is none; and which token of its document is its first.

    The last section of a document begins earlier where it would have fewer tokens than a tile, unless
    C.SHORT_DOCUMENTS.
    """
    Document: tl.constexpr = import_args_class("Document")
    each = compute_split_length(segments, sizes.K, sizes.Td, cut, C.BN)
    k, first = _locate_split_document(segments, n, sizes.K, sizes.Td, cut, each)
    begin, length, _ = locate_document_segment(segments, k, to_mask(k < sizes.K), sizes.Td)
    t0 = tl.where(length > 0, n - first, 0) * each
    if not C.SHORT_DOCUMENTS:
        t0 = tl.maximum(tl.minimum(t0, length - C.BN), 0)
    tokens = tl.minimum(length - t0, each)
    begin += t0
    mask = D.ptr
    if D.mask is not None:
        mask = D.mask + begin * D.mask_stride_l
    return Document(D.ptr + begin * D.stride_l, mask, begin.to(tl.int32), tokens), t0


@triton.jit
def locate_document_splits(segments, k, K, Td, cut, STEP: tl.constexpr):
    """Document k, its first section, and how many it has."""
    each = compute_split_length(segments, K, Td, cut, STEP)
    _, length, _ = locate_document_segment(segments, k, to_mask(k < K), Td)
    count = _count_splits(length, each)
    if cut.each is not None:
        first = count * k
    else:
        first = count * 0
        for k0 in range(0, k, _SCAN_BLOCK):
            other, counts = _count_block_splits(segments, k0, K, Td, each)
            first += tl.sum(tl.where(other < k, counts, 0), axis=0)
    return to_int64(k), first, count


@triton.jit
def has_kept_split(cut, place):
    """Whether one of the sections of a document, as `locate_document_splits` finds them, keeps a token."""
    _, first, count = place
    found = (count > 0).to(tl.int32)
    if cut.kept is not None:
        found = found * 0
        for n0 in range(0, count, _SCAN_BLOCK):
            n = n0 + tl.arange(0, _SCAN_BLOCK)
            found = tl.maximum(found, tl.max(tl.load(cut.kept + first + n, mask=n < count, other=0), axis=0))
    return found


@triton.jit
def merge_splits(cut, first, count, row, keep, rows, AT_ONCE: tl.constexpr):
    """Maxima of some rows over `count` sections from the first on, and the first tokens that attain them."""
    best = tl.full(row.shape, float("-inf"), tl.float32)
    where = tl.full(row.shape, NO_TOKEN, tl.int32)
    for n0 in range(0, count, AT_ONCE):
        n = n0 + tl.arange(0, AT_ONCE)
        at = (first + n)[:, None] * rows + row[None, :]  # the workspace is small: 32 bits
        there = (n < count)[:, None] & keep[None, :]
        found = tl.load(cut.maxima + at, mask=there, other=float("-inf"))
        m = tl.reduce(found, 0, nan_max)
        if cut.split_argmax is not None:
            token = tl.load(cut.split_argmax + at, mask=there, other=NO_TOKEN)
            hit = (found == m[None, :]) | (found != found)
            token = tl.min(tl.where(hit, token, NO_TOKEN), axis=0)
            better = (m > best) | ((m != m) & (best == best))
            where = tl.where(better, token, tl.where(m == best, tl.minimum(where, token), where))
        best = nan_max(best, m)
    return best, where
