"""Test that the kernels of Ward's method compile without a GPU and do not spill."""

import pytest
from triton.compiler import ASTSource

from lik_ops.csrc_triton.common.arguments import WardMergeArgs
from lik_ops.csrc_triton.pooling import ward
from lik_ops.families.pooling.gpu import configure_ward
from lik_ops.gpu.tuning.architectures import ARCHITECTURES

from ..support.machine_code import compile_as_launched, cuda_resources, target

TERMS = WardMergeArgs("*i64", "*i64", "*fp64", "*fp64", "*fp64", "*i64")
ARGUMENTS = {
    "ward_nearest": {"squared": "*fp64", "sizes": "*fp64", "counts": "*i64", "costs": "*fp64", "nearest": "*i64"},
    "ward_merge": {"squared": "*fp64", "terms": TERMS, "out": "*fp64"},
}


def compile_ward_kernel(name, arch):
    tile = configure_ward(arch)
    signature = ARGUMENTS[name] | dict.fromkeys(("m",) if name == "ward_nearest" else ("m", "left"), "i32")
    aligned: dict = {}
    for n, kind in enumerate(signature.values()):
        if kind != "i32":
            paths = [(n, k) for k in range(len(kind))] if isinstance(kind, tuple) else [(n,)]
            aligned |= {path: [["tt.divisibility", 16]] for path in paths}
    constants = {(len(signature),): tile.BM, (len(signature) + 1,): tile.BN}
    signature |= {"BM": "constexpr", "BN": "constexpr"}
    source = ASTSource(getattr(ward, name), signature, constants, aligned)
    return compile_as_launched(source, target(arch), tile.options)


def check(name, architecture):
    found = compile_ward_kernel(name, ARCHITECTURES[architecture])
    if ARCHITECTURES[architecture].is_amd:
        return
    registers, spills = cuda_resources(found.asm["cubin"])
    assert spills == 0, f"{name}: {spills} spill instructions, {registers} registers"


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_ward_kernels_compile_without_spills(name, architecture):
    check(name, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - {"sm_80", "sm_90"}))
@pytest.mark.parametrize("name", ARGUMENTS)
def test_ward_kernels_compile_on_other_architectures(name, architecture):
    check(name, architecture)
