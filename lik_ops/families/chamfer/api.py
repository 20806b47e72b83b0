"""Chamfer distance: the distance of two point clouds through nearest neighbors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._ops import ops as lik
from ...core.arguments import (
    check_choice,
    check_device,
    check_strided,
    check_tensor,
    clamp_to_at_least_one,
    format_shape,
    score_dtype,
)
from ...ops.checks import values
from ...ops.stack import functional, sharding
from .ops import METRICS, ChamferArgs

_OP = "chamfer_distance"


def chamfer_distance(
    P: Tensor,
    R: Tensor,
    *,
    metric: str = "sqeuclidean",
    p_lengths: Tensor | None = None,
    r_lengths: Tensor | None = None,
    p_weight: Tensor | None = None,
    r_weight: Tensor | None = None,
) -> Tensor:
    """Compute the Chamfer distance ``mean_i min_j c(P[i], R[j]) + mean_j min_i c(P[i], R[j])`` of point clouds.

    Both directions come from one pass over the distances, which are never stored. The distance is differentiable in P,
    R and the weights. The gradient flows through the nearest neighbor of each point. Sums have one fixed order, so the
    bits are reproducible.

    Source: Fan, Su and Guibas, "A Point Set Generation Network for 3D Object Reconstruction from a Single Image", 2017,
    equation 1, with means in place of sums.

    Args:
        P: points ``[B, N, d]``, or ``[N, d]`` for one cloud; fp16, bf16, fp32 or fp64.
        R: points ``[B, M, d]`` or ``[M, d]`` of the dtype and device of P.
        metric: ``"sqeuclidean"`` is the squared Euclidean distance. ``"l1"`` is the sum of absolute differences.
        p_lengths: the number of valid points of each cloud in P, int32 or int64 ``[B]``, or a scalar (0-d) tensor for
            one cloud. The values of later points never matter. Means are over valid points.
        r_lengths: the number of valid points of each cloud in R, in the same form.
        p_weight: factors ``[B, N]`` of the distances of the points in P, applied before the mean; fp32 (fp64 for fp64
            inputs).
        r_weight: factors ``[B, M]`` of the distances of the points in R, in the same form.

    Returns:
        Distances ``[B]``, or a scalar (0-d) tensor for one cloud, in fp32 (fp64 for fp64 inputs). Distances are sums
        over differences in fp32, however near the points are. With 16 coordinates or more, the nearest point for
        squared distances is selected by inner products in fp32. A cloud without points adds 0, and is infinitely far
        from each point of the other cloud. The result is NaN if a length is negative or exceeds the number of points,
        unless N and M are both 0.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size or device is wrong, or `metric` is unknown.
        NotImplementedError: ``torch.func`` would differentiate the call.

    Example:
        >>> P, R = torch.rand(8, 2048, 3), torch.rand(8, 1024, 3)
        >>> lik_ops.chamfer_distance(P, R).shape
        torch.Size([8])
    """
    clouds = ChamferArgs(P, R, p_lengths, r_lengths)
    clouds.check(_OP, one=True)
    check_choice(_OP, "metric", metric, METRICS)
    for name, w, X in (("p_weight", p_weight, P), ("r_weight", r_weight, R)):
        if w is not None:
            _check_weight(name, w, X)
    functional.reject_forward_ad(P, R)
    functional.reject_transforms(_OP)
    for name, n, X in (("p_lengths", p_lengths, P), ("r_lengths", r_lengths, R)):
        if n is not None and values.needs_value_checks(n):
            values.check_lengths(_OP, name, n, X.shape[-2])
    sharding.register_if_needed()
    is_single = P.dim() == 2
    batch_args = [x if x is None or not is_single else x.unsqueeze(0) for x in (*clouds, p_weight, r_weight)]
    distances_P, _, distances_R, _ = lik.chamfer_fwd(*batch_args[:4], metric)
    distance = _mean_distance(distances_P, batch_args[2], batch_args[4]) + _mean_distance(
        distances_R, batch_args[3], batch_args[5]
    )
    return distance.squeeze(0) if is_single else distance


def _check_weight(name: str, w: Tensor, X: Tensor) -> None:
    """Raise unless `w` is a weight for each point of `X`."""
    check_tensor(_OP, name, w)
    check_strided(_OP, name, w)
    if w.dtype != score_dtype(X.dtype):
        raise TypeError(f"{_OP}: {name}: expected {score_dtype(X.dtype)} for {X.dtype} points, got {w.dtype}")
    if w.shape != X.shape[:-1]:
        raise ValueError(f"{_OP}: {name}: expected {format_shape(X[..., 0])}, got {format_shape(w)}")
    check_device(_OP, name, w, X.device, "P")


def _mean_distance(distances: Tensor, lengths: Tensor | None, weight: Tensor | None) -> Tensor:
    """Return the mean distance of each cloud.

    Distances of 0, as past the end of a cloud, add 0 whatever their weight. Infinite distances stay infinite.
    """
    if weight is not None:
        distances = distances * torch.where((distances == 0) | distances.isinf(), 1, weight)
    count = clamp_to_at_least_one(distances.shape[1]) if lengths is None else lengths.clamp_min(1)
    return distances.sum(1) / count
