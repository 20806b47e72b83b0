"""Test masks and argmax with many features: the launch that finds an argmax, and the bits of the sm_90 kernel."""

import pytest
import torch

import lik_ops
from lik_ops import reference

from ....support.common import CUDA, INTERPRETER, INTERPRETING

pytest.importorskip("triton", reason="these are kernels in Triton")
from lik_ops.csrc_triton.common.primitives import UNRESOLVED
from lik_ops.csrc_triton.forward.generic import rescore
from lik_ops.gpu import generic_choices
from lik_ops.gpu.runtime import launcher
from lik_ops.gpu.runtime.arguments import architecture, make_document_args, make_query_args, make_size_args, use_device
from lik_ops.gpu.tuning import architectures

PLACES = [INTERPRETER] if INTERPRETING else [pytest.param(CUDA, marks=pytest.mark.gpu)]
BLOCK = 64


def run_resolve_argmax(Q, D, q_mask, d_mask, argmax, normalize):
    """Return the argmax after `maxsim_resolve_argmax`."""
    C = generic_choices.choose_generic(Q, D, normalize, True, architecture(Q.device)).launch.config
    C = C._replace(LONG_QUERIES=False, PERSISTENT=False, BN=16)
    args = make_query_args(Q, q_mask, None), make_document_args(D, d_mask), argmax, make_size_args(Q, D), Q.shape[-1]
    with use_device(Q.device):
        grid = (architectures.cdiv(argmax.numel(), BLOCK),)
        launcher.launch(rescore.maxsim_resolve_argmax, grid, (*args, BLOCK, C), {"num_warps": 4})
    return argmax


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("Lq", [5, 40])
def test_marked_argmax_is_resolved(Lq, normalize, place):
    torch.manual_seed(Lq)
    Nq, K, Ld, d = 2, 6, 21, 16
    Q, D = torch.randn(Nq, Lq, d), torch.randn(K, Ld, d)
    D[1, 3, 2], D[2, 5, 0] = float("nan"), float("inf")
    q_mask, d_mask = torch.rand(Nq, Lq) < 0.8, torch.rand(K, Ld) < 0.8
    d_mask[1, 3] = d_mask[2, 5] = True
    options = {"q_mask": q_mask, "d_mask": d_mask, "normalize": normalize}
    expected = reference.maxsim_with_argmax(Q.double(), D.double(), **options)[1].permute(1, 0, 2)
    marked = (torch.rand(K, Nq, Lq) < 0.3) & (expected >= 0)
    marked[1] = expected[1] >= 0
    found = torch.where(marked, UNRESOLVED.value, torch.arange(Lq) + 100).short()
    with place.use():
        argmax = run_resolve_argmax(
            *(x.to(place.device) for x in (Q, D, q_mask, d_mask, found.clone())), normalize
        ).cpu()
    assert torch.equal(argmax[marked].long(), expected[marked])
    rows = marked.view(K, Nq, -1).any(-1)  # rows of a block with a marked row are found again
    assert torch.equal(argmax[~rows], found[~rows])


SHAPES = [
    (4, 140, 32, 300, 320),
    (5, 150, 100, 130, 208),
    (3, 70, 1024, 257, 256),
    (129, 9, 20, 77, 1024),
    (32, 20, 33, 1030, 768),
    (64, 150, 8, 40, 144),
]


def draw(Nq, Nd, Lq, Ld, d, values):
    """Return tokens, masks with holes, and weights."""
    torch.manual_seed(d)
    Q, D = torch.randn(Nq, Lq, d), torch.randn(Nd, Ld, d)
    if values == "ties":
        Q, D = Q.round().clamp(-1, 1), D.round().clamp(-1, 1)
        D[:, 1::2] = D[:, ::2][:, : Ld // 2]
    elif values == "not finite":
        D[1, 3, 5], D[2, -1, 0], Q[1, 1, 1], D[3] = float("inf"), float("nan"), -float("inf"), -float("inf")
    q_mask, d_mask, q_weight = torch.rand(Nq, Lq) < 0.8, torch.rand(Nd, Ld) < 0.7, torch.rand(Nq, Lq)
    q_mask[0], d_mask[4], d_mask[5, 1:] = False, False, False
    d_mask[2, -1] = True
    D[6][~d_mask[6]] = float("nan")
    return Q, D, q_mask, d_mask, q_weight


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("Nq", "Nd", "Lq", "Ld", "d"), SHAPES)
def test_bits_match_generic_kernel(Nq, Nd, Lq, Ld, d, normalize, dtype, force_kernel):
    """One test runs all values, because compilation takes most of its time."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of the sm_90 kernels")
    for values in ("normal", "ties", "not finite"):
        Q, D, q_mask, d_mask, q_weight = (x.cuda() for x in draw(Nq, Nd, Lq, Ld, d, values))
        Q, D = Q.to(dtype), D.to(dtype)
        plain = torch.where(d_mask[..., None], D, torch.zeros((), dtype=dtype, device="cuda"))
        options = {"q_mask": q_mask, "d_mask": d_mask, "q_weight": q_weight, "normalize": normalize}
        found = {}
        for kernel in ("generic", "sm90"):
            force_kernel(kernel)
            found[kernel] = {
                "masks": (lik_ops.maxsim(Q, D, **options),),
                "masks, argmax": lik_ops.maxsim_with_argmax(Q, D, **options),
                "argmax": lik_ops.maxsim_with_argmax(Q, plain, normalize=normalize),
            }
        for name, expected in found["generic"].items():
            of = f"{values}, {name}"
            torch.testing.assert_close(
                found["sm90"][name], expected, rtol=0, atol=0, equal_nan=True, msg=lambda text, of=of: f"{of}: {text}"
            )
