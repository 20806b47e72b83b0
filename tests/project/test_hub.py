"""Test that the folder for the Hugging Face kernels hub (hub/layout.py) loads by path next to the package."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DEFINES = {"custom_op", "triton_op"}
# Allowed imports of the kernel: torch, its dependencies, and packages that storage and ONNX need on request.
LIBRARIES = {"torch", "triton", "numpy", "onnxscript", "safetensors", "tqdm"}

LOADED = """
import importlib.util, sys
import torch
from torch._dynamo.testing import EagerAndRecordGraphs

device, *folders = sys.argv[1:]


def load(name, folder):
    spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernels = [load(f"_lik_ops_cpu_{i}", folder) for i, folder in enumerate(folders)]
assert not any(name.split(".")[0] == "lik_ops" for name in sys.modules)
assert not hasattr(torch.ops.lik, "maxsim")
import lik_ops

kernels.append(lik_ops)
namespaces = [kernel._ops.ops.name for kernel in kernels]
assert namespaces[-1] == "lik" and len(set(namespaces)) == len(kernels) == 3, namespaces
draw = torch.Generator().manual_seed(0)
Q, D = (torch.randn(size, generator=draw).to(device) for size in ((3, 4, 8), (5, 6, 8)))
packed, cu_seqlens = lik_ops.pack(list(D))
ends = cu_seqlens.to(device)


def computed(kernel):
    q, d = Q.clone().requires_grad_(), D.clone().requires_grad_()
    ragged, cu_q = kernel.pack(list(q))
    scores, backend = kernel.maxsim(q, d), EagerAndRecordGraphs()
    scores.square().sum().backward()
    varlen = kernel.maxsim_varlen(ragged, packed, cu_q.to(device), ends)
    varlen.sum().backward()
    opened = getattr(torch.ops, kernel._ops.ops.name).maxsim(Q, D, normalize=True)
    compiled = torch.compile(lambda q, d: kernel.maxsim(q, d), backend=backend, fullgraph=True)(Q, D)
    called = {str(node.target) for node in backend.graphs[0].graph.nodes if node.op == "call_function"}
    assert called == {f"{kernel._ops.ops.name}.maxsim"}, called
    batched = torch.func.vmap(kernel.maxsim, in_dims=(0, None))(Q, D)
    try:
        torch.func.jvp(lambda q: kernel.maxsim(q, D), (Q,), (Q,))
    except NotImplementedError as error:
        assert str(error).startswith("lik_ops has no forward-mode AD"), error
    return scores, q.grad, d.grad, varlen, opened, compiled, batched, *kernel.retrieve(Q, D, 2)


expected = computed(lik_ops)
torch.testing.assert_close(expected[0], lik_ops.reference.maxsim(Q, D), rtol=1e-4, atol=1e-4)
for kernel in kernels[:-1]:
    torch.testing.assert_close(computed(kernel), expected, rtol=0, atol=0)
    assert kernel.MaxSimScorer is not lik_ops.MaxSimScorer
    with kernel.use_backend("portable"):
        assert lik_ops.core.settings.get_requested_backend() == "auto"
print("as lik_ops")
"""

KERNELS = """
import sys
from pathlib import Path
import torch
import kernels
from kernels._rust import Build, Digest, DigestAlgorithm, Metadata

folder = Path(sys.argv[1])
assert [str(backend) for backend in Build.open(folder).general.backends] == ["cpu", "cuda", "rocm"]
for variant in (folder / "build").iterdir():
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert variant.name == f"torch-{metadata.backend.backend_type}", variant
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
kernel = kernels.get_local_kernel(folder, backend="cpu")
assert kernel.__name__ == kernel._ops.ops.name == "_lik_ops_cpu_first", kernel
assert "lik_ops" not in sys.modules
import lik_ops

Q, D = torch.randn(3, 4, 8), torch.randn(5, 6, 8)
assert torch.equal(kernel.maxsim(Q, D), lik_ops.maxsim(Q, D))
print("as lik_ops")
"""


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    for name in ("first", "second"):
        run(sys.executable, "hub/layout.py", "--out", str(folder / name), "--id", name, "--repo-id", "nobody/lik-ops")
    return folder


@pytest.fixture(scope="module")
def modules(built: Path) -> dict[str, ast.Module]:
    """Return the modules that the builder reads, by path."""
    package = built / "first" / "torch-ext" / "lik_ops"
    return {path.relative_to(package).as_posix(): ast.parse(path.read_text()) for path in package.rglob("*.py")}


def strings(module: ast.Module) -> Iterator[str]:
    """Yield all strings except docstrings."""
    told = [node.value for node in ast.walk(module) if isinstance(node, ast.Expr)]
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in told:
            yield node.value


def test_sources_do_not_hardcode_the_operator_namespace(modules):
    """The builder has the same check for decorators."""
    assert {"ops/maxsim.py", "csrc_triton/forward/generic/kernel.py"} <= set(modules) and "_ops.py" not in modules
    for name, module in modules.items():
        assert not [text for text in strings(module) if "lik::" in text or "ops.lik" in text or "lik." in text], name
        for node in ast.walk(module):
            assert not (isinstance(node, ast.Attribute) and node.attr == "lik"), name
            for decorator in getattr(node, "decorator_list", ()):
                if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", None) in DEFINES:
                    assert ast.unparse(decorator.args[0]).startswith("add_op_namespace_prefix("), name


def test_modules_import_each_other_relatively(modules):
    for name, module in modules.items():
        for node in ast.walk(module):
            absolute = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                absolute = [str(node.module)]
            roots = {imported.split(".")[0] for imported in absolute} - sys.stdlib_module_names
            assert roots <= LIBRARIES, f"{name} imports {roots - LIBRARIES}"


@pytest.mark.parametrize("device", DEVICES)
def test_two_builds_load_next_to_the_package(built, device):
    folders = [str(built / name / "build" / "torch-cpu") for name in ("first", "second")]
    assert run(sys.executable, "-c", LOADED, device, *folders) == "as lik_ops\n"


def test_namespace_is_equal_for_equal_sources(tmp_path):
    for name in ("once", "again"):
        run(sys.executable, "hub/layout.py", "--out", str(tmp_path / name))
    once, again = ((tmp_path / name / "build/torch-cuda/_ops.py").read_text() for name in ("once", "again"))
    assert once == again and "torch.ops._lik_ops_cuda_" in once


def test_layout_rejects_a_nonempty_folder(tmp_path):
    (tmp_path / "thesis.txt").write_text("three years")
    command = [sys.executable, "hub/layout.py", "--out", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and "expected a folder that is new" in result.stderr
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="needs kernels: make hub installs it")
def test_kernels_package_loads_the_build(built):
    """The package parses build.toml and the metadata, compares the digests, selects a variant, and imports it."""
    assert run(sys.executable, "-c", KERNELS, str(built / "first")) == "as lik_ops\n"
