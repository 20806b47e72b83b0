"""Scores and contrastive loss of a process's queries against the documents of all processes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.arguments import as_bool, check_count, check_dense, check_flag, check_no_dtensor
from ..families.loss import ops as loss_ops
from ..families.soft.ops import check_temperature
from ..ops.stack import autocast, functional
from .agreement import Agreement, check_group, choose_wire_device
from .ring import ProcessRing, RingCrossEntropy, RingLossOptions, RingMaxSim, RingScoreOptions

_GRADIENTS = ("requires_grad of Q or q_weight", "requires_grad of D")


def _describe_call(op: str, tensors: tuple, normalize: bool, backward: str) -> tuple[dict[str, Any], Exception | None]:
    """Return the arguments that must be the same on all ranks, or the error in the arguments of this rank."""
    Q, D, q_mask, d_mask, q_weight = tensors
    try:
        check_no_dtensor(op, Q=Q, D=D)
        check_flag(op, "normalize", normalize)
        check_dense(op, Q, D, q_mask, d_mask, q_weight, backward)
        if Q.dim() != 3 or D.dim() != 3:
            raise ValueError(f"{op}: Q, D: expected [Nq, Lq, d], [Nd, Ld, d], got {list(Q.shape)}, {list(D.shape)}")
    except (TypeError, ValueError) as error:
        return {}, error
    needs_grad_Q, needs_grad_D, needs_grad_weight = (
        torch.is_grad_enabled() and x is not None and x.requires_grad for x in (Q, D, q_weight)
    )
    gradients = dict(zip(_GRADIENTS, (needs_grad_Q or needs_grad_weight, needs_grad_D), strict=True))
    return {"d": D.shape[2], "dtype": D.dtype, "normalize": normalize, **gradients}, None


class _RingArgs(NamedTuple):
    """Tensors of a ring pass on which all ranks agree."""

    ring: ProcessRing
    Q: Tensor
    D: Tensor
    q_weight: Tensor | None
    q_mask: Tensor | None
    d_mask: Tensor | None
    needs_grad: bool

    @property
    def tensors(self) -> tuple:
        """Q, D, `q_weight`, `q_mask` and `d_mask`."""
        return self[1:6]


def _agree_on_args(
    op: str, tensors: tuple, normalize: bool, group: Any, backward: str = "auto", error: Exception | None = None
) -> _RingArgs:
    """Return Q, D, q_mask, d_mask and q_weight after all ranks have confirmed their arguments, else raise their errors.

    `error` is a known error in the arguments of this rank.
    """
    Q, D, q_mask, d_mask, q_weight = tensors
    shared_args, error = _describe_call(op, tensors, normalize, backward) if error is None else ({}, error)
    numbers = [] if error is not None else [int(d_mask is not None), int(D.device.type != "cpu"), *D.shape]
    rank_numbers = Agreement(op, group, (D, Q), shared_args, numbers, error).wait()
    if d_mask is None and any(has_mask for has_mask, *_ in rank_numbers):
        d_mask = D.new_ones(D.shape[:2], dtype=torch.bool)
    wire = choose_wire_device(group, D.device, everywhere=len({kind for _, kind, *_ in rank_numbers}) == 1)
    ring = ProcessRing(group, wire, D.device, [tuple(shape) for _, _, *shape in rank_numbers])
    needs_grad = any(shared_args[name] for name in _GRADIENTS)
    return _RingArgs(ring, Q, D, q_weight, as_bool(q_mask), as_bool(d_mask), needs_grad)


def maxsim_inbatch(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    backward: str = "auto",
    recompute: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute `lik_ops.maxsim` of this process's queries against the documents of all processes.

    Documents of other queries are negatives. The documents are passed around a ring, one block at a time. A process
    never stores more than two blocks in addition to its own. The backward passes the documents around once more, with
    the gradient of each block. Every process must call this function, and must call ``backward`` if one process does.

    Args:
        Q: this process's queries ``[Nq, Lq, d]``. Their number and length may differ between ranks.
        D: this process's documents ``[Nd, Ld, d]``, with the same d and dtype on all ranks.
        q_mask: query tokens to keep, as in `lik_ops.maxsim`.
        d_mask: document tokens to keep, as in `lik_ops.maxsim`. A rank without a mask keeps all tokens.
        q_weight: the weight of each query token, as in `lik_ops.maxsim`.
        normalize: L2-normalize every token first.
        backward: ``"lowmem"``, ``"unified"`` or ``"auto"``, as in `lik_ops.maxsim`.
        recompute: compute the argmax again in the backward. False keeps the argmax of all blocks. This is faster but
            needs memory that grows with the number of processes.
        group: the processes. None is all processes.

    Returns:
        Scores ``[Nq, sum of Nd]``, with documents in the order of ranks. If `Nd` is the same everywhere, document j of
        this process is column ``rank * Nd + j``. The scores are differentiable in Q, D and `q_weight`. D receives the
        gradients of the scores of all processes, as if one process had computed their sum. The contribution of each
        process is rounded to the dtype of D, and contributions are added in fp32 (fp64).

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong, or the arguments of the ranks do not fit together. It is
            raised on all ranks.
        RuntimeError: `torch.distributed.init_process_group` was not called, or another process died or did not make the
            call within the timeout of the group.
        NotImplementedError: ``torch.func`` or a second derivative is requested.

    Example:
        >>> # torchrun --nproc-per-node 2 train.py
        >>> # Between GPUs, the backend is "cpu:gloo,cuda:nccl".
        >>> torch.distributed.init_process_group("gloo")
        >>> Q, D = torch.randn(8, 32, 128, requires_grad=True), torch.randn(8, 300, 128, requires_grad=True)
        >>> # The scores are [8, 8 * the number of ranks].
        >>> scores = lik_ops.distributed.maxsim_inbatch(Q, D)
        >>> # Document i of a rank answers query i of this rank.
        >>> labels = torch.distributed.get_rank() * len(D) + torch.arange(len(Q))
        >>> torch.nn.functional.cross_entropy(scores, labels).backward()
        >>> torch.distributed.destroy_process_group()
    """
    op = "distributed.maxsim_inbatch"
    check_group(op, group)
    functional.reject_transforms(op)
    Q, D, q_weight = autocast.cast_to_autocast(Q, D, q_weight)
    error: Exception | None = None
    try:
        check_flag(op, "recompute", recompute)
    except TypeError as wrong:
        error = wrong
    ring_args = _agree_on_args(op, (Q, D, q_mask, d_mask, q_weight), normalize, group, backward, error)
    options = RingScoreOptions(ring_args.ring, normalize, backward, ring_args.needs_grad and not recompute)
    return RingMaxSim.apply(*ring_args.tensors, options)


