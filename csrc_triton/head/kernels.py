"""Head kernels: document tokens computed from hidden states by a linear layer, and their scores or gradients.

```text
u = H W^T + b,    token = round(u / max(||u||, eps))    # without NORMALIZE: round(u)
```

Documents follow each other as rows of hidden states. A tile of BN rows has tokens of one document or of several.

- `maxsim_head_tokens` stores the tokens. A program computes BD features of a tile. If that is not all of them and
  tokens are normalized, it stores u in fp32 and the sums of squares of each part, and `maxsim_scale_tokens` divides u.
- `maxsim_split_weights` stores the TF32 terms of fp32 weights.
- `maxsim_forward_head` scores the tokens from registers, for at most `ROW_TILES * BM` query rows.
- `maxsim_head_slopes` computes the gradient of u from the gradient of normalized tokens.

Main loop of `maxsim_forward_head`, program = consecutive documents:

```text
best = -inf                                          # [ROW_TILES, BM], of the current document
for row in range(begin, end, BN):
    u = bias                                         # [BN, BD], fp32
    for c0 in range(0, width, BK):
        u += H[row : row + BN, c0 : c0 + BK] @ W[:, c0 : c0 + BK].T
    tokens = round(u * inverse_norm(u))
    for p in range(ROW_TILES):
        S = tokens @ Q[rows of p].T                  # [BN, BM]
        for k in documents of the tile:
            best[p] = max(best[p], max of S over kept tokens of document k)
            if document k ends in this tile:
                scores[:, k] = tree_sum(q_weight * best[p]); best[p] = -inf
```

With FUSED_LOOP the two outer loops are one, so the loads of the next tile overlap the scoring of the current tile.

Invariants:

- Both kernels compute tokens with the same bits. Similarities have the bits of `maxsim_forward` for these tokens.
- A program scores whole documents, so no scores are merged between programs.
- Registers hold the similarities to one row tile at a time. ROW_TILES is therefore a loop.

**fp32.** Hidden states and weights are sums of two TF32 terms, ``x = hi + lo``, or one term if PyTorch allows TF32.
``u = sum(hi hi') + sum(hi lo' + lo hi')``, with an error of at most 2^-21 of ``sum |h w|``, apart from the rounding of
the sums. A separate launch splits the weights, whose terms TMA then copies to the tensor cores without registers.
"""

import triton
import triton.language as tl

from ..common.arguments import HeadOperands
from ..common.fp32 import split_to_tf32
from ..common.primitives import (
    NORM_EPS,
    compiler_barrier_dtype,
    load_query_mask,
    load_query_weight,
    load_rows,
    locate_numbered_tokens,
    locate_rows,
    nan_max,
    square,
    sum_in_order,
    to_int64,
)
from ..forward.generic.kernel import has_kept_row, store_scores


@triton.jit
def _load_weights(x, term: tl.constexpr, n0, c0, C: tl.constexpr):
    """Load the weights of a step, or a TF32 term of them, `[BD, BK]`."""
    if x.steps is not None:
        w = tl.reshape(x.steps.load([term, n0, c0]), (C.BD, C.BK))
    else:
        n = n0 + tl.arange(0, C.BD)
        pointers = x.W.ptr + (n + term * x.d).to(tl.int64) * x.W.stride_n
        w = load_rows(pointers, n < x.d, c0 + tl.arange(0, C.BK), x.width, x.W.stride_d, C.WIDE_OFFSETS)
    return w


@triton.jit
def _accumulate_step(sums, x, first, row, pointers, ok, n0, c0, C: tl.constexpr):
    """Add the product of hidden features from `c0` on to the token features `sums` from `n0` on.

    The hidden rows begin at row `row` of documents from `first` on.
    """
    u, low = sums
    if x.tiles is not None:
        h = tl.reshape(x.tiles.load([first, row, c0]), (C.BN, C.BK))
    else:
        h = load_rows(pointers, ok, c0 + tl.arange(0, C.BK), x.width, x.H.stride_d, C.WIDE_OFFSETS)
    w = tl.trans(_load_weights(x, 0, n0, c0, C))
    if C.TF32_TERMS == 0:
        u = tl.dot(h, w, u, input_precision="ieee")
    else:
        h, h_low = split_to_tf32(h)
        if C.TF32_TERMS == 2:
            low = tl.dot(h, tl.trans(_load_weights(x, 1, n0, c0, C)), low, input_precision="tf32")
            low = tl.dot(h_low, w, low, input_precision="tf32")
        u = tl.dot(h, w, u, input_precision="tf32")
    return u, low


