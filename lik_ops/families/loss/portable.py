"""Losses and gradients of scores at labels by plain torch.

The largest score counts as 1 beside the sum of the others: so small losses, and their gradients, keep their digits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...portable.blocks import sum_pairwise


class LossOptions(NamedTuple):
    """What a loss is besides its tensors."""

    temperature: float
    ignore_index: int
    normalize: bool


class SavedLoss(NamedTuple):
    """What a forward keeps for its gradients; scores and winners are found again where there are none."""

    lse: Tensor  # of `label_losses`
    divisor: Tensor | None = None  # of the gradients
    scores: Tensor | None = None
    argmax: Tensor | None = None


def label_losses(scores: Tensor, labels: Tensor, options: LossOptions, losses: Tensor, lse: Tensor) -> None:
    """Fill ``losses [N]`` and ``lse [N, 2]`` of ``scores [N, columns]``.

    The latter are the largest ``score / temperature`` and the logarithm of the sum beside it. Both are 0 where the
    label is `ignore_index`, else NaN where it is no column.
    """
    columns, labels = scores.shape[1], labels.long()
    index = labels.clamp(0, max(columns - 1, 0))
    wrong = index != labels if columns else torch.ones_like(index, dtype=torch.bool)
    ignored = labels == options.ignore_index
    if columns:
        best, log_sum = lse.unbind(1)
        scores = scores / options.temperature
        first = scores.argmax(1, keepdim=True)
        best.copy_(scores.gather(1, first).squeeze(1))
        at_label = scores.sub_(best[:, None]).gather(1, index[:, None]).squeeze(1)
        scores.scatter_(1, first, scores.gather(1, first).sub_(torch.inf))  # counts as nothing, unless it is NaN
        # torch.sum would add in an order that depends on how many queries there are.
        torch.log1p(sum_pairwise(scores.exp_()), out=log_sum)
        torch.sub(log_sum, at_label, out=losses)
    losses.masked_fill_(wrong, torch.nan).masked_fill_(ignored, 0)
    lse.masked_fill_(wrong[:, None], torch.nan).masked_fill_(ignored[:, None], 0)


def count_labels(labels: Tensor, ignore_index: int) -> Tensor:
    """How many are not `ignore_index`, of no axes."""
    return (labels.long() != ignore_index).sum()  # torch compares int32 with a number modulo 2^32


def label_gradients(
    scores: Tensor, labels: Tensor, options: LossOptions, upstream: Tensor, kept: SavedLoss, begin: int
) -> Tensor:
    """The gradient of ``scores [N, columns]``, whose first column has the label `begin`.

    It is that of ``sum_i upstream[i] * loss[i]``, divided by `kept.divisor` unless that is None.
    """
    columns = scores.shape[1]
    if columns == 0:
        return scores
    best, log_sum = kept.lse[:, None].unbind(2)
    x = (scores / options.temperature).sub_(best).sub_(log_sum)
    labels = labels[:, None].long()
    label = labels - begin
    index = label.clamp(0, columns - 1)
    at_label = x.gather(1, index)
    x.exp_().scatter_(1, index, torch.where(index == label, at_label.expm1(), at_label.exp()))
    upstream = (upstream if kept.divisor is None else upstream / kept.divisor) / options.temperature
    return x.mul_(upstream[:, None]).masked_fill_(labels == options.ignore_index, 0)
