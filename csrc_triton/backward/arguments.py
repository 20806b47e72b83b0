"""What kernels of the backward are passed besides `arguments`, and what their functions pass to each other."""

from typing import Any, NamedTuple


class UpstreamArgs(NamedTuple):
    """What the backward starts from: the gradient of the scores ``[Nq, K]`` (any strides), the contiguous winners, and
    the sizes of the call. `norms` are ``1 / ||q||`` of all query rows, or None.

    Packed layouts are one query of Lq rows, K documents (or candidates of each query) and Ld rows of D. They also have
    the query of each packed row (-1: none), `count` items as `maxsim_ragged_items` writes them, sorted as a kernel
    needs them, and for pairs, sorted by query, where each query's items begin.

    `scale` ``[Ld]`` for each document, contiguous, is what the numbers of its tokens are multiplied by, or None.
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
    query: Any = None
    items: Any = None
    count: Any = None
    starts: Any = None
    scale: Any = None


class TileSum(NamedTuple):
    """What of a `GradientTile` or a `PairRange` is summed: some features of the query rows, times `scale`."""

    tile: Any
    up: Any
    Q: Any
    columns: Any
    scale: Any
    d: Any


class StepRows(NamedTuple):
    """Query rows of a step: where they begin, whether they won a token of the tile, which one (-1: none), and what each
    counts for, ``g * w / ||q||``."""

    pointers: Any
    hit: Any
    token: Any
    coefficient: Any


class GradientTile(NamedTuple):
    """Tokens of document k of `owner` from `t0` on, and the rows that may have won them: entries `begin` to `end` of
    the document's list, or, where `entries` is None, all rows that the document meets."""

    owner: Any
    k: Any
    t0: Any
    begin: Any
    end: Any
    entries: Any


class GradientTarget(NamedTuple):
    """Where the gradient of document tokens goes: token t of the document at `base`, where `ok`, to row ``rows`` of
    `choose_backward`. Of a sum in pieces, those `left` are kept in rows `slots` of `partial`, in fp32. Either may be
    None. `scale` is that of `UpstreamArgs`, at the same rows."""

    base: Any
    t: Any
    ok: Any
    gradient: Any
    rows: Any
    scale: Any = None
    partial: Any = None
    slots: Any = None
    left: Any = None


class PairRange(NamedTuple):
    """What the gradient of a tile of packed document tokens is summed over: items `lo` to `hi` of those sorted by their
    first rows, and of each the query rows from `r0` to `r1`.

    `t0` is the tile's first row of D. Where `slots` is not None, the tile has more tokens than are summed at a time:
    BN slots from `u0` on are summed, and token t of the tile has slot ``slots[t]``. Where `lists` is not None, `lo` to
    `hi` are blocks of items, and of each only the rows count that won in the tile's bucket of the document.
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
    """The winners of documents from `first` on, as `maxsim_list_winners` lists them: of `blocks` blocks of query rows,
    for each of `tiles` tiles. `entries` and `starts` are None where all rows are read instead."""

    entries: Any
    starts: Any
    first: Any
    blocks: Any
    tiles: Any


class PartialSumArgs(NamedTuple):
    """fp32 sums of pieces of tiles, None where each tile is summed at once; a piece is `rows` entries of a document's
    list."""

    partial: Any
    rows: Any


class PackedBucketArgs(NamedTuple):
    """The winners of packed documents, as `maxsim_list_packed_winners` lists them.

    Each item has `blocks` blocks of `rows` query rows. Entries ``[items, blocks, rows]`` are int32, those of a bucket
    together; `starts` ``[items, blocks, BUCKETS + 1]``, int32, is where buckets begin in their block.
    """

    entries: Any
    starts: Any
    rows: Any
    blocks: Any


class TilePairArgs(NamedTuple):
    """Which of the sorted items may touch each tile of packed document tokens, as `maxsim_find_starts` finds it.

    Lists of all items may not fit the workspace. Then chunks of `own` items are listed one after the other, each with
    those up to `room` items from its `first` on. A launch with lists sums the tiles that its chunk serves: those whose
    items begin among its own and end before what is listed ends. A launch without lists sums the tiles that no chunk
    serves. `own` is None where one launch sums all tiles.
    """

    starts: Any
    first: Any = None
    own: Any = None
    room: Any = None


class SharedTileArgs(NamedTuple):
    """Tiles of rows of D that several documents, or many items, touch: `marks` says how many there are, for each tile
    whether it is one, and lists them. `starts` are those of `TilePairArgs`. `reach` is, for each sorted item, the row
    of D behind its document and all before it."""

    marks: Any
    starts: Any
    reach: Any = None


class StepPairs(NamedTuple):
    """A step of a walk, lane by lane: where the item's document begins in the tile and how many tokens it has, its
    query rows from `begin` to `stop`, and what a row's number is added to for its winner and its score's gradient.

    With lists all lanes have one bucket of a document in its place: where the bucket begins in the tile and how many
    tokens it has, its entries from `begin` to `stop`, and in `winners` the row that they count from.
    """

    first: Any
    length: Any
    begin: Any
    stop: Any
    argmax: Any
    score: Any


class RowSumArgs(NamedTuple):
    """fp32 sums over the rows of a tensor ``[N, K, Lq, d]``, which their gradient is made of; `scale` is that of the
    rows, as in `UpstreamArgs`.

    Where they come in `parts`, else None, each begins `step` numbers behind the one before.
    """

    ptr: Any
    K: Any
    Lq: Any
    scale: Any = None
    parts: Any = None
    step: Any = None


class ZeroFillArgs(NamedTuple):
    """What is filled with zeros beside other work: `elements` of a gradient, and the first `locate_hit_tokens` of
    `marks`."""

    ptr: Any
    elements: Any
    marks: Any
    marks_count: Any


class SoftUpstreamArgs(NamedTuple):
    """What the backward of soft MaxSim starts from: the gradient of the scores ``[Nq, K]`` (any strides), the soft
    maxima of query rows, those of a query or, in the cross product, of all queries behind one another; and sizes."""

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
    """Rows of a product: where they begin, which count, the distance of their features; and, of those that a program
    owns, their features where one step covers them, and their inverse norms."""

    ptr: Any
    ok: Any
    stride_d: Any
    tile: Any
    scale: Any


class Sm90SoftConfig(NamedTuple):
    """Compile-time choices of `maxsim_soft_rows` and `maxsim_soft_tokens`, each correct for every shape."""

    BN: int  # others of a tile
    BD: int  # features, all of them: a power of two >= d
    STAGES: int  # tiles of the ring, at least 2
    OPERAND_IN_REGISTERS: bool  # what is owned in registers, else in shared memory
