"""The Triton backend: turns tensors into kernel arguments, picks configurations and launches.

Runs on CUDA and ROCm GPUs, and on CPU tensors under Triton's interpreter (``TRITON_INTERPRET=1``), which the tests use.
"""

from . import forward as cuda_forward
from . import numbers
from . import ragged_forward as cuda_ragged
from .arguments import architecture, unavailable
from .backward import GradientPlan, backward_lowmem, backward_unified
from .chamfer import backward_chamfer, forward_chamfer
from .code_scores import code_scores
from .cross_entropy import count_labels, label_gradients, label_losses
from .forward import forward, forward_plan
from .head import backward_head, forward_head
from .quantized import forward_quantized, forward_quantized_cut, keep_int8
from .ragged_backward import backward_cut, backward_ragged
from .ragged_forward import forward_ragged, ragged_plan
from .replay import Calls
from .soft import backward_soft, forward_soft
from .topk import best, best_of_parts

__all__ = [
    "Calls",
    "GradientPlan",
    "architecture",
    "backward_chamfer",
    "backward_cut",
    "backward_head",
    "backward_lowmem",
    "backward_ragged",
    "backward_soft",
    "backward_unified",
    "best",
    "best_of_parts",
    "code_scores",
    "count_labels",
    "forget",
    "forward",
    "forward_chamfer",
    "forward_head",
    "forward_plan",
    "forward_quantized",
    "forward_quantized_cut",
    "forward_ragged",
    "forward_soft",
    "keep_int8",
    "label_gradients",
    "label_losses",
    "ragged_plan",
    "unavailable",
]


def forget() -> None:
    """Drop what was worked out from the table of configurations."""
    Calls.forget()
    cuda_forward.forget()
    numbers.forget()
    cuda_ragged.forget()
