"""The state of `torch.func` transforms and of forward-mode AD.

torch calls the kernels of an operator once for each level of `grad` or `vjp`, and its batching rule for each level of
`vmap`. No operator has a rule for `jvp`, so calls with tangents raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_levels: Any = torch._C._functorch
_peek, _stack = torch._C._functorch.peek_interpreter_stack, torch._C._functorch.get_interpreter_stack
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_Kind = torch._C._functorch.TransformType
_NO_TANGENTS = "lik_ops has no forward-mode AD: compute forward derivatives with lik_ops.reference"
_GRAD, _JVP = _Kind.Grad, _Kind.Jvp


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


# Dynamo evaluates these functions while tracing, as with `torch.compiler.assume_constant_result`. See `sharding`.
for _asked in (is_transforming, is_taking_derivatives, is_taking_tangents):
    _asked._dynamo_marked_constant = True  # type: ignore[attr-defined]


def reject_transforms(op: str, is_rejected: Callable[[], bool] = is_taking_derivatives) -> None:
    """Raise NotImplementedError if `is_rejected()`, by default inside a transform that computes derivatives."""
    if not torch.compiler.is_dynamo_compiling() and is_rejected():
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
    present_tensors = [t for t in tensors if t is not None]
    if any(forward_ad.unpack_dual(t).tangent is not None for t in present_tensors if not is_wrapped(t)):
        return True
    return _has_transform(_JVP) and any(map(is_wrapped, present_tensors))


def reject_forward_ad(*tensors: Tensor | None) -> None:
    """Raise NotImplementedError for tensors with tangents, instead of returning a zero tangent silently.

    Compiled code cannot inspect its tensors, so it raises inside every `jvp`.
    """
    if is_taking_tangents() if torch.compiler.is_dynamo_compiling() else has_tangents(*tensors):
        raise NotImplementedError(_NO_TANGENTS)


def reject_tangents(*tensors: Tensor) -> None:
    """Raise NotImplementedError for tensors with tangents at the current level of the active transforms."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(_NO_TANGENTS)


def _has_transform(kind: Any) -> bool:
    """Return whether a transform of this kind is active."""
    return is_transforming() and any(level.key() == kind for level in _stack() or ())


@contextmanager
def allow_one_level() -> Iterator[None]:
    """Allow an autograd function that records the current level of the active transforms."""
    old_value = _levels.get_single_level_autograd_function_allowed()
    _levels.set_single_level_autograd_function_allowed(True)
    try:
        yield
    finally:
        _levels.set_single_level_autograd_function_allowed(old_value)
