"""Nearest points of two clouds, and gradients of their distances: ``lik::chamfer_fwd``, ``lik::chamfer_bwd``.

The gradients are summed like the gradients of MaxSim. A point sums its differences to all points that it is nearest to.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._ops import add_op_namespace_prefix
from ..._ops import ops as lik
from ...core.arguments import (
    check_choice,
    check_dtype,
    check_dtype_and_device,
    check_indices,
    check_same_size,
    check_strided,
    check_tensor,
    format_shape,
    score_dtype,
)
from ...core.settings import get_requested_backend, use_backend
from ...ops.registration.custom import custom_op
from ...ops.registration.family import check_shape, lookup_backend, make_raising_double_backward
from ...ops.stack import batching, functional

METRICS = ("sqeuclidean", "l1")
_SCHEMA = "(Tensor P, Tensor R, Tensor? p_lengths, Tensor? r_lengths, str metric) -> (Tensor, Tensor, Tensor, Tensor)"
_BWD_SCHEMA = (
    "(Tensor? of_P, Tensor? of_R, Tensor P, Tensor R, Tensor nearest, Tensor nearest_R, str metric, bool[2] needs)"
    " -> (Tensor, Tensor)"
)
_FWD, _BWD = map(add_op_namespace_prefix, ("chamfer_fwd", "chamfer_bwd"))


class ChamferArgs(NamedTuple):
    """Points ``P [B, N, d]`` and ``R [B, M, d]``, and the number of valid points of each cloud, ``[B]`` or None."""

    P: Tensor
    R: Tensor
    p_lengths: Tensor | None
    r_lengths: Tensor | None

    def check(self, op: str, one: bool = False) -> None:
        """Raise ValueError or TypeError, naming the argument, unless all fit together. If `one`, P and R may be 2-D."""
        for name, X, points in (("P", self.P, "N"), ("R", self.R, "M")):
            check_tensor(op, name, X)
            check_strided(op, name, X)
            if X.dim() != 3 and not (one and X.dim() == 2):
                expected = f"[{points}, d] or " * one + f"[B, {points}, d]"
                raise ValueError(f"{op}: {name}: expected {expected}, got {format_shape(X)}")
            check_dtype(op, name, X.dtype)
        self._check_same(op)
        for name, n in (("p_lengths", self.p_lengths), ("r_lengths", self.r_lengths)):
            if n is not None:
                clouds = "[B]" if self.P.dim() == 3 else "[]"
                check_indices(op, name, n, self.P.shape[:-2], clouds, self.P.device, device_owner="P")

    def _check_same(self, op: str) -> None:
        """Raise ValueError or TypeError unless P and R agree in dtype, device, rank, batch size and d."""
        P, R = self.P, self.R
        check_dtype_and_device(op, "R", R, "P", P)
        if R.dim() != P.dim():
            raise ValueError(f"{op}: R: expected as many axes as P {format_shape(P)}, got {format_shape(R)}")

        def alike() -> str:
            return f"{op}: R: expected B and d of P {format_shape(P)}, got {format_shape(R)}"

        for axis in range(-1, -P.dim() - 1, -2):
            check_same_size(R.shape[axis], P.shape[axis], alike)
        if isinstance(P.shape[-1], int) and P.shape[-1] < 1:
            raise ValueError(f"{op}: P: expected d >= 1, got {format_shape(P)}")


@custom_op(add_op_namespace_prefix("chamfer_fwd"), _SCHEMA)
def chamfer_fwd(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the distance from each point to its nearest point of the other cloud, and the index of that point.

    The arguments, in the order of the schema:

    - ``P``, ``R``: points ``[B, N, d]`` and ``[B, M, d]`` of the same dtype and device.
    - ``p_lengths``, ``r_lengths``: the number of valid points of each cloud, int32 or int64 ``[B]``, or None for all.
    - ``metric``: ``"sqeuclidean"`` or ``"l1"``.

    Ties go to the lowest index. A NaN or infinite coordinate makes the distance NaN or infinite.

    Returns:
        ``(distances, nearest, distances_R, nearest_R)``. The first two are ``[B, N]`` and search R for each point of
        P. The last two are ``[B, M]`` and search P for each point of R. Distances are fp32 (fp64 for fp64), and
        indices are int32. Points beyond the length of a cloud have distance 0 and index -1. If the other cloud is
        empty, the distance is infinite and the index -1. If a length of either cloud is invalid, both clouds have
        distance NaN and index -1.
    """
    x, metric = ChamferArgs(*args[:4]), args[4]
    backend = lookup_backend(_FWD, x, (metric,), x.P, _check_forward_args, x, metric)
    functional.reject_forward_ad(x.P, x.R)
    return backend.forward_chamfer(*x, metric)


