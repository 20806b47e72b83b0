"""Test that the head kernels compile for every architecture without a GPU: no spills, tensor cores, equal layouts.

Both kernels must compute tokens in one layout, because the order of the sums depends on the layout.
"""

import itertools
import re
from dataclasses import dataclass, replace

import pytest
import torch
from triton.compiler import ASTSource

from lik_ops.csrc_triton.common.arguments import DocumentArgs, HeadConfig, LinearArgs, QueryArgs, SizeArgs
from lik_ops.csrc_triton.head.argmax_tokens import maxsim_gather_argmax_tokens, maxsim_scatter_argmax_tokens
from lik_ops.csrc_triton.head.kernels import (
    maxsim_forward_head,
    maxsim_head_slopes,
    maxsim_head_tokens,
    maxsim_scale_tokens,
    maxsim_split_weights,
)
from lik_ops.families.head import configs as head_configs
from lik_ops.gpu.tuning.architectures import ARCHITECTURES, Architecture, supports_vector_loads

from ...csrc_triton.test_aot import MATRIX_UNIT
from ...support.common import thin_out
from ...support.machine_code import compile_as_launched, cuda_resources, disassembled, target

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_NAMES = {_BF16: "bf16", _FP16: "fp16", _FP32: "fp32"}


@dataclass(frozen=True)
class Case:
    """Properties that determine how the kernels compile."""

    dtype: torch.dtype = _BF16
    d: int = 128
    width: int = 768
    Nq: int = 1
    Lq: int = 32
    bias: bool = True
    normalize: bool = True
    masks: bool = False
    wide: int = 1
    few: bool = False  # tokens
    tf32: bool = False

    def __str__(self) -> str:
        flags = [name for name in ("bias", "normalize", "masks", "few", "tf32") if getattr(self, name)]
        return f"{_NAMES[self.dtype]}-{self.width}to{self.d}-{self.Nq}x{self.Lq}-" + "-".join([*flags, str(self.wide)])


def _launch(case: Case, arch: Architecture, fused: bool) -> head_configs.HeadLaunchConfig:
    same = case.normalize, case.wide
    if fused:
        return head_configs.configure_scores(arch, case.dtype, case.Nq, case.Lq, case.d, case.width, *same)
    launch = head_configs.configure_tokens(arch, case.dtype, case.d, case.width, *same, case.tf32)
    launch = launch.change(NORMALIZE=case.normalize and case.d <= launch.config.BD)
    return head_configs.adjust_for_few_tokens(
        launch, replace(arch, processors=132), 10**3 if case.few else 10**6, case.d
    )


def _groups(case: Case) -> dict[str, tuple[tuple, dict[int, object]]]:
    """Return the types and constants of each group: hidden states, weights, and queries."""
    pointer = "*" + _NAMES[case.dtype]
    none = dict.fromkeys
    mask = ("*i1", "constexpr", "i32", "constexpr") if case.masks else ("constexpr",) * 4
    H = DocumentArgs(pointer, "constexpr", "i32", "i32", "constexpr", *mask)
    bias = pointer if case.bias else "constexpr"
    per_row = ("*i1", "i32", "constexpr", "*fp32", "i32", "constexpr") if case.masks else ("constexpr",) * 6
    Q = QueryArgs(pointer, "i32", "i32", "constexpr", *per_row)
    return {
        "Q": (Q, {3: 1} | ({6: 1, 9: 1} if case.masks else none(range(4, 10)))),
        "H": (H, {1: 0, 4: 1} | ({6: 0, 8: 1} if case.masks else none(range(5, 9)))),
        "W": (LinearArgs(pointer, "i32", "constexpr", bias), {2: 1} | ({} if case.bias else {3: None})),
    }


