"""Inverse norms of tokens, found by a launch of their own for kernels that read them.

Of a forward each is summed as one tree, as the kernels that find norms themselves do; of a backward as its kernels do.
"""

import triton
import triton.language as tl

from .primitives import (
    compute_inverse_norm,
    load_query_mask,
    load_rows,
    locate_document,
    locate_rows,
    square,
    sum_in_order,
    sum_row_squares,
)


@triton.jit
def _compute_inverse_norms(pointers, ok, d, BN: tl.constexpr, BD: tl.constexpr):
    """Of contiguous rows, summed as `similarities.sum_tile_squares` sums them, BD features at a time."""
    squares = tl.zeros((BN,), tl.float32)
    for c0 in range(0, d, BD):
        squares += sum_in_order(square(load_rows(pointers, ok, c0 + tl.arange(0, BD), d, 1, 1)), BN, BD)
    return compute_inverse_norm(squares)


@triton.jit
def _locate_tile_tokens(tile, Lq, TOKENS: tl.constexpr):
    """The query that a tile of tokens is of, these, and which exist."""
    tiles = tl.cdiv(Lq, TOKENS)
    s = tile % tiles * TOKENS + tl.arange(0, TOKENS)
    return tile // tiles, s, s < Lq


@triton.jit
def maxsim_tile_norms(
    Q, D, queries, documents, sizes, d, BN: tl.constexpr, BD: tl.constexpr, SHORT_DOCUMENTS: tl.constexpr
):
    """Of document tokens, ``documents [K, tiles, BN]``, and, unless `queries` is None, of query tokens ``[Nq, Lq]``.

    The last tile of a document is shifted back to end where it ends. With SHORT_DOCUMENTS, Ld < BN and a document has
    one tile, whose other norms are arbitrary but finite. Features are contiguous.
    """
    tiles = tl.cdiv(sizes.Ld, BN)
    tile = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BN)
    if tile < sizes.K * tiles:
        t = n if SHORT_DOCUMENTS else tl.minimum(tile % tiles * BN, sizes.Ld - BN) + n
        ok = t < sizes.Ld if SHORT_DOCUMENTS else n >= 0
        pointers = locate_document(D, tile * 0, tile // tiles) + t * D.stride_l
        tl.store(documents + tile * BN + n, _compute_inverse_norms(pointers, ok, d, BN, BD))
    elif queries is not None:
        i, s, ok = _locate_tile_tokens(tile - sizes.K * tiles, sizes.Lq, BN)
        tl.store(queries + i * sizes.Lq + s, _compute_inverse_norms(locate_rows(Q, i, s), ok, d, BN, BD), mask=ok)


@triton.jit(do_not_specialize=["Lq"])
def maxsim_row_norms(Q, norms, Lq, d, C: tl.constexpr):
    """1 / ||q|| of every query row, BM tokens of a query a program."""
    i, s, ok = _locate_tile_tokens(tl.program_id(0), Lq, C.BM)
    keep = load_query_mask(Q, i, s, ok)
    squares = sum_row_squares(locate_rows(Q, i, s), keep, d, Q.stride_d, C.BD, C.WIDE_OFFSETS)
    tl.store(norms + i.to(tl.int64) * Lq + s, compute_inverse_norm(squares), mask=ok)
