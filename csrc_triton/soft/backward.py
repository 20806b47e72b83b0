"""Backward of soft MaxSim: the owner of a gradient recomputes probabilities and multiplies them with the other side.

```text
P[r, t] = 2^(rate (<q_r, d_t> - lse_r))
grad q_r = q_weight[r] * sum_k g[k] sum_t P[r, t] d_t
grad d_t = sum_r g q_weight[r] P[r, t] q_r
grad tau = sum over rows and documents of g q_weight H(P),    H(P) = -sum_t P log P
```

Scores are linear in lse, so no delta term is subtracted from P, unlike in attention.

```text
maxsim_soft_queries, program = (BM query rows, part of `documents_per_part` documents, BD features):
    x = query rows                                  # [BM, BD]
    for tiles of the documents of the part, BN tokens at a time:
        y = document tokens                         # [BN, BD]
        S = x @ y.T                                 # [BM, BN], over all features
        P = 2^(rate (S - lse))
        entropy += sum(P * (lse - S)), without the peak    # for `spreads`
        acc += (P * g) @ y                          # [BM, BD], for `sums`
    sums[part], spreads[part], weights[part] = acc, sum of g H tau, sum of g lse
maxsim_soft_documents, program = (BM tokens of a document, BD features):
    x = document tokens
    for r0 in range(0, query rows, BN):
        q = query rows r0 to r0 + BN - 1
        S = x @ q.T
        acc += (2^(rate (S - lse)) * g * q_weight) @ q
    grad = acc, through the Jacobian of the norm if BD covers d
```

Invariants:

- Masked tokens and rows are loaded as zeros. They add nothing, whatever their P.
- Each sum is computed by one program in ascending order. There are no atomics.
- For fp16, weights are divided by the largest coefficient of the row or program, so that they fit the range.
- With d > BD, similarities use all features in steps. A program then sums BD of the features.
"""

import triton
import triton.language as tl

from ..backward.gather import backprop_normalize, find_owner
from ..common.fp32 import round_to_tf32
from ..common.primitives import (
    compiler_barrier_dtype,
    compute_inverse_norm,
    import_args_class,
    load_query_mask,
    load_query_weight,
    load_rows,
    locate_document,
    locate_rows,
    nan_max,
    sum_row_squares,
    to_int64,
)
from ..common.similarities import add_product
from .maximum import compute_peak_entropy, compute_probabilities, compute_rate, load_temperature, remove_peak

_UPSTREAM_BLOCK_ROWS = tl.constexpr(128)  # query rows of a step of the search for the largest coefficient


@triton.jit
def _compute_similarities(owned_side, other_side, columns, d, C: tl.constexpr):
    """Return similarities `[BM, BN]` of owned rows to other rows.

    Also returns features `columns` of the other rows, normalized with C.NORMALIZE.
    """
    S = tl.full((C.BM, C.BN), 0, tl.float32)
    squares = tl.full((C.BN,), 0, tl.float32)
    if C.SINGLE_STEP:
        if other_side.tile is not None:
            y = other_side.tile
        else:
            y = load_rows(other_side.ptr, other_side.ok, columns, d, other_side.stride_d, C.WIDE_OFFSETS)
        S = add_product(S, owned_side.tile, y, C)
        if C.NORMALIZE:
            squares += tl.sum(y.to(tl.float32) * y.to(tl.float32), axis=1)
    else:
        for c0 in range(0, d, C.BD):
            step = c0 + tl.arange(0, C.BD)
            a = load_rows(owned_side.ptr, owned_side.ok, step, d, owned_side.stride_d, C.WIDE_OFFSETS)
            b = load_rows(other_side.ptr, other_side.ok, step, d, other_side.stride_d, C.WIDE_OFFSETS)
            S = add_product(S, a, b, C)
            if C.NORMALIZE:
                squares += tl.sum(b.to(tl.float32) * b.to(tl.float32), axis=1)
        y = load_rows(other_side.ptr, other_side.ok, columns, d, other_side.stride_d, C.WIDE_OFFSETS)
    inverse = tl.full((C.BN,), 1, tl.float32)
    if C.NORMALIZE:
        inverse = compute_inverse_norm(squares)
        S = S * owned_side.scale[:, None] * inverse[None, :]
        y = (y.to(tl.float32) * inverse[:, None]).to(y.dtype)
    return S, y


@triton.jit
def _accumulate_weighted(acc, P, y, C: tl.constexpr):
    """Return `acc` plus the product of weights P and features `y` of the other side."""
    P = P.to(y.dtype)
    if C.PRECISION == "tf32":
        P = round_to_tf32(P)
        y = round_to_tf32(y)
    return tl.dot(P, y, acc, input_precision=C.PRECISION)


