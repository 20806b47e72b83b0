"""Write the bits of scores, argmax, and gradients of every layout to a file, or compare them with a file.

python -m tests.record_bits before.json
python -m tests.record_bits --compare before.json
python -m tests.record_bits --device cuda --grid medium before.json
TRITON_INTERPRET=1 LIK_OPS_BACKEND=triton python -m tests.record_bits --grid small before.json
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lik_ops

# Lq, Ld, d of dense calls, with queries and documents of each size.
SHAPES = ((1, 1, 1), (32, 45, 24), (7, 130, 64), (33, 16, 128), (150, 70, 40), (5, 3, 320))
COUNTS = ((1, 9), (3, 4), (17, 2))
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Whether products tie, dtypes, shapes, and counts. The medium grid has few kernels to compile for a GPU, and shapes
# that the sm_90 kernels serve. The small grid is for Triton's interpreter, whose bf16 products are wrong.
GRIDS = {
    "full": ((False, True), DTYPES, SHAPES, COUNTS),
    "medium": ((False, True), DTYPES[:3:2], (SHAPES[2], SHAPES[4]), COUNTS[1:2]),
    "small": ((False,), DTYPES[:2], ((3, 20, 16),), ((2, 2),)),
}


def digest(*tensors: Tensor | None) -> str:
    found = hashlib.sha256()
    for t in tensors:
        if t is not None:
            t = t.detach().cpu().contiguous()
            found.update(f"{list(t.shape)} {t.dtype}".encode())
            found.update(t.view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"")
    return found.hexdigest()[:16]


def draw(g: torch.Generator, *shape: int, dtype: torch.dtype, device: str, ties: bool) -> Tensor:
    x = torch.randint(-2, 3, shape, generator=g).float() if ties else torch.randn(shape, generator=g)
    return x.to(device, dtype).requires_grad_()


def bounds(g: torch.Generator, count: int, most: int, device: str) -> Tensor:
    lengths = torch.randint(0, most + 1, (count,), generator=g)
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device)


def dense_calls(g: torch.Generator, shape: tuple, counts: tuple, options: dict[str, Any]) -> Iterator:
    """Yield names and calls of the dense layouts. Each call returns leaves, scores, and argmax."""
    (Lq, Ld, d), (Nq, Nd) = shape, counts
    dtype, device = options["dtype"], options["device"]
    weights = torch.float64 if dtype == torch.float64 else torch.float32
    for masked, normalize, candidates in itertools.product((False, True), (False, True), (False, True)):
        Q = draw(g, Nq, Lq, d, **options)
        D = draw(g, *((Nq,) if candidates else ()), Nd, Ld, d, **options)
        q_mask = d_mask = q_weight = None
        if masked:
            q_mask = (torch.rand(Nq, Lq, generator=g) < 0.8).to(device)
            d_mask = (torch.rand(D.shape[:-1], generator=g) < 0.7).to(device)
            q_weight = torch.rand(Nq, Lq, generator=g).to(device, weights).requires_grad_()
        name = f"{'candidates' if candidates else 'cross'}{' masked' * masked}{' normalize' * normalize}"
        masks = {"q_mask": q_mask, "d_mask": d_mask, "q_weight": q_weight, "normalize": normalize}
        leaves = [x for x in (Q, D, q_weight) if x is not None]
        for backward, recompute in (("lowmem", False), ("unified", False), ("lowmem", True)):
            yield (
                f"{name} {backward}{' recompute' * recompute}",
                leaves,
                lambda Q=Q, D=D, o=masks, b=backward, r=recompute: (
                    lik_ops.maxsim(Q, D, **o, backward=b, recompute=r),
                    None,
                ),
            )
        yield f"{name} winners", leaves, lambda Q=Q, D=D, o=masks: lik_ops.maxsim_with_argmax(Q, D, **o)


def ragged_calls(g: torch.Generator, shape: tuple, counts: tuple, options: dict[str, Any]) -> Iterator:
    (Lq, Ld, d), (Nq, Nd) = shape, counts
    dtype, device = options["dtype"], options["device"]
    cu_q, cu_d = bounds(g, Nq, Lq, device), bounds(g, Nd, Ld, device)
    Q, D = draw(g, int(cu_q[-1]), d, **options), draw(g, int(cu_d[-1]), d, **options)
    chosen = torch.randint(0, Nd, (Nq, 3), generator=g).to(device)
    offsets, lengths = cu_d[chosen], cu_d.diff()[chosen]
    pairs = torch.stack([torch.randint(0, n, (11,), generator=g) for n in (Nq, Nd)], 1).to(device)
    P, C = draw(g, Nq, Lq, d, **options), draw(g, Nq, 2, Ld, d, **options)
    n_q = torch.randint(0, Lq + 1, (Nq,), generator=g).to(device)
    n_d = torch.randint(0, Ld + 1, (Nq, 2), generator=g).to(device)
    weights = torch.float64 if dtype == torch.float64 else torch.float32
    q_weight = torch.rand(Q.shape[0], generator=g).to(device, weights).requires_grad_()
    q_mask = (torch.rand(Q.shape[0], generator=g) < 0.8).to(device)
    d_mask = (torch.rand(D.shape[0], generator=g) < 0.7).to(device)
    for weight, normalize in itertools.product((None, q_weight), (False, True)):
        leaves = [Q, D] if weight is None else [Q, D, weight]
        o: dict[str, Any] = {"normalize": normalize, "q_weight": weight}
        name = f"{' weighted' * (weight is not None)}{' normalize' * normalize}"
        for backward in ("lowmem", "unified"):
            yield (
                f"varlen{name} {backward}",
                leaves,
                lambda o=o, b=backward: (lik_ops.maxsim_varlen(Q, D, cu_q, cu_d, **o, backward=b), None),
            )
        yield f"varlen{name} winners", leaves, lambda o=o: lik_ops.maxsim_varlen_with_argmax(Q, D, cu_q, cu_d, **o)
        yield (
            f"listed{name}",
            leaves,
            lambda o=o: lik_ops.maxsim_candidates_varlen_with_argmax(Q, D, offsets, lengths, cu_seqlens_q=cu_q, **o),
        )
        masks = {"q_mask": q_mask, "d_mask": d_mask} if weight is not None else {}
        cuts = {"cu_seqlens_q": cu_q, "cu_seqlens_d": cu_d, "max_seqlen_q": Lq}
        yield (
            f"pairs{name}",
            leaves,
            lambda o={**o, **masks, **cuts}: lik_ops.maxsim_pair_list_with_argmax(Q, D, pairs, **o),
        )
    for where in ((cu_d[:-1], cu_d.diff()), (offsets, lengths)):
        tensors = Q, D, cu_q, *where, None, q_mask, d_mask, q_weight
        yield (
            f"operator {where[0].dim()}",
            [Q, D, q_weight],
            lambda t=tensors: torch.ops.lik.maxsim_ragged_fwd(*t, False, torch.int32, Lq, "lowmem"),
        )
    for normalize in (False, True):
        yield (
            f"padded{' normalize' * normalize}",
            [P, C],
            lambda n=normalize: lik_ops.maxsim_padded_with_argmax(P, C, n_q, n_d, normalize=n),
        )


def summarize(x: Tensor) -> tuple[float, float]:
    """Return the norm of a tensor, and its inner product with random numbers, in fp64."""
    r = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x.detach().cpu().double()
    return x.norm().item(), (x * r).sum().item()


def alike(a: Any, b: Any) -> bool:
    """Return whether two records of a call have the same bits, and summaries that rounding explains."""
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    pairs = zip(a["gradients"], b["gradients"], strict=True)
    near = all(math.isclose(n, m, rel_tol=1e-3) and abs(p - q) <= 1e-3 * n for (n, p), (m, q) in pairs)
    return a["results"] == b["results"] and near


def scored(call: Callable, leaves: list[Tensor], g: torch.Generator, skip_unserved: bool, atomic: bool) -> Any:
    """Return a digest of results and gradients, or None for a call that ``LIK_OPS_KERNEL`` cannot serve.

    Gradients with atomic additions have other bits each time, so `atomic` calls have a summary of their gradients.
    """

    def check_skipped(error: ValueError) -> None:
        if not (skip_unserved and "cannot serve this call" in str(error)):
            raise error

    try:
        scores, argmax = call()
    except ValueError as error:
        check_skipped(error)
        with lik_ops.use_backend("portable"):  # draws the same numbers as a call that is served
            torch.randn(call()[0].shape, generator=g)
        return None
    upstream = torch.randn(scores.shape, generator=g).to(scores)
    try:
        gradients = torch.autograd.grad(scores, leaves, upstream)
    except ValueError as error:  # the backward computes the argmax again
        check_skipped(error)
        return None
    if atomic:
        return {"results": digest(scores, argmax), "gradients": [summarize(x) for x in gradients]}
    return digest(scores, argmax, *gradients)


def records(device: str, grid: str, skip_unserved: bool = False, part: tuple[int, int] = (0, 1)) -> Iterator:
    """Yield names of calls, and a digest of their results and gradients.

    ``part`` is ``(k, n)`` for every n-th combination of the grid, beginning with combination k.
    """
    k, n = part
    for ties, dtype, shape, counts in list(itertools.product(*GRIDS[grid]))[k::n]:
        g = torch.Generator().manual_seed(sum(shape) + sum(counts))
        for calls in (dense_calls, ragged_calls):
            for name, leaves, call in calls(g, shape, counts, {"dtype": dtype, "device": device, "ties": ties}):
                atomic = device != "cpu" and "unified" in name
                found = scored(call, leaves, g, skip_unserved, atomic)
                if found is not None:
                    yield f"{dtype} {shape} {counts} {'ties ' * ties}{name}", found
        if skip_unserved:
            continue
        Q, D = (
            torch.randn(n, L, shape[2], generator=g).to(device, dtype) for n, L in zip((2, 90), shape, strict=False)
        )
        yield f"{dtype} {shape} {counts} {ties} retrieve", digest(*lik_ops.retrieve(Q, D, 5, chunk=32))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compare", action="store_true", help="with the file, instead of writing it")
    parser.add_argument("--grid", choices=GRIDS, default="full", help="the calls to record")
    parser.add_argument("--skip-unserved", action="store_true", help="skip calls that LIK_OPS_KERNEL cannot serve")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("K", "N"), help="part K of N of the grid")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = dict(records(arguments.device, arguments.grid, arguments.skip_unserved, tuple(arguments.part)))
    if not arguments.compare:
        arguments.file.write_text(json.dumps(found, indent=1))
        print(f"{len(found)} digests, backend {os.environ.get('LIK_OPS_BACKEND', 'auto')}")
        return 0
    before = json.loads(arguments.file.read_text())
    found = json.loads(json.dumps(found))
    changed = [name for name in before.keys() | found.keys() if not alike(before.get(name, ""), found.get(name, ""))]
    print("\n".join(sorted(changed)[:40]))
    print(f"{len(changed)} of {len(before)} digests differ")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
