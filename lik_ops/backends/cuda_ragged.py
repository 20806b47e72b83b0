"""The Triton backend for ragged layouts: packed queries and documents, candidate lists, lists of pairs."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..csrc_triton import row_sums
from ..csrc_triton.arguments import Cuts, Documents, Queries, Segments, Sizes, Spans, Upstream
from ..csrc_triton.backward_documents import maxsim_grad_documents
from ..csrc_triton.backward_lists import maxsim_row_norms
from ..csrc_triton.backward_queries import maxsim_grad_queries
from ..csrc_triton.backward_unified import maxsim_finish, maxsim_scatter
from ..csrc_triton.forward_ragged import maxsim_forward_ragged
from . import backward_configs, configs, cuda_rows, launcher
from .configs import Launch
from .cuda_arguments import allow_tf32, architecture, checked_grid, on_device, wide_of
from .cuda_backward import require_nondeterminism_allowed
from .ragged import Ragged

_log = logging.getLogger("lik_ops")
_LEAST_SLOT = 16


def _per_row(x: Tensor | None) -> tuple:
    """Of a mask or weight: itself and its strides between queries or documents, and between rows."""
    return (None, None, None) if x is None else (x, 0, x.stride(0))


def queries_of(r: Ragged) -> Queries:
    return Queries._make((r.Q, 0, *r.Q.stride(), *_per_row(r.q_mask), *_per_row(r.q_weight)))


def documents_of(r: Ragged, mask: Tensor | None) -> Documents:
    kept = (None,) * 4 if mask is None else (mask, 0, 0, mask.stride(0))
    return Documents._make((r.D, 0, 0, *r.D.stride(), *kept))


def segments_of(r: Ragged) -> Segments:
    pairs = None if r.pairs is None else r.pairs.contiguous()
    return Segments(r.cu_seqlens_q.contiguous(), r.d_offsets.contiguous(), r.d_lengths.contiguous(), pairs)


def _launch(r: Ragged, normalize: bool, argmax: bool) -> tuple[Launch, int]:
    """The tile for queries of the mean length, and the levels of a sum: see `maxsim_forward_ragged`.

    Longer queries take several steps, so that the host need not know the longest.
    """
    Nq, wide = max(r.queries, 1), wide_of(r.Q.unsqueeze(0), r.D.unsqueeze(0))
    return configs.forward_ragged(
        architecture(r.Q.device),
        r.Q.dtype,
        Nq,
        max(_LEAST_SLOT, configs.cdiv(r.Q.shape[0], Nq)),
        r.Q.shape[1],
        candidates=r.candidates or r.pairs is not None,
        normalize=normalize,
        wide=wide,
        tf32=allow_tf32(),
        argmax=argmax,
        longest=r.Q.shape[0],
        documents=r.d_offsets.numel() if r.pairs is None else r.pairs.shape[0],
    )


def _tiles(r: Ragged, launch: Launch) -> TensorDescriptor | None:
    """The rows of D for the tensor memory access unit, or None where it cannot read them."""
    rows, d = r.D.shape
    reads = architecture(r.D.device).has_descriptors and r.D.is_contiguous() and 0 < rows < 2**31
    if not reads or d * r.D.element_size() % 16 or r.D.data_ptr() % 16:
        return None
    return TensorDescriptor(r.D, [rows, d], [d, 1], [launch.config.BN, launch.config.BD])


def forward_ragged(
    r: Ragged, normalize: bool, argmax_dtype: torch.dtype | None, max_seqlen_q: int
) -> tuple[Tensor, Tensor]:
    """Scores in fp32 and winners (an empty tensor if `argmax_dtype` is None), both as `Ragged` says."""
    new, shape = r.Q.new_empty, r.scores_shape()
    scores = new(shape, dtype=torch.float32)
    choice = _row_maxima(r, normalize, argmax_dtype is not None)
    if choice is not None:
        return scores, _forward_rows(r, choice, scores, argmax_dtype)
    argmax = None
    if argmax_dtype is not None:
        argmax = r.Q.new_full(r.argmax_shape(max_seqlen_q), -1, dtype=argmax_dtype)
    winners = new(0, dtype=torch.int32) if argmax is None else argmax
    if scores.numel() == 0:
        return scores, winners
    if r.Q.shape[0] >= 2**31:
        raise ValueError(f"lik_ops: Q: {r.Q.shape[0]} packed query tokens; at most 2^31 - 1 at a time")
    launch, levels = _launch(r, normalize, argmax is not None)
    single = r.candidates or r.pairs is not None
    row_tiles = 1 if single else configs.cdiv(r.queries * launch.config.SLOT, launch.config.BM)
    grid = checked_grid(scores.numel() if single else row_tiles * r.columns)
    groups = queries_of(r), documents_of(r, r.d_mask), _tiles(r, launch), segments_of(r)
    numbers = r.queries, r.columns, r.Q.shape[0], r.D.shape[0], max_seqlen_q, r.Q.shape[1]
    args = (*groups, scores, argmax, *numbers, levels, launch.config)
    with on_device(r.Q.device):
        launcher.launch(maxsim_forward_ragged, grid, args, launch.options(architecture(r.Q.device)))
    _log.debug("maxsim_forward_ragged for %s: %s", tuple(shape), launch)
    return scores, winners


def _row_maxima(r: Ragged, normalize: bool, argmax: bool) -> configs.RowMaxima | None:
    """How the cross product goes by way of row maxima, None where it does not."""
    rows, queries = r.Q.shape[0], r.queries
    if r.candidates or r.pairs is not None or normalize or r.d_mask is not None or 0 in (rows, queries, r.columns):
        return None
    if r.D.numel() == 0 or r.D.data_ptr() % 16:
        return None
    return cuda_rows.choose(r.D, rows, r.columns, configs.cdiv(rows, queries), argmax)


def _forward_rows(r: Ragged, choice: configs.RowMaxima, scores: Tensor, argmax_dtype: torch.dtype | None) -> Tensor:
    """Fill the scores of the cross product, and return the winners."""
    rows, columns = r.Q.shape[0], r.columns
    argmax = None
    segments = segments_of(r)
    with on_device(r.Q.device):
        if argmax_dtype is not None:
            argmax = r.Q.new_empty((columns, rows), dtype=argmax_dtype)
            covered = r.Q.new_zeros(rows, dtype=torch.bool)
            args = segments.cu_seqlens_q, r.q_mask, covered, rows, 1 if r.q_mask is None else r.q_mask.stride(0), 128
            launcher.launch(row_sums.maxsim_covered_rows, (r.queries,), args, {"num_warps": 4})
            r = r._replace(q_mask=covered)
        spans = Spans(segments.lengths, segments.offsets, None, None)
        cuts = Cuts(segments.lengths, segments.offsets, segments.cu_seqlens_q)
        sizes = Sizes(r.queries, columns, rows, 0)
        cuda_rows.score_rows(choice, queries_of(r), (1, rows), r.D, spans, cuts, sizes, scores, argmax)
    return r.Q.new_empty(0, dtype=torch.int32) if argmax is None else argmax


def _query_of_rows(r: Ragged) -> Tensor:
    """The query of each packed row, -1 of rows that none has. Bounds may leave gaps and come in any order."""
    Tq, bounds = r.Q.shape[0], r.cu_seqlens_q.long()
    begin, end = bounds[:-1], bounds[1:]
    valid = (begin >= 0) & (end > begin) & (end <= Tq)
    rows = torch.arange(Tq, device=bounds.device)
    starting = torch.full((Tq + 1,), -1, device=bounds.device)  # the query that begins at each row; the last is nowhere
    starting.scatter_(0, torch.where(valid, begin, Tq), torch.arange(r.queries, device=bounds.device))
    latest = torch.where(starting[:Tq] >= 0, rows, -1).cummax(0).values
    query = starting[latest.clamp(min=0)]
    return torch.where((latest >= 0) & (rows < end[query.clamp(min=0)]), query, -1)


def _upstream(grad_scores: Tensor, r: Ragged, argmax: Tensor) -> Upstream:
    segments, strides = segments_of(r), grad_scores.stride()
    stride_q, stride_k = strides if r.pairs is None else (strides[0], 0)
    start = grad_scores, stride_q, stride_k, argmax.contiguous()
    packed = _query_of_rows(r), segments.cu_seqlens_q, segments.offsets, segments.lengths
    if r.pairs is None:
        return Upstream(*start, *packed)
    # Pairs that name no query have no winners: they may stand among those of the last.
    query, order = torch.sort(r.pairs[:, 0].contiguous(), stable=True)
    starts = torch.searchsorted(query, torch.arange(r.queries + 1, dtype=query.dtype, device=query.device))
    return Upstream(*start, *packed, segments.pairs, order, starts, argmax.shape[1])


class _Call:
    """One backward: what its kernels share."""

    def __init__(self, grad_scores: Tensor, r: Ragged, argmax: Tensor, normalize: bool) -> None:
        self.r, self.argmax, self.normalize = r, argmax, normalize
        self.arch, self.d = architecture(r.Q.device), r.Q.shape[1]
        self.wide = wide_of(r.Q.unsqueeze(0), r.D.unsqueeze(0))
        self.queries, self.documents = queries_of(r), documents_of(r, None)  # masked tokens win nothing
        self.up = _upstream(grad_scores, r, argmax)
        # Packed rows are one query; the rows of D one document.
        self.sizes = 1, r.columns, r.Q.shape[0], r.D.shape[0]

    def layout(self) -> dict:
        return {"candidates": self.r.candidates, "normalize": self.normalize, "wide": self.wide}

    def _run(self, kernel, grid: tuple[int, ...], args: tuple, launch: Launch) -> None:
        launcher.launch(kernel, grid, (*args, launch.config), launch.options(self.arch))

    def into_queries(self, grad_Q: Tensor | None, grad_weight: Tensor | None) -> None:
        launch = backward_configs.gather(self.r.Q.dtype, self.d, **self.layout())
        grid = checked_grid(configs.cdiv(self.r.Q.shape[0], launch.config.BM))
        args = self.queries, self.documents, self.up, grad_Q, grad_weight, *self.sizes, self.d
        self._run(maxsim_grad_queries, grid, args, launch)

    def into_documents(self, grad_D: Tensor) -> None:
        launch = backward_configs.grad_documents(
            self.arch, self.r.Q.dtype, self.d, flat=False, pieces=False, **self.layout() | {"candidates": False}
        )
        tile = launch.config.BN
        tiles = configs.cdiv(self.r.D.shape[0], tile)
        starts, entries = _entries(self.r, self.up, self.argmax, tile, tiles)
        norms = self._row_norms() if self.normalize else None
        numbers = 0, entries.numel(), 1, tiles, max(entries.numel(), 1)
        args = (
            self.queries,
            self.documents,
            self.up,
            starts,
            entries,
            norms,
            None,
            grad_D,
            *numbers,
            *self.sizes,
            self.d,
        )
        self._run(maxsim_grad_documents, (*checked_grid(tiles), 1), args, launch)

    def _row_norms(self) -> Tensor:
        rows = self.r.Q.shape[0]
        norms = self.r.Q.new_empty(rows, dtype=torch.float32)
        launch = backward_configs.gather(self.r.Q.dtype, self.d, **self.layout())
        grid = checked_grid(configs.cdiv(rows, launch.config.BM))
        self._run(maxsim_row_norms, grid, (self.queries, norms, 1, rows, self.d), launch)
        return norms

    def scatter(self, sum_D: Tensor) -> None:
        """Add into zeroed fp32 sums of the rows of D, a program for the rows of a tile and all that they meet."""
        launch = backward_configs.scatter(self.r.Q.dtype, self.d, ragged=True, **self.layout())
        grid = (*checked_grid(configs.cdiv(self.r.Q.shape[0], launch.config.BM)), 1)
        most = self.r.columns if self.r.pairs is None else self.r.pairs.shape[0]
        args = self.queries, self.documents, self.up, None, sum_D, *self.sizes, self.d, most
        self._run(maxsim_scatter, grid, args, launch)

    def finish_documents(self, sum_D: Tensor, grad_D: Tensor) -> None:
        launch = backward_configs.gather(self.r.D.dtype, self.d, **self.layout() | {"candidates": False})
        rows = self.r.D.shape[0]
        grid = checked_grid(configs.cdiv(rows, launch.config.BM))
        weightless = self.queries._replace(weight=None, weight_stride_n=None, weight_stride_l=None)
        self._run(maxsim_finish, grid, (self.documents, weightless, sum_D, grad_D, None, 1, 1, rows, 0, self.d), launch)


def _of_queries(r: Ragged, up: Upstream, argmax: Tensor) -> Tensor:
    """Which places of `argmax` are those of a query's tokens: nothing else may be followed into Q."""
    if r.pairs is None:
        return up.query >= 0
    i, last = r.pairs[:, 0], r.queries - 1
    begin, end = (r.cu_seqlens_q[i.clamp(0, last) + n] for n in (0, 1))
    inside = (i >= 0) & (i <= last) & (begin >= 0) & (end <= r.Q.shape[0])
    return inside[:, None] & (torch.arange(argmax.shape[1], device=argmax.device) < (end - begin)[:, None])


