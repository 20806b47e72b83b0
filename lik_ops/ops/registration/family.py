"""Functions that all operator families share: checks, outputs while tracing, and autograd registration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.library import CustomOpDef

from ... import backends
from ..._ops import add_op_namespace_prefix
from ...core.arguments import BACKWARDS, check_choice, check_device, require, score_dtype
from ...core.plan_cache import plans
from ...core.segments import DenseArgs, PackedArgs, Shape
from ...core.settings import get_requested_backend, use_backend
from ..fast_path.watchers import get_fp32_precision, make_operator_key

ARGMAX_DTYPES = (None, torch.int16, torch.int32, torch.int64)
T = TypeVar("T")


def lookup_once(op: str, operator_args: Sequence, options: tuple, find: Callable[..., T], *arguments: Any) -> T:
    """Return ``find(*arguments)``, computed once for each operator and dispatch key.

    `find` validates the arguments of the operator, tensors or hashable values, and selects the function or backend that
    computes them. `options` are further hashable arguments, or values that describe them.
    """
    key = (op, options, get_requested_backend(), get_fp32_precision(), *make_operator_key(operator_args))
    result = plans.get(key)
    return plans.store(key, find(*arguments)) if result is None else result


def lookup_backend(
    op: str, operator_args: Sequence, options: tuple, Q: Tensor, check: Callable[..., Any], *arguments: Any
) -> ModuleType:
    """Return the backend for the device and dtype of Q after ``check(*arguments)``. See `lookup_once`."""
    return lookup_once(op, operator_args, options, _check_and_select, Q, check, arguments)


def _check_and_select(Q: Tensor, check: Callable[..., Any], arguments: tuple) -> ModuleType:
    """Check the arguments and return the backend for the device and dtype of Q."""
    check(*arguments)
    return backends.select_backend(Q.device, Q.dtype)


def check_forward(op: str, tensors: DenseArgs, argmax_dtype: Any, backward: str) -> None:
    """Raise ValueError or TypeError, naming the argument, unless a forward accepts these arguments."""
    tensors.check(op)
    check_forward_options(op, tensors.D, argmax_dtype, backward)


def check_forward_options(op: str, D: Tensor, argmax_dtype: Any, backward: str) -> None:
    """Raise ValueError or TypeError, naming the argument, unless a forward for documents D accepts these options."""
    check_choice(op, "backward", backward, BACKWARDS)
    check_argmax_dtype(op, argmax_dtype, D.shape[-2])


def check_argmax_dtype(op: str, argmax_dtype: Any, tokens: Any) -> None:
    """Raise ValueError or TypeError unless `argmax_dtype` can index that many tokens. None means no argmax."""
    if argmax_dtype not in ARGMAX_DTYPES:
        raise TypeError(f"{op}: argmax_dtype: expected None, int16, int32 or int64, got {argmax_dtype}")
    if argmax_dtype == torch.int16 and isinstance(tokens, int) and tokens > 32768:
        raise ValueError(f"{op}: argmax_dtype: int16 cannot index {tokens} document tokens")


def fake_forward(tensors: Any, argmax_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Return empty scores and an empty argmax with the right shapes. Without `argmax_dtype` its size is [0]."""
    scores = tensors.Q.new_empty(tensors.scores_shape(), dtype=score_dtype(tensors.Q.dtype))
    if argmax_dtype is None:
        return scores, tensors.Q.new_empty(0, dtype=torch.int32)
    return scores, tensors.Q.new_empty(tensors.argmax_shape(), dtype=argmax_dtype)


def check_shape(op: str, name: str, t: Tensor, expected: Shape, device: torch.device) -> None:
    """Raise ValueError, naming the argument, unless `t` has the expected shape and device."""
    is_same: Any = t.dim() == len(expected)
    for actual, size in zip(t.shape, expected, strict=False):
        is_same = is_same and actual == size
    require(is_same, lambda: f"{op}: {name}: expected {list(expected)}, got {list(t.shape)}")
    check_device(op, name, t, device)


def check_upstream(op: str, name: str, x: Tensor, expected: Shape, Q: Tensor) -> None:
    """Raise ValueError or TypeError, naming the argument, unless `x` has the expected shape and the dtype of scores."""
    check_shape(op, name, x, expected, Q.device)
    if x.dtype != score_dtype(Q.dtype):
        raise TypeError(f"{op}: {name}: expected {score_dtype(Q.dtype)}, got {x.dtype}")


def check_gradient_exists(op: str, name: str, x: Tensor | None, need: bool) -> None:
    """Raise ValueError if the gradient of an argument that is None is needed."""
    if need and x is None:
        raise ValueError(f"{op}: needs: a gradient of {name} was asked for, and {name} is None")


