"""Memory for what kernels write, and the stream that they are launched on, with little host time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import launcher
from .arguments import current_device

# None where torch was built without CUDA and ROCm.
raw_stream: Callable = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]
# What inductor's code calls, microseconds quicker than torch.empty; it fills no memory for deterministic algorithms.
allocate_cuda = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)
is_deterministic = torch.are_deterministic_algorithms_enabled
Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


def compute_contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """As torch has them: an axis of size 0 counts as one of size 1."""
    strides, count = [], 1
    for size in reversed(shape):
        strides.append(count)
        count *= max(size, 1)
    return tuple(reversed(strides))


def allocate_tensor(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor to be filled by a kernel."""
    usual, filling = makers(device)
    if usual is filling or is_deterministic() or current_device() != device.index:
        return filling(shape, strides, dtype)
    # A recorder sees what torch allocates.
    return (usual if launcher.thread_state.active_recorder is None else filling)(shape, strides, dtype)


def makers(device: torch.device) -> tuple[Allocator, Allocator]:
    """What makes memory on `device`: where it is the current one and nobody records, and always. Only the latter fills
    memory where `is_deterministic`."""

    def by_torch(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    usual = (
        by_torch if allocate_cuda is None or device.index is None else allocate_cuda
    )  # the interpreter's has no index
    return usual, by_torch
