"""Test `torch.fx.symbolic_trace` and `torch.func.functionalize` of the functions."""

import pytest
import torch

import lik_ops
from lik_ops import maxsim, maxsim_varlen

Q, D = torch.randn(2, 3, 8), torch.randn(4, 5, 8)
LABELS = torch.zeros(2, dtype=torch.long)
FUNCTIONS = {
    "maxsim": lambda q, x: lik_ops.maxsim(q, x, normalize=True),
    "maxsim_pairs": lambda q, x: lik_ops.maxsim_pairs(q, x[:2]),
    "maxsim_with_argmax": lambda q, x: lik_ops.maxsim_with_argmax(q, x)[1],
    "maxsim_soft": lambda q, x: lik_ops.maxsim_soft(q, x, 0.5),
    "maxsim_token_topk": lambda q, x: lik_ops.maxsim_token_topk(q, x, 2),
    "maxsim_xtr": lambda q, x: lik_ops.maxsim_xtr(q, x, 3),
    "maxsim_cross_entropy": lambda q, x: lik_ops.maxsim_cross_entropy(q, x, LABELS.to(q.device)),
    "maxsim_varlen": lambda q, x: lik_ops.maxsim_varlen(q, x),
    "chamfer_distance": lambda q, x: lik_ops.chamfer_distance(q, x[:2]),
    "similarity_map": lambda q, x: lik_ops.similarity_map(q, x[:2]),
    "retrieve": lambda q, x: lik_ops.retrieve(q, x, 2)[1],
}


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, q, x):
        return self.function(q, x) + 1


@pytest.mark.parametrize("function", [FUNCTIONS["maxsim"], lambda q, x: maxsim(q, x)], ids=["attribute", "name"])
def test_symbolic_tracing_keeps_the_call(function):
    model = Model(function)
    for _ in range(5):  # an already known call with the same options does not matter
        model(Q, D)
    traced = torch.fx.symbolic_trace(model)
    assert maxsim in [node.target for node in traced.graph.nodes]
    assert torch.equal(traced(Q, D), model(Q, D))


def test_symbolic_tracing_of_the_module():
    scorer = lik_ops.MaxSimScorer(normalize=True)
    traced = torch.fx.symbolic_trace(scorer)
    assert [node.name for node in traced.graph.nodes if node.op == "call_function"] == ["maxsim"]
    assert torch.equal(traced(Q, D, None, None, None), scorer(Q, D))
    assert torch.equal(traced(Q, D, None, None, torch.zeros(2, 3)), torch.zeros(2, 4))


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("maxsim", "maxsim_cross_entropy")])
def test_symbolic_trace_error_suggests_fx_wrap(name):
    with pytest.raises(TypeError, match=rf"^{name}: \w+: expected .* got Proxy: give .* to torch\.fx\.wrap"):
        torch.fx.symbolic_trace(Model(FUNCTIONS[name]))


torch.fx.wrap("maxsim_varlen")


def test_a_wrapped_function_stays_one_node():
    model = Model(lambda q, x: maxsim_varlen(q, x))
    traced = torch.fx.symbolic_trace(model)
    assert lik_ops.maxsim_varlen in [node.target for node in traced.graph.nodes]
    assert torch.equal(traced(Q, D), model(Q, D))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functionalize(name):
    function = FUNCTIONS[name]
    functional = torch.func.functionalize(function)
    assert torch.equal(functional(Q, D), function(Q, D))
    q = Q.clone().requires_grad_()
    if functional(q, D).requires_grad:
        actual, expected = (torch.autograd.grad(f(q, D).sum(), q)[0] for f in (functional, function))
        assert torch.equal(actual, expected)


def test_functionalize_with_vmap():
    for f in (
        torch.func.vmap(torch.func.functionalize(maxsim), (0, None)),
        torch.func.functionalize(torch.func.vmap(maxsim, (0, None))),
    ):
        assert torch.equal(f(Q, D), maxsim(Q, D))


def test_functionalize_with_gradients():
    def total(q):
        return maxsim(q, D).sum()

    for f in (torch.func.grad(torch.func.functionalize(total)), torch.func.functionalize(torch.func.grad(total))):
        assert torch.equal(f(Q), torch.func.grad(total)(Q))
