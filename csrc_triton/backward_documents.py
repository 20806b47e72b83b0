"""The destination-owned gradient of the documents: a one-hot product over the query rows that each token won.

A program owns a tile of BN tokens of one document, or a piece of its rows where documents are few. Rows come from the
lists of `backward_lists`, or, where a document meets few rows, straight from the winners (rows that win elsewhere are
not read). For half types the product runs on the matrix unit in their own type: coefficients are split in two,
``c = hi + lo`` (to 2^-17 for bf16, 2^-22 for fp16).
"""

import triton
import triton.language as tl

from .arguments import Sizes
from .backward import more_norm_sums, no_norm_sums, norm_sums, through_norm, through_tile_norm
from .common import document_base, inverse_norm, load_rows, query_weight, row_pointers, rows_sum_of_squares, wide

CAREFUL_ROWS = tl.constexpr(16)  # of a step of the slow path


@triton.jit
def _codes(e, end, tile, lists, up, sizes, C: tl.constexpr):
    """What says which query row is number e of a tile: its list entry, or the token that row e won; -1: none."""
    owner, k, _ = tile
    if lists is not None:
        code = tl.load(lists + e, mask=e < end, other=-1)
    else:
        if C.CANDIDATES:
            base = (owner.to(tl.int64) * sizes.K + k) * sizes.Lq
        else:
            base = k.to(tl.int64) * sizes.Nq * sizes.Lq
        code = tl.load(up.argmax + base + e, mask=e < end, other=-1).to(tl.int32)
    return code


