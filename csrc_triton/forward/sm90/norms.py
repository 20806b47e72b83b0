"""Normalization in the sm_90 kernels: inverse norms of document tokens and query rows, and their application.

Similarities are multiplied by the inverse norms of their document tokens while an accumulator is reduced. If a launch
of `maxsim_tile_norms` computed these norms, TMA copies them into the pipeline stage of their tile. Otherwise four norm
warps compute them from the tile in shared memory while the tensor cores work on other tiles. Inverse query norms
multiply the row maxima in the epilogue. Dequantization scales of document tokens use the same code.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...common.primitives import compute_inverse_norm, sum_in_order
from .gluon_names import reinterpret
from .pipeline import advance_stage, negates_similarities

# Registers per thread in kernels with norm or conversion warps: of these warps, of the producer, of the consumers.
NORM_REGISTERS = gl.constexpr(56)
NORM_PRODUCER_REGISTERS = gl.constexpr(40)
NORM_CONSUMER_REGISTERS = gl.constexpr(208)
NORM_WARPS = gl.constexpr(4)


@gluon.jit
def _sum_neighbor_squares(x):
    """Return the squares of fp16 features, or for bf16 the sum of squares of the two features of a 32-bit word.

    A bf16 number is the upper half of an fp32 number, so a shift or a bit mask converts it.
    """
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
    """Return the inverse norms of the tokens of a tile, `[BN]`.

    Squares are summed in the order of `similarities.sum_tile_squares`, and no two warps share a token. The loop over
    panels of 64 features keeps the code short, because this code runs once per tile.
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
    """Compute the inverse norms of the tokens of every tile (norm warps)."""
    stage = 0
    phase = 0
    for _ in range(begin, end):
        for _ in range(0, Ld, C.BN):
            mbarrier.wait(ring.full.index(stage), phase)
            inverse = compute_tile_inverse_norms(ring.tiles.index(stage), NORM_WARPS, C)
            ring.norms.inverse.index(stage + phase * C.STAGES).store(inverse)
            mbarrier.arrive(ring.norms.ready.index(stage), count=1)
            stage, phase = advance_stage(stage, phase, C)


@gluon.jit
def wait_for_tile(ring, stage, phase, C: gl.constexpr):
    """Wait for the tile of a stage, and for its inverse norms if norm warps compute them."""
    if C.NORMALIZE and not C.PRECOMPUTED_SCALES:
        mbarrier.wait(ring.norms.ready.index(stage), phase)
    else:
        mbarrier.wait(ring.full.index(stage), phase)


@gluon.jit
def load_inverse_norms(ring, stage, phase, S, C: gl.constexpr):
    """Load the scales or inverse norms of the tokens of a stage as columns of `S`, or return 0 if there are none."""
    inverse = 0
    if C.PRECOMPUTED_SCALES:
        inverse = ring.norms.inverse.index(stage).load(gl.SliceLayout(0, S.type.layout))
    elif C.NORMALIZE:
        inverse = ring.norms.inverse.index(stage + phase * C.STAGES).load(gl.SliceLayout(0, S.type.layout))
    return inverse


@gluon.jit
def scale_similarities(S, inverse, C: gl.constexpr):
    """Return similarities times the inverse norms or scales of their document tokens.

    With C.MASK the similarities of tokens whose scale is 0 are -inf. If `negates_similarities`, `inverse` is the scale
    of the document, and only its sign is applied.
    """
    if C.MASK:
        S = gl.where((inverse > 0)[None, :], S * inverse[None, :], float("-inf"))
    elif C.NORMALIZE or C.PRECOMPUTED_SCALES:
        S = S.to(gl.float32) * inverse[None, :]
    elif negates_similarities(C):  # noqa: SIM102 - the compiler decides this condition, and the kernel the next one
        if inverse < 0:
            # Inline code is never executed speculatively. Otherwise each similarity costs a selection.
            S = gl.inline_asm_elementwise("neg.f32 $0, $1;", "=f,f", [S], gl.float32, is_pure=False, pack=1)
    return S


@gluon.jit
def compute_row_inverse_norms(x):
    """Return the inverse norms of query rows, of which no two warps share one.

    Squares are summed in the order of `sum_row_squares_in_order`.
    """
    if x.dtype == gl.float32:
        squares = gl.fma(x, x, gl.full_like(x, 0.0))  # `primitives.square`
    else:
        x = x.to(gl.float32)
        squares = x * x  # exact
    return compute_inverse_norm(sum_in_order(squares, x.shape[0], x.shape[1]))
