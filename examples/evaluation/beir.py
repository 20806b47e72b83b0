"""Read retrieval datasets in BEIR's format, from a folder or from the Hugging Face hub.

A folder has ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/SPLIT.tsv``. A dataset on the hub has the configurations
corpus, queries and qrels. Documents are texts, or images such as the pages of ViDoRe.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

NANOBEIR = "sentence-transformers/NanoBEIR-en"
GROUPS = {
    "nanobeir": [
        f"{NANOBEIR}:Nano{name}"
        for name in (
            "ArguAna",
            "ClimateFEVER",
            "DBPedia",
            "FEVER",
            "FiQA2018",
            "HotpotQA",
            "MSMARCO",
            "NFCorpus",
            "NQ",
            "QuoraRetrieval",
            "SCIDOCS",
            "SciFact",
            "Touche2020",
        )
    ],
    "vidore": [
        f"vidore/{name}_beir:test"
        for name in (
            "arxivqa_test_subsampled",
            "docvqa_test_subsampled",
            "infovqa_test_subsampled",
            "shiftproject_test",
            "syntheticDocQA_artificial_intelligence_test",
            "syntheticDocQA_energy_test",
            "syntheticDocQA_government_reports_test",
            "syntheticDocQA_healthcare_industry_test",
            "tabfquad_test_subsampled",
            "tatdqa_test",
        )
    ],
}
# The names of a column in datasets on the hub.
QUERY_ID, DOCUMENT_ID = ("query-id", "query_id", "_id", "id"), ("corpus-id", "corpus_id", "_id", "id")
QUERY, DOCUMENT = ("query", "text"), ("image", "text")
Judgments = dict[str, dict[str, int]]


class BeirDataset(NamedTuple):
    """Queries, documents, and judgments.

    Attributes:
        name: The name to print.
        queries: The judged queries by id.
        corpus: The documents by id, texts or images.
        qrels: The relevance of each judged document, by query id and document id.
        excludes_own_id: Whether a query never finds the document of its own id. BEIR evaluates folders in this way,
            because the queries of ArguAna are documents.
    """

    name: str
    queries: dict[str, str]
    corpus: dict[str, Any]
    qrels: Judgments
    excludes_own_id: bool = False


class DatasetError(ValueError):
    """A dataset was not found or has an unexpected format."""


def keep_judged(queries: Mapping[str, str], qrels: Judgments) -> tuple[dict[str, str], Judgments]:
    """Return the queries with a relevant document, and their judgments."""
    kept = {key for key, row in qrels.items() if key in queries and any(score > 0 for score in row.values())}
    names = [key for key in queries if key in kept]
    return {key: queries[key] for key in names}, {key: qrels[key] for key in names}


def load_folder(path: Path, split: str = "test") -> BeirDataset:
    """Return the dataset in a folder.

    A document is its title, a space, and its text. Empty titles are left out.

    Raises:
        DatasetError: A file is missing or has no relevant document.
    """
    judgments = path / "qrels" / f"{split}.tsv"
    for file in (path / "corpus.jsonl", path / "queries.jsonl", judgments):
        if not file.is_file():
            raise DatasetError(f"expected a dataset in BEIR's format, found no file {str(file)!r}")

    def rows(name: str) -> Iterable[dict]:
        with (path / name).open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.strip())

    corpus = {row["_id"]: f"{row.get('title') or ''} {row['text']}".strip() for row in rows("corpus.jsonl")}
    qrels: Judgments = {}
    with judgments.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines, delimiter="\t"):
            qrels.setdefault(row["query-id"], {})[row["corpus-id"]] = int(row["score"])
    return make_dataset(path.name, {row["_id"]: row["text"] for row in rows("queries.jsonl")}, corpus, qrels, True)


def load_hub(repository: str, split: str) -> BeirDataset:
    """Return a dataset of the Hugging Face hub, or of a folder with the files of one.

    Raises:
        DatasetError: A column is missing, or no document is relevant.
    """
    from datasets import load_dataset

    tables = {name: load_dataset(repository, name, split=split) for name in ("corpus", "queries", "qrels")}

    def column(table: str, names: tuple[str, ...], default: str | None = None) -> Any:
        found = tables[table].column_names
        for name in names:
            if name in found:
                return tables[table][name]
        raise DatasetError(f"{repository}, {table}: expected a column of {', '.join(names)}, found {', '.join(found)}")

    corpus = {
        str(key): item for key, item in zip(column("corpus", DOCUMENT_ID), column("corpus", DOCUMENT), strict=True)
    }
    queries = dict(zip(map(str, column("queries", QUERY_ID)), column("queries", QUERY), strict=True))
    qrels: Judgments = {}
    # NanoBEIR has no scores, because it lists relevant documents only.
    count = len(tables["qrels"])
    scores = tables["qrels"]["score"] if "score" in tables["qrels"].column_names else [1] * count
    for query, document, score in zip(column("qrels", QUERY_ID), column("qrels", DOCUMENT_ID), scores, strict=True):
        qrels.setdefault(str(query), {})[str(document)] = int(score)
    return make_dataset(f"{repository.split('/')[-1]} {split}", queries, corpus, qrels, False)


def make_dataset(name: str, queries: dict, corpus: dict, qrels: Judgments, excludes_own_id: bool) -> BeirDataset:
    """Return a dataset with its judged queries and without empty documents."""
    queries, qrels = keep_judged(queries, qrels)
    if not queries:
        raise DatasetError(f"{name}: expected a query with a relevant document, found none")
    corpus = {key: item for key, item in corpus.items() if not isinstance(item, str) or item}
    return BeirDataset(name, queries, corpus, qrels, excludes_own_id)


def load_datasets(name: str, split: str = "test") -> Iterable[BeirDataset]:
    """Yield the datasets that a name selects, one at a time.

    Args:
        name: A folder in BEIR's format, ``"nanobeir"``, ``"vidore"``, or ``"REPOSITORY:SPLIT"`` on the hub.
        split: The split of a folder.

    Raises:
        DatasetError: The name selects nothing.
    """
    if Path(name).is_dir():
        yield load_folder(Path(name), split)
    elif name in GROUPS or (":" in name and "/" in name):
        for one in GROUPS.get(name, [name]):
            yield load_hub(*one.rsplit(":", 1))
    else:
        known = ", ".join(map(repr, GROUPS))
        raise DatasetError(f"expected a folder, REPOSITORY:SPLIT, or one of {known}, found {name!r}")
