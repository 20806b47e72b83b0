"""Retrieval and in-batch scoring over the processes of `torch.distributed`: gloo between CPUs, NCCL between GPUs.

Imported where it is used: ``lik_ops.distributed.retrieve(...)``, or ``from lik_ops import distributed``. Every process
of the group makes the same calls in the same order. Before anything large is sent, the processes tell each other what
they were called with, some hundred bytes each, so that a mistake of one is an error in all. When a process dies or does
not come, the others raise an error, at the latest after the timeout of the group.
"""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..arguments import as_bool, check, check_count, check_flag, check_strided
from ..ops import cross_entropy, topk
from ..ops.soft import check_temperature
from ..ops.stack import autocast
from ..retrieval import shards, sources
from .agreement import Agreement, check_group, current_device, members, on_host, wire
from .gathering import NO_QUERIES, Queries, broadcast, described, merged
from .ring import Ring, RingCrossEntropy, RingLossOptions, RingMaxSim, Round, ScoreOptions

if TYPE_CHECKING:
    import numpy as np

    from ..index import Index
    from ..quantized import Quantized
    from ..retrieval import Corpus

__all__ = ["maxsim_cross_entropy", "maxsim_inbatch", "retrieve"]

_RETRIEVE = "distributed.retrieve"
_GRADIENTS = ("requires_grad of Q or q_weight", "requires_grad of D")

# Groups of which rank 0 did not have to send its queries in the last call. It has to before it searches, or a GPU that
# is full lets them wait; in these groups it searches before it knows. A wrong guess costs time, nothing else.
_have_queries: weakref.WeakSet[Any] = weakref.WeakSet()


class _Rank(NamedTuple):
    """The arguments of a rank, found right."""

    shard: shards.Read | shards.Resident
    begin: int
    end: int
    queries: Queries | None  # None: they come from rank 0
    device: torch.device  # where it searches

    def is_launched(self) -> bool:
        """Whether the host need not wait for the search."""
        return isinstance(self.shard, shards.Resident) and self.shard.is_launched

    def best(self, queries: Queries, top_k: int, options: dict) -> shards.Found:
        return self.shard.best(queries, top_k, self.begin, self.end, options)

    def numbers(self) -> list[int]:
        """What the other ranks have to know."""
        about = NO_QUERIES if self.queries is None else described(self.queries)
        return [self.begin, self.end, _kind(self.device), *about]


def _kind(device: torch.device) -> int:
    """A number of the type of a device."""
    return int(device.type != "cpu")


def _opened(alike: dict, queries: tuple, documents: tuple, stages: dict, group: Any, device: Any) -> _Rank:
    """The arguments, or an error that says what is wrong; `alike` has the options, and gets what else must be equal."""
    op, top_k, (corpus, d_mask, cu_seqlens_d) = _RETRIEVE, alike["top_k"], documents
    for name, x in zip(("Q", "q_mask", "q_weight"), queries, strict=True):
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{op}: {name}: expected a Tensor or None, got {type(x).__name__}")
    if isinstance(corpus, Tensor) and not corpus.is_nested:
        check_strided(op, "D", corpus)
    shard = shards.shard(op, corpus, d_mask, cu_seqlens_d, stages)
    D, d_mask, cu_seqlens_d = shard.sample()
    Q, q_mask, q_weight = queries if queries[0] is not None else (D.new_empty((0, 1, D.shape[-1])), None, None)
    if isinstance(shard, shards.Read):
        D, d_mask = D.to(Q.device), None if d_mask is None else d_mask.to(Q.device)
    Q, like, q_weight = autocast.to_region(Q, D[:0], q_weight)
    sources.check_dtype(op, Q, like.dtype)
    # Of the region's dtype, and as large, without the memory.
    D = D if like.dtype == D.dtype else like.new_empty(()).expand(D.shape)
    tensors = Q, D, q_mask, d_mask, cu_seqlens_d, q_weight
    topk.check_arguments(op, topk.Search(*tensors, normalize=False, top_k=top_k, chunk=None))
    begin, end = 0, shard.size
    if not alike["sharded"]:
        begin, end = shard.split(dist.get_world_size(group))[dist.get_rank(group)]
        alike["documents"] = shard.size
    alike.update(dtype=D.dtype, d=D.shape[-1])
    if queries[0] is not None:
        return _Rank(shard, begin, end, Queries(Q, q_mask, q_weight), Q.device)
    at = shard.device or torch.device(current_device(group) if device is None else device)
    return _Rank(shard, begin, end, None, at)


