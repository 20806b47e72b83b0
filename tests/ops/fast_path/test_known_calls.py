"""Test that a plan in the cache serves repeated calls and no others, with or without observers of the dispatcher.

`test_eager_keys` compares the results of all changes of an argument.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

import lik_ops
from lik_ops import backends
from lik_ops.api import inputs, ragged, score
from lik_ops.core.plan_cache import plans
from lik_ops.ops.fast_path import cuts, eager

from ...support.common import override_setting
from .test_eager import FunctionSeen, Seen, Wrapped


class Dense:
    name = "maxsim"

    def __init__(self):
        self.x = [torch.randn(2, 3, 4), torch.randn(5, 6, 4)]

    def call(self, n=None, other=None, **options):
        x = [other if n == m else t for m, t in enumerate(self.x)]
        options = {"normalize": False, "backward": "auto", "recompute": False, **options}
        return eager.try_maxsim(*x, None, None, None, **options)


class DenseArgmax(Dense):
    name = "maxsim_with_argmax"

    def call(self, n=None, other=None, *, normalize=False, backward="auto", recompute=False):
        x = [other if n == m else t for m, t in enumerate(self.x)]
        return eager.try_maxsim_with_argmax((*x, None, None, None), (normalize, backward, recompute))


class Ragged(Dense):
    name = "ragged"

    def __init__(self):
        self.x = [torch.randn(7, 4), torch.randn(9, 4), torch.tensor([0, 3, 7]), torch.tensor([0, 2, 2, 9])]

    def call(self, n=None, other=None, **options):
        x = [other if n == m else t for m, t in enumerate(self.x)]
        return eager.try_maxsim_ragged(*x, **options)


@pytest.fixture(params=[Dense, DenseArgmax, Ragged], ids=lambda layout: layout.name)
def layout(request, monkeypatch):
    """Yield a call that may use the fast path."""
    made = request.param()
    eager.clear_call_caches()
    if made.name == "ragged":  # whose fast path only leads to the Triton backend
        monkeypatch.setattr(eager, "_make_packed_call", lambda c, *_: FakePackedCall(c))
    yield made
    eager.clear_call_caches()


class FakePackedCall:
    """Stand-in for the cached state of a ragged call."""

    argmax_dtype, differentiable = None, False

    def __init__(self, c):
        self.differentiable = eager.needs_gradients(c.Q)
        self.plan, self.with_argmax = self, False

    def forward(self, c):
        return c.Q, None

    def record(self, ctx, c):
        return c.Q.detach()


def find_serving_plan(layout, *args, **options):
    """Return the entry of the plan cache that serves this call without being made for it, or None."""
    found = []

    class Spy:
        def get(self, key):
            found.append(plans.get(key))
            return found[-1]

        store = staticmethod(plans.store)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "plans", Spy())
        with contextlib.suppress(TypeError, ValueError):
            layout.call(*args, **options)
    return found[-1] if found else None


def make_known(layout):
    """Make the call, and return the entry of the plan cache that serves its repetition."""
    assert layout.call() is not None
    found = find_serving_plan(layout)
    assert found
    return found


WATCHERS = {
    "dispatch mode": Seen,
    "function mode": FunctionSeen,
    "device": lambda: torch.device("cpu"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "dual level": forward_ad.dual_level,  # although no tensor carries a tangent
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "autograd's profiler": torch.autograd.profiler.profile,
}
TRANSFORMS = {
    "vmap": lambda f: torch.vmap(f)(torch.randn(2, 3)),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(torch.randn(2, 3)),
    "functionalize": lambda f: torch.func.functionalize(lambda x: f(x) + 1)(torch.randn(2, 3)),
    "make_fx": lambda f: torch.fx.experimental.proxy_tensor.make_fx(f)(torch.randn(2, 3)),
    "trace": lambda f: torch.jit.trace(f, torch.randn(2, 3), check_trace=False),
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_watched_calls_bypass_cached_plans(layout, watcher):
    known = make_known(layout)
    with WATCHERS[watcher]():
        assert layout.call() is None
    assert find_serving_plan(layout) is known


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_and_tracers_bypass_cached_plans(layout, transform):
    make_known(layout)
    ways = []
    TRANSFORMS[transform](lambda x: ways.append(layout.call()) or x * 2)
    assert ways == [None]


def test_cached_plan_does_not_serve_other_arguments(layout):
    known = make_known(layout)
    for n, x in enumerate(layout.x):
        others = [x.as_subclass(Wrapped), x.to("meta"), None, [x], x[None], x.new_empty(x.shape).expand(2, *x.shape)]
        if n < 2:
            more_memory = torch.cat([x, x], -1)
            others += [x.double(), x.bfloat16(), torch._neg_view(x), more_memory[..., : x.shape[-1]], more_memory]
            others += [torch.nested.nested_tensor([x, x]), x.to_sparse(), torch._efficientzerotensor(*x.shape)]
            others += [x.clone().requires_grad_(), torch.nn.Parameter(x), x.mT.contiguous().mT]
            others += [] if layout.name == "ragged" else [layout.x[1 - n]]
        for other in others:
            assert find_serving_plan(layout, n, other) is not known, (n, type(other), getattr(other, "shape", None))
    for option in ({"normalize": 0}, {"normalize": True}, {"backward": "lowmem"}, {"recompute": True}):
        assert find_serving_plan(layout, **option) is not known
    assert find_serving_plan(layout) is known


def test_mask_position_is_part_of_the_plan_key():
    Q, D, mask = torch.randn(5, 6, 4), torch.randn(5, 6, 4), torch.ones(5, 6, dtype=torch.bool)
    keys = {
        eager.make_dense_key("maxsim", (Q, D, *masks, None), (False, "auto", False))
        for masks in ((mask, None), (None, mask), (mask, mask), (None, None))
    }
    assert len(keys) == 4 and None not in keys


def test_cached_plan_serves_other_values_and_packed_row_counts(layout):
    known = make_known(layout)
    for n, x in enumerate(layout.x):
        assert find_serving_plan(layout, n, x.clone()) is known
    more = torch.cat([layout.x[1], layout.x[1]])
    assert (find_serving_plan(layout, 1, more) is known) == (layout.name == "ragged")


def test_settings_are_part_of_the_plan_key(layout):
    known = make_known(layout)
    with lik_ops.use_backend("portable"):
        assert find_serving_plan(layout) is None
    with override_setting(torch.backends.cuda.matmul, "fp32_precision", "tf32"):
        assert find_serving_plan(layout) is None
    assert find_serving_plan(layout) is known
    with torch.no_grad():  # nothing to record anyway
        assert find_serving_plan(layout) is known


def test_gradient_recording_is_part_of_the_plan_key(layout):
    layout.x[0].requires_grad_()
    if layout.name == "maxsim_with_argmax":
        assert layout.call() is None
        return
    known = make_known(layout)
    with torch.no_grad():
        assert find_serving_plan(layout) is None
        assert make_known(layout) is not known
    assert find_serving_plan(layout) is known
    with torch._C._AutoDispatchBelowAutograd():  # nothing may be recorded here
        assert layout.call() is None


@pytest.mark.parametrize("apart", [torch.tensor([[0, 9], [4, 9], [9, 9]])[:, 0], torch.zeros(4, 3).long()[:, :2]])
def test_index_strides_must_be_contiguous_for_any_row_count(apart):
    """One row is contiguous for any stride, but several rows are not."""
    assert apart[:1].is_contiguous() and not apart.is_contiguous()
    assert not cuts.is_contiguous_index(apart[:1])
    assert cuts.is_contiguous_index(apart.contiguous()) and cuts.is_contiguous_index(apart.contiguous()[:1])


@pytest.fixture
def checked(monkeypatch):
    """Record the calls whose arguments were checked. A stand-in for the Triton backend scores quantized documents."""
    seen, real = [], inputs.prepare_args
    by_kernels = {
        "find_quantized_plan": lambda *_: False,
        "forward_quantized_cut": lambda c, *_: (c.Q.new_zeros(c.queries, c.columns), None),
    }
    backend = SimpleNamespace(**{**vars(backends.portable), **by_kernels})
    monkeypatch.setattr(backends, "select_backend", lambda device, dtype: backend)
    for module in (score, ragged):
        stand_in = lambda *args, **options: seen.append(args) or real(*args, **options)  # noqa: E731
        monkeypatch.setattr(module, "prepare_args", stand_in)
    eager.clear_call_caches()
    yield seen
    eager.clear_call_caches()


def make_quantized_known(checked, call):
    call()
    checked.clear()
    call()
    assert not checked


@pytest.mark.parametrize("format", ["int8", "uint8", "binary", "residual2"])
@pytest.mark.parametrize("packed", [False, True])
def test_repeated_quantized_calls_are_not_checked_again(checked, format, packed):
    x, more = torch.randn(5, 6, 16), torch.randn(9, 6, 16)
    codec = lik_ops.ResidualCodec.train(x.flatten(0, 1), 2, 4) if format == "residual2" else None

    def made(tokens, format=format):
        tokens = tokens.flatten(0, 1) if packed else tokens
        return lik_ops.quantize(tokens, codec if format == "residual2" else format)

    D, Q = made(x), torch.randn(2, 3, 16)
    bounds = torch.arange(0, 31, 6)

    def call(Q=Q, D=D, bounds=bounds, **options):
        return lik_ops.maxsim_varlen(Q, D, None, bounds, **options) if packed else lik_ops.maxsim(Q, D, **options)

    def is_unchecked(**changes):
        make_quantized_known(checked, call)
        with contextlib.suppress(TypeError, ValueError, NotImplementedError):
            call(**changes)
        return not checked

    assert call().shape == (2, 5)
    assert is_unchecked(Q=torch.randn(2, 3, 16)) and is_unchecked(Q=torch.randn(7, 3, 16)) == packed
    assert call(D=made(more), bounds=torch.arange(0, 55, 6)).shape == (2, 9)
    weights = torch.ones(2, 3)
    others = [Q[0], Q.double(), Q.as_subclass(Wrapped), Q.to("meta"), [Q[0]], None, torch.randn(2, 3, 17)]
    others += [torch._neg_view(Q), Q.clone().requires_grad_(), torch.nested.nested_tensor([Q[0], Q[1]])]
    for other in others:
        assert not is_unchecked(Q=other), type(other)
    for options in (
        {"q_weight": weights},
        {"normalize": True},
        {"normalize": 0},
        {"backward": "lowmem"},
        {"bounds": 0},
    ):
        assert packed or "bounds" not in options or not is_unchecked(q_mask=weights.bool())
        assert ("bounds" in options and not packed) or not is_unchecked(**options), options
    assert not is_unchecked(D=made(x, "fp8_e5m2"))
    assert not is_unchecked(
        D=lik_ops.quantize(x.flatten(0, 1) if packed else x, "int8" if format != "int8" else "uint8")
    )
    for watcher in WATCHERS.values():
        make_quantized_known(checked, call)
        with watcher(), contextlib.suppress(NotImplementedError, RuntimeError):
            call()
        assert checked


def test_binary_codes_of_other_d_with_equal_bytes_raise(checked):
    """Bits of 12 features need as many bytes as bits of 16 features."""
    Q, D = torch.randn(2, 3, 16), lik_ops.quantize(torch.randn(5, 6, 16), "binary")
    other = lik_ops.quantize(torch.randn(5, 6, 12), "binary")
    assert other.data.shape == D.data.shape
    make_quantized_known(checked, lambda: lik_ops.maxsim(Q, D))
    with pytest.raises(ValueError, match="expected d = 16 as in Q"):
        lik_ops.maxsim(Q, other)


@pytest.mark.parametrize("packed", [False, True])
def test_alternating_shapes_of_quantized_documents_are_checked_once_each(checked, packed):
    """Each shape is checked once, in any order of the calls."""
    Q = torch.randn(2, 3, 16)
    documents = [lik_ops.quantize(torch.randn(n, length, 16)) for n, length in ((5, 6), (4, 7), (5, 9))]

    def call(D):
        if not packed:
            return lik_ops.maxsim(Q, D)
        flat = lik_ops.Quantized(D.data.flatten(0, 1), D.scale.flatten(), "int8", 16, D.dtype)
        return lik_ops.maxsim_varlen(Q, flat, None, torch.arange(0, len(flat) + 1, D.data.shape[1]))

    for D in documents:
        call(D)
    checked.clear()
    for D in documents * 3:
        assert call(D).shape == (2, len(D))
    assert not checked