@triton.jit
def _load_owned_rows(pointers, ok, columns, stride_d, d, C: tl.constexpr):
    """Load the features of rows, if one step covers them, and inverse norms, or 1 without C.NORMALIZE."""
    scale = tl.full((C.BM,), 1, tl.float32)
    if C.NORMALIZE:
        scale = compute_inverse_norm(sum_row_squares(pointers, ok, d, stride_d, C.BD, C.WIDE_OFFSETS))
    tile = scale  # placeholder that is not read
    if C.SINGLE_STEP:
        tile = load_rows(pointers, ok, columns, d, stride_d, C.WIDE_OFFSETS)
    return tile, scale


@triton.jit
def load_upstream(up, owner, k, i, r, ok):
    """Load soft maxima and score gradients of query rows in document k.

    Both are zero if no soft maximum exists.
    """
    k = k.to(tl.int64)
    lse = tl.load(up.lse + owner.to(tl.int64) * up.lse_stride_owner + k * up.lse_stride_k + r, mask=ok, other=0.0)
    g = tl.load(up.grad_scores + i.to(tl.int64) * up.stride_q + k * up.stride_k, mask=ok, other=0.0)
    exists = lse != float("-inf")
    return tl.where(exists, lse, 0.0), tl.where(exists, g, 0.0)


@triton.jit
def _choose_weight_scale(largest, like):
    """Return the divisor of coefficients for fp16: `largest`, the largest coefficient.

    The divisor is 1 for other dtypes, and if `largest` is zero, infinite, or NaN.
    """
    is_usable = (largest > 0) & (largest < float("inf"))
    return tl.where(is_usable, largest, 1.0) if like == tl.float16 else largest * 0 + 1.0


@triton.jit
def _count_group_rows(up, C: tl.constexpr):
    """Return the number of query rows that a document is scored against."""
    count = up.Lq
    if not C.CANDIDATES:
        count = up.Nq * up.Lq
    return count


@triton.jit
def _sum_maxima(up, owner, k0, k1, i, r, ok, C: tl.constexpr):
    """Return ``sum_k g lse`` of documents k0 to k1 - 1, for each query row."""
    total = tl.full((C.BM,), 0, tl.float32)
    for k in range(k0, k1):
        lse, g = load_upstream(up, owner, to_int64(k), i, r, ok)
        total += tl.where(g != 0.0, g * lse, 0.0)
    return total


@triton.jit
def _find_weight_scale(Q, up, owner, k0, k1, i, r, ok, C: tl.constexpr):
    """Return the scale that keeps the weights of documents `k0` to `k1 - 1` in the range of the dtype of `Q`."""
    largest = tl.full((C.BM,), 0, tl.float32)
    if Q.ptr.dtype.element_ty == tl.float16:
        for k in range(k0, k1):
            _, g = load_upstream(up, owner, to_int64(k), i, r, ok)
            largest = nan_max(largest, tl.abs(g))
    return _choose_weight_scale(largest, Q.ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["documents_per_part"])
