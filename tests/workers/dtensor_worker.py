"""Ranks of tests/distributed/test_distributed.py: sharded scores and gradients against those from one process."""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lik_ops

from ..support.differences import assert_sharded_equal
from ..support.residual import quantize
from . import forked

Nq, K, Lq, Ld, d = 5, 7, 4, 6, 8  # two divides neither the number of queries nor of documents


def tensors(candidates: bool, options: bool, device: str) -> list:
    """Return Q, D, q_mask, d_mask, and q_weight of a call, the last three None without `options`."""
    generator = torch.Generator().manual_seed(0)
    Q = torch.randn(Nq, Lq, d, generator=generator)
    D = torch.randn(*((Nq, K) if candidates else (K,)), Ld, d, generator=generator)
    if not options:
        return [Q.to(device), D.to(device), None, None, None]
    masks = [torch.rand(t.shape[:-1], generator=generator) > 0.3 for t in (Q, D)]
    weight = torch.rand(Nq, Lq, generator=generator)
    return [t.to(device) for t in (Q, D, *masks, weight)]


def placements(case: str, candidates: bool) -> tuple:
    """Return the placements of the query side and of the document side."""
    whole = Replicate()
    return {
        "replicated": ([whole], [whole]),
        "queries": ([Shard(0)], [Shard(0) if candidates else whole]),
        "documents": ([whole], [Shard(1) if candidates else Shard(0)]),
        "both": ([Shard(0)], [Shard(1) if candidates else Shard(0)]),
        "tokens": ([Shard(1)], [Shard(-2)]),
    }[case]


def place(x, mesh, placement):
    """Distribute a tensor over the mesh, with negative shard axes resolved."""
    if x is None:
        return None
    placement = [Shard(p.dim + x.dim() + 1) if isinstance(p, Shard) and p.dim < 0 else p for p in placement]
    return distribute_tensor(x, mesh, placement)


def step(args, normalize, with_argmax):
    """Return the scores and gradients of a training step."""
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
    """Check scores and gradients of a sharded call against one process."""
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
    assert_sharded_equal(name, scores, expected)
    for g, e in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(g.full_tensor(), e, msg=lambda m: f"{name}: {m}")


def ragged(kind: str, options: bool, device: str) -> list:
    """Return the arguments of `lik::maxsim_ragged_fwd` up to the weights: 7 documents, 5 candidates or pairs."""
    lengths = torch.tensor([3, 5, 0, 6, 1, 4, 2])
    offsets, pairs = lengths.cumsum(0) - lengths, None
    generator = torch.Generator().manual_seed(0)
    Q, D = (torch.randn(n, d, generator=generator) for n in (9, int(lengths.sum())))
    cu_seqlens_q = torch.tensor([0, 2, 5, 9])
    if kind == "candidates":
        chosen = torch.randint(0, 7, (3, 5), generator=generator)
        offsets, lengths = offsets[chosen], lengths[chosen]
    if kind == "pairs":
        pairs = torch.stack([torch.randint(0, n, (5,), generator=generator) for n in (3, 7)], 1)
    masks = [torch.rand(x.shape[0], generator=generator) > 0.3 for x in (Q, D)] if options else [None, None]
    weight = torch.rand(9, generator=generator) if options else None
    args = [Q, D, cu_seqlens_q, offsets, lengths, pairs, *masks, weight]
    return [None if x is None else x.to(device) for x in args]


def ragged_step(args: list, options: bool) -> list:
    """Return scores, argmax, and gradients of the ragged operator."""
    leaves = [args[i].requires_grad_() for i in (0, 1, 8) if args[i] is not None]
    scores, argmax = torch.ops.lik.maxsim_ragged_fwd(*args, options, torch.int32, 4, "auto")
    finite = torch.where(scores.isfinite(), scores, 0)
    return [scores.detach(), argmax, *torch.autograd.grad((finite * finite).sum() / 2, leaves)]


