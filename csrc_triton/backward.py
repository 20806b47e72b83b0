"""Pieces of both backwards: the winners of query rows, the gathered gradient of rows, and what ends a gradient."""

import triton
import triton.language as tl

from .common import NORM_EPS, inverse_norm, load_rows, load_tokens, rows_sum_of_squares, wide
from .ragged import met_items, packed_winners


@triton.jit
def query_tile(sizes, C: tl.constexpr):
    """The query that program 0, 1, .. owns tokens of, those tokens (BM of them), and which exist.

    Of ragged layouts all packed rows are the tokens of one query.
    """
    tiles = tl.cdiv(sizes.Lq, C.BM)
    pid = tl.program_id(0)
    s = (pid % tiles) * C.BM + tl.arange(0, C.BM)
    return pid // tiles, s, s < sizes.Lq


@triton.jit
def winners(up, owner, k, i, s, ok, sizes, C: tl.constexpr):
    """Of query tokens (i, s) in document k: the winning token, whether there is one, and the score's gradient there."""
    k = k.to(tl.int64)
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
def _scatter_rows(targets, values, won, columns, d):
    mask = won[:, None] & (columns < d)[None, :]
    tl.atomic_add(targets[:, None] + columns[None, :], values, mask=mask, sem="relaxed")


@triton.jit
def gathered(up, i, s, ok, k_begin, k_end, columns, rows, sum_D, D, sizes, d, C: tl.constexpr):
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
        of = met_items(up, s_pair, ok_pair, sizes, C)
    for k0 in range(k_begin, k_end, C.BN):
        k = wide(k0) + n
        if up.query is not None:
            token, won, g = packed_winners(up, of, s_pair, k, ok_pair & (k < k_end), sizes, C)
            pointers = D.ptr + token * D.stride_l
            document = k * 0
        else:
            token, won, g = winners(up, i, k, i, s_pair, ok_pair & (k < k_end), sizes, C)
            pointers = D.ptr + k * D.stride_doc + token.to(tl.int64) * D.stride_l
            document = k
            if C.CANDIDATES:
                pointers += i.to(tl.int64) * D.stride_owner
                document = k + i.to(tl.int64) * sizes.K
        if sum_D is not None:
            values = tl.reshape(g, (C.BN, C.BM))[:, :, None] * rows[None, :, :]
            targets = sum_D + (document * sizes.Ld + token) * d
            _scatter_rows(targets, tl.reshape(values, (C.BN * C.BM, C.BD)), won, columns, d)
        x = load_rows(pointers, won, columns, d, D.stride_d, C.WIDE).to(tl.float32)
        if C.NORMALIZE:
            if C.ONE_CHUNK:
                g = tl.where(won, g * inverse_norm(tl.sum(x * x, axis=1)), 0.0)
            else:
                g = tl.where(
                    won, g * inverse_norm(rows_sum_of_squares(pointers, won, d, D.stride_d, C.BD, C.WIDE)), 0.0
                )
        # Both factors are zero where nothing won; a selection would keep products and sums from being fused.
        acc += tl.sum(tl.reshape(g[:, None] * x, (C.BN, C.BM, C.BD)), axis=0)
        live = live | tl.max(tl.reshape(won.to(tl.int32), (C.BN, C.BM)), axis=0)
    return acc, live > 0


@triton.jit
def through_normalize(G, x, squares, dot):
    """The gradient of ``x / max(||x||, eps)`` given `G` and ``dot = <x / max(||x||, eps), G>``; F.normalize's clamp."""
    scale = inverse_norm(squares)
    dot = tl.where(tl.sqrt(squares) >= NORM_EPS, dot, 0.0)
    return (G - (x * scale[:, None]) * dot[:, None]) * scale[:, None]


@triton.jit
def norm_sums(G, base, t, t_ok, columns, D, d, C: tl.constexpr):
    """The tokens x of this step, ``<x, G>``, ``<x, x>``, and which tokens have a gradient here."""
    x = load_tokens(base, t, t_ok, columns, d, D, C.WIDE).to(tl.float32)
    live = tl.max((G != 0.0).to(tl.int32), axis=1)
    return x, tl.sum(x * G, axis=1), tl.sum(x * x, axis=1), live


@triton.jit
def through_norm(G, x, live, squares, dot):
    """Tokens that receive nothing get zero: they may hold NaN."""
    return tl.where((live > 0)[:, None], through_normalize(G, x, squares, dot * inverse_norm(squares)), 0.0)


@triton.jit
def no_norm_sums(TOKENS: tl.constexpr):
    """The sums of no features, for `more_norm_sums`."""
    zeros = tl.full((TOKENS,), 0, tl.float32)
    return zeros, zeros, tl.full((TOKENS,), 0, tl.int32)


@triton.jit
def more_norm_sums(sums, G, base, t, t_ok, columns, D, d, C: tl.constexpr):
    """`sums` of the features of earlier steps, as `norm_sums` gives them, and those of this step."""
    _, dot, squares, live = norm_sums(G, base, t, t_ok, columns, D, d, C)
    return sums[0] + dot, sums[1] + squares, sums[2] | live


@triton.jit
def through_tile_norm(G, columns, sums, base, tokens, ok, D, d, C: tl.constexpr):
    """`G`, of some columns, through the norm of its tokens; `sums`: of all steps, where there are several."""
    x, dot, squares, live = norm_sums(G, base, tokens, ok, columns, D, d, C)
    if not C.ONE_CHUNK:
        dot, squares, live = sums
    return through_norm(G, x, live, squares, dot)
