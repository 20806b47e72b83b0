"""Shared-memory pipeline of document tiles and its barriers, for all sm_90 kernels.

A pipeline has C.STAGES stages. A pipeline stage is room for one document tile in shared memory with a `full` and an
`empty` barrier. The producer warp waits at `empty`, then starts a TMA copy that arrives at `full`. Consumer warps wait
at `full`, read the tile on the tensor cores, and arrive at `empty`. Each side advances (stage, phase) on its own. The
phase flips when the stage index wraps around. A barrier wait names the phase that must have completed.

```text
producer                                            consumer
stage = 0; phase = 1                                stage = 0; phase = 0
for each tile:                                      for each tile:
    full = open_stage(stage, phase, bytes)              wait(full[stage], phase)
    TMA copies that arrive at `full`                    products, then arrive(empty[stage])
    stage, phase = advance_stage(stage, phase)          stage, phase = advance_stage(stage, phase)
```

`empty` counts the roles that read a tile. A wait for phase 1 of a new barrier returns at once.

A kernel must use every barrier that it initializes. Triton gives the memory of an unused barrier to another buffer. The
hardware may still change that memory, because nothing invalidated the barrier.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...formats.bits import get_code_bits, is_rotated

ACCUMULATOR_ROWS = gl.constexpr(64)
# Registers per thread of kernels without norm or conversion warps.
PRODUCER_REGISTERS = gl.constexpr(40)
CONSUMER_REGISTERS = gl.constexpr(232)


class PipelineNorms(NamedTuple):
    """Inverse norms or scales of the tokens in the pipeline, and the barriers that say when they are ready.

    Precomputed values arrive with their tile. Norms that the kernel computes have two slots per stage, one for each
    phase.
    """

    inverse: Any
    ready: Any


class TilePipeline(NamedTuple):
    """Document tiles in shared memory, with the barriers of their stages.

    `full[stage]` says that a tile has arrived, `empty[stage]` that it may be overwritten. `turn[g]` is the ping-pong
    barrier of warp group g. `search` serves `_resolve_argmax`. It has one barrier for the copies of each warp group,
    and one that both groups arrive at after their last tile. `norms` is a `PipelineNorms`, or 0 if tokens have no
    scales. The large-d kernel has the inverse norms themselves in `norms`. Absent members are 0.
    """

    tiles: Any
    full: Any
    empty: Any
    turn: Any
    search: Any
    norms: Any


@triton.constexpr_function
def make_accumulator_layout(BN, dtype):
    """Return the layout of a `[64, BN]` accumulator of WGMMA.

    One WGMMA instruction multiplies 32 bytes of features.
    """
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 256 // dtype.primitive_bitwidth])


@triton.constexpr_function
def make_row_layout(BD):
    """Return the layout in which four warps load rows of BD features, 8 neighbors in each thread."""
    return gl.BlockedLayout([1, 8], [256 // BD, BD // 8], [4, 1], [1, 0])


def make_tile_layout(block: list[int], dtype: str):
    """Return the swizzled shared-memory layout of a document tile, in which tensor cores read it.

    Args:
        block: Shape of the tile.
        dtype: Name of the element type, for example "float16".
    """
    return gl.NVMMASharedLayout.get_default_for(block, getattr(gl, dtype))


@triton.constexpr_function
def has_conversion_warps(C):
    """Return whether conversion warps make fp16 or int8 tiles of the documents (many query rows)."""
    if C.ENCODING != "":
        return C.ENCODING != "fp8_fp8"
    return C.FP32_TERMS > 0 and not C.PRECOMPUTED_TERMS


@triton.constexpr_function
def copies_scales(C):
    """Return whether TMA copies the precomputed scales of tokens into the pipeline, next to their tiles.

    It does not if a consumer or the conversion warps load them (FP8 and code documents) or compute them (fp32). The
    bf16 scales of rotated documents have no aligned rows.
    """
    if get_code_bits(C.ENCODING):
        return C.SMALL_M and not is_rotated(C.ENCODING)
    return C.ENCODING in ("", "fp8_fp8") and (C.FP32_TERMS == 0 or C.PRECOMPUTED_TERMS)


@triton.constexpr_function
def negates_similarities(C):
    """Return whether the similarities of an FP8 document are negated if its one scale is negative.

    The maximum then belongs to the largest scaled similarity, and the epilogue multiplies it by the magnitude of the
    scale. Scales of int8 documents are only known in the epilogue, where their rows fall back to fp32.
    """
    return C.ENCODING == "fp8_fp8" and not C.PRECOMPUTED_SCALES


@triton.constexpr_function
def has_argmax_search(C):
    """Return whether consumers search for the argmax of rows whose maximum is NaN or -inf."""
    return C.ARGMAX and C.FP32_TERMS == 0  # otherwise `maxsim_resolve_argmax` searches


@triton.constexpr_function
def get_converted_dtype(C):
    """Return the dtype in which converted documents are multiplied."""
    return gl.int8 if get_code_bits(C.ENCODING) else gl.float16


@triton.constexpr_function
def get_tile_block(C):
    """Return the shape of a document tile as TMA copies it: tokens and features, or the words of codes."""
    nbits = get_code_bits(C.ENCODING)
    return [C.BN * C.BD * nbits // 32] if nbits else [C.BN, C.BD]


@triton.constexpr_function
def make_block(*sizes):
    """Return a shape. Triton 3.6 passes no list of constexprs to a function."""
    return list(sizes)


@triton.constexpr_function
def _prepend(n, block):
    """Return the shape of n blocks."""
    return [n, *block]


@gluon.jit
def _allocate_norms(norms, C: gl.constexpr):
    """Allocate room for token scales or inverse norms, or return 0 if there are none."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if has_conversion_warps(C) and C.PRECOMPUTED_SCALES:
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
    """Allocate and initialize the pipeline, and allocate room for the query rows of four accumulators.

    Returns:
        The `TilePipeline` and `q_smem [4, 64, BD]`. Entries 2 g and 2 g + 1 belong to warp group g.
    """
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    STAGES: gl.constexpr = C.STAGES
    CONVERTED: gl.constexpr = has_conversion_warps(C)
    DTYPE: gl.constexpr = get_converted_dtype(C) if CONVERTED else D.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, 2) if CONVERTED else D.layout
    # The terms lo of fp32 tiles follow the terms hi, and use no barriers.
    ring = make_tile_pipeline(DTYPE, LAYOUT, (2 if C.FP32_TERMS == 2 else 1) * STAGES, 2, make_block(C.BN, C.BD))
    ring = TilePipeline(
        ring.tiles,
        ring.full,
        ring.empty,
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER) if C.PING_PONG else 0,
        _make_search_barriers() if has_argmax_search(C) else 0,
        _allocate_norms(norms, C),
    )
    q_smem = gl.allocate_shared_memory(DTYPE, [4, ACCUMULATOR_ROWS, C.BD], LAYOUT)
    if C.NORMALIZE and not C.PRECOMPUTED_SCALES:
        for n in gl.static_range(STAGES):
            mbarrier.init(ring.norms.ready.index(n), count=1)
    if C.PING_PONG:
        for n in gl.static_range(2):
            mbarrier.init(ring.turn.index(n), count=1)
    return ring, q_smem


