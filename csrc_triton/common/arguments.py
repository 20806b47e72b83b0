"""Arguments of kernels: tensors with their strides and masks, grouped so that a launch reads like a call.

`backward_arguments` has the arguments of the backward. Two layouts share every kernel. Cross product: D is
``[Nd, Ld, d]`` and every document is scored against every query. Candidates: D is ``[Nq, K, Ld, d]`` and a document is
scored against the one query that owns it. A document is found at ``owner * stride_owner + k * stride_doc``, with
``stride_owner = 0`` and ``owner = 0`` for the cross product.
"""

from typing import Any, NamedTuple


class QueryArgs(NamedTuple):
    """Query tokens ``[Nq, Lq, d]`` with optional mask and weight ``[Nq, Lq]`` (None where absent)."""

    ptr: Any
    stride_n: Any
    stride_l: Any
    stride_d: Any
    mask: Any
    mask_stride_n: Any
    mask_stride_l: Any
    weight: Any
    weight_stride_n: Any
    weight_stride_l: Any


class DocumentArgs(NamedTuple):
    """Document tokens ``[Nd, Ld, d]`` or ``[Nq, K, Ld, d]`` with an optional mask (None where absent)."""

    ptr: Any
    stride_owner: Any
    stride_doc: Any
    stride_l: Any
    stride_d: Any
    mask: Any
    mask_stride_owner: Any
    mask_stride_doc: Any
    mask_stride_l: Any


class DequantArgs(NamedTuple):
    """What the numbers of quantised documents count as: times `scale`, and `minimum` added where it is not None; fp32.

    `scale_each` and `minimum_each` are 1 where each token has its own, 0 where there is one for all.
    """

    scale: Any
    scale_each: Any
    minimum: Any
    minimum_each: Any


class CodecDequantArgs(NamedTuple):
    """`DequantArgs` of residual codes, and what they are decoded with: see `residual`.

    Codes of all tokens, int32 or int64; centroids ``[centroids_count, d]``, contiguous; weights of buckets, fp32.
    """

    scale: Any
    scale_each: Any
    minimum: Any
    minimum_each: Any
    codes: Any
    centroids: Any
    centroids_count: Any
    weights: Any


class EncodedDocumentArgs(NamedTuple):
    """Documents ``[K, Ld, d]``, contiguous, beside the descriptor that a kernel reads them by.

    Of int8 and FP8 ``scale[k * stride_doc + t * stride_l]`` is what token t of document k is times; None of fp32.
    """

    ptr: Any
    scale: Any
    stride_doc: Any
    stride_l: Any


class Operands(NamedTuple):
    """What a program reads tokens from: Q and D; of D a tensor descriptor and `DequantArgs`, of either `TermArgs`, or
    None.

    `tau` is the temperature of `Config.SOFT`, None without.
    """

    Q: Any
    D: Any
    tiles: Any
    terms: Any
    counts: Any
    d: Any
    tau: Any


class QueryRows(NamedTuple):
    """Query rows of a tile: where each begins, its number in the terms of Q, whether it counts, and the sum of its
    features, where `DequantArgs` have a minimum, else None.

    With `Config.SOFT` what similarities are multiplied by, and what exponents are; the former also where rows are held
    over powers of two, as `stored` has them. None without.
    """

    ptr: Any
    number: Any
    ok: Any
    sums: Any
    scale: Any
    rate: Any


class Document(NamedTuple):
    """A document: where its tokens and their mask begin, if there is one; its first row in a descriptor; its length."""

    ptr: Any
    mask: Any
    row: Any
    length: Any


class OutputArgs(NamedTuple):
    """Scores, and winners or None; with `Config.SOFT` soft maxima, in the place of winners."""

    scores: Any
    argmax: Any


class SizeArgs(NamedTuple):
    """Queries, documents (of each query, for candidates), query tokens, document tokens."""

    Nq: Any
    K: Any
    Lq: Any
    Ld: Any


