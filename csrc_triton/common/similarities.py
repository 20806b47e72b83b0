"""Tiles of document tokens and their similarities to query rows: loading, products, norms, and masks."""

import triton
import triton.language as tl

from ..formats.encoded import (
    choose_factor_dtype,
    convert_encoded,
    dequantize_similarities,
    divide_by_powers,
    has_fp8_queries,
    load_encoded_tile,
    multiply_terms,
    needs_power_scaling,
)
from .fp32 import multiply_split_rows, round_to_tf32, split_rows
from .maxima import expand_tokens
from .primitives import compute_inverse_norm, load_rows, square, sum_chunk_squares, sum_in_order


@triton.jit
def load_document_tile(x, document, row, t, c0, C: tl.constexpr):
    """Load features from c0 on of tokens `t`.

    With a tensor descriptor, the tokens are the rows from `row` on.
    """
    if x.tiles is not None:
        tile = x.tiles.load([row.to(tl.int32) if C.ENCODING != "" else row, c0])
    else:
        tile = load_encoded_tile(document.ptr, t, document.row, c0, x.d, x.D, x.counts, x.Q.ptr.dtype.element_ty, C)
    if C.ENCODING != "" and C.INT8_TERMS == 0:
        tile = convert_encoded(tile, choose_factor_dtype(x.Q.ptr.dtype.element_ty, C.ENCODING), C)
    return tile


@triton.jit
def load_query_tile(x, rows, columns, C: tl.constexpr):
    """Load features `columns` of query rows."""
    q = load_rows(rows.ptr, rows.ok, columns, x.d, x.Q.stride_d, C.WIDE_OFFSETS)
    if needs_power_scaling(x.Q.ptr.dtype.element_ty, C.ENCODING):
        q = divide_by_powers(q, rows.scale, C)
    return q


@triton.jit
def add_product(S, q, x, C: tl.constexpr):
    """Return S plus the product of query rows and document tokens, in the orientation of the tile."""
    if C.PRECISION == "tf32":
        q = round_to_tf32(q)
        x = round_to_tf32(x)
    if has_fp8_queries(C.ENCODING):
        # FP8 tensor cores add with fewer bits than fp32. All features are one step, so that bits are always the same.
        tl.static_assert(C.SINGLE_STEP)
        if C.TOKENS_FIRST:
            S = tl.dot(x, tl.trans(q))
        else:
            S = tl.dot(q, tl.trans(x))
    elif C.TOKENS_FIRST:
        S = tl.dot(x, tl.trans(q), S, input_precision=C.PRECISION)
    else:
        S = tl.dot(q, tl.trans(x), S, input_precision=C.PRECISION)
    return S


@triton.jit
def sum_tile_squares(x, document, tile, t, c0, C: tl.constexpr):
    """Return the sums of squares of the features from c0 on of the tokens in `tile`, in fp32.

    On sm_90 the sum is one tree for every layout, as in the sm_90 kernels. No two warps share a token that a tensor
    descriptor reads. Elsewhere all tiles have the same layout.
    """
    if x.tiles is not None:
        squares = sum_in_order(square(tile), tile.shape[0], tile.shape[1])
    elif C.LANES > 1:
        pointers = document.ptr + t.to(tl.int64) * x.D.stride_l
        squares = sum_chunk_squares(pointers, t >= 0, c0, x.d, x.D.stride_d, C.BD, C.WIDE_OFFSETS)
    else:
        y = tile.to(tl.float32)
        squares = tl.sum(y * y, axis=1)
    return squares


@triton.jit
def init_similarities(C: tl.constexpr):
    """Return a tile of zeros in the orientation of C."""
    return tl.full((C.BN, C.BM) if C.TOKENS_FIRST else (C.BM, C.BN), 0, tl.float32)


@triton.jit
def _compute_similarities(q, x, rows, document, row, t, C: tl.constexpr):
    """Compute ``<q[s], D[t]>`` of a tile in fp32, times the inverse norms or scales of the document tokens.

    `q` holds the query rows if one step covers d. Otherwise they are read again in each step.

    Returns:
        The similarities, and which tokens have one. With C.FP32_TERMS these are the exact tokens, and the similarities
        are still to be scaled by the query rows. Otherwise all tokens have one.
    """
    is_exact = t >= 0
    S = init_similarities(C)
    squares = tl.full((C.BN,), 0, tl.float32)
    if C.INT8_TERMS > 0:
        S = multiply_terms(q, load_document_tile(x, document, row, t, 0, C), C)
    elif C.FP32_TERMS > 0:
        tile = load_document_tile(x, document, row, t, 0, C)
        if C.NORMALIZE:
            squares = sum_tile_squares(x, document, tile, t, 0, C)
        terms, scale, is_exact, _ = split_rows(tile, C.FP32_TERMS)
        S = multiply_split_rows(q, terms, C)
    elif C.SINGLE_STEP:
        tile = load_document_tile(x, document, row, t, 0, C)
        S = add_product(S, q, tile, C)
        if C.NORMALIZE and C.ENCODING == "":
            squares = sum_tile_squares(x, document, tile, t, 0, C)
    else:
        for c0 in range(0, x.d, C.BD):
            y = load_query_tile(x, rows, c0 + tl.arange(0, C.BD), C)
            tile = load_document_tile(x, document, row, t, c0, C)
            S = add_product(S, y, tile, C)
            if C.NORMALIZE and C.ENCODING == "":
                squares += sum_tile_squares(x, document, tile, t, c0, C)
    if C.FP32_TERMS > 0:
        S = S * expand_tokens(scale, C)
    if C.ENCODING != "":
        S = dequantize_similarities(S, rows, x.counts, document, t, C)
    elif C.NORMALIZE:
        S = S * expand_tokens(compute_inverse_norm(squares), C)
    return S, is_exact


