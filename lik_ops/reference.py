"""MaxSim as written in the paper, with the whole similarity tensor in memory. It is the oracle of every test.

``score[i, j] = sum_s w[i, s] * max_t <Q[i, s], D[j, t]>`` (Khattab and Zaharia, ColBERT, 2020, equation 3). Masks, ties
and empty documents follow docs/semantics.md. The functions are plain PyTorch and differentiable by autograd. They
compute in the dtype of their arguments, and half precision is widened to fp32. An oracle is a call with ``.double()``
tensors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_WEIGHTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

__all__ = [
    "chamfer_distance",
    "maxsim",
    "maxsim_at",
    "maxsim_cross_entropy",
    "maxsim_from_hidden",
    "maxsim_pairs",
    "maxsim_soft",
    "maxsim_token_topk",
    "maxsim_with_argmax",
    "maxsim_xtr",
    "plaid_approx_score",
    "pool_tokens",
    "similarities",
]


def similarities(Q: Tensor, D: Tensor) -> Tensor:
    """Return all inner products: ``[Nq, Nd, Lq, Ld]``, or ``[Nq, K, Lq, Ld]`` for candidates ``D [Nq, K, Ld, d]``."""
    return torch.einsum("isd,jtd->ijst" if D.dim() == 3 else "isd,ijtd->ijst", Q, D)


def _check(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, q_weight: Tensor | None, normalize: bool
) -> None:
    """Raise ValueError or TypeError if torch would broadcast a shape or interpret a value that is not a bool as one."""
    if not isinstance(normalize, bool):
        raise TypeError(f"reference: normalize: expected a bool, got {type(normalize).__name__}")
    is_single = Q.dim() == 2
    if Q.dim() not in (2, 3):
        raise ValueError(f"reference: Q: expected [Lq, d] or [Nq, Lq, d], got {list(Q.shape)}")
    if D.dim() not in (2, 3, 4) or D.shape[-1] != Q.shape[-1] or (D.dim() == 4 and (is_single or len(D) != len(Q))):
        expected = "[Ld, d], [Nd, Ld, d] or [Nq, K, Ld, d]"
        raise ValueError(f"reference: D: expected {expected} for Q {list(Q.shape)}, got {list(D.shape)}")
    for name, x, tokens in (("q_mask", q_mask, Q), ("d_mask", d_mask, D), ("q_weight", q_weight, Q)):
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.dtype not in (_WEIGHTS if name == "q_weight" else _MASKS):
            actual = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"reference: {name}: expected a Tensor, masks of bools or integers, got {actual}")
        if x.shape != tokens.shape[:-1]:
            raise ValueError(f"reference: {name}: expected {list(tokens.shape[:-1])}, got {list(x.shape)}")


def _prepare_tokens(X: Tensor, mask: Tensor | None, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return the tokens with masked ones zeroed, normalized if requested, and the mask. Masked tokens may hold NaN."""
    X = X.float() if X.dtype in (torch.float16, torch.bfloat16) else X
    keep = torch.ones(X.shape[:-1], dtype=torch.bool, device=X.device) if mask is None else mask != 0
    X = torch.where(keep[..., None], X, 0)
    return (F.normalize(X, dim=-1) if normalize else X), keep


