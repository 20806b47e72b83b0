"""Nearest points in plain PyTorch, computed in blocks of distances."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ...core.arguments import score_dtype
from ...portable.backward.dense import backward_lowmem
from ...portable.blocks import multiply_matrices, sum_pairwise

_MAX_BLOCK_BYTES = 2**20
_BLOCK_ROWS = 128
MIN_PRODUCT_FEATURES = 16  # from so many coordinates on, products find the nearest point, on every device
_NO_POINT = 2**31 - 1
Nearest = tuple[Tensor, Tensor, Tensor, Tensor]


def forward_chamfer(P: Tensor, R: Tensor, p_lengths: Tensor | None, r_lengths: Tensor | None, metric: str) -> Nearest:
    """Return the results of `lik::chamfer_fwd`."""
    ok, masks = _mask_lengths((P, R), (p_lengths, r_lengths))
    P, R = (X.to(score_dtype(X.dtype)).contiguous() for X in (P, R))
    P, R = (X if mask is None else torch.where(mask[:, :, None], X, 0) for X, mask in zip((P, R), masks, strict=True))
    nearest_P, nearest_R = _NearestPoints(P), _NearestPoints(R)
    products = metric == "sqeuclidean" and P.shape[2] >= MIN_PRODUCT_FEATURES
    p, r = (_compute_terms(X) if products else (X,) for X in (P, R))
    for batches, rows, columns in _iterate_blocks(P, R, products):
        x, y = [t[batches, rows] for t in p], [t[batches, columns] for t in r]
        S = _approximate_distances(*x, *y) if products else _compute_distances(x[0], y[0], metric)
        nearest_P.take(S, batches, rows, columns, masks[1])
        nearest_R.take(S.mT, batches, columns, rows, masks[0])
    if products:
        nearest_P.measure(P, R, metric)
        nearest_R.measure(R, P, metric)
    return *nearest_P.results(masks[0], ok), *nearest_R.results(masks[1], ok)


def backward_chamfer(tensors: Sequence, metric: str, needs: list[bool]) -> tuple[Tensor, Tensor]:
    """Return the results of `lik::chamfer_bwd` for its tensors."""
    return sum_point_gradients(tensors, metric, needs, _compute_slopes, backward_lowmem)


def sum_point_gradients(
    tensors: Sequence,
    metric: str,
    needs: list[bool],
    slopes_of: Callable[..., Tensor],
    lowmem: Callable[..., tuple[Tensor, ...]],
) -> tuple[Tensor, Tensor]:
    """Sum the gradient of each point: the slope of its own distance, minus the slopes of points it is nearest to.

    The second part is the document gradient of MaxSim with the nearest points as argmax. A backend provides
    `slopes_of`, which computes the gradients of the distances of one cloud, and a `backward_lowmem`. `tensors`,
    `metric`, `needs` and the results are those of `lik::chamfer_bwd`.
    """
    upstream, clouds, nearest = tensors[:2], tensors[2:4], tensors[4:]
    sides = (clouds[0], clouds[1], nearest[0]), (clouds[1], clouds[0], nearest[1])
    slopes = [None if g is None else slopes_of(g, *side, metric) for g, side in zip(upstream, sides, strict=True)]
    grads = []
    for n, X in enumerate(clouds):
        own_slopes, other_slopes = slopes[n], slopes[1 - n]
        if not needs[n]:
            grads.append(X.new_empty(0))
            continue
        total = own_slopes
        if other_slopes is not None:
            D, argmax = X.to(other_slopes.dtype).unsqueeze(1), nearest[1 - n].contiguous().unsqueeze(1)
            ones = other_slopes.new_ones((len(other_slopes), 1))
            sums = lowmem(ones, other_slopes, D, argmax, None, None, None, False, [False, True, False])[1].squeeze(1)
            total = sums.neg_() if own_slopes is None else torch.sub(own_slopes, sums, out=sums)
        grads.append(X.new_zeros(X.shape) if total is None else total.to(X.dtype))
    return grads[0], grads[1]


def _compute_slopes(grad: Tensor, X: Tensor, Y: Tensor, nearest: Tensor, metric: str) -> Tensor:
    """Compute the gradients of the distances of X by its points, ``[B, N, d]``; 0 if there is no nearest point."""
    if Y.shape[1] == 0:
        return X.new_zeros(X.shape, dtype=grad.dtype)
    is_unmatched = (nearest < 0)[:, :, None]
    index = nearest.clamp_min(0).long()[:, :, None].expand(-1, -1, Y.shape[2])
    x = X.to(grad.dtype).contiguous() - Y.gather(1, index).to(grad.dtype)
    slope = x.sign_() if metric == "l1" else x.mul_(2)
    return slope.mul_(grad[:, :, None]).masked_fill_(is_unmatched, 0)


def _mask_lengths(
    clouds: tuple[Tensor, Tensor], lengths: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return which batches have valid lengths and which points are kept; None for all.

    A batch with an invalid length keeps no point.
    """
    oks = [(n >= 0) & (n <= X.shape[1]) for X, n in zip(clouds, lengths, strict=True) if n is not None]
    if not oks:
        return None, [None, None]
    ok = torch.stack(oks).all(0)
    masks: list[Tensor | None] = []
    for X, n in zip(clouds, lengths, strict=True):
        positions = torch.arange(X.shape[1], device=X.device)
        masks.append(ok[:, None] & (positions < (X.shape[1] if n is None else n[:, None])))
    return ok, masks


