"""Measure recall and time of staged searches of residual codes, compared with exhaustive ones and fast-plaid.

    python -m benchmarks.retrieval.staged [--only "200,000"] [--rounds 20] [--seconds 540] [--out FILE]
    python -m benchmarks.retrieval.staged --device cpu --sizes 300 --centroids 64 --queries 4    # to see that it works

Documents have 120 unit tokens of d 128 in clusters. Each document has 12 of 20,000 topics, and each token is one of
these topics plus noise. Queries are 32 tokens of a document with more noise. Documents are drawn in parts and stored
as codes only, after their full tokens are scored. `recall` is the share of the ten best documents that is found. The
ten best are by full precision, or by an exhaustive search of the codes.

fast-plaid searches the same codes from an index written by `lik_ops.write_index`. It runs in a separate process, which
may fail. Times are wall-clock medians of whole calls, from an idle device to an idle device, with 1 query and with 64.
No measurement starts after `--seconds`. The file is rewritten after each row, and before fast-plaid runs on it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import lik_ops

from ..support import common, gpu
from . import retrieve

LENGTH, D, LQ = 120, 128, 32
TOPICS, TOPICS_EACH, NOISE, QUERY_NOISE = 20_000, 12, 0.6, 0.5  # noise norms, relative to a topic of norm 1
TOP_K, PART = 10, 20_000
PEER_MODULE = "benchmarks.retrieval.staged"  # run in a process of its own for a peer
TRAINED = 30_000  # most documents for training a codec
STAGES = ((1, 256), (2, 1024), (4, 4096), (8, 4096), (None, 4096))  # n_probe, n_candidates
PEER = "fast-plaid"
PEER_STAGES = ((4, 4096), (8, 4096), (32, 8192))  # n_ivf_probe, n_full_scores; the second is its default
FIRST_CALL_SECONDS, ROW_SECONDS = 60, 40


@dataclass(frozen=True)
class Row:
    documents: int
    nbits: int

    @property
    def name(self) -> str:
        return f"{self.documents:,} documents, {self.nbits} bits"


ROWS = tuple(Row(*x) for x in ((20_000, 2), (20_000, 4), (200_000, 2), (200_000, 4), (2_000_000, 2)))


def _drawn(documents: int, device: str) -> Iterator[Tensor]:
    """Yield tokens ``[n, 120, 128]`` in parts. The topics do not depend on the number of documents."""
    generator = torch.Generator(device).manual_seed(0)
    centers = normalize(torch.randn(TOPICS, D, generator=generator, device=device), dim=-1)
    for begin in range(0, documents, PART):
        count = min(PART, documents - begin)
        topics = torch.randint(TOPICS, (count, TOPICS_EACH), generator=generator, device=device)
        which = torch.randint(TOPICS_EACH, (count, LENGTH), generator=generator, device=device)
        noise = torch.randn(count, LENGTH, D, generator=generator, device=device, dtype=torch.bfloat16)
        yield normalize(noise.mul_(NOISE / D**0.5).add_(centers[topics.gather(1, which)].bfloat16()), dim=-1)


def _queries(count: int, documents: int, device: str) -> Tensor:
    first = next(_drawn(documents, device))
    generator = torch.Generator(device).manual_seed(1)
    some = torch.randint(len(first), (count,), generator=generator, device=device)
    noise = torch.randn(count, LQ, D, generator=generator, device=device, dtype=torch.bfloat16)
    return normalize(first[some, :LQ] + noise * (QUERY_NOISE / D**0.5), dim=-1)


def made(row: Row, n_centroids: int, Q: Tensor, device: str) -> tuple[lik_ops.Quantized, Tensor]:
    """Return the documents as codes, and the best of them in full precision."""
    some = torch.cat(list(_drawn(min(row.documents, TRAINED), device)))
    codec = lik_ops.ResidualCodec.train(some, row.nbits, n_centroids, iterations=4)
    del some
    shape = row.documents, LENGTH
    data = torch.empty((*shape, codec.width), dtype=torch.uint8, device=device)
    codes = torch.empty(shape, dtype=torch.int32, device=device)
    scale = torch.empty(shape, device=device)
    best: list[tuple[Tensor, Tensor]] = []
    for n, part in enumerate(_drawn(row.documents, device)):
        small, at = lik_ops.quantize(part, codec), slice(n * PART, n * PART + len(part))
        assert small.codes is not None
        data[at], codes[at], scale[at] = small.data, small.codes, small.scale
        scores, indices = lik_ops.retrieve(Q, part, TOP_K)
        best.append((scores, indices + n * PART))
    scores, indices = (torch.cat(x, 1) for x in zip(*best, strict=True))
    truth = indices.gather(1, scores.topk(min(TOP_K, row.documents)).indices)
    format: Any = codec.format
    return lik_ops.Quantized(data, scale, format, D, Q.dtype, codes=codes, codec=codec), truth


def recall(found: Tensor, expected: Tensor) -> float:
    """Return the share of the expected documents ``[n, k]`` that was found."""
    return float((found.unsqueeze(-1) == expected.unsqueeze(-2)).any(-2).double().mean())


def _timed(calls: dict[str, Callable[[], object]], rounds: int, end: float) -> dict[str, float]:
    for call in calls.values():
        gpu.first_call(call, FIRST_CALL_SECONDS)
    times = retrieve.compare(calls, rounds, max(0.0, min(ROW_SECONDS, end - time.monotonic())))
    return {name: statistics.median(t) for name, t in times.items()}


def measure(row: Row, documents: lik_ops.Quantized, Q: Tensor, truth: Tensor, rounds: int, end: float) -> dict:
    """Measure an exhaustive search and staged searches."""
    options: dict[str, dict] = {"exhaustive": {}}
    for probe, kept in STAGES:
        options[f"{probe or 'all'} probes, {kept} kept"] = {"n_probe": probe, "n_candidates": kept}
    exhaustive = lik_ops.retrieve(Q, documents, TOP_K)[1]
    record: dict[str, Any] = {"case": asdict(row) | {"name": row.name}, "searches": {}}
    for Nq in sorted({1, len(Q)}):
        calls = {
            name: (lambda how=how, q=Q[:Nq]: lik_ops.retrieve(q, documents, TOP_K, **how))
            for name, how in options.items()
        }
        for name, ms in _timed(calls, rounds, end).items():
            record["searches"].setdefault(name, {})[f"ms{Nq}"] = ms
    for name, how in options.items():
        found = lik_ops.retrieve(Q, documents, TOP_K, **how)[1]
        of = record["searches"][name]
        of |= {"recall": recall(found, truth), "recall_codes": recall(found, exhaustive)}
        of["peak_bytes"] = gpu.peak_bytes(lambda how=how: lik_ops.retrieve(Q, documents, TOP_K, **how))
    record["bytes"] = documents.nbytes
    return record


# fast-plaid


def peer(documents: lik_ops.Quantized, Q: Tensor, truth: Tensor, rounds: int, end: float) -> dict[str, Any]:
    """Measure fast-plaid on the same codes, or return the reason for a missing result."""
    if common._version(PEER) is None:
        return {"failed": "not installed"}
    exhaustive = lik_ops.retrieve(Q, documents, TOP_K)[1]
    flat = lik_ops.Quantized(
        documents.data.flatten(0, 1), documents.scale.flatten(), documents.format, D, documents.dtype,
        codes=documents.codes.flatten(), codec=documents.codec,
    )  # fmt: skip
    bounds = torch.arange(0, len(flat) + 1, LENGTH, device=Q.device)
    with tempfile.TemporaryDirectory() as path:
        lik_ops.write_index(Path(path) / "index", lik_ops.Index(flat, bounds))
        torch.save(Q.float().cpu(), Path(path) / "queries.pt")
        command = [
            sys.executable,
            "-m",
            PEER_MODULE,
            "--peer",
            path,
            "--device",
            Q.device.type,
            "--rounds",
            str(rounds),
        ]
        left = max(1.0, end - time.monotonic())
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"status {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}")
        searches = json.loads((Path(path) / "found.json").read_text())
    for of in searches.values():
        found = torch.tensor(of.pop("found"), device=Q.device)
        of |= {"recall": recall(found, truth), "recall_codes": recall(found, exhaustive)}
    return searches


def search_as_peer(path: Path, device: str, rounds: int) -> None:
    """Search the index at `path` in this process and write times and documents to a file there."""
    from fast_plaid import search

    index, Q = search.FastPlaid(index=str(path / "index"), device=device), torch.load(path / "queries.pt")
    searches: dict[str, dict[str, Any]] = {}
    for probe, kept in PEER_STAGES:
        options = {"top_k": TOP_K, "n_ivf_probe": probe, "n_full_scores": kept, "show_progress": False}
        calls = {f"ms{n}": (lambda q=Q[:n], o=options: index.search(q, **o)) for n in {1, len(Q)}}
        entry: dict[str, Any] = dict(_timed(calls, rounds, time.monotonic() + ROW_SECONDS))
        ranked = [[document for document, _ in best] for best in index.search(Q, **options)]
        entry["found"] = [documents + [-1] * (TOP_K - len(documents)) for documents in ranked]
        searches[f"{PEER}, {probe} probes, {kept} kept"] = entry
    (path / "found.json").write_text(json.dumps(searches))


def report(record: dict) -> None:
    print(record["case"]["name"], record.get("failed") or "", record.get("peer_failed") or "")
    for name, of in record.get("searches", {}).items():
        ms = ", ".join(f"{key[2:]} in {value:.3f} ms" for key, value in of.items() if key.startswith("ms"))
        print(f"  {name:34} {ms}; recall {of['recall']:.3f}, of codes {of['recall_codes']:.3f}", flush=True)


def run(args: argparse.Namespace, rows: list[Row]) -> Path:
    end, records = time.monotonic() + args.seconds, list[dict]()
    settings = {"rounds": args.rounds, "centroids": args.centroids, "device": args.device}

    def written() -> Path:
        return common.write("staged", records, PEER, path=args.out, **settings)

    for row in rows:
        records.append({"case": asdict(row) | {"name": row.name}})
        try:
            if time.monotonic() > end:
                raise TimeoutError("no time left")
            start = time.monotonic()
            Q = _queries(args.queries, row.documents, args.device)
            documents, truth = made(row, args.centroids, Q, args.device)
            seconds = time.monotonic() - start
            records[-1] = measure(row, documents, Q, truth, args.rounds, end) | {"made_seconds": seconds}
            written()
        except (Exception, gpu.TooSlowError) as failure:
            records[-1]["failed"] = gpu.reason(failure)
        else:
            try:
                found = peer(documents, Q, truth, args.rounds, end)
                records[-1] |= {"peer_failed": found["failed"]} if "failed" in found else {}
                records[-1]["searches"] |= {} if "failed" in found else found
            except Exception as failure:
                records[-1]["peer_failed"] = gpu.reason(failure)
        documents = Q = truth = None  # type: ignore[assignment]
        if args.device == "cuda":
            torch.cuda.empty_cache()
        report(records[-1])
        path = written()
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="timed calls per search (default 20)")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--sizes", type=int, nargs="*", help="document counts to use instead, with 2 bits")
    parser.add_argument("--centroids", type=int, default=16_384, help="number of centroids (default 16,384)")
    parser.add_argument("--queries", type=int, default=64, help="size of the query batch (default 64)")
    parser.add_argument("--seconds", type=float, default=540, help="start no row after this time (default 540)")
    parser.add_argument("--device", default="cuda", help="cpu: only to check that the script works")
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/staged.json)")
    args = parser.parse_args()
    if args.peer is not None:
        return search_as_peer(args.peer, args.device, args.rounds)
    rows = [Row(n, 2) for n in args.sizes] if args.sizes else [row for row in ROWS if args.only in row.name]
    with torch.no_grad():
        print("wrote", run(args, rows))
    return None


if __name__ == "__main__":
    main()
