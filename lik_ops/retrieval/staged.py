"""`retrieve` among residual codes by stages: centroids, documents by their codes alone, and the best of them exactly.

The stages are those of PLAID (Santhanam et al., 2022): the products of query tokens and centroids are found once. Each
query token probes the centroids that it is nearest to, and documents without a token of one are left out. Others are
scored as if their tokens were their centroids, and the best of these from what their codes say.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import backends
from ..api import inputs
from ..arguments import check_count
from ..ops import topk
from ..ops.topk import Best, Search
from ..quantized import Quantized
from ..residual import ResidualCodec

_TABLE_BYTES = 24 << 20  # of the products of query tokens and centroids at a time


def staged(op: str, s: Search, n_probe: Any, n_candidates: Any) -> Best:
    """`retrieve` with `n_probe` or `n_candidates`, of arguments that were checked but for these; Q is 3-D."""
    D: Quantized = s.D
    for name, count in (("n_probe", n_probe), ("n_candidates", n_candidates)):
        if count is not None:
            check_count(op, name, count, 1)
    if D.codes is None or D.codec is None:
        raise ValueError(f"{op}: D: expected residual codes beside n_probe and n_candidates, got {D.format}")
    if s.chunk is not None:
        raise ValueError(f"{op}: chunk: expected None beside n_probe and n_candidates, got {s.chunk}")
    codec, codes = D.codec, D.codes.flatten()
    if s.d_mask is not None:
        codes = torch.where((s.d_mask != 0).flatten(), codes, -1)
    offsets, lengths = _places(D, s.cu_seqlens_d)
    kept = min(max(s.top_k, 4 * s.top_k if n_candidates is None else n_candidates), len(offsets))
    each = 4 * max(len(codec.centroids), 1) * s.Q.shape[1]
    found = [
        _some(op, _part(s, some), codec, codes, (offsets, lengths), n_probe, kept)
        for some in _parts(len(s.Q), max(1, _TABLE_BYTES // max(each, 1)))
    ]
    return torch.cat([x[0] for x in found]), torch.cat([x[1] for x in found])


def _parts(count: int, step: int) -> list[slice]:
    return [slice(begin, begin + step) for begin in range(0, max(count, 1), step)]


def _part(s: Search, some: slice) -> Search:
    masked, weighted = (None if x is None else x[some] for x in (s.q_mask, s.q_weight))
    return s._replace(Q=s.Q[some], q_mask=masked, q_weight=weighted)


def _places(D: Quantized, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where documents begin among all tokens, and their lengths."""
    if cu_seqlens is None:
        count, length = D.shape[:2]
        return torch.arange(count, device=D.device) * length, torch.full((count,), length, device=D.device)
    bounds = cu_seqlens.to(D.device, non_blocking=True).long()
    return bounds[:-1], bounds.diff()


def _some(
    op: str,
    s: Search,
    codec: ResidualCodec,
    codes: Tensor,
    places: tuple[Tensor, Tensor],
    n_probe: int | None,
    kept: int,
) -> Best:
    """The best of some queries."""
    offsets, lengths = places
    if not len(codec.centroids):  # no document has a score
        kept, chosen = len(offsets), torch.arange(len(offsets), device=s.Q.device).expand(len(s.Q), -1)
        reached = torch.ones_like(chosen, dtype=torch.bool)
    else:
        of_centroids = _table(s, codec, n_probe)
        rough = backends.select(s.Q.device, s.Q.dtype).code_scores(*of_centroids, codes, offsets, lengths)
        rough, chosen = topk.first(rough, kept)
        reached = rough > -torch.inf
    d_mask = None if s.d_mask is None else (s.d_mask != 0).flatten()
    none = s.Q.new_empty((0, s.Q.shape[-1]))
    g = inputs.Given(op, s.Q, none, q_mask=s.q_mask, d_mask=d_mask, q_weight=s.q_weight, normalize=s.normalize)
    g = inputs.beside(g, _packed(s.D))
    scores = inputs.candidates(g, offsets[chosen], lengths[chosen].where(reached, 0))[0]
    scores = scores.masked_fill(~reached, -torch.inf)
    documents = chosen.where(reached, -1)
    # Equal scores come by document, and where there is none, last.
    order = chosen.where(reached, len(offsets)).argsort(dim=1)
    return topk.of_candidates(scores.gather(1, order), documents.gather(1, order), s.top_k)


def _table(s: Search, codec: ResidualCodec, n_probe: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Products of query tokens and centroids, fp32 ``[n, C, Lq]``; weights; and which centroids are probed."""
    Q = s.Q.to(codec.centroids.dtype) if s.Q.dtype != codec.centroids.dtype else s.Q
    if s.normalize:
        Q = F.normalize(s.Q.float(), dim=-1).to(codec.centroids.dtype)
    keep = torch.ones(s.Q.shape[:2], dtype=torch.bool, device=s.Q.device) if s.q_mask is None else s.q_mask != 0
    # Masked rows may hold anything.
    products = (torch.where(keep.unsqueeze(-1), Q, 0) @ codec.centroids.t()).float()
    probed = None
    if n_probe is not None and n_probe < len(codec.centroids):
        nearest = products.topk(n_probe, dim=2).indices
        probed = torch.zeros(products.shape, dtype=torch.bool, device=Q.device)
        probed = (probed.scatter_(2, nearest, True) & keep.unsqueeze(-1)).any(1)
    weight = keep.float() if s.q_weight is None else s.q_weight.float() * keep
    return products.transpose(1, 2), weight, probed


def _packed(D: Quantized) -> Quantized:
    """Documents as packed tokens."""
    if D.dim() == 2:
        return D
    assert D.codes is not None
    scale = D.stored().scale
    return Quantized(D.data.flatten(0, -2), scale, D.format, D.d, D.dtype, codes=D.codes.flatten(), codec=D.codec)
