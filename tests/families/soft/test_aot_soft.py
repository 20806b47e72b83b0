"""Test that the soft MaxSim kernels compile for every architecture without a GPU, with tensor cores and no spills."""

import itertools

import pytest
import torch
from triton.compiler import ASTSource

from lik_ops.csrc_triton.common.arguments import SizeArgs, SoftSplitArgs
from lik_ops.csrc_triton.soft.splits import maxsim_soft_splits
from lik_ops.families.soft import configs as soft_configs
from lik_ops.gpu.tuning.architectures import ARCHITECTURES

from ...csrc_triton.test_aot import MATRIX_UNIT, _check
from ...support.aot import SOFT, Case, _queries
from ...support.common import thin_out
from ...support.machine_code import compile_as_launched, cuda_resources, target

FORWARD, FINISH = "maxsim_forward_soft", "maxsim_finish"
KERNELS = (FORWARD, *SOFT)
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_ALL = {"candidates": True, "normalize": True, "options": True, "argmax": True}
CASES = [
    *(Case(kernel, dtype) for kernel in KERNELS for dtype in (_BF16, _FP32)),
    *(Case(kernel, dtype, **_ALL) for kernel in KERNELS for dtype in (_FP16, _FP32)),
    *(Case(kernel, options=True, argmax=True) for kernel in KERNELS),
    Case(FORWARD, Nq=1, Lq=20),
    Case(FORWARD, Nq=8, Lq=300, options=True, argmax=True),
    Case(FORWARD, Nq=1, sections=True),
    Case(FORWARD, Nq=1, Lq=300, candidates=True, options=True, sections=True),
]
MORE = [
    *(
        Case(kernel, dtype, d, wide=wide, **fields)
        for kernel, (dtype, d, wide), fields in itertools.product(
            KERNELS,
            ((_FP16, 300, 2), (_FP32, 300, 2), (_BF16, 768, 0), (_FP32, 768, 0), (_BF16, 100, 0), (_FP32, 20, 0)),
            ({}, {"options": True, "argmax": True}, _ALL),
        )
    ),
    *(Case(kernel, _FP16, d, wide=1, **_ALL) for kernel in KERNELS for d in (16, 64)),
    *(Case(FORWARD, dtype, d, 8, 300, **_ALL) for dtype, d in ((_BF16, 128), (_FP32, 768), (_FP16, 100))),
    *(Case(kernel, _FP32, tf32=True) for kernel in KERNELS),
    *(Case(FORWARD, dtype, d, wide=1, sections=True, **_ALL) for dtype in (_FP16, _FP32) for d in (64, 128, 300)),
]


def _check_compiles(case: Case, arch: str) -> None:
    text = _check(case, arch).text
    unit = MATRIX_UNIT.get(arch, "mma.sync")
    if arch in ("sm_90", "sm_100") and (case.d < 64 or case.dtype == _FP32):
        return  # may be too small for tensor cores
    assert unit in text, f"{case} on {arch}: not on the matrix unit"


@pytest.mark.parametrize(
    ("case", "arch"), thin_out(itertools.product(CASES, ("sm_80", "sm_90")), 2, applies=True), ids=str
)
def test_kernels_compile(case, arch):
    _check_compiles(case, arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("more", [{}, {"options": True, "normalize": True}], ids=str)
@pytest.mark.parametrize("dtype", [_BF16, _FP32], ids=str)
def test_finish_kernel_with_parts_compiles_without_spills(dtype, more, arch):
    _check(Case(FINISH, dtype, parts=True, **more), arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("Lq", [1, 32, 300])
@pytest.mark.parametrize("options", [False, True])
def test_split_merge_compiles_without_spills(options, Lq, arch):
    queries, constants = _queries(Case(FORWARD, options=options))
    groups = {"Q": queries, "cut": SoftSplitArgs("*fp32", "*i32" if options else "constexpr", "i32", "i32")}
    types = {"scores": "*fp32", "lse": "*fp32" if options else "constexpr", "tau": "fp32"}
    types |= {"sizes": SizeArgs(*["i32"] * 4), "stride_q": "i32"}
    rows, at_once = soft_configs.configure_soft_merge(Lq)
    chosen = {"ROWS": rows, "AT_ONCE": at_once, "CANDIDATES": options}
    given = {**groups, **types, **dict.fromkeys(chosen, "constexpr")}
    names = list(given)
    values: dict[tuple[int, ...], object] = {(0, n): value for n, value in constants.items()}
    values |= {(names.index(name),): value for name, value in chosen.items()}
    values |= {} if options else {(1, 1): None, (names.index("lse"),): None}
    src = ASTSource(maxsim_soft_splits, given, values, {})
    compiled = compile_as_launched(src, target(ARCHITECTURES[arch]), {"num_warps": 4})
    registers, spills = cuda_resources(compiled.asm["cubin"])
    assert spills == 0 and registers <= 128


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES + MORE, ids=str)
def test_every_configuration_compiles(case, arch):
    _check_compiles(case, arch)
