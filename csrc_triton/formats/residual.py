"""Residual codes, decoded while a tile of tokens is loaded.

```text
token[t] = (centroid[code[t]] + weight[bucket[t, :]]) * scale[t]
```

`KernelConfig.ENCODING` is "codes1", "codes2", "codes4", or "codes8", by the number of bits of a bucket. The first
feature of a byte is in its highest bits, and weights are ordered by the value of the bits. The codec's own bit order is
part of its table of weights. Inverse norms are passed as the scales of `CodecDequantArgs`. The multiplication by the
scale is in fp32. With half-precision queries and fp16 centroids, weights and sums are rounded to fp16 first.

For these dtypes residuals may also be stored as words of eight features, "words1" to "words4". A thread looks up the
weights of a word in registers, by byte permutation (`prmt`). The decoded values are equal to the values of bytes:

```text
load:    code[t], scale[t]                           # `load_codes`
         word[t, :], centroid pairs of code[t]       # `load_words`
decode:  weights = table[buckets of the word]        # `prmt`, eight fp16 weights of a word as four pairs
         x = fp16(centroid + weight)                 # pairs of fp16
         token = dtype(fp32(x) * scale)              # zeros beyond d
```

A code that is no centroid decodes to NaN, and no memory outside the centroids is read.
"""

import triton
import triton.language as tl

from ..common.primitives import load_rows, load_tokens
from .bits import split_pairs, widen_words


@triton.constexpr_function
def get_bucket_bits(stored):
    """Return the bits of a bucket of an encoding, or 0 for other formats."""
    return int(stored[5:]) if isinstance(stored, str) and stored.startswith(("codes", "words")) else 0


@triton.constexpr_function
def has_words(stored):
    """Return whether residuals are stored as words of eight features."""
    return isinstance(stored, str) and stored.startswith("words")


@triton.constexpr_function
def _is_fp16_sum(centroids, query):
    """Return whether weights and sums are rounded to fp16."""
    return centroids.is_fp16() and query.primitive_bitwidth == 16


@triton.constexpr_function
def _make_lookup_ptx(nbits):
    """Return PTX that looks up eight weights, as four fp16 pairs $0 to $3, for the buckets in the word $4.

    The first feature is in $0. The tables hold the low bytes ($5 and on) and then the high bytes of the weights, four
    weights in a register. The selector of `prmt` has one nibble for each byte that it picks. A `prmt` picks the bytes
    of four weights. For fewer than 4 bits the last feature is in the lowest byte. For 4 bits the two features of each
    byte are swapped. The final `prmt` instructions join low and high bytes into two pairs in feature order.
    """
    spread = {
        1: "shl.b32 t, $4, 12; or.b32 s, $4, t; and.b32 s, s, 0x000f000f; shl.b32 t, s, 6; or.b32 s, s, t;"
        "and.b32 s, s, 0x03030303; shl.b32 t, s, 3; or.b32 s, s, t; and.b32 s, s, 0x11111111;",
        2: "prmt.b32 s, $4, 0, 0x4140; shl.b32 t, s, 4; or.b32 s, s, t; and.b32 s, s, 0x0f0f0f0f; shl.b32 t, s, 2;"
        "or.b32 s, s, t; and.b32 s, s, 0x33333333;",
        4: "and.b32 s, $4, 0x77777777; shr.b32 m, $4, 3; and.b32 m, m, 0x11111111;",
    }[nbits]
    if nbits < 4:
        pick = "prmt.b32 l, $5, $5, s; prmt.b32 h, $6, $6, s;"
        join = ("0x6273", "0x4051")
    else:
        pick = "prmt.b32 k, 0xff00, 0, m;"
        for register, a, b, c, d in (("l", 5, 6, 7, 8), ("h", 9, 10, 11, 12)):
            pick += f"prmt.b32 t, ${a}, ${b}, s; prmt.b32 {register}, ${c}, ${d}, s;"
            pick += f"lop3.b32 {register}, k, {register}, t, 0xca;"  # select by the bits of k
        join = ("0x4051", "0x6273")
    halves = []
    for outputs in ((2, 3), (0, 1)) if nbits == 1 else ((0, 1), (2, 3)):
        halves += [pick + "".join(f"prmt.b32 ${o}, l, h, {order};" for o, order in zip(outputs, join, strict=True))]
    shift_ptx = "shr.b32 s, s, 16;" + ("shr.b32 m, m, 16;" if nbits == 4 else "")
    return "{ .reg .b32 s, t, m, k, l, h; " + spread + halves[0] + shift_ptx + halves[1] + " }"