def check_ragged(mesh, kind: str, options: bool, device: str) -> None:
    """Check replicated tensors, sharded lists, and unshardable tokens, which are gathered with their masks first."""
    expected = ragged_step(ragged(kind, options, device), options)
    lists = {"cross": (3, 4), "candidates": (3, 4), "pairs": (5,)}[kind]
    for sharded in ((), lists, (0, 1, 6, 7, 8), (2,)):
        args = ragged(kind, options, device)
        of_lists = Shard(1) if kind == "candidates" else Shard(0)
        for i, x in enumerate(args):
            placement = Replicate() if i not in sharded else of_lists if i in lists else Shard(0)
            args[i] = place(x, mesh, [placement])
        found = ragged_step(args, options)
        name = f"ragged {kind}, options {options}, sharded {sharded}"
        if sharded == lists:
            scores = Shard(0) if kind == "pairs" else Shard(1)
            for n, (x, placement) in enumerate(zip(found[:2], (scores, Shard(0)), strict=True)):
                assert x.placements == (placement,), f"{name}: result {n} has {x.placements}, expected {placement}"
        for n, (x, e) in enumerate(zip(found, expected, strict=True)):
            if n < 2:
                assert_sharded_equal(f"{name}, result {n}", x, e)
            else:
                torch.testing.assert_close(x.full_tensor(), e, msg=lambda m, name=name: f"{name}: {m}")


def check_quantized(mesh, kind: str, format: str, device: str) -> None:
    """Check replicated tensors, sharded lists, and unshardable codes and scales, which are gathered first."""
    Q, D, cu_q, offsets, lengths, pairs, *_ = ragged(kind, False, device)
    given = [Q, *quantize(D, format).to_flat_encoded(), cu_q, offsets, lengths, pairs, None, None, None]

    def scored(args: list) -> tuple:
        return torch.ops.lik.maxsim_quantized_fwd(*args, False, torch.int32, 4)

    expected, of_lists = scored(given), Shard(1) if kind == "candidates" else Shard(0)
    lists = {"cross": (9, 10), "candidates": (9, 10), "pairs": (11,)}[kind]
    for sharded in ((), lists, (0, 1, 2, 3)):
        args = [
            place(x, mesh, [Replicate() if i not in sharded else of_lists if i in lists else Shard(0)])
            if isinstance(x, torch.Tensor)
            else x
            for i, x in enumerate(given)
        ]
        found, name = scored(args), f"{format} {kind}, sharded {sharded}"
        scores = [Shard(0) if kind == "pairs" else Shard(1)] if sharded == lists else None
        for n, (x, e) in enumerate(zip(found, expected, strict=True)):
            assert_sharded_equal(f"{name}, result {n}", x, e, None if n else scores)


def check_quantized_functions(mesh, device: str) -> None:
    """Check documents whose codes are DTensors. Plain documents next to a DTensor raise."""
    Q, D, cu_q, offsets, lengths, *_ = ragged("cross", False, device)
    cu_d = torch.cat([offsets, offsets[-1:] + lengths[-1:]])
    made = lik_ops.quantize(D, "int8")
    try:
        lik_ops.maxsim_varlen(place(Q, mesh, [Replicate()]), made, cu_q, cu_d)
    except RuntimeError as error:
        assert "mixed torch.Tensor and DTensor" in str(error)
    else:
        raise AssertionError("plain documents beside a DTensor: expected a RuntimeError")
    whole = [place(x, mesh, [Replicate()]) for x in (Q, made.data, made.scale, cu_q, cu_d)]
    sharded = lik_ops.Quantized(whole[1], whole[2], "int8", d, torch.float32)
    found = lik_ops.maxsim_varlen(whole[0], sharded, *whole[3:])
    assert_sharded_equal("quantized varlen", found, lik_ops.maxsim_varlen(Q, made, cu_q, cu_d))