def _check_forward_args(x: ChamferArgs, metric: str) -> None:
    """Raise ValueError or TypeError, naming the argument, unless all arguments fit together."""
    x.check(_FWD)
    check_choice(_FWD, "metric", metric, METRICS)


@chamfer_fwd.register_fake
def _(*args):
    x, metric = ChamferArgs(*args[:4]), args[4]
    _check_forward_args(x, metric)
    dtype, outputs = score_dtype(x.P.dtype), []
    for X in (x.P, x.R):
        outputs += [X.new_empty(X.shape[:2], dtype=dtype), X.new_empty(X.shape[:2], dtype=torch.int32)]
    return tuple(outputs)


class _ChamferBackwardArgs(NamedTuple):
    """Tensors of a backward: gradients of the distances or None, points, and indices of the nearest points."""

    of_P: Tensor | None
    of_R: Tensor | None
    P: Tensor
    R: Tensor
    nearest: Tensor
    nearest_R: Tensor

    def check(self, metric: str) -> None:
        """Raise ValueError or TypeError, naming the argument, unless all fit together."""
        ChamferArgs(self.P, self.R, None, None).check(_BWD)
        check_choice(_BWD, "metric", metric, METRICS)
        dtype = score_dtype(self.P.dtype)
        for name, x, X, expected in (
            ("of_P", self.of_P, self.P, dtype),
            ("of_R", self.of_R, self.R, dtype),
            ("nearest", self.nearest, self.P, torch.int32),
            ("nearest_R", self.nearest_R, self.R, torch.int32),
        ):
            if x is None:
                continue
            check_shape(_BWD, name, x, X.shape[:2], X.device)
            if x.dtype != expected:
                raise TypeError(f"{_BWD}: {name}: expected {expected}, got {x.dtype}")


@custom_op(add_op_namespace_prefix("chamfer_bwd"), _BWD_SCHEMA)
def chamfer_bwd(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the gradients of P and R without atomics, bitwise reproducible.

    The arguments, in the order of the schema:

    - ``of_P``, ``of_R``: the gradients of the two distances of `chamfer_fwd`. One of them may be None.
    - ``P``, ``R``, ``metric``: the arguments of `chamfer_fwd`.
    - ``nearest``, ``nearest_R``: the indices that `chamfer_fwd` returned.
    - ``needs``: whether the gradients of P and R are needed.

    Returns:
        The gradients of P and R with the dtype of the points, or with size [0] if not needed.
    """
    x, (metric, needs) = _ChamferBackwardArgs(*args[:6]), args[6:]
    backend = lookup_backend(_BWD, x, (metric, *needs), x.P, x.check, metric)
    functional.reject_forward_ad(*x[:4])
    return backend.backward_chamfer(x, metric, list(needs))


@chamfer_bwd.register_fake
def _(*args):
    x, (metric, needs) = _ChamferBackwardArgs(*args[:6]), args[6:]
    x.check(metric)
    return tuple(X.new_empty(X.shape if need else (0,)) for X, need in zip((x.P, x.R), needs, strict=True))


def _setup_context(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.metric = inputs[4]
    ctx.backend = get_requested_backend()
    ctx.save_for_backward(inputs[0], inputs[1], output[1], output[3])
    ctx.mark_non_differentiable(output[1], output[3])


def _call_backward(ctx, of_P, _, of_R, __):
    needs = list(ctx.needs_input_grad[:2])
    grads: list[Tensor | None] = [None, None]
    if any(needs) and not (of_P is None and of_R is None):
        with use_backend(ctx.backend):
            results = lik.chamfer_bwd(of_P, of_R, *ctx.saved_tensors, ctx.metric, needs)
        grads = [x if need else None for x, need in zip(results, needs, strict=True)]
    return *grads, None, None, None


chamfer_fwd.register_autograd(_call_backward, setup_context=_setup_context)
chamfer_bwd.register_autograd(make_raising_double_backward("chamfer_distance"))
batching.register_loop(chamfer_fwd, chamfer_bwd)
