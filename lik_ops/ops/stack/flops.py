"""What `torch.utils.flop_counter.FlopCounterMode` counts: 2 for each multiply-add of an inner product.

The forward multiplies every query token with every document token. A backward only touches the winners, one document
token for each query token of each pair, once for each gradient of Q and D that is asked for; with `recompute` it does
the forward's products again before. Norms, weights and sums are not counted, as torch's formulas do not.

Of ragged layouts the lengths decide. They are read, as torch's formulas of attention with offsets do; where nobody may
look (fake and meta tensors, subclasses, a CUDA graph that is being captured) the count is the most that it can be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..._ops import ops as lik
from ...core.segments import RaggedArgs
from ..fast_path.watchers import is_ordinary_tensor


def _count_token_pairs(Q, D) -> tuple:
    """Query tokens met by documents, and document tokens met by each of them."""
    Nq, Lq = Q[:2]
    return Nq * D[-3] * Lq, D[-2]


def _forward_flops(Q, D, *args, out_shape=None, **kwargs):
    rows, Ld = _count_token_pairs(Q, D)
    return 2 * rows * Ld * Q[-1]


def _backward_flops(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, normalize, needs, *args, **kwargs):
    rows, _ = _count_token_pairs(Q, D)
    again = _forward_flops(Q, D) if tuple(argmax) == (0,) else 0
    return again + _count_products(needs) * 2 * rows * Q[-1]


def _int8_backward_flops(grad_scores, Q, data, scale, argmax, q_mask, q_weight, normalize, unified, needs, **kwargs):
    return _count_products(needs) * 2 * _count_token_pairs(Q, data)[0] * Q[-1]


def _soft_backward_flops(grad_scores, Q, D, *args, out_shape=None, **kwargs):
    """The similarities again and one more product for Q (the weights, the temperature), and the same for D."""
    needs = args[-1]
    return 2 * (int(needs[0] or any(needs[2:])) + int(needs[1])) * _forward_flops(Q, D)


def _cross_entropy_backward_flops(grad_losses, Q, D, *args, out_shape=None, **kwargs):
    """As with `recompute`, the products of the forward are counted once."""
    return _backward_flops(grad_losses, Q, D, (0,), *args[:3], args[-2], args[-1])


def _count_products(needs) -> int:
    """For each winner. The gradient of the weights comes from the same sums of documents as that of Q."""
    return int(needs[0] or needs[2]) + int(needs[1])


def _chamfer_flops(P, R, *args, out_shape=None, **kwargs):
    """A difference, and a multiplication with an addition, of each coordinate."""
    return 3 * P[0] * P[1] * R[1] * P[2]


def _chamfer_backward_flops(of_P, of_R, P, R, *args, **kwargs):
    """A difference, its product with a gradient and a sum, of each coordinate."""
    return 3 * P[0] * (P[1] + R[1]) * P[2]


def _projection_flops(H, W) -> int:
    return 2 * H[0] * H[1] * H[2] * W[0]


def _head_flops(Q, H, W, *args, out_shape=None, **kwargs):
    return _projection_flops(H, W) + _forward_flops(Q, (*H[:2], W[0]))


def _head_backward_flops(grad_scores, Q, H, W, b, argmax, *args, out_shape=None, **kwargs):
    """The projection again, a product as large for each gradient of H and W, and those of the winners."""
    needs, tokens = args[-1], (*H[:2], W[0])
    of_argmax = needs[0], any(needs[1:4]), needs[4]
    products = int(any(needs)) + int(needs[1]) + int(needs[2])
    found = _backward_flops(grad_scores, Q, tokens, argmax, None, None, None, False, of_argmax)
    return products * _projection_flops(H, W) + found


def _topk_flops(Q, D, *args, out_shape=None, **kwargs):
    tokens = D[0] if len(D) == 2 else D[0] * D[1]
    return 2 * Q[0] * Q[1] * tokens * Q[-1]


def _codes_flops(Q, codes, centroids, *args, out_shape=None, **kwargs):
    """What is looked up in the products of query tokens and centroids is no product."""
    return 2 * Q[0] * Q[1] * centroids[0] * Q[-1]


def _is_readable(*tensors: Tensor | None) -> bool:
    known = [t for t in tensors if t is not None]
    if not all(map(is_ordinary_tensor, known)):
        return False
    return known[0].device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _compute_lengths(first: Tensor, last: Tensor, tokens: int) -> Tensor:
    """Of segments; 0 for one that does not lie inside its tensor."""
    return torch.where((first >= 0) & (first <= last) & (last <= tokens), last - first, 0)


def _count_ragged_token_pairs(r: RaggedArgs, longest: Any) -> tuple:
    """Query tokens met by documents, and by document tokens. A pair's query has at most `longest`."""
    Tq, Td = r.Q.shape[0], r.D.shape[0]
    if not _is_readable(r.cu_seqlens_q, r.d_offsets, r.d_lengths, r.pairs):
        rows = Tq * r.columns if r.pairs is None else r.pairs.shape[0] * longest
        # Documents of a cross product do not overlap, as far as the functions of lik_ops make them.
        return rows, Tq * Td if r.pairs is None and not r.candidates else rows * Td
    ends, offsets = r.cu_seqlens_q.long(), r.d_offsets.long()
    queries = _compute_lengths(ends[:-1], ends[1:], Tq)
    documents = _compute_lengths(offsets, offsets + r.d_lengths, Td)
    if r.pairs is None:
        met = documents.sum(-1) if r.candidates else documents.sum()
        return int(queries.sum()) * r.columns, int((queries * met).sum())
    inside = (r.pairs >= 0) & (r.pairs < r.pairs.new_tensor([r.queries, r.columns]))
    pairs = r.pairs[inside.all(1)].long()
    rows, met = queries[pairs[:, 0]], documents[pairs[:, 1]]
    rows = torch.where(rows <= longest, rows, 0)
    return int(rows.sum()), int((rows * met).sum())


