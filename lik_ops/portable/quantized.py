"""The portable forward of quantised documents: decoded to fp32 a part at a time, then scored as other documents are.

On a CPU, where values may decide, a part is as many documents, or pairs, as have `TOKENS` together. Elsewhere nobody
knows the lengths: all documents are decoded at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..arguments import score_dtype
from ..formats import decoded
from ..segments import Ragged, Stored
from .blocks import may_look
from .packed import forward_ragged

TOKENS = 1 << 15

Scorer = Callable[[Ragged, bool, torch.dtype | None, int], tuple[Tensor, Tensor]]


def forward_quantized(
    r: Ragged, stored: Stored, normalize: bool, argmax_dtype: torch.dtype | None, max_seqlen_q: int
) -> tuple[Tensor, Tensor]:
    """Scores and winners as `Ragged` says, whose D says nothing but how many tokens there are."""
    return scored_decoded(forward_ragged, r, stored, normalize, argmax_dtype, max_seqlen_q)


def scored_decoded(
    score: Scorer, r: Ragged, stored: Stored, normalize: bool, argmax_dtype: torch.dtype | None, max_seqlen_q: int
) -> tuple[Tensor, Tensor]:
    """The same by way of a backend's forward of packed tokens."""
    dtype = score_dtype(r.Q.dtype)
    r = r._replace(Q=r.Q.to(dtype))
    if not may_look(r.Q):
        D = _tokens(stored, slice(None), r.Q)
        return score(r._replace(D=D), normalize, argmax_dtype, max_seqlen_q)
    scores = r.Q.new_empty(r.scores_shape())
    argmax = r.Q.new_empty(0, dtype=torch.int32)
    if argmax_dtype is not None:
        argmax = r.Q.new_full(r.argmax_shape(max_seqlen_q), -1, dtype=argmax_dtype)
    for part, winners in _parts(r):
        D = _tokens(stored, part.rows, r.Q)
        found = score(part.of(r, D), normalize, argmax_dtype, max_seqlen_q)
        scores[part.scores] = found[0]
        if argmax_dtype is not None:
            argmax[winners] = found[1][winners] if r.candidates else found[1]
    return scores, argmax


def _tokens(stored: Stored, rows: Tensor | slice, like: Tensor) -> Tensor:
    """Some tokens as they count, in the dtype of scores."""

    def of(x: Tensor) -> Tensor:
        return x if x.shape[0] == 1 else x[rows]

    minimum = None if stored.minimum is None else of(stored.minimum)
    return decoded(stored.data[rows], of(stored.scale), minimum, stored.format, like.shape[-1]).to(like.dtype)


class _Part:
    """Some documents of a cross product, the candidates of some queries, or some pairs."""

    def __init__(self, r: Ragged, part: slice, start: Tensor, length: Tensor, valid: Tensor) -> None:
        self.part, self.valid, self.length = part, valid, length
        self.candidates, self.pairs = r.candidates, r.pairs is not None
        self.begin = torch.cat([length.new_zeros(1), length.cumsum(0)])
        self.rows = self._rows(start)

    def _rows(self, start: Tensor) -> Tensor | slice:
        """Where its tokens lie: a slice, which is a view, of documents that follow one another."""
        first, total = int(start[0]) if len(start) else 0, int(self.begin[-1])
        if torch.equal(start, self.begin[:-1] + first):
            return slice(first, first + total)
        shift = (start - self.begin[:-1]).repeat_interleave(self.length)
        return torch.arange(total, device=start.device) + shift

    @property
    def scores(self) -> tuple[slice, ...]:
        """Where its scores are among all."""
        return (self.part,) if self.candidates or self.pairs else (slice(None), self.part)

    def of(self, r: Ragged, D: Tensor) -> Ragged:
        """The call for it alone. What is not valid keeps a length that is none."""
        offsets, lengths = self.begin[:-1], torch.where(self.valid, self.length, -1)
        part = r._replace(D=D, d_mask=None if r.d_mask is None else r.d_mask[self.rows])
        if self.pairs:
            assert r.pairs is not None
            own = torch.arange(len(lengths), device=D.device)
            query = r.pairs[self.part, 0].long()
            return part._replace(d_offsets=offsets, d_lengths=lengths, pairs=torch.stack([query, own], 1))
        if not self.candidates:
            return part._replace(d_offsets=offsets, d_lengths=lengths)
        queries = slice(self.part.start, self.part.stop + 1)
        shape = (self.part.stop - self.part.start, r.columns)
        return part._replace(
            cu_seqlens_q=r.cu_seqlens_q[queries], d_offsets=offsets.view(shape), d_lengths=lengths.view(shape)
        )


def _parts(r: Ragged) -> Iterator[tuple[_Part, tuple]]:
    """Parts of about `TOKENS` document tokens, and where their winners are among all."""
    start, length = r.d_offsets.long(), r.d_lengths.long()
    valid = (start >= 0) & (length >= 0) & (start + length <= len(r.D)) & (start + length >= start)
    if r.pairs is not None:
        document = r.pairs[:, 1].long()
        exists = (document >= 0) & (document < len(start))
        safe = torch.where(exists, document, 0)
        known = len(start) > 0
        start, length, valid = (x[safe] if known else torch.zeros_like(safe) for x in (start, length, valid))
        valid = exists & valid.bool()
    length, start = torch.where(valid, length, 0), torch.where(valid, start, 0)
    each = length.sum(1) if r.candidates else length
    before = torch.cat([each.new_zeros(1), each.cumsum(0)])
    begin, count = 0, len(each)
    while begin < count:
        last = int(torch.searchsorted(before, before[begin] + TOKENS, right=True)) - 1
        some = slice(begin, min(max(last, begin + 1), count))
        part = _Part(r, some, start[some].flatten(), length[some].flatten(), valid[some].flatten())
        yield part, _winners_of(r, some)
        begin = some.stop


def _winners_of(r: Ragged, some: slice) -> tuple:
    """Where the winners of a part are among all."""
    if not r.candidates or r.pairs is not None:
        return (some,)
    first, last = int(r.cu_seqlens_q[some.start]), int(r.cu_seqlens_q[some.stop])
    return slice(None), slice(max(first, 0), max(last, 0))