@triton.constexpr_function
def _make_ptx_constraints(nbits):
    """Return the register constraints of `_make_lookup_ptx`."""
    return "=&r,=&r,=&r,=&r,r" + ",r" * (8 if nbits == 4 else 2)


@triton.constexpr_function
def _make_token_ptx(dtype):
    """Return PTX that computes fp16 pairs ($1 + $2) times $3 in fp32, rounded to a pair of `dtype`."""
    return (
        "{ .reg .b32 t; .reg .b16 a, b; .reg .f32 x, y; add.rn.f16x2 t, $1, $2; mov.b32 {a, b}, t;"
        "cvt.f32.f16 x, a; cvt.f32.f16 y, b; mul.rn.f32 x, x, $3; mul.rn.f32 y, y, $3;"
        f"cvt.rn.{'f16x2' if dtype == tl.float16 else 'bf16x2'}.f32 $0, y, x; }}"
    )


@triton.jit
def _load_weight_byte(weights, at, high):
    """Load the low or high byte of a weight as fp16."""
    bits = tl.load(weights + at).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return (bits >> (8 * high)) & 255


@triton.jit
def _load_weight_bytes(weights, at, high, COUNT: tl.constexpr):
    """Load the low or high bytes of COUNT weights, 2 or 4, into one register."""
    word = _load_weight_byte(weights, at, high) | (_load_weight_byte(weights, at + 1, high) << 8)
    if COUNT > 2:
        word |= (_load_weight_byte(weights, at + 2, high) << 16) | (_load_weight_byte(weights, at + 3, high) << 24)
    return word.to(tl.int32)


@triton.jit
def load_lookup_tables(counts, C: tl.constexpr):
    """Load the weights in the form that `_make_lookup_ptx` reads, once for each program."""
    w = counts.weights
    if get_bucket_bits(C.ENCODING) == 4:
        tables = (
            _load_weight_bytes(w, 0, 0, 4), _load_weight_bytes(w, 4, 0, 4), _load_weight_bytes(w, 8, 0, 4),
            _load_weight_bytes(w, 12, 0, 4), _load_weight_bytes(w, 0, 1, 4), _load_weight_bytes(w, 4, 1, 4),
            _load_weight_bytes(w, 8, 1, 4), _load_weight_bytes(w, 12, 1, 4),
        )  # fmt: skip
    else:
        COUNT: tl.constexpr = 2 * get_bucket_bits(C.ENCODING)
        tables = _load_weight_bytes(w, 0, 0, COUNT), _load_weight_bytes(w, 0, 1, COUNT)  # type: ignore[assignment]
    return tables


@triton.jit
def load_codes(counts, row, t):
    """Load the codes and scales of tokens `row + t`.

    A code that is no centroid loads as 0 with a NaN scale.
    """
    code = tl.load(counts.codes + row + t)
    scale = tl.load(counts.scale + row * counts.scale_stride + t * counts.scale_stride)
    unsigned: tl.constexpr = tl.uint32 if code.dtype.primitive_bitwidth == 32 else tl.uint64
    is_centroid = code.to(unsigned, bitcast=True) < counts.centroids_count.to(unsigned)
    return tl.where(is_centroid, code, 0), tl.where(is_centroid, scale, float("nan"))


