"""Soft maximum ``tau * log(sum_t exp(s_t / tau))``: an online sum for each lane, merged at the end of a document.

```text
rate = log2(e) / tau * row_scale                    # row_scale: inverse norm of the query row, or 1
m, total = -inf, 0                                  # [BM, LANES]
for each tile S of similarities:
    high = nan_max(m, lane_max(S))
    total = total * 2^(rate (m - high)) + lane_sum(2^(rate S - rate high))
    m = high
merge the lanes in the same way
soft maximum = m * row_scale + tau * ln(2) * log2(total)
```

Invariants:

- Similarities are not scaled before the loop. The rounding error of ``rate m`` acts like a rounding error of m. It
  changes a soft maximum by no more than the rounding of the soft maximum itself.
- If ``|rate m|`` exceeds `_FAR`, the sum is not needed: the maximum is the soft maximum to the last bit.
- Exponents are relative to 0 if the maximum is infinite, so no infinity is subtracted from an infinity.
"""

import triton
import triton.language as tl

from ..common.maxima import merge_lane_maxima, reduce_lane_maxima, split_lanes
from ..common.primitives import compute_inverse_norm, log1p, nan_max, sum_in_order, sum_row_squares_in_order

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_FAR = tl.constexpr(2.0**30)
_PEAK_PROBABILITY = tl.constexpr(0.75)  # at most one probability of a row is above it, even with rounding errors
_MIN_TEMPERATURE, _MAX_RATE = tl.constexpr(1.2e-38), tl.constexpr(3e38)


@triton.jit
def load_temperature(tau):
    """Return `tau`, a number or a pointer to one, as fp32. It is NaN unless it is above 0."""
    # In the interpreter a number is not a tensor.
    if hasattr(tau, "dtype") and tau.dtype.is_ptr():
        tau = tl.load(tau)
    return check_temperature(tl.full((), tau, tl.float32))


@triton.jit
def check_temperature(tau):
    """Return `tau`, or NaN unless it is above 0."""
    return tl.where(tau > 0, tl.maximum(tau, _MIN_TEMPERATURE), float("nan"))


@triton.jit
def compute_rate(tau, inverse):
    """Return the factor that turns differences of similarities into exponents of 2.

    `inverse` is the scale of the similarities.
    """
    return tl.minimum(_LOG2_E / tau * inverse, _MAX_RATE, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def compute_row_scales(x, pointers, ok, C: tl.constexpr):
    """Return the inverse norms of query rows with C.NORMALIZE, else 1."""
    scale = tl.full((C.BM,), 1, tl.float32)
    if C.NORMALIZE:
        scale = compute_inverse_norm(sum_row_squares_in_order(pointers, ok, x.d, x.Q.stride_d, C.BD, C.WIDE_OFFSETS))
    return scale


@triton.jit
def _choose_reference(m):
    """Return the reference of exponents: `m`, or 0 if m is infinite."""
    return tl.where(tl.abs(m) == float("inf"), 0.0, m)


@triton.jit
def _rescale_sums(total, best, top, rate, more):
    """Return sums relative to `best` as sums relative to `top`, plus `more`.

    A sum is dropped if its factor is 0, because it may be infinite or NaN.
    """
    factor = tl.exp2((best - top) * rate)
    return tl.fma(tl.where(factor > 0, total, 0.0), factor, more)


@triton.jit
def _compute_exponentials(S, rate, top):
    """Return ``2^(rate (S - top))``, with one rounding of the exponent."""
    return tl.exp2(tl.fma(S, rate, -top * rate))


@triton.jit
def update_soft_maxima(best, total, S, rate, C: tl.constexpr):
    """Return the lane maxima and sums after a tile."""
    high = nan_max(best, reduce_lane_maxima(S, C))
    top = _choose_reference(high)
    rate = rate[:, None]
    if C.LANES == 1:
        tile_sums = tl.sum(_compute_exponentials(S, rate, top), axis=1)[:, None]
    else:
        terms = _compute_exponentials(split_lanes(S), rate[:, None, :, None], top[:, None, :, None])
        tile_sums = tl.sum(tl.sum(terms, axis=3), axis=1)
    return high, _rescale_sums(total, best, top, rate, tile_sums)


@triton.jit
def compute_probabilities(S, lse, coefficient, rate):
    """Return ``2^(rate (S - lse))`` times coefficients.

    A similarity exceeds lse only by rounding, so exponents are clamped at 0.
    """
    exponents = (S - lse) * rate
    return tl.exp2(tl.minimum(exponents, 0.0, propagate_nan=tl.PropagateNan.ALL)) * coefficient


@triton.jit
def remove_peak(P, ok):
    """Return the probabilities where `ok`, with 0 for the one above `_PEAK_PROBABILITY` if there is one."""
    return tl.where(ok & ~(P > _PEAK_PROBABILITY), P, 0.0)


@triton.jit
def compute_peak_entropy(tail_sums):
    """Return ``-P log P`` of the one probability P above `_PEAK_PROBABILITY`, or 0 if there is none.

    P is 1 minus `tail_sums`, the sum of the other probabilities. Computed from the similarity, ``log P`` would be the
    difference of two rounded numbers and may have no correct digit.
    """
    return tl.where(tail_sums < 0.5, (tail_sums - 1.0) * log1p(-tail_sums), 0.0)


@triton.jit
def _finish_soft_maxima(top, total, tau, rate, scale):
    """Return soft maxima from the references of the exponents and the sums."""
    is_far = tl.abs(top * rate) > _FAR
    return tl.where(is_far, top * scale, tl.fma(tl.log2(total), tau * _LN_2, top * scale))


@triton.jit
def merge_soft_maxima(best, total, x, rows, C: tl.constexpr):
    """Return the soft maximum of each row from its lanes."""
    top = _choose_reference(merge_lane_maxima(best, C))
    total = _rescale_sums(total, best, top[:, None], rows.rate[:, None], 0.0)
    total = sum_in_order(tl.reshape(total, (C.BM * C.LANES,)), C.BM, C.LANES)
    return _finish_soft_maxima(top, total, x.tau, rows.rate, rows.scale)


@triton.jit
def merge_split_maxima(maxima, at, step, count, keep, tau, AT_ONCE: tl.constexpr):
    """Return the soft maxima of rows over the `count` splits of a document.

    `maxima + at` points to the rows in the first split, and `step` is the distance to the next split. AT_ONCE splits
    are added at a time. The order of the sum depends only on `count`.
    """
    rate = compute_rate(tau, tl.full(at.shape, 1, tl.float32))
    best = tl.full(at.shape, float("-inf"), tl.float32)
    total = tl.full(at.shape, 0, tl.float32)
    for n0 in range(0, count, AT_ONCE):
        n = n0 + tl.arange(0, AT_ONCE)
        offsets = at[None, :] + n.to(tl.int64)[:, None] * step
        split_maxima = tl.load(maxima + offsets, mask=(n < count)[:, None] & keep[None, :], other=float("-inf"))
        high = nan_max(best, tl.reduce(split_maxima, 0, nan_max))
        top = _choose_reference(high)
        step_sums = tl.sum(_compute_exponentials(split_maxima, rate[None, :], top[None, :]), axis=0)
        total = _rescale_sums(total, best, top, rate, step_sums)
        best = high
    return _finish_soft_maxima(_choose_reference(best), total, tau, rate, 1.0)
