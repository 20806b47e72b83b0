"""Splits of long documents for the packed forward kernel: where they begin, and how their results are merged.

A few long documents leave most SMs idle. The packed kernel then scores each split of a document in its own program and
stores row maxima `[max_splits, rows]`. `maxsim_row_sums` merges the splits of a document. The host knows only the
total number of tokens, so the device computes the split length from the document lengths.

```text
total = sum(length[k] for k in range(K))
split_length = BN * max(ceil(total / (max_splits - K) / BN), MIN_SPLIT_TILES)
splits of document k = ceil(length[k] / split_length)

merge, for each row:
    best, where = -inf, NO_TOKEN
    for n0 in range(0, splits of the document, AT_ONCE):
        m = max(maxima[first + n0 : first + n0 + AT_ONCE, row])
        token = min(split_argmax[...] where the maximum is m or NaN)
        if m > best or m is the first NaN: where = token
        elif m == best: where = min(where, token)
        best = nan_max(best, m)
```

Invariants:

- There are at most `max_splits` splits, because
  `sum(ceil(length[k] / split_length)) <= total / split_length + K <= max_splits`.
- Splits are numbered in document order, without gaps.
- The maximum over splits is the maximum over the document, so the bits do not depend on the split length.
"""

import triton
import triton.language as tl

from ...common.primitives import NO_TOKEN, nan_max, to_int64, to_mask
from ...common.segments import locate_document_segment, make_packed_document

_SCAN_BLOCK = tl.constexpr(128)  # documents or splits of a step, in loops over all of them
MIN_SPLIT_TILES = 2  # tiles of a split, unless the document has fewer tokens
_MIN_SPLIT_TILES = tl.constexpr(MIN_SPLIT_TILES)
_MAX_SPLIT_TOKENS = tl.constexpr(2**31 - 256)


