"""Test the contrastive loss under torch.compile, torch.export, vmap, torch.func, autocast, FLOP counting, training."""

import math

import pytest
import torch
import torch.nn.functional as F

import lik_ops
from lik_ops import reference
from lik_ops.families.loss import ops as loss_ops
from lik_ops.ops.fast_path import eager

from ...support.stack import (
    Compilations,
    assert_autocast,
    assert_compiled_steps,
    assert_derives_no_further,
    assert_exported,
    assert_same,
    assert_vmap_is_a_loop,
    at_devices,
    flops,
    losses,
    step,
)

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


@at_devices
@pytest.mark.parametrize("candidates", [False, True])
def test_compiled_steps_equal_eager(device, candidates):
    args = inputs(device, candidates)
    assert_compiled_steps(loss_of, args, (*args, torch.tensor(0.3, device=device)))


def test_one_dynamic_compilation_serves_all_sizes():
    torch.compiler.reset()
    compilations = Compilations()
    compiled = torch.compile(lik_ops.maxsim_cross_entropy, backend=compilations, fullgraph=True, dynamic=True)
    for sizes in ((3, 4, 5, 6), (2, 9, 7, 3), (6, 6, 2, 8)):
        Q, D = torch.randn(sizes[0], sizes[2], d), torch.randn(sizes[1], sizes[3], d)
        assert torch.equal(compiled(Q, D), lik_ops.maxsim_cross_entropy(Q, D))
    assert compilations.count == 1


@pytest.mark.parametrize("strict", [False, True])
def test_exports_with_dynamic_sizes(strict):
    def function(Q, D, labels, d_mask):
        return lik_ops.maxsim_cross_entropy(Q, D, labels, d_mask=d_mask, temperature=0.5)

    Q, D, labels, _, d_mask, _ = inputs("cpu")
    others = torch.randn(4, 7, 12), torch.randn(6, 9, 12), torch.tensor([5, 0, -100, 3]), torch.rand(6, 9) > 0.2
    assert_exported(function, (Q, D, labels, d_mask), others, "maxsim_cross_entropy_fwd", strict=strict)


@at_devices
@pytest.mark.parametrize("candidates", [False, True])
def test_vmap_matches_a_loop(device, candidates):
    stacked = [torch.stack(x) for x in zip(*(inputs(device, candidates) for _ in range(3)), strict=True)]
    assert_vmap_is_a_loop(loss_of, stacked, (0,) * 6)
    Q, D, labels, q_mask, d_mask, w = stacked
    shared = Q, D[0], labels[0], q_mask, d_mask[0], w
    assert_vmap_is_a_loop(loss_of, shared, (0, None, None, 0, None, 0))


def test_batched_upstream_gradients():
    Q, D, labels, *options = inputs("cpu")
    Q.requires_grad_()
    losses = loss_of(Q, D, labels, *options, reduction="none")
    (found,) = torch.autograd.grad(losses, Q, torch.eye(Nq), is_grads_batched=True, retain_graph=True)
    for n, g in enumerate(found):
        assert torch.equal(g, torch.autograd.grad(losses[n], Q, retain_graph=True)[0])


def test_unsupported_differentiation_raises():
    Q, D, *_ = inputs("cpu")
    assert_derives_no_further(lambda Q: lik_ops.maxsim_cross_entropy(Q, D), Q, "maxsim_cross_entropy")


@at_devices
def test_autocast_casts_tokens_to_its_dtype(device):
    Q, D, labels, *_ = inputs(device)
    assert_autocast(lambda Q, D: lik_ops.maxsim_cross_entropy(Q, D, labels), Q, D)


@at_devices
@pytest.mark.parametrize("candidates", [False, True])
def test_flops_count_the_matrix_products(device, candidates):
    Q, D, labels, *_ = inputs(device, candidates, options=False)
    forward = 2 * Nq * K * Lq * Ld * d
    found = flops(lambda Q, D: lik_ops.maxsim_cross_entropy(Q, D, labels), Q, D)
    assert found == (forward, forward + 2 * 2 * Nq * K * Lq * d)


@at_devices
@pytest.mark.parametrize(
    ("learned", "cut"), [(False, False), (True, False), pytest.param(True, True, marks=pytest.mark.slow)]
)
def test_training_losses_match_reference(device, learned, cut, monkeypatch):
    """Run 200 steps in one part or many, with fixed or learned temperature, and compare with the full similarities."""
    if cut:
        monkeypatch.setattr(loss_ops, "_MAX_PART_BYTES", 3 * 9 * 16)  # three queries
        eager.clear_call_caches()

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
        parameters = [Q, D, *([log_tau] if learned else ())]
        return losses(lambda: loss_of(Q, D, log_tau.exp() if learned else 0.4, labels), parameters, lr=0.3, steps=200)

    found, expected = train(fused), train(formula)
    assert found[-1] < found[0] / 2
    assert all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) for a, b in zip(found, expected, strict=True))


@at_devices
def test_steps_are_deterministic(device):
    args = inputs(device)
    assert_same(step(loss_of, args), step(loss_of, args))


@pytest.mark.gpu
def test_step_does_not_synchronize_and_replays_in_a_graph():
    args = inputs("cuda")
    expected = step(loss_of, args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(loss_of, args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(loss_of, args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(loss_of, args)
    graph.replay()
    assert_same(captured, expected)


@pytest.mark.gpu
@pytest.mark.slow
def test_large_step_peaks_below_64_mib_beyond_gradients():
    """The argmax of 4,096 x 4,096 pairs would need 1 GiB, and the scores 64 MiB."""
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
