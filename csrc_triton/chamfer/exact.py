"""Nearest points of two clouds, both ways in one pass over their distances.

A program has BM points of P and one part of R. It keeps no index: the least distance of each point goes, above a code
of the few points that it may be of, into a 64-bit key, and an atomic minimum keeps the least key: the result does not
hang on the order. `chamfer_winners` then looks at these few again, distance by distance. `chamfer_products` has squared
distances of many coordinates.
"""

import triton
import triton.language as tl

from ..common.primitives import to_int64, to_mask

NAN_ORDER = tl.constexpr(-(2**31))  # in a key, of a NaN
_NO_POINT = tl.constexpr(2**31 - 1)
_COUNT_UNIT = tl.constexpr(1 << 16)  # beside a class


@triton.jit
def load_cloud_length(X, batch):
    """How many points a cloud has, and whether that number can be."""
    count = batch * 0 + X.count
    ok = batch >= 0
    if X.lengths is not None:
        length = tl.load(X.lengths + batch)
        ok = (length >= 0) & (length <= X.count)
        count = tl.where(ok, length, 0)
    return count.to(tl.int32), ok


@triton.jit
def _locate_points(X, batch, n):
    return X.ptr + batch.to(tl.int64) * X.stride_batch + n.to(tl.int64) * X.stride_n


