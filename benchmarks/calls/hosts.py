"""Measure the losses of host libraries with their own scoring and with lik_ops.

    python -m benchmarks.calls.hosts [--only cached] [--rounds 20] [--seconds 140] [--device cpu] [--out FILE]

The model returns given tokens, so a step is forward and backward of the loss without an encoder. ``scoring_ms`` is the
scores and their backward alone, with as many queries at a time as the loss uses. Only the lik_ops kernels are
compiled. ``eager`` is the formula with every similarity in memory.

Errors of the loss and of both gradients are relative to the same loss with fp64 host scoring. ``difference`` is the
largest difference of an element between the host's scoring and lik_ops. ``--device cpu`` reduces the sizes and only
checks that the script works.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from lik_ops.integrations import pylate
from lik_ops.integrations import sentence_transformers as st

from ..support import common, gpu
from ..support.common import (
    Inputs,
)

Score = Callable[..., Tensor]
FIRST_CALL_SECONDS = 20
OURS, EAGER = "lik_ops", "eager"


@dataclass(frozen=True)
class Case(common.Case):
    what: str = "step"
    host: str = "sentence-transformers"
    chunk: int = 0  # queries per chunk of the loss that caches gradients; 0: the plain loss


CASES = (
    Case("texts", 256, 256, 32, 300),
    Case("texts fp32", 256, 256, 32, 300, dtype="float32"),
    Case("pages", 64, 64, 1024, 1024),
    Case("cached", 256, 256, 128, 2048, chunk=32),
    Case("cached PyLate", 256, 256, 128, 2048, host="PyLate", chunk=32),
    Case("cached, scored at once", 256, 256, 128, 2048, chunk=256),
)


class Host(NamedTuple):
    theirs: Score
    ours: Score
    loss: Callable[[torch.nn.Module, Score, int], torch.nn.Module]  # f(model, scoring, chunk)


def of_sentence_transformers() -> Host:
    losses = importlib.import_module("sentence_transformers.multi_vector_encoder.losses")
    scoring = importlib.import_module("sentence_transformers.multi_vector_encoder.scoring")

    def loss(model: torch.nn.Module, score: Score, chunk: int) -> torch.nn.Module:
        if not chunk:
            return losses.MultiVectorMultipleNegativesRankingLoss(model, similarity_fct=score)
        cached = losses.CachedMultiVectorMultipleNegativesRankingLoss
        return cached(model, similarity_fct=score, mini_batch_size=chunk)

    return Host(scoring.colbert_scores, st.colbert_scores, loss)


def of_pylate() -> Host:
    """Import PyLate.

    PyLate imports `datasets` for a collator, which losses do not need. If `datasets` is missing, an empty module
    replaces it during the import.
    """
    missing = importlib.util.find_spec("datasets") is None
    if missing:
        importlib.import_module("sentence_transformers")  # it checks for the module
        sys.modules["datasets"] = ModuleType("datasets")
        sys.modules["datasets"].__spec__ = importlib.util.spec_from_loader("datasets", None)
    try:
        losses, scores = importlib.import_module("pylate.losses"), importlib.import_module("pylate.scores")
    finally:
        if missing:
            del sys.modules["datasets"]

    def loss(model: torch.nn.Module, score: Score, chunk: int) -> torch.nn.Module:
        if not chunk:
            return losses.Contrastive(model, score_metric=score)
        return losses.CachedContrastive(model, score_metric=score, mini_batch_size=chunk)

    return Host(partial(scores.ColBERTScores(), backend="torch"), pylate.ColBERTScores(), loss)


HOSTS = {"sentence-transformers": (st, of_sentence_transformers), "PyLate": (pylate, of_pylate)}


def why_not(host: str) -> str:
    """Return the reason that a host cannot be measured here, or an empty string."""
    known = HOSTS[host][0]._HOST
    version = common._version(known.distribution)
    if version is None:
        return f"{known.distribution} is not installed"
    old = TorchVersion(version) < TorchVersion(known.at_least)
    return f"{known.distribution} {version} is older than {known.at_least}" if old else ""


class Given(torch.nn.Module):
    """A model that returns the tokens of the features, as leaves if gradients are needed."""

    skiplist: tuple[int, ...] = ()
    do_query_expansion = False

    def __init__(self) -> None:
        super().__init__()
        self.leaves: list[Tensor] = []

    def forward(self, features: Mapping[str, Tensor], task: str | None = None) -> dict[str, Tensor]:
        tokens = features["tokens"]
        if torch.is_grad_enabled():
            tokens = tokens.detach().requires_grad_()
            self.leaves.append(tokens)
        return {"token_embeddings": tokens, "attention_mask": features["attention_mask"]}


def eager(Q: Tensor, D: Tensor, queries_mask: Tensor, documents_mask: Tensor) -> Tensor:
    """Compute `common.eager` with the hosts' signature."""
    return common.eager(Q, D.flatten(0, 1), queries_mask, documents_mask.flatten(0, 1))


def in_double(score: Score) -> Score:
    return lambda Q, D, **masks: score(Q.double(), D.double(), **masks)


def features_of(*sides: Tensor) -> list[dict[str, Tensor]]:
    """Return queries and documents as the features of a loss, with all tokens kept."""
    ids = [torch.ones(x.shape[:2], dtype=torch.long, device=x.device) for x in sides]
    return [{"input_ids": i, "attention_mask": i, "tokens": x} for i, x in zip(ids, sides, strict=True)]


