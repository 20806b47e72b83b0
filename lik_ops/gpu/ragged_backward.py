"""The Triton backend for ragged layouts, backward: what it looks up, which kernels a gradient takes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..csrc_triton import ragged as fields
from ..csrc_triton import ragged_items as item_kernels
from ..csrc_triton.arguments import Bounds, Lists, Upstream, Zeros
from ..csrc_triton.backward_lists import maxsim_row_norms
from ..csrc_triton.backward_queries import maxsim_grad_queries
from ..csrc_triton.backward_ragged import maxsim_grad_packed_documents, maxsim_join_packed_pieces
from ..csrc_triton.backward_ragged_few import maxsim_grad_few_packed_documents, maxsim_grad_packed_documents_apart
from ..csrc_triton.backward_ragged_lists import BUCKETS, OFFSETS, maxsim_list_packed_winners
from ..csrc_triton.backward_unified import maxsim_finish, maxsim_scatter
from ..segments import Cut, Ragged
from . import backward_configs, launcher
from .arguments import architecture, checked_grid, on_device, wide_of
from .backward import require_nondeterminism_allowed
from .configs import Launch, cdiv
from .ragged_forward import documents_of, queries_of, segments_of

_FIELDS, _FIRST, _LENGTH, _QUERY = (x.value for x in (fields.FIELDS, fields.FIRST, fields.LENGTH, fields.QUERY))
_BLOCK, _QUERIES, _RANKED = (x.value for x in (item_kernels.BLOCK, item_kernels.QUERIES, item_kernels.RANKED))
_FILL = item_kernels.FILL.value
_MOST_RANKED = 8192  # items that are sorted by comparing each with each
_FEW = 2  # rows of D for each winner, beyond which most win nothing
_FILLING = 2112  # programs that write zeros: many more than are resident, so that they end together
_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
_PARTIAL_BYTES = 16 * 2**20  # of what pieces of tiles add up to
_LIST_BYTES = 16 * 2**20  # of the lists of winners, which are made for some documents at a time
_LIST_OVERLAP = 64  # documents that are listed twice, in two chunks: a tile may meet one more, and the last of a chunk
_LIST_ROWS = 1024  # query rows from which on winners are listed: fewer are a few steps of a walk
_LIST_TOKENS = (BUCKETS.value - 1) * OFFSETS.value // 2  # rows of D that entries can tell apart
_PIECE_ROWS, _PIECE_ITEMS = 512, 16  # at least, of a tile that is cut
_INT32_MAX = 2**31 - 1


@functools.cache
def _options(device: torch.device) -> dict[str, int]:
    """Launch options of the kernels that find and sort items."""
    arch = architecture(device)
    return backward_configs.lookup(arch).options(arch)


def sorted_items(items: Tensor, key: int, reach: bool, zeros: Zeros | None = None) -> tuple[Tensor, Tensor | None]:
    """Items ascending by a field, equal ones in order; and for each the row behind its document and all before. On the
    way `zeros` are written."""
    count = items.shape[1]
    if count > _MOST_RANKED:
        if zeros is not None:
            zeros.ptr.zero_()
            zeros.marks[: zeros.places].zero_()
        items = items[:, torch.sort(items[key], stable=True).indices]
        return items, (items[_FIRST] + items[_LENGTH]).cummax(0).values if reach else None
    out = torch.empty_like(items)
    behind = items.new_empty(count) if reach else None
    programs = cdiv(count, _RANKED)
    filling = 0 if zeros is None else max(programs, min(cdiv(zeros.elements, _FILL), _FILLING))
    grid, args = (programs + filling,), (items, out, behind, zeros, count, key)
    launcher.launch(item_kernels.maxsim_sort_items, grid, args, _options(items.device))
    return out, behind


def found_starts(keys: Tensor, reach: Tensor | None, places: int, step: int, most: int) -> Tensor:
    """Where the keys from ``t * step`` on begin, for `places` of t; then where those of `reach` beyond it do."""
    count = keys.shape[0]
    starts = torch.empty(places * (1 if reach is None else 2), dtype=torch.int32, device=keys.device)
    args = keys, reach, starts, count, places, step, most, count.bit_length()
    launcher.launch(item_kernels.maxsim_find_starts, (cdiv(places, _BLOCK),), args, _options(keys.device))
    return starts


class Lookup:
    """The query of each packed row, and the items, as `Upstream` has them."""

    def __init__(self, c: Cut, most: int, strides: tuple[int, int]) -> None:
        self.c = c
        self.items = torch.empty((_FIELDS, c.items), dtype=torch.int64, device=c.Q.device)
        self.query = torch.empty(c.Tq, dtype=torch.int32, device=c.Q.device)
        if not c.covered:
            self.query.fill_(-1)
        grid = checked_grid(cdiv(c.items, _BLOCK) + cdiv(c.queries, _QUERIES))
        numbers = c.queries, c.columns, c.Tq, c.Td, c.items, most, *strides
        args = segments_of(c), self.items, self.query, *numbers, c.candidates
        launcher.launch(item_kernels.maxsim_ragged_items, grid, args, _options(c.Q.device))

    def by_query(self) -> tuple[Tensor, Tensor | None]:
        """Items, those of each query together, and for pairs where each query's begin."""
        if self.c.pairs is None:
            return self.items, None
        items, _ = sorted_items(self.items, _QUERY, False)
        return items, found_starts(items[_QUERY], None, self.c.queries + 1, 1, self.c.queries)

    def by_tile(self, tile: int, tiles: int) -> tuple[Tensor, Tensor]:
        """Items sorted by their documents' first rows, and which of them each tile of rows of D may meet."""
        items, reach = sorted_items(self.items, _FIRST, True)
        return items, found_starts(items[_FIRST], reach, tiles + 1, tile, self.c.Td)