def _prepare(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, q_weight: Tensor | None, normalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return Q ``[Nq, Lq, d]`` and its mask, D and its mask ``[Nq | 1, Nd | K, Ld]``, and the weights, all checked.

    A 2-D Q or D gets the axis that it lacks. D has at least one token, because a maximum needs one.
    """
    _check(Q, D, q_mask, d_mask, q_weight, normalize)
    if Q.dim() == 2:
        Q, q_mask, q_weight = Q[None], _add_axis(q_mask), _add_axis(q_weight)
    if D.dim() == 2:
        D, d_mask = D[None], _add_axis(d_mask)
    (Q, q_keep), (D, d_keep) = _prepare_tokens(Q, q_mask, normalize), _prepare_tokens(D, d_mask, normalize)
    if D.shape[-2] == 0:  # a masked token changes nothing
        D, d_keep = F.pad(D, (0, 0, 0, 1)), F.pad(d_keep, (0, 1))
    return Q, q_keep, D, d_keep if D.dim() == 4 else d_keep[None], q_weight


def _add_axis(x: Tensor | None) -> Tensor | None:
    return None if x is None else x[None]


def _drop_axes(x: Tensor, Q: Tensor, D: Tensor) -> Tensor:
    """Remove the axes that a 2-D `Q` or `D` did not have from an output ``[Nq, Nd, ...]``."""
    x = x.squeeze(1) if D.dim() == 2 else x
    return x.squeeze(0) if Q.dim() == 2 else x


def maxsim_with_argmax(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    normalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return scores ``[Nq, Nd]`` and the int64 argmax ``[Nq, Nd, Lq]``, with K instead of Nd for candidates.

    The argmax is -1 for a masked query token and for a document that keeps no token.
    """
    Qn, q_keep, Dn, d_keep, q_weight = _prepare(Q, D, q_mask, d_mask, q_weight, normalize)
    d_any = d_keep.any(-1)
    S = similarities(Qn, Dn).masked_fill(~d_keep[:, :, None], float("-inf"))
    argmax = S.argmax(-1)  # the first index; torch orders NaN above all numbers
    best = S.gather(-1, argmax[..., None])[..., 0]
    first_kept = d_keep.int().argmax(-1)[:, :, None]
    argmax = torch.where(best == float("-inf"), first_kept, argmax)
    argmax = torch.where(d_any[:, :, None] & q_keep[:, None], argmax, -1)
    scores = _sum_maxima(best, q_keep, q_weight, d_any)
    return _drop_axes(scores, Q, D), _drop_axes(argmax, Q, D)


def _sum_maxima(best: Tensor, q_keep: Tensor, q_weight: Tensor | None, d_any: Tensor) -> Tensor:
    """Sum the maxima ``best [Nq, Nd, Lq]`` of kept query tokens. Documents that keep no token score -inf."""
    terms = torch.where(d_any[:, :, None] & q_keep[:, None], best, 0)
    if q_weight is not None:
        terms = terms * torch.where(q_keep, q_weight, 0)[:, None]
    return terms.sum(-1).masked_fill(q_keep.any(-1)[:, None] & ~d_any, float("-inf"))


def maxsim(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    normalize: bool = False,
) -> Tensor:
    """Return the scores of `maxsim_with_argmax`."""
    return maxsim_with_argmax(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=normalize)[0]


def maxsim_soft(
    Q: Tensor,
    D: Tensor,
    temperature: float | Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    normalize: bool = False,
) -> Tensor:
    """Return ``score[i, j] = sum_s w[i, s] * tau * logsumexp_t(<Q[i, s], D[j, t]> / tau)`` over the kept tokens t.

    Masks and shapes are the same as in `maxsim`.
    """
    Qn, q_keep, Dn, d_keep, q_weight = _prepare(Q, D, q_mask, d_mask, q_weight, normalize)
    if isinstance(temperature, Tensor):
        is_valid = temperature.dim() == 0 and temperature.dtype in _WEIGHTS and temperature.device == Q.device
    else:
        is_valid = isinstance(temperature, (int, float)) and not isinstance(temperature, bool) and temperature > 0
    if not is_valid:
        raise ValueError(f"reference: temperature: expected a number above 0 or a 0-dim Tensor, got {temperature}")
    d_any = d_keep.any(-1)
    keep = d_keep | ~d_any[..., None]  # a sum over nothing has no gradient, not even 0
    S = (similarities(Qn, Dn) / temperature).masked_fill(~keep[:, :, None], float("-inf"))
    best = torch.logsumexp(S, -1) * temperature
    return _drop_axes(_sum_maxima(best, q_keep, q_weight, d_any), Q, D)


def maxsim_from_hidden(
    Q: Tensor,
    H: Tensor,
    W: Tensor,
    b: Tensor | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """Return `maxsim` of Q and ``D = H W^T + b``. With `normalize`, only D is divided by ``max(||D||, 1e-12)``."""
    for name, x in (("H", H), ("W", W), ("b", b)):
        is_right = isinstance(x, Tensor) and x.dtype in _WEIGHTS and x.layout == torch.strided
        if not is_right and not (x is None and name == "b"):
            raise TypeError(f"reference: {name}: expected a dense Tensor of floats, got {type(x).__name__}")
    if W.dim() != 2 or H.dim() not in (2, 3) or W.shape != (Q.shape[-1], H.shape[-1]):
        expected = f"[{Q.shape[-1]}, d_model] and [Nd, Ld, d_model]"
        raise ValueError(f"reference: W, H: expected {expected}, got {list(W.shape)}, {list(H.shape)}")
    if b is not None and b.shape != W.shape[:1]:
        raise ValueError(f"reference: b: expected {list(W.shape[:1])}, got {list(b.shape)}")
    if d_mask is not None and d_mask.shape != H.shape[:-1]:
        raise ValueError(f"reference: d_mask: expected {list(H.shape[:-1])}, got {list(d_mask.shape)}")
    if not isinstance(normalize, bool):
        raise TypeError(f"reference: normalize: expected a bool, got {type(normalize).__name__}")
    hidden, _ = _prepare_tokens(H, d_mask, False)
    D = hidden @ W.to(hidden).t() + (0 if b is None else b.to(hidden))
    D = F.normalize(D, dim=-1) if normalize else D
    return maxsim(Q, D, q_mask, d_mask, q_weight=q_weight)


def maxsim_pairs(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    normalize: bool = False,
) -> Tensor:
    """Return the scores ``[B]`` of query i and document i, for ``Q [B, Lq, d]`` and ``D [B, Ld, d]``."""
    if Q.dim() != 3 or D.dim() != 3:
        raise ValueError(f"reference: Q, D: expected [B, Lq, d], [B, Ld, d], got {list(Q.shape)}, {list(D.shape)}")
    _check(Q, D, q_mask, d_mask, q_weight, normalize)
    d_mask = None if d_mask is None else d_mask[:, None]
    return maxsim(Q, D[:, None], q_mask, d_mask, q_weight=q_weight, normalize=normalize)[:, 0]


def maxsim_at(
    Q: Tensor, D: Tensor, argmax: Tensor, *, q_weight: Tensor | None = None, normalize: bool = False
) -> Tensor:
    """Return the scores for a given argmax: ``sum_s w[i, s] * <Q[i, s], D[j, argmax[i, j, s]]>`` where argmax >= 0.

    The function is differentiable, so it gives the exact gradients for the argmax of a kernel. Due to rounding, a
    kernel may select another token than the oracle. `argmax` is ``[Nq, Nd, Lq]``, or ``[Nq, K, Lq]`` for 4-D `D`.
    """
    _check(Q, D, None, None, q_weight, normalize)
    expected = (len(Q), D.shape[-3] if D.dim() > 2 else 0, Q.shape[-2])
    if argmax.shape != expected or argmax.dtype not in _MASKS[1:]:
        actual = f"{argmax.dtype} {list(argmax.shape)}"
        raise ValueError(f"reference: argmax: expected integers {list(expected)}, got {actual}")
    has_argmax = argmax >= 0
    if D.shape[-2] == 0:  # indexing needs one token, which no argmax refers to
        D = F.pad(D, (0, 0, 0, 1))
    index = argmax.clamp(min=0).long()
    rows = torch.arange(Q.shape[0], device=Q.device)[:, None, None]
    columns = torch.arange(argmax.shape[1], device=Q.device)[:, None]
    # Rows without an argmax are zeroed before any arithmetic. They may hold NaN, and 0 * NaN is NaN.
    Qz = torch.where(has_argmax.any(1)[..., None], Q, 0)
    Dz = D[columns, index] if D.dim() == 3 else D[rows, columns, index]
    Dz = torch.where(has_argmax[..., None], Dz, 0)
    if normalize:
        Qz, Dz = F.normalize(Qz, dim=-1), F.normalize(Dz, dim=-1)
    terms = torch.einsum("isd,ijsd->ijs", Qz, Dz)
    if q_weight is not None:
        terms = terms * torch.where(has_argmax.any(1), q_weight, 0)[:, None]
    return terms.sum(-1)


def maxsim_xtr(
    Q: Tensor,
    D: Tensor,
    top_k: int,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    normalizer: str = "retrieved",
) -> Tensor:
    """Return XTR scores ``[Nq, Nd]``: maxima over the `top_k` best tokens of the batch, divided by their number."""
    Qn, q_keep, Dn, d_keep, q_weight = _prepare(Q, D, q_mask, d_mask, q_weight, False)
    S = similarities(Qn, Dn).masked_fill(~d_keep[:, :, None], float("-inf"))  # [Nq, Nd, Lq, Ld]
    candidates = S.transpose(1, 2).flatten(2)
    if not candidates.shape[2]:  # no documents
        return _drop_axes(S.sum((-1, -2)), Q, D)
    threshold = candidates.topk(min(top_k, candidates.shape[2]), dim=2).values[..., -1]
    best = S.amax(-1)
    is_retrieved = (best >= threshold[:, None]) & (best > float("-inf"))
    if normalizer == "positive":
        is_retrieved = is_retrieved & (best > 0)
    is_retrieved = (is_retrieved | best.isnan()) & q_keep[:, None]
    terms = torch.where(is_retrieved, best, 0)
    if q_weight is not None:
        terms = terms * torch.where(q_keep, q_weight, 0)[:, None]
    scores = terms.sum(-1) / is_retrieved.sum(-1).clamp(min=1e-3 if normalizer == "positive" else 1)
    return _drop_axes(scores.masked_fill(q_keep.any(-1)[:, None] & ~d_keep.any(-1), float("-inf")), Q, D)


def maxsim_token_topk(
    Q: Tensor,
    D: Tensor,
    top_k: int,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    reduction: str = "sum",
) -> Tensor:
    """Return ``sum_s w[i, s] *`` the sum, or the mean, of the `top_k` largest similarities of kept tokens.

    Masks and shapes are the same as in `maxsim`.
    """
    Qn, q_keep, Dn, d_keep, q_weight = _prepare(Q, D, q_mask, d_mask, q_weight, normalize)
    S = similarities(Qn, Dn).masked_fill(~d_keep[:, :, None], float("-inf"))
    best = S.sort(dim=-1, descending=True, stable=True).values[..., :top_k]
    count = d_keep.sum(-1)[:, :, None]
    terms = torch.where(torch.arange(best.shape[-1], device=Q.device) < count[..., None], best, 0).sum(-1)
    if reduction == "mean":
        terms = terms / count.clamp(1, top_k)
    return _drop_axes(_sum_maxima(terms, q_keep, q_weight, d_keep.any(-1)), Q, D)


def chamfer_distance(
    P: Tensor,
    R: Tensor,
    *,
    metric: str = "sqeuclidean",
    p_lengths: Tensor | None = None,
    r_lengths: Tensor | None = None,
    p_weight: Tensor | None = None,
    r_weight: Tensor | None = None,
) -> Tensor:
    """Return ``mean_i min_j c(P[i], R[j]) + mean_j min_i c(P[i], R[j])`` of each pair of clouds.

    The arguments are described at `lik_ops.chamfer_distance`.
    """
    if P.dim() == 2:
        tensors = [None if x is None else x[None] for x in (p_lengths, r_lengths, p_weight, r_weight)]
        options = dict(zip(("p_lengths", "r_lengths", "p_weight", "r_weight"), tensors, strict=True))
        return chamfer_distance(P[None], R[None], metric=metric, **options)[0]
    distances = []
    for b in range(len(P)):
        N, M = (X.shape[1] if n is None else int(n[b]) for X, n in ((P, p_lengths), (R, r_lengths)))
        if not (0 <= N <= P.shape[1] and 0 <= M <= R.shape[1]):
            distances.append(P.new_full((), float("nan")))
            continue
        x = P[b, :N, None] - R[b, None, :M]
        c = x.square().sum(-1) if metric == "sqeuclidean" else x.abs().sum(-1)
        total = P.new_zeros(())
        for axis, w in ((1, p_weight), (0, r_weight)):
            if c.shape[1 - axis] == 0:
                continue
            if c.shape[axis] == 0:
                total = total + float("inf")
                continue
            minima = c.min(axis).values
            total = total + (minima if w is None else minima * w[b, : len(minima)]).mean()
        distances.append(total)
    return torch.stack(distances) if distances else P.new_zeros(0)


def maxsim_cross_entropy(
    Q: Tensor,
    D: Tensor,
    labels: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Return ``-log_softmax(maxsim(Q, D) / temperature)[i, labels[i]]``, summed, averaged, or for each query.

    The loss of an ignored query is 0. A label that is not a document gives NaN.
    """
    scores = maxsim(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=normalize)
    if labels.shape != scores.shape[:1] or labels.dtype not in _MASKS[1:]:
        raise ValueError(f"reference: labels: expected integers {[len(Q)]}, got {labels.dtype} {list(labels.shape)}")
    is_valid = (labels >= 0) & (labels < scores.shape[1])
    logs = F.pad(scores / temperature, (0, 1), value=float("-inf")).log_softmax(1)
    is_ignored = labels.long() == ignore_index
    losses = -logs.gather(1, torch.where(is_valid, labels, 0).long()[:, None])[:, 0]
    losses = torch.where(is_ignored, 0, losses * torch.where(is_valid | is_ignored, 1, torch.nan))
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~is_ignored).sum()


def plaid_approx_score(
    Q: Tensor,
    codes: Tensor,
    centroids: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    n_probe: int | None = None,
) -> Tensor:
    """Return ``score[i, j] = sum_s w[i, s] * max_t <Q[i, s], centroids[codes[j, t]]>`` for finite ``Q [Nq, Lq, d]``.

    A document of ``codes [Nd, Ld]`` that keeps no token scores -inf. With `n_probe`, so does a document without a token
    of a probed centroid. Each kept query token probes the `n_probe` centroids with the largest products. A document
    with a code that is not a centroid scores NaN.
    """
    _check(Q, codes[..., None].expand(*codes.shape, Q.shape[-1]), q_mask, d_mask, q_weight, normalize)
    Qn, q_keep = _prepare_tokens(Q, q_mask, normalize)
    hits = torch.ones_like(codes, dtype=torch.bool) if d_mask is None else d_mask != 0
    products = Qn @ centroids.t()  # [Nq, Lq, C]
    count = len(centroids)
    codes = torch.where((codes >= 0) & (codes < count), codes, count).long()
    S = F.pad(products, (0, 1), value=torch.nan)[..., codes].transpose(1, 2)  # [Nq, Nd, Lq, Ld]
    S = S.masked_fill(~hits[:, None], float("-inf"))
    best = F.pad(S, (0, 1), value=float("-inf")).amax(-1)  # the maximum needs one token
    weight = q_keep.to(S) if q_weight is None else torch.where(q_keep, q_weight, 0)
    if n_probe is not None:
        nearest = products.topk(min(n_probe, count), dim=-1).indices
        is_probed = torch.zeros_like(products, dtype=torch.bool).scatter(-1, nearest, True) & q_keep[..., None]
        hits = hits & F.pad(is_probed.any(1), (0, 1), value=True)[:, codes]  # [Nq, Nd, Ld]
    return (best * weight[:, None]).sum(-1).masked_fill(~hits.any(-1), float("-inf"))


def pool_tokens(
    D: Tensor, factor: float, *, metric: str = "cosine", num_protected: int = 1, normalize: bool = False
) -> Tensor:
    """Return one document ``D [L, d]`` with clusters of similar tokens replaced by their mean, by Ward's method.

    Ward (1963) merges the two clusters of least cost until ``max(int(m // factor), 1)`` of m clusters are left. Merges
    of the same cost as the last one follow. Clusters are in the order of their first tokens.
    """
    D, _ = _prepare_tokens(D, None, False)
    protected_tokens, tokens = D[:num_protected], D[num_protected:]
    distances = 1 - tokens.detach() @ tokens.detach().t()
    if metric == "rows":
        distances = torch.cdist(distances, distances, compute_mode="donot_use_mm_for_euclid_dist")
    costs = distances.square().fill_diagonal_(float("inf"))  # [m, m], of merging two clusters
    sizes = torch.ones(len(tokens), dtype=costs.dtype, device=costs.device)
    clusters = {i: [i] for i in range(len(tokens))}  # by first token
    count, last = max(int(len(tokens) // factor), 1), float("-inf")
    while len(clusters) > 1:
        min_cost = float(costs.min())
        if len(clusters) <= count and min_cost > last:
            break
        last = min_cost
        a, b = sorted(divmod(int(costs.argmin()), len(tokens)))
        # The formula of Lance and Williams (1967): the costs of merging the union of a and b with each cluster k.
        sums = (sizes[a] + sizes) * costs[a] + (sizes[b] + sizes) * costs[b] - sizes * min_cost
        costs[a] = costs[:, a] = sums / (sizes[a] + sizes[b] + sizes)
        costs[b] = costs[:, b] = float("inf")
        costs[a, a] = float("inf")
        sizes[a] += sizes[b]
        clusters[a] += clusters.pop(b)
    means = [tokens[members].mean(0) for members in clusters.values()]
    pooled_tokens = torch.stack([*protected_tokens, *means]) if len(D) else D
    return F.normalize(pooled_tokens, dim=-1) if normalize else pooled_tokens