@triton.jit
def _load_bias(x, n0, C: tl.constexpr):
    """Return the initial sums of the features from `n0` on of a tile: the bias or zeros.

    A bias that is added after the loop would need registers in addition to the sums. With two TF32 terms, products with
    a term lo are summed on their own, and zero otherwise.
    """
    u = tl.full((C.BN, C.BD), 0, tl.float32)
    if x.W.bias is not None:
        n = n0 + tl.arange(0, C.BD)
        u += tl.load(x.W.bias + n, mask=n < x.d, other=0.0).to(tl.float32)[None, :]
    return u, tl.full((C.BN, C.BD if C.TF32_TERMS == 2 else 1), 0, tl.float32)


@triton.jit
def _add_low_products(sums, C: tl.constexpr):
    """Return the sums of all products."""
    u, low = sums
    if C.TF32_TERMS == 2:
        u += tl.where(tl.abs(low) < float("inf"), low, 0.0)  # an infinite feature times a term of 0 is NaN
    return u


@triton.jit
def _compute_norms(squares):
    """Return the norms of tokens from the sums of their squares."""
    return tl.maximum(tl.sqrt(squares), NORM_EPS)


@triton.jit
def _finish_tokens(u, C: tl.constexpr):
    """Return fp32 tokens from sums of products, and their norms with C.NORMALIZE, else 1."""
    norm = tl.full((C.BN,), 1, tl.float32)
    if C.NORMALIZE:
        norm = _compute_norms(tl.sum(square(u), axis=1))
        u = u * (1.0 / norm)[:, None]
    return u, norm


@triton.jit
def _compiler_barrier_sums(sums, C: tl.constexpr):
    """Return `sums`, complete before the loop continues.

    If the sums stay in flight from step to step and a branch reads them, ptxas waits for each of their products.
    """
    if C.WAIT_EACH_STEP:
        u = tl.inline_asm_elementwise("", "=f,0", [sums[0]], dtype=tl.float32, is_pure=False, pack=1)
        sums = u, sums[1]
    return sums


@triton.jit(do_not_specialize=["width", "d", "rows", "Ld"])
def maxsim_head_tokens(H, W, tiles, steps, out, norms, squares, width, d, rows, Ld, C: tl.constexpr):
    """Store BD features of BN document tokens, and their norms or the sums of the squares of these features.

    The grid has one program for each part of BD features of a tile of BN tokens. The parts of a tile are neighbors,
    which read its hidden states from the L2 cache.

    Args:
        H: `DocumentArgs` of hidden states.
        W: `LinearArgs`, with TF32 terms of the weights if they are fp32.
        tiles: Tensor descriptor of hidden states, see `HeadOperands`, or None.
        steps: Tensor descriptor of W, see `HeadOperands`, or None.
        out: Output `[rows, d]`.
        norms: Output fp32 `[rows]`, or None. A program has all features.
        squares: Output fp32 `[parts, rows]`, or None.
        width: Hidden features.
        d: Features of a token.
        rows: Number of tokens.
        Ld: Tokens of a document.
        C: Compile-time choices, a `HeadConfig`.
    """
    x = HeadOperands(H, W, tiles, steps, width, d)
    parts = tl.cdiv(d, C.BD)
    row = tl.program_id(0) // parts * C.BN
    part = tl.program_id(0) % parts
    n0 = part * C.BD
    r = row + tl.arange(0, C.BN)
    ok = r < rows
    pointers = locate_numbered_tokens(H, r, Ld)
    sums = _load_bias(x, n0, C)
    for c0 in range(0, width, C.BK):
        sums = _accumulate_step(sums, x, 0, row, pointers, ok, n0, c0, C)
        # Wait as in the fused loop. Products of narrower tiles of half precision stay in flight, unless their squares
        # are stored too.
        if C.BD > 128 or C.TF32_TERMS > 0 or squares is not None:
            sums = _compiler_barrier_sums(sums, C)
    u = _add_low_products(sums, C)
    if squares is not None:
        tl.store(squares + part.to(tl.int64) * rows + r, tl.sum(square(u), axis=1), mask=ok)
    tokens, norm = _finish_tokens(u, C)
    d = d // C.D_DIVISOR * C.D_DIVISOR  # now a known multiple: stores are vectorized
    n = n0 + tl.arange(0, C.BD)
    mask = ok[:, None]
    if C.D_DIVISOR < C.BD:
        mask = mask & (n < d)[None, :]
    offsets = row.to(tl.int64) * d + (tl.arange(0, C.BN)[:, None] * d + n[None, :])
    tl.store(out + offsets, tokens.to(out.dtype.element_ty), mask=mask)
    if norms is not None:
        tl.store(norms + r, norm, mask=ok)


