"""Pairs of a query and a document in packed layouts: their fields, and the argmax of packed query rows in them.

A pair (`items` in the code) is a document of the cross product, a candidate of a query, or an entry of a pair list.
`list_pairs` writes pairs.
"""

import triton
import triton.language as tl

from ..common.primitives import to_int64

# Fields of a pair, int64. FIRST and LENGTH: first row of D and number of tokens of its document. FIRST is Td if the
# pair has no document token or no query row. BEGIN to STOP: rows of its query. ARGMAX: offset that is added to a row
# number to locate its argmax. SCORE: offset of the gradient of its score, of query 0 in the cross product. QUERY: its
# query, or Nq if there is none.
FIELD_FIRST, FIELD_LENGTH, FIELD_BEGIN, FIELD_STOP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FIELD_ARGMAX, FIELD_SCORE, FIELD_QUERY = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
FIELD_COUNT = tl.constexpr(7)


@triton.jit
def load_pair_field(up, n, ok, FIELD: tl.constexpr):
    """Load a field of pairs `n`, or 0 where not `ok`."""
    return tl.load(up.items + FIELD * to_int64(up.count) + n, mask=ok, other=0)


@triton.jit
def find_query_pairs(up, row, ok, C: tl.constexpr):
    """Return the query of packed query rows (0: none), the first pair of that query, and its number of pairs."""
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
    """Return the largest number of pairs of any query of these rows."""
    _, _, met = find_query_pairs(up, row, ok, C)
    return tl.max(met, axis=0).to(tl.int32)


@triton.jit
def load_packed_argmax(up, of, row, n, ok):
    """Return the argmax of packed query rows in the n-th pair of their query, as rows of D.

    Also returns whether there is an argmax, and the gradient of the score. `of` is the result of `find_query_pairs`. No
    loaded value decides whether another value is loaded, so the loads are in flight together.
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
    # The comparison with the length is a safeguard: no forward writes an argmax outside its document.
    won = ok & (token >= 0) & (token < length)
    # Row 0 is not read. Without this select Triton 3.6 does not compile the select of the gradient.
    return tl.where(won, begin + token, 0), won, tl.where(won, g, 0.0)
