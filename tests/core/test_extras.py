"""Test that a missing optional package raises an error with the package and extra, before anything is written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lik_ops.core import extras

ROOT = Path(__file__).parents[2]
SCRIPT = """
import importlib.metadata, json, os, sys, warnings
read_version, hosts = importlib.metadata.version, ("sentence-transformers", "pylate", "colpali-engine")
def version(name):  # without the hosts, also where they are installed
    return read_version(name if name not in hosts else "no " + name)
importlib.metadata.version = version
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))
warnings.simplefilter("ignore")  # torch without numpy
import torch, lik_ops

D = torch.randn(12, 8)
codec = lik_ops.ResidualCodec.train(D, 4, 2)
codes = lik_ops.quantize(D, codec)
index = lik_ops.Index(codes, torch.tensor([0, 4, 12]))
calls = {
    "Corpus.create": lambda: lik_ops.Corpus.create("corpus", 8, torch.float32),
    "Corpus.open": lambda: lik_ops.Corpus.open("corpus"),
    "Quantized.save": lambda: lik_ops.quantize(D).save("quantized"),
    "Quantized.load": lambda: lik_ops.Quantized.load("quantized"),
    "write_index": lambda: lik_ops.write_index("index", index),
    "read_index": lambda: lik_ops.read_index(os.environ["INDEX"]),
    "onnx_translations": lik_ops.export.onnx_translations,
}
for host in ("sentence_transformers", "pylate", "colpali"):
    calls[host] = __import__(f"lik_ops.integrations.{host}", fromlist=["enable"]).enable
calls["haystack"] = lambda: __import__("lik_ops.integrations.haystack")
found = {}
for name, call in calls.items():
    try:
        call()
    except ImportError as error:
        found[name] = type(error).__name__, str(error), error.name
    except Exception as error:
        found[name] = type(error).__name__, str(error), None
print(json.dumps([found, os.listdir()]))
"""
RETRIEVAL = "pip install safetensors numpy, or in a checkout of lik_ops pip install '.[retrieval]'"
NEEDS = {
    "Corpus.create": ("numpy", "safetensors"),
    "Corpus.open": ("numpy", "safetensors"),
    "Quantized.save": ("numpy", "safetensors"),
    "Quantized.load": ("safetensors",),
    "write_index": ("numpy",),
    "read_index": ("numpy",),
}


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    pytest.importorskip("numpy")
    import torch

    import lik_ops

    at, D = tmp_path_factory.mktemp("index"), torch.randn(12, 8)
    codes = lik_ops.quantize(D, lik_ops.ResidualCodec.train(D, 4, 2))
    lik_ops.write_index(at, lik_ops.Index(codes, torch.tensor([0, 4, 12])))
    return str(at)


ALL_MISSING = ["numpy", "safetensors", "onnxscript", "tqdm"]  # names numpy wherever it names numpy alone


@pytest.mark.parametrize("missing", (pytest.param(["numpy"], marks=pytest.mark.slow), ["safetensors"], ALL_MISSING))
def test_the_error_names_the_package_and_the_extra(missing, index, tmp_path):
    environment = {"PYTHONPATH": str(ROOT), "INDEX": index, "PATH": ""}
    command = [sys.executable, "-c", SCRIPT, json.dumps([*missing, "haystack"])]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found, files = json.loads(run.stdout)
    for function, packages in NEEDS.items():
        if first := next((name for name in packages if name in missing), None):
            expected = f"{function}: {first} is not installed: {RETRIEVAL}"
            assert found[function] == ["ModuleNotFoundError", expected, first]
    if "safetensors" in missing:
        assert not {"corpus", "quantized"} & set(files)
    if "numpy" in missing:
        assert not {"corpus", "quantized", "index"} & set(files)
    if "onnxscript" in missing:
        assert re.search(r"onnxscript is not installed: .* pip install '\.\[onnx\]'$", found["onnx_translations"][1])
    assert re.search(r"haystack is not installed: .* pip install '\.\[haystack\]'$", found["haystack"][1])
    for host in ("sentence_transformers", "pylate", "colpali"):
        extra = host.replace("_", "-")
        assert re.search(rf"is not installed: .* pip install '\.\[{extra}\]'$", found[host][1]), found[host]


def test_each_extra_exists():
    text = (ROOT / "pyproject.toml").read_text()
    for extra, packages in extras.PACKAGES.items():
        installed = re.search(rf"^{extra} = \[(.*?)\]", text, re.M | re.S)
        assert installed and all(f'"{package}' in installed[1] for package in packages.split())


def test_only_the_helper_imports_optional_packages():
    """Other imports would raise a bare "No module named" error."""
    optional = re.compile(r"^\s+(?:import|from) (numpy|safetensors|onnxscript|tqdm|haystack)\b", re.M)
    found = set()
    for path in (ROOT / "lik_ops").rglob("*.py"):
        text = re.sub(r"^if TYPE_CHECKING:\n(?:(?:    .*)?\n)+", "", path.read_text(), flags=re.M)
        found |= {(path.name, name) for name in optional.findall(text)}
    # The three exceptions: the array already exists, the bar is optional, and `make_missing_error` builds the error.
    assert found == {("sources.py", "numpy"), ("progress.py", "tqdm"), ("haystack.py", "haystack")}


EXAMPLES = """
import json, os, runpy, sys, warnings
warnings.simplefilter("ignore")  # torch without numpy
sys.path.insert(0, "examples")
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))
found = {}
for name in json.loads(sys.argv[2]):
    sys.argv = [name, "--help"]
    try:
        runpy.run_path(f"examples/{name}", run_name="__main__")
    except (Exception, SystemExit) as end:
        found[name] = type(end).__name__, str(end)
print(json.dumps(found))
"""
PACKAGES = ["bm25s", "colpali_engine", "datasets", "matplotlib", "numpy", "pylate", "qdrant_client", "rich"]
PACKAGES += ["safetensors", "sentence_transformers", "tokenizers", "tqdm", "transformers"]


def test_example_errors_name_the_extra_to_install():
    programs = [path.name for path in (ROOT / "examples").glob("*.py") if '__name__ == "__main__"' in path.read_text()]
    command = [sys.executable, "-c", EXAMPLES, json.dumps(PACKAGES), json.dumps(programs)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found.pop("export_retriever.py") == ["SystemExit", "0"]  # needs no other package
    assert len(found) > 5
    for name, (kind, message) in found.items():
        extra = re.fullmatch(r'\w+ is not installed: pip install "\.\[([\w-]+)\]".*', message)
        assert kind == "SystemExit" and extra, (name, kind, message)
        assert f"\n{extra[1]} = [" in (ROOT / "pyproject.toml").read_text(), name
        assert extra[0].partition("pip install ")[2] in (ROOT / "examples" / name).read_text().split('"""')[1], name
