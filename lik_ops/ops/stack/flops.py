"""Formulas for `torch.utils.flop_counter.FlopCounterMode`, with 2 for each multiply-add of an inner product.

The forward multiplies every query token with every document token. A backward reads only the argmax. For each needed
gradient of Q and D it multiplies one document token for each query token of each pair. With `recompute` it repeats the
products of the forward first. Norms, weights and sums are not counted, as in the formulas of torch.

The count of a ragged layout depends on the lengths. They are read, as in torch's formulas for attention with offsets.
Fake and meta tensors, subclasses and a CUDA graph capture have no readable lengths. In these cases the count is an
upper bound.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..._ops import ops as lik
from ...core.segments import PackedArgs
from ..fast_path.watchers import is_ordinary_tensor


def _count_token_pairs(Q, D) -> tuple:
    """Return the number of (query token, document) pairs, and the number of tokens of a document."""
    Nq, Lq = Q[:2]
    return Nq * D[-3] * Lq, D[-2]


def _forward_flops(Q, D, *args, out_shape=None, **kwargs):
    rows, Ld = _count_token_pairs(Q, D)
    return 2 * rows * Ld * Q[-1]


def _backward_flops(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, normalize, needs, *args, **kwargs):
    rows, _ = _count_token_pairs(Q, D)
    recompute_flops = _forward_flops(Q, D) if tuple(argmax) == (0,) else 0
    return recompute_flops + _count_products(needs) * 2 * rows * Q[-1]


def _int8_backward_flops(grad_scores, Q, data, scale, argmax, q_mask, q_weight, normalize, unified, needs, **kwargs):
    return _count_products(needs) * 2 * _count_token_pairs(Q, data)[0] * Q[-1]


def _soft_backward_flops(grad_scores, Q, D, *args, out_shape=None, **kwargs):
    """Count the similarities and one product for Q, the weights and the temperature, and the same for D."""
    needs = args[-1]
    return 2 * (int(needs[0] or any(needs[2:])) + int(needs[1])) * _forward_flops(Q, D)


def _cross_entropy_backward_flops(grad_losses, Q, D, *args, out_shape=None, **kwargs):
    """Count the products of the forward once, as with `recompute`."""
    return _backward_flops(grad_losses, Q, D, (0,), *args[:3], args[-2], args[-1])


def _count_products(needs) -> int:
    """Return the number of products for each argmax. The weights share the document sums of the gradient of Q."""
    return int(needs[0] or needs[2]) + int(needs[1])


def _chamfer_flops(P, R, *args, out_shape=None, **kwargs):
    """Count a difference, a multiplication and an addition for each coordinate."""
    return 3 * P[0] * P[1] * R[1] * P[2]


def _chamfer_backward_flops(of_P, of_R, P, R, *args, **kwargs):
    """Count a difference, a multiplication and an addition for each coordinate."""
    return 3 * P[0] * (P[1] + R[1]) * P[2]


def _projection_flops(H, W) -> int:
    return 2 * H[0] * H[1] * H[2] * W[0]


def _head_flops(Q, H, W, *args, out_shape=None, **kwargs):
    return _projection_flops(H, W) + _forward_flops(Q, (*H[:2], W[0]))


def _head_backward_flops(grad_scores, Q, H, W, b, argmax, *args, out_shape=None, **kwargs):
    """Count the projection, a product of the same size for each gradient of H and W, and the products of the argmax."""
    needs, tokens = args[-1], (*H[:2], W[0])
    argmax_needs = needs[0], any(needs[1:4]), needs[4]
    products = int(any(needs)) + int(needs[1]) + int(needs[2])
    argmax_flops = _backward_flops(grad_scores, Q, tokens, argmax, None, None, None, False, argmax_needs)
    return products * _projection_flops(H, W) + argmax_flops


def _topk_flops(Q, D, *args, out_shape=None, **kwargs):
    tokens = D[0] if len(D) == 2 else D[0] * D[1]
    return 2 * Q[0] * Q[1] * tokens * Q[-1]


def _codes_flops(Q, codes, centroids, *args, out_shape=None, **kwargs):
    """Count the products of query tokens and centroids. Lookups are not products."""
    return 2 * Q[0] * Q[1] * centroids[0] * Q[-1]


def _is_readable(*tensors: Tensor | None) -> bool:
    """Return whether the lengths can be read."""
    present_tensors = [t for t in tensors if t is not None]
    if not all(map(is_ordinary_tensor, present_tensors)):
        return False
    return present_tensors[0].device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _compute_lengths(first: Tensor, last: Tensor, tokens: int) -> Tensor:
    """Return the lengths of segments, 0 for a segment outside its tensor."""
    return torch.where((first >= 0) & (first <= last) & (last <= tokens), last - first, 0)


def _count_ragged_token_pairs(tensors: tuple, longest: Any) -> tuple:
    """Return the number of (query token, document) and of (query token, document token) pairs.

    The query of a pair in `pairs` has at most `longest` tokens.
    """
    c = PackedArgs.from_tensors(tensors, longest)
    Tq, Td = c.Tq, c.Td
    if not _is_readable(c.Q, *c.indices):
        rows = Tq * c.columns if c.pairs is None else c.pairs.shape[0] * longest
        # The functions of lik_ops pass documents of a cross product that do not overlap.
        return rows, Tq * Td if c.pairs is None and not c.candidates else rows * Td
    r = c.ragged()
    ends, offsets = r.cu_seqlens_q.long(), r.d_offsets.long()
    queries = _compute_lengths(ends[:-1], ends[1:], Tq)
    documents = _compute_lengths(offsets, offsets + r.d_lengths, Td)
    if r.pairs is None:
        document_tokens = documents.sum(-1) if r.candidates else documents.sum()
        return int(queries.sum()) * r.columns, int((queries * document_tokens).sum())
    is_inside = (r.pairs >= 0) & (r.pairs < r.pairs.new_tensor([r.queries, r.columns]))
    pairs = r.pairs[is_inside.all(1)].long()
    rows, document_tokens = queries[pairs[:, 0]], documents[pairs[:, 1]]
    rows = torch.where(rows <= longest, rows, 0)
    return int(rows.sum()), int((rows * document_tokens).sum())


def _ragged_forward_flops(*args, out_val=None, **kwargs):
    return 2 * _count_ragged_token_pairs(args[:9], args[11])[1] * args[0].shape[-1]


def _ragged_backward_flops(grad_scores, *args, out_val=None, **kwargs):
    tensors, (argmax, _, _, needs) = args[:9], args[9:]
    return _count_products(needs) * 2 * _count_ragged_token_pairs(tensors, argmax.shape[1])[0] * args[0].shape[-1]


def _quantized_flops(Q, data, *args, out_val=None, **kwargs):
    return 2 * _count_ragged_token_pairs((Q, data, *args[6:13]), args[15])[1] * Q.shape[-1]


def _quantized_backward_flops(grad_scores, Q, data, *args, out_val=None, **kwargs):
    argmax, _, needs = args[13:]
    full_needs = needs[0], False, needs[1]
    return _ragged_backward_flops(grad_scores, Q, data, *args[6:13], argmax, None, None, full_needs)


def register_formulas() -> None:
    """Register the formulas with torch."""
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
    register_flop_formula([lik.maxsim_quantized_bwd], get_raw=True)(_quantized_backward_flops)
    register_flop_formula([lik.maxsim_ragged_bwd], get_raw=True)(_ragged_backward_flops)
