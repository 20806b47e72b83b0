"""Test the fast path of ragged calls: used without watchers, equal in all results, and without extra tensors."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

import lik_ops
from lik_ops import backends
from lik_ops.core.plan_cache import plans
from lik_ops.core.segments import PackedArgs
from lik_ops.ops.fast_path import eager, watchers

from ...support.common import CUDA, INTERPRETER, INTERPRETING
from .test_eager import FunctionSeen, Seen, Wrapped

pytest.importorskip("triton", reason="only the plans of the Triton backend go this way")
from lik_ops.gpu import backend as cuda
from lik_ops.gpu.forward import packed as cuda_ragged
from lik_ops.gpu.runtime import launcher, memory

PLACES = [INTERPRETER] if INTERPRETING else [pytest.param(CUDA, marks=pytest.mark.gpu)]
somewhere = pytest.mark.parametrize("place", PLACES, ids=str)
without_kernels = pytest.mark.skipif(INTERPRETING, reason="stands for a GPU's launches")
# The interpreter computes an argmax one element at a time.
QUERIES, DOCUMENTS = ((3, 0, 8, 1, 4), (5, 0, 1, 9, 2, 3)) if INTERPRETING else ((3, 0, 20, 1, 7), (5, 0, 1, 30, 2, 11))


def inputs(device="cpu", dtype=torch.float32, d=16):
    """Return packed, dense, and padded tokens of five queries and six documents, with all segment arrays."""

    def draw(*shape):
        return torch.randn(*shape, d).to(device, dtype)

    def bounds(lengths):
        return torch.tensor([0, *lengths], device=device).cumsum(0)

    x = SimpleNamespace(Q=draw(sum(QUERIES)), D=draw(sum(DOCUMENTS)), cu_q=bounds(QUERIES), cu_d=bounds(DOCUMENTS))
    x.int_q, x.int_d = x.cu_q.int(), x.cu_d.int()
    x.dense_q, x.dense_d, x.padded = draw(5, 9), draw(6, 12), draw(5, 3, 12)
    x.w, x.dense_w = torch.randn(sum(QUERIES), device=device), torch.randn(5, 9, device=device)
    x.dense_m, x.dense_n = torch.rand(5, 9, device=device) > 0.3, torch.rand(6, 12, device=device) > 0.3
    chosen = torch.randint(6, (5, 3), device=device)
    x.offsets, x.lengths = x.cu_d[:-1][chosen], x.cu_d.diff()[chosen]
    x.pairs = torch.stack([torch.randint(n, (9,), device=device) for n in (5, 6)], 1)
    # Two queries and some candidates have an invalid length.
    x.q_lengths = torch.tensor([9, 0, 3, 10, -1], device=device)
    x.d_lengths = torch.randint(-1, 14, (5, 3), device=device)
    return x


CALLS = {
    "varlen": lambda x: lik_ops.maxsim_varlen(x.Q, x.D, x.cu_q, x.cu_d),
    "varlen, int32, weights": lambda x: lik_ops.maxsim_varlen(x.Q, x.D, x.int_q, x.int_d, q_weight=x.w, normalize=True),
    "varlen, dense queries": lambda x: lik_ops.maxsim_varlen(x.dense_q, x.D, None, x.cu_d),
    "varlen, dense documents": lambda x: lik_ops.maxsim_varlen(x.Q, x.dense_d, x.cu_q),
    "varlen, both dense": lambda x: lik_ops.maxsim_varlen(x.dense_q, x.dense_d, q_weight=x.dense_w),
    "candidates": lambda x: lik_ops.maxsim_candidates_varlen(x.Q, x.D, x.offsets, x.lengths, cu_seqlens_q=x.cu_q),
    "candidates, dense queries": lambda x: lik_ops.maxsim_candidates_varlen(
        x.dense_q, x.D, x.offsets, x.lengths, q_weight=x.dense_w
    ),
    "pairs": lambda x: lik_ops.maxsim_pair_list(
        x.Q, x.D, x.pairs, cu_seqlens_q=x.cu_q, cu_seqlens_d=x.cu_d, max_seqlen_q=max(QUERIES)
    ),
    "pairs, dense": lambda x: lik_ops.maxsim_pair_list(x.dense_q, x.dense_d, x.pairs, x.dense_m, x.dense_n),
    "pairs, a bound that is too small": lambda x: lik_ops.maxsim_pair_list(
        x.Q, x.D, x.pairs, cu_seqlens_q=x.cu_q, cu_seqlens_d=x.cu_d, max_seqlen_q=3
    ),
    "padded": lambda x: lik_ops.maxsim_padded(x.dense_q, x.padded, x.q_lengths, x.d_lengths),
    "padded, weights": lambda x: lik_ops.maxsim_padded(
        x.dense_q, x.padded, x.q_lengths, x.d_lengths, q_weight=x.dense_w, normalize=True
    ),
    "list": lambda x: lik_ops.maxsim(x.dense_q, [x.dense_d[0, :3], x.dense_d[1]]),
    "list of pairs": lambda x: lik_ops.maxsim_pairs([x.dense_q[0], x.dense_q[1, :4]], x.dense_d[:2]),
}
WINNERS = {
    "varlen": lambda x: lik_ops.maxsim_varlen_with_argmax(x.Q, x.D, x.cu_q, x.cu_d),
    "candidates": lambda x: lik_ops.maxsim_candidates_varlen_with_argmax(x.dense_q, x.D, x.offsets, x.lengths),
    "pairs": lambda x: lik_ops.maxsim_pair_list_with_argmax(x.dense_q, x.D, x.pairs, cu_seqlens_d=x.cu_d),
}
# All calls but packing, which needs a kernel.
LAID_OUT = [name for name in CALLS if not name.startswith("list")]


def finite(scores):
    return torch.where(scores.isfinite(), scores, 0)


def assert_same(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def taken(monkeypatch):
    """Record for each call whether it used the fast path."""
    ways, real = [], eager.try_maxsim_ragged

    def spy(*args, **options):
        found = real(*args, **options)
        ways.append(found is not None)
        return found

    monkeypatch.setattr(eager, "try_maxsim_ragged", spy)
    return ways


@somewhere
@pytest.mark.parametrize("name", CALLS)
def test_fast_path_and_operators_have_the_same_bits(place, name, taken):
    x = inputs(place.device, torch.float16)
    with place.use(), torch.no_grad():
        found = CALLS[name](x)
        assert taken == [True]
        with Seen() as seen:
            expected = CALLS[name](x)
    assert not taken[-1]
    assert any(op in seen.names for op in ("lik.maxsim_ragged_fwd.default", "lik.maxsim_fwd.default"))
    assert_same(found, expected)


@somewhere
@pytest.mark.parametrize("name", WINNERS)
def test_fast_path_and_operators_have_the_same_argmax(place, name, taken):
    x = inputs(place.device, torch.float16)
    with place.use():
        found = WINNERS[name](x)
        assert taken == [True]
        with Seen():
            expected = WINNERS[name](x)
    for a, b in zip(found, expected, strict=True):
        assert_same(a, b)


GRADIENTS = ("varlen, int32, weights", "varlen, dense queries", "varlen, both dense", "candidates", "pairs, dense")


@somewhere
@pytest.mark.parametrize("name", GRADIENTS)
def test_fast_path_and_operators_have_the_same_gradients(place, name, taken):
    x = inputs(place.device, torch.float16)
    leaves = [t.requires_grad_() for t in (x.Q, x.D, x.dense_q, x.dense_d, x.w, x.dense_w)]
    results = []
    for way in (contextlib.nullcontext(), Seen()):
        with place.use(), way:
            scores = CALLS[name](x)
            grads = torch.autograd.grad(finite(scores).sum(), leaves, allow_unused=True)
        results.append([scores.detach(), *grads])
    assert taken[0] and not any(taken[1:])
    assert {"lik.maxsim_ragged_fwd.default", "lik.maxsim_ragged_bwd.default"} <= set(way.names)
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_same(a, b)


@somewhere
def test_argmax_has_no_gradient_and_is_recomputed_if_not_saved(place, taken):
    x = inputs(place.device, torch.float16)
    x.dense_q.requires_grad_()
    documents = [x.dense_d[0, :3], x.dense_d[1]]
    with place.use():
        scores, argmax = lik_ops.maxsim_with_argmax(x.dense_q, documents)
        assert taken == [True] and scores.requires_grad and not argmax.requires_grad
        (kept,) = torch.autograd.grad(scores.sum(), x.dense_q)
        again = lik_ops.maxsim(x.dense_q, documents, recompute=True)
        assert_same(torch.autograd.grad(again.sum(), x.dense_q)[0], kept)


@somewhere
def test_double_backward_and_modified_saved_tensors_raise(place):
    x = inputs(place.device, torch.float16)
    x.Q.requires_grad_()
    with place.use():
        scores = finite(CALLS["varlen"](x)).sum()
        (grad,) = torch.autograd.grad(scores, x.Q, create_graph=True)
        with pytest.raises(NotImplementedError, match="no double backward"):
            grad.sum().backward()
        scores = finite(CALLS["varlen"](x)).sum()
        x.cu_d.add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            scores.backward()


class Bound:
    """Stand-in for a compiled kernel that records its launches."""

    def __init__(self):
        self.launched = []

    def direct(self, x, y, z, stream, args):
        self.launched.append(((x, y, z), args))

    def encoded(self, n, descriptor):
        return (("descriptor", *descriptor.shape, *descriptor.block_shape),)


@pytest.fixture
def launches(monkeypatch):
    """Run the Triton backend on CPU tensors, and record the arguments and results of `launcher.launch`."""
    found = []

    def launch(kernel, grid, args, options):
        found.append(((*grid, 1, 1), launcher.describe_args(kernel, args)[1], Bound()))
        return found[-1][2]

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(backends, "select_backend", lambda device, dtype: cuda)
    monkeypatch.setattr(cuda_ragged, "current_device", lambda: None)
    monkeypatch.setattr(cuda_ragged, "raw_stream", lambda index: 0)
    monkeypatch.setattr(memory, "allocate_cuda", None)
    eager.clear_call_caches()
    yield found
    eager.clear_call_caches()


def flat(values):
    """Yield arguments in the form of C, with 0 for absent ones and without outputs, which are new in each call."""
    for value in values:
        if isinstance(value, (tuple, list)) and not (value and value[0] == "descriptor"):
            yield from flat(value)
        else:
            yield 0 if value is None else value


_OUT = 6  # index in the arguments of `maxsim_forward_packed` of memory that each call allocates


def as_launched(values, bound):
    """Return the arguments of `launcher.launch` in the form that it passes on."""
    values = [bound.encoded(0, v) if hasattr(v, "block_shape") else v for v in values]
    return list(flat([*values[:_OUT], *values[_OUT + 1 :]]))


@without_kernels
@pytest.mark.parametrize("name", LAID_OUT)
@torch.no_grad()
def test_direct_and_general_launch_have_equal_arguments(name, launches):
    x = inputs(dtype=torch.bfloat16)
    CALLS[name](x)
    CALLS[name](x)
    ((grid, args, bound),) = launches
    ((direct_grid, direct),) = bound.launched
    assert direct_grid == grid
    assert list(flat([*direct[:_OUT], *direct[_OUT + 1 :]])) == as_launched(args, bound)
    scores, winners = direct[_OUT]
    assert scores != 0 and winners is None


@without_kernels
@pytest.mark.parametrize("name", LAID_OUT)
@torch.no_grad()
def test_only_the_allocation_runs_before_the_launch(name, launches, monkeypatch):
    """Only the allocation of the scores may run. Any other operation would cost as much as the launch."""
    x = inputs(dtype=torch.bfloat16)
    CALLS[name](x)
    monkeypatch.setattr(watchers, "is_dispatch_idle", lambda: True)
    with Seen() as seen:
        CALLS[name](x)
    assert seen.names == ["aten.empty_strided.default"]
    assert len(launches) == 1


def packed_plans():
    return [x for x in plans.values() if isinstance(x, cuda_ragged.PackedPlan)]


@without_kernels
@torch.no_grad()
def test_direct_launch_serves_other_row_counts(launches):
    """Ragged calls seldom repeat their rows. Calls with equal query counts and similar lengths reuse the plan."""
    for lengths in ((5, 7, 2), (30, 1, 4), (90, 8, 6, 4, 0), (1,)):
        D, cu_d = lik_ops.pack([torch.randn(n, 16) for n in lengths])
        for queries in ((3, 9), (5, 16), (0, 30)):
            Q, cu_q = lik_ops.pack([torch.randn(n, 16) for n in queries])
            assert lik_ops.maxsim_varlen(Q, D, cu_q, cu_d).shape == (2, len(lengths))
    assert len(launches) == 1 and len(launches[0][2].launched) == 11
    assert len(packed_plans()) == 1


@without_kernels
@torch.no_grad()
def test_unaligned_tensors_use_their_own_kernel(launches):
    x = inputs(dtype=torch.bfloat16)
    memory = torch.zeros(x.D.numel() + 1, dtype=x.D.dtype)
    moved = memory[1:].view(x.D.shape).copy_(x.D)
    assert moved.data_ptr() % 16
    for _ in range(3):
        lik_ops.maxsim_varlen(x.Q, moved, x.cu_q, x.cu_d)
        lik_ops.maxsim_varlen(x.Q, x.D, x.cu_q, x.cu_d)
    assert [args[2] is None for _, args, _ in launches] == [True, False]
    assert [len(bound.launched) for *_, bound in launches] == [2, 2]


@without_kernels
@pytest.mark.parametrize("format", ["int8", "uint8"])
@torch.no_grad()
def test_quantized_documents_use_direct_launches(format, launches):
    """int8 uses two kernels, and the first writes terms of the query rows. Both get the same arguments as before."""
    x = inputs(dtype=torch.bfloat16)
    made = lik_ops.quantize(x.D, format)
    for _ in range(3):
        lik_ops.maxsim_candidates_varlen(x.Q, made, x.offsets, x.lengths, cu_seqlens_q=x.cu_q)
    assert len(launches) == (2 if format == "int8" else 1)
    for grid, args, bound in launches:
        assert len(bound.launched) == 2
        new = (1, 2) if len(args) == 6 else (3, 5, _OUT)  # memory of each call, including lengths
        for direct_grid, direct in bound.launched:
            assert direct_grid == grid
            kept = [list(flat([y for n, y in enumerate(values) if n not in new])) for values in (direct, args)]
            kept[1] = [y for y in kept[1] if not hasattr(y, "block_shape")]
            kept[0] = [y for y in kept[0] if not isinstance(y, tuple)]
            assert kept[0] == kept[1]
    if format == "int8":
        (_, _, terms), (_, _, scores) = launches
        for (_, made_by), (_, read_by) in zip(terms.launched, scores.launched, strict=True):
            assert read_by[3][:2] == made_by[1:3] and read_by[3][2] == len(x.Q)


@without_kernels
@torch.no_grad()
def test_empty_calls_launch_no_kernel(launches):
    x = inputs()
    for _ in range(2):
        assert lik_ops.maxsim_varlen(x.Q, x.D, x.cu_q[:1], x.cu_d).shape == (0, 6)
        assert lik_ops.maxsim_varlen(x.Q, x.D, x.cu_q, x.cu_d[:1]).shape == (5, 0)
        assert lik_ops.maxsim_pair_list(x.dense_q, x.dense_d, x.pairs[:0]).shape == (0,)
    assert not launches


@without_kernels
@torch.no_grad()
def test_number_of_plans_tiles_and_descriptors_is_bounded(launches, monkeypatch):
    monkeypatch.setattr(plans, "capacity", 6)
    monkeypatch.setattr(cuda_ragged, "_MAX_TILES", 3)
    monkeypatch.setattr(cuda_ragged, "_MAX_DESCRIPTORS", 3)
    kept = []
    for d in (16, 32, 48, 64, 80):
        D, cu_d = torch.randn(9, d), torch.tensor([0, 9])
        for n in (1, 2, 3, 4, 5) * 2:
            kept.append(D[:n].clone())
            lik_ops.maxsim_varlen(torch.randn(n, 1, d), kept[-1], None, cu_d)
            assert len(plans) <= 6
            for plan in packed_plans():
                assert len(plan.tiles) <= 3 and len(plan.descriptors) <= 3


def try_fast_path(x, **changes):
    y = SimpleNamespace(**{**vars(x), **changes})
    return eager.try_maxsim_ragged(y.Q, y.D, y.cu_q, y.cu_d, q_weight=y.w)


@without_kernels
def test_each_kind_of_watcher_disables_the_fast_path(launches):
    x = inputs()
    assert try_fast_path(x) is not None
    ways = []
    torch.vmap(lambda q: ways.append(try_fast_path(x)) or q)(x.Q)
    torch.func.grad(lambda q: ways.append(try_fast_path(x)) or q.sum())(x.Q)
    with forward_ad.dual_level():
        ways.append(try_fast_path(x))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        ways.append(try_fast_path(x))
    with torch.autocast("cpu", torch.bfloat16):
        ways.append(try_fast_path(x))
    for mode in (Seen(), FunctionSeen(), torch.device("cpu"), lik_ops.checks()):
        with mode:
            ways.append(try_fast_path(x))
    with torch._C._AutoDispatchBelowAutograd():  # nothing may be recorded here
        ways.append(try_fast_path(x, Q=x.Q.clone().requires_grad_()))
    assert ways == [None] * 10
    for name in ("Q", "D", "cu_q", "cu_d", "w"):
        odd = getattr(x, name)
        assert try_fast_path(x, **{name: odd.as_subclass(Wrapped)}) is None
        assert try_fast_path(x, **{name: odd.to("meta")}) is None
    assert try_fast_path(x, D=torch._neg_view(x.D)) is None
    assert try_fast_path(x) is not None


@without_kernels
@torch.no_grad()
def test_unsupported_arguments_bypass_the_fast_path(launches):
    x = inputs()
    odd_rows = torch.randn(sum(DOCUMENTS), 32)[:, ::2]
    assert try_fast_path(x, D=odd_rows) is not None
    changes = [
        {"Q": x.Q[None]},
        {"Q": x.Q[0]},
        {"D": x.dense_d},
        {"D": x.D[:, :3]},
        {"D": x.D.half()},
        {"D": x.D.to_sparse()},
        {"D": [x.D]},
        {"cu_q": x.cu_q[:0]},
        {"cu_q": x.cu_q[None]},
        {"cu_q": x.cu_q.float()},
        {"cu_d": x.cu_d[::2]},  # not contiguous
        {"cu_d": x.cu_d.tolist()},
        {"w": x.w[1:]},
        {"w": x.w.double()},
    ]
    for change in changes:
        for _ in range(2):
            assert try_fast_path(x, **change) is None, change
    dense = x.dense_q, x.D, None
    for options in ({"normalize": 1}, {"backward": "fast"}, {"pairs": x.pairs[:, :1], "offsets": x.cu_d}):
        assert eager.try_maxsim_ragged(*dense, **{"offsets": x.cu_d, **options}) is None
    assert eager.try_maxsim_ragged(*dense, x.offsets[:4], x.lengths) is None
    assert eager.try_maxsim_ragged(*dense, x.offsets[:, :2], x.lengths) is None
    assert eager.try_maxsim_ragged(*dense, x.cu_d, pairs=x.pairs, max_seqlen_q=-1) is None
    even = {"lengths": x.d_lengths, "q_lengths": x.q_lengths}
    assert eager.try_maxsim_ragged(x.dense_q, x.padded, **even) is not None
    assert eager.try_maxsim_ragged(x.dense_q, x.padded[:, :2], **even) is None
    assert eager.try_maxsim_ragged(x.dense_q, x.padded[:, :, ::2], **even) is not None
    assert eager.try_maxsim_ragged(x.dense_q[:, :5], x.padded, **even) is None  # rows with uneven spacing
    assert eager.try_maxsim_ragged(x.dense_q, x.padded, lengths=x.d_lengths, q_lengths=x.q_lengths[:3]) is None
    assert eager.try_maxsim_ragged(x.dense_q, x.padded, lengths=x.d_lengths) is None
    assert eager.try_maxsim_ragged(x.dense_q, x.dense_d, q_lengths=x.q_lengths) is None


BAD = {
    "no bounds": lambda x: lik_ops.maxsim_varlen(x.Q, x.D, x.cu_q[:0], x.cu_d),
    "bounds of floats": lambda x: lik_ops.maxsim_varlen(x.Q, x.D, x.cu_q.float(), x.cu_d),
    "bounds elsewhere": lambda x: lik_ops.maxsim_varlen(x.Q, x.D, x.cu_q, x.cu_d.to("meta")),
    "dtype": lambda x: lik_ops.maxsim_varlen(x.Q, x.D.double(), x.cu_q, x.cu_d),
    "features": lambda x: lik_ops.maxsim_varlen(x.Q, x.D[:, :3], x.cu_q, x.cu_d),
    "weight": lambda x: lik_ops.maxsim_varlen(x.Q, x.D, x.cu_q, x.cu_d, q_weight=x.w[1:]),
    "backward": lambda x: lik_ops.maxsim_varlen(x.Q, x.D, x.cu_q, x.cu_d, backward="fast"),
    "no offsets": lambda x: lik_ops.maxsim_candidates_varlen(x.dense_q, x.D, None, x.lengths),
    "no lengths": lambda x: lik_ops.maxsim_candidates_varlen(x.dense_q, x.D, x.cu_d, None),
    "lists": lambda x: lik_ops.maxsim_candidates_varlen(x.dense_q, x.D, x.offsets[1:], x.lengths[1:]),
    "no pairs": lambda x: lik_ops.maxsim_pair_list(x.dense_q, x.dense_d, None),
    "triples": lambda x: lik_ops.maxsim_pair_list(x.dense_q, x.dense_d, x.offsets),
    "bound": lambda x: lik_ops.maxsim_pair_list(x.dense_q, x.dense_d, x.pairs, max_seqlen_q=-1),
    "no query lengths": lambda x: lik_ops.maxsim_padded(x.dense_q, x.padded, None, x.d_lengths),
    "no document lengths": lambda x: lik_ops.maxsim_padded(x.dense_q, x.dense_d, x.q_lengths, None),
    "padded lists": lambda x: lik_ops.maxsim_padded(x.dense_q, x.padded[:4], x.q_lengths, x.d_lengths[:4]),
}


@without_kernels
@pytest.mark.parametrize("bad", BAD)
def test_errors_match_the_operator_on_every_call(bad, launches):
    x = inputs()
    errors = []
    for mode in (Seen(), torch.no_grad(), torch.enable_grad(), torch.enable_grad()):
        with mode, pytest.raises((TypeError, ValueError)) as error:
            BAD[bad](x)
        errors.append((error.type, str(error.value)))
    assert len(set(errors)) == 1, errors
    assert not launches


def test_compiled_callers_keep_the_operator():
    x = inputs()
    graphs = []

    def backend(module, _):
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module

    compiled = torch.compile(lambda: CALLS["varlen"](x) * 2, backend=backend, fullgraph=True)
    assert_same(compiled(), CALLS["varlen"](x) * 2)
    assert any("lik.maxsim_ragged_fwd" in target for target in graphs[0])


def test_packed_args_convert_to_explicit_segments():
    x = inputs()
    spelled = PackedArgs(
        x.dense_q, x.dense_d, *[None] * 5, x.dense_m, x.dense_n, x.dense_w, 5, 6, False, 45, 72, 9
    ).ragged()
    assert spelled.Q.shape == (45, 16) and spelled.D.shape == (72, 16)
    assert spelled.cu_seqlens_q.tolist() == list(range(0, 46, 9))
    assert spelled.d_offsets.tolist() == list(range(0, 72, 12)) and spelled.d_lengths.tolist() == [12] * 6
    assert spelled.q_mask.shape == spelled.q_weight.shape == (45,) and spelled.d_mask.shape == (72,)
    packed = PackedArgs(
        x.Q, x.D, x.cu_q, x.cu_d, *[None] * 6, 5, 6, False, *(sum(n) for n in (QUERIES, DOCUMENTS)), 31
    ).ragged()
    assert packed.cu_seqlens_q is x.cu_q and packed.d_lengths.tolist() == list(DOCUMENTS)
