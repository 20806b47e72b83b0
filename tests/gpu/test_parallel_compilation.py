"""Test on a CPU, with a stand-in compiler, that a first call compiles its kernels and its backward kernels at once."""

import threading

import pytest
import torch

import lik_ops

from ..support.common import INTERPRETING

pytest.importorskip("triton", reason="only the Triton backend compiles")
if INTERPRETING:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from lik_ops.families.soft import gpu as soft
from lik_ops.gpu.runtime import launcher
from lik_ops.ops.fast_path import eager

from ..record_kernels import random_calls
from .test_capture import Bound, flat
from .test_capture import log as launches  # noqa: F401  # a fixture
from .test_launches_sm90 import log as log_on_sm_90  # noqa: F401  # a fixture

SIZES = {"Q": (32, 32, 128), "D": (32, 180, 128)}
FORWARD, LISTS, DOCUMENTS = "maxsim_forward_sm90", "maxsim_list_argmax", "maxsim_grad_documents"
QUERIES = "maxsim_grad_queries"


class Compiler:
    """Stand-in for Triton's compiler that logs kernels, threads, and the launches so far."""

    def __init__(self, launched):
        self.launched, self.compiled, self.threads, self.counts = launched, [], set(), set()
        self.broken = None

    def warmup(self, kernel, args, options, key):
        name = kernel.__name__
        self.compiled.append(name)
        self.threads.add(threading.get_ident())
        self.counts.add(len(self.launched))
        if name == self.broken:
            launcher._compile_failures[key] = "PTXASError: no"
            raise launcher.KernelCompileError(name, "PTXASError: no")
        assert launcher._make_kernel_key(kernel, args, options)[0] == key
        bound = launcher._compiled_kernels[key] = Bound(kernel, self.launched)
        return bound


get_compiled_kernel, compile_kernel = launcher.get_compiled_kernel, launcher._compile_kernel


@pytest.fixture
def compiler(log_on_sm_90, monkeypatch):  # noqa: F811
    found = Compiler(log_on_sm_90)
    monkeypatch.setattr(launcher, "get_compiled_kernel", get_compiled_kernel)
    monkeypatch.setattr(launcher, "ensure_cuda_context", lambda: None)
    monkeypatch.setattr(launcher, "_get_compile_state", lambda: ())
    monkeypatch.setattr(launcher, "_compiled_kernels", {})
    monkeypatch.setattr(launcher, "_compile_failures", {})

    def compile_or_raise(kernel, args, options, key):
        known = key in launcher._compile_failures
        return (compile_kernel if known else found.warmup)(kernel, args, options, key)

    monkeypatch.setattr(launcher, "_compile_kernel", compile_or_raise)
    return found


def step(normalize=False):
    Q, D = (torch.randn(shape).bfloat16().requires_grad_() for shape in SIZES.values())
    scores = lik_ops.maxsim(Q, D, normalize=normalize)
    return scores, lambda: torch.autograd.grad(scores.sum(), (Q, D))


def test_a_forward_compiles_its_backward_before_it_launches(compiler):
    _, run_backward = step()
    assert sorted(compiler.compiled) == sorted((FORWARD, LISTS, DOCUMENTS, QUERIES))
    assert compiler.counts == {0} and threading.get_ident() not in compiler.threads
    assert [name for name, *_ in compiler.launched] == [FORWARD]
    run_backward()
    for _ in range(3):  # recorded, and replayed
        step()[1]()
    assert len(compiler.compiled) == 4
    assert [name for name, *_ in compiler.launched] == [FORWARD, LISTS, DOCUMENTS, QUERIES] * 4


def test_a_call_without_gradients_compiles_no_backward(compiler):
    with torch.no_grad():
        step(normalize=True)
    assert FORWARD in compiler.compiled and not any("grad" in name for name in compiler.compiled)


@pytest.mark.parametrize("broken", [FORWARD, DOCUMENTS])
def test_failed_compilation_is_reported_at_launch_and_not_repeated(compiler, broken):
    compiler.broken = broken
    if broken == FORWARD:
        with pytest.warns(RuntimeWarning, match="maxsim_forward computes instead"):
            step()
        assert [name for name, *_ in compiler.launched] == ["maxsim_forward"]
    else:
        _, run_backward = step()
        with pytest.raises(launcher.KernelCompileError, match=DOCUMENTS):
            run_backward()
    assert compiler.compiled.count(broken) == 1


def test_a_failing_rehearsal_leaves_compilation_to_the_launches(compiler, monkeypatch):
    def fails():
        raise torch.OutOfMemoryError

    monkeypatch.setattr(launcher, "collect_launches", fails)
    step()[1]()
    assert sorted(compiler.compiled) == sorted((FORWARD, LISTS, DOCUMENTS, QUERIES))
    assert compiler.threads == {threading.get_ident()}


def test_a_rehearsal_keeps_no_workspace(compiler, monkeypatch):
    """Each of many workspaces is free before the next one is allocated, as in the call itself."""
    seen, find = [], launcher.find_missing_kernels
    monkeypatch.setattr(launcher, "find_missing_kernels", lambda found: seen.extend(found) or find(found))
    monkeypatch.setattr(soft, "_MAX_SPLIT_BYTES", 1)
    lik_ops.maxsim_soft(torch.randn(2, 4, 64).half(), torch.randn(3, 4096, 64).half(), 0.5)
    tensors = [x for _, _, args, _ in seen for x in flat(args) if isinstance(x, torch.Tensor)]
    assert [kernel.__name__ for kernel, *_ in seen] == ["maxsim_forward_soft", "maxsim_soft_splits"] * 3
    assert tensors and all(x.is_meta or x.data_ptr() % 16 for x in tensors)  # slices of scores are not aligned


def test_without_a_rehearsal_each_launch_compiles_its_kernel(compiler, monkeypatch):
    monkeypatch.setenv("LIK_OPS_REHEARSAL", "0")
    ran, collect = [], launcher.collect_launches
    monkeypatch.setattr(launcher, "collect_launches", lambda: ran.append(1) or collect())
    step()[1]()
    assert compiler.compiled == [name for name, *_ in compiler.launched] == [FORWARD, LISTS, DOCUMENTS, QUERIES]
    assert compiler.counts == {0, 1, 2, 3} and compiler.threads == {threading.get_ident()} and not ran


def test_random_calls_compile_exactly_the_launched_kernels(compiler):
    together = 0
    for name, call in random_calls(3, 40):
        eager.clear_call_caches()
        launcher._compiled_kernels.clear()
        for log in (compiler.compiled, compiler.threads, compiler.launched):
            log.clear()
        try:
            call()
        except (NotImplementedError, ValueError):
            continue
        launched = {kernel for kernel, *_ in compiler.launched}
        assert set(compiler.compiled) == launched, name
        assert len(launched) < 2 or threading.get_ident() not in compiler.threads, name
        together += len(launched) > 1
    assert together > 10


def test_warmup_compiles_the_kernels_of_all_calls_before_the_first_launch(compiler):
    sizes = {"Nq": (1, 32), "Ld": (180, 256), "Nd": 32, "d_mask": True, "argmax": True, "ragged": True}
    made = lik_ops.warmup("cpu", torch.bfloat16, 128, 32, training=True, **sizes)
    assert made[0][0] == f"compilation of {len(compiler.compiled)} kernels"
    assert compiler.counts == {0} and compiler.launched
    assert not any(name.startswith("compilation") for name, _ in made[1:])