def maxsim_cross_entropy(
    Q: Tensor,
    D: Tensor,
    labels: Tensor | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    ignore_index: int = -100,
    reduction: str = "mean",
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute `lik_ops.maxsim_cross_entropy` of this process's queries with the documents of all processes.

    The loss equals ``F.cross_entropy(maxsim_inbatch(Q, D) / temperature, labels)``, but the scores are not stored.
    Documents are passed around a ring as in `maxsim_inbatch`, and two numbers are kept for each query. The backward
    passes the documents around once more. It computes the scores and the argmax of each block again, in parts of at
    most 24 MiB, and returns the gradients of the documents. Every process must call this function, and must call
    ``backward`` if one process does.

    Args:
        Q: this process's queries ``[Nq, Lq, d]``. Their number and length may differ between ranks.
        D: this process's documents ``[Nd, Ld, d]``, with the same d and dtype on all ranks.
        labels: ``[Nq]``, int32 or int64: the index of the positive document of each query among the documents of all
            processes, in the order of ranks. None selects document i of this process for its query i. An index out of
            range makes the loss of its query NaN.
        q_mask: query tokens to keep, as in `lik_ops.maxsim`.
        d_mask: document tokens to keep, as in `lik_ops.maxsim`. A rank without a mask keeps all tokens.
        temperature: a number or a scalar (0-d) tensor, as in `lik_ops.maxsim_cross_entropy`.
        q_weight: the weight of each query token, as in `lik_ops.maxsim`.
        normalize: L2-normalize every token first.
        ignore_index: a label whose query is ignored, as in `lik_ops.maxsim_cross_entropy`.
        reduction: ``"mean"`` over this process's queries that are not ignored, ``"sum"`` or ``"none"``.
        group: the processes. None is all processes.

    Returns:
        The loss of this process's queries, as in `lik_ops.maxsim_cross_entropy`. It is differentiable in Q, D,
        `q_weight` and the temperature. D receives the gradients of the losses of all processes, as if one process had
        computed their sum. The contribution of each process is rounded to the dtype of D, and contributions are added
        in fp32 (fp64).

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong, or the arguments of the ranks do not fit together. It is
            raised on all ranks.
        RuntimeError: `torch.distributed.init_process_group` was not called, or another process died or did not make the
            call within the timeout of the group.
        NotImplementedError: ``torch.func`` or a second derivative is requested.

    Example:
        >>> # torchrun --nproc-per-node 2 train.py
        >>> # Between GPUs, the backend is "cpu:gloo,cuda:nccl".
        >>> torch.distributed.init_process_group("gloo")
        >>> Q, D = torch.randn(8, 32, 128, requires_grad=True), torch.randn(8, 300, 128, requires_grad=True)
        >>> # The documents of all ranks are negatives.
        >>> loss = lik_ops.distributed.maxsim_cross_entropy(Q, D, temperature=0.02, normalize=True)
        >>> loss.backward()
        >>> torch.distributed.destroy_process_group()
    """
    op = "distributed.maxsim_cross_entropy"
    check_group(op, group)
    functional.reject_transforms(op)
    Q, D, q_weight = autocast.cast_to_autocast(Q, D, q_weight)
    error: Exception | None = None
    try:
        loss_ops.check_loss_args(op, (Q, D, q_mask, d_mask, q_weight, labels), normalize, reduction)
        check_temperature(op, temperature, Q)
        check_count(op, "ignore_index", ignore_index, -(2**63))
        if isinstance(temperature, Tensor):
            q_weight, temperature = loss_ops.divide_weights(temperature, Q, as_bool(q_mask), q_weight), 1.0
    except (TypeError, ValueError) as wrong:
        error = wrong
    ring_args = _agree_on_args(op, (Q, D, q_mask, d_mask, q_weight), normalize, group, error=error)
    if labels is None:
        labels = ring_args.ring.columns(0).start + loss_ops.make_default_labels(Q, D)
    options = RingLossOptions(ring_args.ring, float(temperature), ignore_index, normalize)
    losses = RingCrossEntropy.apply(*ring_args.tensors, labels.long(), options)  # int32 would wrap, see `count_labels`
    return loss_ops.reduce_losses(losses, labels, ignore_index, reduction)
