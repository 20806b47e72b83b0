"""The notebook runs as it is written, on a CPU, and holds nothing that a run leaves behind."""

import json
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).resolve().parents[1] / "examples" / "late_interaction.ipynb"
CELLS = json.loads(PATH.read_text())["cells"]


def test_it_is_committed_without_outputs():
    for cell in CELLS:
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None, cell["id"]
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)


def test_its_cells_run_in_order(monkeypatch, tmp_path):
    """By `exec`, in one namespace: no kernel is needed."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="the picture: pip install '.[docs]'")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for cell in CELLS:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{PATH.name}: {cell['id']}", "exec"), names)
    pyplot.close("all")

    scores, indices = names["scores"], names["indices"]
    assert names["texts"][names["best"]].startswith("return close matches")
    assert indices.tolist() == scores.topk(2).indices.tolist()
    torch.testing.assert_close(names["similarities"].amax(1).sum(), scores[names["best"]])
    assert torch.equal(names["similarities"].argmax(1), names["winners"])
    assert names["losses"][1] < names["losses"][0]
    assert names["ranked"].shape == (4,)
