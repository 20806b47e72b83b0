"""Measure the accuracy of document formats, for random unit tokens and for tokens of the examples' encoders.

    python -m benchmarks.retrieval.fidelity [--only hashed] [--queries 300] [--steps 100] [--out FILE]

The known items are as in `examples/search_docstrings.py`. The first paragraphs of 300 docstrings are queries, and the
rest of 1,000 docstrings are searched. The encoders are the hashed one and the encoder of
`examples/train_colbert.py` after `--steps` steps. Each format is compared with full precision:

- MRR@10 of the known items; random tokens have none
- ``recall``: the share of the true 10 or 100 best documents that the format ranks among its own best
- ``spearman``: the rank correlation of all scores, averaged over queries
- ``error``: the largest score difference relative to the largest score
- ``rate``: the million random tokens that `lik_ops.quantize` encodes in a second of CPU time, on one thread, by the
  faster of two calls. CPU time hardly depends on other work of the machine. A codec is trained before

Scores come from the machine's backend.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lik_ops
from lik_ops import Quantized

from ..support import common

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FORMATS = {
    "int8": ("int8", "token"),
    "int8 document": ("int8", "document"),
    "uint8": ("uint8", "token"),
    "fp8_e4m3": ("fp8_e4m3", "token"),
    "fp8_e5m2": ("fp8_e5m2", "token"),
    "binary": ("binary", "token"),
    **{format: (format, "token") for format in ("rq4", "rq2", "rq1")},
    **{f"residual{nbits}": (f"residual{nbits}", "token") for nbits in (1, 2, 4, 8)},
}
CENTROIDS, ITERATIONS = 1024, 5  # of residual codes; few, because they are trained on few documents
FULL = "full"
RECALL = (10, 100)
LQ, LD, DIMENSION, RANDOM_DOCUMENTS, RANDOM_QUERIES = 32, 180, 128, 1000, 32


class Tokens(NamedTuple):
    """Queries ``[Nq, Lq, d]`` and packed documents. If `known`, the answer to query i is document i."""

    Q: Tensor
    q_weight: Tensor | None  # 0 for padding
    D: Tensor
    cu_seqlens: Tensor
    known: bool

    def scores(self, D: Tensor | Quantized) -> Tensor:
        """Return scores ``[Nq, Nd]`` of documents, either plain or in a format."""
        return lik_ops.maxsim_varlen(self.Q, D, None, self.cu_seqlens, q_weight=self.q_weight)  # type: ignore[arg-type]

    def quantized(self, format: str, scale: str) -> tuple[Quantized, float]:
        """Return the documents in a format, and the million tokens that are encoded in a second of CPU time."""
        how: Any = format
        if format.startswith("residual"):
            nbits = int(format.removeprefix("residual"))
            how = lik_ops.ResidualCodec.train(self.D, nbits, CENTROIDS, iterations=ITERATIONS)
        seconds, threads = [], torch.get_num_threads()
        torch.set_num_threads(1)  # waiting threads also cost CPU time
        for _ in range(2):
            start = time.process_time()
            made = lik_ops.quantize(self.D, how, scale, cu_seqlens_d=self.cu_seqlens)  # type: ignore[arg-type]
            seconds.append(time.process_time() - start)
        torch.set_num_threads(threads)
        return made, len(self.D) / min(seconds) / 1e6


def ranks(x: Tensor) -> Tensor:
    """Return the ranks within each row in fp64."""
    return x.argsort(-1).argsort(-1).double()


def spearman(found: Tensor, exact: Tensor) -> float:
    """Return the rank correlation, averaged over rows."""
    a, b = (r - r.mean(-1, keepdim=True) for r in (ranks(found), ranks(exact)))
    return float(torch.cosine_similarity(a, b, dim=-1).mean())


def recall(found: Tensor, exact: Tensor, k: int) -> float:
    """Return the share of the `k` best of `exact` among the `k` best of `found`, averaged over rows."""
    k = min(k, exact.shape[-1])
    best = [lik_ops.ops.topk.select_first(x, k)[1] for x in (found, exact)]
    return float((best[0].unsqueeze(-1) == best[1].unsqueeze(-2)).double().sum((-1, -2)).mean() / k)


def compared(found: Tensor, exact: Tensor) -> dict[str, float]:
    """Return accuracy figures of a format's scores ``[n, Nd]`` against full precision."""
    error = float((found.double() - exact.double()).abs().max() / exact.double().abs().max())
    best = {f"recall{k}": recall(found, exact, k) for k in RECALL}
    return {"error": error, "spearman": spearman(found, exact), **best}


