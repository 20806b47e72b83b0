"""Train a tiny ColBERT from random initialization on the docstrings of the installed Python packages.

    python examples/train_colbert.py
    python examples/train_colbert.py --resume               # continue from the last checkpoint of an interrupted run
    python examples/train_colbert.py --minimum 0.55         # exit with 1 if it ranks worse

The first paragraph of a docstring must find the rest of it among the 63 other docstrings of its batch. Every 25 steps,
the model is evaluated on 300 queries over 1,000 documents that it never trains on. The folder `--out` receives
``curves.png`` and ``checkpoint.pt``.

The standard library has too few docstrings. ``pip install ".[demo]"`` installs packages that have enough. Training runs
for about a minute on two CPU cores. If other programs share the cores, set OMP_WAIT_POLICY=PASSIVE, so that waiting
threads of torch do not occupy them. Downloads nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from missing_packages import explain_missing

with explain_missing('".[demo]"'):
    import numpy as np
    from docstring_corpus import Docstring, collect_docstrings, installed, shuffled
    from evaluation.known_item import EVALUATION_POOL, Evaluation, bm25_scores, evaluate, score_documents
    from hashed_encoder import split_words
    from matplotlib.figure import Figure
    from tiny_colbert import TinyColBERT, TinyColBERTEncoder
    from tqdm import tqdm

HELD_OUT = 4000  # rows of the shuffled corpus that no training may see, as in search_docstrings
LEAST_PAIRS = 4000
GRADIENT_NORM = 1.0
SMOOTHING = 20  # steps of the running mean of the loss in the picture


@dataclass(frozen=True)
class Settings:
    """The settings of a run. A resumed run must have the same settings."""

    steps: int = 100
    batch_size: int = 64
    learning_rate: float = 5e-3
    warmup_steps: int = 20
    weight_decay: float = 0.01
    rows: int = 16384
    dim: int = 128
    evaluate_every: int = 25
    seed: int = 0

    def rate_at(self, step: int) -> float:
        """Return the rate of a linear warm-up, then a linear decay to a tenth over all steps."""
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps) * (1 - 0.9 * step / self.steps)


@dataclass
class Task:
    """Training pairs, and a held-out pool whose first `num_queries` summaries are queries."""

    training: Sequence[Docstring]
    pool: Sequence[Docstring]
    num_queries: int

    def fingerprint(self) -> int:
        """Return a number that identifies the corpus, because a run cannot continue on another one."""
        return zlib.crc32("\n".join(docstring.text for docstring in (*self.training, *self.pool)).encode())


@dataclass
class Curves:
    """The loss of every step, and (step, MRR@10, hit@10) of every evaluation."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float, float]] = field(default_factory=list)


