"""The backward half of the Triton backend: which kernels a gradient takes, and their workspace."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from ..arguments import argmax_dtype_for, metadata
from ..csrc_triton.arguments import Documents, Pieces, Queries, RowSums, TileLists, Upstream
from ..csrc_triton.backward_documents import maxsim_grad_documents, maxsim_join_pieces
from ..csrc_triton.backward_lists import (
    maxsim_count_winners,
    maxsim_list_winners,
    maxsim_row_norms,
    maxsim_scan_counts,
)
from ..csrc_triton.backward_queries import maxsim_grad_queries
from ..csrc_triton.backward_sparse import maxsim_grad_sparse_documents
from ..csrc_triton.backward_unified import maxsim_finish, maxsim_scatter
from . import backward_configs, launcher
from .arguments import allow_tf32, architecture, checked_grid, documents_of, on_device, queries_of, wide_of
from .arguments import sizes as sizes_of
from .configs import Architecture, Launch, cdiv
from .forward import forward
from .replay import Calls

_SCATTER_PROGRAMS = 4096  # enough to fill any GPU several times
_LIST_BYTES = 16 * 2**20  # of the lists of winners, which are made for some documents at a time
_PARTIAL_BYTES = 8 * 2**20  # of the sums of pieces
_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
_ENOUGH = 100  # documents of a launch, from which on no list is cut
_PIECE_ROWS = 2048  # at least, of a list that is cut
_ARGMAX_BYTES = 8 * 2**20  # of winners found again at a time; one query's or document's may be more
_INT32_MAX = 2**31 - 1
_LEAST_TOKENS, _MOST_TOKENS = 64, 1024  # of a document that meets few rows, for one program
Gradients = tuple[Tensor, Tensor, Tensor]  # of Q, D and q_weight
calls = Calls()


class Call(NamedTuple):
    """One backward as its kernels take it; packed layouts are one query of all rows."""

    queries: Queries
    documents: Documents
    up: Upstream
    candidates: bool
    normalize: bool
    wide: int
    packed: bool = False

    @property
    def d(self) -> int:
        return self.queries.ptr.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.queries.ptr.dtype

    @property
    def arch(self) -> Architecture:
        return architecture(self.queries.ptr.device)

    @property
    def groups(self) -> tuple[Queries, Documents, Upstream]:
        """What most kernels take first."""
        return self.queries, self.documents, self.up

    @property
    def flat(self) -> bool:
        """Whether all query rows are evenly spaced, and 32 bits find each element."""
        Q, rows = self.queries, self.up.Nq * self.up.Lq
        reach = rows * abs(Q.stride_l) + self.d * abs(Q.stride_d)
        return (self.up.Nq == 1 or Q.stride_n == self.up.Lq * Q.stride_l) and reach <= _INT32_MAX

    def layout(self) -> dict:
        return {"candidates": self.candidates, "normalize": self.normalize, "wide": self.wide}

    def run(self, kernel, grid: tuple[int, ...], args: tuple, launch: Launch) -> None:
        launcher.launch(kernel, grid, (*args, launch.config), launch.options(self.arch))

    def row_tiles(self, launch: Launch) -> int:
        return self.up.Nq * cdiv(self.up.Lq, launch.config.BM)

    def into_queries(self, grad_Q: Tensor | None, grad_weight: Tensor | None) -> None:
        launch = backward_configs.gather(self.dtype, self.d, ragged=self.packed, **self.layout())
        args = (*self.groups, grad_Q, grad_weight, self.d)
        self.run(maxsim_grad_queries, checked_grid(self.row_tiles(launch)), args, launch)

    def with_norms(self) -> Call:
        """With ``1 / ||q||`` of all query rows, where they are normalized."""
        if not self.normalize:
            return self
        up = self.up
        norms = self.queries.ptr.new_empty((up.Nq, up.Lq), dtype=torch.float32)
        launch = backward_configs.gather(self.dtype, self.d, **self.layout())
        args = self.queries, norms, up.Nq, up.Lq, self.d
        self.run(maxsim_row_norms, checked_grid(self.row_tiles(launch)), args, launch)
        return self._replace(up=up._replace(norms=norms))

    def scatter(self, sum_Q: Tensor | None, sum_D: Tensor | None) -> None:
        """Add to zeroed fp32 sums. A program takes a share of the documents; of packed ones, all that its rows meet."""
        launch = backward_configs.scatter(self.arch, self.dtype, self.d, ragged=self.packed, **self.layout())
        tiles, K = self.row_tiles(launch), self.up.K
        most = max(cdiv(K * tiles, _SCATTER_PROGRAMS), min(K, launch.config.BN))
        grid = (*checked_grid(tiles), cdiv(K, most))
        if self.packed:
            most, grid = self.up.count, (*grid[:1], 1)
        self.run(maxsim_scatter, grid, (*self.groups, sum_Q, sum_D, self.d, most), launch)

    def finish(
        self, X: Documents, sums: Tensor, grad: Tensor | None, grad_weight: Tensor | None, wide: int, weighted: bool
    ) -> None:
        """Write the gradient of the rows X from their sums ``[N, K, L, d]``; that of queries, and of their weights,
        where `weighted`."""
        N, K, L, d = sums.shape
        queries = self.queries
        if not weighted:
            queries = queries._replace(weight=None, weight_stride_n=None, weight_stride_l=None)
        launch = backward_configs.gather(self.dtype, d, candidates=False, normalize=self.normalize, wide=wide)
        grid = checked_grid(N * K * cdiv(L, launch.config.BM))
        self.run(maxsim_finish, grid, (X, queries, RowSums(sums, K, L), grad, grad_weight, d), launch)


def _output(x: Tensor, need: bool, shape: torch.Size | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for the gradient of `x`, or of what has another shape and dtype; [0] where it is not needed."""
    return x.new_empty((x.shape if shape is None else shape) if need else (0,), dtype=dtype)


