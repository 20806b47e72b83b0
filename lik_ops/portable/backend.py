"""The portable backend: plain PyTorch, for CPUs and for any device or dtype without Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.segments import PackedArgs
from ..families.chamfer.portable import backward_chamfer, forward_chamfer
from ..families.head.portable import backward_head, forward_head
from ..families.loss.portable import count_labels, label_gradients, label_losses
from ..families.pooling.clusters import WardClustering
from ..families.soft.portable import backward_soft, forward_soft
from ..formats.table import EncodedTokens
from .backward import packed as packed_backward
from .backward.dense import backward_lowmem, backward_unified
from .forward import packed as packed_forward
from .forward import quantized
from .forward.code_scores import code_scores
from .forward.dense import forward
from .forward.quantized import keep_int8
from .forward.topk import best, best_of_parts
from .pace import limit_threads

backward_chamfer, forward_chamfer = limit_threads(backward_chamfer), limit_threads(forward_chamfer)
backward_head, forward_head = limit_threads(backward_head), limit_threads(forward_head)
backward_lowmem, backward_unified = limit_threads(backward_lowmem), limit_threads(backward_unified)
backward_soft, forward_soft = limit_threads(backward_soft), limit_threads(forward_soft)
code_scores, forward = limit_threads(code_scores), limit_threads(forward)


@limit_threads
def forward_ragged(
    tensors: Sequence, normalize: bool, argmax_dtype: torch.dtype | None, max_seqlen_q: int
) -> tuple[Tensor, Tensor]:
    """Return the scores and the argmax of a ragged operator. Without `argmax_dtype` the argmax is empty."""
    r = PackedArgs.from_tensors(tensors, max_seqlen_q).ragged()
    return packed_forward.forward_ragged(r, normalize, argmax_dtype, max_seqlen_q)


@limit_threads
def forward_quantized(
    tensors: Sequence, stored: EncodedTokens, normalize: bool, argmax_dtype: torch.dtype | None, max_seqlen_q: int
) -> tuple[Tensor, Tensor]:
    """Return the scores and the argmax of a ragged operator with quantized documents."""
    r = PackedArgs.from_tensors(tensors, max_seqlen_q).ragged()
    return quantized.forward_quantized(r, stored, normalize, argmax_dtype, max_seqlen_q)


@limit_threads
def backward_ragged(
    grad_scores: Tensor,
    tensors: Sequence,
    argmax: Tensor,
    normalize: bool,
    needs: list[bool],
    unified: bool,
    stored: EncodedTokens | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of Q, D and q_weight of a ragged operator, each empty if not needed.

    `unified` has no effect. Encoded documents, `stored`, have no gradient.
    """
    c = PackedArgs.from_tensors(tensors, argmax.shape[1])
    grads = packed_backward.backward_ragged(grad_scores, c.ragged(), argmax, normalize, needs, stored)
    shapes = c.Q.shape, c.D.shape, c.Q.shape[:-1]
    return tuple(g.view(shape) if need else g for g, shape, need in zip(grads, shapes, needs, strict=True))


def backward_quantized(
    grad_scores: Tensor, tensors: Sequence, stored: EncodedTokens, argmax: Tensor, normalize: bool, needs: list[bool]
) -> tuple[Tensor, ...]:
    """Return the gradients of Q and q_weight for quantized documents, each empty if not needed."""
    return backward_ragged(grad_scores, tensors, argmax, normalize, [needs[0], False, needs[1]], False, stored)[::2]