@triton.jit
def _row_numbers(code, e, lists, C: tl.constexpr):
    """The number ``i * Lq + s`` of each code's query row, of those that its document meets."""
    if lists is not None:
        r = (code.to(tl.uint32) // C.BN).to(tl.int32)
    else:
        r = e
    return r


@triton.jit
def _pointers(code, e, tile, lists, up, Q, sizes, C: tl.constexpr):
    """Where the query row of each code begins, and whether it won a token of the tile."""
    owner, _, t0 = tile
    r = _row_numbers(code, e, lists, C)
    if lists is not None:
        hit = code >= 0
    else:
        hit = (code >= t0) & (code < t0 + C.BN)
    if C.FLAT:
        pointers = Q.ptr + owner.to(tl.int64) * Q.stride_n + r * Q.stride_l
    else:
        pointers = row_pointers(Q, (r // sizes.Lq).to(tl.int32) + owner, (r % sizes.Lq).to(tl.int32))
    return pointers, hit


@triton.jit
def _coefficients(code, e, tile, lists, norms, up, Q, sizes, d, C: tl.constexpr):
    """Of each code: which token of the tile its row won (-1: none), and ``g * w / ||q||``, what the row counts for."""
    owner, k, t0 = tile
    r = _row_numbers(code, e, lists, C)
    if lists is not None:
        hit = code >= 0
        local = tl.where(hit, (code.to(tl.uint32) % C.BN).to(tl.int32), -1)
    else:
        hit = (code >= t0) & (code < t0 + C.BN)
        local = tl.where(hit, code - t0, -1)
    s = (r % sizes.Lq).to(tl.int32)
    i = (r // sizes.Lq).to(tl.int32) + owner
    pair = i.to(tl.int64) * up.stride_q + k.to(tl.int64) * up.stride_k
    coefficient = tl.load(up.grad_scores + pair, mask=hit, other=0.0)
    if Q.weight is not None:
        coefficient *= query_weight(Q, i, s, hit)
    if norms is not None:
        coefficient *= tl.load(norms + owner.to(tl.int64) * sizes.Lq + r, mask=hit, other=0.0)
    elif C.NORMALIZE:
        pointers = row_pointers(Q, i, s)
        coefficient *= inverse_norm(rows_sum_of_squares(pointers, hit, d, Q.stride_d, C.BD, C.WIDE))
    return local, coefficient


@triton.jit
def power_of_two(biased_exponent):
    return (biased_exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def scales(largest):
    """Powers of two: what brings the largest coefficient just below 2^15, and back."""
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15)
    return power_of_two(268 - exponent), power_of_two(exponent - 14)


@triton.jit
def _scale_of(begin, end, tile, lists, norms, up, Q, sizes, d, C: tl.constexpr):
    """A power of two that brings the largest finite coefficient of a tile just below 2^15, and its inverse.

    For fp16 only, whose range the upstream gradients may leave at either end; bf16 has the range of fp32.
    """
    largest = tl.full((C.BM,), 0, tl.float32)
    for e0 in range(begin, end, C.BM):
        e = e0 + tl.arange(0, C.BM)
        code = _codes(e, end, tile, lists, up, sizes, C)
        _, c = _coefficients(code, e, tile, lists, norms, up, Q, sizes, d, C)
        largest = tl.maximum(largest, tl.where(tl.abs(c) < float("inf"), tl.abs(c), 0.0))
    return scales(tl.max(largest, axis=0))


@triton.jit
def one_hot_product(acc, x, local, coefficient, C: tl.constexpr):
    """acc + one-hot product: [BN, BD] for fp32; for half types transposed, x being the left operand.

    With LANES the high and low parts of a token are columns of one product, [BD, 2 * BN]; else there are two products.
    """
    if x.dtype == tl.float32:
        match = local[None, :] == tl.arange(0, C.BN)[:, None]
        acc = tl.dot(tl.where(match, coefficient[None, :], 0.0), x, acc, input_precision=C.PRECISION)
    else:
        high = coefficient.to(x.dtype)
        low = (coefficient - high.to(tl.float32)).to(x.dtype)
        zero = tl.full((1, 1), 0, x.dtype)
        if C.LANES > 1:
            m = tl.arange(0, 2 * C.BN)
            part = tl.where((m % 2 == 0)[:, None], high[None, :], low[None, :])
            one_hot = tl.where(local[None, :] == (m // 2)[:, None], part, zero)
            acc = tl.dot(tl.trans(x), tl.trans(one_hot), acc)
        else:
            match = local[None, :] == tl.arange(0, C.BN)[:, None]
            acc = tl.dot(tl.trans(x), tl.trans(tl.where(match, high[None, :], zero)), acc)
            acc = tl.dot(tl.trans(x), tl.trans(tl.where(match, low[None, :], zero)), acc)
    return acc


@triton.jit
def finite_rows(x, coefficient):
    finite = tl.min((tl.abs(x.to(tl.float32)) < float("inf")).to(tl.int32), axis=1) > 0
    return finite & (tl.abs(coefficient) < float("inf"))


@triton.jit
def add_one_by_one(G, x, local, c, chosen, C: tl.constexpr):
    """G with the rows ``c * x`` of the CAREFUL_ROWS that are `chosen` added to their tokens, one after the other."""
    if tl.max(chosen.to(tl.int32), axis=0) > 0:
        for n in range(CAREFUL_ROWS):
            this = (tl.arange(0, CAREFUL_ROWS) == n) & chosen
            token = tl.max(tl.where(this, local, -1), axis=0)
            row = tl.sum(tl.where(this[:, None], c[:, None] * x, 0.0), axis=0)
            G += tl.where((tl.arange(0, C.BN) == token)[:, None], row[None, :], 0.0)
    return G


@triton.jit
def _add_non_finite(G, begin, end, tile, lists, norms, up, Q, sizes, columns, d, C: tl.constexpr):
    """Add the rows that hold NaN or inf one at a time: in a product they would spoil every token of the tile."""
    rows = tl.arange(0, CAREFUL_ROWS)
    for e0 in tl.range(begin, end, CAREFUL_ROWS, num_stages=1):
        code = _codes(e0 + rows, end, tile, lists, up, sizes, C)
        pointers, hit = _pointers(code, e0 + rows, tile, lists, up, Q, sizes, C)
        local, c = _coefficients(code, e0 + rows, tile, lists, norms, up, Q, sizes, d, C)
        x = load_rows(pointers, hit, columns, d, Q.stride_d, C.WIDE).to(tl.float32)
        bad = hit & (finite_rows(x, c) == 0)
        G = add_one_by_one(G, x, local, c, bad, C)
    return G


@triton.jit
def _finite_sum(begin, end, tile, lists, norms, scale, up, Q, sizes, columns, d, CHECK: tl.constexpr, C: tl.constexpr):
    """The sums [BN, BD] of a tile's rows times `scale`; CHECK: without those that hold NaN or inf."""
    HALF: tl.constexpr = Q.ptr.dtype.element_ty != tl.float32
    STEP: tl.constexpr = CAREFUL_ROWS if CHECK else C.BM
    M: tl.constexpr = C.BD if HALF else C.BN
    PAIRS: tl.constexpr = HALF and C.LANES > 1
    N: tl.constexpr = (2 * C.BN if PAIRS else C.BN) if HALF else C.BD
    G = tl.full((M, N), 0, tl.float32)
    code = _codes(begin + tl.arange(0, STEP), end, tile, lists, up, sizes, C)
    for e0 in range(begin, end, STEP):
        # Codes are read a step ahead, so that the rows that they name can be on their way for several steps.
        e = e0 + tl.arange(0, STEP)
        ahead = _codes(e + STEP, end, tile, lists, up, sizes, C)
        pointers, hit = _pointers(code, e, tile, lists, up, Q, sizes, C)
        local, c = _coefficients(code, e, tile, lists, norms, up, Q, sizes, d, C)
        x = load_rows(pointers, hit, columns, d, Q.stride_d, C.WIDE)
        if CHECK:
            finite = finite_rows(x, c)
            x = tl.where(finite[:, None], x, tl.full((1, 1), 0, x.dtype))
            c = tl.where(finite, c, 0.0)
        G = one_hot_product(G, x, local, c * scale, C)
        code = ahead
    if HALF:
        if PAIRS:
            G = tl.sum(tl.reshape(G, (C.BD, C.BN, 2)), axis=2)
        G = tl.trans(G)
    return G


@triton.jit
def _sum_of_rows(begin, end, tile, lists, norms, up, Q, sizes, c0, d, C: tl.constexpr):
    """``sum of coefficient * row`` of each token of a tile, BD features from c0 on, and these features."""
    columns = c0 + tl.arange(0, C.BD)
    scale = 1.0
    unscale = 1.0
    if Q.ptr.dtype.element_ty == tl.float16:
        scale, unscale = _scale_of(begin, end, tile, lists, norms, up, Q, sizes, d, C)
    G = _finite_sum(begin, end, tile, lists, norms, scale, up, Q, sizes, columns, d, False, C) * unscale
    # Zeros of the one-hot times NaN or inf are NaN: only then is it worth looking at every row.
    if tl.sum(G * 0.0) != 0.0:
        G = _finite_sum(begin, end, tile, lists, norms, scale, up, Q, sizes, columns, d, True, C) * unscale
        G = _add_non_finite(G, begin, end, tile, lists, norms, up, Q, sizes, columns, d, C)
    return G, columns


@triton.jit
def _tile_of(pid, first, starts, lists, rows, blocks, tiles, sizes, C: tl.constexpr):
    """The document of tile number `pid`, the tile, and where its rows begin and end in the document's list."""
    document = pid // tiles
    b = pid % tiles
    begin = rows * 0
    end = rows
    if lists is not None:
        starts += wide(document) * (tiles * blocks + 1) + b * blocks
        begin = tl.load(starts)
        end = tl.load(starts + blocks)
    document += first
    owner = document * 0
    k = document
    if C.CANDIDATES:
        owner = document // sizes.K
        k = document % sizes.K
    return document, (owner, k, b * C.BN), begin, end


@triton.jit
def store_gradient(G, grad_D, document, t0, ok, columns, Ld, d, C: tl.constexpr):
    t = t0 + tl.arange(0, C.BN)
    offsets = (document.to(tl.int64) * Ld + t)[:, None] * d + columns[None, :]
    mask = (ok & (t < Ld))[:, None] & (columns < d)[None, :]
    tl.store(grad_D + offsets, G.to(grad_D.dtype.element_ty), mask=mask)


@triton.jit
def _slots(partial, document, begin, p, rows, piece, columns, d, C: tl.constexpr):
    """Where the sums of piece p of a tile are kept whose rows begin at `begin`.

    A piece is `piece` rows of a document's list. It has room for two tiles: one that the piece before has a part of,
    and one that goes on in the next; tiles that are whole in a piece need none.
    """
    slot = wide(document) * (2 * tl.cdiv(rows, piece)) + 2 * p + (p == begin // piece).to(tl.int32)
    return partial + ((slot * C.BN + tl.arange(0, C.BN)) * d)[:, None] + columns[None, :]


@triton.jit(do_not_specialize=["first", "rows", "blocks", "tiles", "piece", "Nq", "K", "Lq", "Ld"])
def maxsim_grad_documents(
    Q,
    D,
    up,
    starts,
    lists,
    norms,
    partial,
    grad_D,
    first,
    rows,
    blocks,
    tiles,
    piece,
    Nq,
    K,
    Lq,
    Ld,
    d,
    C: tl.constexpr,
):
    """grad_D of BN tokens of one document a program, documents from `first` on: the sum over the rows that they won.

    `lists` are the winners of these documents, or None to look through the `rows` that each document meets. Unless
    `partial` is None, program (.., n) takes the n-th piece of a tile's list; `maxsim_join_pieces` adds up what is left.
    """
    sizes = Sizes(Nq, K, Lq, Ld)
    TWICE: tl.constexpr = C.NORMALIZE and not C.ONE_CHUNK
    document, tile, begin, end = _tile_of(tl.program_id(0), first, starts, lists, rows, blocks, tiles, sizes, C)
    if lists is not None:
        lists += wide(document - first) * rows
    owner, k, t0 = tile
    t = t0 + tl.arange(0, C.BN)
    base = document_base(D, owner, k)
    features = d
    whole = tl.full((C.BN,), 1, tl.int1)
    tile_begin = begin
    p = 0
    if partial is not None:
        p = begin // piece + tl.program_id(1)
        whole = whole & (end <= (begin // piece + 1) * piece)
        begin = tl.maximum(begin, p * piece)
        end = tl.minimum(end, (p + 1) * piece)
        features = tl.where((begin < end) | (tl.program_id(1) == 0), d, 0)

    sums = no_norm_sums(C.BN)
    if TWICE:
        for c0 in range(0, features, C.BD):
            G, columns = _sum_of_rows(begin, end, tile, lists, norms, up, Q, sizes, c0, d, C)
            sums = more_norm_sums(sums, G, base, t, t < sizes.Ld, columns, D, d, C)
    for c0 in range(0, features, C.BD):
        G, columns = _sum_of_rows(begin, end, tile, lists, norms, up, Q, sizes, c0, d, C)
        if partial is not None:
            slots = _slots(partial, document - first, tile_begin, p, rows, piece, columns, d, C)
            tl.store(slots, G, mask=(whole == 0)[:, None] & (columns < d)[None, :])
        if C.NORMALIZE:
            G = through_tile_norm(G, columns, sums, base, t, t < sizes.Ld, D, d, C)
        store_gradient(G, grad_D, document, t0, whole, columns, sizes.Ld, d, C)


@triton.jit
def _joined(partial, document, begin, end, rows, piece, columns, d, C: tl.constexpr):
    """The sum of a tile's pieces in ascending order."""
    G = tl.full((C.BN, C.BD), 0, tl.float32)
    for p in range(begin // piece, tl.cdiv(end, piece)):
        slots = _slots(partial, document, begin, p, rows, piece, columns, d, C)
        G += tl.load(slots, mask=tl.broadcast_to((columns < d)[None, :], (C.BN, C.BD)), other=0.0)
    return G


@triton.jit(do_not_specialize=["first", "rows", "blocks", "tiles", "piece", "K", "Ld"])
def maxsim_join_pieces(D, starts, partial, grad_D, first, rows, blocks, tiles, piece, K, Ld, d, C: tl.constexpr):
    """grad_D of the tiles whose lists `maxsim_grad_documents` took in several pieces."""
    sizes = Sizes(0, K, 0, Ld)
    document, tile, begin, end = _tile_of(tl.program_id(0), first, starts, starts, rows, blocks, tiles, sizes, C)
    owner, k, t0 = tile
    t = t0 + tl.arange(0, C.BN)
    base = document_base(D, owner, k)
    features = tl.where(end > (begin // piece + 1) * piece, d, 0)
    sums = no_norm_sums(C.BN)
    if C.NORMALIZE:
        for c0 in range(0, features, C.BD):
            columns = c0 + tl.arange(0, C.BD)
            G = _joined(partial, document - first, begin, end, rows, piece, columns, d, C)
            sums = more_norm_sums(sums, G, base, t, t < Ld, columns, D, d, C)
    for c0 in range(0, features, C.BD):
        columns = c0 + tl.arange(0, C.BD)
        G = _joined(partial, document - first, begin, end, rows, piece, columns, d, C)
        if C.NORMALIZE:
            x, _, _, _ = norm_sums(G, base, t, t < Ld, columns, D, d, C)
            dot, squares, live = sums
            G = through_norm(G, x, live, squares, dot)
        store_gradient(G, grad_D, document, t0, t >= 0, columns, Ld, d, C)