class _Listing(NamedTuple):
    """How the winners of documents are listed: `blocks` blocks of `rows` query rows of each, and of `room` documents at
    a time those of `own` for the tiles that first meet these; the others are also in the next chunk."""

    launch: Launch
    blocks: int
    rows: int
    room: int
    own: int

    def lists(self, device: torch.device) -> Lists:
        new, blocks = functools.partial(torch.empty, dtype=torch.int32, device=device), self.room * self.blocks
        return Lists(new(blocks * self.rows), new(blocks * (BUCKETS.value + 1)), self.rows, self.blocks)

    def bounds(self, starts: Tensor, first: int, count: int) -> Bounds:
        """Of the chunk from document `first` on, of `count`."""
        return Bounds(starts) if self.own >= count else Bounds(starts, first, self.own, self.room)


class _Call:
    """One backward: what its kernels share."""

    def __init__(self, grad_scores: Tensor, c: Cut, argmax: Tensor, normalize: bool) -> None:
        self.c, self.normalize = c, normalize
        self.arch, self.d = architecture(c.Q.device), c.Q.shape[-1]
        self.wide = wide_of(c.Q, c.D.flatten(0, -2))
        self.queries, self.documents = queries_of(c), documents_of(c)
        stride_q, stride_k = grad_scores.stride() if c.pairs is None else (grad_scores.stride(0), 0)
        self.lookup = Lookup(c, argmax.shape[1], (stride_q, stride_k))
        self.up = Upstream(grad_scores, stride_q, stride_k, argmax.contiguous())
        # Packed rows are one query; the rows of D one document.
        self.sizes = 1, c.columns, c.Tq, c.Td

    def layout(self) -> dict:
        return {"candidates": self.c.candidates, "normalize": self.normalize, "wide": self.wide}

    def _run(self, kernel, grid: tuple[int, ...], args: tuple, launch: Launch) -> None:
        launcher.launch(kernel, grid, (*args, launch.config), launch.options(self.arch))

    def _by_query(self) -> Upstream:
        items, starts = self.lookup.by_query()
        return self.up._replace(query=self.lookup.query, items=items, count=items.shape[1], starts=starts)

    def into_queries(self, grad_Q: Tensor | None, grad_weight: Tensor | None) -> None:
        launch = backward_configs.gather(self.c.Q.dtype, self.d, ragged=True, **self.layout())
        grid = checked_grid(cdiv(self.c.Tq, launch.config.BM))
        args = self.queries, self.documents, self._by_query(), grad_Q, grad_weight, *self.sizes, self.d
        self._run(maxsim_grad_queries, grid, args, launch)

    def _pieces(self, tile: int, tiles: int) -> int:
        """Into how many pieces the sum of a tile is cut: few rows of D must not leave the GPU to few programs."""
        if tiles >= _PROGRAMS:
            return 1
        most = self.c.items // _PIECE_ITEMS if self._single() else self.c.Tq // _PIECE_ROWS
        return max(1, min(cdiv(_PROGRAMS, tiles), most, _PARTIAL_BYTES // (4 * tile * tiles * self.d)))

    def _single(self) -> bool:
        """Whether an item is of one query."""
        return self.c.candidates or self.c.pairs is not None

    def _most_rows(self) -> int:
        """Rows that hardly a query has more of."""
        if self.c.q_each is not None:
            return self.c.q_each
        return 2 * cdiv(self.c.Tq, self.c.queries)

    def _few(self) -> bool:
        """Whether most rows of D win nothing, whoever wins."""
        c = self.c
        own = c.columns * c.Tq if c.pairs is None else c.items * cdiv(c.Tq, c.queries)
        return self._single() and c.Td > _FEW * own

    def _listing(self, launch: Launch) -> _Listing | None:
        """How winners are listed; None where they are not."""
        Tq, count = self.c.Tq, self.c.items
        if self._single() or Tq < _LIST_ROWS or self.c.Td > _LIST_TOKENS:
            return None
        listing, rows = backward_configs.packed_lists(self.arch, launch, Tq)
        blocks = cdiv(Tq, rows)
        room = min(_LIST_BYTES // (4 * blocks * (rows + BUCKETS.value + 1)), count)
        if room < count:
            own = (room - min(_LIST_OVERLAP, room // 4)) // 2 * 2  # chunks begin at multiples of 16 bytes
            return _Listing(listing, blocks, rows, room, own) if own else None
        return _Listing(listing, blocks, rows, room, count)

    def _sum_tiles(self, items: Tensor, starts: Tensor, launch: Launch, listing: _Listing | None, sums: tuple) -> None:
        """Sum all tiles: from lists, of a chunk of documents after the other; or by a walk, as tiles are that no chunk
        serves. `sums` are the grid, and the arguments behind the lists."""
        up = self.up._replace(query=None if self._single() else self.lookup.query, count=items.shape[1])
        grid, *others = sums

        def run(items: Tensor, bounds: Bounds, lists: Lists | None, launch: Launch) -> None:
            args = self.queries, self.documents, up, items, bounds, lists, *others
            self._run(maxsim_grad_packed_documents, grid, args, launch)

        if listing is None:
            run(items, Bounds(starts), None, launch)
            return
        lists = listing.lists(items.device)
        for first in range(0, up.count, listing.own):
            part = items[:, first:]
            programs = checked_grid(min(part.shape[1], listing.room) * listing.blocks)
            self._run(maxsim_list_packed_winners, programs, (up, part, *lists), listing.launch)
            run(part, listing.bounds(starts, first, up.count), lists, launch)
        if listing.own < up.count:
            run(items, listing.bounds(starts, 0, up.count), None, replace(launch, max_registers=255))

    def into_documents(self, grad_D: Tensor) -> None:
        rows = cdiv(self.c.Tq, self.c.queries) if self._single() else None
        flat = self.c.Tq * abs(self.c.Q.stride(-2)) + self.d * abs(self.c.Q.stride(-1)) <= _INT32_MAX
        options = {"rows": rows, "flat": flat, **self.layout()}
        norms = self._row_norms() if self.normalize else None
        (self._into_few if self._few() else self._into_all)(grad_D, norms, options)

    def _into_few(self, grad_D: Tensor, norms: Tensor | None, options: dict) -> None:
        tile, count, Td = backward_configs.few_tokens(self.arch), self.c.items, self.c.Td
        (tiles,) = checked_grid(cdiv(Td, tile))
        marks, starts = torch.empty((2, 2 * (tiles + 1)), dtype=torch.int32, device=grad_D.device)
        zeros = Zeros(grad_D, grad_D.numel(), marks, tiles + 1)
        items, reach = sorted_items(self.lookup.items, _FIRST, True, zeros)
        given = self.queries, self.documents, self.up._replace(count=count), items
        into = starts, marks, norms, grad_D
        launch = backward_configs.apart_documents(
            self.arch, self.c.Q.dtype, self._most_rows(), self.d, flat=options["flat"], **self.layout()
        )
        apart = *given, reach, *into, Td, self.d, count.bit_length(), tile
        grid = checked_grid(count + cdiv(tiles + 1, _BLOCK))
        self._run(maxsim_grad_packed_documents_apart, grid, apart, launch)
        launch = backward_configs.grad_packed_documents(self.arch, self.c.Q.dtype, self.d, few=True, **options)
        together = *given, *into, self.c.Tq, Td, self.d, tile
        self._run(maxsim_grad_few_packed_documents, (min(tiles, _PROGRAMS),), together, launch)

    def _into_all(self, grad_D: Tensor, norms: Tensor | None, options: dict) -> None:
        table = functools.partial(
            backward_configs.grad_packed_documents, self.arch, self.c.Q.dtype, self.d, few=False, **options
        )
        launch = table(listed=True)
        listing = self._listing(launch)
        if listing is None:
            launch = table()
        tile, Td = launch.config.BN, self.c.Td
        (tiles,) = checked_grid(cdiv(Td, tile))
        items, starts = self.lookup.by_tile(tile, tiles)
        pieces = self._pieces(tile, tiles)
        partial = None
        if pieces > 1:
            partial = torch.empty(pieces * tiles * tile * self.d, dtype=torch.float32, device=grad_D.device)
        sums = (tiles, pieces), norms, partial, grad_D, *self.sizes, self.d
        self._sum_tiles(items, starts, launch, listing, sums)
        if partial is not None:
            joined = self.documents, partial, grad_D, pieces, Td, self.d
            self._run(maxsim_join_packed_pieces, (tiles,), joined, launch)

    def _row_norms(self) -> Tensor:
        rows = self.c.Tq
        norms = self.c.Q.new_empty(rows, dtype=torch.float32)
        launch = backward_configs.gather(self.c.Q.dtype, self.d, **self.layout())
        grid = checked_grid(cdiv(rows, launch.config.BM))
        self._run(maxsim_row_norms, grid, (self.queries, norms, 1, rows, self.d), launch)
        return norms

    def scatter(self, sum_D: Tensor) -> None:
        """Add into zeroed fp32 sums of the rows of D, a program for the rows of a tile and all that they meet."""
        launch = backward_configs.scatter(self.arch, self.c.Q.dtype, self.d, ragged=True, **self.layout())
        grid = (*checked_grid(cdiv(self.c.Tq, launch.config.BM)), 1)
        most = self.c.columns if self.c.pairs is None else self.c.pairs.shape[0]
        args = self.queries, self.documents, self._by_query(), None, sum_D, *self.sizes, self.d, most
        self._run(maxsim_scatter, grid, args, launch)

    def finish_documents(self, sum_D: Tensor, grad_D: Tensor) -> None:
        launch = backward_configs.gather(self.c.D.dtype, self.d, **self.layout() | {"candidates": False})
        rows = self.c.Td
        grid = checked_grid(cdiv(rows, launch.config.BM))
        weightless = self.queries._replace(weight=None, weight_stride_n=None, weight_stride_l=None)
        self._run(maxsim_finish, grid, (self.documents, weightless, sum_D, grad_D, None, 1, 1, rows, 0, self.d), launch)


def backward_cut(
    grad_scores: Tensor, c: Cut, argmax: Tensor, normalize: bool, needs: list[bool], unified: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of Q, D and q_weight; `unified`: that of D by fp32 atomic adds, else each summed in a fixed order.

    Raises:
        RuntimeError: `unified` under `torch.use_deterministic_algorithms(True)`.
    """
    if unified:
        require_nondeterminism_allowed()
    trivial = 0 in (c.Q.numel(), c.D.numel(), argmax.numel(), c.queries, c.columns)
    new = torch.zeros_like if trivial else torch.empty_like
    grad_Q, grad_D = (
        new(x, memory_format=torch.contiguous_format) if need else x.new_empty(0)
        for x, need in zip((c.Q, c.D), needs, strict=False)
    )
    weight_shape = c.Q.shape[:-1] if needs[2] else (0,)
    grad_weight = (c.Q.new_zeros if trivial else c.Q.new_empty)(weight_shape, dtype=torch.float32)
    if trivial or not any(needs):
        return grad_Q, grad_D, grad_weight
    with on_device(c.Q.device):
        call = _Call(grad_scores, c, argmax, normalize)
        if needs[0] or needs[2]:
            call.into_queries(grad_Q if needs[0] else None, grad_weight if needs[2] else None)
        if needs[1] and unified:
            sum_D = torch.zeros(c.D.shape, dtype=torch.float32, device=c.D.device)
            call.scatter(sum_D)
            call.finish_documents(sum_D, grad_D)
        elif needs[1]:
            call.into_documents(grad_D)
    return grad_Q, grad_D, grad_weight


def backward_ragged(
    grad_scores: Tensor, r: Ragged, argmax: Tensor, normalize: bool, needs: list[bool], unified: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward_cut` of what a cut spells out."""
    return backward_cut(grad_scores, Cut.of(r, argmax.shape[1]), argmax, normalize, needs, unified)
