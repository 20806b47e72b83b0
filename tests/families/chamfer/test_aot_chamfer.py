"""Test that the Chamfer kernels compile for every architecture without a GPU and do not spill."""

import pytest
import torch
from triton.compiler import ASTSource

from lik_ops.csrc_triton.chamfer import exact as chamfer_exact
from lik_ops.csrc_triton.chamfer import products as chamfer_products
from lik_ops.csrc_triton.common.arguments import PointArgs, PointTermArgs
from lik_ops.families.chamfer import gpu as launches
from lik_ops.gpu.tuning.architectures import ARCHITECTURES

from ...support.machine_code import compile_as_launched, cuda_resources, target

_POINTER = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
_OF_P, _OF_R = launches.KeyLayout(4096, 128, 1), launches.KeyLayout(32, 1, 1)
CASES = [
    ("nearest", torch.float32, 3, "sqeuclidean", False),
    ("nearest", torch.float16, 2, "l1", True),
    ("nearest", torch.float32, 10, "l1", True),
    ("products", torch.float32, 128, "sqeuclidean", False),
    ("products", torch.float32, 300, "sqeuclidean", True),
    ("products", torch.bfloat16, 100, "sqeuclidean", True),
    ("products", torch.float16, 16, "sqeuclidean", False),
    ("terms", torch.float32, 128, "sqeuclidean", False),
    ("terms", torch.bfloat16, 100, "sqeuclidean", True),
    ("slopes", torch.float32, 3, "sqeuclidean", False),
    ("slopes", torch.bfloat16, 100, "l1", False),
    ("slopes", torch.float16, 128, "sqeuclidean", False),
    ("winners", torch.float32, 3, "sqeuclidean", True),
    ("winners of classes", torch.float32, 3, "sqeuclidean", False),
    ("winners of classes", torch.bfloat16, 128, "l1", False),
]


def _arguments(kernel, dtype, d, metric, arch, points):
    """Return the kernel, its config, and its argument types. A descriptor that is not used is None."""
    launch = launches.configure_products(arch, dtype, d, 1)
    rows = "*fp16" if dtype == torch.float32 else _POINTER[dtype]
    terms = PointTermArgs(rows, "*fp32", "*fp32", *["i32"] * 5)
    if kernel == "nearest":
        arguments = {"P": points, "R": points, "keys_P": "*i64", "keys_R": "*i64", "part": "i32", "d": "i32"}
        return chamfer_exact.chamfer_nearest, launches.configure_nearest(arch, d, metric, 1), arguments
    if kernel == "slopes":
        arguments = {"X": points, "Y": points, "grad": "*fp32", "grad_stride_batch": "i32", "grad_stride_n": "i32"}
        arguments |= {"nearest": "*i32", "slopes": "*fp32", "points": "i32", "d": "i32"}
        return chamfer_exact.chamfer_slopes, launches.configure_slopes(arch, d, metric), arguments
    if kernel == "terms":
        arguments = {"X": points, "terms": terms, "rows": "i32", "d": "i32"}
        return chamfer_products.chamfer_terms, launches.configure_terms(arch, launch), arguments
    if kernel == "products":
        C = launch.config
        tiles = [f"tensordesc<{rows[1:]}[{n}, {C.BD}]>" if arch.has_descriptors else None for n in (C.BM, C.BN)]
        arguments = {"P": points, "R": points, "p": terms, "r": terms, "p_tiles": tiles[0], "r_tiles": tiles[1]}
        return (
            chamfer_products.chamfer_products,
            launch,
            arguments | {"keys_P": "*i64", "keys_R": "*i64", "steps": "i32"},
        )
    launch = launches.configure_selection(arch, d, metric, 1, _OF_P if kernel.endswith("classes") else _OF_R)
    arguments = {"X": points, "Y": points, "keys": "*i64", "distances": "*fp32", "nearest": "*i32"}
    return chamfer_exact.chamfer_select, launch, arguments | {"points": "i32", "size": "i32", "d": "i32"}


def _find_constants_and_alignment(arguments, d, lengths):
    """Return the constants and the arguments divisible by 16, by argument position."""
    constants, aligned = {}, []
    for n, (name, x) in enumerate(arguments.items()):
        if isinstance(x, PointArgs):
            constants |= {(n, 3): 1} | ({} if lengths else {(n, 5): None})
            aligned += [(n, k) for k in ((0, 1, 2) if d % 16 == 0 else (0,))]
        elif isinstance(x, PointTermArgs):
            aligned += [(n, k) for k in range(6)]
        elif x is None:
            constants[n,] = None
        elif x.startswith("*") or (name == "d" and d % 16 == 0):
            aligned.append((n,))
    return constants, aligned


def compile_kernel(kernel, dtype, d, metric, lengths, name):
    arch = ARCHITECTURES[name]
    points = PointArgs(_POINTER[dtype], "i32", "i32", "constexpr", "i32", "*i64" if lengths else "constexpr")
    function, launch, arguments = _arguments(kernel, dtype, d, metric, arch, points)
    constants, aligned = _find_constants_and_alignment(arguments, d, lengths)
    constants[len(arguments),] = launch.config
    signature = {n: "constexpr" if x is None else x for n, x in arguments.items()} | {"C": "constexpr"}
    source = ASTSource(function, signature, constants, {path: [["tt.divisibility", 16]] for path in aligned})
    return compile_as_launched(source, target(arch), launch.options(arch))


def _check_compiles(case, name):
    found = compile_kernel(*case, name)
    if not ARCHITECTURES[name].is_amd:
        registers, spills = cuda_resources(found.asm["cubin"])
        assert spills == 0, (case, name, registers)
        assert found.metadata.shared <= ARCHITECTURES[name].shared_memory_bytes
    if case[0] == "products" and not name.startswith("gfx"):
        unit = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}.get(name, "mma.sync")
        assert unit in found.asm["ptx"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_compile(case):
    _check_compiles(case, "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - {"sm_90"}))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_compile_on_other_architectures(case, name):
    _check_compiles(case, name)
