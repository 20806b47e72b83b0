"""Sum the query rows whose argmax is a given document token, as a one-hot product on tensor cores.

```text
G[t] = sum over rows r with argmax t of c[r] * Q[r],    c[r] = grad_score * q_weight[r] * inverse_norm(Q[r])
```

A layout supplies the rows of a tile. Its `each_step` calls a visitor of this module with the `StepRows` of each step.
`sum_rows` computes:

```text
scale = 1
if fp16 or terms: scale = power of two that brings the largest finite |c| just below 2^15    # one pass over all rows
G = 0                                            # [BN, BD] in fp32, transposed for half dtypes
for rows r of the tile, ascending, BM at a time:
    x = Q[r]                                     # [BM, BD], zeros for rows without a hit
    fp32: G += onehot(token[r], c * scale) @ x
    half: hi, lo = split(c * scale)              # c = hi + lo in the dtype of Q
          G += x.T @ onehot(token[r], hi).T + x.T @ onehot(token[r], lo).T
    terms: x_hi, x_lo = terms of Q[r]            # Q[r] = x_hi + x_lo / 2^11, in fp16
           hi, lo = split(c * scale[token[r]])   # c = hi + lo / 2^11, and each token has a scale
           G += the products of both terms of Q[r] and both parts of c
G = G / scale
if G holds NaN or inf:                           # rare
    G = the same product over the finite rows only
    for rows r that hold NaN or inf, ascending: G[token[r]] += c[r] * Q[r]
```

Invariants:

- Rows are added in ascending order, so the sum has the same bits on every run. There are no atomics.
- The split `c = hi + lo` is accurate to 2^-17 for bf16 and to 2^-22 for fp16. With terms it is accurate to 2^-22 of a
  coefficient or to 2^-51 of the largest coefficient of the token, far below the rounding of the sum.
- A NaN or infinity in one row reaches only the token of that row, because the fallback adds such rows one by one. With
  terms, it also adds the fp32 rows whose range two terms cannot hold.
"""

import triton
import triton.language as tl

from ...common.fp32 import FP16_LOW_SCALE, split_to_fp16
from ...common.primitives import load_rows
from ..arguments import TileSum

LARGEST_STEPS = tl.constexpr(4)  # steps of rows whose coefficients are loaded at once for the scale
NON_FINITE_STEP_ROWS = tl.constexpr(16)  # rows of a step of the fallback for non-finite rows


@triton.jit
def rank_hit_tokens(counts):
    """Return which tokens of a tile are an argmax, their number, and their slots.

    `counts` holds the number of rows whose argmax is a token. Slots are the exclusive prefix counts.
    """
    hits = (counts > 0).to(tl.int32)
    return hits, tl.sum(hits, axis=0), tl.cumsum(hits, axis=0) - hits


@triton.jit
def locate_slot_tokens(hits, slots, u0, C: tl.constexpr):
    """Return the tokens of a tile that have the BN slots from `u0` on, or -1 after the last slot."""
    is_slot = (slots[None, :] == (u0 + tl.arange(0, C.BN))[:, None]) & (hits > 0)[None, :]
    return tl.max(tl.where(is_slot, tl.arange(0, slots.shape[0])[None, :], -1), axis=1)


@triton.jit
def find_slots(slots, u0, tile_row, C: tl.constexpr):
    """Return the slots of rows of a tile minus `u0`, or -1 if outside the BN slots from `u0` on.

    A `tile_row` outside the tile is -1.
    """
    slot = tl.gather(slots, tl.maximum(tile_row, 0), axis=0) - u0
    return materialize_once(tl.where((tile_row >= 0) & (slot >= 0) & (slot < C.BN), slot, -1))


@triton.jit
def materialize_once(x):
    """Return `x` through a reduction, so that it is computed once.

    Triton repeats computations that it considers cheap, including loads, in each layout that uses them. It does not
    repeat a reduction.
    """
    return tl.max(tl.broadcast_to(x[:, None], (x.shape[0], 2)), axis=1)


@triton.jit
def _make_power_of_two(biased_exponent):
    """Return the power of two with this biased exponent."""
    return (biased_exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def finite_abs(coefficient):
    """Return the magnitude of each coefficient, or 0 if it is not finite."""
    size = tl.abs(coefficient)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def compute_scales(largest):
    """Return a power of two that brings the largest finite coefficient just below 2^15, and its inverse.

    Only fp16 needs the scale, because upstream gradients may leave its range at either end. bf16 has the range of fp32.
    `largest` is a scalar, or one value for each row or token.
    """
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15)
    return _make_power_of_two(268 - exponent), _make_power_of_two(exponent - 14)