@gluon.jit
def _make_search_barriers():
    """Allocate and initialize `TilePipeline.search`."""
    search = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(2):
        mbarrier.init(search.index(n), count=1)
    mbarrier.init(search.index(2), count=2)
    return search


@gluon.jit
def make_tile_pipeline(
    DTYPE: gl.constexpr,
    LAYOUT: gl.constexpr,
    TILES: gl.constexpr,
    READERS: gl.constexpr,
    BLOCK: gl.constexpr,
):
    """Allocate and initialize a pipeline of TILES tiles of shape BLOCK, whose only barriers are `full` and `empty`.

    READERS roles read each tile.
    """
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    SHAPE: gl.constexpr = _prepend(TILES, BLOCK)
    tiles = gl.allocate_shared_memory(DTYPE, SHAPE, LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [TILES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [TILES, 1], BARRIER)
    for n in gl.static_range(TILES):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=READERS)
    return TilePipeline(tiles, full, empty, 0, 0, 0)


@gluon.jit
def open_stage(ring, stage, phase, BYTES: gl.constexpr):
    """Wait until a stage may be overwritten, and return its `full` barrier, which then expects BYTES (producer)."""
    full = ring.full.index(stage)
    mbarrier.wait(ring.empty.index(stage), phase)
    mbarrier.expect(full, BYTES)
    return full


@gluon.jit
def advance_stage(stage, phase, C: gl.constexpr):
    """Return the stage after `stage` and its phase, which flips when the index wraps around."""
    stage += 1
    has_wrapped = stage == C.STAGES
    return gl.where(has_wrapped, 0, stage), gl.where(has_wrapped, phase ^ 1, phase)
