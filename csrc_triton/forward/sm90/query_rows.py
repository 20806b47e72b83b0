"""Which query rows a warp group of the kernels of sm_90 has, and what their maxima add up to."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.primitives import ordered_sum, query_keep, row_pointers


@gluon.jit
def slots_of(r, first, H: gl.constexpr, parts, C: gl.constexpr):
    """Query and token of rows `r` of half H: each query's tokens are split between the halves, first half first.

    A warp then holds whole queries of up to half its rows. `first` is the first group of the warp group; a query longer
    than a warp group's rows takes several groups, its `parts`. With C.FEW one half holds all rows.
    """
    HALF_SLOT: gl.constexpr = C.SLOT if C.FEW else C.SLOT // 2
    group = first + r // HALF_SLOT
    return group // parts, (group % parts) * C.SLOT + H * HALF_SLOT + r % HALF_SLOT


@gluon.jit
def slot_rows(first, H: gl.constexpr, parts, layout: gl.constexpr, C: gl.constexpr):
    """The same of all rows of half H."""
    return slots_of(gl.arange(0, C.ROWS, layout=layout), first, H, parts, C)


@gluon.jit
def half_queries(Q, first, H: gl.constexpr, parts, sizes, d, C: gl.constexpr):
    """The rows of half H, zeros where masked or absent."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C.BD, C.BD // 8], [4, 1], [1, 0])
    columns = gl.arange(0, C.BD, layout=gl.SliceLayout(0, LAYOUT))
    i, s = slot_rows(first, H, parts, gl.SliceLayout(1, LAYOUT), C)
    ok = query_keep(Q, i, s, (i < sizes.Nq) & (s < sizes.Lq))
    pointers = row_pointers(Q, i, s)[:, None] + (columns * Q.stride_d)[None, :]
    return gl.load(pointers, mask=ok[:, None] & (columns < d)[None, :], other=0.0)


@gluon.jit
def sums_of(a, b, C: gl.constexpr):
    """Of the halves' rows, the sum of each query."""
    GROUPS: gl.constexpr = 2 * C.ROWS // C.SLOT
    return ordered_sum(a, GROUPS, C.SLOT // 2) + ordered_sum(b, GROUPS, C.SLOT // 2)
