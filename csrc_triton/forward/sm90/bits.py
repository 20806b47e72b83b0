"""Codes of odd numbers in the sm_90 kernels: words of 32 bits become int8 numbers (`formats/bits.py`).

A token of 128 features and codes of n bits is 4 n words. TMA copies tiles of words into shared memory, and int8 tensor
cores multiply the numbers by query rows of int8 terms (`int8_terms.py`). With C.SMALL_M a consumer decodes words in the
registers that WGMMA reads as its left operand. Otherwise conversion warps write tiles of int8 numbers (`convert.py`).

A thread has n consecutive words of a token, 32 features. A shift brings a code of each byte to its top, and one more
instruction makes these four codes int8:

```text
for j in range(8 / n):
    register[j] = word << (8 - n - n j) & mask ^ offset      # features j, j + 8 / n, ... of the word
```

The four features of a register are 8 / n apart, so the features of the tiles are in another order than in the
documents. `order_features` brings query rows into the same order. Sums of integers do not depend on it.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...formats.bits import get_code_bits, make_int8_ptx

WORD_BITS = gl.constexpr(32)
CODE_FEATURES = gl.constexpr(128)  # features of a token


@triton.constexpr_function
def _make_decode_ptx(nbits):
    """Return PTX that decodes a word to the numbers of 8 / `nbits` registers, four int8 in each."""
    count = 8 // nbits
    body = " ".join(make_int8_ptx(nbits, f"${count}", f"${j}", 8 - nbits - nbits * j) for j in range(count))
    return "{ .reg .b32 t; " + body + " }"


@triton.constexpr_function
def _make_decode_constraints(nbits):
    """Return the constraints of `_make_decode_ptx`. A word is the operand of all of its numbers, the first is read."""
    return ",".join(["=&r"] * (8 // nbits) + ["r"] * (32 // nbits))


@triton.constexpr_function
def make_word_layout(words, nbits, operand):
    """Return the layout of the numbers of a tile of words, `[words, 32 / nbits]`.

    A thread has all codes of `nbits` consecutive words. If `operand`, a thread has the words that it multiplies as the
    left operand of WGMMA. A quad of lanes then has the words of a token, and a warp has 16 tokens. Otherwise
    neighboring threads have neighboring words.
    """
    codes = [[0, 1 << n] for n in range((32 // nbits).bit_length() - 1)]
    word_bases = [[1 << n, 0] for n in range(words.bit_length() - 1)]
    n = nbits.bit_length() - 1
    own, lanes, others = word_bases[:n], word_bases[n : n + 5], word_bases[n + 5 :]
    first = 1 if operand else 0
    registers = [*codes, *own, *others[:first], *others[first + 2 :]]
    return gl.DistributedLinearLayout(registers, lanes, others[first : first + 2], [], [words, 32 // nbits])


@gluon.jit
def load_numbers(tile, OPERAND: gl.constexpr, C: gl.constexpr):
    """Load a tile of words and return its numbers as int8 `[tokens, 128]`, in the order of `order_features`."""
    WORDS: gl.constexpr = tile.shape[0]
    NBITS: gl.constexpr = get_code_bits(C.ENCODING)
    LAYOUT: gl.constexpr = make_word_layout(WORDS, NBITS, OPERAND)
    TOKENS: gl.constexpr = WORDS // (4 * NBITS)
    PTX: gl.constexpr = _make_decode_ptx(NBITS)
    CONSTRAINTS: gl.constexpr = _make_decode_constraints(NBITS)
    x = gl.expand_dims(tile.load(gl.SliceLayout(1, LAYOUT)), 1) + gl.full([WORDS, 32 // NBITS], 0, gl.int32, LAYOUT)
    x = gl.inline_asm_elementwise(PTX, CONSTRAINTS, [x], dtype=gl.int8, is_pure=True, pack=32 // NBITS)
    x = gl.reshape(x, (TOKENS, 4, 8, 4))  # thread, its registers, bytes
    if OPERAND:
        x = gl.permute(x, (0, 2, 1, 3))
    return gl.reshape(x, (TOKENS, CODE_FEATURES))


@gluon.jit
def load_number(token, n, C: gl.constexpr):
    """Load feature n of the tokens at `token`, pointers to their first words, as an odd number."""
    NBITS: gl.constexpr = get_code_bits(C.ENCODING)
    code = (gl.load(token + n * NBITS // 32) >> (n * NBITS % 32)) & ((1 << NBITS) - 1)
    return code * 2 - ((1 << NBITS) - 1)


@gluon.jit
def order_features(q, OPERAND: gl.constexpr, C: gl.constexpr):
    """Return query rows `[n, 128]` with their features in the order of `load_numbers`."""
    NBITS: gl.constexpr = get_code_bits(C.ENCODING)
    x = gl.reshape(q, (q.shape[0], 4, NBITS, 4, 8 // NBITS))  # thread, word, byte, code of the byte
    if OPERAND:
        x = gl.permute(x, (0, 2, 4, 1, 3))
    else:
        x = gl.permute(x, (0, 1, 2, 4, 3))
    return gl.reshape(x, (q.shape[0], CODE_FEATURES))
