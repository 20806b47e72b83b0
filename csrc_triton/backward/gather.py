"""Parts of both backwards: the argmax of query rows, the gathered gradient, and the Jacobian of the norm.

```text
gather_gradients, BM tokens s of query i:
    acc = 0                                          # [BM, BD], fp32
    for k0 in range(k_begin, k_end, BN):
        t, hit, g = argmax, argmax >= 0, grad_scores # of (document k0 + n, token s), BN * BM lanes
        x = D[k0 + n, t]                             # [BN * BM, BD], dequantized, zeros without a hit
        g = g * inverse_norm(x)                      # NORMALIZE
        acc += sum over n of g * x
    return acc, whether any document has a hit

Jacobian of u = x / max(||x||, eps) applied to G:
    (G - u <u, G>) / max(||x||, eps), without the second term if ||x|| < eps
```

Invariants:

- Documents are added in ascending order, BN at a time. Each step is summed inside a thread.
- The document token of an absent argmax is not read, because it may hold NaN. Its gradient is zero.
"""

import triton
import triton.language as tl

from ..common.primitives import NORM_EPS, compute_inverse_norm, load_rows, load_tokens, sum_row_squares, to_int64
from ..formats.encoded import load_dequantized_tokens, sum_dequantized_squares
from .pairs import find_query_pairs, load_packed_argmax


@triton.jit
def find_owner(document, K, C: tl.constexpr):
    """Return the owner of a document, a query of candidates or 0, and the number of the document there."""
    owner = document * 0
    k = document
    if C.CANDIDATES:
        owner = document // K
        k = document % K
    return owner, k


@triton.jit
def load_argmax(up, owner, k, i, s, ok, C: tl.constexpr):
    """Return the argmax of query tokens (i, s) in document k, whether there is one, and the gradient of its score."""
    token = _load_tokens(up, owner, k, i, s, ok, C)
    has_argmax, g = _load_gradient(up, token, k, i, s)
    return token, has_argmax, g


@triton.jit
def _load_tokens(up, owner, k, i, s, ok, C: tl.constexpr):
    """Return the argmax of query tokens (i, s) in document k, or -1."""
    k = k.to(tl.int64)
    if C.CANDIDATES:
        offsets = (owner.to(tl.int64) * up.K + k) * up.Lq + s
    else:
        offsets = (k * up.Nq + i) * up.Lq + s
    return tl.load(up.argmax + offsets, mask=ok, other=-1).to(tl.int32)


@triton.jit
def _load_gradient(up, token, k, i, s):
    """Return whether there is an argmax, and the gradient of its score."""
    has_argmax = token >= 0
    # One offset for each row, even if i is a scalar.
    pair = i.to(tl.int64) * up.stride_q + k.to(tl.int64) * up.stride_k + 0 * s
    return has_argmax, tl.load(up.grad_scores + pair, mask=has_argmax, other=0.0)


@triton.jit
def dequantize_rows(x, scale, rows, ok):
    """Return tokens in fp32, multiplied by the scales of their rows if `scale` is not None."""
    x = x.to(tl.float32)
    if scale is not None:
        x *= tl.load(scale + rows, mask=ok, other=0.0)[:, None]
    return x


@triton.jit
def _scatter_rows(targets, values, has_argmax, columns, d):
    """Add rows to fp32 sums with atomics, if they have an argmax."""
    mask = has_argmax[:, None] & (columns < d)[None, :]
    tl.atomic_add(targets[:, None] + columns[None, :], values, mask=mask, sem="relaxed")


