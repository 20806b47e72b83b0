"""Test that the dense Gluon kernels compile for sm_90 without a GPU: concurrent wgmma, no spills, shared memory."""

from dataclasses import replace

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource

from lik_ops.csrc_triton.common import token_norms
from lik_ops.csrc_triton.common.arguments import EncodedDocumentArgs, OutputArgs, QueryArgs, SizeArgs
from lik_ops.csrc_triton.forward.sm90 import dense as fs
from lik_ops.csrc_triton.forward.sm90 import large_d as fw
from lik_ops.csrc_triton.forward.sm90.pipeline import make_tile_layout
from lik_ops.gpu.tuning import architectures, sm90_configs

from ..support.aot import Case, _documents, _queries
from ..support.aot_cases import alternate
from ..support.machine_code import compile_as_launched, compile_sm90, cuda_resources, repeated_spills, unused_barriers

SM_90 = replace(architectures.ARCHITECTURES["sm_90"], processors=132)


def source(
    dtype: torch.dtype, d: int, Lq: int, options: bool, argmax: bool, normalize: bool, given: bool, Ld: int
) -> GluonASTSource:
    chosen = {"normalize": normalize, "argmax": argmax}
    Nq = max(1, 256 // Lq) if normalize and not given else 256  # precomputed norms are read from 6 row tiles on
    choice = sm90_configs.configure_sm90(SM_90, SizeArgs(Nq, 256, Lq, Ld), d, **chosen)
    assert choice is not None and choice.config.PRECOMPUTED_SCALES is given
    C = choice.config
    element = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    queries, constants = _queries(Case("maxsim_forward", dtype, d, options=options))
    layout = make_tile_layout([C.BN, C.BD], str(dtype).removeprefix("torch."))
    signature = {
        "Q": QueryArgs(*queries),
        "D": f"tensordesc<{element}[{C.BN},{C.BD}],{layout!r}>",
        "norms": described_norms(C.BN) if given else "constexpr",
        "numbers": "constexpr",
        "out": OutputArgs("*fp32", "*i16" if argmax else "constexpr"),
        "sizes": SizeArgs(*["i32"] * 4),
    }
    signature |= dict.fromkeys(("d", "parts"), "i32") | {"C": "constexpr"}
    names = list(signature)
    values = {(0, k): v for k, v in constants.items()} | {(names.index("C"),): C, (names.index("numbers"),): None}
    if not given:
        values[(names.index("norms"),)] = None
    if not argmax:
        values[(names.index("out"), 1)] = None
    aligned = [(0, 0), (0, 1), (0, 2), *((names.index("out"), n) for n in range(1 + argmax))]
    aligned += [(names.index("d"),)] if d % 16 == 0 else []  # the specialization of `launcher.describe_args`
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    return GluonASTSource(fs.maxsim_forward_sm90, signature, values, attributes)


def numbers_source(choice, dtype: torch.dtype, d: int, options: bool, scales: bool):
    """Return the kernel source for encoded or fp32 documents. If `scales`, a descriptor reads the token scales."""
    assert choice is not None
    C = choice.config
    scales |= C.PRECOMPUTED_TERMS
    queries, constants = _queries(Case("maxsim_forward", dtype, d, options=options))
    element, kept = ("fp32", "float32") if C.FP32_TERMS else ("i8", "int8")
    element = "fp8e4nv" if C.ENCODING == "fp8_fp8" else element
    if C.PRECOMPUTED_TERMS:
        element, kept = "fp16", "float16"
    block = [C.BN, C.BD]
    if C.ENCODING.startswith("bits"):
        block, element, kept = [C.BN * C.BD * int(C.ENCODING[4]) // 32], "i32", "int32"
    scale = "bf16" if C.ENCODING.endswith("_rotated") else "fp32"
    signature = {
        "Q": QueryArgs(*queries),
        "D": f"tensordesc<{element}[{','.join(map(str, block))}],{make_tile_layout(block, kept)!r}>",
        "norms": described_norms(C.BN) if scales else "constexpr",
        "numbers": EncodedDocumentArgs(f"*{element}", "constexpr" if C.FP32_TERMS else f"*{scale}", "i32", "i32"),
        "out": OutputArgs("*fp32", "*i16" if C.ARGMAX else "constexpr"),
        "sizes": SizeArgs(*["i32"] * 4),
    }
    signature |= dict.fromkeys(("d", "parts"), "i32") | {"C": "constexpr"}
    names = list(signature)
    values = {(0, k): v for k, v in constants.items()} | {(names.index("C"),): C}
    values |= {} if C.ARGMAX else {(names.index("out"), 1): None}
    values |= {} if scales else {(names.index("norms"),): None}
    values |= {(3, 1): None} if C.FP32_TERMS else {}
    aligned = [(0, 0), (0, 1), (0, 2), (3, 0), *([] if C.FP32_TERMS else [(3, 1)]), (names.index("out"), 0)]
    aligned += [(names.index("d"),)] if d % 16 == 0 else []
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    return GluonASTSource(fs.maxsim_forward_sm90, signature, values, attributes)


def int8_source(dtype: torch.dtype, d: int, Nq: int, Lq: int, Ld: int, options: bool, each_token: bool, terms: int):
    chosen = {"each_token": each_token, "terms": terms}
    choice = sm90_configs.configure_int8(SM_90, dtype, SizeArgs(Nq, 256, Lq, Ld), d, **chosen)
    return numbers_source(choice, dtype, d, options, each_token)


@pytest.mark.parametrize(
    ("dtype", "d", "Nq", "Lq", "Ld", "options", "terms", "each_token"),
    alternate(
        [
            (torch.bfloat16, 128, 1, 32, 1024, False, 2),
            (torch.float32, 64, 2, 16, 180, True, 2),
            (torch.bfloat16, 128, 256, 32, 300, False, 2),
            (torch.float32, 96, 256, 5, 300, True, 2),
            (torch.bfloat16, 128, 64, 1024, 1024, True, 2),
            (torch.float16, 64, 2, 32, 180, False, 1),
            (torch.bfloat16, 128, 1, 32, 1024, True, 1),
            (torch.bfloat16, 128, 256, 32, 300, True, 1),
            (torch.float32, 128, 64, 1024, 1024, True, 1),
        ],
        1,
    ),
    ids=str,
)
def test_int8_documents_compile_to_concurrent_wgmma(dtype, d, Nq, Lq, Ld, options, terms, each_token):
    source = int8_source(dtype, d, Nq, Lq, Ld, options, each_token, terms)
    assert "s32.s8.s8" in compile_checked(source, products=True).asm["ptx"]


@pytest.mark.parametrize(
    ("dtype", "Nq", "Lq", "Ld", "options", "kept", "each_token"),
    alternate(
        [
            (torch.bfloat16, 1, 32, 180, False, "bits1_half"),
            (torch.bfloat16, 1, 32, 180, False, "bits1_rotated"),
            (torch.float32, 2, 16, 300, True, "bits1_binary"),
            (torch.float16, 2, 32, 64, True, "bits1_half"),
            (torch.float32, 3, 32, 64, True, "bits1_rotated"),
            (torch.bfloat16, 1, 32, 180, False, "bits2_rotated"),
            (torch.bfloat16, 1, 32, 180, False, "bits4_rotated"),
            (torch.float32, 3, 32, 64, True, "bits2_rotated"),
            (torch.float16, 3, 32, 64, True, "bits4_rotated"),
            (torch.bfloat16, 64, 1024, 1024, True, "bits2_rotated"),
            (torch.float32, 16, 32, 300, True, "bits4_rotated"),
            (torch.bfloat16, 256, 32, 300, False, "bits1_binary"),
            (torch.float16, 64, 1024, 1024, True, "bits1_half"),
            (torch.bfloat16, 64, 1024, 1024, True, "bits1_rotated"),
        ],
        1,
    ),
    ids=str,
)
def test_code_documents_compile_to_concurrent_wgmma(dtype, Nq, Lq, Ld, options, kept, each_token):
    terms, rotated = 1 if kept == "bits1_binary" else 2, kept.endswith("_rotated")
    chosen = {"each_token": each_token, "terms": terms, "encoding": kept}
    choice = sm90_configs.configure_int8(SM_90, dtype, SizeArgs(Nq, 256, Lq, Ld), 128, **chosen)
    C = choice.config
    assert choice.programs == min(132 * C.PROGRAMS_PER_SM, 256) if C.SMALL_M else C.PROGRAMS_PER_SM == 1
    source = numbers_source(choice, dtype, 128, options, each_token and C.SMALL_M and not rotated)
    compiled = compile_checked(source, choice.launch_options, products=True)
    assert "s32.s8.s8" in compiled.asm["ptx"] and "0x6a;" in compiled.asm["ptx"]  # the decoder's lop3
    registers, _ = cuda_resources(compiled.asm["cubin"])
    threads = 12 * 32 if C.SMALL_M else 16 * 32
    assert registers * threads * C.PROGRAMS_PER_SM <= 65536
    assert compiled.metadata.shared * C.PROGRAMS_PER_SM <= SM_90.shared_memory_bytes


def fp8_source(dtype: torch.dtype, kept: str, d: int, Nq: int, Lq: int, Ld: int, options: bool):
    choice = sm90_configs.configure_fp8(SM_90, SizeArgs(Nq, 256, Lq, Ld), d, encoding=kept)
    return numbers_source(choice, dtype, d, options, False)


@pytest.mark.parametrize(
    ("dtype", "kept", "d", "Nq", "Lq", "Ld", "options"),
    [
        (torch.bfloat16, "e4m3", 128, 64, 1024, 1024, False),
        (torch.bfloat16, "e4m3", 96, 64, 32, 300, True),
        (torch.float16, "e5m2", 64, 64, 5, 180, True),
        (torch.float16, "e4m3", 128, 64, 32, 300, False),
        (torch.bfloat16, "e4m3", 128, 1, 32, 300, False),
        (torch.float16, "e5m2", 64, 2, 32, 180, True),
        (torch.bfloat16, "e5m2", 96, 7, 5, 300, True),
    ],
    ids=str,
)
def test_fp8_documents_compile_to_concurrent_wgmma(dtype, kept, d, Nq, Lq, Ld, options):
    compiled = compile_checked(fp8_source(dtype, kept, d, Nq, Lq, Ld, options), products=True)
    assert "f32.f16.f16" in compiled.asm["ptx"] and f"f16x2.{kept}x2" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("dtype", "d", "Nq", "Lq", "Ld", "options"),
    [
        (torch.bfloat16, 128, 64, 1024, 1024, False),
        (torch.float16, 96, 16, 32, 300, True),
        (torch.bfloat16, 128, 1, 32, 300, False),
        (torch.float16, 64, 4, 32, 180, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("each_token", [True, False])
def test_fp8_queries_compile_to_concurrent_wgmma(dtype, d, Nq, Lq, Ld, options, each_token):
    choice = sm90_configs.configure_fp8(SM_90, SizeArgs(Nq, 256, Lq, Ld), d, encoding="fp8_fp8", each_token=each_token)
    source = numbers_source(choice, dtype, d, options, each_token)
    assert "f32.e4m3.e4m3" in compile_checked(source, products=True).asm["ptx"]


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize(
    ("d", "Nq", "Lq", "options"),
    [(128, 64, 1024, False), (128, 256, 32, False), (96, 64, 100, True), (64, 64, 20, True), (128, 16, 32, False)],
)
def test_fp32_rows_compile_to_concurrent_wgmma(d, Nq, Lq, options, terms):
    choice = sm90_configs.configure_fp32_split(SM_90, SizeArgs(Nq, 256, Lq, 300), d, terms=terms)
    assert (Nq > 16) == choice.config.PRECOMPUTED_TERMS
    source = numbers_source(choice, torch.float32, d, options, False)
    # Eight conversion warps leave 192 registers. Two terms are then 8 % faster than with 4 warps and no spills.
    compiled = compile_checked(source, products=True, most_spills=48 if Nq == 16 and terms == 2 else 0)
    assert "f32.f16.f16" in compiled.asm["ptx"]


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize(
    ("d", "Nq", "Lq", "options", "argmax", "masked", "normalize"),
    [
        (128, 64, 1024, False, True, False, False),
        (128, 16, 32, True, True, True, False),
        (64, 9, 32, False, False, True, False),
        (128, 64, 1024, False, False, False, True),
        (64, 256, 32, True, False, False, True),
        (128, 16, 32, True, True, True, True),
    ],
)
def test_fp32_rows_with_options_compile_to_concurrent_wgmma(d, Nq, Lq, options, argmax, masked, normalize, terms):
    chosen = {"terms": terms, "argmax": argmax, "masked": masked, "normalize": normalize, "first": True}
    choice = sm90_configs.configure_fp32_split(SM_90, SizeArgs(Nq, 256, Lq, 300), d, **chosen)
    assert choice.config.PRECOMPUTED_TERMS
    compile_checked(numbers_source(choice, torch.float32, d, options, False), products=True)


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize(("d", "Nq", "Lq", "options"), [(128, 1, 32, False), (96, 2, 9, True), (64, 1, 20, True)])
def test_few_fp32_rows_compile_to_concurrent_wgmma(d, Nq, Lq, options, terms):
    choice = sm90_configs.configure_fp32_split(SM_90, SizeArgs(Nq, 256, Lq, 300), d, terms=terms)
    compiled = compile_checked(numbers_source(choice, torch.float32, d, options, False))
    assert "f32.f16.f16" in compiled.asm["ptx"]


def described_norms(BN: int) -> str:
    return f"tensordesc<fp32[{BN}],{make_tile_layout([BN], 'float32')!r}>"


@pytest.mark.parametrize("norms", ["", "found", "given"])
@pytest.mark.parametrize("argmax", [False, True])
@pytest.mark.parametrize(
    ("dtype", "d", "Lq", "options"),
    [
        (torch.bfloat16, 128, 32, False),
        (torch.float16, 128, 128, True),
        (torch.bfloat16, 64, 8, True),
        (torch.bfloat16, 96, 1024, False),
    ],
    ids=str,
)
def test_half_precision_compiles_to_concurrent_wgmma(dtype, d, Lq, options, argmax, norms):
    kernel = source(dtype, d, Lq, options, argmax, norms != "", norms == "given", 300)
    compile_checked(kernel, products=norms != "")


@pytest.mark.parametrize(("argmax", "norms"), [(True, ""), (False, "given"), (True, "given")])
@pytest.mark.parametrize(
    ("dtype", "d", "Lq", "options"),
    [(torch.bfloat16, 128, 1024, False), (torch.float16, 128, 32, True), (torch.bfloat16, 64, 8, True)],
    ids=str,
)
def test_large_tiles_compile_to_concurrent_wgmma(dtype, d, Lq, options, argmax, norms):
    kernel = source(dtype, d, Lq, options, argmax, norms != "", norms == "given", 1024)
    compile_checked(kernel, products=True)


def compile_checked(
    source: GluonASTSource, options: dict | None = None, products: bool = False, most_spills: int = 0
) -> CompiledKernel:
    """Compile a kernel and check it. Some registers may spill once for each document, but `most_spills` for each tile.

    Args:
        products: see `repeated_spills`.
    """
    compiled, report = compile_sm90(source, options)
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    assert "registers" in report
    assert [line for line in report.splitlines() if "wgmma" in line or "GMMA" in line] == []  # serialized products
    assert unused_barriers(compiled.asm["ttgir"]) == []
    registers, spills = repeated_spills(compiled.asm["cubin"], products)
    assert spills <= most_spills, f"{spills} spill instructions in loops, {registers} registers"
    assert compiled.metadata.shared <= SM_90.shared_memory_bytes
    return compiled


def wide_source(
    dtype: torch.dtype, d: int, Lq: int, Ld: int, options: bool, normalize: bool, masked: bool, argmax: bool
) -> GluonASTSource:
    chosen = {"normalize": normalize, "argmax": argmax, "masked": masked}
    choice = sm90_configs.configure_sm90(SM_90, SizeArgs(256, 256, Lq, Ld), d, **chosen)
    assert choice is not None
    C, features = choice.config, fw.STEP_FEATURES.value
    queries, constants = _queries(Case("maxsim_forward", dtype, d, options=options))

    def described(*block: int) -> str:
        layout = make_tile_layout(list(block), str(dtype).removeprefix("torch."))
        element = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
        return f"tensordesc<{element}[{','.join(map(str, block))}],{layout!r}>"

    signature = {
        "Q": QueryArgs(*queries),
        "rows": described(sm90_configs.LARGE_D_TILE_ROWS // 2 // C.ROWS_PER_QUERY, C.ROWS_PER_QUERY, features),
        "D": described(C.BN, features),
        "norms": described_norms(C.BN) if normalize or masked else "constexpr",
        "query_norms": "*fp32" if normalize else "constexpr",
        "out": OutputArgs("*fp32", "*i16" if argmax else "constexpr"),
        "sizes": SizeArgs(*["i32"] * 4),
    }
    signature |= dict.fromkeys(("d", "parts"), "i32") | {"C": "constexpr"}
    values = {(0, k): v for k, v in constants.items()} | {(list(signature).index("C"),): C}
    values |= {} if normalize or masked else {(3,): None}
    values |= {} if normalize else {(4,): None}
    values |= {} if argmax else {(5, 1): None}
    aligned = [
        (0, 0),
        (0, 1),
        (0, 2),
        (5, 0),
        *([(5, 1)] if argmax else []),
        *([(list(signature).index("d"),)] if d % 16 == 0 else []),
    ]
    return GluonASTSource(
        fw.maxsim_forward_sm90_large_d, signature, values, {path: [["tt.divisibility", 16]] for path in aligned}
    )


@pytest.mark.parametrize(
    ("dtype", "d", "Lq", "Ld", "options", "normalize", "masked", "argmax"),
    alternate(
        [
            (torch.bfloat16, 768, 128, 1024, False),
            (torch.float16, 208, 32, 300, True),
            (torch.bfloat16, 1024, 8, 64, True),
            (torch.bfloat16, 256, 32, 20, True),
            (torch.float16, 512, 128, 100, False),
            (torch.bfloat16, 320, 8, 127, True),
        ],
        3,
    ),
    ids=str,
)
def test_large_d_compiles_to_concurrent_wgmma(dtype, d, Lq, Ld, options, normalize, masked, argmax):
    compile_checked(wide_source(dtype, d, Lq, Ld, options, normalize, masked, argmax))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("d", "BD", "queries"), [(128, 128, False), (48, 64, False), (320, 128, True)])
def test_token_norms_kernel_compiles_without_spills(d, BD, queries, packed):
    q, constants = _queries(Case("maxsim_forward", torch.bfloat16, d))
    documents, more = _documents(Case("maxsim_forward", torch.bfloat16, d))
    kind = "*fp32" if queries else "constexpr"
    signature = {
        "Q": QueryArgs(*q),
        "D": documents,
        "queries": kind,
        "documents": "*fp32",
        "sizes": SizeArgs(*["i32"] * 4),
    }
    signature |= {"d": "i32", "BN": "constexpr", "BD": "constexpr", "NORMALIZE": "constexpr"}
    signature |= {"SHORT_DOCUMENTS": "constexpr"}
    values = {(0, k): v for k, v in constants.items()} | {(1, k): v for k, v in more.items()}
    values |= {(6,): 64, (7,): BD, (8,): True, (9,): packed} | ({} if queries else {(2,): None})
    aligned = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 2), (1, 3), (3,), (5,)]
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    source = ASTSource(token_norms.maxsim_tile_norms, signature, values, attributes)
    cubin = compile_as_launched(source, GPUTarget("cuda", 90, 32)).asm["cubin"]
    assert cuda_resources(cubin)[1] == 0
