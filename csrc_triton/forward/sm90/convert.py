"""FP8, code and fp32 documents in the sm_90 kernels: conversion warps, and query rows to match.

FP8 tokens are multiplied in fp16 (`formats/encoded.py`). In the dense kernel TMA copies bytes into a raw pipeline. Four
conversion warps convert each tile into the fp16 pipeline that the consumers multiply, and store the scales of its
tokens. The conversion overlaps the products of 256 query rows. Words of codes become int8 tiles (`bits.py`) in the same
way.

Eight conversion warps split fp32 tokens into one or two fp16 terms and a scale (`common/fp32.py`), which is negative
for fallback tokens. The terms lo of a stage follow C.STAGES tiles after the terms hi.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...common.fp32 import mark_fallback_scales, split_rows
from ...formats.bits import get_code_bits
from ...formats.encoded import choose_powers, divide_by_powers, find_largest, needs_power_scaling
from .bits import WORD_BITS, load_numbers
from .pipeline import advance_stage, make_row_layout

_CONVERT_TOKENS = gl.constexpr(32)  # tokens at a time: more need more registers


@triton.constexpr_function
def count_conversion_warps(C):
    """Return the number of conversion warps."""
    return 4 if C.FP32_TERMS == 0 else 8


@triton.constexpr_function
def get_conversion_registers(C):
    """Return the registers per thread of a consumer, of the producer, and of the conversion warps."""
    return [208, 40, 56] if C.FP32_TERMS == 0 else [192, 24, 48]


@gluon.jit
def load_tile_scales(numbers, k, t0, Ld, layout: gl.constexpr, C: gl.constexpr):
    """Load the scales of the tokens of a tile of document k, `[BN]`.

    The tile begins with token t0, or ends with the document if it is the last tile.
    """
    t = gl.minimum(t0, Ld - C.BN) + gl.arange(0, C.BN, layout=layout)
    pointers = numbers.scale + k.to(gl.int64) * numbers.stride_doc
    return gl.load(pointers + t.to(gl.int64) * numbers.stride_l).to(gl.float32)


@gluon.jit
def fp8_to_fp16(x, C: gl.constexpr):
    """Convert FP8 bytes to fp16."""
    if C.ENCODING == "e4m3":
        x = x.to(gl.float8e4nv, bitcast=True)
    else:
        x = x.to(gl.float8e5, bitcast=True)
    return x.to(gl.float16)


@gluon.jit
def _convert_tiles(raw, ring, numbers, begin, end, K, Ld, C: gl.constexpr):
    """Convert every tile of FP8 or of words of the raw pipeline into a tile of fp16 or int8 (conversion warps).

    Scales are loaded one tile ahead.
    """
    LAYOUT: gl.constexpr = make_row_layout(C.BD)
    TOKENS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    PARTS: gl.constexpr = C.BN // _CONVERT_TOKENS
    WORDS: gl.constexpr = _CONVERT_TOKENS * C.BD * get_code_bits(C.ENCODING) // WORD_BITS  # of a part
    stage = 0
    phase = 0
    k = begin % K
    scale = load_tile_scales(numbers, k, 0, Ld, TOKENS, C) if C.PRECOMPUTED_SCALES else 0
    for _ in range(begin, end):
        next_document = gl.where(k + 1 == K, 0, k + 1)
        for t0 in range(0, Ld, C.BN):
            is_last = t0 + C.BN >= Ld
            next_scale = 0
            if C.PRECOMPUTED_SCALES:
                t1 = gl.where(is_last, 0, t0 + C.BN)
                next_scale = load_tile_scales(numbers, gl.where(is_last, next_document, k), t1, Ld, TOKENS, C)
            mbarrier.wait(raw.full.index(stage), phase)
            mbarrier.wait(ring.empty.index(stage), phase ^ 1)
            for n in gl.static_range(PARTS):
                if get_code_bits(C.ENCODING) > 0:
                    x = load_numbers(raw.tiles.index(stage).slice(n * WORDS, WORDS, 0), False, C)
                else:
                    x = raw.tiles.index(stage).slice(n * _CONVERT_TOKENS, _CONVERT_TOKENS, 0).load(LAYOUT)
                    x = fp8_to_fp16(x, C)
                ring.tiles.index(stage).slice(n * _CONVERT_TOKENS, _CONVERT_TOKENS, 0).store(x)
            if C.PRECOMPUTED_SCALES:
                ring.norms.inverse.index(stage).store(scale)
            fence_async_shared()
            mbarrier.arrive(ring.full.index(stage), count=1)
            mbarrier.arrive(raw.empty.index(stage), count=1)
            scale = next_scale
            stage, phase = advance_stage(stage, phase, C)
        k = next_document


@triton.constexpr_function
def _count_split_tokens(TERMS):
    """Return the fp32 tokens that the conversion warps split at a time."""
    return 64 if TERMS == 1 else 32


@triton.constexpr_function
def _make_split_layout(features, TERMS):
    """Return the layout of fp32 tokens that are split at a time, `[tokens, features]`.

    With one term, 4 lanes share a token, so that few exchanges find its largest feature. Two terms have no registers
    for that, and 8 lanes share a token. A thread has four consecutive features of every 16 or 32. The order of the
    lanes avoids bank conflicts: 8 lanes read 16 bytes each, and then 16 lanes write 8 bytes each, of one to four tokens
    whose features are in different banks of the swizzled tiles.
    """
    first = 4 if TERMS == 1 else 5  # bit of the features that a thread loads next
    registers = [[0, 1], [0, 2], *([0, 1 << n] for n in range(first, features.bit_length() - 1))]
    if TERMS == 1:
        lanes, warps = [[0, 4], [0, 8], [4, 0], [2, 0], [1, 0]], [[8, 0], [16, 0], [32, 0]]
    else:
        lanes, warps = [[0, 4], [0, 8], [0, 16], [4, 0], [2, 0]], [[1, 0], [8, 0], [16, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [_count_split_tokens(TERMS), features])


@gluon.jit
def _split_tiles(raw, ring, begin, end, Ld, C: gl.constexpr):
    """Split every fp32 tile of the raw pipeline into C.FP32_TERMS fp16 tiles (conversion warps)."""
    LAYOUT: gl.constexpr = _make_split_layout(C.BD, C.FP32_TERMS)
    TOKENS: gl.constexpr = _count_split_tokens(C.FP32_TERMS)
    stage = 0
    phase = 0
    for _ in range(begin, end):
        for _ in range(0, Ld, C.BN):
            mbarrier.wait(raw.full.index(stage), phase)
            mbarrier.wait(ring.empty.index(stage), phase ^ 1)
            for n in gl.static_range(C.BN // TOKENS):
                x = raw.tiles.index(stage).slice(n * TOKENS, TOKENS, 0).load(LAYOUT)
                terms, scale, is_exact, is_zero = split_rows(x, C.FP32_TERMS)
                hi, lo = terms
                scale = mark_fallback_scales(scale, is_exact, is_zero)
                ring.tiles.index(stage).slice(n * TOKENS, TOKENS, 0).store(hi)
                if C.FP32_TERMS == 2:
                    ring.tiles.index(stage + C.STAGES).slice(n * TOKENS, TOKENS, 0).store(lo)
                ring.norms.inverse.index(stage).slice(n * TOKENS, TOKENS, 0).store(scale)
            fence_async_shared()
            mbarrier.arrive(ring.full.index(stage), count=1)
            mbarrier.arrive(raw.empty.index(stage), count=1)
            stage, phase = advance_stage(stage, phase, C)


@gluon.jit
def convert_documents(raw, ring, numbers, begin, end, sizes, C: gl.constexpr):
    """Convert every tile of the raw pipeline into the fp16 pipeline (conversion warps)."""
    if C.FP32_TERMS > 0:
        _split_tiles(raw, ring, begin, end, sizes.Ld, C)
    else:
        _convert_tiles(raw, ring, numbers, begin, end, sizes.K, sizes.Ld, C)


@gluon.jit
def convert_queries(q, layout: gl.constexpr, C: gl.constexpr):
    """Return query rows in the dtype of the product, and the factors of their maxima in `layout`.

    bf16 rows become fp16 rows divided by a power of two, and the factors are these powers. FP8 queries are divided in
    the same way. Other rows are unchanged, and the factor is 0.
    """
    powers = 0
    if needs_power_scaling(q.dtype, C.ENCODING):
        divisors = choose_powers(find_largest(q), C)
        q = divide_by_powers(q, divisors, C)
        powers = gl.convert_layout(divisors, layout)
    return q, powers
