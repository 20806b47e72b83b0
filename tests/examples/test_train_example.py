"""Test the training example on a synthetic corpus and a tiny model: learning, bit-exact resumption, and reports."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

DEMO = "the demo's packages: pip install '.[demo]'"
for package in ("numpy", "bm25s", "tqdm", "matplotlib"):
    pytest.importorskip(package, reason=DEMO)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import train_colbert  # noqa: E402
from docstring_corpus import Docstring  # noqa: E402
from tiny_colbert import TinyColBERT, TinyColBERTEncoder  # noqa: E402
from train_colbert import Settings, Task, Trainer  # noqa: E402

SMALL = Settings(steps=6, batch_size=8, rows=512, dim=16, evaluate_every=2, warmup_steps=2)


def corpus(number: int) -> list[Docstring]:
    """Return synthetic pairs. A summary has words of its body, and some words occur in every text."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=5)) for _ in range(300)]
    pairs = []
    for i in range(number):
        body = draw.choices(words, k=20) + ["the", "of", "and"] * 5
        pairs.append(Docstring(f"pair{i}", " ".join([*draw.sample(body, 4), "the", "of"]), " ".join(body)))
    return pairs


@pytest.fixture(scope="module")
def task() -> Task:
    rows = corpus(60)
    return Task(rows[20:], rows[:20], num_queries=10)


def small_trainer(task: Task, **changes) -> Trainer:
    return Trainer(replace(SMALL, **changes), task)


def test_resumed_run_equals_uninterrupted_run(task, tmp_path):
    whole = small_trainer(task)
    whole.run()
    interrupted = small_trainer(task)
    interrupted.run(until=3)
    train_colbert.save_checkpoint(interrupted, tmp_path / "checkpoint.pt")
    torch.manual_seed(1)
    resumed = small_trainer(task)
    train_colbert.load_checkpoint(resumed, tmp_path / "checkpoint.pt")
    assert resumed.curves == interrupted.curves and resumed.steps_done == 3
    resumed.run()
    assert resumed.curves == whole.curves
    assert [step for step, _, _ in whole.curves.evaluations] == [0, 2, 4, 6]
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_every_epoch_shuffles_every_pair_once(task):
    trainer = small_trainer(task)
    epochs = [[trainer.batch(5 * epoch + i) for i in range(5)] for epoch in (0, 1)]
    names = [[pair.name for batch in epoch for pair in batch] for epoch in epochs]
    assert sorted(names[0]) == sorted(names[1]) == sorted(pair.name for pair in task.training)
    assert names[0] != names[1]


def test_an_interrupted_write_leaves_the_previous_checkpoint(task, tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    trainer = small_trainer(task)
    train_colbert.save_checkpoint(trainer, path)
    before = path.read_bytes()

    def torn(state, target):
        Path(target).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="disk full"):
        train_colbert.save_checkpoint(trainer, path)
    assert path.read_bytes() == before


def test_checkpoint_of_another_run_is_rejected(task, tmp_path):
    path = tmp_path / "checkpoint.pt"
    train_colbert.save_checkpoint(small_trainer(task), path)
    with pytest.raises(ValueError, match="seed 0, not 1"):
        train_colbert.load_checkpoint(small_trainer(task, seed=1), path)
    with pytest.raises(ValueError, match="corpus"):
        train_colbert.load_checkpoint(small_trainer(replace(task, pool=task.pool[1:])), path)


def test_training_learns(task):
    """The model learns which words to weigh down, as the gradient of `q_weight` indicates."""
    trainer = small_trainer(task, steps=40, learning_rate=1e-2, evaluate_every=40)
    before = trainer.model.importance.weight.clone()
    trainer.run()
    losses = trainer.curves.losses
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert not torch.equal(trainer.model.importance.weight, before)


def test_embeddings_do_not_depend_on_padding():
    model = TinyColBERT(rows=64, dim=8)
    torch.nn.init.normal_(model.mixed.weight)
    torch.nn.init.normal_(model.norm.bias)
    encoder = TinyColBERTEncoder(model)
    alone = encoder.encode_queries(["one two three"])
    among = encoder.encode_queries(["one two three", "word " * 30])
    assert among.mask.sum(1).tolist() == [3, 30]
    torch.testing.assert_close(among.embeddings[0, :3], alone.embeddings[0])
    torch.testing.assert_close(among.weight[0, :3], alone.weight[0])
    torch.testing.assert_close(alone.embeddings.norm(dim=-1), torch.ones(1, 3))


def test_evaluation_scores_match_training_scores():
    torch.manual_seed(0)
    model = TinyColBERT(rows=64, dim=8)
    torch.nn.init.normal_(model.mixed.weight)
    encoder = TinyColBERTEncoder(model)
    queries, documents = ["one two", "three"], ["one two three four", "five", "three six"]
    batch = encoder.encode_queries(queries)
    scores = train_colbert.score_documents(encoder, batch, documents)
    torch.testing.assert_close(scores * model.log_scale.exp(), model.scores(queries, documents))


def test_training_pairs_are_not_held_out(monkeypatch):
    monkeypatch.setattr(train_colbert, "HELD_OUT", 40)
    monkeypatch.setattr(train_colbert, "LEAST_PAIRS", 20)
    monkeypatch.setattr(train_colbert, "EVALUATION_POOL", 30)
    task = train_colbert.make_task(corpus(80), 10)
    held_out, names = ({row.name for row in rows} for rows in (task.pool, task.training))
    assert len(held_out) == 30 and len(names) == 40 and not held_out & names


def test_pairs_without_a_word_are_not_trained_on(monkeypatch):
    """A document without kept tokens scores -inf by contract, so its loss would be infinite."""
    monkeypatch.setattr(train_colbert, "HELD_OUT", 5)
    monkeypatch.setattr(train_colbert, "LEAST_PAIRS", 1)
    wordless = [Docstring("wordless", "? ? ? ? ?", "words"), Docstring("wordless", "words", "! ! !")] * 10
    task = train_colbert.make_task([*corpus(20), *wordless], 2)
    assert task.training and all(pair.name != "wordless" for pair in task.training)


def test_too_few_docstrings_raise_with_install_hint(monkeypatch):
    monkeypatch.setattr(train_colbert, "collect_docstrings", lambda packages, progress: corpus(50))
    with pytest.raises(SystemExit, match=r'at least 8000 docstrings, found 50: pip install "\.\[demo\]"'):
        train_colbert.main([])


def test_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_colbert, "collect_docstrings", lambda packages, progress: corpus(100))
    for name, value in {"HELD_OUT": 40, "LEAST_PAIRS": 20, "EVALUATION_POOL": 40}.items():
        monkeypatch.setattr(train_colbert, name, value)
    options = ["--steps", "3", "--batch-size", "8", "--queries", "10", "--device", "cpu", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match=r"--resume: .*checkpoint\.pt"):
        train_colbert.main([*options, "--resume"])
    assert train_colbert.main([*options, "--minimum", "0"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint.pt", "curves.png"}
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "after 3 steps" in capsys.readouterr().out
    assert train_colbert.main([*options, "--resume", "--minimum", "1.1"]) == 1
    shown = capsys.readouterr()
    assert "resumed after step 3" in shown.out and "below the minimum of 1.1" in shown.err


@pytest.mark.parametrize("option", ["--steps", "--batch-size", "--queries"])
def test_counts_must_be_positive(option, capsys):
    with pytest.raises(SystemExit):
        train_colbert.main([option, "0"])
    assert f"{option}: expected a positive number" in capsys.readouterr().err
