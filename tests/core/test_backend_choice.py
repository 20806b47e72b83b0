"""Test how the environment variable and the context manager select a backend, and how `info` reports it."""

import logging
import threading
from dataclasses import replace

import pytest
import torch

import lik_ops
from lik_ops import backends
from lik_ops.core.settings import get_requested_backend
from lik_ops.portable import backend as portable

CPU = torch.device("cpu")


def test_environment_variable_is_read_per_call(monkeypatch):
    for value in ("portable", "auto", "triton"):
        monkeypatch.setenv("LIK_OPS_BACKEND", value)
        assert get_requested_backend() == value
    monkeypatch.delenv("LIK_OPS_BACKEND")
    assert get_requested_backend() == "auto"


def test_context_manager_wins_nests_and_restores(monkeypatch):
    monkeypatch.setenv("LIK_OPS_BACKEND", "auto")
    with lik_ops.use_backend("portable"):
        assert get_requested_backend() == "portable"
        with lik_ops.use_backend("triton"):
            assert get_requested_backend() == "triton"
        assert get_requested_backend() == "portable"
    assert get_requested_backend() == "auto"
    with pytest.raises(KeyError), lik_ops.use_backend("portable"):
        raise KeyError
    assert get_requested_backend() == "auto"


def test_use_backend_is_thread_local():
    seen = []
    with lik_ops.use_backend("portable"):
        thread = threading.Thread(target=lambda: seen.append(get_requested_backend()))
        thread.start()
        thread.join()
    assert seen == ["auto"]


@pytest.mark.parametrize("bad", ["cuda", "none", "Portable"])
def test_unknown_backend_raises(monkeypatch, bad):
    with pytest.raises(ValueError, match="use_backend: name: expected one of auto, triton, portable"):
        lik_ops.use_backend(bad).__enter__()
    monkeypatch.setenv("LIK_OPS_BACKEND", bad)
    with pytest.raises(ValueError, match="LIK_OPS_BACKEND: expected one of auto, triton, portable"):
        lik_ops.maxsim(torch.randn(2, 3, 4), torch.randn(2, 3, 4))


def test_triton_backend_raises_on_cpu():
    with lik_ops.use_backend("triton"), pytest.raises(RuntimeError, match=r"'triton' cannot compute .* on cpu"):
        lik_ops.maxsim(torch.randn(2, 3, 4), torch.randn(2, 3, 4))


def test_cpu_and_gpu_fp64_select_the_portable_backend(caplog):
    assert backends.select_backend(CPU, torch.float32) is portable
    pytest.importorskip("triton", reason="without Triton, no GPU has kernels")
    with caplog.at_level(logging.DEBUG, logger="lik_ops"):
        assert backends.select_backend(torch.device("cuda", 0), torch.float64) is portable
    assert "no fp64" in caplog.text


@pytest.mark.gpu
def test_gpu_selects_triton_unless_portable_is_requested():
    from lik_ops.gpu import backend as cuda

    device = torch.device("cuda", 0)
    assert backends.select_backend(device, torch.bfloat16) is cuda
    Q, D = torch.randn(2, 8, 16, device=device, requires_grad=True), torch.randn(3, 9, 16, device=device)
    triton_scores = lik_ops.maxsim(Q, D)
    with lik_ops.use_backend("portable"):
        assert backends.select_backend(device, torch.bfloat16) is portable
        scores = lik_ops.maxsim(Q, D)
    torch.testing.assert_close(scores, triton_scores, rtol=1e-5, atol=1e-5)
    scores.sum().backward()  # the portable backward, although it runs on the autograd thread


def test_info_names_the_kernel_that_a_gpu_would_run():
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    from lik_ops import info
    from lik_ops.gpu.tuning.architectures import ARCHITECTURES

    def kernel(name, dtype, Nq, d=128):
        return info.describe_kernel(replace(ARCHITECTURES[name], processors=132), dtype, Nq, 1000, 32, 300, d)

    assert kernel("sm_90", torch.bfloat16, 64).startswith("maxsim_forward_sm90 on sm_90: 256 rows")
    assert kernel("sm_90", torch.bfloat16, 64, 768).startswith("maxsim_forward_sm90_large_d on sm_90: 128 rows")
    assert kernel("sm_90", torch.bfloat16, 1).startswith("maxsim_forward on sm_90: 32 rows")
    assert kernel("sm_90", torch.float32, 64).startswith("maxsim_forward_sm90 on sm_90: 256 rows")
    assert kernel("gfx942", torch.bfloat16, 64).startswith("maxsim_forward on gfx942")
