"""Top-k search over processes that each search a part of the corpus."""

from __future__ import annotations

import weakref
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..api import inputs
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
from ..formats.index import Index
from ..formats.quantized import Quantized
from ..ops import topk
from ..ops.stack import autocast
from ..retrieval import shards, sources
from ..retrieval.argmax import find_argmax, fix_snapshot
from ..retrieval.arguments import as_mask_or_integers, drop_query_axis
from ..retrieval.subset import pad_results, resolve_subset
from .agreement import (
    Agreement,
    check_group,
    choose_wire_device,
    get_current_device,
    is_host_group,
    resolve_group,
)
from .gathering import NO_QUERIES, SearchQueries, broadcast_queries, describe_queries, merge_best

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from ..retrieval import Corpus

_RETRIEVE = "distributed.retrieve"
_NO_STAGES = {"n_candidates": None, "n_probe": None}

# Groups in which rank 0 did not send its queries in the last call. Queries must be sent before the search is launched,
# because a full GPU would delay them. In these groups, rank 0 launches the search early and assumes that no queries are
# sent. A wrong guess only costs time.
_groups_with_queries: weakref.WeakSet[Any] = weakref.WeakSet()


class _RankSizes(NamedTuple):
    """The integers that a rank sends to the others, followed by the integers of `describe_queries`."""

    begin: int  # the documents that the rank searches
    end: int
    device_kind: int  # 0 for a CPU, 1 for others
    d: int  # -1 if unknown
    dtype: int  # the index of the document dtype in `DTYPES`, -1 if unknown
    documents: int  # of the shard
    width: int


class _RankArgs(NamedTuple):
    """The checked arguments of a rank."""

    # None: no documents, with a d and dtype that only other ranks know.
    shard: shards.StreamedTarget | shards.ResidentTarget | None
    begin: int
    end: int
    queries: SearchQueries | None  # None: they come from rank 0
    device: torch.device  # the device of the search
    kind: tuple[int, int] = (-1, -1)  # `d` and `dtype` of `_RankSizes`

    def is_launched(self) -> bool:
        """Return whether the search is launched without waiting on the host."""
        return isinstance(self.shard, shards.ResidentTarget) and self.shard.is_launched

    def best(self, queries: SearchQueries, top_k: int, options: dict) -> shards.RangeResult:
        """Return the best documents of this rank's part."""
        shard = self.shard
        if shard is None:
            empty_documents = queries.Q.new_empty((0, 1, queries.Q.shape[-1]))
            shard = shards.make_target(_RETRIEVE, empty_documents, None, None, _NO_STAGES)
        return shard.best(queries, top_k, self.begin, self.end, options)

    def to_integers(self) -> list[int]:
        """Return the integers that the other ranks need."""
        description = NO_QUERIES if self.queries is None else describe_queries(self.queries)
        sizes = (0, 0) if self.shard is None else (self.shard.documents, self.shard.width)
        return [*_RankSizes(self.begin, self.end, int(self.device.type != "cpu"), *self.kind, *sizes), *description]


def _prepare_rank(
    alike: dict, queries: tuple, documents: tuple, subset: Any, stages: dict, group: Any, device: Any
) -> _RankArgs:
    """Return the checked arguments of this rank, or raise.

    `alike` has the options, and gets further arguments that must be equal on all ranks.
    """
    op, top_k, (corpus, d_mask, cu_seqlens_d) = _RETRIEVE, alike["top_k"], documents
    for name, x in zip(("Q", "q_mask", "q_weight"), queries, strict=True):
        check_tensor(op, name, x, or_none=True)
    if isinstance(corpus, Tensor) and not corpus.is_nested:
        check_strided(op, "D", corpus)
    if queries[0] is not None:
        check_has_values(op, "Q", queries[0])
    target_device = get_current_device(group) if device is None else as_device(op, device)
    if target_device.type == "meta":
        raise ValueError(f"{op}: device: expected one with values, got meta")
    if subset is not None:
        subset = as_mask_or_integers(op, "subset", subset)
        alike["subset"] = f"{subset.shape[0]} queries" if subset.dim() == 2 else "all queries"
    if isinstance(corpus, (list, tuple)) and not corpus and _is_document_only(queries[0], d_mask, cu_seqlens_d, stages):
        alike["documents"] = None if alike["sharded"] else 0
        if subset is not None:
            resolve_subset(op, subset, queries[0], 0, torch.device("cpu"))
        return _RankArgs(None, 0, 0, None, target_device)
    shard = shards.make_target(op, corpus, d_mask, cu_seqlens_d, stages, queries[0], subset)
    D, d_mask, cu_seqlens_d = shard.sample()
    Q, q_mask, q_weight = queries if queries[0] is not None else (D.new_empty((0, 1, D.shape[-1])), None, None)
    if isinstance(shard, shards.StreamedTarget):
        D, d_mask = D.to(Q.device), None if d_mask is None else d_mask.to(Q.device)
    Q, empty_D, q_weight = autocast.cast_to_autocast(Q, D[:0], q_weight)
    sources.check_dtype(op, Q, empty_D.dtype)
    # A placeholder of the same shape in the dtype of the autocast region.
    D = D if empty_D.dtype == D.dtype else empty_D.new_empty(()).expand(D.shape)
    tensors = Q, D, q_mask, d_mask, cu_seqlens_d, q_weight
    topk.check_search_args(op, topk.SearchArgs(*tensors, normalize=False, top_k=top_k, chunk=None))
    begin, end = 0, shard.size
    if not alike["sharded"]:
        begin, end = shard.split(dist.get_world_size(group))[dist.get_rank(group)]
        alike["documents"] = shard.documents
        if subset is not None:
            alike["subset"] += f", {shard.size} documents"
    document_kind = D.shape[-1], DTYPES.index(D.dtype)
    if queries[0] is not None:
        return _RankArgs(shard, begin, end, SearchQueries(Q, q_mask, q_weight), Q.device, document_kind)
    return _RankArgs(shard, begin, end, None, shard.device or target_device, document_kind)


