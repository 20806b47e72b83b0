"""Stand-in for a late-interaction encoder and its loss, for tests of training."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lik_ops

FEATURES, DIM = 12, 16
SCALE = 4.0  # of the scores in the loss, because otherwise a query of few tokens has little effect


class Encoder(nn.Module):
    """Encoder from token features ``[..., FEATURES]`` to embeddings ``[..., DIM]``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 2 * DIM)
        self.outer = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.outer(F.gelu(self.inner(tokens)))


def batch(Nq: int, Nd: int, Lq: int, Ld: int, device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return token features of queries, documents that begin with a noisy copy of their query, and a mask."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(Nq, Lq, FEATURES, generator=generator)
    documents = torch.randn(Nd, Ld, FEATURES, generator=generator)
    count, length = min(Nq, Nd), min(Lq, Ld)
    documents[:count, :length] = queries[:count, :length] + 0.5 * documents[:count, :length]
    mask = torch.rand(Nd, Ld, generator=generator) > 0.2
    mask[:, 0] = True
    return queries.to(device), documents.to(device), mask.to(device)


def in_batch_loss(
    encoder: nn.Module,
    queries: Tensor,
    documents: Tensor,
    d_mask: Tensor,
    *,
    maxsim: Callable[..., Tensor] = lik_ops.maxsim,
    first: int = 0,
    **options,
) -> Tensor:
    """Return the cross-entropy of each query's own document, number `first` on, among all."""
    scores = maxsim(encoder(queries), encoder(documents), None, d_mask, normalize=True, **options)
    return F.cross_entropy(SCALE * scores, first + torch.arange(queries.shape[0], device=scores.device))
