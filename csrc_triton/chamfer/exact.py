"""Nearest points of two clouds in both directions, in one pass over the distances.

```text
distance(p, r) = sum_c (p_c - r_c)^2, or sum_c |p_c - r_c|
```

A 64-bit key holds the bits of a distance above a code that names a few candidate points. An atomic minimum keeps the
smallest key, so the result does not depend on the order of programs.

```text
chamfer_nearest, program = (cloud, BM points of P, part of R):
    best = no point                                  # [BM, BN], one value for each class of R points
    for first in range(begin, end, 2 * BN):          # two steps of BN points of R
        S = distances of BM points to BN points, as ordered integers
        best = min(best, S)
        atomic_min(of_R[points of the step], (min of S over BM, row tile of P))
    atomic_min(of_P[BM points], (min of best, part and class of the minimum))
chamfer_select, program = BM points:
    for the candidates that the key of a point names, BN at a time:
        S = distances of the point to these candidates
        best, index = minimum and its candidate
    distances, nearest = minimum over BN, lowest index that attains it
```

`chamfer_products` in `products` fills the keys of squared distances of many coordinates.

Invariants:

- `chamfer_nearest` adds the coordinates of a distance in ascending order, with an fma for squares.
- NaN has the smallest key. With few coordinates a fast pass ignores NaN, and a second pass runs if a point is not
  finite.
- A key never increases, so a program skips the atomic minimum if its value is not below an old value.
"""

import triton
import triton.language as tl

from ..common.primitives import to_int64, to_mask

NAN_ORDER = tl.constexpr(-(2**31))  # the ordered integer of a NaN
_NO_POINT = tl.constexpr(2**31 - 1)
_COUNT_UNIT = tl.constexpr(1 << 16)  # one hit, counted above the bits of a class


@triton.jit
def load_cloud_length(X, batch):
    """Return the number of points of a cloud, and whether the given length is valid."""
    count = batch * 0 + X.count
    ok = batch >= 0
    if X.lengths is not None:
        length = tl.load(X.lengths + batch)
        ok = (length >= 0) & (length <= X.count)
        count = tl.where(ok, length, 0)
    return count.to(tl.int32), ok


@triton.jit
def locate_points(X, batch, n):
    """Return pointers to points of a cloud."""
    return X.ptr + batch.to(tl.int64) * X.stride_batch + n.to(tl.int64) * X.stride_n


