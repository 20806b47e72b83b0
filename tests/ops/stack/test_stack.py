"""Test the rest of torch around the operators: FLOP counts, checkpoints, pickles, threads, subclasses, determinism."""

import copy
import functools
import io
import pickle
import threading

import pytest
import torch
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import lik_ops

from ...support.common import INTERPRETING

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Nq, K, Lq, Ld, d = 2, 5, 3, 7, 8


def inputs(device="cpu", grad=False):
    Q, D = torch.randn(Nq, Lq, d, device=device), torch.randn(K, Ld, d, device=device)
    return Q.requires_grad_(grad), D.requires_grad_(grad)


def flops(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


FORWARD, WINNERS = 2 * Nq * K * Lq * Ld * d, 2 * Nq * K * Lq * d


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_flops_of_the_forward(device):
    Q, D = inputs(device)
    assert flops(lambda: lik_ops.maxsim(Q, D)) == FORWARD
    assert flops(lambda: torch.ops.lik.maxsim(Q[0], D)) == FORWARD // Nq
    candidates = D.expand(Nq, -1, -1, -1)
    assert flops(lambda: lik_ops.maxsim_with_argmax(Q, candidates)) == FORWARD
    assert flops(lambda: lik_ops.maxsim_pairs(Q, D[:Nq])) == FORWARD // K


@pytest.mark.parametrize("backward", ["lowmem", "unified"])
def test_backward_flops_count_only_argmax_pairs(backward):
    Q, D = inputs(grad=True)
    w = torch.rand(Nq, Lq, requires_grad=True)
    for leaves, products in (((Q, D), 2), ((Q,), 1), ((D,), 1), ((w,), 1), ((Q, D, w), 2)):
        for recompute in (False, True):
            q, x, v = (t if any(t is leaf for leaf in leaves) else t.detach() for t in (Q, D, w))
            scores = lik_ops.maxsim(q, x, q_weight=v, backward=backward, recompute=recompute)
            counted = flops(lambda s=scores, ts=leaves: torch.autograd.grad(s.sum(), ts))
            assert counted == products * WINNERS + recompute * FORWARD


def test_flops_match_the_equivalent_matmul():
    Q, D = inputs()
    assert flops(lambda: lik_ops.maxsim(Q, D)) == flops(lambda: Q.reshape(-1, d) @ D.reshape(-1, d).mT)


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_checkpoint_policy_can_keep_the_scores():
    """A checkpoint runs the forward twice, or once if it must save ``maxsim_fwd``."""
    Q, D = inputs(grad=True)

    def block(q, x):
        return (lik_ops.maxsim(torch.sin(q), x) * 2).sum()

    def policy(ctx, op, *args, **kwargs):
        keep = op == torch.ops.lik.maxsim_fwd.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    expected = torch.autograd.grad(block(Q, D), (Q, D))
    for options, times in (({}, 2), ({"context_fn": lambda: create_selective_checkpoint_contexts(policy)}, 1)):
        with Calls() as calls:
            grads = torch.autograd.grad(checkpoint(block, Q, D, use_reentrant=False, **options), (Q, D))
        assert calls.names.count("lik.maxsim_fwd.default") == times
        for a, e in zip(grads, expected, strict=True):
            assert torch.equal(a, e)


def test_compiled_checkpoint_policy_can_keep_the_scores():
    Q, D = inputs(grad=True)

    def policy(ctx, op, *args, **kwargs):
        keep = op == torch.ops.lik.maxsim_fwd.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    context = functools.partial(create_selective_checkpoint_contexts, policy)

    def step(q, x):
        return checkpoint(lambda a, b: lik_ops.maxsim(a.sin(), b).sum(), q, x, use_reentrant=False, context_fn=context)

    backend = AotEagerAndRecordGraphs()
    torch.compile(step, backend=backend, fullgraph=True)(Q, D).backward()
    backward_graph = [str(n.target) for n in backend.bw_graphs[0].graph.nodes]
    assert "aten.sin.default" in backward_graph  # the rest is computed again
    assert "lik.maxsim_bwd_lowmem.default" in backward_graph and "lik.maxsim_fwd.default" not in backward_graph


def test_modules_are_pickled_copied_and_saved():
    Q, D = inputs()
    scorer = lik_ops.MaxSimScorer(normalize=True, backward="lowmem", recompute=True)
    model = torch.nn.Sequential(torch.nn.Linear(d, d), scorer)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model), torch.load(buffer, weights_only=False)]
    for other in copies:
        assert other[1].extra_repr() == scorer.extra_repr()
        assert torch.equal(other[1](other[0](Q), D), scorer(model[0](Q), D))
    assert torch.load(io.BytesIO(_saved(model.state_dict())), weights_only=True).keys() == model.state_dict().keys()


