"""Nearest points by plain torch, in blocks of distances."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...core.arguments import score_dtype
from ...portable.backward.dense import backward_lowmem
from ...portable.blocks import multiply_matrices, sum_pairwise

_MAX_BLOCK_BYTES = 2**20
_BLOCK_ROWS = 128
MIN_PRODUCT_FEATURES = 16  # coordinates from which inner products say who is nearest, on every device
_NO_POINT = 2**31 - 1
Nearest = tuple[Tensor, Tensor, Tensor, Tensor]


def forward_chamfer(P: Tensor, R: Tensor, p_lengths: Tensor | None, r_lengths: Tensor | None, metric: str) -> Nearest:
    """As `lik::chamfer_fwd` has them."""
    ok, keeps = _mask_lengths((P, R), (p_lengths, r_lengths))
    P, R = (X.to(score_dtype(X.dtype)).contiguous() for X in (P, R))
    P, R = (X if keep is None else torch.where(keep[:, :, None], X, 0) for X, keep in zip((P, R), keeps, strict=True))
    of_P, of_R = _NearestPoints(P), _NearestPoints(R)
    products = metric == "sqeuclidean" and P.shape[2] >= MIN_PRODUCT_FEATURES
    p, r = (_compute_terms(X) if products else (X,) for X in (P, R))
    for own, rows, columns in _iterate_blocks(P, R, products):
        x, y = [t[own, rows] for t in p], [t[own, columns] for t in r]
        S = _approximate_distances(*x, *y) if products else _compute_distances(x[0], y[0], metric)
        of_P.take(S, own, rows, columns, keeps[1])
        of_R.take(S.mT, own, columns, rows, keeps[0])
    if products:
        of_P.measure(P, R, metric)
        of_R.measure(R, P, metric)
    return *of_P.found(keeps[0], ok), *of_R.found(keeps[1], ok)


def backward_chamfer(
    of_P: Tensor | None,
    of_R: Tensor | None,
    P: Tensor,
    R: Tensor,
    nearest: Tensor,
    nearest_R: Tensor,
    metric: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    """As `lik::chamfer_bwd` has them."""
    return sum_point_gradients(
        (of_P, of_R), (P, R), (nearest, nearest_R), metric, needs, _compute_slopes, backward_lowmem
    )


def sum_point_gradients(
    of: tuple[Tensor | None, Tensor | None],
    clouds: tuple[Tensor, Tensor],
    nearest: tuple[Tensor, Tensor],
    metric: str,
    needs: list[bool],
    slopes_of: Callable[..., Tensor],
    lowmem: Callable[..., tuple[Tensor, ...]],
) -> tuple[Tensor, Tensor]:
    """Of each point what its own distance gives it, less the slopes of those that chose it: these won it."""
    sides = (clouds[0], clouds[1], nearest[0]), (clouds[1], clouds[0], nearest[1])
    slopes = [None if g is None else slopes_of(g, *side, metric) for g, side in zip(of, sides, strict=True)]
    grads = []
    for n, X in enumerate(clouds):
        own, other = slopes[n], slopes[1 - n]
        if not needs[n]:
            grads.append(X.new_empty(0))
            continue
        total = own
        if other is not None:
            like, argmax = X.to(other.dtype).unsqueeze(1), nearest[1 - n].contiguous().unsqueeze(1)
            ones = other.new_ones((len(other), 1))
            found = lowmem(ones, other, like, argmax, None, None, None, False, [False, True, False])[1].squeeze(1)
            total = found.neg_() if own is None else torch.sub(own, found, out=found)
        grads.append(X.new_zeros(X.shape) if total is None else total.to(X.dtype))
    return grads[0], grads[1]


def _compute_slopes(grad: Tensor, X: Tensor, Y: Tensor, nearest: Tensor, metric: str) -> Tensor:
    """What the distances of X give its points, ``[B, N, d]``: 0 where there is no nearest, whatever lies there."""
    if Y.shape[1] == 0:
        return X.new_zeros(X.shape, dtype=grad.dtype)
    nobody = (nearest < 0)[:, :, None]
    at = nearest.clamp_min(0).long()[:, :, None].expand(-1, -1, Y.shape[2])
    x = X.to(grad.dtype).contiguous() - Y.gather(1, at).to(grad.dtype)
    slope = x.sign_() if metric == "l1" else x.mul_(2)
    return slope.mul_(grad[:, :, None]).masked_fill_(nobody, 0)


def _mask_lengths(
    clouds: tuple[Tensor, Tensor], lengths: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Of which batches the lengths can be, and which points count; None for all. Nobody counts where one cannot be."""
    oks = [(n >= 0) & (n <= X.shape[1]) for X, n in zip(clouds, lengths, strict=True) if n is not None]
    if not oks:
        return None, [None, None]
    ok = torch.stack(oks).all(0)
    keeps: list[Tensor | None] = []
    for X, n in zip(clouds, lengths, strict=True):
        places = torch.arange(X.shape[1], device=X.device)
        keeps.append(ok[:, None] & (places < (X.shape[1] if n is None else n[:, None])))
    return ok, keeps


