"""The portable backward: gradients gathered at the argmax of the forward.

Each destination sums its contributions in a fixed order, in fp32 (fp64 for fp64 inputs), and rounds once. Apart from
the gradients, no tensor is as large as an input. A single pass over the argmax that adds to both gradients is slower,
because there are no atomic additions to save. ``"unified"`` is therefore the same function.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.arguments import choose_argmax_dtype, score_dtype
from ..blocks import NORM_EPS, MiB, Piece, compute_row_norms, cut_pieces, is_host_readable, split_range
from ..forward.dense import forward
from ..layout import BatchedArgs, make_batched_args

MAX_TABLE_BYTES = 6 * MiB  # documents that are read many times
MAX_PIECE_BYTES = 2 * MiB  # tokens of one side processed together, in the computing dtype
MAX_ENTRIES = 1 << 17  # argmax elements processed together, up to 50 bytes each
GROUP_DOCUMENTS = 32  # documents that are summed before they are added to the other groups


def backward_lowmem(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    argmax: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    needs: list[bool],
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `lik::maxsim_bwd_lowmem`. An `argmax` of None is computed again.

    Documents may be int8 if `argmax` and `scale` are given, their scales in the shape of D without d. Their gradient
    has the dtype of Q.
    """
    if argmax is None:
        argmax = forward(Q, D, q_mask, d_mask, q_weight, normalize, choose_argmax_dtype(D.shape[-2]))[1]
    layout = make_batched_args(Q, D, q_mask, d_mask, q_weight, grad_scores, argmax)
    scale = scale.unsqueeze(0) if scale is not None and D.dim() == 3 else scale
    return DenseBackward(layout, Q.shape, D.shape, normalize, needs, scale).gradients()


backward_unified = backward_lowmem


