"""Bucketed argmax lists of packed documents, for `maxsim_grad_packed_documents`.

A document is cut into at most MAX_BUCKETS buckets. A bucket has `BN * 2^shift` rows of D and begins at a multiple of
that width. `shift` is large enough for MAX_BUCKETS buckets to cover the document. A tile of BN rows of D is therefore
in one bucket of every document that it touches.

```text
list launch, program = (pair, block of at most BM query rows):
    token = argmax + position of the document in its first bucket
    bucket = token // BN >> shift                   # -1 without an argmax
    rank = number of earlier rows of the block with the same bucket
    starts[pair, block, :] = exclusive prefix sum of the bucket sizes
    entries[pair, block, starts[bucket] + rank] = row << OFFSET_BITS | token - first token of the bucket
```

Invariants:

- Each block is sorted stably and separately, so one launch suffices. No atomics.
- An entry has 12 bits for the row within its block, and OFFSET_BITS for the token within its bucket.
"""

import triton
import triton.language as tl

from ...common.primitives import to_int64
from ..arguments import StepPairs
from ..pairs import FIELD_ARGMAX, FIELD_FIRST, FIELD_LENGTH, FIELD_SCORE, FIELD_STOP, load_pair_field
from .buckets import rank_rows

MAX_BUCKETS = tl.constexpr(64)
OFFSET_BITS = tl.constexpr(18)
BUCKET_ROW_LIMIT = tl.constexpr(2**18)  # a bucket has fewer rows of D
MAX_BLOCK_ROWS = tl.constexpr(2**12)  # query rows of a block; 2**13 would still fit an entry in 31 bits


@triton.jit
def _count_bits(x):
    """Return the number of bits of a nonnegative number, or one more."""
    return tl.maximum((x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def _partition_document(first, length, C: tl.constexpr):
    """Partition a document into buckets.

    Returns log2 of the tiles of a bucket, the position of the document in its first bucket, and the number of buckets.
    """
    shift = _count_bits((tl.maximum(length, 1) - 1) // ((MAX_BUCKETS - 1) * C.BN))
    begin = (first - ((first // C.BN) >> shift << shift) * C.BN).to(tl.int32)
    count = tl.where(length > 0, ((begin + length - 1) // C.BN >> shift) + 1, 0)
    return shift, begin, count


@triton.jit
def _load_vectorized(pointer, n, C: tl.constexpr):
    """Load the first n of BM elements, -1 after them, with four neighbors in each thread.

    Returns `[BM // ROWS_PER_QUERY, ROWS_PER_QUERY]`. The alignment is unknown, so a plain load would give a thread one
    element. Scans along the elements would then need four times as many exchanges.
    """
    first = tl.arange(0, C.BM // 4) * 4
    a = tl.load(pointer + first, mask=first < n, other=-1).to(tl.int32)
    b = tl.load(pointer + first + 1, mask=first + 1 < n, other=-1).to(tl.int32)
    c = tl.load(pointer + first + 2, mask=first + 2 < n, other=-1).to(tl.int32)
    e = tl.load(pointer + first + 3, mask=first + 3 < n, other=-1).to(tl.int32)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, e)), (C.BM // C.ROWS_PER_QUERY, C.ROWS_PER_QUERY))


@triton.jit
def maxsim_list_packed_argmax(up, lists, C: tl.constexpr):
    """Write the lists of cross-product pairs, a block of at most BM query rows for each program."""
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
    # The comparison with the length is a safeguard: no forward writes an argmax outside its document.
    won = (token >= 0) & (token < length) & (query >= 0)
    token += begin
    bucket = tl.where(won, token // C.BN >> shift, -1)
    starts = lists.starts + to_int64(tl.program_id(0)) * (MAX_BUCKETS + 1)
    rank = tl.reshape(rank_rows(bucket, starts, count, True), (C.BM,))
    # Neighboring entries are in neighboring threads, so that their stores coalesce.
    bucket = tl.reshape(bucket, (C.BM,))
    entry = tl.arange(0, C.BM) * BUCKET_ROW_LIMIT + tl.reshape(token, (C.BM,)) - (bucket << shift) * C.BN
    won = bucket >= 0
    position = rank + tl.load(starts + bucket, mask=won, other=0)
    tl.store(lists.entries + to_int64(tl.program_id(0)) * lists.rows + position, entry, mask=won)


@triton.jit
def load_bucket_pair(walk, up, m, C: tl.constexpr):
    """Return the bucket of block `m` that holds the tile, with the entries of this piece, as `StepPairs`."""
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
