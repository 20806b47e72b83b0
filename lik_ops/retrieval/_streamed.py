"""Scores of documents that arrive in parts: all scores, or the lowest ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..api import inputs
from ..api.inputs import Tokens
from ..api.score import maxsim
from ..core.arguments import check_flag
from ..ops import topk
from ..ops.checks import hints
from ..ops.stack import autocast
from ..ops.topk import ScoresAndIndices, SearchArgs
from . import sources
from .arguments import add_query_axis, convert_search, drop_query_axis
from .copying import iterate_on_device
from .progress import make_progress_callback
from .store.layout import as_scorable

if TYPE_CHECKING:
    from .store.corpus import Corpus

_MAX_DOCUMENTS_AT_ONCE = 1 << 14  # documents scored at a time, if they are on the device of Q


@torch.no_grad()
def maxsim_streamed(
    Q: Tokens,
    D: Tokens | Corpus,
    *,
    chunk: int | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    progress: bool | None = None,
) -> Tensor:
    """Compute the scores of every query and every document of a corpus that need not fit on the device.

    Documents are copied to the device of Q in chunks. One chunk is copied while the previous one is scored. A score has
    the same bits as the score of `lik_ops.maxsim`, or of `lik_ops.maxsim_varlen` if documents are packed. This function
    is for inference: the scores do not require gradients.

    Args:
        Q: query tokens, as in `lik_ops.retrieve`.
        D: document tokens, as in `lik_ops.retrieve`.
        chunk: the number of documents that are copied and scored at a time. None selects a number.
        q_mask: query tokens to keep, as in `lik_ops.retrieve`.
        d_mask: document tokens to keep, as in `lik_ops.retrieve`.
        cu_seqlens_d: the bounds of packed documents, as in `lik_ops.retrieve`.
        q_weight: the weight of each query token, as in `lik_ops.retrieve`.
        normalize: L2-normalize every token first.
        progress: show a progress bar, as in `lik_ops.retrieve`.

    Returns:
        Scores ``[Nq, Nd]`` on the device of Q, in fp32 (fp64 for fp64 inputs). A 2-D Q drops the first axis.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.
        NotImplementedError: ``torch.func`` or forward-mode AD would differentiate the call. Detached tensors are
            accepted.

    Example:
        >>> Q, D = torch.randn(2, 32, 128), torch.randn(1000, 300, 128)
        >>> lik_ops.maxsim_streamed(Q, D, chunk=100, normalize=True).shape
        torch.Size([2, 1000])
    """
    op = "maxsim_streamed"
    args = convert_search(op, Q, D, q_mask, d_mask, cu_seqlens_d, q_weight)
    topk.reject_derivatives(op, *args[:2], args[-1])
    search = SearchArgs._make((*args, normalize, 0, chunk))
    all_scores = torch.cat([scores for _, scores in iterate_scores(op, search, progress)], dim=1)
    return drop_query_axis(search.Q, (all_scores,))[0]


@torch.no_grad()
def retrieve_lowest(op: str, s: SearchArgs, progress: bool | None) -> ScoresAndIndices:
    """Run `retrieve` with ``largest=False``."""
    topk.check_counts(op, s.top_k, s.chunk)
    best: ScoresAndIndices | None = None
    for begin, scores in iterate_scores(op, s, progress):
        values, columns = topk.select_first(scores.neg_(), s.top_k)
        results = values, columns.add_(begin)
        best = results if best is None else topk.merge_parts([best, results], s.top_k)
    assert best is not None
    return drop_query_axis(s.Q, (-best[0], best[1]))


def iterate_scores(op: str, s: SearchArgs, progress: bool | None) -> Iterator[tuple[int, Tensor]]:
    """Yield the first document of each slice and the scores ``[Nq, n]`` of the slice, which fit a search's workspace.

    D of the search may be a corpus. There is at least one slice, even without documents.
    """
    if progress is not None:
        check_flag(op, "progress", progress)
    D, cu_seqlens_d = sources.pack_documents(op, s.D, s.d_mask, s.cu_seqlens_d, s.Q)
    s = s._replace(D=D, cu_seqlens_d=cu_seqlens_d)
    if is_searched_in_place(s, progress):
        yield from _score_in_slices(op, check_search(op, s), 0)
        return
    source = sources.open_source(op, s.D, s.d_mask, s.cu_seqlens_d)
    Q, placeholder, q_weight = sources.prepare_queries(op, s.Q, source.shape, source.dtype, s.q_weight)
    s = s._replace(Q=Q, D=placeholder, d_mask=None, cu_seqlens_d=source.offsets, q_weight=q_weight)
    check_source(op, s, source)
    for (begin, _), documents in iterate_parts(source, 0, len(source), s.chunk, Q.device, progress):
        D = as_scorable(documents.D, placeholder.dtype, documents.cu_seqlens)
        part = s._replace(D=D, d_mask=documents.d_mask, cu_seqlens_d=documents.cu_seqlens)
        yield from _score_in_slices(op, part, begin)


def _score_in_slices(op: str, s: SearchArgs, first: int) -> Iterator[tuple[int, Tensor]]:
    """Yield what `iterate_scores` does for documents on the device of Q. The first of them has the number `first`."""
    s = add_query_axis(s)
    fitting = topk.count_fitting_documents(s.Q, s.top_k, s.documents)
    step = s.chunk or min(fitting, _MAX_DOCUMENTS_AT_ONCE)
    for begin in range(0, max(s.documents, 1), step):
        document_slice = slice(begin, begin + step)
        if s.cu_seqlens_d is not None:
            part = s._replace(cu_seqlens_d=s.cu_seqlens_d[begin : document_slice.stop + 1])
        else:
            part = s._replace(D=s.D[document_slice], d_mask=None if s.d_mask is None else s.d_mask[document_slice])
        yield first + begin, _collect_scores(op, part)


def is_searched_in_place(s: SearchArgs, progress: bool | None) -> bool:
    """Return whether the documents are a tensor on the device of Q, and no progress bar is wanted for a CPU."""
    in_place = isinstance(s.D, Tensor) and (not isinstance(s.Q, Tensor) or s.D.device == s.Q.device)
    return in_place and not (progress and s.D.device.type == "cpu")


def check_search(op: str, s: SearchArgs) -> SearchArgs:
    """Return a search among tensors in the dtype of the autocast region, after checking all arguments."""
    Q, D, q_weight = autocast.cast_to_autocast(s.Q, s.D, s.q_weight)
    sources.check_dtype(op, Q, D.dtype)
    s = s._replace(Q=Q, D=D, q_weight=q_weight)
    topk.check_search_args(op, s)
    hints.inspect_tokens(op, Q, D, s.q_mask, s.d_mask, s.normalize)
    return s


def check_source(op: str, s: SearchArgs, source: sources.DocumentSource) -> None:
    """Raise unless the search, in which a placeholder stands for the documents, fits the source."""
    topk.check_search_args(op, s)
    if source.d_mask is not None and source.d_mask.device not in (s.Q.device, torch.device("cpu")):
        raise ValueError(f"{op}: d_mask: expected the device of Q, {s.Q.device}, or cpu, got {source.d_mask.device}")


def iterate_parts(
    source: sources.DocumentSource, begin: int, end: int, chunk: int | None, device: torch.device, progress: bool | None
) -> Iterator[tuple[tuple[int, int], sources.DocumentPart]]:
    """Yield ``((begin, end), part)`` for the documents ``[begin, end)`` on `device`, one part at a time.

    A part has `chunk` documents, or a fixed number of bytes if `chunk` is None. There is at least one part, which may
    be empty, so that results have a shape.
    """
    ranges = source.ranges(begin, end, chunk, sources.choose_part_bytes(device)) or [(begin, begin)]
    with make_progress_callback(end - begin, progress) as advance:
        max_bytes = max(source.nbytes(*bounds) for bounds in ranges)
        parts = iterate_on_device((source.read(*bounds) for bounds in ranges), device, max_bytes)
        for bounds, part in zip(ranges, parts, strict=True):
            yield bounds, part
            advance(bounds[1] - bounds[0])


def _collect_scores(op: str, s: SearchArgs) -> Tensor:
    """Return the scores ``[Nq, n]`` of 3-D queries and the documents of one slice."""
    options: dict[str, Any] = {"q_mask": s.q_mask, "q_weight": s.q_weight, "normalize": s.normalize}
    if s.cu_seqlens_d is None:
        return maxsim(s.Q, s.D, d_mask=s.d_mask, **options)
    options["cu_seqlens_d"] = s.cu_seqlens_d.to(s.Q.device, non_blocking=True)
    return inputs.score_varlen(inputs.prepare_args(op, s.Q, s.D, must_cover_d=False, **options))[0]
