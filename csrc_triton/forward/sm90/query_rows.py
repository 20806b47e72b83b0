"""Which query rows a warp group of the kernels of sm_90 has, and what their maxima add up to."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.primitives import load_query_mask, locate_rows, sum_in_order


@gluon.jit
def map_rows(r, first, H: gl.constexpr, parts, C: gl.constexpr):
    """Query and token of rows `r` of half H: each query's tokens are split between the halves, first half first.

    A warp then holds whole queries of up to half its rows. `first` is the first group of the warp group; a query longer
    than a warp group's rows takes several groups, its `parts`. With C.SMALL_M one half holds all rows.
    """
    HALF_SLOT: gl.constexpr = C.ROWS_PER_QUERY if C.SMALL_M else C.ROWS_PER_QUERY // 2
    group = first + r // HALF_SLOT
    return group // parts, (group % parts) * C.ROWS_PER_QUERY + H * HALF_SLOT + r % HALF_SLOT


@gluon.jit
def map_accumulator_rows(first, H: gl.constexpr, parts, layout: gl.constexpr, C: gl.constexpr):
    """The same of all rows of half H."""
    return map_rows(gl.arange(0, C.MMA_ROWS, layout=layout), first, H, parts, C)


@gluon.jit
def load_accumulator_queries(Q, first, H: gl.constexpr, parts, sizes, d, C: gl.constexpr):
    """The rows of half H, zeros where masked or absent."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C.BD, C.BD // 8], [4, 1], [1, 0])
    columns = gl.arange(0, C.BD, layout=gl.SliceLayout(0, LAYOUT))
    i, s = map_accumulator_rows(first, H, parts, gl.SliceLayout(1, LAYOUT), C)
    ok = load_query_mask(Q, i, s, (i < sizes.Nq) & (s < sizes.Lq))
    pointers = locate_rows(Q, i, s)[:, None] + (columns * Q.stride_d)[None, :]
    return gl.load(pointers, mask=ok[:, None] & (columns < d)[None, :], other=0.0)


@gluon.jit
def sum_accumulators(a, b, C: gl.constexpr):
    """Of the halves' rows, the sum of each query."""
    GROUPS: gl.constexpr = 2 * C.MMA_ROWS // C.ROWS_PER_QUERY
    return sum_in_order(a, GROUPS, C.ROWS_PER_QUERY // 2) + sum_in_order(b, GROUPS, C.ROWS_PER_QUERY // 2)
