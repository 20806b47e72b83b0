"""Primitives of all kernels: maxima that keep NaN, ordered sums, row location and loading, normalization."""

import triton
import triton.language as tl

NORM_EPS = tl.constexpr(1e-12)
NO_TOKEN = tl.constexpr(2147483647)
UNRESOLVED = tl.constexpr(-2)  # argmax of a maximum that is NaN or -inf, until a later step finds its token


PACKAGE = __package__.rpartition(".")[0]


# Compilers that package a kernel copy its source, the functions it calls, and the strings they read, but no classes.
@triton.constexpr_function
def import_args_class(name, module="common.arguments"):
    """Return a class of `common.arguments` or of another module, imported while a kernel is compiled."""
    from importlib import import_module

    return getattr(import_module(f"{PACKAGE}.{module}"), name)


@triton.jit
def nan_max(a, b):
    """Return the elementwise maximum, NaN if either value is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def log1p(x):
    """Return ``log(1 + x)`` for x > -1 without losing the digits of a small x."""
    w = 1.0 + x
    return tl.where(w == 1.0, x, tl.log(w) * (x / (w - 1.0)))


@triton.jit
def sum_in_order(x, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum each of GROUPS aligned groups of WIDTH (a power of two) neighbors, always as the same binary tree.

    Pairs are added one level at a time, so the bits do not depend on how the compiler distributes `x` over threads. A
    query gets the same sum in every tile.
    """
    HALF: tl.constexpr = WIDTH // 2
    if HALF >= 1:
        x = tl.sum(tl.reshape(x, (GROUPS * HALF, 2)), axis=1)
        x = sum_in_order(x, GROUPS, HALF)
    return x


