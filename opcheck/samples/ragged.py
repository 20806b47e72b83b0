"""Sample inputs and references of the packed operators; the references compute one cell at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import lik_ops
from lik_ops.core.segments import PackedArgs
from lik_ops.opcheck.samples.gradients import compute_gradients

LENGTHS = {  # lengths of queries, lengths of documents, features
    "small": ((3, 1, 4), (5, 2, 7, 1), 8),
    "empty": ((0, 5, 0), (0, 33, 0, 4), 17),
    "giant": ((2, 70), (1, 300, 2), 12),
    "no_queries": ((), (3, 2), 8),
    "no_documents": ((2, 3), (), 8),
    "no_tokens": ((0, 0), (0, 0, 0), 8),
}
KINDS = ("cross", "candidates", "pairs")
Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def make_arguments(
    q_lengths: tuple[int, ...], d_lengths: tuple[int, ...], d: int, kind: str, options: bool, dtype, device: str
) -> Arguments:
    """Return the tensors of a call, in the operator's order; masks and weights only with options."""
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    Q, D = normal(sum(q_lengths), d).to(device, dtype), normal(sum(d_lengths), d).to(device, dtype)
    index = torch.int32 if options else torch.int64
    cu_q = torch.tensor([0, *q_lengths]).cumsum(0)
    lengths = torch.tensor(d_lengths, dtype=torch.int64)
    offsets, pairs = lengths.cumsum(0) - lengths, None
    Nq, Nd = len(q_lengths), len(d_lengths)
    if kind == "candidates":
        chosen = torch.randint(0, max(Nd, 1), (Nq, 5 if Nd else 0), generator=generator)
        offsets, lengths = offsets[chosen], lengths[chosen]
    if kind == "pairs":
        n = 7 if Nq and Nd else 0
        pairs = torch.stack([torch.randint(0, max(N, 1), (n,), generator=generator) for N in (Nq, Nd)], 1)
        pairs = pairs.to(device, index)
    cu_q, offsets, lengths = (x.to(device, index) for x in (cu_q, offsets, lengths))
    if not options:
        return Q, D, cu_q, offsets, lengths, pairs, None, None, None
    q_mask, d_mask = (torch.rand(x.shape[0], generator=generator).to(device) > 0.3 for x in (Q, D))
    weight = normal(Q.shape[0]).to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    return Q, D, cu_q, offsets, lengths, pairs, q_mask, d_mask, weight


def _make_bounds_samples(dtype: torch.dtype, device: str) -> Iterator[tuple[str, tuple]]:
    """Yield samples without some of the offsets and lengths: dense tokens, or the bounds of documents."""
    for name, (q_dense, d_form), kind in (
        ("dense queries", (True, "lengths"), "candidates"),
        ("bounds", (False, "bounds"), "cross"),
        ("dense queries and bounds", (True, "bounds"), "pairs"),
        ("dense documents", (False, "dense"), "cross"),
        ("dense", (True, "dense"), "pairs"),
    ):
        args = list(make_arguments((4, 4, 4), (5, 5), 8, kind, True, dtype, device))
        if q_dense:
            args[2] = None
            args[0], args[6], args[8] = (args[i].unflatten(0, (3, 4)) for i in (0, 6, 8))  # type: ignore[union-attr]
        if d_form == "bounds":
            args[3], args[4] = torch.tensor([0, 5, 10], dtype=torch.int32, device=device), None
        if d_form == "dense":
            args[3] = args[4] = None
            args[1], args[7] = (args[i].unflatten(0, (2, 5)) for i in (1, 7))  # type: ignore[union-attr]
        for t in (args[0], args[1], args[8]):
            t.requires_grad_()  # type: ignore[union-attr]
        yield f"{name}-{kind}-{dtype}", (*args, True, torch.int32, 4, "auto")


def forward_samples(dtype: torch.dtype, device: str) -> Iterator[tuple[str, tuple]]:
    """Yield the samples of the forward."""
    yield from _make_bounds_samples(dtype, device)
    for name, (q_lengths, d_lengths, d) in LENGTHS.items():
        longest = max((0, *q_lengths))
        for kind in KINDS:
            for options, grad, argmax_dtype in (
                (False, False, None),
                (True, True, torch.int16),
                (False, True, torch.int32),
                (True, True, None),
            ):
                args = make_arguments(q_lengths, d_lengths, d, kind, options, dtype, device)
                for t in (args[0], args[1], args[8]):
                    if t is not None:
                        t.requires_grad_(grad)
                label = f"{name}-{kind}-{'options-' * options}{'grad-' * grad}{argmax_dtype}-{dtype}"
                yield label, (*args, options, argmax_dtype, longest, "auto")


