"""Test selective activation checkpoints around compiled code, whose kernels write to cached buffers."""

import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lik_ops
from lik_ops.opcheck.samples.table import OPERATORS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LIK = [name for name in OPERATORS if name not in ("maxsim", "maxsim_packaged")]  # the operators that run as one node


def save_all(ctx, op, *args, **kwargs):
    is_saved = op.namespace in ("lik", "checkpoint_test")
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXT = functools.partial(create_selective_checkpoint_contexts, save_all)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def as_tuple(outputs):
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def assert_same(x, expected, is_atomic):
    if is_atomic:
        torch.testing.assert_close(x, expected)
    else:
        assert torch.equal(x, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LIK)
def test_the_cache_shares_no_memory_with_the_caller(name, device):
    """Write to the outputs like compiled code, without a new version. The cache must keep the correct values."""
    op = getattr(torch.ops.lik, name).default
    args = OPERATORS[name].sized((3, 5, 4, 6), False, device)
    expected = as_tuple(op(*args))
    forward, recompute = CONTEXT()
    with torch.no_grad(), forward:
        outputs = as_tuple(op(*args))
    is_atomic = "unified" in name and device == "cuda"  # atomic additions have other bits in each call
    for x, e in zip(outputs, expected, strict=True):
        assert_same(x, e, is_atomic)
        assert x.stride() == e.stride()
        x.data.fill_(1)
    with torch.no_grad(), recompute:
        cached = as_tuple(op(*args))
    for x, e in zip(cached, expected, strict=True):
        assert_same(x, e, is_atomic)


def test_dispatch_modes_do_not_see_the_cache_copies():
    Q, D = torch.randn(2, 3, 8), torch.randn(4, 5, 8)
    names = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Names(), CONTEXT()[0]:
        lik_ops.maxsim(Q, D)
    assert names.count("lik::maxsim_fwd") == 1 and "aten::clone" not in names


def gradients(f, tensors):
    return torch.autograd.grad(f(*tensors), tensors)


def checkpointed(f):
    return functools.partial(checkpoint, f, use_reentrant=False, context_fn=CONTEXT)


def powers(score):
    return lambda *tensors: score(*tensors).pow(2).sum()


def packed(Q, D):
    cu_seqlens = [torch.tensor(bounds, device=Q.device) for bounds in ([0, 10, 32], [0, 6, 40, 96])]
    return lik_ops.maxsim_varlen(Q.flatten(0, 1), D.flatten(0, 1), *cu_seqlens)


SCORES = {
    "maxsim": lik_ops.maxsim,
    "varlen": packed,
    "soft": functools.partial(lik_ops.maxsim_soft, temperature=0.1),
    "losses": lambda Q, D: lik_ops.maxsim_cross_entropy(Q, D, reduction="none"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ["checkpoint(compile(f))", "compile(checkpoint(f))"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "maxsim")) for n in SCORES])
def test_gradients_of_compiled_code(name, order, device):
    torch.manual_seed(0)
    tensors = [torch.randn(s, device=device, requires_grad=True) for s in ((8, 4, 8), (16, 6, 8))]
    f = powers(SCORES[name])
    wrapped = checkpointed(torch.compile(f)) if order.startswith("checkpoint") else torch.compile(checkpointed(f))
    for actual, expected in zip(gradients(wrapped, tensors), gradients(f, tensors), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@torch.library.custom_op("checkpoint_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, x.new_empty(1)


twice.register_fake(lambda x: (torch.empty_like(x), x.new_empty(1)))
twice.register_autograd(lambda ctx, grad, _: grad * 2)


def test_torch_shares_cached_outputs_with_compiled_code():
    """This test fails once torch handles custom operators correctly. Then remove `lik_ops.ops.stack.checkpointing`."""
    tensors = [torch.rand(16, requires_grad=True)]
    f = powers(lambda x: twice(x)[0])
    (actual,), (expected,) = (gradients(g, tensors) for g in (checkpointed(torch.compile(f)), f))
    assert torch.equal(actual, 2 * expected)  # the forward left 2 * twice(x) in the cached buffer