@triton.jit(do_not_specialize=["rows", "parts"])
def maxsim_scale_tokens(sums, out, norms, squares, rows, d, parts, BN: tl.constexpr, BD: tl.constexpr):
    """Divide BN tokens by their norms.

    Args:
        sums: fp32 tokens `[rows, d]`.
        out: Output `[rows, d]`, which may be `sums`.
        norms: Output fp32 `[rows]`.
        squares: Sums of squares of parts of the features, fp32 `[parts, rows]`.
        rows: Number of tokens.
        d: Features of a token.
        parts: Number of parts.
        BN: Tokens of a program.
        BD: Features of a step.
    """
    r = tl.program_id(0) * BN + tl.arange(0, BN)
    ok = r < rows
    total = tl.full((BN,), 0, tl.float32)
    for part in range(0, parts):
        total += tl.load(squares + to_int64(part) * rows + r, mask=ok, other=0.0)
    norm = _compute_norms(total)
    tl.store(norms + r, norm, mask=ok)
    inverse = 1.0 / norm
    for n0 in range(0, d, BD):
        n = n0 + tl.arange(0, BD)
        offsets = r.to(tl.int64)[:, None] * d + n[None, :]
        mask = ok[:, None] & (n < d)[None, :]
        u = tl.load(sums + offsets, mask=mask, other=0.0) * inverse[:, None]
        tl.store(out + offsets, u.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["width", "count"])