@triton.jit
def nan_min(a, b):
    """NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _add_coordinate(S, x, y, C: tl.constexpr):
    """Distances with those of one more coordinate; sums of squares are rounded in one way, however compiled."""
    if C.METRIC == "l1":
        S += tl.abs(x - y)
    else:
        S = tl.fma(x - y, x - y, S)
    return S


@triton.jit
def _load_coordinate(pointers, stride_d, k):
    return tl.load(pointers + to_int64(k) * stride_d).to(tl.float32)


@triton.jit
def _load_few_coordinates(pointers, stride_d, C: tl.constexpr):
    """The C.BD <= 4 coordinates of points; what is beyond them repeats the first, and is not looked at."""
    x = _load_coordinate(pointers, stride_d, 0)
    y, z, w = x, x, x
    if C.BD > 1:
        y = _load_coordinate(pointers, stride_d, 1)
    if C.BD > 2:
        z = _load_coordinate(pointers, stride_d, 2)
    if C.BD > 3:
        w = _load_coordinate(pointers, stride_d, 3)
    return x, y, z, w


@triton.jit
def _compute_unrolled_distances(p, r, C: tl.constexpr):
    """Distances ``[BM, BN]`` of points with few coordinates."""
    S = _add_coordinate(tl.full((C.BM, C.BN), 0, tl.float32), p[0][:, None], r[0][None, :], C)
    if C.BD > 1:
        S = _add_coordinate(S, p[1][:, None], r[1][None, :], C)
    if C.BD > 2:
        S = _add_coordinate(S, p[2][:, None], r[2][None, :], C)
    if C.BD > 3:
        S = _add_coordinate(S, p[3][:, None], r[3][None, :], C)
    return S


@triton.jit
def _compute_looped_distances(at_p, at_r, P, R, d, C: tl.constexpr):
    """The same of any number of coordinates, read one by one."""
    S = tl.full((C.BM, C.BN), 0, tl.float32)
    for k in range(0, d):
        x = _load_coordinate(at_p, P.stride_d, k)
        y = _load_coordinate(at_r, R.stride_d, k)
        S = _add_coordinate(S, x[:, None], y[None, :], C)
    return S


@triton.jit
def _load_own_coordinates(P, at_p, C: tl.constexpr):
    """Coordinates that a program keeps of its points, and NaN unless all of these are finite."""
    p = _load_few_coordinates(at_p, P.stride_d, C)
    return p, _flag_non_finite(p, tl.full((C.BM,), 0, tl.float32), C)


@triton.jit
def _flag_non_finite(x, odd, C: tl.constexpr):
    """`odd`, or NaN where a coordinate is not finite."""
    odd = tl.fma(x[0], 0.0, odd)
    if C.BD > 1:
        odd = tl.fma(x[1], 0.0, odd)
    if C.BD > 2:
        odd = tl.fma(x[2], 0.0, odd)
    if C.BD > 3:
        odd = tl.fma(x[3], 0.0, odd)
    return odd


@triton.jit
def _compute_step(P, R, of_R, at_p, p, batch, first, end, odd, d, C: tl.constexpr, CAREFUL: tl.constexpr):
    """Distances to BN points from `first` on as integers in their order, and what there is of these points' keys.

    That of a NaN is the least with CAREFUL, else the largest, as of its bits.
    """
    j = first + tl.arange(0, C.BN)
    keys = tl.load(of_R + batch.to(tl.int64) * R.count + j, mask=j < end, other=0)
    at_r = _locate_points(R, batch, tl.minimum(j, end - 1))  # the last again: that changes no minimum
    if C.BD <= 4:
        r = _load_few_coordinates(at_r, R.stride_d, C)
        odd = _flag_non_finite(r, odd, C)
        S = _compute_unrolled_distances(p, r, C)
    else:
        S = _compute_looped_distances(at_p, at_r, P, R, d, C)
    bits = S.to(tl.int32, bitcast=True)
    if CAREFUL:
        bits = tl.where(S == S, bits, NAN_ORDER)
    return bits, keys, odd


@triton.jit
def make_keys(distances, codes):
    """Keys of distances as integers in their order."""
    return (distances.to(tl.int64) << 32) | codes.to(tl.int64)


@triton.jit
def lower_keys(keys, key, old, ok):
    """Lower `keys` to these. They never rise: what is no less than an old value need not be tried."""
    tl.atomic_min(keys, key, mask=ok & (key < old), sem="relaxed")


@triton.jit
def _scan_part(P, R, of_R, at_p, p, batch, tile, begin, end, odd, d, C: tl.constexpr, CAREFUL: tl.constexpr):
    """The least distance of each of BM points in each of BN classes of the others; theirs go to their keys.

    Two steps at a time: of three numbers one instruction finds the least.
    """
    best = tl.full((C.BM, C.BN), _NO_POINT, tl.int32)
    keys = of_R + batch.to(tl.int64) * R.count + tl.arange(0, C.BN)
    for first in range(begin, end, 2 * C.BN):
        a, old_a, odd = _compute_step(P, R, of_R, at_p, p, batch, first, end, odd, d, C, CAREFUL)
        b, old_b, odd = _compute_step(P, R, of_R, at_p, p, batch, first + C.BN, end, odd, d, C, CAREFUL)
        best = tl.minimum(tl.minimum(best, a), b)
        j = first + tl.arange(0, C.BN)
        lower_keys(keys + first, make_keys(tl.min(a, axis=0), j * 0 + tile), old_a, j < end)
        lower_keys(keys + (first + C.BN), make_keys(tl.min(b, axis=0), j * 0 + tile), old_b, j + C.BN < end)
    return best, odd


@triton.jit(do_not_specialize=["part"])
def chamfer_nearest(P, R, of_P, of_R, part, d, C: tl.constexpr):
    """Lower the keys ``of_P [B, N]`` and ``of_R [B, M]`` to those of BM points and `part` others, a multiple of 2 BN.

    Programs ``B * row tiles * parts``. A key of `of_R` tells a row tile of P; one of `of_P` a part of R and the class
    of the nearest, its number in the part modulo BN, or BN if several classes have one.
    """
    tiles, parts = tl.cdiv(P.count, C.BM), tl.cdiv(R.count, part)
    batch = tl.program_id(0) // (tiles * parts)
    tile = tl.program_id(0) // parts % tiles
    which = tl.program_id(0) % parts
    N, _ = load_cloud_length(P, batch)
    M, _ = load_cloud_length(R, batch)
    begin = which * part
    end = tl.minimum(begin + part, M)
    end = tl.where(tile * C.BM < N, end, begin)  # else nobody is here

    i = tile * C.BM + tl.arange(0, C.BM)
    at_p = _locate_points(P, batch, tl.maximum(tl.minimum(i, N - 1), 0))
    odd = tl.full((C.BN,), 0, tl.float32)
    if C.BD <= 4:
        p, odd_p = _load_own_coordinates(P, at_p, C)
        best, odd = _scan_part(P, R, of_R, at_p, p, batch, tile, begin, end, odd, d, C, False)
        if tl.sum(odd, axis=0) + tl.sum(odd_p, axis=0) != 0.0:  # rare
            best, odd = _scan_part(P, R, of_R, at_p, p, batch, tile, begin, end, odd, d, C, True)
    else:
        best, odd = _scan_part(P, R, of_R, at_p, 0, batch, tile, begin, end, odd, d, C, True)
    least = tl.min(best, axis=1)
    hits = tl.sum(tl.where(best == least[:, None], _COUNT_UNIT + tl.arange(0, C.BN)[None, :], 0), axis=1)
    codes = which * (C.BN + 1) + tl.where(hits < 2 * _COUNT_UNIT, hits & (_COUNT_UNIT - 1), C.BN)
    keys = of_P + batch.to(tl.int64) * P.count + i
    mask = (i < N) & to_mask(begin < end)
    lower_keys(keys, make_keys(least, codes), tl.load(keys, mask=mask, other=0), mask)


@triton.jit
def _compute_pair_distances(own, others, there, X, Y, d, C: tl.constexpr):
    """Distances ``[BM, BN]`` of points to others of their own; what is not `there` is not read."""
    S = tl.full((C.BM, C.BN), 0, tl.float32)
    FEW: tl.constexpr = C.BD
    if FEW <= 4:
        for k in tl.static_range(FEW):
            x = _load_coordinate(own, X.stride_d, k)
            y = tl.load(others + to_int64(k) * Y.stride_d, mask=there, other=0.0).to(tl.float32)
            S = _add_coordinate(S, x[:, None], y, C)
    else:
        for c0 in range(0, d, C.BD):
            columns = c0 + tl.arange(0, C.BD)
            ok = columns < d
            x = tl.load(own[:, None] + (columns.to(tl.int64) * X.stride_d)[None, :], mask=ok[None, :], other=0.0)
            at = others[:, :, None] + (columns.to(tl.int64) * Y.stride_d)[None, None, :]
            y = tl.load(at, mask=there[:, :, None] & ok[None, None, :], other=0.0)
            none = tl.full((C.BM, C.BN, C.BD), 0, tl.float32)
            S += tl.sum(_add_coordinate(none, x.to(tl.float32)[:, None, :], y.to(tl.float32), C), axis=2)
    return S


@triton.jit
def _decode_key(code, length, size, C: tl.constexpr):
    """Whom a key's code names: where they begin and end, how many there are, and whether they are a whole part.

    A part of `size` points has KINDS classes of runs of RUN points, by turns; a code above these is the whole part.
    With one class all codes are.
    """
    part = code // (C.KEY_CLASSES + 1) if C.KEY_CLASSES > 1 else code
    kind = code % (C.KEY_CLASSES + 1) if C.KEY_CLASSES > 1 else code * 0 + C.KEY_CLASSES
    whole = kind == C.KEY_CLASSES
    begin = part * size
    end = tl.minimum(begin + size, length)
    return begin + tl.where(whole, 0, kind * C.CLASS_RUN), end, tl.where(whole, size, size // C.KEY_CLASSES), whole


@triton.jit(do_not_specialize=["points", "size"])
def chamfer_select(X, Y, keys, distances, nearest, points, size, d, C: tl.constexpr):
    """Of BM of all `points` of X, the distance to the nearest of Y and which that is, of those that their keys tell.

    Beyond the end of a cloud 0 and -1; inf and -1 where there is nobody, NaN and -1 where a length cannot be.
    """
    at = tl.program_id(0).to(tl.int64) * C.BM + tl.arange(0, C.BM)
    inside = at < points
    at = tl.where(inside, at, 0)
    batch = at // X.count
    n = at % X.count
    N, ok = load_cloud_length(X, batch)
    M, other_ok = load_cloud_length(Y, batch)
    ok = ok & other_ok
    key = tl.load(keys + at)
    there = ok & (n < N) & (M > 0)
    begin, end, count, whole = _decode_key(tl.where(there, key.to(tl.int32), 0), M, size, C)
    own = _locate_points(X, batch, n)
    best = tl.full((C.BM, C.BN), float("inf"), tl.float32)
    where = tl.full((C.BM, C.BN), 0, tl.int32)
    for first in range(0, tl.max(tl.where(there, count, 0), axis=0), C.BN):
        k = first + tl.broadcast_to(tl.arange(0, C.BN)[None, :], (C.BM, C.BN))
        if C.KEY_CLASSES > 1:
            k = tl.where(whole[:, None], k, k // C.CLASS_RUN * (C.KEY_CLASSES * C.CLASS_RUN) + k % C.CLASS_RUN)
        j = begin[:, None] + k
        j = tl.where((j < end[:, None]) & (k < size), j, begin[:, None])  # the first again: that changes nothing
        others = _locate_points(Y, batch[:, None], j)
        S = _compute_pair_distances(own, others, there[:, None] & (j >= 0), X, Y, d, C)
        better = (S < best) | ((S != S) & (best == best)) | (first == 0)
        where = tl.where(better, j, where)
        best = tl.where(better, S, best)
    least = tl.reduce(best, 1, nan_min)
    hit = (best == least[:, None]) | (best != best)
    index = tl.min(tl.where(hit, where, 2147483647), axis=1)
    # Who is NaN by products alone is too far off for them.
    distance = tl.where((key >> 32).to(tl.int32) == NAN_ORDER, float("nan"), least)
    distance = tl.where(there, distance, tl.where(n < N, float("inf"), 0.0))
    tl.store(distances + at, tl.where(ok, distance, float("nan")), mask=inside)
    tl.store(nearest + at, tl.where(there, index, -1), mask=inside)


@triton.jit(do_not_specialize=["points"])
def chamfer_slopes(X, Y, grad, grad_stride_batch, grad_stride_n, nearest, slopes, points, d, C: tl.constexpr):
    """What the gradients of the distances of X give its `points` points, of all clouds: ``slopes [points, d]``.

    0 where there is no nearest of Y, whatever lies there.
    """
    row = tl.program_id(0).to(tl.int64) * C.BM + tl.arange(0, C.BM)
    ok = row < points
    batch, n = row // X.count, row % X.count
    at = tl.load(nearest + row, mask=ok, other=-1)
    there = at >= 0
    g = tl.load(grad + batch * grad_stride_batch + n * grad_stride_n, mask=there, other=0.0)
    own, other = _locate_points(X, batch, n), _locate_points(Y, batch, at)
    for c0 in range(0, d, C.BD):
        k = c0 + tl.arange(0, C.BD)
        inside = (k < d)[None, :]
        offsets, mask = k.to(tl.int64)[None, :], there[:, None] & inside
        x = tl.load(own[:, None] + offsets * X.stride_d, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(other[:, None] + offsets * Y.stride_d, mask=mask, other=0.0).to(tl.float32)
        if C.METRIC == "l1":
            slope = (x > y).to(tl.float32) - (x < y).to(tl.float32)
        else:
            slope = 2 * (x - y)
        slope = tl.where(there[:, None], slope * g[:, None], 0.0)
        tl.store(slopes + row[:, None] * d + k[None, :], slope, mask=ok[:, None] & inside)
