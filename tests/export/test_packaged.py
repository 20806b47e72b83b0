"""Test the kernel in packages: its results, its compilation, and its insertion into a graph."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import lik_ops
from lik_ops import export
from lik_ops.portable.forward import blocked

pytest.importorskip("triton", reason="the kernel is written in Triton")
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..support.common import INTERPRETING

ROOT = Path(__file__).resolve().parents[2]

INTERPRETED = """
import torch, lik_ops
from lik_ops.ops import packaged
from lik_ops.csrc_triton.export.packaged import maxsim_packaged as kernel
from tests.support.common import Problem, assert_scores, build, lifted

packaged._choose_precision = lambda dtype: "ieee"
checked = 0
for layout in ("cross", "candidates"):
    for sizes in ((3, 4, 5, 9), (1, 2, 70, 70), (2, 3, 1, 1), (2, 2, 3, 0)):
        for options, strides in (("none", "contiguous"), ("holes", "transposed"), ("empty_some", "sliced")):
            for dtype, values, d in ((torch.float32, "normal", 20), (torch.float16, "integer", 70)):
                has = options != "none"
                p = Problem(layout, *sizes, d, dtype, options, options, has, has, values, strides)
                x = build(p, "cpu")
                scores = torch.full((sizes[0], sizes[1]), float("nan"))
                args, constants = packaged.make_kernel_args(x.Q, x.D, x.q_mask, x.d_mask, x.q_weight, has, scores)
                kernel[(scores.numel(),)](*args, **constants)
                assert_scores(p, x, scores)
                checked += 1
print(checked)
"""


@pytest.mark.slow
def test_the_kernel_scores_through_the_interpreter():
    """Test masks with poison behind them, documents and queries longer than a tile, empty inputs, and any strides."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", INTERPRETED]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    assert result.stdout.split() == ["48"]


