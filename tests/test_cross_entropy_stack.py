"""The contrastive loss under torch.compile, torch.export, vmap, torch.func, autocast and FLOP counting; training."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

import lik_ops
from lik_ops import reference
from lik_ops.ops import cross_entropy, eager

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
at_devices = pytest.mark.parametrize("device", DEVICES)
Nq, K, Lq, Ld, d = 3, 4, 5, 6, 8


def inputs(device, candidates=False, options=True):
    Q, D = torch.randn(Nq, Lq, d), torch.randn(*((Nq, K) if candidates else (K,)), Ld, d)
    labels = torch.tensor([2, -100, 0]).to(device)
    if not options:
        return [Q.to(device), D.to(device), labels, None, None, None]
    masks = torch.rand(Q.shape[:-1]) > 0.3, torch.rand(D.shape[:-1]) > 0.3
    masks[1][..., 0] = True
    return [Q.to(device), D.to(device), labels, *(t.to(device) for t in (*masks, torch.rand(Nq, Lq)))]


def loss_of(Q, D, labels, q_mask, d_mask, w, temperature=0.3, reduction="mean"):
    options = {"temperature": temperature, "reduction": reduction, "normalize": True}
    return lik_ops.maxsim_cross_entropy(Q, D, labels, q_mask, d_mask, q_weight=w, **options)


def gradients(function, args, *more):
    leaves = [t.detach().requires_grad_() for t in (args[0], args[1], args[5], *more)]
    loss = function(leaves[0], leaves[1], *args[2:5], leaves[2], *leaves[3:])
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@at_devices
@pytest.mark.parametrize("candidates", [False, True])
def test_compiled_steps_have_the_bits_of_eager_ones(device, candidates):
    torch.compiler.reset()
    args, tau = inputs(device, candidates), torch.tensor(0.3, device=device)
    for more in ((), (tau,)):
        compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
        for found, e in zip(gradients(compiled, args, *more), gradients(loss_of, args, *more), strict=True):
            assert torch.equal(found, e)


def test_one_dynamic_compilation_serves_all_sizes():
    torch.compiler.reset()
    compilations = 0

    def backend(module, example_inputs):
        nonlocal compilations
        compilations += 1
        return module.forward

    compiled = torch.compile(lik_ops.maxsim_cross_entropy, backend=backend, fullgraph=True, dynamic=True)
    for sizes in ((3, 4, 5, 6), (2, 9, 7, 3), (6, 6, 2, 8)):
        Q, D = torch.randn(sizes[0], sizes[2], d), torch.randn(sizes[1], sizes[3], d)
        assert torch.equal(compiled(Q, D), lik_ops.maxsim_cross_entropy(Q, D))
    assert compilations == 1


class Loss(torch.nn.Module):
    def forward(self, Q, D, labels, d_mask):
        return lik_ops.maxsim_cross_entropy(Q, D, labels, d_mask=d_mask, temperature=0.5)


@pytest.mark.parametrize("strict", [False, True])
def test_it_exports_with_every_size_dynamic(strict):
    Q, D, labels, _, d_mask, _ = inputs("cpu")
    names = [torch.export.Dim.DYNAMIC] * 3
    shapes = {"Q": names, "D": names, "labels": names[:1], "d_mask": names[:2]}
    program = torch.export.export(Loss(), (Q, D, labels, d_mask), dynamic_shapes=shapes, strict=strict)
    targets = [str(node.target) for node in program.graph.nodes if "lik" in str(node.target)]
    assert targets == ["lik.maxsim_cross_entropy_fwd.default"]
    args = torch.randn(4, 7, 12), torch.randn(6, 9, 12), torch.tensor([5, 0, -100, 3]), torch.rand(6, 9) > 0.2
    assert torch.equal(program.module()(*args), Loss()(*args))


@at_devices
@pytest.mark.parametrize("candidates", [False, True])
def test_vmap_is_a_loop(device, candidates):
    stacked = [torch.stack(x) for x in zip(*(inputs(device, candidates) for _ in range(3)), strict=True)]
    expected = torch.stack([loss_of(*x) for x in zip(*stacked, strict=True)])
    assert torch.equal(vmap(loss_of)(*stacked), expected)
    Q, D, labels, q_mask, d_mask, w = stacked
    shared = vmap(loss_of, in_dims=(0, None, None, 0, None, 0))(Q, D[0], labels[0], q_mask, d_mask[0], w)
    assert torch.equal(shared[1], loss_of(Q[1], D[0], labels[0], q_mask[1], d_mask[0], w[1]))


def test_batched_upstream_gradients():
    Q, D, labels, *options = inputs("cpu")
    Q.requires_grad_()
    losses = loss_of(Q, D, labels, *options, reduction="none")
    (found,) = torch.autograd.grad(losses, Q, torch.eye(Nq), is_grads_batched=True, retain_graph=True)
    for n, g in enumerate(found):
        assert torch.equal(g, torch.autograd.grad(losses[n], Q, retain_graph=True)[0])


def test_what_it_cannot_derive_raises():
    Q, D, *_ = inputs("cpu")
    with pytest.raises(NotImplementedError, match=r"torch\.func cannot differentiate maxsim_cross_entropy"):
        grad(lambda Q: lik_ops.maxsim_cross_entropy(Q, D))(Q)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        jvp(lambda Q: lik_ops.maxsim_cross_entropy(Q, D), (Q,), (Q,))
    leaf = Q.detach().requires_grad_()
    (first,) = torch.autograd.grad(lik_ops.maxsim_cross_entropy(leaf, D), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward"):
        first.sum().backward()


@at_devices
def test_autocast_multiplies_in_its_dtype(device):
    Q, D, labels, *_ = inputs(device)
    Q.requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        found = lik_ops.maxsim_cross_entropy(Q, D, labels)
        (of_Q,) = torch.autograd.grad(found, Q)
    half = Q.detach().bfloat16().requires_grad_()
    expected = lik_ops.maxsim_cross_entropy(half, D.bfloat16(), labels)
    assert found.dtype == torch.float32 and torch.equal(found, expected)
    assert torch.equal(of_Q, torch.autograd.grad(expected, half)[0].float())


@at_devices
@pytest.mark.parametrize("candidates", [False, True])
def test_flops_are_those_of_its_products(device, candidates):
    Q, D, labels, *_ = inputs(device, candidates, options=False)
    with FlopCounterMode(display=False) as counter:
        loss = lik_ops.maxsim_cross_entropy(Q.requires_grad_(), D.requires_grad_(), labels)
        forward = counter.get_total_flops()
        loss.backward()
    rows = Nq * K * Lq
    assert forward == 2 * rows * Ld * d
    assert counter.get_total_flops() == 2 * forward + 2 * 2 * rows * d


@at_devices
@pytest.mark.parametrize(
    ("learned", "cut"), [(False, False), (True, False), pytest.param(True, True, marks=pytest.mark.slow)]
)
def test_training_goes_as_with_the_formula(device, learned, cut, monkeypatch):
    """200 steps, of one part or of many, with a learned temperature or not, beside the same of all similarities."""
    if cut:
        monkeypatch.setattr(cross_entropy, "_PART_BYTES", 3 * 9 * 16)  # of three queries
        eager.forget()

    def fused(Q, D, tau, labels):
        return lik_ops.maxsim_cross_entropy(Q, D, labels, temperature=tau, normalize=True)

    def formula(Q, D, tau, labels):
        return F.cross_entropy(reference.maxsim(Q, D, normalize=True) / tau, labels)

    def train(loss_of):
        torch.manual_seed(0)
        Q = torch.randn(6, 4, 16).to(device).requires_grad_()
        D = torch.randn(9, 9, 16).to(device).requires_grad_()
        log_tau = torch.tensor(-1.0, device=device, requires_grad=learned)
        labels = torch.tensor([3, 0, 8, -100, 1, 3], device=device)
        optimizer, losses = torch.optim.SGD([Q, D, *([log_tau] if learned else ())], lr=0.3), []
        for _ in range(200):
            loss = loss_of(Q, D, log_tau.exp() if learned else 0.4, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    found, expected = train(fused), train(formula)
    assert found[-1] < found[0] / 2
    assert all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) for a, b in zip(found, expected, strict=True))


@at_devices
def test_steps_have_the_same_bits_each_time(device):
    args = inputs(device)
    first, again = gradients(loss_of, args), gradients(loss_of, args)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
def test_a_step_waits_for_nothing_and_is_captured():
    args = inputs("cuda")
    expected = gradients(loss_of, args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(loss_of, args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(loss_of, args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(loss_of, args)
    graph.replay()
    for a, e in zip(captured, expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_large_step_takes_little_beyond_its_gradients():
    """Winners of 4,096 x 4,096 would take 1 GiB, scores 64 MiB."""
    n = 4096
    Q = torch.randn(n, 32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    D = torch.randn(n, 180, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.arange(n, device="cuda")

    def step():
        return torch.autograd.grad(lik_ops.maxsim_cross_entropy(Q, D, labels, temperature=10), (Q, D))

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = step()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < sum(g.nbytes for g in grads) + 64 * 2**20
