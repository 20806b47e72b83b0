"""``lik::maxsim_topk``: the best documents of each query, scored in chunks, so that ``[Nq, Nd]`` never exists.

Scores have one total order, so the result does not depend on the chunks. NaN comes first, then scores in descending
order with -0.0 equal to 0.0. Equal scores are ordered by document. `torch.topk` guarantees no order of equal elements.
Here no two keys are equal.
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
# Bytes for scores, keys and the workspace of torch.topk: on any device, and on a GPU with much free memory.
WORKSPACE_BYTES, LARGE_WORKSPACE_BYTES = 32 * MiB, 256 * MiB
# The first is the number of query rows that a program scores in one pass over the documents. With more rows, several
# programs read each document. Up to the second number of document bytes, these programs stay close enough to each
# other to share the documents in the L2 cache (docs/lab-book.md).
MAX_ROWS_AT_ONCE, MAX_READ_BYTES = 256, 4096 * MiB
# Numbers of scores that together run every top-k kernel of the Triton backend.
WARMUP_COLUMNS = (100, 1_000, 8_000, 20_000, 200_000, 1_000_000, 4_000_000)

ScoresAndIndices = tuple[Tensor, Tensor]
"""Scores and int64 document indices ``[Nq, k]``, best first."""


class SearchArgs(NamedTuple):
    """Arguments of `lik::maxsim_topk`, in the order of its schema."""

    Q: Tensor  # [Nq, Lq, d]
    D: Any  # [Nd, Ld, d], or [Td, d] with cu_seqlens_d; in `lik_ops.retrieve` any document source, not only a tensor
    q_mask: Tensor | None
    d_mask: Tensor | None
    cu_seqlens_d: Tensor | None  # [Nd + 1]
    q_weight: Tensor | None
    normalize: bool
    top_k: int
    chunk: int | None  # documents to score at a time; None: as many as fit

    @property
    def documents(self) -> Any:
        """Number of documents."""
        return self.D.shape[0] if self.cu_seqlens_d is None else self.cu_seqlens_d.shape[0] - 1


def _select_backend(x: Tensor) -> ModuleType:
    """Return the backend for a tensor, which is the portable backend for tracers and tensor subclasses."""
    # Tracers record the torch operators of the portable backend.
    if torch.compiler.is_dynamo_compiling() or not is_ordinary_tensor(x):
        return backends.portable
    return backends.select_backend(x.device, x.dtype)


def select_first(scores: Tensor, top_k: int) -> ScoresAndIndices:
    """Return the `top_k` best of ``scores [Nq, n]`` and their columns. Equal scores are ordered by column.

    If n is smaller than `top_k`, all scores are returned.
    """
    return _select_backend(scores).best(scores, top_k)


def warm_up(device: torch.device, dtype: torch.dtype, top_k: int) -> None:
    """Run every kernel that selects the `top_k` best of up to 4 million scores of `dtype`, also across processes."""
    for count in WARMUP_COLUMNS:
        select_first(torch.zeros((1, count), dtype=dtype, device=device), top_k)
    width = min(top_k, WARMUP_COLUMNS[1])  # larger messages would only cost memory
    for processes in (2, 8):
        messages = torch.zeros((processes, 2, 1, width), dtype=torch.int64, device=device)
        merge_messages(messages, [width] * processes, top_k, dtype)


def merge_parts(parts: list[ScoresAndIndices], top_k: int, missing: bool = False) -> ScoresAndIndices:
    """Return the best of several sorted parts, which are in the order of their documents.

    With `missing`, documents with index -1 are missing ones, which come last.
    """
    if len(parts) == 1:
        return parts[0]
    scores, indices = (torch.cat(columns, dim=1) for columns in zip(*parts, strict=True))
    return select_candidates(scores, indices, top_k, missing)


def select_candidates(scores: Tensor, indices: Tensor, top_k: int, missing: bool = False) -> ScoresAndIndices:
    """Return the `top_k` best of candidates ``[Nq, n]``, in which equal scores are in the order of their documents.

    With `missing`, documents with index -1 are missing ones, which come last.
    """
    if missing:
        order = (indices < 0).to(torch.uint8).argsort(dim=1, stable=True)
        scores, indices = scores.gather(1, order), indices.gather(1, order)
    return _select_backend(scores).best(scores, top_k, indices)


def merge_messages(
    received: Tensor, counts: list[int], top_k: int, dtype: torch.dtype, missing: bool = False
) -> ScoresAndIndices:
    """Return the best of messages from several processes.

    Args:
        received: int64 ``[parts, 2, Nq, width]``, the bits of the scores and the document indices. The parts are in the
            order of their documents.
        counts: the number of valid entries per query in each part.
        top_k: the number of documents to return for each query.
        dtype: the dtype of the scores.
        missing: whether documents with index -1 are missing ones, which come last.
    """
    if not missing and dtype == torch.float32 and min(counts) == received.shape[3]:
        return backends.select_backend(received.device, dtype).best_of_parts(received, top_k)
    scores, indices = torch.cat([x[:, :, :count] for x, count in zip(received, counts, strict=True)], dim=2)
    scores = (scores if dtype == torch.float64 else scores.int()).view(dtype)
    return select_candidates(scores, indices, top_k, missing)


def locate_documents(chosen: Tensor, documents: Any, length: Any, cu_seqlens_d: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the first token and the length of each chosen document.

    The length is 0 for index -1, which is no document, and -1 for an index out of range, which is invalid. Dense
    documents have `length` tokens, and packed documents have the offsets `cu_seqlens_d`.
    """
    is_inside, default_lengths = (chosen >= 0) & (chosen < documents), torch.where(chosen < 0, 0, -1)
    if cu_seqlens_d is None:
        return torch.where(is_inside, chosen, 0) * length, torch.where(is_inside, length, default_lengths)
    bounds = cu_seqlens_d.to(chosen.device, non_blocking=True).long()
    if bounds.shape[0] < 2:
        return torch.zeros_like(chosen), default_lengths
    index = torch.where(is_inside, chosen, 0)
    offsets = bounds[index]
    return offsets, torch.where(is_inside, bounds[index + 1] - offsets, default_lengths)


