"""Messages of a distributed search: the queries of one process, and the best documents of each process."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.arguments import DTYPES, as_bool, score_dtype
from ..ops import topk
from .agreement import all_gather, choose_wire_device

_ALIGNMENT_BYTES = 256  # bytes, of each tensor in a message


class SearchQueries(NamedTuple):
    """The queries of a search, ``[Nq, Lq, d]`` or ``[Lq, d]``, with their mask and weights."""

    Q: Tensor
    q_mask: Tensor | None = None
    q_weight: Tensor | None = None


NO_QUERIES = [0] * 7


def describe_queries(queries: SearchQueries) -> list[int]:
    """Return the shape, dtype and optional tensors of queries as integers, as many as in `NO_QUERIES`."""
    Q, q_mask, q_weight = queries
    shape = [*Q.shape, 0][:3]
    return [Q.dim(), *shape, DTYPES.index(Q.dtype), int(q_mask is not None), int(q_weight is not None)]


def broadcast_queries(
    queries: SearchQueries | None, about: list[int], group: Any, device: torch.device, everywhere: bool
) -> SearchQueries:
    """Send the queries of rank 0 to all ranks, in one message.

    Args:
        queries: the queries on rank 0, else None.
        about: the result of `describe_queries` on rank 0. It determines the size of the message.
        group: the processes.
        device: the device on which this rank needs the queries.
        everywhere: whether all ranks send from or receive to devices of this type.

    Returns:
        The queries on `device`. Rank 0 gets its own tensors.
    """
    dim, *sizes, code, has_mask, has_weight = about
    shape, dtype = sizes[:dim], DTYPES[code]
    kinds = [(shape, dtype)] + [(shape[:-1], torch.bool)] * has_mask + [(shape[:-1], score_dtype(dtype))] * has_weight
    room = [-(-prod(size) * kind.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size, kind in kinds]
    message = torch.empty(sum(room), dtype=torch.uint8, device=choose_wire_device(group, device, everywhere))
    parts = []
    for (size, kind), begin in zip(kinds, accumulate(room, initial=0), strict=False):
        parts.append(message[begin : begin + prod(size) * kind.itemsize].view(kind).view(size))
    if queries is not None:
        inputs = (queries.Q, as_bool(queries.q_mask), queries.q_weight)
        for target, x in zip(parts, (x for x in inputs if x is not None), strict=True):
            target.copy_(x.detach())
    if message.numel():
        dist.broadcast(message, group=group, group_src=0)
    if queries is not None:
        return queries
    tensors = iter([x.to(device) for x in parts])
    return SearchQueries(next(tensors), next(tensors) if has_mask else None, next(tensors) if has_weight else None)


def merge_best(
    best: topk.ScoresAndIndices,
    first: int,
    documents: list[int],
    top_k: int,
    group: Any,
    everywhere: bool = True,
    missing: bool = False,
) -> topk.ScoresAndIndices:
    """Merge the best documents of all processes, in one message, and return the scores and the global indices.

    Args:
        best: scores and indices ``[Nq, min(top_k, documents)]`` of this process.
        first: the global index of this process's document 0.
        documents: the number of documents that each process has searched.
        top_k: the number of documents to return for each query.
        group: the processes.
        everywhere: whether the results of all ranks are on devices of this type.
        missing: whether documents with global index -1 are missing ones, which come last.
    """
    scores, indices = best
    device, int_dtype = scores.device, torch.int64 if scores.dtype == torch.float64 else torch.int32
    counts = [min(top_k, n) for n in documents]
    message = torch.empty((2, len(scores), max(counts)), dtype=torch.int64, device=device)
    message[0, :, : scores.shape[1]].copy_(scores.view(int_dtype))
    torch.add(indices, first, out=message[1, :, : scores.shape[1]])
    message = message.to(choose_wire_device(group, device, everywhere))
    messages = message.new_empty((len(counts), *message.shape))
    if message.numel():
        all_gather(messages.view(-1), message.view(-1), group)
    # Ranks are merged in the order of documents, because ties go to the lowest document.
    return topk.merge_messages(messages.to(device), counts, top_k, scores.dtype, missing)
