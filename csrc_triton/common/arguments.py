"""Kernel arguments: tensors with their strides and masks, in named tuples, and the configuration tuples of the kernels.

`backward/arguments.py` has the arguments of the backward. Two layouts share every kernel. In the cross product, D is
`[Nd, Ld, d]`, and every document is scored against every query. With candidates, D is `[Nq, K, Ld, d]`, and a document
is scored against the one query that owns it. A document begins at `owner * stride_owner + k * stride_doc`. In the cross
product `stride_owner` and `owner` are 0.
"""

from typing import Any, NamedTuple


class QueryArgs(NamedTuple):
    """Query tokens `[Nq, Lq, d]` with an optional mask and weight `[Nq, Lq]`, None if absent."""

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
    """Document tokens `[Nd, Ld, d]` or `[Nq, K, Ld, d]` with an optional mask, None if absent."""

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
    """Dequantization of encoded documents: `value = code * scale + minimum`, in fp32.

    There is no addition if `minimum` is None. `scale_stride` and `minimum_stride` are the strides from token to token.
    They are 1 if each token has its own value, and 0 if one value serves all tokens.
    """

    scale: Any
    scale_stride: Any
    minimum: Any
    minimum_stride: Any


class CodecDequantArgs(NamedTuple):
    """`DequantArgs` of residual codes with the tables that decode them, see `formats/residual.py`.

    `codes` holds the codes of all tokens, int32 or int64. `centroids` is `[centroids_count, d]` and contiguous.
    `weights` holds the weights of the buckets in fp32.
    """

    scale: Any
    scale_stride: Any
    minimum: Any
    minimum_stride: Any
    codes: Any
    centroids: Any
    centroids_count: Any
    weights: Any


class EncodedDocumentArgs(NamedTuple):
    """Contiguous documents `[K, Ld, d]`, for kernels that also read them through a tensor descriptor.

    For int8 and FP8, `scale[k * stride_doc + t * stride_l]` is the scale of token t of document k. For fp32, `scale` is
    None.
    """

    ptr: Any
    scale: Any
    stride_doc: Any
    stride_l: Any


class Operands(NamedTuple):
    """Sources of the tokens that a program reads.

    `tiles` is a tensor descriptor of D. `terms` is the `TermArgs` of Q, or None. `counts` is the `DequantArgs` of D.
    `tau` is the temperature with KernelConfig.SOFT. Each of these is None if it is not used.
    """

    Q: Any
    D: Any
    tiles: Any
    terms: Any
    counts: Any
    d: Any
    tau: Any


class QueryRows(NamedTuple):
    """Query rows of a tile.

    `ptr` points to each row, `number` is its row in the terms of Q, and `ok` says whether it exists and is not masked.
    `sums` is the sum of its features, or None unless `DequantArgs` have a minimum. With KernelConfig.SOFT, similarities
    are multiplied by `scale` and exponents by `rate`. `scale` is also the power of two that a row is divided by for FP8
    (`formats/encoded.py`). Both are None otherwise.
    """

    ptr: Any
    number: Any
    ok: Any
    sums: Any
    scale: Any
    rate: Any


class Document(NamedTuple):
    """One document.

    `ptr` points to its first token and `mask` to its first mask element. Without a mask, `mask` is not used. `row` is
    its first row in a tensor descriptor, and `length` is its number of tokens.
    """

    ptr: Any
    mask: Any
    row: Any
    length: Any


class OutputArgs(NamedTuple):
    """Scores, and the argmax or None. With KernelConfig.SOFT soft maxima replace the argmax."""

    scores: Any
    argmax: Any


class SizeArgs(NamedTuple):
    """Numbers of queries, documents (per query for candidates), tokens per query, and tokens per document."""

    Nq: Any
    K: Any
    Lq: Any
    Ld: Any


class PackedSizeArgs(NamedTuple):
    """Sizes of a packed call.

    Nq and K are the numbers of queries and documents (per query for candidates). Tq and Td are the numbers of packed
    query tokens and document tokens. `max_seqlen_q` is the length of the longest query.
    """

    Nq: Any
    K: Any
    Tq: Any
    Td: Any
    max_seqlen_q: Any


class TermArgs(NamedTuple):
    """Query rows as int8 terms.

    `hi [capacity_rows, BD]` is followed by `lo [capacity_rows, BD]`, with scales `[capacity_rows]`.
    """

    queries: Any
    query_scales: Any
    query_capacity_rows: Any


