"""Checks of any operator in the PyTorch stack: compile, export, vmap, autocast, FLOP counts, and training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.utils.flop_counter import FlopCounterMode

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
at_devices = pytest.mark.parametrize("device", DEVICES)


def step(function: Callable[..., Tensor], args: Sequence[Any]) -> list[Tensor]:
    """Return the results, and the gradients of all differentiable arguments for a fixed upstream gradient."""
    args = [x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
    found = function(*args)
    upstream = torch.arange(found.numel(), dtype=found.dtype, device=found.device).cos().reshape(found.shape)
    leaves = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
    return [found.detach(), *torch.autograd.grad(found, leaves, upstream)]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Assert that two sequences of tensors are equal."""
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def assert_compiled_steps(function: Callable[..., Tensor], *calls: Sequence[Any], **options: Any) -> None:
    """Assert that compiled calls have no graph break and the bits of eager calls, including gradients."""
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})
    for args in calls:
        assert_same(step(compiled, args), step(function, args))


def assert_exported(
    function: Callable[..., Tensor], given: Sequence[Tensor], others: Sequence[Tensor], operator: str, **options: Any
) -> None:
    """Assert that an export with dynamic sizes is one operator and has the eager bits for other sizes."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.function = function

        def forward(self, *args: Tensor) -> Tensor:
            return self.function(*args)

    shapes = tuple(dict.fromkeys(range(x.dim()), Dim.DYNAMIC) for x in given)
    program = torch.export.export(Model(), tuple(given), dynamic_shapes={"args": shapes}, **options)
    targets = [str(node.target) for node in program.graph.nodes if "lik" in str(node.target)]
    assert targets == [f"lik.{operator}.default"]
    assert torch.equal(program.module()(*others), function(*others))


def assert_vmap_is_a_loop(
    function: Callable[..., Tensor], args: Sequence[Tensor], in_dims: Sequence[int | None]
) -> None:
    """Assert that vmap equals a loop, for scores and for gradients of autograd outside vmap."""
    (size,) = {len(x) for x, axis in zip(args, in_dims, strict=True) if axis == 0}
    batched = torch.vmap(function, in_dims=tuple(in_dims))

    def looped(*args: Tensor) -> Tensor:
        each = [[x if axis is None else x[n] for x, axis in zip(args, in_dims, strict=True)] for n in range(size)]
        return torch.stack([function(*x) for x in each])

    expected = looped(*args)
    assert torch.equal(batched(*args), expected)
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in args]
    wanted = [x for x in leaves if x.requires_grad]
    upstream = torch.randn_like(expected)
    found = torch.autograd.grad(batched(*leaves), wanted, upstream)
    torch.testing.assert_close(found, torch.autograd.grad(looped(*leaves), wanted, upstream))


def assert_derives_no_further(function: Callable[[Tensor], Tensor], x: Tensor, name: str) -> None:
    """Assert that torch.func, forward-mode AD, and a second backward raise with the name of the public function."""
    with pytest.raises(NotImplementedError, match=rf"torch\.func cannot differentiate {name}.* use torch\.autograd"):
        torch.func.grad(lambda x: function(x).sum())(x)
    with pytest.raises(NotImplementedError, match=r"forward-mode|torch\.func"):
        torch.func.jvp(function, (x,), (x,))
    leaf = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(function(leaf).sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward"):
        first.sum().backward()


def assert_autocast(function: Callable[[Tensor, Tensor], Tensor], Q: Tensor, D: Tensor) -> None:
    """Assert that autocast casts tokens to its dtype, and changes neither scores nor gradients otherwise."""
    with torch.autocast(Q.device.type, torch.bfloat16):
        found = step(function, (Q, D))
    expected = step(function, (Q.bfloat16(), D.bfloat16()))
    assert [x.dtype for x in (*found, expected[0])] == [torch.float32] * 4
    assert_same(found, [x.float() for x in expected])


def flops(function: Callable[..., Tensor], *args: Tensor) -> tuple[int, int]:
    """Return the FLOPs of the forward and of the backward."""
    with FlopCounterMode(display=False) as counter:
        found = function(*(x.detach().requires_grad_() for x in args))
        forward = counter.get_total_flops()
        found.sum().backward()
    return forward, counter.get_total_flops() - forward


def kept_for_backward(function: Callable[..., Any], *args: Any) -> tuple[Any, list[Tensor]]:
    """Return the result of a call, and the tensors that it saves."""
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        return function(*args), kept


def losses(loss_of: Callable[[], Tensor], parameters: Sequence[Tensor], lr: float, steps: int) -> list[float]:
    """Return the loss of each training step."""
    optimizer, found = torch.optim.SGD(parameters, lr=lr), []
    for _ in range(steps):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


class Compilations:
    """Backend of torch.compile that counts its calls."""

    count = 0

    def __call__(self, module: torch.fx.GraphModule, example_inputs: Any) -> Callable:
        self.count += 1
        return module.forward
