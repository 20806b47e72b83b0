"""Half of a warp group's query rows, as the kernels of sm_90 keep it: similarities to a tile, and the best so far."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from ...common.primitives import NO_TOKEN, nan_max
from ...formats.encoded import INT8_LOW_SCALE
from .norms import scale_similarities

UNRESOLVED = gl.constexpr(-2)  # the winner of a maximum that is NaN or -inf, until it is looked for


class Accumulator(NamedTuple):
    """64 rows of a warp group: their similarities to the tile at hand, and per lane of a row its best so far."""

    S: Any
    best: Any
    where: Any


@gluon.jit
def split_lanes(S):
    """A row's columns as [N // 8, 4, 2]: wgmma spreads a row over the 4 lanes of a quad, so the other axes stay in a
    thread."""
    return gl.reshape(S, (S.shape[0], S.shape[1] // 8, 4, 2))


@gluon.jit
def _select_first_larger(v0, c0, v1, c1):
    """The larger of two values with its column, the first where they are equal. NaN wins, but may lose its column."""
    return nan_max(v0, v1), gl.where(v1 > v0, c1, c0)


@gluon.jit
def _make_axis_indices(n: gl.constexpr, AXIS: gl.constexpr, layout: gl.constexpr):
    """0, 1, .. n - 1 along axis 1 or 3 of a 4-D layout."""
    if AXIS == 1:
        x = gl.arange(0, n, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
        x = gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 2), 3)
    else:
        x = gl.arange(0, n, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
        x = gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 1), 2)
    return x


@gluon.jit
def reduce_tile(S, best, where, t0, C: gl.constexpr):
    """`best` and `where` after a tile. Columns are constants of the compiled code, relative to the lane."""
    x = split_lanes(S)
    if C.ARGMAX:
        LAYOUT: gl.constexpr = x.type.layout
        column = _make_axis_indices(S.shape[1] // 8, 1, LAYOUT) * 8 + _make_axis_indices(2, 3, LAYOUT)
        x, column = gl.broadcast(x, column)
        m, column = gl.reduce(gl.reduce((x, column), 3, _select_first_larger), 1, _select_first_larger)
        where = gl.where(m > best, column + t0, where)
    else:
        m = gl.reduce(gl.reduce(x, 3, nan_max), 1, nan_max)
    return nan_max(best, m), where


@gluon.jit
def _combine_terms(hi, lo):
    return hi * INT8_LOW_SCALE + lo


@gluon.jit
def join_terms(S, C: gl.constexpr):
    """Products as those of query rows: hi and lo of a row lie 8 apart, in one thread. With C.SMALL_M rows are
    columns."""
    if C.INT8_TERMS == 2 and C.SMALL_M:
        S = gl.reshape(gl.reduce(gl.reshape(S, (C.BN, C.MMA_ROWS // 8, 2, 8)), 2, _combine_terms), (C.BN, C.MMA_ROWS))
    elif C.INT8_TERMS == 2:
        S = gl.reshape(gl.reduce(gl.reshape(S, (C.MMA_ROWS // 8, 2, 8, C.BN)), 1, _combine_terms), (C.MMA_ROWS, C.BN))
    return S


@gluon.jit
def accumulate_tile(S, inverse, half, start, C: gl.constexpr):
    """A half after a tile that begins with token `start`."""
    best, where = reduce_tile(scale_similarities(join_terms(S, C), inverse, C), half.best, half.where, start, C)
    return Accumulator(S, best, where)


@gluon.jit
def compiler_barrier_accumulator(half, C: gl.constexpr):
    """Nothing: but as the compiler sees it, `half.S` is rewritten once `half.best` is known.

    So the next product may overwrite the registers of `half.S`. Without it the reduction sinks below the product, which
    then needs a copy of them, and ptxas lets one product at a time run.
    """
    if C.ARGMAX:
        S, best, where = warpgroup_mma_wait(0, [half.S, half.best, half.where])
    else:
        S, best = warpgroup_mma_wait(0, [half.S, half.best])
        where = half.where
    return Accumulator(S, best, where)


@gluon.jit
def reset_accumulator(S, C: gl.constexpr):
    """A half that has seen no tile; `S` only lends its registers."""
    x = join_terms(S, C)
    if x.dtype == gl.int32 and not C.PRECOMPUTED_SCALES:
        none = gl.full_like(x, -(2**31))
    else:
        none = gl.full_like(x.to(gl.float32), float("-inf"))
    best = gl.reduce(gl.reduce(split_lanes(none), 3, nan_max), 1, nan_max)
    where = gl.full_like(best, 0).to(gl.int32) + NO_TOKEN if C.ARGMAX else 0
    return Accumulator(S, best, where)


@gluon.jit
def reset_accumulators(halves, C: gl.constexpr):
    return reset_accumulator(halves[0].S, C), reset_accumulator(halves[1].S, C)


@gluon.jit
def select_argmax(half, best, keep, unresolved):
    """Winners of a half's rows, UNRESOLVED of those that are kept and whose maximum is NaN or -inf, -1 of others; and
    which rows ever were unresolved."""
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, half.best.type.layout))
    where = gl.where(half.where == NO_TOKEN, NO_TOKEN, half.where + 2 * lane[None, :])
    where = gl.min(gl.where(half.best == best[:, None], where, NO_TOKEN), axis=1)
    unresolved = unresolved | (keep & (where == NO_TOKEN)).to(gl.int32)
    return gl.where(keep, gl.where(where == NO_TOKEN, UNRESOLVED, where), -1), unresolved