@triton.jit
def load_words(base, t, code, c0, d, D, counts, WIDTH: tl.constexpr, C: tl.constexpr):
    """Load WIDTH features of tokens from `c0` on: words, and feature pairs of their centroids."""
    row = code.to(tl.uint32).to(tl.uint64) * (d // 2).to(tl.uint32).to(tl.uint64)
    centroids = counts.centroids.to(tl.pointer_type(tl.int32), bitcast=True) + row
    offsets = t * D.stride_l
    if C.WIDE_OFFSETS > 0:
        offsets = t.to(tl.int64) * D.stride_l
    # Add a zero that the compiler cannot see. A thread then loads one word instead of several neighboring words. The
    # features of one word match one vector load of the centroid.
    columns = c0 // 8 + tl.arange(0, WIDTH // 8) + (tl.minimum(d, 1) - 1)
    pairs = c0 // 2 + tl.arange(0, WIDTH // 2)
    if C.EVEN_D:
        words = tl.load(base + offsets[:, None] + columns[None, :])
        x = tl.load(centroids[:, None] + pairs[None, :])
    else:
        words = tl.load(base + offsets[:, None] + columns[None, :], mask=(columns < d // 8)[None, :], other=0)
        x = tl.load(centroids[:, None] + pairs[None, :], mask=(pairs < d // 2)[None, :], other=0)
    return words, x


@triton.jit
def decode_tokens(words, centroids, scale, c0, d, tables, dtype: tl.constexpr, C: tl.constexpr):
    """Decode the results of `load_words` to features in `dtype`, fp16 or bf16, with zeros beyond d."""
    NBITS: tl.constexpr = get_bucket_bits(C.ENCODING)
    args = (widen_words(words, NBITS),) + tables  # noqa: RUF005  # Triton unpacks no tuples
    w0, w1, w2, w3 = tl.inline_asm_elementwise(
        _make_lookup_ptx(NBITS), _make_ptx_constraints(NBITS), args, (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
    )
    weights = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), centroids.shape)
    if not C.EVEN_D:
        pairs = c0 // 2 + tl.arange(0, centroids.shape[1])
        weights = tl.where((pairs < d // 2)[None, :], weights, 0)
    x = tl.inline_asm_elementwise(
        _make_token_ptx(dtype), "=r,r,r,r", (centroids, weights, scale[:, None]), tl.int32, True, 1
    )
    return split_pairs(x, dtype)


@triton.jit
def join_columns(a, b):
    """Join two tensors `[n, m]` into `[n, 2 m]` without exchanges between threads."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def load_decoded_tokens(base, t, row, c0, d, D, counts, dtype: tl.constexpr, C: tl.constexpr):
    """Load and decode features from `c0` on of tokens `row + t`, with zeros beyond d.

    The features are multiplied by their scales, in fp32 or in the query dtype `dtype`. A code that is no centroid
    decodes to NaN.
    """
    code, scale = load_codes(counts, row, t)
    if has_words(C.ENCODING):
        # Two halves: a thread loads a word of each half and computes the address of a row once.
        HALF: tl.constexpr = C.BD // 2
        words, x = load_words(base, t, code, c0, d, D, counts, HALF, C)
        more_words, y = load_words(base, t, code, c0 + HALF, d, D, counts, HALF, C)
        x = decode_tokens(words, x, scale, c0, d, counts.weights, dtype, C)
        x = join_columns(x, decode_tokens(more_words, y, scale, c0 + HALF, d, counts.weights, dtype, C))
    else:
        NBITS: tl.constexpr = get_bucket_bits(C.ENCODING)
        FEATURES_PER_BYTE: tl.constexpr = 8 // NBITS
        columns = c0 + tl.arange(0, C.BD)
        bytes = c0 // FEATURES_PER_BYTE + tl.arange(0, C.BD // FEATURES_PER_BYTE)
        buckets = load_tokens(base, t, t >= 0, bytes, tl.cdiv(d, FEATURES_PER_BYTE), D, C.WIDE_OFFSETS)
        if FEATURES_PER_BYTE > 1:
            shifts = (8 - NBITS - NBITS * tl.arange(0, FEATURES_PER_BYTE)).to(tl.uint8)
            buckets = (buckets[:, :, None] >> shifts[None, None, :]) & ((1 << NBITS) - 1)
            buckets = tl.reshape(buckets, (t.shape[0], C.BD))
        weights = tl.load(counts.weights + buckets.to(tl.int32), mask=(columns < d)[None, :], other=0.0)
        ok = code < counts.centroids_count  # false if there are no centroids
        x = load_rows(counts.centroids + code.to(tl.int64) * d, ok, columns, d, 1, C.WIDE_OFFSETS)
        if _is_fp16_sum(counts.centroids.dtype.element_ty, dtype):
            x = (x.to(tl.float32) + weights.to(tl.float16).to(tl.float32)).to(tl.float16).to(tl.float32)
        else:
            x = x.to(tl.float32) + weights
        x = x * scale[:, None]
    return x
