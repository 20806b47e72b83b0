"""The backward half of the Triton backend: its arguments and outputs, and the parts whose winners fit the workspace."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._ops import add_op_namespace_prefix
from ...core.arguments import argmax_dtype_for, metadata
from ...csrc_triton.backward.arguments import Upstream
from ...portable.blocks import slices_within, winners_within
from ..forward.dense import forward
from ..runtime.arguments import allow_tf32, documents_of, on_device, queries_of, wide_of
from ..runtime.arguments import sizes as sizes_of
from ..runtime.capture import Calls
from .call import GradientCall
from .documents import into_documents

_ARGMAX_BYTES = 8 * 2**20  # of winners found again at a time; one query's or document's may be more
Gradients = tuple[Tensor, Tensor, Tensor]  # of Q, D and q_weight
calls = Calls()


def _output(x: Tensor, need: bool, shape: torch.Size | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for the gradient of `x`, or of what has another shape and dtype; [0] where it is not needed."""
    return x.new_empty((x.shape if shape is None else shape) if need else (0,), dtype=dtype)


def outputs_of(Q: Tensor, D: Tensor, needs: list[bool], trivial: bool) -> Gradients:
    """A gradient for each of Q, D, q_weight: zeros where the call is `trivial`, [0] where not needed."""
    found = (
        _output(Q, needs[0]),
        _output(D, needs[1], dtype=Q.dtype),
        _output(Q, needs[2], Q.shape[:-1], torch.float32),
    )
    return tuple(x.zero_() for x in found) if trivial else found  # type: ignore[return-value]


class Arguments(NamedTuple):
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
    def trivial(self) -> bool:
        """Whether nothing can flow."""
        return self.Q.numel() == 0 or self.D.numel() == 0

    def outputs(self) -> Gradients:
        return outputs_of(self.Q, self.D, self.needs, self.trivial)

    def part(self, queries: slice, documents: slice) -> Arguments:
        """Of some queries, and of some documents of the cross product, with their winners."""
        q_mask, q_weight = (None if t is None else t[queries] for t in (self.q_mask, self.q_weight))
        own = queries if self.D.dim() == 4 else documents
        D, d_mask = self.D[own], None if self.d_mask is None else self.d_mask[own]
        Q, dtype = self.Q[queries], argmax_dtype_for(D.shape[-2])
        argmax = forward(Q, D, q_mask, d_mask, q_weight, self.normalize, dtype)[1]
        grad_scores = self.grad_scores[queries, documents]
        return Arguments(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, self.normalize, self.needs)


def _wanted(outputs: Sequence[Tensor], needs: list[bool]) -> list[Tensor | None]:
    return [g if need else None for g, need in zip(outputs, needs, strict=True)]


def _call(a: Arguments) -> GradientCall:
    assert a.argmax is not None
    stride_q, stride_k = a.grad_scores.stride()
    scale = None if a.scale is None else a.scale.contiguous()
    up = Upstream(a.grad_scores, stride_q, stride_k, a.argmax.contiguous(), *sizes_of(a.Q, a.D), scale=scale)
    queries, documents = queries_of(a.Q, a.q_mask, a.q_weight), documents_of(a.D, None)  # masked tokens win nothing
    return GradientCall(queries, documents, up, a.D.dim() == 4, a.normalize, wide_of(a.Q, a.D))


def _parts(a: Arguments, outputs: Gradients) -> Iterator[tuple[Arguments, Sequence[Tensor]]]:
    """The call in parts whose winners fit the workspace, with the gradients that each part completes."""
    sizes, candidates = sizes_of(a.Q, a.D), a.D.dim() == 4
    row_bytes = sizes.Lq * argmax_dtype_for(sizes.Ld).itemsize
    for i, j, needs in winners_within(sizes.Nq, sizes.K, row_bytes, _ARGMAX_BYTES, candidates, a.needs):
        places = i, i if candidates else j, i
        cut = [t[own] if need else t for t, own, need in zip(outputs, places, needs, strict=True)]
        yield a.part(i, j)._replace(needs=needs), cut


def backward_lowmem(*arguments: Any) -> Gradients:
    """Gradients of Q, D and q_weight, each element summed in a fixed order by the program that owns it.

    Takes the fields of `Arguments`. Winners that are not given are found again, in parts that need no more memory than
    a constant.
    """
    return _again(_lowmem, Arguments(*arguments))


def _again(function: Callable[[Arguments], Gradients], a: Arguments) -> Gradients:
    """What `function` returns, replayed where a call like it was made before."""
    stride = a.grad_scores.stride()
    if a.argmax is None:  # to be found again, by whatever a forward may use now
        winners: tuple = (allow_tf32(a.Q.dtype),)
    else:
        winners = a.argmax.dtype, a.argmax.stride()
    found = metadata(a.Q, a.D, a.q_mask, a.d_mask, a.q_weight)
    key = (function, *found, stride, *winners, a.normalize, *a.needs)
    return calls.run(key, a.tensors(), a.Q.device, function, a)