def backward_samples(dtype: torch.dtype, device: str) -> Iterator[tuple[str, tuple]]:
    """Yield the samples of the backward."""
    for label, args in forward_samples(dtype, device):
        if args[10] is None:
            continue
        tensors = [t.detach() if isinstance(t, Tensor) else t for t in args[:9]]
        options = args[9]
        scores, argmax = torch.ops.lik.maxsim_ragged_fwd(*tensors, *args[9:])
        upstream = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1)).to(scores)
        needs = [True, True, True] if options else [False, True, False]
        yield label, (upstream, *tensors, argmax, options, not options, needs)


def _iterate_cells(cu_q, offsets, lengths, pairs) -> Iterator[tuple[tuple[int, ...], int, slice, slice]]:
    """Yield the index of each score, the row of its argmax, and the rows of its query and document."""
    cu_q, offsets, lengths = (x.tolist() for x in (cu_q, offsets, lengths))

    def rows(i: int, at: int, length: int) -> tuple[slice, slice]:
        return slice(cu_q[i], cu_q[i + 1]), slice(at, at + length)

    if pairs is not None:
        for p, (i, j) in enumerate(pairs.tolist()):
            yield (p,), p, *rows(i, offsets[j], lengths[j])
        return
    for i in range(len(cu_q) - 1):
        own = (offsets[i], lengths[i]) if offsets and isinstance(offsets[0], list) else (offsets, lengths)
        for k, (at, length) in enumerate(zip(*own, strict=True)):
            yield (i, k), k, *rows(i, at, length)


def forward_reference(
    Q, D, cu_q, offsets, lengths, pairs, q_mask, d_mask, q_weight, normalize, argmax_dtype, max_seqlen_q, backward
) -> tuple:
    """Return the expected scores and argmax."""
    tensors = Q, D, cu_q, offsets, lengths, pairs, q_mask, d_mask, q_weight
    r = PackedArgs.from_tensors(tensors, max_seqlen_q).ragged()
    Q, D, cu_q, offsets, lengths, pairs, q_mask, d_mask, q_weight = r
    shape = (cu_q.shape[0] - 1, offsets.shape[-1]) if pairs is None else (pairs.shape[0],)
    width = Q.shape[0] if pairs is None else max_seqlen_q
    scores = torch.zeros(shape, dtype=torch.float64, device=Q.device) + 0 * (Q.sum() + D.sum())
    argmax = torch.full((shape[-1], width), -1, device=Q.device)
    for index, row, q, x in _iterate_cells(cu_q, offsets, lengths, pairs):
        masks = (None if mask is None else mask[part] for mask, part in ((q_mask, q), (d_mask, x)))
        weight = None if q_weight is None else q_weight[q]
        score, argmax_found = lik_ops.reference.maxsim_with_argmax(
            Q[q], D[x], *masks, q_weight=weight, normalize=normalize
        )
        scores = scores.index_put(tuple(torch.tensor(n, device=Q.device) for n in index), score)
        first = q.start if pairs is None else 0
        argmax[row, first : first + argmax_found.shape[0]] = argmax_found
    return scores, None if argmax_dtype is None else argmax


def backward_reference(
    grad_scores, Q, D, cu_q, offsets, lengths, pairs, q_mask, d_mask, q_weight, argmax, normalize, unified, needs
) -> tuple:
    """Return the expected gradients."""

    def scores(Q, D, weight):
        options = q_mask, d_mask, weight, normalize, None, argmax.shape[1], "auto"
        return forward_reference(Q, D, cu_q, offsets, lengths, pairs, *options)[0]

    return compute_gradients(scores, grad_scores, (Q, D, q_weight), needs)


def sized_forward(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    """Return arguments of the forward for given sizes."""
    Nq, K, Lq, Ld = sizes
    documents = Nq * K if candidates else K
    kind = "candidates" if candidates else "cross"
    args = make_arguments((Lq,) * Nq, (Ld,) * documents, 8, kind, True, torch.float32, device)
    if candidates:
        starts = torch.arange(Nq * K, device=device, dtype=torch.int32).view(Nq, K) * Ld
        args = (*args[:3], starts, torch.full_like(starts, Ld), *args[5:])
    return *args, True, torch.int32, 1024, "auto"


def sized_backward(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    """Return arguments of the backward for given sizes."""
    args = sized_forward(sizes, candidates, device)
    scores, argmax = torch.ops.lik.maxsim_ragged_fwd(*args)
    return torch.ones_like(scores), *args[:9], argmax, True, False, [True, True, True]
