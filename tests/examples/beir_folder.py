"""Write a small dataset in BEIR's format."""

from __future__ import annotations

import json
from pathlib import Path

TOPICS = ["river", "bridge", "winter", "wheat", "clock", "harbour"]
TOPICS += ["lantern", "orchard", "mill", "stone", "glacier", "violin"]
VERBS = ["floods", "closes", "freezes", "grows", "stops", "silts"]
VERBS += ["shines", "ripens", "turns", "cracks", "melts", "plays"]
PLACES = ["alm", "bor", "cra", "dun", "esk", "fir"]
PLACES += ["gar", "hol", "ing", "jut", "kel", "lum"]


def write_folder(path: Path, *, split: str = "test") -> Path:
    """Write one document for each topic and verb, and 12 queries of a topic and two verbs.

    The document with the topic and the first verb is judged 2, and the one with the second verb 1. Two more queries
    have no relevant document.
    """
    documents = [
        (f"d{i}-{k}", f"The {topic}", f"{verb} near {PLACES[k]}{PLACES[i]}.")
        for i, topic in enumerate(TOPICS)
        for k, verb in enumerate(VERBS)
    ]
    queries = [(f"q{i}", f"{TOPICS[i]} {VERBS[i]} {VERBS[(i + 1) % 12]}") for i in range(12)]
    (path / "qrels").mkdir(parents=True)
    lines = {
        "corpus": [{"_id": key, "title": title, "text": text} for key, title, text in documents],
        "queries": [{"_id": key, "text": text} for key, text in [*queries, ("unjudged", "river"), ("zero", "clock")]],
    }
    for name, rows in lines.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = [(f"q{i}", f"d{i}-{i}", 2) for i in range(len(TOPICS))]
    judged += [(f"q{i}", f"d{i}-{(i + 1) % 12}", 1) for i in range(len(TOPICS))] + [("zero", "d0-0", 0)]
    rows = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in judged)]
    (path / "qrels" / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    return path
