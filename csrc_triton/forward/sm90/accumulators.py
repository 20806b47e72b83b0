"""Accumulators of the sm_90 kernels: products of 64 query rows with a document tile, and running maxima of the rows.

A tensor core product has C.MMA_ROWS query rows. A query occupies C.ROWS_PER_QUERY of the rows of the two accumulators
of a warp group. `map_rows` defines the order, `load_accumulator_queries` loads the rows, and `sum_accumulators` adds
the maxima of each query.

WGMMA leaves an accumulator row in the registers of 4 lanes of a warp. Each lane keeps the maximum of its own columns
over all tiles of a document. The epilogue merges the 4 lanes of a row. A reduction over a tile thus exchanges no data
between threads. The functions named `compiler_barrier_*` keep a tensor core product from being scheduled ahead of the
reduction of the accumulator that the product overwrites.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from ...common.maxima import reduce_quad_maxima, select_first_larger, split_lanes
from ...common.primitives import NO_TOKEN, UNRESOLVED, load_query_mask, locate_rows, nan_max, sum_in_order
from ...formats.encoded import INT8_LOW_SCALE
from .norms import scale_similarities
from .pipeline import make_row_layout
from .schedule import compiler_barrier_value


class Accumulator(NamedTuple):
    """State of 64 rows of a consumer warp group.

    `S` is the product with the present tile, `[64, BN]`. `best` is the running maximum of each of the 4 lanes of a row,
    `[rows, 4]`. `where` is the token of that maximum relative to its lane with C.ARGMAX, else 0.
    """

    S: Any
    best: Any
    where: Any


@gluon.jit
def _make_axis_indices(n: gl.constexpr, AXIS: gl.constexpr, layout: gl.constexpr):
    """Return 0, 1, .. n - 1 along axis 1 or 3 of a 4-D layout."""
    if AXIS == 1:
        x = gl.arange(0, n, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
        x = gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 2), 3)
    else:
        x = gl.arange(0, n, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
        x = gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 1), 2)
    return x


@gluon.jit
def reduce_tile(S, best, where, t0, C: gl.constexpr):
    """Return `best` and `where` after a tile that begins with token t0.

    Columns are constants of the compiled code, relative to the lane.
    """
    if C.ARGMAX:
        x = split_lanes(S)
        LAYOUT: gl.constexpr = x.type.layout
        column = _make_axis_indices(S.shape[1] // 8, 1, LAYOUT) * 8 + _make_axis_indices(2, 3, LAYOUT)
        x, column = gl.broadcast(x, column)
        m, column = gl.reduce(gl.reduce((x, column), 3, select_first_larger), 1, select_first_larger)
        where = gl.where(m > best, column + t0, where)
    else:
        m = reduce_quad_maxima(S)
    return nan_max(best, m), where


@gluon.jit
def _combine_terms(hi, lo):
    """Return the product with a query row from the products with its int8 terms."""
    return hi * INT8_LOW_SCALE + lo


@gluon.jit
def join_terms(S, C: gl.constexpr):
    """Return the products with query rows from the products with their int8 terms.

    The hi and lo products of a row are 8 rows apart and in the same thread. With C.SMALL_M these rows are columns.
    """
    if C.INT8_TERMS == 2 and C.SMALL_M:
        S = gl.reshape(gl.reduce(gl.reshape(S, (C.BN, C.MMA_ROWS // 8, 2, 8)), 2, _combine_terms), (C.BN, C.MMA_ROWS))
    elif C.INT8_TERMS == 2:
        S = gl.reshape(gl.reduce(gl.reshape(S, (C.MMA_ROWS // 8, 2, 8, C.BN)), 1, _combine_terms), (C.MMA_ROWS, C.BN))
    return S


@gluon.jit
def accumulate_tile(S, inverse, half, start, tokens_left, origin, spans, C: gl.constexpr):
    """Return the accumulator after a tile that begins with token `start`, from its product S.

    The first `tokens_left` tokens of the tile belong to the document. The others are set to -inf, unless the mask warps
    overwrote them. Argmax values are relative to the dense document, whose token `origin` is the first of the segment.
    """
    x = scale_similarities(join_terms(S, C), inverse, C)
    if spans.Td is None or (spans.patches is not None or tokens_left >= C.BN):
        best, where = reduce_tile(x, half.best, half.where, start + origin, C)
    else:
        is_inside = gl.arange(0, C.BN, layout=gl.SliceLayout(0, x.type.layout)) < compiler_barrier_value(tokens_left)
        best, where = reduce_tile(
            gl.where(is_inside[None, :], x, float("-inf")), half.best, half.where, start + origin, C
        )
    return Accumulator(S, best, where)


@gluon.jit
def compiler_barrier_pair(S_b, a, C: gl.constexpr):
    """Wait for the second product and return it with the first accumulator `a`.

    The compiler sees the wait rewrite `a.best`. It must therefore reduce `a` ahead of the wait.
    """
    if C.ARGMAX:
        S_b, best, where = warpgroup_mma_wait(0, [S_b, a.best, a.where])
    else:
        S_b, best = warpgroup_mma_wait(0, [S_b, a.best])
        where = a.where
    return S_b, Accumulator(a.S, best, where)


@gluon.jit
def compiler_barrier_accumulator(half, C: gl.constexpr):
    """Return the accumulator unchanged, but make the compiler see `S` rewritten after `best` is known.

    The next product may then overwrite the registers of `S`. Without this barrier the reduction sinks below the
    product, which then needs a copy of these registers, and ptxas serializes the products.
    """
    if C.ARGMAX:
        S, best, where = warpgroup_mma_wait(0, [half.S, half.best, half.where])
    else:
        S, best = warpgroup_mma_wait(0, [half.S, half.best])
        where = half.where
    return Accumulator(S, best, where)


@gluon.jit
def reset_accumulator(S, C: gl.constexpr):
    """Return an accumulator that has seen no tile, in the registers of `S`."""
    x = join_terms(S, C)
    if x.dtype == gl.int32 and not C.PRECOMPUTED_SCALES:
        lowest = gl.full_like(x, -(2**31))
    else:
        lowest = gl.full_like(x.to(gl.float32), float("-inf"))
    best = reduce_quad_maxima(lowest)
    where = gl.full_like(best, 0).to(gl.int32) + NO_TOKEN if C.ARGMAX else 0
    return Accumulator(S, best, where)


@gluon.jit
def reset_accumulators(halves, C: gl.constexpr):
    """Return both accumulators of a warp group as they are before the first tile of a document."""
    return reset_accumulator(halves[0].S, C), reset_accumulator(halves[1].S, C)


@gluon.jit
def select_argmax(half, best, keep, unresolved):
    """Return the argmax of an accumulator's rows, and `unresolved` with the rows that still need a search marked.

    The argmax is UNRESOLVED for a kept row whose maximum is NaN or -inf, and -1 for a row that is not kept.

    Args:
        half: The `Accumulator` at the end of a document.
        best: Maximum of each row over its lanes, `[rows]`.
        keep: Rows that exist and are not masked.
        unresolved: int32 flag of each row that was UNRESOLVED for any document so far.
    """
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, half.best.type.layout))
    where = gl.where(half.where == NO_TOKEN, NO_TOKEN, half.where + 2 * lane[None, :])
    where = gl.min(gl.where(half.best == best[:, None], where, NO_TOKEN), axis=1)
    unresolved = unresolved | (keep & (where == NO_TOKEN)).to(gl.int32)
    return gl.where(keep, gl.where(where == NO_TOKEN, UNRESOLVED, where), -1), unresolved


@gluon.jit
def map_rows(r, first, H: gl.constexpr, parts, C: gl.constexpr):
    """Return the query and the token of rows `r` of accumulator H.

    The tokens of a query are split between the two accumulators, first half first. Both halves belong to the same warp
    if they fit its rows of an accumulator. With C.SMALL_M one accumulator holds all rows.

    Args:
        r: Row indices within the accumulator.
        first: First group of the warp group. A group is C.ROWS_PER_QUERY rows of one query.
        H: Accumulator, 0 or 1.
        parts: Groups of each query.
        C: `Sm90Config`.
    """
    HALF_SLOT: gl.constexpr = C.ROWS_PER_QUERY if C.SMALL_M else C.ROWS_PER_QUERY // 2
    group = first + r // HALF_SLOT
    return group // parts, (group % parts) * C.ROWS_PER_QUERY + H * HALF_SLOT + r % HALF_SLOT


@gluon.jit
def locate_accumulator_rows(first, H: gl.constexpr, parts, sizes, layout: gl.constexpr, C: gl.constexpr):
    """Return the query, the token, the row number, and the validity of all rows of accumulator H, see `map_rows`.

    If `parts` is None, the rows of all queries follow each other without padding, and `first` is a row.
    """
    if parts is None:
        row = first + H * C.MMA_ROWS + gl.arange(0, C.MMA_ROWS, layout=layout)
        i, s = row // sizes.Lq, row % sizes.Lq
        ok = row < sizes.Nq * sizes.Lq
    else:
        i, s = map_rows(gl.arange(0, C.MMA_ROWS, layout=layout), first, H, parts, C)
        row = i * sizes.Lq + s
        ok = (i < sizes.Nq) & (s < sizes.Lq)
    return i, s, row, ok


@gluon.jit
def locate_first_group(row_tile, G: gl.constexpr, parts, C: gl.constexpr):
    """Return the first group of warp group G in a row tile, or its first row if `parts` is None."""
    return (row_tile * 2 + G) * (2 * C.MMA_ROWS if parts is None else 2 * C.MMA_ROWS // C.ROWS_PER_QUERY)


@gluon.jit
def load_accumulator_queries(Q, first, H: gl.constexpr, parts, sizes, d, C: gl.constexpr):
    """Load the query rows of accumulator H, zeros for masked and absent rows."""
    LAYOUT: gl.constexpr = make_row_layout(C.BD)
    columns = gl.arange(0, C.BD, layout=gl.SliceLayout(0, LAYOUT))
    i, s, _, ok = locate_accumulator_rows(first, H, parts, sizes, gl.SliceLayout(1, LAYOUT), C)
    ok = load_query_mask(Q, i, s, ok)
    pointers = locate_rows(Q, i, s)[:, None] + (columns * Q.stride_d)[None, :]
    return gl.load(pointers, mask=ok[:, None] & (columns < d)[None, :], other=0.0)


@gluon.jit
def sum_accumulators(a, b, C: gl.constexpr):
    """Return the sum of each query over its rows in both accumulators, as one fixed binary tree."""
    GROUPS: gl.constexpr = 2 * C.MMA_ROWS // C.ROWS_PER_QUERY
    return sum_in_order(a, GROUPS, C.ROWS_PER_QUERY // 2) + sum_in_order(b, GROUPS, C.ROWS_PER_QUERY // 2)