@triton.jit
def gather_gradients(up, i, s, ok, k_begin, k_end, c0, columns, rows, sum_D, D, counts, d, C: tl.constexpr):
    """Sum ``g[i, k] * D[k, argmax]`` for BM tokens of query i over documents `k_begin` to `k_end`.

    A step covers BN documents, so the loads of BM * BN rows are in flight at once. The sum visits documents in
    ascending order. With C.NORMALIZE the document tokens are normalized first. Rows of an absent argmax are not read,
    because they may hold NaN.

    If `sum_D` is not None, ``g * rows`` is also added atomically to `sum_D` at each argmax. If `counts` is not None,
    documents are packed and encoded, and `counts` are their `DequantArgs`.

    Returns the sums `[BM, BD]` and whether each token has an argmax in any document.
    """
    acc = tl.full((C.BM, C.BD), 0, tl.float32)
    live = tl.full((C.BM,), 0, tl.int32)
    # Lane BM * n + m of a step holds the argmax of token m in document n.
    n = tl.arange(0, C.BN * C.BM) // C.BM
    s_pair = tl.reshape(tl.broadcast_to(s[None, :], (C.BN, C.BM)), (C.BN * C.BM,))
    ok_pair = tl.reshape(tl.broadcast_to(ok[None, :], (C.BN, C.BM)), (C.BN * C.BM,))
    # Argmax values are loaded one step ahead, so that a step need not wait for them. Atomic sums need these registers.
    AHEAD: tl.constexpr = up.query is None and sum_D is None
    if up.query is not None:
        query_pairs = find_query_pairs(up, s_pair, ok_pair, C)
    elif AHEAD:
        k = to_int64(k_begin) + n
        next_token = _load_tokens(up, i, k, i, s_pair, ok_pair & (k < k_end), C)
    for k0 in range(k_begin, k_end, C.BN):
        k = to_int64(k0) + n
        if up.query is not None:
            token, has_argmax, g = load_packed_argmax(up, query_pairs, s_pair, k, ok_pair & (k < k_end))
            pointers = D.ptr + token * D.stride_l
            document = k * 0
        else:
            if AHEAD:
                token = next_token
                next_token = _load_tokens(up, i, k + C.BN, i, s_pair, ok_pair & (k + C.BN < k_end), C)
            else:
                token = _load_tokens(up, i, k, i, s_pair, ok_pair & (k < k_end), C)
            has_argmax, g = _load_gradient(up, token, k, i, s_pair)
            pointers = D.ptr + k * D.stride_doc + token.to(tl.int64) * D.stride_l
            document = k
            if C.CANDIDATES:
                pointers += i.to(tl.int64) * D.stride_owner
                document = k + i.to(tl.int64) * up.K
        if sum_D is not None:
            values = tl.reshape(g, (C.BN, C.BM))[:, :, None] * rows[None, :, :]
            targets = sum_D + (document * up.Ld + token) * d
            _scatter_rows(targets, tl.reshape(values, (C.BN * C.BM, C.BD)), has_argmax, columns, d)
        if C.ENCODING != "":
            # Token 0 is read without an argmax, and may be NaN. Its bits are cleared, because Triton 3.6 gives the
            # operands of a select different layouts.
            x = load_dequantized_tokens(token, c0, d, D, counts, C)
            x = (x.to(tl.int32, bitcast=True) & -has_argmax.to(tl.int32)[:, None]).to(tl.float32, bitcast=True)
        else:
            x = load_rows(pointers, has_argmax, columns, d, D.stride_d, C.WIDE_OFFSETS).to(tl.float32)
        scale = 1.0
        if up.scale is not None:
            scale = tl.load(up.scale + document * up.Ld + token, mask=has_argmax, other=0.0)
        if C.NORMALIZE:
            if C.SINGLE_STEP:
                squares = tl.sum(x * x, axis=1)
            elif C.ENCODING != "":
                squares = sum_dequantized_squares(token, d, D, counts, C)
            else:
                squares = sum_row_squares(pointers, has_argmax, d, D.stride_d, C.BD, C.WIDE_OFFSETS)
            g = tl.where(has_argmax, g * compute_inverse_norm(squares * scale * scale), 0.0)
        g *= scale  # one product for each row
        # Both factors are zero without an argmax. A select would prevent fused multiply-adds.
        acc += tl.sum(tl.reshape(g[:, None] * x, (C.BN, C.BM, C.BD)), axis=0)
        live = live | tl.max(tl.reshape(has_argmax.to(tl.int32), (C.BN, C.BM)), axis=0)
    return acc, live > 0


