"""Test that the top-k kernel compiles for sm_90 without a GPU and does not spill."""

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lik_ops.csrc_triton.common.arguments import TopKInputArgs, TopKOutputArgs
from lik_ops.csrc_triton.search import topk as topk_kernels
from lik_ops.gpu.forward import topk as cuda_topk

from ..support.machine_code import compile_as_launched, cuda_resources


def source(X: TopKInputArgs, block: int, is_sorted: bool, kept: int) -> ASTSource:
    none = "constexpr"
    signature = {"X": X, "out": TopKOutputArgs("*fp32", "*i64", "i32"), "n": "i32", "k": "i32"}
    signature |= dict.fromkeys(("PARTS", "SORTED", "BLOCK", "KEPT"), none)
    values: dict = {(0, n): None for n, kind in enumerate(X) if kind == none}
    values |= {(4,): X.width != none, (5,): is_sorted, (6,): block, (7,): kept}
    aligned = [(0, 0), (1, 0), (1, 1)] + [(0, 1)] * (X.indices != none)
    return ASTSource(topk_kernels.maxsim_best, signature, values, {path: [["tt.divisibility", 16]] for path in aligned})


KINDS_OF_CANDIDATES = {
    "columns": TopKInputArgs("*fp32", "constexpr", "i32", "constexpr", "constexpr"),
    "indices": TopKInputArgs("*fp32", "*i64", "i32", "constexpr", "constexpr"),
    "parts": TopKInputArgs("*i64", "*i64", "i32", "i32", "i32"),
}


@pytest.mark.parametrize("kept", [128, 256])
@pytest.mark.parametrize("kind", KINDS_OF_CANDIDATES)
def test_topk_kernel_compiles_without_spills(kind, kept):
    for block, is_sorted in ((1024, True), (8192, True), (8192, False)):
        if kind == "parts" and not is_sorted:
            continue
        options = {"num_warps": cuda_topk._WARPS[block]}
        compiled = source(KINDS_OF_CANDIDATES[kind], block, is_sorted, kept)
        found = compile_as_launched(compiled, GPUTarget("cuda", 90, 32), options)
        registers, spills = cuda_resources(found.asm["cubin"])
        assert spills == 0, f"{block}, {is_sorted}: {spills} spill instructions, {registers} registers"
