"""Kernels around the row maxima kernels: document masks before, and sums of row maxima after.

`forward/sm90/packed` and the split launch of `kernel` store row maxima `[K, rows]` or `[splits, rows]` in fp32.
`maxsim_row_sums` turns them into scores:

```text
score[i, k] = sum_s q_weight[i, s] * row_max[k, i, s]

program = (DOCUMENTS documents, QUERIES queries)
for s0 in range(0, longest query, ROWS_PER_QUERY):    # blocks of rows
    row_max = maxima[k, rows of the block]            # or: merge_splits(k, rows) * inverse_norm(q)
    sums = tree_sum(where(q_mask, q_weight * row_max, 0))
    total, pending = carry_block_sums(total, pending, sums)
score = flush_block_sums(total, pending)              # a query of one block skips the carry
if document k keeps no token: score = -inf, or 0 if the query keeps no token either
if the query or the document is outside its tensor: score = NaN
```

Invariants:

- The sum over a query is the binary tree of the kernel that sums rows itself, so the bits are equal.
- With splits, `maxsim_row_sums` may start early with PDL. It waits for the first launch and then reads row maxima.
- `maxsim_patches` or `maxsim_kept_tokens` processes a document mask before the main loop, which then needs no mask.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ...common.arguments import SizeArgs
from ...common.primitives import (
    NO_TOKEN,
    choose_empty_score,
    load_query_mask,
    load_query_weight,
    sum_in_order,
    sum_in_order_across_warps,
    to_int64,
    to_mask,
)
from ...common.segments import locate_document_segment, locate_query_segment
from .kernel import carry_block_sums, flush_block_sums
from .splits import has_kept_split, locate_document_splits, merge_splits

_SPLITS_PER_STEP = tl.constexpr(4096)  # row maxima of a load: splits times rows


@triton.jit
def _load_token_mask(mask, k, t, end, stride_k, stride_l):
    """Return whether tokens `t < end` of document k are kept."""
    return tl.load(mask + k * stride_k + t.to(tl.int64) * stride_l, mask=t < end, other=0) != 0


@triton.jit(do_not_specialize=["Ld", "stride_k", "stride_l", "tiles"])
def maxsim_patches(mask, bits, sources, lengths, Ld, stride_k, stride_l, tiles, TILES: tl.constexpr, BN: tl.constexpr):
    """Compute which tokens of a document the main loop must replace, one document for each program.

    Args:
        mask: Document mask, read with `stride_k` and `stride_l`.
        bits: Output int32 `[K, BN // 32, tiles]`. Bit b of word w says that token `32 w + b` of the tile is masked.
            Tiles begin at the first kept token. The last tile is shifted back to end with the last kept token.
        sources: Output int32 `[K]`, the first kept token, or 0 if no token is kept.
        lengths: Output int32 `[K]`, the number of tokens from the first to the last kept token.
        Ld: Tokens of a document.
        stride_k: Mask stride between documents.
        stride_l: Mask stride between tokens.
        tiles: Tiles of a document in `bits`.
        TILES: Tiles of a loop step.
        BN: Tokens of a tile.
    """
    k = tl.program_id(0).to(tl.int64)
    end = tl.full((), 0, tl.int32)
    source = Ld
    for t0 in range(0, Ld, TILES * BN):
        t = t0 + tl.arange(0, TILES * BN)
        keep = _load_token_mask(mask, k, t, Ld, stride_k, stride_l)
        end = tl.maximum(end, tl.max(tl.where(keep, t + 1, 0), axis=0))
        source = tl.minimum(source, tl.min(tl.where(keep, t, Ld), axis=0))
    source = tl.minimum(source, end)
    length = end - source
    tl.store(lengths + k, length)
    tl.store(sources + k, source)
    column = tl.arange(0, BN)[None, :]
    for n0 in range(0, tiles, TILES):
        n = n0 + tl.arange(0, TILES)
        start = source + tl.minimum(n * BN, tl.maximum(length - BN, 0))
        keep = _load_token_mask(mask, k, start[:, None] + column, end, stride_k, stride_l)
        masked_bits = tl.reshape(tl.where(keep, 0, 1), (TILES, BN // 32, 32)) << tl.arange(0, 32)[None, None, :]
        word = n[:, None] + (k * (BN // 32) + tl.arange(0, BN // 32)[None, :]) * tiles
        tl.store(bits + word, tl.sum(masked_bits, axis=2), mask=n[:, None] < tiles)


@triton.jit(do_not_specialize=["Ld", "stride_k", "stride_l"])
def maxsim_kept_tokens(
    mask, D, tokens, original_tokens, lengths, Ld, stride_k, stride_l, d, TOKENS: tl.constexpr, BD: tl.constexpr
):
    """Copy the kept tokens of each document to `tokens` without gaps, TOKENS tokens for each program.

    Args:
        mask: Document mask, read with `stride_k` and `stride_l`.
        D: Contiguous documents `[K, Ld, d]`.
        tokens: Output `[K, Ld, d]`. Only the first `lengths[k]` tokens of a document are written.
        original_tokens: Output `[K, Ld]`, the original token of each copied token, or None.
        lengths: Output `[K]`, the number of kept tokens.
        Ld: Tokens of a document.
        stride_k: Mask stride between documents.
        stride_l: Mask stride between tokens.
        d: Number of features.
        TOKENS: Tokens of a program.
        BD: Power of two that covers d.
    """
    blocks = tl.cdiv(Ld, TOKENS)
    k = (tl.program_id(0) // blocks).to(tl.int64)
    t0 = tl.program_id(0) % blocks * TOKENS
    earlier_tokens = tl.full((), 0, tl.int32)
    for b0 in range(0, t0, 16 * TOKENS):
        t = b0 + tl.arange(0, 16 * TOKENS)
        is_earlier_kept = _load_token_mask(mask, k, t, t0, stride_k, stride_l)
        earlier_tokens += tl.sum(is_earlier_kept.to(tl.int32), axis=0)
    t = t0 + tl.arange(0, TOKENS)
    keep = _load_token_mask(mask, k, t, Ld, stride_k, stride_l)
    counts = keep.to(tl.int32)
    position = earlier_tokens + tl.cumsum(counts, axis=0) - counts
    columns = tl.arange(0, BD)
    ok = (columns < d)[None, :]
    # Load all tokens, so that the loads need not wait for the mask.
    x = tl.load(D + (k * Ld + t)[:, None] * d + columns[None, :], mask=ok & (t < Ld)[:, None], other=0.0)
    tl.store(tokens + (k * Ld + position)[:, None] * d + columns[None, :], x, mask=ok & keep[:, None])
    if original_tokens is not None:
        tl.store(original_tokens + k * Ld + position, t, mask=keep)
    if t0 + TOKENS >= Ld:
        tl.store(lengths + k, earlier_tokens + tl.sum(counts, axis=0))


@triton.jit(do_not_specialize=["Ld", "rows"])
def maxsim_argmax_in_place(argmax, original_tokens, Ld, rows, BLOCK: tl.constexpr):
    """Replace argmax values `[K, rows]` among kept tokens by the original tokens. -1 stays -1."""
    blocks = tl.cdiv(rows, BLOCK)
    k = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    kept_token = tl.load(argmax + k * rows + row, mask=row < rows, other=-1).to(tl.int32)
    token = tl.load(original_tokens + k * Ld + kept_token, mask=kept_token >= 0, other=-1)
    tl.store(argmax + k * rows + row, token.to(argmax.dtype.element_ty), mask=row < rows)


@triton.jit(do_not_specialize=["Tq", "mask_stride"])
def maxsim_covered_rows(cu_seqlens_q, mask, covered, Tq, mask_stride, BLOCK: tl.constexpr):
    """Set the elements of `covered` `[Tq]` whose rows belong to a query and are not masked.

    Each program handles one query. The caller fills `covered` with zeros.
    """
    begin = tl.load(cu_seqlens_q + tl.program_id(0)).to(tl.int64)
    end = tl.load(cu_seqlens_q + tl.program_id(0) + 1).to(tl.int64)
    end = tl.where((begin >= 0) & (end <= Tq), end, begin)
    for r0 in range(begin, end, BLOCK):
        row = r0 + tl.arange(0, BLOCK)
        keep = row < end
        if mask is not None:
            keep = keep & (tl.load(mask + row * mask_stride, mask=keep, other=0) != 0)
        tl.store(covered + row, keep, mask=row < end)


@triton.jit
def _merge_split_maxima(cut, document_splits, row, is_row, keep, rows, C: tl.constexpr):
    """Compute the maxima of query rows over the splits of a document, and store the argmax if needed."""
    AT_ONCE: tl.constexpr = _SPLITS_PER_STEP // row.shape[0]
    k, first, count = document_splits
    best, where = merge_splits(cut, first, count, row, keep, rows, AT_ONCE)
    if cut.argmax is not None:
        where = tl.where(keep & (where != NO_TOKEN), where, -1)
        tl.store(cut.argmax + k.to(tl.int64) * rows + row, where.to(cut.argmax.dtype.element_ty), mask=is_row)
    if C.NORMALIZE:
        best = best * tl.load(cut.norms + row, mask=keep, other=0.0)
    return best[None, :]


@triton.jit
def _sum_block(
    maxima, cut, document_splits, Q, begin, length, s0, k, sizes, ROWS_PER_QUERY: tl.constexpr, QUERIES: tl.constexpr,
    DOCUMENTS: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Sum ROWS_PER_QUERY rows of each query from row `s0` on.

    Returns the sums `[DOCUMENTS * QUERIES]` and whether each query keeps a row of the block.
    """
    s = s0 + tl.arange(0, QUERIES * ROWS_PER_QUERY) % ROWS_PER_QUERY
    row = begin + s
    i = row // sizes.Lq
    rows = sizes.Nq * sizes.Lq
    keep = load_query_mask(Q, i, row % sizes.Lq, s < length)
    weight = load_query_weight(Q, i, row % sizes.Lq, keep)
    if C is None:
        offsets = k.to(tl.int64)[:, None] * rows + row[None, :]
        best = tl.load(maxima + offsets, mask=(k < sizes.K)[:, None] & keep[None, :], other=0.0)
    else:
        best = _merge_split_maxima(cut, document_splits, row, s < length, keep, rows, C)
    terms = tl.reshape(tl.where(keep[None, :], weight[None, :] * best, 0.0), (DOCUMENTS * QUERIES * ROWS_PER_QUERY,))
    if C is None:
        sums = sum_in_order(terms, DOCUMENTS * QUERIES, ROWS_PER_QUERY)
    else:
        # Several warps may share a query here.
        sums = sum_in_order_across_warps(terms, DOCUMENTS * QUERIES, ROWS_PER_QUERY)
    return sums, tl.max(tl.reshape(keep.to(tl.int32), (QUERIES, ROWS_PER_QUERY)), axis=1)


