"""What the dense and the ragged operators share: checks, outputs while tracing, and how autograd joins them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.library import CustomOpDef

from ... import backends
from ..._ops import add_op_namespace_prefix
from ...core.arguments import BACKWARDS, check_choice, require, score_dtype
from ...core.segments import DenseArgs, RaggedArgs, Shape
from ...core.settings import get_requested_backend, use_backend
from ..fast_path.watchers import get_fp32_precision, make_operator_key

ARGMAX_DTYPES = (None, torch.int16, torch.int32, torch.int64)
_MAX_LOOKUPS = 4096
_lookups: dict[tuple, Any] = {}  # by operators and descriptions of their arguments
T = TypeVar("T")


def lookup_once(op: str, given: Sequence, options: tuple, find: Callable[..., T], *arguments: Any) -> T:
    """What ``find(*arguments)`` returns, which checks the arguments of an operator and finds who computes: once for
    those of one description.

    Args:
        given: tensors and what else an operator's body gets.
        options: more of that, hashable; or what else describes it.
    """
    key = (op, options, get_requested_backend(), get_fp32_precision(), *make_operator_key(given))
    found = _lookups.get(key)
    if found is None:
        found = find(*arguments)
        if len(_lookups) >= _MAX_LOOKUPS:
            _lookups.clear()
        _lookups[key] = found
    return found


def lookup_backend(
    op: str, given: Sequence, options: tuple, Q: Tensor, check: Callable[..., Any], *arguments: Any
) -> ModuleType:
    """Who computes for the device and dtype of Q, once ``check(*arguments)`` let these pass: see `lookup_once`."""
    return lookup_once(op, given, options, _check_and_select, Q, check, arguments)


def _check_and_select(Q: Tensor, check: Callable[..., Any], arguments: tuple) -> ModuleType:
    check(*arguments)
    return backends.select_backend(Q.device, Q.dtype)


def clear_lookups() -> None:
    """Drop what was found out, as when a table of configurations was changed."""
    _lookups.clear()


def check_forward(op: str, tensors: DenseArgs | RaggedArgs, argmax_dtype: Any, backward: str) -> None:
    """Raise ValueError or TypeError, naming the argument, unless a forward takes these."""
    tensors.check(op)
    check_choice(op, "backward", backward, BACKWARDS)
    check_argmax_dtype(op, argmax_dtype, tensors.D.shape[-2])


def check_argmax_dtype(op: str, argmax_dtype: Any, tokens: Any) -> None:
    """Raise ValueError or TypeError unless winners among so many document tokens can be of this type; None: there are
    none."""
    if argmax_dtype not in ARGMAX_DTYPES:
        raise TypeError(f"{op}: argmax_dtype: expected None, int16, int32 or int64, got {argmax_dtype}")
    if argmax_dtype == torch.int16 and isinstance(tokens, int) and tokens > 32768:
        raise ValueError(f"{op}: argmax_dtype: int16 cannot index {tokens} document tokens")


def fake_forward(tensors: Any, argmax_shape: Shape, argmax_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Scores of a family's tensors, and winners of size [0] where none are asked for."""
    scores = tensors.Q.new_empty(tensors.scores_shape(), dtype=score_dtype(tensors.Q.dtype))
    if argmax_dtype is None:
        return scores, tensors.Q.new_empty(0, dtype=torch.int32)
    return scores, tensors.Q.new_empty(argmax_shape, dtype=argmax_dtype)


def check_shape(op: str, name: str, t: Tensor, expected: Shape, device: torch.device) -> None:
    """Raise ValueError, naming the argument, unless it has a shape and is on the device of Q."""
    same: Any = t.dim() == len(expected)
    for found, size in zip(t.shape, expected, strict=False):
        same = same and found == size
    require(same, lambda: f"{op}: {name}: expected {list(expected)}, got {list(t.shape)}")
    if t.device != device:
        raise ValueError(f"{op}: {name}: expected the device of Q, {device}, got {t.device}")


def check_upstream(op: str, name: str, x: Tensor, expected: Shape, Q: Tensor) -> None:
    """`check_shape` of what has the dtype of scores."""
    check_shape(op, name, x, expected, Q.device)
    if x.dtype != score_dtype(Q.dtype):
        raise TypeError(f"{op}: {name}: expected {score_dtype(Q.dtype)}, got {x.dtype}")


