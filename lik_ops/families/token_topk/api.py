"""MaxSim over several document tokens: sums of the best similarities of each query token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._ops import ops as lik
from ...core.arguments import check_choice, check_count, check_flag, clamp_to_at_least_one
from ...ops.maxsim import call_dispatched
from ...ops.stack import functional

_OP = "maxsim_token_topk"
_REDUCTIONS = ("sum", "mean")


def maxsim_token_topk(
    Q: Tensor,
    D: Tensor,
    top_k: int,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    reduction: str = "sum",
) -> Tensor:
    """Scores in which each query token meets its `top_k` best tokens of a document, where `maxsim` has the best alone.

    ``score[i, j] = sum_s w[i, s] * sum of the top_k largest <Q[i, s], D[j, t]>``: equation 3 of ColBERT (Khattab and
    Zaharia, 2020) with the sum of the `top_k` largest in the place of the maximum. Differentiable in Q, D and
    `q_weight`, at the tokens that are among the best; of equal ones the first are. Computed by plain torch on every
    device, without keeping similarities: a step that has gradients keeps ``4 * top_k`` bytes for each query token and
    document. Up to 32 time grows with `top_k`; above, similarities are sorted.

    Args:
        Q, D, q_mask, d_mask, q_weight, normalize: as in `maxsim`, of tensors.
        top_k: how many tokens; all kept tokens of a document that has fewer.
        reduction: ``"sum"`` of the best, or their ``"mean"``, over as many as there are.

    Returns:
        Scores as of `maxsim`: fp32 (fp64 for fp64), ``[Nq, Nd]`` or ``[Nq, K]``; a 2-D Q or D drops its axis. A
        document that keeps no token scores ``-inf``; a query that keeps no token scores 0.

    Raises:
        TypeError, ValueError: as `maxsim`; also for a `top_k` or a reduction that is none.
        NotImplementedError: `torch.func` would differentiate it.

    Example:
        >>> Q, D = torch.randn(2, 32, 128), torch.randn(5, 300, 128)
        >>> lik_ops.maxsim_token_topk(Q, D, 3, normalize=True, reduction="mean").shape
        torch.Size([2, 5])
    """
    check_count(_OP, "top_k", top_k, 1)
    check_flag(_OP, "normalize", normalize)
    check_choice(_OP, "reduction", reduction, _REDUCTIONS)
    functional.reject_transforms(_OP)

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        *tensors, normalized, argmax_dtype, _ = args
        ranks, tokens = top_k, tensors[1].shape[-2]
        if not torch.compiler.is_dynamo_compiling() and isinstance(tokens, int):
            ranks = min(top_k, max(tokens, 1))  # winners are kept of each; a traced size would be guarded on
        return lik.maxsim_token_topk_fwd(*tensors, ranks, normalized, argmax_dtype is not None)

    scores = call_dispatched(_OP, forward, (Q, D, q_mask, d_mask, q_weight), normalize, "auto")[0]
    if reduction == "sum":
        return scores
    if d_mask is not None:
        return scores / d_mask.bool().sum(-1).clamp(1, top_k)
    most: Any = clamp_to_at_least_one(D.shape[-2])
    # Dynamo of torch 2.11 traces no `sym_min` of plain integers.
    return scores / (min(most, top_k) if isinstance(most, int) else torch.sym_min(most, top_k))
