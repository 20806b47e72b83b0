"""Test the page on tiles and memory: its formulas, and its example and sliders in headless Chromium.

`count` repeats the formulas of docs/tiles.md. `test_site.py` opens the page of the built site.
"""

import json
import random
import re
from pathlib import Path

import pytest
import torch

import lik_ops

from ..support import browser as browsers

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tiles.md"
MIB = 2**20


def count(Nq, Nd, Lq, Ld, d, b, training):
    """Return the bytes of each side as (moved, memory), from the formulas of the page."""
    Q, D, S, M = Nq * Lq * d * b, Nd * Ld * d * b, Nq * Nd * Lq * Ld * b, Nq * Nd * Lq * b
    A = Nq * Nd * Lq * (4 if Ld > 32767 else 2)
    naive = Q + D + 2 * S + 2 * M + Nq * Nd * b, S + max(S, Q + D) if training else S + M
    return naive, (Q + D + 4 * Nq * Nd, Q + D + A + 4 * Nq * Nd if training else 4 * Nq * Nd)


def test_the_page_has_the_formulas():
    rows = dict(re.findall(r"^\| ([\w, ]+) \| (`.*`) \|$", PAGE.read_text().split("## Formulas")[1], re.M))
    assert rows["bytes moved by the forward"] == "`Q + D + 2 S + 2 M + Nq Nd b` | `Q + D + 4 Nq Nd`"
    assert rows["peak memory of the forward, beyond the inputs"] == "`S + M` | `4 Nq Nd`"
    both = rows["peak memory of forward and backward, beyond the inputs"]
    assert both == "`S + max(S, Q + D)` | `Q + D + A + 4 Nq Nd`"


def load_measurements():
    records = json.loads((ROOT / "benchmarks" / "results" / "training.json").read_text())["records"]
    return [x for x in records if not (x["case"]["candidates"] or x["case"]["mask"])]


