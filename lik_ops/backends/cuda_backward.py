"""The backward half of the Triton backend: which kernels a gradient takes, and their workspace."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..csrc_triton import backward_documents as document_kernels
from ..csrc_triton import backward_lists as list_kernels
from ..csrc_triton import backward_queries as query_kernels
from ..csrc_triton import backward_unified as unified_kernels
from ..csrc_triton.arguments import Documents, Queries, Sizes, Upstream
from . import configs
from .configs import Architecture, Launch
from .cuda import _check_grid, _documents, _on_device, _queries, _sizes, _wide, architecture

_SCATTER_PROGRAMS = 4096  # enough to fill any GPU several times
_LIST_BYTES = 24 * 2**20  # of the lists of winners, which are made for some documents at a time
_ENTRY_BYTES = 8
_FEW_ROWS = 512  # rows of a document that are looked through rather than listed


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

    def layout(self) -> dict:
        return {"candidates": self.candidates, "normalize": self.normalize, "wide": self.wide}


def _outputs(Q: Tensor, D: Tensor, needs: list[bool]) -> list[Tensor]:
    """A gradient for each of Q, D, q_weight: zeros where nothing can flow, [0] where not needed."""
    empty = Q.numel() == 0 or D.numel() == 0
    new = torch.zeros if empty else torch.empty
    shapes, dtypes = (Q.shape, D.shape, Q.shape[:2]), (Q.dtype, D.dtype, torch.float32)
    return [
        new(shape if need else (0,), dtype=dtype, device=Q.device)
        for shape, dtype, need in zip(shapes, dtypes, needs, strict=True)
    ]


def _call(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    argmax: Tensor,
    q_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    outputs: list[Tensor],
    needs: list[bool],
) -> _Call:
    wanted = [g if need else None for g, need in zip(outputs, needs, strict=True)]
    return _Call(
        Q,
        D,
        _queries(Q, q_mask, q_weight),
        _documents(D, None),  # masked tokens win nothing
        Upstream(grad_scores, *grad_scores.stride(), argmax.contiguous()),
        _sizes(Q, D),
        Q.shape[-1],
        D.dim() == 4,
        normalize,
        _wide(Q, D),
        architecture(Q.device),
        *wanted,
    )


def _into_queries(call: _Call) -> None:
    launch = configs.gather(call.Q.dtype, call.d, **call.layout())
    grid = _check_grid(call.sizes.Nq * triton.cdiv(call.sizes.Lq, launch.config.BM))
    query_kernels.maxsim_grad_queries[grid](
        call.queries,
        call.documents,
        call.up,
        call.grad_Q,
        call.grad_weight,
        *call.sizes,
        call.d,
        launch.config,
        **launch.options(call.arch),
    )


def _into_documents(call: _Call) -> None:
    assert call.grad_D is not None
    sizes = call.sizes
    launch = configs.grad_documents(call.arch, call.Q.dtype, sizes.Lq, call.d, **call.layout())
    tiles = triton.cdiv(sizes.Ld, launch.config.BN)
    rows = sizes.Lq if call.candidates else sizes.Nq * sizes.Lq
    count = sizes.Nq * sizes.K if call.candidates else sizes.K
    if call.candidates or not _FEW_ROWS < rows <= configs.LIST_ROWS:
        _product(call, launch, None, 0, count, rows, 1, tiles)
        return
    listing = configs.lists(call.arch, launch, rows)
    blocks = triton.cdiv(rows, listing.config.BM)
    step = max(1, min(count, _LIST_BYTES // (rows * _ENTRY_BYTES + 4 * tiles * blocks)))
    device = call.Q.device
    starts = torch.empty(step * (tiles * blocks + 1), dtype=torch.int32, device=device)
    entries = torch.empty(step * rows, dtype=torch.int32, device=device)
    coefficients = torch.empty(step * rows, dtype=torch.float32, device=device)
    norms = _row_norms(call) if call.normalize else None
    for first in range(0, count, step):
        documents = min(step, count - first)
        _list(call, listing, norms, (starts, entries, coefficients), first, documents, rows, blocks, tiles)
        _product(call, launch, (starts, entries, coefficients), first, documents, rows, blocks, tiles)


def _row_norms(call: _Call) -> Tensor:
    norms = torch.empty(call.Q.shape[:2], dtype=torch.float32, device=call.Q.device)
    launch = configs.gather(call.Q.dtype, call.d, **call.layout())
    grid = _check_grid(call.sizes.Nq * triton.cdiv(call.sizes.Lq, launch.config.BM))
    list_kernels.maxsim_row_norms[grid](
        call.queries, norms, call.sizes.Nq, call.sizes.Lq, call.d, launch.config, **launch.options(call.arch)
    )
    return norms


def _list(
    call: _Call,
    launch: Launch,
    norms: Tensor | None,
    lists: tuple[Tensor, Tensor, Tensor],
    first: int,
    documents: int,
    rows: int,
    blocks: int,
    tiles: int,
) -> None:
    starts, entries, coefficients = lists
    config, options = launch.config, launch.options(call.arch)
    grid = _check_grid(documents * blocks)
    if blocks > 1:
        list_kernels.maxsim_count_winners[grid](call.up, starts, first, rows, blocks, tiles, config, **options)
        scan = config._replace(BM=min(config.BM, 1024))
        list_kernels.maxsim_scan_counts[(documents,)](starts, tiles * blocks, scan, num_warps=4)
    list_kernels.maxsim_list_winners[grid](
        call.queries,
        call.up,
        norms,
        starts,
        entries,
        coefficients,
        first,
        rows,
        blocks,
        tiles,
        call.sizes.Lq,
        blocks == 1,
        config,
        **options,
    )


def _product(
    call: _Call,
    launch: Launch,
    lists: tuple[Tensor, Tensor, Tensor] | None,
    first: int,
    documents: int,
    rows: int,
    blocks: int,
    tiles: int,
) -> None:
    document_kernels.maxsim_grad_documents[_check_grid(documents * tiles)](
        call.queries,
        call.documents,
        call.up,
        lists,
        call.grad_D,
        first,
        rows,
        blocks,
        tiles,
        *call.sizes,
        call.d,
        launch.config,
        **launch.options(call.arch),
    )


def backward_lowmem(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    argmax: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of Q, D and q_weight, each element summed in a fixed order by the program that owns it."""
    grad_Q, grad_D, grad_weight = outputs = _outputs(Q, D, needs)
    if Q.numel() > 0 and D.numel() > 0:
        call = _call(grad_scores, Q, D, argmax, q_mask, q_weight, normalize, outputs, needs)
        with _on_device(Q.device):
            if needs[0] or needs[2]:
                _into_queries(call)
            if needs[1]:
                _into_documents(call)
    return grad_Q, grad_D, grad_weight


