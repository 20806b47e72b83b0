"""Query rows of a consumer warp group in the sm_90 kernels: location, loading, and the sum of each query.

A tensor core product has C.MMA_ROWS query rows. A query occupies C.ROWS_PER_QUERY of the rows of the two accumulators.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.primitives import load_query_mask, locate_rows, sum_in_order


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
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C.BD, C.BD // 8], [4, 1], [1, 0])
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
