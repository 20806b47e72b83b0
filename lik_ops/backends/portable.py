"""The portable backend: plain torch, for CPU and for any device or dtype without Triton kernels."""

from .portable_backward import backward_lowmem, backward_unified
from .portable_forward import forward
from .portable_ragged import forward_ragged
from .portable_ragged_backward import backward_ragged
from .portable_topk import best, best_of_parts

__all__ = [
    "backward_lowmem",
    "backward_ragged",
    "backward_unified",
    "best",
    "best_of_parts",
    "forward",
    "forward_ragged",
]
