"""Backward of dense layouts: arguments, outputs, and the parts of a call whose argmax fits the workspace."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._ops import add_op_namespace_prefix
from ...core.arguments import choose_argmax_dtype, make_metadata_key
from ...csrc_triton.backward.arguments import UpstreamArgs
from ...portable.blocks import split_argmax_to_fit, split_to_fit
from ..forward.dense import forward
from ..runtime.arguments import (
    choose_offset_width,
    is_tf32_allowed,
    make_document_args,
    make_query_args,
    make_size_args,
    use_device,
)
from ..runtime.capture import Calls
from .call import GradientCall
from .documents import write_document_gradients

# Recomputed argmax of a part. The argmax of a single query or document may be larger.
_MAX_ARGMAX_BYTES = 8 * 2**20
Gradients = tuple[Tensor, Tensor, Tensor]  # of Q, D and q_weight
captured_calls = Calls()


def _allocate_gradient(
    x: Tensor, need: bool, shape: torch.Size | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return memory for the gradient of `x`, with another shape and dtype if given.

    The result has shape [0] if the gradient is not needed.
    """
    return x.new_empty((x.shape if shape is None else shape) if need else (0,), dtype=dtype)


def allocate_gradients(Q: Tensor, D: Tensor, needs: list[bool], trivial: bool) -> Gradients:
    """Return memory for the gradients of Q, D, and q_weight.

    Args:
        Q: query tokens.
        D: document tokens.
        needs: whether the gradients of Q, D, and q_weight are needed. Other gradients have shape [0].
        trivial: whether all gradients are zero.
    """
    gradients = (
        _allocate_gradient(Q, needs[0]),
        _allocate_gradient(D, needs[1], dtype=Q.dtype),
        _allocate_gradient(Q, needs[2], Q.shape[:-1], torch.float32),
    )
    return tuple(x.zero_() for x in gradients) if trivial else gradients  # type: ignore[return-value]