def _is_document_only(Q: Any, d_mask: Any, cu_seqlens_d: Any, stages: dict) -> bool:
    """Return whether only the documents determine d and dtype, and no other argument is given."""
    return Q is None and d_mask is None and cu_seqlens_d is None and all(stages[name] is None for name in _NO_STAGES)


def _check_kinds(agreement: Agreement, sizes: list[_RankSizes]) -> None:
    """Raise unless all ranks that know d and dtype of the documents agree on them."""
    own = sizes[dist.get_rank(agreement.group)]
    kind = {"d": own.d, "dtype": DTYPES[own.dtype]} if own.d >= 0 else {"d": None, "dtype": None}
    differences = {name: x for name, x in kind.items() if len({getattr(size, name) for size in sizes} - {-1}) > 1}
    if differences:
        agreement.compare(differences)


def _needs_broadcast(agreement: Agreement, queries: SearchQueries | None, about: list[list[int]]) -> bool:
    """Return whether only rank 0 has queries. Raise if the queries of the ranks do not fit together."""
    query_ranks = [rank for rank, x in enumerate(about) if x != NO_QUERIES]
    if query_ranks == [0] and len(about) > 1:
        return True
    if len(query_ranks) < len(about):
        raise ValueError(f"{_RETRIEVE}: Q: expected it on rank 0 alone or on all ranks, got it on {query_ranks}")
    if any(x != about[0] for x in about):
        assert queries is not None
        kinds = {n: None if x is None else (tuple(x.shape), x.dtype) for n, x in queries._asdict().items()}
        agreement.compare(kinds)
    return False


