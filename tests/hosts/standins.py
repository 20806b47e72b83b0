"""Stand-ins for downloads of the hosts' suites: a tiny BERT with random weights, and a few sentences.

``from_pretrained("org/name")`` and ``load_dataset("org/name")`` prefer a folder of that name in the working directory.
Run in the host's environment: ``python standins.py pylate|sentence_transformers DIRECTORY``.
"""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
from pathlib import Path

MODELS = {
    "pylate": [
        "sentence-transformers/all-MiniLM-L6-v2",
        "bert-base-uncased",
        "lightonai/GTE-ModernColBERT-v1",
    ],
    "sentence_transformers": ["sentence-transformers-testing/stsb-bert-tiny-safetensors"],
}
DATA = "lightonai/lighton-ms-marco-mini"
SUBJECTS = ["rivers", "bridges", "winter wheat", "clocks", "harbours", "lanterns", "orchards", "mill stones"]
VERBS = ["are kept", "were drawn", "are repaired", "fail", "are measured", "grow", "are sold", "were named"]


def tokenizer():
    """Train a lower-case WordPiece tokenizer of 8,000 pieces on the source of the standard library."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizerFast

    texts = (p.read_text(errors="ignore") for p in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    trained = BertWordPieceTokenizer(lowercase=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"[unused{i}]" for i in range(5))]
    trained.train_from_iterator(texts, vocab_size=8000, special_tokens=special, show_progress=False)
    return BertTokenizerFast(tokenizer_object=trained._tokenizer, model_max_length=512, do_lower_case=True)


def model(directory: Path) -> None:
    """Save a tiny BERT with random weights to `directory`."""
    import torch
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    words = tokenizer()
    config = BertConfig(
        vocab_size=len(words), hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    plain = directory / "plain"
    BertModel(config).save_pretrained(plain)
    words.save_pretrained(plain)
    transformer = models.Transformer(str(plain), max_seq_length=128)
    pooling = models.Pooling(config.hidden_size, pooling_mode="mean")
    SentenceTransformer(modules=[transformer, pooling]).save(str(directory / "saved"))
    shutil.rmtree(plain)


def sentences(directory: Path) -> None:
    """Save a few synthetic queries, documents, and training rows to `directory`."""
    documents = [f"{s.capitalize()} {v} in the {i}th district." for i, s in enumerate(SUBJECTS) for v in VERBS]
    queries = [f"what of the {s}" for s in SUBJECTS]
    ids = [[f"d{8 * i + k}" for k in range(8)] for i in range(8)]
    rows = {
        "queries": [{"query_id": f"q{i}", "text": q} for i, q in enumerate(queries)],
        "documents": [{"document_id": f"d{i}", "text": d} for i, d in enumerate(documents)],
        "train": [
            {"query_id": f"q{i}", "document_ids": ids[i], "scores": [1.0 - 0.1 * k for k in range(8)]} for i in range(8)
        ],
        "triplet": [
            {"query": queries[i % 8], "positive": documents[8 * (i % 8) + i // 8], "negative": documents[-1 - i]}
            for i in range(16)
        ],
    }
    directory.mkdir(parents=True, exist_ok=True)
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in rows)
    (directory / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for name, table in rows.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))


if __name__ == "__main__":
    host, root = sys.argv[1], Path(sys.argv[2])
    model(root)
    for name in MODELS[host]:
        shutil.copytree(root / "saved", root / name, dirs_exist_ok=True)
    shutil.rmtree(root / "saved")
    if host == "pylate":
        sentences(root / DATA)
