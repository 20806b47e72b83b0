"""What `torch.utils.flop_counter.FlopCounterMode` counts: 2 for each multiply-add of an inner product.

The forward multiplies every query token with every document token. A backward only touches the winners, one document
token for each query token of each pair, once for each gradient of Q and D that is asked for; with `recompute` it does
the forward's products again before. Norms, weights and sums are not counted, as torch's formulas do not.
"""

from __future__ import annotations

from torch.utils.flop_counter import register_flop_formula


def _token_pairs(Q, D) -> tuple:
    """Query tokens met by documents, and document tokens met by each of them."""
    Nq, Lq = Q[:2]
    return Nq * D[-3] * Lq, D[-2]


def _forward_flops(Q, D, *args, out_shape=None, **kwargs):
    rows, Ld = _token_pairs(Q, D)
    return 2 * rows * Ld * Q[-1]


def _backward_flops(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, normalize, needs, *args, **kwargs):
    rows, _ = _token_pairs(Q, D)
    # The gradient of the weights comes from the same sums of documents as that of Q.
    products = int(needs[0] or needs[2]) + int(needs[1])
    again = _forward_flops(Q, D) if tuple(argmax) == (0,) and len(tuple(argmax)) == 1 else 0
    return again + products * 2 * rows * Q[-1]


def _topk_flops(Q, D, *args, out_shape=None, **kwargs):
    tokens = D[0] if len(D) == 2 else D[0] * D[1]
    return 2 * Q[0] * Q[1] * tokens * Q[-1]


def register_topk() -> None:
    """Tell torch's counter of `lik::maxsim_topk`."""
    import torch

    register_flop_formula([torch.ops.lik.maxsim_topk])(_topk_flops)


def register() -> None:
    """Tell torch's counter."""
    import torch

    register_flop_formula([torch.ops.lik.maxsim_fwd])(_forward_flops)
    register_flop_formula([torch.ops.lik.maxsim_bwd_lowmem, torch.ops.lik.maxsim_bwd_unified])(_backward_flops)