class SegmentArgs(NamedTuple):
    """Segments of packed rows, int32 or int64 and contiguous.

    Query i has rows `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]` of Q. A document has `lengths` rows of D from `offsets`
    on, both `[Nd]`, or `[Nq, K]` for candidates. `pairs [P, 2]` lists the (query, document) pairs to score. If it is
    None, all pairs are scored, or each query and its candidates.

    If `lengths` is None, `offsets` is `[Nd + 1]` and a document ends where the next document begins. If `cu_seqlens_q`
    or `offsets` is None, every query has `q_each` rows or every document has `d_each` rows. Only the first `q_lengths
    [Nq]` or `lengths` rows of each are valid, or all rows if that is None, too.
    """

    cu_seqlens_q: Any
    offsets: Any
    lengths: Any
    pairs: Any
    q_lengths: Any = None
    q_each: Any = None
    d_each: Any = None


class SplitArgs(NamedTuple):
    """Workspace of documents that are cut into splits, and the argmax of whole documents. An absent tensor is None.

    `maxima [max_splits, rows]` holds the row maxima of each split in fp32. `split_argmax` holds their int32 argmax, a
    token of the document or NO_TOKEN. With a document mask, `kept_flags [max_splits]` in int32 says whether a split
    keeps a token. `norms` holds inverse norms of the rows, which multiply the maxima last. `argmax [K, rows]` is the
    result for whole documents.

    There are at most `max_splits` splits of `split_tokens` tokens, ordered by document. If `split_tokens` is None, the
    device computes it.
    """

    maxima: Any
    split_argmax: Any
    kept_flags: Any
    norms: Any
    argmax: Any
    max_splits: Any
    split_tokens: Any


class SoftSplitArgs(NamedTuple):
    """Results of documents that are cut into `count` splits of `split_tokens` tokens. The last split may be shorter.

    `argmax` holds the soft maxima of the splits in fp32, `[K * count, Nq, Lq]` or `[Nq, K * count, Lq]` for candidates.
    With a document mask, `kept_flags` in int32 says whether each split keeps a token. Otherwise it is None.
    """

    argmax: Any
    kept_flags: Any
    split_tokens: Any
    count: Any


class MaskPatchArgs(NamedTuple):
    """Masked document tokens to overwrite in shared memory, as `maxsim_patches` computes them.

    `tokens` is D `[K, d_each, d]`. `sources [K]` in int32 is the first kept token of each document, which overwrites
    the masked tokens. `bits [K, 2, tiles]` in int32 has a set bit for each masked token, 32 tokens per word. The first
    tile of a document begins with its first kept token.
    """

    tokens: Any
    bits: Any
    sources: Any


class KernelConfig(NamedTuple):
    """Compile-time choices of the generic kernels.

    Every value is correct for every shape, and a table selects fast values.
    """

    BM: int  # query rows of a tile
    BN: int  # document tokens of a tile
    BD: int  # features of a step
    ROWS_PER_QUERY: int = 1  # forward: rows of each query in a tile, a power of two <= BM
    LANES: int = 1  # forward: threads that share a row, 4 if tensor cores leave rows in quads as WGMMA does, else 1
    CANDIDATES: bool = False
    SINGLE_STEP: bool = True  # BD covers d
    NORMALIZE: bool = False
    WIDE_OFFSETS: int = 0  # 64-bit offsets of: 0 whole documents and queries, 1 also tokens, 2 also features
    PRECISION: str = "ieee"  # of tl.dot on fp32 operands
    # Backward: query rows are evenly spaced. Unless SOFT, offsets of elements of Q also fit 32 bits.
    EVEN_ROW_STRIDE: bool = False
    TOKENS_FIRST: bool = False  # forward: a tile is [BN, BM], not [BM, BN]
    # Forward: a program scores many documents. With a tensor descriptor, SINGLE_STEP, no argmax, no LONG_QUERIES.
    PERSISTENT: bool = False
    # Forward: a query may have more than ROWS_PER_QUERY tokens. Then BM is ROWS_PER_QUERY.
    LONG_QUERIES: bool = False
    # Forward: fp16 terms of fp32 rows: 2, or 1 if TF32 is allowed. 0: rows stay whole. With SINGLE_STEP, no NORMALIZE,
    # not PERSISTENT.
    FP32_TERMS: int = 0
    # Forward: a document may have fewer tokens than a tile, which then reads on into the next document.
    SHORT_DOCUMENTS: bool = False
    # Packed forward: the format of documents, see `formats/encoded.py` and `formats/residual.py`. "": the query dtype.
    ENCODING: Any = ""
    # Forward: soft maxima. With SHORT_DOCUMENTS, no TOKENS_FIRST, no FP32_TERMS, not PERSISTENT.
    SOFT: bool = False
    # With SINGLE_STEP and int8 numbers ("int8" and binary documents): int8 terms of a query row. 0: rows stay whole.
    INT8_TERMS: int = 0
    EVEN_D: bool = False  # residual codes that are read as words: BD divides d
    # Packed forward, or SOFT: a program scores a split of a document. Without SOFT no CANDIDATES, not PERSISTENT.
    SPLIT_DOCUMENTS: bool = False
    # With SPLIT_DOCUMENTS: programmatic dependent launch. The next launch starts early and waits. From sm_90 on.
    PDL: bool = False


