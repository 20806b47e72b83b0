"""Test what a compiled kernel assumes of its arguments, that this holds for every call, and how it is launched."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from lik_ops.csrc_triton.backward import queries as backward_queries
from lik_ops.csrc_triton.backward import unified as backward_unified
from lik_ops.csrc_triton.backward.arguments import PartialSumArgs, RowSumArgs, TileBucketArgs, UpstreamArgs
from lik_ops.csrc_triton.backward.documents import buckets
from lik_ops.csrc_triton.backward.documents import dense as dense_documents
from lik_ops.csrc_triton.common.arguments import (
    DequantArgs,
    KernelConfig,
    OutputArgs,
    PackedSizeArgs,
    SegmentArgs,
    SizeArgs,
    TermArgs,
)
from lik_ops.csrc_triton.forward.generic import kernel as generic_forward

from ..support.common import INTERPRETING

if INTERPRETING:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit
from triton.tools.tensor_descriptor import TensorDescriptor

from lik_ops.gpu import triton_versions
from lik_ops.gpu.runtime import arguments as cuda_arguments
from lik_ops.gpu.runtime import launcher

CONFIG = KernelConfig(64, 64, 128, 32, 4, False, True, False, 0, "tf32x3")


def arguments(kernel, Nq=8, K=8, Lq=32, Ld=64, d=64, masks=True, dtype=torch.bfloat16, candidates=False, offset=0):
    """Return the backend's arguments for `kernel` with contiguous tensors at element `offset` of their memory."""

    def tensor(*shape, dtype=dtype):
        n = offset + torch.Size(shape).numel()
        return torch.empty(n + 8, dtype=dtype)[offset:n].view(shape)

    Q, D = tensor(Nq, Lq, d), tensor(*((Nq,) if candidates else ()), K, Ld, d)
    q_mask, d_mask = (tensor(*t.shape[:-1], dtype=torch.bool) if masks else None for t in (Q, D))
    weight = tensor(Nq, Lq, dtype=torch.float32) if masks else None
    groups = cuda_arguments.make_query_args(Q, q_mask, weight), cuda_arguments.make_document_args(D, d_mask)
    argmax = tensor(K, Nq, Lq, dtype=torch.int16)
    up = UpstreamArgs(tensor(Nq, K, dtype=torch.float32), K, 1, argmax, Nq, K, Lq, Ld)
    sizes = (Nq, K, Lq, Ld, d)
    if kernel is generic_forward.maxsim_forward:
        return (*groups, None, OutputArgs(up.grad_scores, None), SizeArgs(*sizes[:4]), d, CONFIG)
    if kernel is generic_forward.maxsim_forward_packed:  # padded, with lengths
        lengths = (tensor(n, dtype=torch.int64) for n in (Nq, Nq * K))
        segments = SegmentArgs(None, None, next(lengths), None, next(lengths), Lq, Ld)
        packed = PackedSizeArgs(Nq, K, Nq * Lq, Nq * K * Ld, Lq)
        return (*groups, None, None, None, segments, OutputArgs(up.grad_scores, None), packed, d, 0, CONFIG)
    if kernel is backward_unified.maxsim_finish:
        return (groups[1], groups[0], RowSumArgs(up.grad_scores, K, Lq), Q, None, d, CONFIG)
    starts = tensor(K * (Nq * Lq + 1), dtype=torch.int32)
    lists = TileBucketArgs(starts, starts, 0, 1, 1)
    if kernel is buckets.maxsim_count_argmax:
        return (up, lists, Nq * Lq, CONFIG)
    if kernel is dense_documents.maxsim_grad_documents:
        return (*groups, up, lists, Nq * Lq, PartialSumArgs(None, Nq * Lq), D, d, CONFIG)
    if kernel is backward_queries.maxsim_grad_queries:
        return (*groups, up, None, Q, None, d, CONFIG)
    more = (7,) if kernel is backward_unified.maxsim_scatter else ()
    return (*groups, up, Q, D, d, *more, CONFIG)


