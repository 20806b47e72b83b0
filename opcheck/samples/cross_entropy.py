"""Sample inputs and references of ``lik::maxsim_cross_entropy_fwd`` and ``_bwd``."""

from __future__ import annotations

import torch
from torch import Tensor

import lik_ops
from lik_ops.opcheck.samples.gradients import compute_gradients

IGNORED = -100


def _make_options(Q: Tensor, D: Tensor, n: int) -> tuple[Tensor, float]:
    """Return labels, every second one ignored, and a temperature.

    If no document has a token, all labels are ignored, so that losses are finite.
    """
    queries, columns = Q.shape[0], D.shape[-3]
    labels = torch.arange(queries) * 7 % max(columns, 1)
    labels[(n + torch.arange(queries)) % 2 == 0] = IGNORED
    if D.shape[-3] == 0 or D.shape[-2] == 0:
        labels.fill_(IGNORED)
    return labels.to(Q.device, (torch.int64, torch.int32)[n % 2]), (2.0, 0.5)[n % 2]


def forward_arguments(args: tuple, n: int) -> tuple:
    """Convert arguments of `maxsim_fwd` by adding labels and a temperature."""
    *tensors, normalize, _, _ = args
    labels, temperature = _make_options(tensors[0], tensors[1], n)
    return *tensors, labels, temperature, IGNORED, normalize


def backward_arguments(args: tuple, n: int) -> tuple:
    """Convert arguments of a backward of `maxsim` by adding labels, a temperature and log-sum-exps."""
    grad_scores, Q, D, _, q_mask, d_mask, q_weight, normalize, needs = args
    labels, temperature = _make_options(Q, D, n)
    given = Q, D, q_mask, d_mask, q_weight, labels
    _, lse = torch.ops.lik.maxsim_cross_entropy_fwd(*given, temperature, IGNORED, normalize)
    return grad_scores.sum(1), *given, lse, temperature, IGNORED, normalize, needs


def forward_reference(Q, D, q_mask, d_mask, q_weight, labels, temperature, ignore_index, normalize) -> tuple:
    """Return the expected losses."""
    options = {"temperature": temperature, "q_weight": q_weight, "normalize": normalize, "ignore_index": ignore_index}
    losses = lik_ops.reference.maxsim_cross_entropy(Q, D, labels, q_mask, d_mask, **options, reduction="none")
    return losses, None


def backward_reference(grad_losses, Q, D, q_mask, d_mask, q_weight, labels, lse, *args) -> tuple:
    """Return the expected gradients."""
    *options, needs = args

    def formula(Q, D, q_weight):
        return forward_reference(Q, D, q_mask, d_mask, q_weight, labels, *options)[0]

    return compute_gradients(formula, grad_losses, (Q, D, q_weight), needs)
