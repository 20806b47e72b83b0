"""Codes of 1, 2 or 4 bits, which are decoded to odd numbers while a tile of tokens is loaded.

A code c of n bits is the number ``2 c - (2^n - 1)``, such as -1 and 1 for one bit. The first feature of a byte is in
its lowest bits. `KernelConfig.ENCODING` is "bits1", "bits2" or "bits4". Query rows are two int8 terms with "bits1_half"
and, next to bf16 scales, "bits1_rotated" to "bits4_rotated", one term with "bits1_int8", and signs with "bits1_binary".

Next to int8 terms, a number is decoded times ``2^(7 - n)``, and query scales are divided by this power of two
(`get_code_factor`). A code at the top of a byte then needs one operation on four features:

```text
byte   = code << (8 - n) ^ (128 | 2^(7 - n))         # int8: 2^(7 - n) (2 code - (2^n - 1))
```

For half-precision queries, codes may also be read as words of eight features, "bitwords1" to "bitwords4". The bits of a
code become bits of the mantissa of a number whose last place is 1, and a subtraction removes the rest:

```text
word   = codes of eight features                     # n = 4: 32 bits
x      = 0b1 | code << 1 | bits of 2^10 in fp16      # 2^10 + 2 code + 1; 2^7 in bf16
number = x - (2^10 + 2^n)                            # exact
```

Two features share a register, so eight features take 14 to 17 instructions.

Encodings of int8 terms may also be read as such words, for example "bitwords1_half" and "bitwords4_rotated". Eight
features become two registers of four int8 numbers in 5 to 10 instructions.
"""

import triton
import triton.language as tl

from ..common.primitives import load_tokens


@triton.constexpr_function
def get_code_bits(stored):
    """Return the bits of a code, or 0 for other formats."""
    for prefix in ("bitwords", "bits"):
        if isinstance(stored, str) and stored.startswith(prefix):
            return int(stored[len(prefix)])
    return 0


@triton.constexpr_function
def is_rotated(stored):
    """Return whether codes belong to rotated tokens, whose scales are bf16."""
    return isinstance(stored, str) and stored.endswith("_rotated")


@triton.constexpr_function
def get_code_factor(stored):
    """Return the power of two that numbers next to int8 terms are multiplied by, 1 for other formats."""
    nbits = get_code_bits(stored)
    return 2 ** (7 - nbits) if nbits else 1


@triton.constexpr_function
def make_int8_ptx(nbits, register, output, shift):
    """Return PTX that decodes the codes of `nbits` bits that `shift` moves to the top of the bytes of a register."""
    mask = 0x01010101 * ((2**nbits - 1) << (8 - nbits))
    offset = 0x01010101 * (128 | 1 << (7 - nbits))
    shift_ptx = f"shl.b32 t, {register}, {shift};" if shift else ""
    return shift_ptx + f"lop3.b32 {output}, {'t' if shift else register}, 0x{mask:08x}, 0x{offset:08x}, 0x6a;"  # &, ^


@triton.constexpr_function
def has_sign_queries(stored):
    """Return whether the features of query rows are -1 and +1."""
    return stored in ("bits1_binary", "bitwords1_binary")


@triton.constexpr_function
def _has_int8_words(stored):
    """Return whether words of eight features are decoded to int8, for query rows of int8 terms."""
    return has_bit_words(stored) and "_" in stored


@triton.constexpr_function
def has_bit_words(stored):
    """Return whether codes are read as words of eight features."""
    return isinstance(stored, str) and stored.startswith("bitwords")


@triton.constexpr_function
def _make_decode_ptx(nbits, dtype):
    """Return PTX that decodes the word $4 to the features $0 to $3, in pairs with the first feature in the low half."""
    mask = 0x10001 * ((2**nbits - 1) << 1)
    if dtype == tl.float16:
        halves, kind = (0x6401, 0x3C00, 0xE400 + 2**nbits), "f16x2"
    else:
        halves, kind = (0x4301, 0x3F80, 0xC300 + 2**nbits), "bf16x2"
    base, one, offset = (f"0x{0x10001 * x:08x}" for x in halves)

    def decode(output, pair):
        """Decode the code at bit ``2 nbits pair`` of each half of s."""
        bit = 2 * nbits * pair
        shift_ptx = f"shr.b32 t, s, {bit - 1};" if bit else "shl.b32 t, s, 1;"
        return shift_ptx + f"lop3.b32 t, t, 0x{mask:08x}, {base}, 0xea; fma.rn.{kind} ${output}, t, one, offset;"

    # The second feature of each pair moves to the upper half of s.
    if nbits < 4:
        body = f"shl.b32 t, $4, {16 - nbits}; or.b32 s, $4, t;" + "".join(decode(i, i) for i in range(4))
    else:
        body = "shl.b32 t, $4, 12; lop3.b32 s, $4, 0x0000ffff, t, 0xea;" + decode(0, 0) + decode(1, 1)
        body += "shr.b32 s, $4, 16; shl.b32 t, s, 12; or.b32 s, s, t;" + decode(2, 0) + decode(3, 1)
    return f"{{ .reg .b32 s, t, one, offset; mov.b32 one, {one}; mov.b32 offset, {offset}; {body} }}"