class BackwardArgs(NamedTuple):
    """The arguments of a backward call.

    `argmax` is None if the backward has to recompute it. `scale` is the scale of int8 documents, which always have an
    argmax.
    """

    grad_scores: Tensor
    Q: Tensor
    D: Tensor
    argmax: Tensor | None
    q_mask: Tensor | None
    d_mask: Tensor | None
    q_weight: Tensor | None
    normalize: bool
    needs: list[bool]
    scale: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors of the call."""
        return *self[:7], self.scale

    @property
    def is_trivial(self) -> bool:
        """Return whether no gradient can flow."""
        return self.Q.numel() == 0 or self.D.numel() == 0

    def allocate_outputs(self) -> Gradients:
        """Return memory for all gradients."""
        return allocate_gradients(self.Q, self.D, self.needs, self.is_trivial)

    def part(self, queries: slice, documents: slice) -> BackwardArgs:
        """Return the call for a slice of queries and a slice of documents, with their recomputed argmax."""
        q_mask, q_weight = (None if t is None else t[queries] for t in (self.q_mask, self.q_weight))
        document_slice = queries if self.D.dim() == 4 else documents
        D, d_mask = self.D[document_slice], None if self.d_mask is None else self.d_mask[document_slice]
        Q, dtype = self.Q[queries], choose_argmax_dtype(D.shape[-2])
        argmax = forward(Q, D, q_mask, d_mask, q_weight, self.normalize, dtype)[1]
        grad_scores = self.grad_scores[queries, documents]
        return BackwardArgs(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, self.normalize, self.needs)


def select_needed(outputs: Sequence[Tensor], needs: list[bool]) -> list[Tensor | None]:
    """Return each needed output, and None for the others."""
    return [g if is_needed else None for g, is_needed in zip(outputs, needs, strict=True)]


def _make_call(a: BackwardArgs) -> GradientCall:
    """Return the kernel arguments of a call."""
    assert a.argmax is not None
    stride_q, stride_k = a.grad_scores.stride()
    scale = None if a.scale is None else a.scale.contiguous()
    up = UpstreamArgs(a.grad_scores, stride_q, stride_k, a.argmax.contiguous(), *make_size_args(a.Q, a.D), scale=scale)
    queries = make_query_args(a.Q, a.q_mask, a.q_weight)
    documents = make_document_args(a.D, None)  # a masked token is never an argmax
    wide, tf32 = choose_offset_width(a.Q, a.D), is_tf32_allowed(a.Q.dtype)
    return GradientCall(queries, documents, up, a.D.dim() == 4, a.normalize, wide, tf32=tf32)


def _iterate_parts(a: BackwardArgs, outputs: Gradients) -> Iterator[tuple[BackwardArgs, Sequence[Tensor]]]:
    """Yield parts of the call whose argmax fits the workspace, with the gradients that each part completes."""
    sizes, candidates = make_size_args(a.Q, a.D), a.D.dim() == 4
    row_bytes = sizes.Lq * choose_argmax_dtype(sizes.Ld).itemsize
    for i, j, needs in split_argmax_to_fit(sizes.Nq, sizes.K, row_bytes, _MAX_ARGMAX_BYTES, candidates, a.needs):
        part_slices = i, i if candidates else j, i
        part_outputs = [
            t[part_slice] if is_needed else t
            for t, part_slice, is_needed in zip(outputs, part_slices, needs, strict=True)
        ]
        yield a.part(i, j)._replace(needs=needs), part_outputs


def backward_lowmem(*arguments: Any) -> Gradients:
    """Compute the gradients of Q, D, and q_weight without atomics.

    Each element is owned by one program, which sums in a fixed order.
    A missing argmax is recomputed, in parts that need constant memory.

    Args:
        *arguments: the fields of `BackwardArgs`.

    Returns:
        The gradients of Q, D, and q_weight, with shape [0] if not needed.
    """
    return _replay_or_run(_run_lowmem, BackwardArgs(*arguments))


def _replay_or_run(function: Callable[[BackwardArgs], Gradients], a: BackwardArgs) -> Gradients:
    """Return the result of `function`, replayed if a call with the same metadata was captured."""
    stride = a.grad_scores.stride()
    argmax = None if a.argmax is None else (a.argmax.dtype, a.argmax.stride())
    metadata = make_metadata_key(a.Q, a.D, a.q_mask, a.d_mask, a.q_weight)
    key = (function, *metadata, stride, argmax, a.normalize, *a.needs, is_tf32_allowed(a.Q.dtype))
    return captured_calls.run(key, a.tensors(), a.Q.device, function, a)


class GradientPlan:
    """`backward_lowmem` or `backward_unified` for calls whose tensors and options have the same metadata."""

    def __init__(self, unified: bool) -> None:
        self.unified, self.calls = unified, Calls()

    def __call__(self, *arguments: Any) -> Gradients:
        """Return the gradients for the fields of `BackwardArgs`."""
        if self.unified:
            require_nondeterminism_allowed()
        tensors = arguments[:7] if len(arguments) < len(BackwardArgs._fields) else (*arguments[:7], arguments[-1])
        key = (is_tf32_allowed(arguments[1].dtype),)
        return self.calls.run(key, tensors, arguments[1].device, self._run_uncaptured, arguments)

    def _run_uncaptured(self, arguments: tuple) -> Gradients:
        """Return the gradients, without capture."""
        return (_run_unified if self.unified else _run_lowmem)(BackwardArgs(*arguments))


def _run_lowmem(a: BackwardArgs) -> Gradients:
    """Return the gradients of `backward_lowmem`, without capture."""
    if a.is_trivial:
        return a.allocate_outputs()
    with use_device(a.Q.device):
        return _recompute_argmax(a) if a.argmax is None else _run_with_argmax(a)


def _recompute_argmax(a: BackwardArgs) -> Gradients:
    """Return the gradients of `backward_lowmem` with an argmax that is recomputed in parts."""
    outputs = a.allocate_outputs()
    for part, targets in _iterate_parts(a, outputs):
        call = _make_call(part)._replace(all_documents=math.prod(a.D.shape[:-2]))
        grad_Q, grad_D, grad_weight = select_needed(targets, part.needs)
        call.write_query_gradients(grad_Q, grad_weight)
        if grad_D is not None:
            write_document_gradients(call, grad_D)
    return outputs


def _run_with_argmax(a: BackwardArgs) -> Gradients:
    """Return the gradients of `backward_lowmem` for a given argmax.

    The argmax lists are freed before memory for the query gradient is allocated.
    """
    Q, D, (needs_Q, needs_D, needs_weight) = a.Q, a.D, a.needs
    call, grad_D = _make_call(a), _allocate_gradient(D, needs_D, dtype=Q.dtype)
    if needs_D:
        write_document_gradients(call, grad_D)
    grad_Q, grad_weight = (
        _allocate_gradient(Q, needs_Q),
        _allocate_gradient(Q, needs_weight, Q.shape[:2], torch.float32),
    )
    call.write_query_gradients(grad_Q if needs_Q else None, grad_weight if needs_weight else None)
    return grad_Q, grad_D, grad_weight


def require_nondeterminism_allowed() -> None:
    """Raise or warn under `torch.use_deterministic_algorithms`, as PyTorch's own atomic operations do.

    Raises:
        RuntimeError: deterministic algorithms are enabled and not set to warn only.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return
    op = add_op_namespace_prefix("maxsim_bwd_unified")
    message = (
        f"{op} adds atomically and does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. Use backward='lowmem', or 'auto'."
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=2)


