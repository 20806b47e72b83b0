"""The Triton backend for ragged layouts, backward: what it looks up, which kernels a gradient takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.segments import Cut, Ragged
from ...csrc_triton.backward import list_pairs as item_kernels
from ...csrc_triton.backward import pairs as fields
from ...csrc_triton.backward.arguments import Bounds, Lists, SharedTiles, Upstream, Zeros
from ...csrc_triton.backward.documents.packed import maxsim_grad_packed_documents, maxsim_join_packed_pieces
from ...csrc_triton.backward.documents.packed_buckets import BUCKETS, OFFSETS, maxsim_list_packed_winners
from ...csrc_triton.backward.documents.packed_sparse import maxsim_grad_disjoint_documents, maxsim_grad_shared_tiles
from ..runtime import launcher
from ..runtime.arguments import (
    architecture,
    checked_grid,
    on_device,
    packed_documents,
    packed_queries,
    segments_of,
    wide_of,
)
from ..runtime.capture import Calls
from ..tuning import backward_configs
from ..tuning.architectures import Launch, cdiv
from .call import GradientCall
from .dense import Gradients, outputs_of, require_nondeterminism_allowed

_FIELDS, _FIRST, _LENGTH, _QUERY = (x.value for x in (fields.FIELDS, fields.FIRST, fields.LENGTH, fields.QUERY))
_BLOCK, _QUERIES, _RANKED = (x.value for x in (item_kernels.BLOCK, item_kernels.QUERIES, item_kernels.RANKED))
_FILL = item_kernels.FILL.value
_MOST_RANKED = 8192  # items that are sorted by comparing each with each
_FEW = 2  # rows of D for each winner, beyond which most win nothing
_FILLING = 2112  # programs that write zeros: many more than are resident, so that they end together
_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
_PARTIAL_BYTES = 16 * 2**20  # of the sums of pieces
_LIST_BYTES = 16 * 2**20  # of the lists of winners, which are made for some documents at a time
_LIST_OVERLAP = 64  # documents that two chunks both list, for the tiles that meet documents of both
_LIST_ROWS = 1024  # query rows from which on winners are listed: fewer are a few steps of a walk
_LIST_TOKENS = (BUCKETS.value - 1) * OFFSETS.value // 2  # rows of D that entries can tell apart
_PIECE_ROWS, _PIECE_ITEMS = 512, 16  # at least, of a tile that is cut
calls = Calls()


@functools.cache
def _options(device: torch.device) -> dict[str, int]:
    """Launch options of the kernels that find and sort items."""
    arch = architecture(device)
    return backward_configs.lookup(arch).options(arch)


def sorted_items(items: Tensor, key: int, reach: bool, zeros: Zeros | None = None) -> tuple[Tensor, Tensor | None]:
    """Items ascending by a field, equal ones in order; and for each the row of D behind its document and all before.

    `zeros` are written beside.
    """
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
    """What `maxsim_find_starts` writes."""
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
    """How winners are listed: of each document in `blocks` blocks of `rows` query rows, of `room` documents at a time.

    Tiles take the lists of the chunk that their first document is one of the first `own` of. The other documents of a
    chunk are listed again in the next.
    """

    launch: Launch
    blocks: int
    rows: int
    room: int
    own: int

    def lists(self, device: torch.device) -> Lists:
        new, blocks = partial(torch.empty, dtype=torch.int32, device=device), self.room * self.blocks
        return Lists(new(blocks * self.rows), new(blocks * (BUCKETS.value + 1)), self.rows, self.blocks)

    def bounds(self, starts: Tensor, first: int, count: int) -> Bounds:
        """Of the chunk from document `first` on, of `count`."""
        return Bounds(starts) if self.own >= count else Bounds(starts, first, self.own, self.room)


class _PackedGradients:
    """One backward of packed tokens: how they are cut, and what kernels take."""

    def __init__(self, grad_scores: Tensor, c: Cut, argmax: Tensor, normalize: bool) -> None:
        self.c = c
        stride_q, stride_k = grad_scores.stride() if c.pairs is None else (grad_scores.stride(0), 0)
        self.lookup = Lookup(c, argmax.shape[1], (stride_q, stride_k))
        up = Upstream(grad_scores, stride_q, stride_k, argmax.contiguous(), 1, c.columns, c.Tq, c.Td)
        wide = wide_of(c.Q, c.D.flatten(0, -2))
        self.call = GradientCall(packed_queries(c), packed_documents(c), up, c.candidates, normalize, wide, packed=True)

    def by_query(self) -> GradientCall:
        """With the items of each query together."""
        items, starts = self.lookup.by_query()
        up = self.call.up._replace(query=self.lookup.query, items=items, count=items.shape[1], starts=starts)
        return self.call._replace(up=up)

    def _pieces(self, tile: int, tiles: int) -> int:
        """Into how many pieces the sum of a tile is cut: few rows of D must not leave the GPU to few programs."""
        if tiles >= _PROGRAMS:
            return 1
        most = self.c.items // _PIECE_ITEMS if self._single() else self.c.Tq // _PIECE_ROWS
        return max(1, min(cdiv(_PROGRAMS, tiles), most, _PARTIAL_BYTES // (4 * tile * tiles * self.call.d)))

    def _single(self) -> bool:
        """Whether an item is of one query."""
        return self.c.candidates or self.c.pairs is not None

    def _most_rows(self) -> int:
        """Rows that few queries have more of."""
        if self.c.q_each is not None:
            return self.c.q_each
        return 2 * cdiv(self.c.Tq, self.c.queries)

    def _sparse(self) -> bool:
        """Whether most rows of D win nothing, whoever wins."""
        c = self.c
        own = c.columns * c.Tq if c.pairs is None else c.items * cdiv(c.Tq, c.queries)
        return self._single() and c.Td > _FEW * own

    def _listing(self, launch: Launch) -> _Listing | None:
        """How winners are listed; None where they are not."""
        Tq, count = self.c.Tq, self.c.items
        if self._single() or Tq < _LIST_ROWS or self.c.Td > _LIST_TOKENS:
            return None
        listing, rows = backward_configs.packed_lists(self.call.arch, launch, Tq)
        blocks = cdiv(Tq, rows)
        room = min(_LIST_BYTES // (4 * blocks * (rows + BUCKETS.value + 1)), count)
        if room < count:
            own = (room - min(_LIST_OVERLAP, room // 4)) // 2 * 2  # chunks begin at multiples of 16 bytes
            return _Listing(listing, blocks, rows, room, own) if own else None
        return _Listing(listing, blocks, rows, room, count)

    def into_documents(self, grad_D: Tensor) -> None:
        call = self.call.with_norms()
        rows = cdiv(self.c.Tq, self.c.queries) if self._single() else None
        table = partial(backward_configs.grad_packed_documents, call.kind, rows=rows, flat=call.flat)
        (self._into_sparse if self._sparse() else self._into_all)(call, grad_D, table)

    def _into_sparse(self, call: GradientCall, grad_D: Tensor, table: Callable[..., Launch]) -> None:
        """Disjoint documents one by one, and the tiles that others share."""
        tile, count, Td = backward_configs.shared_tile(call.arch), self.c.items, self.c.Td
        (tiles,) = checked_grid(cdiv(Td, tile))
        marks, starts = torch.empty((2, 2 * (tiles + 1)), dtype=torch.int32, device=grad_D.device)
        zeros = Zeros(grad_D, grad_D.numel(), marks, tiles + 1)
        items, reach = sorted_items(self.lookup.items, _FIRST, True, zeros)
        given = *call.groups[:2], call.up._replace(items=items, count=count)
        launch = backward_configs.disjoint_documents(call.kind, self._most_rows(), flat=call.flat)
        args = *given, SharedTiles(marks, starts, reach), grad_D, call.d, count.bit_length(), tile
        call.run(maxsim_grad_disjoint_documents, checked_grid(count + cdiv(tiles + 1, _BLOCK)), args, launch)
        shared = *given, SharedTiles(marks, starts), grad_D, call.d, tile
        call.run(maxsim_grad_shared_tiles, (min(tiles, _PROGRAMS),), shared, table(shared=True))

    def _into_all(self, call: GradientCall, grad_D: Tensor, table: Callable[..., Launch]) -> None:
        launch = table(shared=False, listed=True)
        listing = self._listing(launch)
        if listing is None:
            launch = table(shared=False)
        tile = launch.config.BN
        (tiles,) = checked_grid(cdiv(self.c.Td, tile))
        items, starts = self.lookup.by_tile(tile, tiles)
        up = call.up._replace(query=None if self._single() else self.lookup.query, items=items, count=items.shape[1])
        pieces = self._pieces(tile, tiles)
        sums = None
        if pieces > 1:
            sums = torch.empty(pieces * tiles * tile * call.d, dtype=torch.float32, device=grad_D.device)

        def sum_tiles(up: Upstream, bounds: Bounds, lists: Lists | None, launch: Launch) -> None:
            args = *call.groups[:2], up, bounds, lists, sums, grad_D, call.d
            call.run(maxsim_grad_packed_documents, (tiles, pieces), args, launch)

        if listing is None:
            sum_tiles(up, Bounds(starts), None, launch)
        else:
            lists = listing.lists(grad_D.device)
            for first in range(0, up.count, listing.own):
                part = up._replace(items=items[:, first:])
                programs = checked_grid(min(part.items.shape[1], listing.room) * listing.blocks)
                call.run(maxsim_list_packed_winners, programs, (part, lists), listing.launch)
                sum_tiles(part, listing.bounds(starts, first, up.count), lists, launch)
            if listing.own < up.count:  # tiles that no chunk serves
                sum_tiles(up, listing.bounds(starts, 0, up.count), None, replace(launch, max_registers=255))
        if sums is not None:
            joined = call.documents, sums, grad_D, pieces, self.c.Td, call.d
            call.run(maxsim_join_packed_pieces, (tiles,), joined, launch)


def backward_cut(
    grad_scores: Tensor, c: Cut, argmax: Tensor, normalize: bool, needs: list[bool], unified: bool
) -> Gradients:
    """Gradients of Q, D and q_weight; `unified`: that of D by fp32 atomic adds, else each summed in a fixed order.

    Raises:
        RuntimeError: `unified` under `torch.use_deterministic_algorithms(True)`.
    """
    if unified:
        require_nondeterminism_allowed()
    winners = argmax.shape, argmax.stride(), argmax.dtype
    key = (*c.metadata(), grad_scores.stride(), *winners, normalize, *needs, unified)
    arguments = grad_scores, c, argmax, normalize, needs, unified
    return calls.run(key, (grad_scores, argmax, *c.tensors), c.Q.device, _backward, *arguments)


def _backward(
    grad_scores: Tensor, c: Cut, argmax: Tensor, normalize: bool, needs: list[bool], unified: bool
) -> Gradients:
    trivial = 0 in (c.Q.numel(), c.D.numel(), argmax.numel(), c.queries, c.columns)
    outputs = grad_Q, grad_D, grad_weight = outputs_of(c.Q, c.D, needs, trivial)
    if trivial or not any(needs):
        return outputs
    with on_device(c.Q.device):
        packed = _PackedGradients(grad_scores, c, argmax, normalize)
        if needs[0] or needs[2]:
            packed.by_query().into_queries(grad_Q if needs[0] else None, grad_weight if needs[2] else None)
        if needs[1] and unified:
            sum_D = torch.zeros((1, 1, c.Td, c.D.shape[-1]), dtype=torch.float32, device=c.D.device)
            call = packed.by_query()
            call.scatter(None, sum_D)
            call.finish(call.documents, sum_D, grad_D, None, call.wide, False)
        elif needs[1]:
            packed.into_documents(grad_D)
    return outputs


def backward_ragged(
    grad_scores: Tensor, r: Ragged, argmax: Tensor, normalize: bool, needs: list[bool], unified: bool
) -> Gradients:
    """`backward_cut` of what a cut spells out."""
    return backward_cut(grad_scores, Cut.of(r, argmax.shape[1]), argmax, normalize, needs, unified)
