"""Tokens of residual codes, decoded where a tile of them is read: a centroid, and a weight of each feature's bucket.

`Config.STORED` is "codes1", "codes2", "codes4" or "codes8", by the bits of a bucket. The first feature of a byte is in
its highest bits, and weights are in the order of what the bits say: how a codec orders the bits of a bucket is in its
table. Sums are in fp32, rounded once to what they are multiplied as; their inverse norms are scales of `Counts`.
"""

import triton
import triton.language as tl

from .common import load_rows, load_tokens


@triton.constexpr_function
def bucket_bits(stored):
    """Of `Config.STORED`: bits of a bucket, 0 of another format."""
    return int(stored[5:]) if isinstance(stored, str) and stored.startswith("codes") else 0


@triton.jit
def _codes(counts, rows):
    """Of tokens, by their rows among all: where their centroids are, and whether there are such."""
    code = tl.load(counts.codes + rows.to(tl.int64)).to(tl.int64)
    return code, (code >= 0) & (code < counts.centroids_count)


@triton.jit
def coded_scales(scale, counts, rows):
    """Scales of tokens, NaN where a code is no centroid's."""
    _, inside = _codes(counts, rows)
    return tl.where(inside, scale, float("nan"))


@triton.jit
def load_coded(base, t, rows, c0, d, D, counts, C: tl.constexpr):
    """Features from c0 on, in fp32, of tokens `t` from `base` on, which are `rows` among all; zeros beyond d."""
    NBITS: tl.constexpr = bucket_bits(C.STORED)
    EACH: tl.constexpr = 8 // NBITS
    columns = c0 + tl.arange(0, C.BD)
    bytes = c0 // EACH + tl.arange(0, C.BD // EACH)
    buckets = load_tokens(base, t, t >= 0, bytes, tl.cdiv(d, EACH), D, C.WIDE)
    if EACH > 1:
        shifts = (8 - NBITS - NBITS * tl.arange(0, EACH)).to(tl.uint8)
        buckets = (buckets[:, :, None] >> shifts[None, None, :]) & ((1 << NBITS) - 1)
        buckets = tl.reshape(buckets, (C.BN, C.BD))
    weights = tl.load(counts.weights + buckets.to(tl.int32), mask=(columns < d)[None, :], other=0.0)
    code, inside = _codes(counts, rows)
    x = load_rows(counts.centroids + code * d, inside, columns, d, 1, C.WIDE)
    return x.to(tl.float32) + weights
