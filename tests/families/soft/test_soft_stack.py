"""Test soft MaxSim under torch.compile, torch.export, vmap, torch.func, autocast, and FLOP counting."""

import math

import pytest
import torch

import lik_ops
from lik_ops import reference

from ...support.stack import (
    Compilations,
    assert_autocast,
    assert_compiled_steps,
    assert_derives_no_further,
    assert_exported,
    assert_vmap_is_a_loop,
    at_devices,
    flops,
    losses,
)

Nq, K, Lq, Ld, d = 2, 4, 5, 6, 8


def inputs(device, candidates=False, options=True):
    Q, D = torch.randn(Nq, Lq, d), torch.randn(*((Nq, K) if candidates else (K,)), Ld, d)
    if not options:
        return [Q.to(device), D.to(device), None, None, None]
    masks = torch.rand(Q.shape[:-1]) > 0.3, torch.rand(D.shape[:-1]) > 0.3
    masks[1][..., 0] = True
    return [t.to(device) for t in (Q, D, *masks, torch.rand(Nq, Lq))]


def soft(Q, D, q_mask, d_mask, w, temperature=0.3):
    return lik_ops.maxsim_soft(Q, D, temperature, q_mask, d_mask, q_weight=w, normalize=True)


@at_devices
@pytest.mark.parametrize("candidates", [False, True])
def test_compiled_steps_equal_eager(device, candidates):
    args = inputs(device, candidates)
    assert_compiled_steps(soft, args, (*args, torch.tensor(0.3, device=device)))


def test_temperature_tensor_compiles_once():
    torch.compiler.reset()
    args, compilations = inputs("cpu", options=False), Compilations()
    compiled = torch.compile(soft, backend=compilations)
    for tau in (0.1, 0.2, 0.3, 0.4, 0.5):
        assert torch.equal(compiled(*args, tau), soft(*args, tau))
    tensors = torch.compile(soft, backend=compilations, fullgraph=True)
    before = compilations.count
    for tau in (0.1, 0.2, 0.3):
        tensors(*args, torch.tensor(tau))
    assert compilations.count == before + 1
    torch.compiler.reset()


class Scores(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.log_tau = torch.nn.Parameter(torch.tensor(-1.0))

    def forward(self, Q, D, d_mask):
        return lik_ops.maxsim_soft(Q, D, self.log_tau.exp(), d_mask=d_mask)


@pytest.mark.parametrize("strict", [False, True])
def test_exports_with_dynamic_sizes(strict):
    Q, D, _, d_mask, _ = inputs("cpu")
    others = torch.randn(3, 7, 12), torch.randn(6, 9, 12), torch.rand(6, 9) > 0.2
    assert_exported(Scores(), (Q, D, d_mask), others, "maxsim_soft_fwd", strict=strict)


@at_devices
@pytest.mark.parametrize("candidates", [False, True])
def test_vmap_matches_a_loop(device, candidates):
    Q, D, q_mask, d_mask, w = (
        torch.stack(x) for x in zip(*(inputs(device, candidates) for _ in range(3)), strict=True)
    )
    assert_vmap_is_a_loop(soft, (Q, D, q_mask, d_mask, w), (0,) * 5)
    assert_vmap_is_a_loop(soft, (Q, D[0], q_mask, d_mask[0], w), (0, None, 0, None, 0))
    taus = torch.tensor([0.2, 0.3, 0.4], device=device)
    assert_vmap_is_a_loop(lik_ops.maxsim_soft, (Q[0], D[0], taus), (None, None, 0))


def test_gradients_through_compiled_vmap_equal_eager():
    Q, D = torch.randn(2, 3, 5, 8, requires_grad=True), torch.randn(4, 9, 8)
    batched = torch.vmap(lambda q: lik_ops.maxsim_soft(q, D, 0.5))
    compiled = torch.compile(batched, backend="aot_eager", fullgraph=True)
    assert torch.equal(*(torch.autograd.grad(f(Q).sum(), Q)[0] for f in (compiled, batched)))


def test_unsupported_differentiation_raises():
    Q, D, *_ = inputs("cpu")
    assert_derives_no_further(lambda Q: lik_ops.maxsim_soft(Q, D, 0.3), Q, "maxsim_soft")


@at_devices
def test_autocast_casts_tokens_to_its_dtype(device):
    Q, D, *_ = inputs(device)
    assert_autocast(lambda Q, D: lik_ops.maxsim_soft(Q, D, 0.3), Q, D)


@at_devices
@pytest.mark.parametrize("candidates", [False, True])
def test_flops_count_the_matrix_products(device, candidates):
    Q, D, *_ = inputs(device, candidates, options=False)
    products = 2 * Nq * K * Lq * Ld * d
    assert flops(lambda Q, D: lik_ops.maxsim_soft(Q, D, 0.3), Q, D) == (products, 4 * products)


def test_lse_is_requested_only_for_backward():
    Q, D, *_ = inputs("cpu")
    tau = torch.tensor(0.3, requires_grad=True)
    calls = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "lik":
                calls.append(args[8])
            return func(*args, **(kwargs or {}))

    with Seen():
        lik_ops.maxsim_soft(Q, D, 0.3)
        lik_ops.maxsim_soft(Q, D, tau)
        lik_ops.maxsim_soft(Q.clone().requires_grad_(), D, 0.3)
        with torch.no_grad():
            lik_ops.maxsim_soft(Q.clone().requires_grad_(), D, tau)
    assert calls == [False, True, True, False]


@at_devices
def test_training_losses_match_reference(device):
    """Run 200 steps of a contrastive loss, including the temperature, and compare with the formula."""

    def train(score):
        torch.manual_seed(0)
        Q = torch.randn(6, 4, 16, device=device, requires_grad=True)
        D = torch.randn(6, 9, 16, device=device, requires_grad=True)
        log_tau = torch.tensor(-1.0, device=device, requires_grad=True)

        def loss():
            scores = score(Q, D, log_tau.exp(), normalize=True)
            return torch.nn.functional.cross_entropy(scores, torch.arange(6, device=device))

        return losses(loss, [Q, D, log_tau], lr=0.5, steps=200)

    found, expected = train(lik_ops.maxsim_soft), train(reference.maxsim_soft)
    assert found[-1] < found[0] - 0.5
    assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, expected, strict=True))
