"""MaxSim over several document tokens: ``lik::maxsim_token_topk_fwd`` sums the best tokens of each query token.

It runs in plain PyTorch on every device. The gradient is the sum of the MaxSim gradients at the argmax of each rank,
which the MaxSim operator computes.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from ..._ops import add_op_namespace_prefix
from ..._ops import ops as lik
from ...core.arguments import score_dtype
from ...core.segments import DenseArgs
from ...ops.registration.custom import custom_op
from ...ops.registration.family import register_autograd
from ...ops.stack import batching, functional
from .portable import forward_token_topk

_SCHEMA = (
    "(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, int top_k, bool normalize, bool keep)"
    " -> (Tensor, Tensor)"
)
_FWD = add_op_namespace_prefix("maxsim_token_topk_fwd")
_log = logging.getLogger("lik_ops")


def _unpack_args(args: tuple) -> DenseArgs:
    """Return the validated tensors of a call."""
    x, top_k = DenseArgs(*args[:5]), args[5]
    x.check(_FWD)
    if top_k < 1:
        raise ValueError(f"{_FWD}: top_k: expected 1 or more, got {top_k}")
    return x


@custom_op(add_op_namespace_prefix("maxsim_token_topk_fwd"), _SCHEMA)
def maxsim_token_topk_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the scores and, if `keep`, the argmax of each rank.

    `lik_ops.maxsim_token_topk` describes the computation. The arguments, in the order of the schema:

    - ``Q``, ``D``, ``q_mask``, ``d_mask``, ``q_weight``, ``normalize``: the arguments of ``lik::maxsim_fwd``.
    - ``top_k``: the number of document tokens that each query token sums.
    - ``keep``: whether to return the argmax, which the backward needs.

    Returns:
        ``(scores, argmax)``. The scores are fp32 (fp64 for fp64) ``[Nq, Nd]``, or ``[Nq, K]`` for candidates. The
        argmax is int32 ``[top_k, Nd, Nq, Lq]``, or ``[top_k, Nq, K, Lq]`` for candidates, best first. It is -1 after
        the last kept token of a document. Without `keep` its size is [0].
    """
    x, (top_k, normalize, keep) = _unpack_args(args), args[5:]
    functional.reject_forward_ad(x.Q, x.D, x.q_weight)
    if x.Q.device.type != "cpu":
        _log.debug("%s on %s: by plain torch, there is no kernel", _FWD, x.Q.device)
    return forward_token_topk(x, top_k, normalize, keep)


@maxsim_token_topk_fwd.register_fake
def _(*args):
    x, (top_k, _, keep) = _unpack_args(args), args[5:]
    argmax = x.Q.new_empty((top_k, *x.argmax_shape()) if keep else (0,), dtype=torch.int32)
    return x.Q.new_empty(x.scores_shape(), dtype=score_dtype(x.Q.dtype)), argmax


def _call_backward(grad_scores, tensors, argmax, options, needs):
    """Add the gradients of all ranks in fp32 (fp64 for fp64), and round once."""
    if argmax.dim() == 1:
        raise ValueError(f"{_FWD}: keep: expected True where gradients are wanted, got False")
    Q, D, *per_token = tensors
    operands = Q.to(score_dtype(Q.dtype)), D.to(score_dtype(D.dtype))
    sums: list[Tensor] = []
    for rank_argmax in argmax.unbind(0):
        grads = lik.maxsim_bwd_lowmem(grad_scores, *operands, rank_argmax, *per_token, options[1], needs)
        sums = [a.add_(g) for a, g in zip(sums, grads, strict=True)] if sums else list(grads)
    return sums[0].to(Q.dtype), sums[1].to(D.dtype), sums[2]


register_autograd(maxsim_token_topk_fwd, DenseArgs, _call_backward)
batching.register_loop(maxsim_token_topk_fwd)
