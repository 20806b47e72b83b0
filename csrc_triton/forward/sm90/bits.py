"""Binary documents in the sm_90 kernels: words of 32 bits become the int8 numbers -1 and +1.

A token of 128 features is four words. TMA copies tiles of words into shared memory, and int8 tensor cores multiply the
numbers by query rows of int8 terms (`int8_terms.py`). With C.SMALL_M a consumer decodes a word in the registers that
WGMMA reads as its left operand. Otherwise conversion warps write tiles of int8 numbers (`convert.py`).

A byte permutation decodes four features at a time, because the selector of `prmt` is one hexadecimal digit per byte:

```text
digit bit 0, 1, 2:  prmt of a table whose byte n is +1 if the bit of n is set, else -1; bit 3 of the digit must be 0
digit bit 3:        the same with the word shifted by 3
```

A word takes 13 instructions, 8 of them `prmt`. The four features of a `prmt` are four bits apart, so the features of
the tiles are in another order than in the documents. `order_features` brings query rows into the same order. Sums of
integers do not depend on it.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WORD_BITS = gl.constexpr(32)
BIT_FEATURES = gl.constexpr(128)  # features of a token, all in four words
TOKEN_WORDS = gl.constexpr(4)


@triton.constexpr_function
def _make_decode_ptx():
    """Return PTX that decodes the word $8 to the numbers of eight registers, four int8 in each.

    Register `4 h + i` has the bits `16 h + i + 4 b` of the word in its bytes b. The lower halves of the tables are the
    operands $40, $72 and $104.
    """
    tables = (("$40", "0x01ff01ff"), ("$72", "0x0101ffff"), ("$104", "0x01010101"))
    body = "and.b32 m, $8, 0x77777777; shr.u32 t, $8, 3; and.b32 t, t, 0x11111111;"
    for half in range(2):
        if half:
            body += "shr.u32 m, m, 16; shr.u32 t, t, 16;"
        for i, (low, high) in enumerate(tables):
            body += f"prmt.b32 ${4 * half + i}, {low}, {high}, m;"
        body += f"prmt.b32 ${4 * half + 3}, {tables[0][0]}, {tables[0][1]}, t;"
    return "{ .reg .b32 m, t; " + body + " }"


_DECODE_PTX = gl.constexpr(_make_decode_ptx())
# One word is the operand of all 32 numbers, so only the first of 32 equal inputs is read. Tables are repeated, too.
_DECODE_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 4 * 32))


@triton.constexpr_function
def make_word_layout(words, operand):
    """Return the layout of the numbers of a tile of words, `[words, 32]`, in which a thread has all bits of a word.

    If `operand`, a thread has the words that it multiplies as the left operand of WGMMA. A quad of lanes then has the
    four words of a token, and a warp has 16 tokens. Otherwise neighboring threads have neighboring words.
    """
    bits = [[0, 1 << n] for n in range(5)]
    word_bases = [[1 << n, 0] for n in range(words.bit_length() - 1)]
    lanes, other_bases = word_bases[:5], word_bases[5:]
    if operand:
        return gl.DistributedLinearLayout(
            [*bits, other_bases[0], *other_bases[3:]], lanes, other_bases[1:3], [], [words, 32]
        )
    return gl.DistributedLinearLayout([*bits, *other_bases[2:]], lanes, other_bases[:2], [], [words, 32])


@gluon.jit
def make_tables(n, WORDS: gl.constexpr, OPERAND: gl.constexpr):
    """Return the lower halves of the tables of `prmt`, for `load_numbers` of tiles of WORDS words.

    A zero is added that the compiler cannot derive from the positive number `n`, and that it believes to differ between
    lanes. The tables then stay in registers. Otherwise ptxas copies a constant for each `prmt`.
    """
    LAYOUT: gl.constexpr = make_word_layout(WORDS, OPERAND)
    lane = gl.arange(0, WORDS, layout=gl.SliceLayout(1, LAYOUT)) % 32
    zero = gl.expand_dims(gl.minimum(lane + n, 1) - 1, 1) + gl.full([WORDS, 32], 0, gl.int32, LAYOUT)
    return zero + 0x01FF01FF, zero + 0x0101FFFF, zero - 1


@gluon.jit
def load_numbers(tile, tables, OPERAND: gl.constexpr):
    """Load a tile of words and return its numbers as int8 `[tokens, 128]`, in the order of `order_features`."""
    WORDS: gl.constexpr = tile.shape[0]
    LAYOUT: gl.constexpr = make_word_layout(WORDS, OPERAND)
    x = gl.expand_dims(tile.load(gl.SliceLayout(1, LAYOUT)), 1) + gl.full([WORDS, 32], 0, gl.int32, LAYOUT)
    operands = [x, tables[0], tables[1], tables[2]]
    x = gl.inline_asm_elementwise(_DECODE_PTX, _DECODE_CONSTRAINTS, operands, dtype=gl.int8, is_pure=True, pack=32)
    x = gl.reshape(x, (WORDS // TOKEN_WORDS, TOKEN_WORDS, 8, 4))
    if OPERAND:
        x = gl.permute(x, (0, 2, 1, 3))
    return gl.reshape(x, (WORDS // TOKEN_WORDS, BIT_FEATURES))


@gluon.jit
def load_number(token, n):
    """Load feature n of the tokens at `token`, pointers to their first words, as -1 or +1."""
    return ((gl.load(token + n // 32) >> (n % 32)) & 1) * 2 - 1


@gluon.jit
def order_features(q, OPERAND: gl.constexpr):
    """Return query rows `[n, 128]` with their features in the order of `load_numbers`."""
    x = gl.reshape(q, (q.shape[0], TOKEN_WORDS, 2, 4, 4))  # word, half, digit, bit of the digit
    if OPERAND:
        x = gl.permute(x, (0, 2, 4, 1, 3))
    else:
        x = gl.permute(x, (0, 1, 2, 4, 3))
    return gl.reshape(x, (q.shape[0], BIT_FEATURES))