def copied(kernel, directory):
    """Return the kernel in a separate module, as Inductor writes it into its compiled code."""
    from torch._inductor.codegen import wrapper

    write = getattr(wrapper, "user_defined_triton_kernel_transitive_closure_source_code", None)
    if write is None:
        pytest.skip("this torch has another name for the function that copies a kernel's source")
    path = directory / "copied_kernel.py"
    path.write_text("import triton\nimport triton.language as tl\n\n\n@triton.jit\n" + write(kernel))
    spec = importlib.util.spec_from_file_location("copied_kernel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.maxsim_packaged


@pytest.mark.skipif(INTERPRETING, reason="compiles")
@pytest.mark.parametrize(
    ("dtype", "arch", "copy"),
    [
        (torch.bfloat16, "sm_90", True),
        pytest.param(torch.bfloat16, "sm_90", False, marks=pytest.mark.slow),
        pytest.param(torch.float32, "sm_90", False, marks=pytest.mark.slow),
        pytest.param(torch.float32, "sm_80", True, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_compiles(dtype, arch, copy, tmp_path):
    """The kernel also compiles if only its source and the source of its callees were copied."""
    import triton

    from lik_ops.csrc_triton.export.packaged import maxsim_packaged as kernel
    from lik_ops.gpu.tuning.architectures import ARCHITECTURES
    from lik_ops.ops import packaged

    Q, D = torch.empty(2, 64, 128, dtype=dtype), torch.empty(3, 300, 128, dtype=dtype)
    masks = [torch.ones(t.shape[:-1], dtype=torch.bool) for t in (Q, D)]
    _, constants = packaged.make_kernel_args(Q, D, *masks, torch.ones(2, 64), True, torch.empty(2, 3))
    kernel = copied(kernel, tmp_path) if copy else kernel
    names, element = kernel.arg_names, {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    constants |= {"q_stride_d": 1, "d_stride_d": 1, "d_stride_owner": 0}
    pointers = {"q": element, "docs": element, "q_mask": "*i1", "d_mask": "*i1", "weight": "*fp32", "scores": "*fp32"}
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs={(names.index(n),): v for n, v in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", int(arch[3:]), 32), options={"num_warps": 4})
    assert compiled.metadata.shared <= ARCHITECTURES[arch].shared_memory_bytes
    assert ("wgmma" if arch == "sm_90" else "mma.sync") in compiled.asm["ptx"]


@pytest.mark.skipif(INTERPRETING, reason="compiles")
@pytest.mark.parametrize("masked", [False, True])
def test_the_kernel_compiles_where_every_size_is_one(masked):
    """Triton turns each argument equal to 1 into a constant, and constants have no methods."""
    import triton

    from lik_ops.csrc_triton.export.packaged import maxsim_packaged as kernel
    from lik_ops.ops import packaged

    Q, D = torch.empty(1, 1, 1), torch.empty(1, 1, 1)
    options = [torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 1)]
    args, constants = packaged.make_kernel_args(Q, D, *(options if masked else [None] * 3), True, torch.empty(1, 1))
    pointers = {torch.float32: "*fp32", torch.bool: "*i1"}
    given = dict(zip(kernel.arg_names, args, strict=False))
    constants |= {name: x for name, x in given.items() if not isinstance(x, torch.Tensor)}
    signature = {n: "constexpr" if n in constants else pointers[given[n].dtype] for n in kernel.arg_names}
    places = {(kernel.arg_names.index(n),): v for n, v in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


class Scores(torch.nn.Module):
    def forward(self, Q, D, d_mask):
        return lik_ops.maxsim(Q * 2, D, None, d_mask, normalize=True) + 1


def export_for_cuda(dtype):
    """Export the scorer on fake CUDA tensors, which needs no GPU because nothing is computed."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        Q, D = (torch.empty(*s, 8, device="cuda", dtype=dtype) for s in ((3, 4), (5, 6)))
        d_mask = torch.empty(5, 6, device="cuda", dtype=torch.bool)
    document = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    shapes = {"Q": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, "D": document, "d_mask": document}
    return torch.export.export(Scores(), (Q, D, d_mask), dynamic_shapes=shapes)


def targets(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.skipif(INTERPRETING, reason="the interpreter's kernels cannot be traced")
def test_gpu_program_contains_the_kernel_with_dynamic_sizes():
    opened = export._replace_operators(export_for_cuda(torch.float32), export._compute_packaged)
    assert "lik.maxsim_packaged.default" in targets(opened) and "while_loop" not in targets(opened)
    (node,) = opened.run_decompositions(decompose_custom_triton_ops=True).graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.triton_kernel_wrapper_functional
    )
    given = node.kwargs["kwargs"]
    assert [given[n] for n in ("BM", "BN", "BD", "CANDIDATES", "NORMALIZE")] == [64, 64, 16, False, True]
    assert all(isinstance(given[n], torch.fx.Node) for n in ("Nq", "K", "Lq", "Ld"))


@pytest.mark.parametrize(
    ("device", "dtype", "argmax_dtype", "kernel"),
    [
        ("cuda", torch.bfloat16, None, True),
        ("cuda", torch.float64, None, False),
        ("cuda", torch.bfloat16, torch.int32, False),
        ("cpu", torch.bfloat16, None, False),
    ],
)
def test_unsupported_calls_export_as_a_loop(device, dtype, argmax_dtype, kernel, monkeypatch):
    taken = []
    monkeypatch.setattr(blocked, "forward_blocked", lambda *a: (taken.append(a), (a[0].new_empty(0), None))[1])
    with FakeTensorMode():
        Q, D = torch.empty(2, 3, 8, device=device, dtype=dtype), torch.empty(4, 5, 8, device=device, dtype=dtype)
        export._compute_packaged(Q, D, None, None, None, False, argmax_dtype, "auto")
    assert bool(taken) != kernel


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_scores_on_a_gpu(dtype):
    from lik_ops.ops.packaged import maxsim_packaged

    for sizes in ((3, 5, 4, 6), (1, 100, 32, 300), (5, 7, 200, 70), (0, 3, 2, 2), (2, 0, 2, 2)):
        Nq, K, Lq, Ld = sizes
        for shape in ((K, Ld, 128), (Nq, K, Ld, 128)):
            Q, D = torch.randn(Nq, Lq, 128).to("cuda", dtype), torch.randn(shape).to("cuda", dtype)
            q_mask, d_mask = (torch.rand(t.shape[:-1], device="cuda") > 0.3 for t in (Q, D))
            found = maxsim_packaged(Q, D, q_mask, d_mask, None, True)
            torch.testing.assert_close(
                found, lik_ops.maxsim(Q, D, q_mask, d_mask, normalize=True), rtol=1e-4, atol=1e-3
            )