def _saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("device", DEVICES)
def test_threads(device):
    Q, D = inputs(device, grad=True)
    expected = [lik_ops.maxsim(Q, D), *torch.autograd.grad(lik_ops.maxsim(Q, D).sum(), (Q, D))]
    wrong = []

    def work(i):
        try:
            for n in range(20):
                call = lik_ops.maxsim if (i + n) % 2 else torch.ops.lik.maxsim
                found = [call(Q, D), *torch.autograd.grad(call(Q, D).sum(), (Q, D))]
                if not all(torch.equal(a, e) for a, e in zip(found, expected, strict=True)):
                    wrong.append(i)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


class Named(torch.Tensor):
    """Subclass that participates through ``__torch_function__``."""


class Wrapper(torch.Tensor):
    """Wrapper subclass that participates through ``__torch_dispatch__``."""

    seen: tuple = ()

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        Wrapper.seen = (*Wrapper.seen, str(func))
        unwrap = lambda x: x.inner if isinstance(x, Wrapper) else x  # noqa: E731
        out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        return tree_map(lambda x: Wrapper(x) if isinstance(x, torch.Tensor) else x, out)


def test_tensor_subclasses_are_preserved():
    Q, D = inputs()
    expected = lik_ops.maxsim(Q, D)
    for call in (lik_ops.maxsim, torch.ops.lik.maxsim):
        named = call(Q.as_subclass(Named), D)
        assert type(named) is Named and torch.equal(named.as_subclass(torch.Tensor), expected)
        Wrapper.seen = ()
        wrapped = call(Wrapper(Q), Wrapper(D))
        assert type(wrapped) is Wrapper and torch.equal(wrapped.inner, expected)
        assert Wrapper.seen == ("lik.maxsim_fwd.default",)
    leaf = Wrapper(Q).requires_grad_()
    (grad,) = torch.autograd.grad(lik_ops.maxsim(leaf, D).inner.sum() * 0 + lik_ops.maxsim(leaf, D).sum(), leaf)
    assert type(grad) is Wrapper
    nested = torch.nested.nested_tensor([Q[0], Q[1, :2]], layout=torch.jagged)
    with pytest.raises(TypeError, match="maxsim: Q: expected a dense"):  # lik_ops.maxsim packs them
        torch.ops.lik.maxsim(nested, D)


def test_deterministic_algorithms_use_reproducible_backward():
    """``auto`` and ``lowmem`` give the same bits each time, with the deterministic flag or without."""
    Q, D = inputs(grad=True)
    torch.use_deterministic_algorithms(True)
    grads = [torch.autograd.grad(lik_ops.maxsim(Q, D, backward=b).sum(), (Q, D)) for b in ("auto", "lowmem", "auto")]
    torch.use_deterministic_algorithms(False)
    grads.append(torch.autograd.grad(lik_ops.maxsim(Q, D).sum(), (Q, D)))
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))
    tags = torch.ops.lik.maxsim_bwd_unified.default.tags
    assert torch.Tag.nondeterministic_bitwise in tags


@pytest.mark.gpu
def test_deterministic_algorithms_reject_atomic_adds():
    Q, D = inputs("cuda", grad=True)
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.autograd.grad(lik_ops.maxsim(Q, D, backward="unified").sum(), (Q, D))


@pytest.mark.skipif(INTERPRETING, reason="profiles the portable backend")
def test_profiles_name_forward_and_backward():
    Q, D = inputs(grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_flops=True) as profile:
        lik_ops.maxsim(Q, D).sum().backward()
    names = {event.name for event in profile.events()}
    assert {"lik::maxsim", "lik::maxsim_fwd", "lik::maxsim_bwd_lowmem"} <= names


@pytest.mark.gpu
def test_cuda_graph_capture_and_replay():
    """Capture scores and a training step: no synchronization, and no allocation outside the graph's pool."""
    Q, D = inputs("cuda", grad=True)

    def step():
        scores = lik_ops.maxsim(Q, D, normalize=True)
        return [scores, *torch.autograd.grad(scores.sum(), (Q, D))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        Q.copy_(torch.randn_like(Q))
        D.copy_(torch.randn_like(D))
    graph.replay()
    for a, e in zip(captured, step(), strict=True):
        assert torch.equal(a, e)
