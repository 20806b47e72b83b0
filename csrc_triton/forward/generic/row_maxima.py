"""The document loop of the generic forward: maxima of query rows over the tokens of one document.

```text
row_max[s] = max_t <Q[s, :], D[t, :]> over the kept tokens t

q = load_query_rows()                                 # [BM, BD]
best, where = -inf, NO_TOKEN                          # one value for each lane: [BM, LANES] or [BN, BM]
mask = prefetch_tile_mask(0)
for t0 in range(0, length, BN):
    ahead = prefetch_tile_mask(t0 + BN)
    S = dot(q, D[t0 : t0 + BN].T)                     # compute_tile: [BM, BN], or [BN, BM] with TOKENS_FIRST
    S = S * inverse_norm(document tokens)             # compute_tile, NORMALIZE
    S = where(mask, S, -inf)                          # compute_tile
    m, tokens = lane_max(S)                           # _update_maxima, this line and the next two
    where = tokens where m > best                     # with argmax
    best = nan_max(best, m)
    mask = ahead
row_best, row_where = merge_lanes(best, where)        # with 4 lanes, the only exchange between threads
row_where = second pass for NaN or -inf maxima        # _search_argmax
row_best = row_best * inverse_norm(q)                 # normalize_maxima, NORMALIZE
```

Layouts, splits, and formats differ only in the `Document` and in `compute_tile`, which loads the tokens. With C.SOFT,
soft maxima replace the maxima.

Invariants:

- Features are added in ascending order and maxima are exact. A maximum has the same bits for every `BM`, `BN`, lane
  layout, and TOKENS_FIRST.
- A masked similarity is replaced by -inf with a select. A masked token may hold NaN.
- The argmax is the lowest token that attains the maximum, or the first NaN.

With TOKENS_FIRST the document tokens are the left operand. A WGMMA tile has at least 64 rows on the left side and any
number on the right side, so this order suits few query rows.
"""

import triton
import triton.language as tl

from ...common.fp32 import add_fallback_maxima, load_terms, split_rows
from ...common.maxima import (
    expand_rows,
    expand_tokens,
    fill_lanes,
    find_first_token,
    init_lane_state,
    merge_lane_maxima,
    merge_lanes,
    reduce_lane_argmax,
    reduce_lane_maxima,
)
from ...common.primitives import (
    NO_TOKEN,
    compute_inverse_norm,
    import_args_class,
    nan_max,
    sum_row_squares_in_order,
)
from ...common.similarities import (
    add_product,
    compute_tile,
    init_similarities,
    is_kept,
    load_document_tile,
    load_query_tile,
    load_tile_mask,
    locate_tile_tokens,
    prefetch_tile_mask,
    sum_tile_squares,
)
from ...formats.encoded import dequantize_similarities, needs_power_scaling, scale_single_term
from ...soft.maximum import merge_soft_maxima, update_soft_maxima

_MASK_STEP_TOKENS = tl.constexpr(512)  # mask bytes of a load in `_trim_padding`


@triton.jit
def _search_argmax(best, where, q, x, rows, document, C: tl.constexpr):
    """Find the argmax of rows that have none although a token is kept: their maximum is NaN or -inf."""
    # Few rows need this pass. Values hoisted out of the loop would save little time and spill registers.
    for t0 in tl.range(0, document.length, C.BN, num_stages=1, disable_licm=C.SINGLE_STEP):
        S, t, keep, _, _ = compute_tile(q, x, rows, document, t0, prefetch_tile_mask(x, document, t0, C), C)
        hit = (S == expand_rows(best, C)) | (S != S)
        first = find_first_token(hit & expand_tokens(keep, C), expand_tokens(t, C), C)
        where = tl.where(where == NO_TOKEN, first, where)
    return where


@triton.jit
def load_query_rows(x, rows, C: tl.constexpr):
    """Load query rows as operands of the product, with scales and flags.

    Returns:
        The rows, their scales, whether each row is exact, and whether its maximum is used without the scale. The last
        three matter only with C.FP32_TERMS or C.INT8_TERMS.
    """
    is_exact = rows.ok
    is_unscaled = rows.ok
    scale = tl.full((C.BM,), 1, tl.float32)
    if x.terms is not None:
        q, scale = load_terms(x.terms, rows.number, rows.ok, C.BD)
        if C.INT8_TERMS == 1:
            scale = scale_single_term(scale)
        is_exact = scale > 0
        is_unscaled = scale <= 0
    else:
        q = load_query_tile(x, rows, tl.arange(0, C.BD), C)
        if C.FP32_TERMS > 0:
            q, scale, is_exact, is_unscaled = split_rows(q, C.FP32_TERMS)
    return q, scale, is_exact, is_unscaled


