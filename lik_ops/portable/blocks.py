"""Shapes of the portable backend's matrix products, and helpers that copy tokens into them.

All similarities come from `torch.bmm` over *slices*. One slice is ``[rows, d] x [d, columns]``, document tokens against
query tokens. Bits must not depend on the batch:

- The shape of a slice depends only on `Lq`, `Ld`, `d` and the dtype. The place of a token in the slice depends only on
  its place in its document or query. The number of slices in a call is free from two on, because MKL uses another
  kernel for a single slice.
- Documents shorter than `MIN_ROWS` share a slice, and so do queries shorter than one step of columns. There the place
  of a token varies, so every row and column must give the same bits. Equal tokens tie only under the same condition.
- Padding and packed tokens change `Lq` and `Ld`, so slices with different rows and columns must give the same bits.

MKL guarantees this for slices of at least `MIN_ROWS` rows that consist of whole `STEPS` and start at multiples of 64
bytes. `tests/portable/test_slices.py` checks it on the machine that runs the test.

Calls with few tokens would mostly multiply padding. `forward.narrow` uses products of fewer rows if a random product
shows that this machine gives them the same bits. `forward.wide` has its own chunks.

Documents are copied into the slices even if a view would do. On ``[300, 128] x [128, 32]`` from main memory MKL reaches
0.54 of its full rate on an AMD processor. It reaches 0.65 if documents are copied into the cache first, including the
copy. If `supports_in_place_reads` holds, fp32 documents that need no conversion are read in place, either many at once
(`InPlaceForward`) or as slices. `tests/portable/test_slices.py` checks that these products give the same bits.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .pace import adjust_threads

MIN_ROWS, MAX_ROWS = 24, 1024
SHARED_ROWS = 64  # rows of a slice that short documents share
# Rows and columns are multiples of the first two numbers, and the third is the maximum number of columns. torch's amax
# is fastest on 32 fp32 columns. MKL's fp64 kernels process 4 rows and 24 columns at a time and round the remainder
# differently.
STEPS = {torch.float32: (1, 32, 128), torch.float64: (4, 48, 96)}
# Columns if tokens are so wide that a step of them exceeds MAX_SLICE_BYTES. With other numbers MKL rounds the last
# columns differently.
FEW_COLUMNS = (4, 8, 12, 24)
ALIGNMENT_BYTES = 64
# Rows of each product of `multiply_by_rows`, on a CPU the tokens of a common query. On a GPU a launch costs more than
# padding.
CPU_PRODUCT_ROWS, GPU_PRODUCT_ROWS = 32, 128
NORM_EPS = 1e-12

MiB = 1 << 20
# Memory budgets. Together with small tensors they stay below 32 MiB. Neither side of a slice exceeds MAX_SLICE_BYTES if
# d is below 2^20 (fp32). `forward.wide` handles wider tokens.
MAX_DOCUMENT_BYTES = 3 * MiB  # small enough to be multiplied before they leave the cache
MAX_SIMILARITY_BYTES = 2 * MiB
MAX_PANEL_BYTES = 6 * MiB
MAX_MAXIMA_BYTES = 2 * MiB
MAX_SLICE_BYTES = 4 * MiB


def is_host_readable(x: Tensor) -> bool:
    """Return whether code may branch on values, which is free on a CPU and would wait for the device elsewhere."""
    return x.device.type == "cpu"


@lru_cache(maxsize=1)
def supports_in_place_reads() -> bool:
    """Return whether documents may be read in place.

    This is faster with MKL's AVX-512 kernels on Intel, and the bits are the same. MKL's AVX2 kernels round such
    products differently. It was not measured on AMD.
    """
    if {"MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"} & os.environ.keys() or not torch.backends.mkl.is_available():
        return False
    try:
        processor = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        processor = platform.processor()
    return "GenuineIntel" in processor and torch.backends.cpu.get_cpu_capability() == "AVX512"


def is_product_ready(D: Tensor, dtype: torch.dtype) -> bool:
    """Return whether ``D [..., Ld, d]`` is on a CPU and can be an operand of matrix products of `dtype` as it is."""
    if not isinstance(D, Tensor) or D.device.type != "cpu" or not D.dtype == dtype == torch.float32:
        return False
    return D.stride(-1) == 1 and min(D.stride()[-3:-1]) >= D.shape[-1] and supports_in_place_reads()


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b`` rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """Round `a` up to a multiple of `b`."""
    return ceil_div(a, b) * b


class SliceShape(NamedTuple):
    """The shape and contents of a slice."""

    rows: int
    documents: int  # whole documents in a slice; 1 if a document fills one or several slices
    starts: tuple[int, ...]  # first token of each slice of a document; the last slice may overlap the one before
    columns: int
    queries: int  # whole queries in a slice; 1 if a query fills one or several slices
    panels: int  # slices of a query


@lru_cache(maxsize=1024)
def choose_slice_shape(Lq: int, Ld: int, d: int, dtype: torch.dtype) -> SliceShape:
    """Choose how documents of `Ld` tokens and queries of `Lq` tokens (both >= 1) are cut into slices."""
    token_bytes = d * dtype.itemsize
    row_step, step, column_limit = STEPS[dtype]
    starts: tuple[int, ...] = (0,)
    max_slice_tokens = MAX_SLICE_BYTES // token_bytes
    max_rows = max(min(MAX_ROWS, MiB // token_bytes // 16 * 16), min(16, max_slice_tokens // 4 * 4), 1)
    if Ld < MIN_ROWS and Ld <= max_rows:
        rows = min(SHARED_ROWS, max_rows)
        documents = rows // Ld
    else:
        tiles = ceil_div(Ld, max_rows)
        rows, documents = round_up(Ld, row_step) if tiles == 1 else min(max_rows, round_up(ceil_div(Ld, tiles), 16)), 1
        starts = tuple(min(tile * rows, max(Ld - rows, 0)) for tile in range(ceil_div(Ld, rows)))
    part = max(n for n in (1, *FEW_COLUMNS, step) if n <= max(max_slice_tokens, 1))
    max_columns = max(min(column_limit, 2 * MiB // token_bytes // step * step), part)
    if Lq < step <= max_columns:
        columns, queries, panels = step, step // Lq, 1
    else:
        panels = ceil_div(Lq, max_columns)
        columns = min(max_columns, round_up(ceil_div(Lq, panels), step))
        queries = 1
    return SliceShape(rows, documents, starts, columns, queries, panels)


def allocate_slices(like: Tensor, slices: int, rows: int, d: int, dtype: torch.dtype) -> Tensor:
    """Allocate ``[slices, rows, d]``, uninitialized, with slices that start at multiples of `ALIGNMENT_BYTES`."""
    stride = round_up(rows * d, ALIGNMENT_BYTES // dtype.itemsize)
    storage = like.new_empty((slices, stride), dtype=dtype)
    return storage[:, : rows * d].unflatten(1, (rows, d))


def copy_grouped(target: Tensor, source: Tensor) -> None:
    """Copy ``source [..., n, L, w]`` into ``target [..., m, group, L, w]``, where ``m * group >= n``.

    The rest of `target` is unchanged.
    """
    count, group = source.shape[-3], target.shape[-3]
    if group == 1:
        target = target.squeeze(-3)
        (target if target.shape[-3] == count else target[..., :count, :, :]).copy_(source)
        return
    full_groups, remainder = divmod(count, group)
    if full_groups:
        target[..., :full_groups, :, :, :].copy_(
            source[..., : full_groups * group, :, :].unflatten(-3, (full_groups, group))
        )
    if remainder:
        target[..., full_groups, :remainder, :, :].copy_(source[..., full_groups * group :, :, :])


def multiply_matrices(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices, or batches of them, in their own dtype.

    An `out` tensor keeps autocast from casting the product.
    """
    adjust_threads()
    multiply = torch.mm if a.dim() == 2 else torch.bmm
    return multiply(a, b, out=a.new_empty(*a.shape[:-1], b.shape[-1]))


