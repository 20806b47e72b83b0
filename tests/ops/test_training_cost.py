"""Test that a training step costs a GPU no kernels and bytes beyond the necessary ones."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import lik_ops

pytestmark = pytest.mark.gpu

MiB = 2**20
CONSTANT = 32 * MiB  # workspace limit of a step, beyond its results and saved tensors
OF_QUERIES = {"maxsim_grad_queries"}
OF_DOCUMENTS = {
    "maxsim_grad_documents",
    "maxsim_grad_long_documents",
    "maxsim_grad_sparse_documents",
    "maxsim_count_argmax",
    "maxsim_scan_counts",
    "maxsim_list_argmax",
    "maxsim_join_pieces",
}
OF_UNIFIED = {"maxsim_scatter", "maxsim_finish"}


@pytest.fixture(autouse=True)
def _as_users_run(_seed_and_poison):
    """Turn off the NaN fill, which costs a kernel, and allow atomic adds."""
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Step:
    """Forward and backward in bf16 with d = 128."""

    name: str
    Nq: int
    Nd: int  # documents, or candidates of each query
    Lq: int
    Ld: int
    candidates: bool = False

    def __str__(self) -> str:
        return self.name

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q, D, and the gradient of the scores."""
        documents = (self.Nq, self.Nd) if self.candidates else (self.Nd,)
        Q, D = (
            torch.randn(*shape, 128, device="cuda", dtype=torch.bfloat16)
            for shape in ((self.Nq, self.Lq), (*documents, self.Ld))
        )
        return Q, D, torch.randn(self.Nq, self.Nd, device="cuda")

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of fp32 scores and int16 argmax values."""
        return self.Nq * self.Nd * (4 + 2 * self.Lq)


STEPS = [
    Step("in-batch", 256, 256, 32, 300),
    Step("long documents", 128, 128, 32, 1024),
    Step("candidates", 256, 16, 32, 1024, candidates=True),
    Step("small pages", 16, 16, 1024, 1024),
]
SMALL = [Step("in-batch", 64, 64, 32, 300), Step("candidates", 64, 4, 32, 300, candidates=True)]


def make_step(Q: Tensor, D: Tensor, upstream: Tensor, needs: str = "QD", **options) -> Callable[[], tuple[Tensor, ...]]:
    """Return a function that computes the gradients of the inputs in `needs`. Other inputs are frozen."""
    Q, D = Q.detach().requires_grad_("Q" in needs), D.detach().requires_grad_("D" in needs)
    wanted = [t for t in (Q, D, options.get("q_weight")) if t is not None and t.requires_grad]
    return lambda: torch.autograd.grad(lik_ops.maxsim(Q, D, **options), wanted, upstream)


def kernels(function: Callable[[], object]) -> list[str]:
    """Return the names of kernels, copies, and fills on the GPU, in order."""
    function()  # compiles
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        function()
        torch.cuda.synchronize()
    names = [event.name for event in recorded.events() if event.device_type == DeviceType.CUDA]
    assert any(name.startswith("maxsim_forward") for name in names), f"the profiler saw no forward: {names}"
    return names


def _settle() -> None:
    """Wait until autograd threads have released the memory of previous calls, which happens after a call returns."""
    torch.cuda.synchronize()
    gc.collect()
    time.sleep(0.05)


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the peak memory of a call beyond the current memory, including its results."""
    function()
    _settle()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def allocated_bytes(function: Callable[[], object]) -> int:
    """Return the total bytes that a call allocates, simultaneous or not."""
    function()
    _settle()
    before = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
    function()
    return torch.cuda.memory_stats()["allocated_bytes.all.allocated"] - before


def test_bytes_are_measured():
    x = torch.empty(8 * MiB, dtype=torch.uint8, device="cuda")
    assert 12 * MiB <= peak_bytes(lambda: x.add(1)[: 4 * MiB].clone()) < 13 * MiB
    assert 16 * MiB <= allocated_bytes(lambda: x.add(1).add(1)) < 17 * MiB


@pytest.mark.parametrize("step", SMALL, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
def test_lowmem_and_unified_run_different_kernels(step, normalize):
    x = step.inputs()
    lowmem, unified = (
        set(kernels(make_step(*x, normalize=normalize, backward=backward))) for backward in ("lowmem", "unified")
    )
    assert lowmem & OF_QUERIES and lowmem & OF_DOCUMENTS and not lowmem & OF_UNIFIED
    assert unified >= OF_UNIFIED and not unified & (OF_QUERIES | OF_DOCUMENTS)


@pytest.mark.parametrize("step", SMALL, ids=str)
@pytest.mark.parametrize("backward", ["lowmem", "unified"])
def test_normalize_copies_nothing(step, backward):
    """Only our kernels run (and the zeros that `unified` adds to), and no memory has the size of an input."""
    x = step.inputs()
    plain, normalized = (make_step(*x, normalize=normalize, backward=backward) for normalize in (False, True))
    others = [name for name in kernels(normalized) if not name.startswith("maxsim_")]
    if backward == "unified":
        others = [name for name in others if "Fill" not in name and "Memset" not in name]
    assert not others
    assert peak_bytes(normalized) <= peak_bytes(plain) + x[0].nbytes // 2


@pytest.mark.parametrize("step", SMALL, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
def test_a_frozen_side_costs_no_kernel(step, normalize):
    x = step.inputs()
    of_Q, of_D = (set(kernels(make_step(*x, needs, normalize=normalize, backward="lowmem"))) for needs in "QD")
    assert of_Q & OF_QUERIES and not of_Q & (OF_DOCUMENTS | {"maxsim_row_norms"})
    assert of_D & OF_DOCUMENTS and not of_D & OF_QUERIES
    finished = [
        kernels(make_step(*x, needs, normalize=normalize, backward="unified")).count("maxsim_finish")
        for needs in ("QD", "Q", "D")
    ]
    assert finished == [2, 1, 1]


@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize("backward", ["lowmem", "unified"])
def test_a_frozen_side_costs_no_buffer(step, backward):
    x = step.inputs()
    both, of_Q, of_D = (allocated_bytes(make_step(*x, needs, backward=backward)) for needs in ("QD", "Q", "D"))
    # `unified` needs fp32 sums in addition to a gradient.
    least = 1 if backward == "lowmem" else 3
    assert both - of_Q >= 0.95 * least * x[1].nbytes
    assert both - of_D >= 0.95 * least * x[0].nbytes


@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize("options", ["plain", "normalize", "masks and weights"])
@pytest.mark.parametrize("recompute", [False, True])
def test_step_memory_is_bounded_by_outputs_plus_constant(step, options, recompute):
    Q, D, upstream = step.inputs()
    given: dict = {"normalize": options == "normalize", "recompute": recompute}
    own = Q.nbytes + D.nbytes + (4 * step.Nq * step.Nd if recompute else step.kept_bytes)
    if options == "masks and weights":
        given["q_mask"], given["d_mask"] = (torch.rand(t.shape[:-1], device="cuda") < 0.9 for t in (Q, D))
        given["q_weight"] = torch.rand(Q.shape[:-1], device="cuda").requires_grad_()
        own += given["q_weight"].nbytes
    peak = peak_bytes(make_step(Q, D, upstream, **given))
    assert peak <= 1.05 * own + CONSTANT, f"{peak / MiB:.1f} MiB, {own / MiB:.1f} of them outputs and winners"