@triton.jit
def locate_tile_tokens(x, document, t0, C: tl.constexpr):
    """Return the first token of the tile that covers the tokens from t0 on, and all its tokens.

    The last tile shifts back (tensor descriptor) or repeats the last token (pointers). Both only read tokens again,
    which changes no maximum, and a repeated token loses every tie. With C.SHORT_DOCUMENTS, which Ld < BN needs, a
    descriptor reads on into the rows after the document, and `is_kept` excludes them.
    """
    if x.tiles is None:
        t = tl.minimum(t0 + tl.arange(0, C.BN), document.length - 1)
    else:
        if not C.SHORT_DOCUMENTS:
            t0 = tl.minimum(t0, document.length - C.BN)
        t = t0 + tl.arange(0, C.BN)
    return t0, t


@triton.jit
def load_tile_mask(x, document, t0, C: tl.constexpr):
    """Load the mask of a tile's tokens from t0 on, which may be past the document, or zeros without a mask."""
    mask = tl.full((C.BN,), 0, tl.int8)
    if x.D.mask is not None:
        _, t = locate_tile_tokens(x, document, t0, C)
        # Bytes, because a bool would be compared, and waited for, immediately after its load.
        pointers = (document.mask + t.to(tl.int64) * x.D.mask_stride_l).to(tl.pointer_type(tl.int8), bitcast=True)
        if C.SHORT_DOCUMENTS and x.tiles is not None:
            mask = tl.load(pointers, mask=t < document.length, other=0)
        elif x.tiles is None:
            mask = tl.load(pointers, mask=t >= 0, other=0)  # a document may have no token
        else:
            mask = tl.load(pointers)
    return mask


@triton.constexpr_function
def _has_mask_prefetch(BM, stored, splits):
    """Return whether registers can hold a mask while a tensor descriptor's tile is multiplied.

    They cannot for 256 query rows, encoded documents, and split fp32.
    """
    return BM < 256 and stored == "" and not splits


@triton.jit
def prefetch_tile_mask(x, document, t0, C: tl.constexpr):
    """Return `load_tile_mask` of the next tile, for use before a tile is multiplied.

    No product hides the latency of a load that follows it. The result is zeros if `compute_tile` loads the mask.
    """
    if x.tiles is not None and _has_mask_prefetch(C.BM, C.ENCODING, C.FP32_TERMS):
        mask = load_tile_mask(x, document, t0, C)
    else:
        mask = tl.full((C.BN,), 0, tl.int8)
    return mask


@triton.jit
def is_kept(x, document, t0, t, mask, C: tl.constexpr):
    """Return which tokens t of the tile from t0 on exist and are not masked, given the mask bytes."""
    if C.SHORT_DOCUMENTS and x.tiles is not None:
        keep = t < document.length
    else:
        keep = t >= 0
    if x.D.mask is not None:
        keep = keep & (mask != 0)
    if C.SOFT:  # a repeated last token must be added once only
        keep = keep & (t0 + tl.arange(0, C.BN) < document.length)
    return keep


@triton.jit
def compute_tile(q, x, rows, document, t0, mask, C: tl.constexpr):
    """Compute the similarities of the tile of tokens from t0 on, ``-inf`` for masked tokens.

    Args:
        q: Query rows as `load_query_rows` returns them.
        x: `Operands`.
        rows: `QueryRows`.
        document: `Document`.
        t0: First token of the tile.
        mask: Result of `prefetch_tile_mask`.
        C: `KernelConfig`.

    Returns:
        The similarities, the tokens, which tokens are kept, the first token, and which kept tokens are fallback tokens.
        Fallback tokens exist with C.FP32_TERMS only, and their similarities are ``-inf``.
    """
    t0, t = locate_tile_tokens(x, document, t0, C)
    S, is_exact = _compute_similarities(q, x, rows, document, document.row + t0, t, C)
    if x.tiles is None or not _has_mask_prefetch(C.BM, C.ENCODING, C.FP32_TERMS):
        mask = load_tile_mask(x, document, t0, C)
    keep = is_kept(x, document, t0, t, mask, C)
    is_scored = keep
    if C.FP32_TERMS > 0:
        is_scored = keep & is_exact
    if x.D.mask is None and C.SOFT:
        if t0 + C.BN > document.length:  # a selection costs as much as the exponentials of half the elements
            S = tl.where(expand_tokens(is_scored, C), S, float("-inf"))
    elif x.D.mask is not None or C.FP32_TERMS > 0 or (C.SHORT_DOCUMENTS and x.tiles is not None):
        # Selected, not biased: a masked token may hold NaN or inf, which no added bias removes.
        S = tl.where(expand_tokens(is_scored, C), S, float("-inf"))
    return S, t, keep, t0, keep & (is_exact == 0)
