"""Scores of documents that come a part at a time: all of them, or those of the lowest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..api import inputs
from ..api.packing import is_sequences
from ..api.score import maxsim
from ..core.arguments import check_flag, lift
from ..ops import topk
from ..ops.checks import hints
from ..ops.stack import autocast
from ..ops.topk import Best, Search
from . import sources
from .copying import on_device
from .progress import progress_bar
from .store.layout import scorable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from .store.corpus import Corpus

_AT_ONCE = 1 << 14  # documents on the device of Q whose scores exist at a time


@torch.no_grad()
def maxsim_streamed(
    Q: Tensor,
    D: Tensor | Sequence[Tensor] | np.ndarray | Corpus,
    *,
    chunk: int | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    progress: bool | None = None,
) -> Tensor:
    """The scores of every query and document of a corpus that need not fit the device: all that `retrieve` looks at.

    Documents are copied to the device of Q chunk by chunk, while the chunk before is scored. The bits of a score are
    those of `lik_ops.maxsim` (of `lik_ops.maxsim_varlen`, where documents are packed). For inference: the scores
    require no gradient.

    Args:
        Q, D, q_mask, d_mask, cu_seqlens_d, q_weight, normalize, progress: as in `lik_ops.retrieve`.
        chunk: documents copied and scored at a time; None chooses.

    Returns:
        Scores ``[Nq, Nd]`` on the device of Q; fp32 (fp64 for fp64). A 2-D Q drops the first axis.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.
        NotImplementedError: `torch.func` or forward-mode AD would differentiate it; what is detached may come.

    Example:
        >>> Q, D = torch.randn(2, 32, 128), torch.randn(1000, 300, 128)
        >>> lik_ops.maxsim_streamed(Q, D, chunk=100, normalize=True).shape
        torch.Size([2, 1000])
    """
    op = "maxsim_streamed"
    topk.reject_derivatives(op, Q, D, q_weight)
    search = Search(Q, D, q_mask, d_mask, cu_seqlens_d, q_weight, normalize, 0, chunk)
    found = torch.cat([scores for _, scores in scored(op, search, progress)], dim=1)
    return found.squeeze(0) if Q.dim() == 2 else found


@torch.no_grad()
def lowest(op: str, s: Search, progress: bool | None) -> Best:
    """`retrieve` with ``largest=False``."""
    topk.check_counts(op, s.top_k, s.chunk)
    best: Best | None = None
    for begin, scores in scored(op, s, progress):
        values, columns = topk.first(-scores, s.top_k)
        found = values, columns.add_(begin)
        best = found if best is None else topk.merge([best, found], s.top_k)
    assert best is not None
    scores, indices = -best[0], best[1]
    return (scores.squeeze(0), indices.squeeze(0)) if s.Q.dim() == 2 else (scores, indices)


def scored(op: str, s: Search, progress: bool | None) -> Iterator[tuple[int, Tensor]]:
    """Where each part of the documents begins, and its scores ``[Nq, n]``; one part at least. D may be a corpus."""
    if progress is not None:
        check_flag(op, "progress", progress)
    if is_sequences(s.D):
        D, cu_seqlens_d = sources.packed(op, s.D, s.d_mask, s.cu_seqlens_d, s.Q)
        s = s._replace(D=D, cu_seqlens_d=cu_seqlens_d)
    in_place = isinstance(s.D, Tensor) and (not isinstance(s.Q, Tensor) or s.D.device == s.Q.device)
    if in_place and not (progress and s.D.device.type == "cpu"):
        s = checked(op, s)
        step = s.chunk or _AT_ONCE
        for begin in range(0, max(s.documents, 1), step):
            at = slice(begin, begin + step)
            if s.cu_seqlens_d is not None:
                part = s._replace(cu_seqlens_d=s.cu_seqlens_d[begin : at.stop + 1])
            else:
                part = s._replace(D=s.D[at], d_mask=None if s.d_mask is None else s.d_mask[at])
            yield begin, _scores(op, part)
        return
    source = sources.source(op, s.D, s.d_mask, s.cu_seqlens_d)
    Q, like, q_weight = sources.in_region(op, s.Q, source.shape, source.dtype, s.q_weight)
    s = s._replace(Q=Q, D=like, d_mask=None, cu_seqlens_d=source.offsets, q_weight=q_weight)
    check_source(op, s, source)
    for (begin, _), read in parts(source, 0, len(source), s.chunk, Q.device, progress):
        D = scorable(read.D, like.dtype, read.cu_seqlens)
        yield begin, _scores(op, s._replace(D=D, d_mask=read.d_mask, cu_seqlens_d=read.cu_seqlens))


def checked(op: str, s: Search) -> Search:
    """A search among tensors, in the dtype of a region of autocast; raises unless all fit together."""
    Q, D, q_weight = autocast.to_region(s.Q, s.D, s.q_weight)
    sources.check_dtype(op, Q, D.dtype)
    s = s._replace(Q=Q, D=D, q_weight=q_weight)
    topk.check_arguments(op, s)
    hints.look_at_tokens(op, Q, D, s.q_mask, s.d_mask, s.normalize)
    return s


def check_source(op: str, s: Search, source: sources.Source) -> None:
    """Raise unless all fit together; D of the search stands for the documents of `source`, without their memory."""
    topk.check_arguments(op, s)
    if source.d_mask is not None and source.d_mask.device not in (s.Q.device, torch.device("cpu")):
        raise ValueError(f"{op}: d_mask: expected the device of Q, {s.Q.device}, or cpu, got {source.d_mask.device}")


def parts(
    source: sources.Source, begin: int, end: int, chunk: int | None, device: torch.device, progress: bool | None
) -> Iterator[tuple[tuple[int, int], sources.Part]]:
    """The documents ``[begin, end)`` on `device`, a part at a time; one part at least, for the shapes of results."""
    ranges = source.ranges(begin, end, chunk, sources.part_bytes(device)) or [(begin, begin)]
    with progress_bar(end - begin, progress) as advance:
        read = (source.read(*at) for at in ranges)
        for at, part in zip(ranges, on_device(read, device, max(source.nbytes(*at) for at in ranges)), strict=True):
            yield at, part
            advance(at[1] - at[0])


def _scores(op: str, s: Search) -> Tensor:
    Q, q_mask, q_weight = s.Q, s.q_mask, s.q_weight
    if Q.dim() == 2:
        Q, q_mask, q_weight = Q.unsqueeze(0), lift(q_mask, True), lift(q_weight, True)
    if s.cu_seqlens_d is None:
        return maxsim(Q, s.D, q_mask, s.d_mask, q_weight=q_weight, normalize=s.normalize)
    known: dict[str, Any] = {
        "cu_seqlens_d": s.cu_seqlens_d.to(Q.device, non_blocking=True),
        "q_mask": q_mask,
        "q_weight": q_weight,
    }
    return inputs.varlen(inputs.given(op, Q, s.D, **known, normalize=s.normalize, whole=False))[0]
