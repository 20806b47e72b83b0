"""Measure `lik_ops.retrieve` against this machine's limits, the peers and chunked eager PyTorch.

    python -m benchmarks.retrieval.retrieve [--only resident] [--documents 1000000] [--seconds 200] [--out FILE]
    python -m benchmarks.retrieval.retrieve --gpus [--out FILE]  # lik_ops.distributed.retrieve over NCCL

Documents have 180 unit tokens of d 128 in bf16, drawn on the GPU in seeded parts. Searches return the best 100.

- ``resident``: the corpus is on the GPU. ``floor`` is the larger time of operations and bytes at the measured
  ceilings, a bf16 matrix product and a plain read of 4 GiB. ``read`` is a kernel that only reads this corpus, timed
  with the same clock and alternating with the contenders. Calls of 16 or more queries are long enough to reach the
  power limit, which the short product of the ceilings does not. ``sustained`` covers this: plain bf16 products of 8192
  rows with the operations of the case, also alternating with the contenders.
- ``subset``: a search of a tenth of the resident corpus, of random documents (``scattered``) and of a range
  (``range``), as a mask and as indices.
  ``full`` is a search of the whole corpus, timed alternating, and the goal is a fifth of its time. Results must have
  the bits of a search of these documents alone.
- ``streamed``: the corpus is in pinned or pageable host memory, or a `lik_ops.Corpus` on disk (in the page cache after
  the first read). ``floor`` is its bytes at the copy rate from one pinned buffer, measured in the same run.
- ``gpus``: one process per GPU. Each holds the whole corpus and searches one part. Efficiency is the time of one GPU
  divided by the time of all GPUs and by their number. For each rank, the search, the agreement at the start and the
  merge at the end are timed alone, along with the host time of a whole call.

Times are wall-clock medians of whole calls, from an idle device to an idle device, with alternating contenders. The
corpus is many times the L2 cache, so nothing is flushed. Before a contender is timed, it is compared with fp32 scores
of two queries and all documents. Streamed and distributed results must have the bits of the resident call. Documents
with nearly equal scores may swap places at lower precision, so ``recall`` is the share of the true best that was
found. The file is rewritten after each case.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lik_ops

from ..support import common, gpu
from ..support.contenders import (
    NOT_INSTALLED,
    PEERS,
    Contender,
    forget_tuning,
)
from . import retrieve_gpus

LQ, LD, DIMENSION, TOP_K, ITEMSIZE = 32, 180, 128, 100, 2
PLAN = (  # slowest last
    ("resident", 1),
    ("subset", 1),
    ("subset", 16),
    ("streamed", 1),
    ("streamed", 16),
    ("disk", 1),
    ("resident", 64),
    ("resident", 16),
    ("resident", 256),
)
TUNED = (1, 64)  # query counts that the peers tune for; 16 and 256 reuse that tuning
GOALS = {("resident", 1): 0.97, ("resident", 64): 0.90, ("streamed", 1): 0.90, ("streamed", 16): 0.90}
SUBSET, SUBSET_GOAL = 0.1, 0.2  # the part of the documents that is searched, and the goal for its part of the time
PART = 20_000  # documents drawn at a time
PEER_CHUNK = 50_000  # documents, below the 2^31 elements that late-interaction-kernels can address
EAGER_BYTES = 2 * 2**30  # bytes of the similarities of a chunk
PRODUCT, SUSTAINED_QUERIES = 8192, 16  # side of a plain product; fewest queries that are compared with it
FIRST_CALL_SECONDS = 40
CASE_SECONDS = 20  # limit of timed rounds
WRONG, EXACT = 1e-2, 1e-5
GIB = 2**30
Best = tuple[Tensor, Tensor]


def unit(*shape: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16)
    return x.div_(x.norm(dim=-1, keepdim=True))


def draw(documents: int, device: str) -> Tensor:
    """Return the corpus ``[documents, 180, 128]``. The first documents do not depend on the count."""
    D = torch.empty((documents, LD, DIMENSION), dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(0)
    for begin in range(0, documents, PART):
        part = D[begin : begin + PART]
        part.copy_(unit(PART, LD, DIMENSION, generator=generator)[: len(part)])
    return D


def draw_queries(count: int, device: str) -> Tensor:
    return unit(count, LQ, DIMENSION, generator=torch.Generator(device).manual_seed(1))


def seconds_of(function: Callable[[], object]) -> float:
    gpu.synchronize()
    start = time.perf_counter()
    function()
    gpu.synchronize()
    return time.perf_counter() - start


def compare(functions: Mapping[str, Callable[[], object]], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return milliseconds of each call over up to `rounds` rounds.

    No round starts after `seconds`, except for the first two. Every second round runs backward, so that the effects of
    one call (warm or cool hardware) do not always reach the same next call.
    """
    end = time.monotonic() + seconds
    times: dict[str, list[float]] = {name: [] for name in functions}
    for done in range(rounds):
        if done >= 2 and time.monotonic() > end:
            break
        for name in list(functions)[:: -1 if done % 2 else 1]:
            times[name].append(seconds_of(functions[name]) * 1e3)
    return times


