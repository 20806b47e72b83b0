"""Test that all kernels compile for all architectures without a GPU: no spills, tensor cores, shared memory limit."""

import pytest
import torch
from triton.compiler import ASTSource

from lik_ops.csrc_triton.common.arguments import SegmentArgs
from lik_ops.csrc_triton.formats.code_scores import maxsim_code_scores
from lik_ops.formats.table import INT8_QUERIES
from lik_ops.gpu.triton_versions import get_triton_release
from lik_ops.gpu.tuning.architectures import ARCHITECTURES

from ..support.aot import Case, Compiled, compile_for, knows
from ..support.aot_cases import (
    DOCUMENTS,
    FORWARD,
    LONG,
    MORE_RAGGED,
    MORE_STORED,
    MORE_TERMS,
    PACKED,
    PARTS,
    QUERIES,
    RAGGED,
    SECTIONS,
    SHARED,
    SHORT_DOCUMENTS,
    SHORT_QUERIES,
    SPARSE,
    STORED,
    TERMS,
    common_and_others,
)
from ..support.common import thin_out
from ..support.machine_code import compile_as_launched, cuda_resources, target

SUMS = (DOCUMENTS, LONG, PACKED, SHARED)
MATRIX_KERNELS = (FORWARD, SPARSE, *SUMS)
MATRIX_UNIT = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}  # other architectures: mma.sync
COMMON, OTHERS = common_and_others()


# int8 and binary documents, with query rows as two int8 terms or one.
BY_TERMS = ("*i8", INT8_QUERIES)
BY_TERMS += tuple(f"{read}1_{query}" for read in ("bits", "bitwords") for query in ("half", "int8", "binary"))
BY_TERMS += tuple(f"{read}{nbits}_rotated" for read in ("bits", "bitwords") for nbits in (1, 2, 4))


def _matrix_unit(case: Case, name: str) -> str:
    if case.kernel == SPARSE and not name.startswith("gfx"):
        return "mma.sync"  # one small product for each document, padded with zeros
    is_half = case.dtype != torch.float32 or case.split
    if case.kernel in SUMS and is_half and case.d <= 32 and name in ("sm_90", "sm_100"):
        return "mma.sync"  # features are the rows of the product, and wgmma and tcgen05 need at least 64
    if case.kernel in SUMS and not is_half and not case.tf32 and name == "sm_90":
        return MATRIX_UNIT[name] if case.long else "mma.sync"  # tokens are the rows, 16 or more
    if (
        case.kernel == FORWARD
        and case.stored in BY_TERMS
        and case.d <= 256
        and name == "sm_100"
        and get_triton_release() < (3, 8)
    ):
        return "mma.sync"  # int8 products use tcgen05 since Triton 3.8
    return MATRIX_UNIT.get(name, "mma.sync")


# Spills of Triton 3.6 that later releases do not have, in kernels that load features one by one, in one kernel of
# residual codes, and, more than later releases, in one of query gradients. The spills occur once for each group of
# query rows or part of the documents, never in the loops over tokens. The known fix for features leaves fewer loads in
# flight.
SPILLED = {
    (3, 6): {
        (Case(FORWARD, d=100, ragged=True, options=True, argmax=True), "sm_90"): 135,
        (Case(FORWARD, torch.float16, 100, 8, 1000, options=True, argmax=True), "sm_90"): 16,
        (Case(FORWARD, Nq=16, ragged=True, padded=True, stored="words4"), "sm_90"): 2,
        (Case(PARTS, normalize=True, options=True), "sm_90"): 46,
    }
}

# Spills of any release in kernels that take longer on an H200 without them, with more registers or fewer rows in
# flight: docs/lab-book.md, "Gradients with TF32 allowed", "Many features", and "Slow random calls".
FASTER_WITH_SPILLS = {
    (Case(FORWARD, d=320, Nq=16, ragged=True, stored="*i8"), "sm_90"): 11,
    (Case(FORWARD, d=320, Nq=16, ragged=True, stored="*u8"), "sm_90"): 6,
    (Case(QUERIES, d=256), "sm_90"): 6,
    (Case(QUERIES, normalize=True), "sm_90"): 22,
    (Case(QUERIES, normalize=True, options=True), "sm_90"): 20,
    (Case(QUERIES, torch.float32), "sm_90"): 2,
    (Case(PARTS, normalize=True, options=True), "sm_90"): 20,  # not in the loop over documents
    (Case(DOCUMENTS, torch.float32), "sm_90"): 2,
    (Case(DOCUMENTS, torch.float32, options=True), "sm_90"): 16,
    (Case(DOCUMENTS, torch.float32, split=True), "sm_90"): 8,
    (Case(DOCUMENTS, torch.float32, 32, split=True), "sm_90"): 2,
}


def _check(case: Case, name: str) -> Compiled:
    arch = ARCHITECTURES[name]
    if not knows(case, arch):
        pytest.skip("this architecture reads these documents in another form, which is a case of its own")
    compiled = compile_for(case, arch)
    allowed = FASTER_WITH_SPILLS | SPILLED.get(get_triton_release(), {})
    assert compiled.spills <= allowed.get((case, name), 0), (
        f"{case} on {name}: {compiled.spills} spill instructions, {compiled.registers} registers"
    )
    assert compiled.shared <= arch.shared_memory_bytes, f"{case} on {name}: {compiled.shared} bytes of shared memory"
    if case.kernel in MATRIX_KERNELS:
        assert _matrix_unit(case, name) in compiled.text, f"{case} on {name}: not on the matrix unit"
    return compiled