def _require_nondeterminism_allowed() -> None:
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
    X: Tensor, queries: Queries, sums: Tensor, grad: Tensor | None, grad_weight: Tensor | None, call: _Call
) -> None:
    """Write the gradient of the rows ``X [N, K, L, d]`` from their sums, and of their weights."""
    sizes = Sizes(X.shape[0], X.shape[1], X.shape[2], 0)
    launch = configs.gather(X.dtype, call.d, candidates=False, normalize=call.normalize, wide=_wide(X, X))
    grid = _check_grid(sizes.Nq * sizes.K * triton.cdiv(sizes.Lq, launch.config.BM))
    unified_kernels.maxsim_finish[grid](
        _documents(X, None),
        queries,
        sums,
        grad,
        grad_weight,
        *sizes,
        call.d,
        launch.config,
        **launch.options(call.arch),
    )


def backward_unified(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    argmax: Tensor,
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
    _require_nondeterminism_allowed()
    grad_Q, grad_D, grad_weight = outputs = _outputs(Q, D, needs)
    if Q.numel() == 0 or D.numel() == 0:
        return grad_Q, grad_D, grad_weight
    call = _call(grad_scores, Q, D, argmax, q_mask, q_weight, normalize, outputs, needs)
    sizes = call.sizes
    sum_Q = torch.zeros(Q.shape, dtype=torch.float32, device=Q.device) if needs[0] or needs[2] else None
    sum_D = torch.zeros(D.shape, dtype=torch.float32, device=Q.device) if needs[1] else None
    launch = configs.gather(Q.dtype, call.d, **call.layout())
    row_tiles = sizes.Nq * triton.cdiv(sizes.Lq, launch.config.BM)
    K_per_program = max(1, triton.cdiv(sizes.K * row_tiles, _SCATTER_PROGRAMS), min(sizes.K, launch.config.BN))
    with _on_device(Q.device):
        grid = (*_check_grid(row_tiles), triton.cdiv(sizes.K, K_per_program))
        unified_kernels.maxsim_scatter[grid](
            call.queries,
            call.documents,
            call.up,
            sum_Q,
            sum_D,
            *sizes,
            call.d,
            K_per_program,
            launch.config,
            **launch.options(call.arch),
        )
        if sum_Q is not None:
            _finish(Q.unsqueeze(1), call.queries, sum_Q, call.grad_Q, call.grad_weight, call)
        if sum_D is not None:
            documents = D if call.candidates else D.unsqueeze(0)
            _finish(documents, call.queries._replace(weight=None), sum_D, call.grad_D, None, call)
    return grad_Q, grad_D, grad_weight
