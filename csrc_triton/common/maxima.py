"""Maxima over tiles of similarities and their argmax, kept per lane and merged once at the end of a document.

A lane is a share of the tokens of a row. On GPUs whose tensor cores spread a row over 4 threads, each of these threads
is a lane. A reduction over a tile then exchanges no data between threads.
"""

import triton
import triton.language as tl

from .primitives import NO_TOKEN, nan_max


@triton.jit
def expand_rows(x, C: tl.constexpr):
    """Return values of query rows in a shape that broadcasts against a tile."""
    return x[None, :] if C.TOKENS_FIRST else x[:, None]


@triton.jit
def expand_tokens(x, C: tl.constexpr):
    """Return values of document tokens in a shape that broadcasts against a tile."""
    return x[:, None] if C.TOKENS_FIRST else x[None, :]


@triton.jit
def select_first_larger(v0, c0, v1, c1):
    """Return the larger of two values with its column, or the first column if they are equal.

    NaN wins, but its column may be lost.
    """
    return nan_max(v0, v1), tl.where(v1 > v0, c1, c0)


@triton.jit
def fill_lanes(value, dtype: tl.constexpr, C: tl.constexpr):
    """Return a tensor with `value` for each lane of each row.

    A row has C.LANES lanes. With C.TOKENS_FIRST each of the BN tokens of a tile is a lane.
    """
    return tl.full((C.BN, C.BM) if C.TOKENS_FIRST else (C.BM, C.LANES), value, dtype)


@triton.jit
def init_lane_state(C: tl.constexpr):
    """Return the state of each lane before the first tile: no token, or with C.SOFT an empty sum."""
    return fill_lanes(0, tl.float32, C) if C.SOFT else fill_lanes(NO_TOKEN, tl.int32, C)


@triton.jit
def split_lanes(S):
    """Return S `[M, N]` as `[M, N // 8, 4, 2]`, whose axis 2 is the lane of a quad.

    WGMMA spreads a row over the 4 lanes of a quad. Axes 1 and 3 therefore stay within a thread.
    """
    return tl.reshape(S, (S.shape[0], S.shape[1] // 8, 4, 2))


@triton.jit
def reduce_quad_maxima(S):
    """Return the maximum of S `[M, N]` in each of the 4 lanes of a row, with no exchange between threads."""
    return tl.reduce(tl.reduce(split_lanes(S), 3, nan_max), 1, nan_max)


@triton.jit
def reduce_lane_maxima(S, C: tl.constexpr):
    """Return the maximum of each lane over a tile, with no exchange between threads unless LANES is 1."""
    if C.TOKENS_FIRST:
        m = S
    elif C.LANES == 1:
        m = tl.reduce(S, 1, nan_max)[:, None]
    else:
        m = reduce_quad_maxima(S)
    return m


@triton.jit
def reduce_lane_argmax(S, t, keep, t0, C: tl.constexpr):
    """Return the maximum of each lane over a tile, and the first token that attains it.

    With several lanes the tokens are relative to their lane, whose offset `merge_lanes` adds. With 4 lanes the columns
    are constants of the compiled code, at 2.5 instructions per element.
    """
    if C.TOKENS_FIRST:
        m = S
        where = fill_lanes(0, tl.int32, C) + t0
    elif C.LANES == 1:
        m = tl.reduce(S, 1, nan_max)[:, None]
        where = tl.min(tl.where((S == m) & keep[None, :], t[None, :], NO_TOKEN), axis=1)[:, None]
    else:
        column = tl.arange(0, C.BN // 8)[None, :, None, None] * 8 + tl.arange(0, 2)[None, None, None, :]
        column = tl.broadcast_to(column, (C.BM, C.BN // 8, 4, 2))
        m, where = tl.reduce((split_lanes(S), column), 3, select_first_larger)
        m, where = tl.reduce((m, where), 1, select_first_larger)
        where += t0
    return m, where


@triton.jit
def merge_lane_maxima(best, C: tl.constexpr):
    """Return the maximum of each row over its lanes."""
    return tl.reduce(best, 0 if C.TOKENS_FIRST else 1, nan_max)


@triton.jit
def find_first_token(hit, tokens, C: tl.constexpr):
    """Return the lowest token of each row for which `hit` is set, else NO_TOKEN."""
    return tl.min(tl.where(hit, tokens, NO_TOKEN), axis=0 if C.TOKENS_FIRST else 1)


@triton.jit
def select_lowest_largest(v0, t0, v1, t1):
    """Return the larger of two values with its token, or the lower token if they are equal.

    NaN wins, but its token may be lost.
    """
    return nan_max(v0, v1), tl.where((v1 > v0) | ((v1 == v0) & (t1 < t0)), t1, t0)


@triton.jit
def merge_lanes(best, where, Ld, C: tl.constexpr):
    """Return the maximum of each row over its lanes, and the lowest token that attains it, or NO_TOKEN for NaN.

    A single reduction computes both. Reducing values and then tokens would exchange data between warps twice.
    """
    if C.TOKENS_FIRST:
        tokens = where + tl.arange(0, C.BN)[:, None]
        row_best, first = tl.reduce((best, tl.where(where == NO_TOKEN, NO_TOKEN, tokens)), 0, select_lowest_largest)
    elif C.LANES > 1:
        tokens = where + 2 * tl.arange(0, C.LANES)[None, :]
        row_best, first = tl.reduce((best, tl.where(where == NO_TOKEN, NO_TOKEN, tokens)), 1, select_lowest_largest)
    else:
        row_best, first = tl.reduce((best, where), 1, select_lowest_largest)
    has_token = (first != NO_TOKEN) & (row_best == row_best)
    return row_best, tl.where(has_token, tl.minimum(first, Ld - 1), NO_TOKEN)