def _outputs(Q: Tensor, D: Tensor, needs: list[bool]) -> list[Tensor]:
    """A gradient for each of Q, D, q_weight: zeros where nothing can flow, [0] where not needed."""
    outputs = [_output(Q, needs[0]), _output(D, needs[1]), _output(Q, needs[2], Q.shape[:2], torch.float32)]
    if Q.numel() == 0 or D.numel() == 0:
        for x in outputs:
            x.zero_()
    return outputs


class _Arguments(NamedTuple):
    """The arguments of a backward; `argmax` is None where the winners are to be found again."""

    grad_scores: Tensor
    Q: Tensor
    D: Tensor
    argmax: Tensor | None
    q_mask: Tensor | None
    d_mask: Tensor | None
    q_weight: Tensor | None
    normalize: bool
    needs: list[bool]

    def part(self, queries: slice, documents: slice) -> _Arguments:
        """Of some queries, and of some documents of the cross product, with their winners."""
        q_mask, q_weight = (None if t is None else t[queries] for t in (self.q_mask, self.q_weight))
        own = queries if self.D.dim() == 4 else documents
        D, d_mask = self.D[own], None if self.d_mask is None else self.d_mask[own]
        Q, dtype = self.Q[queries], argmax_dtype_for(D.shape[-2])
        argmax = forward(Q, D, q_mask, d_mask, q_weight, self.normalize, dtype)[1]
        grad_scores = self.grad_scores[queries, documents]
        return _Arguments(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, self.normalize, self.needs)


def _wanted(outputs: list[Tensor], needs: list[bool]) -> list[Tensor | None]:
    return [g if need else None for g, need in zip(outputs, needs, strict=True)]


def _call(a: _Arguments) -> Call:
    assert a.argmax is not None
    stride_q, stride_k = a.grad_scores.stride()
    up = Upstream(a.grad_scores, stride_q, stride_k, a.argmax.contiguous(), *sizes_of(a.Q, a.D))
    queries, documents = queries_of(a.Q, a.q_mask, a.q_weight), documents_of(a.D, None)  # masked tokens win nothing
    return Call(queries, documents, up, a.D.dim() == 4, a.normalize, wide_of(a.Q, a.D))


