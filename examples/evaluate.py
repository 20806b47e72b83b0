"""Evaluate a late-interaction model on NanoBEIR, ViDoRe, or any dataset in BEIR's format, in each document format.

    python examples/evaluate.py nanobeir --library sentence-transformers --model lightonai/GTE-ModernColBERT-v1
    python examples/evaluate.py nanobeir --library pylate --model lightonai/GTE-ModernColBERT-v1
    python examples/evaluate.py vidore --library colpali-engine --model vidore/colqwen2-v1.0 --architecture ColQwen2
    python examples/evaluate.py path/to/scifact --library hashed

A dataset is ``nanobeir``, ``vidore``, a folder in BEIR's format, or ``REPOSITORY:SPLIT`` on the Hugging Face hub. Each
text is encoded once. The first row of a table has the scores of the library's own code, and every other row is a search
of lik_ops. ir-measures computes nDCG@10, recall@10 and MRR@10. ``same`` is the share of the 10 best documents of
the first row that a search returns too. All embeddings of a dataset must fit in memory.

Needs ``pip install ".[evaluate]"`` and the library. ``--library hashed`` needs no model: its encoder is not trained.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from missing_packages import explain_missing
from torch import Tensor

with explain_missing('".[evaluate]"'):
    import ir_measures
    from evaluation.beir import BeirDataset, DatasetError, Judgments, load_datasets
    from evaluation.hosts import HOSTS, EvaluationHost
    from evaluation.searches import FULL, SEARCHES, EncodedTexts
    from ir_measures import RR, R, nDCG
    from rich.console import Console
    from rich.table import Table

TOP_K = 10
MEASURES = {"nDCG@10": nDCG @ TOP_K, "recall@10": R @ TOP_K, "MRR@10": RR @ TOP_K}
DEFAULT_SEARCHES = [FULL, "fp16", "int8", "fp8_e4m3", "binary", "residual4", "residual2", "pool 2"]


class Row(NamedTuple):
    """The measures of one ranking.

    Attributes:
        search: The name of the search.
        measures: nDCG@10, recall@10 and MRR@10.
        same: The share of the host's 10 best documents that the search returns, None without the host's scores.
        mib: The size of the stored documents.
        seconds: The time of the search, with quantizing and training of codecs.
    """

    search: str
    measures: dict[str, float]
    same: float | None
    mib: float
    seconds: float


def rank_documents(dataset: BeirDataset, indices: Tensor) -> dict[str, dict[str, float]]:
    """Return the 10 best documents of each query with scores that descend with the rank.

    Args:
        dataset: The queries and documents.
        indices: ``[Nq, k]`` in descending order of scores, -1 for no document.
    """
    names, run = list(dataset.corpus), {}
    for query, row in zip(dataset.queries, indices.tolist(), strict=True):
        found = [names[i] for i in row if i >= 0]
        if dataset.excludes_own_id:
            found = [name for name in found if name != query]
        run[query] = {name: -float(rank) for rank, name in enumerate(found[:TOP_K])}
    return run


def compute_measures(qrels: Judgments, run: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the mean of each measure over the judged queries."""
    found = ir_measures.calc_aggregate(MEASURES.values(), qrels, run)
    return {name: found[measure] for name, measure in MEASURES.items()}


def count_same(run: dict[str, dict[str, float]], expected: dict[str, dict[str, float]]) -> float:
    """Return the share of the documents of `expected` that `run` has too."""
    total = sum(map(len, expected.values()))
    return sum(len(run[query].keys() & row.keys()) for query, row in expected.items()) / max(total, 1)


