"""The portable backend: plain torch, for CPU and for any device or dtype without Triton kernels."""

from .portable_backward import backward_lowmem, backward_unified
from .portable_forward import forward

__all__ = ["backward_lowmem", "backward_unified", "forward"]
