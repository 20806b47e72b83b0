"""Train a small BERT twice and compare the losses of its steps, its time, and its memory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

TOKENS = 128  # maximum for a text


class Run(NamedTuple):
    """Losses of every step, seconds per step, and peak bytes of a GPU (0 without one)."""

    losses: list[float]
    seconds: float
    peak: int


def chosen(description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a training on docstrings."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--cached", action="store_true", help="the loss that caches gradients")
    return parser.parse_args(arguments)


def report(theirs: Run, ours: Run) -> int:
    """Print both runs. Return 1 if a loss differs by more than a thousandth, else 0."""
    for step in range(0, len(ours.losses), max(len(ours.losses) // 10, 1)):
        print(f"step {step + 1:4}   its own {theirs.losses[step]:.5f}   lik_ops {ours.losses[step]:.5f}")
    for name, run in (("its own", theirs), ("lik_ops", ours)):
        memory = f", {run.peak / 2**20:.0f} MiB at the peak" if run.peak else ""
        print(f"{name:8} {1000 * run.seconds:8.1f} ms a step{memory}")
    worst = max(abs(a - b) / abs(a) for a, b in zip(theirs.losses, ours.losses, strict=True))
    print(f"losses differ by {worst:.1e} of themselves at most")
    return int(worst > 1e-3)


def base_model(texts: Sequence[str], directory: Path) -> None:
    """Save a BERT with random weights and the word pieces of the texts."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertModel, BertTokenizerFast

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
