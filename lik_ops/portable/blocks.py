"""Shapes of the portable backend's matrix products, and how tokens get into them.

All similarities come from `torch.bmm` over *slices*. One slice is ``[rows, d] x [d, columns]``, document tokens against
query tokens. Bits must not depend on the batch:

- A slice's shape follows from `Lq`, `Ld`, `d` and the dtype alone, a token's place in it from its place in its document
  or query. How many slices a call has is free, from two on; a single one goes to another kernel of MKL.
- Documents shorter than `MIN_ROWS` share a slice, and queries shorter than a step of columns. There a token's place
  varies, so every row and column must have the same bits; equal tokens tie only then, too.
- Padding and packed tokens change `Lq` and `Ld`, so slices of any rows and columns must have the same bits.

MKL grants this to slices of `MIN_ROWS` rows or more, made of whole `STEPS`, that start at multiples of 64 bytes;
`tests/portable/test_slices.py` checks the machine it runs on.

Calls of few tokens would multiply padding for the most part. `narrow` makes products of fewer rows, where one random
product shows that this machine gives them the same bits; `wide` has chunks of its own.

Documents are copied into the slices even where a view would do. On ``[300, 128] x [128, 32]`` from main memory MKL
reaches 0.54 of its full rate on an AMD processor, and 0.65 if documents are copied into the cache first, the copy
included. Where `supports_in_place_reads` holds, fp32 documents that need no conversion are read where they lie: many
of them at once (`forward.InPlaceForward`), or as slices. `tests/portable/test_slices.py` checks that these products
give the same bits.
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
# Multiples that rows have, multiples that columns have, and most columns. torch's amax is fastest on 32 fp32 columns.
# MKL's fp64 kernels take 4 rows and 24 columns at a time and round what remains otherwise.
STEPS = {torch.float32: (1, 32, 128), torch.float64: (4, 48, 96)}
# Columns where tokens are so wide that a step of them exceeds SLICE_BYTES. With other numbers MKL rounds the last ones
# otherwise.
FEW_COLUMNS = (4, 8, 12, 24)
ALIGNMENT_BYTES = 64  # bytes
# Rows of each product of `multiply_by_rows`: those of a common query. On a GPU a launch costs more than padding does.
CPU_PRODUCT_ROWS, GPU_PRODUCT_ROWS = 32, 128
NORM_EPS = 1e-12

MiB = 1 << 20
# Budgets in bytes; with small tensors beside them they stay below 32 MiB. Neither side of a slice exceeds SLICE_BYTES
# where d is below 2^20 (fp32); wider tokens go to `wide`.
MAX_DOCUMENT_BYTES = 3 * MiB  # few enough to be multiplied before they leave the cache
MAX_SIMILARITY_BYTES = 2 * MiB
MAX_PANEL_BYTES = 6 * MiB
MAX_MAXIMA_BYTES = 2 * MiB
MAX_SLICE_BYTES = 4 * MiB


def is_host_readable(x: Tensor) -> bool:
    """Whether values may decide what is done: on CPU that is free, elsewhere it would wait for the device."""
    return x.device.type == "cpu"


@lru_cache(maxsize=1)
def supports_in_place_reads() -> bool:
    """Whether documents may be read where they lie: faster, with the same bits, by MKL's AVX-512 kernels on Intel.

    Its AVX2 kernels round such products otherwise; on AMD it was not measured.
    """
    if {"MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"} & os.environ.keys() or not torch.backends.mkl.is_available():
        return False
    try:
        processor = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        processor = platform.processor()
    return "GenuineIntel" in processor and torch.backends.cpu.get_cpu_capability() == "AVX512"


def is_product_ready(D: Tensor, dtype: torch.dtype) -> bool:
    """Whether ``D [..., Ld, d]`` of a CPU can go into matrix products of `dtype` as it is."""
    if not isinstance(D, Tensor) or D.device.type != "cpu" or not D.dtype == dtype == torch.float32:
        return False
    return D.stride(-1) == 1 and min(D.stride()[-3:-1]) >= D.shape[-1] and supports_in_place_reads()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


class SliceShape(NamedTuple):
    """The shape of a slice and what lies in it."""

    rows: int
    documents: int  # whole documents in a slice; 1 where a document fills one slice or several
    starts: tuple[int, ...]  # first token of each slice of a document; the last slice may overlap the one before
    columns: int
    queries: int  # whole queries in a slice; 1 where a query fills one slice or several
    panels: int  # slices of a query


@lru_cache(maxsize=1024)
def choose_slice_shape(Lq: int, Ld: int, d: int, dtype: torch.dtype) -> SliceShape:
    """How documents of `Ld` tokens and queries of `Lq` tokens (both >= 1) are cut into slices."""
    token_bytes = d * dtype.itemsize
    row_step, step, most = STEPS[dtype]
    starts: tuple[int, ...] = (0,)
    fits = MAX_SLICE_BYTES // token_bytes
    max_rows = max(min(MAX_ROWS, MiB // token_bytes // 16 * 16), min(16, fits // 4 * 4), 1)
    if Ld < MIN_ROWS and Ld <= max_rows:
        rows = min(SHARED_ROWS, max_rows)
        documents = rows // Ld
    else:
        tiles = ceil_div(Ld, max_rows)
        rows, documents = round_up(Ld, row_step) if tiles == 1 else min(max_rows, round_up(ceil_div(Ld, tiles), 16)), 1
        starts = tuple(min(tile * rows, max(Ld - rows, 0)) for tile in range(ceil_div(Ld, rows)))
    part = max(n for n in (1, *FEW_COLUMNS, step) if n <= max(fits, 1))
    max_columns = max(min(most, 2 * MiB // token_bytes // step * step), part)
    if Lq < step <= max_columns:
        columns, queries, panels = step, step // Lq, 1
    else:
        panels = ceil_div(Lq, max_columns)
        columns = min(max_columns, round_up(ceil_div(Lq, panels), step))
        queries = 1
    return SliceShape(rows, documents, starts, columns, queries, panels)


def allocate_slices(like: Tensor, slices: int, rows: int, d: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised ``[slices, rows, d]`` whose slices start at multiples of `ALIGNMENT_BYTES` bytes."""
    stride = round_up(rows * d, ALIGNMENT_BYTES // dtype.itemsize)
    storage = like.new_empty((slices, stride), dtype=dtype)
    return storage[:, : rows * d].unflatten(1, (rows, d))


def copy_grouped(target: Tensor, source: Tensor) -> None:
    """Copy ``source [..., n, L, w]`` into ``target [..., m, group, L, w]``, ``m * group >= n``; the rest stays."""
    count, group = source.shape[-3], target.shape[-3]
    if group == 1:
        target = target.squeeze(-3)
        (target if target.shape[-3] == count else target[..., :count, :, :]).copy_(source)
        return
    full, rest = divmod(count, group)
    if full:
        target[..., :full, :, :, :].copy_(source[..., : full * group, :, :].unflatten(-3, (full, group)))
    if rest:
        target[..., full, :rest, :, :].copy_(source[..., full * group :, :, :])


def multiply_matrices(a: Tensor, b: Tensor) -> Tensor:
    """Of matrices or batches of them, in their own dtype: a region of autocast casts products without an `out`."""
    adjust_threads()
    multiply = torch.mm if a.dim() == 2 else torch.bmm
    return multiply(a, b, out=a.new_empty(*a.shape[:-1], b.shape[-1]))


def multiply_by_rows(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices so that the bits of a row do not depend on the other rows of `a`, nor on their number.

    BLAS libraries choose a kernel, and with it the order of a sum, by the number of rows. Here all products have the
    same number.
    """
    step = CPU_PRODUCT_ROWS if a.device.type == "cpu" else GPU_PRODUCT_ROWS
    rows = a.shape[0]
    out = a.new_empty((round_up(rows, step), b.shape[1]))
    for some in split_range(0, rows, step):
        part = a[some]
        if len(part) < step:
            part = torch.cat([part, part.new_zeros((step - len(part), a.shape[1]))])
        torch.mm(part, b, out=out[some.start : some.start + step])
    return out[:rows]


def compute_row_norms(rows: Tensor) -> Tensor:
    """``max(||row||, eps)`` as ``[..., 1]``."""
    if rows.device.type == "cpu":
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    else:  # a GPU's reduction has an order that depends on how many rows there are
        norms = sum_pairwise(rows.square())[..., None].sqrt()
    return norms.clamp_min_(NORM_EPS)


def sum_pairwise(x: Tensor) -> Tensor:
    """Sum over the last axis, overwriting `x`, as a binary tree that zeros behind the last element do not change.

    Halves are powers of two, so a longer axis of zeros only adds levels that add zeros: a query has the same sum
    packed, padded and masked. torch.sum picks its order from sizes, strides and the number of threads.
    """
    length = x.shape[-1]
    while length > 1:
        half = 1 << (length - 1).bit_length() - 1
        x[..., : length - half].add_(x[..., half:length])
        length = half
    return x[..., 0] if length else x.sum(-1)


def split_range(first: int, last: int, step: int) -> Iterator[slice]:
    """``[first, last)`` cut into slices of at most `step`; between two of them the number of threads may change."""
    for start in range(first, last, step):
        adjust_threads()
        yield slice(start, min(start + step, last))


def split_to_fit(total: int, bytes_each: int, room: int) -> Iterator[slice]:
    """``[0, total)`` cut so that what belongs to a slice fits `room` bytes; one alone may need more."""
    return split_range(0, total, max(1, room // max(bytes_each, 1)))


def split_argmax_to_fit(
    queries: int, documents: int, bytes_each: int, room: int, candidates: bool, needs: Sequence[bool]
) -> Iterator[tuple[slice, slice, list[bool]]]:
    """A backward in parts of queries and documents whose winners fit `room`, with the gradients that each completes.

    Candidates belong to their query. In the cross product a query needs all documents and a document all queries:
    where the call has to be cut, its winners are found twice, and no gradient is a sum of parts.
    """
    if queries * documents * bytes_each <= room:
        yield slice(0, queries), slice(0, documents), list(needs)
        return
    of_queries = list(needs) if candidates else [needs[0], False, needs[2]]
    if any(of_queries):
        for i in split_to_fit(queries, documents * bytes_each, room):
            yield i, slice(0, documents), of_queries
    if needs[1] and not candidates:
        for j in split_to_fit(documents, queries * bytes_each, room):
            yield slice(0, queries), j, [False, True, False]


class Piece(NamedTuple):
    """Part of one side: its batches, its queries or documents, their tokens."""

    batches: slice
    items: slice
    tokens: slice

    def counts(self) -> tuple[int, int, int]:
        batches, items, tokens = (s.stop - s.start for s in self)
        return batches, items, tokens

    def within(self, b: slice, items: slice) -> Piece:
        """This piece of part of a side, as a piece of that side."""
        i, j = (slice(s.start + of.start, s.stop + of.start) for s, of in ((self.batches, b), (self.items, items)))
        return Piece(i, j, self.tokens)


def cut_pieces(
    sizes: tuple[int, int, int], limit: int, max_batches: int | None = None, whole: int = 1, pad: int = 1
) -> Iterator[Piece]:
    """Cut ``[batches, items, tokens]`` into pieces of at most `limit` tokens (at least one each).

    Items are taken in multiples of `whole` where that fits. Each batch counts as a multiple of `pad` tokens.
    """
    batches, items, tokens = sizes
    token_step = max(1, min(tokens, limit))
    item_step = max(1, min(items, limit // token_step))
    batch_step = 1
    if (item_step, token_step) == (items, tokens):
        batch_step = max(1, min(limit // round_up(token_step * item_step, pad), max_batches or batches))
    else:
        item_step = item_step // whole * whole or item_step
    for b in split_range(0, batches, batch_step):
        for i in split_range(0, items, item_step):
            for t in split_range(0, tokens, token_step):
                yield Piece(b, i, t)


def find_first_true(mask: Tensor) -> Tensor:
    """Index of the first True of the last axis, 0 where there is none."""
    return mask.view(torch.uint8).argmax(-1)
