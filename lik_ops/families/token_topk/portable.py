"""MaxSim over several document tokens in plain PyTorch: the best similarities of slices, in order.

Similarities come from `portable.forward.slices`, whose shapes do not depend on the batch. Each maximum of `slices`
becomes a list of the best similarities, and slabs are smaller by the same factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.segments import DenseArgs
from ...portable.forward.dense import allocate_outputs
from ...portable.forward.scores import NEG_INF
from ...portable.forward.slices import QueryPanel, SliceForward, _BlockViews
from ...portable.layout import BatchedArgs, make_batched_args

_MAX_ROUNDS = 32  # a round finds one maximum and reads all similarities; more values are found by sorting


def forward_token_topk(x: DenseArgs, top_k: int, normalize: bool, keep: bool) -> tuple[Tensor, Tensor]:
    """Return the results of `lik::maxsim_token_topk_fwd`. The argmax is also -1 for similarities of -inf."""
    scores, single_argmax, is_trivial = allocate_outputs(x.Q, x.D, x.q_mask, torch.int32, keep, -1)
    argmax = single_argmax.new_full((top_k, *single_argmax.shape), -1) if keep else single_argmax
    if not is_trivial:
        count = min(top_k, x.D.shape[-2])
        layouts = [make_batched_args(*x, scores, rank_argmax) for rank_argmax in argmax[:count]] if keep else []
        layout = make_batched_args(*x, scores, None)
        TokenTopkForward(layout, normalize, count, [rank_layout.argmax for rank_layout in layouts]).run()
    return scores, argmax


def extract_best(S: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values along the second-last axis of `S` and their indices; overwrites `S`.

    They are in descending order. NaN comes first, and the first of equal values comes first.
    """
    if count > _MAX_ROUNDS:
        values, indices = S.sort(dim=-2, descending=True, stable=True)
        return values[..., :count, :], indices[..., :count, :]
    rounds = []
    for rank in range(count):
        rounds.append(S.max(-2, keepdim=True))
        if rank + 1 < count:
            S.scatter_(-2, rounds[-1].indices, NEG_INF)
    return torch.cat([x.values for x in rounds], -2), torch.cat([x.indices for x in rounds], -2)


class TokenTopkForward(SliceForward):
    """The forward by slices, with the sum of the best in place of the maximum."""

    def __init__(self, layout: BatchedArgs, normalize: bool, count: int, argmax: list[Tensor | None]) -> None:
        self.count, self.argmax = count, argmax
        super().__init__(layout, normalize)
        self.values = self.best.new_empty((count, *self.best.shape))
        self.indices = torch.zeros_like(self.values, dtype=torch.int32)

    def _plan(self) -> None:
        super()._plan()
        # Two lists in addition to the maxima share their memory. A slab gets fewer documents, in whole blocks, and then
        # fewer units.
        batches, documents, units = self.slab
        block = self.tiling.block_slices * self.shape.documents
        parts = 2 * self.count
        slab_documents = max(min(block, documents), documents // parts // block * block)
        parts = -(-parts * slab_documents // documents)
        self.slab = batches, slab_documents, max(1, units // parts)

    def _view_as_maxima(self, x: Tensor, best: Tensor) -> Tensor:
        """Return the view of the lists `x` that corresponds to the view `best` of the maxima, ``[count, ...]``."""
        return x.as_strided((self.count, *best.shape), (x.stride(0), *best.stride()), best.storage_offset())

    def _score(
        self, b: slice, x: slice, start: int, documents: Tensor, views: _BlockViews, panel: QueryPanel, best: Tensor
    ) -> None:
        shape, tokens = self.shape, self.tokens
        S = self._mask_overlaps(start, documents, views, panel)
        S = S[:, : shape.documents * tokens].unflatten(1, (-1, tokens)).flatten(0, 1)  # [documents, tokens, columns]
        values, indices = extract_best(S, min(self.count, tokens))
        values, indices = values.transpose(0, 1), indices.transpose(0, 1).to(torch.int32).add_(start)
        best_values, best_indices = self._view_as_maxima(self.values, best), self._view_as_maxima(self.indices, best)
        if start == 0:
            best_values[len(values) :] = NEG_INF
            best_values[: len(values)], best_indices[: len(values)] = values, indices
            return
        all_values = torch.cat([best_values, values]).transpose(0, 1)
        all_indices = torch.cat([best_indices, indices])
        values, order = extract_best(all_values.contiguous(), self.count)
        best_values.copy_(values.transpose(0, 1))
        best_indices.copy_(all_indices.gather(0, order.transpose(0, 1)))

    def _finish(self, b: slice, x: slice, u: slice) -> None:
        part = slice(0, b.stop - b.start), slice(0, x.stop - x.start), slice(0, u.stop - u.start)
        best = self.best[part]
        kept_tokens = None if self.layout.d_mask is None else self.layout.d_mask[b, x].sum(-1)[..., None, None]
        best.zero_()
        for rank in range(self.count):
            values = self.values[rank][part]
            best += values if kept_tokens is None else torch.where(kept_tokens > rank, values, 0)
            if self.argmax:
                self._write_argmax(rank, b, x, u, values, kept_tokens)
        super()._finish(b, x, u)

    def _write_argmax(
        self, rank: int, b: slice, x: slice, u: slice, values: Tensor, kept_tokens: Tensor | None
    ) -> None:
        """Write the argmax of a rank in a slab, whose similarities are `values`."""
        layout, q = self.layout, self.queries
        y = slice(u.start * q, min(u.stop * q, self.Y))
        indices = self.indices[rank, : values.shape[0], : values.shape[1], : values.shape[2]]
        indices = torch.where(
            values == NEG_INF if kept_tokens is None else (values == NEG_INF) | (kept_tokens <= rank), -1, indices
        )
        indices = indices[..., : q * self.Lq].unflatten(-1, (q, self.Lq)).flatten(2, 3)[:, :, : y.stop - y.start]
        if layout.q_mask is not None:
            indices = indices.masked_fill(~layout.q_mask[b, None, y], -1)
        argmax = self.argmax[rank]
        assert argmax is not None
        argmax[b, x, y] = indices