def _entries(r: Ragged, up: Upstream, argmax: Tensor, tile: int, tiles: int) -> tuple[Tensor, Tensor]:
    """Winners sorted by the row of D that won, as `maxsim_grad_documents` reads lists, and where each tile's begin.

    Documents may overlap or be met many times, so no row of D belongs to one document: all winners are sorted.
    """
    if argmax.numel() * tile >= 2**32:
        raise ValueError(f"lik_ops: gradients of {argmax.numel()} winners; at most {2**32 // tile} at a time")
    Td = r.D.shape[0]

    def met(x: Tensor) -> Tensor:
        """Of offsets or lengths, that of each winner's document."""
        if r.pairs is not None:
            return x[r.pairs[:, 1].clamp(0, x.shape[0] - 1)].unsqueeze(1)
        return x[up.query.clamp(min=0)].t() if r.candidates else x.unsqueeze(1)

    row = argmax + met(r.d_offsets).long()
    won = _of_queries(r, up, argmax) & (argmax >= 0) & (argmax < met(r.d_lengths))
    row = torch.where(won & (row >= 0) & (row < Td), row, Td)
    row, order = torch.sort(row.reshape(-1), stable=True)
    bounds = (torch.arange(tiles + 1, device=row.device) * tile).clamp_(max=Td)
    codes = order * tile + row % tile
    return torch.searchsorted(row, bounds).int(), codes.int()


