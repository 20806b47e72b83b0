"""Which query rows won in each part of a packed document: lists for `maxsim_grad_packed_documents`.

A document is cut into at most BUCKETS buckets at multiples of their width, which is BN rows of D or the power of two
times as many that makes BUCKETS of them enough: each tile of BN rows of D lies in one bucket of every document that it
touches. The winners of each block of query rows are sorted by bucket, stably and without atomics, and blocks apart, so
that one launch lists them. Entry of row r of a block that won token t of a bucket: ``r * OFFSETS + t``.
"""

import triton
import triton.language as tl

from ...common.primitives import to_int64
from ..arguments import StepPairs
from ..pairs import FIELD_ARGMAX, FIELD_FIRST, FIELD_LENGTH, FIELD_SCORE, FIELD_STOP, load_pair_field
from .buckets import rank_rows

MAX_BUCKETS = tl.constexpr(64)
OFFSET_BITS = tl.constexpr(18)
BUCKET_ROW_LIMIT = tl.constexpr(2**18)  # rows of D in a bucket, fewer than
MAX_BLOCK_ROWS = tl.constexpr(2**12)  # query rows of a block, at most; 2**13 would still leave entries 31 bits


@triton.jit
def _count_bits(x):
    """How many bits the number x has that is not negative, or one more."""
    return tl.maximum((x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def _partition_document(first, length, C: tl.constexpr):
    """Of a document: how many tiles a bucket has, as a power of two, where it begins in its first bucket, and how many
    buckets it has."""
    shift = _count_bits((tl.maximum(length, 1) - 1) // ((MAX_BUCKETS - 1) * C.BN))
    begin = (first - ((first // C.BN) >> shift << shift) * C.BN).to(tl.int32)
    count = tl.where(length > 0, ((begin + length - 1) // C.BN >> shift) + 1, 0)
    return shift, begin, count


@triton.jit
def _load_vectorized(pointer, n, C: tl.constexpr):
    """The first n of BM elements, -1 behind them, as [BM // ROWS_PER_QUERY, ROWS_PER_QUERY] with four neighbours in a
    thread.

    Their alignment, which is not known, would give a thread one, and scans along them four times as many exchanges.
    """
    first = tl.arange(0, C.BM // 4) * 4
    a = tl.load(pointer + first, mask=first < n, other=-1).to(tl.int32)
    b = tl.load(pointer + first + 1, mask=first + 1 < n, other=-1).to(tl.int32)
    c = tl.load(pointer + first + 2, mask=first + 2 < n, other=-1).to(tl.int32)
    e = tl.load(pointer + first + 3, mask=first + 3 < n, other=-1).to(tl.int32)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, e)), (C.BM // C.ROWS_PER_QUERY, C.ROWS_PER_QUERY))


@triton.jit
def maxsim_list_packed_argmax(up, lists, C: tl.constexpr):
    """Write the lists of the items of the cross product, a block of at most BM query rows a program."""
    n = tl.program_id(0) // lists.blocks
    block = tl.program_id(0) % lists.blocks
    first = load_pair_field(up, n, True, FIELD_FIRST)
    length = load_pair_field(up, n, True, FIELD_LENGTH).to(tl.int32)
    stop = load_pair_field(up, n, True, FIELD_STOP)
    argmax = load_pair_field(up, n, True, FIELD_ARGMAX)
    shift, begin, count = _partition_document(first, length, C)
    row = block * lists.rows
    here = tl.minimum(stop - row, lists.rows)
    token = _load_vectorized(up.argmax + (argmax + row), here, C)
    query = _load_vectorized(up.query + row, here, C)
    won = (token >= 0) & (token < length) & (query >= 0)  # no forward writes another
    token += begin
    bucket = tl.where(won, token // C.BN >> shift, -1)
    starts = lists.starts + to_int64(tl.program_id(0)) * (MAX_BUCKETS + 1)
    rank = tl.reshape(rank_rows(bucket, starts, count, True), (C.BM,))
    # Neighbours go to neighbouring threads, whose stores meet.
    bucket = tl.reshape(bucket, (C.BM,))
    entry = tl.arange(0, C.BM) * BUCKET_ROW_LIMIT + tl.reshape(token, (C.BM,)) - (bucket << shift) * C.BN
    won = bucket >= 0
    position = rank + tl.load(starts + bucket, mask=won, other=0)
    tl.store(lists.entries + to_int64(tl.program_id(0)) * lists.rows + position, entry, mask=won)


@triton.jit
def load_bucket_pair(walk, up, m, C: tl.constexpr):
    """The bucket of block m of all items that the tile lies in, and of its entries those of this piece."""
    lists = walk.lists
    m = to_int64(m).to(tl.int32)
    n = m // lists.blocks
    ok = m < walk.hi
    first = load_pair_field(up, n, ok, FIELD_FIRST)
    length = load_pair_field(up, n, ok, FIELD_LENGTH).to(tl.int32)
    score = load_pair_field(up, n, ok, FIELD_SCORE)
    shift, begin, count = _partition_document(first, length, C)
    tile = (walk.t0 - first + begin) // C.BN
    bucket = tile >> shift
    starts = lists.starts + to_int64(m) * (MAX_BUCKETS + 1) + bucket
    ok = ok & (bucket >= 0) & (bucket < count)
    lo = tl.load(starts, mask=ok, other=0)
    hi = tl.load(starts + 1, mask=ok, other=0)
    part = tl.cdiv(tl.cdiv(hi - lo, C.BM), tl.num_programs(1)) * C.BM
    lo = tl.minimum(lo + tl.program_id(1) * part, hi)
    hi = tl.minimum(lo + part, hi)
    place = (((bucket << shift) - tile) * C.BN).to(tl.int32)
    entries = m * lists.rows
    return StepPairs(place, C.BN << shift, entries + lo, entries + hi, m % lists.blocks * lists.rows, score)
