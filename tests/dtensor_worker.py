"""One rank of tests/test_distributed.py: sharded scores and gradients against those of one process."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lik_ops

Nq, K, Lq, Ld, d = 5, 7, 4, 6, 8  # neither number of queries nor of documents divides by two


def tensors(candidates: bool, options: bool, device: str) -> list:
    generator = torch.Generator().manual_seed(0)
    Q = torch.randn(Nq, Lq, d, generator=generator)
    D = torch.randn(*((Nq, K) if candidates else (K,)), Ld, d, generator=generator)
    if not options:
        return [Q.to(device), D.to(device), None, None, None]
    masks = [torch.rand(t.shape[:-1], generator=generator) > 0.3 for t in (Q, D)]
    weight = torch.rand(Nq, Lq, generator=generator)
    return [t.to(device) for t in (Q, D, *masks, weight)]


def placements(case: str, candidates: bool) -> tuple:
    """Of the query side and of the document side."""
    whole = Replicate()
    return {
        "replicated": ([whole], [whole]),
        "queries": ([Shard(0)], [Shard(0) if candidates else whole]),
        "documents": ([whole], [Shard(1) if candidates else Shard(0)]),
        "both": ([Shard(0)], [Shard(1) if candidates else Shard(0)]),
        "tokens": ([Shard(1)], [Shard(-2)]),
    }[case]


def place(x, mesh, placement):
    if x is None:
        return None
    placement = [Shard(p.dim + x.dim() + 1) if isinstance(p, Shard) and p.dim < 0 else p for p in placement]
    return distribute_tensor(x, mesh, placement)


def step(args, normalize, with_argmax):
    Q, D, q_mask, d_mask, weight = args
    leaves = [t for t in (Q, D, weight) if t is not None]
    for t in leaves:
        t.requires_grad_()
    if with_argmax:
        scores, _ = lik_ops.maxsim_with_argmax(Q, D, q_mask, d_mask, q_weight=weight, normalize=normalize)
    else:
        scores = lik_ops.maxsim(Q, D, q_mask, d_mask, q_weight=weight, normalize=normalize)
    loss = (scores * scores).sum() / 2
    return scores.detach(), torch.autograd.grad(loss, leaves)


def check(mesh, case: str, candidates: bool, options: bool, with_argmax: bool, device: str) -> None:
    expected, expected_grads = step(tensors(candidates, options, device), options, with_argmax)
    q_placement, d_placement = placements(case, candidates)
    Q, D, q_mask, d_mask, weight = tensors(candidates, options, device)
    args = [place(x, mesh, q_placement) for x in (Q, q_mask, weight)]
    documents = [place(x, mesh, d_placement) for x in (D, d_mask)]
    scores, grads = step([args[0], documents[0], args[1], documents[1], args[2]], options, with_argmax)
    name = f"{case}, candidates {candidates}, options {options}"
    assert isinstance(scores, DTensor), name
    if case in ("queries", "documents"):
        assert any(p.is_shard() for p in scores.placements), f"{name}: {scores.placements}"
    assert torch.equal(scores.full_tensor(), expected), f"{name}: other bits than one process"
    for g, e in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(g.full_tensor(), e, msg=lambda m: f"{name}: {m}")


def main() -> None:
    backend, device = sys.argv[1:]
    dist.init_process_group(backend)
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank())
    try:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for case in ("replicated", "queries", "documents", "both", "tokens"):
            for candidates in (False, True):
                for options in (False, True):
                    check(mesh, case, candidates, options, options and case == "queries", device)
        Q, D, *_ = tensors(False, False, device)
        sharded = distribute_tensor(Q, mesh, [Shard(0)]), distribute_tensor(D, mesh, [Replicate()])
        for shape in ((2, 1), (1, 2)):
            both = init_device_mesh(device, shape)
            args = (
                distribute_tensor(Q, both, [Shard(0), Replicate()]),
                distribute_tensor(D, both, [Replicate(), Shard(0)]),
            )
            scores = lik_ops.maxsim(*args)
            assert tuple(scores.placements) == (Shard(0), Shard(1))
            assert torch.equal(scores.full_tensor(), lik_ops.maxsim(Q, D))
        for of_queries, of_documents in ((Shard(0), Replicate()), (Replicate(), Shard(0)), (Replicate(), Replicate())):
            args = distribute_tensor(Q, mesh, [of_queries]), distribute_tensor(D, mesh, [of_documents])
            for found, expected in zip(lik_ops.retrieve(*args, 3), lik_ops.retrieve(Q, D, 3), strict=True):
                assert found.placements == (of_queries,) and torch.equal(found.full_tensor(), expected)
        compiled = torch.compile(lik_ops.maxsim, backend="aot_eager", fullgraph=True)(*sharded)
        assert torch.equal(compiled.full_tensor(), lik_ops.maxsim(Q, D))
    finally:
        dist.destroy_process_group()
    print("all equal", flush=True)
    os._exit(0)  # see tests/distributed.py


if __name__ == "__main__":
    main()
