"""Argument groups of the backward kernels, and tuples that their functions pass to each other."""

from typing import Any, NamedTuple


class UpstreamArgs(NamedTuple):
    """Inputs of the backward: score gradients `[Nq, K]` with any strides, the contiguous argmax, and the sizes.

    `norms` holds the inverse norms ``1 / ||q||`` of all query rows, or is None.

    Packed layouts have one query of Lq rows, K documents (or candidates of each query), and Ld rows of D. `query` holds
    the query of each packed row, or -1. `items` holds `count` pairs as `maxsim_ragged_items` writes them, sorted as the
    kernel needs them. For pair lists, `items` is sorted by query, and `starts` holds the first pair of each query.

    `scale` `[Ld]` for each document, contiguous, holds the dequantization scales of the tokens, or is None.

    `terms` `[rows, 2 d]` holds the fp16 terms of fp32 query rows, as `maxsim_round_rows` writes them, or is None. Then
    `norms` holds their scales times the inverse norms.
    """

    grad_scores: Any
    stride_q: Any
    stride_k: Any
    argmax: Any
    Nq: Any
    K: Any
    Lq: Any
    Ld: Any
    norms: Any = None
    terms: Any = None
    query: Any = None
    items: Any = None
    count: Any = None
    starts: Any = None
    scale: Any = None


class TileSum(NamedTuple):
    """Inputs of a sum over a `GradientTile` or a `PairRange`: some features of the query rows, times `scale`.

    `scale` is a scalar, or one value for each token with `UpstreamArgs.terms`.
    """

    tile: Any
    up: Any
    Q: Any
    columns: Any
    scale: Any
    d: Any


class StepRows(NamedTuple):
    """Query rows of a step.

    `hit` says whether the argmax of a row is in the tile. `token` is that token, or -1. `coefficient` is ``grad_score *
    q_weight / ||q||``. `terms` points to the fp16 terms of a row with `UpstreamArgs.terms`, else it is not used.
    """

    pointers: Any
    hit: Any
    token: Any
    coefficient: Any
    terms: Any


class GradientTile(NamedTuple):
    """Tokens of document k of `owner` from `t0` on, and the rows that may have their argmax there.

    The rows are entries `begin` to `end` of the document's list. If `entries` is None, they are all rows that the
    document is scored against. `slots` and `u0` are described in `PairRange`.
    """

    owner: Any
    k: Any
    t0: Any
    begin: Any
    end: Any
    entries: Any
    slots: Any = None
    u0: Any = None


class GradientTarget(NamedTuple):
    """Destination of a document gradient.

    Token t of the document at `base`, if `ok`, is written to row `rows` of `gradient`. If `is_partial`, the sums are
    stored in rows `slots` of `partial`, in fp32. `gradient` or `partial` may be None. `scale` is the `scale` of
    `UpstreamArgs`, indexed by `rows`.
    """

    base: Any
    t: Any
    ok: Any
    gradient: Any
    rows: Any
    scale: Any = None
    partial: Any = None
    slots: Any = None
    is_partial: Any = None


class PairRange(NamedTuple):
    """Pairs and query rows that the gradient of a tile of packed document tokens is summed over.

    The range covers pairs `lo` to `hi`, sorted by their first rows, and query rows `r0` to `r1` of each. `t0` is the
    first row of D of the tile.

    If `slots` is not None, the tile has more tokens than one sum holds. Token t of the tile has slot ``slots[t]``, and
    BN slots from `u0` on are summed. If `lists` is not None, `lo` and `hi` count blocks of pairs. Only rows whose
    argmax is in the tile's bucket of the document contribute.
    """

    lo: Any
    hi: Any
    t0: Any
    r0: Any
    r1: Any
    slots: Any = None
    u0: Any = None
    lists: Any = None


class TileBucketArgs(NamedTuple):
    """Argmax lists of documents from `first` on, as `maxsim_list_argmax` writes them.

    Each document has `blocks` blocks of query rows and `tiles` tiles. `entries` and `starts` are None if the kernel
    reads all rows instead.
    """

    entries: Any
    starts: Any
    first: Any
    blocks: Any
    tiles: Any


