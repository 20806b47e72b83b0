"""Pieces that the kernels share: NaN-keeping maxima, ordered sums, finding and loading rows, normalisation."""

import triton
import triton.language as tl

NORM_EPS = tl.constexpr(1e-12)
NO_TOKEN = tl.constexpr(2147483647)


PACKAGE = __package__.rpartition(".")[0]


# Compilers that put a kernel into a package copy its source with the functions it calls and the strings they read, but
# not the classes.
@triton.constexpr_function
def import_args_class(name, module="common.arguments"):
    """A class of `common.arguments` or another module, fetched while a kernel is compiled."""
    from importlib import import_module

    return getattr(import_module(f"{PACKAGE}.{module}"), name)


@triton.jit
def nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def log1p(x):
    """Return ``log(1 + x)`` for x > -1 without losing the digits of a small x."""
    w = 1.0 + x
    return tl.where(w == 1.0, x, tl.log(w) * (x / (w - 1.0)))


@triton.jit
def sum_in_order(x, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum each of GROUPS aligned groups of WIDTH (a power of two) neighbours, always as the same binary tree.

    Pairs are added one level at a time, so the bits do not depend on how the compiler lays `x` out over threads, and a
    query gets the same sum whatever tile it is scored in.
    """
    HALF: tl.constexpr = WIDTH // 2
    if HALF >= 1:
        x = tl.sum(tl.reshape(x, (GROUPS * HALF, 2)), axis=1)
        x = sum_in_order(x, GROUPS, HALF)
    return x


@triton.jit
def sum_in_order_across_warps(x, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """The sums of `sum_in_order`, also where several warps share a group: Triton 3.6 reduces their pairs wrongly."""
    if WIDTH > 1:
        HALF: tl.constexpr = WIDTH // 2
        a, b = tl.split(tl.reshape(x, (GROUPS, HALF, 2)))
        x = sum_in_order_across_warps(a + b, GROUPS, HALF)
    return tl.reshape(x, (GROUPS,))


@triton.jit
def compute_inverse_norm(squares):
    """``1 / max(||x||, 1e-12)`` of sums of squares, as torch.nn.functional.normalize."""
    return 1.0 / tl.maximum(tl.sqrt(squares), NORM_EPS)


@triton.jit
def compiler_barrier_dtype(x):
    """`x`, where the compiler looks no further back.

    It orders the terms of a product (mma.sync) by the narrowest type that anything in a factor was loaded as, the
    condition of a load included: a byte of a mask, or winners of two bytes, must not decide the bits of a score. A
    reduction is where it stops.
    """
    return tl.max(tl.expand_dims(x, 1), axis=1)


@triton.jit
def to_int64(k):
    """A loop counter as int64 (the interpreter counts in Python integers, which have no `.to`)."""
    return tl.full((), k, tl.int64)


@triton.jit
def to_mask(x):
    """`x`, a condition on one number, as a mask's part: the interpreter of Triton 3.9 takes it for such a number."""
    return tl.full((), 1, tl.int1) & x


@triton.jit
def locate_document(D, owner, k):
    return D.ptr + owner.to(tl.int64) * D.stride_owner + k.to(tl.int64) * D.stride_doc


@triton.jit
def load_tokens(base, t, ok, columns, d, D, WIDE_OFFSETS: tl.constexpr):
    """Document tokens `t` of one document, features `columns`; zeros where not `ok` or beyond d."""
    if WIDE_OFFSETS == 0:
        offsets = (t * D.stride_l)[:, None] + (columns * D.stride_d)[None, :]
        x = tl.load(base + offsets, mask=ok[:, None] & (columns < d)[None, :], other=0.0)
    else:
        x = load_rows(base + t.to(tl.int64) * D.stride_l, ok, columns, d, D.stride_d, WIDE_OFFSETS)
    return x


@triton.jit
def locate_rows(Q, i, s):
    """Where query token ``Q[i, s]`` begins."""
    return Q.ptr + i.to(tl.int64) * Q.stride_n + s.to(tl.int64) * Q.stride_l


@triton.jit
def load_rows(pointers, ok, columns, d, stride_d, WIDE_OFFSETS: tl.constexpr):
    """Rows at `pointers`, features `columns`; zeros where not `ok` or beyond d."""
    mask = ok[:, None] & (columns < d)[None, :]
    if WIDE_OFFSETS == 2:
        columns = columns.to(tl.int64)
    return tl.load(pointers[:, None] + (columns * stride_d)[None, :], mask=mask, other=0.0)


@triton.jit
def sum_row_squares(pointers, ok, d, stride_d, BD: tl.constexpr, WIDE_OFFSETS: tl.constexpr):
    """``sum_k x[k]^2`` of each row in fp32, read in chunks of BD features."""
    total = tl.zeros(ok.shape, tl.float32)
    for c0 in range(0, d, BD):
        x = load_rows(pointers, ok, c0 + tl.arange(0, BD), d, stride_d, WIDE_OFFSETS).to(tl.float32)
        total += tl.sum(x * x, axis=1)
    return total


@triton.jit
def square(x):
    """In fp32, rounded: a product that the compiler fused with some of the additions would hang on the layout."""
    x = x.to(tl.float32)
    return tl.fma(x, x, tl.zeros_like(x))


@triton.jit
def sum_chunk_squares(pointers, ok, c0, d, stride_d, WIDTH: tl.constexpr, WIDE_OFFSETS: tl.constexpr):
    """Of rows, sums of WIDTH squares from feature c0 on, as one tree whatever the layout; 16 are read at a time."""
    if WIDTH > 16:
        HALF: tl.constexpr = WIDTH // 2
        left = sum_chunk_squares(pointers, ok, c0, d, stride_d, HALF, WIDE_OFFSETS)
        squares = left + sum_chunk_squares(pointers, ok, c0 + HALF, d, stride_d, HALF, WIDE_OFFSETS)
    else:
        x = square(load_rows(pointers, ok, c0 + tl.arange(0, WIDTH), d, stride_d, WIDE_OFFSETS))
        if stride_d == 1:
            squares = sum_in_order(x, x.shape[0], WIDTH)
        else:
            squares = sum_in_order_across_warps(x, x.shape[0], WIDTH)
    return squares


@triton.jit
def sum_row_squares_in_order(pointers, ok, d, stride_d, BD: tl.constexpr, WIDE_OFFSETS: tl.constexpr):
    """`sum_row_squares`, but each chunk is summed as one tree."""
    total = tl.zeros(ok.shape, tl.float32)
    for c0 in range(0, d, BD):
        total += sum_chunk_squares(pointers, ok, c0, d, stride_d, BD, WIDE_OFFSETS)
    return total


@triton.jit
def load_query_mask(Q, i, s, ok):
    """`ok` without the masked query tokens."""
    if Q.mask is not None:
        offsets = i.to(tl.int64) * Q.mask_stride_n + s.to(tl.int64) * Q.mask_stride_l
        ok = compiler_barrier_dtype((ok & (tl.load(Q.mask + offsets, mask=ok, other=0) != 0)).to(tl.int32)) > 0
    return ok


@triton.jit
def load_query_weight(Q, i, s, ok):
    """The weight of each kept query token, 1 where there are no weights, 0 where not `ok`."""
    if Q.weight is not None:
        offsets = i.to(tl.int64) * Q.weight_stride_n + s.to(tl.int64) * Q.weight_stride_l
        w = tl.load(Q.weight + offsets, mask=ok, other=0.0)
    else:
        w = tl.where(ok, 1.0, 0.0)
    return w
