"""Which query rows won in each part of a packed document: lists for `maxsim_grad_packed_documents`.

A document is cut into at most BUCKETS buckets at multiples of their width, which is BN rows of D or the power of two
times as many that makes BUCKETS of them enough: each tile of BN rows of D lies in one bucket of every document that it
touches. The winners of each block of query rows are sorted by bucket, stably and without atomics, and blocks apart, so
that one launch lists them. Entry of row r of a block that won token t of a bucket: ``r * OFFSETS + t``.
"""

import triton
import triton.language as tl

from ...common.primitives import wide
from ..arguments import Items
from ..pairs import FIRST, LENGTH, SCORE, STOP, WINNERS, item_field
from .buckets import ranks

BUCKETS = tl.constexpr(64)
OFFSET_BITS = tl.constexpr(18)
OFFSETS = tl.constexpr(2**18)  # rows of D in a bucket, fewer than
BLOCK_ROWS = tl.constexpr(2**12)  # query rows of a block, at most; 2**13 would still leave entries 31 bits


@triton.jit
def _bits(x):
    """How many bits the number x has that is not negative, or one more."""
    return tl.maximum((x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def _buckets(first, length, C: tl.constexpr):
    """Of a document: how many tiles a bucket has, as a power of two, where it begins in its first bucket, and how many
    buckets it has."""
    shift = _bits((tl.maximum(length, 1) - 1) // ((BUCKETS - 1) * C.BN))
    begin = (first - ((first // C.BN) >> shift << shift) * C.BN).to(tl.int32)
    count = tl.where(length > 0, ((begin + length - 1) // C.BN >> shift) + 1, 0)
    return shift, begin, count


@triton.jit
def _in_fours(pointer, n, C: tl.constexpr):
    """The first n of BM elements, -1 behind them, as [BM // SLOT, SLOT] with four neighbours in a thread.

    Their alignment, which is not known, would give a thread one, and scans along them four times as many exchanges.
    """
    first = tl.arange(0, C.BM // 4) * 4
    a = tl.load(pointer + first, mask=first < n, other=-1).to(tl.int32)
    b = tl.load(pointer + first + 1, mask=first + 1 < n, other=-1).to(tl.int32)
    c = tl.load(pointer + first + 2, mask=first + 2 < n, other=-1).to(tl.int32)
    e = tl.load(pointer + first + 3, mask=first + 3 < n, other=-1).to(tl.int32)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, e)), (C.BM // C.SLOT, C.SLOT))


@triton.jit
def maxsim_list_packed_winners(up, lists, C: tl.constexpr):
    """Write the lists of the items of the cross product, a block of at most BM query rows a program."""
    n = tl.program_id(0) // lists.blocks
    block = tl.program_id(0) % lists.blocks
    first = item_field(up, n, True, FIRST)
    length = item_field(up, n, True, LENGTH).to(tl.int32)
    stop = item_field(up, n, True, STOP)
    winners = item_field(up, n, True, WINNERS)
    shift, begin, count = _buckets(first, length, C)
    row = block * lists.rows
    here = tl.minimum(stop - row, lists.rows)
    token = _in_fours(up.argmax + (winners + row), here, C)
    query = _in_fours(up.query + row, here, C)
    won = (token >= 0) & (token < length) & (query >= 0)  # no forward writes another
    token += begin
    bucket = tl.where(won, token // C.BN >> shift, -1)
    starts = lists.starts + wide(tl.program_id(0)) * (BUCKETS + 1)
    rank = tl.reshape(ranks(bucket, starts, count, True), (C.BM,))
    # Neighbours go to neighbouring threads, whose stores meet.
    bucket = tl.reshape(bucket, (C.BM,))
    entry = tl.arange(0, C.BM) * OFFSETS + tl.reshape(token, (C.BM,)) - (bucket << shift) * C.BN
    won = bucket >= 0
    position = rank + tl.load(starts + bucket, mask=won, other=0)
    tl.store(lists.entries + wide(tl.program_id(0)) * lists.rows + position, entry, mask=won)


@triton.jit
def listed_item(walk, up, m, C: tl.constexpr):
    """The bucket of block m of all items that the tile lies in, and of its entries those of this piece."""
    lists = walk.lists
    m = wide(m).to(tl.int32)
    n = m // lists.blocks
    ok = m < walk.hi
    first = item_field(up, n, ok, FIRST)
    length = item_field(up, n, ok, LENGTH).to(tl.int32)
    score = item_field(up, n, ok, SCORE)
    shift, begin, count = _buckets(first, length, C)
    tile = (walk.t0 - first + begin) // C.BN
    bucket = tile >> shift
    starts = lists.starts + wide(m) * (BUCKETS + 1) + bucket
    ok = ok & (bucket >= 0) & (bucket < count)
    lo = tl.load(starts, mask=ok, other=0)
    hi = tl.load(starts + 1, mask=ok, other=0)
    part = tl.cdiv(tl.cdiv(hi - lo, C.BM), tl.num_programs(1)) * C.BM
    lo = tl.minimum(lo + tl.program_id(1) * part, hi)
    hi = tl.minimum(lo + part, hi)
    place = (((bucket << shift) - tile) * C.BN).to(tl.int32)
    entries = m * lists.rows
    return Items(place, C.BN << shift, entries + lo, entries + hi, m % lists.blocks * lists.rows, score)