KERNELS = (
    generic_forward.maxsim_forward,
    generic_forward.maxsim_forward_packed,
    backward_queries.maxsim_grad_queries,
    dense_documents.maxsim_grad_documents,
    backward_unified.maxsim_scatter,
    backward_unified.maxsim_finish,
)


def description(kernel, args):
    return launcher.describe_args(kernel, args)[0]


several_kernels = pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)


def test_single_and_per_token_scales_share_a_kernel():
    kernel = generic_forward.maxsim_forward_packed
    args, scale = arguments(kernel), torch.empty(64)
    terms = TermArgs(torch.empty(2, 4, 64, dtype=torch.int8), scale, 4)

    def described(*counts, terms=terms):
        return description(kernel, (*args[:3], terms, DequantArgs(*counts), *args[5:]))

    plain = described(scale, 1, None, None)
    assert (
        described(scale[:1], 0, None, None)
        == plain
        == described(scale, 1, None, None, terms=terms._replace(query_capacity_rows=16))
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


def test_argmax_list_kernel_specializes_rows_divisible_by_16():
    """If 16 divides the rows, argmax loads use vectors. No other size compiles a second kernel."""
    kernel = buckets.maxsim_count_argmax
    known = {Nq: description(kernel, arguments(kernel, Nq=Nq, Lq=5)) for Nq in (16, 32, 7, 9)}
    assert known[16] == known[32] != known[7] == known[9]


def specialize_with_triton(kernel, args):
    """Return Triton's own (type, hint) of each leaf. No hint is None, and a constant is "constexpr"."""
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
def test_sizes_do_not_recompile(kernel, d, a, b, candidates):
    first, second = (arguments(kernel, *n, d, candidates=candidates) for n in (a, b))
    assert description(kernel, first) == description(kernel, second)
    representatives = (launcher._make_representatives(kernel, args) for args in (first, second))
    one, other = (specialize_with_triton(kernel, args) for args in representatives)
    assert one == other


@several_kernels
@given(
    n=st.tuples(*[st.integers(1, 40)] * 4),
    d=st.sampled_from((1, 8, 16, 100, 128)),
    masks=st.booleans(),
    candidates=st.booleans(),
    offset=st.sampled_from((0, 1, 8)),
)
def test_compiled_assumptions_hold_for_the_arguments(kernel, n, d, masks, candidates, offset):
    """Each hint or constant in the compiled kernel is also one that Triton finds in the arguments."""
    args = arguments(kernel, *n, d, masks=masks, candidates=candidates, offset=offset)
    found = specialize_with_triton(kernel, args)
    for (kind, hint), (true_kind, true_hint) in zip(
        specialize_with_triton(kernel, launcher._make_representatives(kernel, args)), found, strict=True
    ):
        if kind == "constexpr":
            assert (true_kind, true_hint) == (kind, hint)
        elif true_kind != "constexpr":
            assert kind == true_kind
            assert hint in (None, "", true_hint)
    wanted = [hint for kind, hint in found if kind == "*bf16"]
    got = [h for k, h in specialize_with_triton(kernel, launcher._make_representatives(kernel, args)) if k == "*bf16"]
    assert wanted == got, "tensors lose or gain alignment"


@several_kernels
def test_descriptions_distinguish_code_changing_arguments(kernel):
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


def test_descriptions_distinguish_similar_arguments():
    """Compiled kernels are looked up by descriptions, so arguments that compile differently may not share one."""
    x, short = torch.empty(2, 16), torch.empty(16)
    tiles = TensorDescriptor(x, [2, 16], [16, 1], [1, 16])
    groups = cuda_arguments.make_query_args(x[None], None, None), cuda_arguments.make_document_args(x[None], None)
    every = [(1,), (2,), (16,), (2**31,), (True,), (1.0,), (None,), (x,), (short[1:],), (x, None), (x, 1), (tiles,)]
    every += [(kind(group),) for group in groups for kind in (tuple, type(group)._make)]
    every += [(x.dtype, True), (CONFIG,), (tuple(CONFIG),), (tuple(x.shape),), ((None, 1),), ((1, None),)]
    every += [((1, 2**31),), ((2**31, 1),), ((1, -1),)]
    keys = [description(Kernel(len(args)), args) for args in every]
    assert len(set(keys)) == len(every)


class Kernel:
    """Stand-in for a kernel without constexpr parameters."""

    def __init__(self, parameters):
        self.params = [SimpleNamespace(is_constexpr=False, do_not_specialize=False)] * parameters


def test_descriptions_distinguish_types_of_constants():
    kernel = buckets.maxsim_count_argmax
    args = arguments(kernel)
    constant = next(n for n, p in enumerate(kernel.params) if p.is_constexpr)
    described = {description(kernel, (*args[:constant], x, *args[constant + 1 :])) for x in (1, True, 1.0)}
    assert len(described) == 3


def test_vectorized_strides_are_specialized_together():
    kernel = generic_forward.maxsim_forward
    Q, D, *rest = arguments(kernel)
    for stride in ("stride_doc", "stride_l"):
        odd = (Q, D._replace(**{stride: 72}), *rest)
        assert description(kernel, odd) != description(kernel, (Q, D, *rest))
        hints = [hint for _, hint in specialize_with_triton(kernel, launcher._make_representatives(kernel, odd))]
        assert hints[10] == "D" and "D" not in hints[11:14]
    wide = (Q, D._replace(stride_doc=2**31), *rest)
    assert ("i64", "D") in specialize_with_triton(kernel, launcher._make_representatives(kernel, wide))


class Compiled:
    """Stand-in for Triton's compiled kernel without a GPU."""

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        return lambda *args: self.launched.append((grid, args))


def test_unknown_triton_versions_use_triton_launcher(monkeypatch):
    monkeypatch.setattr(triton_versions, "get_triton_release", lambda: (9, 9))
    compiled = Compiled()
    bound = launcher.CompiledKernel(compiled, 0)
    assert bound.direct is None and "by triton" in launcher.describe_launch_path()
    bound.launch((4,), (1, 2), [1, 2])
    assert compiled.launched == [((4, 1, 1), (1, 2))]


@pytest.mark.parametrize("version", triton_versions.DIRECT_LAUNCHERS)
def test_missing_triton_attributes_warn_and_disable_direct_launch(monkeypatch, caplog, version):
    monkeypatch.setattr(triton_versions, "get_triton_release", lambda: version)
    monkeypatch.setattr(torch.version, "hip", None)
    with caplog.at_level(logging.WARNING, logger="lik_ops"):
        assert launcher.CompiledKernel(Compiled(), 0).direct is None
    assert "not as expected" in caplog.text


def test_threads_do_not_exchange_launch_functions(monkeypatch):
    """Like Triton 3.6, `SharedModule` reads the launch function of a kernel from a module that other kernels change."""
    module = SimpleNamespace()

    class SharedModule:
        metadata = None

        def __init__(self, number):
            self.number = number

        @property
        def run(self):
            module.launch = self.number
            time.sleep(0.005)
            return SimpleNamespace(launch=module.launch, global_scratch_size=0, profile_scratch_size=0)

    factories = (lambda compiled: compiled.run.launch), lambda: None
    monkeypatch.setattr(triton_versions, "DIRECT_LAUNCHERS", {triton_versions.get_triton_release(): factories})
    with ThreadPoolExecutor(8) as pool:
        bound = list(pool.map(lambda n: launcher.CompiledKernel(SharedModule(n), 0), range(16)))
    assert [kernel.direct for kernel in bound] == list(range(16))


def test_launch_hooks_are_detected():
    assert not launcher.has_launch_hooks()
    for hook in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        hook.add(print)
        assert launcher.has_launch_hooks()
        hook.remove(print)
    assert not launcher.has_launch_hooks()