def sum_bags(table: Tensor, index: Tensor, weight: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Compute weighted sums of rows of `table`, one for each row of a 2-D `index`, or for each range of `offsets`."""
    return F.embedding_bag(index, table, offsets, mode="sum", per_sample_weights=weight)


def backpropagate_norm(grad: Tensor, rows: Tensor) -> Tensor:
    """Compute the gradient of rows from the gradient of ``rows / max(||rows||, eps)``."""
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    clamped_norms = norms.clamp_min(NORM_EPS)
    unit = rows / clamped_norms
    projection = (unit * grad).sum(-1, keepdim=True).masked_fill_(norms < NORM_EPS, 0)
    return unit.mul_(projection).sub_(grad).div_(-clamped_norms)


class DenseBackward:
    """One call: the arguments in one layout, the gradients, and the passes that fill them."""

    def __init__(
        self,
        layout: BatchedArgs,
        shape_Q: torch.Size,
        shape_D: torch.Size,
        normalize: bool,
        needs: list[bool],
        scale: Tensor | None = None,
    ) -> None:
        self.layout, self.normalize, self.needs = layout, normalize, needs
        self.scale = scale  # [B, X, Ld] of int8 documents
        Q, D = layout.Q, layout.D
        self.dtype, self.may_look = score_dtype(Q.dtype), is_host_readable(Q)
        (self.B, self.Y, self.Lq, self.d), (self.X, self.Ld) = Q.shape, D.shape[1:3]
        self.token_bytes = self.d * self.dtype.itemsize
        self.piece_tokens = max(1, MAX_PIECE_BYTES // self.token_bytes)
        self.grad_Q = Q.new_empty(shape_Q if needs[0] else (0,))
        self.grad_D = Q.new_empty(shape_D if needs[1] else (0,))
        self.grad_q_weight = Q.new_empty(shape_Q[:-1] if needs[2] else (0,), dtype=self.dtype)

    def has_upstream(self) -> bool:
        """Return whether any gradient can be nonzero."""
        return self.layout.argmax is not None and self.layout.argmax.numel() > 0 and self.Ld > 0

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of Q, D and q_weight."""
        grads = self.grad_Q, self.grad_D, self.grad_q_weight
        if not self.has_upstream():
            for grad in grads:
                grad.zero_()
        else:
            if self.needs[0] or self.needs[2]:
                self.gather_into_queries()
            if self.needs[1]:
                self.gather_into_documents()
        return grads

    def _argmax(self, query: Piece, documents: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return argmax int64, a mask of the valid ones, and the gradients of their maxima before the weight.

        All are ``[b, x, y, s]``.
        """
        assert self.layout.argmax is not None
        argmax = self.layout.argmax[query.batches, documents, query.items, query.tokens].to(torch.int64, copy=True)
        exists = argmax >= 0
        g = self.layout.pairs[query.batches, documents, query.items].unsqueeze(-1)
        return argmax, exists, torch.where(exists, g, 0)

    def _query_rows(self, query: Piece) -> Tensor:
        """Return query tokens ``[b * y * s, d]`` in the computing dtype, normalized on request; a view if possible."""
        rows = self.layout.Q[tuple(query)].to(self.dtype).reshape(-1, self.d).contiguous()
        return rows / compute_row_norms(rows) if self.normalize else rows

    def _tokens(self, part: Any) -> Tensor:
        """Return document tokens ``[n, d]`` in the computing dtype."""
        rows = self.layout.D[part].reshape(-1, self.d).contiguous().to(self.dtype)
        return rows if self.scale is None else rows.mul_(self.scale[part].reshape(-1, 1))

    def _rows(self, gathered: Tensor, exists: Tensor) -> Tensor:
        """Return gathered tokens ``[n, d]`` in the computing dtype, normalized on request; 0 unless `exists`."""
        rows = gathered.flatten(0, -2).to(self.dtype)
        rows.masked_fill_(~exists.reshape(-1, 1), 0)
        return rows.div_(compute_row_norms(rows)) if self.normalize else rows

    def gather_into_queries(self) -> None:
        """Compute grad_Q and grad_q_weight: each piece of query tokens sums its argmax tokens over the documents.

        Documents are summed in groups that do not depend on the number of queries. The gradient of a query has the same
        bits alone and in a batch.
        """
        group = max(1, min(GROUP_DOCUMENTS, self.piece_tokens, MAX_TABLE_BYTES // (self.Ld * self.token_bytes)))
        for query in cut_pieces((self.B, self.Y, self.Lq), max(1, min(self.piece_tokens, MAX_ENTRIES // group))):
            batches, items, tokens = query.counts()
            limit = batches * items * tokens
            groups = max(1, min(MAX_ENTRIES // (limit * group), self.piece_tokens // limit))
            if items * tokens > self.Ld:  # documents are read many times, so keep a block of them in the cache
                groups = max(1, min(groups, MAX_TABLE_BYTES // (self.Ld * self.token_bytes * group)))
            sums = (
                self._sum_argmax_tokens(query, documents, group) for documents in split_range(0, self.X, groups * group)
            )
            self._finish(query, sum_tensors(itertools.chain.from_iterable(sums)), of_queries=True)

    def _sum_argmax_tokens(self, query: Piece, documents: slice, group: int) -> Iterator[Tensor]:
        """Yield ``sum_x g[b, x, y] * D[b, x, argmax]`` as ``[b * y * s, d]`` for every `group` documents."""
        argmax, exists, g = self._argmax(query, documents)
        batches, count = argmax.shape[:2]
        table = self._direct_table(query, documents, exists)
        if table is None:
            for part in split_range(0, count, group):
                yield self._sum_gathered(query, documents, part, argmax, exists, g)
            return
        first = torch.arange(batches * count, device=g.device).view(batches, count, 1, 1) * self.Ld
        index, weight = (t.movedim(1, -1).reshape(-1) for t in (argmax.clamp_min_(0).add_(first), g))
        starts = torch.arange(0, index.numel(), count, device=g.device).unsqueeze(1)
        offsets = (starts + torch.arange(0, count, group, device=g.device)).view(-1)
        yield from sum_bags(table, index, weight, offsets).view(starts.shape[0], -1, self.d).unbind(1)

    def _sum_gathered(
        self, query: Piece, documents: slice, part: slice, winner: Tensor, exists: Tensor, g: Tensor
    ) -> Tensor:
        """Compute one sum of `_sum_argmax_tokens` for tokens that are converted, normalized or cut out.

        As many tokens as fit are gathered at a time.
        """
        batches = winner.shape[0]
        # [x, b * y * s]
        winner, exists, g = (t[:, part].movedim(1, 0).flatten(1) for t in (winner, exists, g))
        count, tokens = g.shape
        batch = torch.arange(batches, device=g.device).repeat_interleave(tokens // batches) + query.batches.start
        document = torch.arange(count, device=g.device).unsqueeze(1) + (documents.start + part.start)
        total = g.new_empty(tokens, self.d, dtype=self.dtype)
        for chunk in split_range(0, tokens, max(1, self.piece_tokens // count)):
            rows = self._rows(self._tokens((batch[chunk], document, winner[:, chunk].clamp_min(0))), exists[:, chunk])
            index = torch.arange(rows.shape[0], device=g.device).view(count, -1)
            total[chunk] = sum_bags(rows, *(t.t().contiguous() for t in (index, g[:, chunk])))
        return total

    def _direct_table(self, query: Piece, documents: slice, exists: Tensor) -> Tensor | None:
        """Return the documents as a view ``[n, d]``, or None if their argmax tokens cannot be summed in place."""
        D = self.layout.D[query.batches, documents]
        if self.normalize or D.dtype != self.dtype or not D.is_contiguous():
            return None
        is_unmasked = self.layout.d_mask is None and self.layout.q_mask is None
        return D.view(-1, self.d) if (bool(exists.all()) if self.may_look else is_unmasked) else None

    def gather_into_documents(self) -> None:
        """Compute grad_D: each piece of document tokens sums the query tokens whose argmax is in the piece."""
        # Combine the candidates of several queries only if no query is cut. Otherwise the cut would depend on the other
        # queries.
        rows = self.Y * self.Lq
        max_batches = max(1, min(self.piece_tokens // rows, MAX_ENTRIES // (self.X * rows)))
        for document in cut_pieces((self.B, self.X, self.Ld), self.piece_tokens, max_batches):
            batches, items, _ = document.counts()
            limit = max(1, min(self.piece_tokens // batches, MAX_ENTRIES // (batches * items)))
            total = sum_tensors(
                self._sum_queries(Piece(document.batches, query.items, query.tokens), document)
                for query in cut_pieces((1, self.Y, self.Lq), limit)
            )
            self._finish(document, total, of_queries=False)

    def _sum_queries(self, query: Piece, document: Piece) -> Tensor:
        """Compute ``sum_{y,s} g[b, x, y] * w[b, y, s] * Q[b, y, s]`` over argmax ``t``, as ``[b * x * t, d]``."""
        argmax, exists, g = self._argmax(query, document.items)
        if self.layout.q_weight is not None:  # the product is NaN if there is no argmax and the weight is NaN
            g = g * self.layout.q_weight[query.batches, None, query.items, query.tokens]
        batches, items, tokens = document.counts()
        if tokens < self.Ld:
            exists &= (argmax >= document.tokens.start) & (argmax < document.tokens.stop)
        # A stable sort by destination fixes the order of addition. Entries without a destination here are sorted to the
        # end.
        rows = batches * items * tokens
        first = torch.arange(batches * items, device=g.device).view(batches, items, 1, 1) * tokens
        destination = torch.where(exists, argmax.add_(first - document.tokens.start), rows).int().flatten()
        destination, order = torch.sort(destination, stable=True)
        bounds = torch.searchsorted(destination, torch.arange(rows + 1, dtype=torch.int32, device=g.device))
        if self.may_look:
            order, bounds = order[: int(bounds[-1])], bounds[:-1]
        sources = query.counts()[1] * query.counts()[2]
        source = order.remainder(sources)
        if batches > 1:
            source += order.div(items * sources, rounding_mode="floor").mul_(sources)
        return sum_bags(self._query_rows(query), source, g.flatten()[order], bounds)[:rows]

    def _finish(self, piece: Piece, total: Tensor, of_queries: bool) -> None:
        """Write the gradients of a piece of tokens, given their sums before weights and norms."""
        layout, part, needs_weight = self.layout, tuple(piece), of_queries and self.needs[2]
        tokens, gradient = (layout.Q, self.grad_Q) if of_queries else (layout.D, self.grad_D)
        q_weight = layout.q_weight if of_queries else None
        if needs_weight or self.normalize or q_weight is not None:
            # Rows that receive nothing may hold NaN, and so may their weights.
            has_gradient = (total != 0).any(-1, keepdim=True)
            rows = tokens[part].reshape(-1, self.d).contiguous().to(self.dtype) if of_queries else self._tokens(part)
            rows = torch.where(has_gradient, rows, 0)
            if needs_weight:
                unit = rows / compute_row_norms(rows) if self.normalize else rows
                target = self.grad_q_weight.view(tokens.shape[:-1])[part]
                target.copy_((unit * total).sum(-1).view(target.shape))
            if q_weight is not None:
                total = torch.where(has_gradient, total * q_weight[part].reshape(-1, 1), 0)
            if self.normalize:
                total = backpropagate_norm(total, rows)
        if self.needs[0 if of_queries else 1]:
            target = gradient.view(tokens.shape)[part]
            if total.data_ptr() != target.data_ptr():  # unless the sums were written to it
                target.copy_(total.view(target.shape))


def sum_tensors(parts: Iterator[Tensor]) -> Tensor:
    """Sum at least one tensor in the order given, and overwrite the first."""
    total = next(parts)
    for part in parts:
        total += part
    return total