def _iterate_scatter_parts(
    a: BackwardArgs, sum_Q: Tensor | None, sum_D: Tensor | None
) -> Iterator[tuple[BackwardArgs, Tensor | None, Tensor | None]]:
    """Yield parts of the call whose argmax fits the workspace, each with the sums that it adds to."""
    if a.argmax is not None:
        yield a, sum_Q, sum_D
        return
    sizes, full_slice, candidates = make_size_args(a.Q, a.D), slice(None), a.D.dim() == 4
    count, other_count = (sizes.Nq, sizes.K) if candidates else (sizes.K, sizes.Nq)
    for part_slice in split_to_fit(
        count, other_count * sizes.Lq * choose_argmax_dtype(sizes.Ld).itemsize, _MAX_ARGMAX_BYTES
    ):
        part_D = None if sum_D is None else sum_D[part_slice]
        if candidates:
            yield a.part(part_slice, full_slice), None if sum_Q is None else sum_Q[part_slice], part_D
        else:
            yield a.part(full_slice, part_slice), sum_Q, part_D


def backward_unified(*arguments: Any) -> Gradients:
    """Compute the gradients in one pass over the argmax, with fp32 sums and atomic adds.

    Args:
        *arguments: the fields of `BackwardArgs`.

    Returns:
        The gradients of Q, D, and q_weight, with shape [0] if not needed.

    Raises:
        RuntimeError: under `torch.use_deterministic_algorithms(True)`.
    """
    require_nondeterminism_allowed()
    return _replay_or_run(_run_unified, BackwardArgs(*arguments))


def _run_unified(a: BackwardArgs) -> Gradients:
    """Return the gradients of `backward_unified`, without capture."""
    Q, D, needs, outputs = a.Q, a.D, a.needs, a.allocate_outputs()
    if a.is_trivial:
        return outputs
    sum_Q = torch.zeros(Q.shape, dtype=torch.float32, device=Q.device) if needs[0] or needs[2] else None
    sum_D = torch.zeros(D.shape, dtype=torch.float32, device=Q.device) if needs[1] else None
    with use_device(Q.device):
        for part, part_Q, part_D in _iterate_scatter_parts(a, sum_Q, sum_D):
            call = _make_call(part)
            call.scatter(part_Q, part_D)
        call = call._replace(queries=make_query_args(Q, a.q_mask, a.q_weight))
        grad_Q, grad_D, grad_weight = select_needed(outputs, needs)
        if sum_Q is not None:
            X = make_document_args(Q.unsqueeze(1), None)
            call.write_gradients(X, sum_Q.unsqueeze(1), grad_Q, grad_weight, choose_offset_width(Q, Q), True)
        if sum_D is not None:
            D, sum_D = (x if x.dim() == 4 else x.unsqueeze(0) for x in (D, sum_D))
            call.write_gradients(make_document_args(D, None), sum_D, grad_D, None, choose_offset_width(D, D), False)
    return outputs
