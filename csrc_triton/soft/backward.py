"""The backward of soft MaxSim: probabilities are recomputed by who owns a gradient, and multiplied with the other side.

    P[r, t] = 2^(rate (<q_r, d_t> - lse_r)),   grad q_r = w sum_t g P d_t,   grad d_t = sum_r g w P q_r

A program owns query rows and meets document tokens, or owns tokens of a document and meets query rows; a step is one
product for the similarities and one for the sum. Scores are linear in lse: nothing is taken from P, as attention does.
What is masked is loaded as zeros, and adds nothing whatever its P.
"""

import triton
import triton.language as tl

from ..backward.gather import backprop_normalize
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

_UPSTREAM_BLOCK_ROWS = tl.constexpr(128)  # whose upstream gradients are looked at together


@triton.jit
def _compute_similarities(own, other, columns, d, C: tl.constexpr):
    """``[BM, BN]`` similarities of what is owned to others, and of these the features `columns` and inverse norms."""
    S = tl.full((C.BM, C.BN), 0, tl.float32)
    squares = tl.full((C.BN,), 0, tl.float32)
    if C.SINGLE_STEP:
        if other.tile is not None:
            y = other.tile
        else:
            y = load_rows(other.ptr, other.ok, columns, d, other.stride_d, C.WIDE_OFFSETS)
        S = add_product(S, own.tile, y, C)
        if C.NORMALIZE:
            squares += tl.sum(y.to(tl.float32) * y.to(tl.float32), axis=1)
    else:
        for c0 in range(0, d, C.BD):
            step = c0 + tl.arange(0, C.BD)
            a = load_rows(own.ptr, own.ok, step, d, own.stride_d, C.WIDE_OFFSETS)
            b = load_rows(other.ptr, other.ok, step, d, other.stride_d, C.WIDE_OFFSETS)
            S = add_product(S, a, b, C)
            if C.NORMALIZE:
                squares += tl.sum(b.to(tl.float32) * b.to(tl.float32), axis=1)
        y = load_rows(other.ptr, other.ok, columns, d, other.stride_d, C.WIDE_OFFSETS)
    inverse = tl.full((C.BN,), 1, tl.float32)
    if C.NORMALIZE:
        inverse = compute_inverse_norm(squares)
        S = S * own.scale[:, None] * inverse[None, :]
        y = (y.to(tl.float32) * inverse[:, None]).to(y.dtype)
    return S, y


@triton.jit
def _accumulate_weighted(acc, P, y, C: tl.constexpr):
    """`acc` with the features `y` of others, times what they weigh."""
    P = P.to(y.dtype)
    if C.PRECISION == "tf32":
        P = round_to_tf32(P)
        y = round_to_tf32(y)
    return tl.dot(P, y, acc, input_precision=C.PRECISION)


@triton.jit
def _load_owned_rows(pointers, ok, columns, stride_d, d, C: tl.constexpr):
    """The features of rows, where one step covers them, and inverse norms, 1 unless normalising."""
    scale = tl.full((C.BM,), 1, tl.float32)
    if C.NORMALIZE:
        scale = compute_inverse_norm(sum_row_squares(pointers, ok, d, stride_d, C.BD, C.WIDE_OFFSETS))
    tile = scale  # any: it is not read
    if C.SINGLE_STEP:
        tile = load_rows(pointers, ok, columns, d, stride_d, C.WIDE_OFFSETS)
    return tile, scale


@triton.jit
def load_upstream(up, owner, k, i, r, ok):
    """Of query rows in document k: soft maxima and gradients of the scores; zeros where there is no maximum."""
    k = k.to(tl.int64)
    lse = tl.load(up.lse + owner.to(tl.int64) * up.lse_stride_owner + k * up.lse_stride_k + r, mask=ok, other=0.0)
    g = tl.load(up.grad_scores + i.to(tl.int64) * up.stride_q + k * up.stride_k, mask=ok, other=0.0)
    exists = lse != float("-inf")
    return tl.where(exists, lse, 0.0), tl.where(exists, g, 0.0)


@triton.jit
def _choose_weight_scale(most, like):
    """What `most`, the largest coefficient, is divided by so that fp16 holds the others; 1 where that is no number."""
    usable = (most > 0) & (most < float("inf"))
    return tl.where(usable, most, 1.0) if like == tl.float16 else most * 0 + 1.0


@triton.jit
def _count_group_rows(up, C: tl.constexpr):
    """Query rows that a document meets: all, or those of the query that owns it."""
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
    """Return the scale that keeps the weights of documents `k0` to `k1` in the range of the dtype of `Q`."""
    most = tl.full((C.BM,), 0, tl.float32)
    if Q.ptr.dtype.element_ty == tl.float16:
        for k in range(k0, k1):
            _, g = load_upstream(up, owner, to_int64(k), i, r, ok)
            most = nan_max(most, tl.abs(g))
    return _choose_weight_scale(most, Q.ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["each"])
