"""Losses at labels and gradients of scores, each in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...csrc_triton.loss.kernels import maxsim_count_labels, maxsim_label_gradients, maxsim_label_losses
from ...gpu.runtime import launcher
from ...gpu.runtime.arguments import check_grid, use_device
from ...gpu.tuning.architectures import cdiv
from .portable import LossOptions, SavedLoss

# Scores that are added at a time. The value determines the order of the sums, so all calls use the same value.
BLOCK_SCORES = 1024
LAUNCH_OPTIONS = {"num_warps": 4}


def label_losses(scores: Tensor, labels: Tensor, options: LossOptions, losses: Tensor, lse: Tensor) -> None:
    """Fill `losses` and `lse` as `portable.label_losses` does, for contiguous scores."""
    rows, columns = scores.shape
    if rows:
        settings = options.temperature, options.ignore_index, BLOCK_SCORES
        args = scores, labels, labels.stride(0), losses, lse, columns, *settings
        with use_device(scores.device):
            launcher.launch(maxsim_label_losses, check_grid(rows), args, LAUNCH_OPTIONS)


def count_labels(labels: Tensor, ignore_index: int) -> Tensor:
    """Return the result of `portable.count_labels`, a scalar tensor."""
    count = labels.new_empty((), dtype=torch.int64)
    with use_device(labels.device):
        args = labels, labels.stride(0), count, labels.shape[0], ignore_index, BLOCK_SCORES
        launcher.launch(maxsim_count_labels, (1,), args, LAUNCH_OPTIONS)
    return count


def label_gradients(
    scores: Tensor, labels: Tensor, options: LossOptions, upstream: Tensor, saved_loss: SavedLoss, begin: int
) -> Tensor:
    """Return the gradient of `portable.label_gradients`, for contiguous scores and a contiguous `saved_loss.lse`."""
    rows, columns = scores.shape
    gradients = torch.empty_like(scores)
    programs = rows * cdiv(columns, BLOCK_SCORES)
    if programs:
        row_args = labels, labels.stride(0), upstream, upstream.stride(0), saved_loss.divisor, saved_loss.lse
        args = scores, gradients, *row_args, columns, begin, options.temperature, options.ignore_index, BLOCK_SCORES
        with use_device(scores.device):
            launcher.launch(maxsim_label_gradients, check_grid(programs), args, LAUNCH_OPTIONS)
    return gradients
