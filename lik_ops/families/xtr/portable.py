"""XTR in plain PyTorch, on any device: each query token keeps its best similarities, one block at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.arguments import score_dtype
from ...core.segments import DenseArgs
from ...portable.blocks import multiply_by_rows, split_to_fit, sum_pairwise

_MAX_BLOCK_BYTES = 16 * 2**20  # similarities of a block, of which there are two; one document may have more


def forward_xtr(x: DenseArgs, top_k: int, positive: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `lik::maxsim_xtr_fwd`. If `positive`, only positive similarities are retrieved."""
    Q, D, q_mask, d_mask, q_weight = x
    (Nq, Lq, _), Nd = Q.shape, D.shape[0]
    dtype = score_dtype(Q.dtype)
    weight = torch.ones(Nq, Lq, dtype=dtype, device=Q.device) if q_weight is None else q_weight
    keep = torch.ones(Nq, Lq, dtype=torch.bool, device=Q.device) if q_mask is None else q_mask
    scores, count = (torch.empty(Nq, Nd, dtype=dtype, device=Q.device) for _ in range(2))
    argmax = torch.empty(Nd, Nq, Lq, dtype=torch.int32, device=Q.device)
    for i in split_to_fit(Nq, 8 * Nd * Lq, _MAX_BLOCK_BYTES):
        rows = Q[i].to(dtype).masked_fill(~keep[i, :, None], 0).flatten(0, 1)
        best, indices, thresholds = _find_best(rows, D, d_mask, top_k)
        is_retrieved = ((best >= thresholds[:, None]) | best.isnan()) & (best > -torch.inf).logical_or(best.isnan())
        if positive:
            is_retrieved &= ~(best <= 0)
        best, indices, is_retrieved = (t.unflatten(0, (len(keep[i]), Lq)) for t in (best, indices, is_retrieved))
        is_retrieved &= keep[i, :, None]
        argmax[:, i] = torch.where(is_retrieved, indices, -1).permute(2, 0, 1).to(torch.int32)
        terms = torch.where(is_retrieved, best * torch.where(keep[i], weight[i], 0)[..., None], 0)
        count[i] = is_retrieved.sum(1).to(dtype).clamp_min_(1e-3 if positive else 1)
        scores[i] = sum_pairwise(terms.transpose(1, 2)) / count[i]
    empty = D.new_full((Nd,), D.shape[1] == 0, dtype=torch.bool) if d_mask is None else ~d_mask.any(1)
    return scores.masked_fill_(keep.any(1)[:, None] & empty, -torch.inf), argmax, count


def _find_best(rows: Tensor, D: Tensor, d_mask: Tensor | None, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return maximum and argmax ``[rows, Nd]`` of each row in each document, and the `top_k`-th best of all tokens.

    NaN comes before all numbers and counts toward `top_k`.
    """
    (count, _), (Nd, Ld, _) = rows.shape, D.shape
    best = rows.new_full((count, Nd), -torch.inf)
    indices = torch.zeros(count, Nd, dtype=torch.int64, device=rows.device)
    highest = rows.new_empty(count, 0)
    if Ld == 0 or count == 0:
        return best, indices, rows.new_full((count,), -torch.inf)
    for j in split_to_fit(Nd, rows.element_size() * count * Ld, _MAX_BLOCK_BYTES):
        S = multiply_by_rows(rows, D[j].to(rows.dtype).flatten(0, 1).T).unflatten(1, (-1, Ld))
        if d_mask is not None:
            S = S.masked_fill_(~d_mask[j], -torch.inf)
        best[:, j], indices[:, j] = S.max(2)
        highest = torch.cat([highest, S.flatten(1)], 1)
        highest = highest.topk(min(top_k, highest.shape[1]), dim=1, sorted=False).values
    if highest.shape[1] < top_k:  # all are among the best
        return best, indices, rows.new_full((count,), -torch.inf)
    # topk with largest=False puts NaN last, so the threshold is NaN only if all of the best are NaN.
    return best, indices, highest.topk(1, dim=1, largest=False).values.squeeze(1)
