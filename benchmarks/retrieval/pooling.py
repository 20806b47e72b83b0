"""Measure token pooling: `lik_ops.pool_tokens` next to scipy's Ward clustering, one document at a time.

    python -m benchmarks.retrieval.pooling [--device cuda] [--documents 1000] [--hosts 20] [--rounds 5] [--out FILE]

Times are milliseconds per document. ``scipy`` is the calculation of sentence-transformers and PyLate: distances by
torch, ``linkage`` and ``fcluster`` by scipy, and means by torch, on the CPU. It is measured on `--hosts` documents.
``same`` is the share of these documents for which both find the same clusters. Tokens lean to the topics of their
document, like tokens of trained encoders.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

import lik_ops

from ..support import common

DIMENSION, FACTOR = 128, 2
LENGTHS = (300, 1024)
TOPIC_TOKENS = 8  # tokens per topic of a document
METHODS = ("hierarchical", "kmeans", "sequential")


def draw(documents: int, length: int, device: str) -> Tensor:
    """Return documents ``[documents, length, DIMENSION]`` in fp32 on the device."""
    g = torch.Generator(device).manual_seed(length)
    topics = torch.randn(documents, max(1, length // TOPIC_TOKENS), DIMENSION, generator=g, device=device)
    of_token = torch.randint(0, topics.shape[1], (documents, length), generator=g, device=device)
    tokens = topics.gather(1, of_token[..., None].expand(-1, -1, DIMENSION))
    return normalize(tokens.add_(torch.randn(tokens.shape, generator=g, device=device)), dim=-1)


def pool_by_scipy(tokens: Tensor) -> Tensor:
    """Pool one document on the CPU."""
    from scipy.cluster.hierarchy import fcluster, linkage

    distances = (1 - tokens @ tokens.T).numpy()
    tree = linkage(distances[np.triu_indices(len(tokens), 1)], method="ward")
    labels = torch.from_numpy(fcluster(tree, t=len(tokens) // FACTOR, criterion="maxclust").astype(np.int64)) - 1
    sums = tokens.new_zeros(int(labels.max()) + 1, tokens.shape[1]).index_add_(0, labels, tokens)
    return sums / labels.bincount()[:, None]


def time_per_document(call: Callable[[], object], documents: int, rounds: int) -> float:
    """Return the median milliseconds per document, after one call that is not counted."""
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start) / documents)
    return statistics.median(times)


def measure(length: int, args: argparse.Namespace) -> dict:
    D = draw(args.documents, length, args.device)
    calls = {m: (lambda m=m: lik_ops.pool_tokens(D, FACTOR, method=m, num_protected=0)) for m in METHODS}
    ms = {name: time_per_document(call, args.documents, args.rounds) for name, call in calls.items()}
    hosts = D[: args.hosts].cpu()
    ms["scipy"] = time_per_document(lambda: [pool_by_scipy(x) for x in hosts], len(hosts), 1)
    found = lik_ops.unpack(*calls["hierarchical"]())  # type: ignore[misc]
    same = [_has_same_clusters(a.cpu(), pool_by_scipy(b)) for a, b in zip(found, hosts, strict=False)]
    record = {"case": {"name": f"pool {length}", "documents": args.documents, "length": length, "d": DIMENSION}}
    record |= {"device": args.device, "ms": ms, "speedup": ms["scipy"] / ms["hierarchical"]}
    record["same"] = sum(same) / len(same)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        calls["hierarchical"]()
        record["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return record


def _has_same_clusters(found: Tensor, expected: Tensor) -> bool:
    """Return whether two sets of tokens are equal up to rounding, in any order."""
    if found.shape != expected.shape:
        return False
    return bool((torch.cdist(found, expected).amin(1) < 1e-3).all())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--hosts", type=int, default=20, help="documents that scipy pools (default 20)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/pooling.json)")
    args = parser.parse_args()
    records = []
    for length in args.lengths:
        records.append(measure(length, args))
        r = records[-1]
        times = ", ".join(f"{name} {ms:.4f}" for name, ms in r["ms"].items())
        print(
            f"{r['case']['name']:12} {times} ms per document: {r['speedup']:.1f} times, {r['same']:.0%} same",
            flush=True,
        )
        common.write("pooling", records, "scipy", path=args.out, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
