"""What a compiled kernel knows of its arguments, that this holds for every call it serves, and how it is launched."""

import logging
import threading
from types import SimpleNamespace

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

import lik_ops
from lik_ops.csrc_triton import (
    backward_documents,
    backward_lists,
    backward_queries,
    backward_unified,
    forward,
    forward_ragged,
)
from lik_ops.csrc_triton.arguments import Config, Counts, Output, PackedSizes, Segments, Sizes, Terms
from lik_ops.csrc_triton.backward_arguments import Pieces, RowSums, TileLists, Upstream

from .support import INTERPRETING

if INTERPRETING:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit
from triton.tools.tensor_descriptor import TensorDescriptor

from lik_ops.gpu import arguments as cuda_arguments
from lik_ops.gpu import launcher, memory, triton_versions
from lik_ops.gpu import plain as cuda_plain

CONFIG = Config(64, 64, 128, 32, 4, False, True, False, 0, "tf32x3")


def arguments(kernel, Nq=8, K=8, Lq=32, Ld=64, d=64, masks=True, dtype=torch.bfloat16, candidates=False, offset=0):
    """What the backend passes to `kernel` for contiguous tensors, which start `offset` elements into their memory."""

    def tensor(*shape, dtype=dtype):
        n = offset + torch.Size(shape).numel()
        return torch.empty(n + 8, dtype=dtype)[offset:n].view(shape)

    Q, D = tensor(Nq, Lq, d), tensor(*((Nq,) if candidates else ()), K, Ld, d)
    q_mask, d_mask = (tensor(*t.shape[:-1], dtype=torch.bool) if masks else None for t in (Q, D))
    weight = tensor(Nq, Lq, dtype=torch.float32) if masks else None
    groups = cuda_arguments.queries_of(Q, q_mask, weight), cuda_arguments.documents_of(D, d_mask)
    argmax = tensor(K, Nq, Lq, dtype=torch.int16)
    up = Upstream(tensor(Nq, K, dtype=torch.float32), K, 1, argmax, Nq, K, Lq, Ld)
    sizes = (Nq, K, Lq, Ld, d)
    if kernel is forward.maxsim_forward:
        return (*groups, None, Output(up.grad_scores, None), None, Sizes(*sizes[:4]), d, CONFIG)
    if kernel is forward_ragged.maxsim_forward_ragged:  # padded, with lengths
        lengths = (tensor(n, dtype=torch.int64) for n in (Nq, Nq * K))
        segments = Segments(None, None, next(lengths), None, next(lengths), Lq, Ld)
        packed = PackedSizes(Nq, K, Nq * Lq, Nq * K * Ld, Lq)
        return (*groups, None, None, None, segments, Output(up.grad_scores, None), packed, d, 0, CONFIG)
    if kernel is backward_unified.maxsim_finish:
        return (groups[1], groups[0], RowSums(up.grad_scores, K, Lq), Q, None, d, CONFIG)
    starts = tensor(K * (Nq * Lq + 1), dtype=torch.int32)
    lists = TileLists(starts, starts, 0, 1, 1)
    if kernel is backward_lists.maxsim_count_winners:
        return (up, lists, Nq * Lq, CONFIG)
    if kernel is backward_documents.maxsim_grad_documents:
        return (*groups, up, lists, Nq * Lq, Pieces(None, Nq * Lq), D, d, CONFIG)
    more = (7,) if kernel is backward_unified.maxsim_scatter else ()
    return (*groups, up, Q, D, d, *more, CONFIG)


KERNELS = (
    forward.maxsim_forward,
    forward_ragged.maxsim_forward_ragged,
    backward_queries.maxsim_grad_queries,
    backward_documents.maxsim_grad_documents,
    backward_unified.maxsim_scatter,
    backward_unified.maxsim_finish,
)


def description(kernel, args):
    return launcher.describe(kernel, args)[0]


several_kernels = pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)