def check_trained(mesh, name: str, candidates: bool, device: str, score) -> None:
    """Check scores and gradients of other functions of dense tokens."""

    def step(Q, D):
        """Return the scores and gradients of a training step."""
        Q, D = (t.detach().requires_grad_() for t in (Q, D))
        scores = score(Q, D)
        return scores.detach(), *torch.autograd.grad((scores * scores).sum() / 2, (Q, D))

    Q, D, *_ = tensors(candidates, False, device)
    expected = step(Q, D)
    for case in ("replicated", "queries", "documents"):
        q_placement, d_placement = placements(case, candidates)
        found = step(place(Q, mesh, q_placement), place(D, mesh, d_placement))
        assert_sharded_equal(f"{name}, candidates {candidates}, {case}", found[0], expected[0])
        for g, e in zip(found[1:], expected[1:], strict=True):
            torch.testing.assert_close(g.full_tensor(), e, msg=lambda m, case=case: f"{name}, {case}: {m}")


def losses(Q, D, labelled=True):
    """Return the loss of each query. Labels are a DTensor if Q is one."""
    labels = None
    if labelled:
        labels = torch.arange(Q.shape[0], device=Q.device) % 2
        labels = place(labels, Q.device_mesh, [Replicate()]) if isinstance(Q, DTensor) else labels
    each, mean = (lik_ops.maxsim_cross_entropy(Q, D, labels, reduction=name) for name in ("none", "mean"))
    total = mean.full_tensor() if isinstance(mean, DTensor) else mean
    torch.testing.assert_close(total, (each.full_tensor() if isinstance(each, DTensor) else each).mean())
    return each


TRAINED = {
    "int8": lambda Q, D: lik_ops.maxsim(Q, D, normalize=True, save="int8"),
    "soft": lambda Q, D: lik_ops.maxsim_soft(Q, D, 0.3),
    "token_topk": lambda Q, D: lik_ops.maxsim_token_topk(Q, D, 3),
    "losses": losses,
    "losses without labels": lambda Q, D: losses(Q, D, labelled=False),
}


def from_hidden(Q, H):
    """Return scores of hidden states for a replicated head."""
    head = torch.randn(Q.shape[-1], H.shape[-1] + 1, generator=torch.Generator().manual_seed(0)).to(Q.device)
    W, b = head[:, :-1].contiguous(), head[:, -1].contiguous()
    if isinstance(Q, DTensor):
        W, b = (place(t, Q.device_mesh, [Replicate()]) for t in (W, b))
    return lik_ops.maxsim_from_hidden(Q, H, W, b)


