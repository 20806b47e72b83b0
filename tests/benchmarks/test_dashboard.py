"""Test the dashboard: its lines, and the page in headless Chromium."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.report import dashboard

from ..support import browser


def document(ms: float, gpu: str = "A", **more: object) -> dict:
    environment = {"gpus": [gpu], "commit": "f" * 40, "time": "2026-01-02T03:04:05"}
    record = {"case": {"name": "small", "Nq": 8}, "goal_ms": 1.0, "contenders": {"lik_ops": {"ms": ms, "exact": True}}}
    return {"environment": environment, "records": [record | more]}


def test_a_line_has_a_point_for_each_version_that_measured_it():
    documents = [document(2.0), document(1.0, peak_mb=7), {"records": []}, document(1.234567)]
    assert dashboard.series_of(documents) == [
        ["small", "lik_ops, ms", "ms", -1, [[0, 2.0], [1, 1.0], [3, 1.2346]]],
        ["small", "peak_mb", "MB", -1, [[1, 7.0]]],
    ]


def test_rows_with_the_same_name_have_distinct_labels():
    records = [{"case": {"name": "a", "dtype": x}} for x in ("half", "float")] + [{"kind": "k", "name": "b"}] * 2
    assert dashboard.labels(records) == ["a, half", "a, float", "k, b #1", "k, b #2"]


FILES = sorted((dashboard.ROOT / dashboard.RESULTS).glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_results_file_has_lines_with_distinct_names(path):
    lines = dashboard.series_of([json.loads(path.read_text())])
    names = [(label, figure) for label, figure, *_ in lines]
    assert lines and len(set(names)) == len(names)
    assert all(len(points) == 1 for *_, points in lines)


@pytest.mark.parametrize(
    ("path", "unit"),
    [("lik_ops ms", "ms"), ("lik_ops first_s", "s"), ("ms int8", "ms"), ("host_us new", "us"), ("x recall10", "")],
)
def test_unit_comes_from_the_last_key_with_a_unit(path, unit):
    assert dashboard.unit_of(tuple(path.split()))[0] == unit


def test_versions_are_the_commits_that_changed_a_file(tmp_path, monkeypatch):
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    path = tmp_path / dashboard.RESULTS / "a.json"
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(dashboard, "ROOT", tmp_path)
    path.write_text(json.dumps(document(3.0)))
    (only,) = dashboard.collect()
    assert [version[2] for version in only["versions"]] == ["not committed"]  # without git
    git("init", "--quiet")
    for ms, subject in ((3.0, "first"), (2.0, "second </script>")):
        path.write_text(json.dumps(document(ms)))
        git("add", ".")
        git("-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "--quiet", "-m", subject)
    path.write_text(json.dumps(document(1.0, "B")))
    (found,) = dashboard.collect()
    assert [version[2:] for version in found["versions"]] == [
        ["first", "A", "f" * 10],
        ["second </script>", "A", "f" * 10],
        ["not committed", "B", "f" * 10],
    ]
    assert found["series"][0][-1] == [[0, 3.0], [1, 2.0], [2, 1.0]]
    page = dashboard.render([found])
    assert dashboard.LINK in dashboard.render([found], in_site=True) and dashboard.LINK not in page
    assert page.count("</script>") == dashboard.TEMPLATE.read_text().count("</script>")


# Types into the filter, opens a group and a large chart, and points at its first dot.
USE = """<script>
const filter = document.getElementById("filter");
filter.value = "small lik_ops -other";
filter.dispatchEvent(new Event("input"));
document.querySelector("details:not([open]) summary")?.click();
setTimeout(() => {
  document.querySelector("td.row").click();
  const points = document.querySelectorAll("tr.large g.point");
  points[points.length - 1].dispatchEvent(new MouseEvent("mouseenter"));
}, 100);
</script></body>"""


def render_in_browser(page: Path, shown: str = "body") -> str:
    """Return the document after its scripts ran and the element `shown` is visible."""
    with browser.open_browser() as chromium, browser.open_page(chromium, page.as_uri()) as tab:
        tab.wait_for_selector(shown)
        return tab.content()


def test_the_page_filters_and_shows_the_commit_of_a_point(tmp_path):
    versions = [
        ["1234567890", "2026-01-01", "first <b>", "GPU A", "abc"],
        ["abcdef0123", "2026-01-02", "second", "GPU A", ""],
    ]
    versions.append(["", "2026-01-03", "third", "GPU B", ""])
    points = [[0, 2.0], [1, 1.0], [2, 5000.0]]
    lines = [["small", "lik_ops, ms", "ms", -1, points[:2]], ["small", "other, ms", "ms", -1, points]]
    lines += [["small", "lik_ops, peak_mb", "MB", -1, points], ["small", "lik_ops, host_ms", "ms", -1, points]]
    files = [{"name": "forward", "versions": versions, "series": lines}]
    page = tmp_path / "page.html"
    page.write_text(dashboard.render(files).replace("</body>", USE), encoding="utf-8")
    text = render_in_browser(page, "#tip")
    assert re.search(r'id="count"[^>]*>1 rows<', text)  # the first line has no point in the last version
    rows = re.findall(r'<td class="figure">(.*?)</td>', text)
    assert rows == ["lik_ops, host_ms"]
    assert len(re.findall(r"<polyline", text)) == 2  # in the small and in the large chart, GPU A alone
    tip = html.unescape(re.sub(r"<[^>]+>", "|", re.findall(r'<div id="tip".*?</div></div>', text)[0]))
    assert "5,000 ms" in tip and "working tree · 2026-01-03" in tip and "third" in tip and "GPU B" in tip
    assert "display: block" in text


def test_the_page_of_this_repository_opens_without_a_network(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(dashboard.render(dashboard.collect()), encoding="utf-8")
    addresses = set(re.findall(r"https?://[\w.]+", dashboard.TEMPLATE.read_text()))
    assert addresses == {"http://www.w3.org"}  # the namespace of SVG
    text = render_in_browser(page)
    stems = {path.stem for path in FILES}
    assert {"forward", "training", "quantized"} <= set(re.findall(r'<details id="(\w+)"', text)) <= stems
    assert text.count("<svg") > 100 and "<polyline" in text
