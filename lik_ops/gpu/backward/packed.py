"""Backward of packed layouts: the lookup of (query, document) pairs and the choice of kernels for a gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.segments import PackedArgs
from ...csrc_triton.backward import pairs as pair_kernels
from ...csrc_triton.backward.arguments import PackedBucketArgs, SharedTileArgs, TilePairArgs, UpstreamArgs, ZeroFillArgs
from ...csrc_triton.backward.documents.packed import (
    BUCKET_ROW_LIMIT,
    MAX_BUCKETS,
    maxsim_grad_packed_documents,
    maxsim_join_packed_pieces,
    maxsim_list_packed_argmax,
)
from ...csrc_triton.backward.documents.packed_sparse import maxsim_grad_disjoint_documents, maxsim_grad_shared_tiles
from ...formats.table import EncodedTokens
from ..forward.quantized import make_dequant_args, view_for_kernel
from ..runtime import launcher
from ..runtime.arguments import (
    architecture,
    check_grid,
    choose_offset_width,
    make_packed_document_args,
    make_packed_query_args,
    make_segment_args,
    use_device,
)
from ..runtime.capture import Calls
from ..tuning import backward_configs
from ..tuning.architectures import MEASURED_SMS, LaunchConfig, cdiv
from .call import GradientCall
from .dense import Gradients, allocate_gradients, require_nondeterminism_allowed, select_needed

_FIELD_COUNT, _FIELD_FIRST = pair_kernels.FIELD_COUNT.value, pair_kernels.FIELD_FIRST.value
_FIELD_LENGTH, _FIELD_QUERY = pair_kernels.FIELD_LENGTH.value, pair_kernels.FIELD_QUERY.value
_PAIRS_PER_PROGRAM, _QUERIES_PER_PROGRAM, _RANKED_PAIRS = (
    x.value for x in (pair_kernels.PAIRS_PER_PROGRAM, pair_kernels.QUERIES_PER_PROGRAM, pair_kernels.RANKED_PAIRS)
)
_FILL_ELEMENTS = pair_kernels.FILL_ELEMENTS.value
_MAX_RANKED_PAIRS = 8192  # sorted by comparing each pair with each other pair
# Rows of D for each argmax, beyond which most rows of D are no argmax.
_MIN_SPARSE_RATIO = 2
# Programs that write zeros. They are many more than run at a time, so that they end together.
_FILL_PROGRAMS = 16 * MEASURED_SMS
_TARGET_PROGRAMS = 2 * MEASURED_SMS
_MAX_PARTIAL_BYTES = 16 * 2**20  # partial sums of splits
_MAX_BUCKET_BYTES = 16 * 2**20  # argmax lists, which are built for some documents at a time
_BUCKET_OVERLAP_DOCUMENTS = 64  # documents that two chunks both list, for tiles with documents of both chunks
_MIN_BUCKETED_ROWS = 1024  # query rows from which on the argmax is listed; fewer rows are a few steps of a loop
_MAX_BUCKETED_TOKENS = (MAX_BUCKETS.value - 1) * BUCKET_ROW_LIMIT.value // 2  # rows of D that entries can distinguish
_MIN_SPLIT_ROWS, _MIN_SPLIT_PAIRS = 512, 16  # query rows or pairs of a split
captured_calls = Calls()


@functools.cache
def _get_options(device: torch.device) -> dict[str, int]:
    """Return the launch options of the kernels that find and sort pairs."""
    arch = architecture(device)
    return backward_configs.configure_pair_sort(arch).options(arch)


def sort_pairs(items: Tensor, key: int, reach: bool, zeros: ZeroFillArgs | None = None) -> tuple[Tensor, Tensor | None]:
    """Return pairs in ascending, stable order of a field, and the end row of all documents up to each pair.

    Args:
        items: pairs `[FIELD_COUNT, count]`.
        key: the field to sort by.
        reach: whether the end rows are needed. Otherwise they are None.
        zeros: memory that the same launch fills with zeros, or None.
    """
    count = items.shape[1]
    if count > _MAX_RANKED_PAIRS:
        if zeros is not None:
            zeros.ptr.zero_()
            zeros.marks[: zeros.marks_count].zero_()
        items = items[:, torch.sort(items[key], stable=True).indices]
        return items, (items[_FIELD_FIRST] + items[_FIELD_LENGTH]).cummax(0).values if reach else None
    out = torch.empty_like(items)
    end_rows = items.new_empty(count) if reach else None
    programs = cdiv(count, _RANKED_PAIRS)
    fill_programs = 0 if zeros is None else max(programs, min(cdiv(zeros.elements, _FILL_ELEMENTS), _FILL_PROGRAMS))
    grid, args = (programs + fill_programs,), (items, out, end_rows, zeros, count, key)
    launcher.launch(pair_kernels.maxsim_sort_items, grid, args, _get_options(items.device))
    return out, end_rows


def compute_starts(keys: Tensor, reach: Tensor | None, start_count: int, step: int, max_key: int) -> Tensor:
    """Return the output of `maxsim_find_starts`."""
    count = keys.shape[0]
    starts = torch.empty(start_count * (1 if reach is None else 2), dtype=torch.int32, device=keys.device)
    args = keys, reach, starts, count, start_count, step, max_key, count.bit_length()
    launcher.launch(
        pair_kernels.maxsim_find_starts, (cdiv(start_count, _PAIRS_PER_PROGRAM),), args, _get_options(keys.device)
    )
    return starts


class PairLookup:
    """The query of each packed row and the (query, document) pairs, in the form of `UpstreamArgs`."""

    def __init__(self, c: PackedArgs, max_seqlen_q: int, strides: tuple[int, int]) -> None:
        self.c = c
        self.items = torch.empty((_FIELD_COUNT, c.items), dtype=torch.int64, device=c.Q.device)
        self.query = torch.empty(c.Tq, dtype=torch.int32, device=c.Q.device)
        if not c.has_no_gaps:
            self.query.fill_(-1)
        grid = check_grid(cdiv(c.items, _PAIRS_PER_PROGRAM) + cdiv(c.queries, _QUERIES_PER_PROGRAM))
        numbers = c.queries, c.columns, c.Tq, c.Td, c.items, max_seqlen_q, *strides
        args = make_segment_args(c), self.items, self.query, *numbers, c.candidates
        launcher.launch(pair_kernels.maxsim_ragged_items, grid, args, _get_options(c.Q.device))

    def group_by_query(self) -> tuple[Tensor, Tensor | None]:
        """Return the pairs grouped by query and, for pair lists, the start of each query's pairs."""
        if self.c.pairs is None:
            return self.items, None
        items, _ = sort_pairs(self.items, _FIELD_QUERY, False)
        return items, compute_starts(items[_FIELD_QUERY], None, self.c.queries + 1, 1, self.c.queries)

    def sort_by_tile(self, tile: int, tiles: int) -> tuple[Tensor, Tensor]:
        """Return the pairs sorted by first document row, and the range of pairs that each tile of D may contain."""
        items, reach = sort_pairs(self.items, _FIELD_FIRST, True)
        return items, compute_starts(items[_FIELD_FIRST], reach, tiles + 1, tile, self.c.Td)