class Sm90Config(NamedTuple):
    """Compile-time choices of `maxsim_forward_sm90`, correct for Ld >= BN, and of `maxsim_row_maxima_sm90`."""

    BN: int  # document tokens of a tile
    BD: int  # features, all of them: a power of two >= d
    ROWS_PER_QUERY: int  # rows of each query, a power of two from 2 to 128
    STAGES: int  # pipeline stages, one tile each
    OPERAND_IN_REGISTERS: bool  # query rows in registers, else in shared memory
    ARGMAX: bool
    SUM_ROWS: bool = False  # `maxsim_row_maxima_sm90`: stores scores, not maxima
    NORMALIZE: bool = False
    PRECOMPUTED_SCALES: bool = False  # scales or inverse norms of document tokens are read with each tile
    MMA_ROWS: int = 64  # query rows of a product
    # At most MMA_ROWS query rows, no OPERAND_IN_REGISTERS. Each warp group has its own documents.
    SMALL_M: bool = False
    # int8 or binary documents: int8 terms of a query row. A product has 64 of them unless SMALL_M.
    INT8_TERMS: int = 0
    # fp16 terms of fp32 tokens: 2, or 1 if TF32 is allowed. 0: half precision, or encoded documents. No NORMALIZE. With
    # ARGMAX or MASK only if PRECOMPUTED_TERMS. Query rows in registers unless SMALL_M.
    FP32_TERMS: int = 0
    PRECOMPUTED_TERMS: bool = False  # `split_tokens` split the documents, otherwise conversion warps do
    MASK: bool = False  # PRECOMPUTED_TERMS with scales that are 0 for masked tokens
    # With PRECOMPUTED_SCALES: FP8 documents, "e4m3" or "e5m2". Bytes are converted to fp16. With INT8_TERMS and BD 128:
    # codes, such as "bits1_half" or "bits4_rotated" as in `KernelConfig`. Words are decoded to int8.
    ENCODING: str = ""
    PROGRAMS_PER_SM: int = 1  # with SMALL_M: 2 programs have fewer registers. The launch has to limit them, too
    PING_PONG: bool = True  # consumer warp groups issue their products in turns. Not used with SMALL_M


class RowMaximaOutputArgs(NamedTuple):
    """Outputs of `maxsim_row_maxima_sm90`, None if not asked for.

    `maxima` is `[K, rows]`. `scores` is `[Nq, stride]`. `argmax` is `[K, rows]`.
    """

    maxima: Any
    scores: Any
    stride: Any
    argmax: Any


class Sm90LargeDConfig(NamedTuple):
    """Compile-time choices of `maxsim_forward_sm90_large_d`.

    They are correct for every shape with Ld >= BN, or with Ld < BN if SHORT_DOCUMENTS.
    """

    BN: int  # document tokens of a tile
    ROWS_PER_QUERY: int  # rows of each query, a power of two from 2 to 64
    STAGES: int  # pipeline stages, one step each
    NORMALIZE: bool = False  # with precomputed norms
    ARGMAX: bool = False
    MASK: bool = False  # with precomputed norms, or 1 without NORMALIZE, which are negative for masked tokens
    SHORT_DOCUMENTS: bool = False  # a document is shorter than its tile, which also holds tokens of the next documents
    # These have the same values in each call, and `Sm90Config` explains them.
    SMALL_M: bool = False
    INT8_TERMS: int = 0
    PRECOMPUTED_SCALES: bool = True


class TopKInputArgs(NamedTuple):
    """Candidates of a top-k, as scores `[Nq, n]` in fp32 with int64 `indices`. The indices are the columns if None.

    Alternatively the candidates are consecutive parts `[parts, Nq, width]` of int64 words, which hold the bits of the
    scores, and indices.
    """

    scores: Any
    indices: Any
    stride_row: Any
    stride_part: Any = None
    width: Any = None


class TopKOutputArgs(NamedTuple):
    """fp32 scores and int64 indices of each row, with `stride` elements from row to row."""

    scores: Any
    indices: Any
    stride: Any


class PointArgs(NamedTuple):
    """Point clouds `[B, count, d]`.

    The first `lengths [B]` points of each cloud are valid, or all points if `lengths` is None.
    """

    ptr: Any
    stride_batch: Any
    stride_n: Any
    stride_d: Any
    count: Any
    lengths: Any


