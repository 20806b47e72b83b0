"""``lik::maxsim_topk``: the best documents of each query, scored chunk by chunk, so that ``[Nq, Nd]`` never exists.

Scores are put in one total order, so that what is found does not depend on the chunks: NaN first, then from the largest
to the smallest, -0.0 as 0.0; equal ones by document. `torch.topk` promises nothing of ties; here no two keys are equal.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import backends
from .._layout import as_bool, check, check_lifted, score_dtype
from ..backends.ragged import Ragged
from . import batching, eager, flops, ragged_values

_SCHEMA = (
    "(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? cu_seqlens_d, Tensor? q_weight, bool normalize,"
    " SymInt top_k, int? chunk) -> (Tensor, Tensor)"
)
MiB = 1 << 20
# Bytes of scores, keys and what torch.topk takes beside them, on any device, and on a GPU with memory to spare.
WORKSPACE, LARGE_WORKSPACE = 32 * MiB, 256 * MiB
_BYTES_PER_SCORE = {4: 32, 8: 48}  # of what is put in order, by the size of a score
_LOW = 0 if sys.byteorder == "little" else 1  # which of the halves of a 64-bit integer is the lower
_BLOCK = 64  # columns of which `first` looks at the maximum alone
_MOST_BLOCKS = 4  # for each score that is kept, or looking at maxima first is no less work

Best = tuple[Tensor, Tensor]
"""Scores and document indices ``[Nq, k]``, the best first."""


def _ordered(scores: Tensor) -> Tensor:
    """Integers in the order of `scores`: NaN above all, -0.0 equal to 0.0."""
    as_integer = torch.int64 if scores.dtype == torch.float64 else torch.int32
    sizes = torch.iinfo(as_integer)
    # -0.0 + 0.0 is 0.0; all NaN become the one of Python, whose bits are above those of infinity.
    bits = (scores + 0.0).nan_to_num_(math.nan, math.inf, -math.inf).view(as_integer)
    # Where the sign is set, the other bits rise as scores fall.
    return bits.bitwise_xor_((bits >> (sizes.bits - 1)).bitwise_and_(sizes.max))


def _looks_at_blocks(columns: int, top_k: int) -> bool:
    return columns // _BLOCK > _MOST_BLOCKS * top_k


def first(scores: Tensor, top_k: int) -> Best:
    """The `top_k` best of ``scores [Nq, n]`` (all, if they are fewer) and their columns; equal ones by column.

    Of many columns only those are ordered that can be among the best: the k best scores lie in the k blocks with the
    best maxima (of equal ones, the first), as each of k such blocks has a score that comes before all of another.
    """
    if not _looks_at_blocks(scores.shape[1], top_k):
        return _first(scores, top_k)
    count = scores.shape[1] // _BLOCK
    whole, rest = scores[:, : count * _BLOCK].unflatten(1, (count, _BLOCK)), scores[:, count * _BLOCK :]
    blocks = _best_columns(whole.amax(dim=2), top_k)
    if scores.dtype == torch.float64:
        blocks = blocks.sort(dim=1).values
    candidates = whole.gather(1, blocks[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    columns = (blocks[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=scores.device)).flatten(1)
    if rest.shape[1]:
        last = torch.arange(count * _BLOCK, scores.shape[1], device=scores.device)
        candidates, columns = torch.cat([candidates, rest], 1), torch.cat([columns, last.expand(len(rest), -1)], 1)
    columns = _best_columns(candidates, top_k, columns)
    return scores.gather(1, columns), columns


def _first(scores: Tensor, top_k: int) -> Best:
    """`first`, with all columns in order."""
    columns = _best_columns(scores, top_k)
    return scores.gather(1, columns), columns


def _best_columns(scores: Tensor, top_k: int, columns: Tensor | None = None) -> Tensor:
    """Columns ``[Nq, k]`` of the best scores, which are those of `columns` ``[Nq, n]`` (ascending, if fp64)."""
    k, n, device = min(top_k, scores.shape[1]), scores.shape[1], scores.device
    ordered = _ordered(scores)
    if ordered.dtype == torch.int64:
        at = ordered.sort(dim=1, descending=True, stable=True).indices[:, :k]
        # A copy, not a view of all of them.
        return at.clone(memory_format=torch.contiguous_format) if columns is None else columns.gather(1, at)
    # Keys of 64 bits, of which no two are equal: the score, and below it the column, with its bits inverted.
    low = torch.arange(-1, -n - 1, -1, dtype=torch.int32, device=device) if columns is None else ~columns.int()
    halves = [ordered, ordered]
    halves[_LOW] = low.expand_as(ordered)
    best = torch.stack(halves, dim=2).view(torch.int64).squeeze(2).topk(k, dim=1).values
    return ~best.view(torch.int32)[:, _LOW::2].long()


def merge(parts: list[Best], top_k: int) -> Best:
    """The best of several parts, which come in the order of their documents, each sorted."""
    if len(parts) == 1:
        return parts[0]
    scores, indices = (torch.cat(columns, dim=1) for columns in zip(*parts, strict=True))
    return of_candidates(scores, indices, top_k)


def of_candidates(scores: Tensor, indices: Tensor, top_k: int) -> Best:
    """The best of candidates ``[Nq, n]``, of which equal ones are in the order of their documents."""
    scores, columns = first(scores, top_k)
    return scores, indices.gather(1, columns)


def check_arguments(
    op: str,
    Q: Tensor,
    D: Tensor,
    top_k: Any,
    chunk: Any,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    cu_seqlens_d: Tensor | None,
    q_weight: Tensor | None,
) -> None:
    """Raise ValueError or TypeError, naming the argument, unless all fit together; `op` begins the message."""
    check(op, Q, D, q_mask, d_mask, q_weight)
    check_counts(op, top_k, chunk)
    if cu_seqlens_d is None:
        if D.dim() != 3:
            raise ValueError(f"{op}: D: expected [Nd, Ld, d], or [Td, d] with cu_seqlens_d, got {list(D.shape)}")
        return
    if D.dim() != 2:
        raise ValueError(f"{op}: D: expected [Td, d] beside cu_seqlens_d, got {list(D.shape)}")
    if d_mask is not None:
        raise ValueError(f"{op}: d_mask: expected None beside cu_seqlens_d (pack the tokens to keep), got a mask")
    check_cu_seqlens(op, cu_seqlens_d, D.device)
    if ragged_values.looks(cu_seqlens_d):
        ragged_values.check_cu_seqlens(op, "cu_seqlens_d", cu_seqlens_d, "D", D)


def check_counts(op: str, top_k: Any, chunk: Any) -> None:
    for name, count, least in (("top_k", top_k, 0), ("chunk", chunk, 1)):
        if name == "chunk" and count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, (int, torch.SymInt)):
            raise TypeError(f"{op}: {name}: expected an int, got {type(count).__name__}")
        if isinstance(count, int) and count < least:
            raise ValueError(f"{op}: {name}: expected {least} or more, got {count}")


def check_cu_seqlens(op: str, cu_seqlens_d: Any, device: torch.device) -> None:
    if not isinstance(cu_seqlens_d, Tensor):
        raise TypeError(f"{op}: cu_seqlens_d: expected a Tensor or None, got {type(cu_seqlens_d).__name__}")
    if cu_seqlens_d.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: cu_seqlens_d: expected int32 or int64, got {cu_seqlens_d.dtype}")
    if cu_seqlens_d.dim() != 1 or (isinstance(cu_seqlens_d.shape[0], int) and cu_seqlens_d.shape[0] < 1):
        raise ValueError(f"{op}: cu_seqlens_d: expected [Nd + 1], got {list(cu_seqlens_d.shape)}")
    if cu_seqlens_d.device != device and cu_seqlens_d.device.type != "cpu":
        raise ValueError(f"{op}: cu_seqlens_d: expected the device of D, {device}, or cpu, got {cu_seqlens_d.device}")


def _check(op, Q, D, q_mask, d_mask, cu_seqlens_d, q_weight, top_k, chunk) -> None:
    check_arguments(op, Q, D, top_k, chunk, q_mask, d_mask, cu_seqlens_d, q_weight)
    check_lifted(op, Q, D if cu_seqlens_d is None else D.unsqueeze(0), q_mask, d_mask)


def _documents(D: Tensor, cu_seqlens_d: Tensor | None) -> Any:
    return D.shape[0] if cu_seqlens_d is None else cu_seqlens_d.shape[0] - 1


def workspace(device: torch.device) -> int:
    """Bytes to work in: a constant; more on a GPU with much free memory, unless a CUDA graph is being captured."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return WORKSPACE
    # What torch holds and nobody uses is free too. Neither question waits for the GPU. The statistics in one piece:
    # `torch.cuda.memory_reserved` and `memory_allocated` each flatten and sort all of them.
    free, held = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_stats_as_nested_dict(device)
    if held:
        free += held["reserved_bytes"]["all"]["current"] - held["allocated_bytes"]["all"]["current"]
    return min(max(free // 8, WORKSPACE), LARGE_WORKSPACE)


def _bytes(documents: int, top_k: int, itemsize: int) -> int:
    """What `first` and the scores of a query with so many documents take."""
    if not _looks_at_blocks(documents, top_k):
        return documents * _BYTES_PER_SCORE[itemsize]
    return documents * (itemsize + 1) + _BLOCK * (top_k + 1) * _BYTES_PER_SCORE[itemsize]  # 1: the maxima of blocks


def _chunk(Q: Tensor, top_k: int, documents: int) -> int:
    """Documents whose scores fit the workspace, but as many as are kept at least."""
    queries, itemsize = max(Q.shape[0], 1), score_dtype(Q.dtype).itemsize
    if queries * _bytes(documents, top_k, itemsize) <= WORKSPACE:
        return max(documents, 1)
    space = workspace(Q.device) // queries
    chunk = (space - _BLOCK * (top_k + 1) * _BYTES_PER_SCORE[itemsize]) // (itemsize + 1)
    if not _looks_at_blocks(chunk, top_k):
        chunk = space // _BYTES_PER_SCORE[itemsize]
    return max(chunk, top_k, 1)


def _scores_of_packed(
    Q: Tensor,
    D: Tensor,
    cu_seqlens: Tensor,
    q_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
) -> Tensor:
    """Scores ``[Nq, n]`` of the n documents between the offsets ``cu_seqlens [n + 1]``.

    An offset outside D, or below the one before, makes its document NaN.
    """
    Nq, Lq, _ = Q.shape
    starts = torch.arange(Nq + 1, device=Q.device) * Lq
    q_mask, q_weight = (None if x is None else x.flatten() for x in (q_mask, q_weight))
    ragged = Ragged(Q.flatten(0, 1), D, starts, cu_seqlens[:-1], cu_seqlens.diff(), None, q_mask, None, q_weight)
    return backends.select(Q.device, Q.dtype).forward_ragged(ragged, normalize, None, Lq)[0]


def _chunks_of_packed(
    Q: Tensor,
    D: Tensor,
    cu_seqlens_d: Tensor,
    q_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    top_k: int,
    chunk: int | None,
) -> Iterator[Tensor]:
    cu_seqlens = cu_seqlens_d.to(D.device, non_blocking=True)
    documents = cu_seqlens.shape[0] - 1
    if chunk is None:
        chunk = _chunk(Q, top_k, documents)
    for begin in range(0, documents, chunk):
        part = cu_seqlens[begin : begin + chunk + 1]
        yield _scores_of_packed(Q, D, part, q_mask, q_weight, normalize)


def _chunks_of_dense(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    top_k: int,
    chunk: int | None,
) -> Iterator[Tensor]:
    if chunk is None:
        chunk = _chunk(Q, top_k, D.shape[0])
    backend = backends.select(Q.device, Q.dtype)
    for begin in range(0, D.shape[0], chunk):
        part = slice(begin, begin + chunk)
        mask = None if d_mask is None else d_mask[part]
        yield backend.forward(Q, D[part], q_mask, mask, q_weight, normalize, None)[0]


def _topk(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    cu_seqlens_d: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    top_k: int,
    chunk: int | None,
) -> Best:
    if cu_seqlens_d is None:
        chunks = _chunks_of_dense(Q, D, q_mask, d_mask, q_weight, normalize, top_k, chunk)
    else:
        chunks = _chunks_of_packed(Q, D, cu_seqlens_d, q_mask, q_weight, normalize, top_k, chunk)
    empty = Q.new_empty((Q.shape[0], 0), dtype=score_dtype(Q.dtype))
    best: Best = (empty, empty.long())
    seen = 0
    for scores in chunks:
        values, columns = first(scores, top_k)
        best = merge([best, (values, columns.add_(seen))], top_k) if seen else (values, columns)
        seen += scores.shape[1]
    return best


@torch.library.custom_op("lik::maxsim_topk", mutates_args=(), schema=_SCHEMA)
def maxsim_topk(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    cu_seqlens_d: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    top_k: int,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    """The best ``min(top_k, Nd)`` scores of each query, and int64 indices of their documents, the best first.

    D is ``[Nd, Ld, d]``, or ``[Td, d]`` with the offsets `cu_seqlens_d`. `chunk` documents are scored at a time.
    """
    _check("lik::maxsim_topk", Q, D, q_mask, d_mask, cu_seqlens_d, q_weight, top_k, chunk)
    return _topk(Q, D, q_mask, d_mask, cu_seqlens_d, q_weight, normalize, top_k, chunk)


@maxsim_topk.register_fake
def _(Q, D, q_mask, d_mask, cu_seqlens_d, q_weight, normalize, top_k, chunk):
    _check("lik::maxsim_topk", Q, D, q_mask, d_mask, cu_seqlens_d, q_weight, top_k, chunk)
    shape = (Q.shape[0], torch.sym_min(top_k, _documents(D, cu_seqlens_d)))
    return Q.new_empty(shape, dtype=score_dtype(Q.dtype)), Q.new_empty(shape, dtype=torch.int64)


def _no_backward(ctx, *grads):
    raise NotImplementedError("lik::maxsim_topk has no gradient: score what it found with lik_ops.maxsim")


maxsim_topk.register_autograd(_no_backward)
maxsim_topk.register_vmap(batching.topk)
flops.register_topk()


def best_of(
    Q: Tensor,
    D: Tensor,
    top_k: int,
    chunk: int | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    cu_seqlens_d: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
) -> Best:
    """`lik::maxsim_topk` of a 3-D `Q`, of arguments that were checked, with masks of any dtype; without gradients."""
    q_mask, d_mask = as_bool(q_mask), as_bool(d_mask)
    args = (Q, D, q_mask, d_mask, cu_seqlens_d, q_weight)
    if not torch.compiler.is_dynamo_compiling() and eager.nobody_sees(*args):
        return _topk(*args, normalize, top_k, chunk)
    return torch.ops.lik.maxsim_topk(*args, normalize, top_k, chunk)
