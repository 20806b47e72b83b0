"""Test the Gluon kernels of soft gradients against the fp64 formula and the generic kernels."""

from functools import partial

import pytest
import torch

import lik_ops
from lik_ops import reference

from ...support.common import INTERPRETING

if INTERPRETING:
    pytest.skip("the interpreter has no Gluon", allow_module_level=True)
pytest.importorskip("triton")

from lik_ops.families.soft import gpu_sm90 as soft_sm90
from lik_ops.gpu.runtime import gluon

pytestmark = pytest.mark.gpu
# Numbers of queries and documents, of their tokens, and of features.
SIZES = [
    (70, 66, 32, 300, 128),
    (64, 70, 5, 64, 64),
    (33, 80, 32, 7, 128),
    (9, 140, 40, 129, 96),
    (7, 90, 300, 190, 128),
    (3, 70, 1024, 1024, 128),
    (256, 3, 32, 1030, 32),
]
at_sizes = pytest.mark.parametrize("sizes", SIZES, ids=str)


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0) or gluon.load_kernels() is None:
        pytest.skip("of sm_90, with a Triton that has the Gluon they are written in")


def tokens(sizes, dtype=torch.bfloat16):
    Nq, Nd, Lq, Ld, d = sizes
    return (torch.randn(n, L, d, device="cuda").to(dtype) for n, L in ((Nq, Lq), (Nd, Ld)))


def force_generic_kernel(monkeypatch):
    monkeypatch.setattr(soft_sm90, "get_forced_kernel", lambda: "generic")


@pytest.fixture
def served(monkeypatch):
    """Record which kernels served the calls."""
    monkeypatch.setenv("LIK_OPS_REHEARSAL", "0")
    found = []

    def noted(name, function, *args):
        served = function(*args)
        found.append((name, served))
        return served

    for name in ("try_sum_rows", "try_sum_tokens"):
        monkeypatch.setattr(soft_sm90, name, partial(noted, name, getattr(soft_sm90, name)))
    return found


@at_sizes
@pytest.mark.parametrize("options", [False, True])
def test_gradients_match_reference(sizes, options, served):
    """With `options` there are weights."""
    Q, D = tokens(sizes)
    Nq, Nd, Lq = sizes[:3]
    w = torch.rand(Nq, Lq, device="cuda") if options else None
    upstream = torch.randn(Nq, Nd, device="cuda")
    leaves = [x.requires_grad_() for x in ((Q, D) if w is None else (Q, D, w))]
    grads = torch.autograd.grad(lik_ops.maxsim_soft(Q, D, 0.5, q_weight=w), leaves, upstream)
    assert served[-2:] == [("try_sum_rows", True), ("try_sum_tokens", True)]
    step = max(1, 2**26 // (Nd * Lq * D.shape[1]))  # queries per step, because the formula stores all similarities
    expected = [torch.zeros(x.shape, dtype=torch.float64, device="cuda") for x in leaves]
    d = D.detach().double().requires_grad_()
    for i in range(0, Nq, step):
        own = slice(i, i + step)
        q, w_own = (None if x is None else x[own].detach().double().requires_grad_() for x in (Q, w))
        wanted = [x for x in (q, d, w_own) if x is not None]
        found = torch.autograd.grad(reference.maxsim_soft(q, d, 0.5, q_weight=w_own), wanted, upstream[own].double())
        expected[0][own], expected[1] = found[0], expected[1] + found[1]
        if w is not None:
            expected[2][own] = found[2]
    for g, e in zip(grads, expected, strict=True):
        assert float((g.double() - e).norm() / e.norm()) < 8e-3


@at_sizes
def test_gradients_match_generic_kernels(sizes, served, monkeypatch):
    """Masked query tokens and a document behind the others are NaN. Bits are equal in each run and batch."""
    Q, D = tokens(sizes)
    Nq, Nd, Lq, _, _ = sizes
    q_mask = torch.rand(Nq, Lq, device="cuda") > 0.3
    Q[~q_mask] = torch.nan
    upstream = torch.randn(Nq, Nd, device="cuda")

    def gradients(own=slice(None)):
        q = Q[own].detach().requires_grad_()
        scores = lik_ops.maxsim_soft(q, D, 0.5, q_mask[own])
        return torch.autograd.grad(scores, q, upstream[own])[0]

    found = gradients()
    assert served[-1] == ("try_sum_rows", True)
    assert torch.equal(found, gradients()) and torch.equal(gradients(slice(1, 2))[0], found[1])
    assert not found[~q_mask].any()
    force_generic_kernel(monkeypatch)
    expected = gradients().double()
    assert float((found.double() - expected).norm() / expected.norm()) < 8e-3


def test_nan_in_the_next_document_does_not_leak():
    """A last tile also reads the next document, whose first token may be NaN."""
    Q, D = tokens((64, 70, 32, 70, 128))
    D[1] = torch.nan
    upstream = torch.zeros(64, 70, device="cuda")
    upstream[:, 0] = 1
    Q.requires_grad_()
    one = lik_ops.maxsim_soft(Q, D[:1], 0.5)
    assert torch.equal(lik_ops.maxsim_soft(Q, D, 0.5)[:, :1], one)
    (grad,) = torch.autograd.grad(lik_ops.maxsim_soft(Q, D[:1], 0.5), Q, upstream[:, :1])
    assert bool(grad.isfinite().all())
