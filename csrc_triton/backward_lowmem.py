"""The destination-owned backward: each gradient element is summed and written by one program, in a fixed order."""

import triton
import triton.language as tl

from .arguments import Sizes
from .backward import gathered, query_tile, through_normalize, winners
from .common import (
    document_base,
    inverse_norm,
    load_rows,
    load_tokens,
    query_keep,
    query_weight,
    row_pointers,
    rows_sum_of_squares,
)


@triton.jit
def _row_gradient(up, i, s, ok, pointers, c0, Q, D, sizes, d, C: tl.constexpr):
    """For one feature step: the query rows (zero where they win nothing) and their gathered gradient before weights."""
    columns = c0 + tl.arange(0, C.BD)
    acc, live = gathered(up, i, s, ok, 0, sizes.K, columns, None, None, D, sizes, d, C)
    q = load_rows(pointers, live, columns, d, Q.stride_d, C.WIDE).to(tl.float32)
    return q, acc, live, columns


@triton.jit(do_not_specialize=["Nq", "K", "Lq", "Ld"])
def maxsim_grad_queries(Q, D, up, grad_Q, grad_weight, Nq, K, Lq, Ld, d, C: tl.constexpr):
    """grad_Q [Nq, Lq, d] and grad_weight [Nq, Lq] (None: not wanted), BM tokens of a query a program."""
    sizes = Sizes(Nq, K, Lq, Ld)
    # The Jacobian of the norm needs <q, gathered> over all features before any of grad_Q can be written.
    TWICE: tl.constexpr = C.NORMALIZE and not C.ONE_CHUNK
    i, s, row_ok = query_tile(sizes, C)
    row = i.to(tl.int64) * sizes.Lq + s
    ok = query_keep(Q, i, s, row_ok)
    w = query_weight(Q, i, s, ok)
    pointers = row_pointers(Q, i, s)
    squares = tl.full((C.BM,), 0, tl.float32)
    if C.NORMALIZE:
        squares = rows_sum_of_squares(pointers, ok, d, Q.stride_d, C.BD, C.WIDE)

    dot = tl.full((C.BM,), 0, tl.float32)
    alive = tl.full((C.BM,), 0, tl.int32)
    if TWICE or grad_Q is None:
        for c0 in range(0, d, C.BD):
            q, acc, live, columns = _row_gradient(up, i, s, ok, pointers, c0, Q, D, sizes, d, C)
            dot += tl.sum(q * acc, axis=1)
            alive = live.to(tl.int32)
    if grad_Q is not None:
        for c0 in range(0, d, C.BD):
            q, acc, live, columns = _row_gradient(up, i, s, ok, pointers, c0, Q, D, sizes, d, C)
            alive = live.to(tl.int32)
            if not TWICE:
                dot += tl.sum(q * acc, axis=1)
            G = acc * w[:, None]
            if C.NORMALIZE:
                G = through_normalize(G, q, squares, dot * inverse_norm(squares) * w)
            G = tl.where(live[:, None], G, 0.0)
            offsets = row[:, None] * d + columns[None, :]
            mask = row_ok[:, None] & (columns < d)[None, :]
            tl.store(grad_Q + offsets, G.to(grad_Q.dtype.element_ty), mask=mask)
    if grad_weight is not None:
        if C.NORMALIZE:
            dot = tl.where(alive > 0, dot * inverse_norm(squares), 0.0)
        tl.store(grad_weight + row, dot, mask=row_ok)


@triton.jit
def _add_row_by_row(acc, local, coefficient, bad, i, s, columns, Q, d, C: tl.constexpr):
    """Add rows that hold NaN or inf one at a time: in a product they would spoil every token of the tile."""
    rows = tl.arange(0, C.BM)
    for n in range(C.BM):
        this = (rows == n) & bad
        if tl.max(this.to(tl.int32), axis=0) > 0:
            token = tl.sum(tl.where(this, local, 0), axis=0)
            c = tl.sum(tl.where(this, coefficient, 0.0), axis=0)
            q_i = tl.sum(tl.where(this, i, 0), axis=0)
            q_s = tl.sum(tl.where(this, s, 0), axis=0)
            wide_columns = columns.to(tl.int64) if C.WIDE == 2 else columns
            x = tl.load(row_pointers(Q, q_i, q_s) + wide_columns * Q.stride_d, mask=columns < d, other=0.0)
            x = x.to(tl.float32)
            acc += tl.where((tl.arange(0, C.BN) == token)[:, None], (c * x)[None, :], 0.0)
    return acc