class Trainer:
    """Training run that can be saved after any step and continues from there with the same losses."""

    def __init__(self, settings: Settings, task: Task, device: str = "cpu") -> None:
        if len(task.training) < settings.batch_size:
            raise ValueError(f"task: expected at least a batch of {settings.batch_size}, found {len(task.training)}")
        self.settings, self.task, self.device = settings, task, device
        torch.manual_seed(settings.seed)
        self.model = TinyColBERT(settings.rows, settings.dim).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self.curves = Curves()

    @property
    def steps_done(self) -> int:
        """Return the number of completed steps."""
        return len(self.curves.losses)

    def batch(self, step: int) -> list[Docstring]:
        """Return the pairs of a step. Each epoch has its own order, which depends only on the seed."""
        size = self.settings.batch_size
        epoch, position = divmod(step, len(self.task.training) // size)
        order = np.random.default_rng((self.settings.seed, epoch)).permutation(len(self.task.training))
        return [self.task.training[i] for i in order[position * size : (position + 1) * size]]

    def step(self) -> float:
        """Run one step of AdamW on the cross-entropy of in-batch negatives, and return its loss."""
        pairs = self.batch(self.steps_done)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate_at(self.steps_done)
        scores = self.model.scores([pair.summary for pair in pairs], [pair.body for pair in pairs])
        loss = F.cross_entropy(scores, torch.arange(len(pairs), device=self.device))
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        self.optimizer.step()
        self.curves.losses.append(loss.item())
        return loss.item()

    def evaluate(self) -> Evaluation:
        """Evaluate known items of the held-out pool, and record the result in the curves."""
        encoder = TinyColBERTEncoder(self.model)
        queries = encoder.encode_queries([docstring.summary for docstring in self.task.pool[: self.task.num_queries]])
        documents = [docstring.body for docstring in self.task.pool]
        result = evaluate("tiny ColBERT", lambda: score_documents(encoder, queries, documents).cpu())
        self.curves.evaluations.append((self.steps_done, result.mrr, result.hit))
        return result

    def run(self, until: int | None = None, *, progress: bool = False, save: Callable[[], None] = lambda: None) -> None:
        """Train up to step `until` (by default all of them). Evaluate and `save` regularly."""
        until = self.settings.steps if until is None else min(until, self.settings.steps)
        if not self.curves.evaluations:
            self.evaluate()
        bar = tqdm(
            total=self.settings.steps, initial=self.steps_done, desc="training", unit="step", disable=not progress
        )
        with bar:
            while self.steps_done < until:
                loss = self.step()
                if self.steps_done % self.settings.evaluate_every == 0 or self.steps_done == self.settings.steps:
                    self.evaluate()
                    save()
                bar.update()
                bar.set_postfix({"loss": f"{loss:.3f}", "MRR@10": f"{self.curves.evaluations[-1][1]:.3f}"})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run."""
        return {
            "settings": asdict(self.settings),
            "corpus": self.task.fingerprint(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "curves": asdict(self.curves),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: The state was saved with other settings or another corpus.
        """
        ours = {**asdict(self.settings), "corpus": self.task.fingerprint()}
        theirs = {**state["settings"], "corpus": state["corpus"]}
        different = [f"{key} {theirs.get(key)}, not {ours[key]}" for key in ours if theirs.get(key) != ours[key]]
        if different:
            raise ValueError(f"checkpoint: expected one of the same run, found {'; '.join(different)}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.curves = Curves(**state["curves"])


def save_checkpoint(trainer: Trainer, path: Path) -> None:
    """Write the checkpoint atomically, so that an interrupted write leaves the previous checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partly = path.with_name(path.name + ".part")
    torch.save(trainer.state_dict(), partly)
    os.replace(partly, path)


def load_checkpoint(trainer: Trainer, path: Path) -> None:
    """Load the state of a run from a file."""
    trainer.load_state_dict(torch.load(path, map_location=trainer.device, weights_only=True))


def plot(curves: Curves, path: Path, references: dict[str, float]) -> None:
    """Draw loss and MRR@10 over the steps. `references` are MRRs to compare with, as horizontal lines."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    loss, mrr = figure.subplots(1, 2)
    steps = np.arange(1, len(curves.losses) + 1)
    loss.plot(steps, curves.losses, color="#0072b2", alpha=0.35, label="each step")
    window = min(SMOOTHING, len(curves.losses))
    if window:
        smooth = np.convolve(curves.losses, np.ones(window) / window, mode="valid")
        loss.plot(steps[window - 1 :], smooth, color="#0072b2", label=f"mean of {window}")
    loss.set(xlabel="step", ylabel="loss", title="Cross-entropy of in-batch negatives")
    evaluated, values, _ = zip(*curves.evaluations, strict=True)
    mrr.plot(evaluated, values, color="#d55e00", marker="o", label="tiny ColBERT")
    for style, (name, value) in zip(("--", ":"), references.items(), strict=False):
        mrr.axhline(value, color="#555555", linestyle=style, label=name)
    mrr.set(xlabel="step", ylabel="MRR@10", title="Held-out known items")
    for axes in (loss, mrr):
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def make_task(docstrings: Sequence[Docstring], num_queries: int, seed: int = 0) -> Task:
    """Hold out the first rows of the shuffled corpus, and train on the remaining rows.

    Raises:
        ValueError: Too few docstrings are left for training.
    """
    rows = shuffled(docstrings, seed)
    training = [row for row in rows[HELD_OUT:] if split_words(row.summary) and split_words(row.body)]
    if len(training) < LEAST_PAIRS:
        raise ValueError(
            f"expected at least {HELD_OUT + LEAST_PAIRS} docstrings, found {len(rows)}: "
            'pip install ".[demo]" brings packages that have them'
        )
    return Task(training, rows[:EVALUATION_POOL], num_queries)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line options."""
    parser = argparse.ArgumentParser(description="Train a tiny ColBERT on the docstrings of installed packages.")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="optimiser steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=Settings.batch_size, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    parser.add_argument("--queries", type=int, default=300, help="held-out queries (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("build/tiny_colbert"), help="folder (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--minimum", type=float, metavar="MRR", help="exit with 1 below this MRR@10")
    options = parser.parse_args(arguments)
    options.queries = min(options.queries, EVALUATION_POOL)
    for name in ("steps", "batch_size", "queries"):
        if getattr(options, name) < 1:
            flag = "--" + name.replace("_", "-")
            parser.error(f"argument {flag}: expected a positive number, found {getattr(options, name)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and evaluate the model, and return the exit status."""
    options = parse_arguments(arguments)
    start = time.perf_counter()
    progress = sys.stderr.isatty()
    packages = installed()
    try:
        task = make_task(collect_docstrings(packages, progress=progress), options.queries)
    except ValueError as error:
        sys.exit(str(error))
    print(
        f"{len(task.training)} pairs to train on, {options.queries} queries over {len(task.pool)} held-out documents, "
        f"from the standard library, {', '.join(packages)}"
    )
    settings = Settings(steps=options.steps, batch_size=options.batch_size, seed=options.seed)
    trainer = Trainer(settings, task, options.device)
    checkpoint = options.out / "checkpoint.pt"
    if options.resume:
        try:
            load_checkpoint(trainer, checkpoint)
        except (FileNotFoundError, ValueError) as error:
            sys.exit(f"--resume: {error}")
        print(f"resumed after step {trainer.steps_done}")

    def report() -> None:
        save_checkpoint(trainer, checkpoint)
        _, mrr, _ = trainer.curves.evaluations[-1]
        tqdm.write(f"step {trainer.steps_done}: MRR@10 {mrr:.3f}, {time.perf_counter() - start:.0f} s")

    trainer.run(progress=progress, save=report)

    queries, documents = [row.summary for row in task.pool[: options.queries]], [row.body for row in task.pool]
    bm25 = evaluate("BM25", lambda: bm25_scores(queries, documents)).mrr
    (_, untrained, _), (_, mrr, hit) = trainer.curves.evaluations[0], trainer.curves.evaluations[-1]
    plot(trainer.curves, options.out / "curves.png", {"BM25": bm25})
    print(f"MRR@10 {mrr:.3f}, hit@10 {hit:.3f} after {trainer.steps_done} steps")
    print(f"MRR@10 untrained {untrained:.3f}, of BM25 {bm25:.3f}")
    print(f"{time.perf_counter() - start:.0f} s in all, curves in {options.out / 'curves.png'}")
    if options.minimum is not None and mrr < options.minimum:
        print(f"below the minimum of {options.minimum}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