def _slices(total: int, bytes_each: int) -> Iterator[slice]:
    """Cuts of `total` queries or documents whose winners take `bytes_each`."""
    step = max(1, _ARGMAX_BYTES // max(bytes_each, 1))
    for first in range(0, total, step):
        yield slice(first, min(first + step, total))


def _parts(a: _Arguments, outputs: list[Tensor]) -> Iterator[tuple[_Arguments, list[Tensor]]]:
    """The call in parts whose winners fit the workspace, with the gradients that each part completes.

    Candidates belong to their query. In the cross product a query needs all documents and a document all queries: the
    winners are found twice, by queries for the gradients of the queries and by documents for that of the documents.
    """
    everything = slice(None)
    sizes, candidates = sizes_of(a.Q, a.D), a.D.dim() == 4
    row_bytes = sizes.Lq * argmax_dtype_for(sizes.Ld).itemsize
    if sizes.Nq * sizes.K * row_bytes <= _ARGMAX_BYTES:
        yield a.part(everything, everything), outputs
        return
    needs = list(a.needs) if candidates else [a.needs[0], False, a.needs[2]]
    if any(needs):
        for part in _slices(sizes.Nq, sizes.K * row_bytes):
            cut = [t[part] if need else t for t, need in zip(outputs, needs, strict=True)]
            yield a.part(part, everything)._replace(needs=needs), cut
    if a.needs[1] and not candidates:
        for part in _slices(sizes.K, sizes.Nq * row_bytes):
            cut = [outputs[0], outputs[1][part], outputs[2]]
            yield a.part(everything, part)._replace(needs=[False, True, False]), cut


def _into_documents(call: Call, grad_D: Tensor) -> None:
    up = call.up
    rows = up.Lq if call.candidates else up.Nq * up.Lq
    count = up.Nq * up.K if call.candidates else up.K
    if rows <= backward_configs.most_sparse_rows(call.dtype, call.d, call.wide):
        _sum_sparse(call, rows, count, grad_D)
        return
    table = partial(backward_configs.grad_documents, call.arch, call.dtype, call.d, flat=call.flat, **call.layout())
    launch = table(pieces=False)
    tiles = cdiv(up.Ld, launch.config.BN)
    if rows > backward_configs.LIST_ROWS:
        _sum_tiles(call, launch, TileLists(None, None, 0, 1, tiles), rows, Pieces(None, rows), count, grad_D)
        return
    listing = backward_configs.lists(call.arch, launch, rows)
    blocks = cdiv(rows, listing.config.BM)
    # Winners take 2 bytes or 4 each, entries 4. The gradient of the queries is not there yet. While lists take no more
    # than winners and that gradient, a step needs no more memory than with winners of 4 bytes and no lists.
    room = min(_LIST_BYTES, max(up.argmax.nbytes + call.queries.ptr.nbytes, _LIST_BYTES // 4))
    step = max(1, min(count, room // (4 * (rows + tiles * blocks + 1))))
    step = cdiv(count, cdiv(count, step))
    slot_bytes = 4 * launch.config.BN * call.d
    cut = _pieces(step, rows, slot_bytes)
    launch = table(pieces=cut > 1)
    new = partial(torch.empty, device=grad_D.device)
    starts, entries = (new(step * n, dtype=torch.int32) for n in (tiles * blocks + 1, rows))
    sums = new(step * 2 * cut * slot_bytes // 4, dtype=torch.float32) if cut > 1 else None
    call = call.with_norms()
    for first in range(0, count, step):
        lists, documents = TileLists(entries, starts, first, blocks, tiles), min(step, count - first)
        _list(call, listing, lists, rows, documents)
        _sum_tiles(call, launch, lists, rows, Pieces(sums, cdiv(rows, cut)), documents, grad_D)


def _sum_sparse(call: Call, rows: int, count: int, grad_D: Tensor) -> None:
    launch = backward_configs.sparse_documents(call.arch, call.dtype, rows, call.d, **call.layout())
    # Cut documents give the same bits: a token's rows all count in the part that holds it.
    parts = max(cdiv(call.up.Ld, _MOST_TOKENS), cdiv(_PROGRAMS, count))
    tokens = max(cdiv(call.up.Ld, parts), _LEAST_TOKENS)
    grid = checked_grid(count * cdiv(call.up.Ld, tokens))
    call.run(maxsim_grad_sparse_documents, grid, (*call.groups, grad_D, rows, tokens, call.d), launch)


def _pieces(documents: int, rows: int, slot_bytes: int) -> int:
    """Into how many pieces a list is cut: a token that wins everything must not leave the GPU to few programs."""
    if documents >= _ENOUGH:
        return 1
    most = min(cdiv(_PROGRAMS, documents), rows // _PIECE_ROWS, _PARTIAL_BYTES // (2 * slot_bytes * documents))
    return max(1, most)


def _list(call: Call, launch: Launch, lists: TileLists, rows: int, documents: int) -> None:
    grid = checked_grid(documents * lists.blocks)
    if lists.blocks > 1:
        call.run(maxsim_count_winners, grid, (call.up, lists, rows), launch)
        config = launch.config._replace(BM=min(launch.config.BM, 1024))
        scan = lists.starts, lists.tiles * lists.blocks, config
        launcher.launch(maxsim_scan_counts, (documents,), scan, {"num_warps": 4})
    call.run(maxsim_list_winners, grid, (call.up, lists, rows, lists.blocks == 1), launch)


def _sum_tiles(
    call: Call, launch: Launch, lists: TileLists, rows: int, pieces: Pieces, documents: int, grad_D: Tensor
) -> None:
    (programs,) = checked_grid(documents * lists.tiles)
    args = lists, rows, pieces, grad_D, call.d
    call.run(maxsim_grad_documents, (programs, cdiv(rows, pieces.rows)), (*call.groups, *args), launch)
    if pieces.partial is not None:
        call.run(maxsim_join_pieces, (programs,), (call.documents, call.up, *args), launch)


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
) -> Gradients:
    """Gradients of Q, D and q_weight, each element summed in a fixed order by the program that owns it.

    Winners that are not given are found again, in parts that need no more memory than a constant.
    """
    return _again(_lowmem, _Arguments(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, normalize, needs))


def _again(function: Callable[[_Arguments], Gradients], a: _Arguments) -> Gradients:
    """What `function` returns, replayed where a call like it was made before."""
    stride = a.grad_scores.stride()
    if a.argmax is None:  # to be found again, by whatever a forward may use now
        winners: tuple = (a.Q.dtype == torch.float32 and allow_tf32(),)
    else:
        winners = a.argmax.dtype, a.argmax.stride()
    found = metadata(a.Q, a.D, a.q_mask, a.d_mask, a.q_weight)
    key = (function, *found, stride, *winners, a.normalize, *a.needs)
    given = a.grad_scores, a.argmax, a.Q, a.D, a.q_mask, a.d_mask, a.q_weight
    return calls.run(key, given, partial(function, a), a.Q.device)


def _lowmem(a: _Arguments) -> Gradients:
    if a.Q.numel() == 0 or a.D.numel() == 0:
        grad_Q, grad_D, grad_weight = _outputs(a.Q, a.D, a.needs)
        return grad_Q, grad_D, grad_weight
    with on_device(a.Q.device):
        return _found_winners(a) if a.argmax is None else _known_winners(a)


def _found_winners(a: _Arguments) -> Gradients:
    """`backward_lowmem` where the winners are found again, in parts."""
    grad_Q, grad_D, grad_weight = outputs = _outputs(a.Q, a.D, a.needs)
    for part, targets in _parts(a, outputs):
        call, wanted = _call(part), _wanted(targets, part.needs)
        if part.needs[0] or part.needs[2]:
            call.into_queries(wanted[0], wanted[2])
        if part.needs[1]:
            _into_documents(call, targets[1])
    return grad_Q, grad_D, grad_weight


def _known_winners(a: _Arguments) -> Gradients:
    """`backward_lowmem` of given winners. Their lists are gone when memory for the gradient of the queries is taken."""
    Q, D, (of_Q, of_D, of_weight) = a.Q, a.D, a.needs
    call, grad_D = _call(a), _output(D, of_D)
    if of_D:
        _into_documents(call, grad_D)
    grad_Q, grad_weight = _output(Q, of_Q), _output(Q, of_weight, Q.shape[:2], torch.float32)
    if of_Q or of_weight:
        call.into_queries(grad_Q if of_Q else None, grad_weight if of_weight else None)
    return grad_Q, grad_D, grad_weight


def require_nondeterminism_allowed() -> None:
    """Do as torch's own atomic operations under `torch.use_deterministic_algorithms`: raise, or warn if told to."""
    if not torch.are_deterministic_algorithms_enabled():
        return
    op = add_op_namespace_prefix("maxsim_bwd_unified")
    message = (
        f"{op} adds atomically and does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. Use backward='lowmem', or 'auto'."
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=2)


def _scattered_parts(
    a: _Arguments, sum_Q: Tensor | None, sum_D: Tensor | None
) -> Iterator[tuple[_Arguments, Tensor | None, Tensor | None]]:
    """The call in parts whose winners fit the workspace, each with the sums that it adds to."""
    if a.argmax is not None:
        yield a, sum_Q, sum_D
        return
    sizes, everything, candidates = sizes_of(a.Q, a.D), slice(None), a.D.dim() == 4
    count, others = (sizes.Nq, sizes.K) if candidates else (sizes.K, sizes.Nq)
    for own in _slices(count, others * sizes.Lq * argmax_dtype_for(sizes.Ld).itemsize):
        part_D = None if sum_D is None else sum_D[own]
        if candidates:
            yield a.part(own, everything), None if sum_Q is None else sum_Q[own], part_D
        else:
            yield a.part(everything, own), sum_Q, part_D


def backward_unified(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    argmax: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    needs: list[bool],
) -> Gradients:
    """Gradients of Q, D and q_weight in one pass over the winners, through fp32 sums and atomic adds.

    Raises:
        RuntimeError: under `torch.use_deterministic_algorithms(True)`.
    """
    require_nondeterminism_allowed()
    return _again(_unified, _Arguments(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, normalize, needs))


def _unified(a: _Arguments) -> Gradients:
    Q, D, needs = a.Q, a.D, a.needs
    grad_Q, grad_D, grad_weight = outputs = _outputs(Q, D, needs)
    if Q.numel() == 0 or D.numel() == 0:
        return grad_Q, grad_D, grad_weight
    sum_Q = torch.zeros(Q.shape, dtype=torch.float32, device=Q.device) if needs[0] or needs[2] else None
    sum_D = torch.zeros(D.shape, dtype=torch.float32, device=Q.device) if needs[1] else None
    with on_device(Q.device):
        for part, part_Q, part_D in _scattered_parts(a, sum_Q, sum_D):
            call = _call(part)
            call.scatter(part_Q, part_D)
        call = call._replace(queries=queries_of(Q, a.q_mask, a.q_weight))
        wanted = _wanted(outputs, needs)
        if sum_Q is not None:
            X = documents_of(Q.unsqueeze(1), None)
            call.finish(X, sum_Q.unsqueeze(1), wanted[0], wanted[2], wide_of(Q, Q), True)
        if sum_D is not None:
            D, sum_D = (x if x.dim() == 4 else x.unsqueeze(0) for x in (D, sum_D))
            call.finish(documents_of(D, None), sum_D, grad_D, None, wide_of(D, D), False)
    return grad_Q, grad_D, grad_weight
