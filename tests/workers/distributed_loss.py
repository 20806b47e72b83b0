"""Check the contrastive loss of several processes on each of them, for `tests/workers/distributed_retrieve.py`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import lik_ops
from lik_ops import distributed

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def expect(error: type[Exception], message: str, call) -> None:
    """Assert that a call raises an error that contains `message`."""
    try:
        call()
    except error as e:
        assert message in str(e), e
    else:
        raise AssertionError(f"expected {error.__name__}: {message}")


class _Part(NamedTuple):
    """Tensors of one rank."""

    Q: Tensor
    D: Tensor
    q_mask: Tensor
    d_mask: Tensor | None
    q_weight: Tensor
    labels: Tensor
    tau: Tensor

    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.Q, self.D, self.q_weight, self.tau

    def detached(self) -> _Part:
        Q, D, w, tau = (t.detach().clone().requires_grad_() for t in self.leaves())
        return self._replace(Q=Q, D=D, q_weight=w, tau=tau)


def _parts(world: int, device: str, dtype: torch.dtype, masked: bool) -> list[_Part]:
    """Return the parts of ranks with different sizes, arbitrary labels, and masks only on odd ranks.

    The second rank has no document.
    """
    torch.manual_seed(1)
    sizes = [(2 + r, 0 if r == 1 else 2 + r, 4 + r, 5 + 2 * r) for r in range(world)]
    total, of_scores = sum(n for _, n, _, _ in sizes), torch.promote_types(dtype, torch.float32)
    found = []
    for r, (q, n, Lq, Ld) in enumerate(sizes):
        Q, D = (torch.randn(*shape, 8).to(device, dtype) for shape in ((q, Lq), (n, Ld)))
        q_mask, d_mask = torch.rand(q, Lq, device=device) > 0.2, torch.rand(n, Ld, device=device) > 0.3
        labels = torch.randint(0, total, (q,), dtype=(torch.int64, torch.int32)[r % 2])
        labels[0] = -1  # ignored
        if masked and n:
            d_mask[-1] = False  # this one scores -inf
        w, tau = torch.rand(q, Lq).to(device, of_scores), torch.tensor(0.5 + r, dtype=of_scores, device=device)
        mask = d_mask if masked and r != 1 else None
        part = _Part(Q, D, q_mask, mask, w, labels.to(device), tau)
        found.append(part.detached())
    return found


def _compute_expected_loss(parts: list[_Part], rank: int, learned: bool, **options) -> Tensor:
    """Return the loss of single-process scores, without NaN for queries whose documents all score -inf."""
    p, normalize = parts[rank], options.pop("normalize")
    each = [
        lik_ops.maxsim(p.Q, x.D, p.q_mask, x.d_mask, q_weight=p.q_weight, normalize=normalize)
        for x in parts
        if len(x.D)
    ]
    scores = torch.cat(each, 1)
    finite, tau = scores.isfinite(), p.tau if learned else 0.75
    logits = (torch.where(finite, scores, 0) / tau).masked_fill(~finite, -torch.inf)
    return F.cross_entropy(logits, p.labels.long(), ignore_index=-1, **options)


def _sum_finite_losses(loss: Tensor) -> Tensor:
    """Return the sum of the finite losses. A correct document without kept tokens has an infinite loss."""
    return torch.where(loss.isfinite(), loss, 0).sum()


def check_loss(device: str, directory: Path) -> None:
    """Check that losses and gradients equal those from one process with all queries and documents."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype, tolerance in TOLERANCE.items():
        for masked, learned, normalize, reduction in (
            (False, False, False, "mean"),
            (True, True, True, "none"),
            (False, True, False, "sum"),
        ):
            parts = _parts(world, device, dtype, masked)
            options = {"normalize": normalize, "reduction": reduction}
            expected = [_compute_expected_loss(parts, r, learned, **options) for r in range(world)]
            sum(_sum_finite_losses(x) for x in expected).backward()  # type: ignore[union-attr]
            p = parts[rank].detached()
            found = distributed.maxsim_cross_entropy(
                p.Q,
                p.D,
                p.labels,
                p.q_mask,
                p.d_mask,
                temperature=p.tau if learned else 0.75,
                q_weight=p.q_weight,
                ignore_index=-1,
                **options,
            )
            limits = {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(found.detach(), expected[rank].detach(), **limits)
            _sum_finite_losses(found).backward()
            for x, wanted in zip(p.leaves(), parts[rank].leaves(), strict=True):
                assert learned or x is not p.tau or x.grad is None
                if x.grad is not None:
                    assert wanted.grad is not None or not x.numel()
                    torch.testing.assert_close(
                        x.grad, torch.zeros_like(x) if wanted.grad is None else wanted.grad, **limits
                    )
    _check_labels(device)
    _check_saved_tensors(device)
    _check_frozen(device)
    _check_extremes(device)
    _check_second_derivatives(device)
    _check_errors(device)


def _draw_inputs(device: str, **fields) -> tuple[Tensor, Tensor]:
    torch.manual_seed(dist.get_rank())
    Q, D = (
        torch.randn(n, 4, 8, device=device, requires_grad=fields.get(name, True)) for n, name in ((2, "Q"), (3, "D"))
    )
    return Q, D


def _check_labels(device: str) -> None:
    """Check that document i of a rank is the default label of its query i, and that invalid labels give NaN."""
    rank, world = dist.get_rank(), dist.get_world_size()
    Q, D = _draw_inputs(device)
    labels = 3 * rank + torch.arange(2, device=device)
    found = distributed.maxsim_cross_entropy(Q, D, temperature=2)
    assert torch.equal(found, distributed.maxsim_cross_entropy(Q, D, labels, temperature=2))
    scores = distributed.maxsim_inbatch(Q, D)
    torch.testing.assert_close(found, F.cross_entropy(scores / 2, labels))
    # A label as far below the first document of a block as `ignore_index` is below 0 is not ignored.
    found = distributed.maxsim_cross_entropy(Q, D, labels, ignore_index=-3)
    torch.testing.assert_close(found, F.cross_entropy(scores, labels))
    for far in (2**32 + 3 * rank, -(2**63)):  # int32 labels are not compared modulo 2^32
        found = distributed.maxsim_cross_entropy(Q, D, labels.int(), ignore_index=far)
        torch.testing.assert_close(found, F.cross_entropy(scores, labels))
    for wrong in (3 * world, -7):
        labels[1] = wrong
        losses = distributed.maxsim_cross_entropy(Q, D, labels, reduction="none")
        assert losses.isnan().tolist() == [False, True]
        of_Q, of_D = torch.autograd.grad(losses.sum(), (Q, D))
        assert bool(of_Q[1].isnan().any()) and not bool(of_Q[0].isnan().any()) and bool(of_D.isnan().any())


def _check_saved_tensors(device: str) -> None:
    """Check that a step keeps its arguments and two numbers for each query, for any number of processes."""
    Q, D = _draw_inputs(device)
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        distributed.maxsim_cross_entropy(Q, D, reduction="sum")
    others = [t for t in kept if not any(t.data_ptr() == x.data_ptr() for x in (Q, D))]
    assert sum(t.numel() for t in others) == 3 * len(Q), [t.shape for t in others]  # and its label


def _check_frozen(device: str) -> None:
    """Check steps with only queries, only documents, or nothing that needs a gradient."""
    for of_queries, of_documents in ((True, False), (False, True), (False, False)):
        Q, D = _draw_inputs(device, Q=of_queries, D=of_documents)
        loss = distributed.maxsim_cross_entropy(Q, D)
        assert loss.requires_grad == (of_queries or of_documents)
        if loss.requires_grad:
            loss.backward()
        assert (Q.grad is not None, D.grad is not None) == (of_queries, of_documents)


def _check_extremes(device: str) -> None:
    """Check that small losses keep their digits, and that documents without kept tokens are ignored."""
    rank, world = dist.get_rank(), dist.get_world_size()
    Q, D = torch.zeros(1, 1, 8, device=device), torch.zeros(1, 1, 8, device=device)
    Q[..., 0], D[..., 0] = 1, 4096.0 if rank == 0 else 4096.0 - 20
    labels = torch.zeros(1, dtype=torch.int64, device=device)
    found = distributed.maxsim_cross_entropy(Q, D, labels)
    expected = torch.log1p((world - 1) * torch.tensor(-20.0, dtype=torch.float64).exp())
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=0)
    last = world - 1
    d_mask = torch.full((1, 1), rank == last, device=device)
    losses = [distributed.maxsim_cross_entropy(Q, D, labels + n, None, d_mask).item() for n in (0, last)]
    assert losses == [torch.inf, 0.0], losses
    assert bool(distributed.maxsim_cross_entropy(Q, D, labels, None, d_mask & False).isnan())


