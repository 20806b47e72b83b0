"""Search a billion tokens of residual codes exhaustively on one GPU, and a smaller corpus from host memory.

    python -m benchmarks.retrieval.billion [--documents 8000000] [--host 400000] [--out FILE]
    python -m benchmarks.retrieval.billion --device cpu --documents 2000 --host 500    # to see that it works

Documents have 128 tokens of d 128 at 2 bits and are created on the device. Codes are drawn at random from 16,384
centroids, so hardly any two tokens of a tile share one. Residuals are random too.

`floor` is the largest of three times. They are the code bytes over the bandwidth that this run measures, 256 bytes per
token over the L2 bandwidth, and the operations over a bf16 matrix product's rate. Times are wall-clock medians of
whole calls, including the wait for the result.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

import lik_ops

from ..support import common, gpu
from . import retrieve

CENTROIDS, LENGTH, D, NBITS, TOP_K = 16_384, 128, 128, 2, 100
L2_BYTES = 5.5e12  # bytes/s, published measurements of an H100; an H200 has the same cache
GOALS = {1: 60.0, 16: 90.0}  # ms


def documents(count: int, device: str) -> lik_ops.Quantized:
    """Create documents on the device without any copy."""
    generator = torch.Generator(device).manual_seed(0)
    centroids = normalize(torch.randn(CENTROIDS, D, generator=generator, device=device), dim=-1).half()
    weights = torch.tensor([-0.08, -0.025, 0.025, 0.08], device=device)
    codec = lik_ops.ResidualCodec(centroids, weights)
    codes = torch.randint(CENTROIDS, (count, LENGTH), generator=generator, device=device, dtype=torch.int32)
    shape = count, LENGTH, codec.width
    residuals = torch.randint(256, shape, generator=generator, device=device, dtype=torch.uint8)
    return lik_ops.Quantized.of_codes(codes, residuals, codec, torch.bfloat16)


def queries(count: int, device: str) -> Tensor:
    return normalize(torch.randn(count, 32, D, device=device), dim=-1).bfloat16()


def seconds(function: Callable[[], object], rounds: int) -> float:
    """Return the median time of synchronized calls, in seconds."""
    return statistics.median([retrieve.seconds_of(function) for _ in range(rounds + 1)][1:])


def floor(tokens: int, Nq: int, read: int, ceilings: dict[str, float] | None) -> dict[str, float]:
    """Return the smallest possible time of each part on a GPU, in milliseconds."""
    if ceilings is None:
        return {}
    return {
        "bytes": read / ceilings["gbs"] / 1e6,
        "centroids": tokens * 2 * D / L2_BYTES * 1e3,
        "products": 2 * tokens * D * Nq * 32 / ceilings["tflops"] / 1e9,
    }


def resident(count: int, ceilings: dict[str, float] | None, rounds: int, device: str) -> list[dict]:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    made = documents(count, device)
    peak_made = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    assert made.codes is not None
    read = made.data.nbytes + made.codes.nbytes + made.scale.nbytes
    records = []
    for Nq, goal in GOALS.items():
        Q = queries(Nq, device)
        peak = gpu.peak_bytes(lambda Q=Q: lik_ops.retrieve(Q, made, TOP_K))
        scores, indices = lik_ops.retrieve(Q, made, TOP_K)
        some = made[indices[0, :8]]
        again = lik_ops.maxsim(Q[:1].float(), some.dequantize(torch.float32))
        error = float((again[0] - scores[0, :8]).abs().max())
        ms = seconds(lambda Q=Q: lik_ops.retrieve(Q, made, TOP_K), rounds) * 1e3
        parts = floor(count * LENGTH, Nq, read, ceilings)
        record = {"where": "device", "Nq": Nq, "documents": count, "ms": ms, "goal": goal, "floor": parts}
        record |= {"bytes": read, "peak_bytes": peak, "made_peak_bytes": peak_made, "error": error}
        records.append(record)
        report(record)
    return records


def copies(device: str) -> float:
    """Return the rate of copies from one pinned buffer, in bytes per second."""
    pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(pinned, device=device)
    return pinned.nbytes / seconds(lambda: target.copy_(pinned, non_blocking=True), 5)


def in_memory(size: int) -> str | None:
    """Return a directory in memory with room for `size` bytes, else None for the default temporary directory."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > 1.1 * size else None


def from_host(count: int, ceilings: dict[str, float] | None, rounds: int, device: str) -> list[dict]:
    """Measure a `Corpus` on a memory-backed disk. A chunk is copied while the previous one is scored."""
    made = documents(count, device).to("cpu")
    assert made.codes is not None and made.codec is not None
    none = torch.zeros(count)
    packed = lik_ops.Quantized(
        made.data.flatten(0, 1), made.scale.flatten(), made.format, D, made.dtype, codes=made.codes.flatten(),
        codec=made.codec, error=none, norm=none,
    )  # fmt: skip
    read = packed.data.nbytes + made.codes.nbytes + made.scale.nbytes
    copied = {"copies": read / copies(device) * 1e3} if ceilings else {}
    records = []
    with tempfile.TemporaryDirectory(dir=in_memory(read)) as path:
        corpus = lik_ops.Corpus.create(path, D, torch.bfloat16, made.codec)
        corpus.append(packed, lengths=[LENGTH] * count)
        for Nq in GOALS:
            Q = queries(Nq, device)
            ms = seconds(lambda Q=Q: lik_ops.retrieve(Q, corpus, TOP_K, progress=False), rounds) * 1e3
            parts = floor(count * LENGTH, Nq, read, ceilings) | copied
            record = {"where": "host", "Nq": Nq, "documents": count, "ms": ms, "floor": parts, "bytes": read}
            records.append(record)
            report(record)
    return records


def report(record: dict) -> None:
    best, goal = max(record["floor"].values(), default=0), record.get("goal")
    print(
        f"{record['where']}: {record['Nq']} queries, {record['documents']:,} documents: {record['ms']:.1f} ms,"
        f" {record['bytes'] / record['ms'] / 1e6:.0f} GB/s, floor {best:.1f} ms"
        + ("" if goal is None else f", goal {goal:.0f} ms"),
        {k: v for k, v in record.items() if k.endswith("peak_bytes") or k in ("error", "floor")},
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=8_000_000, help="documents in GPU memory (default 8,000,000)")
    parser.add_argument("--host", type=int, default=400_000, help="documents on disk (default 400,000); 0 for none")
    parser.add_argument("--rounds", type=int, default=5, help="timed calls per row (default 5)")
    parser.add_argument("--device", default="cuda", help="cpu: only to check that the script works")
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/billion.json)")
    args = parser.parse_args()
    ceilings = gpu.ceilings(gpu.Timer(5)) if args.device == "cuda" else None
    settings = {"ceilings": ceilings, "rounds": args.rounds}
    torch.cuda.empty_cache()
    records = resident(args.documents, ceilings, args.rounds, args.device)
    path = common.write("billion", records, path=args.out, **settings)
    torch.cuda.empty_cache()
    if args.host:
        records += from_host(args.host, ceilings, args.rounds, args.device)
        path = common.write("billion", records, path=args.out, **settings)
    print("wrote", path)


if __name__ == "__main__":
    main()