def test_scales_of_each_token_or_of_all_take_one_kernel_and_minima_another():
    kernel = forward_ragged.maxsim_forward_ragged
    args, scale = arguments(kernel), torch.empty(64)
    terms = Terms(torch.empty(2, 4, 64, dtype=torch.int8), scale, scale, 4, 0)

    def described(*counts, terms=terms):
        return description(kernel, (*args[:3], terms, Counts(*counts), *args[5:]))

    plain = described(scale, 1, None, None)
    assert (
        described(scale[:1], 0, None, None)
        == plain
        == described(scale, 1, None, None, terms=terms._replace(query_room=16))
    )
    different = [
        described(scale[1:], 1, None, None),
        described(scale, 1, scale, 1),
        described(scale, 1, scale[1:], 1),
        described(scale, 1, None, None, terms=None),
        description(kernel, args),
    ]
    assert described(scale, 1, scale, 1) == described(scale, 0, scale, 0)
    assert len({plain, *different}) == 1 + len(different)


def test_lists_know_of_rows_only_whether_16_divides_them():
    """Winners are then loaded as vectors: the one size that two kernels are compiled for."""
    kernel = backward_lists.maxsim_count_winners
    known = {Nq: description(kernel, arguments(kernel, Nq=Nq, Lq=5)) for Nq in (16, 32, 7, 9)}
    assert known[16] == known[32] != known[7] == known[9]


def triton_specialises(kernel, args):
    """Triton's own description of arguments: (type, hint) of each leaf. No hint is None, a constant "constexpr"."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
    _, specialization, _ = binder(*args)

    def leaves(kind, hint):
        if isinstance(kind, tuple):
            hints = hint if isinstance(hint, tuple) else (hint,) * len(kind)
            for inner, inner_hint in zip(kind, hints, strict=True):
                yield from leaves(inner, inner_hint)
        else:
            yield kind, hint

    return [leaf for kind, hint in specialization[:-1] for leaf in leaves(kind, hint)]


sizes = st.integers(2, 40)


@several_kernels
@given(a=st.tuples(sizes, sizes, sizes, sizes), b=st.tuples(sizes, sizes, sizes, sizes), candidates=st.booleans())
@pytest.mark.parametrize("d", [64, 100, 8])
def test_sizes_compile_nothing_anew(kernel, d, a, b, candidates):
    first, second = (arguments(kernel, *n, d, candidates=candidates) for n in (a, b))
    assert description(kernel, first) == description(kernel, second)
    representatives = (launcher._representatives(kernel, args) for args in (first, second))
    one, other = (triton_specialises(kernel, args) for args in representatives)
    assert one == other


@several_kernels
@given(
    n=st.tuples(*[st.integers(1, 40)] * 4),
    d=st.sampled_from((1, 8, 16, 100, 128)),
    masks=st.booleans(),
    candidates=st.booleans(),
    offset=st.sampled_from((0, 1, 8)),
)
def test_what_is_compiled_holds_for_every_call_it_serves(kernel, n, d, masks, candidates, offset):
    """A hint or constant in the compiled kernel is one that Triton finds in the arguments themselves."""
    args = arguments(kernel, *n, d, masks=masks, candidates=candidates, offset=offset)
    found = triton_specialises(kernel, args)
    for (kind, hint), (true_kind, true_hint) in zip(
        triton_specialises(kernel, launcher._representatives(kernel, args)), found, strict=True
    ):
        if kind == "constexpr":
            assert (true_kind, true_hint) == (kind, hint)
        elif true_kind != "constexpr":
            assert kind == true_kind
            assert hint in (None, "", true_hint)
    wanted = [hint for kind, hint in found if kind == "*bf16"]
    got = [h for k, h in triton_specialises(kernel, launcher._representatives(kernel, args)) if k == "*bf16"]
    assert wanted == got, "tensors lose or gain alignment"


@several_kernels
def test_what_decides_the_code_is_told_apart(kernel):
    def described(**options):
        return description(kernel, arguments(kernel, **options))

    plain = described()
    assert described(Nq=9, K=3, Lq=5, Ld=70) == plain
    different = [
        described(masks=False),
        described(dtype=torch.float16),
        described(offset=1),
        described(d=100),
        described(d=1),
        description(kernel, (*arguments(kernel)[:-1], CONFIG._replace(BN=128))),
    ]
    assert len({plain, *different}) == 1 + len(different)


def test_descriptions_tell_apart_what_is_equal_or_lines_up():
    """Compiled kernels are looked up by descriptions: what is compiled otherwise may not share one."""
    x, short = torch.empty(2, 16), torch.empty(16)
    tiles = TensorDescriptor(x, [2, 16], [16, 1], [1, 16])
    groups = cuda_arguments.queries_of(x[None], None, None), cuda_arguments.documents_of(x[None], None)
    every = [(1,), (2,), (16,), (2**31,), (True,), (1.0,), (None,), (x,), (short[1:],), (x, None), (x, 1), (tiles,)]
    every += [(kind(group),) for group in groups for kind in (tuple, type(group)._make)]
    every += [(x.dtype, True), (CONFIG,), (tuple(CONFIG),), (tuple(x.shape),), ((None, 1),), ((1, None),)]
    every += [((1, 2**31),), ((2**31, 1),), ((1, -1),)]
    keys = [description(Kernel(len(args)), args) for args in every]
    assert len(set(keys)) == len(every)


class Kernel:
    """Has parameters that are no constants."""

    def __init__(self, parameters):
        self.params = [SimpleNamespace(is_constexpr=False, do_not_specialize=False)] * parameters


def test_constants_of_other_types_are_told_apart():
    kernel = backward_lists.maxsim_count_winners
    args = arguments(kernel)
    constant = next(n for n, p in enumerate(kernel.params) if p.is_constexpr)
    described = {description(kernel, (*args[:constant], x, *args[constant + 1 :])) for x in (1, True, 1.0)}
    assert len(described) == 3


def test_a_direct_launch_is_of_winners_that_begin_as_those_it_was_compiled_for(monkeypatch):
    """A chunk of documents fills a part of the winners, which begins anywhere."""
    ways = []

    class Bound:
        encoded = staticmethod(lambda n, descriptor: (None,))
        direct = staticmethod(lambda *args: ways.append("direct"))

    def launch(*args):
        ways.append("compiled")
        return Bound()

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(cuda_plain, "current_device", lambda: None)
    monkeypatch.setattr(cuda_plain, "raw_stream", lambda index: 0)
    monkeypatch.setattr(memory, "empty_cuda", None)
    Q, D = torch.randn(1, 3, 16), torch.randn(2, 16, 16)
    winners = torch.empty(3, 1, 3, dtype=torch.int16)
    plan = cuda_plain.plain_plan(Q, D, None, None, None, False, torch.int16)
    assert winners.data_ptr() % 16 == 0 and winners[1:].data_ptr() % 16
    for argmax in (winners[1:], winners[:2], winners[1:], winners[:2]):
        plan.scores((1, 2), Q, D, None, None, None, argmax)
    assert ways == ["compiled", "compiled", "compiled", "direct"]


def test_strides_that_are_vectorised_count_all_or_none():
    kernel = forward.maxsim_forward
    Q, D, *rest = arguments(kernel)
    for stride in ("stride_doc", "stride_l"):
        odd = (Q, D._replace(**{stride: 72}), *rest)
        assert description(kernel, odd) != description(kernel, (Q, D, *rest))
        hints = [hint for _, hint in triton_specialises(kernel, launcher._representatives(kernel, odd))]
        assert hints[10] == "D" and "D" not in hints[11:14]
    wide = (Q, D._replace(stride_doc=2**31), *rest)
    assert ("i64", "D") in triton_specialises(kernel, launcher._representatives(kernel, wide))


class Compiled:
    """Stands for Triton's compiled kernel where there is no GPU."""

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        return lambda *args: self.launched.append((grid, args))


