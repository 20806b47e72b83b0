"""Which query rows each tile of document tokens won: the winners of a document as lists, one for each tile.

A stable counting sort of a document's winners by token tile, so that `maxsim_grad_documents` reads only the rows that
its tile won, in ascending order: the same bits on every run, without atomics. Entry of query row (i, s) that token t
won: ``(i * SLOT + s) * BN + t % BN`` with SLOT a power of two, and the coefficient ``g * w / ||q||`` of its row beside
it. ``starts[document, tile, block]`` is where the winners that block `block` of rows adds to a tile begin.
"""

import triton
import triton.language as tl

from .common import inverse_norm, query_keep, query_weight, row_pointers, rows_sum_of_squares, wide


@triton.jit
def maxsim_row_norms(Q, norms, Nq, Lq, d, C: tl.constexpr):
    """1 / ||q|| of every query row, BM tokens of a query a program."""
    tiles = tl.cdiv(Lq, C.BM)
    i = tl.program_id(0) // tiles
    s = (tl.program_id(0) % tiles) * C.BM + tl.arange(0, C.BM)
    keep = query_keep(Q, i, s, s < Lq)
    squares = rows_sum_of_squares(row_pointers(Q, i, s), keep, d, Q.stride_d, C.BD, C.WIDE)
    tl.store(norms + i * Lq + s, inverse_norm(squares), mask=s < Lq)


@triton.jit
def _block_of_winners(up, first, rows, blocks, C: tl.constexpr):
    """The document of this program (from `first` on), its block of BM rows, and the token that won each (-1: none)."""
    document = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    r = block * C.BM + tl.arange(0, C.BM)
    token = tl.load(up.argmax + (wide(document) + first) * rows + r, mask=r < rows, other=-1).to(tl.int32)
    return document, block, r, token


@triton.jit
def _pair_of_tiles(tile, b):
    """Ones in the low half where a row belongs to tile b and in the high half where to the next: two counts in one."""
    return (tile == b).to(tl.int32) + ((tile == b + 1).to(tl.int32) << 16)


@triton.jit(do_not_specialize=["first", "rows", "blocks", "tiles"])
def maxsim_count_winners(up, starts, first, rows, blocks, tiles, C: tl.constexpr):
    """How many winners each block of rows has in each tile; `maxsim_scan_counts` turns the counts into starts."""
    document, block, _, token = _block_of_winners(up, first, rows, blocks, C)
    tile = tl.where(token >= 0, token // C.BN, -1)
    starts += wide(document) * (tiles * blocks + 1) + block
    for b in range(0, tiles, 2):
        both = tl.sum(_pair_of_tiles(tile, b), axis=0)
        tl.store(starts + b * blocks, both & 0xFFFF)
        if b + 1 < tiles:
            tl.store(starts + (b + 1) * blocks, both >> 16)


@triton.jit(do_not_specialize=["count"])
def maxsim_scan_counts(starts, count, C: tl.constexpr):
    """Replace `count` counts by the sums of those before them, and write the sum of all behind them."""
    starts += wide(tl.program_id(0)) * (count + 1)
    total = 0
    for c0 in range(0, count, C.BM):
        c = c0 + tl.arange(0, C.BM)
        x = tl.load(starts + c, mask=c < count, other=0)
        before = tl.cumsum(x, axis=0) - x
        tl.debug_barrier()
        tl.store(starts + c, before + total, mask=c < count)
        total += tl.sum(x, axis=0)
    tl.store(starts + count, total)


@triton.jit
def _ranks(tile, starts, tiles, ALONE: tl.constexpr):
    """Of each row, how many before it in the block belong to the same tile.

    ALONE: the block is the whole document, so the ranks count from the start of the list, and `starts` is written.
    """
    rank = tl.zeros_like(tile)
    begin = 0
    for b in range(0, tiles, 2):
        ones = _pair_of_tiles(tile, b)
        before = tl.cumsum(ones, axis=0) - ones
        low = before & 0xFFFF
        high = before >> 16
        if ALONE:
            both = tl.sum(ones, axis=0)
            middle = begin + (both & 0xFFFF)
            tl.store(starts + b, begin)
            if b + 1 < tiles:
                tl.store(starts + b + 1, middle)
            low += begin
            high += middle
            begin = middle + (both >> 16)
        rank = tl.where(tile == b, low, tl.where(tile == b + 1, high, rank))
    if ALONE:
        tl.store(starts + tiles, begin)
    return rank


@triton.jit(do_not_specialize=["first", "rows", "blocks", "tiles", "Lq"])
def maxsim_list_winners(
    Q, up, norms, starts, entries, coefficients, first, rows, blocks, tiles, Lq, ALONE: tl.constexpr, C: tl.constexpr
):
    """Write the lists of one block of rows of one document; ALONE: it holds all rows, and nothing was counted."""
    document, block, r, token = _block_of_winners(up, first, rows, blocks, C)
    won = token >= 0
    tile = tl.where(won, token // C.BN, -1)
    starts += wide(document) * (tiles * blocks + 1)
    position = _ranks(tile, starts, tiles, ALONE)
    if not ALONE:
        position += tl.load(starts + tile * blocks + block, mask=won, other=0)

    i = r // Lq
    s = r - i * Lq
    tl.store(entries + wide(document) * rows + position, (i * C.SLOT + s) * C.BN + token % C.BN, mask=won)
    k = wide(document) + first
    coefficient = tl.load(up.grad_scores + k * up.stride_k + i.to(tl.int64) * up.stride_q, mask=won, other=0.0)
    coefficient *= query_weight(Q, i, s, won)
    if norms is not None:
        coefficient *= tl.load(norms + r, mask=won, other=0.0)
    tl.store(coefficients + wide(document) * rows + position, coefficient, mask=won)
