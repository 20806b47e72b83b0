"""To normalise in `forward_specialized`: warps that find the inverse norms of document tokens, and what uses them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .common import inverse_norm, ordered_sum
from .gluon_names import reinterpret
from .ring import advance

# Where norms are found: of the warps that find them and of the producer, and of the others.
NORM_REGISTERS = gl.constexpr(64)
NORM_CONSUMER_REGISTERS = gl.constexpr(224)
NORM_WARPS = gl.constexpr(3)


@gluon.jit
def _squares(x):
    """Of neighbours, added up: of bf16, a word holds two, which are fp32 numbers but for a shift."""
    if x.dtype == gl.int32:
        low = (x << 16).to(gl.float32, bitcast=True)
        high = (x & -65536).to(gl.float32, bitcast=True)
        squares = low * low + high * high
    else:
        x = x.to(gl.float32)
        squares = x * x
    return squares


@gluon.jit
def inverse_norms(tile, WARPS: gl.constexpr):
    """Of the tokens of a tile, summed as `similarities.sum_of_squares` does; a thread has whole tokens."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16 // tile.dtype.itemsize], [32, 1], [WARPS, 1], [1, 0])
    squares = _squares(tile.load(LAYOUT))
    return inverse_norm(ordered_sum(squares, squares.shape[0], squares.shape[1]))


@gluon.jit
def words(tile, C: gl.constexpr):
    """A tile of bf16 as words of two features; others as they are."""
    if tile.dtype == gl.bfloat16:
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
        tile = reinterpret(tile, gl.int32, [C.BN, C.BD // 2], LAYOUT)
    return tile


@gluon.jit
def measure(ring, begin, end, Ld, W: gl.constexpr, C: gl.constexpr):
    """A warp finds the inverse norms of the tokens of every NORM_WARPS-th tile."""
    stage = 0
    phase = 0
    turn = 0
    for _ in range(begin, end):
        for _ in range(0, Ld, C.BN):
            if turn == W:
                mbarrier.wait(ring.full.index(stage), phase)
                tile = words(ring.tiles.index(stage), C)
                inverse = ring.norms.inverse.index(stage + phase * C.STAGES)
                for n in gl.static_range(C.BN // 32):
                    found = inverse_norms(tile.slice(32 * n, 32, 0), 1)
                    inverse.slice(32 * n, 32).store(found)
                mbarrier.arrive(ring.norms.ready.index(stage), count=1)
            stage, phase = advance(stage, phase, C)
            turn = gl.where(turn == NORM_WARPS - 1, 0, turn + 1)


@gluon.jit
def scaled(S, ring, n, C: gl.constexpr):
    """Similarities over the norms of their document tokens, the n-th of the ring, if normalising."""
    if C.NORMALIZE:
        inverse = ring.norms.inverse.index(n).load(gl.SliceLayout(0, S.type.layout))
        S = S * inverse[None, :]
    return S


@gluon.jit
def row_norms(x):
    x = x.to(gl.float32)
    return inverse_norm(gl.sum(x * x, axis=1))
