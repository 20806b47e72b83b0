"""Top-k over processes, each of which searches a part of the corpus."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.arguments import (
    DTYPES,
    as_device,
    check_flag,
    check_has_values,
    check_no_dtensor,
    check_strided,
    check_tensor,
    describe_type,
)
from ..ops import topk
from ..ops.stack import autocast
from ..retrieval import shards, sources
from .agreement import Agreement, check_group, get_current_device, get_device_code, is_host_group, resolve_group
from .gathering import NO_QUERIES, SearchQueries, broadcast_queries, describe_queries, merge_best

if TYPE_CHECKING:
    import numpy as np

    from ..formats.index import Index
    from ..formats.quantized import Quantized
    from ..retrieval import Corpus

_RETRIEVE = "distributed.retrieve"
_NO_STAGES = {"n_candidates": None, "n_probe": None}

# Groups of which rank 0 did not have to send its queries in the last call. It has to before it searches, or a GPU that
# is full lets them wait; in these groups it searches before it knows. A wrong guess costs time, nothing else.
_groups_with_queries: weakref.WeakSet[Any] = weakref.WeakSet()


class _RankArgs(NamedTuple):
    """The arguments of a rank, found right."""

    shard: (
        shards.StreamedTarget | shards.ResidentTarget | None
    )  # None: of no documents, of which only other ranks know d and dtype
    begin: int
    end: int
    queries: SearchQueries | None  # None: they come from rank 0
    device: torch.device  # where it searches
    kind: tuple[int, int] = (-1, -1)  # d, and the place of the dtype of documents in `DTYPES`

    def is_launched(self) -> bool:
        """Whether the host need not wait for the search."""
        return isinstance(self.shard, shards.ResidentTarget) and self.shard.is_launched

    def best(self, queries: SearchQueries, top_k: int, options: dict) -> shards.RangeResult:
        shard = self.shard
        if shard is None:
            nothing = queries.Q.new_empty((0, 1, queries.Q.shape[-1]))
            shard = shards.make_target(_RETRIEVE, nothing, None, None, _NO_STAGES)
        return shard.best(queries, top_k, self.begin, self.end, options)

    def numbers(self) -> list[int]:
        """What the other ranks have to know."""
        about = NO_QUERIES if self.queries is None else describe_queries(self.queries)
        return [self.begin, self.end, get_device_code(self.device), *self.kind, *about]


def _prepare_rank(alike: dict, queries: tuple, documents: tuple, stages: dict, group: Any, device: Any) -> _RankArgs:
    """The arguments, or an error that says what is wrong; `alike` has the options, and gets what else must be equal."""
    op, top_k, (corpus, d_mask, cu_seqlens_d) = _RETRIEVE, alike["top_k"], documents
    for name, x in zip(("Q", "q_mask", "q_weight"), queries, strict=True):
        check_tensor(op, name, x, or_none=True)
    if isinstance(corpus, Tensor) and not corpus.is_nested:
        check_strided(op, "D", corpus)
    if queries[0] is not None:
        check_has_values(op, "Q", queries[0])
    at = get_current_device(group) if device is None else as_device(op, device)
    if at.type == "meta":
        raise ValueError(f"{op}: device: expected one with values, got meta")
    if isinstance(corpus, (list, tuple)) and not corpus and _is_document_only(queries[0], d_mask, cu_seqlens_d, stages):
        alike["documents"] = None if alike["sharded"] else 0
        return _RankArgs(None, 0, 0, None, at)
    shard = shards.make_target(op, corpus, d_mask, cu_seqlens_d, stages, queries[0])
    D, d_mask, cu_seqlens_d = shard.sample()
    Q, q_mask, q_weight = queries if queries[0] is not None else (D.new_empty((0, 1, D.shape[-1])), None, None)
    if isinstance(shard, shards.StreamedTarget):
        D, d_mask = D.to(Q.device), None if d_mask is None else d_mask.to(Q.device)
    Q, like, q_weight = autocast.cast_to_autocast(Q, D[:0], q_weight)
    sources.check_dtype(op, Q, like.dtype)
    # Of the region's dtype, and as large, without the memory.
    D = D if like.dtype == D.dtype else like.new_empty(()).expand(D.shape)
    tensors = Q, D, q_mask, d_mask, cu_seqlens_d, q_weight
    topk.check_search_args(op, topk.SearchArgs(*tensors, normalize=False, top_k=top_k, chunk=None))
    begin, end = 0, shard.size
    if not alike["sharded"]:
        begin, end = shard.split(dist.get_world_size(group))[dist.get_rank(group)]
        alike["documents"] = shard.size
    of_documents = D.shape[-1], DTYPES.index(D.dtype)
    if queries[0] is not None:
        return _RankArgs(shard, begin, end, SearchQueries(Q, q_mask, q_weight), Q.device, of_documents)
    return _RankArgs(shard, begin, end, None, shard.device or at, of_documents)


def _is_document_only(Q: Any, d_mask: Any, cu_seqlens_d: Any, stages: dict) -> bool:
    """Return whether nothing but the documents says what their d and dtype are, and nothing is wrong next to none."""
    return Q is None and d_mask is None and cu_seqlens_d is None and all(stages[name] is None for name in _NO_STAGES)


def _check_kinds(agreement: Agreement, kinds: list[list[int]]) -> None:
    """Raise unless all ranks that know d and the dtype of documents have the same."""
    known = [x for x in kinds if x != [-1, -1]]
    d, dtype = kinds[dist.get_rank(agreement.group)]
    mine = {"d": d if d >= 0 else None, "dtype": DTYPES[dtype] if dtype >= 0 else None}
    unlike = {name: mine[name] for n, name in enumerate(mine) if len({x[n] for x in known}) > 1}
    if unlike:
        agreement.compare(unlike)


def _needs_broadcast(agreement: Agreement, queries: SearchQueries | None, about: list[list[int]]) -> bool:
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


def _count_documents(ranges: list[list[int]], sharded: bool) -> list[int]:
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
            after another, in the order of the ranks. They may differ in size, and be empty, but not in d and dtype. An
            empty list has those of the other ranks.
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
    alike: dict[str, Any] = {"sharded": sharded is True, "documents": None, "normalize": normalize is True}
    stages = {"n_candidates": n_candidates, "n_probe": n_probe}
    # Other ranks receive these, also where one is not a count and the call raises.
    counts = {"top_k": top_k} | stages
    alike |= {name: x if x is None or isinstance(x, int) else describe_type(x) for name, x in counts.items()}
    call, found, error = None, None, None
    try:
        for name, flag in (("normalize", normalize), ("sharded", sharded), ("progress", progress or False)):
            check_flag(_RETRIEVE, name, flag)
        topk.reject_derivatives(_RETRIEVE, Q, corpus, q_weight)
        check_no_dtensor(_RETRIEVE, Q=Q, D=corpus)
        topk.check_counts(_RETRIEVE, top_k, chunk)
        documents = corpus, d_mask, cu_seqlens_d
        call = _prepare_rank(alike, (Q, q_mask, q_weight), documents, stages | {"chunk": chunk}, group, device)
        if is_host_group(group):
            found = _launch_early(call, top_k, group, options)
    except Exception as failure:  # of any kind: the others wait for this rank
        error = failure
    numbers = [0, 0, 0, -1, -1, *NO_QUERIES] if call is None else call.numbers()
    agreement = Agreement(_RETRIEVE, group, (corpus, Q), alike, numbers, error)
    if call is not None and not is_host_group(group):
        found = _launch_early(call, top_k, group, options)
    return _finish_search(call, found, agreement, top_k, sharded, group, options)


def _launch_early(call: _RankArgs, top_k: int, group: Any, options: dict) -> shards.RangeResult | None:
    """The search, where it can begin before it is known what the other ranks say: else None."""
    if call.queries is None or not call.is_launched():
        return None
    if dist.get_rank(group) == 0 and resolve_group(group) not in _groups_with_queries:
        return None
    return call.best(call.queries, top_k, options)


def _finish_search(
    call: _RankArgs | None,
    found: shards.RangeResult | None,
    agreement: Agreement,
    top_k: int,
    sharded: bool,
    group: Any,
    options: dict,
) -> topk.ScoresAndIndices:
    """The search, unless it was `found`, and the best of all ranks."""
    told = agreement.wait()
    assert call is not None, "or waiting had raised what is wrong"
    rank, all_ranks = dist.get_rank(group), resolve_group(group)
    _check_kinds(agreement, [x[3:5] for x in told])
    documents, everywhere = _count_documents([x[:2] for x in told], sharded), len({x[2] for x in told}) == 1
    queries = call.queries
    if _needs_broadcast(agreement, queries, [x[5:] for x in told]):
        _groups_with_queries.discard(all_ranks)
        queries = broadcast_queries(queries, told[0][5:], group, call.device, everywhere)
    else:
        _groups_with_queries.add(all_ranks)
    assert queries is not None
    if found is None:
        found = call.best(queries, top_k, options)
    first = found.first + (sum(documents[:rank]) if sharded else 0)
    if isinstance(call.shard, shards.ResidentTarget) and call.shard.is_staged:
        values, indices = found.best
        found.best = values, indices.where(indices >= 0, -1 - first)  # -1 again, once `first` is added
    scores, indices = merge_best(found.best, first, documents, top_k, group, everywhere)
    return (scores.squeeze(0), indices.squeeze(0)) if queries.Q.dim() == 2 else (scores, indices)
