"""Test the launch that rotates few query rows against the rotation of PyTorch."""

import pytest
import torch
from triton.compiler import ASTSource

import lik_ops
from lik_ops.csrc_triton.common.arguments import QueryArgs
from lik_ops.csrc_triton.formats.rotation import maxsim_rotate_queries
from lik_ops.formats.rotation import rotate
from lik_ops.gpu.forward import query_rotation
from lik_ops.gpu.tuning.architectures import ARCHITECTURES

from ...support.common import CUDA, INTERPRETER, INTERPRETING
from ...support.machine_code import compile_as_launched, cuda_resources, target

PLACES = [INTERPRETER] if INTERPRETING else [pytest.param(CUDA, marks=pytest.mark.gpu)]
SHAPES = [(1, 32, 128), (3, 7, 64), (5, 100), (2, 3, 20), (1, 1, 300)]
SHAPES += [] if INTERPRETING else [(8, 32, 128)]  # enough features to notice another rounding
at_places = pytest.mark.parametrize("place", PLACES, ids=str)


@at_places
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotated_rows_are_the_rows_that_pytorch_rotates(place, shape):
    torch.manual_seed(0)
    stored = lik_ops.quantize(torch.randn(4, shape[-1]), "rq4").to(place.device).to_flat_encoded()
    for dtype in place.dtypes:
        for strides in ("contiguous", "sliced"):
            Q = torch.randn(*shape[:-1], 2 * shape[-1], device=place.device).to(dtype)
            Q = Q[..., ::2] if strides == "sliced" else Q[..., : shape[-1]].contiguous()
            with place.use():
                for _ in range(3):  # the second call is captured, the third is a replay
                    found = query_rotation.transform_queries(stored, Q)
                    assert found.dtype == dtype and found.shape == Q.shape
                    # The sums of fp64 are in another order, which shows where they cancel.
                    torch.testing.assert_close(found, rotate(Q), rtol=0, atol=1e-14)


@at_places
def test_features_more_than_2_31_elements_apart(place):
    """Only the pages of 64 features are touched, so the tensor needs little memory on the CPU."""
    stored, stride = lik_ops.quantize(torch.randn(4, 64), "rq4").to(place.device).to_flat_encoded(), 2**31 // 63 + 1
    storage = torch.empty(63 * stride + 5, dtype=torch.float16, device=place.device)
    Q = storage.as_strided((1, 5, 64), (5, 1, stride)).copy_(torch.randn(1, 5, 64))
    with place.use():
        found = query_rotation.transform_queries(stored, Q)
    torch.testing.assert_close(found, rotate(Q.contiguous()), rtol=0, atol=1e-14)


@at_places
def test_nan_and_infinity_stay_in_their_row(place):
    stored = lik_ops.quantize(torch.randn(4, 64), "rq2").to(place.device).to_flat_encoded()
    Q = torch.randn(1, 5, 64, device=place.device)
    Q[0, 1, 3], Q[0, 3, 7] = float("nan"), float("inf")
    with place.use():
        found = query_rotation.transform_queries(stored, Q)
    assert found[0, 1].isnan().all() and not found[0, 3].isfinite().any()
    assert torch.equal(found[0, [0, 2, 4]], query_rotation.transform_queries(stored, Q[:, [0, 2, 4]])[0])


def test_other_formats_and_many_rows_use_pytorch(monkeypatch):
    monkeypatch.setattr(query_rotation.launcher, "launch", None)
    Q = torch.randn(2, 3, 16)
    stored = lik_ops.quantize(torch.randn(4, 16), "int8").to_flat_encoded()
    assert query_rotation.transform_queries(stored, Q) is Q
    many, rotated = torch.randn(1, 300, 16), lik_ops.quantize(torch.randn(4, 16), "rq1").to_flat_encoded()
    assert torch.equal(query_rotation.transform_queries(rotated, many), rotate(many))


@pytest.mark.skipif(INTERPRETING, reason="nothing is compiled")
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernel_compiles_without_spills(name, dtype):
    arch, pointer = ARCHITECTURES[name], "*" + dtype
    queries = QueryArgs(pointer, "i32", "i32", "constexpr", *["constexpr"] * 6)
    types = {"Q": queries, "matrix": "*fp64", "out": pointer} | dict.fromkeys(("rows", "Lq", "d"), "i32")
    types |= dict.fromkeys(("BM", "BN", "BK"), "constexpr")
    blocks = query_rotation._ROWS, query_rotation._COLUMNS, query_rotation._STEP
    constants = {(0, 3): 1} | {(0, n): None for n in range(4, 10)} | {(6 + n,): size for n, size in enumerate(blocks)}
    attributes = {path: [["tt.divisibility", 16]] for path in ((0, 0), (1,), (2,), (5,))}
    source = ASTSource(maxsim_rotate_queries, types, constants, attributes)
    compiled = compile_as_launched(source, target(arch), {"num_warps": 4})
    if not arch.is_amd:
        assert cuda_resources(compiled.asm["cubin"])[1] == 0
