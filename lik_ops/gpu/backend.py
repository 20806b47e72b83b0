"""Triton backend: converts tensors to kernel arguments, selects configurations, and launches kernels.

It runs on CUDA and ROCm GPUs, and on CPU tensors in Triton's interpreter (``TRITON_INTERPRET=1``), which the tests use.
"""

from ..core.plan_cache import plans
from ..families.chamfer.gpu import backward_chamfer, forward_chamfer
from ..families.head.gpu import backward_head, forward_head
from ..families.loss.gpu import count_labels, label_gradients, label_losses
from ..families.pooling.gpu import KernelWardClustering as WardClustering
from ..families.soft.gpu import backward_soft, forward_soft
from .backward.dense import GradientPlan, backward_lowmem, backward_unified
from .backward.packed import backward_cut, backward_quantized, backward_ragged
from .forward.code_scores import code_scores
from .forward.dense import forward, forward_plan
from .forward.packed import forward_ragged, ragged_plan
from .forward.quantized import find_quantized_plan, forward_quantized, forward_quantized_cut, keep_int8
from .forward.topk import best, best_of_parts
from .runtime.arguments import architecture, unavailable, use_device
from .runtime.capture import Calls
from .runtime.launcher import collect_launches, compile_in_parallel, find_missing_kernels, run_first


def forget() -> None:
    """Drop all plans and captured calls that were derived from the configuration tables."""
    Calls.forget()
    plans.clear()
