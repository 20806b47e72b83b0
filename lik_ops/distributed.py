"""Retrieval and in-batch scoring over the processes of `torch.distributed`: gloo between CPUs, NCCL between GPUs.

Imported where it is used: ``lik_ops.distributed.retrieve(...)``, or ``from lik_ops import distributed``. Every process
of the group makes the same calls in the same order. Before anything large is sent, the processes tell each other what
they were called with, so that a mistake of one is an error in all; this small exchange waits for the device. When a
process dies or does not come, the others raise an error, at the latest after the timeout of the group.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._layout import as_bool, check
from ._ring import Options, Ring, RingMaxSim
from .ops import autocast, topk
from .retrieval import _retrieve, sources

if TYPE_CHECKING:
    import numpy as np

    from .retrieval import Corpus

__all__ = ["maxsim_inbatch", "retrieve"]

_GRADIENTS = ("requires_grad of Q or q_weight", "requires_grad of D")


def _told(op: str, group: Any, described: dict[str, Any], error: Exception | None) -> list[dict[str, Any]]:
    """What each process of the group says of its call; an error of one of them is raised in all."""
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, {**described, "error": None if error is None else str(error)}, group=group)
    if error is not None:
        raise error
    for rank, other in enumerate(told):
        if other["error"] is not None:
            raise ValueError(f"{op}: rank {rank}: {other['error']}")
    return told


def _expect_alike(op: str, told: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    for name in names:
        found = [other.get(name) for other in told]
        if any(x != found[0] for x in found):
            raise ValueError(f"{op}: {name}: expected the same on all ranks, got {found}")


def _wire(group: Any, device: torch.device) -> torch.device:
    """Where the group's backend takes tensors from."""
    backend = str(dist.get_backend(group)).lower()
    return torch.device("cpu") if backend in ("gloo", "mpi") else device