def _count_documents(sizes: list[_RankSizes], sharded: bool) -> list[int]:
    """Return the number of documents that each rank searches. Raise if the ranges of one corpus are not contiguous."""
    ranges = [[x.begin, x.end] for x in sizes]
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
    subset: Tensor | np.ndarray | Sequence | None = None,
    return_argmax: bool = False,
) -> tuple[Tensor, ...]:
    """Run `lik_ops.retrieve` on all processes of a group, which each search a part of the corpus.

    The result has the same bits as `lik_ops.retrieve`. Each process gets the whole corpus, but reads only its part. The
    parts are contiguous ranges of documents with about the same number of tokens. With `sharded`, each process gets
    only its own part. The best documents of all parts are gathered and merged on all processes.

    A call has two collectives: a hundred bytes of each rank at the beginning, and the best documents at the end. If
    only rank 0 has the queries, a third collective sends them. The host waits once, for the first collective. If all
    ranks have queries and corpus on their GPUs, the search runs meanwhile, and nothing else waits for a GPU. A group
    with a CPU backend in addition to NCCL, ``init_process_group("cpu:gloo,cuda:nccl")``, hides the first message
    completely, because it is sent after the search is launched. NCCL alone needs the GPU for the message before the
    search.

    Args:
        Q: queries, as in `lik_ops.retrieve`, the same on all ranks. Alternatively, rank 0 of the group passes Q,
            `q_mask` and `q_weight`, and all other ranks pass None.
        corpus: documents, as D in `lik_ops.retrieve`, the same on all ranks. With a `Corpus` in a shared directory or a
            memory-mapped array, each process reads only its part. A corpus on a GPU is split by tokens if it is packed
            with `cu_seqlens_d` on the CPU, else by the number of documents. Quantized documents and an `Index` are
            searched in place.
        top_k: the number of documents to return for each query.
        group: the processes. None is all processes.
        chunk: the number of documents to score at a time, as in `lik_ops.retrieve`.
        q_mask: query tokens to keep, as in `lik_ops.retrieve`.
        d_mask: document tokens to keep, as in `lik_ops.retrieve`.
        cu_seqlens_d: the bounds of packed documents, as in `lik_ops.retrieve`.
        q_weight: the weight of each query token, as in `lik_ops.retrieve`.
        normalize: L2-normalize every token first.
        progress: show a progress bar, as in `lik_ops.retrieve`.
        device: the device on which ranks score queries that rank 0 sends, unless the corpus is on a GPU. None is the
            current CUDA device if the group has NCCL, else the CPU.
        sharded: `corpus` is only the shard of this rank, with its `d_mask` or `cu_seqlens_d`. The whole corpus is the
            concatenation of the shards in the order of ranks. Shards may differ in size and may be empty, but must
            agree in d and dtype. An empty list has the d and dtype of the other ranks.
        n_candidates: the number of candidates for residual codes in memory, as in `lik_ops.retrieve`. Each process
            keeps this number among its own documents, so the search finds more than a single process would.
        n_probe: the number of centroids to probe for residual codes in memory, as in `lik_ops.retrieve`.
        subset: the documents to search, as in `lik_ops.retrieve`, the same on all ranks. With `sharded`, each rank
            gives a mask or indices of its own documents. The subset is divided among the ranks.
        return_argmax: also return the argmax of the results, as in `lik_ops.retrieve`. It costs one more collective.

    Returns:
        ``(scores, indices)`` of `lik_ops.retrieve` over the whole corpus, on every rank. Indices count from the first
        document of rank 0. With `return_argmax`, the third value is its int64 ``[Nq, k, Lq]``.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong, or the arguments of the ranks do not fit together. It is
            raised on all ranks.
        RuntimeError: `torch.distributed.init_process_group` was not called, or another process died or did not make the
            call within the timeout of the group.

    Example:
        >>> # torchrun --nproc-per-node 2 search.py
        >>> # Between GPUs, the backend is "cpu:gloo,cuda:nccl".
        >>> torch.distributed.init_process_group("gloo")
        >>> # All ranks pass the same documents, or the same `lik_ops.Corpus`.
        >>> D = torch.ones(100, 300, 128).cumsum(0)
        >>> # Only rank 0 has the queries.
        >>> Q = torch.randn(2, 32, 128) if torch.distributed.get_rank() == 0 else None
        >>> scores, indices = lik_ops.distributed.retrieve(Q, D, top_k=10)
        >>> # With `sharded`, each rank passes its own documents.
        >>> scores, indices = lik_ops.distributed.retrieve(Q, D, top_k=10, sharded=True)
        >>> scores.shape, indices.max().item() < 100 * torch.distributed.get_world_size()
        (torch.Size([2, 10]), True)
        >>> torch.distributed.destroy_process_group()
    """
    check_group(_RETRIEVE, group)
    options = {"chunk": chunk, "normalize": normalize, "progress": progress}
    flags = {"normalize": normalize, "sharded": sharded, "return_argmax": return_argmax}
    stages = {"n_candidates": n_candidates, "n_probe": n_probe}
    # Sent to the other ranks even if a value is not a flag or a count and the call raises.
    shared_args: dict[str, Any] = {name: flag is True for name, flag in flags.items()}
    shared_args |= {"documents": None, "subset": None}
    for name, x in {"top_k": top_k, **stages}.items():
        shared_args[name] = x if x is None or isinstance(x, int) else describe_type(x)
    call, early_result, error = None, None, None
    try:
        for name, flag in {**flags, "progress": progress or False}.items():
            check_flag(_RETRIEVE, name, flag)
        corpus = fix_snapshot(corpus) if return_argmax else corpus
        topk.reject_derivatives(_RETRIEVE, Q, corpus, q_weight)
        check_no_dtensor(_RETRIEVE, Q=Q, D=corpus)
        topk.check_counts(_RETRIEVE, top_k, chunk)
        documents = corpus, d_mask, cu_seqlens_d
        stages |= {"chunk": chunk}
        call = _prepare_rank(shared_args, (Q, q_mask, q_weight), documents, subset, stages, group, device)
        if is_host_group(group):
            early_result = _launch_early(call, top_k, group, options)
    except Exception as failure:  # any error, because the other ranks wait for this one
        error = failure
    numbers = [] if call is None else call.to_integers()
    agreement = Agreement(_RETRIEVE, group, (corpus, Q), shared_args, numbers, error)
    if call is not None and not is_host_group(group):
        early_result = _launch_early(call, top_k, group, options)
    results = _finish_search(call, early_result, agreement, top_k, sharded, group, options)
    if not return_argmax:
        return results[:2]
    return *results[:2], _find_argmax(results, (corpus, d_mask, cu_seqlens_d), sharded, normalize, group)


