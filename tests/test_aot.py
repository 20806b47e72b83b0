"""Every kernel compiles for every architecture without a GPU: no spills, fits shared memory, uses the matrix unit."""

import pytest
import torch

from lik_ops.backends.configs import ARCHITECTURES

from .aot import Case, Compiled, compile_for

FORWARD, QUERIES, DOCUMENTS = "maxsim_forward", "maxsim_grad_queries", "maxsim_grad_documents"
FEW, JOIN = "maxsim_grad_documents_few", "maxsim_join_pieces"
COUNT, LIST = "maxsim_count_winners", "maxsim_list_winners"
KERNELS = (FORWARD, QUERIES, DOCUMENTS, FEW, JOIN, COUNT, LIST, "maxsim_scatter", "maxsim_finish")
MATRIX_KERNELS = (FORWARD, DOCUMENTS, FEW)
MATRIX_UNIT = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}  # others: mma.sync

ALL_OPTIONS = {"candidates": True, "normalize": True, "options": True, "argmax": True}
# What people run: bf16 ColBERT, with winners for training, fp32 with everything on, features beyond one step.
COMMON = [
    *(Case(kernel) for kernel in KERNELS),
    Case(FORWARD, argmax=True),
    Case(FORWARD, options=True),
    Case(FORWARD, Nq=2, options=True),
    Case(FORWARD, Nq=4, options=True),
    Case(FORWARD, Nq=1),
    Case(FORWARD, Nq=1, options=True, argmax=True),
    Case(FORWARD, Nq=1, options=True, argmax=True, documents=100),
    Case(FORWARD, Nq=2, options=True, argmax=True, documents=100),
    Case(FORWARD, Nq=4, argmax=True),
    Case(FORWARD, Nq=1, Lq=128),
    Case(FORWARD, Nq=1, Lq=128, candidates=True, options=True, argmax=True),
    Case(FORWARD, Lq=1024),
    Case(FORWARD, **ALL_OPTIONS),
    *(Case(kernel, torch.float32, 128, **{**ALL_OPTIONS, "argmax": kernel == FORWARD}) for kernel in KERNELS),
    Case(FORWARD, torch.float32),
    Case(FORWARD, d=768, normalize=True, options=True),
    Case(DOCUMENTS, d=768, normalize=True, options=True),
    Case(DOCUMENTS, torch.float16),
    Case(DOCUMENTS, pieces=True),
    Case(DOCUMENTS, lists=False),
    Case(FEW, candidates=True),
    Case(FEW, Lq=128, candidates=True),
    Case(LIST, Lq=1024),
]
OTHERS = [
    Case(
        kernel,
        dtype,
        d,
        Nq,
        Lq,
        candidates,
        normalize,
        options,
        argmax and kernel == FORWARD,
        wide,
    )
    for kernel in KERNELS
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    for d, Nq, Lq in ((16, 1, 1), (48, 256, 7), (128, 256, 300), (128, 2, 32), (300, 256, 32), (1024, 256, 32))
    for candidates, normalize, options, argmax, wide in (
        (False, False, False, False, 0),
        (True, False, True, True, 1),
        (False, True, True, True, 2),
    )
]
_EVERYTHING = {"options": True, "argmax": True}
# fp32 as fp16 terms: each tile, by programs that split rows and on rows that are split already.
TERMS = [
    Case(FORWARD, torch.float32, Nq=1, **_EVERYTHING),
    Case(FORWARD, torch.float32, Nq=64, candidates=True, wide=1, **_EVERYTHING),
    Case(FORWARD, torch.float32, Nq=64, wide=2, **_EVERYTHING),
    Case(FORWARD, torch.float32, Lq=128, **_EVERYTHING),
    Case(FORWARD, torch.float32, Lq=300, **_EVERYTHING),
    Case(FORWARD, torch.float32, split=True),
    Case(FORWARD, torch.float32, Lq=300, split=True, **_EVERYTHING),
]
MORE_TERMS = [
    Case(FORWARD, torch.float32, d, Nq, Lq, candidates, False, options, argmax, wide, split=split)
    for d in (16, 64, 96, 128)
    for Nq, Lq in ((1, 1), (1, 32), (64, 32), (64, 128), (64, 300))
    for options in (False, True)
    for argmax in (False, True)
    for candidates, wide, split in ((False, 0, False), (True, 1, False), (False, 2, False), (False, 0, True))
    if Nq > 1 or not split
]


def _matrix_unit(case: Case, name: str) -> str:
    if case.kernel == FEW and name == "sm_100":
        return "mma.sync"  # its tiles, which wait for memory, are too small for tcgen05
    return MATRIX_UNIT.get(name, "mma.sync")


def _check(case: Case, name: str) -> Compiled:
    arch = ARCHITECTURES[name]
    compiled = compile_for(case, arch)
    assert compiled.spills == 0, (
        f"{case} on {name}: {compiled.spills} spill instructions, {compiled.registers} registers"
    )
    assert compiled.shared <= arch.shared_memory, f"{case} on {name}: {compiled.shared} bytes of shared memory"
    if case.kernel in MATRIX_KERNELS:
        assert _matrix_unit(case, name) in compiled.text, f"{case} on {name}: not on the matrix unit"
    return compiled


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", COMMON, ids=str)
def test_common_kernels(case, arch):
    _check(case, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_every_kernel(case, arch):
    _check(case, arch)


def _check_terms(case: Case) -> None:
    text = _check(case, "sm_90").text
    assert "f32.f16.f16" in text and "tf32" not in text


@pytest.mark.parametrize("case", TERMS, ids=str)
def test_fp32_is_three_products_of_fp16_terms(case):
    _check_terms(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_TERMS, ids=str)
def test_every_tile_of_fp16_terms(case):
    _check_terms(case)
