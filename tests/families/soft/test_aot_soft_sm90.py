"""Test that the soft Gluon kernels compile for sm_90 without a GPU: concurrent wgmma, no spills, shared memory."""

import inspect

import pytest
import torch
from triton.experimental.gluon._runtime import GluonASTSource

from lik_ops.csrc_triton.backward.arguments import SoftUpstreamArgs
from lik_ops.csrc_triton.common.arguments import QueryArgs
from lik_ops.csrc_triton.forward.sm90.pipeline import make_tile_layout
from lik_ops.csrc_triton.soft.backward_sm90 import maxsim_soft_rows, maxsim_soft_tokens
from lik_ops.families.soft import configs as soft_configs
from lik_ops.gpu import supports
from lik_ops.gpu.tuning import architectures

from ...csrc_triton.test_aot_sm90_dense import compile_checked
from ...support.aot import Case, _documents, _queries

SM_90 = architectures.ARCHITECTURES["sm_90"]


def make_descriptor_type(dtype: torch.dtype, *block: int) -> str:
    layout = make_tile_layout(list(block), str(dtype).removeprefix("torch."))
    return f"tensordesc<bf16[{','.join(map(str, block))}],{layout!r}>"


def make_source(kernel, signature: dict, constants: dict, options: bool, config) -> GluonASTSource:
    """Return the source of a kernel. Pointers are aligned, and temperatures are tensors if `options`, else numbers.

    `constants` holds the constants of each group.
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
    return GluonASTSource(kernel, signature, values, attributes)


@pytest.mark.parametrize(("d", "Ld"), [(128, 300), (128, 1024), (64, 300), (32, 1024)])
@pytest.mark.parametrize("options", [False, True])
@pytest.mark.parametrize("of_rows", [False, True])
def test_backward_kernels_compile_without_spills(d, Ld, options, of_rows):
    dtype = torch.bfloat16
    C = soft_configs.configure_soft_sm90_backward(d, Ld if of_rows else None)
    queries, constants = _queries(Case("maxsim_forward", dtype, d, options=options))
    documents, more = _documents(Case("maxsim_forward", dtype, d))
    signature = {
        "Q": QueryArgs(*queries),
        "D": documents,
        "tiles": make_descriptor_type(dtype, *[1] * of_rows, C.BN, C.BD),
        "up": SoftUpstreamArgs("*fp32", "i32", "i32", "*fp32", *["i32"] * 6),
        **{"sums": "*fp32", "grad": "*bf16", "documents_per_part": "i32", "d": "i32"},
    }
    kernel = maxsim_soft_rows if of_rows else maxsim_soft_tokens
    found = {"Q": constants} if of_rows else {"Q": constants, "D": more}
    compile_checked(make_source(kernel, signature, found, options, C))


def test_tile_choice_and_unsupported_reasons():
    tokens = [soft_configs.configure_soft_sm90_backward(128, Ld).BN for Ld in (5, 180, 300, 1024)]
    assert tokens == [64, 64, 64, 128]

    def reason(dtype=torch.bfloat16, d=128, arch=SM_90, normalize=False, d_mask=None):
        Q, D = torch.empty(4, 32, d, dtype=dtype, device="meta"), torch.empty(9, 300, d, dtype=dtype, device="meta")
        return supports.supports_soft_gradients(Q, D, d_mask, normalize, arch)

    assert reason() is None
    assert reason(torch.float16) == "the dtype is torch.float16, not bf16" and reason(d=160) == "d > 128"
    assert reason(arch=architectures.ARCHITECTURES["sm_80"]) == "the architecture is sm_80, not sm_90"
    assert reason(normalize=True) == "`normalize`" and reason(d_mask=torch.ones(9, 300)) == "documents have a mask"
