"""The site has every page and every public name. `make docs` builds it, and fails where a link leads nowhere."""

import ast
import re
from pathlib import Path
from pkgutil import iter_modules, resolve_name

import pytest

import lik_ops
from lik_ops import integrations
from lik_ops.opcheck.samples import registered

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
NAV = re.findall(r"^ +- .+: ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1], re.M)
API = "".join(path.read_text() for path in sorted((DOCS / "api").glob("*.md")))
DOCUMENTED = re.findall(r"^::: ([\w.]+)$", API, re.M)


def assigned(name):
    """The value of a constant of docs/building.py, which only the environment of the site can import."""
    for node in ast.parse((DOCS / "building.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"docs/building.py has no {name}")


def test_every_page_is_in_the_navigation_once():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    outside = assigned("OUTSIDE")
    assert all((ROOT / name).exists() for name in outside.values())
    assert (ROOT / "examples" / f"{assigned('NOTEBOOK')}.ipynb").exists()
    assert sorted(NAV) == sorted({*pages, *outside, f"{assigned('NOTEBOOK')}.md"})


def test_every_public_name_is_on_a_page():
    apart = ("lik_ops.ops.", "lik_ops.integrations.")  # some import what is not installed
    found = [resolve_name(name) for name in DOCUMENTED if not name.startswith(apart)]
    public = [name for name in lik_ops.__all__ if name != "__version__"]
    assert not [name for name in public if not any(getattr(lik_ops, name) is x for x in found)]
    assert "lik_ops.distributed.retrieve" in DOCUMENTED and "lik_ops.distributed" in DOCUMENTED
    modules = {f"lik_ops.integrations.{m.name}" for m in iter_modules(integrations.__path__) if m.name[0] != "_"}
    assert modules.issubset(DOCUMENTED)


def test_every_operator_is_on_a_page():
    documented = dict(re.findall(r'^::: lik_ops\.ops\.([\w.]+)\n    options:\n      heading: "lik::(\w+)"', API, re.M))
    assert documented == assigned("OPERATORS")
    assert set(documented.values()) == {*registered(), "maxsim_packaged"}


@pytest.mark.parametrize("name", sorted({name for name in DOCUMENTED if name.startswith("lik_ops.ops.")}))
def test_operators_are_where_the_page_says(name):
    path = ROOT / Path(*name.split(".")[:-1]).with_suffix(".py")
    assert f"\ndef {name.split('.')[-1]}(" in path.read_text()
