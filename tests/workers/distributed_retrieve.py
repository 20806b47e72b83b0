"""Search and score on several processes: ``python -m tests.workers.distributed_retrieve``, also under torchrun.

Each process computes the result of a single process and compares. An AssertionError ends it with a nonzero status.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import lik_ops
from lik_ops import distributed
from lik_ops.distributed import ring as _ring
from lik_ops.distributed.agreement import is_host_group
from lik_ops.retrieval import shards

from . import forked
from .distributed_loss import check_loss, expect

TIMEOUT = timedelta(seconds=60)

CODEC = lik_ops.ResidualCodec(torch.eye(8), torch.tensor([-1.0, 0, 1, 2]), torch.tensor([-0.5, 0.5, 1.5]))


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Return whether two results have equal indices and equal score bits."""

    def bits(x: Tensor) -> Tensor:
        return x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)

    return torch.equal(found[1], expected[1]) and torch.equal(bits(found[0]), bits(expected[0]))


def packed(dtype: torch.dtype, documents: int, d: int) -> tuple[list[Tensor], Tensor]:
    """Return random documents, empty ones included, and their cu_seqlens."""
    each = [torch.randint(-2, 3, (i % 6, d)).to(dtype) for i in range(documents)]
    lengths = torch.tensor([0, *(len(x) for x in each)])
    return each, lengths.cumsum(0)


@contextmanager
def launched() -> Iterator[None]:
    """Search CPU tensors like GPU tensors, before the messages of the other ranks arrive."""
    is_resident = shards.is_resident
    shards.is_resident = lambda corpus: isinstance(corpus, Tensor)
    try:
        yield
    finally:
        shards.is_resident = is_resident


@contextmanager
def counted(module: object, *names: str, calls: list[str] | None = None) -> Iterator[list[str]]:
    """Yield the names of the called functions of `module`, in order, after the contents of `calls`."""
    calls = [] if calls is None else calls
    functions = {name: getattr(module, name) for name in names}

    def counting(name: str):
        def call(*args, **kwargs):
            calls.append(name)
            return functions[name](*args, **kwargs)

        return call

    for name in names:
        setattr(module, name, counting(name))
    try:
        yield calls
    finally:
        for name, function in functions.items():
            setattr(module, name, function)


