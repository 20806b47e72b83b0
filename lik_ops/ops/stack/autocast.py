"""`torch.autocast`: embeddings are cast to the dtype of the region, as in a matrix product."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_CAST_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Computed once, because Dynamo of torch 2.11 cannot trace the query.
DEVICE_TYPES = frozenset(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia") if torch.amp.is_autocast_available(kind)
)


def _any_of_cpu_and_cuda() -> bool:
    """Return whether autocast is enabled on the CPU or on CUDA."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


# Returns whether autocast is enabled on any device. A single call costs tens of nanoseconds.
is_enabled_anywhere: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", _any_of_cpu_and_cuda)


def suspend_autocast(kind: str) -> AbstractContextManager:
    """Return a context manager that disables autocast on devices of a type."""
    if kind not in DEVICE_TYPES or not (torch.compiler.is_dynamo_compiling() or is_enabled_anywhere()):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def cast_to_autocast(Q: Any, D: Any, q_weight: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the arguments in the dtype of the autocast region of their device. fp64 stays, as everywhere in autocast.

    Weights in half precision, which layers inside the region produce, become fp32.
    """
    if not torch.compiler.is_dynamo_compiling() and not is_enabled_anywhere():
        return Q, D, q_weight
    tensors = [Q, D] if q_weight is None else [Q, D, q_weight]
    if not all(isinstance(t, Tensor) for t in tensors):
        return Q, D, q_weight  # validation raises an error that names the argument
    kind = Q.device.type
    if kind not in DEVICE_TYPES or not torch.is_autocast_enabled(kind):
        return Q, D, q_weight
    dtype = torch.get_autocast_dtype(kind)
    Q, D = (t.to(dtype) if t.dtype in _CAST_DTYPES else t for t in (Q, D))
    if q_weight is not None and q_weight.dtype in _CAST_DTYPES:
        q_weight = q_weight.float()
    return Q, D, q_weight
