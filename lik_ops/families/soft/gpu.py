"""Soft MaxSim by Triton kernels: the forward of dense tokens with soft maxima, and gradients by those who own them."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.arguments import metadata
from ...core.segments import Dense
from ...csrc_triton.backward.arguments import RowSums
from ...csrc_triton.backward.unified import maxsim_finish
from ...csrc_triton.common.arguments import Output
from ...csrc_triton.soft.backward import maxsim_soft_documents, maxsim_soft_queries
from ...csrc_triton.soft.forward import maxsim_forward_soft
from ...gpu.runtime import launcher
from ...gpu.runtime.arguments import (
    allow_tf32,
    architecture,
    checked_grid,
    describable,
    descriptor,
    documents_of,
    on_device,
    queries_of,
    sizes,
    wide_of,
)
from ...gpu.runtime.capture import Calls
from ...gpu.tuning.architectures import Kind, cdiv
from ...gpu.tuning.backward_configs import gather
from ...portable.blocks import slices_within
from . import configs as soft_configs
from . import gpu_sm90 as soft_sm90
from .gpu_launches import SoftCall, Temperature

# Of sums in fp32 beyond what a step is given and returns; one query's or document's may be more. The least is what two
# programs on each unit of an H200 sum: fewer would leave it idle.
_LEAST_SUM_BYTES, _MOST_SUM_BYTES = 8 * 2**20, 24 * 2**20
_MOST_PARTS = 4  # of documents, whose sums for the queries are made side by side
_PART_TOKENS = 2048  # document tokens of a part at least
_INT32_MAX = 2**31 - 1
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
_calls = Calls()


def forward_soft(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    temperature: Temperature,
    normalize: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Scores ``[Nq, Nd]`` or ``[Nq, K]``, and soft maxima as `lik::maxsim_soft_fwd` has them, ``[0]`` unless `keep`."""
    x = Dense(Q, D, q_mask, d_mask, q_weight)
    tau, number = (temperature, None) if isinstance(temperature, Tensor) else (None, temperature)
    key = (*metadata(*x), number, normalize, keep, allow_tf32(Q.dtype))
    return _calls.run(key, (*x, tau), Q.device, _forward_soft, x, temperature, normalize, keep)


def _forward_soft(x: Dense, temperature: Temperature, normalize: bool, keep: bool) -> tuple[Tensor, Tensor]:
    Q, D = x.Q, x.D
    (Nq, K, Lq, _), candidates = sizes(Q, D), D.dim() == 4
    scores = torch.empty((Nq, K), dtype=torch.float32, device=Q.device)
    shape = ((Nq, K, Lq) if candidates else (K, Nq, Lq)) if keep else (0,)
    lse = torch.empty(shape, dtype=torch.float32, device=Q.device)
    if Nq * K == 0 or Lq == 0:
        return scores.zero_(), lse
    out = Output(scores, lse if keep else None)
    arch = architecture(Q.device)
    kind = Kind(arch, Q.dtype, Q.shape[-1], candidates, normalize, wide_of(Q, D))
    launch = soft_configs.forward(kind, Nq, Lq, tf32=allow_tf32(Q.dtype))
    reads = arch.has_descriptors and describable(D)
    tiles = descriptor(D, launch.config) if reads else None
    tokens = queries_of(Q, x.q_mask, x.q_weight), documents_of(D, x.d_mask), tiles
    args = *tokens, out, temperature, sizes(Q, D), Q.shape[-1]
    with on_device(Q.device):
        grid = checked_grid(launch.programs(Nq, K))
        launcher.launch(maxsim_forward_soft, grid, (*args, launch.config), launch.options(arch))
    return scores, lse


