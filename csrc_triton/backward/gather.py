"""Pieces of both backwards: the winners of query rows, the gathered gradient of rows, and what ends a gradient."""

import triton
import triton.language as tl

from ..common.primitives import NORM_EPS, compute_inverse_norm, load_rows, load_tokens, sum_row_squares, to_int64
from .pairs import find_query_pairs, load_packed_argmax


@triton.jit
def locate_query_tile(up, C: tl.constexpr):
    """The query whose tokens this program owns, those tokens (BM of them), and which exist.

    In packed layouts all query rows are the tokens of one query.
    """
    tiles = tl.cdiv(up.Lq, C.BM)
    pid = tl.program_id(0)
    s = (pid % tiles) * C.BM + tl.arange(0, C.BM)
    return pid // tiles, s, s < up.Lq


@triton.jit
def load_argmax(up, owner, k, i, s, ok, C: tl.constexpr):
    """Of query tokens (i, s) in document k: the winning token, whether there is one, and the score's gradient there."""
    k = k.to(tl.int64)
    if C.CANDIDATES:
        offsets = (owner.to(tl.int64) * up.K + k) * up.Lq + s
    else:
        offsets = (k * up.Nq + i) * up.Lq + s
    token = tl.load(up.argmax + offsets, mask=ok, other=-1).to(tl.int32)
    won = ok & (token >= 0)
    pair = i.to(tl.int64) * up.stride_q + k * up.stride_k + 0 * s  # one for each row, also where i is a scalar
    g = tl.load(up.grad_scores + pair, mask=won, other=0.0)
    return token, won, g


@triton.jit
def dequantize_rows(x, scale, rows, ok):
    """Tokens in fp32, numbers that have a `scale` times that of their rows."""
    x = x.to(tl.float32)
    if scale is not None:
        x *= tl.load(scale + rows, mask=ok, other=0.0)[:, None]
    return x


@triton.jit
def _sum_row_squares(pointers, scale, rows, ok, d, stride_d, C: tl.constexpr):
    """``sum_k x[k]^2`` of `dequantize_rows`."""
    squares = sum_row_squares(pointers, ok, d, stride_d, C.BD, C.WIDE_OFFSETS)
    if scale is not None:
        s = tl.load(scale + rows, mask=ok, other=0.0)
        squares *= s * s
    return squares


@triton.jit
def _scatter_rows(targets, values, won, columns, d):
    mask = won[:, None] & (columns < d)[None, :]
    tl.atomic_add(targets[:, None] + columns[None, :], values, mask=mask, sem="relaxed")


@triton.jit
def gather_gradients(up, i, s, ok, k_begin, k_end, columns, rows, sum_D, D, d, C: tl.constexpr):
    """``sum_k g[i, k] * D[k, winner]`` of BM tokens of query i over some documents; and which of them win anything.

    BN documents a step, so that BM * BN rows are on their way from memory at once. The sum runs over the documents in
    ascending order, in steps of BN from `k_begin`, each step summed inside a thread.

    Unless `sum_D` is None, also adds ``g * rows`` to it atomically at each winning token. Winning tokens are normalised
    first if asked. Rows of an absent winner are not read: they may hold NaN.
    """
    acc = tl.full((C.BM, C.BD), 0, tl.float32)
    live = tl.full((C.BM,), 0, tl.int32)
    # Winner number BM * n + m of a step is that of token m in document n.
    n = tl.arange(0, C.BN * C.BM) // C.BM
    s_pair = tl.reshape(tl.broadcast_to(s[None, :], (C.BN, C.BM)), (C.BN * C.BM,))
    ok_pair = tl.reshape(tl.broadcast_to(ok[None, :], (C.BN, C.BM)), (C.BN * C.BM,))
    if up.query is not None:
        of = find_query_pairs(up, s_pair, ok_pair, C)
    for k0 in range(k_begin, k_end, C.BN):
        k = to_int64(k0) + n
        if up.query is not None:
            token, won, g = load_packed_argmax(up, of, s_pair, k, ok_pair & (k < k_end))
            pointers = D.ptr + token * D.stride_l
            document = k * 0
        else:
            token, won, g = load_argmax(up, i, k, i, s_pair, ok_pair & (k < k_end), C)
            pointers = D.ptr + k * D.stride_doc + token.to(tl.int64) * D.stride_l
            document = k
            if C.CANDIDATES:
                pointers += i.to(tl.int64) * D.stride_owner
                document = k + i.to(tl.int64) * up.K
        if sum_D is not None:
            values = tl.reshape(g, (C.BN, C.BM))[:, :, None] * rows[None, :, :]
            targets = sum_D + (document * up.Ld + token) * d
            _scatter_rows(targets, tl.reshape(values, (C.BN * C.BM, C.BD)), won, columns, d)
        at = document * up.Ld + token
        x = dequantize_rows(load_rows(pointers, won, columns, d, D.stride_d, C.WIDE_OFFSETS), up.scale, at, won)
        if C.NORMALIZE:
            if C.SINGLE_STEP:
                g = tl.where(won, g * compute_inverse_norm(tl.sum(x * x, axis=1)), 0.0)
            else:
                g = tl.where(
                    won, g * compute_inverse_norm(_sum_row_squares(pointers, up.scale, at, won, d, D.stride_d, C)), 0.0
                )
        # Both factors are zero where nothing won; a selection would keep products and sums from being fused.
        acc += tl.sum(tl.reshape(g[:, None] * x, (C.BN, C.BM, C.BD)), axis=0)
        live = live | tl.max(tl.reshape(won.to(tl.int32), (C.BN, C.BM)), axis=0)
    return acc, live > 0


