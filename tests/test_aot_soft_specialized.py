"""The Gluon kernels of soft MaxSim compile for sm_90 without a GPU: in flight together, no spills, fit its memory."""

import inspect
from dataclasses import replace

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from lik_ops.csrc_triton.arguments import Output, Queries, Sizes
from lik_ops.csrc_triton.backward_arguments import SoftUpstream
from lik_ops.csrc_triton.backward_soft_specialized import maxsim_soft_rows, maxsim_soft_tokens
from lik_ops.csrc_triton.forward_soft_specialized import maxsim_forward_soft_specialized
from lik_ops.csrc_triton.ring import tile_layout
from lik_ops.gpu import configs, soft_configs

from .aot import Case, _documents, _queries, compile_as_launched
from .test_aot_specialized import check

SM_90 = configs.ARCHITECTURES["sm_90"]
ELEMENTS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def described(dtype: torch.dtype, *block: int) -> str:
    layout = tile_layout(list(block), str(dtype).removeprefix("torch."))
    return f"tensordesc<{ELEMENTS[dtype]}[{','.join(map(str, block))}],{layout!r}>"


def compiled(kernel, signature: dict, constants: dict, options: bool, config):
    """With temperatures that are tensors with `options`, else numbers; what is a pointer is aligned.

    `constants` are those of groups.
    """
    signature = {**signature, "tau": "*fp32" if options else "fp32", "C": "constexpr"}
    names = list(inspect.signature(kernel.fn).parameters)
    signature = {name: signature[name] for name in names}
    values: dict = {(names.index(group), n): v for group, found in constants.items() for n, v in found.items()}
    values[(names.index("C"),)] = config
    aligned: list[tuple[int, ...]] = []
    for at, (name, kind) in enumerate(signature.items()):
        if isinstance(kind, tuple):
            strides = (1, 2, 3) if name in ("Q", "D") else ()
            aligned += [(at, n) for n, v in enumerate(kind) if v.startswith("*") or (n in strides and v == "i32")]
        elif kind.startswith("*"):
            aligned.append((at,))
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    return compile_as_launched(GluonASTSource(kernel, signature, values, attributes), GPUTarget("cuda", 90, 32))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("dtype", "d", "Lq", "options"),
    [(torch.bfloat16, 128, 32, False), (torch.float16, 96, 300, True), (torch.bfloat16, 64, 8, True)],
    ids=str,
)
def test_the_forward_compiles_as_meant(dtype, d, Lq, options, keep, tmp_path):
    arch = replace(SM_90, processors=132)
    choice = soft_configs.specialized(arch, dtype, 256, 256, Lq, 300, d)
    assert choice is not None
    C = choice.config
    queries, constants = _queries(Case("maxsim_forward", dtype, d, options=options))
    signature = {
        "Q": Queries(*queries),
        "D": described(dtype, C.BN, C.BD),
        "out": Output("*fp32", "*fp32" if keep else "constexpr"),
        "sizes": Sizes(*["i32"] * 4),
        **dict.fromkeys(("d", "parts"), "i32"),
    }
    found = {"Q": constants} | ({} if keep else {"out": {1: None}})
    kernel = compiled(maxsim_forward_soft_specialized, signature, found, options, C)
    check(kernel, tmp_path, products=True)


@pytest.mark.parametrize(("d", "Ld"), [(128, 300), (128, 1024), (64, 300), (32, 1024)])
@pytest.mark.parametrize("options", [False, True])
@pytest.mark.parametrize("of_rows", [False, True])
def test_a_backward_compiles_as_meant(d, Ld, options, of_rows, tmp_path):
    dtype = torch.bfloat16
    C = soft_configs.specialized_backward(SM_90, dtype, d, Ld if of_rows else None)
    assert C is not None
    queries, constants = _queries(Case("maxsim_forward", dtype, d, options=options))
    documents, more = _documents(Case("maxsim_forward", dtype, d))
    signature = {
        "Q": Queries(*queries),
        "D": documents,
        "tiles": described(dtype, *[1] * of_rows, C.BN, C.BD),
        "up": SoftUpstream("*fp32", "i32", "i32", "*fp32", *["i32"] * 6),
        **{"sums": "*fp32", "grad": "*bf16", "each": "i32", "d": "i32"},
    }
    kernel = maxsim_soft_rows if of_rows else maxsim_soft_tokens
    found = {"Q": constants} if of_rows else {"Q": constants, "D": more}
    kernel = compiled(kernel, signature, found, options, C)
    check(kernel, tmp_path)


def test_when_they_are_chosen():
    arch = replace(SM_90, processors=132)

    def chosen(dtype=torch.bfloat16, Nq=256, K=256, Lq=32, Ld=300, d=128, arch=arch):
        return soft_configs.specialized(arch, dtype, Nq, K, Lq, Ld, d)

    assert chosen().programs == 128 and chosen(Ld=5) is not None and chosen(dtype=torch.float16) is not None
    assert chosen(Lq=1024).parts == 8 and chosen(Lq=1024).tree == 1
    assert chosen(Nq=4) is None and chosen(Lq=1) is None and chosen(Nq=8, K=8) is None
    assert chosen(d=160) is None and chosen(dtype=torch.float32) is None
    assert chosen(arch=configs.ARCHITECTURES["sm_80"]) is None
    tokens = [soft_configs.specialized_backward(SM_90, torch.bfloat16, 128, Ld).BN for Ld in (5, 180, 300, 1024)]
    assert tokens == [64, 64, 64, 128]
    assert soft_configs.specialized_backward(SM_90, torch.float16, 128, 300) is None
    assert soft_configs.specialized_backward(SM_90, torch.bfloat16, 160, 300) is None
