"""The portable forward of packed tokens: queries and documents of similar lengths, padded when they are read.

On a CPU, code may branch on values. Items with tokens are sorted by length and cut into blocks, and each block is one
dense forward. Shorter queries are masked, and shorter documents repeat their last token. The bits equal the bits of the
dense call, as `portable.blocks` explains.

On other devices the host does not know the lengths. Every query is padded to `max_seqlen_q` tokens and every document
to the total number of tokens, which is correct but slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...core.arguments import score_dtype
from ...core.segments import PackedArgs, compute_offsets
from ...formats.table import EncodedTokens
from ..layout import BatchedArgs, DecodedRows, PaddedRows, PairSegments
from .dense import run_forward
from .scores import NEG_INF

MAX_DOCUMENT_TOKENS = 1 << 18  # tokens of a block, including padding; they are gathered in small parts
MAX_QUERY_TOKENS = 1 << 14
MAX_ENTRIES = 1 << 19  # argmax elements of a block, up to 20 bytes each
MAX_SORTED_ITEMS = 1 << 16  # sorted at a time
MIN_OWN_BLOCK_ITEMS = 512  # a query with so many items has its own blocks
BLOCK_COST_MULTIPLICATIONS = 1 << 24  # multiplications that cost as much time as one more block
TOKENS_PER_PADDING = 8  # one token in so many of a block may be padding


def forward_ragged(
    tensors: Sequence,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
    max_seqlen_q: int,
    stored: EncodedTokens | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the scores and the argmax of a ragged operator. Without `argmax_dtype` the argmax has size [0].

    If `stored` has encoded documents, the D of `tensors` is a placeholder that only carries the token count.
    """
    c = PackedArgs.from_tensors(tensors, max_seqlen_q)
    r = c.ragged()
    cells = PairSegments(r, max_seqlen_q)
    scores = r.Q.new_zeros(c.scores_shape(), dtype=score_dtype(r.Q.dtype))
    if argmax_dtype is None:
        argmax = r.Q.new_empty((0,), dtype=torch.int32)
    else:
        argmax = r.Q.new_full(c.argmax_shape(), -1, dtype=argmax_dtype)
    if scores.numel() == 0:
        return scores, argmax
    if r.Q.shape[0] and r.D.shape[0]:
        _PackedForward(cells, normalize, scores, argmax, max_seqlen_q, stored).run()
    _fill_empty_scores(cells, scores)
    return scores, argmax


def _fill_empty_scores(cells: PairSegments, scores: Tensor) -> None:
    """Set the scores of documents and queries without tokens and of invalid segments."""
    is_valid, has_tokens, q_valid = cells.valid, cells.has_kept_tokens(), cells.q_valid
    if cells.query is None:
        is_valid, has_tokens = is_valid & q_valid[:, None], has_tokens[:, None]
    else:
        scores = scores.view(-1)
        # If a pair list has no queries at all, no item is valid.
        has_tokens = has_tokens[cells.query] if len(has_tokens) else is_valid
    scores.masked_fill_(cells.length == 0, NEG_INF).masked_fill_(~has_tokens, 0).masked_fill_(~is_valid, float("nan"))