def check_ragged_functions(mesh, device: str) -> None:
    """Check the packed functions and their gradients with DTensor arguments."""
    Q, D, cu_q, offsets, lengths, pairs, *_ = ragged("pairs", False, device)
    cu_d = torch.cat([offsets, offsets[-1:] + lengths[-1:]])
    chosen = torch.tensor([[1, 3, 0], [4, 4, 5], [6, 3, 1]], device=device)
    calls = {
        "varlen": (lik_ops.maxsim_varlen, (cu_q, cu_d), {}),
        "candidates": (lik_ops.maxsim_candidates_varlen, (offsets[chosen], lengths[chosen]), {"cu_seqlens_q": cu_q}),
        "pairs": (lik_ops.maxsim_pair_list, (pairs,), {"cu_seqlens_q": cu_q, "cu_seqlens_d": cu_d, "max_seqlen_q": 4}),
    }
    try:
        lik_ops.maxsim_varlen(place(Q[None], mesh, [Replicate()]), D, None, cu_d)
    except RuntimeError as error:
        assert "mixed torch.Tensor and DTensor" in str(error)
    else:
        raise AssertionError("a DTensor beside plain tensors: expected a RuntimeError")
    for name, (function, lists, options) in calls.items():
        of_lists = {"varlen": Replicate(), "candidates": Shard(1), "pairs": Shard(0)}[name]
        plain = [Q.detach().requires_grad_(), D.detach().requires_grad_()]
        sharded = [place(x.detach(), mesh, [Replicate()]).requires_grad_() for x in plain]
        expected = function(*plain, *lists, **options)
        whole = {k: place(v, mesh, [Replicate()]) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        found = function(*sharded, *(place(x, mesh, [of_lists]) for x in lists), **whole)
        assert isinstance(found, DTensor), name
        assert_sharded_equal(name, found, expected)
        keep = expected.isfinite()
        grads = torch.autograd.grad(torch.where(keep, expected, 0).sum(), plain)
        found = torch.where(place(keep, mesh, [Replicate()]), found, 0).sum()
        for g, e in zip(torch.autograd.grad(found, sharded), grads, strict=True):
            torch.testing.assert_close(g.full_tensor(), e, msg=lambda m, name=name: f"{name}: {m}")


def check_compiled_ragged(mesh, device: str) -> None:
    """Check a compiled packed call of DTensors."""
    Q, D, cu_q, *_ = ragged("cross", False, device)
    cu_d = torch.tensor([0, 3, 8, 8, 14, 15, 19, 21], device=device)
    args = [place(x, mesh, [Replicate()]) for x in (Q, D, cu_q, cu_d)]
    compiled = torch.compile(lik_ops.maxsim_varlen, backend="aot_eager", fullgraph=True)(*args)
    assert_sharded_equal("compiled varlen", compiled, lik_ops.maxsim_varlen(Q, D, cu_q, cu_d))


def check_codes(mesh, Q) -> None:
    """Check that staged search finds candidates on the rank of their queries."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(5, (9, 4), generator=generator).to(Q.device)
    centroids = torch.randn(5, Q.shape[-1], generator=generator).to(Q.device)
    options = (None, None, None, None, False, 3, 2)
    expected = torch.ops.lik.maxsim_topk_codes(Q, codes, centroids, *options)
    whole = [distribute_tensor(x, mesh, [Replicate()]) for x in (codes, centroids)]
    for of_queries in (Shard(0), Replicate()):
        found = torch.ops.lik.maxsim_topk_codes(distribute_tensor(Q, mesh, [of_queries]), *whole, *options)
        for name, x, e in zip(("scores", "indices"), found, expected, strict=True):
            assert_sharded_equal(f"search of codes, queries {of_queries}, {name}", x, e, [of_queries])


def check_created_offsets_and_masks(mesh, device: str) -> None:
    """Check that offsets and masks created next to DTensors are DTensors, for dense sides, lists, and padding."""
    Q, D, *_ = tensors(False, False, device)
    packed, cu_d = lik_ops.pack([D[0], D[1, :2], D[2, :0]])
    queries, cu_q = lik_ops.pack([Q[0], Q[1, :2]])
    offsets, lengths = cu_d[:-1].repeat(Nq, 1), cu_d.diff().repeat(Nq, 1)
    pairs = torch.tensor([[0, 1], [4, 6], [2, 2]], device=device)
    counts = torch.tensor([1, 4, 0, 2, 3], device=device)
    many, each = tensors(True, False, device)[1], torch.randint(Ld + 1, (Nq, K), device=device)
    torch.distributed.broadcast(each, 0)
    calls = {
        "dense queries": (lik_ops.maxsim_varlen, (Q, packed, None, cu_d)),
        "one query": (lik_ops.maxsim_varlen, (Q[0], packed, None, cu_d)),
        "dense documents": (lik_ops.maxsim_varlen, (queries, D, cu_q)),
        "dense queries of candidates": (lik_ops.maxsim_candidates_varlen, (Q, packed, offsets, lengths)),
        "dense pairs": (lik_ops.maxsim_pair_list, (Q, D, pairs)),
        "padded": (lik_ops.maxsim_padded, (Q, many, counts, each)),
        "lists": (lambda *x: lik_ops.maxsim([*x[:2]], [*x[2:]]), (Q[0], Q[1, :2], D[0], D[1, :3], D[2])),
        "lengths_to_mask": (lik_ops.lengths_to_mask, (counts, Lq)),
    }
    for name, (function, args) in calls.items():
        expected = function(*args)
        for placement in (Replicate(), Shard(0)):
            given = [place(x, mesh, [placement]) if isinstance(x, torch.Tensor) else x for x in args]
            assert_sharded_equal(f"{name}, {placement}", function(*given), expected)
    whole = [place(x, mesh, [Replicate()]) for x in (Q, D, packed, cu_d)]
    for name, call in {
        "quantize: D": lambda: lik_ops.quantize(whole[1]),
        "retrieve(largest=False): Q": lambda: lik_ops.retrieve(*whole[:2], 3, largest=False),
        "unpack: packed": lambda: lik_ops.unpack(*whole[2:]),
        "distributed.retrieve: Q": lambda: lik_ops.distributed.retrieve(*whole[:2], 3),
        "distributed.maxsim_inbatch: Q": lambda: lik_ops.distributed.maxsim_inbatch(*whole[:2]),
        "distributed.maxsim_cross_entropy: Q": lambda: lik_ops.distributed.maxsim_cross_entropy(*whole[:2]),
    }.items():
        try:
            call()
        except TypeError as error:
            assert f"{name}: expected a plain tensor, got a DTensor" in str(error), error
        else:
            raise AssertionError(f"{name}: expected a TypeError")


def check_flags(mesh, device: str) -> None:
    """Check alternating frozen sides, because DTensor must not reuse result shapes of calls with other flags."""
    Q, D, *_ = tensors(False, False, device)
    head = torch.eye(d, device=device)
    calls = {
        **{name: score for name, score in TRAINED.items() if "losses" not in name},
        "maxsim": lik_ops.maxsim,
        "xtr": lambda Q, D: lik_ops.maxsim_xtr(Q, D, 9),
        "from_hidden": lambda Q, D: lik_ops.maxsim_from_hidden(Q, D, like(head, Q)),
        "varlen": lambda Q, D: lik_ops.maxsim_varlen(Q, D.flatten(0, 1), None, like(bounds, Q)),
        "losses": lambda Q, D: lik_ops.maxsim_cross_entropy(Q, D),
    }
    bounds = torch.arange(K + 1, device=device) * Ld

    def like(x, other):
        return place(x, mesh, [Replicate()]) if isinstance(other, DTensor) else x

    for name, score in calls.items():
        for of_queries, of_documents in ((False, False), (True, False), (False, True), (True, True)):
            found = []
            for sharded in (True, False):
                args = [place(x, mesh, [Replicate()]) if sharded else x.clone() for x in (Q, D)]
                args = [x.requires_grad_(needs) for x, needs in zip(args, (of_queries, of_documents), strict=True)]
                scores = score(*args)
                if scores.requires_grad:
                    scores.sum().backward()
                found.append([scores.detach(), *(x.grad for x in args if x.grad is not None)])
            for x, e in zip(*found, strict=True):
                torch.testing.assert_close(x.full_tensor(), e, msg=lambda m, name=name: f"{name}: {m}")


def check_chamfer(mesh, device: str) -> None:
    """Check Chamfer distances and gradients of sharded clouds."""
    torch.manual_seed(0)
    clouds = torch.randn(4, 9, 3, device=device), torch.randn(4, 7, 3, device=device)
    found = lik_ops.chamfer_distance(*(distribute_tensor(x, mesh, [Shard(0)]) for x in clouds))
    assert_sharded_equal("chamfer", found, lik_ops.chamfer_distance(*clouds), [Shard(0)])
    leaves = [distribute_tensor(x, mesh, [Shard(0)]).requires_grad_() for x in clouds]
    whole = [x.clone().requires_grad_() for x in clouds]
    for x in (leaves, whole):
        lik_ops.chamfer_distance(*x).sum().backward()
    for n, (x, expected) in enumerate(zip(leaves, whole, strict=True)):
        assert_sharded_equal(f"gradient of cloud {n}", x.grad, expected.grad)


def check_meshes_of_two_axes(device: str) -> None:
    """Check scores on two-dimensional meshes."""
    Q, D, *_ = tensors(False, False, device)
    for shape in ((2, 1), (1, 2)):
        both = init_device_mesh(device, shape)
        args = (
            distribute_tensor(Q, both, [Shard(0), Replicate()]),
            distribute_tensor(D, both, [Replicate(), Shard(0)]),
        )
        assert_sharded_equal(f"mesh {shape}", lik_ops.maxsim(*args), lik_ops.maxsim(Q, D), [Shard(0), Shard(1)])


def check_search(mesh, device: str) -> None:
    """Check retrieval with sharded queries or documents."""
    Q, D, *_ = tensors(False, False, device)
    expected = lik_ops.retrieve(Q, D, 3)
    for of_queries, of_documents in ((Shard(0), Replicate()), (Replicate(), Shard(0)), (Replicate(), Replicate())):
        args = distribute_tensor(Q, mesh, [of_queries]), distribute_tensor(D, mesh, [of_documents])
        for name, x, e in zip(("scores", "indices"), lik_ops.retrieve(*args, 3), expected, strict=True):
            assert_sharded_equal(f"retrieve, queries {of_queries}, {name}", x, e, [of_queries])


def check_compiled(mesh, device: str) -> None:
    """Check a compiled dense call of DTensors."""
    Q, D, *_ = tensors(False, False, device)
    sharded = distribute_tensor(Q, mesh, [Shard(0)]), distribute_tensor(D, mesh, [Replicate()])
    compiled = torch.compile(lik_ops.maxsim, backend="aot_eager", fullgraph=True)(*sharded)
    assert_sharded_equal("compiled", compiled, lik_ops.maxsim(Q, D))


def check_all(backend: str, device: str) -> None:
    """Run all checks in one process of a group."""
    dist.init_process_group(backend)
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank())
    try:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        check_ragged_functions(mesh, device)  # first, so that the rules exist without any other call
        for case in ("replicated", "queries", "documents", "both", "tokens"):
            for candidates in (False, True):
                for options in (False, True):
                    check(mesh, case, candidates, options, options and case == "queries", device)
        for kind in ("cross", "candidates", "pairs"):
            for options in (False, True):
                check_ragged(mesh, kind, options, device)
        for kind in ("cross", "candidates", "pairs"):
            for format in ("int8", "uint8", "binary", "residual2"):
                check_quantized(mesh, kind, format, device)
        check_quantized_functions(mesh, device)
        for candidates in (False, True):
            for name, score in TRAINED.items():
                check_trained(mesh, name, candidates, device, score)
        check_trained(mesh, "from_hidden", False, device, from_hidden)
        check_trained(mesh, "xtr", False, device, lambda Q, D: lik_ops.maxsim_xtr(Q, D, 9))
        check_flags(mesh, device)
        check_created_offsets_and_masks(mesh, device)
        check_chamfer(mesh, device)
        check_meshes_of_two_axes(device)
        check_search(mesh, device)
        Q = tensors(False, False, device)[0]
        for tokens in (Lq, 1):
            check_codes(mesh, Q[:, :tokens].contiguous())
        check_compiled(mesh, device)
        check_compiled_ragged(mesh, device)
    finally:
        dist.destroy_process_group()
    print("all equal", flush=True)


def main() -> None:
    """Run as one process of torchrun, or as two processes."""
    check = partial(check_all, *sys.argv[1:])
    if "RANK" in os.environ:
        check()
    else:
        forked.run(2, check)
    os._exit(0)  # see tests/workers/distributed.py


if __name__ == "__main__":
    main()
