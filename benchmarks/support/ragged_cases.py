"""Ragged cases with HotpotQA-like lengths, their packed and padded inputs, and their reference results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import lik_ops
from lik_ops import reference

from .common import (
    relative_error,
)

SHAPE = 4  # of the gamma distribution of lengths
CHECKED_Q, CHECKED_D = 4, 16  # compare the last queries, and the last documents of each, with fp64


def draw_lengths(count: int, most: int, mean: float, generator: torch.Generator) -> Tensor:
    """Return int64 lengths ``[count]`` from 1 to `most`, with a mean of `mean` times `most`.

    They follow a clipped gamma distribution of shape 4, like HotpotQA passages. Few are very short, the typical length
    is below the mean, and a thin tail reaches the model's maximum. A sum of exponentials gives the same lengths
    everywhere.
    """
    gamma = -torch.rand((count, SHAPE), generator=generator, dtype=torch.float64).clamp_(min=1e-12).log_().mean(-1)
    return gamma.mul_(mean * most).round_().long().clamp_(1, most)


@dataclass(frozen=True)
class Case:
    """One ragged case. Results of different commits are compared by its name, so keep names stable."""

    name: str
    Nq: int
    Nd: int  # documents, or size of the store that candidates and pairs refer to
    Lq: int  # maximum query length
    Ld: int
    K: int = 0  # candidates per query
    P: int = 0  # pairs in the list
    d: int = 128
    dtype: str = "bfloat16"
    what: str = "scores"  # or "step": forward with winners, then backward
    mean: float = 0.3  # mean document length as a share of Ld
    mean_q: float = 1.0  # mean query length as a share of Lq; 1: all have Lq tokens
    retune: bool = False  # tune the peers on this case, else reuse their tuning for its lengths

    @property
    def layout(self) -> str:
        return "candidates" if self.K else "pairs" if self.P else "cross"


class Inputs:
    """Random unit tokens of one case: packed, and other forms derived from them."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        self.case, self.dtype = case, getattr(torch, case.dtype)
        host = torch.Generator().manual_seed(0)
        self.d_lengths = draw_lengths(case.Nd, case.Ld, case.mean, host)
        self.q_lengths = torch.full((case.Nq,), case.Lq)
        if case.mean_q < 1:
            self.q_lengths = draw_lengths(case.Nq, case.Lq, case.mean_q, host)
        # Host numbers: a batch is padded to its longest sequence.
        self.Lq, self.Ld = int(self.q_lengths.max()), int(self.d_lengths.max())
        if case.layout == "candidates":
            i = torch.arange(case.Nq).repeat_interleave(case.K)
            j = torch.randint(case.Nd, (case.Nq * case.K,), generator=host)
        elif case.layout == "pairs":
            i, j = (torch.randint(n, (case.P,), generator=host) for n in (case.Nq, case.Nd))
        else:
            i = torch.arange(case.Nq).repeat_interleave(case.Nd)
            j = torch.arange(case.Nd).repeat(case.Nq)
        # The query and the document of every score.
        self.tokens_met = int((self.q_lengths[i] * self.d_lengths[j]).sum())
        self.mean_Lq = round(self.q_lengths[i].double().mean().item())
        self.mean_Ld = round(self.d_lengths[j].double().mean().item())
        self.met = torch.stack([i, j], dim=1).to(device)
        self.shape = {"candidates": (case.Nq, case.K), "pairs": (case.P,), "cross": (case.Nq, case.Nd)}[case.layout]
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            x = torch.randn((*shape, case.d), generator=generator, device=device, dtype=self.dtype)
            return x.div_(x.norm(dim=-1, keepdim=True))

        self.draw = draw
        self.Q, self.D = draw(int(self.q_lengths.sum())), draw(int(self.d_lengths.sum()))
        self.q_lengths, self.d_lengths = self.q_lengths.to(device), self.d_lengths.to(device)
        self.q_mask = lik_ops.lengths_to_mask(self.q_lengths, self.Lq)
        self.d_mask = lik_ops.lengths_to_mask(self.d_lengths, self.Ld)
        self.cu_q, self.cu_d = (torch.nn.functional.pad(n.cumsum(0), (1, 0)).int() for n in self.lengths)
        self.grad_scores = torch.rand(self.shape, generator=generator, device=device) - 0.5

    @property
    def lengths(self) -> tuple[Tensor, Tensor]:
        return self.q_lengths, self.d_lengths

    @property
    def operations(self) -> int:
        """Operations of the products of kept tokens, without the backward."""
        return 2 * self.case.d * self.tokens_met

    @property
    def bytes(self) -> int:
        """Bytes of a forward that reads every needed token once and writes its scores."""
        met = [n[self.met[:, side].unique()].sum().item() for side, n in enumerate(self.lengths)]
        return int(self.dtype.itemsize * self.case.d * sum(met) + 4 * math.prod(self.shape))

    @property
    def dense_operations(self) -> int:
        """Operations of as many scores of queries and documents that all have the mean length."""
        return 2 * self.case.d * math.prod(self.shape) * self.mean_Lq * self.mean_Ld

    def dense_tokens(self) -> tuple[Tensor, Tensor]:
        """Return a dense problem of that size: ``Q``, and ``D`` with one document per candidate or pair."""
        case = self.case
        count_q = case.P or case.Nq
        documents = (case.Nq, case.K) if case.K else (case.P or case.Nd,)
        return self.draw(count_q, self.mean_Lq), self.draw(*documents, self.mean_Ld)

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return Q ``[Nq, Lq, d]`` and D ``[Nd, Ld, d]`` with zeros for missing tokens."""
        return tuple(_padded(x, mask) for x, mask in ((self.Q, self.q_mask), (self.D, self.d_mask)))  # type: ignore

    def chosen(self, x: Tensor) -> Tensor:
        """Return the entry of each candidate ``[Nq, K, ...]`` from per-document values."""
        return x[self.met[:, 1].view(self.shape)]

    def packed_documents(self, x: Tensor) -> Tensor:
        """Return packed tokens ``[Td, d]`` from padded documents, or the sum over padded candidates."""
        if x.dim() == 3:
            return x[self.d_mask]
        rows = self.chosen(self.cu_d[:-1])[..., None] + torch.arange(self.Ld, device=x.device)
        kept = self.chosen(self.d_mask)
        return torch.zeros_like(self.D, dtype=torch.float64).index_add_(0, rows[kept], x[kept].double())


def _padded(x: Tensor, mask: Tensor) -> Tensor:
    out = x.new_zeros((*mask.shape, x.shape[-1]))
    out[mask] = x
    return out


def checked(x: Inputs) -> Tensor:
    """Return flat indices of the scores to compare with fp64: the last ones of the last queries."""
    if x.case.layout == "pairs":
        return torch.arange(x.shape[0], device=x.Q.device)[-CHECKED_Q * CHECKED_D :]
    flat = torch.arange(math.prod(x.shape), device=x.Q.device)
    return flat.view(x.shape)[-CHECKED_Q:, -CHECKED_D:].flatten()


def _reference(x: Inputs, Q: Tensor, D: Tensor, flat: Tensor) -> Tensor:
    """Return the scores at `flat` of packed fp64 tokens."""
    i, j = x.met[flat].unbind(1)
    tokens, masks = [], []
    for packed, cu, n, which in ((Q, x.cu_q, x.Lq, i), (D, x.cu_d, x.Ld, j)):
        rows = cu[which][:, None] + torch.arange(n, device=Q.device)
        masks.append(rows < cu[which + 1][:, None])
        tokens.append(packed[rows.clamp(max=packed.shape[0] - 1)])
    return reference.maxsim_pairs(*tokens, *masks)


def error_of(x: Inputs, scores: Tensor) -> float:
    """Return the relative error of the last scores against fp64."""
    flat = checked(x)
    return relative_error(scores.flatten()[flat], _reference(x, x.Q.double(), x.D.double(), flat))


Scorer = Callable[[Tensor, Tensor], Tensor]
Leaves = tuple[Tensor, Tensor]


def step(score: Scorer, tokens: Leaves, grad_scores: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of both inputs."""
    Q, D = (t.detach().requires_grad_() for t in tokens)
    return torch.autograd.grad(score(Q, D), (Q, D), grad_scores)


def errors_of(x: Inputs, score: Scorer, tokens: Leaves) -> dict[str, float]:
    """Return relative errors of both gradients against fp64.

    Only the last scores have an upstream gradient. If `tokens` are padded, only kept tokens are compared.
    """
    flat = checked(x)
    upstream = torch.zeros_like(x.grad_scores)
    upstream.view(-1)[flat] = x.grad_scores.view(-1)[flat]
    grads = step(score, tokens, upstream)
    Q, D = (t.double().requires_grad_() for t in (x.Q, x.D))
    expected = torch.autograd.grad(_reference(x, Q, D, flat), (Q, D), upstream.view(-1)[flat].double())
    grad_Q = grads[0] if grads[0].dim() == 2 else grads[0][x.q_mask]
    grad_D = grads[1] if grads[1].dim() == 2 else x.packed_documents(grads[1])
    return {f"error_{n}": relative_error(*pair) for n, *pair in zip("QD", (grad_Q, grad_D), expected, strict=True)}
