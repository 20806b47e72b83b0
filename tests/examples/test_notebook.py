"""Test that the committed notebook runs on a CPU and reproduces its stored outputs."""

import base64
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CELLS = json.loads((ROOT / "examples" / "late_interaction.ipynb").read_text())["cells"]
sys.path.insert(0, str(ROOT / "docs"))

import building  # noqa: E402


def texts(cells):
    """Return the text outputs of each code cell by cell name."""
    return {c["id"]: [building.output_text(o) for o in c["outputs"]] for c in cells if c["cell_type"] == "code"}


def test_names_of_cells_are_unique():
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)


def test_the_similarity_map_is_stored():
    (output,) = next(cell for cell in CELLS if cell["id"] == "map")["outputs"]
    assert base64.b64decode(output["data"]["image/png"]).startswith(b"\x89PNG")


def test_the_page_shows_every_output():
    text, pictures = building.render_notebook({"cells": CELLS})
    stored = [output for outputs in texts(CELLS).values() for output in outputs]
    assert len(stored) >= 5
    assert all(output.rstrip() in text for output in stored)
    assert list(pictures) == ["images/late_interaction-map.png"]
    assert all(f"]({path})" in text for path in pictures)


def test_a_run_gives_the_stored_outputs(monkeypatch, tmp_path):
    """Run the cells with `exec` in one namespace, which needs no Jupyter kernel."""
    pytest.importorskip("matplotlib", reason="the picture: pip install '.[docs]'")
    import run_notebook

    monkeypatch.chdir(tmp_path)
    cells, names = run_notebook.run_cells(CELLS)
    assert texts(cells) == texts(CELLS), "run python docs/run_notebook.py"

    scores, indices = names["scores"], names["indices"]
    assert names["texts"][names["best"]].startswith("return close matches")
    assert indices.tolist() == scores.topk(2).indices.tolist()
    torch.testing.assert_close(names["similarities"].amax(1).sum(), scores[names["best"]])
    assert torch.equal(names["similarities"].argmax(1), names["winners"])
    assert names["losses"][1] < names["losses"][0]
    assert names["ranked"].shape == (4,)
    assert names["corpus"].ids == ["match", "sort", "stop"] and names["bounds"].diff().tolist() == [5, 4, 4, 4]
    assert all(names[x].argmax() == names["best"] for x in ("compressed", "approximate"))