def maxsim_soft_queries(Q, D, tiles, up, tau, sums, weights, spreads, documents_per_part, d, C: tl.constexpr):
    """Sum over `documents_per_part` documents for BM query rows, in fp32.

    The sums are ``sum_t g P d_t`` of BD features, ``g lse``, and ``g H tau``. The entropy ``H = -sum_t P log P`` is
    summed without the peak, see `compute_peak_entropy`. All its terms are positive.

    Args:
        Q: `QueryArgs`.
        D: `DocumentArgs`.
        tiles: Tensor descriptor of documents in blocks `[1, BN, BD]`, or None.
        up: `SoftUpstreamArgs`.
        tau: Temperature, a number or a pointer to one.
        sums: Output `[parts, Nq, Lq, d]`, or None.
        weights: Output `[parts, Nq, Lq]` for the gradient of query weights, or None.
        spreads: Output `[parts, Nq, Lq]` for the gradient of the temperature, or None.
        documents_per_part: Documents of a part. The grid is `[row tiles, parts, feature steps]`.
        d: Number of features.
        C: Compile-time choices, a `KernelConfig`.
    """
    count = _count_group_rows(up, C)
    tiles_per_owner = tl.cdiv(count, C.BM)
    owner = tl.program_id(0) // tiles_per_owner
    r = tl.program_id(0) % tiles_per_owner * C.BM + tl.arange(0, C.BM)
    i = owner + r // up.Lq
    row_ok = r < count
    ok = load_query_mask(Q, i, r % up.Lq, row_ok)
    columns = tl.program_id(2) * C.BD + tl.arange(0, C.BD)
    pointers = locate_rows(Q, i, r % up.Lq)
    Side: tl.constexpr = import_args_class("SoftOperand", "backward.arguments")
    owned_side = Side(pointers, ok, Q.stride_d, *_load_owned_rows(pointers, ok, columns, Q.stride_d, d, C))
    rate = compute_rate(load_temperature(tau), 1.0)
    k0 = tl.program_id(1) * documents_per_part
    k1 = tl.minimum(k0 + documents_per_part, up.K)

    row = (tl.program_id(1) * up.Nq + i).to(tl.int64) * up.Lq + r % up.Lq
    if weights is not None:
        total = _sum_maxima(up, owner, k0, k1, i, r, ok, C)
        if tl.program_id(2) == 0:
            tl.store(weights + row, total, mask=row_ok)
    if sums is not None or spreads is not None:
        weight_scale = _find_weight_scale(Q, up, owner, k0, k1, i, r, ok, C)
        inverse = 1.0 / weight_scale
        acc = tl.full((C.BM, C.BD), 0, tl.float32)
        spread = tl.full((C.BM,), 0, tl.float32)
        tail_sums = tl.full((C.BM,), 0, tl.float32)  # probabilities of the document so far, without the peak
        entropy = tl.full((C.BM,), 0, tl.float32)  # their entropy times tau
        tiles_per_document = tl.cdiv(up.Ld, C.BN)
        for n in range(0, (k1 - k0) * tiles_per_document):
            document = to_int64(k0 + n // tiles_per_document)
            t0 = n % tiles_per_document * C.BN
            t = t0 + tl.arange(0, C.BN)
            if tiles is not None:
                tile = tl.reshape(tiles.load([owner * up.K + k0 + n // tiles_per_document, t0, 0]), (C.BN, C.BD))
                other_side = Side(None, t < up.Ld, None, tile, None)
            else:
                other_side = Side(*_locate_tokens(D, up, owner, document, t), D.stride_d, None, None)
            lse, g = load_upstream(up, owner, document, i, r, ok)
            S, y = _compute_similarities(owned_side, other_side, columns, d, C)
            if spreads is not None:
                P = remove_peak(compute_probabilities(S, lse[:, None], 1.0, rate), other_side.ok[None, :])
                tail_sums += tl.sum(P, axis=1)
                entropy += tl.sum(tl.where(P != 0.0, P * (lse[:, None] - S), 0.0), axis=1)
                if t0 + C.BN >= up.Ld:
                    spread += tl.where(
                        g != 0.0, g * (entropy + compute_peak_entropy(tail_sums) * load_temperature(tau)), 0.0
                    )
                    tail_sums = tl.zeros_like(tail_sums)
                    entropy = tl.zeros_like(entropy)
            if sums is not None:
                acc = _accumulate_weighted(
                    acc, compute_probabilities(S, lse[:, None], (g * inverse)[:, None], rate), y, C
                )
        if sums is not None:
            mask = row_ok[:, None] & (columns < d)[None, :]
            tl.store(sums + row[:, None] * d + columns[None, :], acc * weight_scale[:, None], mask=mask)
        if spreads is not None and tl.program_id(2) == 0:
            tl.store(spreads + row, spread, mask=row_ok)


@triton.jit
def _locate_tokens(D, up, owner, k, t):
    """Return pointers to tokens t of document k, and which tokens are kept."""
    ok = t < up.Ld
    if D.mask is not None:
        mask_offsets = (
            owner.to(tl.int64) * D.mask_stride_owner + k * D.mask_stride_doc + t.to(tl.int64) * D.mask_stride_l
        )
        ok = ok & (tl.load(D.mask + mask_offsets, mask=ok, other=0) != 0)
    return locate_document(D, owner, k) + t.to(tl.int64) * D.stride_l, ok


@triton.jit
def _load_coefficients(Q, up, owner, k, r, ok):
    """Load values of query rows r in document k: which rows are kept, soft maxima, and ``g * q_weight``.

    The values belong to columns of a tile, of which a thread holds many. With `compiler_barrier_dtype` each thread
    first computes only its own share.
    """
    i = owner + r // up.Lq
    s = r % up.Lq
    ok = load_query_mask(Q, i, s, ok)
    lse, g = load_upstream(up, owner, k, i, r, ok)
    return ok, compiler_barrier_dtype(lse), compiler_barrier_dtype(g * load_query_weight(Q, i, s, ok & (g != 0.0)))


@triton.jit
def _locate_query_rows(Q, up, owner, r, C: tl.constexpr):
    """Return pointers to query rows r."""
    if C.EVEN_ROW_STRIDE:
        pointers = locate_rows(Q, owner, 0 * r) + r.to(tl.int64) * Q.stride_l
    else:
        pointers = locate_rows(Q, owner + r // up.Lq, r % up.Lq)
    return pointers


@triton.jit
def _backprop_norm(G, owned_side, columns, d, C: tl.constexpr):
    """Return `G`, with all features of the owned rows, through the Jacobian of their norms.

    Rows without a gradient get zero, because they may hold NaN.
    """
    x = load_rows(owned_side.ptr, owned_side.ok, columns, d, owned_side.stride_d, C.WIDE_OFFSETS).to(tl.float32)
    squares = tl.sum(x * x, axis=1)
    dot = tl.sum(x * G, axis=1) * compute_inverse_norm(squares)
    live = tl.max((G != 0.0).to(tl.int32), axis=1)
    return tl.where((live > 0)[:, None], backprop_normalize(G, x, squares, dot), 0.0)


@triton.jit
def maxsim_soft_documents(Q, D, tiles, up, tau, grad, d, C: tl.constexpr):
    """Compute ``sum_r g q_weight P q_r`` for BM tokens of a document and BD features.

    If BD covers d and C.NORMALIZE is set, the sum passes through the Jacobian of the norm. Otherwise `grad` receives
    the gradient of normalized tokens.

    Args:
        Q: `QueryArgs`.
        D: `DocumentArgs`.
        tiles: Tensor descriptor of query rows in blocks `[BN, BD]`, or None.
        up: `SoftUpstreamArgs`.
        tau: Temperature, a number or a pointer to one.
        grad: Output `[documents, Ld, d]`, contiguous. The grid is `[token tiles, 1, feature steps]`.
        d: Number of features.
        C: Compile-time choices, a `KernelConfig`.
    """
    tiles_per_document = tl.cdiv(up.Ld, C.BM)
    document = tl.program_id(0) // tiles_per_document
    owner, k = find_owner(document, up.K, C)
    k = to_int64(k)
    t = tl.program_id(0) % tiles_per_document * C.BM + tl.arange(0, C.BM)
    columns = tl.program_id(2) * C.BD + tl.arange(0, C.BD)
    pointers, is_kept = _locate_tokens(D, up, owner, k, t)
    Side: tl.constexpr = import_args_class("SoftOperand", "backward.arguments")
    owned_side = Side(pointers, is_kept, D.stride_d, *_load_owned_rows(pointers, is_kept, columns, D.stride_d, d, C))
    rate = compute_rate(load_temperature(tau), 1.0)
    count = _count_group_rows(up, C)

    largest = tl.full((_UPSTREAM_BLOCK_ROWS,), 0, tl.float32)
    if Q.ptr.dtype.element_ty == tl.float16:
        for r0 in range(0, count, _UPSTREAM_BLOCK_ROWS):
            r = r0 + tl.arange(0, _UPSTREAM_BLOCK_ROWS)
            _, _, coefficient = _load_coefficients(Q, up, owner, k, r, r < count)
            largest = nan_max(largest, tl.abs(coefficient))
    largest = _choose_weight_scale(tl.reduce(largest, 0, nan_max), Q.ptr.dtype.element_ty)
    inverse = 1.0 / largest
    acc = tl.full((C.BM, C.BD), 0, tl.float32)
    for r0 in range(0, count, C.BN):
        r = r0 + tl.arange(0, C.BN)
        ok, lse, coefficient = _load_coefficients(Q, up, owner, k, r, r < count)
        if tiles is not None:
            other_side = Side(None, None, None, tiles.load([r0, 0]), None)
        else:
            other_side = Side(_locate_query_rows(Q, up, owner, r, C), ok, Q.stride_d, None, None)
        S, y = _compute_similarities(owned_side, other_side, columns, d, C)
        acc = _accumulate_weighted(
            acc, compute_probabilities(S, lse[None, :], (coefficient * inverse)[None, :], rate), y, C
        )
    acc = tl.where(owned_side.ok[:, None], acc * largest, 0.0)
    if C.NORMALIZE and C.SINGLE_STEP:
        acc = _backprop_norm(acc, owned_side, columns, d, C)
    row = document.to(tl.int64) * up.Ld + t
    mask = (t < up.Ld)[:, None] & (columns < d)[None, :]
    tl.store(grad + row[:, None] * d + columns[None, :], acc.to(grad.dtype.element_ty), mask=mask)