class GradientPlan:
    """`backward_lowmem` or `backward_unified` of calls whose tensors and options have one description."""

    def __init__(self, unified: bool) -> None:
        self.unified, self.calls = unified, Calls()

    def __call__(self, *arguments: Any) -> Gradients:
        if self.unified:
            require_nondeterminism_allowed()
        tensors = arguments[:7] if len(arguments) < len(Arguments._fields) else (*arguments[:7], arguments[-1])
        return self.calls.run((), tensors, arguments[1].device, self._in_full, arguments)

    def _in_full(self, arguments: tuple) -> Gradients:
        return (_unified if self.unified else _lowmem)(Arguments(*arguments))


def _lowmem(a: Arguments) -> Gradients:
    if a.trivial:
        return a.outputs()
    with on_device(a.Q.device):
        return _found_winners(a) if a.argmax is None else _known_winners(a)


def _found_winners(a: Arguments) -> Gradients:
    """`backward_lowmem` where the winners are found again, in parts."""
    outputs = a.outputs()
    for part, targets in _parts(a, outputs):
        call, wanted = _call(part), _wanted(targets, part.needs)
        if part.needs[0] or part.needs[2]:
            call.into_queries(wanted[0], wanted[2])
        if part.needs[1]:
            into_documents(call, targets[1])
    return outputs


def _known_winners(a: Arguments) -> Gradients:
    """`backward_lowmem` of given winners. Their lists are gone when memory for the gradient of the queries is taken."""
    Q, D, (of_Q, of_D, of_weight) = a.Q, a.D, a.needs
    call, grad_D = _call(a), _output(D, of_D, dtype=Q.dtype)
    if of_D:
        into_documents(call, grad_D)
    grad_Q, grad_weight = _output(Q, of_Q), _output(Q, of_weight, Q.shape[:2], torch.float32)
    if of_Q or of_weight:
        call.into_queries(grad_Q if of_Q else None, grad_weight if of_weight else None)
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


def _scattered_parts(
    a: Arguments, sum_Q: Tensor | None, sum_D: Tensor | None
) -> Iterator[tuple[Arguments, Tensor | None, Tensor | None]]:
    """The call in parts whose winners fit the workspace, each with the sums that it adds to."""
    if a.argmax is not None:
        yield a, sum_Q, sum_D
        return
    sizes, everything, candidates = sizes_of(a.Q, a.D), slice(None), a.D.dim() == 4
    count, others = (sizes.Nq, sizes.K) if candidates else (sizes.K, sizes.Nq)
    for own in slices_within(count, others * sizes.Lq * argmax_dtype_for(sizes.Ld).itemsize, _ARGMAX_BYTES):
        part_D = None if sum_D is None else sum_D[own]
        if candidates:
            yield a.part(own, everything), None if sum_Q is None else sum_Q[own], part_D
        else:
            yield a.part(everything, own), sum_Q, part_D


def backward_unified(*arguments: Any) -> Gradients:
    """The same of `Arguments` in one pass over the winners, through fp32 sums and atomic adds.

    Raises:
        RuntimeError: under `torch.use_deterministic_algorithms(True)`.
    """
    require_nondeterminism_allowed()
    return _again(_unified, Arguments(*arguments))


def _unified(a: Arguments) -> Gradients:
    Q, D, needs, outputs = a.Q, a.D, a.needs, a.outputs()
    if a.trivial:
        return outputs
    sum_Q = torch.zeros(Q.shape, dtype=torch.float32, device=Q.device) if needs[0] or needs[2] else None
    sum_D = torch.zeros(D.shape, dtype=torch.float32, device=Q.device) if needs[1] else None
    with on_device(Q.device):
        for part, part_Q, part_D in _scattered_parts(a, sum_Q, sum_D):
            call = _call(part)
            call.scatter(part_Q, part_D)
        call = call._replace(queries=queries_of(Q, a.q_mask, a.q_weight))
        wanted = _wanted(outputs, needs)
        if sum_Q is not None:
            X = documents_of(Q.unsqueeze(1), None)
            call.finish(X, sum_Q.unsqueeze(1), wanted[0], wanted[2], wide_of(Q, Q), True)
        if sum_D is not None:
            D, sum_D = (x if x.dim() == 4 else x.unsqueeze(0) for x in (D, sum_D))
            call.finish(documents_of(D, None), sum_D, outputs[1], None, wide_of(D, D), False)
    return outputs
