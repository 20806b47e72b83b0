"""The best of scores by plain torch, on any device, in one total order: see `ops.topk`."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

_LOW_HALF = 0 if sys.byteorder == "little" else 1  # which of the halves of a 64-bit integer is the lower
BLOCK_COLUMNS = 64  # columns of which `best` looks at the maximum alone
_MAX_BLOCKS_PER_SCORE = 4  # for each score that is kept, or looking at maxima first is no less work
BYTES_PER_SCORE = {4: 32, 8: 48}  # of what is put in order, by the size of a score


def _to_sortable_integers(scores: Tensor) -> Tensor:
    """Integers in the order of `scores`: NaN above all, -0.0 equal to 0.0."""
    as_integer = torch.int64 if scores.dtype == torch.float64 else torch.int32
    sizes = torch.iinfo(as_integer)
    # -0.0 + 0.0 is 0.0; all NaN become the one of Python, whose bits are above those of infinity.
    bits = (scores + 0.0).nan_to_num_(math.nan, math.inf, -math.inf).view(as_integer)
    # Where the sign is set, the other bits rise as scores fall.
    return bits.bitwise_xor_((bits >> (sizes.bits - 1)).bitwise_and_(sizes.max))


def needs_blocks(columns: int, top_k: int) -> bool:
    return columns // BLOCK_COLUMNS > _MAX_BLOCKS_PER_SCORE * top_k


def best(scores: Tensor, top_k: int, indices: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `top_k` best of ``scores [Nq, n]`` (all, if fewer), in order, and their columns; equal ones by column.

    Those of `indices` ``[Nq, n]`` in place of columns where they are given.
    """
    looks = needs_blocks(scores.shape[1], top_k)
    columns = select_columns_by_blocks(scores, top_k) if looks else select_columns(scores, top_k)
    return scores.gather(1, columns), columns if indices is None else indices.gather(1, columns)


def select_columns_by_blocks(scores: Tensor, top_k: int) -> Tensor:
    """`select_columns` of many.

    Of many columns only those are ordered that can be among the best: the k best scores lie in the k blocks with the
    best maxima (of equal ones, the first), as each of k such blocks has a score that comes before all of another.
    """
    count = scores.shape[1] // BLOCK_COLUMNS
    whole, rest = (
        scores[:, : count * BLOCK_COLUMNS].unflatten(1, (count, BLOCK_COLUMNS)),
        scores[:, count * BLOCK_COLUMNS :],
    )
    blocks = select_columns(whole.amax(dim=2), top_k)
    if scores.dtype == torch.float64:
        blocks = blocks.sort(dim=1).values
    candidates = whole.gather(1, blocks[:, :, None].expand(-1, -1, BLOCK_COLUMNS)).flatten(1)
    columns = (blocks[:, :, None] * BLOCK_COLUMNS + torch.arange(BLOCK_COLUMNS, device=scores.device)).flatten(1)
    if rest.shape[1]:
        last = torch.arange(count * BLOCK_COLUMNS, scores.shape[1], device=scores.device)
        candidates, columns = torch.cat([candidates, rest], 1), torch.cat([columns, last.expand(len(rest), -1)], 1)
    return select_columns(candidates, top_k, columns)


def select_columns(scores: Tensor, top_k: int, columns: Tensor | None = None) -> Tensor:
    """Columns ``[Nq, k]`` of the best scores, which are those of `columns` ``[Nq, n]`` (ascending, if fp64)."""
    k, n, device = min(top_k, scores.shape[1]), scores.shape[1], scores.device
    ordered = _to_sortable_integers(scores)
    if ordered.dtype == torch.int64:
        at = ordered.sort(dim=1, descending=True, stable=True).indices[:, :k]
        # A copy, not a view of all of them.
        return at.clone(memory_format=torch.contiguous_format) if columns is None else columns.gather(1, at)
    # Keys of 64 bits, of which no two are equal: the score, and below it the column, with its bits inverted.
    low = torch.arange(-1, -n - 1, -1, dtype=torch.int32, device=device) if columns is None else ~columns.int()
    halves = [ordered, ordered]
    halves[_LOW_HALF] = low.expand_as(ordered)
    best = torch.stack(halves, dim=2).view(torch.int64).squeeze(2).topk(k, dim=1).values
    return ~best.view(torch.int32)[:, _LOW_HALF::2].long()


def best_of_parts(received: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """`best` of int64 messages ``[parts, 2, Nq, width]`` after each other: the bits of fp32 scores, and indices."""
    scores, indices = received.permute(1, 2, 0, 3).flatten(2)
    return best(scores.int().view(torch.float32), top_k, indices)


def estimate_bytes(documents: int, top_k: int, itemsize: int) -> int:
    """What `best` and the scores of a query with so many documents take."""
    if not needs_blocks(documents, top_k):
        return documents * BYTES_PER_SCORE[itemsize]
    return (
        documents * (itemsize + 1) + BLOCK_COLUMNS * (top_k + 1) * BYTES_PER_SCORE[itemsize]
    )  # 1: the maxima of blocks