class PointTermArgs(NamedTuple):
    """Points of some clouds as `chamfer_terms` stores them, in rows of `width` features, a multiple of BD.

    With split fp32, `hi [room, width]` is followed by `lo`. Each cloud has `cloud_rows` rows, a multiple of every tile.
    The first row of a cloud is its point `first`, and the first rows belong to cloud `batch`.
    """

    rows: Any
    norms: Any
    scales: Any
    room: Any
    width: Any
    cloud_rows: Any
    batch: Any
    first: Any


class LinearArgs(NamedTuple):
    """Weight `[d, width]` of a linear layer, and its bias `[d]`, contiguous, or None if absent."""

    ptr: Any
    stride_n: Any
    stride_d: Any
    bias: Any


class HeadOperands(NamedTuple):
    """Sources of projected document tokens: hidden states `[K, Ld, width]` and a linear layer with d outputs.

    `tiles` and `steps` are tensor descriptors or None. `tiles` has shape `[n, rows, width]`, blocks `[1, BN, BK]`, and
    all rows of some consecutive documents for each document that may be their first. `steps` has blocks `[1, BD, BK]`
    of the weights or their terms `[terms, d, width]`.
    """

    H: Any
    W: Any
    tiles: Any
    steps: Any
    width: Any
    d: Any


class HeadConfig(NamedTuple):
    """Compile-time choices of the kernels in `head/kernels.py`.

    Each is correct for every shape with d <= BD and Nq * ROWS_PER_QUERY <= ROW_TILES * BM. `maxsim_head_tokens` serves
    any d.
    """

    BN: int  # document tokens of a tile, from several documents if they are short
    BD: int  # their features, or features of a part of them: a power of two
    BK: int  # features of hidden states in a step
    BM: int  # query rows that a tile of tokens is scored against at a time
    ROW_TILES: int  # number of such row tiles, a power of two
    ROWS_PER_QUERY: int  # rows of each query, a power of two <= BM
    NORMALIZE: bool
    WIDE_OFFSETS: int  # 2: offsets of features may exceed 32 bits
    TF32_TERMS: int  # of fp32 features: 0 on AMD, 1 if TF32 is allowed, else 2
    FUSED_LOOP: bool  # one loop over the steps of all tiles, which loads the next tile while one is scored
    D_DIVISOR: int  # greatest common divisor of d and BD
    WAIT_EACH_STEP: bool  # WGMMA: the loop waits for the sums of each step


class ChamferConfig(NamedTuple):
    """Compile-time choices of the nearest-point kernels. Every value is correct for every shape."""

    BM: int  # points of P
    BN: int  # points of the other cloud in a step
    BD: int  # coordinates of a step. If BD <= 4, BD is d and registers hold all coordinates
    METRIC: str  # "sqeuclidean" or "l1"
    WIDE_OFFSETS: int = 1  # 2: offsets of coordinates may exceed 32 bits
    KEY_CLASSES: int = 1  # classes of points in a part that codes distinguish, for `chamfer_select`
    CLASS_RUN: int = 1  # consecutive points of a class
    SPLIT_FP32: bool = False  # terms are split fp32
    SINGLE_STEP: bool = False  # BD covers the rows of terms


class WardMergeArgs(NamedTuple):
    """The clusters of the next round of Ward's method: ``p row(one) + q row(two) - between``. Contiguous ``[B, left]``.

    A cluster that is not merged has two = one, p = 1, q = 0, and between = 0.
    """

    one: Any  # int64, position in this round
    two: Any  # int64
    p: Any  # fp64
    q: Any  # fp64
    between: Any  # fp64
    counts: Any  # int64 [B], the number of clusters of each document


# Integers of a named tuple are run-time arguments, and compiled code assumes nothing about them. No size thus causes
# another compilation. There are two exceptions. Compiled code knows whether all VECTOR_STRIDES are multiples of 16,
# which allows vector loads. For contiguous tensors this follows from d. UNIT_STRIDES become constants if they are 1.
VECTOR_STRIDES: dict[type, tuple[str, ...]] = {
    QueryArgs: ("stride_n", "stride_l"),
    DocumentArgs: ("stride_owner", "stride_doc", "stride_l"),
    LinearArgs: ("stride_n",),
    PointArgs: ("stride_batch", "stride_n"),
    PointTermArgs: ("room", "width", "cloud_rows"),
}
UNIT_STRIDES: dict[type, tuple[str, ...]] = {
    QueryArgs: ("stride_d", "mask_stride_l", "weight_stride_l"),
    DocumentArgs: ("stride_d", "mask_stride_l"),
    LinearArgs: ("stride_d",),
    PointArgs: ("stride_d",),
}
