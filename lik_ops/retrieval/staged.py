"""Residual codes scored by their centroids alone, and `retrieve` in two stages: these scores, then the full codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import inputs
from ..api.inputs import Tokens
from ..core.arguments import as_bool, check_count, check_floats, describe_type, short_repr
from ..formats.index import Index
from ..formats.quantized import Quantized
from ..ops import topk, topk_codes
from ..ops.quantized import make_tokens_like
from ..ops.stack import autocast
from ..ops.topk import ScoresAndIndices, SearchArgs
from .arguments import add_query_axis, convert_search, drop_query_axis
from .subset import score_chosen


@torch.no_grad()
def plaid_approx_score(
    Q: Tokens,
    D: Quantized | Index,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    cu_seqlens_d: Tensor | None = None,
    q_weight: Tokens | None = None,
    normalize: bool = False,
    n_probe: int | None = None,
) -> Tensor:
    """Compute scores of residual codes in which each document token is replaced by its centroid.

    ``score[i, j] = sum_s q_weight[i, s] * max_t <Q[i, s], centroids[codes[j, t]]>``, the approximate scores of PLAID
    (Santhanam et al., 2022, section 3). Only the codes are read, and each query token is multiplied by each centroid
    once. `retrieve` with `n_probe` or `n_candidates` selects documents by these scores without returning them. This
    function is for inference: the scores do not require gradients.

    Args:
        Q: query tokens, as in `lik_ops.retrieve`.
        D: residual codes ``[Nd, Ld, d]``, or packed ``[Td, d]`` with `cu_seqlens_d`, or an `Index` of `read_index`.
        q_mask: query tokens to keep, as in `lik_ops.retrieve`.
        d_mask: document tokens to keep ``[Nd, Ld]``, as in `lik_ops.retrieve`.
        cu_seqlens_d: the bounds of packed documents ``[Nd + 1]``, as in `lik_ops.retrieve`.
        q_weight: the weight of each query token, as in `lik_ops.retrieve`.
        normalize: L2-normalize the query tokens first.
        n_probe: the number of nearest centroids that each query token probes. A document without a token of a probed
            centroid scores ``-inf``. None probes all centroids.

    Returns:
        Scores ``[Nq, Nd]`` in fp32, multiplied in the dtype of the centroids. A 2-D Q drops the first axis. A document
        without kept tokens scores ``-inf``. A document with a code outside the codec, and a query with NaN or infinite
        tokens, score NaN.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.

    Example:
        >>> D = torch.nn.functional.normalize(torch.randn(100, 20, 32), dim=-1)
        >>> codes = lik_ops.quantize(D, lik_ops.ResidualCodec.train(D, nbits=2, n_centroids=16))
        >>> lik_ops.plaid_approx_score(torch.randn(2, 8, 32), codes, normalize=True).shape
        torch.Size([2, 100])
    """
    op = "plaid_approx_score"
    if isinstance(D, Index):
        D, cu_seqlens_d = inputs.unpack_index(op, D, cu_seqlens_d)
    if not isinstance(D, Quantized) or D.codes is None or D.codec is None:
        actual = D.format if isinstance(D, Quantized) else describe_type(D)
        raise TypeError(f"{op}: D: expected a Quantized of residual codes or an Index, got {actual}")
    Q, _, *per_token, q_weight = convert_search(op, Q, None, q_mask, d_mask, cu_seqlens_d, q_weight)
    check_floats(op, "Q", Q)
    queries, _, q_weight = autocast.cast_to_autocast(Q, Q, q_weight)
    placeholder = make_tokens_like(queries, D.shape)
    s = SearchArgs._make((queries, placeholder, *per_token, q_weight, normalize, 0, None))
    topk.check_search_args(op, s)
    if queries.device != D.device:
        raise ValueError(f"{op}: Q: expected the device of D, {D.device}, got {queries.device}")
    check_stages(op, D, None, n_probe, None)
    s = add_query_axis(s)
    tensors = s.Q, D.codes, D.codec.centroids, s.q_mask, s.d_mask, s.cu_seqlens_d, s.q_weight
    args = topk_codes.CodeSearchArgs(*tensors, normalize, s.documents, n_probe)
    scores, indices = topk_codes.search_best(args)
    scores = torch.empty_like(scores).scatter_(1, indices, scores)
    # The search ranks documents first that it cannot score.
    return drop_query_axis(queries, (scores.masked_fill_(scores == torch.inf, torch.nan),))[0]


def retrieve_staged(
    op: str, s: SearchArgs, n_probe: Any, n_candidates: Any, subset: Tensor | None = None
) -> ScoresAndIndices:
    """Run `retrieve` with `n_probe` or `n_candidates`, for a 3-D Q and residual codes as D.

    `subset` has the documents to search as in `Subset`. Missing documents have index -1 and score ``-inf``.
    """
    D: Quantized = s.D
    check_stages(op, D, s.chunk, n_probe, n_candidates)
    assert D.codes is not None and D.codec is not None
    s = s._replace(d_mask=as_bool(s.d_mask))
    n_documents = max(s.top_k, 4 * s.top_k if n_candidates is None else n_candidates)
    tensors = s.Q, D.codes, D.codec.centroids, s.q_mask, s.d_mask, s.cu_seqlens_d, s.q_weight
    args = topk_codes.CodeSearchArgs(*tensors, s.normalize, n_documents, n_probe)
    coarse_scores, candidates = (
        topk_codes.search_best(args) if subset is None else topk_codes.search_chosen(args, subset)
    )
    is_reached = coarse_scores > -torch.inf
    documents = candidates.where(is_reached, -1)
    scores = score_chosen(op, s, documents).masked_fill(~is_reached, -torch.inf)
    # Equal scores are ordered by document index, and missing documents come last.
    order = candidates.where(is_reached, s.documents).argsort(dim=1)
    return topk.select_candidates(scores.gather(1, order), documents.gather(1, order), s.top_k)


def check_stages(op: str, D: Quantized, chunk: Any, n_probe: Any, n_candidates: Any) -> None:
    """Raise TypeError or ValueError, naming the argument, unless D can be searched with these options."""
    options = {"n_probe": n_probe, "n_candidates": n_candidates}
    for name, count in options.items():
        if count is not None:
            check_count(op, name, count, 1)
    if all(count is None for count in options.values()):
        return
    if D.codes is None:
        raise ValueError(f"{op}: D: expected residual codes with n_probe and n_candidates, got {D.format}")
    if chunk is not None:
        raise ValueError(f"{op}: chunk: expected None with n_probe and n_candidates, got {short_repr(chunk)}")
