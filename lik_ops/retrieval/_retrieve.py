"""`retrieve`: the best documents of each query, from tensors or from corpora larger than device memory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ..api import inputs
from ..api.inputs import Tokens
from ..core.arguments import check_flag, check_no_dtensor, check_tensor, short_repr
from ..formats.index import Index
from ..formats.quantized import Quantized
from ..ops import topk
from ..ops.stack import sharding
from ..ops.topk import ScoresAndIndices, SearchArgs
from . import _streamed, sources
from .argmax import TwoStageArgmax, find_argmax, fix_snapshot
from .arguments import add_query_axis, convert_search, drop_query_axis
from .store.layout import as_scorable
from .subset import (
    limit_to_part,
    list_union,
    name_results,
    negate_scores,
    pad_results,
    resolve_subset,
    search_chosen,
)
from .two_stage import TwoStage, retrieve_quantized, retrieve_two_stage, search_quantized

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from .store.corpus import Corpus

_OP = "retrieve"
# Under Dynamo of torch 2.11, `torch.compiler.is_exporting()` is true in all traced code. The flag behind it is read
# instead.
_READS_FLAG = TorchVersion(torch.__version__) < TorchVersion("2.13") and hasattr(torch.compiler, "_is_exporting_flag")


@overload
def retrieve(
    Q: Tokens,
    D: Tokens | Corpus | Quantized | Index,
    top_k: int,
    *,
    chunk: int | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    progress: bool | None = None,
    largest: bool = True,
    sorted: bool = True,
    coarse: None = None,
    n_candidates: int | None = None,
    n_probe: int | None = None,
    subset: Tensor | np.ndarray | Sequence | None = None,
    return_argmax: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...


@overload
def retrieve(
    Q: Tokens,
    D: Tokens | Corpus | Quantized | Index,
    top_k: int,
    *,
    chunk: int | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    progress: bool | None = None,
    largest: bool = True,
    sorted: bool = True,
    coarse: Quantized,
    n_candidates: int | None = None,
    n_probe: None = None,
    subset: Tensor | np.ndarray | Sequence | None = None,
    return_argmax: Literal[False] = False,
) -> TwoStage: ...


@overload
def retrieve(
    Q: Tokens,
    D: Tokens | Corpus | Quantized | Index,
    top_k: int,
    *,
    chunk: int | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    progress: bool | None = None,
    largest: bool = True,
    sorted: bool = True,
    coarse: None = None,
    n_candidates: int | None = None,
    n_probe: int | None = None,
    subset: Tensor | np.ndarray | Sequence | None = None,
    return_argmax: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def retrieve(
    Q: Tokens,
    D: Tokens | Corpus | Quantized | Index,
    top_k: int,
    *,
    chunk: int | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    progress: bool | None = None,
    largest: bool = True,
    sorted: bool = True,
    coarse: Quantized,
    n_candidates: int | None = None,
    n_probe: None = None,
    subset: Tensor | np.ndarray | Sequence | None = None,
    return_argmax: Literal[True],
) -> TwoStageArgmax: ...


def retrieve(
    Q: Tokens,
    D: Tokens | Corpus | Quantized | Index,
    top_k: int,
    *,
    chunk: int | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    progress: bool | None = None,
    largest: bool = True,
    sorted: bool = True,
    coarse: Quantized | None = None,
    n_candidates: int | None = None,
    n_probe: int | None = None,
    subset: Tensor | np.ndarray | Sequence | None = None,
    return_argmax: bool = False,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor] | TwoStage | TwoStageArgmax:
    """Return the `top_k` documents of each query with the highest `lik_ops.maxsim` scores.

    The search is exact and never stores the scores ``[Nq, Nd]``. Documents are scored in chunks, and only the best ones
    are kept. The bits of scores and indices do not depend on `chunk`. This function is for inference: the scores never
    require gradients. To train, score the returned documents with `lik_ops.maxsim`.

    Documents are returned in a fixed order. NaN comes first, so that an error in the data is visible. Then scores
    descend, and documents without tokens (``-inf``) come last. Equal scores, including 0.0 and -0.0, are ordered by
    document index.

    Args:
        Q: query token embeddings ``[Nq, Lq, d]``, or ``[Lq, d]`` for one query; fp16, bf16, fp32 or fp64. Lists and
            nested tensors are padded and masked. Tensors may also be numpy arrays, here and in the other arguments.
        D: document token embeddings of the same dtype: ``[Nd, Ld, d]``, or packed ``[Td, d]`` with `cu_seqlens_d`. D is
            a tensor on the device of Q or on the CPU, a ``numpy`` array (also memory-mapped), a list of ``[L_i, d]``
            tensors, a jagged nested tensor, or a `lik_ops.Corpus`. Lists and nested tensors are packed. Documents on
            another device than Q are copied in chunks, each while the previous chunk is scored. D may also be a
            `Quantized` or an `Index` of `read_index` on the device of Q.
        top_k: the number of documents to return for each query. If the corpus has fewer documents, all are returned. 0
            returns empty tensors.
        chunk: the number of documents to score at a time. None selects a number from the free memory.
        q_mask: query tokens to keep, with the shape of Q without d. The dtype is bool (True = keep), or an integer
            dtype read as ``!= 0``.
        d_mask: document tokens to keep, ``[Nd, Ld]``. Not allowed with `cu_seqlens_d`, a list or a `Corpus`.
        cu_seqlens_d: ``[Nd + 1]``, int32 or int64: the first row of each packed document, and the end of the last one.
            On the device of D or on the CPU.
        q_weight: the weight of each query token, with the shape of Q without d; fp32 (fp64 for fp64 inputs).
        normalize: L2-normalize every token first.
        progress: show a progress bar of documents, if tqdm is installed. None shows it if stderr is a terminal and the
            corpus is copied or read in chunks. Documents on a GPU are searched in one pass without a bar.
        largest: False returns the lowest scores instead of the highest. The order is then NaN, documents without
            tokens, and ascending scores. Not supported in compiled code.
        sorted: as in `torch.topk`. False allows any order, but the order is the same.
        coarse: the same documents quantized by `lik_ops.quantize`, on the device of Q. They bound the scores, and only
            documents that may be among the best are scored in full. The result has the same bits as a full search. D
            must be a tensor on the device of Q or on the CPU, or a `Corpus` without a format. Only the selected
            documents are read from D. Normalize tokens before quantizing them. For a `Corpus`, pass ``documents()[0]``
            of the result of `Corpus.quantize`.
        n_candidates: with `coarse`, the number of documents of each query to score in full, the best ones by `coarse`.
            This is faster if many documents may be among the best, but it is not exact. For residual codes in device
            memory, the number of documents to score by their full codes, the best ones by their centroids alone. None
            scores all documents exactly. With `n_probe`, None means ``4 * top_k``.
        n_probe: for residual codes, the number of nearest centroids that each query token probes. Documents without a
            token of a probed centroid are skipped. If fewer than `top_k` documents remain, the other indices are -1
            with score ``-inf``. With `n_probe` or `n_candidates`, documents without tokens are skipped too.
        subset: the documents to search: a mask ``[Nd]`` (True = search) or indices ``[K]``, or one for each query,
            ``[Nq, Nd]`` or ``[Nq, K]``. Index -1 is no document, and repeated indices count once. Other documents are
            not read. Indices of the result still count all documents. Results have the bits of a search of only these
            documents. A subset with fewer than `top_k` documents gives index -1 with score ``-inf``. On a GPU, an index
            out of range scores NaN. With `n_candidates`, the number applies to the subset.
        return_argmax: also return the document token that matched each query token.

    Returns:
        ``(scores, indices)``, both ``[Nq, min(top_k, Nd)]`` on the device of Q, or ``[Nq, min(top_k, K)]`` for a subset
        of K indices. Scores are fp32 (fp64 for fp64 inputs) and indices are int64. A 2-D Q drops the first axis. With
        `coarse`, the result is a named tuple with two more int64 fields ``[Nq]``. `rescored` is the number of documents
        that were scored in full. `proven` is the number of returned documents that are certain to be among the best.
        With `return_argmax`, the third value is int64 ``[Nq, k, Lq]``: the index of the token within each returned
        document, as in `lik_ops.maxsim_with_argmax`, and -1 without a document. The returned documents are scored once
        more for it.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.
        NotImplementedError: ``torch.func`` or forward-mode AD would differentiate the call. Detached tensors are
            accepted.

    Example:
        >>> Q, D = torch.randn(2, 32, 128), torch.randn(1000, 300, 128)
        >>> scores, indices = lik_ops.retrieve(Q, D, top_k=10, normalize=True)
        >>> scores.shape, indices.shape
        (torch.Size([2, 10]), torch.Size([2, 10]))
        >>> # The int8 scores select the documents to score in full.
        >>> found = lik_ops.retrieve(Q, D, top_k=10, coarse=lik_ops.quantize(D, "int8"))
        >>> found.proven.tolist()
        [10, 10]
    """
    if not (isinstance(Q, Tensor) and isinstance(D, Tensor) and q_mask is None and d_mask is None and q_weight is None):
        args = Q, D, q_mask, d_mask, cu_seqlens_d, q_weight
        Q, D, q_mask, d_mask, cu_seqlens_d, q_weight = convert_search(_OP, *args)
    topk.reject_derivatives(_OP, Q, D, q_weight)
    if progress is not None:
        check_flag(_OP, "progress", progress)
    check_flag(_OP, "largest", largest)
    check_flag(_OP, "sorted", sorted)
    check_flag(_OP, "return_argmax", return_argmax)
    if isinstance(D, Index):
        D, cu_seqlens_d = inputs.unpack_index(_OP, D, cu_seqlens_d)
    if return_argmax:
        check_no_dtensor(f"{_OP}(return_argmax=True)", Q=Q, D=D)
        D = fix_snapshot(D)
    _check_stages(D, coarse, n_probe, n_candidates)
    if coarse is None:
        D, cu_seqlens_d = sources.pack_documents(_OP, D, d_mask, cu_seqlens_d, Q)
    search = SearchArgs._make((Q, D, q_mask, d_mask, cu_seqlens_d, q_weight, normalize, top_k, chunk))
    results: Any
    if coarse is not None or isinstance(D, Quantized):
        if not largest:
            raise ValueError(f"{_OP}: largest: expected True with quantized documents, got False")
        with torch.no_grad():
            if coarse is not None:
                results = retrieve_two_stage(search, coarse, n_candidates, subset)
            else:
                results = retrieve_quantized(search, n_probe, n_candidates, subset=subset)
    else:
        results = _search_documents(search, subset, largest, progress)
    if not return_argmax:
        return results
    argmax = find_argmax(_OP, search, results[1])
    return (*results, argmax) if coarse is None else TwoStageArgmax(argmax=argmax, **results._asdict())


def _check_stages(D: Any, coarse: Any, n_probe: Any, n_candidates: Any) -> None:
    """Raise ValueError, naming the argument, if the documents do not allow these stages."""
    if n_probe is not None and coarse is not None:
        raise ValueError(f"{_OP}: n_probe: expected None with coarse, got {short_repr(n_probe)}")
    for name, count in (("n_probe", n_probe), ("n_candidates", n_candidates)):
        if count is not None and coarse is None and not isinstance(D, Quantized):
            expected = "None unless coarse is given or D is residual codes"
            raise ValueError(f"{_OP}: {name}: expected {expected}, got {short_repr(count)}")


def _search_documents(s: SearchArgs, subset: Any, largest: bool, progress: bool | None) -> ScoresAndIndices:
    """Run `retrieve` on documents that are neither quantized in memory nor searched in two stages."""
    if subset is not None:
        check_no_dtensor(f"{_OP}(subset=)", Q=s.Q, D=s.D)
    if not largest:
        check_no_dtensor(f"{_OP}(largest=False)", Q=s.Q, D=s.D)
        if subset is None:
            return _streamed.retrieve_lowest(_OP, s, progress)
    if _streamed.is_searched_in_place(s, progress):
        return retrieve_checked(_streamed.check_search(_OP, s), subset, lowest=not largest)
    source = sources.open_source(_OP, s.D, s.d_mask, s.cu_seqlens_d)
    options: Any = {"chunk": s.chunk, "q_mask": s.q_mask, "q_weight": s.q_weight}
    options |= {"normalize": s.normalize, "progress": progress}
    if subset is None:
        return retrieve_from_source(s.Q, source, s.top_k, 0, len(source), **options)
    source, names, positions, width = select_from_source(_OP, s.Q, source, subset)
    options |= {"positions": positions, "lowest": not largest}
    results = retrieve_from_source(s.Q, source, s.top_k, 0, len(source), **options)
    return pad_results(name_results(results, names), min(s.top_k, width))


def select_from_source(
    op: str, Q: Any, source: sources.DocumentSource, subset: Any
) -> tuple[sources.DocumentSource, Tensor, Tensor | None, int]:
    """Return ``(selected, names, positions, width)`` for the subset of `retrieve`, before Q is checked.

    `selected` is a source of the documents that any query may find, and `names` are their indices. `positions` are the
    positions of each query as for `retrieve_from_source`. `width` is the largest number of results.
    """
    check_tensor(op, "Q", Q, or_none=True)
    indices, width = resolve_subset(op, subset, Q, len(source), torch.device("cpu"))
    names, positions = list_union(indices)
    return source.select(names), names, positions, width


def retrieve_checked(s: SearchArgs, subset: Any = None, lowest: bool = False) -> ScoresAndIndices:
    """Run `retrieve` on checked tensors of one device in the dtype of the autocast region.

    `cu_seqlens_d` may be on the CPU.
    """
    if not torch.compiler.is_dynamo_compiling():
        sharding.register_if_needed()
    Q, indices = s.Q, None
    if subset is not None:
        indices, width = resolve_subset(_OP, subset, Q, s.documents, Q.device)
    s = add_query_axis(s)
    # An exported program contains only the operator. `no_grad` would add a separate block to it.
    is_exporting = torch.compiler._is_exporting_flag if _READS_FLAG else torch.compiler.is_exporting()
    is_recording = torch.is_grad_enabled() and not is_exporting
    with torch.no_grad() if is_recording else nullcontext():
        if indices is None:
            results = topk.search_best(s)
        else:
            results = pad_results(search_chosen(_OP, s, indices, lowest), min(s.top_k, width))
    return drop_query_axis(Q, results)


@torch.no_grad()
def retrieve_from_source(
    Q: Tensor,
    source: sources.DocumentSource,
    top_k: int,
    begin: int,
    end: int,
    *,
    chunk: int | None = None,
    q_mask: Tensor | None = None,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    progress: bool | None = None,
    positions: Tensor | None = None,
    lowest: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run `retrieve` on the documents ``[begin, end)`` of a source.

    `positions` are the positions ``[Nq, K]`` of the documents of each query, as in `Subset`, or None for all documents.
    The indices of the result count from the first document of the source, not from `begin`.
    """
    Q, placeholder, q_weight = sources.prepare_queries(_OP, Q, source.shape, source.dtype, q_weight)
    search = SearchArgs(Q, placeholder, q_mask, None, source.offsets, q_weight, normalize, top_k, chunk)
    _streamed.check_source(_OP, search, source)
    search = add_query_axis(search)
    best: Any = None
    for bounds, part in _streamed.iterate_parts(source, begin, end, chunk, Q.device, progress):
        D = as_scorable(part.D, placeholder.dtype, part.cu_seqlens)
        args = search._replace(D=D, d_mask=part.d_mask, cu_seqlens_d=part.cu_seqlens)
        results = _search_part(args, bounds, positions, lowest)
        best = results if best is None else topk.merge_parts([best, results], top_k, missing=positions is not None)
    if lowest:
        best = negate_scores(*best), best[1]
    return drop_query_axis(Q, best)


def _search_part(s: SearchArgs, at: tuple[int, int], positions: Tensor | None, lowest: bool) -> ScoresAndIndices:
    """Return the best documents ``[Nq, k]`` of a part, for 3-D queries, with negated scores if `lowest`."""
    begin, end = at
    if positions is None and not lowest:
        find = retrieve_checked if isinstance(s.D, Tensor) else search_quantized
        scores, indices = find(s)
        return scores, indices.add_(begin)
    documents = torch.arange(end - begin, device="cpu") if positions is None else limit_to_part(positions, begin, end)
    scores, indices = search_chosen(_OP, s, documents.to(s.Q.device, non_blocking=True), lowest)
    return negate_scores(scores, indices) if lowest else scores, torch.where(indices >= 0, indices + begin, -1)
