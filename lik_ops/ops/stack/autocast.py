"""`torch.autocast`: embeddings take the region's dtype, whatever they arrive in, as in a matrix product."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_CAST_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Asked for once: torch 2.11's Dynamo cannot trace the question.
DEVICE_TYPES = frozenset(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia") if torch.amp.is_autocast_available(kind)
)


def _any_of_cpu_and_cuda() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


# Whether any device has a region: one call, tens of nanoseconds.
is_enabled_anywhere: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", _any_of_cpu_and_cuda)


def suspend_autocast(kind: str) -> AbstractContextManager:
    """No region of autocast on devices of a kind."""
    if kind not in DEVICE_TYPES or not (torch.compiler.is_dynamo_compiling() or is_enabled_anywhere()):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def cast_to_autocast(Q: Any, D: Any, q_weight: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arguments as a region of autocast on their device wants them; fp64 stays, as everywhere in autocast.

    Weights of a half dtype, as layers inside the region make them, become fp32.
    """
    if not torch.compiler.is_dynamo_compiling() and not is_enabled_anywhere():
        return Q, D, q_weight
    tensors = [Q, D] if q_weight is None else [Q, D, q_weight]
    if not all(isinstance(t, Tensor) for t in tensors):
        return Q, D, q_weight  # left to the error that names it
    kind = Q.device.type
    if kind not in DEVICE_TYPES or not torch.is_autocast_enabled(kind):
        return Q, D, q_weight
    dtype = torch.get_autocast_dtype(kind)
    Q, D = (t.to(dtype) if t.dtype in _CAST_DTYPES else t for t in (Q, D))
    if q_weight is not None and q_weight.dtype in _CAST_DTYPES:
        q_weight = q_weight.float()
    return Q, D, q_weight
