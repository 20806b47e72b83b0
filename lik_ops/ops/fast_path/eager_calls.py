"""Decisions about eager calls with one dispatch key, and the functions that compute their scores and gradients."""

from __future__ import annotations

import contextlib
import logging
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..._ops import ops as lik
from ...core.arguments import add_batch_axes, as_bool, choose_argmax_dtype
from ...core.segments import PackedArgs
from ...core.settings import get_requested_backend, use_backend
from ..registration.gradients import choose_backward
from .watchers import is_backward_direct

_log = logging.getLogger("lik_ops")
_NULL_CONTEXT = contextlib.nullcontext()  # replaces a `use_backend` block, which costs a microsecond


class EagerCall:
    """Decisions about calls with one dispatch key."""

    def __init__(
        self,
        inputs: tuple,
        backend: ModuleType,
        normalize: bool,
        backward: str,
        argmax_dtype: torch.dtype | None,
        differentiable: bool,
        with_argmax: bool = False,
    ) -> None:
        self.backend, self.choice = backend, get_requested_backend()
        self.normalize, self.backward, self.argmax_dtype = normalize, backward, argmax_dtype
        self.differentiable, self.with_argmax = differentiable, with_argmax
        self.plan: Any = None
        self.is_new = hasattr(backend, "run_first")
        _log.debug("%s with %s goes straight to %s", *(list(x.shape) for x in inputs[:2]), backend.__name__)

    tensors: int  # number of tensors at the beginning of the arguments; sizes follow

    def record(self, ctx: Any, inputs: tuple) -> Any:
        """Return the scores and, if requested, the argmax, and save the tensors of the call for `run_backward`."""
        scores, *saved_results = self._run_first(ctx, inputs) if self.is_new else self.forward(inputs)
        ctx.set_materialize_grads(False)
        ctx.sizes = inputs[self.tensors :]
        ctx.save_for_backward(*inputs[: self.tensors], *saved_results)
        if not self.with_argmax:
            return scores
        ctx.mark_non_differentiable(*saved_results)
        return scores, *saved_results

    def _run_first(self, ctx: Any, inputs: tuple) -> tuple:
        """Return the outputs of `forward`. Compile missing kernels of `gradients` at the same time."""
        self.is_new = False
        needs = list(ctx.needs_input_grad[:3])

        def rehearse() -> tuple:
            scores, *saved_results = self.forward(inputs)
            self.gradients(torch.empty_like(scores), inputs, needs, *saved_results)
            return scores, *saved_results

        return self.backend.run_first(rehearse, self.forward, inputs)

    def run_backward(self, ctx: Any, grad_scores: Tensor | None, grad_argmax: None = None) -> tuple:
        """Return the gradients of Q, D and the weights, with None for each that is not needed."""
        needs = list(ctx.needs_input_grad[:3])
        if grad_scores is None or not any(needs):
            return None, None, None
        saved_tensors = ctx.saved_tensors
        tensors, saved_results = saved_tensors[: self.tensors], saved_tensors[self.tensors :]
        # For CUDA tensors an eager backward runs on another thread, which does not see a `use_backend` block.
        with _NULL_CONTEXT if get_requested_backend() == self.choice else use_backend(self.choice):
            grads = self.gradients(grad_scores, (*tensors, *ctx.sizes), needs, *saved_results)
        leaves = tensors[0], tensors[1], tensors[-1]
        return tuple(_match_leaf_shape(g, x) if need else None for g, x, need in zip(grads, leaves, needs, strict=True))

    def forward(self, inputs: tuple) -> tuple:
        """Return the scores, followed by the argmax and other tensors that `gradients` needs."""
        raise NotImplementedError

    def gradients(self, grad_scores: Tensor, inputs: tuple, needs: list[bool], *saved_results: Any) -> tuple:
        """Return the gradients of Q, D and the weights, which are the first two tensors and the last one."""
        raise NotImplementedError


def _match_leaf_shape(gradient: Tensor, leaf: Tensor) -> Tensor:
    """Return the gradient in the shape of `leaf`, without the leading axis that a 2-D `leaf` lacks."""
    return gradient if gradient.dim() == leaf.dim() else gradient.view(leaf.shape)


