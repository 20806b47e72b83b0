"""Chamfer distance: how far two clouds of points are from each other's nearest points."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._ops import ops as lik
from ...core.arguments import (
    check_choice,
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
    """The Chamfer distance of clouds: ``mean_i min_j c(P[i], R[j]) + mean_j min_i c(P[i], R[j])``.

    Both directions come from one pass over the distances, which are never kept. Differentiable in P, R and the weights;
    the gradient goes through each point's nearest. Sums are made in one order: the same bits every time.

    Args:
        P: points ``[B, N, d]``, or ``[N, d]`` of one cloud; fp16, bf16, fp32 or fp64.
        R: points ``[B, M, d]`` or ``[M, d]`` of the dtype and device of P.
        metric: ``"sqeuclidean"``, the squared Euclidean distance, or ``"l1"``, the sum of absolute differences.
        p_lengths, r_lengths: how many points of each cloud count, int32 or int64 ``[B]``, a tensor of no axes for one
            cloud. What lies beyond them never matters. Means are over the points that count.
        p_weight, r_weight: what the distance of each point is multiplied by, before the mean; ``[B, N]`` and
            ``[B, M]``, fp32 (fp64 for fp64).

    Returns:
        ``[B]``, of no axes for one cloud; fp32 (fp64 for fp64). Distances are sums over differences in fp32, however
        near the points are; with 16 coordinates or more, the nearest point of squared distances is that of the inner
        products in fp32. A cloud without points adds 0, and is infinitely far from each point of the other. NaN where
        a length is negative or more than there are points, if either cloud has room for one.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size or device is wrong, or `metric` is neither of the two.
        NotImplementedError: `torch.func` would differentiate it.

    Example:
        >>> P, R = torch.rand(8, 2048, 3), torch.rand(8, 1024, 3)
        >>> lik_ops.chamfer_distance(P, R).shape
        torch.Size([8])

    Source: Fan, Su and Guibas, "A Point Set Generation Network for 3D Object Reconstruction from a Single Image", 2017,
    equation 1, with means in place of sums.
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
    single = P.dim() == 2
    lifted = [x if x is None or not single else x.unsqueeze(0) for x in (*clouds, p_weight, r_weight)]
    of_P, _, of_R, _ = lik.chamfer_fwd(*lifted[:4], metric)
    distance = _mean_distance(of_P, lifted[2], lifted[4]) + _mean_distance(of_R, lifted[3], lifted[5])
    return distance.squeeze(0) if single else distance


def _check_weight(name: str, w: Tensor, X: Tensor) -> None:
    check_tensor(_OP, name, w)
    check_strided(_OP, name, w)
    if w.dtype != score_dtype(X.dtype):
        raise TypeError(f"{_OP}: {name}: expected {score_dtype(X.dtype)} for {X.dtype} points, got {w.dtype}")
    if w.shape != X.shape[:-1]:
        raise ValueError(f"{_OP}: {name}: expected {format_shape(X[..., 0])}, got {format_shape(w)}")
    if w.device != X.device:
        raise ValueError(f"{_OP}: {name}: expected the device of P, {X.device}, got {w.device}")


def _mean_distance(distances: Tensor, lengths: Tensor | None, weight: Tensor | None) -> Tensor:
    """Of each cloud. What is at no distance, as beyond its end, adds none, and nobody near is far, whatever weights."""
    if weight is not None:
        distances = distances * torch.where((distances == 0) | distances.isinf(), 1, weight)
    count = clamp_to_at_least_one(distances.shape[1]) if lengths is None else lengths.clamp_min(1)
    return distances.sum(1) / count
