"""The document tokens that matched: the argmax of the documents that a search returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import inputs
from ..core.arguments import as_bool
from ..formats.quantized import Quantized
from ..ops.stack import autocast
from ..ops.topk import SearchArgs
from . import sources
from ._streamed import iterate_parts
from .arguments import add_query_axis, drop_query_axis
from .store.layout import as_scorable
from .store.snapshot import Snapshot
from .subset import locate_documents, make_scoring_args


class TwoStageArgmax(NamedTuple):
    """The result of `lik_ops.retrieve` with ``coarse=`` and ``return_argmax=True``."""

    scores: Tensor  # [Nq, k]
    indices: Tensor  # [Nq, k]
    argmax: Tensor  # [Nq, k, Lq], int64
    rescored: Tensor  # [Nq], int64: number of documents scored in full
    proven: Tensor  # [Nq], int64: number of results that are certain to be among the k best of all


def fix_snapshot(D: Any) -> Any:
    """Return a corpus that a thread cannot change between the search and the argmax, or other documents unchanged."""
    snapshot = getattr(D, "_snapshot", None)
    return type(D)(D.path, snapshot) if isinstance(snapshot, Snapshot) else D


@torch.no_grad()
def find_argmax(op: str, s: SearchArgs, indices: Tensor) -> Tensor:
    """Return the argmax ``[Nq, k, Lq]`` of the documents ``indices [Nq, k]`` that a search has returned.

    A 2-D Q has no first axis. Index -1 is no document. Packed documents replace lists in the arguments of the search.
    The argmax is the winning token within its document, and -1 as in `lik_ops.maxsim_with_argmax`.
    """
    source: sources.DocumentSource | None = None
    if isinstance(s.D, Quantized):
        Q, _, q_weight = autocast.cast_to_autocast(s.Q, s.Q, s.q_weight)
    elif isinstance(s.D, Tensor) and s.D.device == s.Q.device:
        Q, D, q_weight = autocast.cast_to_autocast(s.Q, s.D, s.q_weight)
        s = s._replace(D=D)
    else:
        source = sources.open_source(op, s.D, s.d_mask, s.cu_seqlens_d)
        Q, _, q_weight = sources.prepare_queries(op, s.Q, source.shape, source.dtype, s.q_weight)
    s = add_query_axis(s._replace(Q=Q, q_mask=as_bool(s.q_mask), q_weight=q_weight))
    indices = indices if Q.dim() == 3 else indices.unsqueeze(0)
    argmax = _score_with_argmax(op, s, indices) if source is None else find_argmax_in_source(op, s, source, indices)
    return drop_query_axis(Q, (argmax,))[0]


def find_argmax_in_source(op: str, s: SearchArgs, source: sources.DocumentSource, indices: Tensor) -> Tensor:
    """Return the argmax ``[Nq, k, Lq]`` of documents ``[Nq, k]`` of a source, each of which is read once.

    The queries of `s` are 3-D, in the dtype of the autocast region. Its documents are not used.
    """
    documents, at = indices.cpu().unique(return_inverse=True)  # ascending
    n_missing = int((documents < 0).sum())
    selection, at = source.select(documents[n_missing:]), (at - n_missing).to(indices.device)
    argmax = indices.new_full((*indices.shape, s.Q.shape[1]), -1)
    for (begin, end), part in iterate_parts(selection, 0, len(selection), None, s.Q.device, False):
        D = as_scorable(part.D, s.Q.dtype, part.cu_seqlens)
        is_in_part = (at >= begin) & (at < end)
        part_args = s._replace(D=D, d_mask=part.d_mask, cu_seqlens_d=part.cu_seqlens)
        part_argmax = _score_with_argmax(op, part_args, torch.where(is_in_part, at - begin, -1))
        argmax = torch.where(is_in_part.unsqueeze(-1), part_argmax, argmax)
    return argmax


def _score_with_argmax(op: str, s: SearchArgs, indices: Tensor) -> Tensor:
    """Return the argmax ``[Nq, k, Lq]`` of documents on the device of Q."""
    g = make_scoring_args(op, s)._replace(with_argmax=True)
    argmax: Any = inputs.score_candidates(g, *locate_documents(s, indices))[1]
    return argmax
