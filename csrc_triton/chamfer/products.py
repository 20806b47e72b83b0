"""Nearest points with tensor cores: squared distances as ``|p|^2 + |r|^2 - 2 <p, r>``.

These distances only select candidates. `chamfer_select` computes the winning distance again from differences. Points
are first converted to terms: rows of half-precision features and their norms. An fp32 row x is split as

```text
x = 2^e (hi + lo),    hi, lo in fp16, e such that the largest feature is just below 2^15
<p, r> = 2^(e_p + e_r) (hi hi' + hi lo' + lo hi')
```

hi + lo equals x up to 2^-22 of each feature and 2^-39 of the largest. The product is accurate to 2^-21 of ``|p| |r|``,
besides the rounding of the sums. This matches the accuracy of ``|p|^2 + |r|^2`` in fp32. `common.fp32` also represents
features of any size, because it scales its small products separately.

```text
chamfer_products, program = (cloud, BM points of P, part of R of `steps` tiles):
    best = inf                                       # [BM, 4], one value for each lane
    for first in range(begin, end, BN):
        S = terms of P @ terms of R.T                # [BM, BN]
        S = norms of P + norms of R - 2 * scales * S
        best, where = minimum over the lane's columns, number of the step
        atomic_min(of_R[points of the step], (min of S over 16 rows, these 16 points of P))
    atomic_min(of_P[BM points], (min of best, step and lane of the minimum))
```

Invariants:

- A row with a non-finite norm has zeros as terms. A row that does not exist has an infinite norm.
- Rows of a cloud are padded to a multiple of every tile, so tiles need no masks.
"""

import triton
import triton.language as tl

from ..common.maxima import split_lanes
from ..common.primitives import load_rows, to_int64, to_mask
from .exact import NAN_ORDER, load_cloud_length, locate_points, lower_keys, make_keys, nan_min

_MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
_EXPONENT_MASK = tl.constexpr(0x7F800000)
_MIN_EXPONENT_BITS = tl.constexpr(15 << 23)  # the square of a smaller value underflows in fp32
_SCALE_UP_BITS = tl.constexpr(((254 + 14) << 23) - 2**32)  # minus an exponent: the factor that brings it to 2^14
_SCALE_EXPONENT_BITS = tl.constexpr(14 << 23)
_CODES_PER_STEP = tl.constexpr(5)  # four lanes, or all of them


@triton.jit
def _measure_rows(pointers, ok, X, d, C: tl.constexpr):
    """Return the sum of squares of each row, and its largest magnitude as the bits of a float."""
    squares = tl.full((C.BM,), 0, tl.float32)
    largest = tl.full((C.BM,), 0, tl.int32)
    for c0 in range(0, d, C.BD):
        x = load_rows(pointers, ok, c0 + tl.arange(0, C.BD), d, X.stride_d, C.WIDE_OFFSETS).to(tl.float32)
        squares += tl.sum(x * x, axis=1)
        largest = tl.maximum(largest, tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE_MASK, axis=1))
    return squares, largest


