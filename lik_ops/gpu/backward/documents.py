"""Gradient of document tokens: the choice of its kernels, the argmax lists, and their workspace."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...csrc_triton.backward.arguments import PartialSumArgs, TileBucketArgs
from ...csrc_triton.backward.documents.buckets import maxsim_count_argmax, maxsim_list_argmax, maxsim_scan_counts
from ...csrc_triton.backward.documents.dense import (
    maxsim_grad_documents,
    maxsim_grad_long_documents,
    maxsim_join_pieces,
)
from ...csrc_triton.backward.documents.sparse import maxsim_grad_sparse_documents
from ..runtime import launcher
from ..runtime.arguments import check_grid
from ..tuning import backward_configs
from ..tuning.architectures import MEASURED_SMS, LaunchConfig, cdiv
from .call import GradientCall

_MAX_BUCKET_BYTES = 16 * 2**20  # argmax lists, which are built for some documents at a time
_MAX_PARTIAL_BYTES = 8 * 2**20  # partial sums of splits
_TARGET_PROGRAMS = 2 * MEASURED_SMS
# Limit if lists of many tiles are split, because most programs then find nothing in their split.
_MAX_PROGRAMS = 8 * _TARGET_PROGRAMS
_MIN_UNSPLIT_DOCUMENTS = 100  # with so many documents in a launch, no list is split
_MIN_SPLIT_ROWS = 2048  # rows of a split
# Tiles of a document from which on a sort is faster than counting, although it needs a dozen launches or more. Counting
# needs one round for every 8 tiles and each block of rows.
_MIN_SORTED_TILES = 512
_MIN_SORTED_ROWS = 4096  # query rows of a document for which a sort may be used
# Memory of a row during the sort. The total is at most `_MAX_BUCKET_BYTES`, in addition to the lists.
_SORT_BYTES_PER_ROW = 36
# Document tokens for each query row from which on most tokens are an argmax of no row. `maxsim_grad_documents` then
# multiplies many tiles without a hit: Ld / BN products for each step of rows. `maxsim_grad_long_documents` multiplies
# groups of BN hit tokens: at most rows / BN products for each step, and one more for each program.
_MIN_TOKENS_PER_ROW = 4
_MIN_PROGRAM_TOKENS, _MAX_PROGRAM_TOKENS = 64, 1024  # document tokens of a program if the document has few query rows
# Query rows for each token of a document from which on fp32 rows are split into two fp16 terms. For fewer rows, finding
# the largest coefficient of each token costs as much as the faster products save. The number of documents does not
# matter, so that a gradient has the same bits in a call for some of the documents.
_MIN_SPLIT_ROWS_PER_TOKEN = 6
_MAX_TERM_BYTES = 8 * 2**20  # fp16 terms of query rows, which take the room of lists


def write_document_gradients(call: GradientCall, grad_D: Tensor) -> None:
    """Write the gradient of all document tokens to `grad_D`."""
    up = call.up
    rows = up.Lq if call.candidates else up.Nq * up.Lq
    count = up.Nq * up.K if call.candidates else up.K
    if rows <= backward_configs.get_max_sparse_rows(call.kind):
        _sum_sparse(call, rows, count, grad_D)
        return
    if rows < backward_configs.MIN_BUCKETED_ROWS and up.Ld >= _MIN_TOKENS_PER_ROW * rows:
        _sum_hit_tokens(call, rows, count, grad_D)
        return
    launch = _configure(call, pieces=False)
    tiles = cdiv(up.Ld, launch.config.BN)
    unlisted_bytes = tiles * rows * call.d * call.queries.ptr.element_size()
    is_listed = rows >= backward_configs.MIN_BUCKETED_ROWS or unlisted_bytes >= backward_configs.MIN_LISTED_BYTES
    if is_listed and rows <= backward_configs.MAX_BUCKETED_ROWS:
        _sum_listed(call, rows, count, grad_D)
        return
    lists = TileBucketArgs(None, None, 0, 1, tiles)
    _sum_tiles(call, launch, lists, rows, PartialSumArgs(None, rows), count, grad_D)


def _configure(call: GradientCall, pieces: bool) -> LaunchConfig:
    """Return the launch of `maxsim_grad_documents`, whose lists are split over several programs if `pieces`."""
    is_long, is_split = call.up.Ld >= backward_configs.MIN_LONG_DOCUMENT_TOKENS, call.up.terms is not None
    return backward_configs.configure_documents(call.kind, flat=call.flat, pieces=pieces, long=is_long, split=is_split)


def _sum_listed(call: GradientCall, rows: int, count: int, grad_D: Tensor) -> None:
    """Launch the argmax lists and their sums, for as many documents at a time as the lists have room for.

    The whole call decides how lists are cut into pieces. A part of a call has the same bits.
    """
    all_documents = call.all_documents or count
    query_rows = rows * all_documents // call.up.K if call.candidates else rows
    query_bytes, term_bytes = query_rows * call.d * call.queries.ptr.element_size(), 0
    call = call.add_norms()
    if call.tf32:
        call = call.round_queries()
    elif _should_split_queries(call, rows, query_bytes):
        call, term_bytes = call.split_queries(), query_bytes
    up, launch = call.up, _configure(call, pieces=False)
    tiles = cdiv(up.Ld, launch.config.BN)
    listing = backward_configs.configure_buckets(call.arch, launch, rows)
    is_sorted = (
        tiles >= _MIN_SORTED_TILES
        and rows >= _MIN_SORTED_ROWS
        and _SORT_BYTES_PER_ROW * rows * all_documents <= _MAX_BUCKET_BYTES
    )
    blocks = 1 if is_sorted else cdiv(rows, listing.config.BM)
    # An argmax has 2 or 4 bytes, and a list entry has 4. The query gradient is not allocated yet. If the lists are no
    # larger than the argmax and this gradient, a training step needs no more memory than with a 4-byte argmax without
    # lists.
    argmax_bytes = up.argmax.element_size() * rows * all_documents
    room = max(argmax_bytes + query_bytes - term_bytes // 2, _MAX_BUCKET_BYTES // 4)
    room = min(room, _MAX_BUCKET_BYTES - term_bytes)
    step = max(1, min(all_documents, room // (4 * (rows + tiles * blocks + 1))))
    step = cdiv(all_documents, cdiv(all_documents, step))
    slot_bytes = 4 * launch.config.BN * call.d
    split_count = _count_splits(step, rows, slot_bytes)
    if is_sorted:
        split_count = min(split_count, cdiv(_MAX_PROGRAMS, step * tiles))
    launch = _configure(call, pieces=split_count > 1)
    allocate = partial(torch.empty, device=grad_D.device)
    listed = min(step, count)
    starts, entries = (allocate(listed * n, dtype=torch.int32) for n in (tiles * blocks + 1, rows))
    sums = allocate(listed * 2 * split_count * slot_bytes // 4, dtype=torch.float32) if split_count > 1 else None
    for first in range(0, count, step):
        lists, documents = TileBucketArgs(entries, starts, first, blocks, tiles), min(step, count - first)
        if is_sorted:
            _sort_argmax(call, launch.config.BN, lists, rows, documents)
        else:
            _bucket_argmax(call, listing, lists, rows, documents)
        _sum_tiles(call, launch, lists, rows, PartialSumArgs(sums, cdiv(rows, split_count)), documents, grad_D)


def _should_split_queries(call: GradientCall, rows: int, query_bytes: int) -> bool:
    """Return whether sums over exact fp32 rows take less time with rows of two fp16 terms. Measured on sm_90."""
    kind, up = call.kind, call.up
    is_short = up.Ld < backward_configs.MIN_LONG_DOCUMENT_TOKENS  # else tiles are too large for two sums
    can_split = not kind.half and kind.has_vector_loads and kind.arch.has_sm90_path
    fits = query_bytes <= _MAX_TERM_BYTES  # terms have as many bytes
    return can_split and is_short and fits and rows >= _MIN_SPLIT_ROWS_PER_TOKEN * up.Ld


def _sum_sparse(call: GradientCall, rows: int, count: int, grad_D: Tensor) -> None:
    """Launch the sums of few query rows for each document."""
    launch = backward_configs.configure_sparse_documents(call.kind, rows)
    # Splitting documents keeps the bits, because one program sums all rows of a token.
    parts = max(cdiv(call.up.Ld, _MAX_PROGRAM_TOKENS), cdiv(_TARGET_PROGRAMS, count))
    tokens = max(cdiv(call.up.Ld, parts), _MIN_PROGRAM_TOKENS)
    grid = check_grid(count * cdiv(call.up.Ld, tokens))
    call.run(maxsim_grad_sparse_documents, grid, (*call.groups, grad_D, rows, tokens, call.d), launch)


def _sum_hit_tokens(call: GradientCall, rows: int, count: int, grad_D: Tensor) -> None:
    """Launch the sums of documents that have many more tokens than query rows, but too many rows for `_sum_sparse`."""
    launch = backward_configs.configure_long_documents(call.kind, flat=call.flat)
    # Without norms, each group of tokens would compute the norms of its rows again, at the cost of spills.
    call, Ld = call.add_norms(), call.up.Ld
    tokens = backward_configs.choose_long_tile_tokens(call.arch, count, Ld, _TARGET_PROGRAMS)
    grid = check_grid(count * cdiv(Ld, tokens))
    call.run(maxsim_grad_long_documents, grid, (*call.groups, grad_D, rows, call.d, tokens), launch)


def _count_splits(documents: int, rows: int, slot_bytes: int) -> int:
    """Return the number of splits of a list.

    A token that is the argmax of all rows must not leave the GPU to few programs.
    """
    if documents >= _MIN_UNSPLIT_DOCUMENTS:
        return 1
    max_splits = min(
        cdiv(_TARGET_PROGRAMS, documents), rows // _MIN_SPLIT_ROWS, _MAX_PARTIAL_BYTES // (2 * slot_bytes * documents)
    )
    return max(1, max_splits)


def _sort_argmax(call: GradientCall, BN: int, lists: TileBucketArgs, rows: int, documents: int) -> None:
    """Write the lists of `_bucket_argmax` for documents with many tiles.

    They are the result of a stable sort by the tiles of the argmax.
    """
    assert lists.entries is not None and lists.starts is not None
    argmax = call.up.argmax.reshape(-1, rows)[lists.first : lists.first + documents]
    tiles = (argmax >> (BN.bit_length() - 1)).to(torch.int16 if lists.tiles < 2**15 else torch.int32)
    tiles, order = tiles.sort(dim=1, stable=True)
    edges = torch.arange(lists.tiles + 1, dtype=tiles.dtype, device=tiles.device).expand(documents, -1)
    starts = lists.starts[: documents * (lists.tiles + 1)].view(documents, -1)
    starts.copy_(torch.searchsorted(tiles, edges.contiguous(), out_int32=True))
    entries = lists.entries[: documents * rows].view(documents, rows)
    entries.copy_(argmax.gather(1, order).bitwise_and_(BN - 1) + order * BN)


def _bucket_argmax(call: GradientCall, launch: LaunchConfig, lists: TileBucketArgs, rows: int, documents: int) -> None:
    """Launch the counting sort of the argmax by token tile."""
    grid, up = check_grid(documents * lists.blocks), call.up._replace(norms=None, terms=None, scale=None)  # not read
    if lists.blocks > 1:
        call.run(maxsim_count_argmax, grid, (up, lists, rows), launch)
        config = launch.config._replace(BM=min(launch.config.BM, 1024))
        scan = lists.starts, lists.tiles * lists.blocks, config
        launcher.launch(maxsim_scan_counts, (documents,), scan, {"num_warps": 4})
    call.run(maxsim_list_argmax, grid, (up, lists, rows, lists.blocks == 1), launch)


def _sum_tiles(
    call: GradientCall,
    launch: LaunchConfig,
    lists: TileBucketArgs,
    rows: int,
    pieces: PartialSumArgs,
    documents: int,
    grad_D: Tensor,
) -> None:
    """Launch the sums of all tiles, and the sum of partial results if lists are split."""
    (programs,) = check_grid(documents * lists.tiles)
    args = lists, rows, pieces, grad_D, call.d
    call.run(maxsim_grad_documents, (programs, cdiv(rows, pieces.rows)), (*call.groups, *args), launch)
    if pieces.partial is not None:
        call.run(maxsim_join_pieces, (programs,), (call.documents, call.up, *args), launch)
