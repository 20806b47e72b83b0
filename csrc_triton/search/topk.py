"""The best of many scores, in one total order: NaN first, then from the largest to the smallest, equal ones in order.

Nothing is sorted but what is kept: a program finds the score of the last that it keeps by bisection, counting in
registers how many are no worse.
"""

import triton
import triton.language as tl

_MIN_KEY = tl.constexpr(-(2**31))  # below the key of every score; the bits of -0.0
_LINE = tl.constexpr(32)
_NAN_KEY = tl.constexpr(0x7FC00000)  # above that of infinity


@triton.jit
def make_order_keys(x):
    """Integers in the order of fp32 `x`: NaN above all, -0.0 equal to 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == _MIN_KEY, 0, bits)
    # Where the sign is set, the other bits rise as scores fall.
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, _NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def find_kth_key(keys, inside, k, reached):
    """A key that just `k` of those `inside` reach, or, where some are equal, the k-th largest.

    `reached`: how many are inside, or more than k.
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
    """Where the candidates in `columns` of a row are, from where the row begins."""
    if PARTS:
        return (columns // X.width).to(tl.int64) * X.stride_part + columns % X.width
    else:
        return columns


@triton.jit
def load_scores(X, row, columns, inside, PARTS: tl.constexpr):
    """fp32 scores of `columns`; of parts, which are messages of int64 words, from their bits."""
    x = tl.load(X.scores + row * X.stride_row + locate_columns(X, columns, PARTS), mask=inside, other=0)
    if PARTS:
        return x.to(tl.int32).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def load_indices(X, row, columns, inside, PARTS: tl.constexpr):
    if X.indices is None:
        return columns.to(tl.int64)
    else:
        return tl.load(X.indices + row * X.stride_row + locate_columns(X, columns, PARTS), mask=inside, other=-1)


@triton.jit
def argsort_keys(keys, count):
    """Which of the first `count` keys comes at each place where they are in order, equal ones as they are."""
    i = tl.arange(0, keys.shape[0])
    # No two are equal: below the key its place, inverted.
    ordered = (tl.where(i < count, keys, _MIN_KEY).to(tl.int64) << 32) | (keys.shape[0] - 1 - i)
    return keys.shape[0] - 1 - (tl.sort(ordered, descending=True) & 65535).to(tl.int32)


@triton.jit(do_not_specialize=["n", "k"])
def maxsim_best(X, out, n, k, PARTS: tl.constexpr, SORTED: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr):
    """Of each row's `n` scores the `k` best of each block of columns, or all that it has, in the order of the columns.

    Args:
        X: `TopKInputArgs`; PARTS: those of parts.
        out: `Best`, where the blocks of a row follow each other.
        SORTED: put them in order: of one block.
        KEPT: k or more.
    """
    blocks = tl.cdiv(n, BLOCK)
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    # In rows, because a running sum over all of them at once takes twice the registers.
    columns = block * BLOCK + tl.arange(0, BLOCK // _LINE)[:, None] * _LINE + tl.arange(0, _LINE)[None, :]
    inside = columns < n
    keys = tl.where(inside, make_order_keys(load_scores(X, row, columns, inside, PARTS)), _MIN_KEY)
    here = tl.minimum(n - block * BLOCK, BLOCK)
    count = tl.minimum(k, here)
    least = find_kth_key(keys, inside, count, here)
    above, equal = keys > least, keys == least
    wanted = count - tl.sum(above.to(tl.int32))
    # How many before it are above and how many are equal, in the halves of an integer.
    each = above.to(tl.int32) * 65536 + equal.to(tl.int32)
    lines = tl.sum(each, axis=1)
    before = tl.cumsum(each, 1) - each + (tl.cumsum(lines, 0) - lines)[:, None]
    selected = above | (equal & ((before & 65535) < wanted))
    begin = row * out.stride + block * k
    place = (before >> 16) + tl.minimum(before & 65535, wanted)
    tl.store(out.indices + begin + place, columns.to(tl.int64), mask=selected)
    tl.debug_barrier()  # they are read by other threads
    i = tl.arange(0, KEPT)
    kept = i < count
    at = i
    if SORTED:
        columns = tl.load(out.indices + begin + i, mask=kept, other=0).to(tl.int32)
        at = argsort_keys(make_order_keys(load_scores(X, row, columns, kept, PARTS)), count)
    columns = tl.load(out.indices + begin + at, mask=kept, other=0).to(tl.int32)
    scores = load_scores(X, row, columns, kept, PARTS)
    indices = load_indices(X, row, columns, kept, PARTS)
    tl.debug_barrier()  # all are read before others are written there
    tl.store(out.scores + begin + i, scores, mask=kept)
    tl.store(out.indices + begin + i, indices, mask=kept)