@triton.jit
def _update_maxima(best, where, S, t, keep, t0, rows, ARGMAX: tl.constexpr, C: tl.constexpr):
    """Update the lane maxima, and their tokens or exponential sums, with a tile that begins at token `t0`."""
    if C.SOFT:
        best, where = update_soft_maxima(best, where, S, rows.rate, C)
    elif ARGMAX:
        m, tokens = reduce_lane_argmax(S, t, keep, t0, C)
        where = tl.where(m > best, tokens, where)
        best = nan_max(best, m)
    else:
        best = nan_max(best, reduce_lane_maxima(S, C))
    return best, where


@triton.jit
def _compute_maxima_in_steps(best, where, kept_tokens, x, rows, document, ARGMAX: tl.constexpr, C: tl.constexpr):
    """Compute the lane maxima over a document whose features need several steps, and which tokens are kept.

    A single loop covers the steps of all tiles, so the load of the next tile overlaps the last steps of the current
    tile. This loop is for WGMMA. Triton 3.7 cannot place the accumulators of sm_100 in such a loop.
    """
    steps = tl.cdiv(x.d, C.BD)
    S = init_similarities(C)
    squares = tl.full((C.BN,), 0, tl.float32)
    for n in range(0, tl.cdiv(document.length, C.BN) * steps):
        c0 = n % steps * C.BD
        t0 = n // steps * C.BN
        columns = c0 + tl.arange(0, C.BD)
        t0, t = locate_tile_tokens(x, document, t0, C)
        q = load_query_tile(x, rows, columns, C)
        tile = load_document_tile(x, document, document.row + t0, t, c0, C)
        S = add_product(tl.where(c0 == 0, 0.0, S), q, tile, C)
        if C.NORMALIZE and C.ENCODING == "":
            squares = tl.where(c0 == 0, 0.0, squares) + sum_tile_squares(x, document, tile, t, c0, C)
        if c0 + C.BD >= x.d:
            similarity = S
            if C.ENCODING != "":
                similarity = dequantize_similarities(similarity, rows, x.counts, document, t, C)
            elif C.NORMALIZE:
                similarity = similarity * expand_tokens(compute_inverse_norm(squares), C)
            keep = is_kept(x, document, t0, t, load_tile_mask(x, document, n // steps * C.BN, C), C)
            if x.D.mask is not None or C.SOFT or (C.SHORT_DOCUMENTS and x.tiles is not None):
                similarity = tl.where(expand_tokens(keep, C), similarity, float("-inf"))
            if x.D.mask is not None:
                kept_tokens = kept_tokens | keep.to(tl.int32)
            best, where = _update_maxima(best, where, similarity, t, keep, t0, rows, ARGMAX, C)
    return best, where, kept_tokens


@triton.jit
def has_kept_token(x, document, kept_tokens):
    """Return whether a document keeps a token. `kept_tokens` flags the tokens that its mask keeps."""
    if x.D.mask is not None:
        has_token = tl.max(kept_tokens, axis=0)
    else:
        has_token = (document.length > 0).to(tl.int32)
    return has_token


@triton.jit
def compute_query_inverse_norms(x, rows, C: tl.constexpr):
    """Compute the inverse norms of query rows."""
    return compute_inverse_norm(sum_row_squares_in_order(rows.ptr, rows.ok, x.d, x.Q.stride_d, C.BD, C.WIDE_OFFSETS))


@triton.jit
def normalize_maxima(best, x, rows, C: tl.constexpr):
    """Multiply maxima by the inverse norms of their query rows, if C.NORMALIZE and not C.SOFT."""
    if C.NORMALIZE and not C.SOFT:
        best = best * compute_query_inverse_norms(x, rows, C)
    return best


@triton.jit
def _trim_padding(x, document, C: tl.constexpr):
    """Shorten a document to the end of the tile that holds its last kept token.

    The tokens after that tile are neither read nor multiplied.
    """
    Document: tl.constexpr = import_args_class("Document")
    length = document.length
    # Other configurations would spill registers.
    if x.D.mask is not None and C.TOKENS_FIRST and not C.SPLIT_DOCUMENTS:
        end = length * 0
        t0 = (tl.cdiv(length, _MASK_STEP_TOKENS) - 1) * _MASK_STEP_TOKENS
        # Search backward from the end, which usually needs one step.
        while (t0 >= 0) & (end == 0):
            t = t0 + tl.arange(0, _MASK_STEP_TOKENS)
            pointers = (document.mask + t.to(tl.int64) * x.D.mask_stride_l).to(tl.pointer_type(tl.int8), bitcast=True)
            keep = tl.load(pointers, mask=t < length, other=0) != 0
            end = tl.max(tl.where(keep, t + 1, 0), axis=0).to(end.dtype)
            t0 -= _MASK_STEP_TOKENS
        # Keep at least one tile, because a descriptor shifts the last tile back to start at `length - BN`.
        length = tl.minimum(length, tl.cdiv(tl.maximum(end, 1), C.BN) * C.BN)
    return Document(document.ptr, document.mask, document.row, length)


@triton.jit
def compute_row_maxima(query, x, rows, document, ARGMAX: tl.constexpr, C: tl.constexpr):
    """Compute the maximum of each row over the kept tokens of a document.

    Args:
        query: The result of `load_query_rows`.
        x: `Operands` of the kernel.
        rows: `QueryRows` of the tile.
        document: The `Document` to score.
        ARGMAX: Whether to find the argmax.
        C: Compile-time choices, a `KernelConfig`.

    Returns:
        The maxima, before `normalize_maxima`. The first token that attains each maximum, or NO_TOKEN. Whether any token
        is kept. With C.SOFT, soft maxima and NO_TOKEN.
    """
    q, scale, is_exact, is_unscaled = query
    document = _trim_padding(x, document, C)
    best = fill_lanes(float("-inf"), tl.float32, C)
    where = init_lane_state(C)
    kept_tokens = tl.full((C.BN,), 0, tl.int32)
    fallback_tokens = tl.full((C.BN,), 0, tl.int32)
    if C.SINGLE_STEP or C.LANES == 1:
        mask = prefetch_tile_mask(x, document, 0, C)
        for t0 in range(0, document.length, C.BN):
            next_mask = prefetch_tile_mask(x, document, t0 + C.BN, C)
            S, t, keep, first, is_fallback = compute_tile(q, x, rows, document, t0, mask, C)
            mask = next_mask
            if x.D.mask is not None:
                kept_tokens = kept_tokens | keep.to(tl.int32)
            if C.FP32_TERMS > 0:
                fallback_tokens = fallback_tokens | is_fallback.to(tl.int32)
            best, where = _update_maxima(best, where, S, t, keep, first, rows, ARGMAX, C)
    else:
        best, where, kept_tokens = _compute_maxima_in_steps(best, where, kept_tokens, x, rows, document, ARGMAX, C)
    any_kept = has_kept_token(x, document, kept_tokens)
    row_where = tl.full((C.BM,), NO_TOKEN, tl.int32)
    if C.SOFT:
        row_best = merge_soft_maxima(best, where, x, rows, C)
    elif ARGMAX:
        row_best, row_where = merge_lanes(best, where, document.length, C)
    else:
        row_best = merge_lane_maxima(best, C)
    if C.FP32_TERMS > 0:
        row_best = tl.where(is_unscaled, row_best, row_best * scale)
        if (tl.max(fallback_tokens, axis=0) > 0) | (tl.max((rows.ok & (is_exact == 0)).to(tl.int32), axis=0) > 0):
            row_best, row_where = add_fallback_maxima(row_best, row_where, is_exact, x, rows, document, C)
    elif ARGMAX and not C.SOFT:
        needs_search = rows.ok & (row_where == NO_TOKEN)
        if (tl.max(needs_search.to(tl.int32), axis=0) > 0) & (any_kept > 0):
            row_where = _search_argmax(row_best, row_where, q, x, rows, document, C)
    if needs_power_scaling(x.Q.ptr.dtype.element_ty, C.ENCODING):
        row_best = row_best * rows.scale
    if C.INT8_TERMS > 0:
        row_best = row_best * scale
        if tl.max((rows.ok & (is_exact == 0)).to(tl.int32), axis=0) > 0:
            row_best, row_where = add_fallback_maxima(row_best, row_where, is_exact, x, rows, document, C)
    return row_best, row_where, any_kept
