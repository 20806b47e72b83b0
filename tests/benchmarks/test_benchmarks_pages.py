"""Test the benchmark tables and plots, both for results that a test writes and for the committed results."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the GPU benchmarks import triton")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

from benchmarks.calls import hosts  # noqa: E402
from benchmarks.operators import (  # noqa: E402
    quantized,
    ragged,
)
from benchmarks.report import (  # noqa: E402
    add,
    tables,
)
from benchmarks.retrieval import retrieve  # noqa: E402

# add


def test_short_run_is_merged_into_earlier_results(tmp_path, monkeypatch):
    def result(commit, gpu="H100", **rows):
        records = [{"case": {"name": name}, **row} for name, row in rows.items()]
        return {"benchmark": "x", "environment": {"commit": commit, "gpus": [gpu]}, "records": records}

    old = result("old", a={"ms": 1}, b={"ms": 2, "commit": "older"}, c={"ms": 3})
    new = result("new", c={"ms": 4}, a={"failed": "no time left"}, d={"ms": 5, "failed": {"peer": "why"}})
    (tmp_path / "old.json").write_text(json.dumps(old))
    (tmp_path / "new.json").write_text(json.dumps(new))
    monkeypatch.setattr(sys, "argv", ["add.py", str(tmp_path / "new.json"), "--to", str(tmp_path / "old.json")])
    add.main()
    found = json.loads((tmp_path / "old.json").read_text())
    rows = [(r["case"]["name"], r["ms"], r.get("commit")) for r in found["records"]]
    assert rows == [("a", 1, "old"), ("b", 2, "older"), ("c", 4, None), ("d", 5, None)]
    assert found["environment"]["commit"] == "new"
    elsewhere = add.joined(found, result("newest", gpu="H200", c={"ms": 6}))
    rows = [(r["case"]["name"], r["commit"], r["gpus"]) for r in elsewhere["records"] if "commit" in r]
    assert rows == [("a", "old", ["H100"]), ("b", "older", ["H100"]), ("d", "new", ["H100"])]
    back = add.joined(elsewhere, result("last", a={"ms": 7}))
    assert [("gpus" in r, r["case"]["name"]) for r in back["records"]] == [(n == "c", n) for n in "abcd"]
    with pytest.raises(ValueError, match="benchmark"):
        add.joined(old, {**old, "benchmark": "y"})


# tables


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_documents_show_the_committed_results(name):
    text = (tables.ROOT / name).read_text()
    assert tables.rewritten(text) == text, "run make figures"


def test_readme_limits_match_the_results():
    limits = " ".join((tables.ROOT / "README.md").read_text().split("\n## Limits\n")[1].split("\n## ")[0].split())
    forward = {r["case"]["name"]: r for r in tables.load("forward")["records"]}
    tiny, candidates, many, long = (
        tables.best_peer(forward[name])[1] / forward[name]["contenders"][tables.OURS]["ms"]
        for name in ("tiny 8x8", "candidates 256x16", "rerank 100k", "rerank 1k long")
    )
    assert f"{tiny:.2f} at 8 x 8, {candidates:.3f} for candidates, {many:.2f} for one query x 100,000" in limits
    assert f"{long:.2f} for one query x 1,000 documents of 1,024 tokens" in limits

    host = {r["name"]: r["us"] for r in tables.load("host")["records"]}
    peers = [us for name, us in host.items() if name.startswith("step, ") and name != "step, lik::maxsim_fwd"]
    eager = host["step lowmem"] / min(peers)
    step, encoder = (host[f"lik_ops.maxsim, {x}"] / host[f"einsum, {x}"] for x in ("step", "step of an encoder"))
    assert f"costs {eager:.2f} times the host time" in limits
    assert f"costs {step:.2f} times the host time of the naive formula, and {encoder:.2f} times with" in limits

    options = tables.load("options")["records"]
    normalized = [r for r in options if r["case"]["normalize"]]
    costs = [r["cost"] for r in normalized]
    assert f"`normalize` makes a call {min(costs):.2f} to {max(costs):.2f} times" in limits
    slower = {r["case"]["name"]: r["ms"]["option"] / r["ms"]["by hand"] for r in normalized}
    (worst,) = [name for name, ratio in slower.items() if ratio > 1]
    assert worst == "normalize pages 64x64" and f"pages 64 x 64 ({slower[worst]:.2f} times as long)" in limits

    ragged = tables.load("ragged")["records"]
    ratios = [r["ratio_to_dense"] for r in ragged if "ratio_to_dense" in r]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times as long as the dense kernel" in limits
    holes = [r["ratio_to_unmasked"]["holes"] for r in ragged if "ratio_to_unmasked" in r]
    holes += [
        forward[f"{name} holes"]["contenders"][tables.OURS]["ms"] / forward[name]["contenders"][tables.OURS]["ms"]
        for name in ("rerank 1k", "serve 16x1k")
    ]
    small = max(r["cost"] for r in options if r["case"]["name"].startswith("holes") and r["ms"]["plain"] < 0.05)
    assert f"{min(holes):.2f} to {max(holes):.2f} times as long as no mask, and up to {small:.2f} times" in limits

    gpus = [r["contenders"][tables.OURS] for r in tables.load("retrieve_gpus")["records"]]
    single, rows = ([r[key] for r in gpus] for key in ("efficiency", "sustained_efficiency"))
    assert f"reach {min(single):.2f} (one query, 3 ms) to {max(single):.2f} of four times one GPU" in limits
    assert f"{min(rows):.2f} to {max(rows):.2f} in consecutive searches" in limits


def compute_excess(record: dict, ms: float) -> float:
    """Return by how much a time exceeds its goal."""
    return ms / (record.get("goal_ms") or record["case"]["goal_ms"]) - 1


def test_performance_page_limits_match_the_results():
    page = (tables.ROOT / "docs" / "performance.md").read_text()
    limits = " ".join(page.split("\n## Limits\n")[1].split("\n## ")[0].split())

    def found(name):
        return {r["case"]["name"]: r for r in tables.load(name)["records"]}

    forward = {name: r for name, r in found("forward").items() if r["case"]["goal_ms"]}
    missed = {name: compute_excess(r, r["contenders"][tables.OURS]["ms"]) for name, r in forward.items()}
    missed = {name: f"{name} by {x:.0%}".replace("%", " %") for name, x in missed.items() if x > 0}
    assert sorted(missed) == ["pages 1x1k", "rerank 1k", "rerank 1k long", "rerank Lq 128"]
    assert all(text in limits for text in missed.values())
    training = found("training")
    timed = [r for r in training.values() if r["case"]["goal_ms"]]
    excess = [compute_excess(r, r["contenders"]["lik_ops lowmem"]["ms"]) for r in timed]
    assert max(excess) <= 0  # else the page names the step
    soft, head, chamfer = (
        {n: compute_excess(r, r["results"][tables.OURS]["ms"]) for n, r in found(name).items() if r["goal_ms"]}
        for name in ("soft", "head", "chamfer")
    )
    two, three, step = (100 * soft[f"soft {name}"] for name in ("256x256", "pages 32x32", "step 256x256"))
    assert f"the soft forward by {two:.0f} and {three:.0f} %, the soft step by {step:.0f} %" in limits
    assert f"the head of one query by {100 * head['1 x 1000']:.0f} %" in limits
    assert f"Chamfer at d 128 by {100 * chamfer['16384 d 128']:.0f} %" in limits
    assert len([x for x in (*soft.values(), *head.values(), *chamfer.values()) if x > 0]) == 5
    codes = [r["ms"]["codes"] / r["row"]["goal"] - 1 for r in tables.load("residual")["records"] if r["row"]["goal"]]
    assert f"residual codes by {100 * min(codes):.0f} to {100 * max(codes):.0f} %" in limits
    one, many = (r["ms"] / r["goal"] for r in tables.load("billion")["records"] if r["where"] == "device")
    assert f"a billion tokens by {100 * (one - 1):.0f} % (16 queries: {many:.1f} times the goal)" in limits

    quantized = [r for r in tables.load("quantized")["records"] if "goals" in r]
    single, others = (
        [
            r["ms"][k] / goal - 1
            for r in quantized
            for k, goal in r["goals"].items()
            if (r["case"]["Nq"] * r["case"]["Lq"] == 32) is one_query
        ]
        for one_query in (True, False)
    )
    assert (
        f"goals of one query by up to {100 * max(single):.0f} %, and others by up to {100 * max(others):.0f}" in limits
    )
    slow = [r["ms"]["int8"] / r["ms"]["full"] for r in quantized if r["case"]["Nq"] * r["case"]["Lq"] > 128]
    assert f"needs {min(slow):.1f} to {max(slow):.1f} times the time of bf16" in limits

    options = found("options")
    costs = [
        options[f"normalize {x}"]["cost"] - 1 for x in ("4x1k", "16x1k", "16x1k winners", "16x1k d 64", "16x1k d 320")
    ]
    costs += [r["cost"] - 1 for name, r in options.items() if name.startswith("normalize step")]
    assert f"costs {100 * min(costs):.0f} to {100 * max(costs):.0f} % from 128 to 512" in limits
    by_hand = options["normalize pages 64x64"]["ms"]
    assert f"it is {100 * (by_hand['option'] / by_hand['by hand'] - 1):.0f} % slower than by hand" in limits
    holes = max(r["cost"] - 1 for n, r in options.items() if n.startswith("holes") and r["ms"]["plain"] < 0.05)
    assert f"cost up to {100 * holes:.0f} % in calls below 0.05 ms" in limits

    large = found("cross_entropy")["loss 4096x4096"]["results"]
    ours, scores = large[tables.OURS], large["scores"]
    assert f"needs {ours['ms'] / scores['ms']:.1f} times the time" in limits
    assert ours["peak_mb"] / scores["peak_mb"] == pytest.approx(1 / 5, abs=0.01) and "a fifth" in limits
    calls = [call for call in tables.load("cliffs")["calls"] if "failed" not in call]
    others = {"unified", "projected queries"}
    slower = [found for call in calls if (found := [x for name, x in call["slower"].items() if name not in others])]
    assert f"{len(slower)} of {len(calls):,} random calls" in limits
    assert f"at most {max(map(max, slower)):.2f} times" in limits
    (top_k,) = (r for r in tables.load("first_calls")["records"] if r["case"]["name"] == "maxsim_token_topk")
    assert f"need {1000 * top_k['seconds'][-1]:.0f} ms" in limits
    shapes = [
        (ms := r["ms"])["plain"] / min(x for n, x in ms.items() if n != "plain")
        for r in tables.load("monotone")["records"]
    ]
    slower = [x for x in shapes if x > 1.05]
    assert f"{len(slower)} of {len(shapes)} random shapes need 1.05 to {max(slower):.2f} times" in limits
    tf32 = {
        r["contender"]: r["ms"] for r in tables.load("tf32")["records"] if (r["d"], r["precision"]) == (320, "tf32")
    }
    assert f"TF32 at d 320 needs {tf32['lik_ops'] / tf32['einsum']:.2f} times" in limits


def test_every_shown_case_is_in_the_results():
    for name, cases in tables.SHOWN.items():
        assert [r["case"]["name"] for r in tables.shown(name, tables.load(name)["records"])] == list(cases)


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


def test_inexact_peers_are_not_compared():
    ours, exact = {"ms": 3.0, "exact": True}, {"ms": 2.0, "exact": True}
    contenders = {"lik_ops": ours, "eager": exact, "half": {"ms": 1.0, "exact": False}, "gone": {"failed": "why"}}
    assert tables.best_peer({"contenders": contenders}) == ("eager", 2.0)
    assert tables.best_peer({"contenders": {"lik_ops": ours}}) is None
    assert tables.cell(contenders["half"], best=2.0) == "1.0000 *"
    assert tables.cell(exact, best=2.0) == "**2.0000**"
    assert tables.cell(contenders["gone"], best=2.0) == "-"


def write_results(directory: Path, name: str, records: list[dict], **settings) -> None:
    versions = {"torch": "2.11.0", "late-interaction-kernels": "0.4.5"}
    env = {"gpus": ["NVIDIA H200"], "versions": versions, "commit": "0123456789", "cpu": "", "threads": 1}
    document = {"environment": env, "settings": settings, "records": records}
    (directory / f"{name}.json").write_text(json.dumps(document))


def test_tables_without_results_show_not_measured(tmp_path):
    assert tables.ragged(tmp_path) == "Not measured yet (`benchmarks/operators/ragged.py`)."
    assert tables.retrieve(tmp_path) == "Not measured yet (`benchmarks/retrieval/retrieve.py`)."
    assert tables.hosts(tmp_path) == "Not measured yet (`benchmarks/calls/hosts.py`)."


def test_table_of_ragged_results(tmp_path):
    case = dataclasses.asdict(ragged.CASES[0])
    entries = {
        "lik_ops": {"ms": 0.02, "exact": True, "peak_mb": 3.4, "host_us": 51.0},
        "lik_ops padded": {"ms": 0.03, "exact": True},
        "padded eager": {"ms": 0.05, "exact": False},
        "flash-maxsim packed": {"failed": "why"},
    }
    record = {
        "case": case,
        "contenders": entries,
        "dense_mean": {"ms": 0.016},
        "ratio_to_dense": 1.234,
        "of_floor": 0.5,
    }
    masks = {"no mask": {"ms": 0.02}, "holes": {"ms": 0.03}}
    ratios = {"holes": 1.5, "prefix": 0.9}
    masked = {"case": dataclasses.asdict(ragged.MASKED[0]), "contenders": masks, "ratio_to_unmasked": ratios}
    gone = {"case": case, "contenders": {}, "failed": "no time left"}
    write_results(tmp_path, "ragged", [masked, record, gone])
    lines = tables.ragged(tmp_path).splitlines()
    assert lines[0].startswith("NVIDIA H200, torch 2.11.0, late-interaction-kernels 0.4.5, commit 0123456.")
    row = (
        "| rerank 1k | 1 x 1000, 32, 300, 128 | 0.0200 | 0.0160 | 1.23 | 0.50 | 1.50x | - | - | - | 2.50x * | 3 | 51 |"
    )
    assert [line for line in lines if line.startswith("| rerank")] == [row]
    assert "take 1.50 to 1.50 times" in lines[-1] and "and 0.90 to 0.90 times with prefix masks" in lines[-1]
    write_results(tmp_path, "ragged", [record])
    assert tables.ragged(tmp_path).splitlines() == lines[:-2]


def test_table_of_searches(tmp_path):
    resident = retrieve.new_record("resident", 1, 1_000_000) | {"floor_ms": 10.5, "read_ms": 10.6}
    ours = {"ms": 10.7, "of_floor": 0.9813, "of_sustained": 0.7421, "of_read": 0.9907, "exact": True}
    resident["contenders"] = {"lik_ops": ours, "eager": {"ms": 21.4, "exact": False}, "flash-maxsim": {"failed": "why"}}
    streamed = retrieve.new_record("streamed", 16, 170_000) | {"floor_ms": 150.0}
    streamed["contenders"] = {
        "lik_ops pinned": {"ms": 160.0, "of_floor": 0.9375},
        "lik_ops pageable": {"failed": "why"},
    }
    gone = {"case": {"name": "disk 1", "kind": "disk"}, "contenders": {}, "failed": "no time left"}
    write_results(tmp_path, "retrieve", [resident, streamed, gone])
    lines = tables.retrieve(tmp_path).splitlines()
    assert lines[-3:] == [
        "| on the GPU | 1 | 1,000,000 | 10.50 | 10.70 | 0.981 | 0.742 | 0.991 | 0.97 | - | - | 2.00x * |",
        "| pinned | 16 | 170,000 | 150.00 | 160.00 | 0.938 | - | - | 0.9 | - | - | - |",
        "| pageable | 16 | 170,000 | 150.00 | - | - | - | - |  | - | - | - |",
    ]
    record = retrieve.new_record("gpus", 64, 1_000_000)
    record["contenders"] = {"lik_ops": {"ms": 65.0, "one_ms": 120.0, "efficiency": 0.923}}
    failed = {"case": {"name": "gpus 1"}, "contenders": {"lik_ops": {"failed": "wrong"}}}
    whole = record | {"parts": {"local_ms": [60.5, 61.25], "agree_ms": [0.06, 0.05], "merge_ms": [0.1, 0.125]}}
    whole["contenders"] = {"lik_ops": record["contenders"]["lik_ops"] | {"sustained_efficiency": 0.981}}
    write_results(tmp_path, "retrieve_gpus", [record, whole, failed], gpus=2)
    text = tables.retrieve(tmp_path)
    assert text.startswith("\n".join(lines))
    assert text.splitlines()[-2:] == [
        "| 64 | 1,000,000 | 120.00 | 65.00 | - | - | - | 0.92 | - |",
        "| 64 | 1,000,000 | 120.00 | 65.00 | 61.25 | 0.06 | 0.12 | 0.92 | 0.98 |",
    ]
    assert "2 GPUs" in text


def test_table_of_losses(tmp_path):
    theirs = {"ms": 40.0, "peak_mb": 900.4, "scoring_ms": 39.0, "scoring_peak_mb": 800, "error_Q": 0.2, "error_D": 0.3}
    ours = {"ms": 10.0, "peak_mb": 90.0, "scoring_ms": 9.5, "scoring_peak_mb": 80, "error_Q": 1e-9, "error_D": 0.0}
    case = dataclasses.asdict(hosts.CASES[3])
    whole = {"case": case, "contenders": {"sentence-transformers": theirs, "lik_ops": ours, "eager": {"failed": "why"}}}
    gone = {"case": case, "contenders": {}, "skipped": "why"}
    write_results(tmp_path, "hosts", [whole, gone])
    row = "| cached | sentence-transformers | 256 x 256, 128, 2048, 128 by 32 |"
    assert tables.hosts(tmp_path).splitlines()[-2:] == [
        f"{row} 40.00 (900) | 10.00 (90) | - | 39.00 (800) | 9.50 (80) | 4.00x | 2e-01 / 1e-09 | 3e-01 / 0e+00 |",
        f"{row} - | - | - | - | - | - | - / - | - / - |",
    ]


def test_tables_of_formats(tmp_path):
    assert tables.formats(tmp_path) == "Not measured yet (`benchmarks/operators/quantized.py`)."
    assert tables.fidelity(tmp_path) == "Not measured yet (`benchmarks/retrieval/fidelity.py`)."
    each = {"error": 1e-3, "spearman": 0.99986, "recall10": 1.0, "recall100": 0.99}
    ms = {"full": 0.5, "int8": 0.25, "flash-maxsim int8 x int8": 0.75, "flash-maxsim int8 x half": 1.0}
    whole = {"case": dataclasses.asdict(quantized.ROWS[0].case), "ms": ms, "quality": dict.fromkeys(ms, each)}
    whole["quantize_ms"] = {"int8": 2.0}
    found = {"case": {"name": "search topics 100000", "tokens": "topics", "documents": 100_000}}
    found |= {"ms": {"full": 1.0, "int8": 0.5, "both": 0.6}, "rescored": 0.00123, "recall": 0.9}
    write_results(tmp_path, "quantized", [whole, found, {"case": {"name": "search random 9"}, "failed": "why"}])
    text = tables.formats(tmp_path).splitlines()
    row = "| 1 x 1000, 32, 300, 128 |"
    gaps = " | ".join("-" * (len(tables.FORMATS) - 2))
    assert f"{row} 0.5000 | 0.2500 | {gaps} | 0.7500 (flash-maxsim int8 x int8) |" in text
    assert f"{row} 1e-03, 0.9999 | 1e-03, 0.9999 | {gaps} | 1e-03, 0.9999 |" in text
    assert f"{row} 150 | {gaps} |" in text
    whole["peers_commit"] = "1234567890"
    write_results(tmp_path, "quantized", [whole])
    assert f"{gaps} | 0.7500 (flash-maxsim int8 x int8, 1234567) |" in tables.formats(tmp_path)
    assert text[-1] == "| topics | 100,000 | 1.00 | 0.50 | 0.60 | - | - | 0.123% | 0.90 |"
    record = {
        "case": {"name": "hashed"},
        "formats": {"full": {"bytes": 256, "mrr": 0.5}, "int8": {"bytes": 132, "rate": 1.25, **each}},
    }
    write_results(tmp_path, "fidelity", [record], queries=300)
    assert tables.fidelity(tmp_path).splitlines()[-2:] == [
        "| the demo's encoder | full | 256 | - | 0.500 | - | - | - | - |",
        "| the demo's encoder | int8 | 132 | 1.25 | - | 1.0e-03 | 0.9999 | 1.000 | 0.990 |",
    ]


# pictures


@pytest.fixture(scope="module")
def plot():
    pytest.importorskip("matplotlib", reason='pictures: pip install ".[docs]"')
    from benchmarks.report import plot

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


@pytest.mark.parametrize("name", ["roofline", "speed"])
def test_no_text_of_a_picture_is_cut(plot, monkeypatch, tmp_path, name):
    figures = []
    monkeypatch.setattr(plot, "save", lambda figure, path, results: figures.append(figure))
    getattr(plot, name)(out=tmp_path)
    (figure,) = figures
    figure.canvas.draw()
    texts = [t for t in figure.findobj(lambda t: hasattr(t, "get_text")) if t.get_text() and t.get_visible()]
    assert len(texts) > 20
    cut = [t.get_text() for t in texts if not figure.bbox.padded(1).containsx(t.get_window_extent().x0)]
    cut += [t.get_text() for t in texts if not figure.bbox.padded(1).containsx(t.get_window_extent().x1)]
    plot.plt.close(figure)
    assert not cut


def test_no_case_is_faster_than_the_peak_of_the_gpu(plot):
    """The cuBLAS rate is not a limit, and no page may call it a ceiling."""
    document = tables.load("forward")
    peak = plot.PEAK_TFLOPS[document["environment"]["gpus"][0]]
    rates = [c["tflops"] for r in document["records"] for c in r["contenders"].values() if "tflops" in c]
    assert document["settings"]["ceilings"]["tflops"] < max(rates) < peak
    for name in tables.DOCUMENTS:
        assert "ceiling" not in (tables.ROOT / name).read_text().lower()


def test_pictures_follow_dark_mode(plot, tmp_path):
    svg = plot.roofline(out=tmp_path).read_text()
    ET.fromstring(svg)
    for light, dark in plot.DARK.items():
        assert f": {light}" in svg.partition("@media")[0]
        assert f'[style*="fill: {light}"]{{fill:{dark} !important}}' in svg.partition("prefers-color-scheme: dark")[2]


def test_pictures_match_the_committed_results(plot, tmp_path):
    for name in ("forward-roofline.svg", "forward-speed.svg"):
        assert plot.digest() in (plot.IMAGES / name).read_text(), "run make figures"
    shutil.copy(tables.RESULTS / "forward.json", tmp_path)
    document = json.loads((tmp_path / "forward.json").read_text())
    document["settings"]["ceilings"]["tflops"] += 1
    (tmp_path / "forward.json").write_text(json.dumps(document))
    assert plot.digest(tmp_path) != plot.digest()


def test_equal_intensities_are_spread_apart(plot):
    xs = list(plot.spread([32.0, 32.0, 32.1, 128.0]))
    assert xs == sorted(xs)
    assert min(b / a for a, b in itertools.pairwise(xs)) > 1.1
    assert xs[1] == pytest.approx(32)
    assert xs[3] == 128
