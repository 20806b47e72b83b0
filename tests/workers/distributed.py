"""Train the stand-in encoder on two processes: ``python -m tests.workers.distributed``.

Each process has half of the queries and documents and gathers the documents of both with their gradients. It compares
its gradients with a single process that has everything. An AssertionError ends it with a nonzero status.
"""

from __future__ import annotations

import copy
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..support.encoder import Encoder, batch, in_batch_loss
from . import forked

WORLD, PER_RANK = 2, 3
TIMEOUT = timedelta(seconds=60)


class Gathered(nn.Module):
    """Loss of this process's queries among the documents of all, with one call of the encoder."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, queries: Tensor, documents: Tensor, d_mask: Tensor) -> Tensor:
        Q, D = self.encoder(queries), self.encoder(documents)
        D = torch.cat(all_gather(D))
        masks = [torch.empty_like(d_mask) for _ in range(WORLD)]
        dist.all_gather(masks, d_mask)
        return in_batch_loss(nn.Identity(), Q, D, torch.cat(masks), first=dist.get_rank() * PER_RANK)


def wrap_encoder(kind: str) -> tuple[Encoder, nn.Module]:
    """Return the encoder with gradients reduced by DDP or FSDP2, and the module to call."""
    torch.manual_seed(0)
    encoder = Encoder()
    if kind == "ddp":
        return encoder, DistributedDataParallel(Gathered(encoder))
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    for layer in (encoder.inner, encoder.outer):
        fully_shard(layer, mesh=mesh)
    fully_shard(encoder, mesh=mesh)
    return encoder, Gathered(encoder)


def full(t: Tensor) -> Tensor:
    """Return a DTensor as a full tensor, and other tensors unchanged."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def check(kind: str) -> None:
    """Check that the gradients, and the parameters after a step, equal those from a single process."""
    rank = dist.get_rank()
    encoder, model = wrap_encoder(kind)
    torch.manual_seed(0)
    alone = Encoder()
    assert all(torch.equal(full(p), q) for p, q in zip(encoder.parameters(), alone.parameters(), strict=True))
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (encoder, alone)]
    x = batch(WORLD * PER_RANK, WORLD * PER_RANK, 5, 20)
    start = copy.deepcopy(alone)
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(*(t[rank * PER_RANK : (rank + 1) * PER_RANK] for t in x))
        loss.backward()
        expected = in_batch_loss(alone, *x)
        expected.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / WORLD, expected.detach())
        for p, q in zip(encoder.parameters(), alone.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    for p, q, before in zip(encoder.parameters(), alone.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(full(p.detach()), q.detach(), rtol=1e-5, atol=1e-6)
        assert not torch.equal(q, before)


def check_all() -> None:
    """Run all checks in one of the processes."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        for kind in sys.argv[1:]:
            check(kind)
            print(f"{kind} {dist.get_rank()} agrees", flush=True)
    finally:
        dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    forked.import_now("torch._dynamo")
    forked.run(WORLD, check_all)
    # Skip the interpreter's shutdown, in which a gloo thread that releases a tensor would request the GIL and abort.
    os._exit(0)


if __name__ == "__main__":
    main()