def test_unknown_versions_of_triton_launch_by_triton(monkeypatch):
    monkeypatch.setattr(triton_versions, "release", lambda: (9, 9))
    compiled = Compiled()
    bound = launcher.Bound(compiled, 0)
    assert bound.direct is None and "by triton" in launcher.way()
    bound.launch((4,), (1, 2), [1, 2])
    assert compiled.launched == [((4, 1, 1), (1, 2))]


@pytest.mark.parametrize("version", triton_versions.DIRECT)
def test_a_triton_without_the_expected_attributes_is_said_and_launches_itself(monkeypatch, caplog, version):
    monkeypatch.setattr(triton_versions, "release", lambda: version)
    monkeypatch.setattr(torch.version, "hip", None)
    with caplog.at_level(logging.WARNING, logger="lik_ops"):
        assert launcher.Bound(Compiled(), 0).direct is None
    assert "not as expected" in caplog.text


def test_hooks_are_noticed():
    assert not launcher.hooks_set()
    for hook in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        hook.add(print)
        assert launcher.hooks_set()
        hook.remove(print)
    assert not launcher.hooks_set()


# What only a GPU shows


def tensors(Nq=8, Nd=8, Lq=32, Ld=64, d=64, **options):
    return [
        torch.randn(n, length, d, device="cuda", dtype=torch.bfloat16, **options) for n, length in ((Nq, Lq), (Nd, Ld))
    ]


