"""The portable backend: plain PyTorch, for CPUs and for any device or dtype without Triton kernels."""

from __future__ import annotations

from ..families.chamfer.portable import backward_chamfer, forward_chamfer
from ..families.head.portable import backward_head, forward_head
from ..families.loss.portable import count_labels, label_gradients, label_losses
from ..families.pooling.clusters import WardClustering
from ..families.soft.portable import backward_soft, forward_soft
from .backward.dense import backward_lowmem, backward_unified
from .backward.packed import backward_quantized, backward_ragged
from .forward.code_scores import code_scores
from .forward.dense import forward
from .forward.packed import forward_ragged
from .forward.quantized import forward_quantized, keep_int8
from .forward.topk import best, best_of_parts
from .pace import limit_threads

backward_chamfer, forward_chamfer = limit_threads(backward_chamfer), limit_threads(forward_chamfer)
backward_head, forward_head = limit_threads(backward_head), limit_threads(forward_head)
backward_lowmem, backward_unified = limit_threads(backward_lowmem), limit_threads(backward_unified)
backward_quantized, forward_quantized = limit_threads(backward_quantized), limit_threads(forward_quantized)
backward_ragged, forward_ragged = limit_threads(backward_ragged), limit_threads(forward_ragged)
backward_soft, forward_soft = limit_threads(backward_soft), limit_threads(forward_soft)
code_scores, forward = limit_threads(code_scores), limit_threads(forward)