def _queries(
    Q: Tensor | None, q_mask: Tensor | None, q_weight: Tensor | None, told: list[dict], group: Any, device: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The queries of rank 0 on all, if the others have none."""
    op = "distributed.retrieve"
    if all(other["Q"] is not None for other in told):
        _expect_alike(op, told, ("Q", "q_mask", "q_weight"))
        assert Q is not None
        return Q, q_mask, q_weight
    if told[0]["Q"] is None or any(other["Q"] is not None for other in told[1:]):
        given = [rank for rank, other in enumerate(told) if other["Q"] is not None]
        raise ValueError(f"{op}: Q: expected it on rank 0 alone or on all ranks, got it on {given}")
    if device is None:
        nccl = str(dist.get_backend(group)).lower() == "nccl"
        device = Q.device if Q is not None else torch.device("cuda", torch.cuda.current_device()) if nccl else "cpu"
    received: list[Any] = []
    for x, about in ((Q, told[0]["Q"]), (q_mask, told[0]["q_mask"]), (q_weight, told[0]["q_weight"])):
        if about is None:
            received.append(None)
            continue
        wire = _wire(group, torch.device(device))
        # As bytes: not every backend knows every dtype.
        sent = torch.empty(about[0], dtype=about[1], device=wire) if x is None else x.detach().to(wire).contiguous()
        if sent.numel():
            dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=0)
        received.append(sent.to(device) if x is None else x)
    return received[0], received[1], received[2]


class _Read:
    """A corpus that is read part by part."""

    def __init__(self, corpus: Any, d_mask: Tensor | None, cu_seqlens_d: Tensor | None) -> None:
        self.source = sources.source("distributed.retrieve", corpus, d_mask, cu_seqlens_d)
        self.size = len(self.source)

    def split(self, parts: int) -> list[tuple[int, int]]:
        return self.source.split(parts)

    def best(self, Q, top_k, begin, end, chunk, q_mask, q_weight, normalize, progress) -> topk.Best:
        options = {"chunk": chunk, "q_mask": q_mask, "q_weight": q_weight, "normalize": normalize}
        return _retrieve.of_source(Q, self.source, top_k, begin, end, progress=progress, **options)


class _Resident:
    """A corpus in the memory of each process's GPU, of which every process searches a part."""

    def __init__(self, D: Tensor, d_mask: Tensor | None, cu_seqlens_d: Tensor | None) -> None:
        self.D, self.d_mask, self.cu_seqlens_d = D, d_mask, cu_seqlens_d
        self.size = D.shape[0] if cu_seqlens_d is None else cu_seqlens_d.shape[0] - 1

    def split(self, parts: int) -> list[tuple[int, int]]:
        """By count: how long documents are is known on the device only."""
        bounds = [self.size * i // parts for i in range(parts + 1)]
        return list(pairwise(bounds))

    def best(self, Q, top_k, begin, end, chunk, q_mask, q_weight, normalize, progress) -> topk.Best:
        D, d_mask, cu_seqlens_d = self.D, self.d_mask, self.cu_seqlens_d
        if cu_seqlens_d is not None:
            cu_seqlens_d = cu_seqlens_d[begin : end + 1]
        else:
            D, d_mask = D[begin:end], None if d_mask is None else d_mask[begin:end]
        found = _retrieve.of_tensors(Q, D, top_k, chunk, q_mask, d_mask, cu_seqlens_d, q_weight, normalize)
        return found[0], found[1].add_(begin)


def _gathered(best: topk.Best, counts: list[int], group: Any) -> list[topk.Best]:
    """The best of every process: scores and indices in one message."""
    scores, indices = best
    integers = torch.int64 if scores.dtype == torch.float64 else torch.int32
    wire = _wire(group, scores.device)
    message = scores.new_zeros((2, scores.shape[0], max(counts)), dtype=torch.int64)
    message[0, :, : scores.shape[1]] = scores.view(integers)
    message[1, :, : scores.shape[1]] = indices
    message = message.to(wire)
    received = [torch.empty_like(message) for _ in counts]
    if message.numel():
        dist.all_gather(received, message, group=group)
    parts = []
    for count, other in zip(counts, received, strict=True):
        bits, found = other[:, :, :count].to(scores.device)
        parts.append((bits.to(integers).view(scores.dtype), found.contiguous()))
    return parts


def _opened(
    op: str, described: dict, queries: tuple, top_k: Any, chunk: Any, corpus: Any, d_mask: Any, cu_seqlens_d: Any
) -> tuple[Any, Exception | None]:
    """How a rank reads its part of the corpus, or what is wrong with its arguments; `described` tells the others."""
    try:
        for name, x in zip(("Q", "q_mask", "q_weight"), queries, strict=True):
            if x is not None and not isinstance(x, Tensor):
                raise TypeError(f"{op}: {name}: expected a Tensor or None, got {type(x).__name__}")
            described[name] = None if x is None else (tuple(x.shape), x.dtype)
        topk.check_counts(op, top_k, chunk)
        resident = isinstance(corpus, Tensor) and corpus.device.type != "cpu"
        shard = (_Resident if resident else _Read)(corpus, d_mask, cu_seqlens_d)
        described.update(documents=shard.size, top_k=top_k)
    except (TypeError, ValueError) as error:
        return None, error
    return shard, None


@torch.no_grad()
def retrieve(
    Q: Tensor | None,
    corpus: Tensor | np.ndarray | Corpus,
    top_k: int,
    group: dist.ProcessGroup | None = None,
    *,
    chunk: int | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    progress: bool | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """`lik_ops.retrieve` by all processes of a group, each searching a part of the corpus: the same bits.

    Each process is given the whole corpus, but reads only its part of it, a contiguous range of documents with about as
    many tokens as the others'. The best of each are gathered once and merged, on all processes.

    Args:
        Q: queries, as in `lik_ops.retrieve`, the same on all ranks; or on rank 0 of the group alone, with its `q_mask`
            and `q_weight`, and None on all others.
        corpus: what `lik_ops.retrieve` takes as D, the same on all ranks; a `Corpus` in a shared directory, or a
            memory-mapped array, costs each process its part only.
        top_k, chunk, q_mask, d_mask, cu_seqlens_d, q_weight, normalize, progress: as in `lik_ops.retrieve`.
        group: the processes; None is all of them.
        device: where ranks that are sent their queries score; None: the current CUDA device for NCCL, else the CPU.

    Returns:
        ``(scores, indices)`` of `lik_ops.retrieve` over the whole corpus, on every rank.

    Raises:
        TypeError, ValueError: as `lik_ops.retrieve`; also when the ranks' arguments do not fit together, on all ranks.
        RuntimeError: another process died or did not come within the timeout of the group.

    Example:
        >>> # torchrun --nproc-per-node 4 search.py
        >>> corpus = lik_ops.Corpus.open("/shared/corpus")
        >>> scores, indices = lik_ops.distributed.retrieve(Q if rank == 0 else None, corpus, top_k=10)
    """
    op = "distributed.retrieve"
    described: dict[str, Any] = {"normalize": normalize}
    shard, error = _opened(op, described, (Q, q_mask, q_weight), top_k, chunk, corpus, d_mask, cu_seqlens_d)
    told = _told(op, group, described, error)
    _expect_alike(op, told, ("documents", "top_k", "normalize"))
    Q, q_mask, q_weight = _queries(Q, q_mask, q_weight, told, group, device)
    ranges = shard.split(len(told))
    begin, end = ranges[dist.get_rank(group)]
    best = shard.best(Q, top_k, begin, end, chunk, q_mask, q_weight, normalize, progress)
    flat = Q.dim() == 2
    if flat:
        best = (best[0].unsqueeze(0), best[1].unsqueeze(0))
    counts = [min(top_k, e - b) for b, e in ranges]
    scores, indices = topk.merge(_gathered(best, counts, group), top_k)
    return (scores.squeeze(0), indices.squeeze(0)) if flat else (scores, indices)


def _described(
    op: str, Q: Any, D: Any, q_mask: Any, d_mask: Any, q_weight: Any, normalize: bool, backward: str
) -> tuple[dict[str, Any], Exception | None]:
    """What the other ranks have to know of this one's arguments, or what is wrong with them."""
    try:
        check(op, Q, D, q_mask, d_mask, q_weight, backward)
        if Q.dim() != 3 or D.dim() != 3:
            raise ValueError(f"{op}: Q, D: expected [Nq, Lq, d], [Nd, Ld, d], got {list(Q.shape)}, {list(D.shape)}")
    except (TypeError, ValueError) as error:
        return {}, error
    of_Q, of_D, of_weight = (torch.is_grad_enabled() and x is not None and x.requires_grad for x in (Q, D, q_weight))
    gradients = dict(zip(_GRADIENTS, (of_Q or of_weight, of_D), strict=True))
    shape = {"d": D.shape[2], "shape": tuple(D.shape), "masked": d_mask is not None}
    return {"dtype": D.dtype, "normalize": normalize, **shape, **gradients}, None


def maxsim_inbatch(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    backward: str = "auto",
    recompute: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`lik_ops.maxsim` of this process's queries against the documents of all processes, as negatives of each other.

    The documents go round a ring, one block at a time: no process ever holds more than two blocks, its own beside them,
    however many there are. The backward goes round once more and brings each block's gradient home. Every process has
    to call it, and has to call ``backward`` where one does.

    Args:
        Q: this process's queries ``[Nq, Lq, d]``; as many or as long as it likes.
        D: this process's documents ``[Nd, Ld, d]``; the same `d` and dtype on all ranks.
        q_mask, d_mask, q_weight, normalize, backward: as in `lik_ops.maxsim`. A rank without `d_mask` keeps all tokens.
        recompute: find the winners again in the backward. False keeps those of all blocks, which is faster, but takes
            memory that grows with the number of processes.
        group: the processes; None is all of them.

    Returns:
        Scores ``[Nq, sum of Nd]``, the documents in the order of the ranks: with the same `Nd` everywhere, document j
        of this process is column ``rank * Nd + j``. Differentiable in Q, D and `q_weight`: D receives the gradients of
        all processes' scores, as if one process had computed their sum. A process's part of them is rounded to the
        dtype of D, the parts are added in fp32 (fp64).

    Raises:
        TypeError, ValueError: as `lik_ops.maxsim`; also when the ranks' arguments do not fit together, on all ranks.
        RuntimeError: another process died or did not come within the timeout of the group.

    Example:
        >>> scores = lik_ops.distributed.maxsim_inbatch(Q, D, d_mask=d_mask)
        >>> labels = rank * len(D) + torch.arange(len(Q))
        >>> loss = torch.nn.functional.cross_entropy(scores, labels)
    """
    op = "distributed.maxsim_inbatch"
    Q, D, q_weight = autocast.to_region(Q, D, q_weight)
    described, error = _described(op, Q, D, q_mask, d_mask, q_weight, normalize, backward)
    told = _told(op, group, described, error)
    _expect_alike(op, told, ("d", "dtype", "normalize", *_GRADIENTS))
    if d_mask is None and any(other["masked"] for other in told):
        d_mask = D.new_ones(D.shape[:2], dtype=torch.bool)
    ring = Ring(group, _wire(group, D.device), D.device)
    needs_grad = any(described[name] for name in _GRADIENTS)
    options = Options(ring, [other["shape"] for other in told], normalize, backward, needs_grad and not recompute)
    return RingMaxSim.apply(Q, D, q_weight, as_bool(q_mask), as_bool(d_mask), options)