def check_retrieve(device: str, directory: Path) -> None:
    """Check every kind of corpus, queries everywhere or on one rank, more ranks than documents, ties across ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for documents in (0, 1, 3, 101):
            Q = torch.randint(-2, 3, (3, 4, 8)).to(device, dtype)
            q_mask = (torch.rand(3, 4) > 0.3).to(device)
            weight = torch.rand(3, 4, dtype=torch.float64).to(device, torch.promote_types(dtype, torch.float32))
            each, cu_seqlens = packed(dtype, documents, 8)
            tokens = torch.cat([torch.empty(0, 8, dtype=dtype), *each])
            path = directory / f"{dtype}-{documents}"
            if rank == 0:
                lik_ops.Corpus.create(path, 8, dtype).append(each)
            dist.barrier()
            for none in ([], torch.empty(0, 2, 8, dtype=dtype)):
                found = distributed.retrieve(Q, none, 7, sharded=True)
                assert same(found, lik_ops.retrieve(Q, none, 7)) and found[0].shape == (3, 0)
                found = distributed.retrieve(Q if rank == 0 else None, none, 7, sharded=True, device=device)
                assert same(found, lik_ops.retrieve(Q, none, 7))
            options = {"q_mask": q_mask, "q_weight": weight, "normalize": documents == 3}
            expected = lik_ops.retrieve(Q, tokens.to(device), 7, cu_seqlens_d=cu_seqlens.to(device), **options)
            for corpus, more in (
                (lik_ops.Corpus.open(path), {}),
                (tokens, {"cu_seqlens_d": cu_seqlens}),
                (tokens.to(device), {"cu_seqlens_d": cu_seqlens.to(device), "chunk": 2}),
            ):
                assert same(distributed.retrieve(Q, corpus, 7, **options, **more), expected)
                alone = {"q_mask": q_mask, "q_weight": weight} if rank == 0 else {}
                alone["normalize"] = documents == 3
                found = distributed.retrieve(Q if rank == 0 else None, corpus, 7, **alone, **more, device=device)
                assert same(found, expected)
            for n, how in enumerate((("uint8", "document"), (CODEC, "token"))):
                made = lik_ops.quantize(tokens, *how, cu_seqlens_d=cu_seqlens).to(device)
                small = directory / f"{dtype}-{documents}-{n}"
                if rank == 0:
                    lik_ops.Corpus.open(path).quantize(small, *how)
                dist.barrier()
                expected = lik_ops.retrieve(Q, made, 7, cu_seqlens_d=cu_seqlens.to(device), **options)
                corpus, alone = lik_ops.Corpus.open(small), {"normalize": documents == 3}
                for queries, known in ((Q, options), (Q, options) if rank == 0 else (None, alone)):
                    assert same(distributed.retrieve(queries, corpus, 7, **known, device=device), expected)
            D = torch.randint(-1, 2, (documents, 3, 8)).to(device, dtype)
            d_mask = (torch.rand(documents, 3) > 0.5).to(device)
            flat = distributed.retrieve(Q[0], D, 200, d_mask=d_mask)
            assert same(flat, lik_ops.retrieve(Q[0], D, 200, d_mask=d_mask))
    groups = [dist.new_group([0, world - 1]), dist.new_group(list(range(world))[::-1])]
    Q, D = torch.randn(2, 4, 8).to(device), torch.randn(30, 3, 8).to(device)
    for group in groups:
        if dist.get_rank(group) >= 0:
            first = dist.get_rank(group) == 0
            found = distributed.retrieve(Q if first else None, D, 5, group, device=device)
            assert same(found, lik_ops.retrieve(Q, D, 5))


def check_search_during_agreement(device: str, directory: Path) -> None:
    """Check documents that are searched while the ranks agree, with queries everywhere, on one rank, and everywhere."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    for documents in (0, 3, 101):
        Q = torch.randint(-2, 3, (3, 4, 8)).to(device, torch.float16)
        q_mask, weight = (torch.rand(3, 4) > 0.3).to(device), torch.rand(3, 4).to(device)
        each, cu_seqlens = packed(torch.float16, documents, 8)
        tokens = torch.cat([torch.empty(0, 8, dtype=torch.float16), *each]).to(device)
        options = {"q_mask": q_mask, "q_weight": weight}
        expected = lik_ops.retrieve(Q, tokens, 7, cu_seqlens_d=cu_seqlens, **options)
        for queries, k in ((Q[:0], 7), (Q, 0)):
            found = distributed.retrieve(queries, tokens, k, cu_seqlens_d=cu_seqlens)
            assert same(found, lik_ops.retrieve(queries, tokens, k, cu_seqlens_d=cu_seqlens))
        for where in (cu_seqlens, cu_seqlens.to(device)):
            for alone in (False, True, True, False):
                given = not alone or rank == 0
                found = distributed.retrieve(
                    Q if given else None, tokens, 7, cu_seqlens_d=where, **(options if given else {}), device=device
                )
                assert same(found, expected)