class PartialSumArgs(NamedTuple):
    """fp32 partial sums of tiles, or None if each tile is summed at once.

    A piece covers `rows` entries of a document's list.
    """

    partial: Any
    rows: Any


class PackedBucketArgs(NamedTuple):
    """Argmax lists of packed documents, as `maxsim_list_packed_argmax` writes them.

    Each pair has `blocks` blocks of `rows` query rows. `entries` `[pairs, blocks, rows]`, int32, holds the entries of a
    bucket together. `starts` `[pairs, blocks, MAX_BUCKETS + 1]`, int32, holds the first entry of each bucket in its
    block.
    """

    entries: Any
    starts: Any
    rows: Any
    blocks: Any


class TilePairArgs(NamedTuple):
    """Ranges of sorted pairs that may touch each tile of packed document tokens, as `maxsim_find_starts` computes them.

    The lists of all pairs may exceed the workspace. Then chunks of `chunk_pairs` pairs are listed one after the other,
    each with the pairs up to `room` pairs from its `first` on. A launch with lists sums the tiles of its chunk. Their
    pairs begin among the pairs that the chunk owns and end within the listed pairs. A launch without lists sums the
    tiles that no chunk covers. `chunk_pairs` is None if one launch sums all tiles.
    """

    starts: Any
    first: Any = None
    chunk_pairs: Any = None
    room: Any = None


class SharedTileArgs(NamedTuple):
    """Tiles of rows of D that several documents, or many pairs, touch.

    `marks` holds the number of these tiles, one flag for each tile, and the list of these tiles. `starts` is described
    in `TilePairArgs`. `reach` holds for each sorted pair the row of D after its document and all earlier documents.
    """

    marks: Any
    starts: Any
    reach: Any = None


class StepPairs(NamedTuple):
    """Pairs of a step, lane by lane.

    `first` is the begin of the pair's document relative to the tile, and `length` its number of tokens. `begin` and
    `stop` bound its query rows. `argmax` and `score` are added to a row number to locate its argmax and the gradient of
    its score.

    With lists all lanes have one bucket of a document. `first` and `length` describe the bucket, `begin` and `stop`
    bound its entries, and `argmax` is the row that the entries are relative to.
    """

    first: Any
    length: Any
    begin: Any
    stop: Any
    argmax: Any
    score: Any


class RowSumArgs(NamedTuple):
    """fp32 sums over the rows of a tensor `[N, K, Lq, d]`, from which their gradient is computed.

    `scale` holds the dequantization scales of the rows, as in `UpstreamArgs`. If the sums come in `parts`, each part
    begins `step` elements after the previous part. Otherwise `parts` is None.
    """

    ptr: Any
    K: Any
    Lq: Any
    scale: Any = None
    parts: Any = None
    step: Any = None


class ZeroFillArgs(NamedTuple):
    """Memory that a launch fills with zeros in addition to its other work.

    It has `elements` elements of a gradient and the first `marks_count` elements of `marks`.
    """

    ptr: Any
    elements: Any
    marks: Any
    marks_count: Any


class SoftUpstreamArgs(NamedTuple):
    """Inputs of the backward of soft MaxSim.

    These are the score gradients `[Nq, K]` with any strides, the soft maxima of query rows, and the sizes. The soft
    maxima of a query are contiguous. In the cross product the soft maxima of all queries are contiguous.
    """

    grad_scores: Any
    stride_q: Any
    stride_k: Any
    lse: Any
    lse_stride_owner: Any
    lse_stride_k: Any
    Nq: Any
    K: Any
    Lq: Any
    Ld: Any


class SoftOperand(NamedTuple):
    """Rows of one side of a product.

    These are pointers, which rows are kept, and the feature stride. Rows that a program owns also have their features,
    if one step covers them, and their inverse norms.
    """

    ptr: Any
    ok: Any
    stride_d: Any
    tile: Any
    scale: Any


class Sm90SoftConfig(NamedTuple):
    """Compile-time choices of `maxsim_soft_rows` and `maxsim_soft_tokens`, correct for every shape."""

    BN: int  # rows of a streamed tile
    BD: int  # features, all of them: a power of two >= d
    STAGES: int  # pipeline stages, at least 2
    OPERAND_IN_REGISTERS: bool  # owned rows are kept in registers, else in shared memory