class PackedSizeArgs(NamedTuple):
    """Queries, documents (of each query, for candidates), packed query and document tokens, the most of a query."""

    Nq: Any
    K: Any
    Tq: Any
    Td: Any
    most: Any


class TermArgs(NamedTuple):
    """fp32 rows as `split_tokens` leaves them: hi [room, BD], below it lo [room, BD], and the scales [room].

    Those of documents are read through a descriptor.
    """

    queries: Any
    query_scales: Any
    document_scales: Any
    query_capacity_rows: Any
    document_capacity_rows: Any


class SegmentArgs(NamedTuple):
    """How packed rows are cut, for ragged layouts: int32 or int64, contiguous.

    Query i has the rows ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]`` of Q, a document `lengths` rows of D from
    `offsets` on: both ``[Nd]``, or ``[Nq, K]`` for candidates. `pairs` ``[P, 2]`` says which (query, document) meet, or
    is None: all, or a query and its candidates.

    Where `lengths` is None, `offsets` are ``[Nd + 1]`` and a document ends where the next begins. Where `cu_seqlens_q`
    or `offsets` is None, rows are cut evenly, into `q_each` or `d_each`; of which the first `q_lengths` ``[Nq]`` or
    `lengths` count, all if that is None too.
    """

    cu_seqlens_q: Any
    offsets: Any
    lengths: Any
    pairs: Any
    q_lengths: Any = None
    q_each: Any = None
    d_each: Any = None


class SplitArgs(NamedTuple):
    """What the sections that documents are cut into leave behind: the rows' maxima ``[most, rows]`` in fp32; their
    winners, int32, tokens of the document, NO_TOKEN where none is; and with a mask of documents whether the section
    keeps a token, ``[most]``, int32; inverse norms of the rows, which maxima are multiplied by at last. And winners of
    whole documents, ``[K, rows]``. None where nobody asks for them.

    There are at most `most` sections, those of each document behind those of the one before, of `each` tokens; where
    that is None, the device finds it.
    """

    maxima: Any
    split_argmax: Any
    kept: Any
    norms: Any
    argmax: Any
    most: Any
    each: Any


class MaskPatchArgs(NamedTuple):
    """What document tokens that do not count are overwritten with in shared memory: the first one that does.

    Made by `maxsim_patches`, of documents ``tokens [K, d_each, d]``: which is the first that does, ``sources
    [K]``, int32; and of each tile, the first of which begins with it, which do not, as bits of int32 ``[K, 2, tiles]``,
    32 tokens each.
    """

    tokens: Any
    bits: Any
    sources: Any


class KernelConfig(NamedTuple):
    """Compile-time choices. Every value is correct for every shape; a table picks the fast ones."""

    BM: int  # query rows of a tile
    BN: int  # document tokens of a tile
    BD: int  # features of a step
    ROWS_PER_QUERY: int  # forward: rows that one query takes in a tile, a power of two <= BM
    LANES: int  # forward: threads that share a row, 4 if the matrix unit leaves rows in quads as wgmma does, else 1
    CANDIDATES: bool
    SINGLE_STEP: bool  # BD covers d
    NORMALIZE: bool
    WIDE_OFFSETS: int  # what needs 64-bit offsets: 0 whole documents and queries, 1 also tokens, 2 also features
    PRECISION: str  # of tl.dot on fp32 operands
    EVEN_ROW_STRIDE: bool = (
        False  # backward: query rows are evenly spaced, and, but for SOFT, 32 bits find an element of Q
    )
    TOKENS_FIRST: bool = False  # forward: a tile is [BN, BM], not [BM, BN]
    PERSISTENT: bool = (
        False  # forward: a program scores many documents: with a descriptor, ONE_CHUNK, no winners, no LONG
    )
    LONG_QUERIES: bool = False  # forward: a query may have more than ROWS_PER_QUERY tokens; then BM is ROWS_PER_QUERY
    SPLIT_FP32: bool = False  # forward: fp32 rows as sums of two fp16 terms: with ONE_CHUNK, no NORMALIZE, no WALK
    SHORT_DOCUMENTS: bool = (
        False  # forward: a document may have fewer tokens than a tile, which then reads on into the next
    )
    ENCODING: Any = ""  # ragged forward: how documents are kept, see `stored` and `residual`; "" as queries are
    SOFT: bool = False  # forward: soft maxima; with SHORT_DOCUMENTS, no TOKENS_FIRST, no SPLIT_FP32, not PERSISTENT
    INT8_TERMS: int = 0  # of "int8": the int8 terms of a query row, with ONE_CHUNK; 0: multiplied as it is
    EVEN_D: bool = False  # of residual codes that come as words: BD divides d
    SPLIT_DOCUMENTS: bool = (
        False  # ragged forward: a program scores a section of a document; no SOFT, no CANDIDATES, no WALK
    )
    PDL: bool = False  # with SECTIONS: the launch after it begins before it has ended, and waits then; from sm_90 on