@triton.jit
def backprop_normalize(G, x, squares, dot):
    """Return the gradient of ``x / max(||x||, eps)``, given `G` and ``dot = <x / max(||x||, eps), G>``.

    The clamp is the clamp of `F.normalize`.
    """
    scale = compute_inverse_norm(squares)
    dot = tl.where(tl.sqrt(squares) >= NORM_EPS, dot, 0.0)
    return (G - (x * scale[:, None]) * dot[:, None]) * scale[:, None]


@triton.jit
def sum_norm_terms(G, target, columns, D, d, C: tl.constexpr):
    """Return the target's tokens x, ``<x, G>``, ``<x, x>``, and which tokens have a gradient, over some features."""
    x = load_tokens(target.base, target.t, target.ok, columns, d, D, C.WIDE_OFFSETS)
    x = dequantize_rows(x, target.scale, target.rows, target.ok)
    live = tl.max((G != 0.0).to(tl.int32), axis=1)
    return x, tl.sum(x * G, axis=1), tl.sum(x * x, axis=1), live


@triton.jit
def backprop_token_norm(G, sums, target, columns, D, d, C: tl.constexpr):
    """Return `G` through the Jacobian of the norm of its tokens.

    Tokens without a gradient get zero, because they may hold NaN. `sums` are the results of `sum_norm_terms` over all
    features, used unless C.SINGLE_STEP.
    """
    x, dot, squares, live = sum_norm_terms(G, target, columns, D, d, C)
    if not C.SINGLE_STEP:
        dot, squares, live = sums
    return tl.where((live > 0)[:, None], backprop_normalize(G, x, squares, dot * compute_inverse_norm(squares)), 0.0)


@triton.jit
def locate_partial_rows(partial, slots, columns, d):
    """Return pointers to rows of the partial sums."""
    return partial + (slots * d)[:, None] + columns[None, :]


@triton.jit
def load_partial_rows(partial, slots, columns, d, C: tl.constexpr):
    """Load features `columns` of BN rows of the partial sums, zeros beyond d."""
    pointers = locate_partial_rows(partial, slots, columns, d)
    return tl.load(pointers, mask=tl.broadcast_to((columns < d)[None, :], (C.BN, C.BD)), other=0.0)


@triton.jit
def write_gradient(sum_of, args, target, features, D, d, C: tl.constexpr):
    """Write ``sum_of(args, columns, d, C)`` of all features to a `GradientTarget`, BD features at a time.

    With C.NORMALIZE the gradient passes through the Jacobian of the norm of its tokens. The Jacobian needs sums over
    all features first, so with several feature steps each step is computed twice.
    """
    TOKENS: tl.constexpr = target.t.shape[0]
    dot = tl.full((TOKENS,), 0, tl.float32)
    squares = tl.full((TOKENS,), 0, tl.float32)
    live = tl.full((TOKENS,), 0, tl.int32)
    if C.NORMALIZE and not C.SINGLE_STEP and target.gradient is not None:
        for c0 in range(0, features, C.BD):
            columns = c0 + tl.arange(0, C.BD)
            G = sum_of(args, columns, d, C)
            _, more_dot, more_squares, more_live = sum_norm_terms(G, target, columns, D, d, C)
            dot += more_dot
            squares += more_squares
            live = live | more_live
    # With pieces, Triton 3.6 would spill the values that it hoists out of this loop, which usually has one step.
    for c0 in tl.range(0, features, C.BD, disable_licm=target.partial is not None):
        columns = c0 + tl.arange(0, C.BD)
        G = sum_of(args, columns, d, C)
        if target.partial is not None:
            partial_mask = target.is_partial[:, None] & (columns < d)[None, :]
            tl.store(locate_partial_rows(target.partial, target.slots, columns, d), G, mask=partial_mask)
        if target.gradient is not None:
            if C.NORMALIZE:
                G = backprop_token_norm(G, (dot, squares, live), target, columns, D, d, C)
            offsets = (target.rows * d)[:, None] + columns[None, :]
            mask = target.ok[:, None] & (columns < d)[None, :]
            tl.store(target.gradient + offsets, G.to(target.gradient.dtype.element_ty), mask=mask)
