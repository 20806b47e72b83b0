"""Sample inputs and references of ``lik::chamfer_fwd`` and ``lik::chamfer_bwd``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

_SHAPES = ((2, 5, 7, 3), (1, 40, 33, 20), (3, 1, 4, 1), (2, 0, 3, 3), (0, 4, 4, 2))  # B, N, M, d


def _make_cloud(random: torch.Generator, shape: tuple, dtype: torch.dtype, device: str, grad: bool) -> Tensor:
    """Draw random points."""
    return torch.randn(shape, generator=random).to(device, dtype).requires_grad_(grad)


def _make_lengths(random: torch.Generator, B: int, most: int, device: str) -> Tensor:
    """Draw random lengths from 0 to `most`."""
    return torch.randint(0, most + 1, (B,), generator=random).to(device)


def samples(dtype: torch.dtype, device: str) -> Iterator[tuple[str, tuple]]:
    """Yield the samples of the forward."""
    random = torch.Generator().manual_seed(0)
    for (B, N, M, d), metric, cut in itertools.product(_SHAPES, ("sqeuclidean", "l1"), (False, True)):
        clouds = (
            _make_cloud(random, (B, N, d), dtype, device, not cut),
            _make_cloud(random, (B, M, d), dtype, device, metric == "l1"),
        )
        lengths = (
            (_make_lengths(random, B, N, device), _make_lengths(random, B, M, device).int()) if cut else (None, None)
        )
        yield f"{B}x{N}x{M}x{d}-{metric}{'-lengths' * cut}-{dtype}", (*clouds, *lengths, metric)
    P, R = _make_cloud(random, (2, 3, 6), dtype, device, True), _make_cloud(random, (2, 6, 4), dtype, device, True)
    yield f"strided-{dtype}", (P.mT[..., :2], R[..., 1:3], None, None, "sqeuclidean")


def reference(P: Tensor, R: Tensor, p_lengths: Tensor | None, r_lengths: Tensor | None, metric: str) -> tuple:
    """Return the expected distances. Indices are not compared, because rounded distances may tie."""
    x = P[:, :, None] - R[:, None]
    c = x.square().sum(-1) if metric == "sqeuclidean" else x.abs().sum(-1)
    places = [torch.arange(n, device=c.device) for n in c.shape[1:]]
    keeps = [
        torch.ones(c.shape[0], len(at), dtype=torch.bool, device=c.device) if n is None else at < n[:, None]
        for at, n in zip(places, (p_lengths, r_lengths), strict=True)
    ]
    there = keeps[0][:, :, None] & keeps[1][:, None]
    found: list = []
    for axis, keep in ((2, keeps[0]), (1, keeps[1])):
        if c.shape[axis]:
            least = torch.where(there, c, torch.inf).amin(axis)
            some = torch.where(there.any(axis), least, torch.inf)  # without a point the minimum has no gradient
        else:
            some = torch.full(keep.shape, torch.inf, dtype=c.dtype, device=c.device)
        found += [torch.where(keep, some, 0), None]
    return tuple(found)


def sized(sizes: tuple[int, int, int, int], cut: bool, device: str) -> tuple:
    """Return arguments of the forward for given sizes."""
    B, _, N, M = sizes
    random = torch.Generator().manual_seed(1)
    lengths = (_make_lengths(random, B, N, device), _make_lengths(random, B, M, device)) if cut else (None, None)
    clouds = (
        _make_cloud(random, (B, N, 8), torch.float32, device, False),
        _make_cloud(random, (B, M, 8), torch.float32, device, False),
    )
    return *clouds, *lengths, "l1"


def backward_samples(dtype: torch.dtype, device: str) -> Iterator[tuple[str, tuple]]:
    """Yield the samples of the backward."""
    random = torch.Generator().manual_seed(2)
    for n, (name, (P, R, *rest)) in enumerate(samples(dtype, device)):
        P, R, metric = P.detach(), R.detach(), rest[-1]
        of_P, nearest, of_R, nearest_R = torch.ops.lik.chamfer_fwd(P, R, *rest)
        grads = [torch.randn(x.shape, generator=random).to(x) for x in (of_P, of_R)]
        for k in range(2):
            if n % 4 == k + 1:
                grads[k] = None  # type: ignore[call-overload]
        yield name, (*grads, P, R, nearest, nearest_R, metric, [n % 3 != 1, n % 3 != 2])


def backward_reference(of_P, of_R, P, R, nearest, nearest_R, metric, needs) -> tuple:
    """Return the expected gradients."""
    total = [torch.zeros_like(P), torch.zeros_like(R)]
    for n, (g, X, Y, at) in enumerate(((of_P, P, R, nearest), (of_R, R, P, nearest_R))):
        if g is None or Y.shape[1] == 0:
            continue
        there = (at >= 0)[..., None]
        at = at.clamp(min=0).long()[..., None].expand(-1, -1, X.shape[2])
        x = X - Y.gather(1, at)
        slope = torch.where(there, (x.sign() if metric == "l1" else 2 * x) * g[..., None], 0)
        total[n] = total[n] + slope
        total[1 - n] = total[1 - n].scatter_add(1, at, -slope)
    return tuple(x if need else None for x, need in zip(total, needs, strict=True))


def sized_backward(sizes: tuple[int, int, int, int], cut: bool, device: str) -> tuple:
    """Return arguments of the backward for given sizes."""
    P, R, *rest = sized(sizes, cut, device)
    of_P, nearest, of_R, nearest_R = torch.ops.lik.chamfer_fwd(P, R, *rest)
    return of_P, of_R, P, R, nearest, nearest_R, rest[-1], [True, True]