def maxsim_soft_queries(Q, D, tiles, up, tau, sums, weights, spreads, each, d, C: tl.constexpr):
    """Sum over `each` documents for BM query rows: ``sum_t g P d_t`` of BD features, ``g lse`` and ``g H tau``; fp32.

    The entropy ``H = -sum_t P log P`` is summed without the peak, see `compute_peak_entropy`: all its terms are
    positive.

    Programs ``[row tiles, parts, steps of features]`` write `sums` ``[parts, Nq, Lq, d]``, and `weights` and `spreads`
    ``[parts, Nq, Lq]``. Each of the three is None if it is not needed.
    """
    count = _count_group_rows(up, C)
    of_owner = tl.cdiv(count, C.BM)
    owner = tl.program_id(0) // of_owner
    r = tl.program_id(0) % of_owner * C.BM + tl.arange(0, C.BM)
    i = owner + r // up.Lq
    row_ok = r < count
    ok = load_query_mask(Q, i, r % up.Lq, row_ok)
    columns = tl.program_id(2) * C.BD + tl.arange(0, C.BD)
    pointers = locate_rows(Q, i, r % up.Lq)
    Side: tl.constexpr = import_args_class("SoftOperand", "backward.arguments")
    own = Side(pointers, ok, Q.stride_d, *_load_owned_rows(pointers, ok, columns, Q.stride_d, d, C))
    rate = compute_rate(load_temperature(tau), 1.0)
    k0 = tl.program_id(1) * each
    k1 = tl.minimum(k0 + each, up.K)

    row = (tl.program_id(1) * up.Nq + i).to(tl.int64) * up.Lq + r % up.Lq
    if weights is not None:
        total = _sum_maxima(up, owner, k0, k1, i, r, ok, C)
        if tl.program_id(2) == 0:
            tl.store(weights + row, total, mask=row_ok)
    if sums is not None or spreads is not None:
        most = _find_weight_scale(Q, up, owner, k0, k1, i, r, ok, C)
        inverse = 1.0 / most
        acc = tl.full((C.BM, C.BD), 0, tl.float32)
        spread = tl.full((C.BM,), 0, tl.float32)
        rest = tl.full((C.BM,), 0, tl.float32)  # probabilities of the document so far, without the peak
        entropy = tl.full((C.BM,), 0, tl.float32)  # times tau, of these
        tiles_each = tl.cdiv(up.Ld, C.BN)
        for n in range(0, (k1 - k0) * tiles_each):
            document = to_int64(k0 + n // tiles_each)
            t0 = n % tiles_each * C.BN
            t = t0 + tl.arange(0, C.BN)
            if tiles is not None:
                tile = tl.reshape(tiles.load([owner * up.K + k0 + n // tiles_each, t0, 0]), (C.BN, C.BD))
                other = Side(None, t < up.Ld, None, tile, None)
            else:
                other = Side(*_locate_tokens(D, up, owner, document, t), D.stride_d, None, None)
            lse, g = load_upstream(up, owner, document, i, r, ok)
            S, y = _compute_similarities(own, other, columns, d, C)
            if spreads is not None:
                P = remove_peak(compute_probabilities(S, lse[:, None], 1.0, rate), other.ok[None, :])
                rest += tl.sum(P, axis=1)
                entropy += tl.sum(tl.where(P != 0.0, P * (lse[:, None] - S), 0.0), axis=1)
                if t0 + C.BN >= up.Ld:
                    spread += tl.where(
                        g != 0.0, g * (entropy + compute_peak_entropy(rest) * load_temperature(tau)), 0.0
                    )
                    rest = tl.zeros_like(rest)
                    entropy = tl.zeros_like(entropy)
            if sums is not None:
                acc = _accumulate_weighted(
                    acc, compute_probabilities(S, lse[:, None], (g * inverse)[:, None], rate), y, C
                )
        if sums is not None:
            mask = row_ok[:, None] & (columns < d)[None, :]
            tl.store(sums + row[:, None] * d + columns[None, :], acc * most[:, None], mask=mask)
        if spreads is not None and tl.program_id(2) == 0:
            tl.store(spreads + row, spread, mask=row_ok)


@triton.jit
def _locate_tokens(D, up, owner, k, t):
    """Where tokens t of document k begin, and which count."""
    ok = t < up.Ld
    if D.mask is not None:
        at = owner.to(tl.int64) * D.mask_stride_owner + k * D.mask_stride_doc + t.to(tl.int64) * D.mask_stride_l
        ok = ok & (tl.load(D.mask + at, mask=ok, other=0) != 0)
    return locate_document(D, owner, k) + t.to(tl.int64) * D.stride_l, ok


@triton.jit
def _load_coefficients(Q, up, owner, k, r, ok):
    """Of query rows r in document k: which are kept, soft maxima, and ``g w``.

    They stand beside the columns of a tile, of which a thread has many: `compiler_barrier_dtype` lets it find but its
    own before.
    """
    i = owner + r // up.Lq
    s = r % up.Lq
    ok = load_query_mask(Q, i, s, ok)
    lse, g = load_upstream(up, owner, k, i, r, ok)
    return ok, compiler_barrier_dtype(lse), compiler_barrier_dtype(g * load_query_weight(Q, i, s, ok & (g != 0.0)))


@triton.jit
def _locate_query_rows(Q, up, owner, r, C: tl.constexpr):
    """Where query rows r begin."""
    if C.EVEN_ROW_STRIDE:
        pointers = locate_rows(Q, owner, 0 * r) + r.to(tl.int64) * Q.stride_l
    else:
        pointers = locate_rows(Q, owner + r // up.Lq, r % up.Lq)
    return pointers


@triton.jit
def _backprop_norm(G, own, columns, d, C: tl.constexpr):
    """`G`, all features of what is owned, through its norms; rows that receive nothing get zero: they may hold NaN."""
    x = load_rows(own.ptr, own.ok, columns, d, own.stride_d, C.WIDE_OFFSETS).to(tl.float32)
    squares = tl.sum(x * x, axis=1)
    dot = tl.sum(x * G, axis=1) * compute_inverse_norm(squares)
    live = tl.max((G != 0.0).to(tl.int32), axis=1)
    return tl.where((live > 0)[:, None], backprop_normalize(G, x, squares, dot), 0.0)


@triton.jit
def maxsim_soft_documents(Q, D, tiles, up, tau, grad, d, C: tl.constexpr):
    """``sum_r g w P q_r`` of BM tokens of a document and BD features into ``grad [documents, Ld, d]``, of its dtype.

    Through the norms of the tokens where one step covers their features, else `grad` is of unit tokens.

    Programs ``[token tiles of documents, 1, steps of features]``.
    """
    of_document = tl.cdiv(up.Ld, C.BM)
    document = tl.program_id(0) // of_document
    owner = document * 0
    k = to_int64(document)
    if C.CANDIDATES:
        owner = document // up.K
        k = to_int64(document % up.K)
    t = tl.program_id(0) % of_document * C.BM + tl.arange(0, C.BM)
    columns = tl.program_id(2) * C.BD + tl.arange(0, C.BD)
    pointers, kept = _locate_tokens(D, up, owner, k, t)
    Side: tl.constexpr = import_args_class("SoftOperand", "backward.arguments")
    own = Side(pointers, kept, D.stride_d, *_load_owned_rows(pointers, kept, columns, D.stride_d, d, C))
    rate = compute_rate(load_temperature(tau), 1.0)
    count = _count_group_rows(up, C)

    most = tl.full((_UPSTREAM_BLOCK_ROWS,), 0, tl.float32)
    if Q.ptr.dtype.element_ty == tl.float16:
        for r0 in range(0, count, _UPSTREAM_BLOCK_ROWS):
            r = r0 + tl.arange(0, _UPSTREAM_BLOCK_ROWS)
            _, _, coefficient = _load_coefficients(Q, up, owner, k, r, r < count)
            most = nan_max(most, tl.abs(coefficient))
    most = _choose_weight_scale(tl.reduce(most, 0, nan_max), Q.ptr.dtype.element_ty)
    inverse = 1.0 / most
    acc = tl.full((C.BM, C.BD), 0, tl.float32)
    for r0 in range(0, count, C.BN):
        r = r0 + tl.arange(0, C.BN)
        ok, lse, coefficient = _load_coefficients(Q, up, owner, k, r, r < count)
        if tiles is not None:
            other = Side(None, None, None, tiles.load([r0, 0]), None)
        else:
            other = Side(_locate_query_rows(Q, up, owner, r, C), ok, Q.stride_d, None, None)
        S, y = _compute_similarities(own, other, columns, d, C)
        acc = _accumulate_weighted(
            acc, compute_probabilities(S, lse[None, :], (coefficient * inverse)[None, :], rate), y, C
        )
    acc = tl.where(own.ok[:, None], acc * most, 0.0)
    if C.NORMALIZE and C.SINGLE_STEP:
        acc = _backprop_norm(acc, own, columns, d, C)
    row = document.to(tl.int64) * up.Ld + t
    mask = (t < up.Ld)[:, None] & (columns < d)[None, :]
    tl.store(grad + row[:, None] * d + columns[None, :], acc.to(grad.dtype.element_ty), mask=mask)
