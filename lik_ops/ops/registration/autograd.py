"""The autograd function of every operator, in eager calls, below modes and transforms, and in the eager shortcut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from ..stack import functional

# The base class of `torch.autograd.Function` records one level of gradients. Transforms of torch.func call kernels once
# for each level, but they refuse the public class there.
_Function: Any = getattr(torch.autograd.function, "_SingleLevelFunction", torch.autograd.Function)


class RecordGradient(_Function):
    """The node of a call, an `OperatorCall` or an `EagerCall`.

    The arguments of `apply` are any arguments, the call and the tuple of its inputs. The call has two methods. `record`
    returns the outputs for the inputs, and saves in `ctx` what `run_backward` needs. `run_backward` returns a gradient,
    or None, for each of the first arguments of `apply`.
    """

    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """Return the outputs of the call."""
        ctx.call = args[-2]
        return ctx.call.record(ctx, args[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        """Return the gradients of the arguments of `apply`."""
        return *ctx.call.run_backward(ctx, *grads), None, None


record: Callable = RecordGradient.apply


class OperatorCall:
    """A call of an operator, which `run` computes."""

    def __init__(self, run: Callable, op: CustomOpDef) -> None:
        self.run, self.op = run, op

    def record(self, ctx: Any, inputs: tuple) -> Any:
        """Return the outputs of the operator."""
        output = self.run(*inputs)
        if self.op._setup_context_fn is not None:
            self.op._setup_context_fn(ctx, inputs, output)
        return output

    def run_backward(self, ctx: Any, *grads: Tensor | None) -> Sequence[Tensor | None]:
        """Return the gradients of the arguments of the operator."""
        return self.op._backward_fn(ctx, *grads)  # type: ignore[misc]


def record_level(inputs: tuple, run: Callable, op: CustomOpDef, records: bool) -> Any:
    """Return the outputs of an operator at one level of a transform, and record its gradient there if `records`.

    Raises:
        NotImplementedError: the level computes tangents.
    """
    functional.reject_tangents(*[x for x in inputs if isinstance(x, Tensor)])
    if not records:
        return run(*inputs)

    def run_below(*args: Any) -> Any:
        with torch.enable_grad():  # the levels below record too
            return run(*args)

    with functional.allow_one_level():
        return record(*inputs, OperatorCall(run_below, op), inputs)