def _iterate_blocks(P: Tensor, R: Tensor, products: bool) -> Iterator[tuple[slice, slice, slice]]:
    """Batches, points of P and points of R. Bits of products must not hang on the batch: one at a time."""
    (B, N, _), M = P.shape, R.shape[1]
    if B * N * M == 0:
        return
    rows = min(N, _BLOCK_ROWS)
    columns = max(1, min(M, _MAX_BLOCK_BYTES // (rows * P.itemsize)))
    batches = 1 if products else max(1, _MAX_BLOCK_BYTES // (rows * columns * P.itemsize))
    for b in range(0, B, batches):
        for i in range(0, N, rows):
            for j in range(0, M, columns):
                yield slice(b, b + batches), slice(i, i + rows), slice(j, j + columns)


def _apply_metric(x: Tensor, metric: str) -> Tensor:
    return x.abs_() if metric == "l1" else x.mul_(x)


def _compute_distances(P: Tensor, R: Tensor, metric: str) -> Tensor:
    """``[B, N, M]``, coordinate after coordinate."""
    S, *rest = (_apply_metric(x[..., None] - y[:, None], metric) for x, y in zip(P.unbind(2), R.unbind(2), strict=True))
    for x in rest:
        S += x
    return S


def _compute_terms(X: Tensor) -> tuple[Tensor, Tensor]:
    """Points and half their squared norms; of one that is not finite zeros, so that it is infinitely far, or NaN."""
    half = sum_pairwise(X.square()) / 2
    return torch.where(half.isfinite()[:, :, None], X, 0), half


def _approximate_distances(P: Tensor, p: Tensor, R: Tensor, r: Tensor) -> Tensor:
    """Squared distances by half, ``p + r - <P, R>`` of `_compute_terms`: finite, and near enough to find who is
    nearest."""
    return p[:, :, None] + (r[:, None] - multiply_matrices(P[0], R[0].mT)[None])


class _NearestPoints:
    """The least distance of each point of a cloud so far, and whose it is."""

    def __init__(self, X: Tensor) -> None:
        self.best = X.new_full(X.shape[:2], torch.inf)
        self.where = torch.full(X.shape[:2], _NO_POINT, dtype=torch.int32, device=X.device)

    def take(self, S: Tensor, own: slice, rows: slice, columns: slice, keep: Tensor | None) -> None:
        """Distances of `rows` to the `columns` to keep; the lowest where they are equal, NaN before all."""
        kept = None if keep is None else keep[own, None, columns]
        S = S if kept is None else torch.where(kept, S, torch.inf)
        m = S.amin(2)
        places = torch.arange(columns.start, columns.start + S.shape[2], dtype=torch.int32, device=S.device)
        hit = (m.unsqueeze(2) == S) | S.isnan()
        first = torch.where(hit if kept is None else hit & kept, places, _NO_POINT).amin(2)
        best, where = self.best[own, rows], self.where[own, rows]
        better = (m < best) | (m.isnan() & ~best.isnan()) | ((m == best) & (where == _NO_POINT))
        where.copy_(torch.where(better, first, where))
        best.copy_(torch.where(better, m, best))

    def measure(self, X: Tensor, Y: Tensor, metric: str) -> None:
        """The distances from differences, exact where products were not. What was NaN stays so."""
        if Y.shape[1] == 0:
            return
        found = self.where != _NO_POINT
        nearest = torch.where(found, self.where, 0).long()[:, :, None].expand(-1, -1, Y.shape[2])
        distances = _apply_metric(X - Y.gather(1, nearest), metric).sum(2)
        self.best = torch.where(found & ~self.best.isnan(), distances, self.best)

    def found(self, keep: Tensor | None, ok: Tensor | None) -> tuple[Tensor, Tensor]:
        """Distances, and whose they are: 0 and -1 beyond the end of a cloud, NaN and -1 where a length cannot be."""
        distances, nearest = self.best, torch.where(self.where == _NO_POINT, -1, self.where)
        if keep is None or ok is None:
            return distances, nearest
        distances = torch.where(ok[:, None], torch.where(keep, distances, 0), torch.nan)
        return distances, torch.where(keep, nearest, -1)