@pytest.fixture
def compilations(monkeypatch):
    """The kernels that Triton compiles, by name."""
    found = []

    def hook(*args, fn, **more):
        found.append(fn.name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
    return found


@pytest.mark.gpu
@pytest.mark.skipif(torch.version.hip is not None, reason="the short launch is for NVIDIA GPUs")
def test_known_versions_launch_directly():
    assert triton_versions.launches_directly(), "a new Triton: see whether its launcher is as DIRECT expects"
    with torch.no_grad():
        lik_ops.maxsim(*tensors())
    assert launcher._bound and all(bound.direct for bound in launcher._bound.values())


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 100])
def test_no_size_compiles_anything_anew(compilations, d):
    def call(Nq, Nd, Lq, Ld):
        Q, D = tensors(Nq, Nd, Lq, Ld, d, requires_grad=True)
        q_mask, d_mask = (torch.rand(t.shape[:2], device="cuda") > 0.3 for t in (Q, D))
        for options in ({}, {"q_weight": torch.rand(q_mask.shape, device="cuda")}):
            for backward in ("lowmem", "unified"):
                scores = lik_ops.maxsim(Q, D, q_mask, d_mask, backward=backward, **options)
                torch.autograd.grad(scores, (Q, D), torch.randn_like(scores))
        with torch.no_grad():
            lik_ops.maxsim(Q, D)

    # One of each: lists of winners are made in blocks of a power of two, vectors of 16 rows or single ones, a document
    # that meets few rows takes no lists, many rows and documents the specialised forward.
    for sizes in ((8, 8, 32, 64), (7, 9, 31, 70), (16, 33, 29, 96), (5, 7, 17, 128), (40, 48, 32, 200)):
        call(*sizes)
    compilations.clear()
    for sizes in ((8, 11, 32, 65), (11, 16, 21, 80), (15, 40, 32, 90), (6, 5, 19, 100), (33, 50, 32, 210)):
        call(*sizes)
    assert not compilations


@pytest.mark.gpu
def test_warmup_leaves_nothing_to_compile(compilations):
    options = {"q_mask": True, "d_mask": True, "normalize": True, "argmax": True, "training": True}
    lik_ops.warmup("cuda", torch.bfloat16, 40, 24, Nq=(1, 16), Ld=(20, 200), **options)
    compilations.clear()
    for Nq, Ld in ((1, 33), (16, 150), (14, 3)):  # as many rows as 16 divides: winners are read in vectors
        Q, D = tensors(Nq, 11, 24, Ld, 40, requires_grad=True)
        masks = [torch.ones(t.shape[:2], dtype=torch.bool, device="cuda") for t in (Q, D)]
        scores = lik_ops.maxsim(Q, D, *masks, normalize=True)
        torch.autograd.grad(scores.sum(), (Q, D))
        with torch.no_grad():
            lik_ops.maxsim(Q, D, *masks, normalize=True)
            lik_ops.maxsim_with_argmax(Q, D, *masks, normalize=True)
    assert not compilations


@pytest.mark.gpu
@torch.no_grad()
def test_warmup_of_a_search_leaves_nothing_to_compile(compilations):
    lik_ops.warmup("cuda", torch.bfloat16, 16, 4, Ld=70, Nd=(2, 200), top_k=100)
    compilations.clear()
    Q = tensors(1, 1, 4, 1, 16)[0]
    for Nd in (50, 3_000, 20_000, 300_000):
        D = torch.randn(Nd, 1, 16, device="cuda", dtype=Q.dtype).expand(-1, 70, -1)
        lik_ops.retrieve(Q, D, 100)
    assert "maxsim_best" not in compilations


