"""The portable forward of ragged arguments: queries and documents of like lengths, padded where they are read.

Where values may decide, on a CPU, what is alive is sorted by length and cut into blocks that the dense forward computes
(`Slices`): shorter queries are masked, shorter documents repeat their last token, which changes no maximum and no
winner. The bits are those of the dense call, as `blocks` says. Elsewhere nobody knows the lengths: every
query counts as of `max_seqlen_q` tokens and every document as of all there are, right but slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..segments import Ragged
from .blocks import Layout, may_look
from .forward import run, special_kind
from .items import Items
from .scores import NEG_INF
from .slices import Slices

DOCUMENT_TOKENS = 1 << 18  # of a block, padding included: it gathers them in small parts
QUERY_TOKENS = 1 << 14
ENTRIES = 1 << 19  # winners of a block; each takes up to 20 bytes
CELLS = 1 << 16  # taken from a list at a time
MANY = 512  # items of a query from which on it has blocks of its own
CALL = 1 << 24  # multiplications that take as long as one more block
WASTE = 8  # the part of a block's tokens that padding may be


def forward_ragged(
    r: Ragged, normalize: bool, argmax_dtype: torch.dtype | None, max_seqlen_q: int
) -> tuple[Tensor, Tensor]:
    """Scores ``[Nq, Nd]``, ``[Nq, K]`` or ``[P]`` and winners ``[Nd, Tq]``, ``[K, Tq]`` or ``[P, max_seqlen_q]``."""
    items = Items(r, max_seqlen_q)
    scores = r.Q.new_zeros(items.score_shape(), dtype=torch.float64 if r.Q.dtype == torch.float64 else torch.float32)
    if argmax_dtype is None:
        argmax = r.Q.new_empty((0,), dtype=torch.int32)
    else:
        width = r.Q.shape[0] if r.pairs is None else max_seqlen_q
        rows = scores.shape[-1] if r.pairs is None else scores.shape[0]
        argmax = r.Q.new_full((rows, width), -1, dtype=argmax_dtype)
    if scores.numel() == 0:
        return scores, argmax
    if r.Q.shape[0] and r.D.shape[0]:
        _Blocks(items, normalize, scores, argmax, max_seqlen_q).run()
    _settle(items, scores)
    return scores, argmax


def _settle(items: Items, scores: Tensor) -> None:
    """The scores of documents and queries without tokens, and of what is not valid."""
    empty, valid, keeps = items.length == 0, items.valid, items.keeps()
    if items.query is None:
        scores.masked_fill_(empty, NEG_INF).masked_fill_(~keeps[:, None], 0)
        scores.masked_fill_(~items.q_valid[:, None], float("nan"))
    else:
        flat = scores.view(-1)
        # A pair list may have no queries at all; then no item is valid.
        kept = keeps[items.query] if items.Nq else valid
        flat.masked_fill_(empty, NEG_INF).masked_fill_(~kept, 0)
    scores.masked_fill_(~valid.view(scores.shape[-1:] if items.query is None else scores.shape), float("nan"))


class Padded:
    """Rows of a packed tensor, read as if they lay padded in ``[B, X, L, d]``; shorter items repeat their last row."""

    def __init__(self, source: Tensor, start: Tensor, length: Tensor, L: int) -> None:
        self.source, self.start, self.last = source, start.unsqueeze(-1), (length - 1).clamp_min(0).unsqueeze(-1)
        self.shape = torch.Size((*start.shape, L, source.shape[-1]))
        self.view = self._as_it_lies(start, length) if may_look(source) else None

    def _as_it_lies(self, start: Tensor, length: Tensor) -> Tensor | None:
        """A view of items that all have L rows and follow one another at one distance."""
        flat = start.reshape(-1)
        if 1 not in start.shape or not bool((length == self.shape[2]).all()):
            return None
        steps = flat.diff()
        step = int(steps[0]) if steps.numel() else 0
        if step < 0 or not bool((steps == step).all()):
            return None
        row, column = self.source.stride()
        offset = self.source.storage_offset() + int(flat[0]) * row
        return self.source.as_strided(tuple(self.shape), (step * row, step * row, row, column), offset)

    def rows(self, batches: slice, items: slice, tokens: slice) -> Tensor:
        """Indices into the packed tensor, ``[batches, items, tokens]``."""
        place = torch.arange(*tokens.indices(self.shape[2]), device=self.source.device)
        index = self.start[batches, items] + torch.minimum(place, self.last[batches, items])
        return index.clamp_max_(self.source.shape[0] - 1)

    def __getitem__(self, part: tuple[slice, slice, slice]) -> Tensor:
        if self.view is not None:
            return self.view[part]
        index = self.rows(*part)
        return self.source.index_select(0, index.reshape(-1)).view(*index.shape, -1)


class _Gathered(Slices):
    """The dense forward of documents that are gathered, where they can be straight into its slices."""

    def _copy_documents(self, target: Tensor, part: tuple[slice, slice, slice]) -> None:
        D = cast(Padded, self.layout.D)
        if D.view is None and target.shape[2] == 1 and target.is_contiguous() and target.dtype == D.source.dtype:
            torch.index_select(D.source, 0, D.rows(*part).reshape(-1), out=target.view(-1, target.shape[-1]))
        else:
            super()._copy_documents(target, part)


class _Block(NamedTuple):
    """Queries ``[B, Y]`` against items ``[B, X]``, padded to `Lq` and `Ld` tokens."""

    queries: Tensor
    items: Tensor
    Lq: int
    Ld: int


class _Blocks:
    """One call: how it is cut into blocks, and what becomes of each."""

    def __init__(self, items: Items, normalize: bool, scores: Tensor, argmax: Tensor, max_seqlen_q: int) -> None:
        self.items, self.normalize, self.scores = items, normalize, scores
        self.argmax = argmax if argmax.dim() == 2 else None
        self.ragged = items.ragged
        self.d = self.ragged.Q.shape[-1]
        self.most_q = min(max_seqlen_q, self.ragged.Q.shape[0])

    def run(self) -> None:
        for block in self._by_length() if self.items.may_look else self._by_bounds():
            self._compute(block)

    def _by_length(self) -> Iterator[_Block]:
        items = self.items
        live = (items.length > 0).nonzero().squeeze(-1)
        if not live.numel():
            return
        if items.query is None:
            yield from self._product((items.q_length > 0).nonzero().squeeze(-1), live)
            return
        live = live[items.q_length[items.query[live]] > 0]
        if live.numel() >= MANY * self._queries_of(live):
            queries = items.query[live]
            order = queries.argsort(stable=True)
            found, counts = torch.unique_consecutive(queries[order], return_counts=True)
            for query, chosen in zip(found.view(-1, 1), live[order].split(counts.tolist()), strict=True):
                yield from self._product(query, chosen)
            return
        for some in live.split(CELLS):
            yield from self._aligned(some)

    def _queries_of(self, live: Tensor) -> int:
        assert self.items.query is not None
        return max(1, int(torch.bincount(self.items.query[live]).count_nonzero()))

    def _product(self, queries: Tensor, live: Tensor) -> Iterator[_Block]:
        """Every query against every item."""
        q_length, length = self.items.q_length, self.items.length
        for group in _alike(queries, q_length, CALL // (self.d * max(1, int(length[live].sum()))), QUERY_TOKENS):
            Lq, rows = int(q_length[group].max()), int(q_length[group].sum())
            for part in live.split(CELLS):
                # Winners are kept for a block at a time.
                most = min(DOCUMENT_TOKENS, max(1, ENTRIES // (group.numel() * Lq)) * int(length[part].max()))
                for chosen in _alike(part, length, CALL // (self.d * rows), most):
                    yield _Block(group[None], chosen[None], Lq, int(length[chosen].max()))

    def _aligned(self, live: Tensor) -> Iterator[_Block]:
        """Every item against its own query."""
        assert self.items.query is not None
        q_length, length = self.items.q_length[self.items.query], self.items.length
        # A slice holds up to 32 query tokens at one cost; longer ones go by powers of two.
        kind = (q_length[live].sub(1).div(32, rounding_mode="floor") + 1).log2().ceil()
        for of_kind in kind.unique():
            chosen = live[kind == of_kind]
            Lq = int(q_length[chosen].max())
            most = min(DOCUMENT_TOKENS, max(1, ENTRIES // Lq) * int(length[chosen].max()))
            for part in _alike(chosen, length, CALL // (self.d * Lq), most):
                yield _Block(self.items.query[part, None], part[:, None], Lq, int(length[part].max()))

    def _by_bounds(self) -> Iterator[_Block]:
        """Blocks that depend on no value."""
        items, device, Ld = self.items, self.scores.device, self.ragged.D.shape[0]
        if self.most_q == 0:
            return
        count = items.start.shape[0]
        most = max(1, min(DOCUMENT_TOKENS // Ld, ENTRIES // self.most_q))
        queries = torch.arange(items.Nq, device=device)
        for x0 in range(0, count, most):
            chosen = torch.arange(x0, min(x0 + most, count), device=device)
            if items.query is not None:
                if items.Nq:
                    yield _Block(items.query[chosen, None], chosen[:, None], self.most_q, Ld)
                continue
            for group in queries.split(max(1, ENTRIES // (self.most_q * chosen.numel()))):
                yield _Block(group[None], chosen[None], self.most_q, Ld)

    def _compute(self, block: _Block) -> None:
        items, r, (B, Y), X = self.items, self.ragged, block.queries.shape, block.items.shape[1]
        q_length = items.q_length[block.queries]
        Q = Padded(r.Q, items.q_start[block.queries], q_length, block.Lq)
        D = Padded(r.D, items.start[block.items], items.length[block.items], block.Ld)
        everything = (slice(0, B), slice(0, Y), slice(0, block.Lq))
        rows = Q.rows(*everything)
        s = torch.arange(block.Lq, device=rows.device)
        q_mask = None
        if r.q_mask is not None or not items.may_look or not bool((q_length == block.Lq).all()):
            q_mask = s < q_length.unsqueeze(-1)
            q_mask = q_mask if r.q_mask is None else q_mask & r.q_mask[rows]
        pairs = self.scores.new_empty((B, X, Y))
        argmax = None if self.argmax is None else self.argmax.new_empty((B, X, Y, block.Lq))
        d_mask = None if r.d_mask is None else r.d_mask[D.rows(slice(0, B), slice(0, X), slice(0, block.Ld))]
        weight = None if r.q_weight is None else r.q_weight[rows]
        # The forward reads tokens by indexing with three slices, which is what `Padded` is made for.
        layout = Layout(cast(Tensor, Q), cast(Tensor, D), q_mask, d_mask, weight, pairs, argmax)
        if D.view is None:
            (special_kind(layout) or _Gathered)(layout, self.normalize).run()
        else:
            run(layout._replace(D=D.view), self.normalize)
        cell = items.cell(block.queries.unsqueeze(1), block.items.unsqueeze(2)).expand(B, X, Y)
        self.scores.view(-1)[cell.reshape(-1)] = pairs.view(-1)
        if self.argmax is not None and argmax is not None:
            if not items.may_look:
                argmax.masked_fill_(items.length[block.items][:, :, None, None] == 0, -1)
            self._store(block, argmax, s)

    def _store(self, block: _Block, argmax: Tensor, s: Tensor) -> None:
        """Put winners where they belong; those of padding are -1, as are all before, so that none covers another."""
        assert self.argmax is not None
        row = self.items.winners_row(block.items)[:, :, None, None]
        column = self.items.winners_column(block.queries)[:, None, :, None] + s
        width = self.argmax.shape[1]
        index = (row * width + column.clamp_max_(width - 1)).expand(argmax.shape)
        self.argmax.view(-1).scatter_reduce_(0, index.reshape(-1), argmax.view(-1), "amax")


def _alike(ids: Tensor, length: Tensor, allowance: int, most: int) -> Iterator[Tensor]:
    """Cut `ids` into groups of similar length, padding of which is a fraction of them or at most `allowance` tokens.

    A group has at most `most` tokens, or one element. Longest first; of equal lengths in the order given.
    """
    lengths, order = length[ids].sort(descending=True, stable=True)
    ids, before = ids[order], torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    first, count = 0, ids.numel()
    while first < count:
        longest = int(lengths[first])
        step = max(1, most // longest)
        tokens = before[first + 1 : first + step + 1] - before[first]
        padded = longest * torch.arange(1, tokens.numel() + 1)
        too_much = (padded - tokens > torch.clamp(tokens // WASTE, min=allowance)).nonzero()
        taken = int(too_much[0]) if too_much.numel() else tokens.numel()
        yield ids[first : first + taken]
        first += taken
