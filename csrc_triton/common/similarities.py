"""Tiles of tokens, and their similarities to query rows: where tokens come from, and what they are multiplied as."""

import triton
import triton.language as tl

from ..formats.encoded import (
    choose_factor_dtype,
    convert_encoded,
    dequantize_similarities,
    divide_by_powers,
    load_encoded_tile,
    multiply_terms,
    needs_power_scaling,
)
from .fp32 import multiply_split_rows, round_to_tf32, split_rows
from .maxima import expand_tokens
from .primitives import compute_inverse_norm, load_rows, square, sum_chunk_squares, sum_in_order


@triton.jit
def load_document_tile(x, document, row, t, c0, C: tl.constexpr):
    """Features from c0 on of tokens `t`, which are `row` of a descriptor and those after it if there is one."""
    if x.tiles is not None:
        tile = x.tiles.load([row.to(tl.int32) if C.ENCODING != "" else row, c0])
    else:
        tile = load_encoded_tile(document.ptr, t, document.row, c0, x.d, x.D, x.counts, x.Q.ptr.dtype.element_ty, C)
    if C.ENCODING != "" and C.INT8_TERMS == 0:
        tile = convert_encoded(tile, choose_factor_dtype(x.Q.ptr.dtype.element_ty, C.ENCODING), C)
    return tile


@triton.jit
def load_query_tile(x, rows, columns, C: tl.constexpr):
    """Features `columns` of query rows."""
    q = load_rows(rows.ptr, rows.ok, columns, x.d, x.Q.stride_d, C.WIDE_OFFSETS)
    if needs_power_scaling(x.Q.ptr.dtype.element_ty, C.ENCODING):
        q = divide_by_powers(q, rows.scale)
    return q


@triton.jit
def add_product(S, q, x, C: tl.constexpr):
    if C.PRECISION == "tf32":
        q = round_to_tf32(q)
        x = round_to_tf32(x)
    if C.TOKENS_FIRST:
        S = tl.dot(x, tl.trans(q), S, input_precision=C.PRECISION)
    else:
        S = tl.dot(q, tl.trans(x), S, input_precision=C.PRECISION)
    return S


@triton.jit
def sum_tile_squares(x, document, tile, t, c0, C: tl.constexpr):
    """Of features from c0 on of tokens `t`, which are `tile`, in fp32.

    On sm_90 as one tree, however they lie: `forward_specialized` has the same. No two warps share a token that a
    descriptor reads. Elsewhere all tiles have one layout.
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
    if C.TOKENS_FIRST:
        S = tl.full((C.BN, C.BM), 0, tl.float32)
    else:
        S = tl.full((C.BM, C.BN), 0, tl.float32)
    return S


@triton.jit
def _compute_similarities(q, x, rows, document, row, t, C: tl.constexpr):
    """``<q[s], D[t]>`` of a tile in fp32, over the norms of the document tokens if normalising.

    `q` holds the rows where one step covers d; else they are read again step by step. Last, which tokens have their
    similarities: all, or with C.SPLIT_FP32 those that are plain, to the scale of the rows.
    """
    plain = t >= 0
    S = init_similarities(C)
    squares = tl.full((C.BN,), 0, tl.float32)
    if C.INT8_TERMS > 0:
        S = multiply_terms(q, load_document_tile(x, document, row, t, 0, C), C)
    elif x.terms is not None:
        scale = tl.load(x.terms.document_scales + row + tl.arange(0, C.BN))
        plain = scale > 0
        S = multiply_split_rows(q, (x.tiles.load([row, 0]), x.tiles.load([row + x.terms.document_capacity_rows, 0])), C)
    elif C.SPLIT_FP32:
        tile, scale, plain, _ = split_rows(load_document_tile(x, document, row, t, 0, C))
        S = multiply_split_rows(q, tile, C)
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
    if C.SPLIT_FP32:
        S = S * expand_tokens(scale, C)
    if C.ENCODING != "":
        S = dequantize_similarities(S, rows, x.counts, document, t, C)
    elif C.NORMALIZE:
        S = S * expand_tokens(compute_inverse_norm(squares), C)
    return S, plain


@triton.jit
def locate_tile_tokens(x, document, t0, C: tl.constexpr):
    """The tile of tokens from t0 on: where it begins, and its tokens.

    The last tile is shifted back (descriptor) or repeats the last token (pointers). Either only reads tokens again:
    that changes no maximum, and a repeat loses every tie. With C.SHORT_DOCUMENTS, which Ld < BN needs, a descriptor
    reads on into what follows the document: `is_kept` leaves it out.
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
    """The mask of the tokens of a tile from t0 on, which may lie behind the document; zeros where there is none."""
    mask = tl.full((C.BN,), 0, tl.int8)
    if x.D.mask is not None:
        _, t = locate_tile_tokens(x, document, t0, C)
        # As bytes: a bool would be compared, and waited for, where it is loaded.
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
    """Whether registers hold a mask beside a tile that a descriptor reads: not beside 256 rows, numbers as they are
    kept, or split fp32."""
    return BM < 256 and stored == "" and not splits


@triton.jit
def prefetch_tile_mask(x, document, t0, C: tl.constexpr):
    """`load_tile_mask` of the next tile, before a tile is multiplied: no product hides what a load from memory takes.

    Zeros where `compute_tile` loads.
    """
    if x.tiles is not None and _has_mask_prefetch(C.BM, C.ENCODING, C.SPLIT_FP32):
        mask = load_tile_mask(x, document, t0, C)
    else:
        mask = tl.full((C.BN,), 0, tl.int8)
    return mask


@triton.jit
def is_kept(x, document, t0, t, mask, C: tl.constexpr):
    """Which tokens t of the tile from t0 on are there and not masked, by what `load_tile_mask` found."""
    if C.SHORT_DOCUMENTS and x.tiles is not None:
        keep = t < document.length
    else:
        keep = t >= 0
    if x.D.mask is not None:
        keep = keep & (mask != 0)
    if C.SOFT:  # the last token counts once
        keep = keep & (t0 + tl.arange(0, C.BN) < document.length)
    return keep


@triton.jit
def compute_tile(q, x, rows, document, t0, mask, C: tl.constexpr):
    """Similarities of a tile of tokens from t0 on, ``-inf`` where masked; the tokens, and which of them are kept.

    `mask` is what `prefetch_tile_mask` found.

    With C.SPLIT_FP32 also ``-inf`` of tokens that are kept but not plain; last, which those are.
    """
    t0, t = locate_tile_tokens(x, document, t0, C)
    S, plain = _compute_similarities(q, x, rows, document, document.row + t0, t, C)
    if x.tiles is None or not _has_mask_prefetch(C.BM, C.ENCODING, C.SPLIT_FP32):
        mask = load_tile_mask(x, document, t0, C)
    keep = is_kept(x, document, t0, t, mask, C)
    taken = keep
    if C.SPLIT_FP32:
        taken = keep & plain
    if x.D.mask is None and C.SOFT:
        if t0 + C.BN > document.length:  # a selection takes as long as an exponential needs for half
            S = tl.where(expand_tokens(taken, C), S, float("-inf"))
    elif x.D.mask is not None or C.SPLIT_FP32 or (C.SHORT_DOCUMENTS and x.tiles is not None):
        # Selected, not biased: a masked token may hold NaN or inf, which no added bias removes.
        S = tl.where(expand_tokens(taken, C), S, float("-inf"))
    return S, t, keep, t0, keep & (plain == 0)
