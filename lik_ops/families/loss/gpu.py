"""Losses and gradients of scores at labels, in one launch each."""

from __future__ import annotations

import torch
from torch import Tensor

from ...csrc_triton.loss.kernels import maxsim_count_labels, maxsim_label_gradients, maxsim_label_losses
from ...gpu.runtime import launcher
from ...gpu.runtime.arguments import check_grid, use_device
from ...gpu.tuning.architectures import cdiv
from .portable import LossOptions, SavedLoss

BLOCK_SCORES = 1024  # scores at a time: it decides in which order they are added, so it is one for all
LAUNCH_OPTIONS = {"num_warps": 4}


def label_losses(scores: Tensor, labels: Tensor, options: LossOptions, losses: Tensor, lse: Tensor) -> None:
    """As `portable.cross_entropy.label_losses`, of contiguous scores."""
    rows, columns = scores.shape
    if rows:
        args = (
            scores,
            labels,
            labels.stride(0),
            losses,
            lse,
            columns,
            options.temperature,
            options.ignore_index,
            BLOCK_SCORES,
        )
        with use_device(scores.device):
            launcher.launch(maxsim_label_losses, check_grid(rows), args, LAUNCH_OPTIONS)


def count_labels(labels: Tensor, ignore_index: int) -> Tensor:
    """As `portable.cross_entropy.count_labels`."""
    count = labels.new_empty((), dtype=torch.int64)
    with use_device(labels.device):
        args = labels, labels.stride(0), count, labels.shape[0], ignore_index, BLOCK_SCORES
        launcher.launch(maxsim_count_labels, (1,), args, LAUNCH_OPTIONS)
    return count


def label_gradients(
    scores: Tensor, labels: Tensor, options: LossOptions, upstream: Tensor, kept: SavedLoss, begin: int
) -> Tensor:
    """As `portable.cross_entropy.label_gradients`, of contiguous scores and `kept.lse`."""
    rows, columns = scores.shape
    gradients = torch.empty_like(scores)
    programs = rows * cdiv(columns, BLOCK_SCORES)
    if programs:
        of_rows = labels, labels.stride(0), upstream, upstream.stride(0), kept.divisor, kept.lse
        args = scores, gradients, *of_rows, columns, begin, options.temperature, options.ignore_index, BLOCK_SCORES
        with use_device(scores.device):
            launcher.launch(maxsim_label_gradients, check_grid(programs), args, LAUNCH_OPTIONS)
    return gradients