@triton.jit
def _token_gradient(up, owner, k, t0, c0, Q, sizes, d, C: tl.constexpr):
    """``sum over the rows that token t won of g * w * q`` for BN tokens of a document and BD features; and which won.

    A one-hot product on the matrix unit: rows that win elsewhere are zeroed, not multiplied away.
    """
    columns = c0 + tl.arange(0, C.BD)
    acc = tl.full((C.BN, C.BD), 0, tl.float32)
    live = tl.full((C.BN,), 0, tl.int32)
    if C.CANDIDATES:
        rows = sizes.Lq.to(tl.int64)
    else:
        rows = sizes.Nq.to(tl.int64) * sizes.Lq
    for r0 in range(0, rows, C.BM):
        r = r0 + tl.arange(0, C.BM)
        s = (r % sizes.Lq).to(tl.int32)
        i = (r // sizes.Lq).to(tl.int32) + owner
        token, won, g = winners(up, owner, k, i, s, r < rows, sizes, C)
        local = token - t0
        hit = won & (local >= 0) & (local < C.BN)
        if tl.max(hit.to(tl.int32), axis=0) > 0:
            pointers = row_pointers(Q, i, s)
            q = load_rows(pointers, hit, columns, d, Q.stride_d, C.WIDE).to(tl.float32)
            coefficient = g * query_weight(Q, i, s, hit)
            if C.NORMALIZE:
                coefficient *= inverse_norm(rows_sum_of_squares(pointers, hit, d, Q.stride_d, C.BD, C.WIDE))
            match = hit[None, :] & (local[None, :] == tl.arange(0, C.BN)[:, None])
            bad = tl.min((tl.abs(q) < float("inf")).to(tl.int32), axis=1) == 0
            one_hot = tl.where(match, coefficient[None, :], 0.0)
            acc = tl.dot(one_hot, tl.where(bad[:, None], 0.0, q), acc, input_precision=C.PRECISION)
            if C.NORMALIZE:
                live = live | tl.max(match.to(tl.int32), axis=1)
            if tl.max(bad.to(tl.int32), axis=0) > 0:
                acc = _add_row_by_row(acc, local, coefficient, bad, i, s, columns, Q, d, C)
    return acc, live > 0, columns


@triton.jit
def _norm_sums(G, base, t, live, columns, D, d, C: tl.constexpr):
    """The tokens x of this step (zero where not `live`: they may hold NaN), ``<x, G>`` and ``<x, x>``."""
    x = load_tokens(base, t, live, columns, d, D, C.WIDE).to(tl.float32)
    return x, tl.sum(x * G, axis=1), tl.sum(x * x, axis=1)


@triton.jit(do_not_specialize=["Nq", "K", "Lq", "Ld"])
def maxsim_grad_documents(Q, D, up, grad_D, Nq, K, Lq, Ld, d, C: tl.constexpr):
    """grad_D of BN tokens of one document a program: the sum over the query rows that they won."""
    sizes = Sizes(Nq, K, Lq, Ld)
    TWICE: tl.constexpr = C.NORMALIZE and not C.ONE_CHUNK
    token_tiles = tl.cdiv(sizes.Ld, C.BN)
    pid = tl.program_id(0)
    document = pid // token_tiles
    t0 = (pid % token_tiles) * C.BN
    if C.CANDIDATES:
        owner = document // sizes.K
        k = document % sizes.K
    else:
        owner = document * 0
        k = document
    t = t0 + tl.arange(0, C.BN)
    t_ok = t < sizes.Ld
    base = document_base(D, owner, k)

    dot = tl.full((C.BN,), 0, tl.float32)
    squares = tl.full((C.BN,), 0, tl.float32)
    if TWICE:
        for c0 in range(0, d, C.BD):
            G, live, columns = _token_gradient(up, owner, k, t0, c0, Q, sizes, d, C)
            x, more_dot, more_squares = _norm_sums(G, base, t, live, columns, D, d, C)
            dot += more_dot
            squares += more_squares
    for c0 in range(0, d, C.BD):
        G, live, columns = _token_gradient(up, owner, k, t0, c0, Q, sizes, d, C)
        if C.NORMALIZE:
            x, more_dot, more_squares = _norm_sums(G, base, t, live, columns, D, d, C)
            if not TWICE:
                dot = more_dot
                squares = more_squares
            G = tl.where(live[:, None], through_normalize(G, x, squares, dot * inverse_norm(squares)), 0.0)
        offsets = (document.to(tl.int64) * sizes.Ld + t)[:, None] * d + columns[None, :]
        mask = t_ok[:, None] & (columns < d)[None, :]
        tl.store(grad_D + offsets, G.to(grad_D.dtype.element_ty), mask=mask)