@triton.jit
def _add_one_hot_product(acc, x, rows, coefficient, C: tl.constexpr):
    """Add the one-hot product to `acc`: `[BN, BD]` for fp32, transposed with x as the left operand for half dtypes.

    With C.LANES > 1 the high and low parts of a token are two columns of one product `[BD, 2 * BN]`. Otherwise there
    are two products.
    """
    if x.dtype == tl.float32:
        match = rows.token[None, :] == tl.arange(0, C.BN)[:, None]
        acc = tl.dot(tl.where(match, coefficient[None, :], 0.0), x, acc, input_precision=C.PRECISION)
    else:
        high = coefficient.to(x.dtype)
        low = (coefficient - high.to(tl.float32)).to(x.dtype)
        zero = tl.full((1, 1), 0, x.dtype)
        if C.LANES > 1:
            m = tl.arange(0, 2 * C.BN)
            part = tl.where((m % 2 == 0)[:, None], high[None, :], low[None, :])
            one_hot = tl.where(rows.token[None, :] == (m // 2)[:, None], part, zero)
            acc = tl.dot(tl.trans(x), tl.trans(one_hot), acc)
        else:
            match = rows.token[None, :] == tl.arange(0, C.BN)[:, None]
            acc = tl.dot(tl.trans(x), tl.trans(tl.where(match, high[None, :], zero)), acc)
            acc = tl.dot(tl.trans(x), tl.trans(tl.where(match, low[None, :], zero)), acc)
    return acc


@triton.jit
def _load_terms(rows, s, C: tl.constexpr):
    """Load some features of the fp16 terms hi and lo of rows."""
    hi = load_rows(rows.terms, rows.hit, s.columns, s.d, 1, C.WIDE_OFFSETS)
    return hi, load_rows(rows.terms + s.d, rows.hit, s.columns, s.d, 1, C.WIDE_OFFSETS)


@triton.jit
def _add_term_products(sums, terms, rows, coefficient, scale, C: tl.constexpr):
    """Add the one-hot products of both terms of rows to `sums`, two of `[BD, 2 * BN]`.

    The high and low parts of a token are two columns of a product.
    """
    high, low = split_to_fp16(coefficient * tl.gather(scale, tl.maximum(rows.token, 0), axis=0))
    m = tl.arange(0, 2 * C.BN)
    part = tl.where((m % 2 == 0)[:, None], high[None, :], low[None, :])
    one_hot = tl.trans(tl.where(rows.token[None, :] == (m // 2)[:, None], part, tl.full((1, 1), 0, tl.float16)))
    return tl.dot(tl.trans(terms[0]), one_hot, sums[0]), tl.dot(tl.trans(terms[1]), one_hot, sums[1])


@triton.jit
def _join_parts(G, C: tl.constexpr):
    """Return the sums `[BD, BN]` of the high and low parts of all tokens."""
    high, low = tl.split(tl.reshape(G, (C.BD, C.BN, 2)))
    return high + low * (1.0 / FP16_LOW_SCALE)


@triton.jit
def _is_finite(x, coefficient):
    """Return whether each row and its coefficient are finite."""
    finite = tl.min((tl.abs(x.to(tl.float32)) < float("inf")).to(tl.int32), axis=1) > 0
    return finite & (tl.abs(coefficient) < float("inf"))


@triton.jit
def _update_largest(largest, rows, s, C: tl.constexpr):
    """Visitor that keeps the largest finite coefficient at each position of a step."""
    return tl.maximum(largest, finite_abs(rows.coefficient))


@triton.jit
def _update_largest_of_tokens(largest, rows, s, C: tl.constexpr):
    """Visitor that keeps the largest finite coefficient of each token at each position of a step, `[BN, STEP]`."""
    is_token = rows.token[None, :] == tl.arange(0, C.BN)[:, None]
    return tl.maximum(largest, tl.where(is_token, finite_abs(rows.coefficient)[None, :], 0.0))


@triton.jit
def _add_product(G, rows, s, C: tl.constexpr):
    """Visitor that adds the product of all rows."""
    if s.up.terms is not None:
        G = _add_term_products(G, _load_terms(rows, s, C), rows, rows.coefficient, s.scale, C)
    else:
        x = load_rows(rows.pointers, rows.hit, s.columns, s.d, s.Q.stride_d, C.WIDE_OFFSETS)
        G = _add_one_hot_product(G, x, rows, rows.coefficient * s.scale, C)
    return G


@triton.jit
def _add_finite_product(G, rows, s, C: tl.constexpr):
    """Visitor that adds the product of the finite rows."""
    if s.up.terms is not None:
        hi, lo = _load_terms(rows, s, C)
        finite = _is_finite(hi, rows.coefficient)
        zero = tl.full((1, 1), 0, tl.float16)
        terms = tl.where(finite[:, None], hi, zero), tl.where(finite[:, None], lo, zero)
        G = _add_term_products(G, terms, rows, tl.where(finite, rows.coefficient, 0.0), s.scale, C)
    else:
        x = load_rows(rows.pointers, rows.hit, s.columns, s.d, s.Q.stride_d, C.WIDE_OFFSETS)
        finite = _is_finite(x, rows.coefficient)
        x = tl.where(finite[:, None], x, tl.full((1, 1), 0, x.dtype))
        G = _add_one_hot_product(G, x, rows, tl.where(finite, rows.coefficient, 0.0) * s.scale, C)
    return G


@triton.jit
def _add_non_finite(G, rows, s, C: tl.constexpr):
    """Visitor that adds the rows with a NaN or infinity of a step of NON_FINITE_STEP_ROWS rows, one by one.

    In a product such a row would reach every token of the tile. The terms of a row that they cannot hold are NaN.
    """
    x = load_rows(rows.pointers, rows.hit, s.columns, s.d, s.Q.stride_d, C.WIDE_OFFSETS).to(tl.float32)
    if s.up.terms is not None:
        hi, _ = _load_terms(rows, s, C)
        is_non_finite = rows.hit & (_is_finite(hi, rows.coefficient) == 0)
    else:
        is_non_finite = rows.hit & (_is_finite(x, rows.coefficient) == 0)
    if tl.max(is_non_finite.to(tl.int32), axis=0) > 0:
        for n in range(NON_FINITE_STEP_ROWS):
            is_row = (tl.arange(0, NON_FINITE_STEP_ROWS) == n) & is_non_finite
            token = tl.max(tl.where(is_row, rows.token, -1), axis=0)
            row = tl.sum(tl.where(is_row[:, None], rows.coefficient[:, None] * x, 0.0), axis=0)
            G += tl.where((tl.arange(0, C.BN) == token)[:, None], row[None, :], 0.0)
    return G


@triton.jit
def _sum_products(each_step: tl.constexpr, product: tl.constexpr, s, STEP: tl.constexpr, C: tl.constexpr):
    """Return the sums `[BN, BD]` of a tile's rows, times the scale, STEP rows at a time."""
    if s.up.terms is not None:
        zeros = tl.full((C.BD, 2 * C.BN), 0, tl.float32)
        hi, lo = each_step(product, (zeros, zeros), s, STEP, True, None, C)
        G = tl.trans(_join_parts(hi, C) + _join_parts(lo, C) * (1.0 / FP16_LOW_SCALE))
    else:
        HALF: tl.constexpr = s.Q.ptr.dtype.element_ty != tl.float32
        PAIRS: tl.constexpr = HALF and C.LANES > 1
        M: tl.constexpr = C.BD if HALF else C.BN
        N: tl.constexpr = (2 * C.BN if PAIRS else C.BN) if HALF else C.BD
        G = each_step(product, tl.full((M, N), 0, tl.float32), s, STEP, True, None, C)
        if HALF:
            if PAIRS:
                G = tl.sum(tl.reshape(G, (C.BD, C.BN, 2)), axis=2)
            G = tl.trans(G)
    return G


@triton.jit
def sum_rows(each_step: tl.constexpr, tile, up, Q, columns, d, C: tl.constexpr):
    """Sum ``coefficient * row`` for each token of a tile, for some features.

    Args:
        each_step: ``each_step(visit, total, s, STEP, AHEAD, STAGES, C)`` folds ``visit(total, rows, s, C)`` over the
            rows of the tile, STEP at a time. With AHEAD it loads the indices of the rows one step ahead.
        tile: `GradientTile` or `PairRange`.
        up: `UpstreamArgs`.
        Q: `QueryArgs`.
        columns: Features to sum.
        d: Number of features.
        C: Compile-time choices, a `KernelConfig`.

    Returns:
        fp32 sums `[BN, BD]`.
    """
    s = TileSum(tile, up, Q, columns, 1.0, d)
    if up.terms is not None:
        zeros = tl.full((C.BN, LARGEST_STEPS * C.BM), 0, tl.float32)
        largest = each_step(_update_largest_of_tokens, zeros, s, LARGEST_STEPS * C.BM, False, None, C)
        scale, token_unscale = compute_scales(tl.max(largest, axis=1))
        unscale = token_unscale[:, None]
    elif Q.ptr.dtype.element_ty == tl.float16:
        # A step that computes norms holds features of its rows.
        STEP: tl.constexpr = C.BM if C.NORMALIZE and up.norms is None else LARGEST_STEPS * C.BM
        largest = each_step(_update_largest, tl.full((STEP,), 0, tl.float32), s, STEP, False, None, C)
        scale, unscale = compute_scales(tl.max(largest, axis=0))
    else:
        scale = 1.0
        unscale = 1.0
    s = TileSum(tile, up, Q, columns, scale, d)
    G = _sum_products(each_step, _add_product, s, C.BM, C) * unscale
    # A zero of the one-hot matrix times NaN or inf is NaN. Only then does every row need a check.
    if tl.sum(G * 0.0) != 0.0:
        G = _sum_products(each_step, _add_finite_product, s, NON_FINITE_STEP_ROWS, C) * unscale
        G = each_step(_add_non_finite, G, s, NON_FINITE_STEP_ROWS, False, 1, C)
    return G
