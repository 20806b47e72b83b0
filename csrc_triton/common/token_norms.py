"""Inverse norms of tokens, computed by a separate launch for kernels that read them.

Norms for a forward are summed as one tree, as in kernels that compute norms themselves. Norms for a backward are summed
as in the backward kernels.
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
    """Return the inverse norms of contiguous rows, with the sums of `similarities.sum_tile_squares`."""
    squares = tl.zeros((BN,), tl.float32)
    for c0 in range(0, d, BD):
        squares += sum_in_order(square(load_rows(pointers, ok, c0 + tl.arange(0, BD), d, 1, 1)), BN, BD)
    return compute_inverse_norm(squares)


@triton.jit
def _locate_tile_tokens(tile, Lq, TOKENS: tl.constexpr):
    """Return the query of a tile of tokens, its tokens, and which of them exist."""
    tiles = tl.cdiv(Lq, TOKENS)
    s = tile % tiles * TOKENS + tl.arange(0, TOKENS)
    return tile // tiles, s, s < Lq


@triton.jit
def maxsim_tile_norms(
    Q,
    D,
    queries,
    documents,
    sizes,
    d,
    BN: tl.constexpr,
    BD: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SHORT_DOCUMENTS: tl.constexpr,
):
    """Store the inverse norms of document tokens, and of query tokens unless `queries` is None.

    The last tile of a document shifts back to the end of the document. A masked token has -1.

    Args:
        Q: `QueryArgs` with contiguous features.
        D: `DocumentArgs` with contiguous features.
        queries: Output `[Nq, Lq]` in fp32, or None.
        documents: Output `[K, tiles, BN]` in fp32.
        sizes: `SizeArgs`.
        d: Number of features.
        BN: Tokens of a tile.
        BD: Features of a step.
        NORMALIZE: Whether to compute norms. Otherwise tokens have 1.
        SHORT_DOCUMENTS: Ld < BN. A document has one tile, whose norms past the document are arbitrary but finite, or -1
            with a mask.
    """
    tiles = tl.cdiv(sizes.Ld, BN)
    tile = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BN)
    if tile < sizes.K * tiles:
        t = n if SHORT_DOCUMENTS else tl.minimum(tile % tiles * BN, sizes.Ld - BN) + n
        ok = t < sizes.Ld if SHORT_DOCUMENTS else n >= 0
        scale = tl.full((BN,), 1, tl.float32)
        if NORMALIZE:
            pointers = locate_document(D, tile * 0, tile // tiles) + t * D.stride_l
            scale = _compute_inverse_norms(pointers, ok, d, BN, BD)
        if D.mask is not None:
            keep = tl.load(D.mask + tile // tiles * D.mask_stride_doc + t * D.mask_stride_l, mask=ok, other=0) != 0
            scale = tl.where(keep, scale, -1.0)
        tl.store(documents + tile * BN + n, scale)
    elif queries is not None:
        i, s, ok = _locate_tile_tokens(tile - sizes.K * tiles, sizes.Lq, BN)
        tl.store(queries + i * sizes.Lq + s, _compute_inverse_norms(locate_rows(Q, i, s), ok, d, BN, BD), mask=ok)


@triton.jit(do_not_specialize=["Lq"])
def maxsim_row_norms(Q, norms, Lq, d, C: tl.constexpr):
    """Store ``1 / ||q||`` of every query row, for BM tokens of a query in each program."""
    i, s, ok = _locate_tile_tokens(tl.program_id(0), Lq, C.BM)
    keep = load_query_mask(Q, i, s, ok)
    squares = sum_row_squares(locate_rows(Q, i, s), keep, d, Q.stride_d, C.BD, C.WIDE_OFFSETS)
    tl.store(norms + i.to(tl.int64) * Lq + s, compute_inverse_norm(squares), mask=ok)
