"""Test that the row maxima kernels compile for sm_90 without a GPU, with concurrent wgmma and no spills."""

import re
from dataclasses import replace

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from lik_ops.csrc_triton.common.arguments import MaskPatchArgs, QueryArgs, RowMaximaOutputArgs, SegmentArgs, SplitArgs
from lik_ops.csrc_triton.forward.generic import row_sums
from lik_ops.csrc_triton.forward.sm90 import packed as fr
from lik_ops.csrc_triton.forward.sm90.pipeline import make_tile_layout
from lik_ops.gpu import generic_choices
from lik_ops.gpu.triton_versions import get_triton_release
from lik_ops.gpu.tuning import sm90_configs

from ..support.aot import Case, _queries
from ..support.machine_code import compile_as_launched, cuda_resources
from .test_aot_sm90_dense import SM_90, compile_checked

TARGET = GPUTarget("cuda", 90, 32)
ELEMENTS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def choice(dtype: torch.dtype, d: int, Lq: int, argmax: bool, sums: bool = False) -> sm90_configs.RowMaximaChoice:
    found = sm90_configs.configure_row_maxima(SM_90, dtype, 256 * Lq, 256, Lq, d, argmax=argmax, dense=sums)
    assert found is not None
    return found


def constants_of(group: tuple, at: int) -> dict:
    """Return the compile-time None values of the group at argument position `at`."""
    return {(at, n): None for n, kind in enumerate(group) if kind == "constexpr"}


def segments_of(layout: str) -> SegmentArgs:
    """Return the argument types of a layout: "packed", "even" dense, "masked", "kept" tokens first, or a "subset".

    The subset can also have query masks and weights ("subset, options").
    """
    none = "constexpr"
    if layout.startswith("subset"):
        return SegmentArgs(none, "*i64", "*i64", none, none, "i32", none)
    if layout == "even":
        return SegmentArgs(*(none,) * 5, "i32", "i32")
    if layout != "packed":
        return SegmentArgs(none, none, "*i32", none, none, "i32", "i32")
    return SegmentArgs("*i64", "*i64", none, none, none, none, none)


def source(dtype: torch.dtype, d: int, layout: str, argmax: bool, sums: bool = False) -> GluonASTSource:
    masked = layout == "masked"
    C = choice(dtype, d, 32, argmax, sums).config
    assert sums == C.SUM_ROWS
    queries, constants = _queries(Case("maxsim_forward", dtype, d, options=masked or layout == "subset, options"))
    tile = make_tile_layout([C.BN, C.BD], str(dtype).removeprefix("torch."))
    segments = segments_of(layout)
    winners = "*i16" if argmax else "constexpr"
    signature = {
        "Q": QueryArgs(*queries),
        "D": f"tensordesc<{ELEMENTS[dtype]}[{C.BN},{C.BD}],{tile!r}>",
        "segments": segments,
        "patches": MaskPatchArgs(f"*{ELEMENTS[dtype]}", "*i32", "*i32") if masked else "constexpr",
        "tiles": "i32" if masked else "constexpr",
        "out": RowMaximaOutputArgs(
            *(("constexpr", "*fp32", "i32") if sums else ("*fp32", "constexpr", "constexpr")), winners
        ),
    }
    signature |= dict.fromkeys(("Nq", "K", "Lq", "Td", "d"), "i32") | {"C": "constexpr"}
    names = list(signature)
    values = {(0, k): v for k, v in constants.items()} | constants_of(segments, names.index("segments"))
    values |= {(n,): None for n, name in enumerate(names) if signature[name] == "constexpr"}
    values[(names.index("C"),)] = C
    out = names.index("out")
    values |= constants_of(signature["out"], out)
    aligned = [(0, 0), (0, 1), (0, 2), (out, 1 if sums else 0)]
    if masked:
        aligned += [(names.index("patches"), n) for n in range(3)]
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    return GluonASTSource(fr.maxsim_row_maxima_sm90, signature, values, attributes)


