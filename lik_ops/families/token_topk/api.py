"""MaxSim over several document tokens: sums of the largest similarities of each query token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._ops import ops as lik
from ...api.inputs import Tokens
from ...api.padding import make_dense
from ...core.arguments import check_choice, check_count, check_flag, clamp_to_at_least_one
from ...ops.maxsim import call_dispatched
from ...ops.stack import functional

_OP = "maxsim_token_topk"
_REDUCTIONS = ("sum", "mean")


def maxsim_token_topk(
    Q: Tokens,
    D: Tokens,
    top_k: int,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tokens | None = None,
    normalize: bool = False,
    reduction: str = "sum",
) -> Tensor:
    """Compute scores that sum the `top_k` largest similarities of each query token, not only the maximum.

    ``score[i, j] = sum_s w[i, s] * sum of the top_k largest <Q[i, s], D[j, t]>``. This is equation 3 of ColBERT
    (Khattab and Zaharia, 2020) with the sum of the `top_k` largest in place of the maximum. The scores are
    differentiable in Q, D and `q_weight`, at the selected tokens. Ties go to the lowest index. Plain torch computes the
    scores on every device, without storing similarities. A step with gradients keeps ``4 * top_k`` bytes for each query
    token and document. Up to a `top_k` of 32, time grows with `top_k`. Above that, similarities are sorted.

    Args:
        Q: query tokens, as in `maxsim`. Lists and nested tensors are padded and masked.
        D: document tokens, as in `maxsim`. Lists and nested tensors are padded and masked.
        top_k: the number of tokens. A document with fewer kept tokens uses all of them.
        q_mask: query tokens to keep, as in `maxsim`.
        d_mask: document tokens to keep, as in `maxsim`.
        q_weight: the weight of each query token, as in `maxsim`.
        normalize: L2-normalize every token first.
        reduction: ``"sum"`` of the selected similarities, or their ``"mean"`` over as many as there are.

    Returns:
        Scores ``[Nq, Nd]`` or ``[Nq, K]`` in fp32 (fp64 for fp64 inputs). A 2-D Q or D drops its axis. A document
        without kept tokens scores ``-inf``. A query without kept tokens scores 0.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.
        NotImplementedError: ``torch.func`` would differentiate the call.

    Example:
        >>> Q, D = torch.randn(2, 32, 128), torch.randn(5, 300, 128)
        >>> lik_ops.maxsim_token_topk(Q, D, 3, normalize=True, reduction="mean").shape
        torch.Size([2, 5])
    """
    check_count(_OP, "top_k", top_k, 1)
    check_flag(_OP, "normalize", normalize)
    check_choice(_OP, "reduction", reduction, _REDUCTIONS)
    functional.reject_transforms(_OP)
    dense_args = _, documents, _, keep, _ = make_dense(_OP, Q, D, q_mask, d_mask, q_weight)

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        *tensors, normalized, argmax_dtype, _ = args
        ranks, tokens = top_k, tensors[1].shape[-2]
        if not torch.compiler.is_dynamo_compiling() and isinstance(tokens, int):
            ranks = min(top_k, max(tokens, 1))  # each rank stores an argmax; a traced size would add a guard
        return lik.maxsim_token_topk_fwd(*tensors, ranks, normalized, argmax_dtype is not None)

    scores = call_dispatched(_OP, forward, dense_args, normalize, "auto")[0]
    if reduction == "sum":
        return scores
    if keep is not None:
        return scores / keep.bool().sum(-1).clamp(1, top_k)
    length: Any = clamp_to_at_least_one(documents.shape[-2])
    # Dynamo of torch 2.11 cannot trace `sym_min` of plain integers.
    return scores / (min(length, top_k) if isinstance(length, int) else torch.sym_min(length, top_k))