def _tiles(case: Case, arch: Architecture, C: HeadConfig) -> dict[str, str]:
    if not arch.has_descriptors or case.width * case.dtype.itemsize % 16 or case.wide == 2:
        return {"tiles": "constexpr", "steps": "constexpr"}
    blocks = {"tiles": [1, C.BN, C.BK], "steps": [1, C.BD, C.BK]}
    return {name: f"tensordesc<{_NAMES[case.dtype]}{block}>" for name, block in blocks.items()}


def _compile_kernel(case: Case, arch: Architecture, fused: bool):
    launch, groups = _launch(case, arch, fused), _groups(case)
    arguments: dict[str, object] = {name: groups[name][0] for name in (("Q", "H", "W") if fused else ("H", "W"))}
    arguments |= _tiles(case, arch, launch.config)
    if fused:
        arguments |= {"scores": "*fp32", "sizes": SizeArgs(*["i32"] * 4), "width": "i32", "d": "i32"}
    else:
        in_parts = case.normalize and case.d > launch.config.BD
        arguments |= {"out": "*fp32" if in_parts else "*" + _NAMES[case.dtype]}
        arguments |= {"norms": "*fp32" if case.normalize and not in_parts else "constexpr"}
        arguments |= {"squares": "*fp32" if in_parts else "constexpr"}
        arguments |= dict.fromkeys(("width", "d", "rows", "Ld"), "i32")
    names = [*arguments, "C"]
    constants: dict[tuple[int, ...], object] = {(names.index("C"),): launch.config}
    aligned: list[tuple[int, ...]] = []
    strides = {"Q": (1, 2), "H": (2, 3), "W": (1,)}
    for at, (name, kind) in enumerate(arguments.items()):
        if name in groups:
            constants |= {(at, n): value for n, value in groups[name][1].items()}
            aligned += [(at, n) for n, member in enumerate(groups[name][0]) if member.startswith("*")]
            features = case.d if name == "Q" else case.width
            aligned += [(at, n) for n in strides[name] if features % 16 == 0]
        elif kind == "constexpr":
            constants[(at,)] = None
        elif isinstance(kind, str) and kind.startswith("*"):
            aligned.append((at,))
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    kernel = maxsim_forward_head if fused else maxsim_head_tokens
    src = ASTSource(fn=kernel, signature={**arguments, "C": "constexpr"}, constexprs=constants, attrs=attributes)
    return compile_as_launched(src, target(arch), launch.options(arch))


def _check(case: Case, name: str, fused: bool) -> list[str]:
    """Check the compiled kernel and return the layouts of its products."""
    arch = ARCHITECTURES[name]
    compiled = _compile_kernel(case, arch, fused)
    assert compiled.metadata.shared <= arch.shared_memory_bytes, f"{compiled.metadata.shared} bytes of shared memory"
    text = compiled.asm["amdgcn" if arch.is_amd else "ptx"]
    if arch.is_amd:
        spills = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text).group(1))  # type: ignore[union-attr]
    else:
        spills = cuda_resources(compiled.asm["cubin"])[1]
    assert spills == 0, f"{spills} spill instructions"
    if name != "sm_100" or case.dtype != _FP32:  # Triton 3.6 uses small mma.sync steps there, and their layout
        assert MATRIX_UNIT.get(name, "mma.sync") in text, "not on the matrix unit"
        stores_vectors = not fused and not arch.is_amd and case.d % 16 == 0
        assert not stores_vectors or "st.global.v4" in text, "tokens are stored feature by feature"
    if name == "sm_90" and supports_vector_loads(case.width, case.wide):
        assert "cp.async.bulk.tensor" in text
        code = [text for _, text in disassembled(compiled.asm["cubin"])[1]]
        products, waits = (sum(word in text for text in code) for word in ("GMMA", "WARPGROUP.DEPBAR"))
        assert waits <= products / 2, f"{waits} waits for {products} products: ptxas serializes them"
    return re.findall(r"nvidia_mma<(.*?)>", compiled.asm["ttgir"])