def _check_second_derivatives(device: str) -> None:
    """Check that second derivatives raise and are never zero, for any upstream gradient and for a frozen D."""
    for frozen in (False, True):
        for score in (distributed.maxsim_inbatch, distributed.maxsim_cross_entropy):
            for reduced in (Tensor.sum, lambda x: x.square().sum()):
                Q, D = _draw_inputs(device)
                D = D.detach() if frozen else D
                (gradient,) = torch.autograd.grad(reduced(score(Q, D)), Q, create_graph=True)
                (again,) = torch.autograd.grad(reduced(score(Q, D)), Q)
                assert torch.equal(gradient, again) and gradient.requires_grad
                try:
                    gradient.square().sum().backward()
                except NotImplementedError as e:
                    assert f"distributed.{score.__name__} has no double backward" in str(e), e
                else:
                    raise AssertionError("expected NotImplementedError")
    Q, D = _draw_inputs(device)
    for score in (distributed.maxsim_inbatch, distributed.maxsim_cross_entropy):
        said = f"torch.func cannot differentiate distributed.{score.__name__}"
        expect(NotImplementedError, said, lambda s=score: torch.func.grad(lambda q: s(q, D).sum())(Q))


def _check_errors(device: str) -> None:
    """Check that an error of one rank raises on all ranks."""
    mine = dist.get_rank() == 1
    Q, D = _draw_inputs(device)
    loss, wrong = distributed.maxsim_cross_entropy, TypeError if mine else ValueError
    labels = torch.zeros(2, dtype=torch.int64, device=device)
    expect(ValueError, "labels: expected [Nq]", lambda: loss(Q, D, labels[:1] if mine else labels))
    expect(ValueError, "labels: expected [Nq] where there are fewer", lambda: loss(Q, D[:1] if mine else D))
    expect(wrong, "labels: expected int32 or int64", lambda: loss(Q, D, labels.double() if mine else labels))
    expect(ValueError, "temperature: expected a finite number", lambda: loss(Q, D, temperature=0 if mine else 1))
    expect(ValueError, "reduction: expected one of", lambda: loss(Q, D, reduction="max" if mine else "sum"))
    expect(wrong, "ignore_index: expected an int", lambda: loss(Q, D, ignore_index=None if mine else -1))
    expect(ValueError, "Q, D: expected [Nq, Lq, d], [Nd, Ld, d]", lambda: loss(Q, D[:2, None] if mine else D))
    grads = "requires_grad of D: expected the same on all ranks"
    expect(ValueError, grads, lambda: loss(Q, D.detach() if mine else D))
