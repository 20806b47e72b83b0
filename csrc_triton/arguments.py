"""What kernels are passed: tensors with their strides and masks, grouped so that a launch reads like a call.

Two layouts share every kernel. Cross product: D is ``[Nd, Ld, d]`` and every document meets every query. Candidates:
D is ``[Nq, K, Ld, d]`` and a document meets the one query that owns it. A document is found at
``owner * stride_owner + k * stride_doc``, with ``stride_owner = 0`` and ``owner = 0`` for the cross product.
"""

from typing import Any, NamedTuple


class Queries(NamedTuple):
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


class Documents(NamedTuple):
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


class Operands(NamedTuple):
    """What a program reads tokens from: Q and D, and of D a tensor descriptor and `Terms`, or None."""

    Q: Any
    D: Any
    tiles: Any
    terms: Any
    d: Any


class Rows(NamedTuple):
    """Query rows of a tile: where each begins, its number in the terms of Q, and whether it counts."""

    ptr: Any
    number: Any
    ok: Any


class Document(NamedTuple):
    """A document: where its tokens and their mask begin, if there is one; its first row in a descriptor; its length."""

    ptr: Any
    mask: Any
    row: Any
    length: Any


class Output(NamedTuple):
    """Scores, and winners or None."""

    scores: Any
    argmax: Any


class Sizes(NamedTuple):
    """Queries, documents (of each query, for candidates), query tokens, document tokens."""

    Nq: Any
    K: Any
    Lq: Any
    Ld: Any


class PackedSizes(NamedTuple):
    """Queries, documents (of each query, for candidates), packed query and document tokens, the most of a query."""

    Nq: Any
    K: Any
    Tq: Any
    Td: Any
    most: Any


class Terms(NamedTuple):
    """fp32 rows as `split_tokens` leaves them: hi [room, BD], below it lo [room, BD], and the scales [room].

    Those of documents are read through a descriptor.
    """

    queries: Any
    query_scales: Any
    document_scales: Any
    query_room: Any
    document_room: Any


class Segments(NamedTuple):
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


class Patches(NamedTuple):
    """What document tokens that do not count are overwritten with in shared memory: the first one that does.

    Made by `maxsim_patches`, of documents ``tokens [K, d_each, d]``: which is the first that does, ``sources
    [K]``, int32; and of each tile, the first of which begins with it, which do not, as bits of int32 ``[K, 2, tiles]``,
    32 tokens each.
    """

    tokens: Any
    bits: Any
    sources: Any


class Upstream(NamedTuple):
    """What the backward starts from: the gradient of the scores ``[Nq, K]`` (any strides), the contiguous winners, and
    the sizes of the call. `norms` are ``1 / ||q||`` of all query rows, or None.

    Packed layouts are one query of Lq rows, K documents (or candidates of each query) and Ld rows of D. They also have
    the query of each packed row (-1: none), `count` items as `maxsim_ragged_items` writes them, sorted as a kernel
    needs them, and for pairs, sorted by query, where each query's items begin.
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


class Sum(NamedTuple):
    """What of a `Tile` or a `Walk` is summed: some features of the query rows, times `scale`."""

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


class Tile(NamedTuple):
    """Tokens of document k of `owner` from `t0` on, and the rows that may have won them: entries `begin` to `end` of
    the document's list, or, where `entries` is None, all rows that the document meets."""

    owner: Any
    k: Any
    t0: Any
    begin: Any
    end: Any
    entries: Any


class Target(NamedTuple):
    """Where the gradient of document tokens goes: token t of the document at `base`, where `ok`, to row ``rows`` of
    `gradient`. Of a sum in pieces, those `left` are kept in rows `slots` of `partial`, in fp32. Either may be None."""

    base: Any
    t: Any
    ok: Any
    gradient: Any
    rows: Any
    partial: Any = None
    slots: Any = None
    left: Any = None


class Walk(NamedTuple):
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


class TileLists(NamedTuple):
    """The winners of documents from `first` on, as `maxsim_list_winners` lists them: of `blocks` blocks of query rows,
    for each of `tiles` tiles. `entries` and `starts` are None where all rows are read instead."""

    entries: Any
    starts: Any
    first: Any
    blocks: Any
    tiles: Any


class Pieces(NamedTuple):
    """fp32 sums of pieces of tiles, None where each tile is summed at once; a piece is `rows` entries of a document's
    list."""

    partial: Any
    rows: Any


class Lists(NamedTuple):
    """The winners of packed documents, as `maxsim_list_packed_winners` lists them.

    Each item has `blocks` blocks of `rows` query rows. Entries ``[items, blocks, rows]`` are int32, those of a bucket
    together; `starts` ``[items, blocks, BUCKETS + 1]``, int32, is where buckets begin in their block.
    """

    entries: Any
    starts: Any
    rows: Any
    blocks: Any


class Bounds(NamedTuple):
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