FEW = [
    Case(),
    Case(masks=True),
    Case(Nq=4, masks=True),
    Case(_FP16, bias=False, normalize=False),
    Case(width=384, Lq=20, Nq=2, masks=True),
    Case(d=256, Nq=2, masks=True),
    Case(d=64, width=1024, Nq=4, masks=True),
    Case(_FP16, d=20, width=100, masks=True),
    Case(_FP16, d=200, width=90, Nq=4),
]
TOKENS = [Case(), Case(_FP32), Case(_FP16, d=256), Case(_FP32, d=256, width=100), Case(d=96, width=100, wide=2)]
TOKENS += [
    *(Case(dtype, 1024, normalize=normalize) for dtype in (_BF16, _FP32) for normalize in (False, True)),
    *(Case(dtype, 320, normalize=normalize) for dtype in (_FP16, _FP32) for normalize in (False, True)),
    *(Case(dtype, d, few=True) for dtype, d in ((_BF16, 64), (_FP16, 128), (_BF16, 256), (_FP16, 320), (_FP32, 128))),
    Case(_FP16, d=256, width=100, wide=2, few=True),
    Case(_FP32, tf32=True),
    Case(_FP32, d=96, width=100, wide=2),
]
MORE = [
    Case(dtype, d, width, Nq, Lq, bias, normalize, masks)
    for dtype, d, width in ((_BF16, 64, 1024), (_FP16, 200, 768), (_BF16, 48, 312), (_FP16, 128, 90))
    for Nq, Lq in ((1, 8), (4, 32), (128, 1))
    for bias, normalize, masks in ((True, True, True), (False, True, False), (True, False, True))
]


@pytest.mark.parametrize("name", ["sm_80", "sm_90"])
@pytest.mark.parametrize("case", FEW, ids=str)
def test_fused_score_kernel_compiles_without_spills(case, name):
    _check(case, name, fused=True)


@pytest.mark.parametrize(
    ("case", "name"), thin_out(itertools.product(TOKENS, ("sm_80", "sm_90", "sm_100")), 2, applies=True), ids=str
)
def test_token_kernel_compiles_without_spills(case, name):
    _check(case, name, fused=False)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_both_kernels_use_the_same_token_layout(case):
    """The sums of a token use the layout of its product, whose width is the token width.

    With few tokens fewer warps share the rows.
    """
    tokens, fused = (_check(case, "sm_90", fused) for fused in (False, True))
    assert tokens[0] in fused
    few = _check(replace(case, few=True), "sm_90", False)
    assert few[0] == (tokens[0].replace("[8, 1]", "[4, 1]") if case.d <= 128 else tokens[0])


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(
    ("dtype", "d", "more"),
    [(_BF16, 128, True), (_FP16, 128, True), (_FP16, 96, False), (_FP32, 128, False), (_FP32, 20, True)],
    ids=str,
)
def test_slopes_kernel_compiles_without_spills(dtype, d, more, name):
    """The kernel converts token gradients to gradients of the sums with vector loads and stores."""
    arch, pointer = ARCHITECTURES[name], "*" + _NAMES[dtype]
    G, members = _groups(Case(dtype, masks=more))["H"]
    BN, BD, _, options = head_configs.configure_slopes(arch, d, 10**6)
    given = {"G": G, "D": pointer, "norms": "*fp32", "sums": "*fp32" if more else "constexpr"}
    given |= dict.fromkeys(("d", "rows", "Ld"), "i32") | {"BN": "constexpr", "BD": "constexpr"}
    constants = {(0, n): value for n, value in members.items()} | {(7,): BN, (8,): BD}
    constants |= {} if more else {(3,): None}
    aligned = [(0, 0), (1,), (2,), *([(3,)] if more else []), *([(4,)] if d % 16 == 0 else [])]
    src = ASTSource(maxsim_head_slopes, given, constants, {path: [["tt.divisibility", 16]] for path in aligned})
    compiled = compile_as_launched(src, target(arch), options)
    if not arch.is_amd:
        assert cuda_resources(compiled.asm["cubin"])[1] == 0
        assert d % 16 or "ld.global.v4" in compiled.asm["ptx"]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "d"), [(_FP32, 320), (_FP32, 1000), (_BF16, 320), (_FP16, 1000)], ids=str)