@torch.inference_mode()
def evaluate_dataset(
    dataset: BeirDataset, host: EvaluationHost, searches: Sequence[str], *, scores_by_host: bool = True
) -> list[Row]:
    """Return one row for the host's own scores and one for each search of lik_ops."""
    documents = host.encode_documents(list(dataset.corpus.values()))
    queries = host.encode_queries(list(dataset.queries.values()))
    texts = EncodedTexts.pack(queries, documents)
    # A query may find the document of its own id, which does not count.
    depth = min(TOP_K + dataset.excludes_own_id, len(documents))
    rows: list[Row] = []
    expected = None
    if scores_by_host:
        start = time.perf_counter()
        scores = host.score_by_host(queries, documents)
        # Equal scores are ordered by document, as in `lik_ops.retrieve`.
        order = scores.sort(dim=1, descending=True, stable=True).indices
        expected = rank_documents(dataset, order[:, :depth])
        seconds = time.perf_counter() - start
        measures = compute_measures(dataset.qrels, expected)
        rows.append(Row(f"{host.library}'s own scores", measures, 1.0, texts.D.nbytes / 2**20, seconds))
    for name in searches:
        start = time.perf_counter()
        found = SEARCHES[name](texts, depth)
        run = rank_documents(dataset, found.indices)
        seconds = time.perf_counter() - start
        same = None if expected is None else count_same(run, expected)
        rows.append(Row(name, compute_measures(dataset.qrels, run), same, found.nbytes / 2**20, seconds))
    return rows


def print_rows(console: Console, dataset: BeirDataset, rows: Sequence[Row]) -> None:
    """Print the table of a dataset."""
    table = Table(title=f"{dataset.name}: {len(dataset.queries)} queries, {len(dataset.corpus)} documents")
    table.add_column("search")
    for column in (*MEASURES, "same", "MiB", "seconds"):
        table.add_column(column, justify="right")
    for row in rows:
        same = "-" if row.same is None else f"{row.same:.4f}"
        figures = [f"{row.measures[name]:.4f}" for name in MEASURES]
        table.add_row(row.search, *figures, same, f"{row.mib:.2f}", f"{row.seconds:.2f}")
    console.print(table)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "datasets", nargs="+", metavar="DATASET", help="nanobeir, vidore, a folder, or REPOSITORY:SPLIT"
    )
    parser.add_argument("--library", choices=list(HOSTS), required=True, help="the library that runs the model")
    parser.add_argument("--model", help="name or folder of the model")
    parser.add_argument("--architecture", help="class in colpali_engine.models (default: ColQwen2)")
    parser.add_argument("--split", default="test", help="split of a folder (default: test)")
    parser.add_argument(
        "--searches", nargs="+", choices=list(SEARCHES), default=DEFAULT_SEARCHES, metavar="NAME", help=list_searches()
    )
    parser.add_argument("--no-host-scores", action="store_true", help="leave the scores of the library out")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="texts to encode at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file, written after each dataset")
    options = parser.parse_args(arguments)
    if options.model is None and options.library != "hashed":
        parser.error(f"argument --model: expected a name or a folder with --library {options.library}")
    if options.batch_size < 1:
        parser.error(f"argument --batch-size: expected a positive number, found {options.batch_size}")
    if options.architecture is not None and options.library != "colpali-engine":
        parser.error("argument --architecture: expected --library colpali-engine")
    return options


def list_searches() -> str:
    """Return the help text of ``--searches``."""
    return f"searches to run (default: {', '.join(DEFAULT_SEARCHES)}); all: {', '.join(map(repr, SEARCHES))}"


def make_host(options: argparse.Namespace) -> EvaluationHost:
    """Return the library with the model that the options select."""
    given = {} if options.architecture is None else {"architecture": options.architecture}
    return HOSTS[options.library](options.model, options.device, options.batch_size, **given)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one table for each dataset."""
    options = parse_arguments(arguments)
    console = Console(highlight=False)
    try:
        host = make_host(options)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"--library {options.library}: {error}")
    about = {"library": options.library, "model": options.model, "device": options.device}
    results: list[dict[str, Any]] = []
    for name in options.datasets:
        try:
            for dataset in load_datasets(name, options.split):
                rows = evaluate_dataset(dataset, host, options.searches, scores_by_host=not options.no_host_scores)
                print_rows(console, dataset, rows)
                sizes = {"queries": len(dataset.queries), "documents": len(dataset.corpus)}
                results.append({"dataset": dataset.name, **sizes, "rows": [row._asdict() for row in rows]})
                if options.out is not None:
                    options.out.write_text(json.dumps({**about, "datasets": results}, indent=1) + "\n")
        except (DatasetError, ImportError, OSError) as error:
            sys.exit(f"{name}: {error}")


if __name__ == "__main__":
    main()
