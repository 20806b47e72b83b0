"""The Gluon kernels of soft MaxSim: against the formula in fp64, the forward bit for bit against the plain kernel."""

from functools import partial

import pytest
import torch

import lik_ops
from lik_ops import reference

from .support import INTERPRETING

if INTERPRETING:
    pytest.skip("the interpreter has no Gluon", allow_module_level=True)
pytest.importorskip("triton")

from lik_ops.gpu import gluon, soft_configs, soft_specialized

pytestmark = pytest.mark.gpu
# Queries, documents, tokens of each, features.
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
    if torch.cuda.get_device_capability() != (9, 0) or gluon.kernels() is None:
        pytest.skip("of sm_90, with a Triton that has the Gluon they are written in")


def tokens(sizes, dtype=torch.bfloat16):
    Nq, Nd, Lq, Ld, d = sizes
    return (torch.randn(n, L, d, device="cuda").to(dtype) for n, L in ((Nq, Lq), (Nd, Ld)))


def forward(Q, D, q_mask=None, w=None, tau=0.5):
    return torch.ops.lik.maxsim_soft_fwd(Q, D, q_mask, None, w, None, tau, False, True)


def without(monkeypatch):
    monkeypatch.setattr(soft_configs, "specialized", lambda *_: None)
    monkeypatch.setattr(soft_configs, "specialized_backward", lambda *_: None)


@pytest.fixture
def served(monkeypatch):
    """Which of the kernels served calls."""
    found = []

    def noted(name, function, *args):
        served = function(*args)
        found.append((name, served))
        return served

    for name in ("scored", "into_rows", "into_tokens"):
        monkeypatch.setattr(soft_specialized, name, partial(noted, name, getattr(soft_specialized, name)))
    return found


@at_sizes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [False, True])
def test_scores_have_the_bits_of_the_plain_kernel(sizes, dtype, options, served, monkeypatch):
    Q, D = tokens(sizes, dtype)
    Nq, _, Lq = sizes[:3]
    q_mask = torch.rand(Nq, Lq, device="cuda") > 0.3 if options else None
    w = torch.rand(Nq, Lq, device="cuda") if options else None
    if options:
        Q[~q_mask] = torch.nan
        D[1, -1], D[2, 0] = torch.inf, torch.nan
    scores, lse = forward(Q, D, q_mask, w)
    assert served == [("scored", True)]
    without(monkeypatch)
    expected, expected_lse = forward(Q, D, q_mask, w)
    torch.testing.assert_close(scores, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0, equal_nan=True)
    one, _ = forward(Q[-1:], D[-1:], *(None if x is None else x[-1:] for x in (q_mask, w)))
    assert torch.equal(one[0, 0], scores[-1, -1])


@at_sizes
@pytest.mark.parametrize("options", [False, True])
def test_gradients_are_those_of_the_formula(sizes, options, served):
    """`options`: weights, of which those of masked query tokens count for nothing in the gradient of Q."""
    Q, D = tokens(sizes)
    Nq, Nd, Lq = sizes[:3]
    w = torch.rand(Nq, Lq, device="cuda") if options else None
    upstream = torch.randn(Nq, Nd, device="cuda")
    leaves = [x.requires_grad_() for x in ((Q, D) if w is None else (Q, D, w))]
    grads = torch.autograd.grad(lik_ops.maxsim_soft(Q, D, 0.5, q_weight=w), leaves, upstream)
    assert served[-2:] == [("into_rows", True), ("into_tokens", True)]
    some = slice(0, 64)  # at a time: the formula has all similarities in memory
    expected = [torch.zeros(x.shape, dtype=torch.float64, device="cuda") for x in leaves]
    for i in range(Nq):
        q, w_i = (None if x is None else x[i : i + 1].detach().double().requires_grad_() for x in (Q, w))
        for k in range(0, Nd, some.stop):
            part = D[k : k + some.stop].detach().double().requires_grad_()
            wanted = [x for x in (q, part, w_i) if x is not None]
            scores = reference.maxsim_soft(q, part, 0.5, q_weight=w_i)
            found = torch.autograd.grad(scores, wanted, upstream[i : i + 1, k : k + some.stop].double())
            expected[0][i] += found[0][0]
            expected[1][k : k + some.stop] += found[1]
            if w is not None:
                expected[2][i] += found[2][0]
    for g, e in zip(grads, expected, strict=True):
        assert float((g.double() - e).norm() / e.norm()) < 8e-3


@at_sizes
def test_gradients_beside_those_of_the_plain_kernels(sizes, served, monkeypatch):
    """Masked query tokens hold NaN, and a document behind the others too; the same bits each time and of each batch."""
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
    assert served[-1] == ("into_rows", True)
    assert torch.equal(found, gradients()) and torch.equal(gradients(slice(1, 2))[0], found[1])
    assert not found[~q_mask].any()
    without(monkeypatch)
    expected = gradients().double()
    assert float((found.double() - expected).norm() / expected.norm()) < 8e-3


def test_a_token_behind_a_document_changes_nothing():
    """That of the next document, with which a last tile is read, may be NaN."""
    Q, D = tokens((64, 70, 32, 70, 128))
    D[1] = torch.nan
    upstream = torch.zeros(64, 70, device="cuda")
    upstream[:, 0] = 1
    Q.requires_grad_()
    one = lik_ops.maxsim_soft(Q, D[:1], 0.5)
    assert torch.equal(lik_ops.maxsim_soft(Q, D, 0.5)[:, :1], one)
    (grad,) = torch.autograd.grad(lik_ops.maxsim_soft(Q, D[:1], 0.5), Q, upstream[:, :1])
    assert bool(grad.isfinite().all())