@pytest.mark.gpu
@torch.no_grad()
def test_tensors_that_begin_anywhere_and_descriptors_used_again():
    Q, D = tensors()
    expected = lik_ops.maxsim(Q, D)
    for _ in range(3):  # by plan, then directly
        assert torch.equal(lik_ops.maxsim(Q, D), expected)
        for offset in (1, 8):
            memory = torch.empty(D.numel() + offset, dtype=D.dtype, device="cuda")
            moved = memory[offset:].view(D.shape).copy_(D)
            assert torch.equal(lik_ops.maxsim(Q, moved), expected)
    # Another tensor where one has been, of another shape: the descriptor has to be another.
    memory = torch.randn(8 * 200 * 64, dtype=D.dtype, device="cuda")
    for Nd, Ld in ((8, 200), (8, 100), (4, 200), (16, 100), (8, 200)):
        there = memory[: Nd * Ld * 64].view(Nd, Ld, 64)
        for _ in range(2):
            assert torch.equal(lik_ops.maxsim(Q, there), lik_ops.maxsim(Q, there.clone()))


@pytest.mark.gpu
@torch.no_grad()
def test_launch_hooks_see_every_launch():
    Q, D = tensors()
    expected = lik_ops.maxsim(Q, D)
    seen = []

    def hook(metadata):
        seen.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert torch.equal(lik_ops.maxsim(Q, D), expected)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["maxsim_forward"]
    lik_ops.maxsim(Q, D)
    assert len(seen) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("backward", ["lowmem", "unified"])
def test_capture_and_replay_in_a_cuda_graph(backward):
    Q, D = tensors(requires_grad=True)
    mask = torch.rand(8, 64, device="cuda") > 0.3
    upstream = torch.randn(8, 8, device="cuda")

    def step():
        with torch.no_grad():
            alone = lik_ops.maxsim(Q, D, None, mask)
        scores = lik_ops.maxsim(Q, D, None, mask, backward=backward)
        return alone, scores.detach(), *torch.autograd.grad(scores, (Q, D), upstream)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    # What torch would poison is memory that a graph writes: left alone here.
    torch.use_deterministic_algorithms(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        with torch.no_grad():
            for t in (Q, D, upstream):
                t.normal_()
            mask.logical_not_()
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            torch.testing.assert_close(
                a, b, rtol=0 if backward == "lowmem" else 1e-2, atol=0 if backward == "lowmem" else 1e-2
            )


@pytest.mark.gpu
def test_a_stream_that_is_current_is_launched_on():
    Q, D = tensors()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which draws the tensors
    with torch.no_grad(), torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        Q.mul_(2)
        scores = lik_ops.maxsim(Q, D)
    stream.synchronize()
    with torch.no_grad():
        assert torch.equal(scores, lik_ops.maxsim(Q, D))


@pytest.mark.gpu
def test_the_log_says_how_kernels_are_launched(caplog):
    with caplog.at_level(logging.DEBUG, logger="lik_ops"), torch.no_grad():
        Q, D = tensors(3, 4, 19, 23, 56)
        lik_ops.maxsim(Q, D.half().bfloat16())
    assert "maxsim_forward" in caplog.text and "goes straight to lik_ops.gpu.backend" in caplog.text


def test_descriptors_are_encoded_where_a_thread_has_a_context(monkeypatch):
    """Triton does that by the driver, which knows no context of a thread that nothing was launched on."""
    log = []
    event = SimpleNamespace(record=lambda: log.append("context"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    bound = launcher.Bound.__new__(launcher.Bound)
    bound._encoded, bound._descriptor_metadata = {}, [None]
    bound._encode = lambda descriptor, metadata: log.append("encoded") or (descriptor,)
    tiles = [TensorDescriptor(torch.empty(n, 64), [n, 64], [64, 1], [16, 64]) for n in (16, 32)]

    def run():
        for x in (*tiles, *tiles):
            bound.encoded(0, x)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert log == ["context", "encoded", "encoded"]


@pytest.mark.gpu
def test_a_new_thread_may_begin_with_a_descriptor():
    found = []
    made = [(torch.randn(8, 32, 128), torch.randn(100, 64, 128)) for _ in range(2)]
    made = [[x.cuda().bfloat16() for x in pair] for pair in made]
    expected = [lik_ops.maxsim(*pair) for pair in made for _ in range(3)]
    copies = [[x.clone() for x in pair] for pair in made]

    def run():
        found.extend(lik_ops.maxsim(*pair) for pair in copies for _ in range(3))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(found) == 6 and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
