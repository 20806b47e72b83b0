"""MaxSim and its contrastive loss against documents that are passed around a ring of processes.

The backward passes the documents around the ring once more, together with their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._ops import ops as lik
from ..core.arguments import choose_argmax_dtype, score_dtype
from ..ops.registration.gradients import choose_backward


class RingExchange:
    """Tensors that are being received from the previous process while others are sent to the next."""

    def __init__(self, ring: ProcessRing, sent: list[Tensor], received: list[Tensor]) -> None:
        self.device, self.received = ring.device, received
        self.sent = [x.to(ring.wire).resolve_neg().contiguous() for x in sent]  # kept alive until they are sent
        before, after = (ring.rank - 1) % ring.world, (ring.rank + 1) % ring.world
        transfers = [(dist.isend, x, after) for x in self.sent] + [(dist.irecv, x, before) for x in received]
        # Sent as bytes, because some backends do not support every dtype. Empty tensors are not sent. The receiver
        # knows the shapes.
        operations = [
            dist.P2POp(transfer, x.view(-1).view(torch.uint8), group=ring.group, group_peer=rank)
            for transfer, x, rank in transfers
            if x.numel()
        ]
        self.works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> list[Tensor]:
        """Return the received tensors, and release the sent ones. May be called once."""
        for work in self.works:
            work.wait()
        buffers, self.sent, self.received = self.received, [], []
        return [x.to(self.device) for x in buffers]


class ProcessRing:
    """A ring of processes, each of which sends to the next one and receives from the previous one.

    In a pass, the documents of all processes are passed around the ring. A block is received while the previous one is
    processed.
    """

    def __init__(self, group: Any, wire: torch.device, device: torch.device, shapes: list[tuple[int, ...]]) -> None:
        self.group, self.wire, self.device = group, wire, device
        self.shapes = shapes  # of the documents of each process
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    def owner(self, step: int) -> int:
        """Return the rank that owns the block of a step."""
        return (self.rank - step) % self.world

    def columns(self, step: int) -> slice:
        """Return the range of the documents of a step among the documents of all processes."""
        starts, owner = [0, *accumulate(shape[0] for shape in self.shapes)], self.owner(step)
        return slice(starts[owner], starts[owner + 1])

    @property
    def documents(self) -> int:
        """The number of documents of all processes."""
        return sum(shape[0] for shape in self.shapes)

    def shift(self, sent: list[Tensor], shapes: list[tuple[int, ...]]) -> RingExchange:
        """Start sending `sent` to the next process and receiving tensors of `shapes` from the previous one."""
        buffers = [torch.empty(s, dtype=x.dtype, device=self.wire) for x, s in zip(sent, shapes, strict=True)]
        return RingExchange(self, sent, buffers)

    def _next_block(self, step: int, block: list[Tensor]) -> RingExchange | None:
        """Start the exchange of documents and mask for the next step. Return None after the last step."""
        if step + 1 == self.world:
            return None
        shape = self.shapes[self.owner(step + 1)]
        return self.shift(block, [shape, shape[:2]][: len(block)])

    def visit(self, D: Tensor, d_mask: Tensor | None, block_at: Callable[[int, Tensor, Tensor | None], None]) -> None:
        """Call ``block_at(step, D, d_mask)`` for the documents and the mask of each process, this one first."""
        block = [D] if d_mask is None else [D, d_mask]
        for step in range(self.world):
            exchange = self._next_block(step, block)
            block_at(step, block[0], block[1] if len(block) > 1 else None)
            block = exchange.wait() if exchange is not None else []

    def gradients(self, like: tuple, d_mask: Tensor | None, needs: list[bool], of_block: Callable) -> tuple:
        """Return the gradients of Q, D and `q_weight` from the gradients of each block, or None if not needed.

        The gradients of documents are passed around with them, and arrive at their owner at the end. They are rounded
        to the dtypes of the inputs there.

        Args:
            like: ``(Q, D, q_weight)``.
            d_mask: the mask of the documents, or None.
            needs: whether each input needs a gradient.
            of_block: a function ``of_block(step, D, d_mask)`` that returns the gradients of a block.
        """
        sums: list[Tensor | None] = [None, None, None]
        carried = None  # the gradient of the current block so far, from the previous processes

        def add(step: int, D: Tensor, mask: Tensor | None) -> None:
            nonlocal carried
            grads = of_block(step, D, mask)
            for i in (0, 2):
                if needs[i]:
                    sums[i] = _accumulate(sums[i], grads[i])
            if needs[1]:
                sums[1] = grad_D = _accumulate(None if carried is None else carried.wait()[0], grads[1])
                # Also sent after the last step, when the gradient returns to its owner.
                if self.world > 1:
                    carried = self.shift([grad_D], [self.shapes[self.owner(step + 1)]])

        self.visit(like[1], d_mask, add)
        if carried is not None:
            sums[1] = carried.wait()[0]
        return tuple(g if g is None else g.to(x.dtype) for g, x in zip(sums, like, strict=True))


class RingScoreOptions(NamedTuple):
    """The arguments of `RingMaxSim` that are not tensors."""

    ring: ProcessRing
    normalize: bool
    backward: str
    keeps_argmax: bool


class _FirstOrderGradients(torch.autograd.Function):
    """Gradients that cannot be differentiated again."""

    @classmethod
    def wrap(cls, op: str, gradients: tuple, tensors: tuple) -> tuple:
        """Return `gradients`. If gradients are recorded, the result depends on `tensors`, and its backward raises."""
        return cls.apply(op, gradients, *tensors) if torch.is_grad_enabled() else gradients

    @staticmethod
    def forward(ctx, op, gradients, *tensors):
        """Return the gradients unchanged."""
        ctx.op = op
        return gradients

    @staticmethod
    def backward(ctx, *_):
        """Raise NotImplementedError."""
        raise NotImplementedError(
            f"distributed.{ctx.op} has no double backward: compute second derivatives with lik_ops.reference"
        )


class RingMaxSim(torch.autograd.Function):
    """Scores of this process's queries against the documents of all processes."""

    @staticmethod
    def forward(ctx, Q, D, q_weight, q_mask, d_mask, options):
        """Return the scores ``[Nq, sum of Nd]``."""
        scores = Q.new_empty((Q.shape[0], options.ring.documents), dtype=score_dtype(Q.dtype))
        argmax = []

        def score(step, block, mask):
            dtype = choose_argmax_dtype(block.shape[1]) if options.keeps_argmax else None
            results = lik.maxsim_fwd(Q, block, q_mask, mask, q_weight, options.normalize, dtype, "auto")
            scores[:, options.ring.columns(step)] = results[0]
            argmax.append(results[1])

        options.ring.visit(D, d_mask, score)
        ctx.options = options
        ctx.save_for_backward(Q, D, q_weight, q_mask, d_mask, *(argmax if options.keeps_argmax else ()))
        return scores

    @staticmethod
    def backward(ctx, grad_scores):
        """Return the gradients of the inputs, which cannot be differentiated again."""
        with torch.no_grad():
            gradients = RingMaxSim.gradients(ctx, grad_scores)
        return _FirstOrderGradients.wrap("maxsim_inbatch", gradients, (grad_scores, *ctx.saved_tensors))

    @staticmethod
    def gradients(ctx, grad_scores):
        """Compute the gradients of the inputs in one pass around the ring."""
        options, needs = ctx.options, list(ctx.needs_input_grad[:3])
        Q, D, q_weight, q_mask, d_mask, *saved_argmax = ctx.saved_tensors
        op = choose_backward(options.backward)

        def of_block(step, block, mask):
            argmax = saved_argmax[step] if saved_argmax else Q.new_empty(0, dtype=torch.int32)
            upstream = grad_scores[:, options.ring.columns(step)].contiguous()
            return op(upstream, Q, block, argmax, q_mask, mask, q_weight, options.normalize, needs)

        return *options.ring.gradients((Q, D, q_weight), d_mask, needs, of_block), None, None, None


