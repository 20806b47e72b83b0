"""Writers of a corpus that are killed: run as ``python -m tests.corpus_writers path rounds seed``.

Every round forks a process that appends small shards until it is killed, at a random moment. What it committed is
written to a pipe after each append; the corpus has to hold that, whole, and at most one shard more. Forked, because
importing torch takes longer than all rounds.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import torch

from lik_ops import Corpus

D = 4


def documents(first: int, count: int) -> list[torch.Tensor]:
    """Documents that tell which they are."""
    return [torch.full(((i * 7) % 5, D), float(i)) for i in range(first, first + count)]


def append_for_ever(path: str, pipe: int) -> None:
    corpus = Corpus.open(path)
    while True:
        n = len(corpus)
        corpus.append(documents(n, 1 + n % 3), ids=[str(i) for i in range(n, n + 1 + n % 3)])
        os.write(pipe, len(corpus).to_bytes(8, "little"))


def kill_once(path: str, seconds: float) -> int:
    """Fork a writer, kill it after a while; the number of documents that it said were committed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            append_for_ever(path, writing)
        finally:
            os._exit(1)
    os.close(writing)
    os.read(reading, 8)  # it has begun to write
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    told = b""
    while block := os.read(reading, 1 << 16):
        told += block
    os.close(reading)
    return int.from_bytes(told[-8:], "little") if told else 0


def check(path: str, least: int) -> int:
    """The corpus is whole and has at least `least` documents, at most one shard of three more; how many it has."""
    corpus = Corpus.open(path, verify=True)
    n = len(corpus)
    assert least <= n <= least + 3, (least, n)
    packed, cu_seqlens = corpus.documents()
    expected = documents(0, n)
    assert torch.equal(packed, torch.cat(expected))
    assert cu_seqlens.diff().tolist() == [len(x) for x in expected]
    assert corpus.ids == [str(i) for i in range(n)]
    return n


def main() -> None:
    path, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    choose = random.Random(seed)
    Corpus.create(path, D, torch.float32)
    n = leftovers = 0
    for _ in range(rounds):
        told = kill_once(path, choose.uniform(0, 0.03))
        shards = {name for name in os.listdir(path) if name.startswith("shard-")}
        n = check(path, max(told, n))
        leftovers += len(shards) != len(Corpus.open(path)._snapshot.manifest.shards)
    Corpus.open(path).append(documents(n, 1), ids=[str(n)])
    names = set(os.listdir(path))
    kept = {shard.file for shard in Corpus.open(path)._snapshot.manifest.shards}
    assert names == kept | {"manifest.json", "append.lock"}, names
    check(path, n + 1)
    print(f"{rounds} killed, {leftovers} left something behind, {n + 1} documents", flush=True)


if __name__ == "__main__":
    main()
