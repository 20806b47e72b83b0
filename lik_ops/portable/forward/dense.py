"""The portable forward: slices of similarities, or many documents at once if documents are read in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.arguments import score_dtype
from ..blocks import MIN_ROWS, MiB, ceil_div, choose_slice_shape, is_product_ready, split_range
from ..layout import BatchedArgs, make_batched_args
from ..pace import adjust_threads
from .narrow import FewDocumentsForward, FewQueriesForward
from .scores import NEG_INF
from .slices import QueryPanel, SliceForward, choose_tiling
from .wide import WideForward

MIN_BLOCK_DOCUMENTS = 32  # documents of a block, if the call has as many; a block may have almost twice as many
MAX_TILE_BYTES = MiB  # similarities of a tile


def forward(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Return the scores and the argmax of `lik::maxsim_fwd` for its arguments, which are validated."""
    dtype = torch.int32 if argmax_dtype is None else argmax_dtype
    scores, argmax, is_trivial = allocate_outputs(Q, D, q_mask, dtype, argmax_dtype is not None, -1)
    if is_trivial:
        return scores, argmax
    run_forward(make_batched_args(Q, D, q_mask, d_mask, q_weight, scores, argmax), normalize)
    return scores, argmax


def allocate_outputs(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, dtype: torch.dtype, keep: bool, nothing: float
) -> tuple[Tensor, Tensor, bool]:
    """Allocate the outputs, and fill them if there is nothing to multiply.

    Returns:
        Scores, a tensor of `dtype` with a value for each query token and document (``[0]`` unless `keep`), and whether
        both are filled, the second one with `nothing`.
    """
    cross = D.dim() == 3
    (Nq, Lq, _), Ld = Q.shape, D.shape[-2]
    columns = D.shape[0] if cross else D.shape[1]
    scores = Q.new_empty((Nq, columns), dtype=score_dtype(Q.dtype))
    argmax = Q.new_empty(((columns, Nq, Lq) if cross else (Nq, columns, Lq)) if keep else (0,), dtype=dtype)
    if scores.numel() and Lq and Ld:
        return scores, argmax, False
    if Lq == 0:
        return scores.zero_(), argmax, True
    scores.fill_(NEG_INF)
    if q_mask is not None:
        scores.masked_fill_(~q_mask.any(-1)[:, None], 0)
    return scores, argmax.fill_(nothing), True


def run_forward(layout: BatchedArgs, normalize: bool) -> None:
    """Fill the outputs of `layout`, whose tensors must not be empty."""
    for kind in (WideForward, FewQueriesForward, FewDocumentsForward):
        if kind.supports(layout):
            kind(layout, normalize).run()
            return
    (InPlaceForward if InPlaceForward.supports(layout, normalize) else SliceForward)(layout, normalize).run()


class InPlaceForward(SliceForward):
    """The forward that reads documents in place, many at once.

    A slice is one token position, with one row for each document. A processor prefetches within pages of memory, and
    only few lines of each page. Products of whole documents wait for the memory and then multiply. Here every slice
    reads the next token of at least `MIN_BLOCK_DOCUMENTS` pages, and reading and multiplying overlap.
    """

    min_documents = MIN_ROWS

    @staticmethod
    def supports(layout: BatchedArgs, normalize: bool) -> bool:
        """Return whether documents need no conversion and are enough for a slice.

        With argmax, whole documents are faster. Queries of several panels read whole documents from the cache.
        """
        dtype, (X, Ld, d) = layout.pairs.dtype, layout.D.shape[1:]
        if normalize or layout.argmax is not None or X < MIN_ROWS:
            return False
        return choose_slice_shape(layout.Q.shape[2], Ld, d, dtype).panels == 1 and is_product_ready(layout.D, dtype)

    def _plan_blocks(self) -> None:
        X, size = self.X, self.dtype.itemsize
        self.shape = self.shape._replace(rows=1, documents=1, starts=(0,))
        max_documents = max(MIN_BLOCK_DOCUMENTS, MAX_TILE_BYTES // (self.Ld * self.shape.columns * size))
        self.tiling = choose_tiling(
            self.shape, ceil_div(X, max(1, X // max_documents)), 1, X, self.Y, self.d, self.dtype
        )
        row_bytes = self.tiling.block_slices * self.shape.columns * size
        self.slices = ceil_div(self.Ld, ceil_div(self.Ld, max(1, MAX_TILE_BYTES // row_bytes)))  # as even as possible
        self.similarities = self.layout.pairs.new_empty(self.slices * row_bytes // size)

    def _columns(self, loaded: Tensor) -> Tensor:
        # MKL is faster with columns that are contiguous in memory, and fp32 has the same bits.
        return super()._columns(loaded.mT.contiguous().mT)

    def _compute(self, b: slice, x: slice, first: int, panels: list[QueryPanel]) -> None:
        layout, n, columns = self.layout, x.stop - x.start, self.shape.columns
        documents = layout.D[b.start, x].transpose(0, 1)
        is_masked = None if layout.d_mask is None else ~layout.d_mask[b.start, x].t()
        for t in split_range(0, self.Ld, self.slices):
            part, tokens = documents[t], t.stop - t.start
            S = self.similarities[: tokens * n * columns].view(tokens, n, columns)
            rows = None if is_masked is None else is_masked[t].reshape(-1).nonzero().squeeze(-1)
            for panel in panels:
                adjust_threads()
                torch.bmm(part, panel.columns[:tokens], out=S)
                if rows is not None and rows.numel():
                    S.view(-1, columns).index_fill_(0, rows, NEG_INF)
                best = panel.best.narrow(0, first, n)
                if t.start == 0:
                    torch.amax(S, 0, out=best)
                else:
                    torch.maximum(best, S.amax(0), out=best)
