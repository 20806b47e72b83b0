"""XTR: ``lik::maxsim_xtr_fwd``, MaxSim in which a query token sees only the best document tokens of the whole batch.

It runs in plain PyTorch on every device. The MaxSim operator computes its gradient at the argmax of the retrieved
tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._ops import add_op_namespace_prefix
from ..._ops import ops as lik
from ...core.arguments import check_choice, format_shape, require, score_dtype
from ...core.segments import DenseArgs
from ...ops.registration.custom import custom_op
from ...ops.registration.family import register_autograd
from ...ops.stack import batching, functional
from .portable import forward_xtr

NORMALIZERS = ("retrieved", "positive")
_SCHEMA = (
    "(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, SymInt top_k, str normalizer)"
    " -> (Tensor, Tensor, Tensor)"
)
_FWD = add_op_namespace_prefix("maxsim_xtr_fwd")


def check_xtr(op: str, x: DenseArgs, top_k: Any, normalizer: Any) -> None:
    """Raise ValueError or TypeError, naming the argument, unless XTR accepts these."""
    x.check(op)
    check_no_candidates(op, x.D)
    check_choice(op, "normalizer", normalizer, NORMALIZERS)
    require(top_k >= 1, lambda: f"{op}: top_k: expected 1 or more, got {top_k}")


def check_no_candidates(op: str, D: Tensor) -> None:
    """Raise ValueError for candidates, because XTR needs documents that all queries share."""
    if D.dim() == 4:
        raise ValueError(f"{op}: D: expected [Nd, Ld, d], the documents of the whole batch, got {format_shape(D)}")


@custom_op(add_op_namespace_prefix("maxsim_xtr_fwd"), _SCHEMA)
def maxsim_xtr_fwd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the XTR scores, the argmax among the retrieved tokens, and the normalizers.

    `lik_ops.maxsim_xtr` describes the computation. The arguments, in the order of the schema:

    - ``Q``, ``D``, ``q_mask``, ``d_mask``, ``q_weight``: the arguments of ``lik::maxsim_fwd``, without candidates.
    - ``top_k``: the number of document tokens of the batch that each query token retrieves.
    - ``normalizer``: ``"retrieved"`` or ``"positive"``.

    Returns:
        ``(scores, argmax, normalizers)``. The scores and normalizers are fp32 (fp64 for fp64) ``[Nq, Nd]``. The
        argmax is int32 ``[Nd, Nq, Lq]``, and -1 if no token of the document was retrieved.
    """
    x, (top_k, normalizer) = DenseArgs(*args[:5]), args[5:]
    check_xtr(_FWD, x, top_k, normalizer)
    functional.reject_forward_ad(x.Q, x.D, x.q_weight)
    return forward_xtr(x, top_k, normalizer == "positive")


@maxsim_xtr_fwd.register_fake
def _(*args):
    x, (top_k, normalizer) = DenseArgs(*args[:5]), args[5:]
    check_xtr(_FWD, x, top_k, normalizer)
    scores, count = (x.Q.new_empty(x.scores_shape(), dtype=score_dtype(x.Q.dtype)) for _ in range(2))
    return scores, x.Q.new_empty(x.argmax_shape(), dtype=torch.int32), count


def _select_saved(inputs: Sequence, output: Sequence) -> tuple:
    """Return the tensors that the backward needs, the argmax last."""
    return *inputs, output[2], output[1]


def _call_backward(grad_scores, tensors, argmax, options, needs):
    Q, D, q_mask, d_mask, q_weight, count = tensors
    return lik.maxsim_bwd_lowmem(grad_scores / count, Q, D, argmax, q_mask, d_mask, q_weight, False, needs)


register_autograd(maxsim_xtr_fwd, DenseArgs, _call_backward, _select_saved)
batching.register_loop(maxsim_xtr_fwd)
