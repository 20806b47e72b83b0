"""Soft MaxSim in plain PyTorch: log-sum-exps of slices of similarities, and gradients block by block.

Similarities come from `portable.forward.slices`, whose shapes do not depend on the batch. A gradient is summed by its
owner. A piece of query tokens sums over all documents, and a piece of document tokens sums over all queries.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.arguments import score_dtype
from ...core.segments import DenseArgs
from ...portable.backward.dense import MAX_PIECE_BYTES, backpropagate_norm, sum_tensors
from ...portable.blocks import MiB, Piece, compute_row_norms, cut_pieces, multiply_matrices, split_range
from ...portable.forward.dense import allocate_outputs
from ...portable.forward.scores import NEG_INF
from ...portable.forward.slices import QueryPanel, SliceForward, _BlockViews
from ...portable.layout import BatchedArgs, make_batched_args

Temperature = Tensor | float
MAX_BLOCK_BYTES = 2 * MiB  # similarities of a block
SoftGradients = tuple[Tensor, Tensor, Tensor, Tensor]  # gradients of Q, D, q_weight and tau
_PEAK_PROBABILITY = 0.75  # at most one probability of a query token is above it, even with rounding errors


def forward_soft(x: DenseArgs, temperature: Temperature, normalize: bool, keep: bool) -> tuple[Tensor, Tensor]:
    """Return the results of `lik::maxsim_soft_fwd`. A temperature tensor that is not above 0 gives NaN."""
    scores, lse, is_trivial = allocate_outputs(x.Q, x.D, x.q_mask, score_dtype(x.Q.dtype), keep, NEG_INF)
    if not is_trivial:
        layout = make_batched_args(*x, scores, lse)
        SoftForward(layout, normalize, _mask_wrong_temperature(temperature)).run()
    return scores, lse


def _mask_wrong_temperature(temperature: Temperature) -> Temperature:
    """Replace a temperature tensor that is not above 0 by NaN, without reading its value on the host."""
    if isinstance(temperature, Tensor):
        tiny = torch.finfo(temperature.dtype).tiny
        return torch.where(temperature > 0, temperature.clamp_min(tiny), torch.nan)
    return temperature


class SoftForward(SliceForward):
    """The forward by slices, with a log-sum-exp in place of the maximum."""

    def __init__(self, layout: BatchedArgs, normalize: bool, temperature: Temperature) -> None:
        self.soft_maxima, self.temperature = layout.argmax, temperature
        super().__init__(layout._replace(argmax=None), normalize)

    def _score(
        self, b: slice, x: slice, start: int, documents: Tensor, views: _BlockViews, panel: QueryPanel, best: Tensor
    ) -> None:
        S, best = self._split_documents(self._mask_overlaps(start, documents, views, panel), best)
        m = S.amax(-2)
        m = m.masked_fill(m.isinf(), 0)  # a finite offset for exponents
        lse = S.sub_(m.unsqueeze(-2)).div_(self.temperature).exp_().sum(-2).log_().mul_(self.temperature).add_(m)
        best.copy_(lse if start == 0 else self._merge(best, lse))

    def _merge(self, a: Tensor, b: Tensor) -> Tensor:
        """Combine the soft maxima of two parts of a document."""
        high, low = torch.maximum(a, b), torch.minimum(a, b)
        lse = ((low - high) / self.temperature).exp_().log1p_().mul_(self.temperature).add_(high)
        return torch.where(high.isinf() | (low == NEG_INF), high, lse)

    def _finish(self, b: slice, x: slice, u: slice) -> None:
        if self.soft_maxima is not None:
            q = self.queries
            y = slice(u.start * q, min(u.stop * q, self.Y))
            target = self.soft_maxima[b, x, y]
            best = self.best[: b.stop - b.start, : x.stop - x.start, : u.stop - u.start, : q * self.Lq]
            target.copy_(best.unflatten(-1, (q, self.Lq)).flatten(2, 3)[:, :, : y.stop - y.start])
            if self.layout.q_mask is not None:
                target.masked_fill_(~self.layout.q_mask[b, None, y], NEG_INF)
        super()._finish(b, x, u)


def backward_soft(
    grad_scores: Tensor, x: DenseArgs, lse: Tensor, temperature: Temperature, normalize: bool, needs: list[bool]
) -> SoftGradients:
    """Return the gradients of Q, D, q_weight and the temperature, as `lik::maxsim_soft_bwd` defines them."""
    layout = make_batched_args(*x, grad_scores, lse)
    return SoftBackward(layout, x.Q, x.D, normalize, _mask_wrong_temperature(temperature), needs).gradients()


class _Entropies:
    """Entropies of the probabilities of some query tokens, summed over documents with the upstream gradients.

    A soft maximum minus the mean similarity would lose all digits if one token has nearly all of the probability. Here
    every term is positive. ``-P log P`` is computed from ``log P`` only for probabilities of at most
    `_PEAK_PROBABILITY`. Above it ``log P`` has few digits. At most one such term exists, and it is computed from the
    sum of the other probabilities.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None  # [batches, rows]
        self._sums: tuple[Tensor, ...] = ()  # over the tokens so far, if the tokens of a document are in several blocks

    def add(self, log_P: Tensor, P: Tensor, g: Tensor, is_last: bool) -> None:
        """Add a block of probabilities.

        Args:
            log_P: ``[batches, rows, documents, tokens]``.
            P: the exponential of `log_P`.
            g: upstream gradients ``[batches, rows, documents, 1]``.
            is_last: whether this block has the last tokens of its documents.
        """
        small_P = torch.where(P > _PEAK_PROBABILITY, 0, P)
        terms = torch.where(small_P == 0, 0, small_P * log_P)  # log P may be -inf
        sums = small_P.sum(-1), terms.sum(-1)
        if self._sums:
            sums = sums[0] + self._sums[0], sums[1] + self._sums[1]
        self._sums = () if is_last else sums
        if not is_last:
            return
        mass, spread = sums
        peak_term = torch.where(mass < 0.5, (1 - mass) * torch.log1p(-mass), 0)  # without a peak `mass` is 1
        g = g.squeeze(-1)
        entropy = torch.where(g == 0, 0, g * -(spread + peak_term)).sum(-1)
        self.total = entropy if self.total is None else self.total + entropy


