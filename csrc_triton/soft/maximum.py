"""The soft maximum ``tau log sum_t exp(s_t / tau)``: per lane while a document lasts, merged at its end.

In base 2, of similarities as they are: a lane keeps its maximum m and the sum of ``2^(rate s - rate m)``, ``rate =
log2(e) / tau``. The rounding of ``rate m`` is that of m times rate, so it moves no soft maximum by more than its own.
Where ``rate m`` is beyond `_FAR` a sum is of no use, and the maximum is the soft maximum to the last bit.
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
    """`tau`, a number or where one lies; NaN unless it is above 0."""
    if hasattr(tau, "dtype") and tau.dtype.is_ptr():  # in the interpreter a number is no tensor
        tau = tl.load(tau)
    return check_temperature(tl.full((), tau, tl.float32))


@triton.jit
def check_temperature(tau):
    """`tau`, NaN unless it is above 0."""
    return tl.where(tau > 0, tl.maximum(tau, _MIN_TEMPERATURE), float("nan"))


@triton.jit
def compute_rate(tau, inverse):
    """What differences of similarities are multiplied by, those times `inverse` being what counts."""
    return tl.minimum(_LOG2_E / tau * inverse, _MAX_RATE, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def compute_row_scales(x, pointers, ok, C: tl.constexpr):
    """Of query rows: their inverse norms if normalising, else 1."""
    scale = tl.full((C.BM,), 1, tl.float32)
    if C.NORMALIZE:
        scale = compute_inverse_norm(sum_row_squares_in_order(pointers, ok, x.d, x.Q.stride_d, C.BD, C.WIDE_OFFSETS))
    return scale


@triton.jit
def _choose_reference(m):
    """What exponents are taken relative to: `m`, or 0 where it is infinite."""
    return tl.where(tl.abs(m) == float("inf"), 0.0, m)


@triton.jit
def _rescale_sums(total, best, top, rate, more):
    """Sums relative to `best` as ones relative to `top`, and `more`; of the former nothing where the factor is 0."""
    factor = tl.exp2((best - top) * rate)
    return tl.fma(tl.where(factor > 0, total, 0.0), factor, more)


@triton.jit
def _compute_exponentials(S, rate, top):
    """Two of the shape of S, in one rounding."""
    return tl.exp2(tl.fma(S, rate, -top * rate))


@triton.jit
def update_soft_maxima(best, total, S, rate, C: tl.constexpr):
    """The lanes' maxima and sums after a tile."""
    high = nan_max(best, reduce_lane_maxima(S, C))
    top = _choose_reference(high)
    rate = rate[:, None]
    if C.LANES == 1:
        more = tl.sum(_compute_exponentials(S, rate, top), axis=1)[:, None]
    else:
        terms = _compute_exponentials(split_lanes(S, C), rate[:, None, :, None], top[:, None, :, None])
        more = tl.sum(tl.sum(terms, axis=3), axis=1)
    return high, _rescale_sums(total, best, top, rate, more)


@triton.jit
def compute_probabilities(S, lse, coefficient, rate):
    """``2^(rate (S - lse))`` times coefficients; a similarity is above lse by its rounding alone."""
    exponents = (S - lse) * rate
    return tl.exp2(tl.minimum(exponents, 0.0, propagate_nan=tl.PropagateNan.ALL)) * coefficient


@triton.jit
def remove_peak(P, ok):
    """Return the probabilities where `ok`, with 0 for the one above `_PEAK_PROBABILITY` if there is one."""
    return tl.where(ok & ~(P > _PEAK_PROBABILITY), P, 0.0)


@triton.jit
def compute_peak_entropy(rest):
    """Return ``-P log P`` of the one probability P above `_PEAK_PROBABILITY`, 0 if there is none.

    P is 1 minus `rest`, the sum of the other probabilities. ``log P`` from the similarity would be the difference of
    two rounded numbers, and may have no correct digit.
    """
    return tl.where(rest < 0.5, (rest - 1.0) * log1p(-rest), 0.0)


@triton.jit
def merge_soft_maxima(best, total, x, rows, C: tl.constexpr):
    """Each row's soft maximum from what its lanes have."""
    top = _choose_reference(merge_lane_maxima(best, C))
    total = _rescale_sums(total, best, top[:, None], rows.rate[:, None], 0.0)
    total = sum_in_order(tl.reshape(total, (C.BM * C.LANES,)), C.BM, C.LANES)
    far = tl.abs(top * rows.rate) > _FAR
    return tl.where(far, top * rows.scale, tl.fma(tl.log2(total), x.tau * _LN_2, top * rows.scale))