def check_gradient(
    op: str, grad_scores: Tensor, tensors: Any, argmax: Tensor, needs_weight: bool, recomputes: bool = False
) -> None:
    """Raise ValueError or TypeError, naming the argument, unless a backward accepts these arguments.

    The caller has checked `tensors`. If the backward `recomputes` the argmax, its size may be [0].
    """
    Q = tensors.Q
    check_upstream(op, "grad_scores", grad_scores, tensors.scores_shape(), Q)
    argmax_shape = (0,) if recomputes and argmax.dim() == 1 else tensors.argmax_shape()
    check_shape(op, "argmax", argmax, argmax_shape, Q.device)
    if argmax.dtype not in ARGMAX_DTYPES:
        raise TypeError(f"{op}: argmax: expected int16, int32 or int64, got {argmax.dtype}")
    check_gradient_exists(op, "q_weight", tensors.q_weight, needs_weight)


def fake_gradient(tensors: DenseArgs | PackedArgs, needs: Sequence[bool]) -> tuple[Tensor, ...]:
    """Return empty gradients of Q, D and q_weight, with size [0] if not needed."""
    Q, D = tensors.Q, tensors.D
    shapes, dtypes = (Q.shape, D.shape, Q.shape[:-1]), (Q.dtype, D.dtype, score_dtype(Q.dtype))
    return tuple(
        Q.new_empty(shape if need else (0,), dtype=dtype)
        for shape, dtype, need in zip(shapes, dtypes, needs, strict=True)
    )


def _save_everything(inputs: Sequence, output: Sequence) -> tuple:
    """Return all inputs and the argmax."""
    return *inputs, output[1]


def register_autograd(
    forward: CustomOpDef,
    layout: type,
    gradients: Callable[..., Sequence[Tensor]],
    select_saved: Callable[[Sequence, Sequence], tuple] = _save_everything,
    differentiable: Sequence[int] | None = None,
) -> None:
    """Register the gradient of `forward`, whose arguments begin with the tensors of `layout`.

    Args:
        forward: the operator, which returns scores and argmax.
        layout: the NamedTuple of its tensors, among which may be strings.
        gradients: computes the gradients from the gradient of the scores, the saved tensors, the argmax, the other
            arguments of `forward`, and the flags of the needed gradients.
        select_saved: selects the tensors to save from the inputs and outputs of a call. The argmax is last.
        differentiable: positions of the tensors that have a gradient. None selects Q, D and q_weight, which is last.
    """
    names: tuple[str, ...] = layout._fields  # type: ignore[attr-defined]
    count = len(names)
    differentiable = (0, 1, count - 1) if differentiable is None else differentiable

    def setup_context(ctx, inputs, output) -> None:
        ctx.set_materialize_grads(False)
        ctx.options = inputs[count:]
        # For CUDA tensors an eager backward runs on another thread, which does not see a `use_backend` block.
        ctx.backend = get_requested_backend()
        saved_values = select_saved(inputs[:count], output)
        ctx.strings = {i: x for i, x in enumerate(saved_values) if isinstance(x, str)}
        ctx.save_for_backward(*[None if isinstance(x, str) else x for x in saved_values])
        ctx.mark_non_differentiable(*output[1:])

    def backward(ctx, grad_scores, *others):
        needs = [ctx.needs_input_grad[i] for i in differentiable]
        results: list[Tensor | None] = [None] * (count + len(ctx.options))
        if grad_scores is None or not any(needs):
            return tuple(results)
        unsupported_names = [
            name for i, name in enumerate(names) if i not in differentiable and ctx.needs_input_grad[i]
        ]
        if unsupported_names:
            raise NotImplementedError(f"{forward._qualname} has no gradient of {', '.join(unsupported_names)}")
        *tensors, argmax = [ctx.strings.get(i, x) for i, x in enumerate(ctx.saved_tensors)]
        with use_backend(ctx.backend):
            grads = gradients(grad_scores, tensors, argmax, ctx.options, needs)
        for i, need, grad in zip(differentiable, needs, grads, strict=True):
            results[i] = grad if need else None
        return tuple(results)

    forward.register_autograd(backward, setup_context=setup_context)


def make_raising_backward(name: str, instead: str, missing: str = "gradient") -> Callable[..., NoReturn]:
    """Return a backward for an operator without a gradient. Its error names `missing` and suggests `instead`."""
    message = f"{add_op_namespace_prefix(name)} has no {missing}: {instead}"

    def raise_error(ctx, *grads):
        raise NotImplementedError(message)

    return raise_error


def make_raising_double_backward(name: str) -> Callable[..., NoReturn]:
    """Return a backward for the backward operators of `name` that raises NotImplementedError."""
    return make_raising_backward(name, "compute second derivatives with lik_ops.reference", "double backward")
