"""Document gradient for few query rows: write zeros, then overwrite the tokens that are an argmax.

A program owns `tokens` tokens of one document, which is scored against at most `BM` query rows.

```text
token, g = argmax and grad_scores of the rows       # [BM], token = -1 outside the program's tokens
c = g * q_weight * inverse_norm(Q rows)
grad_D[t_begin:t_end] = 0
barrier
x = Q rows with a hit                               # [BM, BD]
for r0 in range(0, rows, BN):
    t = token[r0 : r0 + BN]                         # [BN], one output token for each row
    match[n, r] = token[r] == t[n]                  # [BN, BM]
    G = (match * c) @ x                             # [BN, BD], half dtypes: c = hi + lo, two products
    grad_D[t] = G through the Jacobian of the norm
```

Invariants:

- Rows with the same token compute and write the same bits, so the order of the writes is irrelevant.
- No atomics. If a product is not finite, the matching rows are added one by one in ascending order.
"""

import triton
import triton.language as tl

from ...common.primitives import (
    compiler_barrier_dtype,
    compute_inverse_norm,
    load_query_weight,
    load_rows,
    locate_document,
    sum_row_squares,
)
from ..arguments import GradientTarget
from ..gather import find_owner, load_argmax, write_gradient
from ..pairs import fill_with_zeros
from .sums import compute_scales, finite_abs


