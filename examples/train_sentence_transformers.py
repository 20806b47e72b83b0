"""Train a multi-vector model with sentence-transformers' own trainer, with its scoring and with lik_ops: equal losses.

    python examples/train_sentence_transformers.py
    python examples/train_sentence_transformers.py --cached --batch-size 256 --steps 40

A BERT of 1.5 M parameters from random weights learns to find the rest of a docstring by its first paragraph, among
those of its batch. Needs ``pip install ".[sentence-transformers]" datasets accelerate``; nothing is downloaded.
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
from datasets import Dataset
from docstring_corpus import collect_docstrings, installed, shuffled
from sentence_transformers import MultiVectorEncoder, MultiVectorEncoderTrainer, MultiVectorEncoderTrainingArguments
from sentence_transformers.multi_vector_encoder import losses
from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertModel, BertTokenizerFast, PrinterCallback

from lik_ops.integrations import sentence_transformers as lik

TOKENS = 128  # of a document, at most


def base_model(texts: Sequence[str], directory: Path) -> None:
    """A BERT with random weights and the word pieces of the texts."""
    pieces = BertWordPieceTokenizer(lowercase=True)
    pieces.train_from_iterator(texts, vocab_size=8000, show_progress=False)
    tokenizer = BertTokenizerFast(tokenizer_object=pieces._tokenizer, model_max_length=TOKENS)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=160,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def train(
    base: Path, pairs: Dataset, options: argparse.Namespace, with_lik_ops: bool
) -> tuple[list[float], float, int]:
    """Losses of every step, seconds of a step, and, on a GPU, bytes at the peak."""
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
    return history, seconds, torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Train twice; 1 if the losses differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--cached", action="store_true", help="the loss that caches gradients")
    options = parser.parse_args(arguments)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    docstrings = shuffled(collect_docstrings(installed()), seed=0)
    pairs = Dataset.from_dict({"query": [d.summary for d in docstrings], "document": [d.body for d in docstrings]})
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory) / "base"
        base_model([d.text for d in docstrings], base)
        runs = {name: train(base, pairs, options, name == "lik_ops") for name in ("its own", "lik_ops")}
    theirs, ours = (history for history, _, _ in runs.values())
    for step in range(0, len(ours), max(len(ours) // 10, 1)):
        print(f"step {step + 1:4}   its own {theirs[step]:.5f}   lik_ops {ours[step]:.5f}")
    for name, (_, seconds, peak) in runs.items():
        print(f"{name:8} {1000 * seconds:8.1f} ms a step" + (f", {peak / 2**20:.0f} MiB at the peak" if peak else ""))
    worst = max(abs(a - b) / abs(a) for a, b in zip(theirs, ours, strict=True))
    print(f"losses differ by {worst:.1e} of themselves at most")
    return int(worst > 1e-3 or len(ours) != options.steps)


if __name__ == "__main__":
    sys.exit(main())
