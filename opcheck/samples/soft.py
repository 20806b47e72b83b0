"""Sample inputs and references of ``lik::maxsim_soft_fwd`` and ``lik::maxsim_soft_bwd``."""

from __future__ import annotations

import torch
from torch import Tensor

import lik_ops
from lik_ops.opcheck.samples.gradients import compute_gradients


def _make_temperature(Q: Tensor, n: int, grad: bool) -> tuple[Tensor | None, float]:
    """Return a temperature, as a tensor in every second sample, else as a number."""
    if n % 2 == 0:
        return None, 0.5
    # The gradient of the temperature is a sum of differences divided by it. A value of 3 keeps them comparable with the
    # usual tolerance.
    dtype = torch.float64 if Q.dtype == torch.float64 else torch.float32
    return torch.tensor(3.0, dtype=dtype, device=Q.device, requires_grad=grad), 1.0


def forward_arguments(args: tuple, n: int) -> tuple:
    """Convert arguments of `maxsim_fwd` by adding a temperature."""
    *tensors, normalize, argmax_dtype, _ = args
    grad = tensors[0].requires_grad
    return *tensors, *_make_temperature(tensors[0], n, grad), normalize, grad or argmax_dtype is not None


def backward_arguments(args: tuple, n: int) -> tuple:
    """Convert arguments of a backward of `maxsim` by adding a temperature and the soft maxima."""
    grad_scores, Q, D, _, q_mask, d_mask, q_weight, normalize, needs = args
    tau = _make_temperature(Q, n, False)
    _, lse = torch.ops.lik.maxsim_soft_fwd(Q, D, q_mask, d_mask, q_weight, *tau, normalize, True)
    return grad_scores, Q, D, lse, q_mask, d_mask, q_weight, *tau, normalize, [*needs, n % 2 > 0]


def forward_reference(Q, D, q_mask, d_mask, q_weight, tau, temperature, normalize, keep) -> tuple:
    """Return the expected scores and soft maxima."""
    value = temperature if tau is None else tau
    scores = lik_ops.reference.maxsim_soft(Q, D, value, q_mask, d_mask, q_weight=q_weight, normalize=normalize)
    if not keep:
        return scores, None
    rows, keeps = Q.detach().flatten(0, 1).unsqueeze(1), None if q_mask is None else q_mask.flatten().unsqueeze(1)
    documents, d_keeps = D.detach(), d_mask
    if D.dim() == 4:
        documents = documents.repeat_interleave(Q.shape[1], 0)
        d_keeps = None if d_mask is None else d_mask.repeat_interleave(Q.shape[1], 0)
    each = lik_ops.reference.maxsim_soft(rows, documents, value, keeps, d_keeps, normalize=normalize).detach()
    if keeps is not None:
        each = torch.where(keeps, each, float("-inf"))
    kept = each.unflatten(0, Q.shape[:2])
    return scores, kept.permute(0, 2, 1) if D.dim() == 4 else kept.permute(2, 0, 1)


def backward_reference(grad_scores, Q, D, lse, q_mask, d_mask, q_weight, tau, temperature, normalize, needs) -> tuple:
    """Return the expected gradients."""

    def formula(Q, D, q_weight, tau):
        scores = forward_reference(Q, D, q_mask, d_mask, q_weight, tau, temperature, normalize, False)[0]
        return torch.where(scores.isfinite(), scores, 0)  # a score of -inf has no gradient

    return compute_gradients(formula, grad_scores, (Q, D, q_weight, tau), needs)
