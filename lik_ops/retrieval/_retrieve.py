"""`retrieve`: the best documents of each query, from tensors or from corpora larger than the memory of the device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ..api import inputs
from ..api.packing import is_sequences
from ..core.arguments import add_batch_axis, check_flag, check_no_dtensor, short_repr
from ..formats.index import Index
from ..formats.quantized import Quantized
from ..ops import topk
from ..ops.stack import sharding
from ..ops.topk import ScoresAndIndices, SearchArgs
from . import _streamed, sources
from .store.layout import as_scorable
from .two_stage import TwoStage, retrieve_quantized, retrieve_two_stage, search_quantized

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from .store.corpus import Corpus

_OP = "retrieve"
# Under the Dynamo of torch 2.11 `torch.compiler.is_exporting()` is true in all that it traces; the flag behind it is
# read as it is.
_READS_FLAG = TorchVersion(torch.__version__) < TorchVersion("2.13") and hasattr(torch.compiler, "_is_exporting_flag")


@overload
def retrieve(
    Q: Tensor,
    D: Tensor | Sequence[Tensor] | np.ndarray | Corpus | Quantized | Index,
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
) -> tuple[Tensor, Tensor]: ...


@overload
def retrieve(
    Q: Tensor,
    D: Tensor | Sequence[Tensor] | np.ndarray | Corpus | Quantized | Index,
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
) -> TwoStage: ...


def retrieve(
    Q: Tensor,
    D: Tensor | Sequence[Tensor] | np.ndarray | Corpus | Quantized | Index,
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
) -> tuple[Tensor, Tensor] | TwoStage:
    """The `top_k` documents of each query with the highest `lik_ops.maxsim` scores: exact, and never ``[Nq, Nd]``.

    Documents are scored in chunks, and only the best so far are kept. Neither scores nor indices depend on `chunk`, to
    the last bit. For inference: the scores require no gradient, whatever Q and D do; to train, score what was found
    with `lik_ops.maxsim`.

    Documents come in one order: NaN first (something is wrong, and it shows), then from the highest score to the
    lowest, documents without tokens (``-inf``) at the end. Equal scores, 0.0 and -0.0 among them, come by document
    index.

    Args:
        Q: query token embeddings ``[Nq, Lq, d]``, or ``[Lq, d]`` for one query; fp16, bf16, fp32 or fp64.
        D: document token embeddings of the same dtype: ``[Nd, Ld, d]``, or packed ``[Td, d]`` with `cu_seqlens_d`; a
            tensor on the device of Q or on the CPU, or a ``numpy`` array, memory-mapped ones included; a list of
            ``[L_i, d]`` tensors or a jagged nested tensor, which are packed; or a `lik_ops.Corpus`. What is not on the
            device of Q is copied there chunk by chunk, while the chunk before is scored. Also a `Quantized`, or
            an `Index` that `read_index` found, on the device of Q.
        top_k: how many documents to return of each query; all of them if the corpus has fewer. 0 returns empty tensors.
        chunk: documents scored at a time; None chooses from the memory that is free.
        q_mask: query tokens to keep, the shape of Q without d; bool (True = keep) or integers read as ``!= 0``.
        d_mask: document tokens to keep, ``[Nd, Ld]``; not beside `cu_seqlens_d`, a list or a `Corpus`.
        cu_seqlens_d: int32 or int64 ``[Nd + 1]``, where each packed document begins and the last one ends; on
            the device of D or on the CPU.
        q_weight: weight of each query token, the shape of Q without d; fp32 (fp64 for fp64 inputs).
        normalize: L2-normalise every token first.
        progress: show a bar of documents (with tqdm, where it is installed). None: for a corpus that is copied or read
            chunk by chunk, if stderr is a terminal. What lies on a GPU is searched in one go, without a bar.
        largest: False for the lowest scores in place of the highest: NaN first, then from the lowest, those of
            documents without tokens, to the highest. Not in compiled code.
        sorted: as of `torch.topk`. False allows any order; it is the same.
        coarse: the same documents as `lik_ops.quantize` makes them, on the device of Q. They say which documents can be
            among the best, and only those are scored in full: what is returned is the same, to the last bit. D is then
            a tensor, on the device of Q or on the CPU, or a `Corpus` without a format, and of either only these
            documents are read. Tokens have to be normalised before they are quantised. For a `Corpus` they are the
            ``documents()[0]`` of what `Corpus.quantize` makes of it.
        n_candidates: beside `coarse`, how many documents of each query to score in full, the best of `coarse`: faster
            where the documents that can be among the best are many, and not exact. Of residual codes in the memory of
            the device, how many to score by all that their codes say, the best by their centroids alone; None is all,
            exhaustive and exact, unless `n_probe` is given, then ``4 * top_k``.
        n_probe: of residual codes, how many centroids each query token probes, the nearest: documents without a token
            of one of them are left out. Where fewer than `top_k` are left, the others are -1, with ``-inf``; by stages
            documents without tokens are left out too.

    Returns:
        ``(scores, indices)``, both ``[Nq, min(top_k, Nd)]``, on the device of Q: scores in fp32 (fp64 for fp64), and
        int64 document indices. A 2-D Q drops the first axis. With `coarse` a named tuple that goes on with `rescored`,
        how many documents were scored in full, and `proven`, how many of those returned are certain to be among the
        best of all: int64 ``[Nq]``.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.
        NotImplementedError: `torch.func` or forward-mode AD would differentiate it; what is detached may come.

    Example:
        >>> Q, D = torch.randn(2, 32, 128), torch.randn(1000, 300, 128)
        >>> scores, indices = lik_ops.retrieve(Q, D, top_k=10, normalize=True)
        >>> scores.shape, indices.shape
        (torch.Size([2, 10]), torch.Size([2, 10]))
        >>> found = lik_ops.retrieve(Q, D, top_k=10, coarse=lik_ops.quantize(D, "int8"))
        >>> found.proven.tolist()
        [10, 10]
    """
    topk.reject_derivatives(_OP, Q, D, q_weight)
    if progress is not None:
        check_flag(_OP, "progress", progress)
    check_flag(_OP, "largest", largest)
    check_flag(_OP, "sorted", sorted)
    if isinstance(D, Index):
        D, cu_seqlens_d = inputs.unpack_index(_OP, D, cu_seqlens_d)
    search = SearchArgs(Q, D, q_mask, d_mask, cu_seqlens_d, q_weight, normalize, top_k, chunk)
    if n_probe is not None and coarse is not None:
        raise ValueError(f"{_OP}: n_probe: expected None beside coarse, got {short_repr(n_probe)}")
    for name, count in (("n_probe", n_probe), ("n_candidates", n_candidates)):
        if count is not None and coarse is None and not isinstance(D, Quantized):
            expected = "None unless coarse is given or D is residual codes"
            raise ValueError(f"{_OP}: {name}: expected {expected}, got {short_repr(count)}")
    if coarse is not None or isinstance(D, Quantized):
        if not largest:
            raise ValueError(f"{_OP}: largest: expected True with quantised documents, got False")
        with torch.no_grad():
            if coarse is not None:
                return retrieve_two_stage(search, coarse, n_candidates)
            return retrieve_quantized(search, n_probe, n_candidates)
    if not largest:
        check_no_dtensor(f"{_OP}(largest=False)", Q=Q, D=D)
        return _streamed.retrieve_lowest(_OP, search, progress)
    if is_sequences(D):
        D, cu_seqlens_d = sources.pack_documents(_OP, D, d_mask, cu_seqlens_d, Q)
        search = search._replace(D=D, cu_seqlens_d=cu_seqlens_d)
    if (
        isinstance(D, Tensor)
        and (not isinstance(Q, Tensor) or D.device == Q.device)
        and (not progress or D.device.type != "cpu")
    ):
        return retrieve_from_tensors(search)
    source = sources.open_source(_OP, D, d_mask, cu_seqlens_d)
    known: Any = {"chunk": chunk, "q_mask": q_mask, "q_weight": q_weight, "normalize": normalize, "progress": progress}
    return retrieve_from_source(Q, source, top_k, 0, len(source), **known)


def retrieve_from_tensors(s: SearchArgs) -> ScoresAndIndices:
    """`retrieve` where everything is on one device (`cu_seqlens_d` may be on the CPU)."""
    return retrieve_checked(_streamed.check_search(_OP, s))


def retrieve_checked(s: SearchArgs) -> ScoresAndIndices:
    """`retrieve_from_tensors`, of arguments that `topk.check_search_args` accepted, in the dtype of the region."""
    if not torch.compiler.is_dynamo_compiling():
        sharding.register_if_needed()
    flat = s.Q.dim() == 2
    if flat:
        s = s._replace(
            Q=s.Q.unsqueeze(0), q_mask=add_batch_axis(s.q_mask, True), q_weight=add_batch_axis(s.q_weight, True)
        )
    # An exported program keeps the operator alone: it would have a block of its own for `no_grad`.
    exporting = torch.compiler._is_exporting_flag if _READS_FLAG else torch.compiler.is_exporting()
    recording = torch.is_grad_enabled() and not exporting
    with torch.no_grad() if recording else nullcontext():
        scores, indices = topk.search_best(s)
    return (scores.squeeze(0), indices.squeeze(0)) if flat else (scores, indices)


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
) -> tuple[Tensor, Tensor]:
    """`retrieve` among the documents ``[begin, end)`` of `open_source`, with their indices in all of it."""
    Q, like, q_weight = sources.prepare_queries(_OP, Q, source.shape, source.dtype, q_weight)
    search = SearchArgs(Q, like, q_mask, None, source.offsets, q_weight, normalize, top_k, chunk)
    _streamed.check_source(_OP, search, source)
    best: Any = None
    for at, part in _streamed.iterate_parts(source, begin, end, chunk, Q.device, progress):
        D = as_scorable(part.D, like.dtype, part.cu_seqlens)
        find = retrieve_checked if isinstance(D, Tensor) else search_quantized
        scores, indices = find(search._replace(D=D, d_mask=part.d_mask, cu_seqlens_d=part.cu_seqlens))
        found = (scores, indices.add_(at[0])) if Q.dim() == 3 else (scores[None], indices.add_(at[0])[None])
        best = found if best is None else topk.merge_parts([best, found], top_k)
    return best if Q.dim() == 3 else (best[0].squeeze(0), best[1].squeeze(0))
