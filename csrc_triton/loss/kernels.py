"""Cross-entropy of rows of scores at their labels, and the gradient of the scores.

```text
x = scores / temperature
largest = max(x)
log_sum = log1p(sum over x != largest of exp(x - largest) + (number of x == largest) - 1)
loss = log_sum - (x[label] - largest)
gradient[c] = (exp(x[c] - largest - log_sum) - [c == label]) * upstream / temperature

maxsim_label_losses, program = row:
    pass 1 over BLOCK columns at a time: largest
    pass 2 over BLOCK columns at a time: the sum of the others and the number of equal columns
    losses[row], lse[row] = loss, (largest, log_sum)
maxsim_label_gradients, program = BLOCK columns of a row
```

The largest score is separate from the sum of the others, so small losses and their gradients keep their digits. The
gradient at the label uses expm1. A program owns a row or a block of a row, so its result does not depend on the number
of rows.
"""

import triton
import triton.language as tl

from ..common.primitives import log1p, nan_max


@triton.jit
def _load_scaled_scores(pointers, inside, temperature):
    """Load scores divided by the temperature, and -inf where not `inside`."""
    x = tl.load(pointers, mask=inside, other=float("-inf"))
    return tl.div_rn(x, tl.full(x.shape, temperature, tl.float32))


@triton.jit
def _expm1(x, power):
    """Return ``exp(x) - 1`` for x <= 0, given ``power = exp(x)``."""
    expm1 = tl.where(power == 1.0, x, (power - 1.0) * (x / tl.log(power)))
    return tl.where(x < -1.0, power - 1.0, expm1)


@triton.jit(do_not_specialize=["label_stride", "columns"])
def maxsim_label_losses(
    scores, labels, label_stride, losses, lse, columns, temperature, IGNORED: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the loss of one row of scores for each program.

    Args:
        scores: fp32 `[rows, columns]`, contiguous.
        labels: Labels `[rows]`.
        label_stride: Stride of `labels`.
        losses: Output fp32 `[rows]`.
        lse: Output fp32 `[rows, 2]`: the largest scaled score, and the log-sum-exp relative to it.
        columns: Number of columns.
        temperature: Divisor of the scores.
        IGNORED: Label whose rows have zero losses and zero lse. Other labels outside the columns give NaN.
        BLOCK: Columns of a step.
    """
    row = tl.program_id(0).to(tl.int64)
    scores += row * columns
    label = tl.load(labels + row * label_stride).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, columns, BLOCK):
        best = nan_max(best, _load_scaled_scores(scores + first + lanes, first + lanes < columns, temperature))
    largest = tl.reduce(best, 0, nan_max)
    exp_sums = tl.zeros((BLOCK,), tl.float32)
    ties = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, columns, BLOCK):
        is_column = first + lanes < columns
        x = _load_scaled_scores(scores + first + lanes, is_column, temperature)
        exp_sums += tl.where(is_column & (x != largest), tl.exp(x - largest), 0.0)
        ties += (is_column & (x == largest)).to(tl.int32)
    # The order of this sum depends on the layout, which follows from BLOCK alone, and not on where a row begins.
    total = tl.sum(exp_sums, axis=0) + (tl.sum(ties, axis=0) - 1).to(tl.float32)
    log_sum = log1p(total) + (largest - largest)  # NaN if the largest score is infinite
    is_valid = (label >= 0) & (label < columns)
    label_score = _load_scaled_scores(scores + tl.where(is_valid, label, 0), is_valid, temperature)
    nan_if_invalid = tl.where(is_valid, 0.0, float("nan"))
    is_counted = label != IGNORED
    tl.store(losses + row, tl.where(is_counted, log_sum - (label_score - largest) + nan_if_invalid, 0.0))
    tl.store(lse + 2 * row, tl.where(is_counted, largest + nan_if_invalid, 0.0))
    tl.store(lse + 2 * row + 1, tl.where(is_counted, log_sum + nan_if_invalid, 0.0))


@triton.jit(do_not_specialize=["label_stride", "rows"])
def maxsim_count_labels(labels, label_stride, count, rows, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    """Store the number of ``labels [rows]`` that are not IGNORED in ``count``. The grid has one program."""
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
    """Compute the gradient of BLOCK columns of a row of scores for each program.

    Args:
        scores: fp32 `[rows, columns]`, contiguous.
        gradients: Output of the same shape.
        labels: Labels `[rows]`.
        label_stride: Stride of `labels`.
        upstream: Gradients of the losses.
        upstream_stride: Stride of `upstream`.
        count: Pointer to a divisor of the upstream gradients, or None.
        lse: Output of `maxsim_label_losses`.
        columns: Number of columns.
        begin: Label of the first column.
        temperature: Divisor of the scores.
        IGNORED: Label whose rows have zero gradients.
        BLOCK: Columns of a program.
    """
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    is_column = column < columns
    label = tl.load(labels + row * label_stride).to(tl.int64)
    factor = tl.load(upstream + row * upstream_stride)
    if count is not None:
        factor = tl.div_rn(factor, tl.load(count).to(tl.float32))
    factor = tl.div_rn(factor, tl.full((), temperature, tl.float32))
    largest, log_sum = tl.load(lse + 2 * row), tl.load(lse + 2 * row + 1)
    offsets = row * columns + column
    x = _load_scaled_scores(scores + offsets, is_column, temperature) - largest - log_sum
    probability = tl.exp(x)
    gradient = tl.where(column + begin == label, _expm1(x, probability), probability) * factor
    tl.store(gradients + offsets, tl.where(label == IGNORED, 0.0, gradient), mask=is_column)
