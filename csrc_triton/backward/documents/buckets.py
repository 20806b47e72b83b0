"""Bucketed argmax lists: for each tile of document tokens, the query rows whose argmax is in the tile.

A stable counting sort of the argmax of a document by token tile. `maxsim_grad_documents` then reads only the rows of
its tile.

```text
count launch, program = (document, block of BM rows):
    counts[document, tile, block] = rows of the block whose argmax is in the tile
scan launch, program = document:
    starts = exclusive prefix sum of counts over (tile, block)
list launch, program = (document, block of BM rows):
    tile[r] = argmax[r] // BN                       # -1 without an argmax
    rank[r] = number of earlier rows of the block with the same tile
    entries[starts[tile, block] + rank[r]] = r * BN + argmax[r] % BN
```

If one block holds all rows of a document, the list launch runs alone and also writes `starts`.

Invariants:

- A list is in ascending order of r = i * Lq + s. Sums over a list have the same bits on every run. No atomics.
- A 64-bit integer holds eight 8-bit counters, one for each of eight tiles. They count along an axis of
  `ROWS_PER_QUERY` rows, fewer than 256. Sums of these are kept in 16-bit counters.
"""

import triton
import triton.language as tl

from ...common.primitives import to_int64


@triton.jit
def _load_argmax_block(up, lists, rows, C: tl.constexpr):
    """Return this program's document (relative to `lists.first`), its block, the rows, and their argmax (-1: none).

    Rows have the shape `[BM // ROWS_PER_QUERY, ROWS_PER_QUERY]`. A warp holds whole lines of neighboring rows, so
    counts along a line need no barrier.
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
    """Return a 64-bit integer with a one in byte ``tile - b``, or 0 if the tile is not in ``[b, b + 8)``.

    A sum of such integers holds eight counters.
    """
    one = tl.full((1, 1), 1, tl.int64)
    return tl.where((tile >= b) & (tile < b + 8), one << ((tile - b) & 7).to(tl.int64) * 8, 0)


@triton.jit
def _split_counters(counts):
    """Split eight 8-bit counters into the even and the odd ones, four 16-bit counters each."""
    return counts & 0x00FF00FF00FF00FF, (counts >> 8) & 0x00FF00FF00FF00FF


@triton.jit
def _extract_counter(even_counts, odd_counts, n: tl.constexpr):
    """Return counter `n` of the result of `_split_counters`."""
    half = odd_counts if n % 2 == 1 else even_counts
    return ((half >> (16 * (n // 2))) & 0xFFFF).to(tl.int32)


@triton.jit
def maxsim_count_argmax(up, lists, rows, C: tl.constexpr):
    """Count the argmax values of each block of rows in each tile. `maxsim_scan_counts` computes the starts."""
    document, block, _, token = _load_argmax_block(up, lists, rows, C)
    tile = tl.where(token >= 0, token // C.BN, -1)
    starts = lists.starts + (to_int64(document) * (lists.tiles * lists.blocks + 1) + block)
    for b in range(0, lists.tiles, 8):
        even_counts, odd_counts = _split_counters(tl.sum(_encode_tile_counters(tile, b), axis=1))
        even_counts = tl.sum(even_counts, axis=0)
        odd_counts = tl.sum(odd_counts, axis=0)
        for n in tl.static_range(8):
            if b + n < lists.tiles:
                tl.store(starts + (b + n) * lists.blocks, _extract_counter(even_counts, odd_counts, n))


@triton.jit(do_not_specialize=["count"])
def maxsim_scan_counts(starts, count, C: tl.constexpr):
    """Replace `count` counts of a document by their exclusive prefix sum, and store the total after them."""
    starts += to_int64(tl.program_id(0)) * (count + 1)
    total = 0
    for c0 in range(0, count, C.BM):
        c = c0 + tl.arange(0, C.BM)
        x = tl.load(starts + c, mask=c < count, other=0)
        prefix = tl.cumsum(x, axis=0) - x
        tl.debug_barrier()
        tl.store(starts + c, prefix + total, mask=c < count)
        total += tl.sum(x, axis=0)
    tl.store(starts + count, total)


@triton.jit
def rank_rows(tile, starts, tiles, ONE_BLOCK: tl.constexpr):
    """Return for each row how many earlier rows of the block belong to the same tile.

    With ONE_BLOCK the block holds the whole document, and this function writes `starts`. Otherwise `starts` already
    exists.
    """
    rank = tl.zeros_like(tile)
    begin = 0
    for b in range(0, tiles, 8):
        marks = _encode_tile_counters(tile, b)
        prefix_counts = tl.cumsum(marks, axis=1) - marks
        even_counts, odd_counts = _split_counters(tl.sum(marks, axis=1))
        even_before = (tl.cumsum(even_counts, axis=0) - even_counts)[:, None]
        odd_before = (tl.cumsum(odd_counts, axis=0) - odd_counts)[:, None]
        n = (tile - b) & 7
        rows_before = tl.where(n % 2 == 1, odd_before, even_before) >> (n // 2 * 16).to(tl.int64)
        tile_rank = ((prefix_counts >> (n * 8).to(tl.int64)) & 0xFF) + (rows_before & 0xFFFF)
        rank = tl.where(marks != 0, tile_rank.to(tl.int32), rank)
        if ONE_BLOCK:
            even_counts = tl.sum(even_counts, axis=0)
            odd_counts = tl.sum(odd_counts, axis=0)
            for m in tl.static_range(8):
                if b + m < tiles:
                    tl.store(starts + b + m, begin)
                    begin += _extract_counter(even_counts, odd_counts, m)
    if ONE_BLOCK:
        tl.store(starts + tiles, begin)
        tl.debug_barrier()
    return rank


@triton.jit
def maxsim_list_argmax(up, lists, rows, ONE_BLOCK: tl.constexpr, C: tl.constexpr):
    """Write the lists of one block of rows of one document.

    Args:
        up: `UpstreamArgs`.
        lists: `TileBucketArgs` with outputs `entries` and `starts`.
        rows: Query rows that a document is scored against.
        ONE_BLOCK: The block holds all rows, and `starts` was not computed.
        C: Compile-time choices, a `KernelConfig`.
    """
    document, block, r, token = _load_argmax_block(up, lists, rows, C)
    has_argmax = token >= 0
    tile = tl.where(has_argmax, token // C.BN, -1)
    starts = lists.starts + to_int64(document) * (lists.tiles * lists.blocks + 1)
    position = rank_rows(tile, starts, lists.tiles, ONE_BLOCK)
    position += tl.load(starts + tile * lists.blocks + block, mask=has_argmax, other=0)
    tl.store(lists.entries + to_int64(document) * rows + position, r * C.BN + token % C.BN, mask=has_argmax)
