"""For `forward_rows`: tokens that do not count are overwritten in shared memory with one that does.

That changes no maximum, NaN included, so that tiles are multiplied and reduced as without a mask.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .gluon_names import reinterpret
from .pipeline import advance_stage
from .schedule import compiler_barrier_value

WARP_LANES = gl.constexpr(32)


@gluon.jit
def overwrite_masked_tokens(spans, ring, ready, begin, end, K, d, W: gl.constexpr, C: gl.constexpr):
    """A warp's part, tokens 32 W to 32 W + 31 of every tile; `ready` says which tiles two such warps are done with."""
    stage = 0
    phase = 0
    lane = gl.arange(0, WARP_LANES, layout=gl.BlockedLayout([1], [WARP_LANES], [1], [0]))
    k = begin % K
    length = _load_kept_length(spans, k)
    absent = _load_masked_bits(spans, k, 0, lane, W)
    words = _load_token_words(spans, k, _load_source_token(spans, k), lane, d, C)
    source = _load_source_token(spans, (begin + 1) % K)
    for task in range(begin, end):
        k = task % K
        after = (task + 1) % K
        here_length = gl.maximum(compiler_barrier_value(length), 1)
        # Asked for a document ahead, as it comes from far away.
        length = _load_kept_length(spans, after)
        coming = _load_token_words(spans, after, source, lane, d, C), _load_masked_bits(spans, after, 0, lane, W)
        source = _load_source_token(spans, (task + 2) % K)
        for t0 in range(0, here_length, C.BN):
            tile = t0 // C.BN
            if (tile > 0) & (tile % WARP_LANES == 0):
                absent = _load_masked_bits(spans, k, tile, lane, W)
            bits = gl.sum(gl.where(lane == tile % WARP_LANES, absent, 0), axis=0)
            mbarrier.wait(ring.full.index(stage), phase)
            if bits != 0:
                _overwrite(ring, stage * (C.BN * C.BD // 64) + WARP_LANES * W, bits, words, lane, C)
                fence_async_shared()
            mbarrier.arrive(ready.index(stage), count=1)
            stage, phase = advance_stage(stage, phase, C)
        words, absent = coming


@gluon.jit
def find_kept_columns(spans, k, tile, column):
    """Whether tokens of a tile count, by their columns."""
    bits = spans.patches.bits + k.to(gl.int64) * 2 * spans.tiles + tile
    word = gl.where(column < WARP_LANES, gl.load(bits), gl.load(bits + spans.tiles))
    return (word >> (column % WARP_LANES)) & 1 == 0


@gluon.jit
def _load_kept_length(spans, k):
    """How many tokens hold all that count of document k."""
    return gl.load(spans.segments.lengths + k)


@gluon.jit
def _load_masked_bits(spans, k, tile, lane, W: gl.constexpr):
    """Which tokens of the part W do not count, as bits, of tiles from `tile` on, one a lane."""
    n = tile + lane
    return gl.load(spans.patches.bits + (k.to(gl.int64) * 2 + W) * spans.tiles + n, mask=n < spans.tiles, other=0)


@gluon.jit
def _load_source_token(spans, k):
    """The first token of document k that counts: what others are overwritten with."""
    return gl.load(spans.patches.sources + k)


@gluon.jit
def _load_token_words(spans, k, source, lane, d, C: gl.constexpr):
    """Token `source` of document k, 4 bytes a lane of each 128."""
    tokens = spans.patches.tokens.to(gl.pointer_type(gl.int32))
    row = tokens + (k.to(gl.int64) * spans.segments.d_each + source) * (d // 2) + lane
    a = gl.load(row, mask=lane < d // 2, other=0)
    b = a
    if C.BD == 128:
        b = gl.load(row + WARP_LANES, mask=WARP_LANES + lane < d // 2, other=0)
    return a, b


@gluon.jit
def _overwrite(ring, first, bits, words, lane, C: gl.constexpr):
    """Overwrite those of 32 tokens that are in `bits` with `words`.

    A tile lies in panels of lines, 128 bytes of each token; `first` is the line of the first token. Lines are made four
    at a time: for all eight there are no registers.
    """
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lines = reinterpret(ring.tiles, gl.int32, [C.STAGES * C.BN * C.BD // 64, WARP_LANES], PLAIN)
    for half in gl.static_range(2):
        a = _make_four_lines(words[0], lane, 4 * half)
        b = _make_four_lines(words[1], lane, 4 * half)
        for eight in gl.static_range(WARP_LANES // 8):
            for n in gl.static_range(4):
                _overwrite_one(lines, first, 8 * eight + 4 * half + n, bits, a[n], b[n], C)


@gluon.jit
def _overwrite_one(lines, first, n: gl.constexpr, bits, a, b, C: gl.constexpr):
    if (bits >> n) & 1 != 0:
        lines.index(first + n).store(a)
        if C.BD == 128:
            lines.index(first + C.BN + n).store(b)


@gluon.jit
def _make_four_lines(words, lane, n: gl.constexpr):
    """A token's words as they lie in its line, for tokens n to n + 3 of each 8."""
    return (
        _make_line(words, lane, n),
        _make_line(words, lane, n + 1),
        _make_line(words, lane, n + 2),
        _make_line(words, lane, n + 3),
    )


@gluon.jit
def _make_line(words, lane, n: gl.constexpr):
    """The words as they lie in the line of a token: 16 bytes that come m-th at m ^ n, n = token % 8."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
        "=r,r,r",
        [words, lane ^ (n << 2)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
