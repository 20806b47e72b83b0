"""Support for `torch.func`. Transforms cannot use the autograd formulas of operators, so these functions wrap them.

Calls of `lik_ops` functions inside a transform come here. Then torch handles each level of `grad`, `vjp` or `vmap` with
the batching rules of the operators. A direct call of ``torch.ops.lik.maxsim`` inside a transform raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..._ops import ops as lik
from ..registration.family import make_raising_double_backward
from ..registration.gradients import choose_backward

_peek, _stack = torch._C._functorch.peek_interpreter_stack, torch._C._functorch.get_interpreter_stack
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_Kind = torch._C._functorch.TransformType
_GRAD, _JVP, _FUNCTIONALIZE = _Kind.Grad, _Kind.Jvp, _Kind.Functionalize


def is_transforming() -> bool:
    """Return whether a `torch.func` transform or `vmap` is active in this thread."""
    return _peek() is not None


def is_differentiating() -> bool:
    """Return whether an active transform computes gradients."""
    return _has_transform(_GRAD)


def is_taking_derivatives() -> bool:
    """Return whether an active transform computes gradients or tangents."""
    return _has_transform(_GRAD) or _has_transform(_JVP)


def is_taking_tangents() -> bool:
    """Return whether an active transform computes tangents."""
    return _has_transform(_JVP)


def is_functionalizing() -> bool:
    """Return whether `torch.func.functionalize` is active."""
    return _has_transform(_FUNCTIONALIZE)


# Dynamo evaluates these functions while tracing, as with `torch.compiler.assume_constant_result`. See `sharding`.
for _asked in (is_transforming, is_taking_derivatives, is_taking_tangents, is_functionalizing):
    _asked._dynamo_marked_constant = True  # type: ignore[attr-defined]


def reject_transforms(op: str, asked: Callable[[], bool] = is_taking_derivatives) -> None:
    """Raise NotImplementedError if `asked` returns True, by default inside a transform that computes derivatives."""
    if not torch.compiler.is_dynamo_compiling() and asked():
        raise NotImplementedError(f"torch.func cannot differentiate {op}: use torch.autograd")


def is_recording_gradients(*tensors: Tensor | None) -> bool:
    """Return whether a transform records gradients of any of `tensors`, or autograd outside of transforms."""
    if not torch.is_grad_enabled():
        return False
    if torch.compiler.is_dynamo_compiling():  # Dynamo cannot inspect the wrappers of tensors
        return is_transforming() or any(t is not None and t.requires_grad for t in tensors)
    return is_differentiating() or any(t is not None and _requires_grad(t, True) for t in tensors)


def is_any_differentiated(*tensors: Tensor | None) -> bool:
    """Return whether an active transform computes gradients of any of `tensors`. Detached tensors have none."""
    return is_transforming() and any(t is not None and _requires_grad(t) for t in tensors)


def _requires_grad(t: Tensor, outside: bool = False) -> bool:
    """Return whether a transform records the gradient of `t`, or with `outside` also autograd outside of transforms."""
    while is_wrapped(t):
        if t.requires_grad:
            return True
        t = torch._C._functorch.get_unwrapped(t)
    return outside and t.requires_grad


def has_tangents(*tensors: Tensor | None) -> bool:
    """Return whether any of `tensors` may have a tangent of forward-mode AD.

    Inside a `jvp`, every tensor that belongs to a transform may have one.
    """
    if forward_ad._current_level < 0:
        return False
    given = [t for t in tensors if t is not None]
    if any(forward_ad.unpack_dual(t).tangent is not None for t in given if not is_wrapped(t)):
        return True
    return _has_transform(_JVP) and any(map(is_wrapped, given))


def reject_forward_ad(*tensors: Tensor | None) -> None:
    """Raise NotImplementedError for tensors with tangents, instead of returning a zero tangent silently.

    Compiled code cannot inspect its tensors, so it raises inside every `jvp`.
    """
    if is_taking_tangents() if torch.compiler.is_dynamo_compiling() else has_tangents(*tensors):
        raise NotImplementedError("lik_ops has no forward-mode AD: compute forward derivatives with lik_ops.reference")


def _has_transform(kind: Any) -> bool:
    """Return whether a transform of this kind is active."""
    return is_transforming() and any(level.key() == kind for level in _stack() or ())


class _TransformForward(torch.autograd.Function):
    """`lik::maxsim_fwd` for transforms, with a generated vmap rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return lik.maxsim_fwd(*args)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        Q, D, q_mask, d_mask, q_weight, ctx.normalize, _, backward = inputs
        ctx.op = choose_backward(backward)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(Q, D, output[1], q_mask, d_mask, q_weight)

    @staticmethod
    def backward(ctx, grad_scores, grad_argmax):
        needs = [ctx.needs_input_grad[i] for i in (0, 1, 4)]
        grads = _TransformBackward.apply(ctx.op, grad_scores, *ctx.saved_tensors, ctx.normalize, needs)
        grad_Q, grad_D, grad_q_weight = (g if need else None for g, need in zip(grads, needs, strict=True))
        return grad_Q, grad_D, None, None, grad_q_weight, None, None, None


class _TransformBackward(torch.autograd.Function):
    """The backward of `_TransformForward`, with a generated vmap rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: Any, *args: Any) -> tuple[Tensor, ...]:
        return op(*args)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    backward = staticmethod(make_raising_double_backward("maxsim"))


def forward_in_transform(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs of `lik::maxsim_fwd`, in a form that an active transform can differentiate and batch.

    Bodies of operators must not call this function, because the dispatcher has left the transform there.
    """
    if is_functionalizing():  # torch has no rule for an autograd.Function there
        reject_transforms("MaxSim inside functionalize", is_differentiating)
        return lik.maxsim_fwd(*args)
    return _TransformForward.apply(*args) if is_transforming() else lik.maxsim_fwd(*args)
