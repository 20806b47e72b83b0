"""Sample inputs and references of ``lik::maxsim_from_hidden_fwd`` and its backward."""

from __future__ import annotations

import torch
from torch import Tensor

import lik_ops
from lik_ops.opcheck.samples.gradients import compute_gradients

WIDTH = 11  # features of hidden states


def _make_head(Q: Tensor, D: Tensor, n: int, grad: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states with the layout of the documents, and a head, with a bias in every second sample.

    All values are integers. If half dtypes had to round tokens, their argmax would differ from the formula's.
    """
    generator = torch.Generator().manual_seed(n)
    d = D.shape[-1]

    def drawn(*sizes: int) -> Tensor:
        """Draw small integers."""
        return torch.randint(-2, 3, sizes, generator=generator).to(D.device, D.dtype)

    H = drawn(*D.shape[:-1], WIDTH)
    if not D.is_contiguous():
        H = H.transpose(0, 1).contiguous().transpose(0, 1)
    leaves = H, drawn(d, WIDTH), drawn(d)
    H, W, b = (t.requires_grad_(grad) for t in leaves)
    return H, W, b if n % 2 else None


def _normalize(Q: Tensor, n: int) -> bool:
    """Return whether sample n normalizes, which half dtypes never do."""
    return n % 3 > 0 and Q.dtype not in (torch.float16, torch.bfloat16)


def forward_arguments(args: tuple, n: int) -> tuple:
    """Convert arguments of `maxsim_fwd` of a cross product by replacing documents with hidden states."""
    Q, D, q_mask, d_mask, q_weight, _, argmax_dtype, _ = args
    return Q, *_make_head(Q, D, n, Q.requires_grad), q_mask, d_mask, q_weight, _normalize(Q, n), argmax_dtype


def backward_arguments(args: tuple, n: int) -> tuple:
    """Convert arguments of a backward of `maxsim` by replacing documents with hidden states."""
    grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, _, needs = args
    H, W, b = _make_head(Q, D, n, False)
    x, normalize = (Q, H, W, b, q_mask, d_mask, q_weight), _normalize(Q, n)
    _, argmax = torch.ops.lik.maxsim_from_hidden_fwd(*x, normalize, argmax.dtype)
    wanted = [needs[0], needs[1], n % 4 < 2, b is not None, needs[2]]
    return grad_scores, Q, H, W, b, argmax, *x[4:], normalize, wanted


def forward_reference(Q, H, W, b, q_mask, d_mask, q_weight, normalize, argmax_dtype) -> tuple:
    """Return the expected scores."""
    options = {"q_weight": q_weight, "normalize": normalize}
    return lik_ops.reference.maxsim_from_hidden(Q, H, W, b, q_mask, d_mask, **options), None


def backward_reference(grad_scores, Q, H, W, b, argmax, q_mask, d_mask, q_weight, normalize, needs) -> tuple:
    """Return the expected gradients."""

    def formula(Q, H, W, b, q_weight):
        scores = forward_reference(Q, H, W, b, q_mask, d_mask, q_weight, normalize, None)[0]
        return torch.where(scores.isfinite(), scores, 0)  # a score of -inf has no gradient

    return compute_gradients(formula, grad_scores, (Q, H, W, b, q_weight), needs)