def _parts(K: int, Ld: int) -> int:
    """In how many parts documents are summed: whatever the queries are, so that these do not decide the bits."""
    return max(1, min(_MOST_PARTS, K, K * Ld // _PART_TOKENS))


def _joined(parts: Tensor) -> Tensor:
    """The sum of parts, in their order."""
    return functools.reduce(Tensor.add_, parts[1:].unbind(), parts[0])


def _finish(rows: Tensor, weight: Tensor | None, sums: Tensor, grad: Tensor, normalize: bool, parts: int = 1) -> None:
    """Write the gradient of `rows` ``[N, K, L, d]`` from parts of their sums."""
    N, K, L, d = rows.shape
    found = RowSums(sums, K, L) if parts == 1 else RowSums(sums, K, L, None, parts, rows.numel())
    wide = wide_of(rows, rows)
    launch = gather(Kind(architecture(rows.device), rows.dtype, d, False, normalize, wide))
    queries = queries_of(rows[:, 0], None, weight)
    args = documents_of(rows, None), queries, found, grad, None, d, launch.config
    grid = checked_grid(N * K * cdiv(L, launch.config.BM))
    launcher.launch(maxsim_finish, grid, args, launch.options(architecture(rows.device)))


class Room(NamedTuple):
    """Memory for sums."""

    size: int  # bytes that they may take
    taken: Tensor | None  # a gradient that is not written yet, if they lie there: then they take none

    def sums(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        count = math.prod(shape)
        if self.taken is None:
            return like.new_empty(shape, dtype=torch.float32)
        return self.taken.view(-1).view(torch.uint8)[: 4 * count].view(torch.float32).view(shape)


def room_for_sums(count: int, bytes_each: int, own: int, unwritten: Tensor | None = None) -> Room:
    """Memory for the sums of `count` queries or documents, or for those of so many at a time as it holds.

    A twentieth of `own`, the bytes of gradients and soft maxima, within limits; or, if it has as many, the gradient
    `unwritten`, whose turn comes later.
    """
    most = max(_LEAST_SUM_BYTES, min(own // 20, _MOST_SUM_BYTES))
    if unwritten is not None and unwritten.nbytes >= max(min(count * bytes_each, most), bytes_each):
        return Room(unwritten.nbytes, unwritten)
    return Room(most, None)


def _into_queries(c: SoftCall, needs: list[bool], grads: list[Tensor], room: Room) -> None:
    """Gradients of Q, q_weight and the temperature of the queries of `c`, the last added to what is there."""
    Nq, K, Lq, Ld = sizes(c.Q, c.D)
    parts, each = _parts(K, Ld), cdiv(K, _parts(K, Ld))
    new = functools.partial(c.Q.new_empty, dtype=torch.float32)
    sums = room.sums((parts, *c.Q.shape), c.Q) if needs[0] else None
    weights, spreads = (new((parts, Nq, Lq)) if need else None for need in needs[2:])
    made = sums is not None and soft_sm90.into_rows(c, sums, parts, each)
    grid = c.owners(Lq, Nq) if c.candidates else c.owners(Nq * Lq, 1), parts
    if not made or weights is not None:
        c.run(maxsim_soft_queries, grid, None if made else sums, weights, None, each)
    if spreads is not None:  # apart: registers spill else
        c.run(maxsim_soft_queries, grid, None, None, spreads, each)
    if sums is not None:
        _finish(c.Q.unsqueeze(1), c.q_weight, sums, grads[0], c.normalize, parts)
    if weights is not None:
        grads[2].copy_(_joined(weights))
    if spreads is not None:
        entropy = _joined(spreads)
        if c.q_weight is not None:
            w = c.q_weight if c.q_mask is None else torch.where(c.q_mask, c.q_weight, 0)
            entropy *= w
        grads[3].add_(entropy.sum() / c.temperature)


def _into_documents(c: SoftCall, grad: Tensor) -> None:
    Nq, K, _, Ld = sizes(c.Q, c.D)
    if soft_sm90.into_tokens(c, grad):
        return
    count = Nq * K if c.candidates else K
    sums = c.Q.new_empty(grad.shape, dtype=torch.float32) if c.sums_documents else grad
    c.run(maxsim_soft_documents, (c.owners(Ld, count), 1), sums)
    if c.sums_documents:
        rows, sums = (x if c.candidates else x.unsqueeze(0) for x in (c.D, sums))
        _finish(rows, None, sums, grad, True)


def backward_soft(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    lse: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    temperature: Temperature,
    normalize: bool,
    needs: list[bool],
) -> Gradients:
    """Gradients of Q, D, q_weight and the temperature, as `lik::maxsim_soft_bwd` has them."""
    if Q.shape[0] * Q.shape[1] > _INT32_MAX:
        raise ValueError(f"maxsim_soft_bwd: Q: expected at most {_INT32_MAX} tokens, got {list(Q.shape)}")
    grads = [
        torch.empty(x.shape if need else (0,), dtype=dtype, device=Q.device)
        for x, dtype, need in zip((Q, D, Q[..., 0]), (Q.dtype, Q.dtype, torch.float32), needs, strict=False)
    ]
    grads.append(torch.zeros(() if needs[3] else (0,), dtype=torch.float32, device=Q.device))
    if Q.numel() == 0 or D.numel() == 0:
        for grad in grads:
            grad.zero_()
        return tuple(grads)  # type: ignore[return-value]
    call = SoftCall(grad_scores, Q, D, lse.contiguous(), q_mask, d_mask, q_weight, temperature, normalize)
    with on_device(Q.device):
        _in_parts(call, needs, grads)
    return tuple(grads)  # type: ignore[return-value]


def _in_parts(call: SoftCall, needs: list[bool], grads: list[Tensor]) -> None:
    """Gradients of so many queries, then documents, at a time that there is room for their sums."""
    Nq, K, Lq, Ld = sizes(call.Q, call.D)
    d, candidates = call.Q.shape[-1], call.candidates
    kept = sum(x.nbytes for x in (*grads, call.lse))
    if needs[0] or needs[2] or needs[3]:
        bytes_each = 4 * d * Lq * _parts(K, Ld) if needs[0] else 0
        room = room_for_sums(Nq, bytes_each, kept, grads[1] if needs[1] else None)
        for own in slices_within(Nq, bytes_each, room.size):
            mine = [g[own] if n < 3 and needs[n] else g for n, g in enumerate(grads)]
            _into_queries(call.part(own), needs, mine, room)
    if needs[1]:
        documents = call.D.shape[0]
        bytes_each = 4 * d * Ld * (K if candidates else 1) if call.sums_documents else 0
        room = room_for_sums(documents, bytes_each, kept)
        for own in slices_within(documents, bytes_each, room.size):
            _into_documents(call.part(own) if candidates else call.some_documents(own), grads[1][own])
