"""The cross-entropy of rows of scores at their labels, and the gradient of the scores.

A program owns a row, or of a gradient a block of one: what it writes does not hang on how many rows there are. The
largest score counts as 1 beside the sum of the others, so that small losses, and their gradients, keep their digits.
"""

import triton
import triton.language as tl

from ..common.primitives import log1p, nan_max


@triton.jit
def _load_scaled_scores(pointers, inside, temperature):
    """Scores divided by the temperature; -inf where none are `inside`."""
    x = tl.load(pointers, mask=inside, other=float("-inf"))
    return tl.div_rn(x, tl.full(x.shape, temperature, tl.float32))


@triton.jit
def _expm1(x, power):
    """``exp(x) - 1`` for x <= 0, of ``power = exp(x)``."""
    near = tl.where(power == 1.0, x, (power - 1.0) * (x / tl.log(power)))
    return tl.where(x < -1.0, power - 1.0, near)


@triton.jit(do_not_specialize=["label_stride", "columns"])
def maxsim_label_losses(
    scores, labels, label_stride, losses, lse, columns, temperature, IGNORED: tl.constexpr, BLOCK: tl.constexpr
):
    """Fill ``losses [rows]`` and ``lse [rows, 2]`` of ``scores [rows, columns]``.

    The latter are the largest scaled score and the logarithm of the sum beside it. Both are 0 where the label is
    IGNORED, else NaN where it is no column.
    """
    row = tl.program_id(0).to(tl.int64)
    scores += row * columns
    label = tl.load(labels + row * label_stride).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, columns, BLOCK):
        best = nan_max(best, _load_scaled_scores(scores + first + lanes, first + lanes < columns, temperature))
    most = tl.reduce(best, 0, nan_max)
    others = tl.zeros((BLOCK,), tl.float32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, columns, BLOCK):
        inside = first + lanes < columns
        x = _load_scaled_scores(scores + first + lanes, inside, temperature)
        others += tl.where(inside & (x != most), tl.exp(x - most), 0.0)
        equal += (inside & (x == most)).to(tl.int32)
    # In one order: that of a layout which follows from BLOCK alone, as rows begin anywhere.
    total = tl.sum(others, axis=0) + (tl.sum(equal, axis=0) - 1).to(tl.float32)
    log_sum = log1p(total) + (most - most)  # NaN beside an infinite one
    right = (label >= 0) & (label < columns)
    at_label = _load_scaled_scores(scores + tl.where(right, label, 0), right, temperature)
    wrong = tl.where(right, 0.0, float("nan"))
    kept = label != IGNORED
    tl.store(losses + row, tl.where(kept, log_sum - (at_label - most) + wrong, 0.0))
    tl.store(lse + 2 * row, tl.where(kept, most + wrong, 0.0))
    tl.store(lse + 2 * row + 1, tl.where(kept, log_sum + wrong, 0.0))


@triton.jit(do_not_specialize=["label_stride", "rows"])
def maxsim_count_labels(labels, label_stride, count, rows, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    """Store in ``count`` how many of ``labels [rows]`` are not IGNORED: one program."""
    total = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, rows, BLOCK):
        i = first + tl.arange(0, BLOCK)
        label = tl.load(labels + i.to(tl.int64) * label_stride, mask=i < rows, other=0).to(tl.int64)
        total += ((i < rows) & (label != IGNORED)).to(tl.int64)
    tl.store(count, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["label_stride", "upstream_stride", "columns", "begin"])
def maxsim_label_gradients(
    scores,
    gradients,
    labels,
    label_stride,
    upstream,
    upstream_stride,
    count,
    lse,
    columns,
    begin,
    temperature,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill the gradients of ``scores [rows, columns]``, whose first column has the label `begin`.

    Programs ``rows * blocks of columns``. `upstream`: gradients of the losses, to be divided by what lies in `count`
    unless that is None; `lse` as `maxsim_label_losses` keeps it.
    """
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    label = tl.load(labels + row * label_stride).to(tl.int64)
    factor = tl.load(upstream + row * upstream_stride)
    if count is not None:
        factor = tl.div_rn(factor, tl.load(count).to(tl.float32))
    factor = tl.div_rn(factor, tl.full((), temperature, tl.float32))
    most, log_sum = tl.load(lse + 2 * row), tl.load(lse + 2 * row + 1)
    at = row * columns + column
    x = _load_scaled_scores(scores + at, inside, temperature) - most - log_sum
    probability = tl.exp(x)
    gradient = tl.where(column + begin == label, _expm1(x, probability), probability) * factor
    tl.store(gradients + at, tl.where(label == IGNORED, 0.0, gradient), mask=inside)
