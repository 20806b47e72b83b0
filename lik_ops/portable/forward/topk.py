"""Top-k of scores in plain PyTorch, on any device, in one total order: see `ops.topk`."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

_LOW_HALF = 0 if sys.byteorder == "little" else 1  # position of the lower half of a 64-bit integer
BLOCK_COLUMNS = 64  # columns of a block, whose maximum `best` reads first
_MAX_BLOCKS_PER_SCORE = 4  # with fewer blocks for each kept score, reading maxima first does not save work
BYTES_PER_SCORE = {4: 32, 8: 48}  # memory of ordering a score, by the size of the score


def _to_sortable_integers(scores: Tensor) -> Tensor:
    """Convert scores to integers in the same order, with NaN above all and -0.0 equal to 0.0."""
    as_integer = torch.int64 if scores.dtype == torch.float64 else torch.int32
    sizes = torch.iinfo(as_integer)
    # -0.0 + 0.0 is 0.0. All NaN become Python's NaN, whose bits are above infinity.
    bits = (scores + 0.0).nan_to_num_(math.nan, math.inf, -math.inf).view(as_integer)
    # If the sign is set, the other bits rise as scores fall.
    return bits.bitwise_xor_((bits >> (sizes.bits - 1)).bitwise_and_(sizes.max))


def needs_blocks(columns: int, top_k: int) -> bool:
    """Return whether `best` should first select blocks by their maxima."""
    return columns // BLOCK_COLUMNS > _MAX_BLOCKS_PER_SCORE * top_k


def best(scores: Tensor, top_k: int, indices: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the `top_k` best of ``scores [Nq, n]`` (all, if there are fewer), in order, and their columns.

    Equal scores are ordered by column. If `indices` ``[Nq, n]`` is given, its values are returned in place of columns.
    """
    has_many_columns = needs_blocks(scores.shape[1], top_k)
    columns = select_columns_by_blocks(scores, top_k) if has_many_columns else select_columns(scores, top_k)
    return scores.gather(1, columns), columns if indices is None else indices.gather(1, columns)


def select_columns_by_blocks(scores: Tensor, top_k: int) -> Tensor:
    """Compute `select_columns` for many columns.

    Only columns that can be among the best are ordered. The k best scores are in the k blocks with the best maxima,
    where the first of equal maxima counts. Each of these k blocks has a score that comes before all scores of any other
    block.
    """
    count = scores.shape[1] // BLOCK_COLUMNS
    full_blocks, tail = (
        scores[:, : count * BLOCK_COLUMNS].unflatten(1, (count, BLOCK_COLUMNS)),
        scores[:, count * BLOCK_COLUMNS :],
    )
    blocks = select_columns(full_blocks.amax(dim=2), top_k)
    if scores.dtype == torch.float64:
        blocks = blocks.sort(dim=1).values
    candidates = full_blocks.gather(1, blocks[:, :, None].expand(-1, -1, BLOCK_COLUMNS)).flatten(1)
    columns = (blocks[:, :, None] * BLOCK_COLUMNS + torch.arange(BLOCK_COLUMNS, device=scores.device)).flatten(1)
    if tail.shape[1]:
        tail_columns = torch.arange(count * BLOCK_COLUMNS, scores.shape[1], device=scores.device)
        candidates, columns = (
            torch.cat([candidates, tail], 1),
            torch.cat([columns, tail_columns.expand(len(tail), -1)], 1),
        )
    return select_columns(candidates, top_k, columns)


def select_columns(scores: Tensor, top_k: int, columns: Tensor | None = None) -> Tensor:
    """Return the columns int64 ``[Nq, k]`` of the best of ``scores [Nq, n]``, in order, where k is at most n.

    `columns` are the columns of the scores ``[Nq, n]``, ascending if scores are fp64. None stands for 0 to n - 1.
    """
    k, n, device = min(top_k, scores.shape[1]), scores.shape[1], scores.device
    keys = _to_sortable_integers(scores)
    if keys.dtype == torch.int64:
        at = keys.sort(dim=1, descending=True, stable=True).indices[:, :k]
        # A copy, because a view would keep the memory of all indices.
        return at.clone(memory_format=torch.contiguous_format) if columns is None else columns.gather(1, at)
    # Distinct 64-bit keys with the score in the upper half and the inverted column in the lower half.
    low = torch.arange(-1, -n - 1, -1, dtype=torch.int32, device=device) if columns is None else ~columns.int()
    halves = [keys, keys]
    halves[_LOW_HALF] = low.expand_as(keys)
    best = torch.stack(halves, dim=2).view(torch.int64).squeeze(2).topk(k, dim=1).values
    return ~best.view(torch.int32)[:, _LOW_HALF::2].long()


def best_of_parts(received: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return `best` of the messages of several ranks.

    They are int64 ``[parts, 2, Nq, width]``, the bits of fp32 scores and their indices.
    """
    scores, indices = received.permute(1, 2, 0, 3).flatten(2)
    return best(scores.int().view(torch.float32), top_k, indices)


def estimate_bytes(documents: int, top_k: int, itemsize: int) -> int:
    """Estimate the memory of the scores of a query with `documents` documents, and of `best`."""
    if not needs_blocks(documents, top_k):
        return documents * BYTES_PER_SCORE[itemsize]
    # The 1 accounts for the maxima of blocks.
    return documents * (itemsize + 1) + BLOCK_COLUMNS * (top_k + 1) * BYTES_PER_SCORE[itemsize]
