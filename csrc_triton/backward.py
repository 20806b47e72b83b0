"""Pieces of both backwards: the winners of one document, the gathered gradient of rows, and what ends a gradient."""

import triton
import triton.language as tl

from .common import NORM_EPS, inverse_norm, load_rows, rows_sum_of_squares, wide


@triton.jit
def query_tile(sizes, C: tl.constexpr):
    """The query that program 0, 1, .. owns tokens of, those tokens (BM of them), and which exist."""
    tiles = tl.cdiv(sizes.Lq, C.BM)
    pid = tl.program_id(0)
    s = (pid % tiles) * C.BM + tl.arange(0, C.BM)
    return pid // tiles, s, s < sizes.Lq


@triton.jit
def winners(up, owner, k, i, s, ok, sizes, C: tl.constexpr):
    """Of query tokens (i, s) in document k: the winning token, whether there is one, and the score's gradient there."""
    k = wide(k)
    if C.CANDIDATES:
        offsets = (owner.to(tl.int64) * sizes.K + k) * sizes.Lq + s
    else:
        offsets = (k * sizes.Nq + i) * sizes.Lq + s
    token = tl.load(up.argmax + offsets, mask=ok, other=-1).to(tl.int32)
    won = ok & (token >= 0)
    pair = i.to(tl.int64) * up.stride_q + k * up.stride_k + 0 * s  # one for each row, also where i is a scalar
    g = tl.load(up.grad_scores + pair, mask=won, other=0.0)
    return token, won, g


@triton.jit
def gathered(up, i, s, ok, k_begin, k_end, columns, rows, sum_D, D, sizes, d, C: tl.constexpr):
    """``sum_k g[i, k] * D[k, winner]`` of each row over some documents; and which rows win anything in them.

    Unless `sum_D` is None, also adds ``g * rows`` to it atomically at each winning token. Winning tokens are normalised
    first if asked. Rows of an absent winner are not read: they may hold NaN.
    """
    acc = tl.full((C.BM, C.BD), 0, tl.float32)
    live = tl.full((C.BM,), 0, tl.int32)
    for k in range(k_begin, k_end):
        token, won, g = winners(up, i, k, i, s, ok, sizes, C)
        document = wide(k)
        pointers = D.ptr + document * D.stride_doc + token.to(tl.int64) * D.stride_l
        if C.CANDIDATES:
            pointers += i.to(tl.int64) * D.stride_owner
            document = document + i.to(tl.int64) * sizes.K
        if sum_D is not None:
            targets = sum_D + (document * sizes.Ld + token) * d
            mask = won[:, None] & (columns < d)[None, :]
            tl.atomic_add(targets[:, None] + columns[None, :], g[:, None] * rows, mask=mask, sem="relaxed")
        x = load_rows(pointers, won, columns, d, D.stride_d, C.WIDE).to(tl.float32)
        if C.NORMALIZE:
            if C.ONE_CHUNK:
                g = g * inverse_norm(tl.sum(x * x, axis=1))
            else:
                g = g * inverse_norm(rows_sum_of_squares(pointers, won, d, D.stride_d, C.BD, C.WIDE))
        acc += tl.where(won[:, None], g[:, None] * x, 0.0)
        live = live | won.to(tl.int32)
    return acc, live > 0


@triton.jit
def through_normalize(G, x, squares, dot):
    """The gradient of ``x / max(||x||, eps)`` given `G` and ``dot = <x / max(||x||, eps), G>``; F.normalize's clamp."""
    scale = inverse_norm(squares)
    dot = tl.where(tl.sqrt(squares) >= NORM_EPS, dot, 0.0)
    return (G - (x * scale[:, None]) * dot[:, None]) * scale[:, None]
