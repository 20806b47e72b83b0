"""Test that a call launches the kernel that `lik_ops.info` reports."""

import re
from dataclasses import replace

import pytest
import torch

import lik_ops
from lik_ops import backends, info
from lik_ops.ops.fast_path import eager

pytest.importorskip("triton", reason="the plans are those of the Triton backend")
from lik_ops.csrc_triton.common.arguments import KernelConfig, Sm90Config
from lik_ops.gpu import backend as cuda
from lik_ops.gpu import choose, triton_versions
from lik_ops.gpu.forward import generic as cuda_plain
from lik_ops.gpu.forward import packed as packed_forward
from lik_ops.gpu.forward import quantized
from lik_ops.gpu.forward import sm90_quantized as numbers
from lik_ops.gpu.runtime import arguments as cuda_arguments
from lik_ops.gpu.runtime import launcher
from lik_ops.gpu.tuning import architectures, sm90_configs


def test_info_prints_fallback_messages(monkeypatch, capsys):
    monkeypatch.setattr(launcher, "fallback_messages", {"maxsim_fast": "lik_ops: maxsim_fast does not compile"})
    monkeypatch.setattr(triton_versions, "is_tested_version", lambda: False)
    info.main([])
    printed = capsys.readouterr().out
    assert "fallback lik_ops: maxsim_fast does not compile" in printed
    assert f"newer than {triton_versions.format_newest()}, so plain kernels compute" in printed


def test_compile_option_calls_maxsim_with_given_sizes(monkeypatch, capsys):
    sizes = []
    monkeypatch.setattr(info, "maxsim", lambda Q, D: sizes.append((Q.dtype, Q.shape, D.shape)))
    info.main(["--compile", "--nq", "2", "--lq", "3", "--d", "4"])
    assert (torch.float32, (2, 3, 4), (1000, 300, 4)) in sizes


ARCHITECTURES = [replace(a, processors=132) for a in (*architectures.ARCHITECTURES.values(), architectures.INTERPRETER)]
SM_90 = next(a for a in ARCHITECTURES if a.name == "sm_90")
SIZES = [  # Nq, Nd, Lq, Ld
    (1, 300, 32, 300),
    (64, 64, 32, 70),
    (64, 64, 64, 64),
    (4, 20, 300, 64),
    (64, 3, 32, 64),
    (1, 2, 1, 5),
]


@pytest.fixture
def launched(monkeypatch):
    """Run the Triton backend on CPU tensors with a given architecture, and record its forward launches."""
    found = []
    arch = [None]
    monkeypatch.setattr(backends, "select_backend", lambda device, dtype: cuda)
    for module in (choose, cuda_arguments, cuda_plain, numbers, quantized, packed_forward):
        monkeypatch.setattr(module, "architecture", lambda device: arch[0])

    def launch(kernel, grid, args, options):
        if kernel.__name__.startswith("maxsim_forward"):
            found.append((kernel.__name__, grid, args, options))

    monkeypatch.setattr(launcher, "launch", launch)

    def call(arch_of_call, Q, D):
        found.clear()
        arch[0] = arch_of_call
        eager.clear_call_caches()
        scores = lik_ops.maxsim(Q, D)
        assert not scores._is_view()  # autograd would prevent callers from writing to a view
        return found

    yield call
    eager.clear_call_caches()


def parse_info(text):
    """Return the kernel and the numbers in the output of info."""
    numbers = {what: int(n) for n, what in re.findall(r"(\d+) (rows|tokens|features|warps|stages|programs)", text)}
    return text.split()[0], numbers, "documents split first" in text


def describe_launch(name, grid, args, options):
    """Return the kernel and the numbers of a launch."""
    config = args[-1]
    if isinstance(config, KernelConfig):
        numbers = {"rows": config.BM, "tokens": config.BN, "features": config.BD}
        numbers |= {"warps": options["num_warps"], "stages": options["num_stages"]}
        return name, numbers, False
    rows = sm90_configs.LARGE_D_TILE_ROWS
    if isinstance(config, Sm90Config):
        rows = config.MMA_ROWS if config.SMALL_M else 4 * config.MMA_ROWS
    split_first = isinstance(config, Sm90Config) and config.PRECOMPUTED_TERMS
    return name, {"rows": rows, "tokens": config.BN, "stages": config.STAGES, "programs": grid[0]}, split_first


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda a: a.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_info_reports_the_launched_kernel(arch, dtype, launched):
    kernels = set()
    for d in (16, 100, 128, 256):
        for Nq, Nd, Lq, Ld in SIZES:
            Q, D = torch.zeros(Nq, Lq, d, dtype=dtype), torch.zeros(Nd, Ld, d, dtype=dtype)
            expected = parse_info(info.describe_kernel(arch, dtype, Nq, Nd, Lq, Ld, d))
            launches = launched(arch, Q, D)
            assert {str(describe_launch(*launch)) for launch in launches} == {str(expected)}, (d, Nq, Nd, Lq, Ld)
            kernels.add((expected[0], expected[2]))
    assert ("maxsim_forward_sm90" in {name for name, _ in kernels}) == (arch.name == "sm_90")
    split_first = arch.name == "sm_90" and dtype is torch.float32
    assert (("maxsim_forward_sm90", True) in kernels) == split_first


@pytest.mark.parametrize(("Nq", "Lq", "Ld"), [(1, 32, 300), (1, 32, 180), (16, 32, 300), (2, 1024, 64), (3, 5, 20)])
def test_info_names_the_kernel_of_int8_documents(Nq, Lq, Ld, launched):
    Q, D = torch.randn(Nq, Lq, 64), torch.randn(200, Ld, 64)
    expected = info.describe_int8_kernel(SM_90, Q.dtype, Nq, len(D), Lq, Ld, 64)
    kernels = [describe_launch(*launch) for launch in launched(SM_90, Q, lik_ops.quantize(D))]
    if Ld >= 64:
        assert kernels == [parse_info(expected)]
    else:
        assert expected == "maxsim_forward_packed on sm_90" and kernels[0][0] == "maxsim_forward_packed"


def test_info_names_the_split_plan_of_fp32():
    text = info.describe_kernel(SM_90, torch.float32, 64, 1000, 64, 300, 128)
    tile = "256 rows x 64 tokens, 4 stages, 128 programs, documents split first"
    assert text == f"maxsim_forward_sm90 on sm_90: {tile}"
