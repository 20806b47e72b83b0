"""The ring of document tiles in shared memory that the kernels of sm_90 read, and its barriers."""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ACCUMULATOR_ROWS = gl.constexpr(64)


class PipelineNorms(NamedTuple):
    """Inverse norms of the tokens of the ring's tiles, and the barriers that say of which tiles they are known.

    Those that are read arrive with their tile. For those that are found there is room for two rounds of the ring.
    """

    inverse: Any
    ready: Any


class TilePipeline(NamedTuple):
    """Document tiles in shared memory, and the barriers that say which are full and which may be filled again.

    `turn` lets the warp groups issue their products in turn; `search` serves `_resolve`: a barrier for the copies of
    each group, and one that both pass when they have read their last tile. `norms` are 0 unless normalising.
    """

    tiles: Any
    full: Any
    empty: Any
    turn: Any
    search: Any
    norms: Any


@triton.constexpr_function
def make_accumulator_layout(BN, dtype):
    """The layout of 64 rows of products with a tile of BN tokens; one instruction takes 32 bytes of features."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 256 // dtype.primitive_bitwidth])


def make_tile_layout(block: list[int], dtype: str):
    """The shared-memory layout of a tile of documents, as the matrix unit wants it; `dtype` is "float16" or so."""
    return gl.NVMMASharedLayout.get_default_for(block, getattr(gl, dtype))


@gluon.jit
def _allocate_norms(norms, C: gl.constexpr):
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if C.ENCODING != "":
        return PipelineNorms(gl.allocate_shared_memory(gl.float32, [C.STAGES, C.BN], PLAIN), 0)
    elif C.PRECOMPUTED_SCALES:
        return PipelineNorms(gl.allocate_shared_memory(gl.float32, [C.STAGES, C.BN], norms.layout), 0)
    elif C.NORMALIZE:
        inverse = gl.allocate_shared_memory(gl.float32, [2 * C.STAGES, C.BN], PLAIN)
        return PipelineNorms(inverse, gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout()))
    else:
        return 0


@gluon.jit
def make_pipeline(D, C: gl.constexpr, norms=None):
    """The ring, its barriers ready, and room for a program's query rows, two halves of each warp group."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    TILES: gl.constexpr = C.STAGES
    DTYPE: gl.constexpr = gl.float16 if C.ENCODING != "" else D.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2) if C.ENCODING != "" else D.layout
    ring = TilePipeline(
        gl.allocate_shared_memory(DTYPE, [TILES, C.BN, C.BD], LAYOUT),
        gl.allocate_shared_memory(gl.int64, [TILES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [TILES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [3, 1], BARRIER),
        _allocate_norms(norms, C),
    )
    q_smem = gl.allocate_shared_memory(DTYPE, [4, ACCUMULATOR_ROWS, C.BD], LAYOUT)
    for n in gl.static_range(TILES):
        mbarrier.init(ring.full.index(n), count=1)
        mbarrier.init(ring.empty.index(n), count=2)
        if C.NORMALIZE and not C.PRECOMPUTED_SCALES:
            mbarrier.init(ring.norms.ready.index(n), count=1)
    for n in gl.static_range(2):
        mbarrier.init(ring.turn.index(n), count=1)
        mbarrier.init(ring.search.index(n), count=1)
    mbarrier.init(ring.search.index(2), count=2)
    return ring, q_smem


@gluon.jit
def make_tile_pipeline(x, layout: gl.constexpr, TILES: gl.constexpr, READERS: gl.constexpr, C: gl.constexpr):
    """A ring of tiles of what a descriptor reads, each read by so many partitions; no other barriers."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = gl.allocate_shared_memory(x.dtype, [TILES, C.BN, C.BD], layout)
    full = gl.allocate_shared_memory(gl.int64, [TILES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [TILES, 1], BARRIER)
    for n in gl.static_range(TILES):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=READERS)
    return TilePipeline(tiles, full, empty, 0, 0, 0)


@gluon.jit
def advance_stage(stage, phase, C: gl.constexpr):
    """The next stage of a ring, and its phase."""
    stage += 1
    wrapped = stage == C.STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)
