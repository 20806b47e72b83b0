"""Test the evaluation on datasets in BEIR's format, offline: files, measures, encoders of hosts, and command line."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import types
from pathlib import Path

import pytest
import torch

NEEDED = "the packages of evaluate.py: pip install '.[evaluate]'"
for package in ("ir_measures", "numpy", "rich"):
    pytest.importorskip(package, reason=NEEDED)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import evaluate  # noqa: E402
from evaluation import beir, searches  # noqa: E402

from .beir_folder import write_folder  # noqa: E402

# datasets


def test_a_folder_is_read(tmp_path):
    dataset = beir.load_folder(write_folder(tmp_path / "towns", split="dev"), "dev")
    assert dataset.name == "towns" and dataset.excludes_own_id
    assert len(dataset.corpus) == 144 and dataset.corpus["d0-0"] == "The river floods near almalm."
    assert list(dataset.queries) == [f"q{i}" for i in range(12)]  # only those with a relevant document
    assert dataset.qrels["q3"] == {"d3-3": 2, "d3-4": 1}


@pytest.mark.parametrize("file", ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv"])
def test_error_names_the_missing_file(tmp_path, file):
    (write_folder(tmp_path / "towns") / file).unlink()
    with pytest.raises(beir.DatasetError, match=Path(file).name):
        beir.load_folder(tmp_path / "towns")


def test_unknown_datasets_are_rejected():
    with pytest.raises(beir.DatasetError, match="'nanobeir', 'vidore', found 'towns'"):
        list(beir.load_datasets("towns"))


class HubTable(list):
    """Rows with the interface of `datasets.Dataset` that the loader uses."""

    column_names = property(lambda self: list(self[0]))

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


NANO = {
    "corpus": [{"_id": "a", "text": "rivers"}, {"_id": "b", "text": ""}, {"_id": "c", "text": "clocks"}],
    "queries": [{"_id": "q", "text": "which rivers"}],
    "qrels": [{"query-id": "q", "corpus-id": "a"}],
}
PAGES = {
    "corpus": [{"corpus-id": 7, "image": object()}, {"corpus-id": 8, "image": object()}],
    "queries": [{"query-id": 7, "query": "which rivers"}, {"query-id": 9, "query": "none"}],
    "qrels": [{"query-id": 7, "corpus-id": 8, "score": 1}, {"query-id": 9, "corpus-id": 7, "score": 0}],
}


def test_datasets_of_the_hub_are_read(monkeypatch):
    """NanoBEIR has no scores of relevance, and the identifiers of ViDoRe are numbers."""
    tables, calls = {"sentence-transformers/NanoBEIR-en": NANO, "vidore/pages_beir": PAGES}, []

    def load_dataset(repository, name, *, split):
        calls.append((repository, split))
        return HubTable(tables[repository][name])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setitem(beir.GROUPS, "nanobeir", beir.GROUPS["nanobeir"][6:7])
    (nano,) = beir.load_datasets("nanobeir")
    assert set(calls) == {("sentence-transformers/NanoBEIR-en", "NanoMSMARCO")}
    assert nano == (
        "NanoBEIR-en NanoMSMARCO",
        {"q": "which rivers"},
        {"a": "rivers", "c": "clocks"},
        {"q": {"a": 1}},
        False,
    )
    (pages,) = beir.load_datasets("vidore/pages_beir:test")
    assert pages.queries == {"7": "which rivers"} and pages.qrels == {"7": {"8": 1}}
    assert list(pages.corpus) == ["7", "8"] and not pages.excludes_own_id
    del PAGES["corpus"][0]["image"], PAGES["corpus"][1]["image"]
    with pytest.raises(beir.DatasetError, match="vidore/pages_beir, corpus: expected a column of image, text"):
        list(beir.load_datasets("vidore/pages_beir:test"))


def test_a_real_loader_reads_a_local_repository(tmp_path):
    """`datasets` reads a folder with the files of a hub dataset, without a network."""
    pytest.importorskip("datasets", reason=NEEDED)
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: NanoTowns\n    path: {name}.jsonl\n" for name in NANO
    )
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for name, rows in NANO.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = beir.load_hub(str(tmp_path), "NanoTowns")
    assert dataset.queries == {"q": "which rivers"} and dataset.corpus == {"a": "rivers", "c": "clocks"}


# measures


def make_dataset(queries: int = 2, excludes_own_id: bool = False) -> beir.BeirDataset:
    corpus = {f"d{i}": str(i) for i in range(20)}
    qrels = {"q0": {"d0": 2, "d1": 1, "d15": 1}, "q1": {"d19": 1}}
    names = list(qrels)[:queries]
    return beir.BeirDataset(
        "x", dict.fromkeys(names, ""), corpus, {name: qrels[name] for name in names}, excludes_own_id
    )


def test_measures_follow_their_formulas():
    indices = torch.stack([torch.tensor([5, 1, 0, 6, 7, 8, 9, 10, 11, 12]), torch.arange(10)])
    dataset = make_dataset()
    found = evaluate.compute_measures(dataset.qrels, evaluate.rank_documents(dataset, indices))
    gain = 1 / math.log2(3) + 2 / math.log2(4)
    ideal = 2 / math.log2(2) + 1 / math.log2(3) + 1 / math.log2(4)
    expected = {"nDCG@10": gain / ideal / 2, "recall@10": 2 / 3 / 2, "MRR@10": 1 / 2 / 2}  # the second query finds none
    assert found == pytest.approx(expected)


def test_equal_scores_keep_the_order_of_the_search():
    """Measures see ranks. A measure that sorted equal scores by name would prefer d19."""
    dataset = make_dataset(1)
    dataset.qrels["q0"] = {"d2": 1}
    for position in range(3):
        row = [8, 9]
        row.insert(position, 2)
        run = evaluate.rank_documents(dataset, torch.tensor([row]))
        assert evaluate.compute_measures(dataset.qrels, run)["MRR@10"] == pytest.approx(1 / (position + 1))


def test_ranking_skips_missing_documents_and_own_ids():
    dataset = make_dataset(1, excludes_own_id=True)
    dataset = dataset._replace(corpus={"q0": "the query", **dataset.corpus})
    run = evaluate.rank_documents(dataset, torch.tensor([[0, 2, 1, -1]]))
    assert list(run["q0"]) == ["d1", "d0"]
    run = evaluate.rank_documents(dataset, torch.arange(11)[None])
    assert list(run["q0"]) == [f"d{i}" for i in range(10)]


# searches


@pytest.fixture(scope="module")
def texts() -> searches.EncodedTexts:
    """Return documents of 6 topics each, and queries with 4 topics of their own document and noise."""
    generator = torch.Generator().manual_seed(0)

    def noisy(tokens, noise):
        drawn = tokens + noise * torch.randn(tokens.shape, generator=generator)
        return torch.nn.functional.normalize(drawn, dim=-1)

    topics = torch.randn(40, 6, 64, generator=generator)
    lengths = torch.randint(20, 60, (40,), generator=generator).tolist()
    of_token = [torch.randint(6, (n,), generator=generator) for n in lengths]
    documents = [noisy(x[at], 0.5) for x, at in zip(topics, of_token, strict=True)]
    return searches.EncodedTexts.pack([noisy(x[:4], 1.0) for x in topics], documents)


LEAST = {"full": 1.0, "fp16": 0.99, "int8, then full": 1.0, "binary": 0.4, "pool 8": 0.4}
LEAST |= dict.fromkeys(("rq1", "residual1"), 0.4)  # one bit, as "binary"
LEAST |= {name: 0.2 for name in searches.SEARCHES if "probed" in name}  # documents are few, and most are skipped


@pytest.mark.parametrize("name", searches.SEARCHES)
def test_searches_recall_full_precision_results(texts, name):
    expected = searches.search_plain(texts, 5).indices
    found = searches.SEARCHES[name](texts, 5)
    assert found.indices.shape == (40, 5)
    same = (found.indices[:, :, None] == expected[:, None]).any(-1).float().mean().item()
    assert same >= LEAST.get(name, 0.6)
    assert (found.indices[:, 0] == torch.arange(40)).float().mean() > 0.9


def test_sizes_of_searches(texts):
    tokens = len(texts.D)
    sizes = {
        name: searches.SEARCHES[name](texts, 5).nbytes
        for name in ("full", "fp16", "int8", "binary", "residual4", "pool 2")
    }
    assert (sizes["full"], sizes["fp16"]) == (256 * tokens, 128 * tokens)
    assert 64 * tokens < sizes["int8"] < 72 * tokens
    assert 8 * tokens < sizes["binary"] < sizes["residual4"] < 48 * tokens
    assert 0.4 * sizes["full"] < sizes["pool 2"] < 0.6 * sizes["full"]


# command line


def read_rows(path: Path) -> dict[str, dict]:
    (dataset,) = json.loads(path.read_text())["datasets"]
    assert (dataset["dataset"], dataset["queries"], dataset["documents"]) == ("towns", 12, 144)
    return {row["search"]: row for row in dataset["rows"]}


def test_the_command_evaluates_a_folder(tmp_path, capsys):
    out = tmp_path / "rows.json"
    evaluate.main([str(write_folder(tmp_path / "towns")), "--library", "hashed", "--device", "cpu", "--out", str(out)])
    rows = read_rows(out)
    assert list(rows) == ["hashed's own scores", *evaluate.DEFAULT_SEARCHES]
    own, full = rows["hashed's own scores"], rows["full"]
    assert full["measures"] == own["measures"] and full["same"] > 0.95
    # Only the two relevant documents have two words of their query. Either of them may be the first.
    assert own["measures"]["MRR@10"] == own["measures"]["recall@10"] == 1 and 0.8 < own["measures"]["nDCG@10"] < 1
    assert rows["int8"]["mib"] < rows["fp16"]["mib"] < full["mib"]
    printed = capsys.readouterr().out
    assert "towns: 12 queries, 144 documents" in printed and "residual4" in printed and "nDCG@10" in printed


def test_the_command_selects_searches(tmp_path):
    out = tmp_path / "rows.json"
    folder = str(write_folder(tmp_path / "towns", split="dev"))
    options = ["--library", "hashed", "--device", "cpu", "--searches", "full", "--no-host-scores", "--split", "dev"]
    evaluate.main([folder, *options, "--out", str(out)])
    rows = read_rows(out)
    assert list(rows) == ["full"] and rows["full"]["same"] is None


def test_command_line_errors_name_the_option(tmp_path, capsys):
    with pytest.raises(SystemExit, match="expected a folder, REPOSITORY:SPLIT"):
        evaluate.main(["nowhere", "--library", "hashed", "--device", "cpu"])
    for options, words in (
        (["--library", "pylate"], "--model: expected a name or a folder with --library pylate"),
        (["--library", "hashed", "--batch-size", "0"], "--batch-size: expected a positive number"),
        (["--library", "hashed", "--architecture", "ColPali"], "--architecture: expected --library colpali-engine"),
    ):
        with pytest.raises(SystemExit):
            evaluate.main(["nanobeir", *options])
        assert words in capsys.readouterr().err


def test_rows_are_written_before_a_dataset_fails(tmp_path, monkeypatch):
    """An unreachable dataset ends the command with a message, and earlier rows are kept."""

    def load_dataset(repository, name, *, split):
        raise ConnectionError(f"Couldn't reach {repository!r}")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    out = tmp_path / "rows.json"
    options = ["--library", "hashed", "--device", "cpu", "--searches", "full", "--out", str(out)]
    with pytest.raises(SystemExit, match="nanobeir: Couldn't reach 'sentence-transformers/NanoBEIR-en'"):
        evaluate.main([str(write_folder(tmp_path / "towns")), "nanobeir", *options])
    assert list(read_rows(out)) == ["hashed's own scores", "full"]


@pytest.mark.skipif(importlib.util.find_spec("pylate") is not None, reason="PyLate is installed")
def test_error_names_the_missing_library(tmp_path):
    with pytest.raises(SystemExit, match=r"--library pylate: .*pylate"):
        evaluate.main([str(write_folder(tmp_path / "towns")), "--library", "pylate", "--model", "x"])
