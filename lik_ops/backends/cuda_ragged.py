"""The Triton backend for ragged layouts, forward: packed queries and documents, candidate lists, lists of pairs."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..csrc_triton.arguments import Documents, Queries, Segments
from ..csrc_triton.forward_ragged import maxsim_forward_ragged
from . import configs, launcher
from .configs import Launch
from .cuda_arguments import allow_tf32, architecture, checked_grid, on_device, wide_of
from .ragged import Ragged

_log = logging.getLogger("lik_ops")
_LEAST_SLOT = 16


def _per_row(x: Tensor | None) -> tuple:
    """Of a mask or weight: itself and its strides between queries or documents, and between rows."""
    return (None, None, None) if x is None else (x, 0, x.stride(0))


def queries_of(r: Ragged) -> Queries:
    return Queries._make((r.Q, 0, *r.Q.stride(), *_per_row(r.q_mask), *_per_row(r.q_weight)))


def documents_of(r: Ragged, mask: Tensor | None) -> Documents:
    kept = (None,) * 4 if mask is None else (mask, 0, 0, mask.stride(0))
    return Documents._make((r.D, 0, 0, *r.D.stride(), *kept))


def segments_of(r: Ragged) -> Segments:
    pairs = None if r.pairs is None else r.pairs.contiguous()
    return Segments(r.cu_seqlens_q.contiguous(), r.d_offsets.contiguous(), r.d_lengths.contiguous(), pairs)


def _launch(r: Ragged, normalize: bool, argmax: bool) -> tuple[Launch, int]:
    """The tile for queries of the mean length, and the levels of a sum: see `maxsim_forward_ragged`.

    Longer queries take several steps, so that the host need not know the longest.
    """
    Nq, wide = max(r.queries, 1), wide_of(r.Q.unsqueeze(0), r.D.unsqueeze(0))
    return configs.forward_ragged(
        architecture(r.Q.device),
        r.Q.dtype,
        Nq,
        max(_LEAST_SLOT, configs.cdiv(r.Q.shape[0], Nq)),
        r.Q.shape[1],
        candidates=r.candidates or r.pairs is not None,
        normalize=normalize,
        wide=wide,
        tf32=allow_tf32(),
        argmax=argmax,
    )


def _tiles(r: Ragged, launch: Launch) -> TensorDescriptor | None:
    """The rows of D for the tensor memory access unit, or None where it cannot read them."""
    rows, d = r.D.shape
    reads = architecture(r.D.device).has_descriptors and r.D.is_contiguous() and 0 < rows < 2**31
    if not reads or d * r.D.element_size() % 16 or r.D.data_ptr() % 16:
        return None
    return TensorDescriptor(r.D, [rows, d], [d, 1], [launch.config.BN, launch.config.BD])


def forward_ragged(
    r: Ragged, normalize: bool, argmax_dtype: torch.dtype | None, max_seqlen_q: int
) -> tuple[Tensor, Tensor]:
    """Scores in fp32 and winners (an empty tensor if `argmax_dtype` is None), both as `Ragged` says."""
    new, shape = r.Q.new_empty, r.scores_shape()
    scores = new(shape, dtype=torch.float32)
    argmax = None
    if argmax_dtype is not None:
        argmax = r.Q.new_full(r.argmax_shape(max_seqlen_q), -1, dtype=argmax_dtype)
    winners = new(0, dtype=torch.int32) if argmax is None else argmax
    if scores.numel() == 0:
        return scores, winners
    if r.Q.shape[0] >= 2**31:
        raise ValueError(f"lik_ops: Q: {r.Q.shape[0]} packed query tokens; at most 2^31 - 1 at a time")
    launch, levels = _launch(r, normalize, argmax is not None)
    single = r.candidates or r.pairs is not None
    row_tiles = 1 if single else configs.cdiv(r.queries * launch.config.SLOT, launch.config.BM)
    grid = checked_grid(scores.numel() if single else row_tiles * r.columns)
    groups = queries_of(r), documents_of(r, r.d_mask), _tiles(r, launch), segments_of(r)
    numbers = r.queries, r.columns, r.Q.shape[0], r.D.shape[0], max_seqlen_q, r.Q.shape[1]
    args = (*groups, scores, argmax, *numbers, levels, launch.config)
    with on_device(r.Q.device):
        launcher.launch(maxsim_forward_ragged, grid, args, launch.options(architecture(r.Q.device)))
    _log.debug("maxsim_forward_ragged for %s: %s", tuple(shape), launch)
    return scores, winners