@triton.jit(do_not_specialize=["rows"])
def chamfer_terms(X, terms, rows, d, C: tl.constexpr):
    """Write BM rows of terms, with their norms and scales.

    Args:
        X: `PointArgs` of the points.
        terms: `PointTermArgs` to fill.
        rows: Number of rows of `terms`.
        d: Number of coordinates.
        C: Compile-time choices, a `ChamferConfig`.
    """
    row = tl.program_id(0) * C.BM + tl.arange(0, C.BM)
    batch = terms.batch + row // terms.cloud_rows
    n = terms.first + row % terms.cloud_rows
    is_row = row < rows
    length, _ = load_cloud_length(X, tl.where(is_row, batch, terms.batch))
    ok = is_row & (n < length)
    pointers = locate_points(X, batch, n)
    squares, largest = _measure_rows(pointers, ok, X, d, C)
    finite = ok & (largest < _EXPONENT_MASK) & (squares < float("inf"))
    tl.store(terms.norms + row, tl.where(ok, squares, float("inf")), mask=is_row)
    if C.SPLIT_FP32:
        finite = finite & (largest >= _MIN_EXPONENT_BITS)
        exponent = tl.where(finite, largest & _EXPONENT_MASK, _MIN_EXPONENT_BITS)
        factor = (tl.full(exponent.shape, _SCALE_UP_BITS, tl.int32) - exponent).to(tl.float32, bitcast=True)
        tl.store(terms.scales + row, (exponent - _SCALE_EXPONENT_BITS).to(tl.float32, bitcast=True), mask=is_row)
    row_pointers = terms.rows + row.to(tl.int64) * terms.width
    for c0 in range(0, terms.width, C.BD):
        columns = c0 + tl.arange(0, C.BD)
        x = load_rows(pointers, finite, columns, d, X.stride_d, C.WIDE_OFFSETS)
        term_pointers = row_pointers[:, None] + columns[None, :]
        if C.SPLIT_FP32:
            x = x * factor[:, None]
            hi = x.to(tl.float16)
            lo = (x - hi.to(tl.float32)).to(tl.float16)
            tl.store(term_pointers, hi, mask=is_row[:, None])
            tl.store(term_pointers + to_int64(terms.room) * terms.width, lo, mask=is_row[:, None])
        else:
            tl.store(term_pointers, x, mask=is_row[:, None])


@triton.jit
def _load_tile(tiles, terms, row, c0, lo, BM: tl.constexpr, C: tl.constexpr):
    """Load BM rows from `row` on, BD features from `c0` on, or their low parts if `lo` is 1."""
    row += lo * terms.room
    if tiles is not None:
        x = tiles.load([row, c0])
    else:
        rows = (row + tl.arange(0, BM)).to(tl.int64) * terms.width
        x = tl.load(terms.rows + (rows[:, None] + (c0 + tl.arange(0, C.BD))[None, :]))
    return x


@triton.jit
def _load_split_tile(tiles, terms, row, c0, BM: tl.constexpr, C: tl.constexpr):
    """Return the high and low parts of a tile, or the same tile twice without C.SPLIT_FP32."""
    hi = _load_tile(tiles, terms, row, c0, 0, BM, C)
    lo = hi
    if C.SPLIT_FP32:
        lo = _load_tile(tiles, terms, row, c0, 1, BM, C)
    return hi, lo


@triton.jit
def _add_products(S, x, y, C: tl.constexpr):
    """Return S plus the products of terms. The small products are added first."""
    if C.SPLIT_FP32:
        S = tl.dot(x[1], tl.trans(y[0]), S)
        S = tl.dot(x[0], tl.trans(y[1]), S)
    return tl.dot(x[0], tl.trans(y[0]), S)


@triton.jit
def _order_distances(distances):
    """Return distances as ordered integers, NaN below all."""
    bits = distances.to(tl.int32, bitcast=True)
    return tl.where(distances == distances, bits ^ ((bits >> 31) & _MAGNITUDE_MASK), NAN_ORDER)


