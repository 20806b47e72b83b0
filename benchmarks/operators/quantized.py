"""Measure speed and accuracy of quantized documents on this GPU: formats, full precision and peers.

    python -m benchmarks.operators.quantized [--only pages] [--own] [--rounds 30] [--seconds 400] [--out FILE]

"x int8" marks documents whose queries are rounded to int8 (``query="int8"``), and "x fp8" to FP8.

``quantized`` rows hold median device times, each call on a flushed L2 cache. Peers are tuned for each shape.
``quantize_ms`` are the times of `lik_ops.quantize`. Rows of pooled documents have as many tokens as a document of 180
tokens after `lik_ops.pool_tokens`. `error`
is the largest difference from fp64 scores of full precision, relative to the largest score. `spearman` is the rank
correlation with these scores, and ``recall`` is the share of the best 10 or 100 that is found. They use the documents
of one query, at most `LOOKED_AT`. `fidelity.py` has the same figures for real tokens.

``search`` rows hold wall-clock times of `lik_ops.retrieve` for the best 10 of a query. They search full precision,
int8 alone, and both stages (``coarse=``), with documents on the device and pinned on the host. `rescored` is the share
of documents that the second stage scores. Tokens are either random, with nearly equal scores, or lean to their
document's topic, like tokens of trained encoders.

No measurement starts after `--seconds`. The file is rewritten after each row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import lik_ops

from ..retrieval import fidelity, retrieve
from ..support import common, contenders, gpu
from ..support.common import (
    Case,
    Inputs,
)
from ..support.runs import (
    compile_first,
)

LOOKED_AT = 4096
BEST = 10  # documents of a search
TOPIC = 0.6  # share of its document's topic in a token's squared norm
CALL_SECONDS = 60  # default limit of a first call, which compiles and tunes
PAGES = {"Lq": 1024, "Ld": 1024}
FORMATS = {
    "int8": ("int8", "token", "half"),
    "int8 document": ("int8", "document", "half"),
    "int8 x int8": ("int8", "token", "int8"),
    "int8 document x int8": ("int8", "document", "int8"),
    "uint8": ("uint8", "token", "half"),
    "fp8_e4m3": ("fp8_e4m3", "token", "half"),
    "fp8_e4m3 x fp8": ("fp8_e4m3", "token", "fp8"),
    "fp8_e4m3 document x fp8": ("fp8_e4m3", "document", "fp8"),
    "binary": ("binary", "token", "half"),
    "binary document": ("binary", "document", "half"),
    "binary document x int8": ("binary", "document", "int8"),
    **{format: (format, "token", "half") for format in ("rq4", "rq2", "rq1")},
}
RATIO_GOALS = {"rq4": ("int8", 1.3), "rq1": ("binary", 1.0)}  # the time of a format, divided by the time of another
POOLED, FACTORS = ("rq2",), (2, 3, 4, 8)  # formats of pooled documents, and the tokens of each pooled token


@dataclass(frozen=True)
class Row:
    """A case and the time goals of its formats."""

    case: Case
    goals: dict[str, float] = field(default_factory=dict)
    formats: tuple[str, ...] = tuple(FORMATS)


def _goals(document: float, token: float) -> dict[str, float]:
    of_int8 = {
        name: token if scale == "token" else document for name, (kept, scale, _) in FORMATS.items() if kept == "int8"
    }
    return of_int8 | {"fp8_e4m3": token}


ROWS = (
    Row(Case("quantized 1x1k", 1, 1000, 32, 300), _goals(0.017, 0.018)),
    Row(Case("quantized 1x100k", 1, 100_000, 32, 180), _goals(0.56, 0.58)),
    Row(Case("quantized 1x1k Ld 1024", 1, 1000, 32, 1024), _goals(0.038, 0.040)),
    Row(Case("quantized pages 1x1k", 1, 1000, **PAGES), _goals(0.21, 0.24)),
    Row(Case("quantized 4x1k", 4, 1000, 32, 300)),
    Row(Case("quantized 16x1k", 16, 1000, 32, 300), _goals(0.042, 0.047)),
    Row(Case("quantized pages 64x64", 64, 64, **PAGES), _goals(0.82, 0.95)),
    *(Row(Case(f"quantized pool {n} 1x100k", 1, 100_000, 32, 180 // n), formats=POOLED) for n in FACTORS),
)


@dataclass(frozen=True)
class Found:
    """A search of one query among documents of 180 tokens."""

    tokens: str  # "random" or "topics"
    documents: int

    @property
    def name(self) -> str:
        return f"search {self.tokens} {self.documents}"


SEARCHES = tuple(Found(tokens, n) for n in (100_000, 1_000_000) for tokens in ("topics", "random"))


def _peers(x: Inputs) -> dict[str, Callable[[], object]]:
    """Return the peers, with documents quantized by their own functions, and queries if the kernel needs it."""
    found: dict[str, Callable[[], object]] = {}
    try:
        from flash_maxsim import flash_maxsim_quant as flash

        if len(x.Q) == 1:
            data, scales = flash.quantize_int8_symmetric(x.D.half())
            Q, q_data = x.Q[0].half(), flash.quantize_query_int8(x.Q[0])
            found["flash-maxsim int8 x half"] = lambda: flash.flash_maxsim_int8_symmetric(Q, data, scales)
            found["flash-maxsim int8 x int8"] = lambda: flash.flash_maxsim_int8x8(Q, data, scales, *q_data)
    except ImportError:
        pass
    try:
        from late_interaction_kernels import fp8

        for name in ("tensor", "token"):
            quantize = getattr(fp8, f"quantize_fp8_per_{name}")
            (Q8, scale_Q), (D8, scale_D) = quantize(x.Q), quantize(x.D)
            found[f"late-interaction-kernels fp8 {name}"] = partial(
                fp8.maxsim_inference_fp8, Q8, D8, scale_Q=scale_Q, scale_D=scale_D
            )
    except ImportError:
        pass
    return found


def exact_scores(x: Inputs) -> Tensor:
    """Return fp64 scores ``[1, n]`` of the first query and its first documents."""
    parts = [lik_ops.reference.maxsim(x.Q[:1].double(), part.double())[0] for part in x.D[:LOOKED_AT].split(64)]
    return torch.cat(parts)[None]


def quality_of(scores: object, exact: Tensor) -> dict[str, float]:
    """Return the errors and the rank quality of scores."""
    assert isinstance(scores, Tensor)
    first = scores.reshape(1, -1) if scores.dim() == 1 else scores[:1]
    return fidelity.compared(first[:, :LOOKED_AT].double(), exact)


def measure(
    row: Row, timer: gpu.Timer, device: str = "cuda", own: bool = False, call_seconds: float = CALL_SECONDS
) -> dict:
    x = Inputs(row.case, device)
    formats = {name: FORMATS[name] for name in row.formats}
    made = {name: lik_ops.quantize(x.D, *how, query=query) for name, (*how, query) in formats.items()}
    functions: dict[str, Callable[[], object]] = {"full": lambda: lik_ops.maxsim(x.Q, x.D)}
    functions |= {name: (lambda D=D: lik_ops.maxsim(x.Q, D)) for name, D in made.items()}
    functions |= {} if own or row.formats == POOLED else _peers(x)
    contenders.forget_tuning()  # it is from another shape
    failed: dict[str, str] = {}
    for name, function in list(functions.items()):
        try:
            gpu.first_call(function, call_seconds)
        except (Exception, gpu.TooSlowError) as failure:
            if name in FORMATS or name == "full":
                raise
            failed[name] = gpu.reason(failure)
            del functions[name]
    ms = timer.compare(functions)
    exact = exact_scores(x)
    quality = {name: quality_of(function(), exact) for name, function in functions.items()}
    bytes_each = {name: D.nbytes for name, D in made.items()} | {"full": x.D.numel() * x.D.element_size()}
    record = {"case": asdict(row.case), "goals": row.goals, "ms": ms, "quality": quality, "bytes": bytes_each}
    encoders = {
        name: partial(lik_ops.quantize, x.D, *how) for name, (*how, query) in formats.items() if query == "half"
    }
    return record | {"failed": failed, "quantize_ms": timer.compare(encoders)}


def drawn(tokens: str, documents: int, device: str) -> tuple[Tensor, Tensor]:
    """Return a query and documents of unit tokens."""
    Q, D = retrieve.draw_queries(1, device), retrieve.draw(documents, device)
    if tokens == "topics":
        topics = retrieve.unit(documents, 1, retrieve.DIMENSION, generator=torch.Generator(device).manual_seed(3))
        for x, topic in ((Q, topics[:1]), *zip(D.split(retrieve.PART), topics.split(retrieve.PART), strict=True)):
            x.mul_((1 - TOPIC) ** 0.5).add_(topic, alpha=TOPIC**0.5)
            x.div_(x.norm(dim=-1, keepdim=True))
    return Q, D


def on_host(D: Tensor) -> Tensor:
    """Return a copy in pinned memory, or in plain memory without a device."""
    host = torch.empty(D.shape, dtype=D.dtype, pin_memory=D.is_cuda)
    return host.copy_(D)


def search(of: Found, rounds: int, device: str, end: float) -> dict:
    """Measure searches, check that they agree, and count the documents that the second stage scores."""
    Q, D = drawn(of.tokens, of.documents, device)
    coarse = lik_ops.quantize(D, "int8")
    exact = lik_ops.retrieve(Q, D, BEST)
    calls: dict[str, Callable[[], object]] = {
        "full": lambda: lik_ops.retrieve(Q, D, BEST),
        "int8": lambda: lik_ops.retrieve(Q, coarse, BEST),
        "both": lambda: lik_ops.retrieve(Q, D, BEST, coarse=coarse),
    }
    ms = _timed(calls, rounds, end)
    two = lik_ops.retrieve(Q, D, BEST, coarse=coarse)
    one = lik_ops.retrieve(Q, coarse, BEST)[1]
    host, D = on_host(D), None  # type: ignore[assignment]
    calls = {
        "full on the host": lambda: lik_ops.retrieve(Q, host, BEST),
        "both, full on the host": lambda: lik_ops.retrieve(Q, host, BEST, coarse=coarse),
    }
    ms |= _timed(calls, min(rounds, 3), end)
    for found in (two, lik_ops.retrieve(Q, host, BEST, coarse=coarse)):
        if not (torch.equal(found[0], exact[0]) and torch.equal(found[1], exact[1])):
            raise AssertionError(f"{of.name}: two stages found something else")
    same = (one.unsqueeze(-1) == exact[1].unsqueeze(-2)).any(-1).double().mean()
    rescored = float(two.rescored.double().mean()) / of.documents
    return {"case": {"name": of.name, **asdict(of)}, "ms": ms, "rescored": rescored, "recall": float(same)}


def _timed(calls: dict[str, Callable[[], object]], rounds: int, end: float) -> dict[str, float]:
    for call in calls.values():
        gpu.first_call(call, CALL_SECONDS)
    times = retrieve.compare(calls, rounds, max(0.0, end - time.monotonic()))
    return {name: statistics.median(t) for name, t in times.items()}


def report(r: dict, goals: dict[str, float]) -> None:
    print(r["case"]["name"], r.get("failed") or "")
    for name, ms in r.get("ms", {}).items():
        goal = f", goal {goals[name]:.3f}" if name in goals else ""
        q = r.get("quality", {}).get(name)
        text = f"; {q['error']:.1e}, {q['spearman']:.4f}, recall {q['recall10']:.2f} {q['recall100']:.2f}" if q else ""
        other, most = RATIO_GOALS.get(name, ("", 0.0))
        ratio = f", {ms / r['ms'][other]:.2f} of {other}, goal {most}" if other in r["ms"] else ""
        print(f"  {name:36} {ms:.4f} ms{goal}{ratio}{text}", flush=True)
    if "rescored" in r:
        print(f"  rescored {r['rescored']:.4%}, recall of int8 alone {r['recall']:.2f}", flush=True)


def planned(only: str) -> Iterator[Row | Found]:
    yield from (row for row in ROWS if only in row.case.name)
    yield from (found for found in SEARCHES if only in found.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="timed calls per row (default 30)")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--own", action="store_true", help="skip the peers, whose tuning is most of the run time")
    parser.add_argument("--call", type=float, default=CALL_SECONDS, help="seconds for a first call (default 60)")
    parser.add_argument("--seconds", type=float, default=400, help="start no row after this time (default 400)")
    parser.add_argument("--device", default="cuda", help="cpu: only to check that the script works")
    parser.add_argument("--first", type=float, default=0, help="seconds to compile all rows in parallel (default 0)")
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/quantized.json)")
    args = parser.parse_args()
    compile_first((row.name if isinstance(row, Found) else row.case.name for row in planned(args.only)), args.first)
    end, records, path = time.monotonic() + args.seconds, list[dict](), args.out
    timer = gpu.Timer(args.rounds) if args.device == "cuda" else None
    settings = {"rounds": args.rounds, "ceilings": gpu.ceilings(timer) if timer else None}
    for row in planned(args.only):
        name = row.name if isinstance(row, Found) else row.case.name
        try:
            if time.monotonic() > end:
                raise TimeoutError("no time left")
            with torch.no_grad():
                if isinstance(row, Found):
                    records.append(search(row, args.rounds, args.device, end))
                elif timer is None:
                    raise TimeoutError("kernels are timed on a GPU")
                else:
                    records.append(measure(row, timer, own=args.own, call_seconds=args.call))
        except Exception as failure:
            records.append({"case": {"name": name}, "failed": gpu.reason(failure)})
        report(records[-1], {} if isinstance(row, Found) else row.goals)
        if args.device == "cuda":
            torch.cuda.empty_cache()
        path = common.write("quantized", records, *contenders.PEERS, path=args.out, **settings)
    print("wrote", path)


if __name__ == "__main__":
    main()