@triton.jit
def nan_min(a, b):
    """Return the minimum, or NaN if either is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _add_coordinate(S, x, y, C: tl.constexpr):
    """Add one coordinate to distances. Squares use an explicit fma, so the rounding does not depend on the compiler."""
    if C.METRIC == "l1":
        S += tl.abs(x - y)
    else:
        S = tl.fma(x - y, x - y, S)
    return S


@triton.jit
def _load_coordinate(pointers, stride_d, k):
    """Load one coordinate of points in fp32."""
    return tl.load(pointers + to_int64(k) * stride_d).to(tl.float32)


@triton.jit
def _load_few_coordinates(pointers, stride_d, C: tl.constexpr):
    """Load the C.BD <= 4 coordinates of points. Missing coordinates repeat the first and are not used."""
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
    """Return the distances `[BM, BN]` of points with at most 4 coordinates."""
    COORDINATES: tl.constexpr = C.BD
    S = tl.full((C.BM, C.BN), 0, tl.float32)
    for k in tl.static_range(COORDINATES):
        S = _add_coordinate(S, p[k][:, None], r[k][None, :], C)
    return S


@triton.jit
def _compute_looped_distances(at_p, at_r, P, R, d, C: tl.constexpr):
    """Return the distances `[BM, BN]` of points with any number of coordinates, loaded one by one."""
    S = tl.full((C.BM, C.BN), 0, tl.float32)
    for k in range(0, d):
        x = _load_coordinate(at_p, P.stride_d, k)
        y = _load_coordinate(at_r, R.stride_d, k)
        S = _add_coordinate(S, x[:, None], y[None, :], C)
    return S


@triton.jit
def _flag_non_finite(x, nan_flags, C: tl.constexpr):
    """Return `nan_flags`, or NaN where a coordinate is not finite."""
    COORDINATES: tl.constexpr = C.BD
    for k in tl.static_range(COORDINATES):
        nan_flags = tl.fma(x[k], 0.0, nan_flags)
    return nan_flags


@triton.jit
def _compute_step(P, R, keys_R, at_p, p, batch, first, end, nan_flags, d, C: tl.constexpr, CAREFUL: tl.constexpr):
    """Return distances to BN points from `first` on as ordered integers, and the present keys of these points.

    With CAREFUL a NaN becomes the smallest integer. Otherwise it is the largest, because of its bits.
    """
    j = first + tl.arange(0, C.BN)
    keys = tl.load(keys_R + batch.to(tl.int64) * R.count + j, mask=j < end, other=0)
    # Repeat the last point after the end, which changes no minimum.
    at_r = locate_points(R, batch, tl.minimum(j, end - 1))
    if C.BD <= 4:
        r = _load_few_coordinates(at_r, R.stride_d, C)
        nan_flags = _flag_non_finite(r, nan_flags, C)
        S = _compute_unrolled_distances(p, r, C)
    else:
        S = _compute_looped_distances(at_p, at_r, P, R, d, C)
    bits = S.to(tl.int32, bitcast=True)
    if CAREFUL:
        bits = tl.where(S == S, bits, NAN_ORDER)
    return bits, keys, nan_flags


@triton.jit
def make_keys(distances, codes):
    """Return keys of distances, given as ordered integers, and codes."""
    return (distances.to(tl.int64) << 32) | codes.to(tl.int64)


@triton.jit
def lower_keys(keys, key, old, ok):
    """Lower `keys` to `key`. The atomic is skipped if `key` is not below an old value, because keys never increase."""
    tl.atomic_min(keys, key, mask=ok & (key < old), sem="relaxed")


@triton.jit
def _scan_part(P, R, keys_R, at_p, p, batch, tile, begin, end, nan_flags, d, C: tl.constexpr, CAREFUL: tl.constexpr):
    """Return the smallest distance of each of BM points in each of BN classes, and lower the keys of the other points.

    Two steps are combined, because one instruction computes the minimum of three numbers.
    """
    best = tl.full((C.BM, C.BN), _NO_POINT, tl.int32)
    keys = keys_R + batch.to(tl.int64) * R.count + tl.arange(0, C.BN)
    for first in range(begin, end, 2 * C.BN):
        a, old_a, nan_flags = _compute_step(P, R, keys_R, at_p, p, batch, first, end, nan_flags, d, C, CAREFUL)
        b, old_b, nan_flags = _compute_step(P, R, keys_R, at_p, p, batch, first + C.BN, end, nan_flags, d, C, CAREFUL)
        best = tl.minimum(tl.minimum(best, a), b)
        j = first + tl.arange(0, C.BN)
        lower_keys(keys + first, make_keys(tl.min(a, axis=0), j * 0 + tile), old_a, j < end)
        lower_keys(keys + (first + C.BN), make_keys(tl.min(b, axis=0), j * 0 + tile), old_b, j + C.BN < end)
    return best, nan_flags


@triton.jit(do_not_specialize=["part"])
def chamfer_nearest(P, R, keys_P, keys_R, part, d, C: tl.constexpr):
    """Lower the keys of BM points of P and of `part` points of R to the keys of their distances.

    Args:
        P: `PointArgs` of the first clouds.
        R: `PointArgs` of the second clouds.
        keys_P: Keys int64 `[B, N]`. A code names a part of R and a class. The class is the number of the nearest point
            in the part modulo BN, or BN if several classes are equally near.
        keys_R: Keys int64 `[B, M]`. A code names a row tile of P.
        part: Points of a part, a multiple of `2 * BN`. The grid is `B * row tiles * parts`.
        d: Number of coordinates.
        C: Compile-time choices, a `ChamferConfig`.
    """
    tiles, parts = tl.cdiv(P.count, C.BM), tl.cdiv(R.count, part)
    batch = tl.program_id(0) // (tiles * parts)
    tile = tl.program_id(0) // parts % tiles
    part_index = tl.program_id(0) % parts
    N, _ = load_cloud_length(P, batch)
    M, _ = load_cloud_length(R, batch)
    begin = part_index * part
    end = tl.minimum(begin + part, M)
    end = tl.where(tile * C.BM < N, end, begin)  # an empty range if the tile has no point

    i = tile * C.BM + tl.arange(0, C.BM)
    at_p = locate_points(P, batch, tl.maximum(tl.minimum(i, N - 1), 0))
    nan_flags = tl.full((C.BN,), 0, tl.float32)
    if C.BD <= 4:
        p = _load_few_coordinates(at_p, P.stride_d, C)
        p_nan_flags = _flag_non_finite(p, tl.full((C.BM,), 0, tl.float32), C)
        best, nan_flags = _scan_part(P, R, keys_R, at_p, p, batch, tile, begin, end, nan_flags, d, C, False)
        # NaN differs from 0. This is rare.
        if tl.sum(nan_flags, axis=0) + tl.sum(p_nan_flags, axis=0) != 0.0:
            best, nan_flags = _scan_part(P, R, keys_R, at_p, p, batch, tile, begin, end, nan_flags, d, C, True)
    else:
        best, nan_flags = _scan_part(P, R, keys_R, at_p, 0, batch, tile, begin, end, nan_flags, d, C, True)
    minimum = tl.min(best, axis=1)
    hits = tl.sum(tl.where(best == minimum[:, None], _COUNT_UNIT + tl.arange(0, C.BN)[None, :], 0), axis=1)
    codes = part_index * (C.BN + 1) + tl.where(hits < 2 * _COUNT_UNIT, hits & (_COUNT_UNIT - 1), C.BN)
    keys = keys_P + batch.to(tl.int64) * P.count + i
    mask = (i < N) & to_mask(begin < end)
    lower_keys(keys, make_keys(minimum, codes), tl.load(keys, mask=mask, other=0), mask)


@triton.jit
def _compute_pair_distances(point_pointers, candidate_pointers, is_candidate, X, Y, d, C: tl.constexpr):
    """Return distances `[BM, BN]` of points to their own candidates. Only those with `is_candidate` are read."""
    S = tl.full((C.BM, C.BN), 0, tl.float32)
    COORDINATES: tl.constexpr = C.BD
    if COORDINATES <= 4:
        for k in tl.static_range(COORDINATES):
            x = _load_coordinate(point_pointers, X.stride_d, k)
            y = tl.load(candidate_pointers + to_int64(k) * Y.stride_d, mask=is_candidate, other=0.0).to(tl.float32)
            S = _add_coordinate(S, x[:, None], y, C)
    else:
        for c0 in range(0, d, C.BD):
            columns = c0 + tl.arange(0, C.BD)
            ok = columns < d
            x = tl.load(
                point_pointers[:, None] + (columns.to(tl.int64) * X.stride_d)[None, :], mask=ok[None, :], other=0.0
            )
            pointers = candidate_pointers[:, :, None] + (columns.to(tl.int64) * Y.stride_d)[None, None, :]
            y = tl.load(pointers, mask=is_candidate[:, :, None] & ok[None, None, :], other=0.0)
            zeros = tl.full((C.BM, C.BN, C.BD), 0, tl.float32)
            S += tl.sum(_add_coordinate(zeros, x.to(tl.float32)[:, None, :], y.to(tl.float32), C), axis=2)
    return S


@triton.jit
def _decode_key(code, length, size, C: tl.constexpr):
    """Return the candidates that the code of a key names: begin, end, number, and whether they are a whole part.

    A part of `size` points is divided into runs of C.CLASS_RUN points, which are assigned to C.KEY_CLASSES classes in
    rotation. A code above the classes names the whole part. With one class every code does.
    """
    part = code // (C.KEY_CLASSES + 1) if C.KEY_CLASSES > 1 else code
    kind = code % (C.KEY_CLASSES + 1) if C.KEY_CLASSES > 1 else code * 0 + C.KEY_CLASSES
    is_whole_part = kind == C.KEY_CLASSES
    begin = part * size
    end = tl.minimum(begin + size, length)
    return (
        begin + tl.where(is_whole_part, 0, kind * C.CLASS_RUN),
        end,
        tl.where(is_whole_part, size, size // C.KEY_CLASSES),
        is_whole_part,
    )


@triton.jit(do_not_specialize=["points", "size"])
def chamfer_select(X, Y, keys, distances, nearest, points, size, d, C: tl.constexpr):
    """Find the distance and index of the nearest point among the candidates that the keys name.

    Points beyond the end of a cloud get 0 and -1. If the other cloud is empty, a point gets inf and -1. With an invalid
    length a point gets NaN and -1.

    Args:
        X: `PointArgs` of the points.
        Y: `PointArgs` of the other clouds.
        keys: Keys of the points of X.
        distances: Output fp32, in the shape of `keys`.
        nearest: Output, in the shape of `keys`.
        points: Points of all clouds of X. A program handles BM of them.
        size: Points of a part of Y.
        d: Number of coordinates.
        C: Compile-time choices, a `ChamferConfig`.
    """
    point = tl.program_id(0).to(tl.int64) * C.BM + tl.arange(0, C.BM)
    is_inside = point < points
    point = tl.where(is_inside, point, 0)
    batch = point // X.count
    n = point % X.count
    N, ok = load_cloud_length(X, batch)
    M, other_ok = load_cloud_length(Y, batch)
    ok = ok & other_ok
    key = tl.load(keys + point)
    has_candidates = ok & (n < N) & (M > 0)
    begin, end, count, is_whole_part = _decode_key(tl.where(has_candidates, key.to(tl.int32), 0), M, size, C)
    point_pointers = locate_points(X, batch, n)
    best = tl.full((C.BM, C.BN), float("inf"), tl.float32)
    indices = tl.full((C.BM, C.BN), 0, tl.int32)
    for first in range(0, tl.max(tl.where(has_candidates, count, 0), axis=0), C.BN):
        k = first + tl.broadcast_to(tl.arange(0, C.BN)[None, :], (C.BM, C.BN))
        if C.KEY_CLASSES > 1:
            k = tl.where(is_whole_part[:, None], k, k // C.CLASS_RUN * (C.KEY_CLASSES * C.CLASS_RUN) + k % C.CLASS_RUN)
        j = begin[:, None] + k
        # Repeat the first candidate after the end, which changes nothing.
        j = tl.where((j < end[:, None]) & (k < size), j, begin[:, None])
        candidate_pointers = locate_points(Y, batch[:, None], j)
        S = _compute_pair_distances(point_pointers, candidate_pointers, has_candidates[:, None] & (j >= 0), X, Y, d, C)
        is_better = (S < best) | ((S != S) & (best == best)) | (first == 0)
        indices = tl.where(is_better, j, indices)
        best = tl.where(is_better, S, best)
    minimum = tl.reduce(best, 1, nan_min)
    hit = (best == minimum[:, None]) | (best != best)
    index = tl.min(tl.where(hit, indices, 2147483647), axis=1)
    # A NaN key gives NaN, even if only the products of distant points overflowed.
    distance = tl.where((key >> 32).to(tl.int32) == NAN_ORDER, float("nan"), minimum)
    distance = tl.where(has_candidates, distance, tl.where(n < N, float("inf"), 0.0))
    tl.store(distances + point, tl.where(ok, distance, float("nan")), mask=is_inside)
    tl.store(nearest + point, tl.where(has_candidates, index, -1), mask=is_inside)


@triton.jit(do_not_specialize=["points"])
def chamfer_slopes(X, Y, grad, grad_stride_batch, grad_stride_n, nearest, slopes, points, d, C: tl.constexpr):
    """Compute the gradient that the distances of X give to their points: ``slopes [points, d]``.

    It is 0 for a point without a nearest point, whatever its coordinates.

    Args:
        X: `PointArgs` of the points.
        Y: `PointArgs` of the other clouds.
        grad: Gradients of the distances.
        grad_stride_batch: Stride of `grad` between clouds.
        grad_stride_n: Stride of `grad` between points.
        nearest: Index of the nearest point of Y for each point, or -1.
        slopes: Output `[points, d]`, contiguous.
        points: Points of all clouds of X. A program handles BM of them.
        d: Number of coordinates.
        C: Compile-time choices, a `ChamferConfig`.
    """
    row = tl.program_id(0).to(tl.int64) * C.BM + tl.arange(0, C.BM)
    ok = row < points
    batch, n = row // X.count, row % X.count
    neighbor = tl.load(nearest + row, mask=ok, other=-1)
    has_neighbor = neighbor >= 0
    g = tl.load(grad + batch * grad_stride_batch + n * grad_stride_n, mask=has_neighbor, other=0.0)
    point_pointers, neighbor_pointers = locate_points(X, batch, n), locate_points(Y, batch, neighbor)
    for c0 in range(0, d, C.BD):
        k = c0 + tl.arange(0, C.BD)
        is_feature = (k < d)[None, :]
        offsets, mask = k.to(tl.int64)[None, :], has_neighbor[:, None] & is_feature
        x = tl.load(point_pointers[:, None] + offsets * X.stride_d, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(neighbor_pointers[:, None] + offsets * Y.stride_d, mask=mask, other=0.0).to(tl.float32)
        if C.METRIC == "l1":
            slope = (x > y).to(tl.float32) - (x < y).to(tl.float32)
        else:
            slope = 2 * (x - y)
        slope = tl.where(has_neighbor[:, None], slope * g[:, None], 0.0)
        tl.store(slopes + row[:, None] * d + k[None, :], slope, mask=ok[:, None] & is_feature)
