"""The portable forward of quantised documents: decoded to fp32 a part at a time, then scored as other documents are.

On a CPU, where values may decide, a part is as many documents, or pairs, as have `TOKENS` together. Elsewhere nobody
knows the lengths: all documents are decoded at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..arguments import score_dtype
from ..formats import decoded, part_of
from ..segments import Ragged, Stored, rows_of
from .blocks import may_look
from .layout import Cells
from .packed import forward_ragged

TOKENS = 1 << 15


def forward_quantized(
    r: Ragged, stored: Stored, normalize: bool, argmax_dtype: torch.dtype | None, max_seqlen_q: int
) -> tuple[Tensor, Tensor]:
    """Scores and winners as `Ragged` says, whose D says nothing but how many tokens there are."""
    dtype = score_dtype(r.Q.dtype)
    r = r._replace(Q=r.Q.to(dtype))
    if not may_look(r.Q):
        D = _tokens(stored, slice(None), r.Q)
        return forward_ragged(r._replace(D=D), normalize, argmax_dtype, max_seqlen_q)
    scores = r.Q.new_empty(r.scores_shape())
    argmax = r.Q.new_empty(0, dtype=torch.int32)
    if argmax_dtype is not None:
        argmax = r.Q.new_full(r.argmax_shape(max_seqlen_q), -1, dtype=argmax_dtype)
    for part, winners in _parts(r, max_seqlen_q):
        D = _tokens(stored, part.rows, r.Q)
        found = forward_ragged(part.of(r, D), normalize, argmax_dtype, max_seqlen_q)
        scores[part.scores] = found[0]
        if argmax_dtype is not None:
            if r.candidates:  # queries may share rows
                argmax[winners] = torch.where(found[1][winners] < 0, argmax[winners], found[1][winners])
            else:
                argmax[winners] = found[1]
    return scores, argmax


def _tokens(stored: Stored, rows: Tensor | slice, like: Tensor) -> Tensor:
    """Some tokens as they count, in the dtype of scores."""
    scale, minimum = part_of(stored.scale, rows), part_of(stored.minimum, rows)
    return decoded(stored.data[rows], scale, minimum, stored.format, like.shape[-1]).to(like.dtype)


class _Part:
    """Some documents of a cross product, the candidates of some queries, or some pairs."""

    def __init__(self, r: Ragged, part: slice, start: Tensor, length: Tensor, valid: Tensor) -> None:
        self.part, self.candidates, self.pairs = part, r.candidates, r.pairs is not None
        rows, bounds = rows_of(start, length)
        self.offsets, self.lengths = bounds[:-1], torch.where(valid, length, -1)
        # Documents that follow one another are a view.
        first = int(rows[0]) if len(rows) else 0
        follow = torch.equal(start, self.offsets + first)
        self.rows: Tensor | slice = slice(first, first + len(rows)) if follow else rows

    @property
    def scores(self) -> tuple[slice, ...]:
        """Where its scores are among all."""
        return (self.part,) if self.candidates or self.pairs else (slice(None), self.part)

    def of(self, r: Ragged, D: Tensor) -> Ragged:
        """The call for it alone. What is not valid keeps a length that is none."""
        offsets, lengths = self.offsets, self.lengths
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


def _parts(r: Ragged, max_seqlen_q: int) -> Iterator[tuple[_Part, tuple]]:
    """Parts of about `TOKENS` document tokens, and where their winners are among all."""
    cells = Cells(r, max_seqlen_q)
    items = cells.start, cells.length, cells.valid
    if r.candidates and r.pairs is None:
        items = tuple(x.view(r.d_offsets.shape) for x in items)  # type: ignore[assignment]
    each = items[1].sum(1) if items[1].dim() == 2 else items[1]
    before = torch.cat([each.new_zeros(1), each.cumsum(0)])
    begin, count = 0, len(each)
    while begin < count:
        last = int(torch.searchsorted(before, before[begin] + TOKENS, right=True)) - 1
        some = slice(begin, min(max(last, begin + 1), count))
        yield _Part(r, some, *(x[some].flatten() for x in items)), _winners_of(r, some)
        begin = some.stop


def _winners_of(r: Ragged, some: slice) -> tuple:
    """Where the winners of a part are among all."""
    if not r.candidates or r.pairs is not None:
        return (some,)
    ends = r.cu_seqlens_q[some.start : some.stop + 1]
    inside = (ends[:-1] >= 0) & (ends[:-1] <= ends[1:]) & (ends[1:] <= r.Q.shape[0])
    if not bool(inside.any()):
        return slice(None), slice(0, 0)
    return slice(None), slice(int(ends[:-1][inside].min()), int(ends[1:][inside].max()))
