"""XTR scores: MaxSim over the document tokens that a search in the batch would retrieve."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._ops import ops as lik
from ...api.inputs import Tokens
from ...api.padding import make_dense
from ...core.arguments import check_choice, check_count, check_strided, check_tensor
from ...ops.maxsim import call_dispatched
from ...ops.stack import functional
from .ops import NORMALIZERS, check_no_candidates

_OP = "maxsim_xtr"


def maxsim_xtr(
    Q: Tokens,
    D: Tokens,
    top_k: int = 256,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tokens | None = None,
    normalizer: str = "retrieved",
) -> Tensor:
    """Compute XTR scores as used in training: each query token sees its `top_k` best document tokens of the batch.

    ``score[i, j] = sum_s q_weight[i, s] * m[i, s, j] / Z[i, j]``. Here ``m`` is the maximum of query token s over the
    tokens of document j that are among its `top_k` best, or 0 if there are none. A token that equals the `top_k`-th
    best is among them. Scores depend on the whole batch. They are differentiable in Q, D and `q_weight`, at the argmax.
    Z is a constant. No similarities are stored. In addition to the argmax, a call needs 64 MiB. If one query has more
    than 16 MiB of maxima or similarities, the call needs a few times as much.

    Source: Lee et al., "Rethinking the Role of Token Retrieval in Multi-Vector Retrieval", 2023, equations 4 and 5.

    Args:
        Q: query tokens ``[Nq, Lq, d]`` or ``[Lq, d]``; fp16, bf16, fp32 or fp64. Lists and nested tensors, also of
            documents, are padded and masked.
        D: document tokens ``[Nd, Ld, d]`` or ``[Ld, d]`` of the dtype and device of Q: positives and negatives of the
            whole batch.
        top_k: the number of document tokens that each query token retrieves.
        q_mask: query tokens to keep, with the shape of Q without d. The dtype is bool (True = keep), or an integer
            dtype read as ``!= 0``.
        d_mask: document tokens to keep, with the shape of D without d, in the same dtypes.
        q_weight: the weight of each query token, with the shape of Q without d; fp32 (fp64 for fp64 inputs).
        normalizer: the definition of Z. ``"retrieved"`` is the number of query tokens that retrieved a token of the
            document, at least 1 (the paper, sentence-transformers). ``"positive"`` is the number of query tokens whose
            m is above 0, at least 0.001 (PrimeQA, PyLate). In this case, maxima below 0 are replaced by 0.

    Returns:
        Scores ``[Nq, Nd]`` in fp32 (fp64 for fp64 inputs). A 2-D Q or D drops its axis. A document without kept tokens
        scores ``-inf``, or 0 if the query has no kept token either. A document without retrieved tokens scores 0.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size or device is wrong, `top_k` is less than 1, or `normalizer` is unknown.

    Example:
        >>> Q, D = torch.randn(4, 32, 128), torch.randn(8, 180, 128)
        >>> lik_ops.maxsim_xtr(Q, D, top_k=64).shape
        torch.Size([4, 8])
    """
    check_count(_OP, "top_k", top_k, 1)
    check_choice(_OP, "normalizer", normalizer, NORMALIZERS)
    dense_args = make_dense(_OP, Q, D, q_mask, d_mask, q_weight)
    check_tensor(_OP, "D", dense_args[1])
    check_strided(_OP, "D", dense_args[1])
    check_no_candidates(_OP, dense_args[1])
    functional.reject_transforms(_OP)

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return lik.maxsim_xtr_fwd(*args[:5], top_k, normalizer)[:2]

    return call_dispatched(_OP, forward, dense_args, False, "auto")[0]
