"""`retrieve` on residual codes in two stages: by centroids alone, then the best documents by their full codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import inputs
from ..core.arguments import as_bool, check_count, short_repr
from ..formats.quantized import Quantized
from ..ops import topk, topk_codes
from ..ops.topk import ScoresAndIndices, SearchArgs
from .subset import locate_documents, pack_tokens


def retrieve_staged(
    op: str, s: SearchArgs, n_probe: Any, n_candidates: Any, subset: Tensor | None = None
) -> ScoresAndIndices:
    """Run `retrieve` with `n_probe` or `n_candidates`.

    Args:
        op: the name of the function, for error messages.
        s: checked arguments of the search, with a 3-D Q and residual codes as D.
        n_probe: the number of centroids that each query token probes, or None.
        n_candidates: the number of documents of each query to score by their full codes, or None.
        subset: the documents to search as in `Subset`, or None for all.

    Returns:
        ``(scores, indices)``, with -1 and ``-inf`` for missing documents.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is out of range or does not fit D.
    """
    D: Quantized = s.D
    check_stages(op, D, s.chunk, n_probe, n_candidates)
    assert D.codes is not None and D.codec is not None
    s = s._replace(d_mask=as_bool(s.d_mask))
    kept = max(s.top_k, 4 * s.top_k if n_candidates is None else n_candidates)
    tensors = s.Q, D.codes, D.codec.centroids, s.q_mask, s.d_mask, s.cu_seqlens_d, s.q_weight
    args = topk_codes.CodeSearchArgs(*tensors, s.normalize, kept, n_probe)
    rough, chosen = topk_codes.search_best(args) if subset is None else topk_codes.search_chosen(args, subset)
    reached = rough > -torch.inf
    offsets, lengths = locate_documents(s, chosen)
    d_mask = None if s.d_mask is None else s.d_mask.flatten()
    none = s.Q.new_empty((0, s.Q.shape[-1]))
    g = inputs.ScoringArgs(op, s.Q, none, q_mask=s.q_mask, d_mask=d_mask, q_weight=s.q_weight, normalize=s.normalize)
    g = inputs.replace_documents(g, pack_tokens(D))
    scores = inputs.score_candidates(g, offsets, lengths.where(reached, 0))[0]
    scores = scores.masked_fill(~reached, -torch.inf)
    documents = chosen.where(reached, -1)
    # Equal scores are ordered by document index, and missing documents come last.
    order = chosen.where(reached, s.documents).argsort(dim=1)
    return topk.select_candidates(scores.gather(1, order), documents.gather(1, order), s.top_k)


def check_stages(op: str, D: Quantized, chunk: Any, n_probe: Any, n_candidates: Any) -> None:
    """Raise TypeError or ValueError, naming the argument, unless D can be searched with these options."""
    given = {"n_probe": n_probe, "n_candidates": n_candidates}
    for name, count in given.items():
        if count is not None:
            check_count(op, name, count, 1)
    if all(count is None for count in given.values()):
        return
    if D.codes is None:
        raise ValueError(f"{op}: D: expected residual codes with n_probe and n_candidates, got {D.format}")
    if chunk is not None:
        raise ValueError(f"{op}: chunk: expected None with n_probe and n_candidates, got {short_repr(chunk)}")
