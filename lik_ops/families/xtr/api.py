"""XTR scores: MaxSim over the document tokens that a search of the batch's tokens would have retrieved."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._ops import ops as lik
from ...core.arguments import check_choice, check_count, check_strided, check_tensor
from ...ops.maxsim import call_dispatched
from ...ops.stack import functional
from .ops import NORMALIZERS, check_no_candidates

_OP = "maxsim_xtr"


def maxsim_xtr(
    Q: Tensor,
    D: Tensor,
    top_k: int = 256,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    normalizer: str = "retrieved",
) -> Tensor:
    """XTR scores, as they are trained: each query token sees the `top_k` best document tokens of the whole batch.

    ``score[i, j] = sum_s q_weight[i, s] * m[i, s, j] / Z[i, j]``, where ``m`` is the maximum of query token s over the
    tokens of document j that are among its best, 0 where none is. Scores depend on what else is in the batch. Equal
    to the `top_k`-th best counts as among them. Differentiable in Q, D and `q_weight`, at the tokens that won; Z is a
    constant. No similarities are kept: beside its winners a call takes 64 MiB, and where one query has more than 16 MiB
    of maxima or similarities, a few times these.

    Args:
        Q: query tokens ``[Nq, Lq, d]`` or ``[Lq, d]``; fp16, bf16, fp32 or fp64.
        D: document tokens ``[Nd, Ld, d]`` or ``[Ld, d]`` of the dtype and device of Q: positives and negatives of the
            whole batch.
        top_k: document tokens that each query token retrieves.
        q_mask, d_mask: tokens to keep, the shape of Q and D without d; bool (True = keep) or integers read as ``!= 0``.
        q_weight: a weight for each query token, the shape of Q without d; fp32 (fp64 for fp64).
        normalizer: what Z counts: ``"retrieved"``, the query tokens that retrieved a token of the document, at least 1
            (the paper, sentence-transformers); ``"positive"``, those whose m is above 0, at least 0.001 (PrimeQA,
            PyLate): maxima below 0 then count as 0.

    Returns:
        ``[Nq, Nd]``, fp32 (fp64 for fp64), without the axes that a 2-D Q or D lacks. A document without a token that
        is kept scores ``-inf`` (0 where the query keeps none either), one of which none was retrieved 0.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size or device is wrong, `top_k` is less than 1, or `normalizer` is neither of the two.

    Example:
        >>> Q, D = torch.randn(4, 32, 128), torch.randn(8, 180, 128)
        >>> lik_ops.maxsim_xtr(Q, D, top_k=64).shape
        torch.Size([4, 8])

    Source: Lee et al., "Rethinking the Role of Token Retrieval in Multi-Vector Retrieval", 2023, equations 4 and 5.
    """
    check_count(_OP, "top_k", top_k, 1)
    check_choice(_OP, "normalizer", normalizer, NORMALIZERS)
    check_tensor(_OP, "D", D)
    check_strided(_OP, "D", D)
    check_no_candidates(_OP, D)
    functional.reject_transforms(_OP)

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return lik.maxsim_xtr_fwd(*args[:5], top_k, normalizer)[:2]

    return call_dispatched(_OP, forward, (Q, D, q_mask, d_mask, q_weight), False, "auto")[0]
