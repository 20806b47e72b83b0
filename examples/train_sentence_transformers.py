"""Train a multi-vector model with sentence-transformers' own trainer, with its scoring and with lik_ops: equal losses.

    python examples/train_sentence_transformers.py
    python examples/train_sentence_transformers.py --cached --batch-size 256 --steps 40

A BERT of 1.5 M parameters with random weights learns to find the rest of a docstring by its first paragraph, among the
docstrings of its batch. Needs ``pip install ".[sentence-transformers]" datasets accelerate`` and downloads nothing.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from missing_packages import explain_missing

from lik_ops.integrations import sentence_transformers as lik

with explain_missing('".[sentence-transformers]" datasets accelerate'):
    from datasets import Dataset
    from docstring_corpus import collect_docstrings, installed, shuffled
    from sentence_transformers import MultiVectorEncoder, MultiVectorEncoderTrainer, MultiVectorEncoderTrainingArguments
    from sentence_transformers.multi_vector_encoder import losses
    from train_common import Run, base_model, chosen, report
    from transformers import PrinterCallback


def train(base: Path, pairs: Dataset, options: argparse.Namespace, with_lik_ops: bool) -> Run:
    """Train a model and return its losses, time, and peak memory."""
    torch.manual_seed(0)
    model = MultiVectorEncoder(str(base))
    scored = {"similarity_fct": lik.colbert_scores} if with_lik_ops else {}
    name = (
        "CachedMultiVectorMultipleNegativesRankingLoss" if options.cached else "MultiVectorMultipleNegativesRankingLoss"
    )
    loss = getattr(losses, name)(model, scale=4.0, **scored)
    with tempfile.TemporaryDirectory() as out:
        arguments = MultiVectorEncoderTrainingArguments(
            output_dir=out,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=1e-3,
            warmup_steps=5,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        trainer = MultiVectorEncoderTrainer(model=model, args=arguments, train_dataset=pairs, loss=loss)
        trainer.remove_callback(PrinterCallback)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        trainer.train()
        seconds = (time.perf_counter() - begin) / options.steps
    history = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Run(history, seconds, torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train twice, and return 1 if the losses differ."""
    options = chosen(__doc__, arguments)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    docstrings = shuffled(collect_docstrings(installed()), seed=0)
    pairs = Dataset.from_dict({"query": [d.summary for d in docstrings], "document": [d.body for d in docstrings]})
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory) / "base"
        base_model([d.text for d in docstrings], base)
        runs = [train(base, pairs, options, with_lik_ops) for with_lik_ops in (False, True)]
    return report(*runs)


if __name__ == "__main__":
    sys.exit(main())
