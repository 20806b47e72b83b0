"""Test that the wheel contains the package and nothing else, and works outside the checkout."""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lik_ops

ROOT = Path(__file__).resolve().parents[2]
DEVICE_CODE = ROOT / "csrc_triton"
OPCHECK = ROOT / "opcheck"

SCORES = """
import torch
generator = torch.Generator().manual_seed(0)
Q = torch.randn(2, 3, 8, generator=generator)
D = torch.randn(4, 5, 8, generator=generator)
expected = torch.einsum("isd,jtd->ijst", Q, D).amax(-1).sum(-1)
torch.testing.assert_close(lik_ops.maxsim(Q, D), expected)
"""

INSTALLED = """
import importlib, importlib.metadata, importlib.util, json, pkgutil, sys
import lik_ops
report = {"file": lik_ops.__file__, "version": lik_ops.__version__}
distribution = importlib.metadata.distribution("lik-ops")
report["distribution"] = [str(distribution.locate_file("")), distribution.version]
import lik_ops.csrc_triton as device_code
names = [module.name for module in pkgutil.walk_packages(device_code.__path__, "lik_ops.csrc_triton.")]
report["device_code"] = [importlib.import_module(name).__file__ for name in ["lik_ops.csrc_triton", *names]]
report["top_level"] = importlib.util.find_spec("csrc_triton") is not None
"""

NO_TRITON = """
import sys
sys.modules["triton"] = None
import lik_ops
"""

# Prints a line with a report, then the output of opcheck for one operator.
CHECKED = (
    INSTALLED
    + SCORES
    + """
print(json.dumps(report), flush=True)
import runpy
sys.argv[1:] = ["--op", "maxsim_fwd", "--every", "40"]
for name in ("pytest", "expecttest", "hypothesis", "numpy"):
    sys.modules[name] = None
runpy.run_module("lik_ops.opcheck", run_name="__main__")
"""
)


def run(*command: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, f"{command[:4]} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


def python_path(first: Path) -> str:
    return os.pathsep.join(filter(None, [str(first), os.environ.get("PYTHONPATH")]))


def copy_checkout(destination: Path, *, link: bool) -> None:
    destination.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("lik_ops", "csrc_triton", "opcheck", "tests"):
        shutil.copytree(ROOT / name, destination / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, destination / name)
    if not link:
        # On systems without symbolic links, git writes the target name into a plain file.
        for name in ("csrc_triton", "opcheck"):
            (destination / "lik_ops" / name).unlink(missing_ok=True)
            (destination / "lik_ops" / name).write_text(f"../{name}")


def build(directory: Path, kind: str) -> Path:
    """Return a wheel built from a copy of the checkout, because setuptools leaves build/ and *.egg-info behind."""
    copy_checkout(directory / "tree", link=kind != "checkout without links")
    kinds = [] if kind == "sdist" else ["--wheel"]
    outdir = directory / "dist"
    run(sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", str(outdir), "tree", cwd=directory)
    (path,) = outdir.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel built through an sdist."""
    return build(tmp_path_factory.mktemp("build"), "sdist")


@pytest.fixture(scope="module")
def target(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    run(*pip, "--target", str(directory), str(wheel), cwd=directory)
    return directory


@pytest.mark.parametrize("kind", ["checkout", "checkout without links", "sdist"])
def test_wheels_hold_the_files_of_the_package_and_nothing_else(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Equal contents mean that the installation tests of one wheel below apply to all."""
    expected = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "lik_ops").rglob("*.py")}
    expected = {
        n: path for n, path in expected.items() if not n.startswith(("lik_ops/csrc_triton/", "lik_ops/opcheck/"))
    }
    for path in (*DEVICE_CODE.rglob("*.py"), *OPCHECK.glob("*.py"), *OPCHECK.glob("samples/*.py")):
        expected["lik_ops/" + path.relative_to(ROOT).as_posix()] = path
    expected["lik_ops/py.typed"] = ROOT / "lik_ops" / "py.typed"
    assert {"lik_ops/csrc_triton/__init__.py", "lik_ops/opcheck/__main__.py"} <= set(expected)
    path = request.getfixturevalue("wheel") if kind == "sdist" else build(tmp_path, kind)
    with zipfile.ZipFile(path) as archive:
        found = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    assert found == {name: path.read_bytes() for name, path in expected.items()}


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata_name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(metadata_name))
        assert metadata_name.replace("METADATA", "licenses/LICENSE") in archive.namelist()
    assert metadata["Name"] == "lik-ops"
    assert metadata["Version"] == lik_ops.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    unconditional = {requirement.name for requirement in requirements if "extra" not in str(requirement.marker)}
    assert unconditional == {"torch", "triton"}