@pytest.mark.parametrize(
    ("dtype", "d", "layout", "argmax", "sums"),
    [
        (torch.bfloat16, 128, "packed", False, False),
        (torch.bfloat16, 128, "packed", True, False),
        (torch.bfloat16, 128, "masked", False, False),
        (torch.bfloat16, 128, "masked", True, True),
        (torch.bfloat16, 128, "packed", False, True),
        (torch.bfloat16, 128, "kept", True, True),
        (torch.bfloat16, 128, "subset", False, True),
        (torch.bfloat16, 128, "subset, options", False, True),
        pytest.param(torch.bfloat16, 128, "masked", False, True, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 128, "packed", True, True, marks=pytest.mark.slow),
        pytest.param(torch.float16, 128, "masked", True, False, marks=pytest.mark.slow),
        pytest.param(torch.float16, 48, "masked", False, False, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 96, "packed", True, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_row_maxima_compile_to_concurrent_wgmma(dtype, d, layout, argmax, sums):
    # Argmax with masks runs out of registers from Triton 3.8 on.
    products = layout == "masked" and argmax and get_triton_release() >= (3, 8)
    compile_checked(source(dtype, d, layout, argmax, sums), products=products)


def carried(ttgir: str) -> list[list[str]]:
    """Return the types of the loop-carried values of each loop."""
    loops = re.findall(r"scf\.for .* iter_args\(.*\) -> \((.*)\)\s*: i32", ttgir)
    return [re.sub(r"tensor<(\d+x\d+x\w+)?[^()]*?>>*(?=, |$)", r"\1", loop).split(", ") for loop in loops]


@pytest.mark.parametrize("layout", ["packed", "masked", "kept"])
@pytest.mark.parametrize("argmax", [False, True])
@pytest.mark.parametrize("sums", [False, True])
def test_per_document_values_are_loop_carried(layout, argmax, sums):
    """Triton may treat a loop variable as constant. Consumers would then wait for tiles that are never copied."""
    compiled = compile_as_launched(source(torch.bfloat16, 128, layout, argmax, sums), TARGET)
    loops = carried(compiled.asm["ttgir"])
    masked = layout == "masked"
    copied = 1 if layout == "kept" else 2  # values that locate the next document
    where = 1 if masked and not argmax else copied
    # The two warp groups that loop over documents carry the stage, phase, ping-pong turn, and length. They also carry
    # the location of the next document, and either the previous length or the origin.
    expected = 4 + where + (sums and not argmax) + (masked and argmax)
    numbers = [sum(kind in ("i32", "i64") for kind in loop) for loop in loops if loop.count("64x64xf32") == 2]
    assert numbers[0] == expected and numbers.count(expected) >= 2, loops
    # The producer warp carries the stage and the phase.
    assert sum(set(loop) <= {"i32", "i64"} and len(loop) == 2 + copied for loop in loops) == 1, loops


def check_no_spills(source: ASTSource, options: dict[str, int] | None = None) -> None:
    registers, spills = cuda_resources(compile_as_launched(source, TARGET, options).asm["cubin"])
    assert spills == 0, f"{spills} spill instructions, {registers} registers"


def sums_source(layout: str, sums: tuple, cut: object = "constexpr", config: object = None) -> ASTSource:
    queries, constants = _queries(Case("maxsim_forward", options=True))
    segments = segments_of(layout)
    signature: dict = {"maxima": "constexpr" if config else "*fp32", "cut": cut, "scores": "*fp32"}
    signature |= {"Q": QueryArgs(*queries), "segments": segments}
    signature |= dict.fromkeys(("queries", "stride", "Nq", "K", "Lq", "Td"), "i32")
    values = {(3, k): v for k, v in constants.items()} | constants_of(segments, 4)
    values |= {(0,): None} if config else {(1,): None}
    for name, value in zip(("ROWS_PER_QUERY", "QUERIES", "DOCUMENTS", "LEVELS", "C"), (*sums, config), strict=True):
        values[(len(signature),)] = value
        signature[name] = "constexpr"
    if isinstance(cut, tuple):
        values |= {(1, n): None for n, kind in enumerate(cut) if kind == "constexpr"}
    aligned = [(n,) for n, kind in enumerate(signature.values()) if kind == "*fp32"]
    return ASTSource(row_sums.maxsim_row_sums, signature, values, {at: [["tt.divisibility", 16]] for at in aligned})


@pytest.mark.parametrize("Lq", [1, 32, 1024])
@pytest.mark.parametrize("layout", ["packed", "kept"])
def test_sums_do_not_spill(layout, Lq):
    check_no_spills(sums_source(layout, choice(torch.bfloat16, 128, Lq, False).sums))


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize(("Nq", "Lq"), [(1, 1), (1, 32), (4, 32), (1, 128), (1, 1024)])
@pytest.mark.parametrize("layout", ["packed", "even"])
def test_sums_over_splits_do_not_spill(layout, Nq, Lq, everything):
    cut = SplitArgs(
        "*fp32",
        *(("*i32", "*i32", "*fp32", "*i16") if everything else ("constexpr",) * 4),
        "i32",
        "constexpr" if layout == "packed" else "i32",
    )
    Q, D = (torch.empty(n, length, 128, dtype=torch.bfloat16, device="meta") for n, length in ((Nq, Lq), (2, 2**16)))
    found = generic_choices.choose_document_splits(
        generic_choices.make_cut(Q, D, None, None), everything, everything, replace(SM_90, processors=132)
    )
    check_no_spills(sums_source(layout, found.sums, cut, found.launch.config), found.make_sum_options)


def test_mask_preparation_kernels_do_not_spill():
    signature = {"mask": "*i1"} | dict.fromkeys(("bits", "sources", "lengths"), "*i32")
    signature |= dict.fromkeys(("Ld", "stride_k", "stride_l", "tiles"), "i32")
    signature |= dict.fromkeys(("TILES", "BN"), "constexpr")
    check_no_spills(ASTSource(row_sums.maxsim_patches, signature, {(8,): 8, (9,): 64}, {}))
    signature = {"mask": "*i1", "D": "*bf16", "tokens": "*bf16", "original_tokens": "*i32", "lengths": "*i32"}
    signature |= dict.fromkeys(("Ld", "stride_k", "stride_l", "d"), "i32")
    signature |= dict.fromkeys(("TOKENS", "BD"), "constexpr")
    aligned = {(n,): [["tt.divisibility", 16]] for n in (1, 2, 8)}
    check_no_spills(ASTSource(row_sums.maxsim_kept_tokens, signature, {(9,): 64, (10,): 128}, aligned))
    signature = {"cu_seqlens_q": "*i64", "mask": "*i1", "covered": "*i1", "Tq": "i32", "mask_stride": "i32"}
    check_no_spills(ASTSource(row_sums.maxsim_covered_rows, signature | {"BLOCK": "constexpr"}, {(5,): 128}, {}))
