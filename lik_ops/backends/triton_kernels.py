"""The Triton backend as one module: what `backends.select` returns."""

from .cuda import forward, unavailable
from .cuda_backward import backward_lowmem, backward_unified

__all__ = ["backward_lowmem", "backward_unified", "forward", "unavailable"]