@triton.jit
def sum_in_order_across_warps(x, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the sums of `sum_in_order`, also if several warps share a group.

    Triton 3.6 reduces the pairs of `sum_in_order` incorrectly in that case.
    """
    if WIDTH > 1:
        HALF: tl.constexpr = WIDTH // 2
        a, b = tl.split(tl.reshape(x, (GROUPS, HALF, 2)))
        x = sum_in_order_across_warps(a + b, GROUPS, HALF)
    return tl.reshape(x, (GROUPS,))


@triton.jit
def compute_inverse_norm(squares):
    """Return ``1 / max(||x||, 1e-12)`` of sums of squares, like torch.nn.functional.normalize."""
    return 1.0 / tl.maximum(tl.sqrt(squares), NORM_EPS)


@triton.jit
def compiler_barrier_dtype(x):
    """Return `x` such that the compiler's dtype analysis of products stops here.

    The compiler orders the terms of a product (mma.sync) by the narrowest type that any part of a factor was loaded as.
    The condition of a load is such a part. A byte of a mask or a two-byte argmax must not decide the bits of a score.
    The analysis stops at a reduction.
    """
    return tl.max(tl.expand_dims(x, 1), axis=1)


@triton.jit
def to_int64(k):
    """Return a loop counter as int64. The interpreter counts in Python integers, which have no `.to`."""
    return tl.full((), k, tl.int64)


@triton.jit
def to_mask(x):
    """Return the scalar condition `x` as an operand of a mask, which Triton 3.9's interpreter needs."""
    return tl.full((), 1, tl.int1) & x


@triton.jit
def locate_program_rows(rows, BLOCK: tl.constexpr):
    """Return the query or document of a program that owns BLOCK of its `rows` rows, these rows, and which exist."""
    blocks = tl.cdiv(rows, BLOCK)
    pid = tl.program_id(0)
    r = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    return pid // blocks, r, r < rows


@triton.jit
def locate_document(D, owner, k):
    """Return a pointer to document k of an owner."""
    return D.ptr + owner.to(tl.int64) * D.stride_owner + k.to(tl.int64) * D.stride_doc


@triton.jit
def locate_numbered_tokens(D, n, L):
    """Return pointers to tokens `n`, numbered consecutively over documents of L tokens."""
    return D.ptr + (n // L).to(tl.int64) * D.stride_doc + (n % L).to(tl.int64) * D.stride_l


@triton.jit
def load_tokens(base, t, ok, columns, d, D, WIDE_OFFSETS: tl.constexpr):
    """Load features `columns` of tokens `t` of one document, zeros if not `ok` or beyond d."""
    if WIDE_OFFSETS == 0:
        offsets = (t * D.stride_l)[:, None] + (columns * D.stride_d)[None, :]
        x = tl.load(base + offsets, mask=ok[:, None] & (columns < d)[None, :], other=0.0)
    else:
        x = load_rows(base + t.to(tl.int64) * D.stride_l, ok, columns, d, D.stride_d, WIDE_OFFSETS)
    return x


@triton.jit
def locate_rows(Q, i, s):
    """Return pointers to query tokens ``Q[i, s]``."""
    return Q.ptr + i.to(tl.int64) * Q.stride_n + s.to(tl.int64) * Q.stride_l


@triton.jit
def load_rows(pointers, ok, columns, d, stride_d, WIDE_OFFSETS: tl.constexpr):
    """Load features `columns` of the rows at `pointers`, zeros if not `ok` or beyond d."""
    mask = ok[:, None] & (columns < d)[None, :]
    if WIDE_OFFSETS == 2:
        columns = columns.to(tl.int64)
    return tl.load(pointers[:, None] + (columns * stride_d)[None, :], mask=mask, other=0.0)


@triton.jit
def sum_row_squares(pointers, ok, d, stride_d, BD: tl.constexpr, WIDE_OFFSETS: tl.constexpr):
    """Return ``sum_k x[k]^2`` of each row in fp32, read in chunks of BD features."""
    total = tl.zeros(ok.shape, tl.float32)
    for c0 in range(0, d, BD):
        x = load_rows(pointers, ok, c0 + tl.arange(0, BD), d, stride_d, WIDE_OFFSETS).to(tl.float32)
        total += tl.sum(x * x, axis=1)
    return total


@triton.jit
def square(x):
    """Return the rounded square of `x` in fp32.

    A product that the compiler fuses with some of the additions would depend on the layout.
    """
    x = x.to(tl.float32)
    return tl.fma(x, x, tl.zeros_like(x))


@triton.jit
def sum_chunk_squares(pointers, ok, c0, d, stride_d, WIDTH: tl.constexpr, WIDE_OFFSETS: tl.constexpr):
    """Return sums of WIDTH squares of each row from feature c0 on, as one tree for every layout.

    At most 16 features are read at a time.
    """
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
    """Return `sum_row_squares`, with each chunk summed as one tree."""
    total = tl.zeros(ok.shape, tl.float32)
    for c0 in range(0, d, BD):
        total += sum_chunk_squares(pointers, ok, c0, d, stride_d, BD, WIDE_OFFSETS)
    return total


@triton.jit
def load_query_mask(Q, i, s, ok):
    """Return `ok` without the masked query tokens."""
    if Q.mask is not None:
        offsets = i.to(tl.int64) * Q.mask_stride_n + s.to(tl.int64) * Q.mask_stride_l
        ok = compiler_barrier_dtype((ok & (tl.load(Q.mask + offsets, mask=ok, other=0) != 0)).to(tl.int32)) > 0
    return ok


@triton.jit
def choose_empty_score(has_rows):
    """Return the score of a document without tokens: -inf, or 0 for a query without tokens."""
    return tl.where(has_rows > 0, float("-inf"), 0.0)


@triton.jit
def load_query_weight(Q, i, s, ok):
    """Return the weight of each query token, 1 without weights and 0 if not `ok`."""
    if Q.weight is not None:
        offsets = i.to(tl.int64) * Q.weight_stride_n + s.to(tl.int64) * Q.weight_stride_l
        w = tl.load(Q.weight + offsets, mask=ok, other=0.0)
    else:
        w = tl.where(ok, 1.0, 0.0)
    return w
