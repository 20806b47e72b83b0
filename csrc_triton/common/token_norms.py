"""Inverse norms of tokens, found by a launch of their own for kernels that read them.

Of a forward each is summed as one tree, as the kernels that find norms themselves do; of a backward as its kernels do.
"""

import triton
import triton.language as tl

from .primitives import (
    document_base,
    inverse_norm,
    load_rows,
    ordered_sum,
    query_keep,
    row_pointers,
    rows_sum_of_squares,
    square,
)


@triton.jit
def _inverse(pointers, ok, d, BN: tl.constexpr, BD: tl.constexpr):
    """Of contiguous rows, summed as `similarities.sum_of_squares` sums them, BD features at a time."""
    squares = tl.zeros((BN,), tl.float32)
    for c0 in range(0, d, BD):
        squares += ordered_sum(square(load_rows(pointers, ok, c0 + tl.arange(0, BD), d, 1, 1)), BN, BD)
    return inverse_norm(squares)


@triton.jit
def _tokens_of(tile, Lq, TOKENS: tl.constexpr):
    """The query that a tile of tokens is of, these, and which exist."""
    tiles = tl.cdiv(Lq, TOKENS)
    s = tile % tiles * TOKENS + tl.arange(0, TOKENS)
    return tile // tiles, s, s < Lq


@triton.jit
def maxsim_tile_norms(Q, D, queries, documents, sizes, d, BN: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr):
    """Of document tokens, ``documents [K, tiles, BN]``, and, unless `queries` is None, of query tokens ``[Nq, Lq]``.

    The last tile of a document is shifted back to end where it ends. With PACKED, Ld < BN and a document has one tile,
    whose other norms are arbitrary but finite. Features are contiguous.
    """
    tiles = tl.cdiv(sizes.Ld, BN)
    tile = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BN)
    if tile < sizes.K * tiles:
        t = n if PACKED else tl.minimum(tile % tiles * BN, sizes.Ld - BN) + n
        ok = t < sizes.Ld if PACKED else n >= 0
        pointers = document_base(D, tile * 0, tile // tiles) + t * D.stride_l
        tl.store(documents + tile * BN + n, _inverse(pointers, ok, d, BN, BD))
    elif queries is not None:
        i, s, ok = _tokens_of(tile - sizes.K * tiles, sizes.Lq, BN)
        tl.store(queries + i * sizes.Lq + s, _inverse(row_pointers(Q, i, s), ok, d, BN, BD), mask=ok)


@triton.jit(do_not_specialize=["Lq"])
def maxsim_row_norms(Q, norms, Lq, d, C: tl.constexpr):
    """1 / ||q|| of every query row, BM tokens of a query a program."""
    i, s, ok = _tokens_of(tl.program_id(0), Lq, C.BM)
    keep = query_keep(Q, i, s, ok)
    squares = rows_sum_of_squares(row_pointers(Q, i, s), keep, d, Q.stride_d, C.BD, C.WIDE)
    tl.store(norms + i.to(tl.int64) * Lq + s, inverse_norm(squares), mask=ok)
