"""Nearest points of two clouds: ``lik::chamfer_fwd``.

Its gradient is summed by that of MaxSim: a point's differences to those that chose it are rows that won it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from .._ops import ops as lik
from ..arguments import (
    DTYPES,
    INDEX_DTYPES,
    check_choice,
    check_strided,
    check_tensor,
    same_size,
    score_dtype,
    shape_of,
)
from .custom import custom_op
from .documented import document_bodies
from .family import backend_once
from .stack import batching, functional

METRICS = ("sqeuclidean", "l1")
_SCHEMA = "(Tensor P, Tensor R, Tensor? p_lengths, Tensor? r_lengths, str metric) -> (Tensor, Tensor, Tensor, Tensor)"
_FWD = add_op_namespace_prefix("chamfer_fwd")


class Clouds(NamedTuple):
    """Points ``P [B, N, d]`` and ``R [B, M, d]``; how many of each cloud count, ``[B]``, or None for all."""

    P: Tensor
    R: Tensor
    p_lengths: Tensor | None
    r_lengths: Tensor | None

    def check(self, op: str, one: bool = False) -> None:
        """Raise ValueError or TypeError, naming the argument, unless all fit together; of `one`, P and R may be 2-D."""
        for name, X, points in (("P", self.P, "N"), ("R", self.R, "M")):
            check_tensor(op, name, X)
            check_strided(op, name, X)
            if X.dim() != 3 and not (one and X.dim() == 2):
                expected = f"[{points}, d] or " * one + f"[B, {points}, d]"
                raise ValueError(f"{op}: {name}: expected {expected}, got {shape_of(X)}")
            if X.dtype not in DTYPES:
                raise TypeError(f"{op}: {name}: expected float16, bfloat16, float32 or float64, got {X.dtype}")
        self._check_alike(op)
        for name, n in (("p_lengths", self.p_lengths), ("r_lengths", self.r_lengths)):
            if n is not None:
                self._check_lengths(op, name, n)

    def _check_alike(self, op: str) -> None:
        P, R = self.P, self.R
        if R.dtype != P.dtype:
            raise TypeError(f"{op}: R: expected the dtype of P, {P.dtype}, got {R.dtype}")
        if R.device != P.device:
            raise ValueError(f"{op}: R: expected the device of P, {P.device}, got {R.device}")
        if R.dim() != P.dim():
            raise ValueError(f"{op}: R: expected as many axes as P {shape_of(P)}, got {shape_of(R)}")
        expected = f"{op}: R: expected B and d of P {shape_of(P)}, got {shape_of(R)}"
        for axis in range(-1, -P.dim() - 1, -2):
            same_size(R.shape[axis], P.shape[axis], lambda: expected)
        if isinstance(P.shape[-1], int) and P.shape[-1] < 1:
            raise ValueError(f"{op}: P: expected d >= 1, got {shape_of(P)}")

    def _check_lengths(self, op: str, name: str, n: Any) -> None:
        check_tensor(op, name, n)
        check_strided(op, name, n)
        if n.dtype not in INDEX_DTYPES:
            raise TypeError(f"{op}: {name}: expected int32 or int64, got {n.dtype}")
        if n.device != self.P.device:
            raise ValueError(f"{op}: {name}: expected the device of P, {self.P.device}, got {n.device}")
        clouds = list(self.P.shape[:-2])
        message = f"{op}: {name}: expected {clouds}, got {shape_of(n)}"
        if n.dim() != len(clouds):
            raise ValueError(message)
        for found, size in zip(n.shape, clouds, strict=True):
            same_size(found, size, lambda: message)


@custom_op(add_op_namespace_prefix("chamfer_fwd"), _SCHEMA)
def chamfer_fwd(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Distances ``[B, N]`` of points of P to their nearest of R and which that is, int32; and ``[B, M]`` the other way.

    The lowest is nearest where distances are equal. fp32 (fp64 for fp64). Beyond the end of a cloud 0 and -1; inf and
    -1 where the other cloud is empty; NaN and -1 for both clouds where a length of either cannot be. Of a NaN or
    infinite coordinate the distance is NaN or infinite.
    """
    x, metric = Clouds(*args[:4]), args[4]
    backend = backend_once(_FWD, x, (metric,), x.P, _check, x, metric)
    functional.reject_forward_ad(x.P, x.R)
    return backend.forward_chamfer(*x, metric)


def _check(x: Clouds, metric: str) -> None:
    x.check(_FWD)
    check_choice(_FWD, "metric", metric, METRICS)


@chamfer_fwd.register_fake
def _(*args):
    x, metric = Clouds(*args[:4]), args[4]
    _check(x, metric)
    dtype, found = score_dtype(x.P.dtype), []
    for X in (x.P, x.R):
        found += [X.new_empty(X.shape[:2], dtype=dtype), X.new_empty(X.shape[:2], dtype=torch.int32)]
    return tuple(found)


def _slopes(grad: Tensor, X: Tensor, Y: Tensor, nearest: Tensor, metric: str) -> Tensor:
    """What the distances of X give its points, ``[B, N, d]``: 0 where there is no nearest, whatever lies there."""
    if Y.shape[1] == 0:
        return X.new_zeros(X.shape, dtype=grad.dtype)
    there = (nearest >= 0)[:, :, None]
    at = nearest.clamp_min(0).long()[:, :, None].expand(-1, -1, Y.shape[2])
    x = X.to(grad.dtype) - Y.gather(1, at).to(grad.dtype)
    slope = x.sign() if metric == "l1" else 2 * x
    return torch.where(there, slope * grad[:, :, None], 0)


def _received(slopes: Tensor, nearest: Tensor, like: Tensor) -> Tensor:
    """The sums of the slopes of those that chose each point of `like`, ``[B, M, d]``."""
    winners = nearest[:, None].contiguous()
    ones = slopes.new_ones((slopes.shape[0], 1))
    needs = [False, True, False]
    found = lik.maxsim_bwd_lowmem(ones, slopes, like[:, None], winners, None, None, None, False, needs)
    return found[1][:, 0]


def _setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.metric = inputs[4]
    ctx.save_for_backward(inputs[0], inputs[1], output[1], output[3])
    ctx.mark_non_differentiable(output[1], output[3])


def _backward(ctx, of_P, _, of_R, __):
    P, R, nearest, nearest_R = ctx.saved_tensors
    sides = ((of_P, P, R, nearest), (of_R, R, P, nearest_R))
    slopes = [None if g is None else _slopes(g, X, Y, at, ctx.metric) for g, X, Y, at in sides]
    grads: list[Tensor | None] = []
    for n, X in enumerate((P, R)):
        own, other, at = slopes[n], slopes[1 - n], sides[1 - n][3]
        if not ctx.needs_input_grad[n] or (own is None and other is None):
            grads.append(None)
            continue
        like = X.to(score_dtype(X.dtype))
        total = own
        if other is not None:
            received = _received(other, at, like)
            total = -received if own is None else own - received
        assert total is not None
        grads.append(total.to(X.dtype))
    return *grads, None, None, None


chamfer_fwd.register_autograd(_backward, setup_context=_setup)
chamfer_fwd.register_vmap(lambda info, in_dims, *args: batching.one_by_one(chamfer_fwd, 4, info, in_dims, *args))
document_bodies(chamfer_fwd)
