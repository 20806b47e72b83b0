"""Test `examples/evaluate.py` inside sentence-transformers, PyLate, and colpali-engine, with tiny random models.

Each test runs where its host is installed: ``make test-real`` and ``make test-hosts``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

for package in ("ir_measures", "numpy", "rich"):
    pytest.importorskip(package, reason="the packages of evaluate.py: pip install '.[evaluate]'")

import evaluate  # noqa: E402
from evaluation import beir, hosts  # noqa: E402

from .beir_folder import PLACES, TOPICS, VERBS, write_folder  # noqa: E402

SEARCHES = ["full", "int8", "binary"]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def save_bert(directory: Path) -> Path:
    """Save a BERT of one layer with random weights, and a tokenizer that knows the words of the dataset."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    pieces = [f"##{place}" for place in PLACES]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *TOPICS, *VERBS, *PLACES, *pieces]
    words += ["the", "near", ".", "[", "]", "q", "d"]
    directory.mkdir()
    (directory / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(directory)
    BertTokenizerFast(str(directory / "vocab.txt"), model_max_length=64).save_pretrained(directory)
    return directory


def check_rows(rows: dict[str, dict], library: str) -> None:
    """Check that full precision ranks as the host does, and that the formats are close."""
    own, full = rows[f"{library}'s own scores"], rows["full"]
    assert list(rows) == [f"{library}'s own scores", *SEARCHES]
    assert full["measures"] == pytest.approx(own["measures"], abs=0.01)
    assert full["same"] > 0.98 and rows["int8"]["same"] > 0.8


@pytest.mark.parametrize(
    "library",
    [
        pytest.param("sentence-transformers", marks=needs("sentence_transformers")),
        pytest.param("pylate", marks=needs("pylate")),
    ],
)
def test_text_model_ranking_matches_its_library(library, tmp_path):
    if library == "sentence-transformers":
        sentence_transformers = pytest.importorskip("sentence_transformers")
        if not hasattr(sentence_transformers, "MultiVectorEncoder"):
            pytest.skip(f"sentence-transformers {sentence_transformers.__version__} has no MultiVectorEncoder")
    torch.manual_seed(0)
    out = tmp_path / "rows.json"
    options = ["--library", library, "--model", str(save_bert(tmp_path / "model")), "--device", "cpu"]
    folder = str(write_folder(tmp_path / "towns"))
    evaluate.main([folder, *options, "--searches", *SEARCHES, "--batch-size", "64", "--out", str(out)])
    (dataset,) = json.loads(out.read_text())["datasets"]
    rows = {row["search"]: row for row in dataset["rows"]}
    check_rows(rows, library)
    # Equal words have similar states. PyLate appends mask tokens to queries, which a random model cannot use.
    assert library == "pylate" or rows["full"]["measures"]["recall@10"] > 0.4


PAGES = 40


def make_classes(module):
    """Return a model and a processor: each pixel of a page, and each number of a query, is a token."""
    from transformers import BatchEncoding

    class Processor(module.BaseVisualRetrieverProcessor):
        query_prefix, query_augmentation_token = "", ""

        @classmethod
        def from_pretrained(cls, name):
            assert name == "numbers"
            return cls()

        def process_texts(self, texts):
            return self._pad([[int(word) for word in text.split()] for text in texts])

        def process_images(self, images):
            return self._pad([list(image.tobytes()) for image in images])

        def _pad(self, rows):
            length = max(map(len, rows))
            ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
            mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
            return BatchEncoding({"input_ids": ids, "attention_mask": mask})

        def score(self, qs, ps, device=None, **options):
            return self.score_multi_vector(qs, ps, device=device, **options)

        def get_n_patches(self, *arguments, **options):
            raise NotImplementedError

    class Model(torch.nn.Module):
        @classmethod
        def from_pretrained(cls, name, dtype, device_map):
            assert (name, dtype, device_map) == ("numbers", torch.float32, "cpu")
            return cls()

        def __init__(self):
            super().__init__()
            # Similarities are positive, so the library's padding, rows of zeros, has no maximum.
            rows = torch.rand(256, 32, generator=torch.Generator().manual_seed(0)) ** 4
            self.table = torch.nn.functional.normalize(rows, dim=-1)

        def forward(self, input_ids, attention_mask):
            return self.table[input_ids] * attention_mask[..., None]

    return Model, Processor


@needs("colpali_engine")
def test_page_model_ranking_matches_colpali_engine(monkeypatch):
    models = pytest.importorskip("colpali_engine.models", reason="colpali_engine.models needs torchvision")
    images = pytest.importorskip("PIL.Image")
    model, processor = make_classes(importlib.import_module("colpali_engine.utils.processing_utils"))
    monkeypatch.setattr(models, "Numbers", model, raising=False)
    monkeypatch.setattr(models, "NumbersProcessor", processor, raising=False)
    pages = {}
    for i in range(PAGES):
        page = images.new("L", (3 + i % 3, 4), color=5 * i)  # pages have several sizes
        page.putpixel((1, 1), 5 * i + 1)
        pages[f"d{i}"] = page
    queries = {f"q{i}": f"{5 * i} {5 * i + 1}" for i in range(PAGES)}
    dataset = beir.make_dataset("pages", queries, pages, {f"q{i}": {f"d{i}": 1} for i in range(PAGES)}, False)
    host = hosts.HOSTS["colpali-engine"]("numbers", "cpu", 7, architecture="Numbers")
    assert [len(page) for page in host.encode_documents(list(pages.values()))[:3]] == [12, 16, 20]
    rows = {row.search: row._asdict() for row in evaluate.evaluate_dataset(dataset, host, SEARCHES)}
    check_rows(rows, "colpali-engine")
    assert rows["full"]["measures"] == {"nDCG@10": 1, "recall@10": 1, "MRR@10": 1}
    with pytest.raises(ValueError, match=r"expected a class of colpali_engine\.models, found 'NoModel'"):
        hosts.HOSTS["colpali-engine"]("numbers", "cpu", 7, architecture="NoModel")