@triton.jit
def _make_column_keys(S, group, C: tl.constexpr):
    """Return keys of the minimum of each column, with the number of the group of 16 rows that attains it.

    A warp holds these 16 rows. `group` is the number of the first group.
    """
    minima = tl.reduce(tl.reduce(tl.reshape(S, (C.BM // 16, 2, 8, C.BN)), 1, nan_min), 1, nan_min)
    groups = group + tl.arange(0, C.BM // 16)
    return tl.min(make_keys(_order_distances(minima), tl.broadcast_to(groups[:, None], minima.shape)), axis=0)


@triton.jit
def _make_row_keys(best, where):
    """Return keys of the minimum of each row, with the code of its lane.

    If several lanes of a step are equal, the code names all lanes of the step.
    """
    lane = tl.arange(0, 4)[None, :]
    keys = make_keys(_order_distances(best), where * _CODES_PER_STEP + lane)
    key = tl.min(keys, axis=1)
    first = key - (key.to(tl.int32) % _CODES_PER_STEP).to(tl.int64)
    tie_count = tl.sum((keys - lane == first[:, None]).to(tl.int32), axis=1)
    return tl.where(tie_count > 1, first + 4, key)


@triton.jit(do_not_specialize=["steps"])
def chamfer_products(P, R, p, r, p_tiles, r_tiles, keys_P, keys_R, steps, C: tl.constexpr):
    """Lower the keys of `chamfer_nearest` for the clouds and points of terms p and r.

    Args:
        P: `PointArgs` of the first clouds.
        R: `PointArgs` of the second clouds.
        p: `PointTermArgs` of points of P.
        r: `PointTermArgs` of points of R.
        p_tiles: Tensor descriptor of the rows of p in blocks `[BM, BD]`, or None.
        r_tiles: Tensor descriptor of the rows of r in blocks `[BN, BD]`, or None.
        keys_P: Keys int64 `[B, N]`. A code names a step of BN points of R and a lane of the tensor core layout. Lanes
            receive two neighboring points each, in rotation. Lane 4 stands for all lanes, if several are equally near.
        keys_R: Keys int64 `[B, M]`. A code names 16 points of P.
        steps: Tiles of BN points in a part of R.
        C: Compile-time choices, a `ChamferConfig`.
    """
    part = steps * C.BN
    tiles, parts = p.cloud_rows // C.BM, tl.cdiv(r.cloud_rows, part)
    local_batch = tl.program_id(0) // (tiles * parts)
    tile = tl.program_id(0) // parts % tiles
    batch = p.batch + local_batch
    N, _ = load_cloud_length(P, batch)
    M, _ = load_cloud_length(R, batch)
    begin = tl.program_id(0) % parts * part
    end = tl.minimum(tl.minimum(begin + part, r.cloud_rows), M - r.first)
    i = p.first + tile * C.BM + tl.arange(0, C.BM)
    end = tl.where(p.first + tile * C.BM < N, end, begin)  # an empty range if the tile has no point

    row = local_batch * p.cloud_rows + tile * C.BM
    norms = tl.load(p.norms + row + tl.arange(0, C.BM))
    scales = tl.full((C.BM,), -2.0, tl.float32)
    if C.SPLIT_FP32:
        scales *= tl.load(p.scales + row + tl.arange(0, C.BM))
    if C.SINGLE_STEP:
        x = _load_split_tile(p_tiles, p, row, 0, C.BM, C)
    best = tl.full((C.BM, 4), float("inf"), tl.float32)
    where = tl.full((C.BM, 4), 0, tl.int32) + (r.first + begin) // C.BN
    group = (p.first + tile * C.BM) // 16
    for first in range(begin, end, C.BN):
        other_row = local_batch * r.cloud_rows + first
        # Load these before the products, to overlap the latency.
        r_norms = tl.load(r.norms + other_row + tl.arange(0, C.BN))
        r_scales = r_norms
        if C.SPLIT_FP32:
            r_scales = tl.load(r.scales + other_row + tl.arange(0, C.BN))
        S = tl.full((C.BM, C.BN), 0, tl.float32)
        if C.SINGLE_STEP:
            S = _add_products(S, x, _load_split_tile(r_tiles, r, other_row, 0, C.BN, C), C)
        else:
            for c0 in range(0, p.width, C.BD):
                S = _add_products(
                    S,
                    _load_split_tile(p_tiles, p, row, c0, C.BM, C),
                    _load_split_tile(r_tiles, r, other_row, c0, C.BN, C),
                    C,
                )
        j = r.first + first + tl.arange(0, C.BN)
        if C.SPLIT_FP32:
            S *= r_scales[None, :]
        S = tl.fma(S, scales[:, None], r_norms[None, :]) + norms[:, None]
        m = tl.reduce(tl.reduce(split_lanes(S), 3, nan_min), 1, nan_min)
        is_better = (m < best) | ((m != m) & (best == best))
        where = tl.where(is_better, (r.first + first) // C.BN, where)
        best = tl.where(is_better, m, best)
        keys = keys_R + batch.to(tl.int64) * R.count + j
        tl.atomic_min(keys, _make_column_keys(S, group, C), mask=j < M, sem="relaxed")
    keys = keys_P + batch.to(tl.int64) * P.count + i
    mask = (i < N) & to_mask(begin < end)
    lower_keys(keys, _make_row_keys(best, where), tl.load(keys, mask=mask, other=0), mask)
