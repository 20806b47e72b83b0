"""Operator outputs that a selective activation checkpoint caches, in calls from compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import _C, Tensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _modes

_CACHING: Any = getattr(checkpoint, "_CachingTorchDispatchMode", ())
# The modes of a tracer. Tracers record calls, so a copy would become a node of the graph.
_TRACING = [getattr(_C._TorchDispatchModeKey, key) for key in ("FAKE", "PROXY", "FUNCTIONAL")]


def copy_cached(outputs: Any) -> Any:
    """Return copies of the tensors that a checkpoint's cache holds, or `outputs` if there is no such cache.

    The cache and the caller share the tensors that an operator returns. Eager code that writes to one increments its
    version, which the cache checks. Compiled code reuses the buffers of intermediate results without incrementing
    versions. Without copies, the backward would read the data that was last written there.
    """
    modes = _modes()
    if not any(isinstance(mode, _CACHING) for mode in modes):
        return outputs
    if any(getattr(mode, "_mode_key", None) in _TRACING for mode in modes):
        return outputs
    with _C._DisableTorchDispatch():  # no mode sees the copies
        return _copy_tensors(outputs)


def _copy_tensors(outputs: Tensor | Sequence) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.clone() if type(outputs) is Tensor else outputs
    return tuple(_copy_tensors(x) for x in outputs)