@pytest.mark.parametrize(("case", "arch"), COMMON, ids=str)
def test_common_kernels(case, arch):
    _check(case, arch)


@pytest.mark.parametrize("case", [*RAGGED, *SECTIONS], ids=str)
def test_packed_kernels(case):
    _check(case, "sm_90")


@pytest.mark.parametrize("arch", ["sm_90", pytest.param("gfx942", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", SHORT_QUERIES, ids=str)
def test_many_short_queries(case, arch):
    _check(case, arch)


@pytest.mark.parametrize("case", SHORT_DOCUMENTS, ids=str)
def test_short_encoded_documents(case):
    _check(case, "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("arch", sorted(set(ARCHITECTURES) - {"sm_90"}))
@pytest.mark.parametrize("case", [*RAGGED, *SECTIONS], ids=str)
def test_packed_kernels_on_other_architectures(case, arch):
    _check(case, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", MORE_RAGGED, ids=str)
def test_every_configuration_of_packed_gradients(case, arch):
    _check(case, arch)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "arch"), OTHERS, ids=str)
def test_every_configuration(case, arch):
    _check(case, arch)


def _check_stored(case: Case, name: str) -> None:
    text = _check(case, name).text
    if case.kernel == FORWARD and case.stored in BY_TERMS and case.d <= 256 and not name.startswith("gfx"):
        assert "s32.s8.s8" in text or "kind::i8" in text, f"{case} on {name}: not by int8 terms"
    if case.stored == "fp8_fp8" and name == "sm_90":  # sums of another instruction would have other bits
        assert "f32.e4m3.e4m3" in text and "mma.sync" not in text


@pytest.mark.parametrize("case", thin_out(STORED, 2, applies=True), ids=str)
def test_kernels_of_quantized_documents(case):
    _check_stored(case, "sm_90")


@pytest.mark.parametrize("case", [case for case in STORED if case.stored == "codes8"], ids=str)
def test_residual_codes_fit_the_smallest_shared_memory(case):
    _check_stored(case, "sm_89")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", STORED + MORE_STORED, ids=str)
def test_every_kernel_of_quantized_documents(case, arch):
    _check_stored(case, arch)


def _check_terms(case: Case) -> None:
    text = _check(case, "sm_90").text
    # With dots, because the text also has paths of source files.
    assert "f32.f16.f16" in text and ".tf32" not in text


@pytest.mark.parametrize("case", TERMS, ids=str)
def test_fp32_kernels_multiply_fp16_terms_without_tf32(case):
    _check_terms(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_TERMS, ids=str)
def test_every_tile_of_fp16_terms(case):
    _check_terms(case)


SAME_BITS = [
    [Case(FORWARD, dtype, 64, options=options, ragged=ragged) for options in (False, True) for ragged in (False, True)]
    for dtype in (torch.bfloat16, torch.float32)
]
SAME_BITS += [
    [Case(FORWARD, dtype, 64, ragged=True, stored=stored, options=options, argmax=options) for options in (False, True)]
    for dtype, stored in (
        (torch.bfloat16, "*u8"),
        (torch.float32, "*u8"),
        (torch.bfloat16, "e4m3"),
        (torch.bfloat16, "bits1"),
        (torch.bfloat16, "codes4"),
    )
]
# Codes of odd numbers read as bytes and as words.
SAME_BITS += [
    [Case(FORWARD, d=320, Nq=16, ragged=True, stored=f"{read}{n}") for read in ("bits", "bitwords")] for n in (2, 4)
]
SAME_BITS += [[Case(SPARSE, torch.float32, 64, Lq=4, options=True, int32=int32) for int32 in (False, True)]]


@pytest.mark.parametrize("cases", SAME_BITS, ids=lambda cases: str(cases[0]))
def test_masks_and_argmax_do_not_change_the_product_order(cases):
    """Triton orders the terms of mma.sync by the narrowest type that its operands depend on: see `common.apart`."""
    orders = [_check(case, "sm_80").orders for case in cases]
    assert orders == [orders[0]] * len(orders) and orders[0], dict(zip(map(str, cases), orders, strict=True))


@pytest.mark.parametrize("rows", [1, 32, 128])
@pytest.mark.parametrize("name", ["sm_80", "sm_90", "gfx942"])
def test_code_scores_kernel_compiles(name, rows):
    pointers = {"table": "*fp32", "weight": "*fp32", "probed": "*i8", "codes": "*i32"}
    segments = SegmentArgs(*(["constexpr"] + ["*i64"] * 2 + ["constexpr"] * 4))
    signature = pointers | {"segments": segments, "scores": "*fp32", **dict.fromkeys(("Nq", "K", "Td", "count"), "i32")}
    signature |= {"ROWS": "constexpr", "BN": "constexpr"}
    constants = {(4, n): None for n, kind in enumerate(segments) if kind == "constexpr"} | {(10,): rows, (11,): 32}
    source = ASTSource(fn=maxsim_code_scores, signature=signature, constexprs=constants)
    compiled = compile_as_launched(source, target(ARCHITECTURES[name]))
    assert name == "gfx942" or cuda_resources(compiled.asm["cubin"])[1] == 0
