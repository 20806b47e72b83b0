"""Allocation of output memory and lookup of the current stream with little host time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import launcher
from .arguments import current_device

# None if torch was built without CUDA and ROCm.
raw_stream: Callable = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]
# The allocator of inductor's generated code. It is microseconds faster than torch.empty and does not fill memory for
# deterministic algorithms.
allocate_cuda = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)
is_deterministic = torch.are_deterministic_algorithms_enabled
Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


def compute_contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return contiguous strides as PyTorch defines them: an axis of size 0 has the extent of size 1."""
    strides, count = [], 1
    for size in reversed(shape):
        strides.append(count)
        count *= max(size, 1)
    return tuple(reversed(strides))


def allocate_tensor(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return an uninitialized tensor for a kernel to fill."""
    allocate_fast, allocate = makers(device)
    if allocate_fast is allocate or is_deterministic() or current_device() != device.index:
        return allocate(shape, strides, dtype)
    # A recorder sees only allocations through torch.
    return (allocate_fast if launcher.thread_state.active_recorder is None else allocate)(shape, strides, dtype)


def makers(device: torch.device) -> tuple[Allocator, Allocator]:
    """Return a fast allocator and a general allocator for `device`.

    The fast allocator requires that `device` is current and that no recorder is active. Only the general allocator
    fills memory under `is_deterministic`.
    """

    def by_torch(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate through PyTorch."""
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    # The interpreter's device has no index.
    allocate_fast = by_torch if allocate_cuda is None or device.index is None else allocate_cuda
    return allocate_fast, by_torch