@pytest.mark.parametrize("record", load_measurements(), ids=lambda x: x["case"]["name"])
def test_formulas_agree_with_measured_peaks(record):
    """Plain PyTorch within 1 %, as long as it ran. lik_ops needs a workspace of up to 3 MiB in addition."""
    case, found = record["case"], record["contenders"]
    b = torch.empty(0, dtype=getattr(torch, case["dtype"])).element_size()
    (_, naive), (_, fused) = count(*(case[name] for name in ("Nq", "Nd", "Lq", "Ld", "d")), b, True)
    assert fused / MIB == pytest.approx(record["own_mb"], rel=1e-9)
    assert 0 <= found["lik_ops lowmem"]["peak_mb"] - fused / MIB <= 3
    if "peak_mb" in found.get("eager", {}):
        assert found["eager"]["peak_mb"] == pytest.approx(naive / MIB, rel=0.01)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Yield the page without the theme of the site: the HTML of docs/tiles.md with its script and styles."""
    directory = tmp_path_factory.mktemp("tiles")
    body = "".join(line for line in PAGE.read_text().splitlines(keepends=True) if line.startswith("<"))
    (directory / "tiles.html").write_text(f"<!doctype html><meta charset=utf-8><title>Tiles</title>{body}")
    for name in ("tiles.js", "tiles.css"):
        (directory / name).write_text((ROOT / "docs" / name).read_text())
    with browsers.open_browser() as browser:
        address = (directory / "tiles.html").as_uri()
        with browsers.open_page(browser, address, viewport={"width": 900, "height": 900}) as found:
            yield found


def test_the_script_computes_the_formulas(page):
    random.seed(0)
    cases = [
        {name: random.choice(values) for name, (_, values) in page.evaluate("likTiles.SIZES").items()}
        | {"b": random.choice([2, 4]), "training": random.random() < 0.5}
        for _ in range(200)
    ]
    cases.append({"Nq": 3, "Nd": 5, "Lq": 7, "Ld": 40000, "d": 11, "b": 2, "training": True})
    for case, found in zip(cases, page.evaluate("(cases) => cases.map(likTiles.count)", cases), strict=True):
        sides = [(found[side]["moved"], found[side]["memory"]) for side in ("naive", "fused")]
        for ours, expected in zip(sides, count(**case), strict=True):
            assert ours == pytest.approx(expected, rel=1e-12)
        operations = 2 * case["Nq"] * case["Nd"] * case["Lq"] * case["Ld"] * case["d"]
        assert found["operations"] == pytest.approx(operations, rel=1e-12)
        assert found["naive"]["intensity"] <= case["d"] / case["b"]


@pytest.mark.parametrize("size", [2, 3, 6])
def test_the_example_ends_with_the_formulas_and_the_scores(page, size):
    example = page.evaluate("likTiles.EXAMPLE")
    steps = page.evaluate("(n) => likTiles.countSteps(n)", size)
    states = page.evaluate("([n, k]) => Array.from({length: k + 1}, (_, i) => likTiles.simulate(n, i))", [size, steps])
    Q, D = (torch.tensor(page.evaluate(f"likTiles.{name}"), dtype=torch.float32) for name in "QD")
    expected = lik_ops.maxsim(Q, D).tolist()
    assert len(set(expected)) == 2
    for side, (moved, memory) in zip(("naive", "fused"), count(**example), strict=True):
        found = [state[side] for state in states]
        assert (found[0]["moved"], found[-1]["moved"], found[-1]["peak"]) == (0, moved, memory)
        assert found[-1]["scores"] == expected and found[-2 if side == "naive" else 0]["scores"] == [None, None]
        amounts = [x["moved"] for x in found]
        assert amounts == sorted(amounts)
    assert states[steps // 2]["fused"]["scores"] == expected  # all tiles once
    assert max(state["fused"]["registers"] for state in states) == example["Lq"] * (size + 1) * 4


def figures(page, side):
    names, values = page.locator(f"#tiles-{side} dt"), page.locator(f"#tiles-{side} dd")
    return dict(zip(names.all_inner_texts(), values.all_inner_texts(), strict=True))


def test_a_keyboard_steps_through_the_example(page):
    page.get_by_label("Tile:").focus()
    page.get_by_label("Tile:").select_option("6")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "tiles-step"
    page.keyboard.press("ArrowRight")
    assert page.get_by_text("Step 1 of 5", exact=True).is_visible()
    assert figures(page, "naive")["bytes moved"] == "416 B"  # Q 128, a document 192, similarities 96
    assert figures(page, "fused") == {
        "bytes moved": "324 B",
        "device memory, beyond the inputs": "8 B",
        "peak of this memory": "8 B",
        "registers of the tile and the maxima": "112 B",
        "scores": "A 20, B ...",
    }
    status = page.get_by_role("status").first.inner_text()
    assert "Plain PyTorch: Multiply, and write the similarities of tokens 1 to 6 of document A. 416 B moved." in status
    page.keyboard.press("End")
    assert figures(page, "naive")["scores"] == figures(page, "fused")["scores"] == "A 20, B 25"
    page.get_by_role("button", name="Back").focus()
    page.keyboard.press("Enter")
    assert page.get_by_text("Step 4 of 5", exact=True).is_visible()
    assert figures(page, "naive")["scores"] == "A ..., B ..."
    page.get_by_role("button", name="Play").focus()
    page.keyboard.press("Space")
    page.get_by_text("Step 5 of 5", exact=True).wait_for(timeout=5000)
    assert page.get_by_role("button", name="Play").is_visible()


def table(page):
    """Return the cells of each row, keyed by the first cell."""
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator("#tiles-table tbody tr").all()]
    return {cells[0]: [cell.strip() for cell in cells[1:]] for cells in rows}


def test_sliders_show_the_formulas(page):
    page.get_by_role("button", name="Train with 256 in-batch negatives").click()
    summary = page.locator("#tiles-summary")
    assert summary.inner_text() == (
        "A training step needs 2.52 GB in plain PyTorch, and 26.2 MB in lik_ops, beyond the inputs."
    )
    (_, naive), (_, fused) = count(256, 256, 32, 300, 128, 2, True)
    assert (round(naive / 1e9, 2), round(fused / 1e6, 1)) == (2.52, 26.2)
    page.get_by_label("Ld tokens of a document:").focus()
    page.keyboard.press("End")
    page.get_by_label("Nd documents:").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_label("dtype").select_option("4")
    page.get_by_label("call").select_option("")
    (moved, naive), (fused_moved, fused) = count(256, 512, 32, 8192, 128, 4, False)
    assert page.get_by_label("Nd documents:").get_attribute("aria-valuetext") == "512"
    rows = table(page)
    memory = [f"{naive / 1e9:.0f} GB", f"{fused / 1e3:.0f} kB", f"{naive / fused:,.0f}x"]
    assert rows["peak memory beyond the inputs"] == memory
    assert rows["bytes moved by the forward"][:2] == [f"{moved / 1e9:.0f} GB", f"{fused_moved / 1e9:.2f} GB"]
    assert "137 GB (more than 1 GPU of 80 GB) in plain PyTorch" in summary.inner_text()


def test_every_control_has_a_name(page):
    controls = page.locator("input, select, button")
    assert controls.count() == 16
    for n in range(controls.count()):
        name = controls.nth(n).evaluate("(x) => x.labels?.[0]?.textContent || x.textContent")
        assert name.strip(), controls.nth(n).evaluate("(x) => x.outerHTML")
