"""Test launches on a GPU: compilations, hooks, CUDA graphs, streams, threads, and descriptors."""

import logging
import threading
from types import SimpleNamespace

import pytest
import torch
import triton

import lik_ops

from ..support.common import INTERPRETING

if INTERPRETING:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.tools.tensor_descriptor import TensorDescriptor

from lik_ops.gpu import triton_versions
from lik_ops.gpu.runtime import launcher


def tensors(Nq=8, Nd=8, Lq=32, Ld=64, d=64, **options):
    return [
        torch.randn(n, length, d, device="cuda", dtype=torch.bfloat16, **options) for n, length in ((Nq, Lq), (Nd, Ld))
    ]


@pytest.fixture
def compilations(monkeypatch):
    """Return a list of the kernels that Triton compiles, by name."""
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
    assert launcher._compiled_kernels and all(bound.direct for bound in launcher._compiled_kernels.values())


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 100])
def test_other_sizes_do_not_recompile(compilations, d):
    def call(Nq, Nd, Lq, Ld):
        Q, D = tensors(Nq, Nd, Lq, Ld, d, requires_grad=True)
        q_mask, d_mask = (torch.rand(t.shape[:2], device="cuda") > 0.3 for t in (Q, D))
        for options in ({}, {"q_weight": torch.rand(q_mask.shape, device="cuda")}):
            for backward in ("lowmem", "unified"):
                scores = lik_ops.maxsim(Q, D, q_mask, d_mask, backward=backward, **options)
                torch.autograd.grad(scores, (Q, D), torch.randn_like(scores))
        with torch.no_grad():
            lik_ops.maxsim(Q, D)

    # Trigger each kernel once. Argmax lists use blocks of a power of two, with vectors of 16 rows or single rows.
    # Documents with few query rows use no lists. Many rows and documents use the specialized forward.
    for sizes in ((8, 8, 32, 64), (7, 9, 31, 70), (16, 33, 29, 96), (5, 7, 17, 128), (40, 48, 32, 200)):
        call(*sizes)
    compilations.clear()
    for sizes in ((8, 11, 32, 65), (11, 16, 21, 80), (15, 40, 32, 90), (6, 5, 19, 100), (33, 50, 32, 210)):
        call(*sizes)
    assert not compilations


@pytest.mark.gpu
@pytest.mark.parametrize("normalize", [False, True])
def test_a_first_forward_compiles_its_backward(compilations, normalize):
    Q, D = tensors(24, 40, 32, 150, 88, requires_grad=True)  # no other test has 88 features
    found = []
    for _ in range(4):  # compiles, is captured, and is replayed
        scores = lik_ops.maxsim(Q, D, normalize=normalize)
        assert found or "maxsim_grad_queries" in compilations
        compilations.clear()
        found.append((scores, *torch.autograd.grad(scores.sum(), (Q, D))))
        assert not compilations
    assert all(torch.equal(x, y) for others in found[1:] for x, y in zip(found[0], others, strict=True))


@pytest.mark.gpu
def test_warmup_leaves_nothing_to_compile(compilations):
    options = {"q_mask": True, "d_mask": True, "normalize": True, "argmax": True, "training": True}
    lik_ops.warmup("cuda", torch.bfloat16, 40, 24, Nq=(1, 16), Ld=(20, 200), **options)
    compilations.clear()
    for Nq, Ld in ((1, 33), (16, 150), (14, 3)):  # 16 divides the rows: argmax values are read as vectors
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
def test_search_after_warmup_does_not_compile_topk(compilations):
    lik_ops.warmup("cuda", torch.bfloat16, 16, 4, Ld=70, Nd=(2, 200), top_k=100)
    compilations.clear()
    Q = tensors(1, 1, 4, 1, 16)[0]
    for Nd in (50, 3_000, 20_000, 300_000):
        D = torch.randn(Nd, 1, 16, device="cuda", dtype=Q.dtype).expand(-1, 70, -1)
        lik_ops.retrieve(Q, D, 100)
    assert "maxsim_best" not in compilations


@pytest.mark.gpu
@torch.no_grad()
def test_unaligned_tensors_and_reused_addresses():
    Q, D = tensors()
    expected = lik_ops.maxsim(Q, D)
    for _ in range(3):  # by plan, then directly
        assert torch.equal(lik_ops.maxsim(Q, D), expected)
        for offset in (1, 8):
            memory = torch.empty(D.numel() + offset, dtype=D.dtype, device="cuda")
            moved = memory[offset:].view(D.shape).copy_(D)
            assert torch.equal(lik_ops.maxsim(Q, moved), expected)
    # A tensor of another shape at a reused address needs another descriptor.
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
    # torch would poison memory that a graph writes, so this mode is off.
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
def test_kernels_launch_on_the_current_stream():
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
def test_log_describes_how_kernels_are_launched(caplog):
    with caplog.at_level(logging.DEBUG, logger="lik_ops"), torch.no_grad():
        Q, D = tensors(3, 4, 19, 23, 56)
        lik_ops.maxsim(Q, D.half().bfloat16())
    assert "maxsim_forward" in caplog.text and "goes straight to lik_ops.gpu.backend" in caplog.text


def test_cuda_context_is_created_before_encoding_descriptors(monkeypatch):
    """Triton encodes descriptors by the driver, which has no context on a thread without launches."""
    log = []
    event = SimpleNamespace(record=lambda: log.append("context"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    bound = launcher.CompiledKernel.__new__(launcher.CompiledKernel)
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
def test_first_launch_of_a_thread_may_use_a_descriptor():
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