def test_scale_kernel_compiles_without_spills(dtype, d, name):
    arch = ARCHITECTURES[name]
    BN, BD, options = head_configs.configure_scaling(d)
    types = {"sums": "*fp32", "out": "*" + _NAMES[dtype], "norms": "*fp32", "squares": "*fp32"}
    types |= dict.fromkeys(("rows", "d", "parts"), "i32")
    constants = {(len(types),): BN, (len(types) + 1,): BD}
    aligned = [*((n,) for n in range(4)), *([(5,)] if d % 16 == 0 else [])]
    types |= {"BN": "constexpr", "BD": "constexpr"}
    src = ASTSource(maxsim_scale_tokens, types, constants, {path: [["tt.divisibility", 16]] for path in aligned})
    compiled = compile_as_launched(src, target(arch), options)
    if not arch.is_amd:
        assert cuda_resources(compiled.asm["cubin"])[1] == 0
        assert d % 16 or "st.global.v4" in compiled.asm["ptx"]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("terms", [1, 2])
def test_split_kernel_compiles_without_spills(terms, name):
    arch = ARCHITECTURES[name]
    W, members = _groups(Case(_FP32, bias=False))["W"]
    types: dict = {"W": W, "out": "*fp32", "width": "i32", "count": "i32", "BLOCK": "constexpr", "TERMS": "constexpr"}
    constants = {(0, n): value for n, value in members.items()} | {(4,): head_configs.SPLIT_BLOCK, (5,): terms}
    attributes = {path: [["tt.divisibility", 16]] for path in ((0, 0), (1,))}
    src = ASTSource(maxsim_split_weights, types, constants, attributes)
    compiled = compile_as_launched(src, target(arch), {"num_warps": 4})
    assert arch.is_amd or cuda_resources(compiled.asm["cubin"])[1] == 0


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "width"), [(_BF16, 768), (_FP32, 100)], ids=str)
@pytest.mark.parametrize("scatters", [False, True])
def test_copies_of_argmax_tokens_compile_without_spills(scatters, dtype, width, name):
    arch, pointer = ARCHITECTURES[name], "*" + _NAMES[dtype]
    H, members = _groups(Case(dtype))["H"]
    if scatters:
        kernel, members = maxsim_scatter_argmax_tokens, {}
        types: dict = {"gradient": pointer, "argmax": "*i16", "slots": "*i16", "grad_H": pointer, "rows": "i32"}
        types |= dict.fromkeys(("Ld", "width"), "i32")
    else:
        kernel = maxsim_gather_argmax_tokens
        types = {"H": H, "argmax": "*i32", "slots": "*i32", "out": pointer, "rows": "i32", "width": "i32"}
    names = [*types, "BLOCK", "FEATURES"]
    constants = {(0, n): value for n, value in members.items()}
    constants |= {(names.index("BLOCK") + n,): size for n, size in enumerate(head_configs.ARGMAX_TOKENS_BLOCK)}
    aligned = [(n,) if n or scatters else (0, 0) for n in range(4)]
    aligned += [(names.index("width"),)] if width % 16 == 0 else []
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    src = ASTSource(kernel, types | {"BLOCK": "constexpr", "FEATURES": "constexpr"}, constants, attributes)
    compiled = compile_as_launched(src, target(arch), {"num_warps": 4})
    if not arch.is_amd:
        assert cuda_resources(compiled.asm["cubin"])[1] == 0
        assert width % 16 or "st.global.v4" in compiled.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("case", FEW + TOKENS + MORE, ids=str)
def test_every_configuration_compiles_without_spills(case, name):
    _check(case, name, fused=False)
    if name in head_configs._FUSED_ARCHITECTURES and case.dtype != _FP32 and case.d <= head_configs.MAX_FEATURES:
        _check(case, name, fused=True)
