"""Scores of documents that come a part at a time: all of them, or those of the lowest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..api import inputs
from ..api.packing import is_sequences
from ..api.score import maxsim
from ..arguments import check_flag, lift
from ..ops import topk
from ..ops.stack import autocast
from . import sources
from .copying import on_device
from .progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from .corpus import Corpus

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
        >>> lik_ops.maxsim_streamed(Q, D, chunk=100).shape
        torch.Size([2, 1000])
    """
    op = "maxsim_streamed"
    topk.reject_derivatives(op, Q, D, q_weight)
    options = chunk, q_mask, d_mask, cu_seqlens_d, q_weight, normalize, progress
    found = torch.cat([scores for _, scores in scored(op, Q, D, *options)], dim=1)
    return found.squeeze(0) if Q.dim() == 2 else found


@torch.no_grad()
def lowest(op: str, Q: Any, D: Any, top_k: int, *options: Any) -> topk.Best:
    """`retrieve` with ``largest=False``; `options` are those of `scored`."""
    topk.check_counts(op, top_k, options[0])
    best: topk.Best | None = None
    for begin, scores in scored(op, Q, D, *options):
        values, columns = topk.first(-scores, top_k)
        found = values, columns.add_(begin)
        best = found if best is None else topk.merge([best, found], top_k)
    assert best is not None
    flat = Q.dim() == 2
    return (-best[0]).squeeze(0) if flat else -best[0], best[1].squeeze(0) if flat else best[1]


def scored(
    op: str,
    Q: Any,
    D: Any,
    chunk: Any,
    q_mask: Any,
    d_mask: Any,
    cu_seqlens_d: Any,
    q_weight: Any,
    normalize: Any,
    progress: Any,
) -> Iterator[tuple[int, Tensor]]:
    """Where each part of the documents begins, and its scores ``[Nq, n]``; one part at least."""
    if progress is not None:
        check_flag(op, "progress", progress)
    if is_sequences(D):
        D, cu_seqlens_d = sources.packed(op, D, d_mask, cu_seqlens_d, Q)
    if isinstance(D, Tensor) and (not isinstance(Q, Tensor) or D.device == Q.device):
        Q, D, q_weight = autocast.to_region(Q, D, q_weight)
        sources.check_dtype(op, Q, D.dtype)
        topk.check_arguments(op, Q, D, 0, chunk, q_mask, d_mask, cu_seqlens_d, q_weight, normalize)
        documents = D.shape[0] if cu_seqlens_d is None else cu_seqlens_d.shape[0] - 1
        step = chunk or _AT_ONCE
        for begin in range(0, max(documents, 1), step):
            at = slice(begin, begin + step)
            if cu_seqlens_d is None:
                yield (
                    begin,
                    _scores(op, Q, D[at], q_mask, None if d_mask is None else d_mask[at], None, q_weight, normalize),
                )
            else:
                yield begin, _scores(op, Q, D, q_mask, None, cu_seqlens_d[begin : at.stop + 1], q_weight, normalize)
        return
    source = sources.source(op, D, d_mask, cu_seqlens_d)
    Q, like, q_weight = sources.in_region(op, Q, source.shape, source.dtype, q_weight)
    check_source(op, Q, like, source, 0, chunk, q_mask, q_weight, normalize)
    for (begin, _), part in parts(source, 0, len(source), chunk, Q.device, progress):
        D = part.D.to(like.dtype)
        yield begin, _scores(op, Q, D, q_mask, part.d_mask, part.cu_seqlens, q_weight, normalize)


def check_source(
    op: str,
    Q: Tensor,
    like: Tensor,
    source: sources.Source,
    top_k: Any,
    chunk: Any,
    q_mask: Any,
    q_weight: Any,
    normalize: Any,
) -> None:
    """Raise unless all fit together; `like` is D without its memory."""
    topk.check_arguments(op, Q, like, top_k, chunk, q_mask, None, source.offsets, q_weight, normalize)
    if source.d_mask is not None and source.d_mask.device not in (Q.device, torch.device("cpu")):
        raise ValueError(f"{op}: d_mask: expected the device of Q, {Q.device}, or cpu, got {source.d_mask.device}")


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


def _scores(
    op: str, Q: Tensor, D: Tensor, q_mask: Any, d_mask: Any, cu_seqlens: Tensor | None, q_weight: Any, normalize: bool
) -> Tensor:
    flat = Q.dim() == 2
    if flat:
        Q, q_mask, q_weight = Q.unsqueeze(0), lift(q_mask, True), lift(q_weight, True)
    if cu_seqlens is None:
        return maxsim(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=normalize)
    cu_seqlens = cu_seqlens.to(Q.device, non_blocking=True)
    given = inputs.given(op, Q, D, cu_seqlens_d=cu_seqlens, q_mask=q_mask, q_weight=q_weight, normalize=normalize)
    return inputs.varlen(given)[0]
