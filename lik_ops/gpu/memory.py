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
empty_cuda = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)
_is_deterministic = torch.are_deterministic_algorithms_enabled


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """As torch has them: an axis of size 0 counts as one of size 1."""
    strides, count = [], 1
    for size in reversed(shape):
        strides.append(count)
        count *= max(size, 1)
    return tuple(reversed(strides))


def new_memory(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor to be filled by a kernel."""
    return maker(device)(shape, strides, dtype)


def maker(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """`new_memory` on `device`, for as long as nothing that it looks at changes."""
    if device.index is None or launcher.recording.by is not None or current_device() != device.index:
        return _by_torch(device)  # in the interpreter, and for a recorder, which sees what torch allocates
    return current_maker(device)


def current_maker(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """`maker` where `device` is known to be the current one, and nobody to record."""
    if empty_cuda is None or device.index is None or _is_deterministic():
        return _by_torch(device)
    return empty_cuda


def _by_torch(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)
