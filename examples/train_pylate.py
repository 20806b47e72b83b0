"""Train a ColBERT with PyLate's contrastive loss, with its torch scoring and with lik_ops: equal losses.

    python examples/train_pylate.py
    python examples/train_pylate.py --cached --batch-size 128 --steps 40

A BERT of 1.5 M parameters with random weights learns to find the rest of a docstring by its first paragraph, among the
docstrings of its batch. Needs ``pip install ".[pylate]"`` and downloads nothing.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from missing_packages import explain_missing

from lik_ops.integrations import pylate as lik

with explain_missing('".[pylate]"'):
    from docstring_corpus import Docstring, collect_docstrings, installed, shuffled
    from pylate import losses, models, scores
    from train_common import Run, base_model, chosen, report


def train(base: Path, docstrings: Sequence[Docstring], options: argparse.Namespace, with_lik_ops: bool) -> Run:
    """Train a model and return its losses, time, and peak memory."""
    torch.manual_seed(0)
    model = models.ColBERT(str(base), query_length=32, document_length=128, embedding_size=64, do_query_expansion=False)
    model.to(model.device)  # PyLate leaves its projection on the CPU
    # PyLate would use an installed late-interaction-kernels, which multiplies fp32 as fp16 (0.4.5).
    score = lik.ColBERTScores() if with_lik_ops else partial(scores.ColBERTScores(), backend="torch")
    loss_type = losses.CachedContrastive if options.cached else losses.Contrastive
    loss = loss_type(model, temperature=0.5, score_metric=score)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history, seconds = [], 0.0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for step in range(options.steps):
        first = step * options.batch_size % (len(docstrings) - options.batch_size + 1)
        batch = docstrings[first : first + options.batch_size]
        texts = ([d.summary for d in batch], True), ([d.body for d in batch], False)
        features = [
            {name: x.to(model.device) for name, x in model.tokenize(side, is_query=of_queries).items()}
            for side, of_queries in texts
        ]
        begin = time.perf_counter()
        value = loss(features)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        history.append(value.item())
        seconds += time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return Run(history, seconds / options.steps, peak)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train twice, and return 1 if the losses differ."""
    options = chosen(__doc__, arguments)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    docstrings = shuffled(collect_docstrings(installed()), seed=0)
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory) / "base"
        base_model([d.text for d in docstrings], base)
        runs = [train(base, docstrings, options, with_lik_ops) for with_lik_ops in (False, True)]
    return report(*runs)


if __name__ == "__main__":
    sys.exit(main())
