"""Sample inputs and references of ``lik::maxsim_fwd_int8`` and ``lik::maxsim_bwd_int8``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import lik_ops
from lik_ops.opcheck.samples.gradients import compute_gradients


def _decode(data: Tensor, scale: Tensor) -> Tensor:
    """Dequantize int8 tokens."""
    return data.double() * scale.double().unsqueeze(-1)


def _score_saved(Q, D, kept, q_mask, d_mask, q_weight, normalize: bool) -> Tensor:
    """Return exact scores whose gradients are taken at the argmax of D, with the tokens of `kept` in place of D.

    The gradient of the tokens of `kept` is passed on to D.
    """
    exact, argmax = lik_ops.reference.maxsim_with_argmax(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=normalize)
    tokens = D + (kept - D).detach()
    if normalize:
        Q, tokens = F.normalize(Q, dim=-1), F.normalize(tokens, dim=-1)
    if D.dim() == 3:
        tokens = tokens.expand(Q.shape[0], *D.shape)
    if not tokens.numel():
        return exact
    won = tokens.gather(2, argmax.clamp_min(0).unsqueeze(-1).expand(*argmax.shape, D.shape[-1]))
    maxima = torch.where(argmax >= 0, (Q.unsqueeze(1) * won).sum(-1), 0)
    found = (maxima if q_weight is None else maxima * q_weight.unsqueeze(1)).sum(-1)
    return torch.where(exact.isfinite(), found + (exact - found).detach(), exact)


def forward_reference(Q, D, q_mask, d_mask, q_weight, normalize, argmax_dtype, backward) -> tuple:
    """Return the expected scores and argmax."""
    made = lik_ops.quantize(D, "int8")
    scores = _score_saved(Q, D, _decode(made.data, made.scale), q_mask, d_mask, q_weight, normalize)
    _, argmax = lik_ops.reference.maxsim_with_argmax(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=normalize)
    return scores, argmax if D.dim() == 4 else argmax.transpose(0, 1), None, None


def backward_arguments(args: tuple, n: int) -> tuple:
    """Convert arguments of a backward of `maxsim` by replacing documents with int8 documents."""
    grad_scores, Q, D, argmax, q_mask, _, q_weight, normalize, needs = args
    made = lik_ops.quantize(D, "int8")
    return grad_scores, Q, made.data, made.scale, argmax, q_mask, q_weight, normalize, n % 2 > 0, needs


def backward_reference(grad_scores, Q, data, scale, argmax, q_mask, q_weight, normalize, unified, needs) -> tuple:
    """Return the expected gradients."""

    def scores(Q, D, weight):
        tokens = D.expand(Q.shape[0], *D.shape) if D.dim() == 3 else D
        argmax_found = (argmax.transpose(0, 1) if D.dim() == 3 else argmax).long()
        if not tokens.numel():
            return grad_scores.double() * 0 + 0 * (Q.sum() + D.sum())
        rows, tokens = (F.normalize(x, dim=-1) if normalize else x for x in (Q, tokens))
        won = tokens.gather(2, argmax_found.clamp_min(0).unsqueeze(-1).expand(*argmax_found.shape, D.shape[-1]))
        maxima = torch.where(argmax_found >= 0, (rows.unsqueeze(1) * won).sum(-1), 0)
        return (maxima if weight is None else maxima * weight.unsqueeze(1)).sum(-1)

    return compute_gradients(scores, grad_scores, (Q, _decode(data, scale).to(Q.dtype), q_weight), needs)