class Products:
    """Plain products of unit rows, as in the search, with about the given number of operations."""

    def __init__(self, operations: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(2)
        self.a, self.b = (unit(PRODUCT, PRODUCT, generator=generator) for _ in range(2))
        self.out = torch.empty_like(self.a)
        self.count = max(1, round(operations / (2 * PRODUCT**3)))
        self.share = operations / (2 * PRODUCT**3 * self.count)  # scales the time of a call to exactly `operations`

    def __call__(self) -> None:
        for _ in range(self.count):
            torch.matmul(self.a, self.b.T, out=self.out)


# Reference results


def reference_scores(Q: Tensor, D: Tensor, part: int = 8192) -> Tensor:
    """Return all scores ``[Nq, Nd]`` in fp32."""
    each = [torch.einsum("isd,jtd->ijst", Q.float(), x.float()).amax(-1).sum(-1) for x in D.split(part)]
    return torch.cat(each, dim=1)


def checked_queries(Nq: int) -> list[int]:
    return sorted({0, Nq - 1})


def agreement(found: Best, reference: Tensor) -> dict[str, float]:
    """Compare the best documents ``[n, k]`` with the scores `reference` ``[n, Nd]``.

    Returns:
        ``error``: the relative error of the scores. ``loss``: the largest relative loss of a document against the one
        that belongs in its place. ``recall``: the share of the true best that was found.
    """
    scores, indices = found
    best = reference.topk(scores.shape[1], dim=1)
    if bool((indices.sort(dim=1).values.diff(dim=1) == 0).any()):
        return {"error": float("nan"), "loss": float("nan"), "recall": float("nan")}  # a document appears twice
    of_found = reference.gather(1, indices)
    hits = sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(indices, best.indices, strict=True))
    return {
        "error": float(((scores - of_found).abs() / of_found.abs()).max()),
        "loss": float(((best.values - of_found.sort(dim=1, descending=True).values) / best.values.abs()).max()),
        "recall": hits / indices.numel(),
    }


def same_bits(found: Best, expected: Best) -> bool:
    a, b = (scores.view(torch.int32) for scores, _ in (found, expected))
    return torch.equal(a, b) and torch.equal(found[1], expected[1])


# Contenders