@triton.jit
def _count_splits(length, split_tokens):
    """Return the number of splits of a document with `length` tokens."""
    return tl.where(length > 0, (length - 1) // split_tokens + 1, 0)


@triton.jit
def compute_split_length(segments, K, Td, cut, STEP: tl.constexpr):
    """Compute the number of tokens of a split, a multiple of STEP.

    The K documents, fewer than `cut.max_splits`, have at most `cut.max_splits` splits in all. The host passes
    `cut.split_tokens` if all documents have `SegmentArgs.d_each` tokens.
    """
    if cut.split_tokens is not None:
        split_tokens = cut.split_tokens
    else:
        total = to_int64(K) * 0
        for k0 in range(0, K, _SCAN_BLOCK):
            k = k0 + tl.arange(0, _SCAN_BLOCK)
            _, length, _ = locate_document_segment(segments, k, k < K, Td)
            total += tl.sum(length.to(tl.int64), axis=0)
        tiles = tl.maximum(tl.cdiv(tl.cdiv(total, cut.max_splits - K), STEP), _MIN_SPLIT_TILES)
        split_tokens = tl.minimum(tiles * STEP, _MAX_SPLIT_TOKENS).to(tl.int32)
    return split_tokens


@triton.jit
def _count_block_splits(segments, k0, K, Td, split_tokens):
    """Return the numbers of a block of documents from `k0` on, and their split counts."""
    k = k0 + tl.arange(0, _SCAN_BLOCK)
    _, length, _ = locate_document_segment(segments, k, k < K, Td)
    return k, _count_splits(length, split_tokens)


@triton.jit
def _locate_split_document(segments, n, K, Td, cut, split_tokens):
    """Return the document of split `n` and its first split. The document is K if `n` is out of range."""
    if cut.split_tokens is not None:
        count = _count_splits(segments.d_each, split_tokens)
        document = tl.minimum(n // count, K)
        first = document * count
    else:
        earlier_splits = tl.full((), 0, tl.int32)
        document = tl.full((), 0, tl.int32)
        first = tl.full((), 0, tl.int32)
        for k0 in range(0, K, _SCAN_BLOCK):
            k, count = _count_block_splits(segments, k0, K, Td, split_tokens)
            end = earlier_splits + tl.cumsum(count, axis=0)
            is_earlier = (end <= n) & (k < K)
            document += tl.sum(is_earlier.to(tl.int32), axis=0)
            first = tl.maximum(first, tl.max(tl.where(is_earlier, end, 0), axis=0))
            earlier_splits += tl.sum(count, axis=0)
    return document, first


@triton.jit
def locate_split(D, segments, n, sizes, cut, C: tl.constexpr):
    """Return split `n` as a `Document`, and its first token within its document.

    The split is empty if `n` is out of range. The last split of a document starts earlier if it would have fewer tokens
    than a tile, unless C.SHORT_DOCUMENTS.
    """
    split_tokens = compute_split_length(segments, sizes.K, sizes.Td, cut, C.BN)
    k, first = _locate_split_document(segments, n, sizes.K, sizes.Td, cut, split_tokens)
    begin, length, _ = locate_document_segment(segments, k, to_mask(k < sizes.K), sizes.Td)
    t0 = tl.where(length > 0, n - first, 0) * split_tokens
    if not C.SHORT_DOCUMENTS:
        t0 = tl.maximum(tl.minimum(t0, length - C.BN), 0)
    tokens = tl.minimum(length - t0, split_tokens)
    return make_packed_document(D, begin + t0, tokens, C), t0


@triton.jit
def locate_document_splits(segments, k, K, Td, cut, STEP: tl.constexpr):
    """Return document `k`, its first split, and its number of splits."""
    split_tokens = compute_split_length(segments, K, Td, cut, STEP)
    _, length, _ = locate_document_segment(segments, k, to_mask(k < K), Td)
    count = _count_splits(length, split_tokens)
    if cut.split_tokens is not None:
        first = count * k
    else:
        first = count * 0
        for k0 in range(0, k, _SCAN_BLOCK):
            documents, counts = _count_block_splits(segments, k0, K, Td, split_tokens)
            first += tl.sum(tl.where(documents < k, counts, 0), axis=0)
    return to_int64(k), first, count


@triton.jit
def has_kept_split(cut, document_splits):
    """Return whether a split of a document keeps a token, given the result of `locate_document_splits`."""
    _, first, count = document_splits
    has_token = (count > 0).to(tl.int32)
    if cut.kept_flags is not None:
        has_token = has_token * 0
        for n0 in range(0, count, _SCAN_BLOCK):
            n = n0 + tl.arange(0, _SCAN_BLOCK)
            has_token = tl.maximum(
                has_token, tl.max(tl.load(cut.kept_flags + first + n, mask=n < count, other=0), axis=0)
            )
    return has_token


@triton.jit
def merge_splits(cut, first, count, row, keep, rows, AT_ONCE: tl.constexpr):
    """Return the maxima of rows over `count` splits from `first` on, and the first tokens that attain them."""
    best = tl.full(row.shape, float("-inf"), tl.float32)
    where = tl.full(row.shape, NO_TOKEN, tl.int32)
    for n0 in range(0, count, AT_ONCE):
        n = n0 + tl.arange(0, AT_ONCE)
        # The workspace is small, so 32-bit offsets suffice.
        offsets = (first + n)[:, None] * rows + row[None, :]
        mask = (n < count)[:, None] & keep[None, :]
        maxima = tl.load(cut.maxima + offsets, mask=mask, other=float("-inf"))
        m = tl.reduce(maxima, 0, nan_max)
        if cut.split_argmax is not None:
            token = tl.load(cut.split_argmax + offsets, mask=mask, other=NO_TOKEN)
            hit = (maxima == m[None, :]) | (maxima != maxima)
            token = tl.min(tl.where(hit, token, NO_TOKEN), axis=0)
            is_better = (m > best) | ((m != m) & (best == best))
            where = tl.where(is_better, token, tl.where(m == best, tl.minimum(where, token), where))
        best = nan_max(best, m)
    return best, where
