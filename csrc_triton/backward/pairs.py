"""Items, which are documents as queries meet them: what is known of each, and what packed query rows won in them.

An item is a document of the cross product, a candidate of a query, or one of a pair list. `list_items` writes them.
"""

import triton
import triton.language as tl

from ..common.primitives import to_int64

# Fields of an item, int64. FIRST and LENGTH: its document's first row of D (behind all rows where nothing can win) and
# number of tokens. BEGIN to STOP: its query's rows. WINNERS and SCORE: what a row's number is added to for its winner,
# and where the score's gradient lies (in the cross product, that of query 0). QUERY: behind all where there is none.
FIELD_FIRST, FIELD_LENGTH, FIELD_BEGIN, FIELD_STOP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FIELD_ARGMAX, FIELD_SCORE, FIELD_QUERY = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
FIELD_COUNT = tl.constexpr(7)


@triton.jit
def load_pair_field(up, n, ok, FIELD: tl.constexpr):
    """A field of items n, 0 where not `ok`."""
    return tl.load(up.items + FIELD * to_int64(up.count) + n, mask=ok, other=0)


@triton.jit
def find_query_pairs(up, row, ok, C: tl.constexpr):
    """Of packed query rows: their query (0 where none), and the first and the number of the items that it meets."""
    i = tl.load(up.query + row, mask=ok, other=-1).to(tl.int64)
    ok = ok & (i >= 0)
    i = tl.where(ok, i, 0)
    first = i * 0
    if up.starts is not None:
        first = tl.load(up.starts + i, mask=ok, other=0).to(tl.int64)
        met = tl.load(up.starts + i + 1, mask=ok, other=0).to(tl.int64) - first
    else:
        if C.CANDIDATES:
            first = i * up.K
        met = tl.where(ok, first * 0 + up.K, 0)
    return i, first, met


@triton.jit
def count_max_pairs(up, row, ok, C: tl.constexpr):
    """The most items that any of the rows' queries meets."""
    _, _, met = find_query_pairs(up, row, ok, C)
    return tl.max(met, axis=0).to(tl.int32)


@triton.jit
def load_packed_argmax(up, of, row, n, ok):
    """Of packed query rows in the n-th item that their query meets, `of` being their `find_query_pairs`: the row of D
    that won, whether one did, and the score's gradient.

    Nothing that is read decides whether something else is: the loads are on their way together.
    """
    i, first, met = of
    n = n.to(tl.int64)
    ok = ok & (n < met)
    m = first + n
    if up.starts is not None:
        ok = ok & (row < load_pair_field(up, m, ok, FIELD_STOP))
        won_at = load_pair_field(up, m, ok, FIELD_ARGMAX) + row
        score_at = load_pair_field(up, m, ok, FIELD_SCORE)
    else:
        won_at = n * up.Lq + row
        score_at = i * up.stride_q + n * up.stride_k
    token = tl.load(up.argmax + won_at, mask=ok, other=-1).to(tl.int64)
    length = load_pair_field(up, m, ok, FIELD_LENGTH)
    begin = load_pair_field(up, m, ok, FIELD_FIRST)
    g = tl.load(up.grad_scores + score_at, mask=ok, other=0.0)
    won = ok & (token >= 0) & (token < length)  # no forward writes another
    # Row 0 where none won, though it is not read: without that selection Triton 3.6 does not compile the other.
    return tl.where(won, begin + token, 0), won, tl.where(won, g, 0.0)