def eager_chunked(Q: Tensor, D: Tensor, k: int) -> Best:
    """Search in plain PyTorch with similarities computed in chunks. CPU documents are copied first."""
    chunk = max(1, EAGER_BYTES // (Q.shape[0] * Q.shape[1] * D.shape[1] * ITEMSIZE))
    return best_of_chunks(lambda x: common.eager(Q, x), Q.device, D, k, min(chunk, PEER_CHUNK))


def best_of_chunks(score: Callable[[Tensor], Any], device: torch.device, D: Tensor, k: int, chunk: int) -> Best:
    each = [score(x.to(device, non_blocking=True)) for x in D.split(chunk)]
    best = torch.cat(each, dim=1).topk(k, dim=1)
    return best.values, best.indices


def _late(Q: Tensor, D: Tensor, k: int) -> Contender:
    try:
        from late_interaction_kernels import retrieve
    except ImportError:
        return NOT_INSTALLED
    if D.device != Q.device:
        return "documents on the device of the queries only"
    return lambda: retrieve(Q, D, k, normalize=False, chunk=PEER_CHUNK)


def _flash(Q: Tensor, D: Tensor, k: int) -> Contender:
    try:
        import flash_maxsim
        from flash_maxsim.flash_maxsim_exp import flash_maxsim_streamed
    except ImportError:
        return NOT_INSTALLED
    if D.device != Q.device:
        if len(Q) > 1:
            return "streams for one query"
        return lambda: tuple(x[None] for x in flash_maxsim_streamed(Q[0], D).topk(k))
    one = len(Q) == 1

    def score(x: Tensor) -> Tensor:
        return flash_maxsim.flash_maxsim(Q[0], x)[None] if one else flash_maxsim.flash_maxsim_batched(Q, x)

    return lambda: best_of_chunks(score, Q.device, D, k, PEER_CHUNK)


def others(Q: Tensor, D: Tensor, k: int) -> dict[str, Contender]:
    found = {
        "late-interaction-kernels": _late(Q, D, k),
        "flash-maxsim": _flash(Q, D, k),
        "eager": lambda: eager_chunked(Q, D, k),
    }
    if len(Q) in TUNED:
        forget_tuning()
    return found


# Records


def prepare(contender: Contender, check: Callable[[Best], dict], seconds: float) -> dict:
    """Compile and check a contender, or return the reason for not timing it."""
    if isinstance(contender, str):
        return {"skipped": contender}
    if seconds <= 0:
        return {"skipped": "no time left"}
    try:
        found, first = gpu.first_call(contender, min(seconds, FIRST_CALL_SECONDS))
        entry = check(found)  # type: ignore[arg-type]
        del found
        return entry if "failed" in entry else {**entry, "first_s": first, "peak_mb": gpu.peak_bytes(contender) / 2**20}
    except (Exception, gpu.TooSlowError) as failure:
        return {"failed": gpu.reason(failure)}


def check_scores(reference: Tensor, rows: list[int]) -> Callable[[Best], dict]:
    def check(found: Best) -> dict:
        errors = agreement((found[0][rows], found[1][rows]), reference)
        differences = errors["error"], errors["loss"]
        if not all(x < WRONG for x in differences):
            return {"failed": "wrong: " + ", ".join(f"{k} {v:.1e}" for k, v in errors.items())}
        return {**errors, "exact": all(x < EXACT for x in differences)}

    return check


def measure(
    record: dict,
    found: Mapping[str, Contender],
    check: Mapping[str, Callable[[Best], dict]],
    rounds: int,
    end: float,
    ceilings: Mapping[str, Callable[[], object]] | None = None,
) -> dict:
    """Add the contenders to a record that has its case and its floor.

    `check` is keyed by contender name, with "" as the default. `ceilings` are timed alternating with the contenders,
    and each one becomes ``{name}_ms`` of the record.
    """
    entries = {}
    for name, contender in found.items():
        entries[name] = prepare(contender, check.get(name, check[""]), end - time.monotonic())
        torch.cuda.empty_cache()
    ready = {n: f for n, f in found.items() if not isinstance(f, str) and "first_s" in entries[n]}
    ceilings = ceilings or {}
    try:
        # Run ours next to the ceilings. A GPU that just ran a peer for a second is slower for both.
        ours = {n: f for n, f in ready.items() if n.startswith("lik_ops")}
        in_turn = {**ours, **ceilings, **ready}
        times = compare(in_turn, rounds, min(CASE_SECONDS, max(0.0, end - time.monotonic())))
    except Exception as failure:
        times = {}
        for name in ready:
            entries[name] = {"failed": gpu.reason(failure)}
    for name, ceiling in ceilings.items():
        if name in times:
            record = record | {f"{name}_ms": statistics.median(times.pop(name)) * getattr(ceiling, "share", 1)}
    for name, each in times.items():
        ms = statistics.median(each)
        entries[name] |= {"ms": ms, "best_ms": min(each), "rounds": len(each), "of_floor": record["floor_ms"] / ms}
        for other in ("read", "sustained"):
            if f"{other}_ms" in record:
                entries[name][f"of_{other}"] = record[f"{other}_ms"] / ms
        if "full_ms" in record:
            entries[name]["share_of_full"] = ms / record["full_ms"]
    return record | {"contenders": entries}


def new_record(kind: str, Nq: int, Nd: int, k: int = TOP_K) -> dict:
    case = {"name": f"{kind} {Nq}", "kind": kind, "Nq": Nq, "Nd": Nd, "Lq": LQ, "Ld": LD, "d": DIMENSION}
    tokens = Nd * LD * DIMENSION
    work = {"operations": 2 * Nq * LQ * tokens, "bytes": ITEMSIZE * tokens}
    return {"case": {**case, "dtype": "bfloat16", "top_k": k}, **work, "goal": GOALS.get((kind, Nq))}


def resident(
    Q: Tensor, D: Tensor, ceiling: dict[str, float], read: Callable[[], object] | None, rounds: int, end: float
) -> dict:
    k = min(TOP_K, len(D))
    record = new_record("resident", len(Q), len(D), k)
    record["floor_ms"] = max(record["operations"] / ceiling["tflops"] / 1e9, record["bytes"] / ceiling["gbs"] / 1e6)
    rows = checked_queries(len(Q))
    check = {"": check_scores(reference_scores(Q[rows], D), rows)}
    found: dict[str, Contender] = {"lik_ops": lambda: lik_ops.retrieve(Q, D, k), **others(Q, D, k)}
    ceilings: dict[str, Callable[[], object]] = {} if read is None else {"read": read}
    if len(Q) >= SUSTAINED_QUERIES:
        ceilings["sustained"] = Products(record["operations"], str(Q.device))
    return measure(record, found, check, rounds, end, ceilings)


def subset(Q: Tensor, D: Tensor, ceiling: dict[str, float], rounds: int, end: float) -> dict:
    """Measure searches of a tenth of the documents next to a search of all."""
    k, count = min(TOP_K, len(D)), max(1, round(SUBSET * len(D)))
    record = new_record("subset", len(Q), count, k) | {"most_of_full": SUBSET_GOAL}
    record["floor_ms"] = max(record["operations"] / ceiling["tflops"] / 1e9, record["bytes"] / ceiling["gbs"] / 1e6)
    places = torch.randperm(len(D), generator=torch.Generator().manual_seed(4))[:count]
    found: dict[str, Contender] = {}
    check: dict[str, Callable[[Best], dict]] = {}
    for name, rows in {"scattered": places.sort().values, "range": torch.arange(count)}.items():
        chosen = torch.zeros(len(D), dtype=torch.bool).index_fill_(0, rows, True).to(D.device)
        rows = rows.to(D.device)
        scores, indices = lik_ops.retrieve(Q, D[rows], k)
        best = scores, torch.where(indices < 0, -1, rows[indices])

        def bits(found: Best, best: Best = best) -> dict:
            same = same_bits(tuple(x[:, : best[0].shape[1]] for x in found), best)  # type: ignore[arg-type]
            return {"exact": True} if same else {"failed": "wrong: not the bits of a search of these documents"}

        for given, which in {name: chosen, f"{name}, indices": rows}.items():
            found[f"lik_ops {given}"] = partial(lik_ops.retrieve, Q, D, k, subset=which)
            check[f"lik_ops {given}"] = bits
    check[""] = bits
    return measure(record, found, check, rounds, end, {"full": lambda: lik_ops.retrieve(Q, D, k)})


def copy_gbs(host: Tensor, device: str) -> float:
    """Return the rate of copies from pinned host memory in GB/s, for 1 GiB or the whole tensor."""
    source = host.flatten()[: GIB // host.element_size()]
    target = torch.empty_like(source, device=device)
    times = compare({"": lambda: target.copy_(source, non_blocking=True)}, 7, 5)[""]
    return source.numel() * source.element_size() / statistics.median(times) / 1e6


def streamed(Q: Tensor, host: Mapping[str, Tensor], expected: Best, gbs: float, rounds: int, end: float) -> dict:
    """Measure a corpus in host memory, pinned and in any other form in `host`."""
    pinned = host["pinned"]
    k = min(TOP_K, len(pinned))
    record = new_record("streamed", len(Q), len(pinned), k) | {"copy_gbs": gbs}
    record["floor_ms"] = record["bytes"] / gbs / 1e6

    def bits(found: Best) -> dict:
        if not same_bits(found, expected):
            return {"failed": "wrong: not the bits of the resident call"}
        return {"exact": True}

    def near(found: Best) -> dict:
        error = common.relative_error(found[0], expected[0])
        return {"error": error, "exact": error < EXACT} if error < WRONG else {"failed": f"wrong: error {error:.1e}"}

    ours = {f"lik_ops {name}": partial(lik_ops.retrieve, Q, D, k, progress=False) for name, D in host.items()}
    return measure(record, {**ours, **others(Q, pinned, k)}, {"": near, **dict.fromkeys(ours, bits)}, rounds, end)


def on_disk(Q: Tensor, pinned: Tensor, expected: Best, gbs: float, rounds: int, end: float) -> dict:
    k = min(TOP_K, len(pinned))
    record = new_record("disk", len(Q), len(pinned), k) | {"copy_gbs": gbs}
    record["floor_ms"] = record["bytes"] / gbs / 1e6
    with tempfile.TemporaryDirectory() as path:
        corpus = lik_ops.Corpus.create(path, DIMENSION, torch.bfloat16)
        for part in pinned.split(5000):
            corpus.append(part.flatten(0, 1), lengths=[LD] * len(part))

        def near(found: Best) -> dict:  # another kernel scores packed documents
            error = common.relative_error(found[0], expected[0])
            if not error < WRONG:
                return {"failed": f"wrong: error {error:.1e}"}
            return {"error": error, "exact": error < EXACT, "same_bits": same_bits(found, expected)}

        found: dict[str, Contender] = {"lik_ops Corpus": lambda: lik_ops.retrieve(Q, corpus, k, progress=False)}
        return measure(record, found, {"": near}, rounds, end)


def report(record: dict) -> None:
    case = record["case"]
    print(f"{case['name']} x {case['Nd']}: floor {record['floor_ms']:.3f} ms", end="")
    for other in ("read", "sustained", "full"):
        print(f", {other} {record[f'{other}_ms']:.3f} ms" if f"{other}_ms" in record else "", end="")
    print(f" (goal {record['goal'] or record.get('most_of_full')})")
    for name, r in record["contenders"].items():
        more = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in r.items())
        print(f"  {name:26} {more}", flush=True)


class Run:
    """The corpora that cases share, each created on first use."""

    def __init__(self, args: argparse.Namespace, end: float) -> None:
        self.args, self.end, self.device = args, end, args.device
        self.timer = gpu.Timer(args.rounds) if self.device == "cuda" else None
        self.ceiling = gpu.ceilings(self.timer) if self.timer else {"tflops": 1.0, "gbs": 1.0}

    @cached_property
    def D(self) -> Tensor:
        return draw(max(self.args.documents, self.args.streamed_documents), self.device)

    def read(self) -> None:
        """Read the whole corpus and do nothing else."""
        assert self.timer is not None
        self.timer.read(self.D[: self.args.documents].view(torch.int32).view(-1))

    @cached_property
    def pinned(self) -> Tensor:
        some = self.D[: self.args.streamed_documents]
        return torch.empty(some.shape, dtype=some.dtype, pin_memory=self.device == "cuda").copy_(some)

    @cached_property
    def copy_gbs(self) -> float:
        return copy_gbs(self.pinned, self.device)

    @cached_property
    def pageable(self) -> Tensor:
        return torch.empty(self.pinned.shape, dtype=self.pinned.dtype).copy_(self.pinned)

    def found_by_resident(self, Q: Tensor, documents: int) -> Best:
        return lik_ops.retrieve(Q, self.D[:documents], min(TOP_K, documents))

    def resident(self, Nq: int) -> dict:
        Q, D = draw_queries(Nq, self.device), self.D[: self.args.documents]
        return resident(Q, D, self.ceiling, self.read if self.timer else None, self.args.rounds, self.end)

    def subset(self, Nq: int) -> dict:
        Q, D = draw_queries(Nq, self.device), self.D[: self.args.documents]
        return subset(Q, D, self.ceiling, self.args.rounds, self.end)

    def streamed(self, Nq: int) -> dict:
        Q, host = draw_queries(Nq, self.device), {"pinned": self.pinned, "pageable": self.pageable}
        expected = self.found_by_resident(Q, len(self.pinned))
        return streamed(Q, host, expected, self.copy_gbs, self.args.rounds, self.end)

    def disk(self, Nq: int) -> dict:
        Q, pinned = draw_queries(Nq, self.device), self.pinned[: self.args.disk_documents]
        expected = self.found_by_resident(Q, len(pinned))
        return on_disk(Q, pinned, expected, self.copy_gbs, self.args.rounds, self.end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000, help="on the GPU (default 1000000, 46 GB)")
    parser.add_argument("--streamed-documents", type=int, default=170_000, help="in host memory (default 170000, 8 GB)")
    parser.add_argument("--disk-documents", type=int, default=20_000, help="on the disk (default 20000, 1 GB)")
    parser.add_argument("--rounds", type=int, default=11, help="timed calls per contender (default 11)")
    parser.add_argument("--only", default="", help="cases whose name contains this (resident, streamed, disk)")
    parser.add_argument("--seconds", type=float, default=200, help="start no row after this time (default 200)")
    parser.add_argument("--gpus", action="store_true", help="run one process per GPU instead, over NCCL")
    parser.add_argument("--device", default="cuda", help="cpu: only to check that the script works (--gpus: over gloo)")
    parser.add_argument("--out", type=Path, help="output (default benchmarks/results/retrieve[_gpus].json)")
    args = parser.parse_args()
    start = time.monotonic()
    if args.gpus:
        retrieve_gpus.run(args)
        return
    settings: dict = {"rounds": args.rounds}
    records: list[dict] = []
    path = args.out
    run = Run(args, start + args.seconds)
    settings["ceilings"] = run.ceiling
    print(", ".join(f"{name} {value:.4g}" for name, value in run.ceiling.items()), flush=True)
    for kind, Nq in PLAN:
        name = f"{kind} {Nq}"
        if args.only not in name:
            continue
        try:
            if time.monotonic() > run.end:
                raise TimeoutError("no time left")
            with torch.no_grad():
                records.append(getattr(run, kind)(Nq))
            report(records[-1])
        except Exception as failure:
            records.append({"case": {"name": name, "kind": kind}, "contenders": {}, "failed": gpu.reason(failure)})
            print(f"{name}: {gpu.reason(failure)}", flush=True)
        settings["seconds"] = time.monotonic() - start
        path = common.write("retrieve", records, *PEERS, path=args.out, **settings)
    print(f"{time.monotonic() - start:.0f} s; wrote {path}")


if __name__ == "__main__":
    main()
