"""Test that generic kernels run with a warning if a fast kernel does not compile or Triton is too new."""

import sys
import warnings
from dataclasses import replace

import pytest
import torch

import lik_ops
from lik_ops import reference

from ..support.common import INTERPRETING

pytest.importorskip("triton", reason="without Triton there is nothing to fall back from")
from lik_ops.csrc_triton.common.arguments import SizeArgs
from lik_ops.gpu import triton_versions
from lik_ops.gpu.forward import sm90_dense as cuda_specialized
from lik_ops.gpu.forward import sm90_packed as cuda_rows
from lik_ops.gpu.forward.generic import make_generic_plan
from lik_ops.gpu.runtime import gluon, launcher
from lik_ops.gpu.tuning import architectures, sm90_configs

SM_90 = replace(architectures.ARCHITECTURES["sm_90"], processors=132)


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch):
    for registry in ("fallback_messages", "_compile_failures"):
        monkeypatch.setattr(launcher, registry, {})


def does_not_compile(*args, **options):
    raise launcher.KernelCompileError("maxsim_fast", "PTXASError: no")


@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
def test_a_kernel_that_does_not_compile_is_tried_once(monkeypatch):
    tried = []

    def warmup(*args, **options):
        tried.append(options)
        raise ValueError("first line\nlast line")

    kernel = type("Kernel", (), {"__name__": "maxsim_fast", "warmup": staticmethod(warmup), "params": []})()
    monkeypatch.setattr(launcher, "_get_compile_state", lambda: ())
    monkeypatch.setattr(launcher.triton_versions, "fix_cache_key", lambda kernel: None)
    for _ in range(2):
        with pytest.raises(
            launcher.KernelCompileError, match=r"maxsim_fast does not compile with triton .*: last line"
        ):
            launcher.get_compiled_kernel(kernel, (), {"num_warps": 4})  # type: ignore[arg-type]
    assert len(tried) == 1 and tried[0]["enable_fp_fusion"] is True


def test_fallback_warns_once():
    error = launcher.KernelCompileError("maxsim_fast", "PTXASError: no")
    with pytest.warns(RuntimeWarning, match="maxsim_fast does not compile .* maxsim_forward computes instead"):
        launcher.warn_fallback(error, "maxsim_forward")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launcher.warn_fallback(error, "maxsim_forward")


@pytest.mark.skipif(not INTERPRETING, reason="the plain kernel runs in the interpreter, or on a GPU below")
@pytest.mark.parametrize("argmax_dtype", [None, torch.int16])
@pytest.mark.parametrize("plan", ["specialized", "masked"])
def test_generic_kernel_computes_if_fast_kernel_fails(monkeypatch, plan, argmax_dtype):
    Q, D = torch.randn(2, 4, 16, dtype=torch.float16), torch.randn(3, 20, 16, dtype=torch.float16)
    d_mask = torch.rand(3, 20) > 0.3 if plan == "masked" else None
    winners = argmax_dtype is not None
    if plan == "masked":
        options = {"argmax": winners, "dense": True}
        choice = sm90_configs.configure_row_maxima(SM_90, Q.dtype, 256, 1000, 32, 16, **options)
        found = cuda_rows.MaskedPlan(choice, Q, D, argmax_dtype)
        monkeypatch.setattr(cuda_rows, "_launch_row_maxima", does_not_compile)
        monkeypatch.setattr(found, "score_part", does_not_compile)
    else:
        choice = sm90_configs.configure_sm90(SM_90, SizeArgs(256, 256, 32, 300), 16, normalize=False, argmax=winners)
        found = cuda_specialized.Sm90Plan(choice, Q, D, argmax_dtype)
        monkeypatch.setattr(found, "_launch", does_not_compile)
    argmax = found.allocate_argmax() if winners else None
    with pytest.warns(RuntimeWarning, match="maxsim_fast"):
        scores = found.scores(found.scores_shape, Q, D, None, d_mask, None, argmax)
    torch.testing.assert_close(scores, reference.maxsim(Q, D, None, d_mask).float())
    if winners:
        plain = make_generic_plan(Q, D, False, argmax_dtype)
        expected = plain.allocate_argmax()
        plain.scores(plain.scores_shape, Q, D, None, d_mask, None, expected)
        assert torch.equal(argmax, expected)


@pytest.mark.skipif(INTERPRETING, reason="Gluon kernels are never interpreted")
def test_a_gluon_module_that_fails_disables_only_its_own_kernels(monkeypatch):
    monkeypatch.setitem(sys.modules, "lik_ops.csrc_triton.forward.sm90.large_d", None)
    gluon.load_module.cache_clear()
    try:
        assert gluon.load_module("forward.sm90.large_d") is None
        assert gluon.load_module("forward.sm90.dense") is not None
    finally:
        gluon.load_module.cache_clear()


@pytest.mark.skipif(INTERPRETING, reason="Gluon kernels are never interpreted")
def test_newer_triton_warns_once_and_disables_gluon_kernels(monkeypatch):
    monkeypatch.setattr(
        triton_versions,
        "get_triton_release",
        lambda: (triton_versions.NEWEST_TESTED[0], triton_versions.NEWEST_TESTED[1] + 1),
    )
    for cached in (triton_versions.is_tested_version, gluon.load_module, gluon.load_kernels):
        cached.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="is newer than"):
            assert gluon.load_kernels() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert gluon.load_kernels() is None and not triton_versions.is_tested_version()
    finally:
        for cached in (triton_versions.is_tested_version, gluon.load_module, gluon.load_kernels):
            cached.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETING, reason="compiles")
@pytest.mark.parametrize("call", ["dense", "masked", "varlen"])
def test_calls_fall_back_on_a_gpu(monkeypatch, call):
    def fails(kernel, *args):
        if kernel.__name__ in ("maxsim_forward_sm90", "maxsim_row_maxima_sm90"):
            raise launcher.KernelCompileError(kernel.__name__, "PTXASError: no")
        return bind(kernel, *args)

    bind = launcher.get_compiled_kernel
    Q, D = (torch.randn(n, L, 128, device="cuda", dtype=torch.bfloat16) for n, L in ((64, 32), (200, 300)))
    d_mask = torch.rand(200, 300, device="cuda") > 0.2 if call == "masked" else None

    def score():
        if call == "varlen":
            bounds = torch.arange(0, 60001, 300, device="cuda")
            return lik_ops.maxsim_varlen(Q, D.flatten(0, 1), None, bounds)
        return lik_ops.maxsim(Q, D, None, d_mask)

    expected = score()
    monkeypatch.setattr(launcher, "get_compiled_kernel", fails)
    with pytest.warns(RuntimeWarning, match="computes instead"):
        scores = score()
    assert torch.equal(scores, expected)
    assert launcher.fallback_messages
