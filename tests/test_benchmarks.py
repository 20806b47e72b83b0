"""The benchmarks' arithmetic, tables and pictures. What they time needs a GPU and is not run here."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import signal
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the GPU benchmarks import triton")
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import common  # noqa: E402
import contenders  # noqa: E402
import cpu  # noqa: E402
import forward  # noqa: E402
import gpu  # noqa: E402
import tables  # noqa: E402
import training  # noqa: E402

VARIANTS = list(itertools.product(("", "prefix", "holes"), (False, True), (False, True), (False, True)))


def small(mask="", normalize=False, weighted=False, candidates=False, **more) -> common.Case:
    options = {"mask": mask, "normalize": normalize, "weighted": weighted, "candidates": candidates}
    return common.Case("small", 6, 70, 7, 11, d=16, **{"dtype": "float32", **options, **more})


# cases


def test_work_of_a_case():
    case = common.Case("rerank", 1, 1000, 32, 300)
    assert case.operations == 2 * 1000 * 32 * 300 * 128
    assert case.bytes == 2 * 128 * (32 + 1000 * 300) + 4 * 1000
    case = common.Case(
        "", 2, 3, 4, 5, d=6, dtype="float32", what="winners", mask="holes", weighted=True, candidates=True
    )
    assert case.documents == 6
    assert case.bytes == 4 * 6 * (8 + 30) + (8 + 30) + 4 * 8 + 4 * 6 + 2 * 2 * 3 * 4
    assert case.similarities == 4 * 2 * 3 * 4 * 5


@pytest.mark.parametrize("module", [forward, training, cpu], ids=lambda module: module.__name__)
def test_names_are_unique(module):
    names = [case.name for case in module.CASES]
    assert len(set(names)) == len(names)
    assert all(isinstance(case, common.Case) for case in module.CASES)


@pytest.mark.parametrize(("mask", "normalize", "weighted", "candidates"), VARIANTS)
def test_eager_and_ours_agree_with_the_reference(mask, normalize, weighted, candidates):
    case = small(mask, normalize, weighted, candidates)
    x = common.Inputs(case)
    scores, argmax = common.eager(x.Q, x.D, **x.options, winners=True)
    assert argmax.shape == (6, 70, 7)
    assert torch.equal(scores, common.eager(x.Q, x.D, **x.options))
    assert common.error_of(x, scores) < 1e-6
    assert common.error_of(x, contenders.forward(case, x)["lik_ops"]()) < 1e-6
    winners = small(mask, normalize, weighted, candidates, what="winners")
    assert torch.equal(contenders.forward(winners, x)["lik_ops"]()[0], contenders.forward(case, x)["lik_ops"]())


def test_a_wrong_last_document_is_seen():
    x = common.Inputs(small())
    scores = common.eager(x.Q, x.D)
    scores[-1, -1] *= 1.1
    assert common.error_of(x, scores) > 1e-4
    scores[-1, -1] = float("nan")
    assert not common.error_of(x, scores) < forward.TOLERANCE


# gradients


@pytest.mark.parametrize(("mask", "normalize", "weighted", "candidates"), VARIANTS)
def test_gradients_are_checked_at_the_full_shape(mask, normalize, weighted, candidates):
    case = small(mask, normalize, weighted, candidates)
    x = common.Inputs(case)
    for name, score in contenders.training(case, x).items():
        if not isinstance(score, str) and name not in contenders.PEERS:
            assert max(training.errors_of(x, score).values()) < 1e-5


def test_wrong_gradients_are_seen():
    case = small()
    x = common.Inputs(case)
    score = contenders.training(case, x)["lik_ops lowmem"]
    assert training.errors_of(x, lambda Q, D: score(Q, 1.1 * D))["error_Q"] > 0.05
    leaking = training.errors_of(x, lambda Q, D: score(Q, D) + 1e-3 * D.sum())
    assert leaking["error_D"] == float("inf")


def test_bytes_that_a_step_needs():
    case = training.Case("", 2, 3, 4, 5, d=6, dtype="float32")
    assert case.own_bytes == 4 * 6 * (2 * 4 + 3 * 5) + 2 * 2 * 3 * 4 + 4 * 2 * 3


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no alarm signal")
def test_a_slow_first_call_ends():
    def swallowing() -> None:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    with pytest.raises(gpu.TooSlowError, match="not ready within 0 s"), gpu.time_limit(0.05):
        swallowing()


# tables


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_documents_show_the_committed_results(name):
    text = (tables.ROOT / name).read_text()
    assert tables.rewritten(text) == text, "run make figures"


def test_every_block_is_in_a_document():
    text = "".join((tables.ROOT / name).read_text() for name in tables.DOCUMENTS)
    for name in tables.BLOCKS:
        assert f"<!-- {name}: " in text


def test_a_stale_block_is_rewritten(tmp_path):
    document = "before\n<!-- cpu: generated -->\nstale 1.23\n<!-- /cpu -->\nafter\n"
    text = tables.rewritten(document)
    assert "stale" not in text
    assert text.startswith("before\n<!-- cpu: generated -->\n")
    assert text.endswith("<!-- /cpu -->\nafter\n")
    assert tables.rewritten(text) == text


def test_another_precision_is_not_compared():
    ours, exact = {"ms": 3.0, "exact": True}, {"ms": 2.0, "exact": True}
    contenders = {"lik_ops": ours, "eager": exact, "half": {"ms": 1.0, "exact": False}, "gone": {"failed": "why"}}
    assert tables.best_peer({"contenders": contenders}) == ("eager", 2.0)
    assert tables.best_peer({"contenders": {"lik_ops": ours}}) is None
    assert tables.cell(contenders["half"], best=2.0) == "1.0000 *"
    assert tables.cell(exact, best=2.0) == "**2.0000**"
    assert tables.cell(contenders["gone"], best=2.0) == "-"


# pictures


@pytest.fixture(scope="module")
def plot():
    pytest.importorskip("matplotlib", reason="pictures: pip install lik-ops[docs]")
    import plot

    return plot


def texts(path: Path) -> str:
    return "\n".join(t.text for t in ET.parse(path).iter("{http://www.w3.org/2000/svg}text") if t.text)


def test_pictures_show_the_results(plot, tmp_path):
    document = tables.load("forward")
    path = plot.roofline(out=tmp_path)
    shown = texts(path)
    for record in plot.drawn(document):
        assert record["case"]["name"] in shown
    assert f"{document['settings']['ceilings']['tflops']:.0f} TFLOP/s" in shown
    assert "lik_ops" in shown
    ratios = texts(plot.speed(out=tmp_path))
    for record in document["records"]:
        if (peer := tables.best_peer(record)) and "lik_ops" in tables.timed(record):
            assert f"{peer[1] / record['contenders']['lik_ops']['ms']:.2f}" in ratios
            assert record["case"]["name"] in ratios


def test_pictures_follow_dark_mode(plot, tmp_path):
    svg = plot.roofline(out=tmp_path).read_text()
    ET.fromstring(svg)
    for light, dark in plot.DARK.items():
        assert f": {light}" in svg.partition("@media")[0]
        assert f'[style*="fill: {light}"]{{fill:{dark} !important}}' in svg.partition("prefers-color-scheme: dark")[2]


def test_pictures_are_of_the_committed_results(plot, tmp_path):
    for name in ("forward-roofline.svg", "forward-speed.svg"):
        assert plot.digest() in (plot.IMAGES / name).read_text(), "run make figures"
    shutil.copy(tables.RESULTS / "forward.json", tmp_path)
    document = json.loads((tmp_path / "forward.json").read_text())
    document["settings"]["ceilings"]["tflops"] += 1
    (tmp_path / "forward.json").write_text(json.dumps(document))
    assert plot.digest(tmp_path) != plot.digest()


def test_cases_of_equal_intensity_stand_apart(plot):
    xs = list(plot.spread([32.0, 32.0, 32.1, 128.0]))
    assert xs == sorted(xs)
    assert min(b / a for a, b in itertools.pairwise(xs)) > 1.1
    assert xs[1] == pytest.approx(32)
    assert xs[3] == 128
