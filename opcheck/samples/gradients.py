"""Expected gradients of an operator, computed by autograd from the formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def compute_gradients(
    formula: Callable[..., Tensor], grad_scores: Tensor, leaves: Sequence[Tensor | None], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of ``formula(*leaves)``.

    Args:
        formula: computes scores from the leaves.
        grad_scores: upstream gradients.
        leaves: Q, D and q_weight, for example. A leaf may be None.
        needs: whether the gradient of each leaf is wanted.

    Returns:
        A gradient for each leaf, None if it is not wanted or the leaf is None.
    """
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_() for t in leaves]
        given = [t for t in leaves if t is not None]
        found = torch.autograd.grad(formula(*leaves), given, grad_scores.double(), materialize_grads=True)
    each = iter(found)
    grads = [None if t is None else next(each) for t in leaves]
    return tuple(g if need else None for g, need in zip(grads, needs, strict=True))