class DenseCall(EagerCall):
    """A call with dense arguments: Q, D, q_mask, d_mask, q_weight."""

    tensors = 5

    def __init__(self, inputs: tuple, *options: Any) -> None:
        """Make the plan of the call. With `with_argmax`, an argmax of size [0] is returned if none is computed."""
        super().__init__(inputs, *options)
        Q, D, q_mask, d_mask, q_weight = inputs
        self.q_flat, self.d_flat = Q.dim() == 2, D.dim() == 2
        self.converts = any(m is not None and m.dtype != torch.bool for m in (q_mask, d_mask))
        self.shape = (() if self.q_flat else (Q.shape[0],)) + (() if self.d_flat else (D.shape[-3],))
        if hasattr(self.backend, "forward_plan"):
            args = add_batch_axes(Q, D, as_bool(q_mask), as_bool(d_mask), q_weight)
            self.plan = self.backend.forward_plan(*args, self.normalize, self.argmax_dtype)
        self.again: Any = None  # replays `plan.forward`, once the plan has captured a call

    def forward(self, inputs: tuple) -> tuple:
        """Return the scores and, if requested, the argmax with all its axes. Masks must be bool."""
        results = None if self.again is None else self.again(inputs)
        if results is not None:
            return results
        if self.plan is not None:
            results, self.again = self.plan.forward(self.shape, inputs, self.with_argmax)
            return results
        scores, argmax = self.backend.forward(*add_batch_axes(*inputs), self.normalize, self.argmax_dtype)
        for axis, is_flat in ((1, self.d_flat), (0, self.q_flat)):
            if is_flat:
                scores.squeeze_(axis)  # in place, because users cannot write to a view that a Function returns
        return (scores, argmax) if self.with_argmax or self.argmax_dtype is not None else (scores,)

    def restore_axes(self, argmax: Tensor, candidates: bool) -> Tensor:
        """Return the argmax as ``[Nq, Nd, Lq]``, without the axes that 2-D arguments lack."""
        argmax = argmax if candidates else argmax.transpose(0, 1)
        if self.d_flat:
            argmax = argmax.squeeze(1)
        return argmax.squeeze(0) if self.q_flat else argmax

    def gradients(self, grad_scores: Tensor, inputs: tuple, needs: list[bool], argmax: Tensor | None = None) -> tuple:
        """Return the gradients of Q, D and q_weight."""
        Q, D, *options = add_batch_axes(*inputs)
        if self.q_flat:
            grad_scores = grad_scores.unsqueeze(0)
        if self.d_flat:
            grad_scores = grad_scores.unsqueeze(1)
        is_short = is_backward_direct(grad_scores, *inputs[:2])
        if argmax is None or argmax.dim() == 1:  # recompute it
            argmax = None if is_short else Q.new_empty(0, dtype=torch.int32)
        run = choose_backward(self.backward, self.backend if is_short else None)
        return run(grad_scores, Q, D, argmax, *options, self.normalize, needs)


class PackedCall(EagerCall):
    """A call with the arguments of a `PackedArgs`."""

    tensors = PackedArgs._fields.index("queries")

    def __init__(self, inputs: PackedArgs, *options: Any) -> None:
        super().__init__(inputs, *options)
        self.plan = self.backend.ragged_plan(inputs, self.normalize, self.argmax_dtype)

    def forward(self, inputs: PackedArgs) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Return the scores and the argmax, or None."""
        return self.plan.forward(inputs)

    def gradients(self, grad_scores: Tensor, inputs: tuple, needs: list[bool], argmax: Tensor | None) -> tuple:
        """Return the gradients of Q, D and q_weight."""
        c, unified = PackedArgs._make(inputs), self.backward == "unified"
        if argmax is None:  # recompute it
            _, argmax = self.backend.ragged_plan(c, self.normalize, choose_argmax_dtype(c.Td)).forward(c)
        if is_backward_direct(grad_scores, c.Q, c.D):
            return self.backend.backward_cut(grad_scores, c, argmax, self.normalize, needs, unified)
        op = lik.maxsim_ragged_bwd
        return op(grad_scores, *c.operator_tensors, argmax, self.normalize, unified, needs)
