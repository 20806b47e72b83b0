"""The orthogonal matrix that rotates the tokens of rotated formats.

After a random rotation, every feature of a token has about the same distribution, near a Gaussian one, so one scale
suits all features. Dot products are unchanged if queries are rotated too. The rotation is a randomized Hadamard
transform: rounds of random signs and of a Hadamard transform, as in RaBitQ (Gao and Long, 2024). If d is not a power of
two, a round transforms the first 2^k features, then the last 2^k features, with 2^k the largest power of two up to d.

The signs have a fixed seed and the matrix is computed element by element in fp64, so it is the same on every device and
in every release. Stored tokens depend on it.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

_SEED, _ROUNDS = 54, 3
_MAX_CACHED = 16
_cached: dict[tuple[int, torch.device], Tensor] = {}


def rotate(x: Tensor, inverse: bool = False) -> Tensor:
    """Rotate tokens ``[..., d]`` in fp64, then round them to their dtype, by way of fp32 if that is half precision."""
    matrix = make_rotation(x.shape[-1], x.device)
    return (x.double() @ (matrix.T if inverse else matrix)).to(x.dtype)


def make_rotation(d: int, device: torch.device) -> Tensor:
    """Return the orthogonal matrix of d features, fp64 ``[d, d]``, which multiplies rows from the right."""
    matrix = _cached.get((d, device))
    if matrix is None:
        matrix = _compute_rotation(d).to(device)
        if type(matrix) is Tensor:  # not a tensor of a tracer
            if len(_cached) >= _MAX_CACHED:
                _cached.clear()
            _cached[d, device] = matrix
    return matrix


# `torch.compiler.assume_constant_result` sets this too, but imports Dynamo.
make_rotation._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _compute_rotation(d: int) -> Tensor:
    """Return the matrix on the CPU."""
    generator, width = random.Random(_SEED), 1 << (d.bit_length() - 1)
    x = torch.eye(d, dtype=torch.float64, device="cpu")  # a column is a token
    for _ in range(_ROUNDS):
        for begin in (0, d - width) if width < d else (0,):
            signs = torch.tensor([1 - 2 * generator.getrandbits(1) for _ in range(d)], device="cpu")
            x *= signs.unsqueeze(1)
            x[begin : begin + width] = _transform(x[begin : begin + width])
    return x.T.contiguous()


def _transform(x: Tensor) -> Tensor:
    """Return the orthonormal Hadamard transform of columns whose length is a power of two."""
    width, step = len(x), 1
    while step < width:
        a, b = x.reshape(width // (2 * step), 2, step, -1).unbind(1)
        x = torch.stack([a + b, a - b], 1)
        step *= 2
    return x.reshape(width, -1) * width**-0.5
