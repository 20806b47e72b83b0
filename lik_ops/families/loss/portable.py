"""Losses and gradients of scores at labels, in plain PyTorch.

A log-sum-exp is stored as two numbers, the largest score and ``log1p`` of the other terms relative to it. Small losses
and their gradients keep their digits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...portable.blocks import sum_pairwise


class LossOptions(NamedTuple):
    """The options of a loss that are not tensors."""

    temperature: float
    ignore_index: int
    normalize: bool


class SavedLoss(NamedTuple):
    """The tensors that a forward saves for its backward; scores and argmax are computed again if they are None."""

    lse: Tensor  # see `label_losses`
    divisor: Tensor | None = None  # gradients are divided by it
    scores: Tensor | None = None
    argmax: Tensor | None = None


def label_losses(scores: Tensor, labels: Tensor, options: LossOptions, losses: Tensor, lse: Tensor) -> None:
    """Fill ``losses [N]`` and ``lse [N, 2]`` from ``scores [N, columns]`` and ``labels [N]``, int32 or int64.

    `lse` holds the largest ``score / temperature`` and ``log(sum(exp(score / temperature - largest)))``. Losses and
    `lse` are 0 for a label of `ignore_index`, and NaN for any other label that is not a column.
    """
    columns, labels = scores.shape[1], labels.long()
    index = labels.clamp(0, max(columns - 1, 0))
    is_invalid = index != labels if columns else torch.ones_like(index, dtype=torch.bool)
    is_ignored = labels == options.ignore_index
    if columns:
        best, log_sum = lse.unbind(1)
        scores = scores / options.temperature
        first = scores.argmax(1, keepdim=True)
        best.copy_(scores.gather(1, first).squeeze(1))
        at_label = scores.sub_(best[:, None]).gather(1, index[:, None]).squeeze(1)
        scores.scatter_(1, first, scores.gather(1, first).sub_(torch.inf))  # exclude the largest score unless it is NaN
        # The order of torch.sum depends on the number of queries.
        torch.log1p(sum_pairwise(scores.exp_()), out=log_sum)
        torch.sub(log_sum, at_label, out=losses)
    losses.masked_fill_(is_invalid, torch.nan).masked_fill_(is_ignored, 0)
    lse.masked_fill_(is_invalid[:, None], torch.nan).masked_fill_(is_ignored[:, None], 0)


def count_labels(labels: Tensor, ignore_index: int) -> Tensor:
    """Count the labels that are not `ignore_index`, as a scalar tensor."""
    # int64, because torch compares int32 with a number modulo 2^32.
    return (labels.long() != ignore_index).sum()


def label_gradients(
    scores: Tensor, labels: Tensor, options: LossOptions, upstream: Tensor, saved_loss: SavedLoss, begin: int
) -> Tensor:
    """Return the gradient ``[N, columns]`` of ``sum_i upstream[i] * loss[i]`` by scores, whose first label is `begin`.

    The gradient is divided by `saved_loss.divisor` unless it is None. The other arguments are those of `label_losses`.
    """
    columns = scores.shape[1]
    if columns == 0:
        return scores
    best, log_sum = saved_loss.lse[:, None].unbind(2)
    x = (scores / options.temperature).sub_(best).sub_(log_sum)
    labels = labels[:, None].long()
    label = labels - begin
    index = label.clamp(0, columns - 1)
    at_label = x.gather(1, index)
    x.exp_().scatter_(1, index, torch.where(index == label, at_label.expm1(), at_label.exp()))
    upstream = (upstream if saved_loss.divisor is None else upstream / saved_loss.divisor) / options.temperature
    return x.mul_(upstream[:, None]).masked_fill_(labels == options.ignore_index, 0)