def _launch_early(call: _RankArgs, top_k: int, group: Any, options: dict) -> shards.RangeResult | None:
    """Return the result of a search that can start before the other ranks have answered, else None."""
    if call.queries is None or not call.is_launched():
        return None
    if dist.get_rank(group) == 0 and resolve_group(group) not in _groups_with_queries:
        return None
    return call.best(call.queries, top_k, options)


class _Results(NamedTuple):
    """The results of a search, and what finding their argmax needs."""

    scores: Tensor
    indices: Tensor
    queries: SearchQueries
    ranges: list[tuple[int, int]]  # the global indices of the documents of each rank
    everywhere: bool  # whether all ranks search on devices of one type


def _find_argmax(results: _Results, documents: tuple, sharded: bool, normalize: bool, group: Any) -> Tensor:
    """Return the argmax of the results of all ranks.

    Each rank reads the documents of its shard, or an equal part of the documents that all ranks have.
    """
    rank, indices, (corpus, d_mask, cu_seqlens_d) = dist.get_rank(group), results.indices, documents
    if sharded:
        begin, end = results.ranges[rank]
        own_indices = torch.where((indices >= begin) & (indices < end), indices - begin, -1)
    else:
        column = torch.arange(indices.shape[-1], device=indices.device)
        own_indices = torch.where(column % dist.get_world_size(group) == rank, indices, -1)
    Q, q_mask, q_weight = results.queries
    if isinstance(corpus, Index):
        corpus, cu_seqlens_d = inputs.unpack_index(_RETRIEVE, corpus, cu_seqlens_d)
    if sharded and begin == end:
        argmax = own_indices.new_full((*own_indices.shape, Q.shape[-2]), -1)
    else:
        if not isinstance(corpus, Quantized):
            corpus, cu_seqlens_d = sources.pack_documents(_RETRIEVE, corpus, d_mask, cu_seqlens_d, Q)
        tensors = Q, corpus, q_mask, d_mask, cu_seqlens_d, q_weight
        argmax = find_argmax(_RETRIEVE, topk.SearchArgs(*tensors, normalize, 0, None), own_indices)
    message = argmax.to(choose_wire_device(group, argmax.device, results.everywhere)).contiguous()
    if message.numel():
        dist.all_reduce(message, dist.ReduceOp.MAX, group)  # -1 on all ranks but one
    return message.to(argmax.device)


def _finish_search(
    call: _RankArgs | None,
    range_result: shards.RangeResult | None,
    agreement: Agreement,
    top_k: int,
    sharded: bool,
    group: Any,
    options: dict,
) -> _Results:
    """Run the search unless it was launched early, and merge the best documents of all ranks."""
    rank_numbers = agreement.wait()
    assert call is not None, "`wait` raises the errors of invalid arguments"
    rank, all_ranks = dist.get_rank(group), resolve_group(group)
    sizes = [_RankSizes(*x[: -len(NO_QUERIES)]) for x in rank_numbers]
    _check_kinds(agreement, sizes)
    documents, is_same_device_type = _count_documents(sizes, sharded), len({x.device_kind for x in sizes}) == 1
    queries = call.queries
    descriptions = [x[-len(NO_QUERIES) :] for x in rank_numbers]
    if _needs_broadcast(agreement, queries, descriptions):
        _groups_with_queries.discard(all_ranks)
        queries = broadcast_queries(queries, descriptions[0], group, call.device, is_same_device_type)
    else:
        _groups_with_queries.add(all_ranks)
    assert queries is not None
    if range_result is None:
        range_result = call.best(queries, top_k, options)
    first = range_result.first + (sum(x.documents for x in sizes[:rank]) if sharded else 0)
    has_subset = agreement.alike["subset"] is not None
    if has_subset or (isinstance(call.shard, shards.ResidentTarget) and call.shard.is_staged):
        values, indices = range_result.best
        range_result.best = values, indices.where(indices >= 0, -1 - first)  # becomes -1 when `first` is added
    scores, indices = merge_best(range_result.best, first, documents, top_k, group, is_same_device_type, has_subset)
    if has_subset:
        width = sum(x.width for x in sizes) if sharded else sizes[rank].width
        scores, indices = pad_results((scores, indices), min(top_k, width))
    ends = [0, *accumulate(x.documents for x in sizes)]
    return _Results(*drop_query_axis(queries.Q, (scores, indices)), queries, [*pairwise(ends)], is_same_device_type)