def _ragged_forward_flops(*args, out_val=None, **kwargs):
    tensors, longest = RaggedArgs(*args[:9]), args[11]
    return 2 * _count_ragged_token_pairs(tensors, longest)[1] * tensors.Q.shape[-1]


def _ragged_backward_flops(grad_scores, *args, out_val=None, **kwargs):
    tensors, (argmax, _, _, needs) = RaggedArgs(*args[:9]), args[9:]
    return _count_products(needs) * 2 * _count_ragged_token_pairs(tensors, argmax.shape[1])[0] * tensors.Q.shape[-1]


def _quantized_flops(Q, data, *args, out_val=None, **kwargs):
    tensors, longest = RaggedArgs(Q, data, *args[6:13]), args[15]
    return 2 * _count_ragged_token_pairs(tensors, longest)[1] * Q.shape[-1]


def register_formulas() -> None:
    """Tell torch's counter."""
    dense = [lik.maxsim_fwd, lik.maxsim_fwd_int8, lik.maxsim_soft_fwd, lik.maxsim_xtr_fwd, lik.maxsim_cross_entropy_fwd]
    dense.append(lik.maxsim_token_topk_fwd)
    register_flop_formula(dense)(_forward_flops)
    register_flop_formula([lik.maxsim_from_hidden_fwd])(_head_flops)
    register_flop_formula([lik.maxsim_from_hidden_bwd])(_head_backward_flops)
    register_flop_formula([lik.maxsim_bwd_int8])(_int8_backward_flops)
    register_flop_formula([lik.maxsim_bwd_lowmem, lik.maxsim_bwd_unified])(_backward_flops)
    register_flop_formula([lik.maxsim_soft_bwd])(_soft_backward_flops)
    register_flop_formula([lik.chamfer_fwd])(_chamfer_flops)
    register_flop_formula([lik.chamfer_bwd])(_chamfer_backward_flops)
    register_flop_formula([lik.maxsim_cross_entropy_bwd])(_cross_entropy_backward_flops)
    register_flop_formula([lik.maxsim_topk])(_topk_flops)
    register_flop_formula([lik.maxsim_topk_codes])(_codes_flops)
    register_flop_formula([lik.maxsim_ragged_fwd], get_raw=True)(_ragged_forward_flops)
    register_flop_formula([lik.maxsim_quantized_fwd], get_raw=True)(_quantized_flops)
    register_flop_formula([lik.maxsim_ragged_bwd], get_raw=True)(_ragged_backward_flops)
