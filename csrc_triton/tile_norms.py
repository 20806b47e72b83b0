"""Inverse norms of tokens, found by a launch of their own for kernels that read them."""

import triton
import triton.language as tl

from .common import document_base, inverse_norm, load_rows, ordered_sum, row_pointers, square


@triton.jit
def _inverse(pointers, ok, d, BN: tl.constexpr, BD: tl.constexpr):
    """Of contiguous rows, summed as `similarities.sum_of_squares` sums them, BD features at a time."""
    squares = tl.zeros((BN,), tl.float32)
    for c0 in range(0, d, BD):
        squares += ordered_sum(square(load_rows(pointers, ok, c0 + tl.arange(0, BD), d, 1, 1)), BN, BD)
    return inverse_norm(squares)


@triton.jit
def maxsim_tile_norms(Q, D, queries, documents, sizes, d, BN: tl.constexpr, BD: tl.constexpr):
    """Of document tokens, ``documents [K, tiles, BN]``, and, unless `queries` is None, of query tokens ``[Nq, Lq]``.

    The last tile of a document is shifted back to end where it ends; Ld >= BN. Features lie behind each other.
    """
    tiles = tl.cdiv(sizes.Ld, BN)
    tile = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BN)
    if tile < sizes.K * tiles:
        t = tl.minimum(tile % tiles * BN, sizes.Ld - BN) + n
        pointers = document_base(D, tile * 0, tile // tiles) + t * D.stride_l
        tl.store(documents + tile * BN + n, _inverse(pointers, n >= 0, d, BN, BD))
    elif queries is not None:
        tile -= sizes.K * tiles
        i = tile // tl.cdiv(sizes.Lq, BN)
        s = tile % tl.cdiv(sizes.Lq, BN) * BN + n
        ok = s < sizes.Lq
        tl.store(queries + i * sizes.Lq + s, _inverse(row_pointers(Q, i, s), ok, d, BN, BD), mask=ok)