def _has_to_send(agreement: Agreement, queries: Queries | None, about: list[list[int]]) -> bool:
    """Whether rank 0 alone has queries, of which each rank told `about`; raises what does not go together."""
    given = [rank for rank, x in enumerate(about) if x != NO_QUERIES]
    if given == [0] and len(about) > 1:
        return True
    if len(given) < len(about):
        raise ValueError(f"{_RETRIEVE}: Q: expected it on rank 0 alone or on all ranks, got it on {given}")
    if any(x != about[0] for x in about):
        assert queries is not None
        kinds = {n: None if x is None else (tuple(x.shape), x.dtype) for n, x in queries._asdict().items()}
        agreement.compare(kinds)
    return False


def _documents(ranges: list[list[int]], sharded: bool) -> list[int]:
    """How many documents each rank searches; they follow each other if the ranks were given the same corpus."""
    if not sharded and any(a[1] != b[0] for a, b in pairwise(ranges)):
        raise ValueError(f"{_RETRIEVE}: corpus: expected the same on all ranks, which would search {ranges} of it")
    return [end - begin for begin, end in ranges]


@torch.no_grad()
def retrieve(
    Q: Tensor | None,
    corpus: Tensor | np.ndarray | Corpus | Quantized | Index,
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
    sharded: bool = False,
    n_candidates: int | None = None,
    n_probe: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`lik_ops.retrieve` by all processes of a group, each searching a part of the corpus: the same bits.

    Each process is given the whole corpus, but reads only its part of it, a contiguous range of documents with about as
    many tokens as the others'; or, with `sharded`, it is given its part alone. The best of each are gathered and merged
    on all processes.

    A call has two collectives: a hundred bytes of each rank at its beginning, and the best at its end; a third one in
    between where rank 0 sends its queries. The host waits once, for the first of them. If all ranks have queries and
    corpus on their GPUs, the search runs meanwhile, and nothing else waits for a GPU. A group with a backend for the
    CPU beside NCCL, ``init_process_group("cpu:gloo,cuda:nccl")``, hides the first message wholly: it is sent once
    the search is launched, where NCCL alone needs the GPU for it before.

    Args:
        Q: queries, as in `lik_ops.retrieve`, the same on all ranks; or on rank 0 of the group alone, with its `q_mask`
            and `q_weight`, and None on all others.
        corpus: what `lik_ops.retrieve` takes as D, the same on all ranks; a `Corpus` in a shared directory, or a
            memory-mapped array, costs each process its part only. On a GPU it is split by tokens if it is packed with
            `cu_seqlens_d` on the CPU, else by number. Quantised documents, or an `Index`, are searched where they are.
        top_k, chunk, q_mask, d_mask, cu_seqlens_d, q_weight, normalize, progress: as in `lik_ops.retrieve`.
        group: the processes; None is all of them.
        device: where ranks that are sent their queries score, unless the corpus is on a GPU; None: the current CUDA
            device if the group has NCCL, else the CPU.
        sharded: `corpus` is this rank's shard, with its `d_mask` or `cu_seqlens_d`: the whole corpus is the shards one
            after another, in the order of the ranks. They may differ in size, and be empty, but not in d and dtype.
        n_candidates, n_probe: as in `lik_ops.retrieve`, of residual codes in memory; each process keeps so many
            candidates of its own documents, so that more is found than one process would.

    Returns:
        ``(scores, indices)`` of `lik_ops.retrieve` over the whole corpus, on every rank; indices count from the first
        document of rank 0.

    Raises:
        TypeError, ValueError: as `lik_ops.retrieve`; also when the ranks' arguments do not fit together, on all ranks.
        RuntimeError: `torch.distributed.init_process_group` was not called; or another process died or did not come
            within the timeout of the group.

    Example:
        >>> # torchrun --nproc-per-node 2 search.py
        >>> torch.distributed.init_process_group("gloo")  # between GPUs: "cpu:gloo,cuda:nccl"
        >>> D = torch.ones(100, 300, 128).cumsum(0)  # the same on all ranks; or a lik_ops.Corpus
        >>> Q = torch.randn(2, 32, 128) if torch.distributed.get_rank() == 0 else None
        >>> scores, indices = lik_ops.distributed.retrieve(Q, D, top_k=10)
        >>> # each rank its own documents: a corpus larger than one GPU
        >>> scores, indices = lik_ops.distributed.retrieve(Q, D, top_k=10, sharded=True)
        >>> scores.shape, indices.max().item() < 100 * torch.distributed.get_world_size()
        (torch.Size([2, 10]), True)
        >>> torch.distributed.destroy_process_group()
    """
    check_group(_RETRIEVE, group)
    options = {"chunk": chunk, "normalize": normalize, "progress": progress}
    alike: dict[str, Any] = {"sharded": bool(sharded), "documents": None, "top_k": top_k, "normalize": bool(normalize)}
    stages = {"n_candidates": n_candidates, "n_probe": n_probe}
    alike |= stages
    call, found, error = None, None, None
    try:
        for name, flag in (("normalize", normalize), ("sharded", sharded), ("progress", progress or False)):
            check_flag(_RETRIEVE, name, flag)
        topk.reject_derivatives(_RETRIEVE, Q, corpus, q_weight)
        topk.check_counts(_RETRIEVE, top_k, chunk)
        documents = corpus, d_mask, cu_seqlens_d
        call = _opened(alike, (Q, q_mask, q_weight), documents, stages | {"chunk": chunk}, group, device)
        if on_host(group):
            found = _launched(call, top_k, group, options)
    except Exception as failure:  # of any kind: the others wait for this rank
        error = failure
    numbers = [0, 0, 0, *NO_QUERIES] if call is None else call.numbers()
    agreement = Agreement(_RETRIEVE, group, (corpus, Q), alike, numbers, error)
    if call is not None and not on_host(group):
        found = _launched(call, top_k, group, options)
    return _together(call, found, agreement, top_k, sharded, group, options)


def _launched(call: _Rank, top_k: int, group: Any, options: dict) -> shards.Found | None:
    """The search, where it can begin before it is known what the other ranks say: else None."""
    if call.queries is None or not call.is_launched():
        return None
    if dist.get_rank(group) == 0 and members(group) not in _have_queries:
        return None
    return call.best(call.queries, top_k, options)


def _together(
    call: _Rank | None,
    found: shards.Found | None,
    agreement: Agreement,
    top_k: int,
    sharded: bool,
    group: Any,
    options: dict,
) -> topk.Best:
    """The search, unless it was `found`, and the best of all ranks."""
    told = agreement.wait()
    assert call is not None, "or waiting had raised what is wrong"
    rank, all_ranks = dist.get_rank(group), members(group)
    documents, everywhere = _documents([x[:2] for x in told], sharded), len({x[2] for x in told}) == 1
    queries = call.queries
    if _has_to_send(agreement, queries, [x[3:] for x in told]):
        _have_queries.discard(all_ranks)
        queries = broadcast(queries, told[0][3:], group, call.device, everywhere)
    else:
        _have_queries.add(all_ranks)
    assert queries is not None
    if found is None:
        found = call.best(queries, top_k, options)
    first = found.first + (sum(documents[:rank]) if sharded else 0)
    if isinstance(call.shard, shards.Resident) and call.shard.is_staged:
        values, indices = found.best
        found.best = values, indices.where(indices >= 0, -1 - first)  # -1 again, once `first` is added
    scores, indices = merged(found.best, first, documents, top_k, group, everywhere)
    return (scores.squeeze(0), indices.squeeze(0)) if queries.Q.dim() == 2 else (scores, indices)


def _alike(op: str, given: tuple, normalize: bool, backward: str) -> tuple[dict[str, Any], Exception | None]:
    """What has to be alike on all ranks, or what is wrong with this one's arguments."""
    Q, D, q_mask, d_mask, q_weight = given
    try:
        check_flag(op, "normalize", normalize)
        check(op, Q, D, q_mask, d_mask, q_weight, backward)
        if Q.dim() != 3 or D.dim() != 3:
            raise ValueError(f"{op}: Q, D: expected [Nq, Lq, d], [Nd, Ld, d], got {list(Q.shape)}, {list(D.shape)}")
    except (TypeError, ValueError) as error:
        return {}, error
    of_Q, of_D, of_weight = (torch.is_grad_enabled() and x is not None and x.requires_grad for x in (Q, D, q_weight))
    gradients = dict(zip(_GRADIENTS, (of_Q or of_weight, of_D), strict=True))
    return {"d": D.shape[2], "dtype": D.dtype, "normalize": normalize, **gradients}, None


class _Ready(NamedTuple):
    """Tensors of a ring that all ranks agreed on."""

    round: Round
    Q: Tensor
    D: Tensor
    q_weight: Tensor | None
    q_mask: Tensor | None
    d_mask: Tensor | None
    needs_grad: bool

    @property
    def tensors(self) -> tuple:
        return self[1:6]


def _agreed(
    op: str, given: tuple, normalize: bool, group: Any, backward: str = "auto", error: Exception | None = None
) -> _Ready:
    """Q, D, q_mask, d_mask and q_weight, once all ranks have said that theirs are right; else their errors.

    `error` is what is already known to be wrong with this one's arguments.
    """
    Q, D, q_mask, d_mask, q_weight = given
    alike, error = _alike(op, given, normalize, backward) if error is None else ({}, error)
    numbers = [0] * 5 if error is not None else [int(d_mask is not None), _kind(D.device), *D.shape]
    told = Agreement(op, group, (D, Q), alike, numbers, error).wait()
    if d_mask is None and any(masked for masked, *_ in told):
        d_mask = D.new_ones(D.shape[:2], dtype=torch.bool)
    everywhere = len({kind for _, kind, *_ in told}) == 1
    ring = Ring(group, wire(group, D.device, everywhere), D.device)
    needs_grad = any(alike[name] for name in _GRADIENTS)
    around = Round(ring, [tuple(shape) for _, _, *shape in told])
    return _Ready(around, Q, D, q_weight, as_bool(q_mask), as_bool(d_mask), needs_grad)


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
        RuntimeError: `torch.distributed.init_process_group` was not called; or another process died or did not come
            within the timeout of the group.

    Example:
        >>> # torchrun --nproc-per-node 2 train.py
        >>> torch.distributed.init_process_group("gloo")  # between GPUs: "cpu:gloo,cuda:nccl"
        >>> Q, D = torch.randn(8, 32, 128, requires_grad=True), torch.randn(8, 300, 128, requires_grad=True)
        >>> scores = lik_ops.distributed.maxsim_inbatch(Q, D)  # [8, 8 * the number of ranks]
        >>> labels = torch.distributed.get_rank() * len(D) + torch.arange(len(Q))  # document i answers query i
        >>> torch.nn.functional.cross_entropy(scores, labels).backward()
        >>> torch.distributed.destroy_process_group()
    """
    op = "distributed.maxsim_inbatch"
    check_group(op, group)
    Q, D, q_weight = autocast.to_region(Q, D, q_weight)
    ready = _agreed(op, (Q, D, q_mask, d_mask, q_weight), normalize, group, backward)
    options = ScoreOptions(ready.round, normalize, backward, ready.needs_grad and not recompute)
    return RingMaxSim.apply(*ready.tensors, options)


def maxsim_cross_entropy(
    Q: Tensor,
    D: Tensor,
    labels: Tensor | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    ignore_index: int = -100,
    reduction: str = "mean",
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`lik_ops.maxsim_cross_entropy` of this process's queries, with the documents of all processes.

    ``F.cross_entropy(maxsim_inbatch(Q, D) / temperature, labels)`` without the scores: documents go round a ring as in
    `maxsim_inbatch`, and of each query two numbers stay. The backward goes round once more, finds the scores and
    winners of each block again, in parts of at most 24 MiB, and brings the gradients of the documents home. Every
    process has to call it, and has to call ``backward`` where one does.

    Args:
        Q: this process's queries ``[Nq, Lq, d]``; as many or as long as it likes.
        D: this process's documents ``[Nd, Ld, d]``; the same `d` and dtype on all ranks.
        labels: ``[Nq]``, int32 or int64: the right document of each query among those of all processes, in the order of
            the ranks. None: document i of this process for its query i. A label that is no document makes the loss of
            its query NaN.
        q_mask, d_mask, q_weight, normalize: as in `lik_ops.maxsim`. A rank without `d_mask` keeps all tokens.
        temperature, ignore_index: as in `lik_ops.maxsim_cross_entropy`.
        reduction: ``"mean"`` over this process's queries that are not ignored, ``"sum"``, or ``"none"``.
        group: the processes; None is all of them.

    Returns:
        The loss of this process's queries, as `lik_ops.maxsim_cross_entropy` has it. Differentiable in Q, D, `q_weight`
        and the temperature: D receives the gradients of all processes' losses, as if one process had computed their
        sum. A process's part of them is rounded to the dtype of D, the parts are added in fp32 (fp64).

    Raises:
        TypeError, ValueError: as `lik_ops.maxsim_cross_entropy`; also when the ranks' arguments do not fit together, on
            all ranks.
        RuntimeError: `torch.distributed.init_process_group` was not called; or another process died or did not come
            within the timeout of the group.

    Example:
        >>> # torchrun --nproc-per-node 2 train.py
        >>> torch.distributed.init_process_group("gloo")  # between GPUs: "cpu:gloo,cuda:nccl"
        >>> Q, D = torch.randn(8, 32, 128, requires_grad=True), torch.randn(8, 300, 128, requires_grad=True)
        >>> loss = lik_ops.distributed.maxsim_cross_entropy(Q, D, temperature=0.02, normalize=True)
        >>> loss.backward()  # with negatives of all ranks
        >>> torch.distributed.destroy_process_group()
    """
    op = "distributed.maxsim_cross_entropy"
    check_group(op, group)
    Q, D, q_weight = autocast.to_region(Q, D, q_weight)
    error: Exception | None = None
    try:
        cross_entropy.check_call(op, (Q, D, q_mask, d_mask, q_weight, labels), normalize, reduction)
        check_temperature(op, temperature, Q)
        check_count(op, "ignore_index", ignore_index, -(2**63))
        if isinstance(temperature, Tensor):
            q_weight, temperature = cross_entropy.weights_over(temperature, Q, as_bool(q_mask), q_weight), 1.0
    except (TypeError, ValueError) as wrong:
        error = wrong
    ready = _agreed(op, (Q, D, q_mask, d_mask, q_weight), normalize, group, error=error)
    if labels is None:
        labels = ready.round.columns(0).start + cross_entropy.default_labels(Q, D)
    options = RingLossOptions(ready.round, float(temperature), ignore_index, normalize)
    losses = RingCrossEntropy.apply(*ready.tensors, labels, options)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (labels != ignore_index).sum()
