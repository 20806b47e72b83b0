"""Test the eager fast path: used without watchers, not used with them, and equal to the operators in all results."""

import contextlib
import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import lik_ops
from lik_ops import backends
from lik_ops.core.plan_cache import plans
from lik_ops.ops.fast_path import eager, watchers

from ...support.common import INTERPRETING, PLACES, Problem, build


class Seen(TorchDispatchMode):
    """Mode that records operators in the dispatcher. The fast path is off under it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class FunctionSeen(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """Subclass without behavior of its own."""


def inputs():
    return torch.randn(2, 3, 4), torch.randn(5, 6, 4)


def try_fast_path(*args, q_mask=None, d_mask=None, q_weight=None, normalize=False, backward="auto", recompute=False):
    return eager.try_maxsim(*args, q_mask, d_mask, q_weight, normalize, backward, recompute)


def test_ordinary_calls_use_the_fast_path():
    Q, D = inputs()
    assert try_fast_path(Q, D) is not None
    assert try_fast_path(Q, D, q_mask=torch.ones(2, 3, dtype=torch.int8), normalize=True) is not None
    assert try_fast_path(Q[0], D[0], q_weight=torch.ones(3)).shape == ()
    with torch.no_grad():
        assert try_fast_path(torch.nn.Parameter(Q), D) is not None
    with torch.inference_mode():
        assert try_fast_path(Q, D).is_inference()
        assert try_fast_path(Q + 1, D) is not None
    assert try_fast_path(Q.requires_grad_(), D).grad_fn is not None
    assert try_fast_path(Q, D, recompute=True).grad_fn is not None


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("layout", ["cross", "candidates", "flat_q", "flat_d", "flat"])
@pytest.mark.parametrize("mask", ["none", "holes", "integer"])
@pytest.mark.parametrize("recompute", [False, True])
def test_fast_path_and_operators_have_the_same_bits(place, layout, mask, recompute):
    for dtype in place.dtypes:
        p = Problem(layout, 3, 2, 5, 9, 16, dtype, mask, mask, mask != "none", False, "normal", poison=False)
        x = build(p, place.device)
        leaves = [t.requires_grad_() for t in x.leaves()]
        options = {"q_weight": x.q_weight, "recompute": recompute}
        results = []
        for way in (contextlib.nullcontext(), Seen()):
            with place.use(), way:
                with torch.no_grad():
                    alone = lik_ops.maxsim(x.Q, x.D, x.q_mask, x.d_mask, **options)
                    pair = lik_ops.maxsim_with_argmax(x.Q, x.D, x.q_mask, x.d_mask, **options)
                for backward in ("lowmem", "auto"):
                    scores = torch.ops.lik.maxsim(x.Q, x.D, x.q_mask, x.d_mask, backward=backward, **options)
                    grads = torch.autograd.grad(scores, leaves, torch.ones_like(scores))
            results.append([alone, *pair, scores.detach(), *grads])
            assert pair[1].dtype == torch.int64
        assert {"lik.maxsim_fwd.default", "lik.maxsim_bwd_lowmem.default"} <= set(way.names)
        for a, b in zip(*results, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
            assert a.stride() == b.stride()


BAD = {
    "rank": lambda Q, D: ((Q[None], D), {}),
    "one dimension": lambda Q, D: ((Q, D[0, 0]), {}),
    "no dimension": lambda Q, D: ((Q.sum(), D), {}),
    "features": lambda Q, D: ((Q, D[..., :3]), {}),
    "dtype": lambda Q, D: ((Q, D.half()), {}),
    "integers": lambda Q, D: ((Q.int(), D.int()), {}),
    "device": lambda Q, D: ((Q, D.to("meta")), {}),
    "sparse": lambda Q, D: ((Q, D.to_sparse()), {}),
    "flat candidates": lambda Q, D: ((Q[0], D[None]), {}),
    "candidate lists": lambda Q, D: ((Q, D.expand(3, -1, -1, -1)), {}),
    "mask shape": lambda Q, D: ((Q, D, torch.ones(1, 3, dtype=torch.bool)), {}),
    "mask dtype": lambda Q, D: ((Q, D, None, torch.ones(5, 6)), {}),
    "weight dtype": lambda Q, D: ((Q, D), {"q_weight": torch.ones(2, 3, dtype=torch.float64)}),
    "backward": lambda Q, D: ((Q, D), {"backward": "fast"}),
    "normalize": lambda Q, D: ((Q, D), {"normalize": "yes"}),
    "recompute": lambda Q, D: ((Q, D), {"recompute": "no"}),
    "not a tensor": lambda Q, D: ((Q, 3), {}),
    "a list": lambda Q, D: ((Q, D, [[True] * 3] * 2), {}),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("grad", [False, True])
def test_errors_match_the_operator_on_every_call(bad, grad):
    Q, D = inputs()
    args, options = BAD[bad](Q, D)
    if grad and Q.is_floating_point():
        Q.requires_grad_()
    lik_ops.maxsim(Q, D)  # a call that is known to be valid
    errors = []
    for mode in (Seen(), torch.no_grad(), torch.enable_grad(), torch.enable_grad()):
        with mode, pytest.raises(Exception) as error:
            lik_ops.maxsim(*args, **options)
        errors.append((error.type, str(error.value).split("\n")[0]))
    assert len(set(errors)) == 1, errors
    assert bad in ("normalize", "recompute", "not a tensor", "a list") or errors[0][0] in (TypeError, ValueError)


def test_modes_see_the_operators():
    Q, D = inputs()
    with Seen() as seen:
        lik_ops.maxsim(Q, D)
    assert seen.names == ["lik.maxsim_fwd.default"]
    with FunctionSeen() as seen:
        lik_ops.maxsim(Q, D)
    assert any("lik.maxsim" in name for name in seen.names)
    scores = lik_ops.maxsim(Q.requires_grad_(), D)
    with Seen() as seen:
        torch.autograd.grad(scores.sum(), Q)
    assert "lik.maxsim_bwd_lowmem.default" in seen.names


def test_profilers_see_the_operators():
    Q, D = inputs()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        lik_ops.maxsim(Q, D)
    assert {"lik::maxsim", "lik::maxsim_fwd"} <= {event.name for event in profile.events()}


def test_transforms_and_tracers_bypass_the_fast_path():
    Q, D = inputs()
    ways = []

    def call(q):
        ways.append(try_fast_path(q, D))
        return q.sum()

    torch.vmap(call)(Q)
    torch.func.grad(call)(Q)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(call, Q, check_trace=False)
    torch.fx.experimental.proxy_tensor.make_fx(call)(Q)
    torch.fx.experimental.proxy_tensor.make_fx(call, tracing_mode="fake")(Q)
    assert ways == [None] * 5
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda q: lik_ops.maxsim(q, D))(Q)
    assert any("lik.maxsim_fwd" in str(node.target) for node in graph.graph.nodes)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode AD"):
        lik_ops.maxsim(forward_ad.make_dual(Q, torch.ones_like(Q)), D)


def test_autocast_bypasses_the_fast_path():
    Q, D = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        assert try_fast_path(Q, D) is None
        with torch.autocast("cpu", enabled=False):
            assert try_fast_path(Q, D) is not None


def test_non_plain_tensors_bypass_the_fast_path():
    Q, D = inputs()
    minus = torch._neg_view(D)
    assert minus.is_neg()
    for odd in (Q.as_subclass(Wrapped), torch._efficientzerotensor(2, 3, 4), Q.to("meta"), Q.to_sparse()):
        assert try_fast_path(odd, D) is None
    assert try_fast_path(Q, minus) is None
    assert torch.equal(lik_ops.maxsim(Q, minus), lik_ops.maxsim(Q, -D))
    assert torch.equal(lik_ops.maxsim(torch._efficientzerotensor(2, 3, 4), D), torch.zeros(2, 5))
    with torch._subclasses.FakeTensorMode():
        assert try_fast_path(torch.empty(2, 3, 4), torch.empty(5, 6, 4)) is None
    assert try_fast_path(torch.nested.nested_tensor([Q[0], Q[1]]), D) is None  # strided, and of type Tensor
    mask, weight = torch.ones(5, 6, dtype=torch.bool), torch.ones(2, 3)
    assert try_fast_path(Q, D, d_mask=mask, q_weight=weight) is not None
    assert try_fast_path(Q, D, d_mask=mask.as_subclass(Wrapped)) is None
    assert try_fast_path(Q, D, q_mask=mask[:2, :3].to("meta")) is None
    assert try_fast_path(Q, D, q_weight=torch._neg_view(weight)) is None


@pytest.mark.parametrize("first", ["fake mode", "grad"])
def test_first_call_under_a_mode_learns_correct_tensor_keys(first, monkeypatch):
    """The traits of plain tensors are learned once per process from a new tensor, which modes and transforms wrap."""
    monkeypatch.setattr(watchers, "_usual_keys", set())
    monkeypatch.setattr(watchers, "_known_devices", set())
    Q, D = inputs()
    lengths = torch.tensor([2, 3]), torch.full((2, 5), 4)

    def call(q):
        lik_ops.maxsim_padded(Q, D.expand(2, -1, -1, -1), *lengths)
        return q.sum()

    if first == "grad":
        torch.func.grad(call)(Q)
    else:
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            call(Q)
    assert watchers.is_ordinary_tensor(Q) and try_fast_path(Q, D) is not None
    seen = []
    torch.func.grad(lambda q: seen.append(watchers.is_ordinary_tensor(q)) or q.sum())(Q)
    assert seen == [False]


def test_each_kind_of_watcher_disables_the_fast_path():
    """Test one kind at a time, because the guard must not pass if any of its conditions is missing."""
    Q, D = inputs()
    ways = []
    torch.func.functionalize(lambda q: ways.append(try_fast_path(q, D)) or q + 1)(Q)
    with forward_ad.dual_level():  # although no tensor carries a tangent
        ways.append(try_fast_path(Q, D))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        ways.append(try_fast_path(Q, D))
    with torch.autograd.profiler.profile():
        ways.append(try_fast_path(Q, D))
    for mode in (Seen(), FunctionSeen(), torch.device("cpu")):
        with mode:
            ways.append(try_fast_path(Q, D))
    with torch._C._AutoDispatchBelowAutograd():  # nothing may be recorded here
        ways.append(try_fast_path(Q.requires_grad_(), D))
    assert ways == [None] * 8
    for option in ({"normalize": 1}, {"recompute": 0}, {"backward": None}):  # left to the operator's errors
        assert try_fast_path(Q, D, **option) is None
    assert try_fast_path(Q, D) is not None


def test_compiled_callers_keep_the_operator():
    graphs = []

    def backend(module, _):
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module

    Q, D = inputs()
    compiled = torch.compile(lambda q, d: lik_ops.maxsim(q, d) * 2, backend=backend, fullgraph=True)
    assert torch.equal(compiled(Q, D), lik_ops.maxsim(Q, D) * 2)
    assert any("lik.maxsim" in target for target in graphs[0])


def test_recompute_passes_no_argmax_to_the_backward(monkeypatch):
    """The backend computes the argmax in parts that need only constant memory."""
    backend = backends.select_backend(torch.device("cpu"), torch.float32)
    run, given = backend.backward_lowmem, []

    def spy(grad_scores, Q, D, argmax, *rest):
        given.append(argmax)
        return run(grad_scores, Q, D, argmax, *rest)

    monkeypatch.setattr(backend, "backward_lowmem", spy)
    Q, D = torch.randn(2, 3, 8, requires_grad=True), torch.randn(4, 5, 8, requires_grad=True)
    grads = torch.autograd.grad(lik_ops.maxsim(Q, D, recompute=True).sum(), (Q, D))
    assert given == [None]
    for a, b in zip(grads, torch.autograd.grad(lik_ops.maxsim(Q, D).sum(), (Q, D)), strict=True):
        assert torch.equal(a, b)


def test_the_choice_of_backend_is_read_by_every_call(monkeypatch):
    if INTERPRETING:
        pytest.skip("there the kernels run on CPU tensors")
    Q, D = inputs()
    lik_ops.maxsim(Q, D)
    with lik_ops.use_backend("triton"), pytest.raises(RuntimeError, match="'triton' cannot compute"):
        lik_ops.maxsim(Q, D)
    monkeypatch.setenv("LIK_OPS_BACKEND", "triton")
    with pytest.raises(RuntimeError, match="'triton' cannot compute"):
        lik_ops.maxsim(Q, D)
    monkeypatch.setenv("LIK_OPS_BACKEND", "")
    lik_ops.maxsim(Q, D)


def test_double_backward_raises_and_batched_gradients_match():
    Q, D = inputs()
    scores = lik_ops.maxsim(Q.requires_grad_(), D)
    (grad,) = torch.autograd.grad(scores.sum(), Q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward"):
        grad.sum().backward()
    scores = lik_ops.maxsim(Q, D)
    upstream = torch.randn(3, 2, 5)
    expected = [torch.autograd.grad(scores, Q, u, retain_graph=True)[0] for u in upstream]
    (batched,) = torch.autograd.grad(scores, Q, upstream, is_grads_batched=True)
    torch.testing.assert_close(batched, torch.stack(expected))


def test_modifying_saved_tensors_in_place_raises():
    Q, D = inputs()
    scores = lik_ops.maxsim(Q.requires_grad_(), D)
    D.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.sum().backward()


def test_number_of_plans_is_bounded(monkeypatch):
    monkeypatch.setattr(plans, "capacity", 4)
    eager.clear_call_caches()
    for Ld in range(1, 9):
        lik_ops.maxsim(torch.ones(1, 2, 4), torch.ones(1, Ld, 4))
        assert len(plans) <= 4


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_warmup_makes_the_requested_calls(place, monkeypatch):
    called = []

    def spy(name):
        real = getattr(lik_ops.api.warmup, name)

        def call(Q, D, *args, **options):
            called.append((name, Q.shape, D.shape))
            return real(Q, D, *args, **options)

        monkeypatch.setattr(lik_ops.api.warmup, name, call)

    spy("maxsim")
    spy("maxsim_with_argmax")
    options = {"q_mask": True, "d_mask": True, "q_weight": True, "normalize": True, "argmax": True, "training": True}
    with place.use():
        for dtype in place.dtypes:
            lik_ops.warmup(place.device, dtype, 8, 3, Nq=(1, 2), Ld=(4, 9), **options)
        # On a GPU, calls of dtypes with kernels are first made without launches.
        times = [2 if place.device == "cuda" and dtype != torch.float64 else 1 for dtype in place.dtypes]
        assert len(called) == 24 * sum(times)
        called.clear()
        lik_ops.warmup(place.device, place.dtypes[0], 8, 3, Nq=2, Ld=4, Nd=5, candidates=True)
    assert called == times[0] * [("maxsim", (2, 3, 8), (2, 5, 4, 8))]
    with pytest.raises(ValueError, match="warmup: Ld: expected 1 or more"):
        lik_ops.warmup(place.device, torch.float32, 8, 3, Ld=0)
    with pytest.raises(ValueError, match="warmup: top_k: expected 1 or more"):
        lik_ops.warmup(place.device, torch.float32, 8, 3, top_k=(5, 0))
    with pytest.raises(ValueError, match="warmup: backward: expected one of"):
        lik_ops.warmup(place.device, torch.float32, 8, 3, backward="fast")
    with pytest.raises(TypeError, match="expected float16"):
        lik_ops.warmup(place.device, torch.int32, 8, 3)