def random_tokens() -> Tokens:
    generator = torch.Generator().manual_seed(0)
    Q, D = (
        torch.nn.functional.normalize(torch.randn(*shape, DIMENSION, generator=generator), dim=-1)
        for shape in ((RANDOM_QUERIES, LQ), (RANDOM_DOCUMENTS * LD,))
    )
    return Tokens(Q, None, D, torch.arange(RANDOM_DOCUMENTS + 1) * LD, False)


def _encoded(encoder: object, pool: list, queries: int) -> Tokens:
    asked = encoder.encode_queries([row.summary for row in pool[:queries]])  # type: ignore[attr-defined]
    found = encoder.encode_documents([row.body for row in pool])  # type: ignore[attr-defined]
    bounds = torch.nn.functional.pad(found.mask.sum(1).cumsum(0), (1, 0))
    weight = asked.mask.float() if asked.weight is None else torch.where(asked.mask, asked.weight, 0)
    return Tokens(asked.embeddings, weight, found.embeddings[found.mask], bounds, True)


def _docstrings() -> tuple[list, int]:
    """Return the docstrings in the order of the examples, and the number to search."""
    sys.path.insert(0, str(EXAMPLES))
    from docstring_corpus import collect_docstrings, installed, shuffled
    from evaluation.known_item import EVALUATION_POOL

    return shuffled(collect_docstrings(installed()), 0), EVALUATION_POOL


def hashed(queries: int, steps: int) -> Tokens:
    rows, pool = _docstrings()
    from hashed_encoder import HashedEncoder

    encoder = HashedEncoder()
    encoder.fit([row.body for row in rows[:pool]])
    return _encoded(encoder, rows[:pool], queries)


def trained(queries: int, steps: int) -> Tokens:
    rows, _ = _docstrings()
    import train_colbert
    from tiny_colbert import TinyColBERTEncoder

    trainer = train_colbert.Trainer(train_colbert.Settings(steps=steps), train_colbert.make_task(rows, queries))
    while trainer.steps_done < steps:
        trainer.step()
    return _encoded(TinyColBERTEncoder(trainer.model), list(trainer.task.pool), queries)


def mrr(scores: Tensor) -> float:
    """Return MRR@10 of known items as the demo computes it."""
    sys.path.insert(0, str(EXAMPLES))
    from evaluation.known_item import evaluate

    return evaluate("", lambda: scores).mrr


def measure(name: str, tokens: Tokens) -> dict:
    exact = tokens.scores(tokens.D)
    results: dict[str, dict[str, float]] = {FULL: {"mrr": mrr(exact)} if tokens.known else {}}
    for format, how in FORMATS.items():
        made, rate = tokens.quantized(*how)
        found = tokens.scores(made)
        kept = sum(x.nbytes for x in made.tensors().values())  # the codec is negligible in larger corpora
        results[format] = {"bytes": kept / len(tokens.D), **compared(found, exact)}
        results[format] |= {"mrr": mrr(found)} if tokens.known else {"rate": rate}
    results[FULL]["bytes"] = tokens.D.shape[1] * 2  # as fp16
    sizes = {"queries": len(tokens.Q), "documents": len(tokens.cu_seqlens) - 1, "tokens": len(tokens.D)}
    return {"case": {"name": name, **sizes}, "formats": results}


TOKENS: dict[str, Callable[[int, int], Tokens]] = {
    "random": lambda queries, steps: random_tokens(),
    "hashed": hashed,
    "trained": trained,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"tokens whose name contains this ({', '.join(TOKENS)})")
    parser.add_argument("--queries", type=int, default=300, help="known items (default 300)")
    parser.add_argument("--steps", type=int, default=100, help="training steps (default 100)")
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/fidelity.json)")
    args = parser.parse_args()
    records = []
    for name, make in TOKENS.items():
        if args.only not in name:
            continue
        tokens = make(args.queries, args.steps)
        with torch.no_grad():
            records.append(measure(name, tokens))
        print(name, records[-1]["case"])
        for format, r in records[-1]["formats"].items():
            print(f"  {format:14}", ", ".join(f"{key} {value:.4g}" for key, value in r.items()), flush=True)
    print("wrote", common.write("fidelity", records, path=args.out, queries=args.queries, steps=args.steps))


if __name__ == "__main__":
    main()
