"""Backend selection: `gpu` launches the Triton kernels, `portable` runs plain PyTorch on any device."""

import logging
import sys
from importlib.util import find_spec
from types import ModuleType

import torch

from .core.plan_cache import plans
from .core.settings import get_requested_backend
from .portable import backend as portable

_log = logging.getLogger("lik_ops")
_has_triton = find_spec("triton") is not None


def explain_no_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return None if the Triton kernels can compute on `device` in `dtype`, else the reason why not."""
    if not _has_triton:
        return "triton is not installed"
    if dtype == torch.float64:
        return "the Triton kernels have no fp64"
    from .gpu import backend as cuda

    return cuda.unavailable(device)


def clear_plan_caches() -> None:
    """Drop all plans and captured calls, for example after a configuration table has changed."""
    plans.clear()
    if f"{__package__}.gpu.backend" in sys.modules:
        from .gpu import backend as cuda

        cuda.forget()


def select_backend(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """Return the backend module for tensors of `device` and `dtype`.

    Raises:
        RuntimeError: the requested backend is ``"triton"``, and it cannot run there.
    """
    backend_name = get_requested_backend()
    if backend_name == "portable" or (backend_name == "auto" and device.type == "cpu"):
        return portable
    reason = explain_no_triton(device, dtype)
    if reason is None:
        from .gpu import backend as cuda

        return cuda
    if backend_name == "triton":
        raise RuntimeError(f"lik_ops: backend 'triton' cannot compute {dtype} on {device}: {reason}")
    _log.debug("portable backend for %s on %s: %s", dtype, device, reason)
    return portable