class RingLossOptions(NamedTuple):
    """The arguments of `RingCrossEntropy` that are not tensors."""

    ring: ProcessRing
    temperature: float
    ignore_index: int
    normalize: bool


_IGNORED, _LABEL_ELSEWHERE = -1, -2  # labels that are no document of a block


class RingCrossEntropy(torch.autograd.Function):
    """Losses of this process's queries among all documents, which keep two numbers for each query."""

    @staticmethod
    def forward(ctx, Q, D, q_weight, q_mask, d_mask, labels, options):
        """Return the losses ``[Nq]``."""
        running_loss = _RunningLoss.empty(labels, score_dtype(Q.dtype))

        def score(step, block, mask):
            nonlocal running_loss
            if len(block):
                block_labels = _localize_labels(labels, options, step)
                # A label in another block is replaced by 0. The loss at that label is not used.
                tensors = Q, block, q_mask, mask, q_weight, block_labels.clamp(min=0)
                losses, lse = lik.maxsim_cross_entropy_fwd(*tensors, options.temperature, _IGNORED, options.normalize)
                running_loss = running_loss.merge(_RunningLoss.from_block(losses, lse), block_labels >= 0)

        options.ring.visit(D, d_mask, score)
        losses, lse = running_loss.results()
        is_ignored = labels == options.ignore_index
        is_invalid = (labels < 0) | (labels >= options.ring.documents)
        losses.masked_fill_(is_invalid, torch.nan).masked_fill_(is_ignored, 0)
        lse.masked_fill_(is_invalid[:, None], torch.nan).masked_fill_(is_ignored[:, None], 0)
        ctx.options = options
        ctx.save_for_backward(Q, D, q_weight, q_mask, d_mask, labels, lse)
        return losses

    @staticmethod
    def backward(ctx, grad_losses):
        """Return the gradients of the inputs, which cannot be differentiated again."""
        with torch.no_grad():
            gradients = RingCrossEntropy.gradients(ctx, grad_losses)
        return _FirstOrderGradients.wrap("maxsim_cross_entropy", gradients, (grad_losses, *ctx.saved_tensors))

    @staticmethod
    def gradients(ctx, grad_losses):
        """Compute the gradients of the inputs in one pass around the ring."""
        options, needs = ctx.options, list(ctx.needs_input_grad[:3])
        Q, D, q_weight, q_mask, d_mask, labels, lse = ctx.saved_tensors

        def of_block(step, block, mask):
            tensors = Q, block, q_mask, mask, q_weight, _localize_labels(labels, options, step), lse
            settings = options.temperature, _IGNORED, options.normalize, needs
            return lik.maxsim_cross_entropy_bwd(grad_losses, *tensors, *settings)

        return *options.ring.gradients((Q, D, q_weight), d_mask, needs, of_block), None, None, None, None