@triton.jit
def widen_words(words, NBITS: tl.constexpr):
    """Return words of eight codes of NBITS bits as int32, with zeros in the upper bits."""
    unsigned: tl.constexpr = tl.uint8 if NBITS == 1 else (tl.uint16 if NBITS == 2 else tl.uint32)
    return words.to(unsigned, bitcast=True).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def split_pairs(x, dtype: tl.constexpr):
    """Return pairs of half-precision numbers in int32 `[n, m]` as numbers `[n, 2 m]`, the low half first."""
    low = x.to(tl.uint16).to(dtype, bitcast=True)
    high = (x >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return tl.reshape(tl.join(low, high), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def _decode_words(words, dtype: tl.constexpr, C: tl.constexpr):
    """Decode words `[n, m]` to features `[n, 8 m]`."""
    NBITS: tl.constexpr = get_code_bits(C.ENCODING)
    word = widen_words(words, NBITS)
    a, b, c, d = tl.inline_asm_elementwise(
        _make_decode_ptx(NBITS, dtype), "=&r,=&r,=&r,=&r,r", (word,), (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
    )
    x = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (words.shape[0], 4 * words.shape[1]))
    return split_pairs(x, dtype)


@triton.constexpr_function
def _make_decode_int8_ptx(nbits):
    """Return PTX that decodes the word $2 to the int8 features $0 and $1, four each, in their order."""
    if nbits == 4:
        # The codes of even and of odd features, which alternate in the word.
        body = make_int8_ptx(4, "$2", "s", 4) + make_int8_ptx(4, "$2", "u", 0)
        return f"{{ .reg .b32 s, t, u; {body} prmt.b32 $0, s, u, 0x5140; prmt.b32 $1, s, u, 0x7362; }}"
    body = ""
    for half in range(2):
        # Products copy codes to the top of four bytes, where the other bits do not matter.
        if nbits == 1:
            body += "shr.b32 t, $2, 4;" if half else "and.b32 t, $2, 15;"
            body += "mul.lo.u32 t, t, 0x10204080;"
        else:
            body += "shr.b32 t, $2, 8;" if half else "and.b32 t, $2, 255;"
            body += "mul.lo.u32 t, t, 0x1001; and.b32 t, t, 0x000f000f; mul.lo.u32 t, t, 0x1040;"
        body += make_int8_ptx(nbits, "t", f"${half}", 0)
    return f"{{ .reg .b32 t; {body} }}"


@triton.jit
def _decode_int8_words(words, C: tl.constexpr):
    """Decode words `[n, m]` to int8 `[n, 8 m]`, four numbers in each operation, times `get_code_factor`."""
    NBITS: tl.constexpr = get_code_bits(C.ENCODING)
    word = widen_words(words, NBITS)
    PTX: tl.constexpr = _make_decode_int8_ptx(NBITS)
    a, b = tl.inline_asm_elementwise(PTX, "=&r,=&r,r", (word,), (tl.int32, tl.int32), True, 1)
    x = tl.reshape(tl.join(a, b), (words.shape[0], 2 * words.shape[1]))
    even_features = tl.join(x.to(tl.int8), (x >> 16).to(tl.int8))
    odd_features = tl.join((x >> 8).to(tl.int8), (x >> 24).to(tl.int8))
    return tl.reshape(tl.join(even_features, odd_features), (words.shape[0], 8 * words.shape[1]))


@triton.jit
def load_code(token, n, C: tl.constexpr):
    """Load feature n of the tokens at `token`, pointers to bytes, as odd numbers in int32."""
    NBITS: tl.constexpr = get_code_bits(C.ENCODING)
    byte = tl.load(token + n * NBITS // 8).to(tl.int32)
    return ((byte >> (n * NBITS % 8)) & ((1 << NBITS) - 1)) * 2 - ((1 << NBITS) - 1)


@triton.jit
def load_bits(ptr, t, c0, d, D, dtype: tl.constexpr, C: tl.constexpr):
    """Load features from `c0` on of tokens `t` as odd numbers, in `dtype` from words, else in int8.

    Next to int8 terms, the numbers are multiplied by `get_code_factor`.
    """
    NBITS: tl.constexpr = get_code_bits(C.ENCODING)
    if has_bit_words(C.ENCODING):
        # Add a zero that the compiler cannot see, so that a thread loads one word instead of several neighboring words.
        columns = c0 // 8 + tl.arange(0, C.BD // 8) + (tl.minimum(d, 1) - 1)
        x = load_tokens(ptr, t, t >= 0, columns, d // 8, D, C.WIDE_OFFSETS)
        if _has_int8_words(C.ENCODING):
            x = _decode_int8_words(x, C)
        else:
            x = _decode_words(x, dtype, C)
    else:
        FEATURES_PER_BYTE: tl.constexpr = 8 // NBITS
        columns = c0 // FEATURES_PER_BYTE + tl.arange(0, C.BD // FEATURES_PER_BYTE)
        x = load_tokens(ptr, t, t >= 0, columns, tl.cdiv(d, FEATURES_PER_BYTE), D, C.WIDE_OFFSETS)
        x = (x[:, :, None] >> (NBITS * tl.arange(0, FEATURES_PER_BYTE))[None, None, :].to(tl.uint8)) & (
            (1 << NBITS) - 1
        )
        FACTOR: tl.constexpr = get_code_factor(C.ENCODING) if C.INT8_TERMS > 0 else 1
        x = (tl.reshape(x, (t.shape[0], C.BD)).to(tl.int8) * 2 - ((1 << NBITS) - 1)) * FACTOR
    return x