class Sm90Config(NamedTuple):
    """Compile-time choices of `maxsim_forward_specialized`, correct for Ld >= BN, and of `maxsim_row_maxima`."""

    BN: int  # document tokens of a tile
    BD: int  # features, all of them: a power of two >= d
    ROWS_PER_QUERY: int  # rows that one query takes, a power of two: 2 to 128
    STAGES: int  # tiles of the ring
    OPERAND_IN_REGISTERS: bool  # queries in registers, else in shared memory
    ARGMAX: bool
    SUM_ROWS: bool = False  # `maxsim_row_maxima`: scores, not maxima
    NORMALIZE: bool = False
    PRECOMPUTED_SCALES: bool = False  # scales of document tokens, or inverse norms, are read beside each tile
    MMA_ROWS: int = 64  # query rows of a product
    SMALL_M: bool = False  # at most ROWS query rows, not RESIDENT: each warp group has documents of its own
    INT8_TERMS: int = 0  # of int8 documents: the int8 terms of a query row; unless FEW a product has 64 of them
    SPLIT_FP32: bool = False  # fp32 tokens as sums of two fp16 terms: with FEW, no NORMALIZE, no ARGMAX
    ENCODING: str = ""  # with GIVEN: FP8 documents, as `Config.STORED` names them as bytes, which warps convert to fp16


class RowMaximaOutputArgs(NamedTuple):
    """Where `maxsim_row_maxima` stores what it finds: the rows' maxima ``[K, rows]``, or scores ``[Nq, stride]``; and
    winners ``[K, rows]``, None where nobody asks for them."""

    maxima: Any
    scores: Any
    stride: Any
    argmax: Any


class Sm90LargeDConfig(NamedTuple):
    """Compile-time choices of `maxsim_forward_wide`, correct for every shape with Ld >= BN, or Ld < BN if
    SHORT_DOCUMENTS."""

    BN: int  # document tokens of a tile
    ROWS_PER_QUERY: int  # rows that one query takes, a power of two: 2 to 64
    STAGES: int  # steps of the ring
    NORMALIZE: bool = False  # over norms that are read
    SHORT_DOCUMENTS: bool = False  # a document is shorter than its tile, which also holds tokens of the next documents


class TopKInputArgs(NamedTuple):
    """Scores ``[Nq, n]`` in fp32 and their int64 `indices`, the columns where that is None.

    Or, of int64 words, parts ``[parts, Nq, width]`` that follow each other: the scores' bits, and indices.
    """

    scores: Any
    indices: Any
    stride_row: Any
    stride_part: Any = None
    width: Any = None


class TopKOutputArgs(NamedTuple):
    """fp32 scores and int64 indices of each row, `stride` from row to row."""

    scores: Any
    indices: Any
    stride: Any


