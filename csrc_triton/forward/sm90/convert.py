"""FP8 documents in `forward_specialized`: warps that convert them to fp16, and bf16 query rows beside them.

Documents arrive in a ring of bytes. Four warps convert each tile into the ring that is multiplied, with what its tokens
count as; 256 query rows share what that takes, under their products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...formats.encoded import choose_powers, divide_by_powers, find_largest, needs_power_scaling
from .pipeline import advance_stage

CONVERTER_WARPS = gl.constexpr(4)
_CONVERT_TOKENS = gl.constexpr(32)  # tokens at a time: more take registers


@gluon.jit
def load_tile_scales(numbers, k, t0, Ld, layout: gl.constexpr, C: gl.constexpr):
    """Of the tokens of the tile of document k that begins with token t0, or ends where the document ends."""
    t = gl.minimum(t0, Ld - C.BN) + gl.arange(0, C.BN, layout=layout)
    at = numbers.scale + k.to(gl.int64) * numbers.stride_doc
    return gl.load(at + t.to(gl.int64) * numbers.stride_l)


@gluon.jit
def fp8_to_fp16(x, C: gl.constexpr):
    """Bytes of FP8."""
    if C.ENCODING == "e4m3":
        x = x.to(gl.float8e4nv, bitcast=True)
    else:
        x = x.to(gl.float8e5, bitcast=True)
    return x.to(gl.float16)


@gluon.jit
def convert_tiles(raw, ring, numbers, begin, end, K, Ld, C: gl.constexpr):
    """Fill the ring from the raw one. Scales were asked for a tile before."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C.BD, C.BD // 8], [CONVERTER_WARPS, 1], [1, 0])
    TOKENS: gl.constexpr = gl.BlockedLayout([1], [32], [CONVERTER_WARPS], [0])
    PARTS: gl.constexpr = C.BN // _CONVERT_TOKENS
    stage = 0
    phase = 0
    k = begin % K
    scale = load_tile_scales(numbers, k, 0, Ld, TOKENS, C)
    for _ in range(begin, end):
        after = gl.where(k + 1 == K, 0, k + 1)
        for t0 in range(0, Ld, C.BN):
            last = t0 + C.BN >= Ld
            ahead = load_tile_scales(numbers, gl.where(last, after, k), gl.where(last, 0, t0 + C.BN), Ld, TOKENS, C)
            mbarrier.wait(raw.full.index(stage), phase)
            mbarrier.wait(ring.empty.index(stage), phase ^ 1)
            for n in gl.static_range(PARTS):
                x = raw.tiles.index(stage).slice(n * _CONVERT_TOKENS, _CONVERT_TOKENS, 0).load(LAYOUT)
                ring.tiles.index(stage).slice(n * _CONVERT_TOKENS, _CONVERT_TOKENS, 0).store(fp8_to_fp16(x, C))
            ring.norms.inverse.index(stage).store(scale)
            fence_async_shared()
            mbarrier.arrive(ring.full.index(stage), count=1)
            mbarrier.arrive(raw.empty.index(stage), count=1)
            scale = ahead
            stage, phase = advance_stage(stage, phase, C)
        k = after


@gluon.jit
def convert_queries(q, layout: gl.constexpr, C: gl.constexpr):
    """Query rows as they are multiplied; and what their maxima are multiplied by, in a layout, else 0."""
    powers = 0
    if needs_power_scaling(q.dtype, C.ENCODING):
        over = choose_powers(find_largest(q))
        q = divide_by_powers(q, over)
        powers = gl.convert_layout(over, layout)
    return q, powers
