"""Which query rows each tile of document tokens won: the winners of a document as lists, one for each tile.

A stable counting sort of a document's winners by token tile, so that `maxsim_grad_documents` reads only the rows that
its tile won, in ascending order: the same bits on every run, without atomics. Entry of row r = i * Lq + s that token t
won: ``r * BN + t % BN``. ``starts[document, tile, block]`` is where the winners that block `block` of rows adds to a
tile begin.
"""

import triton
import triton.language as tl

from ...common.primitives import to_int64


@triton.jit
def _load_argmax_block(up, lists, rows, C: tl.constexpr):
    """The document of this program (from `first` on), its block of BM rows, and the token that won each (-1: none).

    As [BM // ROWS_PER_QUERY, ROWS_PER_QUERY] rows of neighbours: a warp holds whole rows, and counts along them need
    no barrier.
    """
    document = tl.program_id(0) // lists.blocks
    block = tl.program_id(0) % lists.blocks
    r = (
        block * C.BM
        + tl.arange(0, C.BM // C.ROWS_PER_QUERY)[:, None] * C.ROWS_PER_QUERY
        + tl.arange(0, C.ROWS_PER_QUERY)[None, :]
    )
    token = tl.load(up.argmax + (to_int64(document) + lists.first) * rows + r, mask=r < rows, other=-1).to(tl.int32)
    return document, block, r, token


@triton.jit
def _encode_tile_counters(tile, b):
    """A one in byte ``tile - b`` of 64 bits for tiles b to b + 7, nothing for others: eight counters in one sum."""
    one = tl.full((1, 1), 1, tl.int64)
    return tl.where((tile >= b) & (tile < b + 8), one << ((tile - b) & 7).to(tl.int64) * 8, 0)


@triton.jit
def _split_counters(counts):
    """Eight counters of 8 bits as the even and the odd ones, four counters of 16 bits each."""
    return counts & 0x00FF00FF00FF00FF, (counts >> 8) & 0x00FF00FF00FF00FF


@triton.jit
def _extract_counter(even, odd, n: tl.constexpr):
    half = odd if n % 2 == 1 else even
    return ((half >> (16 * (n // 2))) & 0xFFFF).to(tl.int32)


@triton.jit
def maxsim_count_argmax(up, lists, rows, C: tl.constexpr):
    """How many winners each block of rows has in each tile; `maxsim_scan_counts` turns the counts into starts."""
    document, block, _, token = _load_argmax_block(up, lists, rows, C)
    tile = tl.where(token >= 0, token // C.BN, -1)
    starts = lists.starts + (to_int64(document) * (lists.tiles * lists.blocks + 1) + block)
    for b in range(0, lists.tiles, 8):
        even, odd = _split_counters(tl.sum(_encode_tile_counters(tile, b), axis=1))
        even = tl.sum(even, axis=0)
        odd = tl.sum(odd, axis=0)
        for n in tl.static_range(8):
            if b + n < lists.tiles:
                tl.store(starts + (b + n) * lists.blocks, _extract_counter(even, odd, n))


@triton.jit(do_not_specialize=["count"])
def maxsim_scan_counts(starts, count, C: tl.constexpr):
    """Replace `count` counts by the sums of those before them, and write the sum of all behind them."""
    starts += to_int64(tl.program_id(0)) * (count + 1)
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
def rank_rows(tile, starts, tiles, ONE_BLOCK: tl.constexpr):
    """Of each row, how many before it in the block belong to the same tile.

    ONE_BLOCK: the block is the whole document, and `starts` is written here. Of several blocks it is there already.
    """
    rank = tl.zeros_like(tile)
    begin = 0
    for b in range(0, tiles, 8):
        marks = _encode_tile_counters(tile, b)
        before = tl.cumsum(marks, axis=1) - marks
        even, odd = _split_counters(tl.sum(marks, axis=1))
        even_before = (tl.cumsum(even, axis=0) - even)[:, None]
        odd_before = (tl.cumsum(odd, axis=0) - odd)[:, None]
        n = (tile - b) & 7
        rows_before = tl.where(n % 2 == 1, odd_before, even_before) >> (n // 2 * 16).to(tl.int64)
        here = ((before >> (n * 8).to(tl.int64)) & 0xFF) + (rows_before & 0xFFFF)
        rank = tl.where(marks != 0, here.to(tl.int32), rank)
        if ONE_BLOCK:
            even = tl.sum(even, axis=0)
            odd = tl.sum(odd, axis=0)
            for m in tl.static_range(8):
                if b + m < tiles:
                    tl.store(starts + b + m, begin)
                    begin += _extract_counter(even, odd, m)
    if ONE_BLOCK:
        tl.store(starts + tiles, begin)
        tl.debug_barrier()
    return rank


@triton.jit
def maxsim_list_argmax(up, lists, rows, ONE_BLOCK: tl.constexpr, C: tl.constexpr):
    """Write the lists of one block of rows of one document; ONE_BLOCK: it holds all rows, and nothing was counted."""
    document, block, r, token = _load_argmax_block(up, lists, rows, C)
    won = token >= 0
    tile = tl.where(won, token // C.BN, -1)
    starts = lists.starts + to_int64(document) * (lists.tiles * lists.blocks + 1)
    position = rank_rows(tile, starts, lists.tiles, ONE_BLOCK)
    position += tl.load(starts + tile * lists.blocks + block, mask=won, other=0)
    tl.store(lists.entries + to_int64(document) * rows + position, r * C.BN + token % C.BN, mask=won)
