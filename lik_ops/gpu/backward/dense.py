"""The backward half of the Triton backend: its arguments and outputs, and the parts whose winners fit the workspace."""

from __future__ import annotations

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
from ..runtime.arguments import choose_offset_width, is_tf32_allowed, make_document_args, make_query_args, use_device
from ..runtime.arguments import make_size_args as sizes_of
from ..runtime.capture import Calls
from .call import GradientCall
from .documents import write_document_gradients

_MAX_ARGMAX_BYTES = 8 * 2**20  # of winners found again at a time; one query's or document's may be more
Gradients = tuple[Tensor, Tensor, Tensor]  # of Q, D and q_weight
captured_calls = Calls()


def _allocate_gradient(
    x: Tensor, need: bool, shape: torch.Size | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Memory for the gradient of `x`, or of what has another shape and dtype; [0] where it is not needed."""
    return x.new_empty((x.shape if shape is None else shape) if need else (0,), dtype=dtype)


def allocate_gradients(Q: Tensor, D: Tensor, needs: list[bool], trivial: bool) -> Gradients:
    """A gradient for each of Q, D, q_weight: zeros where the call is `trivial`, [0] where not needed."""
    found = (
        _allocate_gradient(Q, needs[0]),
        _allocate_gradient(D, needs[1], dtype=Q.dtype),
        _allocate_gradient(Q, needs[2], Q.shape[:-1], torch.float32),
    )
    return tuple(x.zero_() for x in found) if trivial else found  # type: ignore[return-value]


class BackwardArgs(NamedTuple):
    """The arguments of a backward; `argmax` is None where the winners are to be found again. `scale` is that of int8
    documents, which have winners."""

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
        return *self[:7], self.scale

    @property
    def is_trivial(self) -> bool:
        """Whether nothing can flow."""
        return self.Q.numel() == 0 or self.D.numel() == 0

    def allocate_outputs(self) -> Gradients:
        return allocate_gradients(self.Q, self.D, self.needs, self.is_trivial)

    def part(self, queries: slice, documents: slice) -> BackwardArgs:
        """Of some queries, and of some documents of the cross product, with their winners."""
        q_mask, q_weight = (None if t is None else t[queries] for t in (self.q_mask, self.q_weight))
        own = queries if self.D.dim() == 4 else documents
        D, d_mask = self.D[own], None if self.d_mask is None else self.d_mask[own]
        Q, dtype = self.Q[queries], choose_argmax_dtype(D.shape[-2])
        argmax = forward(Q, D, q_mask, d_mask, q_weight, self.normalize, dtype)[1]
        grad_scores = self.grad_scores[queries, documents]
        return BackwardArgs(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, self.normalize, self.needs)


def _select_needed(outputs: Sequence[Tensor], needs: list[bool]) -> list[Tensor | None]:
    return [g if need else None for g, need in zip(outputs, needs, strict=True)]


def _make_call(a: BackwardArgs) -> GradientCall:
    assert a.argmax is not None
    stride_q, stride_k = a.grad_scores.stride()
    scale = None if a.scale is None else a.scale.contiguous()
    up = UpstreamArgs(a.grad_scores, stride_q, stride_k, a.argmax.contiguous(), *sizes_of(a.Q, a.D), scale=scale)
    queries, documents = (
        make_query_args(a.Q, a.q_mask, a.q_weight),
        make_document_args(a.D, None),
    )  # masked tokens win nothing
    return GradientCall(queries, documents, up, a.D.dim() == 4, a.normalize, choose_offset_width(a.Q, a.D))


def _iterate_parts(a: BackwardArgs, outputs: Gradients) -> Iterator[tuple[BackwardArgs, Sequence[Tensor]]]:
    """The call in parts whose winners fit the workspace, with the gradients that each part completes."""
    sizes, candidates = sizes_of(a.Q, a.D), a.D.dim() == 4
    row_bytes = sizes.Lq * choose_argmax_dtype(sizes.Ld).itemsize
    for i, j, needs in split_argmax_to_fit(sizes.Nq, sizes.K, row_bytes, _MAX_ARGMAX_BYTES, candidates, a.needs):
        places = i, i if candidates else j, i
        cut = [t[own] if need else t for t, own, need in zip(outputs, places, needs, strict=True)]
        yield a.part(i, j)._replace(needs=needs), cut


def backward_lowmem(*arguments: Any) -> Gradients:
    """Gradients of Q, D and q_weight, each element summed in a fixed order by the program that owns it.

    Takes the fields of `BackwardArgs`. Winners that are not given are found again, in parts that need no more memory
    than a constant.
    """
    return _replay_or_run(_run_lowmem, BackwardArgs(*arguments))


def _replay_or_run(function: Callable[[BackwardArgs], Gradients], a: BackwardArgs) -> Gradients:
    """What `function` returns, replayed where a call like it was made before."""
    stride = a.grad_scores.stride()
    if a.argmax is None:  # to be found again, by whatever a forward may use now
        argmax: tuple = (is_tf32_allowed(a.Q.dtype),)
    else:
        argmax = a.argmax.dtype, a.argmax.stride()
    found = make_metadata_key(a.Q, a.D, a.q_mask, a.d_mask, a.q_weight)
    key = (function, *found, stride, *argmax, a.normalize, *a.needs)
    return captured_calls.run(key, a.tensors(), a.Q.device, function, a)


class GradientPlan:
    """`backward_lowmem` or `backward_unified` of calls whose tensors and options have one description."""

    def __init__(self, unified: bool) -> None:
        self.unified, self.calls = unified, Calls()

    def __call__(self, *arguments: Any) -> Gradients:
        if self.unified:
            require_nondeterminism_allowed()
        tensors = arguments[:7] if len(arguments) < len(BackwardArgs._fields) else (*arguments[:7], arguments[-1])
        return self.calls.run((), tensors, arguments[1].device, self._run_uncaptured, arguments)

    def _run_uncaptured(self, arguments: tuple) -> Gradients:
        return (_run_unified if self.unified else _run_lowmem)(BackwardArgs(*arguments))


def _run_lowmem(a: BackwardArgs) -> Gradients:
    if a.is_trivial:
        return a.allocate_outputs()
    with use_device(a.Q.device):
        return _recompute_argmax(a) if a.argmax is None else _run_with_argmax(a)


def _recompute_argmax(a: BackwardArgs) -> Gradients:
    """`backward_lowmem` where the winners are found again, in parts."""
    outputs = a.allocate_outputs()
    for part, targets in _iterate_parts(a, outputs):
        call, wanted = _make_call(part), _select_needed(targets, part.needs)
        if part.needs[0] or part.needs[2]:
            call.write_query_gradients(wanted[0], wanted[2])
        if part.needs[1]:
            write_document_gradients(call, targets[1])
    return outputs


def _run_with_argmax(a: BackwardArgs) -> Gradients:
    """`backward_lowmem` of given winners. Their lists are gone when memory for the gradient of the queries is taken."""
    Q, D, (of_Q, of_D, of_weight) = a.Q, a.D, a.needs
    call, grad_D = _make_call(a), _allocate_gradient(D, of_D, dtype=Q.dtype)
    if of_D:
        write_document_gradients(call, grad_D)
    grad_Q, grad_weight = _allocate_gradient(Q, of_Q), _allocate_gradient(Q, of_weight, Q.shape[:2], torch.float32)
    if of_Q or of_weight:
        call.write_query_gradients(grad_Q if of_Q else None, grad_weight if of_weight else None)
    return grad_Q, grad_D, grad_weight


def require_nondeterminism_allowed() -> None:
    """Do as torch's own atomic operations under `torch.use_deterministic_algorithms`: raise, or warn if told to."""
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
    """The call in parts whose winners fit the workspace, each with the sums that it adds to."""
    if a.argmax is not None:
        yield a, sum_Q, sum_D
        return
    sizes, everything, candidates = sizes_of(a.Q, a.D), slice(None), a.D.dim() == 4
    count, others = (sizes.Nq, sizes.K) if candidates else (sizes.K, sizes.Nq)
    for own in split_to_fit(count, others * sizes.Lq * choose_argmax_dtype(sizes.Ld).itemsize, _MAX_ARGMAX_BYTES):
        part_D = None if sum_D is None else sum_D[own]
        if candidates:
            yield a.part(own, everything), None if sum_Q is None else sum_Q[own], part_D
        else:
            yield a.part(everything, own), sum_Q, part_D


def backward_unified(*arguments: Any) -> Gradients:
    """The same of `BackwardArgs` in one pass over the winners, through fp32 sums and atomic adds.

    Raises:
        RuntimeError: under `torch.use_deterministic_algorithms(True)`.
    """
    require_nondeterminism_allowed()
    return _replay_or_run(_run_unified, BackwardArgs(*arguments))


def _run_unified(a: BackwardArgs) -> Gradients:
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
        wanted = _select_needed(outputs, needs)
        if sum_Q is not None:
            X = make_document_args(Q.unsqueeze(1), None)
            call.write_gradients(X, sum_Q.unsqueeze(1), wanted[0], wanted[2], choose_offset_width(Q, Q), True)
        if sum_D is not None:
            D, sum_D = (x if x.dim() == 4 else x.unsqueeze(0) for x in (D, sum_D))
            call.write_gradients(make_document_args(D, None), sum_D, outputs[1], None, choose_offset_width(D, D), False)
    return outputs
