"""Soft maxima of half of a warp group's query rows: as `halves`, with the sums of lanes in the place of winners."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .common import nan_max, ordered_sum
from .halves import Half, lanes
from .soft import reference_of, rescaled, soft_lanes, soft_maximum


@gluon.jit
def rates(rate, half):
    """`rate` beside the rows of a half."""
    layout: gl.constexpr = gl.SliceLayout(1, half.best.type.layout)
    return gl.full([half.best.shape[0]], 0.0, gl.float32, layout) + rate


@gluon.jit
def softly_taken(S, half, left, rate, LAST: gl.constexpr, C: gl.constexpr):
    """A half after a tile whose first `left` tokens are the document's: all of them unless it may be the LAST one.

    Else comparisons that one tile in a document needs are made for each.
    """
    kept = S
    if LAST and left < C.BN:
        column = gl.arange(0, C.BN, layout=gl.SliceLayout(0, S.type.layout))
        kept = gl.where((column < left)[None, :], S, float("-inf"))
    x = lanes(kept)
    m = gl.reduce(gl.reduce(x, 3, nan_max), 1, nan_max)
    best, total = soft_lanes(half.best, half.where, m, x, rates(rate, half)[:, None])
    return Half(S, best, total)


@gluon.jit
def soft_rows(half, tau, rate):
    """The soft maxima of a half's rows, added up as `soft_merged` does."""
    ROWS: gl.constexpr = half.best.shape[0]
    top = reference_of(gl.reduce(half.best, 1, nan_max))
    each = rates(rate, half)
    total = rescaled(half.where, half.best, top[:, None], each[:, None], 0.0)
    total = ordered_sum(gl.reshape(total, (ROWS * 4,)), ROWS, 4)
    return soft_maximum(top, gl.convert_layout(total, top.type.layout), tau, each, 1.0)
