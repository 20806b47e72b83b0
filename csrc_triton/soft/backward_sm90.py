"""Backward of soft MaxSim on sm_90, warp-specialized: bf16, cross product, no normalization, `d <= BD`.

The math is in `backward`. Each program owns 128 rows and streams the rows of the other side. The other side has no
mask.

| kernel | owned rows | streamed tiles |
| --- | --- | --- |
| `maxsim_soft_rows` | 128 query rows, for `documents_per_part` documents | BN document tokens |
| `maxsim_soft_tokens` | twice 64 tokens of one document or two | BN query rows |

Warp roles:

| partition | warps | registers | work |
| --- | --- | --- | --- |
| consumer 0 (default) | 4 | the rest | owned rows 0 to 63 |
| consumer 1 | 4 | 232 | owned rows 64 to 127 |
| producer | 1 | 40 | TMA copies of tiles into the pipeline |

Barriers of each pipeline stage:

| barrier | arrivals | arriving | waiting |
| --- | --- | --- | --- |
| full | 1 and the bytes of the copy | producer and TMA | both consumers |
| empty | 2 | each consumer once | producer |

```text
producer:
    for tile in tiles of the other side, and the first tile again:
        wait(empty[stage]); expect(full[stage]); copy the tile with TMA
consumer g:
    x = 64 owned rows                               # in registers or shared memory
    wait(full[0])
    S = wgmma(x, tile[0].T)                         # [64, BN]
    acc = 0                                         # [64, BD]
    for n in range(tiles):
        load lse and g of the next document, or of tile n + 2 of query rows
        P = 2^(rate (S - lse)) * g                  # rounded to bf16
        acc = wgmma(P, tile[n], acc)                # asynchronous
        wait(full[n + 1])
        S = wgmma(x, tile[n + 1].T)                 # asynchronous
        wait(acc, S); arrive(empty[n])
    store acc
```

Invariants:

- Both products of a tile read its stage, and a consumer reads two stages at a time. STAGES is therefore at least 2.
- The producer copies one tile more than the loop consumes. The similarities of that tile are not used.
- TMA fills rows outside the tensor with zeros, which add nothing to acc.
- No barrier orders the consumers. While one computes probabilities, the products of the other use the tensor cores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common.primitives import load_query_mask, load_query_weight, load_rows, locate_rows
from ..forward.sm90.gluon_names import async_load, reinterpret
from ..forward.sm90.pipeline import (
    ACCUMULATOR_ROWS,
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    advance_stage,
    make_accumulator_layout,
    make_block,
    make_row_layout,
    make_tile_pipeline,
    open_stage,
)
from .backward import load_upstream
from .maximum import check_temperature, compute_probabilities, compute_rate


@gluon.jit
def _make_pipeline(x, C: gl.constexpr):
    """Allocate the pipeline of tiles that descriptor `x` reads, and shared memory for the owned rows of both groups."""
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.BN, C.BD], x.dtype)
    OPERAND: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ACCUMULATOR_ROWS, C.BD], x.dtype)
    ring = make_tile_pipeline(x.dtype, TILE, C.STAGES, 2, make_block(C.BN, C.BD))
    return ring, gl.allocate_shared_memory(x.dtype, [2, ACCUMULATOR_ROWS, C.BD], OPERAND)


@gluon.jit
def _copy_tile(x, at, ring, stage, phase, C: gl.constexpr):
    """Copy the tile that begins at `at` into a stage. Rows outside the tensor are zeros."""
    full = open_stage(ring, stage, phase, x.block_type.nbytes)
    tile = reinterpret(ring.tiles.index(stage), x.dtype, x.block_type.shape, x.layout)
    async_load(x, at, full, tile)
    return advance_stage(stage, phase, C)


@gluon.jit
def _produce_tokens(D, ring, k0, k1, Ld, C: gl.constexpr):
    """Copy the tiles of documents k0 to k1 - 1, and one more tile, whose similarities are not used."""
    stage = 0
    phase = 1
    for k in range(k0, k1):
        for t0 in range(0, Ld, C.BN):
            stage, phase = _copy_tile(D, [k, t0, 0], ring, stage, phase, C)
    _copy_tile(D, [k0, 0, 0], ring, stage, phase, C)


@gluon.jit
def _produce_rows(Q, ring, count, C: gl.constexpr):
    """Copy the tiles of all query rows, and one more tile, whose similarities are not used."""
    stage = 0
    phase = 1
    for r0 in range(0, count, C.BN):
        stage, phase = _copy_tile(Q, [r0, 0], ring, stage, phase, C)
    _copy_tile(Q, [0, 0], ring, stage, phase, C)


@gluon.jit
def _make_load_indices(C: gl.constexpr):
    """Return the indices of 64 rows and of all features, in the layout of their load."""
    LAYOUT: gl.constexpr = make_row_layout(C.BD)
    rows = gl.arange(0, ACCUMULATOR_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    return rows, gl.arange(0, C.BD, layout=gl.SliceLayout(0, LAYOUT))


@gluon.jit
def _load_operand(pointers, ok, columns, stride_d, d, room, C: gl.constexpr):
    """Load rows at `pointers`, zeros where not `ok`, as the left operand of products."""
    S: gl.constexpr = make_accumulator_layout(C.BN, room.dtype)
    room.store(load_rows(pointers, ok, columns, d, stride_d, 0))
    fence_async_shared()
    if C.OPERAND_IN_REGISTERS:
        operand = room.load(gl.DotOperandLayout(0, S, 2))
    else:
        operand = room
    return operand


@gluon.jit
def _issue_first_product(operand, ring, C: gl.constexpr):
    """Compute the similarities to the first tile, and return them with sums of zero."""
    S: gl.constexpr = make_accumulator_layout(C.BN, ring.tiles.dtype)
    SUM: gl.constexpr = make_accumulator_layout(C.BD, ring.tiles.dtype)
    zeros = gl.full([ACCUMULATOR_ROWS, C.BN], 0.0, gl.float32, S)
    acc = gl.full([ACCUMULATOR_ROWS, C.BD], 0.0, gl.float32, SUM)
    mbarrier.wait(ring.full.index(0), 0)
    return warpgroup_mma(operand, ring.tiles.index(0).permute((1, 0)), zeros, use_acc=False), acc


@gluon.jit
def _issue_products(S, acc, operand, ring, lse, coefficient, rate, stage, phase, C: gl.constexpr):
    """Issue the sum of a tile and the similarities to the next tile, and advance to the stage of the next tile."""
    P = compute_probabilities(S, lse, coefficient, rate).to(ring.tiles.dtype)
    P = gl.convert_layout(P, gl.DotOperandLayout(0, acc.type.layout, 2))
    acc = warpgroup_mma(P, ring.tiles.index(stage), acc, is_async=True)
    stage, phase = advance_stage(stage, phase, C)
    mbarrier.wait(ring.full.index(stage), phase)
    S = warpgroup_mma(operand, ring.tiles.index(stage).permute((1, 0)), S, use_acc=False, is_async=True)
    return S, acc, stage, phase


@gluon.jit
def _wait_for_products(S, acc, ring, stage):
    """Wait for the products of `_issue_products`, and release the tile at `stage`."""
    S, acc = warpgroup_mma_wait(0, [S, acc])
    mbarrier.arrive(ring.empty.index(stage), count=1)
    return S, acc


@gluon.jit
def _store_rows(out, acc, row, ok, d, C: gl.constexpr):
    """Store sums as rows of `out`, in its dtype."""
    column = gl.arange(0, C.BD, layout=gl.SliceLayout(0, acc.type.layout))
    offsets = row.to(gl.int64)[:, None] * d + column[None, :]
    gl.store(out + offsets, acc.to(out.dtype.element_ty), mask=ok[:, None] & (column < d)[None, :])


@gluon.jit
def _consume_tokens(Q, up, rate, ring, room, sums, first, k0, k1, d, G: gl.constexpr, C: gl.constexpr):
    """Run consumer G of `maxsim_soft_rows`: query rows from `first` on, and documents k0 to k1 - 1."""
    count = up.Nq * up.Lq
    r, columns = _make_load_indices(C)
    r += first + G * ACCUMULATOR_ROWS
    ok = load_query_mask(Q, r // up.Lq, r % up.Lq, r < count)
    operand = _load_operand(locate_rows(Q, r // up.Lq, r % up.Lq), ok, columns, Q.stride_d, d, room.index(G), C)
    S, acc = _issue_first_product(operand, ring, C)
    r = first + G * ACCUMULATOR_ROWS + gl.arange(0, ACCUMULATOR_ROWS, layout=gl.SliceLayout(1, S.type.layout))
    i = r // up.Lq
    ok = load_query_mask(Q, i, r % up.Lq, r < count)
    lse, g = load_upstream(up, k0 * 0, gl.minimum(k0, up.K - 1), i, r, ok)
    stage = 0
    phase = 0
    for k in range(k0, k1):
        # Load one document ahead.
        next_lse, next_g = load_upstream(up, k0 * 0, gl.minimum(k + 1, up.K - 1), i, r, ok)
        for _ in range(0, up.Ld, C.BN):
            done_stage = stage
            S, acc, stage, phase = _issue_products(
                S, acc, operand, ring, lse[:, None], g[:, None], rate, stage, phase, C
            )
            S, acc = _wait_for_products(S, acc, ring, done_stage)
        lse = next_lse
        g = next_g
    r = first + G * ACCUMULATOR_ROWS + gl.arange(0, ACCUMULATOR_ROWS, layout=gl.SliceLayout(1, acc.type.layout))
    _store_rows(sums + gl.program_id(1).to(gl.int64) * count * d, acc, r, r < count, d, C)


@gluon.jit(do_not_specialize=["documents_per_part"])
def maxsim_soft_rows(Q, tiles, up, tau, sums, documents_per_part, d, C: gl.constexpr):
    """Compute ``sum_t g P d_t`` of 128 query rows and some documents, in fp32, as `maxsim_soft_queries` does.

    Args:
        Q: `QueryArgs` without weights.
        tiles: Tensor descriptor of documents in blocks `[1, BN, BD]`.
        up: `SoftUpstreamArgs`.
        tau: Temperature, a number or a pointer to one.
        sums: Output `[parts, Nq, Lq, d]`.
        documents_per_part: Documents of a part. The grid is `[row tiles, parts]`.
        d: Number of features.
        C: Compile-time choices, a `Sm90SoftConfig`.
    """
    if tau.dtype.is_ptr():
        tau = gl.load(tau)
    rate = compute_rate(check_temperature(tau), 1.0)
    ring, room = _make_pipeline(tiles, C)
    first = gl.program_id(0) * (2 * ACCUMULATOR_ROWS)
    k0 = gl.program_id(1) * documents_per_part
    k1 = gl.minimum(k0 + documents_per_part, up.K)
    gl.warp_specialize(
        [
            (_consume_tokens, (Q, up, rate, ring, room, sums, first, k0, k1, d, 0, C)),
            (_consume_tokens, (Q, up, rate, ring, room, sums, first, k0, k1, d, 1, C)),
            (_produce_tokens, (tiles, ring, k0, k1, up.Ld, C)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _load_columns(Q, up, k, r0, C: gl.constexpr):
    """Load soft maxima and ``g * q_weight`` of the query rows of a tile, one or two in each thread."""
    r = r0 + gl.arange(0, C.BN, layout=gl.BlockedLayout([1], [32], [4], [0]))
    i = r // up.Lq
    ok = r < up.Nq * up.Lq
    lse, g = load_upstream(up, k * 0, k, i, r, ok)
    return lse, g * load_query_weight(Q, i, r % up.Lq, ok & (g != 0.0))


@gluon.jit
def _consume_rows(Q, D, up, rate, ring, room, grad, d, G: gl.constexpr, C: gl.constexpr):
    """Run consumer G of `maxsim_soft_tokens`: 64 tokens of a document, and all query rows."""
    tiles_per_document = gl.cdiv(up.Ld, ACCUMULATOR_ROWS)
    number = gl.program_id(0) * 2 + G
    document = number // tiles_per_document
    t0 = number % tiles_per_document * ACCUMULATOR_ROWS
    k = gl.minimum(document, up.K - 1)
    end = gl.where(document < up.K, up.Ld, 0)
    rows, columns = _make_load_indices(C)
    pointers = D.ptr + k.to(gl.int64) * D.stride_doc + (t0 + rows).to(gl.int64) * D.stride_l
    operand = _load_operand(pointers, t0 + rows < end, columns, D.stride_d, d, room.index(G), C)
    S, acc = _issue_first_product(operand, ring, C)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S.type.layout)
    lse, g = _load_columns(Q, up, k, 0, C)
    lse, g = gl.convert_layout(lse, COLUMN), gl.convert_layout(g, COLUMN)
    next_lse, next_g = _load_columns(Q, up, k, C.BN, C)
    stage = 0
    phase = 0
    for r0 in range(0, up.Nq * up.Lq, C.BN):
        # Load two tiles ahead. The layout conversion of the next tile runs while the products are in flight.
        later_lse, later_g = _load_columns(Q, up, k, r0 + 2 * C.BN, C)
        done_stage = stage
        S, acc, stage, phase = _issue_products(S, acc, operand, ring, lse[None, :], g[None, :], rate, stage, phase, C)
        lse = gl.convert_layout(next_lse, COLUMN)
        g = gl.convert_layout(next_g, COLUMN)
        next_lse = later_lse
        next_g = later_g
        S, acc = _wait_for_products(S, acc, ring, done_stage)
    t = t0 + gl.arange(0, ACCUMULATOR_ROWS, layout=gl.SliceLayout(1, acc.type.layout))
    _store_rows(grad + document.to(gl.int64) * up.Ld * d, acc, t, t < end, d, C)


@gluon.jit
def maxsim_soft_tokens(Q, D, tiles, up, tau, grad, d, C: gl.constexpr):
    """Compute ``sum_r g q_weight P q_r`` of twice 64 tokens, of one document or two, as `maxsim_soft_documents` does.

    Args:
        Q: `QueryArgs` without a mask.
        D: `DocumentArgs`.
        tiles: Tensor descriptor of all query rows in blocks `[BN, BD]`.
        up: `SoftUpstreamArgs`.
        tau: Temperature, a number or a pointer to one.
        grad: Output `[K, Ld, d]`, contiguous. The grid is `[K * token tiles / 2]`, rounded up.
        d: Number of features.
        C: Compile-time choices, a `Sm90SoftConfig`.
    """
    if tau.dtype.is_ptr():
        tau = gl.load(tau)
    rate = compute_rate(check_temperature(tau), 1.0)
    ring, room = _make_pipeline(tiles, C)
    gl.warp_specialize(
        [
            (_consume_rows, (Q, D, up, rate, ring, room, grad, d, 0, C)),
            (_consume_rows, (Q, D, up, rate, ring, room, grad, d, 1, C)),
            (_produce_rows, (tiles, ring, up.Nq * up.Lq, C)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
