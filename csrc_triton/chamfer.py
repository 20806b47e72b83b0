"""Nearest points of two clouds, both ways in one pass over their distances.

A program has BM points of P and one part of R. It keeps no index: the least distance of each point goes, above the
number of the part that it was found in, into a 64-bit key, and an atomic minimum keeps the least key: the result does
not hang on the order. `chamfer_winners` then looks at that one part again, distance by distance.
"""

import triton
import triton.language as tl

from .common import condition, load_rows, wide

_LOWEST = tl.constexpr(-(2**31))
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _length(X, batch):
    """How many points a cloud has, and whether that number can be."""
    count = batch * 0 + X.count
    ok = batch >= 0
    if X.lengths is not None:
        length = tl.load(X.lengths + batch)
        ok = (length >= 0) & (length <= X.count)
        count = tl.where(ok, length, 0)
    return count.to(tl.int32), ok


@triton.jit
def _points(X, batch, n):
    return X.ptr + batch.to(tl.int64) * X.stride_batch + n.to(tl.int64) * X.stride_n


@triton.jit
def _least(a, b):
    """NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _added(S, x, y, C: tl.constexpr):
    """Distances with those of one more coordinate; sums of squares are rounded in one way, however compiled."""
    if C.METRIC == "l1":
        S += tl.abs(x - y)
    else:
        S = tl.fma(x - y, x - y, S)
    return S


@triton.jit
def _coordinate(pointers, stride_d, k):
    return tl.load(pointers + wide(k) * stride_d).to(tl.float32)


@triton.jit
def _few_coordinates(pointers, stride_d, C: tl.constexpr):
    """The C.BD <= 4 coordinates of points; what is beyond them repeats the first, and is not looked at."""
    x = _coordinate(pointers, stride_d, 0)
    y, z, w = x, x, x
    if C.BD > 1:
        y = _coordinate(pointers, stride_d, 1)
    if C.BD > 2:
        z = _coordinate(pointers, stride_d, 2)
    if C.BD > 3:
        w = _coordinate(pointers, stride_d, 3)
    return x, y, z, w


@triton.jit
def _by_coordinates(p, r, C: tl.constexpr):
    """Distances ``[BM, BN]`` of points with few coordinates."""
    S = _added(tl.full((C.BM, C.BN), 0, tl.float32), p[0][:, None], r[0][None, :], C)
    if C.BD > 1:
        S = _added(S, p[1][:, None], r[1][None, :], C)
    if C.BD > 2:
        S = _added(S, p[2][:, None], r[2][None, :], C)
    if C.BD > 3:
        S = _added(S, p[3][:, None], r[3][None, :], C)
    return S


@triton.jit
def _by_loop(at_p, at_r, P, R, d, C: tl.constexpr):
    """The same of any number of coordinates, read one by one."""
    S = tl.full((C.BM, C.BN), 0, tl.float32)
    for k in range(0, d):
        x = _coordinate(at_p, P.stride_d, k)
        y = _coordinate(at_r, R.stride_d, k)
        S = _added(S, x[:, None], y[None, :], C)
    return S


@triton.jit
def _by_products(at_p, at_r, P, R, d, C: tl.constexpr):
    """Squared distances as ``|p|^2 + |r|^2 - 2 <p, r>``: near enough to find a part."""
    S = tl.full((C.BM, C.BN), 0, tl.float32)
    of_p = tl.full((C.BM,), 0, tl.float32)
    of_r = tl.full((C.BN,), 0, tl.float32)
    for c0 in range(0, d, C.BD):
        columns = c0 + tl.arange(0, C.BD)
        x = load_rows(at_p, tl.full((C.BM,), 1, tl.int1), columns, d, P.stride_d, C.WIDE)
        y = load_rows(at_r, tl.full((C.BN,), 1, tl.int1), columns, d, R.stride_d, C.WIDE)
        S = tl.dot(x, tl.trans(y), S, input_precision=C.PRECISION)
        of_p += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
        of_r += tl.sum(y.to(tl.float32) * y.to(tl.float32), axis=1)
    return of_p[:, None] + (of_r[None, :] - 2.0 * S)


@triton.jit
def _keep_least(keys, distances, part, ok):
    """Keep the least keys: distances in their order, NaN below all, and where they were found.

    What lies there never rises: what is no less than an old value of it need not be tried.
    """
    bits = distances.to(tl.int32, bitcast=True)
    bits = tl.where(distances == distances, bits ^ ((bits >> 31) & _MAGNITUDE), _LOWEST)
    key = (bits.to(tl.int64) << 32) | wide(part)
    tl.atomic_min(keys, key, mask=ok & (key < tl.load(keys, mask=ok, other=0)), sem="relaxed")


@triton.jit(do_not_specialize=["part"])
def chamfer_nearest(P, R, of_P, of_R, part, d, C: tl.constexpr):
    """Lower the keys ``of_P [B, N]`` and ``of_R [B, M]`` to those of BM points and `part` others.

    Programs ``B * row tiles * parts``. A key of `of_P` tells a part of R, one of `of_R` a row tile of P.
    """
    tiles, parts = tl.cdiv(P.count, C.BM), tl.cdiv(R.count, part)
    batch = tl.program_id(0) // (tiles * parts)
    tile = tl.program_id(0) // parts % tiles
    which = tl.program_id(0) % parts
    N, _ = _length(P, batch)
    M, _ = _length(R, batch)
    begin = which * part
    end = tl.minimum(begin + part, M)
    end = tl.where(tile * C.BM < N, end, begin)  # else nobody is here

    i = tile * C.BM + tl.arange(0, C.BM)
    at_p = _points(P, batch, tl.maximum(tl.minimum(i, N - 1), 0))  # the last again: that changes no minimum
    if C.BD <= 4 and not C.PRODUCTS:
        p = _few_coordinates(at_p, P.stride_d, C)
    best = tl.full((C.BM, C.BN), float("inf"), tl.float32)
    for first in range(begin, end, C.BN):
        j = first + tl.arange(0, C.BN)
        at_r = _points(R, batch, tl.minimum(j, end - 1))
        if C.PRODUCTS:
            S = _by_products(at_p, at_r, P, R, d, C)
        elif C.BD <= 4:
            S = _by_coordinates(p, _few_coordinates(at_r, R.stride_d, C), C)
        else:
            S = _by_loop(at_p, at_r, P, R, d, C)
        best = _least(best, S)
        _keep_least(of_R + batch.to(tl.int64) * R.count + j, tl.reduce(S, 0, _least), tile, j < end)
    mask = (i < N) & condition(begin < end)
    _keep_least(of_P + batch.to(tl.int64) * P.count + i, tl.reduce(best, 1, _least), which, mask)


@triton.jit
def _steps(own, others, there, X, Y, d, C: tl.constexpr):
    """Distances ``[BM, BN]`` of points to others of their own; what is not `there` is not read."""
    S = tl.full((C.BM, C.BN), 0, tl.float32)
    FEW: tl.constexpr = C.BD
    if FEW <= 4:
        for k in tl.static_range(FEW):
            x = _coordinate(own, X.stride_d, k)
            y = tl.load(others + wide(k) * Y.stride_d, mask=there, other=0.0).to(tl.float32)
            S = _added(S, x[:, None], y, C)
    else:
        for c0 in range(0, d, C.BD):
            columns = c0 + tl.arange(0, C.BD)
            ok = columns < d
            x = tl.load(own[:, None] + (columns.to(tl.int64) * X.stride_d)[None, :], mask=ok[None, :], other=0.0)
            at = others[:, :, None] + (columns.to(tl.int64) * Y.stride_d)[None, None, :]
            y = tl.load(at, mask=there[:, :, None] & ok[None, None, :], other=0.0)
            none = tl.full((C.BM, C.BN, C.BD), 0, tl.float32)
            S += tl.sum(_added(none, x.to(tl.float32)[:, None, :], y.to(tl.float32), C), axis=2)
    return S


@triton.jit(do_not_specialize=["points", "part"])
def chamfer_winners(X, Y, keys, distances, nearest, points, part, d, C: tl.constexpr):
    """Of BM of all `points` of X, the distance to the nearest of Y and which that is, in the part that their keys tell.

    Beyond the end of a cloud 0 and -1; inf and -1 where there is nobody, NaN and -1 where a length cannot be.
    """
    at = tl.program_id(0).to(tl.int64) * C.BM + tl.arange(0, C.BM)
    inside = at < points
    at = tl.where(inside, at, 0)
    batch = at // X.count
    n = at % X.count
    N, ok = _length(X, batch)
    M, other_ok = _length(Y, batch)
    ok = ok & other_ok
    key = tl.load(keys + at)
    there = ok & (n < N) & (M > 0)
    begin = tl.where(there, key.to(tl.int32) * part, 0)
    end = tl.where(there, tl.minimum(begin + part, M), 1)
    own = _points(X, batch, n)
    best = tl.full((C.BM, C.BN), float("inf"), tl.float32)
    where = tl.full((C.BM, C.BN), 0, tl.int32)
    for first in range(0, tl.max(end - begin, axis=0), C.BN):
        j = tl.minimum(begin[:, None] + first + tl.arange(0, C.BN)[None, :], end[:, None] - 1)
        others = _points(Y, batch[:, None], j)
        S = _steps(own, others, there[:, None] & (j >= 0), X, Y, d, C)
        better = (S < best) | ((S != S) & (best == best)) | (first == 0)
        where = tl.where(better, j, where)
        best = tl.where(better, S, best)
    least = tl.reduce(best, 1, _least)
    hit = (best == least[:, None]) | (best != best)
    index = tl.min(tl.where(hit, where, 2147483647), axis=1)
    # A part that holds NaN by products alone is too far off for them.
    distance = tl.where((key >> 32).to(tl.int32) == _LOWEST, float("nan"), least)
    distance = tl.where(there, distance, tl.where(n < N, float("inf"), 0.0))
    tl.store(distances + at, tl.where(ok, distance, float("nan")), mask=inside)
    tl.store(nearest + at, tl.where(there, index, -1), mask=inside)
