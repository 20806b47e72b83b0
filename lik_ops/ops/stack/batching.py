"""`torch.vmap` of the operators: the batch axis is folded into existing axes, so that one call serves the batch.

Folding copies tensors that the samples share, unless the layout can express the sharing. If the copies need more than
`MAX_COPIED_BYTES`, the samples are computed one by one from the original tensors.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from ..._ops import ops as lik
from ...core.arguments import score_dtype

MAX_COPIED_BYTES = 32 << 20

Outputs = tuple[tuple[Tensor, ...], tuple[int | None, ...]]


class _VmapBatch:
    """The arguments of a batch of calls, with the batch axis first."""

    def __init__(self, size: int, in_dims: tuple, args: tuple) -> None:
        self.size, self.is_batched = size, [dim is not None for dim in in_dims[: len(args)]]
        self.args = tuple(a if dim is None else a.movedim(dim, 0) for a, dim in zip(args, in_dims, strict=False))

    def sample_dim(self, i: int) -> int:
        """Return the rank of argument i in a sample."""
        return self.args[i].dim() - self.is_batched[i]

    def expand(self, i: int) -> Any:
        """Return argument i with the batch axis, expanded if the samples share it. None stays None."""
        x = self.args[i]
        return x if x is None or self.is_batched[i] else x.expand(self.size, *x.shape)

    def fold(self, i: int, axis: int = 0) -> Any:
        """Return argument i with the batch axis folded into `axis` of its samples."""
        x = self.expand(i)
        return None if x is None else x.movedim(0, axis).flatten(axis, axis + 1)

    def fold_only(self, folded_args: tuple[int, ...], among: tuple[int, ...]) -> list:
        """Return the arguments `among`, of which only `folded_args` are folded. The samples share the others."""
        return [self.fold(i) if i in folded_args else self.args[i] for i in among]

    def any_of(self, *indices: int) -> bool:
        """Return whether any of these arguments has a batch axis."""
        return any(self.is_batched[i] for i in indices)

    def is_too_large_to_copy(self, i: int, times: Any = None) -> bool:
        """Return whether copying argument i for each sample, or `times`, exceeds the limit. Symbolic sizes do not."""
        x = self.args[i]
        if times is None:
            if self.is_batched[i]:
                return False
            times = self.size
        total = x.numel() * times * x.element_size()
        return isinstance(total, int) and times != 1 and total > MAX_COPIED_BYTES

    def run_samples(self, op: Any, *constants: Any) -> Outputs:
        """Return the stacked outputs of `op` for each sample."""
        args = list(zip(self.args, self.is_batched, strict=True))
        if not self.size:  # one sample of zeros determines the shapes of the outputs
            args = [(x.new_zeros((1, *x.shape[1:])) if batched else x, batched) for x, batched in args]
        samples = [op(*(x[b] if batched else x for x, batched in args), *constants) for b in range(self.size or 1)]
        return tuple(torch.stack(x)[: self.size] for x in zip(*samples, strict=True)), (0,) * len(samples[0])


def vmap_forward(
    info: Any, in_dims: tuple, Q, D, q_mask, d_mask, q_weight, normalize: bool, argmax_dtype, backward: str
) -> Outputs:
    """Return the outputs of `lik::maxsim_fwd` for a batch."""
    batch, op = _VmapBatch(info.batch_size, in_dims, (Q, D, q_mask, d_mask, q_weight)), lik.maxsim_fwd
    B, constants = batch.size, (normalize, argmax_dtype, backward)
    candidates = batch.sample_dim(1) == 4
    Nq = batch.args[0].shape[-3]
    if not candidates and not batch.any_of(1, 3):
        return _side_forward(batch, op, constants, queries=True)
    if not candidates and not batch.any_of(0, 2, 4) and not batch.is_too_large_to_copy(1):
        return _side_forward(batch, op, constants, queries=False)
    if batch.is_too_large_to_copy(1) or (not candidates and batch.is_too_large_to_copy(1, Nq)):
        return batch.run_samples(op, *constants)
    D, d_mask = _expand_candidates(batch, Nq, candidates)
    scores, argmax = op(batch.fold(0), D, batch.fold(2), d_mask, batch.fold(4), *constants)
    scores = scores.unflatten(0, (B, Nq))
    if argmax_dtype is None:
        return (scores, argmax), (0, None)
    argmax = argmax.unflatten(0, (B, Nq))
    return (scores, argmax if candidates else argmax.transpose(1, 2)), (0, 0)


def register_loop(*ops: CustomOpDef) -> None:
    """Register a batching rule that computes one sample at a time, for operators whose tensors come first."""
    for op in ops:
        last = max(n for n, x in enumerate(op._opoverload._schema.arguments) if "Tensor" in str(x.type))
        op.register_vmap(partial(_loop_over_samples, op, last + 1))


def _loop_over_samples(op: CustomOpDef, tensors: int, info: Any, in_dims: tuple, *args: Any) -> Outputs:
    """Return the outputs of an operator for a batch. Its first arguments are `tensors` tensors."""
    return _VmapBatch(info.batch_size, in_dims, args[:tensors]).run_samples(op, *args[tensors:])


def vmap_topk(
    info: Any, in_dims: tuple, Q, D, q_mask, d_mask, cu_seqlens_d, q_weight, normalize: bool, top_k: int, chunk
) -> Outputs:
    """Return the outputs of `lik::maxsim_topk` for a batch. One call serves all samples that share the documents."""
    batch = _VmapBatch(info.batch_size, in_dims, (Q, D, q_mask, d_mask, cu_seqlens_d, q_weight))
    op = lik.maxsim_topk
    if batch.any_of(1, 3, 4):
        return batch.run_samples(op, normalize, top_k, chunk)
    _, D, _, d_mask, cu_seqlens_d, _ = batch.args
    results = op(batch.fold(0), D, batch.fold(2), d_mask, cu_seqlens_d, batch.fold(5), normalize, top_k, chunk)
    return tuple(x.unflatten(0, (batch.size, batch.args[0].shape[-3])) for x in results), (0, 0)


def _side_forward(batch: _VmapBatch, op: Any, constants: tuple, queries: bool) -> Outputs:
    """Return the outputs of a cross product whose samples share one side. The other side is folded."""
    side_args, axis = ((0, 2, 4), 0) if queries else ((1, 3), 1)
    sizes = batch.size, batch.args[axis].shape[-3]
    scores, argmax = op(*batch.fold_only(side_args, (0, 1, 2, 3, 4)), *constants)
    scores = scores.unflatten(axis, sizes)
    if argmax.dim() == 1:
        return (scores, argmax), (axis, None)
    return (scores, argmax.unflatten(1 - axis, sizes)), (axis, 1 - axis)


def _expand_candidates(batch: _VmapBatch, Nq: Any, candidates: bool) -> tuple[Tensor, Tensor | None]:
    """Return the documents and their mask as candidates of each query of each sample."""
    if candidates:
        return batch.fold(1), batch.fold(3)
    D, d_mask = batch.expand(1), batch.expand(3)
    D = D.unsqueeze(1).expand(-1, Nq, -1, -1, -1).flatten(0, 1)
    return D, None if d_mask is None else d_mask.unsqueeze(1).expand(-1, Nq, -1, -1).flatten(0, 1)


def vmap_backward(
    op: Any, info: Any, in_dims: tuple, g, Q, D, argmax, q_mask, d_mask, q_weight, normalize: bool, needs: list[bool]
) -> Outputs:
    """Return the outputs of a backward operator for a batch."""
    batch = _VmapBatch(info.batch_size, in_dims, (g, Q, D, argmax, q_mask, d_mask, q_weight))
    candidates = batch.sample_dim(2) == 4
    Nq = batch.args[1].shape[-3]
    query_needs, document_needs = [needs[0], False, needs[2]], [False, needs[1], False]
    if isinstance(batch.size, int) and batch.size == 0:
        dtypes = (Q.dtype, D.dtype, score_dtype(Q.dtype))
        return _unfold_gradients(tuple(Q.new_empty(0, dtype=dtype) for dtype in dtypes), needs, batch)
    if candidates or (isinstance(Nq, int) and Nq == 1 and batch.any_of(2, 5)):
        if not batch.is_too_large_to_copy(2):
            return _candidates_backward(batch, op, candidates, normalize, needs)
    elif not batch.any_of(2, 5) and not needs[1]:
        return _side_backward(batch, op, normalize, query_needs, queries=True)
    elif not batch.any_of(1, 4, 6) and not any(query_needs):
        return _side_backward(batch, op, normalize, document_needs, queries=False)
    elif not batch.any_of(1, 2, 4, 5, 6):
        (grad_Q, _, grad_w), (q_dim, _, w_dim) = _side_backward(batch, op, normalize, query_needs, queries=True)
        (_, grad_D, _), (_, d_dim, _) = _side_backward(batch, op, normalize, document_needs, queries=False)
        return (grad_Q, grad_D, grad_w), (q_dim, d_dim, w_dim)
    return batch.run_samples(op, normalize, needs)


def _unfold_gradients(grads: tuple[Tensor, ...], needs: list[bool], batch: _VmapBatch) -> Outputs:
    """Return the gradients with a batch axis, unless not needed."""
    sizes = [batch.args[i].shape[batch.is_batched[i] :] for i in (1, 2)]
    batched_grads = tuple(
        g.reshape((batch.size, *s)) if n else g for g, n, s in zip(grads, needs, (*sizes, sizes[0][:-1]), strict=True)
    )
    return batched_grads, tuple(0 if n else None for n in needs)


def _candidates_backward(batch: _VmapBatch, op: Any, candidates: bool, normalize: bool, needs: list[bool]) -> Outputs:
    """Return the gradients of a batch whose documents are candidates of each query."""
    argmax = batch.expand(3)
    if batch.sample_dim(3) == 1:
        argmax = batch.args[3].flatten()[:0]
    else:
        argmax = (argmax if candidates else argmax.transpose(1, 2)).flatten(0, 1)
    D, d_mask = (batch.fold(2), batch.fold(5)) if candidates else (batch.expand(2), batch.expand(5))
    queries = batch.fold(1), D, argmax, batch.fold(4), d_mask, batch.fold(6)
    return _unfold_gradients(op(batch.fold(0), *queries, normalize, needs), needs, batch)


def _side_backward(batch: _VmapBatch, op: Any, normalize: bool, needs: list[bool], queries: bool) -> Outputs:
    """Return the gradients of the side that is folded. The gradients of the shared side must not be needed."""
    grad_scores, argmax = batch.fold(0, 0 if queries else 1), batch.args[3].flatten()[:0]
    if batch.sample_dim(3) == 3:
        argmax = batch.fold(3, 1 if queries else 0)
    side_args = (1, 4, 6) if queries else (2, 5)
    Q, D, *options = batch.fold_only(side_args, (1, 2, 4, 5, 6))
    return _unfold_gradients(op(grad_scores, Q, D, argmax, *options, normalize, needs), needs, batch)