def maxsim_split_weights(W, out, width, count, BLOCK: tl.constexpr, TERMS: tl.constexpr):
    """Store the TF32 terms of weights, BLOCK weights for each program.

    Args:
        W: `LinearArgs` of fp32 weights `[d, width]`.
        out: Output `[TERMS, d, width]`, hi first.
        width: Hidden features.
        count: Number of weights.
        BLOCK: Weights of a program.
        TERMS: 1 or 2.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = n < count
    hi, lo = split_to_tf32(tl.load(W.ptr + n // width * W.stride_n + n % width * W.stride_d, mask=ok, other=0.0))
    tl.store(out + n, hi, mask=ok)
    if TERMS == 2:
        tl.store(out + count + n, lo, mask=ok)


@triton.jit
def _load_row_mask(H, r, end, Ld):
    """Return which rows r < end are kept."""
    keep = r < end
    if H.mask is not None:
        offsets = (r // Ld).to(tl.int64) * H.mask_stride_doc + (r % Ld).to(tl.int64) * H.mask_stride_l
        keep = keep & (tl.load(H.mask + offsets, mask=keep, other=0) != 0)
    return keep


@triton.jit(do_not_specialize=["rows", "Ld"])
def maxsim_head_slopes(G, D, norms, sums, d, rows, Ld, BN: tl.constexpr, BD: tl.constexpr):
    """Replace token gradients by gradients of ``u = H W^T + b``: ``(G - D <D, G>) / norm``.

    Masked tokens get zeros. Programs process every n-th tile of BN rows.

    Args:
        G: `DocumentArgs` of token gradients `[rows, d]`, contiguous, overwritten.
        D: Tokens `[rows, d]`, contiguous.
        norms: Norms of u `[rows]`.
        sums: Output `[programs, d]`, the sum of each program's gradients before rounding, or None.
        d: Features of a token.
        rows: Number of tokens.
        Ld: Tokens of a document.
        BN: Rows of a tile.
        BD: Power of two that covers d.
    """
    n = tl.arange(0, BD)
    total = tl.zeros((BN, BD), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BN), tl.num_programs(0)):
        r = tile * BN + tl.arange(0, BN)
        offsets = r.to(tl.int64)[:, None] * d + n[None, :]
        mask = (r < rows)[:, None] & (n < d)[None, :]
        g = tl.load(G.ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        unit = tl.load(D + offsets, mask=mask, other=0.0).to(tl.float32)
        norm = tl.load(norms + r, mask=r < rows, other=1.0)
        projection = tl.where(norm <= NORM_EPS, 0.0, tl.sum(unit * g, axis=1))
        g = (g - unit * projection[:, None]) * (1.0 / norm)[:, None]
        if G.mask is not None:
            g = tl.where(_load_row_mask(G, r, rows, Ld)[:, None], g, 0.0)
        tl.store(G.ptr + offsets, g.to(G.ptr.dtype.element_ty), mask=mask)
        if sums is not None:
            total += g
    if sums is not None:
        tl.store(sums + tl.program_id(0) * d + n, tl.sum(total, axis=0), mask=n < d)


@triton.jit
def _locate_query_rows(Q, p, sizes, C: tl.constexpr):
    """Return queries and tokens of the query rows of row tile p, and which rows are kept."""
    row = p * C.BM + tl.arange(0, C.BM)
    i = row // C.ROWS_PER_QUERY
    s = row % C.ROWS_PER_QUERY
    return i, s, load_query_mask(Q, i, s, (i < sizes.Nq) & (s < sizes.Lq))


@triton.jit
def _store_scores(scores, best, any_kept, Q, p, k, sizes, C: tl.constexpr):
    """Store the scores of the queries of row tile p and document k from their row maxima."""
    GROUPS: tl.constexpr = C.BM // C.ROWS_PER_QUERY
    i, s, keep = _locate_query_rows(Q, p, sizes, C)
    sums = sum_in_order(tl.where(keep, load_query_weight(Q, i, s, keep) * best, 0.0), GROUPS, C.ROWS_PER_QUERY)
    query = p * GROUPS + tl.arange(0, GROUPS)
    store_scores(scores, sums, has_kept_row(keep, C), any_kept, query, sizes.Nq, sizes.K, k)


@triton.jit
def _score_tile(state, u, x, Q, scores, row, end, sizes, C: tl.constexpr):
    """Score a tile of tokens and store the scores of all documents that end in the tile.

    `state` holds the maxima `[ROW_TILES, BM]` of the document that continues in the tile, and whether a token is kept.
    Returns the same for the document that continues after the tile. Only one row tile is scored at a time, because
    registers hold no more similarities.
    """
    maxima, any_before = state
    tokens = _finish_tokens(u, C)[0].to(x.H.ptr.dtype.element_ty)
    r = row + tl.arange(0, C.BN)
    is_kept_row = _load_row_mask(x.H, r, end, sizes.Ld)
    tile_end = tl.minimum(row + C.BN, end)
    any_kept = any_before
    for p in tl.range(0, C.ROW_TILES, num_stages=1, disable_licm=True):
        i, s, keep = _locate_query_rows(Q, p, sizes, C)
        q = load_rows(locate_rows(Q, i, s), keep, tl.arange(0, C.BD), x.d, Q.stride_d, C.WIDE_OFFSETS)
        S = tl.dot(tokens, tl.trans(q))
        is_row_tile = tl.arange(0, C.ROW_TILES)[:, None] == p
        best = tl.reduce(tl.where(is_row_tile, maxima, float("-inf")), 0, nan_max)
        any_kept = any_before
        for k in tl.range(row // sizes.Ld, tl.cdiv(tile_end, sizes.Ld), num_stages=1, disable_licm=True):
            is_kept = is_kept_row & (r >= k * sizes.Ld) & (r < (k + 1) * sizes.Ld)
            best = nan_max(best, tl.reduce(tl.where(is_kept[:, None], S, float("-inf")), 0, nan_max))
            any_kept = tl.maximum(any_kept, tl.max(is_kept.to(tl.int32), axis=0))
            if (k + 1) * sizes.Ld <= tile_end:
                _store_scores(scores, best, any_kept, Q, p, k, sizes, C)
                best = tl.full((C.BM,), float("-inf"), tl.float32)
                any_kept = any_kept * 0
        maxima = tl.where(is_row_tile, compiler_barrier_dtype(best)[None, :], maxima)
    return maxima, any_kept


@triton.jit
def _count_documents_before(p, programs, K):
    """Return how many of K documents belong to programs before p."""
    return ((p.to(tl.int64) * K + programs - 1) // programs).to(tl.int32)


@triton.jit(do_not_specialize=["width", "d"])
def maxsim_forward_head(Q, H, W, tiles, steps, scores, sizes, width, d, C: tl.constexpr):
    """Compute scores of at most `ROW_TILES * BM` query rows and documents given as hidden states.

    Each program scores `max_documents` or `max_documents - 1` consecutive documents, where
    ``max_documents = ceil(K / programs)``. Descriptor loads address the `max_documents` documents that end with the
    program's last document. Nothing after that document is read.

    Args:
        Q: `QueryArgs`.
        H: `DocumentArgs` of hidden states.
        W: `LinearArgs`.
        tiles: Tensor descriptor of hidden states, see `HeadOperands`, or None.
        steps: Tensor descriptor of W, see `HeadOperands`, or None.
        scores: Output `[Nq, K]`.
        sizes: `SizeArgs`.
        width: Hidden features.
        d: Features of a token.
        C: Compile-time choices, a `HeadConfig`.
    """
    x = HeadOperands(H, W, tiles, steps, width, d)
    programs = tl.num_programs(0)
    max_documents = tl.cdiv(sizes.K, programs)
    document_end = _count_documents_before(tl.program_id(0) + 1, programs, sizes.K)
    begin, end = _count_documents_before(tl.program_id(0), programs, sizes.K) * sizes.Ld, document_end * sizes.Ld
    first = document_end - max_documents
    origin = first * sizes.Ld
    state = tl.full((C.ROW_TILES, C.BM), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
    if C.FUSED_LOOP:
        count = tl.cdiv(width, C.BK)
        sums = _load_bias(x, 0, C)
        for n in tl.range(0, tl.cdiv(end - begin, C.BN) * count, disable_licm=True):
            row = begin + n // count * C.BN
            c0 = n % count * C.BK
            r = row + tl.arange(0, C.BN)
            pointers = locate_numbered_tokens(H, r, sizes.Ld)
            sums = _accumulate_step(sums, x, first, row - origin, pointers, r < end, 0, c0, C)
            sums = _compiler_barrier_sums(sums, C)
            if c0 + C.BK >= width:
                state = _score_tile(state, sums[0], x, Q, scores, row, end, sizes, C)
                sums = _load_bias(x, 0, C)
    else:
        for row in range(begin, end, C.BN):
            r = row + tl.arange(0, C.BN)
            pointers = locate_numbered_tokens(H, r, sizes.Ld)
            sums = _load_bias(x, 0, C)
            for c0 in range(0, width, C.BK):
                sums = _accumulate_step(sums, x, first, row - origin, pointers, r < end, 0, c0, C)
            state = _score_tile(state, sums[0], x, Q, scores, row, end, sizes, C)
