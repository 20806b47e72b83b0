"""Top-k of rows of scores, in a total order: NaN first, then scores in descending order, equal scores by column.

```text
program = (row, block of BLOCK columns)
key = order-preserving int32 of the score
bisect: find a key that exactly k columns reach, or the k-th largest key if some are equal
selected = columns with larger keys, and the first of the equal columns, k in all
store the selected columns in ascending order
with SORTED: sort them by (key, column)
```

Only the selected elements are sorted. The bisection counts in registers how many keys reach a threshold. If a row has
several blocks, the host merges their results with another launch.
"""

import triton
import triton.language as tl

_MIN_KEY = tl.constexpr(-(2**31))  # below the key of every score; the bits of -0.0
_LINE = tl.constexpr(32)
_NAN_KEY = tl.constexpr(0x7FC00000)  # above the key of infinity


@triton.jit
def make_order_keys(x):
    """Return int32 keys in the order of fp32 `x`. NaN is above all numbers, and -0.0 equals 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == _MIN_KEY, 0, bits)
    # For negative scores the magnitude bits increase as scores decrease, so invert them.
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, _NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def find_kth_key(keys, inside, k, reached):
    """Return a key that exactly k of the columns `inside` reach, or the k-th largest key if some are equal.

    `reached` is the number of columns inside, or any number above k.
    """
    low = tl.min(tl.where(inside, keys, 2147483647))
    high = tl.max(tl.where(inside, keys, _MIN_KEY)) + 1
    middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
    while (middle != low) & (reached != k):
        count = tl.sum((keys >= middle).to(tl.int32))
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle)
        reached = tl.where(count >= k, count, reached)
        middle = (low & high) + ((low ^ high) >> 1)
    return low


@triton.jit
def locate_columns(X, columns, PARTS: tl.constexpr):
    """Return the offsets of candidate columns from the start of a row."""
    if PARTS:
        return (columns // X.width).to(tl.int64) * X.stride_part + columns % X.width
    else:
        return columns


@triton.jit
def load_scores(X, row, columns, inside, PARTS: tl.constexpr):
    """Load fp32 scores of `columns`. With PARTS they are the bits of int64 words."""
    x = tl.load(X.scores + row * X.stride_row + locate_columns(X, columns, PARTS), mask=inside, other=0)
    if PARTS:
        return x.to(tl.int32).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def load_indices(X, row, columns, inside, PARTS: tl.constexpr):
    """Load the indices of `columns`, or the columns themselves without an index tensor."""
    if X.indices is None:
        return columns.to(tl.int64)
    else:
        return tl.load(X.indices + row * X.stride_row + locate_columns(X, columns, PARTS), mask=inside, other=-1)


@triton.jit
def argsort_keys(keys, count):
    """Return the order of the first `count` keys, descending and stable."""
    i = tl.arange(0, keys.shape[0])
    # The low half is the inverted position, so no two elements are equal.
    sort_keys = (tl.where(i < count, keys, _MIN_KEY).to(tl.int64) << 32) | (keys.shape[0] - 1 - i)
    return keys.shape[0] - 1 - (tl.sort(sort_keys, descending=True) & 65535).to(tl.int32)


@triton.jit(do_not_specialize=["n", "k"])
def maxsim_best(X, out, n, k, PARTS: tl.constexpr, SORTED: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr):
    """Select the k best of the scores of each block of columns of a row, or all if there are fewer.

    Args:
        X: `TopKInputArgs`.
        out: `TopKOutputArgs`. The results of the blocks of a row follow each other.
        n: Scores of a row.
        k: Results of a block.
        PARTS: X consists of parts.
        SORTED: Sort the results. It requires a single block. Otherwise results are in column order.
        BLOCK: Columns of a block.
        KEPT: Power of two that is at least k.
    """
    blocks = tl.cdiv(n, BLOCK)
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    # In lines of _LINE columns, because a running sum over a flat block needs twice the registers.
    columns = block * BLOCK + tl.arange(0, BLOCK // _LINE)[:, None] * _LINE + tl.arange(0, _LINE)[None, :]
    is_column = columns < n
    keys = tl.where(is_column, make_order_keys(load_scores(X, row, columns, is_column, PARTS)), _MIN_KEY)
    column_count = tl.minimum(n - block * BLOCK, BLOCK)
    count = tl.minimum(k, column_count)
    threshold = find_kth_key(keys, is_column, count, column_count)
    is_above, is_equal = keys > threshold, keys == threshold
    tie_count = count - tl.sum(is_above.to(tl.int32))
    # For each column, the earlier columns that are above and that are equal, in the halves of an integer.
    flags = is_above.to(tl.int32) * 65536 + is_equal.to(tl.int32)
    lines = tl.sum(flags, axis=1)
    earlier_counts = tl.cumsum(flags, 1) - flags + (tl.cumsum(lines, 0) - lines)[:, None]
    is_selected = is_above | (is_equal & ((earlier_counts & 65535) < tie_count))
    begin = row * out.stride + block * k
    position = (earlier_counts >> 16) + tl.minimum(earlier_counts & 65535, tie_count)
    tl.store(out.indices + begin + position, columns.to(tl.int64), mask=is_selected)
    tl.debug_barrier()  # other threads read the stored columns
    i = tl.arange(0, KEPT)
    is_result = i < count
    order = i
    if SORTED:
        columns = tl.load(out.indices + begin + i, mask=is_result, other=0).to(tl.int32)
        order = argsort_keys(make_order_keys(load_scores(X, row, columns, is_result, PARTS)), count)
    columns = tl.load(out.indices + begin + order, mask=is_result, other=0).to(tl.int32)
    scores = load_scores(X, row, columns, is_result, PARTS)
    indices = load_indices(X, row, columns, is_result, PARTS)
    tl.debug_barrier()  # all columns are read before indices overwrite them
    tl.store(out.scores + begin + i, scores, mask=is_result)
    tl.store(out.indices + begin + i, indices, mask=is_result)
