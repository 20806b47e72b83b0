"""Test that the site has every page and every public name. `make docs` builds it and fails for broken links."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from pkgutil import iter_modules, resolve_name

import pytest

import lik_ops
from lik_ops import integrations
from lik_ops.opcheck.samples.table import list_registered

from ..support import browser

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import building  # noqa: E402

PAGES = [ROOT / name for name in building.OUTSIDE.values()] + sorted(DOCS.rglob("*.md"))
NAV = re.findall(r"^ +- .+: ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1], re.M)
API = "".join(path.read_text() for path in sorted((DOCS / "api").glob("*.md")))
DOCUMENTED = re.findall(r"^::: ([\w.]+)$", API, re.M)


def test_every_page_is_in_the_navigation_once():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    outside = building.OUTSIDE
    assert all((ROOT / name).exists() for name in outside.values())
    assert (ROOT / "examples" / f"{building.NOTEBOOK}.ipynb").exists()
    assert sorted(NAV) == sorted({*pages, *outside, f"{building.NOTEBOOK}.md"})


def test_every_public_name_is_on_a_page():
    apart = ("lik_ops.ops.", "lik_ops.families.", "lik_ops.integrations.")  # some import missing packages
    found = [resolve_name(name) for name in DOCUMENTED if not name.startswith(apart)]
    public = [name for name in lik_ops.__all__ if name != "__version__"]
    assert not [name for name in public if not any(getattr(lik_ops, name) is x for x in found)]
    assert "lik_ops.distributed.retrieve" in DOCUMENTED and "lik_ops.distributed" in DOCUMENTED
    modules = {f"lik_ops.integrations.{m.name}" for m in iter_modules(integrations.__path__) if m.name[0] != "_"}
    assert modules.issubset(DOCUMENTED)


def test_every_operator_is_on_a_page():
    documented = dict(
        re.findall(r'^::: lik_ops\.((?:ops|families)\.[\w.]+)\n    options:\n      heading: "lik::(\w+)"', API, re.M)
    )
    assert documented == building.OPERATORS
    assert set(documented.values()) == {*list_registered(), "maxsim_packaged"}


@pytest.mark.parametrize(
    "name", sorted({name for name in DOCUMENTED if name.startswith(("lik_ops.ops.", "lik_ops.families."))})
)
def test_operators_are_defined_in_documented_modules(name):
    path = ROOT / Path(*name.split(".")[:-1]).with_suffix(".py")
    assert f"\ndef {name.split('.')[-1]}(" in path.read_text()


def test_the_table_of_contents_has_the_heading_of_every_entry():
    options = re.findall(r"^      heading: (.+)\n      toc_label: (.+)$", API, re.M)
    assert len(options) == len(re.findall(r"^      heading:", API, re.M)) > len(building.OPERATORS)
    assert all(heading == label for heading, label in options)


@pytest.mark.parametrize("name", building.OPERATORS.values())
def test_a_schema_has_a_line_for_each_argument(name):
    schema = building.schemas()[name]
    lines = building.wrap_schema(schema).splitlines()
    assert lines[0] == f"lik::{name}(" and lines[-1].startswith(") -> ")
    assert max(map(len, lines)) <= 88
    body = ", ".join(line.strip().removesuffix(",") for line in lines[1:-1])
    assert f"{lines[0]}{body}{lines[-1]}" == schema
    assert all(re.fullmatch(r"    (\*|[A-Za-z?\[\]0-9]+ [\w=.\"]+),", line) for line in lines[1:-1])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_link_texts_name_the_page_and_not_its_file(path):
    assert not re.findall(r"\[`?[\w./-]+\.md`?\]\(", path.read_text())


COLUMNS = 100  # of code that a window of 1,280 pixels shows


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_code_of_pages_fits_the_window(path):
    text = path.read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S)
    indented = re.findall(r"^    (.+)$", re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.M | re.S), re.M)
    lines = [line for block in fenced for line in block.splitlines()] + indented
    assert not [line for line in lines if len(line) > COLUMNS]


def test_code_of_the_notebook_and_of_docstrings_fits_the_window():
    cells = json.loads((ROOT / "examples" / f"{building.NOTEBOOK}.ipynb").read_text())["cells"]
    lines = [line.rstrip() for cell in cells if cell["cell_type"] == "code" for line in cell["source"]]
    sources = [path.read_text() for path in sorted((ROOT / "lik_ops").rglob("*.py"))]
    lines += [line for source in sources for line in re.findall(r"^ +((?:>>>|\.\.\.) .+)$", source, re.M)]
    assert not [line for line in lines if len(line) > COLUMNS]


def test_names_break_between_words_outside_code_blocks():
    name = "tests/ops/fast_path/test_eager.py::test_modes_see_the_operators"
    page = f"<p><code>{name}</code> <code>[Nq, Lq, d]</code></p><pre><span></span><code>{name}</code></pre>"
    broken = "tests/<wbr>ops/<wbr>fast_<wbr>path/<wbr>test_<wbr>eager.py"
    broken += "::<wbr>test_<wbr>modes_<wbr>see_<wbr>the_<wbr>operators"
    assert building.on_post_page(page) == page.replace(
        f"<p><code>{name}</code> <code>", f'<p><code>{broken}</code> <code class="short">'
    )
    entry = '<span class="md-ellipsis">\n    lik::maxsim_bwd_lowmem\n  </span>'
    assert "lik::<wbr>maxsim_<wbr>bwd_<wbr>lowmem\n" in building.on_post_page(entry)


def test_every_environment_variable_is_on_the_page_of_settings():
    sources = "".join(path.read_text() for path in sorted((ROOT / "lik_ops").rglob("*.py")))
    read = set(re.findall(r"\bLIK_OPS_[A-Z]+(?:_[A-Z]+)*\b", sources))
    listed = re.findall(r"^\| `(LIK_OPS_\w+)` \|", (DOCS / "api" / "settings.md").read_text(), re.M)
    assert sorted(listed) == sorted(read)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the built site."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="the site: pip install '.[docs]'")
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return directory


def test_the_built_site_shows_names_schemas_and_outputs(site):
    operators = (site / "api" / "operators.html").read_text()
    entries = re.findall(r'<span class="md-ellipsis">\s*([^\s]+)', operators.replace("<wbr>", ""))
    assert {f"lik::{name}" for name in building.OPERATORS.values()} < set(entries)
    assert "_composite" not in entries
    assert "\n    Tensor? q_mask=None,\n" in operators
    notebook = (site / "late_interaction.html").read_text()
    assert 'src="images/late_interaction-map.png"' in notebook and "Output" in notebook
    assert (site / "images" / "late_interaction-map.png").exists()
    assert 'href="dashboard.html"' in (site / "performance.html").read_text()
    assert '"name":"forward"' in (site / "dashboard.html").read_text()
    assert not re.search(r">(?:docs/)?[\w-]+\.md</a>", (site / "index.html").read_text())


def test_the_page_on_tiles_fits_the_window(site):
    """`test_tiles.py` tests what the page does, without the theme of the site."""
    inside = "(x) => { const box = x.getBoundingClientRect(); return box.left >= 0 && box.right <= innerWidth }"
    address = (site / "tiles.html").as_uri()
    with browser.open_browser() as chromium:
        for width in (390, 768, 1280):
            with browser.open_page(chromium, address, viewport={"width": width, "height": 900}) as page:
                page.get_by_role("button", name="Step", exact=True).click()
                assert page.get_by_text("Step 1 of 9", exact=True).is_visible()
                assert page.evaluate("document.documentElement.scrollWidth") == width
                for part in ("#tiles-naive", "#tiles-fused", "#tiles-table"):
                    assert page.locator(part).evaluate(inside), f"{part} is cut off at {width} pixels"
