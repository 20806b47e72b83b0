"""MaxSim against documents that go round a ring of processes, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._ops import ops as lik
from ..arguments import argmax_dtype_for, score_dtype
from ..ops.gradients import gradient
from .agreement import as_bytes


class Shift:
    """Tensors on their way from the process before."""

    def __init__(self, ring: Ring, sent: list[Tensor], received: list[Tensor]) -> None:
        self.device, self.received = ring.device, received
        self.sent = [x.to(ring.wire).contiguous() for x in sent]  # kept until they have gone
        operations = [dist.P2POp(dist.isend, as_bytes(x), group=ring.group, group_peer=ring.after) for x in self.sent]
        operations += [dist.P2POp(dist.irecv, as_bytes(x), group=ring.group, group_peer=ring.before) for x in received]
        # What holds nothing is not sent; its receiver knows.
        operations = [x for x in operations if x.tensor.numel()]
        self.works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> list[Tensor]:
        """The tensors, once; what was sent is let go of."""
        for work in self.works:
            work.wait()
        received, self.sent, self.received = self.received, [], []
        return [x.to(self.device) for x in received]


class Ring:
    """The processes of a group, each of which sends to the next one and receives from the one before."""

    def __init__(self, group: Any, wire: torch.device, device: torch.device) -> None:
        self.group, self.wire, self.device = group, wire, device
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.after, self.before = (self.rank + 1) % self.world, (self.rank - 1) % self.world

    def owner(self, step: int) -> int:
        """Whose block is here at a step."""
        return (self.rank - step) % self.world

    def shift(self, sent: list[Tensor], shapes: list[tuple[int, ...]]) -> Shift:
        """Start sending `sent` on and receiving its like, of `shapes`, from the process before."""
        received = [torch.empty(s, dtype=x.dtype, device=self.wire) for x, s in zip(sent, shapes, strict=True)]
        return Shift(self, sent, received)


@dataclass
class Options:
    """What `RingMaxSim` needs beside tensors."""

    ring: Ring
    shapes: list[tuple[int, ...]]  # of every process's documents
    normalize: bool
    backward: str
    keeps_winners: bool

    def columns(self, owner: int) -> slice:
        """Of the scores, those of the documents of a process."""
        starts = [0, *accumulate(shape[0] for shape in self.shapes)]
        return slice(starts[owner], starts[owner + 1])

    def next_block(self, step: int, block: list[Tensor]) -> Shift | None:
        """Start the exchange of the documents, and their mask, for the step after this one; None after the last."""
        if step + 1 == self.ring.world:
            return None
        shape = self.shapes[self.ring.owner(step + 1)]
        return self.ring.shift(block, [shape, shape[:2]][: len(block)])


class RingMaxSim(torch.autograd.Function):
    """Scores of this process's queries against all documents. While a block is scored, the next one arrives."""

    @staticmethod
    def forward(ctx, Q, D, q_weight, q_mask, d_mask, options):
        ring = options.ring
        total = sum(shape[0] for shape in options.shapes)
        scores = Q.new_empty((Q.shape[0], total), dtype=score_dtype(Q.dtype))
        winners = []
        block = [D] if d_mask is None else [D, d_mask]
        for step in range(ring.world):
            coming = options.next_block(step, block)
            mask = block[1] if len(block) > 1 else None
            dtype = argmax_dtype_for(block[0].shape[1]) if options.keeps_winners else None
            found = lik.maxsim_fwd(Q, block[0], q_mask, mask, q_weight, options.normalize, dtype, "auto")
            scores[:, options.columns(ring.owner(step))] = found[0]
            winners.append(found[1])
            block = coming.wait() if coming is not None else []
        ctx.options = options
        ctx.save_for_backward(Q, D, q_weight, q_mask, d_mask, *(winners if options.keeps_winners else ()))
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_scores):
        options, needs = ctx.options, list(ctx.needs_input_grad[:3])
        Q, D, q_weight, q_mask, d_mask, *winners = ctx.saved_tensors
        op, ring = gradient(options.backward), options.ring
        sums: list[Tensor | None] = [None, None, None]
        block = [D] if d_mask is None else [D, d_mask]
        carried = None  # the gradient of the documents that are here, from the processes where they have been
        for step in range(ring.world):
            coming = options.next_block(step, block)
            mask = block[1] if len(block) > 1 else None
            argmax = winners[step] if winners else Q.new_empty(0, dtype=torch.int32)
            upstream = grad_scores[:, options.columns(ring.owner(step))].contiguous()
            grads = op(upstream, Q, block[0], argmax, q_mask, mask, q_weight, options.normalize, needs)
            for i in (0, 2):
                if needs[i]:
                    sums[i] = _sum(sums[i], grads[i])
            if needs[1]:
                sums[1] = _sum(None if carried is None else carried.wait()[0], grads[1])
                # After the last step too: then it comes home.
                if ring.world > 1:
                    carried = ring.shift([sums[1]], [options.shapes[ring.owner(step + 1)]])
            block = coming.wait() if coming is not None else []
        if carried is not None:
            sums[1] = carried.wait()[0]
        like = (Q, D, q_weight)
        return *(g if g is None else g.to(x.dtype) for g, x in zip(sums, like, strict=True)), None, None, None


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    """In fp32, or fp64."""
    return part.to(score_dtype(part.dtype)) if total is None else total.add_(part)