def check_search_args(op: str, s: SearchArgs, must_cover: bool = True) -> None:
    """Raise ValueError or TypeError, naming the argument, unless all fit together. Q may be 2-D.

    Unless `must_cover`, `cu_seqlens_d` may be the offsets of a chunk, which do not cover D.
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
        raise ValueError(f"{op}: D: expected [Td, d] with cu_seqlens_d, got {list(D.shape)}")
    if s.d_mask is not None:
        raise ValueError(f"{op}: d_mask: expected None next to cu_seqlens_d (pack the tokens to keep), got a mask")
    check_document_offsets(op, cu_seqlens_d, D.device)
    hints.inspect_offsets(op, "cu_seqlens_d", cu_seqlens_d, "D", D, must_cover)


def check_counts(op: str, top_k: Any, chunk: Any) -> None:
    """Raise ValueError or TypeError unless `top_k` and `chunk` are valid counts. `chunk` may be None."""
    check_count(op, "top_k", top_k)
    if chunk is not None:
        check_count(op, "chunk", chunk, 1)


def check_document_offsets(op: str, cu_seqlens_d: Any, device: torch.device) -> None:
    """Raise ValueError or TypeError unless these can be the offsets of packed documents on `device` or on the CPU."""
    check_tensor(op, "cu_seqlens_d", cu_seqlens_d)
    check_cu_seqlens(op, "cu_seqlens_d", cu_seqlens_d, cu_seqlens_d.device, "[Nd + 1]")
    if cu_seqlens_d.device != device and cu_seqlens_d.device.type != "cpu":
        raise ValueError(f"{op}: cu_seqlens_d: expected the device of D, {device}, or cpu, got {cu_seqlens_d.device}")


def check_operator_args(op: str, s: SearchArgs) -> None:
    """Raise ValueError or TypeError, naming the argument, unless the operator `op` accepts these arguments."""
    check_search_args(op, s, must_cover=False)
    check_dense_batched(op, s.Q, s.D if s.cu_seqlens_d is None else s.D.unsqueeze(0), s.q_mask, s.d_mask)


def choose_workspace_bytes(device: torch.device) -> int:
    """Return the workspace size in bytes.

    The size is constant on a CPU and while a CUDA graph is captured. Otherwise it grows with the free memory of the
    GPU, up to `LARGE_WORKSPACE_BYTES`.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return WORKSPACE_BYTES
    # Memory that torch has cached but not allocated is free too. Neither query synchronizes with the GPU. The nested
    # statistics cost less, because `torch.cuda.memory_reserved` and `memory_allocated` each flatten and sort all of
    # them.
    free, stats = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_stats_as_nested_dict(device)
    if stats:
        free += stats["reserved_bytes"]["all"]["current"] - stats["allocated_bytes"]["all"]["current"]
    return min(max(free // 8, WORKSPACE_BYTES), LARGE_WORKSPACE_BYTES)


def _choose_chunk(s: SearchArgs) -> int:
    """Return the number of documents to score at a time, at least `top_k`.

    Their scores fit the workspace. If several programs read each document, the chunk is also small enough for them to
    share documents in the L2 cache.
    """
    if s.chunk is not None:
        return s.chunk
    chunk = count_fitting_documents(s.Q, s.top_k, s.documents)
    if s.Q.shape[0] * s.Q.shape[1] > MAX_ROWS_AT_ONCE and s.D.nbytes > MAX_READ_BYTES:
        chunk = min(chunk, max(s.documents * MAX_READ_BYTES // s.D.nbytes, s.top_k, 1))
    return chunk


def count_fitting_documents(Q: Tensor, top_k: int, documents: int) -> int:
    """Return the number of documents whose scores fit the workspace, at least `top_k` and 1."""
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


def _iterate_packed_scores(s: SearchArgs, cu_seqlens: Tensor) -> Iterator[Tensor]:
    """Yield the scores ``[Nq, n]`` of packed documents in chunks of n.

    An offset outside D or below its predecessor makes the document NaN.
    """
    chunk, backend = _choose_chunk(s), backends.select_backend(s.Q.device, s.Q.dtype)
    cu_seqlens = cu_seqlens.to(s.D.device, non_blocking=True)
    for begin in range(0, s.documents, chunk):
        part = cu_seqlens[begin : begin + chunk + 1]
        tensors = s.Q, s.D, None, part, None, None, s.q_mask, None, s.q_weight
        yield backend.forward_ragged(tensors, s.normalize, None, s.Q.shape[1])[0]


def _iterate_dense_scores(s: SearchArgs) -> Iterator[Tensor]:
    """Yield the scores ``[Nq, n]`` of dense documents in chunks of n."""
    chunk = _choose_chunk(s)
    backend = backends.select_backend(s.Q.device, s.Q.dtype)
    is_single_chunk = chunk >= s.documents  # skip the views, which would cost the host more time than all other work
    for begin in range(0, s.documents, chunk):
        part = slice(begin, begin + chunk)
        mask = s.d_mask if is_single_chunk or s.d_mask is None else s.d_mask[part]
        yield backend.forward(
            s.Q, s.D if is_single_chunk else s.D[part], s.q_mask, mask, s.q_weight, s.normalize, None
        )[0]


def _run_search(s: SearchArgs) -> ScoresAndIndices:
    """Score all chunks and keep the best documents of each query."""
    best: ScoresAndIndices | None = None
    offset = 0
    for scores in _iterate_dense_scores(s) if s.cu_seqlens_d is None else _iterate_packed_scores(s, s.cu_seqlens_d):
        top_scores, columns = select_first(scores, s.top_k)
        if best is not None:
            top_scores, columns = merge_parts([best, (top_scores, columns.add_(offset))], s.top_k)
        best = top_scores, columns
        offset += scores.shape[1]
    if best is None:
        empty = s.Q.new_empty((s.Q.shape[0], 0), dtype=score_dtype(s.Q.dtype))
        best = empty, empty.long()
    return best


@custom_op(add_op_namespace_prefix("maxsim_topk"), _SCHEMA)
def maxsim_topk(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the best ``min(top_k, Nd)`` scores of each query and the indices of their documents.

    There is no gradient. The arguments, in the order of the schema:

    - ``Q``: query tokens ``[Nq, Lq, d]``.
    - ``D``: document tokens ``[Nd, Ld, d]``, or packed ``[Td, d]`` with ``cu_seqlens_d``.
    - ``q_mask``, ``d_mask``: bool (True = keep), the shapes of ``Q`` and ``D`` without d, or None. Packed documents
      have no mask.
    - ``cu_seqlens_d``: int32 or int64 ``[Nd + 1]``, the offsets of packed documents on the device of ``D`` or on the
      CPU, or None.
    - ``q_weight``: fp32 (fp64 for fp64) ``[Nq, Lq]``, or None.
    - ``normalize``: whether to L2-normalize every token.
    - ``top_k``: the number of documents to return for each query.
    - ``chunk``: the number of documents to score at a time. None scores as many as fit the workspace.

    Returns:
        ``(scores, indices)``, both ``[Nq, min(top_k, Nd)]``, best first. The scores are fp32 (fp64 for fp64) and the
        indices int64. NaN comes first, and equal scores are ordered by document.
    """
    s = SearchArgs(*args)
    check_operator_args(_NAME, s)
    reject_derivatives(_NAME, s.Q, s.D, s.q_weight)
    return _run_search(s)


@maxsim_topk.register_fake
def _(*args):
    s = SearchArgs(*args)
    check_operator_args(_NAME, s)
    shape = (s.Q.shape[0], torch.sym_min(s.top_k, s.documents))
    return s.Q.new_empty(shape, dtype=score_dtype(s.Q.dtype)), s.Q.new_empty(shape, dtype=torch.int64)


def reject_derivatives(op: str, *arguments: Any) -> None:
    """Raise NotImplementedError if a transform or forward-mode AD would treat the scores as constants.

    Reverse-mode autograd is allowed, because the results do not require gradients. Detached tensors are allowed too.
    """
    tensors = [t for t in arguments if isinstance(t, Tensor)]
    if torch.compiler.is_dynamo_compiling():
        is_differentiated = functional.is_taking_derivatives()  # of any tensor: Dynamo cannot inspect these tensors
    else:
        is_differentiated = functional.has_tangents(*tensors)
        is_differentiated = is_differentiated or (
            torch.is_grad_enabled() and functional.is_any_differentiated(*tensors)
        )
    if is_differentiated:
        raise NotImplementedError(
            f"{op} has no derivatives, not with torch.func or forward-mode AD either: detach its arguments, and score"
            " the documents that it returns with lik_ops.maxsim"
        )


maxsim_topk.register_autograd(
    make_raising_backward("maxsim_topk", "score the documents that it returns with lik_ops.maxsim")
)
maxsim_topk.register_vmap(batching.vmap_topk)


def search_best(s: SearchArgs) -> ScoresAndIndices:
    """Call `lik::maxsim_topk` for a 3-D Q and validated arguments, with masks of any dtype, without gradients."""
    s = s._replace(q_mask=as_bool(s.q_mask), d_mask=as_bool(s.d_mask))
    if not torch.compiler.is_dynamo_compiling() and is_call_direct(*s[:6]):
        return _run_search(s)
    return lik.maxsim_topk(*s)