def multiply_by_rows(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices such that the bits of a row depend neither on the other rows of `a` nor on their number.

    BLAS libraries choose a kernel, and with it the order of a sum, by the number of rows. Here all products have the
    same number of rows.
    """
    step = CPU_PRODUCT_ROWS if a.device.type == "cpu" else GPU_PRODUCT_ROWS
    rows = a.shape[0]
    out = a.new_empty((round_up(rows, step), b.shape[1]))
    for chunk in split_range(0, rows, step):
        part = a[chunk]
        if len(part) < step:
            part = torch.cat([part, part.new_zeros((step - len(part), a.shape[1]))])
        torch.mm(part, b, out=out[chunk.start : chunk.start + step])
    return out[:rows]


def compute_row_norms(rows: Tensor) -> Tensor:
    """Compute ``max(||row||, eps)`` as ``[..., 1]``."""
    if rows.device.type == "cpu":
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    else:  # the order of a GPU's reduction depends on the number of rows
        norms = sum_pairwise(rows.square())[..., None].sqrt()
    return norms.clamp_min_(NORM_EPS)


def sum_pairwise(x: Tensor) -> Tensor:
    """Sum over the last axis with a binary tree that trailing zeros do not change; overwrites `x`.

    The lower half of a level is a power of two, so trailing zeros only add levels that add zeros. A query has the same
    sum packed, padded and masked. The order of torch.sum depends on sizes, strides and the number of threads.
    """
    length = x.shape[-1]
    while length > 1:
        half = 1 << (length - 1).bit_length() - 1
        x[..., : length - half].add_(x[..., half:length])
        length = half
    return x[..., 0] if length else x.sum(-1)


def split_range(first: int, last: int, step: int) -> Iterator[slice]:
    """Yield ``[first, last)`` in slices of at most `step`; the number of threads may change between two slices."""
    for start in range(first, last, step):
        adjust_threads()
        yield slice(start, min(start + step, last))


def split_to_fit(total: int, bytes_each: int, room: int) -> Iterator[slice]:
    """Yield ``[0, total)`` in slices whose items of `bytes_each` fit `room` bytes, at least one item for each slice."""
    return split_range(0, total, max(1, room // max(bytes_each, 1)))


def split_argmax_to_fit(
    queries: int, documents: int, bytes_each: int, room: int, candidates: bool, needs: Sequence[bool]
) -> Iterator[tuple[slice, slice, list[bool]]]:
    """Yield parts of queries and documents, and the gradients of Q, D and q_weight that a part completes.

    The argmax of a part, with `bytes_each` for a query and a document, fits `room` bytes. Candidates belong to their
    query. In the cross product a query needs all documents, and a document needs all queries. If the call is split, the
    argmax is computed twice, and no gradient is a sum of parts.
    """
    if queries * documents * bytes_each <= room:
        yield slice(0, queries), slice(0, documents), list(needs)
        return
    query_needs = list(needs) if candidates else [needs[0], False, needs[2]]
    if any(query_needs):
        for i in split_to_fit(queries, documents * bytes_each, room):
            yield i, slice(0, documents), query_needs
    if needs[1] and not candidates:
        for j in split_to_fit(documents, queries * bytes_each, room):
            yield slice(0, queries), j, [False, True, False]


class Piece(NamedTuple):
    """A part of one side: its batches, its queries or documents, and their tokens."""

    batches: slice
    items: slice
    tokens: slice

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of batches, items and tokens."""
        batches, items, tokens = (s.stop - s.start for s in self)
        return batches, items, tokens

    def shift(self, b: slice, items: slice) -> Piece:
        """Convert this piece of a part of a side into a piece of the whole side."""
        i, j = (
            slice(s.start + part.start, s.stop + part.start) for s, part in ((self.batches, b), (self.items, items))
        )
        return Piece(i, j, self.tokens)


def cut_pieces(
    sizes: tuple[int, int, int], limit: int, max_batches: int | None = None, item_multiple: int = 1, pad: int = 1
) -> Iterator[Piece]:
    """Cut ``[batches, items, tokens]`` into pieces of at most `limit` tokens, at least one token each.

    A piece has at most `max_batches` batches, and a multiple of `item_multiple` items if they fit. The tokens of a
    batch are rounded up to a multiple of `pad` before they are compared with `limit`.
    """
    batches, items, tokens = sizes
    token_step = max(1, min(tokens, limit))
    item_step = max(1, min(items, limit // token_step))
    batch_step = 1
    if (item_step, token_step) == (items, tokens):
        batch_step = max(1, min(limit // round_up(token_step * item_step, pad), max_batches or batches))
    else:
        item_step = item_step // item_multiple * item_multiple or item_step
    for b in split_range(0, batches, batch_step):
        for i in split_range(0, items, item_step):
            for t in split_range(0, tokens, token_step):
                yield Piece(b, i, t)
