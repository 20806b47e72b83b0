"""The backward half of the Triton backend: which kernels a gradient takes, and their workspace."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import argmax_dtype_for
from ..csrc_triton import backward_documents as document_kernels
from ..csrc_triton import backward_few as few_kernels
from ..csrc_triton import backward_lists as list_kernels
from ..csrc_triton import backward_queries as query_kernels
from ..csrc_triton import backward_unified as unified_kernels
from ..csrc_triton.arguments import Documents, Queries, Sizes, Upstream
from . import backward_configs, launcher
from .arguments import architecture, checked_grid, documents_of, on_device, queries_of, wide_of
from .arguments import sizes as sizes_of
from .configs import Architecture, Launch, cdiv
from .forward import forward

_SCATTER_PROGRAMS = 4096  # enough to fill any GPU several times
_LIST_BYTES = 16 * 2**20  # of the lists of winners, which are made for some documents at a time
_PARTIAL_BYTES = 8 * 2**20  # of what pieces of lists add up to
_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
_ENOUGH = 100  # documents of a launch, of which each may leave its rows to one program
_PIECE_ROWS = 2048  # at least, of a list that is cut
_ARGMAX_BYTES = 8 * 2**20  # of winners found again at a time; one query's or document's may be more
_INT32_MAX = 2**31 - 1
_LEAST_TOKENS, _MOST_TOKENS = 64, 1024  # of a document that meets few rows, for one program


class _Call(NamedTuple):
    """One backward: its tensors as kernel arguments, its outputs (None where not wanted)."""

    Q: Tensor
    D: Tensor
    queries: Queries
    documents: Documents
    up: Upstream
    sizes: Sizes
    d: int
    candidates: bool
    normalize: bool
    wide: int
    arch: Architecture
    grad_Q: Tensor | None
    grad_D: Tensor | None
    grad_weight: Tensor | None

    @property
    def groups(self) -> tuple[Queries, Documents, Upstream]:
        """What most kernels take first."""
        return self.queries, self.documents, self.up

    def layout(self) -> dict:
        return {"candidates": self.candidates, "normalize": self.normalize, "wide": self.wide}


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


def _call(
    a: _Arguments, grad_Q: Tensor | None = None, grad_D: Tensor | None = None, grad_weight: Tensor | None = None
) -> _Call:
    """What kernels are launched with, and the gradients that they write."""
    assert a.argmax is not None
    stride_q, stride_k = a.grad_scores.stride()
    return _Call(
        a.Q,
        a.D,
        queries_of(a.Q, a.q_mask, a.q_weight),
        documents_of(a.D, None),  # masked tokens win nothing
        Upstream(a.grad_scores, stride_q, stride_k, a.argmax.contiguous()),
        sizes_of(a.Q, a.D),
        a.Q.shape[-1],
        a.D.dim() == 4,
        a.normalize,
        wide_of(a.Q, a.D),
        architecture(a.Q.device),
        grad_Q,
        grad_D,
        grad_weight,
    )


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


def _into_queries(call: _Call) -> None:
    launch = backward_configs.gather(call.Q.dtype, call.d, **call.layout())
    grid = checked_grid(call.sizes.Nq * cdiv(call.sizes.Lq, launch.config.BM))
    args = (*call.groups, call.grad_Q, call.grad_weight, *call.sizes, call.d, launch.config)
    launcher.launch(query_kernels.maxsim_grad_queries, grid, args, launch.options(call.arch))


def _flat(Q: Tensor) -> bool:
    """Whether all query rows are evenly spaced, and 32 bits find each element."""
    Nq, Lq, d = Q.shape
    reach = Nq * Lq * abs(Q.stride(1)) + d * abs(Q.stride(2))
    return (Nq == 1 or Q.stride(0) == Lq * Q.stride(1)) and reach <= _INT32_MAX


class _Tiles(NamedTuple):
    """How the documents of one launch are cut: `rows` query rows each, in blocks for listing and pieces for summing."""

    first: int
    documents: int
    rows: int
    blocks: int
    tiles: int
    piece: int

    def numbers(self) -> tuple[int, int, int, int]:
        return self.first, self.rows, self.blocks, self.tiles


class _Lists(NamedTuple):
    """The winners of some documents, by tile, and what a piece of a list leaves to be added up."""

    starts: Tensor
    entries: Tensor
    norms: Tensor | None
    partial: Tensor | None


def _into_documents(call: _Call) -> None:
    sizes = call.sizes
    rows = sizes.Lq if call.candidates else sizes.Nq * sizes.Lq
    count = sizes.Nq * sizes.K if call.candidates else sizes.K
    if rows <= backward_configs.most_few_rows(call.Q.dtype, call.d, call.wide):
        _few_rows(call, rows, count)
        return
    table = functools.partial(
        backward_configs.grad_documents, call.arch, call.Q.dtype, call.d, flat=_flat(call.Q), **call.layout()
    )
    launch = table(pieces=False)
    tiles = cdiv(sizes.Ld, launch.config.BN)
    if rows > backward_configs.LIST_ROWS:
        _product(call, launch, None, _Tiles(0, count, rows, 1, tiles, rows))
        return
    listing = backward_configs.lists(call.arch, launch, rows)
    blocks = cdiv(rows, listing.config.BM)
    # Winners take 2 bytes or 4 each, entries 4. While lists take no more than winners and the gradient of the queries,
    # for which there is no memory yet, a step needs no more than with winners of 4 bytes and no lists.
    room = min(_LIST_BYTES, max(call.up.argmax.nbytes + call.Q.nbytes, _LIST_BYTES // 4))
    step = max(1, min(count, room // (4 * (rows + tiles * blocks + 1))))
    step = cdiv(count, cdiv(count, step))
    slot_bytes = 4 * launch.config.BN * call.d
    pieces = _pieces(step, rows, slot_bytes)
    launch = table(pieces=pieces > 1)
    new = functools.partial(torch.empty, device=call.Q.device)
    lists = _Lists(
        new(step * (tiles * blocks + 1), dtype=torch.int32),
        new(step * rows, dtype=torch.int32),
        _row_norms(call) if call.normalize else None,
        new(step * 2 * pieces * slot_bytes // 4, dtype=torch.float32) if pieces > 1 else None,
    )
    for first in range(0, count, step):
        cut = _Tiles(first, min(step, count - first), rows, blocks, tiles, cdiv(rows, pieces))
        _list(call, listing, lists, cut)
        _product(call, launch, lists, cut)


def _few_rows(call: _Call, rows: int, count: int) -> None:
    launch = backward_configs.few_rows(call.arch, call.Q.dtype, rows, call.d, **call.layout())
    # Cut documents give the same bits: a token's rows all count in the part that holds it.
    parts = max(cdiv(call.sizes.Ld, _MOST_TOKENS), cdiv(_PROGRAMS, count))
    tokens = max(cdiv(call.sizes.Ld, parts), _LEAST_TOKENS)
    grid = checked_grid(count * cdiv(call.sizes.Ld, tokens))
    args = (*call.groups, call.grad_D, rows, tokens, *call.sizes, call.d, launch.config)
    launcher.launch(few_kernels.maxsim_grad_documents_few, grid, args, launch.options(call.arch))


def _pieces(documents: int, rows: int, slot_bytes: int) -> int:
    """Into how many pieces a list is cut: a token that wins everything must not leave the GPU to few programs."""
    if documents >= _ENOUGH:
        return 1
    most = min(cdiv(_PROGRAMS, documents), rows // _PIECE_ROWS, _PARTIAL_BYTES // (2 * slot_bytes * documents))
    return max(1, most)


def _row_norms(call: _Call) -> Tensor:
    norms = torch.empty(call.Q.shape[:2], dtype=torch.float32, device=call.Q.device)
    launch = backward_configs.gather(call.Q.dtype, call.d, **call.layout())
    grid = checked_grid(call.sizes.Nq * cdiv(call.sizes.Lq, launch.config.BM))
    args = (call.queries, norms, call.sizes.Nq, call.sizes.Lq, call.d, launch.config)
    launcher.launch(list_kernels.maxsim_row_norms, grid, args, launch.options(call.arch))
    return norms


def _list(call: _Call, launch: Launch, lists: _Lists, cut: _Tiles) -> None:
    config, options = launch.config, launch.options(call.arch)
    grid = checked_grid(cut.documents * cut.blocks)
    if cut.blocks > 1:
        counted = (call.up, lists.starts, *cut.numbers(), config)
        launcher.launch(list_kernels.maxsim_count_winners, grid, counted, options)
        scan = (lists.starts, cut.tiles * cut.blocks, config._replace(BM=min(config.BM, 1024)))
        launcher.launch(list_kernels.maxsim_scan_counts, (cut.documents,), scan, {"num_warps": 4})
    args = (call.up, lists.starts, lists.entries, *cut.numbers(), cut.blocks == 1, config)
    launcher.launch(list_kernels.maxsim_list_winners, grid, args, options)


def _product(call: _Call, launch: Launch, lists: _Lists | None, cut: _Tiles) -> None:
    (programs,) = checked_grid(cut.documents * cut.tiles)
    options = launch.options(call.arch)
    starts, entries, norms, partial = lists or (None,) * 4
    pieces = 1 if partial is None else cdiv(cut.rows, cut.piece)
    numbers, grad_D = (*cut.numbers(), cut.piece), call.grad_D
    args = (*call.groups, starts, entries, norms, partial, grad_D, *numbers, *call.sizes, call.d, launch.config)
    launcher.launch(document_kernels.maxsim_grad_documents, (programs, pieces), args, options)
    if partial is not None:
        sizes = (call.sizes.K, call.sizes.Ld, call.d)
        joined = (call.documents, starts, partial, grad_D, *numbers, *sizes, launch.config)
        launcher.launch(document_kernels.maxsim_join_pieces, (programs,), joined, options)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of Q, D and q_weight, each element summed in a fixed order by the program that owns it.

    Winners that are not given are found again, in parts that need no more memory than a constant.
    """
    if Q.numel() == 0 or D.numel() == 0:
        grad_Q, grad_D, grad_weight = _outputs(Q, D, needs)
        return grad_Q, grad_D, grad_weight
    whole = _Arguments(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, normalize, needs)
    with on_device(Q.device):
        return _found_winners(whole) if argmax is None else _known_winners(whole)