def backward_ragged(
    grad_scores: Tensor, r: Ragged, argmax: Tensor, normalize: bool, needs: list[bool], unified: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of Q, D and q_weight; `unified`: that of D by fp32 atomic adds, else each summed in a fixed order.

    Raises:
        RuntimeError: `unified` under `torch.use_deterministic_algorithms(True)`.
    """
    if unified:
        require_nondeterminism_allowed()
    trivial = 0 in (r.Q.numel(), r.D.numel(), argmax.numel(), r.queries, r.columns)
    new = torch.zeros_like if trivial else torch.empty_like
    grad_Q, grad_D = (
        new(x, memory_format=torch.contiguous_format) if need else x.new_empty(0)
        for x, need in zip((r.Q, r.D), needs, strict=False)
    )
    weight_shape = r.Q.shape[:1] if needs[2] else (0,)
    grad_weight = r.Q.new_zeros(weight_shape, dtype=torch.float32)
    if trivial or not any(needs):
        return grad_Q, grad_D, grad_weight
    with on_device(r.Q.device):
        call = _Call(grad_scores, r, argmax, normalize)
        if needs[0] or needs[2]:
            call.into_queries(grad_Q if needs[0] else None, grad_weight if needs[2] else None)
        if needs[1] and unified:
            sum_D = torch.zeros(r.D.shape, dtype=torch.float32, device=r.D.device)
            call.scatter(sum_D)
            call.finish_documents(sum_D, grad_D)
        elif needs[1]:
            call.into_documents(grad_D)
    return grad_Q, grad_D, grad_weight