class SoftBackward:
    """One call, computed in blocks ``[batches, rows, tokens]`` of a piece of queries and a piece of documents."""

    def __init__(
        self, layout: BatchedArgs, Q: Tensor, D: Tensor, normalize: bool, temperature: Temperature, needs: list[bool]
    ) -> None:
        self.layout, self.normalize, self.temperature, self.needs = layout, normalize, temperature, needs
        self.dtype = dtype = score_dtype(Q.dtype)
        self.grad_Q = Q.new_zeros(Q.shape if needs[0] else (0,))
        self.grad_D = D.new_zeros(D.shape if needs[1] else (0,))
        self.grad_weight = Q.new_zeros(Q.shape[:-1] if needs[2] else (0,), dtype=dtype)
        self.grad_tau = Q.new_zeros(() if needs[3] else (0,), dtype=dtype)
        (self.B, self.Y, self.Lq, self.d), (self.X, self.Ld) = layout.Q.shape, layout.D.shape[1:3]

    def gradients(self) -> SoftGradients:
        """Compute the gradients of Q, D, q_weight and the temperature."""
        if 0 not in (self.B, self.Y, self.Lq, self.X, self.Ld):
            for queries, documents in self._pieces():
                if self.needs[0] or self.needs[2] or self.needs[3]:
                    for query in queries:
                        self._sum_into(query, documents)
                if self.needs[1]:
                    for document in documents:
                        total = sum_tensors(self._sum_queries(query, document) for query in queries)
                        self._write_tokens(self.grad_D, self.layout.D, document, total)
        return self.grad_Q, self.grad_D, self.grad_weight, self.grad_tau

    def _pieces(self) -> Iterator[list[list[Piece]]]:
        """Yield the pieces of the queries and of the documents of some batches at a time."""
        max_tokens = max(1, MAX_PIECE_BYTES // (self.d * self.dtype.itemsize))
        rows = max(1, min(max_tokens, 512, self.Y * self.Lq))
        tokens = max(1, min(max_tokens, MAX_BLOCK_BYTES // (rows * self.dtype.itemsize)))
        step = max(1, min(self.B, tokens // max(self.X * self.Ld, 1), max_tokens // (self.Y * self.Lq)))
        sides = ((1, self.Y, self.Lq), rows), ((1, self.X, self.Ld), tokens)
        for batches in split_range(0, self.B, step):
            yield [[piece._replace(batches=batches) for piece in cut_pieces(*side)] for side in sides]

    def _tokens(self, piece: Piece, of_queries: bool) -> tuple[Tensor, Tensor | None]:
        """Return tokens ``[batches, n, d]`` and their mask; masked tokens are 0, others are normalized on request."""
        layout = self.layout
        tokens, mask = (layout.Q, layout.q_mask) if of_queries else (layout.D, layout.d_mask)
        x, keep = self._read(tokens, piece), None if mask is None else mask[tuple(piece)].flatten(1, 2)
        if keep is not None:
            x = torch.where(keep.unsqueeze(-1), x, 0)
        return (x / compute_row_norms(x) if self.normalize else x), keep

    def _read(self, tokens: Tensor, piece: Piece) -> Tensor:
        """Return a piece of ``tokens [B, items, L, d]`` as ``[batches, n, d]`` in the computing dtype."""
        return tokens[tuple(piece)].flatten(1, 2).contiguous().to(self.dtype)

    def _load_rows(self, query: Piece, documents: slice) -> tuple[Tensor, Tensor]:
        """Return soft maxima and gradients of scores, ``[batches, items, rows]``, 0 if there is no maximum."""
        maxima = self.layout.argmax
        assert maxima is not None
        lse = maxima[query.batches, documents, query.items, query.tokens]
        g = self.layout.pairs[query.batches, documents, query.items].unsqueeze(-1)
        exists = lse != NEG_INF
        return tuple(torch.where(exists, x, 0).flatten(2).contiguous() for x in (lse, g))  # type: ignore[return-value]

    def _block(self, query: Piece, document: Piece, entropies: _Entropies | None = None) -> tuple[Tensor, Tensor]:
        """Return ``g P`` of a block and its document tokens, and add to `entropies` unless it is None."""
        q, _ = self._tokens(query, True)
        x, keep = self._tokens(document, False)
        S = multiply_matrices(q, x.mT)
        lse, g = self._load_rows(query, document.items)
        log_P = S.unflatten(2, (lse.shape[1], -1))  # [batches, rows, items, tokens]
        log_P.sub_(lse.mT.unsqueeze(-1)).div_(self.temperature).clamp_max_(0)
        if keep is not None:
            log_P.masked_fill_(~keep.unflatten(1, (lse.shape[1], -1)).unsqueeze(1), NEG_INF)
        g = g.mT.unsqueeze(-1)
        if entropies is None:
            P = log_P.exp_()
        else:
            P = log_P.exp()
            entropies.add(log_P, P, g, document.tokens.stop == self.Ld)
        P = torch.where(g == 0, 0, P.mul_(g))  # masked rows and documents without tokens have no P
        return P.flatten(2), x

    def _sum_into(self, query: Piece, documents: list[Piece]) -> None:
        """Compute the gradients of a piece of query tokens."""
        entropies = _Entropies() if self.needs[3] else None
        total = None
        if self.needs[0]:
            total = sum_tensors(multiply_matrices(*self._block(query, document, entropies)) for document in documents)
        elif entropies is not None:
            for document in documents:
                self._block(query, document, entropies)
        _, keep = self._tokens(query, True)
        w = self._weights(query, keep)
        if self.needs[2]:
            self._write(self.grad_weight, self.layout.Q.shape[:-1], query, self._differentiate_maxima(query, documents))
        if entropies is not None:
            assert entropies.total is not None
            self.grad_tau += (entropies.total if w is None else entropies.total * w).sum()
        if total is not None:
            if w is not None:
                total = total * w.unsqueeze(-1)
            self._write_tokens(self.grad_Q, self.layout.Q, query, total)

    def _differentiate_maxima(self, query: Piece, documents: list[Piece]) -> Tensor:
        """Return the gradients of q_weight, which sum ``g * lse`` over documents."""
        blocks = (self._load_rows(query, document.items) for document in documents if document.tokens.start == 0)
        return sum_tensors(torch.where(g == 0, 0, g * lse).sum(1) for lse, g in blocks)

    def _write_tokens(self, target: Tensor, tokens: Tensor, piece: Piece, total: Tensor) -> None:
        """Write `total`, propagated through the norms of its tokens on request, as the gradient of a piece."""
        if self.normalize:
            has_gradient = (total != 0).any(-1, keepdim=True)  # other tokens may hold NaN
            rows = torch.where(has_gradient, self._read(tokens, piece), 0)
            total = torch.where(has_gradient, backpropagate_norm(total, rows), 0)
        self._write(target, tokens.shape, piece, total)

    @staticmethod
    def _write(target: Tensor, shape: torch.Size, piece: Piece, values: Tensor) -> None:
        part = target.view(shape)[tuple(piece)]
        part.copy_(values.view(part.shape))

    def _sum_queries(self, query: Piece, document: Piece) -> Tensor:
        """Compute the contribution of a piece of queries to a piece of document tokens."""
        P, _ = self._block(query, document)
        q, keep = self._tokens(query, True)
        w = self._weights(query, keep)
        return multiply_matrices(P.mT, q if w is None else q * w.unsqueeze(-1))

    def _weights(self, query: Piece, keep: Tensor | None) -> Tensor | None:
        """Return weights of query tokens, 0 for masked tokens, or None without weights."""
        weight = self.layout.q_weight
        if weight is None:
            return None
        w = weight[tuple(query)].flatten(1).contiguous()
        return w if keep is None else torch.where(keep, w, 0)
