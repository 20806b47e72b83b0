"""Change a corpus in processes that are killed, while other processes read it, with a dictionary as the oracle.

Run ``python -m tests.workers.corpus_changes path steps seed``.

Hypothesis chooses the steps: appends, deletions, updates, compactions, reopening, searches, reranking and conversions.
Before most changes a process is forked that begins the same change and is killed, either at one of its calls of the
operating system or after a random time. The corpus must then hold the documents from before or from after the change.
Two other processes open the corpus again and again. All that they see must be a state that was about to be committed.
A process that pools the corpus into another directory is killed in the same way, and the next call continues there.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import lik_ops
from lik_ops import Corpus
from lik_ops.retrieval.store import change

D, READERS, STEPS_OF_A_RUN = 4, 2, 50
FORMATS = (None, "int8")
SEEDS = st.integers(0, 1 << 32)
CALLS = ("replace", "fsync", "unlink", "mkdir", "rmdir", "pwrite", "ftruncate", "open", "stat")
counts = {"steps": 0, "killed": 0, "before": 0, "after": 0, "reads": 0, "unfinished_pools": 0}


def document(name: str, version: int) -> torch.Tensor:
    """Return the tokens of a version of a document, which identify both."""
    length = (7 * int(name) + version) % 5
    return torch.full((length, D), int(name) + version / 16)


def digest(documents: list[tuple[str, torch.Tensor]]) -> str:
    """Return a hash of documents in order."""
    found = hashlib.sha256()
    for name, tokens in documents:
        found.update(f"{name} {len(tokens)} {tokens.flatten().tolist()[:1]}\n".encode())
    return found.hexdigest()


def read_state(path: Path) -> str:
    """Return the hash of a corpus, read in several ways."""
    corpus = Corpus.open(path)
    ids, documents = corpus.ids or [], list(corpus)
    packed, _ = corpus.documents()
    tokens = packed if isinstance(packed, torch.Tensor) else packed.dequantize()
    assert len(ids) == len(documents) == len(corpus) and torch.equal(tokens, torch.cat([tokens[:0], *documents]))
    if len(corpus):
        scores, indices = lik_ops.retrieve(torch.ones(1, 1, D), corpus, len(corpus))
        found = torch.empty(len(corpus)).scatter(0, indices[0], scores[0])
        expected = [x[:, 0].max() * D if len(x) else torch.tensor(-torch.inf) for x in documents]
        assert torch.allclose(found, torch.stack(expected), rtol=0.05)
    return digest(list(zip(ids, documents, strict=True)))


def read_for_ever(path: Path, states: Path, pipe: int) -> None:
    """Read the corpus until the parent ends. All states must be known when they are seen."""
    while os.getppid() != 1:
        try:
            state = read_state(path)
        except ValueError as error:
            if "open it again" not in str(error):
                raise
            continue
        if state not in states.read_text():
            raise AssertionError(f"unknown state {state}")
        os.write(pipe, b".")
        time.sleep(0.002)


def fork(run: Callable[[], None]) -> int:
    """Return the process that runs a function and exits with 0, or with 1 after an error."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def die_at(call: int) -> None:
    """Kill this process before or after its n-th call of the operating system that changes or opens files."""
    left = [call]

    def wrap(inner):
        def wrapped(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(*args, **kwargs)

        return wrapped

    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))


