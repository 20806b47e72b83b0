"""Test that the launches after sm_90 kernels compile without a GPU, with the configurations that plans use."""

from dataclasses import replace

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lik_ops.csrc_triton.common.arguments import SizeArgs
from lik_ops.csrc_triton.forward.generic import rescore
from lik_ops.gpu.forward import sm90_dense
from lik_ops.gpu.tuning import architectures

from ..support.aot import Case, _documents, _queries
from ..support.machine_code import compile_as_launched

SM_90 = replace(architectures.ARCHITECTURES["sm_90"], processors=132)


def make_source(kernel, dtype, d, options, config, names):
    """Return the source of a kernel whose arguments begin with `Q` and `D`, and end with `BLOCK` and `C`."""
    queries, constants = _queries(Case("maxsim_forward", dtype, d, options=options))
    documents, more = _documents(Case("maxsim_forward", dtype, d, options=options))
    signature = {"Q": queries, "D": documents, **names, "BLOCK": "constexpr", "C": "constexpr"}
    values = {(0, k): v for k, v in constants.items()} | {(1, k): v for k, v in more.items()}
    values |= {(n,): None for n, kind in enumerate(names.values(), 2) if kind == "constexpr"}
    values |= {(len(signature) - 2,): 1024, (len(signature) - 1,): config}
    attributes = {(n, 0): [["tt.divisibility", 16]] for n in range(2)}
    return ASTSource(kernel, signature, values, attributes)


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize(("Lq", "d", "rows"), [(32, 128, 32), (5, 64, 8), (1024, 128, 128)])
@pytest.mark.parametrize("options", [False, True])
def test_rescoring_compiles(Lq, d, rows, options, terms, monkeypatch):
    monkeypatch.setattr(sm90_dense, "architecture", lambda device: SM_90)
    monkeypatch.setattr(sm90_dense.generic_choices, "is_tf32_allowed", lambda dtype: terms == 1)
    Q, D = torch.empty(64, Lq, d, device="meta"), torch.empty(64, 300, d, device="meta")
    config, launch = sm90_dense._configure_second_launch(Q, D, False, options, rows)
    assert terms == config.FP32_TERMS and rows == config.ROWS_PER_QUERY
    argmax = "*i16" if options else "constexpr"
    names = {"scores": "*fp32", "argmax": argmax, "sizes": SizeArgs(*["i32"] * 4), "d": "i32", "parts": "i32"}
    source = make_source(rescore.maxsim_rescore, torch.float32, d, options, config, names)
    compile_as_launched(source, GPUTarget("cuda", 90, 32), launch)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("Lq", "d"), [(32, 320), (1024, 1024), (5, 208)])
@pytest.mark.parametrize("options", [False, True])
def test_resolving_an_argmax_compiles(Lq, d, options, normalize, monkeypatch):
    monkeypatch.setattr(sm90_dense, "architecture", lambda device: SM_90)
    Q, D = (torch.empty(64, L, d, dtype=torch.bfloat16, device="meta") for L in (Lq, 300))
    config, launch = sm90_dense._configure_second_launch(Q, D, normalize, True, None)
    names = {"argmax": "*i16", "sizes": SizeArgs(*["i32"] * 4), "d": "i32"}
    source = make_source(rescore.maxsim_resolve_argmax, torch.bfloat16, d, options, config, names)
    compile_as_launched(source, GPUTarget("cuda", 90, 32), launch)
