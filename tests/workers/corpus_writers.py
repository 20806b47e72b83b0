"""Kill processes that append to a corpus.

Run ``python -m tests.workers.corpus_writers path rounds seed [convert [codes]]``.

Every round forks a process that appends small shards until it is killed at a random moment. The process writes the
number of committed documents to a pipe after each append. The corpus must hold these documents completely, and at most
one shard more. Processes are forked, because importing torch would cost more than all rounds. With ``convert`` they
continue a quantized copy of a corpus, with residual codes for ``codes``.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lik_ops import Corpus, ResidualCodec, quantize
from lik_ops.retrieval.store import files

D = 4
SHARDS = 150  # of the converted corpus
CODEC = ResidualCodec(torch.eye(D), torch.tensor([-1.0, 0, 1, 100]), torch.tensor([-1.0, 0, 50]), normalize=False)
FORMAT: tuple = (CODEC, "token") if sys.argv[5:] == ["codes"] else ("uint8", "document")


def documents(first: int, count: int) -> list[torch.Tensor]:
    """Return documents whose values identify them."""
    return [torch.full(((i * 7) % 5, D), float(i)) for i in range(first, first + count)]


def append_for_ever(path: str, pipe: int) -> None:
    """Append small shards until killed, and write the number of committed documents to the pipe."""
    corpus = Corpus.open(path)
    while True:
        n = len(corpus)
        corpus.append(documents(n, 1 + n % 3), ids=[str(i) for i in range(n, n + 1 + n % 3)])
        os.write(pipe, len(corpus).to_bytes(8, "little"))


def convert(path: str, pipe: int) -> None:
    """Convert the corpus, and write the number of committed documents to the pipe."""
    inner = files.write_manifest

    def telling(directory: Path, manifest) -> None:
        inner(directory, manifest)
        os.write(pipe, sum(shard.documents for shard in manifest.shards).to_bytes(8, "little"))

    files.write_manifest = telling
    Corpus.open(source_of(path)).quantize(path, *FORMAT)
    os.write(pipe, len(Corpus.open(path)).to_bytes(8, "little"))
    time.sleep(60)


def source_of(path: str) -> str:
    """Return the path of the corpus that is converted to `path`."""
    return f"{path}-source"


def kill_once(path: str, seconds: float, write: Callable[[str, int], None] = append_for_ever) -> int:
    """Fork a writer, kill it after a while, and return the number of documents that it reported as committed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            write(path, writing)
        finally:
            os._exit(1)
    os.close(writing)
    told = os.read(reading, 8)  # it has begun to write
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    while block := os.read(reading, 1 << 16):
        told += block
    os.close(reading)
    return int.from_bytes(told[-8:], "little") if told else 0


def check(path: str, least: int) -> int:
    """Check that the corpus is complete, with at least `least` documents and at most three more. Return the number."""
    corpus = Corpus.open(path, verify=True)
    n = len(corpus)
    assert least <= n <= least + 3, (least, n)
    packed, cu_seqlens = corpus.documents()
    expected = documents(0, n)
    assert torch.equal(packed, torch.cat(expected))
    assert cu_seqlens.diff().tolist() == [len(x) for x in expected]
    assert corpus.ids == [str(i) for i in range(n)]
    return n


def content(path: str) -> dict[str, bytes]:
    """Return the bytes of each file of a directory by name."""
    return {x.name: x.read_bytes() for x in Path(path).iterdir()}


def check_converted(path: str, least: int) -> int:
    """Check that the corpus is a prefix of the quantized source, and return its number of documents."""
    corpus = Corpus.open(path, verify=True)
    n = len(corpus)
    assert least <= n <= least + 3, (least, n)
    expected = documents(0, n)
    lengths = torch.tensor([0, *(len(x) for x in expected)])
    made = quantize(torch.cat([torch.empty(0, D), *expected]), *FORMAT, cu_seqlens_d=lengths.cumsum(0))
    found, cu_seqlens = corpus.documents()
    for name, x in made.tensors().items():
        assert torch.equal(getattr(found, name), x), name
    assert torch.equal(cu_seqlens, lengths.cumsum(0)) and corpus.ids == ([str(i) for i in range(n)] if n else None)
    return n


def kill_conversions(path: str, rounds: int, choose: random.Random) -> None:
    """Kill conversions of a corpus at random moments, and check their result after each one."""
    corpus, n = Corpus.create(source_of(path), D, torch.float32), 0
    for i in range(SHARDS):
        corpus.append(documents(n, 1 + i % 3), ids=[str(j) for j in range(n, n + 1 + i % 3)])
        n = len(corpus)
    before, seen = content(source_of(path)), [0]
    for _ in range(rounds):
        told = kill_once(path, choose.uniform(0, 0.02), convert)
        seen.append(check_converted(path, max(told, seen[-1])))
    assert len(set(seen)) > 3, seen
    whole = corpus.quantize(path, *FORMAT)
    check_converted(path, n - 3)
    assert len(whole) == n and content(source_of(path)) == before
    kept = {shard.file for shard in whole._snapshot.manifest.shards}
    codec = [whole._snapshot.manifest.codec.file] if sys.argv[5:] else []
    assert set(os.listdir(path)) == kept | {"manifest.json", "append.lock", *codec}, os.listdir(path)
    print(f"{rounds} killed, at {sorted(set(seen))} of {n} documents", flush=True)


def main() -> None:
    path, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    choose = random.Random(seed)
    if sys.argv[4:5] == ["convert"]:
        kill_conversions(f"{path}/corpus", rounds, choose)
        return
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