def _iterate_blocks(P: Tensor, R: Tensor, products: bool) -> Iterator[tuple[slice, slice, slice]]:
    """Yield slices of batches, points of P and points of R.

    The bits of a product must not depend on the batch, so products get one batch at a time.
    """
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
    """Apply the metric to differences, in place."""
    return x.abs_() if metric == "l1" else x.mul_(x)


def _compute_distances(P: Tensor, R: Tensor, metric: str) -> Tensor:
    """Compute distances ``[B, N, M]``, one coordinate after the other."""
    S, *terms = (
        _apply_metric(x[..., None] - y[:, None], metric) for x, y in zip(P.unbind(2), R.unbind(2), strict=True)
    )
    for x in terms:
        S += x
    return S


def _compute_terms(X: Tensor) -> tuple[Tensor, Tensor]:
    """Return points and half their squared norms; the points become zeros if the norm is infinite or NaN.

    Such a point is then infinitely far, or its distance is NaN.
    """
    half = sum_pairwise(X.square()) / 2
    return torch.where(half.isfinite()[:, :, None], X, 0), half


def _approximate_distances(P: Tensor, p: Tensor, R: Tensor, r: Tensor) -> Tensor:
    """Compute half the squared distances as ``p + r - <P, R>``, accurate enough to find the nearest point."""
    return p[:, :, None] + (r[:, None] - multiply_matrices(P[0], R[0].mT)[None])


class _NearestPoints:
    """The smallest distance of each point of a cloud so far, and the index of the nearest point."""

    def __init__(self, X: Tensor) -> None:
        self.best = X.new_full(X.shape[:2], torch.inf)
        self.where = torch.full(X.shape[:2], _NO_POINT, dtype=torch.int32, device=X.device)

    def take(self, S: Tensor, batches: slice, rows: slice, columns: slice, keep: Tensor | None) -> None:
        """Merge the distances of `rows` to the kept `columns`; NaN comes before all, and the lowest index wins ties."""
        is_kept = None if keep is None else keep[batches, None, columns]
        S = S if is_kept is None else torch.where(is_kept, S, torch.inf)
        m = S.amin(2)
        positions = torch.arange(columns.start, columns.start + S.shape[2], dtype=torch.int32, device=S.device)
        is_hit = (m.unsqueeze(2) == S) | S.isnan()
        first_hit = torch.where(is_hit if is_kept is None else is_hit & is_kept, positions, _NO_POINT).amin(2)
        best, indices = self.best[batches, rows], self.where[batches, rows]
        is_better = (m < best) | (m.isnan() & ~best.isnan()) | ((m == best) & (indices == _NO_POINT))
        indices.copy_(torch.where(is_better, first_hit, indices))
        best.copy_(torch.where(is_better, m, best))

    def measure(self, X: Tensor, Y: Tensor, metric: str) -> None:
        """Recompute the distances from differences, because products are not exact. NaN stays NaN."""
        if Y.shape[1] == 0:
            return
        has_nearest = self.where != _NO_POINT
        nearest = torch.where(has_nearest, self.where, 0).long()[:, :, None].expand(-1, -1, Y.shape[2])
        distances = _apply_metric(X - Y.gather(1, nearest), metric).sum(2)
        self.best = torch.where(has_nearest & ~self.best.isnan(), distances, self.best)

    def results(self, keep: Tensor | None, ok: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return distances and indices.

        They are 0 and -1 past the end of a cloud, and NaN and -1 if a length is invalid.
        """
        distances, nearest = self.best, torch.where(self.where == _NO_POINT, -1, self.where)
        if keep is None or ok is None:
            return distances, nearest
        distances = torch.where(ok[:, None], torch.where(keep, distances, 0), torch.nan)
        return distances, torch.where(keep, nearest, -1)
