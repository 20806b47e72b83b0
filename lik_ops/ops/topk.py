"""``lik::maxsim_topk``: the best documents of each query, scored chunk by chunk, so that ``[Nq, Nd]`` never exists.

Scores are put in one total order, so that what is found does not depend on the chunks: NaN first, then from the largest
to the smallest, -0.0 as 0.0; equal ones by document. `torch.vmap_topk` promises nothing of ties; here no two keys are
equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from .._ops import add_op_namespace_prefix
from .._ops import ops as lik
from ..core.arguments import (
    as_bool,
    check_count,
    check_cu_seqlens,
    check_dense,
    check_dense_batched,
    check_flag,
    check_tensor,
    score_dtype,
)
from ..core.segments import RaggedArgs, make_dense_offsets
from ..portable.forward import topk as portable_topk
from .checks import hints
from .fast_path.watchers import is_call_direct, is_ordinary_tensor
from .registration.custom import custom_op
from .registration.family import make_raising_backward
from .stack import batching, functional

_SCHEMA = (
    "(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? cu_seqlens_d, Tensor? q_weight, bool normalize,"
    " SymInt top_k, int? chunk) -> (Tensor, Tensor)"
)
_NAME = add_op_namespace_prefix("maxsim_topk")
MiB = 1 << 20
# Bytes of scores, keys and what torch.topk takes beside them, on any device, and on a GPU with memory to spare.
WORKSPACE_BYTES, LARGE_WORKSPACE_BYTES = 32 * MiB, 256 * MiB
# Query rows that a program scores in one reading of the documents; bytes of documents over which programs that each
# read them, for rows of their own, stay close enough to find them in the L2 cache (docs/lab-book.md).
MAX_ROWS_AT_ONCE, MAX_READ_BYTES = 256, 4096 * MiB
# Numbers of scores that between them take every kernel of the Triton backend.
WARMUP_COLUMNS = (100, 1_000, 8_000, 20_000, 200_000, 1_000_000, 4_000_000)

ScoresAndIndices = tuple[Tensor, Tensor]
"""Scores and document indices ``[Nq, k]``, the best first."""


class SearchArgs(NamedTuple):
    """The arguments of `lik::maxsim_topk`, in the order of its schema."""

    Q: Tensor  # [Nq, Lq, d]
    D: Any  # [Nd, Ld, d], or [Td, d] with cu_seqlens_d; what `lik_ops.retrieve` takes, before it is a tensor
    q_mask: Tensor | None
    d_mask: Tensor | None
    cu_seqlens_d: Tensor | None  # [Nd + 1]
    q_weight: Tensor | None
    normalize: bool
    top_k: int
    chunk: int | None  # documents to score at a time; None: as many as fit

    @property
    def documents(self) -> Any:
        return self.D.shape[0] if self.cu_seqlens_d is None else self.cu_seqlens_d.shape[0] - 1


def _select_backend(x: Tensor) -> ModuleType:
    # What is traced are torch's operators.
    if torch.compiler.is_dynamo_compiling() or not is_ordinary_tensor(x):
        return backends.portable
    return backends.select_backend(x.device, x.dtype)


def select_first(scores: Tensor, top_k: int) -> ScoresAndIndices:
    """The `top_k` best of ``scores [Nq, n]`` (all, if they are fewer) and their columns; equal ones by column."""
    return _select_backend(scores).best(scores, top_k)


def warm_up(device: torch.device, dtype: torch.dtype, top_k: int) -> None:
    """Run every kernel that finds the `top_k` best of up to 4 million scores of `dtype`, also over some processes."""
    for count in WARMUP_COLUMNS:
        select_first(torch.zeros((1, count), dtype=dtype, device=device), top_k)
    width = min(top_k, WARMUP_COLUMNS[1])  # more would only take memory
    for processes in (2, 8):
        received = torch.zeros((processes, 2, 1, width), dtype=torch.int64, device=device)
        merge_messages(received, [width] * processes, top_k, dtype)


def merge_parts(parts: list[ScoresAndIndices], top_k: int) -> ScoresAndIndices:
    """The best of several parts, which come in the order of their documents, each sorted."""
    if len(parts) == 1:
        return parts[0]
    scores, indices = (torch.cat(columns, dim=1) for columns in zip(*parts, strict=True))
    return select_candidates(scores, indices, top_k)


def select_candidates(scores: Tensor, indices: Tensor, top_k: int) -> ScoresAndIndices:
    """The best of candidates ``[Nq, n]``, of which equal ones are in the order of their documents."""
    return _select_backend(scores).best(scores, top_k, indices)


def merge_messages(received: Tensor, counts: list[int], top_k: int, dtype: torch.dtype) -> ScoresAndIndices:
    """The best of int64 messages ``[parts, 2, Nq, width]``: the bits of scores of `dtype`, and their indices.

    The messages follow each other in the order of their documents; of each the first ``counts[part]`` of a query count.
    """
    if dtype == torch.float32 and min(counts) == received.shape[3]:
        return backends.select_backend(received.device, dtype).best_of_parts(received, top_k)
    scores, indices = torch.cat([x[:, :, :count] for x, count in zip(received, counts, strict=True)], dim=2)
    return select_candidates((scores if dtype == torch.float64 else scores.int()).view(dtype), indices, top_k)


def check_search_args(op: str, s: SearchArgs, whole: bool = True) -> None:
    """Raise ValueError or TypeError, naming the argument, unless all fit together; Q may be 2-D.

    `whole`: the offsets are the caller's, not part of them.
    """
    Q, D, cu_seqlens_d = s.Q, s.D, s.cu_seqlens_d
    check_flag(op, "normalize", s.normalize)
    check_dense(op, Q, D, s.q_mask, s.d_mask, s.q_weight)
    check_counts(op, s.top_k, s.chunk)
    if cu_seqlens_d is None:
        if D.dim() != 3:
            raise ValueError(f"{op}: D: expected [Nd, Ld, d], or [Td, d] with cu_seqlens_d, got {list(D.shape)}")
        return
    if D.dim() != 2:
        raise ValueError(f"{op}: D: expected [Td, d] beside cu_seqlens_d, got {list(D.shape)}")
    if s.d_mask is not None:
        raise ValueError(f"{op}: d_mask: expected None beside cu_seqlens_d (pack the tokens to keep), got a mask")
    check_document_offsets(op, cu_seqlens_d, D.device)
    hints.inspect_offsets(op, "cu_seqlens_d", cu_seqlens_d, "D", D, whole)


def check_counts(op: str, top_k: Any, chunk: Any) -> None:
    check_count(op, "top_k", top_k)
    if chunk is not None:
        check_count(op, "chunk", chunk, 1)


def check_document_offsets(op: str, cu_seqlens_d: Any, device: torch.device) -> None:
    """Raise unless these may be the bounds of packed documents, on their device or on the CPU."""
    check_tensor(op, "cu_seqlens_d", cu_seqlens_d)
    check_cu_seqlens(op, "cu_seqlens_d", cu_seqlens_d, cu_seqlens_d.device, "[Nd + 1]")
    if cu_seqlens_d.device != device and cu_seqlens_d.device.type != "cpu":
        raise ValueError(f"{op}: cu_seqlens_d: expected the device of D, {device}, or cpu, got {cu_seqlens_d.device}")


def _check_operator_args(op: str, s: SearchArgs) -> None:
    check_search_args(op, s, whole=False)
    check_dense_batched(op, s.Q, s.D if s.cu_seqlens_d is None else s.D.unsqueeze(0), s.q_mask, s.d_mask)


def choose_workspace_bytes(device: torch.device) -> int:
    """Bytes to work in: a constant; more on a GPU with much free memory, unless a CUDA graph is being captured."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return WORKSPACE_BYTES
    # What torch holds and nobody uses is free too. Neither question waits for the GPU. The statistics in one piece:
    # `torch.cuda.memory_reserved` and `memory_allocated` each flatten and sort all of them.
    free, held = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_stats_as_nested_dict(device)
    if held:
        free += held["reserved_bytes"]["all"]["current"] - held["allocated_bytes"]["all"]["current"]
    return min(max(free // 8, WORKSPACE_BYTES), LARGE_WORKSPACE_BYTES)


def _choose_chunk(s: SearchArgs) -> int:
    """Documents to score at a time, as many as are kept at least: their scores fit the workspace, and where several
    programs read each document, it is still in the cache for all of them."""
    if s.chunk is not None:
        return s.chunk
    chunk = count_fitting_documents(s.Q, s.top_k, s.documents)
    if s.Q.shape[0] * s.Q.shape[1] > MAX_ROWS_AT_ONCE and s.D.nbytes > MAX_READ_BYTES:
        chunk = min(chunk, max(s.documents * MAX_READ_BYTES // s.D.nbytes, s.top_k, 1))
    return chunk


def count_fitting_documents(Q: Tensor, top_k: int, documents: int) -> int:
    """Documents whose scores fit the workspace, but as many as are kept at least."""
    queries, itemsize = max(Q.shape[0], 1), score_dtype(Q.dtype).itemsize
    if queries * portable_topk.estimate_bytes(documents, top_k, itemsize) <= WORKSPACE_BYTES:
        return max(documents, 1)
    space = choose_workspace_bytes(Q.device) // queries
    chunk = (space - portable_topk.BLOCK_COLUMNS * (top_k + 1) * portable_topk.BYTES_PER_SCORE[itemsize]) // (
        itemsize + 1
    )
    if not portable_topk.needs_blocks(chunk, top_k):
        chunk = space // portable_topk.BYTES_PER_SCORE[itemsize]
    return max(chunk, top_k, 1)


def _iterate_scores(s: SearchArgs) -> Iterator[Tensor]:
    """Scores ``[Nq, n]`` of all documents, a chunk of n at a time."""
    return _iterate_dense_scores(s) if s.cu_seqlens_d is None else _iterate_packed_scores(s, s.cu_seqlens_d)


def _iterate_packed_scores(s: SearchArgs, cu_seqlens: Tensor) -> Iterator[Tensor]:
    """An offset outside D, or below the one before, makes its document NaN."""
    (Nq, Lq, _), chunk = s.Q.shape, _choose_chunk(s)
    backend = backends.select_backend(s.Q.device, s.Q.dtype)
    cu_seqlens = cu_seqlens.to(s.D.device, non_blocking=True)
    Q, cu_seqlens_q = s.Q.flatten(0, 1), make_dense_offsets(Nq, Lq, s.Q.device)
    q_mask, q_weight = (None if x is None else x.flatten() for x in (s.q_mask, s.q_weight))
    for begin in range(0, s.documents, chunk):
        part = cu_seqlens[begin : begin + chunk + 1]
        ragged = RaggedArgs(Q, s.D, cu_seqlens_q, part[:-1], part.diff(), None, q_mask, None, q_weight)
        yield backend.forward_ragged(ragged, s.normalize, None, Lq)[0]


def _iterate_dense_scores(s: SearchArgs) -> Iterator[Tensor]:
    chunk = _choose_chunk(s)
    backend = backends.select_backend(s.Q.device, s.Q.dtype)
    whole = chunk >= s.documents  # no view then: it would take the host longer than the rest
    for begin in range(0, s.documents, chunk):
        part = slice(begin, begin + chunk)
        mask = s.d_mask if whole or s.d_mask is None else s.d_mask[part]
        yield backend.forward(s.Q, s.D if whole else s.D[part], s.q_mask, mask, s.q_weight, s.normalize, None)[0]


def _run_search(s: SearchArgs) -> ScoresAndIndices:
    best: ScoresAndIndices | None = None
    seen = 0
    for scores in _iterate_scores(s):
        found, columns = select_first(scores, s.top_k)
        best = (found, columns) if best is None else merge_parts([best, (found, columns.add_(seen))], s.top_k)
        seen += scores.shape[1]
    if best is None:
        empty = s.Q.new_empty((s.Q.shape[0], 0), dtype=score_dtype(s.Q.dtype))
        best = empty, empty.long()
    return best


@custom_op(add_op_namespace_prefix("maxsim_topk"), _SCHEMA)
def maxsim_topk(*args: Any) -> tuple[Tensor, Tensor]:
    """The best ``min(top_k, Nd)`` scores of each query, and int64 indices of their documents, the best first.

    D is ``[Nd, Ld, d]``, or ``[Td, d]`` with the offsets `cu_seqlens_d`. `chunk` documents are scored at a time.
    """
    s = SearchArgs(*args)
    _check_operator_args(_NAME, s)
    reject_derivatives(_NAME, s.Q, s.D, s.q_weight)
    return _run_search(s)


@maxsim_topk.register_fake
def _(*args):
    s = SearchArgs(*args)
    _check_operator_args(_NAME, s)
    shape = (s.Q.shape[0], torch.sym_min(s.top_k, s.documents))
    return s.Q.new_empty(shape, dtype=score_dtype(s.Q.dtype)), s.Q.new_empty(shape, dtype=torch.int64)


def reject_derivatives(op: str, *given: Any) -> None:
    """Raise NotImplementedError where a transform or forward-mode AD would take the scores for constants.

    Not for autograd, which says itself that they require no gradient, nor for what was detached.
    """
    tensors = [t for t in given if isinstance(t, Tensor)]
    if torch.compiler.is_dynamo_compiling():
        derived = functional.is_taking_derivatives()  # of these or others: tensors cannot be asked here
    else:
        derived = functional.has_tangents(*tensors)
        derived = derived or (torch.is_grad_enabled() and functional.is_any_differentiated(*tensors))
    if derived:
        raise NotImplementedError(
            f"{op} has no derivatives, with torch.func or forward-mode AD either: detach what it is given, and score"
            " what it found with lik_ops.maxsim"
        )


maxsim_topk.register_autograd(make_raising_backward("maxsim_topk", "score what it found with lik_ops.maxsim"))
maxsim_topk.register_vmap(batching.vmap_topk)


def search_best(s: SearchArgs) -> ScoresAndIndices:
    """`lik::maxsim_topk` of a 3-D Q, of arguments that were checked, with masks of any dtype; without gradients."""
    s = s._replace(q_mask=as_bool(s.q_mask), d_mask=as_bool(s.d_mask))
    if not torch.compiler.is_dynamo_compiling() and is_call_direct(*s[:6]):
        return _run_search(s)
    return lik.maxsim_topk(*s)