def _localize_labels(labels: Tensor, options: RingLossOptions, step: int) -> Tensor:
    """Return the labels as documents of the block of a step."""
    columns = options.ring.columns(step)
    is_in_block = (labels >= columns.start) & (labels < columns.stop)
    is_ignored = labels == options.ignore_index
    return torch.where(is_ignored, _IGNORED, torch.where(is_in_block, labels - columns.start, _LABEL_ELSEWHERE))


class _RunningLoss(NamedTuple):
    """The loss of each query over the blocks so far, in a form that keeps the digits of small losses."""

    best: Tensor  # the largest score over the temperature
    others: Tensor  # the sum of exp(score / temperature - best) over all other documents
    at_label: Tensor  # score / temperature - best of the positive document, if seen

    @staticmethod
    def empty(labels: Tensor, dtype: torch.dtype) -> _RunningLoss:
        """Return the loss over no documents."""
        zeros = torch.zeros(labels.shape, dtype=dtype, device=labels.device)
        return _RunningLoss(zeros - torch.inf, zeros, zeros)

    @staticmethod
    def from_block(losses: Tensor, lse: Tensor) -> _RunningLoss:
        """Return the loss over one block, from the result of ``lik::maxsim_cross_entropy_fwd``."""
        best, log_sum = lse.unbind(1)
        empty = best == -torch.inf  # every document scores -inf
        others = torch.where(empty, 0, log_sum.expm1())
        return _RunningLoss(best, others, torch.where(empty, -torch.inf, log_sum - losses))

    def merge(self, block: _RunningLoss, has_positive: Tensor) -> _RunningLoss:
        """Return the loss over these blocks and `block`. `has_positive` marks queries whose positive is in `block`."""
        best = torch.maximum(self.best, block.best)
        is_equal, is_larger = self.best == block.best, self.best >= block.best  # -inf may equal -inf
        scale = torch.where(is_equal, 0, -(self.best - block.best).abs()).exp()
        large_sum, small_sum = (
            torch.where(is_larger, a, b) for a, b in ((self.others, block.others), (block.others, self.others))
        )
        label_term = torch.where(has_positive, block.at_label, self.at_label)
        label_best = torch.where(has_positive, block.best, self.best)
        shift = torch.where(label_best == best, 0, label_best - best)
        return _RunningLoss(best, large_sum + (1 + small_sum) * scale, label_term + shift)

    def results(self) -> tuple[Tensor, Tensor]:
        """Return losses, and log-sum-exps as two numbers, in the form of ``lik::maxsim_cross_entropy_fwd``."""
        # NaN if every document scores -inf.
        log_sum = torch.where(self.best == -torch.inf, torch.nan, self.others.log1p())
        return log_sum - self.at_label, torch.stack((self.best, log_sum), 1)


def _accumulate(total: Tensor | None, part: Tensor) -> Tensor:
    """Return the sum of `total` and `part` in fp32 (fp64)."""
    return part.to(score_dtype(part.dtype)) if total is None else total.add_(part)
