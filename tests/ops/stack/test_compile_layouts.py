"""Test `torch.compile` of packed functions, retrieval, every operator, and training steps."""

import functools

import pytest
import torch

import lik_ops
from lik_ops.opcheck.samples.table import OPERATORS
from lik_ops.ops.checks import hints

from ...support.ragged import DEVICES, same_bits
from .test_ragged_stack import FUNCTIONS, arguments, finite

MODES = ["default", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("reduce-overhead", "max-autotune"))]
BACKWARDS = [name for name in OPERATORS if "_bwd" in name]
OTHERS = [name for name in OPERATORS if name not in (*BACKWARDS, "maxsim_packaged")]
LENGTHS = ((3, 1, 7), (5, 2, 8, 1)), ((2, 9, 0, 30), (1, 40, 6, 0, 3, 11))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch.compiler.reset()


def assert_same_outputs(actual, expected):
    actual, expected = ((x,) if isinstance(x, torch.Tensor) else x for x in (actual, expected))
    for a, e in zip(actual, expected, strict=True):
        same_bits(a, e)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", ["varlen", *(pytest.param(n, marks=pytest.mark.slow) for n in FUNCTIONS if n != "varlen")]
)
def test_ragged_functions_in_every_mode(name, mode, device):
    compiled = torch.compile(FUNCTIONS[name], mode=mode, dynamic=True, fullgraph=True)
    for lengths in LENGTHS:
        args = arguments(*lengths, device=device)
        assert_same_outputs(compiled(*args), FUNCTIONS[name](*args))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("packed", [False, True])
def test_retrieval_in_every_mode(packed, mode, device):
    retrieve = functools.partial(lik_ops.retrieve, top_k=3, normalize=True)
    compiled = torch.compile(retrieve, mode=mode, dynamic=True, fullgraph=True)
    for lengths in LENGTHS:
        tokens, D, _, cu_seqlens, _ = arguments(*lengths, device=device)
        Q = tokens[:10].unflatten(0, (2, 5))
        documents = (D, {"cu_seqlens_d": cu_seqlens}) if packed else (D[:12].unflatten(0, (4, 3)), {})
        found = (f(Q, documents[0], **documents[1]) for f in (compiled, retrieve))
        assert_same_outputs(*found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BACKWARDS + [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS])
def test_every_operator_in_every_mode(name, mode, device):
    """``maxsim_packaged`` only exists in packages."""
    op = getattr(torch.ops.lik, name).default
    compiled = torch.compile(lambda *args: op(*args), mode=mode, dynamic=True, fullgraph=True)
    for sizes in ((3, 5, 4, 6), (2, 9, 31, 70)):
        for candidates in (False, True):
            args = OPERATORS[name].sized(sizes, candidates, device)
            expected = op(*args)
            if torch.device(device).type == "cuda" and "unified" in name:  # atomic adds
                torch.testing.assert_close(compiled(*args), expected, rtol=1e-4, atol=1e-5)
            else:
                assert_same_outputs(compiled(*args), expected)


def dense_step(Q, D, q_mask, d_mask, w):
    scores = lik_ops.maxsim(Q, D, q_mask, d_mask, q_weight=w, normalize=True)
    return finite(scores).sum()


def dense(sizes):
    Nq, Nd, Lq, Ld = sizes
    Q, D, w = (torch.randn(s, requires_grad=True) for s in ((Nq, Lq, 8), (Nd, Ld, 8), (Nq, Lq)))
    return Q, D, torch.rand(Nq, Lq) > 0.2, torch.rand(Nd, Ld) > 0.2, w


def make_counting_backend():
    """Return a backend that counts the compiled forwards and backwards, and its counts."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    counts = {"forward": 0, "backward": 0}

    def compiler(kind, module, _):
        counts[kind] += 1
        return make_boxed_func(module.forward)

    compilers = (functools.partial(compiler, kind) for kind in counts)
    return aot_autograd(**dict(zip(("fw_compiler", "bw_compiler"), compilers, strict=True))), counts


def test_one_dynamic_compilation_serves_training_steps_of_all_sizes():
    """Compile forward and backward once, also for long documents with 32-bit argmax.

    An axis of size 1 or 0 may cost one more compilation of each.
    """
    backend, counts = make_counting_backend()
    step = torch.compile(dense_step, backend=backend, fullgraph=True, dynamic=True)

    def run(sizes):
        args = dense(sizes)
        leaves = args[0], args[1], args[4]
        for a, e in zip(*(torch.autograd.grad(f(*args), leaves) for f in (step, dense_step)), strict=True):
            same_bits(a, e)

    for sizes in ((3, 5, 4, 6), (2, 9, 31, 70), (7, 2, 8, 3), (4, 4, 4, 4), (2, 2, 2, 40_000)):
        run(sizes)
        assert counts == {"forward": 1, "backward": 1}, sizes
    for axis in range(4):
        for size in (1, 0):
            before = dict(counts)
            for _ in range(2):
                run(tuple(size if i == axis else n for i, n in enumerate((3, 5, 4, 6))))
            assert all(counts[kind] <= before[kind] + 1 for kind in counts), f"axis {axis} of size {size}"


@pytest.mark.parametrize("name", ["varlen", "candidates", "pair_list"])
def test_one_dynamic_compilation_serves_ragged_training_steps(name, monkeypatch):
    """Compile once for any lengths. Axes with zero or one element may cost one more compilation of each.

    The eager calls between the compiled ones are the first calls of the process, whose tokens are inspected.
    """
    monkeypatch.setattr(hints, "_inspected_calls", {})
    backend, counts = make_counting_backend()

    def eager(*args):
        return finite(FUNCTIONS[name](*args)).sum()

    step = torch.compile(eager, backend=backend, fullgraph=True, dynamic=True)
    odd = [((3, 1, 2), (5, 2, 8)), ((1, 0, 0), (5, 2, 8)), ((0, 0, 0), (5, 2, 8)), ((3, 1, 2), (1, 0, 0))]
    for i, lengths in enumerate((*LENGTHS, *odd)):
        before = dict(counts)
        for _ in range(2):
            args = arguments(*lengths, grad=True)
            leaves = args[0], args[1], args[4]
            for a, e in zip(*(torch.autograd.grad(f(*args), leaves) for f in (step, eager)), strict=True):
                same_bits(a, e)
        most = 1 if i in (0, *range(len(LENGTHS), 99)) else 0
        assert all(counts[kind] <= before[kind] + most for kind in counts), f"{lengths}: {before}, then {counts}"