class PointArgs(NamedTuple):
    """Clouds ``[B, count, d]``, of which the first `lengths` ``[B]`` points count; all where that is None."""

    ptr: Any
    stride_batch: Any
    stride_n: Any
    stride_d: Any
    count: Any
    lengths: Any


class PointTermArgs(NamedTuple):
    """Some points of some clouds as `chamfer_terms` leaves them: rows of `width` features, a multiple of BD.

    Split fp32: hi ``[room, width]``, below it lo. `each` rows are one cloud's, a multiple of every tile: the first of
    them is its point `first`, those of batch `batch` come first.
    """

    rows: Any
    norms: Any
    scales: Any
    room: Any
    width: Any
    each: Any
    batch: Any
    first: Any


class LinearArgs(NamedTuple):
    """Those of a linear layer ``[d, width]``, and its bias ``[d]``, contiguous, None where absent."""

    ptr: Any
    stride_n: Any
    stride_d: Any
    bias: Any


class HeadOperands(NamedTuple):
    """What document tokens are made of: hidden states ``[K, Ld, width]``, a layer to d features, both perhaps as
    tensor descriptors too.

    `tiles`: all rows of some documents that follow one another, for each that may be their first: ``[n, rows, width]``
    in blocks ``[1, BN, BK]``. `steps`: blocks ``[BD, BK]`` of the layer.
    """

    H: Any
    W: Any
    tiles: Any
    steps: Any
    width: Any
    d: Any


class HeadConfig(NamedTuple):
    """Compile-time choices of the kernels of `head`, each correct for every shape with d <= BD and
    Nq * ROWS_PER_QUERY <= PARTS * BM."""

    BN: int  # document tokens of a tile, those of several documents if they are short
    BD: int  # their features: a power of two
    BK: int  # features of hidden states in a step
    BM: int  # query rows that meet a tile of tokens at a time
    ROW_TILES: int  # so many times, a power of two
    ROWS_PER_QUERY: int  # rows that one query takes, a power of two <= BM
    NORMALIZE: bool
    WIDE_OFFSETS: int  # 2: offsets of features may exceed 32 bits
    PRECISION: str
    FUSED_LOOP: bool  # over the steps of all tiles: the next tile is asked for while one is scored
    EVEN_D: bool  # BD is d
    WAIT_EACH_STEP: bool  # then the sums of a step are waited for: of wgmma


class ChamferConfig(NamedTuple):
    """Compile-time choices of the kernels of nearest points, each correct for every shape."""

    BM: int  # points of P
    BN: int  # points of the other cloud in a step
    BD: int  # coordinates of a step; up to 4 are d, held in registers
    METRIC: str  # "sqeuclidean" or "l1"
    WIDE_OFFSETS: int = 1  # 2: offsets of coordinates may exceed 32 bits
    KEY_CLASSES: int = 1  # classes of a part that codes tell apart, for `chamfer_winners`
    CLASS_RUN: int = 1  # neighbours of a class
    SPLIT_FP32: bool = False  # terms are those of fp32
    SINGLE_STEP: bool = False  # BD covers their rows


# The integers of a group are arguments at run time that compiled code knows nothing of, so that no size compiles it
# anew, but for two kinds. VECTOR: strides of which it knows whether all are multiples of 16, so that it can load
# vectors; where tensors are contiguous that follows from d. UNIT: strides that become constants where they are 1.
VECTOR_STRIDES: dict[type, tuple[str, ...]] = {
    QueryArgs: ("stride_n", "stride_l"),
    DocumentArgs: ("stride_owner", "stride_doc", "stride_l"),
    LinearArgs: ("stride_n",),
    PointArgs: ("stride_batch", "stride_n"),
    PointTermArgs: ("room", "width", "each"),
}
UNIT_STRIDES: dict[type, tuple[str, ...]] = {
    QueryArgs: ("stride_d", "mask_stride_l", "weight_stride_l"),
    DocumentArgs: ("stride_d", "mask_stride_l"),
    LinearArgs: ("stride_d",),
    PointArgs: ("stride_d",),
}