def check_gradient_exists(op: str, name: str, x: Tensor | None, need: bool) -> None:
    """Raise ValueError where the gradient of an argument that is None is asked for."""
    if need and x is None:
        raise ValueError(f"{op}: needs: a gradient of {name} was asked for, and {name} is None")


def check_gradient(
    op: str,
    grad_scores: Tensor,
    tensors: DenseArgs | RaggedArgs,
    argmax: Tensor,
    argmax_shape: Shape,
    needs: Sequence[bool],
) -> None:
    """Raise ValueError or TypeError, naming the argument, unless a backward takes these."""
    tensors.check(op)
    Q = tensors.Q
    check_upstream(op, "grad_scores", grad_scores, tensors.scores_shape(), Q)
    check_shape(op, "argmax", argmax, argmax_shape, Q.device)
    if argmax.dtype not in ARGMAX_DTYPES:
        raise TypeError(f"{op}: argmax: expected int16, int32 or int64, got {argmax.dtype}")
    check_gradient_exists(op, "q_weight", tensors.q_weight, needs[2])


def fake_gradient(tensors: DenseArgs | RaggedArgs, needs: Sequence[bool]) -> tuple[Tensor, ...]:
    """Gradients of Q, D and q_weight, of size [0] where they are not needed."""
    Q, D = tensors.Q, tensors.D
    shapes, dtypes = (Q.shape, D.shape, Q.shape[:-1]), (Q.dtype, D.dtype, score_dtype(Q.dtype))
    return tuple(
        Q.new_empty(shape if need else (0,), dtype=dtype)
        for shape, dtype, need in zip(shapes, dtypes, needs, strict=True)
    )


def _save_everything(inputs: Sequence, output: Sequence) -> tuple:
    return *inputs, output[1]


def register_autograd(
    forward: CustomOpDef,
    layout: type,
    gradients: Callable[..., Sequence[Tensor]],
    kept: Callable[[Sequence, Sequence], tuple] = _save_everything,
    wanted: Sequence[int] | None = None,
) -> None:
    """Give `forward` its gradient. Its arguments begin with the tensors of `layout`; it returns scores and winners.

    Args:
        gradients: takes the gradient of the scores, the tensors, the winners, the other arguments of `forward`, and
            which gradients of what is `wanted` are needed; returns these.
        kept: the tensors and, last, the winners that `gradients` takes, from the tensors of a call and its results.
        wanted: the places of what has a gradient; None: Q, D and q_weight, which is last.
    """
    count = len(layout._fields)  # type: ignore[attr-defined]
    wanted = (0, 1, count - 1) if wanted is None else wanted

    def setup_context(ctx, inputs, output) -> None:
        ctx.set_materialize_grads(False)
        ctx.options = inputs[count:]
        # An eager backward runs on another thread for CUDA tensors, where a `use_backend` block is not seen.
        ctx.backend = get_requested_backend()
        ctx.save_for_backward(*kept(inputs[:count], output))
        ctx.mark_non_differentiable(*output[1:])

    def backward(ctx, grad_scores, *others):
        needs = [ctx.needs_input_grad[i] for i in wanted]
        results: list[Tensor | None] = [None] * (count + len(ctx.options))
        if grad_scores is None or not any(needs):
            return tuple(results)
        *tensors, argmax = ctx.saved_tensors
        with use_backend(ctx.backend):
            grads = gradients(grad_scores, tensors, argmax, ctx.options, needs)
        for i, need, grad in zip(wanted, needs, grads, strict=True):
            results[i] = grad if need else None
        return tuple(results)

    forward.register_autograd(backward, setup_context=setup_context)


def make_raising_backward(name: str, instead: str, of: str = "gradient") -> Callable[..., NoReturn]:
    """The derivative of an operator that has none; the error says what to do instead."""
    message = f"{add_op_namespace_prefix(name)} has no {of}: {instead}"

    def raises(ctx, *grads):
        raise NotImplementedError(message)

    return raises


def make_raising_double_backward(name: str) -> Callable[..., NoReturn]:
    """The derivative of the backwards of `name`."""
    return make_raising_backward(name, "compute second derivatives with lik_ops.reference", "double backward")