def check_sharded(device: str, directory: Path) -> None:
    """Check a separate shard on each rank, of any size and kind, against the concatenation of all shards."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    Q, D = torch.randint(-2, 3, (3, 4, 8)).to(device).float(), torch.randint(-2, 3, (40, 5, 8)).to(device).float()
    d_mask = (torch.rand(40, 5) > 0.4).to(device)
    tokens, cu_seqlens = D.flatten(0, 1), torch.arange(41, device=device) * 5
    corpus = lik_ops.Corpus.create(directory / f"shard-{rank}", 8, torch.float32)
    cuts = [0, 3, 3, 21] if world == 4 else [0, 37]  # a shard with fewer documents than top_k, and an empty one
    begin, end = [*cuts, 40][rank : rank + 2]
    corpus.append(list(D[begin:end].cpu()))
    small, made = corpus.quantize(directory / f"shard-{rank}-int8"), lik_ops.quantize(tokens)
    for k in (1, 6, 100):
        quantized = lik_ops.retrieve(Q, made, k, cu_seqlens_d=cu_seqlens)
        assert same(distributed.retrieve(Q, small, k, sharded=True), quantized)
        masked, whole = (
            lik_ops.retrieve(Q, D, k, d_mask=d_mask),
            lik_ops.retrieve(Q, tokens, k, cu_seqlens_d=cu_seqlens),
        )
        found = distributed.retrieve(Q, D[begin:end], k, d_mask=d_mask[begin:end], sharded=True)
        assert same(found, masked)
        part = {"cu_seqlens_d": cu_seqlens[begin : end + 1], "sharded": True, "chunk": 4, "device": device}
        assert same(distributed.retrieve(Q if rank == 0 else None, tokens, k, **part), whole)
        # A rank with an empty list learns d and dtype from the received queries.
        mine = list(D[begin:end]) if begin < end and rank else []
        found = distributed.retrieve(Q if rank == 0 else None, mine, k, sharded=True, device=device)
        rest = lik_ops.retrieve(Q, D[cuts[1] :], k)
        assert same(found, rest), (found, rest)
        assert same(distributed.retrieve(Q, corpus, k, sharded=True), whole)
    with torch.autocast(device, dtype=torch.bfloat16):
        expected = lik_ops.retrieve(Q, D, 6)
        for given in (True, rank == 0):
            found = distributed.retrieve(Q if given else None, D[begin:end], 6, sharded=True, device=device)
            assert same(found, expected)


def check_residual_codes(device: str, directory: Path) -> None:
    """Check residual codes in memory, complete or sharded. In staged search each rank has its own candidates."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    Q, tokens = torch.randint(-2, 3, (3, 4, 8)).to(device).float(), torch.randint(-2, 3, (200, 8)).to(device).float()
    cu_seqlens = torch.tensor([0, *range(3, 198, 5), 200], device=device)
    made = lik_ops.quantize(tokens, CODEC.to(device), cu_seqlens_d=cu_seqlens)
    index, dense = lik_ops.Index(made, cu_seqlens), lik_ops.quantize(tokens.view(40, 5, 8), CODEC.to(device))
    ends = [40 * n // world for n in range(world + 1)]
    begin, end = ends[rank : rank + 2]
    shard = lik_ops.Index(made, cu_seqlens[begin : end + 1])
    mine = {"Q": Q if rank == 0 else None, "device": device}
    weight = torch.rand(3, 4, device=device)
    for k in (3, 100):
        expected = lik_ops.retrieve(Q, index, k)
        assert same(distributed.retrieve(Q, index, k), expected)
        assert same(distributed.retrieve(corpus=shard, top_k=k, sharded=True, **mine), expected)
        assert same(distributed.retrieve(Q, dense, k, q_weight=weight), lik_ops.retrieve(Q, dense, k, q_weight=weight))
        whole = distributed.retrieve(Q, shard, k, sharded=True, n_candidates=40)
        assert same(whole, expected)
        for stages in ({"n_probe": 1}, {"n_probe": 2, "n_candidates": 5}):
            each = [lik_ops.retrieve(Q, dense[a:b], k, **stages) for a, b in pairwise(ends)]
            scores = torch.cat([x[0] for x in each], 1)
            indices = torch.cat([x[1].where(x[1] < 0, x[1] + n) for x, n in zip(each, ends, strict=False)], 1)
            order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
            found = distributed.retrieve(Q, dense[begin:end], k, sharded=True, **stages)
            assert same(found, (scores.gather(1, order), indices.gather(1, order)))
            assert same(distributed.retrieve(Q[0], dense, k, **stages), (found[0][0], found[1][0]))
    wrong = rank == world - 1
    error, other = TypeError if wrong else ValueError, ValueError
    expect(error, "n_probe: expected an int", lambda: distributed.retrieve(Q, index, 3, n_probe="2" if wrong else 2))
    expect(other, "n_probe: expected the same", lambda: distributed.retrieve(Q, index, 3, n_probe=3 if wrong else 2))
    small = lik_ops.quantize(tokens.view(40, 5, 8))
    given = small if wrong else dense
    expect(other, "D: expected residual codes", lambda: distributed.retrieve(Q, given, 3, n_probe=2))
    given = tokens.view(40, 5, 8) if wrong else dense
    expect(other, "unless corpus is residual codes", lambda: distributed.retrieve(Q, given, 3, n_candidates=2))


def check_subset(device: str, directory: Path) -> None:
    """Check searches of a subset, for all queries and for each query, complete or sharded, of every kind of corpus."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    Q, each, cu_seqlens = torch.randint(-2, 3, (3, 4, 8)).float(), *packed(torch.float32, 41, 8)
    tokens, path = torch.cat(each), directory / "subset"
    if rank == 0:
        corpus = lik_ops.Corpus.create(path, 8, torch.float32)
        for begin in range(0, 41, 9):
            corpus.append(each[begin : begin + 9])
    dist.barrier()
    made = lik_ops.quantize(tokens, CODEC, cu_seqlens_d=cu_seqlens)
    given: dict = {"cu_seqlens_d": cu_seqlens}
    on_device: dict = {"cu_seqlens_d": cu_seqlens.to(device)}
    masks = torch.rand(3, 41) > 0.7
    masks[1], masks[2, 3:] = False, False
    listed = torch.where(masks, torch.arange(41), -1).flip(1)
    ends = [41 * n // world for n in range(world + 1)]
    begin, end = ends[rank : rank + 2]
    shard = lik_ops.Corpus.create(directory / f"subset-{rank}", 8, torch.float32)
    shard.append(each[begin:end])
    mine = {"Q": Q.to(device) if rank == 0 else None, "device": device}
    one_each = torch.tensor([[0], [40], [20]])  # of different ranks
    none = torch.zeros(41, dtype=torch.bool)
    for subset in (masks[0], masks, listed[0], listed[:, ::2], [40, 3, -1, 3], none, one_each):
        for k in (1, 7, 100):
            expected = lik_ops.retrieve(Q.to(device), tokens.to(device), k, **on_device, subset=subset)
            kinds = ((lik_ops.Corpus.open(path), {}), (tokens, given), (tokens.to(device), on_device))
            for corpus, options in kinds:
                assert same(distributed.retrieve(Q.to(device), corpus, k, **options, subset=subset), expected)
                found = distributed.retrieve(corpus=corpus, top_k=k, **options, **mine, subset=subset)
                assert same(found, expected)
            with launched() if device == "cpu" else nullcontext():
                found = distributed.retrieve(Q.to(device), tokens.to(device), k, **on_device, subset=subset)
                assert same(found, expected)
            coded = lik_ops.retrieve(Q.to(device), made.to(device), k, **on_device, subset=subset)
            found = distributed.retrieve(Q.to(device), made.to(device), k, **on_device, subset=subset)
            assert same(found, coded)
    for k in (1, 7, 100):
        expected = lik_ops.retrieve(Q.to(device), tokens.to(device), k, **on_device, subset=masks)
        own = {"sharded": True, "subset": masks[:, begin:end]}
        assert same(distributed.retrieve(Q.to(device), shard, k, **own), expected)
        part = {"cu_seqlens_d": cu_seqlens[begin : end + 1].to(device), **own}
        assert same(distributed.retrieve(Q.to(device), tokens.to(device), k, **part), expected)
        codes = lik_ops.retrieve(Q.to(device), made.to(device), k, **on_device, subset=masks, n_candidates=100)
        assert same(distributed.retrieve(Q.to(device), made.to(device), k, **part, n_candidates=100), codes)
    wrong = rank == world - 1
    other = masks if wrong else masks[0]
    expect(ValueError, "subset: expected the same", lambda: distributed.retrieve(Q, tokens, 3, **given, subset=other))
    other = [41] if wrong else [40]
    error = "subset: expected indices of 41 documents, or -1, got 41"
    expect(ValueError, error, lambda: distributed.retrieve(Q, tokens, 3, **given, subset=other))


def check_argmax(device: str, directory: Path) -> None:
    """Check the argmax of a search, complete or sharded, of every kind of corpus."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    Q, each, cu_seqlens = torch.randint(-2, 3, (3, 4, 8)).to(device).float(), *packed(torch.float32, 41, 8)
    q_mask = torch.rand(3, 4, device=device) > 0.3
    tokens, ends = torch.cat(each).to(device), [0, *[41 * (n + 1) // world for n in range(world)]]
    begin, end = ends[rank : rank + 2]
    shard = lik_ops.Corpus.create(directory / f"argmax-{rank}", 8, torch.float32)
    shard.append(each[begin:end])
    bounds = cu_seqlens.to(device)
    made = lik_ops.quantize(tokens, "int8", cu_seqlens_d=bounds)
    for k, given in ((1, {}), (6, {"q_mask": q_mask, "normalize": True}), (100, {"subset": [40, 3, 7]})):
        expected = lik_ops.retrieve(Q, tokens, k, cu_seqlens_d=bounds, return_argmax=True, **given)
        options = {"return_argmax": True, **given}
        kinds = [((tokens,), {"cu_seqlens_d": bounds}), ((each,), {})]
        if "subset" not in given:
            kinds.append(((shard,), {"sharded": True}))
            kinds.append(((tokens,), {"sharded": True, "cu_seqlens_d": bounds[begin : end + 1]}))
        for corpus, more in kinds:
            found = distributed.retrieve(Q, *corpus, k, **more, **options)
            assert same(found, expected) and torch.equal(found[2], expected[2]), (k, more)
        one = {name: x[1] if name == "q_mask" else x for name, x in options.items()}
        found = distributed.retrieve(Q[1], tokens, k, cu_seqlens_d=bounds, **one)
        assert same(found, (expected[0][1], expected[1][1])) and torch.equal(found[2], expected[2][1])
    options = {"cu_seqlens_d": bounds, "return_argmax": True}
    expected = lik_ops.retrieve(Q, made, 6, **options)
    found = distributed.retrieve(Q if rank == 0 else None, made, 6, device=device, **options)
    assert same(found, expected) and torch.equal(found[2], expected[2])
    # A rank without documents takes part.
    mine = each[:5] if rank == 0 else []
    expected = lik_ops.retrieve(Q, each[:5], 3, return_argmax=True)
    found = distributed.retrieve(Q, mine, 3, sharded=True, return_argmax=True)
    assert same(found, expected) and torch.equal(found[2], expected[2])
    wrong = rank == world - 1
    call = lambda: distributed.retrieve(Q, tokens, 3, cu_seqlens_d=bounds, return_argmax=wrong)  # noqa: E731
    expect(ValueError, "return_argmax: expected the same", call)


def check_messages(device: str, directory: Path) -> None:
    """Check the messages of a call: two, or three with the queries, and objects only for errors."""
    rank = dist.get_rank()
    Q, D = torch.randn(2, 3, 8, device=device), torch.randn(50, 4, 8, device=device)
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    names = (gather, "all_gather", "all_gather_object", "broadcast", "all_reduce", "barrier")
    with counted(dist, *names) as calls:
        distributed.retrieve(Q, D, 5)
        assert calls == [gather] * 2, calls
        calls.clear()
        distributed.retrieve(Q if rank == 0 else None, D, 5, device=device)
        assert calls == [gather, "broadcast", gather], calls
        calls.clear()
        expect(ValueError, "top_k: expected the same", lambda: distributed.retrieve(Q, D, 4 if rank else 3))
        assert calls == [gather, "all_gather_object"], calls
        distributed.retrieve(Q, D, 5)
        calls.clear()
        with launched() if device == "cpu" else nullcontext(), counted(shards.ResidentTarget, "best", calls=calls):
            distributed.retrieve(Q, D, 5)
        # The search waits for no message, unless the first message needs the GPU too.
        assert calls == (["best", gather, gather] if is_host_group(None) else [gather, "best", gather]), calls


def check_inbatch(device: str, directory: Path) -> None:
    """Check that scores and gradients equal those from one process with all queries and documents."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for masked, weighted, recompute, backward, normalize in (
            (False, False, True, "auto", False),
            (True, True, False, "lowmem", True),
            (True, False, True, "unified", True),
        ):
            torch.manual_seed(1)
            # Ranks differ in size, one has no document, and only odd ranks have a mask.
            sizes = [(2 + r, r % 3 + (r > 0), 4 + r, 5 + 2 * r) for r in range(world)]
            queries = [torch.randn(q, lq, 8).to(device, dtype) for q, _, lq, _ in sizes]
            documents = [torch.randn(n, ld, 8).to(device, dtype) for _, n, _, ld in sizes]
            weight_dtype = torch.promote_types(dtype, torch.float32)
            weights = [torch.rand(q, lq).to(device, weight_dtype) for q, _, lq, _ in sizes]
            q_masks = [(torch.rand(x.shape[:2]) > 0.2).to(device) for x in queries]
            d_masks = [(torch.rand(x.shape[:2]) > 0.3).to(device) if r % 2 else None for r, x in enumerate(documents)]
            if not masked:
                d_masks = [None] * world
            for x in (*queries, *documents, *weights):
                x.requires_grad_()

            expected = []
            for q, q_mask, weight in zip(queries, q_masks, weights, strict=True):
                options = {"q_weight": weight if weighted else None, "normalize": normalize}
                each = [lik_ops.maxsim(q, x, q_mask, m, **options) for x, m in zip(documents, d_masks, strict=True)]
                expected.append(torch.cat(each, dim=1))
            upstream = [torch.randn(s.shape, generator=torch.Generator().manual_seed(7)).to(s) for s in expected]
            kept = [torch.where(s.isfinite(), s, 0) for s in expected]
            sum((s * g).sum() for s, g in zip(kept, upstream, strict=True)).backward()  # type: ignore[union-attr]
            mine = [t.detach().clone().requires_grad_() for t in (queries[rank], documents[rank], weights[rank])]
            scores = distributed.maxsim_inbatch(
                mine[0],
                mine[1],
                q_masks[rank],
                d_masks[rank],
                q_weight=mine[2] if weighted else None,
                normalize=normalize,
                backward=backward,
                recompute=recompute,
            )
            assert torch.equal(scores, expected[rank].detach())
            (torch.where(scores.isfinite(), scores, 0) * upstream[rank]).sum().backward()
            tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
            for x, all_x in zip(mine[: 2 + weighted], (queries, documents, weights), strict=False):
                assert x.grad is not None and x.grad.dtype == x.dtype
                wanted = all_x[rank].grad
                assert wanted is not None
                torch.testing.assert_close(x.grad, wanted, rtol=tolerance, atol=tolerance)
    check_frozen(device)
    check_group_of_one(device)
    check_memory(device)


def check_group_of_one(device: str) -> None:
    """Check a group of one process."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    Q, D = (torch.randn(n, 4, 8, device=device, requires_grad=True) for n in (2, 3))
    scores = distributed.maxsim_inbatch(Q, D, group=groups[dist.get_rank()])
    expected = lik_ops.maxsim(Q, D)
    assert torch.equal(scores, expected)
    for found, wanted in zip(*(torch.autograd.grad(s.square().sum(), (Q, D)) for s in (scores, expected)), strict=True):
        torch.testing.assert_close(found, wanted)


def check_memory(device: str) -> None:
    """Check that a process holds one block in addition to the scored one, and as many gradients, for any world size."""
    received: list[weakref.ref] = []
    most, shift = [0], _ring.ProcessRing.shift

    def watched(ring, sent, shapes):
        most[0] = max(most[0], sum(x() is not None for x in received))
        coming = shift(ring, sent, shapes)
        received.extend(weakref.ref(x) for x in coming.received)
        return coming

    Q, D = (torch.randn(n, 4, 8, device=device, requires_grad=True) for n in (2, 3))
    _ring.ProcessRing.shift = watched
    try:
        distributed.maxsim_inbatch(Q, D).sum().backward()
    finally:
        _ring.ProcessRing.shift = shift
    world = dist.get_world_size()
    assert len(received) == 3 * world - 2
    assert most[0] <= 3, most


def check_frozen(device: str) -> None:
    """Check frozen queries or documents. Without needed gradients, none are computed and nothing waits for them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    for of_queries, of_documents in ((True, False), (False, True), (False, False)):
        Q = torch.randn(2, 3, 8, device=device, requires_grad=of_queries)
        D = torch.randn(3, 4, 8, device=device, requires_grad=of_documents)
        scores = distributed.maxsim_inbatch(Q, D)
        assert scores.shape == (2, 3 * world) and scores.requires_grad == (of_queries or of_documents)
        if scores.requires_grad:
            scores.sum().backward()
        assert (Q.grad is not None, D.grad is not None) == (of_queries, of_documents)


def check_errors(device: str, directory: Path) -> None:
    """Check that an error of one rank raises on all ranks, and that the group remains usable."""
    rank = dist.get_rank()
    Q, D = torch.randn(2, 3, 8, device=device), torch.randn(5, 4, 8, device=device)
    retrieve, inbatch = distributed.retrieve, distributed.maxsim_inbatch
    mine = rank == 1
    expect(ValueError, "documents: expected the same on all ranks", lambda: retrieve(Q, D[:4] if mine else D, 3))
    expect(ValueError, "top_k: expected the same on all ranks", lambda: retrieve(Q, D, 4 if mine else 3))
    expect(ValueError, "Q: expected the same on all ranks", lambda: retrieve(Q[:1] if mine else Q, D, 3))
    expect(ValueError, "Q: expected it on rank 0 alone", lambda: retrieve(Q if mine else None, D, 3))
    wrong = TypeError if mine else ValueError
    expect(wrong, "top_k: expected an int, got str", lambda: retrieve(Q, D, "3" if mine else 3))
    # Messages to other ranks must not depend on the value of a wrong argument.
    expect(wrong, "top_k: expected an int, got generator", lambda: retrieve(Q, D, (x for x in ()) if mine else 3))
    array = torch.ones(3, device=device)
    expect(
        wrong, "normalize: expected a bool, got a tensor", lambda: retrieve(Q, D, 3, normalize=array if mine else False)
    )
    expect(ValueError, "Q: expected values, got a tensor on", lambda: retrieve(Q.to("meta") if mine else Q, D, 3))
    # The search itself would only find these errors in kernel arguments while the other ranks wait for its results.
    expect(wrong, "D: expected the dtype of Q", lambda: retrieve(Q, D.half() if mine else D, 3))
    expect(ValueError, "D: expected d = 8", lambda: retrieve(Q, D[..., :4] if mine else D, 3))
    expect(ValueError, "q_mask: expected shape", lambda: retrieve(Q, D, 3, q_mask=Q[:, :2, 0] > 0 if mine else None))
    for name in ("normalize", "sharded", "progress"):
        expect(
            wrong, f"{name}: expected a bool, got str", lambda n=name: retrieve(Q, D, 3, **{n: "no"} if mine else {})
        )
    expect(wrong, "convert the queries, Q.to(torch.float16)", lambda: retrieve(Q, D.half() if mine else D, 3))
    expect(wrong, "normalize: expected a bool", lambda: inbatch(Q, D, normalize=1 if mine else False))
    expect(wrong, "recompute: expected a bool", lambda: inbatch(Q, D, recompute="no" if mine else True))
    if device == "cpu":
        for given, error, said in (
            ("foo", ValueError, "device: expected a device of this torch, got 'foo'"),
            ("meta", ValueError, "device: expected one with values, got meta"),
            (3.5, wrong, "device: expected a torch.device or its name, got float"),
        ):
            at = given if mine else None
            expect(error, said, lambda at=at: retrieve(None if mine else Q, D, 3, device=at))
    if mine:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(Q, Q)
            expect(NotImplementedError, "no derivatives", lambda: retrieve(dual, D, 3))
    else:
        expect(ValueError, "no derivatives", lambda: retrieve(Q, D, 3))
    one, same_D = torch.ones_like(Q), torch.arange(32.0, device=device).view(4, 8)  # the same on all ranks
    nested = torch.nested.nested_tensor([same_D, same_D[:2]], layout=torch.jagged)
    assert same(retrieve(one, nested, 2), lik_ops.retrieve(one, nested, 2))
    expect(ValueError, "d_mask: expected shape", lambda: retrieve(Q, D, 3, d_mask=D[:2, :, 0] > 0 if mine else None))
    loss = distributed.maxsim_cross_entropy
    both = "function: expected the same on all ranks, got ['distributed."
    expect(ValueError, both, lambda: inbatch(Q, D) if mine else retrieve(Q, D, 3))
    expect(ValueError, both, lambda: loss(Q, D) if mine else inbatch(Q, D))
    expect(ValueError, both, lambda: retrieve(Q, D, "3") if mine else loss(Q, D))
    if dist.get_world_size() > 2:
        alone = Q if rank == 0 else None
        for odd, said in ((D[..., :4], "d: expected the same on all ranks, got [8, None, 4"), (D.half(), "dtype: ")):
            corpus = [] if mine else odd if rank == 2 else D
            expect(ValueError, said, lambda corpus=corpus: retrieve(alone, corpus, 3, sharded=True, device=device))
    expect(ValueError, "sharded: expected the same on all ranks", lambda: retrieve(Q, D, 3, sharded=mine))
    expect(ValueError, "dtype: expected the same", lambda: retrieve(*((x.half() if mine else x) for x in (Q, D)), 3))
    expect(ValueError, "q_mask: expected the same", lambda: retrieve(Q, D, 3, q_mask=Q[..., 0] > 0 if mine else None))
    offsets = torch.tensor([0, 18, 18, 18, 18, 20] if mine else [0, 1, 2, 3, 4, 20])  # as many, split elsewhere
    expect(ValueError, "corpus: expected the same", lambda: retrieve(Q, D.flatten(0, 1).cpu(), 3, cu_seqlens_d=offsets))
    if device == "cpu":
        expect(wrong, "D: expected a Tensor, a list of Tensors", lambda: retrieve(Q, "D" if mine else D, 3))
    expect(wrong, "D: expected the dtype of Q", lambda: inbatch(Q, D.half() if mine else D))
    expect(
        ValueError,
        "dtype: expected the same on all ranks",
        lambda: inbatch(*((x.half() if mine else x) for x in (Q, D))),
    )
    expect(ValueError, "Q, D: expected [Nq, Lq, d]", lambda: inbatch(Q, D[0] if mine else D))
    grads = "requires_grad of D: expected the same on all ranks"
    expect(ValueError, grads, lambda: inbatch(Q, D.clone().requires_grad_() if mine else D))
    assert inbatch(Q, D).shape == (2, 5 * dist.get_world_size())


def check_while_ranks_agree(device: str, directory: Path) -> None:
    """Repeat checks with searches that start before the ranks agree, which on a CPU simulates a GPU."""
    with launched() if device == "cpu" else nullcontext():
        check_errors(device, directory)
        check_search_during_agreement(device, directory)
        check_sharded(device, directory / "launched")
        check_failed_launch(device)


def check_failed_launch(device: str) -> None:
    """Check that a search failing at launch raises on all ranks, if the first message comes after it."""
    Q, D = torch.randn(2, 3, 8, device=device), torch.randn(50, 4, 8, device=device)
    expected = distributed.retrieve(Q, D, 5)
    if not is_host_group(None):
        return
    mine, best = dist.get_rank() == 1, shards.ResidentTarget.best

    def full(*args):
        raise MemoryError("no memory left")

    shards.ResidentTarget.best = full if mine else best
    try:
        error = MemoryError if mine else ValueError
        expect(error, "no memory left", lambda: distributed.retrieve(Q, D, 5))
    finally:
        shards.ResidentTarget.best = best
    assert same(distributed.retrieve(Q, D, 5), expected)


CHECKS = {
    "retrieve": check_retrieve,
    "sharded": check_sharded,
    "coded": check_residual_codes,
    "subset": check_subset,
    "argmax": check_argmax,
    "messages": check_messages,
    "inbatch": check_inbatch,
    "loss": check_loss,
    "errors": check_errors,
    "launched": check_while_ranks_agree,
}


def check_all(backend: str, directory: Path) -> None:
    """Run all checks in one process of a group."""
    device = "cpu"
    if "nccl" in backend:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = "cuda"
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        for name, check in CHECKS.items():
            check(device, directory)
            dist.barrier()
            print(f"{name} {dist.get_rank()} of {dist.get_world_size()} agrees", flush=True)
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Run ``backend directory [processes ...]`` as one process of torchrun, or in groups of these sizes."""
    backend, directory, *groups = sys.argv[1:]
    torch.set_num_threads(1)
    if not groups:
        check_all(backend, Path(directory))
    else:
        forked.import_now("torch._dynamo", "torch._decomp.decompositions_for_jvp")
    for processes in groups:
        path = Path(directory) / processes
        path.mkdir()
        forked.run(int(processes), lambda path=path: check_all(backend, path))
    # Skip the interpreter's shutdown, in which a gloo thread that releases a tensor would request the GIL and abort.
    os._exit(0)


if __name__ == "__main__":
    main()