def _found_winners(a: _Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """`backward_lowmem` where the winners are found again, in parts."""
    grad_Q, grad_D, grad_weight = outputs = _outputs(a.Q, a.D, a.needs)
    for part, targets in _parts(a, outputs):
        call = _call(part, *_wanted(targets, part.needs))
        if part.needs[0] or part.needs[2]:
            _into_queries(call)
        if part.needs[1]:
            _into_documents(call)
    return grad_Q, grad_D, grad_weight


def _known_winners(a: _Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """`backward_lowmem` of given winners. Their lists are gone when memory for the gradient of the queries is taken."""
    Q, D, (of_Q, of_D, of_weight) = a.Q, a.D, a.needs
    grad_D = _output(D, of_D)
    call = _call(a, grad_D=grad_D if of_D else None)
    if of_D:
        _into_documents(call)
    grad_Q, grad_weight = _output(Q, of_Q), _output(Q, of_weight, Q.shape[:2], torch.float32)
    if of_Q or of_weight:
        wanted = grad_Q if of_Q else None, grad_weight if of_weight else None
        _into_queries(call._replace(grad_Q=wanted[0], grad_weight=wanted[1]))
    return grad_Q, grad_D, grad_weight


def require_nondeterminism_allowed() -> None:
    """Do as torch's own atomic operations under `torch.use_deterministic_algorithms`: raise, or warn if told to."""
    if not torch.are_deterministic_algorithms_enabled():
        return
    message = (
        "lik::maxsim_bwd_unified adds atomically and does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. Use backward='lowmem', or 'auto'."
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=2)


def _finish(
    X: Tensor, queries: Queries, sums: Tensor, grad: Tensor | None, grad_weight: Tensor | None, normalize: bool
) -> None:
    """Write the gradient of the rows ``X [N, K, L, d]`` from their sums, and of their weights."""
    sizes, d = Sizes(X.shape[0], X.shape[1], X.shape[2], 0), X.shape[-1]
    launch = backward_configs.gather(X.dtype, d, candidates=False, normalize=normalize, wide=wide_of(X, X))
    grid = checked_grid(sizes.Nq * sizes.K * cdiv(sizes.Lq, launch.config.BM))
    args = (documents_of(X, None), queries, sums, grad, grad_weight, *sizes, d, launch.config)
    launcher.launch(unified_kernels.maxsim_finish, grid, args, launch.options(architecture(X.device)))


def _scatter(call: _Call, sum_Q: Tensor | None, sum_D: Tensor | None) -> None:
    sizes = call.sizes
    launch = backward_configs.scatter(call.arch, call.Q.dtype, call.d, **call.layout())
    row_tiles = sizes.Nq * cdiv(sizes.Lq, launch.config.BM)
    K_per_program = max(cdiv(sizes.K * row_tiles, _SCATTER_PROGRAMS), min(sizes.K, launch.config.BN))
    grid = (*checked_grid(row_tiles), cdiv(sizes.K, K_per_program))
    args = (*call.groups, sum_Q, sum_D, *sizes, call.d, K_per_program, launch.config)
    launcher.launch(unified_kernels.maxsim_scatter, grid, args, launch.options(call.arch))


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of Q, D and q_weight in one pass over the winners, through fp32 sums and atomic adds.

    Raises:
        RuntimeError: under `torch.use_deterministic_algorithms(True)`.
    """
    require_nondeterminism_allowed()
    grad_Q, grad_D, grad_weight = outputs = _outputs(Q, D, needs)
    if Q.numel() == 0 or D.numel() == 0:
        return grad_Q, grad_D, grad_weight
    sum_Q = torch.zeros(Q.shape, dtype=torch.float32, device=Q.device) if needs[0] or needs[2] else None
    sum_D = torch.zeros(D.shape, dtype=torch.float32, device=Q.device) if needs[1] else None
    a = _Arguments(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, normalize, needs)
    with on_device(Q.device):
        for part, part_Q, part_D in _scattered_parts(a, sum_Q, sum_D):
            _scatter(_call(part), part_Q, part_D)
        queries = queries_of(Q, q_mask, q_weight)
        wanted = _wanted(outputs, needs)
        if sum_Q is not None:
            _finish(Q.unsqueeze(1), queries, sum_Q, wanted[0], wanted[2], normalize)
        if sum_D is not None:
            documents = D if D.dim() == 4 else D.unsqueeze(0)
            _finish(
                documents,
                queries._replace(weight=None, weight_stride_n=None, weight_stride_l=None),
                sum_D,
                grad_D,
                None,
                normalize,
            )
    return grad_Q, grad_D, grad_weight