class SharedTiles(NamedTuple):
    """Tiles of rows of D that several documents, or many items, touch: `marks` says how many there are, for each tile
    whether it is one, and lists them. `starts` are those of `Bounds`. `reach` is, for each sorted item, the row of D
    behind its document and all before it."""

    marks: Any
    starts: Any
    reach: Any = None


class Items(NamedTuple):
    """A step of a walk, lane by lane: where the item's document begins in the tile and how many tokens it has, its
    query rows from `begin` to `stop`, and what a row's number is added to for its winner and its score's gradient.

    With lists all lanes have one bucket of a document in its place: where the bucket begins in the tile and how many
    tokens it has, its entries from `begin` to `stop`, and in `winners` the row that they count from.
    """

    first: Any
    length: Any
    begin: Any
    stop: Any
    winners: Any
    score: Any


class RowSums(NamedTuple):
    """fp32 sums over the rows of a tensor ``[N, K, Lq, d]``, which their gradient is made of."""

    ptr: Any
    K: Any
    Lq: Any


class Zeros(NamedTuple):
    """What is filled with zeros beside other work: `elements` of a gradient, and the first `places` of `marks`."""

    ptr: Any
    elements: Any
    marks: Any
    places: Any


class Config(NamedTuple):
    """Compile-time choices. Every value is correct for every shape; a table picks the fast ones."""

    BM: int  # query rows of a tile
    BN: int  # document tokens of a tile
    BD: int  # features of a step
    SLOT: int  # forward: rows that one query takes in a tile, a power of two <= BM
    LANES: int  # forward: threads that share a row, 4 if the matrix unit leaves rows in quads as wgmma does, else 1
    CANDIDATES: bool
    ONE_CHUNK: bool  # BD covers d
    NORMALIZE: bool
    WIDE: int  # what needs 64-bit offsets: 0 whole documents and queries, 1 also tokens, 2 also features
    PRECISION: str  # of tl.dot on fp32 operands
    FLAT: bool = False  # backward: query rows are evenly spaced, and an element of Q is found with 32 bits
    TOKENS_FIRST: bool = False  # forward: a tile is [BN, BM], not [BM, BN]
    WALK: bool = False  # forward: a program scores many documents: with a descriptor, ONE_CHUNK, no winners, no LONG
    LONG: bool = False  # forward: a query may have more than SLOT tokens; then BM is SLOT
    SPLIT: bool = False  # forward: fp32 rows as sums of two fp16 terms: with ONE_CHUNK, no NORMALIZE, no WALK
    PACKED: bool = False  # forward: documents of any length follow each other


class Specialization(NamedTuple):
    """Compile-time choices of `maxsim_forward_specialized`, each correct for every shape with Ld >= BN, and of
    `maxsim_row_maxima`, correct for every shape."""

    BN: int  # document tokens of a tile
    BD: int  # features, all of them: a power of two >= d
    SLOT: int  # rows that one query takes, a power of two: 2 to 128
    STAGES: int  # tiles of the ring
    RESIDENT: bool  # queries in registers, else in shared memory
    ARGMAX: bool
    SUMS: bool = False  # `maxsim_row_maxima`: scores, not maxima
    NORMALIZE: bool = False


class Found(NamedTuple):
    """Where `maxsim_row_maxima` stores what it finds: the rows' maxima ``[K, rows]``, or scores ``[Nq, stride]``; and
    winners ``[K, rows]``, None where nobody asks for them."""

    maxima: Any
    scores: Any
    stride: Any
    argmax: Any


class WideSpecialization(NamedTuple):
    """Compile-time choices of `maxsim_forward_wide`, each correct for every shape with Ld >= BN."""

    BN: int  # document tokens of a tile
    SLOT: int  # rows that one query takes, a power of two: 2 to 64
    STAGES: int  # steps of the ring
    NORMALIZE: bool = False


class Candidates(NamedTuple):
    """Scores ``[Nq, n]`` in fp32 and their int64 `indices`, the columns where that is None.

    Or, of int64 words, parts ``[parts, Nq, width]`` that follow each other: the scores' bits, and indices.
    """

    scores: Any
    indices: Any
    stride_row: Any
    stride_part: Any = None
    width: Any = None


class Best(NamedTuple):
    """fp32 scores and int64 indices of each row, `stride` from row to row."""

    scores: Any
    indices: Any
    stride: Any


# The integers of a group are arguments at run time that compiled code knows nothing of, so that no size compiles it
# anew, but for two kinds. VECTOR: strides of which it knows whether all are multiples of 16, so that it can load
# vectors; where tensors are contiguous that follows from d. UNIT: strides that become constants where they are 1.
VECTOR: dict[type, tuple[str, ...]] = {
    Queries: ("stride_n", "stride_l"),
    Documents: ("stride_owner", "stride_doc", "stride_l"),
}
UNIT: dict[type, tuple[str, ...]] = {
    Queries: ("stride_d", "mask_stride_l", "weight_stride_l"),
    Documents: ("stride_d", "mask_stride_l"),
}