@triton.jit
def _load_hit_tokens(up, owner, k, e, rows, t_begin, t_end, C: tl.constexpr):
    """Return the argmax of each row e, or -1 outside `[t_begin, t_end)`, and the gradient of its score."""
    token, has_argmax, g = load_argmax(up, owner, k, owner + e // up.Lq, e % up.Lq, e < rows, C)
    return compiler_barrier_dtype(
        tl.where(has_argmax & (token >= t_begin) & (token < t_end), token, -1)
    ), compiler_barrier_dtype(g)


@triton.jit
def _locate_document_rows(token, coefficient, owner, up, Q, d, C: tl.constexpr):
    """Return the offsets in Q of the rows scored against a document, and their coefficients."""
    e = tl.arange(0, C.BM)
    i = owner + e // up.Lq
    s = e % up.Lq
    has_argmax = token >= 0
    rows = i.to(tl.int64) * Q.stride_n + s.to(tl.int64) * Q.stride_l
    if Q.weight is not None:
        coefficient *= load_query_weight(Q, i, s, has_argmax)
    if C.NORMALIZE:
        coefficient *= compute_inverse_norm(
            sum_row_squares(Q.ptr + rows, has_argmax, d, Q.stride_d, C.BD, C.WIDE_OFFSETS)
        )
    return rows, tl.where(has_argmax, coefficient, 0.0)


@triton.jit
def _multiply_matches(match, x, coefficient, C: tl.constexpr):
    """Return the sums `[BN, BD]` of the matching rows x times their coefficients.

    For half dtypes the coefficients are split into a high and a low part. If a coefficient or an x is not finite, all
    of G becomes NaN, and `_sum_match_rows` checks for it.
    """
    G = tl.full((C.BN, C.BD), 0, tl.float32)
    if x.dtype == tl.float32:
        zeros = coefficient * 0.0
        G = tl.dot(tl.where(match, coefficient[None, :], zeros[None, :]), x, G, input_precision=C.PRECISION)
    else:
        high = coefficient.to(x.dtype)
        low = (coefficient - high.to(tl.float32)).to(x.dtype)
        zeros = (high.to(tl.float32) * 0.0).to(x.dtype)
        G = tl.dot(tl.where(match, high[None, :], zeros[None, :]), x, G)
        G = tl.dot(tl.where(match, low[None, :], tl.full((1, 1), 0, x.dtype)), x, G)
    return G


@triton.jit
def _add_matches_in_order(match, coefficient, rows, columns, Q, d, C: tl.constexpr):
    """Compute `_multiply_matches` row by row, for rows that may hold NaN or inf.

    In a product such a row would reach every token.
    """
    G = tl.full((C.BN, C.BD), 0, tl.float32)
    for n in range(C.BM):
        is_row = tl.arange(0, C.BM) == n
        is_target = tl.max((match & is_row[None, :]).to(tl.int32), axis=1) > 0
        if tl.max(is_target.to(tl.int32), axis=0) > 0:
            row = Q.ptr + tl.sum(tl.where(is_row, rows, 0), axis=0)
            x = tl.load(row + columns.to(tl.int64) * Q.stride_d, mask=columns < d, other=0.0).to(tl.float32)
            G += tl.where(is_target[:, None], (tl.sum(tl.where(is_row, coefficient, 0.0), axis=0) * x)[None, :], 0.0)
    return G


@triton.jit
def _sum_match_rows(match, coefficient, x, rows, columns, Q, d, C: tl.constexpr):
    """Sum the rows of Q that match each of BN output rows, for BD features. `x` holds these features."""
    scale = 1.0
    unscale = 1.0
    # The coefficients may exceed the range of fp16.
    if x.dtype == tl.float16:
        scale, unscale = compute_scales(tl.max(finite_abs(coefficient), axis=0))
    G = _multiply_matches(match, x, coefficient * scale, C) * unscale
    # A zero of the one-hot matrix times NaN or inf is NaN. Only then does every row need a check.
    if tl.sum(G * 0.0) != 0.0:
        G = _add_matches_in_order(match, coefficient, rows, columns, Q, d, C)
    return G


@triton.jit
def _sum_matches(args, columns, d, C: tl.constexpr):
    """Adapter of `_sum_match_rows` for `write_gradient`. It loads the rows unless C.SINGLE_STEP."""
    x, match, coefficient, rows, ok, Q = args
    if not C.SINGLE_STEP:
        x = load_rows(Q.ptr + rows, ok, columns, d, Q.stride_d, C.WIDE_OFFSETS)
    return _sum_match_rows(match, coefficient, x, rows, columns, Q, d, C)


@triton.jit
def maxsim_grad_sparse_documents(Q, D, up, grad_D, rows, tokens, d, C: tl.constexpr):
    """Compute the gradient of `tokens` tokens of one document for each program.

    Args:
        Q: `QueryArgs`.
        D: `DocumentArgs`.
        up: `UpstreamArgs`.
        grad_D: Output `[documents, Ld, d]`, contiguous.
        rows: Query rows that a document is scored against, at most `BM`.
        tokens: Tokens of a program.
        d: Number of features.
        C: Compile-time choices, a `KernelConfig`.
    """
    parts = tl.cdiv(up.Ld, tokens)
    document = tl.program_id(0) // parts
    t_begin = (tl.program_id(0) % parts) * tokens
    t_end = tl.minimum(t_begin + tokens, up.Ld)
    owner, k = find_owner(document, up.K, C)
    base = locate_document(D, owner, k)
    gradient = grad_D + document.to(tl.int64) * up.Ld * d
    scale = up.scale
    if scale is not None:
        scale += document.to(tl.int64) * up.Ld
    token, g = _load_hit_tokens(up, owner, k, tl.arange(0, C.BM), rows, t_begin, t_end, C)
    begins, coefficient = _locate_document_rows(token, g, owner, up, Q, d, C)
    fill_with_zeros(gradient + t_begin.to(tl.int64) * d, (t_end - t_begin) * d, "")
    # Other threads write the sums.
    tl.debug_barrier()
    x = load_rows(Q.ptr + begins, token >= 0, tl.arange(0, C.BD), d, Q.stride_d, C.WIDE_OFFSETS)
    for r0 in tl.range(0, tl.minimum(rows, C.BM), C.BN, num_stages=1):
        is_slot = tl.arange(0, C.BM)[None, :] == (r0 + tl.arange(0, C.BN))[:, None]
        t = tl.max(tl.where(is_slot, token[None, :], -1), axis=1)
        match = (token[None, :] == t[:, None]) & (t >= 0)[:, None]
        match_args = (x, match, coefficient, begins, token >= 0, Q)
        target = GradientTarget(base, t, t >= 0, gradient, t.to(tl.int64), scale)
        write_gradient(_sum_matches, match_args, target, d, D, d, C)