@triton.jit
def backprop_normalize(G, x, squares, dot):
    """The gradient of ``x / max(||x||, eps)`` given `G` and ``dot = <x / max(||x||, eps), G>``; F.normalize's clamp."""
    scale = compute_inverse_norm(squares)
    dot = tl.where(tl.sqrt(squares) >= NORM_EPS, dot, 0.0)
    return (G - (x * scale[:, None]) * dot[:, None]) * scale[:, None]


@triton.jit
def sum_norm_terms(G, to, columns, D, d, C: tl.constexpr):
    """The target's tokens x, ``<x, G>``, ``<x, x>``, and which tokens have a gradient here, over some features."""
    x = dequantize_rows(load_tokens(to.base, to.t, to.ok, columns, d, D, C.WIDE_OFFSETS), to.scale, to.rows, to.ok)
    live = tl.max((G != 0.0).to(tl.int32), axis=1)
    return x, tl.sum(x * G, axis=1), tl.sum(x * x, axis=1), live


@triton.jit
def backprop_token_norm(G, sums, to, columns, D, d, C: tl.constexpr):
    """`G` through the norm of its tokens. Tokens that receive nothing get zero: they may hold NaN.

    `sums` are those of `sum_norm_terms` over all features, where these are not all.
    """
    x, dot, squares, live = sum_norm_terms(G, to, columns, D, d, C)
    if not C.SINGLE_STEP:
        dot, squares, live = sums
    return tl.where((live > 0)[:, None], backprop_normalize(G, x, squares, dot * compute_inverse_norm(squares)), 0.0)


@triton.jit
def locate_partial_rows(partial, slots, columns, d):
    return partial + (slots * d)[:, None] + columns[None, :]


@triton.jit
def write_gradient(sum_of, of, to, features, D, d, C: tl.constexpr):
    """Write ``sum_of(of, ..)`` of all features, BD at a time, to a `Target`, through the norm of its tokens if asked.

    The Jacobian of the norm needs sums over all features first. Where these are several steps, each is summed twice.
    """
    TOKENS: tl.constexpr = to.t.shape[0]
    dot = tl.full((TOKENS,), 0, tl.float32)
    squares = tl.full((TOKENS,), 0, tl.float32)
    live = tl.full((TOKENS,), 0, tl.int32)
    if C.NORMALIZE and not C.SINGLE_STEP and to.gradient is not None:
        for c0 in range(0, features, C.BD):
            columns = c0 + tl.arange(0, C.BD)
            G = sum_of(of, columns, d, C)
            _, more_dot, more_squares, more_live = sum_norm_terms(G, to, columns, D, d, C)
            dot += more_dot
            squares += more_squares
            live = live | more_live
    # Of pieces Triton 3.6 spills what it hoists out of this loop, which is mostly one step.
    for c0 in tl.range(0, features, C.BD, disable_licm=to.partial is not None):
        columns = c0 + tl.arange(0, C.BD)
        G = sum_of(of, columns, d, C)
        if to.partial is not None:
            kept = to.left[:, None] & (columns < d)[None, :]
            tl.store(locate_partial_rows(to.partial, to.slots, columns, d), G, mask=kept)
        if to.gradient is not None:
            if C.NORMALIZE:
                G = backprop_token_norm(G, (dot, squares, live), to, columns, D, d, C)
            offsets = (to.rows * d)[:, None] + columns[None, :]
            mask = to.ok[:, None] & (columns < d)[None, :]
            tl.store(to.gradient + offsets, G.to(to.gradient.dtype.element_ty), mask=mask)