class _BucketConfig(NamedTuple):
    """Sizes of the argmax lists: each document has `blocks` blocks of `rows` query rows.

    A chunk lists `room` documents. Chunks begin `chunk_step` documents apart. A tile reads the lists of the chunk whose
    first `chunk_step` documents include the tile's first document. The next chunk lists the other documents again.
    """

    launch: LaunchConfig
    blocks: int
    rows: int
    room: int
    chunk_step: int

    def lists(self, device: torch.device) -> PackedBucketArgs:
        """Return memory for the lists of a chunk."""
        allocate, blocks = partial(torch.empty, dtype=torch.int32, device=device), self.room * self.blocks
        return PackedBucketArgs(
            allocate(blocks * self.rows), allocate(blocks * (MAX_BUCKETS.value + 1)), self.rows, self.blocks
        )

    def bounds(self, starts: Tensor, first: int, count: int) -> TilePairArgs:
        """Return the bounds of the chunk of documents from `first` on, out of `count` documents."""
        return (
            TilePairArgs(starts)
            if self.chunk_step >= count
            else TilePairArgs(starts, first, self.chunk_step, self.room)
        )


class _PackedGradientCall:
    """One backward call of packed tokens: its segments and its kernel arguments."""

    def __init__(
        self, grad_scores: Tensor, c: PackedArgs, argmax: Tensor, normalize: bool, stored: EncodedTokens | None
    ) -> None:
        counts, encoding = None, ""
        if stored is not None:
            data, encoding = view_for_kernel(c.D, stored.format, architecture(c.Q.device))
            c, counts = c._replace(D=data), make_dequant_args(stored)
        self.c = c
        stride_q, stride_k = grad_scores.stride() if c.pairs is None else (grad_scores.stride(0), 0)
        self.lookup = PairLookup(c, argmax.shape[1], (stride_q, stride_k))
        up = UpstreamArgs(grad_scores, stride_q, stride_k, argmax.contiguous(), 1, c.columns, c.Tq, c.Td)
        queries, documents = make_packed_query_args(c), make_packed_document_args(c)
        wide = choose_offset_width(c.Q, c.D, c.Td)
        self.call = GradientCall(queries, documents, up, c.candidates, normalize, wide, True, counts, encoding)

    def group_by_query(self) -> GradientCall:
        """Return the call with the pairs grouped by query."""
        items, starts = self.lookup.group_by_query()
        up = self.call.up._replace(query=self.lookup.query, items=items, count=items.shape[1], starts=starts)
        return self.call._replace(up=up)

    def _pieces(self, tile: int, tiles: int) -> int:
        """Return the number of splits of a tile's sum.

        Few rows of D must not leave the GPU to few programs.
        """
        if tiles >= _TARGET_PROGRAMS:
            return 1
        max_pieces = self.c.items // _MIN_SPLIT_PAIRS if self._has_single_query() else self.c.Tq // _MIN_SPLIT_ROWS
        max_sums = _MAX_PARTIAL_BYTES // (4 * tile * tiles * self.call.d)
        return max(1, min(cdiv(_TARGET_PROGRAMS, tiles), max_pieces, max_sums))

    def _has_single_query(self) -> bool:
        """Return whether a pair has one query."""
        return self.c.candidates or self.c.pairs is not None

    def _most_rows(self) -> int:
        """Return a number of rows that few queries exceed."""
        if self.c.q_each is not None:
            return self.c.q_each
        return 2 * cdiv(self.c.Tq, self.c.queries)

    def _is_sparse(self) -> bool:
        """Return whether most rows of D cannot be an argmax, whatever the values."""
        c = self.c
        max_argmax_rows = c.columns * c.Tq if c.pairs is None else c.items * cdiv(c.Tq, c.queries)
        return self._has_single_query() and c.Td > _MIN_SPARSE_RATIO * max_argmax_rows

    def _configure_buckets(self, launch: LaunchConfig) -> _BucketConfig | None:
        """Return the sizes of the argmax lists, or None if the argmax is not listed."""
        Tq, count = self.c.Tq, self.c.items
        if self._has_single_query() or Tq < _MIN_BUCKETED_ROWS or self.c.Td > _MAX_BUCKETED_TOKENS:
            return None
        listing, rows = backward_configs.configure_packed_buckets(self.call.arch, launch, Tq)
        blocks = cdiv(Tq, rows)
        room = min(_MAX_BUCKET_BYTES // (4 * blocks * (rows + MAX_BUCKETS.value + 1)), count)
        if room < count:
            # chunks begin at multiples of 16 bytes
            own_documents = (room - min(_BUCKET_OVERLAP_DOCUMENTS, room // 4)) // 2 * 2
            return _BucketConfig(listing, blocks, rows, room, own_documents) if own_documents else None
        return _BucketConfig(listing, blocks, rows, room, count)

    def write_packed_gradients(self, grad_D: Tensor) -> None:
        """Write the gradient of D, each element summed in a fixed order."""
        call = self.call.add_norms()
        rows = cdiv(self.c.Tq, self.c.queries) if self._has_single_query() else None
        table = partial(backward_configs.configure_packed_documents, call.kind, rows=rows, flat=call.flat)
        (self._write_sparse_gradients if self._is_sparse() else self._write_all_gradients)(call, grad_D, table)

    def _write_sparse_gradients(self, call: GradientCall, grad_D: Tensor, table: Callable[..., LaunchConfig]) -> None:
        """Sum disjoint documents one by one, and the tiles that other documents share."""
        tile, count, Td = backward_configs.choose_shared_tile_rows(call.arch), self.c.items, self.c.Td
        (tiles,) = check_grid(cdiv(Td, tile))
        marks, starts = torch.empty((2, 2 * (tiles + 1)), dtype=torch.int32, device=grad_D.device)
        zeros = ZeroFillArgs(grad_D, grad_D.numel(), marks, tiles + 1)
        items, reach = sort_pairs(self.lookup.items, _FIELD_FIRST, True, zeros)
        groups = *call.groups[:2], call.up._replace(items=items, count=count)
        launch = backward_configs.configure_disjoint_documents(call.kind, self._most_rows(), flat=call.flat)
        args = *groups, SharedTileArgs(marks, starts, reach), grad_D, call.d, count.bit_length(), tile
        call.run(maxsim_grad_disjoint_documents, check_grid(count + cdiv(tiles + 1, _PAIRS_PER_PROGRAM)), args, launch)
        shared_args = *groups, SharedTileArgs(marks, starts), grad_D, call.d, tile
        call.run(maxsim_grad_shared_tiles, (min(tiles, _TARGET_PROGRAMS),), shared_args, table(shared=True))

    def _write_all_gradients(self, call: GradientCall, grad_D: Tensor, table: Callable[..., LaunchConfig]) -> None:
        """Sum all tiles of D."""
        launch = table(shared=False, listed=True)
        listing = self._configure_buckets(launch)
        if listing is None:
            launch = table(shared=False)
        tile = launch.config.BN
        (tiles,) = check_grid(cdiv(self.c.Td, tile))
        items, starts = self.lookup.sort_by_tile(tile, tiles)
        up = call.up._replace(
            query=None if self._has_single_query() else self.lookup.query, items=items, count=items.shape[1]
        )
        pieces = self._pieces(tile, tiles)
        sums = None
        if pieces > 1:
            sums = torch.empty(pieces * tiles * tile * call.d, dtype=torch.float32, device=grad_D.device)

        def sum_tiles(
            up: UpstreamArgs, bounds: TilePairArgs, lists: PackedBucketArgs | None, launch: LaunchConfig
        ) -> None:
            """Launch the sums of all tiles, or of the tiles that a chunk serves."""
            args = *call.groups[:2], up, bounds, lists, sums, grad_D, call.d
            call.run(maxsim_grad_packed_documents, (tiles, pieces), args, launch)

        if listing is None:
            sum_tiles(up, TilePairArgs(starts), None, launch)
        else:
            lists = listing.lists(grad_D.device)
            for first in range(0, up.count, listing.chunk_step):
                part = up._replace(items=items[:, first:])
                programs = check_grid(min(part.items.shape[1], listing.room) * listing.blocks)
                argmax_part = part._replace(norms=None, scale=None)  # neither is read
                call.run(maxsim_list_packed_argmax, programs, (argmax_part, lists), listing.launch)
                sum_tiles(part, listing.bounds(starts, first, up.count), lists, launch)
            if listing.chunk_step < up.count:  # tiles with more documents than a chunk lists
                sum_tiles(up, listing.bounds(starts, 0, up.count), None, replace(launch, max_registers=255))
        if sums is not None:
            join_args = call.documents, sums, grad_D, pieces, self.c.Td, call.d
            call.run(maxsim_join_packed_pieces, (tiles,), join_args, launch)


def backward_cut(
    grad_scores: Tensor,
    c: PackedArgs,
    argmax: Tensor,
    normalize: bool,
    needs: list[bool],
    unified: bool,
    stored: EncodedTokens | None = None,
) -> Gradients:
    """Compute the gradients of Q, D, and q_weight of a packed call.

    Args:
        grad_scores: gradient of the scores.
        c: the packed call.
        argmax: argmax of the forward.
        normalize: whether tokens are normalized.
        needs: whether the gradients of Q, D, and q_weight are needed.
        unified: whether the gradient of D is summed by fp32 atomic adds. Otherwise each gradient is summed in a fixed
            order.
        stored: encoded documents, which have no gradient. Then ``c.D`` is the encoded data.

    Raises:
        RuntimeError: `unified` under `torch.use_deterministic_algorithms(True)`.
    """
    if unified:
        require_nondeterminism_allowed()
    format, scales = (None, ()) if stored is None else (stored.format, (stored.scale, stored.minimum, *stored[4:]))
    key = (*c.metadata(argmax, *scales), format, grad_scores.stride(), normalize, *needs, unified)
    tensors = grad_scores, argmax, *c.tensors, *scales

    def compute() -> Gradients:
        """Return the gradients, without capture."""
        is_trivial = 0 in (c.Q.numel(), c.D.numel(), argmax.numel(), c.queries, c.columns)
        outputs = allocate_gradients(c.Q, c.D, needs, is_trivial)
        if is_trivial or not any(needs):
            return outputs
        grad_Q, grad_D, grad_weight = select_needed(outputs, needs)
        with use_device(c.Q.device):
            packed = _PackedGradientCall(grad_scores, c, argmax, normalize, stored)
            if needs[0] or needs[2]:
                packed.group_by_query().write_query_gradients(grad_Q, grad_weight)
            if grad_D is not None and unified:
                sum_D = torch.zeros((1, 1, c.Td, c.D.shape[-1]), dtype=torch.float32, device=c.D.device)
                call = packed.group_by_query()
                call.scatter(None, sum_D)
                call.write_gradients(call.documents, sum_D, grad_D, None, call.wide, False)
            elif grad_D is not None:
                packed.write_packed_gradients(grad_D)
        return outputs

    return captured_calls.run(key, tensors, c.Q.device, compute)


def backward_ragged(
    grad_scores: Tensor, tensors: Sequence, argmax: Tensor, normalize: bool, needs: list[bool], unified: bool
) -> Gradients:
    """Compute the gradients of `backward_cut` for the tensors of a ragged operator."""
    c = PackedArgs.from_tensors(tensors, argmax.shape[1]).for_kernel()
    return backward_cut(grad_scores, c, argmax, normalize, needs, unified)


def backward_quantized(
    grad_scores: Tensor, tensors: Sequence, stored: EncodedTokens, argmax: Tensor, normalize: bool, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of Q and q_weight for quantized documents with one token axis.

    Rotated queries are rounded to their dtype, as in the forward. Their gradients rotate back. The D of `tensors` is a
    placeholder that only carries the token count.
    """
    data = stored.data.view(*tensors[1].shape[:-1], stored.data.shape[1])
    Q = stored.transform_queries(tensors[0])
    c = PackedArgs.from_tensors((Q, data, *tensors[2:]), argmax.shape[1]).for_kernel()
    all_needs = [needs[0], False, needs[1]]
    grad_Q, _, grad_weight = backward_cut(grad_scores, c, argmax, normalize, all_needs, False, stored)
    return stored.transform_queries(grad_Q, inverse=True) if needs[0] else grad_Q, grad_weight