@triton.jit(do_not_specialize=["queries", "stride", "Nq", "K", "Lq", "Td"])
def maxsim_row_sums(
    maxima, cut, scores, Q, segments, queries, stride, Nq, K, Lq, Td, ROWS_PER_QUERY: tl.constexpr,
    QUERIES: tl.constexpr, DOCUMENTS: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Compute scores from row maxima: weighted sums over the rows of each query.

    Args:
        maxima: Row maxima `[K, Nq * Lq]`, ignored if C is not None.
        cut: `SplitArgs` that the split forward with configuration C filled.
        scores: Output `[queries, stride]`.
        Q: `QueryArgs` for masks and weights.
        segments: `SegmentArgs`.
        queries: Number of queries.
        stride: Row stride of `scores`.
        Nq: Queries of the row layout. Row r is token `r % Lq` of query `r // Lq` of Q.
        K: Number of documents.
        Lq: Tokens of a query in the row layout.
        Td: Number of packed document tokens.
        ROWS_PER_QUERY: Rows of a query that are summed at a time.
        QUERIES: Queries of a program.
        DOCUMENTS: Documents of a program, 1 with splits.
        LEVELS: Rows are summed as trees of `ROWS_PER_QUERY * 2^LEVELS` rows.
        C: `KernelConfig` of the split forward, or None without splits.
    """
    sizes = SizeArgs(Nq, K, Lq, 0)
    query_tiles = tl.cdiv(queries, QUERIES)
    first = (tl.program_id(0) % query_tiles) * QUERIES
    k = (tl.program_id(0) // query_tiles) * DOCUMENTS + tl.arange(0, DOCUMENTS)
    document_splits = None
    if C is not None:
        document_splits = locate_document_splits(segments, tl.program_id(0) // query_tiles, K, Td, cut, C.BN)
        if C.PDL:
            gdc_wait()
    i = first + tl.arange(0, QUERIES * ROWS_PER_QUERY) // ROWS_PER_QUERY
    begin, length, _ = locate_query_segment(segments, i, i < queries, Nq * Lq)
    total, has_rows = _sum_block(
        maxima, cut, document_splits, Q, begin, length, 0, k, sizes, ROWS_PER_QUERY, QUERIES, DOCUMENTS, C
    )
    longest = tl.max(length, axis=0)
    if longest > ROWS_PER_QUERY:
        pending = tl.full((DOCUMENTS * QUERIES, 4 if LEVELS <= 4 else 8), 0, tl.float32)
        total, pending = carry_block_sums(tl.zeros_like(total), pending, total, 0, LEVELS)
        for s0 in range(ROWS_PER_QUERY, longest, ROWS_PER_QUERY):
            sums, has_block_rows = _sum_block(
                maxima, cut, document_splits, Q, begin, length, s0, k, sizes, ROWS_PER_QUERY, QUERIES, DOCUMENTS, C
            )
            total, pending = carry_block_sums(total, pending, sums, s0 // ROWS_PER_QUERY, LEVELS)
            has_rows = has_rows | has_block_rows
        total = flush_block_sums(total, pending, tl.cdiv(longest, ROWS_PER_QUERY), LEVELS)

    i = first + tl.arange(0, QUERIES)
    _, _, fits = locate_query_segment(segments, i, i < queries, Nq * Lq)
    _, tokens, valid = locate_document_segment(segments, k, k < K, Td)
    any_kept = (tokens > 0)[:, None]
    if C is not None:
        any_kept = any_kept & (has_kept_split(cut, document_splits) > 0)
    score = tl.where(any_kept, tl.reshape(total, (DOCUMENTS, QUERIES)), choose_empty_score(has_rows)[None, :])
    score = tl.where(valid[:, None] & fits[None, :], score, float("nan"))
    offsets = i.to(tl.int64)[None, :] * stride + k[:, None]
    tl.store(scores + offsets, score, mask=(i < queries)[None, :] & (k < K)[:, None])


@triton.jit
def _sum_part_tree(at, p, parts, k, K, TREE: tl.constexpr):
    """Return the tree sum of parts `p` to `p + TREE - 1` of each document. Missing parts are zeros."""
    if TREE == 1:
        sums = tl.load(at + to_int64(p) * K, mask=(k < K) & to_mask(p < parts), other=0.0)
    else:
        HALF: tl.constexpr = TREE // 2
        left = _sum_part_tree(at, p, parts, k, K, HALF)
        sums = left + _sum_part_tree(at, p + HALF, parts, k, K, HALF)
    return sums


@triton.jit(do_not_specialize=["stride", "K", "parts"])
def maxsim_sum_parts(partial, scores, stride, K, parts, TREE: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the parts of long queries: scores `[Nq, stride]` from partial sums `[Nq * parts, K]`.

    A program handles BLOCK documents of one query. TREE neighboring parts are added as a tree, and the trees are added
    in order. This is the order of kernels that sum more rows of a query at once.
    """
    blocks = tl.cdiv(K, BLOCK)
    i = (tl.program_id(0) // blocks).to(tl.int64)
    k = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    pointers = partial + i * parts * K + k
    total = tl.zeros((BLOCK,), tl.float32)
    for p in range(0, parts, TREE):
        sums = _sum_part_tree(pointers, p, parts, k, K, TREE)
        total = tl.where(p == 0, sums, total + sums)
    tl.store(scores + i * stride + k, total, mask=k < K)
