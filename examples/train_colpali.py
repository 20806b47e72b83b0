"""Train a ColPali-shaped head with colpali-engine's loss, with its torch scoring and with lik_ops: equal losses.

    python examples/train_colpali.py
    python examples/train_colpali.py --pages 64 --tokens 1024 --steps 20

A page is many random vision tokens, and its query is some of these tokens with noise. The example trains a projection
of both. Needs ``pip install ".[colpali]"`` and downloads nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from unittest.mock import patch

import torch
from missing_packages import explain_missing
from torch import Tensor

from lik_ops.integrations import colpali as lik

with explain_missing('".[colpali]"'):
    from colpali_engine.loss.late_interaction_losses import ColbertLoss
    from train_common import Run, report

FEATURES, QUERY_TOKENS, NOISE = 256, 24, 2.0
SPREAD = torch.arange(FEATURES) % 2  # every second feature is pure noise, which the projection must learn


class Head(torch.nn.Module):
    """Projection of query and document tokens to 128 features of length 1, as in ColPali."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(FEATURES, 128, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return normalized projections of the tokens."""
        return torch.nn.functional.normalize(self.projection(tokens), dim=-1)


def batch(options: argparse.Namespace, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return queries ``[pages, Lq, features]`` and pages ``[pages, tokens, features]``."""
    pages = torch.randn(options.pages, options.tokens, FEATURES, generator=generator) * SPREAD
    chosen = torch.randint(0, options.tokens, (options.pages, QUERY_TOKENS, 1), generator=generator)
    queries = pages.gather(1, chosen.expand(-1, -1, FEATURES))
    return queries + NOISE * torch.randn(queries.shape, generator=generator), pages


def train(options: argparse.Namespace, with_lik_ops: bool) -> Run:
    """Train a head and return its losses, time, and peak memory."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator, head, loss = torch.Generator().manual_seed(1), Head().to(device), ColbertLoss(temperature=0.05)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    history, seconds = [], 0.0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    # Without this setting it would use an installed late-interaction-kernels, which multiplies fp32 as fp16 (0.4.5).
    own = patch.dict(os.environ, COLPALI_SCORES_BACKEND="torch")
    with lik.enable() if with_lik_ops else own as routing:
        for _ in range(options.steps):
            queries, pages = (x.to(device) for x in batch(options, generator))
            begin = time.perf_counter()
            value = loss(head(queries), head(pages))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            history.append(value.item())
            seconds += time.perf_counter() - begin
        if with_lik_ops:
            print(f"calls that lik_ops scored: {sum(routing.calls.values())}")
    return Run(history, seconds / options.steps, torch.cuda.max_memory_allocated() if device == "cuda" else 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train twice, and return 1 if the losses differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pages", type=int, default=16, help="of a batch")
    parser.add_argument("--tokens", type=int, default=256, help="of a page")
    options = parser.parse_args(arguments)
    runs = [train(options, with_lik_ops) for with_lik_ops in (False, True)]
    return report(*runs)


if __name__ == "__main__":
    sys.exit(main())