@pytest.fixture(scope="module")
def checked(target: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of `CHECKED` with the installed wheel."""
    pytest.importorskip("triton", reason="the device code is written in Triton")
    directory = tmp_path_factory.mktemp("checked")
    return run(sys.executable, "-c", CHECKED, cwd=directory, PYTHONPATH=python_path(target))


def test_installed_wheel_is_complete(target: Path, checked: str) -> None:
    report = json.loads(checked.splitlines()[0])
    assert Path(report["file"]) == target / "lik_ops" / "__init__.py"
    assert report["version"] == lik_ops.__version__
    assert [Path(report["distribution"][0]), report["distribution"][1]] == [target, lik_ops.__version__]
    loaded = {Path(file).relative_to(target / "lik_ops" / "csrc_triton") for file in report["device_code"]}
    assert loaded == {path.relative_to(DEVICE_CODE) for path in DEVICE_CODE.rglob("*.py")}
    assert not report["top_level"]


def test_installed_wheel_checks_its_operators(checked: str) -> None:
    """Run ``python -m lik_ops.opcheck`` for one operator, without the packages of the extra ``test``."""
    assert "all passed" in checked


def test_device_code_has_one_name(tmp_path: Path) -> None:
    """The link in the checkout and the mapping of the editable install lead to the same module objects."""
    pytest.importorskip("triton", reason="the device code is written in Triton")
    code = INSTALLED + SCORES + 'report["modules"] = sorted(sys.modules); print(json.dumps(report))'
    report = json.loads(run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=python_path(ROOT)).splitlines()[-1])
    assert Path(report["file"]).resolve() == ROOT / "lik_ops" / "__init__.py"
    assert {Path(file).resolve() for file in report["device_code"]} == set(DEVICE_CODE.rglob("*.py"))
    assert not [name for name in report["modules"] if name.split(".")[0] == "csrc_triton"]


def test_scores_without_triton() -> None:
    check = (
        'loaded = [name for name in sys.modules if name.startswith("lik_ops.csrc_triton")]; assert not loaded, loaded'
    )
    run(sys.executable, "-c", NO_TRITON + SCORES + check, cwd=ROOT, LIK_OPS_BACKEND="auto")


def test_every_requirement_is_pinned() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["dependencies"]]
    for extra, group in project["optional-dependencies"].items():
        # These hosts need an older torch and are installed without constraints.txt.
        host = extra in ("pylate", "colpali")
        wanted += [x for x in map(Requirement, group) if not (host and x.name == "torch")]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {}
    for pin in (Requirement(line) for line in lines if line and not line.startswith("#")):
        (specifier,) = pin.specifier
        assert specifier.operator == "==", f"constraints.txt: {pin} is not an exact version"
        pinned[canonicalize_name(pin.name)] = specifier.version
    for requirement in wanted:
        name = canonicalize_name(requirement.name)
        if name != canonicalize_name(project["name"]):
            assert name in pinned, f"constraints.txt does not pin {name}"
            assert requirement.specifier.contains(pinned[name]), (
                f"{requirement}, but constraints.txt has {pinned[name]}"
            )


def test_changelog_describes_the_version() -> None:
    assert f"\n## [{lik_ops.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
