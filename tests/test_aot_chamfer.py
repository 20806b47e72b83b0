"""The kernels of nearest points compile for every architecture without a GPU, without spills."""

import pytest
import torch
from triton.compiler import ASTSource

from lik_ops.csrc_triton import chamfer
from lik_ops.csrc_triton.arguments import Points
from lik_ops.gpu.chamfer import nearest_launch, winners_launch
from lik_ops.gpu.configs import ARCHITECTURES

from .aot import compile_as_launched, cuda_resources, target

_POINTER = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
CASES = [
    ("nearest", torch.float32, 3, "sqeuclidean", False),
    ("nearest", torch.float16, 2, "l1", True),
    ("nearest", torch.float32, 10, "l1", True),
    ("nearest", torch.float32, 128, "sqeuclidean", False),
    ("nearest", torch.bfloat16, 100, "sqeuclidean", True),
    ("winners", torch.float32, 3, "sqeuclidean", True),
    ("winners", torch.bfloat16, 128, "l1", False),
]


def compiled(kernel, dtype, d, metric, lengths, name):
    arch = ARCHITECTURES[name]
    points = Points(_POINTER[dtype], "i32", "i32", "constexpr", "i32", "*i64" if lengths else "constexpr")
    if kernel == "nearest":
        launch, _ = nearest_launch(arch, dtype, d, metric, 1)
        arguments = {"P": points, "R": points, "of_P": "*i64", "of_R": "*i64", "part": "i32"}
        function = chamfer.chamfer_nearest
    else:
        launch = winners_launch(arch, d, metric, 1)
        arguments = {"X": points, "Y": points, "keys": "*i64", "distances": "*fp32", "nearest": "*i32"}
        arguments |= {"points": "i32", "part": "i32"}
        function = chamfer.chamfer_winners
    arguments |= {"d": "i32", "C": "constexpr"}
    names = list(arguments)
    constants = {(names.index("C"),): launch.config} | {(n, 3): 1 for n in range(2)}
    constants |= {} if lengths else {(n, 5): None for n in range(2)}
    aligned = [(n,) for n in range(2, 5) if str(arguments[names[n]]).startswith("*")]
    aligned += [(n, k) for n in range(2) for k in ((0, 1, 2) if d % 16 == 0 else (0,))]
    aligned += [(names.index("d"),)] if d % 16 == 0 else []
    source = ASTSource(function, arguments, constants, {path: [["tt.divisibility", 16]] for path in aligned})
    return compile_as_launched(source, target(arch), launch.options(arch))


def _compiles(case, name):
    found = compiled(*case, name)
    if not ARCHITECTURES[name].is_amd:
        registers, spills = cuda_resources(found.asm["cubin"])
        assert spills == 0, (case, name, registers)
    if case[0] == "nearest" and case[2] >= 16:
        assert name.startswith("gfx") or any(unit in found.asm["ptx"] for unit in ("mma", "tcgen05"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_compile(case):
    _compiles(case, "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - {"sm_90"}))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_compile_elsewhere(case, name):
    _compiles(case, name)
