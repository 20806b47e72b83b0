"""The in-batch contrastive loss of MaxSim."""

from __future__ import annotations

from torch import Tensor

from ..._ops import ops as lik
from ...api.inputs import Tokens
from ...api.padding import make_dense
from ...core.arguments import as_bool, check_count, check_types
from ...core.arrays import share_arrays
from ...ops.checks import values
from ...ops.fast_path import eager
from ...ops.stack import autocast, functional, sharding
from ..soft.ops import check_temperature
from .ops import check_loss_args, divide_weights, make_default_labels, reduce_losses

_OP = "maxsim_cross_entropy"


def maxsim_cross_entropy(
    Q: Tokens,
    D: Tokens,
    labels: Tensor | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    q_weight: Tokens | None = None,
    normalize: bool = False,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Compute the contrastive loss: the cross-entropy of ``maxsim(Q, D) / temperature`` at the labels.

    ``loss[i] = log sum_j exp(score[i, j] / temperature) - score[i, labels[i]] / temperature``. This is InfoNCE (van den
    Oord et al., 2018, equation 4) of MaxSim, which ColBERTv2 uses with in-batch negatives (Santhanam et al., 2022,
    section 3.2). The loss equals ``F.cross_entropy(lik_ops.maxsim(Q, D) / temperature, labels)``, but the scores and
    the argmax are not stored. If they would need more than 24 MiB, a step keeps two numbers for each query and
    recomputes the rest.

    Args:
        Q: query tokens ``[Nq, Lq, d]``; fp16, bf16, fp32 or fp64. Lists and nested tensors are padded and masked.
        D: document tokens of the dtype and device of Q. ``[Nd, Ld, d]`` are the positives and negatives of the whole
            batch. ``[Nq, K, Ld, d]`` are the K candidates of each query. Lists and nested tensors are padded and
            masked.
        labels: ``[Nq]``, int32 or int64: the index of the positive document or candidate of each query. None selects
            document i for query i, or the first candidate. An index out of range makes the loss of its query NaN, and
            the gradients that depend on it. Under `lik_ops.checks` it is an error.
        q_mask: query tokens to keep, as in `lik_ops.maxsim`.
        d_mask: document tokens to keep, as in `lik_ops.maxsim`.
        temperature: a number above 0, or a differentiable scalar (0-d) tensor of the dtype of the scores. If the tensor
            is not above 0, losses and gradients are NaN.
        q_weight: the weight of each query token, as in `lik_ops.maxsim`.
        normalize: L2-normalize every token first.
        ignore_index: a label whose query has loss 0 and no gradient, and is not part of the mean.
        reduction: ``"mean"`` over the queries that are not ignored, ``"sum"`` or ``"none"``.

    Returns:
        The loss in fp32 (fp64 for fp64 inputs): a scalar (0-d) tensor, or ``[Nq]`` with ``"none"``. The mean over no
        queries is NaN. Edge cases follow `F.cross_entropy`. The loss of a query is infinite if only its positive
        document scores ``-inf`` because it has no kept token. The loss is NaN if all documents of the query score
        ``-inf`` or a score is NaN.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.
        NotImplementedError: ``torch.func`` would differentiate the call.

    Example:
        >>> # Document i answers query i, and documents 8 to 23 are negatives of all queries.
        >>> Q = torch.randn(8, 32, 128, requires_grad=True)
        >>> D = torch.randn(24, 180, 128, requires_grad=True)
        >>> lik_ops.maxsim_cross_entropy(Q, D, temperature=0.02, normalize=True).backward()
        >>> Q.grad.shape, D.grad.shape
        (torch.Size([8, 32, 128]), torch.Size([24, 180, 128]))
    """
    per_token = q_mask, d_mask, q_weight
    loss = eager.try_maxsim_cross_entropy(Q, D, labels, *per_token, temperature, normalize, ignore_index, reduction)
    if loss is not None:
        return loss
    (labels,) = share_arrays(_OP, labels=labels)
    dense_args = Q, D, q_mask, d_mask, q_weight = make_dense(_OP, Q, D, *per_token)
    check_types(_OP, *dense_args)
    check_temperature(_OP, temperature, dense_args[0])
    check_count(_OP, "ignore_index", ignore_index, -(2**63))
    sharding.register_if_needed()
    Q, D, q_weight = autocast.cast_to_autocast(Q, D, q_weight)
    check_loss_args(_OP, (Q, D, q_mask, d_mask, q_weight, labels), normalize, reduction)
    if labels is None:
        labels = make_default_labels(Q, D)
    elif values.needs_value_checks(labels):
        values.check_labels(_OP, labels, D.shape[-3], ignore_index)
    functional.reject_transforms(_OP, functional.is_differentiating)
    q_mask, d_mask = as_bool(q_mask), as_bool(d_mask)
    if isinstance(temperature, Tensor):
        q_weight, temperature = divide_weights(temperature, Q, q_mask, q_weight), 1.0
    functional.reject_forward_ad(Q, D, q_weight)
    tensors = Q, D, q_mask, d_mask, q_weight, labels
    losses = lik.maxsim_cross_entropy_fwd(*tensors, float(temperature), ignore_index, normalize)[0]
    return reduce_losses(losses, labels, ignore_index, reduction)
