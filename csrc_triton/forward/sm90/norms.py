"""To normalise in `forward_specialized`: warps that find the inverse norms of document tokens, and what uses them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...common.primitives import compute_inverse_norm, sum_in_order
from .gluon_names import reinterpret
from .pipeline import advance_stage

# Where norms are found: of the warps that find them and of the producer, and of the others.
NORM_REGISTERS = gl.constexpr(56)
NORM_PRODUCER_REGISTERS = gl.constexpr(40)
NORM_CONSUMER_REGISTERS = gl.constexpr(208)
NORM_WARPS = gl.constexpr(4)


@gluon.jit
def _sum_neighbor_squares(x):
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
def compute_tile_inverse_norms(tile, WARPS: gl.constexpr, C: gl.constexpr):
    """Of the tokens of a tile, summed as `similarities.sum_tile_squares` does; a thread has whole tokens.

    A loop over the panels of 64 features that a tile lies in: code that runs once a tile has to be short.
    """
    PANELS: gl.constexpr = C.BD // 64
    WORDS: gl.constexpr = tile.dtype == gl.bfloat16  # of two features
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16 if WORDS else 32], [16, 2], [WARPS, 1], [1, 0])
    if WORDS:
        panels = reinterpret(tile, gl.int32, [PANELS, C.BN, 32], gl.NVMMASharedLayout(128, 32, 2))
    else:
        panels = reinterpret(tile, tile.dtype, [PANELS, C.BN, 64], gl.NVMMASharedLayout(128, 16, 2))
    squares = gl.full([C.BN], 0, gl.float32, gl.SliceLayout(1, LAYOUT))
    for n in range(PANELS):
        x = _sum_neighbor_squares(panels.index(n).load(LAYOUT))
        squares += gl.convert_layout(sum_in_order(x, x.shape[0], x.shape[1]), gl.SliceLayout(1, LAYOUT))
    return compute_inverse_norm(squares)


@gluon.jit
def produce_norms(ring, begin, end, Ld, C: gl.constexpr):
    """NORM_WARPS warps find the inverse norms of the tokens of every tile."""
    stage = 0
    phase = 0
    for _ in range(begin, end):
        for _ in range(0, Ld, C.BN):
            mbarrier.wait(ring.full.index(stage), phase)
            found = compute_tile_inverse_norms(ring.tiles.index(stage), NORM_WARPS, C)
            ring.norms.inverse.index(stage + phase * C.STAGES).store(found)
            mbarrier.arrive(ring.norms.ready.index(stage), count=1)
            stage, phase = advance_stage(stage, phase, C)


@gluon.jit
def wait_for_tile(ring, stage, phase, C: gl.constexpr):
    """Wait for the tile at `stage`, and for the inverse norms of its tokens if normalising."""
    if C.NORMALIZE and not C.PRECOMPUTED_SCALES:
        mbarrier.wait(ring.norms.ready.index(stage), phase)
    else:
        mbarrier.wait(ring.full.index(stage), phase)


@gluon.jit
def load_inverse_norms(ring, stage, phase, S, C: gl.constexpr):
    """The scales or inverse norms of the tokens of the tile at `stage`, as columns of `S`; 0 where there are none."""
    inverse = 0
    if C.PRECOMPUTED_SCALES:
        inverse = ring.norms.inverse.index(stage).load(gl.SliceLayout(0, S.type.layout))
    elif C.NORMALIZE:
        inverse = ring.norms.inverse.index(stage + phase * C.STAGES).load(gl.SliceLayout(0, S.type.layout))
    return inverse


@gluon.jit
def scale_similarities(S, inverse, C: gl.constexpr):
    """Similarities over the norms of their document tokens if normalising, or times their scales."""
    if C.NORMALIZE or C.PRECOMPUTED_SCALES:
        S = S.to(gl.float32) * inverse[None, :]
    return S


@gluon.jit
def compute_row_inverse_norms(x):
    """The inverse norms of query rows that no two warps share, summed as `sum_row_squares_in_order` does."""
    x = x.to(gl.float32)
    return compute_inverse_norm(sum_in_order(x * x, x.shape[0], x.shape[1]))