def step(loss: torch.nn.Module, features: list[dict[str, Tensor]]) -> Tensor:
    loss.model.leaves.clear()
    value = loss(features)
    value.backward()
    return value.detach()


def results(loss: torch.nn.Module, features: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the loss and both gradients."""
    value = step(loss, features)
    grads = torch.cat([leaf.grad.flatten() for leaf in loss.model.leaves])
    loss.model.leaves.clear()
    Q, D = grads.split([side["tokens"].numel() for side in features])
    return {"loss": value, "Q": Q, "D": D}


def score_step(score: Score, x: Inputs, chunk: int) -> tuple[Tensor, Tensor]:
    """Return both gradients of the scores, computed for `chunk` queries at a time."""
    Q, D = x.Q.detach().requires_grad_(), x.D.detach().requires_grad_()
    keep = torch.ones(D.shape[:2], dtype=torch.bool, device=D.device)
    for q, upstream in zip(Q.split(chunk or len(Q)), x.grad_scores.split(chunk or len(Q)), strict=True):
        mask = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
        score(q, D[:, None], queries_mask=mask, documents_mask=keep[:, None]).backward(upstream)
    return Q.grad, D.grad


def prepare(taken: Callable, scoring: Callable, expected: dict[str, Tensor]) -> tuple[dict, dict[str, Tensor]]:
    """Compile a contender, check it and measure its memory.

    Returns:
        The record, or the reason for not timing the contender, and the results.
    """
    try:
        _, first = gpu.first_call(lambda: (taken(), scoring()), FIRST_CALL_SECONDS)
        got = results(*taken.args)
        errors = {f"error_{key}": common.relative_error(got[key], want) for key, want in expected.items()}
        peaks = {"peak_mb": gpu.peak_bytes(taken) / 2**20, "scoring_peak_mb": gpu.peak_bytes(scoring) / 2**20}
        return {**errors, **peaks, "first_s": first}, got
    except (Exception, gpu.TooSlowError) as failure:
        return {"failed": gpu.reason(failure)}, {}


def differences(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> dict[str, float]:
    return {key: float((x.float() - ours[key].float()).abs().max()) for key, x in theirs.items() if ours}


def measure(case: Case, compare: Callable[[dict], dict[str, float]], end: float, device: str) -> dict:
    record: dict = {"case": asdict(case), "operations": case.operations, "contenders": {}}
    if why := why_not(case.host) or ("" if time.monotonic() < end else "no time left"):
        return {**record, "skipped": why}
    host, x, expected = HOSTS[case.host][1](), Inputs(case, device), {}
    features = features_of(x.Q, x.D)
    try:
        expected = results(host.loss(Given(), in_double(host.theirs), case.chunk), features)
    except torch.OutOfMemoryError as failure:
        record["reference"] = gpu.reason(failure)
    scores = {case.host: host.theirs, OURS: host.ours, EAGER: eager}
    steps = {name: partial(step, host.loss(Given(), score, case.chunk), features) for name, score in scores.items()}
    scorings = {name: partial(score_step, score, x, case.chunk) for name, score in scores.items()}
    found = {}
    for name in scores:
        record["contenders"][name], found[name] = prepare(steps[name], scorings[name], expected)
    record["difference"] = differences(found[case.host], found[OURS])
    ready = [name for name, got in found.items() if got]
    del expected, found
    for key, functions in (("ms", steps), ("scoring_ms", scorings)):
        for name, ms in compare({name: functions[name] for name in ready}).items() if ready else ():
            record["contenders"][name][key] = ms
    return record


def report(record: dict) -> None:
    case = record["case"]
    difference = ", ".join(f"{key} {x:.1e}" for key, x in record.get("difference", {}).items())
    print(f"{case['name']} ({common.shape_of(case)}): {record.get('skipped') or f'differs by {difference}'}")
    for name, r in record["contenders"].items():
        if "ms" not in r:
            print(f"  {name:22} {'; '.join(f'{k}: {v}' for k, v in r.items())}")
            continue
        errors = " ".join(f"{x:.0e}" for key, x in r.items() if key.startswith("error_"))
        print(
            f"  {name:22} loss {r['ms']:9.3f} ms {r['peak_mb']:8.0f} MB   scoring {r['scoring_ms']:9.3f} ms"
            f" {r['scoring_peak_mb']:8.0f} MB   errors {errors}   first {r['first_s']:.1f} s",
            flush=True,
        )


def cut(case: Case) -> Case:
    """Return the case in the size of a test."""
    return replace(case, Nq=8, Nd=8, Lq=min(case.Lq, 40) // 8, Ld=24, d=16, chunk=min(case.chunk, 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="timed calls per part (default 20)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=140, help="start no case after this time (default 140)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/hosts.json)")
    args = parser.parse_args()
    start = time.monotonic()

    def on_cpu(functions: dict) -> dict[str, float]:
        return {name: t["median"] for name, t in common.interleaved(functions, args.rounds).items()}

    compare = gpu.Timer(args.rounds).compare if args.device == "cuda" else on_cpu
    records = []
    for case in CASES:
        if args.only in case.name:
            sized = case if args.device == "cuda" else cut(case)
            records.append(measure(sized, compare, start + args.seconds, args.device))
            report(records[-1])
            if args.device == "cuda":
                torch.cuda.empty_cache()
    seconds = time.monotonic() - start
    packages = ("sentence-transformers", "pylate", "transformers")
    path = common.write("hosts", records, *packages, path=args.out, rounds=args.rounds, seconds=seconds)
    print(f"{seconds:.0f} s; wrote {path}")


if __name__ == "__main__":
    main()
