"""Soft MaxSim under torch.compile, torch.export, vmap, torch.func, autocast and FLOP counting."""

import math

import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

import lik_ops
from lik_ops import reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
at_devices = pytest.mark.parametrize("device", DEVICES)
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


def gradients(function, args, *more):
    leaves = [t.detach().requires_grad_() for t in (args[0], args[1], args[4], *more)]
    function(leaves[0], leaves[1], args[2], args[3], leaves[2], *leaves[3:]).square().sum().backward()
    return [t.grad for t in leaves]


@at_devices
@pytest.mark.parametrize("candidates", [False, True])
def test_compiled_steps_have_the_bits_of_eager_ones(device, candidates):
    torch.compiler.reset()
    args, tau = inputs(device, candidates), torch.tensor(0.3, device=device)
    for more in ((), (tau,)):
        compiled = torch.compile(soft, fullgraph=True, backend="aot_eager")
        expected = gradients(soft, args, *more)
        for found, e in zip(gradients(compiled, args, *more), expected, strict=True):
            assert torch.equal(found, e)


def test_temperatures_do_not_compile_anew_without_end():
    torch.compiler.reset()
    args, compilations = inputs("cpu", options=False), 0

    def backend(module, example_inputs):
        nonlocal compilations
        compilations += 1
        return module.forward

    compiled = torch.compile(soft, backend=backend)
    for tau in (0.1, 0.2, 0.3, 0.4, 0.5):
        assert torch.equal(compiled(*args, tau), soft(*args, tau))
    tensors = torch.compile(soft, backend=backend, fullgraph=True)
    before = compilations
    for tau in (0.1, 0.2, 0.3):
        tensors(*args, torch.tensor(tau))
    assert compilations == before + 1
    torch.compiler.reset()


class Scores(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.log_tau = torch.nn.Parameter(torch.tensor(-1.0))

    def forward(self, Q, D, d_mask):
        return lik_ops.maxsim_soft(Q, D, self.log_tau.exp(), d_mask=d_mask)


@pytest.mark.parametrize("strict", [False, True])
def test_it_exports_with_every_size_dynamic(strict):
    from torch.export import Dim

    Q, D, _, d_mask, _ = inputs("cpu")
    names = [Dim.DYNAMIC] * 3
    shapes = {"Q": dict(enumerate(names)), "D": dict(enumerate(names)), "d_mask": dict(enumerate(names[:2]))}
    module = Scores()
    program = torch.export.export(module, (Q, D, d_mask), dynamic_shapes=shapes, strict=strict)
    targets = [str(node.target) for node in program.graph.nodes if "lik" in str(node.target)]
    assert targets == ["lik.maxsim_soft_fwd.default"]
    Q, D, d_mask = torch.randn(3, 7, 12), torch.randn(6, 9, 12), torch.rand(6, 9) > 0.2
    assert torch.equal(program.module()(Q, D, d_mask), module(Q, D, d_mask))


@at_devices
@pytest.mark.parametrize("candidates", [False, True])
def test_vmap_is_a_loop(device, candidates):
    Q, D, q_mask, d_mask, w = (
        torch.stack(x) for x in zip(*(inputs(device, candidates) for _ in range(3)), strict=True)
    )
    expected = torch.stack([soft(*x) for x in zip(Q, D, q_mask, d_mask, w, strict=True)])
    assert torch.equal(vmap(soft)(Q, D, q_mask, d_mask, w), expected)
    shared = vmap(soft, in_dims=(0, None, 0, None, 0))(Q, D[0], q_mask, d_mask[0], w)
    assert torch.equal(shared[1], soft(Q[1], D[0], q_mask[1], d_mask[0], w[1]))
    taus = torch.tensor([0.2, 0.3, 0.4], device=device)
    found = vmap(lambda tau: lik_ops.maxsim_soft(Q[0], D[0], tau))(taus)
    assert torch.equal(found, torch.stack([lik_ops.maxsim_soft(Q[0], D[0], t) for t in taus]))


def test_what_it_cannot_derive_raises():
    Q, D, *_ = inputs("cpu")
    with pytest.raises(NotImplementedError, match=r"torch\.func cannot differentiate maxsim_soft"):
        grad(lambda Q: lik_ops.maxsim_soft(Q, D, 0.3).sum())(Q)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        jvp(lambda Q: lik_ops.maxsim_soft(Q, D, 0.3), (Q,), (Q,))
    leaf = Q.detach().requires_grad_()
    (first,) = torch.autograd.grad(lik_ops.maxsim_soft(leaf, D, 0.3).sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward"):
        first.sum().backward()


@at_devices
def test_autocast_multiplies_in_its_dtype(device):
    Q, D, *_ = inputs(device)
    with torch.autocast(device, torch.bfloat16):
        found = lik_ops.maxsim_soft(Q, D, 0.3)
    assert found.dtype == torch.float32
    assert torch.equal(found, lik_ops.maxsim_soft(Q.bfloat16(), D.bfloat16(), 0.3))


@at_devices
@pytest.mark.parametrize("candidates", [False, True])
def test_flops_are_those_of_its_products(device, candidates):
    Q, D, *_ = (None if t is None else t.requires_grad_() for t in inputs(device, candidates, options=False))
    with FlopCounterMode(display=False) as counter:
        scores = lik_ops.maxsim_soft(Q, D, 0.3)
        forward = counter.get_total_flops()
        scores.sum().backward()
    assert forward == 2 * Nq * K * Lq * Ld * d
    assert counter.get_total_flops() == 5 * forward


def test_nothing_is_kept_without_a_gradient():
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
def test_training_goes_as_with_the_formula(device):
    """200 steps of a contrastive loss, temperature included, beside the same with the formula."""

    def train(score):
        torch.manual_seed(0)
        Q = torch.randn(6, 4, 16, device=device, requires_grad=True)
        D = torch.randn(6, 9, 16, device=device, requires_grad=True)
        log_tau = torch.tensor(-1.0, device=device, requires_grad=True)
        optimizer, losses = torch.optim.SGD([Q, D, log_tau], lr=0.5), []
        for _ in range(200):
            scores = score(Q, D, log_tau.exp(), normalize=True)
            loss = torch.nn.functional.cross_entropy(scores, torch.arange(6, device=device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return losses

    found, expected = train(lik_ops.maxsim_soft), train(reference.maxsim_soft)
    assert found[-1] < found[0] - 0.5
    assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, expected, strict=True))