class Changes(RuleBasedStateMachine):
    """Steps of a corpus and of a dictionary from ids to versions, in the order of the corpus."""

    root: Path

    @initialize(format=st.sampled_from(FORMATS))
    def create(self, format):
        """Create the corpus, and start the readers."""
        self.directory = self.root / f"run-{len(os.listdir(self.root))}"
        self.directory.mkdir()
        self.path, self.states = self.directory / "corpus", self.directory / "states"
        self.format, self.next, self.choose = format, 0, random.Random(0)
        self.oracle: dict[str, int] = {}
        self.corpus = Corpus.create(self.path, D, torch.float32, format)
        self.announce(self.oracle)
        self.reading, writing = os.pipe()
        os.set_blocking(self.reading, False)
        self.readers = [fork(lambda: read_for_ever(self.path, self.states, writing)) for _ in range(READERS)]
        os.close(writing)

    def stored(self, name: str, version: int) -> torch.Tensor:
        """Return the tokens that the corpus returns for a document."""
        tokens = document(name, version)
        return tokens if self.format is None else lik_ops.quantize(tokens, self.format).dequantize()

    def announce(self, oracle: dict[str, int]) -> None:
        """Tell readers that a state may be committed from now on."""
        with self.states.open("a") as file:
            file.write(digest([(x, self.stored(x, version)) for x, version in oracle.items()]) + "\n")

    def change(self, oracle: dict[str, int], run: Callable[[Corpus], None]) -> None:
        """Run a change, first in a process that is killed, until the change is committed."""
        self.announce(oracle)
        killed = None
        if self.choose.random() < 0.75:
            at = self.choose.randrange(1, 40) if self.choose.random() < 0.8 else None
            killed = self.kill(lambda: run(Corpus.open(self.path)), at)
        now = read_state(self.path)
        known = [digest([(x, self.stored(x, v)) for x, v in each.items()]) for each in (self.oracle, oracle)]
        assert now in known, "neither the documents from before nor from after the change"
        if killed is False:
            assert now == known[1], "a change that returned is committed"
        done = known[0] != known[1] and now == known[1]
        counts["after" if done else "before"] += killed is True
        if self.choose.random() < 0.5:
            self.corpus = Corpus.open(self.path)
        if done:
            self.corpus = Corpus.open(self.path)
        else:
            run(self.corpus)
            files = {x.file for x in self.corpus._snapshot.manifest.shards}
            assert set(os.listdir(self.path)) == files | {"manifest.json", "append.lock"}, "leftovers"
        self.oracle = oracle
        self.check()

    def kill(self, run: Callable[[], None], call: int | None) -> bool:
        """Run in a process that is killed. Return False if it ended before."""

        def child():
            if call is not None:
                die_at(call)
            run()

        pid = fork(child)
        if call is None:
            time.sleep(self.choose.uniform(0, 0.01))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a change failed"
        counts["killed"] += os.WIFSIGNALED(status)
        return os.WIFSIGNALED(status)

    def check(self) -> None:
        """Compare the corpus with the dictionary, and check that the readers are alive."""
        counts["steps"] += 1
        expected = {name: self.stored(name, version) for name, version in self.oracle.items()}
        assert (self.corpus.ids or []) == list(expected), "ids"
        assert all(torch.equal(x, y) for x, y in zip(self.corpus, expected.values(), strict=True)), "tokens"
        for pid in self.readers:
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "a reader failed"

    def pick(self, seed: int, count: int) -> list[str]:
        """Choose documents, and the moment of the kill, so that a step can be repeated."""
        self.choose.seed(seed)
        return self.choose.sample(list(self.oracle), min(count, len(self.oracle)))

    @rule(seed=SEEDS, count=st.integers(1, 6))
    def append(self, seed, count):
        """Append documents."""
        self.choose.seed(seed)
        names = [str(self.next + i) for i in range(count)]
        self.next += count
        new = self.oracle | dict.fromkeys(names, 0)
        self.change(new, lambda corpus: corpus.append([document(x, 0) for x in names], ids=names))

    @precondition(lambda self: self.oracle)
    @rule(seed=SEEDS, count=st.integers(1, 4))
    def delete(self, seed, count):
        """Delete documents."""
        names = self.pick(seed, count)
        new = {x: v for x, v in self.oracle.items() if x not in names}
        self.change(new, lambda corpus: corpus.delete(names))

    @precondition(lambda self: self.oracle)
    @rule(seed=SEEDS, count=st.integers(1, 4))
    def update(self, seed, count):
        """Replace documents."""
        names = self.pick(seed, count)
        versions = {x: (self.oracle[x] + 1) % 16 for x in names}
        new = {x: v for x, v in self.oracle.items() if x not in names} | versions
        made = [document(x, v) for x, v in versions.items()]
        self.change(new, lambda corpus: corpus.update(names, made))

    @rule(seed=SEEDS, most=st.sampled_from((100, 1000, 1 << 20)))
    def compact(self, seed, most):
        """Compact the corpus, with shards of various sizes."""
        self.choose.seed(seed)
        change.MERGED_BYTES = most
        self.change(self.oracle, lambda corpus: corpus.compact())
        assert all(shard.deleted is None for shard in self.corpus._snapshot.manifest.shards)

    @rule()
    def reopen(self):
        """Open the corpus again, with all checks."""
        self.corpus = Corpus.open(self.path, verify=True)
        self.check()

    @precondition(lambda self: self.oracle)
    @rule(k=st.integers(1, 30))
    def search(self, k):
        """Compare a search and its reranking with a search of the dictionary's documents."""
        Q = torch.randn(2, 3, D)
        tokens = [self.stored(x, v) for x, v in self.oracle.items()]
        found = lik_ops.retrieve(Q, self.corpus, k)
        if self.format is None:
            expected = lik_ops.retrieve(Q, tokens, k)
            assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]), "a search"
        again = self.corpus.rerank(Q, found[1].flip(1), k)
        assert torch.equal(again[0], found[0]) and torch.equal(again[1], found[1]), "reranking"
        counts["steps"] += 1

    @precondition(lambda self: self.format is None)
    @rule()
    def convert(self):
        """Convert the corpus to another format."""
        at = self.directory / "converted"
        shutil.rmtree(at, ignore_errors=True)
        small = self.corpus.quantize(at, "int8")
        assert (small.ids or []) == list(self.oracle), "a conversion"
        counts["steps"] += 1

    @precondition(lambda self: self.format is None and self.oracle)
    @rule(seed=SEEDS)
    def pool(self, seed):
        """Pool the corpus in a process that is killed, then in this process. The corpus does not change."""
        self.choose.seed(seed)
        at, before = self.directory / "pooled", sorted(os.listdir(self.path))
        shutil.rmtree(at, ignore_errors=True)
        call = self.choose.randrange(1, 80) if self.choose.random() < 0.8 else None
        killed = self.kill(lambda: Corpus.open(self.path).pool(at, 2), call)
        assert sorted(os.listdir(self.path)) == before, "pooling wrote to its source"
        documents, committed = [self.stored(x, v) for x, v in self.oracle.items()], 0
        if (at / "manifest.json").exists():
            found = Corpus.open(at, verify=True)
            committed = len(found)
            assert committed in self.corpus._snapshot.starts, "a part of a shard"
            if committed:
                self.check_pooled(found, documents[:committed])
        assert killed or committed == len(documents), "a call that returned is complete"
        counts["unfinished_pools"] += committed < len(documents)
        found = self.corpus.pool(at, 2)
        self.check_pooled(found, documents)
        files = {x.file for x in found._snapshot.manifest.shards} | {"manifest.json", "append.lock"}
        # A result that was complete is only opened, so the next writer removes what is left over.
        assert committed == len(documents) or set(os.listdir(at)) == files, "leftovers"
        self.check()

    def check_pooled(self, found, documents):
        """Compare a pooled corpus with pooled documents, and the ids with the first of the dictionary."""
        tokens, bounds = lik_ops.pool_tokens(documents, 2)
        packed, cu_seqlens = found.documents()
        assert torch.equal(packed, tokens) and torch.equal(cu_seqlens, bounds), "pooled tokens"
        assert found.ids == list(self.oracle)[: len(documents)], "ids of pooled documents"

    def teardown(self):
        """End the readers."""
        for pid in getattr(self, "readers", ()):
            with suppress(ProcessLookupError):  # a reader that failed
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if hasattr(self, "reading"):
            while block := os.read(self.reading, 1 << 16):
                counts["reads"] += len(block)
            os.close(self.reading)


def main() -> None:
    root, steps, number = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    Changes.root = root
    options = settings(
        max_examples=1 + steps // STEPS_OF_A_RUN,  # the first run has the simplest steps
        stateful_step_count=STEPS_OF_A_RUN,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    while counts["steps"] < steps:
        machine = seed(number)(type("Run", (Changes,), {}))
        run_state_machine_as_test(machine, settings=options)
        number += 1
    print(", ".join(f"{count} {name}" for name, count in counts.items()), flush=True)


if __name__ == "__main__":
    main()