class _PackedForward:
    """One call: cuts it into blocks, queries ``[B, Y]`` against items ``[B, X]``, and computes each."""

    def __init__(
        self,
        cells: PairSegments,
        normalize: bool,
        scores: Tensor,
        argmax: Tensor,
        max_seqlen_q: int,
        stored: EncodedTokens | None,
    ) -> None:
        self.cells, self.normalize, self.scores, self.stored = cells, normalize, scores, stored
        self.argmax = argmax if argmax.dim() == 2 else None
        self.ragged = cells.ragged
        self.d = self.ragged.Q.shape[-1]
        self.most_q = min(max_seqlen_q, self.ragged.Q.shape[0])

    def run(self) -> None:
        """Compute all blocks."""
        for queries, items in self._split_by_length() if self.cells.may_look else self._split_by_bounds():
            self._compute(queries, items)

    def _split_by_length(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks of queries and items of similar lengths; reads values."""
        cells = self.cells
        items = (cells.length > 0).nonzero().squeeze(-1)
        if not items.numel():
            return
        if cells.query is None:
            yield from self._product((cells.q_length > 0).nonzero().squeeze(-1), items)
            return
        items = items[cells.q_length[cells.query[items]] > 0]
        queries = cells.query[items]
        if items.numel() >= MIN_OWN_BLOCK_ITEMS * max(1, int(torch.bincount(queries).count_nonzero())):
            order = queries.argsort(stable=True)
            unique_queries, counts = torch.unique_consecutive(queries[order], return_counts=True)
            for query, query_items in zip(unique_queries.view(-1, 1), items[order].split(counts.tolist()), strict=True):
                yield from self._product(query, query_items)
            return
        for chunk in items.split(MAX_SORTED_ITEMS):
            yield from self._split_aligned(chunk, cells.query)

    def _product(self, queries: Tensor, live: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks that cover every query against every item."""
        q_length, length = self.cells.q_length, self.cells.length
        for group in _group_by_length(
            queries,
            q_length,
            BLOCK_COST_MULTIPLICATIONS // (self.d * max(1, int(length[live].sum()))),
            MAX_QUERY_TOKENS,
        ):
            Lq, rows = int(q_length[group].max()), int(q_length[group].sum())
            for part in live.split(MAX_SORTED_ITEMS):
                # The argmax of one block is in memory at a time.
                max_tokens = min(
                    MAX_DOCUMENT_TOKENS, max(1, MAX_ENTRIES // (group.numel() * Lq)) * int(length[part].max())
                )
                for items in _group_by_length(part, length, BLOCK_COST_MULTIPLICATIONS // (self.d * rows), max_tokens):
                    yield group[None], items[None]

    def _split_aligned(self, live: Tensor, query: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks that cover every item against its own query."""
        q_length, length = self.cells.q_length[query], self.cells.length
        # A slice costs the same for up to 32 query tokens. Longer queries are grouped by powers of two.
        kind = (q_length[live].sub(1).div(32, rounding_mode="floor") + 1).log2().ceil()
        for group_kind in kind.unique():
            items = live[kind == group_kind]
            Lq = int(q_length[items].max())
            max_tokens = min(MAX_DOCUMENT_TOKENS, max(1, MAX_ENTRIES // Lq) * int(length[items].max()))
            for part in _group_by_length(items, length, BLOCK_COST_MULTIPLICATIONS // (self.d * Lq), max_tokens):
                yield query[part, None], part[:, None]

    def _split_by_bounds(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks that do not depend on values."""
        cells, device = self.cells, self.scores.device
        if self.most_q == 0 or self.ragged.queries == 0:
            return
        max_items = max(1, min(MAX_DOCUMENT_TOKENS // self.ragged.D.shape[0], MAX_ENTRIES // self.most_q))
        for items in torch.arange(cells.start.shape[0], device=device).split(max_items):
            if cells.query is not None:
                yield cells.query[items, None], items[:, None]
                continue
            queries = torch.arange(self.ragged.queries, device=device)
            for group in queries.split(max(1, MAX_ENTRIES // (self.most_q * items.numel()))):
                yield group[None], items[None]

    def _compute(self, queries: Tensor, items: Tensor) -> None:
        """Compute a block and scatter its scores and argmax into the outputs."""
        cells, r, (B, Y), X = self.cells, self.ragged, queries.shape, items.shape[1]
        q_length, length = cells.q_length[queries], cells.length[items]
        Lq, Ld = (int(q_length.max()), int(length.max())) if cells.may_look else (self.most_q, r.D.shape[0])
        Q, start = PaddedRows(r.Q, cells.q_start[queries], q_length, Lq), cells.start[items]
        if self.stored is None:
            D = PaddedRows(r.D, start, length, Ld)
        else:
            D = DecodedRows(self.stored, self.scores.dtype, start, length, Ld, self.d)
        full_index = slice(None), slice(None), slice(None)
        rows, token = Q.rows(*full_index), torch.arange(Lq, device=queries.device)
        q_mask = None if r.q_mask is None else r.q_mask[rows]
        if not cells.may_look or not bool((q_length == Lq).all()):
            is_token = token < q_length.unsqueeze(-1)
            q_mask = is_token if q_mask is None else q_mask & is_token
        layout = BatchedArgs(
            Q=Q.simplify(),
            D=D.simplify(),
            q_mask=q_mask,
            d_mask=None if r.d_mask is None else r.d_mask[D.rows(*full_index)],
            q_weight=None if r.q_weight is None else r.q_weight[rows],
            pairs=self.scores.new_empty((B, X, Y)),
            argmax=None if self.argmax is None else self.argmax.new_empty((B, X, Y, Lq)),
        )
        run_forward(layout, self.normalize)
        cell = cells.locate_scores(queries[:, None], items[:, :, None]).expand(B, X, Y)
        self.scores.view(-1)[cell.reshape(-1)] = layout.pairs.view(-1)
        if self.argmax is not None and layout.argmax is not None:
            if not cells.may_look:
                layout.argmax.masked_fill_(length[:, :, None, None] == 0, -1)
            # The argmax of padding and all initial values are -1, so the maximum keeps every real value.
            width = self.argmax.shape[1]
            row, column = cells.locate_argmax(queries[:, None, :, None], items[:, :, None, None], token, width)
            at = (row * width + column).expand(layout.argmax.shape).reshape(-1)
            self.argmax.view(-1).scatter_reduce_(0, at, layout.argmax.view(-1), "amax")


def _group_by_length(ids: Tensor, length: Tensor, allowance: int, max_tokens: int) -> Iterator[Tensor]:
    """Cut `ids` into groups of similar length whose padding is a small fraction or at most `allowance` tokens.

    A group has at most `max_tokens` tokens, or one element. The longest come first, and equal lengths keep their order.
    """
    lengths, order = length[ids].sort(descending=True, stable=True)
    ids, offsets = ids[order], compute_offsets(lengths)
    first, count = 0, ids.numel()
    while first < count:
        longest = int(lengths[first])
        step = max(1, max_tokens // longest)
        tokens = offsets[first + 1 : first + step + 1] - offsets[first]
        padded_tokens = longest * torch.arange(1, tokens.numel() + 1)
        excess = (padded_tokens - tokens > torch.clamp(tokens // TOKENS_PER_PADDING, min=allowance)).nonzero()
        group_size = int(excess[0]) if excess.numel() else tokens.numel()
        yield ids[first : first + group_size]
        first += group_size
